"""Exports from a Parquet folder whose tasks run in the test's own process: everything real but Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

from lockstep.commit import settle
from lockstep.config import load_config
from lockstep.exporter import ExportRequest, Planned, plan_export
from lockstep.job import Job, Progress
from lockstep.sink.datafile import DataFileSink
from lockstep.source import open_source
from lockstep.storage import Storage
from lockstep.store.sql import SqlStore
from tests.store_lab import MovedClock

TARGET = "iceberg://lake/db.t"


class Shop:
    """A flat Parquet folder of three parts with two rows each: 10 and 11 in p1, 20 and 21 in p2, …"""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = MovedClock()
        (folder / "src").mkdir()
        for number in (1, 2, 3):
            self.write(f"p{number}", [number * 10, number * 10 + 1])
        (folder / "lockstep.toml").write_text("")
        self.config = load_config(folder / "lockstep.toml")
        self.store = SqlStore(self.config.store_url, self.clock)

    def write(self, part: str, values: list[int]) -> None:
        pq.write_table(pa.table({"a": pa.array(values, pa.int64())}), self.folder / "src" / f"{part}.parquet")

    def ask(self, source: str = "src", **options: Any) -> Planned:
        request = ExportRequest(f"parquet:{self.folder}/{source}", TARGET, create=True, **options)
        return plan_export(request, self.config, self.store, self.clock)

    def export(self, **options: Any) -> Job:
        (job,) = self.ask(**options).jobs
        return self.run(job)

    def run(self, job: Job) -> Job:
        self.write_files(job)
        return settle(self.store, job.job_id, self.config, self.clock)

    def write_files(self, job: Job) -> None:
        for claim in self.store.claim("w", 100, 30, {job.job_id}):
            lease = self.store.begin(claim.lease, 30).lease
            plan = claim.job.plan
            sink = DataFileSink(plan, job.job_id, "write", lease.index, lease.epoch, Storage({}))
            position: dict[str, Any] = {}
            rows = 0
            source = open_source(plan.source, self.config)
            for chunk in source.read(plan.pin, claim.task.descriptor, None, plan.columns, 1 << 24):
                sink.add(chunk.batch)
                rows += chunk.batch.num_rows
                position = chunk.position or position
            files = sink.flush()
            self.store.finish(lease, position, files, Progress(rows, sum(file.size_bytes for file in files)))

    def table(self) -> Table:
        return load_catalog("lake", **self.config.catalogs["lake"]).load_table("db.t")

    def has_table(self) -> bool:
        return load_catalog("lake", **self.config.catalogs["lake"]).table_exists("db.t")

    def rows(self) -> list[int]:
        return sorted(self.table().scan().to_arrow()["a"].to_pylist())
