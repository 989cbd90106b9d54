"""The published rows against the fingerprint of what was read: equal, or the difference is told."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.errors import Invalid
from lockstep.job import Job
from lockstep.verify import Verification, verify
from tests import players
from tests.shop import Shop
from tests.zygote import Zygote


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    shop = Shop(tmp_path)
    for path in (tmp_path / "src").iterdir():
        path.unlink()
    rows = {"a": list(range(5000)), "text": [f"text {i}" if i % 3 else None for i in range(5000)]}
    pq.write_table(pa.table(rows), tmp_path / "src" / "p.parquet")
    return shop


@pytest.fixture
def job(shop: Shop) -> Job:
    return shop.export(everything=True)


def checked(shop: Shop, job: Job) -> Verification:
    return verify(job, shop.store, shop.config)


def data_file(shop: Shop) -> Path:
    (path,) = shop.table().inspect.data_files()["file_path"].to_pylist()
    return Path(path.removeprefix("file://"))


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(shop: Shop, zygote: Zygote) -> Command:
    """`lockstep verify JOB`, as a process of its own."""

    def run(job: Job, *options: str) -> subprocess.CompletedProcess[str]:
        return players.run_forked(
            zygote,
            players.command,
            *("verify", job.job_id, *options),
            folder=shop.folder,
            environment=os.environ,
            timeout_s=120,
        )

    return run


def document(done: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(done.stdout)


def test_rows_that_are_as_they_were_read_are_verified(shop: Shop, job: Job, command: Command) -> None:
    found = checked(shop, job)
    assert found.equal
    assert (found.found.rows, found.files, found.current_files, found.deleted_files) == (5000, 1, 1, 0)
    done = command(job)
    assert done.returncode == 0, done.stderr
    assert "5,000 rows in 1 file" in done.stdout
    answer = document(command(job, "--json"))
    assert (answer["equal"], answer["expected"]) == (True, answer["found"])


def test_a_flipped_byte_is_found_and_the_file_named(shop: Shop, job: Job, command: Command) -> None:
    path = data_file(shop)
    content = bytearray(path.read_bytes())
    content[200] ^= 0x10
    path.write_bytes(content)
    found = checked(shop, job)
    assert not found.equal
    assert path.name in found.problems[0]
    done = command(job)
    assert done.returncode == 1
    assert path.name in done.stdout


def test_a_value_changed_in_place_differs_in_its_column_only(shop: Shop, job: Job, command: Command) -> None:
    path = data_file(shop)
    rows = pq.read_table(path)
    changed = rows["text"].to_pylist()
    changed[77] = "something else"
    index = rows.schema.get_field_index("text")
    rows = rows.set_column(index, rows.schema.field(index), pa.array(changed, pa.string()))
    pq.write_table(rows, path)
    found = checked(shop, job)
    assert found.differing == ["text"]
    assert found.found.rows == 5000
    done = command(job)
    assert done.returncode == 1
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert "differs" in lines["text"]
    assert "equal" in lines["a"]


def test_a_missing_file_is_named(shop: Shop, job: Job) -> None:
    path = data_file(shop)
    path.unlink()
    found = checked(shop, job)
    assert not found.equal
    assert f"{path.name} is gone" in found.problems[0]


def test_what_another_writer_did_later_is_told_and_is_not_the_job_s_fault(
    shop: Shop, job: Job, command: Command
) -> None:
    shop.table().delete("a = 17")
    found = checked(shop, job)
    assert found.equal
    assert (found.files, found.current_files) == (1, 0)
    done = command(job)
    assert done.returncode == 0
    assert "no longer in the table" in done.stdout


def test_after_expiry_the_files_that_are_left_are_verified(shop: Shop, job: Job) -> None:
    table = shop.table()
    table.append(table.scan(limit=1).to_arrow())
    assert job.snapshot_id is not None
    table.maintenance.expire_snapshots().by_id(job.snapshot_id).commit()
    assert checked(shop, job).equal


def test_an_expired_snapshot_whose_files_were_rewritten_is_refused(
    shop: Shop, job: Job, command: Command
) -> None:
    table = shop.table()
    table.delete("a = 17")
    assert job.snapshot_id is not None
    table.maintenance.expire_snapshots().by_id(job.snapshot_id).commit()
    with pytest.raises(Invalid, match="has expired, and of 5000 rows"):
        checked(shop, job)
    assert command(job).returncode == 2


def test_a_job_that_is_not_completed_is_refused(shop: Shop, command: Command) -> None:
    (job,) = shop.ask(everything=True).jobs
    with pytest.raises(Invalid, match="is pending: it has published nothing"):
        checked(shop, job)
    assert command(job).returncode == 2


def test_a_table_of_the_same_name_is_not_taken_for_the_job_s(shop: Shop, job: Job) -> None:
    catalog = shop.table().catalog
    catalog.drop_table("db.t")
    catalog.create_table("db.t", pa.schema([pa.field("a", pa.int64())]))
    with pytest.raises(Invalid, match="is another table now"):
        checked(shop, job)
