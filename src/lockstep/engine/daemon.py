"""PySpark's daemon with our modules loaded before it forks.

A Python worker is a fork of this process, so it starts in milliseconds instead of seconds of imports, and
all workers share the memory of the code.
"""

from __future__ import annotations

import clickhouse_connect.driver.httpclient  # noqa: F401
import pyarrow.parquet  # noqa: F401
import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

import lockstep.sink.datafile
import lockstep.source.clickhouse
import lockstep.source.parquet  # noqa: F401

if __name__ == "__main__":
    manager()  # type: ignore[no-untyped-call]
