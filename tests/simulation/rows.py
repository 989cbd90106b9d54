"""What stands in for rows: a source whose rows are numbers, and a sink whose files are lists of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.config import Config
from lockstep.errors import Corrupt, Invalid, Retryable
from lockstep.job import DATA, Fingerprint, Json, Lease, Piece, Plan, Position, StagedFile, TaskSpec
from lockstep.source import Chunk, FoundPin, PartInfo, PartitionInfo, Pin, SourceColumn, SourceTable

if TYPE_CHECKING:
    from tests.simulation.world import World

Ranges = dict[str, tuple[int, int]]
"""The numbers in each part, from the first up to the last, which is not in it."""


class SimSource:
    """Implements `Source`: a part is a range of numbers and makes one task; a position is the next number."""

    world: World

    def __init__(self, address: str, config: Config) -> None:
        self.address = address

    def describe(self) -> SourceTable:
        self._reach("describe")
        return SourceTable("numbers", "numbers", [SourceColumn("id", "Int64", "long", True)], (), "")

    def partitions(self) -> list[PartitionInfo]:
        return [
            PartitionInfo(name, name, sum(last - first for first, last in parts.values()), 0, _infos(parts))
            for name, parts in self.world.partitions.items()
        ]

    def pin(self, name: str, partition_id: str, parts: Sequence[str] | None, *, frozen: bool = True) -> Pin:
        self._reach(f"pin {partition_id}")
        there = self.world.partitions[partition_id]
        chosen: Ranges = {part: there[part] for part in (there if parts is None else parts)}
        self.world.pins.add(name)
        rows = sum(last - first for first, last in chosen.values())
        return Pin({"name": name, "parts": chosen}, _infos(chosen), rows)

    def plan_tasks(self, pin: Pin, task_bytes: int) -> list[TaskSpec]:
        return [
            TaskSpec({"first": first, "last": last}, last - first)
            for first, last in pin.detail["parts"].values()
        ]

    def read(
        self, pin: Json, descriptor: Json, position: Position | None, columns: object, batch_bytes: int
    ) -> Iterator[Chunk]:
        world = self.world
        row = descriptor["first"] if position is None else position["row"]
        while row < descriptor["last"]:
            self._reach(f"read {row}")
            world.scheduler.pause(world.random.uniform(0.0, world.row_s))
            if world.chance("source_corrupt"):
                raise Corrupt("a part is damaged")
            if pin["name"] not in world.pins:
                self._complain(pin["name"])
                raise Invalid("the pin is gone")
            upto = min(descriptor["last"], row + world.random.randint(1, 3))
            batch = SimBatch(list(range(row, upto)))
            row = upto
            known = row == descriptor["last"] or world.random.random() < 0.7
            yield Chunk(batch, {"row": row} if known else None)

    def unpin(self, pin: Json, timeout_s: float) -> None:
        self._reach("unpin")
        self.world.pins.discard(pin["name"])

    def pins(self) -> list[FoundPin]:
        self._reach("list of pins")
        return [FoundPin(_job_of(name), name, 0.0, {"name": name}) for name in sorted(self.world.pins)]

    def close(self) -> None:
        pass

    def _complain(self, pin: str) -> None:
        """An attempt of a job that was killed meanwhile may find its pin gone; no other one."""
        if self.world.state_of(_job_of(pin)) not in ("completed", "killed"):
            self.world.complaints.append(f"{pin} was given up, and its job still needs it")

    def _reach(self, what: str) -> None:
        """Raises: Retryable if the source does not answer."""
        self.world.call(f"source {what}")
        if self.world.chance("source_refused"):
            self.world.scheduler.note("source: no answer")
            raise Retryable("the source does not answer")


def _job_of(pin: str) -> str:
    return pin.removeprefix("lockstep_pin_")


def _infos(parts: Ranges) -> list[PartInfo]:
    return [PartInfo(name, last - first, 0, Piece(name)) for name, (first, last) in parts.items()]


class SimInput(SimSource):
    """Stands in for the raw files of an import: nothing is pinned."""

    def __init__(self, address: str, pin: Json, config: Config) -> None:
        super().__init__(address, config)
        self.world.pins.add(pin["name"])


class SimBatch:
    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        self.num_rows = len(rows)


class StagedFiles:
    """Finished files are JSON lists of rows, under names of this attempt alone."""

    world: World

    def __init__(self, plan: Plan, job_id: str, stage: str, index: int, epoch: int, *_: Any) -> None:
        self._plan = plan
        self._lease = Lease(job_id, stage, index, epoch, "")
        self._rows: list[int] = []
        self._written = 0
        self._most = self.world.random.randint(1, 4)

    def add(self, batch: Any, records: Any = None) -> None:
        self._rows += batch.rows

    @property
    def full(self) -> bool:
        return len(self._rows) >= self._most

    @property
    def pending_bytes(self) -> int:
        return len(self._rows)

    def flush(self) -> list[StagedFile]:
        if not self._rows:
            return []
        rows, self._rows = self._rows, []
        staged = self._write(rows)
        self._written += 1
        return staged

    def _write(self, rows: list[int]) -> list[StagedFile]:
        raise NotImplementedError

    def _put(self, path: str, rows: list[int], kind: str, stats: Json) -> StagedFile:
        world = self.world
        world.call(f"put {path.rpartition('/')[2]} {rows}")
        if world.chance("storage_refused") or world.in_window("storage_away"):
            raise Retryable("the storage does not answer")
        body = json.dumps(rows).encode()
        world.storage.put(path, body)
        if world.chance("storage_reply_lost"):
            raise Retryable("the storage's reply was lost")
        found = Fingerprint(len(rows), {"id": sum(rows)})
        return StagedFile(path, len(body), len(rows), "", found, kind=kind, stats=stats)

    def abort(self) -> None:
        self._rows = []


class SimSink(StagedFiles):
    """Stands in for DataFileSink, with its names: a sweep knows them."""

    def _write(self, rows: list[int]) -> list[StagedFile]:
        lease = self._lease
        name = f"lockstep-{lease.job_id}-{lease.stage}-{lease.index:05d}-{lease.epoch:03d}"
        return [self._put(f"{self._plan.location}/data/{name}-{self._written:05d}.parquet", rows, DATA, {})]
