"""Which rows lose is the same for every way of getting there, and rows of the table always win."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import tempfile
from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.job import KEYS, Fingerprint, ImportTerms, Json, SortKey, StagedFile
from lockstep.keys import key_of
from lockstep.passes import newest_runs, next_stage
from lockstep.unique import Duplicate, Published, UniqueReader, code_of, judge, published
from tests.iceberg_tables import Lake
from tests.runs_lab import Crashes, Row, RunsLab, batch_of, in_order, rows_of, small

pytestmark = pytest.mark.long

Tasks = list[list[Row]]
POLICIES = ["error", "keep-first", "keep-last", "reject"]


def expected_losers(tasks: Tasks, columns: list[int], policy: str) -> list[Row]:
    """A plain model: the first row of a key wins, or the last one; NULL equals nothing."""
    numbered = [(task, record, row) for task, rows in enumerate(tasks) for record, row in enumerate(rows)]
    winners: dict[Row, tuple[int, int]] = {}
    losers: list[Row] = []
    for task, record, row in numbered if policy != "keep-last" else numbered[::-1]:
        key = tuple(row[at] for at in columns)
        if None in key:
            continue
        if key in winners:
            losers.append((task, record, *winners[key], None))
        else:
            winners[key] = (task, record)
    return sorted(losers, key=lambda row: row[:2])


def batches(random: Random, tasks: Tasks) -> list[list[pa.RecordBatch]]:
    return [
        [batch_of(rows[at : at + 40]) for at in range(0, len(rows), 40)]
        if random.random() < 0.5
        else [batch_of(rows)]
        for rows in tasks
    ]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.sampled_from([0, 5, 100, 300]),
    keys=st.sampled_from([2, 30, 10_000]),
    columns=st.sampled_from([("v",), ("s",), ("s", "k")]),
    policy=st.sampled_from(POLICIES),
    tasks=st.integers(1, 4),
    memory=st.sampled_from([600, 3000, 30_000]),
    block=st.sampled_from([100, 2000]),
    fan_in=st.sampled_from([2, 8, 64]),
    crashing=st.booleans(),
)
def test_the_losers_are_the_same_for_any_buffers_passes_ranges_and_crashes(
    seed: int,
    count: int,
    keys: int,
    columns: tuple[str, ...],
    policy: str,
    tasks: int,
    memory: int,
    block: int,
    fan_in: int,
    crashing: bool,
) -> None:
    random = Random(seed)

    def row() -> Row:
        key = random.randint(0, keys)
        return (
            random.randint(0, 3),
            None if key == 1 else "t" * (key % 40) + str(key),
            None if key == 1 else key,
        )

    rows: Tasks = [[row() for _ in range(count // tasks)] for _ in range(tasks)]
    crashes = Crashes(seed if crashing else None)
    with tempfile.TemporaryDirectory() as folder, small(block, fan_in, 2000, long_run=3 * block):
        lab = RunsLab(Path(folder), (SortKey("k"),), columns, policy, memory)
        lab.map(batches(random, rows), crashes)
        got = lab.rows(crashes)
        wanted = expected_losers(rows, ["ksv".index(column) for column in columns], policy)
        assert lab.losers() == wanted
        lost = {(task, record) for task, record, *_ in wanted}
        left = [
            each
            for task, members in enumerate(rows)
            for record, each in enumerate(members)
            if (task, record) not in lost
        ]
        assert got == in_order(left, [SortKey("k")])
        found = judge(lab.files["unique"], lab.plan)
    assert found.losers == len(wanted)
    assert found.refused == (policy == "error" and bool(wanted))
    assert found.first == (Duplicate(*wanted[0]) if wanted else None)


def test_finding_losers_goes_on_after_any_position_in_the_middle_of_a_group(tmp_path: Path) -> None:
    rows = [(1, "same" if at % 3 else str(at), at) for at in range(600)]
    with small(block=200, least_range=10**9):
        lab = RunsLab(tmp_path, unique=("s",), on_duplicate="keep-first", memory=2400)
        lab.map([[batch_of(rows[at : at + 50]) for at in range(0, 600, 50)]])
        reader = UniqueReader(lab.plan, lab.storage)
        losers = places = 0
        for task in next_stage("recombine", newest_runs(lab.files), lab.plan).tasks:
            chunks = list(reader.read(task.descriptor, None, 1000))
            after = [row for chunk in chunks for row in rows_of(chunk.batch)]
            losers += len(after)
            for chunk in chunks:
                after = after[chunk.batch.num_rows :]
                position = json.loads(json.dumps(chunk.position))
                rest = reader.read(task.descriptor, position, 1000)
                assert [row for one in rest for row in rows_of(one.batch)] == after
                places += len(after) > 0
    assert losers == 399
    assert places > 10


FLOATS: Json = {
    "type": "struct",
    "fields": [
        {"id": 1, "name": "x", "type": "double", "required": False},
        {"id": 2, "name": "n", "type": "long", "required": False},
    ],
}


def test_null_equals_nothing_nan_is_one_value_and_so_is_zero(tmp_path: Path) -> None:
    values = [None, None, math.nan, -math.nan, 0.0, -0.0, 1.0]
    lab = RunsLab(tmp_path, (SortKey("n"),), ("x",), "keep-first", schema=FLOATS)
    lab.map([[pa.record_batch({"x": pa.array(values, pa.float64()), "n": pa.array(range(7), pa.int64())})]])
    kept = lab.rows()
    assert [(row[0], row[1]) for row in lab.losers()] == [(0, 3), (0, 5)]
    assert [row[1] for row in kept] == [0, 1, 2, 4, 6]


def test_a_key_of_which_one_column_is_null_is_no_duplicate(tmp_path: Path) -> None:
    lab = RunsLab(tmp_path, unique=("k", "s"), on_duplicate="error")
    lab.map([[batch_of([(1, None, 1), (1, None, 2), (1, "a", 3), (1, "b", 4)])]])
    lab.rows()
    assert judge(lab.files["unique"], lab.plan).losers == 0


# Against the table


class TableLab(RunsLab):
    """A table with rows, and an import into it that is unique by id."""

    def __init__(self, folder: Path, lake: Lake, policy: str, memory: int = 30_000) -> None:
        head = lake.target.load()
        super().__init__(folder, (SortKey("id"),), ("id",), policy, memory, schema=head.schema)
        self.plan = dataclasses.replace(self.plan, location=str(folder))

    def take(self, *tasks: Sequence[int | None]) -> None:
        """Rows with these ids, of one task each."""
        self.map(
            [
                [
                    pa.record_batch(
                        {
                            "id": pa.array(ids, pa.int64()),
                            "region": pa.nulls(len(ids), pa.string()),
                            "amount": pa.nulls(len(ids), pa.float64()),
                        }
                    )
                ]
                for ids in tasks
            ]
        )


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Three files: ids 0 to 99, 100 to 199, and so on."""
    lake = Lake(tmp_path)
    lake.create()
    lake.publish("aa", *(lake.stage(range(first, first + 100)) for first in (0, 100, 200)))
    return lake


@pytest.mark.parametrize(("policy", "refused"), [("error", True), ("keep-last", True), ("reject", False)])
def test_a_row_of_the_table_wins_and_only_some_policies_accept_that(
    tmp_path: Path, lake: Lake, policy: str, refused: bool
) -> None:
    lab = TableLab(tmp_path, lake, policy)
    lab.take([500, 150, 150, 501])
    kept = lab.rows(published=published(lake.table(), lab.plan))
    found = judge(lab.files["unique"], lab.plan)
    assert (found.losers, found.against_table, found.refused) == (2, 2, refused)
    assert found.first is not None
    assert (found.first.task, found.first.record, found.first.winner_task) == (0, 1, None)
    assert (found.first.winner_file or "").endswith(".parquet")
    assert found.first.winner_record == 50
    assert [row[0] for row in kept] == [500, 501]


def test_only_files_of_the_table_whose_bounds_meet_the_new_keys_are_read(tmp_path: Path, lake: Lake) -> None:
    for number, (ids, files) in enumerate([([150, 160], 1), ([99, 100], 2), ([1000, 1001], 0), ([50], 1)]):
        lab = TableLab(tmp_path / str(number), lake, "keep-first")
        lab.take([*ids])
        lab.rows(published=published(lake.table(), lab.plan))
        assert lab.files_read == files, ids
        assert judge(lab.files["unique"], lab.plan).losers == (0 if files == 0 else len(ids))


def test_a_range_reads_only_the_files_that_meet_it(tmp_path: Path, lake: Lake) -> None:
    with small(block=200, least_range=1000):
        lab = TableLab(tmp_path, lake, "keep-first", memory=2000)
        lab.take([*range(300, 0, -1), None, None])
        kept = lab.rows(published=published(lake.table(), lab.plan))
        ranges = dict(lab.stages)["unique"]
    assert ranges > 4
    assert lab.files_read < 2 * ranges
    assert [row[0] for row in kept] == [None, None, 300]


def test_only_row_groups_whose_statistics_meet_the_range_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(tmp_path)
    lake.create()
    write = functools.partial(pq.write_table, row_group_size=10)
    monkeypatch.setattr("tests.iceberg_tables.pq.write_table", write)
    lake.publish("aa", lake.stage(range(1000)))
    lab = TableLab(tmp_path / "import", lake, "keep-first")
    lab.take([205, 2000, 231])
    held = published(lake.table(), lab.plan)
    task = next_stage("recombine", lab.files["map"], lab.plan, lambda: held).tasks[0]
    # The file goes up to 999, so that the end of the new keys excludes nothing: their beginning does.
    reader = UniqueReader(lab.plan, lab.storage)
    losers = [row for chunk in reader.read(task.descriptor, None, 1000) for row in rows_of(chunk.batch)]
    assert [row[:2] for row in losers] == [(0, 0), (0, 2)]
    assert reader.groups_read == 80
    lab = TableLab(tmp_path / "again", lake, "keep-first")
    lab.take([205, 231])
    task = next_stage("recombine", lab.files["map"], lab.plan, lambda: held).tasks[0]
    reader = UniqueReader(lab.plan, lab.storage)
    assert sum(chunk.batch.num_rows for chunk in reader.read(task.descriptor, None, 1000)) == 2
    assert reader.groups_read == 4


def test_texts_of_the_table_are_compared_whatever_the_width_of_their_offsets(
    tmp_path: Path, lake: Lake
) -> None:
    lake.publish("bb", lake.stage([1000], region=["nord"]))
    head = lake.target.load()
    lab = RunsLab(tmp_path / "i", (SortKey("id"),), ("region",), "keep-first", 30_000, schema=head.schema)
    tasks = []
    for kind in (pa.string(), pa.large_string()):
        columns = [pa.array([1, 2, 3]), pa.array(["nord", "sued", None], kind), pa.nulls(3, pa.float64())]
        tasks.append([pa.record_batch(columns, names=["id", "region", "amount"])])
    lab.map(tasks)
    kept = lab.rows(published=published(lake.table(), lab.plan))
    assert [row[:2] for row in lab.losers()] == [(0, 0), (1, 0), (1, 1)]
    assert kept == [(2, "sued", None), (3, None, None), (3, None, None)]


def test_the_table_is_asked_once_and_only_when_keys_are_compared_next(tmp_path: Path, lake: Lake) -> None:
    asked = []

    def held() -> Published:
        asked.append(1)
        return published(lake.table(), lab.plan)

    with small(block=100, fan_in=2):
        lab = TableLab(tmp_path / "import", lake, "keep-first")
        lab.take(*([at] for at in range(8)))
        assert next_stage("map", lab.files["map"], lab.plan, held).stage == "combine"
        assert not asked
        assert next_stage("recombine", lab.files["map"], lab.plan, held).stage == "unique"
        assert len(asked) == 1
        assert next_stage("unique", lab.files["map"], lab.plan, held).stage == "merge"
        assert len(asked) == 1


def test_an_empty_table_has_nothing_to_compare_with(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.create()
    lab = TableLab(tmp_path, lake, "error")
    lab.take([1, 2])
    lab.rows(published=published(lake.table(), lab.plan))
    assert lab.files_read == 0
    assert judge(lab.files["unique"], lab.plan).losers == 0


def test_new_rows_against_the_table_are_judged_alike_for_any_buffers_and_crashes(
    tmp_path: Path, lake: Lake
) -> None:
    random = Random(11)
    ids: list[int | None] = [random.randint(0, 600) for _ in range(400)]
    outcomes = []
    for number, memory in enumerate([600, 5000, 10**6]):
        with small(block=200, fan_in=3, least_range=1000):
            lab = TableLab(tmp_path / str(number), lake, "keep-first", memory)
            lab.take(ids)
            kept = lab.rows(Crashes(number), published(lake.table(), lab.plan))
            outcomes.append((kept, lab.losers(), judge(lab.files["unique"], lab.plan)))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert [row[0] for row in outcomes[0][0]] == sorted({i for i in ids if i is not None and i >= 300})


BOUNDS: list[tuple[str, pa.DataType, Any, Any]] = [
    ("int", pa.int32(), -5, 7),
    ("long", pa.int64(), -(2**40), 2**40),
    ("string", pa.string(), "abc", "abd"),
    ("binary", pa.binary(), b"\x00", b"\xff"),
    ("date", pa.date32(), date(1969, 1, 1), date(2024, 2, 29)),
    ("timestamp", pa.timestamp("us"), datetime(1969, 1, 1), datetime(2024, 2, 29, 1)),
    (
        "timestamptz",
        pa.timestamp("us", "UTC"),
        datetime(1969, 1, 1, tzinfo=UTC),
        datetime(2024, 1, 1, tzinfo=UTC),
    ),
    ("decimal(9, 2)", pa.decimal128(9, 2), Decimal("-1.50"), Decimal("10.25")),
    ("uuid", pa.binary(16), UUID(int=5).bytes, UUID(int=2**127).bytes),
    ("boolean", pa.bool_(), False, True),
]


@pytest.mark.parametrize(("kind", "arrow", "low", "high"), BOUNDS, ids=[kind for kind, *_ in BOUNDS])
def test_bounds_of_files_compare_with_the_keys_of_rows_for_every_type(
    kind: str, arrow: pa.DataType, low: Any, high: Any
) -> None:
    from pydantic import TypeAdapter
    from pyiceberg.conversions import from_bytes, to_bytes
    from pyiceberg.types import IcebergType

    iceberg: Any = TypeAdapter(IcebergType).validate_python(kind)
    rows = pa.record_batch({"k": pa.array([low, high], arrow)})
    for at, value in enumerate((low, high)):
        bound = from_bytes(iceberg, to_bytes(iceberg, value))
        assert code_of(bound, kind) == key_of(rows, at, [SortKey("k")])[0]


def test_a_file_with_uuids_whose_bounds_were_ordered_as_signed_numbers_is_read(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    key: Json = {"id": 1, "name": "id", "type": "uuid", "required": False}
    head = lake.create(schema={"type": "struct", "fields": [key]})
    # As Java merges the bounds of two row groups, of which the second has the greater half of all UUIDs.
    low, high = UUID(int=2**127).bytes, UUID(int=2**127 - 1).bytes
    stats = {
        name: {"1": b64encode(b).decode()} for name, b in (("lower_bounds", low), ("upper_bounds", high))
    }
    lake.publish("aa", StagedFile(f"file://{tmp_path}/a.parquet", 1, 1, "", Fingerprint(1), (), stats))
    plan = lake.plan(head, terms=ImportTerms(unique=("id",)))
    (file,) = published(lake.table(), plan).files
    for inside in (UUID(int=5).bytes, UUID(int=2**128 - 5).bytes):
        assert file.meets(code_of(inside, "uuid"), code_of(inside, "uuid"))


def test_companions_of_runs_hold_the_key_and_the_numbers_of_rows_alone(tmp_path: Path) -> None:
    lab = RunsLab(tmp_path, unique=("s",))
    lab.map([[], [batch_of([(3, "b", 0), (1, "a", 1), (2, "b", 2)])]])
    (keys,) = [file for file in lab.files["map"] if file.kind == KEYS]
    rows = pa.ipc.open_file(keys.path).read_all().to_pylist()
    assert rows == [
        {"s": "a", "_lockstep_task": 1, "_lockstep_record": 1},
        {"s": "b", "_lockstep_task": 1, "_lockstep_record": 0},
        {"s": "b", "_lockstep_task": 1, "_lockstep_record": 2},
    ]


def test_the_terms_that_are_tested_are_those_that_people_can_ask_for() -> None:
    assert ImportTerms().on_duplicate in POLICIES
