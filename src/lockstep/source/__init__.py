"""Where rows come from: list partitions, freeze one, cut it into tasks, read them from any position.

A source is opened from an address with its secrets filled in; what it returns (pins, descriptors,
positions) is JSON without secrets. Implementations: `clickhouse` (a server, or chDB through
`chdb_server`), `parquet`, `iceberg`. An import reads from an `Input`: raw files (`files`), or an Iceberg
table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from lockstep.errors import Invalid
from lockstep.job import ColumnMap, Json, Piece, Position, TaskSpec

if TYPE_CHECKING:
    import pyarrow as pa

    from lockstep.config import Config

PIN_PREFIX: Final = "lockstep_pin_"
"""The name of a frozen copy is this, and the id of its job."""


@dataclass(frozen=True)
class SourceColumn:
    """A column as the source names it, and the Iceberg type that holds every value of it exactly.

    `type` is Iceberg's own text (`long`, `decimal(20, 0)`, `list<...>` as PyIceberg prints it is not
    parseable, so nested types are Iceberg's JSON). Where none is exact, `type` is None, `problem` says
    why, and `lossy_type` is what `--allow-lossy` would store, if anything; `advice` says what else to do.
    """

    name: str
    native_type: str
    type: str | Json | None
    nullable: bool
    lossy_type: str | Json | None = None
    problem: str | None = None
    advice: str | None = None


@dataclass(frozen=True)
class SourceField:
    """A partition or sort field as the source has it, in Iceberg's words: `month` of `ts`.

    `transform` is Iceberg's text: identity, year, month, day, hour, bucket[16], truncate[4].
    """

    column: str
    transform: str = "identity"
    descending: bool = False
    nulls_first: bool = True


@dataclass(frozen=True)
class SourceTable:
    """What a source says of itself. `identity` tells two sources apart, without secrets.

    `partitioning` is None when the source's partition key has no exact counterpart in Iceberg.
    """

    name: str
    identity: str
    columns: Sequence[SourceColumn]
    partitioning: Sequence[SourceField] | None
    partition_key: str
    """The partition key in the source's own words, for messages."""
    sorting: Sequence[SourceField] = ()
    place: str = "in a copy of the table"
    """Where its columns can be changed, for messages."""
    null_advice: str = "replace NULLs in a copy of the table"
    """What to do about a column that may be NULL and must not, for messages."""


@dataclass(frozen=True)
class PartInfo:
    name: str
    rows: int
    size_bytes: int
    piece: Piece


@dataclass(frozen=True)
class PartitionInfo:
    """`partition_id` is what `--partition` takes; `label` is how the source shows its value."""

    partition_id: str
    label: str
    rows: int
    size_bytes: int
    parts: Sequence[PartInfo]


@dataclass(frozen=True)
class Pin:
    """A frozen partition. `detail` is all that reading and unpinning need."""

    detail: Json
    parts: Sequence[PartInfo]
    rows: int


@dataclass(frozen=True)
class Reject:
    """A record that does not fit. `line` counts from 0 at the task's first line, where inputs have lines.

    Whoever lists a record without `raw` looks it up.
    """

    record: int
    line: int | None
    column: str | None
    reason: str
    raw: str


@dataclass(frozen=True)
class FoundPin:
    """A frozen copy of ours as the source lists it. `detail` is all that `unpin` needs."""

    job_id: str
    name: str
    age_s: float
    detail: Json


@dataclass(frozen=True)
class Chunk:
    """A batch in the target's Arrow schema. `position` is set where a later attempt could go on after it.

    `records` are the numbers of its rows in the task, rejected records counted too, where the source knows
    them; `rejects` are the records since the last chunk that did not fit. A chunk may hold nothing but those.
    """

    batch: pa.RecordBatch
    position: Position | None = None
    records: pa.Int64Array | None = None
    rejects: Sequence[Reject] = ()


@dataclass(frozen=True)
class Place:
    """Where a record stands, for people: the line of a text file, or the row of any other one, from 1."""

    input: str
    line: int
    in_table: bool = False
    """True for a row of a data file of the target."""

    def __str__(self) -> str:
        if self.in_table:
            return f"row {self.line} of {self.input}, which is in the table"
        return f"{self.input} line {self.line}"


@dataclass(frozen=True)
class Recalled:
    """A record of a task that was looked up again: where it stands, and its text as people see it."""

    record: int
    place: Place
    raw: str


@dataclass(frozen=True)
class ParseOptions:
    """How raw files are read. None: found out from their names and first bytes."""

    format: str | None = None
    delimiter: str | None = None
    quote: str = '"'
    escape: str | None = None
    header: bool = True
    null: Sequence[str] = ("",)
    compression: str = "auto"
    skip: int = 0
    limit: int | None = None
    schema: Json | None = None

    def to_json(self) -> Json:
        return {**vars(self), "null": list(self.null)}

    @classmethod
    def from_json(cls, raw: Json) -> ParseOptions:
        return cls(**{**raw, "null": tuple(raw["null"])})

    def without_effect(self, format: str) -> list[str]:
        """Those that are not as they are by default, and that mean nothing to inputs of this format."""
        given, plain = self.to_json(), ParseOptions().to_json()
        return [name for name in given if given[name] != plain[name] and name not in _MEANINGFUL[format]]


_TEXT_OPTIONS: Final = frozenset({"format", "limit", "compression", "skip", "schema"})
_MEANINGFUL: Final = {
    "csv": _TEXT_OPTIONS | {"delimiter", "quote", "escape", "header", "null"},
    "json": _TEXT_OPTIONS,
    "parquet": frozenset({"format", "limit"}),
    "avro": frozenset({"format", "limit"}),
    "iceberg": frozenset({"limit"}),
}


class Source(Protocol):
    def describe(self) -> SourceTable:
        """Raises: Invalid for an unknown table; Retryable if the server does not answer."""
        ...

    def partitions(self) -> list[PartitionInfo]: ...

    def pin(self, name: str, partition_id: str, parts: Sequence[str] | None, *, frozen: bool = True) -> Pin:
        """Freeze a partition, or some parts of it, under a name of ours.

        `frozen` False only notes the parts (`--no-pin`): reading fails, naming the part, when one has gone.
        Raises: Invalid for an unknown partition or part; nothing stays pinned then.
        """
        ...

    def distinct_rows(self, pin: Pin, columns: Sequence[ColumnMap]) -> Iterator[pa.RecordBatch]:
        """Rows that show every combination of values of these columns in the pin, in target types.

        They may repeat. For columns that a monotonic transform uses, min and max rows are enough only
        if the caller asks `bounds`; this one is exhaustive.
        """
        ...

    def bounds(self, pin: Pin, columns: Sequence[ColumnMap]) -> pa.Table:
        """At most three rows: the least values, the greatest values, and NULLs where there are any."""
        ...

    def plan_tasks(self, pin: Pin, task_bytes: int) -> list[TaskSpec]:
        """Cut a pin into tasks of about `task_bytes`: small parts together, a large one in several.

        The same pin gives the same tasks.
        """
        ...

    def read(
        self,
        pin: Json,
        descriptor: Json,
        position: Position | None,
        columns: Sequence[ColumnMap],
        batch_bytes: int,
    ) -> Iterator[Chunk]:
        """The rows of a task after `position`, as batches of about `batch_bytes` in the target's types.

        The last chunk always has a position. A task without rows yields nothing.
        Raises: Corrupt if what is there is not what was pinned; Retryable if the server does not answer.
        """
        ...

    def unpin(self, pin: Json, timeout_s: float) -> None:
        """Give the frozen copy up. One that is gone already is no error. Never waits beyond `timeout_s`."""
        ...

    def close(self) -> None: ...


class Input(Protocol):
    """Where an import reads from: frozen as a whole, cut into tasks, read from any position."""

    @property
    def format(self) -> str:
        """csv, json, parquet, avro or iceberg. Raises: Invalid if there is no input, or several formats."""
        ...

    def describe(self) -> SourceTable:
        """Raises: Invalid if there is nothing to read, or if the inputs do not fit each other."""
        ...

    def freeze(self) -> Pin:
        """Note the identity of every input. `detail` is all that reading needs, without secrets.

        Whoever reads later and finds an input changed raises Corrupt.
        """
        ...

    def without(self, pin: Pin, names: Collection[str]) -> Pin:
        """The same pin without some of its parts."""
        ...

    def plan_tasks(self, pin: Pin, task_bytes: int) -> list[TaskSpec]:
        """Cut at record boundaries into tasks of about `task_bytes`, in the order of inputs and records."""
        ...

    def read(
        self,
        pin: Json,
        descriptor: Json,
        position: Position | None,
        columns: Sequence[ColumnMap],
        batch_bytes: int,
    ) -> Iterator[Chunk]:
        """As `Source.read`, with `records` in every chunk, and rejects.

        Raises: Corrupt if an input is not what was frozen; Retryable if the storage does not answer.
        """
        ...

    def locate(self, pin: Json, descriptor: Json, record: int) -> Place:
        """Where a record of a task stands."""
        ...

    def recall(
        self, pin: Json, descriptor: Json, records: Sequence[int], columns: Sequence[ColumnMap]
    ) -> Iterator[Recalled]:
        """Some records of a task, in ascending order, each once: the task is read once for all of them.

        The text of a record is what the file has; a row of another format is shown as JSON.
        Raises: Corrupt if an input is not what was frozen, after the last record at the latest; Retryable if
        the storage does not answer.
        """
        ...

    def close(self) -> None: ...


def open_source(address: str, config: Config) -> Source:
    """The source behind an address whose secrets are filled in. Nothing is connected yet.

    Raises: Invalid for an unknown scheme or an address that is not of its form.
    """
    scheme = address.partition(":")[0]
    if scheme in {"clickhouse", "clickhouses", "chdb"}:
        from lockstep.source.clickhouse import ClickHouseSource

        return ClickHouseSource(address, config)
    if scheme == "parquet":
        from lockstep.source.parquet import ParquetSource

        return ParquetSource(address, config)
    if scheme == "iceberg":
        from lockstep.source.iceberg import IcebergSource

        return IcebergSource(address, config)
    raise Invalid(
        f'"{scheme}:" is not a source that Lockstep knows' if ":" in address else "the source has no scheme",
        hint="a source is clickhouse://…, clickhouses://…, chdb:PATH/db/table, parquet:PATH or"
        " iceberg://CATALOG/namespace.table[@SNAPSHOT_ID]",
    )


def open_input(addresses: Sequence[str], options: ParseOptions, config: Config) -> Input:
    """What an import reads, from addresses whose secrets are filled in: raw files, or one Iceberg table.

    Raises: Invalid for addresses that are of no known form, or that do not go together.
    """
    if any(address.startswith("iceberg://") for address in addresses):
        if len(addresses) > 1:
            raise Invalid("an Iceberg table is imported alone, not together with other inputs")
        from lockstep.source.iceberg import IcebergInput

        return IcebergInput(addresses[0], config, options.limit)
    from lockstep.source.files import FilesInput

    return FilesInput(addresses, options, config)


def open_frozen(address: str, pin: Json, config: Config) -> Input:
    """The input of a job that was planned: its pin says which files they are, and how they are read."""
    if pin.get("kind") == "iceberg":
        from lockstep.source.iceberg import IcebergInput

        return IcebergInput(address, config)
    from lockstep.source.files import FilesInput

    return FilesInput.of_pin(pin, config)
