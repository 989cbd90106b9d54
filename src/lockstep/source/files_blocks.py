"""Where records begin and end in text, and text cut into blocks of whole records.

A record of CSV ends at a line end that is outside of quotes: a quote opens only at the beginning of a field,
two quotes inside of it are one, and a quote anywhere else is an ordinary character. Python's csv module and
Arrow's parser read it so, and cuts must agree with the parser byte by byte. Line ends are \\n, \\r\\n, or \\r
alone. An empty line is no record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from lockstep.errors import Corrupt

Data = bytes | bytearray
Offsets = npt.NDArray[np.int64]

NEWLINE: Final = 0x0A
RETURN: Final = 0x0D
COUNTED_AT_ONCE: Final = 1 << 20


class Records(Protocol):
    """How a kind of text falls into records."""

    def last_end(self, data: Data, size: int) -> int:
        """The end of the last record that is surely whole in the first `size` bytes; 0 if none is.

        They begin where a record does.
        """
        ...

    def spans(self, data: bytes) -> list[tuple[int, int]]:
        """Begin and end, line end included, of each record of a block that ends where a record does."""
        ...

    def count_if_one_line_each(self, data: bytes) -> int | None:
        """How many records a block has, if it is plain that each of its lines is one; else None."""
        ...

    def ends_open(self, data: bytes) -> bool:
        """Whether the last record of a block opens something that is not closed."""
        ...


@dataclass(frozen=True)
class Dialect:
    """The characters that give CSV its shape, one byte each; empty where there is none."""

    delimiter: bytes = b","
    quote: bytes = b'"'
    escape: bytes = b""

    def last_end(self, data: Data, size: int) -> int:
        if self.escape and data.find(self.escape, 0, size) >= 0:
            return self._walked_end(bytes(memoryview(data)[:size]))
        if not self.quote or data.find(self.quote, 0, size) < 0:
            return _last_line_end(data, size)
        quotes = _positions(data, size, self.quote)
        end, before = self._last_end_outside(data, size, quotes)
        if self._pairs_up(data, size, quotes[:before]):
            return end
        return self._walked_end(bytes(memoryview(data)[:size]))

    def spans(self, data: bytes) -> list[tuple[int, int]]:
        if self.escape and self.escape in data:
            return self._walked_spans(data)
        ends = line_ends(data)
        if self.quote and self.quote in data:
            quotes = _positions(data, len(data), self.quote)
            if not self._pairs_up(data, len(data), quotes):
                return self._walked_spans(data)
            ends = ends[np.searchsorted(quotes, ends) % 2 == 0]
        return _spans_between(data, ends.tolist())

    def count_if_one_line_each(self, data: bytes) -> int | None:
        marks = (self.quote, self.escape, b"\r", b"\n\n")
        if data.startswith(b"\n") or any(mark and mark in data for mark in marks):
            return None
        return count_lines(data) + (not data.endswith(b"\n"))

    def ends_open(self, data: bytes) -> bool:
        if not self.quote or self.quote not in data:
            return False
        spans = self.spans(data)
        return bool(spans) and self._closed_record.fullmatch(data, *spans[-1]) is None

    def _last_end_outside(self, data: Data, size: int, quotes: Offsets) -> tuple[int, int]:
        """The last line end with as many quotes opened as closed, and how many quotes say so."""
        for find in (_rfind_newline, _rfind_lone_return):
            before = size
            while (at := find(data, before, size)) >= 0:
                inside = int(np.searchsorted(quotes, at))
                if inside % 2 == 0:
                    return at + 1, inside
                before = int(quotes[inside - 1])
        return 0, len(quotes)

    def _pairs_up(self, data: Data, size: int, quotes: Offsets) -> bool:
        """Whether counting quotes tells inside from outside: each opens a field, closes one, or is doubled.

        A doubled quote closes and opens again with nothing in between, so it counts like any other pair.
        """
        view = np.frombuffer(data, np.uint8, size)
        opening, closing = quotes[0::2], quotes[1::2]
        before = view[opening[opening > 0] - 1]
        after = view[closing[closing < size - 1] + 1]
        return bool(self._beside_quotes[before].all() and self._beside_quotes[after].all())

    @cached_property
    def _beside_quotes(self) -> npt.NDArray[np.bool_]:
        allowed = np.zeros(256, np.bool_)
        allowed[[self.delimiter[0], self.quote[0], NEWLINE, RETURN]] = True
        return allowed

    # The careful way, one record at a time: escapes, and quotes in unusual places

    @cached_property
    def _record(self) -> re.Pattern[bytes]:
        separator = re.escape(self.delimiter)
        field = self._plain
        if self.quote:
            field = rb"(?:%s(?:%s)?+|%s)" % (self._opened, self._closing, self._plain)
        return re.compile(rb"%s(?:%s%s)*+" % (field, separator, field))

    @cached_property
    def _closed_record(self) -> re.Pattern[bytes]:
        """A record whose quotes are all closed, with its line end."""
        separator, quote, escape = (re.escape(c) for c in (self.delimiter, self.quote, self.escape))
        field = rb"(?:%s%s|(?!%s)%s)" % (self._opened, self._closing, quote, self._plain)
        unfinished = rb"(?:%s)?+" % escape  # an escape with nothing after it
        return re.compile(rb"%s(?:%s%s)*+%s(?:\r\n|\r|\n)?+" % (field, separator, field, unfinished))

    @property
    def _plain(self) -> bytes:
        separator, escape = re.escape(self.delimiter), re.escape(self.escape)
        return rb"(?:[^%s\r\n%s]%s)*+" % (separator, escape, self._escaped)

    @property
    def _opened(self) -> bytes:
        """A field from its quote up to where it is closed, or to the end."""
        quote, escape = re.escape(self.quote), re.escape(self.escape)
        return rb"%s(?:[^%s%s]|%s%s%s)*+" % (quote, quote, escape, quote, quote, self._escaped)

    @property
    def _closing(self) -> bytes:
        return re.escape(self.quote) + self._plain

    @property
    def _escaped(self) -> bytes:
        return rb"|%s[\s\S]" % re.escape(self.escape) if self.escape else b""

    def _walk(self, data: bytes) -> Iterator[tuple[int, int, bool]]:
        """Begin, end, and whether a line end was seen; an end that could be half of \\r\\n was not."""
        start = 0
        while start < len(data):
            match = self._record.match(data, start)
            end = match.end() if match else start
            if self.escape and data[end : end + 1] == self.escape:
                end = len(data)  # an escape with nothing after it
            if end == len(data):
                yield start, end, False
                return
            if data[end] == RETURN:
                sure = end + 1 < len(data)
                end += 2 if data[end + 1 : end + 2] == b"\n" else 1
            else:
                sure, end = True, end + 1
            yield start, end, sure
            start = end

    def _walked_end(self, data: bytes) -> int:
        last = 0
        for _, end, sure in self._walk(data):
            if sure:
                last = end
        return last

    def _walked_spans(self, data: bytes) -> list[tuple[int, int]]:
        return [(start, end) for start, end, _ in self._walk(data) if data[start:end].strip(b"\r\n")]


@dataclass(frozen=True)
class Lines:
    """One record per line, whatever is in it."""

    def last_end(self, data: Data, size: int) -> int:
        return data.rfind(b"\n", 0, size) + 1

    def spans(self, data: bytes) -> list[tuple[int, int]]:
        view = np.frombuffer(data, np.uint8)
        ends = (np.flatnonzero(view == NEWLINE) + 1).tolist()
        return [span for span in _between(data, ends) if data[span[0] : span[1]].strip(b" \t\r\n")]

    def count_if_one_line_each(self, data: bytes) -> int | None:
        return None

    def ends_open(self, data: bytes) -> bool:
        return False


def count_lines(data: Data, size: int | None = None) -> int:
    """Line ends in the first `size` bytes: \\n, \\r\\n, and \\r alone."""
    end = len(data) if size is None else size
    lines = 0
    for start in range(0, end, COUNTED_AT_ONCE):
        view = np.frombuffer(data, np.uint8, min(COUNTED_AT_ONCE, end - start), start)
        lines += int(np.count_nonzero(view == NEWLINE))
    if data.find(b"\r", 0, end) >= 0:
        lines += data.count(b"\r", 0, end) - data.count(b"\r\n", 0, end)
    return lines


def _positions(data: Data, size: int, byte: bytes) -> Offsets:
    return np.flatnonzero(np.frombuffer(data, np.uint8, size) == byte[0])


def line_ends(data: bytes) -> Offsets:
    """Where lines end: after each \\n, and after each \\r that no \\n follows."""
    view = np.frombuffer(data, np.uint8)
    ends = view == NEWLINE
    if b"\r" in data:
        lone = view == RETURN
        lone[:-1] &= view[1:] != NEWLINE
        ends |= lone
    return np.flatnonzero(ends) + 1


def _rfind_newline(data: Data, before: int, size: int) -> int:
    return data.rfind(b"\n", 0, before)


def _rfind_lone_return(data: Data, before: int, size: int) -> int:
    """The last \\r that no \\n follows. One at the very end may be half of a line end, and does not count."""
    at = data.rfind(b"\r", 0, min(before, size - 1))
    while at >= 0 and data[at + 1] == NEWLINE:
        at = data.rfind(b"\r", 0, at)
    return at


def _last_line_end(data: Data, size: int) -> int:
    return (_rfind_newline(data, size, size) + 1) or (_rfind_lone_return(data, size, size) + 1)


def _between(data: bytes, ends: list[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for end in ends:
        yield start, end
        start = end
    if start < len(data):
        yield start, len(data)


def _spans_between(data: bytes, ends: list[int]) -> list[tuple[int, int]]:
    return [
        (start, end)
        for start, end in _between(data, ends)
        if end - start > 2 or data[start:end].strip(b"\r\n")
    ]


class Readable(Protocol):
    def readinto(self, into: memoryview, /) -> int: ...


def whole_records(
    stream: Readable, length: int | None, records: Records, block_bytes: int, most_bytes: int, name: str
) -> Iterator[bytes]:
    """What the stream holds, or its next `length` bytes, in blocks of whole records of about `block_bytes`.

    A record that is larger makes its block larger. Joined, the blocks are the stream.
    Raises: Corrupt, naming the input, for a record above `most_bytes`, and if it ends before `length`.
    """
    for data, size in cuts(stream, length, records, block_bytes, most_bytes, name):
        yield bytes(memoryview(data)[:size])


def cuts(
    stream: Readable, length: int | None, records: Records, block_bytes: int, most_bytes: int, name: str
) -> Iterator[tuple[bytearray, int]]:
    """As `whole_records`, without a copy: a block is the beginning of a buffer that the next one reuses."""
    buffer = bytearray(block_bytes)
    held = 0
    left = length
    while True:
        room = len(buffer) - held if left is None else min(len(buffer) - held, left)
        fresh = stream.readinto(memoryview(buffer)[held : held + room]) if room else 0
        held += fresh
        if left is not None:
            left -= fresh
            if not fresh and left:
                raise Corrupt(f"{name} ends {left} bytes early", hint="import it anew")
        if not fresh or left == 0:
            if held:
                yield buffer, held
            return
        end = records.last_end(buffer, held)
        if end:
            yield buffer, end
            buffer[: held - end] = buffer[end:held]
            held -= end
        elif held == len(buffer):
            if held >= most_bytes:
                raise _too_large(name, most_bytes)
            buffer.extend(bytes(held))


def _too_large(name: str, most_bytes: int) -> Corrupt:
    return Corrupt(
        f"{name} has a record of more than {most_bytes // 1_000_000} MB",
        hint="if that is not so, a quote is opened and never closed; if it is, raise limits.task_memory",
    )
