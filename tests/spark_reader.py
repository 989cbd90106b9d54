"""The Spark process behind `readers.SparkReader`: one JSON request per line, one JSON answer per line.

It reads what Lockstep wrote, and writes what Lockstep reads.
Arguments: the jars, separated by commas, and a folder for the results.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

EXTENSIONS = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"


def session(jars: str, folder: Path) -> SparkSession:
    return (
        SparkSession.builder.master("local[2]")
        .appName("independent reader")
        .config("spark.jars", jars)
        .config("spark.driver.memory", "1g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.local.dir", str(folder))
        .config("spark.sql.extensions", EXTENSIONS)
        .config("spark.sql.catalog.written", "org.apache.iceberg.spark.SparkCatalog")
        .config("spark.sql.catalog.written.type", "hadoop")
        .config("spark.sql.catalog.written.warehouse", str(folder / "written"))
        .getOrCreate()
    )


def write(spark: SparkSession, statements: list[str]) -> dict[str, str]:
    """Run statements; tables of the catalog `written` lie in a folder of this process."""
    for statement in statements:
        spark.sql(statement)
    return {}


def delete_equal(spark: SparkSession, request: dict[str, Any]) -> dict[str, str]:
    """Commit a file of equality deletes, as streaming writers do and Spark's SQL cannot."""
    jvm, gateway = spark._jvm, spark.sparkContext._gateway
    assert jvm is not None
    assert gateway is not None
    iceberg = jvm.org.apache.iceberg
    table = iceberg.spark.Spark3Util.loadIcebergTable(spark._jsparkSession, request["table"])
    ids = gateway.new_array(jvm.int, len(request["field_ids"]))
    for place, field_id in enumerate(request["field_ids"]):
        ids[place] = field_id
    file = iceberg.FileMetadata.deleteFileBuilder(table.spec()).ofEqualityDeletes(ids)
    file = file.withPath(request["path"]).withFormat("PARQUET").withRecordCount(request["rows"])
    file = file.withFileSizeInBytes(request["size_bytes"])
    if request["partition"]:
        file = file.withPartitionPath(request["partition"])
    table.newRowDelta().addDeletes(file.build()).commit()
    spark.sql(f"REFRESH TABLE {request['table']}")
    return {}


def through_catalog(spark: SparkSession, name: str, properties: dict[str, str], table: str) -> SparkSession:
    """A session in which `t` is the table of this catalog, whose name is part of a SQL catalog's key."""
    # A session keeps the catalogs that it has seen: each question gets one of its own.
    session = spark.newSession()
    session.conf.set(f"spark.sql.catalog.{name}", "org.apache.iceberg.spark.SparkCatalog")
    for key, value in properties.items():
        session.conf.set(f"spark.sql.catalog.{name}.{key}", value)
    session.table(f"{name}.{table}").createOrReplaceTempView("t")
    return session


def answer(spark: SparkSession, request: dict[str, Any], path: Path) -> dict[str, str]:
    if "statements" in request:
        return write(spark, request["statements"])
    if "field_ids" in request:
        return delete_equal(spark, request)
    if "catalog" in request:
        spark = through_catalog(spark, request["catalog"], request["properties"], request["location"])
    else:
        reader = spark.read.format("iceberg")
        if request.get("snapshot_id") is not None:
            reader = reader.option("versionAsOf", str(request["snapshot_id"]))
        reader.load(request["location"]).createOrReplaceTempView("t")
    table = spark.sql(request["sql"]).toArrow()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return {"path": str(path)}


def main() -> None:
    jars, folder = sys.argv[1], Path(sys.argv[2])
    # Only answers may reach the pipe: what Spark prints goes where the errors go.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spark = session(jars, folder)
    for number, line in enumerate(sys.stdin):
        try:
            reply = answer(spark, json.loads(line), folder / f"{number}.arrow")
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
    spark.stop()


if __name__ == "__main__":
    main()
