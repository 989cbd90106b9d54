"""The other side of the wire: storage, a catalog with Iceberg's rules, and its other users.

The catalog applies commits with PyIceberg's own `update_table_metadata` and requirements, in memory. What a
commit does and what its sender hears of it are two events here: a request can arrive long after its sender
gave up or died.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NoSuchTableError,
    ServerError,
    ServiceUnavailableError,
)
from pyiceberg.io import FileIO, InputFile, OutputFile
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.metadata import TableMetadata, new_table_metadata
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.table.sorting import SortOrder
from pyiceberg.table.update import (
    AddSchemaUpdate,
    AddSnapshotUpdate,
    AssertRefSnapshotId,
    RemoveSnapshotsUpdate,
    SetCurrentSchemaUpdate,
    SetSnapshotRefUpdate,
    TableRequirement,
    TableUpdate,
    update_table_metadata,
)
from pyiceberg.typedef import Record
from pyiceberg.types import LongType, NestedField

from lockstep.errors import Retryable
from lockstep.storage.file import StoredFile

if TYPE_CHECKING:
    from tests.simulation.world import World

TIMEOUT_S: Final = 20.0
Reach = Callable[[str], None]


class Storage:
    """Files by path. What is overwritten and deleted is remembered for the auditor."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.overwritten: list[str] = []
        self.swept: list[str] = []

    def put(self, path: str, body: bytes) -> None:
        if path in self.files:
            self.overwritten.append(path)
        self.files[path] = body


class SimStorage:
    """Stands in for the product's `Storage`, as far as those need it who delete."""

    world: World

    def __init__(self, options: object) -> None:
        pass

    def list(self, root: str) -> list[StoredFile]:
        self._reach(f"list {root}")
        files, folder = self.world.storage.files, root.rstrip("/") + "/"
        return [StoredFile(path, len(files[path]), "", 0.0) for path in files if path.startswith(folder)]

    def delete(self, url: str) -> None:
        self._reach(f"delete {_name(url)}")
        if self.world.storage.files.pop(url, None) is not None:
            self.world.storage.swept.append(url)

    def _reach(self, what: str) -> None:
        try:
            self.world.reach_storage(what)
        except OSError as error:
            raise Retryable(str(error)) from error


class SimFileIO(FileIO):
    """PyIceberg's file access, on a storage. `reach` is called before each access, and may raise."""

    def __init__(self, storage: Storage, reach: Reach) -> None:
        super().__init__({})
        self._storage = storage
        self._reach = reach

    def new_input(self, location: str) -> InputFile:
        return _Input(self._storage, self._reach, location)

    def new_output(self, location: str) -> OutputFile:
        return _Output(self._storage, self._reach, location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        raise AssertionError("nobody deletes through the table's file access")


class _Input(InputFile):
    def __init__(self, storage: Storage, reach: Reach, location: str) -> None:
        super().__init__(location)
        self._storage = storage
        self._reach = reach

    def __len__(self) -> int:
        return len(self._body())

    def exists(self) -> bool:
        return self.location in self._storage.files

    def open(self, seekable: bool = True) -> Any:
        return io.BytesIO(self._body())

    def _body(self) -> bytes:
        self._reach(f"read {_name(self.location)}")
        try:
            return self._storage.files[self.location]
        except KeyError:
            raise FileNotFoundError(self.location) from None


class _Output(OutputFile):
    def __init__(self, storage: Storage, reach: Reach, location: str) -> None:
        super().__init__(location)
        self._storage = storage
        self._reach = reach

    def __len__(self) -> int:
        return len(self._storage.files[self.location])

    def exists(self) -> bool:
        return self.location in self._storage.files

    def to_input_file(self) -> InputFile:
        return _Input(self._storage, self._reach, self.location)

    def create(self, overwrite: bool = False) -> Any:
        self._reach(f"write {_name(self.location)}")
        return _Buffer(self._storage, self.location)


class _Buffer(io.BytesIO):
    def __init__(self, storage: Storage, location: str) -> None:
        super().__init__()
        self._storage = storage
        self._location = location

    def close(self) -> None:
        if not self.closed:
            self._storage.put(self._location, self.getvalue())
        super().close()


@dataclass(frozen=True)
class Applied:
    """A commit that the catalog took."""

    at: float
    by: str
    metadata: TableMetadata


class LakeTable:
    """One table as its catalog holds it: the metadata, and every state that it had."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.io = SimFileIO(world.storage, world.reach_storage)
        self.quiet = SimFileIO(world.storage, lambda _: None)
        made = sum(table.name == name for table in world.retired)
        location = f"s3://lake/{name}" + (f"-{made}" if made else "")
        self.metadata = new_table_metadata(
            Schema(NestedField(1, "id", LongType(), required=False)),
            PartitionSpec(),
            SortOrder(order_id=0),
            location,
            # Compressing Avro would be half of the run.
            {"format-version": "2", "write.avro.compression-codec": "null"},
            world.new_uuid(),
        )
        self.log: list[Applied] = []

    def apply(
        self, by: str, requirements: Iterable[TableRequirement], updates: tuple[TableUpdate, ...]
    ) -> None:
        """One commit, at this instant. Raises: CommitFailedException or ValueError as a catalog does."""
        for requirement in requirements:
            requirement.validate(self.metadata)
        before = self.metadata.last_updated_ms
        metadata = update_table_metadata(self.metadata, updates)
        if not any(isinstance(update, AddSnapshotUpdate) for update in updates):
            now_ms = max(int(self.world.scheduler.now * 1000), before)
            metadata = metadata.model_copy(update={"last_updated_ms": now_ms})
        self.metadata = metadata
        self.log.append(Applied(self.world.scheduler.now, by, metadata))
        self.world.scheduler.note(f"catalog: {by} → head {metadata.current_snapshot_id}")


class SimCatalog:
    """What `load_catalog` answers to one process."""

    def __init__(self, world: World) -> None:
        self._world = world

    def load_table(self, identifier: tuple[str, ...]) -> Table:
        table = self._reach(identifier, "load")
        name = ".".join(identifier)
        # Not the location of real metadata: everything is in the object.
        return Table(identifier, table.metadata, f"s3://lake/{name}/metadata", table.io, self)  # type: ignore[arg-type]

    def table_exists(self, identifier: tuple[str, ...]) -> bool:
        self._reach(identifier, "exists")
        return True

    def _reach(self, identifier: tuple[str, ...], what: str) -> LakeTable:
        world = self._world
        if world.chance("kill_before_commit"):
            world.kill_job(None)
        world.call(f"catalog {what}")
        if world.chance("catalog_refused") or world.in_window("catalog_away"):
            world.scheduler.note("catalog: 503")
            raise ServiceUnavailableError("503: come back later")
        if what == "load" and world.chance("table_hidden"):
            world.scheduler.note("catalog: no such table")
            raise NoSuchTableError("the table is hidden for a moment")
        return world.tables[".".join(identifier)]

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        """The request travels by itself; its sender waits for the answer, and not for ever."""
        world = self._world
        world.about_to_send(prepared_job(updates))
        world.call("catalog commit")
        if world.chance("catalog_refused") or world.in_window("catalog_away"):
            world.scheduler.note("catalog: the request was not taken")
            raise ServiceUnavailableError("503: the request was not taken")
        request = _Request(world, ".".join(table.name()), requirements, updates)
        late = world.chance("catalog_late")
        request.travel(world.random.uniform(0.0, world.faults.late_s) if late else world.latency())
        request.answered.wait(TIMEOUT_S)
        world.scheduler.check()
        if not request.answered.is_set() or world.chance("catalog_reply_lost"):
            world.scheduler.note("catalog: no reply to the commit")
            raise world.random.choice(
                (CommitStateUnknownException("504"), ServerError("500"), TimeoutError("read timed out"))
            )
        world.crash_here("after the commit's reply")
        if request.refusal is not None:
            raise CommitFailedException(f"409: {request.refusal}")
        return CommitTableResponse.model_validate(
            {"metadata": table.metadata, "metadata-location": "s3://lake"}
        )


def prepared_job(updates: tuple[TableUpdate, ...]) -> str | None:
    """The job whose commit this is; None for a fence."""
    added = [update.snapshot for update in updates if isinstance(update, AddSnapshotUpdate)]
    summary = added[0].summary if added else None
    return summary.additional_properties.get("lockstep.job-id") if summary else None


class _Request:
    def __init__(
        self,
        world: World,
        table: str,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> None:
        self._world = world
        self._table = table
        self._requirements = requirements
        self._updates = updates
        self._sender = str(world.scheduler.current)
        self.answered = world.threading.Event()
        self.refusal: Exception | None = None

    def travel(self, delay_s: float) -> None:
        self._world.in_flight += 1
        self._world.scheduler.spawn(self._world.network, f"commit of {self._sender}", self._arrive, delay_s)

    def _arrive(self) -> None:
        self._world.in_flight -= 1
        try:
            self._world.tables[self._table].apply(self._sender, self._requirements, self._updates)
        except (CommitFailedException, ValueError) as error:
            self.refusal = error
            self._world.scheduler.note(f"catalog refuses {self._sender}: {error}")
        self.answered.set()


# Others who use the table


def append_as_a_rival(table: LakeTable, row: str) -> None:
    """Another engine adds a file with this row to the head, as it is now."""
    metadata, world = table.metadata, table.world
    path = f"{metadata.location}/data/{row}.parquet"
    body = json.dumps([row]).encode()
    world.storage.put(path, body)
    file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=1,
        file_size_in_bytes=len(body),
    )
    snapshot_id = world.random.getrandbits(62) + 1
    quiet = table.quiet
    with write_manifest(
        2,
        metadata.spec(),
        metadata.schema(),
        quiet.new_output(f"{metadata.location}/metadata/{row}-m0.avro"),
        snapshot_id,
        "null",
    ) as writer:
        writer.add_entry(ManifestEntry(ManifestEntryStatus.ADDED, snapshot_id, None, None, file))
    head = metadata.snapshot_by_name(MAIN_BRANCH)
    sequence_number = metadata.next_sequence_number()
    listed = f"{metadata.location}/metadata/snap-{row}.avro"
    with write_manifest_list(
        2,
        quiet.new_output(listed),
        snapshot_id,
        head.snapshot_id if head else None,
        sequence_number,
        "null",
    ) as manifest_list:
        manifest_list.add_manifests([writer.to_manifest_file(), *(head.manifests(quiet) if head else [])])
    parent = head.snapshot_id if head else None
    snapshot = Snapshot.model_validate(
        {
            "snapshot-id": snapshot_id,
            "parent-snapshot-id": parent,
            "sequence-number": sequence_number,
            "timestamp-ms": max(int(world.scheduler.now * 1000), metadata.last_updated_ms + 1),
            "manifest-list": listed,
            "summary": Summary(Operation.APPEND),
            "schema-id": metadata.current_schema_id,
        }
    )
    moved = {"ref-name": MAIN_BRANCH, "type": SnapshotRefType.BRANCH, "snapshot-id": snapshot_id}
    table.apply(
        row,
        (AssertRefSnapshotId.model_validate({"ref": MAIN_BRANCH, "snapshot-id": parent}),),
        (AddSnapshotUpdate(snapshot=snapshot), SetSnapshotRefUpdate.model_validate(moved)),
    )


def expire_snapshots(table: LakeTable) -> None:
    """All but the head go, and the metadata files that nothing else refers to, as Spark's procedure does."""
    metadata = table.metadata
    gone = [one for one in metadata.snapshots if one.snapshot_id != metadata.current_snapshot_id]
    if not gone:
        return
    quiet = table.quiet
    ids = [one.snapshot_id for one in gone]
    table.apply("expiry", (), (RemoveSnapshotsUpdate.model_validate({"snapshot-ids": ids}),))
    kept = {
        path
        for one in table.metadata.snapshots
        for path in (one.manifest_list, *(manifest.manifest_path for manifest in one.manifests(quiet)))
    }
    listed = {manifest.manifest_path for one in gone for manifest in one.manifests(quiet)}
    for path in sorted({one.manifest_list for one in gone} | listed):
        if path not in kept:
            del table.world.storage.files[path]


def add_column(table: LakeTable) -> None:
    schema = table.metadata.schema()
    added = NestedField(schema.highest_field_id + 1, f"c{schema.highest_field_id + 1}", LongType())
    wider = Schema(*schema.fields, added, schema_id=schema.schema_id + 1)
    updates = (
        AddSchemaUpdate.model_validate({"schema": wider}),
        SetCurrentSchemaUpdate.model_validate({"schema-id": -1}),
    )
    table.apply("schema change", (), updates)


def _name(location: str) -> str:
    return location.rpartition("/")[2]
