"""The tasks that a worker has leased: launched in waves, answered, kept alive by heartbeats, given back."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from lockstep.attempt import Assignment, run_attempt
from lockstep.config import Config
from lockstep.engine import Engine
from lockstep.engine.channel import ChannelServer
from lockstep.errors import ErrorInfo, Fenced, LockstepError, Retryable
from lockstep.job import Json, Lease, Limits, Plan, Progress, StagedFile, Task, Verdict
from lockstep.routes import Routes
from lockstep.runtime import Clock, backoff_s
from lockstep.secrets import expand
from lockstep.storage.options import options_of
from lockstep.store import Claim, JobStore

STOP_GRACE_S: Final = 1.5
PAUSE_GRACE_S: Final = 20.0
STORE_PATIENCE_S: Final = 300.0
LEAST_BEAT_S: Final = 0.1

T = TypeVar("T")
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


def retry_delay_s(task: Task, error: ErrorInfo, limits: Limits, now: float) -> float | None:
    """How long a failed task waits for its next attempt; None: it has spent its budget, or never could."""
    if error.permanent or task.attempts >= limits.task_attempts:
        return None
    delay_s = backoff_s(task.attempts)
    started = task.started_at if task.started_at is not None else now
    return delay_s if now + delay_s - started <= limits.task_deadline_s else None


class Waves:
    """Runs tasks that the worker `name` has claimed, and speaks to the store for their executors.

    Safe to use from many threads. `wake` is set whenever a slot is free again; `beat_s` is how often
    `beat` is called. `engine` None: Spark, started when it is asked for.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        store: JobStore,
        clock: Clock,
        *,
        routes: Routes,
        wake: threading.Event,
        beat_s: float,
        engine: Engine | None,
    ) -> None:
        self._name = name
        self._config = config
        self._store = store
        self._clock = clock
        self._routes = routes
        self._wake = wake
        self._beat_s = beat_s
        self._engine = engine
        self._channel: ChannelServer | None = None
        self._lock = threading.RLock()
        self._held: dict[TaskKey, Held] = {}
        self._waves: dict[str, Wave] = {}
        self._waves_started = 0
        self._renewed_at = 0.0
        self._beaten_at: float | None = None
        self.spark_log = config.state_folder / "spark.log"

    @property
    def alive(self) -> bool:
        return self._engine is None or self._engine.alive

    def jobs_of_held(self) -> list[str]:
        """The job of each task that is held now."""
        with self._lock:
            return [key[0] for key in self._held]

    def start_engine(self) -> Engine:
        if self._engine is None:
            from lockstep.engine.spark import SparkEngine

            self._engine = SparkEngine(self._config.spark, self.spark_log)
        if self._channel is None:
            self._channel = ChannelServer(self.answer, self._engine.driver_host)
        return self._engine

    def launch(self, claims: list[Claim]) -> None:
        """Start tasks of one job. Raises: LockstepError if nothing could be started."""
        assert self._engine is not None
        assert self._channel is not None
        self._waves_started += 1
        group = f"lockstep-{self._name}-{self._waves_started}"
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

    # The channel: what executors ask

    def answer(self, verb: str, body: Json) -> Any:
        lease = Lease(**body["lease"])
        answers = {
            "begin": self._on_begin,
            "heartbeat": self._on_heartbeat,
            "checkpoint": self._on_checkpoint,
            "finish": self._on_finish,
            "fail": self._on_fail,
            "release": self._on_release,
        }
        with self.being_answered(lease):
            return answers[verb](lease, body)

    @contextlib.contextmanager
    def being_answered(self, lease: Lease) -> Iterator[None]:
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
        if held.verdict is not Verdict.GO_ON or stopped_by_us or not self.alive:
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

    def beat(self) -> None:
        """Renew the leases, and stop the attempts that do not obey or do not answer."""
        self._forgive_a_standstill()
        try:
            self._renew()
            now = self._clock.now()
            with self._lock:
                overdue = [held for held in self._held.values() if self._overdue(held, now)]
            for held in overdue:
                self._force(held, now)
        finally:
            self._beaten_at = self._clock.now()

    def _forgive_a_standstill(self) -> None:
        """While this machine stood still nobody could be heard: that is no silence of an executor."""
        now = self._clock.now()
        missed_s = 0.0 if self._beaten_at is None else now - self._beaten_at - 2 * self._beat_s
        if missed_s > 0:
            with self._lock:
                for held in self._held.values():
                    held.heard_at = min(now, held.heard_at + missed_s)

    def until_next_beat_s(self) -> float:
        """`beat_s`, or less where an attempt that was told to stop is to be forced before."""
        now = self._clock.now()
        with self._lock:
            told = [held for held in self._held.values() if held.told_at is not None]
            left = [_grace_s(held) - (now - held.told_at) for held in told if held.told_at is not None]
        return max(LEAST_BEAT_S, min([self._beat_s, *left]))

    def renew_if_overdue(self) -> None:
        """Renew the leases if no beat has for so long that they may have run out.

        After a while in which the machine stood still, the tasks of this worker would otherwise be offered
        to itself, and be done again.
        """
        if self._clock.now() - self._renewed_at > self._config.limits.lease_s / 2:
            self._renew()

    def _renew(self) -> None:
        now = self._clock.now()
        with self._lock:
            progress = {held.lease: held.progress for held in self._held.values()}
        verdicts = self._store.heartbeat(progress, self._config.limits.lease_s) if progress else {}
        self._renewed_at = now
        now = self._clock.now()
        with self._lock:
            for lease, verdict in verdicts.items():
                held = self._current(lease)
                if held is not None and held.verdict is not verdict:
                    held.verdict = verdict
                    held.told_at = now if verdict is not Verdict.GO_ON else None

    def _overdue(self, held: Held, now: float) -> bool:
        if held.told_at is not None:
            return now - held.told_at >= _grace_s(held)
        return held.begun and (self._silent(held, now) or self._late(held, now))

    def _silent(self, held: Held, now: float) -> bool:
        return held.calls == 0 and now - held.heard_at > max(self._config.limits.lease_s, 10 * self._beat_s)

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

    def shut_down(self) -> None:
        """Give all tasks back, and end the engine."""
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


def _for_executors(config: Config, plan: Plan) -> Config:
    """What a task needs of the configuration: neither the store nor the catalogs, so it never sees their
    credentials, but the storage of its target."""
    return replace(config, store_url="", catalogs={}, spark={}, storage=options_of(plan, config))


def _grace_s(held: Held) -> float:
    """How long an attempt that was told to stop may take to do so by itself."""
    if not held.begun:
        return 0.0
    return PAUSE_GRACE_S if held.verdict is Verdict.PAUSE else STOP_GRACE_S


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
