"""A kill as a person asks for it, and the time in which it is promised to be over."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from lockstep.job import State
from tests.lab import Lab
from tests.players import Troupe, command
from tests.standstill import TICK_S, Standstill
from tests.zygote import Child

PROMISED_S: Final = 5.0
"""From the word of the person to a job that is killed, and from there to tasks whose processes are gone."""


def kill_in_time(lab: Lab, troupe: Troupe, job_id: str, worker: Child | None = None, *options: str) -> None:
    """`lockstep kill`: the job has ended in time by the times of its store, and nothing of it runs on.

    `worker` is one that can hear of it; its tasks are processes of its own.
    """
    with Standstill() as standstill:
        asked_at = time.time()
        assert troupe.play(command, "kill", job_id, *options).wait() == 0, troupe.said()
        job = lab.store().read(job_id)
        assert job.state is State.KILLED, job
        assert job.finished_at is not None
        assert job.finished_at - asked_at < PROMISED_S + standstill.seconds
        while worker is not None and (tasks := tasks_of(worker)):
            late_s = time.time() - job.finished_at - standstill.seconds
            assert late_s < PROMISED_S, f"these still run: {tasks}"
            time.sleep(TICK_S)


def tasks_of(worker: Child) -> list[int]:
    """The processes in which a worker runs its tasks: forks of a fork of its own."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, which may hold anything, ends with the last bracket; state, parent and group follow.
            state, parent, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # gone meanwhile
        if int(group) == worker.pid and state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    return [pid for pid, parent in parents.items() if pid != worker.pid and parent != worker.pid]
