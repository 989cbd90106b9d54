"""One ClickHouse server over HTTP: questions, commands and Arrow streams, with its errors in our classes.

clickhouse-connect is the only client. Every call has a connect timeout and a receive timeout; nothing is
retried here, because a task has a budget of its own for that.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import Corrupt, Invalid, LockstepError, Retryable
from lockstep.source.clickhouse_address import Endpoint

if TYPE_CHECKING:
    import pyarrow as pa

CONNECT_TIMEOUT_S: Final = 10.0
RECEIVE_TIMEOUT_S: Final = 300.0
_TAIL_BYTES: Final = 16_384

_UNKNOWN: Final = {60, 81}
_NOT_ALLOWED: Final = {164, 291, 497}
_WRONG_LOGIN: Final = {192, 193, 194, 516}
# A checksum, a codec, a missing or an unexpected file: the part is damaged, and will be at the next try.
_DAMAGED: Final = {33, 40, 79, 107, 117, 226, 227, 228, 229, 233, 246, 271, 272, 432, 740}
_EXCEPTION: Final = re.compile(rb"Code: (\d+)\. DB::Exception: (.*)", re.DOTALL)
_NOISE: Final = re.compile(
    r"\s*\(version [^()]*(\([^()]*\))?[^()]*\)|\s*\(for url [^)]*\)|^Received .*?response: "
)


class ServerError(Exception):
    """What ClickHouse answered: its error code and its text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text

    @property
    def unknown(self) -> bool:
        """An unknown table or database."""
        return self.code in _UNKNOWN

    @property
    def not_allowed(self) -> bool:
        return self.code in _NOT_ALLOWED

    @property
    def damaged(self) -> bool:
        return self.code in _DAMAGED


class Server:
    """A lazily opened client. `find` says where the server is, each time that one is opened.

    Raises from every verb: Retryable if the server does not answer, Invalid for a wrong login, and
    ServerError for whatever else it says; `told` makes one of ours of that.
    """

    def __init__(
        self,
        find: Callable[[], Endpoint],
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        receive_timeout_s: float = RECEIVE_TIMEOUT_S,
    ) -> None:
        self._find = find
        self._connect_timeout_s = connect_timeout_s
        self._receive_timeout_s = receive_timeout_s
        self._client: Any = None
        self._label = "the ClickHouse server"

    def rows(self, sql: str, settings: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        wanted = {"output_format_json_quote_64bit_integers": 0, **(settings or {})}
        body = self._call(lambda client: client.raw_query(sql, settings=wanted, fmt="JSONEachRow"), wanted)
        return [json.loads(line) for line in body.splitlines() if line]

    def values(self, sql: str, settings: Mapping[str, Any] | None = None) -> list[list[Any]]:
        """Rows by position: a name given to a result could hide a column of the same name."""
        wanted = {"output_format_json_quote_64bit_integers": 0, **(settings or {})}
        body = self._call(
            lambda client: client.raw_query(sql, settings=wanted, fmt="JSONCompactEachRow"), wanted
        )
        return [json.loads(line) for line in body.splitlines() if line]

    def run(self, sql: str, settings: Mapping[str, Any] | None = None) -> None:
        wanted = dict(settings or {})
        self._call(lambda client: client.raw_query(sql, settings=wanted), wanted)

    def batches(self, sql: str, settings: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        """The result as Arrow batches while it arrives."""
        wanted = dict(settings)
        response = self._call(
            lambda client: client.raw_stream(sql, settings=wanted, fmt="ArrowStream"), wanted
        )
        stream = _Stream(response)
        try:
            yield from self._decoded(stream)
        finally:
            stream.close()

    def _decoded(self, stream: _Stream) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from urllib3.exceptions import HTTPError

        try:
            with pa.ipc.open_stream(pa.PythonFile(stream, mode="r")) as reader:
                yield from reader
        except (pa.ArrowException, OSError, HTTPError) as error:
            raise stream.said() or Retryable(f"the answer of {self._label} broke off: {error}") from error
        # A stream that ends between two batches is valid Arrow: an error may follow it.
        if said := stream.said():
            raise said

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _call(self, ask: Callable[[Any], Any], settings: dict[str, Any]) -> Any:
        from clickhouse_connect.driver.exceptions import ClickHouseError
        from urllib3.exceptions import HTTPError

        try:
            had_one = self._client is not None
            try:
                return self._ask(ask, settings)
            except ClickHouseError as error:
                if not (had_one and _never_sent(error)):
                    raise
            # An embedded server ends when nobody needs it, and is found or started again.
            self.close()
            return self._ask(ask, settings)
        except HTTPError as error:
            raise Retryable(f"{self._label} does not answer: {_root(error)}") from error
        except ClickHouseError as error:
            raise self._ours(error) from error

    def _ask(self, ask: Callable[[Any], Any], settings: dict[str, Any]) -> Any:
        client = self._opened()
        for name in [name for name in settings if name not in client.server_settings]:
            del settings[name]  # an older server: it behaves as if the setting were off
        return ask(client)

    def _opened(self) -> Any:
        if self._client is None:
            import clickhouse_connect

            # What it logs reaches the person as our error; a line of its own would say it twice.
            logging.getLogger("clickhouse_connect").addHandler(logging.NullHandler())
            endpoint = self._find()
            self._label = f"ClickHouse at {endpoint.label}"
            self._client = clickhouse_connect.get_client(
                host=endpoint.host,
                port=endpoint.port,
                username=endpoint.user,
                password=endpoint.password,
                secure=endpoint.secure,
                interface="https" if endpoint.secure else "http",
                compress=False,
                connect_timeout=max(1, round(self._connect_timeout_s)),
                send_receive_timeout=max(1, round(self._receive_timeout_s)),
                query_retries=0,
                autogenerate_session_id=False,
                dedicated_pool=True,
                client_name="lockstep",
            )
        return self._client

    def _ours(self, error: Exception) -> Exception:
        code = getattr(error, "code", None)
        text = _NOISE.sub("", str(error)).strip()
        if code is None and (said := _EXCEPTION.search(str(error).encode())):
            code = int(said[1])
        if code in _WRONG_LOGIN:
            return Invalid(
                f"{self._label} refuses the login: {text}",
                hint="check user and password in the address: clickhouse://user:${PASSWORD}@host:8123/db/table",
            )
        if code is None:
            # A server that moved (an embedded one that ended) is looked for again at the next call.
            self.close()
            return Retryable(
                f"{self._label} does not answer: {_root(error)}",
                hint="check that the server runs, and host and port in the address",
            )
        return ServerError(code, text)


def _root(error: BaseException) -> str:
    """Why a connection failed, without the wrappings of the client: "Connection refused"."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        reason = getattr(seen, "reason", None)
        seen = reason if isinstance(reason, BaseException) else seen.__cause__ or seen.__context__
    return _NOISE.sub("", str(error)).strip().splitlines()[0][:200]


def _never_sent(error: BaseException) -> bool:
    """True if the connection was refused, so that asking again cannot do anything twice."""
    from urllib3.exceptions import MaxRetryError, NewConnectionError

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NewConnectionError):
            return True
        inner = cause.reason if isinstance(cause, MaxRetryError) else None
        cause = inner or cause.__cause__
    return False


def told(error: ServerError, doing: str) -> LockstepError:
    """A ServerError that nobody could make more of, as one of ours."""
    if error.not_allowed:
        return Invalid(f"cannot {doing}: {error.text}", hint="grant the right, or use another user")
    if error.unknown:
        return Invalid(f"cannot {doing}: {error.text}", hint="check database and table in the address")
    if error.damaged:
        return Corrupt(f"cannot {doing}: {error.text}")
    return Retryable(f"cannot {doing}: {error.text}")


class _Stream:
    """A response as the file that Arrow reads; it remembers its end, where ClickHouse puts a late error."""

    def __init__(self, response: Any) -> None:
        self._response = response
        self._tail = b""
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        from urllib3.exceptions import ProtocolError

        try:
            data: bytes = self._response.read(size if size >= 0 else None)
        except ProtocolError as error:
            # A server that fails midway writes its error and cuts the answer off: the last bytes say why.
            partial = getattr(error.args[-1], "partial", b"")
            self._remember(partial if isinstance(partial, bytes) else b"")
            raise
        self._remember(data)
        return data

    def _remember(self, data: bytes) -> None:
        self._tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]

    def said(self) -> ServerError | None:
        """The error that ended the answer, if one did."""
        from urllib3.exceptions import HTTPError

        try:
            while self.read(1 << 16):
                pass
        except (HTTPError, OSError):
            pass  # the connection was cut after the error: what arrived is enough
        found = _EXCEPTION.search(self._tail)
        if found is None:
            return None
        text = found[2].decode("utf-8", "replace").split("\n__exception__")[0].split("\r\n__exception__")[0]
        return ServerError(int(found[1]), _NOISE.sub("", text).strip())

    def close(self) -> None:
        self.closed = True
        self._response.close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def writable(self) -> bool:
        return False
