"""`lockstep export`: plan the request, then work on its jobs until they end."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.jobs import closing
from lockstep.cli.render import (
    Grid,
    Line,
    Span,
    duration,
    line,
    number,
    plural,
    rate,
    size,
    state_span,
)
from lockstep.cli.running import Interrupted, signals_interrupt, work
from lockstep.cli.session import INTERRUPTED, Answer, Session, command, nothing_created
from lockstep.config import parse_duration, parse_size
from lockstep.job import Job, State
from lockstep.secrets import redact
from lockstep.view import job_document, rows_per_s

if TYPE_CHECKING:
    from lockstep.exporter import Planned, PlanPreview


class OnExisting(StrEnum):
    ERROR = "error"
    SKIP = "skip"
    APPEND = "append"
    REPLACE = "replace"


class Match(StrEnum):
    NAME = "name"
    POSITION = "position"


@command
def export(
    session: Session,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="For example chdb:data/db/events.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="For example iceberg://lake/db.events.")],
    partition: Annotated[
        list[str] | None, typer.Option(help="A partition to export; may be repeated.", metavar="ID")
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="A single part to export; may be repeated.", metavar="NAME")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every partition, one job each.")] = False,
    create: Annotated[bool, typer.Option("--create", help="Create the table if it is not there.")] = False,
    on_existing: Annotated[
        OnExisting, typer.Option(help="What to do about rows that were exported before.")
    ] = OnExisting.ERROR,
    match: Annotated[Match, typer.Option(help="How columns find each other.")] = Match.NAME,
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Accept types that lose precision.")
    ] = False,
    ignore_extra: Annotated[
        bool, typer.Option("--ignore-extra", help="Leave out source columns that the target lacks.")
    ] = False,
    file_size: Annotated[str, typer.Option(help="Roll data files at this size.", metavar="SIZE")] = "256MB",
    deadline: Annotated[
        str | None, typer.Option(help="Fail a job that takes longer, for example 6h.", metavar="DURATION")
    ] = None,
    no_pin: Annotated[
        bool, typer.Option("--no-pin", help="Read the parts by name instead of freezing them.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Create the jobs and return; workers do the work.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Validate and show the plan; create nothing.")
    ] = False,
) -> int:
    """Copy partitions of a table into an Iceberg table, each exactly once."""
    session.check_config()
    file_size_bytes = parse_size(file_size, "--file-size")
    deadline_s = parse_duration(deadline, "--deadline") if deadline is not None else None
    from lockstep.exporter import ExportRequest, plan_export

    request = ExportRequest(
        source=source,
        target=target,
        partitions=tuple(partition or ()),
        parts=tuple(part or ()),
        everything=everything,
        create=create,
        on_existing=on_existing.value,
        match=match.value,
        allow_lossy=allow_lossy,
        ignore_extra=ignore_extra,
        file_size_bytes=file_size_bytes,
        deadline_s=deadline_s,
        pin=not no_pin,
    )
    try:
        with signals_interrupt(), nothing_created(), session.side.busy("validating and freezing the source"):
            planned = plan_export(request, session.config, session.store, session.clock, dry_run=dry_run)
    except KeyboardInterrupt:
        session.remark("interrupted; nothing was created")
        return INTERRUPTED
    if dry_run:
        return _show_plan(session, planned, target)
    _announce(session, planned, target)
    if detach or not planned.jobs:
        return _detached(session, planned)
    try:
        jobs = work(session, "jobs_ended", [job.job_id for job in planned.jobs])
    except Interrupted:
        return _interrupted(session, planned)
    session.answer(_document(planned, jobs), *_closing(jobs))
    return exit_code(jobs)


def exit_code(jobs: Sequence[Job]) -> int:
    """That of the worst job: failed before killed before paused before completed."""
    states = {job.state for job in jobs}
    if State.FAILED in states:
        return 1
    if State.KILLED in states:
        return 4
    return 0 if states <= {State.COMPLETED} else INTERRUPTED


def _document(planned: Planned, jobs: Sequence[Job]) -> dict[str, Any]:
    return {
        "jobs": [job_document(job) for job in jobs],
        "skipped": [vars(skipped) for skipped in planned.skipped],
        "created_table": planned.created_table,
    }


def _announce(session: Session, planned: Planned, target: str) -> None:
    for remark in planned.remarks:
        session.remark(line(Span("warning: ", "yellow"), remark))
    if planned.created_table:
        session.remark(line(f"created the table {redact(target)}"))
    for skipped in planned.skipped:
        session.remark(line(f"skipped {skipped.partition}: {skipped.reason}"))
    for job in planned.jobs:
        rows = "" if job.plan.rows is None else f", {number(job.plan.rows)} rows"
        session.remark(
            line(
                "job ",
                Span(job.job_id, "bold"),
                f": partition {job.plan.partition}{rows} in {plural(job.tasks_total, 'task')}",
            )
        )


def _detached(session: Session, planned: Planned) -> int:
    """Standard output gets the ids alone, one per line, for a script to read."""
    session.answer(_document(planned, planned.jobs), *(job.job_id for job in planned.jobs))
    if planned.jobs:
        session.remark(line(f"{plural(len(planned.jobs), 'job')} for the workers: lockstep worker"))
    else:
        session.remark(line("there is nothing to export"))
    return 0


def _interrupted(session: Session, planned: Planned) -> int:
    jobs = [session.store.read(job.job_id) for job in planned.jobs]
    session.answer(_document(planned, jobs))
    open_jobs = [job for job in jobs if job.state.live]
    session.remark(*ways_on(open_jobs))
    return INTERRUPTED


def ways_on(open_jobs: Sequence[Job]) -> list[Line]:
    """What can be done about jobs whose work was interrupted."""
    paused = [job.job_id for job in open_jobs if job.state is State.PAUSED]
    others = [job.job_id for job in open_jobs if job.state is not State.PAUSED]
    if not open_jobs:
        return [line("interrupted; every job had ended already")]
    lines = [line(f"interrupted; {plural(len(open_jobs), 'job')} can go on from the last checkpoint:")]
    if others:
        lines.append(line("lockstep worker --once", indent=2))
    lines += [line(f"lockstep resume {job_id} (it is paused)", indent=2) for job_id in paused]
    lines.append(line(f"or give up: lockstep kill {' '.join([*others, *paused])}", indent=2))
    return lines


def _closing(jobs: Sequence[Job]) -> list[Answer]:
    if len(jobs) == 1:
        return list(closing(jobs[0]))
    parts: list[Answer] = [closing_grid(jobs)]
    for job in jobs:
        if job.state is not State.COMPLETED:
            parts += closing(job)
    return parts


def closing_grid(jobs: Sequence[Job]) -> Grid:
    """Each job in a row; the totals count what was published."""
    published = [job for job in jobs if job.state is State.COMPLETED]
    starts = [job.started_at for job in published if job.started_at is not None]
    ends = [job.finished_at for job in published if job.finished_at is not None]
    seconds = max(ends) - min(starts) if starts and ends else None
    rows = sum(job.rows_done for job in published)
    return Grid(
        ("partition", "|state", ">rows", ">files", ">size", ">took", ">rows/s", "|snapshot", "|job"),
        [
            (
                job.plan.partition if job.plan.partition is not None else "",
                state_span(job.state),
                number(job.rows_done),
                number(job.files),
                size(job.bytes_done),
                duration(job.finished_at - job.started_at) if job.finished_at and job.started_at else "",
                rate(rows_per_s(job)).removesuffix("/s"),
                str(job.snapshot_id) if job.snapshot_id is not None else "",
                job.job_id,
            )
            for job in jobs
        ],
        footer=[
            Span("total", "bold"),
            "" if len(published) == len(jobs) else "published",
            number(rows),
            number(sum(job.files for job in published)),
            size(sum(job.bytes_done for job in published)),
            duration(seconds),
            number(rows / seconds) if seconds else "",
            "",
            "",
        ],
        drop=("files", "size", "rows/s", "took", "job"),
    )


def _show_plan(session: Session, planned: Planned, target: str) -> int:
    document = {
        "jobs": [],
        "skipped": [vars(skipped) for skipped in planned.skipped],
        "created_table": False,
        "plans": [_preview_document(preview) for preview in planned.previews],
    }
    parts: list[Answer] = [_plan_grid(planned.previews, target)]
    if planned.previews:
        parts.append(_columns_grid(planned.previews[0]))
    parts += [line(f"would skip {each.partition}: {each.reason}") for each in planned.skipped]
    parts.append(Line([Span("nothing was created: this was a dry run", "dim")]))
    session.answer(document, *parts)
    return 0


def _preview_document(preview: PlanPreview) -> dict[str, Any]:
    return {
        "partition": preview.partition,
        "rows": preview.rows,
        "size_bytes": preview.size_bytes,
        "parts": preview.parts,
        "tasks": preview.tasks,
        "columns": [vars(column) for column in preview.columns],
    }


def _plan_grid(previews: Sequence[PlanPreview], target: str) -> Grid:
    return Grid(
        ("partition", ">parts", ">tasks", ">rows", ">size"),
        [
            (p.partition, number(p.parts), number(p.tasks), number(p.rows), size(p.size_bytes))
            for p in previews
        ],
        title=f"{plural(len(previews), 'job')} would export to {redact(target)}",
    )


def _columns_grid(preview: PlanPreview) -> Grid:
    return Grid(
        ("column", "type", "from", "source type", "|"),
        [
            (
                column.target,
                type_name(column.type) + (" required" if column.required else ""),
                column.source if column.source is not None else Span("NULL", "dim"),
                column.source_type or "",
                Span("lossy", "yellow") if column.lossy else "",
            )
            for column in preview.columns
        ],
    )


def type_name(kind: Any) -> str:
    """An Iceberg type as people write it: `list<long>`, `map<string, int>`, `struct<a: long>`."""
    if isinstance(kind, str):
        return kind
    match kind.get("type"):
        case "list":
            return f"list<{type_name(kind['element'])}>"
        case "map":
            return f"map<{type_name(kind['key'])}, {type_name(kind['value'])}>"
        case "struct":
            fields = (f"{field['name']}: {type_name(field['type'])}" for field in kind["fields"])
            return f"struct<{', '.join(fields)}>"
        case other:
            return str(other)
