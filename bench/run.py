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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import lockstep
from bench.common import Contest, background_worker, finished, spark_session, timed
from lockstep.config import Config, load_config

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


def export(config: Config, source: str, table: str) -> float:
    """Seconds from the first claim to the recorded commit of one export, by the store's clock."""
    request = lockstep.export(source, f"iceberg://lake/bench.{table}", everything=True, create=True)
    jobs = finished(config, request.job_ids)
    return max(job.finished_at or 0 for job in jobs) - min(job.started_at or 0 for job in jobs)


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


def contests(folder: Path, rows: int, rounds: int) -> list[Contest]:
    config = load_config()
    data = Data(folder)
    table = data.table(rows)
    parquet = folder / "parquet"
    parquet.mkdir()
    data.write_parquet(table, parquet / "events.parquet")
    spark = spark_session(folder)

    def spark_write(parquet: str, table: str) -> None:
        spark.read.parquet(parquet).writeTo(f"peer.bench.{table}").using("iceberg").createOrReplace()

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
