"""The loop: claim, run, heartbeat, commit, release.

A worker is one Spark driver. It owns nothing that is not in the store: kill it at any instant, and
another one goes on from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeVar

from lockstep.attempt import Assignment, run_attempt
from lockstep.commit import run_commit
from lockstep.config import Config, expand
from lockstep.engine import Engine
from lockstep.engine.channel import ChannelServer
from lockstep.errors import ErrorInfo, Fenced, LockstepError, Retryable
from lockstep.exporter import release_pin
from lockstep.job import (
    Event,
    Job,
    Json,
    Kind,
    Lease,
    Limits,
    Plan,
    Progress,
    StagedFile,
    State,
    Task,
    Verdict,
)
from lockstep.routes import Routes, probes, route_of
from lockstep.runtime import SYSTEM_CLOCK, Clock, backoff_s, is_dead, worker_name
from lockstep.stages import advance, release_runs, stage_is_over
from lockstep.storage import options_of
from lockstep.store import Claim, CommitClaim, JobStore

_LOG: Final = logging.getLogger(__name__)
BEAT_S: Final = 1.0
POLL_S: Final = 0.5
STOP_GRACE_S: Final = 1.5
PAUSE_GRACE_S: Final = 20.0
STORE_PATIENCE_S: Final = 300.0
COMMITTERS: Final = 4
"""Commits at a time through one catalog; all catalogs together have `MOST_COMMITTERS`."""
MOST_COMMITTERS: Final = 64
UNPIN_PAUSE_S: Final = 30.0
EXPIRE_EVERY_S: Final = 60.0
TO_DO: Final = frozenset({State.PENDING, State.RUNNING, State.COMMITTING})

T = TypeVar("T")
Until = Literal["idle", "jobs_ended", "forever"]
TaskKey = tuple[str, str, int]


@dataclass
class Held:
    """A task that this worker has leased."""

    claim: Claim
    lease: Lease
    group: str
    progress: Progress
    begun: bool = False
    started_at: float | None = None
    heard_at: float = 0.0
    calls: int = 0
    """Calls of its executor that are being answered: it is not silent while it waits for us."""
    verdict: Verdict = Verdict.GO_ON
    told_at: float | None = None


@dataclass
class Wave:
    future: Future[None]
    keys: set[TaskKey] = field(default_factory=set)
    cancelled: bool = False


@dataclass
class Advance:
    """A job's step from `stage` to the next one, and how it went so far."""

    stage: str
    since: float
    failures: int = 0
    not_before: float = 0.0
    idle: bool = True


def retry_delay_s(task: Task, error: ErrorInfo, limits: Limits, now: float) -> float | None:
    """How long a failed task waits for its next attempt; None: it has spent its budget, or never could."""
    if error.permanent or task.attempts >= limits.task_attempts:
        return None
    delay_s = backoff_s(task.attempts)
    started = task.started_at if task.started_at is not None else now
    return delay_s if now + delay_s - started <= limits.task_deadline_s else None


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
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._held: dict[TaskKey, Held] = {}
        self._waves: dict[str, Wave] = {}
        self._engine = engine
        self._channel: ChannelServer | None = None
        self._spark_log = config.state_folder / "spark.log"
        self._committers = ThreadPoolExecutor(MOST_COMMITTERS, thread_name_prefix="commit")
        self._unpinners = ThreadPoolExecutor(COMMITTERS, thread_name_prefix="unpin")
        self._commits: dict[str, Future[None]] = {}
        """By the UUID of the table: one at a time into each, or our own would make each other retry."""
        self._commit_routes: dict[str, str] = {}
        """The catalog and the storage of each table that was committed to."""
        self._advances: dict[str, Advance] = {}
        self._unpins: dict[str, tuple[Future[None], float]] = {}
        self._routes = Routes()
        self._waves_started = 0
        self._expired_at = 0.0

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
                if not self._alive:
                    raise Retryable(
                        "Spark's Java process has ended; the jobs are as they were",
                        hint=f"start a worker again; {self._spark_log} may say why",
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
            self._start_advances(live)
            self._start_commits(live)
            self._start_tasks(live)
            pinned = self._start_unpins()
            self._expire()
        except Retryable:
            # What runs goes on, and the next round asks again.
            self._clock.sleep(POLL_S)
            return None
        return Seen(live, [job for job in pinned if self._is_mine(job)])

    @property
    def _alive(self) -> bool:
        return self._engine is None or self._engine.alive

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
        engine = self._start_engine()
        with self._lock:
            free = engine.slots + 1 - len(self._held)
        if free <= 0:
            return
        claims = self._claim(live, engine.slots, free)
        runnable = [claim for claim in claims if not self._spent(claim)]
        for job_id in dict.fromkeys(claim.job.job_id for claim in runnable):
            wave = [claim for claim in runnable if claim.job.job_id == job_id]
            try:
                self._launch(wave)
            except LockstepError as error:
                self._fail_unlaunched(wave, error)

    def _claim(self, live: Sequence[Job], slots: int, free: int) -> list[Claim]:
        """Lease tasks for the free slots. Jobs whose storage or source is in doubt get few of them."""
        lease_s = self._config.limits.lease_s
        doubtful = {job.job_id for job in live if self._routes.in_doubt(job.plan)}
        if not doubtful:
            return self._store.claim(self.name, free, lease_s, self._job_ids)
        sound = {job.job_id for job in live} - doubtful
        with self._lock:
            running = [key[0] for key in self._held]
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

    def _start_engine(self) -> Engine:
        if self._engine is None:
            from lockstep.engine.spark import SparkEngine

            self._engine = SparkEngine(self._config.spark, self._spark_log)
        if self._channel is None:
            self._channel = ChannelServer(self._answer, self._engine.driver_host)
        return self._engine

    def _launch(self, claims: list[Claim]) -> None:
        assert self._engine is not None
        assert self._channel is not None
        self._waves_started += 1
        group = f"lockstep-{self.name}-{self._waves_started}"
        plan = claims[0].job.plan
        source_address = expand(plan.source, self._config)
        config = _for_executors(self._config, plan)
        assignments = [
            Assignment(
                claim.lease,
                plan.to_json(),
                claim.task.descriptor,
                source_address,
                config,
                self._channel.address,
                self._channel.secret,
            )
            for claim in claims
        ]
        with self._lock:
            for claim in claims:
                self._held[_key(claim.lease)] = Held(
                    claim, claim.lease, group, Progress(claim.task.rows_done, claim.task.bytes_done)
                )
            future = self._engine.submit(group, run_attempt, assignments)
            self._waves[group] = Wave(future, {_key(claim.lease) for claim in claims})
        future.add_done_callback(lambda done: self._wave_ended(group, done))

    def _start_advances(self, live: Sequence[Job]) -> None:
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

    def _start_commits(self, live: Sequence[Job]) -> None:
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
            claim = self._store.claim_commit(self.name, self._config.limits.lease_s, {job.job_id})
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

    def _start_unpins(self) -> list[Job]:
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

    def _expire(self) -> None:
        now = self._clock.now()
        if now - self._expired_at > EXPIRE_EVERY_S:
            self._expired_at = now
            ttl_s = self._config.finished_job_ttl_s
            for job in self._store.list({State.FAILED}):
                # Nobody has asked for a retry in all that time: its frozen copy is given up with it.
                if job.finished_at is not None and now - job.finished_at > ttl_s:
                    self._store.stop(job.job_id, Event.KILL)
            self._store.expire(ttl_s)

    # The channel: what executors ask

    def _answer(self, verb: str, body: Json) -> Any:
        lease = Lease(**body["lease"])
        answers = {
            "begin": self._on_begin,
            "heartbeat": self._on_heartbeat,
            "checkpoint": self._on_checkpoint,
            "finish": self._on_finish,
            "fail": self._on_fail,
            "release": self._on_release,
        }
        with self._being_answered(lease):
            return answers[verb](lease, body)

    @contextlib.contextmanager
    def _being_answered(self, lease: Lease) -> Iterator[None]:
        with self._lock:
            held = self._held.get(_key(lease))
            if held is not None:
                held.calls += 1
        try:
            yield
        finally:
            if held is not None:
                with self._lock:
                    held.calls -= 1
                    held.heard_at = self._clock.now()

    def _on_begin(self, lease: Lease, body: Json) -> Json:
        with self._lock:
            if _key(lease) not in self._held:
                raise Fenced(f"task {lease.index} is no longer held by this worker")
        begun = self._patiently(lambda: self._store.begin(lease, self._config.limits.lease_s))
        with self._lock:
            held = self._held[_key(lease)]
            held.lease = begun.lease
            held.begun = True
            held.heard_at = self._clock.now()
            held.started_at = held.started_at or held.claim.task.started_at or held.heard_at
            held.progress = Progress(begun.rows_done, begun.bytes_done)
        return {
            "lease": vars(begun.lease),
            "position": begun.position,
            "rows_done": begun.rows_done,
            "bytes_done": begun.bytes_done,
        }

    def _on_heartbeat(self, lease: Lease, body: Json) -> str:
        with self._lock:
            held = self._current(lease)
            if held is None:
                return Verdict.STOP
            held.heard_at = self._clock.now()
            held.progress = Progress(**body["progress"])
            return held.verdict

    def _on_checkpoint(self, lease: Lease, body: Json) -> str:
        staged, progress = _reported(body)
        lease_s = self._config.limits.lease_s
        verdict = self._patiently(
            lambda: self._store.checkpoint(lease, body["position"], staged, progress, lease_s)
        )
        self._on_heartbeat(lease, body)
        self._note_route(lease)
        return verdict

    def _on_finish(self, lease: Lease, body: Json) -> None:
        staged, progress = _reported(body)
        self._patiently(lambda: self._store.finish(lease, body["position"], staged, progress))
        self._note_route(lease)
        self._drop(lease)

    def _on_fail(self, lease: Lease, body: Json) -> None:
        error = ErrorInfo.from_json(body["error"])
        assert error is not None
        self._fail(lease, error)

    def _on_release(self, lease: Lease, body: Json) -> None:
        self._release(lease, unspent=True)

    def _release(self, lease: Lease, *, unspent: bool) -> None:
        self._patiently(lambda: self._store.release(lease, unspent=unspent))
        self._drop(lease)

    def _fail(self, lease: Lease, error: ErrorInfo) -> None:
        held = self._current(lease)
        if held is None:
            return
        error = replace(error, at=self._clock.now())
        if not error.permanent:
            self._routes.failed(held.claim.job.plan)
        attempted = held.claim.task.attempts + max(1, lease.epoch - held.claim.lease.epoch)
        task = replace(held.claim.task, attempts=attempted, started_at=held.started_at)
        delay_s = retry_delay_s(task, error, held.claim.job.plan.limits, self._clock.now())
        # Fenced: the task has a newer attempt, or its job has ended, and there is nothing left to fail.
        with contextlib.suppress(Fenced):
            self._patiently(lambda: self._store.fail(lease, error, delay_s))
        self._drop(lease)

    def _note_route(self, lease: Lease) -> None:
        if (held := self._current(lease)) is not None:
            self._routes.got_through(held.claim.job.plan)

    def _current(self, lease: Lease) -> Held | None:
        with self._lock:
            held = self._held.get(_key(lease))
            return held if held is not None and held.lease.epoch == lease.epoch else None

    def _drop(self, lease: Lease) -> None:
        with self._lock:
            if self._current(lease) is not None:
                del self._held[_key(lease)]
        self._wake.set()

    def _patiently(self, verb: Callable[[], T]) -> T:
        """Send a verb again while the store is away; it answers the same when the first one had arrived."""
        deadline = self._clock.now() + STORE_PATIENCE_S
        attempt = 0
        while True:
            try:
                return verb()
            except Retryable:
                attempt += 1
                if self._clock.now() > deadline:
                    raise
                self._clock.sleep(backoff_s(attempt, first_s=0.2, most_s=5.0))

    # Waves and leases

    def _wave_ended(self, group: str, future: Future[None]) -> None:
        with self._lock:
            wave = self._waves.pop(group, None)
            left = [self._held[key] for key in sorted(wave.keys if wave else ()) if key in self._held]
            left = [held for held in left if held.group == group]
        failure = future.exception()
        for held in left:
            try:
                self._let_go(held, failure, stopped_by_us=wave is not None and wave.cancelled)
            except LockstepError:
                continue  # the store is away: the lease runs out, and the task is claimed again
            finally:
                self._drop(held.lease)

    def _let_go(self, held: Held, failure: BaseException | None, *, stopped_by_us: bool) -> None:
        """Give a task back whose wave has ended without a word from it."""
        if held.verdict is not Verdict.GO_ON or stopped_by_us or not self._alive:
            self._release(held.lease, unspent=held.begun)
        elif failure is None:
            self._release(held.lease, unspent=False)
        else:
            self._fail(self._counted(held), _lost(failure, held.lease))

    def _counted(self, held: Held) -> Lease:
        """A wave that dies before its task begins has spent an attempt too, or it would be tried for ever."""
        if not held.begun:
            with contextlib.suppress(Fenced):
                self._on_begin(held.lease, {})
        return held.lease

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT_S):
            try:
                self._beat_once()
            except Exception:  # a beat that fails must not end the beating: leases would run out unseen
                _LOG.info("a heartbeat failed", exc_info=True)

    def _beat_once(self) -> None:
        with self._lock:
            progress = {held.lease: held.progress for held in self._held.values()}
        if not progress:
            return
        verdicts = self._store.heartbeat(progress, self._config.limits.lease_s)
        now = self._clock.now()
        with self._lock:
            for lease, verdict in verdicts.items():
                held = self._current(lease)
                if held is not None and held.verdict is not verdict:
                    held.verdict = verdict
                    held.told_at = now if verdict is not Verdict.GO_ON else None
            overdue = [held for held in self._held.values() if self._overdue(held, now)]
        for held in overdue:
            self._force(held, now)

    def _overdue(self, held: Held, now: float) -> bool:
        if held.told_at is not None:
            grace_s = PAUSE_GRACE_S if held.verdict is Verdict.PAUSE else STOP_GRACE_S
            return now - held.told_at > (grace_s if held.begun else 0.0)
        return held.begun and (self._silent(held, now) or self._late(held, now))

    def _silent(self, held: Held, now: float) -> bool:
        return held.calls == 0 and now - held.heard_at > max(self._config.limits.lease_s, 10 * BEAT_S)

    def _late(self, held: Held, now: float) -> bool:
        started = held.started_at
        return started is not None and now - started > held.claim.job.plan.limits.task_deadline_s

    def _force(self, held: Held, now: float) -> None:
        """Stop an attempt that does not answer: cancel its wave, which kills its Python worker."""
        if held.told_at is not None:
            self._release(held.lease, unspent=held.begun)
        elif self._late(held, now):
            limit_s = held.claim.job.plan.limits.task_deadline_s
            self._fail(held.lease, ErrorInfo("Retryable", f"the task ran longer than {limit_s:g} s"))
        else:
            self._fail(held.lease, ErrorInfo("Retryable", "the executor stopped answering"))
        with self._lock:
            if (wave := self._waves.get(held.group)) is not None:
                wave.cancelled = True
        if self._engine is not None:
            self._engine.cancel(held.group)

    # The end

    def _finished(self, until: Until, seen: Seen) -> bool:
        with self._lock:
            busy = bool(self._held) or any(not future.done() for future in self._commits.values())
            busy = busy or not all(step.idle for step in self._advances.values())
        # Jobs that have ended or are paused are not live, so this is the end of both kinds.
        if busy or until == "forever" or seen.live:
            return False
        # Pins are given up best effort: each of ours gets one try before the worker goes.
        return all(self._unpins[job.job_id][0].done() for job in seen.pinned)

    def _shut_down(self) -> None:
        with self._lock:
            held = list(self._held.values())
            self._held.clear()
        for one in held:
            try:
                self._store.release(one.lease, unspent=one.begun)
            except LockstepError:
                continue  # the lease runs out by itself
        if self._engine is not None:
            self._engine.close()
        if self._channel is not None:
            self._channel.close()
        self._committers.shutdown(wait=False, cancel_futures=True)
        self._unpinners.shutdown(wait=False, cancel_futures=True)


def _for_executors(config: Config, plan: Plan) -> Config:
    """What a task needs of the configuration: neither the store nor the catalogs, so it never sees their
    credentials, but the storage of its target."""
    return replace(config, store_url="", catalogs={}, spark={}, storage=options_of(plan, config))


def _key(lease: Lease) -> TaskKey:
    return lease.job_id, lease.stage, lease.index


def _reported(body: Json) -> tuple[list[StagedFile], Progress]:
    """The files that an executor has finished, and how far it is."""
    return [StagedFile.from_json(raw) for raw in body["staged"]], Progress(**body["progress"])


def _lost(failure: BaseException, lease: Lease) -> ErrorInfo:
    """What Spark says of a task that it gave up: of a Python traceback, the last line tells."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    telling = [line for line in lines if re.match(r"[A-Za-z_.]*(Error|Exception|Interrupt|Exit)\b", line)]
    reason = (telling or lines or [repr(failure)])[-1 if telling else 0]
    return ErrorInfo("Retryable", f"Spark lost the task: {reason}", None, lease.index)
