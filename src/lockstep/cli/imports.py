"""`lockstep import`: plan the request, then work on its job until it ends."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from lockstep.cli.export import exit_code, type_name, ways_on
from lockstep.cli.jobs import closing
from lockstep.cli.render import Grid, Line, Span, line, number, plural, size
from lockstep.cli.running import Interrupted, signals_interrupt, work
from lockstep.cli.session import INTERRUPTED, Answer, Session, command, nothing_created
from lockstep.config import parse_duration, parse_size
from lockstep.errors import Invalid
from lockstep.job import Job
from lockstep.schema_file import read_schema
from lockstep.secrets import redact
from lockstep.view import job_document

if TYPE_CHECKING:
    from lockstep.importer import Draft, ImportRequest, PlannedImport, SkippedInput
    from lockstep.rehearsal import Rehearsal

SHOWN_PROBLEMS: Final = 20
KEPT_PROBLEMS: Final = 1000


class Format(StrEnum):
    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"
    AVRO = "avro"


class Mode(StrEnum):
    AUTO = "auto"
    DIRECT = "direct"
    MERGE = "merge"


class OnDuplicate(StrEnum):
    ERROR = "error"
    KEEP_FIRST = "keep-first"
    KEEP_LAST = "keep-last"
    REJECT = "reject"


class OnExisting(StrEnum):
    ERROR = "error"
    SKIP = "skip"
    APPEND = "append"


class Compression(StrEnum):
    AUTO = "auto"
    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"
    BZ2 = "bz2"


@command
def import_(
    session: Session,
    addresses: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT... TARGET", help="Files, folders, globs or s3://…, and the table they go to."
        ),
    ],
    format: Annotated[Format | None, typer.Option(help="Else the names tell.")] = None,
    mode: Annotated[Mode, typer.Option(help="auto sorts when there is an order.")] = Mode.AUTO,
    sort_by: Annotated[
        str | None, typer.Option(help="Columns that data files are sorted by.", metavar="A,B")
    ] = None,
    unique: Annotated[str | None, typer.Option(help="Columns that tell rows apart.", metavar="A,B")] = None,
    on_duplicate: Annotated[
        OnDuplicate, typer.Option(help="What to do about rows with the same unique key.")
    ] = OnDuplicate.ERROR,
    max_rejects: Annotated[
        int, typer.Option(help="Records that may fail to fit before the job fails.", metavar="N")
    ] = 0,
    rejects: Annotated[
        str | None, typer.Option(help="A new .csv or .parquet file for those records.", metavar="PATH")
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Create the table if it is not there.")] = False,
    schema: Annotated[
        Path | None, typer.Option(help="Column types: Iceberg's JSON, or lines `name type`.", metavar="FILE")
    ] = None,
    on_existing: Annotated[
        OnExisting, typer.Option(help="What to do about files that were imported before.")
    ] = OnExisting.ERROR,
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Accept types that lose precision.")
    ] = False,
    ignore_extra: Annotated[
        bool, typer.Option("--ignore-extra", help="Leave out columns that the target lacks.")
    ] = False,
    delimiter: Annotated[str | None, typer.Option(help="CSV: between values.", metavar="TEXT")] = None,
    quote: Annotated[str, typer.Option(help="CSV: around values; empty for none.", metavar="TEXT")] = '"',
    escape: Annotated[str | None, typer.Option(help="CSV: before a special letter.", metavar="TEXT")] = None,
    header: Annotated[
        bool, typer.Option("--header/--no-header", help="CSV: the first line has names.")
    ] = True,
    null: Annotated[
        list[str] | None, typer.Option(help="CSV: what stands for NULL; may be repeated.", metavar="TEXT")
    ] = None,
    compression: Annotated[Compression, typer.Option(help="auto: by name and content.")] = Compression.AUTO,
    skip: Annotated[int, typer.Option(help="Lines to leave out at the top of each file.", metavar="N")] = 0,
    limit: Annotated[int | None, typer.Option(help="Records to read of all inputs.", metavar="N")] = None,
    file_size: Annotated[str, typer.Option(help="Roll data files at this size.", metavar="SIZE")] = "256MB",
    deadline: Annotated[
        str | None, typer.Option(help="Fail a job that takes longer, for example 6h.", metavar="DURATION")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Create the job and return; workers do the work.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read everything and show all problems and the plan.")
    ] = False,
) -> int:
    """Load raw files, or a copy of an Iceberg table, as one snapshot: sorted, checked, exactly once."""
    session.check_config()
    if len(addresses) < 2:
        raise Invalid("say what to import, and where to: lockstep import INPUT... TARGET")
    from lockstep.importer import ImportRequest
    from lockstep.source import ParseOptions

    request = ImportRequest(
        inputs=tuple(addresses[:-1]),
        target=addresses[-1],
        options=ParseOptions(
            format=format.value if format else None,
            delimiter=_letter(delimiter, "--delimiter"),
            quote=quote,
            escape=_letter(escape, "--escape"),
            header=header,
            null=tuple(null) if null else ("",),
            compression=compression.value,
            skip=skip,
            limit=limit,
            schema=None if schema is None else read_schema(schema),
        ),
        mode=mode.value,
        sort_by=_names(sort_by),
        unique=_names(unique),
        on_duplicate=on_duplicate.value,
        max_rejects=max_rejects,
        rejects=rejects,
        create=create,
        on_existing=on_existing.value,
        file_size_bytes=parse_size(file_size, "--file-size"),
        deadline_s=parse_duration(deadline, "--deadline") if deadline is not None else None,
        allow_lossy=allow_lossy,
        ignore_extra=ignore_extra,
    )
    try:
        return _dry_run(session, request) if dry_run else _run(session, request, detach)
    except KeyboardInterrupt:
        session.remark("interrupted; nothing was created")
        return INTERRUPTED


def _run(session: Session, request: ImportRequest, detach: bool) -> int:
    from lockstep.importer import plan_import

    with signals_interrupt(), nothing_created(), session.side.busy("validating the inputs"):
        planned = plan_import(request, session.config, session.store, session.clock)
    session.remark(*_skipped("skipped", planned.skipped))
    if planned.created_table:
        session.remark(line(f"created the table {redact(request.target)}"))
    job = planned.job
    if job is None:
        session.answer(_document(session, planned, None))
        session.remark(line("there is nothing to import"))
        return 0
    parts = plural(len(job.holding.pieces), "input")
    session.remark(line("job ", Span(job.job_id, "bold"), f": {parts} in {plural(job.tasks_total, 'task')}"))
    if detach:
        session.answer(_document(session, planned, job), job.job_id)
        session.remark(line("1 job for the workers: lockstep worker"))
        return 0
    try:
        job = work(session, "jobs_ended", [job.job_id])[0]
    except Interrupted:
        job = session.store.read(job.job_id)
        session.answer(_document(session, planned, job))
        session.remark(*ways_on([job] if job.state.live else []))
        return INTERRUPTED
    session.answer(_document(session, planned, job), *_closing(session, job))
    return exit_code([job])


def _document(session: Session, planned: PlannedImport, job: Job | None) -> dict[str, Any]:
    return {
        "jobs": [job_document(job)] if job is not None else [],
        "skipped": [vars(skipped) for skipped in planned.skipped],
        "created_table": planned.created_table,
        "summary": _summary(session, job) if job is not None else None,
    }


def _skipped(verb: str, skipped: Sequence[SkippedInput]) -> Iterator[Line]:
    """A line for each job that has some of the inputs."""
    for reason in dict.fromkeys(one.reason for one in skipped):
        names = [one.input for one in skipped if one.reason == reason]
        what = names[0] if len(names) == 1 else f"{plural(len(names), 'input')}, {names[0]} first"
        yield line(f"{verb} {what}: {reason}")


def _summary(session: Session, job: Job) -> dict[str, Any] | None:
    from lockstep.review import sortedness, summary

    found = summary(job, session.store, session.config)
    return None if found is None else {**found, "sortedness": sortedness(job, session.store)}


def _closing(session: Session, job: Job) -> list[Answer]:
    summary = _summary(session, job)
    if summary is None:
        return list(closing(job))
    rows = [
        ("rows read", number(summary["rows_read"])),
        ("rows written", number(summary["rows_written"])),
        ("rows rejected", number(summary["rows_rejected"])),
        ("duplicates", number(found) if (found := summary["duplicates"]) is not None else "not checked"),
        ("files", f"{number(summary['data_files'])} ({size(job.bytes_done)})"),
        ("sorted by", _sorted_by(job, summary)),
    ]
    parts: list[Answer] = [*closing(job), Grid(("", ">"), rows)]
    if summary["rejects_file"] is not None:
        parts.append(line(f"the rejected records are listed in {summary['rejects_file']}"))
    return parts


def _sorted_by(job: Job, summary: dict[str, Any]) -> str:
    from lockstep.partitioning import order_names

    if job.plan.terms is None or not job.plan.terms.order:
        return "nothing"
    by = ", ".join(order_names(job.plan.sort_order, job.plan.schema))
    if not summary["data_files"]:
        return by
    if summary["sortedness"] is None:
        return f"{by} (how many files are in order, their statistics do not tell)"
    return f"{by} ({summary['sortedness']:.0%} of the files in order)"


# Reading everything without writing anything


def _dry_run(session: Session, request: ImportRequest) -> int:
    from lockstep.importer import draft_import
    from lockstep.rehearsal import rehearse

    with ExitStack() as undo, signals_interrupt(), nothing_created():
        with session.side.busy("validating the inputs"):
            draft, _ = draft_import(request, session.config, session.store, session.clock, undo)
        with session.side.busy("reading the inputs"):
            found = rehearse(draft, request, session.config, KEPT_PROBLEMS)
    document = {
        "jobs": [],
        "skipped": [vars(skipped) for skipped in draft.skipped],
        "created_table": False,
        "mode": draft.mode,
        "inputs": len(draft.pin.parts),
        "tasks": len(draft.tasks),
        "rows": found.rows,
        "columns": [vars(column) for column in draft.columns],
        "rejected": found.rejected,
        "problems": found.problems,
        "duplicates": found.duplicates if request.unique else None,
        "duplicates_of_table_rows": found.against_table if request.unique else None,
        "repeated": found.repeated,
    }
    session.answer(document, *_dry_page(draft, found, request))
    return 1 if found.refused else 0


def _dry_page(draft: Draft, found: Rehearsal, request: ImportRequest) -> list[Answer]:
    columns = Grid(
        ("column", "type", "from"),
        [
            (
                column.target,
                type_name(column.type) + (" required" if column.required else ""),
                column.source if column.source is not None else Span("NULL", "dim"),
            )
            for column in draft.columns
        ],
        title=f"{plural(len(draft.pin.parts), 'input')} would go to {redact(request.target)} "
        f"in {plural(len(draft.tasks), 'task')}, mode {draft.mode}",
    )
    parts: list[Answer] = [
        columns,
        line(f"{_said(found.rows, 'fits', 'fit')}, {_said(found.rejected, 'does not', 'do not')}"),
        *_problem_grid(found.problems, found.rejected),
    ]
    parts[:0] = _skipped("would skip", draft.skipped)
    if request.unique:
        parts.append(line(_duplicates(found, request)))
        parts += _problem_grid(found.repeated, found.duplicates)
    parts += [line(Span("the import would fail: ", "red"), why) for why in _objections(found, request)]
    parts.append(Line([Span("nothing was created: this was a dry run", "dim")]))
    return parts


def _said(rows: int, of_one: str, of_many: str) -> str:
    return f"{plural(rows, 'row')} {of_one if rows == 1 else of_many}"


def _problem_grid(problems: list[dict[str, Any]], total: int) -> Iterator[Answer]:
    if not problems:
        return
    shown = problems[:SHOWN_PROBLEMS]
    rows = [(p["input"], str(p["line"]), p["column"] or "", p["reason"]) for p in shown]
    yield Grid(("~input", ">line", "column", "reason"), rows)
    if total > len(shown):
        more = number(total - len(shown))
        yield line(f"… and {more} more; --json lists {number(min(total, KEPT_PROBLEMS))}")


def _duplicates(found: Rehearsal, request: ImportRequest) -> str:
    key = ", ".join(request.unique)
    if not found.duplicates:
        return f"no row repeats the unique key {key}"
    verb = "repeats" if found.duplicates == 1 else "repeat"
    text = f"{plural(found.duplicates, 'row')} {verb} the unique key {key}"
    if found.against_table:
        text += f", {number(found.against_table)} of them that of a row in the table"
    return text + {"keep-first": "; the first of each stays", "keep-last": "; the last of each stays"}.get(
        request.on_duplicate, ""
    )


def _objections(found: Rehearsal, request: ImportRequest) -> Iterator[str]:
    """Why the import would fail, if it would."""
    from lockstep.unique import ways_out

    policy = request.on_duplicate
    if found.duplicates and policy == "error":
        yield ways_out(found.against_table)
    if found.against_table and policy == "keep-last":
        yield "what the table has is never taken back; use --on-duplicate keep-first"
    counted = found.rejected + (found.duplicates if policy == "reject" else 0)
    if counted > request.max_rejects:
        yield f"{plural(counted, 'record')} would be rejected, and --max-rejects allows {request.max_rejects}"


# Options


def _names(text: str | None) -> tuple[str, ...]:
    """Column names between commas; one that holds a comma is written in quotes, as in CSV."""
    if text is None:
        return ()
    names = tuple(name.strip() for name in next(csv.reader([text], skipinitialspace=True)))
    if not all(names):
        raise Invalid(f"{text!r} names a column without a name")
    return names


def _letter(text: str | None, option: str) -> str | None:
    if text is None:
        return None
    letter = {"\\t": "\t", "tab": "\t"}.get(text, text)
    if len(letter) != 1:
        raise Invalid(f"{option} takes one letter, not {text!r}", hint="\\t stands for a tab")
    return letter
