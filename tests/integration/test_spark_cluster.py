"""An export on a real Spark cluster: what an executor, a driver or a hanging task takes with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.job import State, TaskState
from tests.lab import SHORT_LIVED, Lab
from tests.spark_cluster import SparkCluster, daemons_of, kill
from tests.zygote import Zygote

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    cluster = SparkCluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.close()


@pytest.fixture
def lab(cluster: SparkCluster, tmp_path: Path, stoppable_chdb: Path, zygote: Zygote) -> Iterator[Lab]:
    """A lab whose drivers run their tasks on the cluster. Executors count failpoints together."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    counts = tmp_path / "reached"
    counts.mkdir()
    spark = {
        "master": cluster.master,
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": SHORT_LIVED,
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(paths),
        "spark.executorEnv.LOCKSTEP_FAILPOINTS": "write.after_checkpoint=sleep:600@4",
        "spark.executorEnv.LOCKSTEP_FAILPOINTS_STATE": str(counts),
    }
    lab = Lab(tmp_path, stoppable_chdb, spark=spark, zygote=zygote)
    yield lab
    lab.close()


def ask(lab: Lab, table: str = "events") -> str:
    arguments = ("export", lab.source(table), f"iceberg://lake/db.{table}", "--all", "--create", "--detach")
    (job,) = lab.document(*arguments, "--file-size", "30KB")["jobs"]
    return str(job["job_id"])


def running(lab: Lab, job_id: str) -> int:
    return sum(1 for task in lab.store().tasks(job_id) if task.owner and task.attempts)


def test_an_executor_that_is_killed_is_replaced_and_the_export_is_exact(
    lab: Lab, cluster: SparkCluster
) -> None:
    lab.make_events(parts=3, rows=4000)
    job_id = ask(lab)
    with lab.started("worker"):
        with lab.frozen_source():
            lab.wait_until(lambda: running(lab, job_id) == 2, timeout_s=300)
            victim, other = cluster.executors()
            assert all("lockstep.engine.daemon" in each for each in daemons_of(victim) + daemons_of(other))
            kill(victim)
        job = lab.wait_for_end(job_id, timeout_s=300)
    assert job.state is State.COMPLETED
    assert job.attempts > job.tasks_total, "no attempt was lost with the executor"
    lab.assert_exact()


def test_a_driver_that_is_killed_is_replaced_and_nothing_that_was_checkpointed_is_done_again(
    lab: Lab,
) -> None:
    lab.make_events(parts=6, rows=4000)
    job_id = ask(lab)
    with lab.started("worker") as driver:
        lab.wait_until(lambda: lab.store().read(job_id).tasks_done == 5, timeout_s=300)
        os.killpg(driver.pid, signal.SIGKILL)
    before = {task.index: task for task in lab.store().tasks(job_id)}
    kept = {file.path for file in lab.store().manifest(job_id, "write")}
    (hanging,) = [task for task in before.values() if task.state is not TaskState.DONE]
    assert hanging.files, "it hangs after a checkpoint"
    lab.ok("worker", "--once")
    lab.assert_exact()
    after = {task.index: task for task in lab.store().tasks(job_id)}
    assert kept <= {file.path for file in lab.store().manifest(job_id, "write")}
    assert {i: task.attempts for i, task in after.items()} == {
        i: task.attempts + (i == hanging.index) for i, task in before.items()
    }


def test_a_kill_ends_a_job_that_hangs_on_the_cluster_and_frees_its_executor(lab: Lab) -> None:
    lab.make_events("events", parts=5, rows=4000)
    lab.make_events("others", parts=3, rows=4000)
    other = ask(lab, "others")
    lab.store().pause(other)
    job_id = ask(lab, "events")
    with lab.started("worker"):
        lab.wait_until(lambda: lab.store().read(job_id).tasks_done == 4, timeout_s=300)
        lab.ok("kill", job_id)
        assert lab.store().read(job_id).state is State.KILLED
        with lab.frozen_source():
            lab.store().resume(other)
            # Both executors work again: the one that hung is free.
            lab.wait_until(lambda: running(lab, other) == 2, timeout_s=300)
        assert lab.wait_for_end(other, timeout_s=300).state is State.COMPLETED
    assert lab.lineage("db.events") == []
    lab.assert_exact(table="others", target="db.others")
