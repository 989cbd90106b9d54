"""The readers that judge everything else: each must see exactly what another writer published."""

from __future__ import annotations

import pathlib
from decimal import Decimal

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table

ROWS = pa.table(
    {
        "id": pa.array([1, 2, 3], pa.int64()),
        "text": ["a", None, "ü"],
        "amount": pa.array([Decimal("1.10"), None, Decimal("-9.99")], pa.decimal128(20, 2)),
    }
)


@pytest.fixture(params=["", "file://"], ids=["path", "url"])
def table(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Table:
    warehouse = f"{request.param}{tmp_path}/lake"
    catalog = SqlCatalog("lake", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=warehouse)
    catalog.create_namespace("db")
    published = catalog.create_table("db.events", schema=ROWS.schema)
    published.append(ROWS)
    return published


def rows(table: pa.Table) -> list[dict]:
    return sorted(table.to_pylist(), key=lambda row: row["id"])


def test_duckdb_reads_exactly_what_was_published(table: Table, read_with_duckdb) -> None:
    assert rows(read_with_duckdb(table.metadata_location)) == ROWS.to_pylist()


@pytest.mark.servers
def test_spark_reads_exactly_what_was_published(table: Table, spark) -> None:
    first = table.current_snapshot()
    assert first is not None
    table.append(ROWS)
    assert rows(spark.read(table.metadata_location, snapshot_id=first.snapshot_id)) == ROWS.to_pylist()
    assert spark.read(table.metadata_location).num_rows == 2 * ROWS.num_rows
    assert spark.query(table.metadata_location + "#snapshots", "SELECT * FROM t").num_rows == 2


@pytest.mark.servers
def test_a_table_that_spark_cannot_read_fails_the_test_with_the_reason(tmp_path, spark) -> None:
    with pytest.raises(AssertionError, match="Spark cannot read"):
        spark.read(f"{tmp_path}/metadata/00000-gone.metadata.json")
