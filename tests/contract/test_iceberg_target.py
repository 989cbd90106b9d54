"""What the Iceberg target promises to the commit, on PyIceberg's SQL catalog and on a folder alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import fastavro
import pytest
from pyiceberg.manifest import ManifestEntry
from pyiceberg.table.metadata import TableMetadataV3
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    RemovePropertiesUpdate,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
    update_table_metadata,
)
from pyiceberg.types import LongType, StringType

from lockstep.errors import CommitUnknown, Corrupt, Invalid, Retryable
from lockstep.job import Json, StagedFile, commit_id, snapshot_id_of
from lockstep.target import Outcome, TargetTable, open_target
from lockstep.target.iceberg import IcebergTarget
from lockstep.target.snapshot import (
    LEDGER_LIMIT,
    LEDGER_PREFIX,
    LedgerEntry,
    Prepared,
    SnapshotBuilder,
    partition_key,
    partition_reader,
)
from tests.iceberg_tables import BY_REGION, SCHEMA, UNPARTITIONED, UNSORTED, Lake, by_identity

OURS = commit_id("ours", 1)


@pytest.fixture(params=["sql", "filesystem"])
def lake(tmp_path: Path, request: pytest.FixtureRequest) -> Lake:
    return Lake(tmp_path, kind=request.param)


@pytest.fixture
def failpoints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def arm(text: str) -> None:
        state = tmp_path / "failpoints"
        state.mkdir(exist_ok=True)
        monkeypatch.setenv("LOCKSTEP_FAILPOINTS", text)
        monkeypatch.setenv("LOCKSTEP_FAILPOINTS_STATE", str(state))

    return arm


def prepare(lake: Lake, head: TargetTable, *files: StagedFile, commit: str = OURS) -> Prepared:
    values = files[0].partition if files else ()
    return lake.target.prepare(head, lake.plan(head, values), commit, "ours", files)


def expire(lake: Lake, snapshot_id: int) -> None:
    lake.table().maintenance.expire_snapshots().by_id(snapshot_id).commit()


def outcome(lake: Lake, commit: str = OURS) -> tuple[Outcome, int | None]:
    """What a process that has just started reads from the register."""
    target = lake.open()
    return target.outcome(target.load(), commit)


def live_entries(lake: Lake) -> list[ManifestEntry]:
    io = lake.table().io
    snapshot = lake.table().current_snapshot()
    assert snapshot is not None
    return [entry for manifest in snapshot.manifests(io) for entry in manifest.fetch_manifest_entry(io)]


# Publishing


def test_a_publish_is_one_snapshot_with_all_rows_and_its_register_entry(lake, read_with_duckdb) -> None:
    lake.create()
    before = lake.publish("before", lake.stage([1]))
    assert outcome(lake) == (Outcome.OPEN, None)
    head = lake.target.load()
    files = [lake.stage([2, 3]), lake.stage([4])]
    published = lake.commit(head, lake.plan(head), OURS, "ours", files)

    table = lake.table()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert snapshot.snapshot_id == published == snapshot_id_of(OURS)
    assert snapshot.parent_snapshot_id == snapshot_id_of(before)
    assert len(table.metadata.snapshots) == 2
    assert outcome(lake) == (Outcome.COMMITTED, published)
    assert lake.ids() == [1, 2, 3, 4]
    assert sorted(read_with_duckdb(table.metadata_location)["id"].to_pylist()) == [1, 2, 3, 4]
    assert snapshot.summary is not None
    labels = snapshot.summary.additional_properties
    assert labels["lockstep.commit-id"] == OURS
    assert labels["lockstep.job-id"] == "ours"
    assert labels["lockstep.partition"] == "202401"


def test_counters_and_statistics_are_those_that_pyiceberg_writes_for_the_same_files(lake) -> None:
    lake.create(BY_REGION)
    files = [lake.stage([n, n + 1], ["eu"], region=["eu", "eu"], amount=[float(n), None]) for n in range(3)]
    lake.publish("ours", *files)
    ours = lake.table().current_snapshot()
    mine = sorted(lake.table().inspect.files().to_pylist(), key=lambda row: row["file_path"])

    lake.catalog.drop_table("db.events")
    lake.create(BY_REGION)
    lake.table().add_files([file.path for file in files])
    theirs = lake.table().current_snapshot()
    reference = sorted(lake.table().inspect.files().to_pylist(), key=lambda row: row["file_path"])

    assert ours is not None
    assert theirs is not None
    assert ours.summary is not None
    assert theirs.summary is not None
    counters = {k: v for k, v in ours.summary.additional_properties.items() if not k.startswith("lockstep.")}
    assert counters == theirs.summary.additional_properties
    for row in (*mine, *reference):
        row.pop("sort_order_id")
    assert mine == reference


@pytest.mark.parametrize("version", [1, 2])
def test_the_catalog_refuses_to_publish_a_commit_id_twice(lake, version: int) -> None:
    lake.create(version=version)
    lake.publish("before", lake.stage([1]))
    head = lake.target.load()
    first, second = (prepare(lake, head, lake.stage([2])) for _ in range(2))
    lake.target.send(head, first)
    with pytest.raises(CommitUnknown, match="did not confirm"):
        lake.target.send(head, second)
    assert lake.ids() == [1, 2]
    with pytest.raises(CommitUnknown, match="already committed"):
        lake.commit(lake.target.load(), lake.plan(head), OURS, "ours", [lake.stage([3])])


def test_an_expired_commit_is_not_published_again(lake) -> None:
    lake.create()
    commit = lake.publish("ours", lake.stage([1]))
    lake.publish("later", lake.stage([2]))
    expire(lake, snapshot_id_of(commit))
    head = lake.open().load()
    assert lake.target.outcome(head, commit) == (Outcome.COMMITTED, snapshot_id_of(commit))
    with pytest.raises(CommitUnknown):
        lake.commit(head, lake.plan(head), commit, "ours", [lake.stage([1])])
    with pytest.raises(CommitUnknown):
        lake.target.fence(head, commit)
    assert lake.ids() == [1, 2]
    assert outcome(lake, commit)[0] is Outcome.COMMITTED


def test_a_commit_that_was_rolled_back_stays_committed(lake) -> None:
    lake.create()
    lake.publish("before", lake.stage([1]))
    commit = lake.publish("ours", lake.stage([2]))
    table = lake.table()
    parent = table.metadata.snapshots[0].snapshot_id
    raw = {"ref-name": MAIN_BRANCH, "type": "branch", "snapshot-id": parent}
    lake.catalog.commit_table(table, (), (SetSnapshotRefUpdate.model_validate(raw),))
    assert lake.ids() == [1]
    assert outcome(lake, commit) == (Outcome.COMMITTED, snapshot_id_of(commit))


def test_ten_commits_of_another_writer_in_a_row_leave_both_writers_rows(lake) -> None:
    lake.create()
    rows = lake.table().schema().as_arrow()
    for n in range(10):
        head = lake.target.load()
        prepared = prepare(lake, head, lake.stage([100]))
        lake.table().append(rows.empty_table().from_pylist([{"id": n}], schema=rows))
        with pytest.raises(CommitUnknown):
            lake.target.send(head, prepared)
        assert outcome(lake) == (Outcome.OPEN, None)
    head = lake.target.load()
    lake.commit(head, lake.plan(head), OURS, "ours", [lake.stage([100])])
    assert lake.ids() == [*range(10), 100]
    assert len(lake.snapshot_ids()) == 11


def test_an_empty_partition_is_published_as_an_empty_snapshot(lake) -> None:
    lake.create(BY_REGION)
    commit = lake.publish("ours")
    assert outcome(lake, commit) == (Outcome.COMMITTED, snapshot_id_of(commit))
    lake.publish("next", lake.stage([1], ["eu"], region=["eu"]))
    assert lake.ids() == [1]


def test_history_stays_in_the_order_of_time_when_our_clock_is_behind(lake) -> None:
    lake.create()
    lake.publish("first", lake.stage([1]))
    lake.clock.time = 5.0
    lake.publish("second", lake.stage([2]))
    times = [snapshot.timestamp_ms for snapshot in lake.table().metadata.snapshots]
    assert times == sorted(times)
    assert lake.table().metadata.last_updated_ms >= times[-1]


def test_the_branch_keeps_its_own_retention(lake) -> None:
    lake.create()
    lake.publish("first", lake.stage([1]))
    table = lake.table()
    raw = {
        "ref-name": MAIN_BRANCH,
        "type": "branch",
        "snapshot-id": table.metadata.current_snapshot_id,
        "min-snapshots-to-keep": 7,
        "max-snapshot-age-ms": 5000,
    }
    lake.catalog.commit_table(table, (), (SetSnapshotRefUpdate.model_validate(raw),))
    lake.publish("second", lake.stage([2]))
    branch = lake.table().metadata.refs[MAIN_BRANCH]
    assert (branch.min_snapshots_to_keep, branch.max_snapshot_age_ms) == (7, 5000)


def test_many_files_are_spread_over_manifests_and_none_is_lost(lake, monkeypatch) -> None:
    monkeypatch.setattr("lockstep.target.snapshot.MANIFEST_BYTES", 20_000)
    lake.create()
    real = lake.stage([1])
    files = [StagedFile(f"{real.path}-{n}", 1, 1, "", real.fingerprint, (), real.stats) for n in range(1500)]
    lake.publish("ours", *files)
    snapshot = lake.table().current_snapshot()
    assert snapshot is not None
    assert len(snapshot.manifests(lake.table().io)) > 2
    found = [entry.data_file.file_path for entry in live_entries(lake)]
    assert found == [file.path for file in files]


@pytest.mark.servers
def test_two_processes_at_the_same_instant_publish_every_commit_once(lake) -> None:
    lake.create()
    module = "tests.contract.publish_in_a_loop"
    jobs = {
        name: [lake.stage([n, n + 1]) for n in range(start, start + 8, 2)]
        for name, start in (("left", 0), ("right", 100))
    }
    processes = []
    for name, files in jobs.items():
        work = lake.folder / f"{name}.json"
        work.write_text(json.dumps([file.to_json() for file in files]))
        arguments = [sys.executable, "-m", module, str(lake.folder), lake.kind, name, str(work)]
        processes.append(subprocess.Popen(arguments, cwd=Path(__file__).parents[2]))
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert lake.ids() == [*range(8), *range(100, 108)]
    assert len(lake.snapshot_ids()) == 8
    parents = {s.snapshot_id: s.parent_snapshot_id for s in lake.table().metadata.snapshots}
    assert list(parents.values()) == [None, *list(parents)[:-1]]


# The fence


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("rows_before", [[], [1]], ids=["empty table", "table with rows"])
@pytest.mark.parametrize("forgotten", [False, True], ids=["fence there", "fence expired"])
def test_a_commit_prepared_before_the_fence_is_refused_for_ever(
    lake, version: int, rows_before: list[int], forgotten: bool
) -> None:
    lake.create(version=version)
    if rows_before:
        lake.publish("before", lake.stage(rows_before))
    sleeper_head = lake.target.load()
    on_the_wire = prepare(lake, sleeper_head, lake.stage([2]))

    other = lake.open()
    other.fence(other.load(), OURS)
    later = []
    if forgotten:
        if lake.table().metadata.current_snapshot_id == snapshot_id_of(OURS):
            lake.publish("later", lake.stage([9]))
            later = [9]
        expire(lake, snapshot_id_of(OURS))
        assert lake.table().metadata.snapshot_by_id(snapshot_id_of(OURS)) is None

    with pytest.raises(CommitUnknown):
        lake.target.send(sleeper_head, on_the_wire)
    assert lake.ids() == rows_before + later
    assert outcome(lake) == (Outcome.FENCED, None)
    with pytest.raises(CommitUnknown, match="already fenced"):
        lake.commit(lake.target.load(), lake.plan(sleeper_head), OURS, "ours", [lake.stage([2])])


@pytest.mark.parametrize("version", [1, 2])
def test_a_fence_that_comes_after_the_commit_changes_nothing(lake, version: int) -> None:
    lake.create(version=version)
    lake.publish("before", lake.stage([1]))
    early_head = lake.target.load()
    commit = lake.publish("ours", lake.stage([2]))
    with pytest.raises(CommitUnknown):
        lake.target.fence(early_head, commit)
    assert lake.ids() == [1, 2]
    assert outcome(lake, commit) == (Outcome.COMMITTED, snapshot_id_of(commit))


def test_a_fence_does_not_wait_for_other_writers_to_pause(lake) -> None:
    lake.create()
    lake.publish("before", lake.stage([1]))
    head = lake.target.load()
    for n in range(10):
        lake.publish(f"other {n}", lake.stage([10 + n]))
    lake.target.fence(head, OURS)
    assert outcome(lake) == (Outcome.FENCED, None)
    assert lake.ids() == [1, *range(10, 20)]


def test_other_jobs_publish_after_a_fence_as_before(lake) -> None:
    lake.create()
    lake.publish("before", lake.stage([1]))
    lake.target.fence(lake.target.load(), OURS)
    history = lake.snapshot_ids()
    lake.publish("after", lake.stage([2]))
    assert lake.ids() == [1, 2]
    assert lake.snapshot_ids() == [*history, snapshot_id_of(commit_id("after", 1))]
    numbers = [s.sequence_number for s in lake.table().metadata.snapshots]
    assert numbers == sorted(set(numbers))


def test_a_snapshot_of_somebody_else_under_our_id_is_corrupt(lake) -> None:
    lake.create()
    lake.publish("before", lake.stage([1]))
    head = lake.target.load()
    prepared = prepare(lake, head, lake.stage([2]))
    (added,) = (update for update in prepared.updates if isinstance(update, AddSnapshotUpdate))
    assert added.snapshot.summary is not None
    del added.snapshot.summary.additional_properties["lockstep.commit-id"]
    lake.catalog.commit_table(lake.table(), (), (added,))
    with pytest.raises(Corrupt, match="something else wrote it"):
        outcome(lake)


# Lost replies


def test_a_lost_reply_is_unknown_and_the_register_knows(lake, failpoints) -> None:
    lake.create()
    failpoints("commit.reply_lost=error")
    with pytest.raises(CommitUnknown):
        lake.publish("ours", lake.stage([1]))
    assert outcome(lake) == (Outcome.COMMITTED, snapshot_id_of(OURS))


@pytest.mark.parametrize(
    ("drill", "error", "found"),
    [
        ("commit.before_publish", Retryable, Outcome.OPEN),
        ("commit.after_publish", CommitUnknown, Outcome.COMMITTED),
        ("fence.before_publish", Retryable, Outcome.OPEN),
        ("fence.after_publish", CommitUnknown, Outcome.FENCED),
    ],
)
def test_an_error_is_unknown_as_soon_as_the_catalog_was_asked(
    lake, failpoints, drill: str, error: type[Exception], found: Outcome
) -> None:
    lake.create()
    failpoints(f"{drill}=error")
    head, file = lake.target.load(), lake.stage([1])
    if drill.startswith("fence"):
        with pytest.raises(error):
            lake.target.fence(head, OURS)
    else:
        with pytest.raises(error):
            lake.commit(head, lake.plan(head), OURS, "ours", [file])
    assert outcome(lake)[0] is found


def test_metadata_that_cannot_be_written_proves_that_nothing_was_published(lake) -> None:
    lake.create()
    staged = lake.stage([1])
    head = lake.target.load()
    folder = lake.folder / "lake" / "db" / "events" / "metadata"
    folder.rename(folder.with_name("elsewhere"))
    folder.write_text("a file where the folder was")
    with pytest.raises(Retryable, match="cannot publish to"):
        lake.commit(head, lake.plan(head), OURS, "ours", [staged])
    folder.unlink()
    folder.with_name("elsewhere").rename(folder)
    assert outcome(lake) == (Outcome.OPEN, None)


# The ledger


def test_the_ledger_keeps_the_newest_thousand(lake) -> None:
    lake.create()
    old = {
        f"{LEDGER_PREFIX}{n:04}": LedgerEntry(n % 2 == 0, n + 1, 1000 - n, 1).to_text()
        for n in range(LEDGER_LIMIT)
    }
    lake.catalog.commit_table(lake.table(), (), (SetPropertiesUpdate(updates=old),))
    commit = lake.publish("ours", lake.stage([1]))
    left = {name for name in lake.table().metadata.properties if name.startswith(LEDGER_PREFIX)}
    assert len(left) == LEDGER_LIMIT
    assert LEDGER_PREFIX + commit in left
    assert set(old) - left == {f"{LEDGER_PREFIX}{LEDGER_LIMIT - 1:04}"}
    assert outcome(lake, "0001") == (Outcome.COMMITTED, 2)
    assert outcome(lake, "0000") == (Outcome.FENCED, None)
    assert not any(name.startswith(LEDGER_PREFIX) for name in lake.target.load().properties)


def test_a_ledger_entry_that_is_not_ours_is_corrupt(lake) -> None:
    lake.create()
    spoiled = SetPropertiesUpdate(updates={LEDGER_PREFIX + OURS: "yes"})
    lake.catalog.commit_table(lake.table(), (), (spoiled,))
    with pytest.raises(Corrupt, match="not an entry of the commit ledger"):
        outcome(lake)


# Replace


def region(lake: Lake, ids: list[int], name: str = "eu") -> StagedFile:
    return lake.stage(ids, [name], region=[name] * len(ids))


@pytest.mark.parametrize("version", [1, 2])
def test_replace_swaps_the_rows_of_the_earlier_commit_in_one_snapshot(lake, version: int) -> None:
    lake.create(BY_REGION, version=version)
    lake.publish("other source", region(lake, [50]), region(lake, [51], "us"))
    stale = region(lake, [1, 2])
    earlier = lake.publish("earlier", stale, region(lake, [3]))
    lake.publish("another", region(lake, [60]))
    newer = lake.publish("newer", region(lake, [1, 2, 3, 4]), replaces=[earlier])

    assert lake.ids() == [1, 2, 3, 4, 50, 51, 60]
    snapshot = lake.table().current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.snapshot_id == snapshot_id_of(newer)
    assert snapshot.summary.operation == Operation.OVERWRITE
    labels = snapshot.summary.additional_properties
    assert (labels["deleted-records"], labels["deleted-data-files"]) == ("3", "2")
    assert (labels["added-records"], labels["total-records"]) == ("4", "7")
    assert len(lake.snapshot_ids()) == 4
    assert Path(stale.path.removeprefix("file://")).exists()


def test_replace_keeps_sequence_numbers_and_origins_of_the_files_beside_it(lake) -> None:
    lake.create(BY_REGION)
    earlier = lake.publish("earlier", region(lake, [1]))
    other = lake.publish("other", region(lake, [2]))
    merge = {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"}
    lake.catalog.commit_table(lake.table(), (), (SetPropertiesUpdate(updates=merge),))
    rows = lake.table().schema().as_arrow()
    lake.table().append(rows.empty_table().from_pylist([{"id": 3, "region": "eu"}], schema=rows))
    foreign = lake.table().current_snapshot()
    assert foreign is not None
    assert len(foreign.manifests(lake.table().io)) == 1

    newer = lake.publish("newer", region(lake, [9]), replaces=[earlier])
    live = {entry.snapshot_id: entry.sequence_number for entry in live_entries(lake)}
    assert live == {snapshot_id_of(other): 2, foreign.snapshot_id: 3, snapshot_id_of(newer): 4}
    assert lake.ids() == [2, 3, 9]


def test_replace_leaves_the_partition_values_of_the_files_beside_it_exact(lake) -> None:
    lake.create(by_identity(3, "amount"))
    merge = {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"}
    lake.catalog.commit_table(lake.table(), (), (SetPropertiesUpdate(updates=merge),))
    earlier = lake.publish("earlier", lake.stage([1], [0.1], amount=[0.1]))
    lake.publish("other", lake.stage([2], [1e300], amount=[1e300]))
    rows = lake.table().schema().as_arrow()
    lake.table().append(rows.empty_table().from_pylist([{"id": 3, "amount": 0.3}], schema=rows))
    lake.publish("newer", lake.stage([4], [0.1], amount=[0.1]), replaces=[earlier])
    snapshot = lake.table().current_snapshot()
    assert snapshot is not None
    paths = [manifest.manifest_path for manifest in snapshot.manifests(lake.table().io)]
    assert len(paths) == 2
    # Another reader of Avro than PyIceberg's.
    files = [BytesIO(Path(path.removeprefix("file://")).read_bytes()) for path in paths]
    entries: list[Any] = [entry for file in files for entry in fastavro.reader(file)]
    found = [(entry["status"], entry["data_file"]["partition"]["amount"]) for entry in entries]
    assert sorted(found) == [(0, 0.3), (0, 1e300), (1, 0.1), (2, 0.1)]


def test_manifests_without_a_live_file_go_with_the_next_commit(lake) -> None:
    lake.create(BY_REGION)
    earlier = lake.publish("earlier", region(lake, [1]))
    lake.publish("newer", region(lake, [1, 2]), replaces=[earlier])
    lake.publish("next", region(lake, [3]))
    snapshot = lake.table().current_snapshot()
    assert snapshot is not None
    manifests = snapshot.manifests(lake.table().io)
    assert [manifest.deleted_files_count for manifest in manifests] == [0, 0]
    assert lake.ids() == [1, 2, 3]


def test_replace_works_after_the_earlier_snapshot_has_expired(lake) -> None:
    lake.create(BY_REGION)
    earlier = lake.publish("earlier", region(lake, [1, 2]))
    lake.publish("other", region(lake, [7]))
    expire(lake, snapshot_id_of(earlier))
    lake.publish("newer", region(lake, [1, 2, 3]), replaces=[earlier])
    assert lake.ids() == [1, 2, 3, 7]


def test_a_chain_of_replaces_keeps_the_rows_of_others(lake) -> None:
    lake.create(BY_REGION)
    lake.publish("other", region(lake, [7]))
    first = lake.publish("first", region(lake, [1]))
    second = lake.publish("second", region(lake, [1, 2]), replaces=[first])
    lake.publish("third", region(lake, [1, 2, 3]), replaces=[first, second])
    assert lake.ids() == [1, 2, 3, 7]


def test_replace_by_an_empty_partition_takes_the_rows_away(lake) -> None:
    lake.create(BY_REGION)
    lake.publish("other", region(lake, [7]))
    earlier = lake.publish("earlier", region(lake, [1]))
    lake.publish("newer", replaces=[earlier])
    assert lake.ids() == [7]


def test_replace_takes_the_rest_when_whole_files_were_deleted_since(lake) -> None:
    lake.create(BY_REGION)
    earlier = lake.publish("earlier", region(lake, [1]), region(lake, [2]))
    lake.publish("elsewhere", region(lake, [7], "us"))
    lake.table().delete("id = 1")
    lake.publish("newer", region(lake, [1, 2, 3]), replaces=[earlier])
    assert lake.ids() == [1, 2, 3, 7]


def test_replace_of_a_job_whose_first_generation_was_published_takes_its_rows(lake) -> None:
    lake.create(BY_REGION)
    earlier = lake.publish("earlier", region(lake, [1]))
    lake.publish("elsewhere", region(lake, [7], "us"))
    lake.publish("newer", region(lake, [1, 2]), replaces=[commit_id("earlier", 2), earlier])
    assert lake.ids() == [1, 2, 7]


def test_replace_is_refused_when_earlier_rows_were_mixed_with_others(lake) -> None:
    lake.create(BY_REGION)
    earlier = lake.publish("earlier", region(lake, [1, 2]))
    lake.publish("elsewhere", region(lake, [7], "us"))
    lake.table().delete("id = 1")
    head = lake.target.load()
    plan = lake.plan(head, ["eu"], replaces=(earlier,))
    with pytest.raises(Invalid, match=r"cannot replace partition 202401 .* put other rows"):
        lake.commit(head, plan, OURS, "ours", [region(lake, [1, 2, 3])])
    assert lake.ids() == [2, 7]
    assert outcome(lake) == (Outcome.OPEN, None)


def test_replace_is_refused_when_nothing_tells_any_more_whose_rows_are_there(lake) -> None:
    lake.create(BY_REGION)
    lake.publish("other", region(lake, [7]))
    earlier = lake.publish("earlier", region(lake, [1]))
    lake.table().delete("id = 1")
    lake.publish("elsewhere", region(lake, [8], "us"))
    name = LEDGER_PREFIX + earlier
    lake.catalog.commit_table(lake.table(), (), (RemovePropertiesUpdate(removals=[name]),))
    far_future = datetime.fromtimestamp(4_000_000_000, UTC)
    lake.table().maintenance.expire_snapshots().older_than(far_future).commit()
    head = lake.target.load()
    plan = lake.plan(head, ["eu"], replaces=(earlier,))
    with pytest.raises(Invalid, match="has expired"):
        lake.commit(head, plan, OURS, "ours", [region(lake, [1])])
    assert lake.ids() == [7, 8]


def test_a_replace_that_lost_a_race_is_refused_by_the_catalog(lake) -> None:
    lake.create(BY_REGION)
    earlier = lake.publish("earlier", region(lake, [1]))
    head = lake.target.load()
    plan = lake.plan(head, ["eu"], replaces=(earlier,))
    prepared = lake.target.prepare(head, plan, OURS, "ours", [region(lake, [1, 2])])
    lake.publish("other", region(lake, [7]))
    with pytest.raises(CommitUnknown):
        lake.target.send(head, prepared)
    assert lake.ids() == [1, 7]


# Hostile values

HOSTILE = ["a/b", "../../etc", "%2F", "line\nbreak", "", None, "'; DROP TABLE x; --", "🦀", "a=b&c", "null"]


def test_hostile_partition_values_are_exact_for_every_reader(lake, read_with_duckdb) -> None:
    lake.create(BY_REGION)
    files = [lake.stage([n], [value], region=[value]) for n, value in enumerate(HOSTILE)]
    lake.publish("ours", *files)
    expected = dict(enumerate(HOSTILE))
    assert {row["id"]: row["region"] for row in lake.rows()} == expected
    found = read_with_duckdb(lake.table().metadata_location).to_pylist()
    assert {row["id"]: row["region"] for row in found} == expected
    partitions = lake.table().inspect.files().to_pylist()
    assert {row["file_path"]: row["partition"]["region"] for row in partitions} == {
        file.path: file.partition[0] for file in files
    }
    earlier = commit_id("ours", 1)
    again = [lake.stage([100 + n], [value], region=[value]) for n, value in enumerate(HOSTILE)]
    lake.publish("again", *again, replaces=[earlier])
    assert lake.ids() == [100 + n for n in range(len(HOSTILE))]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("int", [-(2**31), 0, None]),
        ("long", [-(2**63), 2**63 - 1, None]),
        ("boolean", [True, False, None]),
        ("date", [-719162, 0, 2932896, None]),
        ("timestamptz", [-1, 1_700_000_000_000_000, None]),
        ("time", [0, 86_399_999_999]),
        ("decimal(38, 10)", ["-1234567890123456789012345678.0123456789", "0.0000000000", None]),
        ("double", ["NaN", "-0.0", 0.0, "Infinity", "-Infinity", 0.1, 5e-324, 1e300, None]),
        ("uuid", ["00000000-0000-0000-0000-000000000000", "ffffffff-ffff-4fff-bfff-ffffffffffff", None]),
        ("binary", ["", "AAECAw==", None]),
        ("fixed[3]", ["AAEC", None]),
    ],
)
def test_partition_values_of_every_type_come_back_from_the_manifest(
    lake, kind: str, values: list[Any]
) -> None:
    key: Json = {"id": 2, "name": "key", "type": kind, "required": False}
    schema = {"type": "struct", "fields": [SCHEMA["fields"][0], key]}
    lake.create(by_identity(2, "key"), schema=schema)
    real = lake.stage([1], [values[0]])
    files = [StagedFile(f"{real.path}{n}", 1, 1, "", real.fingerprint, (v,)) for n, v in enumerate(values)]
    earlier = lake.publish("ours", *files)
    # The whole partition is found again by its value, which is the comparison after compaction.
    name = LEDGER_PREFIX + earlier
    lake.catalog.commit_table(lake.table(), (), (RemovePropertiesUpdate(removals=[name]),))
    again = [StagedFile(f"{real.path}-{n}", 1, 1, "", real.fingerprint, (v,)) for n, v in enumerate(values)]
    lake.publish("again", *again, replaces=[earlier])
    found = {entry.data_file.file_path: entry.data_file.partition for entry in live_entries(lake)}
    assert list(found) == [file.path for file in again]
    expected = partition_reader(lake.table().metadata)
    for file in again:
        assert partition_key(found[file.path]) == partition_key(expected(file.partition))


# Checks before the commit


def test_the_table_as_planned_has_no_drift(lake) -> None:
    head = lake.create(BY_REGION)
    with lake.table().update_schema() as update:
        update.update_column("id", doc="a comment changes nothing")
    with lake.table().transaction() as transaction:
        transaction.set_properties({"owner": "somebody"})
    assert lake.target.drift(lake.target.load(), lake.plan(head)) == []


def test_every_drift_is_a_sentence(lake) -> None:
    head = lake.create(BY_REGION)
    plan = lake.plan(head)
    with lake.table().update_schema(allow_incompatible_changes=True) as update:
        update.rename_column("id", "key")
        update.add_column("note", StringType())
        update.delete_column("amount")
        update.move_first("region")
    with lake.table().update_spec() as spec:
        spec.add_identity("key")
    with lake.table().update_sort_order() as order:
        order.asc("key", "identity")
    assert lake.target.drift(lake.target.load(), plan) == [
        'column "id" was renamed to "key"',
        'column "amount" was dropped',
        'column "note" (string) was added',
        'the columns have another order now: "region", "key", "note"',
        "the partition spec was (region) and is (region, id) now",
        "the sort order was (none) and is (id asc nulls-last) now",
    ]


def test_a_changed_type_is_drift_inside_a_struct_too(lake) -> None:
    inner = {"id": 3, "name": "x", "type": "int", "required": False}
    place = {"id": 2, "name": "place", "required": False, "type": {"type": "struct", "fields": [inner]}}
    head = lake.create(schema={"type": "struct", "fields": [SCHEMA["fields"][0], place]})
    with lake.table().update_schema() as update:
        update.update_column(("place", "x"), field_type=LongType())
    assert lake.target.drift(lake.target.load(), lake.plan(head)) == [
        'column "place.x" was int and is long now'
    ]


def test_missing_and_changed_files_are_named(lake) -> None:
    lake.create()
    good, gone, short = lake.stage([1]), lake.stage([2]), lake.stage([3])
    Path(gone.path.removeprefix("file://")).unlink()
    Path(short.path.removeprefix("file://")).write_bytes(b"PAR1")
    assert lake.target.missing([good, gone, short]) == [
        f"{gone.path} is gone",
        f"{short.path} has 4 bytes instead of {short.size_bytes}",
    ]


def test_a_file_that_is_listed_twice_is_corrupt(lake) -> None:
    lake.create()
    file = lake.stage([1])
    with pytest.raises(Corrupt, match="2 times"):
        lake.publish("ours", file, file)
    assert outcome(lake) == (Outcome.OPEN, None)


# Tables and catalogs


def test_created_tables_are_loaded_as_the_catalog_numbered_them(lake) -> None:
    fields = [{**field, "id": field["id"] + 40} for field in SCHEMA["fields"]]
    order = {"transform": "identity", "source-id": 41, "direction": "asc", "null-order": "nulls-first"}
    assert not lake.target.exists()
    head = lake.target.create(
        {"type": "struct", "fields": fields}, by_identity(42, "region"), {"order-id": 1, "fields": [order]}
    )
    assert lake.target.exists()
    assert [field["id"] for field in head.schema["fields"]] == [1, 2, 3]
    assert head.spec["fields"][0]["source-id"] == 2
    assert head.sort_order["fields"][0]["source-id"] == 1
    assert head == lake.target.load()
    assert lake.target.create(SCHEMA, UNPARTITIONED, UNSORTED).uuid == head.uuid


def test_only_a_table_that_was_never_written_is_taken_back(lake) -> None:
    head = lake.create()
    lake.target.drop_if_empty("00000000-0000-0000-0000-000000000000")
    assert lake.target.exists()
    lake.target.drop_if_empty(head.uuid)
    assert not lake.target.exists()
    lake.target.drop_if_empty(head.uuid)
    again = lake.create()
    lake.publish("ours", lake.stage([1]))
    lake.target.drop_if_empty(again.uuid)
    assert lake.ids() == [1]


def test_the_table_remembers_which_partition_its_rows_came_from_until_they_are_replaced(lake) -> None:
    head = lake.create()
    first = commit_id("first", 1)
    files = [lake.stage([1])]
    lake.commit(head, lake.plan(head, scope="here"), first, "first", files)
    head = lake.target.load()
    assert lake.target.published_from(head, "here") == [first]
    assert lake.target.published_from(head, "elsewhere") == []
    second = commit_id("second", 1)
    plan = lake.plan(head, scope="here", replaces=(first,))
    lake.commit(head, plan, second, "second", [lake.stage([2])])
    assert lake.target.published_from(lake.target.load(), "here") == [second]
    assert lake.ids() == [2]


def test_a_table_that_was_made_again_has_another_uuid_and_takes_no_old_commit(lake) -> None:
    head = lake.create()
    prepared = prepare(lake, head, lake.stage([1]))
    lake.catalog.drop_table("db.events")
    lake.create()
    assert lake.target.load().uuid != head.uuid
    with pytest.raises(CommitUnknown):
        lake.target.send(head, prepared)
    assert lake.ids() == []


def test_an_unknown_catalog_names_the_nearest(lake) -> None:
    with pytest.raises(Invalid, match='no catalog "lak"; known: lake') as caught:
        open_target("iceberg://lak/db.events", lake.config)
    assert caught.value.hint == 'did you mean "lake"?'


def test_a_missing_table_says_how_to_create_it(lake) -> None:
    with pytest.raises(Invalid, match=r"no table db\.events") as caught:
        lake.target.load()
    assert "--create" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "address", ["iceberg://lake", "iceberg://lake/events", "iceberg:///db.t", "s3://b/x"]
)
def test_an_address_without_a_table_is_refused(lake, address: str) -> None:
    with pytest.raises(Invalid):
        open_target(address, lake.config)


def test_a_target_with_a_snapshot_is_refused_and_not_taken_for_a_name(lake) -> None:
    with pytest.raises(Invalid, match="names a snapshot"):
        open_target("iceberg://lake/db.events@5", lake.config)


def test_a_warehouse_that_cannot_be_written_to_is_a_wrong_request(tmp_path: Path) -> None:
    # Nobody may make a folder there, not even root.
    lake = Lake(tmp_path)
    config = replace(
        lake.config, catalogs={"lake": {**lake.config.catalogs["lake"], "warehouse": "file:///sys"}}
    )
    with pytest.raises(Invalid, match="cannot write to file:///sys"):
        IcebergTarget("iceberg://lake/db.events", config).create(SCHEMA, UNPARTITIONED, UNSORTED)


def test_a_catalog_that_does_not_answer_is_retryable(lake) -> None:
    catalog = {"type": "rest", "uri": "http://127.0.0.1:9"}
    broken = IcebergTarget(lake.address, _with_catalog(lake, catalog))
    with pytest.raises(Retryable, match="does not answer"):
        broken.load()


def test_a_catalog_that_is_not_configured_right_is_refused(lake) -> None:
    broken = IcebergTarget(lake.address, _with_catalog(lake, {"type": "no-such-type"}))
    with pytest.raises(Invalid, match="not configured right"):
        broken.exists()


def test_a_fresh_folder_needs_no_preparation(lake) -> None:
    uri = f"sqlite:///{lake.folder}/not/yet/there/catalog.db"
    fresh = {"type": "sql", "uri": uri, "warehouse": f"file://{lake.folder}/not/yet/lake"}
    target = IcebergTarget(lake.address, _with_catalog(lake, fresh))
    assert not target.exists()
    assert target.create(SCHEMA, UNPARTITIONED, UNSORTED).location.startswith("file://")


def _with_catalog(lake: Lake, properties: dict[str, str]) -> Any:
    return replace(lake.config, catalogs={"lake": properties})


def test_a_format_that_cannot_be_written_is_refused_before_anything_is_written(lake) -> None:
    lake.create()
    published = lake.publish("before", lake.stage([1]))
    path = Path(lake.table().metadata_location.removeprefix("file://"))
    raw = {**json.loads(path.read_text()), "format-version": 3, "next-row-id": 1}
    if lake.kind == "filesystem":
        path.with_name("v3.metadata.json").write_text(json.dumps(raw))
    else:
        newer = path.with_name("00009-upgraded.metadata.json")
        newer.write_text(json.dumps(raw))
        lake.catalog.drop_table("db.events")
        lake.catalog.register_table("db.events", f"file://{newer}")

    head = lake.target.load()
    plan = lake.plan(head)
    assert lake.target.outcome(head, published)[0] is Outcome.COMMITTED
    assert lake.target.drift(head, plan) == ["the table has format version 3, and Lockstep writes up to 2"]
    with pytest.raises(Invalid, match="format version 3"):
        lake.commit(head, plan, OURS, "ours", [])
    # PyIceberg's SQL catalog writes no metadata of format 3; a catalog with a server of its own takes this.
    fence = SnapshotBuilder(lake.table(), OURS, lake.clock).fence()
    fenced = update_table_metadata(lake.table().metadata, fence.updates)
    assert isinstance(fenced, TableMetadataV3)
    assert fenced.snapshot_by_id(snapshot_id_of(OURS)) is not None
    assert fenced.next_row_id == 1
