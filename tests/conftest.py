from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings

from lockstep.runtime import new_id
from lockstep.source.chdb_launch import IDLE_VARIABLE
from lockstep.store import JobStore, open_store, sql_schema
from tests import object_servers, readers, servers
from tests.lab import Lab, chdb_pid
from tests.store_lab import DatabaseClock, MovedClock, Stores, check_always_true
from tests.zookeeper_server import ZooKeeperServer
from tests.zygote import Zygote

ServerT = TypeVar("ServerT", bound=servers.Server)

# An example that takes long says something of the machine, not of what is promised.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def iceberg_jar() -> Path:
    """The Iceberg JVM runtime that `make setup` fetched."""
    return readers.iceberg_jar()


@pytest.fixture(scope="session")
def spark(iceberg_jar: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[readers.SparkReader]:
    """The independent reader. A test that asks for it carries `@pytest.mark.servers`."""
    reader = readers.SparkReader(iceberg_jar, tmp_path_factory.mktemp("spark-reader") / "stderr.log")
    yield reader
    reader.close()


@pytest.fixture(scope="session")
def read_with_spark(spark: readers.SparkReader) -> Callable[[str], pa.Table]:
    """All rows that Spark with the Iceberg JVM runtime finds from a metadata location."""
    return spark.read


@pytest.fixture(scope="session")
def read_with_duckdb() -> Callable[[str], pa.Table]:
    """All rows that DuckDB's own Iceberg reader finds from a metadata location. Fast: needs no server."""
    return readers.read_with_duckdb


@pytest.fixture(scope="session")
def chdb_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One embedded ClickHouse for all tests that run real processes; it lives as long as they do."""
    os.environ[IDLE_VARIABLE] = "900"
    folder = tmp_path_factory.mktemp("chdb") / "data"
    yield folder
    _end_chdb(folder)


@pytest.fixture(scope="session")
def stoppable_chdb(chdb_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Another one, for tests that stop the server (`Lab.frozen_source`), where nobody else would notice."""
    folder = tmp_path_factory.mktemp("stoppable-chdb") / "data"
    yield folder
    _end_chdb(folder)


def _end_chdb(folder: Path) -> None:
    if (pid := chdb_pid(folder)) is not None:
        os.kill(pid, signal.SIGTERM)


@pytest.fixture
def lab(tmp_path: Path, chdb_folder: Path, zygote: Zygote) -> Iterator[Lab]:
    """A store, a lake and a source database of the test's own."""
    lab = Lab(tmp_path, chdb_folder, zygote=zygote)
    yield lab
    lab.close()


@pytest.fixture(scope="session")
def manned_lab(
    tmp_path_factory: pytest.TempPathFactory,
    chdb_folder: Path,
    zygote: Zygote,
    minio: object_servers.Minio,
    rest_catalog: object_servers.RestCatalog,
) -> Iterator[Lab]:
    """A lab with a worker that lives through the whole session, for tests that kill no process.

    Each test takes names of its own for its source and its target. Beside its lake of local files it has two
    in MinIO: `rest` with a REST catalog, and `bucket` with a SQL catalog.
    """
    folder = tmp_path_factory.mktemp("manned")
    minio.make_bucket("bucket")
    bucket = {
        "type": "sql",
        "uri": f"sqlite:///{folder}/bucket.db",
        "warehouse": "s3://bucket/warehouse",
        **object_servers.s3_properties(minio.url),
    }
    catalogs = {"catalogs.rest": rest_catalog.properties(), "catalogs.bucket": bucket}
    lab = Lab(folder, chdb_folder, settings=catalogs, zygote=zygote)
    with lab.started("worker"):
        yield lab
    lab.close()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[servers.Postgresql]:
    """A private PostgreSQL server. A test that asks for it carries `@pytest.mark.servers`."""
    try:
        server = servers.Postgresql()
    except servers.Missing as missing:
        pytest.fail(str(missing), pytrace=False)
    yield server
    server.close()


@pytest.fixture(scope="session")
def postgresql_lab(postgresql: servers.Postgresql) -> str:
    """A database whose clock is moved by hand, with the tables of a store."""
    postgresql.run("CREATE DATABASE lab")
    DatabaseClock.install(lambda sql: postgresql.run(sql, "lab"))
    url = postgresql.url("lab", search_path=DatabaseClock.SEARCH_PATH)
    open_store(url).close()
    return url


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    """One server for the whole session; each test has a root of its own in it.

    A test that asks for it carries `@pytest.mark.servers`.
    """
    try:
        server = ZooKeeperServer(tmp_path_factory.mktemp("zookeeper"))
    except servers.Missing as missing:
        pytest.fail(str(missing), pytrace=False)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def minio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object_servers.Minio]:
    """Object storage that nobody kills. A test that asks for it carries `@pytest.mark.servers`."""
    yield from _running(object_servers.Minio(tmp_path_factory.mktemp("minio")))


@pytest.fixture(scope="session")
def rest_catalog(
    minio: object_servers.Minio, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[object_servers.RestCatalog]:
    """A REST catalog whose tables lie in the bucket `rest` of `minio`. Nobody kills it."""
    minio.make_bucket("rest")
    folder = tmp_path_factory.mktemp("rest-catalog")
    yield from _running(object_servers.RestCatalog(folder, minio, "s3://rest/warehouse"))


@pytest.fixture(scope="session")
def toxiproxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object_servers.Toxiproxy]:
    """A test that asks for it carries `@pytest.mark.servers`."""
    yield from _running(object_servers.Toxiproxy(tmp_path_factory.mktemp("toxiproxy")))


def _running(server: ServerT) -> Iterator[ServerT]:
    try:
        server.start()
    except servers.Missing as missing:
        pytest.fail(str(missing), pytrace=False)
    yield server
    server.kill()


STORE_KINDS = ("sqlite", "postgresql", "zookeeper")


@pytest.fixture(scope="session")
def empty_stores(
    postgresql: servers.Postgresql, zookeeper: ZooKeeperServer
) -> Callable[[str, str], str | None]:
    """The address of a new store of a kind, for real processes and the real clock. None: SQLite as it is
    without a word in `lockstep.toml`. Callable from any thread.

    A test that asks for it carries `@pytest.mark.servers`.
    """
    postgresql.run("CREATE DATABASE stores")
    lock = threading.Lock()

    def new(kind: str, name: str) -> str | None:
        if kind == "zookeeper":
            return zookeeper.url(name)
        if kind == "sqlite":
            return None
        schema = re.sub("[^a-z0-9]", "_", f"store_{name}".lower())
        with lock:
            postgresql.run(f"CREATE SCHEMA {schema}", "stores")
        return postgresql.url("stores", search_path=schema)

    return new


@pytest.fixture(scope="session")
def zygote(chdb_folder: Path) -> Iterator[Zygote]:
    """Starts processes of ours in milliseconds; they find the embedded ClickHouse of the session."""
    zygote = Zygote.launch()
    yield zygote
    zygote.close()


@pytest.fixture(params=STORE_KINDS)
def make_lab(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    chdb_folder: Path,
    zygote: Zygote,
    empty_stores: Callable[[str, str], str | None],
) -> Iterator[Callable[..., Lab]]:
    """Makes a lab on an empty store, once of each kind, with what its caller wants otherwise: another source,
    limits, settings of Spark. A test that asks for it carries `@pytest.mark.servers`.
    """
    with contextlib.ExitStack() as labs:

        def make(source: Path = chdb_folder, **options: Any) -> Lab:
            url = empty_stores(request.param, f"lab_{new_id()}")
            lab = Lab(tmp_path, source, url, zygote=zygote, **options)
            labs.callback(lab.close)
            return lab

        yield make


@pytest.fixture
def lab_on_each_store(make_lab: Callable[..., Lab]) -> Lab:
    """As `lab`, once on each kind of store. A test that asks for it carries `@pytest.mark.servers`."""
    return make_lab()


def _sqlite(request: pytest.FixtureRequest) -> Stores:
    folder: Path = request.getfixturevalue("tmp_path")
    return Stores(f"sqlite:///{folder}/jobs/jobs.db", open_store)


def _postgresql(request: pytest.FixtureRequest) -> Stores:
    url: str = request.getfixturevalue("postgresql_lab")
    server: servers.Postgresql = request.getfixturevalue("postgresql")
    tables = [*sql_schema.OF_A_JOB, sql_schema.scopes]
    # Whoever a test before left behind could hold a lock.
    server.run(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'lockstep'", "lab"
    )
    server.run("; ".join(f"DELETE FROM lab.{table.name}" for table in tables), "lab")
    return Stores(url, open_store, DatabaseClock(lambda sql: server.run(sql, "lab")))


def _zookeeper(request: pytest.FixtureRequest) -> Stores:
    folder: Path = request.getfixturevalue("tmp_path")
    server: ZooKeeperServer = request.getfixturevalue("zookeeper")
    return Stores(server.url(folder.name), open_store)


@pytest.fixture(
    params=[
        pytest.param(_sqlite, id="sqlite"),
        pytest.param(_postgresql, id="postgresql", marks=pytest.mark.servers),
        pytest.param(_zookeeper, id="zookeeper", marks=pytest.mark.servers),
    ]
)
def store_factory(request: pytest.FixtureRequest) -> Stores:
    """Opens clients of one empty store; each kind of store is one more parameter."""
    make: Callable[[pytest.FixtureRequest], Stores] = request.param
    return make(request)


@pytest.fixture
def store(store_factory: Stores) -> Iterator[JobStore]:
    """A client of an empty store of each kind; what is always true of one is checked at the end."""
    opened = store_factory()
    yield opened
    check_always_true(opened)
    opened.close()


@pytest.fixture
def clock(store_factory: Stores) -> MovedClock:
    return store_factory.clock


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test-quick` starts neither Spark nor a server: asking for one without the marker is an error."""
    for item in items:
        kinds = {"spark", "postgresql", "zookeeper", "minio", "toxiproxy"}
        asked = kinds & {*getattr(item, "fixturenames", ())}
        if asked and item.get_closest_marker("servers") is None:
            raise pytest.UsageError(f"{item.nodeid} uses {asked.pop()} and lacks @pytest.mark.servers")


def pytest_collection_finish() -> None:
    """What is loaded now stays to the end: looking for garbage among it took a tenth of the time."""
    gc.collect()
    gc.freeze()
