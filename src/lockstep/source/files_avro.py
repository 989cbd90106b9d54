"""Avro files as the input of an import.

An Avro file is a header and blocks of records, each with its count and size, so it is split between blocks:
a stretch is read as the header followed by its bytes. Timestamps are instants, local timestamps are not;
enums are texts. A union is fine where it is a type or null.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Final, cast

import pyarrow as pa

from lockstep.errors import Corrupt, Invalid, LockstepError
from lockstep.source import SourceColumn
from lockstep.source.files_avro_types import AvroType, read_types
from lockstep.source.files_open import RawFile
from lockstep.source.files_rows import RowPiece, Stretch
from lockstep.source.parquet_types import exact_type
from lockstep.storage import Storage

MAGIC: Final = b"Obj\x01"
SYNC_BYTES: Final = 16
STRETCH_BYTES: Final = 4 << 20
RECORDS_AT_ONCE: Final = 1 << 16


class AvroRows:
    """Stretches are bytes between blocks, and marks are offsets in the file."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def columns(self, file: RawFile) -> Sequence[SourceColumn]:
        columns = []
        for name, kind in self._types(file).items():
            if kind.arrow is None:
                columns.append(SourceColumn(name, kind.text, None, kind.nullable, None, kind.problem))
                continue
            exact = exact_type(kind.arrow)
            columns.append(
                SourceColumn(name, kind.text, exact.type, kind.nullable, exact.lossy_type, exact.problem)
            )
        return columns

    def stretches(self, file: RawFile) -> Iterator[Stretch]:
        with self._open(file) as opened:
            start = end = len(_header(opened, file.url))
            rows = 0
            for after, count in _blocks(opened, end, file):
                end, rows = after, rows + count
                if end - start >= STRETCH_BYTES:
                    yield Stretch(start, end, rows, end - start)
                    start, rows = end, 0
            if rows:
                yield Stretch(start, end, rows, end - start)

    def batches(
        self, file: RawFile, piece: RowPiece, mark: int, names: Sequence[str], batch_bytes: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        types = self._types(file)
        start = max(mark, piece.start)
        if start >= piece.end:
            return
        with self._open(file) as opened:
            header = _header(opened, file.url)
            for after, records in self._decoded(opened, file, header, start, piece.end, batch_bytes):
                arrays = {
                    name: types[name].array([record[name] for record in records])
                    for name in dict.fromkeys(names)
                }
                if arrays:
                    yield after, pa.record_batch(arrays)
                else:
                    yield after, pa.record_batch({"": pa.nulls(len(records))})

    def _decoded(
        self, opened: BinaryIO, file: RawFile, header: bytes, start: int, end: int, batch_bytes: int
    ) -> Iterator[tuple[int, list[Any]]]:
        """Records of some blocks at a time, each with the offset after them."""
        from fastavro import block_reader

        opened.seek(start)
        records: list[Any] = []
        held = 0
        try:
            for block in block_reader(cast(BinaryIO, _Stretch(header, opened, end - start))):
                records += block
                held += block.size
                after = start + block.offset + block.size - len(header)
                if held >= batch_bytes or len(records) >= RECORDS_AT_ONCE:
                    yield after, records
                    records, held = [], 0
        except LockstepError:
            raise
        except Exception as error:  # fastavro raises whatever the decoding of broken bytes runs into
            raise Corrupt(
                f"cannot read {file.url} as Avro: {type(error).__name__} {error}".rstrip(),
                hint="it may have been cut short: copy it again, and import it anew",
            ) from error
        if records:
            yield end, records

    def _types(self, file: RawFile) -> dict[str, AvroType]:
        from fastavro import reader

        with self._open(file) as opened:
            header = _header(opened, file.url)
        schema = json.loads(reader(io.BytesIO(header)).metadata["avro.schema"])
        if not isinstance(schema, dict) or schema.get("type") != "record":
            raise Invalid(f"{file.url} holds no records, but {json.dumps(schema)[:80]}")
        return read_types(schema)

    def _open(self, file: RawFile) -> BinaryIO:
        return self._storage.open(file.url)


class _Stretch(io.RawIOBase):
    """A header, and then the next `length` bytes of a file."""

    def __init__(self, header: bytes, file: BinaryIO, length: int) -> None:
        super().__init__()
        self._header, self._file, self._left = io.BytesIO(header), file, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        found = self._header.read(size)
        wanted = self._left if size < 0 else min(size - len(found), self._left)
        if wanted:
            rest = self._file.read(wanted)
            self._left -= len(rest)
            found += rest
        self._at += len(found)
        return found

    def tell(self) -> int:
        return self._at


def _header(opened: BinaryIO, url: str) -> bytes:
    """The bytes up to the first block. Raises: Invalid if it is no Avro file."""
    try:
        if opened.read(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin as one")
        while (count := _long(opened)) != 0:
            if count < 0:
                _long(opened)
            for _ in range(2 * abs(count)):
                opened.seek(_long(opened), io.SEEK_CUR)
        end = opened.tell() + SYNC_BYTES
        opened.seek(0)
        header = opened.read(end)
        if len(header) != end:
            raise ValueError("it ends in its header")
    except ValueError as error:
        raise Invalid(f"cannot read {url} as Avro: {error}") from error
    return header


def _blocks(opened: BinaryIO, start: int, file: RawFile) -> Iterator[tuple[int, int]]:
    """The end of each block, and its records. Raises: Invalid for a file that ends within a block."""
    at = start
    while at < file.size_bytes:
        opened.seek(at)
        try:
            count, size_bytes = _long(opened), _long(opened)
        except ValueError as error:
            raise Invalid(f"cannot read {file.url} as Avro: {error}") from error
        at = opened.tell() + size_bytes + SYNC_BYTES
        if count < 0 or size_bytes < 0 or at > file.size_bytes:
            raise Invalid(
                f"cannot read {file.url} as Avro: it ends within a block of records",
                hint="it may have been cut short: copy it again",
            )
        yield at, count


def _long(opened: BinaryIO) -> int:
    """Avro's number of variable length. Raises: ValueError at the end of the file."""
    value = shift = 0
    while True:
        byte = opened.read(1)
        if not byte or shift > 63:
            raise ValueError("it ends in the middle of a number")
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return (value >> 1) ^ -(value & 1)
        shift += 7
