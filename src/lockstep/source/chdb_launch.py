"""Find the server of a chDB data folder, or start it.

A chDB data folder belongs to one process. Whoever needs it first starts the server of `chdb_server`,
detached; everybody else finds it through a card in the folder `.lockstep-server` beside the data:

    card.json     where the server listens, and the secret it asks for (mode 0600)
    server.lock   held by the server for all its life: the kernel frees it, however the server ends
    start.lock    held by who starts a server, so that not all who miss it start one

A card counts while the process that it names answers with its secret. A dead server, a reused process id and
a copied folder are told apart without guessing. Whoever finds the server waits for no lock: a caller that is
stopped or hangs keeps nobody else out. Of two servers that start, the one that gets `server.lock` stays.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import http.client
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lockstep.errors import Invalid, Retryable
from lockstep.runtime import SYSTEM_CLOCK, Clock
from lockstep.source.clickhouse_address import Endpoint

HOST: Final = "127.0.0.1"
USER: Final = "default"
IDENTITY_PATH: Final = "/lockstep-server"
IDLE_VARIABLE: Final = "LOCKSTEP_CHDB_IDLE_S"
IDLE_S: Final = 60.0
START_TIMEOUT_S: Final = 60.0
_PING_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.02
_STARTER_PATIENCE_S: Final = 5.0
"""Who holds `start.lock` for longer, while there is no server, may be stopped: others start one then."""
_ROOM: Final = ".lockstep-server"
# chDB takes its own marks away when it closes a folder without tables; ours stays.
_MARKS_OF_CHDB: Final = ("metadata", "store", "status", _ROOM)


@dataclass(frozen=True)
class Card:
    """What a running server tells those who look for it."""

    pid: int
    port: int
    secret: str = field(repr=False)
    started_at: float
    folder: tuple[int, int]
    """Device and inode of the data folder: a card that was copied with its folder is not valid there."""

    def to_json(self) -> dict[str, Any]:
        return {
            "pid": self.pid,
            "port": self.port,
            "secret": self.secret,
            "started_at": self.started_at,
            "folder": list(self.folder),
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Card:
        device, inode = raw["folder"]
        return cls(
            int(raw["pid"]),
            int(raw["port"]),
            str(raw["secret"]),
            float(raw["started_at"]),
            (int(device), int(inode)),
        )


class Room:
    """The folder `.lockstep-server` inside a data folder: two locks, a card and the logs."""

    def __init__(self, data_folder: Path) -> None:
        self.data_folder = data_folder
        self.path = data_folder / _ROOM
        self.card_path = self.path / "card.json"
        self.log_path = self.path / "server.log"
        self.stderr_path = self.path / "stderr.log"

    def make(self) -> None:
        """Raises: Invalid if the data folder cannot be written."""
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise Invalid(
                f"cannot serve the chDB data folder {self.data_folder}: {error.strerror}",
                hint="its server needs to write there: check the owner, the permissions and the disk",
            ) from error

    def identity(self) -> tuple[int, int]:
        status = self.data_folder.stat()
        return status.st_dev, status.st_ino

    def try_lock(self, name: str) -> int | None:
        """A file descriptor that holds the lock until it is closed, or None if somebody else has it."""
        descriptor = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def lock_by(self, name: str, deadline: float, clock: Clock) -> int | None:
        """As `try_lock`, but wait for the lock until `deadline`."""
        while (descriptor := self.try_lock(name)) is None:
            if clock.now() >= deadline:
                return None
            clock.sleep(_POLL_S)
        return descriptor

    def server_lives(self) -> bool:
        descriptor = self.try_lock("server.lock")
        if descriptor is None:
            return True
        os.close(descriptor)
        return False

    def read_card(self) -> Card | None:
        """The card, or None if there is none that was written for this folder."""
        try:
            card = Card.from_json(json.loads(self.card_path.read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return card if card.folder == self.identity() else None

    def write_card(self, card: Card) -> None:
        """Atomic: a reader sees the old card, none, or all of the new one."""
        draft = self.path / f"card.{card.pid}.draft"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(card.to_json(), file)
        draft.replace(self.card_path)

    def remove_card(self, pid: int) -> None:
        """Take the card away if it is the one of `pid`; another server's card stays."""
        card = self.read_card()
        if card is not None and card.pid == pid:
            self.card_path.unlink(missing_ok=True)


def connect(
    path: Path,
    *,
    create: bool = False,
    idle_s: float | None = None,
    timeout_s: float = START_TIMEOUT_S,
    clock: Clock = SYSTEM_CLOCK,
) -> Endpoint:
    """The running server of a data folder; started if there is none.

    The server does not depend on this process: it ends by itself when nobody has needed it for `idle_s`
    seconds (`LOCKSTEP_CHDB_IDLE_S`, else 60). A client that stayed away for longer calls this again.
    Raises: Invalid if there is no data folder and `create` is not set; Retryable if another program has
    the folder open, or the server does not answer in `timeout_s`.
    """
    room = Room(_data_folder(path, create=create))
    room.make()
    deadline = clock.now() + timeout_s
    patient_until = clock.now() + _STARTER_PATIENCE_S
    while True:
        card = room.read_card()
        if card is not None and answers(card):
            return Endpoint(HOST, card.port, USER, card.secret)
        if not room.server_lives():
            with _turn_to_start(room) as ours:
                if ours or clock.now() >= patient_until:
                    _start(room, idle_s, deadline, clock)
                    continue
        if clock.now() >= deadline:
            who = "" if card is None else f" (process {card.pid})"
            raise Retryable(
                f"the server of the chDB data folder {room.data_folder}{who} does not answer",
                hint=f"see {room.log_path}; if it hangs, end the process: the next command starts a new one",
            )
        clock.sleep(_POLL_S)


def _data_folder(path: Path, *, create: bool) -> Path:
    """Raises: Invalid if `path` is not a chDB data folder and may not become one."""
    folder = Path(path).expanduser().resolve()
    if "?" in str(folder):
        raise Invalid(f'cannot open the chDB data folder {folder}: chDB takes what follows "?" for options')
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    if names.intersection(_MARKS_OF_CHDB):
        return folder
    if not create or (folder.exists() and not folder.is_dir()):
        raise Invalid(
            f"no chDB data folder at {folder}",
            hint="give the folder that was passed to chDB as its path; the database and the table follow it",
        )
    if names:
        raise Invalid(
            f"cannot create a chDB data folder at {folder}: it holds other files",
            hint="name an empty folder, or one that does not exist",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Invalid(f"cannot create a chDB data folder at {folder}: {error.strerror}") from error
    return folder


@contextlib.contextmanager
def _turn_to_start(room: Room) -> Iterator[bool]:
    """Whether nobody else starts a server now."""
    lock = room.try_lock("start.lock")
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def answers(card: Card) -> bool:
    """Whether the process of this card, and no other program, answers at its port."""
    login = base64.b64encode(f"{USER}:{card.secret}".encode()).decode()
    connection = http.client.HTTPConnection(HOST, card.port, timeout=_PING_TIMEOUT_S)
    try:
        connection.request("GET", IDENTITY_PATH, headers={"Authorization": f"Basic {login}"})
        response = connection.getresponse()
        body = response.read(4096)
        return response.status == 200 and bool(json.loads(body).get("pid") == card.pid)
    except (OSError, http.client.HTTPException, ValueError, AttributeError):
        return False
    finally:
        connection.close()


def _start(room: Room, idle_s: float | None, deadline: float, clock: Clock) -> None:
    """Start a server and wait until it is ready, or another one has the folder.

    Raises: Retryable or Invalid, as the server says why it cannot serve.
    """
    listening, speaking = os.pipe()
    try:
        try:
            _spawn(room, idle_s, speaking)
        finally:
            os.close(speaking)
        word = _hear(listening, deadline, clock)
    finally:
        os.close(listening)
    if word.get("ready") or word.get("busy"):
        return
    message = word.get("error") or f"the server of the chDB data folder {room.data_folder} did not start"
    raise (Invalid if word.get("class") == "Invalid" else Retryable)(
        str(message), hint=str(word.get("hint") or f"see {room.log_path} and {room.stderr_path}")
    )


def _spawn(room: Room, idle_s: float | None, speaking: int) -> None:
    """Run the server in a session of its own; it forks once more, so nobody has to wait for its end."""
    idle = os.environ.get(IDLE_VARIABLE, str(IDLE_S)) if idle_s is None else str(idle_s)
    command = [sys.executable, "-P", "-m", "lockstep.source.chdb_server", str(room.data_folder)]
    command += ["--idle-s", idle, "--ready-fd", str(speaking), "--detach"]
    # The server must not depend on the caller's working folder, nor keep it busy.
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with room.stderr_path.open("ab") as errors:
        starter = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            cwd="/",
            env=environment,
            pass_fds=(speaking,),
            start_new_session=True,
            check=False,
        )
    if starter.returncode != 0:
        raise Retryable(
            f"the server of the chDB data folder {room.data_folder} did not start",
            hint=f"see {room.stderr_path}",
        )


def _hear(listening: int, deadline: float, clock: Clock) -> dict[str, Any]:
    """The server's one line; empty if it ended or the time ran out before it said anything."""
    heard = b""
    while not heard.endswith(b"\n"):
        ready, _, _ = select.select([listening], [], [], max(0.0, deadline - clock.now()))
        piece = os.read(listening, 4096) if ready else b""
        if not piece:
            return {}
        heard += piece
    word = json.loads(heard)
    return word if isinstance(word, dict) else {}
