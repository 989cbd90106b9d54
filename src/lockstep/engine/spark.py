"""Spark: where tasks are placed, run and re-run.

A wave is one Spark job with one partition per task; waves overlap, so a slow task never holds back the
slots of the others. The rows do not pass through the JVM: a task's Python process reads, converts and
writes by itself, and only its descriptor goes in. So a wave is a plain RDD, and Spark's SQL is never started.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lockstep.engine import RunTask
from lockstep.errors import Invalid
from lockstep.runtime import share_failpoint_state

if TYPE_CHECKING:
    from pyspark import SparkContext

DEFAULTS: Final = {
    "spark.master": "local[*]",
    "spark.app.name": "lockstep",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "1g",
    "spark.scheduler.mode": "FAIR",
    "spark.python.worker.reuse": "true",
    "spark.python.daemon.module": "lockstep.engine.daemon",
    # A cancelled task that does not end is killed with its thread and its Python worker.
    "spark.task.reaper.enabled": "true",
    "spark.task.reaper.killTimeout": "30s",
}
# With a local master nothing has to be reached from another machine, and the JVM, which only places tasks,
# shares the processors with them: what it would compile to make itself faster never pays off.
LOCAL: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
TASK_FAILURES: Final = 4


class SparkEngine:
    """Spark, and the waves that run on it. Implements `Engine`."""

    def __init__(self, options: Mapping[str, str], log: Path) -> None:
        share_failpoint_state()
        from pyspark import SparkContext

        active = SparkContext._active_spark_context
        self._is_ours = active is None
        self._context = _start(options, log) if active is None else active
        self._groups: set[str] = set()
        self.slots: int = max(1, self._context.defaultParallelism)
        self.driver_host: str = str(self._context.getConf().get("spark.driver.host", "127.0.0.1"))

    def submit(self, group: str, run_task: RunTask, assignments: Sequence[Any]) -> Future[None]:
        future: Future[None] = Future()
        self._groups.add(group)
        thread = threading.Thread(
            target=self._run_wave, args=(future, group, run_task, list(assignments)), name=group, daemon=True
        )
        thread.start()
        return future

    @property
    def alive(self) -> bool:
        process = getattr(self._context._gateway, "proc", None)
        return process is None or process.poll() is None

    def cancel(self, group: str) -> None:
        if self.alive:
            self._context.cancelJobGroup(group)

    def close(self) -> None:
        """Cancel the waves, and end Spark if it was started here: a program may have brought its own."""
        if not self.alive:
            return
        for group in list(self._groups):
            self._context.cancelJobGroup(group)
        if self._is_ours:
            self._context.stop()

    def _run_wave(
        self, future: Future[None], group: str, run_task: RunTask, assignments: Sequence[Any]
    ) -> None:
        try:
            self._context.setJobGroup(group, group, interruptOnCancel=True)
            count = len(assignments)
            tasks = self._context.parallelize(range(count), count)
            tasks.mapPartitionsWithIndex(_partition_function(run_task, assignments)).collect()
            future.set_result(None)
        except Exception as error:  # whatever Spark raises belongs to whoever waits for the wave
            future.set_exception(error)
        finally:
            self._groups.discard(group)


def _partition_function(
    run_task: RunTask, assignments: Sequence[Any]
) -> Callable[[int, Iterable[int]], Iterable[None]]:
    def run_partition(index: int, _numbers: Iterable[int]) -> Iterable[None]:
        run_task(assignments[index])
        return ()

    return run_partition


def _start(options: Mapping[str, str], log: Path) -> SparkContext:
    """A new context whose JVM and Python workers talk to `log`."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkException
    from pyspark.java_gateway import launch_gateway

    settings = {**DEFAULTS, **{_spark_key(name): value for name, value in options.items()}}
    settings["spark.master"] = _with_task_failures(settings["spark.master"])
    if settings["spark.master"].startswith("local"):
        settings = {**LOCAL, **settings}
    conf = SparkConf().setAll(list(settings.items()))
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("ab") as stream:
            gateway = launch_gateway(conf, popen_kwargs={"stdout": stream, "stderr": stream})  # type: ignore[no-untyped-call]
        context = SparkContext(conf=conf, gateway=gateway)
    except (PySparkException, OSError, RuntimeError) as error:
        raise Invalid(
            f"Spark does not start: {error}",
            hint=f"Spark 4.1 needs Java 17 or newer; see {log}, and `lockstep doctor` for what is there",
        ) from error
    context.setLogLevel("ERROR")
    return context


def _spark_key(name: str) -> str:
    return name if name.startswith("spark.") else f"spark.{name}"


def _with_task_failures(master: str) -> str:
    """`local[N]` never re-runs a failed task; `local[N,F]` does, as a cluster would."""
    if master == "local":
        return f"local[1,{TASK_FAILURES}]"
    if master.startswith("local[") and "," not in master:
        return f"{master[:-1]},{TASK_FAILURES}]"
    return master
