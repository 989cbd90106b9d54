"""The verbs of the SQL store that run tasks, from begin to finish, and the manifest that they write."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, func, insert, select, tuple_, update

from lockstep.errors import ErrorInfo, Fenced, Retryable
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
from lockstep.store import Begun
from lockstep.store.rules import (
    Batch,
    counted,
    dumps,
    late_copy,
    lost_lease,
    paced_from,
    refuse_advance,
    refuse_ended,
    short_manifest,
    unpacked,
    verdict,
)
from lockstep.store.sql_database import verb
from lockstep.store.sql_records import IS_COMMITTING, IS_LEASED, TASK, Records
from lockstep.store.sql_rows import JobRow, as_fingerprint, error_text, lost_progress, saved
from lockstep.store.sql_schema import chunks, jobs, tasks

FILES_PER_CHUNK: Final = 500
_CHUNKS_PER_QUERY: Final = 200

_FILES_OF_STAGE: Final = select(func.coalesce(func.sum(tasks.c.files), 0)).where(
    tasks.c.job_id == bindparam("job_id"), tasks.c.stage == bindparam("stage")
)
_CHUNKS_AFTER: Final = (
    select(chunks.c.idx, chunks.c.seq, chunks.c.files)
    .where(
        chunks.c.job_id == bindparam("job_id"),
        chunks.c.stage == bindparam("stage"),
        tuple_(chunks.c.idx, chunks.c.seq) > tuple_(bindparam("idx"), bindparam("seq")),
    )
    .order_by(chunks.c.idx, chunks.c.seq)
    .limit(_CHUNKS_PER_QUERY)
)

_ADD_CHUNK: Final = insert(chunks).values({column.name: bindparam(column.name) for column in chunks.columns})
_COMMITS_OF_WORKER: Final = select(jobs.c.job_id).where(
    IS_COMMITTING, jobs.c.commit_owner == bindparam("worker"), jobs.c.commit_free_at > bindparam("now")
)
_JOBS_OF_WORKER: Final = select(tasks.c.job_id).where(
    IS_LEASED, tasks.c.owner == bindparam("worker"), tasks.c.free_at > bindparam("now")
)
_ABANDON_TASKS: Final = (
    update(tasks)
    .where(
        IS_LEASED,
        tasks.c.job_id == bindparam("b_job_id"),
        tasks.c.owner == bindparam("b_worker"),
        tasks.c.free_at > bindparam("b_now"),
    )
    .values(free_at=bindparam("b_now"))
)


class TaskVerbs(Records):
    @verb
    def begin(self, lease: Lease, lease_s: float) -> Begun:
        def decide(conn: Connection) -> Begun:
            job, found = self._job_and_task(conn, lease)
            refuse_ended(job)
            now = self._db.now(conn)
            if job.state not in (State.PENDING, State.RUNNING):
                raise Fenced(f"job {job.job_id} is {job.state}: no attempt may begin")
            if (
                found is None
                or found.state != TaskState.LEASED
                or found.owner != lease.worker
                or found.epoch < lease.epoch
            ):
                raise _fenced(lease, found)
            task = found
            self._set_task(
                conn,
                task,
                epoch=task.epoch + 1,
                attempts=task.attempts + 1,
                free_at=now + lease_s,
                started_at=now if task.started_at is None else task.started_at,
                **saved(task),
            )
            job = self._run(conn, job, lease.worker)
            self._add(conn, job, attempts=1, **lost_progress([task]))
            position = None if task.position is None else json.loads(task.position)
            return Begun(replace(lease, epoch=task.epoch + 1), position, task.saved_rows, task.saved_bytes)

        return self._db.decided(decide)

    @verb
    def checkpoint(
        self,
        lease: Lease,
        position: Position,
        staged: Sequence[StagedFile],
        progress: Progress,
        lease_s: float,
    ) -> Verdict:
        batch = Batch.of(position, staged, FILES_PER_CHUNK)

        def decide(conn: Connection) -> Verdict:
            job, found = self._job_and_task(conn, lease)
            refuse_ended(job)
            now = self._db.now(conn)
            task = _held(found, lease)
            if job.state != State.PAUSED:
                job = self._run(conn, job, lease.worker)
            changes, counters = self._store(conn, job, task, batch, progress)
            self._set_task(conn, task, free_at=now + lease_s, **changes)
            self._swap(conn, job, counters)
            return verdict(job)

        return self._db.decided(decide)

    @verb
    def finish(
        self, lease: Lease, position: Position, staged: Sequence[StagedFile], progress: Progress
    ) -> None:
        batch = Batch.of(position, staged, FILES_PER_CHUNK)

        def decide(conn: Connection) -> None:
            job, found = self._job_and_task(conn, lease)
            if _finished_so(found, lease, batch):
                return
            refuse_ended(job)
            task = _held(found, lease)
            changes, counters = self._store(conn, job, task, batch, progress)
            ended = {"state": TaskState.DONE.value, "free_at": None, "owner": None, "error": None}
            self._set_task(conn, task, **{**changes, **ended})
            job = self._swap(conn, job, {**counters, "tasks_done": job.tasks_done + 1})
            job = self._commit_if_done(conn, job, lease.worker)
            if job.state != State.PAUSED:
                self._run(conn, job, lease.worker)

        self._db.decided(decide)

    @verb
    def fail(self, lease: Lease, error: ErrorInfo, retry_in_s: float | None) -> None:
        with self._db.write() as conn:
            job, found = self._job_and_task(conn, lease)
            now = self._db.now(conn)
            if _failed_so(found, lease, error):
                return
            refuse_ended(job)
            task = _held(found, lease)
            job = self._add(conn, job, **lost_progress([task]))
            state = TaskState.FAILED if retry_in_s is None else TaskState.WAITING
            self._set_task(
                conn,
                task,
                state=state.value,
                free_at=None if retry_in_s is None else now + retry_in_s,
                owner=None,
                error=error_text(error),
                **saved(task),
            )
            attempt = f"task {lease.index} of {lease.stage}, attempt {task.attempts}"
            what = f"{attempt}: {error.cls}: {error.message}"
            if retry_in_s is None:
                whole = error_text(replace(error, task=lease.index))
                self._move(conn, job, Event.FAIL, detail=what, worker=lease.worker, error=whole)
            else:
                self._note(
                    conn, job, "task_failed", now, f"{what}; again in {retry_in_s:.1f} s", lease.worker
                )

    @verb
    def release(self, lease: Lease, *, unspent: bool = False) -> None:
        with self._db.write() as conn:
            try:
                job, found = self._job_and_task(conn, lease)
                task = _held(found, lease)
            except Fenced:
                return
            refund = 1 if unspent and task.attempts else 0
            self._set_task(
                conn,
                task,
                state=TaskState.WAITING.value,
                free_at=0.0,
                owner=None,
                attempts=task.attempts - refund,
                started_at=None if unspent else task.started_at,
                **saved(task),
            )
            self._add(conn, job, attempts=-refund, **lost_progress([task]))

    @verb
    def heartbeat(self, held: Mapping[Lease, Progress], lease_s: float) -> dict[Lease, Verdict]:
        verdicts = dict.fromkeys(held, Verdict.STOP)
        with self._db.write() as conn:
            for job_id in sorted({lease.job_id for lease in held}):
                mine = {lease: progress for lease, progress in held.items() if lease.job_id == job_id}
                verdicts.update(self._heartbeat(conn, job_id, mine, lease_s))
        return verdicts

    def _heartbeat(
        self, conn: Connection, job_id: str, held: Mapping[Lease, Progress], lease_s: float
    ) -> dict[Lease, Verdict]:
        """Extend those of one job that are still held; the others are left out of the answer."""
        verdicts: dict[Lease, Verdict] = {}
        if (job := self._lock_if_there(conn, job_id)) is None:
            return verdicts
        until = self._db.now(conn) + lease_s
        rows, size_bytes = job.rows_done, job.bytes_done
        for lease, progress in held.items():
            try:
                task = self._held(conn, lease)
            except Fenced:
                continue
            rows_done = max(task.saved_rows, progress.rows)
            bytes_done = max(task.saved_bytes, progress.size_bytes)
            self._set_task(conn, task, free_at=until, rows_done=rows_done, bytes_done=bytes_done)
            rows += rows_done - task.rows_done
            size_bytes += bytes_done - task.bytes_done
            verdicts[lease] = verdict(job)
        if verdicts:
            self._swap(conn, job, {"rows_done": rows, "bytes_done": size_bytes})
        return verdicts

    @verb
    def abandon(self, worker: str) -> None:
        with self._db.write() as conn:
            now = self._db.now(conn)
            about = {"worker": worker, "now": now}
            found = [*conn.execute(_COMMITS_OF_WORKER, about).scalars()]
            found += conn.execute(_JOBS_OF_WORKER, about).scalars()
            for job_id in sorted(set(found)):
                self._abandon(conn, job_id, worker, now)

    def _abandon(self, conn: Connection, job_id: str, worker: str, now: float) -> None:
        if (job := self._lock_if_there(conn, job_id)) is None:
            return
        if job.state == State.COMMITTING and job.commit_owner == worker and job.commit_free_at > now:
            self._swap(conn, job, {"commit_free_at": now})
        conn.execute(_ABANDON_TASKS, {"b_job_id": job_id, "b_worker": worker, "b_now": now})

    @verb
    def advance(self, job_id: str, stage: str, next_stage: str, tasks: Sequence[TaskSpec]) -> Job:
        with self._db.write() as conn:
            job = self._lock(conn, job_id)
            if job.stage == next_stage:
                return self._job(conn, job_id)
            refuse_advance(job, stage, next_stage)
            job = self._run(conn, job, None)
            self._add_tasks(conn, job_id, next_stage, tasks)
            fresh = {"tasks_done": 0, "rows_done": 0, "bytes_done": 0, "files": 0, "fingerprint": None}
            fresh |= paced_from(self._db.now(conn), 0)
            job = self._swap(conn, job, {**fresh, "stage": next_stage, "tasks_total": len(tasks)})
            self._note(conn, job, "advance", self._db.now(conn), f"{stage} → {next_stage}, {counted(tasks)}")
            self._commit_if_done(conn, job, None)
            return self._job(conn, job_id)

    # Shared steps

    def _job_and_task(self, conn: Connection, lease: Lease) -> tuple[JobRow, Row[Any] | None]:
        """The locked job of a lease, and its task. Raises: Fenced if the job is gone."""
        about = {"job_id": lease.job_id, "stage": lease.stage, "idx": lease.index}
        job, task = self._db.lock(conn, self._locking, TASK, about)
        if job is None:
            raise Fenced(f"job {lease.job_id} is no longer in the store")
        return self._timed(conn, JobRow(**job._asdict())), task

    def _held(self, conn: Connection, lease: Lease) -> Row[Any]:
        """The task of a lease that is still the newest. Raises: Fenced if it is not."""
        return _held(self._task_row(conn, lease.job_id, lease.stage, lease.index), lease)

    def _store(
        self, conn: Connection, job: JobRow, task: Row[Any], batch: Batch, progress: Progress
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Insert the manifest's new chunks; answer what changes in the task's and in the job's row.

        The same batch again in the same epoch adds nothing.
        Raises: Fenced if a later checkpoint of this attempt is there: this is a late copy of an earlier one.
        """
        if task.saved_epoch == task.epoch:
            if task.saved_digest == batch.digest:
                return {}, {}
            if progress.rows < task.saved_rows or progress.size_bytes < task.saved_bytes:
                raise late_copy(task.job_id, task.idx, progress.rows)
        keys = {"job_id": task.job_id, "stage": task.stage, "idx": task.idx}
        for seq, packed in enumerate(batch.packed, task.chunks):
            refused = Retryable(f"the manifest of job {task.job_id} could not be written")
            self._db.change(conn, _ADD_CHUNK, {**keys, "seq": seq, "files": packed}, refused)
        changes = {
            "position": batch.position,
            "rows_done": progress.rows,
            "bytes_done": progress.size_bytes,
            "saved_rows": progress.rows,
            "saved_bytes": progress.size_bytes,
            "saved_epoch": task.epoch,
            "saved_digest": batch.digest,
            "files": task.files + batch.files,
            "chunks": task.chunks + len(batch.packed),
        }
        counters: dict[str, Any] = {
            "rows_done": job.rows_done + progress.rows - task.rows_done,
            "bytes_done": job.bytes_done + progress.size_bytes - task.bytes_done - batch.aside_bytes,
            "files": job.files + batch.files - batch.aside_files,
        }
        if batch.files and task.stage == job.last_stage:
            counters["fingerprint"] = dumps((as_fingerprint(job.fingerprint) + batch.fingerprint).to_json())
        return changes, counters

    def _add_tasks(self, conn: Connection, job_id: str, stage: str, specs: Sequence[TaskSpec]) -> None:
        fresh = {"state": TaskState.WAITING.value, "free_at": 0.0}
        fresh |= dict.fromkeys(
            ("epoch", "attempts", "rows_done", "bytes_done", "saved_rows", "saved_bytes", "saved_epoch"), 0
        )
        fresh |= {"files": 0, "chunks": 0}
        if specs:
            conn.execute(
                insert(tasks),
                [
                    {
                        **fresh,
                        "job_id": job_id,
                        "stage": stage,
                        "idx": index,
                        "descriptor": dumps(spec.descriptor),
                        "rows": spec.rows,
                        "size_bytes": spec.size_bytes,
                    }
                    for index, spec in enumerate(specs)
                ],
            )

    # The manifest

    def manifest(self, job_id: str, stage: str) -> Iterator[StagedFile]:
        """Streams; raises Corrupt if fewer files are stored than were checkpointed."""
        expected = self._files_of_stage(job_id, stage)
        seen = 0
        place = (-1, -1)
        while True:
            page = self._chunks_after(job_id, stage, place)
            for row in page:
                for file in unpacked(job_id, stage, row.idx, row.files):
                    seen += 1
                    yield file
            if len(page) < _CHUNKS_PER_QUERY:
                break
            place = (page[-1].idx, page[-1].seq)
        if seen < expected:
            raise short_manifest(job_id, stage, seen, expected)

    @verb
    def _files_of_stage(self, job_id: str, stage: str) -> int:
        """How many files were checkpointed."""
        with self._db.read() as conn:
            self._row(conn, job_id)
            return int(conn.execute(_FILES_OF_STAGE, {"job_id": job_id, "stage": stage}).scalar_one())

    @verb
    def _chunks_after(
        self, job_id: str, stage: str, place: tuple[int, int]
    ) -> Sequence[Row[int, int, bytes]]:
        about = {"job_id": job_id, "stage": stage, "idx": place[0], "seq": place[1]}
        with self._db.read() as conn:
            return conn.execute(_CHUNKS_AFTER, about).all()


def _held(task: Row[Any] | None, lease: Lease) -> Row[Any]:
    """The task, if the lease is still its newest. Raises: Fenced if it is not."""
    if task is None or task.state != TaskState.LEASED or task.epoch != lease.epoch:
        raise _fenced(lease, task)
    return task


def _finished_so(task: Row[Any] | None, lease: Lease, batch: Batch) -> bool:
    """True if this very finish was recorded before: its reply got lost."""
    return (
        task is not None
        and task.state == TaskState.DONE
        and task.epoch == lease.epoch
        and task.saved_digest == batch.digest
    )


def _failed_so(task: Row[Any] | None, lease: Lease, error: ErrorInfo) -> bool:
    """True if this very failure was recorded before: its reply got lost."""
    return (
        task is not None
        and task.state in (TaskState.WAITING, TaskState.FAILED)
        and task.epoch == lease.epoch
        and task.error == error_text(error)
    )


def _fenced(lease: Lease, task: Row[Any] | None) -> Fenced:
    return lost_lease(lease, None if task is None else (task.state, task.epoch))
