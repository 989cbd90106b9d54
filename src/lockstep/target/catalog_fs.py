"""A catalog without a server: a table is its folder, as Iceberg's Hadoop tables are.

`<warehouse>/<namespace>/<table>/metadata/v<N>.metadata.json` is version N of a table. A commit creates the
file of the next number, and creation fails if the name is taken, so that exactly one of two racing commits
wins. `version-hint.text` spares readers a listing; it may be behind, or missing, and decides nothing.

Whatever is no metadata under such a name was left by a writer that died, and is stepped over: the next commit
takes the number after it. Other readers of Hadoop tables go on to the highest number as well.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyiceberg.catalog import MetastoreCatalog, PropertiesUpdateSummary
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceNotEmptyError,
    NoSuchTableError,
    NoSuchViewError,
    TableAlreadyExistsError,
    ValidationError,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil, new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortOrder
from pyiceberg.table.update import AssertCreate, TableRequirement, TableUpdate, update_table_metadata
from pyiceberg.typedef import EMPTY_DICT, Identifier, Properties

from lockstep.errors import Invalid, LockstepError, Retryable
from lockstep.runtime import SYSTEM_CLOCK, Clock
from lockstep.storage import Storage, local_path
from lockstep.storage.file import StoredFile
from lockstep.storage.local import make_folders

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.view import View

TYPE: Final = "filesystem"
HINT: Final = "version-hint.text"
DROPPED: Final = b'{"lockstep-dropped": true}'
"""The version that ends a table. Numbers go on after it, so a late commit to it never reaches a new table."""
UNFINISHED_S: Final = 30.0
"""What is no metadata may still be in the writing by another engine; when it is older, its writer is dead."""

_VERSION: Final = re.compile(r"v(\d+)\.metadata\.json")
_COMPRESSED: Final = re.compile(r"v\d+(\.gz\.metadata\.json|\.metadata\.json\.gz)")


@dataclass(frozen=True)
class _Newest:
    """The table as it is now, and the highest number that is taken."""

    metadata: TableMetadata | None
    location: str
    number: int


class FileSystemCatalog(MetastoreCatalog):
    """Tables as folders below a warehouse. Implements PyIceberg's `Catalog`, as far as folders can."""

    def __init__(
        self, name: str, storage: Storage | None = None, clock: Clock = SYSTEM_CLOCK, **properties: str
    ) -> None:
        """Raises: ValueError if there is no warehouse."""
        super().__init__(name, **properties)
        if not properties.get("warehouse"):
            raise ValueError("a filesystem catalog needs a warehouse: a path, or s3://bucket/prefix")
        self._warehouse = properties["warehouse"].rstrip("/")
        self._storage = storage or Storage()
        self._clock = clock

    # Tables

    def load_table(self, identifier: str | Identifier) -> Table:
        newest = self._newest(self._folder(identifier))
        if newest.metadata is None:
            raise NoSuchTableError(f"there is no table at {self._folder(identifier)}")
        return self._table(identifier, newest.metadata, newest.location)

    def create_table(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        location: str | None = None,
        partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
        sort_order: SortOrder = UNSORTED_SORT_ORDER,
        properties: Properties = EMPTY_DICT,
    ) -> Table:
        """Raises: TableAlreadyExistsError, also if somebody else was faster."""
        folder = self._folder(identifier)
        if location is not None and location.rstrip("/") != folder:
            raise Invalid(f"a table of a filesystem catalog lies where its name says: {folder}")
        newest = self._newest(folder)
        if newest.metadata is not None:
            raise TableAlreadyExistsError(f"there is a table at {folder}")
        metadata = new_table_metadata(
            location=folder,
            schema=self._convert_schema_if_needed(schema),
            partition_spec=partition_spec,
            sort_order=sort_order,
            properties=properties,
        )
        created = self._put(folder, newest.number + 1, _to_bytes(metadata))
        if created is None:
            raise TableAlreadyExistsError(f"a table was created at {folder} just now")
        return self._table(identifier, metadata, created)

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        """Create the next version, unless somebody else has.

        Raises: CommitFailedException if a requirement is not met, or another commit was faster; Retryable if
        the storage does not answer, and then it may or may not have landed.
        """
        folder = self._folder(table.name())
        newest = self._newest(folder)
        for requirement in requirements:
            requirement.validate(newest.metadata)
        if newest.metadata is None and not any(isinstance(one, AssertCreate) for one in requirements):
            raise NoSuchTableError(f"there is no table at {folder}")
        metadata = update_table_metadata(
            base_metadata=newest.metadata or self._empty_table_metadata(),
            updates=updates,
            enforce_validation=newest.metadata is None,
            metadata_location=newest.location or None,
        )
        if metadata == newest.metadata:
            return _answer(metadata, newest.location)
        created = self._put(folder, newest.number + 1, _to_bytes(metadata))
        if created is None:
            raise CommitFailedException(f"another commit to {folder} took version {newest.number + 1}")
        return _answer(metadata, created)

    def drop_table(self, identifier: str | Identifier) -> None:
        """End the table with one more version; its files stay."""
        folder = self._folder(identifier)
        newest = self._newest(folder)
        if newest.metadata is None:
            raise NoSuchTableError(f"there is no table at {folder}")
        if self._put(folder, newest.number + 1, DROPPED) is None:
            raise CommitFailedException(f"{folder} has changed meanwhile")

    # Versions

    def _newest(self, folder: str) -> _Newest:
        """Raises: Retryable while a version is in the writing, or the storage does not answer."""
        return self._hinted(folder) or self._listed(folder)

    def _hinted(self, folder: str) -> _Newest | None:
        """The newest version as every reader of such tables finds it: from the hint upwards.

        None where that does not lead to a table: then all versions have to be looked at.
        """
        number = self._hint(folder)
        if number is None or self._storage.size(_version_url(folder, number)) is None:
            return None
        while self._storage.size(_version_url(folder, number + 1)) is not None:
            number += 1
        url = _version_url(folder, number)
        metadata = _parsed(self._storage.read(url))
        return None if metadata is None else _Newest(metadata, url, number)

    def _listed(self, folder: str) -> _Newest:
        versions = sorted(self._versions(folder), key=lambda version: version[0], reverse=True)
        taken = versions[0][0] if versions else 0
        for _, file in versions:
            content = self._storage.read(file.url)
            if content == DROPPED:
                break
            if (metadata := _parsed(content)) is not None:
                return _Newest(metadata, file.url, taken)
            if self._clock.now() - file.modified_at < UNFINISHED_S:
                raise Retryable(
                    f"{file.url} is not whole: somebody is writing it, or has died over it",
                    hint=f"it is stepped over when it is {UNFINISHED_S:g} s old",
                )
        return _Newest(None, "", taken)

    def _versions(self, folder: str) -> Iterator[tuple[int, StoredFile]]:
        for file in self._storage.list(f"{folder}/metadata"):
            name = file.url.rpartition("/")[2]
            if _COMPRESSED.fullmatch(name):
                raise _compressed(folder)
            if (match := _VERSION.fullmatch(name)) is not None:
                yield int(match[1]), file

    def _hint(self, folder: str) -> int | None:
        url = f"{folder}/metadata/{HINT}"
        if self._storage.size(url) is None:
            return None
        text = self._storage.read(url).strip()
        return int(text) if re.fullmatch(rb"\d{1,9}", text) else None

    def _put(self, folder: str, number: int, content: bytes) -> str | None:
        """The address of the new version; None if the number is taken."""
        url = _version_url(folder, number)
        if not self._storage.put_if_absent(url, content):
            return None
        # The version is there, whatever becomes of the hint. One of a slower commit must not take it back.
        with contextlib.suppress(LockstepError):
            if (self._hint(folder) or 0) < number:
                self._storage.replace(f"{folder}/metadata/{HINT}", str(number).encode())
        return url

    def _table(self, identifier: str | Identifier, metadata: TableMetadata, location: str) -> Table:
        io = self._load_file_io(metadata.properties, location)
        return Table(self.identifier_to_tuple(identifier), metadata, location, io, self)

    def _folder(self, identifier: str | Identifier) -> str:
        return "/".join((self._warehouse, *map(_segment, self.identifier_to_tuple(identifier))))

    # Namespaces are the folders above tables: they have no properties, and need not be made

    def create_namespace(self, namespace: str | Identifier, properties: Properties = EMPTY_DICT) -> None:
        if (path := local_path(self._folder(namespace))) is not None:
            make_folders(path)

    def create_namespace_if_not_exists(
        self, namespace: str | Identifier, properties: Properties = EMPTY_DICT
    ) -> None:
        self.create_namespace(namespace, properties)

    def load_namespace_properties(self, namespace: str | Identifier) -> Properties:
        return {}

    def drop_namespace(self, namespace: str | Identifier) -> None:
        if self.list_tables(namespace):
            raise NamespaceNotEmptyError(f"{self._folder(namespace)} has tables")

    def list_tables(self, namespace: str | Identifier) -> list[Identifier]:
        parents = self.identifier_to_tuple(namespace)
        return [found for found in self._tables(self._folder(namespace)) if found[:-1] == parents]

    def list_namespaces(self, namespace: str | Identifier = ()) -> list[Identifier]:
        parents = self.identifier_to_tuple(namespace) if namespace else ()
        depth = len(parents) + 1
        found = {table[:depth] for table in self._tables(self._warehouse) if len(table) > depth}
        return sorted(one for one in found if one[:-1] == parents)

    def _tables(self, folder: str) -> list[Identifier]:
        """Every table below a folder. It lists all files there: fit for people, not for every commit."""
        found = set()
        for file in self._storage.list(folder):
            table, _, name = file.url.rpartition("/metadata/")
            if _VERSION.fullmatch(name):
                found.add(tuple(table.removeprefix(f"{self._warehouse}/").split("/")))
        return sorted(one for one in found if self._newest(self._folder(one)).metadata is not None)

    def update_namespace_properties(
        self, namespace: str | Identifier, removals: set[str] | None = None, updates: Properties = EMPTY_DICT
    ) -> PropertiesUpdateSummary:
        raise _cannot("keep properties of a namespace")

    # What folders cannot do

    def rename_table(self, from_identifier: str | Identifier, to_identifier: str | Identifier) -> Table:
        raise _cannot("rename a table: its name is its folder")

    def register_table(
        self, identifier: str | Identifier, metadata_location: str, overwrite: bool = False
    ) -> Table:
        raise _cannot("register a table that lies elsewhere")

    def list_views(self, namespace: str | Identifier) -> list[Identifier]:
        return []

    def view_exists(self, identifier: str | Identifier) -> bool:
        return False

    def load_view(self, identifier: str | Identifier) -> View:
        raise NoSuchViewError(f"there is no view {identifier}")

    def register_view(self, identifier: str | Identifier, metadata_location: str) -> View:
        raise _cannot("hold a view")

    def drop_view(self, identifier: str | Identifier) -> None:
        raise NoSuchViewError(f"there is no view {identifier}")


def _answer(metadata: TableMetadata, location: str) -> CommitTableResponse:
    return CommitTableResponse.model_validate({"metadata": metadata, "metadata-location": location})


def _version_url(folder: str, number: int) -> str:
    return f"{folder}/metadata/v{number}.metadata.json"


def _parsed(content: bytes) -> TableMetadata | None:
    try:
        return TableMetadataUtil.parse_raw(content.decode())
    except (ValidationError, UnicodeDecodeError):
        return None


def _to_bytes(metadata: TableMetadata) -> bytes:
    if metadata.properties.get("write.metadata.compression-codec", "none").lower() != "none":
        raise _compressed(metadata.location)
    return metadata.model_dump_json(exclude_none=True).encode()


def _segment(name: str) -> str:
    """Raises: Invalid for a name that would lead out of its folder."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise Invalid(f"{name!r} cannot be the name of a table's folder", hint="use a name without slashes")
    return name


def _compressed(folder: str) -> Invalid:
    # Two files could hold the same version under two names, and both writers would think that they won.
    return Invalid(
        f"{folder} has compressed metadata, which a filesystem catalog cannot commit to safely",
        hint="set the table's property write.metadata.compression-codec to none",
    )


def _cannot(what: str) -> Invalid:
    return Invalid(f"a filesystem catalog cannot {what}")
