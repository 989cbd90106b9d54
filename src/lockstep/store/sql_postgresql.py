"""PostgreSQL, for workers on many machines. Its own clock judges leases; rows are locked, not the store.

What a verb costs is the number of times that it waits for the server. So changes are gathered and sent
together, and the lock on a job together with the question that follows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from typing import cast as cast_type

from sqlalchemy import (
    Connection,
    Double,
    Engine,
    Executable,
    Row,
    Select,
    cast,
    create_engine,
    event,
    extract,
    func,
    select,
)
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError

from lockstep.errors import Invalid, LockstepError, Retryable
from lockstep.store.sql_database import TIME, Database, Undone

if TYPE_CHECKING:
    import psycopg

CONNECT_TIMEOUT_S: Final = 10
LOCK_TIMEOUT_S: Final = 15
STATEMENT_TIMEOUT_S: Final = 30
IDLE_TIMEOUT_S: Final = 10
_CONNECTIONS: Final = 8
_CONNECTIONS_MORE: Final = 24
_CHANGES: Final = "lockstep_changes"
_SCHEMA_LOCK: Final = 0x6C6F636B73746570  # "lockstep"

# A verb is some milliseconds of small statements, so these are bounds on faults, not on work: a server
# that hangs, and a client that was stopped in the middle of a transaction and sits on the locks of a job.
_SESSION: Final = {
    "statement_timeout": f"{STATEMENT_TIMEOUT_S}s",
    "lock_timeout": f"{LOCK_TIMEOUT_S}s",
    "idle_in_transaction_session_timeout": f"{IDLE_TIMEOUT_S}s",
}
# A peer that is gone without a word is noticed in half a minute, also while an answer is awaited.
_SOCKET: Final = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}

_TIME: Final = cast(extract("epoch", func.clock_timestamp()), Double).label(TIME)
_NOW: Final = select(_TIME)

# https://www.postgresql.org/docs/current/errcodes-appendix.html
_UNDONE: Final = frozenset({"40001", "40P01", "23505"})
"""Serialization failure, deadlock, and a key that somebody else inserted at the same instant."""
_LOCKED: Final = frozenset({"55P03"})
_SLOW: Final = frozenset({"57014"})
_REFUSED: Final = frozenset({"42501", "25006", "28000", "28P01", "3D000", "3F000"})
"""No right, a server that only reads, no such user, wrong password, no such database or schema."""
_BAD_TEXT: Final = frozenset({"22021", "22P05"})
# The driver has no code for what happens before a session exists.
_REFUSED_WORDS: Final = (
    "password authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "does not exist",
    "is not permitted to log in",
    "invalid connection option",
    "permission denied for database",
)


class PostgresqlDatabase(Database):
    def __init__(self, url: URL) -> None:
        if not url.database:
            raise Invalid(
                "the address of the job store names no database",
                hint='for example "postgresql://lockstep:${PASSWORD}@host:5432/lockstep"',
            )
        engine = _engine(url)
        self._read_engine = engine.execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )
        self._texts: dict[Any, str] = {}

        @event.listens_for(engine, "before_cursor_execute")
        def send_first(connection: Connection, *_rest: object) -> None:
            # Whatever is read sees the changes before it.
            self._send(connection)

        super().__init__(url, engine)

    @property
    def name(self) -> str:
        # Without the options: a password may be among them.
        plain = self.url.set(drivername="postgresql", query={})
        return plain.render_as_string(hide_password=True)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self._told(), self._read_engine.connect() as connection:
            connection.info.pop(TIME, None)
            with connection.begin():
                yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        with self._told(), self._engine.connect() as connection:
            # Taken hold of now: a connection that was lost does not hand it out any more.
            info = connection.info
            info.pop(TIME, None)
            info[_CHANGES] = []
            transaction = connection.begin()
            try:
                yield connection
                self._send(connection)
            except BaseException:
                info[_CHANGES] = []
                transaction.rollback()
                raise
            try:
                transaction.commit()
            except DBAPIError as error:
                if error.connection_invalidated:
                    raise self._unknown(error) from error
                raise

    def now(self, connection: Connection) -> float:
        """One time for one transaction: asked for once, or brought along with the first row it locks."""
        known: float | None = connection.info.get(TIME)
        if known is None:
            known = connection.execute(_NOW).scalar_one()
            connection.info[TIME] = known
        return known

    def with_time(self, query: Select[Any]) -> Select[Any]:
        # The inner query waits for the lock; the clock is read after it.
        return select(query.subquery(), _TIME)

    def note_time(self, connection: Connection, now: float) -> None:
        connection.info.setdefault(TIME, now)

    def lock(
        self, connection: Connection, locking: Select[Any], reading: Select[Any], about: Mapping[str, Any]
    ) -> tuple[Mapping[Any, Any] | None, Row[Any] | None]:
        from psycopg.rows import dict_row, namedtuple_row

        self._send(connection)
        driver = _driver(connection)
        with self._driven(connection), driver.pipeline():
            locked = driver.cursor(row_factory=dict_row).execute(
                self._text(locking), {"job_id": about["job_id"]}
            )
            read = driver.cursor(row_factory=namedtuple_row).execute(self._text(reading), about)
        # Fetched after the block: inside it, each fetch would wait for the server once more. Of the second
        # row only the columns are used, as attributes.
        return locked.fetchone(), cast_type("Row[Any] | None", read.fetchone())

    def change(
        self, connection: Connection, statement: Executable, row: Mapping[str, Any], refused: LockstepError
    ) -> None:
        connection.info[_CHANGES].append((self._text(statement), row, refused))

    def _send(self, connection: Connection) -> None:
        """Send all changes that were gathered. Raises: what the first of them that met no row says."""
        changes = connection.info.get(_CHANGES)
        if not changes:
            return
        connection.info[_CHANGES] = []
        driver = _driver(connection)
        with self._driven(connection), driver.pipeline():
            sent = [driver.execute(text, row) for text, row, _ in changes]
        for cursor, (_, _, refused) in zip(sent, changes, strict=True):
            if cursor.rowcount != 1:
                raise refused

    def _text(self, statement: Any) -> str:
        """The statement in the driver's words; made once."""
        if (known := self._texts.get(statement)) is None:
            known = self._texts[statement] = str(statement.compile(dialect=self._engine.dialect))
        return known

    @contextmanager
    def _driven(self, connection: Connection) -> Iterator[None]:
        """Where the driver is spoken to directly, its errors look as if they came through SQLAlchemy."""
        import psycopg

        try:
            yield
        except psycopg.Error as error:
            lost = _driver(connection).closed
            if lost:
                connection.invalidate(error)
            raise DBAPIError("", None, error, connection_invalidated=lost) from error

    def _lock_schema(self, connection: Connection) -> None:
        connection.execute(select(func.pg_advisory_xact_lock(_SCHEMA_LOCK)))

    def _translated(self, error: DBAPIError) -> LockstepError:
        code = getattr(error.orig, "sqlstate", None)
        reason = _first_line(error)
        if code in _UNDONE:
            return Undone(f"the job store {self.name} undid a change: {reason}")
        if code in _LOCKED:
            return Retryable(
                f"a job in the job store {self.name} has been locked for {LOCK_TIMEOUT_S} s",
                hint="another client holds a transaction open on it; try again",
            )
        if code in _SLOW:
            return Retryable(
                f"the job store {self.name} did not answer within {STATEMENT_TIMEOUT_S} s",
                hint="look at the load of the PostgreSQL server",
            )
        if code in _REFUSED or (code is None and any(words in reason for words in _REFUSED_WORDS)):
            return Invalid(
                f"the job store {self.name} refuses us: {reason}",
                hint="check [store] url in lockstep.toml, and the rights of its user",
            )
        if code in _BAD_TEXT or "NUL" in reason:
            return Invalid(f"text that PostgreSQL cannot hold: {reason}")
        if error.connection_invalidated:
            return Undone(f"the connection to the job store {self.name} was lost: {reason}", hint=_AWAY)
        return Retryable(f"the job store {self.name} failed: {reason}", hint=_AWAY)

    def _unknown(self, error: DBAPIError) -> Retryable:
        """The connection was lost while the commit was under way; a verb that is sent again finds out."""
        return Retryable(
            f"the connection to the job store {self.name} was lost before it answered: {_first_line(error)}",
            hint=_AWAY,
        )


_AWAY: Final = "check that the PostgreSQL server is up and can be reached; nothing that it answered is lost"


def _engine(url: URL) -> Engine:
    query = dict(url.query)
    session = " ".join(f"-c {name}={value}" for name, value in _SESSION.items())
    # What the address says comes last, and wins.
    options = f"{session} {query.pop('options', '')}".strip()
    sockets = {name: value for name, value in _SOCKET.items() if name not in query}
    try:
        return create_engine(
            url.set(drivername="postgresql+psycopg", query=query),
            connect_args={**sockets, "options": options, "application_name": "lockstep"},
            isolation_level="READ COMMITTED",
            pool_size=_CONNECTIONS,
            max_overflow=_CONNECTIONS_MORE,
            pool_timeout=STATEMENT_TIMEOUT_S,
        )
    except ArgumentError:
        # Not chained: the cause quotes what it was given.
        raise Invalid(
            "the address of the job store is not one that PostgreSQL's driver takes",
            hint='for example "postgresql://lockstep:${PASSWORD}@host:5432/lockstep"',
        ) from None
    except ModuleNotFoundError as error:
        raise Invalid(
            f"the driver for PostgreSQL is not installed ({error.name})",
            hint="pip install 'lockstep[postgresql]'",
        ) from error


def _driver(connection: Connection) -> psycopg.Connection[Any]:
    found = connection.connection.driver_connection
    assert found is not None
    return cast_type("psycopg.Connection[Any]", found)


def _first_line(error: DBAPIError) -> str:
    return str(error.orig).strip().partition("\n")[0]
