"""Values of JSON as values of the target, one by one: lists, maps and structs, which have no faster way.

Nothing is guessed: a whole number is no text, 1.0 is no whole number, and times are texts of the form that
CSV has too. What is missing in a struct is NULL; what the target does not have there is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from lockstep.arrow_types import arrow_type, conform
from lockstep.errors import Corrupt
from lockstep.job import ColumnMap
from lockstep.source.files_values import as_times, without_spare_zeros

_INTEGERS: Final = {pa.int32(): "int", pa.int64(): "long"}


class Misvalue(ValueError):
    """Why a value is none of its type, as the end of a sentence that begins with the value."""


def loads(text: str | bytes) -> Any:
    """Decode JSON; numbers with a fraction or an exponent stay exact.

    Raises: Misvalue in words for people.
    """
    try:
        return json.loads(text, parse_float=Decimal, object_pairs_hook=_once_each)
    except UnicodeDecodeError as error:
        raise Misvalue("is not valid UTF-8") from error
    except json.JSONDecodeError as error:
        raise Misvalue(f"is not valid JSON: {error.msg.lower()} at character {error.pos + 1}") from error
    except RecursionError as error:
        raise Misvalue("is nested too deeply") from error
    except Misvalue:
        raise
    except ValueError as error:  # a number of more digits than Python takes
        raise Misvalue("holds a number of too many digits") from error


def _once_each(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Misvalue(f'has the field "{twice}" twice')
    return found


def strict_value(value: Any, kind: pa.DataType) -> Any:
    """A decoded value as `pa.array` takes it for this type. Raises: Misvalue."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return _struct(value, kind)
    if pa.types.is_map(kind):
        return _map(value, kind)
    if pa.types.is_list(kind):
        if not isinstance(value, list):
            raise Misvalue("is not a list")
        return [strict_value(item, kind.value_type) for item in value]
    if pa.types.is_boolean(kind):
        return _of_class(value, bool, "is not true or false")
    if pa.types.is_integer(kind):
        return _integer(value, kind)
    if pa.types.is_floating(kind):
        return _floating(value, kind)
    if pa.types.is_decimal(kind):
        return _decimal(value, kind)
    text = _of_class(value, str, "is not a text")
    if pa.types.is_string(kind):
        return _utf8(text)
    return _from_text(text, kind)


def _of_class(value: Any, kind: type, otherwise: str) -> Any:
    if not isinstance(value, kind):
        raise Misvalue(otherwise)
    return value


def _struct(value: Any, kind: pa.StructType) -> dict[str, Any]:
    _of_class(value, dict, "is not an object")
    fields = {field.name: field.type for field in kind}
    for name in value:
        if name not in fields:
            raise Misvalue(f'has a field "{name}" that the target does not have')
    return {name: strict_value(value.get(name), member) for name, member in fields.items()}


def _map(value: Any, kind: pa.MapType) -> list[tuple[Any, Any]]:
    _of_class(value, dict, "is not an object")
    if not pa.types.is_string(kind.key_type):
        raise Misvalue("has keys that are texts, and the target has others")
    return [(_utf8(key), strict_value(item, kind.item_type)) for key, item in value.items()]


def _integer(value: Any, kind: pa.DataType) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise Misvalue(f"is not a whole number, as {_INTEGERS[kind]} needs")
    most = 2 ** (kind.bit_width - 1)
    if not -most <= value < most:
        raise Misvalue(f"is beyond the range of {_INTEGERS[kind]}")
    return value


def _floating(value: Any, kind: pa.DataType) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise Misvalue("is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    beyond = math.isinf(number) and not isinstance(value, float)
    if beyond or (pa.types.is_float32(kind) and math.isfinite(number) and _overflows(number)):
        raise Misvalue("is beyond the range of the type")
    return number


def _overflows(number: float) -> bool:
    return bool(math.isinf(pa.scalar(number, pa.float64()).cast(pa.float32(), safe=False).as_py()))


def _decimal(value: Any, kind: pa.DataType) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise Misvalue("is not a number")
    number = Decimal(value)
    _, digits, exponent = number.as_tuple()
    if not isinstance(exponent, int) or not number:
        return number
    zeros = len(digits) - len("".join(map(str, digits)).rstrip("0"))
    if -(exponent + zeros) > kind.scale or number.adjusted() >= kind.precision - kind.scale:
        raise Misvalue(f"does not fit into decimal({kind.precision}, {kind.scale})")
    return number


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Misvalue("is not valid Unicode: half of a surrogate pair") from error
    return text


def _from_text(text: str, kind: pa.DataType) -> Any:
    try:
        if isinstance(kind, pa.BaseExtensionType):
            return UUID(text).bytes
        if pa.types.is_binary(kind):
            return bytes.fromhex(text)
        if pa.types.is_fixed_size_binary(kind):
            found = bytes.fromhex(text)
            if len(found) != kind.byte_width:
                raise Misvalue(f"is not {2 * kind.byte_width} hexadecimal digits")
            return found
        if pa.types.is_timestamp(kind):
            text = without_spare_zeros(text)
        if pa.types.is_time(kind):
            return as_times(pa.array([text]), kind)[0].as_py()
        return pa.scalar(text).cast(kind).as_py()
    except (ValueError, OverflowError) as error:
        if isinstance(error, Misvalue):
            raise
        raise Misvalue(f"is not a {kind}") from error


def nested_array(values: Sequence[Any], column: ColumnMap) -> pa.Array:
    """Strict values as an array of a target column. Raises: Misvalue for NULL where a value is required."""
    kind = _plain(arrow_type(column.type))
    batch = pa.record_batch({"v": pa.array(values, kind)})
    alone = ColumnMap(column.target, column.field_id, column.type, False, "v", None)
    try:
        return conform(batch, [alone]).column(0)
    except Corrupt as error:
        raise Misvalue(error.message) from error


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type without extensions, which `pa.array` cannot build inside of others."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _plain(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    return kind
