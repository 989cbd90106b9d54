"""The job store on ZooKeeper: a verb reads, decides, and writes one transaction that checks what it read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from lockstep.errors import Corrupt, ErrorInfo, Incompatible, Invalid, LockstepError
from lockstep.job import Event, HistoryEntry, Holding, Job, NewJob, State, Task, after
from lockstep.runtime import SYSTEM_CLOCK, Clock, new_id
from lockstep.store.rules import (
    Frozen,
    counted,
    refuse_overlap,
    refuse_pause,
    refuse_resume,
    refuse_retry,
    refuse_stop,
    the_one,
    what_is_refused,
)
from lockstep.store.zookeeper_claim import ClaimVerb
from lockstep.store.zookeeper_commit import CommitVerbs
from lockstep.store.zookeeper_edit import Edit, Ghost
from lockstep.store.zookeeper_expire import ExpireVerb
from lockstep.store.zookeeper_layout import (
    FORMAT,
    PAGE,
    Entry,
    Record,
    as_task,
    decoded_note,
    encoded_note,
    error_json,
    id_listed,
    in_parts,
    listed,
    packed,
    quoted,
    unquoted,
)
from lockstep.store.zookeeper_records import Patience
from lockstep.store.zookeeper_session import Lost, Moved, Node, Writes
from lockstep.store.zookeeper_tasks import TaskVerbs

_LARGEST_CREATE_BYTES: Final = 900_000
_STEADY_LOOKS: Final = 5
_FRESH: Final = Entry()


class ZooKeeperStore(ClaimVerb, TaskVerbs, CommitVerbs, ExpireVerb):
    """A `JobStore` at `url`, for example `zookeeper://host1:2181,host2:2181/lockstep`.

    The server's time rules; a clock other than the system's, as tests have, rules in its place.
    Raises: Invalid if it cannot be opened, Incompatible if a newer version wrote it, Retryable if nobody
    answers.
    """

    def __init__(self, url: str, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(url, clock)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._session.close()

    def _open(self) -> None:
        """Make the folders of a new store, or check the version of the one that is there."""
        path = f"{self._layout.root}/version"
        patience = Patience(str(self._session.address))
        while (node := self._session.get(path)) is None:
            writes = Writes()
            names = self._layout.root.split("/")[1:]
            above = ["/" + "/".join(names[: depth + 1]) for depth in range(len(names))]
            wanted = [*above, *self._layout.folders()]
            for folder, found in zip(wanted, self._session.get_many(wanted), strict=True):
                if found is None:
                    writes.create(folder)
            writes.create(path, b"%d" % FORMAT)
            try:
                self._session.commit(writes)
            except (Moved, Lost) as error:
                patience.after(error)
        if not node.data.isdigit() or int(node.data) > FORMAT:
            raise Incompatible(
                f"the job store {self._session.address} has layout {node.data.decode(errors='replace')}; "
                f"this version of Lockstep knows {FORMAT}",
                hint="upgrade Lockstep on this machine; the store was left as it is",
            )

    # Making jobs

    def create(self, jobs: Sequence[NewJob]) -> list[Job]:
        """What is large is written ahead, unseen; one transaction makes all jobs visible, or none."""
        bodies: dict[str, Record] = {}
        patience = Patience("the new jobs")
        while True:
            known = self._known(jobs)
            if all(known):
                return [self.read(new.job_id) for new in jobs]
            if any(known):
                raise Invalid("some of these jobs exist already, others do not: nothing was created")
            try:
                return self._create(jobs, bodies)
            except (Moved, Lost) as error:
                patience.after(error)
            except LockstepError:
                self._drop_bodies(record.body for record in bodies.values())
                raise

    def _known(self, jobs: Sequence[NewJob]) -> list[bool]:
        """Which of them are there already. Raises: Invalid if one is of another request."""
        found = self._look_up([new.job_id for new in jobs])
        for new, seen in zip(jobs, found, strict=True):
            if isinstance(seen, LockstepError):
                raise seen
            if seen is not None and seen.record.request_id != new.request_id:
                raise Invalid(f"job id {new.job_id} is taken by another request: nothing was created")
        return [seen is not None for seen in found]

    def _create(self, jobs: Sequence[NewJob], bodies: dict[str, Record]) -> list[Job]:
        """Raises: Conflict; Moved or Lost, after which it may be tried again with the same bodies."""
        scopes = self._refuse_conflicts(jobs)
        self._refuse_too_many(self._publication(jobs, scopes, map(self._first_record, jobs)))
        self._drop_marked(bodies)
        ahead: list[tuple[str, bytes]] = []
        for new in jobs:
            if new.job_id not in bodies:
                bodies[new.job_id], nodes = self._body_nodes(new)
                ahead += nodes
        self._write_ahead(ahead)
        records = [bodies[new.job_id] for new in jobs]
        self._session.commit(self._publication(jobs, scopes, records))
        return self._jobs(records)

    def _publication(
        self, jobs: Sequence[NewJob], scopes: Mapping[str, Node | None], records: Iterable[Record]
    ) -> Writes:
        """What makes the jobs visible."""
        writes = Writes()
        for record in records:
            # Whoever cleans up marks a body before deleting it: a creator that slept is refused here.
            writes.check(self._layout.body(record.body), 0)
            writes.create(self._layout.job(record.job_id), record.encoded())
            for path in self._layout.indexes(record):
                writes.create(path)
        for scope, node in scopes.items():
            come = [new.job_id for new in jobs if new.holding.scope == scope]
            self._change_scope(writes, scope, node, come=come)
        return writes

    def _refuse_too_many(self, publication: Writes) -> None:
        # The names of bodies and places are not in it yet.
        if publication.size_bytes + 100 * len(publication.steps) > _LARGEST_CREATE_BYTES:
            raise Invalid(
                "these are more jobs at once than ZooKeeper takes in one transaction",
                hint="export fewer partitions at a time, or use a job store on PostgreSQL",
            )

    def _refuse_conflicts(self, jobs: Sequence[NewJob]) -> dict[str, Node | None]:
        """The nodes of the scopes as they were looked at. Raises: Conflict."""
        scopes = list(dict.fromkeys(new.holding.scope for new in jobs))
        found = self._session.get_many([self._layout.scope(scope) for scope in scopes])
        nodes = dict(zip(scopes, found, strict=True))
        held: dict[str, list[tuple[Record, Holding | None]]] = {}
        for scope, node in nodes.items():
            held[scope] = [(record, self._holding_of(record)) for record in self._holders_in(scope, node)]
        for new in jobs:
            scope = new.holding.scope
            refuse_overlap(what_is_refused(new.plan), new.job_id, new.holding, new.beside, held[scope])
            held[scope].append((self._first_record(new), new.holding))
        return nodes

    def _holding_of(self, record: Record) -> Holding | None:
        try:
            return self._frozen_of(record).holding
        except (Corrupt, Incompatible):
            return None

    def _first_record(self, new: NewJob, body: str = "") -> Record:
        stages = new.plan.stages
        now = self.now()
        done = not new.tasks
        return Record(
            job_id=new.job_id,
            request_id=new.request_id,
            kind=new.plan.kind.value,
            body=body,
            scope=new.holding.scope,
            plan_format=new.plan.format_version,
            stage=stages[-1] if done else stages[0],
            place="",
            last_stage=stages[-1],
            tasks_total=len(new.tasks),
            created_at=now,
            updated_at=now,
            state=(State.COMMITTING if done else State.PENDING).value,
            events=2 if done else 1,
        )

    def _body_nodes(self, new: NewJob) -> tuple[Record, list[tuple[str, bytes]]]:
        """A job's record, and all else that belongs to it, which nobody sees until the record is there."""
        body = f"{quoted(new.job_id)}~{new_id()[-12:]}"
        record = self._first_record(new, body)
        frozen = Frozen(new.plan, new.holding, new.beside)
        notes = [
            HistoryEntry(record.created_at, "create", State.PENDING, 1, counted(new.tasks)),
            HistoryEntry(record.created_at, str(Event.ALL_TASKS_DONE), State.COMMITTING, 1),
        ]
        nodes = [(self._layout.body(body), b"")]
        nodes += in_parts(self._layout.plan(body), packed(frozen.to_json()))
        nodes += [(self._layout.history(body), b""), (f"{self._layout.body(body)}/stages", b"")]
        for number, entry in enumerate(notes[: record.events]):
            nodes.append((f"{self._layout.history(body)}/{number}", encoded_note(entry)))
        place, of_stage = self._stage_nodes(body, record.stage, new.tasks)
        return replace(record, place=place), nodes + of_stage

    # Reading

    def read(self, job_id: str) -> Job:
        return self._job(self._record(job_id))

    def find(self, prefix: str) -> Job:
        names = sorted(unquoted(name) for name in self._session.children(self._layout.jobs))
        found = [name for name in names if prefix and name.startswith(prefix)]
        return self.read(the_one(prefix, found))

    def holders(self, scope: str) -> list[Job]:
        return self._jobs(self._holders(scope)[1])

    def tasks(self, job_id: str, stage: str | None = None) -> list[Task]:
        """As they are at one instant, unless the job is changed all the while."""
        for look in range(_STEADY_LOOKS):
            seen = self._look(job_id)
            stages = self._frozen_of(seen.record).plan.stages
            found = [
                task for name in stages if stage in (None, name) for task in self._tasks_of(seen.record, name)
            ]
            if look == _STEADY_LOOKS - 1 or self._look(job_id).version == seen.version:
                break
        return found

    def _tasks_of(self, record: Record, stage: str) -> Iterator[Task]:
        begun, _, place = record.begun(stage)
        total = record.tasks_total if stage == record.stage else begun
        pages = {page.number: page for page in self._pages(record, place, begun)}
        for number in range((total + PAGE - 1) // PAGE):
            page = pages.get(number)
            if page is None and number * PAGE < begun:
                continue
            if page is not None and stage == record.stage:
                page = page.copy()
                page.settle(record)
            try:
                specs = self.specs_of(record, place, number)
            except Ghost:
                continue
            for slot, spec in enumerate(specs):
                index = number * PAGE + slot
                yield as_task(record, stage, index, spec, _FRESH if page is None else page.entry(index))

    def history(self, job_id: str) -> list[HistoryEntry]:
        record = self._record(job_id)
        paths = [f"{self._layout.history(record.body)}/{number}" for number in range(record.events)]
        return [decoded_note(node.data) for node in self._session.get_many(paths) if node is not None]

    # Control

    def stop(self, job_id: str, event: Event, error: ErrorInfo | None = None) -> Job:
        """As the protocol says. A job whose plan cannot be read is stopped too, before that is raised."""
        refuse_stop(event)

        def decide(edit: Edit) -> None:
            record = edit.record
            if record.state == State.COMMITTING:
                if event is Event.KILL and not record.kill_requested:
                    edit.change(kill_requested=True)
                    edit.note("kill_requested")
            elif after(State(record.state), event) is not None:
                detail = "" if error is None else f"{error.cls}: {error.message}"
                reason: dict[str, Any] = {"error": error_json(error)} if record.live else {}
                edit.move(event, detail=detail, **reason)

        return self._job(self._write(job_id, decide)[1])

    def pause(self, job_id: str) -> Job:
        def decide(edit: Edit) -> None:
            refuse_pause(edit.record)
            if edit.record.state != State.PAUSED:
                edit.move(Event.PAUSE)

        return self._job(self._write(job_id, decide)[1])

    def resume(self, job_id: str) -> Job:
        def decide(edit: Edit) -> None:
            refuse_resume(edit.record)
            if edit.record.state == State.PAUSED:
                edit.move(Event.RESUME)
                edit.commit_if_done()

        return self._job(self._write(job_id, decide)[1])

    def retry(self, job_id: str) -> Job:
        """As the protocol says. Tasks are made to wait when somebody next looks at them."""

        def decide(edit: Edit) -> None:
            record = edit.record
            if record.live and record.generation > 1:
                return
            refuse_retry(record)
            frozen = self._frozen_of(record)
            edit.scopes[record.scope], holders = self._holders(record.scope)
            held = [(other, self._holding_of(other)) for other in holders]
            refuse_overlap(f"cannot retry job {job_id}", job_id, frozen.holding, frozen.beside, held)
            edit.begin_anew()
            edit.commit_if_done()

        return self._job(self._write(job_id, decide)[1])

    def released(self, job_id: str) -> None:
        self._write(job_id, lambda edit: edit.change(released=True))

    def unreleased(self) -> list[Job]:
        names = self._session.children(self._layout.pinned)
        return self._jobs(self._readable(map(id_listed, names)))

    def _with_moving(self, names: list[str]) -> list[str]:
        """A job that moves from state to state while they are listed may be in none of the listings."""
        known = set(map(id_listed, names))
        there = map(unquoted, self._session.children(self._layout.jobs))
        missed = [job_id for job_id in there if job_id not in known]
        if not missed:
            return names
        return sorted(
            {*names, *(listed(record.created_at, record.job_id) for record in self._readable(missed))},
            reverse=True,
        )

    # Last in the class: after it, `list` is no longer the type for a type checker.
    def list(self, states: Collection[State] | None = None, limit: int | None = None) -> list[Job]:
        wanted = [state for state in State if states is None or state in states]
        listings = self._session.children_many([self._layout.states(state) for state in wanted])
        names = sorted({name for some in listings for name in some}, reverse=True)
        if states is None:
            names = self._with_moving(names)
        found: list[Job] = []
        step = 256 if limit is None else max(1, limit)
        for start in range(0, len(names), step):
            ids = dict.fromkeys(map(id_listed, names[start : start + step]))
            records = [record for record in self._readable(ids) if record.state in wanted]
            found += self._jobs(records)
            if limit is not None and len(found) >= limit:
                break
        return found[:limit]
