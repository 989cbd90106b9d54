"""Jobs of the ZooKeeper store: reading them, and changing one by compare-and-set on its record.

Whatever changes anything of a job also writes its record, and names the version of the record that it has
read. So one who has read the record and then other nodes of the job, and whose write is taken, has seen all
of them as they were at one instant.
"""

from __future__ import annotations

import json
import logging
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from lockstep.errors import Corrupt, ErrorInfo, Invalid, LockstepError, Retryable
from lockstep.job import Job, Kind, State, TaskSpec, TaskState
from lockstep.runtime import SYSTEM_CLOCK, Clock, backoff_s, new_id
from lockstep.store.recent import Recent
from lockstep.store.rules import Frozen, damaged_plan, missing_plan, no_such_job
from lockstep.store.zookeeper_edit import Edit, Ghost, Seen
from lockstep.store.zookeeper_layout import (
    Layout,
    Page,
    Record,
    decoded_record,
    decoded_specs,
    fingerprint_of,
    first_part,
    unpacked,
)
from lockstep.store.zookeeper_session import Lost, Moved, Node, Session, Writes

_LOG: Final = logging.getLogger("lockstep.store")
_JOBS_KEPT: Final = 256
_CONFLICTS: Final = 400
_OUTAGES: Final = 5
_TOO_LARGE_BYTES: Final = 1_000_000
_DAMAGE: Final = (ValueError, KeyError, TypeError, AttributeError, zlib.error)

T = TypeVar("T")


class Patience:
    """How often a verb decides anew before it gives up."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._conflicts = 0
        self._outages = 0

    def after(self, error: Exception) -> None:
        """Wait a little. Raises: Retryable when it is enough."""
        if isinstance(error, Lost):
            self._outages += 1
        else:
            self._conflicts += 1
            SYSTEM_CLOCK.sleep(backoff_s(self._conflicts, 0.001, 0.03))
        if self._conflicts > _CONFLICTS or self._outages > _OUTAGES:
            reason = "others change it all the time" if self._conflicts > _CONFLICTS else "replies get lost"
            raise Retryable(f"{self._what} could not be changed: {reason}") from error


class Records:
    """Reading and changing jobs."""

    def __init__(self, url: str, clock: Clock) -> None:
        self._session = Session(url, clock)
        self._layout = Layout(self._session.address.root)
        self._seen: Recent[Seen] = Recent(_JOBS_KEPT)
        self._frozen: Recent[Frozen] = Recent(_JOBS_KEPT)
        self._specs: Recent[list[TaskSpec]] = Recent(_JOBS_KEPT)
        self._unreadable: dict[str, str] = {}
        # Threads of one process take turns, rather than to find out at the server that one of them was first.
        self._turns = [threading.Lock() for _ in range(64)]

    def now(self) -> float:
        return self._session.now()

    # Reading

    def _record(self, job_id: str) -> Record:
        """Raises: NoSuchJob; Corrupt if it is damaged."""
        return self._look(job_id).record

    def _look(self, job_id: str) -> Seen:
        [found] = self._look_up([job_id])
        if found is None:
            raise no_such_job(job_id)
        if isinstance(found, LockstepError):
            raise found
        return found

    def _look_up(self, ids: Sequence[str]) -> list[Seen | LockstepError | None]:
        """The jobs as they are now, in the order of `ids`; None for one that is not there."""
        nodes = self._session.get_many([self._layout.job(job_id) for job_id in ids])
        return [self._noticed(job_id, node) for job_id, node in zip(ids, nodes, strict=True)]

    def _noticed(self, job_id: str, node: Node | None) -> Seen | LockstepError | None:
        if node is None:
            self._seen.forget(job_id)
            return None
        known = self._seen.recall(job_id)
        if known is not None and (known.born, known.version) == (node.born, node.version):
            return known
        try:
            seen = Seen(decoded_record(job_id, node.data), node.version, node.born)
        except Corrupt as error:
            return error
        if known is None or (known.born, known.version) < (node.born, node.version):
            self._seen.keep(job_id, seen)
        return seen

    def _readable(self, ids: Iterable[str]) -> list[Record]:
        """Those of the jobs that can be read; others are left out, and damaged ones reported."""
        wanted = list(ids)
        found = []
        for job_id, seen in zip(wanted, self._look_up(wanted), strict=True):
            if isinstance(seen, LockstepError):
                self._warn(job_id, seen)
            elif seen is not None:
                found.append(seen.record)
        return found

    def page_of(self, seen: Seen, number: int) -> Page:
        """A page of the job's current stage, as it is stored. Raises: Ghost."""
        self._load_pages([(seen, number)])
        if number not in seen.pages:
            raise Ghost(f"page {number}")
        return seen.pages[number][0]

    def _load_pages(self, wanted: Sequence[tuple[Seen, int]]) -> None:
        """Read the pages that are not known yet; one that is missing or damaged stays unknown."""
        missing = [(seen, number) for seen, number in wanted if number not in seen.pages]
        paths = [self._layout.page(seen.record.body, seen.record.place, number) for seen, number in missing]
        for (seen, number), node in zip(missing, self._session.get_many(paths), strict=True):
            self._keep_page(seen, number, node)

    def _keep_page(self, seen: Seen, number: int, node: Node | None) -> None:
        try:
            if node is not None:
                seen.pages[number] = (Page.of(number, node.data), node.version)
        except _DAMAGE as error:
            self._warn(seen.record.job_id, Corrupt(f"page {number} of its tasks is damaged ({error!r})"))

    def specs_of(self, record: Record, place: str, number: int) -> list[TaskSpec]:
        """The descriptors of a page. Raises: Ghost if they are missing or damaged."""
        path = self._layout.specs(record.body, place, number)
        known = self._specs.recall(path)
        if known is None:
            [blob] = self._blobs([path])
            try:
                if blob is None:
                    raise Ghost(path)
                known = decoded_specs(blob)
            except _DAMAGE as error:
                raise Ghost(path) from error
            self._specs.keep(path, known)
        return known

    def _blobs(self, paths: Sequence[str]) -> list[bytes | None]:
        """Values that may be larger than a node; None where one is missing in part."""
        found: list[bytes | None] = []
        for path, node in zip(paths, self._session.get_many(paths), strict=True):
            found.append(None if node is None else self._whole(path, node.data))
        return found

    def _whole(self, path: str, data: bytes) -> bytes | None:
        try:
            count, first = first_part(data)
        except ValueError:
            return b""
        rest = self._session.get_many([f"{path}/{number}" for number in range(1, count)])
        parts = [node.data for node in rest if node is not None]
        return None if len(parts) < count - 1 else b"".join([first, *parts])

    def _frozen_of(self, record: Record) -> Frozen:
        """Raises: Incompatible or Corrupt if it cannot be read."""
        known = self._frozen_or_error([record])[record.job_id]
        if isinstance(known, LockstepError):
            raise known
        return known

    def _frozen_or_error(self, records: Sequence[Record]) -> dict[str, Frozen | LockstepError]:
        found: dict[str, Frozen | LockstepError] = {}
        unknown = []
        for record in records:
            known = self._frozen.recall(record.body)
            if known is None:
                unknown.append(record)
            else:
                found[record.job_id] = known
        blobs = self._blobs([self._layout.plan(record.body) for record in unknown])
        for record, blob in zip(unknown, blobs, strict=True):
            read = _thawed(record.job_id, blob)
            found[record.job_id] = read
            if isinstance(read, Frozen):
                self._frozen.keep(record.body, read)
        return found

    def _warn(self, job_id: str, error: LockstepError) -> None:
        """Say once that a job is left alone."""
        if self._unreadable.get(job_id) != error.message:
            self._unreadable[job_id] = error.message
            _LOG.warning("job %s is left alone: %s", job_id, error.message)

    def _job(self, record: Record) -> Job:
        """Raises: Incompatible or Corrupt if its plan cannot be read."""
        self._frozen_of(record)
        return self._jobs([record])[0]

    def _jobs(self, records: Sequence[Record]) -> list[Job]:
        """One that cannot be read is left out with a warning: it must not hide the others."""
        now = self.now()
        frozen = self._frozen_or_error(records)
        workers = self._workers(records, now)
        found = []
        for record in records:
            known = frozen[record.job_id]
            if isinstance(known, LockstepError):
                self._warn(record.job_id, known)
            else:
                found.append(_as_job(record, known, workers[record.job_id], now))
        return found

    def _workers(self, records: Sequence[Record], now: float) -> dict[str, set[str]]:
        """Who holds a lease on a task, by job."""
        found: dict[str, set[str]] = {record.job_id: set() for record in records}
        wanted = []
        for record in records:
            known = self._seen.recall(record.job_id)
            seen = known if known is not None and known.record is record else Seen(record, -1)
            wanted += [(seen, int(number)) for number, about in record.open.items() if about[0]]
        self._load_pages(wanted)
        for seen, number in wanted:
            if number in seen.pages:
                for _, entry in seen.pages[number][0].open():
                    if entry.state is TaskState.LEASED and entry.free_at > now and entry.owner is not None:
                        found[seen.record.job_id].add(entry.owner)
        return found

    # Changing

    def _write(self, job_id: str, decide: Callable[[Edit], T]) -> tuple[T, Record]:
        """Let `decide` change the job, and write all that it changed in one transaction.

        It is asked again when the job has moved meanwhile. A refusal, or an answer that changes nothing, is
        given only after a look at the newest state.
        Raises: NoSuchJob; Retryable if the store is away or others change the job all the time; what `decide`
        raises.
        """
        with self._turns[hash(job_id) % len(self._turns)]:
            return self._decide_until_written(job_id, decide)

    def _decide_until_written(self, job_id: str, decide: Callable[[Edit], T]) -> tuple[T, Record]:
        patience = Patience(f"job {job_id}")
        unanswered: dict[str, tuple[T, Record]] = {}
        seen = self._seen.recall(job_id)
        cached = seen is not None
        while True:
            if seen is None:
                seen, cached = self._look(job_id), False
            if seen.record.last_write in unanswered:
                # The reply got lost, not the request. It may even have arrived after we looked.
                return unanswered[seen.record.last_write]
            edit = Edit(self, seen, cached=cached)
            seen = None
            try:
                answer = decide(edit)
            except LockstepError:
                if not cached:
                    raise
                continue
            if not edit.changed:
                if not cached:
                    return answer, edit.record
                continue
            try:
                self._commit(edit)
            except Lost as error:
                unanswered[edit.record.last_write] = (answer, edit.record)
                patience.after(error)
                continue
            except Moved as error:
                patience.after(error)
                seen, cached = self._look_again(edit), False
                continue
            return answer, edit.record

    def _look_again(self, edit: Edit) -> Seen | None:
        """The job after it has moved, with the pages that the edit needed, in one go: others are quick too.

        The refusal of a write is as new as any other answer of the server, so this needs no `sync`.
        """
        before = edit.before
        numbers = sorted(edit.seen.pages.keys() & edit.pages_read)
        paths = [self._layout.page(before.body, before.place, number) for number in numbers]
        node, *pages = self._session.get_many([self._layout.job(before.job_id), *paths], newest=False)
        found = self._noticed(before.job_id, node)
        if not isinstance(found, Seen):
            return None
        if (found.record.body, found.record.place) != (before.body, before.place):
            return None
        for number, page in zip(numbers, pages, strict=True):
            self._keep_page(found, number, page)
        return found

    def _commit(self, edit: Edit) -> None:
        """Write an edit, and those of other jobs that belong to it. Raises: Moved, Lost."""
        writes = Writes()
        mark = new_id()[-12:]
        edits = [edit, *edit.others]
        for one in edits:
            one.add_to(writes, self._layout, mark)
        self._add_indexes(writes, edits)
        self._add_scopes(writes, edits)
        if writes.size_bytes > _TOO_LARGE_BYTES:
            raise Invalid(
                f"job {edit.record.job_id}: {writes.size_bytes} bytes at once are more than ZooKeeper takes",
                hint="use a job store on PostgreSQL for jobs like this",
            )
        try:
            done = self._session.commit(writes)
        except Moved as error:
            if error.missing:
                self._heal(writes)
            raise
        versions = dict(zip((step[1] for step in writes.steps), done, strict=True))
        for one in edits:
            version = versions[self._layout.job(one.record.job_id)]
            self._seen.keep(one.record.job_id, one.written(version))

    def _heal(self, writes: Writes) -> None:
        """Make folders again that were deleted by hand: a job must be stoppable whatever it has lost."""
        wanted: set[str] = set()
        for verb, path, _, _ in writes.steps:
            while verb == "create" and (path := path.rpartition("/")[0]) != self._layout.root:
                wanted.add(path)
        folders = sorted(wanted)
        missing = Writes()
        for path, node in zip(folders, self._session.get_many(folders), strict=True):
            if node is None:
                missing.create(path)
        if missing.steps:
            try:
                self._session.commit(missing)
            except (Moved, Lost):
                return  # somebody else does the same; the write is tried again anyway

    def _add_indexes(self, writes: Writes, edits: Sequence[Edit]) -> None:
        old, new = set[str](), set[str]()
        for edit in edits:
            old |= self._layout.indexes(edit.before)
            new |= self._layout.indexes(edit.record)
        gone, come = sorted(old - new), sorted(new - old)
        if not gone and not come:
            return
        # One that was deleted or made by hand must not stop the job.
        there = self._session.get_many([*gone, *come])
        for path, node in zip(gone, there, strict=False):
            if node is not None:
                writes.delete(path)
        for path, node in zip(come, there[len(gone) :], strict=True):
            if node is None:
                writes.create(path)

    def _add_scopes(self, writes: Writes, edits: Sequence[Edit]) -> None:
        moving = [edit for edit in edits if edit.before.holds != edit.record.holds]
        for scope in sorted({edit.record.scope for edit in moving}):
            mine = [edit.record for edit in moving if edit.record.scope == scope]
            gone = [record.job_id for record in mine if not record.holds]
            come = [record.job_id for record in mine if record.holds]
            decided = [edit.scopes[scope] for edit in edits if scope in edit.scopes]
            node = decided[0] if decided else self._session.get(self._layout.scope(scope))
            self._change_scope(writes, scope, node, gone=gone, come=come)

    def _change_scope(
        self,
        writes: Writes,
        scope: str,
        node: Node | None,
        *,
        gone: Sequence[str] = (),
        come: Sequence[str] = (),
    ) -> None:
        path = self._layout.scope(scope)
        ids = [job_id for job_id in _ids_in(path, node) if job_id not in gone]
        ids += [job_id for job_id in come if job_id not in ids]
        if node is None:
            if ids:
                writes.create(path, json.dumps(ids).encode())
        elif ids:
            writes.set(path, json.dumps(ids).encode(), node.version)
        else:
            writes.delete(path, node.version)

    def _holders(self, scope: str) -> tuple[Node | None, list[Record]]:
        """The scope's node, and the jobs that hold rows of it, oldest first."""
        node = self._session.get(self._layout.scope(scope))
        return node, self._holders_in(scope, node)

    def _holders_in(self, scope: str, node: Node | None) -> list[Record]:
        ids = _ids_in(self._layout.scope(scope), node)
        found = []
        for seen in self._look_up(ids):
            if isinstance(seen, LockstepError):
                # What cannot be read may hold these rows: only exactly-once is more important than going on.
                raise seen
            if seen is not None and seen.record.holds:
                found.append(seen.record)
        return sorted(found, key=lambda record: (record.created_at, record.job_id))


def _ids_in(path: str, node: Node | None) -> list[str]:
    if node is None:
        return []
    try:
        return [str(job_id) for job_id in json.loads(node.data)]
    except _DAMAGE as error:
        raise Corrupt(
            f"the store's node {path} is damaged ({error!r}): nobody knows which jobs hold these rows",
            hint='set it to the ids of the jobs of this partition, as ["id", …]',
        ) from error


def _thawed(job_id: str, blob: bytes | None) -> Frozen | LockstepError:
    if blob is None:
        return missing_plan(job_id)
    try:
        return Frozen.from_json(unpacked(blob))
    except (LockstepError, *_DAMAGE) as error:
        return damaged_plan(job_id, error)


def _as_job(record: Record, frozen: Frozen, workers: set[str], now: float) -> Job:
    committing = record.state == State.COMMITTING and record.commit_free_at > now
    committer = record.commit_owner if committing else None
    return Job(
        job_id=record.job_id,
        request_id=record.request_id,
        kind=Kind(record.kind),
        state=State(record.state),
        generation=record.generation,
        plan=frozen.plan,
        holding=frozen.holding,
        stage=record.stage,
        tasks_total=record.tasks_total,
        tasks_done=record.tasks_done,
        tasks_waiting_for_retry=sum(about[1] for about in record.open.values()),
        rows_done=record.rows_done,
        bytes_done=record.bytes_done,
        files=record.files,
        attempts=record.attempts,
        created_at=record.created_at,
        updated_at=record.updated_at,
        started_at=record.started_at,
        finished_at=record.finished_at,
        snapshot_id=record.snapshot_id,
        workers=tuple(sorted(workers | ({committer} if committer is not None else set()))),
        kill_requested=record.kill_requested,
        released=record.released,
        commit_started_at=record.commit_started_at,
        commit_attempts=record.commit_attempts,
        error=ErrorInfo.from_json(record.error),
        fingerprint=fingerprint_of(record) if record.stage == record.last_stage else None,
    )
