"""Statistics enclose every value, are exact where nothing is cut, and agree with Iceberg's own writers."""

from __future__ import annotations

import math
import struct
from base64 import b64decode
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.conversions import from_bytes
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.schema import Schema
from pyiceberg.types import PrimitiveType

from lockstep.errors import Corrupt
from lockstep.sink.shape import FileShape
from lockstep.sink.stats import StatsBuilder, modes_of, upper_bound

UNSORTED: dict[str, Any] = {"order-id": 0, "fields": []}


def schema_of(**types: Any) -> dict[str, Any]:
    return {
        "type": "struct",
        "schema-id": 0,
        "fields": [
            {"id": n, "name": name, "required": False, "type": type_}
            for n, (name, type_) in enumerate(types.items(), 1)
        ],
    }


def written(
    schema: dict[str, Any], groups: list[pa.RecordBatch], properties: dict[str, str] | None = None
) -> tuple[dict[str, Any], pq.FileMetaData]:
    """The statistics of a file with these row groups, and its footer."""
    shape = FileShape.of(schema, groups[0].schema)
    builder = StatsBuilder(shape.leaves, modes_of(schema, UNSORTED, properties or {}))
    sink = pa.BufferOutputStream()
    footers: list[Any] = []
    with pq.ParquetWriter(
        sink, shape.schema, store_decimal_as_integer=True, store_schema=False, metadata_collector=footers
    ) as writer:
        for group in groups:
            rows = shape.labelled([shape.plain(group)])
            builder.note(rows)
            writer.write_table(rows, row_group_size=max(1, rows.num_rows))
    return builder.finish(footers[0]), footers[0]


def stats_of(array: pa.Array, type_: Any, mode: str = "truncate(16)") -> dict[str, Any]:
    half = len(array) // 2
    groups = [pa.record_batch({"c": part}) for part in (array[:half], array[half:]) if len(part)]
    return written(schema_of(c=type_), groups, {"write.metadata.metrics.default": mode})[0]


def bounds(stats: dict[str, Any], type_: Any, field_id: int = 1) -> tuple[Any, Any]:
    primitive = Schema.model_validate(schema_of(c=type_)).find_type("c")
    assert isinstance(primitive, PrimitiveType)
    found = []
    for which in ("lower_bounds", "upper_bounds"):
        raw = stats[which].get(str(field_id))
        found.append(None if raw is None else from_bytes(primitive, b64decode(raw)))
    return found[0], found[1]


EXACT: list[tuple[str, pa.DataType, st.SearchStrategy[Any]]] = [
    ("int", pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    ("long", pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    ("date", pa.date32(), st.integers(-(2**31), 2**31 - 1)),
    ("time", pa.time64("us"), st.integers(0, 86_399_999_999)),
    ("timestamp", pa.timestamp("us"), st.integers(-(2**63), 2**63 - 1)),
    ("timestamptz", pa.timestamp("us", "UTC"), st.integers(-(2**63), 2**63 - 1)),
    ("timestamp_ns", pa.timestamp("ns"), st.integers(-(2**63), 2**63 - 1)),
    ("timestamptz_ns", pa.timestamp("ns", "UTC"), st.integers(-(2**63), 2**63 - 1)),
    ("boolean", pa.bool_(), st.booleans()),
    ("fixed[20]", pa.binary(20), st.binary(min_size=20, max_size=20)),
]


@pytest.mark.parametrize(("type_", "arrow", "values"), EXACT, ids=[case[0] for case in EXACT])
def test_bounds_of_fixed_width_types_are_the_least_and_the_greatest_value(type_, arrow, values):
    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.none() | values, min_size=1, max_size=20))
    def check(rows: list[Any]) -> None:
        stats = stats_of(pa.array(rows, arrow), type_)
        there = [row for row in rows if row is not None]
        assert stats["value_counts"]["1"] == len(rows)
        assert stats["null_value_counts"]["1"] == len(rows) - len(there)
        if not there:
            assert stats["lower_bounds"] == stats["upper_bounds"] == {}
            return
        forms = {"int": "<i", "date": "<i", "boolean": "<?"}
        expected = [
            v if isinstance(v, bytes) else struct.pack(forms.get(type_, "<q"), v)
            for v in (min(there), max(there))
        ]
        found = [b64decode(stats[which]["1"]) for which in ("lower_bounds", "upper_bounds")]
        assert found == expected

    check()


def test_a_uuid_has_counts_and_no_bounds_because_readers_order_it_differently():
    stats = stats_of(pa.array([b"\x00" * 16, b"\xff" * 16, None], pa.binary(16)), "uuid")
    assert (stats["value_counts"]["1"], stats["null_value_counts"]["1"]) == (3, 1)
    assert stats["lower_bounds"] == stats["upper_bounds"] == {}


@pytest.mark.parametrize(
    ("precision", "scale"), [(1, 0), (9, 2), (10, 0), (18, 18), (19, 3), (38, 10), (38, 0)]
)
def test_bounds_of_decimals_are_exact_in_every_physical_type(precision, scale):
    top = 10**precision - 1

    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.integers(-top, top), min_size=1, max_size=20))
    def check(unscaled: list[int]) -> None:
        exact = [Decimal((v < 0, [int(d) for d in str(abs(v))], -scale)) for v in unscaled]
        type_ = f"decimal({precision}, {scale})"
        stats = stats_of(pa.array(exact, pa.decimal128(precision, scale)), type_)
        assert bounds(stats, type_) == (min(exact), max(exact))

    check()


ROWS = st.none() | st.floats(width=32) | st.sampled_from([0.0, -0.0, math.nan])


@settings(max_examples=100, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=20), st.sampled_from(["float", "double"]))
def test_nan_is_counted_and_is_never_a_bound(rows, type_):
    arrow = pa.float32() if type_ == "float" else pa.float64()
    stats = stats_of(pa.array(rows, arrow), type_)
    numbers = [row for row in rows if row is not None and not math.isnan(row)]
    assert stats["nan_value_counts"]["1"] == sum(row is not None and math.isnan(row) for row in rows)
    assert stats["null_value_counts"]["1"] == sum(row is None for row in rows)
    if not numbers:
        assert stats["lower_bounds"] == stats["upper_bounds"] == {}
        return
    lower, upper = bounds(stats, type_)
    assert (lower, upper) == (min(numbers), max(numbers))
    # Readers that tell zeros apart put -0.0 before 0.0.
    signs = {math.copysign(1, row) for row in numbers if row == 0}
    assert lower != 0 or math.copysign(1, lower) == min(signs)
    assert upper != 0 or math.copysign(1, upper) == max(signs)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=8), min_size=1, max_size=8), st.integers(1, 4))
def test_bounds_of_texts_enclose_every_value_and_keep_to_their_length(rows, length):
    stats = stats_of(pa.array(rows, pa.string()), "string", f"truncate({length})")
    lower, upper = bounds(stats, "string")
    least, greatest = min(rows, key=str.encode), max(rows, key=str.encode)
    assert lower == least[:length]
    if upper is None:
        assert set(greatest[:length]) == {"\U0010ffff"}
    else:
        assert upper.encode() >= greatest.encode()
        assert len(upper) <= length
        assert len(greatest) > length or upper == greatest


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=8), min_size=1, max_size=8), st.integers(1, 4))
def test_bounds_of_binary_enclose_every_value_and_keep_to_their_length(rows, length):
    stats = stats_of(pa.array(rows, pa.binary()), "binary", f"truncate({length})")
    lower, upper = bounds(stats, "binary")
    assert lower == min(rows)[:length]
    if upper is None:
        assert set(max(rows)[:length]) == {0xFF}
    else:
        assert upper >= max(rows)
        assert len(upper) <= length
        assert len(max(rows)) > length or upper == max(rows)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.none() | st.text(max_size=40), min_size=1, max_size=8))
def test_full_mode_cuts_nothing(rows):
    stats = stats_of(pa.array(rows, pa.string()), "string", "full")
    there = [row for row in rows if row is not None]
    ends = (min(there, key=str.encode), max(there, key=str.encode)) if there else (None, None)
    assert bounds(stats, "string") == ends


@pytest.mark.parametrize("size", [2000, 2048, 2049, 4095, 4097, 100_000])
def test_long_texts_have_bounds_though_the_footer_has_none(size):
    rows = pa.array(["m", "é" * size, None, "a" * size])
    assert bounds(stats_of(rows, "string"), "string") == ("a" * 16, "é" * 15 + "ê")
    assert bounds(stats_of(rows, "string", "full"), "string") == ("a" * size, "é" * size)
    nested = pa.StructArray.from_arrays([rows], ["x"], mask=pa.array([False, True, False, False]))
    type_ = {"type": "struct", "fields": [{"id": 7, "name": "x", "required": False, "type": "string"}]}
    stats = written(schema_of(c=type_), [pa.record_batch({"c": nested})])[0]
    assert b64decode(stats["upper_bounds"]["7"]) == b"m"
    assert stats["null_value_counts"]["7"] == 2


def test_the_last_character_is_raised_past_the_surrogates_or_carried():
    assert upper_bound("ab\ud7ffx".encode(), "string", 3) == "ab\ue000".encode()
    assert upper_bound("a\U0010ffffx".encode(), "string", 2) == b"b"
    assert upper_bound("\U0010ffff\U0010ffffx".encode(), "string", 2) is None
    assert upper_bound(b"\x01\xff\x00", "binary", 2) == b"\x02"
    assert upper_bound(b"\xff\xff\x00", "binary", 2) is None
    assert upper_bound(b"ab", "string", 2) == b"ab"


# Metrics modes


def test_modes_say_what_is_kept():
    rows = pa.array(["a" * 20, None])
    assert stats_of(rows, "string", "none")["column_sizes"] == {}
    counts = stats_of(rows, "string", "counts")
    assert counts["null_value_counts"] == {"1": 1}
    assert counts["lower_bounds"] == {}
    assert bounds(stats_of(rows, "string", "truncate(2)"), "string") == ("aa", "ab")
    assert bounds(stats_of(rows, "string", "nonsense"), "string")[0] == "a" * 16


def test_a_column_may_have_a_mode_of_its_own_also_inside_a_struct():
    type_ = {"type": "struct", "fields": [{"id": 7, "name": "x", "required": False, "type": "double"}]}
    batch = pa.record_batch(
        {"a": pa.array([1.0]), "b": pa.array([{"x": math.nan}], pa.struct([("x", pa.float64())]))}
    )
    prefix = "write.metadata.metrics.column."
    stats, _ = written(schema_of(a="double", b=type_), [batch], {f"{prefix}a": "none"})
    assert set(stats["column_sizes"]) == {"7"}
    assert stats["nan_value_counts"] == {"7": 1}
    stats, _ = written(schema_of(a="double", b=type_), [batch], {f"{prefix}b.x": "none"})
    assert set(stats["value_counts"]) == {"1"}
    assert stats["nan_value_counts"] == {"1": 0}


def test_a_wide_table_has_metrics_for_its_first_hundred_columns_and_for_sorted_ones():
    schema = schema_of(**{f"c{n}": "long" for n in range(1, 131)})
    order = {"order-id": 1, "fields": [{"source-id": 120, "transform": "identity"}]}
    modes = modes_of(schema, order, {})
    assert {field_id for field_id, mode in modes.items() if mode.bounds} == {*range(1, 101), 120}
    assert all(
        mode.bounds for mode in modes_of(schema, order, {"write.metadata.metrics.default": "full"}).values()
    )
    few = modes_of(schema, UNSORTED, {"write.metadata.metrics.max-inferred-column-defaults": "2"})
    assert {field_id for field_id, mode in few.items() if mode.counts} == {1, 2}


def test_a_sorted_column_has_bounds_unless_the_user_says_otherwise():
    order = {"order-id": 1, "fields": [{"source-id": 1, "transform": "identity"}]}
    properties = {"write.metadata.metrics.default": "counts"}
    assert modes_of(schema_of(a="long", b="long"), order, properties)[1].bounds
    assert not modes_of(schema_of(a="long", b="long"), order, properties)[2].bounds
    properties["write.metadata.metrics.column.a"] = "none"
    assert not modes_of(schema_of(a="long", b="long"), order, properties)[1].counts


# Nested columns, and other writers

NESTED = {
    "l": {"type": "list", "element-id": 11, "element": "double", "element-required": False},
    "m": {
        "type": "map",
        "key-id": 12,
        "key": "string",
        "value-id": 13,
        "value": "float",
        "value-required": False,
    },
}


def test_inside_lists_and_maps_there_are_sizes_only():
    batch = pa.record_batch(
        {
            "l": pa.array([[1.0, math.nan], [], None]),
            "m": pa.array([[("k", 1.0)], None, []], pa.map_(pa.string(), pa.float32())),
        }
    )
    stats, _ = written(schema_of(**NESTED), [batch])
    assert set(stats["column_sizes"]) == {"11", "12", "13"}
    for kind in ("value_counts", "null_value_counts", "nan_value_counts", "lower_bounds", "upper_bounds"):
        assert stats[kind] == {}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.none() | st.integers(-(2**63), 2**63 - 1),
            st.none() | st.text(max_size=20),
            st.none() | st.integers(-(10**18), 10**18),
            st.none() | st.booleans(),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_pyiceberg_finds_the_same_in_the_same_footer(rows):
    columns = list(zip(*rows, strict=True))
    decimals = [None if v is None else Decimal(v).scaleb(-2) for v in columns[2]]
    batch = pa.record_batch(
        {
            "a": pa.array(columns[0], pa.int64()),
            "b": pa.array(columns[1], pa.string()),
            "c": pa.array(decimals, pa.decimal128(38, 2)),
            "d": pa.array(columns[3], pa.bool_()),
        }
    )
    raw = schema_of(a="long", b="string", c="decimal(38, 2)", d="boolean")
    stats, footer = written(raw, [batch, batch])
    schema = Schema.model_validate(raw)
    theirs = data_file_statistics_from_parquet_metadata(
        footer, compute_statistics_plan(schema, {}), parquet_path_to_id_mapping(schema)
    ).to_serialized_dict()
    assert stats["split_offsets"] == theirs["split_offsets"]
    for kind in ("column_sizes", "value_counts", "null_value_counts"):
        assert stats[kind] == {str(k): v for k, v in theirs[kind].items()}
    for kind in ("lower_bounds", "upper_bounds"):
        assert {k: b64decode(v) for k, v in stats[kind].items()} == {
            str(k): v for k, v in theirs[kind].items() if v is not None
        }


def test_a_footer_of_other_rows_is_found_out():
    shape = FileShape.of(schema_of(a="long"), pa.schema([("a", pa.int64())]))
    builder = StatsBuilder(shape.leaves, modes_of(schema_of(a="long"), UNSORTED, {}))
    footer = written(schema_of(a="long"), [pa.record_batch({"a": [1]})])[1]
    with pytest.raises(Corrupt, match="row groups"):
        builder.finish(footer)
