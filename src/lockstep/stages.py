"""From one stage of an import to the next: what the finished one means, and the tasks that follow.

Any worker may do it, at any time, again after a crash: the tasks follow from the manifests alone, and the
store takes the step once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from lockstep.config import Config
from lockstep.errors import Invalid, LockstepError
from lockstep.job import KEYS, RUN, Event, Job, StagedFile, State
from lockstep.review import review
from lockstep.runtime import SYSTEM_CLOCK, Clock, failpoint
from lockstep.secrets import expand
from lockstep.store import JobStore

if TYPE_CHECKING:
    from lockstep.unique import Published

_LOG: Final = logging.getLogger(__name__)


def stage_is_over(job: Job) -> bool:
    """True when every task of a stage is done that is not the last one."""
    return (
        job.state in (State.PENDING, State.RUNNING)
        and job.stage != job.plan.stages[-1]
        and job.tasks_done == job.tasks_total
    )


def advance(job: Job, store: JobStore, config: Config, clock: Clock = SYSTEM_CLOCK) -> Job:
    """Take a job whose stage is over to its next stage, or fail it for what the stage has found.

    Raises: Fenced if the job is elsewhere by now; Retryable.
    """
    from lockstep.passes import newest_runs, next_stage

    failpoint("stage.before_advance")
    if (problem := review(job, store, config)) is not None:
        return store.stop(job.job_id, Event.FAIL, problem)
    manifests = _manifests(job, store)
    in_use = newest_runs(manifests)
    follower = next_stage(job.stage, in_use, job.plan, lambda: _published(job, config, clock))
    moved = store.advance(job.job_id, job.stage, follower.stage, follower.tasks)
    failpoint("stage.after_advance")
    _discard(_used_up(manifests, in_use), job, config)
    return moved


def _published(job: Job, config: Config, clock: Clock) -> Published:
    """The rows of the table that new ones must not repeat.

    Raises: Invalid if it is not the table of the plan any more.
    """
    from lockstep.target import open_target
    from lockstep.unique import published

    head = open_target(expand(job.plan.target, config), config, clock).load()
    if head.uuid != job.plan.target_uuid:
        raise Invalid(f"{job.plan.target} was replaced by another table", hint="import into the new one")
    return published(head.handle, job.plan)


def _manifests(job: Job, store: JobStore) -> dict[str, list[StagedFile]]:
    """What the stages up to this one have staged."""
    passed = job.plan.stages[: job.plan.stages.index(job.stage) + 1]
    return {stage: list(store.manifest(job.job_id, stage)) for stage in passed}


def _used_up(
    manifests: Mapping[str, Sequence[StagedFile]], in_use: Sequence[StagedFile]
) -> Iterator[StagedFile]:
    """Runs that were combined into longer ones: those are durable now, and nobody reads the short ones."""
    kept = {file.path for file in in_use}
    for files in manifests.values():
        yield from (file for file in files if file.kind in (RUN, KEYS) and file.path not in kept)


def _discard(files: Iterable[StagedFile], job: Job, config: Config) -> None:
    """Best effort: what stays is deleted when the job has ended."""
    from lockstep.storage import Storage
    from lockstep.storage.options import options_of

    storage = Storage(options_of(job.plan, config))
    try:
        for file in files:
            storage.delete(file.path)
    except LockstepError:
        _LOG.info("runs that were merged are still there", exc_info=True)


def release_runs(store: JobStore, job: Job, config: Config) -> None:
    """Delete what an ended import has staged and not published. What fails is tried again later."""
    from lockstep.sink.staging import parse_staged_name, runs_folder
    from lockstep.storage import Storage
    from lockstep.storage.options import options_of

    failpoint("unpin.before")
    storage = Storage(options_of(job.plan, config))
    try:
        for file in list(storage.list(runs_folder(job.plan, job.job_id) + "/")):
            parsed = parse_staged_name(file.url)
            if parsed is not None and parsed[0] == job.job_id:
                storage.delete(file.url)
        _remove_folder(runs_folder(job.plan, job.job_id))
    except LockstepError:
        _LOG.info("the runs of job %s are still there", job.job_id, exc_info=True)
        return
    store.released(job.job_id)


def _remove_folder(url: str) -> None:
    """Object stores have no folders; on disk an empty one would be left."""
    from lockstep.storage import local_path

    path = local_path(url)
    if path is None:
        return
    for folder in (path, path.parent):
        with contextlib.suppress(OSError):  # not empty: an attempt that was stopped late, or another job
            folder.rmdir()
