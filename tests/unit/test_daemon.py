"""What the workers' parent sets up for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyspark

import lockstep

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


def test_a_workers_collections_leave_what_was_loaded_alone() -> None:
    script = (
        "import gc; from lockstep.engine.daemon import load; load(); "
        "print(gc.get_freeze_count(), len(gc.get_objects()))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    frozen, looked_at = map(int, done.stdout.split())
    assert frozen > 100 * looked_at


def origin_of_spark(path: Sequence[Path]) -> str:
    script = (
        "from lockstep.engine.daemon import use_installed_spark; use_installed_spark(); "
        "import pyspark; print(pyspark.__file__)"
    )
    path = [*path, Path(lockstep.__file__).parents[1]]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def test_spark_is_loaded_from_its_package_unless_the_archives_are_of_another_one(
    tmp_path: Path,
) -> None:
    home = Path(pyspark.__file__).parent
    archives = sorted((home / "python" / "lib").glob("*.zip"))
    assert len(archives) == 2
    assert origin_of_spark(archives) == str(home / "__init__.py")
    another = [shutil.copy(archive, tmp_path) for archive in archives]
    assert origin_of_spark([Path(copy) for copy in another]).startswith(str(tmp_path))


ARCHIVES = """
import importlib, sys, zipfile, zipimport
from lockstep.engine.daemon import list_archives_once

def archive(*modules):
    with zipfile.ZipFile(sys.argv[1], "w") as file:
        for module in ["package/__init__", *modules, *(f"package/{module}" for module in modules)]:
            file.writestr(f"{module}.py", "")

listings = []
read_directory = zipimport._read_directory
zipimport._read_directory = lambda path: listings.append(path) or read_directory(path)
archive("early")
sys.path.append(sys.argv[1])
import early, package.early
list_archives_once()
listings.clear()
for _ in range(3):
    importlib.invalidate_caches()
print(len(listings))
archive("early", "late")
importlib.invalidate_caches()
import late, package.late
print(len(listings))
"""


def test_an_archive_on_the_path_is_listed_again_only_when_it_has_changed(tmp_path: Path) -> None:
    archive = str(tmp_path / "some.zip")
    done = subprocess.run(
        [sys.executable, "-c", ARCHIVES, archive], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["0", "2"]
