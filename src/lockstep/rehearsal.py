"""A dry run: read everything that an import would read, and find every problem. Nothing is published.

With a unique key the keys of all rows are sorted and compared as in the import itself, in a temporary folder
of this machine; the table is only read. The folder is gone when the rehearsal ends, however it ends.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from lockstep.config import Config
from lockstep.importer import Draft, ImportRequest, plan_of
from lockstep.job import KEYS, Json, Lease, Plan, StagedFile, TaskSpec
from lockstep.places import Places, duplicate_row, recall_duplicates, reject_row, winner_of
from lockstep.request import UNBORN
from lockstep.runtime import new_id
from lockstep.source import Chunk, Reject
from lockstep.storage import Storage
from lockstep.storage.options import options_of
from lockstep.truncation import Truncations

if TYPE_CHECKING:
    from lockstep.unique import Published

BATCH_BYTES: Final = 32_000_000


@dataclass
class Rehearsal:
    """What was found. Every problem is counted; of each kind the first ones in the input are listed."""

    rows: int = 0
    """Rows that fit."""
    rejected: int = 0
    problems: list[Json] = field(default_factory=list)
    duplicates: int = 0
    against_table: int = 0
    """Of the duplicates those that repeat the key of a row in the table."""
    repeated: list[Json] = field(default_factory=list)
    """As `problems`, with the place of the row that has the key already."""
    refused: bool = False
    """True if the import would fail, for whatever reason is among these."""


def rehearse(draft: Draft, request: ImportRequest, config: Config, most_listed: int) -> Rehearsal:
    """Read all inputs of a draft, and compare the unique keys with each other and with the table.

    Memory stays within that of a task. The same inputs and table give the same answer.
    Raises: Corrupt if an input changes meanwhile or cannot be read; Invalid; Retryable.
    """
    found = Rehearsal()
    places = Places(
        draft.files,
        draft.pin.detail,
        {number: task.descriptor for number, task in enumerate(draft.tasks)},
        draft.columns,
    )
    tasks = _read_all(draft, found, places, most_listed)
    if not request.unique:
        for _, chunks in tasks:
            deque(chunks, maxlen=0)  # reading is all
    else:
        with _keys(draft, request, config) as keys:
            for number, chunks in tasks:
                keys.map(number, chunks)
            _compare(keys, found, places, most_listed)
    counted = found.rejected + (found.duplicates if request.on_duplicate == "reject" else 0)
    found.refused = found.refused or counted > request.max_rejects
    return found


def _read_all(
    draft: Draft, found: Rehearsal, places: Places, most_listed: int
) -> Iterator[tuple[int, Iterator[Chunk]]]:
    """The rows of each task. What does not fit is noted on the way."""
    for number, task in enumerate(draft.tasks):
        rejects: list[Reject] = []
        yield number, _noted(draft, task, found, rejects, most_listed - len(found.problems))
        without_text = {(number, reject.record) for reject in rejects if not reject.raw}
        known = places.recall(((number, reject.record) for reject in rejects), without_text)
        for one in rejects:
            at = known[number, one.record]
            found.problems.append(reject_row(at.place, one.column, one.reason, one.raw or at.raw))


def _noted(
    draft: Draft, task: TaskSpec, found: Rehearsal, rejects: list[Reject], most_listed: int
) -> Iterator[Chunk]:
    head = draft.head
    truncations = Truncations(head.schema, head.spec, head.sort_order if draft.mode == "merge" else None)
    chunks = draft.files.read(draft.pin.detail, task.descriptor, None, draft.columns, BATCH_BYTES)
    for chunk in truncations.checked(chunks):
        found.rows += chunk.batch.num_rows
        found.rejected += len(chunk.rejects)
        rejects += chunk.rejects[: most_listed - len(rejects)]
        yield chunk


def _compare(keys: _Keys, found: Rehearsal, places: Places, most_listed: int) -> None:
    from lockstep.unique import first_duplicates, judge

    files = keys.losers()
    judged = judge(files, keys.plan)
    found.duplicates, found.against_table = judged.losers, judged.against_table
    found.refused = judged.refused
    duplicates = first_duplicates(files, most_listed, Storage())
    known = recall_duplicates(places, duplicates)
    unique = keys.plan.terms.unique if keys.plan.terms else ()
    found.repeated = [
        {**duplicate_row(one, known, unique), "winner": vars(winner_of(one, known))} for one in duplicates
    ]


class _Keys:
    """The unique keys of all rows, on their way through the stages that an import has for them."""

    def __init__(self, plan: Plan, published: Published | None, config: Config) -> None:
        """`plan` is the import's, with nothing but the unique columns, and with a folder for its location."""
        self.plan, self._published, self._config = plan, published, config
        self._storage = Storage()
        self._names = [one["name"] for one in plan.schema["fields"]]
        self._job_id = new_id()
        self._staged: dict[str, list[StagedFile]] = {"map": []}

    def map(self, task: int, chunks: Iterator[Chunk]) -> None:
        """Sort the keys of a task, and keep them."""
        from lockstep.sink.run import RunSink

        sink = RunSink(self.plan, self._job_id, "map", task, 1, self._storage)
        for chunk in chunks:
            sink.add(chunk.batch.select(self._names), chunk.records)
            if sink.full:
                self._keep(sink.flush())
        self._keep(sink.flush())

    def losers(self) -> list[StagedFile]:
        """The rows that lose against another one, or against one of the table."""
        from lockstep.passes import newest_runs, next_stage

        stage = "map"
        while stage != "unique":
            following = next_stage(stage, newest_runs(self._staged), self.plan, lambda: self._published)
            stage = following.stage
            self._staged[stage] = [
                file
                for index, task in enumerate(following.tasks)
                for file in self._run(Lease(self._job_id, stage, index, 1, ""), task.descriptor)
            ]
        return self._staged[stage]

    def _keep(self, files: list[StagedFile]) -> None:
        """The sink of an import writes rows as well; here they would be keys once more."""
        for file in files:
            if file.kind == KEYS:
                self._staged["map"].append(file)
            else:
                self._storage.delete(file.path)

    def _run(self, lease: Lease, descriptor: Json) -> list[StagedFile]:
        from lockstep.pipeline import open_pipeline

        pipeline = open_pipeline(self.plan, lease, descriptor, "", self._config)
        staged: list[StagedFile] = []
        for chunk in pipeline.read(None):
            pipeline.add(chunk)
            if pipeline.sink.full:
                staged += pipeline.flush()
        return staged + pipeline.flush()


@contextmanager
def _keys(draft: Draft, request: ImportRequest, config: Config) -> Iterator[_Keys]:
    from lockstep.unique import published

    plan = plan_of(request, draft, config)
    assert plan.terms is not None
    there = None if draft.head.uuid == UNBORN else published(draft.head.handle, plan)
    reaching_the_table = replace(config, storage=options_of(plan, config))
    narrow = {
        **plan.schema,
        "fields": [one for one in plan.schema["fields"] if one["name"] in request.unique],
    }
    with tempfile.TemporaryDirectory(prefix="lockstep-dry-run-") as folder:
        alone = replace(plan, location=folder, schema=narrow, terms=replace(plan.terms, order=()))
        yield _Keys(alone, there, reaching_the_table)
