"""Which values lie in the rows of a source: the least, the greatest, and every combination."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.job import ColumnMap
from lockstep.schema import arrow_schema


def bounds_of(batches: Iterable[pa.RecordBatch], columns: Sequence[ColumnMap]) -> pa.Table:
    """At most three rows: the least values, the greatest values, and NULLs where there are any."""
    extremes = [Extremes() for _ in columns]
    rows = 0
    for batch in batches:
        rows += batch.num_rows
        for seen, array in zip(extremes, batch.columns, strict=True):
            seen.add(array)
    schema = arrow_schema(columns)
    if rows == 0:
        return schema.empty_table()
    with_nulls = any(seen.null for seen in extremes)
    arrays = [seen.rows(field.type, with_nulls) for seen, field in zip(extremes, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def storage_of(array: pa.Array) -> pa.Array:
    return array.storage if isinstance(array.type, pa.BaseExtensionType) else array


def distinct(batch: pa.RecordBatch) -> pa.RecordBatch:
    """One row for each combination of values; the batch as it is where Arrow cannot group it."""
    keys = [f"k{i}" for i in range(batch.num_columns)]
    arrays = [storage_of(array) for array in batch.columns]
    table = pa.Table.from_arrays([*arrays, pa.array(range(batch.num_rows))], [*keys, "row"])
    try:
        rows = table.group_by(keys).aggregate([("row", "min")])["row_min"]
    except pa.ArrowNotImplementedError:
        return batch
    return batch.take(rows.combine_chunks().sort())


class Extremes:
    """The least and the greatest value seen, and whether there was a NULL."""

    def __init__(self) -> None:
        self.null = False
        self._seen: pa.Array | None = None

    def add(self, array: pa.Array) -> None:
        self.null |= array.null_count > 0
        found = _least_and_greatest(storage_of(array))
        self._seen = (
            found if self._seen is None else _least_and_greatest(pa.concat_arrays([self._seen, found]))
        )

    def rows(self, kind: pa.DataType, with_nulls: bool) -> pa.Array:
        """Least, greatest and, where some column has NULL, a third row: NULL here if it was seen here."""
        storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
        found = self._seen if self._seen is not None else pa.nulls(2, storage)
        if with_nulls:
            found = pa.concat_arrays([found, pa.nulls(1, storage) if self.null else found.slice(0, 1)])
        return pa.ExtensionArray.from_storage(kind, found) if storage is not kind else found


def _least_and_greatest(array: pa.Array) -> pa.Array:
    both = pc.min_max(array)
    return pa.concat_arrays([pa.repeat(both["min"], 1), pa.repeat(both["max"], 1)])
