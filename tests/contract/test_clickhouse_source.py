"""The ClickHouse source against a real ClickHouse: types, motion, positions, damage."""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from lockstep.config import Config
from lockstep.errors import Corrupt, Invalid, LockstepError, Retryable
from lockstep.job import ColumnMap, Json, TaskSpec
from lockstep.schema import derive, match_columns
from lockstep.source import Chunk, Pin, open_source
from lockstep.source import clickhouse as room
from lockstep.source.clickhouse import ClickHouseSource
from lockstep.source.clickhouse_http import Server
from lockstep.source.clickhouse_types import quote_name
from tests.contract.conftest import Chdb

pytestmark = pytest.mark.servers

_numbers = count(1)


@pytest.fixture
def pinned() -> Iterator[Callable[..., Pin]]:
    """Pin, and give up at the end of the test."""
    held: list[tuple[ClickHouseSource, Json]] = []

    def pin(
        source: ClickHouseSource, partition: str = "all", parts: Sequence[str] | None = None, **options: Any
    ) -> Pin:
        made = source.pin(f"lockstep_pin_{next(_numbers)}", partition, parts, **options)
        held.append((source, made.detail))
        return made

    yield pin
    for source, detail in held:
        source.unpin(detail, 30)
        source.close()


@pytest.fixture
def table(chdb: Chdb) -> Iterator[Callable[..., str]]:
    """Create a table in `shop`; dropped at the end of the test."""
    made: list[str] = []

    def create(columns: str, tail: str = "ORDER BY tuple()", name: str | None = None) -> str:
        name = name or f"t{next(_numbers)}"
        made.append(name)
        chdb.run(f"CREATE TABLE shop.{quote_name(name)} ({columns}) ENGINE = MergeTree {tail}")
        return name

    yield create
    for name in made:
        chdb.drop(name)


def columns_of(source: ClickHouseSource, *, allow_lossy: bool = False) -> list[ColumnMap]:
    described = source.describe()
    schema, _, _ = derive(described, allow_lossy=allow_lossy)
    return match_columns(described, schema, allow_lossy=allow_lossy)


def read_all(
    source: ClickHouseSource, pin: Pin, columns: Sequence[ColumnMap] | None = None, **options: Any
) -> pa.Table:
    columns = columns_of(source) if columns is None else columns
    batches = [
        chunk.batch
        for task in source.plan_tasks(pin, options.get("task_bytes", 10**9))
        for chunk in read_task(source, pin, task, columns, **options)
    ]
    return pa.Table.from_batches(batches) if batches else pa.table({})


def read_task(
    source: ClickHouseSource,
    pin: Pin,
    task: TaskSpec,
    columns: Sequence[ColumnMap],
    position: Json | None = None,
    batch_bytes: int = 1_000_000,
    **_: Any,
) -> Iterator[Chunk]:
    return source.read(pin.detail, task.descriptor, position, columns, batch_bytes)


def ids(table: pa.Table) -> list[int]:
    return sorted(table.column("id").to_pylist()) if table.num_rows else []


# Types


def us(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


AN_ID = "00112233-4455-6677-8899-aabbccddeeff"
EXACT: list[tuple[str, str, Any, list[Any]]] = [
    ("Bool", "true, false", "boolean", [True, False]),
    ("Int8", "-128, 127", "int", [-128, 127]),
    ("Int16", "-32768, 32767", "int", [-32768, 32767]),
    ("Int32", "-2147483648, 2147483647", "int", [-(2**31), 2**31 - 1]),
    ("Int64", "-9223372036854775808, 9223372036854775807", "long", [-(2**63), 2**63 - 1]),
    ("UInt8", "0, 255", "int", [0, 255]),
    ("UInt16", "0, 65535", "int", [0, 65535]),
    ("UInt32", "0, 4294967295", "long", [0, 2**32 - 1]),
    ("UInt64", "0, 18446744073709551615", "decimal(20, 0)", [Decimal(0), Decimal(2**64 - 1)]),
    ("Float32", "inf, -inf, -0.0, 1.5", "float", [math.inf, -math.inf, -0.0, 1.5]),
    ("Float64", "nan, inf, -inf, -0.0, 5e-324", "double", [math.nan, math.inf, -math.inf, -0.0, 5e-324]),
    ("BFloat16", "1.5, -0.25", "float", [1.5, -0.25]),
    ("Decimal(9, 2)", "'-9999999.99', '0.01'", "decimal(9, 2)", [Decimal("-9999999.99"), Decimal("0.01")]),
    (
        "Decimal(38, 10)",
        "'9999999999999999999999999999.9999999999'",
        "decimal(38, 10)",
        [Decimal("9999999999999999999999999999.9999999999")],
    ),
    ("String", "'', 'a\\0b', 'naïve 🎈'", "string", ["", "a\0b", "naïve 🎈"]),
    ("FixedString(4)", "'ab', '\\xff\\xfe'", "fixed[4]", [b"ab\0\0", b"\xff\xfe\0\0"]),
    ("UUID", f"'{AN_ID}', '{UUID(int=0)}'", "uuid", [UUID(AN_ID), UUID(int=0)]),
    ("Date", "'1970-01-01', '2149-06-06'", "date", [date(1970, 1, 1), date(2149, 6, 6)]),
    ("Date32", "'1900-01-01', '2299-12-31'", "date", [date(1900, 1, 1), date(2299, 12, 31)]),
    ("DateTime", "0, 4294967295", "timestamptz", [us("1970-01-01"), us("2106-02-07T06:28:15")]),
    ("DateTime('Asia/Tokyo')", "'2020-01-01 00:00:00'", "timestamptz", [us("2019-12-31T15:00:00")]),
    ("DateTime64(0, 'UTC')", "'2299-12-31 23:59:59'", "timestamptz", [us("2299-12-31T23:59:59")]),
    ("DateTime64(1, 'UTC')", "'1900-01-01 00:00:00.9'", "timestamptz", [us("1900-01-01T00:00:00.900000")]),
    ("DateTime64(3)", "'2024-02-29 01:02:03.456'", "timestamptz", [us("2024-02-29T01:02:03.456000")]),
    (
        "DateTime64(6, 'America/New_York')",
        "'2024-01-01 00:00:00.123456'",
        "timestamptz",
        [us("2024-01-01T05:00:00.123456")],
    ),
    (
        "DateTime64(6, 'UTC')",
        "'1900-01-01 00:00:00', '2299-12-31 23:59:59.999999'",
        "timestamptz",
        [us("1900-01-01"), us("2299-12-31T23:59:59.999999")],
    ),
    ("Enum8('a' = 1, 'it\\'s' = -2)", "'a', 'it\\'s'", "string", ["a", "it's"]),
    ("Enum16('x' = 1000)", "'x'", "string", ["x"]),
    ("IPv4", "'0.0.0.0', '255.1.2.3'", "string", ["0.0.0.0", "255.1.2.3"]),
    ("IPv6", "'::1', '2001:db8::ff', '1.2.3.4'", "string", ["::1", "2001:db8::ff", "::ffff:1.2.3.4"]),
    ("LowCardinality(String)", "'a', 'b', 'a', ''", "string", ["a", "b", "a", ""]),
    ("LowCardinality(Nullable(String))", "'a', NULL, ''", "string", ["a", None, ""]),
    ("LowCardinality(FixedString(2))", "'ab'", "fixed[2]", [b"ab"]),
    ("LowCardinality(UInt64)", "18446744073709551615", "decimal(20, 0)", [Decimal(2**64 - 1)]),
    ("LowCardinality(Nullable(DateTime))", "1, NULL", "timestamptz", [us("1970-01-01T00:00:01"), None]),
    ("LowCardinality(UUID)", f"'{AN_ID}'", "uuid", [UUID(AN_ID)]),
    ("Nullable(Int32)", "1, NULL", "int", [1, None]),
    ("Nullable(UInt64)", "NULL, 18446744073709551615", "decimal(20, 0)", [None, Decimal(2**64 - 1)]),
    ("Nullable(String)", "'', NULL", "string", ["", None]),
    ("Nullable(UUID)", f"NULL, '{AN_ID}', NULL", "uuid", [None, UUID(AN_ID), None]),
    ("Nullable(Enum8('a' = 1))", "'a', NULL", "string", ["a", None]),
    ("Nullable(IPv6)", "'::1', NULL", "string", ["::1", None]),
    ("Nullable(DateTime)", "NULL, 1", "timestamptz", [None, us("1970-01-01T00:00:01")]),
    ("Nullable(Float64)", "nan, NULL", "double", [math.nan, None]),
    ("SimpleAggregateFunction(sum, Int64)", "5", "long", [5]),
    ("Array(Nullable(Int64))", "[1, NULL], []", "list", [[1, None], []]),
    ("Array(UUID)", f"['{AN_ID}'], []", "list", [[UUID(AN_ID).bytes], []]),
    ("Array(Nullable(UUID))", f"[NULL, '{AN_ID}']", "list", [[None, UUID(AN_ID).bytes]]),
    ("Array(Array(LowCardinality(String)))", "[['a'], []], []", "list", [[["a"], []], []]),
    ("Array(Enum8('a' = 1))", "['a', 'a']", "list", [["a", "a"]]),
    ("Array(UInt64)", "[18446744073709551615]", "list", [[Decimal(2**64 - 1)]]),
    ("Array(DateTime)", "[toDateTime(1)]", "list", [[us("1970-01-01T00:00:01")]]),
    ("Map(String, UInt64)", "map('a', 1), map()", "map", [[("a", Decimal(1))], []]),
    (
        "Map(LowCardinality(String), Array(UUID))",
        f"map('k', ['{AN_ID}'])",
        "map",
        [[("k", [UUID(AN_ID).bytes])]],
    ),
    (
        "Map(String, Nullable(IPv4))",
        "map('k', NULL, 'l', '1.2.3.4')",
        "map",
        [[("k", None), ("l", "1.2.3.4")]],
    ),
    (
        "Tuple(a Nullable(DateTime), `b c` IPv6, `d\\`e` UUID)",
        f"(NULL, '::1', '{AN_ID}')",
        "struct",
        [{"a": None, "b c": "::1", "d`e": UUID(AN_ID).bytes}],
    ),
    ("Tuple(Int8, String)", "(1, 'x')", "struct", [{"1": 1, "2": "x"}]),
    (
        "Array(Tuple(x UInt64, y DateTime64(3)))",
        "[(1, '1970-01-01 00:00:00.001')]",
        "list",
        [[{"x": Decimal(1), "y": us("1970-01-01T00:00:00.001000")}]],
    ),
    (
        "Nullable(Tuple(a Int8, u UUID))",
        f"NULL, (1, '{AN_ID}')",
        "struct",
        [None, {"a": 1, "u": UUID(AN_ID).bytes}],
    ),
    ("Point", "(1, 2)", "struct", [{"1": 1.0, "2": 2.0}]),
    ("Polygon", "[[(1, 2)]]", "list", [[[{"1": 1.0, "2": 2.0}]]]),
]


def plain(value: Any) -> Any:
    """Values as text, so that NaN equals NaN, -0.0 differs from 0.0, and a UUID is its bytes."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, tuple):
        return tuple(plain(one) for one in value)
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, UUID):
        return repr(value.bytes)
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    return repr(value)


@pytest.mark.parametrize(("kind", "values", "iceberg", "expected"), EXACT, ids=[row[0] for row in EXACT])
def test_every_value_of_a_mapped_type_arrives_exactly(
    chdb: Chdb, table: Any, pinned: Any, kind: str, values: str, iceberg: str, expected: list[Any]
) -> None:
    name = table(f"id UInt32, v {kind}", "ORDER BY id")
    if kind.startswith(("Map", "Tuple", "Nullable(Tuple", "Point", "Polygon", "Array")):
        rows = ", ".join(f"({i}, {one})" for i, one in enumerate(_split(values)))
    else:
        rows = ", ".join(f"({i}, {one})" for i, one in enumerate(values.split(", ")))
    chdb.run(f"INSERT INTO shop.{name} VALUES {rows}")
    source = chdb.source(name)
    mapped = source.describe().columns[1]
    assert mapped.problem is None
    assert (mapped.type["type"] if isinstance(mapped.type, dict) else mapped.type) == iceberg

    arrived = read_all(source, pinned(source)).sort_by("id")

    assert plain(arrived.column("v").to_pylist()) == plain(expected)


def _split(values: str) -> list[str]:
    """Cut a list of values at the commas outside brackets."""
    pieces, depth = [""], 0
    for char in values:
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += char
    return [piece.strip() for piece in pieces]


REFUSED = [
    ("Int128", "double", "digits"),
    ("UInt256", "double", "digits"),
    ("Decimal(76, 10)", "double", "38 digits"),
    ("DateTime64(9)", "timestamptz", "microseconds"),
    ("Time", None, "longer than a day"),
    ("Time64(3)", None, "longer than a day"),
    ("JSON", "string", "types of their own"),
    ("Dynamic", "string", "another type"),
    ("Variant(Int64, String)", "string", "another type"),
    ("AggregateFunction(sum, Int64)", None, "finalizeAggregation"),
    ("IntervalDay", "long", "intervals"),
    ("Geometry", None, "another shape"),
    ("QBit(Float32, 8)", None, "transposed"),
    ("Tuple()", None, "without fields"),
    ("Array(Int256)", "list", "contains Int256"),
    ("Map(String, Tuple(a Array(Time)))", None, "contains Time"),
]


@pytest.mark.parametrize(("kind", "lossy", "reason"), REFUSED, ids=[row[0] for row in REFUSED])
def test_a_type_without_an_exact_counterpart_is_refused_by_name(
    chdb: Chdb, table: Any, kind: str, lossy: str | None, reason: str
) -> None:
    source = chdb.source(table(f"id UInt32, amount {kind}", "ORDER BY id"))
    column = source.describe().columns[1]
    offered = column.lossy_type["type"] if isinstance(column.lossy_type, dict) else column.lossy_type
    assert (column.type, offered) == (None, lossy)
    with pytest.raises(Invalid) as refused:
        columns_of(source)
    assert '"amount"' in refused.value.message
    assert kind in refused.value.message
    assert reason in refused.value.message


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        ("Int128", "toInt128('170141183460469231731687303715884105727')", 2.0**127),
        ("Nullable(UInt256)", "NULL", None),
        ("Decimal(76, 10)", "'1.5'", 1.5),
        ("DateTime64(9, 'UTC')", "'2020-01-01 00:00:00.123456789'", us("2020-01-01T00:00:00.123456")),
        ("JSON", "'{\"a\":1}'", '{"a":1}'),
        ("Dynamic", "NULL", None),
        ("Variant(Int64, String)", "5::Int64", "5"),
        ("IntervalDay", "toIntervalDay(3)", 3),
        ("Array(Int256)", "[1]", [1.0]),
    ],
)
def test_an_allowed_loss_stores_what_was_offered(
    chdb: Chdb, table: Any, pinned: Any, kind: str, value: str, stored: Any
) -> None:
    name = table(f"id UInt32, v {kind}", "ORDER BY id")
    chdb.run(f"INSERT INTO shop.{name} SELECT 1, CAST({value}, '{kind.replace(chr(39), chr(92) + chr(39))}')")
    source = chdb.source(name)
    arrived = read_all(source, pinned(source), columns_of(source, allow_lossy=True))
    assert plain(arrived.column("v").to_pylist()) == plain([stored])


def test_bytes_that_are_no_text_fail_naming_the_column(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = table("id UInt32, `raw bytes` String", "ORDER BY id")
    chdb.run(f"INSERT INTO shop.{name} VALUES (1, 'fine'), (2, '\\xff\\xfe')")
    source = chdb.source(name)
    with pytest.raises(Corrupt, match=r"raw bytes.*UTF-8"):
        read_all(source, pinned(source))


def test_bytes_that_are_no_text_fit_a_binary_target(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = table("id UInt32, raw String, l LowCardinality(String), a Array(String)", "ORDER BY id")
    chdb.run(f"INSERT INTO shop.{name} VALUES (1, '\\xff\\0', '\\xfe', ['\\xfd'])")
    source = chdb.source(name)
    described = source.describe()
    schema, _, _ = derive(described)
    schema["fields"][1]["type"] = schema["fields"][2]["type"] = "binary"
    schema["fields"][3]["type"]["element"] = "binary"
    arrived = read_all(source, pinned(source), match_columns(described, schema))
    assert arrived.to_pylist() == [{"id": 1, "raw": b"\xff\0", "l": b"\xfe", "a": [b"\xfd"]}]


def test_alias_and_ephemeral_columns_are_left_out_and_materialized_ones_are_read(
    chdb: Chdb, table: Any, pinned: Any
) -> None:
    name = table(
        "id UInt32, a Int8 ALIAS 1, e Int8 EPHEMERAL, m Int32 MATERIALIZED id * 2, n Nested(x Int8, y String)"
    )
    chdb.run(f"INSERT INTO shop.{name} (id, n.x, n.y) VALUES (4, [1], ['z'])")
    source = chdb.source(name)
    assert [column.name for column in source.describe().columns] == ["id", "m", "n.x", "n.y"]
    assert read_all(source, pinned(source)).to_pylist() == [{"id": 4, "m": 8, "n.x": [1], "n.y": ["z"]}]


def test_a_column_added_after_the_part_was_written_has_its_default(
    chdb: Chdb, table: Any, pinned: Any
) -> None:
    name = table("id UInt32", "ORDER BY id")
    chdb.run(f"INSERT INTO shop.{name} VALUES (1)")
    chdb.run(f"ALTER TABLE shop.{name} ADD COLUMN extra String DEFAULT concat('n', toString(id))")
    source = chdb.source(name)
    assert read_all(source, pinned(source)).to_pylist() == [{"id": 1, "extra": "n1"}]


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


# Partitions and pins


def three_parts(chdb: Chdb, table: Any) -> str:
    """Only OPTIMIZE … FINAL merges them."""
    lazy = "max_bytes_to_merge_at_max_space_in_pool = 1, max_bytes_to_merge_at_min_space_in_pool = 1"
    name: str = table("id UInt32, s String", f"ORDER BY id SETTINGS {lazy}")
    for i in range(3):
        chdb.run(f"INSERT INTO shop.{name} SELECT number + {i * 100}, 'x' FROM numbers(100)")
    return name


def test_partitions_show_their_parts_with_rows_and_blocks(chdb: Chdb, table: Any) -> None:
    name = table("id UInt32, d Date", "PARTITION BY toYYYYMM(d) ORDER BY id")
    chdb.run(f"INSERT INTO shop.{name} SELECT number, toDate('2024-01-31') + number % 2 FROM numbers(10)")
    january, february = chdb.source(name).partitions()
    assert (january.partition_id, january.label, january.rows) == ("202401", "202401", 5)
    assert february.partition_id == "202402"
    assert february.size_bytes > 0
    (part,) = january.parts
    assert part.piece.name == part.name
    assert part.piece.first == part.piece.last


def test_what_happens_to_the_source_after_the_pin_changes_nothing(
    chdb: Chdb, table: Any, pinned: Any
) -> None:
    name = three_parts(chdb, table)
    source = chdb.source(name)
    columns = columns_of(source)
    pin = pinned(source)
    tasks = source.plan_tasks(pin, 1)
    chdb.run(f"INSERT INTO shop.{name} VALUES (1000, 'late')")
    chdb.run(f"OPTIMIZE TABLE shop.{name} FINAL")
    chdb.run(f"ALTER TABLE shop.{name} UPDATE s = 'changed' WHERE 1")
    chdb.run(f"ALTER TABLE shop.{name} DELETE WHERE id < 50")
    chdb.run(f"DELETE FROM shop.{name} WHERE id < 150")
    chdb.run(f"ALTER TABLE shop.{name} DROP COLUMN s")
    chdb.run(f"DROP TABLE shop.{name} SYNC")
    arrived = pa.Table.from_batches(
        [chunk.batch for task in tasks for chunk in read_task(source, pin, task, columns)]
    )
    assert ids(arrived) == list(range(300))
    assert set(arrived.column("s").to_pylist()) == {"x"}


def test_the_frozen_copy_has_no_ttl_and_never_merges(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = table(
        "id UInt32, d DateTime, s String TTL d + INTERVAL 1 DAY, `t'l` String TTL d + INTERVAL 1 DAY",
        "ORDER BY id TTL d + INTERVAL 100 YEAR",
    )
    chdb.run(f"SYSTEM STOP MERGES shop.{name}")
    for i in range(2):
        chdb.run(f"INSERT INTO shop.{name} VALUES ({i}, now() - 30, 'keep', 'keep')")
    source = chdb.source(name)
    pin = pinned(source)
    frozen = f"shop.{pin.detail['table']}"
    statement = chdb.value(f"SHOW CREATE TABLE {frozen}")
    assert "TTL" not in statement
    # A restarted server has forgotten SYSTEM STOP MERGES: the settings of the copy must do alone.
    chdb.run(f"SYSTEM START MERGES {frozen}")
    chdb.run(f"OPTIMIZE TABLE {frozen}")
    assert read_all(source, pin).column("s").to_pylist() == ["keep", "keep"]


@pytest.mark.parametrize("engine", ["ReplacingMergeTree", "SummingMergeTree", "AggregatingMergeTree"])
def test_engines_that_merge_rows_are_frozen_into_a_plain_one(
    chdb: Chdb, table: Any, pinned: Any, engine: str
) -> None:
    name = f"t{next(_numbers)}"
    chdb.run(f"CREATE TABLE shop.{name} (id UInt32, n UInt64) ENGINE = {engine} ORDER BY id")
    chdb.run(f"SYSTEM STOP MERGES shop.{name}")
    chdb.run(f"INSERT INTO shop.{name} VALUES (1, 1)")
    chdb.run(f"INSERT INTO shop.{name} VALUES (1, 2)")
    source = chdb.source(name)
    pin = pinned(source)
    assert chdb.value(f"SELECT engine FROM system.tables WHERE name = '{pin.detail['table']}'") == "MergeTree"
    assert ids(read_all(source, pin)) == [1, 1]
    chdb.drop(name)


def test_indices_projections_and_settings_do_not_hinder_the_freeze(
    chdb: Chdb, table: Any, pinned: Any
) -> None:
    name = table(
        "id UInt32, s String CODEC(ZSTD(3)), INDEX i s TYPE bloom_filter GRANULARITY 2,"
        " PROJECTION p (SELECT s, count() GROUP BY s), CONSTRAINT c CHECK id > 0",
        "PARTITION BY icebergTruncate(100, id) PRIMARY KEY id ORDER BY (id, s) SAMPLE BY id"
        " SETTINGS index_granularity = 64, index_granularity_bytes = 0, min_bytes_for_wide_part = 0",
    )
    chdb.run(f"INSERT INTO shop.{name} SELECT number + 1, 'x' FROM numbers(50)")
    source = chdb.source(name)
    assert ids(read_all(source, pinned(source, "0"))) == list(range(1, 51))


def test_deleted_rows_are_neither_counted_nor_read(
    chdb: Chdb, table: Any, pinned: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(room, "RANGE_BYTES", 200_000)
    name = table("id UInt32", "ORDER BY id")
    chdb.run(f"INSERT INTO shop.{name} SELECT number FROM numbers(100000)")
    chdb.run(f"DELETE FROM shop.{name} WHERE id % 2 = 0 OR id BETWEEN 40000 AND 70000")
    source = chdb.source(name)
    pin = pinned(source)
    alive = [i for i in range(100000) if i % 2 and not 40000 <= i <= 70000]
    tasks = source.plan_tasks(pin, 100_000)
    assert len(tasks) > 2
    assert pin.rows == sum(task.rows for task in tasks) == source.partitions()[0].rows == len(alive)
    assert ids(read_all(source, pin, task_bytes=100_000)) == alive


def test_a_partition_whose_rows_are_all_deleted_is_empty(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = table("id UInt32", "ORDER BY id")
    chdb.run(f"INSERT INTO shop.{name} VALUES (1)")
    chdb.run(f"DELETE FROM shop.{name} WHERE 1")
    source = chdb.source(name)
    pin = pinned(source)
    columns = columns_of(source)
    (task,) = source.plan_tasks(pin, 1000)
    assert (pin.rows, task.rows) == (0, 0)
    assert list(read_task(source, pin, task, columns)) == []
    assert source.bounds(pin, columns).num_rows == 0


def test_only_the_wanted_parts_are_pinned_under_their_own_names(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = three_parts(chdb, table)
    # Mutations and merges make block numbers of the source differ from those of a fresh copy.
    chdb.run(f"ALTER TABLE shop.{name} DELETE WHERE id = 5")
    source = chdb.source(name)
    first, second, third = source.partitions()[0].parts
    pin = pinned(source, "all", [third.name, first.name])
    assert [part.name for part in pin.parts] == [first.name, third.name]
    assert [part.piece for part in pin.parts] == [first.piece, third.piece]
    assert pin.rows == chdb.value(f"SELECT count() FROM shop.{pin.detail['table']}") == 199
    assert ids(read_all(source, pin)) == [i for i in [*range(100), *range(200, 300)] if i != 5]
    assert second.name not in {part["source"] for part in pin.detail["parts"]}


def test_parts_with_the_same_rows_are_told_apart(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = table("id UInt32", "ORDER BY id")
    chdb.run(f"SYSTEM STOP MERGES shop.{name}")
    for _ in range(3):
        chdb.run(f"INSERT INTO shop.{name} VALUES (1)")
    source = chdb.source(name)
    parts = source.partitions()[0].parts
    pin = pinned(source, "all", [parts[1].name])
    assert [part.piece for part in pin.parts] == [parts[1].piece]
    assert ids(read_all(source, pin)) == [1]
    assert [part.piece for part in pinned(source).parts] == [part.piece for part in parts]


def test_a_pin_amid_inserts_and_merges_holds_exactly_the_rows_of_its_parts(
    chdb: Chdb, table: Any, pinned: Any
) -> None:
    name = table("id UInt32", "ORDER BY id")
    chdb.run(f"INSERT INTO shop.{name} SELECT 0 FROM numbers(10)")
    enough = threading.Event()

    def write() -> None:
        writer = Chdb(chdb.folder, Server(chdb.endpoint), chdb.config)
        number = 0
        while not enough.is_set():
            number += 1
            writer.run(f"INSERT INTO shop.{name} SELECT {number} FROM numbers(10)")
            if number % 3 == 0:
                writer.run(f"OPTIMIZE TABLE shop.{name} FINAL")
        writer.server.close()

    motion = threading.Thread(target=write)
    motion.start()
    try:
        source = chdb.source(name)
        columns = columns_of(source)
        for _ in range(8):
            pin = pinned(source)
            values = ids(read_all(source, pin, columns))
            blocks = {b for part in pin.parts for b in range(part.piece.first, part.piece.last + 1)}
            # Every insert is one block of ten rows: what was read is what the pieces say.
            assert len(values) == pin.rows == 10 * len(blocks)
            assert values == sorted(10 * list(range(len(blocks))))
    finally:
        enough.set()
        motion.join()


def test_pins_go_into_the_configured_database(chdb: Chdb, table: Any) -> None:
    chdb.run("CREATE DATABASE IF NOT EXISTS pins")
    name = three_parts(chdb, table)
    config = Config(chdb.config.root, "", {}, {}, {}, clickhouse={"pin_database": "pins"})
    source = ClickHouseSource(f"chdb:{chdb.folder}/shop/{name}", config)
    pin = source.pin("mine", "all", None)
    assert chdb.tables("pins") == {"mine"}
    assert ids(read_all(source, pin)) == list(range(300))
    source.unpin(pin.detail, 30)
    source.unpin(pin.detail, 30)
    assert chdb.tables("pins") == set()


@pytest.mark.parametrize(
    ("partition", "parts", "said"),
    [
        ("202499", None, "no partition"),
        ("all", ["all_77_77_0"], "all_77_77_0"),
        ("x' OR 1 --", None, "no partition"),
    ],
)
def test_an_unknown_partition_or_part_leaves_nothing_pinned(
    chdb: Chdb, table: Any, partition: str, parts: list[str] | None, said: str
) -> None:
    source = chdb.source(three_parts(chdb, table))
    before = chdb.tables()
    with pytest.raises(Invalid, match=said):
        source.pin("never", partition, parts)
    assert chdb.tables() == before


def test_a_failure_after_the_copy_was_made_drops_it(chdb: Chdb, table: Any, monkeypatch: Any) -> None:
    source = chdb.source(three_parts(chdb, table))
    before = chdb.tables()

    def break_down(*_: Any) -> Any:
        assert chdb.tables() != before
        raise Retryable("cut")

    monkeypatch.setattr(room, "visible_rows", break_down)
    with pytest.raises(Retryable):
        source.pin("half", "all", None)
    assert chdb.tables() == before


def test_patches_that_are_not_in_the_parts_are_refused(chdb: Chdb, table: Any) -> None:
    name = table(
        "id UInt32, s String",
        "ORDER BY id SETTINGS enable_block_number_column = 1, enable_block_offset_column = 1",
    )
    chdb.run(f"INSERT INTO shop.{name} VALUES (1, 'x'), (2, 'x')")
    chdb.run(f"UPDATE shop.{name} SET s = 'y' WHERE id = 1")
    source = chdb.source(name)
    before = chdb.tables()
    for frozen in (True, False):
        with pytest.raises(Invalid, match="patch") as refused:
            source.pin("never", "all", None, frozen=frozen)
        assert "APPLY PATCHES" in (refused.value.hint or "")
    assert chdb.tables() == before
    assert [partition.partition_id for partition in source.partitions()] == ["all"]


def test_patches_of_another_partition_do_not_matter(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = table(
        "id UInt32, p UInt8, q UInt8, s String",
        "PARTITION BY (p, q) ORDER BY id"
        " SETTINGS enable_block_number_column = 1, enable_block_offset_column = 1",
    )
    chdb.run(f"INSERT INTO shop.{name} VALUES (1, 1, 1, 'x'), (2, 2, 1, 'x')")
    chdb.run(f"UPDATE shop.{name} SET s = 'y' WHERE p = 2")
    source = chdb.source(name)
    assert ids(read_all(source, pinned(source, "1-1"))) == [1]
    with pytest.raises(Invalid, match="patch"):
        source.pin("never", "2-1", None)


def test_a_rename_that_is_still_running_is_refused(chdb: Chdb, table: Any) -> None:
    name = three_parts(chdb, table)
    chdb.run(f"SYSTEM STOP MERGES shop.{name}")
    chdb.run(f"ALTER TABLE shop.{name} RENAME COLUMN s TO renamed", mutations_sync=0, alter_sync=0)
    with pytest.raises(Invalid, match="RENAME COLUMN"):
        chdb.source(name).pin("never", "all", None)
    chdb.run(f"SYSTEM START MERGES shop.{name}")


# No pin


def test_without_a_pin_the_parts_are_read_by_name(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = three_parts(chdb, table)
    source = chdb.source(name)
    before = chdb.tables()
    part = source.partitions()[0].parts[1]
    pin = pinned(source, "all", [part.name], frozen=False)
    chdb.run(f"INSERT INTO shop.{name} VALUES (1000, 'late')")
    assert chdb.tables() == before
    assert ids(read_all(source, pin)) == list(range(100, 200))


def test_without_a_pin_a_part_that_has_gone_is_named(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = three_parts(chdb, table)
    source = chdb.source(name)
    part = source.partitions()[0].parts[0]
    pin = pinned(source, "all", None, frozen=False)
    chdb.run(f"OPTIMIZE TABLE shop.{name} FINAL")
    with pytest.raises(Corrupt, match=f"{part.name}.*gone"):
        read_all(source, pin)


# Values in a pin


def test_bounds_and_distinct_rows_are_in_target_types(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = table(
        "id UInt64, e Enum8('z' = 1, 'a' = 2), n Nullable(DateTime), f FixedString(2)", "ORDER BY id"
    )
    chdb.run(f"INSERT INTO shop.{name} VALUES (1, 'z', 5, 'ab'), (9, 'a', NULL, 'ab'), (1, 'z', 5, 'ab')")
    source = chdb.source(name)
    columns = columns_of(source)
    pin = pinned(source)
    five = us("1970-01-01T00:00:05")
    assert source.bounds(pin, columns).to_pylist() == [
        {"id": Decimal(1), "e": "z", "n": five, "f": b"ab"},
        {"id": Decimal(9), "e": "a", "n": five, "f": b"ab"},
        {"id": Decimal(1), "e": "z", "n": None, "f": b"ab"},
    ]
    distinct = pa.Table.from_batches(list(source.distinct_rows(pin, columns[:3])))
    assert {(row["e"], row["n"]) for row in distinct.to_pylist()} == {("z", five), ("a", None)}


def test_bounds_see_only_the_pinned_parts(chdb: Chdb, table: Any, pinned: Any) -> None:
    source = chdb.source(three_parts(chdb, table))
    part = source.partitions()[0].parts[1]
    for frozen in (True, False):
        pin = pinned(source, "all", [part.name], frozen=frozen)
        columns = columns_of(source)[:1]
        assert source.bounds(pin, columns).column("id").to_pylist() == [100, 199]


# Tasks and positions


def large(chdb: Chdb, table: Any, rows: int = 200_000) -> str:
    name: str = table("id UInt32, s String", "ORDER BY id")
    chdb.run(f"SYSTEM STOP MERGES shop.{name}")
    chdb.run(
        f"INSERT INTO shop.{name} SELECT number, repeat('x', 100) FROM numbers({rows})",
        max_insert_block_size=rows,
    )
    for i in range(3):
        chdb.run(f"INSERT INTO shop.{name} SELECT {rows} + number + {i * 10}, 'y' FROM numbers(10)")
    return name


def test_a_large_part_makes_several_tasks_and_small_ones_share_one(
    chdb: Chdb, table: Any, pinned: Any
) -> None:
    source = chdb.source(large(chdb, table))
    pin = pinned(source)
    tasks = source.plan_tasks(pin, 5_000_000)
    assert tasks == source.plan_tasks(pin, 5_000_000)
    segments = [segment for task in tasks for segment in task.descriptor["segments"]]
    big = segments[0][0]
    assert len({segment[0] for segment in segments}) == 4
    cuts = [segment for segment in segments if segment[0] == big]
    assert len(cuts) > 3
    assert all(start % 8192 == 0 for _, start, _, _ in cuts)
    assert [start for _, start, _, _ in cuts[1:]] == [end for _, _, end, _ in cuts[:-1]]
    assert len(tasks[-1].descriptor["segments"]) > 2
    assert all(task.size_bytes <= 6_000_000 for task in tasks)
    assert ids(read_all(source, pin, task_bytes=5_000_000)) == list(range(200_030))


def test_going_on_from_every_position_gives_exactly_the_rest(
    chdb: Chdb, table: Any, pinned: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(room, "RANGE_BYTES", 3_000_000)
    source = chdb.source(large(chdb, table))
    columns = columns_of(source)
    pin = pinned(source)
    (task,) = source.plan_tasks(pin, 10**9)
    chunks = list(read_task(source, pin, task, columns, batch_bytes=500_000))
    positions = [chunk.position for chunk in chunks]
    assert positions[-1] is not None
    assert positions.count(None) > 5
    assert len([one for one in positions if one]) > 7
    for i, position in enumerate(positions):
        if position is None:
            continue
        before = [chunk.batch for chunk in chunks[: i + 1]]
        rest = [chunk.batch for chunk in read_task(source, pin, task, columns, position)]
        assert ids(pa.Table.from_batches(before + rest)) == list(range(200_030))
        if i == len(positions) - 1:
            assert rest == []


def test_a_batch_stays_near_its_bytes_whatever_the_rows_weigh(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = table("id UInt32, s String", "ORDER BY id")
    chdb.run(f"INSERT INTO shop.{name} SELECT number, repeat('x', 1000000) FROM numbers(60)")
    chdb.run(f"INSERT INTO shop.{name} SELECT 60 + number, '' FROM numbers(40)")
    source = chdb.source(name)
    columns = columns_of(source)
    pin = pinned(source)
    (task,) = source.plan_tasks(pin, 10**9)
    chunks = list(read_task(source, pin, task, columns, batch_bytes=4_000_000))
    assert max(chunk.batch.nbytes for chunk in chunks) <= 8_000_000
    assert ids(pa.Table.from_batches([chunk.batch for chunk in chunks])) == list(range(100))


def test_a_run_of_heavy_rows_amid_light_ones_makes_no_large_batch(
    chdb: Chdb, table: Any, pinned: Any
) -> None:
    name = table("id UInt32, s String", "ORDER BY id")
    chdb.run(f"INSERT INTO shop.{name} SELECT number, 'x' FROM numbers(100000)")
    chdb.run(
        f"INSERT INTO shop.{name} SELECT 100000 + number, repeat('y', 200000) FROM numbers(400)",
        max_block_size=50,
    )
    chdb.run(f"OPTIMIZE TABLE shop.{name} FINAL")
    source = chdb.source(name)
    columns = columns_of(source)
    pin = pinned(source)
    assert [part["heavy_rows"] for part in pin.detail["parts"]] == [True]
    (task,) = source.plan_tasks(pin, 10**9)
    arrived = 0
    for chunk in read_task(source, pin, task, columns, batch_bytes=4_000_000):
        assert chunk.batch.nbytes <= 4_000_000
        # What a batch was cut from is what memory held.
        assert chunk.batch.column("s").buffers()[2].size <= 30_000_000
        arrived += chunk.batch.num_rows
    assert arrived == 100_400


def test_a_range_is_found_without_scanning_the_part(chdb: Chdb, table: Any, pinned: Any) -> None:
    source = chdb.source(large(chdb, table))
    pin = pinned(source)
    big = pin.detail["parts"][0]
    explained = chdb.server.values(
        f"EXPLAIN indexes = 1 SELECT id FROM shop.{pin.detail['table']}"
        f"{room._range(big['name'], 196_608, 200_000)}"
    )
    granules = [line[0].split("Granules:")[1].strip() for line in explained if "Granules:" in line[0]]
    read, total = granules[-1].split("/")
    assert int(read) <= 3 < int(total)


# Damage and outages


def _damage(chdb: Chdb, pin: Pin, part: Json) -> None:
    # ClickHouse tries every single bit before it reports a wrong checksum: quick in a small block only.
    path = chdb.value(
        f"SELECT path FROM system.parts WHERE table = '{pin.detail['table']}'"
        f" AND name = '{part['name']}' AND active"
    )
    data = next(one for one in Path(path).iterdir() if one.name in {"data.bin", "s.bin"})
    content = bytearray(data.read_bytes())
    for at in range(len(content) // 2, len(content) // 2 + 64):
        content[at] ^= 0xFF
    data.write_bytes(bytes(content))


def test_a_damaged_part_is_corrupt_and_named(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = table("id UInt32, s String", "ORDER BY id")
    chdb.run(f"SYSTEM STOP MERGES shop.{name}")
    for i in range(2):
        chdb.run(f"INSERT INTO shop.{name} SELECT number, randomString(1) FROM numbers({i + 2000})")
    source = chdb.source(name)
    schema, _, _ = derive(source.describe())
    schema["fields"][1]["type"] = "binary"
    columns = match_columns(source.describe(), schema)
    pin = pinned(source)
    _damage(chdb, pin, pin.detail["parts"][1])
    with pytest.raises(Corrupt, match=pin.parts[1].name):
        read_all(source, pin, columns)


def test_an_error_in_the_middle_of_the_answer_is_told_in_its_own_words(
    chdb: Chdb, table: Any, pinned: Any
) -> None:
    name = table("id UInt32", "ORDER BY id")
    chdb.run(f"INSERT INTO shop.{name} SELECT number FROM numbers(500000)")
    chdb.run(f"ALTER TABLE shop.{name} ADD COLUMN late UInt8 DEFAULT throwIf(id = 450000, 'halt at 450000')")
    source = chdb.source(name)
    columns = columns_of(source)
    pin = pinned(source)
    (task,) = source.plan_tasks(pin, 10**9)
    arrived: list[Chunk] = []
    with pytest.raises(Retryable, match="halt at 450000"):
        arrived.extend(read_task(source, pin, task, columns, batch_bytes=100_000))
    assert all(chunk.position is None for chunk in arrived)
    assert sum(chunk.batch.num_rows for chunk in arrived) < 500_000


def test_a_table_that_is_in_the_way_of_a_pin_is_left_alone(chdb: Chdb, table: Any) -> None:
    source = chdb.source(three_parts(chdb, table))
    taken = table("id UInt32")
    chdb.run(f"INSERT INTO shop.{taken} VALUES (1)")
    with pytest.raises(LockstepError, match=taken):
        source.pin(taken, "all", None)
    assert chdb.value(f"SELECT count() FROM shop.{taken}") == 1


def test_rows_that_went_missing_from_a_frozen_copy_are_noticed(chdb: Chdb, table: Any, pinned: Any) -> None:
    source = chdb.source(three_parts(chdb, table))
    columns = columns_of(source)
    pin = pinned(source)
    chdb.run(f"SYSTEM START MERGES shop.{pin.detail['table']}")
    chdb.run(f"DELETE FROM shop.{pin.detail['table']} WHERE id = 150")
    with pytest.raises(Corrupt, match=pin.parts[0].name):
        read_all(source, pin, columns)


def test_a_frozen_copy_that_is_gone_is_corrupt(chdb: Chdb, table: Any, pinned: Any) -> None:
    source = chdb.source(three_parts(chdb, table))
    columns = columns_of(source)
    pin = pinned(source)
    chdb.drop(pin.detail["table"])
    with pytest.raises(Corrupt, match=r"frozen copy .* is gone"):
        read_all(source, pin, columns)


def test_the_job_goes_on_after_the_embedded_server_was_killed(tmp_path: Path) -> None:
    from lockstep.source.chdb_launch import Room, connect

    folder = tmp_path / "data"
    connect(folder, create=True)
    other = Chdb(folder, Server(lambda: _endpoint(folder)), Config(tmp_path, "", {}, {}, {}))
    other.run("CREATE DATABASE shop")
    other.run("CREATE TABLE shop.t (id UInt32) ENGINE = MergeTree ORDER BY id")
    for i in range(4):
        other.run(f"INSERT INTO shop.t VALUES ({i})")
    source = other.source("t")
    columns = columns_of(source)
    pin = source.pin("frozen", "all", None)
    (task,) = source.plan_tasks(pin, 10**9)
    chunks = read_task(source, pin, task, columns)
    first = next(chunks)
    card = Room(folder).read_card()
    assert card is not None
    os.kill(card.pid, 9)
    rest = list(chunks)
    assert ids(pa.Table.from_batches([first.batch, *(chunk.batch for chunk in rest)])) == [0, 1, 2, 3]
    again = list(read_task(source, pin, task, columns, first.position))
    assert [chunk.position for chunk in again] == [chunk.position for chunk in rest]
    source.unpin(pin.detail, 30)
    other.stop()


def _endpoint(folder: Path) -> Any:
    from lockstep.source.chdb_launch import connect
    from lockstep.source.clickhouse_http import Endpoint

    found = connect(folder)
    return Endpoint(found.host, found.port, found.user, found.password)


def _address(chdb: Chdb, table: str = "t", database: str = "shop", **changes: Any) -> str:
    found = chdb.endpoint()
    user, password = changes.get("user", found.user), changes.get("password", found.password)
    return f"clickhouse://{user}:{password}@{found.host}:{changes.get('port', found.port)}/{database}/{table}"


def test_the_same_table_is_read_over_its_http_address(chdb: Chdb, table: Any, pinned: Any) -> None:
    source = open_source(_address(chdb, three_parts(chdb, table)), chdb.config)
    assert isinstance(source, ClickHouseSource)
    assert ids(read_all(source, pinned(source))) == list(range(300))
    assert chdb.endpoint().password not in repr(source.describe())


def test_a_wrong_password_is_invalid_and_not_repeated_to_the_user(chdb: Chdb) -> None:
    source = ClickHouseSource(_address(chdb, password="guess-me"), chdb.config)
    with pytest.raises(Invalid, match="login") as refused:
        source.describe()
    assert "guess-me" not in str(refused.value)
    assert refused.value.hint


def test_an_unknown_table_or_database_is_invalid_and_says_what_is_there(chdb: Chdb, table: Any) -> None:
    name = table("id UInt32")
    with pytest.raises(Invalid, match=r"no table shop\.nothing") as refused:
        chdb.source("nothing").describe()
    assert name in (refused.value.hint or "")
    with pytest.raises(Invalid) as refused:
        chdb.source("t", "nowhere").partitions()
    assert "shop" in (refused.value.hint or "")


def test_a_view_is_refused_because_it_has_no_parts(chdb: Chdb) -> None:
    chdb.run("CREATE VIEW shop.view AS SELECT 1 AS id")
    with pytest.raises(Invalid, match="View"):
        chdb.source("view").describe()
    chdb.run("DROP VIEW shop.view")


def test_a_server_that_is_not_there_is_retryable(chdb: Chdb) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        source = ClickHouseSource(_address(chdb, port=taken.getsockname()[1]), chdb.config)
        with pytest.raises(Retryable):
            source.describe()


def test_unpin_gives_up_in_time_when_the_server_hangs(chdb: Chdb) -> None:
    from lockstep.runtime import SYSTEM_CLOCK

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        source = ClickHouseSource(_address(chdb, port=silent.getsockname()[1]), chdb.config)
        began = SYSTEM_CLOCK.now()
        with pytest.raises(Retryable):
            source.unpin({"frozen": True, "database": "shop", "table": "pin"}, 3)
        assert SYSTEM_CLOCK.now() - began < 5


def test_a_table_is_the_same_under_every_address_and_another_one_of_its_name_is_not(
    chdb: Chdb, table: Any
) -> None:
    name = table("id UInt32", "ORDER BY id")
    endpoint = chdb.endpoint()
    secret = f"{endpoint.user}:{endpoint.password}@"
    addresses = [
        f"clickhouse://{secret}{host}:{endpoint.port}/shop/{name}" for host in ("127.0.0.1", "localhost")
    ]
    identities = {open_source(address, chdb.config).describe().identity for address in addresses}
    identities.add(chdb.source(name).describe().identity)
    assert len(identities) == 1
    chdb.drop(name)
    table("id UInt32", "ORDER BY id", name)
    assert chdb.source(name).describe().identity not in identities
