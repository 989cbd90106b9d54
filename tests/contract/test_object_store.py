"""Files in a real object store: created once, errors that say what to do, and no call without a limit."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.io import load_file_io

from lockstep.config import Config
from lockstep.errors import Corrupt, Invalid, LockstepError, Retryable
from lockstep.storage import Storage
from lockstep.target.files import with_our_files
from lockstep.target.iceberg import IcebergTarget
from tests.object_servers import Minio, Toxiproxy, s3_properties
from tests.servers import free_port

pytestmark = pytest.mark.servers

BUCKET = "contract"
URL = f"s3://{BUCKET}/folder/file"
SHORT = {"timeout": "1s", "connect_timeout": "1s", "retry_timeout": "1", "max_retries": "1"}
BOUND_S = 20.0
"""Far more than the limits in `SHORT` allow, far less than for ever."""
VERBS: dict[str, Callable[[Storage], Any]] = {
    "size": lambda storage: storage.size(URL),
    "read": lambda storage: storage.read(URL),
    "list": lambda storage: list(storage.list(f"s3://{BUCKET}/folder")),
    "create": lambda storage: _write(storage, f"{URL}-new", b"x"),
    "put": lambda storage: storage.put_if_absent(f"{URL}-put", b"x"),
    "delete": lambda storage: storage.delete(URL),
}


def _write(storage: Storage, url: str, data: bytes) -> None:
    writer = storage.create(url)
    writer.write(data)
    writer.close()


@pytest.fixture(scope="module")
def server(minio: Minio) -> Minio:
    minio.make_bucket(BUCKET)
    return minio


def storage_of(server: Minio, **options: str) -> Storage:
    return Storage({f"s3://{BUCKET}": {**server.options(), **options}})


def test_a_name_is_given_once_whoever_asks(server: Minio) -> None:
    storage = storage_of(server)
    assert storage.put_if_absent(f"{URL}-once", b"first")
    assert not storage.put_if_absent(f"{URL}-once", b"second")
    assert storage.read(f"{URL}-once") == b"first"
    with pytest.raises(Corrupt, match="exists already"):
        storage.create(f"{URL}-once")


def test_a_closed_object_is_there_with_its_size_and_an_aborted_one_is_not(server: Minio) -> None:
    storage = storage_of(server)
    data = bytes(20_000_000)
    writer = storage.create(f"{URL}-large")
    writer.write(data)
    assert storage.size(f"{URL}-large") is None
    writer.close()
    assert storage.size(f"{URL}-large") == writer.size_bytes == len(data)
    aborted = storage.create(f"{URL}-aborted")
    aborted.write(data)
    aborted.abort()
    assert storage.size(f"{URL}-aborted") is None
    storage.delete(f"{URL}-large")
    storage.delete(f"{URL}-large")
    assert storage.size(f"{URL}-large") is None


@pytest.mark.parametrize("verb", VERBS)
def test_wrong_keys_are_refused_at_once_with_the_settings_to_check(server: Minio, verb: str) -> None:
    with pytest.raises(Invalid, match="403") as refused:
        VERBS[verb](storage_of(server, secret_access_key="wrong"))
    assert f'[storage."s3://{BUCKET}"]' in str(refused.value.hint)


@pytest.mark.parametrize("verb", ["list", "create", "put"])
def test_a_missing_bucket_is_refused_by_name(server: Minio, verb: str) -> None:
    storage = Storage({"s3://": server.options()})
    with pytest.raises(Invalid, match="there is no bucket nowhere-to-be-found"):
        {
            "list": lambda: list(storage.list("s3://nowhere-to-be-found/x")),
            "create": lambda: _write(storage, "s3://nowhere-to-be-found/x", b"x"),
            "put": lambda: storage.put_if_absent("s3://nowhere-to-be-found/x", b"x"),
        }[verb]()


def _soon(call: Callable[[], Any]) -> LockstepError:
    """The error of a call that must end by itself."""
    begun = time.monotonic()
    with pytest.raises(LockstepError) as failed:
        call()
    assert time.monotonic() - begun < BOUND_S
    return failed.value


@pytest.mark.parametrize("verb", VERBS)
def test_a_server_that_is_gone_or_hangs_is_given_up_in_time_and_may_be_tried_again(
    server: Minio, toxiproxy: Toxiproxy, verb: str
) -> None:
    way = toxiproxy.proxy(f"contract-{verb}", server.port)
    storage = storage_of(server, endpoint=way.url, **SHORT)
    for kind in ("timeout", "reset_peer"):
        with way.with_toxic(kind, timeout=0):
            assert isinstance(_soon(lambda: VERBS[verb](storage)), Retryable)
    way.cut()
    error = _soon(lambda: VERBS[verb](storage))
    assert isinstance(error, Retryable)
    assert f"{way.url} cannot be reached (connection refused)" in error.message
    way.mend()
    storage.size(URL)


@pytest.fixture
def deaf() -> Iterator[str]:
    """The address of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def _target(folder: Path, **properties: str) -> IcebergTarget:
    config = Config(root=folder, store_url="", spark={}, catalogs={"lake": properties}, storage={})
    return IcebergTarget("iceberg://lake/db.events", config)


def test_a_rest_catalog_that_hangs_or_is_gone_is_given_up_in_time(tmp_path: Path, deaf: str) -> None:
    hangs = _target(tmp_path, type="rest", uri=deaf, **{"rest.request-timeout": "1"})
    error = _soon(hangs.load)
    assert isinstance(error, Retryable)
    assert "no answer from" in error.message
    gone = _target(tmp_path, type="rest", uri=f"http://127.0.0.1:{free_port()}")
    error = _soon(gone.load)
    assert isinstance(error, Retryable)
    assert "cannot be reached (connection refused)" in error.message


def test_table_metadata_in_a_bucket_has_the_limits_and_errors_of_data_files(server: Minio, deaf: str) -> None:
    settings = {"s3.request-timeout": "1", "s3.connect-timeout": "1"}
    hangs = load_file_io(with_our_files({**s3_properties(deaf), **settings}, {}), URL)
    storage = {f"s3://{BUCKET}": {**server.options(deaf), **SHORT}}
    named = load_file_io(with_our_files(s3_properties(server.url), storage), URL)
    for files in (hangs, named):
        assert isinstance(_soon(lambda files=files: files.new_input(URL).open()), Retryable)  # type: ignore[misc]


def test_metadata_is_written_once_and_again_only_with_the_same_content(server: Minio) -> None:
    """A request that is sent again after its reply was lost finds its own file."""
    files = load_file_io(with_our_files(s3_properties(server.url), {}), URL)
    output = files.new_output(f"{URL}.metadata.json")
    for _ in range(2):
        with output.create() as stream:
            stream.write(b"{}")
    with pytest.raises(FileExistsError), output.create() as stream:
        stream.write(b"[]")
    assert files.new_input(f"{URL}.metadata.json").open().read() == b"{}"
    assert not files.new_input(f"{URL}.other.json").exists()
    with pytest.raises(FileNotFoundError):
        files.new_input(f"{URL}.other.json").open()
