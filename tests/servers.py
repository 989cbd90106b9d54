"""Real servers for tests, each private to one run, in a temporary folder, and gone when the run is."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import psycopg

USER = "lockstep"
# Characters that have a meaning in a URL: what prints or parses it carelessly is found out.
PASSWORD = "s3cret/@:%word"
_READY_S = 60.0

# Ends when its standard input does, so also when the process that holds the other end is killed.
_REAPER = """
cat >/dev/null
"$@"
rm -rf "$FOLDER"
"""


class Missing(Exception):
    """A component is not installed; the message says which and how to get it."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A process of ours with its own port, folder and log. `kill` is SIGKILL; port and folder stay."""

    before_exec: Callable[[], None] | None = None
    """Run in the new process. Not `die_with_parent` where a thread may start it: it dies with that thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.launch()
        self.await_ready()

    def launch(self) -> None:
        assert self._process is None, "it runs already"
        command, environment = self._command()
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                preexec_fn=self.before_exec,
            )

    def await_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                tail = (self.folder / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{type(self).__name__} did not start:\n{tail}")
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL. Whoever asks now is refused; what was not answered may or may not be on disk."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Nobody is answered, and no connection breaks."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def _command(self) -> tuple[list[str], dict[str, str]]:
        """What to run, and what to add to its environment."""
        raise NotImplementedError

    def _answers(self) -> bool:
        raise NotImplementedError


class Postgresql:
    """A private PostgreSQL cluster on a loopback port and a socket in its folder."""

    def __init__(self) -> None:
        self._programs = _postgresql_programs()
        self.folder = Path(tempfile.mkdtemp(prefix="lockstep-postgresql-"))
        self.port = free_port()
        self._data = self.folder / "data"
        self._sessions: dict[str, psycopg.Connection] = {}
        if os.geteuid() == 0:
            shutil.chown(self.folder, "postgres", "postgres")
        self._reaper = subprocess.Popen(
            [
                "sh",
                "-c",
                _REAPER,
                "reaper",
                *self._as_owner("pg_ctl", "stop", "-D", self._data, "-m", "immediate"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "FOLDER": str(self.folder)},
            start_new_session=True,
        )
        try:
            self._create()
            self.start()
        except BaseException:
            self.close()
            raise

    def url(self, database: str, **options: str) -> str:
        """The address of a database, with options of the session, for example `search_path`."""
        settings = " ".join(f"-c{name}={value}" for name, value in options.items())
        address = f"postgresql://{USER}:{quote(PASSWORD, safe='')}@127.0.0.1:{self.port}/{database}"
        return f"{address}?options={quote(settings)}" if options else address

    def run(self, sql: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """What a person does with psql."""
        connection = self._sessions.get(database)
        if connection is None or connection.closed:
            connection = self._sessions[database] = psycopg.connect(
                self.url(database), autocommit=True, application_name="by hand"
            )
        cursor = connection.execute(sql)
        return cursor.fetchall() if cursor.description else []

    def start(self) -> None:
        self._control("start", "-l", self.folder / "log")

    def stop(self) -> None:
        self._hang_up()
        self._control("stop", "-m", "immediate")

    def restart(self) -> None:
        """As after a power cut: nothing is finished or said goodbye to."""
        self._hang_up()
        self._control("restart", "-m", "immediate", "-l", self.folder / "log")

    def close(self) -> None:
        self._hang_up()
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        self._reaper.wait(timeout=60)

    def _hang_up(self) -> None:
        for connection in self._sessions.values():
            connection.close()
        self._sessions.clear()

    def _create(self) -> None:
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        if os.geteuid() == 0:
            shutil.chown(secret, "postgres", "postgres")
        options = ("-A", "scram-sha-256", "-E", "UTF8", "--locale", "C.UTF-8", "--no-sync")
        self._run("initdb", "-D", self._data, "-U", USER, f"--pwfile={secret}", *options)
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self.folder,
            "fsync": "on",
            "shared_buffers": "64MB",
        }
        with (self._data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())

    def _control(self, verb: str, *options: object) -> None:
        self._run("pg_ctl", verb, "-w", "-s", "-D", self._data, *options)

    def _as_owner(self, program: str, *arguments: object) -> list[str]:
        """PostgreSQL refuses to run as root."""
        command = [str(self._programs / program), *map(str, arguments)]
        return ["runuser", "-u", "postgres", "--", *command] if os.geteuid() == 0 else command

    def _run(self, program: str, *arguments: object) -> None:
        # A server that pg_ctl starts keeps the streams it was given: a pipe would never end.
        with tempfile.TemporaryFile() as said:
            done = subprocess.run(
                self._as_owner(program, *arguments),
                stdout=said,
                stderr=said,
                cwd="/",
                check=False,
                timeout=60,
            )
            said.seek(0)
            assert done.returncode == 0, f"{program} failed: {said.read().decode()}"


def _postgresql_programs() -> Path:
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]), reverse=True
    )
    on_path = shutil.which("initdb")
    if not found and on_path is None:
        raise Missing(
            "PostgreSQL is not installed: `make setup` installs it on Debian as root; "
            "otherwise install the package postgresql."
        )
    if os.geteuid() == 0:
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            raise Missing("PostgreSQL does not run as root, and there is no user postgres.") from None
    return (found[0] if found else Path(str(on_path)).resolve()).parent
