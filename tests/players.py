"""What processes of a test do: the command line, and a worker for one job. See `zygote`."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep import attempt, importer, waves
from lockstep.attempt import Link
from lockstep.cli.main import main
from lockstep.config import load_config
from lockstep.engine import RunTask
from lockstep.engine.spark import TASK_FAILURES
from lockstep.job import Position, StagedFile
from lockstep.runtime import FAILPOINTS_VARIABLE, failpoint
from lockstep.sink import losers, run
from lockstep.store import open_store
from lockstep.worker import Until, Worker
from tests.zygote import Child, Zygote

SLOTS = 2
NEW_MOUNTS, NEW_USER = 0x00020000, 0x10000000
PRIVATE_MOUNTS = 0x4000 | 0x40000
STATE_VARIABLE = "LOCKSTEP_FAILPOINTS_STATE"
ROWS_LOG = "rows.txt"
DUE, CHECKPOINTED = -1, -2
GATE = "gate"


def on_stage(
    folder: Path, environment: Mapping[str, str], log: Path, play: Callable[..., object], *arguments: object
) -> object:
    """Play in a session of its own, in a working folder, with what it says kept in `log`."""
    os.setsid()
    os.chdir(folder)
    os.environ.update(environment)
    with log.open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    return play(*arguments)


def command(*arguments: str) -> None:
    """`lockstep …`, as a person calls it."""
    main(arguments)


def whole_process(
    folder: Path,
    environment: Mapping[str, str],
    out: Path,
    err: Path,
    play: Callable[..., object],
    *arguments: str,
) -> object:
    """Play in a session, a folder and an environment of its own, to the end of its last thread."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with open(os.devnull, "rb") as nothing, out.open("wb") as said, err.open("wb") as remarks:
        for number, stream in enumerate((nothing, said, remarks)):
            os.dup2(stream.fileno(), number)
    try:
        return play(*arguments)
    except SystemExit as leaving:
        return leaving.code
    finally:
        # What the interpreter does at its end: the threads of pools are waited for.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def run_forked(
    zygote: Zygote,
    play: Callable[..., object],
    *arguments: str,
    folder: Path,
    environment: Mapping[str, str],
    timeout_s: float,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, without the start of an interpreter."""
    with tempfile.TemporaryDirectory() as scratch:
        said = [Path(scratch) / name for name in ("out", "err")]
        child = zygote.start(whole_process, folder, dict(environment), *said, play, *arguments)
        try:
            code = child.wait(timeout_s)
        except TimeoutError:
            child.kill_group()
            raise
        return subprocess.CompletedProcess(arguments, code, *(path.read_text() for path in said))


def command_from_a_terminal(*arguments: str) -> None:
    """The same, where Ctrl-C is heard: who was started in the background would not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(arguments)


def work(*job_ids: str) -> None:
    """What `lockstep export` does after it has made its jobs, with forked processes in Spark's place."""
    zygote = Zygote.fork()
    config = load_config()
    store = open_store(config.store_url)
    Worker(config, store, job_ids=job_ids, engine=ForkEngine(zygote)).run("jobs_ended")


def toil(config: str = "lockstep.toml", *, until: Until = "forever", slots: int = SLOTS) -> None:
    """`lockstep worker`, with forked processes in Spark's place: whatever the store holds, without end."""
    zygote = Zygote.fork()
    settings = load_config(Path(config))
    Worker(settings, open_store(settings.store_url), engine=ForkEngine(zygote, slots)).run(until)


def work_to_the_gate(*job_ids: str) -> None:
    """`work`, where no task comes to its end before the gate is open."""
    wait_at_the_gate(0)
    work(*job_ids)


def toil_to_the_gate(finishing: str) -> None:
    """`toil`, where only so many tasks come to their end before the gate is open."""
    wait_at_the_gate(int(finishing))
    toil()


def wait_at_the_gate(after: int) -> None:
    """Whatever a test wants to find under way is held there until `Troupe.open_the_gate`: in however long the
    test takes, no more than `after` tasks of this process and its children finish."""

    def gate(name: str) -> None:
        failpoint(name)
        if name == "write.before_finish" and _arrival() > after:
            while not Path(GATE).exists():
                time.sleep(0.02)

    attempt.failpoint = gate  # type: ignore[attr-defined]


def _arrival() -> int:
    """Which one this is of those that came to the gate."""
    with Path(f"{GATE}.arrivals").open("ab") as arrivals:
        fcntl.flock(arrivals, fcntl.LOCK_EX)
        arrivals.write(b".")
        arrivals.flush()
        return os.fstat(arrivals.fileno()).st_size


def toil_narrowly() -> None:
    """`toil` with one core."""
    toil(slots=1)


def toil_once() -> None:
    """`lockstep worker --once`: until nothing is left."""
    toil(until="idle")


def toil_on_a_small_disk(folder: str, size_bytes: str) -> None:
    """`toil`, where this folder is a disk of its own with that little room. Only this process sees it."""
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = NEW_MOUNTS if os.geteuid() == 0 else NEW_MOUNTS | NEW_USER
    here, options = folder.encode(), f"size={size_bytes}".encode()
    if (
        libc.unshare(spaces)
        or libc.mount(b"none", b"/", None, PRIVATE_MOUNTS, None)
        or libc.mount(b"tmpfs", here, b"tmpfs", 0, options)
    ):
        raise OSError(ctypes.get_errno(), f"cannot mount a small disk at {folder}")
    toil()


def command_in_small_steps(*arguments: str) -> None:
    """`command`, where a small file is cut into tasks as a large one is."""
    take_small_steps()
    command(*arguments)


def work_in_small_steps(*job_ids: str) -> None:
    """`work`, where some thousand rows pass through as many files and checkpoints as millions do; it notes
    them for `Rows`."""
    take_small_steps()
    attempt.Link = CountingLink  # type: ignore[misc]
    work(*job_ids)


def take_small_steps() -> None:
    sizes: dict[ModuleType, dict[str, float]] = {
        importer: {"LEAST_TASK_BYTES": 1, "SHARES": 2},
        run: {"BLOCK_BYTES": 4_000, "LONG_RUN_BYTES": 40_000},
        losers: {"FILE_BYTES": 2_000},
        waves: {"PAUSE_GRACE_S": 1.0},
    }
    for room, constants in sizes.items():
        for name, value in constants.items():
            assert hasattr(room, name)
            setattr(room, name, value)


class CountingLink(Link):
    """Notes the rows that an attempt has taken, and what it has checkpointed."""

    def advance(self, rows: int, pending_bytes: int) -> None:
        self._note(rows)
        super().advance(rows, pending_bytes)

    def checkpoint(self, position: Position, staged: list[StagedFile]) -> None:
        self._note(DUE)
        super().checkpoint(position, staged)
        self._note(CHECKPOINTED)

    def finish(self, position: Position, staged: list[StagedFile]) -> None:
        self._note(DUE)
        super().finish(position, staged)
        self._note(CHECKPOINTED)

    def _note(self, what: int) -> None:
        with Path(ROWS_LOG).open("a") as log:
            log.write(f"{self.lease.stage} {self.lease.index} {self.lease.epoch} {what}\n")


@dataclass
class Rows:
    """What the attempts in a folder have taken: how much was lost, and the most between two checkpoints."""

    lost: Counter[tuple[str, int]]
    """By stage and task: rows that an attempt took and that no checkpoint covers."""
    most: Counter[str]

    @classmethod
    def of(cls, folder: Path) -> Rows:
        open_rows: Counter[tuple[str, int, int]] = Counter()
        most: Counter[str] = Counter()
        for line in (folder / ROWS_LOG).read_text().splitlines():
            stage, index, epoch, what = line.split()
            one = (stage, int(index), int(epoch))
            if int(what) == DUE:
                most[stage] = max(most[stage], open_rows[one])
            elif int(what) == CHECKPOINTED:
                del open_rows[one]
            else:
                open_rows[one] += int(what)
        lost: Counter[tuple[str, int]] = Counter()
        for (stage, number, _), rows in open_rows.items():
            lost[stage, number] += rows
        return cls(lost, most)


class Troupe:
    """The processes of one test: they work in its folder, and what they say is kept there.

    They count the failpoints that they reach together, so that a test can wait for one.
    """

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self._zygote = zygote
        self._folder = folder
        self._counts = folder / "reached"
        self._counts.mkdir()
        self._players = 0

    def play(self, play: Callable[..., object], *arguments: str, failpoints: str = "") -> Child:
        """Start a process that plays, with failpoints armed."""
        environment = {STATE_VARIABLE: str(self._counts)}
        if failpoints:
            environment[FAILPOINTS_VARIABLE] = failpoints
        log = self._folder / f"{self._players}-{play.__name__}.log"
        self._players += 1
        return self._zygote.start(on_stage, self._folder, environment, log, play, *arguments)

    def times_reached(self, failpoint: str) -> int:
        count = self._counts / failpoint
        return count.stat().st_size if count.exists() else 0

    def has_reached(self, failpoint: str, times: int = 1) -> bool:
        return self.times_reached(failpoint) >= times

    def wait_for(self, failpoint: str, timeout_s: float = 150.0, *, times: int = 1) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.has_reached(failpoint, times):
            assert time.monotonic() < deadline, f"{failpoint} was not reached\n{self.said()}"
            time.sleep(0.02)

    def open_the_gate(self) -> None:
        """For those who wait there; see `wait_at_the_gate`."""
        (self._folder / GATE).touch()

    def said(self) -> str:
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs)


class ForkEngine:
    """Each task in a process of its own that is started anew when it dies, as Spark does. An `Engine`."""

    driver_host = "127.0.0.1"
    alive = True

    def __init__(self, zygote: Zygote, slots: int = SLOTS) -> None:
        self.slots = slots
        self._zygote = zygote
        self._lock = threading.Lock()
        self._children: dict[str, list[Child]] = {}
        self._cancelled: set[str] = set()
        self._waves = ThreadPoolExecutor(16, thread_name_prefix="wave")
        self._tasks = ThreadPoolExecutor(slots, thread_name_prefix="task")

    def submit(self, group: str, run_task: RunTask, assignments: Sequence[Any]) -> Future[None]:
        tasks = [self._tasks.submit(self._run_task, group, run_task, each) for each in assignments]
        return self._waves.submit(_wait_for_all, tasks)

    def cancel(self, group: str) -> None:
        with self._lock:
            self._cancelled.add(group)
            for child in self._children.get(group, ()):
                child.kill()

    def close(self) -> None:
        for group in list(self._children):
            self.cancel(group)

    def _run_task(self, group: str, run_task: RunTask, assignment: Any) -> None:
        for _ in range(TASK_FAILURES):
            with self._lock:
                if group in self._cancelled:
                    break
                child = self._zygote.start(run_task, assignment)
                self._children.setdefault(group, []).append(child)
            if child.wait(timeout_s=600) == 0:
                return
        raise RuntimeError(f"a task of {group} was cancelled or died {TASK_FAILURES} times")


def _wait_for_all(tasks: Sequence[Future[None]]) -> None:
    for task in tasks:
        task.result()
