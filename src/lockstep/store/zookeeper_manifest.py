"""The manifest of a job in the ZooKeeper store: the files of a checkpoint as they come in, and all of them.

Files are kept in chunks, which no record names until their checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from lockstep.job import Lease, Position, Progress, StagedFile
from lockstep.store.rules import Batch, late_copy, short_manifest, unpacked
from lockstep.store.zookeeper_edit import Edit, Seen
from lockstep.store.zookeeper_layout import PAGE, Entry, Page, Record, fingerprint_of
from lockstep.store.zookeeper_records import Records
from lockstep.store.zookeeper_session import MOST_BYTES, Lost, Moved, Writes

_CHUNKS_AT_ONCE: Final = 128
_TRIES: Final = 5
_IN_ONE_TRANSACTION_BYTES: Final = 400_000


class Manifests(Records):
    """Reading manifests, and writing what nothing refers to yet."""

    def manifest(self, job_id: str, stage: str) -> Iterator[StagedFile]:
        """Streams; raises Corrupt if fewer files are stored than were checkpointed."""
        record = self._record(job_id)
        begun, expected, place = record.begun(stage)
        seen = 0
        window: list[tuple[int, str]] = []
        for index, path in self._chunk_paths(record, place, begun):
            window.append((index, path))
            if len(window) >= _CHUNKS_AT_ONCE:
                for file in self._files_in(job_id, stage, window):
                    seen += 1
                    yield file
                window = []
        for file in self._files_in(job_id, stage, window):
            seen += 1
            yield file
        if seen < expected:
            raise short_manifest(job_id, stage, seen, expected)

    def _chunk_paths(self, record: Record, place: str, begun: int) -> Iterator[tuple[int, str]]:
        for page in self._pages(record, place, begun):
            for index, entry in page.touched():
                for epoch, first, count in entry.chunks:
                    for seq in range(first, first + count):
                        yield index, self._layout.chunk(record.body, place, index, epoch, seq)

    def _pages(self, record: Record, place: str, begun: int) -> Iterator[Page]:
        """The pages of all tasks of a stage that were ever claimed; those that are missing are left out."""
        numbers = range((begun + PAGE - 1) // PAGE)
        for start in range(0, len(numbers), _CHUNKS_AT_ONCE):
            some = numbers[start : start + _CHUNKS_AT_ONCE]
            seen = Seen(replace(record, place=place), -1)
            self._load_pages([(seen, number) for number in some])
            for number in some:
                if number in seen.pages:
                    yield seen.pages[number][0]

    def _files_in(self, job_id: str, stage: str, chunks: Sequence[tuple[int, str]]) -> Iterator[StagedFile]:
        nodes = self._session.get_many([path for _, path in chunks])
        for (index, _), node in zip(chunks, nodes, strict=True):
            if node is not None:
                yield from unpacked(job_id, stage, index, node.data)

    def _write_ahead(self, nodes: Sequence[tuple[str, bytes]]) -> None:
        """Create nodes that nothing refers to yet, many in one transaction; one that is there is left so.

        Their names belong to this attempt alone, so what is there came from a request whose reply got lost.
        """
        writes = Writes()
        for path, data in nodes:
            if writes.steps and (writes.size_bytes + len(data) > MOST_BYTES or len(writes.steps) >= 500):
                self._create_all(writes)
                writes = Writes()
            writes.create(path, data)
        if writes.steps:
            self._create_all(writes)

    def _create_all(self, writes: Writes) -> None:
        for _ in range(_TRIES):
            try:
                self._session.commit(writes)
                return
            except (Lost, Moved):
                paths = [step[1] for step in writes.steps]
                there = self._session.get_many(paths)
                missing = Writes()
                for (_, path, data, _), node in zip(writes.steps, there, strict=True):
                    if node is None:
                        missing.create(path, data)
                if not missing.steps:
                    return
                writes = missing
        raise self._session.away()


class Checkpoint:
    """The files of one checkpoint on their way into the store."""

    def __init__(
        self, manifests: Manifests, lease: Lease, position: Position, staged: Sequence[StagedFile]
    ) -> None:
        self._manifests = manifests
        self._lease = lease
        self._written: list[int] | None = None
        for files_per_chunk in (100, 10, 1):
            self.batch = Batch.of(position, staged, files_per_chunk)
            if all(len(chunk) <= MOST_BYTES for chunk in self.batch.packed):
                break

    def store(self, edit: Edit, entry: Entry, progress: Progress) -> Entry:
        """Add the new chunks and the counters; answer the task with its checkpoint.

        The same files again in the same epoch add nothing.
        Raises: Fenced if a later checkpoint of this attempt is there: this is a late copy of an earlier one.
        """
        batch, record = self.batch, edit.record
        if entry.saved_epoch == entry.epoch:
            if entry.saved_digest == batch.digest:
                return entry
            if progress.rows < entry.saved_rows or progress.size_bytes < entry.saved_bytes:
                raise late_copy(record.job_id, self._lease.index, progress.rows)
        edit.add(
            saved_rows=progress.rows - entry.saved_rows,
            saved_bytes=progress.size_bytes - entry.saved_bytes,
            ahead_rows=-entry.ahead_rows,
            ahead_bytes=-entry.ahead_bytes,
            files=batch.files - batch.aside_files,
            aside_files=batch.aside_files,
            aside_bytes=batch.aside_bytes,
        )
        if batch.files and record.stage == record.last_stage:
            edit.change(fingerprint=(fingerprint_of(record) + batch.fingerprint).to_json())
        return replace(
            entry,
            position=batch.position,
            ahead_rows=0,
            ahead_bytes=0,
            saved_rows=progress.rows,
            saved_bytes=progress.size_bytes,
            saved_epoch=entry.epoch,
            saved_digest=batch.digest,
            files=entry.files + batch.files,
            chunks=_with_run(entry.chunks, self._place(edit, entry)) if batch.packed else entry.chunks,
        )

    def _place(self, edit: Edit, entry: Entry) -> list[int]:
        """Add the chunks to the transaction or, if they are too large for it, write them ahead of it."""
        if self._written is not None:
            return self._written
        packed = self.batch.packed
        last = entry.chunks[-1] if entry.chunks else (0, 0, 0)
        first = last[1] + last[2] if last[0] == entry.epoch else 0
        large = sum(map(len, packed)) > _IN_ONE_TRANSACTION_BYTES
        if large or not edit.cached:
            first = self._beyond_leftovers(edit.record, entry.epoch, first)
        nodes = list(zip(self._paths(edit.record, entry.epoch, first), packed, strict=True))
        run = [entry.epoch, first, len(packed)]
        if large:
            self._manifests._write_ahead(nodes)
            self._written = run
        else:
            edit.chunks += nodes
        return run

    def _beyond_leftovers(self, record: Record, epoch: int, first: int) -> int:
        """An earlier try of this attempt may have left chunks that nothing refers to."""
        while True:
            nodes = self._manifests._session.get_many(self._paths(record, epoch, first))
            taken = [offset for offset, node in enumerate(nodes) if node is not None]
            if not taken:
                return first
            first += taken[-1] + 1

    def _paths(self, record: Record, epoch: int, first: int) -> list[str]:
        layout, index = self._manifests._layout, self._lease.index
        return [
            layout.chunk(record.body, record.place, index, epoch, first + offset)
            for offset in range(len(self.batch.packed))
        ]


def _with_run(runs: Sequence[Sequence[int]], run: Sequence[int]) -> list[Sequence[int]]:
    if runs and runs[-1][0] == run[0] and runs[-1][1] + runs[-1][2] == run[1]:
        return [*runs[:-1], [run[0], runs[-1][1], runs[-1][2] + run[2]]]
    return [*runs, run]
