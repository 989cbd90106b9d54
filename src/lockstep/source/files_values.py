"""Texts as values of the types that Arrow's parsers do not know, and why a text is no value of a type."""

from __future__ import annotations

import re
from binascii import unhexlify
from decimal import Decimal, InvalidOperation
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.arrow_types import IcebergType, arrow_type, decimal_of, fixed_of, type_text
from lockstep.errors import Invalid
from lockstep.source.files_columns import refuse_where

_UUID: Final = "^(?:[0-9a-fA-F]{32}|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})$"
SPARE_ZEROS: Final = r"^([0-9T: -]+:[0-9]{2}\.[0-9]{6})0+((?:Z|[+-][0-9:]+)?)$"
"""A time with more digits of a second than a microsecond needs, all of them zeros."""
_TIME: Final = r"^[0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?$"
_HEX: Final = "^(?:[0-9a-fA-F]{2})*$"


def is_text_form(kind: pa.DataType) -> bool:
    """Whether values of this type are made from a string."""
    return bool(isinstance(kind, pa.BaseExtensionType) or pa.types.is_nested(kind) or is_bytes(kind))


def as_timestamps(texts: pa.StringArray, kind: pa.DataType) -> pa.Array:
    """Texts as timestamps; zeros after the sixth digit of a second change nothing, so they are fine.

    Raises: pa.ArrowInvalid if one is no timestamp.
    """
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        return pc.replace_substring_regex(texts, SPARE_ZEROS, r"\1\2").cast(kind)


def as_times(texts: pa.StringArray, kind: pa.DataType) -> pa.Array:
    """Texts as times of a day; Arrow's own cast knows none. Raises: pa.ArrowInvalid if one is no time."""
    if not pc.all(pc.match_substring_regex(texts, _TIME), min_count=0).as_py():
        raise pa.ArrowInvalid("not a time")
    on_a_day = pc.binary_join_element_wise("1970-01-01T", texts, "")
    return as_timestamps(on_a_day, pa.timestamp("us")).cast(kind)


def is_clock(kind: pa.DataType) -> bool:
    """Whether values of this type have seconds with a fraction."""
    return bool(pa.types.is_timestamp(kind) or pa.types.is_time(kind))


def as_clock(texts: pa.StringArray, kind: pa.DataType) -> pa.Array:
    """Texts as timestamps or times, as Arrow's CSV parser takes them: blanks around a time do not matter.

    Raises: pa.ArrowInvalid if one is none.
    """
    if pa.types.is_time(kind):
        return as_times(pc.ascii_trim(texts, " \t"), kind)
    return as_timestamps(texts, kind)


def without_spare_zeros(text: str) -> str:
    return re.sub(SPARE_ZEROS, r"\1\2", text)


def is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind))


def from_text(texts: pa.StringArray, want: pa.DataType) -> pa.Array:
    """Raises: Unfit at the first text that is no value of the type."""
    if isinstance(want, pa.BaseExtensionType):
        _require(texts, _UUID)
        digits = pc.replace_substring(texts, "-", "")
        return pa.ExtensionArray.from_storage(want, _unhexlified(digits, want.storage_type))
    if is_bytes(want):
        _require(texts, _HEX)
        return _unhexlified(texts, want)
    raise Invalid(f"Lockstep does not read {want} from text")


def _require(texts: pa.StringArray, pattern: str) -> None:
    refuse_where(pc.invert(pc.match_substring_regex(texts, pattern)))


def _unhexlified(digits: pa.StringArray, want: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_binary(want):
        refuse_where(pc.not_equal(pc.binary_length(digits), 2 * want.byte_width))
    return pa.array([None if text is None else unhexlify(text) for text in digits.to_pylist()], want)


# In words

_FORMS: Final = {
    "boolean": "is not true or false",
    "date": "is not a date of the form 2024-02-29",
    "time": "is not a time of the form 12:34:56.123456",
    "timestamp": "is not a time of the form 2024-02-29 12:34:56.123456",
    "timestamptz": "is not a time of the form 2024-02-29 12:34:56.123456Z",
    "uuid": "is not a UUID",
    "binary": "is not an even number of hexadecimal digits",
}
_RANGES: Final = {"int": (-(2**31), 2**31 - 1), "long": (-(2**63), 2**63 - 1)}
_WHOLE: Final = re.compile(r"\s*-?[0-9]+\s*")
_ZONE: Final = re.compile(r".*[0-9](?:Z|[+-][0-9]{2}:?(?:[0-9]{2})?)$", re.DOTALL)
_FRACTION: Final = re.compile(r".*:[0-9]{2}\.[0-9]{7,}(?:Z|[+-][0-9:]+)?$", re.DOTALL)


def misfit_reason(text: str, kind: IcebergType) -> str:
    """What is wrong with a text as a value of a type, as the end of a sentence that begins with the text."""
    if isinstance(kind, dict):
        return f"is not a {type_text(kind)} in JSON"
    if kind in _RANGES:
        least, most = _RANGES[kind]
        if _WHOLE.fullmatch(text):
            return f"is beyond the range of {kind}, {least} to {most}"
        return f"is not a whole number, as {kind} needs"
    if kind in ("float", "double"):
        return f"is {'beyond the range of' if _is_number(text) else 'not a number, as'} {kind}" + (
            "" if _is_number(text) else " needs"
        )
    if (digits := decimal_of(kind)) is not None:
        return _decimal_reason(text, digits)
    if kind in ("timestamp", "timestamptz"):
        return _timestamp_reason(text, kind)
    if (width := fixed_of(kind)) is not None:
        return f"is not {2 * width} hexadecimal digits"
    return _FORMS.get(kind, f"is not a {type_text(kind)}")


def _is_number(text: str) -> bool:
    try:
        return Decimal(text.strip()).is_finite()
    except InvalidOperation:
        return False


def _decimal_reason(text: str, digits: tuple[int, int]) -> str:
    precision, scale = digits
    if not _is_number(text):
        return f"is not a number, as decimal({precision}, {scale}) needs"
    value = Decimal(text.strip())
    exponent = value.normalize().as_tuple().exponent
    if isinstance(exponent, int) and -exponent > scale:
        return f"has more than the {scale} digits after the point of decimal({precision}, {scale})"
    return f"has more than the {precision - scale} digits before the point of decimal({precision}, {scale})"


def _timestamp_reason(text: str, kind: str) -> str:
    text = without_spare_zeros(text)
    if _FRACTION.fullmatch(text):
        return f"has more than the six digits of a second that {kind} holds"
    if kind == "timestamptz" and not _ZONE.fullmatch(text) and _parses(text, "timestamp"):
        return "has no zone, and timestamptz needs one (Z or +hh:mm)"
    if kind == "timestamp" and _ZONE.fullmatch(text) and _parses(text, "timestamptz"):
        return "has a zone, and timestamp has none"
    return _FORMS[kind]


def _parses(text: str, kind: str) -> bool:
    try:
        pa.array([text]).cast(arrow_type(kind))
    except pa.ArrowInvalid:
        return False
    return True
