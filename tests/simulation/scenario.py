"""One run: users ask for jobs and change their minds, workers work, and the world gets in their way."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from lockstep.commit import settle
from lockstep.errors import Conflict, Invalid, LockstepError, Retryable
from lockstep.job import ENDED, Event, Holding, Job, Kind, NewJob, Plan, State, TaskSpec
from lockstep.store import JobStore
from lockstep.worker import Worker
from tests.simulation.auditor import Evidence, PlannedJob, audit
from tests.simulation.faults import Faults
from tests.simulation.lake import LakeTable, add_column, append_as_a_rival, expire_snapshots
from tests.simulation.scheduler import Process
from tests.simulation.world import LIMITS, SimEngine, World, database, in_place

BUDGET_S: Final = 900.0
"""Virtual time in which every job ends once nothing disturbs it any more."""
KILL_ANSWER_S: Final = 5.0


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
        self.planned: dict[str, PlannedJob] = {}
        self.rival_paths: list[str] = []
        self.workers: list[Process] = []
        self.started = 0
        self.busy_users = 0
        self.ended_in_time = True

    def set_up(self) -> None:
        world, draw = self.world, self.world.random
        for name in ("db.t1", "db.t2")[: draw.choice((1, 1, 1, 2))]:
            world.tables[name] = LakeTable(world, name)
        for slot in range(draw.choice((1, 2, 2, 3))):
            self._start_worker(slot, draw.uniform(0.0, 5.0))
        for number in range(1, draw.choice((1, 2, 2, 3, 4)) + 1):
            self._later(self.user, f"asks for j{number}", self._asking(number), 0.4)
        world.kill_job = lambda job_id: self._command("kill", job_id or draw.choice(sorted(self.planned)))
        self._disturb()
        self.scheduler.spawn(self.world.network, "the end", self._end)

    def evidence(self) -> Evidence:
        world = self.world
        return Evidence(
            database=str(database().path),
            tables={
                name: [(one.at, one.by, one.metadata) for one in table.log]
                for name, table in world.tables.items()
            },
            file_io={name: table.quiet for name, table in world.tables.items()},
            files=world.storage.files,
            overwritten=world.storage.overwritten,
            planned=self.planned,
            rival_paths=self.rival_paths,
            undisturbed=not world.faults.any,
            ended_in_time=self.ended_in_time,
            broken=[f"{actor}: {error!r}" for actor, error in self.scheduler.broken],
        )

    # Workers

    def _start_worker(self, slot: int, delay_s: float) -> None:
        world = self.world
        self.started += 1
        skew_s = world.random.uniform(-1.0, 1.0) * world.faults.skew_s
        # Some on one machine, where each can see that another is dead; some on machines of their own.
        host = "shared" if slot < 2 and world.seed % 2 else f"host{slot}"
        process = self.scheduler.process(f"w{self.started}", host, skew_s=skew_s)

        def work() -> None:
            worker = Worker(world.config, world.open_store(), world.clock(process), engine=SimEngine(world))
            worker.run("forever")

        def replace() -> None:
            pause_s = world.random.uniform(0.5, 5.0 if world.quiet else 60.0)
            if process in self.workers:
                self.workers.remove(process)
                self.scheduler.spawn(
                    world.network, "starts a worker", lambda: self._start_worker(slot, 0.0), pause_s
                )

        process.at_death.append(replace)
        self.workers.append(process)
        self.scheduler.spawn(process, "loop", work, delay_s)

    # Users

    def _later(self, process: Process, name: str, body: Callable[[], None], part: float) -> None:
        """At some time before the faults end."""
        self.busy_users += 1

        def run() -> None:
            try:
                body()
            finally:
                self.busy_users -= 1

        self.scheduler.spawn(
            process, name, run, self.world.random.uniform(0.0, part * self.world.faults.quiet_s)
        )

    def _asking(self, number: int) -> Callable[[], None]:
        draw = self.world.random
        table = self.world.tables[draw.choice(sorted(self.world.tables))]
        sizes = [draw.randint(0, 6) for _ in range(draw.choice((0, 1, 1, 2, 2, 3)))]
        # Now and then the same partition is asked for again.
        scope = draw.choice((number, number, number, 1))

        def ask() -> None:
            new = self._new_job(f"j{number}", f"scope{scope}", table, sizes)
            try:
                self._patiently(lambda: self.world.open_store().create([new]))
            except Conflict as conflict:
                self.scheduler.note(f"refused: held by {conflict.job_id}")
            else:
                ranges = [(task.descriptor["first"], task.descriptor["last"]) for task in new.tasks]
                self.planned[new.job_id] = PlannedJob(table.name, new.holding.scope, ranges)
                self._change_mind(new.job_id)

        return ask

    def _new_job(self, job_id: str, scope: str, table: LakeTable, sizes: list[int]) -> NewJob:
        metadata = table.metadata
        tasks = []
        row = 1000 * int(job_id[1:])
        for size in sizes:
            tasks.append(TaskSpec({"first": row, "last": row + size}, size))
            row += size
        plan = Plan(
            Kind.EXPORT,
            source="parquet:/nowhere",
            target=f"iceberg://lake/{table.name}",
            target_uuid=str(metadata.table_uuid),
            location=metadata.location,
            schema=_as_json(metadata.schema()),
            spec=_as_json(metadata.spec()),
            sort_order=_as_json(metadata.sort_order()),
            columns=(),
            pin={},
            partition=scope,
            rows=sum(sizes),
            scope=scope,
            limits=LIMITS,
        )
        return NewJob(job_id, f"request-{job_id}", plan, Holding(scope, True), tasks)

    def _change_mind(self, job_id: str) -> None:
        draw = self.world.random
        for _ in range(draw.choice((0, 0, 0, 1, 2, 4))):
            self.scheduler.pause(draw.expovariate(0.1))
            self._command(draw.choice(("kill", "pause", "pause", "resume", "retry", "retry")), job_id)

    def _command(self, action: str, job_id: str) -> None:
        """A process of its own, which can die like any other."""
        world = self.world
        process = self.scheduler.process(f"cli-{action}-{job_id}", "desk")
        self.busy_users += 1

        def gone() -> None:
            self.busy_users -= 1

        process.at_death.append(gone)

        def act() -> None:
            self.scheduler.note(f"{action} {job_id}")
            try:
                getattr(self, f"_{action}")(world.open_store(), job_id, process)
            except LockstepError as error:
                self.scheduler.note(f"{action} {job_id}: {type(error).__name__}: {error}")
            self.scheduler.kill(process)

        self.scheduler.spawn(process, action, act)

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

    def _patiently(self, verb: Callable[[], Any]) -> Any:
        while True:
            try:
                return verb()
            except Retryable:
                self.scheduler.pause(self.world.random.uniform(0.5, 5.0))

    # What gets in the way

    def _disturb(self) -> None:
        faults = self.world.faults
        for number in range(faults.freezes):
            self._later(self.world.network, f"freeze {number}", self._freeze, 1.0)
        for number in range(faults.kills):
            self._later(self.world.network, f"kill {number}", self._kill_somebody, 1.0)
        for number in range(faults.rivals):
            self._later(self.world.network, f"rival {number}", lambda n=number: self._rival(n), 1.0)  # type: ignore[misc]
        for number in range(faults.expiries):
            self._later(
                self.world.network, f"expiry {number}", lambda: expire_snapshots(self._some_table()), 1.0
            )
        for number in range(faults.schema_changes):
            self._later(self.world.network, f"schema {number}", lambda: add_column(self._some_table()), 1.0)

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

    def _rival(self, number: int) -> None:
        self.rival_paths.append(append_as_a_rival(self._some_table(), number))

    # The end

    def _end(self) -> None:
        """When nothing disturbs any more: everything must end in time, and late requests change nothing."""
        world = self.world
        self.scheduler.pause(world.faults.quiet_s + 0.001)
        store = world.open_store()
        retried: set[str] = set()
        deadline_s = world.elapsed_s + BUDGET_S
        while True:
            left = [job for job in store.list() if job.state not in ENDED]
            for job in store.list({State.FAILED}):
                if job.job_id not in retried and world.random.random() < 0.5:
                    self.scheduler.note(f"retry {job.job_id}")
                    deadline_s = world.elapsed_s + BUDGET_S
                    _unless_refused(lambda job=job: store.retry(job.job_id))  # type: ignore[misc]
                    left.append(job)
                retried.add(job.job_id)
            for job in left:
                if job.state is State.PAUSED:
                    store.resume(job.job_id)
            if not left and not self.busy_users:
                break
            if world.elapsed_s > deadline_s:
                self.ended_in_time = False
                break
            self.scheduler.pause(10.0)
        self.scheduler.note("all jobs have ended")
        for process in self.workers[:]:
            self.workers.remove(process)
            self.scheduler.kill(process)
        while world.in_flight:
            self.scheduler.pause(30.0)
        self.scheduler.stop()


def _unless_refused(verb: Callable[[], Job]) -> None:
    try:
        verb()
    except (Conflict, Invalid):
        return


def _as_json(model: Any) -> Any:
    return json.loads(model.model_dump_json())
