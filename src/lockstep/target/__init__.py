"""Where rows are published, and the register that holds the outcome of a commit id.

The register is written once: committed or fenced, whichever came first. Implementations: `iceberg`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.errors import Invalid
from lockstep.job import Json, Plan, StagedFile
from lockstep.runtime import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from lockstep.config import Config
    from lockstep.target.snapshot import Prepared


class Outcome(StrEnum):
    OPEN = "open"
    COMMITTED = "committed"
    FENCED = "fenced"


@dataclass(frozen=True)
class TargetTable:
    """A loaded head of the target: what the plan freezes, and the mechanism's own handle."""

    uuid: str
    location: str
    schema: Json
    spec: Json
    sort_order: Json
    properties: dict[str, str]
    handle: Any = field(repr=False, compare=False)


class Target(Protocol):
    def exists(self) -> bool: ...

    def load(self) -> TargetTable:
        """Raises: Invalid if there is no such catalog or table; Retryable if it does not answer."""
        ...

    def create(self, schema: Json, spec: Json, sort_order: Json) -> TargetTable:
        """Create the table, or load it where somebody else just did (the caller compares the schema)."""
        ...

    def order_by(self, head: TargetTable, sort_order: Json) -> TargetTable:
        """Give a table without a sort order this one; answers with the table as it is then.

        Raises: Invalid if somebody else gave it another order meanwhile; Retryable.
        """
        ...

    def drop_if_empty(self, uuid: str) -> None:
        """Take the table with this UUID back if it has no snapshot yet; any other one is left alone."""
        ...

    def outcome(self, head: TargetTable, commit_id: str) -> tuple[Outcome, int | None]:
        """What the register says, and the snapshot id where it is committed."""
        ...

    def published_from(self, head: TargetTable, scope: str) -> list[str]:
        """The commit ids whose rows came from this source partition and were not replaced since.

        The table remembers them longer than the job store does, so that `replace` never adds rows twice.
        """
        ...

    def drift(self, head: TargetTable, plan: Plan) -> list[str]:
        """How schema, spec or sort order differ from the plan, one sentence each. Empty: as planned."""
        ...

    def missing(self, files: Iterable[StagedFile]) -> list[str]:
        """Staged files that do not exist with their size, one sentence each."""
        ...

    def prepare(
        self, head: TargetTable, plan: Plan, commit_id: str, job_id: str, files: Sequence[StagedFile]
    ) -> Prepared:
        """Make one snapshot on top of `head` ready, with the register's entry in the same commit.

        Nothing is asked of the catalog, and nothing is visible yet: whatever is raised proves that nothing
        was sent.
        Raises: Invalid where the table's format or `replace` forbids it; Corrupt for a path that is there
        twice; Retryable if the storage does not take the metadata; CommitUnknown if the register is not open.
        """
        ...

    def publish(self, head: TargetTable, prepared: Prepared) -> int:
        """Send what was prepared on top of `head`; answers the snapshot's id.

        Raises: CommitUnknown for everything that is not a proof.
        """
        ...

    def fence(self, head: TargetTable, commit_id: str) -> None:
        """Write `fenced` into the register. Raises: CommitUnknown for everything that is not a proof."""
        ...

    def referenced(self, head: TargetTable, names: Collection[str]) -> set[str]:
        """Which of these file names any snapshot of `head` still refers to, on a branch or on none.

        Raises: Retryable or Corrupt if not every one of them can be read: then nothing is known.
        """
        ...


def warehouse_hint(catalog: str) -> str:
    """What to do about a catalog that cannot tell where a new table is to be kept."""
    return f"name a folder or bucket for its tables: warehouse in [catalogs.{catalog}]"


def open_target(address: str, config: Config, clock: Clock = SYSTEM_CLOCK) -> Target:
    """Open the target that an address names, its secrets filled in; nothing is asked of it yet.

    Raises: Invalid for an address of another kind, or an unknown catalog.
    """
    if address.startswith("iceberg://"):
        from lockstep.target.iceberg import IcebergTarget

        if re.search(r"@\d+$", address):
            raise Invalid(
                f'"{address}" names a snapshot; rows can only be added to the table as it is',
                hint="leave out @ and the number after it",
            )

        return IcebergTarget(address, config, clock)
    raise Invalid(f'"{address}" is not a target', hint="write iceberg://CATALOG/namespace.table")
