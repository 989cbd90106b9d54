"""What stands in for Spark: processes that run attempts, and the channel to their driver."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from lockstep.engine import RunTask, channel
from lockstep.errors import Fenced
from lockstep.job import Json
from tests.simulation.scheduler import Actor, Process

if TYPE_CHECKING:
    from tests.simulation.world import World

SPARK_TRIES: Final = 3


class SimChannelServer:
    """Stands in for ChannelServer: each call is answered by a thread of the driver's process."""

    world: World

    def __init__(self, handler: channel.Handler, host: str = "") -> None:
        world = self.world
        actor = world.scheduler.current
        assert actor is not None
        self.process = actor.process
        self.handler = handler
        self.secret = "secret"
        self.address = (host, len(world.drivers))
        self.open = True
        world.drivers[self.address[1]] = self

    def close(self) -> None:
        self.open = False


class SimChannel:
    """Stands in for Channel: the request arrives although its sender dies, unless the wire is cut first."""

    world: World

    def __init__(self, address: tuple[str, int], secret: str) -> None:
        self._server = self.world.drivers[address[1]]
        self._lock = self.world.threading.Lock()
        self._broken = False
        self.world.call("connect")
        self._check("connecting")

    def call(self, verb: str, body: Json) -> Any:
        with self._lock:
            answer = self._ask(verb, json.loads(json.dumps(body)))
        failure = answer.get("error")
        if failure is None:
            return answer.get("ok")
        raise channel.error_of(failure)

    def close(self) -> None:
        self._broken = True

    def _ask(self, verb: str, body: Json) -> Json:
        world = self.world
        self._check(verb)
        if world.chance("channel_cut"):
            self._broken = True
        world.call(f"channel {verb}")
        self._check(verb)
        answered = world.threading.Event()
        answer: Json = {}

        def serve() -> None:
            answer.update(json.loads(json.dumps(channel._answer(self._server.handler, _call(verb, body)))))
            answered.set()

        process = self._server.process
        world.scheduler.spawn(process, f"answer {verb}", serve, world.latency())
        process.at_death.append(answered.set)
        answered.wait(channel.CALL_TIMEOUT_S)
        process.at_death.remove(answered.set)
        if not answer or world.chance("channel_cut"):
            self._broken = True
            self._check(verb)
        return answer

    def _check(self, verb: str) -> None:
        if self._broken or not self._server.open or not self._server.process.alive:
            self._broken = True
            raise Fenced(f"the channel to the driver broke during {verb}")


def _call(verb: str, body: Json) -> Json:
    return {"verb": verb, "body": body}


class SimEngine:
    """Implements `Engine`: each assignment runs in a process of its own, and is run again when that dies."""

    slots = 2
    driver_host = "driver"

    def __init__(self, world: World) -> None:
        self._world = world
        self.alive = True
        self._waves: dict[str, list[Process]] = {}
        self._cancelled: set[str] = set()
        self._executors = 0

    def submit(self, group: str, run_task: RunTask, assignments: Sequence[Any]) -> Future[None]:
        future: Future[None] = Future()
        driver = self._world.scheduler.current
        assert driver is not None
        self._waves[group] = []
        runs = [assignment for assignment in assignments for _ in range(self._copies())]
        left = [len(runs)]
        lost: list[str] = []
        for assignment in runs:
            self._start(group, driver.process, run_task, assignment, future, left, lost, 1)
        return future

    def _copies(self) -> int:
        return 2 if self._world.chance("speculation") else 1

    def _start(
        self,
        group: str,
        driver: Process,
        run_task: RunTask,
        assignment: Any,
        future: Future[None],
        left: list[int],
        lost: list[str],
        attempt_number: int,
    ) -> None:
        scheduler = self._world.scheduler
        self._executors += 1
        executor = scheduler.process(f"{driver.name}.x{self._executors}", driver.host)
        self._waves[group].append(executor)
        ended: list[bool] = []

        def run() -> None:
            try:
                run_task(assignment)
            except Exception as error:  # a task that raises is run again, as one whose process died
                scheduler.note(f"the task raised {error!r}")
                scheduler.kill(executor)
            else:
                ended.append(True)

        def watch() -> None:
            actor = scheduler.spawn(executor, "task", run, self._world.latency())
            _join(self._world, actor)
            if not ended and not executor.alive and group not in self._cancelled:
                if attempt_number < SPARK_TRIES and self.alive:
                    self._start(group, driver, run_task, assignment, future, left, lost, attempt_number + 1)
                    return
                lost.append(executor.name)
            scheduler.kill(executor)
            left[0] -= 1
            if left[0] == 0:
                cancelled = group in self._cancelled
                if lost or cancelled:
                    future.set_exception(RuntimeError("cancelled" if cancelled else f"lost {lost[0]}"))
                else:
                    future.set_result(None)

        def orphan() -> None:
            # In a cluster an executor outlives its driver for a while.
            if self._world.random.random() < 0.5:
                scheduler.kill(executor)

        driver.at_death.append(orphan)
        scheduler.spawn(driver, f"wave of {executor.name}", watch)

    def cancel(self, group: str) -> None:
        self._world.scheduler.check()  # a driver that is gone cancels nothing
        self._cancelled.add(group)
        world = self._world

        def interrupt() -> None:
            for executor in self._waves.get(group, ()):
                world.scheduler.kill(executor)

        world.scheduler.spawn(world.network, f"cancel {group}", interrupt, world.random.uniform(0.0, 5.0))

    def close(self) -> None:
        self._world.scheduler.check()
        self.alive = False
        for group in self._waves:
            self.cancel(group)


def _join(world: World, actor: Actor) -> None:
    me = world.scheduler.current
    assert me is not None
    while not actor.done:
        actor.joiners.append(me)
        world.scheduler.park(None)
