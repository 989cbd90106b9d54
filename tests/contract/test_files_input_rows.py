"""Parquet and Avro files as an import reads them: typed values, split and resumed between rows."""

from __future__ import annotations

import io
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.errors import Corrupt, Invalid
from lockstep.job import ColumnMap
from lockstep.source import Place
from tests.files_lab import FilesLab

pytestmark = pytest.mark.long

LONG = {"type": "record", "name": "row", "fields": [{"name": "n", "type": "long"}]}


def avro(path: Path, schema: Any, rows: list[Any], **options: Any) -> Path:
    with path.open("wb") as file:
        fastavro.writer(file, schema, rows, **options)
    return path


def parquet(path: Path, rows: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(rows), path, **options)
    return path


def numbers(folder: Path, format: str, name: str, values: list[int], per_block: int) -> Path:
    """A file of one column `n`, with so many rows in a row group or block."""
    if format == "parquet":
        rows = {"n": pa.array(values, pa.int64())}
        return parquet(folder / f"{name}.parquet", rows, row_group_size=per_block)
    out = io.BytesIO()
    writer = fastavro.write.Writer(out, LONG, codec="deflate")
    for number, value in enumerate(values):
        if number and number % per_block == 0:
            writer.flush()
        writer.write({"n": value})
    writer.flush()
    path = folder / f"{name}.avro"
    path.write_bytes(out.getvalue())
    return path


@pytest.fixture(autouse=True)
def small_stretches(monkeypatch):
    """Let a block of Avro be worth a task of its own, as four megabytes are in life."""
    monkeypatch.setattr("lockstep.source.files_avro.STRETCH_BYTES", 1)


def test_avro_types_become_icebergs_and_values_are_exact(tmp_path):
    fields: list[tuple[str, Any, Any, Any]] = [
        ("b", "boolean", True, "boolean"),
        ("i", "int", -5, "int"),
        ("l", "long", 2**63 - 1, "long"),
        ("f", "float", 0.5, "float"),
        ("d", "double", 0.1, "double"),
        ("s", "string", "é", "string"),
        ("y", "bytes", b"\x00\xff", "binary"),
        ("day", {"type": "int", "logicalType": "date"}, date(2024, 2, 29), "date"),
        ("t", {"type": "long", "logicalType": "time-micros"}, time(1, 2, 3, 4), "time"),
        (
            "at",
            {"type": "long", "logicalType": "timestamp-micros"},
            datetime(2024, 2, 29, 1, 2, 3, 4, UTC),
            "timestamptz",
        ),
        (
            "loc",
            {"type": "long", "logicalType": "local-timestamp-millis"},
            datetime(2024, 2, 29, 1, 2, 3, 4000),
            "timestamp",
        ),
        (
            "dec",
            {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2},
            Decimal("-12345678.90"),
            "decimal(10, 2)",
        ),
        ("u", {"type": "string", "logicalType": "uuid"}, UUID(int=7), "uuid"),
        ("e", {"type": "enum", "name": "color", "symbols": ["RED", "BLUE"]}, "BLUE", "string"),
        ("e2", "color", "RED", "string"),
        ("x", {"type": "fixed", "name": "two", "size": 2}, b"ab", "fixed[2]"),
    ]
    schema = {
        "type": "record",
        "name": "row",
        "fields": [
            {"name": "key", "type": "long"},
            *({"name": name, "type": ["null", kind]} for name, kind, _, _ in fields),
            {"name": "list", "type": {"type": "array", "items": ["null", "int"]}},
            {"name": "map", "type": {"type": "map", "values": "string"}},
            {
                "name": "sub",
                "type": {
                    "type": "record",
                    "name": "sub",
                    "fields": [{"name": "id", "type": {"type": "string", "logicalType": "uuid"}}],
                },
            },
        ],
    }
    full = {"key": 1, **{name: value for name, _, value, _ in fields}}
    full |= {"list": [1, None], "map": {"k": "v"}, "sub": {"id": UUID(int=9)}}
    empty = {"key": 2, **{name: None for name, _, _, _ in fields}, "list": [], "map": {}, "sub": full["sub"]}
    lab = FilesLab(tmp_path, avro(tmp_path / "a.avro", schema, [full, empty]))
    types = {column.name: column.type for column in lab.table.columns}
    assert {name: types[name] for name, _, _, _ in fields} == {name: want for name, _, _, want in fields}
    assert [column.name for column in lab.table.columns if not column.nullable] == [
        "key",
        "list",
        "map",
        "sub",
    ]
    outcome = lab.read_all()
    wanted = [full | {"map": [("k", "v")], "sub": {"id": UUID(int=9).bytes}}]
    wanted.append(empty | {"map": [], "sub": {"id": UUID(int=9).bytes}})
    assert outcome.rows == wanted


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (["string", "long"], "Iceberg has no unions"),
        ("null", "without any value"),
        (
            {"type": "record", "name": "node", "fields": [{"name": "next", "type": ["null", "node"]}]},
            "itself",
        ),
    ],
)
def test_an_avro_type_that_iceberg_does_not_have_is_refused_by_column(tmp_path, kind, problem):
    schema = {"type": "record", "name": "row", "fields": [{"name": "c", "type": kind}]}
    with pytest.raises(Invalid, match=rf'cannot store column "c".*{problem}'):
        FilesLab(tmp_path, avro(tmp_path / "a.avro", schema, []))


@pytest.mark.parametrize("format", ["parquet", "avro"])
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    per_block=st.integers(1, 15),
    task_bytes=st.integers(1, 400),
    batch_bytes=st.integers(1, 200),
)
def test_any_split_and_any_position_give_the_same_rows(
    tmp_path, format, sizes, per_block, task_bytes, batch_bytes
):
    folder = tmp_path / format
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    wanted = []
    for number, size in enumerate(sizes):
        values = [1000 * number + i for i in range(size)]
        path = numbers(folder, format, str(number), values, per_block)
        wanted += [(value, Place(str(path), i + 1)) for i, value in enumerate(values)]
    lab = FilesLab(folder, folder)
    for split in (1 << 40, task_bytes):
        found = []
        for task in lab.tasks(split):
            outcome = lab.read(task, batch_bytes=batch_bytes)
            assert len(outcome.rows) == task.rows
            for row, record in zip(outcome.rows, outcome.records, strict=True):
                found.append((row["n"], lab.executor.locate(lab.detail, task.descriptor, record)))
            few = outcome.records[::3]
            assert lab.recall(task, few) == [
                (place, f'{{"n": {n}}}') for n, place in found[len(found) - len(outcome.rows) :][::3]
            ]
            for position in outcome.positions:
                rest = lab.read(task, position, batch_bytes)
                assert rest.records == [n for n in outcome.records if n >= position["record"]]
                assert rest.rows == outcome.rows[len(outcome.rows) - len(rest.rows) :]
        assert found == wanted


@pytest.mark.parametrize("format", ["parquet", "avro"])
def test_large_files_make_several_tasks_and_a_limit_makes_one(tmp_path, format):
    numbers(tmp_path, format, "a", list(range(100)), 10)
    lab = FilesLab(tmp_path, tmp_path)
    assert len(lab.tasks(task_bytes=1)) == 10
    assert len(lab.tasks()) == 1
    limited = FilesLab(tmp_path, tmp_path, limit=25)
    assert len(limited.tasks(task_bytes=1)) == 1
    assert [row["n"] for row in limited.read_all(batch_bytes=8).rows] == list(range(25))


@pytest.mark.parametrize("format", ["parquet", "avro"])
def test_rows_that_do_not_fit_are_rejects_with_their_number(tmp_path, format):
    numbers(tmp_path, format, "a", [1, 2**40, 3, 2**41], 3)
    lab = FilesLab(tmp_path, tmp_path)
    narrow = [ColumnMap("n", 1, "int", True, "n", "long", lossy=True)]
    (task,) = lab.tasks()
    outcome = lab.read(task, columns=narrow)
    assert [row["n"] for row in outcome.rows] == [1, 3]
    assert outcome.records == [0, 2]
    assert [(r.record, r.line, r.column, r.raw) for r in outcome.rejects] == [
        (1, None, "n", '{"n": 1099511627776}'),
        (3, None, "n", '{"n": 2199023255552}'),
    ]
    assert "does not fit into int" in outcome.rejects[0].reason
    places = [lab.executor.locate(lab.detail, task.descriptor, r.record) for r in outcome.rejects]
    assert [place.line for place in places] == [2, 4], "rows count from 1 for people"
    assert lab.lines_of_rejects() == []


@pytest.mark.parametrize("format", ["parquet", "avro"])
@pytest.mark.parametrize("damage", ["cut short", "not such a file", "empty"])
def test_a_broken_file_is_refused_by_name(tmp_path, format, damage):
    path = numbers(tmp_path, format, "a", list(range(1000)), 100)
    data = path.read_bytes()
    path.write_bytes({"cut short": data[:-30], "not such a file": b"a,b\n1,2\n" * 20, "empty": b""}[damage])
    with pytest.raises(Invalid, match=rf"cannot read .*a\.{format} as "):
        FilesLab(tmp_path, path).tasks()


def test_an_avro_block_with_broken_bytes_is_corrupt_and_named(tmp_path):
    path = numbers(tmp_path, "avro", "a", list(range(1000)), 100)
    data = bytearray(path.read_bytes())
    data[-60:-50] = b"\xff" * 10
    path.write_bytes(bytes(data))
    lab = FilesLab(tmp_path, path)
    with pytest.raises(Corrupt, match=r"cannot read .*a\.avro as Avro"):
        lab.read_all()


@pytest.mark.parametrize("format", ["parquet", "avro"])
def test_a_changed_file_is_corrupt_and_named(tmp_path, format):
    path = numbers(tmp_path, format, "a", [1, 2], 1)
    lab = FilesLab(tmp_path, path)
    (task,) = lab.tasks()
    numbers(tmp_path, format, "a", [3, 4], 1)
    with pytest.raises(Corrupt, match=rf"a\.{format} has changed since the import was planned"):
        lab.read(task)


def test_parquet_files_of_different_schemas_are_refused(tmp_path):
    parquet(tmp_path / "a.parquet", {"n": [1]})
    parquet(tmp_path / "b.parquet", {"n": ["x"]})
    with pytest.raises(Invalid, match=r'b\.parquet differs: column "n" is string'):
        FilesLab(tmp_path, tmp_path)


def test_inputs_of_different_formats_are_refused(tmp_path):
    parquet(tmp_path / "a.parquet", {"n": [1]})
    (tmp_path / "b.csv").write_text("n\n1\n")
    with pytest.raises(Invalid, match="different formats: csv, parquet"):
        FilesLab(tmp_path, tmp_path)
