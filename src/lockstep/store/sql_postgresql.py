"""PostgreSQL, for workers on many machines. Its own clock judges leases; rows are locked, not the store.

What a verb costs is the number of statements that it sends. So changes are gathered and sent as one, and the
verbs that every task needs try to do without a transaction around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import compress
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar
from typing import cast as cast_type

from sqlalchemy import (
    Connection,
    Double,
    Row,
    Select,
    bindparam,
    cast,
    event,
    extract,
    func,
    literal_column,
    select,
)
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.sql.selectable import SelectBase

from lockstep.errors import Invalid, LockstepError, Retryable
from lockstep.store.sql_changes import (
    CHANGES_AT_ONCE,
    JOB_MOVES,
    VERSION,
    Change,
    Later,
    Together,
    grouped,
    later_in,
    numbered,
)
from lockstep.store.sql_database import TIME, Database, Offer
from lockstep.store.sql_link import STATEMENT_TIMEOUT_S, engine_at, translated, unknown
from lockstep.store.sql_memory import Memory
from lockstep.store.sql_offers import JOB_SHAPE, OFFERS, OFFERS_OF, TASK_SHAPE, offered
from lockstep.store.sql_schema import jobs, tasks

if TYPE_CHECKING:
    import psycopg

_CHANGES: Final = "lockstep_changes"
_VERBS_IN_LINE: Final = 16
_SCHEMA_LOCK: Final = 0x6C6F636B73746570  # "lockstep"

_TIME: Final = cast(extract("epoch", func.clock_timestamp()), Double).label(TIME)
_NOW: Final = select(_TIME)
_JOB_AND_TASK: Final = (
    select(jobs, _TIME, literal_column(VERSION).label("version"), tasks)
    .outerjoin(
        tasks,
        (tasks.c.job_id == jobs.c.job_id)
        & (tasks.c.stage == bindparam("stage"))
        & (tasks.c.idx == bindparam("idx")),
    )
    .where(jobs.c.job_id == bindparam("job_id"))
)
_T = TypeVar("_T")


class _Overtaken(Exception):
    """The job was changed since it was read, or more has to be done than one statement can do."""


class _Unknown(Exception):
    """Nothing is remembered of a job or a task."""


class _Alone:
    """Stands where a connection stands while a verb tries to do without a transaction."""

    def __init__(self, borrowed: PoolProxiedConnection) -> None:
        self.borrowed = borrowed
        self.driver = cast_type("psycopg.Connection[Any]", borrowed.driver_connection)
        self.driver.autocommit = True
        self.cursor = self.driver.cursor()
        self.memory = Memory()
        self.unsure = 0
        """So many verbs read, because what was remembered before them was not true any more."""
        self.begin()

    def begin(self) -> None:
        """For a verb, from its beginning."""
        self.info: dict[str, Any] = {}
        self.versions: dict[str, str] = {}
        self.offers: dict[str, Offer] = {}
        self.changes: list[Change] = []
        self.recalled = False

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
    most_at_once = CHANGES_AT_ONCE

    def __init__(self, url: URL) -> None:
        if not url.database:
            raise Invalid(
                "the address of the job store names no database",
                hint='for example "postgresql://lockstep:${PASSWORD}@host:5432/lockstep"',
            )
        engine = engine_at(url)
        self._read_engine = engine.execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )
        self._spare: list[_Alone] = []
        # Threads may miscount it: it steers what is tried first, not what is right.
        self._crowded = 0
        self._together = Together(lambda statement: self._worded(statement).text)

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
        try:
            with self._unlocked() as alone:
                answer = self._recalled(alone, decide)
                return self._read(alone, decide) if answer is None else answer[0]
        except _Overtaken:
            return super().decided(decide)

    def _recalled(self, alone: _Alone, decide: Callable[[Connection], _T]) -> tuple[_T] | None:
        """What follows from what this connection remembers, if that is still true and changes something.

        Only what is read now may refuse a verb, or leave everything as it is.
        """
        if alone.unsure > 0:
            alone.unsure -= 1
            return None
        alone.recalled = True
        try:
            answer = decide(cast_type("Connection", alone))
        except _Unknown:
            return None
        except (LockstepError, _Overtaken):
            alone.memory.forget()
            return None
        try:
            if alone.changes:
                self._send_moving(alone)
                return (answer,)
        except _Overtaken:
            alone.unsure = _VERBS_IN_LINE
        alone.memory.forget()
        return None

    def _read(self, alone: _Alone, decide: Callable[[Connection], _T]) -> _T:
        """What follows from what is there. Raises: _Overtaken if it is not there any more."""
        alone.begin()
        answer = decide(cast_type("Connection", alone))
        if alone.changes:
            self._send_moving(alone)
        return answer

    def at_once(self, decide: Callable[[Connection], Sequence[_T]]) -> list[_T]:
        try:
            with self._unlocked() as alone:
                answers = decide(cast_type("Connection", alone))
                made = self._send_held(alone) if alone.changes else []
                return [*compress(answers, made)]
        except _Overtaken:
            return []

    @contextmanager
    def _unlocked(self) -> Iterator[_Alone]:
        """Raises: _Overtaken, at once if others are at the same jobs all the time."""
        if self._crowded > 0:
            self._crowded -= 1
            raise _Overtaken
        with self._told(), self._alone() as alone:
            yield alone

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
            alone.begin()
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

    def _send_moving(self, alone: _Alone) -> None:
        """Change the one job that was read, and what belongs to it: everything or nothing.

        Raises: _Overtaken if nothing was changed; Retryable if nobody knows.
        """
        import psycopg

        # The job first: whoever waits for it holds no task meanwhile, so nobody waits in a circle.
        changes = sorted(alone.changes, key=Change.rank)
        if [change.rank() for change in changes].count(JOB_MOVES) != 1 or len(changes) > CHANGES_AT_ONCE:
            raise _Overtaken
        later = later_in(changes) if alone.recalled else frozenset()
        try:
            answers = self._sent(alone, self._together.unmoved(changes, later), changes)
        except psycopg.errors.DivisionByZero as error:
            raise _Overtaken from error
        if answers[0] != 1:
            if not alone.recalled:
                self._crowded = _VERBS_IN_LINE
            raise _Overtaken
        now = answers[-1] if later else None
        alone.memory.follow(changes[0].job_id, answers[len(changes)], changes, now)

    def _send_held(self, alone: _Alone) -> list[bool]:
        """Change tasks of jobs that were read; answers which ones were still as they were read.

        Raises: _Overtaken if none was; Retryable if nobody knows.
        """
        changes = alone.changes
        if len(changes) > CHANGES_AT_ONCE or any(change.rank() == JOB_MOVES for change in changes):
            raise _Overtaken
        text = self._together.held(changes, len({change.job_id for change in changes}))
        made = [count == 1 for count in self._sent(alone, text, changes)]
        if not any(made):
            self._crowded = _VERBS_IN_LINE
            raise _Overtaken
        for change in compress(changes, made):
            offer, version = alone.offers[change.job_id], alone.versions[change.job_id]
            index = change.row["b_idx"]
            alone.memory.learn(offer.job, version, [task for task in offer.free if task.idx == index])
            alone.memory.follow(change.job_id, version, [change], None)
        return made

    def _sent(self, alone: _Alone, text: str, changes: Sequence[Change]) -> Sequence[Any]:
        """What the statement answers. Raises: Retryable if nobody knows."""
        import psycopg

        versions = {change.job_id: alone.versions[change.job_id] for change in changes}
        try:
            return alone.cursor.execute(text, numbered(changes, versions)).fetchone() or (0,)
        except psycopg.Error as error:
            if alone.driver.closed:
                raise self._unknown(DBAPIError("", None, error)) from error
            raise

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
        if known is None and (alone := _if_alone(connection)) is not None and alone.recalled:
            return cast_type("float", Later())
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
        if alone.recalled:
            recalled = alone.memory.recall(about["job_id"], about["stage"], about["idx"])
            if recalled is None:
                raise _Unknown
            known, task = recalled
            alone.versions[about["job_id"]] = known.version
            return known.job, task
        text, own = self._worded(_JOB_AND_TASK)
        found = alone.cursor.execute(text, {**own, **about}).fetchone()
        if found is None:
            return None, None
        width = len(jobs.c)
        job, now, version = JOB_SHAPE(found[:width]), found[width], found[width + 1]
        task = TASK_SHAPE(found[width + 2 :])
        self.note_time(connection, now)
        alone.versions[about["job_id"]] = version
        if task.job_id is None:
            return job, None
        alone.memory.learn(job, version, [task])
        return job, task

    def offers(self, connection: Connection, slots: int, wanted: Sequence[str] | None) -> list[Offer]:
        alone = _if_alone(connection)
        assert alone is not None, "offers are not locked: a transaction would take them for granted"
        text, own = self._worded(OFFERS if wanted is None else OFFERS_OF)
        about = {"slots": slots} if wanted is None else {"slots": slots, "wanted": list(wanted)}
        found = []
        for offer, now, version in offered(alone.cursor.execute(text, {**own, **about}).fetchall()):
            alone.info[TIME] = now
            alone.versions[offer.job.job_id] = version
            alone.offers[offer.job.job_id] = offer
            found.append(offer)
        return found

    def change(
        self, connection: Connection, statement: UpdateBase, row: Mapping[str, Any], refused: LockstepError
    ) -> None:
        alone = _if_alone(connection)
        changes = connection.info[_CHANGES] if alone is None else alone.changes
        changes.append(Change(statement, row, refused))

    def _send(self, connection: Connection) -> None:
        """Send all changes that were gathered. Raises: what the first of them that met no row says."""
        changes: list[Change] | None = connection.info.get(_CHANGES)
        if not changes:
            return
        connection.info[_CHANGES] = []
        for group in grouped(changes):
            with self._driven(connection):
                sent = _driver(connection).execute(self._together.locked(group), numbered(group))
                counts = sent.fetchone() or ()
            for count, change in zip(counts, group, strict=True):
                if count != 1:
                    raise change.refused

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
        # Nobody waits for a job meanwhile, and whoever makes the schema first has to load what does it.
        connection.exec_driver_sql(
            f"SET LOCAL idle_in_transaction_session_timeout = '{STATEMENT_TIMEOUT_S}s'"
        )
        connection.execute(select(func.pg_advisory_xact_lock(_SCHEMA_LOCK)))

    def _translated(self, error: DBAPIError) -> LockstepError:
        return translated(error, self.name)

    def _unknown(self, error: DBAPIError) -> Retryable:
        return unknown(error, self.name)


def _driver(connection: Connection) -> psycopg.Connection[Any]:
    found = connection.connection.driver_connection
    assert found is not None
    return cast_type("psycopg.Connection[Any]", found)
