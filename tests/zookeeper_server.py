"""A private ZooKeeper for tests: its own port and data folder, and it can be killed and started again."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from tests.servers import Missing, Server, free_port

JARS: Final = Path(os.environ.get("LOCKSTEP_ZOOKEEPER_JARS", "/usr/share/java"))
_MISSING: Final = (
    "ZooKeeper is not installed, and the tests of the job store need it: run `make setup` as root on "
    "Debian, or install the package zookeeper"
)


class ZooKeeperServer(Server):
    """One server of its own."""

    def __init__(self, folder: Path, ensemble: str = "") -> None:
        super().__init__(folder)
        self._main = "quorum.QuorumPeerMain" if ensemble else "ZooKeeperServerMain"
        if not (JARS / "zookeeper.jar").exists():
            raise Missing(_MISSING)
        (folder / "data").mkdir(exist_ok=True)
        (folder / "zoo.cfg").write_text(
            f"dataDir={folder / 'data'}\n"
            f"clientPort={self.port}\nclientPortAddress=127.0.0.1\n"
            "tickTime=1000\nmaxClientCnxns=0\nadmin.enableServer=false\n"
            f"4lw.commands.whitelist=mntr\n{ensemble}"
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, chroot: str = "lockstep") -> str:
        return f"zookeeper://{self.address}/{chroot}"

    def _command(self) -> tuple[list[str], dict[str, str]]:
        options = ["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        main = f"org.apache.zookeeper.server.{self._main}"
        return ["java", *options, "-cp", str(JARS / "zookeeper.jar"), main, str(self.folder / "zoo.cfg")], {}

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                # It says "imok" to "ruok" before it takes sessions; to "mntr" only afterwards.
                connection.sendall(b"mntr")
                return b"zk_server_state" in b"".join(iter(partial(connection.recv, 65536), b""))
        except OSError:
            return False


def start_ensemble(folder: Path, count: int = 3) -> list[ZooKeeperServer]:
    """Servers that elect a leader among themselves. `initLimit` and `syncLimit` are in ticks of a second."""
    peers = "".join(
        f"server.{number}=127.0.0.1:{free_port()}:{free_port()}\n" for number in range(1, count + 1)
    )
    servers = []
    for number in range(1, count + 1):
        server = ZooKeeperServer(folder / str(number), f"initLimit=10\nsyncLimit=3\n{peers}")
        (folder / str(number) / "data" / "myid").write_text(str(number))
        servers.append(server)
    for server in servers:
        server.launch()
    for server in servers:
        server.await_ready()
    return servers


class Cable:
    """Stands between clients and a server. It can be cut, or lose the reply to the next transaction."""

    MULTI: Final = 14

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.lose_replies = 0
        """So many transactions are done by the server, and their replies never arrive."""
        self.lost = 0
        self.stuck = threading.Event()
        """While it is set nothing passes, and no connection breaks."""
        self._plugged = True
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, chroot: str) -> str:
        return f"zookeeper://127.0.0.1:{self.port}/{chroot}"

    def cut(self) -> None:
        """Break all connections, and refuse new ones until `mend`."""
        self._plugged = False
        self._break()

    def mend(self) -> None:
        self._plugged = True

    def close(self) -> None:
        self._listener.close()
        self._break()

    def _break(self) -> None:
        while self._open:
            with suppress(OSError):
                self._open.pop().shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            if not self._plugged:
                client.close()
                server.close()
                continue
            self._open += [client, server]
            doomed = threading.Event()
            threading.Thread(target=self._requests, args=(client, server, doomed), daemon=True).start()
            threading.Thread(target=self._replies, args=(server, client, doomed), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, doomed: threading.Event) -> None:
        first = True
        with suppress(OSError, EOFError), client, server:
            while True:
                packet = _packet(client)
                self._wait_while_stuck()
                code = 0 if first else int.from_bytes(packet[8:12], "big")
                first = False
                if code == self.MULTI and self.lose_replies > 0:
                    self.lose_replies -= 1
                    self.lost += 1
                    doomed.set()
                server.sendall(packet)

    def _replies(self, server: socket.socket, client: socket.socket, doomed: threading.Event) -> None:
        with suppress(OSError, EOFError), client, server:
            while True:
                packet = _packet(server)
                self._wait_while_stuck()
                if doomed.is_set():
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(packet)

    def _wait_while_stuck(self) -> None:
        while self.stuck.is_set():
            time.sleep(0.01)


def _packet(source: socket.socket) -> bytes:
    """One message with its length in front."""
    head = _exactly(source, 4)
    return head + _exactly(source, int.from_bytes(head, "big"))


def _exactly(source: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        some = source.recv(size - len(found))
        if not some:
            raise EOFError
        found += some
    return found
