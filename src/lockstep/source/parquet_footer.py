"""What the footers of Parquet files say: rows, row groups, and columns that files of one table agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.errors import Corrupt, Invalid
from lockstep.source import SourceColumn
from lockstep.source.parquet_types import exact_type
from lockstep.storage.errors import translated


@dataclass(frozen=True)
class Footer:
    """What is needed of a file's metadata, without keeping all of it."""

    rows: int
    groups: Sequence[tuple[int, int]]
    """Rows and decoded bytes of each row group."""
    columns: Sequence[SourceColumn]


def unreadable(error: Exception, url: str, otherwise: type[Corrupt] | type[Invalid]) -> Exception:
    """What went wrong when a file was read, as the class that says what to do."""
    if isinstance(error, OSError) and error.errno is not None:
        return translated(error, "read", url)
    reason = (str(error).splitlines() or ["unknown"])[0]
    return otherwise(
        f"cannot read {url} as Parquet: {reason}",
        hint="if it is not a data file, move it away or let its name begin with _",
    )


def read_footer(opened: pq.ParquetFile) -> Footer:
    """Rows, row groups and columns of an open file."""
    metadata = opened.metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    int96 = {
        metadata.schema.column(i).path.split(".")[0]
        for i in range(metadata.num_columns)
        if metadata.schema.column(i).physical_type == "INT96"
    }
    columns = [_source_column(field, field.name.split(".")[0] in int96) for field in opened.schema_arrow]
    return Footer(metadata.num_rows, [(g.num_rows, g.total_byte_size) for g in groups], columns)


def _source_column(field: pa.Field, is_int96: bool) -> SourceColumn:
    exact = exact_type(field.type)
    if is_int96 and exact.type is not None:
        return SourceColumn(
            field.name,
            "INT96",
            None,
            field.nullable,
            exact.type,
            "it holds nanoseconds, Iceberg microseconds",
        )
    return SourceColumn(
        field.name, str(field.type), exact.type, field.nullable, exact.lossy_type, exact.problem
    )


def agreed(
    columns: Sequence[SourceColumn], others: Sequence[SourceColumn], first: str, file: str
) -> list[SourceColumn]:
    """The columns of both files: the order may differ; NULL is possible where either may have it."""
    by_name = {column.name: column for column in others}
    for column in columns:
        other = by_name.pop(column.name, None)
        if other is None:
            raise _differs(file, f'it has no column "{column.name}", and {first} has')
        same = column.type == other.type and (
            column.type is not None or column.native_type == other.native_type
        )
        if not same:
            raise _differs(
                file, f'column "{column.name}" is {other.native_type}, and {column.native_type} in {first}'
            )
    if by_name:
        raise _differs(file, f'it has a column "{next(iter(by_name))}", and {first} has not')
    nullable = {column.name for column in others if column.nullable}
    return [
        column if column.nullable or column.name not in nullable else _made_nullable(column)
        for column in columns
    ]


def _made_nullable(column: SourceColumn) -> SourceColumn:
    return SourceColumn(column.name, column.native_type, column.type, True, column.lossy_type, column.problem)


def _differs(file: str, difference: str) -> Invalid:
    return Invalid(
        f"the schema of {file} differs: {difference}",
        hint="rewrite the file, or take it on its own",
    )
