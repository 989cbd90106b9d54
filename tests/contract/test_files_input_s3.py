"""Raw files in an object store, read as an import reads them."""

from __future__ import annotations

import gzip
from typing import Any

import pytest

from lockstep.errors import Corrupt, Invalid
from tests.files_lab import FilesLab
from tests.object_servers import Minio

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def bucket(minio: Minio) -> str:
    minio.make_bucket("inputs")
    return "inputs"


@pytest.fixture
def inputs(minio: Minio, bucket: str, tmp_path):
    """Open addresses in a folder of the bucket that is new for each test."""
    folder = tmp_path.name

    def put(name: str, data: bytes) -> str:
        minio.client(bucket).put(f"{folder}/{name}", data)
        return f"s3://{bucket}/{folder}/{name}"

    def lab(*names: str, **options: Any) -> FilesLab:
        addresses = [f"s3://{bucket}/{folder}/{name}".rstrip("/") for name in names]
        return FilesLab(tmp_path, *addresses, storage={f"s3://{bucket}": minio.options()}, **options)

    return put, lab


def test_objects_prefixes_and_globs_are_inputs(inputs):
    put, lab = inputs
    for name in ("d/2.csv", "d/1.csv", "d/sub/3.csv", "d/_hidden.csv", "e.csv"):
        put(name, f"a\n{name}\n".encode())

    def read(*names: str) -> list[str]:
        return [row["a"] for row in lab(*names).read_all().rows]

    assert read("e.csv", "d") == ["e.csv", "d/1.csv", "d/2.csv", "d/sub/3.csv"]
    assert read("d/*.csv") == ["d/1.csv", "d/2.csv"]
    assert read("**/[13].csv") == ["d/1.csv", "d/sub/3.csv"]
    assert read("?.csv") == ["e.csv"]
    for name in ("none.csv", "none/*.csv", "none"):
        with pytest.raises(Invalid, match=f"there is no file .*{name.replace('*', '.')}"):
            read(name)


def test_objects_are_split_resumed_and_decompressed_like_files(inputs):
    put, lab = inputs
    text = "n,t\n" + "".join(f'{n},"x\n{n}"\n' for n in range(5000))
    put("a.csv", text.encode())
    put("b.csv.gz", gzip.compress(text.encode()))
    found = lab("a.csv", "b.csv.gz")
    tasks = found.tasks(task_bytes=20_000)
    assert len(tasks) == 5
    assert all(task.size_bytes < 22_000 for task in tasks[:4])
    for task in tasks:
        outcome = found.read(task, batch_bytes=3000)
        middle = outcome.positions[len(outcome.positions) // 2]
        rest = found.read(task, middle, batch_bytes=3000)
        assert outcome.rows[-len(rest.rows) :] == rest.rows
    rows = found.read_all(task_bytes=20_000).rows
    assert [row["n"] for row in rows] == [*range(5000), *range(5000)]
    assert found.executor.locate(found.detail, tasks[1].descriptor, 0).input.startswith("s3://")


def test_an_object_that_changed_is_corrupt_and_named(inputs):
    put, lab = inputs
    url = put("a.csv", b"a\n1\n")
    found = lab("a.csv")
    (task,) = found.tasks()
    put("a.csv", b"a\n2\n")
    with pytest.raises(Corrupt, match=f"{url} has changed since the import was planned"):
        found.read(task)


def test_a_pin_holds_no_key_of_the_storage(inputs):
    put, lab = inputs
    put("a.csv", b"a\n1\n")
    assert "s3cret" not in str(lab("a.csv").detail)
