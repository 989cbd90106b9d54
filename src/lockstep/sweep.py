"""Delete what jobs have left behind: staged files, runs, metadata of refused commits, frozen copies.

A thing goes only when it bears a name of ours, and it is proven that no snapshot, no manifest and no job that
could still run refers to it. Whatever cannot be proven stays, with the reason.

The proof needs no lock. Only `completed` and `killed` jobs give anything up, and nothing leads out of these
two states; the table is read after the jobs, so what they have published is in it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Final

from lockstep.config import Config
from lockstep.errors import Invalid, LockstepError, NoSuchJob, Retryable
from lockstep.job import NOTHING_SENT, Event, Job, State, commit_id
from lockstep.runtime import SYSTEM_CLOCK, Clock, id_time
from lockstep.secrets import expand, redact
from lockstep.source import FoundPin
from lockstep.source.clickhouse import ClickHouseSource
from lockstep.storage import Storage
from lockstep.storage.file import StoredFile
from lockstep.storage.options import catalog_of, with_catalog
from lockstep.store import JobStore
from lockstep.target import Outcome, Target, TargetTable, open_target

UNPIN_TIMEOUT_S: Final = 10.0
LEAST_UNKNOWN_AGE_S: Final = 86_400.0
MOST_GENERATIONS: Final = 16
"""How many commit ids of a job that the store does not know are looked for in the register."""

_FREEZING: Final = frozenset({"clickhouse", "clickhouses", "chdb"})
"""The sources that freeze copies."""
_ENTROPY: Final = r"(?:[01]{8}-)?"
_COMMIT: Final = r"(?P<commit>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"


class Kind(StrEnum):
    DATA_FILE = "data file"
    RUN = "sorted run"
    METADATA = "commit metadata"
    PIN = "frozen copy"
    TABLE = "table"
    """A table that could not be read; what lies in its folders was listed."""
    PLACE = "place"
    """A table or a source of which nothing could be listed."""


NAMES: Final[Sequence[tuple[Kind, re.Pattern[str]]]] = (
    (
        Kind.RUN,
        re.compile(
            r".*/lockstep-runs/(?P<job>[0-9a-f]+)/lockstep-(?P=job)-[a-z]+-\d+-\d+-\d+\.[a-z]+\.arrow"
        ),
    ),
    (
        Kind.DATA_FILE,
        re.compile(rf".*/{_ENTROPY}lockstep-(?P<job>[0-9a-f]+)-[a-z]+-\d+-\d+-\d+\.parquet"),
    ),
    (Kind.METADATA, re.compile(rf".*/{_COMMIT}-[0-9a-f]{{24}}-m\d+\.avro")),
    (Kind.METADATA, re.compile(rf".*/snap-\d+-[0-9a-f]{{24}}-{_COMMIT}\.avro")),
)
"""What a file of ours looks like, by its address; the first that fits the whole of it counts."""


class Fate(StrEnum):
    GARBAGE = "garbage"
    """Proven: nothing refers to it."""
    NEEDED = "needed"
    """Something refers to it, or may again."""
    UNKNOWN = "unknown"
    """Kept, because nobody can tell."""


@dataclass(frozen=True)
class Finding:
    kind: Kind
    what: str
    """The address of a file, or the name of a frozen copy."""
    where: str
    """The table or the source beside which it was found."""
    job_id: str | None
    size_bytes: int | None
    fate: Fate
    reason: str
    deleted: bool = False
    error: str | None = None
    """Why it could not be deleted."""


@dataclass
class Report:
    """What was found. Things that are needed are only counted, by reason: a lake is full of them."""

    findings: list[Finding] = field(default_factory=list)
    needed: Counter[str] = field(default_factory=Counter)

    def add(self, finding: Finding) -> None:
        if finding.fate is Fate.NEEDED:
            self.needed[finding.reason] += 1
        else:
            self.findings.append(finding)

    @property
    def garbage(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.fate is Fate.GARBAGE]

    @property
    def unknown(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.fate is Fate.UNKNOWN]


def sweep(
    config: Config,
    store: JobStore,
    clock: Clock = SYSTEM_CLOCK,
    *,
    addresses: Sequence[str] = (),
    dry_run: bool = False,
    unknown_older_than_s: float | None = None,
) -> Report:
    """Look beside every table and source that a job of the store names, and at `addresses`; delete garbage.

    `unknown_older_than_s` lets things of jobs that this store does not know go as well, when they and their
    job are older: the caller vouches that no other store has a job that still needs them.
    Raises: Invalid for an address of no known kind, or an age that is too short; whatever the store raises
    when it does not answer, with nothing deleted.
    """
    if unknown_older_than_s is not None and unknown_older_than_s < LEAST_UNKNOWN_AGE_S:
        raise Invalid(
            "things of jobs that this store does not know may belong to jobs of another one that still run",
            hint="let them grow older than a day: --unknown-older-than 30d",
        )
    targets, sources = _sorted_out(addresses)
    known = Known(store, clock.now(), unknown_older_than_s)
    targets |= {job.plan.target for job in known.jobs.values()}
    sources |= {job.plan.source for job in known.jobs.values() if _scheme(job.plan.source) in _FREEZING}
    report = Report()
    for address in sorted(targets):
        for finding in _beside_table(address, config, clock, known, dry_run):
            report.add(finding)
    for address in sorted(sources):
        seen = {finding.what for finding in report.findings}
        for finding in _beside_source(address, config, known, dry_run):
            # Tables of one database share the place of their frozen copies.
            if finding.kind is Kind.PLACE or finding.what not in seen:
                report.add(finding)
    if not dry_run:
        store.expire(config.finished_job_ttl_s, swept=_swept(known.jobs.values(), report))
    return report


def _swept(jobs: Iterable[Job], report: Report) -> set[str]:
    """The killed jobs of which nothing is left: the store may forget them when their time has come."""
    unlisted = {finding.what for finding in report.findings if finding.kind is Kind.PLACE}
    left = {finding.job_id for finding in report.findings if not finding.deleted}
    killed = (job for job in jobs if job.state is State.KILLED)
    return {
        job.job_id
        for job in killed
        if job.job_id not in left and not unlisted & {redact(job.plan.target), redact(job.plan.source)}
    }


def _sorted_out(addresses: Iterable[str]) -> tuple[set[str], set[str]]:
    """Raises: Invalid for an address of no known kind."""
    targets: set[str] = set()
    sources: set[str] = set()
    for address in addresses:
        if _scheme(address) == "iceberg":
            targets.add(address)
        elif _scheme(address) in _FREEZING:
            sources.add(address)
        else:
            raise Invalid(
                f'"{redact(address)}" is neither a target nor a source that copies are frozen in',
                hint="write iceberg://CATALOG/namespace.table, clickhouse://…, or chdb:PATH/db/table",
            )
    return targets, sources


def _scheme(address: str) -> str:
    return address.partition(":")[0]


class Known:
    """What the store knows of jobs. Read once: what it says of jobs that have ended never changes."""

    def __init__(self, store: JobStore, now: float, unknown_older_than_s: float | None) -> None:
        self.store = store
        self.jobs: Mapping[str, Job] = {job.job_id: job for job in store.list()}
        self._now = now
        self._least_age_s = unknown_older_than_s
        self._published: dict[str, set[str]] = {}
        self._hidden: dict[str, str | None] = {}

    def owner(self, job_id: str | None, commit: str | None) -> str | None:
        """The job that a name tells, by its id or by one of its commit ids."""
        return job_id or self._by_commit.get(commit or "")

    @cached_property
    def _by_commit(self) -> dict[str, str]:
        return {
            commit_id(job.job_id, generation): job.job_id
            for job in self.jobs.values()
            for generation in range(1, job.generation + 1)
        }

    def published(self, job: Job) -> set[str]:
        """The names of the files that a completed job has published. Raises: Corrupt if some are missing."""
        if job.job_id not in self._published:
            files = self.store.manifest(job.job_id, job.plan.stages[-1])
            self._published[job.job_id] = {file.path.rpartition("/")[2] for file in files}
        return self._published[job.job_id]

    def sent(self, job: Job, generation: int) -> bool:
        """Whether a request to publish this generation may ever have left a worker."""
        if generation == job.generation:
            return job.commit_attempts > 0
        history = self.store.history(job.job_id)
        retried = (e for e in history if e.event == Event.RETRY and e.generation == generation + 1)
        if any(e.detail == NOTHING_SENT for e in retried):
            return False
        return any(e.generation == generation and e.state is State.COMMITTING for e in history)

    def stranger(self, job_id: str | None, age_s: float) -> tuple[Fate, str]:
        """What becomes of a thing of a job that the store does not list."""
        who = f"job {job_id}" if job_id else "the job of this commit"
        if job_id is not None and (hidden := self._why_hidden(job_id)) is not None:
            return Fate.UNKNOWN, hidden
        if self._least_age_s is None:
            return Fate.UNKNOWN, f"{who} is not in this store, and another store may have it"
        since = id_time(job_id) if job_id else None
        youngest_s = age_s if since is None else min(age_s, self._now - since)
        if youngest_s < self._least_age_s:
            return Fate.UNKNOWN, f"{who} is not in this store, and it is not old enough to be given up"
        return Fate.GARBAGE, f"{who} is not in this store, and it is older than you asked for"

    def _why_hidden(self, job_id: str) -> str | None:
        """A listing leaves out what cannot be read, and knows nothing of a job made since."""
        if job_id not in self._hidden:
            self._hidden[job_id] = self._read_alone(job_id)
        return self._hidden[job_id]

    def _read_alone(self, job_id: str) -> str | None:
        try:
            self.store.read(job_id)
        except NoSuchJob:
            return None
        except Retryable:
            raise
        except LockstepError as error:
            return f"job {job_id} cannot be read: {error.message}"
        return f"job {job_id} was created just now"

    def age_s(self, file: StoredFile) -> float:
        return self._now - file.modified_at


# Beside tables


def _beside_table(
    address: str, config: Config, clock: Clock, known: Known, dry_run: bool
) -> Iterator[Finding]:
    storage = _storage_of(address, config)
    judge: _TableJudge | None = None
    try:
        target = open_target(expand(address, config), config, clock)
        judge = _TableJudge(address, target, target.load(), known)
    except LockstepError as error:
        yield _unseen(Kind.TABLE, address, error)
        problem = f"its table cannot be read: {error.message}"
    try:
        files = _ours(storage, _roots(address, judge.head if judge else None, known.jobs.values()))
        if judge is None:
            yield from (_finding(ours, address, known, Fate.UNKNOWN, problem) for ours in files)
            return
        findings = judge.findings(files)
    except LockstepError as error:
        yield _unseen(Kind.PLACE, address, error)
        return
    yield from _given_up(findings, lambda finding: storage.delete(finding.what), dry_run)


def _storage_of(address: str, config: Config) -> Storage:
    """The table's files, reached as those who wrote them reach them."""
    try:
        return Storage(with_catalog(config.storage, catalog_of(address, config)))
    except Invalid:  # a catalog whose variable is not set here cannot be asked for the table either
        return Storage(config.storage)


def _roots(address: str, head: TargetTable | None, jobs: Iterable[Job]) -> list[str]:
    """The folders that can hold files of ours for this table, none inside another."""
    places: list[tuple[str, Mapping[str, Any]]] = [(head.location, head.properties)] if head else []
    places += [(job.plan.location, job.plan.properties) for job in jobs if job.plan.target == address]
    roots: set[str] = set()
    for location, properties in places:
        roots.add(location.rstrip("/"))
        for name in ("write.data.path", "write.metadata.path"):
            if properties.get(name):
                roots.add(str(properties[name]).rstrip("/"))
    return sorted(root for root in roots if not any(root.startswith(f"{other}/") for other in roots))


@dataclass(frozen=True)
class _Ours:
    """A file under a name of ours."""

    kind: Kind
    file: StoredFile
    job_id: str | None
    commit: str | None

    @property
    def name(self) -> str:
        return self.file.url.rpartition("/")[2]


def _ours(storage: Storage, roots: Iterable[str]) -> list[_Ours]:
    listed = (file for root in roots for file in storage.list(root))
    return [ours for file in listed if (ours := named_by_us(file)) is not None]


def named_by_us(file: StoredFile) -> _Ours | None:
    """None for anybody else's file."""
    for kind, pattern in NAMES:
        if (match := pattern.fullmatch(file.url)) is not None:
            found = match.groupdict()
            return _Ours(kind, file, found.get("job"), found.get("commit"))
    return None


def _finding(ours: _Ours, address: str, known: Known, fate: Fate, reason: str) -> Finding:
    job_id = known.owner(ours.job_id, ours.commit)
    return Finding(ours.kind, ours.file.url, address, job_id, ours.file.size_bytes, fate, reason)


class _TableJudge:
    """Decides over the files beside one table, as it was when it was loaded."""

    def __init__(self, address: str, target: Target, head: TargetTable, known: Known) -> None:
        self.head = head
        self._address = address
        self._target = target
        self._known = known
        self._referenced: set[str] = set()
        self._doubts: dict[str, str | None] = {}

    def findings(self, files: Sequence[_Ours]) -> list[Finding]:
        """Raises: Retryable or Corrupt if nobody can tell what the table refers to."""
        self._referenced = self._target.referenced(self.head, {ours.name for ours in files})
        return [_finding(ours, self._address, self._known, *self._judged(ours)) for ours in files]

    def _judged(self, ours: _Ours) -> tuple[Fate, str]:
        try:
            return self._fate(ours, self._known.owner(ours.job_id, ours.commit))
        except Retryable:
            raise
        except LockstepError as error:  # of one job or commit: it must not keep the others from being swept
            return Fate.UNKNOWN, error.message

    def _fate(self, ours: _Ours, job_id: str | None) -> tuple[Fate, str]:
        if ours.name in self._referenced:
            return Fate.NEEDED, "a snapshot refers to it"
        job = self._known.jobs.get(job_id) if job_id else None
        if job is None:
            return self._fate_of_a_strangers(ours, job_id)
        if job.plan.target != self._address or job.plan.target_uuid != self.head.uuid:
            return Fate.UNKNOWN, f"job {job_id} was planned for another table than the one that is there now"
        if kept := why_kept(job):
            return Fate.NEEDED, kept
        if job.state is State.COMPLETED:
            return self._fate_of_a_completed(ours, job)
        if doubt := self._doubt(job):
            return Fate.UNKNOWN, doubt
        return Fate.GARBAGE, f"job {job_id} was killed and can never publish it"

    def _fate_of_a_completed(self, ours: _Ours, job: Job) -> tuple[Fate, str]:
        if ours.kind is Kind.RUN:
            # What a merge was made from is not published; rejects are, when the job is released.
            if job.released:
                return Fate.GARBAGE, f"job {job.job_id} is completed and has released it"
            return Fate.NEEDED, f"job {job.job_id} is completed, and has not released what it holds yet"
        if ours.name in self._known.published(job):
            return Fate.NEEDED, "published, and gone from the table since: its own maintenance deletes it"
        return Fate.GARBAGE, f"job {job.job_id} is completed without it"

    def _fate_of_a_strangers(self, ours: _Ours, job_id: str | None) -> tuple[Fate, str]:
        if ours.commit is not None and self._outcome(ours.commit) is not Outcome.OPEN:
            return Fate.GARBAGE, f"its commit is {self._outcome(ours.commit)}, and no snapshot refers to it"
        if job_id is not None and self._was_published(job_id):
            # A job that has published can neither be retried nor publish anything else.
            return Fate.GARBAGE, f"job {job_id} was published, and no snapshot refers to it"
        return self._known.stranger(job_id, self._known.age_s(ours.file))

    def _was_published(self, job_id: str) -> bool:
        commits = (commit_id(job_id, generation) for generation in range(1, MOST_GENERATIONS + 1))
        return any(self._outcome(commit) is Outcome.COMMITTED for commit in commits)

    def _outcome(self, commit: str) -> Outcome:
        return self._target.outcome(self.head, commit)[0]

    def _doubt(self, job: Job) -> str | None:
        """Why a killed job may have published after all, or still could; None: it is proven not to."""
        if job.job_id not in self._doubts:
            self._doubts[job.job_id] = next(self._possible(job), None)
        return self._doubts[job.job_id]

    def _possible(self, job: Job) -> Iterator[str]:
        for generation in range(1, job.generation + 1):
            outcome = self._outcome(commit_id(job.job_id, generation))
            if outcome is Outcome.COMMITTED:
                yield f"job {job.job_id} is killed, yet the table says that it was published"
            if outcome is Outcome.OPEN and self._known.sent(job, generation):
                yield f"a commit of job {job.job_id} was sent, and the table does not say that it is fenced"


def why_kept(job: Job) -> str | None:
    """Why a job may still need what it has; None for one that can never run again."""
    if job.state.live:
        return f"job {job.job_id} is {job.state.value}"
    if job.state is State.FAILED:
        return f"job {job.job_id} failed and can be retried; `lockstep kill {job.job_id}` gives it up"
    return None


# Beside sources


def _beside_source(address: str, config: Config, known: Known, dry_run: bool) -> Iterator[Finding]:
    try:
        source = ClickHouseSource(expand(address, config), config)
    except LockstepError as error:
        yield _unseen(Kind.PLACE, address, error)
        return
    try:
        pins = {pin.name: pin for pin in source.pins()}
        findings = [_pin_finding(pin, address, known) for pin in pins.values()]
        yield from _given_up(findings, lambda one: _unpin(source, pins[one.what], known), dry_run)
    except LockstepError as error:
        yield _unseen(Kind.PLACE, address, error)
    finally:
        source.close()


def _pin_finding(pin: FoundPin, address: str, known: Known) -> Finding:
    job = known.jobs.get(pin.job_id)
    if job is None:
        fate, reason = known.stranger(pin.job_id, pin.age_s)
    elif kept := why_kept(job):
        fate, reason = Fate.NEEDED, kept
    else:
        fate, reason = Fate.GARBAGE, f"job {pin.job_id} is {job.state.value} and reads it no more"
    return Finding(Kind.PIN, pin.name, redact(address), pin.job_id, None, fate, reason)


def _unpin(source: ClickHouseSource, pin: FoundPin, known: Known) -> None:
    source.unpin(pin.detail, UNPIN_TIMEOUT_S)
    if pin.job_id in known.jobs:
        known.store.released(pin.job_id)


# Both


def _unseen(kind: Kind, address: str, error: LockstepError) -> Finding:
    shown = redact(address)
    return Finding(kind, shown, shown, None, None, Fate.UNKNOWN, error.message)


def _given_up(
    findings: Collection[Finding], delete: Callable[[Finding], None], dry_run: bool
) -> Iterator[Finding]:
    """Delete the garbage, unless it is a dry run. A place that stops answering is not asked again."""
    away: str | None = None
    for finding in findings:
        if dry_run or finding.fate is not Fate.GARBAGE:
            yield finding
            continue
        if away is None:
            try:
                delete(finding)
            except Retryable as error:
                away = error.message
            except LockstepError as error:
                yield replace(finding, error=error.message)
                continue
        yield replace(finding, error=away) if away else replace(finding, deleted=True)
