"""Inputs that have rows and types of their own: Parquet by row groups, Avro by blocks.

Both deliver batches as their files have them; here they become batches of the target. A row that does not
fit is a reject; its place is the number of the row in its file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa

from lockstep.arrow_types import conform
from lockstep.errors import Corrupt
from lockstep.job import ColumnMap, Json, Position, TaskSpec
from lockstep.source import Chunk, Place, Recalled, Reject, SourceColumn
from lockstep.source.files_fit import shown_row
from lockstep.source.files_open import RawFile

RECALL_BATCH_BYTES: Final = 8 << 20


@dataclass(frozen=True)
class RowPiece:
    """A stretch of one file: row groups or bytes, from `start` to `end`; `row` counts its rows from 0."""

    file: int
    start: int
    end: int
    row: int
    rows: int


@dataclass(frozen=True)
class Stretch:
    """The smallest piece that can be read alone: a row group, or some blocks."""

    start: int
    end: int
    rows: int
    size_bytes: int


class RowFormat(Protocol):
    def columns(self, file: RawFile) -> Sequence[SourceColumn]:
        """Raises: Invalid if it is no such file."""
        ...

    def stretches(self, file: RawFile) -> Iterator[Stretch]:
        """What a file can be split into, in its order."""
        ...

    def batches(
        self, file: RawFile, piece: RowPiece, mark: int, names: Sequence[str], batch_bytes: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Batches of the named columns after `mark`, each with the mark to go on from after it.

        Raises: Corrupt, naming the file, for what cannot be decoded.
        """
        ...


def plan_rows(
    files: Sequence[RawFile], format: RowFormat, task_bytes: int, *, whole: bool = False
) -> list[TaskSpec]:
    """Large files in several pieces, small files together, in their order. `whole`: all in one task."""
    tasks: list[TaskSpec] = []
    group: list[RowPiece] = []
    group_bytes = 0
    for number, file in enumerate(files):
        row = 0
        for stretch in format.stretches(file):
            if group and not whole and group_bytes + stretch.size_bytes > task_bytes:
                tasks.append(_task(group, group_bytes))
                group, group_bytes = [], 0
            _extend(group, RowPiece(number, stretch.start, stretch.end, row, stretch.rows))
            group_bytes += stretch.size_bytes
            row += stretch.rows
    return [*tasks, _task(group, group_bytes)] if group else tasks


def _extend(group: list[RowPiece], piece: RowPiece) -> None:
    last = group[-1] if group else None
    if last is not None and (last.file, last.end) == (piece.file, piece.start):
        group[-1] = RowPiece(last.file, last.start, piece.end, last.row, last.rows + piece.rows)
    else:
        group.append(piece)


def _task(group: Sequence[RowPiece], size_bytes: int) -> TaskSpec:
    pieces = [list(vars(piece).values()) for piece in group]
    return TaskSpec({"pieces": pieces}, sum(piece.rows for piece in group), size_bytes)


def row_pieces(descriptor: Json) -> list[RowPiece]:
    return [RowPiece(*piece) for piece in descriptor["pieces"]]


def read_rows(
    files: Sequence[RawFile],
    format: RowFormat,
    descriptor: Json,
    position: Position | None,
    columns: Sequence[ColumnMap],
    batch_bytes: int,
    limit: int | None,
) -> Iterator[Chunk]:
    """One chunk for each batch. Raises: Corrupt for what cannot be decoded."""
    pieces = row_pieces(descriptor)
    names = [column.source for column in columns if column.source is not None]
    at = position or {"piece": 0, "mark": 0, "record": 0}
    record = at["record"]
    for number in range(at["piece"], len(pieces)):
        piece = pieces[number]
        mark = at["mark"] if number == at["piece"] else 0
        for after, natural in format.batches(files[piece.file], piece, mark, names, batch_bytes):
            if limit is not None:
                natural = natural.slice(0, max(0, limit - record))
            if not natural.num_rows:
                continue
            batch, good, bad = _fitted(natural, columns)
            rejects = [Reject(record + row, None, *why) for row, why in bad]
            numbers = pa.array(
                np.arange(record, record + natural.num_rows) if good is None else good + record
            )
            record += natural.num_rows
            yield Chunk(batch, {"piece": number, "mark": after, "record": record}, numbers, rejects)


def locate_row(files: Sequence[RawFile], descriptor: Json, record: int) -> Place:
    for piece in row_pieces(descriptor):
        if record < piece.rows:
            return Place(files[piece.file].url, piece.row + record + 1)
        record -= piece.rows
    raise IndexError("the task has fewer records")


def recall_rows(
    files: Sequence[RawFile],
    format: RowFormat,
    descriptor: Json,
    records: Sequence[int],
    columns: Sequence[ColumnMap],
) -> Iterator[Recalled]:
    """Rows by their numbers, in ascending order. Pieces without one of them are not read."""
    names = [column.source for column in columns if column.source is not None]
    first = at = 0
    for piece in row_pieces(descriptor):
        end = first + piece.rows
        if at < len(records) and records[at] < end:
            row = first
            for _, natural in format.batches(files[piece.file], piece, 0, names, RECALL_BATCH_BYTES):
                while at < len(records) and records[at] < row + natural.num_rows:
                    place = Place(files[piece.file].url, piece.row + records[at] - first + 1)
                    yield Recalled(records[at], place, shown_row(natural.slice(records[at] - row, 1)))
                    at += 1
                row += natural.num_rows
                if at == len(records):
                    return
        first = end
    if at < len(records):
        raise Corrupt(f"row {records[at]} of a task is not in its inputs any more", hint="import them anew")


Why = tuple[str | None, str, str]
"""Column, reason and raw text of a row that does not fit."""


def _fitted(
    natural: pa.RecordBatch, columns: Sequence[ColumnMap]
) -> tuple[pa.RecordBatch, Any, list[tuple[int, Why]]]:
    """The rows that fit, their numbers (None: all of them), and the others with the reason."""
    try:
        return conform(natural, columns), None, []
    except Corrupt:
        bad = list(_misfits(natural, columns, 0))
    good = np.setdiff1d(np.arange(natural.num_rows), [row for row, _ in bad])
    return conform(natural.take(pa.array(good)), columns), good, bad


def _misfits(natural: pa.RecordBatch, columns: Sequence[ColumnMap], first: int) -> Iterator[tuple[int, Why]]:
    """Halve the rows down to those that do not fit alone."""
    try:
        conform(natural, columns)
    except Corrupt as error:
        if natural.num_rows == 1:
            yield first, _why(natural, columns, error)
            return
        half = natural.num_rows // 2
        yield from _misfits(natural.slice(0, half), columns, first)
        yield from _misfits(natural.slice(half), columns, first + half)


def _why(row: pa.RecordBatch, columns: Sequence[ColumnMap], error: Corrupt) -> Why:
    for column in columns:
        try:
            conform(row, [column])
        except Corrupt as alone:
            return column.source or column.target, alone.message, shown_row(row)
    return None, error.message, shown_row(row)
