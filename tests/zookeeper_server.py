"""A private ZooKeeper for tests: its own port and data folder, and it can be killed and started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

JARS: Final = Path(os.environ.get("LOCKSTEP_ZOOKEEPER_JARS", "/usr/share/java"))
_READY_S: Final = 60.0
_MISSING: Final = (
    "ZooKeeper is not installed, and the tests of the job store need it: run `make setup` as root on "
    "Debian, or install the package zookeeper"
)


class ZooKeeperServer:
    """One server of its own. `start` waits until it answers; `kill` is SIGKILL; the data folder stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        if not (JARS / "zookeeper.jar").exists():
            raise RuntimeError(_MISSING)
        (folder / "data").mkdir(parents=True, exist_ok=True)
        (folder / "zoo.cfg").write_text(
            f"dataDir={folder / 'data'}\n"
            f"clientPort={self.port}\nclientPortAddress=127.0.0.1\n"
            "tickTime=1000\nmaxClientCnxns=0\nadmin.enableServer=false\n"
            "4lw.commands.whitelist=ruok,mntr\n"
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, chroot: str = "lockstep") -> str:
        return f"zookeeper://{self.address}/{chroot}"

    def start(self) -> None:
        assert self._process is None, "it runs already"
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *("java", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
                    *("-cp", str(JARS / "zookeeper.jar")),
                    "org.apache.zookeeper.server.ZooKeeperServerMain",
                    str(self.folder / "zoo.cfg"),
                ],
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )
        deadline = time.monotonic() + _READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                tail = (self.folder / "server.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"ZooKeeper did not start:\n{tail}")
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL: what was answered is on disk, what was not may or may not be."""
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

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"ruok")
                return connection.recv(4) == b"imok"
        except OSError:
            return False


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
