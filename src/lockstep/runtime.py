"""Clock, ids, randomness and failpoints: the only room that touches them.

Everything else takes a `Clock`, or calls a function of this module, so that a simulation can
replay one interleaving from one seed.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import random
import re
import shutil
import signal
import socket
import tempfile
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

from lockstep.errors import Invalid, Retryable


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the Unix epoch."""
        ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


SYSTEM_CLOCK: Final = SystemClock()


def rfc3339(seconds: float | None) -> str | None:
    """A time as people and JSON see it: UTC, RFC 3339, milliseconds."""
    if seconds is None:
        return None
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def new_id() -> str:
    """A job or request id: sortable by time (the first 48 bits are milliseconds), unguessable after."""
    millis = int(time.time() * 1000)
    return f"{millis:012x}{uuid.uuid4().hex[:12]}"


def id_time(job_id: str) -> float | None:
    """When an id was made, by the clock of whoever made it; None if it is not one of `new_id`."""
    return int(job_id[:12], 16) / 1000 if re.fullmatch(r"[0-9a-f]{24}", job_id) else None


def worker_name() -> str:
    """Host and process, so that another worker on this host can tell whether it still lives."""
    return f"{socket.gethostname()}/{os.getpid()}/{new_id()[-6:]}"


def is_dead(worker: str) -> bool:
    """True only if the worker ran on this host and its process is gone."""
    host, _, rest = worker.partition("/")
    pid = rest.partition("/")[0]
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def new_secret() -> str:
    return os.urandom(32).hex()


def jitter() -> float:
    """A factor between 0.5 and 1 for a backoff."""
    return random.uniform(0.5, 1.0)  # noqa: S311 - not a secret


def backoff_s(attempt: int, first_s: float = 1.0, most_s: float = 60.0) -> float:
    """How long to wait before attempt number `attempt + 1`: exponential with jitter."""
    return min(most_s, first_s * 2.0 ** max(0, attempt - 1)) * jitter()


FAILPOINTS: Final = frozenset(
    {
        "plan.before_create",
        "write.after_file",
        "write.after_checkpoint",
        "write.before_finish",
        "map.after_run",
        "map.after_checkpoint",
        "stage.before_advance",
        "stage.after_advance",
        "combine.after_run",
        "unique.after_file",
        "merge.after_file",
        "commit.after_intent",
        "commit.before_publish",
        "commit.after_publish",
        "commit.reply_lost",
        "commit.before_record",
        "fence.before_publish",
        "fence.after_publish",
        "unpin.before",
    }
)
FAILPOINTS_VARIABLE: Final = "LOCKSTEP_FAILPOINTS"
_STATE_VARIABLE: Final = "LOCKSTEP_FAILPOINTS_STATE"


@dataclass(frozen=True)
class Drill:
    """One armed failpoint: what happens the `nth` time that it is reached."""

    name: str
    action: str
    nth: int
    seconds: float = 0.0


def parse_failpoints(text: str) -> dict[str, Drill]:
    """Read `NAME=ACTION[@N],...`.

    Raises: Invalid for an unknown name or action.
    """
    drills: dict[str, Drill] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, rest = item.partition("=")
        if name not in FAILPOINTS:
            raise Invalid(
                f'{FAILPOINTS_VARIABLE} names an unknown failpoint "{name}"',
                hint="known: " + ", ".join(sorted(FAILPOINTS)),
            )
        action, _, count = rest.partition("@")
        verb, _, argument = action.partition(":")
        if verb not in {"kill", "error", "sleep"} or (verb == "sleep") != bool(argument):
            raise Invalid(
                f'{FAILPOINTS_VARIABLE}: "{rest}" is not an action',
                hint="use kill, error or sleep:SECONDS, with @N for the N-th time",
            )
        try:
            drills[name] = Drill(name, verb, int(count or 1), float(argument or 0))
        except ValueError as error:
            raise Invalid(f'{FAILPOINTS_VARIABLE}: "{rest}" has a bad number') from error
    return drills


def armed_failpoints() -> dict[str, Drill]:
    return parse_failpoints(os.environ.get(FAILPOINTS_VARIABLE, ""))


def share_failpoint_state() -> None:
    """Let all processes that this one starts count the same failpoints together.

    The N-th time counts over the driver and its executors: a `kill@1` in an executor fires once, not
    once for each Python worker that Spark starts in its place.
    """
    if os.environ.get(FAILPOINTS_VARIABLE) and not os.environ.get(_STATE_VARIABLE):
        os.environ[_STATE_VARIABLE] = tempfile.mkdtemp(prefix="lockstep-failpoints-")
        atexit.register(shutil.rmtree, os.environ[_STATE_VARIABLE], ignore_errors=True)


def _times_reached(name: str) -> int:
    share_failpoint_state()
    path = Path(os.environ[_STATE_VARIABLE]) / name
    with path.open("ab") as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        counter.write(b".")
        counter.flush()
        return path.stat().st_size


def failpoint(name: str) -> None:
    """Do what the drill for `name` says, if one is armed and this is its time.

    Raises: Retryable for the action `error`.
    """
    if FAILPOINTS_VARIABLE not in os.environ:
        return
    drill = armed_failpoints().get(name)
    if drill is None or _times_reached(name) != drill.nth:
        return
    if drill.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif drill.action == "sleep":
        time.sleep(drill.seconds)
    else:
        raise Retryable(f"failpoint {name}: error as drilled")
