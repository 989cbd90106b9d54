"""Threads that take turns under one seed, on a clock that only moves when all of them wait.

Every thread of every simulated process is a real thread, of which exactly one runs at a time. It hands
over where it waits, and at each call that leaves its process; who is next follows from virtual time alone, so
one seed is one interleaving.
"""

from __future__ import annotations

import heapq
import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Final

START: Final = 1_800_000_000.0


class Crash(BaseException):
    """The process of this thread is gone. It unwinds the thread; what it still tries has no effect."""


class Process:
    """Threads that live and die together."""

    def __init__(self, name: str, host: str, pid: int, *, skew_s: float = 0.0, mortal: bool = True) -> None:
        self.name = name
        self.host = host
        self.pid = pid
        self.skew_s = skew_s
        self.mortal = mortal
        self.alive = True
        self.frozen_until = 0.0
        self.actors: list[Actor] = []
        self.at_death: list[Callable[[], None]] = []


class Actor:
    def __init__(self, process: Process, name: str, body: Callable[[], object]) -> None:
        self.process = process
        self.name = name
        self.body = body
        self.carrier: Carrier | None = None
        self.ticket = 0
        """Grows with each time it is woken or put off: an older entry of the queue is void."""
        self.done = False
        self.joiners: list[Actor] = []

    def __str__(self) -> str:
        return f"{self.process.name}/{self.name}"


class Carrier:
    """A real thread that carries one actor after the other: starting one for each costs too much."""

    idle: Final[list[Carrier]] = []

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.actor: Actor | None = None
        self.scheduler: Scheduler | None = None
        threading.Thread(target=self._loop, name="carrier", daemon=True).start()

    @classmethod
    def of(cls, scheduler: Scheduler, actor: Actor) -> Carrier:
        carrier = cls.idle.pop() if cls.idle else cls()
        carrier.scheduler, carrier.actor = scheduler, actor
        return carrier

    def _loop(self) -> None:
        while True:
            self.gate.acquire()
            scheduler, actor = self.scheduler, self.actor
            assert scheduler is not None
            assert actor is not None
            scheduler.carry(actor)
            self.scheduler = self.actor = None
            self.idle.append(self)
            scheduler.hand_over()


class Scheduler:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = START
        self.current: Actor | None = None
        self.processes: list[Process] = []
        self.trace: list[tuple[float, str, str]] = []
        self.broken: list[tuple[Actor, BaseException]] = []
        """Threads that ended with an exception that nobody expected."""
        self._queue: list[tuple[float, int, int, Actor]] = []
        self._entries = 0
        self._stopping = False
        self._main = threading.Lock()
        self._main.acquire()
        self._unwinding = False

    # For those who set the stage

    def process(self, name: str, host: str = "here", *, skew_s: float = 0.0, mortal: bool = True) -> Process:
        process = Process(name, host, 100 + len(self.processes), skew_s=skew_s, mortal=mortal)
        self.processes.append(process)
        return process

    def spawn(self, process: Process, name: str, body: Callable[[], object], delay_s: float = 0.0) -> Actor:
        actor = Actor(process, name, body)
        actor.carrier = Carrier.of(self, actor)
        process.actors.append(actor)
        self._push(actor, self.now + delay_s)
        return actor

    def run(self) -> None:
        """Until somebody calls `stop`, or nobody has anything left to do."""
        self.hand_over()
        self._main.acquire()
        self._unwind()

    def stop(self) -> None:
        self._stopping = True

    def note(self, what: str) -> None:
        self.trace.append((self.now - START, str(self.current or "-"), what))

    # For the threads

    def check(self) -> None:
        """Raises: Crash if the process of this thread is gone."""
        if self.current is not None and not self.current.process.alive:
            raise Crash

    def pause(self, seconds: float) -> None:
        """Let others run for `seconds` of virtual time. Raises: Crash if the process died meanwhile."""
        me = self.current
        if me is None:
            return
        self.check()
        self._push(me, self.now + seconds)
        self._switch(me)

    def park(self, timeout_s: float | None) -> None:
        """Wait until `wake`, at most `timeout_s`. Raises: Crash."""
        me = self.current
        assert me is not None, "only a thread of the simulation can wait"
        self.check()
        me.ticket += 1
        if timeout_s is not None:
            self._push(me, self.now + max(0.0, timeout_s))
        self._switch(me)

    def wake(self, actor: Actor) -> None:
        if not actor.done:
            self._push(actor, self.now)

    def kill(self, process: Process) -> None:
        """End a process at this instant. A thread that ends its own process calls `check` next."""
        if not process.alive:
            return
        self.note(f"† {process.name} dies")
        process.alive = False
        for actor in process.actors:
            if not actor.done and actor is not self.current:
                self.wake(actor)
        for told in process.at_death:
            told()

    def freeze(self, process: Process, seconds: float) -> None:
        self.note(f"{process.name} sleeps for {seconds:.1f} s")
        process.frozen_until = max(process.frozen_until, self.now + seconds)

    # Taking turns

    def carry(self, actor: Actor) -> None:
        try:
            if actor.process.alive:
                actor.body()
        except Crash:
            pass
        except BaseException as error:
            self.broken.append((actor, error))
        actor.done = True
        for joiner in actor.joiners:
            self.wake(joiner)

    def hand_over(self) -> None:
        """Let the next one run; the caller must not go on."""
        following = self._next()
        self.current = following
        if following is None:
            self._main.release()
        else:
            assert following.carrier is not None
            following.carrier.gate.release()

    def _switch(self, me: Actor) -> None:
        following = self._next()
        if following is not me:
            self.current = following
            if following is None:
                self._main.release()
            else:
                assert following.carrier is not None
                following.carrier.gate.release()
            assert me.carrier is not None
            me.carrier.gate.acquire()
        self.check()

    def _next(self) -> Actor | None:
        while self._queue and not self._stopping:
            at, _, ticket, actor = heapq.heappop(self._queue)
            if actor.done or ticket != actor.ticket:
                continue
            process = actor.process
            if process.alive and process.frozen_until > max(at, self.now):
                self._push(actor, process.frozen_until)
                continue
            self.now = max(self.now, at)
            return actor
        return None

    def _push(self, actor: Actor, at: float) -> None:
        actor.ticket += 1
        self._entries += 1
        heapq.heappush(self._queue, (at, self._entries, actor.ticket, actor))

    def _unwind(self) -> None:
        """Let all threads that are left end, so that their carriers can be used again."""
        self._stopping = True
        for process in self.processes:
            process.alive = False
        for process in self.processes:
            for actor in process.actors:
                if not actor.done:
                    self.current = actor
                    assert actor.carrier is not None
                    actor.carrier.gate.release()
                    self._main.acquire()
        self.current = None


# What stands in for `threading` and `concurrent.futures` in the modules under test


class SimThreading:
    """The names of `threading` that the code under test uses; all others are the real ones."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def Event(self) -> SimEvent:  # noqa: N802
        return SimEvent(self._scheduler)

    def Lock(self) -> SimLock:  # noqa: N802
        return SimLock(self._scheduler, reentrant=False)

    def RLock(self) -> SimLock:  # noqa: N802
        return SimLock(self._scheduler, reentrant=True)

    def Thread(self, *args: Any, **kwargs: Any) -> SimThread:  # noqa: N802
        return SimThread(self._scheduler, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class SimEvent:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False
        self._waiting: list[Actor] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for actor in self._waiting:
            self._scheduler.wake(actor)
        self._waiting.clear()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            me = self._scheduler.current
            assert me is not None
            self._waiting.append(me)
            self._scheduler.park(timeout)
            if me in self._waiting:
                self._waiting.remove(me)
        return self._set


class SimLock:
    def __init__(self, scheduler: Scheduler, *, reentrant: bool) -> None:
        self._scheduler = scheduler
        self._reentrant = reentrant
        self._owner: Actor | None = None
        self._depth = 0
        self._waiting: list[Actor] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self._scheduler.current
        if me is None:
            return True
        until = math.inf if timeout < 0 else self._scheduler.now + timeout
        while self._depth and not (self._reentrant and self._owner is me):
            if not blocking or self._scheduler.now >= until:
                return False
            self._waiting.append(me)
            self._scheduler.park(None if until == math.inf else until - self._scheduler.now)
            if me in self._waiting:
                self._waiting.remove(me)
        self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        if self._scheduler.current is None:
            return
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            if self._waiting:
                self._scheduler.wake(self._waiting.pop(0))

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimThread:
    def __init__(
        self,
        scheduler: Scheduler,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        assert target is not None
        self._scheduler = scheduler
        self.name = name or "thread"
        self._body = lambda: target(*args, **(kwargs or {}))
        self._actor: Actor | None = None

    def start(self) -> None:
        self._scheduler.check()
        me = self._scheduler.current
        assert me is not None
        self._actor = self._scheduler.spawn(me.process, self.name, self._body)

    def is_alive(self) -> bool:
        return self._actor is not None and not self._actor.done

    def join(self, timeout: float | None = None) -> None:
        actor, me = self._actor, self._scheduler.current
        assert actor is not None
        assert me is not None
        if not actor.done:
            actor.joiners.append(me)
            self._scheduler.park(timeout)


class SimExecutor:
    """Stands in for ThreadPoolExecutor: at most `max_workers` threads, of the process that submits."""

    scheduler: Scheduler

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "pool", **_: Any) -> None:
        self._most = max_workers or 8
        self._prefix = thread_name_prefix
        self._running = 0
        self._started = 0
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.scheduler.check()
        future: Future[Any] = Future()
        self._waiting.append((future, lambda: fn(*args, **kwargs)))
        if self._running < self._most:
            me = self.scheduler.current
            assert me is not None
            self._running += 1
            self._started += 1
            self.scheduler.spawn(me.process, f"{self._prefix}{self._started}", self._work)
        return future

    def _work(self) -> None:
        while self._waiting:
            future, call = self._waiting.pop(0)
            try:
                result = call()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        self._running -= 1

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], **_: Any) -> Iterator[Any]:
        return map(fn, *iterables)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._waiting.clear()

    def __enter__(self) -> SimExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
