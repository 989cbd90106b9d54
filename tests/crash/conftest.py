from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Lab


@pytest.fixture(scope="session")
def chdb_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One embedded ClickHouse for all tests that run real processes; it ends by itself when idle."""
    return tmp_path_factory.mktemp("chdb") / "data"


@pytest.fixture
def lab(tmp_path: Path, chdb_folder: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path, chdb_folder)
    yield lab
    lab.clickhouse.command(f"DROP DATABASE {lab.database} SYNC")
    lab.clickhouse.close()
