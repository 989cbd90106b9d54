"""A lake, a ClickHouse and the command, as a user has them: for tests with real processes."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import clickhouse_connect
import pyarrow as pa
from clickhouse_connect.driver.client import Client
from pyiceberg.catalog import load_catalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import parse_transform
from pyiceberg.types import DecimalType, NestedField, StringType, TimestamptzType

from lockstep.config import load_config
from lockstep.job import Job, State, snapshot_id_of
from lockstep.source.chdb_launch import IDLE_VARIABLE, connect
from lockstep.store import JobStore, open_store
from tests import players
from tests.readers import read_with_duckdb
from tests.zygote import Zygote

COMMAND = str(Path(sys.executable).with_name("lockstep"))
# Java starts in half the time where it does not prepare for a long life.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
SPARK = {"master": "local[2]"}
LIMITS = {"lease_s": 5, "task_memory": "128MB"}


Settings = Mapping[str, Mapping[str, object]]


def _settings(
    store_url: str | None, spark: Mapping[str, object], limits: Mapping[str, object], more: Settings
) -> str:
    """`lockstep.toml`: a JSON value is a TOML value as well."""
    tables: dict[str, Mapping[str, object]] = {
        "store": {"url": store_url} if store_url else {},
        "spark": {**SPARK, **spark},
        "limits": {**LIMITS, **limits},
        "catalogs.folder": {"type": "filesystem", "warehouse": "folder"},
        **more,
    }
    return "".join(_table(name, table) for name, table in tables.items())


def _table(name: str, values: Mapping[str, object]) -> str:
    return f"[{name}]\n" + "".join(
        f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in values.items()
    )


def open_clickhouse(path: Path) -> Client:
    endpoint = connect(path, create=True)
    return clickhouse_connect.get_client(
        host=endpoint.host, port=endpoint.port, username=endpoint.user, password=endpoint.password
    )


def chdb_pid(folder: Path) -> int | None:
    """The process that serves an embedded ClickHouse; None if there is none."""
    card = folder / ".lockstep-server" / "card.json"
    if not card.exists():
        return None
    pid = int(json.loads(card.read_text())["pid"])
    command = Path(f"/proc/{pid}/cmdline")
    return pid if command.exists() and str(folder) in command.read_text() else None


def processes_of(group: int) -> dict[int, tuple[str, int]]:
    """The state and the parent of each process of a group."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, which may hold anything, ends with the last bracket.
            state, parent, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # gone meanwhile
        if int(its_group) == group:
            found[int(stat.parent.name)] = (state, int(parent))
    return found


def _let_them_stop(group: int) -> None:
    """One that is in the middle of a system call stops after it, and may have got a lock by then."""
    for _ in range(200):
        if all(state in "TtZX" for state, _ in processes_of(group).values()):
            return
        time.sleep(0.05)


def die_with_parent() -> None:
    """A test run that is itself killed leaves no worker behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def as_from_a_terminal() -> None:
    """Hear Ctrl-C: a shell starts what runs in the background with SIGINT ignored, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()


class Lab:
    """A working folder with `lockstep.toml`; each test has its own store and lake, and shares one chDB.

    `store_url` None: a SQLite file in the folder. `settings`: more tables of `lockstep.toml`, by their name
    there, such as `catalogs.other`. `zygote`: forks the commands that a test waits for, which saves each of
    them the start of an interpreter.
    """

    def __init__(
        self,
        folder: Path,
        chdb: Path,
        store_url: str | None = None,
        *,
        spark: Mapping[str, object] | None = None,
        limits: Mapping[str, object] | None = None,
        settings: Settings | None = None,
        zygote: Zygote | None = None,
    ) -> None:
        self.folder = folder
        self._zygote = zygote
        self.chdb = chdb
        self.clickhouse = open_clickhouse(chdb)
        (folder / "lockstep.toml").write_text(_settings(store_url, spark or {}, limits or {}, settings or {}))
        self.config = load_config(folder / "lockstep.toml")
        self._store: JobStore | None = None
        self.database = f"lab_{re.sub('[^a-zA-Z0-9]', '_', folder.name)}"
        self.clickhouse.command(f"CREATE DATABASE IF NOT EXISTS {self.database}")

    def configure(self, table: str, **values: object) -> None:
        """One more table of `lockstep.toml`."""
        with (self.folder / "lockstep.toml").open("a") as settings:
            settings.write(_table(table, values))

    def close(self) -> None:
        self.clickhouse.command(f"DROP DATABASE {self.database} SYNC")
        self.clickhouse.close()
        if self._store is not None:
            self._store.close()

    # The source

    def source(self, table: str = "events") -> str:
        return f"chdb:{self.chdb}/{self.database}/{table}"

    def make_events(
        self, table: str = "events", partitions: int = 1, parts: int = 3, rows: int = 1000
    ) -> None:
        """A MergeTree of `partitions` months with `parts` parts of `rows` rows each; merges stay away."""
        self.sql(
            f"CREATE TABLE {table} (id UInt64, ts DateTime('UTC'), name String, amount Decimal(18, 4),"
            " note Nullable(String)) ENGINE = MergeTree PARTITION BY toYYYYMM(ts) ORDER BY id"
            " SETTINGS min_bytes_for_wide_part = 0"
        )
        self.sql(f"SYSTEM STOP MERGES {self.database}.{table}")
        for partition in range(partitions):
            for part in range(parts):
                first = (partition * parts + part) * rows
                self.sql(
                    f"INSERT INTO {table} SELECT number,"
                    f" toDateTime('2024-{partition + 1:02}-01', 'UTC') + number % 3600,"
                    f" concat('name ', toString(number)), toDecimal64(number, 4) / 8,"
                    f" if(number % 7 = 0, NULL, toString(cityHash64(number))) FROM numbers({first}, {rows})"
                )

    def sql(self, statement: str) -> Any:
        return self.clickhouse.command(statement, settings={"database": self.database})

    def pins(self) -> list[str]:
        """Frozen copies of ours that are still in the source."""
        found = self.clickhouse.query(
            "SELECT name FROM system.tables WHERE name LIKE 'lockstep_pin_%' AND database = {db:String}",
            parameters={"db": self.database},
        )
        return [row[0] for row in found.result_rows]

    def source_rows(self, table: str = "events") -> list[tuple[Any, ...]]:
        result = self.clickhouse.query(
            f"SELECT id, name, amount, note FROM {self.database}.{table} ORDER BY id"
        )
        return [tuple(row) for row in result.result_rows]

    @contextmanager
    def frozen_source(self) -> Iterator[None]:
        """ClickHouse answers nobody, and no connection breaks. For a lab that has a server of its own."""
        pid = chdb_pid(self.chdb)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    # The command

    def run(
        self, *arguments: str, failpoints: str = "", timeout_s: float = 150, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        if self._zygote is not None:
            return self._forked(
                self._zygote, players.command, *arguments, failpoints=failpoints, timeout_s=timeout_s, cwd=cwd
            )
        return subprocess.run(
            [COMMAND, *arguments],
            cwd=cwd or self.folder,
            env=self._environment(failpoints),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def work_off(self) -> None:
        """What `lockstep worker --once` does, with forked processes in Spark's place."""
        assert self._zygote is not None
        done = self._forked(self._zygote, players.toil_once)
        assert done.returncode == 0, done.stderr

    def _forked(
        self,
        zygote: Zygote,
        play: Callable[..., object],
        *arguments: str,
        failpoints: str = "",
        timeout_s: float = 150,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        return players.run_forked(
            zygote,
            play,
            *arguments,
            folder=cwd or self.folder,
            environment=self._environment(failpoints),
            timeout_s=timeout_s,
        )

    def ok(self, *arguments: str, failpoints: str = "") -> str:
        """Run a command that must succeed; answers its standard output."""
        done = self.run(*arguments, failpoints=failpoints)
        assert done.returncode == 0, (
            f"lockstep {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done.stdout

    def document(self, *arguments: str) -> Any:
        return json.loads(self.ok(*arguments, "--json"))

    @contextmanager
    def started(self, *arguments: str, failpoints: str = "") -> Iterator[subprocess.Popen[str]]:
        """A command in the background, ended with SIGKILL (its whole session) if it still runs at the end."""
        process = subprocess.Popen(
            [COMMAND, *arguments],
            cwd=self.folder,
            env=self._environment(failpoints),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=as_from_a_terminal,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=30)

    def _environment(self, failpoints: str) -> dict[str, str]:
        kept = ("LOCKSTEP_CACHE", IDLE_VARIABLE)
        environment = {k: v for k, v in os.environ.items() if k in kept or not k.startswith("LOCKSTEP_")}
        if failpoints:
            environment["LOCKSTEP_FAILPOINTS"] = failpoints
        return environment

    # The store and the lake

    def store(self) -> JobStore:
        """A client of the store, the same one each time: the test's own eyes."""
        if self._store is None:
            self._store = open_store(self.config.store_url)
        return self._store

    def jobs(self, target: str | None = None) -> list[Job]:
        return [job for job in self.store().list() if target in {None, job.plan.target.rpartition("/")[2]}]

    def wait_for_end(self, job_id: str, timeout_s: float = 150) -> Job:
        """Wait for a worker in another process to end the job."""
        self.wait_until(lambda: not self.store().read(job_id).state.live, timeout_s)
        return self.store().read(job_id)

    def freeze(self, process: subprocess.Popen[str]) -> None:
        """SIGSTOP a command with all it started."""
        self.freeze_group(process.pid)

    def freeze_group(self, group: int) -> None:
        """SIGSTOP a process group, at a moment when it does not hold SQLite's lock.

        A process that is stopped inside a transaction keeps everybody else out: that is SQLite's way, and not
        what these tests are about. A server ends such a transaction by itself.
        """
        scheme, _, path = self.config.store_url.partition(":///")
        while True:
            os.killpg(group, signal.SIGSTOP)
            _let_them_stop(group)
            if scheme != "sqlite":
                return
            with closing(sqlite3.connect(path, timeout=1, isolation_level=None)) as connection:
                try:
                    connection.execute("BEGIN IMMEDIATE")
                    connection.execute("ROLLBACK")
                    return
                except sqlite3.OperationalError:
                    os.killpg(group, signal.SIGCONT)

    def wait_for_state(self, *states: State, timeout_s: float = 120) -> Job:
        """The first job that reaches one of these states."""
        found: list[Job] = []

        def reached() -> bool:
            found[:] = [job for job in self.jobs() if job.state in states]
            return bool(found)

        self.wait_until(reached, timeout_s)
        return found[0]

    def wait_until(self, reached: Callable[[], bool], timeout_s: float = 120) -> None:
        """Poll for what another process is about to do."""
        deadline = time.monotonic() + timeout_s
        while not reached():
            if time.monotonic() > deadline:
                states = [(job.job_id, job.state.value, job.error) for job in self.jobs()]
                raise AssertionError(f"it did not happen within {timeout_s} s; jobs: {states}")
            time.sleep(0.05)

    def table(self, name: str = "db.events", catalog: str = "lake") -> Table:
        return load_catalog(catalog, **self.config.catalogs[catalog]).load_table(name)

    def has_table(self, name: str = "db.events") -> bool:
        return load_catalog("lake", **self.config.catalogs["lake"]).table_exists(name)

    def target_rows(self, name: str = "db.events") -> list[tuple[Any, ...]]:
        """What DuckDB reads of the published table, in the columns and order of `source_rows`."""
        return picked(read_with_duckdb(self.table(name).metadata_location))

    def make_target(self, name: str, transform: str, column: str) -> None:
        """A table as `--create` makes it for `make_events`, but partitioned in another way."""
        catalog = load_catalog("lake", **self.config.catalogs["lake"])
        catalog.create_namespace_if_not_exists(name.partition(".")[0])
        schema = Schema(
            NestedField(1, "id", DecimalType(20, 0), required=True),
            NestedField(2, "ts", TimestamptzType(), required=True),
            NestedField(3, "name", StringType(), required=True),
            NestedField(4, "amount", DecimalType(18, 4), required=True),
            NestedField(5, "note", StringType(), required=False),
        )
        source_id = schema.find_field(column).field_id
        field = PartitionField(source_id, 1000, parse_transform(transform), "bucket")
        catalog.create_table(name, schema=schema, partition_spec=PartitionSpec(field))

    def lineage(self, name: str = "db.events", catalog: str = "lake") -> list[int]:
        """The snapshots of the main branch, oldest first; fails if the history is not one line."""
        metadata = self.table(name, catalog).metadata
        ours = [s.snapshot_id for s in metadata.snapshots if not _is_fence(s)]
        line: list[int] = []
        snapshot = metadata.current_snapshot()
        while snapshot is not None:
            line.append(snapshot.snapshot_id)
            parent = snapshot.parent_snapshot_id
            snapshot = metadata.snapshot_by_id(parent) if parent is not None else None
        line = [snapshot_id for snapshot_id in reversed(line) if snapshot_id in ours]
        assert len(line) == len(ours), "a published snapshot is not on the main branch"
        return line

    def is_fenced(self, job: Job, target: str = "db.events") -> bool:
        """Whether the register of the job's commit holds a fence: no request of it can land any more."""
        held = self.table(target).metadata.snapshot_by_id(snapshot_id_of(job.commit_id))
        return held is not None and _is_fence(held)

    def assert_exact(self, jobs: int = 1, table: str = "events", target: str = "db.events") -> None:
        """The target holds the source's rows once each, in one snapshot per completed job."""
        assert self.target_rows(target) == self.source_rows(table)
        assert len(self.lineage(target)) == jobs
        completed = [job for job in self.jobs(target) if job.state is State.COMPLETED]
        assert sorted(self.lineage(target)) == sorted(job.snapshot_id or 0 for job in completed)


def picked(rows: pa.Table) -> list[tuple[Any, ...]]:
    """Rows of `make_events` in the columns and order of `source_rows`."""
    found = rows.select(["id", "name", "amount", "note"]).sort_by("id").to_pylist()
    return [(row["id"], row["name"], row["amount"], row["note"]) for row in found]


def _is_fence(snapshot: Snapshot) -> bool:
    return snapshot.summary is not None and snapshot.summary.get("lockstep.fenced") == "true"
