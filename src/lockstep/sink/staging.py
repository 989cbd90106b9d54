"""Names and files of what an import stages on its way: runs, keys, rejects, losers.

They lie beside the table's data, in a folder of the job, as Arrow files. No reader ever sees them.
"""

from __future__ import annotations

import re
from typing import Final

import pyarrow as pa

from lockstep.job import Fingerprint, Json, Lease, Plan, StagedFile
from lockstep.storage import Storage
from lockstep.storage.file import Writer

RUNS_FOLDER: Final = "lockstep-runs"
_NAME: Final = re.compile(
    r"lockstep-([0-9a-f]+)-([a-z]+)-(\d+)-(\d+)-(\d+)\.(run|keys|rejects|losers)\.arrow"
)


def runs_folder(plan: Plan, job_id: str) -> str:
    """Where everything that a job stages and does not publish lies."""
    return f"{plan.location.rstrip('/')}/{RUNS_FOLDER}/{job_id}"


def staged_url(plan: Plan, lease: Lease, sequence: int, kind: str) -> str:
    """No attempt can overwrite another's file: the name holds job, stage, task, epoch and sequence."""
    name = f"lockstep-{lease.job_id}-{lease.stage}-{lease.index:05d}-{lease.epoch:03d}-{sequence:05d}"
    return f"{runs_folder(plan, lease.job_id)}/{name}.{kind}.arrow"


def parse_staged_name(url: str) -> tuple[str, str, int, int, int] | None:
    """Job, stage, task, epoch and sequence of a file that an import staged; None for any other file."""
    match = _NAME.fullmatch(url.rpartition("/")[2])
    return (match[1], match[2], int(match[3]), int(match[4]), int(match[5])) if match else None


class ArrowFile:
    """An Arrow file being written, block by block. It counts only once `finish` has confirmed its size."""

    def __init__(
        self,
        url: str,
        schema: pa.Schema,
        storage: Storage,
        codec: str | None = None,
        *,
        hashed: bool = True,
    ) -> None:
        self._url, self._storage = url, storage
        self._writer: Writer = storage.create(url, hashed=hashed)
        options = pa.ipc.IpcWriteOptions(compression=codec)
        self._arrow = pa.ipc.new_file(self._writer, schema, options=options)
        self.rows = 0
        self.blocks = 0

    @property
    def size_bytes(self) -> int:
        return self._writer.size_bytes

    def write(self, block: pa.RecordBatch) -> None:
        self._arrow.write_batch(block)
        self.rows += block.num_rows
        self.blocks += 1

    def finish(self, kind: str, fingerprint: Fingerprint, stats: Json) -> StagedFile:
        """Raises: Corrupt if the storage does not have the file with its size; Invalid; Retryable."""
        self._arrow.close()
        self._writer.close()
        size_bytes = self._writer.size_bytes
        self._storage.confirm(self._url, size_bytes)
        return StagedFile(
            self._url, size_bytes, self.rows, self._writer.checksum, fingerprint, (), stats, kind
        )

    def abort(self) -> None:
        self._writer.abort()
