"""`lockstep worker`: run whatever the store holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from lockstep.cli.export import closing_grid, exit_code
from lockstep.cli.jobs import closing
from lockstep.cli.render import line, plural
from lockstep.cli.running import LIVE, Interrupted, work
from lockstep.cli.session import INTERRUPTED, Answer, Session, command
from lockstep.job import Job, State
from lockstep.view import job_document


@command
def worker(
    session: Session,
    once: Annotated[bool, typer.Option("--once", help="Until nothing is left to do.")] = False,
) -> int:
    """Work on the jobs of the store: claim, run on Spark, commit."""
    session.check_config()
    found = session.store.list(LIVE)
    ids = [job.job_id for job in reversed(found)]
    session.remark(line(_to_do(found) + ("; working until none is left" if once else "; Ctrl-C to stop")))
    try:
        work(session, "idle" if once else "forever")
    except Interrupted:
        jobs = [session.store.read(job_id) for job_id in ids]
        session.answer({"jobs": [job_document(job) for job in jobs]})
        session.remark(line("stopped; the jobs are kept, and any worker goes on: lockstep worker"))
        return INTERRUPTED
    jobs = [session.store.read(job_id) for job_id in ids]
    parts: list[Answer] = [closing_grid(jobs)] if jobs else [line("nothing is left to do")]
    for job in jobs:
        if job.state is not State.COMPLETED:
            parts += closing(job)
    session.answer({"jobs": [job_document(job) for job in jobs]}, *parts)
    # A paused job was not this worker's to finish.
    return exit_code([job for job in jobs if job.state is not State.PAUSED])


def _to_do(jobs: Sequence[Job]) -> str:
    paused = sum(1 for job in jobs if job.state is State.PAUSED)
    waiting = len(jobs) - paused
    said = f"{plural(waiting, 'job')} to work on" if waiting else "no job to work on"
    return said + (f", {paused} paused" if paused else "")
