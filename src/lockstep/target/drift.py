"""How a table differs from what a plan was frozen for, in sentences.

Only what a data file depends on counts: columns, partitioning, order. A comment or a property does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.job import Json, Plan
from lockstep.target import TargetTable


def differences(head: TargetTable, plan: Plan) -> Iterator[str]:
    yield from _fields(plan.schema["fields"], head.schema["fields"], "")
    yield from _layout("partition spec", plan.spec, head.spec, plan.schema)
    yield from _layout("sort order", plan.sort_order, head.sort_order, plan.schema)


def _fields(planned: list[Json], present: list[Json], prefix: str) -> Iterator[str]:
    then = {field["id"]: field for field in planned}
    now = {field["id"]: field for field in present}
    for field_id, field in then.items():
        name = prefix + field["name"]
        if field_id not in now:
            yield f'column "{name}" was dropped'
        else:
            yield from _field(name, prefix, field, now[field_id])
    for field_id, field in now.items():
        if field_id not in then:
            yield f'column "{prefix}{field["name"]}" ({_type_name(field["type"])}) was added'
    shared = [field_id for field_id in then if field_id in now]
    if shared != [field_id for field_id in now if field_id in then]:
        order = ", ".join(f'"{now[field_id]["name"]}"' for field_id in now)
        yield f"the columns{' of ' + prefix[:-1] if prefix else ''} have another order now: {order}"


def _field(name: str, prefix: str, then: Json, now: Json) -> Iterator[str]:
    if then["name"] != now["name"]:
        yield f'column "{name}" was renamed to "{prefix}{now["name"]}"'
    if then["required"] != now["required"]:
        yield f'column "{name}" is {"required" if now["required"] else "optional"} now'
    yield from _types(name, then["type"], now["type"])


def _types(name: str, then: Any, now: Any) -> Iterator[str]:
    if _kind(then) == _kind(now) == "struct":
        yield from _fields(then["fields"], now["fields"], name + ".")
    elif _bare(then) != _bare(now):
        yield f'column "{name}" was {_type_name(then)} and is {_type_name(now)} now'


def _kind(kind: Any) -> str:
    return str(kind["type"]) if isinstance(kind, dict) else str(kind)


def _bare(kind: Any) -> Any:
    """A type without comments and defaults: they do not change what a file holds."""
    if isinstance(kind, dict):
        ignored = ("doc", "initial-default", "write-default")
        return {key: _bare(value) for key, value in kind.items() if key not in ignored}
    return [_bare(item) for item in kind] if isinstance(kind, list) else kind


def _type_name(kind: Any) -> str:
    if not isinstance(kind, dict):
        return str(kind)
    if kind["type"] == "list":
        return f"list<{_type_name(kind['element'])}>"
    if kind["type"] == "map":
        return f"map<{_type_name(kind['key'])}, {_type_name(kind['value'])}>"
    return "struct<" + ", ".join(f"{f['name']}: {_type_name(f['type'])}" for f in kind["fields"]) + ">"


def _layout(what: str, then: Json, now: Json, schema: Json) -> Iterator[str]:
    # The id of a spec or an order may change while its fields stay: then the files fit as they are.
    if _essence(then) != _essence(now):
        names = _names(schema["fields"], "")
        yield f"the {what} was ({_terms(then, names)}) and is ({_terms(now, names)}) now"


def _essence(layout: Json) -> list[tuple[Any, ...]]:
    keys = ("source-id", "field-id", "transform", "name", "direction", "null-order")
    return [tuple(field.get(key) for key in keys) for field in layout["fields"]]


def _names(fields: list[Json], prefix: str) -> dict[int, str]:
    names: dict[int, str] = {}
    for field in fields:
        names[field["id"]] = prefix + field["name"]
        if _kind(field["type"]) == "struct":
            names |= _names(field["type"]["fields"], f"{prefix}{field['name']}.")
    return names


def _terms(layout: Json, names: dict[int, str]) -> str:
    def term(field: Json) -> str:
        source = names.get(field["source-id"], f"field {field['source-id']}")
        text = source if field["transform"] == "identity" else f"{field['transform']}({source})"
        direction = [field[key] for key in ("direction", "null-order") if key in field]
        return " ".join([text, *direction])

    return ", ".join(term(field) for field in layout["fields"]) or "none"
