"""Processes that start in milliseconds: forks of one that has loaded everything and has no threads.

What Spark's Python daemon does for its workers, this does for the processes of our tests.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PRELOADED = (
    "kazoo.client",
    "lockstep.cli.main",
    "lockstep.engine.spark",
    "lockstep.exporter",
    "lockstep.importer",
    "lockstep.passes",
    "lockstep.sink.datafile",
    "lockstep.sink.losers",
    "lockstep.sink.run",
    "lockstep.source.clickhouse",
    "lockstep.source.files",
    "lockstep.source.iceberg_rows",
    "lockstep.source.parquet",
    "lockstep.store.sql",
    "lockstep.store.sql_sqlite",
    "lockstep.store.zookeeper",
    "lockstep.target.iceberg",
    "lockstep.unique",
    "lockstep.worker",
    "pandas",  # pyarrow looks for it the first time that it makes an array
    "psycopg",
    "pyarrow.acero",
    "pyarrow.dataset",
    "pyiceberg.catalog.sql",
    "tests.players",
)
CRASHED = 70


class Child:
    """A process that a zygote has forked for us."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._words = line.makefile("r")
        self.pid = int(self._words.readline())
        self._returncode: int | None = None

    def wait(self, timeout_s: float = 150.0) -> int:
        """Its exit code, or minus the signal that ended it. Raises: TimeoutError."""
        if self._returncode is None:
            if not select.select([self._line], [], [], timeout_s)[0]:
                raise TimeoutError(f"process {self.pid} still runs after {timeout_s} s")
            # A zygote that is gone cannot say how its children ended.
            self._returncode = int(self._words.readline() or CRASHED)
            self._words.close()
            self._line.close()
        return self._returncode

    def kill(self) -> None:
        if self._returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def kill_group(self) -> None:
        """SIGKILL to it, stopped or not, and to what it started. For one that has a session of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Zygote:
    def __init__(self, control: socket.socket) -> None:
        self._control = control

    @classmethod
    def launch(cls) -> Zygote:
        """A new interpreter. It ends, with all that it has forked, when `close` is called or we die."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", "tests.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                start_new_session=True,
            )
        return cls(ours)

    @classmethod
    def fork(cls) -> Zygote:
        """A fork of this process, which must not have threads yet. It ends when this process does."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        if os.fork() == 0:
            ours.close()
            _serve(theirs)
            os._exit(0)
        theirs.close()
        return cls(ours)

    def start(self, function: Callable[..., object], *arguments: object) -> Child:
        """Call `function(*arguments)` in a new process; an int that it returns is the exit code."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        with ours.makefile("wb") as stream:
            pickle.dump((function, arguments), stream)
        return Child(ours)

    def close(self) -> None:
        self._control.close()


def _serve(control: socket.socket) -> None:
    """Fork a process for each connection that arrives, and say on it how the process ended."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready, _ in poll.poll():
            if ready == control.fileno():
                message, fds, _, _ = socket.recv_fds(control, 1, 1)
                if not message:
                    return _end(running)
                line = socket.socket(fileno=fds[0])
                pid = os.fork()
                if pid == 0:
                    control.close()
                    _perform(line)
                line.sendall(f"{pid}\n".encode())
                handle = os.pidfd_open(pid)
                running[handle] = (pid, line)
                poll.register(handle, select.POLLIN)
            else:
                poll.unregister(ready)
                pid, line = running.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with line, contextlib.suppress(BrokenPipeError):
                    line.sendall(f"{code}\n".encode())


def _end(running: dict[int, tuple[int, socket.socket]]) -> None:
    for pid, _ in running.values():
        with contextlib.suppress(ProcessLookupError):
            # One that has made a session of its own goes with all that it started.
            os.killpg(pid, signal.SIGKILL)


def _perform(line: socket.socket) -> None:
    code: Any = CRASHED
    try:
        with line.makefile("rb") as stream:
            function, arguments = pickle.load(stream)
        code = function(*arguments)
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not through the interpreter's end: the threads of a driver would be waited for.
        os._exit(code if isinstance(code, int) else 0)


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    # No collection in a child looks at what was loaded here: it would copy all those pages.
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
