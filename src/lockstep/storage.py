"""Files and objects: create once, confirm, read, list, delete.

A URL is an absolute path, `file://` and an absolute path, or `s3://bucket/key`. Percent signs in it are
part of the name, as every Iceberg reader takes them. What is created is never overwritten, and what was
closed survives a power cut.

Errors: Invalid where another try would end the same way (no right, no bucket, disk full), Retryable where
it may not (timeout, 5xx, refused), Corrupt where a name that must be new is taken.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import stat
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol, cast

from lockstep.errors import Corrupt, Invalid, Retryable
from lockstep.runtime import new_id
from lockstep.storage_errors import first_line, is_missing_object, translated

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import S3Store

    from lockstep.config import Config
    from lockstep.job import Plan

CHECKSUM_BYTES: Final = 16
BUFFER_BYTES: Final = 1 << 20
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
# What PyIceberg calls the options of an object store, and what obstore calls them.
_OF_CATALOG: Final = {
    "s3.endpoint": "endpoint",
    "s3.region": "region",
    "client.region": "region",
    "s3.access-key-id": "access_key_id",
    "client.access-key-id": "access_key_id",
    "s3.secret-access-key": "secret_access_key",
    "client.secret-access-key": "secret_access_key",
    "s3.session-token": "session_token",
    "client.session-token": "session_token",
    "s3.proxy-uri": "proxy_url",
    "s3.anonymous": "skip_signature",
    "s3.force-virtual-addressing": "virtual_hosted_style_request",
    "s3.connect-timeout": "connect_timeout",
    "s3.request-timeout": "timeout",
}
_S3_SCHEMES: Final = ("s3", "s3a", "s3n")


@dataclass(frozen=True)
class StoredFile:
    """A file as a listing shows it. `etag` changes when the content does."""

    url: str
    size_bytes: int
    etag: str
    modified_at: float


Buffer = Any
"""Whatever has bytes: Python names this type from 3.12 on."""


class Writer(Protocol):
    """A file being written. pyarrow writes into it as into any Python file."""

    size_bytes: int

    def write(self, data: Buffer, /) -> int: ...

    def flush(self) -> None: ...

    def tell(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    @property
    def checksum(self) -> str:
        """BLAKE2b of what was written so far: 16 bytes in hex; empty where none was wanted."""
        ...

    def close(self) -> None:
        """Make it durable under its name. Raises: Invalid, Retryable."""
        ...

    def abort(self) -> None:
        """Give up what was not closed. Never raises; nothing, or nothing durable, is left under the name."""
        ...


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
            return _LocalWriter(url, path, hashed)
        if self.size(url) is not None:
            raise _taken(url)
        store, key = self._object(url)
        return _ObjectWriter(url, store, key, hashed)

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
            return _stored_local(url, found) if stat.S_ISREG(found.st_mode) else None
        store, key = self._object(url)
        try:
            meta = store.head(key)
        except Exception as error:
            if is_missing_object(error):
                return None
            raise translated(error, "look at", url) from error
        return _stored_object(url, meta)

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
        raw = _ObjectReader(url, store, key, size_bytes)
        return cast(BinaryIO, io.BufferedReader(raw, BUFFER_BYTES))

    def list(self, url_prefix: str) -> Iterator[StoredFile]:
        """Every file below a folder, in no order; nothing if there is no such folder.

        Raises: Invalid, Retryable.
        """
        if (path := local_path(url_prefix)) is not None:
            return _list_local(url_prefix.rstrip("/"), path)
        store, key = self._object(url_prefix)
        return _list_objects(url_prefix, store, key.rstrip("/"))

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
            return _put_local_if_absent(url, path, data)
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
                with _drafted(path, data) as draft:
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
        bucket, key = _bucket_and_key(url)
        prefix = self._prefix_of(url)
        known = (bucket, prefix)
        if known not in self._stores:
            self._stores[known] = _connect(bucket, self._options[prefix] if prefix else {})
        return self._stores[known], key

    def _prefix_of(self, url: str) -> str:
        """The longest configured prefix that this URL is below, by whole segments; empty if there is none."""
        below = f"{url.rstrip('/')}/"
        return max((p for p in self._options if below.startswith(f"{p.rstrip('/')}/")), key=len, default="")


def with_catalog(
    options: Mapping[str, Mapping[str, str]], catalog: Mapping[str, Any], location: str = ""
) -> Mapping[str, Mapping[str, str]]:
    """The options for `Storage`, where a catalog's own `s3.*` properties serve what `options` does not name.

    So a lake that PyIceberg can use needs no [storage] of its own. With a `location` they serve only its
    bucket.
    """
    found: dict[str, str] = {}
    for theirs, ours in _OF_CATALOG.items():
        if (value := catalog.get(theirs)) is not None and ours not in found:
            found[ours] = f"{value}s" if ours.endswith("timeout") else str(value)
    scheme, marker, path = location.partition("://")
    prefixes = [scheme + marker + path.partition("/")[0]] if location else [f"{s}://" for s in _S3_SCHEMES]
    # The given ones are looked up late: one that has a wrong value raises only where it is used.
    return ChainMap(cast(Any, options), {prefix: found for prefix in prefixes if found})


def options_of(plan: Plan, config: Config) -> Mapping[str, Mapping[str, str]]:
    """The options for `Storage` that reach the table of a plan as well as everything else."""
    return with_catalog(config.storage, catalog_of(plan.target, config), plan.location)


def catalog_of(target: str, config: Config) -> Mapping[str, Any]:
    """The properties of the catalog that a target's address names; none if it is not configured here."""
    from lockstep.config import expand

    name = expand(target, config).removeprefix("iceberg://").partition("/")[0]
    return config.catalogs.get(name, {})


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
        if marker and scheme in _S3_SCHEMES:
            return None
        raise Invalid(
            f"{url} is not an address that Lockstep can write to",
            hint="use an absolute path, file:///… or s3://bucket/…",
        )
    if not url.startswith("/"):
        raise Invalid(f"{url!r} is not an absolute path", hint="write the whole path, from the root")
    return Path(url)


def _taken(url: str) -> Corrupt:
    return Corrupt(
        f"{url} exists already; the name belongs to one attempt only, so nothing was overwritten",
        hint="two attempts run under one epoch, or the file was put there by somebody else",
    )


# Local files


class _LocalWriter:
    def __init__(self, url: str, path: Path, hashed: bool) -> None:
        self._url, self._path = url, path
        self._hash = hashlib.blake2b(digest_size=CHECKSUM_BYTES) if hashed else None
        self.size_bytes = 0
        try:
            make_folders(path.parent)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError as error:
            raise _taken(url) from error
        except OSError as error:
            raise translated(error, "write", url) from error
        self._file = os.fdopen(handle, "wb", BUFFER_BYTES)

    def write(self, data: Buffer, /) -> int:
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
        except OSError as error:
            raise translated(error, "write", self._url) from error
        if self._hash is not None:
            self._hash.update(view)
        self.size_bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            raise translated(error, "write", self._url) from error

    def tell(self) -> int:
        return self.size_bytes

    @property
    def closed(self) -> bool:
        return self._file.closed

    @property
    def checksum(self) -> str:
        return self._hash.hexdigest() if self._hash is not None else ""

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            _sync_folder(self._path.parent)
        except OSError as error:
            raise translated(error, "finish", self._url) from error

    def abort(self) -> None:
        if self._file.closed:
            return
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def make_folders(folder: Path) -> None:
    """Create a folder and those above it, durably: a synced file in an unsynced folder can be lost."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        try:
            each.mkdir(exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(each)) from error
        _sync_folder(each.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _list_local(prefix: str, folder: Path) -> Iterator[StoredFile]:
    def stop(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise translated(error, "list", prefix)

    for parent, _, names in os.walk(folder, onerror=stop):
        below = Path(parent).relative_to(folder).as_posix()
        for name in names:
            try:
                found = os.stat(os.path.join(parent, name))
            except FileNotFoundError:
                continue  # deleted since the folder was read
            yield _stored_local("/".join((prefix, name) if below == "." else (prefix, below, name)), found)


def _stored_local(url: str, found: os.stat_result) -> StoredFile:
    etag = f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
    return StoredFile(url, found.st_size, etag, found.st_mtime)


def _put_local_if_absent(url: str, path: Path, data: bytes) -> bool:
    # A hard link gives the finished file its name: the link fails if the name is taken, and the name
    # never shows half of the content.
    try:
        with _drafted(path, data) as draft:
            os.link(draft, path)
            _sync_folder(path.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise translated(error, "write", url) from error
    return True


@contextlib.contextmanager
def _drafted(path: Path, data: bytes) -> Iterator[Path]:
    """The content in a durable file beside `path`, which goes at the end unless it was given another name."""
    draft = path.with_name(f".{new_id()}.draft")
    try:
        make_folders(path.parent)
        with draft.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


# Objects


def _bucket_and_key(url: str) -> tuple[str, str]:
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket:
        raise Invalid(f"{url} names no bucket", hint="use s3://bucket/prefix")
    return bucket, key


def _connect(bucket: str, options: Mapping[str, str]) -> S3Store:
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


class _ObjectWriter:
    """obstore's writer as a Python file: there `closed` is a method, and nothing counts or hashes."""

    def __init__(self, url: str, store: S3Store, key: str, hashed: bool) -> None:
        import obstore

        self._url = url
        self._hash = hashlib.blake2b(digest_size=CHECKSUM_BYTES) if hashed else None
        self.size_bytes = 0
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
        if self._hash is not None:
            self._hash.update(view)
        self.size_bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Parts go out by size; an early one would be refused as too small."""

    def tell(self) -> int:
        return self.size_bytes

    @property
    def checksum(self) -> str:
        return self._hash.hexdigest() if self._hash is not None else ""

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


class _ObjectReader(io.RawIOBase):
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


def _list_objects(prefix: str, store: S3Store, key: str) -> Iterator[StoredFile]:
    root = prefix.partition("://")[0] + "://" + _bucket_and_key(prefix)[0] + "/"
    try:
        for page in store.list(key or None):
            for found in page:
                yield _stored_object(root + found["path"], found)
    except Exception as error:
        raise translated(error, "list", prefix) from error


def _stored_object(url: str, found: ObjectMeta) -> StoredFile:
    return StoredFile(url, found["size"], found["e_tag"] or "", found["last_modified"].timestamp())
