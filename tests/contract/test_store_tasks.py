"""What every job store promises of tasks: claimed, begun, checkpointed, finished, stage by stage."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from lockstep.errors import ErrorInfo, Fenced
from lockstep.job import REJECTS, Event, Fingerprint, Lease, Progress, State, TaskSpec, TaskState, Verdict
from lockstep.store import JobStore
from tests.store_lab import (
    LEASE_S,
    REFUSED,
    MovedClock,
    Stores,
    at_once,
    begin_task,
    job_in,
    moves,
    new_job,
    run_task,
    staged,
    take_commit,
)

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


def test_the_pace_of_a_job_is_measured_from_where_work_went_on(store: JobStore, clock: MovedClock) -> None:
    def measured_from() -> tuple[float | None, int]:
        job = store.read("job1")
        return job.paced_at, job.paced_rows

    store.create([new_job("job1", 3, stages=("map", "merge"))])
    start = clock.at
    lease = begin_task(store, "job1").lease
    clock.at += LEASE_S / 2
    store.checkpoint(lease, {"row": 5}, [staged("a", 5)], Progress(5, 10), LEASE_S)
    begin_task(store, "job1")
    assert measured_from() == (start, 0), "a second worker is no break"

    store.heartbeat({lease: Progress(8, 15)}, LEASE_S)
    clock.at += 3600  # and nobody is there
    for claim in store.claim("w2", 3, LEASE_S):
        lease = store.begin(claim.lease, LEASE_S).lease
        store.finish(lease, {"row": 9}, [staged(f"b{lease.index}")], Progress(9, 20))
        assert measured_from() == (clock.at, 5)

    clock.at += 1
    store.advance("job1", "map", "merge", [TaskSpec({}, 27)] * 2)
    assert measured_from() == (clock.at, 0)
    run_task(store, "job1")
    done = store.read("job1").rows_done
    store.pause("job1")
    clock.at += 3600
    store.resume("job1")
    begin_task(store, "job1")
    assert measured_from() == (clock.at, done)


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


def test_rejects_are_in_the_manifest_and_in_no_figure_of_what_was_written(store: JobStore) -> None:
    store.create([new_job("job1", stages=("write", "merge"))])
    lease = begin_task(store, "job1").lease
    bad, worse = (replace(staged(name), kind=REJECTS) for name in ("bad", "worse"))
    files = [staged("a"), bad, staged("b"), worse]
    store.checkpoint(lease, {"row": 5}, files[:2], Progress(5, 200), LEASE_S)
    assert (store.read("job1").files, store.read("job1").bytes_done) == (1, 100)
    store.heartbeat({lease: Progress(7, 240)}, LEASE_S)
    assert store.read("job1").bytes_done == 140
    store.release(lease)
    assert store.read("job1").bytes_done == 100
    store.finish(begin_task(store, "job1").lease, {"row": 9}, files[2:], Progress(9, 400))
    job = store.read("job1")
    assert (job.files, job.bytes_done) == (2, 200)
    job = store.advance("job1", "write", "merge", [TaskSpec({}, 9)])
    assert (job.files, job.bytes_done) == (0, 0)
    assert list(store.manifest("job1", "write")) == files


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


@pytest.mark.long
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
