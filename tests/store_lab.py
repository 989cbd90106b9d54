"""What the tests of job stores share: a clock moved by hand, small jobs, and what must always hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import Conflict, ErrorInfo, Fenced, Invalid
from lockstep.job import (
    Event,
    Fingerprint,
    Holding,
    Job,
    Kind,
    NewJob,
    Piece,
    Plan,
    Progress,
    StagedFile,
    State,
    TaskSpec,
    TaskState,
    after,
)
from lockstep.runtime import Clock
from lockstep.store import Begun, CommitClaim, JobStore, open_store

LEASE_S = 30.0
REFUSED = ErrorInfo("Retryable", "storage is away", "wait")


class MovedClock:
    """Stands still until somebody moves it."""

    def __init__(self, at: float = 1_700_000_000.0) -> None:
        self.at = at

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


class DatabaseClock(MovedClock):
    """The clock of a PostgreSQL database, moved by hand: a function of the same name comes first in the
    search path. The store under test reads the time as it always does, and has no other clock.
    """

    SCHEMA = "lab"
    SEARCH_PATH = "lab,pg_catalog,public"

    def __init__(self, run: Callable[[str], object]) -> None:
        self._run = run
        super().__init__()

    @property
    def at(self) -> float:
        return self._at

    @at.setter
    def at(self, value: float) -> None:
        self._at = round(value, 6)
        self._run(f"UPDATE lab.moment SET at = {self._at!r}")

    @classmethod
    def install(cls, run: Callable[[str], object]) -> None:
        run("CREATE SCHEMA lab")
        run("CREATE TABLE lab.moment (at float8)")
        run("INSERT INTO lab.moment VALUES (0)")
        run(
            "CREATE FUNCTION lab.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE "
            "AS 'SELECT to_timestamp(at) FROM lab.moment'"
        )


@dataclass(frozen=True)
class Stores:
    """Opens clients of one store. `url` lets another process open it too."""

    url: str
    open: Callable[[str, Clock], JobStore]
    clock: MovedClock = field(default_factory=MovedClock)

    def __call__(self, clock: Clock | None = None) -> JobStore:
        return self.open(self.url, clock or self.clock)


def new_plan(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "kind": Kind.EXPORT,
        "source": "clickhouse://reader:${PASSWORD}@host:8123/db/events",
        "target": "iceberg://lake/db.events",
        "target_uuid": "3f8a",
        "location": "/warehouse/db/events",
        "schema": {"type": "struct", "fields": []},
        "spec": {"spec-id": 0, "fields": []},
        "sort_order": {"order-id": 0, "fields": []},
        "columns": (),
        "pin": {"parts": ["all_1_1_0"]},
        "partition": "202401",
    }
    return Plan(**{**settings, **changes})


def new_job(
    job_id: str,
    tasks: int = 1,
    *,
    scope: str | None = None,
    pieces: Sequence[Piece] = (),
    whole: bool = True,
    beside: Sequence[str] = (),
    **plan: Any,
) -> NewJob:
    return NewJob(
        job_id,
        f"request-{job_id}",
        new_plan(**plan),
        Holding(scope or f"scope-{job_id}", whole, tuple(pieces)),
        [TaskSpec({"part": i}, rows=10, size_bytes=100) for i in range(tasks)],
        frozenset(beside),
    )


def staged(name: str, rows: int = 10, column: int = 7) -> StagedFile:
    print_of_rows = Fingerprint(rows, {"a": column, "b": 2**64 - 1})
    return StagedFile(f"/warehouse/{name}.parquet", 100, rows, "crc", print_of_rows, (1,), {"bounds": "AA=="})


def begin_task(store: JobStore, job_id: str, worker: str = "w1") -> Begun:
    """Claim one task of a job and start an attempt."""
    [claim] = store.claim(worker, 1, LEASE_S, {job_id})
    return store.begin(claim.lease, LEASE_S)


def run_task(store: JobStore, job_id: str, worker: str = "w1") -> None:
    """Claim one task of a job, write one file, finish."""
    begun = begin_task(store, job_id, worker)
    name = f"{job_id}-{begun.lease.stage}-{begun.lease.index}-{begun.lease.epoch}"
    store.finish(begun.lease, {"row": 10}, [staged(name)], Progress(10, 100))


def take_commit(store: JobStore, job_id: str, worker: str = "w1") -> CommitClaim:
    claim = store.claim_commit(worker, LEASE_S, {job_id})
    assert claim is not None
    return claim


def job_in(
    store: JobStore, state: State, job_id: str = "job1", *, beside: Sequence[str] = (), **plan: Any
) -> Job:
    """A job of two tasks that has come to `state` by the verbs that lead there."""
    store.create([new_job(job_id, 2, beside=beside, **plan)])
    if state in (State.RUNNING, State.FAILED):
        begin_task(store, job_id)
    if state in (State.COMMITTING, State.COMPLETED):
        run_task(store, job_id)
        run_task(store, job_id)
    if state is State.PAUSED:
        store.pause(job_id)
    if state in (State.FAILED, State.KILLED):
        store.stop(job_id, Event.FAIL if state is State.FAILED else Event.KILL)
    if state is State.COMPLETED:
        store.end(take_commit(store, job_id).lease, Event.COMMITTED, snapshot_id=42)
    job = store.read(job_id)
    assert job.state is state
    return job


def moves(store: JobStore, job_id: str) -> list[str]:
    """The events of the history that moved the job."""
    return [entry.event for entry in store.history(job_id) if entry.event in set(Event)]


def check_always_true(store: JobStore) -> None:
    """What holds for every job at every time, whoever died in the middle of whatever."""
    for job in store.list():
        _check_history(store, job)
        _check_counters(store, job)


def _check_history(store: JobStore, job: Job) -> None:
    """The history leads from its first entry to the state of today by allowed moves, with none left out."""
    entries = store.history(job.job_id)
    state, generation = State.PENDING, 1
    assert entries[0].event == "create"
    for entry in entries:
        if entry.event in set(Event):
            state_after = after(state, Event(entry.event))
            assert state_after is not None, (job.job_id, entries)
            state = state_after
            generation += entry.event == Event.RETRY
        assert (entry.state, entry.generation) == (state, generation), (job.job_id, entries)
    assert (job.state, job.generation) == (state, generation), (job.job_id, entries)


def _check_counters(store: JobStore, job: Job) -> None:
    tasks = store.tasks(job.job_id, job.stage)
    files = list(store.manifest(job.job_id, job.stage))
    assert job.tasks_total == len(tasks)
    assert job.tasks_done == sum(task.state is TaskState.DONE for task in tasks)
    assert job.rows_done == sum(task.rows_done for task in tasks)
    assert job.bytes_done == sum(task.bytes_done for task in tasks)
    assert job.files == sum(task.files for task in tasks) == len(files)
    assert len({file.path for file in files}) == len(files)
    if job.stage == job.plan.stages[-1]:
        assert job.fingerprint == sum((file.fingerprint for file in files), Fingerprint())
    if job.state in (State.COMMITTING, State.COMPLETED):
        assert job.tasks_done == job.tasks_total
        assert job.stage == job.plan.stages[-1]
    if job.state in (State.COMPLETED, State.FAILED, State.KILLED):
        assert job.finished_at is not None
        assert not any(task.owner for task in tasks)


def ids(found: list[Any]) -> list[str]:
    return [job.job_id for job in found]


def at_once(count: int, action: Callable[[int], Any]) -> list[Any]:
    """Run `action(0..count-1)` in threads that start together; answers are results or refusals.

    Raises: what else one of them raised.
    """
    barrier = threading.Barrier(count)
    answers: list[Any] = [None] * count
    faults: list[Exception] = []

    def run(number: int) -> None:
        barrier.wait()
        try:
            answers[number] = action(number)
        except (Conflict, Fenced, Invalid) as error:
            answers[number] = error
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for fault in faults:
        raise fault
    return answers


def open_at_once(url: str, clients: int) -> None:
    """Many open a new store at the same instant, and each makes a job: all of them do."""

    def run(number: int) -> None:
        opened = open_store(url)
        opened.create([new_job(f"job{number}")])
        opened.close()

    assert at_once(clients, run) == [None] * clients
    opened = open_store(url)
    assert len(opened.list()) == clients
    opened.close()
