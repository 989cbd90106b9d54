"""Kill, pause, resume and drop while something hangs: in the source, in a task, in a worker, in a commit."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.job import State
from tests import players
from tests.kills import PROMISED_S, kill_in_time
from tests.lab import Lab
from tests.players import Troupe
from tests.standstill import within
from tests.zygote import Child, Zygote

pytestmark = pytest.mark.servers

BUSY_S = 5.0
"""What "at once" may take on a machine that does other things as well."""
FOR_EVER = "sleep:600"
INTERRUPTED = 130


class Stage:
    """A lab with a job, and the processes that play with it."""

    def __init__(self, lab: Lab, troupe: Troupe) -> None:
        self.lab = lab
        self.troupe = troupe
        lab.make_events(parts=2, rows=4000)

    def ask(self) -> str:
        request = ("export", self.lab.source(), "iceberg://lake/db.events", "--all", "--create")
        asked = self.troupe.play(players.command, *request, "--file-size", "30KB", "--detach")
        assert asked.wait() == 0
        (job,) = self.lab.jobs()
        return job.job_id

    @contextmanager
    def worker(
        self, job_id: str, failpoints: str = "", play: Callable[..., object] = players.work
    ) -> Iterator[Child]:
        child = self.troupe.play(play, job_id, failpoints=failpoints)
        try:
            yield child
        finally:
            child.kill_group()

    def command(self, *arguments: str) -> None:
        """Run a command that must succeed."""
        assert self.troupe.play(players.command, *arguments).wait() == 0, self.troupe.said()

    def kill(self, job_id: str, worker: Child | None = None) -> None:
        kill_in_time(self.lab, self.troupe, job_id, worker)

    def rows_are_read(self, job_id: str) -> bool:
        return any(task.attempts for task in self.lab.store().tasks(job_id))


@pytest.fixture
def stage(make_lab: Callable[..., Lab], tmp_path: Path, stoppable_chdb: Path, zygote: Zygote) -> Stage:
    return Stage(make_lab(stoppable_chdb), Troupe(zygote, tmp_path))


@pytest.mark.parametrize("paused", [False, True], ids=["pending", "paused"])
def test_a_job_that_waits_is_killed_and_never_runs(stage: Stage, paused: bool) -> None:
    job_id = stage.ask()
    if paused:
        stage.command("pause", job_id)
    stage.kill(job_id)
    with stage.worker(job_id) as worker:
        assert worker.wait() == 0
    assert stage.lab.store().read(job_id).attempts == 0
    assert stage.lab.pins() == [], "the worker gives the pin of a killed job up"
    assert stage.lab.lineage() == []


@pytest.mark.parametrize("make_lab", ["postgresql"], indirect=True)
def test_a_kill_ends_a_job_whose_source_hangs_and_its_worker_is_not_held_up(stage: Stage) -> None:
    lab = stage.lab
    job_id = stage.ask()
    with lab.frozen_source(), stage.worker(job_id) as worker:
        lab.wait_until(lambda: stage.rows_are_read(job_id))
        stage.kill(job_id, worker)
        # It stops the tasks that hang, and does not wait for the pin, which is given up later.
        assert worker.wait() == 0
    assert len(lab.pins()) == 1
    with stage.worker(job_id) as worker:
        assert worker.wait() == 0
    assert lab.pins() == []
    assert lab.lineage() == []


def test_a_kill_ends_a_job_whose_task_hangs_as_it_writes(stage: Stage) -> None:
    job_id = stage.ask()
    with stage.worker(job_id, f"write.after_file={FOR_EVER}") as worker:
        stage.troupe.wait_for("write.after_file")
        stage.kill(job_id, worker)
        assert worker.wait() == 0
    assert stage.lab.lineage() == []


def test_a_kill_ends_a_job_whose_worker_is_stopped(stage: Stage) -> None:
    lab = stage.lab
    job_id = stage.ask()
    with stage.worker(job_id, "write.after_checkpoint=sleep:1", players.work_to_the_gate) as worker:
        stage.troupe.wait_for("write.after_checkpoint")
        lab.freeze_group(worker.pid)
        stage.kill(job_id)
        before = list(lab.store().manifest(job_id, "write"))
        stage.troupe.open_the_gate()
        os.killpg(worker.pid, signal.SIGCONT)
        assert worker.wait() == 0
    assert lab.store().read(job_id).state is State.KILLED
    assert list(lab.store().manifest(job_id, "write")) == before, "a dead job has taken a checkpoint"
    assert lab.lineage() == []


def test_a_kill_ends_a_job_whose_committer_sleeps(stage: Stage) -> None:
    lab = stage.lab
    job_id = stage.ask()
    with stage.worker(job_id, f"commit.before_publish={FOR_EVER}"):
        stage.troupe.wait_for("commit.before_publish")
        assert lab.store().read(job_id).state is State.COMMITTING
        stage.kill(job_id)
    assert lab.lineage() == []


@pytest.mark.parametrize("make_lab", ["sqlite"], indirect=True)
def test_a_request_that_waits_for_a_silent_catalog_is_given_up_at_once_and_leaves_nothing(
    stage: Stage,
) -> None:
    """There is no job to kill while it is planned: Ctrl-C is the way."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        stage.lab.configure("catalogs.silent", type="rest", uri=f"http://127.0.0.1:{silent.getsockname()[1]}")
        target = "iceberg://silent/db.events"
        asker = stage.troupe.play(
            players.command_from_a_terminal, "export", stage.lab.source(), target, "--all", "--create"
        )
        silent.settimeout(60)
        asked, _ = silent.accept()
        with asked:
            assert asked.recv(1)
            with within(PROMISED_S):
                os.killpg(asker.pid, signal.SIGINT)
                assert asker.wait() == INTERRUPTED
    assert stage.lab.jobs() == []
    assert stage.lab.pins() == []


def test_a_pause_keeps_what_was_checkpointed_and_the_job_goes_on_from_there(stage: Stage) -> None:
    lab = stage.lab
    job_id = stage.ask()
    with stage.worker(job_id, "write.after_checkpoint=sleep:1", players.work_to_the_gate) as worker:
        stage.troupe.wait_for("write.after_checkpoint")
        stage.command("pause", job_id)
        stage.troupe.open_the_gate()
        assert worker.wait() == 0
    paused = lab.store().read(job_id)
    assert paused.state is State.PAUSED
    kept = {file.path for file in lab.store().manifest(job_id, "write")}
    assert kept
    assert lab.lineage() == []
    stage.command("resume", job_id)
    with stage.worker(job_id) as worker:
        assert worker.wait() == 0
    lab.assert_exact()
    assert kept <= {file.path for file in lab.store().manifest(job_id, "write")}


def test_a_source_that_is_dropped_as_it_is_read_returns_at_once_and_the_export_is_exact(stage: Stage) -> None:
    lab = stage.lab
    rows = lab.source_rows()
    job_id = stage.ask()
    with stage.worker(job_id, "write.after_checkpoint=sleep:1") as worker:
        stage.troupe.wait_for("write.after_checkpoint")
        with within(BUSY_S):
            lab.sql("DROP TABLE events SYNC")
        assert worker.wait() == 0
    assert lab.target_rows() == rows
    assert lab.pins() == []


def test_killed_jobs_that_hang_in_spark_give_their_slots_back(
    tmp_path: Path, stoppable_chdb: Path, zygote: Zygote
) -> None:
    """A task that hangs in its source, one that hangs as it writes, and a job that needs their slots."""
    lab = Lab(tmp_path, stoppable_chdb, zygote=zygote)
    lab.make_events("events", parts=4, rows=4000)
    rows = pa.table({"id": list(range(10))})
    (tmp_path / "other").mkdir()
    pq.write_table(rows, tmp_path / "other" / "rows.parquet")

    def ask(source: str, target: str) -> str:
        arguments = ("export", source, f"iceberg://lake/{target}", "--all", "--create", "--detach")
        (job,) = lab.document(*arguments, "--file-size", "30KB")["jobs"]
        return str(job["job_id"])

    def goes_on(target: str) -> bool:
        return lab.wait_for_end(ask("parquet:other", target)).state is State.COMPLETED

    def in_flight(job_id: str) -> int:
        return sum(1 for task in lab.store().tasks(job_id) if task.owner and task.attempts)

    with lab.started("worker", failpoints=f"write.after_file={FOR_EVER}"):
        writing = ask(lab.source(), "db.writing")
        lab.wait_until(lambda: lab.store().read(writing).tasks_done == 3, timeout_s=120)
        lab.ok("kill", writing)
        reading = ask(lab.source(), "db.reading")
        with lab.frozen_source():
            lab.wait_until(lambda: in_flight(reading) == 2, timeout_s=120)
            lab.ok("kill", reading)
            assert goes_on("db.other")
    assert lab.lineage("db.writing") == []
    assert lab.lineage("db.reading") == []
    lab.close()
