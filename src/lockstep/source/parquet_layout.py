"""How a Parquet folder is laid out: which files belong to which partition, and what their paths say.

Hive layout: every file lies in folders `key=value`, the same keys for all; names are percent-decoded, and
`__HIVE_DEFAULT_PARTITION__` is NULL. Any other folder is flat: all files are one partition, `all`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pyarrow as pa

from lockstep.errors import Invalid
from lockstep.storage import Storage, local_path
from lockstep.storage.file import StoredFile

FLAT_PARTITION: Final = "all"
HIVE_NULL: Final = "__HIVE_DEFAULT_PARTITION__"

_INTEGER: Final = re.compile(r"0|-?[1-9][0-9]{0,18}")
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_PATH_TYPES: Final = {"long": pa.int64(), "date": pa.date32(), "string": pa.string()}


@dataclass(frozen=True)
class PathColumn:
    """A column whose value stands in the path. `type` is long, date or string."""

    name: str
    type: str

    def scalar(self, text: str | None) -> pa.Scalar:
        """The value of this column for a folder; None is NULL."""
        arrow = _PATH_TYPES[self.type]
        if text is None:
            return pa.scalar(None, arrow)
        if self.type == "long":
            return pa.scalar(int(text), arrow)
        return pa.scalar(date.fromisoformat(text) if self.type == "date" else text, arrow)


@dataclass(frozen=True)
class Layout:
    """The files of each partition (by folder, then by name), and the columns that stand in the path."""

    partitions: Mapping[str, Sequence[tuple[str, StoredFile]]]
    keys: Sequence[PathColumn]

    def values(self, partition_id: str) -> list[str | None]:
        return [value for _, value in _folder_pairs(partition_id)] if self.keys else []


def read_layout(storage: Storage, root: str) -> Layout:
    """List a folder, or one file, and sort the files into partitions.

    Raises: Invalid if there is nothing, or if some files lie in `key=value` folders and others do not.
    """
    files = list_data_files(storage, root)
    folders = {name.rpartition("/")[0] for name, _ in files}
    shapes = {tuple(key for key, _ in _folder_pairs(folder)) for folder in folders}
    hive = any("=" in step for folder in folders for step in folder.split("/"))
    if not hive:
        return Layout({FLAT_PARTITION: files} if files else {}, ())
    _require_one_shape(root, files)
    partitions: dict[str, list[tuple[str, StoredFile]]] = {}
    for name, file in files:
        folder, _, short = name.rpartition("/")
        partitions.setdefault(folder, []).append((short, file))
    (keys,) = shapes
    return Layout(partitions, _path_columns(keys, folders))


def list_data_files(storage: Storage, root: str) -> list[tuple[str, StoredFile]]:
    """The files below `root` with their names relative to it, sorted; hidden ones are left out.

    Raises: Invalid if there is no such folder.
    """
    path = local_path(root)
    if path is not None and not path.exists():
        raise Invalid(f"there is no folder {path}", hint="check the address: parquet:PATH_OR_URL")
    folder = root
    only = None
    if path is not None and path.is_file():
        folder, only = str(path.parent), path.name
    prefix = folder.rstrip("/") + "/"
    found = [
        (file.url.removeprefix(prefix), file) for file in storage.list(folder) if file.url.startswith(prefix)
    ]
    shown = [
        (name, file)
        for name, file in found
        if (name == only if only is not None else not any(map(_is_hidden, name.split("/"))))
    ]
    if path is None and not shown:
        raise Invalid(f"there are no Parquet files under {root}", hint="check the bucket and the prefix")
    return sorted(shown, key=lambda item: item[0])


def folder_url(root: str, partition_id: str) -> str:
    """The folder that holds the files of a partition; a root that is one file stays that file."""
    base = root.rstrip("/")
    return base if partition_id == FLAT_PARTITION else f"{base}/{partition_id}"


def _is_hidden(step: str) -> bool:
    """As Spark has it: `_SUCCESS`, `_temporary` and `.crc` files are no data, but `_key=1` is a partition."""
    return step.startswith(".") or (step.startswith("_") and "=" not in step)


def _folder_pairs(folder: str) -> list[tuple[str, str | None]]:
    pairs = []
    for step in folder.split("/") if folder else ():
        key, _, raw = step.partition("=")
        value = unquote(raw)
        pairs.append((unquote(key), None if value == HIVE_NULL else value))
    return pairs


def _require_one_shape(root: str, files: Iterable[tuple[str, StoredFile]]) -> None:
    expected: tuple[list[str], str] | None = None
    for name, _ in files:
        folder = name.rpartition("/")[0]
        steps = folder.split("/") if folder else []
        keys = [key for key, _ in _folder_pairs(folder)]
        if not steps or not all("=" in step for step in steps):
            raise Invalid(
                f"cannot read {root}: {name} does not lie in key=value folders, and other files do",
                hint="move it, or read one of the folders instead",
            )
        if len(set(keys)) < len(keys):
            raise Invalid(f"cannot read {root}: the path of {name} names a key twice")
        if expected is None:
            expected = (keys, name)
        elif expected[0] != keys:
            raise Invalid(
                f"cannot read {root}: the folders of {name} have the keys {', '.join(keys)}, those of"
                f" {expected[1]} have {', '.join(expected[0])}",
                hint="read the folders one by one",
            )


def _path_columns(keys: Sequence[str], folders: Iterable[str]) -> list[PathColumn]:
    rows = [[value for _, value in _folder_pairs(folder)] for folder in folders]
    return [
        PathColumn(key, _path_type({row[i] for row in rows if row[i] is not None}))
        for i, key in enumerate(keys)
    ]


def _path_type(texts: Iterable[str | None]) -> str:
    """The narrowest of integer, date and text that gives every folder's name back: `01` is a text."""
    values = [text for text in texts if text is not None]
    if not values:
        return "string"
    if all(_INTEGER.fullmatch(value) and -(2**63) <= int(value) < 2**63 for value in values):
        return "long"
    return "date" if all(_is_date(value) for value in values) else "string"


def _is_date(text: str) -> bool:
    if not _DATE.fullmatch(text):
        return False
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def absolute_root(address: str, base: Path) -> str:
    """The folder or URL that `parquet:PATH_OR_URL` names; a relative path counts from `base`."""
    rest = address.removeprefix("parquet:")
    if not rest:
        raise Invalid(f'"{address}" names no folder', hint="parquet:PATH_OR_URL")
    if "://" in rest or rest.startswith("file:"):
        path = local_path(rest.rstrip("/"))
        return str(path) if path is not None else rest.rstrip("/")
    return str((base / Path(rest).expanduser()).resolve())
