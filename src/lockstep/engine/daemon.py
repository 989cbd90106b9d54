"""PySpark's daemon with our modules loaded before it forks.

A Python worker is a fork of this process, so it starts in milliseconds instead of seconds of imports, and
all workers share the memory of the code.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
import zipimport
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

LOADED: Final = (
    "clickhouse_connect.driver.httpclient",
    "pyarrow.parquet",
    "pyspark.worker",
    "lockstep.sink.datafile",
    "lockstep.sink.run",
    "lockstep.source.clickhouse",
    "lockstep.source.files",
    "lockstep.source.parquet",
)
# Numbers of settings in glibc's mallopt.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_KEPT_BYTES: Final = 1 << 30


def keep_memory() -> None:
    """Let freed memory stay with the process, for a task uses the same amount over and over.

    To give pages back to the system and to fetch them again took a quarter of an import's time. What a
    worker holds at most is what its tasks may use. Arrow reads its setting as it is loaded.
    """
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries than glibc have none
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)


def use_installed_spark() -> None:
    """Take PySpark from its installed package, not from the archives inside of it that Spark puts first.

    What comes from an archive is compiled anew at each start: two thirds of a second.
    """
    archives = [entry for entry in sys.path if entry.endswith(".zip")]
    installed = PathFinder.find_spec("pyspark", [entry for entry in sys.path if entry not in archives])
    if installed is not None and installed.origin is not None:
        home = Path(installed.origin).parent
        sys.path[:] = [entry for entry in sys.path if not Path(entry).is_relative_to(home)]


def load() -> None:
    for name in LOADED:
        importlib.import_module(name)
    import numpy as np
    import pyarrow as pa

    # The first array made of another one lets Arrow look for pandas, and load it: a quarter of a second.
    pa.array(np.zeros(1))
    # What is loaded stays: no collection of garbage in a worker has to look at it again.
    gc.collect()
    gc.freeze()


def list_archives_once() -> None:
    """Let an archive on Python's path be listed again only when it has changed.

    Before each task PySpark asks every finder to forget what it knows, and that of each folder in an
    archive then lists all of it, in Python: a tenth of a second for Spark's own.
    """
    list_again = zipimport.zipimporter.invalidate_caches
    listed: dict[tuple[str, str], tuple[int, int] | None] = {}

    def invalidate_caches(finder: zipimport.zipimporter) -> None:
        try:
            found = os.stat(finder.archive)
            state = (found.st_mtime_ns, found.st_size)
        except OSError:
            state = None
        folder = (finder.archive, finder.prefix)
        if folder not in listed or listed[folder] != state:
            list_again(finder)
            listed[folder] = state

    setattr(zipimport.zipimporter, "invalidate_caches", invalidate_caches)  # noqa: B010
    importlib.invalidate_caches()


def main() -> None:
    keep_memory()
    use_installed_spark()
    load()
    list_archives_once()
    from pyspark.daemon import manager

    manager()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
