"""Raw files read as an import reads them: described, frozen, cut into tasks, and read from any position."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.job import ColumnMap, Json, Position, TaskSpec
from lockstep.new_table import derive
from lockstep.schema import match_columns
from lockstep.source import Chunk, Input, ParseOptions, Pin, Place, Reject, open_frozen, open_input

WIDE = 1 << 40


def schema_of(**types: str | Json) -> Json:
    """An Iceberg schema; a type that ends with ! is required."""
    fields = []
    for number, (name, kind) in enumerate(types.items(), 1):
        required = isinstance(kind, str) and kind.endswith("!")
        plain = kind.removesuffix("!") if isinstance(kind, str) else kind
        fields.append({"id": number, "name": name, "required": required, "type": plain})
    return {"type": "struct", "schema-id": 0, "fields": fields}


@dataclass
class Outcome:
    """What reading brought: rows as dicts, their numbers, the rejects, and every position on the way."""

    rows: list[Json] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        assert chunk.records is not None
        assert chunk.position is not None
        chunk.batch.validate(full=True)
        self.rows += chunk.batch.to_pylist()
        self.records += chunk.records.to_pylist()
        self.rejects += chunk.rejects
        self.positions.append(json.loads(json.dumps(chunk.position)))
        self.chunks.append(chunk)


class FilesLab:
    """An import's input over `addresses`, as the planner and then as an executor sees it."""

    def __init__(
        self,
        root: Path,
        *addresses: str | Path,
        ignore_extra: bool = False,
        storage: Mapping[str, Mapping[str, str]] | None = None,
        **options: Any,
    ) -> None:
        self.config = Config(root, "sqlite://", {}, {}, storage or {})
        self.options = ParseOptions(**options)
        self.planner = open_input([str(address) for address in addresses], self.options, self.config)
        self.pin: Pin = self.planner.freeze()
        self.detail: Json = json.loads(json.dumps(self.pin.detail))
        self.table = self.planner.describe()
        schema = self.options.schema or derive(self.table)[0]
        self.columns: list[ColumnMap] = match_columns(self.table, schema, ignore_extra=ignore_extra)

    @property
    def executor(self) -> Input:
        return open_frozen("", self.detail, self.config)

    def tasks(self, task_bytes: int = WIDE) -> list[TaskSpec]:
        return self.planner.plan_tasks(self.pin, task_bytes)

    def read(
        self,
        task: TaskSpec,
        position: Position | None = None,
        batch_bytes: int = 1 << 20,
        columns: Sequence[ColumnMap] | None = None,
    ) -> Outcome:
        outcome = Outcome()
        descriptor = json.loads(json.dumps(task.descriptor))
        for chunk in self.executor.read(
            self.detail, descriptor, position, columns or self.columns, batch_bytes
        ):
            outcome.add(chunk)
        return outcome

    def recall(self, task: TaskSpec, records: Sequence[int]) -> list[tuple[Place, str]]:
        """Place and raw text of records, looked up in one pass."""
        found = list(self.executor.recall(self.detail, task.descriptor, records, self.columns))
        assert [one.record for one in found] == list(records)
        return [(one.place, one.raw) for one in found]

    def read_all(self, task_bytes: int = WIDE, batch_bytes: int = 1 << 20) -> Outcome:
        """All tasks, one after the other; records are numbered per task."""
        outcome = Outcome()
        for task in self.tasks(task_bytes):
            for chunk in self.read(task, batch_bytes=batch_bytes).chunks:
                outcome.add(chunk)
        return outcome

    def lines_of_rejects(self, task_bytes: int = WIDE, batch_bytes: int = 1 << 20) -> list[tuple[str, int]]:
        """File and absolute line of each reject, as people are told."""
        places = []
        for task in self.tasks(task_bytes):
            for reject in self.read(task, batch_bytes=batch_bytes).rejects:
                place = self.executor.locate(self.detail, task.descriptor, reject.record)
                places.append((Path(place.input).name, place.line))
        return places
