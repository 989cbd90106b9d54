"""A REST catalog on a bad way: slow, resetting, silent. Jobs complete once, or wait and say why.

Spoiled answers around the commit itself are in test_outages.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lockstep.job import Job, State
from tests.kills import kill_in_time
from tests.lab import Lab, picked
from tests.object_servers import Proxy, RestCatalog, Toxiproxy, spark_properties
from tests.players import Troupe, command, toil
from tests.readers import SparkReader
from tests.zygote import Child, Zygote

# Real outages on a machine that may be busy with other tests.
pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

WAIT_S = 180.0
PATIENT, IMPATIENT = '"30"', '"3"'
"""How many seconds a request may take: for people, and for a worker whose catalog is away."""
SLOW: dict[str, dict[str, int]] = {"latency": {"latency": 100, "jitter": 50}, "bandwidth": {"rate": 8}}
"""Milliseconds for each way of each packet; kilobytes a second."""
AWAY: dict[str, dict[str, int]] = {"reset_peer": {"timeout": 0}, "timeout": {"timeout": 0}}
"""Connections are reset at once; or nothing is answered, and no connection breaks."""


class Ground:
    """A lab whose lake is reached through a proxy, and its processes."""

    def __init__(self, lab: Lab, zygote: Zygote, way: Proxy) -> None:
        self.lab = lab
        self.way = way
        self.troupe = Troupe(zygote, lab.folder)
        self.name = f"db.{lab.database}"

    def export(self) -> list[str]:
        """Ask for an export and leave it to the workers; answers the job ids."""
        target = f"iceberg://lake/{self.name}"
        self.says("export", self.lab.source(), target, "--all", "--create", "--detach")
        return [job.job_id for job in self.lab.jobs()]

    def says(self, *arguments: str) -> None:
        assert self.troupe.play(command, *arguments).wait(WAIT_S) == 0, self.troupe.said()

    @contextmanager
    def worker(self, config: str = "lockstep.toml") -> Iterator[Child]:
        worker = self.troupe.play(toil, config)
        try:
            yield worker
        finally:
            worker.kill_group()

    @contextmanager
    def toxic(self, kind: str) -> Iterator[None]:
        for stream in ("upstream", "downstream"):
            self.way.add(kind, stream, **{**SLOW, **AWAY}[kind])
        yield
        self.way.clean()


Grounds = Callable[..., Ground]


@pytest.fixture
def grounds(
    tmp_path: Path, chdb_folder: Path, zygote: Zygote, rest_catalog: RestCatalog, toxiproxy: Toxiproxy
) -> Iterator[Grounds]:
    made: list[Ground] = []

    def make(**limits: object) -> Ground:
        way = toxiproxy.proxy(f"catalog-{tmp_path.name}", rest_catalog.port)
        catalog = {**rest_catalog.properties(way.url), "rest.request-timeout": PATIENT.strip('"')}
        lab = Lab(tmp_path, chdb_folder, limits={"lease_s": 3, **limits}, settings={"catalogs.lake": catalog})
        settings = (tmp_path / "lockstep.toml").read_text()
        (tmp_path / "impatient.toml").write_text(settings.replace(PATIENT, IMPATIENT))
        made.append(Ground(lab, zygote, way))
        return made[0]

    yield make
    for ground in made:
        ground.lab.close()


def assert_published_once(
    ground: Ground, spark: SparkReader, rest_catalog: RestCatalog, completed: list[Job], first: int, rows: int
) -> None:
    """Rows `first` to `first + rows` of the source, once each, in one snapshot per job and one line."""
    assert {job.state for job in completed} == {State.COMPLETED}, [job.error for job in completed]
    read = spark.read_from("lake", spark_properties(rest_catalog.properties()), ground.name)
    assert picked(read) == ground.lab.source_rows()[first : first + rows]
    assert sorted(ground.lab.lineage(ground.name)) == sorted(job.snapshot_id or 0 for job in completed)


@pytest.mark.parametrize("fault", SLOW)
def test_a_slow_way_to_the_catalog_costs_time_and_no_second_commit(
    grounds: Grounds, spark: SparkReader, rest_catalog: RestCatalog, fault: str
) -> None:
    ground = grounds()
    ground.lab.make_events(parts=1, rows=100)
    with ground.toxic(fault):
        (job_id,) = ground.export()
        with ground.worker():
            job = ground.lab.wait_for_end(job_id, WAIT_S)
    assert_published_once(ground, spark, rest_catalog, [job], 0, 100)
    assert job.commit_attempts == 1


@pytest.mark.parametrize("fault", AWAY)
def test_a_commit_waits_for_a_catalog_that_is_away_says_why_and_can_be_killed(
    grounds: Grounds, spark: SparkReader, rest_catalog: RestCatalog, fault: str
) -> None:
    ground = grounds()
    lab, store = ground.lab, ground.lab.store()
    lab.make_events(partitions=2, parts=1, rows=100)
    jobs = ground.export()
    with ground.toxic(fault), ground.worker("impatient.toml") as worker:
        lab.wait_until(lambda: all(store.read(each).state is State.COMMITTING for each in jobs), WAIT_S)
        lab.wait_until(lambda: any(store.read(each).error for each in jobs), WAIT_S)
        waiting = next(job for job in map(store.read, jobs) if job.error is not None)
        assert waiting.error is not None
        assert waiting.error.cls == "Retryable"
        assert ("cannot be reached", "no answer from")[fault == "timeout"] in waiting.error.message
        kill_in_time(lab, ground.troupe, waiting.job_id, worker)
        (left,) = {*jobs} - {waiting.job_id}
        lab.wait_until(lambda: store.read(left).error is not None, WAIT_S)
        ground.way.clean()
        job = lab.wait_for_end(left, WAIT_S)
    first = 100 * (int(str(job.plan.partition)[-2:]) - 1)
    assert_published_once(ground, spark, rest_catalog, [job], first, 100)
    assert job.error is None
    assert store.read(waiting.job_id).state is State.KILLED


def test_a_commit_that_never_reaches_its_catalog_fails_within_its_budget_and_a_retry_publishes_once(
    grounds: Grounds, spark: SparkReader, rest_catalog: RestCatalog
) -> None:
    ground = grounds(commit_deadline_s=5)
    lab = ground.lab
    lab.make_events(parts=1, rows=100)
    (job_id,) = ground.export()
    with ExitStack() as stack:
        with ground.toxic("reset_peer"):
            stack.enter_context(ground.worker())
            failed = lab.wait_for_end(job_id, WAIT_S)
        assert failed.state is State.FAILED
        assert failed.error is not None
        assert "did not go through within" in failed.error.message
        assert failed.commit_attempts == 0, "nothing was sent"
        assert lab.lineage(ground.name) == []
        ground.says("retry", job_id)
        job = lab.wait_for_end(job_id, WAIT_S)
    assert_published_once(ground, spark, rest_catalog, [job], 0, 100)
