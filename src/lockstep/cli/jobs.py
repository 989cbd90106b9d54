"""Looking at jobs: jobs, show, watch, history. They read the store and start nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from lockstep.cli.page import job_page
from lockstep.cli.progress import ProgressView, all_ended, follow
from lockstep.cli.render import (
    Grid,
    Line,
    Span,
    ago,
    duration,
    hint_lines,
    line,
    message_lines,
    number,
    percent,
    plural,
    rate,
    state_span,
)
from lockstep.cli.session import INTERRUPTED, Session, command
from lockstep.errors import Invalid, Retryable
from lockstep.job import HistoryEntry, Job, Json, Kind, State
from lockstep.runtime import rfc3339
from lockstep.secrets import redact
from lockstep.view import eta_s, job_document, progress, rows_per_s, stage_of_rows

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job id, or the beginning of one.")]

EXIT_CODES: Final = {State.COMPLETED: 0, State.FAILED: 1, State.KILLED: 4}


def parse_states(texts: Sequence[str]) -> set[State] | None:
    """Raises: Invalid for what is no state."""
    wanted = {text.strip().lower() for texts_ in texts for text in texts_.split(",") if text.strip()}
    known = {state.value for state in State}
    if unknown := sorted(wanted - known):
        raise Invalid(
            f'"{unknown[0]}" is not a state', hint="one of " + ", ".join(state.value for state in State)
        )
    return {State(text) for text in wanted} or None


@command
def jobs(
    session: Session,
    state: Annotated[
        list[str] | None, typer.Option(help="Only jobs in this state; may be repeated.", metavar="STATE")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="At most this many, the newest first.", min=1, metavar="N")
    ] = None,
) -> int:
    """List the jobs, newest first."""
    found = session.store.list(parse_states(state or []), limit)
    documents = [job_document(job) for job in found]
    if not found:
        session.answer(documents, "no jobs" + (f" in state {', '.join(state)}" if state else ""))
    else:
        session.answer(documents, jobs_grid(found, session.clock.now()))
    return 0


@command
def show(session: Session, job: JobArgument) -> int:
    """Show one job: how far it is, what waits for what, and why."""
    found = session.job(job)
    tasks = session.store.tasks(found.job_id)
    history = session.store.history(found.job_id)
    summary = _summary(session, found)
    page = job_page(found, tasks, history, session.clock.now(), summary)
    document = job_document(found, tasks)
    session.answer({**document, "summary": summary} if found.kind is Kind.IMPORT else document, *page)
    return 0


def _summary(session: Session, job: Job) -> Json | None:
    """What an import has done with its rows, if it is over and all can be asked."""
    if job.kind is not Kind.IMPORT:
        return None
    from lockstep.review import summary

    try:
        return summary(job, session.store, session.config)
    except Retryable:
        return None


@command
def watch(session: Session, job: JobArgument) -> int:
    """Follow a job until it ends. Ctrl-C stops the watching, not the job."""
    job_id = session.job(job).job_id
    try:
        with ProgressView(session.side, session.clock) as view:
            ended = follow(
                lambda: [session.store.read(job_id)], view, lambda s: _slept(session, s), all_ended
            )[0]
    except KeyboardInterrupt:
        session.remark(f"stopped watching; the job goes on: lockstep watch {job_id}")
        return INTERRUPTED
    session.answer(job_document(ended), *closing(ended))
    return EXIT_CODES[ended.state]


@command
def history(session: Session, job: JobArgument) -> int:
    """Every event of a job, oldest first."""
    found = session.job(job)
    entries = session.store.history(found.job_id)
    session.answer([history_document(entry) for entry in entries], history_grid(entries))
    return 0


def _slept(session: Session, seconds: float) -> bool:
    session.clock.sleep(seconds)
    return False


def jobs_grid(jobs: Sequence[Job], now: float) -> Grid:
    return Grid(
        (
            *("|job", "|state", "partition", ">done", ">rows", ">rows/s", ">time", "|created"),
            *("~source", "~target"),
        ),
        [
            (
                job.job_id,
                state_span(job.state),
                job.plan.partition if job.plan.partition is not None else "",
                percent(progress(job)),
                number(job.rows_done) + (f" in {stage}" if (stage := stage_of_rows(job)) else ""),
                rate(rows_per_s(job)).removesuffix("/s"),
                _time(job, now),
                ago(job.created_at, now),
                brief(job.plan.source),
                brief(job.plan.target),
            )
            for job in jobs
        ],
        drop=("rows/s", "time", "target", "created", "rows", "source", "done"),
    )


def brief(address: str) -> str:
    """An address for a narrow column: no login, and of a long path only the end, which tells tables apart."""
    shown = re.sub(r"://[^/@]*@", "://", redact(address))
    scheme, colon, path = shown.partition(":")
    pieces = path.split("/")
    if scheme not in ("chdb", "parquet") or not path.startswith("/") or len(pieces) <= 4:
        return shown
    return f"{scheme}{colon}…/{'/'.join(pieces[-3:])}"


def _time(job: Job, now: float) -> str:
    """How long it took, or how long it will take at the present pace."""
    if job.finished_at is not None and job.started_at is not None:
        return duration(job.finished_at - job.started_at)
    left = eta_s(job)
    if left is not None:
        return f"{duration(left)} left"
    return duration(now - job.started_at) if job.started_at is not None and job.state.live else ""


def closing(job: Job) -> list[Line]:
    """How a job ended, in a sentence, and what can be done about it."""
    where = redact(job.plan.target)
    if job.state is State.COMPLETED:
        return [
            line(
                Span("✔ ", "green"),
                f"{number(job.rows_done)} rows in {plural(job.files, 'file')} published to {where} "
                f"as snapshot {job.snapshot_id}",
            )
        ]
    if job.state is State.KILLED:
        return [line(Span("■ ", "yellow"), f"job {job.job_id} was killed; nothing of it was published")]
    if job.state is State.FAILED:
        reason = job.error.message if job.error else "no reason was recorded"
        lines = message_lines(Span("✘ ", "red"), f"job {job.job_id} failed, nothing was published: {reason}")
        lines += hint_lines(job.error.hint if job.error else None)
        if job.error is None or not job.error.permanent:
            lines.append(line(f"go on from what is finished: lockstep retry {job.job_id}", indent=2))
        return lines
    if job.state is State.PAUSED:
        return [line(f"job {job.job_id} is paused: lockstep resume {job.job_id}")]
    return [line(f"job {job.job_id} is {job.state.value}")]


def history_document(entry: HistoryEntry) -> dict[str, Any]:
    return {
        "at": rfc3339(entry.at),
        "event": entry.event,
        "state": entry.state.value,
        "generation": entry.generation,
        "detail": entry.detail,
        "worker": entry.worker,
    }


def history_grid(entries: Sequence[HistoryEntry]) -> Grid:
    return Grid(
        ("|time (UTC)", "|event", "|state", ">generation", "worker", "detail"),
        [
            (
                (rfc3339(entry.at) or "").replace("T", " ").removesuffix("Z"),
                entry.event,
                state_span(entry.state),
                str(entry.generation),
                entry.worker or "",
                entry.detail,
            )
            for entry in entries
        ],
        drop=("generation", "worker"),
    )
