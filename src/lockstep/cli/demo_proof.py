"""The demo's proof: the same sums over the source, by ClickHouse, and over the published files, by DuckDB."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lockstep.config import Config
from lockstep.job import Fingerprint, Job, State
from lockstep.store import open_store

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

# One text per row that both engines spell alike, hashed with MD5, of which both take the same 64 bits.
CLICKHOUSE_SUMS: Final = """
SELECT _partition_id, count(), toInt64(sum(amount) * 100), toString(toDate(min(ts), 'UTC')),
    toString(toDate(max(ts), 'UTC')), toString(sum(reinterpretAsUInt64(substring(MD5(concat(
        toString(id), '|', toString(user_id), '|', toString(toUnixTimestamp64Micro(ts)), '|', country, '|',
        toString(toInt64(amount * 100)), '|', url, '|', arrayStringConcat(tags, ','), '|', ifNull(coupon, '~')
    )), 9, 8))))
FROM shop.events GROUP BY _partition_id ORDER BY _partition_id
"""
DUCKDB_SUMS: Final = """
SELECT count(*), coalesce(sum(amount) * 100, 0)::BIGINT, min(ts)::DATE::VARCHAR, max(ts)::DATE::VARCHAR,
    (coalesce(sum(md5_number_lower(concat(
        id, '|', user_id, '|', epoch_us(ts), '|', country, '|', (amount * 100)::BIGINT, '|', url, '|',
        array_to_string(tags, ','), '|', coalesce(coupon, '~')
    ))), 0) % 18446744073709551616)::VARCHAR
FROM read_parquet(?)
"""


@dataclass(frozen=True)
class Sums:
    rows: int
    cents: int
    first: str
    last: str
    checksum: int

    @property
    def span(self) -> str:
        return f"{self.first} – {self.last}"


@dataclass(frozen=True)
class Both:
    """One partition, added up on either side."""

    partition: str
    source: Sums
    target: Sums

    @property
    def same(self) -> bool:
        return self.source == self.target


@dataclass(frozen=True)
class PublishedSnapshot:
    """A snapshot of the table's history with the job that made it."""

    snapshot_id: int
    job_id: str
    partition: str
    rows: int
    files: int
    size_bytes: int
    paths: Sequence[str] = field(repr=False)
    intact: bool = True
    """Whether the files, read again, have the fingerprint that the rows had when they were read."""


@dataclass(frozen=True)
class Proof:
    partitions: Sequence[Both]
    snapshots: Sequence[PublishedSnapshot]
    problems: Sequence[str]

    @property
    def holds(self) -> bool:
        return not self.problems

    @property
    def rows(self) -> int:
        return sum(snapshot.rows for snapshot in self.snapshots)

    def document(self) -> dict[str, Any]:
        return {
            "holds": self.holds,
            "problems": list(self.problems),
            "rows": self.rows,
            "partitions": [
                {
                    "partition": both.partition,
                    "same": both.same,
                    "source": {**vars(both.source), "checksum": f"{both.source.checksum:016x}"},
                    "target": {**vars(both.target), "checksum": f"{both.target.checksum:016x}"},
                }
                for both in self.partitions
            ],
            "snapshots": [
                {
                    "snapshot_id": snapshot.snapshot_id,
                    "job_id": snapshot.job_id,
                    "partition": snapshot.partition,
                    "rows": snapshot.rows,
                    "files": snapshot.files,
                    "size_bytes": snapshot.size_bytes,
                    "intact": snapshot.intact,
                }
                for snapshot in self.snapshots
            ],
        }


def prove(config: Config, clickhouse: Path, target: str) -> Proof:
    """Compare source and target partition by partition, and the history with the jobs."""
    import duckdb

    table = _table(config, target)
    jobs = _jobs(config)
    source = _source_sums(clickhouse)
    with duckdb.connect() as reader:
        reader.execute("SET TimeZone = 'UTC'")
        snapshots = [_published(table, snapshot, jobs, reader) for snapshot in _lineage(table)]
        paths = {partition: _paths(snapshots, partition) for partition in source}
        partitions = [
            Both(partition, sums, _target_sums(reader, paths[partition]))
            for partition, sums in source.items()
        ]
    return Proof(partitions, snapshots, list(_problems(partitions, snapshots, jobs, table)))


def published(config: Config, target: str) -> list[int]:
    """The snapshots of the table as they are now, oldest first."""
    return [snapshot.snapshot_id for snapshot in _lineage(_table(config, target))]


def _table(config: Config, target: str) -> Table:
    from pyiceberg.catalog import load_catalog

    catalog, _, name = target.removeprefix("iceberg://").partition("/")
    return load_catalog(catalog, **config.catalogs[catalog]).load_table(name)


def _problems(
    partitions: Sequence[Both], snapshots: Sequence[PublishedSnapshot], jobs: Sequence[Job], table: Table
) -> Iterable[str]:
    for both in partitions:
        if not both.same:
            yield f"partition {both.partition} differs between source and target"
    for job in jobs:
        if job.state is not State.COMPLETED:
            yield f"job {job.job_id} is {job.state.value}"
        made = sum(1 for snapshot in snapshots if snapshot.job_id == job.job_id)
        if made != 1:
            yield f"job {job.job_id} has {made} snapshots in the history, not one"
    for snapshot in snapshots:
        if not snapshot.job_id:
            yield f"snapshot {snapshot.snapshot_id} belongs to no job"
        if not snapshot.intact:
            yield f"the files of snapshot {snapshot.snapshot_id} do not have the fingerprint of what was read"
    listed = sorted(str(task.file.file_path) for task in table.scan().plan_files())
    if listed != sorted(path for snapshot in snapshots for path in snapshot.paths):
        yield "the table lists other files than its snapshots have added"


def _jobs(config: Config) -> list[Job]:
    store = open_store(config.store_url)
    try:
        return store.list()
    finally:
        store.close()


def _source_sums(clickhouse: Path) -> dict[str, Sums]:
    from lockstep.source.chdb_launch import connect
    from lockstep.source.clickhouse_http import Server

    found = connect(clickhouse)
    server = Server(lambda: found)
    try:
        rows = server.values(CLICKHOUSE_SUMS)
    finally:
        server.close()
    return {
        partition: Sums(int(count), int(cents), first, last, int(checksum))
        for partition, count, cents, first, last, checksum in rows
    }


def _target_sums(reader: Any, paths: Sequence[str]) -> Sums:
    if not paths:
        return Sums(0, 0, "", "", 0)
    count, cents, first, last, checksum = reader.execute(DUCKDB_SUMS, [list(map(_local, paths))]).fetchone()
    return Sums(count, cents, first, last, int(checksum))


def _lineage(table: Table) -> list[Snapshot]:
    """The snapshots of the main branch, oldest first."""
    line = []
    snapshot = table.current_snapshot()
    while snapshot is not None:
        line.append(snapshot)
        parent = snapshot.parent_snapshot_id
        snapshot = table.snapshot_by_id(parent) if parent is not None else None
    return line[::-1]


def _published(table: Table, snapshot: Snapshot, jobs: Sequence[Job], reader: Any) -> PublishedSnapshot:
    job = next((job for job in jobs if job.snapshot_id == snapshot.snapshot_id), None)
    added = [
        entry.data_file
        for manifest in snapshot.manifests(table.io)
        if manifest.added_snapshot_id == snapshot.snapshot_id
        for entry in manifest.fetch_manifest_entry(table.io)
        if entry.snapshot_id == snapshot.snapshot_id
    ]
    paths = [str(file.file_path) for file in added]
    return PublishedSnapshot(
        snapshot_id=snapshot.snapshot_id,
        job_id=job.job_id if job else "",
        partition=(job.plan.partition or "") if job else "",
        rows=sum(int(file.record_count) for file in added),
        files=len(added),
        size_bytes=sum(int(file.file_size_in_bytes) for file in added),
        paths=paths,
        intact=job is not None and _fingerprint(paths) == job.fingerprint,
    )


def _fingerprint(paths: Sequence[str]) -> Fingerprint:
    """That of the rows as they are in the files now."""
    import pyarrow.parquet as pq

    from lockstep.fingerprint import fingerprint

    total = Fingerprint()
    for path in paths:
        with pq.ParquetFile(_local(path)) as file:
            for batch in file.iter_batches():
                total += fingerprint(batch)
    return total


def _paths(snapshots: Sequence[PublishedSnapshot], partition: str) -> list[str]:
    return [path for snapshot in snapshots if snapshot.partition == partition for path in snapshot.paths]


def _local(path: str) -> str:
    return path.removeprefix("file://")
