"""One simulated world: processes, the wire between them, and what stands in for the machine.

The code under test is the real one: the SQL store on SQLite with its transactions, the worker, the
attempt, the commit loop, the Iceberg target. Replaced are threads and time (by the scheduler), sockets (by
direct calls that can get lost), Spark (by processes that run attempts), Parquet (by small JSON files), and
the catalog's server.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import sqlite3
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Final
from unittest import mock

from pyiceberg.manifest import clear_manifest_cache
from sqlalchemy import Connection
from sqlalchemy.engine import make_url

import lockstep.commit
import lockstep.exporter
import lockstep.merge
import lockstep.passes
import lockstep.pipeline
import lockstep.sink.datafile
import lockstep.sink.losers
import lockstep.sink.run
import lockstep.storage
import lockstep.sweep
import lockstep.target.iceberg
import lockstep.unique
import lockstep.worker
from lockstep import attempt, runtime, source
from lockstep.config import Config
from lockstep.engine import channel
from lockstep.errors import Retryable
from lockstep.job import Limits
from lockstep.store import sql
from lockstep.store.sql_sqlite import SqliteDatabase
from tests.simulation.executors import SimChannel, SimChannelServer
from tests.simulation.faults import Faults, draw_faults
from tests.simulation.lake import LakeTable, SimCatalog, SimStorage, Storage
from tests.simulation.rows import (
    Ranges,
    SimInput,
    SimSink,
    SimSource,
    StagedFiles,
)
from tests.simulation.runs import (
    SimLosersSink,
    SimMergeReader,
    SimRunSink,
    SimSortedRunSink,
    SimUniqueReader,
    plan_sim_merge,
    plan_sim_unique,
    plan_sim_whole,
    sim_published,
)
from tests.simulation.scheduler import (
    START,
    Crash,
    Process,
    Scheduler,
    SimExecutor,
    SimThreading,
)

POLL_S: Final = 12.0
BEAT_S: Final = 9.0
"""Rarer than in life: each beat costs real time, and none of the promises depends on how often it comes."""


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
        self.retired: list[LakeTable] = []
        """Tables that were dropped, and made anew under the same name."""
        self.partitions: dict[str, Ranges] = {}
        self.pins: set[str] = set()
        self.row_s = 0.0
        self.fan_in = self.random.choice((2, 2, 2, 3, 64))
        """Runs that one task merges: with few of them imports combine runs, once or twice."""
        self.complaints: list[str] = []
        """What only those who stand in can see: the auditor reads it."""
        self.drivers: dict[int, SimChannelServer] = {}
        self.kill_job: Callable[[str | None], None] = lambda job_id: None
        """How a user kills a job, or for None one that is being committed; the scenario sets it."""
        self.config = Config(
            root=Path("/nowhere"),
            store_url="",
            spark={},
            catalogs={"lake": {}},
            storage={},
            limits=draw_limits(self.random, disturbed=self.faults.any),
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

    def state_of(self, job_id: str) -> str:
        """What the store holds at this instant, for those who stand in."""
        found = self._look("SELECT state FROM lockstep_jobs WHERE job_id = ?", job_id)
        return found[0] if found else "unknown"

    def needs(self, job_id: str, path: str) -> bool:
        """Whether a task reads this run that is not done, of the stage that its job is in."""
        if self.state_of(job_id) in ("completed", "killed"):
            return False
        open_tasks = self._look(
            "SELECT descriptor FROM lockstep_tasks JOIN lockstep_jobs USING (job_id, stage)"
            " WHERE job_id = ? AND lockstep_tasks.state != 'done'",
            job_id,
        )
        return any(path in descriptor for descriptor in open_tasks)

    def committing(self) -> list[str]:
        return self._look("SELECT job_id FROM lockstep_jobs WHERE state = ? ORDER BY job_id", "committing")

    def _look(self, query: str, value: str) -> list[str]:
        connection = sqlite3.connect(database().path)
        found = [str(row[0]) for row in connection.execute(query, (value,))]
        connection.close()
        return found

    def clock(self, process: Process) -> ProcessClock:
        return ProcessClock(self.scheduler, process)

    def open_store(self) -> sql.SqlStore:
        """A store as a new process opens it: nothing is cached but what the database driver has."""
        return sql.SqlStore("")


def draw_limits(source: random.Random, *, disturbed: bool) -> Limits:
    """Budgets that run out now and then, but not because jobs commit to one table at the same time."""
    drawn = Limits(
        lease_s=30.0,
        task_attempts=source.choice((2, 4, 8)),
        task_deadline_s=source.choice((60.0, 300.0)),
        commit_attempts=source.choice((1, 3, 6)),
        commit_deadline_s=source.choice((20.0, 60.0, 200.0)),
    )
    return drawn if disturbed else replace(drawn, commit_attempts=Limits().commit_attempts)


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
        room = frame.f_code.co_filename.rpartition("/")[2]
        if room.startswith("sql") and room not in ("sql_database.py", "sql_sqlite.py"):
            return frame.f_code.co_name
    return "?"


@cache
def database() -> SimDatabase:
    """The one database of this process, in memory where the machine has a folder for that."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="lockstep-simulation-", dir=shared))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return SimDatabase(folder / "jobs.db")


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
    for cls in (SimChannelServer, SimChannel, SimSource, StagedFiles, SimMergeReader, SimStorage):
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
        (source.open_frozen, SimInput),
        (lockstep.sink.datafile.DataFileSink, SimSink),
        (lockstep.sink.run.RunSink, SimRunSink),
        (lockstep.sink.run.SortedRunSink, SimSortedRunSink),
        (lockstep.sink.losers.LosersSink, SimLosersSink),
        (lockstep.merge.MergeReader, SimMergeReader),
        (lockstep.unique.UniqueReader, SimUniqueReader),
        (lockstep.unique.published, sim_published),
        (lockstep.passes.plan_merge, plan_sim_merge),
        (lockstep.passes.plan_unique, plan_sim_unique),
        (lockstep.passes._whole, plan_sim_whole),
        (lockstep.storage.Storage, SimStorage),
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
        put(lockstep.sweep, "ClickHouseSource", SimSource)
        put(lockstep.passes, "FAN_IN", world.fan_in)
        put(lockstep.worker, "POLL_S", POLL_S)
        put(lockstep.worker, "BEAT_S", BEAT_S)
        put(attempt, "HEARTBEAT_S", BEAT_S)
        try:
            yield
        finally:
            db.world = None
            clear_manifest_cache()
