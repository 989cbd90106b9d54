"""Jobs, plans, tasks and manifests: plain data, no I/O.

The states of a job and the moves between them are one table, `TRANSITIONS`; whatever is not in it is
refused. See docs/architecture.md for the picture.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Final

from lockstep.errors import ErrorInfo, Incompatible

PLAN_FORMAT: Final = 1

Json = dict[str, Any]
Position = dict[str, Any]
"""Where a task goes on. Its meaning belongs to the source; the store keeps it as it is."""


class Kind(StrEnum):
    EXPORT = "export"
    IMPORT = "import"


class State(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    COMMITTING = "committing"
    COMPLETED = "completed"
    FAILED = "failed"
    KILLED = "killed"

    @property
    def live(self) -> bool:
        return self not in ENDED


ENDED: Final = frozenset({State.COMPLETED, State.FAILED, State.KILLED})


class Event(StrEnum):
    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    ALL_TASKS_DONE = "all_tasks_done"
    COMMITTED = "committed"
    FAIL = "fail"
    KILL = "kill"
    RETRY = "retry"


TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = {
    (State.PENDING, Event.START): State.RUNNING,
    (State.PENDING, Event.PAUSE): State.PAUSED,
    (State.PENDING, Event.ALL_TASKS_DONE): State.COMMITTING,
    (State.PENDING, Event.FAIL): State.FAILED,
    (State.PENDING, Event.KILL): State.KILLED,
    (State.RUNNING, Event.PAUSE): State.PAUSED,
    (State.RUNNING, Event.ALL_TASKS_DONE): State.COMMITTING,
    (State.RUNNING, Event.FAIL): State.FAILED,
    (State.RUNNING, Event.KILL): State.KILLED,
    (State.PAUSED, Event.RESUME): State.PENDING,
    (State.PAUSED, Event.FAIL): State.FAILED,
    (State.PAUSED, Event.KILL): State.KILLED,
    # The next three only by the holder of the commit lease, after it has read or fenced the register.
    (State.COMMITTING, Event.COMMITTED): State.COMPLETED,
    (State.COMMITTING, Event.FAIL): State.FAILED,
    (State.COMMITTING, Event.KILL): State.KILLED,
    (State.FAILED, Event.RETRY): State.PENDING,
    # To give a failed job up for good: its frozen copy is kept for a retry until then.
    (State.FAILED, Event.KILL): State.KILLED,
}


def after(state: State, event: Event) -> State | None:
    """The state that `event` leads to, or None where it is forbidden."""
    return TRANSITIONS.get((state, event))


class TaskState(StrEnum):
    WAITING = "waiting"
    LEASED = "leased"
    DONE = "done"
    FAILED = "failed"


class Verdict(StrEnum):
    """What the store answers to a running task."""

    GO_ON = "go_on"
    PAUSE = "pause"
    """Stop and give the lease back; the job goes on later."""
    STOP = "stop"
    """The job has ended, or a newer attempt exists: write nothing more."""


# What is published

DATA: Final = "data"
RUN: Final = "run"
KEYS: Final = "keys"
REJECTS: Final = "rejects"
LOSERS: Final = "losers"
DROPPED: Final = "dropped"
"""In the position of a task that merges: the rows that were left out so far."""


def _multiplier(name: str) -> int:
    """Odd, so that nothing of a column is lost; of each name another one, so that no two can be swapped."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") | 1


@dataclass(frozen=True)
class Fingerprint:
    """Row count and an order-independent 64-bit hash per column. Adding two gives that of both sets."""

    rows: int = 0
    columns: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Fingerprint) -> Fingerprint:
        names = {**self.columns, **other.columns}
        return Fingerprint(
            self.rows + other.rows,
            {n: (self.columns.get(n, 0) + other.columns.get(n, 0)) % 2**64 for n in names},
        )

    def folded(self) -> int:
        """All columns in one 64-bit number that adds up as they do: where there is no room for each."""
        return sum(value * _multiplier(name) for name, value in self.columns.items()) % 2**64

    def to_json(self) -> Json:
        return {"rows": self.rows, "columns": {n: f"{h:016x}" for n, h in self.columns.items()}}

    @classmethod
    def from_json(cls, raw: Json) -> Fingerprint:
        return cls(int(raw["rows"]), {n: int(h, 16) for n, h in raw["columns"].items()})


@dataclass(frozen=True)
class StagedFile:
    """A finished file that no reader can see yet, with all that the commit needs to know of it.

    `stats` holds the Iceberg column statistics as plain JSON (bounds are base64 of Iceberg's binary
    form); only the target that wrote it reads it.
    """

    path: str
    size_bytes: int
    rows: int
    checksum: str
    fingerprint: Fingerprint
    partition: Sequence[Any] = ()
    stats: Json = field(default_factory=dict)
    kind: str = DATA
    """What it is for: only `data` is published; the rest are steps of an import on its way there."""

    def to_json(self) -> Json:
        return {
            "path": self.path,
            "size_bytes": self.size_bytes,
            "rows": self.rows,
            "checksum": self.checksum,
            "fingerprint": self.fingerprint.to_json(),
            "partition": list(self.partition),
            "stats": self.stats,
            **({} if self.kind == DATA else {"kind": self.kind}),
        }

    @classmethod
    def from_json(cls, raw: Json) -> StagedFile:
        return cls(
            raw["path"],
            raw["size_bytes"],
            raw["rows"],
            raw["checksum"],
            Fingerprint.from_json(raw["fingerprint"]),
            tuple(raw.get("partition", ())),
            raw.get("stats", {}),
            raw.get("kind", DATA),
        )


# The plan


@dataclass(frozen=True)
class Piece:
    """A part of the source that a job holds: a name, and for ClickHouse its range of block numbers.

    Merges rename parts but keep the block range, so ranges decide whether two jobs hold the same rows.
    """

    name: str
    first: int | None = None
    last: int | None = None

    def overlaps(self, other: Piece) -> bool:
        if self.first is None or self.last is None or other.first is None or other.last is None:
            return self.name == other.name
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Holding:
    """What a job claims of the source, for one target: `scope` names source, target and partition."""

    scope: str
    whole: bool
    pieces: Sequence[Piece] = ()

    def overlap(self, other: Holding) -> Piece | None:
        """A piece of `self` that `other` holds too, or None. Two whole partitions always overlap."""
        if self.scope != other.scope:
            return None
        if self.whole and other.whole:
            return self.pieces[0] if self.pieces else Piece("*")
        if all(piece.first is None for piece in other.pieces):
            names = {piece.name for piece in other.pieces}
            return next((piece for piece in self.pieces if piece.name in names), None)
        for mine in self.pieces:
            if any(mine.overlaps(theirs) for theirs in other.pieces):
                return mine
        return None


@dataclass(frozen=True)
class ColumnMap:
    """One target column and the source column that fills it; `source` None means NULL.

    `type` is the target's Iceberg type: text for a primitive, Iceberg's JSON (with field ids) if nested.
    """

    target: str
    field_id: int
    type: str | Json
    required: bool
    source: str | None
    source_type: str | None
    lossy: bool = False
    """True where the user accepted that values lose precision on the way (`--allow-lossy`)."""


@dataclass(frozen=True)
class Limits:
    """Budgets that a job carries with it. Units last."""

    task_memory_bytes: int = 512_000_000
    lease_s: float = 30.0
    task_attempts: int = 8
    task_deadline_s: float = 3600.0
    commit_attempts: int = 20
    commit_deadline_s: float = 600.0


@dataclass(frozen=True)
class SortKey:
    """One column that rows are ordered by, after Iceberg's `transform` of it."""

    column: str
    transform: str = "identity"
    descending: bool = False
    nulls_first: bool = True


@dataclass(frozen=True)
class ImportTerms:
    """What an import promises beyond the rows themselves.

    `order` is how data files are sorted: by partition first, then by the table's sort order. Empty: as read.
    """

    order: Sequence[SortKey] = ()
    unique: Sequence[str] = ()
    on_duplicate: str = "error"
    max_rejects: int = 0
    rejects: str | None = None
    rows_estimate: int = 0
    """About how many records the inputs have, for progress only. 0: nobody knows."""

    def to_json(self) -> Json:
        return {**vars(self), "order": [vars(key) for key in self.order], "unique": list(self.unique)}

    @classmethod
    def from_json(cls, raw: Json) -> ImportTerms:
        known = {f.name: raw[f.name] for f in fields(cls) if f.name in raw}
        known["order"] = tuple(SortKey(**key) for key in raw.get("order", ()))
        known["unique"] = tuple(raw.get("unique", ()))
        return cls(**known)


@dataclass(frozen=True)
class Plan:
    """The frozen input of a job. Addresses keep `${NAME}` in place of secrets.

    `schema`, `spec` and `sort_order` are Iceberg's own JSON; `pin` belongs to the source.
    """

    kind: Kind
    source: str
    target: str
    target_uuid: str
    location: str
    schema: Json
    spec: Json
    sort_order: Json
    columns: Sequence[ColumnMap]
    pin: Json
    partition: str | None = None
    partition_values: Sequence[Any] = ()
    stages: Sequence[str] = ("write",)
    rows: int | None = None
    file_size_bytes: int = 256_000_000
    deadline_s: float | None = None
    on_existing: str = "error"
    replaces: Sequence[str] = ()
    """Commit ids of the earlier jobs whose files this one replaces."""
    scope: str = ""
    """A short name of source partition and target, for the target's own memory."""
    limits: Limits = Limits()
    properties: Json = field(default_factory=dict)
    terms: ImportTerms | None = None
    """None for an export."""
    format_version: int = PLAN_FORMAT

    def to_json(self) -> Json:
        raw = {f.name: getattr(self, f.name) for f in fields(self)}
        raw["kind"] = self.kind.value
        raw["columns"] = [vars(column) for column in self.columns]
        raw["limits"] = vars(self.limits)
        raw["terms"] = self.terms.to_json() if self.terms else None
        for name in ("partition_values", "stages", "replaces"):
            raw[name] = list(raw[name])
        return raw

    @classmethod
    def from_json(cls, raw: Json) -> Plan:
        """Read a plan. Missing optional fields take their defaults, so older plans are read.

        Raises: Incompatible if it was written by a newer version.
        """
        version = raw.get("format_version", 1)
        if version > PLAN_FORMAT:
            raise Incompatible(
                f"the plan has format {version}; this version of Lockstep reads up to {PLAN_FORMAT}",
                hint="upgrade Lockstep on this machine; the job was left as it is",
            )
        known = {f.name: raw[f.name] for f in fields(cls) if f.name in raw}
        known["kind"] = Kind(raw["kind"])
        known["columns"] = tuple(ColumnMap(**column) for column in raw["columns"])
        limit_names = {f.name for f in fields(Limits)}
        known["limits"] = Limits(**{k: v for k, v in raw.get("limits", {}).items() if k in limit_names})
        known["terms"] = ImportTerms.from_json(raw["terms"]) if raw.get("terms") else None
        for name in ("partition_values", "stages", "replaces"):
            if name in known:
                known[name] = tuple(known[name])
        return cls(**known)


def commit_id(job_id: str, generation: int) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"lockstep:{job_id}:{generation}"))


def snapshot_id_of(commit: str) -> int:
    """The Iceberg snapshot id of a commit id: 63 bits of SHA-256, never 0."""
    value = int.from_bytes(hashlib.sha256(commit.encode()).digest()[:8], "big") >> 1
    return value or 1


# Jobs and tasks as the store knows them


@dataclass(frozen=True)
class TaskSpec:
    """A task before it has run: what its source made of the pin."""

    descriptor: Json
    rows: int
    size_bytes: int = 0


@dataclass(frozen=True)
class Task:
    job_id: str
    stage: str
    index: int
    descriptor: Json
    rows: int
    size_bytes: int
    state: TaskState
    epoch: int
    attempts: int
    position: Position | None = None
    rows_done: int = 0
    bytes_done: int = 0
    """Rows read and bytes staged so far; while it runs these move ahead of the checkpoint."""
    files: int = 0
    owner: str | None = None
    lease_until: float | None = None
    started_at: float | None = None
    next_attempt_at: float | None = None
    error: ErrorInfo | None = None


@dataclass(frozen=True)
class Lease:
    """The right to work on one task, until it expires or a newer epoch exists."""

    job_id: str
    stage: str
    index: int
    epoch: int
    worker: str


@dataclass(frozen=True)
class CommitLease:
    job_id: str
    generation: int
    epoch: int
    worker: str


@dataclass(frozen=True)
class Progress:
    rows: int
    size_bytes: int


@dataclass(frozen=True)
class NewJob:
    job_id: str
    request_id: str
    plan: Plan
    holding: Holding
    tasks: Sequence[TaskSpec]
    beside: frozenset[str] = frozenset()
    """Ids of jobs that may hold the same rows (append, replace); any other holder is a conflict."""


@dataclass(frozen=True)
class Job:
    job_id: str
    request_id: str
    kind: Kind
    state: State
    generation: int
    plan: Plan
    holding: Holding
    stage: str
    tasks_total: int
    tasks_done: int
    tasks_waiting_for_retry: int
    rows_done: int
    bytes_done: int
    files: int
    attempts: int
    created_at: float
    updated_at: float
    started_at: float | None = None
    finished_at: float | None = None
    snapshot_id: int | None = None
    workers: Sequence[str] = ()
    kill_requested: bool = False
    released: bool = False
    """True once the source's pin is gone."""
    commit_started_at: float | None = None
    commit_attempts: int = 0
    paced_at: float | None = None
    """Since when work has gone on without a break in this stage."""
    paced_rows: int = 0
    """`rows_done` at that time."""
    error: ErrorInfo | None = None
    fingerprint: Fingerprint | None = None

    @property
    def commit_id(self) -> str:
        return commit_id(self.job_id, self.generation)


NOTHING_SENT: Final = "no commit was sent before it"
"""What the history says of a retry if no request to publish the generation before it ever left a worker."""


@dataclass(frozen=True)
class HistoryEntry:
    at: float
    event: str
    state: State
    generation: int
    detail: str = ""
    worker: str | None = None


def split_evenly(total: int, most: int) -> Iterable[tuple[int, int]]:
    """Cut `range(total)` into the fewest ranges of at most `most`, as equal as can be."""
    pieces = max(1, -(-total // most))
    for i in range(pieces):
        yield total * i // pieces, total * (i + 1) // pieces
