"""The kinds of jobs that the crash matrix drills."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import load_catalog

from tests import players
from tests.crash.drills import ACTIONS, WHOLE, Family
from tests.lab import Lab
from tests.readers import read_with_duckdb


def _request_export(lab: Lab) -> tuple[str, ...]:
    return (
        *("export", lab.source(), "iceberg://lake/db.events", "--all", "--create"),
        *("--file-size", "30KB"),
    )


EXPORT = Family(
    name="export",
    failpoints=dict.fromkeys(
        (
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
        ACTIONS,
    ),
    prepare=lambda lab: lab.make_events(parts=2, rows=4000),
    request=_request_export,
    assert_exact=lambda lab: lab.assert_exact(),
)

ROWS, KEYS = 4000, 3000
"""Of an import: a quarter of the keys comes twice, in one file or in both, and some are in the table."""
IN_TABLE = range(0, KEYS, 25)
Row = tuple[int, int, str]


def _rows() -> list[Row]:
    """In the order of the input, keys first close together and then far apart."""
    return [
        (n * 7 % KEYS if n % 8 else (n - 1) * 7 % KEYS, n * 7919 % 1000, f"name {n}") for n in range(ROWS)
    ]


def _old_row(key: int) -> Row:
    return key, -1, "old"


def prepare_import(lab: Lab, name: str = "db.events") -> None:
    """Two files, the same ones for all tables of a lab, and a table that has some of their keys already."""
    rows, folder = _rows(), lab.folder / "in"
    for file, part in (("a.csv", rows[: ROWS // 2]), ("b.csv", rows[ROWS // 2 :])):
        if not (folder / file).exists():
            folder.mkdir(exist_ok=True)
            lines = (f"{id_},{k},{text}\n" for id_, k, text in part)
            (folder / file).write_text("id,k,name\n" + "".join(lines))
    lab.config.state_folder.mkdir(exist_ok=True)
    catalog = load_catalog("lake", **lab.config.catalogs["lake"])
    catalog.create_namespace_if_not_exists(name.partition(".")[0])
    old = [_old_row(key) for key in IN_TABLE]
    columns = {column: [row[at] for row in old] for at, column in enumerate(("id", "k", "name"))}
    there = pa.table(columns)
    catalog.create_table(name, schema=there.schema).append(there)


def request_import(lab: Lab, name: str = "db.events") -> tuple[str, ...]:
    return (
        *("import", str(lab.folder / "in"), f"iceberg://lake/{name}", "--sort-by", "k,id", "--unique", "id"),
        *("--on-duplicate", "keep-first", "--file-size", "40KB"),
    )


def new_rows() -> list[Row]:
    """What is published: of each key that the table does not have the first row, in order."""
    first: dict[int, Row] = {}
    for row in _rows():
        first.setdefault(row[0], row)
    return sorted(
        (row for key, row in first.items() if key not in IN_TABLE), key=lambda row: (row[1], row[0])
    )


def assert_imported(lab: Lab, name: str = "db.events") -> None:
    """Every key once, rows of the table as they were, the new ones in order from file to file."""
    expected, table = new_rows(), lab.table(name)
    read = read_with_duckdb(table.metadata_location).select(["id", "k", "name"]).to_pylist()
    there = sorted(tuple(row.values()) for row in read)
    assert there == sorted([*expected, *map(_old_row, IN_TABLE)])
    files = sorted(task.file.file_path for task in table.scan().plan_files())
    ours = [pq.read_table(path.removeprefix("file://")) for path in files if "lockstep-" in path]
    assert [tuple(row.values()) for file in ours for row in file.to_pylist()] == expected


KILL = ("kill",)
IMPORT = Family(
    name="import",
    failpoints={
        "map.after_run": (*ACTIONS, WHOLE),
        "map.after_checkpoint": ACTIONS,
        "stage.before_advance": ACTIONS,
        "stage.after_advance": ACTIONS,
        "combine.after_run": (*ACTIONS, WHOLE),
        "unique.after_file": (*ACTIONS, WHOLE),
        "merge.after_file": (*ACTIONS, WHOLE),
        "commit.after_intent": KILL,
        "commit.before_publish": KILL,
        "commit.after_publish": KILL,
        "commit.reply_lost": KILL,
        "commit.before_record": KILL,
    },
    prepare=prepare_import,
    request=request_import,
    assert_exact=assert_imported,
    limits={"task_memory": "100KB"},
    visits={
        # To combine, unique and merge.
        "stage.before_advance": 3,
        "stage.after_advance": 3,
        # With two tasks at a time, one of them has been there before: it goes on from a checkpoint.
        "map.after_run": 3,
        "combine.after_run": 3,
        "unique.after_file": 3,
    },
    command=players.command_in_small_steps,
    work=players.work_in_small_steps,
)

FAMILIES = {family.name: family for family in (EXPORT, IMPORT)}
