"""What the SQL store promises beyond the contract: its file, its schema, damage, and what its verbs cost."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine, event

from lockstep.errors import Conflict, Corrupt, Incompatible, Invalid, LockstepError, Retryable
from lockstep.job import Event, Progress, State
from lockstep.store import open_store, sql_database, sql_schema, sql_sqlite
from lockstep.store.sql import SqlStore
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
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def store(path: Path, clock: MovedClock) -> Iterator[SqlStore]:
    opened = SqlStore(f"sqlite:///{path}", clock)
    yield opened
    opened.close()


def by_hand(path: Path, *statements: str) -> None:
    """What a person does with the sqlite3 shell."""
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement).fetchall()
    connection.close()


@contextmanager
def counted(store: SqlStore) -> Iterator[list[str]]:
    """The statements that SQLite is given, whoever speaks to it."""
    statements: list[str] = []

    def watch(connection: sqlite3.Connection, *_rest: object) -> None:
        connection.set_trace_callback(statements.append)

    event.listen(store._db._engine.pool, "checkout", watch)
    yield statements
    event.remove(store._db._engine.pool, "checkout", watch)


# Opening


def test_an_unknown_kind_of_store_is_refused_with_the_known_ones() -> None:
    with pytest.raises(Invalid, match="redis") as refused:
        open_store("redis://host/0")
    assert "sqlite:///" in (refused.value.hint or "")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hush@host",
        "postgresql+asyncpg://me:hush@host/db",
        "postgresql://me:hush@host:port/db",
        "postgresql://me:hush@one,two/db?port=hush",
        "sqlite+hush://me:hush@host/db",
    ],
)
def test_an_address_that_is_not_taken_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(Invalid) as refused:
        open_store(url)
    assert "hush" not in f"{refused.value} {refused.value.hint}".replace("sqlite+hush", "")
    assert refused.value.__cause__ is None
    assert refused.value.hint


def test_a_missing_driver_says_which_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "psycopg"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(Invalid, match="driver for PostgreSQL") as refused:
        open_store("postgresql://me:hush@host/db")
    assert "lockstep[postgresql]" in (refused.value.hint or "")


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite:", "sqlite+aiosqlite:///x.db"])
def test_a_store_without_a_file_is_refused(url: str) -> None:
    with pytest.raises(Invalid):
        open_store(url)


def test_a_store_that_cannot_be_opened_says_which_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a database, but long enough to have a header " * 20)
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder", "file/below/jobs.db"):
        with pytest.raises(Invalid, match=name.partition("/")[0]) as refused:
            open_store(f"sqlite:///{tmp_path}/{name}")
        assert refused.value.hint
    assert (tmp_path / "file").read_text().startswith("not a database")


def test_a_relative_path_is_taken_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    open_store("sqlite:///.lockstep/jobs.db").close()
    assert (tmp_path / ".lockstep/jobs.db").exists()


def test_a_store_of_a_newer_version_is_refused_and_left_as_it_is(store: SqlStore, path: Path) -> None:
    store.create([new_job("job1")])
    store.close()
    by_hand(path, "UPDATE lockstep_version SET version_num = '0099'", "PRAGMA wal_checkpoint(TRUNCATE)")
    before = path.read_bytes()
    with pytest.raises(Incompatible, match="0099") as refused:
        open_store(f"sqlite:///{path}")
    assert "upgrade" in (refused.value.hint or "")
    assert path.read_bytes() == before


def test_the_migrations_make_the_schema_that_the_code_uses(store: SqlStore, path: Path) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        differences = compare_metadata(context, sql_schema.metadata)
    engine.dispose()
    assert [found for found in differences if "version_num" not in str(found)] == []


def test_head_is_the_newest_migration() -> None:
    versions = Path(sql_schema.__file__).parent / "migrations/versions"
    numbers = sorted(file.name[1:5] for file in versions.glob("r*.py"))
    assert numbers[-1] == sql_schema.HEAD


def test_a_migration_that_fails_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate = sql_database.migrate

    def fails(connection: object) -> None:
        migrate(connection)  # type: ignore[arg-type]
        raise Retryable("power cut")

    monkeypatch.setattr(sql_database, "migrate", fails)
    with pytest.raises(Retryable):
        open_store(f"sqlite:///{path}")
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == []
    connection.close()
    monkeypatch.undo()
    open_store(f"sqlite:///{path}").close()


def test_a_store_that_is_up_to_date_opens_without_alembic(store: SqlStore, path: Path) -> None:
    code = (
        "import sys; from lockstep.store import open_store; "
        f"open_store('sqlite:///{path}').list(); sys.exit('alembic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_many_open_a_new_store_at_the_same_instant(path: Path) -> None:
    open_at_once(f"sqlite:///{path}", clients=6)


def test_an_answered_verb_survives_a_power_cut(store: SqlStore) -> None:
    with store._db.read() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL


def test_a_locked_store_is_retryable_and_can_still_be_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_sqlite, "BUSY_TIMEOUT_S", 0.05)
    store = open_store(f"sqlite:///{path}")
    store.create([new_job("job1")])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Retryable, match="locked") as refused:
        store.claim("w1", 1, LEASE_S)
    assert refused.value.hint
    assert store.read("job1").state is State.PENDING
    other.execute("COMMIT")
    other.close()
    assert len(store.claim("w1", 1, LEASE_S)) == 1
    store.close()


def test_text_that_is_not_unicode_is_refused_and_nothing_is_created(store: SqlStore) -> None:
    with pytest.raises(Invalid):
        store.create([new_job("job1"), new_job("job2", scope="\udcff")])
    assert store.list() == []


def test_hostile_names_are_kept_as_they_are(store: SqlStore) -> None:
    name = "'; DROP TABLE lockstep_jobs; -- \" % _ \x00 \n 🦆"
    store.create([new_job("job1", scope=name, source=name, partition=name)])
    assert store.read("job1").plan.partition == name
    assert [job.job_id for job in store.holders(name)] == ["job1"]


# Damage

NEWER_PLAN = (
    "UPDATE lockstep_plans SET plan = replace(plan, '\"format_version\":1', '\"format_version\":99') "
    "WHERE job_id = 'bad'",
    "UPDATE lockstep_jobs SET plan_format = 99 WHERE job_id = 'bad'",
)
DAMAGE = {
    "newer plan": (Incompatible, NEWER_PLAN),
    "damaged plan": (Corrupt, ["UPDATE lockstep_plans SET plan = '{\"kind\"' WHERE job_id = 'bad'"]),
    "plan of another shape": (Corrupt, ["UPDATE lockstep_plans SET plan = '[]' WHERE job_id = 'bad'"]),
    "no plan": (Corrupt, ["DELETE FROM lockstep_plans WHERE job_id = 'bad'"]),
}


@pytest.mark.parametrize("damage", [*DAMAGE])
def test_a_job_that_cannot_be_read_does_not_block_the_others(
    store: SqlStore, path: Path, clock: MovedClock, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected, statements = DAMAGE[damage]
    store.create([new_job("bad", 3)])
    clock.at += 1
    store.create([new_job("good", 3)])
    by_hand(path, *statements)
    fresh = SqlStore(f"sqlite:///{path}", clock)
    with caplog.at_level(logging.WARNING):
        assert [job.job_id for job in fresh.list()] == ["good"]
    assert "bad" in caplog.text
    assert [claim.lease.job_id for claim in fresh.claim("w1", 1, LEASE_S)] == ["good"]
    assert [claim.lease.job_id for claim in fresh.claim("w1", 9, LEASE_S)] == ["good", "good"]
    with pytest.raises(expected, match="bad") as refused:
        fresh.read("bad")
    assert refused.value.hint
    with pytest.raises(Conflict) as held:
        fresh.create([new_job("next", scope="scope-bad")])
    assert held.value.job_id == "bad"
    with pytest.raises(expected):
        fresh.stop("bad", Event.KILL)
    assert [entry.event for entry in fresh.history("bad")] == ["create", "kill"]
    fresh.create([new_job("next", scope="scope-bad")])
    check_always_true(fresh)
    fresh.close()


def test_a_commit_that_cannot_be_read_does_not_block_the_others(store: SqlStore, path: Path) -> None:
    store.create([new_job("bad", 0)])
    store.create([new_job("good", 0)])
    by_hand(path, "DELETE FROM lockstep_plans WHERE job_id = 'bad'")
    fresh = SqlStore(f"sqlite:///{path}", MovedClock())
    claim = fresh.claim_commit("w1", LEASE_S)
    assert claim is not None
    assert claim.job.job_id == "good"
    fresh.close()


def test_a_job_whose_tasks_were_deleted_fails_with_the_reason(store: SqlStore, path: Path) -> None:
    store.create([new_job("job1", 3), new_job("job2", 1)])
    run_task(store, "job1")
    by_hand(path, "DELETE FROM lockstep_tasks WHERE job_id = 'job1' AND idx > 0")
    assert [claim.lease.job_id for claim in store.claim("w1", 5, LEASE_S)] == ["job2"]
    job = store.read("job1")
    assert job.state is State.FAILED
    assert job.error is not None
    assert "1 of 3 tasks" in job.error.message
    assert store.holders("scope-job1") == []


def test_a_job_row_deleted_by_hand_leaves_nothing_that_blocks(store: SqlStore, path: Path) -> None:
    store.create([new_job("job1", 2)])
    lease = begin_task(store, "job1").lease
    by_hand(path, "DELETE FROM lockstep_jobs")
    assert store.claim("w1", 5, LEASE_S) == []
    assert store.list() == []
    with pytest.raises(LockstepError, match="no longer in the store"):
        store.checkpoint(lease, {}, [staged("a")], Progress(1, 1), LEASE_S)
    store.release(lease)
    store.create([new_job("job2", scope="scope-job1")])
    store.expire(1.0)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT DISTINCT job_id FROM lockstep_tasks").fetchall() == [("job2",)]
    connection.close()


def test_a_manifest_with_a_lost_or_damaged_chunk_is_never_read_as_whole(store: SqlStore, path: Path) -> None:
    job_in(store, State.COMMITTING)
    by_hand(path, "UPDATE lockstep_chunks SET files = x'00' WHERE idx = 1")
    with pytest.raises(Corrupt, match="task 1"):
        list(store.manifest("job1", "write"))
    by_hand(path, "DELETE FROM lockstep_chunks WHERE idx = 1")
    with pytest.raises(Corrupt, match="lists 1 files; 2 were"):
        list(store.manifest("job1", "write"))


# Cost


def steps_of_a_task(store: SqlStore, path: Path, tasks: int) -> tuple[int, int]:
    """Statements, and steps of SQLite's machine, that one task costs in a job of so many."""
    store.create([new_job(f"job{tasks}", tasks)])
    run_task(store, f"job{tasks}")
    steps = 0

    def note() -> int:
        nonlocal steps
        steps += 1
        return 0

    def watch(connection: sqlite3.Connection, *_rest: object) -> None:
        connection.set_progress_handler(note, 10)

    event.listen(store._db._engine.pool, "checkout", watch)
    with counted(store) as statements:
        run_task(store, f"job{tasks}")
        store.read(f"job{tasks}")
    event.remove(store._db._engine.pool, "checkout", watch)
    store.stop(f"job{tasks}", Event.KILL)
    return len(statements), steps


def test_a_task_costs_the_same_in_a_job_of_ten_and_of_ten_thousand(store: SqlStore, path: Path) -> None:
    few = steps_of_a_task(store, path, 10)
    many = steps_of_a_task(store, path, 10_000)
    assert few[0] == many[0] <= 40
    assert few[1] > 10
    assert many[1] <= 2 * few[1]


def test_a_list_of_jobs_takes_a_few_queries_whatever_their_number(store: SqlStore, clock: MovedClock) -> None:
    store.create([new_job(f"job{number:03d}", 2) for number in range(300)])
    fresh = SqlStore(store._db.url.render_as_string(), clock)
    with counted(fresh) as statements:
        assert len(fresh.list()) == 300
    assert len(statements) <= 8
    fresh.close()
