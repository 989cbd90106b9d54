"""An Iceberg table of a PyIceberg catalog, and the register that its snapshot ids are.

A snapshot id can be added once, so the id that is derived from a commit id is written once: with our files,
or empty, as a fence. Commits go straight to `Catalog.commit_table`: PyIceberg's own transactions retry and
rebase by themselves, and would blur which head a commit was checked against.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyiceberg.catalog import Catalog, MetastoreCatalog, load_catalog
from pyiceberg.exceptions import (
    AuthorizationExpiredError,
    BadRequestError,
    CommitFailedException,
    ForbiddenError,
    NoSuchNamespaceError,
    NoSuchPropertyException,
    NoSuchTableError,
    NotInstalledError,
    OAuthError,
    TableAlreadyExistsError,
    UnauthorizedError,
)
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.sorting import SortOrder
from pyiceberg.table.update import (
    AddSortOrderUpdate,
    AssertDefaultSortOrderId,
    AssertTableUUID,
    SetDefaultSortOrderUpdate,
)
from pyiceberg.typedef import IcebergBaseModel
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

from lockstep.errors import CommitUnknown, Corrupt, Invalid, LockstepError, Retryable
from lockstep.job import Json, Plan, StagedFile, snapshot_id_of
from lockstep.runtime import SYSTEM_CLOCK, Clock, failpoint
from lockstep.storage import Storage
from lockstep.storage.options import with_catalog
from lockstep.target import Outcome, TargetTable, catalog_fs, warehouse_hint
from lockstep.target.drift import differences
from lockstep.target.files import with_our_files
from lockstep.target.limits import why, with_timeouts
from lockstep.target.references import referenced
from lockstep.target.replace import plan_removal
from lockstep.target.snapshot import (
    COMMIT_ID,
    FENCED,
    JOB_ID,
    LEDGER_PREFIX,
    PARTITION,
    Prepared,
    Removal,
    SnapshotBuilder,
    ledger_entry,
    published_from,
)

if TYPE_CHECKING:
    from lockstep.config import Config

SCHEME: Final = "iceberg://"
NEWEST_FORMAT: Final = 2
STAT_THREADS: Final = 16
CATALOG_TABLES: Final = 2
"""Which PyIceberg's SQL catalog makes for itself."""
NEW_TABLE: Final = {"format-version": str(NEWEST_FORMAT), "write.parquet.compression-codec": "zstd"}

_NO_RIGHT: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_WRONG_REQUEST: Final = (
    AuthorizationExpiredError,
    BadRequestError,
    ForbiddenError,
    NoSuchPropertyException,
    NotInstalledError,
    OAuthError,
    UnauthorizedError,
)


class IcebergTarget:
    """Implements `Target`. Opening it only checks the address: the catalog is asked when it is needed."""

    def __init__(self, address: str, config: Config, clock: Clock = SYSTEM_CLOCK) -> None:
        """Raises: Invalid for an address without a table, or a catalog that lockstep.toml does not name."""
        self.address = address
        self._clock = clock
        self._catalog_name, self._identifier = parse_address(address)
        self._properties = _catalog_properties(self._catalog_name, config)
        self._storage = config.storage
        self._catalog: Catalog | None = None
        self._io: FileIO | None = None

    # The table

    def exists(self) -> bool:
        with self._answers():
            return self._open().table_exists(self._identifier)

    def load(self) -> TargetTable:
        with self._answers():
            return self._loaded(self._open().load_table(self._identifier))

    def create(self, schema: Json, spec: Json, sort_order: Json) -> TargetTable:
        """Field ids are given anew by the catalog: read them from what comes back."""
        with self._answers():
            catalog = self._open()
            self._require_a_place(catalog)
            try:
                catalog.create_namespace_if_not_exists(self._identifier[:-1])
            except IntegrityError:  # two asked at once whether it is there, and the other has made it
                catalog.create_namespace_if_not_exists(self._identifier[:-1])
            try:
                table = catalog.create_table(
                    self._identifier,
                    schema=Schema.model_validate(schema),
                    partition_spec=PartitionSpec.model_validate(spec),
                    sort_order=SortOrder.model_validate(sort_order),
                    properties=NEW_TABLE,
                )
            except TableAlreadyExistsError:
                table = catalog.load_table(self._identifier)
            return self._loaded(table)

    def _require_a_place(self, catalog: Catalog) -> None:
        """Raises: Invalid if the catalog cannot tell where a new table is to be kept."""
        if not isinstance(catalog, MetastoreCatalog) or catalog.properties.get("warehouse"):
            return
        with suppress(NoSuchNamespaceError):
            if catalog.load_namespace_properties(self._identifier[:-1]).get("location"):
                return
        name = ".".join(self._identifier)
        raise Invalid(
            f'cannot create {name}: the catalog "{self._catalog_name}" has no warehouse',
            hint=warehouse_hint(self._catalog_name),
        )

    def order_by(self, head: TargetTable, sort_order: Json) -> TargetTable:
        with self._answers():
            table = _table(head)
            order = SortOrder.model_validate({**sort_order, "order-id": _unused_order_id(table)})
            unchanged = (
                AssertTableUUID(uuid=table.metadata.table_uuid),
                AssertDefaultSortOrderId.model_validate(
                    {"default-sort-order-id": table.metadata.default_sort_order_id}
                ),
            )
            updates = (
                AddSortOrderUpdate.model_validate({"sort-order": order}),
                SetDefaultSortOrderUpdate.model_validate({"sort-order-id": -1}),
            )
            # If somebody else changed the table, what it is now decides.
            with suppress(CommitFailedException):
                table.catalog.commit_table(table, unchanged, updates)
            now = self.load()
            if now.sort_order["fields"] != sort_order["fields"]:
                raise Invalid(
                    f"{self.address} was given another sort order meanwhile", hint="ask for the import again"
                )
            return now

    def drop_if_empty(self, uuid: str) -> None:
        with self._answers():
            catalog = self._open()
            try:
                metadata = catalog.load_table(self._identifier).metadata
                if str(metadata.table_uuid) == uuid and not metadata.snapshots:
                    catalog.drop_table(self._identifier)
            except NoSuchTableError:
                return

    # The register

    def outcome(self, head: TargetTable, commit_id: str) -> tuple[Outcome, int | None]:
        """The snapshot if it is still there, else the ledger: it outlives expiry and rollbacks.

        Raises: Corrupt if the snapshot id belongs to something else.
        """
        metadata = _table(head).metadata
        snapshot_id = snapshot_id_of(commit_id)
        snapshot = metadata.snapshot_by_id(snapshot_id)
        if snapshot is not None:
            labels = snapshot.summary.additional_properties if snapshot.summary else {}
            if labels.get(COMMIT_ID) != commit_id:
                raise Corrupt(
                    f"snapshot {snapshot_id} of {self.address} has the id of commit {commit_id}, "
                    "and something else wrote it",
                    hint="nothing was published; retry the job to publish it under another id",
                )
            if labels.get(FENCED) == "true":
                return Outcome.FENCED, None
            return Outcome.COMMITTED, snapshot_id
        entry = ledger_entry(metadata, commit_id)
        if entry is None:
            return Outcome.OPEN, None
        return (Outcome.FENCED, None) if entry.fenced else (Outcome.COMMITTED, entry.snapshot_id)

    def published_from(self, head: TargetTable, scope: str) -> list[str]:
        return published_from(_table(head).metadata, scope)

    def prepare(
        self, head: TargetTable, plan: Plan, commit_id: str, job_id: str, files: Sequence[StagedFile]
    ) -> Prepared:
        _check_format(head, self.address)
        _check_unique(files)
        self._check_open(head, commit_id)
        labels = {COMMIT_ID: commit_id, JOB_ID: job_id, PARTITION: plan.partition or ""}
        with self._before_sending("publish to"):
            builder = SnapshotBuilder(_table(head), commit_id, self._clock)
            removal = plan_removal(builder, plan, files) if plan.replaces else Removal()
            return builder.publish(files, removal, labels, plan.scope)

    def publish(self, head: TargetTable, prepared: Prepared) -> int:
        failpoint("commit.before_publish")
        self.send(head, prepared)
        with _landed(prepared.commit_id):
            failpoint("commit.after_publish")
            failpoint("commit.reply_lost")
        return prepared.snapshot_id

    def fence(self, head: TargetTable, commit_id: str) -> None:
        self._check_open(head, commit_id)
        with self._before_sending(f"fence commit {commit_id} in"):
            prepared = SnapshotBuilder(_table(head), commit_id, self._clock).fence()
        failpoint("fence.before_publish")
        self.send(head, prepared)
        with _landed(commit_id):
            failpoint("fence.after_publish")

    def send(self, head: TargetTable, prepared: Prepared) -> None:
        """Hand a prepared commit to the catalog.

        Raises: CommitUnknown for every answer but success. Even a refusal proves nothing: it may be the
        answer to a request that was sent again below us, after the first one had landed.
        """
        try:
            _table(head).catalog.commit_table(_table(head), prepared.requirements, prepared.updates)
        except Exception as error:
            raise CommitUnknown(
                f"the catalog did not confirm snapshot {prepared.snapshot_id} of {self.address}: "
                f"{why(error)}",
                hint="the table itself tells whether it landed",
            ) from error

    def _check_open(self, head: TargetTable, commit_id: str) -> None:
        # An id whose snapshot has expired could be added again: the ledger says that it is taken.
        outcome, _ = self.outcome(head, commit_id)
        if outcome is not Outcome.OPEN:
            raise CommitUnknown(f"commit {commit_id} is already {outcome} in {self.address}")

    def referenced(self, head: TargetTable, names: Collection[str]) -> set[str]:
        with self._answers():
            return referenced(_table(head), names)

    # Checks before a commit

    def drift(self, head: TargetTable, plan: Plan) -> list[str]:
        found = list(differences(head, plan))
        version = _table(head).metadata.format_version
        return [_format_problem(version), *found] if version > NEWEST_FORMAT else found

    def missing(self, files: Iterable[StagedFile]) -> list[str]:
        """Raises: Retryable if the storage does not answer."""
        local: list[StagedFile] = []
        remote: list[StagedFile] = []
        for file in files:
            (remote if _local_path(file.path) is None else local).append(file)
        with self._before_sending("check the staged files of"), ThreadPoolExecutor(STAT_THREADS) as pool:
            # Threads hide the latency of a network; a local file is asked faster than it is handed over.
            problems = [*map(self._problem_of, local), *pool.map(self._problem_of, remote)]
        return [problem for problem in problems if problem]

    def _problem_of(self, file: StagedFile) -> str | None:
        try:
            size = self._size(file.path)
        except FileNotFoundError:
            return f"{file.path} is gone"
        if size != file.size_bytes:
            return f"{file.path} has {size} bytes instead of {file.size_bytes}"
        return None

    def _size(self, path: str) -> int:
        local = _local_path(path)
        if local is not None:
            return os.stat(local).st_size
        io = self._io or load_file_io(with_our_files(self._properties, self._storage), path)
        return len(io.new_input(path))

    # The catalog

    def _open(self) -> Catalog:
        if self._catalog is None:
            _make_sqlite_folder(self._properties.get("uri", ""))
            try:
                self._catalog = self._load_catalog()
            except ValueError as error:  # PyIceberg's word for properties that make no catalog
                raise Invalid(
                    f'the catalog "{self._catalog_name}" is not configured right: {why(error)}',
                    hint=f"check [catalogs.{self._catalog_name}] in lockstep.toml",
                ) from error
        return self._catalog

    def _load_catalog(self) -> Catalog:
        properties = with_timeouts(with_our_files(self._properties, self._storage))
        if self._properties.get("type") == catalog_fs.TYPE:
            storage = Storage(with_catalog(self._storage, self._properties))
            return catalog_fs.FileSystemCatalog(self._catalog_name, storage, self._clock, **properties)
        for _ in range(CATALOG_TABLES):
            try:
                return load_catalog(self._catalog_name, **properties)
            except (OperationalError, ProgrammingError, IntegrityError) as error:
                # Whoever comes first makes the catalog's own tables: another may be first for each of them.
                if "already exists" not in str(error):
                    break
        return load_catalog(self._catalog_name, **properties)

    def _loaded(self, table: Table) -> TargetTable:
        self._io = table.io
        metadata = table.metadata
        return TargetTable(
            uuid=str(metadata.table_uuid),
            location=metadata.location,
            schema=_as_json(metadata.schema()),
            spec=_as_json(metadata.spec()),
            sort_order=_as_json(metadata.sort_order()),
            # Plans keep these properties; the ledger would only make them large.
            properties={k: v for k, v in metadata.properties.items() if not k.startswith(LEDGER_PREFIX)},
            handle=table,
        )

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Say what a failing catalog means: a wrong request, or one that may work later."""
        name = ".".join(self._identifier)
        try:
            yield
        except LockstepError:
            raise
        except (NoSuchTableError, NoSuchNamespaceError) as error:
            raise Invalid(
                f'there is no table {name} in the catalog "{self._catalog_name}"',
                hint="pass --create to make it from the source's columns",
            ) from error
        except _WRONG_REQUEST as error:
            raise Invalid(
                f'the catalog "{self._catalog_name}" refuses the request for {name}: {why(error)}',
                hint=f"check [catalogs.{self._catalog_name}] in lockstep.toml",
            ) from error
        except OSError as error:
            # PyIceberg raises some without the number of the system's error.
            if isinstance(error, PermissionError) or error.errno in _NO_RIGHT:
                warehouse = self._properties.get("warehouse", "the warehouse")
                raise Invalid(
                    f"cannot write to {warehouse} for {name}: {why(error)}",
                    hint=f'change its mode or owner, or the warehouse of the catalog "{self._catalog_name}"',
                ) from error
            raise self._no_answer(error) from error
        except Exception as error:
            raise self._no_answer(error) from error

    def _no_answer(self, error: Exception) -> Retryable:
        name = ".".join(self._identifier)
        return Retryable(
            f'the catalog "{self._catalog_name}" does not answer for {name}: {why(error)}',
            hint="`lockstep doctor` tells what works",
        )

    @contextmanager
    def _before_sending(self, what: str) -> Iterator[None]:
        """Until the catalog was asked, a failure is a proof that nothing was published."""
        try:
            yield
        except LockstepError:
            raise
        except Exception as error:
            raise Retryable(
                f"cannot {what} {self.address}: {why(error)}", hint="nothing was published"
            ) from error


@contextmanager
def _landed(commit_id: str) -> Iterator[None]:
    """After success, an error is no proof of anything but a lost reply."""
    try:
        yield
    except Retryable as error:
        raise CommitUnknown(f"no reply for commit {commit_id}: {error.message}") from error


def parse_address(address: str) -> tuple[str, tuple[str, ...]]:
    """Raises: Invalid if it is not `iceberg://CATALOG/namespace.table`."""
    catalog, _, name = address.removeprefix(SCHEME).partition("/")
    identifier = tuple(name.split("."))
    if not address.startswith(SCHEME) or not catalog or len(identifier) < 2 or not all(identifier):
        raise Invalid(
            f'"{address}" is not the address of an Iceberg table',
            hint="write iceberg://CATALOG/namespace.table",
        )
    return catalog, identifier


def _catalog_properties(name: str, config: Config) -> dict[str, str]:
    if name in config.catalogs:
        return dict(config.catalogs[name])
    nearest = difflib.get_close_matches(name, config.catalogs, n=1)
    known = ", ".join(sorted(config.catalogs)) or "none"
    raise Invalid(
        f'lockstep.toml names no catalog "{name}"; known: {known}',
        hint=f'did you mean "{nearest[0]}"?' if nearest else f"add [catalogs.{name}] to lockstep.toml",
    )


def _make_sqlite_folder(uri: str) -> None:
    """SQLite makes its file, but not the folder around it, which a fresh machine does not have."""
    scheme, _, path = uri.partition(":///")
    if scheme.split("+")[0] == "sqlite" and path and not path.startswith(":memory:"):
        Path(path.partition("?")[0]).parent.mkdir(parents=True, exist_ok=True)


def _local_path(path: str) -> str | None:
    local = path.removeprefix("file://")
    return local if local.startswith("/") else None


def _check_unique(files: Sequence[StagedFile]) -> None:
    if len({file.path for file in files}) < len(files):
        (path, times), *_ = Counter(file.path for file in files).most_common(1)
        raise Corrupt(
            f"the manifest lists {path} {times} times",
            hint="nothing was published; report this with the job's history",
        )


def _check_format(head: TargetTable, address: str) -> None:
    version = _table(head).metadata.format_version
    if version > NEWEST_FORMAT:
        raise Invalid(f"cannot publish to {address}: {_format_problem(version)}", hint="use a format 2 table")


def _format_problem(version: int) -> str:
    return f"the table has format version {version}, and Lockstep writes up to {NEWEST_FORMAT}"


def _table(head: TargetTable) -> Table:
    table = head.handle
    assert isinstance(table, Table)
    return table


def _as_json(model: IcebergBaseModel) -> Json:
    raw: Any = json.loads(model.model_dump_json())
    assert isinstance(raw, dict)
    return raw


def _unused_order_id(table: Table) -> int:
    return max((order.order_id for order in table.metadata.sort_orders), default=0) + 1
