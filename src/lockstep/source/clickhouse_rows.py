"""The rows of a pin of ClickHouse: what they are like, how they are cut into tasks, and reading them.

They are read by ranges of row offsets inside the parts: a position is the end of a range, so the order of
rows inside one does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import Corrupt, Retryable
from lockstep.job import ColumnMap, Json, Position, TaskSpec, split_evenly
from lockstep.source import Chunk
from lockstep.source.clickhouse_http import Server, ServerError, told
from lockstep.source.clickhouse_pin import active_parts, table_name
from lockstep.source.clickhouse_types import (
    ChType,
    cast_expression,
    natural_array,
    parse_type,
    quote_name,
    quote_text,
)
from lockstep.source.pieces import gathered

if TYPE_CHECKING:
    import pyarrow as pa

GRANULE_ROWS: Final = 8192
RANGE_BYTES: Final = 64_000_000
"""Uncompressed bytes that one query reads: its overhead is small then, and little is redone after a crash."""
BLOCK_BYTES: Final = 16_000_000
"""What the server sends at a time: measured, larger ones are slower."""
HEAVY_BLOCK_ROWS: Final = 64

# What was in the part when it was noted counts: not what a mutation or a patch makes of it later.
READ_SETTINGS: Final = {"apply_mutations_on_fly": 0, "apply_patch_parts": 0}
_ARROW_SETTINGS: Final = {
    **READ_SETTINGS,
    "output_format_arrow_string_as_string": 0,
    "output_format_arrow_fixed_string_as_fixed_byte_array": 1,
    "output_format_arrow_low_cardinality_as_dictionary": 1,
    "output_format_arrow_use_64_bit_indexes_for_dictionary": 0,
    "output_format_arrow_compression_method": "none",
    "cancel_http_readonly_queries_on_client_close": 1,
}


class PinnedRows:
    """The rows of a pin, asked of the server that holds it."""

    def __init__(self, server: Server, pin: Json) -> None:
        self._server = server
        self._pin = pin

    def distinct(self, columns: Sequence[ColumnMap]) -> Iterator[pa.RecordBatch]:
        selected = _types_of(columns)
        if not selected:
            return
        sql = f"SELECT DISTINCT {_select_list(selected)} FROM {_from(self._pin)}"
        for batch in self._asked(sql):
            yield self._conformed(batch, selected, columns)

    def bounds(self, columns: Sequence[ColumnMap]) -> pa.Table:
        import pyarrow as pa

        from lockstep.schema import arrow_schema

        selected = _types_of(columns)
        schema = arrow_schema(columns)
        if not selected or not any(part["visible"] for part in self._pin["parts"]):
            return schema.empty_table()
        rows = []
        for extreme in ("min", "max"):
            picked = ", ".join(
                cast_expression(f"{extreme}({quote_name(name)})", _may_be_null(kind))
                for name, kind in selected.items()
            )
            rows += list(self._asked(f"SELECT {picked} FROM {_from(self._pin)}"))
        found = pa.Table.from_batches([self._conformed(batch, selected, columns) for batch in rows])
        return self._with_null_row(found, selected, columns)

    def _with_null_row(
        self, found: pa.Table, selected: Mapping[str, ChType], columns: Sequence[ColumnMap]
    ) -> pa.Table:
        import pyarrow as pa

        counts = ", ".join(f"countIf(isNull({quote_name(name)}))" for name in selected)
        try:
            row = self._server.values(f"SELECT {counts} FROM {_from(self._pin)}", READ_SETTINGS)[0]
        except ServerError as error:
            raise self._broken(error) from error
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

    def tasks(self, task_bytes: int) -> list[TaskSpec]:
        """Tasks are runs of ranges; a pin without rows makes one task without ranges."""
        segments = (each for part in self._pin["parts"] for each in self._segments(part, task_bytes))
        return [_task(*some) for some in gathered(segments, task_bytes)] or [_task([], 0)]

    def _segments(self, part: Json, task_bytes: int) -> Iterator[tuple[list[Any], int]]:
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
                rows = self._count(part["name"], start, end)
            yield [part["name"], start, end, rows], size_bytes * (end - start) // max(1, part["rows"])

    def _count(self, part: str, start: int, end: int) -> int:
        try:
            where = f"{table_name(self._pin['database'], self._pin['table'])}{_range(part, start, end)}"
            return int(self._server.values(f"SELECT count() FROM {where}", READ_SETTINGS)[0][0])
        except ServerError as error:
            raise self._broken(error, part) from error

    def read(
        self,
        descriptor: Json,
        position: Position | None,
        columns: Sequence[ColumnMap],
        batch_bytes: int,
    ) -> Iterator[Chunk]:
        selected = _types_of(columns)
        parts = {part["name"]: part for part in self._pin["parts"]}
        at, offset, seen = _start(position)
        for index, (name, start, end, rows) in list(enumerate(descriptor["segments"]))[at:]:
            part = parts[name]
            offset = start if offset is None else offset
            for first, last in _ranges(part, offset, end):
                held: pa.RecordBatch | None = None
                for batch in self._read_range(part, first, last, selected, columns, batch_bytes):
                    if held is not None:
                        yield Chunk(held)
                    held = batch
                    seen += batch.num_rows
                if last == end:
                    self._check_count(part, rows, seen)
                if held is not None:
                    yield Chunk(held, {"segment": index, "offset": last, "rows": seen})
            offset, seen = None, 0

    def _read_range(
        self,
        part: Json,
        first: int,
        last: int,
        selected: Mapping[str, ChType],
        columns: Sequence[ColumnMap],
        batch_bytes: int,
    ) -> Iterator[pa.RecordBatch]:
        sql = (
            f"SELECT {_select_list(selected)} FROM {table_name(self._pin['database'], self._pin['table'])}"
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
            raise self._broken(error, part["name"]) from error
        if not part["has_deletes"]:
            self._check_count(part, last - first, arrived)

    def _check_count(self, part: Json, expected: int, arrived: int) -> None:
        """Raises: Corrupt if more or fewer rows came than were pinned."""
        if arrived == expected:
            return
        pin, name = self._pin, part["name"]
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

    def _asked(self, sql: str) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._server.batches(sql, {**_ARROW_SETTINGS, "max_threads": 2})
        except ServerError as error:
            raise self._broken(error) from error

    def _broken(self, error: ServerError, part: str | None = None) -> Exception:
        pin = self._pin
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


def _cut(batch: pa.RecordBatch, most_bytes: int) -> Iterator[pa.RecordBatch]:
    """Halve a batch until each piece is small enough: rows may differ in weight a thousandfold."""
    if batch.nbytes <= most_bytes or batch.num_rows == 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _cut(batch.slice(0, half), most_bytes)
    yield from _cut(batch.slice(half), most_bytes)
