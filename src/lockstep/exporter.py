"""Plan an export: validate everything, freeze the source, record the jobs.

Either every job of the request is created, or nothing is: no job, no table, no pin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from lockstep.commit import kill
from lockstep.config import Config
from lockstep.errors import Conflict, Invalid, LockstepError, Retryable
from lockstep.existing import Decision, Selection, Skipped, decide
from lockstep.job import (
    ColumnMap,
    Holding,
    Job,
    Kind,
    NewJob,
    Plan,
    State,
    TaskSpec,
)
from lockstep.request import UNBORN, absolute_address, check_bounds, refuse_itself, scope_name, take_back
from lockstep.runtime import SYSTEM_CLOCK, Clock, backoff_s, failpoint, new_id
from lockstep.secrets import expand, protect
from lockstep.source import PIN_PREFIX, PartitionInfo, Pin, Source, SourceTable, open_source
from lockstep.store import JobStore
from lockstep.target import Target, TargetTable, open_target

if TYPE_CHECKING:
    import pyarrow as pa

ON_EXISTING: Final = ("error", "skip", "append", "replace")
MATCH: Final = ("name", "position")
BYTES_PER_FILE_BYTE: Final = 4
"""About how many bytes of rows make one byte of Parquet."""
SHARES: Final = 4
LEAST_TASK_BYTES: Final = 96_000_000
UNPIN_TIMEOUT_S: Final = 10.0
FENCE_PATIENCE_S: Final = 120.0
RECORD_PATIENCE_S: Final = 30.0
REMEMBERED: Final = 1000
"""Among so many of the newest jobs one is looked for that knows a table whose catalog is away."""


@dataclass(frozen=True)
class ExportRequest:
    source: str
    target: str
    partitions: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    everything: bool = False
    create: bool = False
    on_existing: str = "error"
    match: str = "name"
    allow_lossy: bool = False
    ignore_extra: bool = False
    file_size_bytes: int = 256_000_000
    deadline_s: float | None = None
    pin: bool = True


@dataclass(frozen=True)
class PlanPreview:
    """What a job would do, for `--dry-run`."""

    partition: str
    rows: int
    size_bytes: int
    parts: int
    tasks: int
    columns: Sequence[ColumnMap]


@dataclass(frozen=True)
class Planned:
    jobs: list[Job]
    skipped: list[Skipped] = field(default_factory=list)
    previews: list[PlanPreview] = field(default_factory=list)
    created_table: bool = False
    remarks: Sequence[str] = ()
    """What the person should know although it did not stop the request."""


@dataclass(frozen=True)
class Draft:
    """A job that is pinned and cut into tasks, but not recorded yet."""

    job_id: str
    selection: Selection
    decision: Decision
    pin: Pin
    partition_values: tuple[Any, ...]
    tasks: list[TaskSpec]


def plan_export(
    request: ExportRequest,
    config: Config,
    store: JobStore,
    clock: Clock = SYSTEM_CLOCK,
    dry_run: bool = False,
) -> Planned:
    """Validate the request, pin what it names, and create one job per partition or part.

    Raises: Invalid if anything does not fit; Conflict if an earlier job holds the same rows.
    """
    _check_request(request)
    source_address = absolute_address(request.source)
    with ExitStack() as undo:
        source = open_source(expand(source_address, config), config)
        undo.callback(source.close)
        target = open_target(expand(request.target, config), config, clock)
        table = source.describe()
        selections = _select(source.partitions(), request, table)
        planner = _Planner(request, config, store, clock, source, target, table, source_address, dry_run)
        return planner.plan(selections)


def release_pin(store: JobStore, job: Job, config: Config) -> None:
    """Give the frozen copy of an ended job up: best effort, bounded. What fails is tried again later."""
    failpoint("unpin.before")
    try:
        source = open_source(expand(job.plan.source, config), config)
        try:
            source.unpin(job.plan.pin, UNPIN_TIMEOUT_S)
        finally:
            source.close()
    except LockstepError:
        return
    store.released(job.job_id)


def _check_request(request: ExportRequest) -> None:
    chosen = sum(map(bool, (request.partitions, request.parts, request.everything)))
    if chosen != 1:
        raise Invalid(
            "say what to export: --partition ID, --part NAME or --all"
            if chosen == 0
            else "--partition, --part and --all exclude each other",
            hint="`lockstep partitions SOURCE --parts` lists what there is",
        )
    if request.on_existing not in ON_EXISTING:
        raise Invalid(f"--on-existing takes {', '.join(ON_EXISTING)}, not {request.on_existing!r}")
    if request.match not in MATCH:
        raise Invalid(f"--match takes {', '.join(MATCH)}, not {request.match!r}")
    check_bounds(request.file_size_bytes, request.deadline_s)


def _select(infos: Sequence[PartitionInfo], request: ExportRequest, table: SourceTable) -> list[Selection]:
    known = {info.partition_id: info for info in infos}
    if request.everything:
        return [_whole(info) for info in infos]
    if request.partitions:
        return [_whole(_named(known, name, table)) for name in dict.fromkeys(request.partitions)]
    by_part: dict[str, list[Selection]] = {}
    for info in infos:
        for part in info.parts:
            for name in (part.name, f"{info.partition_id}/{part.name}"):
                by_part.setdefault(name, []).append(Selection(info, False, (part.piece,)))
    chosen = [_part(by_part.get(name, []), name, table) for name in request.parts]
    return list({(one.partition.partition_id, one.pieces): one for one in chosen}.values())


def _part(found: Sequence[Selection], name: str, table: SourceTable) -> Selection:
    if not found:
        raise Invalid(
            f"{table.name} has no active part {name}",
            hint="`lockstep partitions SOURCE --parts` lists those of now; merges and rewrites rename them",
        )
    if len(found) > 1:
        partitions = ", ".join(one.partition.partition_id for one in found[:8])
        raise Invalid(
            f"{table.name} has a part {name} in several partitions: {partitions}" + ", …" * (len(found) > 8),
            hint=f"say in which: --part {found[0].partition.partition_id}/{name}",
        )
    return found[0]


def _whole(info: PartitionInfo) -> Selection:
    return Selection(info, True, tuple(part.piece for part in info.parts))


def _named(known: dict[str, PartitionInfo], name: str, table: SourceTable) -> PartitionInfo:
    if name in known:
        return known[name]
    by_label = [info for info in known.values() if info.label == name]
    if len(by_label) == 1:
        return by_label[0]
    some = ", ".join(list(known)[:8]) + (", …" if len(known) > 8 else "")
    raise Invalid(
        f"{table.name} has no partition {name!r}",
        hint=f"it has {some}" if known else "it has no partitions: the table is empty",
    )


@dataclass
class _Planner:
    """One request on its way from validation to jobs."""

    request: ExportRequest
    config: Config
    store: JobStore
    clock: Clock
    source: Source
    target: Target
    table: SourceTable
    source_address: str
    dry_run: bool
    remarks: list[str] = field(default_factory=list)

    def plan(self, selections: Sequence[Selection]) -> Planned:
        head = self._head()
        source = self.table.identity.removeprefix("iceberg:")
        refuse_itself(source, head, self.request.target, self.request.on_existing, "exported")
        columns = self._columns(head)
        skipped: list[Skipped] = []
        with ExitStack() as undo:
            drafts: list[Draft] = []
            for wanted in selections:
                decision = self._decide(wanted, head)
                if decision.selection is None:
                    if decision.skipped:
                        skipped.append(decision.skipped)
                    continue
                drafts.append(self._draft(decision.selection, decision, head, columns, undo))
            if self.dry_run:
                previews = [_preview(draft, columns) for draft in drafts]
                return Planned([], skipped, previews, remarks=self.remarks)
            created = head.uuid == UNBORN
            if created:
                head = self.target.create(head.schema, head.spec, head.sort_order)
                undo.callback(take_back, self.store, self.target, head.uuid)
                columns = self._columns(head)
            # Earlier jobs are ended last: a request that is refused has not touched them.
            drafts = [replace(draft, decision=self._fenced(draft.decision)) for draft in drafts]
            jobs = self._create(drafts, head, columns, undo)
            undo.pop_all()
            return Planned(jobs, skipped, created_table=created, remarks=self.remarks)

    def _head(self) -> TargetTable:
        """The target as it is, or as `--create` would make it, or, if its catalog is away, as it was last."""
        try:
            if self.target.exists():
                return self.target.load()
        except Retryable as error:
            return self._as_last_known(error)
        if not self.request.create:
            raise Invalid(f"there is no table {self.request.target}", hint="pass --create to make it")
        from lockstep.new_table import derive

        schema, spec, sort_order = derive(self.table, allow_lossy=self.request.allow_lossy)
        return TargetTable(UNBORN, "", schema, spec, sort_order, {}, None)

    def _as_last_known(self, error: Retryable) -> TargetTable:
        """The table as the newest job into it knew it: more than a catalog that is away can say.

        A table that has changed since is noticed before anything is published: the commit compares.
        Raises: `error` if no job knows the table, or if more than its shape is needed.
        """
        address = protect(self.request.target, self.config)
        known = next((job for job in self.store.list(limit=REMEMBERED) if job.plan.target == address), None)
        if known is None or self.request.on_existing == "replace":
            raise error
        self.remarks.append(
            f"{error.message}; the table is taken to be as job {known.job_id} found it; the commit checks"
        )
        plan = known.plan
        return TargetTable(
            plan.target_uuid,
            plan.location,
            plan.schema,
            plan.spec,
            plan.sort_order,
            {name: str(value) for name, value in plan.properties.items()},
            None,
        )

    def _columns(self, head: TargetTable) -> list[ColumnMap]:
        from lockstep.schema import match_columns

        return match_columns(
            self.table,
            head.schema,
            by="position" if self.request.match == "position" else "name",
            allow_lossy=self.request.allow_lossy,
            ignore_extra=self.request.ignore_extra,
        )

    def _scope(self, head: TargetTable, partition_id: str) -> str:
        return f"{self.table.identity}|{head.uuid}|{partition_id}"

    def _decide(self, wanted: Selection, head: TargetTable) -> Decision:
        if head.uuid == UNBORN:
            return Decision(wanted)
        scope = self._scope(head, wanted.partition.partition_id)
        holders = self.store.holders(scope)
        decision = decide(wanted, scope, holders, self.request.on_existing)
        if self.request.on_existing != "replace":
            return decision
        known = {job.commit_id for job in holders}
        forgotten = [c for c in self.target.published_from(head, scope_name(scope)) if c not in known]
        if forgotten and not wanted.whole:
            raise Invalid(
                f"rows of partition {wanted.partition.partition_id} were published by jobs that the store "
                "has forgotten, and it cannot be told which of them are in this part",
                hint=f"replace all: --partition {wanted.partition.partition_id}",
            )
        return replace(decision, forgotten=tuple(forgotten))

    def _fenced(self, decision: Decision) -> Decision:
        """End the earlier jobs that a `replace` takes the place of, and note what they have published."""
        ended = [self._fence(job_id) for job_id in decision.replaces]
        published = [job for job in ended if job.state is State.COMPLETED]
        if not decision.replaces and not decision.forgotten:
            return decision
        return replace(
            decision,
            beside=frozenset(job.job_id for job in published),
            replaces=(*(job.commit_id for job in published), *decision.forgotten),
        )

    def _fence(self, job_id: str) -> Job:
        """End an earlier job, one way or the other, so that `replace` knows what it replaces."""
        job = kill(self.store, job_id, self.config, self.clock, FENCE_PATIENCE_S)
        if job.state.live:
            raise Conflict(
                f"job {job_id} is committing, and its outcome cannot be read",
                job_id=job_id,
                hint="try again when the catalog answers",
            )
        return job

    def _draft(
        self,
        wanted: Selection,
        decision: Decision,
        head: TargetTable,
        columns: Sequence[ColumnMap],
        undo: ExitStack,
    ) -> Draft:
        job_id = new_id()
        parts = None if wanted.whole else [piece.name for piece in wanted.pieces]
        frozen = self.request.pin and not self.dry_run
        pin = self.source.pin(f"{PIN_PREFIX}{job_id}", wanted.partition.partition_id, parts, frozen=frozen)
        if frozen:
            undo.callback(self.source.unpin, pin.detail, UNPIN_TIMEOUT_S)
        pinned = replace(wanted, pieces=tuple(part.piece for part in pin.parts))
        values = self._partition_values(pinned, pin, head, columns)
        tasks = self._tasks(pin)
        return Draft(job_id, pinned, decision, pin, values, tasks)

    def _tasks(self, pin: Pin) -> list[TaskSpec]:
        """Tasks that fill a file each, or smaller ones so that a small partition is shared too."""
        most_bytes = self.request.file_size_bytes * BYTES_PER_FILE_BYTE
        filling = self.source.plan_tasks(pin, most_bytes)
        share_bytes = max(LEAST_TASK_BYTES, -(-sum(task.size_bytes for task in filling) // SHARES))
        return filling if share_bytes >= most_bytes else self.source.plan_tasks(pin, share_bytes)

    def _partition_values(
        self, wanted: Selection, pin: Pin, head: TargetTable, columns: Sequence[ColumnMap]
    ) -> tuple[Any, ...]:
        """The target partition that all rows of the pin fall into.

        Raises: Invalid if they fall into several.
        """
        from lockstep.partitioning import monotonic, single_partition

        fields = {int(one["source-id"]) for one in head.spec["fields"]}
        if not fields or pin.rows == 0:
            return ()
        used = [column for column in columns if column.field_id in fields]
        batches: Iterable[pa.RecordBatch]
        if monotonic(head.spec, head.schema):
            batches = self.source.bounds(pin, used).to_batches()
        else:
            batches = self.source.distinct_rows(pin, used)
        try:
            found = single_partition(batches, head.spec, head.schema)
        except Invalid as error:
            raise Invalid(
                f"partition {wanted.label} of {self.table.name} spans several partitions of "
                f"{self.request.target}: {error.message}",
                hint=f"the source is partitioned by {self.table.partition_key or 'nothing'}; export into a "
                "table with a partition spec that each source partition fits into, or with none",
            ) from error
        return () if found is None else tuple(found)

    def _create(
        self,
        drafts: Sequence[Draft],
        head: TargetTable,
        columns: Sequence[ColumnMap],
        undo: ExitStack,
    ) -> list[Job]:
        if not drafts:
            return []
        request_id = new_id()
        new_jobs = [
            NewJob(
                draft.job_id,
                request_id,
                self._plan_of(draft, head, columns),
                Holding(
                    self._scope(head, draft.selection.partition.partition_id),
                    draft.selection.whole,
                    draft.selection.pieces,
                ),
                draft.tasks,
                draft.decision.beside,
            )
            for draft in drafts
        ]
        if not head.location.startswith("/") and "://" not in head.location:
            raise Invalid(
                f"{self.request.target} lies at {head.location!r}, which means another place in each folder",
                hint="give the catalog a whole path as its warehouse, and make the table anew",
            )
        if head.handle is not None and (problems := self.target.drift(head, new_jobs[0].plan)):
            raise Invalid(f"cannot write to {self.request.target}: " + "; ".join(problems))
        failpoint("plan.before_create")
        return self._record(new_jobs, undo)

    def _record(self, new_jobs: Sequence[NewJob], undo: ExitStack) -> list[Job]:
        """Send the jobs to the store, and again while it is away: a lost reply looks the same.

        Raises: Retryable if it stays away. The jobs may be there then, so what they need is not undone.
        """
        deadline = self.clock.now() + RECORD_PATIENCE_S
        attempt = 0
        while True:
            try:
                return self.store.create(new_jobs)
            except Retryable as error:
                attempt += 1
                if self.clock.now() > deadline:
                    undo.pop_all()
                    raise Retryable(
                        f"the store does not answer, and may or may not have taken the request: "
                        f"{error.message}",
                        hint="`lockstep jobs` tells; if nothing is there, ask again, and `lockstep sweep` "
                        "gives up what was frozen for it",
                    ) from error
                self.clock.sleep(backoff_s(attempt, first_s=0.2, most_s=5.0))

    def _plan_of(self, draft: Draft, head: TargetTable, columns: Sequence[ColumnMap]) -> Plan:
        return Plan(
            kind=Kind.EXPORT,
            source=protect(self.source_address, self.config),
            target=protect(self.request.target, self.config),
            target_uuid=head.uuid,
            location=head.location,
            schema=head.schema,
            spec=head.spec,
            sort_order=head.sort_order,
            columns=tuple(columns),
            pin=draft.pin.detail,
            partition=draft.selection.label,
            partition_values=draft.partition_values,
            rows=draft.pin.rows,
            file_size_bytes=self.request.file_size_bytes,
            deadline_s=self.request.deadline_s,
            on_existing=self.request.on_existing,
            replaces=draft.decision.replaces,
            scope=scope_name(self._scope(head, draft.selection.partition.partition_id)),
            limits=self.config.limits,
            properties=head.properties,
        )


def _preview(draft: Draft, columns: Sequence[ColumnMap]) -> PlanPreview:
    size_bytes = sum(part.size_bytes for part in draft.pin.parts)
    return PlanPreview(
        draft.selection.label, draft.pin.rows, size_bytes, len(draft.pin.parts), len(draft.tasks), columns
    )
