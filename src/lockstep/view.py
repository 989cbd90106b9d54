"""A job as people and programs see it: the document of `show --json` and of one element of `jobs --json`.

The field names are a promise to scripts. Nothing heavy is imported, and no secret gets in: addresses keep
`${NAME}`, and a literal password is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lockstep.errors import ErrorInfo
from lockstep.job import Fingerprint, Job, Json, State, Task, TaskState
from lockstep.runtime import rfc3339
from lockstep.secrets import redact

MOST_WAITING: Final = 50
STAGE_ENDS: Final = {"map": 0.5, "combine": 0.6, "recombine": 0.65, "unique": 0.75, "merge": 1.0}
"""About how far an import is when a stage ends. The next one begins there, whether or not those between the
two were needed: how far a job is must never seem to go back."""
WRITTEN: Final = 0.99
"""How far a job of unknown size is when all is written and it is to be published."""


def job_document(job: Job, tasks: Sequence[Task] | None = None) -> Json:
    """Every field that is promised; unknown ones are None. With `tasks` it lists them too."""
    document: Json = {
        "job_id": job.job_id,
        "request_id": job.request_id,
        "kind": job.kind.value,
        "state": job.state.value,
        "generation": job.generation,
        "source": redact(job.plan.source),
        "target": redact(job.plan.target),
        "partition": job.plan.partition,
        "commit_id": job.commit_id,
        "snapshot_id": job.snapshot_id,
        "stage": job.stage,
        "tasks_total": job.tasks_total,
        "tasks_done": job.tasks_done,
        "rows_total": job.plan.rows,
        "rows_done": job.rows_done,
        "bytes_done": job.bytes_done,
        "files": job.files,
        "progress": progress(job),
        "rows_per_s": rows_per_s(job),
        "eta_s": eta_s(job),
        "attempts": job.attempts,
        "created_at": rfc3339(job.created_at),
        "updated_at": rfc3339(job.updated_at),
        "started_at": rfc3339(job.started_at),
        "finished_at": rfc3339(job.finished_at),
        "workers": list(job.workers),
        "tasks_waiting_for_retry": job.tasks_waiting_for_retry,
        "kill_requested": job.kill_requested,
        "error": error_document(job.error),
        "fingerprint": _fingerprint(job),
    }
    if tasks is not None:
        waiting = waiting_for_retry(job, tasks)
        document["waiting"] = [waiting_document(task) for task in waiting[:MOST_WAITING]]
        document["waiting_total"] = len(waiting)
        document["tasks"] = [task_document(task) for task in tasks]
    return document


def error_document(error: ErrorInfo | None) -> Json | None:
    return None if error is None else {**error.to_json(), "at": rfc3339(error.at)}


def waiting_for_retry(job: Job, tasks: Sequence[Task]) -> list[Task]:
    """The tasks that failed and are to be tried again, the next one first."""
    failed = [task for task in tasks if task.state is TaskState.WAITING and task.error is not None]
    return sorted(failed, key=lambda t: (t.next_attempt_at or 0.0, t.index)) if job.state.live else []


def waiting_document(task: Task) -> Json:
    """Which task waits, since when, why, and when it is tried again."""
    assert task.error is not None
    return {
        "task": task.index,
        "stage": task.stage,
        "since": rfc3339(task.error.at),
        "attempts": task.attempts,
        "next_attempt_at": rfc3339(task.next_attempt_at),
        "error": error_document(task.error),
    }


def _fingerprint(job: Job) -> Json | None:
    """None until something was read: an empty fingerprint would say that there are no rows."""
    known = job.fingerprint
    if known is None or (known == Fingerprint() and job.state is not State.COMPLETED):
        return None
    return known.to_json()


def task_document(task: Task) -> Json:
    return {
        "task": task.index,
        "stage": task.stage,
        "state": task.state.value,
        "epoch": task.epoch,
        "attempts": task.attempts,
        "rows_total": task.rows,
        "rows_done": task.rows_done,
        "bytes_done": task.bytes_done,
        "files": task.files,
        "worker": task.owner,
        "lease_until": rfc3339(task.lease_until),
        "started_at": rfc3339(task.started_at),
        "next_attempt_at": rfc3339(task.next_attempt_at),
        "error": error_document(task.error),
    }


def progress(job: Job) -> float:
    """From 0 to 1. Only a published job is at 1 when its size is not known before."""
    if job.state is State.COMPLETED:
        return 1.0
    if job.plan.rows:
        return round(min(1.0, job.rows_done / job.plan.rows), 4)
    if job.state is State.COMMITTING and job.plan.rows is None:
        return WRITTEN
    first, last = _span(job)
    done = first + (last - first) * _stage_progress(job)
    return round(done if job.plan.rows is not None else min(WRITTEN, done), 4)


def _span(job: Job) -> tuple[float, float]:
    """About how far the job is when its stage begins and when it ends."""
    stages = job.plan.stages
    earlier = stages[: stages.index(job.stage)] if job.stage in stages else ()
    return (STAGE_ENDS.get(earlier[-1], 0.0) if earlier else 0.0), STAGE_ENDS.get(job.stage, 1.0)


def _stage_progress(job: Job) -> float:
    estimate = job.plan.terms.rows_estimate if job.plan.terms else 0
    by_tasks = job.tasks_done / job.tasks_total if job.tasks_total else 0.0
    # An estimate may be wrong: only finished tasks say that a stage is over.
    return max(by_tasks, min(0.99, job.rows_done / estimate)) if estimate else by_tasks


def stage_of_rows(job: Job) -> str | None:
    """The stage whose rows `rows_done` counts, where that has to be said: of a live import with several."""
    return job.stage if job.state.live and len(job.plan.stages) > 1 else None


def rows_per_s(job: Job) -> float | None:
    """The average of an ended job; of a live one, of its stage, since work has gone on without a break."""
    if job.finished_at is not None and job.started_at is not None:
        rows, seconds = job.rows_done, job.finished_at - job.started_at
    else:
        rows, seconds = job.rows_done - job.paced_rows, _unbroken_s(job)
    return round(rows / seconds, 1) if rows > 0 and seconds > 0 else None


def _unbroken_s(job: Job) -> float:
    """For how long work has gone on without a break. A store of an earlier version knows the start only."""
    since = job.started_at if job.paced_at is None else job.paced_at
    return 0.0 if since is None else job.updated_at - since


def eta_s(job: Job) -> float | None:
    """Seconds until all rows are written, at the pace of this stage since work has gone on without a break.

    None unless somebody works on it.
    """
    if job.state is not State.RUNNING or not job.workers:
        return None
    if job.plan.rows is None:
        return _left_by_share_s(job)
    pace = rows_per_s(job)
    return round(max(0, job.plan.rows - job.rows_done) / pace, 1) if pace else None


def _left_by_share_s(job: Job) -> float | None:
    """By the share of the whole that was done meanwhile: how many rows there are is not known."""
    rows = job.rows_done - job.paced_rows
    if rows <= 0:
        return None
    first, last = _span(job)
    gained = (last - first) * _stage_progress(job) * rows / job.rows_done
    return round(_unbroken_s(job) * (1 - progress(job)) / gained, 1) if gained > 0.01 else None
