"""Small steps on columns that several parsers take."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.source.files_fit import Unfit


def whole_column(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array, without a copy where it is one already."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def refuse_where(mask: pa.Array) -> None:
    """Raises: Unfit at the first True."""
    row = pc.index(mask, True).as_py()
    if row >= 0:
        raise Unfit(row)
