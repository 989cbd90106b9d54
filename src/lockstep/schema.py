"""Which source column fills which target column.

Types are Iceberg's own JSON: text for a primitive, a dict for a struct, list or map. Field ids of a source's
nested types mean nothing. The casts that carry a matching out are in `arrow_types`.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal

from lockstep.arrow_types import (
    IcebergType,
    arrow_schema,
    arrow_type,
    conform,
    decimal_of,
    fixed_of,
    type_text,
)
from lockstep.errors import Invalid
from lockstep.job import ColumnMap, Json

if TYPE_CHECKING:
    from lockstep.source import SourceColumn, SourceTable

__all__ = ["arrow_schema", "arrow_type", "conform", "match_columns", "type_text"]

MOST_LISTED: Final = 20


def match_columns(
    source: SourceTable,
    target_schema: Json,
    *,
    by: Literal["name", "position"] = "name",
    allow_lossy: bool = False,
    ignore_extra: bool = False,
    verb: str = "export",
) -> list[ColumnMap]:
    """Fill each target column, in the target's order, from the source.

    Optional target columns that the source does not have become NULL. Names match exactly.
    Raises: Invalid, with one sentence for each column that does not fit.
    """
    problems = list(repeated_names(source))
    pairs, extra = _pairs(source.columns, target_schema["fields"], by)
    columns = []
    for target, found in pairs:
        if found is None:
            fit = _unfilled(target, source, verb)
        else:
            fit = _fit_column(found, target, source, allow_lossy, ignore_extra)
        problems += fit.problems
        columns.append(_column_map(target, found, fit.lossy))
    if ignore_extra and extra and all(found is None for _, found in pairs):
        raise Invalid(
            f"cannot {verb} {source.name}: it has no column of the target",
            hint=f"it has {_listed(column.name for column in source.columns)};"
            f" the target has {_listed(field['name'] for field in target_schema['fields'])}",
        )
    if not ignore_extra:
        problems += (_extra_column(column, target_schema["fields"]) for column in extra)
    refuse(f"cannot {verb} {source.name}", problems)
    return columns


def _listed(names: Iterable[str]) -> str:
    """Names in a sentence; of very many the first."""
    first = list(islice(names, MOST_LISTED + 1))
    return ", ".join(first[:MOST_LISTED]) + (", …" if len(first) > MOST_LISTED else "")


def _column_map(target: Json, source: SourceColumn | None, lossy: bool) -> ColumnMap:
    return ColumnMap(
        target=target["name"],
        field_id=target["id"],
        type=target["type"],
        required=target["required"],
        source=source.name if source else None,
        source_type=source.native_type if source else None,
        lossy=lossy,
    )


def refuse(what: str, problems: Sequence[str]) -> None:
    if len(problems) == 1:
        raise Invalid(f"{what}: {problems[0]}")
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise Invalid(f"{what}: {len(problems)} columns do not fit{lines}")


def repeated_names(source: SourceTable) -> Iterator[str]:
    for name, count in Counter(column.name for column in source.columns).items():
        if count > 1:
            yield f'column "{name}" is there {count} times in the source; rename them {source.place}'


def _pairs(
    columns: Sequence[SourceColumn], fields: Sequence[Json], by: str
) -> tuple[list[tuple[Json, SourceColumn | None]], list[SourceColumn]]:
    """Each target field with its source column, and the source columns that are left over."""
    if by == "position":
        padded = [*columns, *[None] * max(0, len(fields) - len(columns))]
        return list(zip(fields, padded, strict=False)), list(columns[len(fields) :])
    by_name = {column.name: column for column in columns}
    wanted = {field["name"] for field in fields}
    return (
        [(field, by_name.get(field["name"])) for field in fields],
        [column for column in columns if column.name not in wanted],
    )


def _unfilled(target: Json, source: SourceTable, verb: str) -> _Fit:
    if not target["required"]:
        return _Fit(_unwritable(target))
    sentence = f'the target requires column "{target["name"]}", and the source has none of that name'
    near = nearest_name(target["name"], [column.name for column in source.columns])
    if near is not None:
        by_position = ", or pass --match position" if verb == "export" else ""
        return _Fit([f'{sentence}; it has "{near}". Rename it {source.place}{by_position}.'])
    return _Fit([f"{sentence}. Add it {source.place}, or make it optional in the target."])


def _unwritable(target: Json) -> list[str]:
    try:
        arrow_type(target["type"])
    except Invalid as error:
        return [f'cannot fill column "{target["name"]}" of the target with NULL: {error.message}']
    return []


def _extra_column(column: SourceColumn, fields: Sequence[Json]) -> str:
    sentence = f'the target has no column "{column.name}" ({column.native_type})'
    near = nearest_name(column.name, [field["name"] for field in fields])
    meant = f'; it has "{near}", and names must be equal' if near is not None else ""
    return f"{sentence}{meant}. Pass --ignore-extra to leave it out, or add it to the target."


def nearest_name(name: str, names: Sequence[str]) -> str | None:
    for candidate in names:
        if candidate.casefold() == name.casefold():
            return candidate
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    return found[0] if found else None


# Does a type fit


@dataclass(frozen=True)
class _Fit:
    problems: Sequence[str] = ()
    lossy: bool = False


@dataclass(frozen=True)
class _Misfit:
    """One place where a type does not fit; `loss` where --allow-lossy would accept it."""

    path: str
    reason: str
    loss: bool = False


def _fit_column(
    column: SourceColumn, target: Json, source: SourceTable, allow_lossy: bool, ignore_extra: bool
) -> _Fit:
    name, wanted = column.name, target["type"]
    kind = column.type
    problems = []
    if column.nullable and target["required"]:
        problems.append(
            f'cannot store column "{name}": it is {column.native_type} and may be NULL, but'
            f' "{target["name"]}" is required in the target. Make that optional, or {source.null_advice}.'
        )
    if kind is None:
        if column.lossy_type is None or not allow_lossy:
            return _Fit([*problems, inexact_column(column, source.place)])
        kind = column.lossy_type
    misfits = list(_misfits(kind, wanted, "", ignore_extra))
    for misfit in misfits:
        if not (misfit.loss and allow_lossy):
            problems.append(_misfit_text(column, wanted, misfit, source.place))
    return _Fit(problems, lossy=column.type is None or any(misfit.loss for misfit in misfits))


def inexact_column(column: SourceColumn, place: str) -> str:
    """Why no Iceberg type holds a column exactly, and what to do."""
    advice = column.advice or f"Cast it {place}, or leave it out there."
    if column.lossy_type is not None:
        stored = type_text(column.lossy_type)
        advice = f"Pass --allow-lossy to store it as {stored}, or cast it {place}."
    return f'cannot store column "{column.name}": it is {column.native_type}; {column.problem}. {advice}'


def _misfit_text(column: SourceColumn, wanted: IcebergType, misfit: _Misfit, place: str) -> str:
    where = f" at {misfit.path}" if misfit.path else ""
    advice = f"Cast it {place}, or change the target's type."
    if misfit.loss:
        advice = f"Pass --allow-lossy to store it all the same, or cast it {place}."
    return (
        f'cannot store column "{column.name}": it is {column.native_type}; the target has {type_text(wanted)}'
        f"{where}, {misfit.reason}. {advice}"
    )


def _misfits(have: IcebergType, want: IcebergType, path: str, ignore_extra: bool) -> Iterator[_Misfit]:
    if isinstance(have, dict) and isinstance(want, dict) and have.get("type") == want.get("type"):
        yield from _nested_misfits(have, want, path, ignore_extra)
    elif isinstance(have, str) and isinstance(want, str):
        misfit = _primitive_misfit(have, want)
        if misfit is not None:
            yield replace(misfit, path=path)
    else:
        yield _Misfit(path, f"which cannot hold {type_text(have)}")


def _nested_misfits(have: Json, want: Json, path: str, ignore_extra: bool) -> Iterator[_Misfit]:
    match want["type"]:
        case "list":
            inside = path_inside(path, "element")
            yield from _null_misfit(have["element-required"], want["element-required"], inside)
            yield from _misfits(have["element"], want["element"], inside, ignore_extra)
        case "map":
            inside = path_inside(path, "value")
            yield from _misfits(have["key"], want["key"], path_inside(path, "key"), ignore_extra)
            yield from _null_misfit(have["value-required"], want["value-required"], inside)
            yield from _misfits(have["value"], want["value"], inside, ignore_extra)
        case "struct":
            yield from _struct_misfits(have, want, path, ignore_extra)
        case other:
            yield _Misfit(path, f"and Lockstep does not write {other}")


def _struct_misfits(have: Json, want: Json, path: str, ignore_extra: bool) -> Iterator[_Misfit]:
    members = {field["name"]: field for field in have["fields"]}
    for field in want["fields"]:
        inside = path_inside(path, field["name"])
        member = members.pop(field["name"], None)
        if member is None:
            if field["required"]:
                yield _Misfit(inside, "which the source does not have")
            continue
        yield from _null_misfit(member["required"], field["required"], inside)
        yield from _misfits(member["type"], field["type"], inside, ignore_extra)
    if not ignore_extra:
        for name in members:
            yield _Misfit(path, f'which has no field "{name}" (--ignore-extra leaves it out)')


def path_inside(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _null_misfit(have_required: bool, want_required: bool, path: str) -> Iterator[_Misfit]:
    if want_required and not have_required:
        yield _Misfit(path, "which is required, and the source may have NULL there")


_WHOLE_DIGITS: Final = {"int": 10, "long": 19}
_EXACT: Final = frozenset(
    {("int", "long"), ("int", "double"), ("float", "double"), ("string", "binary"), ("uuid", "fixed[16]")}
    | {("fixed[16]", "uuid")}
)
_LOSSY: Final = {
    ("long", "int"): "which holds 32 bits",
    ("double", "float"): "which holds 24 binary digits",
    ("int", "float"): "which holds 24 binary digits",
    ("long", "float"): "which holds 24 binary digits",
    ("long", "double"): "which holds 53 binary digits",
    ("timestamp_ns", "timestamp"): "which holds microseconds",
    ("timestamptz_ns", "timestamptz"): "which holds microseconds",
}
_ZONED: Final = {"timestamptz": True, "timestamptz_ns": True, "timestamp": False, "timestamp_ns": False}


def _primitive_misfit(have: str, want: str) -> _Misfit | None:
    have, want = spelled(have), spelled(want)
    if have == want or (have, want) in _EXACT:
        return None
    if want == "binary" and fixed_of(have) is not None:
        return None
    if (have, want) in _LOSSY:
        return _Misfit("", _LOSSY[have, want], loss=True)
    if (digits := decimal_of(want)) is not None and (have in _WHOLE_DIGITS or decimal_of(have)):
        return _decimal_misfit(decimal_of(have) or (_WHOLE_DIGITS[have], 0), digits)
    if (digits := decimal_of(have)) is not None:
        return _decimal_as(digits, want)
    if have in _ZONED and want in _ZONED and _ZONED[have] != _ZONED[want]:
        if _ZONED[have]:
            return _Misfit(
                "",
                f"a wall-clock time; the source's {have} is an instant, and no zone to read it in is known",
            )
        return _Misfit("", f"an instant; the source's {have} is a wall-clock time of no known zone")
    return _Misfit("", f"which cannot hold {have}")


def spelled(kind: str) -> str:
    """One spelling for each type: Iceberg's writers differ in blanks."""
    if (digits := decimal_of(kind)) is not None:
        return f"decimal({digits[0]}, {digits[1]})"
    if (width := fixed_of(kind)) is not None:
        return f"fixed[{width}]"
    return kind


def _decimal_misfit(have: tuple[int, int], want: tuple[int, int]) -> _Misfit | None:
    if want[0] - want[1] < have[0] - have[1]:
        return _Misfit("", f"which holds {want[0] - want[1]} digits before the point", loss=True)
    if want[1] < have[1]:
        return _Misfit("", f"which holds {want[1]} digits after the point", loss=True)
    return None


def _decimal_as(digits: tuple[int, int], want: str) -> _Misfit | None:
    if want in _WHOLE_DIGITS and digits[1] == 0:
        if digits[0] < _WHOLE_DIGITS[want]:
            return None
        return _Misfit("", f"which holds {'64' if want == 'long' else '32'} bits", loss=True)
    if want in ("float", "double"):
        return _Misfit("", "which is not exact for decimals", loss=True)
    return _Misfit("", f"which cannot hold decimal({digits[0]}, {digits[1]})")
