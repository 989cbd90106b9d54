"""Every (state, event) pair, the allowed and the forbidden, in the table and through the verbs of a store."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from lockstep.errors import Fenced, Invalid, LockstepError
from lockstep.job import ENDED, TRANSITIONS, CommitLease, Event, Job, Lease, Progress, State, TaskState, after
from lockstep.store import JobStore
from lockstep.store.sql import SqlStore
from lockstep.store.zookeeper import ZooKeeperStore
from lockstep.store.zookeeper_edit import Edit
from lockstep.store.zookeeper_session import Moved
from tests.store_lab import LEASE_S, job_in, moves

PAIRS = [pytest.param(state, event, id=f"{state}-{event}") for state, event in product(State, Event)]


def test_an_ended_job_moves_only_after_a_failure_by_a_retry_or_by_giving_it_up() -> None:
    leaving = {(state, event) for state, event in TRANSITIONS if state in ENDED}
    assert leaving == {(State.FAILED, Event.RETRY), (State.FAILED, Event.KILL)}


def test_a_job_completes_only_from_committing() -> None:
    assert [pair for pair, to in TRANSITIONS.items() if to is State.COMPLETED] == [
        (State.COMMITTING, Event.COMMITTED)
    ]


def test_every_live_job_can_be_killed_and_can_fail() -> None:
    for state in State:
        if state.live:
            assert after(state, Event.KILL) is State.KILLED
            assert after(state, Event.FAIL) is State.FAILED


def test_every_state_can_be_reached() -> None:
    assert {*TRANSITIONS.values()} == {*State}


def fire(store: JobStore, job: Job, event: Event) -> None:
    """Send the verb that stands for `event`, whatever state the job is in."""
    if event is Event.START:
        store.claim("w2", 1, LEASE_S, {job.job_id})
    elif event is Event.PAUSE:
        store.pause(job.job_id)
    elif event is Event.RESUME:
        store.resume(job.job_id)
    elif event is Event.RETRY:
        store.retry(job.job_id)
    elif event is Event.ALL_TASKS_DONE:
        for task in store.tasks(job.job_id):
            lease = Lease(job.job_id, task.stage, task.index, task.epoch, "w1")
            store.finish(lease, {"row": 10}, [], Progress(10, 100))
    elif job.state is State.COMMITTING or event is Event.COMMITTED:
        claim = store.claim_commit("w2", LEASE_S, {job.job_id})
        commit = claim.lease if claim is not None else CommitLease(job.job_id, job.generation, 1, "w1")
        store.end(commit, event, snapshot_id=42)
    else:
        store.stop(job.job_id, event)


def all_leased(store: JobStore, state: State) -> None:
    """Lease the tasks that are still free, so that they can be finished in this very state."""
    if state is State.RUNNING:
        store.claim("w1", 2, LEASE_S)
    elif state in (State.PENDING, State.PAUSED):
        # Leases outlive a pause: the job waits again while a worker still holds them.
        store.resume("job1")
        store.claim("w1", 2, LEASE_S)
        store.pause("job1")
        if state is State.PENDING:
            store.resume("job1")


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_a_store_makes_the_moves_of_the_table_and_no_other(
    store: JobStore, state: State, event: Event
) -> None:
    job_in(store, state)
    if event is Event.ALL_TASKS_DONE:
        all_leased(store, state)
    job = store.read("job1")
    assert job.state is state
    before = moves(store, "job1")
    refused: LockstepError | None = None
    try:
        fire(store, job, event)
    except (Fenced, Invalid) as error:
        refused = error
    expected = after(state, event)
    job = store.read("job1")
    if expected is None:
        assert job.state is state
        assert moves(store, "job1") == before
    else:
        assert refused is None
        assert job.state is expected
        assert moves(store, "job1")[len(before) :][-1] == event


@pytest.mark.parametrize("state", [*State])
def test_a_move_needs_the_state_that_was_read(store: JobStore, state: State) -> None:
    """The compare-and-set itself: a row that was read before somebody else moved the job changes nothing."""
    job_in(store, state)
    if isinstance(store, ZooKeeperStore):
        seen = store._look("job1")
        for event in Event:
            if after(state, event) is not None:
                edit = Edit(store, replace(seen, version=seen.version + 1), cached=False)
                edit.move(event)
                with pytest.raises(Moved):
                    store._commit(edit)
        assert store.read("job1").state is state
        return
    assert isinstance(store, SqlStore)
    with store._db.write() as conn:
        stale = store._row(conn, "job1").changed({"generation": 99})
    for event in Event:
        if after(state, event) is None:
            continue
        with pytest.raises(LockstepError), store._db.write() as conn:
            store._move(conn, stale, event)
    assert store.read("job1").state is state


def test_a_task_that_is_done_is_never_taken_again(store: JobStore) -> None:
    job_in(store, State.COMMITTING)
    assert store.claim("w2", 5, LEASE_S) == []
    for task in store.tasks("job1"):
        assert task.state is TaskState.DONE
        lease = Lease("job1", task.stage, task.index, task.epoch, "w1")
        with pytest.raises(Fenced):
            store.begin(lease, LEASE_S)
        with pytest.raises(Fenced):
            store.checkpoint(replace(lease, epoch=task.epoch + 1), {}, [], Progress(0, 0), LEASE_S)
