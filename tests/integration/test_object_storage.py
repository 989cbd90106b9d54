"""A lake in object storage: exports by a real worker, read back by Spark through the catalog."""

from __future__ import annotations

import pytest

from lockstep.job import State
from tests.lab import Lab, picked
from tests.object_servers import spark_properties
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
