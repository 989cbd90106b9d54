"""Rolls Parquet data files straight into the table's location.

No reader sees them before a commit lists them. A name holds job, stage, task, epoch and sequence, so that no
attempt can overwrite another's file. Memory is bounded by bytes: rows are buffered up to one row group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lockstep.arrow_types import plain
from lockstep.errors import Corrupt, Invalid
from lockstep.fingerprint import fingerprint
from lockstep.job import Fingerprint, Json, Plan, StagedFile
from lockstep.partitioning import Values, describe, fields_of, grouped, partition_path
from lockstep.runtime import failpoint
from lockstep.sink.shape import FileShape
from lockstep.sink.stats import StatsBuilder, modes_of
from lockstep.storage import Storage
from lockstep.storage.file import Writer
from lockstep.transforms import murmur3_bytes

MOST_GROUP_BYTES: Final = 64_000_000
"""Rows of one row group before they are encoded."""
LEAST_GROUP_BYTES: Final = 64_000
MOST_GROUP_ROWS: Final = 1 << 24
"""Rows of a few bits each make groups of millions, and Arrow's writer cuts those beyond 2^26 by itself."""
SAMPLE_ROWS: Final = 16_384
DISTINCT_SHARE: Final = 0.25
"""A dictionary pays where at most this share of a sample is distinct."""

_CODECS: Final = {"zstd", "snappy", "gzip", "lz4", "brotli", "uncompressed"}
_CODECS_WITH_LEVEL: Final = {"zstd", "gzip", "brotli"}


class DataFileSink:
    """Data files of one attempt. A plan with partition values allows that partition only."""

    def __init__(self, plan: Plan, job_id: str, stage: str, index: int, epoch: int, storage: Storage) -> None:
        self._plan = plan
        self._storage = storage
        self._stage = stage
        self._name = f"lockstep-{job_id}-{stage}-{index:05d}-{epoch:03d}"
        self._fields = fields_of(plan.spec, plan.schema)
        self._allowed = tuple(plan.partition_values) if plan.partition_values else None
        self._options = FileOptions.of(plan, stage)
        self._shape: FileShape | None = None
        self._open: dict[Values, _OpenFile] = {}
        self._finished: list[StagedFile] = []
        self._sequence = 0
        self._packing = Packing()

    def add(self, batch: pa.RecordBatch, records: pa.Int64Array | None = None) -> None:
        """Take rows in the target's Arrow schema.

        Raises: Corrupt for rows that do not fit the table's schema or the job's partition; Invalid and
        Retryable from the storage.
        """
        if batch.num_rows == 0:
            return
        if self._shape is None:
            self._shape = FileShape.of(self._plan.schema, batch.schema)
        rows = self._shape.plain(batch)
        groups = grouped(rows, self._fields) if self._fields else [((), rows)]
        for values, members in groups:
            self._check(values)
            for piece in _pieces(members, self._options.piece_bytes):
                self._add_piece(self._shape, values, piece)

    @property
    def full(self) -> bool:
        """True when a file has reached its size."""
        return bool(self._finished) or any(file.full for file in self._open.values())

    @property
    def pending_bytes(self) -> int:
        staged = sum(file.size_bytes for file in self._finished)
        return staged + sum(file.estimated_bytes for file in self._open.values())

    def flush(self) -> list[StagedFile]:
        """Finish every open file, durably, and confirm its size.

        Raises: Corrupt if a file is not there with its size; Invalid; Retryable.
        """
        for values in list(self._open):
            self._finish(values)
        finished, self._finished = self._finished, []
        return finished

    def abort(self) -> None:
        for file in self._open.values():
            file.abort()
        self._open.clear()

    def _check(self, values: Values) -> None:
        if self._allowed is not None and values != self._allowed:
            raise Corrupt(
                f"a row belongs to partition {describe(values, self._fields)} of the target, "
                f"but this job writes {describe(self._allowed, self._fields)} only",
                hint="the source changed after the job was planned, or compares values in another way; "
                "nothing was published",
            )

    def _add_piece(self, shape: FileShape, values: Values, rows: pa.RecordBatch) -> None:
        file = self._open.get(values)
        if file is not None and file.full:
            self._finish(values)
            file = None
        if file is None:
            self._make_room()
            file = self._open[values] = self._begin(shape, values)
        # The file used last is the last to be finished when there are too many.
        self._open[values] = self._open.pop(values)
        file.add(rows)
        while sum(each.buffered_bytes for each in self._open.values()) > self._options.buffer_bytes:
            max(self._open.values(), key=lambda each: each.buffered_bytes).write_group()

    def _make_room(self) -> None:
        cost = self._storage.open_bytes(self._plan.location)
        most = max(1, self._options.buffer_bytes // cost)
        while len(self._open) >= most:
            self._finish(next(iter(self._open)))

    def _begin(self, shape: FileShape, values: Values) -> _OpenFile:
        url = data_url(self._plan, values, f"{self._name}-{self._sequence:05d}.parquet")
        self._sequence += 1
        return _OpenFile(url, values, shape, self._options, self._packing, self._storage)

    def _finish(self, values: Values) -> None:
        # Kept among the open ones until it is finished, so that abort finds it after an error.
        self._finished.append(self._open[values].finish())
        del self._open[values]
        if self._stage == "write":
            failpoint("write.after_file")
        elif self._stage == "merge":
            failpoint("merge.after_file")


# Names


def data_url(plan: Plan, values: Sequence[Any], name: str) -> str:
    """Where a data file goes: by partition below the table's data folder, or as object storage likes it."""
    properties = plan.properties
    root = data_root(properties, plan.location)
    folder = partition_path(values, plan.spec, plan.schema)
    within = f"{folder}/{name}" if folder else name
    if not _is_true(properties.get("write.object-storage.enabled", "false")):
        return f"{root}/{within}"
    if _is_true(properties.get("write.object-storage.partitioned-paths", "true")):
        return f"{root}/{_entropy(within)}/{within}"
    return f"{root}/{_entropy(name)}-{name}"


def data_root(properties: Mapping[str, Any], location: str) -> str:
    """The folder below which a table's data files lie."""
    return str(properties.get("write.data.path") or f"{location.rstrip('/')}/data").rstrip("/")


def _is_true(value: Any) -> bool:
    return str(value).strip().lower() == "true"


def _entropy(name: str) -> str:
    """Iceberg's folders by hash: object stores spread their load by the beginning of a name."""
    bits = f"{murmur3_bytes(name.encode()) & 0xFFFFF:020b}"
    return "/".join((bits[:4], bits[4:8], bits[8:12], bits[12:]))


# What every file of a sink has in common


@dataclass(frozen=True)
class FileOptions:
    """What the table's properties and the job's limits say of its files."""

    file_bytes: int
    group_bytes: int
    buffer_bytes: int
    codec: str
    level: int | None
    page_bytes: int | None
    sort_order_id: int | None
    properties: Mapping[str, Any]
    sort_order: Json
    schema: Json

    @property
    def piece_bytes(self) -> int:
        """Rows that go into a file at once: what a row group and a file hold."""
        return min(self.group_bytes, max(LEAST_GROUP_BYTES, self.file_bytes))

    @classmethod
    def of(cls, plan: Plan, stage: str) -> FileOptions:
        wanted = plan.properties
        memory = plan.limits.task_memory_bytes
        codec = str(wanted.get("write.parquet.compression-codec", "zstd")).lower()
        level = _number(wanted, "write.parquet.compression-level", 1 if codec == "zstd" else None)
        stated_group = _number(wanted, "write.parquet.row-group-size-bytes", MOST_GROUP_BYTES)
        group = max(LEAST_GROUP_BYTES, min(MOST_GROUP_BYTES, memory // 8, stated_group or MOST_GROUP_BYTES))
        return cls(
            file_bytes=plan.file_size_bytes,
            group_bytes=group,
            buffer_bytes=max(group, memory // 4),
            codec=codec if codec in _CODECS else "zstd",
            level=level if codec in _CODECS_WITH_LEVEL else None,
            page_bytes=_number(wanted, "write.parquet.page-size-bytes", None),
            # Only a merge puts rows in the table's order; no file may claim an order that it does not have.
            sort_order_id=plan.sort_order.get("order-id") if stage == "merge" else None,
            properties=wanted,
            sort_order=plan.sort_order,
            schema=plan.schema,
        )


def _number(properties: Mapping[str, Any], name: str, default: int | None) -> int | None:
    """Raises: Invalid if the table's property is not a number."""
    stated = properties.get(name, default)
    try:
        return None if stated is None else int(stated)
    except ValueError as error:
        raise Invalid(
            f"the table's property {name} is {stated!r}, which is not a number",
            hint="correct the property of the table, then export again",
        ) from error


@dataclass
class Packing:
    """Bytes in a file for each byte of rows, as the files of this sink have shown; None at first."""

    ratio: float | None = None

    def learn(self, raw_bytes: int, file_bytes: int) -> None:
        if raw_bytes > 0:
            self.ratio = file_bytes / raw_bytes


class _OpenFile:
    """A file being written. The object in storage begins with its first row group."""

    def __init__(
        self,
        url: str,
        values: Values,
        shape: FileShape,
        options: FileOptions,
        packing: Packing,
        storage: Storage,
    ) -> None:
        self._url, self._values, self._shape, self._options = url, values, shape, options
        self._packing, self._storage = packing, storage
        self._stats = StatsBuilder(
            shape.leaves, modes_of(options.schema, options.sort_order, options.properties)
        )
        self._buffer: list[pa.RecordBatch] = []
        self.buffered_bytes = 0
        self._buffered_rows = 0
        self._rows = 0
        self._fingerprint = Fingerprint()
        self._writer: Writer | None = None
        self._parquet: pq.ParquetWriter | None = None
        self._footers: list[Any] = []

    @property
    def estimated_bytes(self) -> int:
        """What was written, and what the buffer will add, as far as that is known."""
        written = self._writer.size_bytes if self._writer else 0
        return written + int(self.buffered_bytes * (self._packing.ratio or 0.0))

    @property
    def full(self) -> bool:
        return self.estimated_bytes >= self._options.file_bytes

    def add(self, rows: pa.RecordBatch) -> None:
        self._fingerprint += fingerprint(rows)
        self._rows += rows.num_rows
        if self._buffered_rows + rows.num_rows > MOST_GROUP_ROWS:
            self.write_group()
        self._buffer.append(rows)
        self._buffered_rows += rows.num_rows
        self.buffered_bytes += rows.nbytes
        # Until the first row group shows how well rows pack, a group is no larger than a file.
        options = self._options
        if self.buffered_bytes >= (
            options.piece_bytes if self._packing.ratio is None else options.group_bytes
        ):
            self.write_group()

    def write_group(self) -> None:
        """Write what is buffered as one row group."""
        if not self._buffer:
            return
        rows = self._shape.labelled(self._buffer)
        writer, parquet = self._begin(rows)
        before = writer.size_bytes
        self._stats.note(rows)
        try:
            parquet.write_table(rows, row_group_size=rows.num_rows)
        except pa.ArrowInvalid as error:
            raise Corrupt(f"rows do not fit {self._url}: {error}") from error
        self._packing.learn(self.buffered_bytes, writer.size_bytes - before)
        self._buffer = []
        self._buffered_rows = 0
        self.buffered_bytes = 0

    def finish(self) -> StagedFile:
        self.write_group()
        assert self._writer is not None
        assert self._parquet is not None
        self._parquet.close()
        self._writer.close()
        size_bytes = self._writer.size_bytes
        self._storage.confirm(self._url, size_bytes)
        return StagedFile(
            path=self._url,
            size_bytes=size_bytes,
            rows=self._rows,
            checksum=self._writer.checksum,
            fingerprint=self._fingerprint,
            partition=self._values,
            stats=self._stats.finish(self._footers[0], self._options.sort_order_id),
        )

    def abort(self) -> None:
        if self._parquet is not None:
            self._parquet.is_open = False  # else its destructor would write a footer
        if self._writer is not None:
            self._writer.abort()
        self._buffer = []

    def _begin(self, sample: pa.Table) -> tuple[Writer, pq.ParquetWriter]:
        if self._writer is None or self._parquet is None:
            self._writer = self._storage.create(self._url)
            self._parquet = pq.ParquetWriter(
                self._writer,
                self._shape.schema,
                version="2.6",
                use_dictionary=low_cardinality(sample, self._shape.paths),
                compression="none" if self._options.codec == "uncompressed" else self._options.codec,
                compression_level=self._options.level,
                data_page_size=self._options.page_bytes,
                write_statistics=self._shape.with_statistics,
                store_decimal_as_integer=True,
                store_schema=False,
                metadata_collector=self._footers,
            )
            self._parquet.add_key_value_metadata({"iceberg.schema": json.dumps(self._options.schema)})
        return self._writer, self._parquet


def _pieces(rows: pa.RecordBatch, most_bytes: int) -> list[pa.RecordBatch]:
    """A batch in slices that fit a row group, unless a single row does not."""
    if rows.nbytes <= most_bytes or rows.num_rows == 1:
        return [rows]
    half = rows.num_rows // 2
    return _pieces(rows.slice(0, half), most_bytes) + _pieces(rows.slice(half), most_bytes)


# Dictionaries


def low_cardinality(rows: pa.Table, paths: Sequence[str]) -> list[str]:
    """The Parquet columns that a dictionary makes smaller and faster, judged by a sample of the rows."""
    if rows.num_rows > SAMPLE_ROWS:
        rows = rows.take(pa.array(np.linspace(0, rows.num_rows - 1, SAMPLE_ROWS, dtype=np.int64)))
    leaves = [leaf for column in rows.columns for leaf in _leaf_arrays(column)]
    return [path for path, leaf in zip(paths, leaves, strict=True) if _is_repetitive(leaf)]


def _leaf_arrays(array: pa.Array | pa.ChunkedArray) -> list[pa.Array]:
    array = plain(array)
    if pa.types.is_struct(array.type):
        return [leaf for child in array.flatten() for leaf in _leaf_arrays(child)]
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return _leaf_arrays(array.flatten())
    if pa.types.is_map(array.type):
        return _leaf_arrays(array.keys) + _leaf_arrays(array.items)
    return [array]


def _is_repetitive(leaf: pa.Array) -> bool:
    if pa.types.is_boolean(leaf.type) or pa.types.is_null(leaf.type):
        return False
    present = len(leaf) - leaf.null_count
    return bool(pc.count_distinct(leaf).as_py() <= present * DISTINCT_SHARE)
