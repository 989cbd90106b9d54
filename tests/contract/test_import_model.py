"""Imports against a model in a few lines: any rows, keys, buffers, tasks, policies and crashes."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep import importer, passes
from lockstep.job import State
from lockstep.review import tally
from lockstep.source import ParseOptions
from tests.import_lab import ImportLab

pytestmark = pytest.mark.long

FAILPOINTS = (
    "map.after_run",
    "map.after_checkpoint",
    "stage.before_advance",
    "stage.after_advance",
    "combine.after_run",
    "unique.after_file",
    "merge.after_file",
    "commit.before_publish",
    "commit.after_publish",
)
SCHEMA = {
    "type": "struct",
    "schema-id": 0,
    "fields": [
        {"id": 1, "name": "n", "required": False, "type": "long"},
        {"id": 2, "name": "k", "required": False, "type": "long"},
        {"id": 3, "name": "s", "required": False, "type": "string"},
    ],
}

Row = tuple[int, int | None, str]


@dataclass(frozen=True)
class Case:
    """What is imported, how, and what goes wrong."""

    files: list[list[Row]]
    sort_by: tuple[str, ...]
    unique: bool
    policy: str
    memory_kb: int
    task_bytes: int
    fan_in: int
    crashes: frozenset[tuple[str, int]]


texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00\r"), max_size=12)
keys = st.one_of(st.none(), st.integers(-3, 12), st.integers(-(2**63), 2**63 - 1))
cases = st.builds(
    Case,
    files=st.lists(st.lists(st.tuples(st.just(0), keys, texts), max_size=120), min_size=1, max_size=4),
    sort_by=st.sampled_from([("k",), ("k", "n"), ("n",), ("s", "k")]),
    unique=st.booleans(),
    policy=st.sampled_from(["error", "keep-first", "keep-last", "reject"]),
    memory_kb=st.sampled_from([8, 40, 400]),
    task_bytes=st.sampled_from([200, 2_000, 100_000]),
    fan_in=st.sampled_from([2, 3, 64]),
    crashes=st.frozensets(st.tuples(st.sampled_from(FAILPOINTS), st.integers(1, 4)), max_size=4),
)


def numbered(files: list[list[Row]]) -> list[list[Row]]:
    """Each row knows where it stands: `n` is its place in the order of inputs and records."""
    n = 0
    found = []
    for rows in files:
        found.append([(n + at, key, text) for at, (_, key, text) in enumerate(rows)])
        n += len(rows)
    return found


def model(case: Case, rows: list[Row]) -> list[Row] | None:
    """The rows that are published, or None if the job fails."""
    if not case.unique:
        return rows
    kept: dict[int, Row] = {}
    for row in reversed(rows) if case.policy != "keep-last" else rows:
        if row[1] is not None:
            kept[row[1]] = row
    survivors = [row for row in rows if row[1] is None or kept[row[1]] == row]
    return None if case.policy == "error" and len(survivors) < len(rows) else survivors


def sort_value(row: Row, column: str) -> tuple[bool, int | bytes]:
    value = {"n": row[0], "k": row[1], "s": row[2]}[column]
    if value is None:
        return False, 0
    return True, value.encode() if isinstance(value, str) else value


def as_csv(rows: list[Row]) -> str:
    """NULL is nothing at all; a text stands in quotes, so that an empty one is a text."""
    lines = [f"{n},{'' if k is None else k},{_quoted(s)}\n" for n, k, s in rows]
    return "n,k,s\n" + "".join(lines)


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


@given(case=cases)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_outcome_is_that_of_the_model_whatever_the_buffers_tasks_and_crashes(case: Case) -> None:
    folder = Path(tempfile.mkdtemp(prefix="import-model-"))
    try:
        _check(case, folder)
    finally:
        shutil.rmtree(folder)


def _check(case: Case, folder: Path) -> None:
    files = numbered(case.files)
    rows = [row for file in files for row in file]
    lab = ImportLab(folder, f'task_memory = "{case.memory_kb}KB"')
    for at, file in enumerate(files):
        lab.write(f"in/{at}.csv", as_csv(file))
    lab.crashes.at = set(case.crashes)
    with (
        patch.object(importer, "TASK_BYTES", case.task_bytes),
        patch.object(importer, "LEAST_TASK_BYTES", 1),
        patch.object(passes, "FAN_IN", case.fan_in),
    ):
        job = lab.run(
            "in",
            parse=ParseOptions(schema=SCHEMA),
            sort_by=case.sort_by,
            unique=("k",) if case.unique else (),
            on_duplicate=case.policy if case.unique else "error",
            max_rejects=1000,
            file_size_bytes=3_000,
        )

    expected = model(case, rows)
    if expected is None:
        assert job.state is State.FAILED
        assert lab.rows() == []
        return
    assert job.state is State.COMPLETED, job.error
    found = [tuple(row.values()) for file in lab.files() for row in file.to_pylist()]
    in_order = sorted(expected, key=lambda row: ([sort_value(row, c) for c in case.sort_by], row[0]))
    assert found == in_order
    assert tally(job, lab.store).duplicates == len(rows) - len(expected)
    assert len(lab.table().metadata.snapshots) == 1
    assert lab.left_over() == []
