"""Building one Iceberg snapshot: manifests, the manifest list, the summary, and the ledger's entry.

Everything here only writes new metadata files; nothing is visible before the catalog takes the updates.
"""

from __future__ import annotations

import json
from binascii import a2b_base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from struct import pack
from typing import Any, Final
from uuid import UUID

from pyiceberg.manifest import (
    DEFAULT_READ_VERSION,
    MANIFEST_LIST_FILE_SCHEMAS,
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriter,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table import Table, TableProperties
from pyiceberg.table.metadata import TableMetadata, TableMetadataV3
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import (
    CHANGED_PARTITION_COUNT_PROP,
    Operation,
    Snapshot,
    SnapshotSummaryCollector,
    Summary,
    update_snapshot_summaries,
)
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertRefSnapshotId,
    AssertTableUUID,
    RemovePropertiesUpdate,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
    TableRequirement,
    TableUpdate,
)
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import UUIDType

from lockstep.errors import Corrupt
from lockstep.job import Json, StagedFile, snapshot_id_of
from lockstep.runtime import Clock, new_id
from lockstep.target import doubles as doubles  # manifests are read exactly
from lockstep.transforms import to_record_value

COMMIT_ID: Final = "lockstep.commit-id"
JOB_ID: Final = "lockstep.job-id"
PARTITION: Final = "lockstep.partition"
FENCED: Final = "lockstep.fenced"
LEDGER_PREFIX: Final = "lockstep.commit."
LEDGER_LIMIT: Final = 1000

# How far a fence jumps ahead in the table's sequence numbers. A commit that was prepared before it carries a
# lower number, and is refused for ever; so many other commits may land meanwhile without refusing the fence.
FENCE_STRIDE: Final = 1000

MANIFEST_BYTES: Final = 8 * 1024 * 1024
_SUMMARIES: Final = [field.name for field in MANIFEST_LIST_FILE_SCHEMAS[DEFAULT_READ_VERSION].fields].index(
    "partitions"
)


@dataclass(frozen=True)
class LedgerEntry:
    """What the table's properties keep of a commit id after its snapshot has expired.

    `rows` is what it added and what is still to be removed by a `replace`: 0 once it was replaced.
    `scope` tells from which source partition they came, after the job store has forgotten the job.
    """

    fenced: bool
    snapshot_id: int
    at_ms: int
    rows: int = 0
    scope: str = ""

    def to_text(self) -> str:
        raw = {
            "outcome": "fenced" if self.fenced else "committed",
            "snapshot-id": self.snapshot_id,
            "at-ms": self.at_ms,
            "rows": self.rows,
        }
        if self.scope:
            raw["scope"] = self.scope
        return json.dumps(raw, separators=(",", ":"))

    @classmethod
    def from_text(cls, name: str, text: str) -> LedgerEntry:
        """Raises: Corrupt if somebody else wrote under our name."""
        try:
            raw = json.loads(text)
            if raw["outcome"] not in ("fenced", "committed"):
                raise ValueError(raw["outcome"])
            fenced = raw["outcome"] == "fenced"
            rows, scope = int(raw.get("rows", 0)), str(raw.get("scope", ""))
            return cls(fenced, int(raw["snapshot-id"]), int(raw["at-ms"]), rows, scope)
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt(
                f"the table property {name} is not an entry of the commit ledger: {text[:80]!r}",
                hint="something else changed it; nothing was published over it",
            ) from error


def ledger_entry(metadata: TableMetadata, commit_id: str) -> LedgerEntry | None:
    name = LEDGER_PREFIX + commit_id
    text = metadata.properties.get(name)
    return None if text is None else LedgerEntry.from_text(name, text)


def ledger_is_full(metadata: TableMetadata) -> bool:
    """Whether entries of earlier commits may have gone."""
    return sum(name.startswith(LEDGER_PREFIX) for name in metadata.properties) >= LEDGER_LIMIT


def published_from(metadata: TableMetadata, scope: str) -> list[str]:
    """The commits whose rows came from this source partition and were not replaced since."""
    entries = {
        name.removeprefix(LEDGER_PREFIX): LedgerEntry.from_text(name, text)
        for name, text in metadata.properties.items()
        if name.startswith(LEDGER_PREFIX)
    }
    return [commit for commit, entry in entries.items() if entry.rows and entry.scope == scope]


@dataclass(frozen=True)
class Prepared:
    """A commit that is ready to be sent: whoever sends it needs nothing else."""

    commit_id: str
    snapshot_id: int
    requirements: tuple[TableRequirement, ...]
    updates: tuple[TableUpdate, ...]


@dataclass(frozen=True)
class Removal:
    """What a `replace` takes away: manifests rewritten without it, and the ledger entries to empty."""

    files: Sequence[DataFile] = ()
    rewritten: Mapping[str, Sequence[ManifestFile]] = field(default_factory=dict)
    replaced: Mapping[str, LedgerEntry] = field(default_factory=dict)


class SnapshotBuilder:
    """One attempt to put one snapshot on top of a loaded head. File names are of this attempt alone."""

    def __init__(self, table: Table, commit_id: str, clock: Clock) -> None:
        self.table = table
        self.metadata = table.metadata
        self.commit_id = commit_id
        self.snapshot_id = snapshot_id_of(commit_id)
        self.parent = self.metadata.snapshot_by_name(MAIN_BRANCH)
        self.parent_id = self.parent.snapshot_id if self.parent else None
        # Iceberg wants the history in the order of time, and our clock may lag behind another writer's. Not
        # the same millisecond either: PyIceberg would then date the table by its own clock, before its head.
        self.timestamp_ms = max(int(clock.now() * 1000), self.metadata.last_updated_ms + 1)
        if self.parent is not None:
            self.timestamp_ms = max(self.timestamp_ms, self.parent.timestamp_ms + 1)
        self._attempt = new_id()
        self._locations = table.location_provider()
        self._manifests_written = 0
        self._compression = self.metadata.properties.get(
            TableProperties.WRITE_AVRO_COMPRESSION, TableProperties.WRITE_AVRO_COMPRESSION_DEFAULT
        )

    # Manifests

    def new_manifest(self, spec: PartitionSpec) -> ManifestWriter:
        name = f"{self.commit_id}-{self._attempt}-m{self._manifests_written}.avro"
        self._manifests_written += 1
        return write_manifest(
            format_version=self.metadata.format_version,
            spec=spec,
            schema=self.metadata.schema(),
            output_file=self.table.io.new_output(self._locations.new_metadata_location(name)),
            snapshot_id=self.snapshot_id,
            avro_compression=self._compression,  # type: ignore[arg-type]
        )

    def write_manifests(self, spec: PartitionSpec, entries: Iterable[ManifestEntry]) -> list[ManifestFile]:
        """Write entries into as many manifests of about `MANIFEST_BYTES` as they need."""
        written: list[ManifestFile] = []
        left = iter(entries)
        first = next(left, None)
        while first is not None:
            with self.new_manifest(spec) as writer:
                writer.add_entry(first)
                first = None
                for count, entry in enumerate(left):
                    # Asking for the position is a system call: once in a while is enough.
                    if count % 256 == 255 and writer.tell() >= MANIFEST_BYTES:
                        first = entry
                        break
                    writer.add_entry(entry)
            written.append(self._summarised(writer.to_manifest_file(), spec))
        return written

    def _summarised(self, manifest: ManifestFile, spec: PartitionSpec) -> ManifestFile:
        """Without the range of partition values if UUIDs are among them: readers disagree on their order, and
        one that reads the range in another order passes the whole manifest over."""
        schema = self.metadata.schema()
        for one in spec.fields:
            by_value = isinstance(one.transform, IdentityTransform) and one.source_id in schema.field_ids
            if by_value and isinstance(schema.find_type(one.source_id), UUIDType):
                manifest[_SUMMARIES] = None
        return manifest

    def parent_manifests(self) -> list[ManifestFile]:
        """The parent's manifests that hold live files."""
        if self.parent is None:
            return []
        return [
            manifest
            for manifest in self.parent.manifests(self.table.io)
            if manifest.has_added_files() or manifest.has_existing_files()
        ]

    def write_manifest_list(self, manifests: Sequence[ManifestFile], sequence_number: int) -> str:
        name = f"snap-{self.snapshot_id}-{self._attempt}-{self.commit_id}.avro"
        location = self._locations.new_metadata_location(name)
        with write_manifest_list(
            # PyIceberg writes no list of format 3; an empty one of format 2 reads the same there.
            format_version=1 if self.metadata.format_version == 1 else 2,
            output_file=self.table.io.new_output(location),
            snapshot_id=self.snapshot_id,
            parent_snapshot_id=self.parent_id,
            sequence_number=sequence_number,
            avro_compression=self._compression,  # type: ignore[arg-type]
        ) as writer:
            if manifests:
                writer.add_manifests(list(manifests))
        return location

    # The commits

    def publish(
        self, files: Sequence[StagedFile], removal: Removal, labels: Mapping[str, str], scope: str = ""
    ) -> Prepared:
        """Files in, the removed ones out, the branch on it, and the ledger's entry: one commit."""
        spec = self.metadata.spec()
        added = data_files(files, self.metadata)
        manifests = self.write_manifests(spec, _added_entries(self.snapshot_id, added))
        for manifest in self.parent_manifests():
            manifests.extend(removal.rewritten.get(manifest.manifest_path, (manifest,)))
        operation = Operation.OVERWRITE if removal.files or removal.replaced else Operation.APPEND
        sequence_number = self.metadata.next_sequence_number()
        snapshot = self._snapshot(
            self.write_manifest_list(manifests, sequence_number),
            sequence_number,
            self._summary(operation, added, removal.files, labels),
        )
        rows = sum(file.rows for file in files)
        emptied = {commit: _emptied(entry) for commit, entry in removal.replaced.items()}
        entries = {**emptied, self.commit_id: self._entry(rows=rows, scope=scope)}
        return Prepared(
            self.commit_id,
            self.snapshot_id,
            (self._same_table(), self._same_head()),
            (AddSnapshotUpdate(snapshot=snapshot), self._move_main(), *self._ledger(entries)),
        )

    def fence(self) -> Prepared:
        """An empty snapshot under the commit's id, and `fenced` in the ledger: one commit.

        Readers see no difference. What keeps it closed after the snapshot has expired is the sequence number,
        and where there is none to rely on, the branch that moved: see docs/decisions/0002-fence.md.
        """
        on_main = self.parent is None or self.metadata.format_version == 1
        stride = 1 if on_main else FENCE_STRIDE
        sequence_number = self.metadata.next_sequence_number() + stride - 1
        manifests = self.parent_manifests() if on_main else []
        labels = {FENCED: "true", COMMIT_ID: self.commit_id}
        snapshot = self._snapshot(
            self.write_manifest_list(manifests, sequence_number),
            sequence_number,
            self._summary(Operation.APPEND, (), (), labels),
        )
        updates: list[TableUpdate] = [AddSnapshotUpdate(snapshot=snapshot)]
        requirements: list[TableRequirement] = [self._same_table()]
        if on_main:
            updates.append(self._move_main())
            requirements.append(self._same_head())
        updates += self._ledger({self.commit_id: self._entry(fenced=True)})
        return Prepared(self.commit_id, self.snapshot_id, tuple(requirements), tuple(updates))

    def _snapshot(self, manifest_list: str, sequence_number: int, summary: Summary) -> Snapshot:
        raw: Json = {
            "snapshot-id": self.snapshot_id,
            "parent-snapshot-id": self.parent_id,
            "sequence-number": sequence_number,
            "timestamp-ms": self.timestamp_ms,
            "manifest-list": manifest_list,
            "summary": summary,
            "schema-id": self.metadata.current_schema_id,
        }
        if isinstance(self.metadata, TableMetadataV3):  # only a fence: it has no rows
            raw |= {"first-row-id": self.metadata.next_row_id, "added-rows": 0}
        return Snapshot.model_validate(raw)

    def _summary(
        self,
        operation: Operation,
        added: Sequence[DataFile],
        removed: Sequence[DataFile],
        labels: Mapping[str, str],
    ) -> Summary:
        totals = self.parent.summary if self.parent else None
        return update_snapshot_summaries(
            Summary(operation, **_counters(self.metadata, added, removed), **labels),
            totals.additional_properties if totals else None,
        )

    def _same_table(self) -> TableRequirement:
        return AssertTableUUID(uuid=self.metadata.table_uuid)

    def _same_head(self) -> TableRequirement:
        return AssertRefSnapshotId.model_validate({"ref": MAIN_BRANCH, "snapshot-id": self.parent_id})

    def _move_main(self) -> TableUpdate:
        ref = self.metadata.refs.get(MAIN_BRANCH)
        # The branch keeps its own retention: the update replaces the whole reference.
        kept = ref.model_dump(by_alias=True, exclude={"snapshot_id", "snapshot_ref_type"}) if ref else {}
        raw = {"ref-name": MAIN_BRANCH, "type": SnapshotRefType.BRANCH, "snapshot-id": self.snapshot_id}
        return SetSnapshotRefUpdate.model_validate({**kept, **raw})

    def _entry(self, *, fenced: bool = False, rows: int = 0, scope: str = "") -> LedgerEntry:
        return LedgerEntry(fenced, self.snapshot_id, self.timestamp_ms, rows, scope)

    def _ledger(self, entries: Mapping[str, LedgerEntry]) -> Iterator[TableUpdate]:
        """Set the entries; the oldest beyond the limit go in the same commit."""
        yield SetPropertiesUpdate(updates={LEDGER_PREFIX + c: e.to_text() for c, e in entries.items()})
        kept = {
            name: LedgerEntry.from_text(name, text)
            for name, text in self.metadata.properties.items()
            if name.startswith(LEDGER_PREFIX) and name.removeprefix(LEDGER_PREFIX) not in entries
        }
        excess = len(kept) + len(entries) - LEDGER_LIMIT
        if excess > 0:
            oldest = sorted(kept, key=lambda name: (kept[name].at_ms, name))[:excess]
            yield RemovePropertiesUpdate(removals=oldest)


def _emptied(entry: LedgerEntry) -> LedgerEntry:
    return replace(entry, rows=0)


def _added_entries(snapshot_id: int, files: Iterable[DataFile]) -> Iterator[ManifestEntry]:
    for file in files:
        yield ManifestEntry(ManifestEntryStatus.ADDED, snapshot_id, None, None, file)


def _counters(
    metadata: TableMetadata, added: Sequence[DataFile], removed: Sequence[DataFile]
) -> dict[str, str]:
    """Iceberg's counters of a snapshot.

    The text of each file's partition is needed only for per-partition counters, which are off by default:
    with 100,000 files it would cost more than writing them.
    """
    limit = int(metadata.properties.get(TableProperties.WRITE_PARTITION_SUMMARY_LIMIT, 0))
    collector = SnapshotSummaryCollector(partition_summary_limit=limit)
    schema, specs = metadata.schema(), metadata.specs()
    if limit > 0:
        for file in added:
            collector.add_file(file, schema, metadata.spec())
        for file in removed:
            collector.remove_file(file, schema, specs[file.spec_id])
        return collector.build()
    for file in added:
        collector.metrics.add_file(file)
    for file in removed:
        collector.metrics.remove_file(file)
    counters = collector.build()
    default = metadata.default_spec_id
    changed = {(default, partition_key(file.partition)) for file in added}
    changed |= {(file.spec_id, partition_key(file.partition)) for file in removed}
    touched = sum(1 for _, values in changed if values)
    return {**counters, CHANGED_PARTITION_COUNT_PROP: str(touched)} if touched else counters


def partition_key(record: Record) -> tuple[Any, ...]:
    """Partition values that compare as Iceberg compares them, however they were read."""
    return tuple(_comparable(record[i]) for i in range(len(record)))


def _comparable(value: Any) -> Any:
    if isinstance(value, float):  # in Python NaN differs from itself, and -0.0 equals 0.0
        return "NaN" if value != value else pack(">d", value)
    return value.bytes if isinstance(value, UUID) else value


def data_files(files: Sequence[StagedFile], metadata: TableMetadata) -> list[DataFile]:
    """Staged files as Iceberg describes them. Files of one partition share one record of its values."""
    to_record = partition_reader(metadata)
    return [_data_file(file, to_record(file.partition)) for file in files]


def partition_reader(metadata: TableMetadata) -> Callable[[Sequence[Any]], Record]:
    """How JSON partition values become the record that manifests hold, for the table's default spec.

    Raises: Corrupt for values that do not fit the spec.
    """
    spec = metadata.spec()
    types = [str(field.field_type) for field in spec.partition_type(metadata.schema()).fields]
    known: dict[tuple[Any, ...], Record] = {}

    def to_record(values: Sequence[Any]) -> Record:
        key = tuple(values)
        record = known.get(key)
        if record is None:
            if len(key) != len(types):
                raise Corrupt(
                    f"a staged file has {len(key)} partition values; the table's spec has {len(types)} fields"
                )
            record = known[key] = Record(*map(to_record_value, key, types))
        return record

    return to_record


def _data_file(file: StagedFile, partition: Record) -> DataFile:
    stats = file.stats
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=file.path,
        file_format=FileFormat.PARQUET,
        partition=partition,
        record_count=file.rows,
        file_size_in_bytes=file.size_bytes,
        column_sizes=_counts(stats, "column_sizes"),
        value_counts=_counts(stats, "value_counts"),
        null_value_counts=_counts(stats, "null_value_counts"),
        nan_value_counts=_counts(stats, "nan_value_counts"),
        lower_bounds=_bounds(stats, "lower_bounds"),
        upper_bounds=_bounds(stats, "upper_bounds"),
        key_metadata=None,
        split_offsets=stats.get("split_offsets") or None,
        equality_ids=None,
        sort_order_id=stats.get("sort_order_id"),
    )


def _counts(stats: Json, name: str) -> dict[int, int] | None:
    found = stats.get(name)
    return {int(column): count for column, count in found.items()} if found is not None else None


def _bounds(stats: Json, name: str) -> dict[int, bytes] | None:
    found = stats.get(name)
    return {int(column): a2b_base64(bound) for column, bound in found.items()} if found is not None else None
