"""What a worker does with budgets, stops and outages: the real store, a clock that moves, and an engine
whose waves end when the test says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import Config, load_config
from lockstep.engine import RunTask
from lockstep.errors import ErrorInfo, Fenced, Retryable
from lockstep.job import Event, Lease, State, TaskState
from lockstep.store.sql import SqlStore
from lockstep.waves import LEAST_BEAT_S, STOP_GRACE_S, retry_delay_s
from lockstep.worker import TO_DO, Worker
from tests.store_lab import MovedClock, begin_task, new_job

PROGRESS = {"progress": {"rows": 0, "size_bytes": 0}}


class HandEngine:
    """Implements `Engine`: takes waves and lets the test end them."""

    slots = 2
    driver_host = "127.0.0.1"

    def __init__(self) -> None:
        self.alive = True
        self.waves: dict[str, Future[None]] = {}
        self.leases: list[Lease] = []
        self.cancelled: list[str] = []

    def submit(self, group: str, run_task: RunTask, assignments: Sequence[Any]) -> Future[None]:
        self.waves[group] = Future()
        self.leases += [assignment.lease for assignment in assignments]
        return self.waves[group]

    def cancel(self, group: str) -> None:
        self.cancelled.append(group)

    def close(self) -> None:
        self.alive = False

    def end_wave(self, failure: Exception | None = None) -> None:
        _, wave = self.waves.popitem()
        if failure is None:
            wave.set_result(None)
        else:
            wave.set_exception(failure)


class Room:
    def __init__(self, folder: Path) -> None:
        (folder / "lockstep.toml").write_text("")
        self.config: Config = load_config(folder / "lockstep.toml")
        self.clock = MovedClock()
        self.store = SqlStore(f"sqlite:///{folder}/jobs.db", self.clock)
        self.engine = HandEngine()
        self.worker = Worker(self.config, self.store, self.clock, engine=self.engine)

    def ask(self, verb: str, lease: Lease, **body: Any) -> Any:
        """What an executor asks over the channel."""
        return self.worker._waves.answer(verb, {"lease": vars(lease), **body})

    def begin(self) -> Lease:
        """Let the worker launch the next task, and its executor begin."""
        self.worker._round()
        return Lease(**self.ask("begin", self.engine.leases[-1])["lease"])

    def wait(self, seconds: int, *answering: Lease) -> None:
        """Time passes, the worker beats, and these executors are heard of."""
        for _ in range(seconds):
            self.clock.at += 1
            for lease in answering:
                self.ask("heartbeat", lease, **PROGRESS)
            self.worker._waves.beat()

    def stopped_by_pause(self, job_id: str) -> None:
        lease = self.begin()
        self.store.pause(job_id)
        self.ask("release", lease)
        self.engine.end_wave()
        self.store.resume(job_id)


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path)
    yield room
    room.worker._shut_down()
    room.store.close()


def job(name: str = "j1", tasks: int = 1, **plan: Any) -> Any:
    return new_job(name, tasks, source="parquet:/nowhere", **plan)


def test_a_night_between_two_workers_does_not_spend_the_tasks_deadline(room: Room) -> None:
    room.store.create([job()])
    room.begin()
    room.worker._shut_down()
    room.clock.at += 8 * 3600
    again = Worker(room.config, room.store, room.clock, engine=HandEngine())
    room.worker, room.engine = again, again._waves._engine  # type: ignore[assignment]
    room.begin()
    room.clock.at += 1
    room.worker._waves.beat()
    assert room.store.read("j1").state is State.RUNNING


def test_a_machine_that_was_off_does_not_spend_the_tasks_deadline(room: Room) -> None:
    room.store.create([job()])
    begin_task(room.store, "j1")
    room.clock.at += 8 * 3600
    room.begin()
    room.clock.at += 1
    room.worker._waves.beat()
    assert room.store.read("j1").state is State.RUNNING


def test_pauses_do_not_spend_attempts(room: Room) -> None:
    room.store.create([job()])
    for _ in range(20):
        room.stopped_by_pause("j1")
    room.begin()
    assert room.store.read("j1").state is State.RUNNING
    assert room.store.tasks("j1")[0].attempts == 1


def test_a_first_attempt_that_hangs_ends_at_the_tasks_deadline(room: Room) -> None:
    room.store.create([job()])
    lease = room.begin()
    for _ in range(70):
        room.clock.at += 60
        room.ask("heartbeat", lease, **PROGRESS)
        room.worker._waves.beat()
    ended = room.store.read("j1")
    assert ended.state is State.FAILED
    assert ended.error is not None
    assert "longer than 3600 s" in ended.error.message
    assert room.engine.cancelled


def test_a_retry_has_the_jobs_deadline_again(room: Room) -> None:
    room.store.create([job(deadline_s=60)])
    room.clock.at += 61
    room.worker._round()
    assert room.store.read("j1").state is State.FAILED
    room.store.retry("j1")
    room.begin()
    assert room.store.read("j1").state is State.RUNNING
    room.clock.at += 61
    room.worker._round()
    assert room.store.read("j1").state is State.FAILED


def test_a_job_that_cannot_run_here_spends_its_own_budget_and_no_other(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    stuck = new_job("j1", 1, source="clickhouse://u:${NOT_SET_HERE}@h/db/t")
    room.store.create([stuck, job("j2")])
    for _ in range(20):
        room.worker._round()
        room.clock.at += 120
        room.worker._waves.beat()
    ended = room.store.read("j1")
    assert ended.state is State.FAILED
    assert ended.error is not None
    assert "NOT_SET_HERE" in ended.error.message
    assert room.store.read("j2").state is State.RUNNING


def test_a_dead_jvm_ends_the_worker_and_no_job(room: Room) -> None:
    room.store.create([job("j1"), job("j2")])
    room.begin()
    room.engine.alive = False
    while room.engine.waves:
        room.engine.end_wave(ConnectionRefusedError("the gateway is gone"))
    with pytest.raises(Retryable, match="Java process has ended"):
        room.worker.run("idle")
    assert {one.state for one in room.store.list()} == {State.RUNNING}
    assert {task.attempts for one in ("j1", "j2") for task in room.store.tasks(one)} == {0}


def test_a_wave_that_dies_before_its_task_begins_spends_an_attempt(room: Room) -> None:
    room.store.create([job()])
    for _ in range(20):
        room.worker._round()
        if room.engine.waves:
            room.engine.end_wave(RuntimeError("no Python on this executor"))
        room.clock.at += 120
    ended = room.store.read("j1")
    assert ended.state is State.FAILED
    assert ended.error is not None
    assert "no Python" in ended.error.message


def test_a_wave_that_dies_while_the_store_is_away_leaves_its_task_to_others(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.store.create([job()])
    room.worker._round()

    def away(*_: Any, **__: Any) -> Any:
        raise Retryable("the store is away")

    with monkeypatch.context() as outage:
        outage.setattr(room.store, "begin", away)
        outage.setattr(room.store, "fail", away)
        room.engine.end_wave(RuntimeError("Spark died"))
    room.clock.at += 31
    (claim,) = room.store.claim("another", 1, 30)
    assert claim.task.state is TaskState.LEASED


def test_an_executor_that_waits_for_the_store_is_not_silent(room: Room) -> None:
    room.store.create([job()])
    lease = room.begin()
    with room.worker._waves.being_answered(lease):
        room.clock.at += 120
        room.worker._waves.beat()
    assert room.store.read("j1").state is State.RUNNING
    assert room.engine.cancelled == []


def test_an_executor_that_is_silent_is_given_up(room: Room) -> None:
    room.store.create([job()])
    room.begin()
    room.wait(35)
    (task,) = room.store.tasks("j1")
    assert task.state is TaskState.WAITING
    assert task.error is not None
    assert "stopped answering" in task.error.message
    assert room.engine.cancelled


def test_neighbours_of_a_task_that_was_forced_to_stop_lose_no_attempt(room: Room) -> None:
    room.store.create([job(tasks=2)])
    room.worker._round()
    silent, neighbour = (Lease(**room.ask("begin", lease)["lease"]) for lease in list(room.engine.leases))
    room.wait(35, neighbour)
    room.engine.end_wave(RuntimeError("cancelled"))
    attempts = {task.index: task.attempts for task in room.store.tasks("j1")}
    assert attempts == {silent.index: 1, neighbour.index: 0}


def test_a_standstill_of_the_machine_is_not_taken_for_the_silence_of_an_executor(room: Room) -> None:
    room.store.create([job()])
    lease = room.begin()
    room.wait(5, lease)
    room.clock.at += 600
    room.wait(5)
    assert room.engine.cancelled == []
    assert room.ask("checkpoint", lease, position={"row": 1}, staged=[], **PROGRESS) == "go_on"


def test_after_a_standstill_of_the_machine_a_worker_does_not_take_its_own_tasks_again(room: Room) -> None:
    room.store.create([job()])
    lease = room.begin()
    room.clock.at += room.config.limits.lease_s + 1
    room.worker._round()
    assert len(room.engine.leases) == 1
    assert room.ask("checkpoint", lease, position={"row": 1}, staged=[], **PROGRESS) == "go_on"
    assert room.store.claim("another", 1, 30) == []


def test_an_attempt_that_does_not_stop_is_forced_as_soon_as_its_grace_is_over(room: Room) -> None:
    room.store.create([job()])
    room.begin()
    room.store.stop("j1", Event.KILL)
    room.worker._waves.beat()
    waited_s = 0.0
    while not room.engine.cancelled:
        step_s = room.worker._waves.until_next_beat_s()
        assert step_s > 0
        waited_s += step_s
        room.clock.at += step_s
        room.worker._waves.beat()
    assert waited_s == pytest.approx(STOP_GRACE_S, abs=LEAST_BEAT_S)


def test_a_kill_reaches_a_running_task_with_its_next_heartbeat(room: Room) -> None:
    room.store.create([job()])
    lease = room.begin()
    room.store.stop("j1", Event.KILL)
    room.worker._waves.beat()
    assert room.ask("heartbeat", lease, **PROGRESS) == "stop"
    with pytest.raises(Fenced):
        room.ask("checkpoint", lease, position={"row": 1}, staged=[], **PROGRESS)


def test_a_store_that_is_away_at_the_end_does_not_end_the_worker(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = room.store.list
    calls: list[Any] = []

    def away_at_first(*about: Any) -> Any:
        calls.append(about)
        if len(calls) < 3:
            raise Retryable("the store is away")
        return there(*about)

    monkeypatch.setattr(room.store, "list", away_at_first)
    room.worker.run("idle")
    assert len(calls) >= 3


@pytest.mark.parametrize("until", ["idle", "jobs_ended"])
def test_a_worker_that_has_nothing_to_do_reads_the_store_once_a_round(
    room: Room, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    calls: list[Any] = []
    verbs = {name: getattr(room.store, name) for name in ("list", "unreleased", "read")}
    for name in verbs:

        def counted(*about: Any, name: str = name) -> Any:
            calls.append((name, *about))
            return verbs[name](*about)

        monkeypatch.setattr(room.store, name, counted)
    room.worker.run(until)
    # The failed ones are looked at now and then, to be forgotten in time.
    assert calls == [("list", TO_DO), ("unreleased",), ("list", {State.FAILED})]


def test_a_permanent_error_is_not_tried_again(room: Room) -> None:
    room.store.create([job()])
    task = room.store.tasks("j1")[0]
    limits = room.config.limits
    assert retry_delay_s(task, ErrorInfo("Corrupt", "damaged"), limits, 0.0) is None
    assert retry_delay_s(task, ErrorInfo("ValueError", "a bug"), limits, 0.0) is not None


def fails(room: Room, lease: Lease) -> None:
    """What an executor says when its storage is away."""
    begun = Lease(**room.ask("begin", lease)["lease"])
    error = ErrorInfo("Retryable", "s3://away cannot be reached").to_json()
    room.ask("fail", begun, error=error)


def finishes(room: Room, lease: Lease) -> None:
    begun = Lease(**room.ask("begin", lease)["lease"])
    room.ask("finish", begun, position={}, staged=[], **PROGRESS)


def launched(room: Room) -> list[Lease]:
    """The tasks that one round of the worker starts."""
    before = len(room.engine.leases)
    room.worker._round()
    return room.engine.leases[before:]


def test_jobs_on_a_dead_storage_leave_the_slots_to_those_on_another(room: Room) -> None:
    room.engine.slots = 4
    stuck = [job(f"stuck{i}", 5, location="s3://away/t") for i in range(20)]
    room.store.create(stuck)
    for lease in launched(room):
        fails(room, lease)
    room.store.create([job("healthy", 50, location="s3://there/t")])
    for _ in range(10):
        started = launched(room)
        running = room.worker._waves.jobs_of_held()
        assert sum(name.startswith("stuck") for name in running) <= 1
        assert running.count("healthy") >= 4
        finishes(room, next(lease for lease in started if lease.job_id == "healthy"))


def test_a_dead_storage_is_tried_although_others_have_work_and_gets_all_slots_when_it_is_back(
    room: Room,
) -> None:
    room.engine.slots = 4
    room.store.create([job("stuck", 20, location="s3://away/t"), job("healthy", 50, location="s3://there/t")])
    first = launched(room)
    for lease in first:
        (fails if lease.job_id == "stuck" else finishes)(room, lease)
    probe = [lease for lease in launched(room) if lease.job_id == "stuck"]
    assert len(probe) == 1
    finishes(room, probe[0])
    room.clock.at += 1
    launched(room)
    running = room.worker._waves.jobs_of_held()
    assert running.count("stuck") + running.count("healthy") == 5
    for lease in [held.lease for held in room.worker._waves._held.values() if held.lease.job_id == "healthy"]:
        finishes(room, lease)
    launched(room)
    assert room.worker._waves.jobs_of_held().count("stuck") > 1


def test_a_slot_stays_free_for_whoever_comes_while_only_a_dead_storage_has_work(room: Room) -> None:
    room.store.create([job("stuck", 20, location="s3://away/t")])
    for lease in launched(room):
        fails(room, lease)
    for _ in range(5):
        room.clock.at += 70
        launched(room)
        assert len(room.worker._waves.jobs_of_held()) == 1
    room.store.create([job("healthy", 1, location="s3://there/t")])
    assert [lease.job_id for lease in launched(room)] == ["healthy"]


def test_a_failed_task_says_since_when_it_waits(room: Room) -> None:
    room.store.create([job()])
    fails(room, launched(room)[0])
    (task,) = room.store.tasks("j1")
    assert task.error is not None
    assert task.error.at == room.clock.at
    assert task.next_attempt_at is not None
    assert task.next_attempt_at > room.clock.at
