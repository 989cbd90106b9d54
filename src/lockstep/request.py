"""What requests to export and to import are checked for alike, and what both make and take back."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from lockstep.errors import Invalid
from lockstep.source.clickhouse_address import split_chdb
from lockstep.store import JobStore
from lockstep.target import Target, TargetTable

UNBORN: Final = ""
"""The UUID of a table that `--create` is about to make."""


def absolute_address(address: str) -> str:
    """An address that means the same from any working folder. Raises: Invalid for an incomplete one."""
    scheme, colon, rest = address.partition(":")
    if scheme not in {"chdb", "parquet"} or "://" in address or not colon:
        return address
    if scheme == "chdb":
        split_chdb(address)  # the working folder must not stand in for what is missing
    return f"{scheme}:{Path(rest).expanduser().absolute()}"


def check_bounds(file_size_bytes: int, deadline_s: float | None) -> None:
    if file_size_bytes < 1:
        raise Invalid("--file-size must be positive")
    if deadline_s is not None and deadline_s <= 0:
        raise Invalid("--deadline must be positive")


def refuse_itself(
    source_uuid: str | None, head: TargetTable, target: str, on_existing: str, done: str
) -> None:
    """Raises: Invalid if the rows of a table would go into the same table, and nobody wants them twice."""
    if source_uuid == head.uuid and on_existing != "append":
        raise Invalid(
            f"{target} would be {done} into itself",
            hint="name another target, or pass --on-existing append to have its rows twice",
        )


def scope_name(scope: str) -> str:
    return hashlib.sha256(scope.encode()).hexdigest()[:16]


def take_back(store: JobStore, target: Target, table_uuid: str) -> None:
    """Drop a table that a request created, unless a job of somebody else counts on it by now."""
    if not any(job.plan.target_uuid == table_uuid for job in store.list()):
        target.drop_if_empty(table_uuid)
