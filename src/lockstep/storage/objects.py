"""Objects in buckets, through obstore: a call ends in bounded time, an open object holds bounded memory."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, cast

from lockstep.errors import Invalid
from lockstep.storage.errors import first_line, translated
from lockstep.storage.file import Buffer, Counting, StoredFile

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import S3Store

S3_SCHEMES: Final = ("s3", "s3a", "s3n")
# An upload part; with the concurrency below it bounds what one open object holds in memory.
PART_BYTES: Final = 8 << 20
PARTS_IN_FLIGHT: Final = 2

# One call ends within about a minute, whatever the server does: no new try begins after `retry_timeout`,
# and a try takes at most `timeout`. The task's own budget is for longer outages: it holds no slot meanwhile.
CLIENT_DEFAULTS: Final = {"connect_timeout": "5s", "timeout": "30s"}
RETRY_DEFAULTS: Final = {
    "max_retries": "5",
    "retry_timeout": "30",
    "init_backoff": "0.1",
    "max_backoff": "5",
}


def bucket_and_key(url: str) -> tuple[str, str]:
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket:
        raise Invalid(f"{url} names no bucket", hint="use s3://bucket/prefix")
    return bucket, key


def connect(bucket: str, options: Mapping[str, str]) -> S3Store:
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    retry = {**RETRY_DEFAULTS, **{k: str(v) for k, v in options.items() if k in RETRY_DEFAULTS}}
    settings: dict[str, Any] = {k: v for k, v in options.items() if k not in RETRY_DEFAULTS}
    settings = {**CLIENT_DEFAULTS, **settings}
    if str(settings.get("endpoint", settings.get("aws_endpoint", ""))).startswith("http://"):
        settings.setdefault("allow_http", "true")
    try:
        return S3Store(
            bucket,
            config=cast(Any, settings),
            retry_config={
                "max_retries": int(retry["max_retries"]),
                "retry_timeout": _seconds(retry["retry_timeout"]),
                "backoff": {
                    "init_backoff": _seconds(retry["init_backoff"]),
                    "max_backoff": _seconds(retry["max_backoff"]),
                    "base": 2,
                },
            },
        )
    except (BaseError, ValueError, TypeError) as error:
        raise Invalid(
            f'[storage."s3://{bucket}"] is not usable: {first_line(error)}',
            hint="the keys are obstore's own: endpoint, access_key_id, secret_access_key, region, …",
        ) from error


def _seconds(text: str) -> timedelta:
    return timedelta(seconds=float(text.removesuffix("s")))


class ObjectWriter(Counting):
    """obstore's writer as a Python file: there `closed` is a method, and nothing counts or hashes."""

    def __init__(self, url: str, store: S3Store, key: str, hashed: bool) -> None:
        super().__init__(hashed)
        import obstore

        self._url = url
        self.closed = False
        self._file: Any = obstore.open_writer(
            store, key, buffer_size=PART_BYTES, max_concurrency=PARTS_IN_FLIGHT
        )

    def write(self, data: Buffer, /) -> int:
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
        except Exception as error:
            raise translated(error, "write", self._url) from error
        return self.count(view)

    def flush(self) -> None:
        """Parts go out by size; an early one would be refused as too small."""

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        try:
            self._file.close()
        except Exception as error:
            raise translated(error, "finish", self._url) from error

    def abort(self) -> None:
        # An upload that is never completed shows no object; the bucket's lifecycle rule drops its parts.
        self.closed = True
        self._file = None


class ObjectReader(io.RawIOBase):
    def __init__(self, url: str, store: S3Store, key: str, size_bytes: int) -> None:
        super().__init__()
        self._url, self._store, self._key, self._size_bytes = url, store, key, size_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, into: Any, /) -> int:
        view = memoryview(into).cast("B")
        count = min(view.nbytes, self._size_bytes - self._at)
        if count <= 0:
            return 0
        try:
            got = memoryview(self._store.get_range(self._key, start=self._at, length=count))
        except Exception as error:
            raise translated(error, "read", self._url) from error
        view[: got.nbytes] = got
        self._at += got.nbytes
        return got.nbytes


def list_objects(prefix: str, store: S3Store, key: str) -> Iterator[StoredFile]:
    root = prefix.partition("://")[0] + "://" + bucket_and_key(prefix)[0] + "/"
    try:
        for page in store.list(key or None):
            for found in page:
                yield stored_object(root + found["path"], found)
    except Exception as error:
        raise translated(error, "list", prefix) from error


def stored_object(url: str, found: ObjectMeta) -> StoredFile:
    return StoredFile(url, found["size"], found["e_tag"] or "", found["last_modified"].timestamp())
