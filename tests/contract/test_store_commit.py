"""What every job store promises of the commit of a job."""

from __future__ import annotations

import pytest

from lockstep.errors import Conflict, ErrorInfo, Fenced
from lockstep.job import Event, State
from lockstep.store import JobStore
from tests.store_lab import LEASE_S, REFUSED, MovedClock, Stores, at_once, ids, job_in, new_job, take_commit


def test_why_a_commit_waits_is_shown_until_it_ends(store: JobStore) -> None:
    job_in(store, State.COMMITTING)
    lease = take_commit(store, "job1").lease
    error = ErrorInfo("Retryable", "the catalog does not answer", "wait", at=1_700_000_001.5)
    assert store.renew_commit(lease, LEASE_S, error=error).error == error
    assert store.renew_commit(lease, LEASE_S).error == error
    assert store.end(lease, Event.COMMITTED, snapshot_id=42).error is None


def test_one_committer_at_a_time_each_with_a_newer_epoch(store: JobStore, clock: MovedClock) -> None:
    job_in(store, State.COMMITTING)
    started = clock.at
    first = take_commit(store, "job1", "w1")
    assert (first.job.commit_started_at, first.job.workers) == (started, ("w1",))
    assert store.claim_commit("w2", LEASE_S) is None
    assert store.renew_commit(first.lease, LEASE_S, attempted=True).commit_attempts == 1
    clock.at += LEASE_S
    second = take_commit(store, "job1", "w2")
    assert second.lease.epoch > first.lease.epoch
    assert (second.job.commit_started_at, second.job.commit_attempts) == (started, 1)
    for event in (Event.COMMITTED, Event.FAIL, Event.KILL):
        with pytest.raises(Fenced):
            store.end(first.lease, event, snapshot_id=7)
    with pytest.raises(Fenced):
        store.renew_commit(first.lease, LEASE_S)
    store.yield_commit(first.lease, 0)
    assert store.claim_commit("w3", LEASE_S) is None
    assert store.end(second.lease, Event.COMMITTED, snapshot_id=8).snapshot_id == 8


def test_a_commit_that_was_given_back_waits_for_its_time(store: JobStore, clock: MovedClock) -> None:
    job_in(store, State.COMMITTING)
    first = take_commit(store, "job1", "w1")
    for _ in range(2):
        store.yield_commit(first.lease, 50.0)
    assert store.read("job1").workers == ()
    clock.at += 49
    assert store.claim_commit("w2", LEASE_S) is None
    clock.at += 1
    assert take_commit(store, "job1", "w2").lease.epoch == first.lease.epoch + 1


def test_a_kill_takes_the_commit_from_a_committer_that_sleeps(store: JobStore) -> None:
    job_in(store, State.COMMITTING)
    sleeper = take_commit(store, "job1", "w1")
    taken = store.claim_commit("w2", LEASE_S, {"job1"}, force=True)
    assert taken is not None
    store.end(taken.lease, Event.KILL)
    with pytest.raises(Fenced):
        store.end(sleeper.lease, Event.COMMITTED, snapshot_id=1)
    assert store.read("job1").state is State.KILLED


def test_commits_are_claimed_only_from_the_jobs_that_are_named(store: JobStore) -> None:
    store.create([new_job("job1", 0), new_job("job2", 0)])
    assert store.claim_commit("w1", LEASE_S, set()) is None
    assert take_commit(store, "job2").job.job_id == "job2"
    assert store.claim_commit("w1", LEASE_S, {"job2"}) is None


@pytest.mark.parametrize("event", [Event.COMMITTED, Event.FAIL, Event.KILL])
def test_an_end_that_is_sent_again_answers_the_same_and_another_one_is_refused(
    store: JobStore, event: Event
) -> None:
    job_in(store, State.COMMITTING)
    lease = take_commit(store, "job1").lease
    error = REFUSED if event is Event.FAIL else None
    snapshot = 2**62 + 1 if event is Event.COMMITTED else None
    job = store.end(lease, event, snapshot_id=snapshot, error=error)
    assert store.end(lease, event, snapshot_id=snapshot, error=error) == job
    assert (job.snapshot_id, job.error) == (snapshot, error)
    for other in {Event.COMMITTED, Event.FAIL, Event.KILL} - {event}:
        with pytest.raises(Fenced):
            store.end(lease, other)
    assert store.read("job1") == job


def test_only_one_of_many_takes_a_commit(store: JobStore, store_factory: Stores) -> None:
    clients = [store_factory() for _ in range(4)]
    for round_ in range(10):
        store.create([new_job(f"job{round_}", 0)])
        answers = at_once(4, lambda n: clients[n].claim_commit(f"w{n}", LEASE_S))
        assert sum(answer is not None for answer in answers) == 1
    for client in clients:
        client.close()


def test_a_replaced_job_gives_up_what_it_holds_when_the_replacement_is_published(store: JobStore) -> None:
    old = job_in(store, State.COMPLETED)
    store.create([new_job("new", 0, scope="scope-job1", beside=["job1"], replaces=(old.commit_id,))])
    assert ids(store.holders("scope-job1")) == ["job1", "new"]
    lease = take_commit(store, "new").lease
    store.end(lease, Event.COMMITTED, snapshot_id=5)
    assert ids(store.holders("scope-job1")) == ["new"]
    assert store.read("job1").state is State.COMPLETED
    with pytest.raises(Conflict) as refused:
        store.create([new_job("next", scope="scope-job1", beside=["job1"])])
    assert refused.value.job_id == "new"


def test_a_replacement_that_failed_leaves_the_earlier_job_in_its_place(store: JobStore) -> None:
    old = job_in(store, State.COMPLETED)
    store.create([new_job("new", 0, scope="scope-job1", beside=["job1"], replaces=(old.commit_id,))])
    store.end(take_commit(store, "new").lease, Event.FAIL, error=REFUSED)
    assert ids(store.holders("scope-job1")) == ["job1"]
