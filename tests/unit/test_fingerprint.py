"""Fingerprints: the vectorised code against a model of one value at a time, and what they promise."""

from __future__ import annotations

import struct
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.fingerprint import fingerprint
from lockstep.job import Fingerprint

M = 2**64
NULL = 0x9AE16A3B2F90404F
LENGTH = 0xD6E8FEB86659FD93


def mix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) % M
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % M
    word = (word ^ word >> 27) * 0x94D049BB133111EB % M
    return word ^ word >> 31


def multiplier(place: int) -> int:
    return mix(place) | 1


def of_words(words: list[int], length: int) -> int:
    return mix((length * LENGTH + sum(word * multiplier(i) for i, word in enumerate(words))) % M)


def of_bytes(data: bytes) -> int:
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    return of_words(words, len(data))


def of_value(value: Any, kind: pa.DataType) -> int:
    """The hash of one value, as the documentation of the module says it."""
    if value is None:
        return NULL
    if pa.types.is_floating(kind):
        wide = pa.types.is_float64(kind)
        if value != value:
            return mix(0x7FF8000000000000 if wide else 0x7FC00000)
        return mix(int.from_bytes(struct.pack("<d" if wide else "<f", value), "little"))
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return mix(int(value) % M)
    if pa.types.is_decimal(kind):
        sign, digits, _ = value.as_tuple()
        unscaled = int("".join(map(str, digits))) * (-1 if sign else 1)
        return of_bytes(unscaled.to_bytes(16, "little", signed=True))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return of_bytes(value.encode())
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return of_bytes(value)
    if pa.types.is_struct(kind):
        return of_words([of_value(value[f.name], f.type) for f in kind], kind.num_fields)
    if pa.types.is_map(kind):
        entries = [of_words([of_value(k, kind.key_type), of_value(v, kind.item_type)], 2) for k, v in value]
        return mix((sum(entries) + len(entries) * LENGTH) % M)
    return of_words([of_value(v, kind.value_type) for v in value], len(value))


def of_column(values: list[Any], kind: pa.DataType) -> int:
    return sum(of_value(value, kind) for value in values) % M


def prints(array: pa.Array | pa.ChunkedArray) -> int:
    return fingerprint(pa.table({"c": array})).columns["c"]


def or_null(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.none() | values, max_size=40)


texts = st.text(max_size=30) | st.sampled_from(
    ["", "a" * 7, "a" * 8, "a" * 9, "b" * 64, "b" * 65, "c" * 3000]
)
integers = st.integers(-(2**63), 2**63 - 1)
COLUMNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "bool": (pa.bool_(), st.booleans()),
    "int32": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "int64": (pa.int64(), integers),
    "uint64": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "float": (pa.float32(), st.floats(width=32)),
    "double": (pa.float64(), st.floats()),
    "decimal": (pa.decimal128(38, 4), st.integers(-(10**37), 10**37).map(lambda i: Decimal(i).scaleb(-4))),
    "string": (pa.string(), texts),
    "large_string": (pa.large_string(), texts),
    "string_view": (pa.string_view(), texts),
    "binary": (pa.binary(), st.binary(max_size=40)),
    "fixed16": (pa.binary(16), st.binary(min_size=16, max_size=16)),
    "fixed3": (pa.binary(3), st.binary(min_size=3, max_size=3)),
    "list": (pa.list_(pa.int64()), st.lists(st.none() | integers, max_size=5)),
    "large_list": (pa.large_list(pa.string()), st.lists(st.none() | texts, max_size=4)),
    "nested": (pa.list_(pa.list_(pa.int32())), st.lists(st.none() | st.lists(st.integers(0, 9), max_size=3))),
    "struct": (
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
        st.fixed_dictionaries({"a": st.none() | integers, "b": st.none() | texts}),
    ),
    "map": (
        pa.map_(pa.string(), pa.int64()),
        st.dictionaries(texts, st.none() | integers, max_size=4).map(lambda d: list(d.items())),
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_type_hashes_as_the_model_says_whole_sliced_and_chunked(name, data):
    kind, strategy = COLUMNS[name]
    values = data.draw(or_null(strategy))
    array = pa.array(values, kind)
    expected = of_column(array.to_pylist(), kind)
    assert prints(array) == expected
    start = data.draw(st.integers(0, len(values)))
    stop = data.draw(st.integers(start, len(values)))
    parts = [array.slice(0, start), array.slice(start, stop - start), array.slice(stop)]
    assert sum(prints(part) for part in parts) % M == expected
    assert prints(pa.chunked_array(parts, kind)) == expected


def test_the_hash_of_known_values_never_changes():
    """Manifests keep fingerprints: a change here breaks `verify` for every table written before."""
    batch = pa.record_batch(
        {
            "i": pa.array([1, None, -1], pa.int64()),
            "s": pa.array(["", None, "lockstep, in step"]),
            "f": pa.array([0.5, float("nan"), None]),
            "l": pa.array([[1, 2], [], None], pa.list_(pa.int32())),
        }
    )
    assert fingerprint(batch).to_json() == {
        "rows": 3,
        "columns": {
            "i": "10c5099ed3f7c930",
            "s": "f54ef18dd051af11",
            "f": "566174612f7eca02",
            "l": "0183d3b0d60de49c",
        },
    }


@pytest.mark.parametrize("rows", [0, 1, 32_767, 32_768, 32_769, 70_000])
def test_slices_of_work_do_not_show(rows):
    values = np.arange(rows)
    array = pa.array(values)
    texts_array = pa.array([f"value {i}" * (i % 4) for i in range(rows)])
    assert prints(array) == of_column(values.tolist(), pa.int64())
    assert prints(texts_array) == of_column(texts_array.to_pylist(), pa.string())


def test_long_texts_beyond_every_shortcut_hash_as_the_model_says():
    long = [bytes(range(256)) * 10, b"x" * 3_000_001, b"", None, b"y" * 65] + [b"z" * 2100] * 300
    array = pa.array(long, pa.binary())
    assert prints(array) == of_column(long, pa.binary())
    assert prints(array.slice(1, 3)) == of_column(long[1:4], pa.binary())


@pytest.mark.parametrize(
    "lengths",
    [[2], [8], [9], [64], [65], [200], [0, 7, 8], [60, 70], [1, 1, 1, 100], [0, 5, 900], [2040, 2056]],
    ids=str,
)
def test_many_texts_hash_as_the_model_says_however_long_they_are(lengths):
    texts = [bytes((i + at) % 256 for at in range(lengths[i % len(lengths)])) for i in range(600)]
    array = pa.array(texts, pa.binary())
    assert prints(array) == of_column(texts, pa.binary())
    assert prints(array.slice(3, 500)) == of_column(texts[3:503], pa.binary())


def test_dictionary_and_run_end_encoding_do_not_show():
    values = ["a", None, "b", "a", "a", "c" * 20] * 50
    plain = pa.array(values)
    encoded = plain.dictionary_encode()
    assert prints(encoded) == prints(plain)
    assert prints(encoded.slice(7, 100)) == prints(plain.slice(7, 100))
    null_in_values = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 1]), pa.array(["a", None]))
    assert prints(null_in_values) == prints(pa.array(["a", None, None, None]))
    nested = pa.ListArray.from_arrays(pa.array([0, 2, 3]), encoded.slice(0, 3))
    assert prints(nested) == prints(pa.array([["a", None], ["b"]]))
    assert (
        prints(pa.DictionaryArray.from_arrays(pa.array([None], pa.int8()), pa.array([], pa.string()))) == NULL
    )
    assert prints(pa.compute.run_end_encode(pa.array([5, 5, 6]))) == prints(pa.array([5, 5, 6]))


def test_widths_and_wrappers_do_not_show():
    values = ["a", None, "bcdefghijkl"]
    assert prints(pa.array(values)) == prints(pa.array(values, pa.large_string()))
    assert prints(pa.array(values)) == prints(pa.array(values, pa.string_view()))
    lists = [[1, 2], None, [3, 4]]
    assert prints(pa.array(lists)) == prints(pa.array(lists, pa.large_list(pa.int64())))
    assert prints(pa.array(lists)) == prints(pa.array(lists, pa.list_(pa.int64(), 2)))
    raw = pa.array([bytes(range(16)), None], pa.binary(16))
    assert prints(pa.ExtensionArray.from_storage(pa.uuid(), raw)) == prints(raw)


def test_what_lies_under_a_null_does_not_show():
    hidden = pa.Array.from_buffers(
        pa.int64(), 2, [pa.py_buffer(b"\x02"), pa.py_buffer(np.array([99, 7], np.int64))]
    )
    assert prints(hidden) == prints(pa.array([None, 7]))
    offsets = pa.array([0, 2, 3], pa.int32())
    lists = pa.ListArray.from_arrays(offsets, pa.array([1, 2, 3]), mask=pa.array([True, False]))
    assert prints(lists) == prints(pa.array([None, [3]]))
    codes = pa.Array.from_buffers(
        pa.int8(), 2, [pa.py_buffer(b"\x02"), pa.py_buffer(np.array([99, 0], np.int8))]
    )
    coded = pa.DictionaryArray.from_arrays(codes, pa.array(["a"]))
    assert prints(coded) == prints(pa.array([None, "a"]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.none() | integers, st.none() | texts), min_size=1, max_size=30), st.randoms())
def test_order_does_not_matter_but_every_row_does(rows, random):
    def of(some: list[tuple[Any, Any]]) -> Fingerprint:
        return fingerprint(
            pa.record_batch(
                [pa.array([r[0] for r in some], pa.int64()), pa.array([r[1] for r in some], pa.string())],
                ["i", "s"],
            )
        )

    whole = of(rows)
    shuffled = random.sample(rows, len(rows))
    assert of(shuffled) == whole
    cut = random.randrange(len(rows) + 1)
    assert of(rows[:cut]) + of(rows[cut:]) == whole
    twice = of([*rows, rows[0]])
    missing = of(rows[1:])
    for changed in (twice, missing):
        assert changed.rows != whole.rows
        assert changed.columns["i"] != whole.columns["i"]
        assert changed.columns["s"] != whole.columns["s"]
    # A pair of equal rows does not cancel itself out.
    assert of([*rows, rows[0], rows[0]]).columns != whole.columns


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["ab", "c"], ["a", "bc"]),
        (["a\0"], ["a"]),
        ([""], [None]),
        ([[1, 2]], [[2, 1]]),
        ([[1], [2]], [[1, 2], []]),
        ([[]], [None]),
        ([[None]], [[]]),
        ([[[1], []]], [[[], [1]]]),
        ([{"a": 1, "b": 2}], [{"a": 2, "b": 1}]),
        ([{"a": None, "b": None}], [None]),
        ([0], [None]),
        ([0.0], [-0.0]),
        (["x" * 64 + "a"], ["x" * 64 + "b"]),
        (["12345678" + "abcdefgh"], ["abcdefgh" + "12345678"]),
    ],
)
def test_values_that_look_alike_hash_apart(one, other):
    kind = pa.array([*one, *other]).type
    assert prints(pa.array(one, kind)) != prints(pa.array(other, kind))


def test_every_nan_is_the_same_and_map_order_means_nothing():
    quiet = np.array([0x7FF8000000000001, 0xFFF8000000000000], np.uint64).view(np.float64)
    assert prints(pa.array(quiet)) == prints(pa.array([float("nan")] * 2))
    kind = pa.map_(pa.string(), pa.int32())
    assert prints(pa.array([[("a", 1), ("b", 2)]], kind)) == prints(pa.array([[("b", 2), ("a", 1)]], kind))
    assert prints(pa.array([[("a", 1), ("b", 2)]], kind)) != prints(pa.array([[("a", 2), ("b", 1)]], kind))


def test_a_type_that_is_never_written_is_refused():
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
    with pytest.raises(TypeError, match="union"):
        prints(union)
