"""The kinds of jobs that the crash matrix drills."""

from __future__ import annotations

import pyarrow.parquet as pq

from tests.crash.drills import Family
from tests.lab import Lab
from tests.readers import read_with_duckdb


def _request_export(lab: Lab) -> tuple[str, ...]:
    return (
        *("export", lab.source(), "iceberg://lake/db.events", "--all", "--create"),
        *("--file-size", "30KB"),
    )


EXPORT = Family(
    name="export",
    failpoints=(
        "plan.before_create",
        "write.after_file",
        "write.after_checkpoint",
        "write.before_finish",
        "commit.after_intent",
        "commit.before_publish",
        "commit.after_publish",
        "commit.reply_lost",
        "commit.before_record",
        "fence.before_publish",
        "fence.after_publish",
        "unpin.before",
    ),
    prepare=lambda lab: lab.make_events(parts=2, rows=4000),
    request=_request_export,
    assert_exact=lambda lab: lab.assert_exact(),
)

ROWS = 12_000


def _write_csv(lab: Lab) -> None:
    lines = (f"{n},{n * 7919 % 1000},name {n}\n" for n in range(ROWS))
    (lab.folder / "in.csv").write_text("id,k,name\n" + "".join(lines))


def _request_import(lab: Lab) -> tuple[str, ...]:
    return (
        *("import", str(lab.folder / "in.csv"), "iceberg://lake/db.events", "--create"),
        *("--sort-by", "k,id", "--file-size", "30KB"),
    )


def assert_imported(lab: Lab, rows: int = ROWS) -> None:
    """Every row once, in order from file to file."""
    read = read_with_duckdb(lab.table().metadata_location)
    assert sorted(read["id"].to_pylist()) == list(range(rows))
    files = sorted(task.file.file_path for task in lab.table().scan().plan_files())
    keys = [pair for path in files for pair in _keys(path)]
    assert keys == sorted(keys)


def _keys(path: str) -> list[tuple[int, int]]:
    file = pq.read_table(path.removeprefix("file://"), columns=["k", "id"])
    return list(zip(file["k"].to_pylist(), file["id"].to_pylist(), strict=True))


IMPORT = Family(
    name="import",
    failpoints=(
        "map.after_run",
        "map.after_checkpoint",
        "stage.before_advance",
        "stage.after_advance",
        "merge.after_file",
        "commit.before_publish",
        "commit.after_publish",
    ),
    prepare=_write_csv,
    request=_request_import,
    assert_exact=assert_imported,
    limits={"task_memory": "300KB"},
)

FAMILIES = {family.name: family for family in (EXPORT, IMPORT)}
