"""Avro's types as Arrow's, and decoded values as arrays of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

Schema = Any
"""Avro's own JSON: a name, a union, or an object."""

_PRIMITIVES: Final[dict[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_LOGICAL: Final[dict[tuple[str, str], pa.DataType]] = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.time32("ms"),
    ("long", "time-micros"): pa.time64("us"),
    ("long", "timestamp-millis"): pa.timestamp("ms", "UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", "UTC"),
    ("long", "local-timestamp-millis"): pa.timestamp("ms"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
    ("string", "uuid"): pa.uuid(),
}


class Unsupported(Exception):
    """A type that no column can hold, and why."""


@dataclass(frozen=True)
class AvroType:
    """A column: its Arrow type (None: `problem` says why), and how its values become what Arrow takes."""

    text: str
    arrow: pa.DataType | None
    nullable: bool
    problem: str | None = None
    prepare: Callable[[Any], Any] | None = None

    def array(self, values: Sequence[Any]) -> pa.Array:
        if self.prepare is not None:
            values = [None if value is None else self.prepare(value) for value in values]
        if isinstance(self.arrow, pa.BaseExtensionType):
            return pa.ExtensionArray.from_storage(self.arrow, pa.array(values, self.arrow.storage_type))
        return pa.array(values, self.arrow)


def read_types(record: Schema) -> dict[str, AvroType]:
    """The columns of a record schema."""
    named: dict[str, Schema] = {}
    _note_names(record, named)
    return {field["name"]: _column(field["type"], named) for field in record["fields"]}


def _note_names(schema: Schema, named: dict[str, Schema], space: str = "") -> None:
    """Collect the named types: later uses of them are only names."""
    if isinstance(schema, list):
        for one in schema:
            _note_names(one, named, space)
    if not isinstance(schema, dict):
        return
    if schema.get("type") in ("record", "enum", "fixed"):
        name = schema["name"]
        space = schema.get("namespace", name.rpartition(".")[0] or space)
        named[name.rpartition(".")[2]] = schema
        named[f"{space}.{name.rpartition('.')[2]}" if space else name] = schema
    for field in schema.get("fields", ()):
        _note_names(field["type"], named, space)
    for part in ("items", "values", "type"):
        if isinstance(schema.get(part), dict | list):
            _note_names(schema[part], named, space)


def _column(schema: Schema, named: dict[str, Schema]) -> AvroType:
    inner, nullable = _without_null(schema)
    text = _text(inner)
    try:
        arrow, prepare = _type(inner, named, ())
    except Unsupported as error:
        return AvroType(text, None, nullable, str(error))
    return AvroType(text, arrow, nullable, None, prepare)


def _text(schema: Schema) -> str:
    if isinstance(schema, dict):
        return str(schema.get("logicalType") or _text(schema.get("type")))
    return " or ".join(map(_text, schema)) if isinstance(schema, list) else str(schema)


def _without_null(schema: Schema) -> tuple[Schema, bool]:
    if not isinstance(schema, list):
        return schema, schema == "null"
    others = [one for one in schema if one != "null"]
    return (others[0] if len(others) == 1 else others), len(others) < len(schema)


Typed = tuple[pa.DataType, Callable[[Any], Any] | None]


def _type(schema: Schema, named: dict[str, Schema], above: tuple[int, ...]) -> Typed:
    """The Arrow type, and what to do to a value first. Raises: Unsupported."""
    schema, _ = _without_null(schema)
    if isinstance(schema, list):
        raise Unsupported("Iceberg has no unions" if schema else "it holds nothing but null")
    if isinstance(schema, str):
        if schema in _PRIMITIVES:
            return _PRIMITIVES[schema], None
        if schema not in named:
            raise Unsupported(
                "it was written without any value" if schema == "null" else f"{schema} is unknown"
            )
        schema = named[schema]
    if id(schema) in above:
        raise Unsupported("it contains itself, and Iceberg has no such type")
    return _complex(schema, named, (*above, id(schema)))


def _complex(schema: dict[str, Any], named: dict[str, Schema], above: tuple[int, ...]) -> Typed:
    kind, logical = schema["type"], schema.get("logicalType")
    if logical == "decimal":
        return _decimal(schema), None
    if (found := _LOGICAL.get((str(kind), str(logical)))) is not None:
        return (found, _uuid_bytes) if logical == "uuid" else (found, None)
    match kind:
        case "enum":
            return pa.string(), None
        case "fixed":
            if logical == "uuid":
                return pa.uuid(), _uuid_bytes
            return pa.binary(schema["size"]), None
        case "array":
            return _list(*_type(schema["items"], named, above))
        case "map":
            return _map(*_type(schema["values"], named, above))
        case "record":
            return _struct({f["name"]: _type(f["type"], named, above) for f in schema["fields"]})
    return _type(kind, named, above)


def _decimal(schema: dict[str, Any]) -> pa.DataType:
    precision, scale = schema["precision"], schema.get("scale", 0)
    if not 0 < precision <= 76:
        raise Unsupported(f"it has {precision} digits")
    return pa.decimal128(precision, scale) if precision <= 38 else pa.decimal256(precision, scale)


def _uuid_bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return value.bytes if isinstance(value, UUID) else UUID(str(value)).bytes


def _stored(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _list(item: pa.DataType, prepare: Callable[[Any], Any] | None) -> Typed:
    if prepare is None:
        return pa.list_(_stored(item)), None
    return pa.list_(_stored(item)), lambda values: [None if v is None else prepare(v) for v in values]


def _map(item: pa.DataType, prepare: Callable[[Any], Any] | None) -> Typed:
    def pairs(values: dict[str, Any]) -> list[tuple[str, Any]]:
        if prepare is None:
            return list(values.items())
        return [(key, None if v is None else prepare(v)) for key, v in values.items()]

    return pa.map_(pa.string(), _stored(item)), pairs


def _struct(members: dict[str, Typed]) -> Typed:
    kind = pa.struct([pa.field(name, _stored(member)) for name, (member, _) in members.items()])
    steps = {name: prepare for name, (_, prepare) in members.items() if prepare is not None}
    if not steps:
        return kind, None

    def prepared(value: dict[str, Any]) -> dict[str, Any]:
        found = {name: None if value[name] is None else step(value[name]) for name, step in steps.items()}
        return {**value, **found}

    return kind, prepared
