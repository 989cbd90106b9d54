"""Sorted runs: the steps of an import between its input and its data files.

A run holds rows in the order of the plan, in blocks of about a megabyte. Its manifest entry knows enough to
plan a merge without opening it (`stats`): the number of blocks, bytes before compression, the largest
block and the most that a merge holds of one, and `samples`, the keys at which every `sampled`-th block
begins, from block 0 on, and the `last` key.

With a unique key a run carries the number of the task and of the record for each row, and has a narrow
companion of the kind `keys`: unique columns and these numbers, sorted by the unique key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.errors import Corrupt
from lockstep.fingerprint import fingerprint
from lockstep.job import KEYS, RUN, Fingerprint, Json, Lease, Plan, SortKey, StagedFile
from lockstep.keys import RECORD, TASK, Key, KeyColumns, bound_at, key_to_json, refuse_hidden_names, visible
from lockstep.sink.shape import FileShape
from lockstep.sink.sorting import SORT_ROW_BYTES, Sizes, SortBuffer, combined, cuts, row_bytes
from lockstep.sink.staging import ArrowFile, staged_url
from lockstep.storage import Storage, local_path

BLOCK_BYTES: Final = 1 << 20
HUGE_BYTES: Final = 4 << 20
"""Of a row beyond this a merge holds the key alone, and reads the row again when it is its turn."""
MOST_BUFFER_BYTES: Final = 1 << 30
"""Offsets of texts in one array are 32-bit numbers."""
MOST_SAMPLES: Final = 128
SAMPLES_BYTES: Final = 8192
"""Of all samples of a run together, if its keys are long; at least a few stay."""
LEAST_SAMPLES: Final = 16
LONG_RUN_BYTES: Final = 256_000_000


class RunSink:
    """Buffers rows within the task's memory, sorts them, and writes them as a run.

    The buffer and what sorting needs for each row take two thirds of it; the rest is for rows that come and
    pieces that leave.
    """

    def __init__(self, plan: Plan, job_id: str, stage: str, index: int, epoch: int, storage: Storage) -> None:
        self._plan, self._storage = plan, storage
        self._lease = Lease(job_id, stage, index, epoch, "")
        self._order = order_of(plan)
        self._unique = unique_of(plan) if plan.terms and plan.terms.unique else None
        self._most_bytes = max(1, plan.limits.task_memory_bytes * 2 // 3)
        self._shape: FileShape | None = None
        self._rows = SortBuffer(self._order.keys)
        self._keys = SortBuffer(_companion_order(self._unique, plan))
        self._fingerprint = Fingerprint()
        self._finished: list[StagedFile] = []
        self._open: RunFile | None = None
        self._sequence = 0

    def add(self, batch: pa.RecordBatch, records: pa.Int64Array | None = None) -> None:
        """Take rows in the target's Arrow schema.

        Raises: Corrupt for rows that do not fit the table's schema; Invalid and Retryable from the storage.
        """
        if batch.num_rows == 0:
            return
        if self._is_full:
            self._write()
        if self._shape is None:
            self._shape = FileShape.of(self._plan.schema, batch.schema)
        rows = _decoded(self._shape.plain(batch))
        self._fingerprint += fingerprint(rows)
        rows = self._order.attach(rows)
        if self._unique is not None:
            rows = self._numbered(rows, records)
            self._keys.add(key_rows(rows, self._unique))
        self._rows.add(rows)

    @property
    def full(self) -> bool:
        return bool(self._finished) or self._is_full

    @property
    def pending_bytes(self) -> int:
        return self._rows.size_bytes + sum(file.size_bytes for file in self._finished)

    def flush(self) -> list[StagedFile]:
        """Sort and write what is buffered, durably, and confirm the sizes.

        Raises: Corrupt if a file is not there with its size; Invalid; Retryable.
        """
        self._write()
        finished, self._finished = self._finished, []
        return finished

    def abort(self) -> None:
        if self._open is not None:
            self._open.abort()
        self._rows.clear()
        self._keys.clear()

    @property
    def _is_full(self) -> bool:
        held = self._rows.size_bytes + self._keys.size_bytes
        sorting = self._rows.rows * SORT_ROW_BYTES
        return held + sorting >= self._most_bytes or held >= MOST_BUFFER_BYTES

    def _numbered(self, rows: pa.RecordBatch, records: pa.Int64Array | None) -> pa.RecordBatch:
        if records is None or len(records) != rows.num_rows:
            raise Corrupt("rows came without their record numbers, which a unique key needs")
        task = pa.repeat(pa.scalar(self._lease.index, pa.int32()), rows.num_rows)
        return rows.append_column(TASK, task).append_column(RECORD, records)

    def _write(self) -> None:
        if not self._rows.rows:
            return
        if self._unique is not None:
            self._write_sorted(KEYS, self._keys, self._unique.keys, Fingerprint())
        self._write_sorted(RUN, self._rows, self._order.keys, self._fingerprint)
        self._fingerprint = Fingerprint()
        self._sequence += 1

    def _write_sorted(
        self, kind: str, buffer: SortBuffer, keys: Sequence[SortKey], sum_of_rows: Fingerprint
    ) -> None:
        url = staged_url(self._plan, self._lease, self._sequence, kind)
        for piece, sizes in buffer.drain():
            if self._open is None:
                self._open = RunFile(url, kind, piece.schema, keys, self._storage)
            _write_blocks(self._open, piece, sizes)
        assert self._open is not None
        self._finished.append(self._open.finish(sum_of_rows))
        self._open = None


def _companion_order(unique: KeyColumns | None, plan: Plan) -> list[SortKey]:
    """By the unique key, and within it by record; the later one first where the last is to be kept."""
    if unique is None or plan.terms is None:
        return []
    return [*unique.keys, SortKey(RECORD, descending=plan.terms.on_duplicate == "keep-last")]


class SortedRunSink:
    """Rows that come in order, hidden columns and all, as one long run: what `combine` makes of several.

    `kind` says whether they are runs or their companions. Long runs are cut into several files, which
    together are one run: their order is that of their names.
    """

    def __init__(
        self, plan: Plan, job_id: str, stage: str, index: int, epoch: int, storage: Storage, kind: str = RUN
    ) -> None:
        self._plan, self._storage, self._kind = plan, storage, kind
        self._lease = Lease(job_id, stage, index, epoch, "")
        self._keys = (order_of(plan) if kind == RUN else unique_of(plan)).keys
        self._schema: pa.Schema | None = None
        self._file: RunFile | None = None
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._fingerprint = Fingerprint()
        self._finished: list[StagedFile] = []
        self._sequence = 0

    def add(self, batch: pa.RecordBatch, records: pa.Int64Array | None = None) -> None:
        """Take the next rows in order. Raises: Invalid and Retryable from the storage."""
        if batch.num_rows == 0:
            return
        if self._kind == RUN:
            self._fingerprint += fingerprint(visible(batch))
        if self._schema is None:
            self._schema = batch.schema
        elif not batch.schema.equals(self._schema):
            batch = batch.cast(self._schema)
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= BLOCK_BYTES:
            self._write()
        if self._file is not None and self._file.raw_bytes >= LONG_RUN_BYTES:
            self._finish()

    @property
    def full(self) -> bool:
        return bool(self._finished)

    @property
    def pending_bytes(self) -> int:
        written = self._file.size_bytes if self._file is not None else 0
        return written + self._waiting_bytes + sum(file.size_bytes for file in self._finished)

    def flush(self) -> list[StagedFile]:
        """Raises: Corrupt if a file is not there with its size; Invalid; Retryable."""
        self._finish()
        finished, self._finished = self._finished, []
        return finished

    def abort(self) -> None:
        if self._file is not None:
            self._file.abort()
        self._waiting = []

    def _write(self) -> None:
        if not self._waiting:
            return
        rows = combined(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        if self._file is None:
            url = staged_url(self._plan, self._lease, self._sequence, self._kind)
            self._file = RunFile(url, self._kind, rows.schema, self._keys, self._storage)
            self._sequence += 1
        _write_blocks(self._file, rows, row_bytes(rows))

    def _finish(self) -> None:
        self._write()
        if self._file is None:
            return
        self._finished.append(self._file.finish(self._fingerprint))
        self._file, self._fingerprint = None, Fingerprint()


class RunFile:
    """A run being written: blocks in order, with what a merge is planned by."""

    def __init__(
        self, url: str, kind: str, schema: pa.Schema, keys: Sequence[SortKey], storage: Storage
    ) -> None:
        # On this machine's disks compression costs more than it saves; over a network it is the reverse.
        codec = None if local_path(url) is not None else "lz4"
        # The fingerprint of the rows is compared with that of the data files: it proves more than a checksum.
        self._file = ArrowFile(url, schema, storage, codec, hashed=kind != RUN)
        self._kind, self._keys = kind, keys
        self._samples: list[Key] = []
        self.raw_bytes = 0
        self._block_bytes = 0
        self._held_bytes = 0
        self._last: Key = ()

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def write(self, block: pa.RecordBatch) -> None:
        self._samples.append(bound_at(block, 0, self._keys))
        self._file.write(block)
        self.raw_bytes += block.nbytes
        self._block_bytes = max(self._block_bytes, block.nbytes)
        self._held_bytes = max(self._held_bytes, self._held(block))
        self._last = bound_at(block, block.num_rows - 1, self._keys)

    def _held(self, block: pa.RecordBatch) -> int:
        """What a merge has in memory of a block while it waits for its turn."""
        if block.nbytes <= HUGE_BYTES or block.num_rows > 1:
            return int(block.nbytes)
        return int(block.select([key.column for key in self._keys]).nbytes)

    def finish(self, sum_of_rows: Fingerprint) -> StagedFile:
        step = _sampling(self._samples)
        stats: Json = {
            "blocks": self._file.blocks,
            "raw_bytes": self.raw_bytes,
            "block_bytes": self._block_bytes,
            "held_bytes": self._held_bytes,
            "sampled": step,
            "samples": [key_to_json(key) for key in self._samples[::step]],
            "last": key_to_json(self._last),
        }
        return self._file.finish(self._kind, sum_of_rows, stats)

    def abort(self) -> None:
        self._file.abort()


def _write_blocks(file: RunFile, rows: pa.RecordBatch, sizes: Sizes) -> None:
    for first, last in cuts(sizes, BLOCK_BYTES):
        file.write(rows.slice(first, last - first))


def order_of(plan: Plan) -> KeyColumns:
    """How the rows of this plan are ordered.

    Raises: Invalid if the table has a column that would be taken for one of ours.
    """
    refuse_hidden_names(plan.schema, "rename the column")
    return KeyColumns(plan.terms.order if plan.terms else (), plan.schema)


def unique_of(plan: Plan) -> KeyColumns:
    """How the companions of runs are ordered: by the unique key."""
    unique = plan.terms.unique if plan.terms else ()
    return KeyColumns([SortKey(column) for column in unique], plan.schema)


def _sampling(samples: Sequence[Key]) -> int:
    """Every how manieth block's key is kept."""
    if not samples:
        return 1
    length = max(1, sum(len(code) for key in samples for code in key) // len(samples))
    most = max(LEAST_SAMPLES, min(MOST_SAMPLES, SAMPLES_BYTES // length))
    return -(-len(samples) // most)


def _decoded(rows: pa.RecordBatch) -> pa.RecordBatch:
    """An Arrow file has room for one dictionary only, and batches come with different ones."""
    if not any(pa.types.is_dictionary(kind) for kind in rows.schema.types):
        return rows
    columns = [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in rows.columns]
    return pa.record_batch(columns, names=rows.schema.names)


def key_rows(rows: pa.RecordBatch, unique: KeyColumns) -> pa.RecordBatch:
    """The companion's columns: the unique key, task and record. 0.0 and -0.0 are one key."""
    narrow = unique.attach(rows).select([*(key.column for key in unique.keys), TASK, RECORD])
    columns = [c if not pa.types.is_floating(c.type) else _without_signed_zero(c) for c in narrow.columns]
    return pa.record_batch(columns, names=narrow.schema.names)


def _without_signed_zero(column: pa.Array) -> pa.Array:
    return pc.add(column, pa.scalar(0.0, column.type))
