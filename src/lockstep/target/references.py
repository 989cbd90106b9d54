"""Which files a table's metadata still refers to: of all snapshots that it holds, on a branch or on none."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from lockstep.errors import Corrupt


def referenced(table: Table, names: Collection[str]) -> set[str]:
    """Those of `names` that some snapshot refers to, as a data file or as metadata of its own.

    Files are told by their names, not by their addresses: ours are unique, and one file may be written as
    `file:///x`, `file:/x` or `/x`. An entry that only says that a file was removed counts as well.
    Raises: Corrupt if a snapshot does not tell its manifests; whatever the storage raises.
    """
    wanted = frozenset(names)
    if not wanted:
        return set()
    found: set[str] = set()
    read: set[str] = set()
    for snapshot in table.metadata.snapshots:
        found.update(wanted.intersection(_names(table, snapshot, read)))
    return found


def _names(table: Table, snapshot: Snapshot, read: set[str]) -> Iterator[str]:
    """The names in one snapshot; manifests that were read before, for another one, are passed over."""
    if not snapshot.manifest_list:
        raise Corrupt(
            f"snapshot {snapshot.snapshot_id} of {'.'.join(table.name())} has no manifest list, "
            "so nobody can tell which files it refers to",
            hint="expire the snapshot with the tool that wrote it",
        )
    yield base_name(snapshot.manifest_list)
    for manifest in snapshot.manifests(table.io):
        if manifest.manifest_path in read:
            continue
        read.add(manifest.manifest_path)
        yield base_name(manifest.manifest_path)
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False):
            yield base_name(entry.data_file.file_path)


def base_name(url: str) -> str:
    return url.rpartition("/")[2]
