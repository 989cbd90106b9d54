"""Rows of the SQL store as jobs and tasks, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Row

from lockstep.errors import ErrorInfo, Incompatible, LockstepError
from lockstep.job import Fingerprint, Holding, Job, Task, TaskState
from lockstep.store.rules import Frozen, as_job, damaged_plan, dumps, holding_from_json


class JobRow(SimpleNamespace):
    """A job's row as it was read or last written in this transaction."""

    job_id: str
    state: str
    generation: int
    stage: str
    tasks_total: int
    tasks_done: int
    rows_done: int
    created_at: float
    updated_at: float
    finished_at: float | None
    commit_epoch: int
    commit_owner: str | None

    def changed(self, changes: Mapping[str, Any]) -> JobRow:
        return JobRow(**{**vars(self), **changes})


def saved(task: Row[Any]) -> dict[str, int]:
    """The progress of a task back at its checkpoint: what an attempt read after it is read again."""
    return {"rows_done": task.saved_rows, "bytes_done": task.saved_bytes}


def lost_progress(found: Sequence[Row[Any]]) -> dict[str, int]:
    """What the counters of a job lose when these tasks go back to their checkpoints."""
    return {
        "rows_done": sum(task.saved_rows - task.rows_done for task in found),
        "bytes_done": sum(task.saved_bytes - task.bytes_done for task in found),
    }


def as_task(row: Row[Any]) -> Task:
    state = TaskState(row.state)
    return Task(
        job_id=row.job_id,
        stage=row.stage,
        index=row.idx,
        descriptor=json.loads(row.descriptor),
        rows=row.rows,
        size_bytes=row.size_bytes,
        state=state,
        epoch=row.epoch,
        attempts=row.attempts,
        position=None if row.position is None else json.loads(row.position),
        rows_done=row.rows_done,
        bytes_done=row.bytes_done,
        files=row.files,
        owner=row.owner,
        lease_until=row.free_at if state is TaskState.LEASED else None,
        started_at=row.started_at,
        next_attempt_at=row.free_at if state is TaskState.WAITING and row.free_at > 0 else None,
        error=as_error(row.error),
    )


def job_of(row: Row[Any] | JobRow, frozen: Frozen, workers: set[str], retrying: int, now: float) -> Job:
    return as_job(row, frozen, workers, retrying, now, as_error(row.error), as_fingerprint(row.fingerprint))


def as_error(raw: str | None) -> ErrorInfo | None:
    return None if raw is None else ErrorInfo.from_json(json.loads(raw))


def error_text(error: ErrorInfo | None) -> str | None:
    return None if error is None else dumps(error.to_json())


def as_fingerprint(raw: str | None) -> Fingerprint:
    return Fingerprint() if raw is None else Fingerprint.from_json(json.loads(raw))


def frozen_columns(frozen: Frozen) -> dict[str, str]:
    return {name: dumps(value) for name, value in frozen.to_json().items()}


def as_holding(raw: str) -> Holding:
    return holding_from_json(json.loads(raw))


def thawed(row: Row[Any]) -> Frozen | LockstepError:
    """The frozen part of a job, or why it cannot be read."""
    try:
        return Frozen.from_json(
            {name: json.loads(getattr(row, name)) for name in ("plan", "holding", "beside")}
        )
    except (Incompatible, ValueError, KeyError, TypeError, AttributeError) as error:
        return damaged_plan(row.job_id, error)
