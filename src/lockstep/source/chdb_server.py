"""The process that serves a chDB data folder over ClickHouse's HTTP protocol.

`python -m lockstep.source.chdb_server PATH`; `connect` finds it or starts it. Requests come from
clickhouse-connect on this machine, with the secret of the server's card. The server ends by itself when
nobody has needed it for a while, and on SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from lockstep.errors import LockstepError, Retryable
from lockstep.runtime import SYSTEM_CLOCK, Clock, new_secret
from lockstep.source.chdb_engine import Engine, EngineError, Execution
from lockstep.source.chdb_http import HttpServer
from lockstep.source.chdb_launch import HOST, IDLE_S, Card, Room, connect

__all__ = ["connect", "main", "serve"]

log = logging.getLogger("lockstep.chdb_server")

_TICK_S: Final = 0.25
_GRACE_S: Final = 5.0
_LOG_BYTES: Final = 1_000_000


class Activity:
    """Who needs the server now: open connections, and the statements that run for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections = 0
        self._running: dict[str, tuple[Execution, socket.socket]] = {}
        self._uses = 0
        self._over = False

    @contextlib.contextmanager
    def connection(self) -> Iterator[None]:
        with self._lock:
            self._connections += 1
            self._uses += 1
        try:
            yield
        finally:
            with self._lock:
                self._connections -= 1
                self._uses += 1

    @contextlib.contextmanager
    def running(self, execution: Execution, client: socket.socket) -> Iterator[None]:
        with self._lock:
            self._running[execution.tag] = (execution, client)
            self._uses += 1
        try:
            yield
        finally:
            with self._lock:
                del self._running[execution.tag]
                self._uses += 1

    @property
    def connections(self) -> int:
        with self._lock:
            return self._connections

    @property
    def uses(self) -> int:
        """A number that changes whenever somebody comes or goes."""
        with self._lock:
            return self._uses

    def greet(self) -> bool:
        """Whether a caller who asks now can come: it counts as a use."""
        with self._lock:
            self._uses += 1
            return not self._over

    def end(self, uses: int) -> bool:
        """Whether nobody came since `uses`; nobody can come any more then."""
        with self._lock:
            self._over = self._over or (not self._connections and self._uses == uses)
            return self._over

    def executions(self) -> list[tuple[Execution, socket.socket]]:
        with self._lock:
            return list(self._running.values())


def _is_gone(client: socket.socket) -> bool:
    """Whether the other end has closed, without reading from the connection."""
    try:
        poll = select.poll()
        poll.register(client, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return True


class Server:
    """The life of one server: open, announce, watch, close."""

    def __init__(self, folder: Path, idle_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._room = Room(folder)
        self._idle_s = idle_s
        self._clock = clock
        self._stopping = threading.Event()
        self._activity = Activity()
        self._lock: int | None = None
        self._killed: set[str] = set()

    def open(self) -> bool:
        """Open the folder, listen, and write the card. False if another server of ours has the folder.

        Raises: Retryable if another program has the folder, or chDB cannot open it.
        """
        # A caller who looks whether a server lives holds the lock for an instant.
        deadline = self._clock.now() + _TICK_S
        self._lock = self._room.lock_by("server.lock", deadline, self._clock)
        if self._lock is None:
            return False
        self._refuse_a_busy_folder()
        try:
            self._engine = Engine(self._room.data_folder)
        except EngineError as error:
            raise Retryable(f"chDB cannot open {self._room.data_folder}: {error.text}") from error
        secret = new_secret()
        self._http = HttpServer(self._engine, self._activity, secret, self._idle_s, self._stopping)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(_TICK_S,), name="accept")
        self._thread.start()
        # chDB sets signal handlers of its own when it opens a folder: ours come after it.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        port = int(self._http.server_address[1])
        card = Card(os.getpid(), port, secret, self._clock.now(), self._room.identity())
        self._room.write_card(card)
        log.info("serving %s at %s:%d, process %d", self._room.data_folder, HOST, port, card.pid)
        return True

    def _refuse_a_busy_folder(self) -> None:
        """chDB's own message does not say who holds the folder; its lock file does.

        Raises: Retryable naming the process.
        """
        status = self._room.data_folder / "status"
        if not status.exists():
            return
        deadline = self._clock.now() + _GRACE_S
        with status.open() as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    if self._clock.now() >= deadline:
                        break
                self._clock.sleep(_TICK_S)
            holder = next((line[5:].strip() for line in file if line.startswith("PID: ")), "unknown")
        raise Retryable(
            f"the chDB data folder {self._room.data_folder} is open in another program (process {holder})",
            hint="a data folder belongs to one process: close it there, then try again",
        )

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        log.info("stopping: %s", signal.Signals(number).name)
        self._stopping.set()

    def watch(self) -> None:
        """Return when it is time to close: nobody came for the idle time, a signal, or the card has gone."""
        quiet_s, uses = 0.0, -1
        while not self._stopping.wait(_TICK_S):
            self._stop_orphans()
            self._bound_stderr()
            card = self._room.read_card() if self._room.data_folder.exists() else None
            if card is None or card.pid != os.getpid():
                log.info("stopping: the card has gone")
                return
            if self._activity.connections or self._activity.uses != uses:
                quiet_s, uses = 0.0, self._activity.uses
                continue
            quiet_s += _TICK_S
            if quiet_s >= self._idle_s and self._activity.end(uses):
                log.info("stopping: nobody needed this server for %g s", quiet_s)
                return

    def _stop_orphans(self) -> None:
        running = self._activity.executions()
        self._killed &= {execution.tag for execution, _ in running}
        for execution, client in running:
            if execution.cancellable and execution.tag not in self._killed and _is_gone(client):
                self._kill(execution)

    def _kill(self, execution: Execution) -> None:
        self._killed.add(execution.tag)
        try:
            self._engine.kill(execution.tag)
        except EngineError as error:
            log.warning("cannot stop a statement: %s", error.text)

    def _bound_stderr(self) -> None:
        with contextlib.suppress(OSError):
            if os.fstat(2).st_size > _LOG_BYTES:
                os.ftruncate(2, 0)

    def close(self) -> None:
        """Take the card away, end what runs, close the folder.

        The lock stays held until the process has ended: the next server finds a closed folder.
        """
        self._stopping.set()
        if self._room.path.exists():
            self._room.remove_card(os.getpid())
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        for execution, _ in self._activity.executions():
            self._kill(execution)
        clean = self._http.wait_for_statements(self._clock.now() + _GRACE_S, self._clock)
        if clean:
            self._engine.close()
        log.info("closed%s", "" if clean else ", with statements still running")


def serve(folder: Path, idle_s: float, say: Any) -> None:
    """Serve `folder` until it is time to close. `say` passes one word to whoever started this process."""
    server = Server(folder, idle_s)
    try:
        if not server.open():
            say({"busy": True})
            return
    except LockstepError as error:
        log.error("%s", error.message)
        say({"class": type(error).__name__, "error": error.message, "hint": error.hint})
        return
    say({"ready": True})
    try:
        server.watch()
    finally:
        server.close()


def _set_up_log(room: Room) -> None:
    handler = RotatingFileHandler(room.log_path, maxBytes=_LOG_BYTES, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def _allow_many_files() -> None:
    """A table of many parts keeps many files open; the usual limit of 1024 is for programs with select."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main(arguments: list[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m lockstep.source.chdb_server", description=__doc__)
    parser.add_argument("path", type=Path, help="the chDB data folder")
    parser.add_argument("--idle-s", type=float, default=IDLE_S, help="end after this time without a client")
    parser.add_argument("--ready-fd", type=int, help="where to write one line when ready or refused")
    parser.add_argument("--detach", action="store_true", help="go on in the background")
    options = parser.parse_args(arguments)
    if options.detach and os.fork():
        os._exit(0)

    def say(word: dict[str, Any]) -> None:
        if options.ready_fd is None:
            sys.stderr.write(json.dumps(word) + "\n")
            return
        # Nobody may be listening any more: the caller can be gone.
        with contextlib.suppress(BrokenPipeError):
            os.write(options.ready_fd, json.dumps(word).encode() + b"\n")
        os.close(options.ready_fd)

    room = Room(options.path.resolve())
    room.make()
    _set_up_log(room)
    _allow_many_files()
    code = 1
    try:
        serve(room.data_folder, options.idle_s, say)
        code = 0
    except Exception:
        log.exception("the server failed")
    finally:
        # The folder is closed. Unloading chDB takes seconds, and connections still wait for requests.
        logging.shutdown()
        os._exit(code)


if __name__ == "__main__":
    main()
