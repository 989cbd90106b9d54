"""Exactly-once bulk export and import for Apache Iceberg.

    import lockstep

    job = lockstep.export("chdb:data/db/events", "iceberg://lake/db.events", partition="202401", create=True)
    job.wait()
    lockstep.import_files("data/*.csv.gz", "iceberg://lake/db.raw", create=True, sort_by=["user_id"]).wait()

The functions do what the commands of the same names do; `Export` follows the jobs of one request.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import (
    CommitUnknown,
    Conflict,
    Corrupt,
    Fenced,
    Incompatible,
    Invalid,
    LockstepError,
    NoSuchJob,
    Retryable,
)

if TYPE_CHECKING:
    from lockstep.config import Config
    from lockstep.job import Job, State
    from lockstep.source import ParseOptions
    from lockstep.store import JobStore

__version__: Final = "0.1.0"

__all__ = [
    "CommitUnknown",
    "Conflict",
    "Corrupt",
    "Export",
    "Fenced",
    "Incompatible",
    "Invalid",
    "LockstepError",
    "NoSuchJob",
    "Retryable",
    "__version__",
    "export",
    "import_files",
    "jobs",
]


def export(
    source: str,
    target: str,
    *,
    partition: str | None = None,
    partitions: str | Iterable[str] = (),
    parts: str | Iterable[str] = (),
    everything: bool = False,
    create: bool = False,
    on_existing: str = "error",
    match: str = "name",
    allow_lossy: bool = False,
    ignore_extra: bool = False,
    file_size_bytes: int = 256_000_000,
    deadline_s: float | None = None,
    pin: bool = True,
    config: Path | str | None = None,
) -> Export:
    """Freeze what is named and record one job per partition or part; `wait()` on the answer runs them.

    Raises: Invalid or Conflict, with nothing created.
    """
    from lockstep.config import load_config
    from lockstep.exporter import ExportRequest, plan_export
    from lockstep.store import open_store

    settings = load_config(Path(config) if config is not None else None)
    store = open_store(settings.store_url)
    request = ExportRequest(
        source,
        target,
        (*([] if partition is None else [partition]), *_names(partitions)),
        _names(parts),
        everything,
        create,
        on_existing,
        match,
        allow_lossy,
        ignore_extra,
        file_size_bytes,
        deadline_s,
        pin,
    )
    planned = plan_export(request, settings, store)
    return Export(settings, store, [job.job_id for job in planned.jobs])


def import_files(
    inputs: str | Iterable[str],
    target: str,
    *,
    create: bool = False,
    mode: str = "auto",
    sort_by: str | Iterable[str] = (),
    unique: str | Iterable[str] = (),
    on_duplicate: str = "error",
    max_rejects: int = 0,
    rejects: str | None = None,
    on_existing: str = "error",
    allow_lossy: bool = False,
    ignore_extra: bool = False,
    file_size_bytes: int = 256_000_000,
    deadline_s: float | None = None,
    config: Path | str | None = None,
    **parse: Any,
) -> Export:
    """Record one job that imports raw files, or a table; `wait()` on the answer runs it.

    With `on_existing="skip"` inputs that were imported before are left out; if none is left there is no job.
    `parse` are the fields of `ParseOptions`: format, delimiter, quote, escape, header, null, compression,
    skip, limit, and schema, which is Iceberg's JSON or the path of a file as `--schema` takes it.
    Raises: Invalid or Conflict, with nothing created.
    """
    from lockstep.config import load_config
    from lockstep.importer import ImportRequest, plan_import
    from lockstep.store import open_store

    settings = load_config(Path(config) if config is not None else None)
    store = open_store(settings.store_url)
    request = ImportRequest(
        _names(inputs),
        target,
        _parse_options(parse),
        mode,
        _names(sort_by),
        _names(unique),
        on_duplicate,
        max_rejects,
        rejects,
        create,
        on_existing,
        file_size_bytes,
        deadline_s,
        allow_lossy,
        ignore_extra,
    )
    job = plan_import(request, settings, store).job
    return Export(settings, store, [] if job is None else [job.job_id])


def jobs(config: Path | str | None = None) -> list[Job]:
    """All jobs of the store, newest first."""
    from lockstep.config import load_config
    from lockstep.store import open_store

    settings = load_config(Path(config) if config is not None else None)
    return open_store(settings.store_url).list()


def _names(given: str | Iterable[str]) -> tuple[str, ...]:
    """One name, or several."""
    return (given,) if isinstance(given, str) else tuple(given)


def _parse_options(given: dict[str, Any]) -> ParseOptions:
    """Raises: Invalid for an option that there is not, or a schema that is none."""
    from dataclasses import fields

    from lockstep.schema_file import read_schema
    from lockstep.source import ParseOptions

    known = [field.name for field in fields(ParseOptions)]
    if unknown := [name for name in given if name not in known]:
        raise Invalid(f"there is no option {unknown[0]!r}", hint=f"files are parsed by {', '.join(known)}")
    schema = given.get("schema")
    if isinstance(schema, str | Path):
        given = {**given, "schema": read_schema(Path(schema))}
    elif schema is not None and not (isinstance(schema, dict) and "fields" in schema):
        raise Invalid("schema is neither Iceberg's JSON, which has fields, nor the path of a file")
    return ParseOptions(**given)


class Export:
    """The jobs of one request. With a single job its fields are here too: `state`, `snapshot_id`, …"""

    def __init__(self, config: Config, store: JobStore, job_ids: list[str]) -> None:
        self._config = config
        self._store = store
        self.job_ids = job_ids

    @property
    def jobs(self) -> list[Job]:
        return [self._store.read(job_id) for job_id in self.job_ids]

    @property
    def job_id(self) -> str:
        return self._only.job_id

    @property
    def state(self) -> State:
        return self._only.state

    @property
    def snapshot_id(self) -> int | None:
        return self._only.snapshot_id

    def to_json(self) -> list[dict[str, Any]]:
        """What `lockstep show --json` prints, for each job."""
        from lockstep.view import job_document

        return [job_document(job) for job in self.jobs]

    def wait(self, stop: threading.Event | None = None) -> Export:
        """Run the jobs in this process until each has ended or is paused.

        Raises: LockstepError with the reason if one failed or was killed.
        """
        from lockstep.job import State
        from lockstep.worker import Worker

        if self.job_ids:
            Worker(self._config, self._store, job_ids=self.job_ids).run("jobs_ended", stop)
        for job in self.jobs:
            if job.state in {State.FAILED, State.KILLED}:
                reason = job.error.message if job.error else "nothing was published"
                raise LockstepError(
                    f"job {job.job_id} is {job.state}: {reason}", hint=job.error.hint if job.error else None
                )
        return self

    def kill(self) -> None:
        """Stop the jobs at once. One that is being published answers when its commit is known."""
        from lockstep.commit import kill

        for job_id in self.job_ids:
            kill(self._store, job_id, self._config)

    @property
    def _only(self) -> Job:
        if len(self.job_ids) != 1:
            raise Invalid(f"the request made {len(self.job_ids)} jobs", hint="use .jobs")
        return self._store.read(self.job_ids[0])
