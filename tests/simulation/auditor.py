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
from collections.abc import Iterator, Mapping, Sequence
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
class PlannedJob:
    """What a user asked for: the ranges of rows, one for each task."""

    table: str
    scope: str
    ranges: Sequence[tuple[int, int]]

    @property
    def rows(self) -> list[int]:
        return [row for first, last in self.ranges for row in range(first, last)]


@dataclass(frozen=True)
class Evidence:
    database: str
    tables: Mapping[str, Sequence[tuple[float, str, TableMetadata]]]
    """Every state that each table had: when, by whom, and the metadata."""
    file_io: Mapping[str, FileIO]
    files: Mapping[str, bytes]
    overwritten: Sequence[str]
    planned: Mapping[str, PlannedJob]
    rival_paths: Sequence[str]
    undisturbed: bool
    ended_in_time: bool
    broken: Sequence[str]

    def read(self, query: str, *values: Any) -> list[sqlite3.Row]:
        connection = sqlite3.connect(self.database)
        connection.row_factory = sqlite3.Row
        try:
            return connection.execute(query, values).fetchall()
        finally:
            connection.close()

    def jobs(self) -> list[sqlite3.Row]:
        return self.read("SELECT * FROM lockstep_jobs ORDER BY job_id")

    def states(self) -> dict[str, str]:
        return {job["job_id"]: job["state"] for job in self.jobs()}


def audit(evidence: Evidence) -> list[str]:
    """Every broken promise, one sentence each."""
    found = [f"a thread ended with {broken}" for broken in evidence.broken]
    found += [f"{path} was written twice" for path in evidence.overwritten]
    if not evidence.ended_in_time:
        live = {job: state for job, state in evidence.states().items() if state not in ENDED}
        found.append(f"not every job ended within its budget: {live}")
    heads = {name: _head(evidence, name) for name in evidence.tables}
    for check in (_one_line, _nothing_lost, _rows_agree, _commits_agree):
        found += check(evidence, heads)
    for job in evidence.jobs():
        found += _history(evidence, job)
        found += _lock_step(evidence, job)
    return found


@dataclass(frozen=True)
class Head:
    """The files of a table's newest snapshot, and the rows in them."""

    paths: Sequence[str]
    missing: Sequence[str]
    rows: Counter[str | int]


def _head(evidence: Evidence, name: str) -> Head:
    states = evidence.tables[name]
    snapshot = states[-1][2].current_snapshot() if states else None
    if snapshot is None:
        return Head((), (), Counter())
    try:
        paths = list(_paths(snapshot, evidence.file_io[name]))
    except FileNotFoundError as error:
        return Head((), (str(error),), Counter())
    rows: Counter[str | int] = Counter()
    missing = [path for path in paths if path not in evidence.files]
    for path in paths:
        rows.update(json.loads(evidence.files.get(path, b"[]")))
    return Head(paths, missing, rows)


def _paths(snapshot: Snapshot, file_io: FileIO) -> Iterator[str]:
    for manifest in snapshot.manifests(file_io):
        for entry in manifest.fetch_manifest_entry(file_io, discard_deleted=True):
            yield entry.data_file.file_path


# The tables


def _one_line(evidence: Evidence, heads: Mapping[str, Head]) -> Iterator[str]:
    """Each new head is the child of the one before."""
    for name, states in evidence.tables.items():
        before: int | None = None
        for at, by, metadata in states:
            head = metadata.current_snapshot()
            if head is not None and head.snapshot_id != before:
                if head.parent_snapshot_id != before:
                    yield f"{name}: {by} put a snapshot beside the head {before} at {at:.1f}"
                before = head.snapshot_id
            elif head is None and before is not None:
                yield f"{name}: {by} took the branch away at {at:.1f}"


def _nothing_lost(evidence: Evidence, heads: Mapping[str, Head]) -> Iterator[str]:
    for name, head in heads.items():
        for path in head.missing:
            yield f"{name} refers to {path}, which was deleted"
        if len(set(head.paths)) < len(head.paths):
            yield f"{name} lists a file twice"
    rows = sum((head.rows for head in heads.values()), Counter())
    for path in evidence.rival_paths:
        [row] = json.loads(evidence.files[path])
        if rows[row] != 1:
            yield f"the row of another writer, {row}, is there {rows[row]} times"


def _rows_agree(evidence: Evidence, heads: Mapping[str, Head]) -> Iterator[str]:
    """The rows of a completed job are there once, those of any other one never."""
    states = evidence.states()
    known: Counter[str | int] = Counter()
    for job_id, planned in evidence.planned.items():
        state = states.get(job_id, "gone")
        wanted = 1 if state == "completed" else 0
        rows = heads[planned.table].rows
        wrong = {row: rows[row] for row in planned.rows if rows[row] != wanted}
        known.update(planned.rows)
        if wrong:
            yield f"{job_id} is {state}, and its rows are there so many times: {wrong}"
        if evidence.undisturbed and state == "failed":
            yield f"{job_id} failed although nothing was disturbed"
    for name, head in heads.items():
        strange = {row for row in head.rows if isinstance(row, int) and not known[row]}
        if strange:
            yield f"{name} holds rows that nobody asked for: {sorted(strange)}"
    done = Counter(evidence.planned[job].scope for job in evidence.planned if states.get(job) == "completed")
    for scope, times in done.items():
        if times > 1:
            yield f"{scope} was exported {times} times"


def commit_id(job_id: str, generation: int) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"lockstep:{job_id}:{generation}"))


def snapshot_of(commit: str) -> int:
    return int.from_bytes(hashlib.sha256(commit.encode()).digest()[:8], "big") >> 1


def _commits_agree(evidence: Evidence, heads: Mapping[str, Head]) -> Iterator[str]:
    """What was published and when, against what the history says of each generation."""
    for job in evidence.jobs():
        job_id = job["job_id"]
        planned = evidence.planned.get(job_id)
        if planned is None:
            continue
        landed = {
            generation: _landed(evidence.tables[planned.table], snapshot_of(commit_id(job_id, generation)))
            for generation in range(1, job["generation"] + 1)
        }
        for entry in _entries(evidence, job_id):
            at = landed[entry["generation"]]
            if entry["event"] in ("fail", "kill") and entry["state"] in ENDED and at is not None:
                yield (
                    f"{job_id} is {entry['state']} since {entry['at']:.1f} in generation "
                    f"{entry['generation']}, which was published at {at:.1f}"
                )
        if job["state"] == "completed":
            yield from _completed(evidence, job, landed)


def _completed(evidence: Evidence, job: sqlite3.Row, landed: Mapping[int, float | None]) -> Iterator[str]:
    times = [at for at in landed.values() if at is not None]
    if len(times) != 1:
        yield f"{job['job_id']} is completed and was published {len(times)} times"
    elif times[0] > job["finished_at"]:
        yield f"{job['job_id']} was completed before it was published"
    generation = next((number for number, at in landed.items() if at is not None), 0)
    if job["snapshot_id"] != snapshot_of(commit_id(job["job_id"], generation)):
        yield f"{job['job_id']} names the snapshot {job['snapshot_id']}, which is not its own"


def _landed(states: Sequence[tuple[float, str, TableMetadata]], snapshot_id: int) -> float | None:
    """When a snapshot with this id became the head with files of ours; a fence does not count."""
    for at, _, metadata in states:
        snapshot = metadata.snapshot_by_id(snapshot_id)
        if snapshot is not None:
            labels = snapshot.summary.additional_properties if snapshot.summary else {}
            return None if labels.get("lockstep.fenced") == "true" else at
    return None


# The store


def _entries(evidence: Evidence, job_id: str) -> list[sqlite3.Row]:
    return evidence.read("SELECT * FROM lockstep_history WHERE job_id = ? ORDER BY id", job_id)


def _history(evidence: Evidence, job: sqlite3.Row) -> Iterator[str]:
    """The history leads to the state of today by allowed moves only."""
    state, generation = "pending", 1
    for entry in _entries(evidence, job["job_id"]):
        event = entry["event"]
        if event in EVENTS:
            following = ALLOWED.get((state, event))
            if following is None:
                yield f"{job['job_id']} was {state}, and {event} happened"
                return
            state = following
            generation += event == "retry"
        if (entry["state"], entry["generation"]) != (state, generation):
            yield f"{job['job_id']}: the history notes {entry['state']} after {event}, not {state}"
            return
    if (job["state"], job["generation"]) != (state, generation):
        yield f"{job['job_id']} is {job['state']}, and its history ends with {state}"


def _lock_step(evidence: Evidence, job: sqlite3.Row) -> Iterator[str]:
    """The files of each task hold its rows from the first up to its position, each once, in order."""
    planned = evidence.planned.get(job["job_id"])
    if planned is None:
        return
    tasks = evidence.read("SELECT * FROM lockstep_tasks WHERE job_id = ? ORDER BY idx", job["job_id"])
    for task in tasks:
        first, last = planned.ranges[task["idx"]]
        position = json.loads(task["position"])["row"] if task["position"] not in (None, "{}") else first
        name = f"task {task['idx']} of {job['job_id']}"
        listed = list(_listed(evidence, task))
        missing = [file["path"] for file in listed if file["path"] not in evidence.files]
        if missing:
            yield f"{name} lists {missing[0]}, which was deleted"
            continue
        rows = [row for file in listed for row in json.loads(evidence.files[file["path"]])]
        if rows != list(range(first, position)):
            yield f"{name} is at row {position}, and its files hold {rows}"
        if task["state"] == "done" and position != last:
            yield f"{name} is done at row {position} of {last}"


def _listed(evidence: Evidence, task: sqlite3.Row) -> Iterator[Any]:
    chunks = evidence.read(
        "SELECT files FROM lockstep_chunks WHERE job_id = ? AND stage = ? AND idx = ? ORDER BY seq",
        task["job_id"],
        task["stage"],
        task["idx"],
    )
    for chunk in chunks:
        yield from json.loads(zlib.decompress(chunk["files"]))
