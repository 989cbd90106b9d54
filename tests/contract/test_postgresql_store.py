"""What the store on PostgreSQL promises beyond the contract: clock, locks, lost servers and lost replies."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.dialects import postgresql

from lockstep.errors import ErrorInfo, Fenced, Incompatible, Invalid, LockstepError, Retryable
from lockstep.job import Event, Lease, Progress, State
from lockstep.store import Claim, JobStore, open_store, sql_schema
from lockstep.store.sql import SqlStore
from lockstep.store.sql_offers import OFFERS
from tests.servers import PASSWORD, Postgresql
from tests.standstill import within
from tests.store_lab import (
    LEASE_S,
    MovedClock,
    begin_task,
    check_always_true,
    job_in,
    new_job,
    open_at_once,
    run_task,
    staged,
    take_commit,
)

pytestmark = pytest.mark.servers

_numbers = count(1)


@dataclass(frozen=True)
class Own:
    """A schema of the test's own, under the clock that the server has.

    Not a database: those have hundreds of files, and a server that died syncs every one of them.
    """

    server: Postgresql
    schema: str

    def url(self, **options: str) -> str:
        return self.server.url("postgres", search_path=self.schema, **options)

    def run(self, sql: str) -> list[tuple[object, ...]]:
        return self.server.run(sql.replace("lockstep_", f"{self.schema}.lockstep_"))


@pytest.fixture
def own(postgresql: Postgresql) -> Own:
    name = f"own{next(_numbers)}"
    postgresql.run(f"CREATE SCHEMA {name}")
    return Own(postgresql, name)


@pytest.fixture
def url(own: Own) -> str:
    return own.url()


@pytest.fixture
def store(url: str) -> Iterator[JobStore]:
    opened = open_store(url)
    yield opened
    check_always_true(opened)
    opened.close()


def wait_until(happened: Callable[[], bool], within_s: float = 20.0) -> float:
    """How long it took."""
    start = time.monotonic()
    while not happened():
        assert time.monotonic() - start < within_s
        time.sleep(0.01)
    return time.monotonic() - start


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that go to the server past SQLAlchemy."""
    statements: list[str] = []
    execute = psycopg.Cursor.execute

    def noted(cursor: Any, query: Any, *about: Any, **options: Any) -> Any:
        statements.append(query)
        return execute(cursor, query, *about, **options)

    monkeypatch.setattr(psycopg.Cursor, "execute", noted)
    return statements


# Opening


def test_many_open_a_new_database_at_the_same_instant(url: str) -> None:
    open_at_once(url, clients=5)


def test_a_store_that_a_newer_version_wrote_is_refused_and_left_as_it_is(
    store: JobStore, own: Own, url: str
) -> None:
    own.run("UPDATE lockstep_version SET version_num = '0099'")
    with pytest.raises(Incompatible, match="0099") as refused:
        open_store(url)
    assert PASSWORD not in refused.value.message
    assert own.run("SELECT version_num FROM lockstep_version") == [("0099",)]
    own.run(f"UPDATE lockstep_version SET version_num = '{sql_schema.HEAD}'")


def test_the_migrations_make_the_schema_that_the_code_uses(store: JobStore, url: str) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        differences = compare_metadata(context, sql_schema.metadata)
    engine.dispose()
    assert [found for found in differences if "version_num" not in str(found)] == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ((":s3cret", ":wrong"), Invalid),
        ((r"/postgres\?", "/nothing?"), Invalid),
        (("//lockstep:", "//nobody:"), Invalid),
        ((r":\d+/", ":1/"), Retryable),
    ],
    ids=["password", "database", "user", "server"],
)
def test_a_store_that_cannot_be_opened_says_why_and_not_the_password(
    url: str, change: tuple[str, str], expected: type[LockstepError]
) -> None:
    with pytest.raises(expected) as refused:
        open_store(re.sub(*change, url))
    said = f"{refused.value} {refused.value.hint}"
    assert "***" in said
    assert "postgresql://" in said
    assert "s3cret" not in said
    assert "word" not in said.replace("password", "")
    assert refused.value.hint


def test_a_password_among_the_options_is_not_printed_either(postgresql: Postgresql, url: str) -> None:
    bare = f"postgresql://lockstep@127.0.0.1:{postgresql.port}/nothing?password=hush"
    with pytest.raises(Invalid) as refused:
        open_store(bare)
    assert "hush" not in f"{refused.value} {refused.value.hint}"


def test_an_answered_verb_survives_a_power_cut(store: SqlStore) -> None:
    with store._db.write() as connection:
        assert connection.exec_driver_sql("SHOW fsync").scalar() == "on"
        assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "on"


CLI = "import sys; from lockstep.cli.main import main; sys.exit(main())"


@pytest.mark.parametrize("command", ["jobs", "doctor"])
def test_the_command_line_takes_the_password_from_the_environment_and_never_prints_it(
    store: JobStore, own: Own, tmp_path: Path, command: str
) -> None:
    store.create([new_job("job1")])
    address = own.url().replace(quote(PASSWORD, safe=""), "${STORE_PASSWORD}")
    (tmp_path / "lockstep.toml").write_text(f'[store]\nurl = "{address}"\n')
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", CLI, command, "--json"],
        cwd=tmp_path,
        env={**os.environ, "STORE_PASSWORD": PASSWORD, "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "s3cret" not in run.stdout + run.stderr
    answer = json.loads(run.stdout)
    if command == "jobs":
        assert [job["job_id"] for job in answer] == ["job1"]
    else:
        [found] = [check for check in answer["checks"] if check["name"] == "store"]
        assert found["verdict"] == "ok"
        assert "1 jobs" in found["detail"]


# The clock


def test_leases_are_judged_by_the_clock_of_the_database_whatever_a_client_believes(
    store: JobStore, url: str
) -> None:
    store.create([new_job("job1")])
    behind, ahead = (SqlStore(url, MovedClock(at)) for at in (0.0, 4e9))
    [claim] = behind.claim("behind", 1, LEASE_S)
    assert abs((claim.task.lease_until or 0) - LEASE_S - time.time()) < 10
    assert ahead.claim("ahead", 1, LEASE_S) == []
    assert ahead.expire(0.0) == []
    assert behind.begin(claim.lease, 3.0).lease.epoch == 2
    assert ahead.claim("ahead", 1, LEASE_S) == []
    wait_until(lambda: len(ahead.claim("ahead", 1, LEASE_S)) == 1)
    behind.close()
    ahead.close()


# Locks


def test_a_job_that_a_client_sits_on_does_not_hold_up_the_claims_of_others(store: JobStore, url: str) -> None:
    store.create([new_job("stuck", 2), new_job("free", 2), new_job("commit", 0)])
    with psycopg.connect(url) as sitting:
        sitting.execute("SELECT 1 FROM lockstep_jobs WHERE job_id = 'stuck' FOR UPDATE")
        with within(5):
            assert [claim.lease.job_id for claim in store.claim("w1", 2, LEASE_S)] == ["free", "free"]
            assert store.read("stuck").state is State.PENDING
            assert store.claim_commit("w1", LEASE_S) is not None
    assert [claim.lease.job_id for claim in store.claim("w1", 2, LEASE_S)] == ["stuck", "stuck"]


def test_a_claim_waits_for_a_job_that_is_changed_at_this_instant_rather_than_find_nothing(
    store: JobStore, url: str
) -> None:
    store.create([new_job("job1", 2)])
    with psycopg.connect(url) as busy:
        busy.execute("SELECT 1 FROM lockstep_jobs FOR UPDATE")
        release = threading.Timer(0.3, busy.commit)
        release.start()
        assert len(store.claim("w1", 2, LEASE_S)) == 2
        release.join()


def test_a_job_that_stays_locked_is_retryable(store: JobStore, own: Own, url: str) -> None:
    store.create([new_job("job1")])
    impatient = open_store(own.url(lock_timeout="100ms"))
    with psycopg.connect(url) as sitting:
        sitting.execute("SELECT 1 FROM lockstep_jobs FOR UPDATE")
        with pytest.raises(Retryable, match="locked"):
            impatient.pause("job1")
    assert impatient.pause("job1").state is State.PAUSED
    impatient.close()


HOLD = """
import sys, threading
from lockstep.store.sql import SqlStore
store = SqlStore(sys.argv[1])
with store._db.write() as connection:
    store._lock(connection, "job1")
    print("locked", flush=True)
    threading.Event().wait(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_client_that_dies_or_stops_with_a_lock_does_not_keep_a_kill_from_its_promised_time(
    store: JobStore, own: Own, how: signal.Signals
) -> None:
    store.create([new_job("job1")])
    child = subprocess.Popen([sys.executable, "-c", HOLD, own.url()], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "locked\n"
        os.kill(child.pid, how)
        with within(5):
            assert store.stop("job1", Event.KILL).state is State.KILLED
    finally:
        child.kill()
        child.communicate()


def test_no_session_waits_or_sits_on_a_lock_for_ever(store: SqlStore) -> None:
    with store._db.write() as connection:
        for setting, value in {
            "statement_timeout": "30s",
            "lock_timeout": "15s",
            "idle_in_transaction_session_timeout": "3s",
        }.items():
            assert connection.exec_driver_sql(f"SHOW {setting}").scalar() == value


def test_a_deadlock_is_resolved_inside_the_verb(store: JobStore, own: Own, url: str) -> None:
    store.create([new_job("a"), new_job("b")])
    leases = [store.begin(claim.lease, LEASE_S).lease for claim in store.claim("w1", 2, LEASE_S)]
    # Whose patience ends first looks for deadlocks, and is the one that gives way.
    watchful = open_store(own.url(deadlock_timeout="100ms"))
    with psycopg.connect(own.url(deadlock_timeout="1min")) as other:
        other.execute("SELECT 1 FROM lockstep_jobs WHERE job_id = 'b' FOR UPDATE")
        answers: list[Any] = []
        beat = threading.Thread(
            target=lambda: answers.append(
                watchful.heartbeat({lease: Progress(1, 1) for lease in leases}, LEASE_S)
            )
        )
        beat.start()
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        wait_until(lambda: own.run(waiting) == [(1,)])
        other.execute("SELECT 1 FROM lockstep_jobs WHERE job_id = 'a' FOR UPDATE")
        other.commit()
        beat.join()
    assert [*answers[0].values()] == ["go_on", "go_on"]
    watchful.close()


def after_the_next(look_name: str, store: SqlStore, happens: Callable[[], object]) -> None:
    """Let something happen once, after the next look at the database and before what follows from it."""
    look = getattr(store._db, look_name)

    def look_then_wait(*about: Any) -> Any:
        setattr(store._db, look_name, look)
        seen = look(*about)
        happens()
        return seen

    setattr(store._db, look_name, look_then_wait)


def between_read_and_write(store: SqlStore, happens: Callable[[], object]) -> None:
    """After the next verb has read its job and before it changes it."""
    after_the_next("lock", store, happens)


VERBS: dict[str, Callable[[JobStore, Lease], object]] = {
    "begin": lambda store, lease: store.begin(lease, LEASE_S),
    "checkpoint": lambda store, lease: store.checkpoint(
        lease, {"row": 1}, [staged("a")], Progress(1, 10), LEASE_S
    ),
    "finish": lambda store, lease: store.finish(lease, {"row": 1}, [staged("a")], Progress(1, 10)),
}


@pytest.mark.parametrize("verb", VERBS)
def test_what_another_client_does_between_read_and_write_is_not_lost(
    store: SqlStore, own: Own, url: str, verb: str
) -> None:
    log = own.server.folder / "log"
    said_before = log.stat().st_size
    other = open_store(url)
    store.create([new_job("job1", 3)])
    first, second = (begin_task(store, "job1").lease for _ in range(2))
    between_read_and_write(
        store, lambda: other.checkpoint(second, {"row": 4}, [staged("b")], Progress(4, 40), LEASE_S)
    )
    VERBS[verb](store, first)
    job = store.read("job1")
    assert (job.rows_done, job.files) == ((4, 1) if verb == "begin" else (5, 2))
    assert job.attempts == (3 if verb == "begin" else 2)
    # It is the usual case when several workers share a job: nothing to trouble the server's owner with.
    assert b"ERROR" not in log.read_bytes()[said_before:]
    other.close()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("event", ["killed", "failed", "begun anew"])
def test_a_lease_that_is_lost_between_read_and_write_changes_nothing(
    store: SqlStore, url: str, verb: str, event: str
) -> None:
    other = open_store(url)
    store.create([new_job("job1", 2)])
    lease = begin_task(store, "job1").lease
    happens = {
        "killed": lambda: other.stop("job1", Event.KILL),
        "failed": lambda: other.fail(lease, ErrorInfo("Retryable", "storage is away"), 60.0),
        "begun anew": lambda: other.begin(lease, LEASE_S),
    }
    between_read_and_write(store, happens[event])
    if verb == "begin" and event == "begun anew":
        # Each call is a new attempt: this one comes after the other.
        assert store.begin(lease, LEASE_S).lease.epoch == lease.epoch + 2
    else:
        with pytest.raises(Fenced):
            VERBS[verb](store, lease)
    job = store.read("job1")
    assert (job.rows_done, job.files, job.tasks_done) == (0, 0, 0)
    other.close()


def between_offer_and_claim(store: SqlStore, happens: Callable[[], object]) -> None:
    """After the next claim has chosen its tasks and before it leases them."""
    after_the_next("offers", store, happens)


def test_tasks_that_another_client_takes_between_offer_and_claim_are_not_leased_twice(
    store: SqlStore, own: Own, url: str
) -> None:
    log = own.server.folder / "log"
    said_before = log.stat().st_size
    other = open_store(url)
    store.create([new_job("job1", 6), new_job("job2", 6)])
    assert len(store.claim("w1", 2, LEASE_S)) == 2
    theirs: list[Claim] = []
    between_offer_and_claim(store, lambda: theirs.extend(other.claim("w2", 4, LEASE_S)))
    mine = store.claim("w1", 4, LEASE_S)
    taken = [(claim.lease.job_id, claim.lease.index) for claim in (*mine, *theirs)]
    assert len(taken) == 8
    assert len(set(taken)) == 8
    assert b"ERROR" not in log.read_bytes()[said_before:]
    other.close()


@pytest.mark.parametrize("event", ["killed", "paused", "failed"])
def test_a_job_that_stops_between_offer_and_claim_leases_nothing(
    store: SqlStore, url: str, event: str
) -> None:
    other = open_store(url)
    store.create([new_job("job1", 3)])
    store.claim("w1", 1, LEASE_S)
    happens = {
        "killed": lambda: other.stop("job1", Event.KILL),
        "paused": lambda: other.pause("job1"),
        "failed": lambda: other.stop("job1", Event.FAIL, ErrorInfo("Corrupt", "gone")),
    }
    between_offer_and_claim(store, happens[event])
    assert store.claim("w1", 2, LEASE_S) == []
    assert [task.state for task in store.tasks("job1")][1:] == ["waiting", "waiting"]
    other.close()


def test_an_everyday_claim_is_two_statements_and_says_what_a_longer_one_says(
    store: SqlStore, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create([new_job("job1", 9), new_job("job2", 9)])
    first = store.claim("w0", 2, LEASE_S)
    for claim in first:
        store.fail(store.begin(claim.lease, LEASE_S).lease, ErrorInfo("Retryable", "away"), 0.0)
    sent.clear()
    claims = store.claim("w1", 8, LEASE_S)
    assert len(sent) == 2
    assert Counter(claim.lease.job_id for claim in claims) == {"job1": 4, "job2": 4}
    monkeypatch.setattr(store._db, "at_once", lambda decide: [])
    more = store.claim("w1", 1, LEASE_S)
    assert len(sent) > 4
    for claim in (*claims, *more):
        [task] = [task for task in store.tasks(claim.lease.job_id) if task.index == claim.lease.index]
        assert claim.task == task
    now = store.read("job1")
    for claim in (*claims, *more):
        if claim.lease.job_id == "job1":
            assert replace(claim.job, updated_at=now.updated_at) == now


def test_begin_checkpoint_and_finish_are_one_statement_each_for_who_is_alone_with_a_job(
    store: JobStore, sent: list[str]
) -> None:
    store.create([new_job("job1", 9)])
    begin_task(store, "job1")
    [claim] = store.claim("w1", 1, LEASE_S)
    sent.clear()
    lease = store.begin(claim.lease, LEASE_S).lease
    store.checkpoint(lease, {"row": 1}, [staged("a")], Progress(1, 10), LEASE_S)
    store.checkpoint(lease, {"row": 2}, [staged("b")], Progress(2, 20), LEASE_S)
    store.finish(lease, {"row": 3}, [staged("c")], Progress(3, 30))
    assert len(sent) == 4
    task = store.tasks("job1")[claim.lease.index]
    assert (task.state, task.epoch, task.rows_done, task.files) == ("done", lease.epoch, 3, 3)
    assert abs((task.started_at or 0) - time.time()) < 10
    job = store.read("job1")
    assert (job.rows_done, job.bytes_done, job.files, job.attempts) == (3, 30, 3, 2)
    assert job.fingerprint is not None
    assert job.fingerprint.rows == 3 * staged("a").fingerprint.rows


def test_what_is_remembered_of_a_job_that_others_have_changed_is_not_written_back(
    store: JobStore, own: Own, url: str
) -> None:
    log = own.server.folder / "log"
    said_before = log.stat().st_size
    other = open_store(url)
    store.create([new_job("job1", 4)])
    mine, theirs = (begin_task(store, "job1").lease for _ in range(2))
    for row in range(1, 4):
        other.heartbeat({mine: Progress(10 * row, 0), theirs: Progress(10 * row, 0)}, LEASE_S)
        position = Progress(10 * row, row)
        store.checkpoint(mine, {"row": row}, [staged(f"m{row}")], position, LEASE_S)
        other.checkpoint(theirs, {"row": row}, [staged(f"t{row}")], position, LEASE_S)
    job = store.read("job1")
    assert (job.rows_done, job.bytes_done, job.files) == (60, 6, 6)
    other.pause("job1")
    assert store.checkpoint(mine, {"row": 5}, [], Progress(50, 5), LEASE_S) == "pause"
    other.resume("job1")
    store.finish(mine, {"row": 6}, [], Progress(60, 6))
    assert store.read("job1").rows_done == 90
    assert b"ERROR" not in log.read_bytes()[said_before:]
    other.close()


def test_a_task_that_is_remembered_and_was_taken_by_another_is_refused_without_a_word_in_the_log(
    store: JobStore, own: Own, url: str
) -> None:
    log = own.server.folder / "log"
    said_before = log.stat().st_size
    other = open_store(url)
    store.create([new_job("job1", 2)])
    store.claim("w2", 1, LEASE_S)
    [claim] = store.claim("w1", 1, LEASE_S)
    lease = store.begin(claim.lease, LEASE_S).lease
    # Neither of these touches the job's own row.
    other.abandon("w1")
    [taken] = other.claim("w3", 1, LEASE_S)
    assert taken.lease.index == lease.index
    for verb in ("checkpoint", "finish", "begin"):
        with pytest.raises(Fenced):
            VERBS[verb](store, lease)
    other.begin(taken.lease, LEASE_S)
    assert store.read("job1").files == 0
    assert b"ERROR" not in log.read_bytes()[said_before:]
    other.close()


@pytest.mark.parametrize("known", ["nothing", "an empty table", "a full one"])
def test_a_claim_walks_through_no_task_that_is_done_whatever_the_server_knows_of_the_table(
    store: JobStore, own: Own, known: str
) -> None:
    if known == "an empty table":
        own.run("ANALYZE lockstep_tasks")
    store.create([new_job("job1", 2_000)])
    if known == "a full one":
        own.run("ANALYZE lockstep_tasks")
    offers = OFFERS.compile(dialect=postgresql.dialect(paramstyle="pyformat"))
    plan = str(own.run("EXPLAIN " + str(offers) % {**offers.params, "slots": 4}))
    assert "lockstep_tasks_open" in plan
    assert "lockstep_tasks_leased" in plan
    assert "lockstep_tasks_pkey" not in plan
    assert "Seq Scan on lockstep_tasks" not in plan


def test_a_task_is_found_by_its_key_although_the_server_knows_nothing_of_the_table_yet(
    store: JobStore, own: Own
) -> None:
    """Without statistics, an index that holds all tasks of a job would look as good as the key."""
    store.create([new_job("job1", 5_000)])
    one = "job_id = 'job1' AND stage = 'write' AND idx = 7"
    plan = own.run(
        f"EXPLAIN UPDATE lockstep_tasks SET epoch = 1 WHERE {one} AND state = 'waiting' AND epoch = 0"
    )
    assert "lockstep_tasks_pkey" in str(plan)
    free = "job_id = 'job1' AND stage = 'write' AND free_at <= 1 ORDER BY free_at, idx LIMIT 4"
    plan = own.run(f"EXPLAIN SELECT * FROM lockstep_tasks WHERE {free}")
    assert "lockstep_tasks_open" in str(plan)
    assert "Sort" not in str(plan)


# Lost servers and lost replies


def test_a_restarted_server_costs_no_verb_and_a_stopped_one_is_retryable(
    store: JobStore, postgresql: Postgresql
) -> None:
    store.create([new_job("job1", 2)])
    lease = begin_task(store, "job1").lease
    postgresql.restart()
    assert store.read("job1").state is State.RUNNING
    postgresql.stop()
    try:
        for verb in (
            lambda: store.read("job1"),
            lambda: store.claim("w1", 1, LEASE_S),
            lambda: store.checkpoint(lease, {"row": 5}, [staged("a")], Progress(5, 10), LEASE_S),
            lambda: list(store.manifest("job1", "write")),
        ):
            with pytest.raises(Retryable) as refused:
                verb()
            assert PASSWORD not in str(refused.value)
    finally:
        postgresql.start()
    store.finish(lease, {"row": 5}, [staged("a")], Progress(5, 10))
    run_task(store, "job1")
    assert store.read("job1").state is State.COMMITTING


def insist(verb: Callable[..., Any], *about: Any) -> Any:
    """Send a verb until it is answered, as workers do."""
    for _ in range(2000):
        try:
            return verb(*about)
        except Retryable:
            time.sleep(0.01)
    raise AssertionError("no answer")


def test_nothing_is_lost_or_done_twice_while_the_server_dies_again_and_again(
    store: JobStore, postgresql: Postgresql, url: str
) -> None:
    store.create([new_job("job1", 60)])
    done = threading.Event()
    answered: list[str] = []
    errors: list[BaseException] = []

    def work(name: str) -> None:
        mine = open_store(url)
        try:
            while not done.is_set():
                # A claim whose reply was lost is a lease that runs out.
                for claim in insist(mine.claim, name, 3, 1.0):
                    begun = insist(mine.begin, claim.lease, 5.0)
                    file = staged(f"{claim.lease.index}-{begun.lease.epoch}")
                    insist(mine.finish, begun.lease, {}, [file], Progress(1, 1))
                    answered.append(file.path)
                if insist(mine.read, "job1").state is State.COMMITTING:
                    return
        except BaseException as error:
            errors.append(error)
        finally:
            mine.close()

    def reached(goal: int) -> bool:
        return len(answered) >= goal or bool(errors)

    workers = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(2)]
    for worker in workers:
        worker.start()
    try:
        for goal in (8, 20, 35):
            wait_until(partial(reached, goal), 60)
            postgresql.restart()
        for worker in workers:
            worker.join(60)
    finally:
        done.set()
    assert [error for error in errors if "was taken by a newer" not in str(error)] == []
    job = store.read("job1")
    assert (job.state, job.tasks_done, job.files) == (State.COMMITTING, 60, 60)
    assert {*answered} <= {file.path for file in store.manifest("job1", "write")}


class Cutter:
    """Between a client and the server; when armed, it drops both at the next COMMIT, or at a change that
    needs none because it is one statement.

    `landed` says whether the server still gets to see it: either way the client has no reply.
    """

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        self.landed: bool | None = None
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._door.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._server_port)) as server, suppress(OSError):
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    if ready is client and self.landed is not None and self._ends_a_verb(data):
                        if self.landed:
                            server.sendall(data)
                            server.recv(65536)
                        self.landed = None
                        self.cuts += 1
                        return
                    (server if ready is client else client).sendall(data)

    def _ends_a_verb(self, data: bytes) -> bool:
        return b"COMMIT\0" in data or b"lockstep_jobs.xmin::text = " in data

    def close(self) -> None:
        self._door.close()


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "not landed"])
def test_a_verb_whose_reply_was_lost_answers_the_same_when_it_is_sent_again(
    store: JobStore, postgresql: Postgresql, url: str, landed: bool
) -> None:
    cutter = Cutter(postgresql.port)
    client = open_store(url.replace(f":{postgresql.port}/", f":{cutter.port}/"))

    def cut_then_again(verb: Callable[[], Any]) -> Any:
        cutter.landed = landed
        before = cutter.cuts
        with pytest.raises(Retryable, match="lost before it answered") as lost:
            verb()
        assert cutter.cuts == before + 1
        assert PASSWORD not in str(lost.value)
        return verb()

    try:
        [job] = cut_then_again(lambda: client.create([new_job("job1", 2)]))
        assert job.tasks_total == 2
        lease = begin_task(client, "job1").lease
        again = cut_then_again(lambda: client.begin(lease, LEASE_S)).lease
        assert again.epoch == lease.epoch + (2 if landed else 1)
        files = [staged("a"), staged("b")]
        cut_then_again(lambda: client.checkpoint(again, {"row": 1}, files[:1], Progress(1, 1), LEASE_S))
        cut_then_again(lambda: client.heartbeat({again: Progress(2, 2)}, LEASE_S))
        cut_then_again(lambda: client.finish(again, {"row": 3}, files[1:], Progress(3, 3)))
        other = begin_task(client, "job1").lease
        cut_then_again(lambda: client.release(other))
        assert cut_then_again(lambda: client.pause("job1")).state is State.PAUSED
        assert cut_then_again(lambda: client.resume("job1")).state is State.PENDING
        run_task(client, "job1")
        commit = take_commit(client, "job1").lease
        cut_then_again(lambda: client.renew_commit(commit, LEASE_S))
        ended = cut_then_again(lambda: client.end(commit, Event.COMMITTED, snapshot_id=7))
        assert (ended.state, ended.snapshot_id, ended.files) == (State.COMPLETED, 7, 3)
        cut_then_again(lambda: client.released("job1"))
        job_in(client, State.FAILED, "job2")
        assert cut_then_again(lambda: client.retry("job2")).generation == 2
        assert cut_then_again(lambda: client.stop("job2", Event.KILL)).state is State.KILLED
    finally:
        client.close()
        cutter.close()
    assert [file.path for file in store.manifest("job1", "write")][:2] == [file.path for file in files]


# Text


def test_what_postgresql_cannot_hold_is_refused_or_replaced(store: JobStore) -> None:
    with pytest.raises(Invalid):
        store.create([new_job("job1"), new_job("job2", scope="a\0b")])
    with pytest.raises(Invalid):
        store.create([new_job("job1"), new_job("job2", scope="\udcff")])
    assert store.list() == []
    store.create([new_job("job1", partition="a\0b\udcff")])
    assert store.read("job1").plan.partition == "a\0b\udcff"
    error = ErrorInfo("Retryable", "bad byte \0 \udcff")
    store.fail(begin_task(store, "job1").lease, error, 1.0)
    assert store.tasks("job1")[0].error == error
    assert "bad byte \N{REPLACEMENT CHARACTER}" in store.history("job1")[-1].detail


# The server of the tests


def test_the_server_of_a_test_run_that_was_killed_is_gone() -> None:
    code = (
        "import sys, threading; from tests.servers import Postgresql; server = Postgresql(); "
        "print(server.folder, flush=True); threading.Event().wait(60)"
    )
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert child.stdout is not None
    folder = Path(child.stdout.readline().strip())
    postmaster = int((folder / "data/postmaster.pid").read_text().split()[0])
    child.kill()
    child.communicate()
    wait_until(lambda: not folder.exists() and not Path(f"/proc/{postmaster}").exists())
