"""One cell of the crash matrix: a failpoint, an action and a kind of store, played by real processes.

The victim reaches the failpoint and dies, meets an error, or falls asleep there and is stopped as a whole
(SIGSTOP) until its lease has run out. Then a rescuer works on the same job. What has to be true afterwards
does not depend on the cell: the outcome is that of a job that nothing disturbed.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.job import Fingerprint, Job, State
from lockstep.sweep import sweep
from tests import players
from tests.lab import Lab
from tests.players import Rows, Troupe
from tests.store_lab import check_always_true
from tests.zygote import Child, Zygote

ACTIONS = ("kill", "error", "sleep")
WHOLE = "kill worker"
"""SIGKILL for a worker with all its tasks, while one of them is at the failpoint."""
LEASE_S, SHORT_LEASE_S = 30.0, 2.5
ASLEEP_S = 6.0
FOR_EVER_S = 600.0
KILLED = -signal.SIGKILL
EACH_TIME = " each time that it gets there"
CONFLICT = 3
REFUSED = 2
IN_EXECUTORS = ("write", "map", "combine", "unique", "merge")


@dataclass(frozen=True)
class Family:
    """A kind of job with what happens at the failpoints that it passes, and how its result is judged.

    `request` is the command line that asks for it, `prepare` makes what that reads, and `assert_exact` fails
    unless the target of the one completed job holds the right rows once each, for an independent reader.
    """

    name: str
    failpoints: Mapping[str, tuple[str, ...]]
    """Each with its actions."""
    prepare: Callable[[Lab], None]
    request: Callable[[Lab], tuple[str, ...]]
    assert_exact: Callable[[Lab], None]
    limits: Mapping[str, object] = field(default_factory=dict)
    visits: Mapping[str, int] = field(default_factory=dict)
    """At which of its visits to a failpoint something happens, if not at the first. Workers die at each of
    those before as well, one after the other."""
    command: Callable[..., object] = players.command
    work: Callable[..., object] = players.work


@dataclass(frozen=True)
class Cell:
    family: str
    failpoint: str
    action: str
    store: str

    @property
    def name(self) -> str:
        return f"{self.family}-{self.failpoint}-{self.action}-{self.store}"

    @property
    def lease_s(self) -> float:
        """Short where somebody sleeps until it has run out. That one is dead is known at once, and on a busy
        machine a short lease would be lost beside what the drill is about."""
        return SHORT_LEASE_S if self.action == "sleep" or self.failpoint.startswith("fence.") else LEASE_S


@dataclass(frozen=True)
class Result:
    """What the processes did, and how it ended."""

    story: str
    ending: str
    figures: str = field(default="", compare=False)


def data_files(lab: Lab, name: str = "db.events") -> list[str]:
    """What lies in a table's location beside its metadata."""
    location = lab.table(name).location()
    folder = Path(location.removeprefix("file://"))
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent != folder / "metadata"]
    return sorted(f"file://{path}" for path in files)


def undisturbed(family: Family, lab: Lab, zygote: Zygote) -> Fingerprint:
    """The fingerprint of a job of this kind to which nothing happens."""
    family.prepare(lab)
    troupe = Troupe(zygote, lab.folder)
    assert troupe.play(family.command, *family.request(lab), "--detach").wait() == 0, troupe.said()
    (job,) = lab.jobs()
    assert troupe.play(family.work, job.job_id).wait() == 0, troupe.said()
    done = lab.store().read(job.job_id)
    assert done.state is State.COMPLETED, done.error
    family.assert_exact(lab)
    assert done.fingerprint is not None
    return done.fingerprint


class Drill:
    def __init__(
        self, family: Family, cell: Cell, lab: Lab, zygote: Zygote, expected: Callable[[], Fingerprint]
    ) -> None:
        self.family = family
        self.cell = cell
        self.lab = lab
        self._expected = expected
        self._troupe = Troupe(zygote, lab.folder)
        self._visits = family.visits.get(cell.failpoint, 1)

    def run(self) -> Result:
        self.family.prepare(self.lab)
        self._before = self.lab.lineage() if self.lab.config.state_folder.exists() else []
        place = self.cell.failpoint.partition(".")[0]
        play = {"plan": self._planner, "fence": self._killer}.get(place, self._worker)
        try:
            result = play(place)
        except BaseException as error:
            error.add_note(f"{self.cell.name}; what the processes said:\n{self._troupe.said()}")
            raise
        check_always_true(self.lab.store())
        return result

    # The plays

    def _worker(self, place: str) -> Result:
        """The victim works on the job; the rescuer finds what it has left."""
        job_id = self._ask()
        if self.cell.action == "kill" and place not in IN_EXECUTORS:
            for visit in range(1, self._visits):
                with self._victim(self.family.work, job_id, visit=visit) as victim:
                    assert victim.wait() == KILLED
        with self._victim(self.family.work, job_id) as victim:
            story = self._act(place, victim, lambda: self._rescue(job_id))
        self._rescue(job_id)
        self._assert_completed(job_id)
        if place in IN_EXECUTORS and self.cell.action != "sleep":
            store = self.lab.store()
            tasks = [task for stage in store.read(job_id).plan.stages for task in store.tasks(job_id, stage)]
            assert sum(task.attempts for task in tasks) > len(tasks), "no attempt was lost"
        return Result(story, "exact", self._redone() if self.cell.action == WHOLE else "")

    def _act(self, place: str, victim: Child, rescue: Callable[[], None]) -> str:
        match self.cell.action:
            case "kill" if place in IN_EXECUTORS:
                assert victim.wait() == 0
                return "the task's process dies; the driver starts the task anew"
            case "kill":
                assert victim.wait() == KILLED
                return f"the worker dies{EACH_TIME if self._visits > 1 else ''}; another one takes over"
            case "error":
                assert victim.wait() == 0
                return "the worker tries again"
            case "sleep":
                self._while_asleep(victim, rescue)
                assert victim.wait() == 0
                return "another worker takes over; the sleeper changes nothing"
        assert self.cell.action == WHOLE
        self._troupe.wait_for(self.cell.failpoint, times=self._visits)
        victim.kill_group()
        return "the worker dies with all its tasks; another one takes over"

    def _redone(self) -> str:
        """What a crash costs: for each task that ran, at most what lies between two checkpoints.

        Rows are those that go to the sink: of a unique task the ones that lose.
        """
        rows = Rows.of(self.lab.folder)
        assert rows.lost, "nothing was lost: the drill did not happen"
        told = []
        for (stage, index), lost in sorted(rows.lost.items()):
            assert lost <= rows.most[stage], f"{stage} task {index}: {rows}"
            told.append(f"{stage} task {index}: {lost} rows redone, at most {rows.most[stage]} in between")
        return "; ".join(told)

    def _planner(self, place: str) -> Result:
        """The victim asks for the job; when it has not, somebody asks again."""
        with self._victim(self.family.command, *self.family.request(self.lab), "--detach") as victim:
            if self.cell.action == "sleep":
                self._while_asleep(victim, self._ask)
                assert victim.wait() == CONFLICT
                story = "somebody else asks meanwhile; the sleeper is told of the conflict"
            else:
                assert victim.wait() == (KILLED if self.cell.action == "kill" else REFUSED)
                assert self.lab.jobs() == []
                self._ask()
                story = "no job was created; asked again, one is"
        (job,) = self.lab.jobs()
        self._rescue(job.job_id)
        self._assert_completed(job.job_id)
        return Result(story, "exact")

    def _killer(self, place: str) -> Result:
        """A committer sleeps before it publishes; the victim is the one who kills the job."""
        job_id = self._ask()
        asleep = f"commit.before_publish=sleep:{ASLEEP_S}"
        with self._victim(self.family.work, job_id, failpoints=asleep) as committer:
            self._troupe.wait_for("commit.before_publish")
            self.lab.freeze_group(committer.pid)
            with self._victim(players.command, "kill", job_id) as victim:
                story = self._act_on_the_kill(victim, job_id)
            assert self.lab.store().read(job_id).state is State.KILLED
            os.killpg(committer.pid, signal.SIGCONT)
            assert committer.wait() == 0
        assert self.lab.lineage() == []
        assert self.lab.store().read(job_id).state is State.KILLED
        return Result(story, "nothing published")

    def _act_on_the_kill(self, victim: Child, job_id: str) -> str:
        def kill_again() -> None:
            assert self._troupe.play(players.command, "kill", job_id).wait() == 0

        if self.cell.action == "sleep":
            self._while_asleep(victim, kill_again)
            assert victim.wait() == 0
            return "a second kill ends the job; the sleeper changes nothing"
        if self.cell.action == "error":
            assert victim.wait() == 0
            return "the kill tries again and ends the job"
        assert victim.wait() == KILLED
        kill_again()
        return "the kill dies; a second one ends the job"

    # What they have in common

    def _ask(self) -> str:
        """Ask for the job and leave it to workers."""
        request = (*self.family.request(self.lab), "--detach")
        assert self._troupe.play(self.family.command, *request).wait() == 0
        (job,) = self.lab.jobs()
        return job.job_id

    def _rescue(self, job_id: str) -> None:
        assert self._troupe.play(self.family.work, job_id).wait() == 0

    def _while_asleep(self, victim: Child, others: Callable[[], object]) -> None:
        """Stop the victim as a whole at its failpoint, let others act, and wake it up: it changes nothing."""
        self._troupe.wait_for(self.cell.failpoint, times=self._visits)
        self.lab.freeze_group(victim.pid)
        others()
        before = self.lab.jobs()
        os.killpg(victim.pid, signal.SIGCONT)
        victim.wait()
        assert self.lab.jobs() == before

    def _assert_completed(self, job_id: str) -> None:
        (job,) = self.lab.jobs()
        assert job.job_id == job_id
        assert job.state is State.COMPLETED, job.error
        assert self.lab.lineage() == [*self._before, job.snapshot_id]
        self.family.assert_exact(self.lab)
        assert job.fingerprint == self._expected()
        self._assert_files(job)
        assert [pin for pin in self.lab.pins() if job_id in pin] == []
        assert self._troupe.has_reached(self.cell.failpoint, self._visits), "the failpoint was not reached"

    def _assert_files(self, job: Job) -> None:
        """The manifest of the store and the files of the snapshot are the same ones."""
        recorded = [file.path for file in self.lab.store().manifest(job.job_id, job.plan.stages[-1])]
        published = [task.file.file_path for task in self.lab.table().scan().plan_files()]
        assert sorted(recorded) == sorted(path for path in published if job.job_id in path)
        if self.cell.action == "sleep":
            # One that wakes up when the job has ended may finish a file before it is told: a sweep takes it.
            sweep(self.lab.config, self.lab.store())
            assert data_files(self.lab) == sorted(published)
        assert [path for path in data_files(self.lab) if "/lockstep-runs/" in path] == []

    # The processes

    @contextlib.contextmanager
    def _victim(
        self,
        play: Callable[..., object],
        *arguments: str,
        failpoints: str | None = None,
        visit: int | None = None,
    ) -> Iterator[Child]:
        armed = failpoints or f"{self.cell.failpoint}={self._armed_action}@{visit or self._visits}"
        child = self._troupe.play(play, *arguments, failpoints=armed)
        try:
            yield child
        finally:
            child.kill_group()

    @property
    def _armed_action(self) -> str:
        asleep_s = {"sleep": ASLEEP_S, WHOLE: FOR_EVER_S}.get(self.cell.action)
        return self.cell.action if asleep_s is None else f"sleep:{asleep_s}"
