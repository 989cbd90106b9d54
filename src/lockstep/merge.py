"""The merge of sorted runs, a window of rows at a time, in bounded memory.

Rows come out in the order of (key, task, record), whatever the buffers, runs and passes were: runs are
merged in the order of their rows in the input, and of equal rows the earlier run's come first.

`passes` makes the descriptors: `runs` is a list of runs, each a list of files with the blocks to look at;
`low` and `high` bound the range, `kind` says what the runs hold, `losers` which rows are left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lockstep.errors import Corrupt
from lockstep.fingerprint import fingerprint
from lockstep.job import DROPPED, RUN, Json, Plan, Position, SortKey
from lockstep.keys import RECORD, TASK, Bound, Key, SortedRows, key_from_json, key_to_json, visible
from lockstep.ordering import order
from lockstep.sink.run import HUGE_BYTES, order_of, unique_of
from lockstep.source import Chunk
from lockstep.storage import Storage, local_path
from lockstep.storage.errors import is_missing_object, translated

Numbers = npt.NDArray[np.int64]

WINDOW_SHARE: Final = 8
"""Of the task's memory, one part is what is loaded of all runs; twice as much again while it is ordered."""


MOST_WINDOW_BYTES: Final = 1 << 29
"""Offsets of texts in one array are 32-bit numbers."""

IN_MEMORY: Final[Json] = {"first": 0, "last": 1}


def window_bytes(plan: Plan) -> int:
    """What is loaded of all runs at a time."""
    return min(MOST_WINDOW_BYTES, max(1, plan.limits.task_memory_bytes // WINDOW_SHARE))


def bound_to_json(bound: Bound | None) -> Json | None:
    return None if bound is None else {"key": key_to_json(bound[0]), "run": bound[1]}


def bound_from_json(raw: Json | None) -> Bound | None:
    return None if raw is None else (key_from_json(raw["key"]), int(raw["run"]))


# The merge


class MergeReader:
    """Reads a range of several runs as one sequence of rows in order.

    It has the shape of a source: `read` goes on after any position that it has handed out.
    """

    def __init__(self, plan: Plan, storage: Storage) -> None:
        self._plan, self._storage = plan, storage

    def read(self, descriptor: Json, position: Position | None, batch_bytes: int) -> Iterator[Chunk]:
        """The rows of the range after `position`, without those that lose, as the table's columns.

        The last chunk has a position, unless there are no rows. Rows that lose may make a chunk empty.
        Raises: Corrupt if a run is not what was listed; Retryable if the storage does not answer.
        """
        losers = Losers.load(descriptor["losers"], self._storage)
        dropped = Dropped.after(position)
        for window in self.windows(descriptor, position):
            kept, after = window.batches, window.position
            if losers is not None:
                kept = [dropped.without(batch, losers.among(batch)) for batch in window.batches]
                after = {**after, DROPPED: dropped.to_json()}
            pieces = [piece for batch in kept for piece in _pieces(visible(batch), batch_bytes)]
            yield from _chunks(pieces, after)

    def read_whole(self, descriptor: Json, position: Position | None, batch_bytes: int) -> Iterator[Chunk]:
        """As `read`, with hidden columns: what a combining task writes into a longer run."""
        for window in self.windows(descriptor, position):
            pieces = [piece for batch in window.batches for piece in _pieces(batch, batch_bytes)]
            yield from _chunks(pieces, window.position)

    def windows(
        self, descriptor: Json, position: Position | None, before: pa.RecordBatch | None = None
    ) -> Iterator[Window]:
        """The merge, a window of rows at a time.

        `before` are rows in order that count as one more run, before all others; the same for every attempt.
        """
        keys = (order_of(self._plan) if descriptor["kind"] == RUN else unique_of(self._plan)).keys
        low, high = bound_from_json(descriptor["low"]), bound_from_json(descriptor["high"])
        runs = descriptor["runs"] if before is None else [[IN_MEMORY], *descriptor["runs"]]
        places = position["runs"] if position else [None] * len(runs)
        streams = [
            _Stream(ordinal, files, keys, low, high, place, self._storage)
            for ordinal, (files, place) in enumerate(zip(runs, places, strict=True))
        ]
        if before is not None:
            streams[0].memory = before
        try:
            yield from _merged(streams, keys, window_bytes(self._plan))
        finally:
            for stream in streams:
                stream.close()


@dataclass(frozen=True)
class Window:
    """Rows in order, and where to go on after them."""

    batches: Sequence[pa.RecordBatch]
    position: Position


def _merged(streams: Sequence[_Stream], keys: Sequence[SortKey], most_bytes: int) -> Iterator[Window]:
    while True:
        bound = _affordable(streams, _refill(streams, most_bytes), most_bytes)
        slices: list[list[pa.RecordBatch]] = []
        for stream in streams:
            if stream.loaded and (taken := stream.take(bound)):
                slices.append(taken)
        if slices:
            yield Window(_in_order(slices, keys), {"runs": [stream.position for stream in streams]})
        elif bound is None:
            return


def _refill(streams: Sequence[_Stream], most_bytes: int) -> Bound | None:
    """Load until memory is used, always where the next rows are needed first.

    Answers up to where all rows are loaded, or None if that is the end. At least one block of every run is
    loaded.
    """
    loaded_bytes = sum(stream.loaded_bytes for stream in streams)
    for stream in streams:
        while not stream.loaded and not stream.ended:
            stream.load()
            loaded_bytes += stream.loaded_bytes
    waiting = [(stream.last_key, stream.ordinal) for stream in streams if not stream.ended]
    heapq.heapify(waiting)
    while waiting and loaded_bytes < most_bytes:
        stream = streams[waiting[0][1]]
        loaded_bytes += stream.load()
        if stream.ended:
            heapq.heappop(waiting)
        else:
            heapq.heapreplace(waiting, (stream.last_key, stream.ordinal))
    return waiting[0] if waiting else None


def _affordable(streams: Sequence[_Stream], bound: Bound | None, most_bytes: int) -> Bound | None:
    """A nearer bound where the rows up to `bound` would be far too much at once: huge ones, of many runs.

    At least one block comes before it. Of huge rows only the keys are in memory until they are taken.
    """
    if sum(stream.loaded_bytes for stream in streams) <= 2 * most_bytes:
        return bound
    blocks = sorted(
        ((block.last_key, stream.ordinal), block.size_bytes) for stream in streams for block in stream.loaded
    )
    taken, nearer = 0, blocks[0][0]
    for place, size_bytes in blocks:
        if taken and taken + size_bytes > most_bytes:
            return nearer if bound is None else min(nearer, bound)
        taken, nearer = taken + size_bytes, place
    return bound


def _in_order(slices: Sequence[list[pa.RecordBatch]], keys: Sequence[SortKey]) -> list[pa.RecordBatch]:
    """The slices of each run, merged. Runs stand in their order, so that a stable order does it."""
    if len(slices) == 1:
        return slices[0]
    rows = _together([batch for slice_ in slices for batch in slice_])
    return [rows.take(pa.array(order(rows, keys)))]


def _together(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    if all(batch.schema.equals(batches[0].schema) for batch in batches):
        return pa.concat_batches(batches)
    # Inputs of two formats may differ in the width of offsets: the wider one holds both.
    tables = [pa.Table.from_batches([batch]) for batch in batches]
    (rows,) = pa.concat_tables(tables, promote_options="permissive").combine_chunks().to_batches()
    return rows


def _pieces(rows: pa.RecordBatch, most_bytes: int) -> Iterator[pa.RecordBatch]:
    step = max(1, rows.num_rows * most_bytes // max(1, rows.nbytes))
    for first in range(0, max(1, rows.num_rows), step):
        yield rows.slice(first, step)


def _chunks(pieces: Sequence[pa.RecordBatch], position: Position) -> Iterator[Chunk]:
    for at, piece in enumerate(pieces, 1):
        yield Chunk(piece, position if at == len(pieces) else None)


@dataclass
class _Loaded:
    """Rows of one block that have not been handed out."""

    rows: SortedRows
    last_key: Key
    file: int
    block: int
    row: int
    size_bytes: int
    huge: bool = False
    """One row, of which only the key is here; `size_bytes` is that of the row."""


@dataclass
class _Stream:
    """One run of a merge: what is loaded of it, and where the next block is."""

    ordinal: int
    files: Sequence[Json]
    keys: Sequence[SortKey]
    low: Bound | None
    high: Bound | None
    place: Sequence[int] | None
    storage: Storage
    memory: pa.RecordBatch | None = None
    """The rows of the only block of a run that lies in no file."""
    loaded: list[_Loaded] = field(default_factory=list)
    loaded_bytes: int = 0
    ended: bool = False
    _file: int = 0
    _block: int = 0
    _reader: Any = None
    _opened: Any = None

    def __post_init__(self) -> None:
        if self.place is not None:
            self._file, self._block = self.place[0], self.place[1]
        elif self.files:
            self._block = self.files[0]["first"]
        self._skip_finished_files()

    @property
    def last_key(self) -> Key:
        return self.loaded[-1].last_key

    @property
    def position(self) -> list[int]:
        """File, block and row to go on with."""
        if self.loaded:
            head = self.loaded[0]
            return [head.file, head.block, head.row]
        return [self._file, self._block, 0]

    def load(self) -> int:
        """Load one block more; answers its bytes. `ended` is set after the last one."""
        file, block = self._file, self._block
        batch = self._read(file, block)
        self._block += 1
        self._skip_finished_files()
        rows = SortedRows(batch, self.keys)
        first, last = 0, batch.num_rows
        if self.place is not None and list(self.place[:2]) == [file, block]:
            first = self.place[2]
        elif self.place is None and self.low is not None:
            first = _reach(rows, self.low, self.ordinal)
        if self.high is not None:
            last = _reach(rows, self.high, self.ordinal)
            if last < batch.num_rows:
                self.ended = True
        if first >= last:
            return 0
        kept = batch.slice(first, last - first)
        size_bytes = int(kept.nbytes)
        huge = size_bytes > HUGE_BYTES and kept.num_rows == 1 and self.memory is None
        if huge:
            kept = kept.select([key.column for key in self.keys]).take(pa.array([0]))
        self.loaded.append(
            _Loaded(SortedRows(kept, self.keys), rows.key(last - 1), file, block, first, size_bytes, huge)
        )
        self.loaded_bytes += size_bytes
        return size_bytes

    def take(self, bound: Bound | None) -> list[pa.RecordBatch]:
        """Hand out the loaded rows up to where all runs are loaded."""
        taken: list[pa.RecordBatch] = []
        while self.loaded:
            head = self.loaded[0]
            here = len(head.rows)
            if bound is not None:
                here = self._reach_of(head, bound)
            if here < len(head.rows):
                if here:
                    taken.append(head.rows.rows.slice(0, here))
                    self._advance(head, here)
                break
            whole = self._read(head.file, head.block).slice(head.row, 1) if head.huge else head.rows.rows
            taken.append(whole)
            self.loaded_bytes -= head.size_bytes
            self.loaded.pop(0)
        return taken

    def close(self) -> None:
        self._reader = None
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _reach_of(self, head: _Loaded, bound: Bound) -> int:
        """How many of these rows come before, or are, the last row loaded of the run that is loaded least."""
        key, ordinal = bound
        if head.last_key < key:
            return len(head.rows)
        return head.rows.first_after(key) if self.ordinal <= ordinal else head.rows.first_not_before(key)

    def _advance(self, head: _Loaded, rows: int) -> None:
        rest = head.rows.rows.slice(rows)
        self.loaded_bytes += rest.nbytes - head.size_bytes
        self.loaded[0] = _Loaded(
            SortedRows(rest, self.keys), head.last_key, head.file, head.block, head.row + rows, rest.nbytes
        )

    def _skip_finished_files(self) -> None:
        while self._file < len(self.files) and self._block >= self.files[self._file]["last"]:
            self.close()
            self._file += 1
            self._block = self.files[self._file]["first"] if self._file < len(self.files) else 0
        if self._file >= len(self.files):
            self.ended = True

    def _read(self, file: int, block: int) -> pa.RecordBatch:
        if self.memory is not None:
            return self.memory
        piece = self.files[file]
        try:
            if file != self._file:  # a huge row, read again after the stream went on
                with _open(piece, self.storage) as opened:
                    return pa.ipc.open_file(opened).get_batch(block)
            if self._reader is None:
                self._opened = _open(piece, self.storage)
                self._reader = pa.ipc.open_file(self._opened)
            return self._reader.get_batch(block)
        except pa.ArrowInvalid as error:
            raise _damaged(piece["path"], error) from error
        except (OSError, pa.ArrowException) as error:
            raise translated(error, "read", piece["path"]) from error


def _open(piece: Json, storage: Storage) -> Any:
    """Raises: Corrupt if the file does not have the size that was listed."""
    path = piece["path"]
    found = storage.size(path)
    if found != piece["size"]:
        raise Corrupt(
            f"the run {path} was listed with {piece['size']} bytes, but the storage has {found}",
            hint="the file was changed or deleted by somebody else; nothing was published",
        )
    return _opened(path, storage)


def _opened(path: str, storage: Storage) -> Any:
    local = local_path(path)
    return pa.OSFile(str(local)) if local is not None else pa.PythonFile(storage.open(path), "r")


def _damaged(path: str, error: Exception) -> Corrupt:
    return Corrupt(
        f"{path} cannot be read as a run: {error}",
        hint="the file was changed or damaged after it was written; nothing was published",
    )


def _reach(rows: SortedRows, bound: Bound, ordinal: int) -> int:
    """How many of these rows of the run `ordinal` lie before a bound."""
    key, run = bound
    return rows.first_not_before(key) if ordinal >= run else rows.first_after(key)


# Rows that lose


@dataclass(frozen=True)
class Losers:
    """Rows that are not published, one bit for each record of a task up to its last loser."""

    bases: Numbers
    ends: Numbers
    bits: npt.NDArray[np.uint8]

    @classmethod
    def load(cls, paths: Sequence[str], storage: Storage) -> Losers | None:
        """All losers of a job, read twice rather than held. Raises: Corrupt; Retryable."""
        ends = np.zeros(0, np.int64)
        for task, record in _numbers(paths, storage):
            if (more := int(task.max()) + 1 - len(ends)) > 0:
                ends = np.concatenate((ends, np.zeros(more, np.int64)))
            np.maximum.at(ends, task, record + 1)
        if not len(ends):
            return None
        bases = np.cumsum(ends) - ends
        bits = np.zeros((int(ends.sum()) + 7) // 8, np.uint8)
        for task, record in _numbers(paths, storage):
            at = bases[task] + record
            np.bitwise_or.at(bits, at >> 3, np.left_shift(1, at & 7).astype(np.uint8))
        return cls(bases, ends, bits)

    def among(self, batch: pa.RecordBatch) -> npt.NDArray[np.bool_] | None:
        """Which rows of the batch lose; None if none does."""
        task = batch.column(TASK).to_numpy().astype(np.int64)
        record = batch.column(RECORD).to_numpy()
        known = task < len(self.ends)
        safe = np.where(known, task, 0)
        known &= record < self.ends[safe]
        at = np.where(known, self.bases[safe] + record, 0)
        lost = known & (self.bits[at >> 3] >> (at & 7).astype(np.uint8) & 1).astype(np.bool_)
        return lost if lost.any() else None


@dataclass
class Dropped:
    """The rows that a task has left out so far. It stands in the position: what was read, what was written
    and what was left out are one record, so that the three can be compared when the job is published."""

    rows: int = 0
    folded: int = 0

    @classmethod
    def after(cls, position: Position | None) -> Dropped:
        raw = (position or {}).get(DROPPED)
        return cls(raw["rows"], int(raw["folded"], 16)) if raw else cls()

    def to_json(self) -> Json:
        return {"rows": self.rows, "folded": f"{self.folded:016x}"}

    def without(self, batch: pa.RecordBatch, lost: npt.NDArray[np.bool_] | None) -> pa.RecordBatch:
        """The batch without these rows, which are counted."""
        if lost is None:
            return batch
        gone = fingerprint(visible(batch.filter(pa.array(lost))))
        self.rows += gone.rows
        self.folded = (self.folded + gone.folded()) % 2**64
        return batch.filter(pa.array(~lost))


def _numbers(paths: Sequence[str], storage: Storage) -> Iterator[tuple[Numbers, Numbers]]:
    for path in paths:
        for batch in blocks_of(path, storage):
            if batch.num_rows:
                task = batch.column(TASK).to_numpy().astype(np.int64)
                yield task, batch.column(RECORD).to_numpy()


def blocks_of(path: str, storage: Storage) -> Iterator[pa.RecordBatch]:
    """The blocks of an Arrow file, one after the other. Raises: Corrupt; Retryable; Invalid."""
    try:
        with _opened(path, storage) as opened:
            reader = pa.ipc.open_file(opened)
            for block in range(reader.num_record_batches):
                yield reader.get_batch(block)
    except pa.ArrowInvalid as error:
        raise _damaged(path, error) from error
    except (OSError, pa.ArrowException) as error:
        if is_missing_object(error):
            raise Corrupt(
                f"{path} is gone", hint="the file was deleted by somebody else; nothing was published"
            ) from error
        raise translated(error, "read", path) from error
