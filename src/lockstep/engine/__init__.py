"""Where waves of tasks run. The one implementation is `spark`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

RunTask = Callable[[Any], None]


class Engine(Protocol):
    @property
    def slots(self) -> int:
        """How many tasks run at the same time."""
        ...

    @property
    def driver_host(self) -> str:
        """The address under which executors reach their driver."""
        ...

    @property
    def alive(self) -> bool:
        """False once nothing can run here any more."""
        ...

    def submit(self, group: str, run_task: RunTask, assignments: Sequence[Any]) -> Future[None]:
        """Run each assignment in a partition of its own; the future ends when all have.

        It fails when the engine has given up on one of them: re-run several times, or cancelled.
        """
        ...

    def cancel(self, group: str) -> None:
        """Stop a wave: its Python workers are interrupted, and killed when they do not answer."""
        ...

    def close(self) -> None:
        """Cancel what runs, and end."""
        ...
