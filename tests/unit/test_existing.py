"""`--on-existing`: what an earlier job of the same rows means for a new request."""

from __future__ import annotations

import pytest

from lockstep.errors import Conflict
from lockstep.existing import Selection, decide
from lockstep.job import Holding, Job, Kind, Piece, Plan, State
from lockstep.source import PartitionInfo

SCOPE = "source|target|202401"
ONE, TWO, THREE = Piece("202401_1_1_0", 1, 1), Piece("202401_2_2_0", 2, 2), Piece("202401_3_3_0", 3, 3)
MERGED = Piece("202401_1_2_1", 1, 2)


def selection(*pieces: Piece, whole: bool = True) -> Selection:
    return Selection(PartitionInfo("202401", "202401", 0, 0, ()), whole, pieces)


def holder(job_id: str, state: State, *pieces: Piece, whole: bool = True) -> Job:
    plan = Plan(Kind.EXPORT, "s", "t", "u", "l", {}, {}, {}, (), {}, partition="202401")
    return Job(
        job_id,
        "r",
        Kind.EXPORT,
        state,
        0,
        plan,
        Holding(SCOPE, whole, pieces),
        "write",
        1,
        1,
        0,
        0,
        0,
        0,
        0,
        0.0,
        0.0,
    )


@pytest.mark.parametrize("mode", ["error", "skip", "append", "replace"])
def test_a_partition_that_nobody_holds_is_exported_in_every_mode(mode: str) -> None:
    wanted = selection(ONE, TWO)
    decision = decide(wanted, SCOPE, [], mode)
    assert decision.selection == wanted
    assert not decision.beside
    assert not decision.replaces


@pytest.mark.parametrize(
    "state", [State.PENDING, State.RUNNING, State.PAUSED, State.COMMITTING, State.COMPLETED]
)
def test_error_refuses_a_held_partition_and_names_the_job(state: State) -> None:
    with pytest.raises(Conflict, match="job-a") as caught:
        decide(selection(ONE), SCOPE, [holder("job-a", state, ONE)], "error")
    assert caught.value.job_id == "job-a"


def test_error_refuses_a_partition_that_contains_an_exported_part() -> None:
    with pytest.raises(Conflict, match="job-a"):
        decide(selection(ONE, TWO), SCOPE, [holder("job-a", State.COMPLETED, TWO, whole=False)], "error")


def test_error_refuses_a_part_of_an_exported_partition_even_after_a_merge_renamed_it() -> None:
    earlier = holder("job-a", State.COMPLETED, MERGED)
    with pytest.raises(Conflict, match="job-a"):
        decide(selection(ONE, whole=False), SCOPE, [earlier], "error")


def test_a_part_that_came_after_the_exported_partition_is_no_conflict() -> None:
    wanted = selection(THREE, whole=False)
    assert decide(wanted, SCOPE, [holder("job-a", State.COMPLETED, MERGED)], "error").selection == wanted


def test_skip_leaves_an_exported_partition_out_and_says_which_job_has_it() -> None:
    decision = decide(selection(ONE), SCOPE, [holder("job-a", State.COMPLETED, ONE)], "skip")
    assert decision.selection is None
    assert decision.skipped is not None
    assert decision.skipped.job_id == "job-a"


def test_skip_exports_only_the_parts_that_are_not_there_yet() -> None:
    decision = decide(
        selection(ONE, TWO), SCOPE, [holder("job-a", State.COMPLETED, ONE, whole=False)], "skip"
    )
    assert decision.selection is not None
    assert decision.selection.pieces == (TWO,)
    assert not decision.selection.whole


def test_skip_leaves_out_a_merged_part_whose_blocks_were_all_exported() -> None:
    earlier = [
        holder("job-a", State.COMPLETED, ONE, whole=False),
        holder("job-b", State.COMPLETED, TWO, whole=False),
    ]
    decision = decide(selection(MERGED, THREE), SCOPE, earlier, "skip")
    assert decision.selection is not None
    assert decision.selection.pieces == (THREE,)


def test_skip_refuses_a_merged_part_of_which_only_some_rows_were_exported() -> None:
    with pytest.raises(Conflict, match="merged"):
        decide(selection(MERGED), SCOPE, [holder("job-a", State.COMPLETED, ONE, whole=False)], "skip")


@pytest.mark.parametrize("state", [State.PENDING, State.RUNNING, State.PAUSED, State.COMMITTING])
def test_append_is_refused_while_the_earlier_job_is_live(state: State) -> None:
    with pytest.raises(Conflict, match="job-a"):
        decide(selection(ONE), SCOPE, [holder("job-a", state, ONE)], "append")


def test_append_stands_beside_a_completed_job() -> None:
    decision = decide(selection(ONE), SCOPE, [holder("job-a", State.COMPLETED, ONE)], "append")
    assert decision.beside == {"job-a"}
    assert decision.replaces == ()


def test_replace_takes_every_job_of_the_partition_also_of_parts_that_are_gone() -> None:
    earlier = [
        holder("job-a", State.RUNNING, ONE),
        holder("job-b", State.COMPLETED, THREE, whole=False),
    ]
    decision = decide(selection(TWO), SCOPE, earlier, "replace")
    assert set(decision.replaces) == {"job-a", "job-b"}


def test_replace_of_a_part_inside_an_exported_partition_is_refused() -> None:
    with pytest.raises(Conflict, match="job-a") as caught:
        decide(selection(ONE, whole=False), SCOPE, [holder("job-a", State.COMPLETED, ONE, TWO)], "replace")
    assert "--partition" in str(caught.value.hint)


def test_replace_of_a_part_is_refused_when_its_job_wrote_other_parts_too() -> None:
    """The earlier commit is removed as a whole: the rows of the other part would vanish."""
    earlier = holder("job-a", State.COMPLETED, TWO, THREE, whole=False)
    with pytest.raises(Conflict, match="job-a") as caught:
        decide(selection(TWO, whole=False), SCOPE, [earlier], "replace")
    assert "--partition" in str(caught.value.hint)


def test_replace_of_a_part_takes_a_job_that_wrote_just_this_part() -> None:
    earlier = holder("job-a", State.COMPLETED, ONE, whole=False)
    assert decide(selection(ONE, whole=False), SCOPE, [earlier], "replace").replaces == ("job-a",)


def test_skip_of_a_merged_part_with_rows_that_an_exported_partition_did_not_have_is_refused() -> None:
    merged = Piece("202401_1_3_2", 1, 3)
    with pytest.raises(Conflict, match="merged"):
        decide(selection(merged, whole=False), SCOPE, [holder("job-a", State.COMPLETED, ONE, TWO)], "skip")
