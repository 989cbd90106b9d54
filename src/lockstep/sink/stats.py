"""Iceberg's column statistics of a data file: from its Parquet footer, and from the rows for the rest.

As Iceberg's own Java writer has them: sizes for every leaf column; counts and bounds for leaves that are
not inside a list or a map; all by the table's metrics modes. The footer is exact for every type
that we write, except that it has no NaN counts, and no bounds for texts and binary beyond a length.

The JSON: `column_sizes`, `value_counts`, `null_value_counts`, `nan_value_counts`, `lower_bounds`,
`upper_bounds` map a field id (as text) to a number, or to base64 of Iceberg's binary form of one value;
`split_offsets` is a list; `sort_order_id` a number or null.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.errors import Corrupt
from lockstep.job import Json
from lockstep.transforms import decimal_bytes

# parquet-cpp leaves min and max out of the footer when they are longer than 4096 bytes together.
FOOTER_BOUND_BYTES: Final = 2048
MOST_INFERRED_COLUMNS: Final = 100

_MODE_DEFAULT: Final = "write.metadata.metrics.default"
_MODE_COLUMN: Final = "write.metadata.metrics.column."
_MODE_INFERRED: Final = "write.metadata.metrics.max-inferred-column-defaults"

_PACKED: Final = {
    "int": "<i",
    "date": "<i",
    "long": "<q",
    "time": "<q",
    "timestamp": "<q",
    "timestamptz": "<q",
    "timestamp_ns": "<q",
    "timestamptz_ns": "<q",
    "float": "<f",
    "double": "<d",
}
# Readers disagree on how UUIDs compare (some as signed numbers), and a bound that is read in another order
# hides rows: neither manifests nor footers have one. The other types have no order at all.
_WITHOUT_BOUNDS: Final = {"unknown", "variant", "geometry", "geography", "uuid"}


@dataclass(frozen=True)
class Leaf:
    """A column of the Parquet file: a primitive field of the table's schema, however deep.

    `steps` leads to it: the column's place in the file, then the place in each struct; None inside a list
    or a map.
    """

    field_id: int
    name: str
    type: str
    steps: tuple[int, ...] | None

    @property
    def kind(self) -> str:
        return re.split(r"[(\[]", self.type, maxsplit=1)[0].strip()

    @property
    def in_footer(self) -> bool:
        """Whether the Parquet footer has statistics of it."""
        return self.kind != "uuid"


def leaves_of(fields: Sequence[Json]) -> list[Leaf]:
    """The leaf columns of Iceberg fields, in the order in which a Parquet file has them."""
    return [leaf for at, field in enumerate(fields) for leaf in _leaves(field, "", (at,))]


def _leaves(field: Json, above: str, steps: tuple[int, ...] | None) -> Iterator[Leaf]:
    name = above + str(field["name"])
    yield from _leaves_of_type(field["type"], int(field["id"]), name, steps)


def _leaves_of_type(
    type_: str | Json, field_id: int, name: str, steps: tuple[int, ...] | None
) -> Iterator[Leaf]:
    if isinstance(type_, str):
        yield Leaf(field_id, name, type_, steps)
    elif type_["type"] == "struct":
        for at, child in enumerate(type_["fields"]):
            yield from _leaves(child, f"{name}.", None if steps is None else (*steps, at))
    elif type_["type"] == "list":
        yield from _leaves_of_type(type_["element"], type_["element-id"], f"{name}.element", None)
    else:
        yield from _leaves_of_type(type_["key"], type_["key-id"], f"{name}.key", None)
        yield from _leaves_of_type(type_["value"], type_["value-id"], f"{name}.value", None)


# Metrics modes


@dataclass(frozen=True)
class Mode:
    """How much of a column's statistics the table wants. `length` is N of truncate(N)."""

    counts: bool
    bounds: bool = False
    length: int | None = None


NONE: Final = Mode(counts=False)
COUNTS: Final = Mode(counts=True)
FULL: Final = Mode(counts=True, bounds=True)
TRUNCATE_16: Final = Mode(counts=True, bounds=True, length=16)


def parse_mode(text: str, fallback: Mode) -> Mode:
    """Read `none`, `counts`, `truncate(N)` or `full`; anything else is the fallback, as Iceberg has it."""
    cleaned = text.strip().lower()
    known = {"none": NONE, "counts": COUNTS, "full": FULL}
    if cleaned in known:
        return known[cleaned]
    match = re.fullmatch(r"truncate\((\d+)\)", cleaned)
    if match and int(match[1]) > 0:
        return Mode(counts=True, bounds=True, length=int(match[1]))
    return fallback


def modes_of(schema: Json, sort_order: Json, properties: Mapping[str, Any]) -> dict[int, Mode]:
    """The metrics mode of each leaf column, by the rules of Iceberg's Java writer.

    A wide table without a default of its own has metrics for its first columns only; a sorted column
    always has bounds, unless the user says otherwise.
    """
    leaves = leaves_of(schema["fields"])
    stated = properties.get(_MODE_DEFAULT)
    default = TRUNCATE_16 if stated is None else parse_mode(str(stated), TRUNCATE_16)
    modes = {leaf.field_id: default for leaf in leaves}
    most = _inferred_limit(properties)
    if stated is None and len(schema["fields"]) > most:
        inferred = {leaf.field_id for leaf in leaves_of(schema["fields"][:most])}
        default = NONE
        modes = {leaf.field_id: TRUNCATE_16 if leaf.field_id in inferred else NONE for leaf in leaves}
    sorted_mode = default if default.bounds else TRUNCATE_16
    for each in sort_order.get("fields", ()):
        if each["source-id"] in modes and not str(each["transform"]).startswith("bucket"):
            modes[each["source-id"]] = sorted_mode
    for leaf in leaves:
        override = properties.get(_MODE_COLUMN + leaf.name)
        if override is not None:
            modes[leaf.field_id] = parse_mode(str(override), default)
    return modes


def _inferred_limit(properties: Mapping[str, Any]) -> int:
    try:
        limit = int(properties.get(_MODE_INFERRED, MOST_INFERRED_COLUMNS))
    except ValueError:
        return MOST_INFERRED_COLUMNS
    return limit if limit >= 0 else MOST_INFERRED_COLUMNS


# Collecting


class StatsBuilder:
    """Statistics of one file. `note` sees each row group as it is written; `finish` reads the footer."""

    def __init__(self, leaves: Sequence[Leaf], modes: Mapping[int, Mode]) -> None:
        self._leaves = leaves
        self._modes = modes
        self._row_groups = 0
        self._nans = {
            leaf.field_id: 0
            for leaf in leaves
            if leaf.kind in ("float", "double") and leaf.steps is not None and modes[leaf.field_id].counts
        }
        self._nulls = {leaf.field_id: 0 for leaf in leaves if leaf.steps is not None and not leaf.in_footer}
        self._long_bounds: dict[tuple[int, int], list[tuple[bytes, bytes]]] = {}
        self._zeros: set[tuple[int, bool]] = set()

    def note(self, rows: pa.Table) -> None:
        """Count what the footer of this row group will not tell. Columns are in the order of the leaves."""
        for leaf in self._leaves:
            if leaf.steps is None:
                continue
            if leaf.field_id in self._nulls:
                self._nulls[leaf.field_id] += sum(chunk.null_count for chunk in _values(rows, leaf.steps))
            elif leaf.field_id in self._nans:
                for chunk in _values(rows, leaf.steps):
                    self._nans[leaf.field_id] += _count_nans(chunk)
                    self._zeros |= {(leaf.field_id, negative) for negative in _signs_of_zero_ends(chunk)}
            elif leaf.kind in ("string", "binary") and self._modes[leaf.field_id].bounds:
                column = list(_values(rows, leaf.steps))
                if any(_longest(chunk) > FOOTER_BOUND_BYTES for chunk in column):
                    self._long_bounds[(self._row_groups, leaf.field_id)] = _byte_bounds(column)
        self._row_groups += 1

    def finish(self, footer: Any, sort_order_id: int | None = None) -> Json:
        """The statistics as JSON, from the file's metadata.

        Raises: Corrupt if the footer is not that of the rows noted.
        """
        if footer.num_columns != len(self._leaves) or footer.num_row_groups != self._row_groups:
            raise Corrupt(
                f"the Parquet footer has {footer.num_columns} columns in {footer.num_row_groups} row groups; "
                f"{len(self._leaves)} in {self._row_groups} were written"
            )
        groups = [footer.row_group(at) for at in range(footer.num_row_groups)]
        stats: Json = {
            "column_sizes": {},
            "value_counts": {},
            "null_value_counts": {},
            "nan_value_counts": {str(field_id): count for field_id, count in self._nans.items()},
            "lower_bounds": {},
            "upper_bounds": {},
            "split_offsets": sorted(_start_of(group.column(0)) for group in groups),
            "sort_order_id": sort_order_id,
        }
        for at, leaf in enumerate(self._leaves):
            self._finish_leaf(stats, leaf, [group.column(at) for group in groups])
        return stats

    def _finish_leaf(self, stats: Json, leaf: Leaf, chunks: Sequence[Any]) -> None:
        mode, key = self._modes[leaf.field_id], str(leaf.field_id)
        if not mode.counts:
            return
        stats["column_sizes"][key] = sum(chunk.total_compressed_size for chunk in chunks)
        if leaf.steps is None:
            return
        stats["value_counts"][key] = sum(chunk.num_values for chunk in chunks)
        stats["null_value_counts"][key] = (
            sum(chunk.statistics.null_count for chunk in chunks)
            if leaf.in_footer
            else self._nulls[leaf.field_id]
        )
        if not mode.bounds or leaf.kind in _WITHOUT_BOUNDS:
            return
        bounds = [bound for at, chunk in enumerate(chunks) for bound in self._chunk_bounds(leaf, at, chunk)]
        if not bounds:
            return
        least, greatest = min(low for low, _ in bounds), max(high for _, high in bounds)
        if leaf.field_id in self._nans:
            # The footer has -0.0 as the least and 0.0 as the greatest zero, whichever were there.
            least = 0.0 if least == 0 and (leaf.field_id, True) not in self._zeros else least
            greatest = -0.0 if greatest == 0 and (leaf.field_id, False) not in self._zeros else greatest
        lower = lower_bound(least, leaf.type, mode.length)
        upper = upper_bound(greatest, leaf.type, mode.length)
        stats["lower_bounds"][key] = base64.b64encode(lower).decode()
        if upper is not None:
            stats["upper_bounds"][key] = base64.b64encode(upper).decode()

    def _chunk_bounds(self, leaf: Leaf, group: int, chunk: Any) -> list[tuple[Any, Any]]:
        """Least and greatest value of a column chunk, in a form that Python compares as Iceberg does."""
        if (long := self._long_bounds.get((group, leaf.field_id))) is not None:
            return list(long)
        found = chunk.statistics
        if found.has_min_max:
            return [(_comparable(found.min_raw, leaf), _comparable(found.max_raw, leaf))]
        only_nans = leaf.kind in ("float", "double")
        if not only_nans and found.null_count < chunk.num_values:
            raise Corrupt(f'the Parquet footer has no bounds for the values of column "{leaf.name}"')
        return []


def _start_of(chunk: Any) -> int:
    first: int = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
        first = min(first, chunk.dictionary_page_offset)
    return first


def _values(rows: pa.Table, steps: tuple[int, ...]) -> Iterable[pa.Array]:
    """The chunks of a leaf that no list or map holds; NULL where a struct above it is."""
    for chunk in rows.column(steps[0]).chunks:
        for step in steps[1:]:
            chunk = pc.struct_field(chunk, [step])
        yield chunk


def _count_nans(values: pa.Array) -> int:
    return int(pc.sum(pc.is_nan(values), min_count=0).as_py())


def _signs_of_zero_ends(values: pa.Array) -> set[bool]:
    """Whether the zeros are negative, where a zero is the least or the greatest number."""
    ends = pc.min_max(values).as_py()
    if ends["min"] != 0 and ends["max"] != 0:
        return set()
    zeros = values.filter(pc.equal(values, 0)).to_numpy(zero_copy_only=False)
    return {bool(negative) for negative in np.unique(np.signbit(zeros))}


def _longest(values: pa.Array) -> int:
    """The length of the longest value in bytes, or a cheap bound where that is small."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary
    whole = int(values.nbytes)
    if whole <= FOOTER_BOUND_BYTES:
        return whole
    return int(pc.max(pc.binary_length(values)).as_py() or 0)


def _byte_bounds(chunks: Sequence[pa.Array]) -> list[tuple[bytes, bytes]]:
    """The least and the greatest value of each chunk that has any."""
    # A dictionary may hold values that no row has.
    plain = [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in chunks]
    ends = [pc.min_max(chunk) for chunk in plain if chunk.null_count < len(chunk)]
    return [(_bytes_of(each["min"]), _bytes_of(each["max"])) for each in ends]


def _bytes_of(value: pa.Scalar) -> bytes:
    return bytes(value.as_buffer())


def _comparable(raw: Any, leaf: Leaf) -> Any:
    """A raw footer value as number or bytes. Decimals are unscaled integers, whatever their physical type."""
    if leaf.kind == "decimal" and isinstance(raw, bytes):
        return int.from_bytes(raw, "big", signed=True)
    return raw


# Iceberg's binary form of single values


def lower_bound(value: Any, type_text: str, length: int | None) -> bytes:
    """A value as bytes; texts and binary cut to `length`, which only makes them less."""
    if length is not None and type_text == "string":
        return _first_code_points(value, length)
    if length is not None and type_text == "binary":
        return bytes(value[:length])
    return single_value(value, type_text)


def upper_bound(value: Any, type_text: str, length: int | None) -> bytes | None:
    """A value as bytes; texts and binary cut to `length` and raised so that nothing is above.

    None where no value of that length is above.
    """
    if length is not None and type_text == "string":
        cut = _first_code_points(value, length)
        return cut if len(cut) == len(value) else _next_text(cut.decode())
    if length is not None and type_text == "binary":
        cut = bytes(value[:length])
        return cut if len(cut) == len(value) else _next_bytes(cut)
    return single_value(value, type_text)


def single_value(value: Any, type_text: str) -> bytes:
    """Iceberg's single-value serialisation. Decimals come unscaled, texts as UTF-8."""
    if type_text == "boolean":
        return b"\x01" if value else b"\x00"
    if type_text in _PACKED:
        return struct.pack(_PACKED[type_text], value)
    if type_text.startswith("decimal"):
        return decimal_bytes(value)
    return bytes(value)


def _first_code_points(text: bytes, count: int) -> bytes:
    """The first characters of UTF-8, without decoding a long text."""
    end = min(len(text), 4 * count)
    while 0 < end < len(text) and text[end] & 0xC0 == 0x80:
        end -= 1
    return text[:end].decode()[:count].encode()


def _next_text(text: str) -> bytes | None:
    """The least text of at most this length that is above every text that begins with `text`."""
    for at in range(len(text) - 1, -1, -1):
        following = ord(text[at]) + 1
        if 0xD800 <= following <= 0xDFFF:  # surrogates are no characters
            following = 0xE000
        if following <= 0x10FFFF:
            return (text[:at] + chr(following)).encode()
    return None


def _next_bytes(data: bytes) -> bytes | None:
    for at in range(len(data) - 1, -1, -1):
        if data[at] < 0xFF:
            return data[:at] + bytes([data[at] + 1])
    return None
