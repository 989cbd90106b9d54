"""The published rows of a job against the fingerprint of what it read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lockstep.cli.jobs import JobArgument
from lockstep.cli.render import NOTHING, Grid, Line, Span, line, message_lines, number, plural
from lockstep.cli.session import Answer, Session, command, nothing_created
from lockstep.secrets import redact

if TYPE_CHECKING:
    from lockstep.job import Job
    from lockstep.verify import Verification


@command
def verify(session: Session, job: JobArgument) -> int:
    """Read the rows that a job published, and compare them with the fingerprint of what it read."""
    from lockstep.verify import verify as compare

    found = session.job(job)
    with nothing_created():
        verification = compare(found, session.store, session.config)
    session.answer(verification.to_json(), *_page(found, verification))
    return 0 if verification.equal else 1


def _page(job: Job, found: Verification) -> Iterator[Answer]:
    where = f"snapshot {found.snapshot_id} of {redact(job.plan.target)}"
    rows = f"{plural(found.found.rows, 'row')} in {plural(found.files, 'file')}"
    if found.equal and not found.found.rows:
        yield line(Span("✔ ", "green"), f"{where} has no rows of job {job.job_id}, as none were read")
    elif found.equal:
        columns = plural(len(found.expected.columns), "column")
        yield line(Span("✔ ", "green"), f"{rows} of {where}, as they were read: {columns}, every value")
    else:
        said = f"{where} does not hold the rows that job {job.job_id} read"
        yield line(Span("✘ ", "red"), said)
        yield _grid(found)
        for problem in found.problems:
            yield from message_lines("", problem, indent=2)
    yield from _since(found)


def _grid(found: Verification) -> Grid:
    differing = set(found.differing)
    rows = found.expected.rows, found.found.rows
    counts = ("rows", number(rows[0]), number(rows[1]), _mark(rows[0] == rows[1]))
    return Grid(
        ("column", ">read", ">published", "verdict"),
        [
            counts,
            *(
                (name, _hex(found.expected.columns.get(name)), _hex(found.found.columns.get(name)), mark)
                for name in {**found.expected.columns, **found.found.columns}
                for mark in [_mark(name not in differing)]
            ),
        ],
    )


def _hex(value: int | None) -> str:
    return NOTHING if value is None else f"{value:016x}"


def _mark(equal: bool) -> Span:
    return Span("equal", "green") if equal else Span("differs", "red")


def _since(found: Verification) -> Iterator[Line]:
    """What happened to the files later; it is no part of the verdict."""
    if gone := found.files - found.current_files:
        yield line(
            f"{plural(gone, 'file')} of it no longer in the table: compacted, replaced or deleted since"
        )
    if found.deleted_files:
        yield line(f"rows of {plural(found.deleted_files, 'file')} of it were deleted by later commits")
    if found.deleted_files is None:
        yield line("the table has deletes of a kind that Lockstep does not read: rows may be hidden since")
