"""Changing a job of the ZooKeeper store, by compare-and-set on its record.

Whatever changes anything of a job also writes its record, and names the version of the record that it has
read. So one who has read the record and then other nodes of the job, and whose write is taken, has seen all
of them as they were at one instant.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from lockstep.errors import Corrupt, Invalid, LockstepError, Retryable
from lockstep.runtime import SYSTEM_CLOCK, Clock, backoff_s, new_id
from lockstep.store.zookeeper_edit import Edit, Seen
from lockstep.store.zookeeper_layout import Record
from lockstep.store.zookeeper_reader import DAMAGE, Reader
from lockstep.store.zookeeper_session import Lost, Moved, Node, Writes

_CONFLICTS: Final = 400
_OUTAGES: Final = 5
_TOO_LARGE_BYTES: Final = 1_000_000

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


class Records(Reader):
    """Reading and changing jobs."""

    def __init__(self, url: str, clock: Clock) -> None:
        super().__init__(url, clock)
        # Threads of one process take turns, rather than to find out at the server that one of them was first.
        self._turns = [threading.Lock() for _ in range(64)]

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
    except DAMAGE as error:
        raise Corrupt(
            f"the store's node {path} is damaged ({error!r}): nobody knows which jobs hold these rows",
            hint='set it to the ids of the jobs of this partition, as ["id", …]',
        ) from error
