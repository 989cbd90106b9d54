from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import Config
from lockstep.source.chdb_launch import Room, connect
from lockstep.source.clickhouse import ClickHouseSource
from lockstep.source.clickhouse_http import Endpoint, Server
from lockstep.source.clickhouse_types import quote_name

LENIENT = {
    "allow_suspicious_low_cardinality_types": 1,
    "enable_time_time64_type": 1,
    "allow_experimental_qbit_type": 1,
    "allow_experimental_nullable_tuple_type": 1,
    "enable_lightweight_update": 1,
    "allow_experimental_lightweight_update": 1,
    "mutations_sync": 2,
}


@dataclass
class Chdb:
    """A real ClickHouse for tests: an embedded data folder and its server."""

    folder: Path
    server: Server
    config: Config

    def run(self, sql: str, **settings: Any) -> None:
        self.server.run(sql, {**LENIENT, **settings})

    def value(self, sql: str) -> Any:
        return self.server.values(sql)[0][0]

    def source(self, table: str, database: str = "shop") -> ClickHouseSource:
        from urllib.parse import quote

        address = f"chdb:{self.folder}/{quote(database, safe='')}/{quote(table, safe='')}"
        return ClickHouseSource(address, self.config)

    def endpoint(self) -> Endpoint:
        found = connect(self.folder)
        return Endpoint(found.host, found.port, found.user, found.password)

    def tables(self, database: str = "shop") -> set[str]:
        rows = self.server.values(f"SELECT name FROM system.tables WHERE database = '{database}'")
        return {row[0] for row in rows}

    def drop(self, table: str) -> None:
        self.run(f"DROP TABLE IF EXISTS shop.{quote_name(table)} SYNC")

    def stop(self) -> None:
        self.server.close()
        card = Room(self.folder).read_card()
        if card is not None:
            os.kill(card.pid, signal.SIGTERM)


@pytest.fixture(scope="session")
def chdb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chdb]:
    """One server for the whole session. A test that asks for it carries `@pytest.mark.servers`."""
    root = tmp_path_factory.mktemp("chdb")
    folder = root / "data"

    def find() -> Endpoint:
        found = connect(folder, create=True)
        return Endpoint(found.host, found.port, found.user, found.password)

    server = Server(find)
    server.run("CREATE DATABASE shop")
    ready = Chdb(folder, server, Config(root, "", {}, {}, {}))
    yield ready
    ready.stop()
