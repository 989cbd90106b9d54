"""Matching columns, deriving tables, and casting batches: exact, or refused with a sentence."""

from __future__ import annotations

import io
import json
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.table.sorting import SortOrder

from lockstep.arrow_types import FIELD_ID
from lockstep.errors import Corrupt, Invalid
from lockstep.job import ColumnMap
from lockstep.new_table import derive
from lockstep.schema import arrow_schema, conform, match_columns, type_text
from lockstep.source import SourceColumn, SourceField, SourceTable

INT_LIST = {"type": "list", "element-id": 0, "element": "int", "element-required": True}
POINT = {
    "type": "struct",
    "fields": [
        {"id": 0, "name": "x", "required": True, "type": "double"},
        {"id": 0, "name": "y", "required": False, "type": "double"},
    ],
}
TAGS = {
    "type": "map",
    "key-id": 0,
    "key": "string",
    "value-id": 0,
    "value": "long",
    "value-required": False,
}


def table(*columns: SourceColumn, **more: Any) -> SourceTable:
    given = {"partitioning": (), "partition_key": "", "sorting": (), **more}
    return SourceTable("db.events", "identity", columns, **given)


def column(name: str, kind: Any, *, nullable: bool = False, native: str | None = None) -> SourceColumn:
    return SourceColumn(name, native or type_text(kind), kind, nullable)


def target(*fields: tuple[str, Any, bool]) -> dict[str, Any]:
    listed = [
        {"id": i + 1, "name": name, "type": kind, "required": required}
        for i, (name, kind, required) in enumerate(fields)
    ]
    return {"type": "struct", "schema-id": 0, "fields": listed}


def refusal(source: SourceTable, schema: dict[str, Any], **options: Any) -> str:
    with pytest.raises(Invalid) as caught:
        match_columns(source, schema, **options)
    return caught.value.message


def one(kind: Any, *, required: bool = False, lossy: bool = False) -> list[ColumnMap]:
    return [ColumnMap("c", 1, kind, required, "c", "native", lossy)]


def cast(array: pa.Array, kind: Any, **options: Any) -> pa.Array:
    return conform(pa.record_batch([array], ["c"]), one(kind, **options)).column(0)


# Matching


def test_columns_match_by_exact_name_in_the_target_s_order():
    found = match_columns(
        table(column("b", "string"), column("a", "int")), target(("a", "long", True), ("b", "string", False))
    )
    assert [(c.target, c.source, c.field_id, c.type, c.required) for c in found] == [
        ("a", "a", 1, "long", True),
        ("b", "b", 2, "string", False),
    ]
    assert not any(c.lossy for c in found)


def test_columns_match_by_position_whatever_their_names():
    found = match_columns(
        table(column("x", "int"), column("y", "string")),
        target(("a", "int", True), ("b", "string", False), ("c", "date", False)),
        by="position",
    )
    assert [(c.target, c.source) for c in found] == [("a", "x"), ("b", "y"), ("c", None)]


def test_every_problem_is_listed_at_once_with_column_types_and_advice():
    source = table(
        SourceColumn("amount", "Decimal(76, 10)", None, False, "double", "Iceberg holds 38 digits"),
        SourceColumn("state", "AggregateFunction(sum)", None, False, None, "it is a state"),
        column("id", "long", nullable=True),
        column("Name", "string"),
    )
    schema = target(("amount", "double", True), ("id", "int", True), ("name", "string", True))
    message = refusal(source, schema)
    advice = "Pass --allow-lossy to store it"
    extra = "Pass --ignore-extra to leave it out, or add it to the target."
    assert message.splitlines() == [
        "cannot export db.events: 6 columns do not fit",
        '  - cannot store column "amount": it is Decimal(76, 10); Iceberg holds 38 digits.'
        f" {advice} as double, or cast it in a copy of the table.",
        '  - cannot store column "id": it is long and may be NULL, but "id" is required in the target.'
        " Make that optional, or replace NULLs in a copy of the table.",
        '  - cannot store column "id": it is long; the target has int, which holds 32 bits.'
        f" {advice} all the same, or cast it in a copy of the table.",
        '  - the target requires column "name", and the source has none of that name; it has "Name".'
        " Rename it in a copy of the table, or pass --match position.",
        f'  - the target has no column "state" (AggregateFunction(sum)). {extra}',
        f'  - the target has no column "Name" (string); it has "name", and names must be equal. {extra}',
    ]


def test_extra_source_columns_are_left_out_only_when_asked():
    source = table(column("a", "int"), column("b", "int"))
    assert '"b"' in refusal(source, target(("a", "int", True)))
    found = match_columns(source, target(("a", "int", True)), ignore_extra=True)
    assert [c.source for c in found] == ["a"]
    found = match_columns(source, target(("z", "int", True)), by="position", ignore_extra=True)
    assert [c.source for c in found] == ["a"]


def test_a_source_without_any_column_of_the_target_is_refused_though_extra_ones_may_go():
    source = table(column("a", "int"), column("b", "int"))
    with pytest.raises(Invalid, match="no column of the target") as caught:
        match_columns(source, target(("x", "int", False)), ignore_extra=True)
    assert caught.value.hint == "it has a, b; the target has x"


def test_a_target_column_that_nothing_fills_is_null_or_refused():
    found = match_columns(table(column("a", "int")), target(("a", "int", True), ("b", "string", False)))
    assert found[1].source is None
    assert 'requires column "b"' in refusal(
        table(column("a", "int")), target(("a", "int", True), ("b", "string", True))
    )
    assert "geometry" in refusal(
        table(column("a", "int")), target(("a", "int", True), ("g", "geometry", False))
    )


def test_two_source_columns_of_one_name_are_refused():
    assert "2 times" in refusal(table(column("a", "int"), column("a", "int")), target(("a", "int", True)))


EXACT = [
    ("int", "long"),
    ("int", "double"),
    ("float", "double"),
    ("decimal(10, 2)", "decimal(12,2)"),
    ("decimal(10, 2)", "decimal(12, 4)"),
    ("int", "decimal(10, 0)"),
    ("long", "decimal(20, 1)"),
    ("decimal(9, 0)", "int"),
    ("decimal(18, 0)", "long"),
    ("string", "binary"),
    ("fixed[3]", "binary"),
    ("fixed[16]", "uuid"),
    ("uuid", "fixed[16]"),
    ("date", "date"),
]
LOSSY = [
    ("long", "int"),
    ("double", "float"),
    ("long", "double"),
    ("int", "float"),
    ("decimal(12, 2)", "decimal(10, 2)"),
    ("decimal(12, 4)", "decimal(12, 2)"),
    ("decimal(20, 0)", "long"),
    ("decimal(10, 0)", "int"),
    ("decimal(10, 2)", "double"),
    ("long", "decimal(18, 0)"),
    ("timestamp_ns", "timestamp"),
]
NEVER = [
    ("timestamptz", "timestamp"),
    ("timestamp", "timestamptz"),
    ("string", "int"),
    ("int", "string"),
    ("uuid", "string"),
    ("string", "uuid"),
    ("binary", "string"),
    ("double", "long"),
    ("double", "decimal(38, 10)"),
    ("decimal(10, 2)", "long"),
    ("date", "timestamp"),
    ("fixed[4]", "fixed[5]"),
    ("boolean", "int"),
    (INT_LIST, "string"),
    ("string", INT_LIST),
    (INT_LIST, POINT),
]


@pytest.mark.parametrize(("have", "want"), EXACT)
def test_exact_widenings_need_no_permission(have, want):
    (found,) = match_columns(table(column("c", have)), target(("c", want, True)))
    assert not found.lossy


@pytest.mark.parametrize(("have", "want"), LOSSY)
def test_narrowing_needs_permission_and_is_noted(have, want):
    message = refusal(table(column("c", have)), target(("c", want, True)))
    assert "--allow-lossy" in message
    assert want in message
    (found,) = match_columns(table(column("c", have)), target(("c", want, True)), allow_lossy=True)
    assert found.lossy


@pytest.mark.parametrize(("have", "want"), NEVER)
def test_other_pairs_are_refused_even_with_permission(have, want):
    message = refusal(table(column("c", have)), target(("c", want, True)), allow_lossy=True)
    assert "--allow-lossy" not in message
    assert type_text(want) in message


def test_a_type_without_an_exact_counterpart_goes_to_what_holds_its_lossy_one():
    wide = SourceColumn("c", "Decimal(76, 1)", None, False, "double", "Iceberg holds 38 digits")
    (found,) = match_columns(table(wide), target(("c", "double", True)), allow_lossy=True)
    assert found.lossy
    assert "which cannot hold double" in refusal(table(wide), target(("c", "string", True)), allow_lossy=True)


def test_nested_types_match_member_by_member():
    wider = {**INT_LIST, "element-id": 7, "element": "long"}
    assert match_columns(table(column("c", INT_LIST)), target(("c", wider, True)))
    optional = {**INT_LIST, "element-required": False}
    assert "may have NULL there" in refusal(table(column("c", optional)), target(("c", INT_LIST, True)))
    narrow = {**INT_LIST, "element": "float"}
    assert "at element" in refusal(table(column("c", INT_LIST)), target(("c", narrow, True)))
    (found,) = match_columns(table(column("c", INT_LIST)), target(("c", narrow, True)), allow_lossy=True)
    assert found.lossy
    assert "at value" in refusal(
        table(column("c", TAGS)), target(("c", {**TAGS, "value": "string"}, True)), allow_lossy=True
    )


def test_struct_fields_match_by_name():
    more = {
        "type": "struct",
        "fields": [*POINT["fields"], {"id": 0, "name": "z", "required": False, "type": "int"}],
    }
    assert match_columns(table(column("c", POINT)), target(("c", more, True)))
    assert 'no field "z"' in refusal(table(column("c", more)), target(("c", POINT, True)))
    assert match_columns(table(column("c", more)), target(("c", POINT, True)), ignore_extra=True)
    needed = {
        "type": "struct",
        "fields": [*POINT["fields"], {"id": 0, "name": "z", "required": True, "type": "int"}],
    }
    assert "does not have" in refusal(table(column("c", POINT)), target(("c", needed, True)))


# Deriving


HOSTILE = ['quote"d', "it's", "dot.ted", "🙂", "a b\n", "..", "100%", "x" * 300, "drop table t;--", "`"]


def test_a_derived_schema_has_the_ids_that_iceberg_itself_would_give():
    source = table(
        column("id", "decimal(20,0)"),
        column("path", {**INT_LIST, "element": POINT}),
        column("tags", {**TAGS, "value": INT_LIST}, nullable=True),
        column("p", POINT),
        *[column(name, "string") for name in HOSTILE],
    )
    raw, spec, order = derive(source)
    schema = Schema.model_validate_json(json.dumps(raw))
    assert assign_fresh_schema_ids(schema) == schema
    assert sorted(schema._lazy_id_to_name) == list(range(1, schema.highest_field_id + 1))
    assert [f.required for f in schema.fields[:4]] == [True, True, False, True]
    assert schema.identifier_field_ids == []
    assert [f.name for f in schema.fields[4:]] == HOSTILE
    assert PartitionSpec.model_validate_json(json.dumps(spec)).is_unpartitioned()
    assert SortOrder.model_validate_json(json.dumps(order)).is_unsorted
    matched = match_columns(source, raw)
    assert [c.target for c in matched] == [c.name for c in source.columns]


def test_a_derived_table_keeps_partitioning_and_order():
    source = table(
        column("ts", "timestamptz"),
        column("ts_month", "string"),
        column("id", "long"),
        column("name", "string"),
        column("list", INT_LIST),
        partitioning=[
            SourceField("ts", "month"),
            SourceField("id", "bucket[16]"),
            SourceField("name", "truncate[4]"),
            SourceField("name"),
        ],
        sorting=[
            SourceField("id", descending=True, nulls_first=False),
            SourceField("list"),
            SourceField("ts"),
        ],
    )
    _, spec, order = derive(source)
    assert [(f["name"], f["field-id"], f["source-id"], f["transform"]) for f in spec["fields"]] == [
        ("ts_month_2", 1000, 1, "month"),
        ("id_bucket_16", 1001, 3, "bucket[16]"),
        ("name_trunc_4", 1002, 4, "truncate[4]"),
        ("name", 1003, 4, "identity"),
    ]
    PartitionSpec.model_validate_json(json.dumps(spec))
    assert order == {
        "order-id": 1,
        "fields": [
            {"source-id": 3, "transform": "identity", "direction": "desc", "null-order": "nulls-last"}
        ],
    }
    SortOrder.model_validate_json(json.dumps(order))


def test_a_partition_key_without_counterpart_is_refused_with_what_to_do():
    with pytest.raises(Invalid, match=r"intDiv\(id, 7\) has no exact counterpart") as caught:
        derive(table(column("id", "int"), partitioning=None, partition_key="intDiv(id, 7)"))
    assert "without --create" in str(caught.value.hint)
    with pytest.raises(Invalid, match="cannot partition"):
        derive(table(column("s", "string"), partitioning=[SourceField("s", "month")]))


def test_a_partition_key_that_spark_cannot_read_is_refused():
    with pytest.raises(Invalid, match=r'partitioned by "f" \(fixed\[2\]\), and Spark'):
        derive(table(column("f", "fixed[2]"), partitioning=[SourceField("f")]))
    _, spec, _ = derive(table(column("f", "fixed[2]"), partitioning=[SourceField("f", "bucket[4]")]))
    assert [one["transform"] for one in spec["fields"]] == ["bucket[4]"]


def test_columns_without_an_exact_type_are_derived_only_with_permission():
    wide = SourceColumn("c", "Decimal(76, 1)", None, False, "double", "Iceberg holds 38 digits")
    odd = SourceColumn("d", "Nothing", None, False, None, "it holds nothing")
    with pytest.raises(Invalid, match="store it as double"):
        derive(table(wide))
    raw, _, _ = derive(table(wide), allow_lossy=True)
    assert raw["fields"][0]["type"] == "double"
    with pytest.raises(Invalid, match="it holds nothing"):
        derive(table(odd), allow_lossy=True)


def test_names_that_mean_the_same_field_in_iceberg_are_refused():
    with pytest.raises(Invalid, match=r'"c\.x"'):
        derive(table(column("c", POINT), column("c.x", "int")))


# Casting


def test_what_agrees_already_is_not_copied():
    numbers = pa.array(range(1000), pa.int64())
    texts = pa.array(["a"] * 1000)
    batch = pa.record_batch({"n": numbers, "t": texts})
    columns = [
        ColumnMap("t2", 5, "string", True, "t", "String"),
        ColumnMap("n2", 6, "long", True, "n", "Int64"),
        ColumnMap("none", 7, "uuid", False, None, None),
    ]
    found = conform(batch, columns)
    assert found.schema.equals(arrow_schema(columns), check_metadata=True)
    assert found.column(0).buffers()[2].address == texts.buffers()[2].address
    assert found.column(1).buffers()[1].address == numbers.buffers()[1].address
    assert found.column(2).null_count == 1000


def test_the_arrow_schema_carries_field_ids_and_nullability_at_every_level():
    nested = {**TAGS, "key-id": 11, "value-id": 12, "value": {**INT_LIST, "element-id": 13}}
    schema = arrow_schema(
        [ColumnMap("c", 10, nested, True, "c", None), ColumnMap("u", 20, "uuid", False, "u", None)]
    )
    field = schema.field("c")
    ids = [f.metadata[FIELD_ID] for f in (field, field.type.key_field, field.type.item_field)]
    assert [*ids, field.type.item_type.value_field.metadata[FIELD_ID]] == [b"10", b"11", b"12", b"13"]
    assert not field.nullable
    assert field.type.item_field.nullable
    assert not field.type.item_type.value_field.nullable
    assert schema.field("u").type == pa.uuid()


UTC_NOON = datetime(2024, 2, 29, 12, 0, 0, 123456, UTC)
U16 = UUID("01234567-89ab-cdef-0123-456789abcdef")
UUIDS = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([U16.bytes], pa.binary(16)))
DEEP = {
    "type": "struct",
    "fields": [
        {"id": 0, "name": "p", "required": True, "type": POINT},
        {"id": 0, "name": "u", "required": True, "type": "uuid"},
        {"id": 0, "name": "l", "required": True, "type": INT_LIST},
        {"id": 0, "name": "m", "required": True, "type": TAGS},
        {"id": 0, "name": "s", "required": True, "type": "string"},
        {"id": 0, "name": "b", "required": True, "type": "boolean"},
    ],
}
DEEP_VALUE = {"p": {"x": 1.0, "y": None}, "u": U16.bytes, "l": [1], "m": [("k", None)], "s": "t", "b": True}
DEEP_SHOWN = {**DEEP_VALUE, "u": U16}
DEEP_ARROW = pa.struct(
    [
        ("p", pa.struct([("x", pa.float64()), ("y", pa.float64())])),
        ("u", pa.binary(16)),
        ("l", pa.list_(pa.int64())),
        ("m", pa.map_(pa.string(), pa.int64())),
        ("s", pa.string()),
        ("b", pa.bool_()),
    ]
)
FITS: list[tuple[pa.Array, Any, list[Any]]] = [
    (pa.array([1, None], pa.int8()), "int", [1, None]),
    (pa.array([2**32 - 1], pa.uint32()), "long", [2**32 - 1]),
    (pa.array([0, 2**64 - 1, None], pa.uint64()), "decimal(20, 0)", [Decimal(0), Decimal(2**64 - 1), None]),
    (pa.array([2**63 - 1], pa.uint64()), "long", [2**63 - 1]),
    (pa.array([-7], pa.int32()), "decimal(5, 2)", [Decimal("-7.00")]),
    (pa.array([7], pa.int64()), "decimal(3, 1)", [Decimal("7.0")]),
    (pa.array([Decimal("1.50")], pa.decimal64(5, 2)), "decimal(10, 3)", [Decimal("1.500")]),
    (pa.array([Decimal("1.50")], pa.decimal256(70, 2)), "decimal(10, 2)", [Decimal("1.50")]),
    (pa.array([Decimal(12)], pa.decimal128(9, 0)), "int", [12]),
    (pa.array([np.float16(1.5)], pa.float16()), "float", [1.5]),
    (pa.array([1.1], pa.float32()), "double", [float(np.float32(1.1))]),
    (pa.array([5], pa.int32()), "double", [5.0]),
    (pa.array([2**32 - 1], pa.uint32()), "timestamptz", [datetime(2106, 2, 7, 6, 28, 15, tzinfo=UTC)]),
    (pa.array([UTC_NOON], pa.timestamp("us", "Europe/Berlin")), "timestamptz", [UTC_NOON]),
    (pa.array([1_000], pa.timestamp("ms")), "timestamp", [datetime(1970, 1, 1, 0, 0, 1)]),
    (pa.array([1_000], pa.timestamp("ns")), "timestamp", [datetime(1970, 1, 1, 0, 0, 0, 1)]),
    (pa.array([1], pa.timestamp("s")), "timestamptz", [datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)]),
    (pa.array([19782], pa.uint16()), "date", [date(2024, 2, 29)]),
    (pa.array([date(2024, 2, 29)], pa.date64()), "date", [date(2024, 2, 29)]),
    (pa.array([time(1, 2, 3)], pa.time32("s")), "time", [time(1, 2, 3)]),
    (pa.array(["ä", None], pa.large_string()), "string", ["ä", None]),
    (pa.array(["ä" * 20], pa.string_view()), "string", ["ä" * 20]),
    (pa.array([b"\xc3\xa4"], pa.binary()), "string", ["ä"]),
    (pa.array(["b", "a", None, "b"]).dictionary_encode(), "string", ["b", "a", None, "b"]),
    (pa.array([b"ab"], pa.large_binary()), "binary", [b"ab"]),
    (pa.array(["ä"]), "binary", ["ä".encode()]),
    (pa.array([b"abc"], pa.binary(3)), "binary", [b"abc"]),
    (pa.array([b"abc"], pa.binary()), "fixed[3]", [b"abc"]),
    (pa.array([U16.bytes, None], pa.binary(16)), "uuid", [U16, None]),
    (UUIDS, "uuid", [U16]),
    (UUIDS, "fixed[16]", [U16.bytes]),
    (pa.array([None, None]), "uuid", [None, None]),
    (pa.array([True, None]), "boolean", [True, None]),
    (pa.array([[1], None, []], pa.large_list(pa.int8())), {**INT_LIST, "element": "long"}, [[1], None, []]),
    (pa.array([[1, 2], None], pa.list_(pa.uint8(), 2)), INT_LIST, [[1, 2], None]),
    (pa.array([{"y": 1.0, "x": 2.0, "extra": 1}, None]), POINT, [{"x": 2.0, "y": 1.0}, None]),
    (pa.array([DEEP_VALUE, None, DEEP_VALUE], DEEP_ARROW), DEEP, [DEEP_SHOWN, None, DEEP_SHOWN]),
    (pa.array([{"x": 2.0}]), POINT, [{"x": 2.0, "y": None}]),
    (pa.array([[("a", 1)], None, []], pa.map_(pa.large_string(), pa.int8())), TAGS, [[("a", 1)], None, []]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("array", "kind", "expected"), FITS, ids=lambda value: str(getattr(value, "type", ""))[:30]
)
def test_natural_arrow_types_become_the_target_s_exactly(array, kind, expected):
    assert cast(array, kind).to_pylist() == expected
    # A slice must show its own rows, not those it hides.
    padded = pa.concat_arrays([array.slice(0, 1), array]).slice(1)
    assert cast(padded, kind).to_pylist() == expected


MISFITS: list[tuple[pa.Array, Any, str]] = [
    (pa.array([1, 2**40, 3]), "int", "1099511627776 (row 1 of the batch), which does not fit into int"),
    (pa.array([2**64 - 1], pa.uint64()), "long", "18446744073709551615"),
    (pa.array([1000], pa.int32()), "decimal(5, 2)", "1000"),
    (pa.array([Decimal("1" * 30)], pa.decimal128(38, 0)), "decimal(38, 10)", "1" * 30),
    (pa.array([Decimal("1" * 45)], pa.decimal256(50, 0)), "decimal(38, 0)", "does not fit"),
    (pa.array([Decimal("1.234")], pa.decimal128(5, 3)), "decimal(5, 2)", "1.234"),
    (pa.array([2**53 + 1]), "double", "9007199254740993"),
    (pa.array([1.5]), "float", "digits would be lost"),
    (pa.array([Decimal("1.5")], pa.decimal128(5, 3)), "double", "not exact"),
    (pa.array([1_001], pa.timestamp("ns")), "timestamp", "does not fit into timestamp"),
    (pa.array([2**60], pa.timestamp("s")), "timestamp", "does not fit into timestamp"),
    (pa.array([UTC_NOON], pa.timestamp("us", "UTC")), "timestamp", "lose its time zone"),
    (pa.array([1], pa.int64()), "timestamptz", "nothing in common"),
    (pa.array([b"ok", b"\xff\xfe"]), "string", r"b'\xff\xfe' (row 1"),
    (pa.array([b"ab"], pa.binary()), "fixed[3]", "b'ab'"),
    (pa.array([b"ab"], pa.binary(2)), "fixed[3]", "widths differ"),
    (pa.array(["x"]), "int", "nothing in common"),
    (pa.array([1]), "string", "nothing in common"),
    (pa.array([1]), INT_LIST, "not a list"),
    (pa.array([[1, 2**40]]), INT_LIST, "[1, 1099511627776]"),
    (pa.array([[1, None]]), INT_LIST, 'has NULL, but the target requires a value in "element"'),
    (pa.array([{"x": None, "y": 1.0}]), POINT, 'requires a value in "x"'),
    (pa.array([{"y": 1.0}]), POINT, 'requires a value in "x"'),
]


@pytest.mark.parametrize(
    ("array", "kind", "words"), MISFITS, ids=lambda value: str(getattr(value, "type", ""))[:30]
)
def test_a_value_that_does_not_fit_is_corrupt_and_named(array, kind, words):
    with pytest.raises(Corrupt) as caught:
        cast(array, kind)
    assert 'column "c"' in caught.value.message
    assert words in caught.value.message


def test_invalid_utf8_is_found_even_where_the_source_calls_it_a_string():
    offsets = pa.py_buffer(np.array([0, 2, 3], np.int32))
    for kind in (pa.string(), pa.large_string()):
        wide = offsets if kind == pa.string() else pa.py_buffer(np.array([0, 2, 3], np.int64))
        broken = pa.Array.from_buffers(kind, 2, [None, wide, pa.py_buffer(b"ok\xff")])
        with pytest.raises(Corrupt, match="row 1"):
            cast(broken, "string")
        with pytest.raises(Corrupt):
            cast(broken.dictionary_encode(), "string")


def test_null_in_a_required_column_is_corrupt():
    with pytest.raises(Corrupt, match='requires a value in "c"'):
        cast(pa.array([1, None]), "long", required=True)
    with pytest.raises(Corrupt, match="nothing fills it"):
        conform(pa.record_batch({"x": [1]}), [ColumnMap("c", 1, "int", True, None, None)])


def test_a_null_struct_may_lack_what_its_fields_require():
    found = cast(pa.array([None, {"x": 1.0, "y": None}]), POINT)
    assert found.to_pylist() == [None, {"x": 1.0, "y": None}]


def test_planned_loss_drops_digits_but_never_changes_the_meaning():
    assert cast(pa.array([1.1]), "float", lossy=True).to_pylist() == [float(np.float32(1.1))]
    assert cast(pa.array([2**53 + 1]), "double", lossy=True).to_pylist() == [float(2**53)]
    assert cast(
        pa.array([Decimal("-1.236")], pa.decimal128(5, 3)), "decimal(5, 2)", lossy=True
    ).to_pylist() == [Decimal("-1.24")]
    assert cast(pa.array([Decimal("1e40")], pa.decimal256(76, 10)), "double", lossy=True).to_pylist() == [
        1e40
    ]
    instants = pa.array([-1, 1_999], pa.timestamp("ns", "UTC"))
    assert cast(instants, "timestamptz", lossy=True).cast(pa.int64()).to_pylist() == [-1, 1]
    assert cast(pa.array([float("inf")]), "float", lossy=True).to_pylist() == [float("inf")]
    for array, kind in [
        (pa.array([2**40]), "int"),
        (pa.array([1e300]), "float"),
        (pa.array([Decimal("123.456")], pa.decimal128(6, 3)), "decimal(4, 2)"),
        (pa.array([2**63], pa.uint64()), "long"),
    ]:
        with pytest.raises(Corrupt):
            cast(array, kind, lossy=True)


def test_a_source_column_that_is_missing_or_doubled_is_corrupt():
    with pytest.raises(Corrupt, match="missing"):
        conform(pa.record_batch({"x": [1]}), one("long"))
    with pytest.raises(Corrupt, match="twice"):
        conform(pa.record_batch([pa.array([1]), pa.array([2])], ["c", "c"]), one("long"))


def test_dictionaries_stay_encoded_only_where_the_caller_wants_them():
    coded = pa.array(["a", "b", None, "a"]).dictionary_encode()
    batch = pa.record_batch({"c": coded})
    assert conform(batch, one("string")).column(0).type == pa.string()
    kept = conform(batch, one("string"), dictionaries={"c"})
    assert kept.schema == arrow_schema(one("string"), dictionaries={"c"})
    assert kept.column(0).dictionary.buffers()[2].address == coded.dictionary.buffers()[2].address
    hidden = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None]))
    with pytest.raises(Corrupt, match="has NULL"):
        conform(pa.record_batch({"c": hidden}), one("string", required=True), dictionaries={"c"})
    plain = conform(pa.record_batch({"c": ["a", "b"]}), one("string"), dictionaries={"c"})
    assert plain.schema == kept.schema
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, kept.schema, store_schema=False) as writer:
        writer.write_batch(kept)
        writer.write_batch(plain)
    assert pq.read_table(sink)["c"].to_pylist() == ["a", "b", None, "a", "a", "b"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.none() | st.integers(0, 2**64 - 1), max_size=20),
    st.sampled_from(["decimal(20, 0)", "decimal(38, 18)", "long", "decimal(10, 3)", "int"]),
)
def test_an_integer_arrives_unchanged_or_not_at_all(values, kind):
    array = pa.array(values, pa.uint64())
    try:
        found = cast(array, kind)
    except Corrupt:
        limits = {"long": 2**63, "int": 2**31, "decimal(10, 3)": 10**7}
        assert max(v for v in values if v is not None) >= limits[kind]
    else:
        assert [None if v is None else int(v) for v in found.to_pylist()] == values


def plain(value: Any) -> Any:
    """Maps as dicts, at every depth, as DuckDB shows them."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return dict(value)
    return value


def test_batches_of_all_types_are_read_back_from_parquet_by_another_reader(tmp_path):
    kinds: dict[str, Any] = {f"c{i}": kind for i, (_, kind, _) in enumerate(FITS)}
    columns = [
        ColumnMap(name, i + 1, kind, False, name, None) for i, (name, kind) in enumerate(kinds.items())
    ]
    arrays = [pa.concat_arrays([a.slice(0, 1), pa.nulls(1, a.type)]) for a, _, _ in FITS]
    batch = conform(pa.record_batch(arrays, list(kinds)), columns)
    path = tmp_path / "all.parquet"
    with pq.ParquetWriter(path, batch.schema, store_schema=False) as writer:
        writer.write_batch(batch)
    read = pq.read_table(path)
    assert read.num_rows == 2
    with duckdb.connect() as db:
        db.execute("SET TimeZone='UTC'")
        row, nulls = db.execute("SELECT * FROM read_parquet(?)", [str(path)]).fetchall()
    assert all(value is None for value in nulls)
    for name, value in zip(kinds, row, strict=True):
        shown = batch.column(name)[0].as_py()
        assert value == plain(shown), name
    assert pq.ParquetFile(path).schema.column(0).physical_type == "INT32"


def test_hostile_names_survive_parquet(tmp_path):
    columns = [ColumnMap(name, i + 1, "int", True, name, None) for i, name in enumerate([*HOSTILE, ""])]
    batch = conform(
        pa.record_batch([pa.array([i], pa.int32()) for i in range(len(columns))], [*HOSTILE, ""]), columns
    )
    path = tmp_path / "names.parquet"
    pq.write_table(pa.Table.from_batches([batch]), path, store_schema=False)
    assert pq.read_table(path).to_pydict() == {name: [i] for i, name in enumerate([*HOSTILE, ""])}
