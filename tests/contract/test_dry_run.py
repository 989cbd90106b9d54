"""A dry run finds what the import would find, exactly, and leaves nothing behind."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep import importer
from lockstep.errors import Corrupt
from lockstep.job import State
from lockstep.rehearsal import Rehearsal
from tests.files_lab import schema_of
from tests.import_lab import ImportLab

pytestmark = pytest.mark.long


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImportLab:
    """Small tasks and a small memory, so that a few thousand rows make several of everything."""
    monkeypatch.setattr(importer, "TASK_BYTES", 5_000)
    monkeypatch.setattr(importer, "LEAST_TASK_BYTES", 1)
    return ImportLab(tmp_path, 'task_memory = "40KB"')


@pytest.fixture(autouse=True)
def spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary folders are made; it is empty again after every test."""
    folder = tmp_path / "spills"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def pairs(found: Rehearsal) -> list[tuple[str, int, str, int]]:
    """File and line of each row that repeats a key, and of the row that it repeats."""
    return [
        (Path(row["input"]).name, row["line"], Path(row["winner"]["input"]).name, row["winner"]["line"])
        for row in found.repeated
    ]


@pytest.mark.parametrize("policy", ["error", "keep-first", "keep-last", "reject"])
def test_every_duplicate_of_the_input_is_found_whatever_the_buffers(lab: ImportLab, policy: str) -> None:
    chance = random.Random(3)
    lines = [("ab"[n % 2] + ".csv", n // 2 + 2, chance.randrange(3000)) for n in range(4000)]
    lines.sort()
    for name in ("a.csv", "b.csv"):
        lab.write(f"in/{name}", "id,k\n" + "".join(f"{n},{k}\n" for file, n, k in lines if file == name))
    first: dict[int, tuple[str, int]] = {}
    expected = []
    for file, line, key in lines if policy != "keep-last" else lines[::-1]:
        if key in first:
            expected.append((file, line, *first[key]))
        first.setdefault(key, (file, line))

    found = lab.rehearse("in", unique=("k",), on_duplicate=policy, most_listed=10**6, max_rejects=5)

    assert pairs(found) == sorted(expected)
    assert found.duplicates == len(expected) > 1000
    assert found.rows == 4000
    assert found.against_table == 0
    assert found.refused == (policy in ("error", "reject"))
    few = lab.rehearse("in", unique=("k",), on_duplicate=policy, most_listed=7)
    assert (pairs(few), few.duplicates) == (sorted(expected)[:7], len(expected))


@pytest.mark.parametrize(
    ("policy", "refused"), [("error", True), ("keep-first", False), ("keep-last", True), ("reject", True)]
)
def test_rows_that_the_table_has_are_found_and_nothing_in_its_folder_changes(
    lab: ImportLab, policy: str, refused: bool
) -> None:
    lab.write("old.csv", "id,k\n" + "".join(f"{n},{n}\n" for n in range(0, 900, 3)))
    assert lab.run("old.csv", unique=("k",), file_size_bytes=1000).state is State.COMPLETED
    lab.write("new.csv", "id,k\n" + "".join(f"{n},{n}\n" for n in range(600, 1200)))
    before = sorted(path for path in lab.folder.rglob("*") if path.is_file())

    found = lab.rehearse("new.csv", unique=("k",), on_duplicate=policy)

    assert found.duplicates == found.against_table == 100
    assert [row["line"] for row in found.repeated] == list(range(2, 302, 3))
    first = found.repeated[0]
    assert first["winner"]["in_table"]
    assert first["raw"] == "600,600"
    stored = {
        row["k"]: file for file in lab.table().scan().plan_files() for row in _rows(file.file.file_path)
    }
    assert first["winner"]["input"] == stored[600].file.file_path
    assert first["reason"].endswith("which is in the table")
    assert found.refused == refused
    assert sorted(path for path in lab.folder.rglob("*") if path.is_file()) == before


def _rows(path: str) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    return list(pq.read_table(path.removeprefix("file://")).to_pylist())


def test_what_a_dry_run_finds_is_what_the_import_rejects(lab: ImportLab) -> None:
    schema = schema_of(id="long", k="long")
    from lockstep.source import ParseOptions

    rows = [f"{n},{n % 400}" if n % 50 else f"x{n},{n}" for n in range(2000)]
    lab.write("a.csv", "id,k\n" + "\n".join(rows) + "\n")
    asked: dict[str, Any] = {
        "unique": ("k",),
        "on_duplicate": "reject",
        "max_rejects": 2000,
        "parse": ParseOptions(schema=schema),
    }
    found = lab.rehearse("a.csv", most_listed=5000, **asked)
    job = lab.run("a.csv", rejects=str(lab.folder / "bad.parquet"), **asked)
    assert job.state is State.COMPLETED, job.error
    listed = [
        {name: row[name] for name in row if name != "winner"} for row in found.problems + found.repeated
    ]
    assert sorted(listed, key=lambda row: row["line"]) == _rows(str(lab.folder / "bad.parquet"))
    assert (found.rejected, found.rows) == (40, 1960)
    assert found.duplicates == found.rows - len(lab.rows())


@pytest.mark.parametrize(
    ("partitioned", "mode", "what"),
    [
        (True, "direct", "partition"),
        (True, "merge", "partition"),
        (False, "merge", "place in the order"),
    ],
)
@pytest.mark.parametrize(
    ("kind", "least", "low"),
    [("int", -2147483640, -2147483648), ("decimal(3,2)", "-9.90", "-9.91")],
)
def test_a_value_that_cannot_be_truncated_is_a_reject_in_a_dry_run_and_in_the_import(
    lab: ImportLab, kind: str, least: Any, low: Any, partitioned: bool, mode: str, what: str
) -> None:
    _truncated_table(lab, kind, partitioned)
    path = lab.write("a.csv", f"id,k\nx,0\n{least},1\n{low},2\n,3\n")
    asked: dict[str, Any] = {"create": False, "mode": mode}
    if partitioned and mode == "merge":
        asked["sort_by"] = ("k",)

    found = lab.rehearse("a.csv", **asked)
    job = lab.run("a.csv", **asked, max_rejects=2, rejects=str(lab.folder / "bad.parquet"))

    assert job.state is State.COMPLETED, job.error
    assert (found.rows, found.rejected, found.refused) == (2, 2, True)
    assert sorted(row["k"] for row in lab.rows()) == [1, 3]
    assert found.problems == _rows(str(lab.folder / "bad.parquet"))
    assert found.problems[1] == {
        "input": str(path),
        "line": 4,
        "column": "id",
        "reason": f"the value {low} has no {what} under truncate[10]: the result is no "
        f"{kind.replace(',', ', ')} any more",
        "raw": f"{low},2",
    }
    lab.write("b.csv", f"id,k\n{low},2\n")
    refused = lab.run("b.csv", **asked)
    assert refused.state is State.FAILED
    assert refused.error is not None
    assert 'b.csv line 2, column "id": the value' in refused.error.message


def _truncated_table(lab: ImportLab, kind: str, partitioned: bool) -> None:
    from pyiceberg.catalog import load_catalog
    from pyiceberg.partitioning import PartitionField, PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.table.sorting import SortField, SortOrder
    from pyiceberg.transforms import TruncateTransform

    transform: TruncateTransform[int] = TruncateTransform(10)
    catalog = load_catalog("lake", **lab.config.catalogs["lake"])
    catalog.create_namespace("db")
    catalog.create_table(
        "db.t",
        Schema.model_validate(schema_of(id=kind, k="long")),
        partition_spec=PartitionSpec(*([PartitionField(1, 1000, transform, "p")] if partitioned else [])),
        sort_order=SortOrder(*([] if partitioned else [SortField(1, transform)])),
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Corrupt("a disk broke")], ids=repr)
def test_nothing_is_left_when_a_dry_run_is_interrupted(
    lab: ImportLab, spills: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    lab.write("a.csv", "id,k\n1,1\n2,1\n")

    def broken(*_: object) -> None:
        assert list(spills.rglob("*.keys.arrow")), "the keys are not where the test looks"
        raise error

    monkeypatch.setattr("lockstep.unique.judge", broken)
    with pytest.raises(type(error)):
        lab.rehearse("a.csv", unique=("k",))
    assert list(spills.iterdir()) == []
    assert lab.store.list() == []


def test_an_input_without_rows_has_no_duplicates(lab: ImportLab) -> None:
    lab.write("a.csv", "id,k\n")
    assert lab.rehearse("a.csv", unique=("k",)).duplicates == 0
