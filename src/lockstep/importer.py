"""Plan an import: validate everything, note what the inputs are, record the job.

Either the job is created, or nothing is: no job, no table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

from lockstep.config import Config
from lockstep.errors import Conflict, Invalid
from lockstep.job import (
    ColumnMap,
    Holding,
    ImportTerms,
    Job,
    Json,
    Kind,
    NewJob,
    Plan,
    SortKey,
    TaskSpec,
)
from lockstep.request import UNBORN, absolute_address, check_bounds, refuse_itself, scope_name, take_back
from lockstep.runtime import SYSTEM_CLOCK, Clock, failpoint, new_id
from lockstep.schema_file import check_schema, check_schema_names
from lockstep.secrets import expand, protect
from lockstep.source import Input, ParseOptions, Pin, SourceField, SourceTable, open_input
from lockstep.store import JobStore
from lockstep.target import Target, TargetTable, open_target

MODES: Final = ("auto", "direct", "merge")
ON_DUPLICATE: Final = ("error", "keep-first", "keep-last", "reject")
ON_EXISTING: Final = ("error", "skip", "append")
FORMATS: Final = ("csv", "json", "parquet", "avro")
_FORMAT_NAMES: Final = {
    "json": "JSON lines",
    "parquet": "Parquet files",
    "avro": "Avro files",
    "iceberg": "an Iceberg table",
}
_USES: Final = {
    "schema": "it is for text; these inputs have types of their own",
    "skip": "it is for text, CSV or JSON lines",
    "compression": "it is for text, CSV or JSON lines",
    "format": "it is for files",
}
TASK_BYTES: Final = 128_000_000
LEAST_TASK_BYTES: Final = 16_000_000
SHARES: Final = 4
STAGES: Final = ("map", "combine", "recombine", "unique", "merge")


@dataclass(frozen=True)
class ImportRequest:
    inputs: tuple[str, ...]
    target: str
    options: ParseOptions = field(default_factory=ParseOptions)
    mode: str = "auto"
    sort_by: tuple[str, ...] = ()
    unique: tuple[str, ...] = ()
    on_duplicate: str = "error"
    max_rejects: int = 0
    rejects: str | None = None
    create: bool = False
    on_existing: str = "error"
    file_size_bytes: int = 256_000_000
    deadline_s: float | None = None
    allow_lossy: bool = False
    ignore_extra: bool = False


@dataclass(frozen=True)
class SkippedInput:
    """An input that was left out, because a job has imported it, or is about to."""

    input: str
    reason: str
    job_id: str


class PlannedImport(NamedTuple):
    job: Job | None
    """None if there was nothing left to import."""
    created_table: bool
    skipped: Sequence[SkippedInput]


@dataclass(frozen=True)
class Draft:
    """An import that is checked and cut into tasks, but not recorded yet."""

    files: Input
    table: SourceTable
    head: TargetTable
    columns: Sequence[ColumnMap]
    terms: ImportTerms
    mode: str
    pin: Pin
    tasks: list[TaskSpec]
    beside: frozenset[str] = frozenset()
    skipped: Sequence[SkippedInput] = ()


def plan_import(
    request: ImportRequest, config: Config, store: JobStore, clock: Clock = SYSTEM_CLOCK
) -> PlannedImport:
    """Validate the request, note the identity of its inputs, and create its job.

    Raises: Invalid if anything does not fit; Conflict if one of the inputs was imported into this table
    before, and the request does not say what to do then.
    """
    with ExitStack() as undo:
        draft, target = draft_import(request, config, store, clock, undo)
        if draft.skipped and not draft.pin.parts:
            return PlannedImport(None, False, draft.skipped)
        created = draft.head.uuid == UNBORN
        head = draft.head
        if created:
            head = target.create(head.schema, head.spec, head.sort_order)
            undo.callback(take_back, store, target, head.uuid)
            _require_own_order(head, draft.head, request.target)
        elif _order_is_new(draft):
            head = target.order_by(head, draft.head.sort_order)
        if head is not draft.head:
            draft = replace(draft, head=head, columns=_columns(request, draft.table, head))
        job_id = new_id()
        plan = plan_of(request, draft, config)
        if problems := target.drift(head, plan):
            raise Invalid(f"cannot write to {request.target}: " + "; ".join(problems))
        pieces = tuple(part.piece for part in draft.pin.parts)
        holding = Holding(_scope(head), False, pieces)
        failpoint("plan.before_create")
        new = NewJob(job_id, new_id(), plan, holding, draft.tasks, draft.beside)
        try:
            job = store.create([new])[0]
        except Conflict:
            # Another request was faster: it is named as one that came earlier.
            _beside(request, store, head, draft.pin)
            raise
        undo.pop_all()
        return PlannedImport(job, created, draft.skipped)


def draft_import(
    request: ImportRequest, config: Config, store: JobStore, clock: Clock, undo: ExitStack
) -> tuple[Draft, Target]:
    """Everything of `plan_import` that leaves no trace; `--dry-run` stops here."""
    _check_request(request)
    target = open_target(expand(request.target, config), config, clock)
    existing = target.load() if target.exists() else None
    if existing is None and not request.create:
        raise Invalid(f"there is no table {request.target}", hint="pass --create to make it")
    files = _open(request, existing, config)
    undo.callback(files.close)
    _check_options(request.options, files.format)
    table = files.describe()
    if (schema := request.options.schema) is not None:
        names = [column.name for column in table.columns]
        check_schema_names(schema, names, files.format, header=request.options.header)
    if existing is None:
        _check_known(request, [column.name for column in table.columns])
        head = _new_head(table, request)
    else:
        head = _ordered(existing, request)
    columns = _columns(request, table, head)
    mode = _mode(request, head)
    terms = ImportTerms(
        order=_order_of(head) if mode == "merge" else (),
        unique=request.unique,
        on_duplicate=request.on_duplicate,
        max_rejects=request.max_rejects,
        rejects=_rejects_path(request, config),
    )
    _check_names(request.unique, "--unique", head.schema)
    pin = files.freeze()
    _refuse_own_inputs(terms.rejects, pin)
    refuse_itself(pin.detail.get("uuid"), head, request.target, request.on_existing, "imported")
    beside = frozenset[str]()
    skipped: list[SkippedInput] = []
    if existing is not None and request.on_existing == "skip":
        skipped = list(_there_already(store, head, pin))
        pin = files.without(pin, {one.input for one in skipped})
    elif existing is not None:
        beside = _beside(request, store, head, pin)
    tasks = _tasks(files, pin) if pin.parts or not skipped else []
    terms = replace(terms, rows_estimate=sum(task.rows for task in tasks))
    return Draft(files, table, head, columns, terms, mode, pin, tasks, beside, skipped), target


def _check_request(request: ImportRequest) -> None:
    for option, value, known in (
        ("--mode", request.mode, MODES),
        ("--on-duplicate", request.on_duplicate, ON_DUPLICATE),
        ("--on-existing", request.on_existing, ON_EXISTING),
        ("--format", request.options.format or FORMATS[0], FORMATS),
    ):
        if value not in known:
            raise Invalid(f"{option} takes {', '.join(known)}, not {value!r}")
    if request.options.schema is not None:
        check_schema(request.options.schema)
    if not request.inputs:
        raise Invalid("say what to import: files, folders, globs or an Iceberg table")
    for option, count in (
        ("--max-rejects", request.max_rejects),
        ("--skip", request.options.skip),
        ("--limit", request.options.limit or 0),
    ):
        if count < 0:
            raise Invalid(f"{option} cannot be negative")
    if request.mode == "direct" and (request.sort_by or request.unique):
        raise Invalid(
            "--mode direct writes rows as they come: it can neither sort nor check uniqueness",
            hint="leave --mode out, or leave --sort-by and --unique out",
        )
    check_bounds(request.file_size_bytes, request.deadline_s)
    if request.on_duplicate != "error" and not request.unique:
        raise Invalid(
            f"--on-duplicate {request.on_duplicate} has no effect without a key that is to be unique",
            hint="name its columns with --unique, or leave --on-duplicate out",
        )
    for option, names in (("--sort-by", request.sort_by), ("--unique", request.unique)):
        if len(set(names)) != len(names):
            raise Invalid(f"{option} names a column twice: {', '.join(names)}")


def _check_options(options: ParseOptions, format: str) -> None:
    """Raises: Invalid for an option that would change nothing about inputs of this format."""
    for option in options.without_effect(format):
        spelled = "--no-header" if option == "header" else f"--{option}"
        use = _USES.get(option, "it is for CSV")
        raise Invalid(f"{spelled} has no effect on {_FORMAT_NAMES[format]}", hint=f"leave it out: {use}")


def _open(request: ImportRequest, existing: TargetTable | None, config: Config) -> Input:
    """The inputs. Text has no types of its own: a table that exists says how it is to be read."""
    options = request.options
    if existing is not None and options.schema is None:
        options = replace(options, schema=existing.schema)
    addresses = [expand(_absolute(address), config) for address in request.inputs]
    return open_input(addresses, options, config)


def _absolute(address: str) -> str:
    """An address or a path that means the same from any working folder."""
    return absolute_address(address) if ":" in address else str(Path(address).expanduser().absolute())


def _new_head(table: SourceTable, request: ImportRequest) -> TargetTable:
    from lockstep.new_table import derive

    option, order = ("--sort-by", request.sort_by) if request.sort_by else ("--unique", request.unique)
    wanted = replace(table, sorting=[SourceField(name) for name in order] or table.sorting)
    schema, spec, sort_order = derive(wanted, allow_lossy=request.allow_lossy)
    if len(sort_order["fields"]) < len(order):
        name = order[len(sort_order["fields"])]
        raise Invalid(f'{option} names "{name}", which is not a plain value')
    return TargetTable(UNBORN, "", schema, spec, sort_order, {}, None)


def _ordered(head: TargetTable, request: ImportRequest) -> TargetTable:
    """The table with the order that is asked for.

    Raises: Invalid if it has another one already: its files would not be comparable any more.
    """
    names = request.sort_by or (() if head.sort_order["fields"] else request.unique)
    if not names:
        return head
    _check_names(names, "--sort-by", head.schema)
    ids = {field["name"]: field["id"] for field in head.schema["fields"]}
    fields = [
        {"source-id": ids[name], "transform": "identity", "direction": "asc", "null-order": "nulls-first"}
        for name in names
    ]
    present = head.sort_order["fields"]
    if present == fields:
        return head
    if present:
        from lockstep.partitioning import order_names

        by = ", ".join(order_names(head.sort_order, head.schema))
        raise Invalid(
            f"{request.target} is sorted by {by} already",
            hint="leave --sort-by out, or change the table's sort order first",
        )
    return replace(head, sort_order={"order-id": 0, "fields": fields})


def _require_own_order(made: TargetTable, wanted: TargetTable, target: str) -> None:
    """Raises: Invalid if another request has made the table meanwhile, with rows in another order."""
    if _order_of(made) != _order_of(wanted):
        raise Invalid(
            f"{target} was made by another request meanwhile, with another sort order",
            hint="ask for the import again: it will be checked against the table as it is",
        )


def _order_is_new(draft: Draft) -> bool:
    return bool(draft.head.sort_order["fields"]) and draft.head.sort_order["order-id"] == 0


def _check_known(request: ImportRequest, known: Sequence[str]) -> None:
    """Raises: Invalid for a name that no column has."""
    for option, names in (("--sort-by", request.sort_by), ("--unique", request.unique)):
        for name in names:
            if name not in known:
                raise Invalid(
                    f'{option} names "{name}", and there is no such column',
                    hint=f"there are {', '.join(known)}",
                )


def _check_names(names: Sequence[str], option: str, schema: Json) -> None:
    kinds = {field["name"]: field["type"] for field in schema["fields"]}
    for name in names:
        if name not in kinds:
            raise Invalid(
                f'{option} names "{name}", and there is no such column',
                hint=f"there are {', '.join(kinds)}",
            )
        if not isinstance(kinds[name], str):
            raise Invalid(f'{option} names "{name}", which is not a plain value')


def _columns(request: ImportRequest, table: SourceTable, head: TargetTable) -> list[ColumnMap]:
    from lockstep.schema import match_columns

    by_position = not request.options.header and request.options.schema is None
    return match_columns(
        table,
        head.schema,
        by="position" if by_position else "name",
        allow_lossy=request.allow_lossy,
        ignore_extra=request.ignore_extra,
        verb="import",
    )


def _mode(request: ImportRequest, head: TargetTable) -> str:
    from lockstep.keys import refuse_hidden_names

    if request.mode != "auto":
        if request.mode == "merge" and not head.sort_order["fields"]:
            raise Invalid("--mode merge needs an order", hint="pass --sort-by, or import with --mode direct")
        mode = request.mode
    else:
        mode = "merge" if head.sort_order["fields"] else "direct"
    if mode == "merge":
        direct = "" if request.sort_by or request.unique else ", or import with --mode direct"
        refuse_hidden_names(head.schema, f"rename the column{direct}")
    return mode


def _order_of(head: TargetTable) -> tuple[SortKey, ...]:
    """By partition first, so that each merge task writes few partitions; then as the table is sorted."""
    by_partition = [
        SortKey(_name_of(head.schema, field["source-id"]), field["transform"])
        for field in head.spec["fields"]
        if field["transform"] != "void"
    ]
    by_order = [
        SortKey(
            _name_of(head.schema, field["source-id"]),
            field["transform"],
            field["direction"] == "desc",
            field["null-order"] == "nulls-first",
        )
        for field in head.sort_order["fields"]
    ]
    return tuple(dict.fromkeys(by_partition + by_order))


def _name_of(schema: Json, field_id: int) -> str:
    """Raises: Invalid for a field inside another one: rows are not ordered by those."""
    for column in schema["fields"]:
        if column["id"] == field_id:
            return str(column["name"])
    raise Invalid(
        "the table is partitioned or sorted by a field inside a nested column",
        hint="import into a table without that, or with --mode direct",
    )


def _rejects_path(request: ImportRequest, config: Config) -> str | None:
    if request.rejects is None:
        return None
    path = request.rejects if "://" in request.rejects else str(Path(request.rejects).expanduser().absolute())
    if not path.endswith((".csv", ".parquet")):
        raise Invalid(f"--rejects {request.rejects} must end in .csv or .parquet")
    from lockstep.storage import Storage

    if Storage(config.storage).size(path) is not None:
        raise Invalid(f"--rejects {request.rejects} exists already", hint="name a file that is not there")
    return path


def _refuse_own_inputs(rejects: str | None, pin: Pin) -> None:
    if rejects in {part.name.removeprefix("file://") for part in pin.parts}:
        raise Invalid(f"--rejects {rejects} is one of the inputs")


def _scope(head: TargetTable) -> str:
    return f"import|{head.uuid}"


def _there_already(store: JobStore, head: TargetTable, pin: Pin) -> Iterator[SkippedInput]:
    """The inputs that a job has imported into this table, or is about to."""
    held = {piece.name: job for job in store.holders(_scope(head)) for piece in job.holding.pieces}
    for part in pin.parts:
        if (job := held.get(part.piece.name)) is not None:
            yield SkippedInput(part.name, f"job {job.job_id} is {job.state}", job.job_id)


def _beside(request: ImportRequest, store: JobStore, head: TargetTable, pin: Pin) -> frozenset[str]:
    """The earlier jobs that `--on-existing append` accepts. Raises: Conflict unless it was said."""
    wanted = Holding(_scope(head), False, tuple(part.piece for part in pin.parts))
    names = {part.piece.name: part.name for part in pin.parts}
    beside = set()
    for job in store.holders(_scope(head)):
        shared = wanted.overlap(job.holding)
        if shared is None:
            continue
        if request.on_existing == "error" or job.state.live:
            raise Conflict(
                f"{names[shared.name]} is {'being' if job.state.live else 'already'} imported into "
                f"{request.target} by job {job.job_id} ({job.state})",
                job_id=job.job_id,
                hint="pass --on-existing skip to leave it out"
                + ("" if job.state.live else ", or append to have its rows twice"),
            )
        beside.add(job.job_id)
    return frozenset(beside)


def _tasks(files: Input, pin: Pin) -> list[TaskSpec]:
    """Tasks of a size that a crash may cost, smaller ones where there would be too few to share."""
    total = sum(part.size_bytes for part in pin.parts)
    share = max(LEAST_TASK_BYTES, -(-total // SHARES))
    return files.plan_tasks(pin, min(TASK_BYTES, share))


def plan_of(request: ImportRequest, draft: Draft, config: Config) -> Plan:
    head = draft.head
    stages: tuple[str, ...] = ("write",)
    if draft.mode == "merge":
        stages = tuple(stage for stage in STAGES if stage != "unique" or request.unique)
    source = ", ".join(map(_absolute, request.inputs))
    return Plan(
        kind=Kind.IMPORT,
        source=protect(source, config),
        target=protect(request.target, config),
        target_uuid=head.uuid,
        location=head.location,
        schema=head.schema,
        spec=head.spec,
        sort_order=head.sort_order,
        columns=tuple(draft.columns),
        pin=draft.pin.detail,
        stages=stages,
        file_size_bytes=request.file_size_bytes,
        deadline_s=request.deadline_s,
        on_existing=request.on_existing,
        scope=scope_name(_scope(head)),
        limits=config.limits,
        properties=head.properties,
        terms=draft.terms,
    )
