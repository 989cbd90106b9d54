"""Rows on their way into a run: sorted a few megabytes at a time as they come, merged as they leave.

Small sorted pieces fit the processor's caches, and to merge them needs no second copy of the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lockstep.job import SortKey
from lockstep.ordering import order, order_columns

PIECE_BYTES: Final = 16 << 20
"""Rows that are brought into order at once."""
SORTED_BYTES: Final = 8 << 20
"""Rows that are sorted as soon as they are there."""
SORT_ROW_BYTES: Final = 64
"""What sorting needs for each row beside the row itself: words of its key, and numbers."""

Sizes = npt.NDArray[np.int64]


class SortBuffer:
    """Holds rows until they leave in order. Equal rows leave in the order in which they came."""

    def __init__(self, keys: Sequence[SortKey]) -> None:
        self._keys = keys
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._sorted: list[pa.RecordBatch] = []
        self.rows = 0
        self.size_bytes = 0

    def add(self, rows: pa.RecordBatch) -> None:
        self._waiting.append(rows)
        self._waiting_bytes += rows.nbytes
        self.rows += rows.num_rows
        self.size_bytes += rows.nbytes
        if self._waiting_bytes >= SORTED_BYTES:
            self._settle()

    def drain(self) -> Iterator[tuple[pa.RecordBatch, Sizes]]:
        """All rows in order, in pieces, with the bytes of each row. The buffer is empty afterwards."""
        self._settle()
        batches, self._sorted = self._sorted, []
        self.rows = self.size_bytes = 0
        if len(batches) == 1:
            yield from _slices(batches[0])
        elif batches:
            yield from _merged(batches, self._keys)

    def clear(self) -> None:
        self._waiting, self._sorted = [], []
        self._waiting_bytes = self.rows = self.size_bytes = 0

    def _settle(self) -> None:
        if not self._waiting:
            return
        rows = combined(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        ordered = order(rows, self._keys)
        in_order = bool((ordered[1:] > ordered[:-1]).all())
        self._sorted.append(rows if in_order else rows.take(pa.array(ordered)))


def _slices(rows: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Sizes]]:
    sizes = row_bytes(rows)
    for first, last in cuts(sizes, PIECE_BYTES):
        yield rows.slice(first, last - first), sizes[first:last]


def _merged(
    batches: Sequence[pa.RecordBatch], keys: Sequence[SortKey]
) -> Iterator[tuple[pa.RecordBatch, Sizes]]:
    """Sorted batches as one: each piece is a slice of every batch, brought into order."""
    counts = np.array([batch.num_rows for batch in batches], np.int64)
    starts = np.cumsum(counts) - counts
    ordered = order_columns(
        [pa.concat_arrays([batch.column(key.column) for batch in batches]) for key in keys],
        keys,
        int(counts.sum()),
    )
    sizes = np.concatenate([row_bytes(batch) for batch in batches])[ordered]
    done = np.zeros(len(batches), np.int64)
    for first, last in cuts(sizes, PIECE_BYTES):
        picked = ordered[first:last]
        owner = np.searchsorted(starts, picked, "right") - 1
        taken = np.bincount(owner, minlength=len(batches))
        slices = [batches[at].slice(int(done[at]), int(taken[at])) for at in np.flatnonzero(taken).tolist()]
        if len(slices) == 1:
            piece = slices[0]
        else:
            shift = np.cumsum(taken) - taken - starts - done
            piece = pa.concat_batches(slices).take(pa.array(picked + shift[owner]))
        done += taken
        yield piece, sizes[first:last]


def combined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


# Sizes of rows


def row_bytes(rows: pa.RecordBatch) -> Sizes:
    """About how many bytes each row takes: exact for texts, the mean of a column for what is nested."""
    total = np.ones(rows.num_rows, np.int64)
    for column in rows.columns:
        kind = column.type
        if pa.types.is_string(kind) or pa.types.is_binary(kind):
            total += np.diff(_offsets(column, np.int32)) + 4
        elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
            total += np.diff(_offsets(column, np.int64)) + 8
        else:
            total += -(-column.nbytes // max(1, rows.num_rows))
    return total


def _offsets(column: pa.Array, kind: type[np.int32] | type[np.int64]) -> Sizes:
    buffer = column.buffers()[1]
    width = np.dtype(kind).itemsize
    return np.frombuffer(buffer, kind, len(column) + 1, column.offset * width).astype(np.int64)


def cuts(sizes: Sizes, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of about `most_bytes`, each with at least one row."""
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + most_bytes, "right")))
        yield first, last
        first = last
