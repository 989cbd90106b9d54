"""`lockstep demo`: the main job end to end on embedded defaults, with a crash in the middle and a proof.

Everything that is shown is done by the real command in processes of its own; the proof is read by programs
that share no code with Lockstep: ClickHouse counts the source, DuckDB the published files.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final

import typer

from lockstep.cli.demo_proof import Proof, prove, published
from lockstep.cli.render import Grid, Inline, Span, duration, line, number, plural, size
from lockstep.cli.session import Answer, Session, command
from lockstep.config import load_config
from lockstep.errors import Invalid, LockstepError
from lockstep.runtime import FAILPOINTS_VARIABLE, Clock

ROWS: Final = 4_000_000
LEAST_ROWS: Final = 1_000
MONTHS: Final = ("2024-01", "2024-02", "2024-03", "2024-04")
PARTS: Final = (0.5, 0.3, 0.2)
"""Each month arrives in three inserts, so each partition has three parts."""
FILE_SIZE: Final = "4MB"
"""Small, so that each partition has several files and checkpoints, and the bars move."""
DRILL: Final = "commit.after_publish=kill@1"
SOURCE: Final = "chdb:clickhouse/shop/events"
TARGET: Final = "iceberg://lake/shop.events"
SHOW_CURSOR: Final = "\x1b[?25h"

CREATE: Final = """
CREATE TABLE shop.events (
    id        Int64,
    user_id   UInt32,
    ts        DateTime64(6, 'UTC'),
    country   LowCardinality(String),
    amount    Decimal(18, 2),
    url       String,
    tags      Array(LowCardinality(String)),
    coupon    Nullable(String)
) ENGINE = MergeTree PARTITION BY toYYYYMM(ts) ORDER BY (user_id, ts)
"""
INSERT: Final = """
INSERT INTO shop.events SELECT
    {first} + number AS id,
    toUInt32(cityHash64(id, 1) % 200000) AS user_id,
    toDateTime64('{month}-01 00:00:00', 6, 'UTC')
        + toIntervalMicrosecond(cityHash64(id, 2) % 2419200000000) AS ts,
    ['DE', 'FR', 'US', 'IN', 'BR', 'JP', 'NG', 'SE'][1 + cityHash64(id, 3) % 8] AS country,
    toDecimal64(cityHash64(id, 4) % 25000, 2) / 100 AS amount,
    concat('https://shop.example/', country, '/product/', toString(cityHash64(id, 5) % 50000)) AS url,
    arraySlice(
        ['new', 'sale', 'mobile', 'gift', 'bulk'], 1 + cityHash64(id, 6) % 5, cityHash64(id, 7) % 3
    ) AS tags,
    if(cityHash64(id, 8) % 10 = 0, concat('SAVE', toString(cityHash64(id, 9) % 50)), NULL) AS coupon
FROM numbers({rows})
"""


@command
def demo(
    session: Session,
    folder: Annotated[
        Path | None, typer.Option(help="Work in this empty folder and keep it.", metavar="FOLDER")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep ./lockstep-demo to look around in.")] = False,
    rows: Annotated[int, typer.Option(help="How many rows to export.", min=LEAST_ROWS, metavar="N")] = ROWS,
) -> int:
    """The main job end to end on an embedded ClickHouse, with a crash in the middle."""
    if importlib.util.find_spec("duckdb") is None:
        raise Invalid(
            "the demo proves its work with DuckDB, which is not installed", hint="pip install duckdb"
        )
    kept = folder or (Path("lockstep-demo") if keep else None)
    with _room(kept) as room:
        show = _Show(session, room)
        started = session.clock.now()
        try:
            proof = _play(show, session.clock, rows)
        finally:
            _end_clickhouse(room)
        took = session.clock.now() - started
        session.answer(proof.document(), *_closing(proof, took, kept))
    return 0 if proof.holds else 1


class _Show:
    """Tells what happens, and runs commands in front of the audience."""

    def __init__(self, session: Session, room: Path) -> None:
        self.room = room
        self._session = session
        # With --json the story is beside the answer, like all progress.
        self._say = session.remark if session.json else self._print
        self._chapters = 0

    def _print(self, *parts: Answer) -> None:
        for part in parts:
            self._session.screen.print(part)

    def chapter(self, title: str, *text: str) -> None:
        self._chapters += 1
        self._say("", line(Span(f"{self._chapters}  {title}", "bold cyan")))
        for sentence in text:
            self._say(line(sentence, indent=3))

    def say(self, *spans: Inline) -> None:
        self._say(line(*spans, indent=3))

    def busy(self, doing: str) -> AbstractContextManager[None]:
        return self._session.side.busy(doing)

    def show(self, grid: Grid) -> None:
        self._say(grid)

    def run(self, *arguments: str, drill: str = "") -> int:
        """Run `lockstep …` in the demo's folder, its output where ours is; answers its exit code."""
        typed = " ".join(["lockstep", *map(shlex.quote, arguments)])
        prefix = f"{FAILPOINTS_VARIABLE}={drill} " if drill else ""
        self._say("", line(Span("$ ", "bold green"), Span(prefix, "yellow"), Span(typed, "bold"), indent=3))
        self._session.screen.stream.flush()
        done = subprocess.run(
            [sys.executable, "-m", "lockstep.cli.main", *arguments],
            cwd=self.room,
            env=_environment(drill),
            stdout=sys.stderr if self._session.json else None,
            check=False,
        )
        if done.returncode < 0 and self._session.side.is_terminal:
            sys.stderr.write(SHOW_CURSOR + "\n")  # a killed process leaves its progress bars as they were
            sys.stderr.flush()
        return done.returncode


def _environment(drill: str) -> Mapping[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("LOCKSTEP_FAILPOINTS")}
    clean.pop("LOCKSTEP_CONFIG", None)
    return {**clean, FAILPOINTS_VARIABLE: drill} if drill else clean


def _play(show: _Show, clock: Clock, rows: int) -> Proof:
    config = load_config(_config_file(show.room))
    show.chapter(
        "A table in ClickHouse",
        f"An embedded ClickHouse (chDB) gets {number(rows)} rows of a web shop: {len(MONTHS)} monthly "
        f"partitions of {len(PARTS)} parts each.",
    )
    started = clock.now()
    with show.busy("filling the table"):
        _fill(show.room, rows)
    show.say(f"Filled in {duration(clock.now() - started)}.")
    _expect(show.run("partitions", SOURCE), 0, "partitions")

    show.chapter(
        "Export, and a crash at the worst moment",
        "All partitions go to an Iceberg table on Spark, one job each. A drill kills the driver with SIGKILL",
        "right after the first commit has landed, before anybody could write down that it did.",
    )
    code = show.run("export", SOURCE, TARGET, "--all", "--create", "--file-size", FILE_SIZE, drill=DRILL)
    _expect(code, -signal.SIGKILL, "export")
    show.say(Span("SIGKILL. ", "bold red"), "The driver is gone, and with it everything it had in memory.")
    _expect(show.run("jobs"), 0, "jobs")
    landed = published(config, TARGET)
    ids = ", ".join(map(str, landed))
    show.say(f"The table has {plural(len(landed), 'snapshot')} ({ids}), and no job knows of it:")
    show.say("to publish again would double the rows, to give up would lose them.")

    show.chapter(
        "Any worker finishes the rest",
        "It asks the table for each commit id: what landed is recorded, what did not is published;",
        "tasks go on from their last checkpoint.",
    )
    _expect(show.run("worker", "--once"), 0, "worker")

    show.chapter(
        "The proof",
        "ClickHouse adds up the source; DuckDB adds up the Parquet files that each snapshot lists.",
        "The checksum adds up an MD5 over all columns of each row: order does not matter, content does.",
    )
    with show.busy("adding up both sides"):
        proof = prove(config, clickhouse_of(show.room), TARGET)
    show.show(_sums_grid(proof))
    show.say("One snapshot per partition, each with the fingerprint that its rows had when they were read:")
    show.show(_snapshots_grid(proof))
    return proof


def _expect(code: int, wanted: int, what: str) -> None:
    if code == -signal.SIGINT or code == 130:
        raise KeyboardInterrupt
    if code != wanted:
        raise LockstepError(
            f"`lockstep {what}` ended with {code}, the demo expected {wanted}",
            hint="its messages are above; `lockstep doctor` says what this machine lacks",
        )


@contextmanager
def _room(kept: Path | None) -> Iterator[Path]:
    """An empty folder to work in: a temporary one unless it is to be kept."""
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="lockstep-demo-", ignore_cleanup_errors=True) as name:
            yield Path(name)
        return
    if kept.exists() and (not kept.is_dir() or any(kept.iterdir())):
        raise Invalid(
            f"{kept} is there already and not empty", hint="delete it, or name another one: --folder"
        )
    try:
        kept.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Invalid(f"cannot create {kept}: {error.strerror}") from error
    yield kept.resolve()


def _config_file(room: Path) -> Path:
    """An empty lockstep.toml: all defaults hold, and the folder is the demo's own whatever is around it."""
    path = room / "lockstep.toml"
    path.write_text("# Everything as it is without this file: the store and the lake are in .lockstep/\n")
    return path


def clickhouse_of(room: Path) -> Path:
    return room / "clickhouse"


def _fill(room: Path, rows: int) -> None:
    from lockstep.source.chdb_launch import connect
    from lockstep.source.clickhouse_http import Server

    found = connect(clickhouse_of(room), create=True)
    server = Server(lambda: found)
    try:
        server.run("CREATE DATABASE shop")
        server.run(CREATE)
        server.run("SYSTEM STOP MERGES shop.events")
        first = 0
        for month in MONTHS:
            for share in PARTS:
                count = max(1, int(rows / len(MONTHS) * share))
                server.run(
                    INSERT.format(first=first, month=month, rows=count), {"max_insert_block_size": rows}
                )
                first += count
    finally:
        server.close()


def _end_clickhouse(room: Path) -> None:
    """The server would end by itself a little later; the folder that it serves may be gone by then."""
    from lockstep.source.chdb_launch import Room

    card = Room(clickhouse_of(room).resolve()).read_card()
    if card is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(card.pid, signal.SIGTERM)


def _sums_grid(proof: Proof) -> Grid:
    rows: list[list[Inline]] = []
    for both in proof.partitions:
        mark = Span("✔ the same", "green") if both.same else Span("✘ they differ", "bold red")
        for sums, name in ((both.source, "ClickHouse"), (both.target, "Iceberg, by DuckDB")):
            first = name == "ClickHouse"
            rows.append(
                [
                    Span(both.partition, "bold") if first else "",
                    name,
                    number(sums.rows),
                    f"{sums.cents / 100:,.2f}",
                    sums.span,
                    f"{sums.checksum:016x}",
                    "" if first else mark,
                ]
            )
    return Grid(
        ("|partition", "|counted by", ">rows", ">Σ amount", "|from – to", "|checksum", "|"),
        rows,
        drop=("from – to", "Σ amount"),
    )


def _snapshots_grid(proof: Proof) -> Grid:
    return Grid(
        (">#", "|snapshot", "partition", "|job", ">rows", ">files", ">size", "|fingerprint"),
        [
            [
                str(index),
                str(snapshot.snapshot_id),
                snapshot.partition,
                snapshot.job_id,
                number(snapshot.rows),
                number(snapshot.files),
                size(snapshot.size_bytes),
                Span("✔ as read", "green") if snapshot.intact else Span("✘ differs", "bold red"),
            ]
            for index, snapshot in enumerate(proof.snapshots, start=1)
        ],
        drop=("size", "#", "files", "job"),
    )


def _closing(proof: Proof, took_s: float, kept: Path | None) -> list[Answer]:
    parts: list[Answer] = [""]
    if proof.holds:
        parts.append(
            line(
                Span("✔ Exactly once. ", "bold green"),
                f"{number(proof.rows)} rows, {plural(len(proof.snapshots), 'snapshot')}, one crash: "
                f"no row is missing, none is there twice ({duration(took_s)}).",
            )
        )
    else:
        parts.append(line(Span("✘ The proof failed:", "bold red")))
        parts += [line(f"- {problem}", indent=2) for problem in proof.problems]
    if kept is not None:
        parts.append(line(f"Look around: cd {kept}; lockstep jobs; lockstep show JOB; lockstep history JOB"))
    return parts
