"""Text inputs: where their records begin, how they are split, read from any position, and found again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.errors import Corrupt
from lockstep.job import Json, Position, TaskSpec
from lockstep.source import Chunk, Place, Recalled, Reject
from lockstep.source.files_blocks import Records, count_lines, cuts, line_ends, whole_records
from lockstep.source.files_fit import Fitted, Parser, fit, fit_last, shown_raw
from lockstep.source.files_open import OpenFile, RawFile
from lockstep.storage import Storage

BLOCK_BYTES: Final = 4 << 20
MOST_RECORD_BYTES: Final = 64 << 20
"""What a record may have at least; more where the task has more memory."""
COMPRESSED_WEIGHT: Final = 4


@dataclass(frozen=True)
class TextPiece:
    """A stretch of one file, from a record's beginning to a record's end; `end` None: to the end of the file.

    `line` is the absolute number of its first line, from 1.
    """

    file: int
    start: int
    end: int | None
    line: int


def pieces_of(descriptor: Json) -> list[TextPiece]:
    return [TextPiece(*piece) for piece in descriptor["pieces"]]


def plan_text(
    storage: Storage,
    files: Sequence[RawFile],
    records: Records,
    task_bytes: int,
    record_bytes: float,
    *,
    whole: bool = False,
) -> list[TaskSpec]:
    """Large files in several pieces, small files together, in their order. `whole`: all in one task.

    To find where records end, a large file is read once: only from its beginning is it known whether a line
    end is inside of quotes.
    """
    tasks: list[TaskSpec] = []
    group: list[TextPiece] = []
    group_bytes = 0

    def close_group() -> None:
        nonlocal group, group_bytes
        if group:
            pieces = [list(vars(piece).values()) for piece in group]
            tasks.append(TaskSpec({"pieces": pieces}, round(group_bytes / record_bytes), group_bytes))
        group, group_bytes = [], 0

    for number, file in enumerate(files):
        for piece, size_bytes in _pieces(storage, number, file, records, task_bytes, whole):
            if group and not whole and group_bytes + size_bytes > task_bytes:
                close_group()
            group.append(piece)
            group_bytes += size_bytes
    close_group()
    return tasks


def _pieces(
    storage: Storage, number: int, file: RawFile, records: Records, task_bytes: int, whole: bool
) -> Iterator[tuple[TextPiece, int]]:
    if file.compression != "none":
        if file.size_bytes:
            yield TextPiece(number, file.start, None, file.line), file.size_bytes * COMPRESSED_WEIGHT
        return
    size_bytes = file.size_bytes - file.start
    if size_bytes <= 0:
        return
    count = -(-size_bytes // task_bytes)
    if whole or count == 1:
        yield TextPiece(number, file.start, file.size_bytes, file.line), size_bytes
        return
    start, line = file.start, file.line
    for end, lines in _cuts(storage, file, records, -(-size_bytes // count)):
        yield TextPiece(number, start, end, line), end - start
        start, line = end, line + lines


def _cuts(storage: Storage, file: RawFile, records: Records, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Ends of pieces of about `piece_bytes`, each with the lines in the piece."""
    block_bytes = max(1, min(BLOCK_BYTES, piece_bytes // 8))
    length = file.size_bytes - file.start
    done = lines = 0
    target = piece_bytes
    with OpenFile(storage, file.url, file.compression, file.start) as opened:
        for block, size in cuts(opened, length, records, block_bytes, 1 << 30, file.url):
            done += size
            lines += count_lines(block, size)
            if done >= target or done == length:
                yield file.start + done, lines
                lines = 0
                target = (done // piece_bytes + 1) * piece_bytes


class TextReader:
    """Reads the tasks of one pin."""

    def __init__(
        self, storage: Storage, files: Sequence[RawFile], records: Records, limit: int | None
    ) -> None:
        self._storage = storage
        self._files = files
        self._records = records
        self._limit = limit

    def read(
        self,
        descriptor: Json,
        position: Position | None,
        parsers: Callable[[int], Parser],
        batch_bytes: int,
    ) -> Iterator[Chunk]:
        """One chunk for each block of records. `parsers` gives the one for a layout.

        Raises: Corrupt for what cannot be decompressed, and for a record that is too large.
        """
        pieces = pieces_of(descriptor)
        at = position or {"piece": 0, "offset": pieces[0].start, "record": 0, "line": 0}
        record, line = at["record"], at["line"]
        for number in range(at["piece"], len(pieces)):
            piece = pieces[number]
            offset = at["offset"] if number == at["piece"] else piece.start
            parser = parsers(self._files[piece.file].layout)
            for block, is_last in _with_last(self._blocks(piece, offset, batch_bytes)):
                if self._limit is not None and record >= self._limit:
                    return
                fitted = fit_last(parser, block) if is_last else fit(parser, block)
                if self._limit is not None and record + fitted.records > self._limit:
                    fitted = _first_records(fitted, self._limit - record)
                rejects = list(_rejects(fitted, block, record, line))
                numbers = _numbers(fitted, record)
                offset += len(block)
                record += fitted.records
                line += count_lines(block)
                after = {"piece": number, "offset": offset, "record": record, "line": line}
                if fitted.records:
                    yield Chunk(fitted.batch, after, numbers, rejects)

    def _blocks(self, piece: TextPiece, offset: int, batch_bytes: int) -> Iterator[bytes]:
        file = self._files[piece.file]
        length = None if piece.end is None else piece.end - offset
        if length == 0:
            return
        with OpenFile(self._storage, file.url, file.compression, offset) as opened:
            yield from whole_records(
                opened,
                length,
                self._records,
                max(1, min(BLOCK_BYTES, batch_bytes)),
                max(MOST_RECORD_BYTES, 4 * batch_bytes),
                file.url,
            )

    def blocks(self, descriptor: Json) -> Iterator[tuple[RawFile, int, bytes]]:
        """All blocks of a task, each with its file and the absolute number of its first line."""
        for piece in pieces_of(descriptor):
            line = piece.line
            for block in self._blocks(piece, piece.start, BLOCK_BYTES):
                yield self._files[piece.file], line, block
                line += count_lines(block)


def _with_last(blocks: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Each block, and whether it is the last one."""
    block = next(blocks, None)
    while block is not None:
        following = next(blocks, None)
        yield block, following is None
        block = following


@dataclass(frozen=True)
class _Places:
    """Records of one block: the first one's number and file, and the line of each.

    `lines` None: one line each, from `line` on.
    """

    first: int
    count: int
    file: str
    line: int
    lines: npt.NDArray[np.int64] | None


class RecordFinder:
    """Where the records of one task stand. The task is read once, without parsing it, up to what is asked."""

    def __init__(self, reader: TextReader, records: Records, descriptor: Json) -> None:
        self._records = records
        self._blocks = reader.blocks(descriptor)
        self._known: list[_Places] = []

    def find(self, record: int) -> Place:
        """Raises: Corrupt if the inputs have fewer records than that."""
        while not self._known or record >= self._known[-1].first + self._known[-1].count:
            self._read_on(record)
        places = self._known[bisect_right(self._known, record, key=lambda known: known.first) - 1]
        number = record - places.first
        return Place(places.file, places.line + number if places.lines is None else int(places.lines[number]))

    def _read_on(self, record: int) -> None:
        file, line, block = next(self._blocks, (None, 0, b""))
        if file is None:
            raise _gone(record)
        first = self._known[-1].first + self._known[-1].count if self._known else 0
        count = self._records.count_if_one_line_each(block)
        lines = None
        if count is None:
            begins = [begin for begin, _ in self._records.spans(block)]
            lines = line + np.searchsorted(line_ends(block), begins, "right")
            count = len(begins)
        if count:
            self._known.append(_Places(first, count, file.url, line, lines))


def recall_text(
    reader: TextReader, kind: Records, descriptor: Json, records: Sequence[int]
) -> Iterator[Recalled]:
    """Records by their numbers, in ascending order. A block without one of them is only counted."""
    first = at = 0
    for file, line, block in reader.blocks(descriptor):
        if at == len(records):
            return
        count = kind.count_if_one_line_each(block)
        if count is not None and records[at] >= first + count:
            first += count
            continue
        spans, ends = kind.spans(block), line_ends(block)
        while at < len(records) and records[at] < first + len(spans):
            begin, end = spans[records[at] - first]
            place = Place(file.url, line + int(np.searchsorted(ends, begin, "right")))
            yield Recalled(records[at], place, shown_raw(block[begin:end]))
            at += 1
        first += len(spans)
    if at < len(records):
        raise _gone(records[at])


def _gone(record: int) -> Corrupt:
    return Corrupt(f"record {record} of a task is not in its inputs any more", hint="import them anew")


def _rejects(fitted: Fitted, block: bytes, record: int, line: int) -> Iterator[Reject]:
    if not fitted.bad:
        return
    lines = np.searchsorted(line_ends(block), [bad.at for bad in fitted.bad], "right")
    for bad, before in zip(fitted.bad, lines.tolist(), strict=True):
        yield Reject(record + bad.row, line + before, bad.misfit.column, bad.misfit.reason, bad.raw)


def _numbers(fitted: Fitted, record: int) -> pa.Int64Array:
    if fitted.rows is None:
        return pa.array(np.arange(record, record + fitted.batch.num_rows))
    return pc.add(fitted.rows, record)


def _first_records(fitted: Fitted, count: int) -> Fitted:
    if fitted.rows is None:
        return Fitted(fitted.batch.slice(0, count), None, ())
    good = pc.sum(pc.less(fitted.rows, count)).as_py() or 0
    return Fitted(
        fitted.batch.slice(0, good),
        fitted.rows.slice(0, good),
        [bad for bad in fitted.bad if bad.row < count],
    )
