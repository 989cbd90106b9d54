"""The ClickHouse source against a real ClickHouse: names and keys of tables, partitions and columns."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.errors import Invalid
from lockstep.source.clickhouse_types import quote_name
from tests.clickhouse_lab import Chdb, columns_of, ids, read_all, us

pytestmark = pytest.mark.servers


# Names


HOSTILE = [
    'quote"s',
    "back`tick",
    "it's",
    "dot.ted",
    "emoji 🎈",
    "x'; DROP TABLE shop.t; --",
    "back\\slash",
    "per%cent %2F",
    "new\nline",
    "{braces:Int8}",
    "slash/ed",
    "c0",
    "n",
    "ORDER BY",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_of_tables_and_columns_work(chdb: Chdb, table: Any, pinned: Any, name: str) -> None:
    quoted = quote_name(name)
    table(
        f"id UInt32, {quoted} Nullable(DateTime), c1 String DEFAULT 'x'",
        f"ORDER BY (id, {quoted}) SETTINGS allow_nullable_key = 1",
        name,
    )
    chdb.run(f"INSERT INTO shop.{quoted} (id, {quoted}) VALUES (7, 1), (8, NULL)")
    source = chdb.source(name)
    columns = columns_of(source)
    pin = pinned(source)
    moment = us("1970-01-01T00:00:01")
    assert read_all(source, pin, columns).sort_by("id").to_pylist() == [
        {"id": 7, name: moment, "c1": "x"},
        {"id": 8, name: None, "c1": "x"},
    ]
    assert source.bounds(pin, columns[:2]).to_pylist() == [
        {"id": 7, name: moment},
        {"id": 8, name: moment},
        {"id": 7, name: None},
    ]
    assert [f.column for f in source.describe().sorting] == ["id", name]


def test_a_hostile_database_holds_its_own_pins(chdb: Chdb, pinned: Any) -> None:
    database = "da`ta.base '; 🎈"
    chdb.run(f"CREATE DATABASE {quote_name(database)}")
    chdb.run(f"CREATE TABLE {quote_name(database)}.t (id UInt32) ENGINE = MergeTree ORDER BY id")
    chdb.run(f"INSERT INTO {quote_name(database)}.t VALUES (1)")
    source = chdb.source("t", database)
    assert ids(read_all(source, pinned(source))) == [1]


def test_columns_named_like_our_own_words_do_not_shadow_each_other(
    chdb: Chdb, table: Any, pinned: Any
) -> None:
    name = table("c1 UInt32, c0 DateTime, part UInt8, n UInt8", "ORDER BY c1")
    chdb.run(f"INSERT INTO shop.{name} VALUES (5, 1, 2, 3)")
    source = chdb.source(name)
    assert read_all(source, pinned(source)).to_pylist() == [
        {"c1": 5, "c0": us("1970-01-01T00:00:01"), "part": 2, "n": 3}
    ]


def test_a_column_that_hides_the_offset_in_the_part_is_refused(chdb: Chdb, table: Any) -> None:
    with pytest.raises(Invalid, match="_part_offset"):
        chdb.source(table("id UInt32, _part_offset UInt64")).describe()


# Keys


@pytest.mark.parametrize(
    ("columns", "key", "expected"),
    [
        ("d Date", "d", [("d", "identity")]),
        ("d Date", "toYYYYMM(d)", [("d", "month")]),
        ("d Date", "(toYear(d), toStartOfMonth(d))", [("d", "year"), ("d", "month")]),
        ("d DateTime('UTC')", "toYYYYMMDD(d)", [("d", "day")]),
        ("d DateTime", "(toDate(d), toStartOfHour(d))", [("d", "day"), ("d", "hour")]),
        ("d DateTime('Asia/Tokyo')", "toYYYYMM(d, 'UTC')", [("d", "month")]),
        ("d DateTime('Asia/Tokyo')", "toYYYYMM(d)", None),
        ("d DateTime64(9)", "toYYYYMM(d)", None),
        ("d String", "icebergBucket(16, d)", [("d", "bucket[16]")]),
        ("d Int32", "icebergTruncate(10, d)", [("d", "truncate[10]")]),
        ("d UInt64", "icebergBucket(16, d)", None),
        ("d Int32", "d % 10", None),
        ("d Int32", "cityHash64(d)", None),
        ("d UInt256", "d", None),
        ("`a, b` Int8, d Enum8('x' = 1)", "(`a, b`, d)", [("a, b", "identity"), ("d", "identity")]),
        ("d Int32", "tuple()", []),
    ],
)
def test_a_partition_key_is_told_exactly_or_not_at_all(
    chdb: Chdb, table: Any, columns: str, key: str, expected: list[tuple[str, str]] | None
) -> None:
    described = chdb.source(table(columns, f"PARTITION BY {key} ORDER BY tuple()")).describe()
    found = described.partitioning
    assert (None if found is None else [(one.column, one.transform) for one in found]) == expected
    if expected is None:
        assert key.split("(")[0].split(" ")[0] in described.partition_key
    if "Tokyo" in columns and expected is None:
        assert "Asia/Tokyo" in described.partition_key


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("(a, b)", [("a", False), ("b", False)]),
        ("(a, toDate(t), b)", [("a", False)]),
        ("(a, e, b)", [("a", False)]),
        ("(u, a)", []),
        ("(a DESC, b) SETTINGS allow_experimental_reverse_key = 1", [("a", True), ("b", False)]),
        ("tuple()", []),
    ],
)
def test_the_sort_order_is_the_prefix_that_iceberg_sorts_alike(
    chdb: Chdb, table: Any, order: str, expected: list[tuple[str, bool]]
) -> None:
    name = table("a Int32, b String, t DateTime, e Enum8('z' = 1, 'y' = 2), u UUID", f"ORDER BY {order}")
    assert [(one.column, one.descending) for one in chdb.source(name).describe().sorting] == expected


def test_null_comes_last_in_an_ascending_key_and_first_in_a_descending_one(
    chdb: Chdb, table: Any, pinned: Any
) -> None:
    for order in ("id", "id DESC"):
        name = table(
            "id Nullable(Int32)",
            f"ORDER BY ({order}) SETTINGS allow_nullable_key = 1, allow_experimental_reverse_key = 1",
        )
        chdb.run(f"INSERT INTO shop.{name} VALUES (2), (NULL), (1)")
        source = chdb.source(name)
        sorting = source.describe().sorting[0]
        values = read_all(source, pinned(source)).column("id").to_pylist()
        assert values == ([None, 2, 1] if sorting.descending else [1, 2, None])
        assert sorting.nulls_first == (values[0] is None)
