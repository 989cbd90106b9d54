"""Speeds beside a peer on the same data in the same run, and peak memory of the Python workers.

    make bench          10 million rows, five interleaved rounds
    make bench-quick    1 million rows, three rounds

Every figure is a ratio of medians over interleaved rounds, with the spread of each side. Spark and its Python
workers are warm on both sides: one Lockstep worker and one Spark session live through all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import lockstep
from lockstep.config import Config, load_config
from lockstep.job import State
from lockstep.store import open_store

COLUMNS = """
    id UInt64, user_id UInt32, ts DateTime64(3, 'UTC'), country LowCardinality(String),
    amount Decimal(18, 4), url String, score Float64
"""
ROWS_OF = """
    SELECT number, cityHash64(number) % 1000000,
           toDateTime64('2024-01-01 00:00:00', 3, 'UTC') + number % 2592000,
           ['DE', 'FR', 'US', 'JP', 'BR', 'IN', 'GB', 'CA'][1 + cityHash64(number, 1) % 8],
           toDecimal64(number % 100000, 4) / 7,
           concat('https://example.com/item/', toString(cityHash64(number, 2) % 500000)),
           cityHash64(number, 3) / 1e19
    FROM numbers({rows})
"""
JAR = "iceberg-spark-runtime-4.1_2.13-1.12.0.jar"


@dataclass
class Contest:
    """Lockstep and a peer on the same data: seconds per round, and the memory of our workers."""

    name: str
    peer: str
    ours_s: list[float] = field(default_factory=list)
    peer_s: list[float] = field(default_factory=list)
    peak_mb: float = 0.0

    def line(self, rows: int) -> str:
        ours, peer = statistics.median(self.ours_s), statistics.median(self.peer_s)
        return (
            f"{self.name:<22} {ours:6.2f} s ({min(self.ours_s):.2f}..{max(self.ours_s):.2f})  "
            f"{rows / ours / 1e6:5.2f} M rows/s   {self.peer:<34} {peer:6.2f} s "
            f"({min(self.peer_s):.2f}..{max(self.peer_s):.2f})   {peer / ours:5.2f} x the peer's speed   "
            f"peak {self.peak_mb:.0f} MB per Python worker"
        )


class MemoryWatch:
    """The largest resident set of any Python worker below a process, sampled."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self.peak_bytes = 0
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def reset(self) -> None:
        self.peak_bytes = 0

    def close(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            try:
                for child in self._root.children(recursive=True):
                    if "lockstep.engine.daemon" in " ".join(child.cmdline()):
                        self.peak_bytes = max(self.peak_bytes, child.memory_info().rss)
            except psutil.Error:
                continue


@contextmanager
def background_worker(folder: Path) -> Iterator[MemoryWatch]:
    """`lockstep worker` in a process of its own, as users run it."""
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("lockstep")), "worker"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    watch = MemoryWatch(process.pid)
    try:
        yield watch
    finally:
        watch.close()
        process.terminate()
        process.wait(timeout=30)


def export(config: Config, source: str, table: str) -> float:
    """Seconds from the first claim to the recorded commit of one export, by the store's clock."""
    request = lockstep.export(source, f"iceberg://lake/bench.{table}", everything=True, create=True)
    store = open_store(config.store_url)
    deadline = time.monotonic() + 600
    while True:
        jobs = [store.read(job_id) for job_id in request.job_ids]
        if all(not job.state.live for job in jobs):
            break
        if time.monotonic() > deadline:
            raise SystemExit(f"the export of {source} did not end within 600 s")
        time.sleep(0.02)
    for job in jobs:
        if job.state is not State.COMPLETED:
            raise SystemExit(f"the export of {source} is {job.state}: {job.error}")
    return max(job.finished_at or 0 for job in jobs) - min(job.started_at or 0 for job in jobs)


def timed(action: Callable[[], object]) -> float:
    begin = time.monotonic()
    action()
    return time.monotonic() - begin


class Data:
    """One MergeTree table per size, and the same rows as Parquet files."""

    def __init__(self, folder: Path) -> None:
        import clickhouse_connect

        from lockstep.source.chdb_launch import connect

        self.folder = folder
        endpoint = connect(folder / "chdb", create=True)
        self.clickhouse = clickhouse_connect.get_client(
            host=endpoint.host,
            port=endpoint.port,
            username=endpoint.user,
            password=endpoint.password,
            send_receive_timeout=600,
        )
        self.clickhouse.command("CREATE DATABASE IF NOT EXISTS bench")

    def table(self, rows: int, name: str = "events") -> str:
        name = f"{name}_{rows}"
        self.clickhouse.command(f"CREATE TABLE bench.{name} ({COLUMNS}) ENGINE = MergeTree ORDER BY id")
        self.clickhouse.command(f"INSERT INTO bench.{name} {ROWS_OF.format(rows=rows)}")
        self.clickhouse.command(f"OPTIMIZE TABLE bench.{name} FINAL")
        return name

    def write_parquet(self, table: str, path: Path) -> None:
        """ClickHouse's own writer: the peer of an export, and the input of the second contest."""
        path.unlink(missing_ok=True)
        self.clickhouse.command(f"INSERT INTO FUNCTION file('{path}', Parquet) SELECT * FROM bench.{table}")


def spark_peer(folder: Path) -> Callable[[str, str], None]:
    """Spark with the Iceberg JVM runtime: read Parquet, write an Iceberg table, one snapshot."""
    from pyspark.sql import SparkSession

    cache = Path(os.environ.get("LOCKSTEP_CACHE", Path.home() / ".cache" / "lockstep"))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", str(cache / "jars" / JAR))
        .config("spark.driver.memory", "3g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.catalog.peer", "org.apache.iceberg.spark.SparkCatalog")
        .config("spark.sql.catalog.peer.type", "hadoop")
        .config("spark.sql.catalog.peer.warehouse", str(folder / "peer"))
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")

    def write(parquet: str, table: str) -> None:
        spark.read.parquet(parquet).writeTo(f"peer.bench.{table}").using("iceberg").createOrReplace()

    return write


def contests(folder: Path, rows: int, rounds: int) -> list[Contest]:
    config = load_config()
    data = Data(folder)
    table = data.table(rows)
    parquet = folder / "parquet"
    parquet.mkdir()
    data.write_parquet(table, parquet / "events.parquet")
    spark_write = spark_peer(folder)
    against_clickhouse = Contest("ClickHouse to Iceberg", "ClickHouse's own file(…, Parquet)")
    against_spark = Contest("ClickHouse to Iceberg", "Spark JVM, from a Parquet copy")
    from_parquet = Contest("Parquet to Iceberg", "Spark JVM, Iceberg writer")
    with background_worker(folder) as watch:
        export(config, f"chdb:{folder}/chdb/bench/{table}", "warm_up")
        spark_write(str(parquet), "warm_up")
        for number in range(rounds):
            watch.reset()
            seconds = export(config, f"chdb:{folder}/chdb/bench/{table}", f"from_clickhouse_{number}")
            for contest in (against_clickhouse, against_spark):
                contest.ours_s.append(seconds)
                contest.peak_mb = max(contest.peak_mb, watch.peak_bytes / 1e6)
            against_clickhouse.peer_s.append(
                timed(lambda: data.write_parquet(table, folder / "peer.parquet"))
            )
            watch.reset()
            from_parquet.ours_s.append(export(config, f"parquet:{parquet}", f"from_parquet_{number}"))
            from_parquet.peak_mb = max(from_parquet.peak_mb, watch.peak_bytes / 1e6)
            seconds = timed(lambda number=number: spark_write(str(parquet), f"round_{number}"))  # type: ignore[misc]
            from_parquet.peer_s.append(seconds)
            against_spark.peer_s.append(seconds)
            print(f"  round {number + 1} of {rounds}", file=sys.stderr)
    return [against_clickhouse, against_spark, from_parquet]


def memory_by_size(folder: Path, sizes: list[int]) -> list[tuple[int, float]]:
    """Peak memory of a Python worker for parts of growing size, each in a fresh worker."""
    config = load_config()
    data = Data(folder)
    peaks = []
    for rows in sizes:
        table = data.table(rows, "memory")
        with background_worker(folder) as watch:
            export(config, f"chdb:{folder}/chdb/bench/{table}", f"memory_{rows}")
            peaks.append((rows, watch.peak_bytes / 1e6))
        print(f"  memory at {rows:,} rows", file=sys.stderr)
    return peaks


def listing_seconds(folder: Path, rounds: int) -> list[float]:
    command = [str(Path(sys.executable).with_name("lockstep")), "jobs", "--json"]
    return [
        timed(lambda: subprocess.run(command, cwd=folder, check=True, capture_output=True))
        for _ in range(rounds)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="1 million rows, three rounds")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    rows, rounds = (1_000_000, 3) if arguments.quick else (10_000_000, 5)
    sizes = [500_000, 1_000_000] if arguments.quick else [1_000_000, 4_000_000, 16_000_000]
    folder = Path(tempfile.mkdtemp(prefix="lockstep-bench-"))
    os.chdir(folder)
    try:
        found = contests(folder, rows, rounds)
        peaks = memory_by_size(folder, sizes)
        listing = listing_seconds(folder, 5)
    finally:
        os.chdir("/")
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{rows:,} rows of 7 columns, {rounds} interleaved rounds, {os.cpu_count()} cores")
    for contest in found:
        print(contest.line(rows))
    print("one part of growing size: " + ", ".join(f"{n:,} rows {mb:.0f} MB" for n, mb in peaks))
    print(f"lockstep jobs: {statistics.median(listing):.2f} s ({min(listing):.2f}..{max(listing):.2f})")
    if arguments.json:
        figures = {"contests": [vars(contest) for contest in found], "memory_mb": peaks, "jobs_s": listing}
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
