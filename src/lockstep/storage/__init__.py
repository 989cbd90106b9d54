"""Files and objects: create once, confirm, read, list, delete.

A URL is an absolute path, `file://` and an absolute path, or `s3://bucket/key`. Percent signs in it are
part of the name, as every Iceberg reader takes them. What is created is never overwritten, and what was
closed survives a power cut.

Errors: Invalid where another try would end the same way (no right, no bucket, disk full), Retryable where
it may not (timeout, 5xx, refused), Corrupt where a name that must be new is taken.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from lockstep.errors import Corrupt, Invalid, Retryable
from lockstep.storage.errors import is_missing_object, translated
from lockstep.storage.file import StoredFile, Writer, name_taken
from lockstep.storage.local import (
    BUFFER_BYTES,
    LocalWriter,
    drafted,
    list_local,
    put_local_if_absent,
    stored_local,
)
from lockstep.storage.objects import (
    PART_BYTES,
    PARTS_IN_FLIGHT,
    S3_SCHEMES,
    ObjectReader,
    ObjectWriter,
    bucket_and_key,
    connect,
    list_objects,
    stored_object,
)

if TYPE_CHECKING:
    from obstore.store import S3Store


class Storage:
    """All that is read and written outside the catalog and the store.

    `options` maps a URL prefix (`s3://bucket`) to obstore's own options; the longest prefix wins. Those of
    the HTTP client (`timeout`, `connect_timeout`, …) and of retries (`max_retries`, `retry_timeout` and
    the backoffs, in seconds) stand beside those of the store.
    """

    def __init__(self, options: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self._options = options or {}
        self._stores: dict[tuple[str, str], S3Store] = {}

    def create(self, url: str, *, hashed: bool = True) -> Writer:
        """Begin a file under a new name, with the folders above it.

        `hashed` False leaves the checksum out, for files whose content is proven in another way.
        Raises: Corrupt if the name is taken; Invalid; Retryable.
        """
        if (path := local_path(url)) is not None:
            return LocalWriter(url, path, hashed)
        if self.size(url) is not None:
            raise name_taken(url)
        store, key = self._object(url)
        return ObjectWriter(url, store, key, hashed)

    def open_bytes(self, url: str) -> int:
        """What one open file may hold in memory."""
        return BUFFER_BYTES if local_path(url) is not None else PART_BYTES * (PARTS_IN_FLIGHT + 1)

    def size(self, url: str) -> int | None:
        """The size in bytes, or None if there is no such file. Raises: Invalid, Retryable."""
        if (path := local_path(url)) is not None:
            try:
                return path.stat().st_size
            except FileNotFoundError:
                return None
            except OSError as error:
                raise translated(error, "look at", url) from error
        store, key = self._object(url)
        try:
            return int(store.head(key)["size"])
        except Exception as error:
            if is_missing_object(error):
                return None
            raise translated(error, "look at", url) from error

    def find(self, url: str) -> StoredFile | None:
        """One file as a listing shows it, or None if there is no such file. Raises: Invalid, Retryable."""
        if (path := local_path(url)) is not None:
            try:
                found = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                raise translated(error, "look at", url) from error
            return stored_local(url, found) if stat.S_ISREG(found.st_mode) else None
        store, key = self._object(url)
        try:
            meta = store.head(key)
        except Exception as error:
            if is_missing_object(error):
                return None
            raise translated(error, "look at", url) from error
        return stored_object(url, meta)

    def confirm(self, url: str, size_bytes: int) -> None:
        """Raises: Corrupt if a file that was written is not there with its size; Invalid; Retryable."""
        found = self.size(url)
        if found != size_bytes:
            raise Corrupt(f"{url} was written with {size_bytes} bytes, but the storage has {found}")

    def read(self, url: str) -> bytes:
        """All of it. Raises: Retryable if it is not there or does not answer; Invalid."""
        with self.open(url) as file:
            return file.read()

    def open(self, url: str) -> BinaryIO:
        """A seekable file for reading, fit for pyarrow. Raises: Retryable if it is not there; Invalid."""
        if (path := local_path(url)) is not None:
            try:
                return path.open("rb")
            except OSError as error:
                raise translated(error, "read", url) from error
        size_bytes = self.size(url)
        if size_bytes is None:
            raise Retryable(f"cannot read {url}: there is no such object")
        store, key = self._object(url)
        raw = ObjectReader(url, store, key, size_bytes)
        return cast(BinaryIO, io.BufferedReader(raw, BUFFER_BYTES))

    def list(self, url_prefix: str) -> Iterator[StoredFile]:
        """Every file below a folder, in no order; nothing if there is no such folder.

        Raises: Invalid, Retryable.
        """
        if (path := local_path(url_prefix)) is not None:
            return list_local(url_prefix.rstrip("/"), path)
        store, key = self._object(url_prefix)
        return list_objects(url_prefix, store, key.rstrip("/"))

    def delete(self, url: str) -> None:
        """Delete one file; one that is gone already is no error. Raises: Invalid, Retryable."""
        if (path := local_path(url)) is not None:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise translated(error, "delete", url) from error
            return
        store, key = self._object(url)
        try:
            store.delete(key)
        except Exception as error:
            if not is_missing_object(error):
                raise translated(error, "delete", url) from error

    def put_if_absent(self, url: str, data: bytes) -> bool:
        """Create a small file with this content, atomically; False if the name was taken.

        Nobody ever sees half of it. Raises: Invalid, Retryable (then it may or may not be there).
        """
        if (path := local_path(url)) is not None:
            return put_local_if_absent(url, path, data)
        from obstore.exceptions import AlreadyExistsError

        store, key = self._object(url)
        try:
            store.put(key, data, mode="create")
        except AlreadyExistsError:
            return False
        except Exception as error:
            raise translated(error, "write", url) from error
        return True

    def replace(self, url: str, data: bytes) -> None:
        """Give a small file this content, whatever it had. Nobody ever sees half of it.

        Raises: Invalid, Retryable (then it has the one or the other).
        """
        if (path := local_path(url)) is not None:
            try:
                with drafted(path, data) as draft:
                    os.replace(draft, path)
            except OSError as error:
                raise translated(error, "write", url) from error
            return
        store, key = self._object(url)
        try:
            store.put(key, data, mode="overwrite")
        except Exception as error:
            raise translated(error, "write", url) from error

    def _object(self, url: str) -> tuple[S3Store, str]:
        bucket, key = bucket_and_key(url)
        prefix = self._prefix_of(url)
        known = (bucket, prefix)
        if known not in self._stores:
            self._stores[known] = connect(bucket, self._options[prefix] if prefix else {})
        return self._stores[known], key

    def _prefix_of(self, url: str) -> str:
        """The longest configured prefix that this URL is below, by whole segments; empty if there is none."""
        below = f"{url.rstrip('/')}/"
        return max((p for p in self._options if below.startswith(f"{p.rstrip('/')}/")), key=len, default="")


def local_path(url: str) -> Path | None:
    """The path that a URL means on this machine, or None for an object store.

    Raises: Invalid for an address that is neither.
    """
    if url.startswith("file:"):
        rest = url.removeprefix("file:")
        if rest.startswith("//"):
            host, slash, tail = rest[2:].partition("/")
            if host not in ("", "localhost"):
                raise Invalid(f"{url} names the host {host}", hint="use file:///absolute/path")
            rest = slash + tail
        url = rest
    elif "://" in url.partition("/")[0] + "//" and not url.startswith("/"):
        scheme, marker, _ = url.partition("://")
        if marker and scheme in S3_SCHEMES:
            return None
        raise Invalid(
            f"{url} is not an address that Lockstep can write to",
            hint="use an absolute path, file:///… or s3://bucket/…",
        )
    if not url.startswith("/"):
        raise Invalid(f"{url!r} is not an absolute path", hint="write the whole path, from the root")
    return Path(url)
