"""The shape of a data file: Arrow columns with Iceberg's field ids, names and types.

Rows keep the layout that they came in; only labels change, and those without touching a byte of data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import pyarrow as pa

from lockstep.errors import Corrupt
from lockstep.job import Json
from lockstep.sink.stats import leaves_of


class FileShape:
    """The columns of a file: the layout that rows come in, with Iceberg's ids and names as labels.

    Labels change without touching a byte: `labelled` hands the same buffers over under another schema.
    """

    def __init__(self, rows: pa.Schema, schema: pa.Schema, fields: Sequence[Json]) -> None:
        self._rows = rows
        self.schema = schema
        self._required = [field["name"] for field in fields if field["required"]]
        self.leaves = leaves_of(fields)
        self.paths = [path for field in schema for path in _paths(field.name, field.type)]
        pairs = zip(self.paths, self.leaves, strict=True)
        self.with_statistics = [path for path, leaf in pairs if leaf.in_footer]
        """The Parquet paths of leaves whose statistics every reader understands."""

    @classmethod
    def of(cls, schema: Json, rows: pa.Schema) -> FileShape:
        """The shape for rows of this Arrow schema in a table of this Iceberg schema.

        Raises: Corrupt if columns or types are not the table's.
        """
        known = {field["name"]: field for field in schema["fields"]}
        if sorted(rows.names) != sorted(known):
            odd = sorted(set(rows.names) ^ set(known)) or ["one that is there twice"]
            raise Corrupt(f"the rows do not have the table's columns: they differ in {', '.join(odd)}")
        fields = [known[name] for name in rows.names]
        plain = pa.schema([pa.field(f.name, _plain_type(f.type)) for f in rows])
        labelled = [_label(field, plain.field(at).type) for at, field in enumerate(fields)]
        return cls(plain, pa.schema(labelled), fields)

    def plain(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows in the one layout of this sink. Raises: Corrupt for a NULL in a required column."""
        same = batch.schema.names == self._rows.names and batch.schema.types == self._rows.types
        rows = batch if same else self._converted(batch)
        for name in self._required:
            if rows.column(name).null_count:
                raise Corrupt(f'column "{name}" is required, but a row has NULL there')
        return rows

    def _converted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        stored = pa.schema([pa.field(f.name, _storage_type(f.type)) for f in batch.schema])
        rows = pa.record_batch(_Relabelled(batch, stored))
        try:
            columns = [_cast(rows.column(field.name), field.type) for field in self._rows]
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, KeyError) as error:
            raise Corrupt(f"rows changed their types in the middle of a task: {error}") from error
        return pa.record_batch(columns, schema=self._rows)

    def labelled(self, batches: Sequence[pa.RecordBatch]) -> pa.Table:
        """Batches of this layout as one table with the file's schema."""
        table = pa.Table.from_batches([pa.record_batch(_Relabelled(b, self.schema)) for b in batches])
        # A second dictionary in a row group would make the Parquet writer give dictionaries up.
        return table.unify_dictionaries()


class _Relabelled:
    """The same buffers under another schema of the same layout, through Arrow's C data interface."""

    def __init__(self, batch: pa.RecordBatch, schema: pa.Schema) -> None:
        self._batch, self._schema = batch, schema

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        return self._schema.__arrow_c_schema__(), self._batch.__arrow_c_array__()[1]


def _cast(array: pa.Array, arrow: pa.DataType) -> pa.Array:
    if array.type == arrow:
        return array
    if pa.types.is_dictionary(arrow) and not pa.types.is_dictionary(array.type):
        return array.dictionary_encode().cast(arrow)
    return array.cast(arrow)


def _storage_type(arrow: pa.DataType) -> pa.DataType:
    """The same layout without extension types, at any depth."""
    if isinstance(arrow, pa.BaseExtensionType):
        return _storage_type(arrow.storage_type)
    return _rebuilt(arrow, _storage_type)


def _plain_type(arrow: pa.DataType) -> pa.DataType:
    """The layout that is written: as it came, but views and dictionaries are unpacked, except a column that
    is a dictionary of texts as a whole: that one goes into the file without being decoded."""
    if pa.types.is_dictionary(arrow) and _is_bytes(arrow.value_type):
        return arrow
    return _unpacked_type(_storage_type(arrow))


def _is_bytes(arrow: pa.DataType) -> bool:
    return arrow in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _unpacked_type(arrow: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(arrow):
        return _unpacked_type(arrow.value_type)
    if pa.types.is_string_view(arrow):
        return pa.large_string()
    if pa.types.is_binary_view(arrow):
        return pa.large_binary()
    return _rebuilt(arrow, _unpacked_type)


def _rebuilt(arrow: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """A nested type with its members changed, and no other labels than their names."""
    if pa.types.is_struct(arrow):
        return pa.struct([pa.field(f.name, change(f.type)) for f in arrow])
    if pa.types.is_large_list(arrow):
        return pa.large_list(change(arrow.value_type))
    if pa.types.is_list(arrow):
        return pa.list_(change(arrow.value_type))
    if pa.types.is_map(arrow):
        return pa.map_(change(arrow.key_type), change(arrow.item_type))
    return arrow


def _label(field: Json, arrow: pa.DataType) -> pa.Field:
    return _labelled_field(field["name"], field["type"], arrow, field["id"], field["required"], field["name"])


def _labelled_field(
    name: str, type_: str | Json, arrow: pa.DataType, field_id: int, required: bool, column: str
) -> pa.Field:
    metadata = {b"PARQUET:field_id": str(field_id).encode()}
    return pa.field(compatible_name(name), _labelled_type(type_, arrow, column), not required, metadata)


def _labelled_type(type_: str | Json, arrow: pa.DataType, column: str) -> pa.DataType:
    if isinstance(type_, str):
        values = arrow.value_type if pa.types.is_dictionary(arrow) else arrow
        if not _holds(type_, values):
            raise Corrupt(f'column "{column}" is {type_} in the table, but the rows have {arrow}')
        return pa.uuid() if type_ == "uuid" else arrow
    if type_["type"] == "struct" and pa.types.is_struct(arrow):
        names = [field["name"] for field in type_["fields"]]
        if names != [field.name for field in arrow]:
            raise Corrupt(
                f'the fields of column "{column}" are {names} in the table, but the rows have {arrow}'
            )
        pairs = zip(type_["fields"], arrow, strict=True)
        return pa.struct(
            [
                _labelled_field(f["name"], f["type"], a.type, f["id"], f["required"], f"{column}.{f['name']}")
                for f, a in pairs
            ]
        )
    if type_["type"] == "list" and (pa.types.is_list(arrow) or pa.types.is_large_list(arrow)):
        element = _labelled_field(
            "element",
            type_["element"],
            arrow.value_type,
            type_["element-id"],
            type_["element-required"],
            column,
        )
        return pa.large_list(element) if pa.types.is_large_list(arrow) else pa.list_(element)
    if type_["type"] == "map" and pa.types.is_map(arrow):
        return pa.map_(
            _labelled_field("key", type_["key"], arrow.key_type, type_["key-id"], True, column),
            _labelled_field(
                "value", type_["value"], arrow.item_type, type_["value-id"], type_["value-required"], column
            ),
        )
    raise Corrupt(f'column "{column}" is a {type_["type"]} in the table, but the rows have {arrow}')


_EXACT: Final[Mapping[str, Sequence[pa.DataType]]] = {
    "boolean": [pa.bool_()],
    "int": [pa.int32()],
    "long": [pa.int64()],
    "float": [pa.float32()],
    "double": [pa.float64()],
    "date": [pa.date32()],
    "time": [pa.time64("us")],
    "timestamp": [pa.timestamp("us")],
    "timestamp_ns": [pa.timestamp("ns")],
    "string": [pa.string(), pa.large_string()],
    "binary": [pa.binary(), pa.large_binary()],
    "uuid": [pa.binary(16)],
    "unknown": [pa.null()],
}


def _holds(type_text: str, arrow: pa.DataType) -> bool:
    """True if Parquet stores this Arrow type exactly as Iceberg wants the column."""
    if type_text in _EXACT:
        return arrow in _EXACT[type_text]
    if type_text in ("timestamptz", "timestamptz_ns"):
        unit = "ns" if type_text.endswith("_ns") else "us"
        return bool(pa.types.is_timestamp(arrow) and arrow.unit == unit and arrow.tz is not None)
    numbers = [int(digits) for digits in re.findall(r"\d+", type_text)]
    if type_text.startswith("decimal"):
        return bool(arrow == pa.decimal128(*numbers))
    return bool(type_text.startswith("fixed") and arrow == pa.binary(*numbers))


def compatible_name(name: str) -> str:
    """A column name as Iceberg writes it into files (readers go by field id): letters, digits and
    underscores; any other character as its code."""
    from pyiceberg.schema import make_compatible_name

    return str(make_compatible_name(name))


def _paths(name: str, arrow: pa.DataType) -> list[str]:
    """The Parquet paths of the leaves below a column."""
    if pa.types.is_struct(arrow):
        return [path for field in arrow for path in _paths(f"{name}.{field.name}", field.type)]
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow):
        return _paths(f"{name}.list.element", arrow.value_type)
    if pa.types.is_map(arrow):
        keys = _paths(f"{name}.key_value.key", arrow.key_type)
        return keys + _paths(f"{name}.key_value.value", arrow.item_type)
    return [name]
