"""The commit: publish a job's files as one snapshot, exactly once, or prove that it never will be.

The register in the target decides, not this process: every doubt ends with reading it. The lease on the
commit only keeps two workers from doing the same work.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from lockstep.config import Config
from lockstep.errors import Corrupt, ErrorInfo, Fenced, Incompatible, Invalid, LockstepError, Retryable
from lockstep.job import DATA, CommitLease, Event, Job, Kind, StagedFile, commit_id
from lockstep.review import review
from lockstep.runtime import SYSTEM_CLOCK, Clock, backoff_s, failpoint, worker_name
from lockstep.secrets import expand
from lockstep.store import CommitClaim, JobStore
from lockstep.target import Outcome, Target, TargetTable, open_target

GIVE_UP_PAUSE_S: Final = 30.0
SETTLE_PATIENCE_S: Final = 5.0
KILL_POLL_S: Final = 0.1

Objection = Callable[[Job, TargetTable], ErrorInfo | None]
"""Why a job must not be published on top of this head, or None."""


@dataclass(frozen=True)
class Ending:
    """How a job is to end without being published."""

    event: Event
    error: ErrorInfo | None


def commit(
    claim: CommitClaim,
    store: JobStore,
    target: Target,
    clock: Clock = SYSTEM_CLOCK,
    patience_s: float = math.inf,
    objection: Objection = lambda job, head: None,
) -> Job:
    """Bring a committing job to its end; whoever holds the lease may call this, any number of times.

    Comes back with a job that is still `committing` only when the target could not be asked about a
    request that may have landed: then nobody can know, and the commit is handed on to be tried later. A
    caller who cannot wait for the whole budget hands it on after `patience_s`. `objection` has the last word
    on what is to be published.
    Raises: Fenced if another worker has taken the commit over.
    """
    failpoint("commit.after_intent")
    failures = 0
    impatient_at = clock.now() + patience_s
    with _kept(store, claim, clock) as kept:
        while True:
            job = store.renew_commit(claim.lease, claim.job.plan.limits.lease_s)
            if job.kill_requested and job.commit_attempts == 0:
                # Nothing was sent, and nothing can be any more: a catalog that is away is not waited for.
                return store.end(claim.lease, Event.KILL)
            last_round = _out_of_budget(job, clock) is not None
            try:
                ended = _step(job, claim.lease, store, target, clock, last_round, objection)
                if ended is not None:
                    return ended
            except Fenced:
                raise
            except Exception as error:  # unknown until the register says otherwise, whatever its class
                failures += 1
                ended = _after_failure(claim.lease, store, last_round, error)
                if ended is not None:
                    return ended
                shown = replace(ErrorInfo.of(error), at=clock.now())
                store.renew_commit(claim.lease, job.plan.limits.lease_s, error=shown)
                if last_round or clock.now() >= impatient_at:
                    # A request may be out there, and the target cannot be asked: neither completed nor
                    # failed would be true.
                    store.yield_commit(claim.lease, GIVE_UP_PAUSE_S)
                    return store.read(job.job_id)
                kept.check()
                clock.sleep(backoff_s(failures, first_s=0.2, most_s=15.0))


def _step(
    job: Job,
    lease: CommitLease,
    store: JobStore,
    target: Target,
    clock: Clock,
    last_round: bool,
    objection: Objection,
) -> Job | None:
    """One round of the loop: read the register, then do the one thing that it calls for."""
    # A table that is away for a moment, or hidden from us, proves nothing about a request that was sent.
    may_end = job.commit_attempts == 0 or last_round
    try:
        head = target.load()
    except (Invalid, Incompatible) as error:
        if may_end and not (job.commit_attempts > 0 and target.exists()):
            return store.end(lease, Event.FAIL, error=ErrorInfo.of(error))
        raise
    if head.uuid != job.plan.target_uuid:
        if may_end:
            return store.end(lease, Event.FAIL, error=ErrorInfo.of(_replaced(job, head)))
        raise _replaced(job, head)
    outcome, snapshot_id = _outcome(job, head, target)
    if outcome is Outcome.COMMITTED:
        failpoint("commit.before_record")
        return store.end(lease, Event.COMMITTED, snapshot_id=snapshot_id)
    if outcome is Outcome.FENCED:
        event = Event.KILL if job.kill_requested else Event.FAIL
        return store.end(lease, event, error=ErrorInfo.of(_fenced_elsewhere(job)))
    ending, files = _reason_not_to_publish(job, head, store, target, clock, objection)
    if ending is None:
        ending = _publish(job, lease, head, files, store, target)
    return None if ending is None else _end_unpublished(job, lease, head, ending, store, target)


def _outcome(job: Job, head: TargetTable, target: Target) -> tuple[Outcome, int | None]:
    """The register, of earlier generations first: one of them may have landed after all, and rows that are
    there must not be published again."""
    for generation in range(1, job.generation):
        earlier = target.outcome(head, commit_id(job.job_id, generation))
        if earlier[0] is Outcome.COMMITTED:
            return earlier
    return target.outcome(head, job.commit_id)


def _publish(
    job: Job, lease: CommitLease, head: TargetTable, files: list[StagedFile], store: JobStore, target: Target
) -> Ending | None:
    """Send the commit. None: sent, only the register knows more. An ending: refused before it was sent."""
    try:
        prepared = target.prepare(head, job.plan, job.commit_id, job.job_id, files)
    except (Invalid, Corrupt) as error:
        return Ending(Event.FAIL, ErrorInfo.of(error))
    # Noted after all that can refuse, and durable before the first byte of the request leaves: what was not
    # noted was never sent, so it may end without the target's word and its files may be swept.
    store.renew_commit(lease, job.plan.limits.lease_s, attempted=True)
    target.publish(head, prepared)
    return None


def _end_unpublished(
    job: Job, lease: CommitLease, head: TargetTable, ending: Ending, store: JobStore, target: Target
) -> Job | None:
    """End the job with nothing published: fence first if a request may be on its way.

    None: the register has to be read again, because the commit may have been faster than the fence.
    """
    if job.commit_attempts > 0:
        target.fence(head, job.commit_id)
        if target.outcome(target.load(), job.commit_id)[0] is not Outcome.FENCED:
            return None
    return store.end(lease, ending.event, error=ending.error)


def _reason_not_to_publish(
    job: Job,
    head: TargetTable,
    store: JobStore,
    target: Target,
    clock: Clock,
    objection: Objection,
) -> tuple[Ending | None, list[StagedFile]]:
    if job.kill_requested:
        return Ending(Event.KILL, None), []
    if out := _out_of_budget(job, clock):
        return Ending(Event.FAIL, out), []
    if differences := target.drift(head, job.plan):
        return Ending(Event.FAIL, ErrorInfo.of(_drifted(job, differences))), []
    if problem := objection(job, head):
        return Ending(Event.FAIL, problem), []
    files = [file for file in store.manifest(job.job_id, job.plan.stages[-1]) if file.kind == DATA]
    if job.plan.rows is not None and (rows := sum(file.rows for file in files)) != job.plan.rows:
        return Ending(Event.FAIL, ErrorInfo.of(_miscounted(job, rows))), []
    if gone := target.missing(files):
        return Ending(Event.FAIL, ErrorInfo.of(_files_missing(job, gone))), []
    return None, files


def _after_failure(lease: CommitLease, store: JobStore, last_round: bool, error: Exception) -> Job | None:
    """End the job after a round that broke, where that is certain to be true; else None.

    The round after the budget ran out is the last: it reads the register, and fences it.
    """
    job = store.read(lease.job_id)
    if job.commit_attempts == 0:
        if job.kill_requested:
            return store.end(lease, Event.KILL, error=ErrorInfo.of(error))
        if isinstance(error, Corrupt | Incompatible):
            return store.end(lease, Event.FAIL, error=ErrorInfo.of(error))
        if last_round:
            return store.end(lease, Event.FAIL, error=_budget_error(job, error))
    return None


def _out_of_budget(job: Job, clock: Clock) -> ErrorInfo | None:
    limits = job.plan.limits
    started = job.commit_started_at
    if job.commit_attempts >= limits.commit_attempts:
        return _budget_error(job, None)
    if started is not None and clock.now() - started > limits.commit_deadline_s:
        return _budget_error(job, None)
    return None


def _budget_error(job: Job, last: Exception | None) -> ErrorInfo:
    limits = job.plan.limits
    reason = f"; the last error: {last}" if last else ""
    return ErrorInfo(
        "Retryable",
        f"the commit to {job.plan.target} did not go through within {limits.commit_attempts} attempts and "
        f"{limits.commit_deadline_s:g} s{reason}",
        "nothing was published and the written files are kept: `lockstep retry` tries the commit again",
    )


def _again(job: Job) -> str:
    return "import the files again" if job.kind is Kind.IMPORT else "export the partition again"


def _replaced(job: Job, head: TargetTable) -> LockstepError:
    return Invalid(
        f"{job.plan.target} was replaced: its table UUID is {head.uuid}, the job was planned for "
        f"{job.plan.target_uuid}",
        hint=f"nothing was published; {_again(job)} for the new table",
    )


def _drifted(job: Job, differences: list[str]) -> LockstepError:
    return Invalid(
        f"{job.plan.target} has changed since the job was planned: " + "; ".join(differences),
        hint=f"nothing was published; {_again(job)} to plan it for the table as it is now",
    )


def _files_missing(job: Job, gone: list[str]) -> LockstepError:
    more = f" and {len(gone) - 3} more" if len(gone) > 3 else ""
    return Corrupt(
        "staged files are not as they were written: " + "; ".join(gone[:3]) + more,
        hint=f"nothing was published; {_again(job)}",
    )


def _miscounted(job: Job, rows: int) -> LockstepError:
    return Corrupt(
        f"the written files hold {rows} rows, but {job.plan.rows} were planned",
        hint=f"nothing was published; {_again(job)}, and report this with the job's history",
    )


def _fenced_elsewhere(job: Job) -> LockstepError:
    return Retryable(
        f"the commit {job.commit_id} was fenced before it could be published",
        hint="nothing was published and the written files are kept: `lockstep retry` publishes them",
    )


class _Keeper:
    def __init__(self) -> None:
        self.lost: LockstepError | None = None

    def check(self) -> None:
        """Raises: Fenced if the lease was lost meanwhile."""
        if self.lost is not None:
            raise Fenced(self.lost.message)


@contextlib.contextmanager
def _kept(store: JobStore, claim: CommitClaim, clock: Clock) -> Iterator[_Keeper]:
    """Keep the commit's lease alive in the background while a long step runs.

    Not for ever: a step that hangs beyond the commit's deadline lets somebody else try.
    """
    keeper = _Keeper()
    ended = threading.Event()
    lease, limits = claim.lease, claim.job.plan.limits
    lease_s = limits.lease_s
    until = clock.now() + limits.commit_deadline_s + lease_s

    def keep() -> None:
        while not ended.wait(lease_s / 3) and clock.now() < until:
            try:
                store.renew_commit(lease, lease_s)
            except Fenced as error:
                keeper.lost = error
                return
            except LockstepError:
                continue  # the store is away: the next round may reach it, else the lease runs out

    thread = threading.Thread(target=keep, name=f"commit-lease-{lease.job_id[:8]}", daemon=True)
    thread.start()
    try:
        yield keeper
    finally:
        ended.set()
        thread.join(timeout=1.0)


def run_commit(
    claim: CommitClaim,
    store: JobStore,
    config: Config,
    clock: Clock = SYSTEM_CLOCK,
    patience_s: float = math.inf,
) -> Job:
    """`commit` on the target that the job's plan names.

    Raises: Fenced if another worker has taken the commit over.
    """
    try:
        target = open_target(expand(claim.job.plan.target, config), config, clock)
    except Invalid as error:
        # A worker without this catalog proves nothing about a request that was sent.
        if claim.job.commit_attempts > 0:
            store.yield_commit(claim.lease, GIVE_UP_PAUSE_S)
            return store.read(claim.job.job_id)
        return store.end(claim.lease, Event.FAIL, error=ErrorInfo.of(error))
    if claim.job.kind is Kind.EXPORT:
        return commit(claim, store, target, clock, patience_s)
    return commit(claim, store, target, clock, patience_s, lambda job, head: review(job, store, config, head))


def settle(
    store: JobStore,
    job_id: str,
    config: Config,
    clock: Clock = SYSTEM_CLOCK,
    patience_s: float = SETTLE_PATIENCE_S,
) -> Job:
    """Finish the commit of one job if nobody else is at it; else answer with the job as it is.

    A kill takes it even from a live committer: the register decides between the two.
    """
    force = store.read(job_id).kill_requested
    claim = store.claim_commit(worker_name(), config.limits.lease_s, {job_id}, force=force)
    if claim is None:
        return store.read(job_id)
    try:
        return run_commit(claim, store, config, clock, patience_s)
    except Fenced:
        return store.read(job_id)


def kill(
    store: JobStore,
    job_id: str,
    config: Config,
    clock: Clock = SYSTEM_CLOCK,
    patience_s: float = 5.0,
    on_problem: Callable[[LockstepError], None] = lambda _: None,
) -> Job:
    """Stop a job; where it is committing, fence it or find that it was faster, within `patience_s`.

    The answer is a live job only if the register could not be asked in that time: the kill is noted then, and
    whoever commits the job next carries it out. What keeps one from asking goes to `on_problem`.
    Raises: NoSuchJob; Retryable if the store does not take the kill.
    """
    job = store.stop(job_id, Event.KILL)
    deadline = clock.now() + patience_s
    while job.state.live:
        try:
            job = settle(store, job_id, config, clock, min(patience_s, SETTLE_PATIENCE_S))
        except LockstepError as error:
            on_problem(error)
        if not job.state.live or clock.now() >= deadline:
            break
        clock.sleep(KILL_POLL_S)
    return job
