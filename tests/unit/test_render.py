"""What people read: numbers, times, tables and pages, on a terminal and in a pipe."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from lockstep.cli.page import job_page
from lockstep.cli.progress import Pace, ProgressView
from lockstep.cli.render import (
    Grid,
    Screen,
    Span,
    duration,
    line,
    number,
    percent,
    plain_lines,
    rate,
    safe,
    size,
)
from lockstep.errors import ErrorInfo
from lockstep.job import (
    Event,
    Fingerprint,
    HistoryEntry,
    Holding,
    Job,
    Kind,
    Plan,
    State,
    Task,
    TaskState,
)
from lockstep.view import job_document

NOW = 1_700_000_100.0
CONTRACT_FIELDS = (
    "job_id",
    "request_id",
    "kind",
    "state",
    "generation",
    "source",
    "target",
    "partition",
    "commit_id",
    "snapshot_id",
    "stage",
    "tasks_total",
    "tasks_done",
    "rows_total",
    "rows_done",
    "bytes_done",
    "files",
    "progress",
    "rows_per_s",
    "eta_s",
    "attempts",
    "created_at",
    "started_at",
    "finished_at",
    "workers",
    "tasks_waiting_for_retry",
    "error",
    "fingerprint",
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class StillClock:
    def __init__(self) -> None:
        self.time = NOW

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def job(state: State = State.RUNNING, **changes: object) -> Job:
    plan = Plan(
        kind=Kind.EXPORT,
        source="clickhouse://me:hidden@host/db/events",
        target="iceberg://lake/db.events",
        target_uuid="u",
        location="file:///x",
        schema={},
        spec={},
        sort_order={},
        columns=(),
        pin={},
        partition="202401",
        rows=1000,
    )
    made = Job(
        job_id="abc123",
        request_id="r",
        kind=Kind.EXPORT,
        state=state,
        generation=1,
        plan=plan,
        holding=Holding("s", True),
        stage="write",
        tasks_total=4,
        tasks_done=1,
        tasks_waiting_for_retry=0,
        rows_done=250,
        bytes_done=5000,
        files=1,
        attempts=2,
        created_at=NOW - 60,
        updated_at=NOW,
        started_at=NOW - 50,
        fingerprint=Fingerprint(250, {"id": 255}),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def task(index: int, state: TaskState, **changes: object) -> Task:
    made = Task("abc123", "write", index, {}, 250, 1000, state, epoch=1, attempts=1)
    return replace(made, **changes)  # type: ignore[arg-type]


def page(shown: Job, tasks: list[Task], history: list[HistoryEntry]) -> str:
    return "\n".join(text for part in job_page(shown, tasks, history, NOW) for text in plain_lines(part))


def entered(state: State, seconds_ago: float) -> HistoryEntry:
    return HistoryEntry(NOW - seconds_ago, Event.START.value, state, 1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.04, "0.0 s"),
        (7.4, "7 s"),
        (80, "1 min 20 s"),
        (120, "2 min"),
        (11_100, "3 h 5 min"),
        (187_200, "2 d 4 h"),
        (None, "–"),
    ],
)
def test_durations_have_at_most_two_units(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (512_300_000, "512.3 MB"),
        (999_999, "1.0 MB"),
        (4e15, "4,000.0 TB"),
    ],
)
def test_sizes_are_powers_of_a_thousand(value: float, text: str) -> None:
    assert size(value) == text


def test_numbers_and_rates_have_separators() -> None:
    assert number(1234567) == "1,234,567"
    assert rate(310_000.4) == "310,000/s"
    assert number(None) == rate(None) == "–"


def test_only_what_is_whole_reads_a_hundred_percent() -> None:
    assert percent(0.99999) == "99 %"
    assert percent(1.0) == "100 %"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_name_from_a_strange_table_cannot_move_the_cursor(terminal: bool) -> None:
    stream = Terminal() if terminal else io.StringIO()
    screen = Screen(stream)

    screen.print(Grid(("partition",), [("a\x1b[2Jb\nc\u202e",)], title="t\x07"))
    screen.print(line("x\x1b]0;title\x07"))

    shown = stream.getvalue()
    assert "\x1b[2J" not in shown
    assert "\x1b]0;" not in shown
    assert "\x07" not in shown
    assert "\u202e" not in shown
    assert safe("a\x1b[2Jb") == "a\\x1b[2Jb"


def test_markup_in_a_name_is_text() -> None:
    stream = Terminal()
    Screen(stream).print(Grid(("name",), [("[bold]x[/bold]",)]))
    assert "[bold]x[/bold]" in stream.getvalue()


def test_a_pipe_gets_aligned_plain_lines_without_colours() -> None:
    stream = io.StringIO()
    Screen(stream).print(
        Grid(
            ("name", ">rows"),
            [("a", "1"), (Span("long", "red"), "1,000")],
            title="Things",
            footer=("all", "1,001"),
        )
    )
    assert stream.getvalue() == "Things\nname   rows\na         1\nlong  1,000\nall   1,001\n"


def test_the_document_has_every_field_of_the_contract_and_no_secret() -> None:
    document = job_document(job())

    assert [name for name in CONTRACT_FIELDS if name not in document] == []
    assert document["source"] == "clickhouse://me:***@host/db/events"
    assert document["progress"] == 0.25
    assert document["rows_per_s"] == 5.0
    assert document["eta_s"] == 150.0
    assert document["created_at"] == "2023-11-14T22:14:00.000Z"
    assert document["finished_at"] is None
    assert document["error"] is None
    assert document["fingerprint"] == {"rows": 250, "columns": {"id": "00000000000000ff"}}


def test_what_is_not_known_is_null() -> None:
    document = job_document(job(State.PENDING, started_at=None, rows_done=0, fingerprint=None))

    assert document["rows_per_s"] is None
    assert document["eta_s"] is None
    assert document["started_at"] is None
    assert document["fingerprint"] is None


def test_an_empty_partition_is_done_only_when_it_is_published() -> None:
    empty = job(State.COMMITTING, tasks_total=0, tasks_done=0, rows_done=0)
    empty = replace(empty, plan=replace(empty.plan, rows=0))

    assert job_document(empty)["progress"] == 0.0
    assert job_document(replace(empty, state=State.COMPLETED))["progress"] == 1.0


def test_a_task_that_waits_for_its_next_try_says_when_and_why() -> None:
    error = ErrorInfo("Retryable", "storage is down")
    tasks = [task(0, TaskState.WAITING, next_attempt_at=NOW + 12, error=error), task(1, TaskState.DONE)]

    text = page(job(), tasks, [entered(State.RUNNING, 50)])

    assert "1 task to be tried again, the next in 12 s (attempt 2 of 8)" in text
    assert "Retryable: storage is down" in text


def test_a_job_whose_worker_is_gone_says_who_and_what_to_do() -> None:
    tasks = [task(0, TaskState.LEASED, owner="host/7/x", lease_until=NOW - 20)]

    text = page(job(), tasks, [entered(State.RUNNING, 50)])

    assert "host/7/x is gone, its lease ended 20 s ago" in text
    assert "lockstep worker" in text


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (State.PENDING, "for a worker, since 3 min"),
        (State.PAUSED, "paused since 3 min: `lockstep resume abc123`"),
        (State.COMMITTING, "for its commit, since 3 min"),
        (State.COMPLETED, "as snapshot 42"),
        (State.FAILED, "`lockstep retry abc123`"),
        (State.KILLED, "nothing of it was published"),
    ],
)
def test_each_state_says_what_comes_next(state: State, said: str) -> None:
    text = page(
        job(state, snapshot_id=42), [], [entered(State.RUNNING, 400), entered(state, 180), entered(state, 90)]
    )
    assert said in text


def test_the_pace_is_that_of_the_last_seconds() -> None:
    pace = Pace()
    for second in range(20):
        pace.add(NOW + second, 10 * second)
    for second in range(20, 40):
        pace.add(NOW + second, 200 + 1000 * (second - 20))
    assert pace.rows_per_s == 1000.0


def test_an_attempt_that_starts_again_has_no_negative_pace() -> None:
    pace = Pace()
    pace.add(NOW, 1000)
    pace.add(NOW + 1, 200)
    assert pace.rows_per_s is None


def test_progress_in_a_pipe_is_a_line_per_change_and_now_and_then() -> None:
    stream, clock = io.StringIO(), StillClock()
    with ProgressView(Screen(stream), clock) as view:
        view.update([job(State.PENDING, rows_done=0)])
        for _ in range(6):
            clock.sleep(1)
            view.update([job(rows_done=int(clock.time - NOW) * 100)])
        view.update([job(State.COMPLETED, rows_done=1000, finished_at=NOW)])
    assert stream.getvalue().splitlines() == [
        "202401: pending 0 %, 0 of 1,000 rows",
        "202401: running 10 %, 100 of 1,000 rows, 100/s, 9 s left",
        "202401: running 60 %, 600 of 1,000 rows, 100/s, 4 s left",
        "202401: completed 100 %, 1,000 of 1,000 rows in 50 s",
    ]


def test_progress_on_a_terminal_has_a_bar_per_job_and_a_total() -> None:
    stream, clock = Terminal(), StillClock()
    screen = Screen(stream)
    screen.console.width = 140
    with ProgressView(screen, clock) as view:
        view.update([job(), job(State.COMPLETED, job_id="other", rows_done=1000)])
    shown = stream.getvalue()
    assert "━" in shown
    assert "1 of 2 jobs · 1,250 of 2,000 rows" in shown
