"""`lockstep show` for a person: how far a job is, what waits for what, since when, why, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from lockstep.cli.render import (
    Grid,
    Inline,
    Line,
    Span,
    ago,
    duration,
    line,
    message_lines,
    number,
    percent,
    plural,
    rate,
    size,
    state_span,
)
from lockstep.errors import ErrorInfo
from lockstep.job import HistoryEntry, Job, Json, State, Task, TaskState
from lockstep.runtime import rfc3339
from lockstep.secrets import redact
from lockstep.view import eta_s, progress, rows_per_s, stage_of_rows, waiting_for_retry

BAR: Final = 30
MOST_TASKS: Final = 20
_NAME: Final = 12


def job_page(
    job: Job,
    tasks: Sequence[Task],
    history: Sequence[HistoryEntry],
    now: float,
    summary: Json | None = None,
) -> list[Grid | Line]:
    """`summary` is what an import has done with its rows."""
    page: list[Grid | Line] = [line(Span(f"Job {job.job_id}", "bold"), "  ", state_span(job.state))]
    page += _facts(job, now)
    page += _progress(job, tasks)
    page += _imported(summary) if summary else ()
    page += _waiting(job, tasks, history, now)
    page += _error(job)
    open_tasks = [task for task in tasks if task.state is not TaskState.DONE]
    if not job.state.live:
        # Nothing waits any more; what went wrong is still worth a look.
        open_tasks = [task for task in open_tasks if task.error is not None]
    if open_tasks:
        page.append(line(""))
        page.append(_task_grid(open_tasks, job, now))
        if len(open_tasks) > MOST_TASKS:
            page.append(line(f"… and {len(open_tasks) - MOST_TASKS} more", indent=2))
    return page


def _fact(name: str, *value: Inline) -> Line:
    return line(Span(name.ljust(_NAME), "dim"), *value, indent=2)


def _facts(job: Job, now: float) -> Iterable[Line]:
    part = f", partition {job.plan.partition}" if job.plan.partition is not None else ""
    yield _fact("from", redact(job.plan.source) + part)
    yield _fact("to", redact(job.plan.target))
    yield _fact("created", f"{rfc3339(job.created_at)} ({ago(job.created_at, now)})")
    if job.started_at is not None:
        yield _fact("started", f"{rfc3339(job.started_at)} ({ago(job.started_at, now)})")
    if job.finished_at is not None:
        took = f", {duration(job.finished_at - job.started_at)} after its start" if job.started_at else ""
        yield _fact("ended", f"{rfc3339(job.finished_at)}{took}")
    if job.generation > 1:
        yield _fact("generation", f"{job.generation} (it was retried)")
    yield _fact("commit", job.commit_id)


def _imported(summary: Json) -> Iterable[Line]:
    read, written, rejected = (number(summary[f"rows_{what}"]) for what in ("read", "written", "rejected"))
    checked = summary["duplicates"] is not None
    duplicates = plural(summary["duplicates"], "duplicate") if checked else "duplicates not checked"
    yield _fact("rows", f"{read} read, {written} written, {rejected} rejected, {duplicates}")
    if summary["rejects_file"] is not None:
        yield _fact("rejects", summary["rejects_file"])


def _progress(job: Job, tasks: Sequence[Task]) -> Iterable[Line]:
    done = progress(job)
    filled = int(done * BAR)
    total = f" of {number(job.plan.rows)}" if job.plan.rows is not None else ""
    stage = f" in {stage}" if (stage := stage_of_rows(job)) else ""
    parts = [f" {percent(done)}", f"{number(job.rows_done)}{total} rows{stage}"]
    if (pace := rows_per_s(job)) is not None:
        parts.append(f"{rate(pace).removesuffix('/s')} rows/s")
    if (left := eta_s(job)) is not None:
        parts.append(f"about {duration(left)} left")
    style = state_span(job.state).style
    yield _fact(
        "progress", Span("━" * filled, style), Span("┄" * (BAR - filled), "grey50"), " · ".join(parts)
    )
    running = sum(1 for task in tasks if task.state is TaskState.LEASED)
    waiting = sum(1 for task in tasks if task.state is TaskState.WAITING)
    if len(job.plan.stages) > 1 and job.state.live:
        yield _fact("stage", f"{job.stage} (of {', '.join(job.plan.stages)})")
    yield _fact(
        "tasks",
        f"{job.tasks_done} of {job.tasks_total} done"
        + (f", {running} running" if running else "")
        + (f", {waiting} {'waiting' if job.state.live else 'not finished'}" if waiting else ""),
    )
    yield _fact("written", f"{plural(job.files, 'file')}, {size(job.bytes_done)}")
    if job.workers and job.state.live:
        yield _fact("workers", ", ".join(job.workers))


def _waiting(job: Job, tasks: Sequence[Task], history: Sequence[HistoryEntry], now: float) -> Iterable[Line]:
    """Who has to do what next."""
    since = duration(now - _since(job, history))
    command = f"lockstep resume {job.job_id}"
    match job.state:
        case State.PENDING:
            yield _fact("waits", f"for a worker, since {since}: `lockstep worker` runs what the store holds")
        case State.RUNNING:
            yield from _running(job, tasks, now)
        case State.PAUSED:
            yield _fact("waits", f"paused since {since}: `{command}` lets it go on from where it is")
        case State.COMMITTING:
            limits = job.plan.limits
            tried = (
                f"attempt {job.commit_attempts} of {limits.commit_attempts}" if job.commit_attempts else ""
            )
            yield _fact("waits", f"for its commit, since {since}" + (f", {tried}" if tried else ""))
            if job.error is not None and job.error.at is not None:
                yield _fact("", f"the last try, {ago(job.error.at, now)}, did not go through:")
            if job.kill_requested:
                yield _fact("", "a kill was asked for: the committer fences the commit unless it has landed")
        case State.COMPLETED:
            yield _fact(
                "published", f"as snapshot {job.snapshot_id}; `lockstep history {job.job_id}` tells how"
            )
        case State.FAILED if job.error is not None and job.error.permanent:
            yield _fact(
                "next", "nothing was published; another try ends the same way until the cause is mended"
            )
        case State.FAILED:
            yield _fact(
                "next", f"`lockstep retry {job.job_id}` goes on from what is finished; nothing was published"
            )
        case State.KILLED:
            yield _fact("next", "nothing of it was published, and nothing ever will be")


def _since(job: Job, history: Sequence[HistoryEntry]) -> float:
    """When the job came into the state that it is in."""
    moment = job.updated_at
    for entry in reversed(history):
        if entry.state is not job.state:
            break
        moment = entry.at
    return moment


def _running(job: Job, tasks: Sequence[Task], now: float) -> Iterable[Line]:
    later = [task for task in waiting_for_retry(job, tasks) if (task.next_attempt_at or 0) > now]
    if later:
        yield from _retries(job, later, now)
    leased = [task for task in tasks if task.state is TaskState.LEASED]
    lost = [task for task in leased if task.lease_until is not None and task.lease_until < now]
    if lost and len(lost) == len(leased):
        silent = duration(now - max(task.lease_until or 0 for task in lost))
        yield _fact(
            "waits",
            f"for a worker: {lost[0].owner or 'the last one'} is gone, its lease ended {silent} ago; "
            "`lockstep worker` goes on from the last checkpoint",
        )
    elif not leased and not later:
        yield _fact("waits", "for a worker: `lockstep worker` runs what the store holds")


def _retries(job: Job, later: Sequence[Task], now: float) -> Iterable[Line]:
    """How many tasks are to be tried again; of the next one when, since when it waits, and why."""
    soonest = later[0]
    assert soonest.error is not None
    assert soonest.next_attempt_at is not None
    since = f", waiting since {duration(now - soonest.error.at)}" if soonest.error.at is not None else ""
    yield _fact(
        "waits",
        f"{plural(len(later), 'task')} to be tried again, the next in "
        f"{duration(soonest.next_attempt_at - now)} (attempt {soonest.attempts + 1} of "
        f"{job.plan.limits.task_attempts}): task {soonest.index}{since}",
    )
    yield from _text_fact("", f"{soonest.error.cls}: {soonest.error.message}")


def _error(job: Job) -> Iterable[Line]:
    if job.error is None:
        return
    task = f" (task {job.error.task})" if job.error.task is not None else ""
    yield from _text_fact("error", f"{job.error.cls}: {job.error.message}{task}")
    if job.error.hint:
        yield from _text_fact("hint", job.error.hint)


def _text_fact(name: str, text: str) -> Iterable[Line]:
    first, *below = message_lines("", text)
    yield _fact(name, *first.spans)
    for each in below:
        yield line(*each.spans, indent=each.indent + _NAME + 2)


def _task_grid(tasks: Sequence[Task], job: Job, now: float) -> Grid:
    # Those with an error first: they are what somebody who looks at a job wants to know.
    ranked = sorted(tasks, key=lambda task: (task.error is None, task.state is TaskState.WAITING, task.index))
    return Grid(
        (">task", "|state", ">done", ">rows", ">attempts", "next try", "worker", "last error"),
        [
            (
                str(task.index),
                task.state.value,
                percent(task.rows_done / task.rows) if task.rows else "",
                number(task.rows),
                f"{task.attempts} of {job.plan.limits.task_attempts}",
                _next_try(task, job, now),
                task.owner or "",
                _in_one_line(task.error) if task.error else "",
            )
            for task in ranked[:MOST_TASKS]
        ],
        drop=("worker", "rows", "done"),
    )


def _in_one_line(error: ErrorInfo) -> str:
    first, *rest = error.message.splitlines() or [""]
    return f"{error.cls}: {first}" + (" …" if rest else "")


def _next_try(task: Task, job: Job, now: float) -> str:
    if not job.state.live:
        return "never" if task.state is TaskState.FAILED else ""
    if task.state is TaskState.LEASED:
        return "running now" if (task.lease_until or now) >= now else "when a worker takes over"
    if task.state is TaskState.FAILED:
        return "never"
    if task.next_attempt_at is not None and task.next_attempt_at > now:
        return f"in {duration(task.next_attempt_at - now)}"
    return "after a resume" if job.state is State.PAUSED else "when a worker is free"
