"""Which jobs of a SQL store have tasks that can be claimed, and in which order they come."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    CompoundSelect,
    Double,
    Row,
    Select,
    Text,
    any_,
    bindparam,
    cast,
    distinct,
    extract,
    func,
    literal_column,
    select,
    true,
    union_all,
)

from lockstep.job import PLAN_FORMAT
from lockstep.store.sql_changes import VERSION
from lockstep.store.sql_database import TIME, Offer, shape_of
from lockstep.store.sql_records import IS_LEASED, IS_RETRYING, IS_RUNNABLE
from lockstep.store.sql_schema import jobs, tasks

_of_job: Final = (tasks.c.job_id == jobs.c.job_id) & (tasks.c.stage == jobs.c.stage)
# Not EXISTS, which a database may answer by walking through all tasks of the job that are done: in this order
# the first entry of the index of open tasks, or of leased ones, is the answer.
_next_free_at: Final = (
    select(tasks.c.free_at)
    .where(_of_job, tasks.c.free_at.is_not(None))
    .order_by(tasks.c.free_at, tasks.c.idx)
    .limit(literal_column("1"))
    .scalar_subquery()
)
_leased_until: Final = func.coalesce(
    select(tasks.c.free_at)
    .where(IS_LEASED, tasks.c.job_id == jobs.c.job_id)
    .order_by(tasks.c.free_at.desc())
    .limit(literal_column("1"))
    .scalar_subquery(),
    literal_column("0"),
)
GHOSTS: Final = select(jobs.c.job_id).where(
    IS_RUNNABLE, jobs.c.tasks_done < jobs.c.tasks_total, _next_free_at.is_(None)
)
"""Jobs whose open tasks are no longer in the store."""


def candidates(
    now: ColumnElement[float],
    *only: ColumnElement[bool],
    columns: Sequence[ColumnElement[Any]] = (jobs.c.job_id, jobs.c.created_at),
) -> CompoundSelect[Any]:
    """Jobs with a free task: of those without any lease up to `slots`, the oldest, and all others."""
    able = select(*columns).where(IS_RUNNABLE, jobs.c.plan_format <= PLAN_FORMAT, _next_free_at <= now, *only)
    idle = able.where(_leased_until <= now).order_by(jobs.c.created_at, jobs.c.job_id)
    return union_all(select(idle.limit(bindparam("slots")).subquery()), able.where(_leased_until > now))


def in_turns(
    turns: Iterable[tuple[int, float, str]], slots: int, free: Callable[[str, int], Iterator[Row[Any]]]
) -> dict[str, list[Row[Any]]]:
    """Up to `slots` tasks by job: the job with the fewest leases comes first, then the oldest.

    `turns` are leases, age and id of each job; `free` answers its free tasks, at most so many.
    """
    queue = list(turns)
    heapq.heapify(queue)
    offered: dict[str, Iterator[Row[Any]]] = {}
    taken: dict[str, list[Row[Any]]] = {}
    left = slots
    while queue and left:
        count, created_at, job_id = heapq.heappop(queue)
        if job_id not in offered:
            offered[job_id] = free(job_id, left)
        if (task := next(offered[job_id], None)) is not None:
            taken.setdefault(job_id, []).append(task)
            left -= 1
            heapq.heappush(queue, (count + 1, created_at, job_id))
    return taken


_ABOUT_A_JOB: Final = (TIME, "version", "leases", "owners", "retrying")
_WIDTH: Final = len(jobs.c)
JOB_SHAPE: Final = shape_of(jobs.c.keys())
TASK_SHAPE: Final = shape_of(tasks.c.keys())


def _offers(*only: ColumnElement[bool]) -> Select[Any]:
    """All that an everyday claim has to know, as of one instant; for a database with a clock.

    A row for each free task, those of a job together. No claim takes tasks from more jobs than it has slots,
    nor from others than the first ones in the order of `in_turns`.
    """
    # Read once for the whole statement: a clock that is asked for every row fits no index.
    moment = select(cast(extract("epoch", func.clock_timestamp()), Double).label("now")).cte("moment")
    now = select(moment.c.now).correlate(None).scalar_subquery()
    version: ColumnElement[str] = literal_column(VERSION).label("version")
    able = candidates(now, *only, columns=(*jobs.c, now.label(TIME), version)).subquery()
    active = (
        select(func.count().label("leases"), func.array_agg(distinct(tasks.c.owner)).label("owners"))
        .where(IS_LEASED, tasks.c.job_id == able.c.job_id, tasks.c.free_at > now)
        .lateral()
    )
    first = (
        select(able, active)
        .select_from(able.join(active, true()))
        .order_by(active.c.leases, able.c.created_at, able.c.job_id)
        .limit(bindparam("slots"))
        .subquery()
    )
    retrying = (
        select(func.count().label("retrying")).where(IS_RETRYING, tasks.c.job_id == first.c.job_id).lateral()
    )
    free = (
        select(tasks)
        .where(tasks.c.job_id == first.c.job_id, tasks.c.stage == first.c.stage, tasks.c.free_at <= now)
        .order_by(tasks.c.free_at, tasks.c.idx)
        .limit(bindparam("slots"))
        .lateral()
    )
    return (
        select(first, retrying, free)
        .select_from(first.join(retrying, true()).join(free, true()))
        .order_by(first.c.leases, first.c.created_at, first.c.job_id, free.c.free_at, free.c.idx)
    )


def offered(rows: Sequence[Sequence[Any]]) -> Iterator[tuple[Offer, float, str]]:
    """The jobs of rows of OFFERS, each with the store's time and with its version."""
    free: dict[str, list[Row[Any]]] = {}
    first: dict[str, Sequence[Any]] = {}
    for row in rows:
        first.setdefault(row[0], row)
        free.setdefault(row[0], []).append(TASK_SHAPE(row[_WIDTH + len(_ABOUT_A_JOB) :]))
    for job_id, row in first.items():
        now, version, leases, owners, retrying = row[_WIDTH : _WIDTH + len(_ABOUT_A_JOB)]
        job = JOB_SHAPE(row[:_WIDTH])
        yield Offer(job, leases, frozenset(owners or ()), retrying, free[job_id]), now, version


OFFERS: Final = _offers()
OFFERS_OF: Final = _offers(jobs.c.job_id == any_(bindparam("wanted", type_=ARRAY(Text))))
