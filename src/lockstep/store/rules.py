"""What job stores decide and say alike, whatever they are built on: plain functions, no I/O."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from lockstep.errors import (
    Conflict,
    Corrupt,
    ErrorInfo,
    Fenced,
    Incompatible,
    Invalid,
    LockstepError,
    NoSuchJob,
)
from lockstep.job import (
    NOTHING_SENT,
    REJECTS,
    CommitLease,
    Event,
    Fingerprint,
    Holding,
    Job,
    Json,
    Kind,
    Lease,
    Piece,
    Plan,
    Position,
    StagedFile,
    State,
    TaskSpec,
    Verdict,
)
from lockstep.runtime import rfc3339

SHOWN: Final = 10
ENDS: Final = frozenset({Event.COMMITTED, Event.FAIL, Event.KILL})
"""What a commit can end with."""


class JobHead(Protocol):
    """What is known of a job without its plan."""

    @property
    def job_id(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def created_at(self) -> float: ...
    @property
    def finished_at(self) -> float | None: ...


class HolderHead(JobHead, Protocol):
    """What is known of a job that may hold the same rows."""

    @property
    def kind(self) -> str: ...


class StageHead(JobHead, Protocol):
    """What is known of a job and the stage that it is in."""

    @property
    def stage(self) -> str: ...
    @property
    def tasks_total(self) -> int: ...
    @property
    def tasks_done(self) -> int: ...


class PacedHead(JobHead, Protocol):
    """What is known of a job and how far it is."""

    @property
    def rows_done(self) -> int: ...
    @property
    def updated_at(self) -> float: ...


class CommitHead(JobHead, Protocol):
    """What is known of a job and who commits it."""

    @property
    def generation(self) -> int: ...
    @property
    def commit_epoch(self) -> int: ...
    @property
    def commit_owner(self) -> str | None: ...


def dumps(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


# The frozen part of a job


@dataclass(frozen=True)
class Frozen:
    """The part of a job that never changes."""

    plan: Plan
    holding: Holding
    beside: frozenset[str]

    def to_json(self) -> Json:
        return {
            "plan": self.plan.to_json(),
            "holding": asdict(self.holding),
            "beside": sorted(self.beside),
        }

    @classmethod
    def from_json(cls, raw: Json) -> Frozen:
        """Raises: Incompatible for a newer format; whatever damage makes of it: ValueError, KeyError, …"""
        return cls(Plan.from_json(raw["plan"]), holding_from_json(raw["holding"]), frozenset(raw["beside"]))


def silent(job: PacedHead, now: float, lease_s: float) -> bool:
    """Whether nobody can have worked on a running job lately: whoever does says so within a lease."""
    return job.state == State.RUNNING and now - job.updated_at >= lease_s


def paced_from(now: float, rows_done: int) -> dict[str, Any]:
    """What is noted where work begins, or goes on after a time without any: the pace is measured from it."""
    return {"paced_at": now, "paced_rows": rows_done}


def as_job(
    row: Any,
    frozen: Frozen,
    workers: set[str],
    retrying: int,
    now: float,
    error: ErrorInfo | None,
    fingerprint: Fingerprint,
) -> Job:
    """A job as its store's `row` tells it; the names there are those of the job."""
    committer = row.commit_owner if row.state == State.COMMITTING and row.commit_free_at > now else None
    return Job(
        job_id=row.job_id,
        request_id=row.request_id,
        kind=Kind(row.kind),
        state=State(row.state),
        generation=row.generation,
        plan=frozen.plan,
        holding=frozen.holding,
        stage=row.stage,
        tasks_total=row.tasks_total,
        tasks_done=row.tasks_done,
        tasks_waiting_for_retry=retrying,
        rows_done=row.rows_done,
        bytes_done=row.bytes_done,
        files=row.files,
        attempts=row.attempts,
        created_at=row.created_at,
        updated_at=row.updated_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        snapshot_id=row.snapshot_id,
        workers=tuple(sorted(workers | ({committer} if committer is not None else set()))),
        kill_requested=bool(row.kill_requested),
        released=bool(row.released),
        commit_started_at=row.commit_started_at,
        commit_attempts=row.commit_attempts,
        paced_at=row.paced_at,
        paced_rows=row.paced_rows,
        error=error,
        fingerprint=fingerprint if row.stage == row.last_stage else None,
    )


def holding_from_json(raw: Json) -> Holding:
    pieces = tuple(Piece(piece["name"], piece["first"], piece["last"]) for piece in raw["pieces"])
    return Holding(raw["scope"], raw["whole"], pieces)


def damaged_plan(job_id: str, error: Exception) -> LockstepError:
    """What to raise for a job whose plan raised `error` while it was read."""
    if isinstance(error, Incompatible):
        return Incompatible(f"job {job_id} cannot be read: {error.message}", hint=error.hint)
    return Corrupt(
        f"job {job_id} cannot be read: its plan is damaged ({error!r})",
        hint="kill it and ask for it again; other jobs are not affected",
    )


def missing_plan(job_id: str) -> Corrupt:
    return Corrupt(
        f"job {job_id} cannot be read: its plan is missing from the store",
        hint="kill it and ask for it again; other jobs are not affected",
    )


def missing_tasks(stage: str, done: int, total: int) -> ErrorInfo:
    """Why a job fails whose open tasks are no longer in the store: it could never end by itself."""
    return ErrorInfo(
        Corrupt.__name__,
        f"{done} of {total} tasks of stage {stage} are done, "
        "and the records of the others are missing from the store",
        "nothing was published; ask for it again",
    )


# Refusals


def counted(tasks: Sequence[TaskSpec]) -> str:
    """How the history tells the number of tasks."""
    return "1 task" if len(tasks) == 1 else f"{len(tasks)} tasks"


def no_such_job(job_id: str) -> NoSuchJob:
    return NoSuchJob(f"no job {job_id}", hint="`lockstep jobs` lists them")


def the_one(prefix: str, found: Sequence[str]) -> str:
    """The id that `prefix` means, of the sorted ids that begin with it.

    Raises: NoSuchJob if there is none, Invalid if there are several.
    """
    if not found:
        raise NoSuchJob(f'no job has an id that begins with "{prefix}"', hint="`lockstep jobs` lists them")
    if prefix in found:
        return prefix
    if len(found) > 1:
        listed = ", ".join(found[:SHOWN]) + (", …" if len(found) > SHOWN else "")
        raise Invalid(
            f'several jobs have an id that begins with "{prefix}": {listed}', hint="add more letters"
        )
    return found[0]


def conflict(refused: str, piece: Piece | None, holding: Holding, other: HolderHead) -> Conflict:
    """`refused` could not be done because `other` holds `piece`."""
    what = f"part {piece.name}" if piece is not None and not holding.whole else "it"
    show = f"`lockstep show {other.job_id}` shows that job"
    export = other.kind == Kind.EXPORT
    if other.state == State.COMPLETED:
        replacing = ", replace puts the new rows in place of the old" if export else ""
        return Conflict(
            f"{refused}: {what} was {other.kind}ed by job {other.job_id}, "
            f"{other.state} since {rfc3339(other.finished_at)}",
            job_id=other.job_id,
            hint=f"--on-existing skip leaves it out, append adds the rows again{replacing}; {show}",
        )
    replacing = ", replace stops that job and takes its place" if export else ""
    return Conflict(
        f"{refused}: {what} is held by job {other.job_id}, {other.state}, "
        f"created {rfc3339(other.created_at)}",
        job_id=other.job_id,
        hint=f"--on-existing skip leaves it out{replacing}; {show}",
    )


def refuse_overlap(
    refused: str,
    job_id: str,
    holding: Holding,
    beside: Collection[str],
    held: Iterable[tuple[HolderHead, Holding | None]],
) -> None:
    """Raises: Conflict if a job outside `beside` holds a part of `holding`; None: it cannot be read."""
    for other, theirs in held:
        if other.job_id == job_id or other.job_id in beside:
            continue
        piece = None if theirs is None else holding.overlap(theirs)
        # What cannot be read may hold these rows: only exactly-once is more important than going on.
        if piece is not None or theirs is None:
            raise conflict(refused, piece, holding, other)


def what_is_refused(plan: Plan) -> str:
    name = plan.source + (f" partition {plan.partition}" if plan.partition is not None else "")
    return f"cannot {plan.kind.value} {name} to {plan.target}"


def refuse_stop(event: Event) -> None:
    """Raises: Invalid if `event` does not stop a job."""
    if event not in (Event.KILL, Event.FAIL):
        raise Invalid(f"a job is stopped with kill or fail; not with {event}")


def refuse_pause(job: JobHead) -> None:
    """Raises: Invalid if the job cannot be paused."""
    if job.state == State.COMMITTING:
        raise Invalid(
            f"job {job.job_id} is committing and cannot be paused",
            hint=f"`lockstep kill {job.job_id}` can stop it",
        )
    if not State(job.state).live:
        raise Invalid(f"job {job.job_id} is {job.state}: there is nothing to pause")


def refuse_resume(job: JobHead) -> None:
    """Raises: Invalid if the job cannot be resumed."""
    if not State(job.state).live:
        hint = f"`lockstep retry {job.job_id}` begins again" if job.state == State.FAILED else None
        raise Invalid(f"job {job.job_id} is {job.state}: there is nothing to resume", hint=hint)


def refuse_retry(job: JobHead) -> None:
    """Raises: Invalid if the job cannot be retried."""
    if job.state != State.FAILED:
        raise Invalid(f"job {job.job_id} is {job.state}: only a failed job can be retried")


def refuse_advance(job: StageHead, stage: str, next_stage: str) -> None:
    """Raises: Fenced if the job cannot go on from `stage` to `next_stage`."""
    if job.stage != stage or job.state not in (State.PENDING, State.RUNNING):
        where = f"{job.state} in stage {job.stage}"
        raise Fenced(f"job {job.job_id} is {where}: it cannot go on to {next_stage}")
    if job.tasks_done != job.tasks_total:
        raise Fenced(
            f"job {job.job_id} has {job.tasks_total - job.tasks_done} open tasks in stage {stage}: "
            f"it cannot go on to {next_stage}"
        )


def refuse_ended(job: JobHead) -> None:
    """Raises: Fenced if the job takes nothing more."""
    if not State(job.state).live:
        raise Fenced(f"job {job.job_id} is {job.state}: nothing more is taken")


def lost_lease(lease: Lease, found: tuple[str, int] | None) -> Fenced:
    """Why `lease` is void, given the state and the epoch in which its task was found."""
    where = f"task {lease.index} of job {lease.job_id}"
    if found is None:
        return Fenced(f"{where} is no longer in the store")
    state, epoch = found
    if epoch > lease.epoch:
        return Fenced(f"{where} was taken by a newer attempt (epoch {epoch}, this one has {lease.epoch})")
    return Fenced(f"{where} is {state}: the lease with epoch {lease.epoch} is void")


def late_copy(job_id: str, index: int, rows: int) -> Fenced:
    return Fenced(
        f"task {index} of job {job_id}: a later checkpoint than this one, of {rows} rows, is recorded"
    )


def verdict(job: JobHead) -> Verdict:
    """What a task of a job that takes its work is told."""
    return Verdict.PAUSE if job.state == State.PAUSED else Verdict.GO_ON


def refuse_end(event: Event) -> None:
    """Raises: Invalid if a commit cannot end with `event`."""
    if event not in ENDS:
        raise Invalid(f"a commit ends with {', '.join(sorted(ENDS))}; not with {event}")


def refuse_lost_commit(job: CommitHead, lease: CommitLease) -> None:
    """Raises: Fenced if the commit lease is not the newest one."""
    if job.state != State.COMMITTING:
        raise Fenced(f"job {job.job_id} is {job.state}: it is no longer being committed")
    if (job.generation, job.commit_epoch) != (lease.generation, lease.epoch):
        raise Fenced(
            f"the commit of job {job.job_id} was taken over by {job.commit_owner or 'another worker'}"
        )


def how_it_ended(snapshot_id: int | None, error: ErrorInfo | None) -> str:
    """The detail of a history entry."""
    if error is not None:
        return f"{error.cls}: {error.message}"
    return "" if snapshot_id is None else f"snapshot {snapshot_id}"


def what_was_sent(commit_attempts: int) -> str:
    """The detail of a retry's history entry: what is known of the generation before it."""
    return "" if commit_attempts else NOTHING_SENT


# The manifest


@dataclass(frozen=True)
class Batch:
    """Staged files ready to be stored: packed outside the transaction, to keep that one short."""

    position: str
    digest: str
    packed: Sequence[bytes]
    files: int
    fingerprint: Fingerprint
    aside_files: int
    """Of them rejects: the manifest lists them, and nobody who asks what was written means them."""
    aside_bytes: int

    @classmethod
    def of(cls, position: Position, staged: Sequence[StagedFile], files_per_chunk: int) -> Batch:
        where = dumps(position)
        digest = hashlib.sha256(where.encode())
        packed = []
        total = Fingerprint()
        for start in range(0, len(staged), files_per_chunk):
            text = dumps([file.to_json() for file in staged[start : start + files_per_chunk]]).encode()
            digest.update(text)
            packed.append(zlib.compress(text))
        for file in staged:
            total += file.fingerprint
        aside = [file.size_bytes for file in staged if file.kind == REJECTS]
        return cls(where, digest.hexdigest(), packed, len(staged), total, len(aside), sum(aside))


def unpacked(job_id: str, stage: str, index: int, packed: bytes) -> list[StagedFile]:
    """Raises: Corrupt if the chunk is damaged."""
    try:
        return [StagedFile.from_json(raw) for raw in json.loads(zlib.decompress(packed))]
    except (zlib.error, ValueError, KeyError, TypeError) as error:
        raise Corrupt(
            f"the manifest of job {job_id}, stage {stage}, task {index} is damaged ({error!r})",
            hint="kill the job and ask for it again",
        ) from error


def short_manifest(job_id: str, stage: str, seen: int, expected: int) -> Corrupt:
    return Corrupt(
        f"the manifest of job {job_id}, stage {stage}, lists {seen} files; {expected} were checkpointed",
        hint="records of the store were deleted: kill the job and ask for it again",
    )
