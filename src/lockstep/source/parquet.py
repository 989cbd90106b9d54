"""Parquet folders as a source, Hive layout or flat.

A folder cannot be frozen, so a pin is a list of names, sizes and etags; a file that changed or went away
since is `Corrupt`, looked for before the first row and again before the last one of each task. A column
that stands both in the path and in the files is read from the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.errors import Corrupt, Invalid
from lockstep.job import ColumnMap, Json, Piece, Position, TaskSpec
from lockstep.schema import conform
from lockstep.source import Chunk, PartInfo, PartitionInfo, Pin, SourceColumn, SourceField, SourceTable
from lockstep.source.extent import bounds_of, distinct
from lockstep.source.parquet_batches import RowGroupReader, open_parquet
from lockstep.source.parquet_footer import Footer, agreed, read_footer, unreadable
from lockstep.source.parquet_layout import (
    Layout,
    PathColumn,
    absolute_root,
    folder_url,
    list_data_files,
    read_layout,
)
from lockstep.source.pieces import gathered
from lockstep.storage import Storage
from lockstep.storage.file import StoredFile

if TYPE_CHECKING:
    from lockstep.config import Config


class ParquetSource:
    """A `Source` over `parquet:PATH_OR_URL`."""

    def __init__(self, address: str, config: Config) -> None:
        self._storage = Storage(config.storage)
        self._root = absolute_root(address, config.root)
        self._footers: dict[tuple[str, str], Footer] = {}

    def describe(self) -> SourceTable:
        """Raises: Invalid if there is no such folder, if it has no files, or if their schemas differ."""
        layout = read_layout(self._storage, self._root)
        columns = self._columns(layout)
        in_path = [key.name for key in layout.keys]
        return SourceTable(
            name=self._root,
            identity=f"parquet:{self._root}",
            columns=columns,
            partitioning=[SourceField(name) for name in in_path],
            partition_key=", ".join(in_path),
        )

    def partitions(self) -> list[PartitionInfo]:
        layout = read_layout(self._storage, self._root)
        return [self._partition(partition_id, layout) for partition_id in layout.partitions]

    def pin(self, name: str, partition_id: str, parts: Sequence[str] | None, *, frozen: bool = True) -> Pin:
        """Note the files of a partition. There is nothing to freeze, so `frozen` changes nothing.

        Raises: Invalid for an unknown partition or part, and for files whose schemas differ.
        """
        layout = read_layout(self._storage, self._root)
        if partition_id not in layout.partitions:
            raise Invalid(
                f'{self._root} has no partition "{partition_id}"',
                hint=f"`lockstep partitions parquet:{self._root}` lists them",
            )
        self._columns(layout)
        found = self._partition(partition_id, layout).parts
        if parts is not None:
            unknown = sorted(set(parts) - {part.name for part in found})
            if unknown:
                raise Invalid(f'partition "{partition_id}" of {self._root} has no file "{unknown[0]}"')
            found = [part for part in found if part.name in set(parts)]
        etags = {short: file.etag for short, file in layout.partitions[partition_id]}
        detail: Json = {
            "partition": partition_id,
            "files": [[part.name, part.size_bytes, etags[part.name], part.rows] for part in found],
            "path_columns": [
                [key.name, key.type, value]
                for key, value in zip(layout.keys, layout.values(partition_id), strict=True)
            ],
        }
        return Pin(detail, found, sum(part.rows for part in found))

    def distinct_rows(self, pin: Pin, columns: Sequence[ColumnMap]) -> Iterator[pa.RecordBatch]:
        for batch in self._all_rows(pin, columns):
            yield distinct(batch)

    def bounds(self, pin: Pin, columns: Sequence[ColumnMap]) -> pa.Table:
        return bounds_of(self._all_rows(pin, columns), columns)

    def plan_tasks(self, pin: Pin, task_bytes: int) -> list[TaskSpec]:
        """Tasks are runs of row groups: a large file makes several, small files share one."""
        groups = self._sized_groups(self._pinned_files(pin.detail))
        return [_task(*some) for some in gathered(groups, task_bytes)]

    def _sized_groups(self, files: Sequence[StoredFile]) -> Iterator[tuple[tuple[int, int, int], int]]:
        """Each row group that has rows, as file, number and rows, with its share of the stored bytes."""
        for index, file in enumerate(files):
            footer = self._footer(file)
            decoded = sum(group_bytes for _, group_bytes in footer.groups) or 1
            for number, (group_rows, group_bytes) in enumerate(footer.groups):
                if group_rows:
                    yield (index, number, group_rows), file.size_bytes * group_bytes // decoded

    def read(
        self,
        pin: Json,
        descriptor: Json,
        position: Position | None,
        columns: Sequence[ColumnMap],
        batch_bytes: int,
    ) -> Iterator[Chunk]:
        """Every chunk has a position: the file, the row group, and the rows of it that were delivered.

        Raises: Corrupt, naming the file, if one changed, went away, or cannot be decoded.
        """
        files = self._pinned_files(pin)
        reader = _Reader(columns, _path_scalars(pin), batch_bytes)
        held: Chunk | None = None
        for index, first, last, skip in _remaining(descriptor["pieces"], position):
            for group, row, batch in self._groups(
                files[index], pin["files"][index], reader, first, last, skip
            ):
                if held is not None:
                    yield held
                held = Chunk(batch, {"file": index, "row_group": group, "row": row})
        if held is not None:
            # Rows read from a file that was overwritten meanwhile must not count as delivered.
            self._pinned_files(pin)
            yield held

    def unpin(self, pin: Json, timeout_s: float) -> None:
        """Nothing was frozen."""

    def close(self) -> None:
        self._footers.clear()

    # Files

    def _columns(self, layout: Layout) -> list[SourceColumn]:
        files = [file for group in layout.partitions.values() for _, file in group]
        if not files:
            raise Invalid(
                f"{self._root} holds no Parquet files, so its columns are unknown",
                hint="names that begin with _ or . do not count",
            )
        columns = list(self._footer(files[0]).columns)
        for file in files[1:]:
            columns = agreed(columns, self._footer(file).columns, files[0].url, file.url)
        names = {column.name for column in columns}
        return columns + [
            SourceColumn(key.name, f"{key.type} in the path", key.type, nullable=True)
            for key in layout.keys
            if key.name not in names
        ]

    def _partition(self, partition_id: str, layout: Layout) -> PartitionInfo:
        parts = [
            PartInfo(short, self._footer(file).rows, file.size_bytes, Piece(short))
            for short, file in layout.partitions[partition_id]
        ]
        values = zip(layout.keys, layout.values(partition_id), strict=True)
        label = ", ".join(f"{key.name}={'NULL' if value is None else value}" for key, value in values)
        return PartitionInfo(
            partition_id,
            label or partition_id,
            sum(part.rows for part in parts),
            sum(part.size_bytes for part in parts),
            parts,
        )

    def _pinned_files(self, pin: Json) -> list[StoredFile]:
        """The files of a pin, as they are now. Raises: Corrupt, naming the first that is not as pinned."""
        folder = folder_url(self._root, pin["partition"])
        try:
            listed = dict(list_data_files(self._storage, folder))
        except Invalid:
            listed = {}  # the folder itself is gone
        found = []
        for name, size_bytes, etag, _ in pin["files"]:
            file = listed.get(name)
            if file is None:
                raise Corrupt(
                    f"{folder}/{name} is gone since the export was planned",
                    hint="put the file back and `lockstep retry` the job, or export the partition anew",
                )
            if (file.size_bytes, file.etag) != (size_bytes, etag):
                raise Corrupt(
                    f"{folder}/{name} has changed since the export was planned",
                    hint="export the partition anew; nothing of this job was published",
                )
            found.append(file)
        return found

    def _footer(self, file: StoredFile) -> Footer:
        key = (file.url, file.etag)
        if key not in self._footers:
            try:
                opened = open_parquet(self._storage, file.url)
                with opened:
                    self._footers[key] = read_footer(opened)
            except (pa.ArrowException, OSError) as error:
                raise unreadable(error, file.url, Invalid) from error
        return self._footers[key]

    def _groups(
        self, file: StoredFile, pinned: Sequence[Any], reader: _Reader, first: int, last: int, skip: int
    ) -> Iterator[tuple[int, int, pa.RecordBatch]]:
        """Row group, rows of it delivered, and the batch, from row `skip` of the group `first` on."""
        try:
            opened = open_parquet(self._storage, file.url)
            with opened:
                if opened.metadata.num_rows != pinned[3]:
                    raise Corrupt(
                        f"{file.url} has {opened.metadata.num_rows} rows, not {pinned[3]} as planned"
                    )
                for group in range(first, last):
                    for row, batch in reader.batches(opened, group, skip if group == first else 0):
                        yield group, row, batch
        except (pa.ArrowException, OSError) as error:
            raise unreadable(error, file.url, Corrupt) from error

    def _all_rows(self, pin: Pin, columns: Sequence[ColumnMap]) -> Iterator[pa.RecordBatch]:
        for task in self.plan_tasks(pin, 1 << 62):
            for chunk in self.read(pin.detail, task.descriptor, None, columns, 16 << 20):
                yield chunk.batch


class _Reader:
    """Row groups as batches in the target's types, with the columns that stand in the path."""

    def __init__(
        self, columns: Sequence[ColumnMap], path_scalars: dict[str, pa.Scalar], batch_bytes: int
    ) -> None:
        self._columns = columns
        self._path_scalars = path_scalars
        self._batches = RowGroupReader(batch_bytes)

    def batches(self, opened: pq.ParquetFile, group: int, skip: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Conformed batches of a row group after `skip` rows, each with the rows delivered at its end."""
        names = opened.schema_arrow.names
        asked = {column.source for column in self._columns}
        wanted = [name for name in names if name in asked]
        in_path = {name: value for name, value in self._path_scalars.items() if name not in names}
        row = 0
        rows = opened.metadata.row_group(group).num_rows
        for natural in self._batches.read(opened, group, wanted):
            row += natural.num_rows
            if row <= skip:
                continue
            fresh = row - max(skip, row - natural.num_rows)
            natural = natural.slice(natural.num_rows - fresh)
            yield row, conform(_with_path_columns(natural, in_path, fresh), self._columns)
        if row != rows:
            raise pa.ArrowInvalid(f"row group {group} delivered {row} of {rows} rows")


def _task(groups: Sequence[tuple[int, int, int]], size_bytes: int) -> TaskSpec:
    """A task of row groups; those that follow each other in a file are one piece."""
    pieces: list[list[int]] = []
    for index, number, _ in groups:
        if pieces and pieces[-1][0] == index and pieces[-1][2] == number:
            pieces[-1][2] = number + 1
        else:
            pieces.append([index, number, number + 1])
    return TaskSpec({"pieces": pieces}, sum(rows for _, _, rows in groups), size_bytes)


def _with_path_columns(batch: pa.RecordBatch, in_path: dict[str, pa.Scalar], rows: int) -> pa.RecordBatch:
    for name, value in in_path.items():
        batch = batch.append_column(pa.field(name, value.type), pa.repeat(value, rows))
    return batch


def _path_scalars(pin: Json) -> dict[str, pa.Scalar]:
    return {name: PathColumn(name, kind).scalar(value) for name, kind, value in pin["path_columns"]}


def _remaining(
    pieces: Sequence[Sequence[int]], position: Position | None
) -> Iterator[tuple[int, int, int, int]]:
    """File, first and last row group, and rows to skip in the first, of what comes after `position`."""
    reached = position is None
    for index, first, last in pieces:
        if reached or position is None:
            yield index, first, last, 0
        elif index == position["file"] and first <= position["row_group"] < last:
            reached = True
            yield index, position["row_group"], last, position["row"]
    if not reached:
        raise Corrupt(f"the checkpoint {position} lies outside of its task")
