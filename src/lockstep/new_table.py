"""The table that would hold a source exactly: schema, partition spec and sort order, in Iceberg's JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from lockstep.arrow_types import IcebergType, type_text
from lockstep.errors import Invalid
from lockstep.job import Json
from lockstep.schema import inexact_column, path_inside, refuse, repeated_names, spelled

if TYPE_CHECKING:
    from lockstep.source import SourceField, SourceTable

FIRST_PARTITION_FIELD_ID: Final = 1000


def derive(source: SourceTable, *, allow_lossy: bool = False) -> tuple[Json, Json, Json]:
    """Schema, partition spec and sort order of a new table that holds the source, in Iceberg's JSON.

    Raises: Invalid where a column has no exact type (unless `allow_lossy` and there is a lossy one), the
    partition key has no exact counterpart, or Spark could not tell two of its columns apart.
    """
    problems = list(repeated_names(source))
    fields = []
    for column in source.columns:
        kind = column.type if column.type is not None else (column.lossy_type if allow_lossy else None)
        if kind is None:
            problems.append(inexact_column(column, source.place))
        else:
            fields.append({"id": 0, "name": column.name, "required": not column.nullable, "type": kind})
    what = f"cannot create a table for {source.name}"
    if not source.columns:
        problems.append("it has no columns")
    refuse(what, problems)
    struct = _FreshIds().struct({"type": "struct", "fields": fields})
    schema = {**struct, "schema-id": 0, "identifier-field-ids": []}
    _require_distinct_paths(schema, what, source.place)
    return schema, _derive_spec(source, schema, what), _derive_sort_order(source, schema)


class _FreshIds:
    """Ids in the order in which Iceberg gives them: all fields of a struct, then what is inside them."""

    def __init__(self) -> None:
        self._last = 0

    def _next(self) -> int:
        self._last += 1
        return self._last

    def struct(self, kind: Json) -> Json:
        ids = [self._next() for _ in kind["fields"]]
        fields = [
            {"id": field_id, "name": f["name"], "required": f["required"], "type": self._of(f["type"])}
            for field_id, f in zip(ids, kind["fields"], strict=True)
        ]
        return {"type": "struct", "fields": fields}

    def _of(self, kind: IcebergType) -> IcebergType:
        if isinstance(kind, str):
            return spelled(kind)
        match kind["type"]:
            case "struct":
                return self.struct(kind)
            case "list":
                return {**kind, "element-id": self._next(), "element": self._of(kind["element"])}
            case _:
                ids = {"key-id": self._next(), "value-id": self._next()}
                return {**kind, **ids, "key": self._of(kind["key"]), "value": self._of(kind["value"])}


def _require_distinct_paths(schema: Json, what: str, place: str) -> None:
    """Iceberg finds nested fields by dotted path, so a column `a.b` beside a struct `a` of `b` is refused;
    Spark does so without regard to case, and can read neither of two that differ in nothing else."""
    seen: dict[str, str] = {}
    for path in _paths(schema["fields"]):
        other = seen.get(path.lower())
        seen[path.lower()] = path
        if other is None:
            continue
        if other == path:
            raise Invalid(f'{what}: two of its fields are called "{path}" in Iceberg; rename one {place}')
        raise Invalid(
            f'{what}: "{other}" and "{path}" differ by case only, and Spark could read neither of them',
            hint="rename one of them in the source, or create the target table yourself and leave out "
            "--create",
        )


def _paths(fields: Sequence[Json], above: str = "") -> Iterator[str]:
    for field in fields:
        path = path_inside(above, field["name"])
        yield path
        yield from _paths_inside(field["type"], path)


def _paths_inside(kind: IcebergType, path: str) -> Iterator[str]:
    if isinstance(kind, str):
        return
    match kind["type"]:
        case "struct":
            yield from _paths(kind["fields"], path)
        case "list":
            yield from _paths([{"name": "element", "type": kind["element"]}], path)
        case _:
            yield from _paths([{"name": part, "type": kind[part]} for part in ("key", "value")], path)


def _derive_spec(source: SourceTable, schema: Json, what: str) -> Json:
    if source.partitioning is None:
        raise Invalid(
            f"{what}: its partition key {source.partition_key} has no exact counterpart in Iceberg",
            hint="create the target table yourself, partitioned so that each source partition lies in one of"
            " its partitions, and run the export without --create",
        )
    columns = {field["name"]: field for field in schema["fields"]}
    taken = set(columns)
    fields: list[Json] = []
    for number, field in enumerate(source.partitioning):
        column = _key_column(field, columns, what)
        name = _partition_name(field, taken)
        taken.add(name)
        fields.append(
            {
                "source-id": column["id"],
                "field-id": FIRST_PARTITION_FIELD_ID + number,
                "transform": field.transform,
                "name": name,
            }
        )
    return {"spec-id": 0, "fields": fields}


def _key_column(field: SourceField, columns: dict[str, Json], what: str) -> Json:
    column = columns.get(field.column)
    if column is None:
        raise Invalid(f'{what}: it is partitioned by "{field.column}", which is not one of its columns')
    if not _can_transform(field.transform, column["type"]):
        raise Invalid(
            f'{what}: Iceberg cannot partition column "{field.column}" ({type_text(column["type"])}) by'
            f" {field.transform}",
            hint="create the target table yourself, and run the export without --create",
        )
    if field.transform == "identity" and str(column["type"]).startswith("fixed"):
        # It takes such values in manifests for ones with a length before them (apache/iceberg#17501).
        raise Invalid(
            f'{what}: it is partitioned by "{field.column}" ({column["type"]}), and Spark, like all that is '
            "built on Iceberg's Java library, cannot read a table with such partitions",
            hint="create the target table yourself, without partitions or by a bucket of that column, and "
            "run the export without --create",
        )
    return column


def _can_transform(transform: str, kind: IcebergType) -> bool:
    from pydantic import TypeAdapter
    from pyiceberg.transforms import parse_transform
    from pyiceberg.types import IcebergType as Type

    if not isinstance(kind, str):
        return False
    parsed: Any = TypeAdapter(Type).validate_python(kind)
    return bool(parse_transform(transform).can_transform(parsed))


def _partition_name(field: SourceField, taken: set[str]) -> str:
    """`ts_month`, `id_bucket_16`, `name_trunc_4`; an identity field takes its column's name, as usual."""
    if field.transform == "identity":
        return field.column
    verb, _, argument = field.transform.partition("[")
    parts = [field.column, {"truncate": "trunc"}.get(verb, verb), argument.rstrip("]")]
    plain = "_".join(part for part in parts if part)
    name, number = plain, 1
    while name in taken:
        number += 1
        name = f"{plain}_{number}"
    return name


def _derive_sort_order(source: SourceTable, schema: Json) -> Json:
    """As much of the source's order as Iceberg can say: a prefix of it is true as well."""
    columns = {field["name"]: field for field in schema["fields"]}
    fields: list[Json] = []
    for field in source.sorting:
        column = columns.get(field.column)
        if column is None or not _can_transform(field.transform, column["type"]):
            break
        fields.append(
            {
                "source-id": column["id"],
                "transform": field.transform,
                "direction": "desc" if field.descending else "asc",
                "null-order": "nulls-first" if field.nulls_first else "nulls-last",
            }
        )
    return {"order-id": 1 if fields else 0, "fields": fields}
