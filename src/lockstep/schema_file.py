"""Schemas that a user has written: Iceberg's own JSON, or a line `name type [required]` for each column."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lockstep.errors import Invalid
from lockstep.job import Json

TYPES: Final = (
    "boolean, int, long, float, double, decimal(P, S), date, time, timestamp, timestamptz, string, uuid, "
    "binary, fixed[N]; nested types in Iceberg's JSON"
)
_LINE: Final = re.compile(r"(\S+)\s+(\w+(?:\s*[(\[][^)\]]*[)\]])?)(\s+required)?")
_FORM: Final = (
    "a line is a name, a type and perhaps `required`; names with blanks and nested types are written in "
    "Iceberg's JSON"
)


def read_schema(path: Path) -> Json:
    """Raises: Invalid if the file cannot be read, or is no schema."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise Invalid(f"--schema {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Invalid(f"--schema {path} cannot be read: it is not valid UTF-8") from error
    if text.lstrip().startswith("{"):
        try:
            schema = json.loads(text)
            return {**schema, "fields": list(schema["fields"])}
        except (ValueError, KeyError, TypeError) as error:
            raise Invalid(f"--schema {path} is not a schema in Iceberg's JSON: {error}") from error
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return {
        "type": "struct",
        "schema-id": 0,
        "fields": [_field(number, line) for number, line in lines if line],
    }


def _field(number: int, line: str) -> Json:
    found = _LINE.fullmatch(line)
    if found is None and " " not in line and "\t" not in line:
        raise Invalid(f"line {number} of the schema has a name and no type: {line}", hint=_FORM)
    if found is None:
        raise Invalid(f"line {number} of the schema is not understood: {line}", hint=_FORM)
    name, kind, required = found.groups()
    return {"id": number, "name": name, "required": required is not None, "type": _spelled(kind)}


def _spelled(kind: str) -> str:
    """Iceberg writes `decimal(9, 2)` with a space."""
    kind = "".join(kind.split())
    return kind.replace(",", ", ") if kind.startswith("decimal") else kind


def check_schema(schema: Json) -> None:
    """Raises: Invalid for a type that is none, for a name that is there twice, and if there is no column."""
    if not schema["fields"]:
        raise Invalid("--schema names no column", hint=_FORM)
    for column in schema["fields"]:
        if not isinstance(column, dict) or not isinstance(column.get("name"), str) or "type" not in column:
            raise Invalid(f"--schema has a field that is no column with a name and a type: {column}")
        _check_type(column["name"], column["type"])
    for name, count in Counter(_names(schema)).items():
        if count > 1:
            raise Invalid(f'--schema names "{name}" {count} times', hint="leave one line for each column")


def _check_type(name: str, kind: Any) -> None:
    from lockstep.arrow_types import arrow_type, type_text

    try:
        arrow_type(kind)
    except Invalid as error:
        raise Invalid(
            f'--schema gives column "{name}" the type {type_text(kind)}, which Lockstep does not write',
            hint=TYPES,
        ) from error
    except (KeyError, TypeError) as error:
        lacking = f" without {error}" if isinstance(error, KeyError) else ""
        raise Invalid(
            f'--schema gives column "{name}" a type that is incomplete: {json.dumps(kind)}{lacking}',
            hint=TYPES,
        ) from error


def check_schema_names(schema: Json, columns: Sequence[str], format: str, *, header: bool) -> None:
    """Raises: Invalid for a name that no column of the inputs has.

    Records of JSON need not have all fields, so there only a name that differs by case from one that the
    inputs have is refused.
    """
    names = _names(schema)
    others = [name for name in columns if name not in names]
    for name in names:
        if name in columns and format != "json":
            continue
        if not header:
            raise Invalid(
                f"--schema names {len(names)} columns, and the inputs have {len(columns)}",
                hint="without a header each column of the inputs takes the next name of the schema",
            )
        _require_column(name, columns, others)


def _require_column(name: str, columns: Sequence[str], others: Sequence[str]) -> None:
    from lockstep.schema import nearest_name

    near = nearest_name(name, others)
    if name not in columns:
        hint = f'did you mean "{near}"?' if near is not None else f"there are {', '.join(columns)}"
        raise Invalid(f'--schema names "{name}", and there is no such column', hint=hint)
    if near is not None and near.casefold() == name.casefold():
        raise Invalid(
            f'--schema names "{name}", and the inputs have "{near}"',
            hint="names must be equal; name both if there are both",
        )


def _names(schema: Json) -> list[str]:
    return [column["name"] for column in schema["fields"]]
