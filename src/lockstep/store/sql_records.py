"""Rows of the SQL store as jobs and tasks, and the one function that moves a job from state to state."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

from sqlalchemy import (
    Connection,
    Row,
    Select,
    Update,
    bindparam,
    func,
    insert,
    literal_column,
    null,
    select,
    text,
    union_all,
    update,
)

from lockstep.errors import (
    Corrupt,
    ErrorInfo,
    Fenced,
    Incompatible,
    Invalid,
    LockstepError,
    NoSuchJob,
    Retryable,
)
from lockstep.job import (
    Event,
    Fingerprint,
    Holding,
    Job,
    Kind,
    Piece,
    Plan,
    State,
    Task,
    TaskState,
    after,
)
from lockstep.store.sql_database import TIME, Database
from lockstep.store.sql_schema import history, jobs, plans, tasks

_LOG: Final = logging.getLogger("lockstep.store")
_PLANS_KEPT: Final = 256
_IDS_PER_QUERY: Final = 500

# Literals, not parameters: only with them can the database see that a partial index fits.
IS_LEASED: Final = text("lockstep_tasks.state = 'leased'")
IS_RETRYING: Final = text("lockstep_tasks.state = 'waiting' AND lockstep_tasks.free_at > 0")
IS_COMMITTING: Final = text("lockstep_jobs.state = 'committing'")
IS_RUNNABLE: Final = text("lockstep_jobs.state IN ('pending', 'running')")

_JOB: Final = select(jobs).where(jobs.c.job_id == bindparam("job_id"))
_JOB_LOCKED: Final = _JOB.with_for_update()
_JOB_LOCKED_AT_ONCE: Final = _JOB.with_for_update(skip_locked=True)
TASK: Final = select(tasks).where(
    tasks.c.job_id == bindparam("job_id"),
    tasks.c.stage == bindparam("stage"),
    tasks.c.idx == bindparam("idx"),
)
_PLANS: Final = select(plans).where(plans.c.job_id.in_(bindparam("ids", expanding=True)))
_in_ids: Final = tasks.c.job_id.in_(bindparam("ids", expanding=True))
_WORKERS: Final = (
    select(tasks.c.job_id, tasks.c.owner)
    .where(IS_LEASED, _in_ids, tasks.c.free_at > bindparam("now"))
    .distinct()
)
_RETRYING: Final = select(tasks.c.job_id, func.count()).where(IS_RETRYING, _in_ids).group_by(tasks.c.job_id)
_of_it: Final = tasks.c.job_id == bindparam("job_id")
_ACTIVITY_OF_IT: Final = union_all(
    select(null().label("owner"), func.count().label("retrying")).where(IS_RETRYING, _of_it),
    select(tasks.c.owner, literal_column("0"))
    .where(IS_LEASED, _of_it, tasks.c.free_at > bindparam("now"))
    .distinct(),
)
_LEASED_OF_JOB: Final = select(tasks).where(IS_LEASED, tasks.c.job_id == bindparam("job_id"))


@dataclass(frozen=True)
class Frozen:
    """The part of a job that never changes."""

    plan: Plan
    holding: Holding
    beside: frozenset[str]


def dumps(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


class JobRow(SimpleNamespace):
    """A job's row as it was read or last written in this transaction."""

    def changed(self, changes: Mapping[str, Any]) -> JobRow:
        return JobRow(**{**vars(self), **changes})


class Records:
    """Reading and moving jobs inside a transaction of the caller.

    Whoever changes a job or its tasks locks the job's row first: what it then reads of the job stays so, and
    two verbs never wait for each other. Whoever needs several jobs locks them in the order of their ids.
    """

    def __init__(self, database: Database) -> None:
        self._db = database
        self._frozen: OrderedDict[str, Frozen] = OrderedDict()
        self._frozen_lock = threading.Lock()
        self._unreadable: dict[str, str] = {}
        self._locking = database.with_time(_JOB_LOCKED)
        self._locking_at_once = database.with_time(_JOB_LOCKED_AT_ONCE)

    # Reading

    def _row(self, conn: Connection, job_id: str) -> JobRow:
        return _one(conn, _JOB, job_id)

    def _lock(self, conn: Connection, job_id: str) -> JobRow:
        """The job's row, which stays as it is until the transaction ends. Raises: NoSuchJob."""
        return self._timed(conn, _one(conn, self._locking, job_id))

    def _lock_at_once(self, conn: Connection, job_id: str) -> JobRow | None:
        """As `_lock`; None instead of waiting for somebody who has it locked, or if it is gone."""
        found = self._db.rows(conn, self._locking_at_once, {"job_id": job_id})
        return self._timed(conn, JobRow(**found[0]._asdict())) if found else None

    def _lock_if_there(self, conn: Connection, job_id: str) -> JobRow | None:
        try:
            return self._lock(conn, job_id)
        except NoSuchJob:
            return None

    def _timed(self, conn: Connection, job: JobRow) -> JobRow:
        if (now := vars(job).pop(TIME, None)) is not None:
            self._db.note_time(conn, now)
        return job

    def _task_row(self, conn: Connection, job_id: str, stage: str, index: int) -> Row[Any] | None:
        return conn.execute(TASK, {"job_id": job_id, "stage": stage, "idx": index}).one_or_none()

    def _job(self, conn: Connection, job_id: str) -> Job:
        """Raises: NoSuchJob; Incompatible or Corrupt if its plan cannot be read."""
        row = self._row(conn, job_id)
        self._frozen_of(conn, job_id)
        return self._jobs(conn, [row])[0]

    def _jobs(self, conn: Connection, rows: Sequence[Row[Any] | JobRow]) -> list[Job]:
        """The jobs of `rows`, in a few queries whatever their number.

        One that cannot be read is left out with a warning: it must not hide the others.
        """
        now = self._db.now(conn)
        ids = [row.job_id for row in rows]
        frozen = self._frozen_or_error(conn, ids)
        workers, retrying = self._activity(conn, ids, now)
        found = []
        for row in rows:
            known = frozen[row.job_id]
            if isinstance(known, LockstepError):
                self._warn(row.job_id, known)
            else:
                busy = workers.get(row.job_id, set())
                found.append(as_job(row, known, busy, retrying.get(row.job_id, 0), now))
        return found

    def _activity(
        self, conn: Connection, ids: Sequence[str], now: float
    ) -> tuple[dict[str, set[str]], dict[str, int]]:
        """Who works on each job, and how many of its tasks wait for their next attempt."""
        workers: dict[str, set[str]] = {}
        retrying: dict[str, int] = {}
        if len(ids) == 1:
            found = self._db.rows(conn, _ACTIVITY_OF_IT, {"job_id": ids[0], "now": now})
            workers[ids[0]] = {row.owner for row in found if row.owner is not None}
            retrying[ids[0]] = sum(row.retrying for row in found)
            return workers, retrying
        for some in _batches(ids):
            for job_id, owner in conn.execute(_WORKERS, {"ids": some, "now": now}):
                workers.setdefault(job_id, set()).add(owner)
            retrying.update(conn.execute(_RETRYING, {"ids": some}).all())
        return workers, retrying

    def _frozen_of(self, conn: Connection, job_id: str) -> Frozen:
        """Raises: Incompatible or Corrupt if it cannot be read."""
        known = self._frozen_or_error(conn, [job_id])[job_id]
        if isinstance(known, LockstepError):
            raise known
        return known

    def _frozen_or_error(self, conn: Connection, ids: Sequence[str]) -> dict[str, Frozen | LockstepError]:
        found: dict[str, Frozen | LockstepError] = {}
        with self._frozen_lock:
            for job_id in ids:
                if job_id in self._frozen:
                    self._frozen.move_to_end(job_id)
                    found[job_id] = self._frozen[job_id]
        for some in _batches([job_id for job_id in ids if job_id not in found]):
            for row in conn.execute(_PLANS, {"ids": some}):
                found[row.job_id] = _thawed(row)
        with self._frozen_lock:
            for job_id, known in found.items():
                if isinstance(known, Frozen):
                    self._frozen[job_id] = known
            while len(self._frozen) > _PLANS_KEPT:
                self._frozen.popitem(last=False)
        return {job_id: found.get(job_id) or _planless(job_id) for job_id in ids}

    def _warn(self, job_id: str, error: LockstepError) -> None:
        """Say once that a job is left alone."""
        if self._unreadable.get(job_id) != error.message:
            self._unreadable[job_id] = error.message
            _LOG.warning("job %s is left alone: %s", job_id, error.message)

    # Moving

    def _move(
        self,
        conn: Connection,
        job: JobRow,
        event: Event,
        *,
        detail: str = "",
        worker: str | None = None,
        **changes: Any,
    ) -> JobRow:
        """Apply `event` to a job whose row is locked, as TRANSITIONS says, and note it in the history.

        A job that ends without having published gives up what it holds, and the leases of its tasks are void.
        Raises: Invalid if the event is forbidden in this state; Retryable if the job has moved meanwhile.
        """
        state = after(State(job.state), event)
        if state is None:
            raise Invalid(f"job {job.job_id} is {job.state}: {event} is not possible")
        now = self._db.now(conn)
        changes["state"] = state.value
        if state in (State.FAILED, State.KILLED, State.COMPLETED):
            changes["finished_at"] = now
        if state in (State.FAILED, State.KILLED):
            rows, size_bytes = self._void_leases(conn, job.job_id)
            changes |= {
                "holds": False,
                "rows_done": job.rows_done - rows,
                "bytes_done": job.bytes_done - size_bytes,
            }
        moved = self._swap(conn, job, changes)
        self._note(conn, moved, event, now, detail, worker)
        return moved

    def _run(self, conn: Connection, job: JobRow, worker: str | None) -> JobRow:
        """A pending job runs as soon as one of its tasks does."""
        if job.state != State.PENDING:
            return job
        started_at = self._db.now(conn) if job.started_at is None else job.started_at
        return self._move(conn, job, Event.START, worker=worker, started_at=started_at)

    def _commit_if_done(self, conn: Connection, job: JobRow, worker: str | None = None) -> JobRow:
        """A job that is not paused and whose last stage is done goes on to `committing`."""
        done = job.stage == job.last_stage and job.tasks_done == job.tasks_total
        if not done or job.state not in (State.PENDING, State.RUNNING):
            return job
        return self._move(conn, job, Event.ALL_TASKS_DONE, worker=worker)

    def _swap(self, conn: Connection, job: JobRow, changes: dict[str, Any]) -> JobRow:
        """Change the job's row if it is still in the state, generation and commit epoch of `job`.

        Raises: Retryable if it is not.
        """
        changes = {**changes, "updated_at": self._db.now(conn)}
        keys = {
            "b_job_id": job.job_id,
            "b_state": job.state,
            "b_generation": job.generation,
            "b_commit_epoch": job.commit_epoch,
        }
        refused = Retryable(f"job {job.job_id} was changed by somebody else at the same time")
        self._db.change(conn, _job_update(tuple(sorted(changes))), {**changes, **keys}, refused)
        return job.changed(changes)

    def _note(
        self,
        conn: Connection,
        job: JobRow,
        event: str,
        at: float,
        detail: str = "",
        worker: str | None = None,
    ) -> None:
        """Append to the job's history, with the state that it is in now."""
        entry = {
            "job_id": job.job_id,
            "at": at,
            "event": str(event),
            "state": job.state,
            "generation": job.generation,
            "detail": detail.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}"),
            "worker": worker,
        }
        refused = Retryable(f"the history of job {job.job_id} could not be written")
        self._db.change(conn, _NOTE, entry, refused)

    def _add(self, conn: Connection, job: JobRow, **deltas: int) -> JobRow:
        """Add to the counters of a locked job."""
        changes = {name: getattr(job, name) + delta for name, delta in deltas.items()}
        return self._swap(conn, job, changes) if any(deltas.values()) else job

    def _void_leases(self, conn: Connection, job_id: str) -> tuple[int, int]:
        """Let the leased tasks of a job wait again; answer the rows and bytes that were not checkpointed."""
        leased = conn.execute(_LEASED_OF_JOB, {"job_id": job_id}).all()
        for task in leased:
            self._set_task(conn, task, state=TaskState.WAITING.value, free_at=0.0, owner=None, **saved(task))
        return (
            sum(task.rows_done - task.saved_rows for task in leased),
            sum(task.bytes_done - task.saved_bytes for task in leased),
        )

    def _set_task(self, conn: Connection, task: Row[Any], **changes: Any) -> None:
        """Change a task's row if it is still in the state and epoch of `task`."""
        keys = {
            "b_job_id": task.job_id,
            "b_stage": task.stage,
            "b_idx": task.idx,
            "b_state": task.state,
            "b_epoch": task.epoch,
        }
        refused = Fenced(f"task {task.idx} of job {task.job_id} was taken by a newer attempt")
        self._db.change(conn, _task_update(tuple(sorted(changes))), {**changes, **keys}, refused)


_NOTE: Final = (
    insert(history)
    .values(
        {
            name: bindparam(name)
            for name in ("job_id", "at", "event", "state", "generation", "detail", "worker")
        }
    )
    .inline()
)


@cache
def _job_update(columns: tuple[str, ...]) -> Update:
    return (
        update(jobs)
        .where(
            jobs.c.job_id == bindparam("b_job_id"),
            jobs.c.state == bindparam("b_state"),
            jobs.c.generation == bindparam("b_generation"),
            jobs.c.commit_epoch == bindparam("b_commit_epoch"),
        )
        .values({name: bindparam(name) for name in columns})
    )


@cache
def _task_update(columns: tuple[str, ...]) -> Update:
    return (
        update(tasks)
        .where(
            tasks.c.job_id == bindparam("b_job_id"),
            tasks.c.stage == bindparam("b_stage"),
            tasks.c.idx == bindparam("b_idx"),
            tasks.c.state == bindparam("b_state"),
            tasks.c.epoch == bindparam("b_epoch"),
        )
        .values({name: bindparam(name) for name in columns})
    )


def saved(task: Row[Any]) -> dict[str, int]:
    """The progress of a task back at its checkpoint: what an attempt read after it is read again."""
    return {"rows_done": task.saved_rows, "bytes_done": task.saved_bytes}


def lost_progress(found: Sequence[Row[Any]]) -> dict[str, int]:
    """What the counters of a job lose when these tasks go back to their checkpoints."""
    return {
        "rows_done": sum(task.saved_rows - task.rows_done for task in found),
        "bytes_done": sum(task.saved_bytes - task.bytes_done for task in found),
    }


def as_task(row: Row[Any]) -> Task:
    state = TaskState(row.state)
    return Task(
        job_id=row.job_id,
        stage=row.stage,
        index=row.idx,
        descriptor=json.loads(row.descriptor),
        rows=row.rows,
        size_bytes=row.size_bytes,
        state=state,
        epoch=row.epoch,
        attempts=row.attempts,
        position=None if row.position is None else json.loads(row.position),
        rows_done=row.rows_done,
        bytes_done=row.bytes_done,
        files=row.files,
        owner=row.owner,
        lease_until=row.free_at if state is TaskState.LEASED else None,
        started_at=row.started_at,
        next_attempt_at=row.free_at if state is TaskState.WAITING and row.free_at > 0 else None,
        error=as_error(row.error),
    )


def as_error(raw: str | None) -> ErrorInfo | None:
    return None if raw is None else ErrorInfo.from_json(json.loads(raw))


def error_text(error: ErrorInfo | None) -> str | None:
    return None if error is None else dumps(error.to_json())


def as_fingerprint(raw: str | None) -> Fingerprint:
    return Fingerprint() if raw is None else Fingerprint.from_json(json.loads(raw))


def frozen_columns(frozen: Frozen) -> dict[str, str]:
    return {
        "plan": dumps(frozen.plan.to_json()),
        "holding": dumps(asdict(frozen.holding)),
        "beside": dumps(sorted(frozen.beside)),
    }


def as_job(row: Row[Any] | JobRow, frozen: Frozen, workers: set[str], retrying: int, now: float) -> Job:
    committing = row.state == State.COMMITTING and row.commit_owner is not None and row.commit_free_at > now
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
        workers=tuple(sorted(workers | ({row.commit_owner} if committing else set()))),
        kill_requested=bool(row.kill_requested),
        released=bool(row.released),
        commit_started_at=row.commit_started_at,
        commit_attempts=row.commit_attempts,
        error=as_error(row.error),
        fingerprint=as_fingerprint(row.fingerprint) if row.stage == row.last_stage else None,
    )


def _thawed(row: Row[Any]) -> Frozen | LockstepError:
    try:
        return Frozen(
            Plan.from_json(json.loads(row.plan)), as_holding(row.holding), frozenset(json.loads(row.beside))
        )
    except Incompatible as error:
        return Incompatible(f"job {row.job_id} cannot be read: {error.message}", hint=error.hint)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Corrupt(
            f"job {row.job_id} cannot be read: its plan is damaged ({error!r})",
            hint="kill it and export again; other jobs are not affected",
        )


def as_holding(raw: str) -> Holding:
    known = json.loads(raw)
    pieces = tuple(Piece(piece["name"], piece["first"], piece["last"]) for piece in known["pieces"])
    return Holding(known["scope"], known["whole"], pieces)


def _planless(job_id: str) -> Corrupt:
    return Corrupt(
        f"job {job_id} cannot be read: its plan is missing from the store",
        hint="kill it and export again; other jobs are not affected",
    )


def _one(conn: Connection, query: Select[Any], job_id: str) -> JobRow:
    row = conn.execute(query, {"job_id": job_id}).one_or_none()
    if row is None:
        raise NoSuchJob(f"no job {job_id}", hint="`lockstep jobs` lists them")
    return JobRow(**row._mapping)


def _batches(ids: Sequence[str]) -> Iterable[Sequence[str]]:
    for start in range(0, len(ids), _IDS_PER_QUERY):
        yield ids[start : start + _IDS_PER_QUERY]
