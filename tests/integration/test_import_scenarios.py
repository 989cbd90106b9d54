"""Imports as a user has them: the command, workers on Spark, independent readers."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from lockstep.job import Job, State
from tests.lab import Lab
from tests.readers import read_with_duckdb

pytestmark = pytest.mark.servers

_numbers = itertools.count(1)


class Case:
    """Files and a target of one test's own, in a lab with a worker."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.name = f"imported_{next(_numbers)}"
        self.folder = lab.folder / self.name
        self.folder.mkdir()
        self.target = f"iceberg://lake/db.{self.name}"

    def write(self, name: str, header: str, lines: list[str]) -> Path:
        path = self.folder / name
        path.write_text(header + "\n" + "".join(f"{line}\n" for line in lines))
        return path

    def imported(self, *options: str, inputs: str | None = None, target: str | None = None) -> Job:
        """Ask for an import and wait for the worker to end it."""
        asked = ("import", inputs or str(self.folder), target or self.target, *options, "--detach")
        (job,) = self.lab.document(*asked)["jobs"]
        return self.lab.wait_for_end(job["job_id"])

    def read(self) -> pa.Table:
        return read_with_duckdb(self.lab.table(f"db.{self.name}").metadata_location)


@pytest.fixture
def case(manned_lab: Lab) -> Case:
    return Case(manned_lab)


def test_an_import_equals_its_files_for_spark_and_duckdb(
    case: Case, read_with_spark: Callable[..., pa.Table]
) -> None:
    rows = [(n, n * 7919 % 1000, f"name {n}") for n in range(20_000)]
    for part in range(4):
        case.write(f"{part}.csv", "id,k,name", [f"{n},{k},{s}" for n, k, s in rows[part::4]])
    job = case.imported("--create", "--sort-by", "k,id")

    assert job.state is State.COMPLETED, job.error
    assert job.rows_done == len(rows)
    by_duckdb = case.read().sort_by("id").to_pylist()
    assert [tuple(row.values()) for row in by_duckdb] == rows
    by_spark = read_with_spark(case.lab.table(f"db.{case.name}").metadata_location)
    assert sorted(by_spark["id"].to_pylist()) == [row[0] for row in rows]


def test_the_command_works_on_its_import_and_says_what_became_of_it_as_show_does_later(lab: Lab) -> None:
    case = Case(lab)
    case.write("a.csv", "id,k", [*(f"{n},{n % 100}" for n in range(5000)), "7,7", "5000,x"])
    order = ("--sort-by", "k", "--unique", "id", "--on-duplicate", "keep-first")
    rejects = lab.folder / "rejects.csv"
    places = ("--max-rejects", "1", "--rejects", str(rejects))
    schema = lab.folder / "schema.txt"
    schema.write_text("id long\nk long\n")
    done = lab.document(
        "import", str(case.folder), case.target, "--create", *order, *places, "--schema", str(schema)
    )
    assert done["jobs"][0]["state"] == "completed"
    assert done["created_table"]
    assert done["summary"] == {
        "rows_read": 5002,
        "rows_written": 5000,
        "rows_rejected": 1,
        "duplicates": 1,
        "rejects_file": str(rejects),
        "data_files": 1,
        "sortedness": 1.0,
    }
    job_id = done["jobs"][0]["job_id"]
    shown = lab.document("show", job_id)["summary"]
    assert {**shown, "sortedness": 1.0} == done["summary"]
    page = lab.ok("show", job_id)
    assert "5,002 read, 5,000 written, 1 rejected, 1 duplicate" in page
    assert str(rejects) in page


def test_a_killed_import_publishes_nothing_and_its_runs_are_deleted(case: Case) -> None:
    case.write("a.csv", "id,k", ["1,1"])
    assert case.imported("--create", "--sort-by", "k").state is State.COMPLETED
    path = case.write("b.csv", "id,k", [f"{n},{n % 100}" for n in range(300_000)])
    asked = ("import", str(path), case.target, "--detach")
    killed = case.lab.document(*asked)["jobs"][0]["job_id"]
    case.lab.run("kill", killed)
    ended = case.lab.wait_for_end(killed)
    assert case.read().num_rows == (1 if ended.state is State.KILLED else 300_001)
    case.lab.wait_until(lambda: case.lab.store().read(killed).released)


def test_a_dry_run_lists_every_problem_and_creates_nothing(case: Case) -> None:
    lines = [f"{n},{n}" for n in range(20)]
    lines[3], lines[7], lines[11] = "x,3", "7,y", "11"
    schema = case.folder / "types.txt"
    schema.write_text("id long\nk long\n")
    case.write("a.csv", "id,k", lines)
    before = len(case.lab.jobs())

    done = case.lab.run(
        *("import", str(case.folder / "a.csv"), case.target, "--create", "--dry-run", "--json"),
        *("--schema", str(schema)),
    )

    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert [(problem["line"], problem["column"]) for problem in found["problems"][:2]] == [
        (5, "id"),
        (9, "k"),
    ]
    assert found["rejected"] == 3
    assert found["rows"] == 17
    assert len(case.lab.jobs()) == before
    assert not case.lab.has_table(f"db.{case.name}")


def test_rejects_are_listed_in_a_file_and_too_many_fail_the_job(case: Case) -> None:
    schema = case.folder / "types.txt"
    schema.write_text("id long\nk long\n")
    case.write("a.csv", "id,k", ["1,1", "two,2", "3,3"])
    rejects = case.folder / "rejects.csv"
    asked = ("--create", "--schema", str(schema))
    inputs = str(case.folder / "a.csv")

    refused = case.imported(*asked, inputs=inputs)
    done = case.imported(*asked, "--max-rejects", "1", "--rejects", str(rejects), inputs=inputs)

    assert refused.state is State.FAILED
    assert refused.error is not None
    assert "a.csv line 3" in refused.error.message
    assert done.state is State.COMPLETED, done.error
    (row,) = csv.DictReader(rejects.open())
    assert (row["line"], row["column"]) == ("3", "id")
    assert sorted(case.read()["id"].to_pylist()) == [1, 3]


def test_duplicates_are_named_by_file_and_line(case: Case) -> None:
    case.write("a.csv", "id,k", ["1,1", "2,2"])
    case.write("b.csv", "id,k", ["3,3", "2,4"])
    job = case.imported("--create", "--unique", "id")
    assert job.state is State.FAILED
    assert job.error is not None
    assert "b.csv line 3" in job.error.message
    assert "a.csv line 3" in job.error.message


def test_a_table_is_copied_in_another_order(case: Case) -> None:
    case.write("a.csv", "id,k", [f"{n},{n * 31 % 97}" for n in range(5000)])
    assert case.imported("--create").state is State.COMPLETED
    copy = case.imported("--create", "--sort-by", "k,id", inputs=case.target, target=f"{case.target}_by_k")
    assert copy.state is State.COMPLETED, copy.error
    files = case.lab.table(f"db.{case.name}_by_k").scan().plan_files()
    assert {task.file.sort_order_id for task in files} == {1}
    read = read_with_duckdb(case.lab.table(f"db.{case.name}_by_k").metadata_location)
    assert sorted(read["id"].to_pylist()) == list(range(5000))


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--sort-by", "nope"), 2, "nope"),
        (("--delimiter", "ab"), 2, "one letter"),
        (("--mode", "direct", "--unique", "id"), 2, "--mode direct"),
    ],
)
def test_a_request_that_cannot_work_is_refused_with_a_sentence(
    case: Case, options: tuple[str, ...], code: int, words: str
) -> None:
    case.write("a.csv", "id,k", ["1,1"])
    done = case.lab.run("import", str(case.folder / "a.csv"), case.target, "--create", *options)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not case.lab.has_table(f"db.{case.name}")
