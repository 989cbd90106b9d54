"""Exports from the command line, as a user runs them: real processes, Spark, an embedded ClickHouse."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from lockstep.job import State
from lockstep.source.chdb_launch import connect
from tests.lab import Lab

pytestmark = pytest.mark.servers

TARGET = "iceberg://lake/db.events"
# A task that is about to finish waits long enough for somebody to interfere.
SLOW = "write.before_finish=sleep:60"


@pytest.fixture(scope="module")
def chdb_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chdb") / "data"


@pytest.fixture
def lab(tmp_path: Path, chdb_folder: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path, chdb_folder)
    yield lab
    lab.clickhouse.command(f"DROP DATABASE {lab.database} SYNC")
    lab.clickhouse.close()


@dataclass(frozen=True)
class Exported:
    """A lab whose table was exported once, through an address with a literal password."""

    lab: Lab
    address: str
    password: str
    export: CompletedProcess[str]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, chdb_folder: Path) -> Iterator[Exported]:
    lab = Lab(tmp_path_factory.mktemp("exported"), chdb_folder)
    lab.make_events(partitions=2, parts=2)
    server = connect(chdb_folder)
    address = (
        f"clickhouse://{server.user}:{server.password}@{server.host}:{server.port}/{lab.database}/events"
    )
    export = lab.run("export", address, TARGET, "--all", "--create")
    yield Exported(lab, address, server.password, export)
    lab.clickhouse.command(f"DROP DATABASE {lab.database} SYNC")
    lab.clickhouse.close()


def test_an_export_is_exact_and_ends_with_a_table_of_what_was_done(exported: Exported) -> None:
    done = exported.export
    assert done.returncode == 0, done.stderr
    exported.lab.assert_exact(jobs=2)
    for job in exported.lab.jobs():
        assert job.job_id in done.stdout
        assert str(job.snapshot_id) in done.stdout
    assert "4,000" in done.stdout
    assert "202401: completed 100 %" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_the_documents_of_completed_jobs_are_complete(exported: Exported) -> None:
    documents = exported.lab.document("jobs")
    assert {document["partition"] for document in documents} == {"202401", "202402"}
    for document in documents:
        assert document["state"] == "completed"
        assert document["snapshot_id"] in exported.lab.lineage()
        assert document["progress"] == 1.0
        assert document["rows_done"] == document["rows_total"] == document["fingerprint"]["rows"] == 2000
        assert document["tasks_done"] == document["tasks_total"] > 0
        assert document["files"] > 0
        assert document["bytes_done"] > 0
        assert document["rows_per_s"] > 0
        assert document["eta_s"] is None
        assert document["error"] is None
        assert document["created_at"] <= document["started_at"] <= document["finished_at"]
        assert exported.lab.document("show", document["job_id"])["job_id"] == document["job_id"]


def test_a_literal_password_is_in_no_job_no_message_and_no_log(exported: Exported) -> None:
    shown = exported.export.stdout + exported.export.stderr + exported.lab.ok("jobs", "--json")
    assert exported.password not in shown
    assert "${LOCKSTEP_SECRET_" in shown
    holders = [
        path
        for path in exported.lab.folder.rglob("*")
        if path.is_file() and exported.password.encode() in path.read_bytes()
    ]
    assert holders == [exported.lab.folder / ".lockstep" / "secrets.json"]


def test_the_same_partition_again_is_a_conflict_that_names_the_job(exported: Exported) -> None:
    done = exported.lab.run("export", exported.address, TARGET, "--partition", "202401", "--json")
    error = json.loads(done.stdout)["error"]
    earlier = next(job for job in exported.lab.jobs() if job.plan.partition == "202401")
    assert done.returncode == 3
    assert error["class"] == "Conflict"
    assert error["job_id"] == earlier.job_id
    assert earlier.job_id in error["message"]
    assert exported.password not in done.stdout + done.stderr
    assert len(exported.lab.jobs()) == 2


def test_skip_leaves_out_what_is_there(exported: Exported) -> None:
    done = exported.lab.run("export", exported.address, TARGET, "--all", "--on-existing", "skip", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert document["jobs"] == []
    assert {skipped["partition"] for skipped in document["skipped"]} == {"202401", "202402"}
    assert len(exported.lab.jobs()) == 2


def test_a_dry_run_shows_the_plan_and_creates_nothing(exported: Exported) -> None:
    arguments = ("export", exported.address, "iceberg://lake/db.other", "--all", "--create", "--dry-run")
    text = exported.lab.ok(*arguments)
    plans = exported.lab.document(*arguments)["plans"]
    assert [(plan["partition"], plan["rows"], plan["parts"]) for plan in plans] == [
        ("202401", 2000, 2),
        ("202402", 2000, 2),
    ]
    assert {column["target"] for column in plans[0]["columns"]} == {"id", "ts", "name", "amount", "note"}
    assert "202402" in text
    assert not exported.lab.has_table("db.other")
    assert len(exported.lab.jobs()) == 2
    assert exported.lab.pins() == []


def test_a_kill_after_the_commit_says_that_it_is_too_late(exported: Exported) -> None:
    job = exported.lab.jobs()[0]
    done = exported.lab.run("kill", job.job_id)
    assert done.returncode == 1
    assert f"too late: job {job.job_id} was published as snapshot {job.snapshot_id}" in done.stdout
    assert exported.lab.store().read(job.job_id).state is State.COMPLETED


def test_partitions_lists_rows_and_parts(exported: Exported) -> None:
    document = exported.lab.document("partitions", exported.address)
    text = exported.lab.ok("partitions", exported.lab.source(), "--parts")
    assert [(p["partition"], p["rows"], len(p["parts"])) for p in document["partitions"]] == [
        ("202401", 2000, 2),
        ("202402", 2000, 2),
    ]
    assert document["partitions"][0]["parts"][0]["name"] in text
    assert exported.password not in json.dumps(document)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--partition", "209901"], "209901"),
        (["--part", "nope_1_1_0"], "nope_1_1_0"),
    ],
)
def test_what_is_not_in_the_source_is_refused_and_nothing_is_created(
    exported: Exported, arguments: list[str], said: str
) -> None:
    done = exported.lab.run("export", exported.address, "iceberg://lake/db.other", "--create", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert not exported.lab.has_table("db.other")
    assert exported.lab.pins() == []


def test_a_wrong_password_is_refused_without_showing_it(exported: Exported) -> None:
    wrong = exported.address.replace(exported.password, "guess-1234")
    done = exported.lab.run("export", wrong, TARGET, "--all", "--json")
    assert done.returncode == 2
    assert "guess-1234" not in done.stdout + done.stderr


def test_an_unknown_catalog_and_a_missing_table_are_refused(exported: Exported) -> None:
    for target, said in (("iceberg://pond/db.t", "pond"), ("iceberg://lake/db.missing", "--create")):
        done = exported.lab.run("export", exported.address, target, "--all")
        assert done.returncode == 2
        assert said in done.stderr
    assert len(exported.lab.jobs()) == 2


def test_detached_jobs_wait_can_be_paused_and_are_done_by_a_worker(lab: Lab) -> None:
    lab.make_events(partitions=3, parts=1)
    done = lab.run("export", lab.source(), TARGET, "--all", "--create", "--detach")
    ids = done.stdout.split()
    assert done.returncode == 0
    assert sorted(ids) == sorted(job.job_id for job in lab.jobs())
    assert {job.state for job in lab.jobs()} == {State.PENDING}
    lab.ok("pause", ids[1])
    lab.ok("kill", ids[2])

    document = lab.document("worker", "--once")

    assert {job["job_id"]: job["state"] for job in document["jobs"]} == {
        ids[0]: "completed",
        ids[1]: "paused",
    }
    assert len(lab.lineage()) == 1
    assert lab.run("watch", ids[0]).returncode == 0
    assert lab.run("watch", ids[2]).returncode == 4
    lab.ok("resume", ids[1])
    lab.ok("worker", "--once")
    assert lab.run("watch", ids[1]).returncode == 0
    assert len(lab.lineage()) == 2
    assert lab.pins() == []


def test_ctrl_c_stops_the_work_and_not_the_job(lab: Lab) -> None:
    lab.make_events(parts=2)
    with lab.started("export", lab.source(), TARGET, "--all", "--create", failpoints=SLOW) as process:
        job = lab.wait_for_state(State.RUNNING)
        lab.wait_until(lambda: lab.store().read(job.job_id).rows_done > 0)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "lockstep worker --once" in said
    assert "Traceback" not in said
    assert lab.store().read(job.job_id).state.live
    assert lab.lineage() == []

    lab.ok("worker", "--once")

    lab.assert_exact()
    assert lab.pins() == []


def test_a_kill_from_elsewhere_ends_the_export_with_exit_code_4(lab: Lab) -> None:
    lab.make_events(parts=2)
    with lab.started("export", lab.source(), TARGET, "--all", "--create", failpoints=SLOW) as process:
        job = lab.wait_for_state(State.RUNNING)
        lab.wait_until(lambda: lab.store().read(job.job_id).rows_done > 0)
        lab.ok("kill", "--where", "state=running")
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 4
    assert "was killed" in said
    assert lab.lineage() == []


def test_a_job_that_fails_is_exit_code_1_with_the_reason_and_the_way_on(lab: Lab) -> None:
    lab.make_events(parts=1)
    (job_id,) = lab.run(
        "export", lab.source(), TARGET, "--all", "--create", "--no-pin", "--detach"
    ).stdout.split()
    lab.sql("ALTER TABLE events DROP PARTITION ID '202401'")

    done = lab.run("worker", "--once")

    assert done.returncode == 1
    assert "202401_1_1_0" in done.stdout
    assert "hint: export again" in done.stdout
    assert "lockstep retry" not in done.stdout, "what is gone does not come back"
    assert lab.run("watch", job_id).returncode == 1
    document = lab.document("show", job_id)
    assert document["state"] == "failed"
    assert "202401_1_1_0" in document["error"]["message"]
    assert "202401_1_1_0" in lab.ok("show", job_id)
    assert lab.lineage() == []
