"""What a stage does inside an executor: where its rows come from, and where they go.

| stage | rows come from | and go to |
|---|---|---|
| write | the source of an export, or raw files | data files |
| map | raw files | sorted runs |
| combine, recombine | some sorted runs | one longer run |
| unique | the keys of all runs, and of the table | the rows that lose against another one |
| merge | a range of all sorted runs | sorted data files |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from lockstep.config import Config
from lockstep.errors import Invalid
from lockstep.job import Json, Kind, Lease, Plan, Position, StagedFile
from lockstep.sink import Sink
from lockstep.sink.rejects import RejectSink
from lockstep.source import Chunk, Input, open_frozen, open_source
from lockstep.storage import Storage
from lockstep.truncation import Truncations

BATCHES_IN_MEMORY: Final = 16
MAP_CHECKPOINT_S: Final = 10.0
"""A map task finishes a run at least this often: what a crash costs is bounded by it."""

Read = Callable[[Position | None], Iterator[Chunk]]


@dataclass
class Pipeline:
    """The two ends of a stage for one attempt."""

    read: Read
    sink: Sink
    checkpoint_s: float | None = None
    """A checkpoint is due after this time, even if no file is full."""
    rejects: Rejections | None = None
    close: Callable[[], None] = field(default=lambda: None)

    def add(self, chunk: Chunk) -> None:
        """Raises: Invalid when the task alone has met more rejects than the job allows."""
        if chunk.batch.num_rows:
            self.sink.add(chunk.batch, chunk.records)
        if chunk.rejects and self.rejects is not None:
            self.rejects.add(chunk)

    def flush(self) -> list[StagedFile]:
        """Finish every open file: all rows and rejects added so far are in what this and earlier calls
        returned."""
        staged = self.sink.flush()
        return staged + (self.rejects.sink.flush() if self.rejects else [])


@dataclass(frozen=True)
class Rejections:
    """The rejects of a task, and where its records stand."""

    sink: RejectSink
    files: Input
    plan: Plan
    descriptor: Json

    def add(self, chunk: Chunk) -> None:
        self.sink.add(chunk.rejects)
        if not self.sink.over:
            return
        assert self.plan.terms is not None
        last = self.sink.last
        place = self.files.locate(self.plan.pin, self.descriptor, last.record)
        column = f', column "{last.column}"' if last.column else ""
        most = self.plan.terms.max_rejects
        why = "" if most == 0 else f"more than {most} records do not fit; the last one is "
        raise Invalid(
            f"{why}{place}{column}: {last.reason}",
            hint="nothing was published; --dry-run lists every problem, --max-rejects N lets N records go to "
            "a rejects file",
        )


def open_pipeline(
    plan: Plan, lease: Lease, descriptor: Json, source_address: str, config: Config
) -> Pipeline:
    """Open both ends of the stage that `lease` names. Raises: Invalid; Retryable."""
    storage = Storage(config.storage)
    if lease.stage in ("write", "map"):
        return _from_outside(plan, lease, descriptor, source_address, config, storage)
    return _from_runs(plan, lease, descriptor, storage)


def _from_outside(
    plan: Plan, lease: Lease, descriptor: Json, source_address: str, config: Config, storage: Storage
) -> Pipeline:
    batch_bytes = plan.limits.task_memory_bytes // BATCHES_IN_MEMORY
    if plan.kind is Kind.EXPORT:
        source = open_source(source_address, config)
        return Pipeline(
            lambda position: source.read(plan.pin, descriptor, position, plan.columns, batch_bytes),
            _sink(plan, lease, storage),
            close=source.close,
        )
    files = open_frozen(source_address, plan.pin, config)
    truncations = Truncations(plan.schema, plan.spec, plan.sort_order if lease.stage == "map" else None)
    return Pipeline(
        lambda position: truncations.checked(
            files.read(plan.pin, descriptor, position, plan.columns, batch_bytes)
        ),
        _sink(plan, lease, storage),
        MAP_CHECKPOINT_S if lease.stage == "map" else None,
        Rejections(RejectSink(plan, lease, storage), files, plan, descriptor),
        files.close,
    )


def _sink(plan: Plan, lease: Lease, storage: Storage) -> Sink:
    if lease.stage == "map":
        from lockstep.sink.run import RunSink

        return RunSink(plan, lease.job_id, lease.stage, lease.index, lease.epoch, storage)
    from lockstep.sink.datafile import DataFileSink

    return DataFileSink(plan, lease.job_id, lease.stage, lease.index, lease.epoch, storage)


def _from_runs(plan: Plan, lease: Lease, descriptor: Json, storage: Storage) -> Pipeline:
    from lockstep.merge import MergeReader
    from lockstep.sink.run import SortedRunSink

    batch_bytes = plan.limits.task_memory_bytes // BATCHES_IN_MEMORY
    reader = MergeReader(plan, storage)
    where = (plan, lease.job_id, lease.stage, lease.index, lease.epoch, storage)
    if lease.stage == "merge":
        return Pipeline(
            lambda position: reader.read(descriptor, position, batch_bytes), _sink(plan, lease, storage)
        )
    if lease.stage == "unique":
        from lockstep.sink.losers import LosersSink
        from lockstep.unique import UniqueReader

        unique = UniqueReader(plan, storage)
        return Pipeline(lambda position: unique.read(descriptor, position, batch_bytes), LosersSink(*where))
    return Pipeline(
        lambda position: reader.read_whole(descriptor, position, batch_bytes),
        SortedRunSink(*where, kind=descriptor["kind"]),
    )
