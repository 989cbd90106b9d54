"""CSV to a sorted Iceberg table, beside Spark's JVM and DuckDB on the same data in the same run.

    python bench/imports.py          16 million rows (1.3 GB), three interleaved rounds; memory; cost per row
    python bench/imports.py --quick  1 million rows, one round; memory and cost per row on little data

Everything counts from the request to the commit: our figure has the planning and the inference of types in
it, while the peers are told the types. Spark writes an Iceberg table (csv, repartitionByRange,
sortWithinPartitions, JVM writer), DuckDB one sorted Parquet file and no table. All are warm. On a machine
that others use too, the processor's time (`cpu`) says more than the clock.
Larger inputs are the same file under several names: hard links.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

import lockstep
from bench.common import background_worker, finished, spark_session
from lockstep.config import load_config
from tests.readers import cache_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS = {
    "id": "BIGINT",
    "user_id": "INTEGER",
    "ts": "TIMESTAMP",
    "country": "VARCHAR",
    "amount": "DOUBLE",
    "url": "VARCHAR",
}
SPARK_SCHEMA = "id BIGINT, user_id INT, ts TIMESTAMP_NTZ, country STRING, amount DOUBLE, url STRING"
SORT_BY = ("user_id", "ts")
# Multiplication by a large odd number scatters the keys, the same way in each run and on each machine.
ROWS_OF = """
    SELECT i AS id,
           ((i * 2654435761) % 4294967296 % 2000000)::INTEGER AS user_id,
           TIMESTAMP '2024-01-01' + INTERVAL (((i * 40503) % 31536000)::BIGINT) SECOND AS ts,
           ['DE', 'FR', 'US', 'JP', 'BR', 'IN', 'GB', 'CA'][1 + (i * 7919 % 8)::INTEGER] AS country,
           ((i * 69069) % 10000000) / 100 AS amount,
           'https://example.com/item/' || ((i * 48271) % 500000) AS url
    FROM range({rows}) AS numbers(i)
"""
LEAST_SPEEDUP = 2.5
MOST_BEHIND_DUCKDB = 1.3
MOST_ABOVE_TASK_MEMORY = 300e6
MOST_GROWTH = 1.1


@dataclass
class Effort:
    """What one contender needed in each round: seconds by the clock, and of the processors."""

    name: str
    clock_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def run(self, action: Callable[[], object]) -> None:
        before, begin = cpu_so_far(), time.monotonic()
        action()
        self.clock_s.append(time.monotonic() - begin)
        self.cpu_s.append(cpu_so_far() - before)

    def line(self, rows: int, ours: Effort) -> str:
        clock, cpu = statistics.median(self.clock_s), statistics.median(self.cpu_s)
        beside = "" if self is ours else f"   {clock / statistics.median(ours.clock_s):5.2f} x our time"
        beside += "" if self is ours else f", {cpu / statistics.median(ours.cpu_s):5.2f} x our cpu"
        return (
            f"{self.name:<44} {clock:7.2f} s ({min(self.clock_s):.2f}..{max(self.clock_s):.2f})  "
            f"cpu {cpu:7.2f} s ({min(self.cpu_s):.2f}..{max(self.cpu_s):.2f})  "
            f"{rows / clock / 1e6:5.2f} M rows/s{beside}"
        )


def cpu_so_far() -> float:
    """Seconds that this process, all below it (our worker, Spark's JVM) and those that have ended used."""
    me = psutil.Process()
    total = 0.0
    for one in [me, *me.children(recursive=True)]:
        with suppress(psutil.Error):
            total += sum(one.cpu_times()[:4])
    return total


def csv_of(rows: int) -> Path:
    """The data, made once and kept outside the tree."""
    import duckdb

    path = cache_folder() / "bench" / f"import-{rows}.csv"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        duckdb.sql(f"COPY ({ROWS_OF.format(rows=rows)}) TO '{draft}' (FORMAT csv, HEADER)")
        draft.rename(path)
    return path


class Ours:
    """Imports through the worker that lives in the working folder."""

    def __init__(self) -> None:
        self._config = load_config()
        self._numbers = itertools.count()

    def run(self, inputs: Sequence[Path]) -> None:
        table = f"iceberg://lake/bench.t{next(self._numbers)}"
        request = lockstep.import_files([str(path) for path in inputs], table, create=True, sort_by=SORT_BY)
        finished(self._config, request.job_ids)


def spark_import(spark: SparkSession, path: Path, table: str) -> None:
    rows = spark.read.csv(str(path), header=True, schema=SPARK_SCHEMA)
    ordered = rows.repartitionByRange(4, *SORT_BY).sortWithinPartitions(*SORT_BY)
    ordered.writeTo(f"peer.bench.{table}").using("iceberg").createOrReplace()


def duckdb_import(path: Path, folder: Path) -> None:
    import duckdb

    out = folder / "duckdb.parquet"
    out.unlink(missing_ok=True)
    with duckdb.connect() as connection:
        connection.execute(f"SET temp_directory = '{folder}/spill'")
        connection.execute(
            f"COPY (SELECT * FROM read_csv('{path}', header = true, columns = {COLUMNS})"
            f" ORDER BY {', '.join(SORT_BY)}) TO '{out}' (FORMAT parquet, COMPRESSION zstd)"
        )


def contest(folder: Path, rows: int, rounds: int) -> list[Effort]:
    path = csv_of(rows)
    small = csv_of(min(rows, 100_000))
    spark = spark_session(folder)
    efforts = [
        Effort("Lockstep, CSV to a sorted Iceberg table"),
        Effort("Spark JVM, CSV to a sorted Iceberg table"),
        Effort("DuckDB, CSV to one sorted Parquet file"),
    ]
    with background_worker(folder):
        ours = Ours()
        ours.run([small])
        spark_import(spark, small, "warm_up")
        for number in range(rounds):
            efforts[0].run(lambda: ours.run([path]))
            efforts[1].run(lambda: spark_import(spark, path, "t"))
            efforts[2].run(lambda: duckdb_import(path, folder))
            print(f"  round {number + 1} of {rounds}", file=sys.stderr)
    spark.stop()
    return efforts


@dataclass(frozen=True)
class Size:
    """One import of growing size, in a fresh worker."""

    rows: int
    size_bytes: int
    clock_s: float
    cpu_s: float
    peak_bytes: int

    def line(self, task_memory: int) -> str:
        clock, cpu = self.clock_s / self.rows * 1e6, self.cpu_s / self.rows * 1e6
        above = (self.peak_bytes - task_memory) / 1e6
        return (
            f"{self.rows:>12,} rows {self.size_bytes / 1e9:6.2f} GB   {clock:6.2f} us per row, cpu {cpu:6.2f}"
            f"   peak {self.peak_bytes / 1e6:5.0f} MB per Python worker = task_memory {above:+.0f} MB"
        )


def of_size(folder: Path, rows: int, copies: int) -> Size | None:
    """Import one file under `copies` names; None, with a word, if the disk is too small."""
    path = csv_of(rows)
    size_bytes = path.stat().st_size * copies
    free = shutil.disk_usage(folder).free
    if free < 3 * size_bytes:  # runs, data files, and room for others
        print(f"  left out: {size_bytes / 1e9:.1f} GB of CSV need more than {free / 1e9:.0f} GB of disk")
        return None
    place = Path(tempfile.mkdtemp(dir=folder))
    inputs = [place / f"{number:02}.csv" for number in range(copies)]
    for one in inputs:
        _link(path, one)
    os.chdir(place)
    try:
        with background_worker(place) as worker:
            ours = Ours()
            small = csv_of(min(rows, 100_000))
            ours.run([small])
            worker.reset()
            effort = Effort("")
            effort.run(lambda: ours.run(inputs))
            return Size(rows * copies, size_bytes, effort.clock_s[0], effort.cpu_s[0], worker.peak_bytes)
    finally:
        os.chdir(folder)
        shutil.rmtree(place)


def _link(path: Path, name: Path) -> None:
    try:
        name.hardlink_to(path)
    except OSError:  # another disk
        shutil.copyfile(path, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="1 million rows, one round")
    parser.add_argument("--rows", type=int, help="of the contest")
    parser.add_argument("--rounds", type=int, help="of the contest; 0 leaves it out")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    rows, rounds = (1_000_000, 1) if arguments.quick else (16_000_000, 3)
    rows = arguments.rows or rows
    rounds = rounds if arguments.rounds is None else arguments.rounds
    growing = [(1_000_000, 1), (1_000_000, 4)] if arguments.quick else GROWING
    folder = Path(tempfile.mkdtemp(prefix="lockstep-bench-"))
    os.chdir(folder)
    try:
        efforts = contest(folder, rows, rounds) if rounds else []
        sizes = [found for n, copies in growing if (found := of_size(folder, n, copies)) is not None]
        task_memory = load_config().limits.task_memory_bytes
    finally:
        os.chdir("/")
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{rows:,} rows of {len(COLUMNS)} columns, {rounds} interleaved rounds, {os.cpu_count()} cores")
    for effort in efforts:
        print(effort.line(rows, efforts[0]))
    for found in sizes:
        print(found.line(task_memory))
    for mark in marks(efforts, sizes, task_memory):
        print(mark)
    if arguments.json:
        figures = {"efforts": [vars(one) for one in efforts], "sizes": [vars(one) for one in sizes]}
        arguments.json.write_text(json.dumps(figures, indent=1))


# 1, 4 and 16 GB for the memory; from 1 to 64 million rows and on for the cost per row.
GROWING = [(1_000_000, 1), (4_000_000, 1), (16_000_000, 1), (16_000_000, 4), (16_000_000, 13)]


def marks(efforts: Sequence[Effort], sizes: Sequence[Size], task_memory: int) -> list[str]:
    said = []
    if efforts:
        ours, spark, duckdb = (statistics.median(one.clock_s) for one in efforts)
        said.append(_mark(spark / ours >= LEAST_SPEEDUP, f"{spark / ours:.2f} x as fast as Spark JVM", "2.5"))
        said.append(_mark(ours / duckdb <= MOST_BEHIND_DUCKDB, f"{ours / duckdb:.2f} x DuckDB's time", "1.3"))
    if sizes:
        above = max(one.peak_bytes for one in sizes) - task_memory
        said.append(
            _mark(above <= MOST_ABOVE_TASK_MEMORY, f"memory: task_memory {above / 1e6:+.0f} MB", "+300")
        )
        costs = [one.cpu_s / one.rows for one in sizes]
        growth = costs[-1] / costs[0]
        said.append(
            _mark(growth <= MOST_GROWTH, f"cpu per row, largest beside smallest: {growth:.2f} x", "1.1")
        )
    return said


def _mark(good: bool, text: str, limit: str) -> str:
    return f"{'met   ' if good else 'missed'} {text} (mark: {limit})"


if __name__ == "__main__":
    main()
