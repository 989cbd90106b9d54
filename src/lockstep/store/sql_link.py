"""The way to a PostgreSQL server: how long anything may take, and what the server's errors mean."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Engine, create_engine
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError

from lockstep.errors import Invalid, LockstepError, Retryable
from lockstep.store.sql_database import Undone

CONNECT_TIMEOUT_S: Final = 10
LOCK_TIMEOUT_S: Final = 15
STATEMENT_TIMEOUT_S: Final = 30
IDLE_TIMEOUT_S: Final = 3
"""A worker that is stopped while it holds a job's lock delays a kill by so much: 5 s are promised."""
_CONNECTIONS: Final = 8
_CONNECTIONS_MORE: Final = 24

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
_AWAY: Final = "check that the PostgreSQL server is up and can be reached; nothing that it answered is lost"


def engine_at(url: URL) -> Engine:
    """Raises: Invalid if the address is no good, or the driver is missing."""
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


def translated(error: DBAPIError, store: str) -> LockstepError:
    """What the driver raised as an error of ours, which says what to do."""
    code = getattr(error.orig, "sqlstate", None)
    reason = _first_line(error)
    if code in _UNDONE:
        return Undone(f"the job store {store} undid a change: {reason}")
    if code in _LOCKED:
        return Retryable(
            f"a job in the job store {store} has been locked for {LOCK_TIMEOUT_S} s",
            hint="another client holds a transaction open on it; try again",
        )
    if code in _SLOW:
        return Retryable(
            f"the job store {store} did not answer within {STATEMENT_TIMEOUT_S} s",
            hint="look at the load of the PostgreSQL server",
        )
    if code in _REFUSED or (code is None and any(words in reason for words in _REFUSED_WORDS)):
        return Invalid(
            f"the job store {store} refuses us: {reason}",
            hint="check [store] url in lockstep.toml, and the rights of its user",
        )
    if code in _BAD_TEXT or "NUL" in reason:
        return Invalid(f"text that PostgreSQL cannot hold: {reason}")
    if error.connection_invalidated:
        return Undone(f"the connection to the job store {store} was lost: {reason}", hint=_AWAY)
    return Retryable(f"the job store {store} failed: {reason}", hint=_AWAY)


def unknown(error: DBAPIError, store: str) -> Retryable:
    """The connection was lost while the commit was under way; a verb that is sent again finds out."""
    return Retryable(
        f"the connection to the job store {store} was lost before it answered: {_first_line(error)}",
        hint=_AWAY,
    )


def _first_line(error: DBAPIError) -> str:
    return str(error.orig).strip().partition("\n")[0]
