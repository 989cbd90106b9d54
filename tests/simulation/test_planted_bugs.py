"""Bugs put into the real code on purpose: a simulation that does not find them proves nothing.

Each comes with the faults that bring it out, so that a few dozen seeds are enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

import lockstep.commit
import lockstep.passes
import lockstep.review
import lockstep.stages
import lockstep.sweep
from lockstep.commit import Ending
from lockstep.errors import CommitUnknown, ErrorInfo, Fenced
from lockstep.job import LOSERS, Event, State, TaskState
from lockstep.store import sql_tasks
from lockstep.store.sql import SqlStore
from lockstep.target.iceberg import IcebergTarget
from tests.simulation.faults import Faults
from tests.simulation.rows import SimSink
from tests.simulation.scenario import simulate

pytestmark = pytest.mark.long

Plant = Callable[[pytest.MonkeyPatch], None]
MOST_SEEDS: Final = 150


def first_caught(faults: Faults) -> tuple[int, list[str]]:
    """The first seed that breaks a promise, and what the auditor says of it."""
    for seed in range(MOST_SEEDS):
        if violations := simulate(seed, faults).violations:
            return seed, violations
    pytest.fail(f"{MOST_SEEDS} seeds did not show it")


def a_task_is_finished_by_state_instead_of_by_epoch(patch: pytest.MonkeyPatch) -> None:
    def held(task: Any, lease: Any) -> Any:
        if task is None or task.state != TaskState.LEASED:
            raise Fenced("not leased")
        return task

    patch.setattr(sql_tasks, "_held", held)


def a_job_is_completed_by_state_instead_of_by_epoch(patch: pytest.MonkeyPatch) -> None:
    def committing(self: Any, conn: Any, lease: Any) -> Any:
        job = self._lock(conn, lease.job_id)
        if job.state != State.COMMITTING:
            raise Fenced("no longer being committed")
        return job

    patch.setattr(SqlStore, "_committing", committing)


def an_unknown_outcome_is_treated_as_a_failure(patch: pytest.MonkeyPatch) -> None:
    publish = lockstep.commit._publish

    def hasty(job: Any, lease: Any, head: Any, files: Any, store: Any, target: Any) -> Any:
        try:
            return publish(job, lease, head, files, store, target)
        except CommitUnknown as error:
            store.end(lease, Event.FAIL, error=ErrorInfo.of(error))
            raise Fenced("ended") from error

    patch.setattr(lockstep.commit, "_publish", hasty)


def the_register_is_not_read_again(patch: pytest.MonkeyPatch) -> None:
    publish = lockstep.commit._publish

    def blind(job: Any, lease: Any, head: Any, files: Any, store: Any, target: Any) -> Any:
        for _ in range(5):
            try:
                return publish(job, lease, head, files, store, target)
            except CommitUnknown:
                SimSink.world.scheduler.pause(10.0)
                head = target.load()
        return None

    patch.setattr(lockstep.commit, "_publish", blind)
    patch.setattr(IcebergTarget, "_check_open", lambda *_: None)


def an_attempt_is_noted_when_it_was_sent(patch: pytest.MonkeyPatch) -> None:
    def late(job: Any, lease: Any, head: Any, files: Any, store: Any, target: Any) -> None:
        target.publish(head, target.prepare(head, job.plan, job.commit_id, job.job_id, files))
        store.renew_commit(lease, job.plan.limits.lease_s, attempted=True)

    patch.setattr(lockstep.commit, "_publish", late)


def the_position_is_recorded_before_the_manifest(patch: pytest.MonkeyPatch) -> None:
    checkpoint = SqlStore.checkpoint

    def two_steps(
        self: SqlStore, lease: Any, position: Any, staged: Any, progress: Any, lease_s: float
    ) -> Any:
        checkpoint(self, lease, position, [], progress, lease_s)
        return checkpoint(self, lease, position, staged, progress, lease_s)

    patch.setattr(SqlStore, "checkpoint", two_steps)


def staged_files_are_deleted_when_a_commit_fails(patch: pytest.MonkeyPatch) -> None:
    publish = lockstep.commit._publish

    def tidy(job: Any, lease: Any, head: Any, files: Any, store: Any, target: Any) -> Any:
        try:
            return publish(job, lease, head, files, store, target)
        except CommitUnknown:
            for file in files:
                SimSink.world.storage.files.pop(file.path, None)
            raise

    patch.setattr(lockstep.commit, "_publish", tidy)


def a_job_ends_without_a_fence(patch: pytest.MonkeyPatch) -> None:
    def trusting(job: Any, lease: Any, head: Any, ending: Ending, store: Any, target: Any) -> Any:
        return store.end(lease, ending.event, error=ending.error)

    patch.setattr(lockstep.commit, "_end_unpublished", trusting)


def a_kill_does_not_ask_the_committer(patch: pytest.MonkeyPatch) -> None:
    def stop(self: Any, job_id: str, event: Event, error: Any = None) -> Any:
        with self._db.write() as conn:
            job = self._lock(conn, job_id)
            if State(job.state).live:
                self._move(conn, job, event)
        return self.read(job_id)

    patch.setattr(SqlStore, "stop", stop)


def a_checkpoint_that_is_sent_again_is_stored_again(patch: pytest.MonkeyPatch) -> None:
    store = SqlStore._store

    def forgetful(self: Any, conn: Any, job: Any, task: Any, batch: Any, progress: Any) -> Any:
        class Unsaved:
            """The task's row, as if nothing had been saved in this epoch."""

            saved_epoch = -1

            def __getattr__(self, name: str) -> Any:
                return getattr(task, name)

        return store(self, conn, job, Unsaved(), batch, progress)  # type: ignore[arg-type]

    patch.setattr(SqlStore, "_store", forgetful)


def a_sweep_takes_what_a_retry_would_need(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lockstep.sweep, "why_kept", lambda job: "live" if job.state.live else None)


def runs_are_deleted_when_the_next_stage_begins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lockstep.stages, "_used_up", lambda manifests, in_use: in_use)


def losers_are_forgotten_at_a_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """Recorded only when the task ends: whoever goes on from a checkpoint has lost those before it."""
    checkpoint = SqlStore.checkpoint

    def forgetful(
        self: SqlStore, lease: Any, position: Any, staged: Any, progress: Any, lease_s: float
    ) -> Any:
        kept = [] if lease.stage == "unique" else staged
        return checkpoint(self, lease, position, kept, progress, lease_s)

    patch.setattr(SqlStore, "checkpoint", forgetful)


def losers_are_published_too(patch: pytest.MonkeyPatch) -> None:
    newest = lockstep.passes.newest_runs

    def without_losers(by_stage: Any) -> Any:
        return [file for file in newest(by_stage) if file.kind != LOSERS]

    patch.setattr(lockstep.passes, "newest_runs", without_losers)
    patch.setattr(lockstep.review, "_does_not_add_up", lambda *_: None)


def short_runs_are_merged_again(patch: pytest.MonkeyPatch) -> None:
    """After they were combined: the long ones hold the same rows."""

    def all_runs(by_stage: Any) -> Any:
        return [file for files in by_stage.values() for file in files]

    patch.setattr(lockstep.passes, "newest_runs", all_runs)
    patch.setattr(lockstep.stages, "_used_up", lambda manifests, in_use: ())
    patch.setattr(lockstep.review, "_does_not_add_up", lambda *_: None)


def runs_are_deleted_before_the_longer_one_is_recorded(patch: pytest.MonkeyPatch) -> None:
    """At the step to the stage that combines them instead of the one after it."""

    def too_early(manifests: Any, in_use: Any) -> Any:
        return in_use if "combine" not in manifests else ()

    patch.setattr(lockstep.stages, "_used_up", too_early)


CALM_S: Final = 150.0
PLANTED: Final[list[tuple[Plant, str, Faults]]] = [
    (
        a_task_is_finished_by_state_instead_of_by_epoch,
        "its files hold",
        Faults(CALM_S, speculation=0.9),
    ),
    (
        a_job_is_completed_by_state_instead_of_by_epoch,
        "which was published at",
        Faults(60.0, kill_before_commit=0.6),
    ),
    (
        an_unknown_outcome_is_treated_as_a_failure,
        "which was published at",
        Faults(CALM_S, catalog_reply_lost=0.5),
    ),
    (
        the_register_is_not_read_again,
        " twice",
        Faults(CALM_S, catalog_reply_lost=0.5, rivals=10, expiries=15),
    ),
    (
        an_attempt_is_noted_when_it_was_sent,
        "which was published at",
        Faults(CALM_S, catalog_late=0.7, kill_in_commit=0.5),
    ),
    (the_position_is_recorded_before_the_manifest, "at row", Faults(CALM_S, crash=0.03)),
    (
        staged_files_are_deleted_when_a_commit_fails,
        "which was deleted",
        Faults(CALM_S, catalog_reply_lost=0.5),
    ),
    (
        a_job_ends_without_a_fence,
        "which was published at",
        Faults(CALM_S, catalog_late=0.7, kill_in_commit=0.5),
    ),
    (a_kill_does_not_ask_the_committer, "which was published at", Faults(CALM_S, kill_in_commit=0.7)),
    (
        a_checkpoint_that_is_sent_again_is_stored_again,
        "its files hold",
        Faults(CALM_S, store_reply_lost=0.1),
    ),
    (
        a_sweep_takes_what_a_retry_would_need,
        "can still be retried",
        Faults(CALM_S, source_corrupt=0.3),
    ),
    (runs_are_deleted_when_the_next_stage_begins, "still needs it", Faults(CALM_S)),
    (runs_are_deleted_before_the_longer_one_is_recorded, "still needs it", Faults(CALM_S)),
    (losers_are_forgotten_at_a_checkpoint, "its files hold", Faults(CALM_S, crash=0.02)),
    (losers_are_published_too, "so many times", Faults(CALM_S)),
    (short_runs_are_merged_again, "so many times", Faults(CALM_S)),
]


@pytest.mark.parametrize(("plant", "sign", "faults"), PLANTED, ids=[plant.__name__ for plant, *_ in PLANTED])
def test_a_planted_bug_is_caught(
    plant: Plant, sign: str, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        plant(patch)
        seed, violations = first_caught(faults)
    assert sign in " ".join(violations)
    assert simulate(seed, faults).violations == [], "without the bug nothing is broken"
