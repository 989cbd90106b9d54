from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from lockstep.config import Config
from lockstep.job import Json
from lockstep.source import Pin
from lockstep.source.chdb_launch import connect
from lockstep.source.clickhouse import ClickHouseSource
from lockstep.source.clickhouse_http import Server
from lockstep.source.clickhouse_types import quote_name
from tests.clickhouse_lab import NUMBERS, Chdb


@pytest.fixture(scope="session")
def chdb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chdb]:
    """One server for the whole session. A test that asks for it carries `@pytest.mark.servers`."""
    root = tmp_path_factory.mktemp("chdb")
    folder = root / "data"

    server = Server(lambda: connect(folder, create=True))
    server.run("CREATE DATABASE shop")
    ready = Chdb(folder, server, Config(root, "", {}, {}, {}))
    yield ready
    ready.stop()


@pytest.fixture
def table(chdb: Chdb) -> Iterator[Callable[..., str]]:
    """Create a table in `shop`; dropped at the end of the test."""
    made: list[str] = []

    def create(columns: str, tail: str = "ORDER BY tuple()", name: str | None = None) -> str:
        name = name or f"t{next(NUMBERS)}"
        made.append(name)
        chdb.run(f"CREATE TABLE shop.{quote_name(name)} ({columns}) ENGINE = MergeTree {tail}")
        return name

    yield create
    for name in made:
        chdb.drop(name)


@pytest.fixture
def pinned() -> Iterator[Callable[..., Pin]]:
    """Pin, and give up at the end of the test."""
    held: list[tuple[ClickHouseSource, Json]] = []

    def pin(
        source: ClickHouseSource, partition: str = "all", parts: Sequence[str] | None = None, **options: Any
    ) -> Pin:
        made = source.pin(f"lockstep_pin_{next(NUMBERS)}", partition, parts, **options)
        held.append((source, made.detail))
        return made

    yield pin
    for source, detail in held:
        source.unpin(detail, 30)
        source.close()
