"""Records that did not fit, kept with the reason until the job's end writes them where people look."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pyarrow as pa

from lockstep.job import REJECTS, Fingerprint, Lease, Plan, StagedFile
from lockstep.sink.staging import ArrowFile, staged_url
from lockstep.source import Reject
from lockstep.storage import Storage

REJECT_SCHEMA: Final = pa.schema(
    [
        pa.field("record", pa.int64(), nullable=False),
        pa.field("line", pa.int64()),
        pa.field("column", pa.string()),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("raw", pa.string(), nullable=False),
    ]
)


class RejectSink:
    """The rejects of one attempt. More than the job allows in this task alone end it at once."""

    def __init__(self, plan: Plan, lease: Lease, storage: Storage) -> None:
        self._plan, self._lease, self._storage = plan, lease, storage
        self._most = plan.terms.max_rejects if plan.terms else 0
        self._pending: list[Reject] = []
        self._seen = 0
        self._sequence = 0

    @property
    def over(self) -> bool:
        """True when this attempt alone has met more rejects than the job allows."""
        return self._seen > self._most

    def add(self, rejects: Iterable[Reject]) -> None:
        """Beyond the limit no more than one is kept: it says why the job fails."""
        for reject in rejects:
            self._seen += 1
            if self._seen <= self._most + 1:
                self._pending.append(reject)

    @property
    def last(self) -> Reject:
        """The newest one that was kept since the last flush."""
        return self._pending[-1]

    def flush(self) -> list[StagedFile]:
        if not self._pending:
            return []
        rows = [vars(reject) for reject in self._pending]
        file = ArrowFile(
            staged_url(self._plan, self._lease, self._sequence, REJECTS), REJECT_SCHEMA, self._storage
        )
        file.write(pa.RecordBatch.from_pylist(rows, schema=REJECT_SCHEMA))
        self._sequence += 1
        self._pending = []
        return [file.finish(REJECTS, Fingerprint(), {})]
