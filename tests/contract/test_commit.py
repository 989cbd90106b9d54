"""The commit loop on a real store and a real Iceberg table, with faults between the two.

`Faulty` stands between the loop and the real target: it breaks a call before or after it took effect, as
networks do. Time is a clock that the loop itself moves when it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import StringType

from lockstep.commit import commit, kill
from lockstep.errors import CommitUnknown, Fenced, Invalid, Retryable
from lockstep.job import (
    Event,
    Holding,
    Job,
    Limits,
    NewJob,
    Piece,
    Progress,
    StagedFile,
    State,
    TaskSpec,
)
from lockstep.store import CommitClaim
from lockstep.store.sql import SqlStore
from lockstep.target import Outcome, Target, TargetTable
from lockstep.target.snapshot import Prepared
from tests.iceberg_tables import Lake

LIMITS = Limits(commit_attempts=12, commit_deadline_s=600)


class Faulty:
    """The real target, with a script of faults for `publish`, `fence` and `load`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.before_publish: list[Callable[[], None]] = []
        self.after_publish: list[Callable[[], None]] = []
        self.before_load: list[Callable[[], None]] = []
        self.prepare: Callable[..., Prepared] = target.prepare
        self.published = 0
        self.hidden = 0
        """For how many more times the table is not found."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def exists(self) -> bool:
        return self.hidden == 0 and self._target.exists()

    def load(self) -> TargetTable:
        if self.hidden:
            self.hidden -= 1
            raise Invalid("there is no such table")
        if self.before_load:
            self.before_load.pop(0)()
        return self._target.load()

    def publish(self, head: TargetTable, prepared: Prepared) -> int:
        if self.before_publish:
            self.before_publish.pop(0)()
        snapshot = self._target.publish(head, prepared)
        self.published += 1
        if self.after_publish:
            self.after_publish.pop(0)()
        return snapshot


def unknown() -> None:
    raise CommitUnknown("the connection was cut")


def down() -> None:
    raise Retryable("the catalog does not answer")


class Bench:
    """A lake, a store and one job whose tasks are done."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.lake = Lake(folder, kind=kind)
        self.lake.create()
        self.target = Faulty(self.lake.open())
        self.store = SqlStore(f"sqlite:///{folder}/jobs.db", self.lake.clock)
        self.job = self.ready("job-a", self.lake.stage([1, 2, 3]))

    def ready(self, job_id: str, *files: StagedFile, **changes: Any) -> Job:
        head = self.lake.target.load()
        plan = replace(self.lake.plan(head), limits=LIMITS, **changes)
        holding = Holding(f"scope of {job_id}", True, (Piece("p"),))
        self.store.create([NewJob(job_id, "request", plan, holding, [TaskSpec({}, 3)])])
        (claim,) = self.store.claim("writer", 1, 30, {job_id})
        lease = self.store.begin(claim.lease, 30).lease
        rows = sum(file.rows for file in files)
        self.store.finish(lease, {"row": rows}, list(files), Progress(rows, 0))
        return self.store.read(job_id)

    def claim(self, worker: str = "w1", *, force: bool = False) -> CommitClaim:
        claim = self.store.claim_commit(worker, 30, {self.job.job_id}, force=force)
        assert claim is not None
        return claim

    def commit(self, claim: CommitClaim | None = None) -> Job:
        return commit(claim or self.claim(), self.store, self.target, self.lake.clock)

    def read(self) -> Job:
        return self.store.read(self.job.job_id)

    def files(self) -> list[StagedFile]:
        return list(self.store.manifest(self.job.job_id, "write"))

    def fenced(self) -> bool:
        return self.lake.target.outcome(self.lake.target.load(), self.job.commit_id)[0] is Outcome.FENCED


@pytest.fixture(params=["sql", "filesystem"])
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(tmp_path, request.param)
    yield bench
    bench.store.close()


def test_a_commit_publishes_one_snapshot_and_completes_the_job(bench: Bench) -> None:
    job = bench.commit()
    assert job.state is State.COMPLETED
    assert bench.lake.ids() == [1, 2, 3]
    assert bench.lake.snapshot_ids() == [job.snapshot_id]


def test_a_lost_reply_after_the_commit_landed_is_completed_and_published_once(bench: Bench) -> None:
    bench.target.after_publish = [unknown]
    assert bench.commit().state is State.COMPLETED
    assert bench.target.published == 1
    assert bench.lake.ids() == [1, 2, 3]


def test_an_unknown_answer_before_the_commit_landed_is_sent_again(bench: Bench) -> None:
    bench.target.before_publish = [unknown, unknown]
    job = bench.commit()
    assert job.state is State.COMPLETED
    assert job.commit_attempts == 3
    assert len(bench.lake.snapshot_ids()) == 1


def test_a_commit_that_landed_is_completed_although_a_column_was_added_afterwards(bench: Bench) -> None:
    head = bench.target.load()
    claim = bench.claim("dies")
    bench.store.renew_commit(claim.lease, 30, attempted=True)
    bench.lake.commit(head, bench.job.plan, bench.job.commit_id, bench.job.job_id, bench.files())
    with bench.lake.table().update_schema() as update:
        update.add_column("added", StringType())
    bench.lake.clock.time += 60
    assert bench.commit(bench.claim("w2")).state is State.COMPLETED
    assert bench.lake.ids() == [1, 2, 3]


def test_a_commit_that_landed_is_completed_although_its_snapshot_has_expired(bench: Bench) -> None:
    head = bench.target.load()
    claim = bench.claim("dies")
    bench.store.renew_commit(claim.lease, 30, attempted=True)
    landed = bench.lake.commit(head, bench.job.plan, bench.job.commit_id, bench.job.job_id, bench.files())
    bench.lake.publish("other", bench.lake.stage([9]))
    bench.lake.table().maintenance.expire_snapshots().by_id(landed).commit()
    assert bench.lake.table().metadata.snapshot_by_id(landed) is None
    bench.lake.clock.time += 60
    job = bench.commit(bench.claim("w2"))
    assert job.state is State.COMPLETED
    assert job.snapshot_id == landed
    assert bench.lake.ids() == [1, 2, 3, 9]


def test_a_changed_schema_before_the_commit_is_a_failure_that_names_the_difference(bench: Bench) -> None:
    with bench.lake.table().update_schema() as update:
        update.add_column("added", StringType())
    job = bench.commit()
    assert job.state is State.FAILED
    assert job.error is not None
    assert "added" in job.error.message
    assert bench.lake.ids() == []


def test_ten_commits_of_another_writer_in_a_row_lose_nothing(bench: Bench) -> None:
    rival_ids = list(range(100, 110))

    def rival(number: int) -> None:
        bench.lake.publish(f"rival-{number}", bench.lake.stage([number]))

    bench.target.before_publish = [partial(rival, number) for number in rival_ids]
    job = bench.commit()
    assert job.state is State.COMPLETED
    assert bench.lake.ids() == [1, 2, 3, *rival_ids]
    assert len(bench.lake.snapshot_ids()) == 11


def test_attempts_that_run_out_end_in_a_fence_and_a_failed_job(bench: Bench) -> None:
    bench.target.before_publish = [unknown] * 50
    job = bench.commit()
    assert job.state is State.FAILED
    assert job.commit_attempts == LIMITS.commit_attempts
    assert bench.lake.ids() == []
    assert bench.fenced()


def test_a_catalog_that_is_down_from_the_start_fails_the_job_within_its_deadline(bench: Bench) -> None:
    bench.target.before_load = [down] * 500
    begin = bench.lake.clock.now()
    job = bench.commit()
    assert job.state is State.FAILED
    assert job.error is not None
    assert "does not answer" in job.error.message
    assert bench.lake.clock.now() - begin < 2 * LIMITS.commit_deadline_s


def test_a_request_that_may_have_landed_keeps_the_job_open_while_nobody_can_be_asked(bench: Bench) -> None:
    def landed_then_down() -> None:
        bench.target.before_load = [down] * 500
        unknown()

    bench.target.after_publish = [landed_then_down]
    assert bench.commit().state is State.COMMITTING
    bench.target.before_load = []
    bench.lake.clock.time += 60
    assert bench.commit(bench.claim("w2")).state is State.COMPLETED
    assert bench.lake.ids() == [1, 2, 3]


def test_a_kill_before_anything_was_sent_publishes_nothing(bench: Bench) -> None:
    claim = bench.claim()
    bench.store.stop(bench.job.job_id, Event.KILL)
    assert bench.commit(claim).state is State.KILLED
    assert bench.lake.ids() == []


def test_a_kill_before_anything_was_sent_does_not_ask_a_catalog_that_hangs(bench: Bench) -> None:
    bench.target.before_load = [down]
    bench.store.stop(bench.job.job_id, Event.KILL)
    assert bench.commit().state is State.KILLED
    assert bench.target.before_load == [down], "the catalog was asked"


def test_a_commit_that_does_not_go_through_says_why_until_it_does(bench: Bench) -> None:
    seen: list[Job] = []
    bench.target.before_load = [down, lambda: seen.append(bench.read())]
    ended = bench.commit()
    assert seen[0].error is not None
    assert seen[0].error.message == "the catalog does not answer"
    assert seen[0].error.at is not None
    assert (ended.state, ended.error) == (State.COMPLETED, None)


def test_a_kill_fences_a_sleeping_committer_whose_request_is_still_to_come(bench: Bench) -> None:
    """The request was prepared before the kill, and is sent after it: the catalog itself refuses it."""
    head = bench.target.load()
    sleeper = bench.claim("sleeper")
    bench.store.renew_commit(sleeper.lease, 30, attempted=True)
    prepared = bench.lake.target.prepare(
        head, bench.job.plan, bench.job.commit_id, bench.job.job_id, bench.files()
    )
    bench.store.stop(bench.job.job_id, Event.KILL)
    assert bench.commit(bench.claim("killer", force=True)).state is State.KILLED
    with pytest.raises(CommitUnknown):
        bench.lake.target.send(head, prepared)
    assert bench.lake.ids() == []
    with pytest.raises(Fenced):
        bench.store.renew_commit(sleeper.lease, 30)
    assert bench.read().state is State.KILLED


def test_a_kill_that_cannot_ask_the_target_does_not_wait_for_the_whole_budget(bench: Bench) -> None:
    claim = bench.claim("dies")
    bench.store.renew_commit(claim.lease, 30, attempted=True)
    bench.store.stop(bench.job.job_id, Event.KILL)
    bench.target.before_load = [down] * 500
    begin = bench.lake.clock.now()
    killer = bench.claim("killer", force=True)
    assert commit(killer, bench.store, bench.target, bench.lake.clock, 5.0).state is State.COMMITTING
    assert bench.lake.clock.now() - begin < 30
    bench.target.before_load = []
    bench.lake.clock.time += 60
    assert bench.commit(bench.claim("w2")).state is State.KILLED
    assert bench.lake.ids() == []


def test_a_kill_ends_a_commit_that_somebody_sleeps_in(bench: Bench) -> None:
    claim = bench.claim("sleeper")
    bench.store.renew_commit(claim.lease, 30, attempted=True)
    job = kill(bench.store, bench.job.job_id, bench.lake.config, bench.lake.clock)
    assert job.state is State.KILLED
    assert bench.fenced()


def test_a_kill_whose_catalog_is_not_there_is_noted_within_its_patience(bench: Bench) -> None:
    claim = bench.claim("sleeper")
    bench.store.renew_commit(claim.lease, 30, attempted=True)
    blind = replace(bench.lake.config, catalogs={})
    begin = bench.lake.clock.now()
    job = kill(bench.store, bench.job.job_id, blind, bench.lake.clock, patience_s=5.0)
    assert bench.lake.clock.now() - begin < 6
    assert job.state is State.COMMITTING
    assert job.kill_requested
    assert kill(bench.store, bench.job.job_id, bench.lake.config, bench.lake.clock).state is State.KILLED
    assert bench.lake.ids() == []


def test_a_kill_that_comes_after_the_commit_landed_is_too_late(bench: Bench) -> None:
    def kill_arrives() -> None:
        bench.store.stop(bench.job.job_id, Event.KILL)
        unknown()

    bench.target.after_publish = [kill_arrives]
    assert bench.commit().state is State.COMPLETED
    assert bench.lake.ids() == [1, 2, 3]


def test_every_attempt_is_noted_before_its_request_leaves(bench: Bench) -> None:
    noted: list[int] = []

    def look_and_fail() -> None:
        noted.append(bench.read().commit_attempts)
        unknown()

    bench.target.before_publish = [look_and_fail] * 3
    assert bench.commit().state is State.COMPLETED
    assert noted == [1, 2, 3]


def test_a_committer_that_is_replaced_while_it_prepares_sends_nothing(bench: Bench) -> None:
    sleeper = bench.claim("sleeper")
    prepare = bench.lake.target.prepare

    def overtaken(*args: Any) -> Prepared:
        prepared = prepare(*args)
        bench.store.stop(bench.job.job_id, Event.KILL)
        bench.target.prepare = prepare
        assert bench.commit(bench.claim("killer", force=True)).state is State.KILLED
        return prepared

    bench.target.prepare = overtaken
    with pytest.raises(Fenced):
        bench.commit(sleeper)
    assert bench.target.published == 0
    assert bench.read().state is State.KILLED
    assert bench.lake.ids() == []


def test_a_committer_that_lost_its_lease_sends_nothing(bench: Bench) -> None:
    claim = bench.claim("slow")
    bench.lake.clock.time += 60
    assert bench.commit(bench.claim("w2")).state is State.COMPLETED
    with pytest.raises(Fenced):
        bench.commit(claim)
    assert bench.lake.ids() == [1, 2, 3]
    assert bench.target.published == 1


def test_a_staged_file_that_is_gone_or_cut_fails_the_job_and_names_it(bench: Bench) -> None:
    (file,) = bench.files()
    Path(file.path.removeprefix("file://")).write_bytes(b"cut")
    job = bench.commit()
    assert job.state is State.FAILED
    assert job.error is not None
    assert job.error.cls == "Corrupt"
    assert file.path in job.error.message
    assert bench.lake.ids() == []


def test_a_table_that_was_replaced_is_not_written_to(bench: Bench) -> None:
    bench.lake.catalog.drop_table("db.events")
    bench.lake.catalog.create_table("db.events", schema=Schema())
    job = bench.commit()
    assert job.state is State.FAILED
    assert job.error is not None
    assert "replaced" in job.error.message


def test_a_table_that_is_away_for_a_moment_does_not_end_a_commit_that_was_sent(bench: Bench) -> None:
    def hide() -> None:
        bench.target.hidden = 3
        unknown()

    bench.target.after_publish = [hide]
    assert bench.commit().state is State.COMPLETED
    assert bench.lake.ids() == [1, 2, 3]


def test_a_retry_of_a_commit_that_had_landed_after_all_publishes_nothing_again(bench: Bench) -> None:
    """The job failed because its table could not be found for its whole budget, and then it came back."""
    head = bench.target.load()
    claim = bench.claim("dies")
    bench.store.renew_commit(claim.lease, 30, attempted=True)
    landed = bench.lake.commit(head, bench.job.plan, bench.job.commit_id, bench.job.job_id, bench.files())
    bench.store.end(claim.lease, Event.FAIL)
    bench.store.retry(bench.job.job_id)
    job = bench.commit()
    assert job.state is State.COMPLETED
    assert job.snapshot_id == landed
    assert bench.lake.ids() == [1, 2, 3]


def test_files_that_do_not_add_up_to_the_plan_are_not_published(bench: Bench) -> None:
    bench.job = bench.ready("job-b", bench.lake.stage([7, 8]), rows=3)
    job = bench.commit()
    assert job.state is State.FAILED
    assert job.error is not None
    assert "2 rows, but 3 were planned" in job.error.message
    assert bench.lake.ids() == []


def test_a_failed_commit_can_be_retried_under_a_new_commit_id(bench: Bench) -> None:
    bench.target.before_publish = [unknown] * LIMITS.commit_attempts
    assert bench.commit().state is State.FAILED
    first = bench.job.commit_id
    retried = bench.store.retry(bench.job.job_id)
    assert retried.state is State.COMMITTING
    assert retried.commit_id != first
    assert bench.commit().state is State.COMPLETED
    assert bench.lake.ids() == [1, 2, 3]


def test_an_empty_partition_is_published_as_an_empty_snapshot(bench: Bench) -> None:
    bench.commit()
    bench.job = bench.ready("job-empty")
    job = bench.commit()
    assert job.state is State.COMPLETED
    assert bench.lake.ids() == [1, 2, 3]
    assert len(bench.lake.snapshot_ids()) == 2
