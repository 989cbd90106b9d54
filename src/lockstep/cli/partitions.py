"""What could be exported: the partitions of a source, with rows and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.render import Grid, Span, number, plural, size
from lockstep.cli.session import Session, command, nothing_created
from lockstep.secrets import expand, redact

if TYPE_CHECKING:
    from lockstep.source import PartitionInfo, SourceTable


@command
def partitions(
    session: Session,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="For example chdb:data/db/events.")],
    parts: Annotated[bool, typer.Option("--parts", help="List the parts of each partition too.")] = False,
) -> int:
    """List what could be exported, with rows and bytes."""
    from lockstep.request import absolute_address
    from lockstep.source import open_source

    with nothing_created(), ExitStack() as closing:
        opened = open_source(expand(absolute_address(source), session.config), session.config)
        closing.callback(opened.close)
        table = opened.describe()
        found = opened.partitions()
    document = {
        "source": redact(source),
        "table": table.name,
        "partition_key": table.partition_key,
        "partitions": [_document(partition) for partition in found],
    }
    session.answer(document, _parts_grid(table, found) if parts else _grid(table, found))
    return 0


def _document(partition: PartitionInfo) -> dict[str, Any]:
    return {
        "partition": partition.partition_id,
        "label": partition.label,
        "rows": partition.rows,
        "size_bytes": partition.size_bytes,
        "parts": [
            {"name": part.name, "rows": part.rows, "size_bytes": part.size_bytes} for part in partition.parts
        ],
    }


def _grid(table: SourceTable, found: Sequence[PartitionInfo]) -> Grid:
    return Grid(
        ("partition", "value", ">parts", ">rows", ">size"),
        [(p.partition_id, p.label, number(len(p.parts)), number(p.rows), size(p.size_bytes)) for p in found],
        title=_title(table, found),
        footer=_total(found, 5),
        drop=("parts", "value"),
    )


def _parts_grid(table: SourceTable, found: Sequence[PartitionInfo]) -> Grid:
    return Grid(
        ("partition", "part", ">rows", ">size"),
        [
            (partition.partition_id, part.name, number(part.rows), size(part.size_bytes))
            for partition in found
            for part in partition.parts
        ],
        title=_title(table, found),
        footer=_total(found, 4),
    )


def _title(table: SourceTable, found: Sequence[PartitionInfo]) -> str:
    key = f", partitioned by {table.partition_key}" if table.partition_key else ", not partitioned"
    return f"{table.name}: {plural(len(found), 'partition')}{key}"


def _total(found: Sequence[PartitionInfo], columns: int) -> list[Span | str]:
    totals = [number(sum(p.rows for p in found)), size(sum(p.size_bytes for p in found))]
    blanks = [""] * (columns - 3)
    # Not "all": ClickHouse calls the one partition of an unpartitioned table so.
    return [Span("total", "bold"), *blanks, *(Span(text, "bold") for text in totals)]
