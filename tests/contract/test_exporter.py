"""Requests against a real source, a real store and a real table; tasks run here instead of on Spark."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import IcebergNamespaceProperties, IcebergTables, SqlCatalog
from pyiceberg.types import StringType

from lockstep.errors import Conflict, Invalid, LockstepError, Retryable
from lockstep.exporter import ExportRequest, Planned, plan_export
from lockstep.job import State, TaskSpec
from lockstep.source import Pin
from lockstep.source.parquet import ParquetSource
from tests.shop import TARGET, Shop

CATALOG_TABLES = (IcebergTables, IcebergNamespaceProperties)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_replace_of_one_part_never_takes_the_rows_of_another(shop: Shop) -> None:
    shop.export(parts=("p1.parquet",))
    rest = shop.export(everything=True, on_existing="skip")
    with pytest.raises(Conflict, match=rest.job_id):
        shop.ask(parts=("p2.parquet",), on_existing="replace")
    assert shop.rows() == [10, 11, 20, 21, 30, 31]
    shop.write("p1", [12])
    shop.export(parts=("p1.parquet",), on_existing="replace")
    assert shop.rows() == [12, 20, 21, 30, 31]


def test_a_part_whose_name_is_in_several_partitions_is_not_guessed(shop: Shop) -> None:
    for number in (1, 2):
        (shop.folder / "hive" / f"x={number}").mkdir(parents=True)
        pq.write_table(pa.table({"a": [number]}), shop.folder / "hive" / f"x={number}" / "p.parquet")
    with pytest.raises(Invalid, match=r"has a part p\.parquet in several partitions: x=1, x=2") as caught:
        shop.ask("hive", parts=("p.parquet",))
    assert caught.value.hint == "say in which: --part x=1/p.parquet"
    (job,) = shop.ask("hive", parts=("x=1/p.parquet", "x=1/p.parquet")).jobs
    shop.run(job)
    assert shop.rows() == [1]


def test_replace_finds_what_a_forgotten_job_has_published(shop: Shop) -> None:
    first = shop.export(everything=True)
    shop.store.released(first.job_id)
    shop.clock.at += shop.config.finished_job_ttl_s + 1
    assert shop.store.expire(shop.config.finished_job_ttl_s) == [first.job_id]
    with pytest.raises(Invalid, match="forgotten"):
        shop.ask(parts=("p1.parquet",), on_existing="replace")
    assert shop.export(everything=True, on_existing="replace").state is State.COMPLETED
    assert shop.rows() == [10, 11, 20, 21, 30, 31]
    assert len(shop.table().metadata.snapshots) == 2


def test_a_table_is_not_exported_into_itself_unless_its_rows_are_wanted_twice(shop: Shop) -> None:
    shop.export(everything=True)
    for mode in ("error", "skip", "replace"):
        request = ExportRequest(TARGET, TARGET, everything=True, on_existing=mode)
        with pytest.raises(Invalid, match="into itself"):
            plan_export(request, shop.config, shop.store, shop.clock)
    twice = ExportRequest(TARGET, TARGET, everything=True, on_existing="append")
    (job,) = plan_export(twice, shop.config, shop.store, shop.clock).jobs
    shop.run(job)
    assert shop.rows() == sorted([10, 11, 20, 21, 30, 31] * 2)


def test_a_refused_replace_has_not_touched_the_job_that_it_would_replace(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        (shop.folder / "hive" / f"x={number}").mkdir(parents=True)
        pq.write_table(pa.table({"a": [number]}), shop.folder / "hive" / f"x={number}" / "p.parquet")
    (job,) = shop.ask("hive", partitions=("x=1",)).jobs
    real = ParquetSource.plan_tasks

    def refuse_the_second(source: ParquetSource, pin: Pin, task_bytes: int) -> list[TaskSpec]:
        if pin.detail["partition"] == "x=2":
            raise Invalid("this one does not fit")
        return real(source, pin, task_bytes)

    monkeypatch.setattr(ParquetSource, "plan_tasks", refuse_the_second)
    with pytest.raises(Invalid, match="does not fit"):
        shop.ask("hive", everything=True, on_existing="replace")
    assert shop.store.read(job.job_id).state is State.PENDING


def test_two_requests_that_create_the_table_leave_it_to_the_one_that_has_a_job(shop: Shop) -> None:
    """Whoever is refused must not take the table back that the other counts on."""
    for _ in range(5):
        answers: list[Any] = []

        def ask(answers: list[Any] = answers) -> None:
            try:
                answers.append(shop.ask(everything=True))
            except LockstepError as error:
                answers.append(error)

        twins = [threading.Thread(target=ask) for _ in range(2)]
        for twin in twins:
            twin.start()
        for twin in twins:
            twin.join()
        (planned,) = [answer for answer in answers if isinstance(answer, Planned)]
        assert len([answer for answer in answers if isinstance(answer, Conflict)]) == 1, answers
        assert shop.has_table()
        assert shop.run(planned.jobs[0]).state is State.COMPLETED
        catalog = load_catalog("lake", **shop.config.catalogs["lake"])
        catalog.drop_table("db.t")
        catalog.drop_namespace("db")


def test_a_new_catalog_is_opened_although_others_make_each_of_its_tables_first(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [IcebergTables.metadata.tables[table.__tablename__] for table in CATALOG_TABLES]

    def after_another(catalog: SqlCatalog) -> None:
        table = left.pop(0)
        table.create(catalog.engine)
        table.create(catalog.engine)

    monkeypatch.setattr(SqlCatalog, "create_tables", after_another)
    assert shop.export(everything=True).state is State.COMPLETED
    assert left == []


def test_a_replace_takes_the_rows_of_a_first_job_that_was_in_flight_only_once(shop: Shop) -> None:
    (first,) = shop.ask(everything=True).jobs
    shop.write_files(first)
    assert shop.store.read(first.job_id).state is State.COMMITTING
    assert shop.export(everything=True, on_existing="replace").state is State.COMPLETED
    assert shop.store.read(first.job_id).state is State.KILLED
    assert shop.rows() == [10, 11, 20, 21, 30, 31]


def test_a_table_that_was_created_for_a_request_that_failed_is_taken_back(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise Invalid("the store is full")

    monkeypatch.setattr(shop.store, "create", refuse)
    with pytest.raises(Invalid, match="full"):
        shop.ask(everything=True)
    assert not shop.has_table()


def test_a_lost_reply_to_the_creation_of_a_job_leaves_the_job_and_what_it_needs(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the simulation: the job was there, and its frozen copy was given up."""
    create, unpinned = shop.store.create, []
    replies = iter([False, True])

    def lose_the_first_reply(jobs: Any) -> Any:
        created = create(jobs)
        if not next(replies):
            raise Retryable("the connection was lost")
        return created

    monkeypatch.setattr(shop.store, "create", lose_the_first_reply)
    monkeypatch.setattr(ParquetSource, "unpin", lambda *arguments: unpinned.append(arguments))
    (job,) = shop.ask(everything=True).jobs
    assert unpinned == []
    assert [one.job_id for one in shop.store.list()] == [job.job_id]
    assert shop.run(job).state is State.COMPLETED


def test_a_store_that_stays_away_may_have_the_job_so_nothing_that_it_needs_is_undone(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, unpinned = shop.store.create, []

    def never_reply(jobs: Any) -> Any:
        create(jobs)
        raise Retryable("the connection was lost")

    monkeypatch.setattr(shop.store, "create", never_reply)
    monkeypatch.setattr(ParquetSource, "unpin", lambda *arguments: unpinned.append(arguments))
    with pytest.raises(Retryable, match="may or may not"):
        shop.ask(everything=True)
    assert unpinned == []
    (job,) = shop.store.list()
    assert shop.run(job).state is State.COMPLETED


def test_a_dry_run_creates_nothing(shop: Shop) -> None:
    request = ExportRequest(f"parquet:{shop.folder}/src", TARGET, create=True, everything=True)
    planned = plan_export(request, shop.config, shop.store, shop.clock, dry_run=True)
    assert [preview.rows for preview in planned.previews] == [6]
    assert shop.store.list() == []
    assert not shop.has_table()


@contextmanager
def lake_away(shop: Shop) -> Iterator[None]:
    """The storage of data and metadata is not there: a catalog that keeps its tables in it cannot answer."""
    warehouse = shop.folder / ".lockstep" / "warehouse"
    hidden = warehouse.rename(shop.folder / "hidden")
    yield
    shutil.rmtree(warehouse, ignore_errors=True)
    hidden.rename(warehouse)


def test_an_export_into_a_table_that_a_job_knows_is_accepted_while_its_catalog_is_away(shop: Shop) -> None:
    known = shop.export(parts=("p1.parquet",))
    with lake_away(shop):
        planned = shop.ask(parts=("p2.parquet",))
    assert known.job_id in planned.remarks[0]
    assert shop.run(planned.jobs[0]).state is State.COMPLETED
    assert shop.rows() == [10, 11, 20, 21]


def test_a_table_that_has_changed_since_a_job_knew_it_is_noticed_and_nothing_is_published(shop: Shop) -> None:
    shop.export(parts=("p1.parquet",))
    with shop.table().update_schema() as update:
        update.add_column("b", StringType())
    with lake_away(shop):
        planned = shop.ask(parts=("p2.parquet",))
    ended = shop.run(planned.jobs[0])
    assert ended.state is State.FAILED
    assert ended.error is not None
    assert "has changed since the job was planned" in ended.error.message
    assert shop.rows() == [10, 11]


def test_what_needs_more_than_the_last_known_table_is_refused_while_its_catalog_is_away(shop: Shop) -> None:
    first = shop.export(parts=("p1.parquet",))
    with lake_away(shop):
        with pytest.raises(Retryable, match="does not answer"):
            shop.ask(parts=("p1.parquet",), on_existing="replace")
        with pytest.raises(Conflict, match=first.job_id):
            shop.ask(parts=("p1.parquet",))
    assert len(shop.store.list()) == 1
