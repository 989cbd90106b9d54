"""A source in motion, rivals and repeated requests: what a user sees of an export when things move."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog

from lockstep.job import Event, Job, State
from tests import players
from tests.lab import COMMAND, Lab
from tests.players import Troupe
from tests.zygote import Zygote

pytestmark = pytest.mark.servers

_numbers = itertools.count(1)


class Case:
    """A source table and a target of one test's own, in a lab that it shares with others."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.table = f"events_{next(_numbers)}"
        self.target = f"db.{self.table}"

    def arguments(self, *options: str) -> tuple[str, ...]:
        return ("export", self.lab.source(self.table), f"iceberg://lake/{self.target}", *options)

    def detached(self, *options: str) -> list[str]:
        """Ask for an export and leave it to the workers; answers the job ids."""
        document = self.lab.document(*self.arguments("--all", "--create", "--detach", *options))
        return [job["job_id"] for job in document["jobs"]]

    def finish(self) -> list[Job]:
        return [self.lab.wait_for_end(job.job_id) for job in self.lab.jobs(self.target)]


@pytest.fixture
def case(manned_lab: Lab) -> Case:
    case = Case(manned_lab)
    manned_lab.make_events(case.table, parts=3)
    return case


@pytest.fixture
def unmanned(lab: Lab) -> Case:
    """The same in a lab without a worker: nothing runs until the test starts one."""
    case = Case(lab)
    lab.make_events(case.table, parts=3)
    return case


def test_an_export_equals_the_source_for_spark_and_duckdb(
    case: Case, read_with_spark: Callable[[str], pa.Table]
) -> None:
    case.detached()
    (job,) = case.finish()
    assert job.state is State.COMPLETED
    case.lab.assert_exact(table=case.table, target=case.target)
    rows = read_with_spark(case.lab.table(case.target).metadata_location)
    picked = rows.select(["id", "name", "amount", "note"]).sort_by("id").to_pylist()
    assert [tuple(row.values()) for row in picked] == case.lab.source_rows(case.table)


def test_what_was_there_when_the_job_was_created_is_exported_whatever_moves_afterwards(
    unmanned: Case,
) -> None:
    lab, table = unmanned.lab, unmanned.table
    before = lab.source_rows(table)
    unmanned.detached()
    lab.sql(f"SYSTEM START MERGES {lab.database}.{table}")
    lab.sql(f"INSERT INTO {table} SELECT number + 90000, '2024-01-05', 'later', 1, NULL FROM numbers(10)")
    lab.sql(f"OPTIMIZE TABLE {table} FINAL")
    lab.sql(f"ALTER TABLE {table} UPDATE name = 'changed' WHERE id % 2 = 0 SETTINGS mutations_sync = 2")
    lab.sql(f"DELETE FROM {table} WHERE id % 3 = 0")
    lab.sql(f"ALTER TABLE {table} MODIFY TTL ts + INTERVAL 1 DAY")
    lab.sql(f"OPTIMIZE TABLE {table} FINAL")
    assert lab.source_rows(table) != before
    lab.work_off()
    assert lab.target_rows(unmanned.target) == before
    assert lab.pins() == []


def test_rows_inserted_after_the_job_was_created_come_with_the_next_replace(case: Case) -> None:
    lab, table = case.lab, case.table
    before = lab.source_rows(table)
    case.detached()
    lab.sql(f"INSERT INTO {table} SELECT number + 90000, '2024-01-05', 'later', 1, NULL FROM numbers(10)")
    case.finish()
    assert lab.target_rows(case.target) == before
    case.detached("--on-existing", "replace")
    case.finish()
    lab.assert_exact(jobs=2, table=table, target=case.target)


def test_a_dropped_source_returns_at_once_and_the_job_completes_from_its_pin(unmanned: Case) -> None:
    lab = unmanned.lab
    before = lab.source_rows(unmanned.table)
    unmanned.detached()
    lab.sql(f"DROP TABLE {unmanned.table} SYNC")
    lab.work_off()
    assert lab.target_rows(unmanned.target) == before
    assert lab.pins() == []


def test_a_corrupt_part_fails_the_job_names_the_part_and_publishes_nothing(case: Case) -> None:
    lab = case.lab
    parts = lab.clickhouse.query(
        "SELECT name, path FROM system.parts WHERE active AND database = {db:String} AND table = {t:String}",
        parameters={"db": lab.database, "t": case.table},
    ).result_rows
    name, path = sorted(tuple(part) for part in parts)[1]
    victim = Path(path) / "name.bin"
    body = bytearray(victim.read_bytes())
    body[len(body) // 2] ^= 0xFF
    victim.write_bytes(body)
    case.detached()
    (job,) = case.finish()
    assert job.state is State.FAILED
    assert job.error is not None
    assert job.error.cls == "Corrupt"
    assert name in job.error.message
    assert lab.lineage(case.target) == []


def test_the_same_partition_asked_for_twice_at_once_is_one_job_and_one_conflict(unmanned: Case) -> None:
    lab = unmanned.lab
    lab.ok(*unmanned.arguments("--all", "--create", "--detach"))
    (first,) = lab.jobs()
    lab.store().stop(first.job_id, Event.KILL)
    command = [COMMAND, *unmanned.arguments("--partition", "202401", "--detach", "--json")]
    twins = [
        subprocess.Popen(command, cwd=lab.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    codes = sorted(twin.wait(timeout=150) for twin in twins)
    for twin in twins:
        twin.communicate()
    assert codes == [0, 3]
    assert len([job for job in lab.jobs() if job.state.live]) == 1
    assert len(lab.pins()) == 2, "the refused twin has left its pin, or the killed job's pin is gone early"


def test_replace_while_the_first_job_is_in_flight_leaves_the_rows_there_once(unmanned: Case) -> None:
    lab = unmanned.lab
    (first,) = unmanned.detached()
    refused = lab.run(*unmanned.arguments("--all", "--on-existing", "append", "--detach"))
    assert refused.returncode == 3
    assert first in refused.stderr
    (second,) = unmanned.detached("--on-existing", "replace")
    assert lab.store().read(first).state is State.KILLED
    lab.work_off()
    assert lab.store().read(second).state is State.COMPLETED
    lab.assert_exact(table=unmanned.table, target=unmanned.target)


def test_replace_fences_a_first_job_that_sleeps_in_its_commit(
    unmanned: Case, tmp_path: Path, zygote: Zygote
) -> None:
    lab, troupe = unmanned.lab, Troupe(zygote, tmp_path)
    (first,) = unmanned.detached()
    committer = troupe.play(players.work, first, failpoints="commit.before_publish=sleep:6")
    try:
        troupe.wait_for("commit.before_publish")
        # However slow the others are, it does not wake up before they are done.
        lab.freeze_group(committer.pid)
        (second,) = unmanned.detached("--on-existing", "replace")
        assert lab.is_fenced(lab.store().read(first), unmanned.target)
        lab.work_off()
        os.killpg(committer.pid, signal.SIGCONT)
        assert committer.wait() == 0, troupe.said()
    finally:
        committer.kill_group()
    assert lab.store().read(first).state is State.KILLED
    assert lab.store().read(second).state is State.COMPLETED
    lab.assert_exact(table=unmanned.table, target=unmanned.target)


def test_append_adds_the_rows_again_and_replace_makes_them_one(case: Case) -> None:
    lab = case.lab
    rows = lab.source_rows(case.table)
    case.detached()
    case.finish()
    assert lab.run(*case.arguments("--all", "--detach")).returncode == 3
    assert lab.document(*case.arguments("--all", "--on-existing", "skip", "--detach"))["jobs"] == []
    case.detached("--on-existing", "append")
    case.finish()
    assert lab.target_rows(case.target) == sorted([*rows, *rows])
    case.detached("--on-existing", "replace")
    case.finish()
    assert lab.target_rows(case.target) == rows
    assert len(lab.lineage(case.target)) == 3


def test_a_part_and_its_partition_conflict_and_skip_exports_the_rest(case: Case) -> None:
    lab = case.lab
    parts = [
        part["name"]
        for partition in lab.document("partitions", lab.source(case.table), "--parts")["partitions"]
        for part in partition["parts"]
    ]
    one = lab.document(*case.arguments("--part", parts[0], "--create", "--detach"))["jobs"][0]["job_id"]
    refused = lab.run(*case.arguments("--partition", "202401", "--detach"))
    assert refused.returncode == 3
    assert one in refused.stderr
    case.finish()
    assert len(lab.target_rows(case.target)) == 1000
    case.detached("--on-existing", "skip")
    case.finish()
    lab.assert_exact(jobs=2, table=case.table, target=case.target)
    assert lab.run(*case.arguments("--part", parts[1], "--detach")).returncode == 3


def test_a_worker_that_slept_longer_than_its_lease_changes_nothing_when_it_wakes(unmanned: Case) -> None:
    lab = unmanned.lab
    unmanned.detached("--file-size", "30KB")
    with lab.started("worker", failpoints="write.after_file=sleep:12") as sleeper:
        lab.wait_until(lambda: any(task.attempts for task in lab.store().tasks(lab.jobs()[0].job_id)))
        lab.freeze(sleeper)
        lab.work_off()
        job = lab.jobs()[0]
        assert job.state is State.COMPLETED
        os.killpg(sleeper.pid, signal.SIGCONT)
        assert sleeper.poll() is None
        lab.document("jobs")
        sleeper.send_signal(signal.SIGINT)
        sleeper.wait(timeout=60)
    assert lab.store().read(job.job_id) == job
    lab.assert_exact(table=unmanned.table, target=unmanned.target)


def test_a_paused_job_stops_keeps_its_checkpoint_and_goes_on(unmanned: Case) -> None:
    lab = unmanned.lab
    (job_id,) = unmanned.detached()
    lab.ok("pause", job_id)
    lab.work_off()
    assert lab.store().read(job_id).state is State.PAUSED
    assert lab.lineage(unmanned.target) == []
    lab.ok("resume", job_id)
    lab.work_off()
    lab.assert_exact(table=unmanned.table, target=unmanned.target)


def test_hostile_names_and_values_are_exported_exactly(
    manned_lab: Lab, read_with_duckdb: Callable[[str], pa.Table]
) -> None:
    """Column names and partition values that look like paths, SQL and nothing at all."""
    lab = manned_lab
    columns = ["a.b", 'it\'s `quoted` "twice"', "drop table x; --", "🎈", "select"]
    values = ["/", "..", "../../etc", "%2F", "two\nlines", "", "a=b", "∅", " ", None]
    declared = ", ".join(f"`{name.replace('`', '``')}` Int64" for name in columns)
    lab.sql(
        f"CREATE TABLE hostile (region Nullable(String), {declared}) ENGINE = MergeTree PARTITION BY region"
        " ORDER BY tuple() SETTINGS allow_nullable_key = 1"
    )
    for number, value in enumerate(values):
        cells = ", ".join(str(number) for _ in columns)
        lab.clickhouse.command(
            f"INSERT INTO {lab.database}.hostile SELECT {{v:Nullable(String)}}, {cells}",
            parameters={"v": value},
        )
    document = lab.document(
        "export", lab.source("hostile"), "iceberg://lake/db.hostile", "--all", "--create", "--detach"
    )
    for job in document["jobs"]:
        ended = lab.wait_for_end(job["job_id"])
        assert ended.state is State.COMPLETED, ended.error
    rows = read_with_duckdb(lab.table("db.hostile").metadata_location)
    assert rows.column_names == ["region", *columns]
    found = sorted(zip(rows["a.b"].to_pylist(), rows["region"].to_pylist(), strict=True))
    assert found == list(enumerate(values))
    location = Path(lab.table("db.hostile").location().removeprefix("file://")).resolve()
    for file in lab.table("db.hostile").inspect.files()["file_path"].to_pylist():
        assert Path(file.removeprefix("file://")).resolve().is_relative_to(location / "data")


def test_an_iceberg_table_is_exported_by_partition_as_it_was_when_asked(
    manned_lab: Lab, read_with_duckdb: Callable[[str], pa.Table]
) -> None:
    lab = manned_lab
    rows = pa.table({"region": ["eu", "us", "eu", None] * 500, "id": list(range(2000))})
    catalog = load_catalog("lake", **lab.config.catalogs["lake"])
    catalog.create_namespace_if_not_exists("db")
    table = catalog.create_table("db.origin", rows.schema)
    with table.update_spec() as spec:
        spec.add_identity("region")
    table.append(rows)
    table.delete("id >= 100 and id < 150")
    request = ("export", "iceberg://lake/db.origin", "iceberg://lake/db.copy", "--all", "--create")
    planned = lab.document(*request, "--detach")
    table.append(rows)
    states = {job["partition"]: lab.wait_for_end(job["job_id"]).state for job in planned["jobs"]}
    assert states == dict.fromkeys(["region=eu", "region=us", "region=null"], State.COMPLETED)
    found = read_with_duckdb(lab.table("db.copy").metadata_location)
    kept = [row for row in rows.to_pylist() if not 100 <= row["id"] < 150]
    assert sorted(found.to_pylist(), key=lambda row: row["id"]) == kept
    assert len(lab.lineage("db.copy")) == 3
    refused = lab.run(*request)
    assert refused.returncode == 3, refused.stderr


REFUSALS = {
    "an unknown partition": (("--partition", "209901"), "209901"),
    "an unknown part": (("--part", "202401_9_9_0"), "202401_9_9_0"),
    "nothing": ((), "--partition"),
    "two choices": (("--all", "--partition", "202401"), "exclude"),
    "several target partitions": (("--all",), "spans several partitions"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_refused_request_leaves_no_job_no_table_and_no_pin(manned_lab: Lab, what: str) -> None:
    options, reason = REFUSALS[what]
    case = Case(manned_lab)
    manned_lab.make_events(case.table, parts=1, rows=10)
    pins = manned_lab.pins()
    if what == "several target partitions":
        manned_lab.make_target(case.target, "bucket[16]", "id")
    else:
        options = (*options, "--create")
    done = manned_lab.run(*case.arguments(*options))
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert manned_lab.jobs(case.target) == []
    assert manned_lab.pins() == pins
    assert manned_lab.has_table(case.target) == (what == "several target partitions")


PROGRAM = """
from pyspark.sql import SparkSession

import lockstep

spark = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false").getOrCreate()
job = lockstep.export("parquet:src", "iceberg://lake/db.api", everything=True, create=True)
assert job.state == "pending"
job.wait()
print(job.state, job.snapshot_id, job.jobs[0].rows_done, spark.range(7).count())
try:
    lockstep.export("parquet:src", "iceberg://lake/db.api", everything=True)
except lockstep.Conflict as conflict:
    print(conflict.job_id == job.job_id)
"""


def test_the_python_api_exports_a_parquet_folder_on_the_session_of_its_program(
    lab: Lab, read_with_duckdb: Callable[[str], pa.Table]
) -> None:
    rows = pa.table({"id": list(range(1000)), "name": [f"name {n}" for n in range(1000)]})
    (lab.folder / "src").mkdir()
    pq.write_table(rows.slice(0, 600), lab.folder / "src" / "a.parquet")
    pq.write_table(rows.slice(600), lab.folder / "src" / "b.parquet")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=lab.folder,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (job,) = lab.jobs("db.api")
    assert done.stdout.split() == ["completed", str(job.snapshot_id), "1000", "7", "True"]
    assert (
        read_with_duckdb(lab.table("db.api").metadata_location).sort_by("id").to_pydict() == rows.to_pydict()
    )
