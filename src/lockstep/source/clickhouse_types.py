"""ClickHouse's types: which Iceberg type holds each exactly, and how its values travel.

A type is parsed once into a `ChType`. Three questions are then asked of it: `iceberg_type` (what the
target may be, or why nothing is exact), `cast_expression` (what the server is asked for, so that every
server version delivers the same Arrow), and `natural_array` (what Arrow delivered, as the values mean).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import Corrupt
from lockstep.job import Json

if TYPE_CHECKING:
    import pyarrow as pa

UTC_ZONES: Final = frozenset({"UTC", "Etc/UTC", "GMT", "Etc/GMT", "Etc/UCT", "UCT", "Zulu", "Etc/Zulu"})

_PLAIN: Final = {
    "Bool": "boolean",
    "Int8": "int",
    "Int16": "int",
    "Int32": "int",
    "Int64": "long",
    "UInt8": "int",
    "UInt16": "int",
    "UInt32": "long",
    "UInt64": "decimal(20, 0)",
    "Float32": "float",
    "Float64": "double",
    "BFloat16": "float",
    "String": "string",
    "UUID": "uuid",
    "Date": "date",
    "Date32": "date",
    "DateTime": "timestamptz",
    "Enum8": "string",
    "Enum16": "string",
    "IPv4": "string",
    "IPv6": "string",
}
_WIDE_INTEGERS: Final = {"Int128": 39, "UInt128": 39, "Int256": 77, "UInt256": 78}
_DECIMALS: Final = {"Decimal32": 9, "Decimal64": 18, "Decimal128": 38, "Decimal256": 76}
_GEOMETRY: Final = {
    "Point": "Tuple(Float64, Float64)",
    "Ring": "Array(Tuple(Float64, Float64))",
    "LineString": "Array(Tuple(Float64, Float64))",
    "Polygon": "Array(Array(Tuple(Float64, Float64)))",
    "MultiLineString": "Array(Array(Tuple(Float64, Float64)))",
    "MultiPolygon": "Array(Array(Array(Tuple(Float64, Float64))))",
}
_TEXT_OF: Final = {
    "JSON": "its paths have types of their own in every row",
    "Dynamic": "every row may hold another type",
    "Variant": "every row may hold another type",
}
_REFUSED: Final = {
    "Time": "it may be negative or longer than a day, which Iceberg's time cannot be",
    "Time64": "it may be negative or longer than a day, which Iceberg's time cannot be",
    "AggregateFunction": "it is a state that only ClickHouse's finalizeAggregation makes a value of",
    "Object": "it has no fixed structure",
    "Geometry": "every row may hold another shape",
    "QBit": "its bits are stored transposed, and have no counterpart in Iceberg",
    "Nothing": "it holds no value at all",
}


@dataclass(frozen=True)
class ChType:
    """A parsed type: `Nullable` and `LowCardinality` are flags, the rest is a name with arguments.

    `args` are types for Array, Map and Tuple (whose `names` may be empty), else words: `3`, `'UTC'`.
    """

    name: str
    args: tuple[ChType | str, ...] = ()
    names: tuple[str, ...] = ()
    nullable: bool = False
    low_cardinality: bool = False
    text: str = ""

    @property
    def children(self) -> list[ChType]:
        return [arg for arg in self.args if isinstance(arg, ChType)]

    def walk(self) -> Iterator[ChType]:
        yield self
        for child in self.children:
            yield from child.walk()


# Reading ClickHouse's texts


def tokens(text: str) -> list[str]:
    """Cut a type or a key expression into words, quoted words (kept quoted) and punctuation."""
    found: list[str] = []
    at = 0
    while at < len(text):
        char = text[at]
        if char.isspace():
            at += 1
            continue
        end = at + 1
        if char in "'`\"":
            while end < len(text) and text[end] != char:
                end += 2 if text[end] == "\\" else 1
            end += 1
        elif char.isalnum() or char in "_.":
            while end < len(text) and (text[end].isalnum() or text[end] in "_."):
                end += 1
        found.append(text[at:end])
        at = end
    return found


def unquote(word: str) -> str:
    """The name or the text behind a quoted word; any other word as it is."""
    if len(word) < 2 or word[0] not in "'`\"" or word[-1] != word[0]:
        return word
    escapes = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "b": "\b", "f": "\f", "a": "\a", "v": "\v"}
    out: list[str] = []
    inner = iter(word[1:-1])
    for char in inner:
        if char != "\\":
            out.append(char)
            continue
        escaped = next(inner, "")
        out.append(escapes.get(escaped, escaped))
    return "".join(out)


def quote_name(name: str) -> str:
    """A name as ClickHouse reads it back, whatever it holds."""
    return "`" + _escaped(name, "`") + "`"


def quote_text(text: str) -> str:
    return "'" + _escaped(text, "'") + "'"


def _escaped(text: str, mark: str) -> str:
    special = {"\\": "\\\\", mark: "\\" + mark, "\n": "\\n", "\t": "\\t", "\r": "\\r", "\0": "\\0"}
    return "".join(special.get(char, char) for char in text)


def split_top_level(words: Sequence[str]) -> list[list[str]]:
    """Cut words at the commas that no bracket encloses."""
    pieces: list[list[str]] = [[]]
    depth = 0
    for word in words:
        depth += (word in {"(", "["}) - (word in {")", "]"})
        if word == "," and depth == 0:
            pieces.append([])
        else:
            pieces[-1].append(word)
    return [piece for piece in pieces if piece]


def parse_type(text: str) -> ChType:
    """Read a type as `system.columns` prints it. An unknown one comes back by its name."""
    return _parse(tokens(text), text)


def _parse(words: Sequence[str], text: str = "") -> ChType:
    name = words[0]
    text = text or _spelled(words)
    inside = split_top_level(words[2:-1]) if len(words) > 2 and words[1] == "(" else []
    if name in {"Nullable", "LowCardinality"}:
        inner = _parse(inside[0])
        return ChType(
            inner.name,
            inner.args,
            inner.names,
            inner.nullable or name == "Nullable",
            inner.low_cardinality or name == "LowCardinality",
            text,
        )
    if name == "SimpleAggregateFunction":
        inner = _parse(inside[-1])
        return ChType(inner.name, inner.args, inner.names, inner.nullable, inner.low_cardinality, text)
    if name in _GEOMETRY:
        shape = parse_type(_GEOMETRY[name])
        return ChType(shape.name, shape.args, shape.names, text=text)
    if name in {"Tuple", "Nested"}:
        return _parse_tuple(name, inside, text)
    if name in {"Array", "Map"}:
        return ChType(name, tuple(_parse(piece) for piece in inside), text=text)
    return ChType(name, tuple(_spelled(piece) for piece in inside), text=text)


def _parse_tuple(name: str, inside: Sequence[Sequence[str]], text: str) -> ChType:
    # An element is `name Type` or `Type`; a type is one word, or a word and a bracket.
    named = all(len(piece) > 1 and piece[1] != "(" for piece in inside) and bool(inside)
    elements = tuple(_parse(piece[1:] if named else piece) for piece in inside)
    names = tuple(unquote(piece[0]) for piece in inside) if named else ()
    row = ChType("Tuple", elements, names, text=text)
    return ChType("Array", (row,), text=text) if name == "Nested" else row


def _spelled(words: Sequence[str]) -> str:
    out = ""
    for word in words:
        tight = word in "(),[]" or not out or out[-1] in "(["
        out += (word if tight else " " + word) if word != "," else ","
    return out


# What Iceberg may hold


@dataclass(frozen=True)
class Mapped:
    """An exact Iceberg type, or None with the reason and what `--allow-lossy` would store."""

    exact: str | Json | None
    lossy: str | Json | None = None
    problem: str | None = None

    @property
    def stored(self) -> str | Json | None:
        return self.exact if self.exact is not None else self.lossy


def iceberg_type(kind: ChType) -> Mapped:
    """The Iceberg type of a ClickHouse type. Field ids inside nested types are 0: the target gives them."""
    if kind.name in {"Array", "Map", "Tuple"}:
        return _nested_type(kind)
    if kind.name in _PLAIN:
        return Mapped(_PLAIN[kind.name])
    if kind.name == "FixedString":
        return Mapped(f"fixed[{kind.args[0]}]")
    if kind.name == "Decimal" or kind.name in _DECIMALS:
        precision, scale = decimal_digits(kind)
        if precision <= 38:
            return Mapped(f"decimal({precision}, {scale})")
        return Mapped(None, "double", "Iceberg holds 38 digits")
    if kind.name in _WIDE_INTEGERS:
        return Mapped(None, "double", f"it has up to {_WIDE_INTEGERS[kind.name]} digits, Iceberg holds 38")
    if kind.name == "DateTime64":
        if scale_of(kind) <= 6:
            return Mapped("timestamptz")
        return Mapped(None, "timestamptz", "Iceberg's timestamptz holds microseconds")
    if kind.name in _TEXT_OF:
        return Mapped(None, "string", _TEXT_OF[kind.name])
    if kind.name.startswith("Interval"):
        return Mapped(None, "long", "Iceberg has no intervals, only the bare number can be stored")
    return Mapped(None, None, _REFUSED.get(kind.name, "Lockstep does not know this type"))


def _nested_type(kind: ChType) -> Mapped:
    children = [iceberg_type(child) for child in kind.children]
    if kind.name == "Tuple" and not children:
        return Mapped(None, None, "Iceberg has no struct without fields")
    problem = next(
        (
            f"it contains {child.text}: {mapped.problem}" if not child.children else mapped.problem
            for child, mapped in zip(kind.children, children, strict=True)
            if mapped.exact is None
        ),
        None,
    )
    stored = [child.stored for child in children]
    whole = None if any(one is None for one in stored) else _nested_json(kind, stored)
    return Mapped(whole) if problem is None else Mapped(None, whole, problem)


def _nested_json(kind: ChType, stored: Sequence[Any]) -> Json:
    children = kind.children
    if kind.name == "Array":
        return {
            "type": "list",
            "element-id": 0,
            "element": stored[0],
            "element-required": not children[0].nullable,
        }
    if kind.name == "Map":
        return {
            "type": "map",
            "key-id": 0,
            "key": stored[0],
            "value-id": 0,
            "value": stored[1],
            "value-required": not children[1].nullable,
        }
    return {
        "type": "struct",
        "fields": [
            {"id": 0, "name": name, "required": not child.nullable, "type": one}
            for name, child, one in zip(field_names(kind), children, stored, strict=True)
        ],
    }


def field_names(kind: ChType) -> tuple[str, ...]:
    return kind.names or tuple(str(i + 1) for i in range(len(kind.args)))


def decimal_digits(kind: ChType) -> tuple[int, int]:
    words = [int(str(arg)) for arg in kind.args]
    if kind.name == "Decimal":
        return (words[0] if words else 10), (words[1] if len(words) > 1 else 0)
    return _DECIMALS[kind.name], words[0]


def scale_of(kind: ChType) -> int:
    return int(str(kind.args[0])) if kind.args else 3


def zone_of(kind: ChType) -> str | None:
    """The time zone that a DateTime or DateTime64 names, or None if it takes the server's."""
    words = [str(arg) for arg in kind.args if str(arg).startswith("'")]
    return unquote(words[-1]) if words else None


# How values travel


def cast_expression(expression: str, kind: ChType) -> str:
    """What to select so that the value arrives exactly, on any server version."""
    wanted = _transport(kind, top=True)
    return expression if wanted is None else f"CAST({expression}, {quote_text(wanted)})"


def _transport(kind: ChType, *, top: bool) -> str | None:
    """The ClickHouse type to cast to before sending, or None where the value travels as it is."""
    if kind.children:
        inner = [_transport(child, top=False) for child in kind.children]
        return None if not any(inner) else _transport_text(kind, top=top)
    return None if _leaf(kind) == kind.name and not kind.low_cardinality else _transport_text(kind, top=top)


def _transport_text(kind: ChType, *, top: bool) -> str:
    if kind.children:
        inner = [_transport_text(child, top=False) for child in kind.children]
        if kind.names:
            inner = [f"{quote_name(n)} {t}" for n, t in zip(kind.names, inner, strict=True)]
        text = f"{kind.name}({', '.join(inner)})"
        return f"Nullable({text})" if kind.nullable else text
    text = _leaf(kind)
    if text == kind.name and kind.args:
        text = f"{kind.name}({', '.join(map(str, kind.args))})"
    if kind.nullable or kind.name in {"Dynamic", "Variant"}:
        text = f"Nullable({text})"
    # A few distinct texts travel as a dictionary; anything else unpacked, which every server does.
    few = kind.name.startswith("Enum") or (kind.low_cardinality and kind.name == "String")
    return f"LowCardinality({text})" if few and top else text


def _leaf(kind: ChType) -> str:
    name = kind.name
    if name in {"IPv4", "IPv6", "Enum8", "Enum16"} or name in _TEXT_OF:
        return "String"
    if name == "BFloat16":
        return "Float32"
    if name == "UUID":
        # Servers differ in the byte order of a UUID in Arrow; an integer has one order everywhere.
        return "UInt128"
    if name == "DateTime" or (name == "DateTime64" and scale_of(kind) > 6):
        return "DateTime64(6, 'UTC')"
    if name in _WIDE_INTEGERS or (name.startswith("Decimal") and decimal_digits(kind)[0] > 38):
        return "Float64"
    return "Int64" if name.startswith("Interval") else name


# What arrived


def natural_type(kind: ChType, target: str | Json | None = None) -> pa.DataType:
    """The Arrow type of a column as its values mean it; a String for a `binary` target stays bytes."""
    import pyarrow as pa

    simple = {
        "Bool": pa.bool_(),
        "Int8": pa.int8(),
        "Int16": pa.int16(),
        "Int32": pa.int32(),
        "Int64": pa.int64(),
        "UInt8": pa.uint8(),
        "UInt16": pa.uint16(),
        "UInt32": pa.uint32(),
        "UInt64": pa.uint64(),
        "Float32": pa.float32(),
        "Float64": pa.float64(),
        "BFloat16": pa.float32(),
        "UUID": pa.binary(16),
        "Date": pa.date32(),
        "Date32": pa.date32(),
        "DateTime": pa.timestamp("us", "UTC"),
        "DateTime64": pa.timestamp("us", "UTC"),
    }
    name = kind.name
    if name in simple:
        return simple[name]
    if name == "FixedString":
        return pa.binary(int(str(kind.args[0])))
    if name.startswith("Decimal"):
        precision, scale = decimal_digits(kind)
        return pa.decimal128(precision, scale) if precision <= 38 else pa.float64()
    if name in _WIDE_INTEGERS:
        return pa.float64()
    if name.startswith("Interval"):
        return pa.int64()
    if kind.children:
        return _natural_nested(kind, target)
    return pa.binary() if target == "binary" else pa.string()


def _natural_nested(kind: ChType, target: str | Json | None) -> pa.DataType:
    import pyarrow as pa

    raw = target if isinstance(target, dict) else {}
    children = kind.children
    if kind.name == "Array":
        element = natural_type(children[0], raw.get("element"))
        return pa.list_(pa.field("item", element, nullable=children[0].nullable))
    if kind.name == "Map":
        key = natural_type(children[0], raw.get("key"))
        value = natural_type(children[1], raw.get("value"))
        return pa.map_(key, pa.field("value", value, nullable=children[1].nullable))
    types = {one["name"]: one["type"] for one in raw.get("fields", ())}
    return pa.struct(
        [
            pa.field(name, natural_type(child, types.get(name)), nullable=child.nullable)
            for name, child in zip(field_names(kind), children, strict=True)
        ]
    )


def natural_array(array: pa.Array, kind: ChType, column: str, target: str | Json | None = None) -> pa.Array:
    """A column as it arrived, turned into `natural_type`. Dictionaries of texts stay dictionaries.

    Raises: Corrupt if a String holds bytes that are not UTF-8, or a value does not fit.
    """
    import pyarrow as pa

    wanted = natural_type(kind, target)
    if any(one.name == "UUID" for one in kind.walk()):
        array = _swap_uuids(array, kind)
    if array.type == wanted:
        return array
    try:
        if isinstance(array, pa.DictionaryArray):
            return pa.DictionaryArray.from_arrays(array.indices, array.dictionary.cast(wanted))
        return array.cast(wanted)
    except pa.ArrowInvalid as error:
        if "UTF8" in str(error).upper().replace("-", ""):
            raise Corrupt(
                f'column "{column}" ({kind.text}) holds bytes that are not UTF-8; an Iceberg string must be',
                hint="make the target column binary, or export a copy of the table with the column cast "
                "(hex, base64Encode or toValidUTF8)",
            ) from error
        raise Corrupt(f'column "{column}" ({kind.text}): {error}') from error


def _swap_uuids(array: pa.Array, kind: ChType) -> pa.Array:
    """UUIDs travel as little-endian integers: give them the order that they are written in."""
    import pyarrow as pa

    children = kind.children
    if kind.name == "UUID":
        return _reversed_bytes(array)
    if not children:
        return array
    if kind.name == "Array":
        item = array.type.value_field
        values = _swap_uuids(array.values, children[0])
        # An Array is never NULL in ClickHouse, only its elements may be.
        return pa.ListArray.from_arrays(array.offsets, values, type=pa.list_(item.with_type(values.type)))
    if kind.name == "Map":
        keys, items = _swap_uuids(array.keys, children[0]), _swap_uuids(array.items, children[1])
        value = pa.field("value", items.type, nullable=children[1].nullable)
        return pa.MapArray.from_arrays(array.offsets, keys, items, type=pa.map_(keys.type, value))
    columns = [_swap_uuids(array.field(i), child) for i, child in enumerate(children)]
    fields = [array.type.field(i).with_type(column.type) for i, column in enumerate(columns)]
    mask = array.is_null() if array.null_count else None
    return pa.StructArray.from_arrays(columns, fields=fields, mask=mask)


def _reversed_bytes(array: pa.Array) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    validity, data = array.buffers()
    if data is None or len(array) == 0:
        return array
    rows = np.frombuffer(data, dtype=np.uint8)[: 16 * (array.offset + len(array))].reshape(-1, 16)
    swapped = pa.py_buffer(np.ascontiguousarray(rows[:, ::-1]))
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(16), len(array), [validity, swapped], offset=array.offset
    )
