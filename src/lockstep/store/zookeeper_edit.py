"""One attempt to change a job of the ZooKeeper store: what was read, and what shall be written."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from lockstep.errors import Invalid
from lockstep.job import ENDED, Event, HistoryEntry, State, after
from lockstep.store.rules import paced_from, what_was_sent
from lockstep.store.zookeeper_layout import PAGE, Entry, Layout, Page, Record, encoded_note
from lockstep.store.zookeeper_session import Node, Writes

_PAGES_KEPT: Final = 64


class Ghost(Exception):
    """Nodes of a job's tasks are missing."""


@dataclass(frozen=True)
class Seen:
    """A job as this client saw or wrote it last. A write based on it is taken only if it still holds."""

    record: Record
    version: int
    born: int = 0
    """When the record was created, as ZooKeeper counts: an id may be used again after a deletion by hand."""
    pages: dict[int, tuple[Page, int]] = field(default_factory=dict)


class Pages(Protocol):
    """Where an edit gets what it has not seen yet."""

    def now(self) -> float: ...

    def page_of(self, seen: Seen, number: int) -> Page:
        """Raises: Ghost."""
        ...


class Edit:
    """One attempt to change one job: what was read, and what shall be written in one transaction."""

    def __init__(self, records: Pages, seen: Seen, *, cached: bool) -> None:
        self._records = records
        self.seen = seen
        self.cached = cached
        self.before = seen.record
        self.record = seen.record
        self.now = records.now()
        self.others: list[Edit] = []
        self.scopes: dict[str, Node | None] = {}
        """Nodes of scopes on which a decision was based: only in that version may they be written."""
        self.chunks: list[tuple[str, bytes]] = []
        self.notes: list[tuple[int, HistoryEntry]] = []
        self._pages: dict[int, Page] = {}
        self._touched: set[int] = set()
        self._written_anyway = False

    @property
    def pages_read(self) -> set[int]:
        return set(self._pages)

    @property
    def changed(self) -> bool:
        return bool(
            self._written_anyway or self.record != self.before or self._touched or self.notes or self.others
        )

    # Tasks

    def page(self, number: int) -> Page:
        """The page of the current stage. Raises: Ghost if it should be there and is not."""
        if number not in self._pages:
            if number * PAGE >= self.before.fresh:
                page = Page(number, self.record.generation, [])
            else:
                page = self._records.page_of(self.seen, number).copy()
                page.settle(self.record)
            self._pages[number] = page
        return self._pages[number]

    def entry(self, index: int) -> Entry:
        return self.page(index // PAGE).entry(index)

    def put(self, index: int, entry: Entry) -> None:
        self.page(index // PAGE).put(index, entry)
        self._touched.add(index // PAGE)

    def past_entry(self, stage: str, index: int) -> Entry | None:
        """A task of a stage that is over, if it is there."""
        begun, _, place = self.record.begun(stage)
        if not 0 <= index < begun:
            return None
        try:
            page = self._records.page_of(Seen(replace(self.record, place=place), -1), index // PAGE)
        except Ghost:
            return None
        return page.entry(index)

    def undo(self) -> None:
        """Forget all changes so far."""
        self.record = self.before
        self.chunks, self.notes, self.others = [], [], []
        self._pages, self._touched = {}, set()

    # The record

    def touch(self) -> None:
        """Write the record even if nothing in it has changed."""
        self._written_anyway = True

    def change(self, **changes: Any) -> None:
        self.record = replace(self.record, **changes)

    def add(self, **deltas: int) -> None:
        self.change(**{name: getattr(self.record, name) + delta for name, delta in deltas.items()})

    def note(self, event: str, detail: str = "", worker: str | None = None) -> None:
        """Append to the job's history, with the state that it is in now."""
        entry = HistoryEntry(
            self.now,
            str(event),
            State(self.record.state),
            self.record.generation,
            detail.encode("utf-8", "replace").decode(),
            worker,
        )
        self.notes.append((self.record.events, entry))
        self.add(events=1)

    def move(self, event: Event, *, detail: str = "", worker: str | None = None, **changes: Any) -> None:
        """Apply `event` as TRANSITIONS says, and note it in the history.

        A job that ends without having published gives up what it holds, and the leases of its tasks are void.
        Raises: Invalid if the event is forbidden in this state.
        """
        state = after(State(self.record.state), event)
        if state is None:
            raise Invalid(f"job {self.record.job_id} is {self.record.state}: {event} is not possible")
        changes["state"] = state.value
        if state in ENDED:
            changes["finished_at"] = self.now
        if state in (State.FAILED, State.KILLED):
            void = {number: [0, *rest] for number, (_, *rest) in self.record.open.items()}
            changes |= {"holds": False, "ahead_rows": 0, "ahead_bytes": 0, "open": void}
        self.change(**changes)
        self.note(event, detail, worker)

    def run(self, worker: str | None) -> None:
        """A pending job runs as soon as one of its tasks does."""
        if self.record.state == State.PENDING:
            started_at = self.now if self.record.started_at is None else self.record.started_at
            paced = paced_from(self.now, self.record.rows_done)
            self.move(Event.START, worker=worker, started_at=started_at, **paced)

    def commit_if_done(self, worker: str | None = None) -> None:
        """A job that is not paused and whose last stage is done goes on to `committing`."""
        record = self.record
        done = record.stage == record.last_stage and record.tasks_done == record.tasks_total
        if done and record.state in (State.PENDING, State.RUNNING):
            self.move(Event.ALL_TASKS_DONE, worker=worker)

    def begin_anew(self) -> None:
        """A failed job waits again, with the next generation. Its tasks follow when they are looked at."""
        self.move(
            Event.RETRY,
            detail=what_was_sent(self.record.commit_attempts),
            generation=self.record.generation + 1,
            holds=True,
            attempts=0,
            started_at=None,
            finished_at=None,
            snapshot_id=None,
            error=None,
            kill_requested=False,
            commit_owner=None,
            commit_free_at=0.0,
            commit_started_at=None,
            commit_attempts=0,
            open={number: [0, 0, 0.0] for number in self.record.open},
        )

    # Writing

    def add_to(self, writes: Writes, layout: Layout, mark: str) -> None:
        """Add all but indexes and scopes; the record comes first."""
        body = self.record.body
        pages = self._settled_pages()
        self.change(updated_at=self.now, last_write=mark)
        writes.set(layout.job(self.record.job_id), self.record.encoded(), self.seen.version)
        for number, page in pages.items():
            path = layout.page(body, self.before.place, number)
            known = self.seen.pages.get(number)
            if known is None:
                writes.create(path, page.encoded())
            else:
                writes.set(path, page.encoded(), known[1])
        for path, data in self.chunks:
            writes.create(path, data)
        for number, entry in self.notes:
            writes.create(f"{layout.history(body)}/{number}", encoded_note(entry))

    def _settled_pages(self) -> dict[int, Page]:
        """The pages to be written, after what became of the job; the record gets their summaries."""
        touched = {number: self._pages[number] for number in sorted(self._touched)}
        if touched and self.record.place == self.before.place:
            summaries = dict(self.record.open)
            for number, page in touched.items():
                page.settle(self.record)
                summary = page.summary()
                if summary is None:
                    summaries.pop(str(number), None)
                else:
                    summaries[str(number)] = summary
            self.change(open=summaries)
        return touched

    def written(self, version: int) -> Seen:
        """The job as it is now, after the transaction."""
        pages = dict(self.seen.pages) if self.record.place == self.before.place else {}
        for number in self._touched:
            known = self.seen.pages.get(number)
            pages[number] = (self._pages[number], 0 if known is None else known[1] + 1)
        if len(pages) > _PAGES_KEPT:
            pages = {number: page for number, page in pages.items() if str(number) in self.record.open}
        return Seen(self.record, version, self.seen.born, pages)
