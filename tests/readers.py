"""Readers of Iceberg tables that share no code with ours: Spark with the JVM runtime, and DuckDB.

Both take the address of a `metadata.json`, so they see what was published and ask no catalog of ours.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

READER = Path(__file__).with_name("spark_reader.py")


def cache_folder() -> Path:
    """Where `make setup` keeps what it fetched; the same rule as in scripts/common.sh."""
    base = os.environ.get("LOCKSTEP_CACHE") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "lockstep"


def iceberg_jar() -> Path:
    return _jar("iceberg-spark-runtime")


def _jar(name: str) -> Path:
    jars = sorted((cache_folder() / "jars").glob(f"{name}-*.jar"))
    if not jars:
        raise AssertionError(f"no {name} under {cache_folder()}: run `make setup`")
    return jars[-1]


class SparkReader:
    """Spark with the Iceberg JVM runtime, in a process of its own.

    The engine under test may start and stop Spark in this process as it likes: the two never share a JVM.
    """

    def __init__(self, jar: Path, log: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-spark-reader-")
        self._log = log
        # The others let it read tables in object stores, and ask a catalog in SQLite.
        jars = ",".join(map(str, (jar, _jar("iceberg-aws-bundle"), _jar("sqlite-jdbc"))))
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("LOCKSTEP_", "SPARK_"))}
        environment.update(PYSPARK_PYTHON=sys.executable, TZ="UTC", SPARK_LOCAL_IP="127.0.0.1")
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, str(READER), jars, self._folder.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                cwd=self._folder.name,
                text=True,
            )

    def read(self, metadata_location: str, *, snapshot_id: int | None = None) -> pa.Table:
        """All rows of the table, at its current snapshot or at another one."""
        return self.query(metadata_location, "SELECT * FROM t", snapshot_id=snapshot_id)

    def query(self, metadata_location: str, sql: str, *, snapshot_id: int | None = None) -> pa.Table:
        """The result of `sql` over the table as `t`. `…metadata.json#snapshots` reads a metadata table."""
        return self._table({"location": metadata_location, "sql": sql, "snapshot_id": snapshot_id})

    def read_from(self, catalog: str, properties: dict[str, str], name: str) -> pa.Table:
        """All rows of a table that Spark finds through a catalog of this name, with these properties."""
        request = {"location": name, "sql": "SELECT * FROM t", "catalog": catalog, "properties": properties}
        return self._table(request)

    def _table(self, request: dict[str, Any]) -> pa.Table:
        answer = self._ask(request)
        with pa.memory_map(answer["path"]) as file:
            table = pa.ipc.open_file(file).read_all()
        return table

    def write(self, *statements: str) -> None:
        """Run SQL that changes tables of Spark's own catalog `written`: `written.db.name`."""
        self._ask({"location": "the catalog `written`", "statements": statements})

    def written(self, table: str) -> Path:
        """The folder of `written.db.name`."""
        return Path(self._folder.name) / "written" / Path(*table.split(".")[1:])

    def metadata_of(self, table: str) -> str:
        """The newest metadata file of `written.db.name`."""
        folder = self.written(table) / "metadata"
        version = (folder / "version-hint.text").read_text().strip()
        return str(folder / f"v{version}.metadata.json")

    def delete_equal(self, table: str, rows: pa.Table, partition: str = "") -> None:
        """Commit a file of equality deletes; the columns of `rows` carry their field ids."""
        folder = self.written(table) / "data"
        path = folder / f"equality-{len(list(folder.glob('equality-*')))}.parquet"
        pq.write_table(rows, path)
        request = {
            "location": table,
            "table": table,
            "path": str(path),
            "field_ids": [int(field.metadata[b"PARQUET:field_id"]) for field in rows.schema],
            "rows": rows.num_rows,
            "size_bytes": path.stat().st_size,
            "partition": partition,
        }
        self._ask(request)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the Spark reader has ended:\n{self._log.read_text()[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise AssertionError(f"Spark cannot read {request['location']}: {answer['error']}")
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()


def duckdb_with_iceberg() -> duckdb.DuckDBPyConnection:
    """DuckDB with the Iceberg extension from its wheel: nothing is downloaded, the signature is checked."""
    connection = duckdb.connect()
    for name in ("avro", "iceberg"):
        spec = importlib.util.find_spec(f"duckdb_extension_{name}")
        assert spec is not None
        assert spec.origin is not None
        file = Path(spec.origin).parent / "extensions" / f"v{duckdb.__version__}" / f"{name}.duckdb_extension"
        connection.execute(f"LOAD '{file}'")
    connection.execute("SET TimeZone = 'UTC'")
    return connection


def read_with_duckdb(metadata_location: str) -> pa.Table:
    with duckdb_with_iceberg() as connection:
        path = metadata_location.removeprefix("file://")
        return connection.execute("SELECT * FROM iceberg_scan(?)", [path]).to_arrow_table()
