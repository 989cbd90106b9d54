"""Stores that earlier versions wrote are opened, brought forward and worked on; newer ones are left alone.

`data/store_NNNN.sql` is a whole SQLite store of schema NNNN: a job in each state, one with a checkpoint in
the middle of a task and a task that waits for its next try, and an import in its second stage.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from lockstep.errors import ErrorInfo, Incompatible
from lockstep.job import Event, Progress, State, TaskState
from lockstep.store import open_store, sql_schema
from tests.store_lab import (
    LEASE_S,
    MovedClock,
    begin_task,
    check_always_true,
    new_plan,
    run_task,
    staged,
    take_commit,
)

DUMPS = sorted((Path(__file__).parent / "data").glob("store_*.sql"))
WRITTEN = 1_700_000_007.0


@pytest.fixture(params=DUMPS, ids=[dump.stem for dump in DUMPS])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    file = tmp_path / "jobs.db"
    connection = sqlite3.connect(file)
    connection.executescript(request.param.read_text())
    connection.close()
    return file


def test_there_is_a_stored_one_of_every_schema() -> None:
    assert [dump.stem[-4:] for dump in DUMPS] == [f"{n:04d}" for n in range(1, int(sql_schema.HEAD) + 1)]


def test_an_older_store_is_read_as_it_was_written(path: Path) -> None:
    store = open_store(f"sqlite:///{path}", MovedClock(WRITTEN))
    check_always_true(store)
    jobs = {job.job_id: job for job in store.list()}
    for state in State:
        assert jobs[f"job-{state}"].state is state
    assert jobs["job-completed"].plan == new_plan()
    assert (jobs["job-completed"].snapshot_id, jobs["job-completed"].released) == (42, True)
    assert [file.path for file in store.manifest("half", "write")] == [
        staged("half-0").path,
        staged("half-1").path,
    ]
    half = store.tasks("half")
    assert [task.state for task in half] == [TaskState.LEASED, TaskState.WAITING, TaskState.WAITING]
    assert half[0].position == {"row": 5}
    assert half[1].error == ErrorInfo("Retryable", "storage is away", "wait")
    assert (jobs["import"].stage, len(store.tasks("import", "map"))) == ("merge", 1)
    assert store.holders("scope-half")[0].holding.pieces[0].last == 3
    store.close()


def test_the_jobs_of_an_older_store_go_on_from_where_they_were(path: Path) -> None:
    store = open_store(f"sqlite:///{path}", MovedClock(WRITTEN + 100))
    begun = begin_task(store, "half")
    while begun.position is None:
        store.finish(begun.lease, {"row": 9}, [staged(f"more-{begun.lease.index}")], Progress(9, 20))
        begun = begin_task(store, "half")
    store.finish(begun.lease, {"row": 9}, [staged("half-2")], Progress(9, 20))
    run_task(store, "import")
    for job_id, files in {"half": 5, "import": 1, "job-committing": 2}.items():
        job = store.end(take_commit(store, job_id).lease, Event.COMMITTED, snapshot_id=7)
        assert (job.state, job.files) == (State.COMPLETED, files)
    assert store.retry("job-failed").generation == 2
    assert store.resume("job-paused").state is State.PENDING
    assert len(store.claim("w3", 9, LEASE_S, {"job-failed", "job-paused", "job-pending"})) == 6
    assert store.expire(50.0) == ["job-completed"]
    check_always_true(store)
    store.close()


def test_a_store_of_a_newer_version_is_refused_and_left_as_it_is(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("UPDATE lockstep_version SET version_num = '0099'")
    connection.commit()
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(Incompatible, match="0099"):
        open_store(f"sqlite:///{path}")
    assert path.read_bytes() == before
