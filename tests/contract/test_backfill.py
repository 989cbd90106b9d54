"""An Iceberg table as the input of an import: a sorted copy of one snapshot."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from lockstep.job import State
from lockstep.source import ParseOptions
from lockstep.verify import verify
from tests.import_lab import ImportLab


def test_a_backfill_is_a_sorted_copy_of_the_snapshot_that_was_named(tmp_path: Path) -> None:
    lab = ImportLab(tmp_path, 'task_memory = "128MB"')
    (tmp_path / ".lockstep").mkdir(exist_ok=True)
    catalog = load_catalog("lake", **lab.config.catalogs["lake"])
    catalog.create_namespace_if_not_exists("db")
    rows = pa.table({"user_id": [i * 7919 % 1000 for i in range(5000)], "n": list(range(5000))})
    table = catalog.create_table("db.source", rows.schema)
    table.append(rows)
    table.delete("n < 100")
    snapshot = table.current_snapshot()
    assert snapshot is not None
    table.append(rows)
    job = lab.run(f"iceberg://lake/db.source@{snapshot.snapshot_id}", sort_by=("user_id",))
    assert job.state is State.COMPLETED, job.error
    found = [row for file in lab.files() for row in file.to_pylist()]
    kept = [row for row in rows.to_pylist() if row["n"] >= 100]
    # Equal keys stay in the order of the source.
    assert found == sorted(kept, key=lambda row: row["user_id"])
    assert verify(job, lab.store, lab.config).equal
    assert lab.left_over() == []


@pytest.mark.parametrize("limit", [0, 7, 2500])
def test_a_limit_ends_a_backfill_after_so_many_rows_wherever_it_dies(tmp_path: Path, limit: int) -> None:
    lab = ImportLab(tmp_path, 'task_memory = "1MB"')
    (tmp_path / ".lockstep").mkdir(exist_ok=True)
    catalog = load_catalog("lake", **lab.config.catalogs["lake"])
    catalog.create_namespace_if_not_exists("db")
    rows = pa.table({"n": list(range(2000)), "text": ["x" * 500] * 2000})
    table = catalog.create_table("db.source", rows.schema)
    table.append(rows)
    table.delete("n < 100")
    table.append(rows)
    lab.crashes.at = {("map.after_checkpoint", 1), ("map.after_checkpoint", 2), ("map.after_run", 4)}
    job = lab.run("iceberg://lake/db.source", parse=ParseOptions(limit=limit), sort_by=("n",))
    assert job.state is State.COMPLETED, job.error
    assert limit < 2500 or lab.crashes.passed["map.after_checkpoint"] >= 2
    assert len(lab.rows()) == limit
    assert verify(job, lab.store, lab.config).equal
