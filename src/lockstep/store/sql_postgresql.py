"""PostgreSQL, for workers on many machines. Its own clock judges leases; rows are locked, not the store.

What a verb costs is the number of statements that it sends. So changes are gathered and sent as one, and the
verbs that every task needs try to do without a transaction around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar
from typing import cast as cast_type

from sqlalchemy import (
    Connection,
    Double,
    Engine,
    Row,
    Select,
    Update,
    bindparam,
    cast,
    create_engine,
    event,
    extract,
    func,
    literal_column,
    select,
)
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.sql.selectable import SelectBase

from lockstep.errors import Invalid, LockstepError, Retryable
from lockstep.store.sql_database import TIME, Database, Undone, shape_of
from lockstep.store.sql_schema import jobs, tasks

if TYPE_CHECKING:
    import psycopg

CONNECT_TIMEOUT_S: Final = 10
LOCK_TIMEOUT_S: Final = 15
STATEMENT_TIMEOUT_S: Final = 30
IDLE_TIMEOUT_S: Final = 3
"""A worker that is stopped while it holds a job's lock delays a kill by so much: 5 s are promised."""
_CONNECTIONS: Final = 8
_CONNECTIONS_MORE: Final = 24
_CHANGES: Final = "lockstep_changes"
_CHANGES_AT_ONCE: Final = 8
_VERBS_IN_LINE: Final = 16
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
# `xmin` names the transaction that wrote a row: as long as it is the same, nobody has changed the row.
_JOB_AND_TASK: Final = (
    select(jobs, _TIME, literal_column("lockstep_jobs.xmin::text").label("version"), tasks)
    .outerjoin(
        tasks,
        (tasks.c.job_id == jobs.c.job_id)
        & (tasks.c.stage == bindparam("stage"))
        & (tasks.c.idx == bindparam("idx")),
    )
    .where(jobs.c.job_id == bindparam("job_id"))
)
_IF_UNMOVED: Final = " AND lockstep_jobs.xmin::text = %(version)s"
_JOB_SHAPE: Final = shape_of([*jobs.c.keys(), TIME])
_TASK_SHAPE: Final = shape_of(tasks.c.keys())
_T = TypeVar("_T")

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


class _Change(NamedTuple):
    statement: UpdateBase
    row: Mapping[str, Any]
    refused: LockstepError

    @property
    def place(self) -> tuple[object, ...]:
        """What it touches. Entries of the history share one place: their order counts."""
        named = (self.row.get(name) for name in ("b_job_id", "b_stage", "b_idx", "seq"))
        return (self.statement.table, *named)

    @property
    def moves_the_job(self) -> bool:
        return isinstance(self.statement, Update) and self.statement.table is jobs


class _Overtaken(Exception):
    """The job was changed since it was read, or more has to be done than one statement can do."""


class _Alone:
    """Stands where a connection stands while a verb tries to do without a transaction."""

    def __init__(self, borrowed: PoolProxiedConnection) -> None:
        self.borrowed = borrowed
        self.driver = cast_type("psycopg.Connection[Any]", borrowed.driver_connection)
        self.driver.autocommit = True
        self.cursor = self.driver.cursor()
        self.info: dict[str, Any] = {}
        self.version = ""
        self.changes: list[_Change] = []

    def execute(self, *_about: object) -> NoReturn:
        raise _Overtaken

    def give_back(self) -> None:
        if self.driver.closed:
            self.borrowed.invalidate()
        else:
            self.driver.autocommit = False
        self.borrowed.close()


def _if_alone(connection: object) -> _Alone | None:
    return connection if isinstance(connection, _Alone) else None


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
        self._spare: list[_Alone] = []
        # Threads may miscount it: it steers what is tried first, not what is right.
        self._crowded = 0
        self._texts: dict[tuple[bool, tuple[UpdateBase, ...]], str] = {}

        @event.listens_for(engine, "before_cursor_execute")
        def send_first(connection: Connection, *_rest: object) -> None:
            # Whatever is read sees the changes before it.
            self._send(connection)

        super().__init__(url, engine, engine.dialect)

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

    def decided(self, decide: Callable[[Connection], _T]) -> _T:
        """First without a lock: one statement reads job and task, one changes them if the job has not moved.

        If it has, or if more is to be done, again in a transaction, which waits in line for the job. Where
        others are at the same job all the time, trying first would only cost: the next ones go there at once.
        """
        if self._crowded > 0:
            self._crowded -= 1
            return super().decided(decide)
        try:
            with self._told(), self._alone() as alone:
                answer = decide(cast_type("Connection", alone))
                if alone.changes:
                    self._send_alone(alone)
                return answer
        except _Overtaken:
            return super().decided(decide)

    @contextmanager
    def _alone(self) -> Iterator[_Alone]:
        """One of the connections that are kept for this: a new one of the pool costs half a statement."""
        import psycopg

        try:
            alone = self._spare.pop()
        except IndexError:
            alone = self._borrowed()
        try:
            yield alone
        except psycopg.Error as error:
            raise DBAPIError("", None, error, connection_invalidated=alone.driver.closed) from error
        finally:
            alone.info, alone.changes = {}, []
            self._spare.append(alone)
            if alone.driver.closed:
                # The others will have been lost with it.
                self._give_back_spare()

    def _borrowed(self) -> _Alone:
        import psycopg

        try:
            return _Alone(self._engine.raw_connection())
        except psycopg.Error as error:
            raise DBAPIError("", None, error) from error

    def _give_back_spare(self) -> None:
        with suppress(IndexError):
            while True:
                self._spare.pop().give_back()

    def close(self) -> None:
        self._give_back_spare()
        super().close()

    def _send_alone(self, alone: _Alone) -> None:
        """Raises: _Overtaken if nothing was changed; Retryable if nobody knows."""
        import psycopg

        # The job first: whoever waits for it holds no task meanwhile, so nobody waits in a circle.
        moves = [change for change in alone.changes if change.moves_the_job]
        changes = moves + [change for change in alone.changes if not change.moves_the_job]
        if len(moves) != 1 or len(changes) > _CHANGES_AT_ONCE:
            raise _Overtaken
        row = {**_numbered(changes), "version": alone.version}
        try:
            found = alone.cursor.execute(self._together(changes, alone=True), row).fetchone()
        except psycopg.errors.DivisionByZero as error:
            raise _Overtaken from error
        except psycopg.Error as error:
            if alone.driver.closed:
                raise self._unknown(DBAPIError("", None, error)) from error
            raise
        if found is None or found[0] != 1:
            self._crowded = _VERBS_IN_LINE
            raise _Overtaken

    def rows(self, connection: Connection, query: SelectBase, about: Mapping[str, Any]) -> Sequence[Row[Any]]:
        if _if_alone(connection):
            raise _Overtaken
        self._send(connection)
        text, own = self._worded(query)
        with self._driven(connection):
            return self._shaped(text, _driver(connection).execute(text, {**own, **about}))

    def now(self, connection: Connection) -> float:
        """One time for one transaction: asked for once, or brought along with the first row it locks."""
        known: float | None = connection.info.get(TIME)
        if known is None:
            known = self.rows(connection, _NOW, {})[0][0]
            connection.info[TIME] = known
        return known

    def with_time(self, query: Select[Any]) -> Select[Any]:
        # The inner query waits for the lock; the clock is read after it.
        return select(query.subquery(), _TIME)

    def note_time(self, connection: Connection, now: float) -> None:
        connection.info.setdefault(TIME, now)

    def lock(
        self, connection: Connection, locking: Select[Any], reading: Select[Any], about: Mapping[str, Any]
    ) -> tuple[Row[Any] | None, Row[Any] | None]:
        if (alone := _if_alone(connection)) is None:
            return super().lock(connection, locking, reading, about)
        text, own = self._worded(_JOB_AND_TASK)
        found = alone.cursor.execute(text, {**own, **about}).fetchone()
        if found is None:
            return None, None
        width = len(jobs.c) + 1
        alone.version = found[width]
        task = _TASK_SHAPE(found[width + 1 :])
        return _JOB_SHAPE(found[:width]), None if task.job_id is None else task

    def change(
        self, connection: Connection, statement: UpdateBase, row: Mapping[str, Any], refused: LockstepError
    ) -> None:
        alone = _if_alone(connection)
        changes = connection.info[_CHANGES] if alone is None else alone.changes
        changes.append(_Change(statement, row, refused))

    def _send(self, connection: Connection) -> None:
        """Send all changes that were gathered. Raises: what the first of them that met no row says."""
        changes: list[_Change] | None = connection.info.get(_CHANGES)
        if not changes:
            return
        connection.info[_CHANGES] = []
        for group in _grouped(changes):
            with self._driven(connection):
                sent = _driver(connection).execute(self._together(group), _numbered(group))
                counts = sent.fetchone() or ()
            for count, change in zip(counts, group, strict=True):
                if count != 1:
                    raise change.refused

    def _together(self, changes: Sequence[_Change], *, alone: bool = False) -> str:
        """One statement that makes all these changes, and counts for each the rows that it met; made once.

        `alone`: it changes nothing if the job, which comes first, has moved, and fails as a whole if another
        change met no row.
        """
        statements = tuple(change.statement for change in changes)
        if (known := self._texts.get((alone, statements))) is not None:
            return known
        parts, counts = [], []
        for number, statement in enumerate(statements):
            text = self._worded(statement).text.replace("%(", f"%(c{number}_")
            count = f"(SELECT count(*) FROM c{number})"
            if alone and number == 0:
                text += _IF_UNMOVED
            elif alone:
                text = _if_the_first(text)
                count = f"1 / (1 - (SELECT count(*) FROM c0) + {count})"
            parts.append(f"c{number} AS ({text} RETURNING 1)")
            counts.append(count)
        whole = f"WITH {', '.join(parts)} SELECT {', '.join(counts)}"
        return self._texts.setdefault((alone, statements), whole)

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


def _grouped(changes: Sequence[_Change]) -> list[list[_Change]]:
    """Changes that one statement can make: it may touch no row twice, and knows no order."""
    groups: list[list[_Change]] = []
    touched: set[tuple[object, ...]] = set()
    for change in changes:
        if not groups or change.place in touched or len(groups[-1]) == _CHANGES_AT_ONCE:
            groups.append([])
            touched.clear()
        groups[-1].append(change)
        touched.add(change.place)
    return groups


def _if_the_first(text: str) -> str:
    """A change that is made only if the first one of its statement was."""
    condition = "EXISTS (SELECT 1 FROM c0)"
    if text.startswith("UPDATE"):
        return f"{text} AND {condition}"
    into, _, values = text.partition(" VALUES (")
    return f"{into} SELECT {values.removesuffix(')')} WHERE {condition}"


def _numbered(changes: Sequence[_Change]) -> dict[str, Any]:
    """The parameters of changes that are made together."""
    return {
        f"c{number}_{name}": value
        for number, change in enumerate(changes)
        for name, value in change.row.items()
    }


def _driver(connection: Connection) -> psycopg.Connection[Any]:
    found = connection.connection.driver_connection
    assert found is not None
    return cast_type("psycopg.Connection[Any]", found)


def _first_line(error: DBAPIError) -> str:
    return str(error.orig).strip().partition("\n")[0]
