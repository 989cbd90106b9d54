"""What a writer leaves behind is durable, whole, and never somebody else's."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.errors import Corrupt, Invalid, Retryable
from lockstep.storage import Storage, local_path
from lockstep.storage.errors import translated


@pytest.fixture
def storage() -> Storage:
    return Storage()


def write(storage: Storage, url: str, data: bytes) -> None:
    writer = storage.create(url)
    writer.write(data)
    writer.close()


def test_a_checksum_that_nobody_wants_is_not_computed(storage, tmp_path):
    writer = storage.create(str(tmp_path / "plain"), hashed=False)
    writer.write(b"one")
    writer.close()
    assert writer.checksum == ""
    assert writer.size_bytes == 3


def test_a_closed_file_has_the_size_and_checksum_that_the_writer_says(storage, tmp_path):
    url = f"file://{tmp_path}/a/b/c.bin"
    writer = storage.create(url)
    writer.write(b"one ")
    writer.write(memoryview(b"two"))
    assert writer.tell() == 7
    writer.close()
    assert writer.closed
    assert (tmp_path / "a/b/c.bin").read_bytes() == b"one two"
    assert storage.size(url) == writer.size_bytes == 7
    assert writer.checksum == hashlib.blake2b(b"one two", digest_size=16).hexdigest()


def test_one_file_is_found_as_a_listing_shows_it(storage, tmp_path):
    write(storage, f"{tmp_path}/a/x", b"first")
    (listed,) = storage.list(f"{tmp_path}/a")
    assert storage.find(f"{tmp_path}/a/x") == listed
    assert storage.find(f"{tmp_path}/a") is None
    assert storage.find(f"{tmp_path}/none") is None
    assert storage.find(f"{tmp_path}/a/x/below") is None


def test_an_existing_file_is_never_overwritten(storage, tmp_path):
    url = f"{tmp_path}/x"
    write(storage, url, b"first")
    with pytest.raises(Corrupt, match="exists already"):
        storage.create(url)
    assert storage.read(url) == b"first"


def test_file_and_folders_are_synced_before_close_returns(storage, tmp_path, monkeypatch):
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    write(storage, f"{tmp_path}/new/folder/file", b"x")
    assert {str(tmp_path), f"{tmp_path}/new", f"{tmp_path}/new/folder/file"} <= set(synced)
    assert synced[-1] == f"{tmp_path}/new/folder"


def test_pyarrow_writes_into_it_and_reads_from_it(storage, tmp_path):
    table = pa.table({"a": list(range(1000))})
    writer = storage.create(f"{tmp_path}/t.parquet")
    pq.write_table(table, writer)
    writer.close()
    with storage.open(f"{tmp_path}/t.parquet") as file:
        assert pq.read_table(file).equals(table)


def test_an_aborted_file_is_gone_and_its_name_is_free_again(storage, tmp_path):
    writer = storage.create(f"{tmp_path}/x")
    writer.write(b"half")
    writer.abort()
    assert storage.size(f"{tmp_path}/x") is None
    write(storage, f"{tmp_path}/x", b"whole")


def test_a_full_disk_is_refused_at_once_and_said(storage, tmp_path, monkeypatch):
    real = os.open

    def open_full(path, flags, *rest, **named):
        return (
            real("/dev/full", os.O_WRONLY) if str(path).endswith("/x") else real(path, flags, *rest, **named)
        )

    monkeypatch.setattr(os, "open", open_full)
    writer = storage.create(f"{tmp_path}/x")
    with pytest.raises(Invalid, match="the disk is full"):
        writer.write(b"x" * 10_000_000)
    writer.abort()


def test_the_reason_survives_the_way_through_pyarrow(storage, tmp_path, monkeypatch):
    real = os.open
    monkeypatch.setattr(
        os,
        "open",
        lambda p, f, *a, **k: (
            real("/dev/full", os.O_WRONLY) if str(p).endswith("/x") else real(p, f, *a, **k)
        ),
    )
    writer = storage.create(f"{tmp_path}/x")
    table = pa.table({"a": pa.array([os.urandom(1000) for _ in range(5000)])})
    with pytest.raises(Invalid, match="the disk is full"):
        pq.write_table(table, writer, compression="none")
    writer.abort()


def test_a_file_size_limit_is_refused_with_the_reason(storage, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = storage.create(f"{tmp_path}/x")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(Invalid, match="file too large"):
            writer.write(b"x" * 3_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        writer.abort()


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, Invalid),
        (errno.EDQUOT, Invalid),
        (errno.EACCES, Invalid),
        (errno.EROFS, Invalid),
        (errno.ENAMETOOLONG, Invalid),
        (errno.EIO, Retryable),
        (errno.ETIMEDOUT, Retryable),
        (errno.ECONNREFUSED, Retryable),
        (errno.ENOENT, Retryable),
        (errno.EMFILE, Retryable),
    ],
)
def test_what_to_do_follows_from_the_class_of_the_error(number, expected):
    assert type(translated(OSError(number, "?"), "write", "/x")) is expected


def test_errors_of_object_storage_have_their_class():
    from obstore import exceptions

    cases = [
        (exceptions.PermissionDeniedError("403 Forbidden"), Invalid),
        (exceptions.UnauthenticatedError("401"), Invalid),
        (FileNotFoundError("<Code>NoSuchBucket</Code>"), Invalid),
        (exceptions.GenericError("500 Internal Server Error"), Retryable),
        (exceptions.GenericError("operation timed out"), Retryable),
    ]
    for error, expected in cases:
        assert type(translated(error, "write", "s3://bucket/key")) is expected


def test_a_bucket_without_keys_is_told_so():
    from obstore import exceptions

    text = (
        "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1ms - "
        "Server returned non-2xx status code: 403 Forbidden: "
    )
    found = translated(exceptions.PermissionDeniedError(text), "read", "s3://bucket/key")
    assert "no keys are set for it" in found.message
    assert '[storage."s3://bucket"]' in (found.hint or "")


def test_a_name_that_cannot_be_is_refused(storage, tmp_path):
    write(storage, f"{tmp_path}/file", b"")
    with pytest.raises(Invalid):
        storage.create(f"{tmp_path}/file/below")
    with pytest.raises(Invalid):
        storage.create(f"{tmp_path}/{'x' * 300}")


def test_what_is_missing_has_no_size_and_can_be_deleted(storage, tmp_path):
    assert storage.size(f"{tmp_path}/none") is None
    storage.delete(f"{tmp_path}/none")
    assert list(storage.list(f"{tmp_path}/none")) == []
    with pytest.raises(Retryable, match="no such file"):
        storage.read(f"{tmp_path}/none")


def test_a_listing_gives_urls_that_can_be_read_again(storage, tmp_path):
    root = f"file://{tmp_path}/t"
    names = ["a", "p=1%2F2/b c", "p=1%2F2/q=\n/d"]
    for name in names:
        write(storage, f"{root}/{name}", name.encode())
    found = {each.url: each for each in storage.list(f"{root}/")}
    assert sorted(found) == sorted(f"{root}/{name}" for name in names)
    for name in names:
        assert storage.read(f"{root}/{name}") == name.encode()
        assert found[f"{root}/{name}"].size_bytes == len(name)


def test_a_percent_sign_is_part_of_the_name(tmp_path):
    assert local_path("file:///a/p=%2F/b") == Path("/a/p=%2F/b")
    assert local_path("file:/a%20b") == Path("/a%20b")
    assert local_path("/a#b?c") == Path("/a#b?c")
    assert local_path("s3://bucket/key") is None


@pytest.mark.parametrize("url", ["relative/path", "", "http://host/x", "file://host/x", "file:x"])
def test_an_address_that_is_no_place_is_refused(url):
    with pytest.raises(Invalid):
        local_path(url)


def test_of_many_who_put_the_same_name_one_wins_and_its_content_stays(storage, tmp_path):
    url = f"{tmp_path}/register/one.json"
    won: list[bytes] = []
    start = threading.Barrier(8)

    def put(content: bytes) -> None:
        start.wait()
        if storage.put_if_absent(url, content):
            won.append(content)

    threads = [threading.Thread(target=put, args=(bytes([65 + n]) * 10_000,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert storage.read(url) == won[0]
    assert [each.url for each in storage.list(f"{tmp_path}/register")] == [url]


def test_an_unknown_storage_option_is_named():
    storage = Storage({"s3://bucket": {"no_such_option": "1"}})
    with pytest.raises(Invalid, match="no_such_option"):
        storage.size("s3://bucket/key")


def test_a_refused_connection_is_worth_another_try_and_gives_up_in_time():
    options = {
        "endpoint": "http://127.0.0.1:9",
        "allow_http": "true",
        "access_key_id": "a",
        "secret_access_key": "b",
        "region": "us-east-1",
        "max_retries": "1",
        "retry_timeout": "1",
    }
    storage = Storage({"s3://bucket": options})
    with pytest.raises(Retryable):
        storage.size("s3://bucket/key")


def test_the_longest_prefix_has_the_options():
    storage = Storage({"s3://b": {}, "s3://b/deep/": {}, "s3://bucket": {}})
    for url, prefix in [
        ("s3://b/key", "s3://b"),
        ("s3://b/deep/key", "s3://b/deep/"),
        ("s3://b/deep", "s3://b/deep/"),
        ("s3://b/deeper", "s3://b"),
        ("s3://bucket/key", "s3://bucket"),
        ("s3://buck/key", ""),
    ]:
        assert storage._prefix_of(url) == prefix
