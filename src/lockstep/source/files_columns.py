"""Small steps on columns that several parsers take."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from lockstep.source.files_fit import Unfit


def whole_column(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array, without a copy where it is one already."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def refuse_where(mask: pa.Array, column: int | None = None) -> None:
    """Raises: Unfit at the first True."""
    row = pc.index(mask, True).as_py()
    if row >= 0:
        raise Unfit(row, column)


def require_valid(array: pa.Array, column: int) -> None:
    """Look at every value: bytes that are no UTF-8, decimals with too many digits.

    Raises: Unfit at the first value that is not valid.
    """
    row = first_refused(array, lambda some: some.validate(full=True))
    if row is not None:
        raise Unfit(row, column)


def first_refused(array: pa.Array, look: Callable[[pa.Array], object]) -> int | None:
    """The first value for which `look` raises pa.ArrowInvalid, which does not tell where; else None."""
    if _passes(array, look):
        return None
    low, high = 0, len(array)
    while high - low > 1:
        middle = (low + high) // 2
        if _passes(array.slice(low, middle - low), look):
            low = middle
        else:
            high = middle
    return low


def _passes(array: pa.Array, look: Callable[[pa.Array], object]) -> bool:
    try:
        look(array)
    except pa.ArrowInvalid:
        return False
    return True
