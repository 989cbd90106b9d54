"""Changes of single rows that PostgreSQL is sent as one statement: what a verb costs is what it sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import Update
from sqlalchemy.sql.dml import UpdateBase

from lockstep.errors import LockstepError
from lockstep.store.sql_schema import jobs

CHANGES_AT_ONCE: Final = 8
JOB_MOVES, TASK_MOVES, ADDS = range(3)
# `xmin` names the transaction that wrote a row: as long as it is the same, nobody has changed the row.
VERSION: Final = "lockstep_jobs.xmin::text"
_IF_UNMOVED: Final = f" AND {VERSION} = %(v0_version)s"
_IF_TASK_UNMOVED: Final = (
    " AND EXISTS (SELECT 1 FROM lockstep_tasks WHERE lockstep_tasks.job_id = %(c1_b_job_id)s"
    " AND lockstep_tasks.stage = %(c1_b_stage)s AND lockstep_tasks.idx = %(c1_b_idx)s"
    " AND lockstep_tasks.state = %(c1_b_state)s AND lockstep_tasks.epoch = %(c1_b_epoch)s)"
)
_MOMENT: Final = "moment AS (SELECT CAST(EXTRACT(epoch FROM clock_timestamp()) AS DOUBLE PRECISION) AS now)"
_AT: Final = "(SELECT now FROM moment)"
_HELD: Final = (
    "SELECT 1 FROM lockstep_jobs "
    f"WHERE lockstep_jobs.job_id = %(v{{0}}_job_id)s AND {VERSION} = %(v{{0}}_version)s "
    "FOR UPDATE SKIP LOCKED"
)


@dataclass(frozen=True)
class Later:
    """The store's time at which a change will be made, plus so many seconds. It can only be written down."""

    offset_s: float = 0.0

    def __add__(self, seconds: float) -> Later:
        return Later(self.offset_s + seconds)


class Change(NamedTuple):
    statement: UpdateBase
    row: Mapping[str, Any]
    refused: LockstepError

    @property
    def place(self) -> tuple[object, ...]:
        """What it touches. Entries of the history share one place: their order counts."""
        named = (self.row.get(name) for name in ("b_job_id", "b_stage", "b_idx", "seq"))
        return (self.statement.table, *named)

    @property
    def job_id(self) -> str:
        found: str = self.row["b_job_id" if isinstance(self.statement, Update) else "job_id"]
        return found

    def rank(self) -> int:
        """The job's own row comes first, then that of a task, then whatever is added."""
        if not isinstance(self.statement, Update):
            return ADDS
        return JOB_MOVES if self.statement.table is jobs else TASK_MOVES


def grouped(changes: Sequence[Change]) -> list[list[Change]]:
    """Changes that one statement can make: it may touch no row twice, and knows no order."""
    groups: list[list[Change]] = []
    touched: set[tuple[object, ...]] = set()
    for change in changes:
        if not groups or change.place in touched or len(groups[-1]) == CHANGES_AT_ONCE:
            groups.append([])
            touched.clear()
        groups[-1].append(change)
        touched.add(change.place)
    return groups


def numbered(changes: Sequence[Change], versions: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The parameters of changes that are made together, and of the versions that they depend on."""
    known = {
        f"c{number}_{name}": value.offset_s if isinstance(value, Later) else value
        for number, change in enumerate(changes)
        for name, value in change.row.items()
    }
    for number, (job_id, version) in enumerate((versions or {}).items()):
        known[f"v{number}_job_id"] = job_id
        known[f"v{number}_version"] = version
    return known


def later_in(changes: Sequence[Change]) -> frozenset[str]:
    """The parameters, as they are numbered, that are counted from the time of the change."""
    return frozenset(
        f"c{number}_{name}"
        for number, change in enumerate(changes)
        for name, value in change.row.items()
        if isinstance(value, Later)
    )


class Together:
    """Words statements that make several changes, and count for each the rows that it met; each once."""

    def __init__(self, worded: Callable[[UpdateBase], str]) -> None:
        self._worded = worded
        self._known: dict[tuple[object, ...], str] = {}

    def locked(self, changes: Sequence[Change]) -> str:
        """For a transaction that has the job locked."""
        return self._once(
            "locked",
            changes,
            lambda texts: _whole(_parts(texts), [_count(number) for number, _ in texts]),
        )

    def unmoved(self, changes: Sequence[Change], later: frozenset[str] = frozenset()) -> str:
        """For changes that stand alone, of which the first moves the job and the second its task.

        Nothing is changed if the job is not as it was read, and the first count says so; the statement fails
        if another change met no row. After the counts comes the new version of the job.
        `later`: the parameters that are counted from the time of the change, which comes last. Then what was
        read may be old, and a task that is no longer as it was is an answer too.
        """
        condition = "EXISTS (SELECT 1 FROM c0)"

        def made(texts: list[tuple[int, str]]) -> str:
            asked = _IF_UNMOVED + (_IF_TASK_UNMOVED if later else "")
            parts = [f"c0 AS ({texts[0][1]}{asked} RETURNING {VERSION} AS version)"]
            parts += _parts(texts[1:], condition)
            answers = [_count(0)]
            answers += [f"1 / (1 - {_count(0)} + {_count(number)})" for number, _ in texts[1:]]
            answers.append("(SELECT version FROM c0)")
            if not later:
                return _whole(parts, answers)
            whole = _whole([_MOMENT, *parts], [*answers, _AT])
            for name in later:
                whole = whole.replace(f"%({name})s", f"({_AT} + %({name})s)")
            return whole

        return self._once(f"unmoved {sorted(later)}", changes, made)

    def held(self, changes: Sequence[Change], jobs: int) -> str:
        """For changes that stand alone, none of which moves a job: each is made if it meets its row.

        Nothing is changed if one of the jobs is not as it was read, or locked by somebody: nobody waits here
        for several.
        """
        condition = " AND ".join(f"EXISTS (SELECT 1 FROM v{number})" for number in range(jobs))

        def made(texts: list[tuple[int, str]]) -> str:
            parts = [f"v{number} AS ({_HELD.format(number)})" for number in range(jobs)]
            return _whole([*parts, *_parts(texts, condition)], [_count(number) for number, _ in texts])

        return self._once(f"held {jobs}", changes, made)

    def _once(
        self, kind: str, changes: Sequence[Change], made: Callable[[list[tuple[int, str]]], str]
    ) -> str:
        statements = tuple(change.statement for change in changes)
        if (known := self._known.get((kind, *statements))) is None:
            texts = [
                (number, self._worded(statement).replace("%(", f"%(c{number}_"))
                for number, statement in enumerate(statements)
            ]
            known = self._known.setdefault((kind, *statements), made(texts))
        return known


def _parts(texts: Sequence[tuple[int, str]], condition: str | None = None) -> list[str]:
    return [
        f"c{number} AS ({text if condition is None else _only_if(condition, text)} RETURNING 1)"
        for number, text in texts
    ]


def _count(number: int) -> str:
    return f"(SELECT count(*) FROM c{number})"


def _whole(parts: Sequence[str], counts: Sequence[str]) -> str:
    return f"WITH {', '.join(parts)} SELECT {', '.join(counts)}"


def _only_if(condition: str, text: str) -> str:
    if text.startswith("UPDATE"):
        return f"{text} AND {condition}"
    into, _, values = text.partition(" VALUES (")
    return f"{into} SELECT {values.removesuffix(')')} WHERE {condition}"
