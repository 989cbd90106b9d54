"""A kill as a person asks for it, and the time in which it is promised to be over."""

from __future__ import annotations

import time
from typing import Final

from lockstep.job import State
from tests.lab import Lab, processes_of
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
    found = processes_of(worker.pid)
    return [pid for pid, (state, parent) in found.items() if state != "Z" and worker.pid not in (pid, parent)]
