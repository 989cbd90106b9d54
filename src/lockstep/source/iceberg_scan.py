"""What one snapshot of an Iceberg table holds: its data files, and which deletes apply to which of them.

A file's place here is plain JSON in the descriptors of tasks, so that executors need no catalog.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from typing import Any, Final
from urllib.parse import quote_plus

from pyiceberg.conversions import to_bytes
from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestEntry, ManifestFile
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.utils.datetime import date_to_days, datetime_to_micros, time_to_micros

from lockstep.errors import Corrupt, Invalid
from lockstep.job import Json
from lockstep.partitioning import Field, fields_of
from lockstep.target.snapshot import partition_key
from lockstep.transforms import human

UNPARTITIONED: Final = "all"
PATH_OF_DELETES: Final = 2147483546
"""The field id of `file_path` in position delete files."""

PartitionKey = tuple[int, tuple[Any, ...]]


@dataclass(frozen=True)
class EqualityDeletes:
    """A file whose rows say which values of these fields are deleted."""

    path: str
    field_ids: Sequence[int]


@dataclass(frozen=True)
class ScanFile:
    """A data file of the snapshot. `constants` are values of columns that may stand in no file: base64 of
    Iceberg's binary form, or None for NULL, by field id."""

    path: str
    size_bytes: int
    rows: int
    partition: str
    constants: Mapping[str, str | None] = field(default_factory=dict)
    position_deletes: Sequence[str] = ()
    equality_deletes: Sequence[EqualityDeletes] = ()

    @property
    def has_deletes(self) -> bool:
        return bool(self.position_deletes or self.equality_deletes)

    def to_json(self) -> Json:
        raw: Json = {"path": self.path, "size_bytes": self.size_bytes, "rows": self.rows}
        raw["partition"] = self.partition
        if self.constants:
            raw["constants"] = dict(self.constants)
        if self.position_deletes:
            raw["position_deletes"] = list(self.position_deletes)
        if self.equality_deletes:
            raw["equality_deletes"] = [[one.path, list(one.field_ids)] for one in self.equality_deletes]
        return raw

    @classmethod
    def from_json(cls, raw: Json) -> ScanFile:
        return cls(
            raw["path"],
            raw["size_bytes"],
            raw["rows"],
            raw["partition"],
            raw.get("constants", {}),
            tuple(raw.get("position_deletes", ())),
            tuple(EqualityDeletes(path, tuple(ids)) for path, ids in raw.get("equality_deletes", ())),
        )


def scan_files(table: Table, snapshot: Snapshot, schema: Schema) -> list[ScanFile]:
    """The data files of a snapshot in the order in which they were added, then by path.

    Raises: Invalid for files or deletes that Lockstep cannot read exactly; Corrupt if the metadata of the
    snapshot is gone; whatever else the storage raises.
    """
    entries = _read_entries(table, snapshot)
    data = [entry for entry in entries if entry.data_file.content is DataFileContent.DATA]
    deletes = _DeleteIndex(
        [entry for entry in entries if entry.data_file.content is not DataFileContent.DATA]
    )
    for entry in entries:
        _require_readable(entry.data_file, ".".join(table.name()))
    partitions = _Partitions(table.metadata, schema)
    data.sort(key=lambda entry: (entry.sequence_number or 0, entry.data_file.file_path))
    return [_scan_file(entry, partitions, deletes, table.metadata) for entry in data]


def added_files(table: Table, snapshot: Snapshot, added_by: int) -> list[ScanFile]:
    """The data files of `snapshot` that the snapshot with the id `added_by` brought, without later deletes.

    Raises: as `scan_files`.
    """
    found = []
    for entry in _read_entries(table, snapshot):
        file = entry.data_file
        if file.content is DataFileContent.DATA and entry.snapshot_id == added_by:
            _require_readable(file, ".".join(table.name()))
            found.append(ScanFile(file.file_path, file.file_size_in_bytes, file.record_count, UNPARTITIONED))
    return sorted(found, key=lambda file: file.path)


def live_paths(table: Table, snapshot: Snapshot) -> set[str]:
    """The data files of a snapshot."""
    entries = _read_entries(table, snapshot)
    return {e.data_file.file_path for e in entries if e.data_file.content is DataFileContent.DATA}


def equality_fields(files: Iterable[ScanFile], metadata: TableMetadata, schema: Schema) -> Json:
    """The columns that equality deletes compare, by field id: a column that was dropped still deletes.

    Raises: Invalid for a column on which equality is not plain.
    """
    wanted = {id for file in files for one in file.equality_deletes for id in one.field_ids}
    found: Json = {}
    for field_id in sorted(wanted):
        column = _top_level(field_id, [schema, *reversed(metadata.schemas)])
        if column is None or not isinstance(column["type"], str) or column["type"] in ("float", "double"):
            shown = f'"{column["name"]}" ({column["type"]})' if column else f"field {field_id}"
            raise Invalid(
                f"the table has equality deletes on {shown}, which Lockstep does not apply",
                hint="rewrite the table's data files (rewrite_data_files with delete-file-threshold 1) first",
            )
        found[str(field_id)] = column
    return found


def _top_level(field_id: int, schemas: Sequence[Schema]) -> Json | None:
    for schema in schemas:
        for column in schema.fields:
            if column.field_id == field_id:
                raw: Json = column.model_dump(mode="json", by_alias=True)
                return raw
    return None


def _read_entries(table: Table, snapshot: Snapshot) -> list[ManifestEntry]:
    try:
        return list(_entries(snapshot.manifests(table.io), table.io))
    except FileNotFoundError as error:
        raise Corrupt(
            f"snapshot {snapshot.snapshot_id} of {'.'.join(table.name())} cannot be read: {error}",
            hint="its metadata was deleted; read another snapshot",
        ) from error


def _entries(manifests: Iterable[ManifestFile], io: FileIO) -> Iterator[ManifestEntry]:
    for manifest in manifests:
        for entry in manifest.fetch_manifest_entry(io, discard_deleted=True):
            entry.data_file.spec_id = manifest.partition_spec_id
            yield entry


def _require_readable(file: DataFile, table: str) -> None:
    what = "data file" if file.content is DataFileContent.DATA else "delete file"
    if file.file_format is FileFormat.PUFFIN:
        raise Invalid(
            f"{table} has deletion vectors ({file.file_path}), which Lockstep does not apply",
            hint="rewrite the table's data files (rewrite_data_files with delete-file-threshold 1) first",
        )
    if file.file_format is not FileFormat.PARQUET:
        raise Invalid(
            f"the {what} {file.file_path} of {table} is {file.file_format.value}; Lockstep reads Parquet",
            hint="rewrite the table's data files as Parquet first",
        )
    if file.key_metadata:
        raise Invalid(f"the {what} {file.file_path} of {table} is encrypted, which Lockstep cannot read")


def _scan_file(
    entry: ManifestEntry, partitions: _Partitions, deletes: _DeleteIndex, metadata: TableMetadata
) -> ScanFile:
    file = entry.data_file
    sequence = entry.sequence_number or 0
    return ScanFile(
        file.file_path,
        file.file_size_in_bytes,
        file.record_count,
        partitions.name_of(file),
        partitions.constants_of(file),
        deletes.positions_for(file, sequence),
        deletes.equalities_for(file, sequence, metadata),
    )


class _DeleteIndex:
    """Delete files by the rules of Iceberg's scan planning: sequence number, partition, and path."""

    def __init__(self, entries: Sequence[ManifestEntry]) -> None:
        self._by_path: dict[str, list[ManifestEntry]] = {}
        self._by_partition: dict[PartitionKey, list[ManifestEntry]] = {}
        self._equalities: list[ManifestEntry] = []
        for entry in sorted(entries, key=lambda entry: entry.data_file.file_path):
            if entry.data_file.content is DataFileContent.EQUALITY_DELETES:
                self._equalities.append(entry)
            elif (path := _only_path(entry.data_file)) is not None:
                self._by_path.setdefault(path, []).append(entry)
            else:
                self._by_partition.setdefault(_partition_of(entry.data_file), []).append(entry)

    def positions_for(self, file: DataFile, sequence: int) -> tuple[str, ...]:
        """Those of the same commit count too: a writer may delete rows that it has just written."""
        near = [*self._by_path.get(file.file_path, ()), *self._by_partition.get(_partition_of(file), ())]
        return tuple(e.data_file.file_path for e in near if (e.sequence_number or 0) >= sequence)

    def equalities_for(
        self, file: DataFile, sequence: int, metadata: TableMetadata
    ) -> tuple[EqualityDeletes, ...]:
        """Only later ones; those of an unpartitioned spec are for the whole table."""
        found = []
        for entry in self._equalities:
            delete = entry.data_file
            if (entry.sequence_number or 0) <= sequence:
                continue
            is_global = not metadata.specs()[delete.spec_id].fields
            if is_global or _partition_of(delete) == _partition_of(file):
                found.append(EqualityDeletes(delete.file_path, tuple(delete.equality_ids or ())))
        return tuple(found)


def _partition_of(file: DataFile) -> PartitionKey:
    return file.spec_id, partition_key(file.partition)


def _only_path(delete: DataFile) -> str | None:
    """The one data file that a position delete file is about; bounds that were cut short tell nothing."""
    lower = (delete.lower_bounds or {}).get(PATH_OF_DELETES)
    upper = (delete.upper_bounds or {}).get(PATH_OF_DELETES)
    return lower.decode() if lower is not None and lower == upper else None


class _Partitions:
    """Names and values of partitions, by the spec that each file was written with."""

    def __init__(self, metadata: TableMetadata, schema: Schema) -> None:
        self._metadata = metadata
        self._schema = schema
        self._fields: dict[int, list[Field]] = {}
        self._names: dict[PartitionKey, str] = {}

    def name_of(self, file: DataFile) -> str:
        key = _partition_of(file)
        if key not in self._names:
            values = [file.partition[i] for i in range(len(file.partition))]
            fields = self._fields_of(file.spec_id)
            segments = [_segment(f, value) for f, value in zip(fields, values, strict=True)]
            self._names[key] = "/".join(segments) or UNPARTITIONED
        return self._names[key]

    def constants_of(self, file: DataFile) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for number, part in enumerate(self._metadata.specs()[file.spec_id].fields):
            if str(part.transform) != "identity" or part.source_id not in self._schema.field_ids:
                continue
            value = file.partition[number]
            kind: Any = self._schema.find_type(part.source_id)
            found[str(part.source_id)] = None if value is None else b64encode(to_bytes(kind, value)).decode()
        return found

    def _fields_of(self, spec_id: int) -> list[Field]:
        if spec_id not in self._fields:
            spec = self._metadata.specs()[spec_id].model_dump(mode="json", by_alias=True)
            # A partition may be named after a column that was dropped since: an older schema knows it.
            for schema in [self._schema, *reversed(self._metadata.schemas)]:
                try:
                    self._fields[spec_id] = fields_of(spec, schema.model_dump(mode="json", by_alias=True))
                    break
                except Invalid as error:
                    refusal = error
            else:
                raise refusal
        return self._fields[spec_id]


def _segment(part: Field, value: Any) -> str:
    shown = quote_plus(human(_as_number(value), part.transform), safe="", errors="surrogatepass")
    if value == "null":  # the text; NULL itself is shown so
        shown = "%6Eull"
    return f"{quote_plus(part.name, safe='', errors='surrogatepass')}={shown}"


def _as_number(value: Any) -> Any:
    """Moments as Iceberg counts them."""
    if isinstance(value, datetime):
        return datetime_to_micros(value)
    if isinstance(value, date):
        return date_to_days(value)
    if isinstance(value, time):
        return time_to_micros(value)
    return value
