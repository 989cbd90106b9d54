"""One attempt's way from its rows to its files: the same promises for each kind of job, and for both sinks.

Exports and direct imports write data files, sorted imports and backfills write runs. Each of the two sinks
must keep position and files in lock step, whoever reads and whoever dies.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog

from lockstep import exporter, importer
from lockstep.errors import Fenced
from lockstep.exporter import ExportRequest, plan_export
from lockstep.job import DATA, RUN, Event, Fingerprint, Job, StagedFile, State
from tests.import_lab import TARGET, Crash, ImportLab, StoreLink, armed

pytestmark = pytest.mark.long

ROWS = 30_000
ROWS_READ = pa.table(
    {
        "k": pa.array([n * 7919 % 1000 for n in range(ROWS)], pa.int64()),
        "n": pa.array(range(ROWS), pa.int64()),
    }
)
CASES = {
    "an export to data files": "write",
    "an import to data files": "write",
    "an import to sorted runs": "map",
    "a backfill to data files": "write",
    "a backfill to sorted runs": "map",
}
FILE_BYTES = 8_000


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImportLab:
    """One task with little memory, so that it writes several files."""
    one_task(monkeypatch)
    lab = ImportLab(tmp_path, 'task_memory = "160KB"')
    (tmp_path / ".lockstep").mkdir(exist_ok=True)
    return lab


def one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importer, "SHARES", 1)
    monkeypatch.setattr(exporter, "BYTES_PER_FILE_BYTE", 1000)


def planned(lab: ImportLab, case: str) -> Job:
    if case.startswith("an export"):
        folder = lab.folder / "parts"
        folder.mkdir()
        pq.write_table(ROWS_READ, folder / "a.parquet", row_group_size=1000)
        request = ExportRequest(
            f"parquet://{folder}", TARGET, everything=True, create=True, file_size_bytes=FILE_BYTES
        )
        (job,) = plan_export(request, lab.config, lab.store, lab.clock).jobs
        return job
    how = {"mode": "direct"} if CASES[case] == "write" else {"sort_by": ("k",)}
    return lab.plan(inputs(lab, case), file_size_bytes=FILE_BYTES, **how)


def inputs(lab: ImportLab, case: str) -> str:
    if case.startswith("an import"):
        lab.write("a.csv", "k,n\n" + "".join(f"{row['k']},{row['n']}\n" for row in ROWS_READ.to_pylist()))
        return "a.csv"
    catalog = load_catalog("lake", **lab.config.catalogs["lake"])
    catalog.create_namespace_if_not_exists("db")
    table = catalog.create_table("db.source", ROWS_READ.schema)
    table.append(ROWS_READ)
    return "iceberg://lake/db.source"


def in_file(file: StagedFile) -> list[int]:
    path = file.path.removeprefix("file://")
    if file.kind == DATA:
        return list(pq.read_table(path)["n"].to_pylist())
    assert file.kind == RUN
    with pa.OSFile(path) as opened:
        return list(pa.ipc.open_file(opened).read_all()["n"].to_pylist())


def listed(lab: ImportLab, job: Job, stage: str) -> list[StagedFile]:
    return list(lab.store.manifest(job.job_id, stage))


def rows_listed(lab: ImportLab, job: Job, stage: str) -> list[int]:
    return sorted(n for file in listed(lab, job, stage) for n in in_file(file))


def all_files(lab: ImportLab, job: Job) -> set[str]:
    return {f"file://{path}" for path in lab.folder.rglob(f"lockstep-{job.job_id}-*") if path.is_file()}


def in_table(lab: ImportLab) -> list[int]:
    return sorted(row["n"] for row in lab.rows())


each_case = pytest.mark.parametrize(
    ("case", "stage"), CASES.items(), ids=[c.replace(" ", "-") for c in CASES]
)


@each_case
def test_whenever_an_attempt_dies_its_files_hold_exactly_the_rows_up_to_its_position(
    lab: ImportLab, case: str, stage: str
) -> None:
    job = planned(lab, case)
    lab.crashes.at = {(f"{stage}.after_checkpoint", visit) for visit in (1, 2, 3)}
    seen = []
    while lab.crashes.passed[f"{stage}.after_checkpoint"] < 3:
        with pytest.raises(Crash), armed(lab.crashes):
            lab.round(job)
        found = rows_listed(lab, job, stage)
        assert found == list(range(len(found))), "the beginning of the input, each row once"
        seen.append(len(found))
        lab.clock.at += 60
    assert 0 < seen[0] < seen[1] < seen[2] < ROWS

    assert lab.finish(lab.store.read(job.job_id)).state is State.COMPLETED
    assert sum(file.rows for file in listed(lab, job, stage)) == ROWS
    assert in_table(lab) == list(range(ROWS))


@each_case
def test_a_file_that_no_checkpoint_lists_does_not_count(lab: ImportLab, case: str, stage: str) -> None:
    job = planned(lab, case)
    finished = "map.after_run" if stage == "map" else "write.after_file"
    lab.crashes.at = {(finished, 1)}
    with pytest.raises(Crash), armed(lab.crashes):
        lab.round(job)
    orphans = all_files(lab, job)
    assert orphans
    assert listed(lab, job, stage) == []
    lab.clock.at += 60

    assert lab.finish(lab.store.read(job.job_id)).state is State.COMPLETED
    assert orphans.isdisjoint(file.path for file in listed(lab, job, stage))
    assert in_table(lab) == list(range(ROWS))


@each_case
def test_a_paused_attempt_keeps_what_it_has_read_and_goes_on_from_there(
    lab: ImportLab, case: str, stage: str
) -> None:
    job = planned(lab, case)
    lab.pause_asked = True
    lab.round(job)
    lab.pause_asked = False
    found = rows_listed(lab, job, stage)
    assert 0 < len(found) < ROWS
    assert found == list(range(len(found)))
    lab.store.resume(job.job_id)

    assert lab.finish(lab.store.read(job.job_id)).state is State.COMPLETED
    assert in_table(lab) == list(range(ROWS))


@each_case
def test_an_attempt_that_lost_its_lease_can_list_nothing_any_more(
    lab: ImportLab, case: str, stage: str
) -> None:
    job = planned(lab, case)
    (claim,) = lab.store.claim("slow", 1, 30, {job.job_id})
    late = StoreLink(lab.store, claim)
    lab.clock.at += 60
    assert lab.finish(job).state is State.COMPLETED
    files = listed(lab, job, stage)
    for verb in (late.checkpoint, late.finish):
        with pytest.raises(Fenced):
            verb({"late": True}, files[:1])
    assert listed(lab, job, stage) == files
    assert in_table(lab) == list(range(ROWS))


@each_case
def test_an_attempt_of_a_killed_job_stops_and_publishes_nothing(
    lab: ImportLab, case: str, stage: str
) -> None:
    job = planned(lab, case)
    lab.crashes.at = {(f"{stage}.after_checkpoint", 1)}
    with pytest.raises(Crash), armed(lab.crashes):
        lab.round(job)
    lab.store.stop(job.job_id, Event.KILL)
    lab.clock.at += 60
    with suppress(Fenced):
        lab.round(lab.store.read(job.job_id))
    assert lab.store.read(job.job_id).state is State.KILLED
    assert in_table(lab) == []


def test_every_kind_of_job_has_the_same_fingerprint_for_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_task(monkeypatch)
    found: dict[str, Fingerprint] = {}
    kinds: Counter[str] = Counter()
    for number, (case, stage) in enumerate(CASES.items()):
        folder = tmp_path / str(number)
        (folder / ".lockstep").mkdir(parents=True)
        lab = ImportLab(folder, 'task_memory = "160KB"')
        job = lab.finish(planned(lab, case))
        assert job.fingerprint is not None
        found[case] = job.fingerprint
        kinds.update(file.kind for file in listed(lab, job, stage))
    assert len({fingerprint.to_json()["rows"] for fingerprint in found.values()}) == 1
    assert all(fingerprint == found["an import to sorted runs"] for fingerprint in found.values()), found
    assert set(kinds) == {DATA, RUN}
