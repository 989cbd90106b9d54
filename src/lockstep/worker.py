"""The loop: claim, run, heartbeat, commit, release.

A worker is one Spark driver. It owns nothing that is not in the store: kill it at any instant, and
another one goes on from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from lockstep.config import Config
from lockstep.engine import Engine
from lockstep.errors import ErrorInfo, Fenced, LockstepError, Retryable
from lockstep.job import Event, Job, State
from lockstep.routes import Routes, probes
from lockstep.runtime import SYSTEM_CLOCK, Clock, is_dead, worker_name
from lockstep.steps import Steps
from lockstep.store import Claim, JobStore
from lockstep.waves import Waves, retry_delay_s

_LOG: Final = logging.getLogger(__name__)
BEAT_S: Final = 1.0
POLL_S: Final = 0.5
TO_DO: Final = frozenset({State.PENDING, State.RUNNING, State.COMMITTING})

Until = Literal["idle", "jobs_ended", "forever"]


@dataclass(frozen=True)
class Seen:
    """What one round found in the store: our jobs with work to do, then those whose pin may be there."""

    live: Sequence[Job]
    pinned: Sequence[Job]


class Worker:
    """Runs jobs of the store: all of them, or those in `job_ids`."""

    def __init__(
        self,
        config: Config,
        store: JobStore,
        clock: Clock = SYSTEM_CLOCK,
        *,
        job_ids: Collection[str] | None = None,
        on_progress: Callable[[], None] | None = None,
        engine: Engine | None = None,
    ) -> None:
        """`engine` None: Spark, started when the first task is to run."""
        self.name = worker_name()
        self._config = config
        self._store = store
        self._clock = clock
        self._job_ids = None if job_ids is None else frozenset(job_ids)
        self._on_progress = on_progress
        self._wake = threading.Event()
        self._routes = Routes()
        self._waves = Waves(
            self.name,
            config,
            store,
            clock,
            routes=self._routes,
            wake=self._wake,
            beat_s=BEAT_S,
            engine=engine,
        )
        self._steps = Steps(self.name, config, store, clock, self._wake)

    def run(self, until: Until = "forever", stop: threading.Event | None = None) -> None:
        """Work until `stop` is set, or until what `until` names has come.

        `idle`: no job is pending, running or committing. `jobs_ended`: each of `job_ids` has ended or is
        paused.
        """
        stop = stop or threading.Event()
        ended = threading.Event()
        beat = threading.Thread(target=self._beat, args=(ended,), name="beat", daemon=True)
        beat.start()
        try:
            while not stop.is_set():
                seen = self._round()
                if self._on_progress:
                    self._on_progress()
                if not self._waves.alive:
                    raise Retryable(
                        "Spark's Java process has ended; the jobs are as they were",
                        hint=f"start a worker again; {self._waves.spark_log} may say why",
                    )
                if seen is not None and self._finished(until, seen):
                    return
                self._wake.wait(POLL_S)
                self._wake.clear()
        finally:
            ended.set()
            self._shut_down()

    # One round

    def _round(self) -> Seen | None:
        """Do what is to be done now. Answers what there was, or None if the store is away."""
        try:
            live = self._live()
            self._take_over_from_the_dead(live)
            self._enforce_deadlines(live)
            self._steps.start_advances(live)
            self._steps.start_commits(live)
            self._start_tasks(live)
            pinned = self._steps.start_unpins()
            self._steps.expire()
        except Retryable:
            # What runs goes on, and the next round asks again.
            self._clock.sleep(POLL_S)
            return None
        return Seen(live, [job for job in pinned if self._is_mine(job)])

    def _live(self) -> list[Job]:
        return [job for job in self._store.list(TO_DO) if self._is_mine(job)]

    def _is_mine(self, job: Job) -> bool:
        return self._job_ids is None or job.job_id in self._job_ids

    def _take_over_from_the_dead(self, live: Sequence[Job]) -> None:
        others = {worker for job in live for worker in job.workers if worker != self.name}
        for worker in filter(is_dead, sorted(others)):
            self._store.abandon(worker)

    def _enforce_deadlines(self, live: Sequence[Job]) -> None:
        now = self._clock.now()
        for job in live:
            deadline_s = job.plan.deadline_s
            # A retry has the whole deadline again, from when it starts to run.
            began = job.created_at if job.generation == 1 else job.started_at
            if job.state is State.COMMITTING or deadline_s is None or began is None:
                continue
            if now - began > deadline_s:
                error = ErrorInfo(
                    "Retryable",
                    f"the job did not finish within its deadline of {deadline_s:g} s",
                    "nothing was published; finished tasks are kept: `lockstep retry` goes on from there",
                )
                self._store.stop(job.job_id, Event.FAIL, error)

    def _start_tasks(self, live: Sequence[Job]) -> None:
        if all(job.state is State.COMMITTING for job in live):
            return
        engine = self._waves.start_engine()
        free = engine.slots + 1 - len(self._waves.jobs_of_held())
        if free <= 0:
            return
        self._waves.renew_if_overdue()
        claims = self._claim(live, engine.slots, free)
        runnable = [claim for claim in claims if not self._spent(claim)]
        for job_id in dict.fromkeys(claim.job.job_id for claim in runnable):
            wave = [claim for claim in runnable if claim.job.job_id == job_id]
            try:
                self._waves.launch(wave)
            except LockstepError as error:
                self._fail_unlaunched(wave, error)

    def _claim(self, live: Sequence[Job], slots: int, free: int) -> list[Claim]:
        """Lease tasks for the free slots. Jobs whose storage or source is in doubt get few of them."""
        lease_s = self._config.limits.lease_s
        doubtful = {job.job_id for job in live if self._routes.in_doubt(job.plan)}
        if not doubtful:
            return self._store.claim(self.name, free, lease_s, self._job_ids)
        sound = {job.job_id for job in live} - doubtful
        running = self._waves.jobs_of_held()
        tried = sum(job_id in doubtful for job_id in running)
        # The first try comes before the others, or they could keep it away for ever.
        claims = self._store.claim(self.name, 1, lease_s, doubtful) if tried == 0 else []
        tried += len(claims)
        if sound:
            claims += self._store.claim(self.name, free - len(claims), lease_s, sound)
        others = [claim.job.job_id for claim in claims if claim.job.job_id in sound]
        others += [job_id for job_id in running if job_id not in doubtful]
        more = min(free - len(claims), probes(slots, others) - tried)
        return claims + (self._store.claim(self.name, more, lease_s, doubtful) if more > 0 else [])

    def _spent(self, claim: Claim) -> bool:
        """Fail a task whose attempts all died without a word, instead of running it for ever."""
        limits = claim.job.plan.limits
        if claim.task.attempts < limits.task_attempts:
            return False
        last = claim.task.error
        why = f"; the last error: {last.message}" if last else "; each attempt died without an error"
        error = ErrorInfo(
            last.cls if last else "Retryable",
            f"task {claim.task.index} gave up after {claim.task.attempts} attempts{why}",
            last.hint if last else None,
            claim.task.index,
        )
        with contextlib.suppress(Fenced):
            self._store.fail(claim.lease, error, None)
        return True

    def _fail_unlaunched(self, claims: Sequence[Claim], error: LockstepError) -> None:
        """What keeps one job from running here, such as an unset variable, spends its own budget only.

        It may run on another worker, so the error is not final, whatever its class.
        """
        info = ErrorInfo("Retryable", error.message, error.hint, at=self._clock.now())
        for claim in claims:
            with contextlib.suppress(Fenced):
                lease = self._store.begin(claim.lease, self._config.limits.lease_s).lease
                task = replace(claim.task, attempts=claim.task.attempts + 1)
                delay_s = retry_delay_s(task, info, claim.job.plan.limits, self._clock.now())
                self._store.fail(lease, replace(info, task=claim.task.index), delay_s)

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(self._waves.until_next_beat_s()):
            try:
                self._waves.beat()
            except Exception:  # a beat that fails must not end the beating: leases would run out unseen
                _LOG.info("a heartbeat failed", exc_info=True)

    # The end

    def _finished(self, until: Until, seen: Seen) -> bool:
        # Jobs that have ended or are paused are not live, so this is the end of both kinds.
        if self._waves.jobs_of_held() or self._steps.busy or until == "forever" or seen.live:
            return False
        # Pins are given up best effort: each of ours gets one try before the worker goes.
        return self._steps.were_unpinned(seen.pinned)

    def _shut_down(self) -> None:
        self._waves.shut_down()
        self._steps.shut_down()
