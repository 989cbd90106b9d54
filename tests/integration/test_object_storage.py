"""A lake in object storage: exports by a real worker, read back by Spark through the catalog."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.job import State
from tests.lab import Lab, picked
from tests.object_servers import Minio, s3_properties, spark_properties
from tests.readers import SparkReader

pytestmark = pytest.mark.servers


@pytest.mark.parametrize("catalog", ["rest", "bucket"])
def test_an_export_to_a_bucket_is_exact_for_spark(manned_lab: Lab, spark: SparkReader, catalog: str) -> None:
    """Nothing but the catalog says where the bucket is: [storage] is not needed."""
    lab, table = manned_lab, f"events_in_{catalog}"
    lab.make_events(table, partitions=2, parts=2)
    target = f"iceberg://{catalog}/db.{table}"
    options = ("--all", "--create", "--file-size", "30KB", "--detach")
    asked = lab.document("export", lab.source(table), target, *options)["jobs"]
    jobs = [lab.wait_for_end(job["job_id"], timeout_s=240) for job in asked]
    assert [job.state for job in jobs] == [State.COMPLETED, State.COMPLETED], [job.error for job in jobs]
    manifests = [list(lab.store().manifest(job.job_id, "write")) for job in jobs]
    assert all(len(files) > 1 for files in manifests)
    assert all(file.path.startswith("s3://") for files in manifests for file in files)
    rows = spark.read_from(catalog, spark_properties(lab.config.catalogs[catalog]), f"db.{table}")
    assert picked(rows) == lab.source_rows(table)
    assert sorted(lab.lineage(f"db.{table}", catalog)) == sorted(job.snapshot_id or 0 for job in jobs)


def test_doctor_writes_to_the_bucket_of_a_catalog_with_the_catalogs_own_keys(
    tmp_path: Path, chdb_folder: Path, minio: Minio
) -> None:
    minio.make_bucket("doctor")
    catalog = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": "s3://doctor/warehouse",
        **s3_properties(minio.url),
    }
    lab = Lab(tmp_path, chdb_folder, settings={"catalogs.bucket": catalog})
    checks = json.loads(lab.run("doctor", "--json").stdout)["checks"]
    assert [each["verdict"] for each in checks if "s3://doctor/warehouse" in each["detail"]] == ["ok"]
    assert minio.keys("doctor") == []
    lab.close()
