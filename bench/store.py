"""What the control plane costs per task: claim, begin, checkpoint and finish, on each job store.

    python bench/store.py          jobs of 1,000 and 10,000 tasks
    python bench/store.py --full   100,000 too
    python bench/store.py --quick  1,000 only

One client, one task after the other, all of them durable. Each task stages two files. The last column sets
the figure beside that of the smallest job: 1.0 means that the cost of a job grows linearly with its tasks.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lockstep.job import Progress, State
from lockstep.store import JobStore, open_store
from tests.servers import Postgresql
from tests.store_lab import LEASE_S, new_job, staged
from tests.zookeeper_server import ZooKeeperServer

TARGET_MS = 2.0
SLOTS = 4
"""Tasks that one claim takes, as a worker on a small machine does."""
VERBS = ("claim", "begin", "checkpoint", "finish")


@dataclass(frozen=True)
class Cost:
    store: str
    tasks: int
    ms: dict[str, float]

    @property
    def total_ms(self) -> float:
        return sum(self.ms.values())


class Stopwatch:
    def __init__(self) -> None:
        self.seconds = dict.fromkeys(VERBS, 0.0)

    @contextmanager
    def of(self, verb: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[verb] += time.perf_counter() - start


def run_job(store: JobStore, name: str, tasks: int) -> Cost:
    """Work through one job of so many tasks."""
    job_id = f"{name}-{tasks}"
    store.create([new_job(job_id, tasks)])
    watch = Stopwatch()
    while True:
        with watch.of("claim"):
            claims = store.claim("bench", SLOTS, LEASE_S)
        if not claims:
            break
        for claim in claims:
            with watch.of("begin"):
                lease = store.begin(claim.lease, LEASE_S).lease
            files = [staged(f"{job_id}-{lease.index}-{number}") for number in range(2)]
            with watch.of("checkpoint"):
                store.checkpoint(lease, {"row": 5}, files[:1], Progress(5, 50), LEASE_S)
            with watch.of("finish"):
                store.finish(lease, {"row": 10}, files[1:], Progress(10, 100))
    job = store.read(job_id)
    assert (job.state, job.tasks_done, job.files) == (State.COMMITTING, tasks, 2 * tasks)
    return Cost(name, tasks, {verb: 1000 * spent / tasks for verb, spent in watch.seconds.items()})


@contextmanager
def stores(folder: Path) -> Iterator[dict[str, JobStore]]:
    server = Postgresql()
    keeper = ZooKeeperServer(folder / "zookeeper")
    try:
        keeper.start()
        server.run("CREATE DATABASE bench")
        opened = {
            "sqlite": open_store(f"sqlite:///{folder}/jobs.db"),
            "postgresql": open_store(server.url("bench")),
            "zookeeper": open_store(keeper.url()),
        }
        yield opened
        for store in opened.values():
            store.close()
    finally:
        keeper.kill()
        server.close()


def table(costs: list[Cost]) -> Iterator[str]:
    verbs = "".join(f"{verb:>12}" for verb in VERBS)
    yield f"{'store':<12}{'tasks':>9}{verbs}{'ms per task':>13}{'growth':>8}"
    first: dict[str, float] = {}
    for cost in costs:
        base = first.setdefault(cost.store, cost.total_ms)
        figures = "".join(f"{cost.ms[verb]:>12.2f}" for verb in VERBS)
        yield f"{cost.store:<12}{cost.tasks:>9,}{figures}{cost.total_ms:>13.2f}{cost.total_ms / base:>8.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--full", action="store_true", help="100,000 tasks too")
    parser.add_argument("--quick", action="store_true", help="1,000 tasks only")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    sizes = [1_000] if arguments.quick else [1_000, 10_000] + [100_000] * arguments.full
    folder = Path(tempfile.mkdtemp(prefix="lockstep-bench-"))
    try:
        with stores(folder) as opened:
            for store in opened.values():
                run_job(store, "warm-up", 50)
            costs = [run_job(store, name, tasks) for name, store in opened.items() for tasks in sizes]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\nControl plane per task, in ms; the target is {TARGET_MS:.0f} ms or less")
    for line in table(costs):
        print(line)
    if arguments.json:
        figures = [{**vars(cost), "total_ms": cost.total_ms} for cost in costs]
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
