"""SIGKILL in the stages of an import on Spark; the crash matrix has all failpoints on all stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.job import State
from tests.crash.families import IMPORT
from tests.lab import Lab

pytestmark = pytest.mark.servers

KILLED = -9


@pytest.fixture
def small_lab(tmp_path: Path, chdb_folder: Path) -> Iterator[Lab]:
    """So little memory that one file makes several runs."""
    lab = Lab(tmp_path, chdb_folder, limits=IMPORT.limits)
    IMPORT.prepare(lab)
    yield lab
    lab.close()


def assert_exact(lab: Lab) -> None:
    IMPORT.assert_exact(lab)
    (job,) = lab.jobs()
    assert job.state is State.COMPLETED
    assert lab.lineage()[1:] == [job.snapshot_id]


def test_a_killed_python_worker_is_replaced_in_every_stage_and_the_import_is_exact(small_lab: Lab) -> None:
    places = ("map.after_checkpoint", "combine.after_run", "unique.after_file", "merge.after_file")
    small_lab.ok(*IMPORT.request(small_lab), failpoints=",".join(f"{place}=kill" for place in places))
    assert_exact(small_lab)
    (job,) = small_lab.jobs()
    for stage in ("map", "combine", "unique", "merge"):
        tasks = small_lab.store().tasks(job.job_id, stage)
        assert sum(task.attempts for task in tasks) > len(tasks), f"nobody was killed in {stage}"


def test_a_killed_driver_is_replaced_and_the_import_is_exact(small_lab: Lab) -> None:
    done = small_lab.run(*IMPORT.request(small_lab), failpoints="stage.after_advance=kill")
    assert done.returncode == KILLED, done.stderr
    small_lab.ok("worker", "--once")
    assert_exact(small_lab)
