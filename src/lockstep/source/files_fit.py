"""Blocks of text to batches, and the records that do not fit, one by one.

A block is parsed in one go. Only when that fails is it taken apart, down to the records that fail alone;
the others go through the same parser again. So a record's values, and whether it fits, never depend on which
block it stands in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import pyarrow as pa

RECORDS_AT_ONCE: Final = 128
RAW_CHARS: Final = 10_000
SHOWN_CHARS: Final = 80


class Unfit(Exception):
    """Some record of a block does not fit.

    `row` counts from 0 where the parser knows which record it is; only then `column` may be the target column
    that it is about, by number, or `reason` say all of it.
    """

    def __init__(self, row: int | None = None, column: int | None = None, reason: str | None = None) -> None:
        super().__init__(row, column, reason)
        self.row = row
        self.column = column
        self.reason = reason


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

    def ends_open(self, block: bytes) -> bool:
        """Whether the last record opens something that is not closed."""
        ...

    def explain(self, record: bytes, unfit: Unfit) -> Misfit:
        """Why a record does not fit, of which `parse` has said so."""
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


def fit_last(parser: Parser, block: bytes) -> Fitted:
    """`fit` for a block that ends where its input does, perhaps in the middle of its last record."""
    if not parser.ends_open(block):
        return fit(parser, block)
    start, end = parser.records(block)[-1]
    before = fit(parser, block[:start])
    misfit = Misfit(None, "a quote is opened in it and never closed")
    open_one = Bad(before.records, start, misfit, shown_raw(block[start:end]))
    rows = pa.array(np.arange(before.records), pa.int64()) if before.rows is None else before.rows
    return Fitted(before.batch, rows, [*before.bad, open_one])


def _taken_apart(parser: Parser, block: bytes) -> Fitted:
    spans = parser.records(block)
    batches: list[pa.RecordBatch] = []
    bad: list[Bad] = []
    for start in range(0, len(spans), RECORDS_AT_ONCE):
        rows = list(range(start, min(start + RECORDS_AT_ONCE, len(spans))))
        while rows:
            records = [block[slice(*spans[row])] for row in rows]
            try:
                batches.append(parser.parse(b"".join(records)))
                break
            except Unfit as error:
                number, unfit = (error.row, error) if error.row is not None else _culprit(parser, records)
                row = rows.pop(number)
                misfit = parser.explain(records[number], unfit)
                bad.append(Bad(row, spans[row][0], misfit, shown_raw(records[number])))
    bad.sort(key=lambda each: each.row)
    numbers = np.setdiff1d(np.arange(len(spans)), [each.row for each in bad])
    return Fitted(_joined(batches, parser), pa.array(numbers, pa.int64()), bad)


def _culprit(parser: Parser, records: Sequence[bytes]) -> tuple[int, Unfit]:
    """A record that does not fit alone, and why. There is one: together they do not fit."""
    low, high = 0, len(records)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            parser.parse(b"".join(records[low:middle]))
        except Unfit:
            high = middle
        else:
            low = middle
    try:
        parser.parse(records[low])
    except Unfit as error:
        return low, error
    raise AssertionError("records that fit alone do not fit together")


def _joined(batches: Sequence[pa.RecordBatch], parser: Parser) -> pa.RecordBatch:
    if not batches:
        return parser.parse(b"")
    return pa.concat_batches(batches) if len(batches) > 1 else batches[0]


def shown_raw(record: bytes) -> str:
    """A record as text: bytes that are no UTF-8 as \\xNN, and not more than people will read."""
    text = record.rstrip(b"\r\n")[: 4 * RAW_CHARS].decode("utf-8", "backslashreplace")
    return _shortened(text, RAW_CHARS)


def shown_row(row: pa.RecordBatch) -> str:
    """A row of a format that is no text, as JSON: bytes as hexadecimal digits, dates as texts."""
    try:
        text = json.dumps(row.to_pylist()[0], ensure_ascii=False, default=_as_text)
    except (ValueError, OverflowError):  # no UTF-8, or a date that Python does not have
        text = "a row with values that cannot be shown"
    return _shortened(text, RAW_CHARS)


def _as_text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def shown(value: str) -> str:
    return f'"{_shortened(value, SHOWN_CHARS)}"'


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
