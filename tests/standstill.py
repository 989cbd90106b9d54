"""Seconds that are promised, on a machine that may be stopped for some: those in which it ran count."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

TICK_S: Final = 0.02


class Standstill:
    """How long the machine stood still meanwhile: a thread that only sleeps woke so much too late."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Standstill:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._over.wait(TICK_S):
            now = time.monotonic()
            self.seconds += max(0.0, now - before - 5 * TICK_S)
            before = now


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails if what is done here takes longer."""
    with Standstill() as standstill:
        begun = time.monotonic()
        yield
        took_s = time.monotonic() - begun - standstill.seconds
    assert took_s < seconds, f"it took {took_s:.1f} s"
