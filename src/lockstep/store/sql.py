"""The job store on SQL: SQLite in WAL mode, or PostgreSQL. Each verb is one transaction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Row, Select, bindparam, delete, func, insert, select, true, update

from lockstep.errors import ErrorInfo, Invalid, NoSuchJob
from lockstep.job import Event, HistoryEntry, Holding, Job, NewJob, State, Task, TaskState, after, commit_id
from lockstep.runtime import SYSTEM_CLOCK, Clock
from lockstep.store.rules import (
    SHOWN,
    Frozen,
    counted,
    refuse_overlap,
    refuse_pause,
    refuse_resume,
    refuse_retry,
    refuse_stop,
    the_one,
    what_is_refused,
    what_was_sent,
)
from lockstep.store.sql_claim import ClaimVerb
from lockstep.store.sql_commit import CommitVerbs
from lockstep.store.sql_database import insert_if_absent, open_database, verb
from lockstep.store.sql_rows import JobRow, as_holding, as_task, error_text, frozen_columns
from lockstep.store.sql_schema import OF_A_JOB, history, jobs, plans, scopes, tasks
from lockstep.store.sql_tasks import TaskVerbs

_FIRST_GENERATION: Final = 1


class SqlStore(ClaimVerb, TaskVerbs, CommitVerbs):
    """A `JobStore` in the database at `url`, for example `sqlite:///.lockstep/jobs.db`.

    `clock` judges leases where the database has none of its own.
    Raises: Invalid if it cannot be opened, Incompatible if a newer version wrote it, Retryable if it does
    not answer.
    """

    def __init__(self, url: str, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(open_database(url, clock))

    def close(self) -> None:
        self._db.close()

    # Making jobs

    @verb
    def create(self, jobs: Sequence[NewJob]) -> list[Job]:
        with self._db.write() as conn:
            for scope in sorted({new.holding.scope for new in jobs}):
                self._lock_scope(conn, scope)
            # Under the lock: the first copy of a request that is sent twice may still be under way.
            known = [self._known(conn, new) for new in jobs]
            if jobs and all(known):
                return [self._job(conn, new.job_id) for new in jobs]
            if any(known):
                raise Invalid("some of these jobs exist already, others do not: nothing was created")
            for new in jobs:
                self._create(conn, new)
            return [self._job(conn, new.job_id) for new in jobs]

    def _known(self, conn: Connection, new: NewJob) -> bool:
        try:
            found = self._row(conn, new.job_id)
        except NoSuchJob:
            return False
        if found.request_id != new.request_id:
            raise Invalid(f"job id {new.job_id} is taken by another request: nothing was created")
        return True

    def _create(self, conn: Connection, new: NewJob) -> None:
        self._refuse_overlap(conn, what_is_refused(new.plan), new.job_id, new.holding, new.beside)
        now = self._db.now(conn)
        conn.execute(insert(jobs), _first_row(new, now))
        frozen = frozen_columns(Frozen(new.plan, new.holding, new.beside))
        conn.execute(insert(plans), {"job_id": new.job_id, **frozen})
        job = self._row(conn, new.job_id)
        self._add_tasks(conn, new.job_id, job.stage, new.tasks)
        self._note(conn, job, "create", now, counted(new.tasks))
        self._commit_if_done(conn, job, None)

    def _lock_scope(self, conn: Connection, scope: str) -> None:
        """Whoever makes or revives a job in `scope` waits here for whoever does the same."""
        insert_if_absent(conn, scopes, {"scope": scope})
        conn.execute(select(scopes).where(scopes.c.scope == scope).with_for_update())

    def _refuse_overlap(
        self, conn: Connection, refused: str, job_id: str, holding: Holding, beside: Collection[str]
    ) -> None:
        """Raises: Conflict if a job outside `beside` holds a part of `holding`."""
        found = conn.execute(_holders(holding.scope)).all()
        refuse_overlap(refused, job_id, holding, beside, ((other, _holding_of(other)) for other in found))

    # Reading

    @verb
    def read(self, job_id: str) -> Job:
        with self._db.read() as conn:
            return self._job(conn, job_id)

    @verb
    def find(self, prefix: str) -> Job:
        with self._db.read() as conn:
            begins = func.substr(jobs.c.job_id, 1, len(prefix)) == prefix
            query = select(jobs.c.job_id).where(begins).order_by(jobs.c.job_id).limit(SHOWN + 1)
            found = list(conn.execute(query).scalars()) if prefix else []
            return self._job(conn, the_one(prefix, found))

    @verb
    def holders(self, scope: str) -> list[Job]:
        with self._db.read() as conn:
            ids = [row.job_id for row in conn.execute(_holders(scope))]
            return self._jobs(conn, [self._row(conn, job_id) for job_id in ids])

    @verb
    def tasks(self, job_id: str, stage: str | None = None) -> list[Task]:
        of_stage = tasks.c.stage == stage if stage is not None else true()
        query = select(tasks).where(tasks.c.job_id == job_id, of_stage).order_by(tasks.c.idx)
        with self._db.read() as conn:
            self._row(conn, job_id)
            stages = self._frozen_of(conn, job_id).plan.stages
            found = [as_task(row) for row in conn.execute(query)]
        return sorted(
            found, key=lambda task: stages.index(task.stage) if task.stage in stages else len(stages)
        )

    @verb
    def history(self, job_id: str) -> list[HistoryEntry]:
        query = select(history).where(history.c.job_id == job_id).order_by(history.c.id)
        with self._db.read() as conn:
            self._row(conn, job_id)
            return [
                HistoryEntry(row.at, row.event, State(row.state), row.generation, row.detail, row.worker)
                for row in conn.execute(query)
            ]

    # Control

    @verb
    def stop(self, job_id: str, event: Event, error: ErrorInfo | None = None) -> Job:
        """As the protocol says. A job whose plan cannot be read is stopped too, before that is raised."""
        refuse_stop(event)
        with self._db.write() as conn:
            job = self._lock(conn, job_id)
            if job.state == State.COMMITTING:
                if event is Event.KILL and not job.kill_requested:
                    job = self._swap(conn, job, {"kill_requested": True})
                    self._note(conn, job, "kill_requested", self._db.now(conn))
            elif after(State(job.state), event) is not None:
                detail = "" if error is None else f"{error.cls}: {error.message}"
                reason = {"error": error_text(error)} if State(job.state).live else {}
                self._move(conn, job, event, detail=detail, **reason)
        return self.read(job_id)

    @verb
    def pause(self, job_id: str) -> Job:
        with self._db.write() as conn:
            job = self._lock(conn, job_id)
            refuse_pause(job)
            if job.state != State.PAUSED:
                self._move(conn, job, Event.PAUSE)
            return self._job(conn, job_id)

    @verb
    def resume(self, job_id: str) -> Job:
        with self._db.write() as conn:
            job = self._lock(conn, job_id)
            refuse_resume(job)
            if job.state == State.PAUSED:
                self._commit_if_done(conn, self._move(conn, job, Event.RESUME))
            return self._job(conn, job_id)

    @verb
    def retry(self, job_id: str) -> Job:
        """As the protocol says. Asked again while the retried job is live, it answers with the job."""
        with self._db.write() as conn:
            job = self._lock(conn, job_id)
            if State(job.state).live and job.generation > _FIRST_GENERATION:
                return self._job(conn, job_id)
            refuse_retry(job)
            frozen = self._frozen_of(conn, job_id)
            self._lock_scope(conn, job.scope)
            self._refuse_overlap(conn, f"cannot retry job {job_id}", job_id, frozen.holding, frozen.beside)
            conn.execute(_REVIVE, {"b_job_id": job_id})
            detail = what_was_sent(job.commit_attempts)
            job = self._move(conn, job, Event.RETRY, detail=detail, **_next_generation(job))
            self._commit_if_done(conn, job)
            return self._job(conn, job_id)

    @verb
    def released(self, job_id: str) -> None:
        with self._db.write() as conn:
            job = self._lock(conn, job_id)
            if not job.released:
                self._swap(conn, job, {"released": True})

    @verb
    def unreleased(self) -> list[Job]:
        ended = jobs.c.state.in_([State.COMPLETED.value, State.KILLED.value])
        query = select(jobs).where(ended, ~jobs.c.released).order_by(jobs.c.created_at, jobs.c.job_id)
        with self._db.read() as conn:
            return self._jobs(conn, conn.execute(query).all())

    def expire(self, ttl_s: float, swept: Collection[str] = ()) -> list[str]:
        """One transaction for each job. What is left of jobs that were deleted by hand goes too."""
        forgotten = [job_id for job_id in self._expired(ttl_s, swept) if self._forget(job_id)]
        self._forget_remains()
        return forgotten

    @verb
    def _expired(self, ttl_s: float, swept: Collection[str]) -> Sequence[str]:
        ended = jobs.c.state.in_([State.COMPLETED.value, State.KILLED.value])
        wrote = (jobs.c.generation > 1) | jobs.c.started_at.is_not(None)
        left_behind = (jobs.c.state == State.KILLED.value) & wrote
        query = select(jobs.c.job_id, left_behind.label("left_behind")).where(ended, jobs.c.released)
        with self._db.read() as conn:
            old = jobs.c.finished_at < self._db.now(conn) - ttl_s
            rows = conn.execute(query.where(old)).all()
        return [row.job_id for row in rows if not row.left_behind or row.job_id in swept]

    @verb
    def _forget(self, job_id: str) -> bool:
        """False if somebody else has forgotten it first."""
        with self._db.write() as conn:
            if self._lock_if_there(conn, job_id) is None:
                return False
            for table in OF_A_JOB:
                conn.execute(delete(table).where(table.c.job_id == job_id))
        return True

    @verb
    def _forget_remains(self) -> None:
        with self._db.write() as conn:
            for table in OF_A_JOB[:-1]:
                conn.execute(delete(table).where(table.c.job_id.not_in(select(jobs.c.job_id))))

    # Last in the class: after it, `list` is no longer the type for a type checker.
    @verb
    def list(self, states: Collection[State] | None = None, limit: int | None = None) -> list[Job]:
        wanted = jobs.c.state.in_([state.value for state in states]) if states is not None else true()
        query = (
            select(jobs).where(wanted).order_by(jobs.c.created_at.desc(), jobs.c.job_id.desc()).limit(limit)
        )
        with self._db.read() as conn:
            return self._jobs(conn, conn.execute(query).all())


_REVIVE: Final = (
    update(tasks)
    .where(tasks.c.job_id == bindparam("b_job_id"), tasks.c.state != TaskState.DONE.value)
    .values(state=TaskState.WAITING.value, free_at=0.0, attempts=0, started_at=None, owner=None, error=None)
)


def _first_row(new: NewJob, now: float) -> dict[str, Any]:
    stages = new.plan.stages
    zero = ["tasks_done", "rows_done", "bytes_done", "files", "attempts", "commit_epoch", "commit_attempts"]
    zero += ["paced_rows"]
    return {
        **dict.fromkeys(zero, 0),
        "job_id": new.job_id,
        "request_id": new.request_id,
        "kind": new.plan.kind.value,
        "state": State.PENDING.value,
        "generation": _FIRST_GENERATION,
        "commit_id": commit_id(new.job_id, _FIRST_GENERATION),
        "plan_format": new.plan.format_version,
        "scope": new.holding.scope,
        "holds": True,
        "stage": stages[0] if new.tasks else stages[-1],
        "last_stage": stages[-1],
        "tasks_total": len(new.tasks),
        "created_at": now,
        "updated_at": now,
        "kill_requested": False,
        "released": False,
        "commit_free_at": 0.0,
    }


def _next_generation(job: JobRow) -> dict[str, Any]:
    generation = job.generation + 1
    return {
        "generation": generation,
        "commit_id": commit_id(job.job_id, generation),
        "holds": True,
        "attempts": 0,
        "started_at": None,
        "finished_at": None,
        "snapshot_id": None,
        "error": None,
        "kill_requested": False,
        "commit_owner": None,
        "commit_free_at": 0.0,
        "commit_started_at": None,
        "commit_attempts": 0,
    }


def _holders(scope: str) -> Select[Any]:
    return (
        select(
            *(jobs.c.job_id, jobs.c.kind, jobs.c.state, jobs.c.created_at, jobs.c.finished_at, jobs.c.scope),
            plans.c.holding,
        )
        .outerjoin(plans, plans.c.job_id == jobs.c.job_id)
        .where(jobs.c.scope == scope, jobs.c.holds)
        .order_by(jobs.c.created_at, jobs.c.job_id)
    )


def _holding_of(other: Row[Any]) -> Holding | None:
    """What another job holds; None if that cannot be read."""
    try:
        return as_holding(other.holding)
    except (ValueError, KeyError, TypeError):
        return None
