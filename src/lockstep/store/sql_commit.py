"""The verbs of the SQL store that commit a job: one committer at a time, each with a newer epoch."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Final

from sqlalchemy import Connection, bindparam, select, true

from lockstep.errors import ErrorInfo, Fenced, LockstepError, NoSuchJob
from lockstep.job import PLAN_FORMAT, CommitLease, Event, Job, State, after
from lockstep.store import CommitClaim
from lockstep.store.rules import how_it_ended, refuse_end, refuse_lost_commit
from lockstep.store.sql_database import verb
from lockstep.store.sql_records import IS_COMMITTING, Records
from lockstep.store.sql_rows import JobRow, error_text
from lockstep.store.sql_schema import jobs

_READY: Final = (
    select(jobs.c.job_id)
    .where(
        IS_COMMITTING,
        jobs.c.commit_free_at <= bindparam("before"),
        jobs.c.plan_format <= PLAN_FORMAT,
    )
    .order_by(jobs.c.commit_free_at, jobs.c.created_at, jobs.c.job_id)
)


class CommitVerbs(Records):
    @verb
    def claim_commit(
        self, worker: str, lease_s: float, job_ids: Collection[str] | None = None, *, force: bool = False
    ) -> CommitClaim | None:
        mine = jobs.c.job_id.in_(sorted(set(job_ids))) if job_ids is not None else true()
        with self._db.write() as conn:
            now = self._db.now(conn)
            before = math.inf if force else now
            for job_id in conn.execute(_READY.where(mine), {"before": before}).scalars().all():
                try:
                    self._frozen_of(conn, job_id)
                except LockstepError as error:
                    self._warn(job_id, error)
                    continue
                # One that somebody else is taking now is theirs; a kill waits for it.
                job = self._lock(conn, job_id) if force else self._lock_at_once(conn, job_id)
                if job is not None and job.state == State.COMMITTING and job.commit_free_at <= before:
                    return self._take(conn, job, worker, now, lease_s)
        return None

    def _take(self, conn: Connection, job: JobRow, worker: str, now: float, lease_s: float) -> CommitClaim:
        changes: dict[str, Any] = {
            "commit_epoch": job.commit_epoch + 1,
            "commit_owner": worker,
            "commit_free_at": now + lease_s,
            "commit_started_at": now if job.commit_started_at is None else job.commit_started_at,
        }
        job = self._swap(conn, job, changes)
        self._note(conn, job, "claim_commit", now, worker=worker)
        lease = CommitLease(job.job_id, job.generation, job.commit_epoch, worker)
        return CommitClaim(lease, self._job(conn, job.job_id))

    @verb
    def renew_commit(
        self, lease: CommitLease, lease_s: float, *, attempted: bool = False, error: ErrorInfo | None = None
    ) -> Job:
        with self._db.write() as conn:
            job = self._committing(conn, lease)
            changes: dict[str, Any] = {"commit_free_at": self._db.now(conn) + lease_s}
            if attempted:
                changes["commit_attempts"] = job.commit_attempts + 1
            if error is not None:
                changes["error"] = error_text(error)
            self._swap(conn, job, changes)
            return self._job(conn, job.job_id)

    @verb
    def yield_commit(self, lease: CommitLease, retry_in_s: float) -> None:
        with self._db.write() as conn:
            try:
                job = self._committing(conn, lease)
            except (Fenced, NoSuchJob):
                return
            if job.commit_owner is None:
                return
            self._swap(conn, job, {"commit_owner": None, "commit_free_at": self._db.now(conn) + retry_in_s})

    @verb
    def end(
        self,
        lease: CommitLease,
        event: Event,
        *,
        snapshot_id: int | None = None,
        error: ErrorInfo | None = None,
    ) -> Job:
        refuse_end(event)
        with self._db.write() as conn:
            job = self._lock(conn, lease.job_id)
            current = (job.generation, job.commit_epoch) == (lease.generation, lease.epoch)
            if current and job.state == after(State.COMMITTING, event):
                return self._job(conn, job.job_id)
            job = self._committing(conn, lease)
            self._move(
                conn,
                job,
                event,
                detail=how_it_ended(snapshot_id, error),
                worker=lease.worker,
                snapshot_id=snapshot_id,
                error=error_text(error),
                commit_owner=None,
            )
            if event is Event.COMMITTED:
                self._supersede(conn, job.job_id)
            return self._job(conn, job.job_id)

    def _committing(self, conn: Connection, lease: CommitLease) -> JobRow:
        """The locked job of the newest commit lease. Raises: Fenced if it is not."""
        job = self._lock(conn, lease.job_id)
        refuse_lost_commit(job, lease)
        return job

    def _supersede(self, conn: Connection, job_id: str) -> None:
        """The jobs whose files this one has replaced give up what they hold."""
        replaced = self._frozen_of(conn, job_id).plan.replaces
        if not replaced:
            return
        now = self._db.now(conn)
        earlier = select(jobs.c.job_id).where(
            jobs.c.commit_id.in_(replaced), jobs.c.holds, jobs.c.job_id != job_id
        )
        for other in conn.execute(earlier.order_by(jobs.c.job_id)).scalars().all():
            row = self._lock(conn, other)
            self._note(
                conn, self._swap(conn, row, {"holds": False}), "superseded", now, f"replaced by job {job_id}"
            )
