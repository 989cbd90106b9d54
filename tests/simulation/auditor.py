"""What must be true after every run, judged from the outside.

Written apart from the code that it judges: it reads the database with plain SQL and the tables with
PyIceberg, has its own copy of the rules, and imports nothing of the project.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import uuid
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyiceberg.io import FileIO
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

ALLOWED: Final = {
    ("pending", "start"): "running",
    ("pending", "pause"): "paused",
    ("pending", "all_tasks_done"): "committing",
    ("pending", "fail"): "failed",
    ("pending", "kill"): "killed",
    ("running", "pause"): "paused",
    ("running", "all_tasks_done"): "committing",
    ("running", "fail"): "failed",
    ("running", "kill"): "killed",
    ("paused", "resume"): "pending",
    ("paused", "fail"): "failed",
    ("paused", "kill"): "killed",
    ("committing", "committed"): "completed",
    ("committing", "fail"): "failed",
    ("committing", "kill"): "killed",
    ("failed", "retry"): "pending",
    ("failed", "kill"): "killed",
}
EVENTS: Final = {event for _, event in ALLOWED}
ENDED: Final = {"completed", "failed", "killed"}


@dataclass(frozen=True)
class TableEvidence:
    name: str
    dropped: bool
    states: Sequence[tuple[float, str, TableMetadata]]
    """Every state that it had: when, by whom, and the metadata."""
    file_io: FileIO


@dataclass(frozen=True)
class Evidence:
    database: str
    tables: Mapping[str, TableEvidence]
    """By UUID."""
    files: Mapping[str, bytes]
    overwritten: Sequence[str]
    swept: Sequence[str]
    parts: Mapping[str, tuple[int, int]]
    """The rows of each part of the source, from the first up to the last."""
    rows_per_key: int
    """So many neighbours share a unique key, where a job has one; the first row of the job is kept."""
    rival_rows: Mapping[str, str]
    """What others have written, and into which table."""
    undisturbed: bool
    ended_in_time: bool
    complaints: Sequence[str]

    def read(self, query: str, *values: Any) -> list[sqlite3.Row]:
        connection = sqlite3.connect(self.database)
        connection.row_factory = sqlite3.Row
        try:
            return connection.execute(query, values).fetchall()
        finally:
            connection.close()

    def jobs(self) -> list[JobEvidence]:
        query = "SELECT * FROM lockstep_jobs JOIN lockstep_plans USING (job_id) ORDER BY job_id"
        return [JobEvidence(self, row) for row in self.read(query)]

    def states(self) -> dict[str, str]:
        return {row["job_id"]: row["state"] for row in self.read("SELECT job_id, state FROM lockstep_jobs")}


class JobEvidence:
    def __init__(self, evidence: Evidence, row: sqlite3.Row) -> None:
        self.job_id: str = row["job_id"]
        self.state: str = row["state"]
        self.generation: int = row["generation"]
        self.finished_at: float | None = row["finished_at"]
        self.snapshot_id: int | None = row["snapshot_id"]
        plan = json.loads(row["plan"])
        self.appends: bool = plan["on_existing"] == "append"
        self.replaces: Sequence[str] = plan["replaces"]
        self.stages: Sequence[str] = plan["stages"]
        self.stage: str = row["stage"]
        self.has_deadline: bool = plan["deadline_s"] is not None
        self.table_uuid: str = plan["target_uuid"]
        self.ranges = [evidence.parts[piece["name"]] for piece in json.loads(row["holding"])["pieces"]]
        self.rows = [number for first, last in self.ranges for number in range(first, last)]
        keys = [number // evidence.rows_per_key for number in self.rows]
        repeats = {number for at, number in enumerate(self.rows) if keys[at] in keys[:at]}
        self.losers = repeats if "unique" in self.stages else set()

    @property
    def commits(self) -> list[str]:
        return [commit_id(self.job_id, number) for number in range(1, self.generation + 1)]


def audit(evidence: Evidence) -> list[str]:
    """Every broken promise, one sentence each."""
    found = list(evidence.complaints)
    found += [f"{path} was written twice" for path in evidence.overwritten]
    jobs = evidence.jobs()
    live = {job.job_id: job.state for job in jobs if job.state not in ENDED}
    if live or not evidence.ended_in_time:
        found.append(f"not every job ended within its budget: {live}")
    heads = {name: _head(evidence, table) for name, table in evidence.tables.items()}
    found += _one_line(evidence)
    found += _nothing_lost(evidence, heads)
    found += _swept_rightly(evidence, jobs)
    found += _rows_agree(evidence, jobs, heads)
    for job in jobs:
        found += _commits_agree(evidence, job)
        found += _history(evidence, job)
        found += _lock_step(evidence, job)
    return found


@dataclass(frozen=True)
class Head:
    """The files of a table's newest snapshot, and the rows in each."""

    rows: Mapping[str, Sequence[Any]]
    missing: Sequence[str]
    twice: Sequence[str]


def _head(evidence: Evidence, table: TableEvidence) -> Head:
    snapshot = table.states[-1][2].current_snapshot() if table.states else None
    if snapshot is None:
        return Head({}, (), ())
    try:
        paths = list(_paths(snapshot, table.file_io))
    except FileNotFoundError as error:
        return Head({}, (str(error),), ())
    return Head(
        {path: json.loads(evidence.files.get(path, b"[]")) for path in paths},
        [path for path in paths if path not in evidence.files],
        [path for path, times in Counter(paths).items() if times > 1],
    )


def _paths(snapshot: Snapshot, file_io: FileIO) -> Iterator[str]:
    for manifest in snapshot.manifests(file_io):
        for entry in manifest.fetch_manifest_entry(file_io, discard_deleted=True):
            yield entry.data_file.file_path


# The tables


def _one_line(evidence: Evidence) -> Iterator[str]:
    """Each new head is the child of the one before."""
    for table in evidence.tables.values():
        before: int | None = None
        for at, by, metadata in table.states:
            head = metadata.current_snapshot()
            if head is not None and head.snapshot_id != before:
                if head.parent_snapshot_id != before:
                    yield f"{table.name}: {by} put a snapshot beside the head {before} at {at:.1f}"
                before = head.snapshot_id
            elif head is None and before is not None:
                yield f"{table.name}: {by} took the branch away at {at:.1f}"


def _nothing_lost(evidence: Evidence, heads: Mapping[str, Head]) -> Iterator[str]:
    for uuid_, head in heads.items():
        name = evidence.tables[uuid_].name
        yield from (f"{name} refers to {path}, which was deleted" for path in head.missing)
        yield from (f"{name} lists {path} twice" for path in head.twice)
    for row, uuid_ in evidence.rival_rows.items():
        times = sum(list(rows).count(row) for rows in heads[uuid_].rows.values())
        if times != 1:
            yield f"the row of another writer, {row}, is there {times} times"


def _swept_rightly(evidence: Evidence, jobs: Sequence[JobEvidence]) -> Iterator[str]:
    """A sweep takes nothing of a job that could still run, and nothing that any snapshot refers to."""
    ended = {job.job_id for job in jobs if job.state in ("completed", "killed")}
    owners = {path: job.job_id for job in jobs for path in evidence.swept if _is_of(path, job)}
    for path, owner in owners.items():
        if owner not in ended:
            yield f"{path} was swept, and {owner} can still be retried"
    for table in evidence.tables.values() if evidence.swept else ():
        for snapshot in table.states[-1][2].snapshots if table.states else ():
            try:
                gone = [path for path in _paths(snapshot, table.file_io) if path not in evidence.files]
            except FileNotFoundError as error:
                gone = [str(error)]
            yield from (f"{path} was swept, and a snapshot of {table.name} refers to it" for path in gone)


def _rows_agree(evidence: Evidence, jobs: Sequence[JobEvidence], heads: Mapping[str, Head]) -> Iterator[str]:
    """The rows of a completed job are there once, unless it was replaced; those of any other one never."""
    replaced = {commit for job in jobs if job.state == "completed" for commit in job.replaces}
    held: dict[tuple[str, int], list[str]] = {}
    owned: set[str] = set()
    for job in jobs:
        there = {path: rows for path, rows in heads[job.table_uuid].rows.items() if _is_of(path, job)}
        owned |= set(there)
        if evidence.tables[job.table_uuid].dropped:
            continue
        gone = not replaced.isdisjoint(job.commits)
        there_for = job.state == "completed" and not gone
        wanted = Counter([row for row in job.rows if row not in job.losers] if there_for else [])
        found = Counter(row for rows in there.values() for row in rows)
        if found != wanted:
            what = f"{job.state}, and was replaced" if gone else job.state
            wrong = {row: found[row] for row in sorted({*found, *wanted}) if found[row] != wanted[row]}
            yield f"{job.job_id} is {what}, and its rows are there so many times: {wrong}"
        if evidence.undisturbed and job.state == "failed" and not job.has_deadline:
            yield f"{job.job_id} failed although nothing was disturbed"
        for row in wanted if not job.appends else ():
            held.setdefault((job.table_uuid, row), []).append(job.job_id)
    for (_, row), holders in held.items():
        if len(holders) > 1:
            yield f"row {row} was exported by {holders}, and none of them was told to append"
    for uuid_, head in heads.items():
        strange = [path for path in head.rows if path not in owned and "/rival-" not in path]
        yield from (f"{evidence.tables[uuid_].name} holds {path}, which is of no job" for path in strange)


def _is_of(path: str, job: JobEvidence) -> bool:
    return f"/data/lockstep-{job.job_id}-" in path


def commit_id(job_id: str, generation: int) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"lockstep:{job_id}:{generation}"))


def snapshot_of(commit: str) -> int:
    return int.from_bytes(hashlib.sha256(commit.encode()).digest()[:8], "big") >> 1


def _commits_agree(evidence: Evidence, job: JobEvidence) -> Iterator[str]:
    """What was published and when, against what the history says of each generation."""
    table = evidence.tables[job.table_uuid]
    if table.dropped:
        return
    landed = [_landed(table, snapshot_of(commit)) for commit in job.commits]
    for entry in _entries(evidence, job.job_id):
        at = landed[entry["generation"] - 1]
        if entry["event"] in ("fail", "kill") and at is not None:
            yield (
                f"{job.job_id} is {entry['state']} since {entry['at']:.1f} in generation "
                f"{entry['generation']}, which was published at {at:.1f}"
            )
    if job.state != "completed":
        return
    times = {number: at for number, at in enumerate(landed, 1) if at is not None}
    if len(times) != 1:
        yield f"{job.job_id} is completed and was published {len(times)} times"
        return
    [(generation, at)] = times.items()
    if job.finished_at is None or at > job.finished_at:
        yield f"{job.job_id} was completed before it was published"
    if job.snapshot_id != snapshot_of(commit_id(job.job_id, generation)):
        yield f"{job.job_id} names the snapshot {job.snapshot_id}, which is not its own"


def _landed(table: TableEvidence, snapshot_id: int) -> float | None:
    """When the snapshot with this id was put on the branch; a fence does not count."""
    for at, _, metadata in table.states:
        snapshot = metadata.snapshot_by_id(snapshot_id)
        if snapshot is not None:
            labels = snapshot.summary.additional_properties if snapshot.summary else {}
            return None if labels.get("lockstep.fenced") == "true" else at
    return None


# The store


def _entries(evidence: Evidence, job_id: str) -> list[sqlite3.Row]:
    return evidence.read("SELECT * FROM lockstep_history WHERE job_id = ? ORDER BY id", job_id)


def _history(evidence: Evidence, job: JobEvidence) -> Iterator[str]:
    """The history leads to the state of today by allowed moves only."""
    state, generation = "pending", 1
    for entry in _entries(evidence, job.job_id):
        event = entry["event"]
        if event in EVENTS:
            following = ALLOWED.get((state, event))
            if following is None:
                yield f"{job.job_id} was {state}, and {event} happened"
                return
            state = following
            generation += event == "retry"
        if (entry["state"], entry["generation"]) != (state, generation):
            yield f"{job.job_id}: the history notes {entry['state']} after {event}, not {state}"
            return
    if (job.state, job.generation) != (state, generation):
        yield f"{job.job_id} is {job.state}, and its history ends with {state}"


def _lock_step(evidence: Evidence, job: JobEvidence) -> Iterator[str]:
    """The files of each task hold its rows from the first up to its position, each once."""
    for stage in job.stages:
        query = "SELECT * FROM lockstep_tasks WHERE job_id = ? AND stage = ? ORDER BY idx"
        tasks = evidence.read(query, job.job_id, stage)
        descriptors = [json.loads(task["descriptor"]) for task in tasks]
        for task, one in zip(tasks, descriptors, strict=True):
            yield from _task_in_lock_step(evidence, job, task, one["first"], one["last"])
        for members in _by_kind(descriptors).values():
            ranges = sorted((one["first"], one["last"]) for one in members)
            covered = [row for first, last in ranges for row in range(first, last)]
            if covered != sorted(job.rows) and (ranges or stage == job.stages[0]):
                yield f"the tasks of stage {stage} of {job.job_id} cover {ranges}, not {job.ranges}"


def _task_in_lock_step(
    evidence: Evidence, job: JobEvidence, task: sqlite3.Row, first: int, last: int
) -> Iterator[str]:
    position = json.loads(task["position"])["row"] if task["position"] not in (None, "{}") else first
    name = f"{task['stage']} task {task['idx']} of {job.job_id}"
    listed = list(_listed(evidence, task))
    if missing := [file for file in listed if file["path"] not in evidence.files]:
        for file in missing:
            given_up = _given_up(evidence, job, task["stage"], file.get("kind", ""))
            if not given_up or file["path"] not in evidence.swept:
                yield f"{name} lists {file['path']}, which was deleted"
        return
    expected = [row for row in range(first, position) if _belongs(row, job, task["stage"])]
    for files in _by_kind(listed).values():
        rows = [row for file in files for row in json.loads(evidence.files[file["path"]])]
        if rows != expected:
            yield f"{name} is at row {position}, and its files hold {rows}"
    if task["state"] == "done" and position != last:
        yield f"{name} is done at row {position} of {last}"


def _belongs(row: int, job: JobEvidence, stage: str) -> bool:
    """Whether a row that a task has read is in its files."""
    if stage == "unique":
        return row in job.losers
    return stage != "merge" or row not in job.losers


def _given_up(evidence: Evidence, job: JobEvidence, stage: str, kind: str) -> bool:
    """Killed jobs are swept; what an import has merged goes when it has ended, and what it has combined when
    the stage that did so is over."""
    if job.state == "killed" or (job.state == "completed" and stage != job.stages[-1]):
        return True
    passed = job.stages[job.stages.index(stage) + 1 : job.stages.index(job.stage)]
    query = "SELECT descriptor FROM lockstep_tasks WHERE job_id = ? AND stage = ?"
    combined = [
        row for later in passed if "combine" in later for row in evidence.read(query, job.job_id, later)
    ]
    return any(json.loads(row["descriptor"])["kind"] == kind for row in combined)


def _by_kind(things: Iterable[Any]) -> dict[str, list[Any]]:
    """Files, or tasks, of runs and of keys apart. Without any: one kind, and nothing of it."""
    found: dict[str, list[Any]] = {}
    for thing in things:
        found.setdefault(thing.get("kind", ""), []).append(thing)
    return found or {"": []}


def _listed(evidence: Evidence, task: sqlite3.Row) -> Iterator[Any]:
    chunks = evidence.read(
        "SELECT files FROM lockstep_chunks WHERE job_id = ? AND stage = ? AND idx = ? ORDER BY seq",
        task["job_id"],
        task["stage"],
        task["idx"],
    )
    for chunk in chunks:
        yield from json.loads(zlib.decompress(chunk["files"]))
