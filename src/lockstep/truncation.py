"""Records with a number that `truncate` has no result for: rejects, as all others that do not fit.

Iceberg truncates towards the lower end: of the least numbers of a type the result is none of that type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lockstep.job import Json
from lockstep.partitioning import Field, fields_of, order_fields
from lockstep.source import Chunk, Reject
from lockstep.transforms import column_at, least_truncated, to_record_value, value_to_json

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class _Limit:
    """What values of a column are too low for: a partition, or a place in the order."""

    field: Field
    least: Any
    use: str

    def reason(self, value: Any) -> str:
        transform = self.field.transform
        return (
            f"the value {value} has no {self.use} under truncate[{transform.width}]: "
            f"the result is no {transform.source_type} any more"
        )


class Truncations:
    """The truncated columns by which a table is partitioned, and, with `sort_order`, rows are ordered.

    All of them are Iceberg's JSON. Raises: Invalid for a transform that does not fit its column.
    """

    def __init__(self, schema: Json, spec: Json, sort_order: Json | None) -> None:
        partitions = [(field, "partition") for field in fields_of(spec, schema)]
        order = order_fields(sort_order, schema) if sort_order is not None else []
        self._limits = [
            _Limit(field, least, use)
            for field, use in [*partitions, *((field, "place in the order") for field in order)]
            if (least := _least(field)) is not None
        ]

    def checked(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """The same chunks, with what has no partition or no place in the order among the rejects.

        These have no text: whoever lists them looks it up.
        """
        return map(self._checked, chunks) if self._limits else chunks

    def _checked(self, chunk: Chunk) -> Chunk:
        found = self._found(chunk)
        if not found:
            return chunk
        import numpy as np
        import pyarrow as pa

        assert chunk.records is not None
        keep = np.ones(chunk.batch.num_rows, bool)
        keep[list(found)] = False
        rejects = [
            Reject(chunk.records[row].as_py(), None, ".".join(limit.field.path), limit.reason(value), "")
            for row, (limit, value) in found.items()
        ]
        return replace(
            chunk,
            batch=chunk.batch.filter(pa.array(keep)),
            records=chunk.records.filter(pa.array(keep)),
            rejects=sorted([*chunk.rejects, *rejects], key=lambda reject: reject.record),
        )

    def _found(self, chunk: Chunk) -> dict[int, tuple[_Limit, Any]]:
        """By their row, with the first reason that there is."""
        found: dict[int, tuple[_Limit, Any]] = {}
        for limit in self._limits:
            column = column_at(chunk.batch, limit.field.path)
            for row in _below(column, limit.least):
                found.setdefault(row, (limit, column[row].as_py()))
        return found


def _least(field: Field) -> Any:
    least = least_truncated(field.transform)
    kind = field.transform.source_type
    return None if least is None else to_record_value(value_to_json(least, kind), kind)


def _below(column: pa.Array, least: Any) -> list[int]:
    import pyarrow as pa
    import pyarrow.compute as pc

    below = pc.less(column, pa.scalar(least, column.type))
    return list(pc.indices_nonzero(below).to_pylist()) if pc.any(below).as_py() else []
