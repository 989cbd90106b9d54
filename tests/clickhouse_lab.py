"""What the tests of the ClickHouse source share: a real server, small tables, every type and its extremes."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa

from lockstep.config import Config
from lockstep.job import ColumnMap, Json, TaskSpec
from lockstep.new_table import derive
from lockstep.schema import match_columns
from lockstep.source import Chunk, Pin
from lockstep.source.chdb_launch import Room, connect
from lockstep.source.clickhouse import ClickHouseSource
from lockstep.source.clickhouse_address import Endpoint
from lockstep.source.clickhouse_http import Server
from lockstep.source.clickhouse_types import quote_name

LENIENT = {
    "allow_suspicious_low_cardinality_types": 1,
    "enable_time_time64_type": 1,
    "allow_experimental_qbit_type": 1,
    "allow_experimental_nullable_tuple_type": 1,
    "enable_lightweight_update": 1,
    "allow_experimental_lightweight_update": 1,
    "mutations_sync": 2,
}
NUMBERS = count(1)
"""For names that no other test takes."""


@dataclass
class Chdb:
    """A real ClickHouse for tests: an embedded data folder and its server."""

    folder: Path
    server: Server
    config: Config

    def run(self, sql: str, **settings: Any) -> None:
        self.server.run(sql, {**LENIENT, **settings})

    def value(self, sql: str) -> Any:
        return self.server.values(sql)[0][0]

    def source(self, table: str, database: str = "shop") -> ClickHouseSource:
        from urllib.parse import quote

        address = f"chdb:{self.folder}/{quote(database, safe='')}/{quote(table, safe='')}"
        return ClickHouseSource(address, self.config)

    def endpoint(self) -> Endpoint:
        return connect(self.folder)

    def tables(self, database: str = "shop") -> set[str]:
        rows = self.server.values(f"SELECT name FROM system.tables WHERE database = '{database}'")
        return {row[0] for row in rows}

    def drop(self, table: str) -> None:
        self.run(f"DROP TABLE IF EXISTS shop.{quote_name(table)} SYNC")

    def stop(self) -> None:
        self.server.close()
        card = Room(self.folder).read_card()
        if card is not None:
            os.kill(card.pid, signal.SIGTERM)


def three_parts(chdb: Chdb, table: Any) -> str:
    """Only OPTIMIZE … FINAL merges them."""
    lazy = "max_bytes_to_merge_at_max_space_in_pool = 1, max_bytes_to_merge_at_min_space_in_pool = 1"
    name: str = table("id UInt32, s String", f"ORDER BY id SETTINGS {lazy}")
    for i in range(3):
        chdb.run(f"INSERT INTO shop.{name} SELECT number + {i * 100}, 'x' FROM numbers(100)")
    return name


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
    (
        "UUID",
        f"'{AN_ID}', '{UUID(int=0)}', '{UUID(int=2**128 - 1)}'",
        "uuid",
        [UUID(AN_ID), UUID(int=0), UUID(int=2**128 - 1)],
    ),
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
"""A type, values of it in SQL, its type in Iceberg, and what arrives."""
_NESTED = ("Map", "Tuple", "Nullable(Tuple", "Point", "Polygon", "Array")


def values_in(kind: str, values: str) -> list[str]:
    """The single values of a row of `EXACT`."""
    return _split(values) if kind.startswith(_NESTED) else values.split(", ")


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
