"""The ClickHouse source against a real ClickHouse: tasks, read from any position in bounded batches."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from lockstep.source import clickhouse_rows as room
from tests.clickhouse_lab import Chdb, columns_of, ids, read_all, read_task

pytestmark = pytest.mark.servers


def large(chdb: Chdb, table: Any, rows: int = 200_000) -> str:
    name: str = table("id UInt32, s String", "ORDER BY id")
    chdb.run(f"SYSTEM STOP MERGES shop.{name}")
    chdb.run(
        f"INSERT INTO shop.{name} SELECT number, repeat('x', 100) FROM numbers({rows})",
        max_insert_block_size=rows,
    )
    for i in range(3):
        chdb.run(f"INSERT INTO shop.{name} SELECT {rows} + number + {i * 10}, 'y' FROM numbers(10)")
    return name


def test_a_large_part_makes_several_tasks_and_small_ones_share_one(
    chdb: Chdb, table: Any, pinned: Any
) -> None:
    source = chdb.source(large(chdb, table))
    pin = pinned(source)
    tasks = source.plan_tasks(pin, 5_000_000)
    assert tasks == source.plan_tasks(pin, 5_000_000)
    segments = [segment for task in tasks for segment in task.descriptor["segments"]]
    big = segments[0][0]
    assert len({segment[0] for segment in segments}) == 4
    cuts = [segment for segment in segments if segment[0] == big]
    assert len(cuts) > 3
    assert all(start % 8192 == 0 for _, start, _, _ in cuts)
    assert [start for _, start, _, _ in cuts[1:]] == [end for _, _, end, _ in cuts[:-1]]
    assert len(tasks[-1].descriptor["segments"]) > 2
    assert all(task.size_bytes <= 6_000_000 for task in tasks)
    assert ids(read_all(source, pin, task_bytes=5_000_000)) == list(range(200_030))


def test_going_on_from_every_position_gives_exactly_the_rest(
    chdb: Chdb, table: Any, pinned: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(room, "RANGE_BYTES", 3_000_000)
    source = chdb.source(large(chdb, table))
    columns = columns_of(source)
    pin = pinned(source)
    (task,) = source.plan_tasks(pin, 10**9)
    chunks = list(read_task(source, pin, task, columns, batch_bytes=500_000))
    positions = [chunk.position for chunk in chunks]
    assert positions[-1] is not None
    assert positions.count(None) > 5
    assert len([one for one in positions if one]) > 7
    for i, position in enumerate(positions):
        if position is None:
            continue
        before = [chunk.batch for chunk in chunks[: i + 1]]
        rest = [chunk.batch for chunk in read_task(source, pin, task, columns, position)]
        assert ids(pa.Table.from_batches(before + rest)) == list(range(200_030))
        if i == len(positions) - 1:
            assert rest == []


def test_a_batch_stays_near_its_bytes_whatever_the_rows_weigh(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = table("id UInt32, s String", "ORDER BY id")
    chdb.run(f"INSERT INTO shop.{name} SELECT number, repeat('x', 1000000) FROM numbers(60)")
    chdb.run(f"INSERT INTO shop.{name} SELECT 60 + number, '' FROM numbers(40)")
    source = chdb.source(name)
    columns = columns_of(source)
    pin = pinned(source)
    (task,) = source.plan_tasks(pin, 10**9)
    chunks = list(read_task(source, pin, task, columns, batch_bytes=4_000_000))
    assert max(chunk.batch.nbytes for chunk in chunks) <= 8_000_000
    assert ids(pa.Table.from_batches([chunk.batch for chunk in chunks])) == list(range(100))


def test_a_run_of_heavy_rows_amid_light_ones_makes_no_large_batch(
    chdb: Chdb, table: Any, pinned: Any
) -> None:
    name = table("id UInt32, s String", "ORDER BY id")
    chdb.run(f"INSERT INTO shop.{name} SELECT number, 'x' FROM numbers(100000)")
    chdb.run(
        f"INSERT INTO shop.{name} SELECT 100000 + number, repeat('y', 200000) FROM numbers(400)",
        max_block_size=50,
    )
    chdb.run(f"OPTIMIZE TABLE shop.{name} FINAL")
    source = chdb.source(name)
    columns = columns_of(source)
    pin = pinned(source)
    assert [part["heavy_rows"] for part in pin.detail["parts"]] == [True]
    (task,) = source.plan_tasks(pin, 10**9)
    arrived = 0
    for chunk in read_task(source, pin, task, columns, batch_bytes=4_000_000):
        assert chunk.batch.nbytes <= 4_000_000
        # What a batch was cut from is what memory held.
        assert chunk.batch.column("s").buffers()[2].size <= 30_000_000
        arrived += chunk.batch.num_rows
    assert arrived == 100_400


def test_a_range_is_found_without_scanning_the_part(chdb: Chdb, table: Any, pinned: Any) -> None:
    source = chdb.source(large(chdb, table))
    pin = pinned(source)
    big = pin.detail["parts"][0]
    explained = chdb.server.values(
        f"EXPLAIN indexes = 1 SELECT id FROM shop.{pin.detail['table']}"
        f"{room._range(big['name'], 196_608, 200_000)}"
    )
    granules = [line[0].split("Granules:")[1].strip() for line in explained if "Granules:" in line[0]]
    read, total = granules[-1].split("/")
    assert int(read) <= 3 < int(total)
