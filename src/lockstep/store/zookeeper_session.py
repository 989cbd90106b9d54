"""One connection to ZooKeeper: reads, transactions, the server's time, and what to do when it is away.

All that knows kazoo is in this room.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from lockstep.errors import Invalid, Retryable
from lockstep.runtime import SYSTEM_CLOCK, Clock, SystemClock

try:
    from kazoo import exceptions as kazoo_errors
    from kazoo.client import KazooClient, KazooState
    from kazoo.handlers.threading import KazooTimeoutError
    from kazoo.security import make_digest_acl
except ImportError as error:
    raise Invalid(
        "a job store on ZooKeeper needs kazoo, which is not installed",
        hint="pip install 'lockstep[zookeeper]'",
    ) from error

SESSION_S: Final = 6.0
"""Nothing of ours ends with a session; a short one means that a dead connection is noticed soon (in 4 s)."""
REPLY_S: Final = 8.0
OUTAGE_S: Final = 15.0
"""How long a verb waits for the connection to come back: more than one attempt to connect (6 s) takes."""
OPEN_S: Final = 8.0
"""How long to wait for the first connection: somebody at a terminal wants to know."""
REMEASURE_S: Final = 5.0
"""The server's time is measured anew when the last measurement is older."""
WINDOW: Final = 256
"""Requests on the wire at once."""
MOST_BYTES: Final = 700_000
"""The server refuses requests of 1 MB (jute.maxbuffer); paths and access lists come on top of the data."""

_ADDRESS: Final = re.compile(
    r"zookeeper://(?:(?P<user>[^@]*)@)?(?P<hosts>[^/?#]+)(?P<root>/[^?#]*)?", re.DOTALL
)
_HOST: Final = re.compile(r"([^\s:,@]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?")
_LOST: Final = (
    kazoo_errors.ConnectionLoss,
    kazoo_errors.OperationTimeoutError,
    kazoo_errors.SessionExpiredError,
    kazoo_errors.SessionMovedError,
    kazoo_errors.ConnectionClosedError,
    KazooTimeoutError,
)
_MOVED: Final = (
    kazoo_errors.BadVersionError,
    kazoo_errors.NodeExistsError,
    kazoo_errors.NoNodeError,
    kazoo_errors.NotEmptyError,
)
_DENIED: Final = (
    kazoo_errors.NoAuthError,
    kazoo_errors.AuthFailedError,
    kazoo_errors.InvalidACLError,
    kazoo_errors.NotReadOnlyCallError,
)

T = TypeVar("T")


class Moved(Exception):
    """A node is no longer as it was read: read again, decide again."""

    def __init__(self, reason: str, *, missing: bool = False) -> None:
        super().__init__(reason)
        self.missing = missing
        """True if a node, or the folder for a new one, was not there."""


class Lost(Exception):
    """No reply: what was sent may have been done or not."""


@dataclass(frozen=True)
class Node:
    data: bytes
    version: int
    born: int
    """The transaction that created it."""
    created_at: float
    """By the server's clock."""


@dataclass(frozen=True)
class Address:
    hosts: str
    root: str
    credentials: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"zookeeper://{self.hosts}{self.root}"

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises: Invalid, without the secrets of the url."""
        found = _ADDRESS.fullmatch(url)
        root = "" if found is None else (found["root"] or "").rstrip("/")
        if found is None or not all(map(_HOST.fullmatch, found["hosts"].split(","))) or "//" in root:
            raise Invalid(
                "the address of the job store is not one of ZooKeeper",
                hint='for example "zookeeper://host1:2181,host2:2181/lockstep"',
            )
        user = found["user"]
        return cls(found["hosts"], root or "/lockstep", None if user is None else unquote(user))


class Writes:
    """The changes of one transaction, which all happen or none of them."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, str, bytes, int]] = []
        self.size_bytes = 0

    def create(self, path: str, data: bytes = b"") -> None:
        self._add("create", path, data, -1)

    def set(self, path: str, data: bytes, version: int) -> None:
        self._add("set", path, data, version)

    def delete(self, path: str, version: int = -1) -> None:
        self._add("delete", path, b"", version)

    def check(self, path: str, version: int) -> None:
        self._add("check", path, b"", version)

    def _add(self, verb: str, path: str, data: bytes, version: int) -> None:
        self.steps.append((verb, path, data, version))
        self.size_bytes += len(data) + len(path) + 100


class Session:
    """Safe to use from many threads.

    Raises: Invalid if the address is wrong or access is denied; Retryable if nobody answers.
    """

    def __init__(self, url: str, clock: Clock) -> None:
        self.address = Address.parse(url)
        self._clock = clock
        self._server_rules = isinstance(clock, SystemClock)
        self._offset_s = 0.0
        self._measured_at: float | None = None
        self._up = threading.Event()
        self._closed = False
        self._client = self._connect()

    def _connect(self) -> Any:
        secret = self.address.credentials
        settings: dict[str, Any] = {}
        if secret is not None:
            user, _, password = secret.partition(":")
            settings["auth_data"] = [("digest", secret)]
            settings["default_acl"] = [make_digest_acl(user, password, all=True)]
        quiet = logging.getLogger("lockstep.store.zookeeper.kazoo")
        quiet.setLevel(logging.CRITICAL)
        client = KazooClient(
            self.address.hosts,
            timeout=SESSION_S,
            connection_retry={"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 1.0},
            logger=quiet,
            **settings,
        )
        client.add_listener(self._note_state)
        try:
            client.start(timeout=OPEN_S)
        except KazooTimeoutError as error:
            client.stop()
            client.close()
            raise self.away() from error
        except _DENIED as error:
            client.stop()
            client.close()
            raise self._denied(error) from error
        return client

    def _note_state(self, state: str) -> None:
        if state == KazooState.CONNECTED:
            self._up.set()
        else:
            self._up.clear()

    def close(self) -> None:
        self._closed = True
        self._client.stop()
        self._client.close()

    # Reading

    def get_many(self, paths: Sequence[str], *, newest: bool = True) -> list[Node | None]:
        """The nodes at `paths`, None where there is none. `newest`: what anybody has written before."""
        return self._patiently(lambda: list(self._pipelined("get_async", paths, newest, _as_node)))

    def get(self, path: str) -> Node | None:
        return self.get_many([path])[0]

    def children(self, path: str) -> list[str]:
        return self.children_many([path])[0]

    def children_many(self, paths: Sequence[str]) -> list[list[str]]:
        """The names below `paths`, sorted; none where there is no such node."""
        found = self._patiently(
            lambda: list(self._pipelined("get_children_async", paths, True, lambda names: sorted(names)))
        )
        return [names or [] for names in found]

    def _pipelined(
        self, verb: str, paths: Sequence[str], newest: bool, convert: Callable[[Any], T]
    ) -> Iterator[T | None]:
        # A request waits for those sent before it on the same connection: no need to await the sync.
        synced = self._client.sync_async(self.address.root) if newest and paths else None
        ask = getattr(self._client, verb)
        for start in range(0, len(paths), WINDOW):
            sent = [ask(path) for path in paths[start : start + WINDOW]]
            if synced is not None:
                self._settled(synced, None)
                synced = None
            for reply in sent:
                yield self._settled(reply, convert)

    # Writing

    def commit(self, writes: Writes) -> list[int]:
        """Do all of `writes` or none; answer the versions that the nodes have now.

        Raises: Moved if a node is not in the version told; Lost if no reply came.
        """
        self._await_connection()
        request = self._client.transaction()
        for verb, path, data, version in writes.steps:
            if verb == "create":
                request.create(path, data)
            elif verb == "set":
                request.set_data(path, data, version)
            elif verb == "check":
                request.check(path, version)
            else:
                request.delete(path, version)
        sent_at = self._clock.now()
        results = self._settled(request.commit_async(), None)
        self._refuse_failed(results)
        stats = [result for result in results if hasattr(result, "mtime")]
        if stats:
            self._measured(sent_at, stats[0].mtime / 1000)
        return [result.version if hasattr(result, "version") else 0 for result in results]

    def _refuse_failed(self, results: Sequence[Any]) -> None:
        # Those after and before the one that failed say only that the transaction was rolled back.
        for result in results:
            if isinstance(result, _MOVED):
                raise Moved(repr(result), missing=isinstance(result, kazoo_errors.NoNodeError))
            if isinstance(result, _DENIED):
                raise self._denied(result)
        for result in results:
            if isinstance(result, Exception):
                raise Moved(repr(result))

    def delete_tree(self, path: str) -> None:
        """Delete `path` and all below it, deepest first; not atomic. A node that is gone is no error."""
        below = [path]
        level = [path]
        while level:
            level = [
                f"{parent}/{name}"
                for parent, names in zip(level, self.children_many(level), strict=True)
                for name in names
            ]
            below += level
        for start in range(len(below), 0, -WINDOW):
            some = below[max(0, start - WINDOW) : start]
            self._patiently(partial(self._delete_each, some))

    def _delete_each(self, paths: Sequence[str]) -> None:
        for reply in [self._client.delete_async(path) for path in reversed(paths)]:
            try:
                self._settled(reply, None)
            except Moved:
                continue  # somebody put a node below it: the next cleaning finds it

    # Time

    def now(self) -> float:
        """The store's time: that of the server, or the clock that a test has given in its place."""
        if not self._server_rules:
            return self._clock.now()
        measured_at = self._measured_at
        if measured_at is None or not 0 <= self._clock.now() - measured_at <= REMEASURE_S:
            self._patiently(self._measure)
        return self._clock.now() + self._offset_s

    def server_now(self) -> float:
        """The server's own time, to compare with the times that it gave to nodes."""
        return self._patiently(self._measure)

    def _measure(self) -> float:
        sent_at = self._clock.now()
        stat = self._settled(self._client.set_async(f"{self.address.root}/clock", b""), lambda found: found)
        if stat is None:
            # Deleted by hand; anybody may make it again.
            self._settled(self._client.create_async(f"{self.address.root}/clock", makepath=True), None)
            return self._measure()
        self._measured(sent_at, stat.mtime / 1000)
        return float(stat.mtime / 1000)

    def _measured(self, sent_at: float, server_at: float) -> None:
        received_at = self._clock.now()
        # A reply that was long on its way says little about the time it was sent.
        if 0 <= received_at - sent_at < 1.0 or self._measured_at is None:
            self._offset_s = server_at - (sent_at + received_at) / 2
            self._measured_at = received_at

    # Outages

    def _patiently(self, action: Callable[[], T]) -> T:
        """Do `action`, which can be done twice, again after the connection was lost.

        Raises: Retryable if it does not come back in time.
        """
        deadline = SYSTEM_CLOCK.now() + OUTAGE_S
        while True:
            self._await_connection()
            try:
                return action()
            except Lost as error:
                if SYSTEM_CLOCK.now() > deadline:
                    raise self.away() from error

    def _await_connection(self) -> None:
        if self._closed:
            raise Invalid(f"the job store {self.address} was closed")
        if not self._up.wait(OUTAGE_S):
            raise self.away()

    def _settled(self, reply: Any, convert: Callable[[Any], T] | None) -> Any:
        """What came back; None for a node that is not there. Raises: Lost, Moved, Invalid."""
        try:
            found = reply.get(timeout=REPLY_S)
        except _LOST as error:
            raise Lost(repr(error)) from error
        except kazoo_errors.NoNodeError:
            return None
        except _MOVED as error:
            raise Moved(repr(error)) from error
        except _DENIED as error:
            raise self._denied(error) from error
        except kazoo_errors.ZookeeperError as error:
            raise Retryable(f"the job store {self.address} failed: {error!r}") from error
        return found if convert is None else convert(found)

    def away(self) -> Retryable:
        return Retryable(
            f"the job store {self.address} does not answer",
            hint="check that ZooKeeper runs and can be reached; what was recorded is kept",
        )

    def _denied(self, error: Exception) -> Invalid:
        return Invalid(
            f"the job store {self.address} refused access ({type(error).__name__})",
            hint="name user and password: zookeeper://user:${PASSWORD}@host:2181/lockstep",
        )


def _as_node(found: Any) -> Node:
    data, stat = found
    return Node(data or b"", stat.version, stat.czxid, stat.ctime / 1000)
