"""Every ClickHouse type that has an exact counterpart, from the source to readers that are not ours.

One table holds a column of each type with its extremes; an export publishes it; Spark with the Iceberg JVM
runtime and DuckDB read it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from lockstep.job import State
from tests.clickhouse_lab import EXACT, LENIENT, values_in
from tests.lab import Lab

pytestmark = pytest.mark.servers

COLUMNS = [(f"c{number}", kind, values, expected) for number, (kind, values, _, expected) in enumerate(EXACT)]
ROWS = max(len(expected) for _, _, _, expected in COLUMNS)
# Spark's conversion to Arrow fails on a NULL struct with a required field, so its fields are asked for.
NULL_STRUCT = next(name for name, kind, _, _ in COLUMNS if kind.startswith("Nullable(Tuple"))


def canonical(value: Any) -> Any:
    """Values as text, whatever type a reader chose: NaN equals NaN, -0.0 is not 0.0, a UUID is its text."""
    if isinstance(value, dict):
        return {str(name): canonical(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(one) for one in value]
    if isinstance(value, bytes) and len(value) == 16:
        return str(UUID(bytes=value))
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, date):
        return value.isoformat()
    return str(value) if isinstance(value, str) else repr(value)


def expected_column(expected: list[Any]) -> list[Any]:
    return [canonical(expected[row % len(expected)]) for row in range(ROWS)]


@pytest.fixture(scope="module")
def published(manned_lab: Lab) -> str:
    """The metadata of the exported table."""
    lab = manned_lab
    declared = ", ".join(f"{name} {kind}" for name, kind, _, _ in COLUMNS)
    settings = {**LENIENT, "database": lab.database}
    lab.clickhouse.command(
        f"CREATE TABLE matrix (id UInt32, {declared}) ENGINE = MergeTree ORDER BY id", settings=settings
    )
    rows = []
    for row in range(ROWS):
        cells = []
        for _, kind, values, expected in COLUMNS:
            cells.append(values_in(kind, values)[row % len(expected)])
        rows.append(f"({row}, {', '.join(cells)})")
    lab.clickhouse.command(f"INSERT INTO matrix VALUES {', '.join(rows)}", settings=settings)
    lab.ok("export", lab.source("matrix"), "iceberg://lake/db.matrix", "--all", "--create", "--detach")
    (job,) = lab.jobs("db.matrix")
    ended = lab.wait_for_end(job.job_id)
    assert ended.state is State.COMPLETED, ended.error
    return lab.table("db.matrix").metadata_location


def assert_exact(table: pa.Table, skip: str | None = None) -> None:
    rows = table.sort_by("id")
    assert rows.num_rows == ROWS
    wrong = {}
    for name, kind, _, expected in COLUMNS:
        if name == skip:
            continue
        found = [canonical(value) for value in rows.column(name).to_pylist()]
        if found != expected_column(expected):
            wrong[kind] = (found, expected_column(expected))
    assert wrong == {}


def test_duckdb_reads_every_type_exactly(published: str, read_with_duckdb: Callable[[str], pa.Table]) -> None:
    assert_exact(read_with_duckdb(published))


def test_spark_reads_every_type_exactly(published: str, spark: Any) -> None:
    names = ", ".join(["id", *(name for name, *_ in COLUMNS if name != NULL_STRUCT)])
    assert_exact(spark.query(published, f"SELECT {names} FROM t"), skip=NULL_STRUCT)
    fields = spark.query(
        published, f"SELECT id, {NULL_STRUCT}.a AS a, {NULL_STRUCT}.u AS u FROM t ORDER BY id"
    )
    expected = next(expected for name, _, _, expected in COLUMNS if name == NULL_STRUCT)
    for row, found in enumerate(fields.to_pylist()):
        value = expected[row % len(expected)]
        assert canonical(found["a"]) == canonical(value and value["a"])
        assert canonical(found["u"]) == canonical(value and value["u"])


def test_spark_finds_rows_by_uuid(published: str, spark: Any) -> None:
    name, expected = next((name, expected) for name, kind, _, expected in COLUMNS if kind == "UUID")
    for uuid in (UUID(int=0), UUID(int=2**128 - 1)):
        found = spark.query(published, f"SELECT id FROM t WHERE {name} = '{uuid}' ORDER BY id")
        rows = [row for row in range(ROWS) if expected[row % len(expected)] == uuid]
        assert found["id"].to_pylist() == rows
