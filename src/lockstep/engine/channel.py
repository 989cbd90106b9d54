"""The one channel between an executor and its driver.

It carries `begin`, `checkpoint`, `finish`, `fail` and `heartbeat`, and back comes the verdict: go on or
stop. Executors never see the store's credentials, only a secret made for this run. Frames are a
4-byte length and JSON; a client proves the secret by answering a nonce with its HMAC, so the secret
itself never crosses the wire.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from typing import Any, Final

from lockstep import errors
from lockstep.errors import Fenced, LockstepError, Retryable
from lockstep.job import Json
from lockstep.runtime import new_secret

CONNECT_TIMEOUT_S: Final = 10.0
CALL_TIMEOUT_S: Final = 600.0
MAX_FRAME_BYTES: Final = 256 * 1024 * 1024

Handler = Callable[[str, Json], Any]


def _send(connection: socket.socket, document: Any) -> None:
    body = json.dumps(document, separators=(",", ":")).encode()
    connection.sendall(struct.pack(">I", len(body)) + body)


def _receive(connection: socket.socket) -> Any:
    (length,) = struct.unpack(">I", _exactly(connection, 4))
    if length > MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return json.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, length: int) -> bytes:
    body = bytearray()
    while len(body) < length:
        piece = connection.recv(min(length - len(body), 1 << 20))
        if not piece:
            raise ConnectionError("the other side closed the channel")
        body += piece
    return bytes(body)


def _proof(secret: str, nonce: str) -> str:
    return hmac.new(bytes.fromhex(secret), bytes.fromhex(nonce), hashlib.sha256).hexdigest()


class ChannelServer:
    """The driver's end: answers each call with what `handler` returns or raises."""

    def __init__(self, handler: Handler, host: str = "127.0.0.1") -> None:
        self.secret = new_secret()
        secret = self.secret

        class Connection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                try:
                    self._serve()
                except (ConnectionError, TimeoutError, json.JSONDecodeError):
                    return  # an executor that died or a stranger: the lease deals with the rest

            def _serve(self) -> None:
                self.request.settimeout(CONNECT_TIMEOUT_S)
                nonce = new_secret()
                _send(self.request, {"nonce": nonce})
                answer = _receive(self.request)
                if not hmac.compare_digest(str(answer.get("proof")), _proof(secret, nonce)):
                    _send(self.request, {"error": {"class": "Fenced", "message": "wrong secret"}})
                    return
                _send(self.request, {"ok": None})
                self.request.settimeout(None)
                while True:
                    call = _receive(self.request)
                    _send(self.request, _answer(handler, call))

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 128

        self._server = Server((host, 0), Connection)
        self.address: tuple[str, int] = (host, self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="channel", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _answer(handler: Handler, call: Json) -> Json:
    try:
        return {"ok": handler(call["verb"], call["body"])}
    except LockstepError as error:
        return {"error": {"class": type(error).__name__, "message": error.message, "hint": error.hint}}
    except Exception as error:  # the executor must hear of every failure, or it would wait for ever
        return {"error": {"class": "Retryable", "message": f"{type(error).__name__}: {error}", "hint": None}}


class Channel:
    """The executor's end. Calls from several threads take turns.

    A broken channel means that the driver is gone: the attempt must write nothing more, so every call
    raises Fenced from then on.
    """

    def __init__(self, address: tuple[str, int], secret: str) -> None:
        self._lock = threading.Lock()
        try:
            self._socket = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = _receive(self._socket)["nonce"]
            _send(self._socket, {"proof": _proof(secret, nonce)})
            self._socket.settimeout(CALL_TIMEOUT_S)
            self._result(_receive(self._socket))
        except OSError as error:
            raise Fenced(f"the driver at {address[0]}:{address[1]} does not answer: {error}") from error

    def call(self, verb: str, body: Json) -> Any:
        with self._lock:
            try:
                _send(self._socket, {"verb": verb, "body": body})
                answer = _receive(self._socket)
            except OSError as error:
                self._socket.close()
                raise Fenced(f"the channel to the driver broke during {verb}: {error}") from error
        return self._result(answer)

    def close(self) -> None:
        self._socket.close()

    @staticmethod
    def _result(answer: Json) -> Any:
        failure = answer.get("error")
        if failure is None:
            return answer.get("ok")
        raise error_of(failure)


def error_of(failure: Json) -> LockstepError:
    """The error that the other side raised. A class that needs more than a message becomes Retryable."""
    cls = getattr(errors, str(failure["class"]), Retryable)
    if not (isinstance(cls, type) and issubclass(cls, LockstepError)) or cls is errors.Conflict:
        cls = Retryable
    return cls(str(failure["message"]), hint=failure.get("hint"))
