"""The verb of the ZooKeeper store that forgets: jobs whose time has come, and what is left of broken ones."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final

from lockstep.errors import LockstepError
from lockstep.job import State
from lockstep.store.zookeeper_layout import Record, id_listed, time_listed, unquoted
from lockstep.store.zookeeper_records import Patience, Records
from lockstep.store.zookeeper_session import Lost, Moved, Writes

GHOST_S: Final = 3600.0
"""A body without a record is deleted when it is older: its creator may still be at work."""
_LOG: Final = logging.getLogger("lockstep.store")


class ExpireVerb(Records):
    def expire(self, ttl_s: float, swept: Collection[str] = ()) -> list[str]:
        """One transaction for each job. What is left of jobs that were written in part, or deleted by hand,
        goes too."""
        before = self.now() - ttl_s
        names = self._session.children(self._layout.expiring)
        due = [id_listed(name) for name in names if time_listed(name) < before]
        gone = [job_id for job_id in due if self._expire(job_id, before, job_id in swept)]
        self._clean_indexes()
        self._clean_bodies()
        return gone

    def _expire(self, job_id: str, before: float, swept: bool) -> bool:
        """Forget one job, if it is still to be forgotten."""
        patience = Patience(f"job {job_id}")
        unanswered: list[str] = []
        while True:
            [seen] = self._look_up([job_id])
            if seen is None and unanswered:
                self._drop_bodies(unanswered)
                return True
            if seen is None or isinstance(seen, LockstepError) or not _is_due(seen.record, before, swept):
                return False
            record = seen.record
            writes = Writes()
            writes.delete(self._layout.job(job_id), seen.version)
            indexes = sorted(self._layout.indexes(record))
            for path, node in zip(indexes, self._session.get_many(indexes), strict=True):
                if node is not None:
                    writes.delete(path)
            if record.holds:
                scope = self._session.get(self._layout.scope(record.scope))
                self._change_scope(writes, record.scope, scope, gone=[job_id])
            try:
                self._session.commit(writes)
            except (Moved, Lost) as error:
                if isinstance(error, Lost):
                    unanswered = [record.body]
                patience.after(error)
                continue
            self._seen.forget(job_id)
            self._drop_bodies([record.body])
            return True

    def _clean_indexes(self) -> None:
        """Entries of jobs whose record was deleted by hand."""
        folders = [*map(self._layout.states, State), self._layout.pinned, self._layout.expiring]
        listings = self._session.children_many(folders)
        # Listed after the indexes: a job made meanwhile must not look as if it had no record.
        jobs = {unquoted(name) for name in self._session.children(self._layout.jobs)}
        for folder, names in zip(folders, listings, strict=True):
            for name in names:
                if id_listed(name) not in jobs:
                    _LOG.warning(
                        "job %s is gone from the store: its entry in %s is deleted", id_listed(name), folder
                    )
                    self._session.delete_tree(f"{folder}/{name}")

    def _clean_bodies(self) -> None:
        """Bodies without a record: their creator died, or the record was deleted by hand."""
        bodies = self._session.children(self._layout.bodies)
        jobs = {unquoted(name) for name in self._session.children(self._layout.jobs)}
        owners = Counter(map(_owner, bodies))
        suspects = [name for name in bodies if _owner(name) not in jobs or owners[_owner(name)] > 1]
        if not suspects:
            return
        now = self._session.server_now()
        nodes = self._session.get_many([self._layout.body(name) for name in suspects])
        for name, node in zip(suspects, nodes, strict=True):
            if node is None or now - node.created_at < GHOST_S:
                continue
            [seen] = self._look_up([_owner(name)])
            if seen is None or (not isinstance(seen, LockstepError) and seen.record.body != name):
                _LOG.warning(
                    "job %s was written in part or deleted by hand: what is left of it is deleted",
                    _owner(name),
                )
                self._drop_bodies([name])

    def _drop_bodies(self, names: Iterable[str]) -> None:
        """Delete bodies. Each is marked first, so that nobody can make a record for it any more."""
        for name in names:
            path = self._layout.body(name)
            node = self._session.get(path)
            if node is None:
                continue
            writes = Writes()
            writes.set(path, b"deleted", node.version)
            try:
                self._session.commit(writes)
            except (Moved, Lost):
                continue  # somebody else deletes it, or a later cleaning does
            self._session.delete_tree(path)

    def _drop_marked(self, bodies: dict[str, Record]) -> None:
        """Forget those that somebody has begun to delete: they are written anew."""
        known = list(bodies.items())
        nodes = self._session.get_many([self._layout.body(record.body) for _, record in known])
        for (job_id, _), node in zip(known, nodes, strict=True):
            if node is None or node.version != 0:
                del bodies[job_id]


def _owner(body: str) -> str:
    return unquoted(body.rpartition("~")[0])


def _is_due(record: Record, before: float, swept: bool) -> bool:
    ended = record.state in (State.COMPLETED, State.KILLED) and record.released
    wrote = record.generation > 1 or record.started_at is not None
    if record.state == State.KILLED and wrote and not swept:
        return False
    return ended and record.finished_at is not None and record.finished_at < before
