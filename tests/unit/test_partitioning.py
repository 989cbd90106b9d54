"""Partition values are those of the Iceberg specification, and no value leaves the table's folder."""

from __future__ import annotations

import json
import os
import struct
from base64 import b64encode
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, TruncateTransform, parse_transform
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BinaryType,
    DateType,
    DecimalType,
    IntegerType,
    LongType,
    StringType,
    TimestampNanoType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from lockstep.errors import Invalid
from lockstep.partitioning import fields_of, grouped, monotonic, partition_path, single_partition
from lockstep.transforms import Transform, least_truncated, to_record_value

BIG = 2**31 - 1
UUID_1 = UUID("f79c3e09-677c-4bbd-a479-3f349cb785e7")


def schema_of(*types: str) -> dict[str, Any]:
    return {
        "type": "struct",
        "fields": [
            {"id": n, "name": f"c{n}", "required": False, "type": type_} for n, type_ in enumerate(types, 1)
        ],
    }


def spec_of(*transforms: str) -> dict[str, Any]:
    fields = [
        {"source-id": n, "field-id": 999 + n, "name": f"p{n}", "transform": transform}
        for n, transform in enumerate(transforms, 1)
    ]
    return {"spec-id": 0, "fields": fields}


def partition_groups(batch: pa.RecordBatch, spec: dict[str, Any], schema: dict[str, Any]):
    return grouped(batch, fields_of(spec, schema))


def values_of(array: pa.Array, type_: str, transform: str) -> list[Any]:
    """The partition value of each row, in the order of the rows."""
    batch = pa.record_batch({"c1": array, "row": pa.array(range(len(array)))})
    result: dict[int, Any] = {}
    for (value,), rows in partition_groups(batch, spec_of(transform), schema_of(type_)):
        json.dumps(value, allow_nan=False)
        result.update(dict.fromkeys(rows["row"].to_pylist(), value))
    return [result[n] for n in range(len(array))]


# The specification's own numbers (appendix B)


@pytest.mark.parametrize(
    ("array", "type_", "hashed"),
    [
        (pa.array([34], pa.int32()), "int", 2017239379),
        (pa.array([34], pa.int64()), "long", 2017239379),
        (pa.array([Decimal("14.20")], pa.decimal128(9, 2)), "decimal(9, 2)", -500754589),
        (pa.array([Decimal("14.20")], pa.decimal128(38, 2)), "decimal(38, 2)", -500754589),
        (pa.array([date(2017, 11, 16)]), "date", -653330422),
        (pa.array([time(22, 31, 8)], pa.time64("us")), "time", -662762989),
        (pa.array([datetime(2017, 11, 16, 22, 31, 8)], pa.timestamp("us")), "timestamp", -2047944441),
        (pa.array([datetime(2017, 11, 16, 22, 31, 8, 1)], pa.timestamp("us")), "timestamp", -1207196810),
        (pa.array([1510871468 * 10**9 + 1001], pa.timestamp("ns")), "timestamp_ns", -1207196810),
        (pa.array([1510871468 * 10**6], pa.timestamp("us", "UTC")), "timestamptz", -2047944441),
        (pa.array(["iceberg"]), "string", 1210000089),
        (pa.array(["iceberg"]).dictionary_encode(), "string", 1210000089),
        (pa.array([UUID_1.bytes], pa.binary(16)), "uuid", 1488055340),
        (pa.array([UUID_1.bytes], pa.uuid()), "uuid", 1488055340),
        (pa.array([b"\0\1\2\3"], pa.binary(4)), "fixed[4]", -188683207),
        (pa.array([b"\0\1\2\3"]), "binary", -188683207),
    ],
)
def test_hashes_are_those_of_the_specification(array, type_, hashed):
    expected = (hashed & BIG) % BIG
    assert values_of(array, type_, f"bucket[{BIG}]") == [expected]
    # Beside another value, the rows are looked at one by one.
    both = pa.concat_arrays([array, pa.nulls(1, array.type)])
    assert values_of(both, type_, f"bucket[{BIG}]") == [expected, None]


@pytest.mark.parametrize(
    ("transform", "expected"),
    [("year", [-1, 0, 47]), ("month", [-1, 0, 575]), ("day", [-1, 0, 17501]), ("hour", [-1, 0, 420034])],
)
def test_times_before_1970_go_down(transform, expected):
    micros = pa.array([-1, 0, 1512123175038194], pa.timestamp("us"))
    assert values_of(micros, "timestamp", transform) == expected
    nanos = pa.array([-1, 999, 1512123175038194001], pa.timestamp("ns", "UTC"))
    assert values_of(nanos, "timestamptz_ns", transform) == expected
    if transform != "hour":
        days = pa.array([-1, 0, 17501], pa.date32())
        assert values_of(days, "date", transform) == expected


def test_the_ends_of_the_range_are_exact():
    ends = pa.array([-(2**63), 2**63 - 1], pa.int64())
    assert values_of(ends.view(pa.timestamp("us")), "timestamp", "day") == [-106751992, 106751991]
    assert values_of(ends.view(pa.timestamp("us")), "timestamp", "year") == [-292278, 292277]
    assert values_of(ends, "long", "identity") == [-(2**63), 2**63 - 1]
    assert values_of(pa.array([-(2**31), 2**31 - 1], pa.date32()), "date", "year") == [-5879611, 5879610]


def test_truncate_goes_down_for_negatives():
    assert values_of(pa.array([1, -1, 10, -10, None]), "long", "truncate[10]") == [0, -10, 10, -10, None]
    decimals = pa.array([Decimal("10.65"), Decimal("-0.05"), Decimal("0.00")], pa.decimal128(9, 2))
    assert values_of(decimals, "decimal(9, 2)", "truncate[50]") == ["10.50", "-0.50", "0.00"]


@pytest.mark.parametrize(
    ("kind", "least", "fits"),
    [
        ("int", pa.array([0, -(2**31)], pa.int32()), pa.array([-(2**31) + 8], pa.int32())),
        ("long", pa.array([0, -(2**63)]), pa.array([-(2**63) + 8])),
        ("decimal(3, 0)", pa.array([None, Decimal(-999)]), pa.array([Decimal(-990)])),
    ],
)
def test_a_value_whose_partition_would_not_fit_its_type_is_refused(kind, least, fits):
    assert values_of(fits, kind, "truncate[10]") == [fits[0].as_py() if kind != "decimal(3, 0)" else "-990"]
    with pytest.raises(Invalid, match="has no partition under truncate"):
        values_of(least, kind, "truncate[10]")


@pytest.mark.parametrize("width", [1, 2, 3, 7, 10, 1000])
@pytest.mark.parametrize("kind", ["int", "long", "decimal(3, 0)", "decimal(38, 0)"])
def test_the_least_value_that_can_be_truncated_is_known(kind, width):
    digits = int(kind[8:-4]) if kind.startswith("decimal") else 0
    column = pa.decimal128(digits, 0) if digits else pa.int32() if kind == "int" else pa.int64()

    def truncated(value: int) -> int:
        (found,) = values_of(pa.array([Decimal(value)]).cast(column), kind, f"truncate[{width}]")
        return int(found)

    lowest = 1 - 10**digits if digits else -(2 ** (column.bit_width - 1))
    least = least_truncated(Transform("truncate", kind, width))
    assert truncated(lowest if least is None else least) == (lowest if least is None else least)
    if least is not None:
        with pytest.raises(Invalid, match="has no partition"):
            truncated(least - 1)


def test_truncate_counts_characters_in_text_and_bytes_in_binary():
    assert values_of(pa.array(["i😀é漢", "", "ab"]), "string", "truncate[3]") == ["i😀é", "", "ab"]
    assert values_of(pa.array([b"\1\2\3\4", b""]), "binary", "truncate[3]") == [
        b64encode(b"\1\2\3").decode(),
        "",
    ]


def test_void_is_null_even_where_the_column_is_gone():
    assert values_of(pa.array([1, 2, None]), "long", "void") == [None] * 3
    spec = {"fields": [{"source-id": 77, "name": "p", "transform": "void"}]}
    batch = pa.record_batch({"c1": pa.array([1, 2])})
    assert partition_groups(batch, spec, schema_of("long")) == [((None,), batch)]


def test_each_float_is_one_partition_nan_too_and_zero_has_a_sign():
    nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
    array = pa.array([float("nan"), nan, 0.0, -0.0, float("inf"), float("-inf"), 1.5, None])
    expected = ["NaN", "NaN", 0.0, "-0.0", "Infinity", "-Infinity", 1.5, None]
    assert values_of(array, "double", "identity") == expected
    assert values_of(array.cast(pa.float32()), "float", "identity") == expected
    assert to_record_value("NaN", "double") != to_record_value("NaN", "double")
    assert np.signbit(to_record_value("-0.0", "double"))


def test_identity_values_are_plain_json_and_come_back_as_pyiceberg_wants_them():
    cases = [
        ("boolean", pa.array([True]), True, True),
        ("date", pa.array([-5], pa.date32()), -5, -5),
        ("time", pa.array([7], pa.time64("us")), 7, 7),
        ("timestamptz", pa.array([-7], pa.timestamp("us", "UTC")), -7, -7),
        ("decimal(38, 3)", pa.array([Decimal("-0.007")], pa.decimal128(38, 3)), "-0.007", Decimal("-0.007")),
        ("decimal(5, 0)", pa.array([Decimal("12")], pa.decimal128(5, 0)), "12", Decimal("12")),
        ("uuid", pa.array([UUID_1.bytes], pa.binary(16)), str(UUID_1), UUID_1.bytes),
        ("fixed[2]", pa.array([b"\xff\0"], pa.binary(2)), "/wA=", b"\xff\0"),
        ("binary", pa.array([b""]), "", b""),
        ("string", pa.array(["it's"]), "it's", "it's"),
    ]
    for type_, array, value, record in cases:
        assert values_of(array, type_, "identity") == [value], type_
        assert to_record_value(value, type_) == record
        assert to_record_value(None, type_) is None


# PyIceberg's transforms, value by value

# Of the least ones a truncate has no result: that is a test of its own.
INTS = st.integers(-(2**31) + 1000, 2**31 - 1)
LONGS = st.integers(-(2**63), 2**63 - 1)
UNSCALED = st.integers(-(10**38) + 1, 10**38 - 1)
# PyIceberg goes through Python's datetime, which has the years 1 to 9999 only.
MICROS = st.integers(-62135596800 * 10**6, 253402300799 * 10**6)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.none() | LONGS, min_size=1), width=st.integers(1, 2**31 - 1))
def test_longs_agree_with_pyiceberg(values, width):
    bucket = BucketTransform(width).transform(LongType())
    assert values_of(pa.array(values, pa.int64()), "long", f"bucket[{width}]") == [
        None if v is None else bucket(v) for v in values
    ]


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.none() | INTS, min_size=1), width=st.integers(1, 1000))
def test_ints_agree_with_pyiceberg(values, width):
    array = pa.array(values, pa.int32())
    for name, transform in (("bucket", BucketTransform(width)), ("truncate", TruncateTransform(width))):
        apply = transform.transform(IntegerType())
        expected = [None if v is None else apply(v) for v in values]
        assert values_of(array, "int", f"{name}[{width}]") == expected


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.none() | st.text(), min_size=1), width=st.integers(1, 20))
def test_texts_agree_with_pyiceberg(values, width):
    for name, transform in (("bucket", BucketTransform(width)), ("truncate", TruncateTransform(width))):
        apply = transform.transform(StringType())
        expected = [None if v is None else apply(v) for v in values]
        assert values_of(pa.array(values, pa.string()), "string", f"{name}[{width}]") == expected


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.none() | st.binary(), min_size=1), width=st.integers(1, 20))
def test_binary_agrees_with_pyiceberg(values, width):
    array = pa.array(values, pa.binary())
    bucket = BucketTransform(width).transform(BinaryType())
    assert values_of(array, "binary", f"bucket[{width}]") == [
        None if v is None else bucket(v) for v in values
    ]
    cut = [None if v is None else b64encode(v[:width]).decode() for v in values]
    assert values_of(array, "binary", f"truncate[{width}]") == cut


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.none() | UNSCALED, min_size=1), width=st.integers(1, 10**6))
def test_decimals_agree_with_pyiceberg(values, width):
    type_ = DecimalType(38, 4)
    exact = [None if v is None else Decimal((v < 0, [int(d) for d in str(abs(v))], -4)) for v in values]
    array = pa.array(exact, pa.decimal128(38, 4))
    bucket = BucketTransform(width).transform(type_)
    assert values_of(array, "decimal(38, 4)", f"bucket[{width}]") == [
        None if v is None else bucket(v) for v in exact
    ]
    small = [v for v in values if v is not None and abs(v) < 10**30]
    cut = values_of(
        pa.array([Decimal((v < 0, [int(d) for d in str(abs(v))], -4)) for v in small], pa.decimal128(38, 4)),
        "decimal(38,4)",
        f"truncate[{width}]",
    )
    assert [int(text.replace(".", "")) for text in cut] == [v - v % width for v in small]


@settings(max_examples=80, deadline=None)
@given(
    values=st.lists(st.none() | MICROS, min_size=1),
    transform=st.sampled_from(["year", "month", "day", "hour"]),
)
def test_timestamps_agree_with_pyiceberg(values, transform):
    apply = parse_transform(transform)
    for kind, type_, tz in (("timestamp", TimestampType(), None), ("timestamptz", TimestamptzType(), "UTC")):
        function = apply.transform(type_)
        array = pa.array(values, pa.timestamp("us", tz))
        assert values_of(array, kind, transform) == [None if v is None else function(v) for v in values]


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(-719162, 2932896), min_size=1),
    transform=st.sampled_from(["year", "month", "day"]),
)
def test_dates_agree_with_pyiceberg(values, transform):
    function = parse_transform(transform).transform(DateType())
    assert values_of(pa.array(values, pa.date32()), "date", transform) == [function(v) for v in values]


@settings(max_examples=60, deadline=None)
@given(values=st.lists(LONGS, min_size=1), width=st.integers(1, 100))
def test_buckets_of_all_temporal_types_agree_with_pyiceberg(values, width):
    bucket: BucketTransform[Any] = BucketTransform(width)
    nanos = bucket.transform(TimestampNanoType())
    numbers = pa.array(values, pa.int64())
    assert values_of(numbers.view(pa.timestamp("ns")), "timestamp_ns", f"bucket[{width}]") == [
        nanos(v) for v in values
    ]
    times = [abs(v) % 86_400_000_000 for v in values]
    assert values_of(pa.array(times, pa.time64("us")), "time", f"bucket[{width}]") == [
        bucket.transform(TimeType())(v) for v in times
    ]
    uuids = [struct.pack(">qq", v, v) for v in values]
    assert values_of(pa.array(uuids, pa.binary(16)), "uuid", f"bucket[{width}]") == [
        bucket.transform(UUIDType())(v) for v in uuids
    ]


# Grouping


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.none() | st.sampled_from(["a", "b", ""]), st.none() | st.integers(-5, 5), st.booleans()),
        max_size=50,
    )
)
def test_every_row_is_in_exactly_one_group_in_its_order(rows):
    batch = pa.record_batch(
        {
            "c1": pa.array([r[0] for r in rows], pa.string()),
            "c2": pa.array([r[1] for r in rows], pa.int32()),
            "c3": pa.array([r[2] for r in rows], pa.bool_()),
            "row": pa.array(range(len(rows)), pa.int64()),
        }
    )
    groups = partition_groups(
        batch, spec_of("identity", "truncate[2]", "identity"), schema_of("string", "int", "boolean")
    )
    assert sorted(n for _, g in groups for n in g["row"].to_pylist()) == list(range(len(rows)))
    for values, group in groups:
        numbers = group["row"].to_pylist()
        assert numbers == sorted(numbers)
        for c1, c2, c3 in zip(*(group[name].to_pylist() for name in ("c1", "c2", "c3")), strict=True):
            assert (c1, None if c2 is None else c2 - c2 % 2, c3) == values
    assert len({repr(values) for values, _ in groups}) == len(groups)


@pytest.mark.parametrize("type_", ["long", "string"])
def test_rows_between_the_ends_are_looked_at_of_a_bucket(type_):
    array = pa.array([f"{n:02d}" for n in range(50)]) if type_ == "string" else pa.array(range(50))
    each = [values_of(array[n : n + 1], type_, "bucket[2]")[0] for n in range(50)]
    for n in range(48):
        assert values_of(array[n : n + 3], type_, "bucket[2]") == each[n : n + 3]


def test_one_partition_gives_the_batch_itself():
    batch = pa.record_batch({"c1": pa.array([5, 5, 5])})
    for transform in ("identity", "bucket[4]", "truncate[10]"):
        ((_, rows),) = partition_groups(batch, spec_of(transform), schema_of("long"))
        assert rows is batch


def test_a_sliced_batch_gives_the_values_of_its_own_rows():
    whole = pa.record_batch({"c1": pa.array([Decimal(n) for n in range(10)], pa.decimal128(9, 0))})
    groups = partition_groups(whole.slice(3, 2), spec_of("identity"), schema_of("decimal(9, 0)"))
    assert [values for values, _ in groups] == [("3",), ("4",)]


def test_many_fields_do_not_overflow():
    # Seven fields of 1024 values make 2^70 partitions: the first field would be shifted out of 64 bits.
    first = pa.array([0] * 1024 + [1])
    others = {f"c{n}": pa.array([*range(1024), 0]) for n in range(2, 9)}
    batch = pa.record_batch({"c1": first, **others})
    groups = partition_groups(batch, spec_of(*["identity"] * 8), schema_of(*["long"] * 8))
    assert len(groups) == 1025


def test_a_source_inside_a_struct_is_found_and_a_null_struct_is_null():
    schema = {
        "type": "struct",
        "fields": [
            {
                "id": 7,
                "name": "a.b",
                "required": False,
                "type": {
                    "type": "struct",
                    "fields": [{"id": 1, "name": "x", "required": True, "type": "int"}],
                },
            }
        ],
    }
    column = pa.array([{"x": 1}, None, {"x": 2}], pa.struct([("x", pa.int32())]))
    groups = partition_groups(pa.record_batch({"a.b": column}), spec_of("identity"), schema)
    assert {values for values, _ in groups} == {(1,), (None,), (2,)}


# One partition for an export


def test_rows_of_one_month_are_one_partition():
    batches = [pa.record_batch({"c1": pa.array([d], pa.date32())}) for d in (0, 15, 30)]
    assert single_partition(batches, spec_of("month"), schema_of("date")) == (0,)
    assert single_partition([], spec_of("month"), schema_of("date")) is None
    assert single_partition([batches[0].slice(1)], spec_of("month"), schema_of("date")) is None


def test_rows_of_two_months_are_refused_with_both_named():
    batch = pa.record_batch({"c1": pa.array([0, 31], pa.date32())})
    with pytest.raises(Invalid, match=r"p1=1970-01 and p1=1970-02"):
        single_partition([batch], spec_of("month"), schema_of("date"))
    with pytest.raises(Invalid, match=r"p1=a and p1=null"):
        single_partition([pa.record_batch({"c1": ["a", None]})], spec_of("identity"), schema_of("string"))


def test_least_and_greatest_do_not_suffice_for_buckets_and_floats():
    assert monotonic(spec_of("identity", "month", "truncate[3]", "void"))
    assert not monotonic(spec_of("month", "bucket[16]"))
    assert not monotonic(spec_of("identity"), schema_of("double"))
    assert monotonic(spec_of("identity"), schema_of("string"))


@pytest.mark.parametrize(
    ("transform", "type_"),
    [
        ("week", "date"),
        ("bucket", "long"),
        ("truncate[0]", "long"),
        ("hour", "date"),
        ("month", "long"),
        ("bucket[4]", "double"),
        ("truncate[2]", "date"),
        ("identity[3]", "long"),
    ],
)
def test_a_transform_that_does_not_fit_is_refused(transform, type_):
    with pytest.raises(Invalid, match="p1"):
        partition_groups(pa.record_batch({"c1": pa.array([1])}), spec_of(transform), schema_of(type_))


# Folders

HOSTILE = [
    "/",
    "..",
    "../..",
    "../../etc/passwd",
    "%2F",
    "%2e%2e",
    "a\nb",
    "\0",
    "",
    ".",
    "=",
    "a=b/c=d",
    "null",
    "x" * 5000,
    "😀" * 500,
    "'; DROP TABLE t; --",
    "C:\\x",
    "~",
    "?a#b",
    " ",
    None,
]


@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_value_stays_in_the_tables_folder(value, tmp_path):
    path = partition_path([value, value], spec_of("identity", "identity"), schema_of("string", "string"))
    first, second = path.split("/")
    assert first.startswith("p1=")
    assert second.startswith("p2=")
    assert os.path.normpath(f"{tmp_path}/{path}") == f"{tmp_path}/{path}"
    (tmp_path / path).mkdir(parents=True)
    assert (tmp_path / path).resolve().is_relative_to(tmp_path.resolve())


@settings(deadline=None)
@given(st.text(), st.text(min_size=1))
def test_no_text_and_no_name_makes_another_folder(value, name):
    spec = {"fields": [{"source-id": 1, "field-id": 1000, "name": name, "transform": "identity"}]}
    path = partition_path([value], spec, schema_of("string"))
    assert path.isascii()
    assert path.isprintable()
    assert "/" not in path
    assert "=" in path
    assert len(path) <= 255


def test_long_values_with_the_same_beginning_have_different_folders():
    schema, spec = schema_of("string"), spec_of("identity")
    assert partition_path(["x" * 4000 + "a"], spec, schema) != partition_path(
        ["x" * 4000 + "b"], spec, schema
    )


@pytest.mark.parametrize(
    ("value", "transform", "type_", "folder"),
    [
        (47, "year", "date", "p1=2017"),
        (-1, "month", "date", "p1=1969-12"),
        (17501, "day", "timestamp", "p1=2017-12-01"),
        (420034, "hour", "timestamp", "p1=2017-12-01-10"),
        (3, "bucket[16]", "string", "p1=3"),
        (None, "identity", "long", "p1=null"),
        (True, "identity", "boolean", "p1=true"),
        ("12.50", "identity", "decimal(9, 2)", "p1=12.50"),
        ("a b/c", "identity", "string", "p1=a+b%2Fc"),
    ],
)
def test_folders_are_named_as_iceberg_names_them(value, transform, type_, folder):
    spec, schema = spec_of(transform), schema_of(type_)
    assert partition_path([value], spec, schema) == folder
    (field,) = fields_of(spec, schema)
    record = Record(to_record_value(value, field.transform.result_type))
    theirs = PartitionSpec.model_validate(spec).partition_to_path(record, Schema.model_validate(schema))
    assert theirs == folder
