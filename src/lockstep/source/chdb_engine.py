"""Statements on chDB: one connection each, results in chunks, one valid stream out of many.

Opening a connection costs 0.1 ms, and settings, the current database and a running stream belong to it. So
every statement gets its own: nothing leaks from one request to the next.
"""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lockstep.runtime import new_secret

log = logging.getLogger("lockstep.chdb_server")

Buffer = bytes | memoryview

# chDB formats every chunk as a document of its own. For these, documents in a row are one document.
_CONCATENABLE: Final = frozenset(
    {
        "native",
        "tabseparated",
        "tsv",
        "tabseparatedraw",
        "tsvraw",
        "raw",
        "tskv",
        "csv",
        "rowbinary",
        "jsoneachrow",
        "jsonlines",
        "ndjson",
        "jsonstringseachrow",
        "jsoncompacteachrow",
        "jsoncompactstringseachrow",
        "lineasstring",
        "msgpack",
        "null",
    }
)
_TAIL_FORMAT: Final = re.compile(r"\bFORMAT\s+(\w+)\s*(?:\bSETTINGS\b[^()]*)?[;\s]*\Z", re.IGNORECASE)
_NAME: Final = r"(?:`(?:[^`\\]|\\.|``)+`|\"(?:[^\"\\]|\\.)+\"|\w+)"
_INSERT_WITH_DATA: Final = re.compile(
    rf"\s*(?P<head>INSERT\s+INTO\s+(?:TABLE\s+)?{_NAME}(?:\.{_NAME})?\s*(?:\([^()]*\))?)"
    r"\s*(?:SETTINGS\s+(?P<settings>[^()]*?)\s+)?\bFORMAT\s+(?P<format>\w+)(?:[ \t]*;)?[ \t]*\r?\n?",
    re.IGNORECASE,
)
_ERROR_CODE: Final = re.compile(r"Code: (\d+)\.")
_NOT_STREAMABLE: Final = "Streaming query is not supported"
_END_OF_ARROW_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"

UNKNOWN_EXCEPTION: Final = 1002


class EngineError(Exception):
    """What ClickHouse says, with its number: `Code: 60. DB::Exception: … (UNKNOWN_TABLE)`."""

    def __init__(self, text: str, code: int | None = None) -> None:
        start = text.find("Code: ")
        found = _ERROR_CODE.match(text, max(start, 0))
        self.code = code or (int(found.group(1)) if found else UNKNOWN_EXCEPTION)
        self.text = text[start:] if found else f"Code: {self.code}. DB::Exception: {text}"
        super().__init__(self.text)


@dataclass(frozen=True)
class Statement:
    """One request. `data` is the body of an INSERT, in the format that the statement names."""

    sql: str
    database: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    default_format: str = "TabSeparated"
    data: Iterator[bytes] | None = None

    @property
    def format(self) -> str:
        named = _TAIL_FORMAT.search(self.sql)
        return named.group(1) if named else self.default_format


def split_insert(head: bytes) -> tuple[str, bytes] | None:
    """`INSERT … FORMAT X` at the start of a body, and the bytes of the data after it; else None."""
    found = _INSERT_WITH_DATA.match(head.decode("latin-1"))
    if found is None:
        return None
    return head[: found.end()].decode(), head[found.end() :]


def quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def quote_name(name: str) -> str:
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"


class Execution:
    """A statement that runs on a connection of its own. Iterate `chunks`, then `close`, from one thread."""

    def __init__(self, connection: Any, statement: Statement, tag: str) -> None:
        self._connection = connection
        self._statement = statement
        self._stream: Any = None
        self.tag = tag
        self.cancellable = False
        """Whether the statement only reads: nobody misses it when its client is gone."""
        self.rows = 0
        self.written_rows = 0

    def chunks(self) -> Iterator[Buffer]:
        """The result, in pieces of some megabytes. A piece is valid until the next one is asked for.

        Raises: EngineError, also in the middle.
        """
        try:
            self._prepare()
            insert = None if self._statement.data is None else _INSERT_WITH_DATA.match(self._statement.sql)
            if insert is not None:
                self._insert(insert)
            elif self._statement.format.lower() == "arrowstream":
                yield from _one_arrow_stream(self._documents())
            else:
                yield from self._documents()
        except RuntimeError as error:
            raise EngineError(str(error)) from error

    def close(self) -> None:
        """Stop the statement if it still runs, and give its connection up."""
        stream, self._stream = self._stream, None
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            if stream is not None:
                connection.streaming_cancel_query(stream)
        except RuntimeError as error:
            # It failed or was killed: there is nothing left to cancel.
            log.debug("cannot cancel a stream: %s", error)
        finally:
            connection.close()

    def _prepare(self) -> None:
        settings = {**self._statement.settings, "log_comment": self.tag}
        self._connection.query(
            "SET " + ", ".join(f"{_setting_name(name)} = {quote(value)}" for name, value in settings.items()),
            "Null",
        )
        if self._statement.database:
            self._connection.query(f"USE {quote_name(self._statement.database)}", "Null")
        kind = self._connection.classify_query(self._statement.sql)["query_class"]
        self.cancellable = kind.name == "READ_ONLY"

    def _documents(self) -> Iterator[Buffer]:
        statement = self._statement
        params = dict(statement.params)
        name = statement.format.lower()
        if name in _CONCATENABLE or name == "arrowstream":
            try:
                self._stream = self._connection.send_query(
                    statement.sql, statement.default_format, params=params
                )
            except RuntimeError as error:
                if _NOT_STREAMABLE not in str(error):
                    raise
        if self._stream is None:
            yield from self._whole(params)
        else:
            yield from self._streamed()

    def _whole(self, params: dict[str, str]) -> Iterator[Buffer]:
        """Statements other than SELECT, and formats with a frame around all rows (JSON, Parquet)."""
        result = self._connection.query(self._statement.sql, self._statement.default_format, params=params)
        self.rows = int(result.rows_read())
        self.written_rows = int(result.rows_written())
        if result.size():
            yield result.get_memview().view()

    def _streamed(self) -> Iterator[Buffer]:
        while True:
            piece = self._connection.streaming_fetch_result(self._stream)
            rows = 0 if piece is None else int(piece.rows_read())
            if piece is not None and piece.size() and (rows or not self.rows):
                # A result without rows still has a header in some formats.
                yield piece.get_memview().view()
            self.rows += rows
            if not rows:
                self._stream = None
                return

    def _insert(self, insert: re.Match[str]) -> None:
        assert self._statement.data is not None
        if insert.group("settings"):
            self._connection.query(f"SET {insert.group('settings')}", "Null")
        inserter = self._connection.send_insert(insert.group("head"), insert.group("format"))
        try:
            for piece in self._statement.data:
                self._connection.insert_append(inserter, piece)
        except BaseException:
            self._connection.insert_cancel(inserter)
            raise
        self.written_rows = int(self._connection.insert_done(inserter).rows_written())


class Engine:
    """The open data folder of this process: chDB allows one."""

    def __init__(self, folder: Path) -> None:
        """Raises: EngineError if chDB cannot open the folder."""
        from chdb import _chdb

        self._chdb: Any = _chdb
        self._folder = str(folder)
        # The engine lives as long as one connection is open.
        self._anchor = self._connect()

    def _connect(self) -> Any:
        try:
            return self._chdb.connect(self._folder)
        except RuntimeError as error:
            raise EngineError(str(error)) from error

    def execute(self, statement: Statement) -> Execution:
        return Execution(self._connect(), statement, tag=f"lockstep-{new_secret()[:24]}")

    def value(self, sql: str) -> str:
        return str(self._anchor.query(sql, "TabSeparatedRaw").bytes().decode().rstrip("\n"))

    def kill(self, tag: str) -> None:
        """Ask the statement of `tag` to stop, also while it computes its first rows. Does not wait."""
        connection = self._connect()
        try:
            connection.query(f"KILL QUERY WHERE Settings['log_comment'] = {quote(tag)} ASYNC", "Null")
        except RuntimeError as error:
            raise EngineError(str(error)) from error
        finally:
            connection.close()

    def close(self) -> None:
        self._anchor.close()


def _setting_name(name: str) -> str:
    if not re.fullmatch(r"\w+", name):
        raise EngineError(f"Setting {name} is neither a builtin setting nor valid. (UNKNOWN_SETTING)", 115)
    return name


def _one_arrow_stream(documents: Iterator[Buffer]) -> Iterator[Buffer]:
    """Many Arrow streams of one schema as one: the first schema, all batches, one end.

    Raises: EngineError if the schema changes in between: readers could not understand the rest.
    """
    schema = b""
    for document in documents:
        view = memoryview(document)
        _, metadata_bytes = struct.unpack_from("<Ii", view, 0)
        schema_end = 8 + metadata_bytes
        if not schema:
            schema = bytes(view[:schema_end])
            yield schema
        elif bytes(view[:schema_end]) != schema:
            raise EngineError("the Arrow schema changed in the middle of the result. (LOGICAL_ERROR)", 49)
        end = len(view) - len(_END_OF_ARROW_STREAM)
        if bytes(view[end:]) != _END_OF_ARROW_STREAM:
            raise EngineError("a chunk of the Arrow stream has no end. (LOGICAL_ERROR)", 49)
        if end > schema_end:
            yield view[schema_end:end]
    if schema:
        yield _END_OF_ARROW_STREAM
