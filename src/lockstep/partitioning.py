"""A partition spec over rows: its fields, the rows of each partition, and the folder of a partition.

Two rows are in one partition exactly when their values, as `transforms` makes them, are equal.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote_plus

from lockstep.errors import Invalid
from lockstep.job import Json
from lockstep.transforms import (
    FLOATS,
    MONOTONIC,
    Transform,
    column_at,
    encode,
    human,
    kind_of,
    parse_transform,
)

if TYPE_CHECKING:
    import pyarrow as pa

Values = tuple[Any, ...]
"""One partition: the JSON-able value of each field of the spec."""

MOST_NAME_CHARS: Final = 120
"""Of a partition field's name, and of its value: both fit the 255 bytes of a file name."""


@dataclass(frozen=True)
class Field:
    """A field of a partition spec, with the way to its source column through structs."""

    name: str
    path: tuple[str, ...]
    transform: Transform


def fields_of(spec: Json, schema: Json) -> list[Field]:
    """The fields of a spec bound to a schema, both Iceberg's JSON.

    Raises: Invalid for an unknown transform, or one that does not fit its source column.
    """
    return [_field_of(raw, schema) for raw in spec.get("fields", ())]


def order_fields(sort_order: Json, schema: Json) -> list[Field]:
    """As `fields_of`, of a sort order."""
    return [_field_of({**raw, "name": "sort order"}, schema) for raw in sort_order["fields"]]


def order_names(sort_order: Json, schema: Json) -> list[str]:
    """A sort order as people write it: `bucket[16](id)`, `ts desc`."""
    named = []
    for raw, column in zip(sort_order["fields"], order_fields(sort_order, schema), strict=True):
        name, transform = ".".join(column.path), raw["transform"]
        text = name if transform == "identity" else f"{transform}({name})"
        named.append(text + (" desc" if raw["direction"] == "desc" else ""))
    return named


def _field_of(raw: Json, schema: Json) -> Field:
    source_id = raw["source-id"] if "source-id" in raw else raw["source-ids"][0]
    name, text = str(raw["name"]), str(raw["transform"])
    found = _find(schema["fields"], source_id, ())
    if found is None:
        if text == "void":  # the source column may have been dropped since
            return Field(name, (), Transform("void", "int"))
        raise Invalid(
            f'partition field "{name}" refers to column id {source_id}, which the table does not have'
        )
    path, source_type = found
    return Field(name, path, parse_transform(text, source_type, name))


def _find(
    fields: Iterable[Json], source_id: int, above: tuple[str, ...]
) -> tuple[tuple[str, ...], str] | None:
    for each in fields:
        path = (*above, str(each["name"]))
        if each["id"] == source_id:
            return (path, each["type"]) if isinstance(each["type"], str) else None
        if isinstance(each["type"], str) or each["type"].get("type") != "struct":
            continue
        if (found := _find(each["type"]["fields"], source_id, path)) is not None:
            return found
    return None


def monotonic(spec: Json, schema: Json | None = None) -> bool:
    """True if the rows with the least and the greatest values show every partition that there is,
    in the sense that these two are equal exactly when all are (NULLs come apart).

    Not so for bucket, nor, where `schema` tells, for floats: NaN is neither least nor greatest.
    """
    names = {str(raw["transform"]).partition("[")[0] for raw in spec.get("fields", ())}
    if not names <= MONOTONIC:
        return False
    return schema is None or all(
        f.transform.name == "void" or kind_of(f.transform.source_type) not in FLOATS
        for f in fields_of(spec, schema)
    )


def grouped(batch: pa.RecordBatch, fields: Sequence[Field]) -> list[tuple[Values, pa.RecordBatch]]:
    """The rows of a batch by their partition, each group in the order of the batch.

    One partition gives the batch itself, without a copy. No rows: no groups.
    """
    import numpy as np
    import pyarrow as pa

    if batch.num_rows == 0:
        return []
    encoded = [encode(column_at(batch, field.path), field.transform) for field in fields]
    varying = [(codes, len(values)) for codes, values in encoded if len(values) > 1]
    if not varying:
        return [(tuple(values[0] for _, values in encoded), batch)]
    combined = np.zeros(batch.num_rows, dtype=np.int64)
    for codes, count in varying:
        # Made dense after each field, so that the product of many fields never overflows.
        combined = np.unique(combined * count + codes, return_inverse=True)[1].astype(np.int64)
    order = np.argsort(combined, kind="stable")
    starts = np.flatnonzero(np.diff(combined[order], prepend=-1))
    ends = [*starts[1:].tolist(), batch.num_rows]
    groups = []
    for start, end in zip(starts.tolist(), ends, strict=True):
        rows = order[start:end]
        values = tuple(values[codes[rows[0]] if len(values) > 1 else 0] for codes, values in encoded)
        groups.append((values, batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))))
    return groups


def single_partition(tables: Iterable[pa.RecordBatch], spec: Json, schema: Json) -> Values | None:
    """The one partition that all rows fall into; None if there are no rows.

    Raises: Invalid, naming two of them, if there are several.
    """
    fields = fields_of(spec, schema)
    first: Values | None = None
    for batch in tables:
        for values, _ in grouped(batch, fields):
            if first is None:
                first = values
            elif values != first:
                raise Invalid(
                    "the rows fall into several partitions of the target, for example "
                    f"{describe(first, fields)} and {describe(values, fields)}",
                    hint="one export writes one target partition: partition the target like the source, "
                    "or by a coarser transform",
                )
    return first


def describe(values: Sequence[Any], fields: Sequence[Field]) -> str:
    """A partition for a message: `ts_month=2024-01, region="eu"`."""
    shown = [f"{f.name}={human(v, f.transform)}" for f, v in zip(fields, values, strict=True)]
    return ", ".join(shown) or "the whole table"


def partition_path(values: Sequence[Any], spec: Json, schema: Json) -> str:
    """The folder of a partition, `name=value/…`; empty for a table without partitions.

    Escaped as Iceberg does it: no value can leave the table's folder. The value itself is in the manifest,
    so a segment too long for a file system is cut and gets a hash.
    """
    fields = fields_of(spec, schema)
    return "/".join(_segment(f, v) for f, v in zip(fields, values, strict=True))


def _segment(field: Field, value: Any) -> str:
    return f"{_shortened(_escaped(field.name))}={_shortened(_escaped(human(value, field.transform)))}"


def _shortened(text: str) -> str:
    if len(text) <= MOST_NAME_CHARS:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    kept = re.sub(r"%[0-9A-F]?$", "", text[: MOST_NAME_CHARS - len(digest) - 1])
    return f"{kept}-{digest}"


def _escaped(text: str) -> str:
    return quote_plus(text, safe="", errors="surrogatepass")
