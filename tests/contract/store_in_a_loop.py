"""Runs whole jobs on a store until it is killed; says each thing that the store has answered.

python store_in_a_loop.py URL NAME
"""

from __future__ import annotations

import sys

from lockstep.job import Event, Progress
from lockstep.store import open_store
from tests.store_lab import LEASE_S, new_job, staged


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main(url: str, name: str) -> None:
    store = open_store(url)
    for number in range(10_000):
        job_id = f"{name}-{number}"
        store.create([new_job(job_id, 3), new_job(f"{job_id}-twin", 1)])
        say("created", job_id)
        for claim in store.claim(name, 3, LEASE_S, {job_id}):
            lease = store.begin(claim.lease, LEASE_S).lease
            files = [staged(f"{job_id}-{lease.index}-{part}") for part in range(2)]
            store.checkpoint(lease, {"row": 10}, files[:1], Progress(10, 100), LEASE_S)
            say("staged", job_id, files[0].path)
            store.finish(lease, {"row": 20}, files[1:], Progress(20, 200))
            say("staged", job_id, files[1].path)
        commit = store.claim_commit(name, LEASE_S, {job_id})
        assert commit is not None
        store.end(commit.lease, Event.COMMITTED, snapshot_id=number)
        say("completed", job_id)
        store.stop(f"{job_id}-twin", Event.KILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
