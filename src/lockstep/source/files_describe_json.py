"""What JSON lines say of themselves: their fields, and the types that the beginning of each file shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from lockstep.errors import Invalid
from lockstep.job import Json
from lockstep.source import ParseOptions, SourceColumn
from lockstep.source.files_describe import (
    NEWLINE,
    Described,
    after_skipped,
    first_records,
    given_column,
    sample_bytes,
    without_columns,
)
from lockstep.source.files_infer import infer, kept_by_double
from lockstep.source.files_json import RECORDS
from lockstep.source.files_nested import Misvalue, loads
from lockstep.source.files_open import RawFile
from lockstep.storage import Storage

_TEMPORAL: Final = ("date", "timestamp", "timestamptz")
_LONG: Final = range(-(2**63), 2**63)
_EXACT_IN_DOUBLE: Final = range(-(2**53), 2**53 + 1)


@dataclass(frozen=True)
class Guess:
    """The type that holds all values of a field in the sample, or why there is none."""

    type: str | Json | None
    problem: str | None = None


def describe_json(storage: Storage, files: Sequence[RawFile], options: ParseOptions) -> Described:
    """Read the beginning of each file.

    Raises: Invalid if it is no JSON lines, or if there is no field.
    """
    known: list[RawFile] = []
    records: list[dict[str, Any]] = []
    read_bytes = read_records = 0
    for file in files:
        start, line = after_skipped(storage, file, options.skip, NEWLINE)
        known.append(replace(file, start=start, line=line))
        sample = first_records(storage, file, start, RECORDS, sample_bytes(len(files)))
        _require_lines(sample, file.url)
        lines = [sample[begin:end] for begin, end in RECORDS.spans(sample)]
        records += _objects(lines)
        read_bytes += len(sample)
        read_records += len(lines)
    columns = _columns(records, options.schema)
    if not columns and not read_records:
        raise without_columns(files, options.skip)
    if not columns:
        raise Invalid(
            f"{files[0].url} shows no field of a JSON object, so its columns are unknown",
            hint="Lockstep reads one object on each line; say the columns with --schema",
        )
    layout = [column.name for column in columns]
    return Described(columns, [layout], known, max(1.0, read_bytes / max(1, read_records)))


def _require_lines(sample: bytes, url: str) -> None:
    if sample.lstrip()[:1] == b"[":
        raise Invalid(
            f"{url} is one JSON array, and Lockstep reads JSON lines: one object on each line",
            hint="`jq -c '.[]' FILE` makes lines of it",
        )


def _objects(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The records that are objects; the others become rejects when they are read."""
    found = []
    for line in lines:
        try:
            value = loads(line)
        except Misvalue:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _columns(records: Sequence[dict[str, Any]], schema: Json | None) -> list[SourceColumn]:
    given = {f["name"]: f for f in schema["fields"]} if schema else {}
    values: dict[str, list[Any]] = {name: [] for name in given}
    for record in records:
        for name, value in record.items():
            values.setdefault(name, []).append(value)
    return [
        given_column(given[name]) if name in given else _guessed_column(name, found)
        for name, found in values.items()
    ]


def _guessed_column(name: str, values: Sequence[Any]) -> SourceColumn:
    guess = guess_type(values)
    if guess.type is None:
        advice = "Say its type with --schema."
        return SourceColumn(name, "JSON", None, True, None, guess.problem, advice)
    return SourceColumn(name, "JSON", guess.type, nullable=True)


def guess_type(values: Sequence[Any]) -> Guess:
    present = [value for value in values if value is not None]
    kinds = {_kind(value) for value in present}
    if not kinds:
        return Guess("string")
    if kinds == {"number"}:
        return _guess_number(present)
    if len(kinds) > 1:
        return Guess(None, f"it holds {' and '.join(sorted(f'{kind}s' for kind in kinds))}")
    match kinds.pop():
        case "truth value":
            return Guess("boolean")
        case "text":
            found = infer(pa.array([t.encode("utf-8", "replace").decode() for t in present], pa.string()))
            return Guess(found if found in _TEMPORAL else "string")
        case "list":
            return _guess_list(present)
    return _guess_struct(present)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "truth value"
    if isinstance(value, int | float | Decimal):
        return "number"
    if isinstance(value, str):
        return "text"
    return "list" if isinstance(value, list) else "object"


def _guess_number(values: Sequence[int | float | Decimal]) -> Guess:
    whole = [value for value in values if isinstance(value, int)]
    if len(whole) == len(values):
        if all(value in _LONG for value in whole):
            return Guess("long")
        return Guess(None, "it holds whole numbers beyond 64 bits")
    if not all(value in _EXACT_IN_DOUBLE for value in whole):
        return Guess(None, "it holds fractions, and whole numbers too large for a double")
    for value in values:
        if isinstance(value, Decimal) and not kept_by_double(value):
            return Guess(None, f"it holds {value}, which a double would change")
    return Guess("double")


def _guess_list(values: Sequence[list[Any]]) -> Guess:
    element = guess_type([item for value in values for item in value])
    if element.type is None:
        return element
    return Guess({"type": "list", "element-id": 0, "element-required": False, "element": element.type})


def _guess_struct(values: Sequence[dict[str, Any]]) -> Guess:
    members: dict[str, list[Any]] = {}
    for value in values:
        for name, member in value.items():
            members.setdefault(name, []).append(member)
    if not members:
        return Guess(None, "it holds objects without fields")
    fields = []
    for name, found in members.items():
        guess = guess_type(found)
        if guess.type is None:
            return Guess(None, f'in its field "{name}" {guess.problem}')
        fields.append({"id": 0, "name": name, "required": False, "type": guess.type})
    return Guess({"type": "struct", "fields": fields})
