"""The sweep on real Iceberg tables and a real store: what is proven to be garbage goes, nothing else."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.commit import commit
from lockstep.errors import Invalid, Retryable
from lockstep.job import (
    Event,
    Holding,
    Job,
    Json,
    Lease,
    NewJob,
    Progress,
    StagedFile,
    State,
    TaskSpec,
    commit_id,
)
from lockstep.source import PIN_PREFIX
from lockstep.source.clickhouse import ClickHouseSource
from lockstep.storage.file import StoredFile
from lockstep.store.sql import SqlStore
from lockstep.sweep import Fate, Finding, Kind, Report, named_by_us, sweep
from tests.clickhouse_lab import Chdb
from tests.iceberg_tables import Lake

DAY_S = 86_400.0


class Yard:
    """A table, a store, and jobs whose attempts write real files under our names."""

    def __init__(self, folder: Path) -> None:
        self.lake = Lake(folder)
        self.lake.create()
        self.store = SqlStore(f"sqlite:///{folder}/jobs.db", self.lake.clock)
        self.data = folder / "lake" / "db" / "events" / "data"
        self._rows = 0

    # Jobs

    def new_id(self, age_s: float = 0.0) -> str:
        self._rows += 1
        return f"{int((self.lake.clock.now() - age_s) * 1000):012x}{self._rows:012x}"

    def create(self, job_id: str | None = None, tasks: int = 1, replaces: Sequence[str] = ()) -> str:
        job_id = job_id or self.new_id()
        plan = self.lake.plan(self.lake.target.load(), replaces=tuple(replaces))
        holding = Holding(f"scope of {job_id}", True)
        self.store.create([NewJob(job_id, "request", plan, holding, [TaskSpec({}, 1)] * tasks)])
        return job_id

    def begin(self, job_id: str) -> Lease:
        """Another attempt of the first task that is free; the ones before it are lost."""
        self.lake.clock.time += 60
        claim = self.store.claim("writer", 1, 30, {job_id})[0]
        return self.store.begin(claim.lease, 30).lease

    def write(self, lease: Lease, sequence: int = 0, suffix: str = ".parquet") -> StagedFile:
        """A file as this attempt would write it; the store does not know of it yet."""
        self._rows += 1
        staged = self.lake.stage([self._rows])
        name = f"lockstep-{lease.job_id}-{lease.stage}-{lease.index:05d}-{lease.epoch:03d}-{sequence:05d}"
        path = self.data / f"{name}{suffix}"
        Path(staged.path.removeprefix("file://")).rename(path)
        return replace(staged, path=f"file://{path}")

    def finish(self, lease: Lease, files: Sequence[StagedFile]) -> None:
        self.store.finish(lease, {"row": 1}, list(files), Progress(1, 1))

    def commit(self, job_id: str) -> Job:
        claim = self.store.claim_commit("committer", 30, {job_id})
        assert claim is not None
        return commit(claim, self.store, self.lake.open(), self.lake.clock)

    def completed(self, job_id: str | None = None) -> tuple[str, StagedFile, StagedFile]:
        """A published job; the file that it published, and that of an attempt which was lost."""
        job_id = self.create(job_id)
        lost = self.write(self.begin(job_id))
        lease = self.begin(job_id)
        published = self.write(lease)
        self.finish(lease, [published])
        assert self.commit(job_id).state is State.COMPLETED
        return job_id, published, lost

    def forget(self, job_id: str) -> None:
        """Let the store forget a completed job, as its time to live does."""
        self.store.released(job_id)
        self.lake.clock.time += 100
        assert job_id in self.store.expire(1.0)

    # The sweep

    def sweep(self, **options: object) -> Report:
        return sweep(self.lake.config, self.store, self.lake.clock, **options)  # type: ignore[arg-type]

    def files(self) -> set[str]:
        return {f"file://{path}" for path in self.data.rglob("*.parquet")}

    def referenced(self) -> set[str]:
        """All data files of all snapshots, as PyIceberg alone reads them."""
        table = self.lake.table()
        return {
            task.file.file_path
            for snapshot in table.metadata.snapshots
            for task in table.scan(snapshot_id=snapshot.snapshot_id).plan_files()
        }


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(tmp_path)
    yield yard
    yard.store.close()


def whats(findings: Sequence[Finding], kind: Kind = Kind.DATA_FILE) -> set[str]:
    return {finding.what for finding in findings if finding.kind is kind}


def test_files_of_a_killed_job_are_deleted_and_a_dry_run_only_lists_them(yard: Yard) -> None:
    job_id = yard.create()
    lease = yard.begin(job_id)
    listed, unlisted = yard.write(lease), yard.write(lease, 1)
    yard.store.checkpoint(lease, {"row": 1}, [listed], Progress(1, 1), 30)
    yard.store.stop(job_id, Event.KILL)

    dry = yard.sweep(dry_run=True)
    assert whats(dry.garbage) == {listed.path, unlisted.path} == yard.files()
    assert all(job_id in finding.reason and not finding.deleted for finding in dry.garbage)

    swept = yard.sweep()
    assert all(finding.deleted for finding in swept.garbage)
    assert yard.files() == set()
    assert yard.sweep().findings == []


@pytest.mark.parametrize("state", ["pending", "running", "paused", "committing", "failed"])
def test_nothing_of_a_job_that_may_still_run_is_deleted(yard: Yard, state: str) -> None:
    job_id = yard.create()
    lost = yard.write(yard.begin(job_id))
    lease = yard.begin(job_id)
    listed = yard.write(lease)
    if state == "committing":
        yard.finish(lease, [listed])
    else:
        yard.store.checkpoint(lease, {"row": 1}, [listed], Progress(1, 1), 30)
    if state == "failed":
        yard.store.stop(job_id, Event.FAIL)
    if state in ("paused", "pending"):
        yard.store.pause(job_id)
    if state == "pending":
        yard.store.resume(job_id)
    assert yard.store.read(job_id).state.value == state

    report = yard.sweep(unknown_older_than_s=DAY_S)
    assert report.findings == []
    assert sum(report.needed.values()) == 2
    assert all(job_id in reason for reason in report.needed)
    assert yard.files() == {lost.path, listed.path}


def test_a_completed_job_keeps_what_it_published_and_loses_its_lost_attempts(yard: Yard) -> None:
    _, published, lost = yard.completed()
    report = yard.sweep()
    assert whats(report.garbage) == {lost.path}
    assert yard.files() == {published.path} == yard.referenced()


def test_what_was_published_stays_although_the_table_has_dropped_it_since(yard: Yard) -> None:
    """It is the table's own maintenance that deletes it: the job's manifest still lists it."""
    _, published, _ = yard.completed()
    yard.lake.table().delete("id > 0")
    yard.completed()  # whose snapshot no longer says that the file was removed
    for snapshot in yard.lake.table().metadata.snapshots[:-1]:
        yard.lake.table().maintenance.expire_snapshots().by_id(snapshot.snapshot_id).commit()
    assert published.path not in yard.referenced()
    yard.sweep(unknown_older_than_s=DAY_S)
    assert published.path in yard.files()


@pytest.mark.parametrize("way", ["branch", "tag", "no ref at all"])
def test_a_file_that_only_an_old_snapshot_refers_to_stays(yard: Yard, way: str) -> None:
    job_id, published, _ = yard.completed()
    snapshot_id = yard.store.read(job_id).snapshot_id
    assert snapshot_id is not None
    if way == "branch":
        yard.lake.table().manage_snapshots().create_branch(snapshot_id, "kept").commit()
    if way == "tag":
        yard.lake.table().manage_snapshots().create_tag(snapshot_id, "kept").commit()
    yard.lake.table().delete("id > 0")
    yard.forget(job_id)
    assert yard.lake.ids() == []
    report = yard.sweep(addresses=[yard.lake.address], unknown_older_than_s=DAY_S)
    assert report.needed == {"a snapshot refers to it": report.needed.total()}
    assert published.path in yard.files()


def test_a_commit_that_may_still_arrive_keeps_the_files_of_a_killed_job(yard: Yard) -> None:
    """The table could not be found for the job's whole budget, so nobody could fence the request."""
    job_id = yard.create()
    lease = yard.begin(job_id)
    staged = yard.write(lease)
    yard.finish(lease, [staged])
    claim = yard.store.claim_commit("committer", 30, {job_id})
    assert claim is not None
    yard.store.renew_commit(claim.lease, 30, attempted=True)
    yard.store.end(claim.lease, Event.FAIL)
    yard.store.stop(job_id, Event.KILL)

    report = yard.sweep()
    assert whats(report.unknown) == {staged.path} == yard.files()
    assert "was sent" in report.unknown[0].reason

    head = yard.lake.target.load()
    yard.lake.target.fence(head, commit_id(job_id, 1))
    assert whats(yard.sweep().garbage) == {staged.path}


def an_impossible_replace(yard: Yard) -> tuple[str, StagedFile]:
    """A job that its commit refuses each time: the rows that it is to replace were rewritten with others."""
    earlier = yard.lake.publish("earlier", yard.lake.stage([1001, 1002]))
    yard.lake.table().delete("id = 1001")
    job_id = yard.create(replaces=[earlier])
    lease = yard.begin(job_id)
    staged = yard.write(lease)
    yard.finish(lease, [staged])
    return job_id, staged


def test_a_commit_that_was_refused_before_it_was_sent_leaves_nothing_once_the_job_is_killed(
    yard: Yard,
) -> None:
    job_id, staged = an_impossible_replace(yard)
    refused = yard.commit(job_id)
    assert (refused.state, refused.commit_attempts) == (State.FAILED, 0)
    assert refused.error is not None
    assert "cannot replace" in refused.error.message
    yard.store.stop(job_id, Event.KILL)
    assert whats(yard.sweep().garbage) == {staged.path}
    assert yard.files() == yard.referenced()


def test_a_commit_that_was_refused_leaves_nothing_either_when_its_job_was_retried(yard: Yard) -> None:
    job_id, staged = an_impossible_replace(yard)
    yard.commit(job_id)
    yard.store.retry(job_id)
    assert yard.commit(job_id).state is State.FAILED
    yard.store.stop(job_id, Event.KILL)
    assert whats(yard.sweep().garbage) == {staged.path}
    assert yard.files() == yard.referenced()


def test_an_earlier_generation_that_may_still_arrive_keeps_the_files_too(yard: Yard) -> None:
    job_id = yard.create()
    lease = yard.begin(job_id)
    staged = yard.write(lease)
    yard.finish(lease, [staged])
    claim = yard.store.claim_commit("committer", 30, {job_id})
    assert claim is not None
    yard.store.renew_commit(claim.lease, 30, attempted=True)
    yard.store.end(claim.lease, Event.FAIL)
    yard.store.retry(job_id)
    yard.store.stop(job_id, Event.KILL)
    retried = yard.store.claim_commit("committer", 30, {job_id})
    assert retried is not None
    yard.store.end(retried.lease, Event.KILL)
    assert yard.store.read(job_id).state is State.KILLED

    assert whats(yard.sweep().unknown) == {staged.path} == yard.files()


def test_a_killed_job_that_had_landed_after_all_loses_nothing(yard: Yard) -> None:
    job_id = yard.create()
    lease = yard.begin(job_id)
    staged = yard.write(lease)
    lost = yard.write(lease, 1)
    yard.finish(lease, [staged])
    claim = yard.store.claim_commit("committer", 30, {job_id})
    assert claim is not None
    head = yard.lake.target.load()
    yard.lake.commit(head, claim.job.plan, claim.job.commit_id, job_id, [staged])
    yard.store.renew_commit(claim.lease, 30, attempted=True)
    yard.store.end(claim.lease, Event.FAIL)
    yard.store.stop(job_id, Event.KILL)

    report = yard.sweep()
    assert yard.files() == {staged.path, lost.path}
    assert whats(report.unknown) == {lost.path}
    assert "published" in report.unknown[0].reason


def test_a_killed_job_is_forgotten_after_its_time_to_live_once_nothing_of_it_is_left(yard: Yard) -> None:
    job_id = yard.create()
    staged = yard.write(yard.begin(job_id))
    yard.store.stop(job_id, Event.KILL)
    yard.store.released(job_id)
    yard.sweep()
    assert yard.store.read(job_id).state is State.KILLED, "its time has not come"

    yard.lake.clock.time += yard.lake.config.finished_job_ttl_s + 1
    Path(staged.path.removeprefix("file://")).write_bytes(b"written by an attempt that woke up late")
    assert yard.store.expire(yard.lake.config.finished_job_ttl_s) == [], "a worker does not forget it"
    yard.lake.catalog.rename_table("db.events", "db.elsewhere")
    yard.sweep()
    assert yard.store.read(job_id).state is State.KILLED, "its file is still there"

    yard.lake.catalog.rename_table("db.elsewhere", "db.events")
    yard.sweep(dry_run=True)
    assert len(yard.store.list()) == 1
    yard.sweep()
    assert yard.store.list() == []
    assert yard.files() == set()


def test_a_killed_job_whose_table_was_dropped_with_its_files_is_forgotten(yard: Yard) -> None:
    job_id = yard.create()
    staged = yard.write(yard.begin(job_id))
    yard.store.stop(job_id, Event.KILL)
    yard.store.released(job_id)
    yard.lake.clock.time += yard.lake.config.finished_job_ttl_s + 1
    yard.lake.catalog.drop_table("db.events")
    Path(staged.path.removeprefix("file://")).unlink()
    yard.sweep()
    assert yard.store.list() == []


# Jobs that this store does not know


def stray(yard: Yard, age_s: float, file_age_s: float | None = None) -> StagedFile:
    """A file of a job that this store has never heard of."""
    job_id = yard.new_id(age_s)
    staged = yard.write(Lease(job_id, "write", 0, 1, "w"))
    moment = yard.lake.clock.now() - (age_s if file_age_s is None else file_age_s)
    os.utime(staged.path.removeprefix("file://"), (moment, moment))
    return staged


def test_a_file_of_an_unknown_job_stays_until_somebody_vouches_for_its_age(yard: Yard) -> None:
    yard.create()
    old = stray(yard, 40 * DAY_S)
    young = stray(yard, 10 * DAY_S)
    written_lately = stray(yard, 40 * DAY_S, file_age_s=DAY_S)
    assert whats(yard.sweep().unknown) == {old.path, young.path, written_lately.path} == yard.files()

    report = yard.sweep(unknown_older_than_s=30 * DAY_S)
    assert whats(report.garbage) == {old.path}
    assert whats(report.unknown) == {young.path, written_lately.path} == yard.files()


def test_an_age_under_a_day_is_refused(yard: Yard) -> None:
    old = stray(yard, 40 * DAY_S)
    with pytest.raises(Invalid, match="another one"):
        yard.sweep(addresses=[yard.lake.address], unknown_older_than_s=3600)
    assert yard.files() == {old.path}


def test_published_files_of_forgotten_jobs_stay_and_their_lost_attempts_go(yard: Yard) -> None:
    """The register remembers what the store has forgotten: a published job can never run again."""
    job_id, published, lost = yard.completed()
    yard.forget(job_id)
    report = yard.sweep(addresses=[yard.lake.address])
    assert whats(report.garbage) == {lost.path}
    assert yard.files() == {published.path} == yard.referenced()


def test_a_table_that_no_job_names_is_swept_when_it_is_named(yard: Yard) -> None:
    old = stray(yard, 40 * DAY_S)
    assert yard.sweep(unknown_older_than_s=DAY_S).findings == []
    yard.sweep(addresses=[yard.lake.address], unknown_older_than_s=DAY_S)
    assert old.path not in yard.files()


# Doubt


def test_a_table_that_cannot_be_loaded_keeps_everything_and_is_named(yard: Yard) -> None:
    job_id = yard.create()
    staged = yard.write(yard.begin(job_id))
    yard.store.stop(job_id, Event.KILL)
    yard.lake.catalog.rename_table("db.events", "db.elsewhere")
    report = yard.sweep()
    assert [(one.kind, one.fate) for one in report.findings] == [
        (Kind.TABLE, Fate.UNKNOWN),
        (Kind.DATA_FILE, Fate.UNKNOWN),
    ]
    assert yard.files() == {staged.path}


def test_a_manifest_that_cannot_be_read_keeps_everything(yard: Yard) -> None:
    _, published, lost = yard.completed()
    snapshot = yard.lake.table().current_snapshot()
    assert snapshot is not None
    manifest = snapshot.manifests(yard.lake.table().io)[0].manifest_path.removeprefix("file://")
    Path(manifest).write_bytes(b"damaged")
    report = yard.sweep()
    assert report.garbage == []
    assert yard.files() == {published.path, lost.path}


def test_a_table_that_was_made_again_keeps_the_files_of_jobs_for_the_old_one(yard: Yard) -> None:
    job_id = yard.create()
    staged = yard.write(yard.begin(job_id))
    yard.store.stop(job_id, Event.KILL)
    yard.lake.catalog.drop_table("db.events")
    yard.lake.create()
    report = yard.sweep()
    assert whats(report.unknown) == {staged.path} == yard.files()


def test_a_store_that_does_not_answer_deletes_nothing(yard: Yard, monkeypatch) -> None:
    job_id = yard.create()
    staged = yard.write(yard.begin(job_id))
    yard.store.stop(job_id, Event.KILL)

    def away() -> None:
        raise Retryable("the store does not answer")

    monkeypatch.setattr(yard.store, "list", away)
    with pytest.raises(Retryable):
        yard.sweep()
    assert yard.files() == {staged.path}


def test_a_file_that_cannot_be_deleted_is_reported_and_the_others_go(yard: Yard, monkeypatch) -> None:
    from lockstep.storage import Storage

    job_id = yard.create()
    lease = yard.begin(job_id)
    stuck, free = yard.write(lease), yard.write(lease, 1)
    yard.store.stop(job_id, Event.KILL)
    delete = Storage.delete

    def refuse(self: Storage, url: str) -> None:
        if url == stuck.path:
            raise Invalid("no right to delete it")
        delete(self, url)

    monkeypatch.setattr(Storage, "delete", refuse)
    report = yard.sweep()
    assert {finding.what: finding.error for finding in report.garbage} == {
        stuck.path: "no right to delete it",
        free.path: None,
    }
    assert yard.files() == {stuck.path}


# Names


@pytest.mark.parametrize(
    "name",
    [
        "part-0.parquet",
        "lockstep-0a1b-write-00000-001-00000.parquet.bak",
        "copy of lockstep-0a1b-write-00000-001-00000.parquet",
        "lockstep-0a1b-write-00000-001.parquet",
        "lockstep-WXYZ-write-00000-001-00000.parquet",
        "lockstep.parquet",
        "8cb1f1b2-5c1c-4b5e-9c52-1f0c3c3b3b1a-m0.avro",
        "snap-123-1-8cb1f1b2-5c1c-4b5e-9c52-1f0c3c3b3b1a.avro",
        "v3.metadata.json",
    ],
)
def test_a_name_that_is_not_ours_is_never_looked_at(name: str) -> None:
    assert named_by_us(StoredFile(f"/lake/db/events/data/{name}", 1, "", 0.0)) is None


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("data/lockstep-0a1b-write-00000-001-00000.parquet", Kind.DATA_FILE),
        ("data/region=eu/lockstep-0a1b-merge-00000-001-00000.parquet", Kind.DATA_FILE),
        ("data/0101/1111/0000/01010101-lockstep-0a1b-write-00000-001-00000.parquet", Kind.DATA_FILE),
        ("lockstep-runs/0a1b/lockstep-0a1b-map-00000-001-00000.run.arrow", Kind.RUN),
        ("lockstep-runs/0a1b/lockstep-0a1b-merge-00000-001-00000.keys.arrow", Kind.RUN),
        (
            "metadata/8cb1f1b2-5c1c-4b5e-9c52-1f0c3c3b3b1a-0123456789ab0123456789ab-m0.avro",
            Kind.METADATA,
        ),
        (
            "metadata/snap-12-0123456789ab0123456789ab-8cb1f1b2-5c1c-4b5e-9c52-1f0c3c3b3b1a.avro",
            Kind.METADATA,
        ),
    ],
)
def test_every_kind_of_file_of_ours_is_told_by_its_address(path: str, kind: Kind) -> None:
    found = named_by_us(StoredFile(f"s3://lake/db/events/{path}", 1, "", 0.0))
    assert found is not None
    assert found.kind is kind


def test_a_run_of_somebody_elses_folder_is_not_ours() -> None:
    run = "lockstep-0a1b-map-00000-001-00000.run.arrow"
    assert named_by_us(StoredFile(f"/lake/db/lockstep-runs/ffff/{run}", 1, "", 0.0)) is None


def test_runs_go_once_their_import_is_completed_and_released(yard: Yard) -> None:
    job_id, published, _ = yard.completed()
    live_id = yard.create()
    for owner in (job_id, live_id):
        folder = yard.data.parent / "lockstep-runs" / owner
        folder.mkdir(parents=True)
        (folder / f"lockstep-{owner}-map-00000-001-00000.run.arrow").write_bytes(b"rows")
    assert whats(yard.sweep().garbage, Kind.RUN) == set()
    yard.store.released(job_id)
    report = yard.sweep()
    assert {finding.job_id for finding in report.garbage if finding.kind is Kind.RUN} == {job_id}
    assert [path.parent.name for path in yard.data.parent.rglob("*.run.arrow")] == [live_id]
    assert yard.files() == {published.path}


def test_metadata_of_refused_commits_goes_and_what_a_snapshot_needs_stays(yard: Yard) -> None:
    job_id = yard.create()
    lease = yard.begin(job_id)
    staged = yard.write(lease)
    yard.finish(lease, [staged])
    job = yard.store.read(job_id)
    head = yard.lake.target.load()
    yard.lake.target.prepare(head, job.plan, job.commit_id, job_id, [staged])  # and never sent
    metadata = yard.data.parent / "metadata"
    prepared = {path.name for path in metadata.glob("*.avro")}
    assert len(prepared) == 2
    assert yard.sweep().garbage == [], "the job is committing"

    yard.commit(job_id)
    assert {Path(what).name for what in whats(yard.sweep().garbage, Kind.METADATA)} == prepared
    assert len(list(metadata.glob("*.avro"))) == 2
    assert len(yard.lake.ids()) == 1


# Everything at once


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_no_mixture_of_jobs_loses_anything_that_is_referred_to(yard: Yard, seed: int) -> None:
    """Random jobs in all states with lost and live attempts; PyIceberg and the store say what is needed."""
    chance = random.Random(seed)
    for _ in range(12):
        job_id = yard.create(tasks=chance.randint(1, 2))
        files: list[StagedFile] = []
        for _ in range(chance.randint(1, 5)):
            if yard.store.read(job_id).state is State.COMMITTING:
                break
            lease = yard.begin(job_id)
            files = [yard.write(lease, number) for number in range(chance.randint(0, 2))]
            step = chance.choice(["lose", "finish", "checkpoint"])
            if step == "finish":
                yard.finish(lease, files)
            elif step == "checkpoint":
                yard.store.checkpoint(lease, {"row": 1}, files, Progress(1, 1), 30)
        end = chance.choice(["leave", "kill", "fail", "commit", "commit", "commit and forget", "pause"])
        state = yard.store.read(job_id).state
        if end.startswith("commit") and state is State.COMMITTING:
            yard.commit(job_id)
            if end.endswith("forget"):
                yard.forget(job_id)
        elif end in ("kill", "fail") and state is not State.COMMITTING:
            yard.store.stop(job_id, Event.KILL if end == "kill" else Event.FAIL)
        elif end == "pause" and state is State.RUNNING:
            yard.store.pause(job_id)

    before = yard.files()
    owners = {job.job_id: job for job in yard.store.list()}
    needed = before & yard.referenced()
    for job in owners.values():
        if job.state not in (State.KILLED, State.COMPLETED):
            needed |= {path for path in before if job.job_id in path}
    rows = yard.lake.rows()

    report = yard.sweep(addresses=[yard.lake.address])

    assert yard.files() == needed, "exactly what nothing refers to is gone"
    assert report.unknown == []
    assert yard.lake.rows() == rows
    assert yard.sweep(addresses=[yard.lake.address]).findings == []


# Frozen copies


@pytest.fixture
def frozen(yard: Yard, chdb: Chdb) -> Iterator[Frozen]:
    frozen = Frozen(yard, chdb)
    yield frozen
    for table in frozen.pins() | {"clicks"}:
        chdb.drop(table)


class Frozen:
    """A ClickHouse table whose partition is frozen for jobs of the yard's store."""

    def __init__(self, yard: Yard, chdb: Chdb) -> None:
        self.yard, self.chdb = yard, chdb
        chdb.run("CREATE TABLE shop.clicks (id UInt64) ENGINE = MergeTree ORDER BY id")
        chdb.run("INSERT INTO shop.clicks VALUES (1)")
        self.address = f"chdb:{chdb.folder}/shop/clicks"

    def pin(self, job_id: str) -> Json:
        return self.chdb.source("clicks").pin(f"{PIN_PREFIX}{job_id}", "all", None).detail

    def job(self) -> str:
        job_id = self.yard.new_id()
        head = self.yard.lake.target.load()
        plan = self.yard.lake.plan(head, source=self.address, pin=self.pin(job_id))
        self.yard.store.create([NewJob(job_id, "r", plan, Holding(job_id, True), [TaskSpec({}, 1)])])
        return job_id

    def pins(self) -> set[str]:
        return {name for name in self.chdb.tables() if name.startswith("lockstep")}


def pinned(*job_ids: str) -> set[str]:
    return {f"{PIN_PREFIX}{job_id}" for job_id in job_ids}


@pytest.mark.servers
def test_frozen_copies_of_ended_jobs_are_dropped_and_those_that_may_be_read_stay(frozen: Frozen) -> None:
    live, failed, killed = frozen.job(), frozen.job(), frozen.job()
    frozen.yard.store.stop(failed, Event.FAIL)
    frozen.yard.store.stop(killed, Event.KILL)
    frozen.chdb.run("CREATE TABLE shop.lockstep_pin_of_mine (id UInt64) ENGINE = MergeTree ORDER BY id")

    dry = frozen.yard.sweep(dry_run=True)
    assert whats(dry.garbage, Kind.PIN) == {f"shop.{PIN_PREFIX}{killed}"}
    assert frozen.pins() == {*pinned(live, failed, killed), "lockstep_pin_of_mine"}

    report = frozen.yard.sweep()
    assert [finding.deleted for finding in report.garbage] == [True]
    assert frozen.pins() == {*pinned(live, failed), "lockstep_pin_of_mine"}
    assert frozen.yard.store.read(killed).released
    assert not frozen.yard.store.read(live).released


@pytest.mark.servers
def test_a_frozen_copy_of_no_job_stays_until_somebody_vouches_for_its_age(
    frozen: Frozen, monkeypatch
) -> None:
    """A planner freezes before it creates the job: it may be about to."""
    live = frozen.job()
    orphan = frozen.yard.new_id(age_s=40 * DAY_S)
    frozen.pin(orphan)
    assert whats(frozen.yard.sweep().unknown, Kind.PIN) == {f"shop.{PIN_PREFIX}{orphan}"}
    assert whats(frozen.yard.sweep(unknown_older_than_s=2 * DAY_S).garbage, Kind.PIN) == set()

    found = ClickHouseSource.pins
    monkeypatch.setattr(
        ClickHouseSource, "pins", lambda self: [replace(pin, age_s=3 * DAY_S) for pin in found(self)]
    )
    report = frozen.yard.sweep(unknown_older_than_s=2 * DAY_S)
    assert whats(report.garbage, Kind.PIN) == {f"shop.{PIN_PREFIX}{orphan}"}
    assert frozen.pins() == pinned(live)


@pytest.mark.servers
def test_a_frozen_copy_is_found_although_its_source_was_dropped(frozen: Frozen) -> None:
    killed = frozen.job()
    frozen.yard.store.stop(killed, Event.KILL)
    frozen.chdb.drop("clicks")
    frozen.yard.sweep()
    assert frozen.pins() == set()


def test_a_source_that_does_not_answer_is_named_and_the_tables_are_swept(yard: Yard) -> None:
    job_id = yard.create()
    staged = yard.write(yard.begin(job_id))
    yard.store.stop(job_id, Event.KILL)
    report = yard.sweep(addresses=["clickhouse://me:topsecret@127.0.0.1:1/shop/clicks"])
    assert whats(report.garbage) == {staged.path}
    assert [finding.what for finding in report.unknown] == ["clickhouse://me:***@127.0.0.1:1/shop/clicks"]
    assert "topsecret" not in str(report)
