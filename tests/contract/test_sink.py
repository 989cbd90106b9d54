"""What every caller of a sink relies on, shown on the sink of data files."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import replace
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.errors import Corrupt, Invalid, Retryable
from lockstep.fingerprint import fingerprint
from lockstep.job import Fingerprint, Json, Kind, Limits, Plan, StagedFile
from lockstep.runtime import FAILPOINTS_VARIABLE
from lockstep.sink import Sink
from lockstep.sink.datafile import DataFileSink
from lockstep.sink.stats import leaves_of
from lockstep.storage import Storage

UNPARTITIONED: Json = {"spec-id": 0, "fields": []}


def field(id_: int, name: str, type_: Any, required: bool = False) -> Json:
    return {"id": id_, "name": name, "required": required, "type": type_}


def by(*fields: tuple[int, str, str]) -> Json:
    return {
        "spec-id": 0,
        "fields": [
            {"source-id": source, "field-id": 1000 + at, "name": name, "transform": transform}
            for at, (source, name, transform) in enumerate(fields)
        ],
    }


def plan_for(location: Path | str, fields: list[Json], **changes: Any) -> Plan:
    plan = Plan(
        kind=Kind.EXPORT,
        source="chdb:x",
        target="iceberg://lake/db.t",
        target_uuid="u",
        location=str(location),
        schema={"type": "struct", "schema-id": 0, "fields": fields},
        spec=UNPARTITIONED,
        sort_order={"order-id": 7, "fields": []},
        columns=(),
        pin={},
    )
    return replace(plan, **changes)


def sink_for(plan: Plan, index: int = 0, epoch: int = 1, stage: str = "write") -> DataFileSink:
    return DataFileSink(plan, "0a1b", stage, index, epoch, Storage())


def numbers(start: int, count: int) -> pa.RecordBatch:
    rng = np.random.default_rng(start)
    return pa.record_batch({"id": np.arange(start, start + count), "x": rng.random(count)})


NUMBERS = [field(1, "id", "long"), field(2, "x", "double")]


def pour(sink: Sink, batches: list[pa.RecordBatch]) -> list[StagedFile]:
    """As an attempt does it: flush when full, and at the end."""
    staged = []
    for batch in batches:
        sink.add(batch)
        if sink.full:
            staged += sink.flush()
    return staged + sink.flush()


def read_back(files: list[StagedFile]) -> pa.Table:
    return pa.concat_tables([pq.ParquetFile(file.path).read() for file in files])


EVERY_TYPE: list[tuple[Any, pa.DataType, list[Any]]] = [
    ("boolean", pa.bool_(), [True, False, None]),
    ("int", pa.int32(), [-(2**31), 2**31 - 1, None]),
    ("long", pa.int64(), [-(2**63), 2**63 - 1, None]),
    ("float", pa.float32(), [math.inf, -0.0, None]),
    ("double", pa.float64(), [math.nan, -math.inf, None]),
    ("decimal(9, 2)", pa.decimal128(9, 2), [Decimal("-9999999.99"), Decimal("0.01"), None]),
    ("decimal(18, 0)", pa.decimal128(18, 0), [Decimal(10**18 - 1), Decimal(-1), None]),
    (
        "decimal(38, 38)",
        pa.decimal128(38, 38),
        [Decimal("0." + "0" * 37 + "1"), Decimal("-0." + "9" * 38), None],
    ),
    ("date", pa.date32(), [date(1, 1, 1), date(9999, 12, 31), None]),
    ("time", pa.time64("us"), [time(0), time(23, 59, 59, 999999), None]),
    ("timestamp", pa.timestamp("us"), [-1, 253402300799999999, None]),
    ("timestamptz", pa.timestamp("us", "UTC"), [-62135596800000000, 0, None]),
    ("timestamp_ns", pa.timestamp("ns"), [-1, 2**62, None]),
    ("string", pa.string(), ["", "😀 '\"\\\n\0", None]),
    ("string", pa.large_string(), ["x" * 10_000, "y", None]),
    ("uuid", pa.binary(16), [bytes(16), b"\xff" * 16, None]),
    ("fixed[3]", pa.binary(3), [b"\0\0\0", b"abc", None]),
    ("binary", pa.binary(), [b"", b"\xff\0", None]),
    (
        {"type": "list", "element-id": 101, "element": "uuid", "element-required": False},
        pa.list_(pa.binary(16)),
        [[bytes(16), None], [], None],
    ),
    (
        {
            "type": "map",
            "key-id": 102,
            "key": "string",
            "value-id": 103,
            "value": {"type": "struct", "fields": [field(104, "deep", "decimal(9, 2)")]},
            "value-required": False,
        },
        pa.map_(pa.string(), pa.struct([("deep", pa.decimal128(9, 2))])),
        [[("k", {"deep": Decimal("1.25")}), ("n", None)], [], None],
    ),
    (
        {
            "type": "struct",
            "fields": [field(105, "a b", "int"), field(106, "c", "timestamptz", required=True)],
        },
        pa.struct([("a b", pa.int32()), ("c", pa.timestamp("us", "UTC"))]),
        [{"a b": None, "c": 5}, {"a b": 1, "c": -5}, None],
    ),
]


def every_type() -> tuple[list[Json], pa.RecordBatch]:
    fields = [field(at, f"c {at}", type_) for at, (type_, _, _) in enumerate(EVERY_TYPE, 1)]
    arrays = [pa.array(values, arrow) for _, arrow, values in EVERY_TYPE]
    return fields, pa.record_batch(arrays, names=[each["name"] for each in fields])


def test_every_type_comes_back_exactly(tmp_path):
    fields, batch = every_type()
    (file,) = pour(sink_for(plan_for(tmp_path, fields)), [batch])
    table = pq.ParquetFile(file.path).read()
    for at, (type_, arrow, _) in enumerate(EVERY_TYPE):
        # Names of nested fields differ in the file; values must not.
        back = table.column(at).combine_chunks()
        back = back.storage if isinstance(back, pa.ExtensionArray) else back
        assert repr(_values(back)) == repr(_values(batch.column(at))), (type_, arrow)


def _values(array: pa.Array) -> list[Any]:
    if pa.types.is_timestamp(array.type):
        return array.cast(pa.int64()).to_pylist()
    if pa.types.is_struct(array.type):
        return [array.is_valid().to_pylist(), *[_values(child) for child in array.flatten()]]
    if pa.types.is_list(array.type):
        values = array.values.storage if isinstance(array.values, pa.ExtensionArray) else array.values
        return [array.is_valid().to_pylist(), array.value_lengths().to_pylist(), _values(values)]
    if pa.types.is_map(array.type):
        return [array.is_valid().to_pylist(), _values(array.keys), _values(array.items)]
    return array.to_pylist()


def test_another_reader_sees_the_same_rows(tmp_path):
    fields, batch = every_type()
    (file,) = pour(sink_for(plan_for(tmp_path, fields)), [batch])
    query = "SELECT c_x206, c_x208, c_x2014, c_x2016::TEXT, c_x2021 FROM read_parquet(?)"
    rows = duckdb.connect().execute(query, [file.path]).fetchall()
    assert [row[0] for row in rows] == batch.column(5).to_pylist()
    assert [row[1] for row in rows] == batch.column(7).to_pylist()
    assert [row[2] for row in rows] == batch.column(13).to_pylist()
    assert [row[3] for row in rows] == [
        "00000000-0000-0000-0000-000000000000",
        "ffffffff-ffff-ffff-ffff-ffffffffffff",
        None,
    ]
    assert rows[0][4]["a_x20b"] is None


def test_field_ids_and_physical_types_are_those_of_the_specification(tmp_path):
    fields, batch = every_type()
    (file,) = pour(sink_for(plan_for(tmp_path, fields)), [batch])
    parquet = pq.ParquetFile(file.path)
    text = str(parquet.schema)
    for id_ in [*range(1, len(fields) + 1), 101, 102, 103, 104, 105, 106]:
        assert f"field_id={id_} " in text
    for line in [
        "int32 field_id=6 c_x206 (Decimal(precision=9, scale=2))",
        "int64 field_id=7 c_x207 (Decimal(precision=18, scale=0))",
        "fixed_len_byte_array(16) field_id=8 c_x208 (Decimal(precision=38, scale=38))",
        "fixed_len_byte_array(16) field_id=16 c_x2016 (UUID)",
        "fixed_len_byte_array(16) field_id=101 element (UUID)",
        "int64 field_id=11 c_x2011 (Timestamp(isAdjustedToUTC=false, timeUnit=microseconds",
        "int64 field_id=12 c_x2012 (Timestamp(isAdjustedToUTC=true, timeUnit=microseconds",
        "required int64 field_id=106 c ",
        "required binary field_id=102 key (String)",
    ]:
        assert line in text, line
    assert json.loads(parquet.metadata.metadata[b"iceberg.schema"])["fields"] == fields
    assert parquet.metadata.row_group(0).column(1).compression == "ZSTD"


def test_the_footer_has_no_range_of_uuids_which_readers_order_differently(tmp_path):
    fields, batch = every_type()
    (file,) = pour(sink_for(plan_for(tmp_path, fields)), [batch])
    group = pq.read_metadata(file.path).row_group(0)
    for leaf, at in zip(leaves_of(fields), range(group.num_columns), strict=True):
        assert group.column(at).is_stats_set == (leaf.type != "uuid"), leaf.name
    uuid_id = next(each["id"] for each in fields if each["type"] == "uuid")
    assert file.stats["null_value_counts"][str(uuid_id)] == 1


def test_what_a_file_says_of_itself_is_true(tmp_path):
    batches = [numbers(0, 1000), numbers(1000, 500)]
    (file,) = pour(sink_for(plan_for(tmp_path, NUMBERS)), batches)
    content = Path(file.path).read_bytes()
    assert file.size_bytes == len(content)
    assert file.checksum == hashlib.blake2b(content, digest_size=16).hexdigest()
    assert file.rows == pq.ParquetFile(file.path).metadata.num_rows == 1500
    assert file.fingerprint == fingerprint(batches[0]) + fingerprint(batches[1])
    assert StagedFile.from_json(json.loads(json.dumps(file.to_json(), allow_nan=False))) == file


def test_files_roll_at_their_size_and_hold_every_row_once(tmp_path):
    plan = plan_for(tmp_path, NUMBERS, file_size_bytes=400_000)
    batches = [numbers(n * 5000, 5000) for n in range(40)]
    files = pour(sink_for(plan), batches)
    assert len(files) > 3
    for file in files[:-1]:
        assert 350_000 < file.size_bytes < 600_000
    assert sorted(read_back(files)["id"].to_pylist()) == list(range(200_000))
    total = sum((file.fingerprint for file in files), Fingerprint())
    assert total == sum(map(fingerprint, batches), Fingerprint())


def test_a_file_that_nobody_flushes_does_not_grow_without_end(tmp_path):
    sink = sink_for(plan_for(tmp_path, NUMBERS, file_size_bytes=200_000))
    for n in range(20):
        sink.add(numbers(n * 5000, 5000))
    files = sink.flush()
    assert max(file.size_bytes for file in files) < 450_000
    assert sum(file.rows for file in files) == 100_000


def test_one_batch_larger_than_a_file_makes_several_files(tmp_path):
    files = pour(sink_for(plan_for(tmp_path, NUMBERS, file_size_bytes=100_000)), [numbers(0, 100_000)])
    assert len(files) >= 5
    assert read_back(files)["id"].to_pylist() == list(range(100_000))


def test_narrow_rows_make_row_groups_of_a_bounded_number(tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.sink.datafile.MOST_GROUP_ROWS", 1000)
    flags = [pa.record_batch({"flag": pa.array([True] * 400)}) for _ in range(6)]
    (file,) = pour(sink_for(plan_for(tmp_path, [field(1, "flag", "boolean")])), flags)
    footer = pq.read_metadata(file.path)
    assert [footer.row_group(at).num_rows for at in range(footer.num_row_groups)] == [800, 800, 800]
    assert file.rows == 2400


def test_a_sink_is_full_only_when_a_file_has_its_size(tmp_path):
    sink = sink_for(plan_for(tmp_path, NUMBERS, file_size_bytes=100_000))
    seen = []
    for n in range(100):
        sink.add(numbers(n * 1000, 1000))
        seen.append(sink.full)
        if sink.pending_bytes >= 100_000:
            break
    assert seen == [False] * (len(seen) - 1) + [True]
    assert len(seen) > 3
    assert 100_000 <= sink.pending_bytes < 150_000
    sink.flush()
    assert not sink.full
    assert sink.pending_bytes == 0


def test_after_a_flush_nothing_is_left_and_no_rows_make_no_file(tmp_path):
    sink = sink_for(plan_for(tmp_path, NUMBERS))
    assert sink.flush() == []
    sink.add(numbers(0, 0))
    assert sink.flush() == []
    sink.add(numbers(0, 1))
    assert len(sink.flush()) == 1
    assert sink.flush() == []


def test_no_attempt_can_overwrite_anothers_file(tmp_path):
    plan = plan_for(tmp_path, NUMBERS)
    paths = set()
    for index, epoch, stage in [(0, 1, "write"), (1, 1, "write"), (0, 2, "write"), (0, 1, "merge")]:
        sink = sink_for(plan, index, epoch, stage)
        for _ in range(2):
            sink.add(numbers(0, 10))
            (file,) = sink.flush()
            paths.add(file.path)
            assert f"/lockstep-0a1b-{stage}-{index:05d}-{epoch:03d}-" in file.path
    assert len(paths) == 8
    twin = sink_for(plan)
    twin.add(numbers(5, 5))
    with pytest.raises(Corrupt, match="exists already"):
        twin.flush()
    assert all(Path(path).stat().st_size > 0 for path in paths)


def test_rows_of_several_partitions_go_to_a_file_each(tmp_path):
    fields = [field(1, "region", "string"), field(2, "day", "date")]
    plan = plan_for(tmp_path, fields, spec=by((1, "region", "identity"), (2, "m", "month")))
    days = [date(2024, 1, 1), date(2024, 2, 1), date(2024, 1, 31), None]
    batch = pa.record_batch({"region": pa.array(["eu", "eu", "eu", None]), "day": pa.array(days)})
    files = pour(sink_for(plan), [batch, batch])
    assert {(tuple(file.partition), file.rows) for file in files} == {
        (("eu", 648), 4),
        (("eu", 649), 2),
        ((None, None), 2),
    }
    folders = {os.path.relpath(os.path.dirname(file.path), tmp_path) for file in files}
    assert folders == {"data/region=eu/m=2024-01", "data/region=eu/m=2024-02", "data/region=null/m=null"}


def test_a_row_of_another_partition_is_refused_and_named(tmp_path):
    plan = plan_for(tmp_path, [field(1, "day", "date")], spec=by((1, "m", "month")), partition_values=(648,))
    sink = sink_for(plan)
    sink.add(pa.record_batch({"day": pa.array([date(2024, 1, 5)])}))
    with pytest.raises(Corrupt, match="m=2024-02 of the target, but this job writes m=2024-01 only"):
        sink.add(pa.record_batch({"day": pa.array([date(2024, 1, 5), date(2024, 2, 1)])}))
    sink.abort()
    only_null = sink_for(replace(plan, partition_values=(None,)))
    only_null.add(pa.record_batch({"day": pa.array([None], pa.date32())}))
    with pytest.raises(Corrupt):
        only_null.add(pa.record_batch({"day": pa.array([date(2024, 1, 5)])}))
    only_null.abort()


@pytest.mark.parametrize(
    "value", ["/", "..", "../../x", "%2F", "a\nb", "", None, "\0", "x" * 3000, "😀" * 90]
)
def test_a_hostile_partition_value_is_stored_inside_the_tables_folder(tmp_path, value):
    table = tmp_path / "table"
    for location in (table, f"file://{table}"):
        plan = plan_for(location, [field(1, "p/..", "string")], spec=by((1, "p/..", "identity")))
        sink = sink_for(plan, epoch=2 if location is table else 1)
        (file,) = pour(sink, [pa.record_batch({"p/..": pa.array([value], pa.string())})])
        assert file.partition == (value,)
        assert file.path.startswith(f"{location}/data/")
        path = Path(file.path.removeprefix("file://"))
        assert path.resolve().is_relative_to(table.resolve() / "data")
        assert pq.ParquetFile(path).read().column(0).to_pylist() == [value]
    assert os.listdir(tmp_path) == ["table"]


def test_the_number_of_open_files_is_bounded_and_no_row_is_lost(tmp_path):
    fields = [field(1, "id", "long"), field(2, "x", "double")]
    limits = Limits(task_memory_bytes=20_000_000)
    plan = plan_for(tmp_path, fields, spec=by((1, "id", "identity")), limits=limits)
    sink = sink_for(plan)
    before = len(os.listdir("/proc/self/fd"))
    for start in range(0, 60, 20):
        sink.add(numbers(start, 20))
        assert len(os.listdir("/proc/self/fd")) - before <= 5
    finished = len(list(Storage().list(str(tmp_path))))
    assert finished >= 55, "only the newest few stay open"
    files = sink.flush()
    assert sorted(read_back(files)["id"].to_pylist()) == list(range(60))
    assert len({tuple(file.partition) for file in files}) == 60


def test_memory_is_bounded_by_bytes_not_by_rows(tmp_path):
    limits = Limits(task_memory_bytes=32_000_000)
    sink = sink_for(plan_for(tmp_path, NUMBERS, limits=limits))
    pa.default_memory_pool().release_unused()
    before, most = pa.total_allocated_bytes(), 0
    for n in range(100):
        sink.add(numbers(n * 20_000, 20_000))
        most = max(most, pa.total_allocated_bytes() - before)
    files = sink.flush()
    assert sum(file.rows for file in files) == 2_000_000
    assert most < limits.task_memory_bytes
    assert len(files[0].stats["split_offsets"]) >= 5


def test_a_row_of_fifty_megabytes_is_a_row_like_any_other(tmp_path):
    long = "é" * 25_000_000
    batch = pa.record_batch({"id": pa.array([1, 2, 3]), "s": pa.array(["a", long, None])})
    plan = plan_for(tmp_path, [field(1, "id", "long"), field(2, "s", "string")])
    (file,) = pour(sink_for(plan), [batch])
    assert pq.ParquetFile(file.path).read()["s"].to_pylist() == ["a", long, None]
    assert len(file.stats["upper_bounds"]["2"]) < 100


def test_a_given_up_file_leaves_nothing_behind(tmp_path):
    sink = sink_for(plan_for(tmp_path, NUMBERS, limits=Limits(task_memory_bytes=1_000_000)))
    sink.add(numbers(0, 50_000))
    assert list(Storage().list(str(tmp_path)))
    sink.abort()
    assert list(Storage().list(str(tmp_path))) == []
    sink.abort()


def test_finished_files_stay_when_open_ones_are_given_up(tmp_path):
    sink = sink_for(plan_for(tmp_path, NUMBERS))
    sink.add(numbers(0, 10))
    (file,) = sink.flush()
    sink.add(numbers(10, 10))
    sink.abort()
    assert [each.url for each in Storage().list(str(tmp_path))] == [file.path]


def test_the_drill_after_a_file_finds_it_finished(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_FAILPOINTS_STATE", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    monkeypatch.setenv(FAILPOINTS_VARIABLE, "write.after_file=error@2")
    sink = sink_for(plan_for(tmp_path / "t", NUMBERS))
    sink.add(numbers(0, 10))
    sink.flush()
    sink.add(numbers(10, 10))
    with pytest.raises(Retryable, match="after_file"):
        sink.flush()
    found = [pq.ParquetFile(each.url).metadata.num_rows for each in Storage().list(str(tmp_path / "t"))]
    assert found == [10, 10]


def test_a_file_that_the_storage_lost_is_not_listed(tmp_path):
    class Forgetful(Storage):
        def size(self, url: str) -> int | None:
            found = super().size(url)
            return None if found is None else found - 1

    sink = DataFileSink(plan_for(tmp_path, NUMBERS), "0a1b", "write", 0, 1, Forgetful())
    sink.add(numbers(0, 10))
    with pytest.raises(Corrupt, match="but the storage has"):
        sink.flush()
    sink.abort()
    assert len(list(Storage().list(str(tmp_path)))) == 1, "the evidence stays"


def test_rows_that_are_not_the_tables_are_refused(tmp_path):
    plan = plan_for(tmp_path, [field(1, "id", "long", required=True)])
    for batch, reason in [
        (pa.record_batch({"id": pa.array([1], pa.int32())}), "long in the table, but the rows have int32"),
        (pa.record_batch({"other": pa.array([1])}), "id, other"),
        (pa.record_batch({"id": pa.array([1]), "x": pa.array([1])}), "differ in x"),
        (pa.record_batch({"id": pa.array([1, None])}), '"id" is required'),
    ]:
        with pytest.raises(Corrupt, match=reason):
            sink_for(plan).add(batch)


def test_a_null_in_a_required_field_deep_inside_is_refused(tmp_path):
    type_ = {"type": "struct", "fields": [field(2, "x", "long", required=True)]}
    sink = sink_for(plan_for(tmp_path, [field(1, "s", type_)]))
    sink.add(pa.record_batch({"s": pa.array([{"x": 1}, {"x": None}], pa.struct([("x", pa.int64())]))}))
    with pytest.raises(Corrupt):
        sink.flush()
    sink.abort()


def test_dictionaries_views_and_plain_texts_make_the_same_file(tmp_path):
    texts = pa.array(["b", "c", None, "b", "long " * 1000])
    # As a filter leaves it: the dictionary holds values that no row has.
    words = pa.array(["a", "b", "c", "z", "z" * 5000, "long " * 1000])
    dictionary = pa.DictionaryArray.from_arrays(pa.array([1, 2, None, 1, 5], pa.int32()), words)
    found = []
    for epoch, array in enumerate([texts, dictionary, texts.cast(pa.string_view())]):
        for spec in (UNPARTITIONED, by((1, "s", "truncate[1]"))):
            plan = plan_for(tmp_path, [field(1, "s", "string")], spec=spec)
            files = pour(sink_for(plan, epoch=epoch), [pa.record_batch({"s": array})] * 2)
            assert sorted(map(str, read_back(files)["s"].to_pylist())) == sorted(
                map(str, texts.to_pylist() * 2)
            )
            for file in files:
                del file.stats["column_sizes"]
                found.append((epoch, tuple(file.partition), file.fingerprint, file.stats))
    by_epoch = [[each[1:] for each in found if each[0] == epoch] for epoch in range(3)]
    assert by_epoch[0] == by_epoch[1] == by_epoch[2]


def test_a_column_may_come_as_a_dictionary_now_and_plain_then(tmp_path):
    texts = pa.array(["a", "b", None, "a"])
    kinds = [texts, texts.dictionary_encode(), texts.cast(pa.large_string())]
    for epoch, order in enumerate([kinds, kinds[::-1], [kinds[1], kinds[0], kinds[1]]]):
        sink = sink_for(plan_for(tmp_path, [field(1, "s", "string")]), epoch=epoch)
        (file,) = pour(sink, [pa.record_batch({"s": array}) for array in order])
        assert read_back([file])["s"].to_pylist() == texts.to_pylist() * 3


def test_dictionaries_that_change_from_batch_to_batch_stay_dictionaries_in_the_file(tmp_path):
    batches = [
        pa.record_batch({"s": pa.array([f"w{n}", f"w{n + 1}"] * 500).dictionary_encode()}) for n in range(5)
    ]
    (file,) = pour(sink_for(plan_for(tmp_path, [field(1, "s", "string")])), batches)
    metadata = pq.ParquetFile(file.path).metadata.row_group(0).column(0)
    assert metadata.has_dictionary_page
    assert metadata.total_uncompressed_size < 5000


def test_extension_types_deep_inside_are_the_same_as_their_storage(tmp_path):
    type_ = {"type": "list", "element-id": 2, "element": "uuid", "element-required": False}
    values = [[bytes(16), None, b"\xff" * 16], [], None]
    stored = pa.array(values, pa.list_(pa.binary(16)))
    for epoch, array in enumerate([stored, stored.cast(pa.list_(pa.uuid()))]):
        sink = sink_for(plan_for(tmp_path, [field(1, "l", type_)]), epoch=epoch)
        (file,) = pour(sink, [pa.record_batch({"l": array}), pa.record_batch({"l": stored})])
        back = pq.ParquetFile(file.path).read()["l"].combine_chunks()
        assert pa.concat_arrays([stored, stored]).equals(back.cast(stored.type))


def test_only_repetitive_columns_have_a_dictionary(tmp_path):
    count = 20_000
    rng = np.random.default_rng(1)
    batch = pa.record_batch(
        {
            "few": pa.array(["de", "us", "fr"]).take(pa.array(rng.integers(0, 3, count))),
            "many": pa.array([f"user-{n}" for n in range(count)]),
            "tags": pa.array([["x", "y"]] * count),
        }
    )
    tags = {"type": "list", "element-id": 4, "element": "string", "element-required": False}
    fields = [field(1, "few", "string"), field(2, "many", "string"), field(3, "tags", tags)]
    (file,) = pour(sink_for(plan_for(tmp_path, fields)), [batch])
    group = pq.ParquetFile(file.path).metadata.row_group(0)
    assert [group.column(at).has_dictionary_page for at in range(3)] == [True, False, True]


def test_only_a_merge_claims_the_tables_order(tmp_path):
    for stage, expected in (("write", None), ("merge", 7)):
        (file,) = pour(sink_for(plan_for(tmp_path, NUMBERS), stage=stage), [numbers(0, 5)])
        assert file.stats["sort_order_id"] == expected


def test_the_tables_properties_are_honoured(tmp_path):
    properties = {
        "write.data.path": f"{tmp_path}/elsewhere/",
        "write.parquet.compression-codec": "snappy",
        "write.metadata.metrics.default": "counts",
    }
    (file,) = pour(sink_for(plan_for(tmp_path / "t", NUMBERS, properties=properties)), [numbers(0, 5)])
    assert os.path.dirname(file.path) == f"{tmp_path}/elsewhere"
    assert pq.ParquetFile(file.path).metadata.row_group(0).column(0).compression == "SNAPPY"
    assert file.stats["lower_bounds"] == {}


def test_a_level_goes_with_a_codec_that_has_levels_and_nonsense_is_refused(tmp_path):
    level = "write.parquet.compression-level"
    for epoch, codec in enumerate(["snappy", "gzip", "zstd", "uncompressed", "lz4", "brotli"]):
        properties = {"write.parquet.compression-codec": codec, level: "3"}
        sink = sink_for(plan_for(tmp_path, NUMBERS, properties=properties), epoch=epoch)
        assert pour(sink, [numbers(0, 5)])[0].rows == 5
    with pytest.raises(Invalid, match=level):
        sink_for(plan_for(tmp_path, NUMBERS, properties={level: "high"}))


def test_the_layout_for_object_storage_is_that_of_iceberg(tmp_path):
    from pyiceberg.partitioning import PartitionKey, PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.table.locations import ObjectStoreLocationProvider

    for partitioned in ("true", "false"):
        properties = {
            "write.object-storage.enabled": "true",
            "write.object-storage.partitioned-paths": partitioned,
        }
        plan = plan_for(tmp_path, NUMBERS, spec=by((1, "id", "identity")), properties=properties)
        (file,) = pour(sink_for(plan), [numbers(3, 1)])
        schema = Schema.model_validate(plan.schema)
        spec = PartitionSpec.model_validate(plan.spec)
        key = PartitionKey([], spec, schema)
        object.__setattr__(key, "to_path", lambda: "id=3")
        provider = ObjectStoreLocationProvider(str(tmp_path), properties)
        name = file.path[file.path.index("lockstep-0a1b") :]
        assert file.path == provider.new_data_location(name, key)
