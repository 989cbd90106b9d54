"""Requests to import that are refused before anything is created, each with what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.errors import Invalid
from lockstep.job import Json
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
