"""The executor-to-driver channel: authenticated, and a broken one means stop."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.engine.channel import Channel, ChannelServer
from lockstep.errors import Corrupt, Fenced, Retryable
from lockstep.job import Json


def echo(verb: str, body: Json) -> Any:
    if verb == "corrupt":
        raise Corrupt("bytes differ", hint="look")
    if verb == "bug":
        raise ZeroDivisionError("a bug in the driver")
    return {"verb": verb, **body}


@pytest.fixture
def server() -> Iterator[ChannelServer]:
    server = ChannelServer(echo)
    yield server
    server.close()


def test_a_call_is_answered_with_what_the_handler_returns(server: ChannelServer) -> None:
    channel = Channel(server.address, server.secret)
    assert channel.call("checkpoint", {"rows": 3}) == {"verb": "checkpoint", "rows": 3}


def test_an_error_of_the_driver_arrives_with_its_class_and_hint(server: ChannelServer) -> None:
    channel = Channel(server.address, server.secret)
    with pytest.raises(Corrupt, match="bytes differ") as caught:
        channel.call("corrupt", {})
    assert caught.value.hint == "look"


def test_an_unexpected_error_of_the_driver_is_retryable_and_keeps_the_channel(server: ChannelServer) -> None:
    channel = Channel(server.address, server.secret)
    with pytest.raises(Retryable, match="a bug in the driver"):
        channel.call("bug", {})
    assert channel.call("after", {}) == {"verb": "after"}


def test_a_stranger_without_the_secret_is_refused(server: ChannelServer) -> None:
    with pytest.raises(Fenced, match="wrong secret"):
        Channel(server.address, "00" * 32)


def test_the_secret_never_crosses_the_wire(server: ChannelServer) -> None:
    with socket.create_connection(server.address) as raw:
        (length,) = struct.unpack(">I", raw.recv(4))
        first = json.loads(raw.recv(length))
        assert set(first) == {"nonce"}
        assert first["nonce"] != server.secret


def test_a_frame_over_the_limit_is_refused_without_reading_it(server: ChannelServer) -> None:
    with socket.create_connection(server.address) as raw:
        raw.settimeout(5)
        (length,) = struct.unpack(">I", raw.recv(4))
        raw.recv(length)
        raw.sendall(struct.pack(">I", 2**32 - 1))
        assert raw.recv(1) == b""


def test_an_attempt_is_fenced_when_its_driver_is_gone() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def accept_and_die() -> None:
        connection, _ = listener.accept()
        body = json.dumps({"nonce": "00"}).encode()
        connection.sendall(struct.pack(">I", len(body)) + body)
        connection.recv(4096)
        ok = json.dumps({"ok": None}).encode()
        connection.sendall(struct.pack(">I", len(ok)) + ok)
        connection.close()
        listener.close()

    threading.Thread(target=accept_and_die, daemon=True).start()
    channel = Channel(listener.getsockname(), "00" * 32)
    with pytest.raises(Fenced):
        channel.call("checkpoint", {})
    with pytest.raises(Fenced):
        channel.call("checkpoint", {})


def test_calls_from_several_threads_get_their_own_answers(server: ChannelServer) -> None:
    channel = Channel(server.address, server.secret)
    wrong: list[int] = []

    def many(thread: int) -> None:
        for call in range(200):
            if channel.call("n", {"thread": thread, "call": call}) != {
                "verb": "n",
                "thread": thread,
                "call": call,
            }:
                wrong.append(thread)

    threads = [threading.Thread(target=many, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
