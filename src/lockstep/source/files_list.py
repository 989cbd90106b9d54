"""Which files an address means: a path, a folder, a glob, or the same in an object store."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from lockstep.errors import Invalid
from lockstep.storage import Storage, local_path
from lockstep.storage.file import StoredFile

_BUCKET: Final = re.compile(r"[a-z0-9]+://[^/]*")
_WILD: Final = re.compile(r"[*?\[]")


def list_inputs(storage: Storage, addresses: Sequence[str], root: Path) -> list[StoredFile]:
    """The files of all addresses, in the order of the addresses and then of the names, each once.

    Hidden names (with . or _ at the beginning) count only when they are named themselves.
    Raises: Invalid for an address that means no file.
    """
    found: dict[str, StoredFile] = {}
    for address in addresses:
        files = list(_files_of(storage, _absolute(address, root)))
        if not files:
            raise _nothing_at(address, _absolute(address, root))
        for file in sorted(files, key=lambda file: file.url):
            found.setdefault(file.url, file)
    if not found:
        raise Invalid("there is nothing to import: no input is named")
    return list(found.values())


def _nothing_at(address: str, absolute: str) -> Invalid:
    if local_path(absolute) is not None and os.path.isdir(absolute):
        hint = "files whose names begin with . or _ count only if they are named themselves"
        return Invalid(f"there is no file in the folder {address}", hint=hint)
    if _WILD.search(address):
        return Invalid(f"there is no file that {address} stands for", hint="look with ls, in this folder")
    return Invalid(f"there is no file {address}", hint="an input is a path, a folder, a glob or s3://…")


def _absolute(address: str, root: Path) -> str:
    if "://" in address:
        return address.rstrip("/") if local_path(address) is None else str(local_path(address))
    return os.path.abspath(root / Path(address).expanduser())


def _files_of(storage: Storage, address: str) -> Iterator[StoredFile]:
    one = None if _BUCKET.fullmatch(address) else storage.find(address)
    if one is not None:
        yield one
    elif local_path(address) is not None and os.path.isdir(address):
        yield from _folder(storage, address)
    elif _WILD.search(address):
        yield from _glob_local(storage, address) if address.startswith("/") else _glob(storage, address)
    elif local_path(address) is None:
        yield from _folder(storage, address)


def _folder(storage: Storage, folder: str) -> Iterator[StoredFile]:
    prefix = folder.rstrip("/") + "/"
    for file in storage.list(folder):
        below = file.url.removeprefix(prefix)
        if file.url.startswith(prefix) and below and not any(step[:1] in "._" for step in below.split("/")):
            yield file


def _glob_local(storage: Storage, pattern: str) -> Iterator[StoredFile]:
    for path in glob.iglob(pattern, recursive=True):
        if (file := storage.find(path)) is not None:
            yield file


def _glob(storage: Storage, pattern: str) -> Iterator[StoredFile]:
    """`*`, `?` and `[…]` within a step of the path, `**` for any number of steps."""
    steps = pattern.split("/")
    fixed = next(i for i, step in enumerate(steps) if _WILD.search(step))
    if fixed < 3:
        raise Invalid(f"{pattern} has a wildcard in the name of the bucket", hint="name the bucket itself")
    wanted = _pattern(steps)
    for file in storage.list("/".join(steps[:fixed])):
        if wanted.fullmatch(file.url):
            yield file


def _pattern(steps: Sequence[str]) -> re.Pattern[str]:
    parts = []
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        if step == "**":
            parts.append(r".*" if last else r"(?:.*/)?")
        else:
            parts.append(_step_pattern(step) + ("" if last else "/"))
    return re.compile("".join(parts), re.DOTALL)


def _step_pattern(step: str) -> str:
    pieces = re.split(r"(\*|\?|\[!?[^\]]+\])", step)
    wild = {"*": "[^/]*", "?": "[^/]"}
    hidden = r"(?![._])" if step[:1] in ("*", "?", "[") else ""
    return hidden + "".join(
        wild.get(piece) or (f"[{piece[1:].replace('!', '^', 1)}" if _is_set(piece) else re.escape(piece))
        for piece in pieces
    )


def _is_set(piece: str) -> bool:
    return len(piece) > 2 and piece[0] == "[" and piece[-1] == "]"
