"""ClickHouse as a source: a server over HTTP, or an embedded data folder (chDB) behind the same protocol.

A partition is frozen by hard links (`clickhouse_pin`), and read from there (`clickhouse_rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config import Config
from lockstep.errors import Invalid
from lockstep.job import ColumnMap, Json, Position, TaskSpec
from lockstep.source import Chunk, FoundPin, PartitionInfo, Pin, SourceColumn, SourceTable
from lockstep.source.chdb_launch import START_TIMEOUT_S, connect
from lockstep.source.clickhouse_address import Endpoint, Place, parse_address
from lockstep.source.clickhouse_http import Server, ServerError, told
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
    visible_rows,
)
from lockstep.source.clickhouse_rows import READ_SETTINGS, PinnedRows
from lockstep.source.clickhouse_types import (
    ChType,
    iceberg_type,
    parse_type,
    quote_text,
)

if TYPE_CHECKING:
    import pyarrow as pa


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
        return connect(self._place.folder or Path(), timeout_s=timeout_s)

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
            visible = visible_rows(self._server, self._table, parts, dict(READ_SETTINGS))
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
        visible = visible_rows(self._server, table, copies, dict(READ_SETTINGS))
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

    # The rows of a pin

    def distinct_rows(self, pin: Pin, columns: Sequence[ColumnMap]) -> Iterator[pa.RecordBatch]:
        return PinnedRows(self._server, pin.detail).distinct(columns)

    def bounds(self, pin: Pin, columns: Sequence[ColumnMap]) -> pa.Table:
        return PinnedRows(self._server, pin.detail).bounds(columns)

    def plan_tasks(self, pin: Pin, task_bytes: int) -> list[TaskSpec]:
        return PinnedRows(self._server, pin.detail).tasks(task_bytes)

    def read(
        self,
        pin: Json,
        descriptor: Json,
        position: Position | None,
        columns: Sequence[ColumnMap],
        batch_bytes: int,
    ) -> Iterator[Chunk]:
        return PinnedRows(self._server, pin).read(descriptor, position, columns, batch_bytes)


def _source_column(name: str, kind: ChType) -> SourceColumn:
    mapped = iceberg_type(kind)
    nullable = kind.nullable or kind.name in {"Dynamic", "Variant"}
    return SourceColumn(name, kind.text, mapped.exact, nullable, mapped.lossy, mapped.problem)


def _identity(table_uuid: str, place: Place) -> str:
    """What tells two tables apart: the table's own UUID, so that one table is the same under every address,
    and another one under the same name is not. Where the database gives none, the address must do."""
    return f"clickhouse:{table_uuid}" if table_uuid.strip("0-") else place.identity
