"""What a connection to PostgreSQL remembers of jobs and tasks that it has read or written.

A verb may decide on it without reading, because what it then writes is refused unless all of it is still
true. It belongs to one connection, and goes with it: a server that takes over may have forgotten what was
remembered here, and give the same version to something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Row

from lockstep.job import TaskState
from lockstep.store.sql_changes import JOB_MOVES, TASK_MOVES, Change, Later

_MOST_JOBS: Final = 32
_MOST_TASKS: Final = 256
_TaskKey = tuple[str, int]


@dataclass
class Known:
    """A job's row, its version, and rows of its tasks as of that version."""

    job: Row[Any]
    version: str
    tasks: dict[_TaskKey, Row[Any]] = field(default_factory=dict)


class Memory:
    def __init__(self) -> None:
        self._jobs: dict[str, Known] = {}

    def forget(self) -> None:
        self._jobs.clear()

    def recall(self, job_id: str, stage: str, index: int) -> tuple[Known, Row[Any]] | None:
        known = self._jobs.get(job_id)
        task = None if known is None else known.tasks.get((stage, index))
        return None if known is None or task is None else (known, task)

    def learn(self, job: Row[Any], version: str, read: Sequence[Row[Any]]) -> None:
        """Note what was read at one instant. Tasks that were known of another version are forgotten."""
        known = self._jobs.get(job.job_id)
        if known is None or known.version != version:
            if len(self._jobs) >= _MOST_JOBS:
                self._jobs.clear()
            known = self._jobs[job.job_id] = Known(job, version)
        if len(known.tasks) >= _MOST_TASKS:
            known.tasks.clear()
        known.tasks.update({(task.stage, task.idx): task for task in read})

    def follow(self, job_id: str, version: str, changes: Sequence[Change], now: float | None) -> None:
        """Note our own changes, which made `version` of what is known."""
        known = self._jobs.get(job_id)
        if known is None:
            return
        known.version = version
        for change in changes:
            if change.rank() == JOB_MOVES:
                known.job = known.job._replace(**_written(change.row, now))
            elif change.rank() == TASK_MOVES:
                self._follow_task(known, change.row, now)

    def _follow_task(self, known: Known, row: Mapping[str, Any], now: float | None) -> None:
        key = (row["b_stage"], row["b_idx"])
        task = known.tasks.pop(key, None)
        # Nobody asks for a task that is done, but its executor, whose reply was lost.
        if task is not None and row.get("state") != TaskState.DONE:
            known.tasks[key] = task._replace(**_written(row, now))


def _written(row: Mapping[str, Any], now: float | None) -> dict[str, Any]:
    """The columns that a change sets, with their values."""
    return {
        name: (now or 0.0) + value.offset_s if isinstance(value, Later) else value
        for name, value in row.items()
        if not name.startswith("b_")
    }
