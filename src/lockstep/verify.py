"""Compare the rows that a job published with the fingerprint of what it read.

The data files of the job's snapshot are read again, all columns of all rows, a batch at a time. What later
commits did to them (compaction, deletes) is told beside the verdict, and changes nothing about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from lockstep.config import Config
from lockstep.errors import Corrupt, Invalid
from lockstep.job import DATA, Fingerprint, Job, Json, State
from lockstep.secrets import expand
from lockstep.store import JobStore
from lockstep.target import TargetTable, open_target

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from lockstep.source.iceberg_rows import FileReader
    from lockstep.source.iceberg_scan import ScanFile

BATCHES_IN_MEMORY: Final = 16


@dataclass(frozen=True)
class Verification:
    """`problems` are sentences about single files. `current_files` of `files` are still part of the table;
    rows of `deleted_files` were deleted since, where that can be told."""

    job_id: str
    snapshot_id: int
    expected: Fingerprint
    found: Fingerprint
    files: int
    current_files: int
    deleted_files: int | None
    problems: Sequence[str] = ()

    @property
    def equal(self) -> bool:
        return not self.problems and self.expected == self.found

    @property
    def differing(self) -> list[str]:
        """Columns whose values are not those that were read, in the table's order."""
        names = {**self.expected.columns, **self.found.columns}
        return [n for n in names if self.expected.columns.get(n) != self.found.columns.get(n)]

    def to_json(self) -> Json:
        return {
            "job_id": self.job_id,
            "snapshot_id": self.snapshot_id,
            "equal": self.equal,
            "expected": self.expected.to_json(),
            "found": self.found.to_json(),
            "differing_columns": self.differing,
            "files": self.files,
            "files_still_current": self.current_files,
            "files_with_later_deletes": self.deleted_files,
            "problems": list(self.problems),
        }


def verify(job: Job, store: JobStore, config: Config) -> Verification:
    """Read what the job published, and compare.

    Raises: Invalid where there is nothing to compare: the job is not completed, its snapshot has expired and
    its files with it, or the table is another one; Retryable if catalog or storage do not answer.
    """
    from lockstep.source.iceberg_rows import FileReader
    from lockstep.storage import Storage
    from lockstep.storage.options import options_of

    snapshot_id, expected = _published(job)
    head = open_target(expand(job.plan.target, config), config).load()
    table = _same_table(job, head)
    files = _files_of(table, job, snapshot_id, expected)
    storage = Storage(options_of(job.plan, config))
    reader = FileReader(storage, job.plan.schema, files)
    recorded = {
        file.path: file.fingerprint
        for file in store.manifest(job.job_id, job.plan.stages[-1])
        if file.kind == DATA
    }
    found = Fingerprint(0, dict.fromkeys(expected.columns, 0))
    problems = []
    for file in files:
        size_bytes = storage.size(file.path)
        if size_bytes not in (None, file.size_bytes):
            problems.append(f"{file.path} has {size_bytes} bytes; {file.size_bytes} were published")
            file = replace(file, size_bytes=size_bytes)
        try:
            of_file = _fingerprint(reader, file, job)
        except Corrupt as error:
            problems.append(error.message)
            continue
        found += of_file
        if recorded.get(file.path, of_file) != of_file:
            problems.append(f"{file.path} does not hold the rows that were written to it")
    current, deleted = _since(table, files)
    return Verification(
        job.job_id, snapshot_id, expected, found, len(files), current, deleted, tuple(problems)
    )


def _published(job: Job) -> tuple[int, Fingerprint]:
    if job.state is not State.COMPLETED:
        raise Invalid(
            f"job {job.job_id} is {job.state}: it has published nothing that could be verified",
            hint=f"lockstep watch {job.job_id}" if job.state.live else None,
        )
    if job.snapshot_id is None or job.fingerprint is None:
        raise Invalid(f"job {job.job_id} has no fingerprint: it was recorded by an older version of Lockstep")
    return job.snapshot_id, job.fingerprint


def _same_table(job: Job, head: TargetTable) -> Table:
    if head.uuid != job.plan.target_uuid:
        raise Invalid(
            f"{job.plan.target} is another table now: its UUID is {head.uuid}, the job published to"
            f" {job.plan.target_uuid}"
        )
    table: Table = head.handle
    return table


def _files_of(table: Table, job: Job, snapshot_id: int, expected: Fingerprint) -> list[ScanFile]:
    """The files that the snapshot added. Once it has expired, those of them that are still in the table.

    Raises: Invalid if some are not: their rows cannot be told from other rows any more.
    """
    from lockstep.source.iceberg_scan import added_files

    snapshot = table.metadata.snapshot_by_id(snapshot_id)
    if snapshot is not None:
        return added_files(table, snapshot, snapshot_id)
    current = table.metadata.current_snapshot()
    left = added_files(table, current, snapshot_id) if current is not None else []
    rows = sum(file.rows for file in left)
    if rows != expected.rows:
        raise Invalid(
            f"snapshot {snapshot_id} of {job.plan.target} has expired, and of {expected.rows} rows that job"
            f" {job.job_id} published in it {expected.rows - rows} were compacted, replaced or deleted since",
            hint="they cannot be told from the rows of others any more",
        )
    return left


def _fingerprint(reader: FileReader, file: ScanFile, job: Job) -> Fingerprint:
    from lockstep.fingerprint import fingerprint

    columns = [replace(column, source=column.target) for column in job.plan.columns]
    batch_bytes = job.plan.limits.task_memory_bytes // BATCHES_IN_MEMORY
    total = Fingerprint()
    for rows in reader.read(file, columns, batch_bytes):
        total += fingerprint(rows.batch)
    return total


def _since(table: Table, files: Sequence[ScanFile]) -> tuple[int, int | None]:
    """How many of the files are in the current snapshot, and how many of those have lost rows to deletes."""
    from lockstep.source.iceberg_scan import live_paths, scan_files

    current = table.metadata.current_snapshot()
    if current is None:
        return 0, 0
    ours = {file.path for file in files}
    kept = ours & live_paths(table, current)
    try:
        scanned: Iterator[ScanFile] = iter(scan_files(table, current, table.metadata.schema()))
        return len(kept), sum(1 for file in scanned if file.path in ours and file.has_deletes)
    except Invalid:
        return len(kept), None  # deletes of a kind that Lockstep does not read
