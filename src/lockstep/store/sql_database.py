"""One SQL database: its connections, transactions, clock and schema version.

What differs between databases is in `sql_sqlite` and `sql_postgresql`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar, cast

from sqlalchemy import Connection, Engine, Row, Select, Table, inspect, select
from sqlalchemy.engine import URL, Dialect, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.sql.selectable import SelectBase

from lockstep.errors import Incompatible, Invalid, LockstepError, Retryable
from lockstep.runtime import Clock, backoff_s
from lockstep.store import sql_schema

KNOWN: Final = "known: sqlite:///PATH and postgresql://USER:PASSWORD@HOST/DATABASE"
TIME: Final = "store_time"
"""The column in which `with_time` hands the database's time over."""

_UNDONE_ATTEMPTS: Final = 6
_UNDONE_FIRST_S: Final = 0.02
_UNDONE_MOST_S: Final = 0.5

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Undone(Retryable):
    """The database took a transaction back: surely nothing of it happened."""


def verb(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Run a verb of the store anew, a few times, when its transaction was undone.

    A connection that is lost while a commit is under way is not such a case: that one may have landed, and
    it is for the caller to send the verb again.
    """

    @wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        for attempt in range(1, _UNDONE_ATTEMPTS):
            try:
                return method(*args, **kwargs)
            except Undone:
                threading.Event().wait(backoff_s(attempt, _UNDONE_FIRST_S, _UNDONE_MOST_S))
        return method(*args, **kwargs)

    return run


class Words(NamedTuple):
    """A statement as the driver takes it, and the parameters that it brings along."""

    text: str
    own: Mapping[str, Any]


class Offer(NamedTuple):
    """A job with free tasks, who works on it, and how many of its tasks wait for their next attempt."""

    job: Row[Any]
    leases: int
    owners: frozenset[str]
    retrying: int
    free: list[Row[Any]]


class Database(ABC):
    """Opens the database at `url`, makes or upgrades its schema, and hands out transactions.

    Safe to use from many threads, and from many processes.
    Raises: Invalid if it cannot be opened, Incompatible if a newer version wrote it, Retryable if it does
    not answer.
    """

    def __init__(self, url: URL, engine: Engine, wording: Dialect) -> None:
        self.url = url
        self._engine = engine
        self._wording = wording
        self._words: dict[SelectBase | UpdateBase, Words] = {}
        self._shapes: dict[str, Callable[[Iterable[Any]], Row[Any]]] = {}
        try:
            self._open()
        except BaseException:
            self._engine.dispose()
            raise

    @property
    @abstractmethod
    def name(self) -> str:
        """The store as it may be printed."""

    @abstractmethod
    def read(self) -> AbstractContextManager[Connection]:
        """One transaction that sees one state of the store."""

    @abstractmethod
    def write(self) -> AbstractContextManager[Connection]:
        """One transaction that is durable when the block ends, and never happened if it raises.

        Raises: Retryable if the database stays locked or is away, Undone if it took the transaction back.
        A connection that is lost while the block ends leaves it open what happened; that is Retryable too.
        """

    @abstractmethod
    def now(self, connection: Connection) -> float:
        """The store's time: the database's own where it has a clock, else that of this machine."""

    def with_time(self, query: Select[Any]) -> Select[Any]:
        """`query`, with the store's time in a column beside it where that saves a question."""
        return query

    @abstractmethod
    def note_time(self, connection: Connection, now: float) -> None:
        """Take what came with a row of `with_time` for the time of this transaction."""

    def decided(self, decide: Callable[[Connection], _T]) -> _T:
        """What `decide` answers, in one transaction of `write`: for the verbs that every task needs.

        It takes hold of one job with `lock` and changes rows with `change`, the job's own among them. It may
        be asked twice.
        """
        with self.write() as connection:
            return decide(connection)

    most_at_once: int = 0
    """How many tasks `at_once` can lease."""

    def at_once(self, decide: Callable[[Connection], Sequence[_T]]) -> list[_T]:
        """What `decide` answers, one answer for each change that it makes; without those that came too late.

        It asks for `offers`, and changes tasks of them with `change`. Nothing is changed where the database
        has no way to do that without a transaction, or if somebody is at one of the jobs.
        """
        return []

    def offers(self, connection: Connection, slots: int, wanted: Sequence[str] | None) -> list[Offer]:
        """The jobs from which a claim of so many tasks may take some, as of one instant; for `at_once`."""
        raise NotImplementedError

    @abstractmethod
    def rows(self, connection: Connection, query: SelectBase, about: Mapping[str, Any]) -> Sequence[Row[Any]]:
        """All rows of a query that is a constant of this program; no parameter of it is a list.

        It goes past SQLAlchemy, whose share of a small statement is larger than the database's. Truth comes
        as the database holds it: 0 or 1 in SQLite.
        """

    def lock(
        self, connection: Connection, locking: Select[Any], reading: Select[Any], about: Mapping[str, Any]
    ) -> tuple[Row[Any] | None, Row[Any] | None]:
        """Run `locking`, then `reading`, which sees what is there once the lock is taken; one row of each."""
        locked = self.rows(connection, locking, {"job_id": about["job_id"]})
        read = self.rows(connection, reading, about)
        return (locked[0] if locked else None, read[0] if read else None)

    @abstractmethod
    def change(
        self, connection: Connection, statement: UpdateBase, row: Mapping[str, Any], refused: LockstepError
    ) -> None:
        """Change one row, at the latest when the transaction reads again or ends.

        Raises: `refused`, then, if there was no such row; the transaction is undone.
        """

    def _worded(self, statement: SelectBase | UpdateBase) -> Words:
        """A constant statement in the driver's words; made once."""
        if (known := self._words.get(statement)) is None:
            compiled = statement.compile(dialect=self._wording)
            own = {name: value for name, value in compiled.params.items() if value is not None}
            known = self._words[statement] = Words(str(compiled), own)
        return known

    def _shaped(self, text: str, cursor: Any) -> Sequence[Row[Any]]:
        """All rows of a cursor of the driver."""
        if (shape := self._shapes.get(text)) is None:
            shape = self._shapes[text] = shape_of([column[0] for column in cursor.description])
        return [shape(row) for row in cursor.fetchall()]

    def close(self) -> None:
        self._engine.dispose()

    @abstractmethod
    def _translated(self, error: DBAPIError) -> LockstepError:
        """What the driver raised as an error of ours, which says what to do."""

    @abstractmethod
    def _lock_schema(self, connection: Connection) -> None:
        """Wait for whoever else is making or upgrading the schema now."""

    def _open(self) -> None:
        with self.read() as connection:
            if _version(connection) == sql_schema.HEAD:
                return
        with self.write() as connection:
            self._lock_schema(connection)
            # Looked at again under the lock: another process may have made the schema meanwhile.
            found = _version(connection)
            if found == sql_schema.HEAD:
                return
            if found is not None and found > sql_schema.HEAD:
                raise Incompatible(
                    f"the job store {self.name} has schema {found}; this version of Lockstep "
                    f"knows {sql_schema.HEAD}",
                    hint="upgrade Lockstep on this machine; the store was left as it is",
                )
            migrate(connection)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turn what the driver raises into errors of ours."""
        try:
            yield
        except DBAPIError as error:
            raise self._translated(error) from error
        except PoolTimeout as error:
            raise Retryable(
                f"all connections of this process to the job store {self.name} are taken",
                hint="the store answers slowly; look at its load",
            ) from error
        except UnicodeEncodeError as error:
            raise Invalid(f"text that is not valid Unicode cannot be stored: {error.object!r}") from error


def open_database(url: str, clock: Clock) -> Database:
    """Raises: as Database does."""
    # Each imported only where it is used: a driver costs time, and may not be there.
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite":
        from lockstep.store.sql_sqlite import SqliteDatabase

        return SqliteDatabase(parsed, clock)
    from lockstep.store.sql_postgresql import PostgresqlDatabase

    return PostgresqlDatabase(parsed)


def shape_of(columns: Sequence[str]) -> Callable[[Iterable[Any]], Row[Any]]:
    """Makes rows of plain tuples: columns as attributes, and `_asdict`. Of SQLAlchemy's, no more is used."""
    shape: Any = namedtuple("shape", columns)  # type: ignore[misc]
    return cast("Callable[[Iterable[Any]], Row[Any]]", shape._make)


def insert_if_absent(connection: Connection, table: Table, row: Mapping[str, Any]) -> None:
    """Insert `row` unless its key is there; in a database with row locks, wait for whoever inserts it too."""
    # Loading the dialect that is not used would cost every command some hundredths of a second.
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql

        connection.execute(postgresql.insert(table).values(row).on_conflict_do_nothing())
    else:
        from sqlalchemy.dialects import sqlite

        connection.execute(sqlite.insert(table).values(row).on_conflict_do_nothing())


def migrate(connection: Connection) -> None:
    """Bring the schema to HEAD, in the transaction of `connection`."""
    # Imported here: Alembic costs time that a command on an up-to-date store does not have.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # Not chained: what cannot be parsed may hold a password, and the cause quotes it.
        raise Invalid(
            "the address of the job store is not a URL",
            hint='for example "sqlite:///.lockstep/jobs.db"; in a URL, write @ : / % of a password as '
            "%40 %3A %2F %25",
        ) from None
    if parsed.drivername not in ("sqlite", "postgresql", "postgresql+psycopg"):
        raise Invalid(f'no job store for "{parsed.drivername}://"', hint=KNOWN)
    return parsed


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table(sql_schema.version.name):
        return None
    return connection.execute(select(sql_schema.version.c.version_num)).scalar()
