"""One file of a storage: as a listing shows it, and while it is written."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final, Protocol

from lockstep.errors import Corrupt

CHECKSUM_BYTES: Final = 16


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


class Counting:
    """What a writer knows of what was written so far: its size and, where it is wanted, its checksum."""

    def __init__(self, hashed: bool) -> None:
        self.size_bytes = 0
        self._hash = hashlib.blake2b(digest_size=CHECKSUM_BYTES) if hashed else None

    def count(self, written: memoryview) -> int:
        """Take in what was written; answer how many bytes it has."""
        if self._hash is not None:
            self._hash.update(written)
        self.size_bytes += written.nbytes
        return written.nbytes

    def tell(self) -> int:
        return self.size_bytes

    @property
    def checksum(self) -> str:
        return self._hash.hexdigest() if self._hash is not None else ""


def name_taken(url: str) -> Corrupt:
    """The error for a name that must be new."""
    return Corrupt(
        f"{url} exists already; the name belongs to one attempt only, so nothing was overwritten",
        hint="two attempts run under one epoch, or the file was put there by somebody else",
    )
