"""Parquet files in batches of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.storage import Storage, local_path

PROBE_ROWS: Final = 1024
MOST_BATCH_ROWS: Final = 1 << 20
READ_BUFFER_BYTES: Final = 1 << 20


def open_parquet(storage: Storage, url: str) -> pq.ParquetFile:
    """Open a Parquet file for reading in bounded memory, its checksums verified. Raises: as the storage."""
    path = local_path(url)
    return pq.ParquetFile(
        pa.OSFile(str(path)) if path is not None else storage.open(url),
        # Column chunks are read a buffer at a time: memory does not grow with the row group.
        pre_buffer=False,
        buffer_size=READ_BUFFER_BYTES,
        # Nanoseconds in 64 bits wrap around in silence for the far dates that INT96 can hold.
        coerce_int96_timestamp_unit="us",
        page_checksum_verification=True,
    )


class RowGroupReader:
    """Reads row groups in batches of about `batch_bytes`, learning the width of a row as it goes."""

    def __init__(self, batch_bytes: int) -> None:
        self._batch_bytes = batch_bytes
        self._row_bytes: float | None = None

    def read(self, opened: pq.ParquetFile, group: int, wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The wanted columns of a row group, as the file has them; without columns, only the row counts."""
        rows = opened.metadata.row_group(group).num_rows
        if not wanted:
            for start in range(0, rows, MOST_BATCH_ROWS):
                yield pa.record_batch({"": pa.nulls(min(MOST_BATCH_ROWS, rows - start))})
            return
        if self._row_bytes is None:
            self._row_bytes = self._probe(opened, group, wanted, rows)
        delivered_bytes = delivered_rows = 0
        for batch in opened.iter_batches(self._batch_rows(self._row_bytes), [group], wanted):
            delivered_bytes += batch.nbytes
            delivered_rows += batch.num_rows
            yield batch
        if delivered_rows:
            self._row_bytes = delivered_bytes / delivered_rows

    def _probe(self, opened: pq.ParquetFile, group: int, wanted: Sequence[str], rows: int) -> float:
        """Decode a few rows: the footer knows encoded sizes only, and dictionaries hide wide rows."""
        encoded = opened.metadata.row_group(group).total_byte_size / max(1, rows)
        few = min(PROBE_ROWS, self._batch_rows(encoded))
        first = next(opened.iter_batches(few, [group], wanted), None)
        return (
            float(first.nbytes / first.num_rows) if first is not None and first.num_rows else float(encoded)
        )

    def _batch_rows(self, row_bytes: float) -> int:
        return int(min(MOST_BATCH_ROWS, max(1, self._batch_bytes // max(1.0, row_bytes))))
