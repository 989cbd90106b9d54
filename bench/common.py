"""What the benchmarks share: a worker in the background and its memory, a peer's session, a contest."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from lockstep.config import Config
from lockstep.job import Job, State
from lockstep.store import open_store
from tests.readers import iceberg_jar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PATIENCE_S = 3600


@dataclass
class Contest:
    """Lockstep and a peer on the same data: seconds per round, and the memory of our workers."""

    name: str
    peer: str
    ours_s: list[float] = field(default_factory=list)
    peer_s: list[float] = field(default_factory=list)
    peak_mb: float = 0.0

    def line(self, rows: int) -> str:
        ours, peer = statistics.median(self.ours_s), statistics.median(self.peer_s)
        return (
            f"{self.name:<22} {ours:6.2f} s ({min(self.ours_s):.2f}..{max(self.ours_s):.2f})  "
            f"{rows / ours / 1e6:5.2f} M rows/s   {self.peer:<34} {peer:6.2f} s "
            f"({min(self.peer_s):.2f}..{max(self.peer_s):.2f})   {peer / ours:5.2f} x the peer's speed   "
            f"peak {self.peak_mb:.0f} MB per Python worker"
        )


class MemoryWatch:
    """The largest resident set of any Python worker below a process, sampled."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self.peak_bytes = 0
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def reset(self) -> None:
        self.peak_bytes = 0

    def close(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        workers: list[psutil.Process] = []
        rounds = 0
        while not self._ended.wait(0.05):
            # To look through all processes costs more than the looks at the memory of a few.
            if rounds % 20 == 0:
                workers = _python_workers(self._root)
            rounds += 1
            for worker in workers:
                with suppress(psutil.Error):
                    self.peak_bytes = max(self.peak_bytes, worker.memory_info().rss)


def _python_workers(root: psutil.Process) -> list[psutil.Process]:
    workers = []
    with suppress(psutil.Error):
        for process in root.children(recursive=True):
            if "lockstep.engine.daemon" in " ".join(process.cmdline()):
                workers.append(process)
    return workers


@contextmanager
def background_worker(folder: Path) -> Iterator[MemoryWatch]:
    """`lockstep worker` in a process of its own, as users run it."""
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("lockstep")), "worker"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    watch = MemoryWatch(process.pid)
    try:
        yield watch
    finally:
        watch.close()
        process.terminate()
        process.wait(timeout=30)


def finished(config: Config, job_ids: Sequence[str]) -> list[Job]:
    """The jobs once a worker has ended them all; anything but success ends the benchmark."""
    store = open_store(config.store_url)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        jobs = [store.read(job_id) for job_id in job_ids]
        if all(not job.state.live for job in jobs):
            break
        if time.monotonic() > deadline:
            raise SystemExit(f"jobs {', '.join(job_ids)} did not end within {PATIENCE_S} s")
        time.sleep(0.05)
    for job in jobs:
        if job.state is not State.COMPLETED:
            raise SystemExit(f"job {job.job_id} is {job.state}: {job.error}")
    return jobs


def timed(action: Callable[[], object]) -> float:
    begin = time.monotonic()
    action()
    return time.monotonic() - begin


def spark_session(folder: Path) -> SparkSession:
    """Spark with the Iceberg JVM runtime, and a catalog `peer` of its own in the folder."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", str(iceberg_jar()))
        .config("spark.driver.memory", "3g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.catalog.peer", "org.apache.iceberg.spark.SparkCatalog")
        .config("spark.sql.catalog.peer.type", "hadoop")
        .config("spark.sql.catalog.peer.warehouse", str(folder / "peer"))
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark
