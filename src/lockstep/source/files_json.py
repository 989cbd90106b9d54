"""JSON lines to rows of the target: one object on each line, its fields by name.

Numbers are numbers and texts are texts: "1" is no long, and 1 is no string. Dates, times, UUIDs and bytes are
texts of the form that CSV has too; decimals are numbers, or texts that keep them from being rounded. A field
that is missing is NULL. A field that no column takes makes the record a reject, unless the user leaves out
columns anyway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from decimal import Decimal
from functools import cached_property
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as arrow_json

from lockstep.arrow_types import arrow_schema, type_text
from lockstep.job import ColumnMap
from lockstep.source.files_blocks import Lines
from lockstep.source.files_columns import refuse_where, require_valid, whole_column
from lockstep.source.files_fit import RECORDS_AT_ONCE, Misfit, Unfit, shown
from lockstep.source.files_nested import Misvalue, loads, nested_array, strict_value
from lockstep.source.files_values import as_times, as_timestamps, from_text, is_text_form, misfit_reason

RECORDS: Final = Lines()
_NUMBERS: Final = re.compile(r"int|long|float|double|decimal\(.*")


class JsonParser:
    """Blocks of lines to batches of the target. `names` are the fields that the inputs are known to have."""

    def __init__(self, names: Sequence[str], columns: Sequence[ColumnMap]) -> None:
        self._columns = columns
        self._schema = arrow_schema(columns)
        self._asked = {c.source for c in columns if c.source is not None}
        self._strict = self._asked.issuperset(names)
        self._nested = any(pa.types.is_nested(field.type) for field in self._schema)
        self._read_as = pa.struct(
            [
                pa.field(column.source, _wire_type(field.type))
                for column, field in zip(columns, self._schema, strict=True)
                if column.source is not None
            ]
        )

    def records(self, block: bytes) -> list[tuple[int, int]]:
        return RECORDS.spans(block)

    def ends_open(self, block: bytes) -> bool:
        return RECORDS.ends_open(block)

    def parse(self, block: bytes) -> pa.RecordBatch:
        lines = [line for line in block.split(b"\n") if line.strip(b" \t\r")]
        arrays = self._one_by_one(lines) if self._nested else self._at_once(lines)
        for index, (array, field) in enumerate(zip(arrays, self._schema, strict=True)):
            if array.null_count and not field.nullable:
                refuse_where(array.is_null(), index)
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    # All lines at once, by Arrow's parser

    def _at_once(self, lines: Sequence[bytes]) -> list[pa.Array]:
        try:
            rows = self._structs(lines, self._read_as)
            members = dict(zip((field.name for field in rows.type), rows.flatten(), strict=True))
            return [self._array(members, i, lines) for i in range(len(self._columns))]
        except pa.ArrowInvalid as error:
            raise Unfit(self._first_misfit(lines)) from error

    def _first_misfit(self, lines: Sequence[bytes]) -> int | None:
        """The first line that does not fit alone, where it is quick to find: Arrow does not say it."""
        if not 1 < len(lines) <= RECORDS_AT_ONCE:
            return 0 if len(lines) == 1 else None
        for row, line in enumerate(lines):
            if self._looks_unfit(line):
                try:
                    self._at_once([line])
                except Unfit:
                    return row
        return None

    def _looks_unfit(self, line: bytes) -> bool:
        try:
            record = self._decoded(line)
            for column, field in zip(self._columns, self._schema, strict=True):
                strict_value(record.get(column.source), field.type)
        except Misvalue:
            return True
        return False

    def _structs(self, lines: Sequence[bytes], kind: pa.StructType) -> pa.StructArray:
        """One struct for each line. Raises: pa.ArrowInvalid, Unfit.

        Each line becomes the only field of an object: Arrow takes several values on one line for several
        rows, and does not survive a line that is only `null`.
        """
        if not lines:
            return pa.array([], kind)
        wrapped = b'{"r":' + b'}\n{"r":'.join(lines) + b"}\n"
        table = arrow_json.read_json(
            pa.BufferReader(wrapped),
            arrow_json.ReadOptions(use_threads=False, block_size=len(wrapped) + 1),
            arrow_json.ParseOptions(
                explicit_schema=pa.schema([pa.field("r", kind)]),
                newlines_in_values=False,
                unexpected_field_behavior="infer" if self._strict else "ignore",
            ),
        )
        if table.num_columns != 1 or table.num_rows != len(lines):
            raise Unfit
        rows = whole_column(table["r"])
        refuse_where(rows.is_null())
        if rows.type.num_fields != kind.num_fields:
            raise Unfit  # a field that no column takes
        return rows

    def _array(self, members: dict[str, pa.Array], index: int, lines: Sequence[bytes]) -> pa.Array:
        column, field = self._columns[index], self._schema.field(index)
        if column.source is None:
            return pa.nulls(len(lines), field.type)
        array = members[column.source]
        if pa.types.is_string(array.type) or pa.types.is_decimal(array.type):
            require_valid(array, index)  # Arrow checks neither UTF-8 nor the digits of a decimal
        if pa.types.is_float32(array.type) and pc.any(pc.is_inf(array)).as_py():
            self._refuse_infinite(array, column.source, lines)
        if array.type == field.type:
            return array
        if pa.types.is_timestamp(field.type):
            return as_timestamps(array, field.type)
        if pa.types.is_time(field.type):
            return as_times(array, field.type)
        return from_text(array, field.type) if is_text_form(field.type) else array.cast(field.type)

    def _refuse_infinite(self, array: pa.Array, name: str, lines: Sequence[bytes]) -> None:
        """A number beyond the range of float is parsed as infinite; as a double it is not."""
        kinds = {field.name: field.type for field in self._read_as} | {name: pa.float64()}
        wide = self._structs(lines, pa.struct(list(kinds.items()))).field(name)
        refuse_where(pc.and_not(pc.is_inf(array), pc.is_inf(wide)))

    # One line at a time, for nested columns

    def _one_by_one(self, lines: Sequence[bytes]) -> list[pa.Array]:
        values: list[list[Any]] = [[] for _ in self._columns]
        for row, line in enumerate(lines):
            try:
                record = self._decoded(line)
                for column, field, found in zip(self._columns, self._schema, values, strict=True):
                    found.append(strict_value(record.get(column.source), field.type))
            except Misvalue as error:
                raise Unfit(row) from error
        try:
            return [nested_array(found, column) for found, column in zip(values, self._columns, strict=True)]
        except Misvalue as error:
            raise Unfit from error

    def _decoded(self, line: bytes) -> dict[str | None, Any]:
        record = loads(line)
        if not isinstance(record, dict):
            raise Misvalue("is not a JSON object")
        if self._strict:
            for name in record:
                if name not in self._asked:
                    raise Misvalue(f'has a field "{name}" that no column takes')
        return record

    # Why a record does not fit

    def explain(self, record: bytes, unfit: Unfit) -> Misfit:
        try:
            decoded = self._decoded(record)
        except Misvalue as error:
            return Misfit(None, f"it {error}")
        for index, column in enumerate(self._columns):
            alone = self._alone[index]
            try:
                alone.parse(record)
            except Unfit:
                return Misfit(column.source or column.target, _reason(decoded.get(column.source), column))
        return Misfit(None, "it cannot be read as JSON")

    @cached_property
    def _alone(self) -> list[JsonParser]:
        """Parsers of one column each, which leave out all others."""
        others = [column.source or "" for column in self._columns]
        return [JsonParser(["", *others], [column]) for column in self._columns]


def _reason(value: Any, column: ColumnMap) -> str:
    if value is None:
        return "it is NULL, and the target requires a value"
    text = str(value) if isinstance(value, str | Decimal) else _dumped(value)
    kind = column.type
    if isinstance(kind, dict):
        return f"{shown(text)} is not a {type_text(kind)}"
    if kind == "string":
        return f"{shown(text)} is not a text" if not isinstance(value, str) else "it is not valid UTF-8"
    numeric = kind == "boolean" or _NUMBERS.fullmatch(kind)
    if isinstance(value, str) and numeric and not kind.startswith("decimal"):
        needed = "true or false" if kind == "boolean" else "a number"
        return f"{shown(text)} is a text, and {kind} needs {needed}"
    if not isinstance(value, str) and not numeric:
        return f"{shown(text)} is not a text, as {kind} needs"
    return f"{shown(text)} {misfit_reason(text, kind)}"


def _dumped(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def _wire_type(kind: pa.DataType) -> pa.DataType:
    """What Arrow's parser makes of a field: it takes dates for numbers, and drops zones."""
    return pa.string() if is_text_form(kind) or pa.types.is_temporal(kind) else kind
