"""What the processes of a crash drill do: the command line, and a worker for one job."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lockstep.cli.main import main
from lockstep.config import load_config
from lockstep.engine import RunTask
from lockstep.engine.spark import TASK_FAILURES
from lockstep.store import open_store
from lockstep.worker import Worker
from tests.zygote import Child, Zygote

SLOTS = 2


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


def work(*job_ids: str) -> None:
    """What `lockstep export` does after it has made its jobs, with forked processes in Spark's place."""
    zygote = Zygote.fork()
    config = load_config()
    store = open_store(config.store_url)
    Worker(config, store, job_ids=job_ids, engine=ForkEngine(zygote)).run("jobs_ended")


class ForkEngine:
    """Each task in a process of its own that is started anew when it dies, as Spark does. An `Engine`."""

    slots = SLOTS
    driver_host = "127.0.0.1"
    alive = True

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._lock = threading.Lock()
        self._children: dict[str, list[Child]] = {}
        self._cancelled: set[str] = set()
        self._waves = ThreadPoolExecutor(16, thread_name_prefix="wave")
        self._tasks = ThreadPoolExecutor(SLOTS, thread_name_prefix="task")

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
