"""What people read: numbers, times, tables and pages, on a terminal and in a pipe."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from lockstep.cli.export import closing_grid, type_name, ways_on
from lockstep.cli.jobs import closing, jobs_grid
from lockstep.cli.page import job_page
from lockstep.cli.progress import Pace, ProgressView
from lockstep.cli.render import (
    Grid,
    Screen,
    Span,
    duration,
    line,
    middle_out,
    number,
    percent,
    plain_lines,
    print_error,
    rate,
    safe,
    size,
)
from lockstep.errors import ErrorInfo, Invalid
from lockstep.job import (
    Event,
    Fingerprint,
    HistoryEntry,
    Holding,
    ImportTerms,
    Job,
    Kind,
    Plan,
    State,
    Task,
    TaskState,
)
from lockstep.runtime import rfc3339
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
    document = job_document(job(workers=("w1",)))

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


def test_the_time_left_counts_only_time_in_which_work_went_on() -> None:
    resumed = job(workers=("w1",), started_at=NOW - 36_000, paced_at=NOW - 10, paced_rows=50)
    document = job_document(resumed)
    assert (document["rows_per_s"], document["eta_s"]) == (20.0, 37.5)
    assert job_document(replace(resumed, workers=()))["eta_s"] is None, "nobody works on it"


def test_the_rows_and_the_pace_of_a_sorted_import_are_those_of_its_stage_and_say_so() -> None:
    plan = replace(job().plan, kind=Kind.IMPORT, rows=None, partition=None, stages=("map", "merge"))
    merging = job(plan=plan, kind=Kind.IMPORT, stage="merge", workers=("w1",), started_at=NOW - 3600)
    merging = replace(merging, paced_at=NOW - 10, rows_done=250, tasks_total=4, tasks_done=2)
    document = job_document(merging)
    assert (document["progress"], document["rows_per_s"]) == (0.75, 25.0)
    assert document["eta_s"] == 10.0, "a quarter of the whole in ten seconds, and a quarter is left"
    assert "250 rows in merge" in page(merging, [], [])
    assert "250 in merge" in "\n".join(plain_lines(jobs_grid([merging], NOW)))
    ended = replace(merging, state=State.COMPLETED, finished_at=NOW, paced_rows=100)
    assert job_document(ended)["rows_per_s"] == 0.1, "of all the time that it took"
    assert "250 rows in merge" not in page(ended, [], [])


ALL_STAGES = ("map", "combine", "recombine", "unique", "merge")


@pytest.mark.parametrize("planned", [ALL_STAGES, tuple(s for s in ALL_STAGES if s != "unique"), ("write",)])
@pytest.mark.parametrize("taken", [("combine", "recombine"), ("combine",), ()])
def test_how_far_an_import_is_never_goes_back(planned: tuple[str, ...], taken: tuple[str, ...]) -> None:
    plan = replace(job().plan, kind=Kind.IMPORT, rows=None, partition=None, stages=planned)
    plan = replace(plan, terms=ImportTerms(rows_estimate=900))
    passed = [stage for stage in planned if stage in taken or "combine" not in stage]
    importing = job(plan=plan, kind=Kind.IMPORT, tasks_total=200)
    seen = [
        job_document(replace(importing, stage=stage, tasks_done=done, rows_done=done * 5))["progress"]
        for stage in passed
        for done in range(201)
    ]
    seen.append(job_document(replace(importing, state=State.COMMITTING, stage=planned[-1]))["progress"])
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0.0, 0.99)


def test_the_bar_of_a_job_that_has_lost_rows_does_not_shrink() -> None:
    stream, clock = io.StringIO(), StillClock()
    with ProgressView(Screen(stream), clock) as view:
        for rows, generation in ((700, 1), (400, 1), (300, 2)):
            view.update([job(rows_done=rows, generation=generation)])
            clock.sleep(60)
    shown = [each.split(" %")[0] for each in stream.getvalue().splitlines()]
    assert shown == ["202401: running 70", "202401: running 70", "202401: running 30"]


def test_an_empty_partition_is_done_only_when_it_is_published() -> None:
    empty = job(State.COMMITTING, tasks_total=0, tasks_done=0, rows_done=0)
    empty = replace(empty, plan=replace(empty.plan, rows=0))

    assert job_document(empty)["progress"] == 0.0
    assert job_document(replace(empty, state=State.COMPLETED))["progress"] == 1.0


def test_a_task_that_waits_for_its_next_try_says_when_and_why() -> None:
    error = ErrorInfo("Retryable", "storage is down", at=NOW - 30)
    tasks = [task(0, TaskState.WAITING, next_attempt_at=NOW + 12, error=error), task(1, TaskState.DONE)]

    text = page(job(), tasks, [entered(State.RUNNING, 50)])

    assert "1 task to be tried again, the next in 12 s (attempt 2 of 8): task 0, waiting since 30 s" in text
    assert "Retryable: storage is down" in text
    (waiting,) = job_document(job(), tasks)["waiting"]
    assert (waiting["task"], waiting["stage"], waiting["attempts"]) == (0, "write", 1)
    assert waiting["since"] == rfc3339(NOW - 30)
    assert waiting["next_attempt_at"] == rfc3339(NOW + 12)
    assert (waiting["error"]["class"], waiting["error"]["message"]) == ("Retryable", "storage is down")


def test_the_list_of_waiting_tasks_is_bounded_and_its_total_is_not() -> None:
    error = ErrorInfo("Retryable", "storage is down")
    tasks = [task(i, TaskState.WAITING, next_attempt_at=NOW + 900 - i, error=error) for i in range(300)]

    document = job_document(job(), tasks)

    assert document["waiting_total"] == 300
    assert [waiting["task"] for waiting in document["waiting"]] == list(range(299, 249, -1))
    assert job_document(job(State.FAILED), tasks)["waiting"] == []


def test_a_commit_that_does_not_go_through_says_why() -> None:
    error = ErrorInfo("Retryable", "the catalog does not answer", at=NOW - 9)

    text = page(
        job(State.COMMITTING, error=error), [task(0, TaskState.DONE)], [entered(State.COMMITTING, 50)]
    )

    assert "for its commit, since" in text
    assert "the last try, 9 s ago" in text
    assert "the catalog does not answer" in text


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
        for _ in range(8):
            clock.sleep(1)
            view.update([job(rows_done=int(clock.time - NOW) * 100)])
        view.update([job(State.COMPLETED, rows_done=1000, finished_at=NOW)])
    assert stream.getvalue().splitlines() == [
        "202401: pending 0 %, 0 of 1,000 rows",
        "202401: running 20 %, 200 of 1,000 rows, 100/s, 8 s left",
        "202401: running 70 %, 700 of 1,000 rows, 100/s, 3 s left",
        "202401: completed 100 %, 1,000 of 1,000 rows in 50 s",
    ]


def test_progress_names_the_table_where_there_are_several() -> None:
    stream, clock = io.StringIO(), StillClock()
    one, other = job(rows_done=1), job(rows_done=2)
    other = replace(other, job_id="other", plan=replace(other.plan, target="iceberg://lake/db.other"))
    with ProgressView(Screen(stream), clock) as view:
        view.update([one, other])
    table = one.plan.target.rpartition("/")[2]
    assert [each.partition(":")[0] for each in stream.getvalue().splitlines()] == [
        f"{table} 202401",
        "db.other 202401",
    ]


def test_progress_in_a_pipe_says_nothing_twice() -> None:
    stream, clock = io.StringIO(), StillClock()
    with ProgressView(Screen(stream), clock, lambda _: "starting Spark …") as view:
        for _ in range(300):
            view.update([job(rows_done=0)])
            clock.sleep(1)
    assert stream.getvalue().splitlines() == ["starting Spark …", "202401: running 0 %, 0 of 1,000 rows"]


def test_a_message_of_several_lines_is_printed_as_lines_and_hostile_names_stay_escaped() -> None:
    stream = io.StringIO()
    error = Invalid('2 columns do not fit\n  - "a\x1b[2J"\n  - "b\nerror: c"', hint="drop\nthem")
    print_error(error, stream)
    assert stream.getvalue().splitlines() == [
        "error: 2 columns do not fit",
        '  - "a\\x1b[2J"',
        '  - "b',
        '  error: c"',
        "hint: drop",
        "  them",
    ]


def test_show_and_the_closing_print_an_error_of_several_lines_as_lines() -> None:
    failed = job(State.FAILED, error=ErrorInfo("Invalid", "it moved\n  - a is gone\n  - b is new", "look"))
    text = page(failed, [], [])
    assert "error       Invalid: it moved\n                - a is gone\n                - b is new\n" in text
    assert [each.plain for each in closing(failed)] == [
        "✘ job abc123 failed, nothing was published: it moved",
        "  - a is gone",
        "  - b is new",
        "hint: look",
    ]


def test_an_error_that_would_come_again_is_not_answered_with_a_retry() -> None:
    text = page(job(State.FAILED, error=ErrorInfo("Corrupt", "x", "export anew")), [], [])
    assert "retry" not in text
    assert "ends the same way" in text


def test_labels_and_values_are_kept_apart() -> None:
    assert "generation  2 (it was retried)" in page(job(generation=2), [], [])


def test_the_tasks_of_an_ended_job_wait_for_nothing() -> None:
    error = ErrorInfo("OSError", "disk\ngone")
    tasks = [task(0, TaskState.WAITING), task(1, TaskState.FAILED, error=error)]

    text = page(job(State.FAILED, error=error), tasks, [])

    assert "waiting" not in text
    assert "when a worker is free" not in text
    assert "OSError: disk …" in text
    assert "after a resume" in page(job(State.PAUSED), tasks[:1], [])


def test_totals_count_what_was_published() -> None:
    jobs = [job(State.COMPLETED, finished_at=NOW), job(State.KILLED, finished_at=NOW)]
    assert plain_lines(closing_grid(jobs))[-1].split()[:3] == ["total", "published", "250"]
    assert plain_lines(closing_grid(jobs[:1]))[-1].split()[:2] == ["total", "250"]


def test_after_ctrl_c_every_open_job_is_named_with_what_helps_it() -> None:
    jobs = [job(job_id="a"), job(State.PENDING, job_id="b"), job(State.PAUSED, job_id="c")]

    said = [each.plain.strip() for each in ways_on(jobs)]

    assert said[1:] == [
        "lockstep worker --once",
        "lockstep resume c (it is paused)",
        "or give up: lockstep kill a b c",
    ]
    assert not any("worker --once" in each.plain for each in ways_on(jobs[2:]))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("long", "long"),
        ({"type": "list", "element-id": 2, "element": "long", "element-required": True}, "list<long>"),
        (
            {
                "type": "map",
                "key": "string",
                "value": {"type": "struct", "fields": [{"id": 1, "name": "a", "type": "date"}]},
            },
            "map<string, struct<a: date>>",
        ),
    ],
)
def test_types_read_as_people_write_them(kind: object, text: str) -> None:
    assert type_name(kind) == text


LONG = "clickhouse://warehouse-production-1.internal.example/analytics/page_views_by_country"


def many_jobs(*, one_table: bool) -> list[Job]:
    return [
        job(
            state,
            job_id=f"01a1de9b3bd1{index:012x}",
            rows_done=1_000_000,
            snapshot_id=8_234_567_890_123_456_789,
            created_at=NOW - 13 * 60,
            finished_at=NOW,
            plan=replace(
                job().plan,
                partition=f"20240{index}",
                source=LONG if one_table else f"{LONG}_{index}",
                target=LONG.replace("clickhouse", "iceberg"),
                rows=1_000_000,
            ),
        )
        for index, state in enumerate(State)
    ]


def on_terminal(grid: Grid, width: int) -> list[str]:
    stream = Terminal()
    screen = Screen(stream)
    screen.console = Console(file=stream, width=width, no_color=True, highlight=False, markup=False)
    screen.print(grid)
    return [re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip() for text in stream.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("one_table", [True, False])
def test_jobs_fit_the_terminal_with_a_line_per_job(width: int, one_table: bool) -> None:
    jobs = many_jobs(one_table=one_table)

    shown = on_terminal(jobs_grid(jobs, NOW), width)

    assert max(map(len, shown)) <= width
    rows = [text for text in shown if "01a1de9b3bd1" in text]
    for each, text in zip(jobs, rows, strict=True):
        assert each.job_id in text
        assert f" {each.plan.partition} " in text
        assert each.state.value in text
    assert "partition" in " ".join(shown)
    assert not any(text.endswith("ag") for text in shown)
    text = "\n".join(shown)
    assert "by_country" in text


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_closing_table_fits_the_terminal(width: int) -> None:
    jobs = many_jobs(one_table=True)
    jobs = [each for each in jobs if not each.state.live]
    shown = on_terminal(closing_grid(jobs), width)
    assert max(map(len, shown)) <= width
    for each in jobs:
        assert any(str(each.plan.partition) in text for text in shown)
        assert any(each.job_id in text and str(each.snapshot_id) in text for text in shown)


def test_a_terminal_that_is_too_narrow_for_anything_loses_nothing() -> None:
    shown = "".join(on_terminal(jobs_grid(many_jobs(one_table=True), NOW), 30))
    for each in many_jobs(one_table=True):
        assert each.job_id in shown
        assert each.state.value in shown


def test_text_is_shortened_in_its_middle() -> None:
    assert middle_out("iceberg://lake/db.events", 16) == "icebe…/db.events"
    assert middle_out("short", 16) == "short"


def test_progress_on_a_terminal_has_a_bar_per_job_and_a_total() -> None:
    stream, clock = Terminal(), StillClock()
    screen = Screen(stream)
    screen.console.width = 140
    with ProgressView(screen, clock) as view:
        view.update([job(), job(State.COMPLETED, job_id="other", rows_done=1000)])
    shown = stream.getvalue()
    assert "━" in shown
    assert "1 of 2 jobs · 1,250 of 2,000 rows" in shown
