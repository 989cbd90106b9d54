"""Blocks of text to batches, and the records that do not fit, one by one.

A block is parsed in one go. Only when that fails is it taken apart, down to the records that fail alone;
the others go through the same parser again. So a record's values, and whether it fits, never depend on which
block it stands in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa

RECORDS_AT_ONCE: Final = 128
RAW_CHARS: Final = 10_000
SHOWN_CHARS: Final = 80


class Unfit(Exception):
    """Some record of a block does not fit; `row` counts from 0 where the parser knows which one."""

    def __init__(self, row: int | None = None) -> None:
        super().__init__(row)
        self.row = row


@dataclass(frozen=True)
class Misfit:
    """Why a record does not fit: in which column of the input, and in words for people."""

    column: str | None
    reason: str


class Parser(Protocol):
    def parse(self, block: bytes) -> pa.RecordBatch:
        """One row of the target for each record. Raises: Unfit."""
        ...

    def records(self, block: bytes) -> list[tuple[int, int]]:
        """Begin and end of each record."""
        ...

    def explain(self, record: bytes) -> Misfit:
        """Why a record fails that failed alone."""
        ...


@dataclass(frozen=True)
class Bad:
    """A record that does not fit: its number and its first byte in the block, and why."""

    row: int
    at: int
    misfit: Misfit
    raw: str


@dataclass(frozen=True)
class Fitted:
    """What became of a block: its good rows, their numbers in the block, and the rest.

    `rows` None: every record is a good row.
    """

    batch: pa.RecordBatch
    rows: pa.Int64Array | None
    bad: Sequence[Bad]

    @property
    def records(self) -> int:
        return int(self.batch.num_rows) + len(self.bad)


def fit(parser: Parser, block: bytes) -> Fitted:
    try:
        return Fitted(parser.parse(block), None, ())
    except Unfit:
        return _taken_apart(parser, block)


def _taken_apart(parser: Parser, block: bytes) -> Fitted:
    spans = parser.records(block)
    batches: list[pa.RecordBatch] = []
    bad: list[Bad] = []
    for start in range(0, len(spans), RECORDS_AT_ONCE):
        for first, last, batch in _pieces(
            parser, block, spans, start, min(start + RECORDS_AT_ONCE, len(spans))
        ):
            if batch is not None:
                batches.append(batch)
                continue
            for row in range(first, last):
                begin, end = spans[row]
                record = block[begin:end]
                bad.append(Bad(row, begin, parser.explain(record), shown_raw(record)))
    numbers = pa.array(sorted(set(range(len(spans))) - {each.row for each in bad}), pa.int64())
    return Fitted(_joined(batches, parser), numbers, bad)


def _pieces(
    parser: Parser, block: bytes, spans: Sequence[tuple[int, int]], first: int, last: int
) -> Iterator[tuple[int, int, pa.RecordBatch | None]]:
    """Ranges of records in their order: with their batch, or one alone without, since it does not fit."""
    if first == last:
        return
    try:
        batch = parser.parse(block[spans[first][0] : spans[last - 1][1]])
    except Unfit as error:
        if last - first == 1:
            yield first, last, None
            return
        # The parser stops at its first failure, so what stands before that row is worth one more try.
        cut = first + error.row if error.row is not None and first + error.row < last else (first + last) // 2
        yield from _pieces(parser, block, spans, first, cut)
        if cut > first or error.row is not None:
            yield from _pieces(parser, block, spans, cut, cut + 1)
            yield from _pieces(parser, block, spans, cut + 1, last)
    else:
        yield first, last, batch


def _joined(batches: Sequence[pa.RecordBatch], parser: Parser) -> pa.RecordBatch:
    if not batches:
        return parser.parse(b"")
    return pa.concat_batches(batches) if len(batches) > 1 else batches[0]


def shown_raw(record: bytes) -> str:
    """A record as text: bytes that are no UTF-8 as \\xNN, and not more than people will read."""
    text = record.rstrip(b"\r\n")[: 4 * RAW_CHARS].decode("utf-8", "backslashreplace")
    return text if len(text) <= RAW_CHARS else text[: RAW_CHARS - 1] + "…"


def shown(value: str) -> str:
    return f'"{value}"' if len(value) <= SHOWN_CHARS else f'"{value[: SHOWN_CHARS - 1]}…"'
