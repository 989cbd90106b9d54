"""The job store: a dozen verbs of this domain, each atomic.

Every verb that changes something checks the epoch or the state that it was told of, and refuses when
that has moved on. A reply can get lost: a verb that is sent again with the same epoch and content
answers as the first time. Times are judged by the store's clock. Implementations: `sql`, `zookeeper`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lockstep.errors import ErrorInfo, Invalid
from lockstep.job import (
    CommitLease,
    Event,
    HistoryEntry,
    Job,
    Lease,
    NewJob,
    Position,
    Progress,
    StagedFile,
    State,
    Task,
    TaskSpec,
    Verdict,
)
from lockstep.runtime import SYSTEM_CLOCK, Clock


@dataclass(frozen=True)
class Claim:
    """A task that this worker may now run."""

    lease: Lease
    job: Job
    task: Task


@dataclass(frozen=True)
class Begun:
    """An attempt that has started: its own epoch, and where the one before it got to."""

    lease: Lease
    position: Position | None
    rows_done: int
    bytes_done: int


@dataclass(frozen=True)
class CommitClaim:
    lease: CommitLease
    job: Job


class JobStore(Protocol):
    # Making and reading jobs

    def create(self, jobs: Sequence[NewJob]) -> list[Job]:
        """Record all jobs with their tasks, or none of them.

        A job without tasks goes straight on to `committing` (an empty partition is published too).
        Sent again with the same job ids it answers with what is there.
        Raises: Conflict if another job holds the same rows and is not in `beside`. A holder is a live job,
        or a completed one that no later `replace` has superseded and whose time to live has not ended.
        """
        ...

    def read(self, job_id: str) -> Job:
        """Raises: NoSuchJob."""
        ...

    def find(self, prefix: str) -> Job:
        """The one job whose id starts with `prefix`.

        Raises: NoSuchJob if none does, Invalid (listing them) if several do.
        """
        ...

    def holders(self, scope: str) -> list[Job]:
        """The jobs that hold rows of this scope now, oldest first."""
        ...

    def tasks(self, job_id: str, stage: str | None = None) -> list[Task]: ...

    def manifest(self, job_id: str, stage: str) -> Iterator[StagedFile]:
        """The staged files of all tasks of a stage, by task, then in the order they were written."""
        ...

    def history(self, job_id: str) -> list[HistoryEntry]: ...

    # Running tasks

    def claim(
        self, worker: str, slots: int, lease_s: float, job_ids: Collection[str] | None = None
    ) -> list[Claim]:
        """Lease up to `slots` tasks that are waiting, or whose lease has expired, jobs taking turns.

        Raises the epoch of each. A pending job starts to run. Tasks whose next attempt lies in the future
        are left alone.
        """
        ...

    def begin(self, lease: Lease, lease_s: float) -> Begun:
        """Start an attempt: raise the epoch once more, count the attempt, fence the attempts before it.

        Each call is a new attempt (Spark re-runs a task with the lease that its driver has); the owner
        must still be `lease.worker`, and the epoch at least `lease.epoch`.
        Raises: Fenced if the lease is lost or the job no longer runs.
        """
        ...

    def checkpoint(
        self,
        lease: Lease,
        position: Position,
        staged: Sequence[StagedFile],
        progress: Progress,
        lease_s: float,
    ) -> Verdict:
        """Record `position` and the files that cover it, in one transaction; extend the lease.

        `staged` are the files since the last checkpoint; `progress` is the total so far.
        Sent again with the same content it answers the same. A paused job still takes the checkpoint.
        Raises: Fenced if a newer epoch exists or the job has ended.
        """
        ...

    def finish(
        self, lease: Lease, position: Position, staged: Sequence[StagedFile], progress: Progress
    ) -> None:
        """The last checkpoint of a task. When it was the last open task of the last stage, and the job
        is running, the job goes on to `committing` in the same transaction.

        Raises: Fenced as `checkpoint` does.
        """
        ...

    def fail(self, lease: Lease, error: ErrorInfo, retry_in_s: float | None) -> None:
        """Give the task back to wait for `retry_in_s`; None fails the task and the job in one transaction.

        What was checkpointed stays. Raises: Fenced as `checkpoint` does.
        """
        ...

    def release(self, lease: Lease, *, unspent: bool = False) -> None:
        """Give the lease back without having failed: the task waits and can be claimed at once.

        `unspent`: the attempt had begun and was stopped by us, so it does not count, and the task's deadline
        begins anew. A lease that is lost already is no error.
        """
        ...

    def heartbeat(self, held: Mapping[Lease, Progress], lease_s: float) -> dict[Lease, Verdict]:
        """Extend all leases of a worker and record how far they are; answer which ones must stop.

        A lease whose epoch is no longer the newest gets `STOP`. A lease that ran out but that nobody
        took is extended.
        """
        ...

    def abandon(self, worker: str) -> None:
        """Let all leases of a worker that is known to be dead run out now, those on commits too.

        Epochs protect what it may still send, so a wrong guess costs work, never correctness.
        """
        ...

    def advance(self, job_id: str, stage: str, next_stage: str, tasks: Sequence[TaskSpec]) -> Job:
        """Move a running job whose tasks of `stage` are all done on to `next_stage` with its tasks.

        Sent again after it took place it answers with the job. Raises: Fenced if the job is elsewhere.
        """
        ...

    # The commit

    def claim_commit(
        self, worker: str, lease_s: float, job_ids: Collection[str] | None = None, *, force: bool = False
    ) -> CommitClaim | None:
        """Take a job in `committing` that nobody is committing, or whose committer's lease expired.

        Raises its commit epoch; notes when committing began. `force` takes it from a live committer too: a
        kill does not wait for one that sleeps.
        """
        ...

    def renew_commit(
        self, lease: CommitLease, lease_s: float, *, attempted: bool = False, error: ErrorInfo | None = None
    ) -> Job:
        """Extend the commit lease, count an attempt if `attempted`, and read the job (is a kill asked for?).

        `error`: why the last try did not go through, shown to the user until the job ends.
        Raises: Fenced if a newer commit epoch exists or the job is not committing any more.
        """
        ...

    def yield_commit(self, lease: CommitLease, retry_in_s: float) -> None:
        """Give the commit back: anybody may claim it after `retry_in_s`. A lost lease is no error."""
        ...

    def end(
        self,
        lease: CommitLease,
        event: Event,
        *,
        snapshot_id: int | None = None,
        error: ErrorInfo | None = None,
    ) -> Job:
        """End a committing job with COMMITTED, FAIL or KILL, as the register says.

        COMMITTED also makes the jobs that the plan replaces give up what they hold.
        Sent again it answers with the job. Raises: Fenced if a newer commit epoch exists, or the job has
        ended in another way.
        """
        ...

    # Control

    def stop(self, job_id: str, event: Event, error: ErrorInfo | None = None) -> Job:
        """KILL or FAIL a job that is not committing: at once. Leases of its tasks are void.

        A KILL of a committing job is noted as a request, which its committer answers; a FAIL leaves it to its
        committer. A KILL of a failed job
        gives it up for good, and keeps its error. A job that has ended in another way is returned as it is.
        """
        ...

    def pause(self, job_id: str) -> Job:
        """Raises: Invalid if the job is committing or has ended. A paused job stays paused."""
        ...

    def resume(self, job_id: str) -> Job:
        """Raises: Invalid if the job has ended. A job that is not paused is returned as it is."""
        ...

    def retry(self, job_id: str) -> Job:
        """A failed job waits again, with the next generation; finished tasks stay finished, checkpoints stay.

        Attempts, task deadlines and the commit's budget begin anew. Asked again while the retried job is
        live, it answers with the job.
        Raises: Invalid if it has not failed; Conflict if another job holds the same rows by now.
        """
        ...

    def released(self, job_id: str) -> None:
        """Note that the source's pin is gone."""
        ...

    def unreleased(self) -> list[Job]:
        """Completed and killed jobs whose pin may still be there. A failed one keeps it for a retry."""
        ...

    def expire(self, ttl_s: float, swept: Collection[str] = ()) -> list[str]:
        """Forget released completed and killed jobs that ended more than `ttl_s` ago; answer their ids.

        A killed job that may have written files is forgotten only if it is in `swept`: nobody could prove any
        more that they are garbage. A completed one is remembered by the table.
        """
        ...

    def close(self) -> None: ...

    # Last in the class: after it, `list` is no longer the type for a type checker.
    def list(self, states: Collection[State] | None = None, limit: int | None = None) -> list[Job]:
        """Newest first."""
        ...


def open_store(url: str, clock: Clock = SYSTEM_CLOCK) -> JobStore:
    """Open the job store at `url`, and make it if it is not there.

    Raises: Invalid if the scheme is unknown or it cannot be opened; Incompatible if a newer version wrote it;
    Retryable if its server does not answer.
    """
    scheme = url.partition(":")[0]
    if scheme in ("sqlite", "postgresql", "postgresql+psycopg"):
        from lockstep.store.sql import SqlStore

        return SqlStore(url, clock)
    if scheme == "zookeeper":
        from lockstep.store.zookeeper import ZooKeeperStore

        return ZooKeeperStore(url, clock)
    raise Invalid(
        f'unknown kind of job store "{scheme}"',
        hint="known: sqlite:///PATH, postgresql://USER:PASSWORD@HOST/DATABASE and "
        "zookeeper://HOST:2181/lockstep",
    )
