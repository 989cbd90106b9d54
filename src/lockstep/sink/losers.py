"""Rows that lose against another one with the same unique key, and who won."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.job import LOSERS, Fingerprint, Json, Lease, Plan, StagedFile
from lockstep.keys import RECORD, TASK
from lockstep.sink.staging import ArrowFile, staged_url
from lockstep.storage import Storage

FILE_BYTES: Final = 64_000_000
WINNER_TASK: Final = "winner_task"
WINNER_RECORD: Final = "winner_record"
WINNER_FILE: Final = "winner_file"
LOSER_SCHEMA: Final = pa.schema(
    [
        pa.field(TASK, pa.int32(), nullable=False),
        pa.field(RECORD, pa.int64(), nullable=False),
        pa.field(WINNER_TASK, pa.int32()),  # NULL: the winner is in the table already,
        pa.field(WINNER_RECORD, pa.int64(), nullable=False),
        pa.field(WINNER_FILE, pa.string()),  # in this file, and its record is the row there
    ]
)


class LosersSink:
    """Writes losers as they are found.

    The manifest entry knows the least of them, and how many lost to rows of the table (`stats`): to say what
    was wrong, nobody has to read the file.
    """

    def __init__(self, plan: Plan, job_id: str, stage: str, index: int, epoch: int, storage: Storage) -> None:
        self._plan, self._storage = plan, storage
        self._lease = Lease(job_id, stage, index, epoch, "")
        self._file: ArrowFile | None = None
        self._least: list[Json] = []
        self._against_table = 0
        self._sequence = 0

    def add(self, batch: pa.RecordBatch, records: pa.Int64Array | None = None) -> None:
        """Take losers. Raises: Invalid and Retryable from the storage."""
        if batch.num_rows == 0:
            return
        if self._file is None:
            url = staged_url(self._plan, self._lease, self._sequence, LOSERS)
            self._file = ArrowFile(url, LOSER_SCHEMA, self._storage)
            self._sequence += 1
        self._file.write(batch)
        self._against_table += batch.column(WINNER_TASK).null_count
        first = pc.select_k_unstable(batch, 1, sort_keys=[(TASK, "ascending"), (RECORD, "ascending")])
        (found,) = batch.take(first).to_pylist()
        self._least = [min([*self._least, found], key=lambda one: (one[TASK], one[RECORD]))]

    @property
    def full(self) -> bool:
        return self._file is not None and self._file.size_bytes >= FILE_BYTES

    @property
    def pending_bytes(self) -> int:
        return self._file.size_bytes if self._file is not None else 0

    def flush(self) -> list[StagedFile]:
        """Raises: Corrupt if the file is not there with its size; Invalid; Retryable."""
        if self._file is None:
            return []
        stats: Json = {"least": self._least[0], "against_table": self._against_table}
        finished = self._file.finish(LOSERS, Fingerprint(), stats)
        self._file, self._least, self._against_table = None, [], 0
        return [finished]

    def abort(self) -> None:
        if self._file is not None:
            self._file.abort()
