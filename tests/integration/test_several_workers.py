"""Several `lockstep worker` processes on one store: they share the work, and replace each other."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lockstep.job import Job, State
from tests import players
from tests.lab import Lab
from tests.players import Troupe
from tests.zygote import Zygote

pytestmark = pytest.mark.servers

IN_FLIGHT = 2
"""With one core a worker holds two tasks: one runs, and the next one is at hand."""
ON_SPARK = "postgresql"
"""The store whose workers are `lockstep worker` on Spark; with the others forked processes take its place."""


@pytest.fixture
def narrow_lab(make_lab: Callable[..., Lab], stoppable_chdb: Path) -> Lab:
    """On each kind of store: workers that have one core each, and a source that can be stopped."""
    return make_lab(stoppable_chdb, spark={"master": "local[1]"})


@contextmanager
def a_worker(lab: Lab, troupe: Troupe, play: Callable[..., object]) -> Iterator[int]:
    """Answers its process, which has a group of its own."""
    if lab.config.store_url.startswith(ON_SPARK):
        with lab.started("worker") as process:
            yield process.pid
        return
    worker = troupe.play(play)
    try:
        yield worker.pid
    finally:
        worker.kill_group()


def ask(lab: Lab, table: str, *options: str) -> list[str]:
    """Ask for an export of `table` and leave it to the workers; answers the job ids."""
    arguments = ("export", lab.source(table), f"iceberg://lake/db.{table}", "--all", "--create", "--detach")
    return [job["job_id"] for job in lab.document(*arguments, *options)["jobs"]]


def held(lab: Lab, job_id: str, *, begun: bool) -> Counter[int]:
    """How many tasks of a job each worker holds, or has begun, by the worker's process."""
    tasks = [task for task in lab.store().tasks(job_id) if task.owner and (task.attempts or not begun)]
    return Counter(int(str(task.owner).split("/")[1]) for task in tasks)


def wait_until_each_is_full(lab: Lab, job_id: str, workers: list[int]) -> None:
    """Each worker runs one task, and has the next one at hand."""
    running = Counter(dict.fromkeys(workers, 1))
    full = Counter(dict.fromkeys(workers, IN_FLIGHT))
    lab.wait_until(
        lambda: (held(lab, job_id, begun=True), held(lab, job_id, begun=False)) == (running, full),
        timeout_s=240,
    )


def finish(lab: Lab, job_ids: list[str]) -> list[Job]:
    return [lab.wait_for_end(job_id, timeout_s=240) for job_id in job_ids]


@pytest.mark.timeout(900)
def test_workers_share_a_job_and_finish_what_one_of_them_loses(narrow_lab: Lab, zygote: Zygote) -> None:
    lab = narrow_lab
    troupe = Troupe(zygote, lab.folder)
    lab.make_events("shared", parts=8, rows=2000)
    lab.make_events("tiny", partitions=3, parts=3, rows=1)
    lab.make_events("lost", parts=8, rows=2000)
    lab.make_events("after", parts=1, rows=1)
    with ExitStack() as stack:
        shared = ask(lab, "shared", "--file-size", "15KB")
        with lab.frozen_source():
            hired = [a_worker(lab, troupe, players.toil_narrowly) for _ in range(3)]
            workers = [stack.enter_context(each) for each in hired]
            wait_until_each_is_full(lab, shared[0], workers)
            waiting = [task for task in lab.store().tasks(shared[0]) if not task.owner]
            assert len(waiting) == 2, "more work than slots waits"
        (job,) = finish(lab, shared)
        lab.assert_exact(table="shared", target="db.shared")
        # Each of them has finished what it held: no task was begun twice.
        assert job.attempts == job.tasks_total == 8

        finish(lab, ask(lab, "tiny"))
        lab.assert_exact(jobs=3, table="tiny", target="db.tiny")
        assert len(lab.target_rows("db.tiny")) == 9

        assert_that_the_lost_are_replaced(lab, workers)


def assert_that_the_lost_are_replaced(lab: Lab, workers: list[int]) -> None:
    """One worker is killed and one sleeps through its lease; the third finishes what they held."""
    dead, asleep, awake = workers
    # They have nothing left to write: one that is stopped as it writes to SQLite would keep others out.
    lab.wait_until(lambda: lab.pins() == [])
    for worker in workers:
        lab.freeze_group(worker)
    (job_id,) = ask(lab, "lost", "--file-size", "15KB")
    with lab.frozen_source():
        for worker in workers:
            os.killpg(worker, signal.SIGCONT)
        wait_until_each_is_full(lab, job_id, workers)
        os.killpg(dead, signal.SIGKILL)
        lab.freeze_group(asleep)
    finish(lab, [job_id])
    lab.assert_exact(table="lost", target="db.lost")
    # The last that is written of a job.
    lab.wait_until(lambda: lab.store().read(job_id).released)
    before = lab.store().read(job_id)
    assert before.state is State.COMPLETED
    assert before.attempts > before.tasks_total, "nobody had to take over"

    os.killpg(awake, signal.SIGKILL)
    os.killpg(asleep, signal.SIGCONT)
    # Once it has done something new, it is past all that it could still have sent of the old.
    (job,) = finish(lab, ask(lab, "after"))
    assert job.state is State.COMPLETED
    assert lab.store().read(job_id) == before
    lab.assert_exact(table="lost", target="db.lost")


def test_one_partition_asked_for_by_many_at_the_same_instant_is_one_job_on_every_store(
    lab_on_each_store: Lab, zygote: Zygote
) -> None:
    lab = lab_on_each_store
    lab.make_events(parts=1, rows=10)
    # The table is there first: these four meet at the store, not at the catalog.
    (first,) = ask(lab, "events")
    lab.ok("kill", first)
    request = ("export", lab.source(), "iceberg://lake/db.events", "--partition", "202401", "--detach")
    troupe = Troupe(zygote, lab.folder)
    askers = [troupe.play(players.command, *request) for _ in range(4)]
    assert sorted(asker.wait() for asker in askers) == [0, 3, 3, 3], troupe.said()
    (job,) = (job for job in lab.jobs() if job.state.live)
    assert [pin for pin in lab.pins() if first not in pin] == [f"lockstep_pin_{job.job_id}"]


@pytest.mark.timeout(900)
def test_a_small_job_starts_at_once_beside_a_huge_one_and_finishes_first(lab: Lab, zygote: Zygote) -> None:
    lab.make_events("huge", parts=40, rows=300)
    lab.make_events("small", parts=1, rows=10)
    (small,) = ask(lab, "small")
    lab.store().pause(small)
    (huge,) = ask(lab, "huge", "--file-size", "2KB")
    assert lab.store().read(huge).tasks_total == 40
    troupe = Troupe(zygote, lab.folder)
    worker = troupe.play(players.toil_to_the_gate, "1")
    try:
        lab.wait_until(lambda: lab.store().read(huge).tasks_done > 0)
        lab.store().resume(small)
        troupe.open_the_gate()
        finish(lab, [small, huge])
    finally:
        worker.kill_group()
    lab.assert_exact(table="small", target="db.small")
    lab.assert_exact(table="huge", target="db.huge")
    first, second = lab.store().read(small), lab.store().read(huge)
    assert first.finished_at is not None
    assert second.finished_at is not None
    assert first.finished_at < second.finished_at
