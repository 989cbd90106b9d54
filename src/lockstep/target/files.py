"""PyIceberg's files on our own storage: the same timeouts, retries and errors as for data files.

Only object stores go this way. Whatever else a location names is left to PyIceberg's own choice.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, cast

from pyiceberg.io import (
    PY_IO_IMPL,
    S3_ROLE_ARN,
    S3_SIGNER,
    FileIO,
    InputFile,
    InputStream,
    OutputFile,
    OutputStream,
    load_file_io,
)

from lockstep.storage import Storage
from lockstep.storage.options import with_catalog

STORAGE: Final = "lockstep.storage"
"""The catalog property that holds [storage] of lockstep.toml."""
OBJECT_STORES: Final = ("s3://", "s3a://", "s3n://")


def with_our_files(properties: Mapping[str, str], storage: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Catalog properties that make PyIceberg use `StorageFileIO`, unless it is to sign in its own way."""
    if any(name in properties for name in (PY_IO_IMPL, S3_SIGNER, S3_ROLE_ARN)):
        return dict(properties)
    return {
        **properties,
        PY_IO_IMPL: f"{StorageFileIO.__module__}.{StorageFileIO.__name__}",
        STORAGE: storage,
    }


class StorageFileIO(FileIO):
    """Raises what `Storage` raises: Invalid, Retryable."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        super().__init__(dict(properties))
        self._storage = Storage(with_catalog(properties.get(STORAGE, {}), properties))
        self._other: FileIO | None = None

    def new_input(self, location: str) -> InputFile:
        if not location.startswith(OBJECT_STORES):
            return self._choice_of_pyiceberg(location).new_input(location)
        return StoredInput(location, self._storage)

    def new_output(self, location: str) -> OutputFile:
        if not location.startswith(OBJECT_STORES):
            return self._choice_of_pyiceberg(location).new_output(location)
        return StoredOutput(location, self._storage)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        url = location if isinstance(location, str) else location.location
        if not url.startswith(OBJECT_STORES):
            self._choice_of_pyiceberg(url).delete(url)
        else:
            self._storage.delete(url)

    def _choice_of_pyiceberg(self, location: str) -> FileIO:
        if self._other is None:
            own = {k: v for k, v in self.properties.items() if k not in (PY_IO_IMPL, STORAGE)}
            self._other = load_file_io(own, location)
        return self._other


class StoredInput(InputFile):
    def __init__(self, location: str, storage: Storage) -> None:
        super().__init__(location)
        self._storage = storage

    def __len__(self) -> int:
        size_bytes = self._storage.size(self.location)
        if size_bytes is None:
            raise FileNotFoundError(f"there is no {self.location}")
        return size_bytes

    def exists(self) -> bool:
        return self._storage.size(self.location) is not None

    def open(self, seekable: bool = True) -> InputStream:
        len(self)
        return cast(InputStream, self._storage.open(self.location))


class StoredOutput(OutputFile):
    def __init__(self, location: str, storage: Storage) -> None:
        super().__init__(location)
        self._storage = storage

    def __len__(self) -> int:
        return len(self.to_input_file())

    def exists(self) -> bool:
        return self.to_input_file().exists()

    def to_input_file(self) -> InputFile:
        return StoredInput(self.location, self._storage)

    def create(self, overwrite: bool = False) -> OutputStream:
        return cast(OutputStream, _Draft(self.location, self._storage, overwrite))


class _Draft(io.BytesIO):
    """Metadata is small: it is collected, and stored in one request when it is closed."""

    def __init__(self, location: str, storage: Storage, overwrite: bool) -> None:
        super().__init__()
        self._location, self._storage, self._overwrite = location, storage, overwrite

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            super().close()  # half of it must not get the name
        else:
            self.close()

    def close(self) -> None:
        """Raises: FileExistsError if the name holds something else; Invalid, Retryable."""
        if self.closed:
            return
        data = self.getvalue()
        super().close()
        if self._overwrite:
            self._storage.delete(self._location)
        # After a lost reply the name may hold what we wrote ourselves.
        is_new = self._storage.put_if_absent(self._location, data)
        if not is_new and self._storage.read(self._location) != data:
            raise FileExistsError(f"{self._location} exists already")
