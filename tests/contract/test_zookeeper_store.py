"""What the ZooKeeper store promises beyond the contract: lost replies, outages, limits, damage, cost."""

from __future__ import annotations

import base64
import logging
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from lockstep.errors import (
    Conflict,
    Corrupt,
    ErrorInfo,
    Fenced,
    Incompatible,
    Invalid,
    LockstepError,
    Retryable,
)
from lockstep.job import Event, Lease, NewJob, Progress, State, TaskSpec, TaskState
from lockstep.runtime import Clock, SystemClock
from lockstep.store import open_store, zookeeper_expire, zookeeper_records, zookeeper_session
from lockstep.store.zookeeper import ZooKeeperStore
from lockstep.store.zookeeper_session import Session, Writes
from tests.store_lab import (
    LEASE_S,
    MovedClock,
    begin_task,
    check_always_true,
    ids,
    job_in,
    moves,
    new_job,
    open_at_once,
    run_task,
    staged,
    take_commit,
)
from tests.zookeeper_server import Cable, ZooKeeperServer, start_ensemble

pytestmark = pytest.mark.servers

REFUSED = ErrorInfo("Retryable", "storage is away", "wait")


@pytest.fixture
def url(zookeeper: ZooKeeperServer, tmp_path: Path) -> str:
    return zookeeper.url(tmp_path.name)


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def store(url: str, clock: MovedClock) -> Iterator[ZooKeeperStore]:
    opened = ZooKeeperStore(url, clock)
    yield opened
    opened.close()


@pytest.fixture
def cable(zookeeper: ZooKeeperServer) -> Iterator[Cable]:
    laid = Cable(zookeeper.port)
    yield laid
    laid.close()


@pytest.fixture
def wired(cable: Cable, tmp_path: Path, clock: MovedClock, url: str) -> Iterator[ZooKeeperStore]:
    """A client behind a cable; `store` and `hand` see the same nodes without it."""
    opened = ZooKeeperStore(cable.url(tmp_path.name), clock)
    yield opened
    cable.stuck.clear()
    cable.mend()
    opened.close()


class Hand:
    """What a person does with the ZooKeeper shell."""

    def __init__(self, server: ZooKeeperServer, root: str) -> None:
        self.client = KazooClient(f"{server.address}/{root}")
        self.client.start()

    def names(self, path: str) -> list[str]:
        return sorted(self.client.get_children(path))

    def delete(self, path: str) -> None:
        self.client.delete(path, recursive=True)

    def set(self, path: str, data: bytes) -> None:
        self.client.set(path, data)

    def get(self, path: str) -> bytes:
        data: bytes = self.client.get(path)[0]
        return data

    def body(self, job_id: str) -> str:
        [name] = [name for name in self.names("/bodies") if name.startswith(f"{job_id}~")]
        return f"/bodies/{name}"

    def stage(self, job_id: str) -> str:
        folder = f"{self.body(job_id)}/stages"
        return f"{folder}/{self.names(folder)[0]}"


@pytest.fixture
def hand(store: ZooKeeperStore, zookeeper: ZooKeeperServer, tmp_path: Path) -> Iterator[Hand]:
    found = Hand(zookeeper, tmp_path.name)
    yield found
    found.client.stop()
    found.client.close()


# Opening


@pytest.mark.parametrize(
    "address",
    ["zookeeper:", "zookeeper://", "zookeeper:///lockstep", "zookeeper://host:port/x", "zookeeper://a,,b/x"],
)
def test_an_address_that_names_no_server_is_refused(address: str) -> None:
    with pytest.raises(Invalid) as refused:
        open_store(address)
    assert "zookeeper://host1:2181,host2:2181/lockstep" in (refused.value.hint or "")


def test_a_store_of_a_newer_version_is_refused_and_left_as_it_is(
    store: ZooKeeperStore, hand: Hand, url: str
) -> None:
    store.create([new_job("job1")])
    hand.set("/version", b"99")
    with pytest.raises(Incompatible, match="99") as refused:
        open_store(url)
    assert "upgrade" in (refused.value.hint or "")
    assert hand.names("/jobs") == ["job1"]


def test_many_open_a_new_store_at_the_same_instant(url: str) -> None:
    open_at_once(url, clients=5)


def test_a_server_that_does_not_answer_is_retryable_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zookeeper_session, "OPEN_S", 0.3)
    with pytest.raises(Retryable, match=r"127\.0\.0\.1:1/x") as refused:
        open_store("zookeeper://127.0.0.1:1/x")
    assert refused.value.hint


def test_a_missing_kazoo_names_the_extra_to_install() -> None:
    code = (
        "import sys; sys.modules['kazoo'] = None\n"
        "from lockstep.errors import Invalid\n"
        "from lockstep.store import open_store\n"
        "try: open_store('zookeeper://127.0.0.1:1/x')\n"
        "except Invalid as error: print(error.message, error.hint)"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "lockstep[zookeeper]" in said


def test_a_password_opens_what_others_cannot_read_and_is_never_shown(
    zookeeper: ZooKeeperServer, tmp_path: Path
) -> None:
    own = f"zookeeper://ann:s%2Fcret@{zookeeper.address}/{tmp_path.name}"
    opened = ZooKeeperStore(own)
    opened.create([new_job("job1")])
    assert ids(opened.list()) == ["job1"]
    assert "cret" not in repr(opened._session.address) + str(opened._session.address)
    opened.close()
    for other in (own.replace("s%2Fcret", "guess"), zookeeper.url(tmp_path.name)):
        with pytest.raises(Invalid, match="refused access") as refused:
            ZooKeeperStore(other)
        assert "guess" not in str(refused.value) + str(refused.value.hint)


def test_a_closed_store_says_so(url: str) -> None:
    opened = open_store(url)
    opened.close()
    with pytest.raises(Invalid, match="closed"):
        opened.list()


# Time


class Skewed(SystemClock):
    def now(self) -> float:
        return super().now() + 100_000.0


def test_the_time_of_the_server_rules_whatever_the_clients_believe(url: str) -> None:
    fast, right = ZooKeeperStore(url, Skewed()), ZooKeeperStore(url)
    fast.create([new_job("job1", 2)])
    assert abs(fast.read("job1").created_at - time.time()) < 60
    begin_task(right, "job1", "right")
    fast.claim("fast", 1, LEASE_S)
    assert fast.claim("thief", 2, LEASE_S) == []
    assert fast.read("job1").workers == ("fast", "right")
    fast.abandon("right")
    assert len(right.claim("right", 2, LEASE_S)) == 1
    fast.close()
    right.close()


# Lost replies


def in_threads(count: int, action: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=action, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_each_verb_takes_effect_once_although_its_reply_is_lost(
    wired: ZooKeeperStore, store: ZooKeeperStore, cable: Cable
) -> None:
    def losing(times: int = 1) -> None:
        assert cable.lose_replies == 0
        cable.lose_replies = times

    losing(2)
    wired.create([new_job("job1", 3), new_job("job2", 1)])
    losing()
    [claim] = wired.claim("w1", 1, LEASE_S, {"job1"})
    assert [task.state for task in store.tasks("job1")].count(TaskState.LEASED) == 1
    losing()
    lease = wired.begin(claim.lease, LEASE_S).lease
    assert (store.read("job1").attempts, lease.epoch) == (1, 2)
    losing()
    wired.checkpoint(lease, {"row": 1}, [staged("a")], Progress(1, 1), LEASE_S)
    losing()
    wired.heartbeat({lease: Progress(2, 2)}, LEASE_S)
    losing()
    wired.finish(lease, {"row": 9}, [staged("b")], Progress(9, 9))
    lease = begin_task(wired, "job1").lease
    losing()
    wired.fail(lease, REFUSED, 0.0)
    lease = begin_task(wired, "job1").lease
    losing()
    wired.release(lease, unspent=True)
    losing()
    wired.pause("job1")
    losing()
    wired.resume("job1")
    losing()
    wired.stop("job2", Event.FAIL)
    losing()
    assert wired.retry("job2").generation == 2
    run_task(wired, "job1")
    run_task(wired, "job1")
    losing()
    commit = take_commit(wired, "job1")
    losing()
    assert wired.renew_commit(commit.lease, LEASE_S, attempted=True).commit_attempts == 1
    losing()
    wired.end(commit.lease, Event.COMMITTED, snapshot_id=5)
    losing()
    wired.released("job1")
    assert cable.lost == 17
    events = [entry.event for entry in store.history("job1")]
    assert {event: events.count(event) for event in ("create", "task_failed", "pause", "claim_commit")} == {
        "create": 1,
        "task_failed": 1,
        "pause": 1,
        "claim_commit": 1,
    }
    check_always_true(store)


def test_a_reply_lost_while_others_write_leaves_everything_true(
    wired: ZooKeeperStore, store: ZooKeeperStore, cable: Cable
) -> None:
    store.create([new_job("job1", 30)])

    def run(number: int) -> None:
        client = (wired, store)[number]
        for _ in range(15):
            if number == 0:
                cable.lose_replies = 1
            for claim in client.claim(f"w{number}", 1, LEASE_S, {"job1"}):
                lease = client.begin(claim.lease, LEASE_S).lease
                client.finish(lease, {}, [staged(f"{lease.index}-{lease.epoch}")], Progress(10, 10))

    in_threads(2, run)
    check_always_true(store)
    store.abandon("w0")
    while store.read("job1").state is State.RUNNING:
        run_task(store, "job1")
    assert store.read("job1").files == 30


def test_a_cut_connection_is_retryable_in_bounded_time_and_heals(
    wired: ZooKeeperStore, cable: Cable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zookeeper_session, "OUTAGE_S", 0.5)
    wired.create([new_job("job1", 2)])
    cable.cut()
    began = time.monotonic()
    with pytest.raises(Retryable, match="does not answer"):
        wired.read("job1")
    with pytest.raises(Retryable, match="does not answer"):
        wired.claim("w1", 1, LEASE_S)
    with pytest.raises(Retryable, match="does not answer"):
        wired.pause("job1")
    assert time.monotonic() - began < 10
    cable.mend()
    monkeypatch.undo()
    assert len(wired.claim("w1", 1, LEASE_S)) == 1
    assert moves(wired, "job1")[-1] == Event.START
    check_always_true(wired)


def test_a_half_open_connection_is_retryable_in_bounded_time_and_heals(
    wired: ZooKeeperStore, cable: Cable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zookeeper_session, "OUTAGE_S", 0.5)
    monkeypatch.setattr(zookeeper_session, "REPLY_S", 0.5)
    wired.create([new_job("job1", 2)])
    cable.stuck.set()
    began = time.monotonic()
    with pytest.raises(Retryable):
        wired.stop("job1", Event.KILL)
    assert time.monotonic() - began < 10
    cable.stuck.clear()
    monkeypatch.undo()
    assert wired.stop("job1", Event.KILL).state is State.KILLED
    assert moves(wired, "job1") == [Event.KILL]


def test_a_lost_session_costs_no_lease_and_no_job(store: ZooKeeperStore, zookeeper: ZooKeeperServer) -> None:
    store.create([new_job("job1")])
    lease = begin_task(store, "job1").lease
    session = store._session._client.client_id
    twin = KazooClient(zookeeper.address, client_id=session)
    twin.start()
    twin.stop()
    twin.close()
    store.checkpoint(lease, {"row": 5}, [staged("a")], Progress(5, 5), LEASE_S)
    store.finish(lease, {"row": 9}, [staged("b")], Progress(9, 9))
    assert store._session._client.client_id != session
    assert store.read("job1").state is State.COMMITTING


def test_what_was_answered_survives_the_death_of_the_server(tmp_path: Path) -> None:
    server = ZooKeeperServer(tmp_path / "server")
    server.start()
    try:
        store = ZooKeeperStore(server.url())
        answered: list[tuple[str, str]] = []
        stopped = threading.Event()

        def run(number: int) -> None:
            client = ZooKeeperStore(server.url())
            for job in range(1000):
                if stopped.is_set():
                    break
                job_id = f"job{number}-{job}"
                resent(lambda job_id=job_id: client.create([new_job(job_id, 3)]))
                for claim in resent(lambda job_id=job_id: client.claim(f"w{number}", 3, 600.0, {job_id})):
                    lease = resent(lambda claim=claim: client.begin(claim.lease, 600.0)).lease
                    file = staged(f"{job_id}-{lease.index}")
                    resent(lambda lease=lease, file=file: client.finish(lease, {}, [file], Progress(10, 1)))
                    answered.append((job_id, file.path))
            client.close()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            await_more(answered, random.randint(6, 20))
            server.kill()
            server.start()
        await_more(answered, 6)
        stopped.set()
        for thread in threads:
            thread.join()
        check_always_true(store)
        kept = {file.path for job in store.list() for file in store.manifest(job.job_id, "write")}
        assert {path for _, path in answered} <= kept
        store.close()
    finally:
        server.kill()


def await_more(answers: Sequence[object], count: int, within_s: float = 60.0) -> None:
    wanted = len(answers) + count
    deadline = time.monotonic() + within_s
    while len(answers) < wanted:
        assert time.monotonic() < deadline, f"{len(answers)} answers; {wanted} were awaited"
        time.sleep(0.01)


def resent(verb: Callable):
    """What a worker does: a retryable error means to send the verb again."""
    while True:
        try:
            return verb()
        except Retryable:
            time.sleep(0.05)


def test_a_job_that_others_change_all_the_time_is_retryable_not_endless(
    store: ZooKeeperStore, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zookeeper_records, "_CONFLICTS", 3)
    store.create([new_job("job1")])
    commit = Session.commit

    def outrun(session: Session, writes: Writes) -> list[int]:
        hand.set("/jobs/job1", hand.get("/jobs/job1"))
        return commit(session, writes)

    monkeypatch.setattr(Session, "commit", outrun)
    with pytest.raises(Retryable, match="job1"):
        store.pause("job1")
    monkeypatch.undo()
    assert store.pause("job1").state is State.PAUSED


# Several servers


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ZooKeeperServer]]:
    servers = start_ensemble(tmp_path_factory.mktemp("ensemble"))
    yield servers
    for server in servers:
        server.kill()


def test_clients_of_different_servers_see_what_the_other_was_answered(
    ensemble: list[ZooKeeperServer], clock: MovedClock
) -> None:
    clients = [ZooKeeperStore(server.url("mixed"), clock) for server in ensemble]
    for number in range(60):
        job_id = f"job{number}"
        order = iter(random.sample(clients, 3) * 4)
        next(order).create([new_job(job_id, 1)])
        [claim] = next(order).claim("w1", 1, LEASE_S, {job_id})
        lease = next(order).begin(claim.lease, LEASE_S).lease
        next(order).checkpoint(lease, {"row": 1}, [staged(f"{job_id}-a")], Progress(1, 1), LEASE_S)
        next(order).finish(lease, {"row": 2}, [staged(f"{job_id}-b")], Progress(2, 2))
        commit = take_commit(next(order), job_id)
        next(order).end(commit.lease, Event.COMMITTED, snapshot_id=number)
        assert next(order).read(job_id).state is State.COMPLETED
        assert len(list(next(order).manifest(job_id, "write"))) == 2
    check_always_true(clients[0])
    for client in clients:
        client.close()


def test_verbs_go_on_when_any_one_of_three_servers_dies(ensemble: list[ZooKeeperServer]) -> None:
    hosts = ",".join(server.address for server in ensemble)
    store = ZooKeeperStore(f"zookeeper://{hosts}/survivors")
    for number, server in enumerate(ensemble):
        job_id = f"job{number}"
        store.create([new_job(job_id, 4)])
        run_task(store, job_id)
        lease = begin_task(store, job_id).lease
        server.kill()
        resent(lambda lease=lease, job_id=job_id: store.finish(lease, {}, [staged(job_id)], Progress(10, 1)))
        run_task(store, job_id)
        server.start()
        run_task(store, job_id)
        assert store.read(job_id).state is State.COMMITTING
    check_always_true(store)
    store.close()


# Limits


def noise(size: int, seed: int = 1) -> str:
    """Text that cannot be compressed."""
    return base64.b64encode(random.Random(seed).randbytes(size)).decode()


def test_a_plan_and_descriptors_larger_than_a_node_come_back_whole(url: str, store: ZooKeeperStore) -> None:
    tasks = [TaskSpec({"ranges": noise(40_000, number)}, 1) for number in range(70)]
    large = replace(new_job("job1", schema={"noise": noise(3_000_000)}), tasks=tasks)
    store.create([large])
    fresh = ZooKeeperStore(url)
    assert fresh.read("job1").plan == large.plan
    assert [task.descriptor for task in fresh.tasks("job1")] == [spec.descriptor for spec in tasks]
    fresh.close()


def test_a_manifest_of_ten_thousand_files_with_large_statistics_comes_back_whole(
    store: ZooKeeperStore,
) -> None:
    store.create([new_job("job1")])
    lease = begin_task(store, "job1").lease
    files = [replace(staged(f"f{number}"), stats={"bounds": noise(300, number)}) for number in range(10_000)]
    for _ in range(2):
        store.checkpoint(lease, {"row": 1}, files[:9_000], Progress(1, 1), LEASE_S)
    store.finish(lease, {"row": 2}, files[9_000:], Progress(2, 2))
    assert list(store.manifest("job1", "write")) == files
    assert store.read("job1").files == 10_000


def test_a_large_checkpoint_whose_writer_died_half_way_does_not_hinder_the_next(
    store: ZooKeeperStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create([new_job("job1")])
    lease = begin_task(store, "job1").lease
    files = [replace(staged(f"f{number}"), stats={"bounds": noise(9_000, number)}) for number in range(300)]
    commit = Session.commit
    calls = 0

    def dies(session: Session, writes: Writes) -> list[int]:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise KeyboardInterrupt
        return commit(session, writes)

    monkeypatch.setattr(Session, "commit", dies)
    with pytest.raises(KeyboardInterrupt):
        store.checkpoint(lease, {"row": 1}, files, Progress(1, 1), LEASE_S)
    monkeypatch.undo()
    assert list(store.manifest("job1", "write")) == []
    store.checkpoint(lease, {"row": 2}, [staged("small")], Progress(1, 1), LEASE_S)
    store.checkpoint(lease, {"row": 3}, files, Progress(2, 2), LEASE_S)
    assert list(store.manifest("job1", "write")) == [staged("small"), *files]


def test_a_position_that_no_node_can_hold_is_refused_with_the_reason(store: ZooKeeperStore) -> None:
    store.create([new_job("job1")])
    lease = begin_task(store, "job1").lease
    with pytest.raises(Invalid, match="more than ZooKeeper takes"):
        store.checkpoint(lease, {"row": noise(1_000_000)}, [], Progress(1, 1), LEASE_S)
    assert store.checkpoint(lease, {"row": 1}, [], Progress(1, 1), LEASE_S)


def test_three_hundred_jobs_are_created_at_once_and_too_many_are_refused(store: ZooKeeperStore) -> None:
    store.create([new_job(f"{number:024d}") for number in range(300)])
    assert len(store.list()) == 300
    with pytest.raises(Invalid, match="than ZooKeeper takes"):
        store.create([new_job(f"x{number:023d}", 0) for number in range(2_000)])
    assert len(store.list()) == 300
    assert len(store._session.children(f"{store._layout.root}/bodies")) == 300


def test_hostile_names_are_kept_as_they_are(store: ZooKeeperStore) -> None:
    name = "../../x/\x00 \n 🦆 %2F \udcff"
    store.create([new_job(name, scope=name, source=name, partition=name, stages=("../a", "b/c"))])
    assert store.find(name[:4]).plan.partition == name
    assert ids(store.holders(name)) == [name]
    run_task(store, name)
    store.advance(name, "../a", "b/c", [TaskSpec({}, 1)])
    run_task(store, name)
    store.end(take_commit(store, name).lease, Event.COMMITTED, snapshot_id=1)
    assert ids(store.list()) == [name]
    check_always_true(store)


# Damage and ghosts

NEWER = "newer plan"
DAMAGE: dict[str, type[LockstepError]] = {NEWER: Incompatible, "damaged plan": Corrupt, "no plan": Corrupt}


@pytest.mark.parametrize("damage", [*DAMAGE])
def test_a_job_that_cannot_be_read_does_not_block_the_others(
    store: ZooKeeperStore,
    hand: Hand,
    url: str,
    clock: MovedClock,
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    version = 99 if damage == NEWER else 1
    store.create([new_job("bad", 3, format_version=version)])
    clock.at += 1
    store.create([new_job("good", 3)])
    if damage == "damaged plan":
        hand.set(f"{hand.body('bad')}/plan", b"1\nrubbish")
    if damage == "no plan":
        hand.delete(f"{hand.body('bad')}/plan")
    fresh = ZooKeeperStore(url, clock)
    with caplog.at_level(logging.WARNING):
        assert ids(fresh.list()) == ["good"]
    assert "bad" in caplog.text
    assert [claim.lease.job_id for claim in fresh.claim("w1", 9, LEASE_S)] == ["good"] * 3
    with pytest.raises(DAMAGE[damage], match="bad") as refused:
        fresh.read("bad")
    assert refused.value.hint
    with pytest.raises(Conflict) as held:
        fresh.create([new_job("next", scope="scope-bad")])
    assert held.value.job_id == "bad"
    with pytest.raises(DAMAGE[damage]):
        fresh.stop("bad", Event.KILL)
    assert [entry.event for entry in fresh.history("bad")] == ["create", "kill"]
    fresh.create([new_job("next", scope="scope-bad")])
    check_always_true(fresh)
    fresh.close()


@pytest.mark.parametrize("what", ["pages/0", "pages", "specs", ""])
def test_a_job_whose_tasks_were_deleted_fails_with_the_reason_and_the_others_run(
    store: ZooKeeperStore, hand: Hand, url: str, clock: MovedClock, what: str
) -> None:
    store.create([new_job("job1", 3)])
    clock.at += 1
    store.create([new_job("job2", 1)])
    run_task(store, "job1")
    lease = begin_task(store, "job1").lease
    store.release(lease)
    hand.delete(f"{hand.stage('job1')}/{what}".rstrip("/"))
    fresh = ZooKeeperStore(url, clock)
    assert [claim.lease.job_id for claim in fresh.claim("w1", 5, LEASE_S)] == ["job2"]
    job = fresh.read("job1")
    assert job.state is State.FAILED
    assert job.error is not None
    assert "1 of 3 tasks" in job.error.message
    assert fresh.holders("scope-job1") == []
    fresh.close()


@pytest.mark.parametrize("what", ["", "/history", "/stages", "/plan"])
def test_a_job_can_be_killed_whatever_was_deleted_below_it(
    store: ZooKeeperStore, hand: Hand, url: str, what: str
) -> None:
    store.create([new_job("job1", 2)])
    begin_task(store, "job1")
    hand.delete(hand.body("job1") + what)
    fresh = ZooKeeperStore(url)
    try:
        fresh.stop("job1", Event.KILL)
    except Corrupt:
        assert what in ("", "/plan")
    assert fresh.holders("scope-job1") == []
    assert ids(fresh.list({State.RUNNING})) == []
    assert fresh.claim("w1", 1, LEASE_S) == []
    fresh.close()


@pytest.mark.parametrize("state", [State.RUNNING, State.COMMITTING, State.COMPLETED])
def test_a_record_deleted_by_hand_leaves_nothing_that_blocks_and_goes_away(
    store: ZooKeeperStore,
    hand: Hand,
    state: State,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(zookeeper_expire, "GHOST_S", -1.0)
    job_in(store, state)
    hand.delete("/jobs/job1")
    assert store.claim("w2", 5, LEASE_S) == []
    assert store.claim_commit("w2", LEASE_S) is None
    assert store.list() == store.unreleased() == store.holders("scope-job1") == []
    lease = Lease("job1", "write", 0, 2, "w1")
    with pytest.raises(Fenced, match="no longer in the store"):
        store.checkpoint(lease, {}, [staged("a")], Progress(1, 1), LEASE_S)
    store.release(lease)
    assert store.heartbeat({lease: Progress(1, 1)}, LEASE_S)
    store.abandon("w1")
    store.create([new_job("job2", scope="scope-job1")])
    with caplog.at_level(logging.WARNING):
        assert store.expire(1.0) == []
    assert "job1" in caplog.text
    assert [name.partition("~")[0] for name in hand.names("/bodies")] == ["job2"]
    assert [len(hand.names(f"/states/{name}")) for name in State] == [1, 0, 0, 0, 0, 0, 0]
    assert hand.names("/pinned") == hand.names("/expiring") == []
    check_always_true(store)


def test_indexes_and_scopes_deleted_by_hand_do_not_stop_their_job(store: ZooKeeperStore, hand: Hand) -> None:
    store.create([new_job("job1")])
    for folder in ("states/pending", "scopes"):
        for name in hand.names(f"/{folder}"):
            hand.delete(f"/{folder}/{name}")
    assert ids(store.list()) == ["job1"]
    run_task(store, "job1")
    store.end(take_commit(store, "job1").lease, Event.COMMITTED, snapshot_id=1)
    assert ids(store.list({State.COMPLETED})) == ["job1"]
    hand.delete(f"/pinned/{hand.names('/pinned')[0]}")
    store.released("job1")
    check_always_true(store)


def test_a_clock_deleted_by_hand_is_made_again(url: str, hand: Hand) -> None:
    hand.delete("/clock")
    opened = ZooKeeperStore(url)
    opened.create([new_job("job1")])
    assert abs(opened.read("job1").created_at - time.time()) < 60
    opened.close()


def test_a_manifest_with_a_lost_or_damaged_chunk_is_never_read_as_whole(
    store: ZooKeeperStore, hand: Hand
) -> None:
    job_in(store, State.COMMITTING)
    folder = f"{hand.stage('job1')}/files/0"
    chunk = f"{folder}/{hand.names(folder)[1]}"
    hand.set(chunk, b"rubbish")
    with pytest.raises(Corrupt, match="task 1"):
        list(store.manifest("job1", "write"))
    hand.delete(chunk)
    with pytest.raises(Corrupt, match="lists 1 files; 2 were"):
        list(store.manifest("job1", "write"))


def dies_before_publishing(store: ZooKeeperStore, new: NewJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A creator that writes all that is written ahead, and then is no more."""
    commit = Session.commit

    def dies(session: Session, writes: Writes) -> list[int]:
        if any(verb == "check" for verb, *_ in writes.steps):
            raise KeyboardInterrupt
        return commit(session, writes)

    with monkeypatch.context() as patched:
        patched.setattr(Session, "commit", dies)
        with pytest.raises(KeyboardInterrupt):
            store.create([new])


def test_a_job_written_in_part_is_invisible_blocks_nobody_and_goes_away(
    store: ZooKeeperStore, hand: Hand, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dies_before_publishing(store, new_job("ghost", 200, scope="s"), monkeypatch)
    assert len(hand.names("/bodies")) == 1
    assert store.list() == store.holders("s") == []
    assert store.claim("w1", 9, LEASE_S) == []
    store.create([new_job("job1", scope="s")])
    store.expire(1.0)
    assert len(hand.names("/bodies")) == 2, "its creator may still be at work"
    monkeypatch.setattr(zookeeper_expire, "GHOST_S", -1.0)
    with caplog.at_level(logging.WARNING):
        store.expire(1.0)
    assert "ghost" in caplog.text
    assert [name.partition("~")[0] for name in hand.names("/bodies")] == ["job1"]


def test_a_creator_that_slept_until_its_ghost_was_cleaned_up_starts_over(
    store: ZooKeeperStore, hand: Hand, url: str, clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zookeeper_expire, "GHOST_S", -1.0)
    cleaner = ZooKeeperStore(url, clock)
    commit = Session.commit
    slept: list[bool] = []

    def sleeps(session: Session, writes: Writes) -> list[int]:
        if session is store._session and not slept and any(verb == "check" for verb, *_ in writes.steps):
            slept.append(True)
            cleaner.expire(1.0)
            assert hand.names("/bodies") == []
        return commit(session, writes)

    monkeypatch.setattr(Session, "commit", sleeps)
    store.create([new_job("job1", 70)])
    assert slept
    assert len(store.claim("w1", 100, LEASE_S)) == 70
    check_always_true(store)
    cleaner.close()


def test_of_two_that_advance_a_job_at_once_one_wins_whole(
    store: ZooKeeperStore, url: str, clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create([new_job("job1", 1, stages=("map", "merge"))])
    run_task(store, "job1")
    faster = ZooKeeperStore(url, clock)
    commit = Session.commit
    passed: list[bool] = []

    def is_passed(session: Session, writes: Writes) -> list[int]:
        if session is store._session and not passed and any(verb == "set" for verb, *_ in writes.steps):
            passed.append(True)
            faster.advance("job1", "map", "merge", [TaskSpec({"by": "faster"}, 1)] * 3)
        return commit(session, writes)

    monkeypatch.setattr(Session, "commit", is_passed)
    job = store.advance("job1", "map", "merge", [TaskSpec({"by": "slower"}, 1)] * 4)
    assert passed
    assert job.tasks_total == 3
    assert [task.descriptor["by"] for task in store.tasks("job1", "merge")] == ["faster"] * 3
    check_always_true(store)
    faster.close()


# Cost


class Counted:
    """How many requests a client sends."""

    def __init__(self, store: ZooKeeperStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests = 0
        self.size_bytes = 0
        client = store._session._client
        call = client._call

        def count(request: object, result: object) -> object:
            self.requests += 1
            return call(request, result)

        commit = Session.commit

        def weigh(session: Session, writes: Writes) -> list[int]:
            self.size_bytes += writes.size_bytes
            return commit(session, writes)

        monkeypatch.setattr(client, "_call", count)
        monkeypatch.setattr(Session, "commit", weigh)


def test_a_task_costs_the_same_in_a_job_of_ten_and_of_ten_thousand(
    store: ZooKeeperStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = []
    for tasks in (10, 10_000):
        job_id = f"job{tasks}"
        store.create([new_job(job_id, tasks)])
        run_task(store, job_id)
        with monkeypatch.context() as patched:
            counted = Counted(store, patched)
            run_task(store, job_id)
            store.read(job_id)
            costs.append((counted.requests, counted.size_bytes))
        store.stop(job_id, Event.KILL)
    [few, many] = costs
    assert few[0] == many[0] <= 8
    assert many[1] <= 1.1 * few[1]


def test_an_idle_worker_asks_little_however_many_jobs_have_ended(
    store: ZooKeeperStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create([new_job(f"job{number}") for number in range(100)])
    for number in range(100):
        store.stop(f"job{number}", Event.KILL)
        store.released(f"job{number}")
    with monkeypatch.context() as patched:
        counted = Counted(store, patched)
        assert store.claim("w1", 4, LEASE_S) == []
        assert store.claim_commit("w1", LEASE_S) is None
        assert store.unreleased() == []
        assert store.expire(1e6) == []
    assert counted.requests <= 40


def test_two_clients_on_one_job_do_not_lose_much_to_conflicts(
    store: ZooKeeperStore, url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ZooKeeperStore(url, clock)
    store.create([new_job("job1", 40)])
    commit = Session.commit
    tries = 0

    def count(session: Session, writes: Writes) -> list[int]:
        nonlocal tries
        tries += 1
        return commit(session, writes)

    monkeypatch.setattr(Session, "commit", count)

    def run(n: int) -> None:
        for _ in range(20):
            run_task((store, other)[n], "job1", f"w{n}")

    in_threads(2, run)
    assert store.read("job1").state is State.COMMITTING
    assert tries <= 3 * 40 * 3
    check_always_true(store)
    other.close()
