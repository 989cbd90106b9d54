"""The Python API: what it takes, and how it refuses. What it runs is shown with Spark in `integration`."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import lockstep

TARGET = "iceberg://lake/db.t"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("id,name\n1,x\n")
    return tmp_path


def columns_of(imported: lockstep.Export) -> dict[str, Any]:
    (job,) = imported.jobs
    return {column.target: column.type for column in job.plan.columns}


def test_a_schema_is_a_file_or_icebergs_json(folder: Path) -> None:
    (folder / "schema.txt").write_text("id int\nname string\n")
    fields = [
        {"id": 1, "name": "id", "type": "int", "required": False},
        {"id": 2, "name": "name", "type": "string", "required": False},
    ]
    given: list[Any] = ["schema.txt", folder / "schema.txt", {"fields": fields}]
    for number, schema in enumerate(given):
        job = lockstep.import_files("a.csv", f"{TARGET}{number}", create=True, schema=schema)
        assert columns_of(job) == {"id": "int", "name": "string"}


def test_one_name_is_taken_as_a_name_and_not_as_letters() -> None:
    job = lockstep.import_files("a.csv", TARGET, create=True, sort_by="name", unique="id")
    terms = job.jobs[0].plan.terms
    assert terms is not None
    assert [key.column for key in terms.order] == ["name"]
    assert terms.unique == ("id",)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"delimeter": ";"}, "no option 'delimeter'"),
        ({"schema": {"id": "long"}}, "neither Iceberg's JSON"),
        ({"schema": "missing.txt"}, "missing.txt cannot be read"),
        ({"deadline_s": 0}, "--deadline must be positive"),
    ],
)
def test_what_does_not_fit_is_refused_as_the_command_does(options: dict[str, Any], words: str) -> None:
    with pytest.raises(lockstep.Invalid, match=words):
        lockstep.import_files("a.csv", TARGET, create=True, **options)
    assert lockstep.jobs() == []


def test_the_version_is_that_of_the_package() -> None:
    assert lockstep.__version__ == version("lockstep")
