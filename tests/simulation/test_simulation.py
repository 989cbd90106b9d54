"""The real store, worker and commit loop under one seed, judged by an auditor that shares no code with them.

`make simulate SEED=n` prints what happened in one seed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import pytest

from tests.simulation.faults import Faults
from tests.simulation.scenario import simulate

pytestmark = pytest.mark.long

SEEDS: Final = 200
GROUPS: Final = 10


@pytest.mark.parametrize("group", range(GROUPS))
def test_whatever_happens_no_promise_is_broken(group: int) -> None:
    for seed in range(group, SEEDS, GROUPS):
        assert simulate(seed).violations == [], f"make simulate SEED={seed}"


def test_a_job_that_is_killed_as_the_run_is_brought_to_its_end_ends_the_run() -> None:
    assert simulate(1953).violations == []


def test_undisturbed_jobs_all_complete() -> None:
    for seed in range(12):
        run = simulate(seed, Faults(quiet_s=60.0))
        assert run.violations == [], f"seed {seed}"


def test_one_seed_is_one_run_in_this_process_and_in_any_other() -> None:
    seeds = range(1000, 1006)
    here = [simulate(seed).digest for seed in seeds]
    assert [simulate(seed).digest for seed in reversed(seeds)] == here[::-1]
    script = f"from tests.simulation.scenario import simulate; [print(simulate(s).digest) for s in {seeds}]"
    there = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.split() == here
    assert len(set(here)) == len(here)
