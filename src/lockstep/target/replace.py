"""`replace`: which live files an earlier commit's rows are in, and the manifests without them.

Manifest entries keep the id of the snapshot that added their file, also after that snapshot has expired:
so an earlier commit's files are found by its id. Where their rows do not add up to what the ledger says
(compaction has rewritten some), the whole target partition goes, if its history shows that nothing else
was ever put there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pyiceberg.io import FileIO
from pyiceberg.manifest import (
    DataFile,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
)
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import ADDED_RECORDS, Operation, Snapshot, ancestors_of
from pyiceberg.typedef import Record

from lockstep.errors import Invalid
from lockstep.job import Plan, StagedFile, snapshot_id_of
from lockstep.target.snapshot import (
    LedgerEntry,
    Removal,
    SnapshotBuilder,
    ledger_entry,
    ledger_is_full,
    partition_key,
    partition_reader,
)


def plan_removal(builder: SnapshotBuilder, plan: Plan, files: Sequence[StagedFile]) -> Removal:
    """Take the files of `plan.replaces` out of the head's manifests; nothing is deleted from storage.

    Row-level delete files stay: they name files that are gone, or are older than the new ones.
    Raises: Invalid if the earlier rows can no longer be told apart from others.
    """
    replaced = _ledger_of(builder.metadata, plan.replaces)
    head = _Head(builder)
    ids = {snapshot_id_of(commit) for commit in plan.replaces}
    wanted = _from_snapshots(ids)
    found: dict[int | None, int] = dict.fromkeys(ids, 0)
    for entry in head.entries_of(ids):
        found[entry.snapshot_id] += entry.data_file.record_count
    recorded = _recorded_rows(builder.metadata, plan.replaces)
    if found != recorded:
        # Without a word of it: forgotten since, or never published, which a ledger that is not full shows.
        unknown = None if ledger_is_full(builder.metadata) else 0
        known = {one: unknown if rows is None else rows for one, rows in recorded.items()}
        rewritten = {one for one, rows in known.items() if rows != 0 and rows != found[one]}
        here = _whole_partition(builder, head, plan, files, ids, rewritten)
        wanted = _either(here, wanted)
    return head.without(wanted, replaced)


def _ledger_of(metadata: TableMetadata, commits: Sequence[str]) -> dict[str, LedgerEntry]:
    """The entries that this replace empties. One that left the bounded ledger does not come back."""
    entries = {commit: ledger_entry(metadata, commit) for commit in commits}
    return {commit: entry for commit, entry in entries.items() if entry is not None}


def _recorded_rows(metadata: TableMetadata, commits: Sequence[str]) -> dict[int, int | None]:
    """How many rows of each snapshot nobody has replaced; None where nothing tells it any more."""
    rows: dict[int, int | None] = {}
    for commit in commits:
        entry = ledger_entry(metadata, commit)
        snapshot = metadata.snapshot_by_id(snapshot_id_of(commit))
        if entry is not None:
            rows[entry.snapshot_id] = entry.rows
        elif snapshot is not None and snapshot.summary is not None:
            added = snapshot.summary.additional_properties.get(ADDED_RECORDS, "0")
            rows[snapshot.snapshot_id] = int(added)
        else:
            rows[snapshot_id_of(commit)] = None
    return rows


Wanted = Callable[[ManifestEntry], bool]


def _from_snapshots(ids: set[int]) -> Wanted:
    return lambda entry: entry.snapshot_id in ids


def _either(one: Wanted, other: Wanted) -> Wanted:
    return lambda entry: one(entry) or other(entry)


class _Head:
    """The live data files of a snapshot, manifest by manifest; each manifest is read once."""

    def __init__(self, builder: SnapshotBuilder) -> None:
        self._builder = builder
        self._io: FileIO = builder.table.io
        self._read: dict[str, list[ManifestEntry]] = {}

    def live(self, snapshot: Snapshot | None) -> Iterator[ManifestEntry]:
        for manifest in _data_manifests(snapshot, self._io):
            yield from self._entries(manifest)

    def entries_of(self, ids: set[int]) -> Iterator[ManifestEntry]:
        """The head's files that these snapshots added; only manifests that may hold one are read."""
        for manifest in _data_manifests(self._builder.parent, self._io):
            if manifest.added_snapshot_id in ids or manifest.has_existing_files():
                yield from (entry for entry in self._entries(manifest) if entry.snapshot_id in ids)

    def without(self, wanted: Wanted, replaced: dict[str, LedgerEntry]) -> Removal:
        removed: list[DataFile] = []
        rewritten: dict[str, Sequence[ManifestFile]] = {}
        for manifest in _data_manifests(self._builder.parent, self._io):
            entries = self._read.get(manifest.manifest_path, [])
            gone = [entry.data_file for entry in filter(wanted, entries)]
            if gone:
                removed += gone
                rewritten[manifest.manifest_path] = self._rewrite(manifest, entries, wanted)
        return Removal(removed, rewritten, replaced)

    def _rewrite(
        self, manifest: ManifestFile, entries: Sequence[ManifestEntry], wanted: Wanted
    ) -> Sequence[ManifestFile]:
        spec = self._builder.metadata.specs()[manifest.partition_spec_id]
        snapshot_id = self._builder.snapshot_id
        return self._builder.write_manifests(
            spec,
            (
                _with_status(entry, ManifestEntryStatus.DELETED, snapshot_id)
                if wanted(entry)
                else _with_status(entry, ManifestEntryStatus.EXISTING, entry.snapshot_id)
                for entry in entries
            ),
        )

    def _entries(self, manifest: ManifestFile) -> list[ManifestEntry]:
        path = manifest.manifest_path
        if path not in self._read:
            self._read[path] = manifest.fetch_manifest_entry(self._io, discard_deleted=True)
        return self._read[path]


def _data_manifests(snapshot: Snapshot | None, io: FileIO) -> Iterator[ManifestFile]:
    if snapshot is not None:
        yield from (m for m in snapshot.manifests(io) if m.content == ManifestContent.DATA)


def _with_status(entry: ManifestEntry, status: ManifestEntryStatus, snapshot_id: int | None) -> ManifestEntry:
    # Sequence numbers stay: they decide which row-level deletes apply to a file.
    return ManifestEntry(
        status, snapshot_id, entry.sequence_number, entry.file_sequence_number, entry.data_file
    )


def _whole_partition(
    builder: SnapshotBuilder,
    head: _Head,
    plan: Plan,
    files: Sequence[StagedFile],
    ids: set[int],
    rewritten: set[int],
) -> Wanted:
    """All files of the target partitions, if nothing but `ids` and compactions ever put one there, and the
    `rewritten` ones of them wrote nowhere else.

    Going back from the head, each snapshot must be one of these, or have added nothing here, until one is
    reached whose files here are all from `ids`, and a file of each rewritten one was seen: an export writes
    into one partition, so where one file was, all were.
    Raises: Invalid with the reason.
    """
    here = _in_partitions(builder, plan, files)
    spec_id = builder.metadata.default_spec_id
    unseen, unmixed, oldest = set(rewritten), False, None
    for snapshot in ancestors_of(builder.parent, builder.metadata):
        entries = list(head.live(snapshot))
        for entry in entries:
            if entry.snapshot_id in rewritten and not here(entry):
                raise _refusal(
                    plan, "its earlier rows lie in another target partition, and were rewritten since"
                )
        unseen -= {entry.snapshot_id for entry in entries if entry.data_file.spec_id == spec_id}
        added_by = {entry.snapshot_id for entry in entries if here(entry)}
        unmixed = unmixed or added_by <= ids
        if unmixed and not unseen:
            return here
        if not unmixed and snapshot.snapshot_id in added_by - ids and not _keeps_rows(snapshot):
            raise _refusal(
                plan,
                f"snapshot {snapshot.snapshot_id} put other rows into the same target partition, "
                "and the earlier files were rewritten since",
            )
        oldest = snapshot
    if oldest is None:
        return here
    raise _refusal(
        plan,
        f"the earlier files were rewritten, and the history before snapshot {oldest.snapshot_id} has "
        "expired, so nothing shows whose rows are in the target partition",
    )


def _keeps_rows(snapshot: Snapshot) -> bool:
    """Whether a snapshot only put the same rows into other files, as compaction does."""
    return snapshot.summary is not None and snapshot.summary.operation == Operation.REPLACE


def _in_partitions(builder: SnapshotBuilder, plan: Plan, files: Sequence[StagedFile]) -> Wanted:
    """Whether a file is in a partition that this job writes. One of an older spec may be, so it counts."""
    metadata = builder.metadata
    to_record = partition_reader(metadata)
    spec = metadata.spec()
    partitions: list[Record] = [to_record(file.partition) for file in files]
    if len(plan.partition_values) == len(spec.fields):
        partitions.append(to_record(plan.partition_values))
    if not partitions:
        raise _refusal(
            plan, "its earlier files were rewritten, and it has no rows now that tell where they were"
        )
    values = {partition_key(record) for record in partitions}
    return lambda e: e.data_file.spec_id != spec.spec_id or partition_key(e.data_file.partition) in values


def _refusal(plan: Plan, reason: str) -> Invalid:
    return Invalid(
        f"cannot replace partition {plan.partition} in {plan.target}: {reason}",
        hint="nothing was changed; delete the old rows in the target, then export with --on-existing append",
    )
