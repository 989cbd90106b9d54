"""An export into a catalog that is only a folder, as a user runs it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.job import State
from tests.lab import Lab
from tests.readers import read_with_duckdb

pytestmark = pytest.mark.servers


def test_an_export_into_a_folder_is_exact_beside_what_a_dead_writer_left(manned_lab: Lab, spark) -> None:
    lab = manned_lab
    lab.make_events("filed", partitions=2)
    table = lab.folder / "folder" / "db" / "filed"
    first = export(lab, "202401", "--create")
    leave_a_stale_version(table / "metadata" / "v3.metadata.json")
    second = export(lab, "202402")

    wanted = [row[0] for row in lab.source_rows("filed")]
    assert sorted(int(n) for n in read_with_duckdb(str(table))["id"].to_pylist()) == wanted
    assert sorted(int(n) for n in spark.read(f"file://{table}")["id"].to_pylist()) == wanted
    assert spark.read(f"file://{table}#snapshots")["snapshot_id"].to_pylist() == [first, second]


def export(lab: Lab, partition: str, *options: str) -> int:
    """Let the worker export one partition; answers its snapshot."""
    target = "iceberg://folder/db.filed"
    job_id = lab.ok(
        "export", lab.source("filed"), target, "--partition", partition, "--detach", *options
    ).strip()
    job = lab.wait_for_end(job_id, timeout_s=200)
    assert job.state is State.COMPLETED, job.error
    assert job.snapshot_id is not None
    return job.snapshot_id


def leave_a_stale_version(path: Path) -> None:
    """What another engine left an hour ago, when it died while it wrote."""
    path.write_text('{"format-version": 2, "table-uu')
    moment = path.stat().st_mtime - 3600
    os.utime(path, (moment, moment))
