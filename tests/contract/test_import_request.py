"""Requests to import that are refused before anything is created, each with what to do instead."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.exceptions import NoSuchTableError

from lockstep.errors import Invalid
from lockstep.job import Json
from lockstep.schema_file import read_schema
from lockstep.source import ParseOptions
from tests.import_lab import ImportLab


@pytest.fixture
def lab(tmp_path: Path) -> ImportLab:
    return ImportLab(tmp_path)


def _field(name: str, kind: str) -> Json:
    return {"id": 1, "name": name, "required": False, "type": kind}


TEXT_OPTIONS: dict[str, dict[str, Any]] = {
    "--schema": {"schema": {"fields": [_field("id", "long")]}},
    "--skip": {"skip": 2},
    "--compression": {"compression": "gzip"},
}
CSV_OPTIONS: dict[str, dict[str, Any]] = {
    "--no-header": {"header": False},
    "--null": {"null": ("a",)},
    "--delimiter": {"delimiter": ","},
    "--quote": {"quote": "'"},
    "--escape": {"escape": "!"},
}


def test_an_option_that_would_change_nothing_is_refused_by_its_name_and_the_format(lab: ImportLab) -> None:
    lab.write("a.json", '{"id": 1}\n')
    pq.write_table(pa.table({"id": [1]}), lab.folder / "a.parquet")
    with (lab.folder / "a.avro").open("wb") as file:
        fastavro.writer(file, {"type": "record", "name": "r", "fields": [{"name": "id", "type": "long"}]}, [])
    lab.run("a.json", target="iceberg://lake/db.source")
    before = lab.store.list()
    own_types = {**TEXT_OPTIONS, **CSV_OPTIONS}
    for name, format, options in (
        ("a.json", "JSON lines", CSV_OPTIONS),
        ("a.parquet", "Parquet files", own_types),
        ("a.avro", "Avro files", own_types),
        ("iceberg://lake/db.source", "an Iceberg table", {**own_types, "--format": {"format": "csv"}}),
    ):
        for option, parse in options.items():
            with pytest.raises(Invalid, match=f"^{option} has no effect on {format}$"):
                lab.rehearse(name, parse=ParseOptions(**parse))
        lab.rehearse(name, parse=ParseOptions(null=[""], limit=5))
    assert lab.store.list() == before


@pytest.mark.parametrize(
    ("name", "content", "schema", "words", "hint"),
    [
        (
            "a.csv",
            "id,amount\n1,1.50\n",
            "id long\nAmount decimal(9,2)\n",
            '"Amount", and there is no',
            '"amount"',
        ),
        ("a.csv", "id,amount\n1,1.50\n", "id long\namuont double\n", '"amuont", and there is no', '"amount"'),
        ("a.csv", "id,amount\n1,1.50\n", "extra string\n", '"extra", and there is no', "id, amount"),
        ("a.csv", "id\n", "id long\nid string\n", '"id" 2 times', "one line"),
        ("a.csv", "id\n", "\n\n", "names no column", "a name, a type"),
        (
            "a.csv",
            "id\n",
            "id long required please\n",
            "line 1 .* not understood: id long required please",
            "required",
        ),
        ("a.csv", "id\n", "id\n", "line 1 .* no type: id", "a name, a type"),
        ("a.csv", "id\n", "the id long\n", "line 1 .* not understood: the id long", "blanks"),
        ("a.csv", "id\n", '{"fields": [{"name": "id", "type": {"type": "list"}}]}', "incomplete", "JSON"),
        ("a.csv", "id\n", '{"fields": [{"name": "id"}]}', "no column with a name and a type", None),
        ("a.csv", "id\n", '{"fields": 5}', "not a schema in Iceberg", None),
        (
            "a.jsonl",
            '{"id": 1, "amount": 1.5}\n',
            "Amount decimal(9,2)\n",
            '"Amount", and the .* "amount"',
            "both",
        ),
    ],
)
def test_a_schema_that_cannot_be_meant_is_refused_and_says_what_may_be(
    lab: ImportLab, name: str, content: str, schema: str, words: str, hint: str | None
) -> None:
    lab.write(name, content)
    path = lab.write("schema.txt", schema)
    with pytest.raises(Invalid, match=words) as refused:
        lab.plan(name, parse=ParseOptions(schema=read_schema(path)))
    assert hint is None or hint in str(refused.value.hint)
    assert lab.store.list() == []


def test_a_schema_that_was_saved_with_a_byte_order_mark_names_its_first_column(lab: ImportLab) -> None:
    lab.write("a.csv", "id,amount\n1,1.50\n")
    path = lab.write("schema.txt", b"\xef\xbb\xbfid int required\n\namount\tdecimal( 9,2 )\n")
    job = lab.plan("a.csv", parse=ParseOptions(schema=read_schema(path)))
    kinds = [(one.target, one.type, one.required) for one in job.plan.columns]
    assert kinds == [("id", "int", True), ("amount", "decimal(9, 2)", False)]


def test_without_a_header_a_schema_names_no_more_columns_than_there_are(lab: ImportLab) -> None:
    lab.write("a.csv", "1,x\n")
    named = [_field(name, "string") for name in ("a", "b", "c")]
    with pytest.raises(Invalid, match="names 3 columns, and the inputs have 2"):
        lab.plan("a.csv", parse=ParseOptions(header=False, schema={"fields": named}))
    job = lab.plan("a.csv", parse=ParseOptions(header=False, schema={"fields": named[:1]}))
    assert [one.target for one in job.plan.columns] == ["a", "c1"]


def test_a_schema_may_name_fields_that_no_record_of_json_shows(lab: ImportLab) -> None:
    lab.write("a.jsonl", '{"id": 1}\n')
    fields = [_field("id", "long"), _field("note", "string")]
    job = lab.run("a.jsonl", parse=ParseOptions(schema={"fields": fields}))
    assert lab.rows() == [{"id": 1, "note": None}], job.error


def test_a_name_that_sorted_imports_keep_is_refused_before_anything_is_created(lab: ImportLab) -> None:
    lab.write("a.csv", "_lockstep_task,v\n1,2\n")
    for attempt in (lab.plan, lab.rehearse):
        with pytest.raises(Invalid, match='column "_lockstep_task"; names that begin') as refused:
            attempt("a.csv", sort_by=("v",))
        assert refused.value.hint == "rename the column"
    assert lab.store.list() == []
    with pytest.raises(NoSuchTableError):
        lab.table()
    lab.run("a.csv")
    assert lab.rows() == [{"_lockstep_task": 1, "v": 2}]


# What is said


def refusal(lab: ImportLab, *inputs: str, **options: Any) -> tuple[str, str]:
    with pytest.raises(Invalid) as refused:
        lab.plan(*inputs, **options)
    return refused.value.message, refused.value.hint or ""


def test_a_unique_key_that_is_no_plain_value_is_not_taken_for_an_order(lab: ImportLab) -> None:
    lab.write("a.jsonl", '{"a": {"b": 1}, "c": 2}\n')
    assert refusal(lab, "a.jsonl", unique=("a",))[0] == '--unique names "a", which is not a plain value'
    assert refusal(lab, "a.jsonl", sort_by=("a",))[0] == '--sort-by names "a", which is not a plain value'


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_file_of_which_nothing_is_left_is_not_called_empty(lab: ImportLab, name: str) -> None:
    lab.write(name, '{"a": 1}\n{"a": 2}\n')
    message, hint = refusal(lab, name, parse=ParseOptions(skip=9))
    assert f"{name} after --skip 9" in message
    assert "skip fewer lines" in hint


@pytest.mark.parametrize("behind", [b"more", b"\0" * 512])
def test_bytes_behind_the_end_of_a_compressed_file_are_not_called_a_cut(
    lab: ImportLab, behind: bytes
) -> None:
    whole = gzip.compress(b"a,b\n1,2\n")
    lab.write("a.csv.gz", whole + behind)
    assert "other bytes follow its end" in refusal(lab, "a.csv.gz")[1]
    lab.write("a.csv.gz", whole[:-4])
    assert "cut short" in refusal(lab, "a.csv.gz")[1]


def test_what_files_lack_is_to_be_changed_in_the_files(lab: ImportLab) -> None:
    lab.write("a.csv", "n,m\n1,2\n")
    required = {**_field("n", "long"), "required": True}
    optional = _field("m", "long")
    lab.run("a.csv", parse=ParseOptions(schema={"fields": [required, optional]}))
    pq.write_table(pa.table({"n": [1], "m": [2]}), lab.folder / "a.parquet")
    assert "or write the files with a schema in which it cannot be NULL." in refusal(lab, "a.parquet")[0]
    lab.write("b.csv", "n,m\n1,3\n")
    parse = ParseOptions(schema={"fields": [{**required, "required": False}]})
    assert "say in the --schema that it is required" in refusal(lab, "b.csv", parse=parse)[0]
    lab.write("c.csv", "N,m\n1,3\n")
    assert 'it has "N". Rename it in the files.' in refusal(lab, "c.csv")[0]
    pq.write_table(pa.table({"n": pa.array([1], pa.timestamp("ns"))}), lab.folder / "b.parquet")
    new = refusal(lab, "b.parquet", target="iceberg://lake/db.other")[0]
    assert new.endswith("Pass --allow-lossy to store it as timestamp, or cast it in the files.")
