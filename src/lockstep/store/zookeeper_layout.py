"""What the nodes of the ZooKeeper store are called and what is in them. See docs/decisions/0004.

version, clock
jobs/ID                       the record: all that moves; its version is the compare-and-set of the job
bodies/TOKEN                  written before the record, which names it; without one it is a ghost
  plan                        plan, holding, beside
  history/N
  stages/PLACE/specs/P        descriptors of 64 tasks, never changed
  stages/PLACE/pages/P        the moving part of 64 tasks: one line each, made when the first is claimed
  stages/PLACE/files/P/T-E-S  manifest chunk S of task T, written by the attempt with epoch E
states/STATE/AGE-ID, pinned/AGE-ID, expiring/AGE-ID     indexes, derived from the record
scopes/HASH                   the ids of the jobs that hold rows of this scope
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final
from urllib.parse import quote, unquote

from lockstep.errors import Corrupt, ErrorInfo
from lockstep.job import Fingerprint, HistoryEntry, Json, State, Task, TaskSpec, TaskState, commit_id
from lockstep.store.rules import dumps

FORMAT: Final = 1
PAGE: Final = 64
"""Tasks per page: large enough that 100,000 tasks are read in seconds, small enough to write at each verb."""
PART_BYTES: Final = 500_000
ERROR_CHARS: Final = 4_000
"""A page holds 64 errors and must stay well under 1 MB."""

_LETTER: Final = {
    TaskState.WAITING: b"W",
    TaskState.LEASED: b"L",
    TaskState.DONE: b"D",
    TaskState.FAILED: b"F",
}
_STATE: Final = {letter: state for state, letter in _LETTER.items()}


def quoted(name: str) -> str:
    """A name as part of a path: no slash, never `.` or `..`, no control characters."""
    safe = quote(name.encode("utf-8", "surrogatepass"), safe="")
    return safe.replace(".", "%2E") if safe.startswith(".") else safe


def unquoted(name: str) -> str:
    return unquote(name, errors="surrogatepass")


@dataclass(frozen=True)
class Layout:
    """The paths below one root."""

    root: str

    @property
    def jobs(self) -> str:
        return f"{self.root}/jobs"

    @property
    def bodies(self) -> str:
        return f"{self.root}/bodies"

    @property
    def pinned(self) -> str:
        return f"{self.root}/pinned"

    @property
    def expiring(self) -> str:
        return f"{self.root}/expiring"

    def states(self, state: State) -> str:
        return f"{self.root}/states/{state.value}"

    def folders(self) -> Iterator[str]:
        """All that a store has from its beginning, parents first."""
        for name in ("clock", "jobs", "bodies", "pinned", "expiring", "scopes", "states"):
            yield f"{self.root}/{name}"
        yield from map(self.states, State)

    def job(self, job_id: str) -> str:
        return f"{self.jobs}/{quoted(job_id)}"

    def scope(self, scope: str) -> str:
        digest = hashlib.sha256(scope.encode("utf-8", "surrogatepass")).hexdigest()
        return f"{self.root}/scopes/{digest}"

    def body(self, token: str) -> str:
        return f"{self.bodies}/{token}"

    def plan(self, token: str) -> str:
        return f"{self.body(token)}/plan"

    def history(self, token: str) -> str:
        return f"{self.body(token)}/history"

    def stage(self, token: str, place: str) -> str:
        return f"{self.body(token)}/stages/{place}"

    def specs(self, token: str, place: str, page: int) -> str:
        return f"{self.stage(token, place)}/specs/{page}"

    def page(self, token: str, place: str, page: int) -> str:
        return f"{self.stage(token, place)}/pages/{page}"

    def chunk(self, token: str, place: str, index: int, epoch: int, seq: int) -> str:
        return f"{self.stage(token, place)}/files/{index // PAGE}/{index}-{epoch}-{seq}"

    def indexes(self, record: Record) -> set[str]:
        """Where a job in this state is listed."""
        found = {f"{self.states(State(record.state))}/{listed(record.created_at, record.job_id)}"}
        if record.state in (State.COMPLETED, State.KILLED):
            if record.released:
                found.add(f"{self.expiring}/{listed(record.finished_at or 0.0, record.job_id)}")
            else:
                found.add(f"{self.pinned}/{listed(record.created_at, record.job_id)}")
        return found


def listed(at: float, job_id: str) -> str:
    """A name that sorts by time, then by id."""
    return f"{max(0, round(at * 1e6)):016x}-{quoted(job_id)}"


def id_listed(name: str) -> str:
    return unquoted(name.partition("-")[2])


def time_listed(name: str) -> float:
    return int(name.partition("-")[0], 16) / 1e6


# The record


@dataclass(frozen=True)
class Record:
    """All of a job that moves, in one small node. Counters are those of the current stage."""

    job_id: str
    request_id: str
    kind: str
    body: str
    scope: str
    plan_format: int
    stage: str
    place: str
    """Where the tasks of the stage are. Two that advance a job at the same time write to two places."""
    last_stage: str
    tasks_total: int
    created_at: float
    updated_at: float
    state: str = State.PENDING.value
    generation: int = 1
    holds: bool = True
    fresh: int = 0
    """Tasks from this index on were never claimed."""
    tasks_done: int = 0
    saved_rows: int = 0
    saved_bytes: int = 0
    ahead_rows: int = 0
    """What running attempts have read beyond their checkpoints."""
    ahead_bytes: int = 0
    files: int = 0
    aside_files: int = 0
    """Rejects: the manifests list them beside `files`, and `saved_bytes` has theirs."""
    aside_bytes: int = 0
    attempts: int = 0
    events: int = 0
    started_at: float | None = None
    finished_at: float | None = None
    snapshot_id: int | None = None
    kill_requested: bool = False
    released: bool = False
    commit_epoch: int = 0
    commit_owner: str | None = None
    commit_free_at: float = 0.0
    commit_started_at: float | None = None
    commit_attempts: int = 0
    paced_at: float | None = None
    paced_rows: int = 0
    error: Json | None = None
    fingerprint: Json | None = None
    open: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """By page: tasks leased, tasks waiting for a retry, when the first of them is free (null: never)."""
    past: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """By stage that is over: its tasks, its files and its place."""
    last_write: str = ""
    """Who wrote this: a client that lost the reply finds its own mark."""

    def encoded(self) -> bytes:
        known = {name: value for name, value in vars(self).items() if value != _DEFAULTS.get(name)}
        return dumps(known).encode()

    @property
    def rows_done(self) -> int:
        return self.saved_rows + self.ahead_rows

    @property
    def bytes_done(self) -> int:
        return self.saved_bytes + self.ahead_bytes - self.aside_bytes

    @property
    def commit_id(self) -> str:
        return commit_id(self.job_id, self.generation)

    @property
    def live(self) -> bool:
        return State(self.state).live

    def begun(self, stage: str) -> tuple[int, int, str]:
        """How many tasks of a stage were ever claimed, how many files it lists, and its place."""
        if stage == self.stage:
            return self.fresh, self.files + self.aside_files, self.place
        tasks, files, place = self.past.get(stage, (0, 0, ""))
        return tasks, files, place


_DEFAULTS: Final[Json] = {
    **{f.name: f.default for f in fields(Record) if f.name in vars(Record)},
    "open": {},
    "past": {},
}
_NAMES: Final = frozenset(f.name for f in fields(Record))


def decoded_record(job_id: str, data: bytes) -> Record:
    """Raises: Corrupt if the node is damaged."""
    try:
        raw = json.loads(data)
        return Record(**{name: value for name, value in raw.items() if name in _NAMES})
    except (ValueError, TypeError, AttributeError) as error:
        raise Corrupt(
            f"job {job_id} cannot be read: its record is damaged ({error!r})",
            hint="delete its node from ZooKeeper and ask for it again; other jobs are not affected",
        ) from error


def error_json(error: ErrorInfo | None) -> Json | None:
    if error is None:
        return None
    return replace(error, message=error.message[:ERROR_CHARS]).to_json()


def fingerprint_of(record: Record) -> Fingerprint:
    return Fingerprint() if record.fingerprint is None else Fingerprint.from_json(record.fingerprint)


# Tasks


@dataclass(frozen=True)
class Entry:
    """The moving part of a task. `free_at` says when anybody may take it; `saved_*` are the checkpoint's."""

    state: TaskState = TaskState.WAITING
    epoch: int = 0
    attempts: int = 0
    free_at: float = 0.0
    owner: str | None = None
    started_at: float | None = None
    ahead_rows: int = 0
    ahead_bytes: int = 0
    saved_rows: int = 0
    saved_bytes: int = 0
    saved_epoch: int = 0
    saved_digest: str | None = None
    position: str | None = None
    files: int = 0
    chunks: Sequence[Sequence[int]] = ()
    """Runs of manifest chunks: epoch, first, how many."""
    error: Json | None = None

    def line(self) -> bytes:
        known = {
            name: value
            for name, value in vars(self).items()
            if name != "state" and value != _ENTRY_DEFAULTS[name]
        }
        return _LETTER[self.state] + dumps(known).encode()

    @classmethod
    def of(cls, line: bytes) -> Entry:
        return cls(_STATE[line[:1]], **json.loads(line[1:])) if line else cls()

    def free(self) -> Entry:
        """Waiting, to be taken at once, back at its checkpoint."""
        return replace(self, state=TaskState.WAITING, free_at=0.0, owner=None, ahead_rows=0, ahead_bytes=0)


_ENTRY_DEFAULTS: Final = {f.name: f.default for f in fields(Entry)}


class Page:
    """The moving part of 64 tasks. Lines are read only when somebody asks for their task."""

    def __init__(self, number: int, generation: int, lines: Sequence[bytes]) -> None:
        self.number = number
        self.generation = generation
        self._lines = [*lines, *[b""] * (PAGE - len(lines))]

    @classmethod
    def of(cls, number: int, data: bytes) -> Page:
        generation, *lines = data.split(b"\n")
        return cls(number, int(generation), lines)

    def encoded(self) -> bytes:
        return b"\n".join([b"%d" % self.generation, *self._lines]).rstrip(b"\n")

    def copy(self) -> Page:
        return Page(self.number, self.generation, self._lines)

    def entry(self, index: int) -> Entry:
        return Entry.of(self._lines[index % PAGE])

    def put(self, index: int, entry: Entry) -> None:
        self._lines[index % PAGE] = entry.line()

    def open(self) -> Iterator[tuple[int, Entry]]:
        """The tasks that were touched and are not done."""
        for slot, line in enumerate(self._lines):
            if line and line[:1] != b"D":
                yield self.number * PAGE + slot, Entry.of(line)

    def touched(self) -> Iterator[tuple[int, Entry]]:
        """The tasks that were ever claimed."""
        for slot, line in enumerate(self._lines):
            if line:
                yield self.number * PAGE + slot, Entry.of(line)

    def settle(self, record: Record) -> None:
        """Bring the page to what the record says: an ended job has no leases, a retried one begins anew."""
        behind = self.generation < record.generation
        if not behind and record.live:
            return
        for index, entry in list(self.open()):
            if behind:
                self.put(index, replace(entry.free(), attempts=0, started_at=None, error=None))
            elif entry.state is TaskState.LEASED:
                self.put(index, entry.free())
        self.generation = record.generation

    def summary(self) -> list[Any] | None:
        """What `Record.open` says of this page; None if nothing is open."""
        entries = [entry for _, entry in self.open()]
        if not entries:
            return None
        frees = [entry.free_at for entry in entries if entry.state is not TaskState.FAILED]
        retrying = sum(entry.state is TaskState.WAITING and entry.free_at > 0 for entry in entries)
        leased = sum(entry.state is TaskState.LEASED for entry in entries)
        return [leased, retrying, min(frees, default=None)]


def as_task(record: Record, stage: str, index: int, spec: TaskSpec, entry: Entry) -> Task:
    waiting = entry.state is TaskState.WAITING and entry.free_at > 0
    return Task(
        job_id=record.job_id,
        stage=stage,
        index=index,
        descriptor=spec.descriptor,
        rows=spec.rows,
        size_bytes=spec.size_bytes,
        state=entry.state,
        epoch=entry.epoch,
        attempts=entry.attempts,
        position=None if entry.position is None else json.loads(entry.position),
        rows_done=entry.saved_rows + entry.ahead_rows,
        bytes_done=entry.saved_bytes + entry.ahead_bytes,
        files=entry.files,
        owner=entry.owner,
        lease_until=entry.free_at if entry.state is TaskState.LEASED else None,
        started_at=entry.started_at,
        next_attempt_at=entry.free_at if waiting else None,
        error=ErrorInfo.from_json(entry.error),
    )


def encoded_specs(specs: Sequence[TaskSpec]) -> bytes:
    return packed([[spec.descriptor, spec.rows, spec.size_bytes] for spec in specs])


def decoded_specs(blob: bytes) -> list[TaskSpec]:
    return [TaskSpec(*raw) for raw in unpacked(blob)]


# Values that may be larger than a node


def packed(value: Any) -> bytes:
    return zlib.compress(dumps(value).encode())


def unpacked(blob: bytes) -> Any:
    return json.loads(zlib.decompress(blob))


def in_parts(path: str, blob: bytes) -> Iterator[tuple[str, bytes]]:
    """The nodes that hold `blob`: the first says how many there are, the others lie below it."""
    parts = [blob[start : start + PART_BYTES] for start in range(0, len(blob), PART_BYTES)] or [b""]
    yield path, b"%d\n" % len(parts) + parts[0]
    for number, part in enumerate(parts[1:], 1):
        yield f"{path}/{number}", part


def first_part(data: bytes) -> tuple[int, bytes]:
    """How many parts there are, and what is in the first. Raises: ValueError."""
    count, _, part = data.partition(b"\n")
    return int(count), part


# History


def encoded_note(entry: HistoryEntry) -> bytes:
    return dumps({**vars(entry), "state": entry.state.value}).encode()


def decoded_note(data: bytes) -> HistoryEntry:
    raw = json.loads(data)
    return HistoryEntry(**{**raw, "state": State(raw["state"])})
