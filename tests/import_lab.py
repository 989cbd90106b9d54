"""Imports without Spark: the real store, inputs, runs, merge, commit and table; the attempts run here.

Crashes are exact: an attempt dies at the n-th time that it reaches a failpoint, and nothing of it is heard
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

import lockstep.attempt
import lockstep.sink.datafile
import lockstep.stages
import lockstep.target.iceberg
from lockstep.attempt import Assignment, Stopped
from lockstep.commit import settle
from lockstep.config import Config, load_config
from lockstep.errors import ErrorInfo, Fenced
from lockstep.importer import ImportRequest, draft_import, plan_import
from lockstep.job import Event, Job, Lease, Position, Progress, StagedFile, State, Verdict
from lockstep.rehearsal import Rehearsal, rehearse
from lockstep.secrets import expand
from lockstep.source import ParseOptions
from lockstep.stages import advance, release_runs, stage_is_over
from lockstep.store import Claim, JobStore
from lockstep.store.sql import SqlStore
from tests.store_lab import MovedClock

TARGET = "iceberg://lake/db.t"
FAILPOINT_ROOMS = (
    lockstep.attempt,
    lockstep.sink.datafile,
    lockstep.stages,
    lockstep.target.iceberg,
)


class Crash(BaseException):
    """The process is gone: nothing after this is executed, no handler of ours sees it as an error."""


class Crashes:
    """Stands in for the failpoints: dies at the given visits, and remembers which points were passed."""

    def __init__(self) -> None:
        self.at: set[tuple[str, int]] = set()
        self.passed: Counter[str] = Counter()

    def __call__(self, name: str) -> None:
        self.passed[name] += 1
        if (name, self.passed[name]) in self.at:
            raise Crash(name)


@contextmanager
def armed(crashes: Crashes) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for room in FAILPOINT_ROOMS:
            patch.setattr(room, "failpoint", crashes)
        yield


class StoreLink:
    """An attempt's link that asks the store itself, as the driver does for an executor."""

    def __init__(self, store: JobStore, claim: Claim) -> None:
        self._store = store
        begun = store.begin(claim.lease, 30)
        self.lease: Lease = begun.lease
        self.position = begun.position
        self._rows = begun.rows_done
        self._bytes = begun.bytes_done
        self.pause_asked = False

    def obey(self) -> None:
        return

    def advance(self, rows: int, pending_bytes: int) -> None:
        self._rows += rows

    def checkpoint(self, position: Position, staged: list[StagedFile]) -> None:
        verdict = self._store.checkpoint(self.lease, position, staged, self._with(staged), 30)
        if verdict is not Verdict.GO_ON:
            raise Stopped(verdict)

    def finish(self, position: Position, staged: list[StagedFile]) -> None:
        self._store.finish(self.lease, position, staged, self._with(staged))

    def _with(self, staged: list[StagedFile]) -> Progress:
        self._bytes += sum(file.size_bytes for file in staged)
        return Progress(self._rows, self._bytes)


class ImportLab:
    """A folder with a store, a lake and inputs; `finish` brings a job to its end as workers would."""

    def __init__(self, folder: Path, limits: str = "") -> None:
        self.folder = folder
        self.clock = MovedClock()
        (folder / "lockstep.toml").write_text(f"[limits]\n{limits}\n")
        self.config: Config = load_config(folder / "lockstep.toml")
        self.store: JobStore = SqlStore(self.config.store_url, self.clock)
        self.crashes = Crashes()
        self.attempts = 0
        self.pause_asked = False
        """Somebody pauses the job of every attempt that begins."""

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def request(self, *inputs: str, parse: ParseOptions | None = None, **options: Any) -> ImportRequest:
        addresses = tuple(str(self.folder / name) if "://" not in name else name for name in inputs)
        options.setdefault("create", True)
        options.setdefault("target", TARGET)
        return ImportRequest(inputs=addresses, options=parse or ParseOptions(), **options)

    def plan(self, *inputs: str, parse: ParseOptions | None = None, **options: Any) -> Job:
        request = self.request(*inputs, parse=parse, **options)
        job = plan_import(request, self.config, self.store, self.clock).job
        assert job is not None, "there was nothing to import"
        return job

    def rehearse(
        self, *inputs: str, most_listed: int = 1000, parse: ParseOptions | None = None, **options: Any
    ) -> Rehearsal:
        """What a dry run finds."""
        request = self.request(*inputs, parse=parse, **options)
        with ExitStack() as undo:
            draft, _ = draft_import(request, self.config, self.store, self.clock, undo)
            return rehearse(draft, request, self.config, most_listed)

    def run(self, *inputs: str, **options: Any) -> Job:
        return self.finish(self.plan(*inputs, **options))

    def finish(self, job: Job, most_rounds: int = 400) -> Job:
        """Run until the job has ended; whoever crashes is replaced after its lease."""
        for _ in range(most_rounds):
            try:
                with armed(self.crashes):
                    job = self.round(job)
            except Crash:
                self.clock.at += 60
                job = self.store.read(job.job_id)
            if job.state in (State.COMPLETED, State.KILLED):
                release_runs(self.store, job, self.config)
            if not job.state.live:
                return job
        raise AssertionError(f"the job did not end: {job}")

    def round(self, job: Job, *, commit: bool = True) -> Job:
        """What two workers do next."""
        if stage_is_over(job):
            return advance(job, self.store, self.config, self.clock)
        for claim in self.store.claim("worker", 2, 30, {job.job_id}):
            with suppress(Fenced):  # the job has ended meanwhile
                self.attempt(claim)
        job = self.store.read(job.job_id)
        if job.state is State.COMMITTING and commit:
            job = settle(self.store, job.job_id, self.config, self.clock)
        return job

    def attempt(self, claim: Claim) -> None:
        self.attempts += 1
        plan = claim.job.plan
        assignment = Assignment(
            claim.lease,
            plan.to_json(),
            claim.task.descriptor,
            expand(plan.source, self.config),
            # As executors have it: neither the store nor the catalogs.
            replace(self.config, store_url="", catalogs={}),
            ("", 0),
            "",
        )
        link: Any = StoreLink(self.store, claim)
        if self.pause_asked:
            self.store.pause(claim.job.job_id)
            link.pause_asked = True
        try:
            lockstep.attempt._run(assignment, link, link.position)
        except Fenced:
            raise
        except Stopped:
            self.store.release(link.lease, unspent=True)
        except Exception as error:
            info = ErrorInfo.of(error, claim.task.index)
            self.store.fail(link.lease, info, None if info.permanent or self.attempts > 300 else 0.0)

    def kill(self, job: Job) -> Job:
        return self.store.stop(job.job_id, Event.KILL)

    # What was published

    def table(self, name: str = "db.t") -> Table:
        return load_catalog("lake", **self.config.catalogs["lake"]).load_table(name)

    def files(self, name: str = "db.t") -> list[pa.Table]:
        """Each data file of the table, in the order of its tasks, read with nothing of ours."""
        paths = sorted(task.file.file_path for task in self.table(name).scan().plan_files())
        return [pq.read_table(path.removeprefix("file://")) for path in paths]

    def rows(self, name: str = "db.t", *, by: str | None = None) -> list[dict[str, Any]]:
        table = self.table(name).scan().to_arrow()
        return list((table.sort_by(by) if by else table).to_pylist())

    def left_over(self) -> list[Path]:
        """Runs of any job that are still there."""
        return [path for path in self.folder.rglob("*") if "lockstep-runs" in path.parts and path.is_file()]
