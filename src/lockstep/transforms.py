"""Iceberg's partition transforms, by its specification: what each makes of a value, and of an Arrow column.

The result is plain JSON: ints for integers, dates, times, timestamps and the results of year, month, day,
hour and bucket; text for strings, decimals (exact digits) and UUIDs; base64 for binary; a number for
floats, except `"NaN"`, `"Infinity"`, `"-Infinity"` and `"-0.0"`, which JSON cannot tell apart; None for NULL.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from lockstep.errors import Invalid

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    Ints = npt.NDArray[np.int64]

_TEMPORAL: Final = {"date", "time", "timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"}
_INTEGRAL: Final = {"int", "long"} | _TEMPORAL
FLOATS: Final = {"float", "double"}
_UNITS_PER_DAY: Final = {
    "timestamp": 86_400_000_000,
    "timestamptz": 86_400_000_000,
    "timestamp_ns": 86_400_000_000_000,
    "timestamptz_ns": 86_400_000_000_000,
}
MONOTONIC: Final = {"identity", "year", "month", "day", "hour", "truncate", "void"}

Value = TypeVar("Value")


@dataclass(frozen=True)
class Transform:
    """A transform of one source type. `width` is N of bucket[N] and W of truncate[W], else 0."""

    name: str
    source_type: str
    width: int = 0

    @property
    def result_type(self) -> str:
        """Iceberg's text of the type of the partition value."""
        if self.name == "day":
            return "date"
        if self.name in ("year", "month", "hour", "bucket"):
            return "int"
        return self.source_type


def parse_transform(text: str, source_type: str, field: str = "") -> Transform:
    """Read `month`, `bucket[16]`, … for a source type.

    Raises: Invalid for an unknown transform, or one that does not fit the type.
    """
    match = re.fullmatch(r"([a-z]+)(?:\[(\d+)\])?", text.strip().lower())
    name, width = (match[1], int(match[2] or 0)) if match else (text, 0)
    if (name in ("bucket", "truncate")) != (width > 0) or name not in (MONOTONIC | {"bucket"}):
        raise Invalid(
            f'partition field "{field}" uses the transform {text}, which Lockstep does not know',
            hint="known: identity, year, month, day, hour, bucket[N], truncate[W], void",
        )
    if not _fits(name, kind_of(source_type)):
        raise Invalid(
            f'partition field "{field}": {text} cannot be applied to a column of type {source_type}'
        )
    return Transform(name, source_type, width)


def kind_of(type_text: str) -> str:
    """`decimal(9, 2)` is a decimal, `fixed[16]` a fixed."""
    return re.split(r"[(\[]", type_text, maxsplit=1)[0].strip()


def _fits(name: str, kind: str) -> bool:
    if name in ("identity", "void"):
        return True
    if name == "hour":
        return kind in _UNITS_PER_DAY
    if name in ("year", "month", "day"):
        return kind == "date" or kind in _UNITS_PER_DAY
    if name == "truncate":
        return kind in {"int", "long", "decimal", "string", "binary"}
    return kind in _INTEGRAL | {"decimal", "string", "uuid", "fixed", "binary"}


# Columns


def transform_column(batch: pa.RecordBatch, path: Sequence[str], transform: Transform) -> pa.Array:
    """The transform of a column of plain type, as a column that orders as the values do; NULL stays NULL."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = column_at(batch, path)
    kind = kind_of(transform.source_type)
    if transform.name == "void":
        return pa.nulls(len(column), pa.int32())
    if transform.name == "identity":
        return column
    if kind in _INTEGRAL:
        return _transformed_integers(column, transform)
    if transform.name == "truncate" and kind == "string":
        return pc.utf8_slice_codeunits(column, 0, transform.width)
    if transform.name == "truncate" and kind == "binary":
        return pc.binary_slice(column, 0, transform.width)
    codes, values = _encode_distinct(column, transform)
    result = transform.result_type
    distinct = pa.array(
        [to_record_value(value, result) for value in values],
        column.type if transform.name == "truncate" else pa.int64(),
    )
    return distinct.take(pa.array(codes))


def column_at(batch: pa.RecordBatch, path: Sequence[str]) -> pa.Array:
    """The column at the end of a way through structs; NULLs for no way at all."""
    import pyarrow as pa

    from lockstep.arrow_types import plain

    if not path:
        return pa.nulls(batch.num_rows)
    column = batch.column(path[0])
    for name in path[1:]:
        column = _child(column, name)
    return plain(column)


def _child(column: pa.StructArray, name: str) -> pa.Array:
    """The child of a struct column, NULL where the struct itself is."""
    import pyarrow.compute as pc

    return pc.struct_field(column, [column.type.get_field_index(name)])


def encode(column: pa.Array, transform: Transform) -> tuple[Ints, list[Any]]:
    """Transform a column: for each row the place of its value in the list of distinct values."""
    import numpy as np

    constant = _constant(column, transform)
    if constant is not None:
        return np.zeros(0, dtype=np.int64), constant
    kind = kind_of(transform.source_type)
    if kind in _INTEGRAL and transform.name != "identity":
        return _encode_integers(column, transform)
    if kind in FLOATS:
        return _encode_floats(column)
    return _encode_distinct(column, transform)


def _constant(column: pa.Array, transform: Transform) -> list[Any] | None:
    """The one value of a whole column, where that shows without a look at each row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if transform.name == "void" or column.null_count == len(column):
        return [None]
    if column.null_count or transform.name == "bucket" or kind_of(transform.source_type) in FLOATS:
        return None
    if pa.types.is_fixed_size_binary(column.type) or _is_view(column.type):
        return None
    ends = pc.min_max(column)
    both = pa.array([ends["min"], ends["max"]], type=column.type)
    values = _encode_distinct(both, transform)[1]
    return values if len(values) == 1 else None


def _is_view(arrow_type: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string_view(arrow_type) or pa.types.is_binary_view(arrow_type))


def _merge(codes: Any, values: Iterable[Any]) -> tuple[Ints, list[Any]]:
    """Renumber, where several source values gave the same partition value."""
    import numpy as np

    places: dict[Any, int] = {}
    renumbered = np.array([places.setdefault(value, len(places)) for value in values], dtype=np.int64)
    return renumbered[codes], list(places)


def _distinct(column: pa.Array) -> tuple[Any, pa.Array]:
    """Codes of each row, and the distinct values; NULL is one of them."""
    encoded = column.dictionary_encode(null_encoding="encode")
    return encoded.indices.to_numpy(zero_copy_only=False), encoded.dictionary


def _encode_distinct(column: pa.Array, transform: Transform) -> tuple[Ints, list[Any]]:
    """Work on each distinct value once, in Python: strings, decimals, binary, identity."""
    import pyarrow as pa

    kind = kind_of(transform.source_type)
    if kind in _TEMPORAL:
        column = _whole_numbers(column)
    elif pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    elif pa.types.is_binary_view(column.type):
        column = column.cast(pa.large_binary())
    codes, dictionary = _distinct(column)
    values = _unscaled(dictionary) if kind == "decimal" else dictionary.to_pylist()
    apply = _applier(transform)
    return _merge(codes, (None if value is None else apply(value) for value in values))


def _encode_integers(column: pa.Array, transform: Transform) -> tuple[Ints, list[Any]]:
    codes, dictionary = _distinct(_transformed_integers(column, transform))
    return _merge(codes, dictionary.to_pylist())


def _transformed_integers(column: pa.Array, transform: Transform) -> pa.Array:
    import pyarrow as pa

    numbers = _whole_numbers(column)
    missing = None if numbers.null_count == 0 else numbers.is_null().to_numpy(zero_copy_only=False)
    result = transform_integers(numbers.fill_null(0).to_numpy(zero_copy_only=False), transform)
    return pa.array(result, pa.int64(), mask=missing)


def _encode_floats(column: pa.Array) -> tuple[Ints, list[Any]]:
    """Distinct by bits, not by value: NaN equals itself, and -0.0 is not 0.0."""
    import numpy as np
    import pyarrow as pa

    missing = None if column.null_count == 0 else column.is_null().to_numpy(zero_copy_only=False)
    numbers = column.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False).copy()
    numbers[np.isnan(numbers)] = np.nan
    codes, dictionary = _distinct(pa.array(numbers.view(np.int64), mask=missing))
    bits = dictionary.to_pylist()
    return _merge(
        codes,
        (None if b is None else float_to_json(struct.unpack("<d", struct.pack("<q", b))[0]) for b in bits),
    )


def _whole_numbers(column: pa.Array) -> pa.Array:
    """Integers, dates (days), times and timestamps (their unit) as 64-bit integers."""
    import pyarrow as pa

    if pa.types.is_date32(column.type) or pa.types.is_time32(column.type):
        column = column.cast(pa.int32())
    return column.cast(pa.int64())


def _unscaled(column: pa.Array) -> list[int | None]:
    """Decimals as the integers that Iceberg stores: the value times ten to the scale."""
    import pyarrow as pa

    if not pa.types.is_decimal128(column.type):
        column = column.cast(pa.decimal128(column.type.precision, column.type.scale))
    raw = column.buffers()[1]
    data = b"" if raw is None else raw.to_pybytes()
    valid = column.is_valid().to_pylist()
    return [
        int.from_bytes(data[16 * at : 16 * at + 16], "little", signed=True) if ok else None
        for at, ok in enumerate(valid, start=column.offset)
    ]


# Values


def transform_integers(numbers: Ints, transform: Transform) -> Ints:
    """year, month, day, hour, bucket and truncate of whole numbers, all rows at once.

    Raises: Invalid for a number so far out that the result does not fit its type.
    """
    import numpy as np

    kind = kind_of(transform.source_type)
    if transform.name == "bucket":
        if kind.endswith("_ns"):  # by the specification, nanoseconds hash as their microseconds
            numbers = np.floor_divide(numbers, 1000)
        return np.asarray((murmur3_longs(numbers) & 0x7FFFFFFF) % transform.width, dtype=np.int64)
    if transform.name == "truncate":
        return _truncated(numbers, transform)
    if transform.name == "hour":
        return np.floor_divide(numbers, _UNITS_PER_DAY[kind] // 24)
    days = numbers if kind == "date" else np.floor_divide(numbers, _UNITS_PER_DAY[kind])
    if transform.name == "day":
        return days
    unit = "datetime64[M]" if transform.name == "month" else "datetime64[Y]"
    return days.astype("datetime64[D]").astype(unit).astype(np.int64)


def _truncated(numbers: Ints, transform: Transform) -> Ints:
    import numpy as np

    result = numbers - np.mod(numbers, transform.width)
    least = -(2**31) if kind_of(transform.source_type) == "int" else -(2**63)
    # Below the least number 64 bits wrap around: readers would look for the row in another partition.
    beyond = (result > numbers) | (result < least)
    if beyond.any():
        raise _without_partition(str(numbers[beyond][0]), transform)
    return result


def least_truncated(transform: Transform) -> int | None:
    """The least value (of a decimal: unscaled) whose truncation is of its type. None: all of them are."""
    kind = kind_of(transform.source_type)
    if transform.name != "truncate" or kind not in ("int", "long", "decimal"):
        return None
    if kind == "decimal":
        most = 10 ** _digits(transform.source_type)[0] - 1
    else:
        most = 2**31 if kind == "int" else 2**63
    return None if most % transform.width == 0 else -(most // transform.width) * transform.width


def _without_partition(value: str, transform: Transform) -> Invalid:
    return Invalid(
        f"the value {value} has no partition under truncate[{transform.width}]: "
        f"the result is no {transform.source_type} any more",
        hint="nothing was published; partition the table in another way, or leave the row out",
    )


def murmur3_longs(numbers: Ints) -> Ints:
    """Murmur3 (32 bits, x86, seed 0) of each number as 8 bytes, little-endian; unsigned."""
    import numpy as np

    words = np.ascontiguousarray(numbers, dtype="<i8").view("<u4").reshape(-1, 2).astype(np.uint32)
    state = np.zeros(len(words), dtype=np.uint32)
    for at in (0, 1):
        mixed = words[:, at] * np.uint32(0xCC9E2D51)
        mixed = (mixed << np.uint32(15)) | (mixed >> np.uint32(17))
        state ^= mixed * np.uint32(0x1B873593)
        state = (state << np.uint32(13)) | (state >> np.uint32(19))
        state = state * np.uint32(5) + np.uint32(0xE6546B64)
    state ^= np.uint32(8)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ (state >> np.uint32(shift))) * np.uint32(factor)
    return (state ^ (state >> np.uint32(16))).astype(np.int64)


def murmur3_bytes(data: bytes) -> int:
    """Murmur3 (32 bits, x86, seed 0), unsigned."""
    import mmh3

    return int(mmh3.hash(data, signed=False))


def _applier(transform: Transform) -> Callable[[Any], Any]:
    """The transform of one value that is not NULL, to its JSON form. Decimals come unscaled."""
    kind = kind_of(transform.source_type)
    if kind in _INTEGRAL and transform.name != "identity":
        return lambda value: _integer(value, transform)
    if transform.name == "bucket":
        return lambda value: (murmur3_bytes(_hashed_form(value, kind)) & 0x7FFFFFFF) % transform.width
    shorten = _truncation(transform) if transform.name == "truncate" else _as_is
    return lambda value: value_to_json(shorten(value), transform.source_type)


def _as_is(value: Value) -> Value:
    return value


def _integer(value: int, transform: Transform) -> int:
    import numpy as np

    return int(transform_integers(np.array([value], dtype=np.int64), transform)[0])


def _truncation(transform: Transform) -> Callable[[Any], Any]:
    width = transform.width
    if kind_of(transform.source_type) == "decimal":
        return lambda unscaled: _truncated_decimal(unscaled, transform)
    # Text by code points, which is what Python's characters are; binary by bytes.
    return lambda value: value[:width]


def _truncated_decimal(unscaled: int, transform: Transform) -> int:
    """Raises: Invalid where the result has more digits than the type."""
    precision, scale = _digits(transform.source_type)
    result = unscaled - unscaled % transform.width
    if -result >= 10**precision:
        raise _without_partition(_decimal_text(unscaled, scale), transform)
    return result


def _hashed_form(value: Any, kind: str) -> bytes:
    if kind == "string":
        return str(value).encode()
    if kind == "decimal":
        return decimal_bytes(value)
    return bytes(value)


def decimal_bytes(unscaled: int) -> bytes:
    """Two's complement, big-endian, as few bytes as hold it."""
    bits = unscaled.bit_length() if unscaled >= 0 else (unscaled + 1).bit_length()
    return unscaled.to_bytes(bits // 8 + 1, "big", signed=True)


# Values as JSON, as PyIceberg's records, and for people


def float_to_json(value: float) -> float | str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    return "-0.0" if value == 0 and str(value).startswith("-") else value


def value_to_json(value: Any, type_text: str) -> Any:
    """A value that is not NULL (numbers for temporal types, unscaled for decimals) as plain JSON."""
    kind = kind_of(type_text)
    if kind == "decimal":
        return _decimal_text(value, _digits(type_text)[1])
    if kind in FLOATS:
        return float_to_json(value)
    if kind == "uuid":
        digits = bytes(value).hex()
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    if kind in ("binary", "fixed"):
        return base64.b64encode(value).decode()
    return value


def _digits(type_text: str) -> tuple[int, int]:
    """Precision and scale of a decimal type."""
    match = re.fullmatch(r"decimal\((\d+),\s*(\d+)\)", type_text.strip())
    if match is None:
        raise Invalid(f"{type_text} is not a decimal type of Iceberg")
    return int(match[1]), int(match[2])


def _decimal_text(unscaled: int, scale: int) -> str:
    digits = str(abs(unscaled)).rjust(scale + 1, "0")
    whole, fraction = (digits[:-scale], digits[-scale:]) if scale else (digits, "")
    return ("-" if unscaled < 0 else "") + whole + (f".{fraction}" if fraction else "")


def to_record_value(json_value: Any, result_type: str) -> Any:
    """A partition value as PyIceberg's `Record` wants it in `DataFile.partition`."""
    kind = kind_of(result_type)
    if json_value is None:
        return None
    if kind == "decimal":
        return Decimal(json_value)
    if kind in FLOATS:
        return float(json_value)
    if kind == "uuid":
        return bytes.fromhex(json_value.replace("-", ""))
    if kind in ("binary", "fixed"):
        return base64.b64decode(json_value)
    return json_value


def human(value: Any, transform: Transform) -> str:
    """A partition value as people read it, and as Iceberg names the folder: `2024-01`, not 648."""
    import numpy as np

    if value is None:
        return "null"
    units: dict[str, Literal["Y", "M", "D", "h"]] = {"year": "Y", "month": "M", "day": "D", "hour": "h"}
    if (unit := units.get(transform.name)) is not None:
        return str(np.datetime64(int(value), unit)).replace("T", "-")
    if transform.name == "bucket":
        return str(value)
    kind = kind_of(transform.source_type)
    if kind == "date":
        return str(np.datetime64(value, "D"))
    if kind in _UNITS_PER_DAY:
        moment = str(np.datetime64(value, "ns" if kind.endswith("_ns") else "us"))
        return moment + ("+00:00" if "tz" in kind else "")
    if kind == "time":
        return str(np.datetime64(value, "us")).partition("T")[2]
    return str(value).lower() if isinstance(value, bool) else str(value)
