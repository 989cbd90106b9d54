"""Delete what jobs have left behind and nothing refers to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from lockstep.cli.render import Grid, Line, Span, line, plural, size
from lockstep.cli.session import Session, command

if TYPE_CHECKING:
    from lockstep.sweep import Finding, Report

MOST_ROWS: Final = 200
"""A terminal shows so many of a kind; `--json` has all."""


@command
def sweep(
    session: Session,
    address: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET_OR_SOURCE]...",
            help="Tables and sources to look beside, other than those of the jobs in the store.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be deleted, and why.")
    ] = False,
    unknown_older_than: Annotated[
        str | None,
        typer.Option(
            metavar="AGE",
            help="Delete things of jobs that this store does not know too, if older than this (30d). "
            "Only where no other store has jobs for these tables and sources.",
        ),
    ] = None,
) -> int:
    """Delete what ended jobs have left behind, where it is proven that nothing refers to it."""
    from lockstep.config import parse_duration
    from lockstep.request import absolute_address
    from lockstep.sweep import sweep as sweep_all

    age_s = parse_duration(unknown_older_than, "--unknown-older-than") if unknown_older_than else None
    report = sweep_all(
        session.config,
        session.store,
        session.clock,
        addresses=[absolute_address(each) for each in address or []],
        dry_run=dry_run,
        unknown_older_than_s=age_s,
    )
    session.answer(_document(report, dry_run), *_page(report, dry_run))
    return 1 if any(finding.error for finding in report.garbage) else 0


def _document(report: Report, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "garbage": [_finding_document(finding) for finding in report.garbage],
        "kept_unknown": [_finding_document(finding) for finding in report.unknown],
        "kept_needed": [{"reason": why, "things": n} for why, n in sorted(report.needed.items())],
        "deleted": sum(finding.deleted for finding in report.garbage),
        "deleted_bytes": sum(finding.size_bytes or 0 for finding in report.garbage if finding.deleted),
    }


def _finding_document(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind.value,
        "what": finding.what,
        "where": finding.where,
        "job_id": finding.job_id,
        "size_bytes": finding.size_bytes,
        "reason": finding.reason,
        "deleted": finding.deleted,
        "error": finding.error,
    }


def _page(report: Report, dry_run: bool) -> list[Grid | Line]:
    page: list[Grid | Line] = []
    for title, findings in (
        ("nothing refers to these" if dry_run else "deleted", report.garbage),
        ("kept, because nobody can tell", report.unknown),
    ):
        if findings:
            page.append(_grid(title, findings[:MOST_ROWS]))
        if len(findings) > MOST_ROWS:
            page.append(line(f"… and {len(findings) - MOST_ROWS} more: --json lists all of them"))
    for reason, count in sorted(report.needed.items()):
        page.append(line(f"kept {plural(count, 'thing')}: {reason}"))
    return [*page, _closing(report, dry_run)]


def _grid(title: str, findings: Sequence[Finding]) -> Grid:
    return Grid(
        ("|kind", "~what", ">size", "why"),
        [
            (
                finding.kind.value,
                finding.what,
                size(finding.size_bytes) if finding.size_bytes is not None else "",
                Span(f"not deleted: {finding.error}", "red") if finding.error else finding.reason,
            )
            for finding in findings
        ],
        title=title,
        drop=("size", "kind"),
    )


def _closing(report: Report, dry_run: bool) -> Line:
    done = report.garbage if dry_run else [finding for finding in report.garbage if finding.deleted]
    total = size(sum(finding.size_bytes or 0 for finding in done))
    if not report.garbage:
        return line(Span("✔ ", "green"), "nothing to delete")
    if dry_run:
        return line(f"{plural(len(done), 'thing')}, {total}, would be deleted: lockstep sweep")
    failed = len(report.garbage) - len(done)
    told = f"{plural(len(done), 'thing')}, {total}, deleted"
    if failed:
        return line(Span("✘ ", "red"), f"{told}; {failed} could not be")
    return line(Span("✔ ", "green"), told)
