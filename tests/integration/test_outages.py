"""Storage and catalogs that go away, hang, lie and come back, as a user of real processes sees it.

Tasks run in forked processes in Spark's place. Budgets and timeouts are short, so that outages can be.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.job import Job, Json, State, Task, TaskState
from tests.catalog_faults import CatalogFaults
from tests.kills import kill_in_time
from tests.lab import Lab, picked
from tests.object_servers import Minio, RestCatalog, Toxiproxy, s3_properties, spark_properties
from tests.players import Troupe, command, toil, toil_on_a_small_disk, toil_to_the_gate
from tests.readers import SparkReader
from tests.zygote import Zygote

# Real outages on a machine that may be busy with other tests.
pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

LIMITS = {"lease_s": 3, "task_attempts": 40, "task_deadline_s": 300, "commit_attempts": 60}
IMPATIENT = {"timeout": "2s", "connect_timeout": "1s", "retry_timeout": "2", "max_retries": "2"}
WAIT_S = 180.0
"""For what takes some seconds on an idle machine."""


class Ground:
    """A lab with a lake in a bucket, its processes, and the command as a person calls it."""

    def __init__(self, lab: Lab, zygote: Zygote, catalog: dict[str, str]) -> None:
        self.lab = lab
        self.troupe = Troupe(zygote, lab.folder)
        self._catalog = catalog

    def export(self, *options: str, table: str = "events") -> list[str]:
        """Ask for an export and leave it to the workers; answers the job ids."""
        target = "iceberg://lake/db.events"
        document = self.lab.document("export", self.lab.source(table), target, "--detach", *options)
        return [job["job_id"] for job in document["jobs"]]

    @contextmanager
    def worker(self, play: Any = toil, *arguments: str) -> Iterator[None]:
        worker = self.troupe.play(play, *arguments)
        try:
            yield
        finally:
            worker.kill_group()

    def says(self, *arguments: str) -> float:
        """Run a command that must succeed; answers how long it took."""
        begun = time.monotonic()
        assert self.troupe.play(command, *arguments).wait(60) == 0, self.troupe.said()
        return time.monotonic() - begun

    def tasks(self, state: TaskState) -> dict[tuple[str, int], Task]:
        found = [task for job in self.lab.jobs() for task in self.lab.store().tasks(job.job_id)]
        return {(task.job_id, task.index): task for task in found if task.state is state}

    def wait_for_a_waiting_task(self) -> Json:
        """What `show` says of one that waits for its next try. Soon it is tried again, and waits again."""
        found: list[Json] = []

        def shown() -> bool:
            for job in self.lab.jobs():
                if job.tasks_waiting_for_retry:
                    found.extend(self.lab.document("show", job.job_id)["waiting"])
            return bool(found)

        self.lab.wait_until(shown, WAIT_S)
        return found[0]

    def wait_for_ends(self, jobs: list[str]) -> list[Job]:
        return [self.lab.wait_for_end(job_id, WAIT_S) for job_id in jobs]

    def rows(self, spark: SparkReader) -> list[tuple[Any, ...]]:
        return picked(spark.read_from("lake", spark_properties(self._catalog), "db.events"))

    def assert_exact(self, spark: SparkReader, rows: list[tuple[Any, ...]]) -> None:
        """Each row once, one snapshot for each completed job, in one line."""
        assert self.rows(spark) == rows
        completed = [job for job in self.lab.jobs() if job.state is State.COMPLETED]
        assert sorted(self.lab.lineage()) == sorted(job.snapshot_id or 0 for job in completed)


def ground_on(folder: Path, chdb: Path, zygote: Zygote, url: str, minio: Minio, **limits: Any) -> Ground:
    """A lake whose storage is reached under `url`; its catalog is a SQLite file."""
    bucket = folder.name.replace("_", "-")[:50]
    minio.make_bucket(bucket)
    catalog = {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"s3://{bucket}/warehouse",
        **s3_properties(url),
    }
    settings = {"catalogs.lake": catalog, f'storage."s3://{bucket}"': {**minio.options(url), **IMPATIENT}}
    lab = Lab(folder, chdb, limits={**LIMITS, **limits}, settings=settings, zygote=zygote)
    return Ground(lab, zygote, {**catalog, "s3.endpoint": minio.url})


@pytest.fixture
def mortal_minio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Minio]:
    """One that the test may kill."""
    server = Minio(tmp_path_factory.mktemp("mortal-minio"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def ground(tmp_path: Path, chdb_folder: Path, zygote: Zygote, mortal_minio: Minio) -> Iterator[Ground]:
    ground = ground_on(tmp_path, chdb_folder, zygote, mortal_minio.url, mortal_minio)
    yield ground
    ground.lab.close()


def test_a_storage_that_dies_midway_and_comes_back_costs_nothing_but_time(
    ground: Ground, mortal_minio: Minio, spark: SparkReader
) -> None:
    """Ten parts in five partitions; everything that a user does meanwhile works."""
    lab, store = ground.lab, ground.lab.store()
    lab.make_events(partitions=5, parts=2, rows=4000)
    lab.make_events("late", parts=0)
    lab.sql("INSERT INTO late SELECT number + 1000000, '2024-01-05', 'late', 1, NULL FROM numbers(100)")
    first = ground.export("--all", "--create", "--file-size", "20KB")
    with ground.worker(toil_to_the_gate, "2"):
        lab.wait_until(lambda: len(ground.tasks(TaskState.DONE)) == 2, WAIT_S)
        mortal_minio.kill()
        done = ground.tasks(TaskState.DONE)
        ground.troupe.open_the_gate()

        about = ground.wait_for_a_waiting_task()
        assert about["error"]["class"] == "Retryable"
        assert "cannot be reached" in about["error"]["message"]
        assert about["since"] < about["next_attempt_at"]

        victim, paused = [job.job_id for job in lab.jobs() if job.state is State.RUNNING][:2]
        assert ground.says("jobs") < 10
        assert ground.says("pause", paused) < 10
        kill_in_time(lab, ground.troupe, victim)
        killed = store.read(victim)

        rows = [row for row in lab.source_rows() if not _is_of(row, killed)] + lab.source_rows("late")
        late = ground.export("--all", table="late")
        lab.sql("DROP TABLE events SYNC")

        mortal_minio.start()
        ground.says("resume", paused)
        ended = ground.wait_for_ends([*first, *late])
    assert {job.job_id for job in ended if job.state is not State.COMPLETED} == {victim}
    ground.assert_exact(spark, sorted(rows))
    redone = ground.tasks(TaskState.DONE)
    assert {key: redone[key].epoch for key in done} == {key: task.epoch for key, task in done.items()}
    assert {key: redone[key].files for key in done} == {key: task.files for key, task in done.items()}


def _is_of(row: tuple[Any, ...], job: Job) -> bool:
    """True for a row of the job's partition: `make_events` counts ids through the months."""
    month = int(str(job.plan.partition)[-2:])
    return int(row[0]) // 8000 == month - 1


def test_a_storage_that_stays_away_fails_the_jobs_and_a_retry_goes_on_from_what_is_finished(
    tmp_path: Path, chdb_folder: Path, zygote: Zygote, mortal_minio: Minio, spark: SparkReader
) -> None:
    ground = ground_on(tmp_path, chdb_folder, zygote, mortal_minio.url, mortal_minio, task_attempts=3)
    lab = ground.lab
    lab.make_events(partitions=2, parts=4, rows=4000)
    jobs = ground.export("--all", "--create", "--file-size", "20KB")
    with ground.worker(toil_to_the_gate, "2"):
        lab.wait_until(lambda: len(ground.tasks(TaskState.DONE)) == 2, WAIT_S)
        mortal_minio.kill()
        done = ground.tasks(TaskState.DONE)
        ground.troupe.open_the_gate()
        failed = ground.wait_for_ends(jobs)
        assert {job.state for job in failed} == {State.FAILED}
        for job in failed:
            assert job.error is not None
            assert "cannot be reached" in job.error.message
            assert "nothing was published" in ground.lab.ok("show", job.job_id)
        assert all(task.attempts <= 3 for task in ground.tasks(TaskState.FAILED).values())
        mortal_minio.start()
        for job in failed:
            ground.says("retry", job.job_id)
        assert {job.state for job in ground.wait_for_ends(jobs)} == {State.COMPLETED}
    ground.assert_exact(spark, lab.source_rows())
    redone = ground.tasks(TaskState.DONE)
    assert {key: redone[key].epoch for key in done} == {key: task.epoch for key, task in done.items()}
    lab.close()


def test_a_hundred_exports_asked_for_while_storage_is_away_all_run_when_it_is_back(
    ground: Ground, mortal_minio: Minio, spark: SparkReader
) -> None:
    """Ninety of one command, and ten commands at the same time."""
    lab = ground.lab
    lab.make_events(rows=10, parts=1)
    (known,) = ground.export("--all", "--create")
    lab.sql(
        "CREATE TABLE many (id UInt64, ts DateTime('UTC'), name String, amount Decimal(18, 4),"
        " note Nullable(String)) ENGINE = MergeTree PARTITION BY toYYYYMMDD(ts) ORDER BY id"
    )
    lab.sql(
        "INSERT INTO many SELECT number + 1000, makeDateTime(2025, intDiv(number, 28) + 1, number % 28 + 1,"
        " 0, 0, 0, 'UTC'), 'x', 1, NULL FROM numbers(100)"
    )
    days = [f"2025{month:02}{day:02}" for month in range(1, 5) for day in range(1, 29)][:100]
    mortal_minio.kill()
    with ground.worker():
        ground.export(*(option for day in days[:90] for option in ("--partition", day)), table="many")
        request = ("export", lab.source("many"), "iceberg://lake/db.events", "--detach", "--partition")
        callers = [ground.troupe.play(command, *request, day) for day in days[90:]]
        assert [caller.wait(WAIT_S) for caller in callers] == [0] * 10, ground.troupe.said()
        jobs = [job.job_id for job in lab.jobs() if job.job_id != known]
        assert len(jobs) == 100
        mortal_minio.start()
        ended = ground.wait_for_ends([known, *jobs])
    assert {job.state for job in ended} == {State.COMPLETED}
    ground.assert_exact(spark, [*lab.source_rows(), *lab.source_rows("many")])


def test_a_job_to_another_storage_completes_while_ten_hang_on_theirs(
    ground: Ground, mortal_minio: Minio
) -> None:
    lab = ground.lab
    near = {"uri": f"sqlite:///{lab.folder}/near.db", "warehouse": f"{lab.folder}/near"}
    lab.configure("catalogs.near", type="sql", **near)
    lab.make_events(partitions=10, parts=2, rows=10)
    stuck = ground.export("--all", "--create")
    lab.make_events("healthy", parts=4, rows=100)
    with mortal_minio.frozen(), ground.worker():
        lab.wait_until(lambda: any(job.tasks_waiting_for_retry for job in lab.jobs()), WAIT_S)
        target = "iceberg://near/db.healthy"
        options = ("--all", "--create", "--detach")
        (asked,) = lab.document("export", lab.source("healthy"), target, *options)["jobs"]
        healthy = lab.wait_for_end(asked["job_id"], WAIT_S)
        assert healthy.state is State.COMPLETED, healthy.error
        assert not any(lab.store().read(job_id).tasks_done for job_id in stuck)
        hanging = next(job.job_id for job in lab.jobs() if job.state is State.RUNNING)
        kill_in_time(lab, ground.troupe, hanging)


def test_latency_resets_hangs_and_cut_streams_on_the_way_to_storage_leave_an_export_exact(
    tmp_path: Path,
    chdb_folder: Path,
    zygote: Zygote,
    minio: Minio,
    toxiproxy: Toxiproxy,
    spark: SparkReader,
) -> None:
    way = toxiproxy.proxy(f"minio-{tmp_path.name}", minio.port)
    ground = ground_on(tmp_path, chdb_folder, zygote, way.url, minio)
    lab = ground.lab
    lab.make_events(partitions=3, parts=3, rows=4000)
    jobs = ground.export("--all", "--create", "--file-size", "20KB")
    toxics: list[tuple[str, str, dict[str, int]]] = [
        ("latency", "downstream", {"latency": 200, "jitter": 100}),
        ("reset_peer", "downstream", {"timeout": 0}),
        ("timeout", "upstream", {"timeout": 0}),
        ("bandwidth", "upstream", {"rate": 50}),
        ("limit_data", "downstream", {"bytes": 500}),
        ("slicer", "upstream", {"average_size": 300, "size_variation": 100, "delay": 100}),
    ]
    with ground.worker():
        for kind, stream, attributes in toxics:
            with way.with_toxic(kind, stream, **attributes):
                time.sleep(1.5)
        way.cut()
        time.sleep(1.5)
        way.mend()
        ended = ground.wait_for_ends(jobs)
    assert {job.state for job in ended} == {State.COMPLETED}, [job.error for job in ended]
    ground.assert_exact(spark, lab.source_rows())
    lab.close()


def test_a_catalog_that_answers_500_503_409_hangs_or_cuts_around_the_commit_publishes_each_job_once(
    tmp_path: Path, chdb_folder: Path, zygote: Zygote, rest_catalog: RestCatalog, spark: SparkReader
) -> None:
    faults = CatalogFaults(rest_catalog.port)
    catalog = {**rest_catalog.properties(faults.url), "rest.request-timeout": "30"}
    lab = Lab(tmp_path, chdb_folder, limits=LIMITS, settings={"catalogs.lake": catalog}, zygote=zygote)
    settings = (tmp_path / "lockstep.toml").read_text()
    (tmp_path / "impatient.toml").write_text(settings.replace('"30"', '"5"'))
    ground = Ground(lab, zygote, rest_catalog.properties())
    lab.make_events(partitions=10, parts=1, rows=10)
    name = f"db.{lab.database}"
    jobs = [
        job["job_id"]
        for job in lab.document(
            "export", lab.source(), f"iceberg://lake/{name}", "--all", "--create", "--detach"
        )["jobs"]
    ]
    with ground.worker(toil, "impatient.toml"):
        ended = ground.wait_for_ends(jobs)
    assert faults.left == []
    assert {job.state for job in ended} == {State.COMPLETED}, [job.error for job in ended]
    rows = spark.read_from("lake", spark_properties(rest_catalog.properties()), name)
    assert picked(rows) == lab.source_rows()
    assert sorted(lab.lineage(name)) == sorted(job.snapshot_id or 0 for job in ended)
    faults.close()
    lab.close()


@pytest.mark.parametrize("what", ["wrong keys", "no bucket"])
def test_what_no_further_try_can_mend_fails_at_once_with_a_hint_and_is_tried_once(
    tmp_path: Path, chdb_folder: Path, zygote: Zygote, minio: Minio, what: str
) -> None:
    ground = ground_on(tmp_path, chdb_folder, zygote, minio.url, minio)
    lab = ground.lab
    lab.make_events(parts=1, rows=100)
    (job_id,) = ground.export("--all", "--create")
    bucket = tmp_path.name.replace("_", "-")[:50]
    settings = lab.folder / "lockstep.toml"
    if what == "wrong keys":
        storage = settings.read_text().rpartition("[storage")
        wrong = storage[2].replace(minio.options()["secret_access_key"], "wrong")
        settings.write_text("".join((*storage[:2], wrong)))
    else:
        (minio.folder / "data" / bucket).rename(minio.folder / f"hidden-{bucket}")
    with ground.worker():
        job = lab.wait_for_end(job_id, WAIT_S)
    assert job.state is State.FAILED
    assert job.error is not None
    assert job.error.cls == "Invalid"
    assert ("403" if what == "wrong keys" else f"there is no bucket {bucket}") in job.error.message
    assert job.error.hint is not None
    assert f'[storage."s3://{bucket}"]' in job.error.hint
    assert [task.attempts for task in lab.store().tasks(job_id)] == [1]
    lab.close()


def test_a_full_disk_fails_at_once_and_a_retry_with_room_completes(lab: Lab, zygote: Zygote) -> None:
    ground = Ground(lab, zygote, {})
    lab.make_events(parts=1, rows=20_000)
    (job_id,) = ground.export("--all", "--create")
    data = lab.folder / ".lockstep" / "warehouse" / "db" / "events" / "data"
    data.mkdir(parents=True, exist_ok=True)
    with ground.worker(toil_on_a_small_disk, str(data), "64k"):
        job = lab.wait_for_end(job_id, WAIT_S)
    assert job.state is State.FAILED
    assert job.error is not None
    assert (job.error.cls, "the disk is full" in job.error.message) == ("Invalid", True), job.error
    assert "make room" in str(job.error.hint)
    assert [task.attempts for task in lab.store().tasks(job_id)] == [1]
    ground.says("retry", job_id)
    with ground.worker():
        assert lab.wait_for_end(job_id, WAIT_S).state is State.COMPLETED
    lab.assert_exact()
