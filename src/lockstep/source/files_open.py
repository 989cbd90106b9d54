"""Raw files: what identifies them, how they are compressed, and their bytes from any offset on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import pyarrow as pa

from lockstep.errors import Corrupt, Invalid
from lockstep.storage import Storage, local_path
from lockstep.storage.errors import translated
from lockstep.storage.file import StoredFile

IDENTITY_BYTES: Final = 1 << 16
SKIP_BYTES: Final = 1 << 22
MAGIC_BYTES: Final = 16

CODECS: Final = {"gzip": "gzip", "zstd": "zstd", "bz2": "bz2"}
_UNPACK: Final = "unpack it; gzip, zstd and bz2 are read as they are"
_FROM_UTF16: Final = "`iconv -f UTF-16 -t UTF-8 FILE` makes UTF-8 of it"
_FOREIGN: Final = (
    (b"PK\x03\x04", "a zip archive", _UNPACK),
    (b"\xfd7zXZ\x00", "compressed with xz", _UNPACK),
    (b"7z\xbc\xaf", "a 7z archive", _UNPACK),
    (b"PAR1\x15", "a Parquet file", "say so with --format parquet"),
    (b"Obj\x01", "an Avro file", "say so with --format avro"),
    (b"\xff\xfe", "text in UTF-16", _FROM_UTF16),
    (b"\xfe\xff", "text in UTF-16", _FROM_UTF16),
)
_SUFFIXES: Final = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2"}


@dataclass(frozen=True)
class RawFile:
    """A file of a pin. `identity` changes when the content does; `compression` is none, gzip, zstd or bz2.

    For text, `layout` numbers the columns that its header names, and `start` and `line` are the byte (after
    decompression) and the line (from 1) where its records begin.
    """

    url: str
    size_bytes: int
    identity: str
    compression: str = "none"
    layout: int = 0
    start: int = 0
    line: int = 1
    rows: int | None = None

    def to_json(self) -> list[object]:
        return list(vars(self).values())

    @classmethod
    def from_json(cls, raw: Sequence[Any]) -> RawFile:
        return cls(*raw)


def bare_name(url: str) -> str:
    """The name without the suffix of a compression."""
    for suffix in _SUFFIXES:
        if url.lower().endswith(suffix):
            return url[: -len(suffix)]
    return url


def compression_of(url: str, head: bytes, asked: str) -> str:
    """How a file is compressed: by its first bytes, unless the user says it.

    Raises: Invalid if the name says one thing and the bytes another.
    """
    if asked == "none" or asked in CODECS:
        return asked
    if asked != "auto":
        raise Invalid(f"--compression {asked} is not known", hint="it is auto, none, gzip, zstd or bz2")
    found = _by_magic(head)
    named = next((codec for suffix, codec in _SUFFIXES.items() if url.lower().endswith(suffix)), None)
    if head and named is not None and named != found:
        content = "is not compressed" if found == "none" else f"is {found}"
        raise Invalid(
            f"{url} has a name of {named}, but its content {content}",
            hint="rename it, or say what it is with --compression",
        )
    return found


def refuse_foreign(url: str, head: bytes) -> None:
    """Raises: Invalid for the beginning of a file that is plainly no text, with what to do about it."""
    for magic, what, hint in _FOREIGN:
        if head.startswith(magic):
            raise Invalid(f"cannot read {url}: it is {what}", hint=hint)


def _by_magic(head: bytes) -> str:
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return "zstd"
    if head.startswith(b"BZh") and head[4:10] in (b"\x31\x41\x59\x26\x53\x59", b"\x17\x72\x45\x38\x50\x90"):
        return "bz2"
    return "none"


def identity_of(storage: Storage, file: StoredFile) -> str:
    """The etag of an object; of a local file its time of change and a hash of its beginning, middle and end.

    Raises: Invalid or Retryable if it cannot be read.
    """
    path = local_path(file.url)
    if path is None:
        return file.etag
    try:
        changed_ns = path.stat().st_mtime_ns
    except OSError as error:
        raise translated(error, "look at", file.url) from error
    digest = hashlib.blake2b(digest_size=16)
    with storage.open(file.url) as opened:
        for start in (0, file.size_bytes // 2, max(0, file.size_bytes - IDENTITY_BYTES)):
            opened.seek(start)
            digest.update(opened.read(IDENTITY_BYTES))
    return f"{changed_ns:x}-{digest.hexdigest()}"


def require_unchanged(storage: Storage, file: RawFile) -> None:
    """Raises: Corrupt, naming the file, if it is gone or not what was frozen."""
    found = storage.find(file.url)
    if found is None:
        raise Corrupt(
            f"{file.url} is gone since the import was planned",
            hint="put the file back and `lockstep retry` the job, or import the others anew",
        )
    if found.size_bytes != file.size_bytes or identity_of(storage, found) != file.identity:
        raise Corrupt(
            f"{file.url} has changed since the import was planned",
            hint="put the file back as it was, with its time of change, and `lockstep retry` the job, or "
            "import it anew; nothing of this job was published",
        )


class OpenFile:
    """The bytes of a file, decompressed, from `offset` on.

    Raises: Corrupt, naming the file, for what cannot be decompressed; Invalid; Retryable.
    """

    def __init__(self, storage: Storage, url: str, compression: str, offset: int = 0) -> None:
        self._url = url
        self._raw: BinaryIO = storage.open(url)
        self._compression = compression
        self._stream: Any = self._raw
        if compression == "none":
            self._raw.seek(offset)
            return
        self._stream = pa.CompressedInputStream(pa.PythonFile(self._raw, mode="r"), CODECS[compression])
        self._skip(offset)

    def _skip(self, count: int) -> None:
        while count:
            skipped = len(self.read(min(count, SKIP_BYTES)))
            if not skipped:
                raise Corrupt(f"{self._url} ends {count} bytes early", hint="import it anew")
            count -= skipped

    def read(self, size: int, /) -> bytes:
        try:
            return bytes(self._stream.read(size))
        except OSError as error:
            raise self._unreadable(error) from error

    def readinto(self, into: memoryview, /) -> int:
        try:
            return int(self._stream.readinto(into))
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> Exception:
        if error.errno is not None:
            return translated(error, "read", self._url)
        reason = str(error).splitlines()[0] if str(error) else "its end is missing"
        hint = "it is damaged, or other bytes follow its end: copy it again, or unpack it and import that"
        if "Truncated" in reason or not str(error):
            hint = "it may have been cut short: copy it again, and import it anew"
        return Corrupt(f"cannot read {self._url} as {self._compression}: {reason}", hint=hint)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._raw.close()
