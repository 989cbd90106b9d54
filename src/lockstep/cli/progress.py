"""Progress while jobs run: bars on a terminal, a line now and then in a pipe. Always on standard error."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from lockstep.cli.render import (
    Line,
    Screen,
    Span,
    duration,
    line,
    number,
    percent,
    plural,
    rate,
    rich_text,
    size,
    state_span,
)
from lockstep.job import Job, State
from lockstep.runtime import Clock
from lockstep.view import eta_s, progress

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

POLL_S: Final = 0.25
PLAIN_LEAST_S: Final = 2.0
PLAIN_EVERY_S: Final = 5.0
WINDOW_S: Final = 8.0
BAR: Final = 28
MOST_BARS: Final = 12


class Pace:
    """Rows per second over the last few seconds: what a bar should show, not the average since yesterday."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, now: float, rows: int) -> None:
        if self._samples and rows < self._samples[-1][1]:
            self._samples.clear()  # an attempt was lost and starts again at its checkpoint
        self._samples.append((now, rows))
        while len(self._samples) > 2 and self._samples[0][0] < now - WINDOW_S:
            self._samples.popleft()

    @property
    def rows_per_s(self) -> float | None:
        if len(self._samples) < 2:
            return None
        (start, before), (end, after) = self._samples[0], self._samples[-1]
        return (after - before) / (end - start) if end > start and after > before else None


class ProgressView:
    """Shows jobs each time `update` is called; `with` keeps the terminal tidy whatever happens."""

    def __init__(
        self, screen: Screen, clock: Clock, note: Callable[[Sequence[Job]], str] | None = None
    ) -> None:
        """`note` says what keeps the jobs from moving, or nothing."""
        self._screen = screen
        self._clock = clock
        self._note = note or (lambda _: "")
        self._noted = ""
        self._paces: dict[str, Pace] = {}
        self._furthest: dict[tuple[str, int], float] = {}
        """By job and generation."""
        self._said: dict[str, tuple[str, int, int]] = {}
        self._said_at: dict[str, float] = {}
        self._live: Live | None = None
        self._jobs: Sequence[Job] = ()

    def __enter__(self) -> Self:
        if self._screen.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._screen.console, refresh_per_second=8, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, jobs: Sequence[Job]) -> None:
        now = self._clock.now()
        self._jobs = jobs
        for job in jobs:
            self._paces.setdefault(job.job_id, Pace()).add(now, job.rows_done)
            generation = (job.job_id, job.generation)
            self._furthest[generation] = max(self._furthest.get(generation, 0.0), progress(job))
        if self._live is not None:
            self._live.update(self._bars())
        else:
            self._plain_lines(now)

    def _bars(self) -> RenderableType:
        from rich.console import Group

        shown = _most_interesting(self._jobs)
        width = max((len(self._label(job)) for job in shown), default=0)
        lines = [self._bar(job, min(width, 30)) for job in shown]
        if hidden := len(self._jobs) - len(shown):
            lines.append(line(Span(f"… and {plural(hidden, 'more job')}", "dim"), indent=2))
        if len(self._jobs) > 1:
            lines.append(self._overall())
        if note := self._note(self._jobs):
            lines.append(line(Span(note, "dim"), indent=2))
        return Group(*(rich_text([" " * each.indent, *each.spans]) for each in lines))

    def _bar(self, job: Job, width: int) -> Line:
        done = self._done(job)
        filled = int(done * BAR)
        style = state_span(job.state).style
        label = self._label(job)
        label = label if len(label) <= width else label[: width - 1] + "…"
        return line(
            label.ljust(width + 1),
            Span("━" * filled, style),
            Span("┄" * (BAR - filled), "grey50"),
            f" {percent(done):>5}  ",
            Span(f"{_phase(job):<10}", style),
            f" {plural(job.rows_done, 'row')}",
            Span(self._detail(job), "dim"),
            indent=2,
        )

    def _done(self, job: Job) -> float:
        """A worker that is lost takes rows along: they are counted down, but the bar stays where it was."""
        return self._furthest[job.job_id, job.generation]

    def _label(self, job: Job) -> str:
        """What tells the job from the others here: its partition, and its table where there are several."""
        name = job.plan.partition if job.plan.partition is not None else job.job_id
        if len({each.plan.target for each in self._jobs}) == 1:
            return name
        return f"{job.plan.target.rpartition('/')[2]} {name}"

    def _detail(self, job: Job) -> str:
        if job.state is State.RUNNING:
            pace = self._paces[job.job_id].rows_per_s
            left = _left_s(job, pace)
            retry = f", {plural(job.tasks_waiting_for_retry, 'task')} to be tried again"
            return (
                (f", {rate(pace)}" if pace else "")
                + (f", {duration(left)} left" if left is not None else "")
                + (retry if job.tasks_waiting_for_retry else "")
            )
        if job.finished_at is not None and job.started_at is not None:
            return f" in {duration(job.finished_at - job.started_at)}"
        return ""

    def _overall(self) -> Line:
        done = sum(job.rows_done for job in self._jobs)
        total = sum(job.plan.rows or 0 for job in self._jobs)
        paces = [self._paces[job.job_id].rows_per_s or 0.0 for job in self._jobs if job.state.live]
        pace = sum(paces)
        ended = sum(1 for job in self._jobs if not job.state.live)
        parts = [
            f"{ended} of {plural(len(self._jobs), 'job')}",
            f"{number(done)} of {number(total)} rows",
            size(sum(job.bytes_done for job in self._jobs)),
        ]
        if pace:
            parts += [rate(pace), f"{duration(max(0, total - done) / pace)} left"]
        return line(Span(" · ".join(parts), "bold"), indent=2)

    def _plain_lines(self, now: float) -> None:
        note = self._note(self._jobs)
        if note and note != self._noted:
            self._screen.print(note)
        self._noted = note
        for job in self._jobs:
            news = (_phase(job), job.rows_done, job.tasks_waiting_for_retry)
            said = self._said.get(job.job_id)
            waited_s = now - self._said_at.get(job.job_id, 0.0)
            least_s = PLAIN_EVERY_S if said and said[0] == _phase(job) else PLAIN_LEAST_S
            # The end is said at once; everything else only if it is new, and not too often.
            if said == news or (job.state.live and waited_s < least_s):
                continue
            self._said[job.job_id], self._said_at[job.job_id] = news, now
            rows = plural(job.rows_done, "row")
            if job.plan.rows is not None:
                rows = f"{number(job.rows_done)} of {plural(job.plan.rows, 'row')}"
            self._screen.print(
                f"{self._label(job)}: {_phase(job)} {percent(self._done(job))}, {rows}{self._detail(job)}"
            )


def follow(
    read: Callable[[], Sequence[Job]],
    view: ProgressView,
    wait: Callable[[float], bool],
    ended: Callable[[Sequence[Job]], bool],
) -> Sequence[Job]:
    """Show what `read` answers until `ended` says so, or `wait` answers that nothing more will come."""
    while True:
        jobs = read()
        view.update(jobs)
        if ended(jobs) or wait(POLL_S):
            break
    jobs = read()
    view.update(jobs)
    return jobs


def all_ended(jobs: Iterable[Job]) -> bool:
    return not any(job.state.live for job in jobs)


def _phase(job: Job) -> str:
    """The state, and for a running import its stage instead."""
    if job.state is State.RUNNING and len(job.plan.stages) > 1:
        return job.stage
    return job.state.value


def _left_s(job: Job, pace: float | None) -> float | None:
    if job.plan.rows is None:
        return eta_s(job)
    if not pace:
        return None
    return max(0, job.plan.rows - job.rows_done) / pace


def _most_interesting(jobs: Sequence[Job]) -> list[Job]:
    """As many as fit: those that move first, then those that wait, then the ended; in their own order."""
    if len(jobs) <= MOST_BARS:
        return list(jobs)
    moving = (State.RUNNING, State.COMMITTING)
    ranked = sorted(jobs, key=lambda job: (job.state not in moving, job.state is State.COMPLETED))[:MOST_BARS]
    chosen = {job.job_id for job in ranked}
    return [job for job in jobs if job.job_id in chosen]
