"""CSV to rows of the target.

What a field may look like, by the target's type (numbers, dates and decimals may have blanks around them):

  boolean      true, True, TRUE, 1, false, False, FALSE, 0
  int, long    decimal digits, perhaps after a minus; no fraction, no exponent, within the type's range
  float, double  decimal, perhaps with an exponent, to the nearest value; nan, inf; beyond the range: no fit
  decimal      as many digits as the type has; zeros beyond its scale are fine, other digits are not
  date         2024-02-29
  time         12:34, 12:34:56, 12:34:56.123456, and zeros
  timestamp    a date, T or a blank, a time of up to six digits of fraction, and zeros; no zone. Or a date
  timestamptz  the same with Z, +hh, +hhmm or +hh:mm
  string       anything that is UTF-8
  uuid         00112233-4455-6677-8899-aabbccddeeff, or the digits alone
  binary, fixed  hexadecimal digits
  list, map, struct  JSON

A field that is one of the NULL texts and not quoted is NULL; in a column that holds no strings, quotes make
no difference. A quoted empty field is an empty string.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv

from lockstep.arrow_types import arrow_schema
from lockstep.errors import Invalid
from lockstep.job import ColumnMap
from lockstep.source import ParseOptions
from lockstep.source.files_blocks import Dialect
from lockstep.source.files_columns import first_refused, refuse_where, require_valid, whole_column
from lockstep.source.files_fit import Misfit, Unfit, shown
from lockstep.source.files_nested import Misvalue, loads, nested_array, strict_value
from lockstep.source.files_values import as_clock, from_text, is_clock, is_text_form, misfit_reason

_NO_RECORD: Final = re.compile(rb"[\r\n]*+")
_ROW: Final = re.compile(r"Row #(\d+):")
_COLUMN: Final = re.compile(r"In CSV column #(\d+):")
_WIDTH: Final = re.compile(r"Expected (\d+) columns, got (\d+)")
_SPARE_ZEROS: Final = re.compile(rb":[0-9]{2}\.[0-9]{6}0")
_ZERO: Final = ord("0")
_X: Final = ord("x")
_LOWER_CASE: Final = 0x20
_SEARCHED_AT_ONCE: Final = 1 << 17


def dialect_of(options: ParseOptions, delimiter: str) -> Dialect:
    """Raises: Invalid for a character that is not one ASCII character, or that means two things."""
    parts = {"--delimiter": delimiter, "--quote": options.quote, "--escape": options.escape or ""}
    for name, text in parts.items():
        if (
            len(text) > 1
            or not text.isascii()
            or text in ("\r", "\n")
            or (name == "--delimiter" and not text)
        ):
            raise Invalid(f"{name} {text!r} is not one ASCII character", hint=r"a tab is written as \t")
    used = [text for text in parts.values() if text]
    if len(set(used)) < len(used):
        raise Invalid("delimiter, quote and escape must be different characters")
    return Dialect(*(text.encode() for text in parts.values()))


class CsvParser:
    """Blocks of one file, whose columns are `names`, to batches of the target."""

    def __init__(
        self,
        names: Sequence[str],
        columns: Sequence[ColumnMap],
        dialect: Dialect,
        nulls: Sequence[str],
    ) -> None:
        self._names = names
        self._columns = columns
        self._dialect = dialect
        self._schema = arrow_schema(columns)
        self._nulls = list(nulls)
        self._quoted_nulls = [dialect.quote + text.encode() + dialect.quote for text in nulls]
        self._places = [None if c.source is None else names.index(c.source) for c in columns]
        self._types = {
            f"f{place}": _parsed_type(field.type)
            for place, field in zip(self._places, self._schema, strict=True)
            if place is not None
        }
        self._texts = [name for name, kind in self._types.items() if pa.types.is_string(kind)]
        self._integers = [name for name, kind in self._types.items() if pa.types.is_integer(kind)]
        nothing = [pa.nulls(0, field.type) for field in self._schema]
        self._empty = pa.RecordBatch.from_arrays(nothing, schema=self._schema)

    def records(self, block: bytes) -> list[tuple[int, int]]:
        return self._dialect.spans(block)

    def ends_open(self, block: bytes) -> bool:
        return self._dialect.ends_open(block)

    def parse(self, block: bytes) -> pa.RecordBatch:
        if _NO_RECORD.fullmatch(block):
            return self._empty
        try:
            table = self._table(block)
            arrays = [self._array(table, i) for i in range(len(self._columns))]
        except pa.ArrowInvalid as error:
            raise self._unfit(str(error)) from error
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _unfit(self, message: str) -> Unfit:
        """What Arrow says, without its words."""
        row, place, width = (pattern.search(message) for pattern in (_ROW, _COLUMN, _WIDTH))
        if row is None:
            return Unfit()
        if width is not None:
            reason = f"it has {_fields(int(width[2]))} instead of {width[1]}"
            return Unfit(int(row[1]) - 1, None, reason)
        return Unfit(int(row[1]) - 1, self._places.index(int(place[1])) if place else None)

    def _table(self, block: bytes) -> dict[str, pa.Array]:
        """The columns that are asked for, by place in the file. Raises: pa.ArrowInvalid, Unfit."""
        quoted = self._dialect.quote in block if self._dialect.quote else False
        others = [name for name in self._types if name not in self._texts]
        # Always in this order, so that a record with two misfits is always rejected for the same one.
        names = [*others, *self._texts] or ["f0"]
        if quoted and others and any(text in block for text in self._quoted_nulls):
            # Only in columns of texts do quotes around a NULL text make a difference.
            table = self._read(block, others, quoted, quoted_nulls=True)
            if self._texts:
                table |= self._read(block, self._texts, quoted)
        else:
            table = self._read(block, names, quoted)
        self._refuse_hexadecimal(block, quoted)
        self._refuse_infinite(block, table, quoted)
        return table

    def _read(
        self,
        block: bytes,
        include: Sequence[str],
        quoted: bool,
        *,
        quoted_nulls: bool = False,
        as_texts: bool = False,
    ) -> dict[str, pa.Array]:
        types = {name: self._types.get(name, pa.binary()) for name in include}
        if as_texts:
            types = dict.fromkeys(include, pa.binary())
        try:
            return self._converted(block, types, quoted, quoted_nulls)
        except pa.ArrowInvalid as error:
            stamps = any(is_clock(kind) for kind in types.values())
            if not stamps or not _SPARE_ZEROS.search(block) or not _COLUMN.search(str(error)):
                raise
        # Zeros after the sixth digit of a second change nothing, but Arrow's parser does not take them.
        as_read = {n: pa.binary() if is_clock(k) else k for n, k in types.items()}
        try:
            table = self._converted(block, as_read, quoted, quoted_nulls)
            return {name: self._stamped(table[name], name, kind) for name, kind in types.items()}
        except (pa.ArrowInvalid, Unfit):
            # One column after the other, as Arrow goes: a record is always rejected for the same column.
            for name, kind in types.items():
                column = self._converted(block, {name: as_read[name]}, quoted, quoted_nulls)[name]
                self._stamped(column, name, kind)
            raise

    def _stamped(self, column: pa.Array, name: str, kind: pa.DataType) -> pa.Array:
        """The column, or its texts as timestamps or times. Raises: Unfit at the first that is none."""
        if not is_clock(kind):
            return column
        texts = column.view(pa.string())
        row = first_refused(texts, lambda some: as_clock(some, kind))
        if row is not None:
            raise Unfit(row, self._column_at(name))
        return as_clock(texts, kind)

    def _converted(
        self, block: bytes, types: Mapping[str, pa.DataType], quoted: bool, quoted_nulls: bool
    ) -> dict[str, pa.Array]:
        """Raises: pa.ArrowInvalid."""
        table = arrow_csv.read_csv(
            pa.BufferReader(block),
            arrow_csv.ReadOptions(
                use_threads=False,
                block_size=len(block) + 1,
                column_names=[f"f{i}" for i in range(len(self._names))],
            ),
            arrow_csv.ParseOptions(
                delimiter=self._dialect.delimiter.decode(),
                quote_char=self._dialect.quote.decode() or False,
                escape_char=self._dialect.escape.decode() or False,
                newlines_in_values=quoted or bool(self._dialect.escape),
            ),
            arrow_csv.ConvertOptions(
                column_types=dict(types),
                include_columns=list(types),
                null_values=self._nulls,
                strings_can_be_null=True,
                quoted_strings_can_be_null=quoted_nulls,
            ),
        )
        return {name: whole_column(table[name]) for name in types}

    def _refuse_hexadecimal(self, block: bytes, quoted: bool) -> None:
        """Arrow takes 0xFF for a whole number, and 0xFFFFFFFFFFFFFFFF for -1."""
        if not self._integers or not _has_hexadecimal(block):
            return
        for name, texts in self._read(block, self._integers, quoted, as_texts=True).items():
            refuse_where(pc.match_substring_regex(texts, "[xX]"), self._column_at(name))

    def _refuse_infinite(self, block: bytes, table: dict[str, pa.Array], quoted: bool) -> None:
        """A number beyond the range is parsed as infinite; only one that says so may be."""
        for name, array in table.items():
            if pa.types.is_floating(array.type) and pc.any(pc.is_inf(array)).as_py():
                texts = self._read(block, [name], quoted, as_texts=True)[name]
                beyond = pc.and_(pc.is_inf(array), pc.match_substring_regex(texts, "[0-9]"))
                refuse_where(beyond, self._column_at(name))

    def _column_at(self, name: str) -> int:
        return self._places.index(int(name[1:]))

    def _array(self, table: dict[str, pa.Array], index: int) -> pa.Array:
        place, field = self._places[index], self._schema.field(index)
        if place is None:
            array = pa.nulls(len(next(iter(table.values()))), field.type)
        else:
            array = table[f"f{place}"]
            if array.type != field.type:
                array = self._from_text(array, index)
            elif pa.types.is_decimal(array.type):
                require_valid(array, index)  # Arrow's parser checks the digits before it adds the scale
        if array.null_count and not field.nullable:
            refuse_where(array.is_null(), index)
        return array

    def _from_text(self, texts: pa.StringArray, index: int) -> pa.Array:
        kind = self._schema.field(index).type
        try:
            if pa.types.is_nested(kind):
                return _from_json(texts, self._columns[index], kind)
            return from_text(texts, kind)
        except Unfit as error:
            raise Unfit(error.row, index) from error

    def explain(self, record: bytes, unfit: Unfit) -> Misfit:
        if unfit.column is None:
            return Misfit(None, unfit.reason or "it cannot be read as CSV")
        column = self._columns[unfit.column]
        place = self._places[unfit.column]
        if place is None:
            return Misfit(column.target, "nothing fills this column, and the target requires a value")
        raw = read_fields(record, self._dialect)[place]
        text = raw.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        if text in self._nulls and column.required:
            return Misfit(column.source, "it is NULL, and the target requires a value")
        if text != raw:
            return Misfit(column.source, f"{shown(text)} is not valid UTF-8")
        return Misfit(column.source, f"{shown(text)} {misfit_reason(text, column.type)}")


def _has_hexadecimal(block: bytes) -> bool:
    """Whether 0x or 0X stands anywhere. Several times as fast as a search for them where many x are about."""
    view = np.frombuffer(block, np.uint8)
    for start in range(0, len(view), _SEARCHED_AT_ONCE):
        piece = view[start : start + _SEARCHED_AT_ONCE + 1]
        if (((piece[1:] | _LOWER_CASE) == _X) & (piece[:-1] == _ZERO)).any():
            return True
    return False


def _fields(count: int) -> str:
    return f"{count} field{'' if count == 1 else 's'}"


def _from_json(texts: pa.StringArray, column: ColumnMap, kind: pa.DataType) -> pa.Array:
    values = []
    for row, text in enumerate(texts.to_pylist()):
        try:
            values.append(None if text is None else strict_value(loads(text), kind))
        except Misvalue as error:
            raise Unfit(row) from error
    try:
        return nested_array(values, column)
    except Misvalue as error:
        raise Unfit from error


def _parsed_type(kind: pa.DataType) -> pa.DataType:
    """What Arrow's parser makes of a field; other types are made from its text."""
    return pa.string() if is_text_form(kind) else kind


def read_fields(record: bytes, dialect: Dialect) -> list[str]:
    """The fields of one record; bytes that are no UTF-8 as Python's surrogate escapes."""
    reader = csv.reader(
        io.StringIO(record.decode("utf-8", "surrogateescape"), newline=""),
        delimiter=dialect.delimiter.decode(),
        quotechar=dialect.quote.decode() or None,
        escapechar=dialect.escape.decode() or None,
        quoting=csv.QUOTE_MINIMAL if dialect.quote else csv.QUOTE_NONE,
    )
    previous = csv.field_size_limit(1 << 30)
    try:
        return next(reader, [])
    finally:
        csv.field_size_limit(previous)
