"""Plans, fingerprints, holdings and ids: what they promise by themselves."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import ErrorInfo, Incompatible
from lockstep.job import (
    PLAN_FORMAT,
    ColumnMap,
    Fingerprint,
    Holding,
    Limits,
    Piece,
    Plan,
    StagedFile,
    commit_id,
    snapshot_id_of,
    split_evenly,
)
from tests.store_lab import new_plan

fingerprints = st.builds(
    Fingerprint,
    st.integers(0, 2**62),
    st.dictionaries(st.text(max_size=3), st.integers(0, 2**64 - 1), max_size=4),
)


def through_json(value: object) -> dict:
    return json.loads(json.dumps(value))


def test_a_plan_comes_back_from_json_as_it_was() -> None:
    columns = (
        ColumnMap("a", 1, "long", True, "A", "UInt32"),
        ColumnMap("b", 2, {"type": "list", "element-id": 3}, False, None, None, lossy=True),
    )
    plan = new_plan(
        columns=columns,
        partition_values=(1, None, "x/../y"),
        replaces=("c1",),
        rows=2**60,
        limits=Limits(task_attempts=3),
        properties={"🦆": '";--'},
    )
    assert Plan.from_json(through_json(plan.to_json())) == plan


def test_an_older_plan_without_optional_fields_is_read() -> None:
    raw = through_json(new_plan().to_json())
    for name in ("rows", "file_size_bytes", "replaces", "limits", "properties", "stages", "format_version"):
        del raw[name]
    plan = Plan.from_json(raw)
    assert plan.stages == ("write",)
    assert plan.limits == Limits()


def test_fields_that_a_plan_of_this_format_does_not_know_are_passed_over() -> None:
    raw = through_json(new_plan().to_json()) | {"colour": "green"}
    raw["limits"]["patience_s"] = 1
    assert Plan.from_json(raw) == new_plan()


def test_a_plan_of_a_newer_format_is_refused() -> None:
    raw = through_json(new_plan().to_json()) | {"format_version": PLAN_FORMAT + 1}
    with pytest.raises(Incompatible, match="has format"):
        Plan.from_json(raw)


@given(fingerprints, fingerprints, fingerprints)
def test_fingerprints_add_up_in_any_order(a: Fingerprint, b: Fingerprint, c: Fingerprint) -> None:
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + Fingerprint() == a


@given(fingerprints)
def test_a_fingerprint_comes_back_from_json_as_it_was(a: Fingerprint) -> None:
    assert Fingerprint.from_json(through_json(a.to_json())) == a


def test_a_staged_file_comes_back_from_json_as_it_was() -> None:
    file = StagedFile("/a b/ü.parquet", 2**40, 2**33, "c", Fingerprint(3, {"x": 5}), (None, "p"), {"n": [1]})
    assert StagedFile.from_json(through_json(file.to_json())) == file


def test_an_error_comes_back_from_json_as_it_was() -> None:
    error = ErrorInfo("Corrupt", "part is damaged", "restore it", 3)
    assert ErrorInfo.from_json(through_json(error.to_json())) == error
    assert error.permanent
    assert not ErrorInfo("OSError", "gone").permanent


def test_each_generation_has_a_commit_id_and_a_snapshot_id_of_its_own() -> None:
    ids = [commit_id(job, generation) for job in ("a", "b") for generation in (1, 2, 3)]
    assert len({*ids}) == len(ids)
    assert commit_id("a", 1) == ids[0]
    snapshots = [snapshot_id_of(commit) for commit in ids]
    assert len({*snapshots}) == len(snapshots)
    assert all(0 < snapshot < 2**63 for snapshot in snapshots)


def test_two_whole_partitions_of_one_scope_overlap_even_when_their_parts_differ() -> None:
    first = Holding("s", True, (Piece("all_1_1_0", 1, 1),))
    second = Holding("s", True, (Piece("all_2_2_0", 2, 2),))
    assert first.overlap(second) is not None
    assert first.overlap(Holding("other", True, first.pieces)) is None


def test_a_merged_part_overlaps_the_parts_it_came_from() -> None:
    part = Holding("s", False, (Piece("all_2_2_0", 2, 2),))
    merged = Holding("s", True, (Piece("all_1_3_1", 1, 3),))
    later = Holding("s", True, (Piece("all_4_4_0", 4, 4),))
    assert part.overlap(merged) == part.pieces[0]
    assert merged.overlap(part) == merged.pieces[0]
    assert part.overlap(later) is None


def test_parts_without_block_numbers_overlap_by_name() -> None:
    one = Holding("s", False, (Piece("a.parquet"),))
    assert one.overlap(Holding("s", False, (Piece("a.parquet"),))) is not None
    assert one.overlap(Holding("s", False, (Piece("b.parquet"),))) is None


@given(st.integers(0, 10_000), st.integers(1, 500))
def test_splitting_covers_every_row_once_in_near_equal_pieces(total: int, most: int) -> None:
    ranges = [*split_evenly(total, most)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == total
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    sizes = [end - start for start, end in ranges]
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
