"""Iceberg tables as a source, frozen by snapshot id.

A snapshot never changes, so a pin is its id; the files of a task stand in its descriptor, and executors ask
no catalog. Expiry of the snapshot deletes its files: a job that still reads them fails and names the file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from lockstep.arrow_types import arrow_type, type_text
from lockstep.errors import Corrupt, Invalid, LockstepError, Retryable
from lockstep.job import ColumnMap, Json, Piece, Position, TaskSpec
from lockstep.source import (
    Chunk,
    PartInfo,
    PartitionInfo,
    Pin,
    Place,
    Recalled,
    SourceColumn,
    SourceField,
    SourceTable,
)
from lockstep.source.extent import bounds_of, distinct
from lockstep.source.files_fit import shown_row
from lockstep.source.iceberg_rows import FileReader, Rows
from lockstep.source.iceberg_scan import ScanFile, equality_fields, scan_files
from lockstep.source.pieces import gathered
from lockstep.storage import Storage
from lockstep.target.iceberg import IcebergTarget, parse_address

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

    from lockstep.config import Config

KIND: Final = "iceberg"
PLANNING_BATCH_BYTES: Final = 16 << 20
ALL_BYTES: Final = 1 << 62

_WITH_SNAPSHOT: Final = re.compile(r"(.+)@(\d+)")


class IcebergSource:
    """A `Source` over `iceberg://CATALOG/namespace.table[@SNAPSHOT_ID]`.

    The table is read once: all answers of one instance are of one snapshot.
    """

    def __init__(self, address: str, config: Config) -> None:
        """Raises: Invalid for an address without a table."""
        match = _WITH_SNAPSHOT.fullmatch(address)
        self._address = match[1] if match else address
        self._wanted_snapshot = int(match[2]) if match else None
        parse_address(self._address)
        self._config = config
        self._storage = Storage(config.storage)
        self._live_rows: dict[str, int] = {}

    def describe(self) -> SourceTable:
        table, schema = self._table, self._schema
        spec = table.metadata.spec()
        return SourceTable(
            name=self._name,
            identity=f"iceberg:{table.metadata.table_uuid}",
            columns=[_source_column(one) for one in self._schema_json["fields"]],
            partitioning=list(_partition_fields(spec, schema)),
            partition_key=", ".join(f"{f.transform} of {_column(schema, f.source_id)}" for f in spec.fields),
            sorting=list(_sort_fields(table, schema)),
        )

    def partitions(self) -> list[PartitionInfo]:
        by_partition: dict[str, list[PartInfo]] = {}
        for file in self._files:
            by_partition.setdefault(file.partition, []).append(self._part(file))
        return [
            PartitionInfo(
                name, name, sum(part.rows for part in parts), sum(part.size_bytes for part in parts), parts
            )
            for name, parts in sorted(by_partition.items())
        ]

    def pin(self, name: str, partition_id: str, parts: Sequence[str] | None, *, frozen: bool = True) -> Pin:
        """Note the snapshot. It is frozen already, so `frozen` changes nothing.

        Raises: Invalid for an unknown partition or part.
        """
        files = [file for file in self._files if file.partition == partition_id]
        if not files:
            raise Invalid(
                f'{self._name} has no partition "{partition_id}"',
                hint=f"`lockstep partitions {self._address}` lists them",
            )
        if parts is not None:
            unknown = sorted(set(parts) - {self._part_name(file) for file in files})
            if unknown:
                raise Invalid(f'partition "{partition_id}" of {self._name} has no file "{unknown[0]}"')
            files = [file for file in files if self._part_name(file) in set(parts)]
        return self._pin_of(files)

    def distinct_rows(self, pin: Pin, columns: Sequence[ColumnMap]) -> Iterator[pa.RecordBatch]:
        for batch in self._all_rows(pin, columns):
            yield distinct(batch)

    def bounds(self, pin: Pin, columns: Sequence[ColumnMap]) -> pa.Table:
        return bounds_of(self._all_rows(pin, columns), columns)

    def plan_tasks(self, pin: Pin, task_bytes: int) -> list[TaskSpec]:
        """Tasks are runs of files and row groups: a large file makes several, small files share one."""
        names = {part.name for part in pin.parts}
        files = [file for file in self._files if self._part_name(file) in names]
        pieces = (each for file in files for each in self._pieces(file, task_bytes))
        return [_task(*some) for some in gathered(pieces, task_bytes)]

    def read(
        self,
        pin: Json,
        descriptor: Json,
        position: Position | None,
        columns: Sequence[ColumnMap],
        batch_bytes: int,
    ) -> Iterator[Chunk]:
        """Every chunk has a position: the piece, the row group, and the rows of it that were gone through.

        Records are the rows of the pieces as they stand in the files, deleted ones counted too.
        Raises: Corrupt, naming the file, if one is gone with its snapshot or cannot be decoded.
        """
        pieces: list[Json] = descriptor["pieces"]
        reader = self._reader_of(pin, [ScanFile.from_json(piece["file"]) for piece in pieces])
        before = 0
        for number, piece in enumerate(pieces):
            if position is None or number >= position["piece"]:
                resumed = position if position is not None and number == position["piece"] else None
                for rows in _read_piece(reader, piece, resumed, columns, batch_bytes):
                    yield _chunk(rows, number, before - piece["first_row"])
            before += piece["rows"]

    def unpin(self, pin: Json, timeout_s: float) -> None:
        """Nothing was made that could be given up."""

    def close(self) -> None:
        """Nothing stays open."""

    # Planning

    @property
    def _name(self) -> str:
        return self._address.rpartition("/")[2]

    @cached_property
    def _table(self) -> Table:
        # Not before it is needed: executors know no catalogs.
        target = IcebergTarget(self._address, self._config)
        if not target.exists():
            raise Invalid(f"there is no table {self._address}", hint="check the catalog and the name")
        table: Table = target.load().handle
        return table

    @cached_property
    def _snapshot(self) -> Snapshot | None:
        """The one that the address names, else the current one; None for a table without rows.

        Raises: Invalid if the snapshot is not there (any more).
        """
        metadata = self._table.metadata
        if self._wanted_snapshot is None:
            return metadata.current_snapshot()
        found = metadata.snapshot_by_id(self._wanted_snapshot)
        if found is None:
            known = [str(one.snapshot_id) for one in metadata.snapshots[-5:]]
            raise Invalid(
                f"{self._name} has no snapshot {self._wanted_snapshot}: it was expired, or never there",
                hint=f"the latest are {', '.join(known)}" if known else "the table has no snapshot at all",
            )
        return found

    @cached_property
    def _schema(self) -> Schema:
        """The table's schema of now; that of the snapshot where the address names one, as in time travel."""
        metadata = self._table.metadata
        if self._wanted_snapshot is not None and self._snapshot is not None:
            for schema in metadata.schemas:
                if schema.schema_id == self._snapshot.schema_id:
                    return schema
        return metadata.schema()

    @cached_property
    def _schema_json(self) -> Json:
        raw: Json = self._schema.model_dump(mode="json", by_alias=True)
        return raw

    @cached_property
    def _files(self) -> list[ScanFile]:
        if self._snapshot is None:
            return []
        with self._metadata_read():
            return scan_files(self._table, self._snapshot, self._schema)

    @contextmanager
    def _metadata_read(self) -> Iterator[None]:
        try:
            yield
        except LockstepError:
            raise
        except OSError as error:
            raise Retryable(f"cannot read the metadata of {self._name}: {error}") from error

    @cached_property
    def _planning_reader(self) -> FileReader:
        return self._reader_of(self._detail(self._files), self._files)

    def _part(self, file: ScanFile) -> PartInfo:
        name = self._part_name(file)
        return PartInfo(name, self._rows_of(file), file.size_bytes, Piece(name))

    def _part_name(self, file: ScanFile) -> str:
        """The path below the table's folder, or the whole one for a file that lies elsewhere."""
        return file.path.removeprefix(self._table.metadata.location.rstrip("/") + "/")

    def _rows_of(self, file: ScanFile) -> int:
        if not file.has_deletes:
            return file.rows
        if file.path not in self._live_rows:
            self._live_rows[file.path] = self._planning_reader.live_rows(file)
        return self._live_rows[file.path]

    def _pin_of(self, files: Sequence[ScanFile]) -> Pin:
        found = [self._part(file) for file in files]
        return Pin(self._detail(files), found, sum(part.rows for part in found))

    def _detail(self, files: Sequence[ScanFile]) -> Json:
        """All that reading needs beside the descriptors."""
        metadata = self._table.metadata
        mapping = metadata.name_mapping()
        return {
            "kind": KIND,
            "table": self._name,
            "uuid": str(metadata.table_uuid),
            "snapshot_id": self._snapshot.snapshot_id if self._snapshot else None,
            "schema": self._schema_json,
            "name_mapping": mapping.model_dump(mode="json", by_alias=True) if mapping else None,
            "equality_fields": equality_fields(files, metadata, self._schema),
        }

    def _pieces(self, file: ScanFile, task_bytes: int) -> Iterator[tuple[Json, int]]:
        """A file that fits a task is not opened: the snapshot knows its rows."""
        if file.rows == 0:
            return
        whole: Json = {"file": file.to_json(), "groups": None, "first_row": 0, "rows": file.rows}
        whole["live"] = self._rows_of(file)
        if file.size_bytes <= task_bytes:
            yield whole, file.size_bytes
            return
        groups = self._planning_reader.groups(file)
        decoded = sum(group_bytes for _, group_bytes in groups) or 1
        first_row = first = rows = stored = 0
        for number, (group_rows, group_bytes) in enumerate(groups):
            rows += group_rows
            stored += file.size_bytes * group_bytes // decoded
            following = groups[number + 1][1] if number + 1 < len(groups) else None
            if following is None or stored + file.size_bytes * following // decoded > task_bytes:
                live = whole["live"] * rows // file.rows
                span: Json = {
                    "groups": [first, number + 1],
                    "first_row": first_row,
                    "rows": rows,
                    "live": live,
                }
                yield {**whole, **span}, stored
                first, first_row, rows, stored = number + 1, first_row + rows, 0, 0

    def _all_rows(self, pin: Pin, columns: Sequence[ColumnMap]) -> Iterator[pa.RecordBatch]:
        for task in self.plan_tasks(pin, ALL_BYTES):
            for chunk in self.read(pin.detail, task.descriptor, None, columns, PLANNING_BATCH_BYTES):
                yield chunk.batch

    def _reader_of(self, pin: Json, files: Sequence[ScanFile]) -> FileReader:
        return FileReader(
            self._storage,
            pin["schema"],
            files,
            equality_fields=pin["equality_fields"],
            name_mapping=pin["name_mapping"],
            gone=f": snapshot {pin['snapshot_id']} of {pin['table']} was expired since the job was planned",
        )


class IcebergInput(IcebergSource):
    """A whole snapshot as the `Input` of an import: a sorted or re-partitioned copy of a table.

    `limit`: no more than so many of its rows.
    """

    format = KIND

    def __init__(self, address: str, config: Config, limit: int | None = None) -> None:
        super().__init__(address, config)
        self._limit = limit

    def describe(self) -> SourceTable:
        """Another snapshot is another input."""
        table = super().describe()
        snapshot_id = self._snapshot.snapshot_id if self._snapshot else "empty"
        return SourceTable(
            table.name,
            f"{table.identity}@{snapshot_id}",
            table.columns,
            table.partitioning,
            table.partition_key,
            table.sorting,
        )

    def freeze(self) -> Pin:
        """Parts are told by their whole paths: a file of another table is another input."""
        found = [
            PartInfo(file.path, self._rows_of(file), file.size_bytes, Piece(file.path))
            for file in self._files
        ]
        detail = self._detail(self._files)
        if self._limit is not None:
            detail["limit"] = self._limit
        return Pin(detail, found, sum(part.rows for part in found))

    def without(self, pin: Pin, names: Collection[str]) -> Pin:
        parts = [part for part in pin.parts if part.name not in names]
        return Pin(pin.detail, parts, sum(part.rows for part in parts))

    def _part_name(self, file: ScanFile) -> str:
        return file.path

    def plan_tasks(self, pin: Pin, task_bytes: int) -> list[TaskSpec]:
        """A limit on the rows makes one task of the files that are needed: only so can they be counted."""
        limit: int | None = pin.detail.get("limit")
        if limit is None:
            return super().plan_tasks(pin, task_bytes)
        needed: list[PartInfo] = []
        rows = 0
        for part in pin.parts:
            if rows < limit:
                needed.append(part)
                rows += part.rows
        tasks = super().plan_tasks(Pin(pin.detail, needed, rows), ALL_BYTES)
        return [replace(task, rows=min(task.rows, limit)) for task in tasks]

    def read(
        self,
        pin: Json,
        descriptor: Json,
        position: Position | None,
        columns: Sequence[ColumnMap],
        batch_bytes: int,
    ) -> Iterator[Chunk]:
        """As of any table. With a limit, positions have the rows that were given until there as well."""
        chunks = super().read(pin, descriptor, position, columns, batch_bytes)
        limit: int | None = pin.get("limit")
        if limit is None:
            yield from chunks
            return
        given: int = position["given"] if position is not None else 0
        while given < limit and (chunk := next(chunks, None)) is not None:
            assert chunk.position is not None
            assert chunk.records is not None
            batch = chunk.batch.slice(0, limit - given)
            given += batch.num_rows
            yield Chunk(batch, {**chunk.position, "given": given}, chunk.records.slice(0, batch.num_rows))

    def locate(self, pin: Json, descriptor: Json, record: int) -> Place:
        """The data file, and the row in it."""
        left = record
        for piece in descriptor["pieces"]:
            if left < piece["rows"]:
                return Place(piece["file"]["path"], piece["first_row"] + left + 1)
            left -= piece["rows"]
        raise Corrupt(f"record {record} lies outside of its task")

    def recall(
        self, pin: Json, descriptor: Json, records: Sequence[int], columns: Sequence[ColumnMap]
    ) -> Iterator[Recalled]:
        import numpy as np

        found = 0
        for chunk in self.read(pin, descriptor, None, columns, PLANNING_BATCH_BYTES):
            assert chunk.records is not None
            numbers = chunk.records.to_numpy()
            for at in np.flatnonzero(np.isin(numbers, records)).tolist():
                record = int(numbers[at])
                place = self.locate(pin, descriptor, record)
                yield Recalled(record, place, shown_row(chunk.batch.slice(at, 1)))
                found += 1
            if found == len(records):
                return
        raise Corrupt(f"row {records[found]} of a task is not in its files any more")


def _task(pieces: Sequence[Json], size_bytes: int) -> TaskSpec:
    rows = sum(piece["live"] for piece in pieces)
    kept = [{key: value for key, value in piece.items() if key != "live"} for piece in pieces]
    return TaskSpec({"pieces": kept}, rows, size_bytes)


def _read_piece(
    reader: FileReader,
    piece: Json,
    resumed: Position | None,
    columns: Sequence[ColumnMap],
    batch_bytes: int,
) -> Iterator[Rows]:
    file = ScanFile.from_json(piece["file"])
    first, last = piece["groups"] or (0, None)
    skip = 0
    if resumed is not None:
        if resumed["row_group"] < first or (last is not None and resumed["row_group"] >= last):
            raise Corrupt(f"the checkpoint {resumed} lies outside of its task")
        first, skip = resumed["row_group"], resumed["row"]
    for rows in reader.read(file, columns, batch_bytes, (first, last), skip):
        if rows.batch.num_rows:
            yield rows


def _chunk(rows: Rows, piece: int, shift: int) -> Chunk:
    import pyarrow as pa

    position: Position = {"piece": piece, "row_group": rows.group, "row": rows.read}
    return Chunk(rows.batch, position, pa.array(rows.places + shift))


# What the table says of itself


def _source_column(one: Json) -> SourceColumn:
    kind, nullable = one["type"], not one["required"]
    try:
        arrow_type(kind)
    except Invalid as error:
        return SourceColumn(one["name"], type_text(kind), None, nullable, problem=error.message)
    return SourceColumn(one["name"], type_text(kind), kind, nullable)


def _column(schema: Schema, field_id: int) -> str:
    return schema.find_column_name(field_id) or f"field {field_id}"


def _partition_fields(spec: PartitionSpec, schema: Schema) -> Iterator[SourceField]:
    for part in spec.fields:
        if str(part.transform) != "void":
            yield SourceField(_column(schema, part.source_id), str(part.transform))


def _sort_fields(table: Table, schema: Schema) -> Iterator[SourceField]:
    for one in table.metadata.sort_order().fields:
        direction: Any = one.direction
        yield SourceField(
            _column(schema, one.source_id),
            str(one.transform),
            descending=direction.value == "desc",
            nulls_first=one.null_order.value == "nulls-first",
        )
