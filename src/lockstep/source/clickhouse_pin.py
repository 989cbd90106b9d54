"""Freezing a partition of a MergeTree table: hard links in a table of ours that nothing else touches.

The copy is a plain MergeTree without TTL whose settings rule out merges, so that it survives a restart of
the server, which forgets `SYSTEM STOP MERGES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from lockstep.errors import Invalid, LockstepError, Retryable
from lockstep.job import Json, Piece
from lockstep.source import PIN_PREFIX, FoundPin, PartInfo
from lockstep.source.clickhouse_http import Server, ServerError, told
from lockstep.source.clickhouse_keys import engine_clauses
from lockstep.source.clickhouse_types import quote_name, quote_text, split_top_level, tokens

ATTEMPTS: Final = 5
_NO_MERGES: Final = {
    "max_bytes_to_merge_at_max_space_in_pool": "1",
    "max_bytes_to_merge_at_min_space_in_pool": "1",
    "min_age_to_force_merge_seconds": "0",
}
# What the source was allowed when it was created, its copy must be allowed too.
_LENIENT: Final = {
    "allow_suspicious_low_cardinality_types": 1,
    "allow_suspicious_fixed_string_types": 1,
    "allow_suspicious_codecs": 1,
    "allow_experimental_codecs": 1,
    "allow_suspicious_ttl_expressions": 1,
    "allow_suspicious_indices": 1,
    "allow_suspicious_primary_key": 1,
    "allow_suspicious_types_in_order_by": 1,
    "allow_suspicious_variant_types": 1,
    "allow_hyperscan": 1,
    "allow_experimental_object_type": 1,
    "allow_experimental_json_type": 1,
    "allow_experimental_dynamic_type": 1,
    "allow_experimental_variant_type": 1,
    "allow_experimental_time_time64_type": 1,
    "enable_time_time64_type": 1,
    "allow_experimental_qbit_type": 1,
    "allow_experimental_nullable_tuple_type": 1,
    "allow_experimental_full_text_index": 1,
    "allow_experimental_vector_similarity_index": 1,
    "data_type_default_nullable": 0,
    "flatten_nested": 0,
}
# A copy is one of many hard links: the guard against dropping large tables does not apply.
DROP_SETTINGS: Final = {"max_table_size_to_drop": 0, "max_partition_size_to_drop": 0}


@dataclass(frozen=True)
class Part:
    """An active part. `hash` covers all its files, so hard links of a part have the same one."""

    name: str
    rows: int
    size_bytes: int
    uncompressed_bytes: int
    first: int
    last: int
    hash: str
    partition_id: str
    label: str
    has_deletes: bool
    marks: int = 0

    def info(self) -> PartInfo:
        return PartInfo(self.name, self.rows, self.size_bytes, Piece(self.name, self.first, self.last))


def table_name(database: str, table: str) -> str:
    return f"{quote_name(database)}.{quote_name(table)}"


def active_parts(server: Server, database: str, table: str, partition_id: str | None = None) -> list[Part]:
    """The active parts in the order of their blocks; patch parts are left out."""
    where = "" if partition_id is None else f" AND partition_id = {quote_text(partition_id)}"
    return _parts(server, database, table, f" AND active{where}")


def _recent_parts(server: Server, database: str, table: str, partition_id: str) -> list[Part]:
    """The active parts, then those that were replaced not long ago."""
    return _parts(server, database, table, f" AND partition_id = {quote_text(partition_id)}")


def _parts(server: Server, database: str, table: str, where: str) -> list[Part]:
    rows = server.rows(
        "SELECT name, partition_id, partition, rows, bytes_on_disk, data_uncompressed_bytes,"
        " min_block_number, max_block_number, hash_of_all_files, has_lightweight_delete, marks"
        f" FROM system.parts WHERE database = {quote_text(database)} AND table = {quote_text(table)}"
        f" AND rows > 0 AND NOT startsWith(partition_id, 'patch-'){where}"
        " ORDER BY active DESC, partition_id, min_block_number, name"
    )
    return [
        Part(
            name=row["name"],
            rows=row["rows"],
            size_bytes=row["bytes_on_disk"],
            uncompressed_bytes=row["data_uncompressed_bytes"],
            first=row["min_block_number"],
            last=row["max_block_number"],
            hash=row["hash_of_all_files"],
            partition_id=row["partition_id"],
            label=row["partition"],
            has_deletes=bool(row["has_lightweight_delete"]),
            marks=row["marks"],
        )
        for row in rows
    ]


def check_settled(server: Server, database: str, table: str, partition_id: str) -> None:
    """Refuse what hard links cannot carry: patches and renames that are not in the parts yet.

    Raises: Invalid.
    """
    name = f"{database}.{table}"
    of_table = f"database = {quote_text(database)} AND table = {quote_text(table)}"
    patched = server.rows(
        f"SELECT count() AS n FROM system.parts WHERE {of_table} AND active AND rows > 0"
        # A patch partition is named patch-<32 digits>-<partition>.
        " AND startsWith(partition_id, 'patch-')"
        f" AND substring(partition_id, 40) = {quote_text(partition_id)}"
    )[0]["n"]
    if patched:
        raise Invalid(
            f"cannot export {name} partition {partition_id}: it has {patched} patch parts, rows that an"
            " UPDATE has changed but not rewritten yet",
            hint=f"run ALTER TABLE {table_name(database, table)} APPLY PATCHES, and export again",
        )
    for row in server.rows(
        f"SELECT mutation_id, command FROM system.mutations WHERE {of_table} AND NOT is_done"
    ):
        verb = row["command"].lstrip("( ").split(" ")[0].upper()
        if verb not in {"UPDATE", "DELETE", "MATERIALIZE", "CLEAR", "APPLY"}:
            raise Invalid(
                f"cannot export {name} partition {partition_id}: {row['mutation_id']} is still changing its"
                f" columns ({row['command']})",
                hint="wait until system.mutations says is_done, or KILL MUTATION, and export again",
            )


@dataclass(frozen=True)
class Frozen:
    """The parts of a copy, each with the source part that it is a link of."""

    pairs: Sequence[tuple[Part, Part]]


def freeze(
    server: Server,
    source: tuple[str, str],
    pin: tuple[str, str],
    partition_id: str,
    wanted: Sequence[str] | None,
) -> Frozen:
    """Copy a partition by hard links, keep only the `wanted` parts. Atomic: on any failure no copy stays.

    Raises: Invalid for an unknown partition or part, or a missing right; Retryable if the source changes
    so fast that nobody can tell which parts were frozen.
    """
    for _ in range(ATTEMPTS):
        _create(server, source, pin)
        try:
            before = active_parts(server, *source, partition_id)
            check_parts(before, source, partition_id, wanted)
            _attach(server, source, pin, partition_id)
            copies = active_parts(server, *pin, partition_id)
            after = _recent_parts(server, *source, partition_id)
            pairs = match_parts(copies, before, after)
            if pairs is not None and _has_all(pairs, wanted):
                return Frozen(_keep(server, pin, pairs, wanted))
        except BaseException:
            give_up(server, pin)
            raise
        drop(server, pin)
    raise Retryable(
        f"cannot freeze {'.'.join(source)} partition {partition_id}: its parts changed"
        f" {ATTEMPTS} times in the meantime"
    )


def drop(server: Server, pin: tuple[str, str]) -> None:
    server.run(f"DROP TABLE IF EXISTS {table_name(*pin)} SYNC", DROP_SETTINGS)


def found_pins(server: Server, databases: str) -> list[FoundPin]:
    """The frozen copies of ours in these databases (quoted). Ages are judged by the server's clock."""
    rows = server.rows(
        "SELECT database, name, toInt64(toUnixTimestamp(now())) -"
        " toInt64(toUnixTimestamp(metadata_modification_time)) AS age_s FROM system.tables"
        f" WHERE database IN ({databases}) AND match(name, '^{PIN_PREFIX}[0-9a-f]+$') ORDER BY name"
    )
    return [
        FoundPin(
            row["name"].removeprefix(PIN_PREFIX),
            f"{row['database']}.{row['name']}",
            float(row["age_s"]),
            {"frozen": True, "database": row["database"], "table": row["name"]},
        )
        for row in rows
    ]


def give_up(server: Server, pin: tuple[str, str]) -> None:
    """Drop a copy because of an error that is already on its way: that one is told, not this one's."""
    with suppress(LockstepError, ServerError):
        drop(server, pin)


def match_parts(
    copies: Sequence[Part], before: Sequence[Part], after: Sequence[Part]
) -> list[tuple[Part, Part]] | None:
    """Pair each copy with the source part whose files it has; None where one has no counterpart.

    Parts with the same files hold the same rows, so any of them will do; those that were there first
    are taken first.
    """
    known = {part.name for part in before}
    candidates = [*before, *(part for part in after if part.name not in known)]
    pairs: list[tuple[Part, Part]] = []
    for copy in copies:
        twin = next((one for one in candidates if (one.hash, one.rows) == (copy.hash, copy.rows)), None)
        if twin is None:
            return None
        candidates.remove(twin)
        pairs.append((copy, twin))
    pairs.sort(key=lambda pair: pair[1].first)
    for (_, one), (_, other) in pairwise(pairs):
        if other.first <= one.last:
            return None
    return pairs


def check_parts(
    parts: Sequence[Part], source: tuple[str, str], partition_id: str, wanted: Sequence[str] | None
) -> None:
    """Raises: Invalid if the partition or one of the wanted parts is not there."""
    name = ".".join(source)
    if not parts:
        raise Invalid(
            f'{name} has no partition "{partition_id}"', hint="lockstep partitions SOURCE lists what is there"
        )
    names = {part.name for part in parts}
    for one in wanted or ():
        if one not in names:
            raise Invalid(
                f'{name} has no active part "{one}" in partition {partition_id}',
                hint="it may have been merged: lockstep partitions SOURCE --parts lists what is there",
            )


def _has_all(pairs: Sequence[tuple[Part, Part]], wanted: Sequence[str] | None) -> bool:
    return wanted is None or set(wanted) <= {origin.name for _, origin in pairs}


def _keep(
    server: Server, pin: tuple[str, str], pairs: Sequence[tuple[Part, Part]], wanted: Sequence[str] | None
) -> list[tuple[Part, Part]]:
    kept = [pair for pair in pairs if wanted is None or pair[1].name in wanted]
    for copy, _ in [pair for pair in pairs if pair not in kept]:
        server.run(f"ALTER TABLE {table_name(*pin)} DROP PART {quote_text(copy.name)}", DROP_SETTINGS)
    return kept


def _create(server: Server, source: tuple[str, str], pin: tuple[str, str]) -> None:
    found = server.rows(
        "SELECT engine_full, storage_policy FROM system.tables"
        f" WHERE database = {quote_text(source[0])} AND name = {quote_text(source[1])}"
    )
    if not found:
        raise Invalid(f"there is no table {'.'.join(source)}", hint="check the address")
    statement = copy_statement(source, pin, found[0]["engine_full"], found[0]["storage_policy"])
    try:
        server.run(statement, _LENIENT)
    except ServerError as error:
        # Nothing was created; a table of that name, if there is one, is not ours to drop.
        raise _not_frozen(error, source, pin) from error
    except BaseException:
        give_up(server, pin)
        raise
    try:
        for column in _columns_with_ttl(server, pin):
            server.run(f"ALTER TABLE {table_name(*pin)} MODIFY COLUMN {quote_name(column)} REMOVE TTL")
        _stop_merges(server, pin)
    except BaseException as error:
        give_up(server, pin)
        if isinstance(error, ServerError):
            raise _not_frozen(error, source, pin) from error
        raise


def _stop_merges(server: Server, pin: tuple[str, str]) -> None:
    try:
        server.run(f"SYSTEM STOP MERGES {table_name(*pin)}")
    except ServerError as error:
        # The settings of the copy rule merges out by themselves; this right is rarely granted.
        if not error.not_allowed:
            raise


def _attach(server: Server, source: tuple[str, str], pin: tuple[str, str], partition_id: str) -> None:
    try:
        server.run(
            f"ALTER TABLE {table_name(*pin)} ATTACH PARTITION ID {quote_text(partition_id)}"
            f" FROM {table_name(*source)}"
        )
    except ServerError as error:
        raise _not_frozen(error, source, pin) from error


def _not_frozen(error: ServerError, source: tuple[str, str], pin: tuple[str, str]) -> Exception:
    doing = f"freeze {'.'.join(source)} as {'.'.join(pin)}"
    if error.not_allowed:
        return Invalid(
            f"cannot {doing}: {error.text}",
            hint="grant CREATE TABLE, ALTER and DROP there, set pin_database under [clickhouse] in"
            " lockstep.toml, or pass --no-pin",
        )
    if error.unknown:
        return Invalid(f"cannot {doing}: {error.text}", hint="check pin_database in lockstep.toml")
    return told(error, doing)


def _columns_with_ttl(server: Server, pin: tuple[str, str]) -> list[str]:
    # Only the statement tells which columns have a TTL; a copy has no table TTL, so the word is one's own.
    statement = server.rows(
        f"SELECT create_table_query AS q FROM system.tables WHERE database = {quote_text(pin[0])}"
        f" AND name = {quote_text(pin[1])}"
    )[0]["q"]
    words = tokens(statement)
    if "(" not in words:
        return []
    found = []
    for piece in split_top_level(words[words.index("(") + 1 :]):
        own = _own_words(piece)
        if "TTL" in own and own[0] not in {"INDEX", "PROJECTION", "CONSTRAINT"}:
            found.append(own[0])
    return [name[1:-1].replace("\\`", "`").replace("\\\\", "\\") for name in found]


def _own_words(piece: Sequence[str]) -> list[str]:
    """The words of a column's declaration up to the bracket that closes the list of columns."""
    depth = 0
    for at, word in enumerate(piece):
        depth += (word == "(") - (word == ")")
        if depth < 0:
            return list(piece[:at])
    return list(piece)


def copy_statement(source: tuple[str, str], pin: tuple[str, str], engine_full: str, policy: str) -> str:
    """CREATE TABLE for a plain MergeTree into which parts of the source can be attached."""
    clauses = engine_clauses(engine_full)
    keys = " ".join(
        f"{clause} {clauses[clause]}"
        for clause in ("PARTITION BY", "PRIMARY KEY", "ORDER BY")
        if clause in clauses
    )
    return (
        f"CREATE TABLE {table_name(*pin)} AS {table_name(*source)} ENGINE = MergeTree {keys}"
        f" SETTINGS {_settings(clauses.get('SETTINGS', ''), policy)}"
    )


def _settings(given: str, policy: str) -> str:
    kept: dict[str, str] = {}
    for piece in split_top_level(tokens(given)):
        if len(piece) >= 3 and piece[1] == "=":
            kept[piece[0]] = "".join(piece[2:])
    kept.update(_NO_MERGES)
    if policy and policy != "default" and "disk" not in kept:
        kept["storage_policy"] = quote_text(policy)
    return ", ".join(f"{name} = {value}" for name, value in kept.items())


def part_json(copy: Part, origin: Part, visible: int, granule_rows: int) -> Json:
    return {
        "name": copy.name,
        "source": origin.name,
        "rows": copy.rows,
        "visible": visible,
        "bytes": copy.size_bytes,
        "uncompressed_bytes": copy.uncompressed_bytes,
        "has_deletes": copy.has_deletes,
        "heavy_rows": has_heavy_rows(copy, granule_rows),
    }


def has_heavy_rows(part: Part, granule_rows: int) -> bool:
    """True if the part has granules that ClickHouse cut short, at some 10 MB: more than its rows ask for."""
    return part.marks > -(-part.rows // granule_rows) + 5


def visible_rows(
    server: Server, table: tuple[str, str], parts: Sequence[Part], settings: Json
) -> dict[str, int]:
    """How many rows of each part are not deleted."""
    counts = {part.name: part.rows for part in parts}
    deleted = [quote_text(part.name) for part in parts if part.has_deletes]
    if deleted:
        counts.update({part.name: 0 for part in parts if part.has_deletes})
        rows = server.values(
            f"SELECT _part, count() FROM {table_name(*table)} WHERE _part IN ({', '.join(deleted)})"
            " GROUP BY _part",
            settings,
        )
        counts.update({part: int(count) for part, count in rows})
    return counts
