"""A ClickHouse table that moves while it is read: merges, mutations, deletes, TTL, inserts, DROP, crashes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import clickhouse_connect
import pyarrow as pa
import pytest
from clickhouse_connect.driver.client import Client

from lockstep.config import Config
from lockstep.errors import LockstepError, Retryable
from lockstep.job import ColumnMap, Json
from lockstep.new_table import derive
from lockstep.schema import match_columns
from lockstep.source import Pin
from lockstep.source.chdb_launch import Room, connect
from lockstep.source.clickhouse import ClickHouseSource
from tests.standstill import within

pytestmark = pytest.mark.servers

PARTS = 8
ROWS = 20_000


class Shop:
    """A data folder with `shop.events`: one month in eight parts, and another month beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        connect(folder, create=True)
        self.run("CREATE DATABASE shop")
        self.run(
            "CREATE TABLE shop.events (id UInt64, ts DateTime('UTC'), note String) ENGINE = MergeTree"
            " PARTITION BY toYYYYMM(ts) ORDER BY id SETTINGS merge_with_ttl_timeout = 0"
        )
        self.run("SYSTEM STOP MERGES shop.events")
        for part in range(PARTS):
            self.insert(part * ROWS, ROWS)
        self.insert(10**9, 100, "2024-02-01")

    def insert(self, first: int, rows: int, day: str = "2024-01-01") -> None:
        self.run(
            f"INSERT INTO shop.events SELECT number, toDateTime('{day}', 'UTC') + number % 86400,"
            f" concat('note ', toString(number)) FROM numbers({first}, {rows})"
        )

    def client(self) -> Client:
        endpoint = connect(self.folder)
        return clickhouse_connect.get_client(
            host=endpoint.host,
            port=endpoint.port,
            username=endpoint.user,
            password=endpoint.password,
            autogenerate_session_id=False,
            dedicated_pool=True,
        )

    def run(self, sql: str) -> Any:
        with self.client() as client:
            return client.command(sql)

    def source(self) -> ClickHouseSource:
        config = Config(self.folder.parent, "", {}, {}, {})
        return ClickHouseSource(f"chdb:{self.folder}/shop/events", config)

    def kill(self) -> int:
        card = Room(self.folder).read_card()
        assert card is not None
        os.kill(card.pid, signal.SIGKILL)
        return card.pid


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path / "data")
    yield shop
    card = Room(shop.folder).read_card()
    if card is not None and Room(shop.folder).server_lives():
        os.kill(card.pid, signal.SIGTERM)


def columns_of(source: ClickHouseSource) -> list[ColumnMap]:
    described = source.describe()
    schema, _, _ = derive(described, allow_lossy=False)
    return match_columns(described, schema, allow_lossy=False)


def read(source: ClickHouseSource, pin: Pin, columns: Sequence[ColumnMap]) -> pa.Table:
    """Every row of a pin, in tasks and batches that are small, so that the table can move in between."""
    batches = []
    for task in source.plan_tasks(pin, 200_000):
        for chunk in source.read(pin.detail, task.descriptor, None, columns, 50_000):
            batches.append(chunk.batch)
    return pa.Table.from_batches(batches)


def assert_as_inserted(table: pa.Table, rows: int = PARTS * ROWS) -> None:
    found = sorted(
        zip(map(int, table.column("id").to_pylist()), table.column("note").to_pylist(), strict=True)
    )
    assert [number for number, _ in found] == list(range(rows))
    assert all(note == f"note {number}" for number, note in found)


def disturb(shop: Shop, until: threading.Event, did: list[str]) -> None:
    """Everything that changes parts, over and over."""
    acts = [
        "OPTIMIZE TABLE shop.events PARTITION ID '202401' FINAL",
        "ALTER TABLE shop.events UPDATE note = 'changed' WHERE id % 3 = 0",
        "DELETE FROM shop.events WHERE id % 7 = 1",
        "ALTER TABLE shop.events DELETE WHERE id % 11 = 2",
        "ALTER TABLE shop.events MODIFY TTL ts + INTERVAL 1 DAY",
        "ALTER TABLE shop.events MATERIALIZE TTL",
    ]
    with shop.client() as client:
        first = 10**6
        while not until.is_set():
            for act in acts:
                client.command(act, settings={"mutations_sync": 1})
                did.append(act)
            client.command(
                "INSERT INTO shop.events SELECT number, toDateTime('2024-01-09', 'UTC'), 'late'"
                f" FROM numbers({first}, 1000)"
            )
            first += 1000


def test_what_was_there_at_the_pin_is_read_while_everything_changes(shop: Shop) -> None:
    source = shop.source()
    columns = columns_of(source)
    pin = source.pin("moving", "202401", None)
    shop.run("SYSTEM START MERGES shop.events")
    until, did = threading.Event(), list[str]()
    disturber = threading.Thread(target=disturb, args=(shop, until, did))
    disturber.start()
    try:
        assert pin.rows == PARTS * ROWS
        while len(did) < 7:
            assert_as_inserted(read(source, pin, columns))
    finally:
        until.set()
        disturber.join()
        source.unpin(pin.detail, 30)
    assert shop.run("SELECT count() FROM shop.events WHERE ts < '2024-01-08'") == 0, "the TTL did its work"


def test_rows_inserted_after_the_pin_come_with_the_next_one(shop: Shop) -> None:
    source = shop.source()
    columns = columns_of(source)
    pin = source.pin("before", "202401", None)
    shop.insert(PARTS * ROWS, 500)
    later = source.pin("after", "202401", None)

    assert_as_inserted(read(source, pin, columns))
    assert_as_inserted(read(source, later, columns), PARTS * ROWS + 500)
    for one in (pin, later):
        source.unpin(one.detail, 30)


def test_drop_returns_at_once_and_the_pin_is_read_to_its_end(shop: Shop) -> None:
    source = shop.source()
    columns = columns_of(source)
    pin = source.pin("dropped", "202401", None)
    tasks = source.plan_tasks(pin, 10**9)
    chunks = source.read(pin.detail, tasks[0].descriptor, None, columns, 50_000)
    batches = [next(chunks).batch]

    with within(5):
        shop.run("DROP TABLE shop.events SYNC")

    batches += [chunk.batch for chunk in chunks]
    for task in tasks[1:]:
        batches += [chunk.batch for chunk in source.read(pin.detail, task.descriptor, None, columns, 50_000)]
    assert_as_inserted(pa.Table.from_batches(batches))
    source.unpin(pin.detail, 30)


def test_without_a_pin_a_dropped_table_is_a_clear_error_and_no_partial_end(shop: Shop) -> None:
    source = shop.source()
    columns = columns_of(source)
    noted = source.pin("noted", "202401", None, frozen=False)
    shop.run("DROP TABLE shop.events SYNC")

    with pytest.raises(LockstepError, match="events"):
        read(source, noted, columns)


def test_servers_killed_again_and_again_lose_no_row_and_repeat_none(shop: Shop) -> None:
    source = shop.source()
    columns = columns_of(source)
    pin = source.pin("killed", "202401", None)
    kept: list[pa.RecordBatch] = []
    killed: set[int] = set()
    chunks = 0
    (task,) = source.plan_tasks(pin, 10**9)
    position: Json | None = None
    done = False
    while not done:
        # As an attempt does: what follows the last position is lost with the attempt.
        pending: list[pa.RecordBatch] = []
        try:
            for chunk in source.read(pin.detail, task.descriptor, position, columns, 50_000):
                chunks += 1
                pending.append(chunk.batch)
                if chunk.position is not None:
                    kept += pending
                    pending, position = [], chunk.position
                if len(killed) < 4 and (chunks == 2 or chunk.position is not None):
                    killed.add(shop.kill())
            done = True
        except Retryable:
            continue

    assert len(killed) == 4
    assert_as_inserted(pa.Table.from_batches(kept))
    source.unpin(pin.detail, 30)


def test_a_restarted_server_leaves_the_pin_in_its_parts(shop: Shop) -> None:
    for part in range(12):
        shop.insert(PARTS * ROWS + part * 10, 10)
    source = shop.source()
    columns = columns_of(source)
    pin = source.pin("restarted", "202401", None)
    asked = "SELECT arraySort(groupArray(name)) FROM system.parts WHERE active AND table = 'restarted'"
    before = shop.run(asked)
    # The neighbour has the same parts, and shows when a restarted server merges them.
    shop.run("CREATE TABLE shop.neighbour AS shop.events")
    shop.run("SYSTEM STOP MERGES shop.neighbour")
    shop.run("ALTER TABLE shop.neighbour ATTACH PARTITION ID '202401' FROM shop.events")
    shop.kill()

    deadline = time.monotonic() + 150
    while shop.run("SELECT max(level) FROM system.parts WHERE active AND table = 'neighbour'") == 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert shop.run(asked) == before
    source = shop.source()
    assert_as_inserted(read(source, pin, columns), PARTS * ROWS + 120)
    source.unpin(pin.detail, 30)
    assert shop.run("SELECT count() FROM system.tables WHERE name = 'restarted'") == 0
