"""A catalog that is a folder: what racing, dying and foreign writers leave there, and what is read then.

The target's own promises are tested on this catalog too, in test_iceberg_target.py and test_commit.py.
"""

from __future__ import annotations

import gzip
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, TableAlreadyExistsError
from pyiceberg.schema import Schema
from pyiceberg.table.update import AssertTableUUID, SetPropertiesUpdate
from pyiceberg.types import LongType, NestedField

from lockstep.errors import Invalid, Retryable
from lockstep.storage import Storage
from lockstep.target.catalog_fs import UNFINISHED_S, FileSystemCatalog
from tests.iceberg_tables import Lake, MovedClock

SCHEMA = Schema(NestedField(1, "id", LongType()))


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(tmp_path, kind="filesystem")
    lake.clock.time = time.time()
    lake.create()
    lake.publish("first", lake.stage([1]))
    return lake


def metadata_of(lake: Lake) -> Path:
    return lake.folder / "lake" / "db" / "events" / "metadata"


def versions(lake: Lake) -> list[str]:
    return sorted(path.name for path in metadata_of(lake).glob("v*.metadata.json"))


def leave(lake: Lake, number: int, content: bytes, age_s: float = 3600.0) -> Path:
    """A version as a dead writer of another engine left it."""
    path = metadata_of(lake) / f"v{number}.metadata.json"
    path.write_bytes(content)
    moment = lake.clock.now() - age_s
    os.utime(path, (moment, moment))
    return path


def newest(lake: Lake) -> bytes:
    return (metadata_of(lake) / versions(lake)[-1]).read_bytes()


def test_each_commit_is_one_file_of_the_next_number_and_the_hint_follows(lake: Lake) -> None:
    lake.publish("second", lake.stage([2]))
    assert versions(lake) == ["v1.metadata.json", "v2.metadata.json", "v3.metadata.json"]
    assert (metadata_of(lake) / "version-hint.text").read_text() == "3"
    assert [path.name for path in metadata_of(lake).glob(".*")] == []


@pytest.mark.parametrize("content", [b"", b"{", b'{"format-version": 2', b"\xff\xfe", b"[]", b'{"a": 1}'])
def test_a_stale_version_of_a_dead_writer_does_not_stop_the_next_commit(lake: Lake, content: bytes) -> None:
    stale = leave(lake, 3, content)
    lake.publish("second", lake.stage([2]))
    assert lake.ids() == [1, 2]
    assert versions(lake)[-1] == "v4.metadata.json"
    assert stale.read_bytes() == content, "what is not ours is left alone"
    lake.publish("third", lake.stage([3]))
    assert lake.ids() == [1, 2, 3]


def test_a_version_that_may_still_be_in_the_writing_is_waited_for(lake: Lake) -> None:
    leave(lake, 3, b'{"format-version"', age_s=0)
    with pytest.raises(Retryable, match="not whole"):
        lake.target.load()
    lake.clock.time += UNFINISHED_S + 1
    lake.publish("second", lake.stage([2]))
    assert lake.ids() == [1, 2]


def test_a_version_whose_writer_died_before_it_set_the_hint_counts(lake: Lake) -> None:
    hint = metadata_of(lake) / "version-hint.text"
    before = hint.read_bytes()
    lake.publish("second", lake.stage([2]))
    hint.write_bytes(before)
    assert lake.ids() == [1, 2]
    lake.publish("third", lake.stage([3]))
    assert lake.ids() == [1, 2, 3]
    assert versions(lake)[-1] == "v4.metadata.json"


@pytest.mark.parametrize("hint", [None, b"", b"seven", b"99", b"-1", b"1", b"\xff"])
def test_the_hint_decides_nothing(lake: Lake, hint: bytes | None) -> None:
    path = metadata_of(lake) / "version-hint.text"
    path.unlink()
    if hint is not None:
        path.write_bytes(hint)
    assert lake.ids() == [1]
    lake.publish("second", lake.stage([2]))
    assert lake.ids() == [1, 2]


def test_a_slow_commit_does_not_take_the_hint_back(lake: Lake) -> None:
    (metadata_of(lake) / "version-hint.text").write_text("7")
    leave(lake, 7, newest(lake))
    lake.publish("second", lake.stage([2]))
    assert (metadata_of(lake) / "version-hint.text").read_text() == "8"
    lake.catalog._put(str(metadata_of(lake).parent), 3, b"late")  # type: ignore[attr-defined]
    assert (metadata_of(lake) / "version-hint.text").read_text() == "8"


def test_of_commits_on_the_same_version_exactly_one_wins(lake: Lake, monkeypatch) -> None:
    """All of them have read the table before the first one writes."""
    racers = 4
    barrier = threading.Barrier(racers)
    put = Storage.put_if_absent

    def together(self: Storage, url: str, data: bytes) -> bool:
        if "/v3." in url:
            barrier.wait(timeout=60)
        return put(self, url, data)

    monkeypatch.setattr(Storage, "put_if_absent", together)

    def race(number: int) -> bool:
        catalog = FileSystemCatalog("lake", warehouse=f"file://{lake.folder}/lake")
        update = SetPropertiesUpdate(updates={"winner": str(number)})
        try:
            catalog.commit_table(catalog.load_table("db.events"), (), (update,))
        except CommitFailedException:
            return False
        return True

    with ThreadPoolExecutor(racers) as pool:
        won = list(pool.map(race, range(racers)))
    assert won.count(True) == 1
    assert lake.table().properties["winner"] == str(won.index(True))
    assert versions(lake)[-1] == "v3.metadata.json"


def test_a_table_is_created_once(lake: Lake) -> None:
    with pytest.raises(TableAlreadyExistsError):
        lake.catalog.create_table("db.events", SCHEMA)
    assert lake.ids() == [1]


def test_a_commit_to_a_dropped_table_never_reaches_a_new_one_of_the_name(lake: Lake) -> None:
    """The sleeper has read the old table, and wakes up when the new one is at the same place."""
    old = lake.table()
    prepared = SetPropertiesUpdate(updates={"late": "true"})
    catalog = lake.catalog
    assert isinstance(catalog, FileSystemCatalog)
    stale = catalog._newest(f"file://{metadata_of(lake).parent}")
    catalog.drop_table("db.events")
    with pytest.raises(NoSuchTableError):
        catalog.load_table("db.events")
    new = catalog.create_table("db.events", SCHEMA)
    assert catalog._put(f"file://{metadata_of(lake).parent}", stale.number + 1, b"old table") is None
    with pytest.raises(CommitFailedException):
        catalog.commit_table(old, (AssertTableUUID(uuid=old.metadata.table_uuid),), (prepared,))
    assert catalog.load_table("db.events").metadata.table_uuid == new.metadata.table_uuid


def test_tables_and_namespaces_are_listed_without_dropped_ones(lake: Lake) -> None:
    lake.catalog.create_table(("a", "b", "deep"), SCHEMA)
    lake.catalog.create_table("db.gone", SCHEMA)
    lake.catalog.drop_table("db.gone")
    assert lake.catalog.list_tables("db") == [("db", "events")]
    assert lake.catalog.list_namespaces() == [("a",), ("db",)]
    assert lake.catalog.list_namespaces("a") == [("a", "b")]
    assert lake.catalog.table_exists("db.events")
    assert not lake.catalog.table_exists("db.gone")


@pytest.mark.parametrize("name", [("db", ".."), ("..", "events"), ("db", "a/b"), ("db", "")])
def test_no_name_leads_out_of_its_folder(lake: Lake, name: tuple[str, str]) -> None:
    with pytest.raises(Invalid, match="name of a table's folder"):
        lake.catalog.create_table(name, SCHEMA)


def test_compressed_metadata_is_refused_and_left_alone(lake: Lake) -> None:
    with pytest.raises(Invalid, match="compressed"):
        lake.catalog.create_table("db.z", SCHEMA, properties={"write.metadata.compression-codec": "gzip"})
    last = metadata_of(lake) / versions(lake)[-1]
    (metadata_of(lake) / "v3.gz.metadata.json").write_bytes(gzip.compress(last.read_bytes()))
    (metadata_of(lake) / "version-hint.text").write_text("3")
    with pytest.raises(Invalid, match="compressed"):
        lake.target.load()


def test_a_warehouse_is_needed() -> None:
    with pytest.raises(ValueError, match="warehouse"):
        FileSystemCatalog("lake", clock=MovedClock())


def test_duckdb_reads_the_folder_by_its_hint(lake: Lake, read_with_duckdb) -> None:
    leave(lake, 3, b"left by a dead writer")
    lake.publish("second", lake.stage([2]))
    rows = read_with_duckdb(str(metadata_of(lake).parent))
    assert sorted(rows["id"].to_pylist()) == [1, 2]


@pytest.mark.servers
def test_spark_reads_the_folder_as_a_hadoop_table(lake: Lake, spark) -> None:
    leave(lake, 3, b"left by a dead writer")
    lake.publish("second", lake.stage([2]))
    (metadata_of(lake) / "version-hint.text").write_text("2")
    rows = spark.read(f"file://{metadata_of(lake).parent}")
    assert sorted(rows["id"].to_pylist()) == [1, 2]
