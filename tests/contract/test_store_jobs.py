"""What every job store promises of jobs: made, read, kept as long as they should be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.errors import Conflict, Invalid, NoSuchJob
from lockstep.job import Event, Fingerprint, Job, Kind, Piece, State
from lockstep.store import JobStore
from tests.store_lab import LEASE_S, MovedClock, Stores, at_once, ids, job_in, moves, new_job, run_task

# Making jobs


def test_a_created_job_is_read_as_it_was_planned(store: JobStore, clock: MovedClock) -> None:
    new = new_job("job1", 3, pieces=[Piece("all_1_3_1", 1, 3), Piece("x.parquet")])
    [job] = store.create([new])
    assert job == store.read("job1")
    assert (job.plan, job.holding, job.request_id) == (new.plan, new.holding, new.request_id)
    assert (job.state, job.stage, job.tasks_total, job.tasks_done) == (State.PENDING, "write", 3, 0)
    assert (job.created_at, job.started_at, job.fingerprint) == (clock.at, None, Fingerprint())
    assert [(task.index, task.descriptor, task.rows) for task in store.tasks("job1")] == [
        (i, {"part": i}, 10) for i in range(3)
    ]


def test_a_job_outlives_the_store_that_made_it(store: JobStore, store_factory: Stores) -> None:
    store.create([new_job("job1", 2)])
    run_task(store, "job1")
    other = store_factory()
    assert other.read("job1") == store.read("job1")
    assert other.tasks("job1") == store.tasks("job1")
    other.close()


def test_jobs_are_created_all_or_none(store: JobStore) -> None:
    store.create([new_job("old", scope="s")])
    with pytest.raises(Conflict):
        store.create([new_job("job1"), new_job("job2", scope="s"), new_job("job3")])
    assert ids(store.list()) == ["old"]
    assert ids(store.holders("scope-job1")) == []


def test_a_job_without_tasks_goes_straight_on_to_committing(store: JobStore) -> None:
    [job] = store.create([new_job("job1", 0)])
    assert job.state is State.COMMITTING
    assert moves(store, "job1") == [Event.ALL_TASKS_DONE]
    assert store.claim_commit("w1", LEASE_S) is not None


def test_creating_again_answers_with_what_is_there(store: JobStore) -> None:
    jobs = [new_job("job1", 2), new_job("job2", 0)]
    store.create(jobs)
    run_task(store, "job1")
    again = store.create(jobs)
    assert ids(again) == ["job1", "job2"]
    assert again[0].tasks_done == 1
    assert len(store.history("job1")) == 2


def test_a_job_id_of_another_request_is_not_reused(store: JobStore) -> None:
    store.create([new_job("job1")])
    with pytest.raises(Invalid):
        store.create([replace(new_job("job1"), request_id="other")])
    with pytest.raises(Invalid):
        store.create([new_job("job1"), new_job("job2")])
    assert ids(store.list()) == ["job1"]


@pytest.mark.parametrize("state", [*State])
def test_a_live_or_completed_job_holds_its_rows_and_a_failed_or_killed_one_does_not(
    store: JobStore, state: State
) -> None:
    job_in(store, state)
    if state in (State.FAILED, State.KILLED):
        assert store.holders("scope-job1") == []
        store.create([new_job("job2", scope="scope-job1")])
    else:
        assert ids(store.holders("scope-job1")) == ["job1"]
        with pytest.raises(Conflict, match="job1") as refused:
            store.create([new_job("job2", scope="scope-job1")])
        assert refused.value.job_id == "job1"
        assert state in refused.value.message
        assert "--on-existing" in (refused.value.hint or "")


@pytest.mark.parametrize("state", [State.RUNNING, State.COMPLETED])
@pytest.mark.parametrize("kind", Kind)
def test_a_conflict_speaks_of_what_was_asked_for(store: JobStore, kind: Kind, state: State) -> None:
    job_in(store, state, kind=kind)
    with pytest.raises(Conflict, match=rf"^cannot {kind} ") as refused:
        store.create([new_job("job2", scope="scope-job1", kind=kind)])
    if state is State.COMPLETED:
        assert f"it was {kind}ed by job job1" in refused.value.message
    assert ("replace" in str(refused.value.hint)) == (kind is Kind.EXPORT), "an import replaces nothing"


def test_parts_conflict_by_their_rows_not_by_their_names(store: JobStore, clock: MovedClock) -> None:
    part = new_job("part", scope="s", whole=False, pieces=[Piece("all_2_2_0", 2, 2)])
    store.create([part])
    merged = new_job("merged", scope="s", pieces=[Piece("all_1_3_1", 1, 3)])
    with pytest.raises(Conflict) as refused:
        store.create([merged])
    assert refused.value.job_id == "part"
    clock.at += 1
    store.create([new_job("next", scope="s", whole=False, pieces=[Piece("all_4_4_0", 4, 4)])])
    assert ids(store.holders("s")) == ["part", "next"]


def test_a_job_may_hold_the_same_rows_beside_one_it_names(store: JobStore) -> None:
    store.create([new_job("job1", scope="s")])
    store.create([new_job("job2", scope="s", beside=["job1"])])
    with pytest.raises(Conflict) as refused:
        store.create([new_job("job3", scope="s", beside=["job1"])])
    assert refused.value.job_id == "job2"


def test_the_same_partition_asked_for_at_the_same_instant_is_one_job_and_conflicts(
    store: JobStore, store_factory: Stores
) -> None:
    clients = [store_factory() for _ in range(4)]
    for round_ in range(15):

        def create(n: int, round_: int = round_) -> Job:
            return clients[n].create([new_job(f"job-{round_}-{n}", scope=f"s{round_}")])[0]

        answers = at_once(4, create)
        [winner] = [answer for answer in answers if not isinstance(answer, Conflict)]
        assert {answer.job_id for answer in answers} == {winner.job_id}
        assert ids(store.holders(f"s{round_}")) == [winner.job_id]
    for client in clients:
        client.close()


# Reading


def test_jobs_are_listed_newest_first_by_state_and_up_to_a_limit(store: JobStore, clock: MovedClock) -> None:
    for number in range(4):
        store.create([new_job(f"job{number}", number)])
        clock.at += 1
    assert ids(store.list()) == ["job3", "job2", "job1", "job0"]
    assert ids(store.list(limit=2)) == ["job3", "job2"]
    assert ids(store.list({State.COMMITTING})) == ["job0"]
    assert ids(store.list({State.KILLED})) == []
    assert ids(store.list(set())) == []


def test_a_job_is_found_by_a_prefix_that_is_not_ambiguous(store: JobStore) -> None:
    store.create([new_job("abc1"), new_job("abc2"), new_job("abd"), new_job("ab%")])
    assert store.find("abd").job_id == "abd"
    assert store.find("abc1").job_id == "abc1"
    assert store.find("ab%").job_id == "ab%"
    with pytest.raises(Invalid, match="abc1, abc2"):
        store.find("abc")
    for nothing in ("x", "", "ABD", "%"):
        with pytest.raises(NoSuchJob):
            store.find(nothing)


def test_an_exact_id_is_found_although_another_one_begins_with_it(store: JobStore) -> None:
    store.create([new_job("a"), new_job("ab")])
    assert store.find("a").job_id == "a"


def test_verbs_on_a_job_that_is_not_there_say_so(store: JobStore) -> None:
    for verb in (store.read, store.tasks, store.history, store.pause, store.resume, store.retry):
        with pytest.raises(NoSuchJob):
            verb("nobody")
    with pytest.raises(NoSuchJob):
        list(store.manifest("nobody", "write"))
    with pytest.raises(NoSuchJob):
        store.stop("nobody", Event.KILL)


# Pins and time to live


def test_pins_of_completed_and_killed_jobs_are_known_until_they_are_gone(store: JobStore) -> None:
    for state in (State.PENDING, State.FAILED, State.COMPLETED, State.KILLED):
        job_in(store, state, f"job-{state}")
    assert {*ids(store.unreleased())} == {"job-completed", "job-killed"}
    for _ in range(2):
        store.released("job-killed")
    assert ids(store.unreleased()) == ["job-completed"]
    assert store.read("job-killed").released


def test_ended_jobs_are_forgotten_after_their_time_to_live(store: JobStore, clock: MovedClock) -> None:
    for state in State:
        job_in(store, state, f"job-{state}")
        store.released(f"job-{state}")
    job_in(store, State.COMPLETED, "job-pinned")
    clock.at += 99
    assert store.expire(100) == []
    clock.at += 2
    assert {*store.expire(100, swept={"job-killed"})} == {"job-completed", "job-killed"}
    assert store.expire(100, swept={"job-killed"}) == []
    assert "job-pinned" in ids(store.list())
    with pytest.raises(NoSuchJob):
        store.read("job-completed")
    store.create([new_job("again", scope="scope-job-completed")])


@pytest.mark.parametrize("way", ["while it ran", "after a retry", "while it waited"])
def test_a_killed_job_that_may_have_written_is_kept_until_it_is_swept(
    store: JobStore, clock: MovedClock, way: str
) -> None:
    if way == "while it waited":
        store.create([new_job("job1")])
    else:
        job_in(store, State.RUNNING if way == "while it ran" else State.FAILED, "job1")
    if way == "after a retry":
        store.retry("job1")
    store.stop("job1", Event.KILL)
    store.released("job1")
    clock.at += 101
    assert store.expire(100) == ([] if way != "while it waited" else ["job1"])
    assert store.expire(100, swept=["job1"]) == (["job1"] if way != "while it waited" else [])
    assert store.list() == []
