"""What a MergeTree table says of its keys, and which of it Iceberg can say too."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from lockstep.source import SourceField
from lockstep.source.clickhouse_types import (
    UTC_ZONES,
    ChType,
    iceberg_type,
    split_top_level,
    tokens,
    unquote,
    zone_of,
)

_CLAUSES: Final = (
    "PARTITION BY",
    "PRIMARY KEY",
    "ORDER BY",
    "UNIQUE KEY",
    "SAMPLE BY",
    "TTL",
    "SETTINGS",
    "COMMENT",
)
_QUOTED: Final = re.compile(r"""'(?:\\.|[^'\\])*'|`(?:\\.|[^`\\])*`|"(?:\\.|[^"\\])*\"""", re.DOTALL)
_TIME_PARTS: Final = {
    "toYear": "year",
    "toStartOfYear": "year",
    "toYYYYMM": "month",
    "toStartOfMonth": "month",
    "toDate": "day",
    "toDate32": "day",
    "toYYYYMMDD": "day",
    "toStartOfDay": "day",
    "toStartOfHour": "hour",
}
_ICEBERG: Final = {"icebergBucket": "bucket", "icebergTruncate": "truncate"}
_HASHED_ALIKE: Final = frozenset(
    {"Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "String", "Date", "Date32"}
)
# Their order in ClickHouse (by number, by halves) is not that of what Iceberg stores for them.
_SORTED_OTHERWISE: Final = frozenset({"Enum8", "Enum16", "UUID", "IPv4", "IPv6"})


def engine_clauses(engine_full: str) -> dict[str, str]:
    """The clauses after the engine's name, word for word: ORDER BY, SETTINGS and so on."""
    # Quoted text is blanked out with its length kept, so that no name can pose as a clause.
    blank = _QUOTED.sub(lambda match: "~" * len(match[0]), engine_full)
    depth, found = 0, []
    for match in re.finditer(r"[()]|\b(?:" + "|".join(_CLAUSES) + r")\b", blank):
        if match[0] in "()":
            depth += 1 if match[0] == "(" else -1
        elif depth == 0:
            found.append(match)
    ends = [match.start() for match in found[1:]] + [len(engine_full)]
    return {match[0]: engine_full[match.end() : end].strip() for match, end in zip(found, ends, strict=True)}


def granule_rows(engine_full: str) -> int:
    """How many rows a granule has at most."""
    found = re.search(r"\bindex_granularity = (\d+)", engine_clauses(engine_full).get("SETTINGS", ""))
    return int(found[1]) if found else 8192


def _elements(key: str) -> list[list[str]]:
    words = tokens(key)
    if words and words[0] == "tuple":
        words = words[1:]
    pieces = split_top_level(words)
    if len(pieces) == 1 and pieces[0][0] == "(" and pieces[0][-1] == ")":
        return split_top_level(pieces[0][1:-1])
    return pieces


def partition_fields(
    key: str, types: Mapping[str, ChType], server_zone: str
) -> tuple[list[SourceField] | None, str]:
    """The partition key as Iceberg's transforms, or None; and what a reader of the key would not see."""
    found: list[SourceField] = []
    for words in _elements(key):
        field, reason = _partition_field(words, types, server_zone)
        if field is None:
            return None, reason
        found.append(field)
    return found, ""


def _partition_field(
    words: Sequence[str], types: Mapping[str, ChType], server_zone: str
) -> tuple[SourceField | None, str]:
    if len(words) == 1:
        name = unquote(words[0])
        if name in types and isinstance(iceberg_type(types[name]).exact, str):
            return SourceField(name), ""
        return None, ""
    function = words[0]
    arguments = split_top_level(words[2:-1]) if words[1] == "(" and words[-1] == ")" else []
    plain = [unquote(piece[0]) for piece in arguments if len(piece) == 1]
    if len(plain) == len(arguments):
        if function in _ICEBERG and len(plain) == 2 and plain[0].isdigit() and plain[1] in types:
            if types[plain[1]].name in _HASHED_ALIKE:
                return SourceField(plain[1], f"{_ICEBERG[function]}[{plain[0]}]"), ""
        elif function in _TIME_PARTS and plain and plain[0] in types and len(plain) <= 2:
            return _time_field(function, plain, types[plain[0]], server_zone)
    return None, ""


def _time_field(
    function: str, plain: Sequence[str], kind: ChType, server_zone: str
) -> tuple[SourceField | None, str]:
    transform = _TIME_PARTS[function]
    if kind.name in {"Date", "Date32"}:
        return (
            (SourceField(plain[0], transform), "") if transform != "hour" else (None, "a date has no hours")
        )
    if kind.name not in {"DateTime", "DateTime64"} or iceberg_type(kind).exact is None:
        return None, ""
    zone = plain[1] if len(plain) == 2 else zone_of(kind) or server_zone
    if zone not in UTC_ZONES:
        return None, f"{function} counts in the time zone {zone}, Iceberg in UTC"
    return SourceField(plain[0], transform), ""


def sorting_fields(order_by: str, types: Mapping[str, ChType]) -> list[SourceField]:
    """The longest prefix of the sorting key that Iceberg sorts in the same way."""
    found: list[SourceField] = []
    for words in _elements(order_by):
        descending = len(words) == 2 and words[1] == "DESC"
        name = unquote(words[0])
        if (len(words) > 1 and not descending) or name not in types:
            break
        kind = types[name]
        if kind.name in _SORTED_OTHERWISE or not isinstance(iceberg_type(kind).exact, str):
            break
        # In a key, NULL is greater than every value.
        found.append(SourceField(name, "identity", descending, nulls_first=descending))
    return found
