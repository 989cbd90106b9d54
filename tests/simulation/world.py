"""One simulated world: processes, the wire between them, and what stands in for the machine.

The code under test is the real one: the SQL store on SQLite with its transactions, the worker, the
attempt, the commit loop, the Iceberg target. Replaced are threads and time (by the scheduler), sockets (by
direct calls that can get lost), Spark (by processes that run attempts), Parquet (by small JSON files), and
the catalog's server.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sqlite3
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from pyiceberg.manifest import clear_manifest_cache
from sqlalchemy import Connection
from sqlalchemy.engine import make_url

import lockstep.commit
import lockstep.exporter
import lockstep.sink.datafile
import lockstep.target.iceberg
import lockstep.worker
from lockstep import attempt, runtime, source
from lockstep.config import Config
from lockstep.engine import RunTask, channel
from lockstep.errors import Corrupt, Fenced, Retryable
from lockstep.job import Fingerprint, Json, Limits, Plan, Position, StagedFile
from lockstep.source import Chunk
from lockstep.store import sql
from lockstep.store.sql_sqlite import SqliteDatabase
from tests.simulation.faults import Faults, draw_faults
from tests.simulation.lake import LakeTable, SimCatalog, Storage
from tests.simulation.scheduler import (
    START,
    Actor,
    Crash,
    Process,
    Scheduler,
    SimExecutor,
    SimThreading,
)

LIMITS: Final = Limits(
    lease_s=30.0, task_attempts=4, task_deadline_s=300.0, commit_attempts=6, commit_deadline_s=120.0
)
POLL_S: Final = 7.0
BEAT_S: Final = 8.0
"""Rarer than in life: each beat costs real time, and none of the promises depends on how often it comes."""
SPARK_TRIES: Final = 3


class World:
    """Everything of one run. All chance comes from its seed."""

    def __init__(self, seed: int, faults: Faults | None = None) -> None:
        self.seed = seed
        self.scheduler = Scheduler(seed)
        self.random = self.scheduler.random
        drawn = draw_faults(self.random)
        self.faults = faults or drawn
        self.threading = SimThreading(self.scheduler)
        self.storage = Storage()
        self.network = self.scheduler.process("network", "wire", mortal=False)
        self.in_flight = 0
        self.tables: dict[str, LakeTable] = {}
        self.drivers: dict[int, SimChannelServer] = {}
        self.kill_job: Callable[[str | None], None] = lambda job_id: None
        """How a user kills a job, or any one for None; the scenario sets it."""
        self.config = Config(
            root=Path("/nowhere"),
            store_url="",
            spark={},
            catalogs={"lake": {}},
            storage={},
            limits=LIMITS,
            finished_job_ttl_s=1e9,
        )

    # Chance and time

    @property
    def elapsed_s(self) -> float:
        return self.scheduler.now - START

    @property
    def quiet(self) -> bool:
        return self.elapsed_s >= self.faults.quiet_s

    def chance(self, fault: str) -> bool:
        """Whether this fault happens now."""
        rate: float = getattr(self.faults, fault)
        return rate > 0 and not self.quiet and self.random.random() < rate

    def in_window(self, fault: str) -> bool:
        return any(self.elapsed_s in window for window in getattr(self.faults, fault))

    def latency(self) -> float:
        return self.random.expovariate(10.0)

    def new_uuid(self) -> uuid.UUID:
        return uuid.UUID(int=self.random.getrandbits(128), version=4)

    # Leaving a process

    def call(self, what: str) -> None:
        """A call leaves this process: others run meanwhile, and the process may die here."""
        self.scheduler.note(what)
        stalled = self.chance("stall")
        self.scheduler.pause(self.random.uniform(1.0, 100.0) if stalled else self.latency())
        self.crash_here(what)

    def crash_here(self, where: str) -> None:
        """Raises: Crash if the dice say so."""
        actor = self.scheduler.current
        if actor is not None and actor.process.mortal and self.chance("crash"):
            self.scheduler.note(f"crash at {where}")
            self.scheduler.kill(actor.process)
            raise Crash

    def about_to_send(self, job_id: str | None) -> None:
        """A commit, or a fence, is ready to go: the worst moment to sleep, or to be killed."""
        actor = self.scheduler.current
        assert actor is not None
        if job_id is not None and self.chance("kill_in_commit"):
            self.kill_job(job_id)
        if actor.process.mortal and self.chance("sleep_in_commit"):
            self.scheduler.freeze(actor.process, self.random.uniform(5.0, 150.0))

    def reach_storage(self, what: str) -> None:
        """Raises: OSError if the storage does not answer."""
        if self.random.random() < 0.3:
            self.call(what)
        if self.chance("storage_refused") or self.in_window("storage_away"):
            self.scheduler.note("storage: no answer")
            raise OSError("503 Slow Down")

    def clock(self, process: Process) -> ProcessClock:
        return ProcessClock(self.scheduler, process)

    def open_store(self) -> sql.SqlStore:
        """A store as a new process opens it: nothing is cached but what the database driver has."""
        return sql.SqlStore("")


class ProcessClock:
    """The clock of the machine that a process runs on."""

    def __init__(self, scheduler: Scheduler, process: Process) -> None:
        self._scheduler = scheduler
        self._process = process

    def now(self) -> float:
        return self._scheduler.now + self._process.skew_s

    def sleep(self, seconds: float) -> None:
        self._scheduler.pause(seconds)


# The store's database


class SimDatabase(SqliteDatabase):
    """Real transactions on a real file. Around each lies the wire, with its faults and its crashes.

    One for the whole session: making its statements costs more than a run. `world` is whoever uses it now.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.world: World | None = None
        super().__init__(make_url(f"sqlite:///{path}"), runtime.SYSTEM_CLOCK)

    def now(self, connection: Connection) -> float:
        assert self.world is not None
        return self.world.scheduler.now

    @contextmanager
    def read(self) -> Iterator[Connection]:
        self._send("read")
        with super().read() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        self._send("write")
        with super().write() as connection:
            yield connection
            if self.world is not None:
                self.world.crash_here("the end of a transaction")
        if self.world is not None:
            self.world.scheduler.note("store: committed")
            self.world.crash_here("the reply of the store")
            if self.world.chance("store_reply_lost"):
                self.world.scheduler.note("store: no reply")
                raise Retryable("the store's reply was lost")

    def _send(self, what: str) -> None:
        world = self.world
        if world is None:
            return
        world.call(f"store {what} {_verb()}")
        if world.chance("store_refused") or world.in_window("store_away"):
            world.scheduler.note("store: no answer")
            raise Retryable("the store is away")

    def empty(self) -> None:
        with sqlite3.connect(self.path) as connection:
            names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            for (name,) in names:
                if name.startswith("lockstep_") and name != "lockstep_version":
                    connection.execute(f"DELETE FROM {name}")
        connection.close()


def _verb() -> str:
    """The verb of the store that is running, for the trace."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_code.co_name
        if "/store/sql" in frame.f_code.co_filename and name not in ("run", "__enter__", "read", "write"):
            return name
    return "?"


@cache
def database() -> SimDatabase:
    """The one database of this process, in memory where the machine has a folder for that."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="lockstep-simulation-", dir=shared))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return SimDatabase(folder / "jobs.db")


# Executors and their channel


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
        self._cancelled.add(group)
        world = self._world

        def interrupt() -> None:
            for executor in self._waves.get(group, ()):
                world.scheduler.kill(executor)

        world.scheduler.spawn(world.network, f"cancel {group}", interrupt, world.random.uniform(0.0, 5.0))

    def close(self) -> None:
        self.alive = False
        for group in self._waves:
            self.cancel(group)


def _join(world: World, actor: Actor) -> None:
    me = world.scheduler.current
    assert me is not None
    while not actor.done:
        actor.joiners.append(me)
        world.scheduler.park(None)


# Rows


class SimBatch:
    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        self.num_rows = len(rows)


class SimSource:
    """Rows are numbers: a task is the range `first` to `last`, a position the next number to read."""

    world: World

    def __init__(self, address: str, config: Config) -> None:
        self.address = address

    def read(
        self, pin: Json, descriptor: Json, position: Position | None, columns: object, batch_bytes: int
    ) -> Iterator[Chunk]:
        world = self.world
        row = descriptor["first"] if position is None else position["row"]
        while row < descriptor["last"]:
            world.call(f"source read {row}")
            if world.chance("source_refused"):
                raise Retryable("the source does not answer")
            if world.chance("source_corrupt"):
                raise Corrupt("a part is damaged")
            upto = min(descriptor["last"], row + world.random.randint(1, 3))
            chunk = SimBatch(list(range(row, upto)))
            row = upto
            known = row == descriptor["last"] or world.random.random() < 0.7
            yield Chunk(chunk, {"row": row} if known else None)

    def unpin(self, pin: Json, timeout_s: float) -> None:
        self.world.call("unpin")
        if self.world.chance("source_refused"):
            raise Retryable("the source does not answer")

    def close(self) -> None:
        pass


class SimSink:
    """Implements `Sink`: finished files are JSON lists of rows, under names of this attempt alone."""

    world: World

    def __init__(self, plan: Plan, job_id: str, stage: str, index: int, epoch: int, *_: Any) -> None:
        self._prefix = f"{plan.location}/data/{job_id}-{stage}-{index}-{epoch}"
        self._rows: list[int] = []
        self._written = 0
        self._most = self.world.random.randint(1, 4)

    def add(self, batch: Any) -> None:
        self._rows += batch.rows

    @property
    def full(self) -> bool:
        return len(self._rows) >= self._most

    @property
    def pending_bytes(self) -> int:
        return len(self._rows)

    def flush(self) -> list[StagedFile]:
        if not self._rows:
            return []
        world = self.world
        rows, self._rows = self._rows, []
        path = f"{self._prefix}-{self._written}.parquet"
        self._written += 1
        world.call(f"put {path.rpartition('/')[2]} {rows}")
        if world.chance("storage_refused") or world.in_window("storage_away"):
            raise Retryable("the storage does not answer")
        body = json.dumps(rows).encode()
        world.storage.put(path, body)
        if world.chance("storage_reply_lost"):
            raise Retryable("the storage's reply was lost")
        found = Fingerprint(len(rows), {"id": sum(rows)})
        return [StagedFile(path, len(body), len(rows), "", found)]

    def abort(self) -> None:
        self._rows = []


# Putting it all in place


class _Machine:
    """What `runtime` sees of the machine: time, chance and processes of the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.random = world.random
        self.uuid = SimpleNamespace(uuid4=world.new_uuid)
        self.socket = SimpleNamespace(gethostname=lambda: self._process.host)

    @property
    def _process(self) -> Process:
        actor = self._world.scheduler.current
        return actor.process if actor is not None else self._world.network

    def time(self) -> float:
        return self._world.scheduler.now + self._process.skew_s

    def getpid(self) -> int:
        return self._process.pid

    def kill(self, pid: int, _: int) -> None:
        if not any(one.pid == pid and one.alive for one in self._world.scheduler.processes):
            raise ProcessLookupError(pid)

    environ = os.environ


@contextmanager
def in_place(world: World) -> Iterator[None]:
    """Let the modules under test use the world's threads, clock, wire and storage."""
    machine = _Machine(world)
    for cls in (SimChannelServer, SimChannel, SimSource, SimSink):
        cls.world = world
    SimExecutor.scheduler = world.scheduler
    db = database()
    db.empty()
    db.world = world
    clear_manifest_cache()
    replaced: list[tuple[object, object]] = [
        (threading, world.threading),
        (ThreadPoolExecutor, SimExecutor),
        (channel.ChannelServer, SimChannelServer),
        (channel.Channel, SimChannel),
        (source.open_source, SimSource),
        (lockstep.sink.datafile.DataFileSink, SimSink),
    ]
    with ExitStack() as stack:

        def put(module: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        for module in [m for name, m in sorted(sys.modules.items()) if name.startswith("lockstep.")]:
            for name, value in list(vars(module).items()):
                for real, stand_in in replaced:
                    if value is real:
                        put(module, name, stand_in)
        put(runtime, "time", machine)
        put(runtime, "random", machine.random)
        put(runtime, "uuid", machine.uuid)
        put(runtime, "socket", machine.socket)
        put(runtime, "os", machine)
        put(sql, "open_database", lambda url, clock: db)
        put(lockstep.target.iceberg, "load_catalog", lambda name, **properties: SimCatalog(world))
        put(lockstep.worker, "POLL_S", POLL_S)
        put(lockstep.worker, "BEAT_S", BEAT_S)
        put(attempt, "HEARTBEAT_S", BEAT_S)
        try:
            yield
        finally:
            db.world = None
            clear_manifest_cache()
