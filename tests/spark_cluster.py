"""A real Spark cluster on this machine: a standalone master and two workers, from the pyspark package."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pyspark

from tests.lab import SHORT_LIVED, die_with_parent
from tests.servers import free_port

PROGRAM = Path(pyspark.__file__).parent / "bin" / "spark-class"
WORKERS = 2
_READY_S = 300.0


class SparkCluster:
    """It ends when `close` is called, or when this process does. An executor ends with its worker."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        port = str(free_port())
        self.master = f"spark://127.0.0.1:{port}"
        try:
            self._start("master", "master.Master", "--port", port)
            self._wait("master", "I have been elected leader")
            names = [f"worker-{number}" for number in range(WORKERS)]
            for name in names:
                limits = ("--cores", "1", "--memory", "1g", "--work-dir", str(folder / name))
                self._start(name, "worker.Worker", self.master, *limits)
            for name in names:
                self._wait(name, "Successfully registered with master")
        except BaseException:
            self.close()
            raise

    def executors(self) -> list[int]:
        """The processes that run tasks now."""
        return [pid for pid in _processes() if self._is_executor(pid)]

    def close(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    def _is_executor(self, pid: int) -> bool:
        command = _command(pid)
        return "org.apache.spark.executor.CoarseGrainedExecutorBackend" in command and _parent(pid) in {
            process.pid for process in self._processes
        }

    def _start(self, name: str, kind: str, *arguments: str) -> None:
        options = ("--host", "127.0.0.1", "--webui-port", "0")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("LOCKSTEP_", "SPARK_"))}
        environment.update(
            SPARK_DAEMON_MEMORY="256m", SPARK_DAEMON_JAVA_OPTS=SHORT_LIVED, SPARK_LOCAL_IP="127.0.0.1"
        )
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [str(PROGRAM), f"org.apache.spark.deploy.{kind}", *arguments, *options],
                    stdout=log,
                    stderr=log,
                    cwd=self._folder,
                    env=environment,
                    preexec_fn=die_with_parent,
                )
            )

    def _wait(self, name: str, words: str) -> None:
        log = self._folder / f"{name}.log"
        deadline = time.monotonic() + _READY_S
        while words not in log.read_text(errors="replace"):
            if time.monotonic() > deadline or any(each.poll() is not None for each in self._processes):
                raise AssertionError(f"Spark's {name} did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def daemons_of(executor: int) -> list[str]:
    """The command lines of the Python daemons that an executor has started."""
    return [command for pid in _processes() if _parent(pid) == executor and (command := _command(pid))]


def kill(executor: int) -> None:
    os.kill(executor, signal.SIGKILL)
