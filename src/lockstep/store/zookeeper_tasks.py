"""The verbs of the ZooKeeper store that run tasks, from begin to finish, stage by stage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from lockstep.errors import ErrorInfo, Fenced, NoSuchJob
from lockstep.job import (
    Event,
    Job,
    Lease,
    Position,
    Progress,
    StagedFile,
    State,
    TaskSpec,
    TaskState,
    Verdict,
)
from lockstep.runtime import new_id
from lockstep.store import Begun
from lockstep.store.rules import Batch, counted, lost_lease, paced_from, refuse_advance, refuse_ended, verdict
from lockstep.store.zookeeper_edit import Edit, Ghost
from lockstep.store.zookeeper_layout import (
    PAGE,
    Entry,
    encoded_specs,
    error_json,
    id_listed,
    in_parts,
    quoted,
)
from lockstep.store.zookeeper_manifest import Checkpoint, Manifests

LONG_AGO: Final = 0.0
_OF_A_STAGE: Final = (
    "tasks_done",
    "saved_rows",
    "saved_bytes",
    "ahead_rows",
    "ahead_bytes",
    "files",
    "aside_files",
    "aside_bytes",
    "fresh",
)
"""The counters that begin anew with each stage."""

T = TypeVar("T")


class TaskVerbs(Manifests):
    def begin(self, lease: Lease, lease_s: float) -> Begun:
        def decide(edit: Edit) -> Begun:
            record = edit.record
            refuse_ended(record)
            if record.state not in (State.PENDING, State.RUNNING):
                raise Fenced(f"job {record.job_id} is {record.state}: no attempt may begin")
            entry = _entry(edit, lease)
            held = entry.state is TaskState.LEASED and entry.owner == lease.worker
            if not held or entry.epoch < lease.epoch:
                raise lost_lease(lease, (entry.state, entry.epoch))
            begun = replace(
                entry,
                epoch=entry.epoch + 1,
                attempts=entry.attempts + 1,
                free_at=edit.now + lease_s,
                started_at=edit.now if entry.started_at is None else entry.started_at,
                ahead_rows=0,
                ahead_bytes=0,
            )
            edit.put(lease.index, begun)
            edit.run(lease.worker)
            edit.add(attempts=1, ahead_rows=-entry.ahead_rows, ahead_bytes=-entry.ahead_bytes)
            position = None if entry.position is None else json.loads(entry.position)
            newest = replace(lease, epoch=begun.epoch)
            return Begun(newest, position, entry.saved_rows, entry.saved_bytes)

        return self._write_task(lease, decide)

    def checkpoint(
        self,
        lease: Lease,
        position: Position,
        staged: Sequence[StagedFile],
        progress: Progress,
        lease_s: float,
    ) -> Verdict:
        manifest = Checkpoint(self, lease, position, staged)

        def decide(edit: Edit) -> Verdict:
            refuse_ended(edit.record)
            entry = _held(edit, lease)
            if edit.record.state != State.PAUSED:
                edit.run(lease.worker)
            saved = manifest.store(edit, entry, progress)
            edit.put(lease.index, replace(saved, free_at=edit.now + lease_s))
            return verdict(edit.record)

        return self._write_task(lease, decide)

    def finish(
        self, lease: Lease, position: Position, staged: Sequence[StagedFile], progress: Progress
    ) -> None:
        manifest = Checkpoint(self, lease, position, staged)

        def decide(edit: Edit) -> None:
            if _finished_so(edit, lease, manifest.batch):
                return
            refuse_ended(edit.record)
            entry = _held(edit, lease)
            saved = manifest.store(edit, entry, progress)
            edit.put(lease.index, replace(saved, state=TaskState.DONE, free_at=0.0, owner=None, error=None))
            edit.add(tasks_done=1)
            edit.commit_if_done(lease.worker)
            if edit.record.state != State.PAUSED:
                edit.run(lease.worker)

        self._write_task(lease, decide)

    def fail(self, lease: Lease, error: ErrorInfo, retry_in_s: float | None) -> None:
        def decide(edit: Edit) -> None:
            if _failed_so(edit, lease, error):
                return
            refuse_ended(edit.record)
            entry = _held(edit, lease)
            state = TaskState.FAILED if retry_in_s is None else TaskState.WAITING
            free_at = 0.0 if retry_in_s is None else edit.now + retry_in_s
            edit.put(
                lease.index, replace(entry.free(), state=state, free_at=free_at, error=error_json(error))
            )
            edit.add(ahead_rows=-entry.ahead_rows, ahead_bytes=-entry.ahead_bytes)
            attempt = f"task {lease.index} of {lease.stage}, attempt {entry.attempts}"
            what = f"{attempt}: {error.cls}: {error.message}"
            if retry_in_s is None:
                whole = error_json(replace(error, task=lease.index))
                edit.move(Event.FAIL, detail=what, worker=lease.worker, error=whole)
            else:
                edit.note("task_failed", f"{what}; again in {retry_in_s:.1f} s", lease.worker)

        self._write_task(lease, decide)

    def release(self, lease: Lease, *, unspent: bool = False) -> None:
        def decide(edit: Edit) -> None:
            entry = _held(edit, lease)
            refund = 1 if unspent and entry.attempts else 0
            freed = replace(
                entry.free(),
                attempts=entry.attempts - refund,
                started_at=None if unspent else entry.started_at,
            )
            edit.put(lease.index, freed)
            edit.add(attempts=-refund, ahead_rows=-entry.ahead_rows, ahead_bytes=-entry.ahead_bytes)

        try:
            self._write_task(lease, decide)
        except Fenced:
            return

    def heartbeat(self, held: Mapping[Lease, Progress], lease_s: float) -> dict[Lease, Verdict]:
        """One transaction for each job."""
        verdicts = dict.fromkeys(held, Verdict.STOP)
        for job_id in sorted({lease.job_id for lease in held}):
            mine = {lease: progress for lease, progress in held.items() if lease.job_id == job_id}
            verdicts.update(self._heartbeat(job_id, mine, lease_s))
        return verdicts

    def _heartbeat(self, job_id: str, held: Mapping[Lease, Progress], lease_s: float) -> dict[Lease, Verdict]:
        """Extend those of one job that are still held; the others are left out of the answer."""

        def decide(edit: Edit) -> dict[Lease, Verdict]:
            verdicts: dict[Lease, Verdict] = {}
            for lease, progress in held.items():
                try:
                    entry = _held(edit, lease)
                except Fenced:
                    continue
                rows = max(0, progress.rows - entry.saved_rows)
                size_bytes = max(0, progress.size_bytes - entry.saved_bytes)
                edit.put(
                    lease.index,
                    replace(entry, free_at=edit.now + lease_s, ahead_rows=rows, ahead_bytes=size_bytes),
                )
                edit.add(ahead_rows=rows - entry.ahead_rows, ahead_bytes=size_bytes - entry.ahead_bytes)
                verdicts[lease] = verdict(edit.record)
            # One that seems lost in what was seen last may be held by now: look again.
            if edit.cached and len(verdicts) < len(held):
                raise Fenced(f"leases of job {job_id} are lost")
            return verdicts

        try:
            return self._write(job_id, decide)[0]
        except NoSuchJob:
            return {}

    def abandon(self, worker: str) -> None:
        """One transaction for each job."""
        states = (State.PENDING, State.RUNNING, State.PAUSED, State.COMMITTING)
        names = self._session.children_many([self._layout.states(state) for state in states])
        for record in self._readable(id_listed(name) for some in names for name in some):
            if record.commit_owner == worker or any(about[0] for about in record.open.values()):
                try:
                    self._write(record.job_id, lambda edit: _abandon(edit, worker))
                except NoSuchJob:
                    continue

    def advance(self, job_id: str, stage: str, next_stage: str, tasks: Sequence[TaskSpec]) -> Job:
        place: list[str] = []

        def decide(edit: Edit) -> None:
            record = edit.record
            if record.stage == next_stage:
                return
            refuse_advance(record, stage, next_stage)
            if not place:
                fresh, nodes = self._stage_nodes(record.body, next_stage, tasks)
                self._write_ahead(nodes)
                place.append(fresh)
            edit.run(None)
            edit.change(
                stage=next_stage,
                place=place[0],
                past={**record.past, stage: [record.tasks_total, record.begun(stage)[1], record.place]},
                tasks_total=len(tasks),
                **dict.fromkeys(_OF_A_STAGE, 0),
                **paced_from(edit.now, 0),
                fingerprint=None,
                open={},
            )
            edit.note("advance", f"{stage} → {next_stage}, {counted(tasks)}")
            edit.commit_if_done()

        return self._job(self._write(job_id, decide)[1])

    # Shared steps

    def _write_task(self, lease: Lease, decide: Callable[[Edit], T]) -> T:
        """Raises: Fenced if the job or its records are gone, and as `decide` does."""
        try:
            return self._write(lease.job_id, decide)[0]
        except NoSuchJob as error:
            raise Fenced(f"job {lease.job_id} is no longer in the store") from error

    def _stage_nodes(
        self, body: str, stage: str, specs: Sequence[TaskSpec]
    ) -> tuple[str, list[tuple[str, bytes]]]:
        """A place for a stage's tasks, unseen until the record names it, and what is to be there."""
        place = f"{quoted(stage)}~{new_id()[-12:]}"
        nodes = [(self._layout.stage(body, place), b"")]
        nodes += [(f"{self._layout.stage(body, place)}/{name}", b"") for name in ("specs", "pages", "files")]
        for number, start in enumerate(range(0, len(specs), PAGE)):
            blob = encoded_specs(specs[start : start + PAGE])
            nodes += in_parts(self._layout.specs(body, place, number), blob)
            nodes.append((f"{self._layout.stage(body, place)}/files/{number}", b""))
        return place, nodes


def _entry(edit: Edit, lease: Lease) -> Entry:
    """The task of a lease in the current stage. Raises: Fenced if it is not there."""
    record = edit.record
    if lease.stage != record.stage or not 0 <= lease.index < record.fresh:
        raise lost_lease(lease, None)
    try:
        page = edit.page(lease.index // PAGE)
    except Ghost as error:
        raise lost_lease(lease, None) from error
    return page.entry(lease.index)


def _held(edit: Edit, lease: Lease) -> Entry:
    """The task of a lease that is still the newest. Raises: Fenced if it is not."""
    entry = _entry(edit, lease)
    if entry.state is not TaskState.LEASED or entry.epoch != lease.epoch:
        raise lost_lease(lease, (entry.state, entry.epoch))
    return entry


def _finished_so(edit: Edit, lease: Lease, batch: Batch) -> bool:
    """True if this very finish was recorded before: its reply got lost."""
    if lease.stage in edit.record.past:
        past = edit.past_entry(lease.stage, lease.index)
        return past is not None and past.epoch == lease.epoch and past.saved_digest == batch.digest
    try:
        entry = _entry(edit, lease)
    except Fenced:
        return False
    same = entry.epoch == lease.epoch and entry.saved_digest == batch.digest
    return entry.state is TaskState.DONE and same


def _failed_so(edit: Edit, lease: Lease, error: ErrorInfo) -> bool:
    """True if this very failure was recorded before: its reply got lost."""
    try:
        entry = _entry(edit, lease)
    except Fenced:
        return False
    given_back = entry.state in (TaskState.WAITING, TaskState.FAILED)
    return given_back and entry.epoch == lease.epoch and entry.error == error_json(error)


def _abandon(edit: Edit, worker: str) -> None:
    """Not `edit.now`: another client's idea of the server's time may be some milliseconds behind ours."""
    record = edit.record
    if record.state == State.COMMITTING and record.commit_owner == worker:
        if record.commit_free_at > edit.now:
            edit.change(commit_free_at=LONG_AGO)
        return
    for number, about in record.open.items():
        if not about[0]:
            continue
        try:
            leased = list(edit.page(int(number)).open())
        except Ghost:
            continue
        for index, entry in leased:
            if entry.state is TaskState.LEASED and entry.owner == worker and entry.free_at > edit.now:
                edit.put(index, replace(entry, free_at=LONG_AGO))
