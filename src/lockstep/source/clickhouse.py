"""ClickHouse as a source: a server over HTTP, or an embedded data folder (chDB) behind the same protocol.

A partition is frozen by hard links (`clickhouse_pin`), cut into ranges of row offsets inside its parts, and
read range by range: a position is the end of a range, so the order of rows inside one does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

from lockstep.config import Config
from lockstep.errors import Corrupt, Invalid, Retryable
from lockstep.job import ColumnMap, Json, Position, TaskSpec, split_evenly
from lockstep.source import Chunk, FoundPin, PartitionInfo, Pin, SourceColumn, SourceTable
from lockstep.source.chdb_launch import START_TIMEOUT_S, connect
from lockstep.source.clickhouse_http import Endpoint, Server, ServerError, told
from lockstep.source.clickhouse_keys import engine_clauses, granule_rows, partition_fields, sorting_fields
from lockstep.source.clickhouse_pin import (
    Part,
    active_parts,
    check_parts,
    check_settled,
    drop,
    found_pins,
    freeze,
    give_up,
    part_json,
    table_name,
    visible_rows,
)
from lockstep.source.clickhouse_types import (
    ChType,
    cast_expression,
    iceberg_type,
    natural_array,
    parse_type,
    quote_name,
    quote_text,
)

if TYPE_CHECKING:
    import pyarrow as pa

GRANULE_ROWS: Final = 8192
RANGE_BYTES: Final = 64_000_000
"""Uncompressed bytes that one query reads: its overhead is small then, and little is redone after a crash."""
BLOCK_BYTES: Final = 16_000_000
"""What the server sends at a time: measured, larger ones are slower."""
HEAVY_BLOCK_ROWS: Final = 64

_ADDRESS: Final = re.compile(
    r"(?P<scheme>clickhouses?)://(?:(?P<user>[^:@/]*)(?::(?P<password>.*))?@)?"
    r"(?P<host>\[[^\]]+\]|[^:/@\[\]]+)(?::(?P<port>\d+))?/(?P<database>[^/]+)/(?P<table>[^/]+)",
    re.DOTALL,
)
# What was in the part when it was noted counts: not what a mutation or a patch makes of it later.
_READ_SETTINGS: Final = {"apply_mutations_on_fly": 0, "apply_patch_parts": 0}
_ARROW_SETTINGS: Final = {
    **_READ_SETTINGS,
    "output_format_arrow_string_as_string": 0,
    "output_format_arrow_fixed_string_as_fixed_byte_array": 1,
    "output_format_arrow_low_cardinality_as_dictionary": 1,
    "output_format_arrow_use_64_bit_indexes_for_dictionary": 0,
    "output_format_arrow_compression_method": "none",
    "cancel_http_readonly_queries_on_client_close": 1,
}


@dataclass(frozen=True)
class Place:
    """Where a table is: an endpoint or a data folder, a database and a table."""

    scheme: str
    database: str
    table: str
    folder: Path | None = None
    endpoint: Endpoint | None = None

    @property
    def identity(self) -> str:
        """The source without user and password."""
        if self.folder is not None:
            return f"chdb:{self.folder}/{quote(self.database, safe='')}/{quote(self.table, safe='')}"
        if self.endpoint is None:
            raise Invalid("an address needs a host or a folder")
        where = f"{quote(self.database, safe='')}/{quote(self.table, safe='')}"
        return f"{self.scheme}://{self.endpoint.label}/{where}"


def parse_address(address: str, root: Path) -> Place:
    """Read `clickhouse://user:password@host:port/db/table` or `chdb:PATH/db/table`, percent-decoded.

    Raises: Invalid; the message never holds the password.
    """
    if address.startswith("chdb:"):
        path, _, rest = address.removeprefix("chdb:").rstrip("/").rpartition("/")
        folder, _, database = path.rpartition("/")
        if not (folder and database and rest):
            raise Invalid(f'"{address}" is not chdb:PATH/db/table', hint="example: chdb:./data/shop/events")
        return Place("chdb", unquote(database), unquote(rest), folder=(root / unquote(folder)).resolve())
    match = _ADDRESS.fullmatch(address.rstrip("/"))
    if match is None:
        raise Invalid(
            "the source is not clickhouse://user:password@host:port/db/table",
            hint="percent-encode special characters; ${NAME} keeps a password out of the address",
        )
    secure = match["scheme"] == "clickhouses"
    endpoint = Endpoint(
        match["host"].strip("[]"),
        int(match["port"] or (8443 if secure else 8123)),
        unquote(match["user"] or "default"),
        unquote(match["password"] or ""),
        secure,
    )
    return Place(match["scheme"], unquote(match["database"]), unquote(match["table"]), endpoint=endpoint)


class ClickHouseSource:
    """A MergeTree table. Opening one does nothing; the first question connects."""

    def __init__(self, address: str, config: Config) -> None:
        self._place = parse_address(address, config.root)
        self._pin_database = config.clickhouse.get("pin_database") or self._place.database
        self._server = Server(self._find)
        self._types: dict[str, ChType] | None = None

    @property
    def _table(self) -> tuple[str, str]:
        return self._place.database, self._place.table

    @property
    def _name(self) -> str:
        return f"{self._place.database}.{self._place.table}"

    def _find(self, timeout_s: float = START_TIMEOUT_S) -> Endpoint:
        """Where the server is; an embedded one that does not run is started."""
        if self._place.endpoint is not None:
            return self._place.endpoint
        found = connect(self._place.folder or Path(), timeout_s=timeout_s)
        return Endpoint(found.host, found.port, found.user, found.password)

    # What is there

    def describe(self) -> SourceTable:
        try:
            engine = self._engine()
            types = self._column_types()
            zone = str(self._server.rows("SELECT timezone() AS zone")[0]["zone"])
        except ServerError as error:
            raise told(error, f"describe {self._name}") from error
        key = engine_clauses(engine["engine_full"]).get("PARTITION BY", "")
        partitioning, reason = partition_fields(key, types, zone)
        return SourceTable(
            name=self._name,
            identity=_identity(engine["uuid"], self._place),
            columns=[_source_column(name, kind) for name, kind in types.items()],
            partitioning=partitioning,
            partition_key=f"{key} ({reason})" if reason else key,
            sorting=sorting_fields(engine_clauses(engine["engine_full"]).get("ORDER BY", ""), types),
        )

    def partitions(self) -> list[PartitionInfo]:
        try:
            self._engine()
            parts = active_parts(self._server, *self._table)
            visible = visible_rows(self._server, self._table, parts, dict(_READ_SETTINGS))
        except ServerError as error:
            raise told(error, f"list the partitions of {self._name}") from error
        grouped: dict[str, list[Part]] = {}
        for part in parts:
            grouped.setdefault(part.partition_id, []).append(part)
        return [
            PartitionInfo(
                partition_id,
                ours[0].label,
                sum(visible[part.name] for part in ours),
                sum(part.size_bytes for part in ours),
                [part.info() for part in ours],
            )
            for partition_id, ours in grouped.items()
        ]

    def _engine(self) -> dict[str, Any]:
        """Raises: Invalid if the table is unknown, or has no parts to freeze."""
        found = self._server.rows(
            "SELECT engine, engine_full, toString(uuid) AS uuid FROM system.tables"
            f" WHERE database = {quote_text(self._place.database)} AND name = {quote_text(self._place.table)}"
        )
        if not found:
            raise Invalid(f"there is no table {self._name}", hint=self._nearby())
        if not found[0]["engine"].endswith("MergeTree"):
            raise Invalid(
                f"{self._name} is a {found[0]['engine']}; only MergeTree tables have parts to freeze",
                hint="copy it into a MergeTree table (CREATE TABLE … ENGINE = MergeTree … AS SELECT …)",
            )
        return found[0]

    def _nearby(self) -> str:
        database = quote_text(self._place.database)
        tables = self._server.rows(f"SELECT name FROM system.tables WHERE database = {database} LIMIT 20")
        if tables:
            return f"{self._place.database} has: " + ", ".join(row["name"] for row in tables)
        names = self._server.rows("SELECT name FROM system.databases LIMIT 20")
        return "databases there: " + ", ".join(row["name"] for row in names)

    def _column_types(self) -> dict[str, ChType]:
        if self._types is None:
            rows = self._server.rows(
                "SELECT name, type FROM system.columns"
                f" WHERE database = {quote_text(self._place.database)}"
                f" AND table = {quote_text(self._place.table)}"
                " AND default_kind NOT IN ('ALIAS', 'EPHEMERAL') ORDER BY position"
            )
            for row in rows:
                if row["name"] in {"_part", "_part_offset"}:
                    raise Invalid(
                        f'{self._name} has a column "{row["name"]}", which hides ClickHouse\'s own',
                        hint="rename the column; Lockstep finds its place in a part by it",
                    )
            self._types = {row["name"]: parse_type(row["type"]) for row in rows}
        return self._types

    # Freezing

    def pin(self, name: str, partition_id: str, parts: Sequence[str] | None, *, frozen: bool = True) -> Pin:
        try:
            engine = self._engine()
            # An unknown partition or part is refused before anything is created.
            there = active_parts(self._server, *self._table, partition_id)
            check_parts(there, self._table, partition_id, parts)
            check_settled(self._server, *self._table, partition_id)
            if not frozen:
                noted = [(part, part) for part in there if parts is None or part.name in parts]
                return self._pinned(self._table, noted, partition_id, engine, frozen=False)
            pin = (self._pin_database, name)
            pairs = freeze(self._server, self._table, pin, partition_id, parts).pairs
            try:
                return self._pinned(pin, pairs, partition_id, engine, frozen=True)
            except BaseException:
                give_up(self._server, pin)
                raise
        except ServerError as error:
            raise told(error, f"freeze {self._name} partition {partition_id}") from error

    def _pinned(
        self,
        table: tuple[str, str],
        pairs: Sequence[tuple[Part, Part]],
        partition_id: str,
        engine: Mapping[str, Any],
        *,
        frozen: bool,
    ) -> Pin:
        copies = [copy for copy, _ in pairs]
        visible = visible_rows(self._server, table, copies, dict(_READ_SETTINGS))
        granule = granule_rows(engine["engine_full"])
        detail = {
            "database": table[0],
            "table": table[1],
            "frozen": frozen,
            "source": self._name,
            "source_uuid": engine["uuid"],
            "server": self._server.values("SELECT hostName()")[0][0],
            "partition_id": partition_id,
            "parts": [part_json(copy, origin, visible[copy.name], granule) for copy, origin in pairs],
        }
        return Pin(detail, [origin.info() for _, origin in pairs], sum(visible.values()))

    def unpin(self, pin: Json, timeout_s: float) -> None:
        if not pin["frozen"]:
            return
        # Three requests at most (connect, hello, drop) share the time; an embedded server may first have to
        # be started in it.
        share_s = timeout_s / 3
        server = Server(lambda: self._find(timeout_s), connect_timeout_s=share_s, receive_timeout_s=share_s)
        try:
            drop(server, (pin["database"], pin["table"]))
        except ServerError as error:
            if not error.unknown:
                raise told(error, f"drop the frozen copy {pin['database']}.{pin['table']}") from error
        finally:
            server.close()

    def pins(self) -> list[FoundPin]:
        """Every frozen copy of ours beside this table, whichever table or job it belongs to.

        The table itself may be gone. Raises: Retryable if the server does not answer; Invalid.
        """
        databases = ", ".join(quote_text(name) for name in {self._pin_database, self._place.database})
        try:
            return found_pins(self._server, databases)
        except ServerError as error:
            raise told(error, f"list the frozen copies beside {self._name}") from error

    def close(self) -> None:
        self._server.close()

    # What the rows are like

    def distinct_rows(self, pin: Pin, columns: Sequence[ColumnMap]) -> Iterator[pa.RecordBatch]:
        selected = _types_of(columns)
        if not selected:
            return
        sql = f"SELECT DISTINCT {_select_list(selected)} FROM {_from(pin.detail)}"
        for batch in self._asked(sql, pin.detail):
            yield self._conformed(batch, selected, columns)

    def bounds(self, pin: Pin, columns: Sequence[ColumnMap]) -> pa.Table:
        import pyarrow as pa

        from lockstep.schema import arrow_schema

        selected = _types_of(columns)
        schema = arrow_schema(columns)
        if pin.rows == 0 or not selected:
            return schema.empty_table()
        rows = []
        for extreme in ("min", "max"):
            picked = ", ".join(
                cast_expression(f"{extreme}({quote_name(name)})", _may_be_null(kind))
                for name, kind in selected.items()
            )
            rows += list(self._asked(f"SELECT {picked} FROM {_from(pin.detail)}", pin.detail))
        found = pa.Table.from_batches([self._conformed(batch, selected, columns) for batch in rows])
        return self._with_null_row(found, pin, selected, columns)

    def _with_null_row(
        self, found: pa.Table, pin: Pin, selected: Mapping[str, ChType], columns: Sequence[ColumnMap]
    ) -> pa.Table:
        import pyarrow as pa

        counts = ", ".join(f"countIf(isNull({quote_name(name)}))" for name in selected)
        try:
            row = self._server.values(f"SELECT {counts} FROM {_from(pin.detail)}", _READ_SETTINGS)[0]
        except ServerError as error:
            raise self._broken(error, pin.detail) from error
        empty = {name for name, count in zip(selected, row, strict=True) if count}
        if not empty:
            return found
        values = [
            pa.nulls(1, field.type)
            if column.source in empty
            else found.column(at).slice(0, 1).combine_chunks().cast(field.type)
            for at, (column, field) in enumerate(zip(columns, found.schema, strict=True))
        ]
        return pa.concat_tables([found, pa.Table.from_arrays(values, schema=found.schema)])

    # Tasks

    def plan_tasks(self, pin: Pin, task_bytes: int) -> list[TaskSpec]:
        tasks: list[TaskSpec] = []
        segments: list[list[Any]] = []
        held_bytes = 0
        for part in pin.detail["parts"]:
            for segment, size_bytes in self._segments(pin.detail, part, task_bytes):
                if segments and held_bytes + size_bytes > task_bytes:
                    tasks.append(_task(segments, held_bytes))
                    segments, held_bytes = [], 0
                segments.append(segment)
                held_bytes += size_bytes
        if segments or not tasks:
            tasks.append(_task(segments, held_bytes))
        return tasks

    def _segments(self, pin: Json, part: Json, task_bytes: int) -> Iterator[tuple[list[Any], int]]:
        """Ranges of a part, `[part, from, to, rows that are there]`, each with its bytes."""
        size_bytes = max(1, part["uncompressed_bytes"])
        granules = -(-part["rows"] // GRANULE_ROWS)
        most = max(1, granules * task_bytes // size_bytes)
        ranges = [
            (first * GRANULE_ROWS, min(last * GRANULE_ROWS, part["rows"]))
            for first, last in split_evenly(granules, most)
        ]
        for start, end in ranges:
            rows = end - start
            if len(ranges) == 1:
                rows = part["visible"]
            elif part["has_deletes"]:
                rows = self._count(pin, part["name"], start, end)
            yield [part["name"], start, end, rows], size_bytes * (end - start) // max(1, part["rows"])

    def _count(self, pin: Json, part: str, start: int, end: int) -> int:
        try:
            where = f"{table_name(pin['database'], pin['table'])}{_range(part, start, end)}"
            return int(self._server.values(f"SELECT count() FROM {where}", _READ_SETTINGS)[0][0])
        except ServerError as error:
            raise self._broken(error, pin, part) from error

    # Reading

    def read(
        self,
        pin: Json,
        descriptor: Json,
        position: Position | None,
        columns: Sequence[ColumnMap],
        batch_bytes: int,
    ) -> Iterator[Chunk]:
        selected = _types_of(columns)
        parts = {part["name"]: part for part in pin["parts"]}
        at, offset, seen = _start(position)
        for index, (name, start, end, rows) in list(enumerate(descriptor["segments"]))[at:]:
            part = parts[name]
            offset = start if offset is None else offset
            for first, last in _ranges(part, offset, end):
                held: pa.RecordBatch | None = None
                for batch in self._read_range(pin, part, first, last, selected, columns, batch_bytes):
                    if held is not None:
                        yield Chunk(held)
                    held = batch
                    seen += batch.num_rows
                if last == end:
                    self._check_count(pin, part, rows, seen)
                if held is not None:
                    yield Chunk(held, {"segment": index, "offset": last, "rows": seen})
            offset, seen = None, 0

    def _read_range(
        self,
        pin: Json,
        part: Json,
        first: int,
        last: int,
        selected: Mapping[str, ChType],
        columns: Sequence[ColumnMap],
        batch_bytes: int,
    ) -> Iterator[pa.RecordBatch]:
        sql = (
            f"SELECT {_select_list(selected)} FROM {table_name(pin['database'], pin['table'])}"
            f"{_range(part['name'], first, last)}"
        )
        row_bytes = max(1, part["uncompressed_bytes"] // max(1, part["rows"]))
        block_bytes = min(batch_bytes, BLOCK_BYTES)
        # The server foresees the size of a block by what it read before, and a run of heavy rows surprises
        # it. A block is never less than a granule, so a small number means one granule at a time.
        most_rows = HEAVY_BLOCK_ROWS if part.get("heavy_rows") else 1_000_000
        settings = {
            **_ARROW_SETTINGS,
            "max_threads": 1,
            "max_block_size": max(1, min(block_bytes // row_bytes, most_rows)),
            "preferred_block_size_bytes": block_bytes,
        }
        arrived = 0
        try:
            for batch in self._server.batches(sql, settings):
                arrived += batch.num_rows
                if batch.num_rows:
                    yield from _cut(self._conformed(batch, selected, columns), batch_bytes)
        except ServerError as error:
            raise self._broken(error, pin, part["name"]) from error
        if not part["has_deletes"]:
            self._check_count(pin, part, last - first, arrived)

    def _check_count(self, pin: Json, part: Json, expected: int, arrived: int) -> None:
        """Raises: Corrupt if more or fewer rows came than were pinned."""
        if arrived == expected:
            return
        name = part["name"]
        if pin["frozen"]:
            raise Corrupt(
                f"part {part['source']} of {pin['source']} gave {arrived} rows where {expected} were frozen"
                f" (part {name} of {pin['database']}.{pin['table']})"
            )
        there = {
            one.name for one in active_parts(self._server, pin["database"], pin["table"], pin["partition_id"])
        }
        gone = "" if name in there else ": it has gone, merged or changed since the job was created"
        raise Corrupt(
            f"part {name} of {pin['source']} gave {arrived} of {expected} rows{gone}",
            hint="export again; without --no-pin the parts are frozen first",
        )

    def _asked(self, sql: str, pin: Json) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._server.batches(sql, {**_ARROW_SETTINGS, "max_threads": 2})
        except ServerError as error:
            raise self._broken(error, pin) from error

    def _broken(self, error: ServerError, pin: Json, part: str | None = None) -> Exception:
        where = f"{pin['database']}.{pin['table']}"
        names = {one["name"]: one["source"] for one in pin["parts"]}
        if error.unknown:
            what = "the frozen copy" if pin["frozen"] else "the table"
            return Corrupt(
                f"{what} {where} of {pin['source']} is gone from server {pin['server']}: {error.text}",
                hint="export the partition again; the rows of this job can no longer be read",
            )
        if error.damaged:
            named = f"part {names[part]}" if part else "a part"
            return Corrupt(
                f"{named} of {pin['source']} is damaged: {error.text}",
                hint=f"CHECK TABLE {table_name(pin['database'], pin['table'])} says more",
            )
        if error.not_allowed:
            return told(error, f"read {where}")
        return Retryable(f"cannot read {where}: {error.text}")

    def _conformed(
        self, batch: pa.RecordBatch, selected: Mapping[str, ChType], columns: Sequence[ColumnMap]
    ) -> pa.RecordBatch:
        import pyarrow as pa

        from lockstep.schema import conform

        targets = {column.source: column.type for column in columns}
        arrays = [
            natural_array(batch.column(i), kind, name, targets.get(name))
            for i, (name, kind) in enumerate(selected.items())
        ]
        # Where no column is read, the number of rows still counts.
        natural = pa.RecordBatch.from_arrays(arrays, names=list(selected)) if arrays else batch
        return conform(natural, columns)


def _source_column(name: str, kind: ChType) -> SourceColumn:
    mapped = iceberg_type(kind)
    nullable = kind.nullable or kind.name in {"Dynamic", "Variant"}
    return SourceColumn(name, kind.text, mapped.exact, nullable, mapped.lossy, mapped.problem)


def _types_of(columns: Sequence[ColumnMap]) -> dict[str, ChType]:
    """The source columns that are read, with their types as the plan has them."""
    return {
        column.source: parse_type(column.source_type)
        for column in columns
        if column.source is not None and column.source_type is not None
    }


def _may_be_null(kind: ChType) -> ChType:
    return ChType(kind.name, kind.args, kind.names, not kind.children, False, kind.text)


def _select_list(selected: Mapping[str, ChType]) -> str:
    # No names are given to the results: they are taken by position, and a name could hide a column.
    return ", ".join(cast_expression(quote_name(name), kind) for name, kind in selected.items()) or "1"


def _from(pin: Json) -> str:
    """The pinned parts of a table as FROM and WHERE."""
    names = ", ".join(quote_text(part["name"]) for part in pin["parts"])
    return f"{table_name(pin['database'], pin['table'])} WHERE _part IN ({names})"


def _range(part: str, start: int, end: int) -> str:
    return f" WHERE _part = {quote_text(part)} AND _part_offset >= {start} AND _part_offset < {end}"


def _task(segments: Sequence[Sequence[Any]], size_bytes: int) -> TaskSpec:
    return TaskSpec({"segments": list(segments)}, sum(segment[3] for segment in segments), size_bytes)


def _start(position: Position | None) -> tuple[int, int | None, int]:
    if position is None:
        return 0, None, 0
    return position["segment"], position["offset"], position["rows"]


def _ranges(part: Json, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut a segment into what one query reads; the cuts depend on the part alone."""
    rows = max(1, part["rows"] * RANGE_BYTES // max(1, part["uncompressed_bytes"]))
    if rows > GRANULE_ROWS:
        rows -= rows % GRANULE_ROWS
    while start < end:
        stop = min(end, (start // rows + 1) * rows)
        yield start, stop
        start = stop


def _identity(table_uuid: str, place: Place) -> str:
    """What tells two tables apart: the table's own UUID, so that one table is the same under every address,
    and another one under the same name is not. Where the database gives none, the address must do."""
    return f"clickhouse:{table_uuid}" if table_uuid.strip("0-") else place.identity


def _cut(batch: pa.RecordBatch, most_bytes: int) -> Iterator[pa.RecordBatch]:
    """Halve a batch until each piece is small enough: rows may differ in weight a thousandfold."""
    if batch.nbytes <= most_bytes or batch.num_rows == 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _cut(batch.slice(0, half), most_bytes)
    yield from _cut(batch.slice(half), most_bytes)
