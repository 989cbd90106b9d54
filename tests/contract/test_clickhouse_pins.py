"""The ClickHouse source against a real ClickHouse: what is frozen stays, what is not is told."""

from __future__ import annotations

import threading
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from lockstep.config import Config
from lockstep.errors import Corrupt, Invalid, Retryable
from lockstep.source import clickhouse, clickhouse_rows
from lockstep.source.clickhouse import ClickHouseSource
from lockstep.source.clickhouse_http import Server
from tests.clickhouse_lab import NUMBERS, Chdb, columns_of, ids, read_all, read_task, three_parts, us

pytestmark = pytest.mark.servers


# Partitions and pins


def test_partitions_show_their_parts_with_rows_and_blocks(chdb: Chdb, table: Any) -> None:
    name = table("id UInt32, d Date", "PARTITION BY toYYYYMM(d) ORDER BY id")
    chdb.run(f"INSERT INTO shop.{name} SELECT number, toDate('2024-01-31') + number % 2 FROM numbers(10)")
    january, february = chdb.source(name).partitions()
    assert (january.partition_id, january.label, january.rows) == ("202401", "202401", 5)
    assert february.partition_id == "202402"
    assert february.size_bytes > 0
    (part,) = january.parts
    assert part.piece.name == part.name
    assert part.piece.first == part.piece.last


def test_what_happens_to_the_source_after_the_pin_changes_nothing(
    chdb: Chdb, table: Any, pinned: Any
) -> None:
    name = three_parts(chdb, table)
    source = chdb.source(name)
    columns = columns_of(source)
    pin = pinned(source)
    tasks = source.plan_tasks(pin, 1)
    chdb.run(f"INSERT INTO shop.{name} VALUES (1000, 'late')")
    chdb.run(f"OPTIMIZE TABLE shop.{name} FINAL")
    chdb.run(f"ALTER TABLE shop.{name} UPDATE s = 'changed' WHERE 1")
    chdb.run(f"ALTER TABLE shop.{name} DELETE WHERE id < 50")
    chdb.run(f"DELETE FROM shop.{name} WHERE id < 150")
    chdb.run(f"ALTER TABLE shop.{name} DROP COLUMN s")
    chdb.run(f"DROP TABLE shop.{name} SYNC")
    arrived = pa.Table.from_batches(
        [chunk.batch for task in tasks for chunk in read_task(source, pin, task, columns)]
    )
    assert ids(arrived) == list(range(300))
    assert set(arrived.column("s").to_pylist()) == {"x"}


def test_the_frozen_copy_has_no_ttl_and_never_merges(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = table(
        "id UInt32, d DateTime, s String TTL d + INTERVAL 1 DAY, `t'l` String TTL d + INTERVAL 1 DAY",
        "ORDER BY id TTL d + INTERVAL 100 YEAR",
    )
    chdb.run(f"SYSTEM STOP MERGES shop.{name}")
    for i in range(2):
        chdb.run(f"INSERT INTO shop.{name} VALUES ({i}, now() - 30, 'keep', 'keep')")
    source = chdb.source(name)
    pin = pinned(source)
    frozen = f"shop.{pin.detail['table']}"
    statement = chdb.value(f"SHOW CREATE TABLE {frozen}")
    assert "TTL" not in statement
    # A restarted server has forgotten SYSTEM STOP MERGES: the settings of the copy must do alone.
    chdb.run(f"SYSTEM START MERGES {frozen}")
    chdb.run(f"OPTIMIZE TABLE {frozen}")
    assert read_all(source, pin).column("s").to_pylist() == ["keep", "keep"]


@pytest.mark.parametrize("engine", ["ReplacingMergeTree", "SummingMergeTree", "AggregatingMergeTree"])
def test_engines_that_merge_rows_are_frozen_into_a_plain_one(
    chdb: Chdb, table: Any, pinned: Any, engine: str
) -> None:
    name = f"t{next(NUMBERS)}"
    chdb.run(f"CREATE TABLE shop.{name} (id UInt32, n UInt64) ENGINE = {engine} ORDER BY id")
    chdb.run(f"SYSTEM STOP MERGES shop.{name}")
    chdb.run(f"INSERT INTO shop.{name} VALUES (1, 1)")
    chdb.run(f"INSERT INTO shop.{name} VALUES (1, 2)")
    source = chdb.source(name)
    pin = pinned(source)
    assert chdb.value(f"SELECT engine FROM system.tables WHERE name = '{pin.detail['table']}'") == "MergeTree"
    assert ids(read_all(source, pin)) == [1, 1]
    chdb.drop(name)


def test_indices_projections_and_settings_do_not_hinder_the_freeze(
    chdb: Chdb, table: Any, pinned: Any
) -> None:
    name = table(
        "id UInt32, s String CODEC(ZSTD(3)), INDEX i s TYPE bloom_filter GRANULARITY 2,"
        " PROJECTION p (SELECT s, count() GROUP BY s), CONSTRAINT c CHECK id > 0",
        "PARTITION BY icebergTruncate(100, id) PRIMARY KEY id ORDER BY (id, s) SAMPLE BY id"
        " SETTINGS index_granularity = 64, index_granularity_bytes = 0, min_bytes_for_wide_part = 0",
    )
    chdb.run(f"INSERT INTO shop.{name} SELECT number + 1, 'x' FROM numbers(50)")
    source = chdb.source(name)
    assert ids(read_all(source, pinned(source, "0"))) == list(range(1, 51))


def test_deleted_rows_are_neither_counted_nor_read(
    chdb: Chdb, table: Any, pinned: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(clickhouse_rows, "RANGE_BYTES", 200_000)
    name = table("id UInt32", "ORDER BY id")
    chdb.run(f"INSERT INTO shop.{name} SELECT number FROM numbers(100000)")
    chdb.run(f"DELETE FROM shop.{name} WHERE id % 2 = 0 OR id BETWEEN 40000 AND 70000")
    source = chdb.source(name)
    pin = pinned(source)
    alive = [i for i in range(100000) if i % 2 and not 40000 <= i <= 70000]
    tasks = source.plan_tasks(pin, 100_000)
    assert len(tasks) > 2
    assert pin.rows == sum(task.rows for task in tasks) == source.partitions()[0].rows == len(alive)
    assert ids(read_all(source, pin, task_bytes=100_000)) == alive


def test_a_partition_whose_rows_are_all_deleted_is_empty(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = table("id UInt32", "ORDER BY id")
    chdb.run(f"INSERT INTO shop.{name} VALUES (1)")
    chdb.run(f"DELETE FROM shop.{name} WHERE 1")
    source = chdb.source(name)
    pin = pinned(source)
    columns = columns_of(source)
    (task,) = source.plan_tasks(pin, 1000)
    assert (pin.rows, task.rows) == (0, 0)
    assert list(read_task(source, pin, task, columns)) == []
    assert source.bounds(pin, columns).num_rows == 0


def test_only_the_wanted_parts_are_pinned_under_their_own_names(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = three_parts(chdb, table)
    # Mutations and merges make block numbers of the source differ from those of a fresh copy.
    chdb.run(f"ALTER TABLE shop.{name} DELETE WHERE id = 5")
    source = chdb.source(name)
    first, second, third = source.partitions()[0].parts
    pin = pinned(source, "all", [third.name, first.name])
    assert [part.name for part in pin.parts] == [first.name, third.name]
    assert [part.piece for part in pin.parts] == [first.piece, third.piece]
    assert pin.rows == chdb.value(f"SELECT count() FROM shop.{pin.detail['table']}") == 199
    assert ids(read_all(source, pin)) == [i for i in [*range(100), *range(200, 300)] if i != 5]
    assert second.name not in {part["source"] for part in pin.detail["parts"]}


def test_parts_with_the_same_rows_are_told_apart(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = table("id UInt32", "ORDER BY id")
    chdb.run(f"SYSTEM STOP MERGES shop.{name}")
    for _ in range(3):
        chdb.run(f"INSERT INTO shop.{name} VALUES (1)")
    source = chdb.source(name)
    parts = source.partitions()[0].parts
    pin = pinned(source, "all", [parts[1].name])
    assert [part.piece for part in pin.parts] == [parts[1].piece]
    assert ids(read_all(source, pin)) == [1]
    assert [part.piece for part in pinned(source).parts] == [part.piece for part in parts]


def test_a_pin_amid_inserts_and_merges_holds_exactly_the_rows_of_its_parts(
    chdb: Chdb, table: Any, pinned: Any
) -> None:
    name = table("id UInt32", "ORDER BY id")
    chdb.run(f"INSERT INTO shop.{name} SELECT 0 FROM numbers(10)")
    enough = threading.Event()

    def write() -> None:
        writer = Chdb(chdb.folder, Server(chdb.endpoint), chdb.config)
        number = 0
        while not enough.is_set():
            number += 1
            writer.run(f"INSERT INTO shop.{name} SELECT {number} FROM numbers(10)")
            if number % 3 == 0:
                writer.run(f"OPTIMIZE TABLE shop.{name} FINAL")
        writer.server.close()

    motion = threading.Thread(target=write)
    motion.start()
    try:
        source = chdb.source(name)
        columns = columns_of(source)
        for _ in range(8):
            pin = pinned(source)
            values = ids(read_all(source, pin, columns))
            blocks = {b for part in pin.parts for b in range(part.piece.first, part.piece.last + 1)}
            # Every insert is one block of ten rows: what was read is what the pieces say.
            assert len(values) == pin.rows == 10 * len(blocks)
            assert values == sorted(10 * list(range(len(blocks))))
    finally:
        enough.set()
        motion.join()


def test_pins_go_into_the_configured_database(chdb: Chdb, table: Any) -> None:
    chdb.run("CREATE DATABASE IF NOT EXISTS pins")
    name = three_parts(chdb, table)
    config = Config(chdb.config.root, "", {}, {}, {}, clickhouse={"pin_database": "pins"})
    source = ClickHouseSource(f"chdb:{chdb.folder}/shop/{name}", config)
    pin = source.pin("mine", "all", None)
    assert chdb.tables("pins") == {"mine"}
    assert ids(read_all(source, pin)) == list(range(300))
    source.unpin(pin.detail, 30)
    source.unpin(pin.detail, 30)
    assert chdb.tables("pins") == set()


@pytest.mark.parametrize(
    ("partition", "parts", "said"),
    [
        ("202499", None, "no partition"),
        ("all", ["all_77_77_0"], "all_77_77_0"),
        ("x' OR 1 --", None, "no partition"),
    ],
)
def test_an_unknown_partition_or_part_leaves_nothing_pinned(
    chdb: Chdb, table: Any, partition: str, parts: list[str] | None, said: str
) -> None:
    source = chdb.source(three_parts(chdb, table))
    before = chdb.tables()
    with pytest.raises(Invalid, match=said):
        source.pin("never", partition, parts)
    assert chdb.tables() == before


def test_a_failure_after_the_copy_was_made_drops_it(chdb: Chdb, table: Any, monkeypatch: Any) -> None:
    source = chdb.source(three_parts(chdb, table))
    before = chdb.tables()

    def break_down(*_: Any) -> Any:
        assert chdb.tables() != before
        raise Retryable("cut")

    monkeypatch.setattr(clickhouse, "visible_rows", break_down)
    with pytest.raises(Retryable):
        source.pin("half", "all", None)
    assert chdb.tables() == before


def test_patches_that_are_not_in_the_parts_are_refused(chdb: Chdb, table: Any) -> None:
    name = table(
        "id UInt32, s String",
        "ORDER BY id SETTINGS enable_block_number_column = 1, enable_block_offset_column = 1",
    )
    chdb.run(f"INSERT INTO shop.{name} VALUES (1, 'x'), (2, 'x')")
    chdb.run(f"UPDATE shop.{name} SET s = 'y' WHERE id = 1")
    source = chdb.source(name)
    before = chdb.tables()
    for frozen in (True, False):
        with pytest.raises(Invalid, match="patch") as refused:
            source.pin("never", "all", None, frozen=frozen)
        assert "APPLY PATCHES" in (refused.value.hint or "")
    assert chdb.tables() == before
    assert [partition.partition_id for partition in source.partitions()] == ["all"]


def test_patches_of_another_partition_do_not_matter(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = table(
        "id UInt32, p UInt8, q UInt8, s String",
        "PARTITION BY (p, q) ORDER BY id"
        " SETTINGS enable_block_number_column = 1, enable_block_offset_column = 1",
    )
    chdb.run(f"INSERT INTO shop.{name} VALUES (1, 1, 1, 'x'), (2, 2, 1, 'x')")
    chdb.run(f"UPDATE shop.{name} SET s = 'y' WHERE p = 2")
    source = chdb.source(name)
    assert ids(read_all(source, pinned(source, "1-1"))) == [1]
    with pytest.raises(Invalid, match="patch"):
        source.pin("never", "2-1", None)


def test_a_rename_that_is_still_running_is_refused(chdb: Chdb, table: Any) -> None:
    name = three_parts(chdb, table)
    chdb.run(f"SYSTEM STOP MERGES shop.{name}")
    chdb.run(f"ALTER TABLE shop.{name} RENAME COLUMN s TO renamed", mutations_sync=0, alter_sync=0)
    with pytest.raises(Invalid, match="RENAME COLUMN"):
        chdb.source(name).pin("never", "all", None)
    chdb.run(f"SYSTEM START MERGES shop.{name}")


# No pin


def test_without_a_pin_the_parts_are_read_by_name(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = three_parts(chdb, table)
    source = chdb.source(name)
    before = chdb.tables()
    part = source.partitions()[0].parts[1]
    pin = pinned(source, "all", [part.name], frozen=False)
    chdb.run(f"INSERT INTO shop.{name} VALUES (1000, 'late')")
    assert chdb.tables() == before
    assert ids(read_all(source, pin)) == list(range(100, 200))


def test_without_a_pin_a_part_that_has_gone_is_named(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = three_parts(chdb, table)
    source = chdb.source(name)
    part = source.partitions()[0].parts[0]
    pin = pinned(source, "all", None, frozen=False)
    chdb.run(f"OPTIMIZE TABLE shop.{name} FINAL")
    with pytest.raises(Corrupt, match=f"{part.name}.*gone"):
        read_all(source, pin)


# Values in a pin


def test_bounds_and_distinct_rows_are_in_target_types(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = table(
        "id UInt64, e Enum8('z' = 1, 'a' = 2), n Nullable(DateTime), f FixedString(2)", "ORDER BY id"
    )
    chdb.run(f"INSERT INTO shop.{name} VALUES (1, 'z', 5, 'ab'), (9, 'a', NULL, 'ab'), (1, 'z', 5, 'ab')")
    source = chdb.source(name)
    columns = columns_of(source)
    pin = pinned(source)
    five = us("1970-01-01T00:00:05")
    assert source.bounds(pin, columns).to_pylist() == [
        {"id": Decimal(1), "e": "z", "n": five, "f": b"ab"},
        {"id": Decimal(9), "e": "a", "n": five, "f": b"ab"},
        {"id": Decimal(1), "e": "z", "n": None, "f": b"ab"},
    ]
    distinct = pa.Table.from_batches(list(source.distinct_rows(pin, columns[:3])))
    assert {(row["e"], row["n"]) for row in distinct.to_pylist()} == {("z", five), ("a", None)}


def test_bounds_see_only_the_pinned_parts(chdb: Chdb, table: Any, pinned: Any) -> None:
    source = chdb.source(three_parts(chdb, table))
    part = source.partitions()[0].parts[1]
    for frozen in (True, False):
        pin = pinned(source, "all", [part.name], frozen=frozen)
        columns = columns_of(source)[:1]
        assert source.bounds(pin, columns).column("id").to_pylist() == [100, 199]
