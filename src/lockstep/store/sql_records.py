"""Jobs of the SQL store: reading them, and the one function that moves a job from state to state."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache
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

from lockstep.errors import Fenced, Invalid, LockstepError, NoSuchJob, Retryable
from lockstep.job import Event, Job, State, TaskState, after
from lockstep.store.recent import Recent
from lockstep.store.rules import Frozen, missing_plan, no_such_job, paced_from
from lockstep.store.sql_database import TIME, Database
from lockstep.store.sql_rows import JobRow, job_of, saved, thawed
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


class Records:
    """Reading and moving jobs inside a transaction of the caller.

    Whoever changes a job or its tasks locks the job's row first: what it then reads of the job stays so, and
    two verbs never wait for each other. Whoever needs several jobs locks them in the order of their ids.
    """

    def __init__(self, database: Database) -> None:
        self._db = database
        self._frozen: Recent[Frozen] = Recent(_PLANS_KEPT)
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
                found.append(job_of(row, known, busy, retrying.get(row.job_id, 0), now))
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
        for job_id in ids:
            if (known := self._frozen.recall(job_id)) is not None:
                found[job_id] = known
        for some in _batches([job_id for job_id in ids if job_id not in found]):
            for row in conn.execute(_PLANS, {"ids": some}):
                found[row.job_id] = read = thawed(row)
                if isinstance(read, Frozen):
                    self._frozen.keep(row.job_id, read)
        return {job_id: found.get(job_id) or missing_plan(job_id) for job_id in ids}

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
        now = self._db.now(conn)
        changes: dict[str, Any] = {"started_at": now if job.started_at is None else job.started_at}
        changes |= paced_from(now, job.rows_done)
        return self._move(conn, job, Event.START, worker=worker, **changes)

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


def _one(conn: Connection, query: Select[Any], job_id: str) -> JobRow:
    row = conn.execute(query, {"job_id": job_id}).one_or_none()
    if row is None:
        raise no_such_job(job_id)
    return JobRow(**row._mapping)


def _batches(ids: Sequence[str]) -> Iterable[Sequence[str]]:
    for start in range(0, len(ids), _IDS_PER_QUERY):
        yield ids[start : start + _IDS_PER_QUERY]
