"""SIGKILL at every failpoint that an export passes, then recovery, then an exact comparison.

The process that reaches the failpoint kills itself: a driver, or a Python worker of Spark.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lockstep
from lockstep.job import State
from lockstep.runtime import FAILPOINTS
from tests.lab import Lab

pytestmark = pytest.mark.servers

SMALL_FILES = ("--file-size", "30KB")
KILLED = -9
IN_AN_EXECUTOR = ("write.after_file", "write.after_checkpoint", "write.before_finish")
IN_THE_COMMITTER = (
    "commit.after_intent",
    "commit.before_publish",
    "commit.after_publish",
    "commit.before_record",
)
IN_THE_FENCE = ("fence.before_publish", "fence.after_publish")
OTHERS = ("plan.before_create", "commit.reply_lost", "unpin.before")
COVERED = frozenset({*IN_AN_EXECUTOR, *IN_THE_COMMITTER, *IN_THE_FENCE, *OTHERS})


def export(lab: Lab) -> tuple[str, ...]:
    return ("export", lab.source(), "iceberg://lake/db.events", "--all", "--create", *SMALL_FILES)


def test_every_failpoint_in_the_code_is_covered_by_a_crash_test() -> None:
    code = Path(lockstep.__file__).parent
    reached = {
        name
        for path in code.rglob("*.py")
        for name in re.findall(r'failpoint\(\s*f?"([^"]+)"', path.read_text())
    }
    assert reached - COVERED == set()
    assert reached <= FAILPOINTS
    assert reached >= COVERED


@pytest.mark.parametrize("failpoint", IN_AN_EXECUTOR)
def test_a_killed_python_worker_is_replaced_and_the_export_is_exact(lab: Lab, failpoint: str) -> None:
    lab.make_events(parts=3, rows=4000)
    lab.ok(*export(lab), failpoints=f"{failpoint}=kill@2")
    lab.assert_exact()
    (job,) = lab.jobs()
    assert job.attempts > job.tasks_total, "no attempt was killed: the drill did not happen"
    assert lab.pins() == []


@pytest.mark.parametrize("failpoint", IN_THE_COMMITTER)
def test_a_driver_killed_during_the_commit_is_replaced_and_the_export_is_exact(
    lab: Lab, failpoint: str
) -> None:
    lab.make_events(partitions=2, parts=2)
    assert lab.run(*export(lab), failpoints=f"{failpoint}=kill").returncode == KILLED
    lab.ok("worker", "--once")
    lab.assert_exact(jobs=2)
    assert lab.pins() == []


def test_a_process_killed_before_it_creates_the_jobs_has_created_none(lab: Lab) -> None:
    lab.make_events()
    assert lab.run(*export(lab), failpoints="plan.before_create=kill").returncode == KILLED
    assert lab.jobs() == []
    lab.ok(*export(lab))
    lab.assert_exact()


def test_a_lost_reply_to_a_commit_that_landed_is_a_completed_job_and_nothing_is_deleted(lab: Lab) -> None:
    lab.make_events()
    lab.ok(*export(lab), failpoints="commit.reply_lost=error")
    lab.assert_exact()
    (job,) = lab.jobs()
    assert job.commit_attempts == 1


def test_a_worker_killed_before_it_unpins_leaves_the_pin_to_the_next_one(lab: Lab) -> None:
    lab.make_events()
    assert lab.run(*export(lab), failpoints="unpin.before=kill").returncode == KILLED
    lab.assert_exact()
    assert len(lab.pins()) == 1
    lab.ok("worker", "--once")
    assert lab.pins() == []
    lab.assert_exact()


@pytest.mark.parametrize("failpoint", IN_THE_FENCE)
def test_a_killer_that_dies_while_it_fences_is_followed_by_one_that_ends_the_job(
    lab: Lab, failpoint: str
) -> None:
    lab.make_events()
    with lab.started(*export(lab), failpoints="commit.before_publish=sleep:25") as sleeper:
        job = lab.wait_for_state(State.COMMITTING)
        lab.wait_until(lambda: lab.store().read(job.job_id).commit_attempts == 1)
        assert lab.run("kill", job.job_id, failpoints=f"{failpoint}=kill").returncode == KILLED
        lab.ok("kill", job.job_id)
        assert lab.store().read(job.job_id).state is State.KILLED
        # The sleeper wakes up, sends the request that it had prepared, and is refused by the catalog.
        assert sleeper.wait(timeout=60) == 4
    assert lab.lineage() == []
    assert lab.store().read(job.job_id).state is State.KILLED
