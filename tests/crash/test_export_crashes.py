"""Drills inside Spark: its Python workers die or meet errors, and a whole driver dies with its command.

Every failpoint on every store is drilled in test_crash_matrix.py, without Spark.
"""

from __future__ import annotations

import pytest

from tests.lab import Lab

pytestmark = pytest.mark.servers

KILLED = -9
IN_AN_EXECUTOR = ("write.after_file", "write.after_checkpoint", "write.before_finish")


def export(lab: Lab) -> tuple[str, ...]:
    target = "iceberg://lake/db.events"
    return ("export", lab.source(), target, "--all", "--create", "--file-size", "30KB")


@pytest.mark.parametrize("action", ["kill", "error"])
def test_python_workers_of_spark_that_fail_at_each_failpoint_are_replaced_and_the_export_is_exact(
    lab_on_each_store: Lab, action: str
) -> None:
    lab = lab_on_each_store
    lab.make_events(parts=3, rows=4000)
    lab.ok(*export(lab), failpoints=",".join(f"{name}={action}@2" for name in IN_AN_EXECUTOR))
    lab.assert_exact()
    (job,) = lab.jobs()
    assert job.attempts >= job.tasks_total + len(IN_AN_EXECUTOR), "a drill did not happen"
    assert lab.pins() == []


def test_an_export_killed_as_it_publishes_is_completed_by_a_worker(lab: Lab) -> None:
    lab.make_events(partitions=2, parts=2)
    assert lab.run(*export(lab), failpoints="commit.after_publish=kill").returncode == KILLED
    lab.ok("worker", "--once")
    lab.assert_exact(jobs=2)
    assert lab.pins() == []
