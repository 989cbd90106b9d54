"""The rows of Iceberg data files: columns by field id, deletes applied, in bounded memory.

A file keeps the schema that it was written with. Columns are found by id, so one that was renamed, moved or
promoted since is itself; one that the file does not have is the partition's value, else the column's
initial default, else NULL.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import TypeAdapter
from pyiceberg.conversions import from_bytes, from_json
from pyiceberg.types import IcebergType as PyIcebergType

from lockstep.arrow_types import FIELD_ID, IcebergType, arrow_type, is_list, list_offsets
from lockstep.errors import Corrupt
from lockstep.job import ColumnMap, Json
from lockstep.schema import arrow_schema, conform
from lockstep.source.iceberg_scan import EqualityDeletes, ScanFile
from lockstep.source.parquet_batches import RowGroupReader, open_parquet
from lockstep.storage import Storage
from lockstep.storage.errors import translated

DELETES_BATCH_BYTES: Final = 8 << 20

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Some live rows of a file. `places` are their numbers in it; `group` and `read` tell how far this is:
    rows of the row group that were gone through, deleted ones too."""

    batch: pa.RecordBatch
    places: Positions
    group: int
    read: int


class FileReader:
    """Reads data files of one snapshot. Deletes that several files share are read once.

    `files` are those that will be read: only their deletes are kept, 8 bytes for each deleted position.
    Equality deletes are held whole while they are needed.
    """

    def __init__(
        self,
        storage: Storage,
        schema: Json,
        files: Sequence[ScanFile],
        *,
        equality_fields: Json | None = None,
        name_mapping: Sequence[Json] | None = None,
        gone: str = "",
    ) -> None:
        self._storage = storage
        self._schema = schema
        self._mapping = name_mapping
        self._equality_fields = equality_fields or {}
        self._paths = {file.path for file in files}
        self._positions: dict[str, dict[str, Positions]] = {}
        self._keys: dict[EqualityDeletes, pa.Table] = {}
        self._gone = gone
        """What it means that a file is not there, for the message."""

    def groups(self, file: ScanFile) -> list[tuple[int, int]]:
        """Rows and decoded bytes of each row group."""
        with self._opened(file) as opened:
            found = [opened.metadata.row_group(i) for i in range(opened.metadata.num_row_groups)]
            return [(group.num_rows, group.total_byte_size) for group in found]

    def extents(self, file: ScanFile, column: ColumnMap) -> list[tuple[Any, Any]]:
        """The least and the greatest value of a column in each row group, by statistics; None: not known."""
        with self._opened(file) as opened, _told(file.path):
            lens = _Lens(self.fields([column]), opened.schema_arrow, self._mapping, file.constants, file.path)
            name = lens.names[0] if lens.names else ""
            groups = [opened.metadata.row_group(i) for i in range(opened.num_row_groups)]
            return [_extent(group, name) for group in groups]

    def live_rows(self, file: ScanFile) -> int:
        """How many rows of a file are not deleted."""
        if file.equality_deletes:
            return sum(rows.batch.num_rows for rows in self.read(file, (), DELETES_BATCH_BYTES))
        positions = self._deleted_positions(file)
        return file.rows - int(np.searchsorted(positions, file.rows))

    def read(
        self,
        file: ScanFile,
        columns: Sequence[ColumnMap],
        batch_bytes: int,
        groups: tuple[int, int | None] = (0, None),
        skip: int = 0,
    ) -> Iterator[Rows]:
        """The live rows of row groups, from the first to before the last, in the target's types.

        `skip` rows of the first one are passed over.
        Raises: Corrupt, naming the file, if it is not what the snapshot says; Retryable.
        """
        deleted = self._deleted_positions(file)
        keys = [self._deleted_keys(one) for one in file.equality_deletes]
        with self._opened(file) as opened, _told(file.path):
            lenses = _Lenses(self, opened.schema_arrow, file, columns)
            reader = RowGroupReader(batch_bytes)
            starts = _group_starts(opened)
            for group in range(opened.num_row_groups)[slice(*groups)]:
                read = 0
                for natural in reader.read(opened, group, lenses.wanted):
                    first, read = read, read + natural.num_rows
                    if read <= skip:
                        continue
                    natural = natural.slice(max(0, skip - first))
                    start = starts[group] + max(skip, first)
                    live = _live(natural.num_rows, start, deleted)
                    for equality, key in zip(file.equality_deletes, keys, strict=True):
                        live &= ~_matches(lenses.keys(natural, equality.field_ids), key)
                    yield lenses.rows(natural, live, start, group, read)
                skip = 0
                if read != (expected := opened.metadata.row_group(group).num_rows):
                    raise Corrupt(f"row group {group} of {file.path} delivered {read} of {expected} rows")

    def fields(self, columns: Sequence[ColumnMap]) -> list[Json]:
        """The fields of the table's schema that fill these columns."""
        by_name = {one["name"]: one for one in self._schema["fields"]}
        wanted = dict.fromkeys(column.source for column in columns if column.source is not None)
        missing = [name for name in wanted if name not in by_name]
        if missing:
            raise Corrupt(f'the snapshot has no column "{missing[0]}", which the plan reads')
        return [by_name[name] for name in wanted if name is not None]

    def equality_field(self, field_id: int) -> Json:
        found: Json = self._equality_fields[str(field_id)]
        return found

    @property
    def mapping(self) -> Sequence[Json] | None:
        return self._mapping

    # Files

    def _opened(self, file: ScanFile) -> pq.ParquetFile:
        size_bytes = self._storage.size(file.path)
        if size_bytes is None:
            raise Corrupt(f"{file.path} is gone{self._gone}", hint="read a snapshot that is still there")
        if size_bytes != file.size_bytes:
            raise Corrupt(f"{file.path} has {size_bytes} bytes; the snapshot says {file.size_bytes}")
        with _told(file.path):
            opened = open_parquet(self._storage, file.path)
        if opened.metadata.num_rows != file.rows:
            opened.close()
            raise Corrupt(f"{file.path} has {opened.metadata.num_rows} rows; the snapshot says {file.rows}")
        return opened

    # Deletes

    def _deleted_positions(self, file: ScanFile) -> Positions:
        """Sorted, once each."""
        found = [self._positions_in(path).get(file.path) for path in file.position_deletes]
        arrays = [one for one in found if one is not None]
        return np.unique(np.concatenate(arrays)) if arrays else np.empty(0, np.int64)

    def _positions_in(self, path: str) -> dict[str, Positions]:
        if path not in self._positions:
            pieces: dict[str, list[Positions]] = {}
            for batch in self._delete_batches(path, ("file_path", "pos")):
                paths = batch.column("file_path").dictionary_encode()
                places = batch.column("pos").to_numpy(zero_copy_only=False).astype(np.int64)
                codes = paths.indices.to_numpy(zero_copy_only=False)
                for code, name in enumerate(paths.dictionary.to_pylist()):
                    if name in self._paths:
                        pieces.setdefault(name, []).append(places[codes == code])
            self._positions[path] = {name: np.concatenate(found) for name, found in pieces.items()}
        return self._positions[path]

    def _deleted_keys(self, deletes: EqualityDeletes) -> pa.Table:
        if deletes not in self._keys:
            fields = [self.equality_field(field_id) for field_id in deletes.field_ids]
            columns = _key_columns(fields)
            batches = []
            for batch in self._delete_batches(deletes.path, None):
                lens = _Lens(fields, batch.schema, None, {}, deletes.path)
                batches.append(conform(lens.project(batch), columns))
            self._keys[deletes] = pa.Table.from_batches(batches, arrow_schema(columns)).combine_chunks()
        return self._keys[deletes]

    def _delete_batches(self, path: str, wanted: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        if self._storage.size(path) is None:
            raise Corrupt(f"the delete file {path} is gone{self._gone}")
        with _told(path), open_parquet(self._storage, path) as opened:
            reader = RowGroupReader(DELETES_BATCH_BYTES)
            names = wanted or opened.schema_arrow.names
            for group in range(opened.num_row_groups):
                yield from reader.read(opened, group, names)


class _Lenses:
    """How one file's batches become the wanted columns, and the keys that equality deletes compare."""

    def __init__(
        self, reader: FileReader, schema: pa.Schema, file: ScanFile, columns: Sequence[ColumnMap]
    ) -> None:
        def lens(fields: Sequence[Json]) -> _Lens:
            return _Lens(fields, schema, reader.mapping, file.constants, file.path)

        self._columns = columns
        self._rows = lens(reader.fields(columns))
        self._keys: dict[tuple[int, ...], tuple[_Lens, list[ColumnMap]]] = {}
        for deletes in file.equality_deletes:
            fields = [reader.equality_field(field_id) for field_id in deletes.field_ids]
            self._keys[tuple(deletes.field_ids)] = (lens(fields), _key_columns(fields))
        used = [self._rows, *(found for found, _ in self._keys.values())]
        self.wanted = list(dict.fromkeys(name for one in used for name in one.names))

    def keys(self, natural: pa.RecordBatch, field_ids: Sequence[int]) -> pa.RecordBatch:
        lens, columns = self._keys[tuple(field_ids)]
        return conform(lens.project(natural), columns)

    def rows(
        self, natural: pa.RecordBatch, live: npt.NDArray[np.bool_], start: int, group: int, read: int
    ) -> Rows:
        places = np.arange(start, start + natural.num_rows, dtype=np.int64)
        if not live.all():
            places = places[live]
            natural = natural.filter(pa.array(live))
        projected = self._rows.project(natural)
        return Rows(_conformed(projected, self._columns, natural.num_rows), places, group, read)


def _conformed(batch: pa.RecordBatch, columns: Sequence[ColumnMap], rows: int) -> pa.RecordBatch:
    if batch.num_columns == 0:  # a batch without columns forgets its length
        batch = pa.record_batch({"": pa.nulls(rows)})
    if not columns:
        return batch
    return conform(batch, columns)


class _Lens:
    """Finds fields by id in a file, at every level, and fills in those that it does not have."""

    def __init__(
        self,
        fields: Sequence[Json],
        schema: pa.Schema,
        mapping: Sequence[Json] | None,
        constants: Mapping[str, str | None],
        path: str,
    ) -> None:
        self._fields = fields
        self._constants = constants
        with_ids = _has_ids(schema)
        if not with_ids and mapping is None:
            raise Corrupt(
                f"{path} has no field ids, and the table has no name mapping, so its columns are not known",
                hint="set the table property schema.name-mapping.default",
            )
        self._mapping = None if with_ids else mapping
        ids = self._ids(schema, self._mapping)
        self._found = {one["id"]: ids[one["id"]] for one in fields if one["id"] in ids}
        self.names = [schema.field(index).name for index in self._found.values()]
        self._schema = schema

    def project(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of the file as columns of the table, by the table's names."""
        arrays = [self._column(batch, one) for one in self._fields]
        return pa.RecordBatch.from_arrays(arrays, names=[one["name"] for one in self._fields])

    def _column(self, batch: pa.RecordBatch, one: Json) -> pa.Array:
        index = self._found.get(one["id"])
        if index is None:
            return self._absent(one, batch.num_rows)
        name = self._schema.field(index).name
        mapped = _mapped(self._mapping, name)
        return self._shaped(batch.column(name), one["type"], mapped)

    def _shaped(self, array: pa.Array, kind: IcebergType, mapping: Sequence[Json] | None) -> pa.Array:
        """An array of the file in the table's shape; primitives are cast later."""
        if isinstance(kind, str):
            return array
        if kind["type"] == "struct" and pa.types.is_struct(array.type):
            return self._struct(array, kind["fields"], mapping)
        if kind["type"] == "list" and is_list(array.type):
            return self._list(array, kind, _mapped(mapping, "element"))
        if kind["type"] == "map" and pa.types.is_map(array.type):
            return self._map(array, kind, mapping)
        return array

    def _struct(self, array: pa.Array, fields: Sequence[Json], mapping: Sequence[Json] | None) -> pa.Array:
        ids = self._ids(array.type, mapping)
        members = array.flatten()
        children = []
        for one in fields:
            index = ids.get(one["id"])
            if index is None:
                children.append(self._absent(one, len(array)))
                continue
            inner = _mapped(mapping, array.type.field(index).name)
            children.append(self._shaped(members[index], one["type"], inner))
        mask = array.is_null() if array.null_count else None
        named = [pa.field(one["name"], c.type) for one, c in zip(fields, children, strict=True)]
        return pa.StructArray.from_arrays(children, fields=named, mask=mask)

    def _list(self, array: pa.Array, kind: Json, mapping: Sequence[Json] | None) -> pa.Array:
        if isinstance(kind["element"], str):
            return array
        elements = self._shaped(array.flatten(), kind["element"], mapping)
        mask = array.is_null() if array.null_count else None
        return pa.ListArray.from_arrays(list_offsets(pc.list_value_length(array)), elements, mask=mask)

    def _map(self, array: pa.Array, kind: Json, mapping: Sequence[Json] | None) -> pa.Array:
        if isinstance(kind["key"], str) and isinstance(kind["value"], str):
            return array
        have = array.type
        entries = array.cast(pa.list_(pa.struct([have.key_field, have.item_field])))
        keys, values = entries.flatten().flatten()
        keys = self._shaped(keys, kind["key"], _mapped(mapping, "key"))
        values = self._shaped(values, kind["value"], _mapped(mapping, "value"))
        mask = array.is_null() if array.null_count else None
        return pa.MapArray.from_arrays(list_offsets(pc.list_value_length(entries)), keys, values, mask=mask)

    def _absent(self, one: Json, rows: int) -> pa.Array:
        kind, key = one["type"], str(one["id"])
        if key in self._constants:
            raw = self._constants[key]
            return _repeated(None if raw is None else from_bytes(_typed(kind), b64decode(raw)), kind, rows)
        if one.get("initial-default") is not None:
            return _repeated(from_json(_typed(kind), one["initial-default"]), kind, rows)
        return pa.nulls(rows, arrow_type(kind))

    @staticmethod
    def _ids(kind: pa.Schema | pa.StructType, mapping: Sequence[Json] | None) -> dict[int, int]:
        """Where each field id stands."""
        if mapping is None:
            found = [(_id_of(one), index) for index, one in enumerate(kind)]
        else:
            by_name = {name: one.get("field-id") for one in mapping for name in one["names"]}
            found = [(by_name.get(one.name), index) for index, one in enumerate(kind)]
        return {field_id: index for field_id, index in found if field_id is not None}


def _id_of(one: pa.Field) -> int | None:
    raw = (one.metadata or {}).get(FIELD_ID)
    return None if raw is None else int(raw)


def _has_ids(schema: pa.Schema) -> bool:
    return any(_id_of(one) is not None for one in schema)


def _mapped(mapping: Sequence[Json] | None, name: str) -> Sequence[Json] | None:
    """What a name mapping says of the inside of a field."""
    if mapping is None:
        return None
    for one in mapping:
        if name in one["names"]:
            inside: Sequence[Json] = one.get("fields") or ()
            return inside
    return ()


def _typed(kind: IcebergType) -> Any:
    return TypeAdapter(PyIcebergType).validate_python(kind)


def _repeated(value: Any, kind: IcebergType, rows: int) -> pa.Array:
    wanted = arrow_type(kind)
    storage = wanted.storage_type if isinstance(wanted, pa.BaseExtensionType) else wanted
    if value is not None and storage is not wanted:
        value = getattr(value, "bytes", value)
    array = pa.repeat(pa.scalar(value, storage), rows)
    return pa.ExtensionArray.from_storage(wanted, array) if storage is not wanted else array


def _key_columns(fields: Sequence[Json]) -> list[ColumnMap]:
    return [
        ColumnMap(f"k{number}", one["id"], one["type"], False, one["name"], None)
        for number, one in enumerate(fields)
    ]


def _extent(group: Any, name: str) -> tuple[Any, Any]:
    for at in range(group.num_columns):
        chunk = group.column(at)
        if chunk.path_in_schema == name and chunk.is_stats_set and chunk.statistics.has_min_max:
            return chunk.statistics.min, chunk.statistics.max
    return None, None


def _group_starts(opened: pq.ParquetFile) -> list[int]:
    rows = [opened.metadata.row_group(i).num_rows for i in range(opened.num_row_groups)]
    return [0, *np.cumsum(rows).tolist()]


def _live(rows: int, start: int, deleted: Positions) -> npt.NDArray[np.bool_]:
    live = np.ones(rows, np.bool_)
    first, last = np.searchsorted(deleted, (start, start + rows))
    live[deleted[first:last] - start] = False
    return live


def _matches(keys: pa.RecordBatch, deleted: pa.Table) -> npt.NDArray[np.bool_]:
    """Which rows have a key that is deleted; NULL is equal to NULL here."""
    if deleted.num_rows == 0:
        return np.zeros(keys.num_rows, np.bool_)
    codes = np.zeros(deleted.num_rows + keys.num_rows, np.int64)
    for column, values in zip(deleted.columns, keys.columns, strict=True):
        both = pa.chunked_array([*column.chunks, values]).combine_chunks()
        storage = both.storage if isinstance(both.type, pa.BaseExtensionType) else both
        encoded = storage.dictionary_encode(null_encoding="encode")
        found = encoded.indices.to_numpy(zero_copy_only=False)
        _, codes = np.unique(codes * len(encoded.dictionary) + found, return_inverse=True)
    return np.isin(codes[deleted.num_rows :], codes[: deleted.num_rows])


@contextmanager
def _told(path: str) -> Iterator[None]:
    """Say which file could not be read, and whether trying again may help."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise translated(error, "read", path) from error
        reason = (str(error).splitlines() or ["unknown"])[0]
        raise Corrupt(f"cannot read {path} as Parquet: {reason}") from error
