"""Unique keys: which rows of an import repeat the key of another one, or of a row in the table.

The companions of the runs are merged by ranges of the unique key. Of each group of equal keys the first row
wins: the earliest in the input, or the latest for `keep-last`, whose companions are sorted backwards. All
others are written down as losers, and the merge leaves them out. NULL equals nothing; NaN is one value, and
so is zero.

Rows in the table always win, because nothing that was published is ever taken back. Which of them matter is
found without sorting the table: the new keys of a range are hashed, the key columns of the files whose
bounds meet the range are read once, and the few rows whose hash is known take part in the merge, before all
others.

What losers mean for the job is decided when the stage has ended (`verdict`): it does not depend on who found
them first.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.fingerprint import row_hashes
from lockstep.job import LOSERS, ColumnMap, Json, Plan, Position, SortKey, StagedFile
from lockstep.keys import RECORD, TASK, key_of
from lockstep.merge import Losers, MergeReader, Window, blocks_of
from lockstep.ordering import order, present, repeats
from lockstep.sink.losers import LOSER_SCHEMA, WINNER_FILE, WINNER_RECORD, WINNER_TASK
from lockstep.sink.run import key_rows, unique_of
from lockstep.source import Chunk
from lockstep.storage import Storage

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

    from lockstep.source.iceberg_rows import FileReader
    from lockstep.source.iceberg_scan import ScanFile

TABLE_BATCH_BYTES: Final = 16 << 20
TABLE_WINS: Final = ("keep-first", "reject")
"""Policies under which a new row with a key that the table has is simply left out."""

Hashes = npt.NDArray[np.uint64]
_IN_INPUT: Final = [(TASK, "ascending"), (RECORD, "ascending")]


# Rows that are published already


@dataclass(frozen=True)
class PublishedFile:
    """A data file of the table, and between which codes of the first unique column its rows lie, if known."""

    file: Json
    lower: bytes | None
    upper: bytes | None

    def meets(self, low: bytes | None, high: bytes | None) -> bool:
        if low is not None and self.upper is not None and self.upper < low:
            return False
        return high is None or self.lower is None or self.lower <= high


@dataclass(frozen=True)
class Published:
    """The rows of one snapshot that new rows must not repeat. `reading` is what reading them needs."""

    snapshot_id: int | None
    reading: Json
    files: Sequence[PublishedFile]


def published(table: Table, plan: Plan, snapshot_id: int | None = None) -> Published:
    """What the table holds now, by its metadata alone. `table` is the `handle` of a loaded target.

    With `snapshot_id` what it held then: nothing, if that snapshot has expired.
    Raises: Invalid for files or deletes that Lockstep cannot read exactly; Corrupt if metadata is gone.
    """
    from lockstep.source.iceberg_scan import equality_fields, scan_files

    metadata, schema = table.metadata, table.metadata.schema()
    snapshot = metadata.snapshot_by_id(snapshot_id) if snapshot_id else metadata.current_snapshot()
    if snapshot is None:
        return Published(None, {}, ())
    files = scan_files(table, snapshot, schema)
    mapping = table.metadata.name_mapping()
    reading: Json = {
        "table": ".".join(table.name()),
        "snapshot_id": snapshot.snapshot_id,
        "schema": schema.model_dump(mode="json", by_alias=True),
        "name_mapping": mapping.model_dump(mode="json", by_alias=True) if mapping else None,
        "equality_fields": equality_fields(files, table.metadata, schema),
    }
    bounds = _bounds_by_path(table, snapshot, schema, plan)
    return Published(
        snapshot.snapshot_id,
        reading,
        [PublishedFile(file.to_json(), *bounds.get(file.path, (None, None))) for file in files],
    )


def _bounds_by_path(
    table: Table, snapshot: Snapshot, schema: Schema, plan: Plan
) -> dict[str, tuple[bytes | None, bytes | None]]:
    from pyiceberg.conversions import from_bytes
    from pyiceberg.types import PrimitiveType

    assert plan.terms is not None
    first = plan.terms.unique[0]
    field = next((one for one in schema.fields if one.name == first), None)
    if field is None or not isinstance(field.field_type, PrimitiveType) or _has_nan(field.field_type):
        return {}
    kind = field.field_type
    if str(kind) == "uuid":
        return {}  # some writers order UUIDs as signed numbers: such bounds leave out what lies between them

    def code(bounds: dict[int, bytes] | None) -> bytes | None:
        raw = (bounds or {}).get(field.field_id)
        try:
            return None if raw is None else code_of(from_bytes(kind, raw), str(kind))
        except (struct.error, ValueError, TypeError, pa.ArrowException):
            return None  # written before the column was promoted to a wider type: not known is always right

    return {
        entry.data_file.file_path: (code(entry.data_file.lower_bounds), code(entry.data_file.upper_bounds))
        for manifest in snapshot.manifests(table.io)
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True)
    }


def _has_nan(kind: Any) -> bool:
    """Bounds of floats say nothing of NaN, nor which zero it is."""
    return str(kind) in ("float", "double")


def code_of(value: Any, kind: str) -> bytes:
    """A bound, as PyIceberg reads it from a manifest, as the code of a row with this value."""
    from lockstep.arrow_types import arrow_type

    arrow = arrow_type(kind)
    storage = arrow.storage_type if isinstance(arrow, pa.BaseExtensionType) else arrow
    value = value.bytes if kind == "uuid" and hasattr(value, "bytes") else value
    if pa.types.is_temporal(storage) and isinstance(value, int):
        array = pa.array([value], pa.int32() if pa.types.is_date32(storage) else pa.int64()).cast(storage)
    else:
        array = pa.array([value], storage)
    return key_of(pa.record_batch({"k": array}), 0, [SortKey("k")])[0]


def _code_or_none(value: Any, kind: str | Json) -> bytes | None:
    """As `code_of`; None, which is always right, where the value tells nothing."""
    if value is None or not isinstance(kind, str) or _has_nan(kind):
        return None
    try:
        return code_of(value, kind)
    except (ValueError, TypeError, pa.ArrowException):
        return None


# Finding losers


class UniqueReader:
    """Reads companions of runs, and yields the rows that lose. It has the shape of a source."""

    def __init__(self, plan: Plan, storage: Storage) -> None:
        self._plan, self._storage = plan, storage
        self._unique = unique_of(plan)
        self._merge = MergeReader(plan, storage)
        self.files_read = 0
        self.groups_read = 0
        """Files and row groups of the table that were read."""

    def read(self, descriptor: Json, position: Position | None, batch_bytes: int) -> Iterator[Chunk]:
        """The losers of a range, as `LOSER_SCHEMA`, a chunk for each window of keys: often without rows.

        Raises: Corrupt if a file is not what was listed; Retryable if the storage does not answer.
        """
        known = self._in_table(descriptor)
        group = _Group.from_json(position["open"]) if position else _Group()
        paths = [file["path"] for file in descriptor["published"]["files"]]
        for window in self._merge.windows(descriptor, position, known):
            losers = [group.losers(batch, self._unique.keys, paths) for batch in window.batches]
            yield Chunk(_joined(losers), _after(window, group))

    def _in_table(self, descriptor: Json) -> pa.RecordBatch | None:
        """The rows of the table that may share a key with new ones, in order; None if there can be none."""
        from lockstep.source.iceberg_rows import FileReader
        from lockstep.source.iceberg_scan import ScanFile

        listed = descriptor["published"]
        if not listed["files"]:
            return None
        hashes, schema = self._new_keys(descriptor)
        if schema is None:
            return None
        reading = listed["reading"]
        files = [ScanFile.from_json(raw) for raw in listed["files"]]
        reader = FileReader(
            self._storage,
            reading["schema"],
            files,
            equality_fields=reading["equality_fields"],
            name_mapping=reading["name_mapping"],
            gone=f": snapshot {reading['snapshot_id']} of {reading['table']} was expired meanwhile",
        )
        found: list[pa.RecordBatch] = []
        for number, file in enumerate(files):
            self.files_read += 1
            for span in self._groups(reader, file, listed):
                for rows in reader.read(file, self._columns(), TABLE_BATCH_BYTES, span):
                    keys = self._numbered(rows.batch, number, rows.places).cast(schema)
                    met = _among(row_hashes(self._key_columns(keys)), hashes)
                    met &= present(keys, self._unique.keys)
                    if met.any():
                        found.append(keys.filter(pa.array(met)))
        if not found:
            return pa.RecordBatch.from_pylist([], schema=schema)
        together = pa.concat_batches(found)
        return together.take(pa.array(order(together, self._unique.keys)))

    def _groups(self, reader: FileReader, file: ScanFile, listed: Json) -> Iterator[tuple[int, int | None]]:
        """The row groups of a file whose statistics do not exclude keys of the range."""
        assert self._plan.terms is not None
        low, high = (None if raw is None else base64.b64decode(raw) for raw in listed["between"])
        first = self._plan.terms.unique[0]
        column = next((one for one in self._columns() if one.target == first), None)
        if column is None:  # it stands inside a struct
            yield 0, None
            return
        for number, extent in enumerate(reader.extents(file, column)):
            lower, upper = (_code_or_none(end, column.type) for end in extent)
            if PublishedFile({}, lower, upper).meets(low, high):
                self.groups_read += 1
                yield number, number + 1

    def _new_keys(self, descriptor: Json) -> tuple[Hashes, pa.Schema | None]:
        """The hashes of all new keys of the range, sorted, and the schema that they have."""
        found: list[Hashes] = []
        schema: pa.Schema | None = None
        for window in self._merge.windows(descriptor, None):
            for batch in window.batches:
                found.append(np.unique(row_hashes(self._key_columns(batch))))
                schema = schema or batch.schema
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.uint64), schema

    def _key_columns(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        return keys.select([key.column for key in self._unique.keys])

    def _columns(self) -> list[ColumnMap]:
        """The table's columns that hold the unique key."""
        assert self._plan.terms is not None
        wanted = []
        for raw in self._plan.schema["fields"]:
            name = raw["name"]
            if any(unique == name or unique.startswith(f"{name}.") for unique in self._plan.terms.unique):
                wanted.append(ColumnMap(name, raw["id"], raw["type"], False, name, None))
        return wanted

    def _numbered(self, rows: pa.RecordBatch, file: int, places: npt.NDArray[np.int64]) -> pa.RecordBatch:
        """As the companions have them; the task of a published row is that of its file, below zero."""
        columns = [c.storage if isinstance(c, pa.ExtensionArray) else c for c in rows.columns]
        plain = pa.record_batch(columns, names=rows.schema.names)
        task = pa.repeat(pa.scalar(-1 - file, pa.int32()), rows.num_rows)
        numbered = plain.append_column(TASK, task).append_column(RECORD, pa.array(places, pa.int64()))
        return key_rows(numbered, self._unique)


def _among(wanted: Hashes, known: Hashes) -> npt.NDArray[np.bool_]:
    """Which ones are among `known`, which is sorted."""
    if not len(known):
        return np.zeros(len(wanted), np.bool_)
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.asarray(known[at] == wanted)


@dataclass
class _Group:
    """The group of equal keys that is open at the end of what was read: its key, and the row that wins.

    Of the key a digest is kept: it stands in every checkpoint, and keys can be long.
    """

    digest: str | None = None
    task: int = 0
    record: int = 0

    def to_json(self) -> Json:
        return vars(self).copy()

    @classmethod
    def from_json(cls, raw: Json) -> _Group:
        return cls(**raw)

    def losers(self, rows: pa.RecordBatch, keys: Sequence[SortKey], paths: Sequence[str]) -> pa.RecordBatch:
        """The rows of this batch that lose, and whom they lose to."""
        if rows.num_rows == 0:
            return _loser_batch([], [], [], [], paths)
        same = repeats(rows, keys)
        goes_on = self.digest is not None and _digest(rows, 0, keys) == self.digest
        starts = np.where(same, 0, np.arange(rows.num_rows))
        starts = np.maximum.accumulate(starts)
        task = rows.column(TASK).to_numpy().astype(np.int64)
        record = rows.column(RECORD).to_numpy()
        winner_task, winner_record = task[starts], record[starts]
        lost = same.copy()
        if goes_on:
            lost[0] = True
            first = starts == 0
            winner_task[first], winner_record[first] = self.task, self.record
        self.digest = _digest(rows, rows.num_rows - 1, keys)
        self.task, self.record = int(winner_task[-1]), int(winner_record[-1])
        lost &= task >= 0
        return _loser_batch(task[lost], record[lost], winner_task[lost], winner_record[lost], paths)


def _digest(rows: pa.RecordBatch, at: int, keys: Sequence[SortKey]) -> str | None:
    """A short name of a row's key; None where a NULL makes it equal to nothing."""
    one = rows.slice(at, 1)
    if not present(one, keys)[0]:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for code in key_of(one, 0, keys):
        digest.update(len(code).to_bytes(8, "big"))
        digest.update(code)
    return digest.hexdigest()


def _loser_batch(
    task: Any, record: Any, won_by: Any, won_record: Any, paths: Sequence[str]
) -> pa.RecordBatch:
    won = np.asarray(won_by, np.int64)
    in_table = won < 0
    files = pa.array(paths, pa.string()).take(pa.array(np.where(in_table, -1 - won, 0), mask=~in_table))
    return pa.record_batch(
        [
            pa.array(np.asarray(task, np.int32)),
            pa.array(np.asarray(record, np.int64)),
            pa.array(won.astype(np.int32), mask=in_table),
            pa.array(np.asarray(won_record, np.int64)),
            files,
        ],
        schema=LOSER_SCHEMA,
    )


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _after(window: Window, group: _Group) -> Position:
    return {**window.position, "open": group.to_json()}


def repeated_in_table(
    plan: Plan, descriptor: Json, files: Sequence[StagedFile], storage: Storage
) -> Duplicate | None:
    """The first row of a range that would be published and has the key of a row of the listed table files.

    Raises: Corrupt if a file is not what was listed; Retryable if the storage does not answer.
    """
    if not descriptor["published"]["files"]:
        return None
    losers = Losers.load([file.path for file in files if file.kind == LOSERS and file.rows], storage)
    for chunk in UniqueReader(plan, storage).read(descriptor, None, TABLE_BATCH_BYTES):
        rows = chunk.batch
        if losers is not None and (lost := losers.among(rows)) is not None:
            rows = rows.filter(pa.array(~lost))
        for row in rows.filter(rows.column(WINNER_TASK).is_null()).slice(0, 1).to_pylist():
            return Duplicate(row[TASK], row[RECORD], None, row[WINNER_RECORD], row[WINNER_FILE])
    return None


# What it means


@dataclass(frozen=True)
class Duplicate:
    """A row that repeats a key, and the row that has it: a record of this import, or one of a file of the
    table. Rows of a file count from 0."""

    task: int
    record: int
    winner_task: int | None
    winner_record: int
    winner_file: str | None


def first_duplicates(files: Sequence[StagedFile], most: int, storage: Storage) -> list[Duplicate]:
    """The losers that come first in the input, in its order, from the files of all tasks.

    Never many more than `most` are in memory. Raises: Corrupt; Retryable.
    """
    kept = LOSER_SCHEMA.empty_table()
    for file in files:
        for batch in blocks_of(file.path, storage):
            kept = pa.concat_tables([kept, pa.Table.from_batches([batch])])
            if len(kept) > 2 * most:
                kept = _first(kept, most)
    rows = _first(kept, most).to_pylist()
    return [
        Duplicate(row[TASK], row[RECORD], row[WINNER_TASK], row[WINNER_RECORD], row[WINNER_FILE])
        for row in rows
    ]


def _first(losers: pa.Table, most: int) -> pa.Table:
    return losers.take(pc.select_k_unstable(losers, min(most, len(losers)), sort_keys=_IN_INPUT))


@dataclass(frozen=True)
class Judgement:
    """What the losers of all tasks mean. `first` is the one that comes first in the input."""

    losers: int
    against_table: int
    refused: bool
    first: Duplicate | None


def ways_out(against_table: int) -> str:
    """Which policies let an import with duplicates go on: what the table has is never taken back."""
    ways = "keep-first or reject" if against_table else "keep-first, keep-last or reject"
    return f"--on-duplicate {ways} says what to do with rows that repeat a key"


def judge(files: Sequence[StagedFile], plan: Plan) -> Judgement:
    """Decide, from the manifests of the unique stage, whether the job may go on.

    Under `error` no row may lose; under `keep-last` none may lose to the table, whose rows are never taken
    back. Under `reject` losers count as rejects, with their limit: that is for the caller to compare.
    """
    assert plan.terms is not None
    found = [file for file in files if file.kind == LOSERS and file.rows]
    losers = sum(file.rows for file in found)
    against = sum(int(file.stats["against_table"]) for file in found)
    policy = plan.terms.on_duplicate
    refused = bool(losers) if policy == "error" else bool(against) and policy not in TABLE_WINS
    if not found:
        return Judgement(0, 0, False, None)
    least = min((file.stats["least"] for file in found), key=lambda one: (one[TASK], one[RECORD]))
    first = Duplicate(
        least[TASK], least[RECORD], least["winner_task"], least["winner_record"], least["winner_file"]
    )
    return Judgement(losers, against, refused, first)
