"""Jobs of the ZooKeeper store as they are read: records, pages of tasks, descriptors, plans."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Sequence
from typing import Final

from lockstep.errors import Corrupt, ErrorInfo, LockstepError
from lockstep.job import Job, TaskSpec, TaskState
from lockstep.runtime import Clock
from lockstep.store.recent import Recent
from lockstep.store.rules import Frozen, as_job, damaged_plan, missing_plan, no_such_job
from lockstep.store.zookeeper_edit import Ghost, Seen
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
from lockstep.store.zookeeper_session import Node, Session

_LOG: Final = logging.getLogger("lockstep.store")
_JOBS_KEPT: Final = 256
DAMAGE: Final = (ValueError, KeyError, TypeError, AttributeError, zlib.error)
"""What reading a damaged value may raise."""


class Reader:
    """Reading jobs; what was seen last is kept."""

    def __init__(self, url: str, clock: Clock) -> None:
        self._session = Session(url, clock)
        self._layout = Layout(self._session.address.root)
        self._seen: Recent[Seen] = Recent(_JOBS_KEPT)
        self._frozen: Recent[Frozen] = Recent(_JOBS_KEPT)
        self._specs: Recent[list[TaskSpec]] = Recent(_JOBS_KEPT)
        self._unreadable: dict[str, str] = {}

    def now(self) -> float:
        return self._session.now()

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
        except DAMAGE as error:
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
            except DAMAGE as error:
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
                waiting = sum(about[1] for about in record.open.values())
                error = ErrorInfo.from_json(record.error)
                whole = fingerprint_of(record)
                found.append(as_job(record, known, workers[record.job_id], waiting, now, error, whole))
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


def _thawed(job_id: str, blob: bytes | None) -> Frozen | LockstepError:
    if blob is None:
        return missing_plan(job_id)
    try:
        return Frozen.from_json(unpacked(blob))
    except (LockstepError, *DAMAGE) as error:
        return damaged_plan(job_id, error)
