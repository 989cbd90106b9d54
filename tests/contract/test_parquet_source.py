"""Parquet folders as a source: layout, pinning, tasks, and reading from any position."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.config import Config
from lockstep.errors import Corrupt, Invalid
from lockstep.fingerprint import fingerprint
from lockstep.job import ColumnMap, Fingerprint
from lockstep.new_table import derive
from lockstep.schema import match_columns
from lockstep.source import Chunk, Pin
from lockstep.source.parquet import ParquetSource

MB = 1_000_000


def open_folder(folder: Path) -> ParquetSource:
    return ParquetSource(f"parquet:{folder}", Config(folder, "sqlite://", {}, {}, {}))


def write(path: Path, rows: pa.Table | dict[str, Any], **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows if isinstance(rows, pa.Table) else pa.table(rows), path, **options)


def columns_of(source: ParquetSource, **options: Any) -> list[ColumnMap]:
    table = source.describe()
    schema, _, _ = derive(table, **options)
    return match_columns(table, schema, **options)


def read_all(
    source: ParquetSource, pin: Pin, columns: Sequence[ColumnMap], batch_bytes: int = MB, task_bytes: int = MB
) -> list[Chunk]:
    return [
        chunk
        for task in source.plan_tasks(pin, task_bytes)
        for chunk in source.read(pin.detail, task.descriptor, None, columns, batch_bytes)
    ]


def rows_of(chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
    return [row for chunk in chunks for row in chunk.batch.to_pylist()]


def refusal(source: ParquetSource) -> str:
    with pytest.raises(Invalid) as caught:
        source.describe()
    return caught.value.message


# Layout


def test_a_flat_folder_is_one_partition_of_all_its_files(tmp_path):
    write(tmp_path / "b.parquet", {"x": [3]})
    write(tmp_path / "a.parquet", {"x": [1, 2]})
    write(tmp_path / "sub" / "c.parquet", {"x": [4]})
    source = open_folder(tmp_path)
    (partition,) = source.partitions()
    assert (partition.partition_id, partition.rows) == ("all", 4)
    assert [(part.name, part.rows, part.piece.name) for part in partition.parts] == [
        ("a.parquet", 2, "a.parquet"),
        ("b.parquet", 1, "b.parquet"),
        ("sub/c.parquet", 1, "sub/c.parquet"),
    ]
    assert partition.size_bytes == sum(p.stat().st_size for p in tmp_path.rglob("*.parquet"))
    pin = source.pin("name", "all", None)
    assert pin.rows == 4
    assert rows_of(read_all(source, pin, columns_of(source))) == [{"x": i} for i in (1, 2, 3, 4)]
    assert source.describe().partitioning == []


def test_one_file_is_a_source_too(tmp_path):
    write(tmp_path / "_a.parquet", {"x": [1, 2]})
    write(tmp_path / "b.parquet", {"y": [1]})
    source = open_folder(tmp_path / "_a.parquet")
    pin = source.pin("name", "all", None)
    assert rows_of(read_all(source, pin, columns_of(source))) == [{"x": 1}, {"x": 2}]


def test_a_hive_folder_has_a_partition_per_leaf_with_typed_path_columns(tmp_path):
    folders = {
        "n=1/d=2024-02-29/s=a%2Fb": 1,
        "n=-20/d=2023-01-01/s=01": 2,
        "n=__HIVE_DEFAULT_PARTITION__/d=2023-01-01/s=": 3,
    }
    for folder, x in folders.items():
        write(tmp_path / folder / "part-0.parquet", {"x": [x]})
    source = open_folder(tmp_path)
    table = source.describe()
    assert [(c.name, c.type, c.nullable) for c in table.columns] == [
        ("x", "long", True),
        ("n", "long", True),
        ("d", "date", True),
        ("s", "string", True),
    ]
    assert [(f.column, f.transform) for f in table.partitioning or ()] == [
        ("n", "identity"),
        ("d", "identity"),
        ("s", "identity"),
    ]
    assert table.partition_key == "n, d, s"
    assert sorted(p.partition_id for p in source.partitions()) == sorted(folders)
    labels = {p.partition_id: p.label for p in source.partitions()}
    assert labels["n=1/d=2024-02-29/s=a%2Fb"] == "n=1, d=2024-02-29, s=a/b"
    found = {}
    for folder in folders:
        (row,) = rows_of(read_all(source, source.pin("name", folder, None), columns_of(source)))
        found[folder] = (row["x"], row["n"], row["d"], row["s"])
    assert found == {
        "n=1/d=2024-02-29/s=a%2Fb": (1, 1, date(2024, 2, 29), "a/b"),
        "n=-20/d=2023-01-01/s=01": (2, -20, date(2023, 1, 1), "01"),
        "n=__HIVE_DEFAULT_PARTITION__/d=2023-01-01/s=": (3, None, date(2023, 1, 1), ""),
    }


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "2"], "long"),
        (["01", "2"], "string"),
        (["-0"], "string"),
        ([str(2**63 - 1), str(-(2**63))], "long"),
        ([str(2**63)], "string"),
        (["2024-02-30"], "string"),
        (["2024-01-01", "x"], "string"),
        (["__HIVE_DEFAULT_PARTITION__"], "string"),
        (["..", "%2E%2E", "a%0Ab"], "string"),
    ],
)
def test_a_path_column_has_the_type_that_gives_every_folder_name_back(tmp_path, values, kind):
    for value in values:
        write(tmp_path / f"k={value}" / "f.parquet", {"x": [1]})
    assert open_folder(tmp_path).describe().columns[1].type == kind


def test_a_column_in_the_files_wins_over_the_same_one_in_the_path(tmp_path):
    write(tmp_path / "k=1" / "f.parquet", {"k": pa.array([1], pa.int32()), "x": [5]})
    source = open_folder(tmp_path)
    assert [(c.name, c.type) for c in source.describe().columns] == [("k", "int"), ("x", "long")]
    pin = source.pin("name", "k=1", None)
    assert rows_of(read_all(source, pin, columns_of(source))) == [{"k": 1, "x": 5}]


def test_hidden_files_and_folders_do_not_count_but_hidden_looking_keys_do(tmp_path):
    write(tmp_path / "_k=1" / "f.parquet", {"x": [1]})
    write(tmp_path / "_temporary" / "f.parquet", {"other": [1]})
    (tmp_path / "_SUCCESS").write_bytes(b"")
    (tmp_path / "_k=1" / ".f.parquet.crc").write_bytes(b"crc")
    source = open_folder(tmp_path)
    assert [p.partition_id for p in source.partitions()] == ["_k=1"]


def test_a_mixed_layout_is_refused_naming_the_file(tmp_path):
    write(tmp_path / "k=1" / "f.parquet", {"x": [1]})
    write(tmp_path / "stray.parquet", {"x": [1]})
    assert "stray.parquet does not lie in key=value folders" in refusal(open_folder(tmp_path))
    (tmp_path / "stray.parquet").unlink()
    write(tmp_path / "j=1" / "g.parquet", {"x": [1]})
    assert "have the keys" in refusal(open_folder(tmp_path))


def test_what_is_not_there_or_not_parquet_is_refused(tmp_path):
    assert "there is no folder" in refusal(open_folder(tmp_path / "none"))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no Parquet files" in refusal(open_folder(empty))
    assert open_folder(empty).partitions() == []
    (empty / "notes.txt").write_text("hello")
    assert "notes.txt as Parquet" in refusal(open_folder(empty))
    with pytest.raises(Invalid, match="names no folder"):
        ParquetSource("parquet:", Config(tmp_path, "sqlite://", {}, {}, {}))


def test_relative_addresses_count_from_the_configuration_s_folder(tmp_path):
    write(tmp_path / "data" / "f.parquet", {"x": [1]})
    source = ParquetSource("parquet:data", Config(tmp_path, "sqlite://", {}, {}, {}))
    same = ParquetSource(f"parquet:file://{tmp_path}/data/", Config(Path("/"), "sqlite://", {}, {}, {}))
    assert source.describe().identity == same.describe().identity == f"parquet:{tmp_path}/data"


# Schemas


def test_files_that_disagree_are_refused_naming_file_and_difference(tmp_path):
    write(tmp_path / "a.parquet", {"x": [1], "y": ["a"]})
    for other, words in [
        ({"x": [1]}, 'no column "y"'),
        ({"x": [1], "y": ["a"], "z": [1]}, 'has a column "z"'),
        ({"x": ["1"], "y": ["a"]}, 'column "x" is string, and int64 in'),
    ]:
        write(tmp_path / "b.parquet", other)
        source = open_folder(tmp_path)
        assert words in refusal(source)
        assert "b.parquet" in refusal(source)
        with pytest.raises(Invalid, match=r"b\.parquet"):
            source.pin("name", "all", None)


def test_order_encoding_width_and_nullability_may_differ_between_files(tmp_path):
    strict = pa.schema(
        [pa.field("x", pa.int32(), nullable=False), pa.field("s", pa.string(), nullable=False)]
    )
    write(tmp_path / "a.parquet", pa.table({"x": [1], "s": ["a"]}, strict))
    write(
        tmp_path / "b.parquet",
        {"s": pa.array(["b", None]).dictionary_encode(), "x": pa.array([2, 3], pa.int16())},
    )
    source = open_folder(tmp_path)
    assert [(c.name, c.nullable) for c in source.describe().columns] == [("x", True), ("s", True)]
    pin = source.pin("name", "all", None)
    assert rows_of(read_all(source, pin, columns_of(source))) == [
        {"x": 1, "s": "a"},
        {"x": 2, "s": "b"},
        {"x": 3, "s": None},
    ]


def test_required_columns_stay_required(tmp_path):
    write(
        tmp_path / "a.parquet", pa.table({"x": [1]}, pa.schema([pa.field("x", pa.int64(), nullable=False)]))
    )
    assert not open_folder(tmp_path).describe().columns[0].nullable


TYPES: list[tuple[pa.Array, Any]] = [
    (pa.array([1], pa.uint8()), "int"),
    (pa.array([1], pa.uint32()), "long"),
    (pa.array([2**64 - 1], pa.uint64()), "decimal(20, 0)"),
    (pa.array([1], pa.timestamp("ms")), "timestamp"),
    (pa.array([1], pa.timestamp("us", "Asia/Tokyo")), "timestamptz"),
    (pa.array([Decimal("1.5")], pa.decimal128(9, 2)), "decimal(9, 2)"),
    (pa.array(["a"]).dictionary_encode(), "string"),
    (pa.array([b"a"], pa.large_binary()), "binary"),
    (pa.array([b"abc"], pa.binary(3)), "fixed[3]"),
    (pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"a" * 16], pa.binary(16))), "uuid"),
    (
        pa.array([[1]], pa.large_list(pa.int8())),
        {"type": "list", "element-id": 0, "element-required": False, "element": "int"},
    ),
    (pa.array([None], pa.null()), None),
]


@pytest.mark.parametrize(("array", "kind"), TYPES, ids=lambda value: str(getattr(value, "type", ""))[:30])
def test_arrow_types_map_to_the_iceberg_type_that_holds_them(tmp_path, array, kind):
    write(tmp_path / "a.parquet", {"c": array})
    source = open_folder(tmp_path)
    assert source.describe().columns[0].type == kind
    if kind is not None:
        (row,) = rows_of(read_all(source, source.pin("n", "all", None), columns_of(source)))
        shown = array.to_pylist()[0]
        assert (
            int(row["c"]) if isinstance(row["c"], Decimal) and isinstance(shown, int) else row["c"]
        ) == shown


@pytest.mark.parametrize(
    ("array", "lossy", "words"),
    [
        (pa.array([1], pa.timestamp("ns")), "timestamp", "microseconds"),
        (pa.array([1], pa.time64("ns")), "time", "microseconds"),
        (pa.array([Decimal(1)], pa.decimal256(50, 3)), "double", "38 digits"),
        (pa.array([1], pa.duration("s")), None, "durations"),
    ],
    ids=str,
)
def test_types_without_a_counterpart_are_refused_with_a_sentence(tmp_path, array, lossy, words):
    write(tmp_path / "a.parquet", {"c": array})
    (column,) = open_folder(tmp_path).describe().columns
    assert (column.type, column.lossy_type) == (None, lossy)
    assert words in str(column.problem)
    with pytest.raises(Invalid, match='column "c"'):
        columns_of(open_folder(tmp_path))


def test_far_dates_in_int96_do_not_wrap_around(tmp_path):
    far = [datetime(9999, 12, 31, 23, 59, 59, 123456), datetime(1, 1, 1)]
    write(
        tmp_path / "a.parquet", {"c": pa.array(far, pa.timestamp("us"))}, use_deprecated_int96_timestamps=True
    )
    source = open_folder(tmp_path)
    assert source.describe().columns[0].problem == "it holds nanoseconds, Iceberg microseconds"
    columns = columns_of(source, allow_lossy=True)
    found = rows_of(read_all(source, source.pin("n", "all", None), columns))
    assert [row["c"] for row in found] == far


HOSTILE = ["dot.ted", "dot", 'quo"te', "", "🙂", "a=b", "new\nline", "%2F"]


def test_hostile_names_are_read_as_they_are(tmp_path):
    arrays = [pa.array([i]) for i in range(len(HOSTILE))]
    write(tmp_path / "k%3D 🙂=1" / "f %.parquet", pa.Table.from_arrays(arrays, HOSTILE))
    source = open_folder(tmp_path)
    pin = source.pin("name", "k%3D 🙂=1", ["f %.parquet"])
    expected = {name: i for i, name in enumerate(HOSTILE)} | {"k= 🙂": 1}
    assert rows_of(read_all(source, pin, columns_of(source))) == [expected]
    only = [c for c in columns_of(source) if c.source == "dot"]
    assert rows_of(read_all(source, pin, only)) == [{"dot": 1}]


# Pinning


def test_unknown_partitions_and_files_are_refused(tmp_path):
    write(tmp_path / "k=1" / "f.parquet", {"x": [1]})
    source = open_folder(tmp_path)
    for unknown in ("k=2", "all", "../k=1", "k=1/", ""):
        with pytest.raises(Invalid, match="has no partition"):
            source.pin("name", unknown, None)
    with pytest.raises(Invalid, match=r'no file "g\.parquet"'):
        source.pin("name", "k=1", ["f.parquet", "g.parquet"])


def test_only_the_asked_parts_are_pinned_and_read(tmp_path):
    for i in range(3):
        write(tmp_path / f"{i}.parquet", {"x": [i]})
    source = open_folder(tmp_path)
    pin = source.pin("name", "all", ["2.parquet", "0.parquet"])
    assert ([part.name for part in pin.parts], pin.rows) == (["0.parquet", "2.parquet"], 2)
    assert rows_of(read_all(source, pin, columns_of(source))) == [{"x": 0}, {"x": 2}]


def test_later_files_are_not_read(tmp_path):
    write(tmp_path / "a.parquet", {"x": [1]})
    source = open_folder(tmp_path)
    pin, columns = source.pin("name", "all", None), columns_of(source)
    write(tmp_path / "b.parquet", {"x": [2]})
    assert rows_of(read_all(source, pin, columns)) == [{"x": 1}]


def gone(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    other = path.with_name("_other")
    write(other, {"x": list(range(100_000, 200_000))})
    os.replace(other, path)


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("change", [gone, replaced, touched])
def test_a_file_that_changed_since_the_pin_is_corrupt_and_named(tmp_path, change):
    write(tmp_path / "a.parquet", {"x": [1]})
    write(tmp_path / "b.parquet", {"x": list(range(100_000))})
    source = open_folder(tmp_path)
    pin, columns = source.pin("name", "all", None), columns_of(source)
    tasks = source.plan_tasks(pin, MB)
    change(tmp_path / "b.parquet")
    for act in (
        lambda: source.plan_tasks(pin, MB),
        lambda: list(source.read(pin.detail, tasks[0].descriptor, None, columns, MB)),
        lambda: source.bounds(pin, columns),
    ):
        with pytest.raises(Corrupt, match=r"b\.parquet"):
            act()


def test_a_file_that_changes_while_it_is_read_never_ends_its_task(tmp_path):
    write(tmp_path / "a.parquet", {"x": list(range(1000))}, row_group_size=100)
    source = open_folder(tmp_path)
    pin, columns = source.pin("name", "all", None), columns_of(source)
    (task,) = source.plan_tasks(pin, MB)
    chunks = source.read(pin.detail, task.descriptor, None, columns, MB)
    next(chunks)
    touched(tmp_path / "a.parquet")
    delivered: list[Chunk] = []
    with pytest.raises(Corrupt, match=r"a\.parquet has changed"):
        delivered.extend(chunks)
    assert sum(chunk.batch.num_rows for chunk in delivered) < 900


def test_a_folder_that_is_gone_is_corrupt(tmp_path):
    write(tmp_path / "k=1" / "a.parquet", {"x": [1]})
    source = open_folder(tmp_path)
    pin = source.pin("name", "k=1", None)
    (tmp_path / "k=1").rename(tmp_path / "_gone")
    with pytest.raises(Corrupt, match="is gone"):
        source.plan_tasks(pin, MB)


def test_damaged_pages_are_corrupt_and_the_file_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    plain = {"compression": "none", "use_dictionary": False, "column_encoding": "PLAIN"}
    write(path, {"x": list(range(10_000))}, write_page_checksum=True, **plain)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    source = open_folder(tmp_path)
    pin, columns = source.pin("name", "all", None), columns_of(source)
    with pytest.raises(Corrupt, match=r"cannot read .*a\.parquet"):
        read_all(source, pin, columns)


def test_unpin_leaves_the_files_alone(tmp_path):
    write(tmp_path / "a.parquet", {"x": [1]})
    source = open_folder(tmp_path)
    source.unpin(source.pin("name", "all", None).detail, 1.0)
    assert (tmp_path / "a.parquet").exists()


# Tasks and positions


def test_small_files_share_a_task_and_a_large_one_makes_several(tmp_path):
    for i in range(4):
        write(tmp_path / f"small{i}.parquet", {"x": list(range(10))})
    write(tmp_path / "large.parquet", {"x": list(range(100_000))}, row_group_size=10_000, compression="none")
    source = open_folder(tmp_path)
    pin = source.pin("name", "all", None)
    large = (tmp_path / "large.parquet").stat().st_size
    tasks = source.plan_tasks(pin, large // 4)
    assert tasks == source.plan_tasks(pin, large // 4)
    assert 4 <= len(tasks) <= 6
    assert [p for p in tasks[-1].descriptor["pieces"] if p[0] > 0][-4:] == [[i, 0, 1] for i in (1, 2, 3, 4)]
    assert sum(task.rows for task in tasks) == pin.rows == 100_040
    assert all(task.size_bytes <= large // 4 * 1.1 for task in tasks)
    (single,) = source.plan_tasks(pin, 1 << 40)
    assert single.rows == 100_040
    found = [row["x"] for row in rows_of(read_all(source, pin, columns_of(source), task_bytes=large // 4))]
    assert found == [*range(100_000), *[*range(10)] * 4]


def test_files_without_rows_make_no_tasks(tmp_path):
    write(tmp_path / "a.parquet", pa.table({"x": pa.array([], pa.int64())}))
    source = open_folder(tmp_path)
    pin, columns = source.pin("name", "all", None), columns_of(source)
    assert source.plan_tasks(pin, MB) == []
    assert source.bounds(pin, columns).num_rows == 0
    assert list(source.distinct_rows(pin, columns)) == []
    write(tmp_path / "b.parquet", {"x": [7]})
    pin = source.pin("name", "all", None)
    assert rows_of(read_all(source, pin, columns)) == [{"x": 7}]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 25), min_size=1, max_size=3),
    group=st.integers(1, 20),
    batch_bytes=st.sampled_from([1, 100, 500, MB]),
    task_bytes=st.sampled_from([1, 2_000, MB]),
)
def test_reading_goes_on_after_any_position_without_loss_or_repetition(
    tmp_path_factory, sizes, group, batch_bytes, task_bytes
):
    folder = tmp_path_factory.mktemp("k") / "k=3"
    number = 0
    for i, size in enumerate(sizes):
        rows = {"x": pa.array(range(number, number + size), pa.int64())}
        write(
            folder / f"{i}.parquet",
            rows | {"s": pa.array([f"s{n}" for n in range(size)], pa.string())},
            row_group_size=group,
        )
        number += size
    source = open_folder(folder.parent)
    pin, columns = source.pin("name", "k=3", None), columns_of(source)
    found = []
    for task in source.plan_tasks(pin, task_bytes):
        chunks = list(source.read(pin.detail, task.descriptor, None, columns, batch_bytes))
        assert chunks[-1].position is not None
        assert sum(chunk.batch.num_rows for chunk in chunks) == task.rows
        assert all(chunk.batch.num_rows for chunk in chunks)
        whole = rows_of(chunks)
        done = 0
        for chunk in chunks:
            done += chunk.batch.num_rows
            if chunk.position is not None:
                # Another process, with other batches, takes over from here.
                other = open_folder(folder.parent)
                rest = list(other.read(pin.detail, task.descriptor, chunk.position, columns, batch_bytes * 3))
                assert all(later.batch.num_rows for later in rest)
                assert rows_of(rest) == whole[done:]
        found += whole
    assert [row["x"] for row in found] == list(range(number))
    assert all(row["k"] == 3 for row in found)


def test_a_checkpoint_of_another_task_is_corrupt(tmp_path):
    write(tmp_path / "a.parquet", {"x": list(range(20))}, row_group_size=10)
    source = open_folder(tmp_path)
    pin, columns = source.pin("name", "all", None), columns_of(source)
    first, second = source.plan_tasks(pin, 1)
    (chunk,) = source.read(pin.detail, first.descriptor, None, columns, MB)
    with pytest.raises(Corrupt, match="outside of its task"):
        list(source.read(pin.detail, second.descriptor, chunk.position, columns, MB))


def test_batches_are_as_wide_as_asked_even_where_dictionaries_hide_the_width(tmp_path):
    wide = pa.array(["w" * 1000] * 20_000)
    write(tmp_path / "a.parquet", {"x": wide})
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    source = open_folder(tmp_path)
    pin, columns = source.pin("name", "all", None), columns_of(source)
    chunks = read_all(source, pin, columns, batch_bytes=MB)
    sizes = [chunk.batch.nbytes for chunk in chunks]
    assert max(sizes) <= 1.1 * MB
    assert len(chunks) <= 25


def test_memory_does_not_grow_with_the_row_group(tmp_path):
    import numpy as np

    rng = np.random.default_rng(1)
    numbers = {f"c{i}": rng.integers(0, 2**62, 500_000) for i in range(8)}
    write(tmp_path / "a.parquet", numbers, row_group_size=500_000, use_dictionary=False)
    source = open_folder(tmp_path)
    pin, columns = source.pin("name", "all", None), columns_of(source)
    (task,) = source.plan_tasks(pin, 1 << 40)
    pool = pa.default_memory_pool()
    before, most = pool.bytes_allocated(), 0
    for chunk in source.read(pin.detail, task.descriptor, None, columns, MB):
        most = max(most, pool.bytes_allocated() - before)
        del chunk
    assert most < 16 * MB < 8 * 8 * 500_000


# Looking before reading


def test_bounds_are_the_least_and_greatest_values_and_nulls(tmp_path):
    uuids = pa.ExtensionArray.from_storage(
        pa.uuid(), pa.array([b"\x01" * 16, None, b"\xff" * 16], pa.binary(16))
    )
    rows = {
        "i": pa.array([5, -3, 9]),
        "t": pa.array([10**17, 5, None], pa.timestamp("us")),
        "s": pa.array(["b", "ä", "a"]),
        "d": pa.array([Decimal("1.5"), Decimal("-2.5"), Decimal(0)], pa.decimal128(9, 1)),
        "u": uuids,
        "none": pa.array([None] * 3, pa.int32()),
    }
    write(tmp_path / "k=1" / "a.parquet", rows, row_group_size=2)
    source = open_folder(tmp_path)
    pin, columns = source.pin("name", "k=1", None), columns_of(source)
    found = source.bounds(pin, columns)
    assert found.schema.names == ["i", "t", "s", "d", "u", "none", "k"]
    shown = found.set_column(1, "t", found["t"].cast(pa.int64())).to_pydict()
    assert shown["i"] == [-3, 9, -3]
    assert shown["t"] == [5, 10**17, None]
    assert shown["s"] == ["a", "ä", "a"]
    assert shown["d"] == [Decimal("-2.5"), Decimal("1.5"), Decimal("-2.5")]
    assert [u if u is None else u.bytes for u in shown["u"]] == [b"\x01" * 16, b"\xff" * 16, None]
    assert shown["none"] == [None] * 3
    assert shown["k"] == [1, 1, 1]
    only = source.bounds(pin, [c for c in columns if c.target == "k"])
    assert only.to_pydict() == {"k": [1, 1]}


def test_distinct_rows_show_every_combination(tmp_path):
    uuids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"\x01" * 16] * 6, pa.binary(16)))
    rows = {"a": [1, 1, 2, None, 2, 1], "b": ["x", "x", "x", "y", "x", None], "u": uuids, "c": list(range(6))}
    write(tmp_path / "a.parquet", rows)
    source = open_folder(tmp_path)
    pin = source.pin("name", "all", None)
    columns = [c for c in columns_of(source) if c.target != "c"]
    found = [row for batch in source.distinct_rows(pin, columns) for row in batch.to_pylist()]
    assert len(found) == 4
    assert {(row["a"], row["b"]) for row in found} == {(1, "x"), (2, "x"), (None, "y"), (1, None)}
    nested = tmp_path / "nested"
    write(nested / "a.parquet", {"l": [[1], [1], [2]]})
    other = open_folder(nested)
    lists = [b.to_pylist() for b in other.distinct_rows(other.pin("n", "all", None), columns_of(other))]
    assert {"l": [1]} in lists[0]
    assert {"l": [2]} in lists[0]


def test_a_real_folder_written_by_another_tool_comes_through_unchanged(tmp_path):
    import duckdb

    with duckdb.connect() as db:
        db.execute(
            f"""COPY (SELECT i, i % 3 AS k, 'name ' || (i % 7) AS name, i / 3.0 AS f,
                       TIMESTAMP '2024-01-01' + INTERVAL (i) SECOND AS ts, [i, i + 1] AS l,
                       {{'a': i, 'b': NULL::VARCHAR}} AS st, CASE WHEN i % 5 = 0 THEN NULL ELSE i END AS n
                FROM range(10000) t(i))
            TO '{tmp_path}/out' (FORMAT parquet, PARTITION_BY (k))"""
        )
    source = open_folder(tmp_path / "out")
    total, rows = Fingerprint(), []
    for partition in source.partitions():
        pin = source.pin("name", partition.partition_id, None)
        for chunk in read_all(source, pin, columns_of(source), batch_bytes=50_000):
            total += fingerprint(chunk.batch)
            rows += chunk.batch.select(["i", "k", "n", "ts"]).to_pylist()
    rows.sort(key=lambda row: row["i"])
    assert [row["i"] for row in rows] == list(range(10_000))
    assert all(row["k"] == row["i"] % 3 for row in rows)
    assert rows[7]["n"] == 7
    assert rows[5]["n"] is None
    assert rows[61]["ts"] == datetime(2024, 1, 1, 0, 1, 1)
    assert total.rows == 10_000
