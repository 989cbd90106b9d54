"""The key of a row: as columns of a batch, as bytes that compare, and as JSON.

A `Key` has one `bytes` for each column and compares as Python compares tuples; it agrees with the order that
`ordering` gives to many rows. A `Key` with a column cut short is a fine bound: it lies before every row that
begins like it, and no row equals it.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from lockstep.errors import Corrupt, Invalid
from lockstep.job import Json, SortKey
from lockstep.transforms import parse_transform, transform_column
from lockstep.words import FixedWords, TextWords, Words, words_of

Key = tuple[bytes, ...]
Bound = tuple[Key, int]
"""A key and the ordinal of a run: the rows with this key of this run and of all later ones lie behind it."""

HIDDEN: Final = "_lockstep_"
"""Columns of runs that are not the table's begin like this."""
TASK: Final = "_lockstep_task"
RECORD: Final = "_lockstep_record"

MOST_KEY_BYTES: Final = 192
"""Of one column of a bound; longer ones are cut."""

_NULL_FIRST: Final = b"\x00"
_PRESENT: Final = b"\x01"
_NULL_LAST: Final = b"\x02"
_COMPLEMENT: Final = bytes(255 - byte for byte in range(256))
_END: Final = b"\x00\x00"


def refuse_hidden_names(schema: Json, way_out: str) -> None:
    """Raises: Invalid if the table has a column that would be taken for one of ours."""
    for field in schema["fields"]:
        if field["name"].startswith(HIDDEN):
            raise Invalid(
                f'the table has a column "{field["name"]}"; names that begin with {HIDDEN} are kept for '
                "sorted imports",
                hint=way_out,
            )


# Keys of a plan as columns of a batch


class KeyColumns:
    """Sort keys as plain columns: those that are transformed, or lie inside a struct, become hidden columns.

    `schema` is the table's, in Iceberg's JSON. Raises: Invalid for a transform that does not fit its column.
    """

    def __init__(self, keys: Sequence[SortKey], schema: Json) -> None:
        self.keys: list[SortKey] = []
        self._derived: list[tuple[str, tuple[str, ...], Any]] = []
        for at, key in enumerate(keys):
            path, kind = _resolve(key.column, schema)
            if key.transform == "identity" and len(path) == 1:
                self.keys.append(SortKey(key.column, "identity", key.descending, key.nulls_first))
                continue
            name = f"{HIDDEN}key_{at}"
            self._derived.append((name, path, parse_transform(key.transform, kind, key.column)))
            self.keys.append(SortKey(name, "identity", key.descending, key.nulls_first))

    def attach(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with the hidden key columns at its end."""
        for name, path, transform in self._derived:
            batch = batch.append_column(name, transform_column(batch, path, transform))
        return batch


def _resolve(column: str, schema: Json) -> tuple[tuple[str, ...], str]:
    """The way to a column, which may stand inside structs (`a.b`), and its type."""
    fields = schema["fields"]
    exact = next((f for f in fields if f["name"] == column), None)
    if exact is not None and isinstance(exact["type"], str):
        return (column,), exact["type"]
    for field in fields:
        if column.startswith(f"{field['name']}.") and isinstance(field["type"], dict):
            path, kind = _resolve(column[len(field["name"]) + 1 :], field["type"])
            return (field["name"], *path), kind
    raise Corrupt(f'rows are to be ordered by "{column}", which is not a plain column of the table')


def visible(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch without hidden columns."""
    names = [name for name in batch.schema.names if not name.startswith(HIDDEN)]
    return batch if len(names) == batch.num_columns else batch.select(names)


# The key of one row


class SortedRows:
    """Rows in order, to find keys in; a search narrows the range column by column."""

    def __init__(self, rows: pa.RecordBatch, keys: Sequence[SortKey]) -> None:
        self.rows = rows
        self._keys = keys
        self._images: list[FixedWords | TextWords] | None = None

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def key(self, at: int) -> Key:
        return key_of(self.rows, at, self._keys)

    def first_not_before(self, key: Key) -> int:
        """The number of rows that come before `key`."""
        return self._search(key)[0]

    def first_after(self, key: Key) -> int:
        """The number of rows that come before `key` or equal it."""
        return self._search(key)[1]

    def _search(self, key: Key) -> tuple[int, int]:
        if self._images is None:
            self._images = [words_of(self.rows.column(each.column)) for each in self._keys]
        low, high = 0, len(self)
        for code, each, image in zip(key, self._keys, self._images, strict=True):
            if low == high:
                break
            low, high = _narrow(code, each, image, low, high)
        return low, high


def key_of(rows: pa.RecordBatch | pa.Table, at: int, keys: Sequence[SortKey]) -> Key:
    """The key of one row."""
    return tuple(_code(words_of(rows.column(key.column).slice(at, 1)), 0, key) for key in keys)


def bound_at(rows: pa.RecordBatch, at: int, keys: Sequence[SortKey]) -> Key:
    """`cut` of the key of one row, without copying long texts."""
    images = [(words_of(rows.column(key.column).slice(at, 1)), key) for key in keys]
    return cut(tuple(_code(image, 0, key, MOST_KEY_BYTES) for image, key in images))


def _code(image: FixedWords | TextWords, at: int, key: SortKey, most_bytes: int | None = None) -> bytes:
    if image.missing is not None and image.missing[at]:
        return _NULL_FIRST if key.nulls_first else _NULL_LAST
    if isinstance(image, FixedWords):
        payload = b"".join(int(word[at]).to_bytes(8, "big") for word in image.words)
    else:
        start, length = int(image.starts[at]), int(image.lengths[at])
        text = image.data[start : start + min(length, most_bytes or length)].tobytes()
        payload = text.replace(b"\x00", b"\x00\xff") + _END
    return _PRESENT + (payload.translate(_COMPLEMENT) if key.descending else payload)


def _narrow(code: bytes, key: SortKey, image: FixedWords | TextWords, low: int, high: int) -> tuple[int, int]:
    """The rows of `low` to `high` that equal `code` in this column; none: both are where it would stand."""
    if (
        isinstance(image, FixedWords)
        and image.missing is None
        and code[:1] == _PRESENT
        and len(code) == 1 + 8 * len(image.words)
    ):
        for place, words in enumerate(image.words):
            value = int.from_bytes(code[1 + 8 * place : 9 + 8 * place], "big")
            value = value ^ (2**64 - 1) if key.descending else value
            low, high = _narrow_word(words[low:high], np.uint64(value), key.descending, low)
        return low, high
    codes = _Codes(image, key)
    return _bisect(codes, code, low, high, after=False), _bisect(codes, code, low, high, after=True)


def _narrow_word(words: Words, value: np.uint64, descending: bool, low: int) -> tuple[int, int]:
    if not descending:
        left, right = np.searchsorted(words, value, "left"), np.searchsorted(words, value, "right")
        return low + int(left), low + int(right)
    backwards = words[::-1]
    left, right = np.searchsorted(backwards, value, "left"), np.searchsorted(backwards, value, "right")
    return low + len(words) - int(right), low + len(words) - int(left)


@dataclass(frozen=True)
class _Codes:
    image: FixedWords | TextWords
    key: SortKey

    def __getitem__(self, at: int) -> bytes:
        return _code(self.image, at, self.key)


def _bisect(codes: _Codes, code: bytes, low: int, high: int, *, after: bool) -> int:
    while low < high:
        middle = (low + high) // 2
        found = codes[middle]
        if found < code or (after and found == code):
            low = middle + 1
        else:
            high = middle
    return low


# Keys as JSON


def cut(key: Key) -> Key:
    """A bound at this key, or before it where a column is too long."""
    for at, code in enumerate(key):
        if len(code) > MOST_KEY_BYTES:
            # No row has such a column, so it does not matter what follows.
            return (*key[:at], code[:MOST_KEY_BYTES], *(b"" for _ in key[at + 1 :]))
    return key


def key_to_json(key: Key) -> list[str]:
    return [base64.b64encode(code).decode() for code in key]


def key_from_json(raw: Sequence[str]) -> Key:
    return tuple(base64.b64decode(code) for code in raw)
