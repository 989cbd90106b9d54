"""Iceberg types as Arrow types, and the casts from what a source delivers to what the target holds.

A cast here never changes a value in silence: it is exact, or the plan says that loss was accepted
(`ColumnMap.lossy`), and even then a value that does not fit at all is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.errors import Corrupt, Invalid
from lockstep.job import ColumnMap, Json

IcebergType = str | Json

FIELD_ID: Final = b"PARQUET:field_id"
MOST_DIGITS: Final = 38

_PRIMITIVES: Final[dict[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "timestamp_ns": pa.timestamp("ns"),
    "timestamptz_ns": pa.timestamp("ns", "UTC"),
    "string": pa.string(),
    "uuid": pa.uuid(),
    "binary": pa.binary(),
}
_DECIMAL: Final = re.compile(r"decimal\(\s*(\d+)\s*,\s*(\d+)\s*\)")
_FIXED: Final = re.compile(r"fixed\[\s*(\d+)\s*\]")


def decimal_of(kind: IcebergType) -> tuple[int, int] | None:
    """Precision and scale of a decimal type; None for any other type."""
    match = _DECIMAL.fullmatch(kind) if isinstance(kind, str) else None
    return (int(match[1]), int(match[2])) if match else None


def fixed_of(kind: IcebergType) -> int | None:
    """The width of a fixed type; None for any other type."""
    match = _FIXED.fullmatch(kind) if isinstance(kind, str) else None
    return int(match[1]) if match else None


# Iceberg as Arrow


def arrow_type(kind: IcebergType) -> pa.DataType:
    """The Arrow type that the target's files are written from, with field ids in nested types.

    Raises: Invalid for a type that Lockstep does not write.
    """
    if isinstance(kind, dict):
        return _nested_arrow_type(kind)
    if (found := _PRIMITIVES.get(kind)) is not None:
        return found
    if (digits := decimal_of(kind)) is not None and 0 < digits[0] <= MOST_DIGITS and digits[1] <= digits[0]:
        return pa.decimal128(*digits)
    if (width := fixed_of(kind)) is not None:
        return pa.binary(width)
    raise Invalid(f"Lockstep does not write Iceberg's type {type_text(kind)}")


def _nested_arrow_type(kind: Json) -> pa.DataType:
    match kind.get("type"):
        case "struct":
            return pa.struct(
                [_arrow_field(f["name"], f["type"], f["required"], f["id"]) for f in kind["fields"]]
            )
        case "list":
            return pa.list_(
                _arrow_field("element", kind["element"], kind["element-required"], kind["element-id"])
            )
        case "map":
            return pa.map_(
                _arrow_field("key", kind["key"], True, kind["key-id"]),
                _arrow_field("value", kind["value"], kind["value-required"], kind["value-id"]),
            )
    raise Invalid(f"Lockstep does not write Iceberg's type {type_text(kind)}")


def _arrow_field(name: str, kind: IcebergType, required: bool, field_id: int) -> pa.Field:
    return pa.field(name, arrow_type(kind), not required, {FIELD_ID: str(field_id).encode()})


def arrow_schema(columns: Sequence[ColumnMap], dictionaries: Collection[str] = ()) -> pa.Schema:
    """The schema of the target's batches and files: field ids at every level, not nullable where required.

    The target columns named in `dictionaries` are dictionary-encoded strings, which the Parquet writer stores
    as plain strings without decoding them first.
    """
    return pa.schema([_column_field(column, column.target in dictionaries) for column in columns])


def _column_field(column: ColumnMap, as_dictionary: bool) -> pa.Field:
    field = _arrow_field(column.target, column.type, column.required, column.field_id)
    return field.with_type(pa.dictionary(pa.int32(), field.type)) if as_dictionary else field


def type_text(kind: IcebergType) -> str:
    """A type as people read it: `list<long>`, `struct<a: int, b: string>`."""
    if isinstance(kind, str):
        return kind
    match kind.get("type"):
        case "struct":
            return "struct<" + ", ".join(f"{f['name']}: {type_text(f['type'])}" for f in kind["fields"]) + ">"
        case "list":
            return f"list<{type_text(kind['element'])}>"
        case "map":
            return f"map<{type_text(kind['key'])}, {type_text(kind['value'])}>"
    return str(kind.get("type"))


# Casts


class _Misfit(Exception):
    """Values of this type cannot become the target's, whatever they are."""


class _MissingValue(Exception):
    """NULL where the target requires a value."""


def conform(
    batch: pa.RecordBatch, columns: Sequence[ColumnMap], dictionaries: Collection[str] = ()
) -> pa.RecordBatch:
    """A batch as the source delivers it, by source names, as a batch of the target.

    Columns that have the target's type already are not copied. Texts are checked to be UTF-8.
    Raises: Corrupt, naming the column and the first value that does not fit.
    """
    schema = arrow_schema(columns, dictionaries)
    arrays = [_conform_column(batch, column, schema.field(i)) for i, column in enumerate(columns)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _conform_column(batch: pa.RecordBatch, column: ColumnMap, field: pa.Field) -> pa.Array:
    if column.source is None:
        if column.required:
            raise Corrupt(f'column "{column.target}" is required, and nothing fills it')
        return pa.nulls(batch.num_rows, field.type)
    found = batch.schema.get_all_field_indices(column.source)
    if len(found) != 1:
        reason = "is missing from" if not found else "is there twice in"
        raise Corrupt(f'column "{column.source}" {reason} what the source delivers')
    array = batch.column(found[0])
    try:
        converted = _convert(array, field.type, column.lossy)
        _require_values(converted, field)
    except _MissingValue as error:
        raise Corrupt(
            f'column "{column.source}" has NULL, but the target requires a value in "{error}"'
        ) from error
    except (_Misfit, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise Corrupt(
            f'column "{column.source}" arrived as {array.type}, which cannot be stored as'
            f" {type_text(column.type)}: {error}"
        ) from error
    except pa.ArrowInvalid as error:
        raise Corrupt(_misfit_text(array, column, field), hint=str(error)) from error
    return converted


def _misfit_text(array: pa.Array, column: ColumnMap, field: pa.Field) -> str:
    row = _first_misfit(array, field.type, column.lossy)
    value = _shown(array.slice(row, 1))
    return (
        f'column "{column.source}" holds {value} (row {row} of the batch), which does not fit into'
        f" {type_text(column.type)}"
    )


def _first_misfit(array: pa.Array, want: pa.DataType, lossy: bool) -> int:
    """Halve the rows until one is left; the first half that fails holds the first misfit."""
    start, count = 0, len(array)
    while count > 1:
        half = count // 2
        try:
            _convert(array.slice(start, half), want, lossy)
        except pa.ArrowInvalid:
            count = half
        else:
            start, count = start + half, count - half
    return start


def _shown(one: pa.Array) -> str:
    try:
        text = repr(one[0].as_py())
    except (ValueError, OverflowError):  # not UTF-8, or a date that Python does not have
        text = _shown_raw(one)
    return text if len(text) <= 80 else text[:77] + "..."


def _shown_raw(one: pa.Array) -> str:
    if pa.types.is_dictionary(one.type):
        return _shown_raw(one.dictionary.take(one.indices))
    if _is_text(one.type):
        return repr(one.cast(pa.large_binary())[0].as_py())
    if pa.types.is_temporal(one.type):
        return f"{one.cast(pa.int64())[0].as_py()} as {one.type}"
    return "a value that cannot be shown"


def _require_values(array: pa.Array, field: pa.Field, parents: pa.Array | None = None) -> None:
    if field.nullable or array.null_count == 0:
        return
    if parents is None or parents.null_count == 0 or _any(pc.and_(parents.is_valid(), array.is_null())):
        raise _MissingValue(field.name)


def _any(mask: pa.Array) -> bool:
    return bool(pc.any(mask).as_py())


def _convert(array: pa.Array, want: pa.DataType, lossy: bool) -> pa.Array:
    """Raises: pa.ArrowInvalid for a value that does not fit; _Misfit for a type that never does."""
    if pa.types.is_dictionary(want):
        return _to_dictionary(array, want, lossy)
    if pa.types.is_dictionary(array.type):
        return _convert(array.dictionary, want, lossy).take(array.indices)
    if pa.types.is_run_end_encoded(array.type):
        return _convert(pc.run_end_decode(array), want, lossy)
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), want)
    if isinstance(array.type, pa.BaseExtensionType):
        if array.type == want:
            return array
        return _convert(array.storage, want, lossy)
    if isinstance(want, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(want, _convert(array, want.storage_type, lossy))
    if pa.types.is_struct(want):
        return _to_struct(array, want, lossy)
    if pa.types.is_map(want):
        return _to_map(array, want, lossy)
    if pa.types.is_list(want):
        return _to_list(array, want, lossy)
    if array.type == want and not pa.types.is_string(want):
        return array
    return _leaf_cast(want)(array, want, lossy)


def _to_dictionary(array: pa.Array, want: pa.DictionaryType, lossy: bool) -> pa.Array:
    if not pa.types.is_dictionary(array.type):
        return _convert(array, want.value_type, lossy).dictionary_encode().cast(want)
    values = _convert(array.dictionary, want.value_type, lossy)
    if values.null_count:
        return values.take(array.indices).dictionary_encode().cast(want)
    return pa.DictionaryArray.from_arrays(array.indices.cast(want.index_type), values)


def _to_struct(array: pa.Array, want: pa.StructType, lossy: bool) -> pa.Array:
    if not pa.types.is_struct(array.type):
        raise _Misfit("it is not a struct")
    members = dict(zip((field.name for field in array.type), array.flatten(), strict=True))
    children = []
    for field in want:
        if field.name in members:
            child = _convert(members[field.name], field.type, lossy)
        else:
            child = pa.nulls(len(array), field.type)
        _require_values(child, field, array)
        children.append(_shown_through(child, field))
    mask = array.is_null() if array.null_count else None
    return pa.StructArray.from_arrays(children, fields=list(want), mask=mask)


def _shown_through(array: pa.Array, field: pa.Field) -> pa.Array:
    """The same array, where a required field shows what lies under its NULLs: the Parquet writer takes no
    NULL there, not even inside of a struct that is NULL itself."""
    return array if field.nullable or not array.null_count else _without_nulls(array)


def _without_nulls(array: pa.Array) -> pa.Array:
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _without_nulls(array.storage))
    if pa.types.is_struct(kind):
        children = [_shown_through(array.field(i), field) for i, field in enumerate(kind)]
        return pa.StructArray.from_arrays(children, fields=list(kind))
    if pa.types.is_map(kind):
        return pa.MapArray.from_arrays(array.offsets, array.keys, array.items, type=kind)
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(array.offsets, array.values, type=kind)
    return pa.Array.from_buffers(kind, len(array), [None, *array.buffers()[1:]], offset=array.offset)


def _to_list(array: pa.Array, want: pa.ListType, lossy: bool) -> pa.Array:
    if not is_list(array.type):
        raise _Misfit("it is not a list")
    # flatten() leaves out what lies under NULLs, and whatever a slice does not show.
    elements = _convert(array.flatten(), want.value_type, lossy)
    _require_values(elements, want.value_field)
    offsets = list_offsets(pc.list_value_length(array))
    mask = array.is_null() if array.null_count else None
    return pa.ListArray.from_arrays(offsets, elements, type=want, mask=mask)


def _to_map(array: pa.Array, want: pa.MapType, lossy: bool) -> pa.Array:
    if not pa.types.is_map(array.type):
        raise _Misfit("it is not a map")
    have = array.type
    entries = array.cast(pa.list_(pa.struct([have.key_field, have.item_field])))
    keys, values = entries.flatten().flatten()
    keys = _convert(keys, want.key_type, lossy)
    values = _convert(values, want.item_type, lossy)
    _require_values(keys, want.key_field)
    _require_values(values, want.item_field)
    offsets = list_offsets(pc.list_value_length(entries))
    mask = array.is_null() if array.null_count else None
    return pa.MapArray.from_arrays(offsets, keys, values, type=want, mask=mask)


def list_offsets(lengths: pa.Array) -> pa.Array:
    """Where lists of these lengths begin and end, one after the other; a NULL is empty."""
    running = pc.cumulative_sum(pc.fill_null(lengths, 0).cast(pa.int32()))
    return pa.concat_arrays([pa.array([0], pa.int32()), running])


Cast = Callable[[pa.Array, pa.DataType, bool], pa.Array]


def _leaf_cast(want: pa.DataType) -> Cast:
    for matches, cast in _LEAF_CASTS:
        if matches(want):
            return cast
    raise _Misfit(f"nothing is cast to {want}")


def _allow(array: pa.Array, *kinds: Callable[[pa.DataType], bool]) -> None:
    if not any(kind(array.type) for kind in kinds):
        raise _Misfit("the types have nothing in common")


def _to_text(array: pa.Array, want: pa.DataType, lossy: bool) -> pa.Array:
    if array.type == want:
        # A server may send any bytes as a string, and Parquet readers do not look.
        array.validate(full=True)
        return array
    _allow(array, _is_text, _is_bytes)
    converted = array.cast(want)
    if _is_text(array.type):
        converted.validate(full=True)
    return converted


def _to_bytes(array: pa.Array, want: pa.DataType, lossy: bool) -> pa.Array:
    _allow(array, _is_text, _is_bytes)
    return array.cast(want)


def _to_fixed(array: pa.Array, want: pa.DataType, lossy: bool) -> pa.Array:
    _allow(array, _is_bytes)
    if pa.types.is_fixed_size_binary(array.type):
        raise _Misfit("the widths differ")
    return array.cast(pa.binary()).cast(want)


def _to_integer(array: pa.Array, want: pa.DataType, lossy: bool) -> pa.Array:
    _allow(array, pa.types.is_integer, pa.types.is_decimal)
    return array.cast(want)


def _to_floating(array: pa.Array, want: pa.DataType, lossy: bool) -> pa.Array:
    _allow(array, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    if pa.types.is_decimal(array.type) and not lossy:
        raise _Misfit("a decimal is not exact as a floating-point number")
    narrows = pa.types.is_floating(array.type) and array.type.bit_width > want.bit_width
    if narrows and not lossy:
        raise _Misfit("digits would be lost")
    converted = array.cast(want, safe=not lossy)
    if narrows or pa.types.is_decimal(array.type):
        infinite = pc.is_inf(converted)
        if narrows:
            infinite = pc.and_not(infinite, pc.is_inf(array))
        if _any(infinite):
            raise pa.ArrowInvalid("the number is too large")
    return converted


_INTEGER_DIGITS: Final = {8: 3, 16: 5, 32: 10, 64: 20}


def _to_decimal(array: pa.Array, want: pa.DataType, lossy: bool) -> pa.Array:
    """Arrow multiplies 128-bit decimals without looking at the result, so a value that grows takes the way
    through 256 bits unless every value of the type fits."""
    _allow(array, pa.types.is_integer, pa.types.is_decimal)
    if pa.types.is_integer(array.type):
        digits = _INTEGER_DIGITS[array.type.bit_width]
        if digits + want.scale <= want.precision:
            return array.cast(want)
        array = array.cast(pa.decimal128(digits, 0))
    have = array.type
    if lossy and have.scale > want.scale:
        array = pc.round(array, ndigits=want.scale)
    fits = have.scale <= want.scale and have.precision - have.scale <= want.precision - want.scale
    if fits and pa.types.is_decimal128(have):
        return array.cast(want)
    digits = min(
        76, max(have.precision - have.scale, want.precision - want.scale) + max(have.scale, want.scale)
    )
    return array.cast(pa.decimal256(digits, max(have.scale, want.scale))).cast(want)


def _to_date(array: pa.Array, want: pa.DataType, lossy: bool) -> pa.Array:
    """Integers are days since 1970: some servers send dates so."""
    _allow(array, pa.types.is_date, pa.types.is_integer)
    if pa.types.is_integer(array.type):
        return array.cast(pa.int32()).view(want)
    return array.cast(want)


def _to_time(array: pa.Array, want: pa.DataType, lossy: bool) -> pa.Array:
    _allow(array, pa.types.is_time)
    return array.cast(want, safe=not lossy)


def _to_timestamp(array: pa.Array, want: pa.DataType, lossy: bool) -> pa.Array:
    """Unsigned integers are seconds since 1970: ClickHouse sends DateTime so.

    Times without a zone may become instants (they are UTC then); instants never lose their zone.
    """
    if pa.types.is_uint32(array.type):
        array = array.cast(pa.int64()).view(pa.timestamp("s", want.tz))
    _allow(array, pa.types.is_timestamp)
    have = array.type
    if have.tz is not None and want.tz is None:
        raise _Misfit("an instant would lose its time zone")
    if have.unit == want.unit:
        return array.view(want)
    if lossy and have.unit == "ns":
        array = _whole_microseconds(array)
    return array.cast(pa.timestamp(want.unit, have.tz)).view(want)


def _whole_microseconds(array: pa.Array) -> pa.Array:
    return pc.floor_temporal(array.view(pa.timestamp("ns")), unit="microsecond").view(array.type)


def plain(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One array of the plain type of a column: no chunks, no extension, no dictionary."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column


def is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or pa.types.is_list_view(kind)
        or pa.types.is_large_list_view(kind)
    )


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


_LEAF_CASTS: Final[Sequence[tuple[Callable[[Any], bool], Cast]]] = (
    (pa.types.is_string, _to_text),
    (pa.types.is_binary, _to_bytes),
    (pa.types.is_fixed_size_binary, _to_fixed),
    (pa.types.is_integer, _to_integer),
    (pa.types.is_floating, _to_floating),
    (pa.types.is_decimal, _to_decimal),
    (pa.types.is_date, _to_date),
    (pa.types.is_time, _to_time),
    (pa.types.is_timestamp, _to_timestamp),
)
