"""The stages of an import over plain rows, without a store: map, combine, unique, merge; with crashes.

It does what an attempt does: position and files advance together, and what was not checkpointed is done
again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from lockstep import merge, passes
from lockstep.fingerprint import fingerprint
from lockstep.job import (
    LOSERS,
    RUN,
    Fingerprint,
    ImportTerms,
    Json,
    Kind,
    Limits,
    Plan,
    Position,
    SortKey,
    StagedFile,
)
from lockstep.merge import MergeReader
from lockstep.passes import newest_runs, next_stage
from lockstep.sink import Sink, run, sorting
from lockstep.sink.losers import LosersSink
from lockstep.sink.run import RunSink, SortedRunSink
from lockstep.source import Chunk
from lockstep.storage import Storage
from lockstep.unique import Published, UniqueReader

JOB = "ab12"
SCHEMA: Json = {
    "type": "struct",
    "fields": [
        {"id": 1, "name": "k", "type": "long", "required": False},
        {"id": 2, "name": "s", "type": "string", "required": False},
        {"id": 3, "name": "v", "type": "long", "required": False},
    ],
}
ARROW = pa.schema([("k", pa.int64()), ("s", pa.string()), ("v", pa.int64())])
Row = tuple[Any, ...]


def batch_of(rows: Sequence[Row], schema: pa.Schema = ARROW) -> pa.RecordBatch:
    columns: list[Any] = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    return pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    return list(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def small(
    block: int = 1000,
    fan_in: int = 64,
    least_range: int = 5000,
    long_run: int = 1_000_000,
    huge: int = 10**9,
) -> AbstractContextManager[Any]:
    """Sizes at which a few rows make many blocks, runs and ranges."""
    stack = ExitStack()
    for name, value in (("BLOCK_BYTES", block), ("LONG_RUN_BYTES", long_run)):
        stack.enter_context(patch.object(run, name, value))
    for name, value in (("PIECE_BYTES", 3 * block), ("SORTED_BYTES", 2 * block), ("SORT_ROW_BYTES", 0)):
        stack.enter_context(patch.object(sorting, name, value))
    stack.enter_context(patch.object(run, "SORT_ROW_BYTES", 0))
    for room in (run, merge):
        stack.enter_context(patch.object(room, "HUGE_BYTES", huge))
    for name, value in (("FAN_IN", fan_in), ("LEAST_RANGE_BYTES", least_range)):
        stack.enter_context(patch.object(passes, name, value))
    return stack


class Crashes:
    """Whether an attempt dies now: drawn from a seed, and never for ever."""

    def __init__(self, seed: int | None, most: int = 20) -> None:
        self._random = Random(seed)
        self._left = 0 if seed is None else most

    def now(self) -> bool:
        if self._left and self._random.random() < 0.25:
            self._left -= 1
            return True
        return False


class _Gathered:
    """A sink that keeps rows, as data files would."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._pending: list[Row] = []

    def add(self, batch: pa.RecordBatch, records: pa.Int64Array | None = None) -> None:
        self._pending.extend(rows_of(batch))

    @property
    def full(self) -> bool:
        return len(self._pending) > 20

    @property
    def pending_bytes(self) -> int:
        return 0

    def flush(self) -> list[StagedFile]:
        self.rows, self._pending = [*self.rows, *self._pending], []
        return []

    def abort(self) -> None:
        self._pending = []


class RunsLab:
    def __init__(
        self,
        folder: Path,
        order: Sequence[SortKey] = (SortKey("k"),),
        unique: Sequence[str] = (),
        on_duplicate: str = "error",
        memory: int = 3000,
        file_size: int = 10_000,
        schema: Json = SCHEMA,
    ) -> None:
        terms = ImportTerms(tuple(order), tuple(unique), on_duplicate)
        self.plan = Plan(
            kind=Kind.IMPORT,
            source="files",
            target="iceberg://lake/db.t",
            target_uuid="u",
            location=str(folder),
            schema=schema,
            spec={"spec-id": 0, "fields": []},
            sort_order={"order-id": 1, "fields": []},
            columns=(),
            pin={},
            limits=Limits(task_memory_bytes=memory),
            file_size_bytes=file_size,
            terms=terms,
        )
        self.storage = Storage()
        self.stages: list[tuple[str, int]] = []
        self.files: dict[str, list[StagedFile]] = {}
        self.files_read = 0

    def map(self, tasks: Sequence[Sequence[pa.RecordBatch]], crashes: Crashes | None = None) -> None:
        """Write runs of the batches of each task."""
        self.files["map"] = []
        for index, batches in enumerate(tasks):
            sink = self._sink(RunSink, "map", index)
            read = functools.partial(_read_batches, batches)
            self.files["map"] += self._attempts(read, sink, crashes or Crashes(None))

    def rows(self, crashes: Crashes | None = None, published: Published | None = None) -> list[Row]:
        """Go through all stages after the map, and answer the rows as they would be in the table."""
        crashes = crashes or Crashes(None)
        stage, gathered = "map", _Gathered()
        while stage != "merge":
            following = next_stage(stage, newest_runs(self.files), self.plan, lambda: published)
            stage = following.stage
            self.stages.append((stage, len(following.tasks)))
            self.files[stage] = []
            for index, task in enumerate(following.tasks):
                descriptor = json.loads(json.dumps(task.descriptor))
                self.files[stage] += self._task(stage, index, descriptor, gathered, crashes)
        return gathered.rows

    def _task(
        self, stage: str, index: int, descriptor: Json, gathered: _Gathered, crashes: Crashes
    ) -> list[StagedFile]:
        reader = MergeReader(self.plan, self.storage)
        if stage == "merge":
            return self._attempts(_reading(reader.read, descriptor), lambda _: gathered, crashes)
        if stage == "unique":
            unique = UniqueReader(self.plan, self.storage)
            sink = self._sink(LosersSink, stage, index)
            staged = self._attempts(_reading(unique.read, descriptor), sink, crashes)
            self.files_read += unique.files_read
            return staged
        kind = descriptor["kind"]
        sink = self._sink(functools.partial(SortedRunSink, kind=kind), stage, index)
        return self._attempts(_reading(reader.read_whole, descriptor), sink, crashes)

    def _sink(self, of: Callable[..., Sink], stage: str, index: int) -> Callable[[int], Sink]:
        return lambda epoch: of(self.plan, JOB, stage, index, epoch, storage=self.storage)

    def fingerprint(self) -> Fingerprint:
        """Of the rows in the newest runs."""
        found = Fingerprint()
        for file in newest_runs(self.files):
            if file.kind == RUN:
                found += file.fingerprint
        return found

    def losers(self) -> list[Row]:
        """Task and record of each loser, and of its winner."""
        found: list[Row] = []
        for file in self.files["unique"]:
            assert file.kind == LOSERS
            found += rows_of(pa.ipc.open_file(file.path).read_all().combine_chunks().to_batches()[0])
        return sorted(found, key=lambda row: row[:2])

    @staticmethod
    def _attempts(
        read: Callable[[Position | None], Iterator[Chunk]],
        sink_of: Callable[[int], Sink],
        crashes: Crashes,
    ) -> list[StagedFile]:
        """One task to its end, over as many attempts as it takes."""
        staged: list[StagedFile] = []
        position: Position | None = None
        epoch = 0
        while True:
            epoch += 1
            sink = sink_of(epoch)
            reached = position
            died = False
            for chunk in read(None if position is None else json.loads(json.dumps(position))):
                if died := crashes.now():
                    break
                sink.add(chunk.batch, chunk.records)
                if chunk.position is None:
                    continue
                reached = chunk.position
                if sink.full:
                    staged += sink.flush()
                    position = reached
            if died:
                sink.abort()
                continue
            staged += sink.flush()
            return staged


def _reading(
    read: Callable[[Json, Position | None, int], Iterator[Chunk]], descriptor: Json
) -> Callable[[Position | None], Iterator[Chunk]]:
    return lambda position: read(descriptor, position, 700)


def _read_batches(batches: Sequence[pa.RecordBatch], position: Position | None) -> Iterator[Chunk]:
    first = position["batch"] if position else 0
    record = sum(batch.num_rows for batch in batches[:first])
    for number, batch in enumerate(batches[first:], first):
        numbers = pa.array(range(record, record + batch.num_rows), pa.int64())
        record += batch.num_rows
        yield Chunk(batch, {"batch": number + 1}, numbers)


def in_order(rows: Sequence[Row], keys: Sequence[SortKey], names: Sequence[str] = ARROW.names) -> list[Row]:
    """A plain model: `sorted`, with NULL where its key says."""

    def key(row: Row) -> list[Any]:
        return [_comparable(row[names.index(each.column)], each) for each in keys]

    return sorted(rows, key=key)


@functools.total_ordering
class _Backwards:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Backwards) and bool(self.value == other.value)

    def __lt__(self, other: _Backwards) -> bool:
        return bool(other.value < self.value)


def _comparable(value: Any, key: SortKey) -> tuple[int, Any]:
    if value is None:
        return (0 if key.nulls_first else 2, 0)
    plain = value.encode() if isinstance(value, str) else value
    return (1, _Backwards(plain) if key.descending else plain)


def fingerprint_of(rows: Sequence[Row]) -> Fingerprint:
    return fingerprint(batch_of(rows))
