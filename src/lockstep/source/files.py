"""Raw files as the input of an import: CSV, JSON lines, Parquet and Avro, local or not.

Files cannot be frozen, so a pin is a list of names, sizes and identities; a file that changed or went away
since is `Corrupt`, looked for before the first row and again before the last one of each task.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

from lockstep.errors import Corrupt, Invalid
from lockstep.job import ColumnMap, Json, Piece, Position, TaskSpec
from lockstep.source import Chunk, ParseOptions, PartInfo, Pin, Place, Recalled, SourceTable
from lockstep.source.files_avro import AvroRows
from lockstep.source.files_blocks import Dialect, Records
from lockstep.source.files_csv import CsvParser, dialect_of
from lockstep.source.files_describe import Described, describe_csv
from lockstep.source.files_describe_json import describe_json
from lockstep.source.files_fit import Parser
from lockstep.source.files_json import RECORDS, JsonParser
from lockstep.source.files_list import list_inputs
from lockstep.source.files_open import (
    MAGIC_BYTES,
    OpenFile,
    RawFile,
    bare_name,
    compression_of,
    identity_of,
    refuse_foreign,
    require_unchanged,
)
from lockstep.source.files_parquet import ParquetRows
from lockstep.source.files_rows import RowFormat, locate_row, plan_rows, read_rows, recall_rows
from lockstep.source.files_text import RecordFinder, TextReader, plan_text, recall_text
from lockstep.source.parquet_footer import agreed
from lockstep.storage import Storage
from lockstep.storage.file import StoredFile

if TYPE_CHECKING:
    from lockstep.config import Config

PIN_KIND: Final = "files"
FORMATS: Final = ("csv", "json", "parquet", "avro")
TEXT_FORMATS: Final = ("csv", "json")
TEXT_NULL_ADVICE: Final = "say in the --schema that it is required: records with NULL are rejects then"
ROW_NULL_ADVICE: Final = "write the files with a schema in which it cannot be NULL"
_SUFFIXES: Final = {
    ".csv": "csv",
    ".tsv": "csv",
    ".tab": "csv",
    ".txt": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".avro": "avro",
}


class FilesInput:
    """An `Input` over paths, folders, globs and s3:// addresses."""

    def __init__(self, addresses: Sequence[str], options: ParseOptions, config: Config) -> None:
        self._addresses = addresses
        self._options = options
        self._config = config
        self._storage = Storage(config.storage)
        self._finders: dict[str, RecordFinder] = {}

    @classmethod
    def of_pin(cls, pin: Json, config: Config) -> FilesInput:
        """The input that a pin was made of. Nothing is listed again: the pin says it all."""
        return cls((), ParseOptions.from_json(pin["options"]), config)

    @cached_property
    def _files(self) -> list[StoredFile]:
        return list_inputs(self._storage, self._addresses, self._config.root)

    @cached_property
    def _described(self) -> Described:
        try:
            format = self.format
            if format == "csv":
                return describe_csv(self._storage, self._raw_files(), self._options)
            if format == "json":
                return describe_json(self._storage, self._raw_files(), self._options)
            return self._describe_rows(_row_format(self._storage, format))
        except Corrupt as error:
            raise Invalid(error.message, hint=error.hint) from error

    def describe(self) -> SourceTable:
        urls = [file.url for file in self._files]
        more = f" and {len(urls) - 1} more" if len(urls) > 1 else ""
        digest = hashlib.blake2b("\n".join(urls).encode(), digest_size=16).hexdigest()
        return SourceTable(
            name=urls[0] + more,
            identity=f"files:{urls[0] if len(urls) == 1 else digest}",
            columns=self._described.columns,
            partitioning=(),
            partition_key="",
            place="in the files",
            null_advice=TEXT_NULL_ADVICE if self.format in TEXT_FORMATS else ROW_NULL_ADVICE,
        )

    def freeze(self) -> Pin:
        described = self._described
        by_url = {file.url: file for file in self._files}
        files = [
            replace(file, identity=identity_of(self._storage, by_url[file.url])) for file in described.files
        ]
        detail: Json = {
            "kind": PIN_KIND,
            "format": self.format,
            "options": replace(self._options, **described.found).to_json(),
            "layouts": [list(names) for names in described.layouts],
            "record_bytes": described.record_bytes,
            "files": [file.to_json() for file in files],
        }
        # A file with new content is another one: yesterday's import of its name is not in the way.
        pieces = [Piece(f"{file.url}#{file.size_bytes}-{file.identity}") for file in files]
        parts = [
            PartInfo(file.url, file.rows or 0, file.size_bytes, piece)
            for file, piece in zip(files, pieces, strict=True)
        ]
        return Pin(detail, parts, sum(part.rows for part in parts))

    def without(self, pin: Pin, names: Collection[str]) -> Pin:
        parts = [part for part in pin.parts if part.name not in names]
        files = [raw for raw in pin.detail["files"] if RawFile.from_json(raw).url not in names]
        return Pin({**pin.detail, "files": files}, parts, sum(part.rows for part in parts))

    def _describe_rows(self, format: RowFormat) -> Described:
        files = [RawFile(file.url, file.size_bytes, "") for file in self._files]
        columns = list(format.columns(files[0]))
        for file in files[1:]:
            columns = agreed(columns, format.columns(file), files[0].url, file.url)
        return Described(columns, (), files, 1.0)

    def plan_tasks(self, pin: Pin, task_bytes: int) -> list[TaskSpec]:
        """A limit on the records makes one task of all: only so can they be counted."""
        frozen = _Frozen.of(pin.detail)
        whole = frozen.options.limit is not None
        if (rows := _row_format_of(self._storage, frozen.format)) is not None:
            return plan_rows(frozen.files, rows, task_bytes, whole=whole)
        return plan_text(
            self._storage, frozen.files, frozen.records, task_bytes, frozen.record_bytes, whole=whole
        )

    def read(
        self,
        pin: Json,
        descriptor: Json,
        position: Position | None,
        columns: Sequence[ColumnMap],
        batch_bytes: int,
    ) -> Iterator[Chunk]:
        frozen = _Frozen.of(pin)
        files = frozen.files_of(descriptor)
        self._require_unchanged(files)
        held: Chunk | None = None
        for chunk in self._chunks(frozen, descriptor, position, columns, batch_bytes):
            if held is not None:
                yield held
            held = chunk
        if held is not None:
            # Rows read from a file that was overwritten meanwhile must not count as delivered.
            self._require_unchanged(files)
            yield held

    def _chunks(
        self,
        frozen: _Frozen,
        descriptor: Json,
        position: Position | None,
        columns: Sequence[ColumnMap],
        batch_bytes: int,
    ) -> Iterator[Chunk]:
        limit = frozen.options.limit
        if (rows := _row_format_of(self._storage, frozen.format)) is not None:
            return read_rows(frozen.files, rows, descriptor, position, columns, batch_bytes, limit)
        reader = TextReader(self._storage, frozen.files, frozen.records, limit)
        return reader.read(descriptor, position, frozen.parsers(columns), batch_bytes)

    def locate(self, pin: Json, descriptor: Json, record: int) -> Place:
        """The line of a text, or the number of a row. A task is read once for all that is asked of it."""
        if pin["format"] not in TEXT_FORMATS:
            return locate_row(_Frozen.of(pin).files, descriptor, record)
        task = json.dumps(descriptor["pieces"])
        if task not in self._finders:
            frozen = _Frozen.of(pin)
            reader = TextReader(self._storage, frozen.files, frozen.records, None)
            self._finders[task] = RecordFinder(reader, frozen.records, descriptor)
        return self._finders[task].find(record)

    def recall(
        self, pin: Json, descriptor: Json, records: Sequence[int], columns: Sequence[ColumnMap]
    ) -> Iterator[Recalled]:
        """A caller who has not taken all of them does not know yet that they are those that were frozen."""
        frozen = _Frozen.of(pin)
        files = frozen.files_of(descriptor)
        self._require_unchanged(files)
        if (rows := _row_format_of(self._storage, frozen.format)) is not None:
            yield from recall_rows(frozen.files, rows, descriptor, records, columns)
        else:
            reader = TextReader(self._storage, frozen.files, frozen.records, None)
            yield from recall_text(reader, frozen.records, descriptor, records)
        self._require_unchanged(files)

    def close(self) -> None:
        self._finders.clear()

    def _require_unchanged(self, files: Sequence[RawFile]) -> None:
        for file in files:
            require_unchanged(self._storage, file)

    @cached_property
    def format(self) -> str:
        if self._options.format is not None:
            if self._options.format not in FORMATS:
                raise Invalid(
                    f"--format {self._options.format} is not known", hint="it is " + ", ".join(FORMATS)
                )
            return self._options.format
        found = {format_of(file.url) for file in self._files} - {None}
        if len(found) > 1:
            raise Invalid(
                f"the inputs are of different formats: {', '.join(sorted(map(str, found)))}",
                hint="import them one format at a time, or say what they are with --format",
            )
        return found.pop() or "csv" if found else "csv"

    def _raw_files(self) -> list[RawFile]:
        """The files with their compression; identities are not known yet."""
        files = []
        for file in self._files:
            with OpenFile(self._storage, file.url, "none") as opened:
                head = opened.read(MAGIC_BYTES)
            compression = compression_of(file.url, head, self._options.compression)
            if compression == "none":
                refuse_foreign(file.url, head)
            files.append(RawFile(file.url, file.size_bytes, "", compression))
        return files


def _row_format_of(storage: Storage, format: str) -> RowFormat | None:
    return None if format in TEXT_FORMATS else _row_format(storage, format)


def _row_format(storage: Storage, format: str) -> RowFormat:
    return AvroRows(storage) if format == "avro" else ParquetRows(storage)


def format_of(url: str) -> str | None:
    name = bare_name(url).lower()
    return next((format for suffix, format in _SUFFIXES.items() if name.endswith(suffix)), None)


@dataclass(frozen=True)
class _Frozen:
    """A pin, read."""

    format: str
    options: ParseOptions
    layouts: Sequence[Sequence[str]]
    record_bytes: float
    files: Sequence[RawFile]

    @classmethod
    def of(cls, pin: Json) -> _Frozen:
        return cls(
            pin["format"],
            ParseOptions.from_json(pin["options"]),
            pin["layouts"],
            pin["record_bytes"],
            [RawFile.from_json(raw) for raw in pin["files"]],
        )

    def files_of(self, descriptor: Json) -> list[RawFile]:
        """The files of a task."""
        return [self.files[number] for number in dict.fromkeys(p[0] for p in descriptor["pieces"])]

    @cached_property
    def _dialect(self) -> Dialect:
        return dialect_of(self.options, self.options.delimiter or ",")

    @property
    def records(self) -> Records:
        return self._dialect if self.format == "csv" else RECORDS

    def parsers(self, columns: Sequence[ColumnMap]) -> Callable[[int], Parser]:
        made: dict[int, Parser] = {}

        def parser(layout: int) -> Parser:
            if layout not in made:
                made[layout] = self._parser(self.layouts[layout], columns)
            return made[layout]

        return parser

    def _parser(self, names: Sequence[str], columns: Sequence[ColumnMap]) -> Parser:
        if self.format == "csv":
            return CsvParser(names, columns, self._dialect, self.options.null)
        return JsonParser(names, columns)
