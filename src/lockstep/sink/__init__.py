"""Where a task puts its rows: finished files that no reader can see yet.

Implementations: `datafile` (Parquet data files in the table's location) and `run` (sorted runs beside them).
`losers` and `rejects` take what an import leaves out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lockstep.job import StagedFile

if TYPE_CHECKING:
    import pyarrow as pa


class Sink(Protocol):
    def add(self, batch: pa.RecordBatch, records: pa.Int64Array | None = None) -> None:
        """Take rows in the target's Arrow schema. Memory stays within the sink's budget.

        `records` are their numbers in the task, for a sink that has to tell rows apart later.
        """
        ...

    @property
    def full(self) -> bool:
        """True when it is time to flush: a file has reached its size."""
        ...

    @property
    def pending_bytes(self) -> int:
        """Bytes written to files that are not finished yet."""
        ...

    def flush(self) -> list[StagedFile]:
        """Finish every open file and confirm its size; all rows added so far are in what was returned
        by this and earlier calls."""
        ...

    def abort(self) -> None:
        """Give up open files; finished ones are left for the sweep."""
        ...
