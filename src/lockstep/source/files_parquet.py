"""Parquet files as the input of an import."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from lockstep.errors import Corrupt, Invalid
from lockstep.source import SourceColumn
from lockstep.source.files_open import RawFile
from lockstep.source.files_rows import RowPiece, Stretch
from lockstep.source.parquet_batches import RowGroupReader, open_parquet
from lockstep.source.parquet_footer import Footer, read_footer, unreadable
from lockstep.storage import Storage


class ParquetRows:
    """Stretches are row groups, and marks are rows of the piece."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def columns(self, file: RawFile) -> Sequence[SourceColumn]:
        return self._footer(file).columns

    def stretches(self, file: RawFile) -> Iterator[Stretch]:
        groups = self._footer(file).groups
        decoded = sum(size_bytes for _, size_bytes in groups) or 1
        for number, (rows, size_bytes) in enumerate(groups):
            if rows:
                yield Stretch(number, number + 1, rows, file.size_bytes * size_bytes // decoded)

    def batches(
        self, file: RawFile, piece: RowPiece, mark: int, names: Sequence[str], batch_bytes: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        reader = RowGroupReader(batch_bytes)
        wanted = list(dict.fromkeys(names))
        done = 0
        try:
            with open_parquet(self._storage, file.url) as opened:
                for group in range(piece.start, piece.end):
                    rows = opened.metadata.row_group(group).num_rows
                    if done + rows <= mark:
                        done += rows
                        continue
                    for batch in reader.read(opened, group, wanted):
                        done += batch.num_rows
                        if done > mark:
                            yield done, batch.slice(max(0, batch.num_rows - (done - mark)))
        except (pa.ArrowException, OSError) as error:
            raise unreadable(error, file.url, Corrupt) from error
        if done != piece.rows:
            raise Corrupt(f"{file.url} delivered {done} rows, not {piece.rows} as planned")

    def _footer(self, file: RawFile) -> Footer:
        try:
            with open_parquet(self._storage, file.url) as opened:
                return read_footer(opened)
        except (pa.ArrowException, OSError) as error:
            raise unreadable(error, file.url, Invalid) from error
