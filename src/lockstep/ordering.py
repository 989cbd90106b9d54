"""The order of many rows: stable, with NULL where its key says.

`order` packs as many bits of the keys' words as fit beside the row number into one word, sorts those, and
goes on with the following words only among the rows that are still equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.job import SortKey
from lockstep.words import FixedWords, Rows, TextWords, Words, is_text, words_of

_WORD_BITS: Final = 64
_LEAST_ROOM: Final = 8
_MANY_WORDS: Final = 64
"""Texts that agree in so many words are compared whole."""


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

    text: TextWords
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
        ranks = pc.rank(texts.cast(kind) if is_text(texts.type) else texts, tiebreaker="dense")
        return np.asarray(ranks.to_numpy(zero_copy_only=False)).astype(np.uint64)


def order(rows: pa.RecordBatch | pa.Table, keys: Sequence[SortKey]) -> Rows:
    """The rows in order: element `i` is the number of the row that comes `i`-th. Stable."""
    return order_columns([rows.column(key.column) for key in keys], keys, rows.num_rows)


def order_columns(columns: Sequence[pa.Array | pa.ChunkedArray], keys: Sequence[SortKey], count: int) -> Rows:
    """`order` of rows of which only the key columns are at hand."""
    digits: list[_Digit] = []
    for column, key in zip(columns, keys, strict=True):
        digits.extend(_digits(words_of(column), key))
    return _sorted_by(digits, count)


def _digits(image: FixedWords | TextWords, key: SortKey) -> Iterator[_Digit]:
    if image.missing is not None:
        last = image.missing if not key.nulls_first else ~image.missing
        yield _Plain(last.astype(np.uint64), descending=False)
    if isinstance(image, TextWords):
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
        image = words_of(rows.column(key.column))
        if image.missing is not None:
            same &= ~image.missing
            same[1:] &= ~image.missing[:-1]
        if isinstance(image, TextWords):
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
