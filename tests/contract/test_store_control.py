"""What every job store promises of what a user asks for: pause, resume, kill, retry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.errors import Conflict, Fenced, Invalid
from lockstep.job import NOTHING_SENT, Event, Lease, Progress, State, Verdict
from lockstep.store import JobStore
from tests.store_lab import (
    LEASE_S,
    REFUSED,
    MovedClock,
    Stores,
    at_once,
    begin_task,
    ids,
    job_in,
    moves,
    new_job,
    run_task,
    staged,
    take_commit,
)

# Pause and resume


def test_a_paused_job_takes_what_is_under_way_and_hands_out_nothing_new(store: JobStore) -> None:
    store.create([new_job("job1", 3)])
    [a, b] = [store.begin(c.lease, LEASE_S).lease for c in store.claim("w1", 2, LEASE_S)]
    for _ in range(2):
        assert store.pause("job1").state is State.PAUSED
    assert store.claim("w2", 1, LEASE_S) == []
    verdict = store.checkpoint(a, {"row": 5}, [staged("a")], Progress(5, 10), LEASE_S)
    assert verdict is Verdict.PAUSE
    assert store.heartbeat({a: Progress(5, 10)}, LEASE_S) == {a: Verdict.PAUSE}
    with pytest.raises(Fenced):
        store.begin(a, LEASE_S)
    store.release(a)
    store.finish(b, {"row": 9}, [staged("b")], Progress(9, 10))
    assert store.read("job1").state is State.PAUSED
    for _ in range(2):
        assert store.resume("job1").state is State.PENDING
    assert begin_task(store, "job1").position == {"row": 5}
    assert moves(store, "job1") == [Event.START, Event.PAUSE, Event.RESUME, Event.START]


def test_a_job_that_was_done_while_paused_goes_on_to_committing_when_resumed(store: JobStore) -> None:
    store.create([new_job("job1")])
    lease = begin_task(store, "job1").lease
    store.pause("job1")
    store.finish(lease, {"row": 9}, [staged("a")], Progress(9, 10))
    assert store.read("job1").state is State.PAUSED
    assert store.claim_commit("w1", LEASE_S) is None
    assert store.resume("job1").state is State.COMMITTING
    assert moves(store, "job1") == [Event.START, Event.PAUSE, Event.RESUME, Event.ALL_TASKS_DONE]


def test_work_that_went_on_through_pause_and_resume_makes_the_job_run_again(store: JobStore) -> None:
    store.create([new_job("job1", 2)])
    [a, b] = [store.begin(c.lease, LEASE_S).lease for c in store.claim("w1", 2, LEASE_S)]
    store.pause("job1")
    store.resume("job1")
    assert store.checkpoint(a, {"row": 5}, [], Progress(5, 10), LEASE_S) is Verdict.GO_ON
    assert store.read("job1").state is State.RUNNING
    store.pause("job1")
    store.resume("job1")
    store.finish(a, {"row": 9}, [], Progress(9, 10))
    assert store.read("job1").state is State.RUNNING
    store.finish(b, {"row": 9}, [], Progress(9, 10))
    assert store.read("job1").state is State.COMMITTING


@pytest.mark.parametrize("state", [State.COMMITTING, State.COMPLETED, State.FAILED, State.KILLED])
def test_what_cannot_be_paused_or_resumed_says_so(store: JobStore, state: State) -> None:
    job_in(store, state)
    with pytest.raises(Invalid, match=state):
        store.pause("job1")
    if state is State.COMMITTING:
        assert store.resume("job1").state is state
    else:
        with pytest.raises(Invalid, match=state):
            store.resume("job1")


# Kill and failure


@pytest.mark.parametrize("event", [Event.KILL, Event.FAIL])
@pytest.mark.parametrize("state", [State.PENDING, State.RUNNING, State.PAUSED])
def test_a_stopped_job_takes_nothing_more(store: JobStore, state: State, event: Event) -> None:
    store.create([new_job("job1", 2)])
    lease = begin_task(store, "job1").lease
    store.checkpoint(lease, {"row": 5}, [staged("a")], Progress(5, 10), LEASE_S)
    store.heartbeat({lease: Progress(8, 20)}, LEASE_S)
    if state is not State.RUNNING:
        store.pause("job1")
    if state is State.PENDING:
        store.resume("job1")
    assert store.read("job1").state is state
    for _ in range(2):
        job = store.stop("job1", event, REFUSED)
    assert job.state is (State.KILLED if event is Event.KILL else State.FAILED)
    assert (job.error, job.rows_done, job.workers) == (REFUSED, 5, ())
    with pytest.raises(Fenced):
        store.checkpoint(lease, {"row": 9}, [staged("b")], Progress(9, 20), LEASE_S)
    with pytest.raises(Fenced):
        store.finish(lease, {"row": 9}, [staged("b")], Progress(9, 20))
    with pytest.raises(Fenced):
        store.fail(lease, REFUSED, 1.0)
    with pytest.raises(Fenced):
        store.begin(lease, LEASE_S)
    assert store.heartbeat({lease: Progress(9, 20)}, LEASE_S) == {lease: Verdict.STOP}
    assert [file.path for file in store.manifest("job1", "write")] == ["/warehouse/a.parquet"]


def test_a_failed_job_is_given_up_with_a_kill_and_keeps_its_error(store: JobStore) -> None:
    store.create([new_job("job1", 2)])
    store.stop("job1", Event.FAIL, REFUSED)
    for _ in range(2):
        job = store.stop("job1", Event.KILL)
        assert (job.state, job.error) == (State.KILLED, REFUSED)
    assert ids(store.unreleased()) == ["job1"]
    with pytest.raises(Invalid):
        store.retry("job1")


def test_a_kill_during_the_commit_is_a_request(store: JobStore) -> None:
    job_in(store, State.COMMITTING)
    commit = take_commit(store, "job1")
    for _ in range(2):
        job = store.stop("job1", Event.KILL)
        assert (job.state, job.kill_requested) == (State.COMMITTING, True)
    assert [entry.event for entry in store.history("job1")].count("kill_requested") == 1
    assert store.renew_commit(commit.lease, LEASE_S).kill_requested
    assert store.stop("job1", Event.FAIL, REFUSED).state is State.COMMITTING
    assert store.end(commit.lease, Event.KILL).state is State.KILLED
    assert store.holders("scope-job1") == []


def test_a_kill_that_comes_after_the_commit_changes_nothing(store: JobStore) -> None:
    job = job_in(store, State.COMPLETED)
    assert store.stop("job1", Event.KILL) == job
    assert job.snapshot_id == 42


def test_a_kill_and_a_finish_at_the_same_instant_leave_one_outcome(
    store: JobStore, store_factory: Stores
) -> None:
    clients = [store_factory() for _ in range(2)]
    for round_ in range(10):
        job_id = f"job{round_}"
        store.create([new_job(job_id)])
        lease = begin_task(store, job_id).lease

        def act(n: int, lease: Lease = lease, job_id: str = job_id) -> object:
            if n == 0:
                return clients[0].stop(job_id, Event.KILL)
            clients[1].finish(lease, {"row": 1}, [staged(job_id)], Progress(1, 1))
            return None

        [stopped, finished] = at_once(2, act)
        job = store.read(job_id)
        if isinstance(finished, Fenced):
            assert (job.state, job.files) == (State.KILLED, 0)
        else:
            assert (job.state, job.kill_requested, job.files) == (State.COMMITTING, True, 1)
        assert stopped.state is job.state
    for client in clients:
        client.close()


# Retry


def test_a_retry_keeps_finished_work_and_begins_its_budgets_anew(store: JobStore, clock: MovedClock) -> None:
    store.create([new_job("job1", 2)])
    run_task(store, "job1")
    lease = begin_task(store, "job1").lease
    store.checkpoint(lease, {"row": 5}, [staged("half")], Progress(5, 10), LEASE_S)
    store.fail(lease, REFUSED, None)
    before = store.read("job1")
    clock.at += 100
    job = store.retry("job1")
    assert (job.state, job.generation) == (State.PENDING, before.generation + 1)
    assert job.commit_id != before.commit_id
    assert (job.error, job.attempts, job.started_at, job.finished_at) == (None, 0, None, None)
    assert (job.tasks_done, job.files, job.fingerprint) == (1, 2, before.fingerprint)
    assert ids(store.holders("scope-job1")) == ["job1"]
    assert store.retry("job1") == job
    with pytest.raises(Fenced):
        store.checkpoint(lease, {"row": 9}, [staged("b")], Progress(9, 20), LEASE_S)
    begun = begin_task(store, "job1")
    assert (begun.position, begun.lease.epoch) == ({"row": 5}, lease.epoch + 2)
    task = store.tasks("job1")[1]
    assert (task.attempts, task.started_at, task.error) == (1, clock.at, None)
    store.finish(begun.lease, {"row": 9}, [staged("rest")], Progress(9, 20))
    assert store.read("job1").files == 3


@pytest.mark.parametrize("sent", [False, True])
def test_a_retry_notes_whether_nothing_was_sent_before_it(store: JobStore, sent: bool) -> None:
    job_in(store, State.COMMITTING)
    claim = take_commit(store, "job1")
    if sent:
        store.renew_commit(claim.lease, LEASE_S, attempted=True)
    store.end(claim.lease, Event.FAIL, error=REFUSED)
    store.retry("job1")
    (retry,) = (entry for entry in store.history("job1") if entry.event == Event.RETRY)
    assert (retry.generation, retry.detail) == (2, "" if sent else NOTHING_SENT)


def test_a_retry_after_a_failed_commit_goes_on_to_committing_at_once(store: JobStore) -> None:
    job_in(store, State.COMMITTING)
    old = take_commit(store, "job1")
    store.renew_commit(old.lease, LEASE_S, attempted=True)
    store.stop("job1", Event.KILL)
    store.end(old.lease, Event.FAIL, error=REFUSED)
    job = store.retry("job1")
    assert (job.state, job.commit_attempts, job.commit_started_at) == (State.COMMITTING, 0, None)
    assert (job.kill_requested, job.error) == (False, None)
    new = take_commit(store, "job1")
    assert (new.lease.generation, new.lease.epoch) == (old.lease.generation + 1, old.lease.epoch + 1)
    with pytest.raises(Fenced):
        store.end(old.lease, Event.FAIL, error=REFUSED)
    with pytest.raises(Fenced):
        store.end(replace(new.lease, generation=old.lease.generation), Event.FAIL)
    assert moves(store, "job1")[-2:] == [Event.RETRY, Event.ALL_TASKS_DONE]


@pytest.mark.parametrize("state", [state for state in State if state is not State.FAILED])
def test_only_a_failed_job_is_retried(store: JobStore, state: State) -> None:
    job_in(store, state)
    with pytest.raises(Invalid, match=state):
        store.retry("job1")


def test_a_retry_is_refused_while_another_job_holds_the_rows(store: JobStore) -> None:
    job_in(store, State.FAILED)
    store.create([new_job("job2", scope="scope-job1")])
    with pytest.raises(Conflict) as refused:
        store.retry("job1")
    assert refused.value.job_id == "job2"
    assert store.read("job1").state is State.FAILED


def test_a_retry_may_hold_rows_beside_the_jobs_it_was_created_beside(store: JobStore) -> None:
    store.create([new_job("job1", scope="s"), new_job("job2", scope="s", beside=["job1"])])
    store.stop("job2", Event.FAIL)
    assert store.retry("job2").state is State.PENDING
