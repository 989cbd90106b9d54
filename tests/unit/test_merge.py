"""Runs become one sequence of rows in order, whatever the buffers, passes, ranges and crashes were."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import merge, passes
from lockstep.errors import Corrupt, Invalid
from lockstep.job import RUN, SortKey
from lockstep.merge import MergeReader
from lockstep.passes import newest_runs, next_stage, plan_merge
from tests.runs_lab import (
    ARROW,
    Crashes,
    Row,
    RunsLab,
    batch_of,
    fingerprint_of,
    in_order,
    rows_of,
    small,
)

pytestmark = pytest.mark.long

ORDERS = [
    (SortKey("k"),),
    (SortKey("k", descending=True, nulls_first=False),),
    (SortKey("s"), SortKey("k", descending=True)),
    (SortKey("k", nulls_first=False), SortKey("s", descending=True)),
    (),
]


def random_rows(random: Random, count: int, shape: str) -> list[Row]:
    rows: list[Row] = []
    for at in range(count):
        key = at if shape == "sorted" else random.choice([None, random.randint(0, 50)])
        if shape == "heavy" and random.random() < 0.6:
            key = 7
        text = random.choice([None, "", "b", "a" * random.randint(0, 300)])
        rows.append((key, text, at))
    return rows


def cut_up(random: Random, rows: list[Row], tasks: int) -> list[list[pa.RecordBatch]]:
    """Rows as batches of random sizes, in tasks; the order stays."""
    edges = [0, *sorted(random.randint(0, len(rows)) for _ in range(tasks - 1)), len(rows)]
    found = []
    for first, last in itertools.pairwise(edges):
        batches = []
        while first < last:
            size = random.randint(0, 60)
            batches.append(batch_of(rows[first : min(last, first + size)]))
            first = min(last, first + size)
        found.append(batches)
    return found


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.sampled_from([0, 1, 30, 200, 500]),
    shape=st.sampled_from(["random", "heavy", "sorted"]),
    order=st.sampled_from(ORDERS),
    tasks=st.integers(1, 4),
    memory=st.sampled_from([600, 3000, 30_000]),
    block=st.sampled_from([100, 1000, 10_000]),
    fan_in=st.sampled_from([2, 3, 8, 64]),
    ranges=st.sampled_from([200, 5000]),
    huge=st.sampled_from([150, 10**9]),
    crashing=st.booleans(),
)
def test_rows_come_out_sorted_and_once_whatever_the_buffers_passes_ranges_and_crashes_were(
    seed: int,
    count: int,
    shape: str,
    order: tuple[SortKey, ...],
    tasks: int,
    memory: int,
    block: int,
    fan_in: int,
    ranges: int,
    huge: int,
    crashing: bool,
) -> None:
    random = Random(seed)
    rows = random_rows(random, count, shape)
    crashes = Crashes(seed if crashing else None)
    with tempfile.TemporaryDirectory() as folder, small(block, fan_in, ranges, 3 * block, huge):
        lab = RunsLab(Path(folder), order, memory=memory, file_size=random.choice([500, 5000]))
        lab.map(cut_up(random, rows, tasks), crashes)
        assert lab.rows(crashes) == in_order(rows, order)
        assert lab.fingerprint() == fingerprint_of(rows) or not rows


def test_reading_from_any_position_gives_exactly_the_rest(tmp_path: Path) -> None:
    random = Random(5)
    rows = random_rows(random, 600, "heavy")
    with small(block=300, least_range=8000):
        lab = RunsLab(tmp_path, memory=2400)
        lab.map(cut_up(random, rows, 3))
        reader = MergeReader(lab.plan, lab.storage)
        merge = next_stage("map", newest_runs(lab.files), lab.plan)
        places = 0
        for task in merge.tasks:
            chunks = list(reader.read(task.descriptor, None, 200))
            after = [row for chunk in chunks for row in rows_of(chunk.batch)]
            assert chunks[-1].position is not None
            for chunk in chunks:
                after = after[chunk.batch.num_rows :]
                if chunk.position is None:
                    continue
                places += 1
                position = json.loads(json.dumps(chunk.position))
                rest = reader.read(task.descriptor, position, 10_000)
                assert [row for one in rest for row in rows_of(one.batch)] == after
        assert places > 20, "too few positions to prove anything"


def test_rows_and_their_order_are_the_same_for_any_buffers_and_number_of_tasks(tmp_path: Path) -> None:
    rows = random_rows(Random(7), 400, "heavy")
    outcomes = []
    for number, (memory, tasks, block) in enumerate([(600, 1, 100), (3000, 4, 500), (10**6, 2, 10**5)]):
        with small(block=block, least_range=1000):
            lab = RunsLab(tmp_path / str(number), memory=memory)
            lab.map(cut_up(Random(number), rows, tasks))
            outcomes.append((lab.rows(), lab.fingerprint()))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_several_passes_give_what_one_merge_gives(tmp_path: Path) -> None:
    rows = random_rows(Random(8), 500, "random")
    batches = cut_up(Random(9), rows, 3)
    outcomes, stages = [], []
    for fan_in in (64, 8, 2):
        with small(block=200, fan_in=fan_in, least_range=4000):
            lab = RunsLab(tmp_path / str(fan_in), memory=1600)
            lab.map(batches)
            outcomes.append(lab.rows())
            stages.append([name for name, _ in lab.stages])
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert stages[-1] == ["combine", "recombine", "merge"]


@pytest.mark.parametrize(("runs", "groups"), [(4, []), (5, [4, 1]), (9, [4, 4, 1])])
def test_no_task_has_more_runs_open_than_the_fan_in(tmp_path: Path, runs: int, groups: list[int]) -> None:
    with small(fan_in=4):
        lab = RunsLab(tmp_path)
        lab.map([[batch_of([(at, "x", at)])] for at in range(runs)])
        following = next_stage("map", newest_runs(lab.files), lab.plan)
    opened = [len(task.descriptor["runs"]) for task in following.tasks]
    assert (following.stage, opened) == (("combine", groups) if groups else ("merge", [runs]))


def test_a_key_that_is_half_of_the_rows_is_cut_by_runs_into_several_ranges(tmp_path: Path) -> None:
    rows = [(7 if at % 2 else at, "text" * 10, at) for at in range(2000)]
    with small(block=500, least_range=5000):
        lab = RunsLab(tmp_path, memory=20_000, file_size=5000)
        lab.map([[batch_of(rows[at : at + 100]) for at in range(0, 2000, 100)]])
        tasks = plan_merge(lab.files["map"], lab.plan)
        reader = MergeReader(lab.plan, lab.storage)
        with_heavy, got = 0, []
        for task in tasks:
            found = [
                row for chunk in reader.read(task.descriptor, None, 10**6) for row in rows_of(chunk.batch)
            ]
            heavy = sum(row[0] == 7 for row in found)
            with_heavy += heavy > 0
            assert heavy < 600
            got += found
    assert with_heavy > 2
    assert got == in_order(rows, [SortKey("k")])


def test_already_sorted_input_is_handed_through_one_run_at_a_time(tmp_path: Path) -> None:
    rows = [(at, "x" * 20, at) for at in range(3000)]
    with small(block=1000, least_range=10**9):
        lab = RunsLab(tmp_path, memory=30_000, file_size=10**9)
        lab.map([[batch_of(rows[at : at + 100]) for at in range(0, 3000, 100)]])
        (task,) = plan_merge(lab.files["map"], lab.plan)
        assert len(task.descriptor["runs"]) > 5
        roomy = RunsLab(tmp_path, memory=240_000)
        windows = list(MergeReader(roomy.plan, lab.storage).windows(task.descriptor, None))
    assert [row for w in windows for b in w.batches for row in rows_of(b)] == rows
    # Memory goes to the run whose rows are next. Spread over all runs it would make far more windows.
    assert len(windows) < 20


def test_ranges_hold_about_the_same_and_look_only_at_blocks_that_can_hold_their_rows(tmp_path: Path) -> None:
    rows = random_rows(Random(3), 4000, "sorted")
    Random(4).shuffle(rows)
    with small(block=500, least_range=20_000):
        lab = RunsLab(tmp_path, memory=300_000, file_size=20_000)
        lab.map([[batch_of(rows[at : at + 200]) for at in range(0, 4000, 200)]])
        tasks = plan_merge(lab.files["map"], lab.plan)
        reader = MergeReader(lab.plan, lab.storage)
        found = [sum(c.batch.num_rows for c in reader.read(t.descriptor, None, 10**6)) for t in tasks]
        blocks = sum(file.stats["blocks"] for file in lab.files["map"])
        looked_at = sum(
            p["last"] - p["first"] for t in tasks for chain in t.descriptor["runs"] for p in chain
        )
    assert len(tasks) >= 8
    assert sum(found) == 4000
    assert max(found) < 2 * 4000 / len(tasks)
    # Each range may look at a sampled stretch of blocks too many at both ends of every run.
    step = max(file.stats["sampled"] for file in lab.files["map"])
    assert looked_at < blocks + 2 * (step + 1) * len(tasks) * len(lab.files["map"])
    assert sum(task.rows for task in tasks) == pytest.approx(4000, abs=len(tasks))


def test_an_import_without_rows_needs_no_tasks(tmp_path: Path) -> None:
    lab = RunsLab(tmp_path)
    lab.map([[], [batch_of([])]])
    assert lab.rows() == []
    assert lab.stages == [("merge", 0)]


def test_a_run_that_changed_or_is_gone_is_corrupt_and_named(tmp_path: Path) -> None:
    lab = RunsLab(tmp_path)
    lab.map([[batch_of([(at, "x", at) for at in range(50)])]])
    (task,) = plan_merge(lab.files["map"], lab.plan)
    path = Path(lab.files["map"][0].path)
    reader = MergeReader(lab.plan, lab.storage)
    whole = path.read_bytes()
    path.write_bytes(whole + b"x")
    with pytest.raises(Corrupt, match=path.name):
        list(reader.read(task.descriptor, None, 1000))
    other = RunsLab(tmp_path / "other")
    other.map([[batch_of([(at, "y", at) for at in range(9)])]])
    path.write_bytes(Path(other.files["map"][0].path).read_bytes())
    with pytest.raises(Corrupt, match=f"{path.name} was listed with {len(whole)} bytes"):
        list(reader.read(task.descriptor, None, 1000))
    path.write_bytes(b"x" * len(whole))
    with pytest.raises(Corrupt, match=path.name):
        list(reader.read(task.descriptor, None, 1000))
    path.unlink()
    with pytest.raises(Corrupt, match=path.name):
        list(reader.read(task.descriptor, None, 1000))
    losers = tmp_path / "gone.losers.arrow"
    with pytest.raises(Corrupt, match=losers.name):
        list(reader.read({**task.descriptor, "losers": [str(losers)]}, None, 1000))


def test_long_keys_with_a_common_beginning_are_still_merged_in_order(tmp_path: Path) -> None:
    random = Random(2)
    rows = [(None, "p" * 250 + f"{random.randint(0, 10**6)}", at) for at in range(800)]
    rows += [(None, f"{at:03}" + "q" * 400, at) for at in range(200)]
    random.shuffle(rows)
    order = (SortKey("s"),)
    with small(block=2000, least_range=10_000):
        lab = RunsLab(tmp_path, order, memory=40_000, file_size=10_000)
        lab.map(cut_up(random, rows, 2))
        assert lab.rows() == in_order(rows, order)
        longest = max(len(json.dumps(file.stats)) for file in lab.files["map"])
    assert longest < 20_000
    assert {file.kind for file in lab.files["map"]} == {RUN}


@pytest.mark.parametrize("fan_in", [2, 64])
def test_runs_that_differ_in_the_width_of_offsets_are_merged(tmp_path: Path, fan_in: int) -> None:
    rows = [(at % 10, f"t{at}", at) for at in range(100)]
    tasks = []
    for at in range(0, 100, 20):
        batch = batch_of(rows[at : at + 20])
        wide = ARROW.set(1, pa.field("s", pa.large_string()))
        tasks.append([batch.cast(wide) if at % 40 else batch])
    with small(fan_in=fan_in):
        lab = RunsLab(tmp_path, memory=30_000)
        lab.map(tasks)
        assert lab.rows() == in_order(rows, [SortKey("k")])


@pytest.mark.parametrize("descending", [False, True])
def test_many_runs_of_huge_rows_are_merged_within_the_memory_of_few_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, descending: bool
) -> None:
    """A thousandth of 60 runs with rows of 50 MB, in tasks of 400 MB."""
    order = (SortKey("k", descending=descending), SortKey("v"))
    rows = [(at % 40, chr(97 + at % 26) * 50_000, at) for at in range(600)]
    with small(block=1000, least_range=10**9, huge=4000):
        lab = RunsLab(tmp_path, order, memory=400_000, file_size=10**9)
        lab.map([[batch_of(rows[at : at + 10])] for at in range(0, 600, 10)])
        following = next_stage("map", newest_runs(lab.files), lab.plan)
        assert following.stage == "merge"
        (task,) = following.tasks
        assert len(task.descriptor["runs"]) >= 60
        before, peak_bytes = pa.total_allocated_bytes(), 0

        def read(self: merge._Stream, file: int, block: int) -> pa.RecordBatch:
            nonlocal peak_bytes
            found = really_read(self, file, block)
            peak_bytes = max(peak_bytes, pa.total_allocated_bytes() - before)
            return found

        really_read = merge._Stream._read
        monkeypatch.setattr(merge._Stream, "_read", read)
        digests = []
        for chunk in MergeReader(lab.plan, lab.storage).read(task.descriptor, None, 25_000):
            digests += [(k, s[0], v) for k, s, v in rows_of(chunk.batch)]
    assert digests == [(k, s[0], v) for k, s, v in in_order(rows, order)]
    assert 50_000 < peak_bytes < 400_000, peak_bytes


def test_keys_that_are_too_large_to_be_merged_are_refused_with_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "ALWAYS_HELD_BYTES", 64_000)
    order = (SortKey("s"),)
    rows = [(at, chr(97 + at % 26) * 50_000, at) for at in range(60)]
    with small(block=1000, least_range=10**9, huge=4000):
        lab = RunsLab(tmp_path, order, memory=400_000)
        lab.map([[batch_of([row])] for row in rows])
        with pytest.raises(Invalid, match=r"15 runs with keys of up to 1MB .* cannot be merged") as refused:
            lab.rows()
        assert [stage for stage, _ in lab.stages] == ["combine", "recombine"]
        assert "limits.task_memory" in str(refused.value.hint)
        roomy = RunsLab(tmp_path / "roomy", order, memory=3_000_000)
        roomy.map([[batch_of([row])] for row in rows])
        assert roomy.rows() == in_order(rows, order)


def test_the_columns_of_the_table_come_out_and_no_other(tmp_path: Path) -> None:
    lab = RunsLab(tmp_path, (SortKey("s", "bucket[4]"), SortKey("k")), unique=("v",))
    rows = [(at % 5, str(at), at) for at in range(100)]
    lab.map([[batch_of(rows)]])
    (task,) = plan_merge(lab.files["map"], lab.plan)
    for chunk in MergeReader(lab.plan, lab.storage).read(task.descriptor, None, 1000):
        assert chunk.batch.schema.names == ARROW.names
    assert sorted(lab.rows()) == sorted(rows)
