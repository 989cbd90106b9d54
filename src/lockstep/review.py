"""What a finished stage of an import means: too many rejects, duplicates, rows that do not add up.

The answer depends on the manifests alone, so every worker, and every attempt after a crash, gives the same.
"""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lockstep.config import Config
from lockstep.errors import Corrupt, ErrorInfo, Invalid
from lockstep.job import (
    DATA,
    DROPPED,
    LOSERS,
    REJECTS,
    RUN,
    Fingerprint,
    ImportTerms,
    Job,
    Json,
    Kind,
    StagedFile,
    State,
)
from lockstep.partitioning import order_fields
from lockstep.places import COLUMNS, Places, duplicate_row, recall_duplicates, reject_row, winner_of
from lockstep.secrets import expand
from lockstep.source import Place, open_frozen
from lockstep.store import JobStore
from lockstep.target import TargetTable
from lockstep.transforms import MONOTONIC, Transform

if TYPE_CHECKING:
    from lockstep.storage import Storage
    from lockstep.unique import Duplicate

Extent = tuple[Any, Any]
SURE: Final = 15
"""Letters of a text's bound that shortening it has left alone."""
NAMED: Final = 3
"""Problems that an error message names; the rejects file has them all."""
LISTED: Final = 1000
"""Duplicates that the rejects file of a job lists that has too many of them, if it allows fewer."""


@dataclass(frozen=True)
class Tally:
    """The rows of an import, as its manifests count them."""

    read: int = 0
    rejected: int = 0
    duplicates: int = 0
    written: int = 0
    files: int = 0


def tally(job: Job, store: JobStore) -> Tally:
    stages = job.plan.stages
    first = list(store.manifest(job.job_id, stages[0]))
    rejected = _rows(first, REJECTS)
    losers = _rows(store.manifest(job.job_id, "unique"), LOSERS) if "unique" in stages else 0
    data = [file for file in store.manifest(job.job_id, stages[-1]) if file.kind == DATA]
    read = rejected + _rows(first, RUN if len(stages) > 1 else DATA)
    assert job.plan.terms is not None
    as_rejects = job.plan.terms.on_duplicate == "reject"
    return Tally(
        read,
        rejected + (losers if as_rejects else 0),
        losers,
        sum(file.rows for file in data),
        len(data),
    )


def summary(job: Job, store: JobStore, config: Config) -> Json | None:
    """What a completed import has done with its rows; None for any other job.

    `duplicates` is None where no key was checked: nobody knows whether there are any.
    Raises: Retryable if the storage does not answer.
    """
    if job.kind is not Kind.IMPORT or job.state is not State.COMPLETED:
        return None
    assert job.plan.terms is not None
    counted = tally(job, store)
    return {
        "rows_read": counted.read,
        "rows_written": counted.written,
        "rows_rejected": counted.rejected,
        "duplicates": counted.duplicates if job.plan.terms.unique else None,
        "data_files": counted.files,
        "rejects_file": rejects_file(job, config) if counted.rejected else None,
    }


def review(job: Job, store: JobStore, config: Config, head: TargetTable | None = None) -> ErrorInfo | None:
    """Why the job cannot go on after its stage, or None. Writes the rejects file when it is complete.

    `head` is the table that the job is about to be published on, after its last stage. An input that is gone
    or was changed is a reason where rejects have to be listed from it: what is neither in the table nor in
    the rejects file would be lost.
    Raises: Retryable if the inputs or the storage do not answer.
    """
    assert job.plan.terms is not None
    first, last = job.plan.stages[0], job.plan.stages[-1]
    problem: ErrorInfo | None = None
    if job.stage == first:
        problem = _too_many_rejects(job, store, config)
    elif job.stage == "unique":
        problem = _duplicates(job, store, config) or _too_many_rejects(job, store, config)
    if problem is None and job.stage == last and first != last:
        problem = _does_not_add_up(job, store)
    if problem is None and head is not None and "unique" in job.plan.stages:
        problem = _came_meanwhile(job, head, store, config)
    return problem


def sortedness(job: Job, store: JobStore) -> float | None:
    """The share of data files that begin where the one before them in their partition ends, or later.

    By the first column of the table's order that varies within a partition, as the files' own bounds say.
    None without an order, and where bounds do not tell: a bucket of the least value is not the least bucket.
    """
    plan = job.plan
    if plan.terms is None or not plan.terms.order or not plan.sort_order["fields"]:
        return None
    fixed = {(one.get("source-id"), one["transform"]) for one in plan.spec["fields"]}
    columns = order_fields(plan.sort_order, plan.schema)
    varying = (
        (raw, column.transform)
        for raw, column in zip(plan.sort_order["fields"], columns, strict=True)
        if (raw["source-id"], raw["transform"]) not in fixed
    )
    leading, transform = next(varying, (None, None))
    if leading is None or transform is None:
        return 1.0
    extent_of = _extents(leading, transform)
    pairs = told = in_row = 0
    before: dict[tuple[Any, ...], Extent | None] = {}
    for file in store.manifest(job.job_id, plan.stages[-1]):
        if file.kind != DATA:
            continue
        partition, extent = tuple(file.partition), extent_of(file)
        if partition in before:
            pairs += 1
            earlier = before[partition]
            if earlier is not None and extent is not None:
                told += 1
                backwards = leading["direction"] == "desc"
                in_row += extent[1] <= earlier[0] if backwards else earlier[1] <= extent[0]
        before[partition] = extent
    if not pairs:
        return 1.0
    return in_row / told if told else None


def _extents(raw: Json, transform: Transform) -> Callable[[StagedFile], Extent | None]:
    """Tells the least and the greatest value of a file; of texts what their shortened bounds are sure of."""
    from pydantic import TypeAdapter
    from pyiceberg.conversions import from_bytes
    from pyiceberg.transforms import parse_transform
    from pyiceberg.types import IcebergType, PrimitiveType

    if transform.name not in MONOTONIC:
        return lambda file: None
    field_id = str(raw["source-id"])
    parsed: Any = TypeAdapter(IcebergType).validate_python(transform.source_type)
    assert isinstance(parsed, PrimitiveType)
    change = parse_transform(raw["transform"]).transform(parsed)

    def extent_of(file: StagedFile) -> Extent | None:
        bounds = [file.stats.get(name, {}).get(field_id) for name in ("lower_bounds", "upper_bounds")]
        if None in bounds:
            return None
        low: Any
        high: Any
        low, high = (change(from_bytes(parsed, base64.b64decode(bound))) for bound in bounds)
        return (low[:SURE], high[:SURE]) if isinstance(low, str | bytes) else (low, high)

    return extent_of


# Rejects


def _too_many_rejects(job: Job, store: JobStore, config: Config) -> ErrorInfo | None:
    terms = job.plan.terms
    assert terms is not None
    staged = [f for f in store.manifest(job.job_id, job.plan.stages[0]) if f.kind == REJECTS]
    lost = _losing_files(job, store, terms)
    total = sum(file.rows for file in [*staged, *lost])
    if total == 0:
        return None
    awaits_duplicates = "unique" in job.plan.stages and terms.on_duplicate == "reject"
    complete = job.stage == "unique" or not awaits_duplicates
    fits = total <= terms.max_rejects
    if fits and not complete:
        return None
    try:
        with _places(job, store, config) as places:
            most = total if fits else max(terms.max_rejects, LISTED)
            rows = _rejected(staged, lost, most, places, _storage(job, config), terms)
    except (Corrupt, Invalid) as error:
        if not fits:
            return _over_limit(total, terms, _untold(error), "nothing was published")
        what = f"the rejected records cannot be listed: {error.message}"
        return replace(ErrorInfo.of(error), message=what)
    path = _write_rejects(job, rows, config)
    if fits:
        return None
    some = "; ".join(_told(row) for row in rows[:NAMED]) + ("; …" if total > NAMED else "")
    listed = "all of them are" if len(rows) == total else f"{len(rows)} of them are"
    return _over_limit(total, terms, some, f"nothing was published; {listed} in {path}")


def _over_limit(total: int, terms: ImportTerms, which: str, hint: str) -> ErrorInfo:
    were = "record was" if total == 1 else "records were"
    return ErrorInfo(
        "Invalid", f"{total} {were} rejected, and --max-rejects allows {terms.max_rejects}: {which}", hint
    )


def _untold(error: Corrupt | Invalid) -> str:
    """Instead of places, in a message about a job that fails for another reason."""
    return f"where cannot be told, because {error.message}"


def _losing_files(job: Job, store: JobStore, terms: ImportTerms) -> list[StagedFile]:
    if job.stage != "unique" or terms.on_duplicate != "reject":
        return []
    return [file for file in store.manifest(job.job_id, "unique") if file.kind == LOSERS]


def _rejected(
    staged: Iterable[StagedFile],
    lost: Sequence[StagedFile],
    most_lost: int,
    places: Places,
    storage: Storage,
    terms: ImportTerms,
) -> list[Json]:
    """The rejects as people see them, in the order of the input. Of those that lost at most `most_lost`."""
    from lockstep.unique import first_duplicates

    misfits = {(_task_of(file), row["record"]): row for file in staged for row in _rows_in(file, storage)}
    duplicates = first_duplicates(lost, most_lost, storage)
    known = recall_duplicates(places, duplicates, {at: not row["raw"] for at, row in misfits.items()})
    rows = {
        at: reject_row(known[at].place, row["column"], row["reason"], row["raw"] or known[at].raw)
        for at, row in misfits.items()
    }
    rows |= {(one.task, one.record): duplicate_row(one, known, terms.unique) for one in duplicates}
    return [rows[at] for at in sorted(rows)]


def _told(row: Json) -> str:
    column = f', column "{row["column"]}"' if row["column"] else ""
    return f"{Place(row['input'], row['line'])}{column}: {row['reason']}"


def _write_rejects(job: Job, rows: list[Json], config: Config) -> str:
    """Write the rejects file once; whoever comes again finds the same rows there."""
    from lockstep.storage import Storage

    path, otherwise = _rejects_paths(job, config)
    if "://" not in path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    storage = Storage(config.storage)
    content = _as_parquet(rows) if path.endswith(".parquet") else _as_csv(rows)
    if storage.put_if_absent(path, content) or storage.read(path) == content:
        return path
    # Somebody else's file has this name by now: it stays as it is.
    storage.put_if_absent(otherwise, content)
    return otherwise


def rejects_file(job: Job, config: Config) -> str:
    """Where the rejects of a completed job are listed. Raises: Retryable if the storage does not answer."""
    from lockstep.storage import Storage

    path, otherwise = _rejects_paths(job, config)
    return path if Storage(config.storage).size(otherwise) is None else otherwise


def _rejects_paths(job: Job, config: Config) -> tuple[str, str]:
    """Where the rejects go, and where if that name is taken."""
    assert job.plan.terms is not None
    path = job.plan.terms.rejects or str(config.state_folder / f"rejects-{job.job_id}.csv")
    stem, dot, ending = path.rpartition(".")
    return path, f"{stem}-{job.job_id}-{job.generation}{dot}{ending}"


def _as_csv(rows: list[Json]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode("utf-8", "backslashreplace")


def _as_parquet(rows: list[Json]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {"line": pa.int64()}
    schema = pa.schema([pa.field(name, kinds.get(name, pa.string())) for name in COLUMNS])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink)
    return bytes(sink.getvalue())


# Duplicates


def _duplicates(job: Job, store: JobStore, config: Config) -> ErrorInfo | None:
    """Rows that repeat a key in a job that does not allow it: the first of the input is named."""
    from lockstep.unique import judge, ways_out

    terms = job.plan.terms
    assert terms is not None
    found = judge(list(store.manifest(job.job_id, "unique")), job.plan)
    if not found.refused or found.first is None:
        return None
    first = found.first
    with _places(job, store, config) as places:
        both = _both(first, places)
    key = ", ".join(terms.unique)
    count = "1 row repeats" if found.losers == 1 else f"{found.losers:,} rows repeat"
    if terms.on_duplicate == "error":
        hint = f"nothing was published; {ways_out(found.against_table)}"
    else:
        hint = (
            "nothing was published, and what the table has is never taken back: use --on-duplicate keep-first"
        )
    return ErrorInfo("Invalid", f"{count} the unique key {key}: {both}", hint)


def _came_meanwhile(job: Job, head: TargetTable, store: JobStore, config: Config) -> ErrorInfo | None:
    """A key of ours that somebody else has published since our keys were compared with the table.

    The commit goes on top of exactly `head`, so nobody can come between this look and the commit.
    """
    from lockstep.passes import newest_runs, plan_unique
    from lockstep.unique import published, repeated_in_table

    checks = store.tasks(job.job_id, "unique")
    if not checks:
        return None
    seen = checks[0].descriptor["published"]["snapshot_id"]
    now = published(head.handle, job.plan)
    if now.snapshot_id == seen:
        return None
    then = published(head.handle, job.plan, seen) if seen is not None else None
    known = {one.file["path"] for one in then.files} if then is not None else set()
    fresh = replace(now, files=[one for one in now.files if one.file["path"] not in known])
    if not fresh.files:
        return None
    manifests = {stage: list(store.manifest(job.job_id, stage)) for stage in job.plan.stages[:-1]}
    files = newest_runs(manifests)
    storage = _storage(job, config)
    with _places(job, store, config) as places:
        for spec in plan_unique(files, job.plan, fresh):
            first = repeated_in_table(job.plan, spec.descriptor, files, storage)
            if first is not None:
                return ErrorInfo(
                    "Invalid",
                    "somebody else has published a row with the same unique key meanwhile: "
                    f"{_both(first, places)}",
                    "nothing was published; import again: the keys are then compared with the table as it is",
                )
    return None


# Sums


def _does_not_add_up(job: Job, store: JobStore) -> ErrorInfo | None:
    """Rows in must be rows out: the last defence against a run that was forgotten or merged twice."""
    runs = [file for file in store.manifest(job.job_id, "map") if file.kind == RUN]
    counted = tally(job, store)
    expected = sum(file.rows for file in runs) - counted.duplicates
    if counted.written != expected:
        return _miscounted(f"{counted.written} rows were merged, but {expected} were to be")
    before = sum((file.fingerprint for file in runs), Fingerprint())
    data = (file for file in store.manifest(job.job_id, job.plan.stages[-1]) if file.kind == DATA)
    after = sum((file.fingerprint for file in data), Fingerprint())
    if counted.duplicates:
        return _differs_by_others(before, after, job, store, counted.duplicates)
    differ = [name for name, value in before.columns.items() if after.columns.get(name) != value]
    return _miscounted(f"columns {', '.join(differ)} changed in the merge") if differ else None


def _differs_by_others(
    before: Fingerprint, after: Fingerprint, job: Job, store: JobStore, duplicates: int
) -> ErrorInfo | None:
    """Rows that were read must be those that were written and those that lost, by their values too."""
    positions = [task.position for task in store.tasks(job.job_id, job.plan.stages[-1]) if task.position]
    if not all(DROPPED in position for position in positions):
        return None  # merged by a version that did not sum them up
    dropped = [position[DROPPED] for position in positions]
    rows = sum(one["rows"] for one in dropped)
    if rows != duplicates:
        return _miscounted(f"{rows} rows were left out of the merge, but {duplicates} have lost")
    left_out = sum(int(one["folded"], 16) for one in dropped)
    if (after.folded() + left_out - before.folded()) % 2**64:
        return _miscounted(
            "the rows that were merged and those that were left out are not those that were read"
        )
    return None


def _miscounted(what: str) -> ErrorInfo:
    return ErrorInfo(
        "Corrupt", what, "nothing was published; import again, and report this with the job's history"
    )


def _rows(files: Iterable[StagedFile], kind: str) -> int:
    return sum(file.rows for file in files if file.kind == kind)


def _task_of(file: StagedFile) -> int:
    from lockstep.sink.staging import parse_staged_name

    parsed = parse_staged_name(file.path)
    assert parsed is not None
    return parsed[2]


def _rows_in(file: StagedFile, storage: Storage) -> list[Json]:
    import pyarrow as pa

    with storage.open(file.path) as opened:
        return list(pa.ipc.open_file(opened).read_all().to_pylist())


def _both(one: Duplicate, places: Places) -> str:
    """Where a row that repeats a key stands, and the one that it repeats, for a message."""
    try:
        known = recall_duplicates(places, [one])
    except (Corrupt, Invalid) as error:
        return _untold(error)
    return f"{known[one.task, one.record].place} has that of {winner_of(one, known)}"


def _storage(job: Job, config: Config) -> Storage:
    from lockstep.storage import Storage
    from lockstep.storage.options import options_of

    return Storage(options_of(job.plan, config))


def _places(job: Job, store: JobStore, config: Config) -> Places:
    plan = job.plan
    tasks = {task.index: task.descriptor for task in store.tasks(job.job_id, plan.stages[0])}
    return Places(open_frozen(expand(plan.source, config), plan.pin, config), plan.pin, tasks, plan.columns)
