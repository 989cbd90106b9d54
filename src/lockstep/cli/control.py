"""Changing a job from outside: kill, pause, resume, retry. None of them starts Spark."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from lockstep.cli.jobs import JobArgument, parse_states
from lockstep.cli.render import Line, Span, line
from lockstep.cli.session import Session, command
from lockstep.errors import Invalid, LockstepError
from lockstep.job import Event, Job, State
from lockstep.view import job_document

ANSWER_S: Final = 4.0


@command
def kill(
    session: Session,
    job: Annotated[
        list[str] | None, typer.Argument(metavar="JOB...", help="Job ids, or the beginnings of them.")
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option(help="Kill all jobs like this: state=running.", metavar="FIELD=VALUE")
    ] = None,
) -> int:
    """Kill jobs: nothing of them is published, now or later. A commit that has landed stays."""
    chosen = _chosen(session, job or [], where or [])
    killed = [_kill(session, each) for each in chosen]
    lines = [_kill_answer(each) for each in killed] or [
        line("no live job is like that; a failed one is given up by its id: lockstep kill JOB")
    ]
    session.answer({"jobs": [job_document(each) for each in killed]}, *lines)
    return 1 if any(each.state in (State.COMPLETED, State.FAILED) for each in killed) else 0


@command
def pause(session: Session, job: JobArgument) -> int:
    """Pause a job: its tasks stop at their next checkpoint and keep what they have."""
    paused = session.store.pause(session.job(job).job_id)
    session.answer(
        job_document(paused),
        line(f"job {paused.job_id} is paused; lockstep resume {paused.job_id} lets it go on"),
    )
    return 0


@command
def resume(session: Session, job: JobArgument) -> int:
    """Let a paused job go on from where it is."""
    resumed = session.store.resume(session.job(job).job_id)
    session.answer(job_document(resumed), *_waits_for_a_worker(resumed))
    return 0


@command
def retry(session: Session, job: JobArgument) -> int:
    """Let a failed job try again; what it has finished stays finished."""
    retried = session.store.retry(session.job(job).job_id)
    session.answer(job_document(retried), *_waits_for_a_worker(retried))
    return 0


def _waits_for_a_worker(job: Job) -> list[Line]:
    if job.state is not State.PENDING:
        return [line(f"job {job.job_id} is {job.state.value}")]
    return [line(f"job {job.job_id} waits for a worker: lockstep worker --once")]


def _chosen(session: Session, prefixes: Sequence[str], conditions: Sequence[str]) -> list[Job]:
    """The jobs that are meant, each once; all of them are found before the first is touched.

    Raises: Invalid, or NoSuchJob.
    """
    if bool(prefixes) == bool(conditions):
        raise Invalid(
            "say which jobs: their ids, or --where state=running", hint="`lockstep jobs` lists them"
        )
    if prefixes:
        return list({found.job_id: found for found in map(session.job, prefixes)}.values())
    states: set[State] | None = None
    wanted: dict[str, str] = {}
    for condition in conditions:
        name, _, value = condition.partition("=")
        if name == "state":
            states = parse_states([value])
        elif name in ("partition", "source", "target", "kind"):
            wanted[name] = value
        else:
            raise Invalid(
                f'--where "{condition}" is not understood',
                hint="FIELD=VALUE, with state, partition, source, target or kind",
            )
    candidates = session.store.list(states)
    live = [each for each in candidates if each.state.live]
    return [each for each in live if all(str(job_document(each)[k]) == v for k, v in wanted.items())]


def _kill(session: Session, job: Job) -> Job:
    """Ask for the kill, and where a commit is under way wait a moment for its answer."""
    job = session.store.stop(job.job_id, Event.KILL)
    if job.state is not State.COMMITTING:
        return job
    # Beside us: a catalog that hangs must not keep the person waiting.
    fencing = threading.Thread(target=_fence, args=(session, job.job_id), daemon=True)
    fencing.start()
    fencing.join(ANSWER_S)
    return session.store.read(job.job_id)


def _fence(session: Session, job_id: str) -> None:
    from lockstep.commit import kill as kill_job

    def warn(error: LockstepError) -> None:
        session.remark(line(Span("warning: ", "yellow"), f"cannot fence the commit yet: {error.message}"))

    kill_job(session.store, job_id, session.config, session.clock, ANSWER_S, warn)


def _kill_answer(job: Job) -> Line:
    match job.state:
        case State.KILLED:
            return line(
                Span("■ ", "yellow"), f"job {job.job_id} is killed; nothing of it was or will be published"
            )
        case State.COMPLETED:
            return line(
                Span("too late: ", "bold"), f"job {job.job_id} was published as snapshot {job.snapshot_id}"
            )
        case State.FAILED:
            return line(
                Span("too late: ", "bold"), f"job {job.job_id} had failed already; nothing was published"
            )
        case _:
            return line(
                f"job {job.job_id}: the kill is noted, but its committer has not answered within "
                f"{ANSWER_S:g} s: lockstep watch {job.job_id}"
            )
