"""Iceberg tables as a source: pinned by snapshot, with all their history of schemas and deletes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table

from lockstep.arrow_types import FIELD_ID
from lockstep.config import Config
from lockstep.errors import Corrupt, Invalid
from lockstep.job import ColumnMap, Json
from lockstep.new_table import derive
from lockstep.schema import match_columns
from lockstep.source import Chunk, ParseOptions, Pin, open_frozen, open_input, open_source
from lockstep.source.iceberg import IcebergInput, IcebergSource
from tests.readers import SparkReader

MB = 1_000_000


class Lake:
    """A catalog with tables that PyIceberg wrote, or that another engine wrote and were registered."""

    def __init__(self, folder: Path) -> None:
        uri, warehouse = f"sqlite:///{folder}/catalog.db", f"file://{folder}/lake"
        properties = {"type": "sql", "uri": uri, "warehouse": warehouse}
        self.folder = folder
        self.config = Config(folder, "sqlite://", {}, {"lake": properties}, {})
        self.catalog = SqlCatalog("lake", uri=uri, warehouse=warehouse)
        self.catalog.create_namespace("db")

    def table(self, rows: pa.Table, name: str = "db.t", **options: Any) -> Table:
        table = self.catalog.create_table(name, rows.schema, **options)
        table.append(rows)
        return table

    def register(self, spark: SparkReader, table: str) -> Table:
        """The table that Spark wrote as `written.db.name`, under the same name here."""
        name = table.removeprefix("written.")
        if self.catalog.table_exists(name):
            self.catalog.drop_table(name)
        return self.catalog.register_table(name, spark.metadata_of(table))

    def source(self, name: str = "db.t", snapshot: int | None = None) -> IcebergSource:
        return IcebergSource(self._address(name, snapshot), self.config)

    def input(self, name: str = "db.t", snapshot: int | None = None) -> IcebergInput:
        return IcebergInput(self._address(name, snapshot), self.config)

    @staticmethod
    def _address(name: str, snapshot: int | None) -> str:
        return f"iceberg://lake/{name}" + ("" if snapshot is None else f"@{snapshot}")


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def columns_of(source: IcebergSource) -> list[ColumnMap]:
    table = source.describe()
    schema, _, _ = derive(table)
    return match_columns(table, schema)


def chunks_of(
    source: IcebergSource,
    pin: Pin,
    columns: Sequence[ColumnMap],
    batch_bytes: int = MB,
    task_bytes: int = 64 * MB,
) -> list[Chunk]:
    return [
        chunk
        for task in source.plan_tasks(pin, task_bytes)
        for chunk in source.read(pin.detail, task.descriptor, None, columns, batch_bytes)
    ]


def all_rows(source: IcebergInput, **options: int) -> list[Json]:
    pin = source.freeze()
    chunks = chunks_of(source, pin, columns_of(source), **options)
    rows = [row for chunk in chunks for row in chunk.batch.to_pylist()]
    assert len(rows) == pin.rows
    assert len(rows) == sum(task.rows for task in source.plan_tasks(pin, 1 << 62))
    return rows


def in_order(rows: Sequence[Json]) -> list[Json]:
    return sorted(rows, key=lambda row: str(sorted(row.items(), key=lambda item: item[0])))


def assert_as_spark_reads(spark: SparkReader, lake: Lake, table: str, **options: int) -> list[Json]:
    registered = lake.register(spark, table)
    rows = all_rows(lake.input(table.removeprefix("written.")), **options)
    assert in_order(rows) == in_order(spark.read(registered.metadata_location).to_pylist())
    return rows


# What a table says of itself


def test_a_table_is_described_with_its_own_types_partitions_and_order(lake: Lake) -> None:
    rows = pa.table(
        {
            "id": pa.array([1], pa.int64()),
            "day": pa.array([date(2024, 1, 1)]),
            "tags": pa.array([["a"]], pa.list_(pa.string())),
        }
    )
    table = lake.table(rows)
    with table.update_spec() as spec:
        spec.add_field("day", "month", "day_month")
    described = lake.source().describe()
    assert [(c.name, c.native_type, c.nullable) for c in described.columns] == [
        ("id", "long", True),
        ("day", "date", True),
        ("tags", "list<string>", True),
    ]
    assert described.identity == f"iceberg:{table.metadata.table_uuid}"
    assert [(f.column, f.transform) for f in described.partitioning or ()] == [("day", "month")]
    assert derive(described)[0]["fields"][2]["type"]["type"] == "list"


def test_an_import_of_another_snapshot_is_another_input(lake: Lake) -> None:
    table = lake.table(pa.table({"id": [1]}))
    first = lake.input().describe().identity
    table.append(pa.table({"id": [2]}))
    assert lake.input().describe().identity != first
    assert lake.source().describe().identity == lake.source().describe().identity


def test_partitions_have_readable_names_and_exact_rows(lake: Lake) -> None:
    rows = pa.table({"region": ["eu", "us", None, "null", "a/b", "eu"], "n": [1, 2, 3, 4, 5, 6]})
    table = lake.catalog.create_table("db.t", rows.schema)
    with table.update_spec() as spec:
        spec.add_identity("region")
    table.append(rows)
    source = open_source("iceberg://lake/db.t", lake.config)
    found = {one.partition_id: one.rows for one in source.partitions()}
    assert found == {
        "region=eu": 2,
        "region=us": 1,
        "region=null": 1,
        "region=%6Eull": 1,
        "region=a%2Fb": 1,
    }
    columns = columns_of(lake.source())
    pin = lake.source().pin("name", "region=%6Eull", None)
    (chunk,) = chunks_of(lake.source(), pin, columns)
    assert chunk.batch.to_pylist() == [{"region": "null", "n": 4}]


def test_an_iceberg_table_is_an_input_on_its_own(lake: Lake) -> None:
    lake.table(pa.table({"id": [1]}))
    found = open_input(["iceberg://lake/db.t"], ParseOptions(), lake.config)
    assert found.freeze().rows == 1
    with pytest.raises(Invalid, match="alone"):
        open_input(["iceberg://lake/db.t", "a.csv"], ParseOptions(), lake.config)


def test_a_limit_is_exact_from_whatever_position_reading_goes_on(lake: Lake) -> None:
    rows = pa.table({"id": list(range(300))})
    table = lake.table(rows)
    table.delete("id < 20")
    table.append(rows)
    everything = all_rows(lake.input())
    for limit in (0, 1, 279, 280, 281, 500, 900):
        found = open_input(["iceberg://lake/db.t"], ParseOptions(limit=limit), lake.config)
        pin, columns = found.freeze(), columns_of(lake.input())
        tasks = found.plan_tasks(pin, 1)
        assert sum(task.rows for task in tasks) == min(limit, 580)
        executor = open_frozen("iceberg://lake/db.t", json.loads(json.dumps(pin.detail)), lake.config)
        wanted = everything[:limit]
        for task in tasks:
            chunks = list(executor.read(pin.detail, task.descriptor, None, columns, 256))
            assert [row for chunk in chunks for row in chunk.batch.to_pylist()] == wanted
            done = 0
            for chunk in chunks:
                done += chunk.batch.num_rows
                rest = executor.read(pin.detail, task.descriptor, chunk.position, columns, 256)
                assert [row for one in rest for row in one.batch.to_pylist()] == wanted[done:]


def test_an_unknown_partition_or_file_is_refused(lake: Lake) -> None:
    lake.table(pa.table({"id": [1]}))
    with pytest.raises(Invalid, match="no partition"):
        lake.source().pin("name", "region=eu", None)
    with pytest.raises(Invalid, match="no file"):
        lake.source().pin("name", "all", ["data/nothing.parquet"])


def test_a_part_is_a_data_file(lake: Lake) -> None:
    table = lake.table(pa.table({"id": [1]}))
    table.append(pa.table({"id": [2]}))
    source = lake.source()
    (partition,) = source.partitions()
    assert (partition.partition_id, partition.rows, len(partition.parts)) == ("all", 2, 2)
    pin = source.pin("name", "all", [partition.parts[1].name])
    assert [c.batch.to_pylist() for c in chunks_of(source, pin, columns_of(source))] == [[{"id": 2}]]


def test_an_empty_table_has_no_partitions_and_no_tasks(lake: Lake) -> None:
    lake.catalog.create_table("db.t", pa.schema([pa.field("id", pa.int64())]))
    assert lake.source().partitions() == []
    pin = lake.input().freeze()
    assert (pin.rows, lake.input().plan_tasks(pin, MB)) == (0, [])


# Snapshots


def test_a_pin_is_read_without_a_catalog_and_not_moved_by_what_is_written_later(lake: Lake) -> None:
    table = lake.table(pa.table({"id": [1, 2]}))
    source = lake.input()
    columns = columns_of(source)
    pin = source.freeze()
    tasks = source.plan_tasks(pin, MB)
    table.append(pa.table({"id": [3]}))
    table.delete("id = 1")
    executor = open_frozen("iceberg://lake/db.t", pin.detail, Config(lake.folder, "", {}, {}, {}))
    chunks = [c for t in tasks for c in executor.read(pin.detail, t.descriptor, None, columns, MB)]
    assert [row for chunk in chunks for row in chunk.batch.to_pylist()] == [{"id": 1}, {"id": 2}]


def test_a_snapshot_is_read_with_the_schema_that_it_had(lake: Lake) -> None:
    table = lake.table(pa.table({"id": [1]}))
    first = table.current_snapshot()
    assert first is not None
    with table.update_schema() as update:
        update.rename_column("id", "number")
    assert all_rows(lake.input(snapshot=first.snapshot_id)) == [{"id": 1}]
    assert all_rows(lake.input()) == [{"number": 1}]


def test_a_snapshot_that_is_not_there_is_refused_by_its_id(lake: Lake) -> None:
    lake.table(pa.table({"id": [1]}))
    with pytest.raises(Invalid, match="no snapshot 42: it was expired, or never there"):
        lake.input(snapshot=42).freeze()
    with pytest.raises(Invalid, match="there is no table"):
        lake.input("db.nothing").freeze()


def test_a_snapshot_that_expired_under_a_job_is_corrupt_and_names_the_file(lake: Lake) -> None:
    lake.table(pa.table({"id": [1]}))
    source = lake.input()
    columns = columns_of(source)
    pin = source.freeze()
    (task,) = source.plan_tasks(pin, MB)
    path = task.descriptor["pieces"][0]["file"]["path"]
    Path(path.removeprefix("file://")).unlink()
    with pytest.raises(Corrupt, match=r"is gone: snapshot \d+ of db.t was expired") as caught:
        list(source.read(pin.detail, task.descriptor, None, columns, MB))
    assert path in caught.value.message


# Tasks and positions


def big_table(lake: Lake, files: int = 2, rows: int = 6000) -> Table:
    table = lake.catalog.create_table(
        "db.t",
        pa.schema([pa.field("id", pa.int64()), pa.field("text", pa.string())]),
        properties={"write.parquet.row-group-limit": "1000"},
    )
    for number in range(files):
        ids = range(number * rows, (number + 1) * rows)
        table.append(pa.table({"id": list(ids), "text": [f"text {i * 7919}" for i in ids]}))
    return table


def test_large_files_make_several_tasks_and_small_ones_share_one(lake: Lake) -> None:
    big_table(lake)
    source = lake.input()
    pin = source.freeze()
    assert len(source.plan_tasks(pin, 1 << 40)) == 1
    few_bytes = sum(part.size_bytes for part in pin.parts) // 6
    tasks = source.plan_tasks(pin, few_bytes)
    assert len(tasks) > 4
    assert sum(task.rows for task in tasks) == 12_000
    ids = [row["id"] for row in all_rows(source, task_bytes=few_bytes)]
    assert ids == list(range(12_000))


def test_every_position_leads_on_without_a_gap_or_a_repetition(lake: Lake) -> None:
    table = big_table(lake)
    table.delete("id >= 2500 and id < 3100")
    source = lake.input()
    pin = source.freeze()
    columns = columns_of(source)
    (task,) = source.plan_tasks(pin, 1 << 40)
    chunks = list(source.read(pin.detail, task.descriptor, None, columns, 20_000))
    assert len(chunks) > 12
    whole = [row["id"] for chunk in chunks for row in chunk.batch.to_pylist()]
    seen = 0
    for chunk in chunks:
        seen += chunk.batch.num_rows
        rest = source.read(pin.detail, task.descriptor, chunk.position, columns, 7_000)
        assert [row["id"] for c in rest for row in c.batch.to_pylist()] == whole[seen:]


def test_records_grow_and_tell_file_and_row(lake: Lake) -> None:
    big_table(lake)
    source = lake.input()
    pin = source.freeze()
    columns = columns_of(source)
    few_bytes = sum(part.size_bytes for part in pin.parts) // 6
    for task in source.plan_tasks(pin, few_bytes):
        last = -1
        for chunk in source.read(pin.detail, task.descriptor, None, columns, 20_000):
            assert chunk.records is not None
            for record, row in zip(chunk.records.to_pylist(), chunk.batch.to_pylist(), strict=True):
                assert record > last
                last = record
                if record % 500 == 0:
                    place = source.locate(pin.detail, task.descriptor, record)
                    file = pq.read_table(place.input.removeprefix("file://"))
                    assert file.column("id")[place.line - 1].as_py() == row["id"]
                    (again,) = source.recall(pin.detail, task.descriptor, [record], columns)
                    assert again.place == place
                    assert json.loads(again.raw)["id"] == row["id"]


def test_a_checkpoint_of_another_task_is_corrupt(lake: Lake) -> None:
    big_table(lake, files=1)
    source = lake.input()
    pin = source.freeze()
    tasks = source.plan_tasks(pin, pin.parts[0].size_bytes // 3)
    position = {"piece": 0, "row_group": 0, "row": 10}
    with pytest.raises(Corrupt, match="outside of its task"):
        list(source.read(pin.detail, tasks[-1].descriptor, position, columns_of(source), MB))


# Tables that Spark wrote, compared with what Spark reads


@pytest.fixture
def spark_lake(tmp_path: Path, spark: SparkReader) -> tuple[SparkReader, Lake]:
    spark.write("CREATE NAMESPACE IF NOT EXISTS written.db")
    return spark, Lake(tmp_path)


MERGE_ON_READ = (
    "'format-version'='2', 'write.delete.mode'='merge-on-read', 'write.update.mode'='merge-on-read'"
)


@pytest.mark.servers
def test_position_deletes_of_spark_are_honoured_exactly(spark_lake: tuple[SparkReader, Lake]) -> None:
    spark, lake = spark_lake
    spark.write(
        "CREATE TABLE written.db.moved (id BIGINT, region STRING, amount DECIMAL(18, 4)) USING iceberg"
        f" PARTITIONED BY (region) TBLPROPERTIES ({MERGE_ON_READ})",
        "INSERT INTO written.db.moved SELECT id, CASE WHEN id % 3 = 0 THEN 'eu' ELSE 'us' END, id / 8"
        " FROM range(5000)",
        "DELETE FROM written.db.moved WHERE id % 7 = 0",
        "DELETE FROM written.db.moved WHERE id % 11 = 0",
        "UPDATE written.db.moved SET amount = 1.5 WHERE id % 13 = 0",
        "INSERT INTO written.db.moved VALUES (7, 'eu', 7), (14, NULL, NULL)",
    )
    rows = assert_as_spark_reads(spark, lake, "written.db.moved", batch_bytes=8_000)
    assert 0 < len(rows) < 5000
    found = {one.partition_id: one.rows for one in lake.source("db.moved").partitions()}
    assert sum(found.values()) == len(rows)
    assert found["region=null"] == 1


@pytest.mark.servers
def test_equality_deletes_are_honoured_exactly(spark_lake: tuple[SparkReader, Lake]) -> None:
    spark, lake = spark_lake
    name = "written.db.streamed"
    spark.write(
        f"CREATE TABLE {name} (id BIGINT, region STRING, note STRING) USING iceberg"
        f" PARTITIONED BY (region) TBLPROPERTIES ({MERGE_ON_READ})",
        f"INSERT INTO {name} SELECT id, CASE WHEN id % 2 = 0 THEN 'eu' ELSE 'us' END,"
        " CASE WHEN id % 5 = 0 THEN NULL ELSE concat('note ', id % 10) END FROM range(1000)",
    )
    fields = {
        1: pa.field("id", pa.int64(), True, {FIELD_ID: b"1"}),
        3: pa.field("note", pa.string(), True, {FIELD_ID: b"3"}),
    }
    by_id = pa.table([pa.array([2, 4, 7, 5000])], schema=pa.schema([fields[1]]))
    spark.delete_equal(name, by_id, partition="region=eu")
    both = pa.table(
        [pa.array([10, 20, 22, 24]), pa.array([None, "note 0", "note 2", "other"])],
        schema=pa.schema([fields[1], fields[3]]),
    )
    spark.delete_equal(name, both, partition="region=eu")
    spark.write(f"INSERT INTO {name} VALUES (2, 'eu', 'again'), (10, 'eu', NULL)")
    nothing = pa.table([pa.array([None], pa.string())], schema=pa.schema([fields[3]]))
    spark.delete_equal(name, nothing, partition="region=us")
    rows = assert_as_spark_reads(spark, lake, name, batch_bytes=4_000)
    ids = [row["id"] for row in rows]
    assert ids.count(2) == 1
    assert 7 in ids, "a delete of another partition"
    assert not [row for row in rows if row["region"] == "us" and row["note"] is None]


@pytest.mark.servers
def test_columns_renamed_moved_added_dropped_and_promoted_are_what_spark_reads(
    spark_lake: tuple[SparkReader, Lake],
) -> None:
    spark, lake = spark_lake
    name = "written.db.evolved"
    spark.write(
        f"CREATE TABLE {name} (a INT, b FLOAT, c DECIMAL(9, 2), gone STRING, s STRUCT<x: INT, y: STRING>,"
        " l ARRAY<STRUCT<p: INT>>, m MAP<STRING, STRUCT<q: INT>>) USING iceberg",
        f"INSERT INTO {name} SELECT id, id / 4, id, 'x', named_struct('x', id, 'y', concat('y', id)),"
        " array(named_struct('p', id), NULL), map('k', named_struct('q', id)) FROM range(100)",
        f"INSERT INTO {name} VALUES (NULL, NULL, NULL, NULL, NULL, NULL, NULL),"
        " (1, 1.5, 2.25, 'x', named_struct('x', NULL, 'y', NULL), array(), map())",
        f"ALTER TABLE {name} ALTER COLUMN a TYPE BIGINT",
        f"ALTER TABLE {name} ALTER COLUMN b TYPE DOUBLE",
        f"ALTER TABLE {name} ALTER COLUMN c TYPE DECIMAL(20, 2)",
        f"ALTER TABLE {name} RENAME COLUMN a TO a_renamed",
        f"ALTER TABLE {name} DROP COLUMN gone",
        f"ALTER TABLE {name} ADD COLUMN gone BIGINT FIRST",
        f"ALTER TABLE {name} RENAME COLUMN s.x TO x2",
        f"ALTER TABLE {name} ADD COLUMN s.z DOUBLE",
        f"ALTER TABLE {name} ALTER COLUMN s.x2 TYPE BIGINT",
        f"ALTER TABLE {name} ADD COLUMN l.element.extra STRING",
        f"ALTER TABLE {name} RENAME COLUMN l.element.p TO p2",
        f"ALTER TABLE {name} ADD COLUMN m.value.extra STRING",
        f"ALTER TABLE {name} ALTER COLUMN c FIRST",
        f"INSERT INTO {name} (gone, a_renamed, b, c) VALUES (9000000000, 8000000000, 0.1, 123456789012.25)",
    )
    rows = assert_as_spark_reads(spark, lake, name, batch_bytes=2_000)
    assert len(rows) == 103


@pytest.mark.servers
def test_files_without_field_ids_and_partition_columns_are_read_through_the_mapping(
    spark_lake: tuple[SparkReader, Lake], tmp_path: Path
) -> None:
    spark, lake = spark_lake
    for region in ("eu", "us"):
        folder = tmp_path / "hive" / f"region={region}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"id": [1, 2], "s": [{"x": 1, "y": "a"}, None]}), folder / "a.parquet")
    spark.write(
        "CREATE TABLE written.db.migrated (id BIGINT, s STRUCT<x: BIGINT, y: STRING>, region STRING)"
        " USING iceberg PARTITIONED BY (region)",
        "CALL written.system.add_files(table => 'db.migrated',"
        f" source_table => '`parquet`.`{tmp_path}/hive`')",
        "ALTER TABLE written.db.migrated RENAME COLUMN s.y TO z",
        "ALTER TABLE written.db.migrated ADD COLUMN later INT",
    )
    rows = assert_as_spark_reads(spark, lake, "written.db.migrated")
    assert {row["region"] for row in rows} == {"eu", "us"}
    assert rows[0]["s"] == {"x": 1, "z": "a"}


@pytest.mark.servers
def test_partitions_of_older_specs_are_listed_and_read(spark_lake: tuple[SparkReader, Lake]) -> None:
    spark, lake = spark_lake
    name = "written.db.respec"
    spark.write(
        f"CREATE TABLE {name} (id BIGINT, ts TIMESTAMP, old STRING) USING iceberg PARTITIONED BY (old)",
        f"INSERT INTO {name} VALUES (1, TIMESTAMP '2024-01-05 00:00:00', 'x')",
        f"ALTER TABLE {name} DROP PARTITION FIELD old",
        f"ALTER TABLE {name} ADD PARTITION FIELD months(ts)",
        f"INSERT INTO {name} VALUES (2, TIMESTAMP '2024-02-05 00:00:00', 'y')",
    )
    assert_as_spark_reads(spark, lake, name)
    found = {one.partition_id for one in lake.source("db.respec").partitions()}
    assert {"old=x", "ts_month=2024-02"} == found


@pytest.mark.servers
def test_a_column_added_with_a_default_has_it_in_older_files(spark_lake: tuple[SparkReader, Lake]) -> None:
    spark, lake = spark_lake
    name = "written.db.defaults"
    spark.write(
        f"CREATE TABLE {name} (id BIGINT) USING iceberg TBLPROPERTIES ('format-version'='3')",
        f"INSERT INTO {name} SELECT id FROM range(3)",
    )
    newest = Path(spark.metadata_of(name))
    metadata = json.loads(newest.read_text())
    metadata["schemas"][0]["fields"] += [
        {"id": 2, "name": "price", "required": True, "type": "decimal(9, 2)", "initial-default": "1.25"},
        {"id": 3, "name": "day", "required": False, "type": "date", "initial-default": "2024-02-29"},
    ]
    metadata["last-column-id"] = 3
    changed = newest.with_name("v9.metadata.json")
    changed.write_text(json.dumps(metadata))
    table = lake.catalog.register_table("db.defaults", str(changed))
    rows = all_rows(lake.input("db.defaults"))
    assert rows[0] == {"id": 0, "price": Decimal("1.25"), "day": date(2024, 2, 29)}
    assert in_order(rows) == in_order(spark.read(table.metadata_location).to_pylist())


@pytest.mark.servers
def test_deletion_vectors_are_refused_with_a_sentence(spark_lake: tuple[SparkReader, Lake]) -> None:
    spark, lake = spark_lake
    spark.write(
        "CREATE TABLE written.db.vectors (id BIGINT) USING iceberg TBLPROPERTIES"
        " ('format-version'='3', 'write.delete.mode'='merge-on-read')",
        "INSERT INTO written.db.vectors SELECT id FROM range(100)",
        "DELETE FROM written.db.vectors WHERE id = 5",
    )
    lake.register(spark, "written.db.vectors")
    with pytest.raises(Invalid, match="deletion vectors"):
        lake.input("db.vectors").freeze()
