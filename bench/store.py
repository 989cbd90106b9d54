"""What the control plane costs per task: claim, begin, checkpoint and finish, on each job store.

    python bench/store.py                        jobs of 1,000 and of 10,000 tasks
    python bench/store.py --quick                1,000 only
    python bench/store.py --tasks 1000 100000    jobs of any size; --stores sqlite postgresql for some stores

One client, one task after the other, all of them durable. Each task stages two files. The stores take turns
after every 500 tasks of a job: figures are medians over these turns, so that what else the machine does
meanwhile falls on all of them alike. Of a job of more than 10,000 tasks the first and the last 3,000 are
measured; those between are only claimed, many at a time, and finished. `growth` sets the figure before it
beside that of the smallest job: 1.0 means that the cost of a job grows linearly with its tasks.
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
from itertools import chain
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
ALL_MEASURED = 10_000
ENDS = 3_000
"""Tasks that are measured at the beginning and at the end of a job of more than ALL_MEASURED."""
SLOTS_BETWEEN = 64
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
    """Tasks of one job in one store, worked through turn by turn: all of them, or those at one end."""

    store: str
    tasks: int
    part: str = "all"
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


def parts_of(store: str, tasks: int) -> list[Run]:
    if tasks <= ALL_MEASURED:
        return [Run(store, tasks)]
    return [Run(store, tasks, f"{end} {ENDS:,}") for end in ("first", "last")]


def run_job(store: JobStore, parts: Sequence[Run]) -> Iterator[None]:
    """Work through one job; stops after every turn."""
    tasks = parts[0].tasks
    job_id = f"{parts[0].store}-{tasks}"
    store.create([new_job(job_id, tasks)])
    between = 0
    if len(parts) == 1:
        yield from measure(store, parts[0], tasks)
    else:
        first, last = parts
        between = tasks - 2 * ENDS
        yield from measure(store, first, ENDS)
        yield from pass_over(store, between)
        yield from measure(store, last, ENDS)
    job = store.read(job_id)
    assert (job.state, job.tasks_done) == (State.COMMITTING, tasks)
    assert job.files == 2 * tasks - between


def measure(store: JobStore, run: Run, tasks: int) -> Iterator[None]:
    for start in range(0, tasks, TURN):
        yield
        watch = Stopwatch()
        some = min(TURN, tasks - start)
        for done in range(0, some, SLOTS):
            with watch.of("claim"):
                claims = store.claim("bench", min(SLOTS, some - done), LEASE_S)
            for claim in claims:
                run_task(store, claim, watch)
        run.turns.append(watch.turn(some))


def pass_over(store: JobStore, tasks: int) -> Iterator[None]:
    """Finish tasks with as few verbs as it takes."""
    left = tasks
    while left:
        if (tasks - left) % TURN < SLOTS_BETWEEN:
            yield
        for claim in store.claim("bench", min(SLOTS_BETWEEN, left), LEASE_S):
            lease = claim.lease
            file = staged(f"{lease.job_id}-{lease.index}")
            store.finish(lease, {"row": 10}, [file], Progress(10, 100))
            left -= 1


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
    names = (*VERBS, "all four", "growth", "no begin", "growth", "least", "processor")
    yield f"{'store':<12}{'tasks':>9}  {'measured':<12}" + "".join(f"{name:>11}" for name in names)
    first: dict[str, tuple[float, float]] = {}
    for run in runs:
        without = run.ms(*(verb for verb in VERBS if verb != "begin"))
        base, base_without = first.setdefault(run.store, (run.total_ms, without))
        figures = [run.ms(verb) for verb in VERBS]
        figures += [run.total_ms, run.total_ms / base, without, without / base_without]
        cells = "".join(f"{figure:>11.2f}" for figure in (*figures, run.least_ms, run.cpu_ms))
        yield f"{run.store:<12}{run.tasks:>9,}  {run.part:<12}{cells}"


def measured(sizes: Sequence[int], names: Sequence[str]) -> list[Run]:
    runs: list[Run] = []
    folder = Path(tempfile.mkdtemp(prefix="lockstep-bench-"))
    try:
        with stores(folder, names) as opened:
            in_turns([run_job(store, [Run("warm-up", 50)]) for store in opened.values()])
            for tasks in sizes:
                start = time.perf_counter()
                found = {name: parts_of(name, tasks) for name in opened}
                in_turns([run_job(opened[name], parts) for name, parts in found.items()])
                runs += chain.from_iterable(found.values())
                took_s = time.perf_counter() - start
                print(f"  jobs of {tasks:,} tasks are done, in {took_s:.0f} s", file=sys.stderr)
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
            {
                "store": run.store,
                "tasks": run.tasks,
                "measured": run.part,
                "turns": [vars(turn) for turn in run.turns],
            }
            for run in runs
        ]
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
