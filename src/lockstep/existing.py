"""What earlier jobs of the same rows mean for a new request: `--on-existing`. Pure: it touches no store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lockstep.errors import Conflict
from lockstep.job import Holding, Job, Piece
from lockstep.source import PartitionInfo


@dataclass(frozen=True)
class Skipped:
    partition: str
    reason: str
    job_id: str | None


@dataclass(frozen=True)
class Selection:
    """What one job is to export: a partition, whole or only some parts of it."""

    partition: PartitionInfo
    whole: bool
    pieces: tuple[Piece, ...]

    @property
    def label(self) -> str:
        """How messages and the job's `partition` field name it."""
        if self.whole:
            return self.partition.partition_id
        return f"{self.partition.partition_id} ({', '.join(piece.name for piece in self.pieces)})"


@dataclass(frozen=True)
class Decision:
    """What `--on-existing` makes of the jobs that hold the same rows."""

    selection: Selection | None
    skipped: Skipped | None = None
    beside: frozenset[str] = frozenset()
    replaces: tuple[str, ...] = ()
    """Ids of the jobs to replace; once they have ended, their commit ids."""
    forgotten: tuple[str, ...] = ()
    """Commit ids that only the target remembers."""


def decide(wanted: Selection, scope: str, holders: Sequence[Job], mode: str) -> Decision:
    """What `mode` makes of the jobs that hold rows of this partition.

    Raises: Conflict, naming the job in the way. A live job that `replace` must fence first is in `replaces`.
    """
    holding = Holding(scope, wanted.whole, wanted.pieces)
    if mode == "replace" and wanted.whole:
        rivals = [job for job in holders if job.holding.scope == scope]
    else:
        rivals = [job for job in holders if holding.overlap(job.holding) or job.holding.overlap(holding)]
    if not rivals:
        return Decision(wanted)
    if mode == "skip":
        return _skip(wanted, rivals)
    if mode == "append":
        for job in rivals:
            if job.state.live:
                raise _in_the_way(wanted, job, "wait for it, kill it, or pass --on-existing replace")
        return Decision(wanted, beside=frozenset(job.job_id for job in rivals))
    if mode == "replace":
        for job in rivals:
            if not wanted.whole and not _all_within(job.holding, wanted):
                whole = wanted.partition.partition_id
                raise _in_the_way(wanted, job, f"it has other rows too; replace all: --partition {whole}")
        return Decision(
            wanted,
            beside=frozenset(job.job_id for job in rivals),
            replaces=tuple(job.job_id for job in rivals),
        )
    hint = "pass --on-existing skip, append or replace"
    raise _in_the_way(
        wanted, rivals[0], hint if not rivals[0].state.live else f"{hint}, or wait for it to end"
    )


def _skip(wanted: Selection, rivals: Sequence[Job]) -> Decision:
    for job in rivals:
        if job.holding.whole and wanted.whole:
            return Decision(None, Skipped(wanted.label, f"job {job.job_id} is {job.state}", job.job_id))
    left = []
    for piece in wanted.pieces:
        there = [(job, held) for job in rivals for held in job.holding.pieces if piece.overlaps(held)]
        if not there:
            left.append(piece)
            continue
        job, _ = there[0]
        held = [one for _, one in there]
        if not _covered(piece, held):
            raise Conflict(
                f"part {piece.name} was merged from rows that job {job.job_id} exported "
                "and rows that it did not",
                job_id=job.job_id,
                hint="pass --on-existing replace with the whole partition",
            )
    if not left:
        job = rivals[0]
        return Decision(None, Skipped(wanted.label, f"job {job.job_id} is {job.state}", job.job_id))
    rest = replace(wanted, whole=False, pieces=tuple(left))
    return Decision(rest)


def _all_within(holding: Holding, wanted: Selection) -> bool:
    """True if a job holds only rows of the wanted parts: a `replace` takes all that it wrote."""
    return not holding.whole and all(_covered(piece, wanted.pieces) for piece in holding.pieces)


def _covered(piece: Piece, held: Iterable[Piece]) -> bool:
    """True if the block range of `piece` lies within what is held (or the names are the same)."""
    if piece.first is None or piece.last is None:
        return any(piece.name == one.name for one in held)
    reached = piece.first
    for one in sorted(held, key=lambda one: one.first or 0):
        if one.first is None or one.last is None or one.first > reached:
            continue
        reached = max(reached, one.last + 1)
    return reached > piece.last


def _in_the_way(wanted: Selection, job: Job, hint: str) -> Conflict:
    verb = "is being exported by" if job.state.live else "was exported by"
    part = "" if job.holding.whole else f", as {job.plan.partition}"
    return Conflict(
        f"partition {wanted.label} {verb} job {job.job_id} ({job.state}{part})", job_id=job.job_id, hint=hint
    )
