"""A job store that goes away while workers run: they wait, nothing is lost, and a worker whose lease ran out
meanwhile writes nothing more."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from lockstep.job import State, TaskState
from tests.kills import kill_in_time
from tests.lab import Lab
from tests.object_servers import Proxy, Toxiproxy
from tests.players import Troupe, toil
from tests.servers import Postgresql
from tests.store_lab import check_always_true
from tests.zookeeper_server import ZooKeeperServer
from tests.zygote import Zygote

# Real outages on a machine that may be busy with other tests.
pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

LIMITS = {"lease_s": 3}
OUTAGE_S = 4.0
WAIT_S = 180.0


class Ways:
    """Stores of each kind, with a way to them that can be cut."""

    def __init__(
        self,
        toxiproxy: Toxiproxy,
        postgresql: Postgresql,
        zookeeper: ZooKeeperServer,
        empty_stores: Callable[[str, str], str | None],
    ) -> None:
        self._toxiproxy = toxiproxy
        self._ports = {"postgresql": postgresql.port, "zookeeper": zookeeper.port}
        self._empty_stores = empty_stores

    def to(self, kind: str, name: str) -> tuple[str, str, Proxy]:
        """The address of a new store, the same through a proxy, and the proxy."""
        direct = self._empty_stores(kind, name)
        assert direct is not None
        port = self._ports[kind]
        proxy = self._toxiproxy.proxy(f"{kind}-{name}", port)
        return direct, direct.replace(f":{port}/", f":{proxy.port}/"), proxy


@pytest.fixture(scope="module")
def ways(
    toxiproxy: Toxiproxy,
    postgresql: Postgresql,
    zookeeper: ZooKeeperServer,
    empty_stores: Callable[[str, str], str | None],
) -> Ways:
    return Ways(toxiproxy, postgresql, zookeeper, empty_stores)


@contextmanager
def locked(file: str) -> Iterator[None]:
    """Somebody holds SQLite's lock."""
    with closing(sqlite3.connect(file, timeout=30, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


@contextmanager
def cut(proxy: Proxy) -> Iterator[None]:
    """Connections break, and new ones are refused."""
    proxy.cut()
    yield
    proxy.mend()


@contextmanager
def half_open(proxy: Proxy) -> Iterator[None]:
    """Nothing arrives any more in either direction, and no connection breaks."""
    proxy.add("timeout", "upstream", timeout=0)
    proxy.add("timeout", "downstream", timeout=0)
    yield
    proxy.clean()


SLOW = {"latency": {"latency": 40, "jitter": 20}, "bandwidth": {"rate": 60}}
"""Milliseconds for each way of each packet; kilobytes a second."""


@contextmanager
def slow(proxy: Proxy, kind: str) -> Iterator[None]:
    for stream in ("upstream", "downstream"):
        proxy.add(kind, stream, **SLOW[kind])
    yield
    proxy.clean()


def ask_for_export(lab: Lab, table: str = "events", parts: int = 6, rows: int = 4000) -> str:
    lab.make_events(table, parts=parts, rows=rows)
    target = f"iceberg://lake/db.{table}"
    options = ("--all", "--create", "--detach", "--file-size", "20KB")
    (job,) = lab.document("export", lab.source(table), target, *options)["jobs"]
    return str(job["job_id"])


def with_a_far_store(lab: Lab, direct: str, url: str) -> str:
    """The same settings, with another way to the store; answers the name of the file."""
    settings = (lab.folder / "lockstep.toml").read_text()
    (lab.folder / "far.toml").write_text(settings.replace(direct, url))
    return "far.toml"


def some_are_done(lab: Lab, job_id: str) -> bool:
    return any(task.state is TaskState.DONE for task in lab.store().tasks(job_id))


@pytest.mark.parametrize(
    "kind",
    ["sqlite locked", "postgresql cut", "postgresql half_open", "zookeeper cut", "zookeeper half_open"],
)
def test_workers_wait_for_a_store_that_is_away_and_nothing_is_lost(
    tmp_path: Path, chdb_folder: Path, zygote: Zygote, ways: Ways, kind: str
) -> None:
    store, _, fault = kind.partition(" ")
    if store == "sqlite":
        lab = Lab(tmp_path, chdb_folder, limits=LIMITS, zygote=zygote)
        outage = locked(lab.config.store_url.removeprefix("sqlite:///"))
    else:
        _, url, proxy = ways.to(store, tmp_path.name)
        lab = Lab(tmp_path, chdb_folder, url, limits=LIMITS, zygote=zygote)
        outage = cut(proxy) if fault == "cut" else half_open(proxy)
    job_id = ask_for_export(lab)
    worker = Troupe(zygote, tmp_path).play(toil)
    try:
        lab.wait_until(lambda: some_are_done(lab, job_id), WAIT_S)
        with outage:
            time.sleep(OUTAGE_S)
        job = lab.wait_for_end(job_id, WAIT_S)
    finally:
        worker.kill_group()
    assert job.state is State.COMPLETED, job.error
    check_always_true(lab.store())
    lab.assert_exact()
    lab.close()


@pytest.mark.parametrize("store", ["postgresql", "zookeeper"])
def test_a_worker_that_was_cut_off_longer_than_its_lease_changes_nothing_when_it_is_back(
    tmp_path: Path, chdb_folder: Path, zygote: Zygote, ways: Ways, store: str
) -> None:
    direct, url, proxy = ways.to(store, tmp_path.name)
    lab = Lab(tmp_path, chdb_folder, direct, limits=LIMITS, zygote=zygote)
    far = with_a_far_store(lab, direct, url)
    job_id = ask_for_export(lab)
    troupe = Troupe(zygote, tmp_path)
    cut_off = troupe.play(toil, far)
    try:
        lab.wait_until(lambda: some_are_done(lab, job_id), WAIT_S)
        with cut(proxy):
            other = troupe.play(toil)
            lab.wait_until(lambda: lab.store().read(job_id).released, WAIT_S)
            job = lab.store().read(job_id)
            other.kill_group()
        time.sleep(OUTAGE_S)
    finally:
        cut_off.kill_group()
    assert job.state is State.COMPLETED, job.error
    assert lab.store().read(job_id) == job
    check_always_true(lab.store())
    lab.assert_exact()
    lab.close()


@pytest.mark.parametrize("fault", SLOW)
@pytest.mark.parametrize("store", ["postgresql", "zookeeper"])
def test_a_slow_way_to_the_store_costs_time_and_no_attempt_and_a_kill_is_heard(
    tmp_path: Path, chdb_folder: Path, zygote: Zygote, ways: Ways, store: str, fault: str
) -> None:
    direct, url, proxy = ways.to(store, tmp_path.name)
    lab = Lab(tmp_path, chdb_folder, direct, limits=LIMITS, zygote=zygote)
    far = with_a_far_store(lab, direct, url)
    job_id = ask_for_export(lab, parts=3, rows=1000)
    troupe = Troupe(zygote, tmp_path)
    with slow(proxy, fault):
        # The three tasks of this job pass; that of the next one hangs.
        worker = troupe.play(toil, far, failpoints="write.before_finish=sleep:600@4")
        try:
            job = lab.wait_for_end(job_id, WAIT_S)
            hangs = ask_for_export(lab, "hangs", parts=1, rows=10)
            troupe.wait_for("write.before_finish", WAIT_S, times=4)
            kill_in_time(lab, troupe, hangs, worker, "--config", far)
        finally:
            worker.kill_group()
    assert job.state is State.COMPLETED, job.error
    assert job.attempts == job.tasks_total, "a slow store has cost an attempt"
    check_always_true(lab.store())
    lab.assert_exact()
    assert lab.lineage("db.hangs") == []
    lab.close()
