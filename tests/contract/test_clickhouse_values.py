"""The ClickHouse source against a real ClickHouse: every type, exactly or not at all."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from lockstep.errors import Corrupt, Invalid
from lockstep.new_table import derive
from lockstep.schema import match_columns
from tests.clickhouse_lab import EXACT, Chdb, columns_of, read_all, us, values_in

pytestmark = pytest.mark.servers


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
    rows = ", ".join(f"({i}, {one})" for i, one in enumerate(values_in(kind, values)))
    chdb.run(f"INSERT INTO shop.{name} VALUES {rows}")
    source = chdb.source(name)
    mapped = source.describe().columns[1]
    assert mapped.problem is None
    assert (mapped.type["type"] if isinstance(mapped.type, dict) else mapped.type) == iceberg

    arrived = read_all(source, pinned(source)).sort_by("id")

    assert plain(arrived.column("v").to_pylist()) == plain(expected)


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
