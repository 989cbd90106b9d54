"""The verb of the SQL store that hands out tasks, fairly between jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Connection, Double, Row, bindparam, select

from lockstep.errors import LockstepError, Retryable
from lockstep.job import Event, Job, Lease, State, Task, TaskState
from lockstep.store import Claim
from lockstep.store.rules import Frozen, missing_tasks, paced_from, silent
from lockstep.store.sql_database import Offer, verb
from lockstep.store.sql_offers import GHOSTS, candidates, in_turns
from lockstep.store.sql_records import IS_LEASED, Records
from lockstep.store.sql_rows import JobRow, as_task, error_text, job_of, lost_progress, saved
from lockstep.store.sql_schema import jobs, tasks

# Without a condition on the time: with one, SQLite would walk through the index of all open tasks.
_LEASES: Final = select(tasks.c.job_id, tasks.c.free_at).where(IS_LEASED)
_CANDIDATES: Final = candidates(bindparam("now", type_=Double))
_FREE_TASKS: Final = (
    select(tasks)
    .where(
        tasks.c.job_id == bindparam("job_id"),
        tasks.c.stage == bindparam("stage"),
        tasks.c.free_at <= bindparam("now"),
    )
    .order_by(tasks.c.free_at, tasks.c.idx)
    .limit(bindparam("slots"))
)


class ClaimVerb(Records):
    def claim(
        self, worker: str, slots: int, lease_s: float, job_ids: Collection[str] | None = None
    ) -> list[Claim]:
        """The job with the fewest leases comes first, then the oldest.

        Jobs that others are changing at this instant are passed over, so that a client that hangs holds up
        its own job only. If that leaves slots empty, they are waited for, each in a transaction of its own.
        """
        if slots <= 0:
            return []
        wanted = None if job_ids is None else sorted(set(job_ids))
        claims, passed_over = self._claim(worker, slots, lease_s, wanted)
        for job_id in passed_over:
            if len(claims) == slots:
                break
            try:
                more, _ = self._claim(worker, slots - len(claims), lease_s, [job_id], wait=True)
            except Retryable:
                # What was leased before must reach the caller.
                if not claims:
                    raise
                break
            claims += more
        return claims

    @verb
    def _claim(
        self, worker: str, slots: int, lease_s: float, wanted: Sequence[str] | None, *, wait: bool = False
    ) -> tuple[list[Claim], list[str]]:
        """One transaction. Answers also the jobs that were passed over because somebody has them locked."""
        if not wait and (claims := self._claim_at_once(worker, slots, lease_s, wanted)):
            # A slot whose task somebody else was quicker to take is filled by waiting for these jobs.
            return claims, sorted({claim.lease.job_id for claim in claims})
        with self._db.write() as conn:
            now = self._db.now(conn)
            picked, passed_over = self._pick(conn, now, slots, wanted, wait)
            if sum(len(free) for _, free in picked) < slots:
                self._fail_ghosts(conn, wanted)
            leased = [
                (self._lease(conn, task, worker, now + lease_s), task) for _, free in picked for task in free
            ]
            found = self._started(conn, picked, worker, lease_s)
        claims = [
            Claim(lease, found[lease.job_id], _as_leased(task, lease, now + lease_s))
            for lease, task in leased
        ]
        return claims, passed_over

    def _claim_at_once(
        self, worker: str, slots: int, lease_s: float, wanted: Sequence[str] | None
    ) -> list[Claim]:
        """The everyday claim: every slot finds a task, and only tasks change, of jobs that run already.

        Nothing is changed if there is more to it, or if somebody else is at one of these jobs.
        """
        if slots > self._db.most_at_once or self._unreadable:
            return []

        def decide(conn: Connection) -> list[Claim]:
            offers = {offer.job.job_id: offer for offer in self._db.offers(conn, slots, wanted)}
            turns = [(offer.leases, offer.job.created_at, job_id) for job_id, offer in offers.items()]
            taken = in_turns(turns, slots, lambda job_id, _: iter(offers[job_id].free))
            if sum(map(len, taken.values())) < slots:
                return []
            if not all(_only_tasks_change(offers[job_id].job, free) for job_id, free in taken.items()):
                return []
            now = self._db.now(conn)
            if any(silent(offers[job_id].job, now, lease_s) for job_id in taken):
                return []
            plans = self._frozen_or_error(conn, [*taken])
            claims: list[Claim] = []
            for job_id, free in taken.items():
                if isinstance(plan := plans[job_id], LockstepError):
                    return []
                claims += self._leased(conn, offers[job_id], plan, free, worker, lease_s)
            return claims

        return self._db.at_once(decide)

    def _leased(
        self,
        conn: Connection,
        offer: Offer,
        plan: Frozen,
        taken: Sequence[Row[Any]],
        worker: str,
        lease_s: float,
    ) -> Iterator[Claim]:
        """Lease tasks of one offer."""
        now = self._db.now(conn)
        retried = sum(task.state == TaskState.WAITING and task.free_at > 0 for task in taken)
        job = job_of(offer.job, plan, {*offer.owners, worker}, offer.retrying - retried, now)
        for task in taken:
            lease = self._lease(conn, task, worker, now + lease_s)
            yield Claim(lease, job, _as_leased(task, lease, now + lease_s))

    def _pick(
        self, conn: Connection, now: float, slots: int, wanted: Sequence[str] | None, wait: bool
    ) -> tuple[list[tuple[JobRow, list[Row[Any]]]], list[str]]:
        """Locked jobs with the tasks to take from each, and the jobs that somebody else has locked."""
        leases = Counter(row.job_id for row in self._db.rows(conn, _LEASES, {}) if row.free_at > now)
        turns = [
            (leases[job.job_id], job.created_at, job.job_id)
            for job in self._candidates(conn, now, slots, wanted)
        ]
        locked: dict[str, JobRow] = {}
        passed_over: list[str] = []
        # Without waiting the order of locks does not matter, and with it there is only one job.
        lock = self._lock_if_there if wait else self._lock_at_once

        def free(job_id: str, most: int) -> Iterator[Row[Any]]:
            if (job := lock(conn, job_id)) is None:
                passed_over.append(job_id)
                return iter(())
            locked[job_id] = job
            return iter(self._free_tasks(conn, job, now, most))

        taken = in_turns(turns, slots, free)
        return [(locked[job_id], tasks_of_it) for job_id, tasks_of_it in taken.items()], passed_over

    def _free_tasks(self, conn: Connection, job: JobRow, now: float, most: int) -> Sequence[Row[Any]]:
        if job.state not in (State.PENDING, State.RUNNING):
            return []
        about = {"job_id": job.job_id, "stage": job.stage, "now": now, "slots": most}
        return self._db.rows(conn, _FREE_TASKS, about)

    def _candidates(
        self, conn: Connection, now: float, slots: int, wanted: Sequence[str] | None
    ) -> Sequence[Row[Any]]:
        """Jobs with a free task: of those without any lease up to `slots`, and all others.

        A job whose plan cannot be read is passed over, and the next one takes its place.
        """
        while True:
            rows = self._candidates_in(conn, wanted, {"now": now, "slots": slots})
            known = self._frozen_or_error(conn, [row.job_id for row in rows])
            broken = {job_id: error for job_id, error in known.items() if isinstance(error, LockstepError)}
            if not broken:
                return rows
            for job_id, error in broken.items():
                self._warn(job_id, error)

    def _candidates_in(
        self, conn: Connection, wanted: Sequence[str] | None, about: Mapping[str, Any]
    ) -> Sequence[Row[Any]]:
        # A statement that is made anew costs more than it takes to run, and most claims have no filter.
        if wanted is None and not self._unreadable:
            return self._db.rows(conn, _CANDIDATES, about)
        only = [] if wanted is None else [jobs.c.job_id.in_(wanted)]
        only.append(jobs.c.job_id.not_in(sorted(self._unreadable)))
        return conn.execute(candidates(bindparam("now", type_=Double), *only), about).all()

    def _lease(self, conn: Connection, task: Row[Any], worker: str, until: float) -> Lease:
        self._set_task(
            conn,
            task,
            state=TaskState.LEASED.value,
            epoch=task.epoch + 1,
            owner=worker,
            free_at=until,
            started_at=_start_of(task),
            **saved(task),
        )
        return Lease(task.job_id, task.stage, task.idx, task.epoch + 1, worker)

    def _started(
        self,
        conn: Connection,
        picked: Sequence[tuple[JobRow, list[Row[Any]]]],
        worker: str,
        lease_s: float,
    ) -> dict[str, Job]:
        """The jobs of the tasks that were just leased, all running now."""
        now = self._db.now(conn)
        rows = []
        for job, taken in picked:
            goes_on = taken and silent(job, now, lease_s)
            lost = lost_progress([task for task in taken if task.state == TaskState.LEASED])
            job = self._add(conn, job, **lost)
            job = self._swap(conn, job, paced_from(now, job.rows_done)) if goes_on else job
            rows.append(self._run(conn, job, worker))
        return {job.job_id: job for job in self._jobs(conn, rows)}

    def _fail_ghosts(self, conn: Connection, wanted: Sequence[str] | None) -> None:
        """A job whose open tasks are no longer in the store can never end by itself: fail it, and say why."""
        query = GHOSTS if wanted is None else GHOSTS.where(jobs.c.job_id.in_(wanted))
        for job_id in conn.execute(query).scalars().all():
            job = self._lock_at_once(conn, job_id)
            # Looked at again under the lock: its tasks may have moved on before it.
            if job is None or conn.execute(GHOSTS.where(jobs.c.job_id == job_id)).first() is None:
                continue
            error = missing_tasks(job.stage, job.tasks_done, job.tasks_total)
            self._move(conn, job, Event.FAIL, detail=error.message, error=error_text(error))


def _only_tasks_change(job: Row[Any], taken: Sequence[Row[Any]]) -> bool:
    return job.state == State.RUNNING and not any(lost_progress(taken).values())


def _as_leased(row: Row[Any], lease: Lease, until: float) -> Task:
    """The task of `row` as it is after it was leased."""
    return replace(
        as_task(row),
        state=TaskState.LEASED,
        epoch=lease.epoch,
        owner=lease.worker,
        lease_until=until,
        next_attempt_at=None,
        started_at=_start_of(row),
        rows_done=row.saved_rows,
        bytes_done=row.saved_bytes,
    )


def _start_of(row: Row[Any]) -> float | None:
    """When the task's deadline began. After a lease that ran out it begins anew: the time since then is not
    the task's, and its attempts are bounded anyway."""
    return None if row.state == TaskState.LEASED else row.started_at
