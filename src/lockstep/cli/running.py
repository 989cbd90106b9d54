"""Working on jobs in this process, with progress on standard error and Ctrl-C that stops the work only."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final, Literal

from lockstep.cli.progress import ProgressView, follow
from lockstep.cli.session import INTERRUPTED, Session, leave_at_once
from lockstep.errors import Retryable
from lockstep.job import Job, State

if TYPE_CHECKING:
    from lockstep.worker import Worker

STOP_PATIENCE_S: Final = 30.0
KEPT_ENDED: Final = 8

LIVE: Final = frozenset(state for state in State if state.live)


class Interrupted(Exception):
    """The person, or the system, asked to stop. The jobs are as they were and can go on."""


def work(
    session: Session, until: Literal["idle", "jobs_ended", "forever"], job_ids: Collection[str] | None = None
) -> Sequence[Job]:
    """Run a worker until `until`, and show its jobs meanwhile.

    The worker has a thread of its own, so that this one can listen to signals.
    Raises: Interrupted after Ctrl-C or SIGTERM, once the worker has let go of its leases.
    """
    from lockstep.worker import Worker

    stop = threading.Event()
    start = _StartUp()
    worker = Worker(
        session.config, session.store, session.clock, job_ids=job_ids, on_progress=start.round_ended
    )
    runner = _Runner(worker, until, stop)
    read = _reader(session, job_ids)
    with signals_interrupt():
        try:
            with ProgressView(session.side, session.clock, start.note) as view:
                runner.start()
                jobs = follow(read, view, runner.ended.wait, lambda _: runner.ended.is_set())
        except KeyboardInterrupt:
            session.remark("stopping; once more to leave at once")
            stop.set()
            _wait_or_leave(runner)
            raise Interrupted from None
    if runner.failure is not None:
        raise runner.failure
    return jobs


class _StartUp:
    """What a worker does before the first rows come: the seconds in which no bar moves."""

    def __init__(self) -> None:
        self._spark_is_up = False
        self._rows: dict[str, int] = {}
        self._moved = False

    def round_ended(self) -> None:
        # A worker starts Spark within its first round, if there are tasks to run.
        self._spark_is_up = True

    def note(self, jobs: Sequence[Job]) -> str:
        for job in jobs:
            self._moved = self._moved or self._rows.setdefault(job.job_id, job.rows_done) != job.rows_done
        if self._moved or not any(job.state in (State.PENDING, State.RUNNING) for job in jobs):
            return ""
        return "waiting for the first rows …" if self._spark_is_up else "starting Spark …"


class _Runner(threading.Thread):
    """The worker's thread; what it raises is raised again by the thread that listens."""

    def __init__(
        self, worker: Worker, until: Literal["idle", "jobs_ended", "forever"], stop: threading.Event
    ) -> None:
        super().__init__(name="worker", daemon=True)
        self.ended = threading.Event()
        self.failure: BaseException | None = None
        self._worker = worker
        self._until: Literal["idle", "jobs_ended", "forever"] = until
        self._stop_asked = stop

    def run(self) -> None:
        try:
            self._worker.run(self._until, self._stop_asked)
        except BaseException as error:  # carried over to the main thread, which raises it
            self.failure = error
        finally:
            self.ended.set()


def _reader(session: Session, job_ids: Collection[str] | None) -> Callable[[], Sequence[Job]]:
    """Reads the jobs to show; while the store is away it answers what it saw last."""
    seen: dict[str, Job] = {}

    def read() -> Sequence[Job]:
        try:
            if job_ids is None:
                seen.update({job.job_id: job for job in reversed(session.store.list(LIVE))})
            for job_id in list(seen) if job_ids is None else job_ids:
                if job_id not in seen or seen[job_id].state.live:
                    seen[job_id] = session.store.read(job_id)
        except Retryable:
            return list(seen.values())
        if job_ids is None:
            ended = [job_id for job_id, job in seen.items() if not job.state.live]
            for job_id in ended[:-KEPT_ENDED]:
                del seen[job_id]
        return list(seen.values())

    return read


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does: a supervisor deserves the same manners."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_or_leave(runner: _Runner) -> None:
    """Give the worker a moment to hand its leases back; a second Ctrl-C leaves at once."""
    try:
        runner.join(STOP_PATIENCE_S)
    except KeyboardInterrupt:
        leave_at_once(INTERRUPTED)
