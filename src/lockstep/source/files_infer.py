"""Which type the texts of a column have, as far as a sample tells.

A guess must hold every value of the sample without changing it: numbers with leading zeros stay texts (they
are codes), and so do whole numbers beyond 64 bits, and fractions with more digits than a double keeps. What
the sample does not show is found while reading, as rejects; only digits that a double does not keep are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.source.files_values import as_timestamps

_NUMBER: Final = r"-?(?:0|[1-9][0-9]*)"
_FRACTION: Final = r"(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?"
_DATE: Final = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_TIME: Final = r"[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,6}|\.[0-9]{6}0*)?)?"
_FORMS: Final[Sequence[tuple[str, str, pa.DataType | None]]] = (
    ("boolean", "^(?:true|True|TRUE|false|False|FALSE)$", None),
    ("long", f"^{_NUMBER}$", pa.int64()),
    ("double", f"^(?:{_NUMBER}{_FRACTION}|-?(?:nan|NaN|inf|Infinity))$", pa.float64()),
    ("date", f"^{_DATE}$", pa.date32()),
    ("timestamp", f"^{_DATE}{_TIME}$", pa.timestamp("us")),
    ("timestamptz", f"^{_DATE}{_TIME}(?:Z|[+-][0-9]{{2}}:?[0-9]{{2}})$", pa.timestamp("us", "UTC")),
)
_MOST_EXACT_DIGITS: Final = "[0-9]{16}"
_FEW_DIGITS: Final = "^-?[0-9.]{1,15}$"


def infer(texts: pa.StringArray) -> str:
    """The narrowest Iceberg type that holds these texts; `string` if they are all NULL."""
    seen = texts.drop_null().unique()
    if not len(seen):
        return "string"
    for name, form, arrow in _FORMS:
        if _all_match(seen, form) and _converts(seen, arrow) and (name != "double" or _is_double(seen)):
            return name
    return "string"


def _is_double(seen: pa.StringArray) -> bool:
    """Whether any text looks like a number, and none of them would lose digits."""
    numbers = seen.filter(pc.match_substring_regex(seen, "[0-9]"))
    whole = numbers.filter(pc.match_substring_regex(numbers, f"^{_NUMBER}$"))
    return bool(
        len(numbers)
        and not pc.any(pc.match_substring_regex(whole, _MOST_EXACT_DIGITS)).as_py()
        and all(map(_is_kept, _doubtful(numbers).to_pylist()))
    )


def _doubtful(numbers: pa.StringArray) -> pa.StringArray:
    """Those that have more than 15 digits, or an exponent, and are not what their double is printed as."""
    few = pc.match_substring_regex(numbers, _FEW_DIGITS)
    same = pc.equal(numbers, numbers.cast(pa.float64()).cast(pa.string()))
    return numbers.filter(pc.invert(pc.or_(few, same)))


def _is_kept(text: str) -> bool:
    try:
        return kept_by_double(Decimal(text))
    except InvalidOperation:  # an exponent that is beyond everything
        return False


def kept_by_double(number: Decimal) -> bool:
    """Whether the nearest double is read as the same number again, by its shortest text."""
    return Decimal(repr(float(number))) == number


def _all_match(seen: pa.StringArray, form: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(seen, form)).as_py())


def _converts(seen: pa.StringArray, arrow: pa.DataType | None) -> bool:
    if arrow is None:
        return True
    try:
        values = as_timestamps(seen, arrow) if pa.types.is_timestamp(arrow) else seen.cast(arrow)
    except pa.ArrowInvalid:
        return False
    if not pa.types.is_floating(arrow):
        return True
    beyond = pc.and_(pc.is_inf(values), pc.match_substring_regex(seen, "[0-9]"))
    return not pc.any(beyond).as_py()
