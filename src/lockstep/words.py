"""A column as 64-bit words, the most significant first, that compare as its values do.

NaN is greater than every other number and equal to itself, -0.0 is less than 0.0, texts and bytes compare as
unsigned bytes. NULLs stand apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lockstep.arrow_types import plain
from lockstep.errors import Corrupt

Words = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]

_SIGN: Final = np.uint64(1 << 63)


@dataclass(frozen=True)
class FixedWords:
    """A column of fixed width: each word orders it among rows that agree in the words before."""

    words: list[Words]
    missing: npt.NDArray[np.bool_] | None


@dataclass(frozen=True)
class TextWords:
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
    """As `plain`, and no views."""
    column = plain(column)
    if pa.types.is_string_view(column.type) or pa.types.is_binary_view(column.type):
        column = column.cast(pa.large_binary())
    return column


def words_of(array: pa.Array) -> FixedWords | TextWords:
    array = _column(array)
    missing = None
    if array.null_count:
        missing = array.is_null().to_numpy(zero_copy_only=False)
    if is_text(array.type):
        return _text(array, missing)
    words = _fixed_words(array)
    if missing is not None:
        # What lies under a NULL can be anything; a value of the column keeps the range of the words small.
        present = np.flatnonzero(~missing)
        for word in words:
            word[missing] = word[present[0]] if len(present) else 0
    return FixedWords(words, missing)


def is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def _text(array: pa.Array, missing: npt.NDArray[np.bool_] | None) -> TextWords:
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
    return TextWords(array, starts, lengths, raw, missing)


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
