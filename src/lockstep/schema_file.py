"""Schemas that a user has written: Iceberg's own JSON, or a line `name type [required]` for each column."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.errors import Invalid
from lockstep.job import Json


def read_schema(path: Path) -> Json:
    """Raises: Invalid if the file cannot be read, or is no schema."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Invalid(f"--schema {path} cannot be read: {error.strerror}") from error
    if text.lstrip().startswith("{"):
        try:
            schema = json.loads(text)
            return {**schema, "fields": list(schema["fields"])}
        except (ValueError, KeyError) as error:
            raise Invalid(f"--schema {path} is not a schema in Iceberg's JSON: {error}") from error
    fields = [
        _field(number, words) for number, words in enumerate(map(str.split, text.splitlines())) if words
    ]
    return {"type": "struct", "schema-id": 0, "fields": fields}


def _field(number: int, words: list[str]) -> Json:
    required = words[-1] == "required" and len(words) > 2
    kind = "".join(words[1:-1] if required else words[1:])
    if not kind:
        raise Invalid(f"line {number + 1} of the schema has a name and no type: {words[0]}")
    return {"id": number + 1, "name": words[0], "required": required, "type": _spelled(kind)}


def _spelled(kind: str) -> str:
    """Iceberg writes `decimal(9, 2)` with a space."""
    return kind.replace(",", ", ") if kind.startswith("decimal") else kind
