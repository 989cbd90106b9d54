"""Imports under the control of a user, in each of their stages: kill, pause, resume, retry, takeover."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lockstep.job import State
from lockstep.sweep import sweep
from tests import players
from tests.crash.drills import data_files
from tests.crash.families import IMPORT, assert_imported, prepare_import, request_import
from tests.lab import Lab
from tests.players import Troupe
from tests.zygote import Child, Zygote

pytestmark = pytest.mark.servers

STAGES = {
    "map": "map.after_run",
    "combine": "combine.after_run",
    "unique": "unique.after_file",
    "merge": "merge.after_file",
    "commit": "commit.before_publish",
}
"""Where a job of each stage falls asleep, with files that nothing refers to yet."""
WITHOUT_WORKER = {"map", "unique", "commit"}
"""Their workers die before the kill comes."""
FOR_EVER = "sleep:600"


class Stage:
    """A lab, and the processes that play with it."""

    def __init__(self, lab: Lab, troupe: Troupe) -> None:
        self.lab = lab
        self.troupe = troupe

    def ask(self, table: str) -> str:
        prepare_import(self.lab, table)
        before = {job.job_id for job in self.lab.jobs()}
        asked = self.troupe.play(players.command_in_small_steps, *request_import(self.lab, table), "--detach")
        assert asked.wait() == 0, self.troupe.said()
        (job_id,) = {job.job_id for job in self.lab.jobs()} - before
        return job_id

    @contextmanager
    def worker(self, job_id: str, failpoints: str = "") -> Iterator[Child]:
        child = self.troupe.play(players.work_in_small_steps, job_id, failpoints=failpoints)
        try:
            yield child
        finally:
            child.kill_group()

    @contextmanager
    def sleeper(self, job_id: str, failpoint: str) -> Iterator[Child]:
        """A worker of which a task, or the commit, has fallen asleep there."""
        visit = self.troupe.times_reached(failpoint) + 1
        with self.worker(job_id, f"{failpoint}={FOR_EVER}@{visit}") as child:
            self.troupe.wait_for(failpoint, times=visit)
            yield child

    def command(self, *arguments: str) -> None:
        assert self.troupe.play(players.command, *arguments).wait() == 0, self.troupe.said()

    def finish(self, job_id: str) -> State:
        with self.worker(job_id) as worker:
            assert worker.wait() == 0, self.troupe.said()
        return self.lab.store().read(job_id).state

    def kept(self, job_id: str, stage: str) -> set[str]:
        return {file.path for file in self.lab.store().manifest(job_id, stage)}


@pytest.fixture
def stage(make_lab: Callable[..., Lab], tmp_path: Path, zygote: Zygote) -> Stage:
    return Stage(make_lab(limits={**IMPORT.limits, "lease_s": 30}), Troupe(zygote, tmp_path))


def test_imports_that_are_killed_in_any_stage_leave_exactly_the_published_files_after_a_sweep(
    stage: Stage,
) -> None:
    lab = stage.lab
    jobs = {name: stage.ask(f"db.in_{name}") for name in STAGES}
    published = {name: data_files(lab, f"db.in_{name}") for name in STAGES}
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(stage.worker(jobs[name], f"{failpoint}={FOR_EVER}"))
            for name, failpoint in STAGES.items()
        }
        for failpoint in STAGES.values():
            stage.troupe.wait_for(failpoint)
        for name, job_id in jobs.items():
            job = lab.store().read(job_id)
            assert (job.stage, job.state) == (
                ("merge", State.COMMITTING) if name == "commit" else (name, State.RUNNING)
            )
            assert len(data_files(lab, f"db.in_{name}")) > len(published[name])
        assert sweep(lab.config, lab.store()).garbage == [], "jobs that can go on lose nothing"
        for name in WITHOUT_WORKER:
            workers[name].kill_group()
        stage.command("kill", *jobs.values())
        for name in STAGES.keys() - WITHOUT_WORKER:
            assert workers[name].wait() == 0
    stage.command("sweep")

    for name, job_id in jobs.items():
        assert lab.store().read(job_id).state is State.KILLED
        assert data_files(lab, f"db.in_{name}") == published[name]
        assert len(lab.lineage(f"db.in_{name}")) == 1
    assert sweep(lab.config, lab.store()).findings == []


def test_an_import_that_is_paused_fails_and_loses_its_worker_in_map_and_in_merge_is_exact(
    stage: Stage,
) -> None:
    lab = stage.lab
    job_id = stage.ask("db.events")
    runs = Path(lab.store().read(job_id).plan.location.removeprefix("file://")) / "lockstep-runs"
    for name, needed in (("map", lab.folder / "in"), ("merge", runs)):
        with stage.sleeper(job_id, STAGES[name]) as worker:
            lab.wait_until(lambda: stage.kept(job_id, name) != set())  # noqa: B023
            stage.command("pause", job_id)
            assert worker.wait() == 0
        assert lab.store().read(job_id).state is State.PAUSED
        kept = stage.kept(job_id, name)

        away = needed.rename(needed.with_name("away"))
        stage.command("resume", job_id)
        assert stage.finish(job_id) is State.FAILED
        away.rename(needed)

        stage.command("retry", job_id)
        with stage.sleeper(job_id, STAGES[name]) as worker:
            worker.kill_group()
        with stage.sleeper(job_id, STAGES["merge" if name == "map" else "commit"]):
            assert kept <= stage.kept(job_id, name), "what was kept is not done again"
    assert stage.finish(job_id) is State.COMPLETED
    assert_imported(lab)
    assert [path for path in data_files(lab) if "/lockstep-runs/" in path] == []
