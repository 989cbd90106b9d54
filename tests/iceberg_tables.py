"""Real tables in a temporary folder, and real Parquet files staged for them, for the tests of targets."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    schema_to_pyarrow,
)
from pyiceberg.table import Table

from lockstep.config import Config
from lockstep.job import Fingerprint, Json, Kind, Plan, StagedFile, commit_id
from lockstep.target import TargetTable
from lockstep.target.catalog_fs import FileSystemCatalog
from lockstep.target.iceberg import IcebergTarget

SCHEMA: Json = {
    "type": "struct",
    "fields": [
        {"id": 1, "name": "id", "type": "long", "required": False},
        {"id": 2, "name": "region", "type": "string", "required": False},
        {"id": 3, "name": "amount", "type": "double", "required": False},
    ],
}
UNPARTITIONED: Json = {"spec-id": 0, "fields": []}
UNSORTED: Json = {"order-id": 0, "fields": []}


def by_identity(source_id: int, name: str) -> Json:
    field = {"source-id": source_id, "field-id": 1000, "transform": "identity", "name": name}
    return {"spec-id": 0, "fields": [field]}


BY_REGION = by_identity(2, "region")


class MovedClock:
    """Time that stands still until a test moves it."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.time = now

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class Lake:
    """A catalog in a folder, the target under test, and the table as PyIceberg alone sees it."""

    def __init__(self, folder: Path, name: str = "lake", kind: str = "sql") -> None:
        self.folder = folder
        self.name = name
        self.kind = kind
        self.address = f"iceberg://{name}/db.events"
        uri, warehouse = f"sqlite:///{folder}/catalog.db", f"file://{folder}/lake"
        properties = {"type": kind, "uri": uri, "warehouse": warehouse}
        self.config = Config(root=folder, store_url="", spark={}, catalogs={name: properties}, storage={})
        self.clock = MovedClock()
        self.catalog: Catalog = (
            SqlCatalog(name, uri=uri, warehouse=warehouse)
            if kind == "sql"
            else FileSystemCatalog(name, clock=self.clock, warehouse=warehouse)
        )
        self.target = self.open()
        self._files = 0

    def open(self) -> IcebergTarget:
        """The same table, as another process would open it."""
        return IcebergTarget(self.address, self.config, self.clock)

    def create(self, spec: Json = UNPARTITIONED, schema: Json = SCHEMA, version: int = 2) -> TargetTable:
        if version == 2:
            return self.target.create(schema, spec, UNSORTED)
        from pyiceberg.partitioning import PartitionSpec
        from pyiceberg.schema import Schema

        self.catalog.create_namespace_if_not_exists("db")
        self.catalog.create_table(
            "db.events",
            schema=Schema.model_validate(schema),
            partition_spec=PartitionSpec.model_validate(spec),
            properties={"format-version": str(version)},
        )
        return self.target.load()

    def table(self) -> Table:
        return self.catalog.load_table("db.events")

    def rows(self) -> list[dict[str, Any]]:
        found = self.table().scan().to_arrow().to_pylist()
        return sorted(found, key=lambda row: str(row["id"]).rjust(9))

    def ids(self) -> list[int]:
        return [row["id"] for row in self.rows()]

    def snapshot_ids(self) -> list[int]:
        """The history of main, oldest first."""
        return [entry.snapshot_id for entry in self.table().history()]

    def stage(
        self, ids: Sequence[int], partition: Sequence[Any] = (), **columns: Sequence[Any]
    ) -> StagedFile:
        """Write one Parquet file with field ids into the table's folder, as a task would."""
        schema = self.table().schema()
        arrow = schema_to_pyarrow(schema)
        values = {"id": ids, **columns}
        arrays = [pa.array(values.get(field.name, [None] * len(ids)), type=field.type) for field in arrow]
        self._files += 1
        path = self.folder / "lake" / "db" / "events" / "data" / f"staged-{self._files}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_arrays(arrays, schema=arrow), path)
        return StagedFile(
            path=f"file://{path}",
            size_bytes=path.stat().st_size,
            rows=len(ids),
            checksum="",
            fingerprint=Fingerprint(len(ids)),
            partition=tuple(partition),
            stats=statistics_of(path, self.table()),
        )

    def plan(self, head: TargetTable, partition_values: Sequence[Any] = (), **changes: Any) -> Plan:
        fields: dict[str, Any] = {
            "kind": Kind.EXPORT,
            "source": "parquet:/nowhere",
            "target": self.address,
            "target_uuid": head.uuid,
            "location": head.location,
            "schema": head.schema,
            "spec": head.spec,
            "sort_order": head.sort_order,
            "columns": (),
            "pin": {},
            "partition": "202401",
            "partition_values": tuple(partition_values),
        }
        return Plan(**{**fields, **changes})

    def publish(self, job: str, *files: StagedFile, replaces: Sequence[str] = ()) -> str:
        """Publish the files as generation 1 of a job; answers the commit id."""
        head = self.target.load()
        commit = commit_id(job, 1)
        values = files[0].partition if files else ()
        self.commit(head, self.plan(head, values, replaces=tuple(replaces)), commit, job, files)
        return commit

    def commit(
        self, head: TargetTable, plan: Plan, commit: str, job: str, files: Sequence[StagedFile]
    ) -> int:
        """Prepare a commit and send it; answers the snapshot id."""
        return self.target.publish(head, self.target.prepare(head, plan, commit, job, files))


def statistics_of(path: Path, table: Table) -> Json:
    """The column statistics by PyIceberg's own reading of the footer, as JSON."""
    found = data_file_statistics_from_parquet_metadata(
        parquet_metadata=pq.read_metadata(path),
        stats_columns=compute_statistics_plan(table.schema(), table.metadata.properties),
        parquet_column_mapping=parquet_path_to_id_mapping(table.schema()),
    ).to_serialized_dict()
    stats: Json = {"split_offsets": found["split_offsets"], "sort_order_id": 0}
    for name in ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts"):
        stats[name] = {str(column): count for column, count in found[name].items()}
    for name in ("lower_bounds", "upper_bounds"):
        stats[name] = {str(column): b64encode(bound).decode() for column, bound in found[name].items()}
    return stats
