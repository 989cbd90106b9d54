"""What every job store promises. One suite; each store is one more parameter of `store_factory`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import Conflict, ErrorInfo, Fenced, Invalid, NoSuchJob
from lockstep.job import (
    Event,
    Fingerprint,
    Job,
    Lease,
    Piece,
    Progress,
    State,
    TaskSpec,
    TaskState,
    Verdict,
)
from lockstep.store import JobStore
from tests.store_lab import (
    LEASE_S,
    MovedClock,
    Stores,
    begin_task,
    check_always_true,
    job_in,
    moves,
    new_job,
    run_task,
    staged,
    take_commit,
)

REFUSED = ErrorInfo("Retryable", "storage is away", "wait")


@pytest.fixture
def store(store_factory: Stores) -> Iterator[JobStore]:
    opened = store_factory()
    yield opened
    check_always_true(opened)
    opened.close()


@pytest.fixture
def clock(store_factory: Stores) -> MovedClock:
    return store_factory.clock


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


# Claiming


def test_a_claim_leases_tasks_and_starts_the_job(store: JobStore, clock: MovedClock) -> None:
    store.create([new_job("job1", 3)])
    claims = store.claim("w1", 2, LEASE_S)
    assert [claim.lease for claim in claims] == [Lease("job1", "write", i, 1, "w1") for i in range(2)]
    assert claims[0].job == store.read("job1")
    assert claims[0].task == store.tasks("job1")[0]
    assert claims[0].task.lease_until == clock.at + LEASE_S
    assert (claims[0].job.state, claims[0].job.started_at) == (State.RUNNING, clock.at)
    assert claims[0].job.workers == ("w1",)
    assert moves(store, "job1") == [Event.START]


def test_slots_go_to_the_job_with_the_fewest_leases_then_to_the_oldest(
    store: JobStore, clock: MovedClock
) -> None:
    for number in range(3):
        store.create([new_job(f"job{number}", 10)])
        clock.at += 1
    first = store.claim("w1", 4, LEASE_S)
    assert Counter(claim.lease.job_id for claim in first) == {"job0": 2, "job1": 1, "job2": 1}
    second = store.claim("w2", 4, LEASE_S)
    assert Counter(claim.lease.job_id for claim in second) == {"job1": 2, "job2": 1, "job0": 1}
    store.create([new_job("late", 10)])
    third = store.claim("w1", 2, LEASE_S)
    assert [claim.lease.job_id for claim in third] == ["late", "late"]


def test_a_large_job_does_not_starve_a_small_one(store: JobStore, clock: MovedClock) -> None:
    store.create([new_job("large", 50)])
    store.claim("w1", 10, LEASE_S)
    clock.at += 1
    store.create([new_job("small", 1)])
    assert [claim.lease.job_id for claim in store.claim("w1", 1, LEASE_S)] == ["small"]
    assert len(store.claim("w1", 100, LEASE_S)) == 40


def test_a_claim_takes_only_from_the_jobs_it_names(store: JobStore) -> None:
    store.create([new_job("job1", 2), new_job("job2", 2)])
    assert {claim.lease.job_id for claim in store.claim("w1", 9, LEASE_S, {"job2"})} == {"job2"}
    assert store.claim("w1", 9, LEASE_S, set()) == []
    assert store.claim("w1", 0, LEASE_S) == []
    assert store.read("job1").state is State.PENDING


@pytest.mark.parametrize(
    "state", [State.PAUSED, State.COMMITTING, State.COMPLETED, State.FAILED, State.KILLED]
)
def test_no_task_of_a_job_that_does_not_run_is_claimed(store: JobStore, state: State) -> None:
    job_in(store, state)
    assert store.claim("w2", 9, LEASE_S) == []


def test_an_expired_lease_is_claimed_by_another_worker_and_the_sleeper_changes_nothing(
    store: JobStore, clock: MovedClock
) -> None:
    store.create([new_job("job1")])
    sleeper = begin_task(store, "job1", "w1").lease
    store.checkpoint(sleeper, {"row": 5}, [staged("a", 5)], Progress(5, 100), LEASE_S)
    store.heartbeat({sleeper: Progress(8, 150)}, LEASE_S)
    assert store.read("job1").rows_done == 8
    clock.at += LEASE_S - 0.1
    assert store.claim("w2", 1, LEASE_S) == []
    clock.at += 0.1
    [claim] = store.claim("w2", 1, LEASE_S)
    assert store.read("job1").rows_done == 5
    begun = store.begin(claim.lease, LEASE_S)
    assert (begun.position, begun.rows_done, begun.bytes_done) == ({"row": 5}, 5, 100)
    before = store.tasks("job1")
    with pytest.raises(Fenced):
        store.checkpoint(sleeper, {"row": 9}, [staged("b")], Progress(9, 200), LEASE_S)
    with pytest.raises(Fenced):
        store.finish(sleeper, {"row": 9}, [staged("b")], Progress(9, 200))
    with pytest.raises(Fenced):
        store.fail(sleeper, REFUSED, None)
    with pytest.raises(Fenced):
        store.begin(sleeper, LEASE_S)
    assert store.heartbeat({sleeper: Progress(9, 9)}, LEASE_S) == {sleeper: Verdict.STOP}
    store.release(sleeper)
    assert store.tasks("job1") == before
    assert store.read("job1").state is State.RUNNING


def test_a_lease_that_ran_out_and_that_nobody_took_goes_on(store: JobStore, clock: MovedClock) -> None:
    store.create([new_job("job1")])
    lease = begin_task(store, "job1").lease
    clock.at += 10 * LEASE_S
    assert store.read("job1").workers == ()
    assert store.heartbeat({lease: Progress(1, 1)}, LEASE_S) == {lease: Verdict.GO_ON}
    assert store.claim("w2", 1, LEASE_S) == []
    clock.at += 10 * LEASE_S
    assert store.checkpoint(lease, {"row": 1}, [], Progress(1, 1), LEASE_S) is Verdict.GO_ON
    assert store.claim("w2", 1, LEASE_S) == []


def test_a_dead_worker_is_abandoned_without_waiting_for_its_leases(store: JobStore) -> None:
    store.create([new_job("job1", 2), new_job("job2", 0)])
    [old, _] = store.claim("dead", 2, LEASE_S)
    commit = take_commit(store, "job2", "dead")
    store.abandon("somebody else")
    assert store.claim("w2", 2, LEASE_S) == []
    store.abandon("dead")
    assert len(store.claim("w2", 2, LEASE_S)) == 2
    assert take_commit(store, "job2", "w2").lease.epoch > commit.lease.epoch
    with pytest.raises(Fenced):
        store.begin(old.lease, LEASE_S)


def test_two_workers_never_hold_the_same_task(store: JobStore, store_factory: Stores) -> None:
    store.create([new_job(f"job{number}", 20) for number in range(3)])
    clients = [store_factory() for _ in range(4)]
    answers = at_once(4, lambda n: [c for _ in range(8) for c in clients[n].claim(f"w{n}", 2, LEASE_S)])
    held = [(claim.lease.job_id, claim.lease.index) for claims in answers for claim in claims]
    assert len(held) == len(set(held)) == 60
    for client in clients:
        client.close()


# Running


def test_each_begin_is_a_new_attempt_that_fences_the_one_before(store: JobStore) -> None:
    store.create([new_job("job1")])
    [claim] = store.claim("w1", 1, LEASE_S)
    first = store.begin(claim.lease, LEASE_S).lease
    second = store.begin(claim.lease, LEASE_S).lease
    assert claim.lease.epoch < first.epoch < second.epoch
    assert (store.read("job1").attempts, store.tasks("job1")[0].attempts) == (2, 2)
    with pytest.raises(Fenced):
        store.checkpoint(first, {"row": 1}, [staged("a")], Progress(1, 1), LEASE_S)
    with pytest.raises(Fenced):
        store.begin(replace(claim.lease, worker="w2"), LEASE_S)
    with pytest.raises(Fenced):
        store.begin(replace(claim.lease, epoch=second.epoch + 1), LEASE_S)
    assert store.checkpoint(second, {"row": 1}, [], Progress(1, 1), LEASE_S) is Verdict.GO_ON


def test_the_position_and_its_files_are_one_record(store: JobStore, store_factory: Stores) -> None:
    store.create([new_job("job1", 2)])
    lease = begin_task(store, "job1").lease
    files = [staged(f"f{number}", number, number) for number in range(5)]
    store.checkpoint(lease, {"row": 1}, files[:2], Progress(1, 10), LEASE_S)
    store.checkpoint(lease, {"row": 2}, [], Progress(2, 10), LEASE_S)
    store.checkpoint(lease, {"row": 4}, files[2:4], Progress(4, 30), LEASE_S)
    other = store_factory()
    task = other.tasks("job1")[0]
    assert (task.position, task.rows_done, task.files) == ({"row": 4}, 4, 4)
    assert list(other.manifest("job1", "write")) == files[:4]
    store.finish(lease, {"row": 5}, files[4:], Progress(5, 40))
    assert list(other.manifest("job1", "write")) == files
    job = other.read("job1")
    assert (job.rows_done, job.bytes_done, job.files, job.tasks_done) == (5, 40, 5, 1)
    assert job.fingerprint == sum((file.fingerprint for file in files), Fingerprint())
    other.close()


def test_a_manifest_is_ordered_by_task_then_as_written(store: JobStore) -> None:
    store.create([new_job("job1", 3)])
    leases = [store.begin(claim.lease, LEASE_S).lease for claim in store.claim("w1", 3, LEASE_S)]
    for step in range(2):
        for lease in reversed(leases):
            done = Progress(step, step)
            store.checkpoint(lease, {"row": step}, [staged(f"{lease.index}-{step}")], done, LEASE_S)
    names = [file.path.rpartition("/")[2] for file in store.manifest("job1", "write")]
    assert names == [f"{task}-{step}.parquet" for task in range(3) for step in range(2)]


def test_a_checkpoint_that_is_sent_again_is_stored_once(store: JobStore) -> None:
    store.create([new_job("job1")])
    lease = begin_task(store, "job1").lease
    for _ in range(3):
        verdict = store.checkpoint(lease, {"row": 5}, [staged("a")], Progress(5, 10), LEASE_S)
        assert verdict is Verdict.GO_ON
    assert [file.path for file in store.manifest("job1", "write")] == ["/warehouse/a.parquet"]
    for _ in range(3):
        store.finish(lease, {"row": 9}, [staged("b")], Progress(9, 20))
    job = store.read("job1")
    assert (job.state, job.tasks_done, job.files, job.rows_done) == (State.COMMITTING, 1, 2, 9)
    assert moves(store, "job1") == [Event.START, Event.ALL_TASKS_DONE]


def test_a_late_copy_of_an_earlier_checkpoint_does_not_take_the_position_back(store: JobStore) -> None:
    store.create([new_job("job1")])
    lease = begin_task(store, "job1").lease
    store.checkpoint(lease, {"row": 5}, [staged("a")], Progress(5, 10), LEASE_S)
    store.checkpoint(lease, {"row": 9}, [staged("b")], Progress(9, 20), LEASE_S)
    with pytest.raises(Fenced):
        store.checkpoint(lease, {"row": 5}, [staged("a")], Progress(5, 10), LEASE_S)
    assert store.tasks("job1")[0].position == {"row": 9}
    assert len(list(store.manifest("job1", "write"))) == 2


def test_a_finish_with_other_content_is_refused_after_the_first(store: JobStore) -> None:
    store.create([new_job("job1", 2)])
    lease = begin_task(store, "job1").lease
    store.finish(lease, {"row": 9}, [staged("a")], Progress(9, 20))
    with pytest.raises(Fenced):
        store.finish(lease, {"row": 9}, [staged("b")], Progress(9, 20))
    with pytest.raises(Fenced):
        store.checkpoint(lease, {"row": 10}, [staged("b")], Progress(10, 30), LEASE_S)
    assert store.read("job1").files == 1


def test_a_finish_without_files_after_a_checkpoint_at_the_same_position_ends_the_task(
    store: JobStore,
) -> None:
    store.create([new_job("job1")])
    lease = begin_task(store, "job1").lease
    store.checkpoint(lease, {"row": 9}, [], Progress(9, 20), LEASE_S)
    store.finish(lease, {"row": 9}, [], Progress(9, 20))
    assert store.read("job1").state is State.COMMITTING


def test_a_finish_that_is_sent_again_answers_although_the_job_has_ended(store: JobStore) -> None:
    store.create([new_job("job1")])
    lease = begin_task(store, "job1").lease
    store.finish(lease, {"row": 9}, [staged("a")], Progress(9, 20))
    store.end(take_commit(store, "job1").lease, Event.COMMITTED, snapshot_id=1)
    store.finish(lease, {"row": 9}, [staged("a")], Progress(9, 20))
    assert store.read("job1").files == 1


def test_only_the_last_task_moves_the_job_on_however_they_race(
    store: JobStore, store_factory: Stores
) -> None:
    clients = [store_factory() for _ in range(4)]
    for round_ in range(8):
        job_id = f"job{round_}"
        store.create([new_job(job_id, 4)])
        leases = [store.begin(c.lease, LEASE_S).lease for c in store.claim("w1", 4, LEASE_S, {job_id})]

        def finish(n: int, leases: list[Lease] = leases) -> None:
            for _ in range(2):
                name = f"{leases[n].job_id}-{n}"
                clients[n].finish(leases[n], {"row": 1}, [staged(name)], Progress(1, 1))

        assert at_once(4, finish) == [None] * 4
        assert store.read(job_id).state is State.COMMITTING
        assert moves(store, job_id) == [Event.START, Event.ALL_TASKS_DONE]
    for client in clients:
        client.close()


def test_a_failed_attempt_waits_for_its_next_try_and_keeps_its_checkpoint(
    store: JobStore, clock: MovedClock
) -> None:
    store.create([new_job("job1")])
    lease = begin_task(store, "job1").lease
    store.checkpoint(lease, {"row": 5}, [staged("a")], Progress(5, 10), LEASE_S)
    for _ in range(2):
        store.fail(lease, REFUSED, 20.0)
    task = store.tasks("job1")[0]
    assert (task.state, task.next_attempt_at) == (TaskState.WAITING, clock.at + 20)
    assert (task.error, task.position, task.owner) == (REFUSED, {"row": 5}, None)
    job = store.read("job1")
    assert (job.state, job.tasks_waiting_for_retry, job.workers) == (State.RUNNING, 1, ())
    assert [entry.event for entry in store.history("job1")].count("task_failed") == 1
    clock.at += 19
    assert store.claim("w2", 1, LEASE_S) == []
    clock.at += 1
    begun = begin_task(store, "job1", "w2")
    assert begun.position == {"row": 5}
    assert store.read("job1").tasks_waiting_for_retry == 0
    assert store.tasks("job1")[0].attempts == 2


def test_a_permanent_failure_ends_task_and_job_together(store: JobStore) -> None:
    store.create([new_job("job1", 3)])
    leases = [store.begin(c.lease, LEASE_S).lease for c in store.claim("w1", 2, LEASE_S)]
    corrupt = ErrorInfo("Corrupt", "part all_1 is damaged \udcff", None)
    for _ in range(2):
        store.fail(leases[1], corrupt, None)
    job = store.read("job1")
    assert (job.state, job.error, job.workers) == (State.FAILED, replace(corrupt, task=1), ())
    assert [task.state for task in store.tasks("job1")] == [
        TaskState.WAITING,
        TaskState.FAILED,
        TaskState.WAITING,
    ]
    assert moves(store, "job1") == [Event.START, Event.FAIL]
    with pytest.raises(Fenced):
        store.finish(leases[0], {"row": 1}, [staged("a")], Progress(1, 1))


def test_a_released_task_can_be_claimed_at_once(store: JobStore) -> None:
    store.create([new_job("job1")])
    lease = begin_task(store, "job1").lease
    store.heartbeat({lease: Progress(7, 7)}, LEASE_S)
    for _ in range(2):
        store.release(lease)
    assert store.read("job1").rows_done == 0
    assert begin_task(store, "job1", "w2").lease.epoch > lease.epoch


def test_progress_moves_with_the_heartbeat_and_never_behind_the_checkpoint(store: JobStore) -> None:
    store.create([new_job("job1", 2), new_job("job2")])
    held = [store.begin(c.lease, LEASE_S).lease for c in store.claim("w1", 3, LEASE_S)]
    store.checkpoint(held[0], {"row": 5}, [staged("a")], Progress(5, 50), LEASE_S)
    gone = Lease("nobody", "write", 0, 1, "w1")
    verdicts = store.heartbeat({held[0]: Progress(3, 30), held[1]: Progress(4, 40), gone: Progress(1, 1)}, 9)
    assert verdicts == {held[0]: Verdict.GO_ON, held[1]: Verdict.GO_ON, gone: Verdict.STOP}
    total = sum(store.read(job_id).rows_done for job_id in ("job1", "job2"))
    assert total == 9
    assert store.heartbeat({}, LEASE_S) == {}


def test_counters_and_prints_hold_64_bits(store: JobStore) -> None:
    store.create([new_job("job1", 2)])
    huge = 2**61
    for name in ("a", "b"):
        lease = begin_task(store, "job1").lease
        store.finish(lease, {"row": huge}, [staged(name, huge, 2**64 - 1)], Progress(huge, huge))
    job = store.read("job1")
    assert (job.rows_done, job.bytes_done) == (2**62, 2**62)
    assert job.fingerprint == Fingerprint(2**62, {"a": 2**64 - 2, "b": 2**64 - 2})


def test_a_manifest_of_ten_thousand_files_comes_back_whole(store: JobStore) -> None:
    store.create([new_job("job1", 2)])
    files = [staged(f"part-{number:06d}", number, number) for number in range(10_000)]
    lease = begin_task(store, "job1").lease
    store.checkpoint(lease, {"row": 1}, files[:6_000], Progress(1, 1), LEASE_S)
    store.finish(lease, {"row": 2}, files[6_000:9_990], Progress(2, 2))
    lease = begin_task(store, "job1").lease
    for number in range(9_990, 10_000):
        store.checkpoint(lease, {"row": number}, [files[number]], Progress(number, number), LEASE_S)
    assert list(store.manifest("job1", "write")) == files
    assert next(store.manifest("job1", "write")) == files[0]


def test_a_hundred_thousand_files_of_one_job_are_read_one_by_one_and_completed(store_factory: Stores) -> None:
    store = store_factory()
    store.create([new_job("job1", 20)])
    for claim in store.claim("w1", 20, LEASE_S):
        lease = store.begin(claim.lease, LEASE_S).lease
        files = [staged(f"{lease.index}-{number}") for number in range(5_000)]
        store.finish(lease, {"row": 50_000}, files, Progress(50_000, 500_000))
    expected = (f"/warehouse/{index}-{number}.parquet" for index in range(20) for number in range(5_000))
    manifest = store.manifest("job1", "write")
    assert iter(manifest) is manifest
    assert all(file.path == path for file, path in zip(manifest, expected, strict=True))
    job = store.end(take_commit(store, "job1").lease, Event.COMMITTED, snapshot_id=42)
    assert (job.state, job.files, job.rows_done) == (State.COMPLETED, 100_000, 1_000_000)
    assert job.fingerprint == Fingerprint(1_000_000, {"a": 700_000, "b": 2**64 - 100_000})
    store.close()


# Stages


def test_a_job_goes_on_to_the_next_stage_when_all_its_tasks_are_done(store: JobStore) -> None:
    store.create([new_job("job1", 2, stages=("map", "merge"))])
    run_task(store, "job1")
    merges = [TaskSpec({"range": i}, 5) for i in range(3)]
    with pytest.raises(Fenced):
        store.advance("job1", "map", "merge", merges)
    run_task(store, "job1")
    assert store.read("job1").state is State.RUNNING
    assert store.read("job1").fingerprint is None
    for _ in range(2):
        job = store.advance("job1", "map", "merge", merges)
    assert (job.stage, job.tasks_total, job.tasks_done, job.rows_done) == ("merge", 3, 0, 0)
    assert [(task.stage, task.index) for task in store.tasks("job1")] == [
        ("map", 0),
        ("map", 1),
        ("merge", 0),
        ("merge", 1),
        ("merge", 2),
    ]
    with pytest.raises(Fenced):
        store.advance("job1", "map", "sort", [])
    for _ in range(3):
        run_task(store, "job1")
    job = store.read("job1")
    assert (job.state, job.fingerprint and job.fingerprint.rows) == (State.COMMITTING, 30)
    assert len(list(store.manifest("job1", "map"))) == 2
    assert len(list(store.manifest("job1", "merge"))) == 3


def test_an_empty_last_stage_goes_on_to_committing(store: JobStore) -> None:
    store.create([new_job("job1", 1, stages=("map", "merge"))])
    run_task(store, "job1")
    assert store.advance("job1", "map", "merge", []).state is State.COMMITTING


def test_a_paused_or_ended_job_does_not_advance(store: JobStore) -> None:
    store.create([new_job("job1", 1, stages=("map", "merge"))])
    run_task(store, "job1")
    store.pause("job1")
    with pytest.raises(Fenced):
        store.advance("job1", "map", "merge", [])
    store.resume("job1")
    assert store.advance("job1", "map", "merge", [TaskSpec({}, 1)]).state is State.RUNNING
    store.stop("job1", Event.KILL)
    with pytest.raises(Fenced):
        store.advance("job1", "merge", "more", [])


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


# The commit


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


# Death of processes


def test_what_was_answered_survives_a_kill_and_what_was_not_is_there_whole_or_not_at_all(
    store_factory: Stores,
) -> None:
    root = Path(__file__).parents[2]
    script = Path(__file__).with_name("store_in_a_loop.py")
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
    answered: list[list[str]] = []
    children = [
        subprocess.Popen(
            [sys.executable, str(script), store_factory.url, f"child{number}"],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for number in range(3)
    ]
    try:
        for child, lines in zip(children, (5, 17, 40), strict=True):
            assert child.stdout is not None
            answered += [child.stdout.readline().split() for _ in range(lines)]
            child.kill()
    finally:
        for child in children:
            child.kill()
            rest, _ = child.communicate()
            answered += [line.split() for line in rest.split("\n")[:-1]]
    store = store_factory()
    check_always_true(store)
    jobs = {job.job_id: job for job in store.list()}
    for verb, job_id, *path in answered:
        if verb == "completed":
            assert jobs[job_id].state is State.COMPLETED
        elif verb == "staged":
            assert path[0] in [file.path for file in store.manifest(job_id, "write")]
    assert all(job_id in jobs and f"{job_id}-twin" in jobs for _, job_id, *_ in answered)
    assert len(answered) >= 62
    store.close()


# Two clients and the same verb


def _at(state: State, act: Callable[[JobStore, str], Any]) -> Callable[[JobStore, str], Any]:
    """A race of `act` on a job that is in `state`."""

    def prepare(store: JobStore, job_id: str) -> Callable[[JobStore, int], Any]:
        job_in(store, state, job_id)
        return lambda client, _n: act(client, job_id)

    return prepare


def _with_lease(act: Callable[[JobStore, Lease], Any]) -> Callable[[JobStore, str], Any]:
    """A race of `act` with one lease of a running job."""

    def prepare(store: JobStore, job_id: str) -> Callable[[JobStore, int], Any]:
        store.create([new_job(job_id, 2)])
        lease = begin_task(store, job_id).lease
        return lambda client, _n: act(client, lease)

    return prepare


def _ending(store: JobStore, job_id: str) -> Callable[[JobStore, int], Any]:
    """Two committers that both hold the lease's copy, and disagree."""
    job_in(store, State.COMMITTING, job_id)
    lease = take_commit(store, job_id).lease
    events = (Event.COMMITTED, Event.KILL)
    return lambda client, n: client.end(lease, events[n], snapshot_id=5 if n == 0 else None)


def _advancing(store: JobStore, job_id: str) -> Callable[[JobStore, int], Any]:
    store.create([new_job(job_id, 1, stages=("map", "merge"))])
    run_task(store, job_id)
    return lambda client, _n: client.advance(job_id, "map", "merge", [TaskSpec({}, 1)])


def _expiring(store: JobStore, job_id: str) -> Callable[[JobStore, int], Any]:
    job_in(store, State.KILLED, job_id)
    store.released(job_id)
    return lambda client, _n: client.expire(-1.0, swept=[job_id])


RACES: dict[str, Callable[[JobStore, str], Callable[[JobStore, int], Any]]] = {
    "create": lambda _store, job_id: lambda client, _n: client.create([new_job(job_id, 3)]),
    "begin": _with_lease(lambda client, lease: client.begin(lease, LEASE_S)),
    "checkpoint": _with_lease(
        lambda client, lease: client.checkpoint(
            lease, {"row": 5}, [staged(lease.job_id)], Progress(5, 1), LEASE_S
        )
    ),
    "finish": _with_lease(
        lambda client, lease: client.finish(lease, {"row": 9}, [staged(lease.job_id)], Progress(9, 1))
    ),
    "fail": _with_lease(lambda client, lease: client.fail(lease, REFUSED, 5.0)),
    "fail for good": _with_lease(lambda client, lease: client.fail(lease, REFUSED, None)),
    "release": _with_lease(lambda client, lease: client.release(lease)),
    "heartbeat": _with_lease(lambda client, lease: client.heartbeat({lease: Progress(3, 3)}, LEASE_S)),
    "abandon": _with_lease(lambda client, lease: client.abandon(lease.worker)),
    "advance": _advancing,
    "claim": _at(State.PENDING, lambda client, job_id: client.claim("w2", 2, LEASE_S, {job_id})),
    "claim_commit": _at(
        State.COMMITTING, lambda client, job_id: client.claim_commit("w2", LEASE_S, {job_id})
    ),
    "end": _ending,
    "stop": _at(State.RUNNING, lambda client, job_id: client.stop(job_id, Event.KILL)),
    "pause": _at(State.RUNNING, lambda client, job_id: client.pause(job_id)),
    "resume": _at(State.PAUSED, lambda client, job_id: client.resume(job_id)),
    "retry": _at(State.FAILED, lambda client, job_id: client.retry(job_id)),
    "released": _at(State.KILLED, lambda client, job_id: client.released(job_id)),
    "expire": _expiring,
}


@pytest.mark.parametrize("verb", [*RACES])
def test_a_verb_that_two_clients_send_at_the_same_instant_happens_once(
    store: JobStore, store_factory: Stores, verb: str
) -> None:
    """Both are answered or one is refused; the store is as if they had come one after the other."""
    clients = [store_factory() for _ in range(2)]
    for round_ in range(6):
        job_id = f"{verb.replace(' ', '-')}-{round_}"
        act = RACES[verb](store, job_id)

        def send(n: int, act: Callable[[JobStore, int], Any] = act) -> Any:
            return act(clients[n], n)

        answers = at_once(2, send)
        refused = [answer for answer in answers if isinstance(answer, Exception)]
        assert len(refused) == (1 if verb == "end" else 0), answers
        if verb == "claim":
            assert sum(map(len, answers)) == 2
        if verb == "claim_commit":
            assert sum(answer is not None for answer in answers) == 1
        if verb == "begin":
            assert len({answer.lease.epoch for answer in answers}) == 2
        if verb == "expire":
            assert sorted(map(len, answers)) == [0, 1]
        else:
            events = Counter(entry.event for entry in store.history(job_id))
            assert {*events.values()} == {1}, events
    for client in clients:
        client.close()
