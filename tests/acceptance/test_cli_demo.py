"""The demo, and that its proof can fail."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from lockstep.cli.demo import TARGET
from lockstep.cli.demo_proof import prove
from lockstep.config import load_config
from tests.lab import COMMAND, open_clickhouse

pytestmark = pytest.mark.servers


def run_demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "demo", *arguments], cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )


def test_the_demo_crashes_recovers_and_proves_that_every_row_is_there_once(tmp_path: Path) -> None:
    room = tmp_path / "room"
    done = run_demo(tmp_path, "--folder", str(room), "--rows", "8000", "--json")
    assert done.returncode == 0, done.stderr
    proof = json.loads(done.stdout)
    assert proof["holds"]
    assert proof["rows"] == 8000
    assert [p["partition"] for p in proof["partitions"]] == ["202401", "202402", "202403", "202404"]
    assert all(p["same"] for p in proof["partitions"])
    assert len({s["job_id"] for s in proof["snapshots"]}) == len(proof["snapshots"]) == 4
    assert "SIGKILL" in done.stderr
    assert "The table has 1 snapshot" in done.stderr

    # The proof is worth something only if it can fail: one row more in the source.
    config = load_config(room / "lockstep.toml")
    assert prove(config, room / "clickhouse", TARGET).holds
    clickhouse = open_clickhouse(room / "clickhouse")
    clickhouse.command("INSERT INTO shop.events SELECT * FROM shop.events WHERE id = 1")
    clickhouse.close()
    again = prove(config, room / "clickhouse", TARGET)
    assert not again.holds
    assert again.problems == ["partition 202401 differs between source and target"]


def test_the_demo_does_not_touch_a_folder_with_something_in_it(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("x")
    done = run_demo(tmp_path, "--folder", str(tmp_path))
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == [mine]
