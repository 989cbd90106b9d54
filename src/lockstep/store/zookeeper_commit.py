"""The verbs of the ZooKeeper store that commit a job: one committer at a time, each with a newer epoch."""

from __future__ import annotations

from collections.abc import Collection

from lockstep.errors import ErrorInfo, Fenced, LockstepError, NoSuchJob
from lockstep.job import PLAN_FORMAT, CommitLease, Event, Job, State, after
from lockstep.store import CommitClaim
from lockstep.store.rules import how_it_ended, refuse_end, refuse_lost_commit
from lockstep.store.zookeeper_edit import Edit
from lockstep.store.zookeeper_layout import Record, error_json, id_listed
from lockstep.store.zookeeper_records import Records


class CommitVerbs(Records):
    def claim_commit(
        self, worker: str, lease_s: float, job_ids: Collection[str] | None = None, *, force: bool = False
    ) -> CommitClaim | None:
        if job_ids is None:
            ids = [id_listed(name) for name in self._session.children(self._layout.states(State.COMMITTING))]
        else:
            ids = sorted(set(job_ids))
        records = [record for record in self._readable(ids) if self._ready(record, force=force)]
        for record in sorted(
            records, key=lambda found: (found.commit_free_at, found.created_at, found.job_id)
        ):
            try:
                self._frozen_of(record)
            except LockstepError as error:
                self._warn(record.job_id, error)
                continue
            taken = self._take(record.job_id, worker, lease_s, force=force)
            if taken is not None:
                return taken
        return None

    def _ready(self, record: Record, *, force: bool) -> bool:
        known = record.state == State.COMMITTING and record.plan_format <= PLAN_FORMAT
        return known and (force or record.commit_free_at <= self.now())

    def _take(self, job_id: str, worker: str, lease_s: float, *, force: bool) -> CommitClaim | None:
        def decide(edit: Edit) -> CommitLease | None:
            record = edit.record
            if not self._ready(record, force=force):
                return None
            edit.change(
                commit_epoch=record.commit_epoch + 1,
                commit_owner=worker,
                commit_free_at=edit.now + lease_s,
                commit_started_at=edit.now if record.commit_started_at is None else record.commit_started_at,
            )
            edit.note("claim_commit", worker=worker)
            return CommitLease(job_id, record.generation, record.commit_epoch + 1, worker)

        try:
            lease, record = self._write(job_id, decide)
        except NoSuchJob:
            return None
        return None if lease is None else CommitClaim(lease, self._job(record))

    def renew_commit(
        self, lease: CommitLease, lease_s: float, *, attempted: bool = False, error: ErrorInfo | None = None
    ) -> Job:
        def decide(edit: Edit) -> None:
            refuse_lost_commit(edit.record, lease)
            edit.change(commit_free_at=edit.now + lease_s)
            edit.add(commit_attempts=int(attempted))
            if error is not None:
                edit.change(error=error_json(error))
            edit.touch()

        return self._job(self._write(lease.job_id, decide)[1])

    def yield_commit(self, lease: CommitLease, retry_in_s: float) -> None:
        def decide(edit: Edit) -> None:
            refuse_lost_commit(edit.record, lease)
            if edit.record.commit_owner is not None:
                edit.change(commit_owner=None, commit_free_at=edit.now + retry_in_s)

        try:
            self._write(lease.job_id, decide)
        except (Fenced, NoSuchJob):
            return

    def end(
        self,
        lease: CommitLease,
        event: Event,
        *,
        snapshot_id: int | None = None,
        error: ErrorInfo | None = None,
    ) -> Job:
        refuse_end(event)

        def decide(edit: Edit) -> None:
            record = edit.record
            current = (record.generation, record.commit_epoch) == (lease.generation, lease.epoch)
            if current and record.state == after(State.COMMITTING, event):
                return
            refuse_lost_commit(record, lease)
            edit.move(
                event,
                detail=how_it_ended(snapshot_id, error),
                worker=lease.worker,
                snapshot_id=snapshot_id,
                error=error_json(error),
                commit_owner=None,
            )
            if event is Event.COMMITTED:
                self._supersede(edit)

        return self._job(self._write(lease.job_id, decide)[1])

    def _supersede(self, edit: Edit) -> None:
        """The jobs whose files this one has replaced give up what they hold. They are of the same scope."""
        replaced = self._frozen_of(edit.record).plan.replaces
        if not replaced:
            return
        _, holders = self._holders(edit.record.scope)
        for record in holders:
            if record.commit_id in replaced and record.job_id != edit.record.job_id:
                other = Edit(self, self._look(record.job_id), cached=False)
                other.change(holds=False)
                other.note("superseded", f"replaced by job {edit.record.job_id}")
                edit.others.append(other)
