"""The order of rows, against a plain model in Python."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.job import SortKey
from lockstep.keys import KeyColumns, SortedRows, cut, key_from_json, key_of, key_to_json
from lockstep.ordering import order

pytestmark = pytest.mark.long

LONG = "x" * 700
TEXTS = ["", "a", "a\0", "a\0\0", "ab", "é", "a" * 8, "a" * 8 + "b", "a" * 8 + "\0", LONG, LONG + "y"]
FLOATS = [0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, -5e-324, 1.5]
UUIDS = [bytes(16), b"\xff" * 16, bytes(15) + b"\1", b"\x80" + bytes(15)]
TYPES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "boolean": (pa.bool_(), st.booleans()),
    "int": (pa.int32(), st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 2)),
    "long": (pa.int64(), st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2)),
    "unsigned": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "float": (pa.float32(), st.floats(width=32) | st.sampled_from([0.0, -0.0, math.nan])),
    "double": (pa.float64(), st.floats() | st.sampled_from(FLOATS)),
    "date": (pa.date32(), st.integers(-3, 3)),
    "time": (pa.time64("us"), st.integers(0, 86_399_999_999)),
    "timestamp": (pa.timestamp("us"), st.integers(-(2**50), 2**50)),
    "timestamptz": (pa.timestamp("us", "UTC"), st.integers(-2, 2)),
    "string": (pa.string(), st.sampled_from(TEXTS) | st.text(max_size=12)),
    "large_string": (pa.large_string(), st.sampled_from(TEXTS)),
    "binary": (pa.binary(), st.binary(max_size=20) | st.sampled_from([b"\0", b"\0\xff", b"\xff", b""])),
    "uuid": (pa.binary(16), st.sampled_from(UUIDS) | st.binary(min_size=16, max_size=16)),
    "fixed": (pa.binary(3), st.binary(min_size=3, max_size=3)),
    "decimal": (
        pa.decimal128(38, 2),
        st.integers(-(10**37), 10**37).map(lambda n: Decimal(n).scaleb(-2)) | st.integers(-2, 2).map(Decimal),
    ),
}


@functools.total_ordering
class Backwards:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Backwards) and bool(self.value == other.value)

    def __lt__(self, other: Backwards) -> bool:
        return bool(other.value < self.value)


def plain(array: pa.Array) -> list[Any]:
    if pa.types.is_temporal(array.type):
        array = array.cast(pa.int32() if pa.types.is_date(array.type) else pa.int64())
    return array.to_pylist()


def model(value: Any, key: SortKey) -> Any:
    """A value as Python orders it the way Iceberg orders the column."""
    if value is None:
        return (0 if key.nulls_first else 2, 0)
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, float):
        value = (math.isnan(value), 0.0 if math.isnan(value) else value, math.copysign(1, value))
        value = (True, 0.0, 1.0) if value[0] else value
    return (1, Backwards(value) if key.descending else value)


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.RecordBatch, list[SortKey]]:
    names = draw(st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=3, unique=True))
    rows = draw(st.integers(0, 40))
    columns = {}
    for name in names:
        arrow, values = TYPES[name]
        found = draw(st.lists(st.none() | values, min_size=rows + 1, max_size=rows + 1))
        columns[name] = pa.array(found, arrow).slice(draw(st.sampled_from([0, 1])), rows)
    flag = st.booleans()
    keys = [SortKey(name, "identity", draw(flag), draw(flag)) for name in names]
    return pa.record_batch(columns), keys


def models(rows: pa.RecordBatch, keys: list[SortKey]) -> list[tuple[Any, ...]]:
    columns = [[model(value, key) for value in plain(rows.column(key.column))] for key in keys]
    return list(zip(*columns, strict=True))


@settings(max_examples=400, deadline=None)
@given(tables())
def test_rows_are_ordered_as_the_model_says_and_equal_rows_keep_their_order(
    drawn: tuple[pa.RecordBatch, list[SortKey]],
) -> None:
    rows, keys = drawn
    wanted = models(rows, keys)
    assert order(rows, keys).tolist() == sorted(range(rows.num_rows), key=wanted.__getitem__)


@settings(max_examples=300, deadline=None)
@given(tables(), st.randoms(use_true_random=False))
def test_the_key_of_one_row_compares_as_the_rows_do_and_is_found_where_it_stands(
    drawn: tuple[pa.RecordBatch, list[SortKey]], random: Any
) -> None:
    rows, keys = drawn
    rows = rows.take(pa.array(order(rows, keys)))
    wanted = models(rows, keys)
    found = [key_of(rows, at, keys) for at in range(rows.num_rows)]
    assert found == sorted(found)
    assert [a == b for a, b in itertools.pairwise(found)] == [a == b for a, b in itertools.pairwise(wanted)]
    ordered = SortedRows(rows, keys)
    for key in random.sample(found, min(5, len(found))):
        for bound in (key, cut(key), key_from_json(key_to_json(cut(key)))):
            assert ordered.first_not_before(bound) == bisect.bisect_left(found, bound)
            assert ordered.first_after(bound) == bisect.bisect_right(found, bound)


def test_a_bound_that_was_cut_lies_before_every_row_that_begins_like_it() -> None:
    keys = [SortKey("s"), SortKey("n")]
    rows = pa.record_batch({"s": ["w", LONG, LONG + "y", "y"], "n": [1, 2, 3, 4]})
    bound = cut(key_of(rows, 2, keys))
    assert max(len(code) for code in bound) < 200
    assert SortedRows(rows, keys).first_not_before(bound) == SortedRows(rows, keys).first_after(bound) == 1


@pytest.mark.parametrize("count", [1, 2, 70_000])
def test_many_keys_wider_than_a_word_are_ordered(count: int) -> None:
    wide = [(at * 2_654_435_761) % 2**64 - 2**63 for at in range(count)]
    rows = pa.record_batch({"a": pa.array([at % 3 for at in range(count)]), "b": pa.array(wide, pa.int64())})
    keys = [SortKey("a"), SortKey("b", descending=True)]
    wanted = sorted(range(count), key=lambda at: (at % 3, -wide[at]))
    assert order(rows, keys).tolist() == wanted


def test_two_equal_texts_of_fifty_megabytes_are_ordered_without_a_step_for_each_word() -> None:
    text = b"z" * 50_000_000
    rows = pa.record_batch({"s": pa.array([text + b"b", text, b"a", text], pa.large_binary())})
    assert order(rows, [SortKey("s")]).tolist() == [2, 1, 3, 0]


@pytest.mark.parametrize(
    ("transform", "wanted"),
    [("day", [3, 0, 2, 1]), ("hour", [3, 0, 2, 1]), ("bucket[1]", [3, 0, 1, 2]), ("identity", [3, 2, 0, 1])],
)
def test_rows_are_ordered_by_a_transform_of_a_column(transform: str, wanted: list[int]) -> None:
    day = 86_400_000_000
    schema = {"fields": [{"id": 1, "name": "ts", "type": "timestamp", "required": False}]}
    rows = pa.record_batch({"ts": pa.array([10, day, 5, None], pa.timestamp("us"))})
    columns = KeyColumns([SortKey("ts", transform)], schema)
    assert order(columns.attach(rows), columns.keys).tolist() == wanted


def test_rows_are_ordered_by_buckets_of_texts_truncated_texts_and_members_of_structs() -> None:
    schema = {
        "fields": [
            {"id": 1, "name": "s", "type": "string", "required": False},
            {
                "id": 2,
                "name": "o",
                "required": False,
                "type": {
                    "type": "struct",
                    "fields": [{"id": 3, "name": "n", "type": "decimal(9, 2)", "required": False}],
                },
            },
        ]
    }
    numbers = [Decimal("1.25"), Decimal("1.20"), None]
    rows = pa.record_batch(
        {
            "s": ["abd", "abc", None],
            "o": pa.array([{"n": n} for n in numbers], pa.struct({"n": pa.decimal128(9, 2)})),
        }
    )
    for key, wanted in [
        (SortKey("s", "truncate[2]"), [2, 0, 1]),
        (SortKey("s", "truncate[3]", nulls_first=False), [1, 0, 2]),
        (SortKey("o.n", "truncate[100]"), [2, 0, 1]),
        (SortKey("o.n"), [2, 1, 0]),
        (SortKey("s", "void"), [0, 1, 2]),
    ]:
        columns = KeyColumns([key], schema)
        assert order(columns.attach(rows), columns.keys).tolist() == wanted, key
    columns = KeyColumns([SortKey("s", "bucket[16]")], schema)
    (bucket,) = (c for c in columns.attach(rows).schema.names if c.startswith("_lockstep_"))
    assert columns.attach(rows).column(bucket).null_count == 1


def test_every_nan_is_one_key_whatever_its_bits_are() -> None:
    odd = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]
    rows = pa.record_batch({"x": pa.array([odd, math.nan, math.inf])})
    assert order(rows, [SortKey("x")]).tolist() == [2, 0, 1]
    assert key_of(rows, 0, [SortKey("x")]) == key_of(rows, 1, [SortKey("x")])
