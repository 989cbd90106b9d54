"""Arrow types as Iceberg types: which one holds every value of a column, or why none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from lockstep.arrow_types import MOST_DIGITS, IcebergType, is_list
from lockstep.job import Json


@dataclass(frozen=True)
class Exact:
    """The Iceberg type that holds every value of an Arrow type; where there is none, why, and what would
    hold most of it. Field ids of nested types are 0: they belong to a table, not to a source."""

    type: IcebergType | None
    problem: str | None = None
    lossy_type: IcebergType | None = None


_EXACT: Final[dict[pa.DataType, str]] = {
    pa.bool_(): "boolean",
    pa.int8(): "int",
    pa.int16(): "int",
    pa.int32(): "int",
    pa.int64(): "long",
    pa.uint8(): "int",
    pa.uint16(): "int",
    pa.uint32(): "long",
    pa.uint64(): "decimal(20, 0)",
    pa.float16(): "float",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.date32(): "date",
    pa.date64(): "date",
    pa.time32("s"): "time",
    pa.time32("ms"): "time",
    pa.time64("us"): "time",
    pa.string(): "string",
    pa.large_string(): "string",
    pa.string_view(): "string",
    pa.binary(): "binary",
    pa.large_binary(): "binary",
    pa.binary_view(): "binary",
    pa.uuid(): "uuid",
}


def exact_type(kind: pa.DataType) -> Exact:
    """The Iceberg type for an Arrow type as a file or a server delivers it."""
    if (found := _EXACT.get(kind)) is not None:
        return Exact(found)
    if isinstance(kind, pa.BaseExtensionType):
        return exact_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return exact_type(kind.value_type)
    if pa.types.is_timestamp(kind):
        name = "timestamp" if kind.tz is None else "timestamptz"
        return Exact(name) if kind.unit != "ns" else Exact(None, "Iceberg holds microseconds", name)
    if pa.types.is_time(kind):
        return Exact(None, "Iceberg holds microseconds", "time")
    if pa.types.is_decimal(kind):
        return _exact_decimal(kind)
    if pa.types.is_fixed_size_binary(kind):
        return Exact(f"fixed[{kind.byte_width}]")
    if pa.types.is_struct(kind):
        return _exact_struct(kind)
    if pa.types.is_map(kind):
        return _exact_members(
            {"type": "map", "key-id": 0, "value-id": 0, "value-required": not kind.item_field.nullable},
            {"key": kind.key_type, "value": kind.item_type},
        )
    if is_list(kind):
        return _exact_members(
            {"type": "list", "element-id": 0, "element-required": not kind.value_field.nullable},
            {"element": kind.value_type},
        )
    if pa.types.is_null(kind):
        return Exact(None, "it was written without any value, so its type is unknown")
    if pa.types.is_duration(kind):
        return Exact(None, "Iceberg has no durations")
    return Exact(None, "Iceberg has no such type")


def _exact_decimal(kind: pa.DataType) -> Exact:
    if kind.scale < 0 and kind.precision - kind.scale <= MOST_DIGITS:
        return Exact(f"decimal({kind.precision - kind.scale}, 0)")
    if kind.precision > MOST_DIGITS or kind.scale < 0:
        return Exact(None, f"Iceberg holds {MOST_DIGITS} digits", "double")
    if kind.scale > kind.precision:
        return (
            Exact(f"decimal({kind.scale}, {kind.scale})")
            if kind.scale <= MOST_DIGITS
            else Exact(None, f"Iceberg holds {MOST_DIGITS} digits", "double")
        )
    return Exact(f"decimal({kind.precision}, {kind.scale})")


def _exact_struct(kind: pa.StructType) -> Exact:
    fields = [kind.field(i) for i in range(kind.num_fields)]
    if not fields:
        return Exact(None, "Iceberg has no struct without fields")
    if len({field.name for field in fields}) < len(fields):
        return Exact(None, "it has two fields of the same name")
    members = [exact_type(field.type) for field in fields]
    return _combined(
        members,
        lambda types: {
            "type": "struct",
            "fields": [
                {"id": 0, "name": field.name, "required": not field.nullable, "type": member}
                for field, member in zip(fields, types, strict=True)
            ],
        },
    )


def _exact_members(shell: Json, members: dict[str, pa.DataType]) -> Exact:
    found = [exact_type(kind) for kind in members.values()]
    return _combined(found, lambda types: {**shell, **dict(zip(members, types, strict=True))})


def _combined(members: Sequence[Exact], build: Callable[[Sequence[IcebergType]], Json]) -> Exact:
    if all(member.type is not None for member in members):
        return Exact(build([member.type for member in members if member.type is not None]))
    problem = next(member.problem for member in members if member.type is None)
    stored = [member.type or member.lossy_type for member in members]
    if any(kind is None for kind in stored):
        return Exact(None, problem)
    return Exact(None, problem, build([kind for kind in stored if kind is not None]))
