"""What stands in for the rows of an import between its input and its data files: runs, keys and losers.

A run is a list of numbers, and so is its companion. `ROWS_PER_KEY` neighbours share a unique key, of which
the first is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import Corrupt
from lockstep.job import KEYS, LOSERS, RUN, Json, Plan, Position, StagedFile, TaskSpec
from lockstep.keys import RECORD, TASK
from lockstep.passes import Chain
from lockstep.sink.staging import staged_url
from lockstep.source import Chunk
from lockstep.unique import Published
from tests.simulation.rows import SimBatch, StagedFiles

if TYPE_CHECKING:
    from tests.simulation.world import World

ROWS_PER_KEY: Final = 3


# Sinks


class SimRunSink(StagedFiles):
    """Stands in for RunSink: with a unique key, each run has a companion."""

    def _write(self, rows: list[int]) -> list[StagedFile]:
        assert self._plan.terms is not None
        kinds = (KEYS, RUN) if self._plan.terms.unique else (RUN,)
        return [self._write_run(kind, rows) for kind in kinds]

    def _write_run(self, kind: str, rows: list[int]) -> StagedFile:
        stats = {"raw_bytes": len(rows), "block_bytes": 1, "first": rows[0], "last": rows[-1] + 1}
        return self._put(staged_url(self._plan, self._lease, self._written, kind), rows, kind, stats)


class SimSortedRunSink(SimRunSink):
    """Stands in for SortedRunSink."""

    def __init__(self, *where: Any, kind: str) -> None:
        super().__init__(*where)
        self._kind = kind

    def _write(self, rows: list[int]) -> list[StagedFile]:
        return [self._write_run(self._kind, rows)]


class SimLosersSink(StagedFiles):
    """Stands in for LosersSink."""

    def _write(self, rows: list[int]) -> list[StagedFile]:
        winner = {"winner_task": 0, "winner_record": 0, "winner_file": None}
        stats = {"least": {TASK: 0, RECORD: rows[0], **winner}, "against_table": 0}
        return [self._put(staged_url(self._plan, self._lease, self._written, LOSERS), rows, LOSERS, stats)]


# Plans: the same files give the same tasks


def plan_sim_whole(group: Sequence[Chain], kind: str) -> TaskSpec:
    """Stands in for what a task that combines runs is told."""
    files = [file for chain in group for file in chain.files]
    first, last = files[0].stats["first"], files[-1].stats["last"]
    return TaskSpec(_descriptor(first, last, files, kind), last - first)


def plan_sim_unique(files: Sequence[StagedFile], plan: Plan, published: Published | None) -> list[TaskSpec]:
    """Stands in for `plan_unique`: no key lies in two ranges."""
    return _ranges(files, plan, KEYS, ROWS_PER_KEY, published={"snapshot_id": None})


def plan_sim_merge(files: Sequence[StagedFile], plan: Plan) -> list[TaskSpec]:
    """Stands in for `plan_merge`: ranges of numbers over all runs."""
    return _ranges(files, plan, RUN, 1, losers=[file.path for file in files if file.kind == LOSERS])


def _ranges(files: Sequence[StagedFile], plan: Plan, kind: str, step: int, **more: object) -> list[TaskSpec]:
    runs = [file for file in files if file.kind == kind]
    if not runs:
        return []
    first, last = plan.pin["first"], plan.pin["last"]
    middle = first + (last - first) // 2
    middle -= middle % step
    ranges = [(first, middle), (middle, last)] if first < middle else [(first, last)]
    return [TaskSpec({**_descriptor(low, high, runs, kind), **more}, high - low) for low, high in ranges]


def _descriptor(first: int, last: int, files: Sequence[StagedFile], kind: str) -> Json:
    return {"first": first, "last": last, "kind": kind, "runs": [file.path for file in files]}


def sim_published(table: object, plan: Plan, snapshot_id: int | None = None) -> Published:
    """Stands in for `published`: no two jobs have numbers in common, so the table repeats no key."""
    return Published(None, {}, ())


# Readers


class SimMergeReader:
    """Stands in for MergeReader: the rows of a range, from all runs, in order, without those that lose."""

    world: World

    def __init__(self, plan: Plan, storage: object) -> None:
        pass

    def read(self, descriptor: Json, position: Position | None, batch_bytes: int) -> Iterator[Chunk]:
        losers = {row for path in descriptor["losers"] for row in self._rows(path)}
        return self._chunks(descriptor, position, lambda row: row not in losers)

    def read_whole(self, descriptor: Json, position: Position | None, batch_bytes: int) -> Iterator[Chunk]:
        return self._chunks(descriptor, position, lambda row: True)

    def _chunks(
        self, descriptor: Json, position: Position | None, wanted: Callable[[int], bool]
    ) -> Iterator[Chunk]:
        """Positions go on where all of a chunk loses, too."""
        first = descriptor["first"] if position is None else position["row"]
        found = sorted(row for path in descriptor["runs"] for row in self._rows(path))
        rows = [row for row in found if first <= row < descriptor["last"]]
        while rows:
            self.world.call(f"merge {rows[0]}")
            count = self.world.random.randint(1, 3)
            some, rows = rows[:count], rows[count:]
            yield Chunk(SimBatch([row for row in some if wanted(row)]), {"row": some[-1] + 1})

    def _rows(self, path: str) -> list[int]:
        self.world.reach_storage(f"open {path.rpartition('/')[2]}")
        if (body := self.world.storage.files.get(path)) is None:
            if self.world.needs(path.split("/")[-2], path):
                self.world.complaints.append(f"{path} was deleted, and its job still needs it")
            raise Corrupt(f"{path} is gone")
        found: list[int] = json.loads(body)
        return found


class SimUniqueReader(SimMergeReader):
    """Stands in for UniqueReader: of each key all rows lose but the first of the import."""

    def read(self, descriptor: Json, position: Position | None, batch_bytes: int) -> Iterator[Chunk]:
        here = {row for path in descriptor["runs"] for row in self._rows(path)}
        return self._chunks(descriptor, position, lambda row: row % ROWS_PER_KEY != 0 and row - 1 in here)
