"""Where records begin and end: cuts agree with a reader that looks at one character after the other."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import Corrupt
from lockstep.source.files_blocks import Dialect, Lines, Records, count_lines, whole_records

PLAIN = Dialect()
ESCAPED = Dialect(escape=b"\\")
UNQUOTED = Dialect(quote=b"")


def ends_by_hand(data: bytes, dialect: Dialect) -> list[int]:
    """The end of each record, line end included; what is left at the end has none."""
    ends = []
    at = 0
    field_start, quoted = True, False
    while at < len(data):
        byte = data[at : at + 1]
        if dialect.escape and byte == dialect.escape:
            at, field_start = at + 2, False
        elif quoted:
            if byte == dialect.quote:
                if data[at + 1 : at + 2] == dialect.quote:
                    at += 1
                else:
                    quoted = False
            at += 1
        elif byte == dialect.quote and field_start:
            quoted, field_start, at = True, False, at + 1
        elif byte in b"\r\n":
            at += 2 if data[at : at + 2] == b"\r\n" else 1
            ends.append(at)
            field_start = True
        else:
            field_start, at = byte == dialect.delimiter, at + 1
    return ends


TEXTS = st.lists(
    st.sampled_from([b"a", b",", b'"', b'""', b"\n", b"\r\n", b"\r", b"\\", b'"x",']), max_size=40
)


@settings(max_examples=500, deadline=None)
@given(parts=TEXTS, dialect=st.sampled_from([PLAIN, ESCAPED, UNQUOTED]))
def test_a_cut_is_always_at_the_end_of_a_record(parts, dialect):
    data = b"".join(parts)
    ends = ends_by_hand(data, dialect)
    cut = dialect.last_end(data, len(data))
    assert cut == 0 or cut in ends
    # A \r at the very end may be half of a line end; every other end is certain, so one of them is found.
    certain = [end for end in ends if end < len(data) or data[-1:] == b"\n"]
    assert bool(cut) == bool(certain)


@settings(max_examples=500, deadline=None)
@given(parts=TEXTS, dialect=st.sampled_from([PLAIN, ESCAPED, UNQUOTED]))
def test_spans_are_the_records_without_empty_lines(parts, dialect):
    data = b"".join(parts)
    edges = [0, *ends_by_hand(data, dialect)]
    if edges[-1] != len(data):
        edges.append(len(data))
    records = [span for span in pairwise(edges) if data[slice(*span)].strip(b"\r\n")]
    assert dialect.spans(data) == records


@settings(max_examples=200, deadline=None)
@given(
    parts=TEXTS, block_bytes=st.integers(1, 30), records=st.sampled_from([PLAIN, ESCAPED, UNQUOTED, Lines()])
)
def test_blocks_joined_are_the_stream_and_hold_whole_records(parts, block_bytes, records: Records):
    data = b"".join(parts)
    blocks = list(whole_records(io.BytesIO(data), None, records, block_bytes, 1 << 20, "x"))
    assert b"".join(blocks) == data
    in_blocks = [block[slice(*span)] for block in blocks for span in records.spans(block)]
    assert in_blocks == [data[slice(*span)] for span in records.spans(data)]


def test_lines_are_counted_by_all_their_ends():
    assert count_lines(b"a\nb\r\nc\rd") == 3
    assert count_lines(b"a\nb\r\nc\rd", 2) == 1
    assert count_lines(b"\n" * 3_000_001) == 3_000_001


def test_a_stream_that_ends_early_is_corrupt_and_named():
    with pytest.raises(Corrupt, match=r"x\.csv ends 3 bytes early"):
        list(whole_records(io.BytesIO(b"a\nb\n"), 7, PLAIN, 2, 100, "x.csv"))


def test_a_record_may_grow_to_the_limit_and_no_further():
    record = b"x" * 1000 + b"\n"
    assert list(whole_records(io.BytesIO(record * 2), None, PLAIN, 10, 2000, "x")) == [record, record]
    with pytest.raises(Corrupt, match="x has a record of more than 0 MB"):
        list(whole_records(io.BytesIO(record * 2), None, PLAIN, 10, 500, "x"))
