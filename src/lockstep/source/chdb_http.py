"""ClickHouse's HTTP protocol, as far as clickhouse-connect speaks it, in front of a chDB engine."""

from __future__ import annotations

import base64
import contextlib
import hmac
import io
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl, urlsplit

from lockstep.runtime import Clock, new_secret
from lockstep.source.chdb_engine import Buffer, Engine, EngineError, Execution, Statement, split_insert
from lockstep.source.chdb_launch import HOST, IDENTITY_PATH, USER

log = logging.getLogger("lockstep.chdb_server")

_MOST_CONNECTIONS: Final = 256
_MOST_STATEMENTS: Final = 64
_MOST_STATEMENT_BYTES: Final = 256 << 20
_WAIT_BUFFER_BYTES: Final = 16 << 20
_READ_BYTES: Final = 1 << 20
_SEND_BUFFER_BYTES: Final = 4 << 20

# URL parameters of the protocol. All others are settings, or parameters of the statement (`param_…`).
_NOT_SETTINGS: Final = frozenset(
    {
        "query",
        "query_id",
        "database",
        "default_format",
        "user",
        "password",
        "quota_key",
        "role",
        "session_id",
        "session_timeout",
        "session_check",
        "compress",
        "decompress",
        "buffer_size",
        "wait_end_of_query",
        "client_protocol_version",
        "close_session",
    }
)
# Loopback is faster than any compressor, and few large chunks than many small ones. What a request sets
# comes before these.
_DEFAULT_SETTINGS: Final = {
    "output_format_arrow_compression_method": "none",
    "preferred_block_size_bytes": "8000000",
}

_HTTP_STATUS: Final = {
    **dict.fromkeys((192, 193, 194, 497, 516), 403),
    **dict.fromkeys(
        (47, 53, 62, 6, 25, 26, 27, 36, 41, 42, 43, 44, 46, 63, 70, 72, 115, 349, 386, 456, 457), 400
    ),
    **dict.fromkeys((60, 81, 16, 10), 404),
    48: 501,
    159: 408,
    229: 413,
}
AUTHENTICATION_FAILED: Final = 516


class ActivityLog(Protocol):
    """Who needs the server now."""

    def greet(self) -> bool: ...

    def connection(self) -> contextlib.AbstractContextManager[None]: ...

    def running(
        self, execution: Execution, client: socket.socket
    ) -> contextlib.AbstractContextManager[None]: ...


class HttpServer(ThreadingHTTPServer):
    """A thread for each connection, up to a limit; more connections wait their turn, and so do statements."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        engine: Engine,
        activity: ActivityLog,
        secret: str,
        keep_alive_s: float,
        stopping: threading.Event,
    ) -> None:
        self.engine = engine
        self.activity = activity
        self.secret = secret
        self.keep_alive_s = keep_alive_s
        self.stopping = stopping
        self.timezone = engine.value("SELECT timezone()")
        self.version = engine.value("SELECT version()")
        self._connections = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._statements = threading.BoundedSemaphore(_MOST_STATEMENTS)
        super().__init__((HOST, 0), Handler)

    def server_bind(self) -> None:
        # The parent looks the name of the host up, which can take long, for nothing.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = HOST, int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._connections.acquire(timeout=0.1):
            if self.stopping.is_set():
                self.shutdown_request(request)
                return
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            self._connections.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            with self.activity.connection():
                super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.exception("a connection failed")

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        with self._statements:
            yield

    def wait_for_statements(self, deadline: float, clock: Clock) -> bool:
        """Whether all statements ended in time. Afterwards no new one begins."""
        return all(
            self._statements.acquire(timeout=max(0.0, deadline - clock.now()))
            for _ in range(_MOST_STATEMENTS)
        )


class ClientGone(Exception):
    """The other end closed its connection: nobody wants the answer."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "Lockstep-chDB"
    sys_version = ""
    disable_nagle_algorithm = True
    server: HttpServer

    def setup(self) -> None:
        super().setup()
        # Room for the next chunk: chDB formats it while the client takes the last one.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self.connection.settimeout(self.server.keep_alive_s)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: statements can hold secrets."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        # A slow client is back pressure, not an error: only the wait for the next request has a limit.
        self.connection.settimeout(None)
        self._body = _Body(self)
        try:
            try:
                self._route()
            except EngineError as error:
                self._send_error(error)
        except (ClientGone, ConnectionError):
            self.close_connection = True
        # What is left of a body that nobody read would be taken for the next request.
        if not self._body.drained:
            self.close_connection = True
        if not self.close_connection:
            self.connection.settimeout(self.server.keep_alive_s)

    def _route(self) -> None:
        url = urlsplit(self.path)
        params = dict(parse_qsl(url.query, keep_blank_values=True))
        if url.path in ("/ping", "/replicas_status"):
            self._send(200, b"Ok.\n")
            return
        self._authenticate(params)
        if url.path == IDENTITY_PATH:
            # Whoever asks while the server closes waits for the next one.
            stays = self.server.activity.greet() and not self.server.stopping.is_set()
            pid = os.getpid() if stays else None
            self._send(200, json.dumps({"pid": pid}).encode())
        elif url.path != "/":
            self._send(404, f"There is no handle {url.path}\n".encode())
        else:
            statement = self._statement(params)
            if statement is None:
                self._send(200, b"Ok.\n")
            else:
                self._execute(statement, params)

    def _authenticate(self, params: dict[str, str]) -> None:
        """Raises: EngineError as ClickHouse does for a wrong user or password."""
        user = self.headers.get("X-ClickHouse-User", params.get("user", ""))
        password = self.headers.get("X-ClickHouse-Key", params.get("password", ""))
        scheme, _, login = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "basic":
            with contextlib.suppress(ValueError):
                user, _, password = base64.b64decode(login).decode().partition(":")
        right = hmac.compare_digest(password.encode(), self.server.secret.encode())
        if user != USER or not right:
            raise EngineError(
                f"{user or 'default'}: Authentication failed: password is incorrect, or there is no user "
                "with such name. (AUTHENTICATION_FAILED)",
                AUTHENTICATION_FAILED,
            )

    def _statement(self, params: dict[str, str]) -> Statement | None:
        """Raises: EngineError if the request cannot be understood."""
        sql = params.get("query", "")
        data: Iterator[bytes] | None = None
        content_type = self.headers.get("Content-Type", "")
        if content_type.startswith("multipart/form-data"):
            fields = _form_fields(content_type, self._body.text())
            sql = fields.pop("query", sql)
            params.update(fields)
        elif sql and split_insert(sql.encode()):
            data = self._body.pieces()
        else:
            pieces = self._body.pieces()
            head = next(pieces, b"")
            insert = None if sql else split_insert(head)
            if insert is not None:
                sql, first = insert
                data = _chain(first, pieces)
            else:
                text = _decoded(self._body.text(head, pieces))
                sql = f"{sql}\n{text}" if sql and text else sql or text
        if not sql.strip():
            return None
        settings = {
            name: value
            for name, value in params.items()
            if name not in _NOT_SETTINGS and not name.startswith("param_")
        }
        return Statement(
            sql,
            database=params.get("database", self.headers.get("X-ClickHouse-Database", "")),
            settings={**_DEFAULT_SETTINGS, **settings},
            params={name[6:]: value for name, value in params.items() if name.startswith("param_")},
            default_format=params.get(
                "default_format", self.headers.get("X-ClickHouse-Format", "TabSeparated")
            ),
            data=data,
        )

    def _execute(self, statement: Statement, params: dict[str, str]) -> None:
        with self.server.turn():
            if self.server.stopping.is_set():
                raise EngineError("the server is closing. (ABORTED)", 236)
            execution = self.server.engine.execute(statement)
            try:
                with self.server.activity.running(execution, self.connection):
                    self._respond(execution, statement, params)
            finally:
                execution.close()

    def _respond(self, execution: Execution, statement: Statement, params: dict[str, str]) -> None:
        """Hold the answer back until there is a first piece (with `wait_end_of_query`: 16 MB).

        An error up to there is an HTTP status; a later one breaks the body off, as ClickHouse does.
        """
        most = _WAIT_BUFFER_BYTES if params.get("wait_end_of_query") == "1" else 0
        chunks = execution.chunks()
        held: list[Buffer] = []
        size, whole = 0, True
        for chunk in chunks:
            # A chunk lives only until the next one is fetched.
            held.append(bytes(chunk) if most else chunk)
            size += len(chunk)
            if size > most:
                whole = False
                break
        tag = new_secret()[:16]
        self.send_response(200)
        self.send_header(
            "Content-Type", "text/plain; charset=UTF-8" if size == 0 else "application/octet-stream"
        )
        self.send_header("X-ClickHouse-Query-Id", params.get("query_id") or execution.tag)
        self.send_header("X-ClickHouse-Format", statement.format)
        self.send_header("X-ClickHouse-Timezone", self.server.timezone)
        self.send_header("X-ClickHouse-Server-Display-Name", "lockstep-chdb")
        self.send_header("X-ClickHouse-Exception-Tag", tag)
        self.send_header("X-ClickHouse-Summary", _summary(execution, size))
        if whole:
            self.send_header("Content-Length", str(size))
            self.end_headers()
            for piece in held:
                self._write(piece)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for piece in held:
                self._write_chunk(piece)
            held.clear()
            for chunk in chunks:
                if self.server.stopping.is_set():
                    raise EngineError("the server is closing. (ABORTED)", 236)
                self._write_chunk(chunk)
        except EngineError as error:
            self._break_off(error, tag)
            return
        self._write(b"0\r\n\r\n")

    def _break_off(self, error: EngineError, tag: str) -> None:
        """The exception as ClickHouse marks it, and no end of the body: no client takes it for whole."""
        self.close_connection = True
        text = f"{error.text} (version {self.server.version})\n".encode()
        mark = tag.encode()
        self._write_chunk(
            b"\r\n__exception__\r\n"
            + mark
            + b"\r\n"
            + text
            + b"%d " % len(text)
            + mark
            + b"\r\n__exception__\r\n"
        )

    def _send_error(self, error: EngineError) -> None:
        status = _HTTP_STATUS.get(error.code, 500)
        body = f"{error.text} (version {self.server.version})\n".encode()
        self._send(status, body, {"X-ClickHouse-Exception-Code": str(error.code)})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=UTF-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if not self._body.drained:
            self.send_header("Connection", "close")
        self.end_headers()
        self._write(body)

    def _write_chunk(self, piece: Buffer) -> None:
        if len(piece):
            self._write(b"%x\r\n" % len(piece))
            self._write(piece)
            self._write(b"\r\n")

    def _write(self, piece: Buffer) -> None:
        try:
            self.connection.sendall(piece)
        except OSError as error:
            raise ClientGone from error


class _Body:
    """The body of a request: of known length or chunked, decompressed as its header says."""

    def __init__(self, handler: Handler) -> None:
        self._file = handler.rfile
        self._left = int(handler.headers.get("Content-Length") or 0)
        self._chunked = handler.headers.get("Transfer-Encoding", "").lower() == "chunked"
        self._encoding = handler.headers.get("Content-Encoding", "identity").lower()
        self.drained = not self._left and not self._chunked

    def _raw(self) -> Iterator[bytes]:
        while not self.drained:
            if self._chunked and not self._left:
                self._left = int(self._file.readline(1024).split(b";")[0], 16)
                if not self._left:
                    while self._file.readline(65537).strip():
                        pass
                    self.drained = True
                    return
            piece = self._file.read(min(self._left, _READ_BYTES))
            if not piece:
                raise ClientGone
            self._left -= len(piece)
            if not self._left:
                if self._chunked:
                    self._file.readline(8)
                else:
                    self.drained = True
            yield piece

    def pieces(self) -> Iterator[bytes]:
        if self._encoding in ("", "identity"):
            yield from self._raw()
        elif self._encoding in ("lz4", "gzip", "zstd", "br"):
            yield from _decompressed(self._raw(), self._encoding)
        else:
            raise EngineError(f"Unknown compression method {self._encoding}. (NOT_IMPLEMENTED)", 48)

    def text(self, head: bytes = b"", rest: Iterator[bytes] | None = None) -> bytes:
        whole = io.BytesIO()
        whole.write(head)
        for piece in self.pieces() if rest is None else rest:
            if whole.tell() + len(piece) > _MOST_STATEMENT_BYTES:
                raise EngineError("the statement is too large. (QUERY_IS_TOO_LARGE)", 229)
            whole.write(piece)
        return whole.getvalue()


class _PieceReader(io.RawIOBase):
    """Pieces as a file, for a decompressor that reads one."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
        size = min(len(target), len(self._rest))
        target[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def _decompressed(pieces: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    import pyarrow as pa

    name = {"br": "brotli"}.get(encoding, encoding)
    source = pa.PythonFile(io.BufferedReader(_PieceReader(pieces), _READ_BYTES), mode="r")
    try:
        with pa.CompressedInputStream(source, name) as stream:
            while piece := stream.read(_READ_BYTES):
                yield piece
    except (OSError, pa.ArrowInvalid) as error:
        raise EngineError(f"Cannot decompress the request: {error} (CANNOT_DECOMPRESS)", 271) from error


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    if first:
        yield first
    yield from rest


def _decoded(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise EngineError(f"the statement is not UTF-8: {error}. (BAD_ARGUMENTS)", 36) from error


def _form_fields(content_type: str, body: bytes) -> dict[str, str]:
    message = BytesParser(policy=HTTP).parsebytes(
        b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + body
    )
    fields: dict[str, str] = {}
    for part in message.iter_parts():
        name = part.get_param("name", header="content-disposition")
        if part.get_filename() is not None:
            raise EngineError("external data is not supported. (NOT_IMPLEMENTED)", 48)
        content = part.get_payload(decode=True)
        fields[str(name)] = _decoded(content) if isinstance(content, bytes) else str(content)
    return fields


def _summary(execution: Execution, size: int) -> str:
    counts = {
        "read_rows": execution.rows,
        "read_bytes": size,
        "written_rows": execution.written_rows,
        "written_bytes": 0,
        "result_rows": execution.rows,
        "result_bytes": size,
    }
    return json.dumps({name: str(value) for name, value in counts.items()})
