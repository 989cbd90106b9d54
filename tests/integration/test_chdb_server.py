"""The embedded ClickHouse server: real processes, clickhouse-connect as the client."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import clickhouse_connect
import pyarrow as pa
import pytest
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import DatabaseError, StreamFailureError
from urllib3.exceptions import ProtocolError

from lockstep.errors import Invalid, Retryable
from lockstep.source import chdb_launch
from lockstep.source.chdb_launch import Card, Room, connect
from lockstep.source.clickhouse_address import Endpoint

pytestmark = pytest.mark.servers


def card_of(folder: Path) -> Card:
    card = Room(folder).read_card()
    assert card is not None
    return card


def wait_until(true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def ended(pid: int) -> bool:
    """Whether the process has gone; one that its parent has not noticed yet counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except OSError:
        return True


def stop(folder: Path) -> None:
    card = Room(folder).read_card() if folder.exists() else None
    if card is not None and Room(folder).server_lives():
        os.kill(card.pid, signal.SIGTERM)
        wait_until(lambda: ended(card.pid) and not Room(folder).server_lives())


def open_client(endpoint: Endpoint, **options: Any) -> Client:
    return clickhouse_connect.get_client(
        host=endpoint.host,
        port=endpoint.port,
        username=endpoint.user,
        password=endpoint.password,
        autogenerate_session_id=False,
        dedicated_pool=True,
        **options,
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Endpoint]]:
    folder = tmp_path_factory.mktemp("served") / "data of ours"
    yield folder, connect(folder, create=True)
    stop(folder)


@pytest.fixture
def client(served: tuple[Path, Endpoint]) -> Iterator[Client]:
    with open_client(served[1]) as client:
        yield client


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "data"
    yield folder
    stop(folder)


def arrow_stream(client: Client, sql: str, **settings: Any) -> pa.Table:
    with client.raw_stream(sql, fmt="ArrowStream", settings=settings) as stream:
        return pa.ipc.open_stream(stream).read_all()


def running(client: Client, mark: str) -> int:
    return int(
        client.command(  # type: ignore[arg-type]
            "SELECT count() FROM system.processes"
            f" WHERE query LIKE '%{mark}%' AND query NOT LIKE '%system.processes%'"
        )
    )


# What clickhouse-connect asks for


def test_commands_queries_and_arrow_give_the_rows_that_were_inserted(client: Client) -> None:
    client.command(
        "CREATE TABLE verbs (id UInt32, name LowCardinality(String)) ENGINE = MergeTree ORDER BY id"
    )
    client.insert("verbs", [[1, "one"], [2, "two"]], column_names=["id", "name"])
    client.insert_arrow("verbs", pa.table({"id": pa.array([3], pa.uint32()), "name": ["three"]}))
    client.command("INSERT INTO verbs VALUES (4, 'four')")
    client.command("INSERT INTO verbs SELECT 5, 'five'")
    rows = [(1, "one"), (2, "two"), (3, "three"), (4, "four"), (5, "five")]

    assert client.ping()
    assert client.query("SELECT * FROM verbs ORDER BY id").result_rows == rows
    assert client.query_arrow("SELECT * FROM verbs ORDER BY id").to_pylist() == [
        {"id": number, "name": name} for number, name in rows
    ]
    assert arrow_stream(client, "SELECT * FROM verbs ORDER BY id").column("id").to_pylist() == [1, 2, 3, 4, 5]
    assert client.command("SELECT count() FROM verbs") == 5
    assert ("verbs",) in client.query("SHOW TABLES").result_rows
    assert client.query("SELECT * FROM verbs LIMIT 0").column_names == ("id", "name")


@pytest.mark.parametrize("encoding", [None, "gzip", "lz4", "zstd", "br"])
def test_an_insert_arrives_whole_in_every_encoding(client: Client, encoding: str | None) -> None:
    table = f"encoded_{encoding}"
    client.command(f"CREATE TABLE {table} (id UInt32, text String) ENGINE = MergeTree ORDER BY id")
    body = b"".join(b"%d,%s\n" % (number, b"x" * 50) for number in range(50_000))
    if encoding == "gzip":
        body = gzip.compress(body)
    elif encoding is not None:
        body = pa.Codec({"br": "brotli"}.get(encoding, encoding)).compress(body, asbytes=True)

    pieces = (body[at : at + 100_000] for at in range(0, len(body), 100_000))
    summary = client.raw_insert(table, ["id", "text"], pieces, fmt="CSV", compression=encoding)

    assert summary.written_rows == 50_000
    assert client.command(f"SELECT count(), sum(id), sum(length(text)) FROM {table}") == [
        "50000",
        str(sum(range(50_000))),
        str(50 * 50_000),
    ]


def test_a_result_of_many_chunks_is_one_arrow_stream_with_every_row_once(client: Client) -> None:
    table = arrow_stream(client, "SELECT number AS n, toString(n) AS s FROM numbers(500000)")

    assert table.schema.names == ["n", "s"]
    assert sorted(table.column("n").to_pylist()) == list(range(500_000))
    assert table.column("s").to_pylist() == [str(n) for n in table.column("n").to_pylist()]


def test_dictionaries_that_change_between_chunks_keep_their_values(client: Client) -> None:
    sql = "SELECT number AS n, toLowCardinality(toString(intDiv(number, 1000))) AS k FROM numbers(300000)"
    table = arrow_stream(client, sql, output_format_arrow_low_cardinality_as_dictionary=1)

    assert pa.types.is_dictionary(table.schema.field("k").type)
    assert [str(n // 1000) for n in table.column("n").to_pylist()] == table.column("k").to_pylist()


@pytest.mark.parametrize("form", ["ArrowStream", "Arrow", "CSVWithNames", "JSON"])
def test_an_empty_result_still_has_its_header(client: Client, form: str) -> None:
    body = client.raw_query("SELECT 1 AS first, 'x' AS second WHERE 0", fmt=form)

    if form == "ArrowStream":
        assert pa.ipc.open_stream(body).schema.names == ["first", "second"]
    elif form == "Arrow":
        assert pa.ipc.open_file(body).schema.names == ["first", "second"]
    else:
        assert b"first" in body
        assert b"second" in body


def test_a_format_with_a_frame_is_one_document_over_many_blocks(client: Client) -> None:
    document = json.loads(client.raw_query("SELECT number FROM numbers(200000)", fmt="JSON"))

    assert document["rows"] == len(document["data"]) == 200_000


@pytest.mark.parametrize("value", ["it's", "a\\b", "tab\tline\nreturn\r\n", "Grüße 🧊", "x" * 200_000, ""])
def test_a_value_bound_as_a_parameter_comes_back_unchanged(client: Client, value: str) -> None:
    assert client.query("SELECT {v:String} AS v", parameters={"v": value}).result_rows == [(value,)]


def test_a_request_runs_in_the_database_that_it_names(served: tuple[Path, Endpoint], client: Client) -> None:
    client.command("CREATE DATABASE IF NOT EXISTS `od'd ``name`")
    with open_client(served[1], database="od'd `name") as other:
        assert other.query("SELECT currentDatabase()").result_rows == [("od'd `name",)]
    assert client.command("SELECT currentDatabase()") == "default"


def test_settings_of_one_request_are_not_seen_by_another(client: Client) -> None:
    asked = "SELECT getSetting('max_threads'), getSetting('max_block_size')"
    before = client.query(asked).result_rows

    assert client.query(asked, settings={"max_threads": 7, "max_block_size": 111}).result_rows == [(7, 111)]
    client.command("SET max_threads = 5")
    assert client.query(asked).result_rows == before


# Errors


def test_an_error_has_the_code_and_the_text_of_clickhouse(client: Client) -> None:
    for sql, code, text in (
        ("SELECT nothing FROM system.one", 47, "Unknown expression identifier"),
        ("SELECT * FROM no_such_table", 60, "UNKNOWN_TABLE"),
        ("SELEC 1", 62, "SYNTAX_ERROR"),
        ("CREATE TABLE broken (a Int32) ENGINE = NoSuchEngine", 56, "UNKNOWN_STORAGE"),
    ):
        with pytest.raises(DatabaseError, match=text) as failure:
            client.command(sql)
        assert failure.value.code == code


def test_an_unknown_setting_is_refused_not_ignored(served: tuple[Path, Endpoint]) -> None:
    status, headers, body = ask(served[1], "/?no_such_setting=1&query=SELECT+1", served[1].password)

    assert (status, headers["X-ClickHouse-Exception-Code"]) == (400, "115")
    assert b"no_such_setting" in body


def test_an_error_in_the_middle_of_a_stream_is_never_taken_for_its_end(client: Client) -> None:
    sql = "SELECT throwIf(number = 2000000, 'planted') AS n, number FROM numbers(4000000)"

    with pytest.raises(ProtocolError), client.raw_stream(sql, fmt="ArrowStream") as stream:
        list(iter(lambda: stream.read(1 << 16), b""))
    with pytest.raises(StreamFailureError, match="planted"), client.query_row_block_stream(sql) as blocks:
        list(blocks)
    assert client.command("SELECT 1") == 1


# Who may ask


def ask(endpoint: Endpoint, path: str, password: str | None) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=10)
    headers = {} if password is None else {"X-ClickHouse-User": "default", "X-ClickHouse-Key": password}
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, response.headers, body


@pytest.mark.parametrize("password", [None, "", "wrong"])
def test_without_the_secret_nothing_is_served(served: tuple[Path, Endpoint], password: str | None) -> None:
    for path in ("/?query=SELECT+1", "/lockstep-server"):
        status, headers, body = ask(served[1], path, password)
        assert (status, headers["X-ClickHouse-Exception-Code"]) == (403, "516")
        assert served[1].password.encode() not in body


def test_only_this_machine_and_this_user_can_reach_the_server(served: tuple[Path, Endpoint]) -> None:
    folder, endpoint = served
    listening = [
        line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if " 0A " in line
    ]
    addresses = {entry.split(":")[0] for entry in listening if int(entry.split(":")[1], 16) == endpoint.port}

    assert addresses == {"0100007F"}
    assert Room(folder).card_path.stat().st_mode & 0o777 == 0o600
    assert endpoint.password not in repr(endpoint)
    assert endpoint.password not in Path(f"/proc/{card_of(folder).pid}/cmdline").read_text()


# Streams


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_slow_reader_holds_the_query_back_in_bounded_memory(
    served: tuple[Path, Endpoint], client: Client
) -> None:
    pid = card_of(served[0]).pid
    before = resident_bytes(pid)
    sql = "SELECT number, repeat('y', 1000) AS ballast FROM numbers(3000000)"
    with client.raw_stream(sql, fmt="ArrowStream", settings={"max_threads": 2}) as stream:
        most = 0
        for _ in range(60):
            stream.read(1 << 20)
            time.sleep(0.02)
            most = max(most, resident_bytes(pid))
    assert most - before < 600_000_000, "3 GB of result were not held back"


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT number, 'gone streaming' FROM numbers(100000000000)",
        "SELECT max(sipHash64(number, 'gone computing')) FROM numbers(100000000000)",
        "SELECT max(sipHash64(number, 'gone whole')) FROM numbers(100000000000) FORMAT JSON",
    ],
)
def test_a_client_that_goes_away_ends_its_query(
    served: tuple[Path, Endpoint], client: Client, sql: str
) -> None:
    mark = sql[sql.index("gone") :].split("'")[0]
    _, endpoint = served
    with socket.create_connection((endpoint.host, endpoint.port)) as raw:
        body = sql.encode()
        raw.sendall(
            f"POST /?user=default&password={endpoint.password}&max_threads=1 HTTP/1.1\r\nHost: x\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        wait_until(lambda: running(client, mark) == 1)
    wait_until(lambda: running(client, mark) == 0)


def test_many_clients_stream_while_tables_come_and_go(served: tuple[Path, Endpoint]) -> None:
    def stream(offset: int) -> int:
        with open_client(served[1]) as mine:
            return int(arrow_stream(mine, f"SELECT number FROM numbers({offset}, 200000)").num_rows)

    def create(index: int) -> int:
        with open_client(served[1]) as mine:
            mine.command(f"CREATE TABLE passing_{index} (a Int32) ENGINE = MergeTree ORDER BY a")
            mine.command(f"INSERT INTO passing_{index} SELECT number FROM numbers(10)")
            count = int(mine.command(f"SELECT count() FROM passing_{index}"))  # type: ignore[arg-type]
            mine.command(f"DROP TABLE passing_{index} SYNC")
            return count

    with ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(stream, number) for number in range(12)]
        tables = [pool.submit(create, number) for number in range(6)]
        assert [one.result() for one in streams] == [200_000] * 12
        assert [one.result() for one in tables] == [10] * 6


# The life of a server

STARTER = """
import sys, os, time
from pathlib import Path
from lockstep.source.chdb_launch import Room, connect
endpoint = connect(Path(sys.argv[1]), create=True)
print(endpoint.port, Room(Path(sys.argv[1])).read_card().pid, flush=True)
if len(sys.argv) > 2:
    time.sleep(300)
"""


def start_caller(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", STARTER, str(folder), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def somebody_calls(port: int) -> bool:
    """Whether a connection to the port is open, be it that nobody has accepted it."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(remote.endswith(f":{port:04X}") and state == "01" for _, _, remote, state, *_ in lines)


def test_callers_at_the_same_time_start_one_server(folder: Path) -> None:
    callers = [start_caller(folder) for _ in range(5)]
    answers = {caller.communicate(timeout=60)[0] for caller in callers}

    assert len(answers) == 1
    assert Room(folder).log_path.read_text().count("serving") == 1


def test_the_server_outlives_a_starter_that_is_killed_with_its_group(folder: Path) -> None:
    starter = start_caller(folder, "stay")
    assert starter.stdout is not None
    port, pid = map(int, starter.stdout.readline().split())
    os.killpg(starter.pid, signal.SIGKILL)
    starter.wait()
    starter.stdout.close()

    assert connect(folder).port == port
    assert card_of(folder).pid == pid


def test_after_sigkill_the_next_connect_serves_what_was_inserted(folder: Path) -> None:
    with open_client(connect(folder, create=True)) as client:
        client.command("CREATE TABLE kept (id UInt32) ENGINE = MergeTree ORDER BY id")
        client.command("INSERT INTO kept SELECT number FROM numbers(1000)")
    first = card_of(folder).pid
    os.kill(first, signal.SIGKILL)

    with open_client(connect(folder)) as client:
        assert client.command("SELECT count() FROM kept") == 1000
    assert card_of(folder).pid != first


def test_a_stale_card_with_a_living_process_and_a_foreign_port_is_not_believed(folder: Path) -> None:
    connect(folder, create=True)
    stop(folder)
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        room = Room(folder)
        room.write_card(Card(os.getpid(), foreign.getsockname()[1], "secret", 0.0, room.identity()))

        endpoint = connect(folder)

        assert endpoint.port != foreign.getsockname()[1]
    with open_client(endpoint) as client:
        assert client.command("SELECT 1") == 1


def test_a_copied_folder_gets_a_server_of_its_own(folder: Path, tmp_path: Path) -> None:
    with open_client(connect(folder, create=True)) as client:
        client.command("CREATE TABLE original (id UInt32) ENGINE = MergeTree ORDER BY id")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, symlinks=True)
    assert Room(copy).read_card() is None, "the card of the other folder was believed"
    try:
        assert connect(copy).port != connect(folder).port
        assert card_of(copy).pid != card_of(folder).pid
    finally:
        stop(copy)


def test_a_server_that_nobody_needs_ends_and_takes_its_card_away(folder: Path) -> None:
    connect(folder, create=True, idle_s=2)
    pid = card_of(folder).pid

    wait_until(lambda: ended(pid))

    assert Room(folder).read_card() is None
    assert "nobody needed" in Room(folder).log_path.read_text()


def test_a_stream_that_is_open_keeps_the_server_alive(folder: Path) -> None:
    with open_client(connect(folder, create=True, idle_s=1.5)) as client:
        pid = card_of(folder).pid
        with client.raw_stream("SELECT number FROM numbers(50000000)", fmt="ArrowStream") as stream:
            stream.read(1000)
            time.sleep(2.5)
            rest = pa.py_buffer(stream.read())
        assert rest.size > 50_000_000 * 8 - 1_000_000
        assert card_of(folder).pid == pid


def test_a_connect_while_the_server_closes_gets_one_that_answers(folder: Path) -> None:
    for turn in range(1, 5):
        with open_client(connect(folder, create=True)) as client:
            assert client.command("SELECT 1") == 1
        os.kill(card_of(folder).pid, signal.SIGTERM)
        wait_until(lambda turns=turn: Room(folder).log_path.read_text().count("stopping") == turns)  # type: ignore[misc]


def test_a_caller_that_is_stopped_as_it_looks_for_the_server_keeps_nobody_else_from_it(folder: Path) -> None:
    connect(folder, create=True)
    server = card_of(folder).pid
    os.kill(server, signal.SIGSTOP)
    looking = start_caller(folder)
    try:
        wait_until(lambda: somebody_calls(card_of(folder).port))
        looking.send_signal(signal.SIGSTOP)
        os.kill(server, signal.SIGCONT)
        with open_client(connect(folder, timeout_s=20)) as client:
            assert client.command("SELECT 1") == 1
    finally:
        os.kill(server, signal.SIGCONT)
        looking.kill()
        looking.communicate()


def test_a_caller_that_is_stopped_as_it_starts_a_server_keeps_others_out_for_seconds_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(folder, create=True)
    stop(folder)
    monkeypatch.setattr(chdb_launch, "_STARTER_PATIENCE_S", 0.5)
    starter = Room(folder).try_lock("start.lock")
    assert starter is not None
    with open_client(connect(folder)) as client:
        assert client.command("SELECT 1") == 1
    os.close(starter)


def test_a_server_that_closes_does_not_give_its_name_any_more(folder: Path) -> None:
    endpoint = connect(folder, create=True)
    login = {"X-ClickHouse-User": endpoint.user, "X-ClickHouse-Key": endpoint.password}
    asking = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=10)
    busy = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=10)

    def name() -> Any:
        asking.request("GET", "/lockstep-server", headers=login)
        return json.loads(asking.getresponse().read())["pid"]

    pid = card_of(folder).pid
    assert name() == pid
    busy.request("POST", "/", b"SELECT sleepEachRow(3) FROM numbers(1)", login)
    with open_client(endpoint) as client:
        wait_until(lambda: running(client, "sleepEachRow") == 1)
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: Room(folder).read_card() is None)

    assert name() is None
    asking.close()
    busy.close()
    wait_until(lambda: ended(pid))


def test_connects_at_the_moment_of_idling_never_get_a_dead_server(folder: Path) -> None:
    connect(folder, create=True, idle_s=1)
    for attempt in range(5):
        # About when it ends: a quarter of a second passes between two looks of the server.
        time.sleep(1.05 + attempt * 0.06)
        with open_client(connect(folder, idle_s=1)) as client:
            assert client.command("SELECT 1") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_breaks_streams_off_and_closes_the_folder(folder: Path, number: signal.Signals) -> None:
    with open_client(connect(folder, create=True)) as client:
        pid = card_of(folder).pid
        broken = threading.Event()

        def drain() -> None:
            with client.raw_stream("SELECT number FROM numbers(100000000000)", fmt="ArrowStream") as stream:
                try:
                    while stream.read(1 << 20):
                        pass
                except ProtocolError:
                    broken.set()

        reader = threading.Thread(target=drain)
        reader.start()
        with open_client(connect(folder)) as other:
            wait_until(lambda: running(other, "100000000000") == 1)
        os.kill(pid, number)
        wait_until(lambda: ended(pid))
        reader.join()

    assert broken.is_set()
    assert Room(folder).read_card() is None
    wait_until(lambda: not Room(folder).server_lives())
    assert Room(folder).log_path.read_text().rstrip().endswith("closed")


def test_a_server_whose_folder_was_removed_ends(folder: Path) -> None:
    connect(folder, create=True)
    pid = card_of(folder).pid

    shutil.rmtree(folder)

    wait_until(lambda: ended(pid))


# Folders that cannot be served


def test_a_missing_folder_is_refused_and_not_created(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="no chDB data folder at"):
        connect(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_of_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(Invalid, match="no chDB data folder at"):
        connect(tmp_path)
    with pytest.raises(Invalid, match="it holds other files"):
        connect(tmp_path, create=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["letter.txt"]


def test_a_folder_open_in_another_program_is_refused_naming_its_process(folder: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, chdb.state.sqlitelike as s; c = s.connect(sys.argv[1]);"
            " print(1, flush=True); sys.stdin.read()",
            str(folder),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(Retryable, match=f"open in another program .process {holder.pid}."):
        connect(folder)

    holder.communicate("")
    with open_client(connect(folder)) as client:
        assert client.command("SELECT 1") == 1
