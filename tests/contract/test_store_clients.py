"""What every job store promises of its clients: they die at any instant, and ask for the same at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.job import Event, Lease, Progress, State, TaskSpec
from lockstep.store import JobStore
from tests.store_lab import (
    LEASE_S,
    REFUSED,
    Stores,
    at_once,
    begin_task,
    check_always_true,
    job_in,
    new_job,
    run_task,
    staged,
    take_commit,
)

# Death of processes


def test_what_was_answered_survives_a_kill_and_what_was_not_is_there_whole_or_not_at_all(
    store_factory: Stores,
) -> None:
    root = Path(__file__).parents[2]
    script = Path(__file__).with_name("store_in_a_loop.py")
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
    answered: list[list[str]] = []
    children = [
        subprocess.Popen(
            [sys.executable, str(script), store_factory.url, f"child{number}"],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for number in range(3)
    ]
    try:
        for child, lines in zip(children, (5, 17, 40), strict=True):
            assert child.stdout is not None
            answered += [child.stdout.readline().split() for _ in range(lines)]
            child.kill()
    finally:
        for child in children:
            child.kill()
            rest, _ = child.communicate()
            answered += [line.split() for line in rest.split("\n")[:-1]]
    store = store_factory()
    check_always_true(store)
    jobs = {job.job_id: job for job in store.list()}
    for verb, job_id, *path in answered:
        if verb == "completed":
            assert jobs[job_id].state is State.COMPLETED
        elif verb == "staged":
            assert path[0] in [file.path for file in store.manifest(job_id, "write")]
    assert all(job_id in jobs and f"{job_id}-twin" in jobs for _, job_id, *_ in answered)
    assert len(answered) >= 62
    store.close()


# Two clients and the same verb


def _at(state: State, act: Callable[[JobStore, str], Any]) -> Callable[[JobStore, str], Any]:
    """A race of `act` on a job that is in `state`."""

    def prepare(store: JobStore, job_id: str) -> Callable[[JobStore, int], Any]:
        job_in(store, state, job_id)
        return lambda client, _n: act(client, job_id)

    return prepare


def _with_lease(act: Callable[[JobStore, Lease], Any]) -> Callable[[JobStore, str], Any]:
    """A race of `act` with one lease of a running job."""

    def prepare(store: JobStore, job_id: str) -> Callable[[JobStore, int], Any]:
        store.create([new_job(job_id, 2)])
        lease = begin_task(store, job_id).lease
        return lambda client, _n: act(client, lease)

    return prepare


def _ending(store: JobStore, job_id: str) -> Callable[[JobStore, int], Any]:
    """Two committers that both hold the lease's copy, and disagree."""
    job_in(store, State.COMMITTING, job_id)
    lease = take_commit(store, job_id).lease
    events = (Event.COMMITTED, Event.KILL)
    return lambda client, n: client.end(lease, events[n], snapshot_id=5 if n == 0 else None)


def _advancing(store: JobStore, job_id: str) -> Callable[[JobStore, int], Any]:
    store.create([new_job(job_id, 1, stages=("map", "merge"))])
    run_task(store, job_id)
    return lambda client, _n: client.advance(job_id, "map", "merge", [TaskSpec({}, 1)])


def _expiring(store: JobStore, job_id: str) -> Callable[[JobStore, int], Any]:
    job_in(store, State.KILLED, job_id)
    store.released(job_id)
    return lambda client, _n: client.expire(-1.0, swept=[job_id])


RACES: dict[str, Callable[[JobStore, str], Callable[[JobStore, int], Any]]] = {
    "create": lambda _store, job_id: lambda client, _n: client.create([new_job(job_id, 3)]),
    "begin": _with_lease(lambda client, lease: client.begin(lease, LEASE_S)),
    "checkpoint": _with_lease(
        lambda client, lease: client.checkpoint(
            lease, {"row": 5}, [staged(lease.job_id)], Progress(5, 1), LEASE_S
        )
    ),
    "finish": _with_lease(
        lambda client, lease: client.finish(lease, {"row": 9}, [staged(lease.job_id)], Progress(9, 1))
    ),
    "fail": _with_lease(lambda client, lease: client.fail(lease, REFUSED, 5.0)),
    "fail for good": _with_lease(lambda client, lease: client.fail(lease, REFUSED, None)),
    "release": _with_lease(lambda client, lease: client.release(lease)),
    "heartbeat": _with_lease(lambda client, lease: client.heartbeat({lease: Progress(3, 3)}, LEASE_S)),
    "abandon": _with_lease(lambda client, lease: client.abandon(lease.worker)),
    "advance": _advancing,
    "claim": _at(State.PENDING, lambda client, job_id: client.claim("w2", 2, LEASE_S, {job_id})),
    "claim_commit": _at(
        State.COMMITTING, lambda client, job_id: client.claim_commit("w2", LEASE_S, {job_id})
    ),
    "end": _ending,
    "stop": _at(State.RUNNING, lambda client, job_id: client.stop(job_id, Event.KILL)),
    "pause": _at(State.RUNNING, lambda client, job_id: client.pause(job_id)),
    "resume": _at(State.PAUSED, lambda client, job_id: client.resume(job_id)),
    "retry": _at(State.FAILED, lambda client, job_id: client.retry(job_id)),
    "released": _at(State.KILLED, lambda client, job_id: client.released(job_id)),
    "expire": _expiring,
}


@pytest.mark.parametrize("verb", [*RACES])
def test_a_verb_that_two_clients_send_at_the_same_instant_happens_once(
    store: JobStore, store_factory: Stores, verb: str
) -> None:
    """Both are answered or one is refused; the store is as if they had come one after the other."""
    clients = [store_factory() for _ in range(2)]
    for round_ in range(6):
        job_id = f"{verb.replace(' ', '-')}-{round_}"
        act = RACES[verb](store, job_id)

        def send(n: int, act: Callable[[JobStore, int], Any] = act) -> Any:
            return act(clients[n], n)

        answers = at_once(2, send)
        refused = [answer for answer in answers if isinstance(answer, Exception)]
        assert len(refused) == (1 if verb == "end" else 0), answers
        if verb == "claim":
            assert sum(map(len, answers)) == 2
        if verb == "claim_commit":
            assert sum(answer is not None for answer in answers) == 1
        if verb == "begin":
            assert len({answer.lease.epoch for answer in answers}) == 2
        if verb == "expire":
            assert sorted(map(len, answers)) == [0, 1]
        else:
            events = Counter(entry.event for entry in store.history(job_id))
            assert {*events.values()} == {1}, events
    for client in clients:
        client.close()
