"""What the workers' parent sets up for them."""

from __future__ import annotations

import subprocess
import sys

ROUNDS = """
import resource, sys, time
from lockstep.engine.daemon import keep_memory
if sys.argv[1] == "kept":
    keep_memory()
import numpy as np
import pyarrow as pa

def once():
    numbers = np.ones(3_000_000)
    time.sleep(0.02)  # Arrow's allocator gives memory back after a while
    return pa.allocate_buffer(24_000_000).size + pa.array(numbers + 1.0).nbytes

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

[once() for _ in range(5)]
before = faults()
[once() for _ in range(10)]
print(faults() - before)
"""


def pages_fetched(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", ROUNDS, how], check=True, capture_output=True, text=True)
    return int(done.stdout)


def test_workers_use_memory_again_without_fetching_its_pages_anew() -> None:
    assert pages_fetched("kept") * 5 < pages_fetched("given back")


def test_a_worker_that_makes_its_first_array_finds_everything_loaded() -> None:
    script = (
        "import sys; from lockstep.engine.daemon import load; load(); before = set(sys.modules); "
        "import numpy as np, pyarrow as pa; pa.array(np.arange(3)); print(len(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 10
