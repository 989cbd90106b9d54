"""What crashes leave behind, and a sweep afterwards: exactly the published files are left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from lockstep.job import State
from lockstep.sweep import sweep
from tests.lab import Lab

pytestmark = pytest.mark.servers

TARGET = "iceberg://lake/db.events"
SMALL_FILES = ("--file-size", "30KB")


def folder_of(lab: Lab) -> Path:
    return Path(lab.table().location().removeprefix("file://")) / "data"


def on_disk(lab: Lab) -> set[str]:
    return {f"file://{path}" for path in folder_of(lab).rglob("*") if path.is_file()}


def published(lab: Lab) -> set[str]:
    return {task.file.file_path for task in lab.table().scan().plan_files()}


def test_after_a_crash_a_kill_and_a_sweep_the_folder_holds_exactly_the_published_files(lab: Lab) -> None:
    """Two partitions: one is published, the worker dies while it writes the other."""
    lab.make_events(partitions=2)
    export = ("export", lab.source(), TARGET, "--all", "--create", *SMALL_FILES)
    with lab.started(*export, failpoints="write.after_file=sleep:100@2") as process:
        done = lab.wait_for_state(State.COMPLETED, timeout_s=200)
        (job,) = (each for each in lab.jobs() if each.job_id != done.job_id)
        lab.wait_until(lambda: any(job.job_id in path for path in on_disk(lab)))
        lab.wait_until(lambda: len(lab.pins()) == 1)  # the completed job gave its own up
        os.killpg(process.pid, signal.SIGKILL)
    assert sweep(lab.config, lab.store()).garbage == [], "a job that can go on loses nothing"
    assert any(job.job_id in path for path in on_disk(lab))

    lab.ok("kill", job.job_id)
    dry = lab.document("sweep", "--dry-run")
    swept = lab.document("sweep")

    assert {thing["what"] for thing in dry["garbage"]} == {thing["what"] for thing in swept["garbage"]}
    assert swept["deleted"] == len(swept["garbage"]) > 0
    assert on_disk(lab) == published(lab)
    assert lab.pins() == []
    assert len(lab.target_rows()) == 3000
    assert sweep(lab.config, lab.store()).findings == []


def test_a_frozen_copy_of_a_planner_that_was_killed_is_named_and_kept(lab: Lab) -> None:
    lab.make_events()
    planned = ("export", lab.source(), TARGET, "--all", "--create", "--detach")
    assert lab.run(*planned, failpoints="plan.before_create=kill").returncode == -signal.SIGKILL
    (orphan,) = lab.pins()

    found = lab.document("sweep", lab.source())

    assert [(thing["kind"], thing["what"]) for thing in found["kept_unknown"]] == [
        ("frozen copy", f"{lab.database}.{orphan}")
    ]
    assert lab.pins() == [orphan]
