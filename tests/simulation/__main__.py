"""`make simulate`: many seeds, or one with its trace."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulation.scenario import simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="run this one, and print what happened")
    options = parser.parse_args()
    if options.seed is not None:
        return _one(options.seed)
    return _many(range(options.first, options.first + options.seeds))


def _one(seed: int) -> int:
    run = simulate(seed)
    print("\n".join(run.lines()))
    print(f"\nseed {seed}: {run.states}, trace {run.digest[:16]}")
    for violation in run.violations:
        print(f"VIOLATION: {violation}")
    return 1 if run.violations else 0


def _many(seeds: range) -> int:
    began = time.perf_counter()
    broken: list[int] = []
    states: Counter[str] = Counter()
    for done, seed in enumerate(seeds, 1):
        run = simulate(seed)
        states.update(run.states.values())
        if run.violations:
            broken.append(seed)
            print(f"seed {seed}: make simulate SEED={seed}")
            for violation in run.violations:
                print(f"  VIOLATION: {violation}", flush=True)
        if done % 100 == 0 and sys.stderr.isatty():
            print(f"\r{done} seeds", end="", file=sys.stderr, flush=True)
    took_s = time.perf_counter() - began
    ended = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    print(f"{len(seeds)} seeds in {took_s:.1f} s: {len(seeds) / took_s:.1f} per second; jobs: {ended}")
    print(f"{len(broken)} seeds with violations{': ' + ' '.join(map(str, broken)) if broken else ''}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
