"""An Iceberg table as the input of an import: a sorted copy of one snapshot."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from pyiceberg.catalog import load_catalog

from lockstep.job import State
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
