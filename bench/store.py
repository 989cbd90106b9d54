"""What the control plane costs per task: claim, begin, checkpoint and finish, on each job store.

    python bench/store.py                        jobs of 1,000 and of 10,000 tasks
    python bench/store.py --quick                1,000 only
    python bench/store.py --tasks 1000 100000    jobs of any size; --stores sqlite postgresql for some stores

One client, one task after the other, all of them durable. Each task stages two files. The stores take turns
after every 500 tasks of a job: figures are medians over these turns, so that what else the machine does
meanwhile falls on all of them alike. The last column sets a figure beside that of the smallest job: 1.0 means
that the cost of a job grows linearly with its tasks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lockstep.job import Lease, Progress, State
from lockstep.store import Claim, JobStore, open_store
from tests.servers import Postgresql
from tests.store_lab import LEASE_S, new_job, staged
from tests.zookeeper_server import ZooKeeperServer

TARGET_MS = 2.0
SLOTS = 4
"""Tasks that one claim takes, as a worker on a small machine does."""
TURN = 500
VERBS = ("claim", "begin", "checkpoint", "finish")
STORES = ("sqlite", "postgresql", "zookeeper")


@dataclass(frozen=True)
class Turn:
    """Milliseconds per task, by verb, and of this process's own processor time."""

    ms: dict[str, float]
    cpu_ms: float

    @property
    def total_ms(self) -> float:
        return sum(self.ms.values())


@dataclass
class Run:
    """One job of so many tasks in one store, worked through turn by turn."""

    store: str
    tasks: int
    turns: list[Turn] = field(default_factory=list)

    def ms(self, *verbs: str) -> float:
        return statistics.median(sum(turn.ms[verb] for verb in verbs) for turn in self.turns)

    @property
    def total_ms(self) -> float:
        return statistics.median(turn.total_ms for turn in self.turns)

    @property
    def least_ms(self) -> float:
        return min(turn.total_ms for turn in self.turns)

    @property
    def cpu_ms(self) -> float:
        return statistics.median(turn.cpu_ms for turn in self.turns)


class Stopwatch:
    def __init__(self) -> None:
        self.seconds = dict.fromkeys(VERBS, 0.0)
        self._cpu = time.process_time()

    @contextmanager
    def of(self, verb: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[verb] += time.perf_counter() - start

    def turn(self, tasks: int) -> Turn:
        cpu_s = time.process_time() - self._cpu
        ms = {verb: 1000 * spent / tasks for verb, spent in self.seconds.items()}
        return Turn(ms, 1000 * cpu_s / tasks)


def run_job(store: JobStore, run: Run) -> Iterator[None]:
    """Work through one job; stops after every turn."""
    job_id = f"{run.store}-{run.tasks}"
    store.create([new_job(job_id, run.tasks)])
    left = run.tasks
    while left:
        yield
        watch = Stopwatch()
        tasks = min(TURN, left)
        for _ in range(0, tasks, SLOTS):
            with watch.of("claim"):
                claims = store.claim("bench", SLOTS, LEASE_S)
            for claim in claims:
                run_task(store, claim, watch)
        run.turns.append(watch.turn(tasks))
        left -= tasks
    job = store.read(job_id)
    assert (job.state, job.tasks_done, job.files) == (State.COMMITTING, run.tasks, 2 * run.tasks)


def run_task(store: JobStore, claim: Claim, watch: Stopwatch) -> None:
    with watch.of("begin"):
        lease: Lease = store.begin(claim.lease, LEASE_S).lease
    files = [staged(f"{lease.job_id}-{lease.index}-{number}") for number in range(2)]
    with watch.of("checkpoint"):
        store.checkpoint(lease, {"row": 5}, files[:1], Progress(5, 50), LEASE_S)
    with watch.of("finish"):
        store.finish(lease, {"row": 10}, files[1:], Progress(10, 100))


def in_turns(jobs: Sequence[Iterator[None]]) -> None:
    """Let every job go on by one turn, again and again."""
    left = list(jobs)
    while left:
        left = [job for job in left if next(job, False) is None]


@contextmanager
def stores(folder: Path, names: Sequence[str]) -> Iterator[dict[str, JobStore]]:
    server = Postgresql() if "postgresql" in names else None
    keeper = ZooKeeperServer(folder / "zookeeper") if "zookeeper" in names else None
    opened: dict[str, JobStore] = {}
    try:
        if "sqlite" in names:
            opened["sqlite"] = open_store(f"sqlite:///{folder}/jobs.db")
        if server is not None:
            server.run("CREATE DATABASE bench")
            opened["postgresql"] = open_store(server.url("bench"))
        if keeper is not None:
            keeper.start()
            opened["zookeeper"] = open_store(keeper.url())
        yield opened
        for store in opened.values():
            store.close()
    finally:
        if keeper is not None:
            keeper.kill()
        if server is not None:
            server.close()


def table(runs: Sequence[Run]) -> Iterator[str]:
    names = (*VERBS, "all four", "no begin", "least", "processor", "growth")
    yield f"{'store':<12}{'tasks':>9}" + "".join(f"{name:>12}" for name in names)
    first: dict[str, float] = {}
    for run in runs:
        base = first.setdefault(run.store, run.total_ms)
        without = run.ms(*(verb for verb in VERBS if verb != "begin"))
        figures = [*(run.ms(verb) for verb in VERBS), run.total_ms, without, run.least_ms, run.cpu_ms]
        cells = "".join(f"{figure:>12.2f}" for figure in (*figures, run.total_ms / base))
        yield f"{run.store:<12}{run.tasks:>9,}{cells}"


def measured(sizes: Sequence[int], names: Sequence[str]) -> list[Run]:
    runs: list[Run] = []
    folder = Path(tempfile.mkdtemp(prefix="lockstep-bench-"))
    try:
        with stores(folder, names) as opened:
            in_turns([run_job(store, Run("warm-up", 50)) for store in opened.values()])
            for tasks in sizes:
                found = [Run(name, tasks) for name in opened]
                in_turns([run_job(opened[run.store], run) for run in found])
                runs += found
                print(f"  jobs of {tasks:,} tasks are done", file=sys.stderr)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return sorted(runs, key=lambda run: names.index(run.store))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="1,000 tasks only")
    parser.add_argument("--tasks", type=int, nargs="+", help="the sizes of the jobs")
    parser.add_argument("--stores", choices=STORES, nargs="+", default=STORES)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    sizes = arguments.tasks or ([1_000] if arguments.quick else [1_000, 10_000])
    runs = measured(sizes, arguments.stores)
    print(
        f"\nControl plane per task, in ms, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; "
        f"the mark for SQLite and PostgreSQL is {TARGET_MS:.0f} ms or less"
    )
    for line in table(runs):
        print(line)
    if arguments.json:
        figures = [
            {"store": run.store, "tasks": run.tasks, "turns": [vars(t) for t in run.turns]} for run in runs
        ]
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
