"""Files on disk: created once, durable when closed, listed by folder."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lockstep.runtime import new_id
from lockstep.storage.errors import translated
from lockstep.storage.file import Buffer, Counting, StoredFile, name_taken

BUFFER_BYTES: Final = 1 << 20


class LocalWriter(Counting):
    """A new file on disk; durable once it is closed."""

    def __init__(self, url: str, path: Path, hashed: bool) -> None:
        super().__init__(hashed)
        self._url, self._path = url, path
        try:
            make_folders(path.parent)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError as error:
            raise name_taken(url) from error
        except OSError as error:
            raise translated(error, "write", url) from error
        self._file = os.fdopen(handle, "wb", BUFFER_BYTES)

    def write(self, data: Buffer, /) -> int:
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
        except OSError as error:
            raise translated(error, "write", self._url) from error
        return self.count(view)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            raise translated(error, "write", self._url) from error

    @property
    def closed(self) -> bool:
        return self._file.closed

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


def list_local(prefix: str, folder: Path) -> Iterator[StoredFile]:
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
            if stat.S_ISREG(found.st_mode):  # whoever opens a pipe waits for its writer
                yield stored_local("/".join((prefix, name) if below == "." else (prefix, below, name)), found)


def stored_local(url: str, found: os.stat_result) -> StoredFile:
    etag = f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
    return StoredFile(url, found.st_size, etag, found.st_mtime)


def put_local_if_absent(url: str, path: Path, data: bytes) -> bool:
    # A hard link gives the finished file its name: the link fails if the name is taken, and the name
    # never shows half of the content.
    try:
        with drafted(path, data) as draft:
            os.link(draft, path)
            _sync_folder(path.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise translated(error, "write", url) from error
    return True


@contextlib.contextmanager
def drafted(path: Path, data: bytes) -> Iterator[Path]:
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
