"""A filesystem catalog and the sweep on a real object store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table.update import SetPropertiesUpdate

from lockstep.config import Config
from lockstep.job import Event
from lockstep.runtime import SYSTEM_CLOCK, new_id
from lockstep.storage import Storage
from lockstep.store.sql import SqlStore
from lockstep.sweep import sweep
from lockstep.target.catalog_fs import FileSystemCatalog
from lockstep.target.iceberg import IcebergTarget
from tests.iceberg_tables import SCHEMA, UNPARTITIONED, UNSORTED
from tests.object_servers import Minio, s3_properties
from tests.store_lab import new_job

pytestmark = pytest.mark.servers

BUCKET = "folders"
ADDRESS = "iceberg://lake/db.events"


@pytest.fixture(scope="module")
def bucket(minio: Minio) -> Minio:
    minio.make_bucket(BUCKET)
    return minio


def config_of(bucket: Minio, folder: Path) -> Config:
    warehouse = f"s3://{BUCKET}/{folder.name}"
    lake = {"type": "filesystem", "warehouse": warehouse, **s3_properties(bucket.url)}
    return Config(root=folder, store_url="", spark={}, catalogs={"lake": lake}, storage={})


def test_of_two_commits_to_a_bucket_exactly_one_wins(bucket: Minio, tmp_path: Path) -> None:
    properties = dict(config_of(bucket, tmp_path).catalogs["lake"])
    IcebergTarget(ADDRESS, config_of(bucket, tmp_path)).create(SCHEMA, UNPARTITIONED, UNSORTED)

    def commits(number: int) -> int:
        """How many of five tries on the version that it has read got through."""
        storage = Storage({f"s3://{BUCKET}": bucket.options()})
        catalog = FileSystemCatalog("lake", storage, SYSTEM_CLOCK, **properties)
        won = 0
        for round_ in range(5):
            update = SetPropertiesUpdate(updates={f"by-{number}-{round_}": "1"})
            try:
                catalog.commit_table(catalog.load_table("db.events"), (), (update,))
                won += 1
            except CommitFailedException:
                continue
        return won

    with ThreadPoolExecutor(3) as pool:
        won = sum(pool.map(commits, range(3)))
    storage = Storage({f"s3://{BUCKET}": bucket.options()})
    table = FileSystemCatalog("lake", storage, SYSTEM_CLOCK, **properties).load_table("db.events")
    assert table.metadata_location.endswith(f"/v{won + 1}.metadata.json")
    assert sum(name.startswith("by-") for name in table.properties) == won


def test_a_sweep_deletes_objects_of_killed_jobs_and_no_other(bucket: Minio, tmp_path: Path) -> None:
    config = config_of(bucket, tmp_path)
    head = IcebergTarget(ADDRESS, config).create(SCHEMA, UNPARTITIONED, UNSORTED)
    store = SqlStore(f"sqlite:///{tmp_path}/jobs.db")
    killed, live = new_id(), new_id()
    for job_id in (killed, live):
        new = new_job(
            job_id,
            source="parquet:/nowhere",
            target=ADDRESS,
            target_uuid=head.uuid,
            location=head.location,
        )
        store.create([new])
    store.stop(killed, Event.KILL)
    data = f"{tmp_path.name}/db/events/data"
    names = [f"{data}/region=a/lockstep-{job_id}-write-00000-001-00000.parquet" for job_id in (killed, live)]
    names.append(f"{data}/somebody-elses.parquet")
    for name in names:
        bucket.client(BUCKET).put(name, b"rows")

    assert [finding.what for finding in sweep(config, store, dry_run=True).garbage] == [
        f"s3://{BUCKET}/{names[0]}"
    ]
    assert bucket.keys(BUCKET, data) == sorted(names)
    report = sweep(config, store)
    assert [(finding.deleted, finding.error) for finding in report.garbage] == [(True, None)]
    assert bucket.keys(BUCKET, data) == sorted(names[1:])
    store.close()
