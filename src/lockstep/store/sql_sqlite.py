"""SQLite in WAL mode: one file, for the processes of one machine."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from typing import cast as cast_type

from sqlalchemy import Connection, Engine, Row, create_engine, event
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.sql.selectable import SelectBase

from lockstep.errors import Corrupt, Invalid, LockstepError, Retryable
from lockstep.runtime import Clock
from lockstep.store.sql_database import Database

BUSY_TIMEOUT_S: Final = 30.0
_BEGIN: Final = "lockstep_begin"


class SqliteDatabase(Database):
    """Leases are judged by the clock of this machine, which all users of the file share."""

    def __init__(self, url: URL, clock: Clock) -> None:
        if not url.database or url.database == ":memory:":
            raise Invalid(
                "the job store needs a file: jobs must outlive this process",
                hint='for example "sqlite:///.lockstep/jobs.db"',
            )
        self._clock = clock
        # SQLite has one writer. Threads of this process queue here, in order, rather than in its busy
        # handler, which sleeps and polls and lets some of them starve.
        self._writer = threading.Lock()
        engine = _engine(url)
        self._write_engine = engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
        super().__init__(url, engine, sqlite.dialect(paramstyle="named"))

    @property
    def name(self) -> str:
        return str(self.url.database)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self._told(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        if not self._writer.acquire(timeout=BUSY_TIMEOUT_S):
            raise self._locked()
        try:
            with self._told(), self._write_engine.begin() as connection:
                yield connection
        finally:
            self._writer.release()

    def now(self, connection: Connection) -> float:
        return self._clock.now()

    def note_time(self, connection: Connection, now: float) -> None:
        """Nothing to do: the clock is asked whenever it is needed."""

    def rows(self, connection: Connection, query: SelectBase, about: Mapping[str, Any]) -> Sequence[Row[Any]]:
        text, own = self._worded(query)
        with _driven():
            return self._shaped(text, _driver(connection).execute(text, {**own, **about}))

    def change(
        self, connection: Connection, statement: UpdateBase, row: Mapping[str, Any], refused: LockstepError
    ) -> None:
        text, own = self._worded(statement)
        with _driven():
            changed = _driver(connection).execute(text, {**own, **row}).rowcount
        if changed != 1:
            raise refused

    def _open(self) -> None:
        with self.read() as connection:
            _use_wal(connection)
        super()._open()

    def _lock_schema(self, connection: Connection) -> None:
        """Nothing to do: a transaction that writes has the whole file."""

    def _translated(self, error: DBAPIError) -> LockstepError:
        reason = str(error.orig)
        if "locked" in reason or "busy" in reason:
            return self._locked()
        if "unable to open" in reason or "not a database" in reason:
            return Invalid(
                f"cannot open the job store {self.name}: {reason}",
                hint="check [store] url in lockstep.toml, and the rights on the folder",
            )
        if "readonly" in reason:
            return Invalid(
                f"the job store {self.name} cannot be written to",
                hint="check the rights on the file and its folder",
            )
        if "malformed" in reason:
            return Corrupt(
                f"the job store {self.name} is damaged: {reason}",
                hint="restore it from a copy, or start a new one",
            )
        return Retryable(f"the job store {self.name} failed: {reason}", hint="check the disk it is on")

    def _locked(self) -> Retryable:
        return Retryable(
            f"the job store {self.name} has been locked for {BUSY_TIMEOUT_S:.0f} s",
            hint="another process holds a transaction open on it; end that one, then try again",
        )


def _engine(url: URL) -> Engine:
    path = Path(url.database or "")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Invalid(
            f"cannot make the folder of the job store {path}: {error.strerror}",
            hint="set [store] url in lockstep.toml to a place that can be written to",
        ) from error
    engine = create_engine(
        url,
        connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
        pool_size=8,
        max_overflow=-1,
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _entry: ConnectionPoolEntry) -> None:
        # The driver must not begin transactions by itself: we say when, and whether to take the write lock.
        connection.isolation_level = None
        # FULL: an answered checkpoint survives a power cut. With NORMAL an epoch could be handed out twice,
        # and two attempts would write files of the same name. It costs 0.2 ms per verb.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA cache_size = -16000")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        with _driven():
            _driver(connection).execute(connection.get_execution_options().get(_BEGIN, "BEGIN"))

    return engine


def _driver(connection: Connection) -> sqlite3.Connection:
    return cast_type("sqlite3.Connection", connection.connection.driver_connection)


@contextmanager
def _driven() -> Iterator[None]:
    """Where the driver is spoken to directly, its errors look as if they came through SQLAlchemy."""
    try:
        yield
    except sqlite3.Error as error:
        raise DBAPIError("", None, error) from error


def _use_wal(connection: Connection) -> None:
    """Switch the file to write-ahead logging: readers and the writer do not wait for each other.

    The mode is kept in the file. Switching does not wait but fails while another process does the same.
    """
    if connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal":
        return
    connection.exec_driver_sql("COMMIT")
    pause = threading.Event()
    for attempts_left in range(200, -1, -1):
        try:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")
            break
        except DBAPIError as error:
            if "locked" not in str(error.orig) or attempts_left == 0:
                raise
            pause.wait(0.05)
    connection.exec_driver_sql("BEGIN")
