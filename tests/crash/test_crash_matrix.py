"""Every failpoint × every kind of store × {kill, error, asleep beyond the lease}, with real processes.

All cells of a run are played at the same time, a few at once, because most of them wait for a lease. Tasks
run in forked processes in Spark's place; test_export_crashes.py has the drills inside Spark.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

import lockstep
from lockstep.job import Fingerprint
from lockstep.runtime import FAILPOINTS
from tests.crash.drills import ACTIONS, LEASE_S, Cell, Drill, Family, Result, undisturbed
from tests.crash.families import FAMILIES
from tests.lab import Lab
from tests.zygote import Zygote

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "guarantees.md"
BEGIN, END = "<!-- crash matrix: written by `make matrix` -->", "<!-- end of the crash matrix -->"
WRITE_VARIABLE = "LOCKSTEP_WRITE_MATRIX"
STORES = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "zookeeper": "ZooKeeper"}
AT_ONCE = 6

CELLS = [
    Cell(family.name, failpoint, action, store)
    for family in FAMILIES.values()
    for failpoint, actions in family.failpoints.items()
    for action in actions
    for store in STORES
]


class Matrix:
    """Plays the cells that are asked for, and keeps what became of them.

    Before any of them, a job of each family that nothing disturbs.
    """

    def __init__(
        self, labs: Callable[[Family, str, str, float], AbstractContextManager[Lab]], zygote: Zygote
    ) -> None:
        self._labs, self._zygote = labs, zygote
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="drill")
        self._expected: dict[str, Future[Fingerprint]] = {}
        self._results: dict[Cell, Future[Result]] = {}

    def start(self, cells: list[Cell]) -> None:
        for name in {cell.family: None for cell in cells}:
            self._expected[name] = self._pool.submit(self._undisturbed, FAMILIES[name])
        self._results = {cell: self._pool.submit(self._play, cell) for cell in cells}

    def _undisturbed(self, family: Family) -> Fingerprint:
        with self._labs(family, "sqlite", f"undisturbed-{family.name}", LEASE_S) as lab:
            return undisturbed(family, lab, self._zygote)

    def _play(self, cell: Cell) -> Result:
        family = FAMILIES[cell.family]
        name = re.sub("[^a-z]+", "-", cell.name)
        with self._labs(family, cell.store, name, cell.lease_s) as lab:
            return Drill(family, cell, lab, self._zygote, self._expected[cell.family].result).run()

    def result(self, cell: Cell) -> Result:
        return self._results[cell].result()

    def passed(self) -> dict[Cell, Result]:
        """Waits for all that were started."""
        wait(self._results.values())
        return {cell: each.result() for cell, each in self._results.items() if each.exception() is None}

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def matrix(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    chdb_folder: Path,
    zygote: Zygote,
    empty_stores: Callable[[str, str], str | None],
) -> Iterator[Matrix]:
    root = tmp_path_factory.mktemp("matrix")

    @contextmanager
    def new_lab(family: Family, store: str, name: str, lease_s: float) -> Iterator[Lab]:
        folder = root / name
        folder.mkdir()
        limits = {"lease_s": lease_s, **family.limits}
        lab = Lab(folder, chdb_folder, empty_stores(store, name), limits=limits)
        try:
            yield lab
        finally:
            lab.close()

    matrix = Matrix(new_lab, zygote)
    chosen = [getattr(item, "callspec", None) for item in request.session.items]
    matrix.start([spec.params["cell"] for spec in chosen if spec is not None and "cell" in spec.params])
    yield matrix
    matrix.close()


@pytest.mark.servers
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_whatever_happens_at_a_failpoint_the_job_is_exact_or_nothing_is_published(
    matrix: Matrix, cell: Cell
) -> None:
    result = matrix.result(cell)
    print(result.figures)
    assert result.ending in ("exact", "nothing published")


def test_every_failpoint_in_the_code_has_its_drills() -> None:
    code = Path(lockstep.__file__).parent
    reached = {
        name
        for path in code.rglob("*.py")
        for name in re.findall(r'failpoint\(\s*f?"([^"]+)"', path.read_text())
    }
    drilled = {failpoint for family in FAMILIES.values() for failpoint in family.failpoints}
    assert reached == drilled
    assert reached <= FAILPOINTS
    assert {(cell.failpoint, cell.action, cell.store) for cell in CELLS} >= {
        (failpoint, action, store) for failpoint in reached for action in ACTIONS for store in STORES
    }


@pytest.mark.servers
def test_the_table_in_the_guarantees_is_what_the_run_has_shown(matrix: Matrix) -> None:
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    passed = matrix.passed()
    if os.environ.get(WRITE_VARIABLE):
        table = _written(passed)
        DOCUMENT.write_text(f"{before}{BEGIN}\n{table}{END}{after}")
    stated = _read(table)
    assert {cell: stated.get(cell) for cell in passed} == passed, "`make matrix` writes the table anew"
    assert stated.keys() == {*CELLS}, "a cell of the table is not drilled, or the other way round"


def _written(results: Mapping[Cell, Result]) -> str:
    head = ["failpoint", "action", "what happens", *STORES.values()]
    lines = [head, ["---"] * len(head)]
    rows = dict.fromkeys((cell.family, cell.failpoint, cell.action) for cell in CELLS)
    for family, failpoint, action in rows:
        found = {store: results.get(Cell(family, failpoint, action, store)) for store in STORES}
        story = next((result.story for result in found.values() if result), "")
        endings = [result.ending if result else "" for result in found.values()]
        lines.append([f"{family}: `{failpoint}`", action, story, *endings])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _read(table: str) -> dict[Cell, Result]:
    """What a table says, by cell."""
    found = {}
    for line in table.strip().splitlines()[2:]:
        name, action, story, *endings = (word.strip() for word in line.strip("|").split("|"))
        family, _, failpoint = name.replace("`", "").partition(": ")
        for store, ending in zip(STORES, endings, strict=True):
            if ending:
                found[Cell(family, failpoint, action, store)] = Result(story, ending)
    return found
