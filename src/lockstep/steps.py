"""What a worker does with whole jobs, beside running their tasks: the next stage, the commit, the end."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from lockstep.commit import run_commit
from lockstep.config import Config
from lockstep.errors import ErrorInfo, Fenced, LockstepError
from lockstep.exporter import release_pin
from lockstep.job import Event, Job, Kind, State
from lockstep.routes import route_of
from lockstep.runtime import Clock, backoff_s
from lockstep.stages import advance, release_runs, stage_is_over
from lockstep.store import CommitClaim, JobStore

_LOG: Final = logging.getLogger(__name__)
COMMITTERS: Final = 4
"""Commits at a time through one catalog; all catalogs together have `MOST_COMMITTERS`."""
MOST_COMMITTERS: Final = 64
UNPIN_PAUSE_S: Final = 30.0
EXPIRE_EVERY_S: Final = 60.0


@dataclass
class Advance:
    """A job's step from `stage` to the next one, and how it went so far."""

    stage: str
    since: float
    failures: int = 0
    not_before: float = 0.0
    idle: bool = True


class Steps:
    """Takes the steps of whole jobs for the worker `name`, in threads of its own; sets `wake` after each."""

    def __init__(
        self, name: str, config: Config, store: JobStore, clock: Clock, wake: threading.Event
    ) -> None:
        self._name = name
        self._config = config
        self._store = store
        self._clock = clock
        self._wake = wake
        self._committers = ThreadPoolExecutor(MOST_COMMITTERS, thread_name_prefix="commit")
        self._unpinners = ThreadPoolExecutor(COMMITTERS, thread_name_prefix="unpin")
        self._commits: dict[str, Future[None]] = {}
        """By the UUID of the table: one at a time into each, or our own would make each other retry."""
        self._commit_routes: dict[str, str] = {}
        """The catalog and the storage of each table that was committed to."""
        self._advances: dict[str, Advance] = {}
        self._unpins: dict[str, tuple[Future[None], float]] = {}
        self._expired_at = 0.0

    @property
    def busy(self) -> bool:
        """Whether a commit or a step to the next stage is under way."""
        committing = any(not future.done() for future in self._commits.values())
        return committing or not all(step.idle for step in self._advances.values())

    def were_unpinned(self, jobs: Sequence[Job]) -> bool:
        """Whether the pin of each had its try."""
        return all(self._unpins[job.job_id][0].done() for job in jobs)

    def start_advances(self, live: Sequence[Job]) -> None:
        """Take imports whose stage is over to their next one, beside everything else that goes on."""
        for job in filter(stage_is_over, live):
            step = self._advances.get(job.job_id)
            if step is None or step.stage != job.stage:
                step = self._advances[job.job_id] = Advance(job.stage, self._clock.now())
            if step.idle and self._clock.now() >= step.not_before:
                step.idle = False
                self._committers.submit(self._advance, job, step)

    def _advance(self, job: Job, step: Advance) -> None:
        try:
            advance(job, self._store, self._config, self._clock)
        except Fenced:
            pass  # somebody else has taken the step, or ended the job
        except Exception as error:  # whatever its class, it spends the stage's budget
            self._after_failed_advance(job, step, error)
        finally:
            step.idle = True
            self._wake.set()

    def _after_failed_advance(self, job: Job, step: Advance, error: Exception) -> None:
        step.failures += 1
        limits, now = job.plan.limits, self._clock.now()
        info = ErrorInfo.of(error)
        step.not_before = now + backoff_s(step.failures)
        spent = step.failures >= limits.task_attempts or now - step.since > limits.task_deadline_s
        if info.permanent or spent:
            message = f"stage {job.stage} is done, but the next one could not begin: {info.message}"
            with contextlib.suppress(LockstepError):  # the store is away: the next round comes here again
                self._store.stop(job.job_id, Event.FAIL, replace(info, message=message))

    def start_commits(self, live: Sequence[Job]) -> None:
        """Commit jobs that are ready for it, the oldest first."""
        self._commits = {table: future for table, future in self._commits.items() if not future.done()}
        busy = Counter(self._commit_routes[table] for table in self._commits)
        for job in reversed(live):
            table = job.plan.target_uuid
            if job.state is not State.COMMITTING or table in self._commits:
                continue
            # By way, not in all: commits that wait for one catalog leave the others theirs.
            route = f"{job.plan.target.rpartition('/')[0]} {route_of(job.plan)[1]}"
            if busy[route] == COMMITTERS:
                continue
            claim = self._store.claim_commit(self._name, self._config.limits.lease_s, {job.job_id})
            if claim is not None:
                self._commits[table] = self._committers.submit(self._commit, claim)
                self._commit_routes[table] = route
                busy[route] += 1

    def _commit(self, claim: CommitClaim) -> None:
        try:
            run_commit(claim, self._store, self._config, self._clock)
        except Fenced:
            return  # somebody else has taken it over
        except Exception:  # nothing is known: the commit stays open, and is claimed again a little later
            _LOG.info("the commit of job %s stays open", claim.job.job_id, exc_info=True)
            self._store.yield_commit(claim.lease, backoff_s(4))
        finally:
            self._wake.set()

    def start_unpins(self) -> list[Job]:
        """Answers all jobs whose pin may still be there."""
        now = self._clock.now()
        unreleased = self._store.unreleased()
        for job in unreleased:
            earlier = self._unpins.get(job.job_id)
            if earlier and (not earlier[0].done() or now - earlier[1] < UNPIN_PAUSE_S):
                continue
            release = release_pin if job.kind is Kind.EXPORT else release_runs
            future = self._unpinners.submit(release, self._store, job, self._config)
            self._unpins[job.job_id] = (future, now)
        return unreleased

    def expire(self) -> None:
        """Forget what ended long ago; looked for once a minute."""
        now = self._clock.now()
        if now - self._expired_at > EXPIRE_EVERY_S:
            self._expired_at = now
            ttl_s = self._config.finished_job_ttl_s
            for job in self._store.list({State.FAILED}):
                # Nobody has asked for a retry in all that time: its frozen copy is given up with it.
                if job.finished_at is not None and now - job.finished_at > ttl_s:
                    self._store.stop(job.job_id, Event.KILL)
            self._store.expire(ttl_s)

    def shut_down(self) -> None:
        """Begin nothing more; what is under way ends by itself, or with the process."""
        self._committers.shutdown(wait=False, cancel_futures=True)
        self._unpinners.shutdown(wait=False, cancel_futures=True)
