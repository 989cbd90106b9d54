"""The verb of the ZooKeeper store that hands out tasks, fairly between jobs."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from lockstep.errors import LockstepError, NoSuchJob, Retryable
from lockstep.job import PLAN_FORMAT, Event, Lease, State, Task, TaskState
from lockstep.store import Claim
from lockstep.store.rules import missing_tasks, paced_from, silent
from lockstep.store.zookeeper_edit import Edit, Ghost, Seen
from lockstep.store.zookeeper_layout import PAGE, Record, as_task, error_json, id_listed
from lockstep.store.zookeeper_records import Records

_ROUNDS: Final = 20
_TASKS_AT_ONCE: Final = 256
_RUNNABLE: Final = (State.PENDING, State.RUNNING)


class ClaimVerb(Records):
    def claim(
        self, worker: str, slots: int, lease_s: float, job_ids: Collection[str] | None = None
    ) -> list[Claim]:
        """One transaction for each job. The job with the fewest leases comes first, then the oldest."""
        claims: list[Claim] = []
        for _ in range(_ROUNDS):
            if len(claims) >= slots:
                break
            turns = self._share_out(slots - len(claims), job_ids)
            if not turns:
                break
            for job_id, count in turns.items():
                try:
                    claims += self._claim_of(job_id, worker, min(count, _TASKS_AT_ONCE), lease_s)
                except Retryable:
                    if claims:
                        return claims
                    raise
        return claims

    def _share_out(self, slots: int, job_ids: Collection[str] | None) -> Counter[str]:
        """How many tasks to take from which job."""
        now = self.now()
        turns: list[tuple[int, float, str]] = []
        left: dict[str, int] = {}
        for record, leases, free in self._candidates(slots, job_ids, now):
            left[record.job_id] = free
            turns.append((leases, record.created_at, record.job_id))
        heapq.heapify(turns)
        shares: Counter[str] = Counter()
        while turns and shares.total() < slots:
            leases, created_at, job_id = heapq.heappop(turns)
            if left[job_id] > 0:
                left[job_id] -= 1
                shares[job_id] += 1
                heapq.heappush(turns, (leases + 1, created_at, job_id))
        return shares

    def _candidates(
        self, slots: int, job_ids: Collection[str] | None, now: float
    ) -> Iterator[tuple[Record, int, int]]:
        """Jobs with free tasks, with their leases and how many are free.

        All that run, and of those that are pending the oldest ones: no more than `slots`.
        """
        if job_ids is not None:
            yield from self._with_free_tasks(sorted(set(job_ids)), now)
            return
        pending, running = self._session.children_many([self._layout.states(state) for state in _RUNNABLE])
        yield from self._with_free_tasks(map(id_listed, running), now)
        found = 0
        for start in range(0, len(pending), slots):
            for candidate in self._with_free_tasks(map(id_listed, pending[start : start + slots]), now):
                found += 1
                yield candidate
            if found >= slots:
                return

    def _with_free_tasks(self, ids: Iterable[str], now: float) -> Iterator[tuple[Record, int, int]]:
        records = [
            record
            for record in self._readable(ids)
            if record.state in _RUNNABLE and record.plan_format <= PLAN_FORMAT
        ]
        frozen = self._frozen_or_error(records)
        for record in records:
            known = frozen[record.job_id]
            if isinstance(known, LockstepError):
                self._warn(record.job_id, known)
                continue
            leases, free = self._count(record, now)
            if free:
                yield record, leases, free

    def _count(self, record: Record, now: float) -> tuple[int, int]:
        """Leases that have not run out, and tasks that are free. One whose page is missing counts as free,
        so that a claim finds out."""
        known = self._seen.recall(record.job_id)
        seen = known if known is not None and known.record is record else Seen(record, -1)
        due = [
            int(number) for number, about in record.open.items() if about[2] is not None and about[2] <= now
        ]
        leases = sum(about[0] for number, about in record.open.items() if int(number) not in due)
        free = record.tasks_total - record.fresh
        self._load_pages([(seen, number) for number in due])
        for number in due:
            if number not in seen.pages:
                free += 1
                continue
            page = seen.pages[number][0].copy()
            page.settle(record)
            for _, entry in page.open():
                if entry.state is not TaskState.FAILED and entry.free_at <= now:
                    free += 1
                elif entry.state is TaskState.LEASED:
                    leases += 1
        return leases, free

    def _claim_of(self, job_id: str, worker: str, count: int, lease_s: float) -> list[Claim]:
        def decide(edit: Edit) -> list[tuple[Lease, Task]]:
            if edit.record.state not in _RUNNABLE:
                return []
            try:
                picked = [_lease(self, edit, index, worker, lease_s) for index in _free_tasks(edit, count)]
            except Ghost:
                _fail_ghost(edit)
                return []
            if picked and silent(edit.before, edit.now, lease_s):
                edit.change(**paced_from(edit.now, edit.record.rows_done))
            if picked:
                edit.run(worker)
            return picked

        try:
            picked, record = self._write(job_id, decide)
        except NoSuchJob:
            return []
        if not picked:
            return []
        job = self._job(record)
        return [Claim(lease, job, task) for lease, task in picked]


def _free_tasks(edit: Edit, count: int) -> Sequence[int]:
    """Those given back first, then those never touched, then those whose time has come. Raises: Ghost."""
    record = edit.record
    due = [
        (entry.free_at, index)
        for number, about in record.open.items()
        if about[2] is not None and about[2] <= edit.now
        for index, entry in edit.page(int(number)).open()
        if entry.state is not TaskState.FAILED and entry.free_at <= edit.now
    ]
    due.sort()
    given_back = [index for free_at, index in due if free_at == 0]
    fresh = range(record.fresh, min(record.tasks_total, record.fresh + count))
    return [*given_back, *fresh, *(index for free_at, index in due if free_at != 0)][:count]


def _lease(records: Records, edit: Edit, index: int, worker: str, lease_s: float) -> tuple[Lease, Task]:
    record = edit.record
    specs = records.specs_of(record, record.place, index // PAGE)
    if index % PAGE >= len(specs):
        raise Ghost(f"task {index}")
    entry = edit.entry(index)
    leased = replace(
        entry.free(),
        state=TaskState.LEASED,
        epoch=entry.epoch + 1,
        owner=worker,
        free_at=edit.now + lease_s,
        # After a lease that ran out the task's deadline begins anew: the time since then is not the task's.
        started_at=None if entry.state is TaskState.LEASED else entry.started_at,
    )
    edit.put(index, leased)
    edit.change(
        fresh=max(record.fresh, index + 1),
        ahead_rows=record.ahead_rows - entry.ahead_rows,
        ahead_bytes=record.ahead_bytes - entry.ahead_bytes,
    )
    lease = Lease(record.job_id, record.stage, index, leased.epoch, worker)
    return lease, as_task(record, record.stage, index, specs[index % PAGE], leased)


def _fail_ghost(edit: Edit) -> None:
    """A job whose open tasks are no longer in the store can never end by itself: fail it, and say why."""
    edit.undo()
    record = edit.record
    error = missing_tasks(record.stage, record.tasks_done, record.tasks_total)
    edit.move(Event.FAIL, detail=error.message, error=error_json(error))
