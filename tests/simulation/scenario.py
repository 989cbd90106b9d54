"""One run: users ask for jobs and change their minds, workers work, and the world gets in their way."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from lockstep import runtime
from lockstep.commit import settle
from lockstep.errors import Conflict, Invalid, LockstepError, Retryable
from lockstep.exporter import ExportRequest, plan_export
from lockstep.job import (
    ENDED,
    Event,
    Holding,
    ImportTerms,
    Job,
    Kind,
    Limits,
    NewJob,
    Piece,
    Plan,
    State,
    TaskSpec,
)
from lockstep.store import JobStore
from lockstep.sweep import sweep
from lockstep.worker import Worker
from tests.simulation.auditor import Evidence, TableEvidence, audit
from tests.simulation.executors import SimEngine
from tests.simulation.faults import Faults
from tests.simulation.lake import LakeTable, add_column, append_as_a_rival, expire_snapshots
from tests.simulation.rows import Ranges
from tests.simulation.runs import ROWS_PER_KEY
from tests.simulation.scheduler import Process, SimEvent
from tests.simulation.world import World, database, in_place

BUDGET_S: Final = 900.0
"""Virtual time in which every job ends once nothing disturbs it any more."""
KILL_ANSWER_S: Final = 5.0
MODES: Final = ("error", "error", "error", "skip", "append", "replace", "replace")
ACTIONS: Final = ("kill", "pause", "pause", "resume", "retry", "retry")


@dataclass
class Run:
    """What one seed did, and what the auditor says of it."""

    seed: int
    violations: list[str]
    trace: list[tuple[float, str, str]]
    states: dict[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The same for the same seed, on every machine."""
        text = "\n".join(f"{at:.9f} {who} {what}" for at, who, what in self.trace)
        return hashlib.sha256(text.encode()).hexdigest()

    def lines(self) -> list[str]:
        return [f"{at:10.3f}  {who:<28} {what}" for at, who, what in self.trace]


def simulate(seed: int, faults: Faults | None = None) -> Run:
    """Run one seed to its end, and audit what is left."""
    world = World(seed, faults)
    scenario = Scenario(world)
    with in_place(world):
        scenario.set_up()
        world.scheduler.run()
    evidence = scenario.evidence()
    violations = audit(evidence)
    return Run(seed, violations, world.scheduler.trace, evidence.states())


class Scenario:
    def __init__(self, world: World) -> None:
        self.world = world
        self.scheduler = world.scheduler
        self.user = self.scheduler.process("user", "desk", mortal=False)
        self.known: list[str] = []
        """The jobs that a user has heard of."""
        self.rival_rows: dict[str, str] = {}
        self.inputs: Ranges = {}
        """What is imported, by the name of a file."""
        self.workers: dict[Process, tuple[SimEvent, SimEngine]] = {}
        self.started = 0
        self.busy = 0
        self.ended_in_time = True

    def set_up(self) -> None:
        world, draw = self.world, self.world.random
        for name in ("db.t1", "db.t2")[: draw.choice((1, 1, 1, 2))]:
            world.tables[name] = LakeTable(world, name)
        world.row_s = draw.choice((0.1, 3.0, 30.0))
        for number in range(draw.choice((1, 2, 2, 3))):
            self._fill_partition(f"p{number}", 1000 * (number + 1))
        for slot in range(draw.choice((1, 2, 2, 3))):
            self._start_worker(slot, draw.uniform(0.0, 5.0))
        for number in range(draw.choice((1, 2, 3, 3, 4, 5))):
            self._later(f"export {number}", self._ask, 0.5)
        for number in range(draw.choice((0, 0, 1, 3))):
            self._later(f"sweep {number}", lambda: self._run_command("sweep", self._sweep))
        for number in range(draw.choice((0, 0, 1, 2))):
            self._later(f"import {number}", lambda n=number: self._ask_for_an_import(n), 0.5)  # type: ignore[misc]
        world.kill_job = lambda job_id: self._command("kill", job_id)
        self._disturb()
        self.scheduler.spawn(self.world.network, "the end", self._end)

    def _fill_partition(self, name: str, row: int, most_rows: int = 6) -> None:
        parts = self.world.partitions[name] = {}
        for number in range(self.world.random.choice((0, 1, 1, 2, 2, 3))):
            rows = self.world.random.randint(0, most_rows)
            parts[f"{name}_{number}"] = (row, row + rows)
            row += rows

    def evidence(self) -> Evidence:
        world = self.world
        tables = [*world.retired, *world.tables.values()]
        return Evidence(
            database=str(database().path),
            tables={
                str(table.metadata.table_uuid): TableEvidence(
                    table.name,
                    table in world.retired,
                    [(one.at, one.by, one.metadata) for one in table.log],
                    table.quiet,
                )
                for table in tables
            },
            files=world.storage.files,
            overwritten=world.storage.overwritten,
            swept=world.storage.swept,
            parts={
                **{name: rows for parts in world.partitions.values() for name, rows in parts.items()},
                **self.inputs,
            },
            rows_per_key=ROWS_PER_KEY,
            rival_rows=self.rival_rows,
            undisturbed=not world.faults.any and world.row_s < 1.0,
            ended_in_time=self.ended_in_time,
            complaints=[
                *(f"{actor} ended with {error!r}" for actor, error in self.scheduler.broken),
                *world.complaints,
            ],
        )

    # Workers

    def _start_worker(self, slot: int, delay_s: float) -> None:
        world = self.world
        self.started += 1
        skew_s = world.random.uniform(-1.0, 1.0) * world.faults.skew_s
        # Some on one machine, where each can see that another is dead; some on machines of their own.
        host = "shared" if slot < 2 and world.seed % 2 else f"host{slot}"
        process = self.scheduler.process(f"w{self.started}", host, skew_s=skew_s)
        stop, engine = world.threading.Event(), SimEngine(world)

        def work() -> None:
            worker = Worker(world.config, world.open_store(), world.clock(process), engine=engine)
            try:
                worker.run("forever", stop)  # type: ignore[arg-type]
            except Retryable as error:
                self.scheduler.note(f"the worker ends: {error}")
            # Like a real process it waits for its pools, here for a while.
            self.scheduler.pause(world.random.uniform(0.0, 30.0))
            self.scheduler.kill(process)

        def replace() -> None:
            pause_s = world.random.uniform(0.5, 5.0 if world.quiet else 60.0)
            if self.workers.pop(process, None) is not None:
                name = "starts a worker"
                self.scheduler.spawn(world.network, name, lambda: self._start_worker(slot, 0.0), pause_s)

        process.at_death.append(replace)
        self.workers[process] = (stop, engine)
        self.scheduler.spawn(process, "loop", work, delay_s)

    # Users

    def _later(self, name: str, body: Callable[[], None], part: float = 1.0) -> None:
        """At some time before the faults end."""
        self.busy += 1

        def run() -> None:
            try:
                body()
            finally:
                self.busy -= 1

        at_s = self.world.random.uniform(0.0, part * self.world.faults.quiet_s)
        self.scheduler.spawn(self.user, name, run, at_s)

    def _run_command(self, name: str, act: Callable[[Process], None]) -> None:
        """In a process of its own, which can die like any other."""
        process = self.scheduler.process(name, "desk")
        self.busy += 1

        def ended() -> None:
            self.busy -= 1

        def run() -> None:
            self.scheduler.note(name)
            try:
                act(process)
            except LockstepError as error:
                self.scheduler.note(f"{name}: {type(error).__name__}: {error}")
            self.scheduler.kill(process)

        process.at_death.append(ended)
        self.scheduler.spawn(process, "main", run)

    def _ask(self) -> None:
        draw = self.world.random
        partition = draw.choice(sorted(self.world.partitions))
        parts = tuple(self.world.partitions[partition])
        only = (draw.choice(parts),) if parts and draw.random() < 0.2 else ()
        request = ExportRequest(
            "clickhouse://numbers:8123/db/numbers",
            f"iceberg://lake/{draw.choice(sorted(self.world.tables))}",
            partitions=() if only else (partition,),
            parts=only,
            on_existing=draw.choice(MODES),
            deadline_s=draw.choice((None, None, 60.0)),
        )

        def export(process: Process) -> None:
            world = self.world
            planned = plan_export(request, world.config, world.open_store(), world.clock(process))
            for job in planned.jobs:
                self.scheduler.note(f"created {job.job_id}")
                self.known.append(job.job_id)

        self._run_command(f"export {partition} {only} {request.on_existing}", export)
        for _ in range(draw.choice((0, 0, 0, 1, 2, 4))):
            self.scheduler.pause(draw.expovariate(0.1))
            if self.known:
                self._command(draw.choice(ACTIONS), draw.choice(self.known))

    def _ask_for_an_import(self, number: int) -> None:
        """Planned here, not by the importer: what is simulated is the way through the stages."""
        world = self.world
        parts = f"i{number}"
        self._fill_partition(parts, 10_000 * (number + 1), most_rows=10)
        ranges = world.partitions.pop(parts)
        self.inputs |= ranges
        table = self._some_table()
        unique = world.random.random() < 0.6

        def ask(process: Process) -> None:
            (job,) = world.open_store().create(
                [new_import(runtime.new_id(), table, ranges, world.config.limits, unique)]
            )
            self.scheduler.note(f"created {job.job_id}")
            self.known.append(job.job_id)

        self._run_command(f"import {parts}", ask)

    def _command(self, action: str, job_id: str | None) -> None:
        if job_id is None:
            if not (committing := self.world.committing()):
                return
            job_id = self.world.random.choice(committing)
        verb = getattr(self, f"_{action}")
        self._run_command(
            f"{action} {job_id}", lambda process: verb(self.world.open_store(), job_id, process)
        )

    def _kill(self, store: JobStore, job_id: str, process: Process) -> None:
        """As the command does it."""
        clock = self.world.clock(process)
        job = store.stop(job_id, Event.KILL)
        deadline = clock.now() + KILL_ANSWER_S
        while job.state is State.COMMITTING and clock.now() < deadline:
            try:
                job = settle(store, job_id, self.world.config, clock, KILL_ANSWER_S)
            except LockstepError as error:
                self.scheduler.note(f"cannot fence yet: {error}")
            clock.sleep(0.5)

    def _pause(self, store: JobStore, job_id: str, _: Process) -> None:
        store.pause(job_id)

    def _resume(self, store: JobStore, job_id: str, _: Process) -> None:
        store.resume(job_id)

    def _retry(self, store: JobStore, job_id: str, _: Process) -> None:
        store.retry(job_id)

    def _sweep(self, process: Process) -> None:
        world = self.world
        report = sweep(world.config, world.open_store(), world.clock(process))
        self.scheduler.note(f"swept {len(report.garbage)}, kept {len(report.unknown)} in doubt")

    # What gets in the way

    def _disturb(self) -> None:
        disturbances: dict[str, Callable[[], None]] = {
            "freezes": self._freeze,
            "kills": self._kill_somebody,
            "stops": self._stop_a_worker,
            "engine_deaths": self._end_an_engine,
            "rivals": self._rival,
            "expiries": lambda: expire_snapshots(self._some_table()),
            "schema_changes": lambda: add_column(self._some_table()),
            "replaced_tables": self._replace_table,
        }
        for kind, disturb in disturbances.items():
            for _ in range(getattr(self.world.faults, kind)):
                self._later(kind, disturb)

    def _some_table(self) -> LakeTable:
        return self.world.tables[self.world.random.choice(sorted(self.world.tables))]

    def _mortals(self) -> list[Process]:
        return [one for one in self.scheduler.processes if one.alive and one.mortal]

    def _freeze(self) -> None:
        if victims := self._mortals():
            self.scheduler.freeze(self.world.random.choice(victims), self.world.random.uniform(5.0, 200.0))

    def _kill_somebody(self) -> None:
        if victims := self._mortals():
            self.scheduler.kill(self.world.random.choice(victims))

    def _stop_a_worker(self) -> None:
        if self.workers:
            stop, _ = self.workers[self.world.random.choice(list(self.workers))]
            self.scheduler.note("a worker is asked to end")
            stop.set()

    def _end_an_engine(self) -> None:
        if self.workers:
            _, engine = self.workers[self.world.random.choice(list(self.workers))]
            self.scheduler.note("an engine dies")
            engine.close()

    def _rival(self) -> None:
        table = self._some_table()
        row = f"rival-{len(self.rival_rows)}"
        self.rival_rows[row] = str(table.metadata.table_uuid)
        append_as_a_rival(table, row)

    def _replace_table(self) -> None:
        old = self._some_table()
        self.scheduler.note(f"{old.name} is dropped and made anew")
        self.world.retired.append(old)
        self.world.tables[old.name] = LakeTable(self.world, old.name)

    # The end

    def _end(self) -> None:
        """When nothing disturbs any more: everything must end in time, and late requests change nothing."""
        world = self.world
        self.scheduler.pause(world.faults.quiet_s + 0.001)
        store = world.open_store()
        seen: set[str] = set()
        deadline_s = world.elapsed_s + BUDGET_S
        while True:
            busy = self.busy  # before the look: a command may end, and change something, while we look
            left = [job for job in store.list() if job.state not in ENDED]
            for job in store.list({State.FAILED}):
                if job.job_id not in seen and world.random.random() < 0.5:
                    self.scheduler.note(f"retry {job.job_id}")
                    deadline_s = world.elapsed_s + BUDGET_S
                    left += _unless_refused(store, job.job_id)
                seen.add(job.job_id)
            for job in left:
                if job.state is State.PAUSED:
                    # A command that is still on its way may have ended it since we looked.
                    with contextlib.suppress(Invalid):
                        store.resume(job.job_id)
            if not left and not busy:
                break
            if world.elapsed_s > deadline_s:
                self.ended_in_time = False
                break
            self.scheduler.pause(10.0)
        self.scheduler.note("all jobs have ended")
        workers, self.workers = self.workers, {}
        for process in workers:
            self.scheduler.kill(process)
        if world.random.random() < 0.3:
            self._sweep(self.world.network)
        while world.in_flight:
            self.scheduler.pause(30.0)
        self.scheduler.stop()


def new_import(job_id: str, table: LakeTable, ranges: Ranges, limits: Limits, unique: bool) -> NewJob:
    metadata = table.metadata
    numbers = [number for edges in ranges.values() for number in edges]
    plan = Plan(
        Kind.IMPORT,
        source="s3://inputs/numbers",
        target=f"iceberg://lake/{table.name}",
        target_uuid=str(metadata.table_uuid),
        location=metadata.location,
        schema=json.loads(metadata.schema().model_dump_json()),
        spec=json.loads(metadata.spec().model_dump_json()),
        sort_order=json.loads(metadata.sort_order().model_dump_json()),
        columns=(),
        pin={
            "name": f"lockstep_pin_{job_id}",
            "first": min(numbers, default=0),
            "last": max(numbers, default=0),
        },
        stages=("map", "combine", "recombine", *(("unique",) if unique else ()), "merge"),
        terms=ImportTerms(unique=("id",), on_duplicate="keep-first") if unique else ImportTerms(),
        limits=limits,
    )
    tasks = [TaskSpec({"first": first, "last": last}, last - first) for first, last in ranges.values()]
    holding = Holding(f"import {job_id}", True, tuple(Piece(name) for name in ranges))
    return NewJob(job_id, job_id, plan, holding, tasks)


def _unless_refused(store: JobStore, job_id: str) -> list[Job]:
    try:
        return [store.retry(job_id)]
    except (Conflict, Invalid):
        return []
