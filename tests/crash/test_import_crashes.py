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
    assert len(lab.lineage()) == 1
    (job,) = lab.jobs()
    assert job.state is State.COMPLETED


@pytest.mark.parametrize("failpoint", ["map.after_checkpoint", "merge.after_file"])
def test_a_killed_python_worker_is_replaced_and_the_import_is_exact(small_lab: Lab, failpoint: str) -> None:
    small_lab.ok(*IMPORT.request(small_lab), failpoints=f"{failpoint}=kill@2")
    assert_exact(small_lab)


def test_a_killed_driver_is_replaced_and_the_import_is_exact(small_lab: Lab) -> None:
    done = small_lab.run(*IMPORT.request(small_lab), failpoints="stage.after_advance=kill")
    assert done.returncode == KILLED, done.stderr
    small_lab.ok("worker", "--once")
    assert_exact(small_lab)
