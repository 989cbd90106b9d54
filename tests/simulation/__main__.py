"""`make simulate`: many seeds on all cores, or one with its trace."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

from tests.simulation.scenario import simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="run this one, and print what happened")
    parser.add_argument("--step", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seed is not None:
        return _one(options.seed)
    end = options.first + options.seeds
    if options.step is not None:
        return _some(range(options.first, end, options.step))
    return _many(options.first, end, max(1, min(options.processes, options.seeds)))


def _one(seed: int) -> int:
    run = simulate(seed)
    print("\n".join(run.lines()))
    print(f"\nseed {seed}: {run.states}, trace {run.digest[:16]}")
    for violation in run.violations:
        print(f"VIOLATION: {violation}")
    return 1 if run.violations else 0


def _some(seeds: range) -> int:
    """The share of one process: a line of JSON for each seed."""
    for seed in seeds:
        run = simulate(seed)
        print(json.dumps([seed, list(run.states.values()), run.violations]), flush=True)
    return 0


def _many(first: int, end: int, processes: int) -> int:
    began = time.perf_counter()
    states: Counter[str] = Counter()
    broken: list[int] = []
    done = 0
    for seed, ended, violations in _results(first, end, processes):
        done += 1
        states.update(ended)
        if violations:
            broken.append(seed)
            print(f"seed {seed}: make simulate SEED={seed}")
            for violation in violations:
                print(f"  VIOLATION: {violation}", flush=True)
        if done % 100 == 0 and sys.stderr.isatty():
            print(f"\r{done} seeds", end="", file=sys.stderr, flush=True)
    took_s = time.perf_counter() - began
    jobs = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    print(
        f"{done} seeds in {took_s:.1f} s on {processes} processes: {done / took_s:.1f} per second; "
        f"jobs: {jobs or 'none'}"
    )
    print(f"{len(broken)} seeds with violations{': ' + ' '.join(map(str, sorted(broken))) if broken else ''}")
    if done != end - first:
        print(f"{end - first - done} seeds did not run: a process died")
        return 2
    return 1 if broken else 0


def _results(first: int, end: int, processes: int) -> Iterator[tuple[int, list[str], list[str]]]:
    """What the processes report, each in its turn: their shares are alike."""
    command = [sys.executable, "-m", "tests.simulation", "--step", str(processes)]
    started = [
        subprocess.Popen(
            [*command, "--first", str(first + number), "--seeds", str(end - first - number)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    try:
        left = list(started)
        while left:
            for process in list(left):
                assert process.stdout is not None
                line = process.stdout.readline()
                if line:
                    seed, ended, violations = json.loads(line)
                    yield seed, ended, violations
                else:
                    left.remove(process)
    finally:
        for process in started:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
