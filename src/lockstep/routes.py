"""Which ways of the data are in doubt: tasks on them failed, and none has got through since.

A job on such a way waits for something that is away. It is tried all the same, or nobody would notice that
it is back, but not on the slots of jobs that can run.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from lockstep.job import Plan

Route = tuple[str, str]


class Routes:
    """What this worker has met on each way. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_doubt: set[Route] = set()

    def failed(self, plan: Plan) -> None:
        with self._lock:
            self._in_doubt.add(route_of(plan))

    def got_through(self, plan: Plan) -> None:
        with self._lock:
            self._in_doubt.discard(route_of(plan))

    def in_doubt(self, plan: Plan) -> bool:
        return route_of(plan) in self._in_doubt


def probes(slots: int, others: Sequence[object]) -> int:
    """How many tasks in doubt may run at a time: one beside others that can run, else all slots but one.

    That one is kept for whoever comes.
    """
    return 1 if others else max(1, slots - 1)


def route_of(plan: Plan) -> Route:
    """Where the rows come from, and where they go: machines and buckets, not single tables."""
    return _place(plan.source), _place(plan.location)


def _place(address: str) -> str:
    scheme, marker, rest = address.partition("://")
    if marker:
        return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"
    scheme, _, path = address.partition(":")
    return f"{scheme}:{path.rsplit('/', 2)[0]}" if scheme == "chdb" else scheme if path else "file"
