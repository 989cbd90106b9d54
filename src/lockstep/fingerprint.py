"""Row count and an order-independent 64-bit hash per column.

The hash of a column is the sum, modulo 2^64, of the hash of each value, so that fingerprints add up, the
order of rows does not matter, and a row that is there twice counts twice. It depends on values only: not
on batch boundaries, slices, dictionary encoding or the width of offsets. The hash of a value:

- NULL is a constant at every level.
- up to 8 bytes: `mix` of the value as 64 bits (integers are sign-extended; every NaN is the same NaN).
- wider fixed values, texts and bytes: 8-byte little-endian words, the last one padded with zeros, each
  times an odd multiplier of its place; their sum and the length are mixed.
- lists and structs: as words, with the hashes of their members in place of the words; a map is the plain sum
  of its entries, because its order carries no meaning.

Manifests keep fingerprints, and `verify` compares them years later: what this module computes is fixed.
It works on slices that stay in the processor's cache, and has no loop over rows.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.job import Fingerprint

Words = npt.NDArray[np.uint64]

_SLICE_ROWS: Final = 32_768
_FEW_ROWS: Final = 256
"""Texts are hashed word by word over all rows that reach so far; the rest of the last few, in one run."""
_LONG_RUN_WORDS: Final = 1 << 17
_WORDS_AT_ONCE: Final = 8
_ROOM_BYTES: Final = 8 * _WORDS_AT_ONCE

_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_LENGTH: Final = np.uint64(0xD6E8FEB86659FD93)
_NULL: Final = np.uint64(0x9AE16A3B2F90404F)
_NAN_64: Final = np.uint64(0x7FF8000000000000)
_NAN_32: Final = np.uint32(0x7FC00000)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_TAIL_MASKS: Final = np.array([(1 << (8 * size)) - 1 for size in range(9)], dtype=np.uint64)


def fingerprint(batch: pa.RecordBatch | pa.Table) -> Fingerprint:
    """The fingerprint of these rows, keyed by column name.

    Raises: TypeError for an Arrow type that no Iceberg type is written as.
    """
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        columns[name] = sum(_column_hash(chunk) for chunk in chunks) % 2**64
    return Fingerprint(batch.num_rows, columns)


def row_hashes(batch: pa.RecordBatch) -> Words:
    """A 64-bit hash of each row: equal rows have equal ones."""
    return _of_members([_hashes(column) for column in batch.columns], batch.num_rows)


def _column_hash(array: pa.Array) -> int:
    array = _plain(array)
    if pa.types.is_dictionary(array.type):
        by_code = _hashes(_plain(array.dictionary))
        indices = array.indices
        parts = (_coded(indices.slice(at, _SLICE_ROWS), by_code) for at in range(0, len(array), _SLICE_ROWS))
    else:
        parts = (_hashes(array.slice(at, _SLICE_ROWS)) for at in range(0, len(array), _SLICE_ROWS))
    return sum(int(np.add.reduce(part)) for part in parts) % 2**64


def _plain(array: pa.Array) -> pa.Array:
    """The same values without wrappers that carry no value: extension types, run ends, views."""
    if isinstance(array.type, pa.BaseExtensionType):
        return _plain(array.storage)
    if pa.types.is_run_end_encoded(array.type):
        return _plain(pc.run_end_decode(array))
    if pa.types.is_string_view(array.type):
        return array.cast(pa.large_string())
    if pa.types.is_binary_view(array.type):
        return array.cast(pa.large_binary())
    return array


def _hashes(array: pa.Array) -> Words:
    """The hash of each value, in an array of its own that the caller may change."""
    array = _plain(array)
    if len(array) == 0:
        return np.empty(0, np.uint64)
    hashes = _of_values(array)
    if array.null_count and not pa.types.is_dictionary(array.type):
        np.copyto(hashes, _NULL, where=~_validity(array))
    return hashes


def _of_values(array: pa.Array) -> Words:
    kind = array.type
    if pa.types.is_null(kind):
        return np.full(len(array), _NULL)
    if pa.types.is_dictionary(kind):
        return _coded(array.indices, _hashes(array.dictionary))
    if pa.types.is_boolean(kind):
        return mix(_bits(array.buffers()[1], array.offset, len(array)).astype(np.uint64))
    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return _of_bytes(array, np.int64)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _of_bytes(array, np.int32)
    if pa.types.is_struct(kind):
        return _of_members([_hashes(array.field(i)) for i in range(kind.num_fields)], len(array))
    if pa.types.is_map(kind):
        return _of_entries(array)
    if pa.types.is_fixed_size_list(kind):
        return _of_list(array.cast(pa.large_list(kind.value_type)))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _of_list(array)
    if pa.types.is_fixed_size_binary(kind) or pa.types.is_decimal(kind) or pa.types.is_primitive(kind):
        return _of_fixed(array)
    raise TypeError(f"no fingerprint for Arrow type {kind}")


def mix(words: Words) -> Words:
    """Spread each word over all 64 bits, in place: the step and finaliser of splitmix64."""
    spare = np.empty_like(words)
    np.add(words, _GAMMA, out=words)
    np.bitwise_xor(words, np.right_shift(words, _S30, out=spare), out=words)
    np.multiply(words, _FIRST, out=words)
    np.bitwise_xor(words, np.right_shift(words, _S27, out=spare), out=words)
    np.multiply(words, _SECOND, out=words)
    return np.bitwise_xor(words, np.right_shift(words, _S31, out=spare), out=words)


def _multipliers(places: npt.NDArray[Any]) -> Words:
    """An odd multiplier for each place in a value, so that no two places can be swapped unseen."""
    return mix(places.astype(np.uint64)) | np.uint64(1)


_MULTIPLIERS: Final = _multipliers(np.arange(256))


def _multipliers_at(places: npt.NDArray[np.int64]) -> Words:
    if len(places) and int(places.max()) >= len(_MULTIPLIERS):
        return _multipliers(places)
    return _MULTIPLIERS.take(places)


def _length_image(length: int) -> np.uint64:
    return np.uint64(length * int(_LENGTH) % 2**64)


def _bits(buffer: pa.Buffer, offset: int, count: int) -> npt.NDArray[np.uint8]:
    first = offset // 8
    packed = np.frombuffer(buffer, np.uint8, (offset + count + 7) // 8 - first, first)
    return np.unpackbits(packed, bitorder="little")[offset % 8 : offset % 8 + count]


def _validity(array: pa.Array) -> npt.NDArray[np.bool_]:
    buffer = array.buffers()[0]
    if buffer is None:
        return np.zeros(len(array), np.bool_)  # only the null type has nulls without a bitmap
    return _bits(buffer, array.offset, len(array)).view(np.bool_)


def _coded(indices: pa.Array, by_code: Words) -> Words:
    if len(by_code) == 0:
        return np.full(len(indices), _NULL)
    if not indices.null_count:
        return by_code.take(_numbers(indices))
    valid = _validity(indices)
    codes = np.where(valid, _numbers(indices), 0)  # the code under a NULL can be anything
    return np.where(valid, by_code.take(codes), _NULL)


def _numbers(array: pa.Array) -> npt.NDArray[Any]:
    """A view of the values of a fixed-width array of up to 8 bytes."""
    width = array.type.bit_width // 8
    dtype = f"<{'u' if pa.types.is_unsigned_integer(array.type) else 'i'}{width}"
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * width)


def _of_fixed(array: pa.Array) -> Words:
    kind = array.type
    if pa.types.is_floating(kind):
        return mix(_float_images(array))
    if kind.bit_width > 64 or pa.types.is_fixed_size_binary(kind):
        return _of_wide(array, kind.bit_width // 8)
    if pa.types.is_unsigned_integer(kind):
        return mix(_numbers(array).astype(np.uint64))
    return mix(_numbers(array).astype(np.int64).view(np.uint64))


def _float_images(array: pa.Array) -> Words:
    if pa.types.is_float16(array.type):
        array = array.cast(pa.float32())
    wide = pa.types.is_float64(array.type)
    numbers = np.frombuffer(
        array.buffers()[1], "<f8" if wide else "<f4", len(array), array.offset * (8 if wide else 4)
    )
    images = numbers.view(np.uint64 if wide else np.uint32).copy()
    np.copyto(images, _NAN_64 if wide else _NAN_32, where=np.isnan(numbers))
    return images.astype(np.uint64, copy=False)


def _of_wide(array: pa.Array, width: int) -> Words:
    """Fixed values of any width: whole words, then the tail."""
    count = len(array)
    data = np.frombuffer(array.buffers()[1], np.uint8, count * width, array.offset * width)
    rows = data.reshape(count, width)
    total = np.full(count, _length_image(width))
    whole = width // 8
    words = np.ndarray((count, whole), "<u8", data, strides=(width, 8)) if whole else None
    for place in range(whole):
        assert words is not None
        total += words[:, place] * _multipliers(np.array([place]))[0]
    if width % 8:
        tail = np.zeros((count, 8), np.uint8)
        tail[:, : width % 8] = rows[:, whole * 8 :]
        total += tail.view("<u8")[:, 0] * _multipliers(np.array([whole]))[0]
    return mix(total)


def _of_bytes(array: pa.Array, offset_type: type[np.int32] | type[np.int64]) -> Words:
    count = len(array)
    _, offset_buffer, data = array.buffers()
    offset_width = np.dtype(offset_type).itemsize
    offsets = np.frombuffer(offset_buffer, offset_type, count + 1, array.offset * offset_width)
    starts = offsets[:-1].astype(np.int64)
    lengths = np.diff(offsets).astype(np.int64)
    total = lengths.astype(np.uint64)
    np.multiply(total, _LENGTH, out=total)
    longest = int(lengths.max())
    if longest == 0:
        return mix(total)
    raw = _with_room(data, int(offsets[0]), int(offsets[-1]))
    starts -= int(offsets[0])
    place = _add_words(total, raw, starts, lengths)
    if longest > 8 * place:
        _add_long_tails(total, raw, starts, lengths, place)
    return mix(total)


def _with_room(data: pa.Buffer, start: int, end: int) -> npt.NDArray[np.uint8]:
    """The bytes from `start` on; past `end` there is something, never a fault."""
    if end + _ROOM_BYTES <= data.size:
        return np.frombuffer(data, np.uint8, end - start + _ROOM_BYTES, start)
    padded = np.zeros(end - start + _ROOM_BYTES, np.uint8)
    padded[: end - start] = np.frombuffer(data, np.uint8, end - start, start)
    return padded


def _add_words(
    total: Words,
    raw: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> int:
    """Add some words at a time to all rows that have them, until few have. Answers the first place left."""
    at, reach = starts, lengths
    rows: npt.NDArray[np.intp] | None = None
    place = 0
    while place < len(_MULTIPLIERS):
        shortest, longest = int(reach.min()), int(reach.max())
        wanted = -(-longest // 8) if longest <= 2 * shortest + 8 else -(-int(reach.mean()) // 8)
        count = max(1, min(wanted, _WORDS_AT_ONCE, len(_MULTIPLIERS) - place))
        evenly = longest if rows is None and place == 0 and shortest == longest else None
        words = _words_at(raw, at, count, evenly)
        ends = reach if shortest < longest else reach[:1]
        found = np.zeros(len(reach), np.uint64)
        for column in range(count):
            found += _cut(words[:, column], ends, shortest, 8 * column) * _MULTIPLIERS[place + column]
        if rows is None:
            total += found
        else:
            total[rows] += found
        place += count
        left = np.flatnonzero(reach > 8 * count)
        if len(left) < _FEW_ROWS:
            break
        at, reach = at[left] + 8 * count, reach[left] - 8 * count
        rows = left if rows is None else rows[left]
    return place


def _words_at(
    raw: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], count: int, evenly: int | None
) -> npt.NDArray[np.uint64]:
    """So many words from each of these bytes on, a row each. `evenly`: the distance from one to the next.

    To fetch the words of a row together costs hardly more than to fetch one.
    """
    if evenly is not None:
        return np.ndarray((len(at), count), "<u8", raw, strides=(evenly, 8))
    size = 8 * count
    pieces = np.ndarray((len(raw) - size + 1,), f"V{size}", raw, strides=(1,))
    return pieces[at].view("<u8").reshape(len(at), count)


def _cut(words: Words, reach: npt.NDArray[np.int64], shortest: int, done: int) -> Words:
    """The words without the bytes beyond `reach`, of which `done` lie before them."""
    if shortest >= done + 8:
        return words
    return words & _TAIL_MASKS.take(np.clip(reach - done, 0, 8))


def _add_long_tails(
    total: Words,
    raw: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    first_place: int,
) -> None:
    """Add all words from `first_place` on, in runs of bounded size that may end inside a value."""
    words = np.ndarray((len(raw) - 7,), "<u8", raw, strides=(1,))
    rows = np.flatnonzero(lengths > 8 * first_place)
    counts = -(-lengths[rows] // 8) - first_place
    ends = np.cumsum(counts)
    for first in range(0, int(ends[-1]), _LONG_RUN_WORDS):
        flat = np.arange(first, min(first + _LONG_RUN_WORDS, int(ends[-1])))
        owner = np.searchsorted(ends, flat, side="right")
        place = flat - (ends - counts)[owner] + first_place
        row = rows[owner]
        reach = lengths[row] - 8 * place
        found = _cut(words[starts[row] + 8 * place], reach, int(reach.min()), 0) * _multipliers_at(place)
        heads = np.flatnonzero(np.diff(owner, prepend=-1))
        total[row[heads]] += np.add.reduceat(found, heads)


def _of_members(members: list[Words], count: int) -> Words:
    total = np.full(count, _length_image(len(members)))
    for place, hashes in enumerate(members):
        total += hashes * _multipliers(np.array([place]))[0]
    return mix(total)


def _of_list(array: pa.Array) -> Words:
    starts, lengths, first, last = _spans(array)
    elements = _hashes(array.values.slice(first, last - first))
    elements *= _multipliers_at(np.arange(len(elements)) - np.repeat(starts - first, lengths))
    return mix(_sums(elements, starts - first, lengths) + lengths.astype(np.uint64) * _LENGTH)


def _of_entries(array: pa.Array) -> Words:
    starts, lengths, first, last = _spans(array)
    keys = _hashes(array.keys.slice(first, last - first))
    values = _hashes(array.items.slice(first, last - first))
    entries = _of_members([keys, values], last - first)
    return mix(_sums(entries, starts - first, lengths) + lengths.astype(np.uint64) * _LENGTH)


def _spans(array: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int, int]:
    """Where each list begins among the child values, how long it is, and the range of all."""
    offsets = array.offsets.to_numpy().astype(np.int64)
    return offsets[:-1], np.diff(offsets), int(offsets[0]), int(offsets[-1])


def _sums(hashes: Words, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Words:
    """The sum of the hashes of each span; differences of a running sum are right modulo 2^64."""
    running = np.zeros(len(hashes) + 1, np.uint64)
    np.cumsum(hashes, out=running[1:])
    sums: Words = running[starts + lengths] - running[starts]
    return sums
