"""Imports from the request to the published table, on a real store and table; attempts run here.

Whatever the buffers, tasks and crashes, the outcome is that of an import that nothing disturbed.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import NullOrder, SortDirection, SortField, SortOrder
from pyiceberg.transforms import BucketTransform, IdentityTransform, parse_transform
from pyiceberg.types import LongType, NestedField, StringType

from lockstep import attempt, importer, pipeline, review
from lockstep.cli.page import job_page
from lockstep.cli.render import plain_lines
from lockstep.errors import Conflict, Invalid, Retryable
from lockstep.importer import PlannedImport, plan_import
from lockstep.job import DATA, RUN, Job, State
from lockstep.merge import Dropped, MergeReader
from lockstep.partitioning import order_names
from lockstep.review import sortedness, summary, tally
from lockstep.source import Chunk, ParseOptions
from lockstep.source.files import FilesInput
from lockstep.stages import stage_is_over
from lockstep.target.iceberg import IcebergTarget
from tests.files_lab import schema_of
from tests.import_lab import TARGET, ImportLab
from tests.store_lab import MovedClock

pytestmark = pytest.mark.long

Row = tuple[int, int, str]


def some_rows(count: int, seed: int = 1, keys: int = 50) -> list[Row]:
    chance = random.Random(seed)
    return [(n, chance.randrange(keys), f'name "{n}",\n{chance.random()}') for n in range(count)]


def as_csv(rows: list[Row]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("id", "k", "name"))
    writer.writerows(rows)
    return text.getvalue()


def _long(number: int, name: str) -> dict[str, Any]:
    return {"id": number, "name": name, "required": False, "type": "long"}


def published(lab: ImportLab) -> list[Row]:
    return [(row["id"], row["k"], row["name"]) for row in lab.rows()]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImportLab:
    """Small tasks and a small memory, so that a few thousand rows make several of everything."""
    monkeypatch.setattr(importer, "TASK_BYTES", 80_000)
    monkeypatch.setattr(importer, "LEAST_TASK_BYTES", 1)
    return ImportLab(tmp_path, 'task_memory = "200KB"')


def in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row[1], row[0]))


def test_a_sorted_import_publishes_every_row_once_in_order(lab: ImportLab) -> None:
    rows = some_rows(4000)
    lab.write("in/a.csv", as_csv(rows[:2500]))
    lab.write("in/b.csv", as_csv(rows[2500:]))

    job = lab.run("in", sort_by=("k", "id"), file_size_bytes=20_000)

    assert job.state is State.COMPLETED, job.error
    assert sorted(published(lab)) == sorted(rows)
    in_files = [row for file in lab.files() for row in file.to_pylist()]
    assert [(row["id"], row["k"], row["name"]) for row in in_files] == in_order(rows)
    assert len(lab.files()) > 2
    assert sortedness(job, lab.store) == 1.0
    assert {task.file.sort_order_id for task in lab.table().scan().plan_files()} == {1}
    assert len(lab.table().metadata.snapshots) == 1
    assert list(lab.folder.rglob("*lockstep-runs*")) == [], "an empty folder is left over too"


def test_direct_and_merge_mode_publish_the_same_rows(lab: ImportLab) -> None:
    lab.write("a.csv", as_csv(some_rows(2000)))
    direct = lab.run("a.csv", target="iceberg://lake/db.direct", mode="direct")
    merged = lab.run("a.csv", sort_by=("k",))
    assert direct.state is merged.state is State.COMPLETED
    assert direct.fingerprint == merged.fingerprint
    assert sorted(row["id"] for row in lab.rows("db.direct")) == list(range(2000))


def test_a_table_that_another_request_made_meanwhile_with_another_order_is_refused(
    lab: ImportLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.write("a.csv", as_csv(some_rows(20)))
    lab.write("b.csv", as_csv(some_rows(30)))
    lab.run("a.csv", sort_by=("id",))
    monkeypatch.setattr(IcebergTarget, "exists", lambda self: False)  # as it was a moment ago
    with pytest.raises(Invalid, match="made by another request meanwhile, with another sort order"):
        lab.plan("b.csv", sort_by=("k",))
    assert len(lab.rows()) == 20
    assert lab.run("b.csv", sort_by=("id",)).state is State.COMPLETED


CRASH_POINTS = ("map.after_run", "map.after_checkpoint", "stage.before_advance", "stage.after_advance")
LATER = ("merge.after_file", "commit.before_publish", "commit.after_publish")


@pytest.mark.parametrize("failpoint", [*CRASH_POINTS, *LATER])
@pytest.mark.parametrize("visit", [1, 2])
def test_an_import_that_dies_anywhere_ends_as_if_nothing_had_happened(
    lab: ImportLab, failpoint: str, visit: int
) -> None:
    rows = some_rows(5000)
    lab.write("a.csv", as_csv(rows))
    lab.crashes.at = {(failpoint, visit)} if failpoint not in LATER[1:] else {(failpoint, 1)}

    job = lab.run("a.csv", sort_by=("k", "id"), file_size_bytes=20_000)

    assert job.state is State.COMPLETED, job.error
    assert lab.crashes.passed[failpoint] >= visit or failpoint in LATER[1:], "the drill did not happen"
    assert [row for file in lab.files() for row in file["id"].to_pylist()] == [r[0] for r in in_order(rows)]
    assert len(lab.table().metadata.snapshots) == 1
    assert lab.left_over() == []


def test_a_resumed_map_task_goes_on_in_the_middle_and_uses_the_runs_that_it_had(
    lab: ImportLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importer, "TASK_BYTES", 10**9)
    monkeypatch.setattr(importer, "SHARES", 1)
    rows = some_rows(20_000)
    lab.write("a.csv", as_csv(rows))
    lab.crashes.at = {("map.after_checkpoint", 2)}
    job = lab.plan("a.csv", sort_by=("k", "id"))
    (task,) = lab.store.tasks(job.job_id)

    job = lab.finish(job)

    assert job.state is State.COMPLETED, job.error
    runs = [file for file in lab.store.manifest(job.job_id, "map") if file.kind == RUN]
    epochs = [int(file.path.split("-")[-2]) for file in runs]
    assert len(set(epochs)) == 2, "both attempts have written runs that count"
    assert sum(file.rows for file in runs) == len(rows)
    redone = sum(file.rows for file in runs if file.path.split("-")[-2] == runs[-1].path.split("-")[-2])
    assert redone < len(rows)
    assert task.index == 0


def test_rows_between_two_checkpoints_are_all_that_a_crash_costs(lab: ImportLab) -> None:
    rows = some_rows(20_000)
    lab.write("a.csv", as_csv(rows))
    calm = lab.run("a.csv", sort_by=("k", "id"), target="iceberg://lake/db.calm")
    longest = max(file.rows for file in lab.store.manifest(calm.job_id, "map") if file.kind == RUN)
    lab.crashes.at = {("map.after_run", lab.crashes.passed["map.after_run"] + 2)}
    read = _rows_added(lab)

    job = lab.run("a.csv", sort_by=("k", "id"))

    assert job.state is State.COMPLETED
    redone = read() - len(rows)
    print(f"rows redone after the crash: {redone}, at most {longest} between two checkpoints")
    assert 0 < redone <= longest


def test_a_map_task_checkpoints_every_ten_seconds_although_its_memory_is_not_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "BATCHES_IN_MEMORY", 2_000)
    monkeypatch.setattr(attempt, "SYSTEM_CLOCK", hurried := MovedClock())
    chunks: list[int] = []
    original = pipeline.Pipeline.add

    def add(self: pipeline.Pipeline, chunk: Chunk) -> None:
        """Each chunk takes three seconds."""
        hurried.at += 3
        chunks.append(chunk.batch.num_rows)
        original(self, chunk)

    monkeypatch.setattr(pipeline.Pipeline, "add", add)
    lab = ImportLab(tmp_path, 'task_memory = "4MB"')
    lab.write("a.csv", as_csv(some_rows(2000)))
    job = lab.plan("a.csv", sort_by=("k",))

    (claim,) = lab.store.claim("worker", 1, 30)
    lab.attempt(claim)

    runs = [file.rows for file in lab.store.manifest(job.job_id, "map") if file.kind == RUN]
    assert len(chunks) > 8
    # Twelve seconds are the first time that ten have passed.
    assert runs == [sum(chunks[at : at + 4]) for at in range(0, len(chunks), 4)]


def _rows_added(lab: ImportLab) -> Any:
    """Counts the rows that map tasks hand to their sinks from now on."""
    from lockstep.sink.run import RunSink

    added = 0
    original = RunSink.add

    def add(self: RunSink, batch: pa.RecordBatch, records: pa.Int64Array | None = None) -> None:
        nonlocal added
        added += batch.num_rows
        original(self, batch, records)

    RunSink.add = add  # type: ignore[method-assign]

    def stop() -> int:
        RunSink.add = original  # type: ignore[method-assign]
        return added

    return stop


def test_an_input_that_changes_between_two_attempts_fails_the_job_and_is_named(lab: ImportLab) -> None:
    path = lab.write("a.csv", as_csv(some_rows(5000)))
    lab.crashes.at = {("map.after_checkpoint", 1), ("map.after_run", 1)}
    job = lab.plan("a.csv", sort_by=("k",))
    path.write_text(as_csv(some_rows(5000, seed=2)))

    job = lab.finish(job)

    assert job.state is State.FAILED
    assert job.error is not None
    assert job.error.cls == "Corrupt"
    assert "a.csv" in job.error.message
    assert lab.rows() == []


def test_records_that_do_not_fit_go_to_the_rejects_file_with_line_and_reason(lab: ImportLab) -> None:
    lab.write("a.csv", 'id,k\n1,2\n"x\ny",3\n4,5\n6,many\n7,8\n')
    schema = schema_of(id="long", k="long")
    rejects = lab.folder / "bad.csv"

    job = lab.run(
        "a.csv", parse=ParseOptions(schema=schema), max_rejects=2, rejects=str(rejects), mode="direct"
    )

    assert job.state is State.COMPLETED, job.error
    assert sorted(row["id"] for row in lab.rows()) == [1, 4, 7]
    found = list(csv.DictReader(io.StringIO(rejects.read_text())))
    assert [(row["line"], row["column"]) for row in found] == [("3", "id"), ("6", "k")]
    assert all(row["input"].endswith("a.csv") for row in found)
    assert '"many"' in found[1]["reason"] or "many" in found[1]["raw"]
    assert tally(job, lab.store).rejected == 2
    data = [file.size_bytes for file in lab.store.manifest(job.job_id, "write") if file.kind == DATA]
    assert (job.files, job.bytes_done) == (len(data), sum(data)), "rejects are not what was written"


def test_rejects_of_files_that_share_a_task_name_their_own_file_and_line(lab: ImportLab) -> None:
    lab.write("in/a.csv", "id,k\n\n1,2\n2,3\n")
    assert lab.run("in/a.csv", sort_by=("k",)).state is State.COMPLETED
    lab.write("in/a.csv", "id,k\n\n1,2\nx,3\n")
    lab.write("in/b.csv", "id,k\n\n4,many\n5,6\n")
    rejects = lab.folder / "bad.csv"

    job = lab.run("in", max_rejects=2, rejects=str(rejects))

    assert job.state is State.COMPLETED, job.error
    found = list(csv.DictReader(io.StringIO(rejects.read_text())))
    places = [(Path(row["input"]).name, row["line"]) for row in found]
    assert places == [("a.csv", "4"), ("b.csv", "3")]


def test_one_reject_too_many_fails_the_job_and_names_the_record(lab: ImportLab) -> None:
    lab.write("a.csv", "id,k\n1,2\n3,4\n")
    assert lab.run("a.csv", sort_by=("k",)).state is State.COMPLETED
    lab.write("b.csv", "id,k\n5,6\n7,many\n")
    job = lab.run("b.csv")
    assert job.state is State.FAILED
    assert job.error is not None
    assert "b.csv line 3" in job.error.message
    assert '"k"' in job.error.message
    assert len(lab.rows()) == 2


def test_a_task_with_more_rejects_than_the_job_allows_ends_at_once(
    lab: ImportLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importer, "SHARES", 1)
    lab.write("a.csv", "id,k\n" + "5,6\n7,many\n" * 3)
    job = lab.run("a.csv", max_rejects=2, parse=ParseOptions(schema=schema_of(id="long", k="long")))
    assert job.state is State.FAILED
    assert job.error is not None
    assert "more than 2 records do not fit" in job.error.message, "it was found by the task, not by a review"
    assert "a.csv line 7" in job.error.message


def test_the_rejects_file_never_overwrites_anything(lab: ImportLab) -> None:
    path = lab.write("a.csv", "id,k\n1,2\n")
    other = lab.write("mine.csv", "precious")
    with pytest.raises(Invalid, match="exists already"):
        lab.plan("a.csv", rejects=str(path), max_rejects=1)
    with pytest.raises(Invalid, match="exists already"):
        lab.plan("a.csv", rejects=str(other), max_rejects=1)
    later = str(lab.folder / "later.csv")
    job = lab.plan("a.csv", rejects=later, max_rejects=1, mode="direct")
    assert review.rejects_file(job, lab.config) == later
    lab.write("later.csv", "somebody else's")
    assert lab.finish(job).state is State.COMPLETED
    assert (lab.folder / "later.csv").read_text() == "somebody else's"
    lab.write("b.csv", "id,k\n2,many\n")
    (lab.folder / "later.csv").unlink()
    job = lab.plan("b.csv", rejects=later, max_rejects=1, mode="direct")
    lab.write("later.csv", "somebody else's")
    job = lab.finish(job)
    assert job.state is State.COMPLETED, job.error
    assert (lab.folder / "later.csv").read_text() == "somebody else's"
    beside = review.rejects_file(job, lab.config)
    assert beside != later
    assert "2,many" in Path(beside).read_text()


def test_the_same_file_is_not_imported_twice_unless_that_is_said(lab: ImportLab) -> None:
    lab.write("a.csv", "id,k\n1,2\n")
    first = lab.run("a.csv", mode="direct")
    with pytest.raises(Conflict, match=first.job_id):
        lab.plan("a.csv", mode="direct")
    again = lab.plan("a.csv", mode="direct", on_existing="append")
    with pytest.raises(Conflict, match=again.job_id):
        lab.plan("a.csv", mode="direct", on_existing="append")
    assert lab.finish(again).state is State.COMPLETED
    assert len(lab.rows()) == 2
    lab.write("a.csv", "id,k\n3,4\n5,6\n")
    assert lab.run("a.csv", mode="direct").state is State.COMPLETED
    assert len(lab.rows()) == 4


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_inputs_that_were_imported_before_can_be_skipped(lab: ImportLab, format: str) -> None:
    def write(name: str, *ids: int) -> None:
        rows = {"id": ids, "k": [n * 2 for n in ids]}
        if format == "parquet":
            pq.write_table(pa.table(rows), lab.folder / f"in/{name}.parquet", row_group_size=1)
        else:
            lab.write(f"in/{name}.csv", "id,k\n" + "".join(f"{n},{2 * n}\n" for n in ids))

    def skipped(*inputs: str) -> PlannedImport:
        request = lab.request(*inputs, sort_by=("id",), on_existing="skip")
        return plan_import(request, lab.config, lab.store, lab.clock)

    (lab.folder / "in").mkdir()
    write("b", 2, 3)
    first = lab.plan("in", sort_by=("id",))
    again = skipped("in")
    assert again.job is None, "a job that is still at it counts as well"
    assert [(Path(one.input).stem, one.job_id) for one in again.skipped] == [("b", first.job_id)]
    assert lab.finish(first).state is State.COMPLETED

    write("a", 1)
    write("c", 4, 5)
    second = skipped("in")
    assert [Path(one.input).stem for one in second.skipped] == ["b"]
    assert second.job is not None
    assert lab.finish(second.job).state is State.COMPLETED
    assert sorted(row["id"] for row in lab.rows()) == [1, 2, 3, 4, 5]

    before = lab.store.list()
    third = skipped("in")
    assert (third.job, third.created_table) == (None, False)
    assert {one.job_id for one in third.skipped} == {first.job_id, second.job.job_id}
    assert lab.store.list() == before
    assert len(lab.table().metadata.snapshots) == 2
    found = lab.rehearse("in", on_existing="skip")
    assert (found.rows, found.refused) == (0, False)


def test_a_failed_import_does_not_make_its_inputs_skipped(lab: ImportLab) -> None:
    lab.write("a.csv", "id,k\n1,1\n")
    assert lab.run("a.csv", sort_by=("k",)).state is State.COMPLETED
    lab.write("b.csv", "id,k\n2,many\n")
    assert lab.run("b.csv").state is State.FAILED
    assert lab.run("b.csv", on_existing="skip", max_rejects=1).state is State.COMPLETED


def test_a_killed_import_has_published_nothing_and_leaves_no_runs(lab: ImportLab) -> None:
    lab.write("a.csv", as_csv(some_rows(5000)))
    job = lab.plan("a.csv", sort_by=("k",))
    for claim in lab.store.claim("worker", 2, 30):
        lab.attempt(claim)
    assert lab.left_over()
    lab.kill(job)
    assert lab.finish(job).state is State.KILLED
    assert lab.rows() == []
    assert lab.left_over() == []


def test_a_paused_import_goes_on_from_where_it_was(lab: ImportLab) -> None:
    rows = some_rows(5000)
    lab.write("a.csv", as_csv(rows))
    job = lab.plan("a.csv", sort_by=("k", "id"))
    lab.pause_asked = True
    for claim in lab.store.claim("worker", 1, 30):
        lab.attempt(claim)
    (started, *_) = lab.store.tasks(job.job_id)
    assert started.position is not None, "what was read before the pause is kept"
    assert lab.store.read(job.job_id).state is State.PAUSED
    lab.pause_asked = False
    job = lab.finish(lab.store.resume(job.job_id))
    assert job.state is State.COMPLETED, job.error
    assert sorted(published(lab)) == sorted(rows)


def test_a_failed_import_goes_on_from_its_runs_when_it_is_retried(lab: ImportLab) -> None:
    from lockstep.errors import ErrorInfo
    from lockstep.job import Event

    rows = some_rows(5000)
    lab.write("a.csv", as_csv(rows))
    job = lab.plan("a.csv", sort_by=("k", "id"))
    for claim in lab.store.claim("worker", 1, 30):
        lab.attempt(claim)
    before = {task.index: task.epoch for task in lab.store.tasks(job.job_id) if task.state == "done"}
    assert before
    lab.store.stop(job.job_id, Event.FAIL, ErrorInfo("Retryable", "the power went"))
    job = lab.finish(lab.store.retry(job.job_id))
    assert job.state is State.COMPLETED
    after = {task.index: task.epoch for task in lab.store.tasks(job.job_id, "map")}
    assert {index: after[index] for index in before} == before, "a finished task was done again"
    assert sorted(published(lab)) == sorted(rows)


def test_hundreds_of_runs_are_combined_first_and_the_short_ones_are_gone_then(
    lab: ImportLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importer, "TASK_BYTES", 4_000)
    rows = some_rows(8000)
    lab.write("a.csv", as_csv(rows))
    job = lab.plan("a.csv", sort_by=("k", "id"), unique=("id",))
    while (job := lab.round(job)).stage != "unique":
        assert job.state.live
    stages = [entry.detail for entry in lab.store.history(job.job_id) if entry.event == "advance"]
    assert stages[0].startswith("map → combine")
    left = {(path.name.split("-")[2], path.name.split(".")[1]) for path in lab.left_over()}
    assert left == {("recombine", "run"), ("recombine", "keys")}
    job = lab.finish(job)
    assert [row for file in lab.files() for row in file["id"].to_pylist()] == [r[0] for r in in_order(rows)]
    assert lab.left_over() == []


@pytest.mark.parametrize(
    "content", ["", "id,k\n", "id,k", "\ufeffid,k\r\n1,2\r\n3,4", "id,k\n1,2\n3,4"], ids=repr
)
def test_odd_endings_of_files_are_right(lab: ImportLab, content: str) -> None:
    lab.write("full.csv", "id,k\n9,9\n")
    lab.write("odd.csv", content)
    job = lab.run("full.csv", "odd.csv", sort_by=("k",))
    assert job.state is State.COMPLETED, job.error
    expected = {9, 1, 3} if "1,2" in content else {9}
    assert {row["id"] for row in lab.rows()} == expected


def test_compressed_files_are_resumed_too(lab: ImportLab) -> None:
    rows = some_rows(5000)
    lab.write("a.csv.gz", gzip.compress(as_csv(rows).encode()))
    lab.crashes.at = {("map.after_checkpoint", 1)}
    job = lab.run("a.csv.gz", sort_by=("k", "id"))
    assert job.state is State.COMPLETED, job.error
    assert sorted(published(lab)) == sorted(rows)


def test_a_sort_order_is_given_to_a_table_without_one_and_never_changed(lab: ImportLab) -> None:
    lab.write("a.csv", "id,k\n1,2\n")
    lab.write("b.csv", "id,k\n3,1\n")
    lab.run("a.csv", mode="direct")
    assert lab.run("b.csv", sort_by=("k",)).state is State.COMPLETED
    assert [field.source_id for field in lab.table().sort_order().fields] == [2]
    lab.write("c.csv", "id,k\n5,0\n")
    with pytest.raises(Invalid, match="is sorted by k already"):
        lab.plan("c.csv", sort_by=("id",))
    assert lab.run("c.csv").state is State.COMPLETED
    assert len(lab.rows()) == 3


def make_table(lab: ImportLab, **layout: Any) -> None:
    """The table of `as_csv`, made by somebody else."""
    catalog = load_catalog("lake", **lab.config.catalogs["lake"])
    catalog.create_namespace_if_not_exists("db")
    schema = Schema(
        NestedField(1, "id", LongType()),
        NestedField(2, "k", LongType()),
        NestedField(3, "name", StringType()),
    )
    catalog.create_table("db.t", schema=schema, **layout)


@pytest.mark.parametrize(
    ("order", "partitioned", "names", "told"),
    [
        (("truncate[800] id", "identity name"), "", ["truncate[800](id)", "name"], True),
        (("truncate[2] name",), "", ["truncate[2](name)"], True),
        (("bucket[16] id", "identity id desc"), "", ["bucket[16](id)", "id desc"], False),
        (("bucket[2] k", "identity id"), "bucket[2]", ["bucket[2](k)", "id"], True),
    ],
)
def test_the_share_of_files_in_order_is_that_of_the_transformed_values_or_unknown(
    lab: ImportLab, order: tuple[str, ...], partitioned: str, names: list[str], told: bool
) -> None:
    rows = [(n, k, f"{n * 7919 % 1000} {name}") for n, k, name in some_rows(4000)]
    lab.write("a.csv", as_csv(rows))
    parts = [PartitionField(2, 1000, parse_transform(partitioned), "part")] if partitioned else []
    sorting = SortOrder(*(_sort_field(*text.split()) for text in order))
    make_table(lab, partition_spec=PartitionSpec(*parts), sort_order=sorting)

    job = lab.run("a.csv", create=False, file_size_bytes=8_000)

    assert job.state is State.COMPLETED, job.error
    assert order_names(job.plan.sort_order, job.plan.schema) == names
    assert len(lab.files()) > 2
    backwards = SimpleNamespace(manifest=lambda *at: reversed(list(lab.store.manifest(*at))))
    found = [sortedness(job, store) for store in (lab.store, cast(Any, backwards))]
    assert found == ([1.0, 0.0] if told else [None, None])


def _sort_field(transform: str, name: str, direction: str = "asc") -> SortField:
    number = ("id", "k", "name").index(name) + 1
    return SortField(number, parse_transform(transform), SortDirection(direction))


def test_rows_go_to_their_partitions_sorted_within_each(lab: ImportLab) -> None:
    rows = some_rows(3000)
    lab.write("a.csv", as_csv(rows))
    spec = PartitionSpec(PartitionField(2, 1000, BucketTransform(4), "k_bucket"))
    make_table(lab, partition_spec=spec)

    job = lab.run("a.csv", sort_by=("id",), create=False, file_size_bytes=20_000)

    assert job.state is State.COMPLETED, job.error
    assert sorted(published(lab)) == sorted(rows)
    files = [task.file for task in lab.table().scan().plan_files()]
    assert len({str(file.partition) for file in files}) == 4 < len(files)
    for file in lab.files():
        ids = file["id"].to_pylist()
        assert ids == sorted(ids)
    assert sortedness(job, lab.store) == 1.0, "files are compared within their partition"
    staged = list(lab.store.manifest(job.job_id, "merge"))
    written = {(file.path.split("-")[-3], tuple(file.partition)) for file in staged}
    tasks = len(lab.store.tasks(job.job_id, "merge"))
    assert 1 < tasks <= len(written) < tasks + 4, "ranges follow each other by partition first"


def test_a_table_with_a_backward_order_gets_its_rows_in_it(lab: ImportLab) -> None:
    order = SortOrder(SortField(2, IdentityTransform(), SortDirection.DESC, NullOrder.NULLS_LAST))
    make_table(lab, sort_order=order)
    rows = some_rows(3000, keys=3000)
    unknown = "".join(f"{n},,x\n" for n in range(3000, 3100))
    lab.write("in/a.csv", "id,k,name\n" + unknown)
    lab.write("in/b.csv", as_csv(rows))

    job = lab.run("in", create=False, file_size_bytes=20_000)

    assert job.state is State.COMPLETED, job.error
    files = lab.files()
    assert len(files) > 2
    found = [key for file in files for key in file["k"].to_pylist()]
    assert found == sorted((row[1] for row in rows), reverse=True) + [None] * 100
    assert sortedness(job, lab.store) == 1.0


def test_files_that_overlap_count_as_not_in_order(lab: ImportLab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.write("a.csv", as_csv(some_rows(3000, keys=3000)))
    job = lab.run("a.csv", sort_by=("k",), file_size_bytes=20_000)
    files = list(lab.store.manifest(job.job_id, "merge"))
    assert len(files) > 2
    monkeypatch.setattr(lab.store, "manifest", lambda *_: [*files[:-1], files[0]])
    assert sortedness(job, lab.store) == (len(files) - 2) / (len(files) - 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sort_by": ("nope",)}, '--sort-by names "nope", and there is no such column'),
        ({"mode": "direct", "sort_by": ("k",)}, "can neither sort"),
        ({"sort_by": ("k", "k")}, "twice"),
        ({"create": False}, "no table"),
        ({"unique": ("nope",)}, '--unique names "nope", and there is no such column'),
        (
            {"parse": ParseOptions(schema={"fields": [{**_long(1, "id"), "type": "strin"}]})},
            '"id" the type strin, which',
        ),
        ({"max_rejects": -1}, "negative"),
        ({"parse": ParseOptions(limit=-5)}, "--limit cannot be negative"),
        ({"parse": ParseOptions(skip=-1)}, "--skip cannot be negative"),
        ({"mode": "merge"}, "needs an order"),
        ({"on_duplicate": "maybe"}, "--on-duplicate"),
        ({"on_duplicate": "reject"}, "--on-duplicate reject has no effect"),
        ({"file_size_bytes": -5}, "--file-size must be positive"),
        ({"deadline_s": -1}, "--deadline must be positive"),
    ],
)
def test_a_request_that_does_not_fit_creates_nothing(
    lab: ImportLab, options: dict[str, Any], words: str
) -> None:
    lab.write("a.csv", "id,k\n1,2\n")
    with pytest.raises(Invalid, match=words):
        lab.plan("a.csv", **options)
    assert lab.store.list() == []


def test_a_table_whose_columns_differ_by_case_only_is_not_created(lab: ImportLab) -> None:
    lab.write("a.csv", "id,Amount,k,amount\n1,2,3,4\n")
    with pytest.raises(Invalid, match='"Amount" and "amount" differ by case only') as refused:
        lab.plan("a.csv")
    assert "--create" in str(refused.value.hint)
    lab.write("a.jsonl", '{"id": 1, "place": {"City": "x", "city": "y"}}\n')
    with pytest.raises(Invalid, match=r'"place.City" and "place.city" differ by case only'):
        lab.plan("a.jsonl")
    assert lab.store.list() == []


def test_columns_that_the_table_lacks_are_refused_or_left_out(lab: ImportLab) -> None:
    lab.write("a.csv", "id,k\n1,2\n")
    lab.write("b.csv", "id,k,more\n3,4,x\n")
    lab.run("a.csv", mode="direct")
    with pytest.raises(Invalid, match=r"cannot import .*b\.csv"):
        lab.plan("b.csv")
    assert lab.run("b.csv", ignore_extra=True).state is State.COMPLETED
    assert sorted(row["id"] for row in lab.rows()) == [1, 3]


def test_a_missing_input_creates_nothing(lab: ImportLab) -> None:
    with pytest.raises(Invalid, match="nothing-here"):
        lab.plan("nothing-here/*.csv")
    assert lab.store.list() == []


def test_the_tally_counts_what_was_read_and_written(lab: ImportLab) -> None:
    lab.write("a.csv", as_csv(some_rows(100)))
    job: Job = lab.run("a.csv", sort_by=("k",))
    assert (tally(job, lab.store).read, tally(job, lab.store).written) == (100, 100)
    assert TARGET.endswith(job.plan.target.rpartition("/")[2])


# Unique keys


POLICIES = {
    "keep-first": lambda rows: {k: min(r for r in rows if r[1] == k) for _, k, _ in rows},
    "keep-last": lambda rows: {k: max(r for r in rows if r[1] == k) for _, k, _ in rows},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sort_by", [(), ("id",), ("k", "id")], ids=str)
def test_of_equal_keys_the_first_or_the_last_stays_whatever_the_buffers_and_crashes(
    lab: ImportLab, policy: str, sort_by: tuple[str, ...]
) -> None:
    rows = some_rows(3000, keys=1700)
    lab.write("in/a.csv", as_csv(rows[:1000]))
    lab.write("in/b.csv", as_csv(rows[1000:]))
    in_merge = {("merge.after_file", visit) for visit in (1, 3, 4, 6)}
    lab.crashes.at = {("map.after_run", 3), ("stage.after_advance", 1), *in_merge}

    job = lab.run("in", sort_by=sort_by, unique=("k",), on_duplicate=policy, file_size_bytes=5_000)

    assert job.state is State.COMPLETED, job.error
    attempts = {tuple(file.path.split("-")[-3:-1]) for file in lab.store.manifest(job.job_id, "merge")}
    resumed = len(attempts) - len({task for task, _ in attempts})
    assert resumed or sort_by == ("id",), "no merge was resumed in its middle: rows by id pack too well"
    expected = POLICIES[policy](rows)
    assert sorted(published(lab)) == sorted(expected.values())
    assert tally(job, lab.store).duplicates == len(rows) - len(expected)
    assert lab.left_over() == []


KEEP_FIRST = {"unique": ("k",), "on_duplicate": "keep-first"}


@pytest.mark.parametrize(
    ("again", "asked", "reason"),
    [
        (1, {}, "changed in the merge"),
        (1, KEEP_FIRST, "not those that were read"),
        (0, {}, "rows were merged, but"),
        (0, KEEP_FIRST, "rows were merged, but"),
    ],
    ids=["another", "another-beside-losers", "missing", "missing-beside-losers"],
)
def test_a_row_that_goes_astray_in_the_merge_is_noticed_and_nothing_is_published(
    lab: ImportLab,
    monkeypatch: pytest.MonkeyPatch,
    again: int,
    asked: dict[str, Any],
    reason: str,
) -> None:
    read = MergeReader.read

    def mistaken(self: MergeReader, *where: Any) -> Iterator[Chunk]:
        """Without the last row; in its place there may be the first one once more."""
        for chunk in read(self, *where):
            rows = chunk.batch
            pieces = [rows.slice(0, again), rows.slice(0, rows.num_rows - 1)]
            yield Chunk(pa.concat_batches(pieces) if rows.num_rows > 1 else rows, chunk.position)

    lab.write("a.csv", as_csv(some_rows(300, keys=200)))
    right = lab.run("a.csv", **asked, sort_by=("id",), target="iceberg://lake/db.right")
    assert right.state is State.COMPLETED
    monkeypatch.setattr(MergeReader, "read", mistaken)
    job = lab.run("a.csv", **asked, sort_by=("id",))
    assert job.state is State.FAILED
    assert job.error is not None
    assert (job.error.cls, reason in job.error.message) == ("Corrupt", True), job.error.message
    assert lab.rows() == []


def test_rows_that_were_left_out_are_as_many_as_have_lost(
    lab: ImportLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.write("a.csv", as_csv(some_rows(300, keys=200)))
    counted = Dropped.to_json
    monkeypatch.setattr(Dropped, "to_json", lambda self: {**counted(self), "rows": self.rows + 1})
    job = lab.run("a.csv", **KEEP_FIRST)
    assert job.state is State.FAILED
    assert job.error is not None
    assert (job.error.cls, "were left out of the merge" in job.error.message) == ("Corrupt", True)


def test_a_duplicate_fails_the_job_and_both_rows_are_named_by_file_and_line(lab: ImportLab) -> None:
    lab.write("in/a.csv", 'id,k,name\n1,1,"two\nlines"\n2,2,x\n')
    lab.write("in/b.csv", "id,k,name\n3,3,x\n4,2,x\n5,1,x\n")
    job = lab.run("in", unique=("k",))
    assert job.state is State.FAILED
    assert job.error is not None
    assert "2 rows repeat the unique key k" in job.error.message
    assert "b.csv line 3" in job.error.message
    assert "a.csv line 4" in job.error.message
    assert lab.rows() == []


def test_rejected_duplicates_are_in_the_rejects_file_and_count_as_rejects(lab: ImportLab) -> None:
    lab.write("a.csv", "id,k\n1,1\n2,1\n3,2\n")
    rejects = lab.folder / "bad.csv"
    asked: dict[str, Any] = {"unique": ("k",), "on_duplicate": "reject"}
    job = lab.run("a.csv", **asked, max_rejects=1, rejects=str(rejects))
    assert job.state is State.COMPLETED, job.error
    assert sorted(row["id"] for row in lab.rows()) == [1, 3]
    (row,) = csv.DictReader(io.StringIO(rejects.read_text()))
    assert (row["line"], row["column"]) == ("3", "k")
    assert "line 2" in row["reason"]
    assert row["raw"] == "2,1"
    assert tally(job, lab.store).rejected == 1
    lab.write("b.csv", "id,k\n5,5\n6,5\n")
    refused = lab.run("b.csv", **asked)
    assert refused.state is State.FAILED
    assert len(lab.rows()) == 2


@pytest.mark.parametrize(
    ("unique", "known", "said"), [(("k",), 0, "0 duplicates"), ((), None, "duplicates not checked")]
)
def test_whether_keys_were_checked_is_told(
    lab: ImportLab, unique: tuple[str, ...], known: int | None, said: str
) -> None:
    lab.write("a.csv", "id,k\n1,1\n2,2\n")
    job = lab.run("a.csv", unique=unique, sort_by=("k",))
    found = summary(job, lab.store, lab.config)
    assert found is not None
    assert found["duplicates"] == known
    page = [text for part in job_page(job, [], [], 0.0, found) for text in plain_lines(part)]
    assert any(said in text for text in page)


ROWS: list[dict[str, Any]] = [{"id": n, "k": n % 3, "name": 'a "b",\nc'} for n in range(6)]


@pytest.mark.parametrize("format", ["csv", "json", "parquet", "iceberg"])
def test_a_rejected_duplicate_is_listed_with_its_text(lab: ImportLab, format: str) -> None:
    text = as_csv([(row["id"], row["k"], row["name"]) for row in ROWS])
    if format == "csv":
        lab.write("a.csv", text)
    elif format == "json":
        lab.write("a.json", "".join(json.dumps(row) + "\n" for row in ROWS))
    elif format == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), lab.folder / "a.parquet")
    else:
        lab.write("b.csv", text)
        assert lab.run("b.csv", mode="direct", target="iceberg://lake/db.s").state is State.COMPLETED
    rejects = lab.folder / "bad.csv"

    job = lab.run(
        f"a.{format}" if format != "iceberg" else "iceberg://lake/db.s",
        unique=("k",),
        on_duplicate="reject",
        max_rejects=3,
        rejects=str(rejects),
    )

    assert job.state is State.COMPLETED, job.error
    found = list(csv.DictReader(io.StringIO(rejects.read_text())))
    texts = [row["raw"] for row in found]
    if format == "csv":
        again = [next(csv.reader(io.StringIO(raw))) for raw in texts]
        assert again == [[str(value) for value in row.values()] for row in ROWS[3:]]
    else:
        assert [json.loads(raw) for raw in texts] == ROWS[3:]
    if format != "iceberg":  # its rows may stand in any of its files
        assert int(found[0]["line"]) == (8 if format == "csv" else 4)


def _mapped(lab: ImportLab, **options: Any) -> Job:
    """An import of a key that repeats, after its first stage."""
    lab.write("a.csv", "id,v\n1,a\n2,b\n1,second\n")
    job = lab.plan("a.csv", unique=("id",), rejects=str(lab.folder / "bad.csv"), **options)
    while not stage_is_over(job):
        job = lab.round(job)
    return job


@pytest.mark.parametrize("change", ["is gone", "has changed"])
def test_an_input_that_rejects_cannot_be_listed_from_fails_the_job_until_it_is_put_back(
    lab: ImportLab, change: str
) -> None:
    job = _mapped(lab, on_duplicate="reject", max_rejects=5)
    path, aside, rejects = lab.folder / "a.csv", lab.folder / "aside", lab.folder / "bad.csv"
    path.rename(aside)
    if change == "has changed":
        lab.write("a.csv", "id,v\n7,q\n8,r\n9,others\n")

    job = lab.finish(job)

    assert job.state is State.FAILED
    assert job.error is not None
    assert f"{path} {change} since the import was planned" in job.error.message
    assert "lockstep retry" in str(job.error.hint)
    assert (lab.rows(), rejects.exists()) == ([], False)
    aside.rename(path)
    job = lab.finish(lab.store.retry(job.job_id))
    assert job.state is State.COMPLETED, job.error
    (row,) = csv.DictReader(io.StringIO(rejects.read_text()))
    assert (row["line"], row["raw"]) == ("4", "1,second")
    assert row["reason"] == f"the same key as {path} line 2"


def test_an_outage_while_rejects_are_listed_is_tried_again(
    lab: ImportLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _mapped(lab, on_duplicate="reject", max_rejects=5)

    def away(*_: Any) -> Iterator[Any]:
        raise Retryable("the storage answers 503")

    with monkeypatch.context() as patch:
        patch.setattr(FilesInput, "recall", away)
        with pytest.raises(Retryable, match="503"):
            lab.finish(job)
    assert not (lab.folder / "bad.csv").exists()
    job = lab.finish(lab.store.read(job.job_id))
    assert job.state is State.COMPLETED, job.error
    (row,) = csv.DictReader(io.StringIO((lab.folder / "bad.csv").read_text()))
    assert row["raw"] == "1,second"


@pytest.mark.parametrize("policy", ["error", "reject"])
def test_an_input_that_is_gone_does_not_hide_why_a_job_fails(lab: ImportLab, policy: str) -> None:
    job = _mapped(lab, on_duplicate=policy)
    (lab.folder / "a.csv").unlink()
    job = lab.finish(job)
    assert job.state is State.FAILED
    assert job.error is not None
    found = "1 row repeats the unique key id" if policy == "error" else "1 record was rejected"
    assert job.error.message.startswith(found)
    assert job.error.message.endswith(
        f": where cannot be told, because {lab.folder / 'a.csv'} is gone since the import was planned"
    )
    assert "line" not in job.error.message


def test_to_list_rejects_and_duplicates_each_task_is_read_once_and_in_order(
    lab: ImportLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.source.files_text import TextReader

    rows = [f"{n},{n % 900}" if n % 70 else f"{n},many" for n in range(20_000)]
    schema = {"type": "struct", "schema-id": 0, "fields": [_long(1, "id"), _long(2, "k")]}
    lab.write("a.csv", "id,k\n" + "\n".join(rows))
    passes = 0
    blocks = TextReader.blocks

    def counted(self: TextReader, descriptor: Any) -> Any:
        nonlocal passes
        passes += 1
        return blocks(self, descriptor)

    monkeypatch.setattr(TextReader, "blocks", counted)
    rejects = lab.folder / "bad.csv"
    job = lab.plan(
        "a.csv",
        unique=("k",),
        on_duplicate="reject",
        max_rejects=20_000,
        rejects=str(rejects),
        parse=ParseOptions(schema=schema),
    )
    assert job.tasks_total > 2
    assert lab.finish(job).state is State.COMPLETED
    found = list(csv.DictReader(io.StringIO(rejects.read_text())))
    assert passes == job.tasks_total
    assert len(found) == 20_000 - len(lab.rows())
    assert [int(row["line"]) for row in found] == sorted(int(row["line"]) for row in found)
    assert all(row["raw"] == rows[int(row["line"]) - 2] for row in found)


def test_of_far_too_many_duplicates_the_first_ones_are_listed_and_all_are_counted(
    lab: ImportLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(review, "LISTED", 10)
    lab.write("a.csv", "id,k\n" + "".join(f"{n},1\n" for n in range(5000)))
    rejects = lab.folder / "bad.csv"
    job = lab.run("a.csv", unique=("k",), on_duplicate="reject", max_rejects=2, rejects=str(rejects))
    assert job.state is State.FAILED
    assert job.error is not None
    assert "4999 records" in job.error.message
    assert f"10 of them are in {rejects}" in str(job.error.hint)
    lines = [int(row["line"]) for row in csv.DictReader(io.StringIO(rejects.read_text()))]
    assert lines == list(range(3, 13))


@pytest.mark.parametrize("policy", ["error", "keep-first", "keep-last", "reject"])
def test_rows_that_the_table_has_already_always_stay(lab: ImportLab, policy: str) -> None:
    lab.write("a.csv", "id,k\n1,1\n2,2\n")
    assert lab.run("a.csv", unique=("k",)).state is State.COMPLETED
    lab.write("b.csv", "id,k\n3,3\n4,2\n")
    job = lab.run("b.csv", unique=("k",), on_duplicate=policy, max_rejects=1)
    if policy in ("keep-first", "reject"):
        assert job.state is State.COMPLETED, job.error
        assert sorted(row["id"] for row in lab.rows()) == [1, 2, 3]
    else:
        assert job.state is State.FAILED
        assert job.error is not None
        assert "b.csv line 3" in job.error.message
        assert "in the table" in job.error.message
        assert "keep-first" in (job.error.hint or "")
        assert "keep-last" not in (job.error.hint or "")
        assert sorted(row["id"] for row in lab.rows()) == [1, 2]


def test_a_key_that_the_table_itself_repeats_stays_there_and_new_rows_lose_to_it(lab: ImportLab) -> None:
    lab.write("a.csv", "id,k\n1,1\n2,1\n3,2\n")
    assert lab.run("a.csv", mode="direct").state is State.COMPLETED
    lab.write("b.csv", "id,k\n4,1\n5,1\n6,3\n")
    job = lab.run("b.csv", unique=("k",), on_duplicate="keep-first")
    assert job.state is State.COMPLETED, job.error
    assert sorted(row["id"] for row in lab.rows()) == [1, 2, 3, 6]
    assert tally(job, lab.store).duplicates == 2


def test_null_is_no_key(lab: ImportLab) -> None:
    lab.write("a.csv", "id,k\n1,\n2,\n3,7\n")
    assert lab.run("a.csv", unique=("k",)).state is State.COMPLETED
    assert sorted(row["id"] for row in lab.rows()) == [1, 2, 3]


@pytest.mark.parametrize(("theirs", "fits"), [("id,k\n9,2\n", False), ("id,k\n9,3\n", True)])
@pytest.mark.parametrize("empty", [True, False], ids=["empty", "not-empty"])
def test_a_key_that_somebody_publishes_while_ours_is_merged_is_noticed_before_the_commit(
    lab: ImportLab, theirs: str, fits: bool, empty: bool
) -> None:
    if not empty:
        lab.write("first.csv", "id,k\n7,1\n")
        assert lab.run("first.csv", mode="direct").state is State.COMPLETED
    lab.write("a.csv", "id,k\n1,1\n2,2\n3,1\n")
    lab.write("b.csv", theirs)
    job = lab.plan("a.csv", unique=("k",), on_duplicate="keep-first")
    while job.state is not State.COMMITTING:
        job = lab.round(job, commit=False)
    assert lab.run("b.csv", mode="direct").state is State.COMPLETED

    job = lab.finish(job)

    assert job.state is (State.COMPLETED if fits else State.FAILED), job.error
    ours = ([1, 2] if empty else [2]) if fits else []
    assert sorted(row["id"] for row in lab.rows()) == [*ours, *([] if empty else [7]), 9]
    if not fits:
        assert job.error is not None
        assert "a.csv line 3" in job.error.message


def test_a_key_that_somebody_publishes_meanwhile_is_nothing_to_rows_that_lost_before(lab: ImportLab) -> None:
    lab.write("first.csv", "id,k\n7,1\n")
    assert lab.run("first.csv", mode="direct").state is State.COMPLETED
    lab.write("a.csv", "id,k\n1,1\n2,2\n")
    lab.write("b.csv", "id,k\n9,1\n")
    job = lab.plan("a.csv", unique=("k",), on_duplicate="keep-first")
    while job.state is not State.COMMITTING:
        job = lab.round(job, commit=False)
    assert lab.run("b.csv", mode="direct").state is State.COMPLETED

    job = lab.finish(job)

    assert job.state is State.COMPLETED, job.error
    assert sorted(row["id"] for row in lab.rows()) == [2, 7, 9]


# Other inputs


def test_parquet_files_are_imported_and_sorted(lab: ImportLab) -> None:
    rows = some_rows(2000)
    columns = {name: [row[at] for row in rows] for at, name in enumerate(("id", "k", "name"))}
    pq.write_table(pa.table(columns), lab.folder / "a.parquet", row_group_size=300)
    job = lab.run("a.parquet", sort_by=("k", "id"))
    assert job.state is State.COMPLETED, job.error
    assert [row for file in lab.files() for row in file["id"].to_pylist()] == [r[0] for r in in_order(rows)]


def test_a_backfill_is_a_sorted_copy_of_one_snapshot(lab: ImportLab) -> None:
    rows = some_rows(3000)
    lab.write("a.csv", as_csv(rows))
    first = lab.run("a.csv", mode="direct")
    lab.write("b.csv", as_csv([(9999, 1, "late")]))
    lab.run("b.csv", mode="direct")
    lab.crashes.at = {("map.after_run", 2), ("merge.after_file", 1)}

    job = lab.run(f"{TARGET}@{first.snapshot_id}", target="iceberg://lake/db.by_k", sort_by=("k", "id"))

    assert job.state is State.COMPLETED, job.error
    found = [row for file in lab.files("db.by_k") for row in file["id"].to_pylist()]
    assert found == [row[0] for row in in_order(rows)]
    assert job.fingerprint == first.fingerprint


def test_an_import_whose_table_was_changed_meanwhile_says_to_import_again(lab: ImportLab) -> None:
    lab.write("a.csv", "id,k\n1,2\n")
    job = lab.plan("a.csv")
    with lab.table().update_schema() as change:
        change.add_column("more", StringType())
    ended = lab.finish(job)
    assert ended.state is State.FAILED
    assert ended.error is not None
    assert ended.error.hint is not None
    assert "import the files again to plan it for the table as it is now" in ended.error.hint


def test_of_two_requests_at_the_same_instant_the_later_one_is_told_of_the_job_that_has_its_file(
    lab: ImportLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.write("a.csv", "id,k\n1,2\n")
    first: list[Job] = []

    def other_is_faster(_: str) -> None:
        monkeypatch.undo()
        first.append(lab.plan("a.csv"))

    monkeypatch.setattr(importer, "failpoint", other_is_faster)
    with pytest.raises(Conflict, match=r"a\.csv is being imported into .* by job") as caught:
        lab.plan("a.csv")
    assert caught.value.job_id == first[0].job_id
    assert caught.value.hint == "pass --on-existing skip to leave it out"


def test_a_table_is_not_imported_into_itself_unless_that_is_said(lab: ImportLab) -> None:
    lab.write("a.csv", "id,k\n1,2\n")
    lab.run("a.csv", mode="direct")
    with pytest.raises(Invalid, match="into itself"):
        lab.plan(TARGET)
    assert lab.run(TARGET, on_existing="append").state is State.COMPLETED
    assert len(lab.rows()) == 2


def test_a_copy_can_be_partitioned_in_another_way(lab: ImportLab) -> None:
    rows = some_rows(500)
    lab.write("a.csv", as_csv(rows))
    lab.run("a.csv", mode="direct")
    job = lab.run(TARGET, target="iceberg://lake/db.copy", unique=("id",))
    assert job.state is State.COMPLETED, job.error
    assert sorted(row["id"] for row in lab.rows("db.copy")) == [row[0] for row in rows]
