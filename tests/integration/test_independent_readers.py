"""Spark with the Iceberg JVM runtime on the same catalog: what it sees of our commits, and does to them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from lockstep.errors import CommitUnknown, Invalid
from lockstep.job import Json, StagedFile, commit_id, snapshot_id_of
from lockstep.runtime import SYSTEM_CLOCK
from lockstep.target import Outcome
from tests import readers
from tests.iceberg_tables import BY_REGION, SCHEMA, Lake, by_identity

pytestmark = pytest.mark.servers

OURS = commit_id("ours", 1)
EXPIRE_ALL = (
    "CALL lake.system.expire_snapshots(table => 'db.events', "
    "older_than => TIMESTAMP '2099-01-01 00:00:00', retain_last => 1)"
)
COMPACT = "CALL lake.system.rewrite_data_files(table => 'db.events', options => map('rewrite-all', 'true'))"


@pytest.fixture(scope="module")
def jvm(spark: readers.SparkReader) -> readers.SparkReader:
    """It has a JDBC driver for SQLite, so that it shares the SQL catalog with PyIceberg."""
    return spark


class SharedLake(Lake):
    """A lake whose catalog Spark writes to as well, at the real time: expiry in Spark knows no other."""

    def __init__(self, folder: Path, jvm: readers.SparkReader) -> None:
        # A name of its own: Spark keeps the first configuration that it has seen of a catalog.
        super().__init__(folder, re.sub(r"\W", "_", folder.name))
        self.clock = SYSTEM_CLOCK  # type: ignore[assignment]
        self.target = self.open()
        self._jvm = jvm
        self._known = False

    def spark(self, sql: str) -> list[dict[str, Any]]:
        """Run a statement in which the catalog is called `lake`."""
        location = self.table().metadata_location
        if not self._known:
            for key, value in self._catalog().items():
                self._jvm.query(location, f"SET `spark.sql.catalog.{self.name}{key}`=`{value}`")
            self._known = True
        return self._jvm.query(location, sql.replace("lake.", self.name + ".")).to_pylist()

    def _catalog(self) -> dict[str, str]:
        return {
            "": "org.apache.iceberg.spark.SparkCatalog",
            ".catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
            ".uri": f"jdbc:sqlite:{self.folder}/catalog.db",
            ".warehouse": f"file://{self.folder}/lake",
            ".cache-enabled": "false",
        }

    def seen_by_spark(self) -> list[int]:
        return [row["id"] for row in self.spark("SELECT id FROM lake.db.events ORDER BY id")]

    def outcome(self, commit: str = OURS) -> tuple[Outcome, int | None]:
        target = self.open()
        return target.outcome(target.load(), commit)


@pytest.fixture
def lake(tmp_path: Path, jvm: readers.SparkReader) -> SharedLake:
    return SharedLake(tmp_path, jvm)


def region(lake: Lake, ids: list[int], name: str = "eu") -> StagedFile:
    return lake.stage(ids, [name], region=[name] * len(ids), amount=[n / 2 for n in ids])


def test_spark_sees_the_rows_the_counters_and_one_line_of_history(lake) -> None:
    lake.create(BY_REGION)
    first = lake.publish("first", region(lake, [1, 2]), region(lake, [3], "us"))
    second = lake.publish("second", region(lake, [4]))
    assert lake.seen_by_spark() == [1, 2, 3, 4]
    history = lake.spark("SELECT snapshot_id, parent_id, is_current_ancestor FROM lake.db.events.history")
    assert [row["snapshot_id"] for row in history] == [snapshot_id_of(first), snapshot_id_of(second)]
    assert [row["parent_id"] for row in history] == [None, snapshot_id_of(first)]
    summary = dict(lake.spark("SELECT summary FROM lake.db.events.snapshots")[-1]["summary"])
    assert summary["lockstep.commit-id"] == second
    assert (summary["added-records"], summary["total-records"], summary["total-data-files"]) == (
        "1",
        "4",
        "3",
    )
    partitions = lake.spark("SELECT partition.region, record_count FROM lake.db.events.partitions")
    assert {row["region"]: row["record_count"] for row in partitions} == {"eu": 3, "us": 1}


def test_spark_prunes_by_our_statistics_without_losing_a_row(lake) -> None:
    lake.create(BY_REGION)
    lake.publish("ours", *(region(lake, [n, n + 1], name) for n, name in ((1, "eu"), (5, "us"), (9, "eu"))))
    where = {
        "id = 6": [6],
        "id > 8 AND region = 'eu'": [9, 10],
        "amount < 1.0": [1],
        "region IS NULL": [],
        "amount >= 2.5 AND amount <= 4.5": [5, 6, 9],
    }
    for condition, expected in where.items():
        found = lake.spark(f"SELECT id FROM lake.db.events WHERE {condition} ORDER BY id")
        assert [row["id"] for row in found] == expected, condition


def test_spark_finds_rows_by_a_uuid_that_the_table_is_partitioned_by(lake) -> None:
    key: Json = {"id": 2, "name": "key", "type": "uuid", "required": False}
    lake.create(by_identity(2, "key"), schema={"type": "struct", "fields": [SCHEMA["fields"][0], key]})
    uuids = [UUID(int=0), UUID(int=2**127 - 1), UUID(int=2**127), UUID(int=2**128 - 1)]
    files = [lake.stage([n], [str(uuid)], key=[uuid.bytes]) for n, uuid in enumerate(uuids)]
    for file in files:  # as our own sink leaves them out
        file.stats.update(lower_bounds={}, upper_bounds={})
    lake.publish("ours", *files)
    for n in (1, 2):
        found = lake.spark(f"SELECT id FROM lake.db.events WHERE key = '{uuids[n]}'")
        assert [row["id"] for row in found] == [n]


def test_spark_reads_and_writes_a_fenced_table_as_before(lake) -> None:
    lake.create(BY_REGION)
    lake.publish("before", region(lake, [1]))
    head = lake.target.load()
    sleeping = lake.target.prepare(head, lake.plan(head, ["eu"]), OURS, "ours", [region(lake, [2])])
    lake.open().fence(lake.open().load(), OURS)
    assert lake.seen_by_spark() == [1]
    assert [row["name"] for row in lake.spark("SELECT name FROM lake.db.events.refs")] == ["main"]
    assert len(lake.spark("SELECT * FROM lake.db.events.history")) == 1
    assert dict(lake.spark("SELECT summary FROM lake.db.events.snapshots")[-1]["summary"])["lockstep.fenced"]
    lake.spark("INSERT INTO lake.db.events VALUES (3, 'eu', 1.5)")
    lake.publish("after", region(lake, [4]))
    assert lake.seen_by_spark() == [1, 3, 4]
    with pytest.raises(CommitUnknown):
        lake.target.send(head, sleeping)
    assert lake.seen_by_spark() == [1, 3, 4]


@pytest.mark.parametrize("rows_before", [[], [1]], ids=["empty table", "table with rows"])
def test_a_fence_holds_after_spark_has_expired_it(lake, rows_before: list[int]) -> None:
    lake.create(BY_REGION)
    if rows_before:
        lake.publish("before", region(lake, rows_before))
    head = lake.target.load()
    sleeping = lake.target.prepare(head, lake.plan(head, ["eu"]), OURS, "ours", [region(lake, [2])])
    lake.open().fence(lake.open().load(), OURS)
    later = []
    if not rows_before:
        lake.spark("INSERT INTO lake.db.events VALUES (9, 'eu', 0.5)")
        later = [9]
    lake.spark(EXPIRE_ALL)
    assert lake.table().metadata.snapshot_by_id(snapshot_id_of(OURS)) is None
    assert lake.outcome() == (Outcome.FENCED, None)
    with pytest.raises(CommitUnknown):
        lake.target.send(head, sleeping)
    assert lake.seen_by_spark() == rows_before + later


def test_a_commit_is_remembered_after_spark_has_expired_and_compacted_everything(lake) -> None:
    lake.create(BY_REGION)
    ours = lake.publish("ours", region(lake, [1]), region(lake, [2]))
    lake.spark("INSERT INTO lake.db.events VALUES (3, 'eu', 1.5)")
    lake.spark(COMPACT)
    lake.spark(EXPIRE_ALL)
    assert len(lake.table().metadata.snapshots) == 1
    assert lake.outcome(ours) == (Outcome.COMMITTED, snapshot_id_of(ours))
    assert lake.seen_by_spark() == [1, 2, 3]


def test_replace_after_compaction_leaves_the_rows_once(lake) -> None:
    lake.create(BY_REGION)
    earlier = lake.publish("earlier", region(lake, [1]), region(lake, [2]))
    lake.publish("elsewhere", region(lake, [7], "us"), region(lake, [8], "us"))
    lake.spark(COMPACT)
    count = len(lake.table().metadata.snapshots)
    newer = lake.publish("newer", region(lake, [1, 2, 3]), replaces=[earlier])
    assert lake.seen_by_spark() == [1, 2, 3, 7, 8]
    assert len(lake.table().metadata.snapshots) == count + 1
    lake.spark(COMPACT)
    lake.publish("newest", region(lake, [1, 2, 3, 4]), replaces=[earlier, newer])
    assert lake.seen_by_spark() == [1, 2, 3, 4, 7, 8]


def test_replace_is_refused_when_compaction_mixed_in_the_rows_of_others(lake) -> None:
    lake.create(BY_REGION)
    earlier = lake.publish("earlier", region(lake, [1]))
    lake.spark("INSERT INTO lake.db.events VALUES (50, 'eu', 1.5)")
    lake.spark(COMPACT)
    head = lake.target.load()
    plan = lake.plan(head, ["eu"], replaces=(earlier,))
    with pytest.raises(Invalid, match="put other rows into the same target partition"):
        lake.commit(head, plan, OURS, "ours", [region(lake, [1, 2])])
    lake.spark(EXPIRE_ALL)
    head = lake.target.load()
    with pytest.raises(Invalid, match="has expired"):
        lake.commit(head, plan, OURS, "ours", [region(lake, [1, 2])])
    assert lake.seen_by_spark() == [1, 50]


def test_replace_is_refused_when_the_rewritten_rows_lie_in_another_target_partition(lake) -> None:
    lake.create(BY_REGION)
    earlier = lake.publish("earlier", region(lake, [1]), region(lake, [2]))
    lake.spark(COMPACT)
    head = lake.target.load()
    plan = lake.plan(head, ["us"], replaces=(earlier,))
    with pytest.raises(Invalid, match="lie in another target partition"):
        lake.commit(head, plan, OURS, "ours", [region(lake, [1, 2], "us")])
    lake.spark(EXPIRE_ALL)
    head = lake.target.load()
    with pytest.raises(Invalid, match="has expired"):
        lake.commit(head, plan, OURS, "ours", [region(lake, [1, 2], "us")])
    assert lake.seen_by_spark() == [1, 2]


def test_replace_finds_its_files_in_manifests_that_spark_has_rewritten(lake) -> None:
    lake.create(BY_REGION)
    earlier = lake.publish("earlier", region(lake, [1]))
    lake.spark("INSERT INTO lake.db.events VALUES (50, 'eu', 1.5)")
    lake.spark("CALL lake.system.rewrite_manifests(table => 'db.events')")
    lake.spark(EXPIRE_ALL)
    lake.publish("newer", region(lake, [1, 2]), replaces=[earlier])
    assert lake.seen_by_spark() == [1, 2, 50]


def test_replace_brings_rows_back_that_row_level_deletes_had_hidden(lake) -> None:
    lake.create(BY_REGION)
    earlier = lake.publish("earlier", region(lake, [1, 2, 3]))
    lake.publish("other", region(lake, [7, 8]))
    lake.spark("ALTER TABLE lake.db.events SET TBLPROPERTIES ('write.delete.mode' = 'merge-on-read')")
    lake.spark("DELETE FROM lake.db.events WHERE id IN (2, 8)")
    assert lake.seen_by_spark() == [1, 3, 7]
    assert lake.spark("SELECT COUNT(*) AS n FROM lake.db.events.delete_files")[0]["n"] > 0
    lake.publish("newer", region(lake, [1, 2, 3, 4]), replaces=[earlier])
    assert lake.seen_by_spark() == [1, 2, 3, 4, 7]


@pytest.mark.parametrize("version", [1, 2])
def test_spark_goes_on_with_a_table_after_a_replace(lake, version: int, read_with_duckdb) -> None:
    lake.create(BY_REGION, version=version)
    lake.publish("other", region(lake, [7]))
    earlier = lake.publish("earlier", region(lake, [1]))
    lake.publish("newer", region(lake, [1, 2]), replaces=[earlier])
    assert lake.seen_by_spark() == [1, 2, 7]
    found = read_with_duckdb(lake.table().metadata_location)
    assert sorted(found["id"].to_pylist()) == [1, 2, 7]
    lake.spark("INSERT INTO lake.db.events VALUES (9, 'eu', 1.5)")
    lake.spark(COMPACT)
    lake.spark(EXPIRE_ALL)
    assert lake.seen_by_spark() == [1, 2, 7, 9]
