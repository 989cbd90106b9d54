"""What it costs to publish very many files at once, beside PyIceberg's own append of the same files.

    python bench/commit.py           100,000 files, three interleaved rounds
    python bench/commit.py --quick   10,000 files

Both sides write the same entries (seven columns with full statistics, thirty partitions) into a fresh table
of the same catalog. Ours begins with what the job store holds, and reads and writes the register too;
PyIceberg's begins with entries that are ready. What a commit does before it publishes is timed apart: reading
the manifest from the job store, and looking for each staged file.
On a machine that others use too, the processor's time says more than the clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from pyiceberg.manifest import DataFile

from lockstep.job import Fingerprint, Json, NewJob, Progress, StagedFile, commit_id
from lockstep.store import JobStore, open_store
from lockstep.target import Outcome, TargetTable
from lockstep.target.iceberg import IcebergTarget
from lockstep.target.snapshot import data_files
from tests.iceberg_tables import Lake, by_identity
from tests.store_lab import LEASE_S, new_job

TARGET_RATIO = 1.2
OURS = "our commit, register read back"
PEER = "PyIceberg's fast append of the same entries"
MANIFEST = "before it: the manifest from the job store"
LOOK = "before it: each staged file looked for"
PARTITIONS = 30
FILES_PER_CHECKPOINT = 500
NAMES = ("id", "day", "user_id", "amount", "country", "url", "score")
TYPES = ("long", "int", "long", "double", "string", "string", "double")
SCHEMA: Json = {
    "type": "struct",
    "fields": [
        {"id": number, "name": name, "type": kind, "required": False}
        for number, (name, kind) in enumerate(zip(NAMES, TYPES, strict=True), 1)
    ],
}
BY_DAY = by_identity(2, "day")


class Spent(NamedTuple):
    wall_s: float
    cpu_s: float


class Warehouse(Lake):
    """One catalog, a fresh table of the same shape for each measurement, and staged files in its folder."""

    def fresh(self, name: str) -> tuple[IcebergTarget, TargetTable]:
        target = IcebergTarget(f"iceberg://{self.name}/bench.{name}", self.config)
        return target, target.create(SCHEMA, BY_DAY, {"order-id": 0, "fields": []})

    def staged(self, count: int) -> list[StagedFile]:
        """Files of four bytes, described as if they held some thousand rows each."""
        folder = self.folder / "staged"
        folder.mkdir()
        files = []
        for number in range(count):
            path = folder / f"{number:06d}.parquet"
            path.write_bytes(b"PAR1")
            print_of_rows = Fingerprint(1000 + number % 7, dict.fromkeys(NAMES, number))
            files.append(
                StagedFile(
                    f"file://{path}",
                    4,
                    1000 + number % 7,
                    "crc",
                    print_of_rows,
                    (number % PARTITIONS,),
                    stats(number),
                )
            )
        return files


def stats(number: int) -> Json:
    columns = [str(column) for column in range(1, len(NAMES) + 1)]
    bound = b64encode(number.to_bytes(8, "little")).decode()
    return {
        "column_sizes": dict.fromkeys(columns, 4000 + number),
        "value_counts": dict.fromkeys(columns, 1000 + number % 7),
        "null_value_counts": dict.fromkeys(columns, 0),
        "nan_value_counts": {"4": 0, "7": 0},
        "lower_bounds": dict.fromkeys(columns, bound),
        "upper_bounds": dict.fromkeys(columns, bound),
        "split_offsets": [4],
        "sort_order_id": 0,
    }


def publish(warehouse: Warehouse, name: str, files: Sequence[StagedFile]) -> Spent:
    """Our commit, from the staged files to the register that says so."""
    target, head = warehouse.fresh(name)
    plan = warehouse.plan(head)
    commit = commit_id(name, 1)

    def commit_and_look() -> None:
        target.publish(head, plan, commit, name, files)
        assert target.outcome(target.load(), commit)[0] is Outcome.COMMITTED

    return timed(commit_and_look)


def append(warehouse: Warehouse, name: str, entries: Sequence[DataFile]) -> Spent:
    """PyIceberg's own fast append, and the look at the table afterwards."""
    warehouse.fresh(name)
    table = warehouse.catalog.load_table(f"bench.{name}")

    def append_and_look() -> None:
        with table.transaction() as transaction, transaction.update_snapshot().fast_append() as update:
            for entry in entries:
                update.append_data_file(entry)
        assert warehouse.catalog.load_table(f"bench.{name}").current_snapshot() is not None

    return timed(append_and_look)


def fill(store: JobStore, files: Sequence[StagedFile]) -> str:
    """A job whose one task has staged all files."""
    job: NewJob = new_job("bench", 1)
    store.create([job])
    [claim] = store.claim("bench", 1, LEASE_S)
    lease = store.begin(claim.lease, LEASE_S).lease
    for start in range(0, len(files), FILES_PER_CHECKPOINT):
        some = files[start : start + FILES_PER_CHECKPOINT]
        store.checkpoint(lease, {"row": start}, some, Progress(start, start), LEASE_S)
    store.finish(lease, {"row": len(files)}, [], Progress(len(files), len(files)))
    return job.job_id


def timed(action: Callable[[], object]) -> Spent:
    gc.collect()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    action()
    return Spent(time.perf_counter() - begin, time.process_time() - begin_cpu)


def measure(folder: Path, count: int, rounds: int) -> dict[str, list[Spent]]:
    warehouse = Warehouse(folder)
    files = warehouse.staged(count)
    target, _ = warehouse.fresh("warm_up")
    entries = data_files(files, warehouse.catalog.load_table("bench.warm_up").metadata)
    publish(warehouse, "warm_up_ours", files[:1000])
    append(warehouse, "warm_up_theirs", entries[:1000])
    store = open_store(f"sqlite:///{folder}/jobs.db")
    job_id = fill(store, files)
    spent: dict[str, list[Spent]] = {OURS: [], PEER: [], MANIFEST: [], LOOK: []}
    for number in range(rounds):
        # Whoever comes second finds a warmer machine: they take turns.
        for side in (OURS, PEER) if number % 2 == 0 else (PEER, OURS):
            if side is OURS:
                spent[OURS].append(publish(warehouse, f"ours_{number}", files))
            else:
                spent[PEER].append(append(warehouse, f"peer_{number}", entries))
        spent[MANIFEST].append(timed(lambda: sum(1 for _ in store.manifest(job_id, "write"))))
        spent[LOOK].append(timed(lambda: target.missing(files)))
        print(f"  round {number + 1} of {rounds}", file=sys.stderr)
    store.close()
    return spent


def line(name: str, spent: Sequence[Spent]) -> str:
    walls = [one.wall_s for one in spent]
    cpu_s = statistics.median(one.cpu_s for one in spent)
    spread = f"({min(walls):.2f}..{max(walls):.2f})"
    return f"{name:<46}{statistics.median(walls):7.2f} s {spread:<16} processor {cpu_s:6.2f} s"


def ratio(spent: dict[str, list[Spent]], of: Callable[[Spent], float]) -> float:
    return statistics.median(map(of, spent[OURS])) / statistics.median(map(of, spent[PEER]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="10,000 files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    count = 10_000 if arguments.quick else 100_000
    folder = Path(tempfile.mkdtemp(prefix="lockstep-bench-"))
    try:
        spent = measure(folder, count, arguments.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wall, cpu = ratio(spent, lambda one: one.wall_s), ratio(spent, lambda one: one.cpu_s)
    print(
        f"\nOne commit of {count:,} files, {arguments.rounds} interleaved rounds, "
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    for name in (OURS, PEER):
        print(line(name, spent[name]))
    print(
        f"{wall:.2f} x PyIceberg's time, {cpu:.2f} x its processor time; the mark is {TARGET_RATIO} x or less"
    )
    for name in (MANIFEST, LOOK):
        print(line(name, spent[name]))
    if arguments.json:
        figures = {"files": count, "spent": spent, "wall_ratio": wall, "cpu_ratio": cpu}
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
