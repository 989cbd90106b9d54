"""One SQL database: its connections, transactions, clock and schema version.

All that differs between databases is in this room.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, Table, create_engine, event, inspect, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry

from lockstep.errors import Corrupt, Incompatible, Invalid, LockstepError, Retryable
from lockstep.runtime import Clock
from lockstep.store import sql_schema

BUSY_TIMEOUT_S: Final = 30.0
_BEGIN: Final = "lockstep_begin"


class Database:
    """Opens the database at `url`, makes or upgrades its schema, and hands out transactions.

    Safe to use from many threads, and from many processes on one file.
    Raises: Invalid if it cannot be opened, Incompatible if a newer version wrote it.
    """

    def __init__(self, url: str, clock: Clock) -> None:
        self.url = _parse(url)
        self._clock = clock
        # SQLite has one writer. Threads of this process queue here, in order, rather than in its busy
        # handler, which sleeps and polls and lets some of them starve.
        self._writer = threading.Lock()
        self._engine = _sqlite_engine(self.url)
        self._write_engine = self._engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
        try:
            self._open()
        except BaseException:
            self._engine.dispose()
            raise

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One transaction that sees one state of the store."""
        with _told(self.url), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction that is durable when the block ends, and never happened if it raises.

        Raises: Retryable if the database stays locked.
        """
        if not self._writer.acquire(timeout=BUSY_TIMEOUT_S):
            raise _locked(self.url)
        try:
            with _told(self.url), self._write_engine.begin() as connection:
                yield connection
        finally:
            self._writer.release()

    def now(self, connection: Connection) -> float:
        """The store's time: the database's own where it has a clock, else that of this machine."""
        return self._clock.now()

    def close(self) -> None:
        self._engine.dispose()

    def _open(self) -> None:
        with self.read() as connection:
            _use_wal(connection)
        with self.read() as connection:
            if _version(connection) == sql_schema.HEAD:
                return
        with self.write() as connection:
            # Looked at again under the lock: another process may have made the schema meanwhile.
            found = _version(connection)
            if found == sql_schema.HEAD:
                return
            if found is not None and found > sql_schema.HEAD:
                raise Incompatible(
                    f"the job store {_name(self.url)} has schema {found}; this version of Lockstep "
                    f"knows {sql_schema.HEAD}",
                    hint="upgrade Lockstep on this machine; the store was left as it is",
                )
            _migrate(connection)


def insert_if_absent(connection: Connection, table: Table, row: Mapping[str, Any]) -> None:
    """Insert `row` unless its key is there; in a database with row locks, wait for whoever inserts it too."""
    if connection.dialect.name == "postgresql":
        connection.execute(postgresql.insert(table).values(row).on_conflict_do_nothing())
    else:
        connection.execute(sqlite.insert(table).values(row).on_conflict_do_nothing())


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise Invalid(
            "the address of the job store is not a URL", hint='for example "sqlite:///.lockstep/jobs.db"'
        ) from error
    if parsed.get_backend_name() != "sqlite":
        raise Invalid(f'no job store for "{parsed.drivername}://"', hint="known: sqlite:///PATH")
    if not parsed.database or parsed.database == ":memory:":
        raise Invalid(
            "the job store needs a file: jobs must outlive this process",
            hint='for example "sqlite:///.lockstep/jobs.db"',
        )
    return parsed


def _sqlite_engine(url: URL) -> Engine:
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
        connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))

    return engine


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


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table(sql_schema.version.name):
        return None
    return connection.execute(select(sql_schema.version.c.version_num)).scalar()


def _migrate(connection: Connection) -> None:
    """Bring the schema to HEAD, in the transaction of `connection`."""
    # Imported here: Alembic costs time that a command on an up-to-date store does not have.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


@contextmanager
def _told(url: URL) -> Iterator[None]:
    """Turn what the driver raises into errors of ours, which say what to do."""
    try:
        yield
    except DBAPIError as error:
        raise _translated(url, error) from error
    except UnicodeEncodeError as error:
        raise Invalid(f"text that is not valid Unicode cannot be stored: {error.object!r}") from error


def _translated(url: URL, error: DBAPIError) -> LockstepError:
    reason = str(error.orig)
    if "locked" in reason or "busy" in reason:
        return _locked(url)
    if "unable to open" in reason or "not a database" in reason:
        return Invalid(
            f"cannot open the job store {_name(url)}: {reason}",
            hint="check [store] url in lockstep.toml, and the rights on the folder",
        )
    if "readonly" in reason:
        return Invalid(
            f"the job store {_name(url)} cannot be written to",
            hint="check the rights on the file and its folder",
        )
    if "malformed" in reason:
        return Corrupt(
            f"the job store {_name(url)} is damaged: {reason}",
            hint="restore it from a copy, or start a new one",
        )
    return Retryable(f"the job store {_name(url)} failed: {reason}", hint="check the disk it is on")


def _locked(url: URL) -> Retryable:
    return Retryable(
        f"the job store {_name(url)} has been locked for {BUSY_TIMEOUT_S:.0f} s",
        hint="another process holds a transaction open on it; end that one, then try again",
    )


def _name(url: URL) -> str:
    return (
        str(url.database) if url.get_backend_name() == "sqlite" else url.render_as_string(hide_password=True)
    )
