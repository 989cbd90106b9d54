"""The order of rows: Iceberg's, stable, over Arrow columns.

NULL stands where its key says. NaN is greater than every other number and equal to itself, -0.0 is less than
0.0, texts and bytes compare as unsigned bytes. Rows that are equal keep the order in which they came.

A key has two forms that agree with each other. For many rows it is a sequence of 64-bit words, the most
significant first, that `order` sorts by: it packs as many bits as fit beside the row number into one word,
sorts those, and goes on with the following words only among the rows that are still equal. For one row it
is a `Key`: one `bytes` for each column, compared as Python compares tuples. A `Key` with a column cut short
is a fine bound: it lies before every row that begins like it, and no row equals it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.errors import Corrupt
from lockstep.job import Json, SortKey
from lockstep.transforms import parse_transform, transform_column

Words = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]
Key = tuple[bytes, ...]
Bound = tuple[Key, int]
"""A key and the ordinal of a run: the rows with this key of this run and of all later ones lie behind it."""

HIDDEN: Final = "_lockstep_"
"""Columns of runs that are not the table's begin like this."""
TASK: Final = "_lockstep_task"
RECORD: Final = "_lockstep_record"

MOST_KEY_BYTES: Final = 192
"""Of one column of a bound; longer ones are cut."""

_WORD_BITS: Final = 64
_LEAST_ROOM: Final = 8
_MANY_WORDS: Final = 64
"""Texts that agree in so many words are compared whole."""
_SIGN: Final = np.uint64(1 << 63)
_NULL_FIRST: Final = b"\x00"
_PRESENT: Final = b"\x01"
_NULL_LAST: Final = b"\x02"
_COMPLEMENT: Final = bytes(255 - byte for byte in range(256))
_END: Final = b"\x00\x00"


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


# Columns as words


@dataclass(frozen=True)
class _Fixed:
    """A column of fixed width: each word orders it among rows that agree in the words before."""

    words: list[Words]
    missing: npt.NDArray[np.bool_] | None


@dataclass(frozen=True)
class _Text:
    """A column of texts or bytes: where each begins, how long it is, and the 8 bytes from each byte on."""

    array: pa.Array
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    data: npt.NDArray[np.uint8]
    missing: npt.NDArray[np.bool_] | None

    def word(self, place: int, rows: Rows | None) -> Words:
        """Word number `place` of these rows, zeros where a text has ended."""
        at = (self.starts if rows is None else self.starts[rows]) + 8 * place
        reach = (self.lengths if rows is None else self.lengths[rows]) - 8 * place
        last = len(self.data) - 8
        views = np.ndarray((last + 1,), "<u8", self.data, strides=(1,))
        beyond = np.maximum(at - last, 0) if len(at) and int(at.max()) > last else None
        found = views[at if beyond is None else np.minimum(at, last)].byteswap()
        if beyond is not None:
            # The last word that there is begins too early for these texts.
            found <<= (8 * np.minimum(beyond, 7)).astype(np.uint64)
        if len(reach) and int(reach.min()) < 8:
            found &= _HEAD_MASKS.take(np.clip(reach, 0, 8))
        return found


_HEAD_MASKS: Final = np.array(
    [(2**64 - 1) ^ ((1 << (8 * (8 - size))) - 1) if size else 0 for size in range(9)], dtype=np.uint64
)


def _column(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One array of the plain type of a column: no chunks, no dictionary, no extension."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string_view(column.type) or pa.types.is_binary_view(column.type):
        column = column.cast(pa.large_binary())
    return column


def _image(array: pa.Array) -> _Fixed | _Text:
    array = _column(array)
    missing = None
    if array.null_count:
        missing = array.is_null().to_numpy(zero_copy_only=False)
    if _is_text(array.type):
        return _text(array, missing)
    words = _fixed_words(array)
    if missing is not None:
        # What lies under a NULL can be anything; a value of the column keeps the range of the words small.
        present = np.flatnonzero(~missing)
        for word in words:
            word[missing] = word[present[0]] if len(present) else 0
    return _Fixed(words, missing)


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def _text(array: pa.Array, missing: npt.NDArray[np.bool_] | None) -> _Text:
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offset_buffer, data = array.buffers()
    count = len(array)
    if offset_buffer is None or offset_buffer.size == 0:
        offsets = np.zeros(count + 1, np.int64)
    else:
        kind = np.int64 if wide else np.int32
        offsets = np.frombuffer(offset_buffer, kind, count + 1, array.offset * np.dtype(kind).itemsize)
    lengths = np.diff(offsets).astype(np.int64)
    if missing is not None:
        lengths[missing] = 0
    starts = offsets[:-1].astype(np.int64)
    size = 0 if data is None else data.size
    raw = np.frombuffer(data, np.uint8, size) if size else np.zeros(0, np.uint8)
    if size < 8:
        raw = np.concatenate((raw, np.zeros(8, np.uint8)))
    return _Text(array, starts, lengths, raw, missing)


def _fixed_words(array: pa.Array) -> list[Words]:
    """Fresh arrays, so that the caller may change them."""
    kind = array.type
    count = len(array)
    if pa.types.is_null(kind):
        return [np.zeros(count, np.uint64)]
    if pa.types.is_boolean(kind):
        return [array.cast(pa.uint8()).fill_null(0).to_numpy(zero_copy_only=False).astype(np.uint64)]
    if pa.types.is_floating(kind):
        return [_float_words(array)]
    if pa.types.is_decimal(kind):
        return _decimal_words(array)
    if pa.types.is_fixed_size_binary(kind):
        return _byte_words(array, kind.byte_width)
    if pa.types.is_unsigned_integer(kind):
        return [_values(array, f"<u{kind.bit_width // 8}").astype(np.uint64)]
    if pa.types.is_integer(kind) or pa.types.is_temporal(kind):
        numbers = _values(array, f"<i{kind.bit_width // 8}").astype(np.int64, copy=False)
        return [np.bitwise_xor(numbers.view(np.uint64), _SIGN)]
    raise Corrupt(f"rows cannot be ordered by a column of type {kind}")


def _values(array: pa.Array, dtype: str) -> npt.NDArray[Any]:
    width = np.dtype(dtype).itemsize
    buffer = array.buffers()[1]
    if buffer is None or len(array) == 0:
        return np.zeros(len(array), dtype)
    return np.frombuffer(buffer, dtype, len(array), array.offset * width)


def _float_words(array: pa.Array) -> Words:
    """IEEE's total order for what is not NaN; every NaN is one, above infinity."""
    numbers = array.cast(pa.float64())
    values = _values(numbers, "<f8")
    bits = values.view(np.uint64)
    words: Words = np.where(bits & _SIGN, ~bits, bits | _SIGN)
    words[np.isnan(values)] = np.uint64(2**64 - 1)
    return words


def _decimal_words(array: pa.Array) -> list[Words]:
    if not pa.types.is_decimal128(array.type):
        array = array.cast(pa.decimal128(array.type.precision, array.type.scale))
    halves = _halves(array)
    return [halves[:, 1] ^ _SIGN, halves[:, 0].copy()]


def _halves(array: pa.Array) -> Words:
    buffer = array.buffers()[1]
    if buffer is None or len(array) == 0:
        return np.zeros((len(array), 2), np.uint64)
    return np.frombuffer(buffer, "<u8", 2 * len(array), array.offset * 16).reshape(-1, 2)


def _byte_words(array: pa.Array, width: int) -> list[Words]:
    count = len(array)
    padded = np.zeros((count, -(-width // 8) * 8 or 8), np.uint8)
    buffer = array.buffers()[1]
    if buffer is not None and count and width:
        raw = np.frombuffer(buffer, np.uint8, count * width, array.offset * width)
        padded[:, :width] = raw.reshape(count, width)
    return [column.astype(np.uint64) for column in padded.view(">u8").T]


# The order of many rows


class _Digit(Protocol):
    """A piece of the keys that remains to be sorted by."""

    def of(self, rows: Rows | None) -> tuple[Words, list[_Digit]]:
        """Its value for these rows (None: all), and what follows it. The caller may change the array."""
        ...


@dataclass(frozen=True)
class _Plain:
    words: Words
    descending: bool

    def of(self, rows: Rows | None) -> tuple[Words, list[_Digit]]:
        if rows is not None:
            found = self.words[rows]
            return (~found if self.descending else found), []
        # All rows are asked for once, at the start: the words themselves may be changed.
        return (np.invert(self.words, out=self.words) if self.descending else self.words), []


@dataclass(frozen=True)
class _TextFrom:
    """All words of a text from one place on. The length decides in the end: "a" comes before "a\\0"."""

    text: _Text
    descending: bool
    place: int = 0

    def of(self, rows: Rows | None) -> tuple[Words, list[_Digit]]:
        lengths = self.text.lengths if rows is None else self.text.lengths[rows]
        longest = int(lengths.max(initial=0))
        following: list[_Digit] = []
        if longest <= 8 * self.place:
            found = lengths.astype(np.uint64)
        elif self.place >= _MANY_WORDS:
            found = self._ranks(rows)
        else:
            found = self.text.word(self.place, rows)
            following.append(_TextFrom(self.text, self.descending, self.place + 1))
        return (~found if self.descending else found), following

    def _ranks(self, rows: Rows | None) -> Words:
        texts = self.text.array if rows is None else self.text.array.take(pa.array(rows))
        kind = pa.large_binary() if pa.types.is_large_string(texts.type) else pa.binary()
        ranks = pc.rank(texts.cast(kind) if _is_text(texts.type) else texts, tiebreaker="dense")
        return np.asarray(ranks.to_numpy(zero_copy_only=False)).astype(np.uint64)


def order(rows: pa.RecordBatch | pa.Table, keys: Sequence[SortKey]) -> Rows:
    """The rows in order: element `i` is the number of the row that comes `i`-th. Stable."""
    return order_columns([rows.column(key.column) for key in keys], keys, rows.num_rows)


def order_columns(columns: Sequence[pa.Array | pa.ChunkedArray], keys: Sequence[SortKey], count: int) -> Rows:
    """`order` of rows of which only the key columns are at hand."""
    digits: list[_Digit] = []
    for column, key in zip(columns, keys, strict=True):
        digits.extend(_digits(_image(column), key))
    return _sorted_by(digits, count)


def _digits(image: _Fixed | _Text, key: SortKey) -> Iterator[_Digit]:
    if image.missing is not None:
        last = image.missing if not key.nulls_first else ~image.missing
        yield _Plain(last.astype(np.uint64), descending=False)
    if isinstance(image, _Text):
        yield _TextFrom(image, key.descending)
    else:
        for words in image.words:
            yield _Plain(words, key.descending)


def _sorted_by(digits: list[_Digit], count: int) -> Rows:
    ordered = np.arange(count, dtype=np.int64)
    tied: Rows | None = None  # places in `ordered` of rows that equal a neighbour; None: all
    groups = np.zeros(count, np.uint64)
    group_bits = 0
    while digits and (count if tied is None else len(tied)):
        rows = None if tied is None else ordered[tied]
        here = count if rows is None else len(rows)
        row_bits = max(1, (here - 1).bit_length())
        packed, digits = _pack(groups, group_bits, rows, count, digits, _WORD_BITS - row_bits)
        packed <<= np.uint64(row_bits)
        packed |= np.arange(here, dtype=np.uint64)
        packed.sort(kind=_kind_of_sort(packed))
        places = (packed & np.uint64((1 << row_bits) - 1)).astype(np.int64)
        packed >>= np.uint64(row_bits)
        if rows is None or tied is None:
            ordered = places
        else:
            ordered[tied] = rows[places]
        if not digits:
            break
        tied, groups = _ties(packed, tied)
        group_bits = int(groups[-1]).bit_length() if len(groups) else 0
    return ordered


def _kind_of_sort(packed: Words) -> Literal["stable", "quicksort"]:
    """Rows that come as a few ascending pieces, as in every merge, are merged by timsort in no time.

    Values are all different, so that either sort is stable.
    """
    descents = int(np.count_nonzero(packed[1:] < packed[:-1]))
    return "stable" if descents < len(packed) // 16 else "quicksort"


def _pack(
    groups: Words, group_bits: int, rows: Rows | None, count: int, digits: list[_Digit], most_bits: int
) -> tuple[Words, list[_Digit]]:
    """As many digits as fit behind the group's number, and the digits that are left."""
    packed, used = groups, group_bits
    while digits:
        values, following = digits[0].of(rows)
        base = int(values.min(initial=2**64 - 1)) if len(values) else 0
        values -= np.uint64(base)
        bits = int(values.max(initial=0)).bit_length()
        room = most_bits - used
        if bits > room:
            # A few bits are not worth it. The rest waits as it is now: it must not be computed again.
            taken = room if room >= _LEAST_ROOM else 0
            left = bits - taken
            if taken:
                packed = _appended(packed, taken, values >> np.uint64(left))
                values &= np.uint64((1 << left) - 1)
            return packed, [_Plain(_spread(values, rows, count), False), *following, *digits[1:]]
        packed = values if used == 0 else _appended(packed, bits, values)
        used += bits
        digits = [*following, *digits[1:]]
    return packed, digits


def _appended(packed: Words, bits: int, values: Words) -> Words:
    """In place: large temporary arrays cost more than the arithmetic."""
    packed <<= np.uint64(bits)
    packed |= values
    return packed


def _spread(values: Words, rows: Rows | None, count: int) -> Words:
    if rows is None:
        return values
    spread = np.zeros(count, np.uint64)
    spread[rows] = values
    return spread


def _ties(packed: Words, tied: Rows | None) -> tuple[Rows, Words]:
    """The places whose value equals that of a neighbour, and the number of the group of each."""
    same = packed[1:] == packed[:-1]
    member = np.zeros(len(packed), np.bool_)
    member[1:] = same
    member[:-1] |= same
    first = member.copy()
    first[1:] &= ~same
    places = np.flatnonzero(member)
    groups = np.cumsum(first[places]).astype(np.uint64) - np.uint64(1) if len(places) else packed[:0]
    return (places if tied is None else tied[places]), groups


def repeats(rows: pa.RecordBatch, keys: Sequence[SortKey]) -> npt.NDArray[np.bool_]:
    """For rows in order: which ones have the key of the row before. NULL equals nothing, not even NULL."""
    same = np.ones(rows.num_rows, np.bool_)
    same[:1] = False
    for key in keys:
        image = _image(rows.column(key.column))
        if image.missing is not None:
            same &= ~image.missing
            same[1:] &= ~image.missing[:-1]
        if isinstance(image, _Text):
            same[1:] &= image.lengths[1:] == image.lengths[:-1]
            equal = pc.equal(image.array.slice(1), image.array.slice(0, max(0, rows.num_rows - 1)))
            same[1:] &= equal.fill_null(False).to_numpy(zero_copy_only=False)
        else:
            for words in image.words:
                same[1:] &= words[1:] == words[:-1]
    return same


def present(rows: pa.RecordBatch, keys: Sequence[SortKey]) -> npt.NDArray[np.bool_]:
    """Which rows have no NULL in their key."""
    found = np.ones(rows.num_rows, np.bool_)
    for key in keys:
        column = rows.column(key.column)
        if column.null_count:
            found &= column.is_valid().to_numpy(zero_copy_only=False)
    return found


# The key of one row


class SortedRows:
    """Rows in order, to find keys in; a search narrows the range column by column."""

    def __init__(self, rows: pa.RecordBatch, keys: Sequence[SortKey]) -> None:
        self.rows = rows
        self._keys = keys
        self._images: list[_Fixed | _Text] | None = None

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
            self._images = [_image(self.rows.column(each.column)) for each in self._keys]
        low, high = 0, len(self)
        for code, each, image in zip(key, self._keys, self._images, strict=True):
            if low == high:
                break
            low, high = _narrow(code, each, image, low, high)
        return low, high


def key_of(rows: pa.RecordBatch | pa.Table, at: int, keys: Sequence[SortKey]) -> Key:
    """The key of one row."""
    return tuple(_code(_image(rows.column(key.column).slice(at, 1)), 0, key) for key in keys)


def bound_at(rows: pa.RecordBatch, at: int, keys: Sequence[SortKey]) -> Key:
    """`cut` of the key of one row, without copying long texts."""
    images = [(_image(rows.column(key.column).slice(at, 1)), key) for key in keys]
    return cut(tuple(_code(image, 0, key, MOST_KEY_BYTES) for image, key in images))


def _code(image: _Fixed | _Text, at: int, key: SortKey, most_bytes: int | None = None) -> bytes:
    if image.missing is not None and image.missing[at]:
        return _NULL_FIRST if key.nulls_first else _NULL_LAST
    if isinstance(image, _Fixed):
        payload = b"".join(int(word[at]).to_bytes(8, "big") for word in image.words)
    else:
        start, length = int(image.starts[at]), int(image.lengths[at])
        text = image.data[start : start + min(length, most_bytes or length)].tobytes()
        payload = text.replace(b"\x00", b"\x00\xff") + _END
    return _PRESENT + (payload.translate(_COMPLEMENT) if key.descending else payload)


def _narrow(code: bytes, key: SortKey, image: _Fixed | _Text, low: int, high: int) -> tuple[int, int]:
    """The rows of `low` to `high` that equal `code` in this column; none: both are where it would stand."""
    if (
        isinstance(image, _Fixed)
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
    image: _Fixed | _Text
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
