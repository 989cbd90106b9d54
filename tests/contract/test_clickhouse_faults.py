"""The ClickHouse source against a real ClickHouse: damage, outages and wrong addresses."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lockstep.config import Config
from lockstep.errors import Corrupt, Invalid, LockstepError, Retryable
from lockstep.job import Json
from lockstep.new_table import derive
from lockstep.schema import match_columns
from lockstep.source import Chunk, Pin, open_source
from lockstep.source.clickhouse import ClickHouseSource
from lockstep.source.clickhouse_http import Server
from tests.clickhouse_lab import Chdb, columns_of, ids, read_all, read_task, three_parts

pytestmark = pytest.mark.servers


def _damage(chdb: Chdb, pin: Pin, part: Json) -> None:
    # ClickHouse tries every single bit before it reports a wrong checksum: quick in a small block only.
    path = chdb.value(
        f"SELECT path FROM system.parts WHERE table = '{pin.detail['table']}'"
        f" AND name = '{part['name']}' AND active"
    )
    data = next(one for one in Path(path).iterdir() if one.name in {"data.bin", "s.bin"})
    content = bytearray(data.read_bytes())
    for at in range(len(content) // 2, len(content) // 2 + 64):
        content[at] ^= 0xFF
    data.write_bytes(bytes(content))


def test_a_damaged_part_is_corrupt_and_named(chdb: Chdb, table: Any, pinned: Any) -> None:
    name = table("id UInt32, s String", "ORDER BY id")
    chdb.run(f"SYSTEM STOP MERGES shop.{name}")
    for i in range(2):
        chdb.run(f"INSERT INTO shop.{name} SELECT number, randomString(1) FROM numbers({i + 2000})")
    source = chdb.source(name)
    schema, _, _ = derive(source.describe())
    schema["fields"][1]["type"] = "binary"
    columns = match_columns(source.describe(), schema)
    pin = pinned(source)
    _damage(chdb, pin, pin.detail["parts"][1])
    with pytest.raises(Corrupt, match=pin.parts[1].name):
        read_all(source, pin, columns)


def test_an_error_in_the_middle_of_the_answer_is_told_in_its_own_words(
    chdb: Chdb, table: Any, pinned: Any
) -> None:
    name = table("id UInt32", "ORDER BY id")
    chdb.run(f"INSERT INTO shop.{name} SELECT number FROM numbers(500000)")
    chdb.run(f"ALTER TABLE shop.{name} ADD COLUMN late UInt8 DEFAULT throwIf(id = 450000, 'halt at 450000')")
    source = chdb.source(name)
    columns = columns_of(source)
    pin = pinned(source)
    (task,) = source.plan_tasks(pin, 10**9)
    arrived: list[Chunk] = []
    with pytest.raises(Retryable, match="halt at 450000"):
        arrived.extend(read_task(source, pin, task, columns, batch_bytes=100_000))
    assert all(chunk.position is None for chunk in arrived)
    assert sum(chunk.batch.num_rows for chunk in arrived) < 500_000


def test_a_table_that_is_in_the_way_of_a_pin_is_left_alone(chdb: Chdb, table: Any) -> None:
    source = chdb.source(three_parts(chdb, table))
    taken = table("id UInt32")
    chdb.run(f"INSERT INTO shop.{taken} VALUES (1)")
    with pytest.raises(LockstepError, match=taken):
        source.pin(taken, "all", None)
    assert chdb.value(f"SELECT count() FROM shop.{taken}") == 1


def test_rows_that_went_missing_from_a_frozen_copy_are_noticed(chdb: Chdb, table: Any, pinned: Any) -> None:
    source = chdb.source(three_parts(chdb, table))
    columns = columns_of(source)
    pin = pinned(source)
    chdb.run(f"SYSTEM START MERGES shop.{pin.detail['table']}")
    chdb.run(f"DELETE FROM shop.{pin.detail['table']} WHERE id = 150")
    with pytest.raises(Corrupt, match=pin.parts[0].name):
        read_all(source, pin, columns)


def test_a_frozen_copy_that_is_gone_is_corrupt(chdb: Chdb, table: Any, pinned: Any) -> None:
    source = chdb.source(three_parts(chdb, table))
    columns = columns_of(source)
    pin = pinned(source)
    chdb.drop(pin.detail["table"])
    with pytest.raises(Corrupt, match=r"frozen copy .* is gone"):
        read_all(source, pin, columns)


def test_the_job_goes_on_after_the_embedded_server_was_killed(tmp_path: Path) -> None:
    from lockstep.source.chdb_launch import Room, connect

    folder = tmp_path / "data"
    connect(folder, create=True)
    other = Chdb(folder, Server(lambda: connect(folder)), Config(tmp_path, "", {}, {}, {}))
    other.run("CREATE DATABASE shop")
    other.run("CREATE TABLE shop.t (id UInt32) ENGINE = MergeTree ORDER BY id")
    for i in range(4):
        other.run(f"INSERT INTO shop.t VALUES ({i})")
    source = other.source("t")
    columns = columns_of(source)
    pin = source.pin("frozen", "all", None)
    (task,) = source.plan_tasks(pin, 10**9)
    chunks = read_task(source, pin, task, columns)
    first = next(chunks)
    card = Room(folder).read_card()
    assert card is not None
    os.kill(card.pid, 9)
    rest = list(chunks)
    assert ids(pa.Table.from_batches([first.batch, *(chunk.batch for chunk in rest)])) == [0, 1, 2, 3]
    again = list(read_task(source, pin, task, columns, first.position))
    assert [chunk.position for chunk in again] == [chunk.position for chunk in rest]
    source.unpin(pin.detail, 30)
    other.stop()


def _address(chdb: Chdb, table: str = "t", database: str = "shop", **changes: Any) -> str:
    found = chdb.endpoint()
    user, password = changes.get("user", found.user), changes.get("password", found.password)
    return f"clickhouse://{user}:{password}@{found.host}:{changes.get('port', found.port)}/{database}/{table}"


def test_the_same_table_is_read_over_its_http_address(chdb: Chdb, table: Any, pinned: Any) -> None:
    source = open_source(_address(chdb, three_parts(chdb, table)), chdb.config)
    assert isinstance(source, ClickHouseSource)
    assert ids(read_all(source, pinned(source))) == list(range(300))
    assert chdb.endpoint().password not in repr(source.describe())


def test_a_wrong_password_is_invalid_and_not_repeated_to_the_user(chdb: Chdb) -> None:
    source = ClickHouseSource(_address(chdb, password="guess-me"), chdb.config)
    with pytest.raises(Invalid, match="login") as refused:
        source.describe()
    assert "guess-me" not in str(refused.value)
    assert refused.value.hint


def test_an_unknown_table_or_database_is_invalid_and_says_what_is_there(chdb: Chdb, table: Any) -> None:
    name = table("id UInt32")
    with pytest.raises(Invalid, match=r"no table shop\.nothing") as refused:
        chdb.source("nothing").describe()
    assert name in (refused.value.hint or "")
    with pytest.raises(Invalid) as refused:
        chdb.source("t", "nowhere").partitions()
    assert "shop" in (refused.value.hint or "")


def test_a_view_is_refused_because_it_has_no_parts(chdb: Chdb) -> None:
    chdb.run("CREATE VIEW shop.view AS SELECT 1 AS id")
    with pytest.raises(Invalid, match="View"):
        chdb.source("view").describe()
    chdb.run("DROP VIEW shop.view")


def test_a_server_that_is_not_there_is_retryable(chdb: Chdb) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        source = ClickHouseSource(_address(chdb, port=taken.getsockname()[1]), chdb.config)
        with pytest.raises(Retryable):
            source.describe()


def test_unpin_gives_up_in_time_when_the_server_hangs(chdb: Chdb) -> None:
    from lockstep.runtime import SYSTEM_CLOCK

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        source = ClickHouseSource(_address(chdb, port=silent.getsockname()[1]), chdb.config)
        began = SYSTEM_CLOCK.now()
        with pytest.raises(Retryable):
            source.unpin({"frozen": True, "database": "shop", "table": "pin"}, 3)
        assert SYSTEM_CLOCK.now() - began < 5


def test_a_table_is_the_same_under_every_address_and_another_one_of_its_name_is_not(
    chdb: Chdb, table: Any
) -> None:
    name = table("id UInt32", "ORDER BY id")
    endpoint = chdb.endpoint()
    secret = f"{endpoint.user}:{endpoint.password}@"
    addresses = [
        f"clickhouse://{secret}{host}:{endpoint.port}/shop/{name}" for host in ("127.0.0.1", "localhost")
    ]
    identities = {open_source(address, chdb.config).describe().identity for address in addresses}
    identities.add(chdb.source(name).describe().identity)
    assert len(identities) == 1
    chdb.drop(name)
    table("id UInt32", "ORDER BY id", name)
    assert chdb.source(name).describe().identity not in identities
