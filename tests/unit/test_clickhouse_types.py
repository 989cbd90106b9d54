"""ClickHouse's texts: types, keys, names and addresses."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import Corrupt, Invalid
from lockstep.source import open_source
from lockstep.source.clickhouse_address import parse_address
from lockstep.source.clickhouse_keys import engine_clauses, partition_fields, sorting_fields
from lockstep.source.clickhouse_pin import Part, copy_statement, has_heavy_rows, match_parts
from lockstep.source.clickhouse_rows import _ranges
from lockstep.source.clickhouse_types import (
    cast_expression,
    iceberg_type,
    natural_array,
    parse_type,
    quote_name,
    quote_text,
    tokens,
    unquote,
    zone_of,
)

ROOT = Path("/project")


@given(st.text(max_size=20))
def test_a_quoted_name_or_text_is_one_word_that_reads_back(text: str) -> None:
    for quoted in (quote_name(text), quote_text(text)):
        assert tokens(f"({quoted}, 1)") == ["(", quoted, ",", "1", ")"]
        assert unquote(quoted) == text


@pytest.mark.parametrize(
    ("text", "name", "nullable", "few"),
    [
        ("Int8", "Int8", False, False),
        ("Nullable(Int8)", "Int8", True, False),
        ("LowCardinality(Nullable(String))", "String", True, True),
        ("SimpleAggregateFunction(anyLast, Nullable(String))", "String", True, False),
        ("Nested(a Int8, b String)", "Array", False, False),
        ("Ring", "Array", False, False),
        ("Enum8('a, (' = 1, 'b\\'' = -2)", "Enum8", False, False),
        ("JSON(max_dynamic_paths=4, a.b UInt32)", "JSON", False, False),
        ("SomethingNew(1, 2)", "SomethingNew", False, False),
    ],
)
def test_a_type_is_parsed_with_its_wrappers_taken_off(
    text: str, name: str, nullable: bool, few: bool
) -> None:
    kind = parse_type(text)
    assert (kind.name, kind.nullable, kind.low_cardinality, kind.text) == (name, nullable, few, text)


def test_a_tuple_keeps_hostile_names() -> None:
    kind = parse_type("Tuple(`a\\`, b` Int8, c Array(Tuple(x UUID)))")
    assert kind.names == ("a`, b", "c")
    assert [child.name for child in kind.walk()] == ["Tuple", "Int8", "Array", "Tuple", "UUID"]


def test_an_unknown_type_is_refused_not_guessed() -> None:
    mapped = iceberg_type(parse_type("SomethingNew(1)"))
    assert (mapped.exact, mapped.lossy) == (None, None)
    assert mapped.problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("UInt64", "`v`"),
        ("String", "`v`"),
        ("Array(Tuple(a Int8))", "`v`"),
        ("DateTime64(3, 'Asia/Tokyo')", "`v`"),
        ("DateTime", "CAST(`v`, 'DateTime64(6, \\'UTC\\')')"),
        ("Enum8('a' = 1)", "CAST(`v`, 'LowCardinality(String)')"),
        ("Nullable(IPv6)", "CAST(`v`, 'Nullable(String)')"),
        ("Array(LowCardinality(String))", "CAST(`v`, 'Array(String)')"),
        (
            "Map(UUID, Tuple(`x y` Nullable(Int128)))",
            "CAST(`v`, 'Map(UInt128, Tuple(`x y` Nullable(Float64)))')",
        ),
    ],
)
def test_values_are_cast_on_the_server_only_where_arrow_would_change_them(text: str, expected: str) -> None:
    assert cast_expression("`v`", parse_type(text)) == expected


def test_a_time_zone_is_the_columns_own_or_none() -> None:
    assert zone_of(parse_type("DateTime64(3, 'Asia/Tokyo')")) == "Asia/Tokyo"
    assert zone_of(parse_type("DateTime")) is None


def test_uuids_swap_their_bytes_in_slices_and_under_nulls() -> None:
    low = bytes(range(16))
    arrived = pa.array([b"\xff" * 16, None, low, low], pa.binary(16))[1:3]
    assert natural_array(arrived, parse_type("Nullable(UUID)"), "u").to_pylist() == [None, low[::-1]]
    nested = pa.array([[low], [], [low, None]], pa.list_(pa.binary(16)))[1:]
    swapped = natural_array(nested, parse_type("Array(Nullable(UUID))"), "u").to_pylist()
    assert swapped == [[], [low[::-1], None]]


def test_a_dictionary_of_bytes_that_are_no_text_is_corrupt() -> None:
    bad = pa.array([b"ok", b"\xff"]).dictionary_encode()
    with pytest.raises(Corrupt, match='column "kind"'):
        natural_array(bad, parse_type("LowCardinality(String)"), "kind")


def test_clauses_are_not_found_inside_names_texts_or_brackets() -> None:
    engine = (
        "ReplicatedMergeTree('/t/ORDER BY x', '{replica}') PARTITION BY (`SETTINGS a`, f(b)) PRIMARY KEY a"
        " ORDER BY (a, `TTL \\` b`) TTL d + toIntervalDay(1) SETTINGS a = 64, x = 'ORDER BY q'"
    )
    assert engine_clauses(engine) == {
        "PARTITION BY": "(`SETTINGS a`, f(b))",
        "PRIMARY KEY": "a",
        "ORDER BY": "(a, `TTL \\` b`)",
        "TTL": "d + toIntervalDay(1)",
        "SETTINGS": "a = 64, x = 'ORDER BY q'",
    }


def test_the_copy_of_a_replicated_table_is_a_plain_one_without_ttl_and_merges() -> None:
    statement = copy_statement(
        ("db", "src"),
        ("pins", "p`1"),
        "ReplicatedReplacingMergeTree('/zk', 'r', v) PARTITION BY d ORDER BY (a, b) TTL d + toIntervalDay(1)"
        " SETTINGS index_granularity = 64, max_bytes_to_merge_at_max_space_in_pool = 9, s = 'it\\'s'",
        "cold",
    )
    assert statement.startswith(
        "CREATE TABLE `pins`.`p\\`1` AS `db`.`src` ENGINE = MergeTree PARTITION BY d ORDER BY (a, b) SETT"
    )
    settings = statement.split(" SETTINGS ")[1]
    assert "index_granularity = 64" in settings
    assert "max_bytes_to_merge_at_max_space_in_pool = 1," in settings
    assert "s = 'it\\'s'" in settings
    assert "storage_policy = 'cold'" in settings
    assert "TTL" not in statement


def test_months_of_a_server_outside_utc_are_not_icebergs_months() -> None:
    types = {"t": parse_type("DateTime"), "u": parse_type("DateTime('UTC')"), "d": parse_type("Date")}
    fields, reason = partition_fields("toYYYYMM(t)", types, "Europe/Berlin")
    assert fields is None
    assert "Europe/Berlin" in reason
    for key in ("toYYYYMM(u)", "toYYYYMM(d)", "toYYYYMM(t, 'UTC')"):
        assert partition_fields(key, types, "Europe/Berlin")[0] is not None
    assert partition_fields("toYYYYMM(t)", types, "UTC")[0] is not None


def test_an_unknown_column_ends_the_sort_order() -> None:
    types = {"a": parse_type("Int8"), "c": parse_type("Int8")}
    assert [one.column for one in sorting_fields("(a, negate(c), c)", types)] == ["a"]


def _part(name: str, first: int, last: int, digest: str) -> Part:
    return Part(name, 1, 1, 1, first, last, digest, "all", "all", has_deletes=False)


def test_a_copy_without_a_counterpart_is_not_accepted() -> None:
    a, b = _part("a", 1, 1, "A"), _part("b", 2, 2, "B")
    assert match_parts([_part("x", 1, 1, "C")], [a], [a, b]) is None


def test_copies_of_a_part_and_of_what_it_was_merged_into_are_not_accepted() -> None:
    a, merged = _part("a", 1, 1, "A"), _part("m", 1, 2, "M")
    assert match_parts([_part("x", 1, 1, "A"), _part("y", 2, 2, "M")], [a], [merged]) is None


def test_copies_are_paired_with_what_was_there_first() -> None:
    a, twin = _part("a", 1, 1, "A"), _part("b", 2, 2, "A")
    pairs = match_parts([_part("x", 1, 1, "A")], [a], [a, twin])
    assert pairs is not None
    assert [origin.name for _, origin in pairs] == ["a"]


@pytest.mark.parametrize(
    ("rows", "megabytes", "marks", "heavy"),
    [
        (10_000_000, 680, 1222, False),
        (200_200, 200, 39, True),
        (1_000_000, 2000, 221, True),
        (300, 1, 2, False),
    ],
)
def test_parts_with_granules_cut_short_are_read_granule_by_granule(
    rows: int, megabytes: int, marks: int, heavy: bool
) -> None:
    part = Part("p", rows, 1, megabytes * 10**6, 1, 1, "", "all", "all", has_deletes=False, marks=marks)
    assert has_heavy_rows(part, 8192) == heavy


def test_ranges_are_cut_at_the_same_offsets_wherever_reading_starts() -> None:
    part = {"rows": 10_000_000, "uncompressed_bytes": 680_000_000}
    whole = list(_ranges(part, 0, 10_000_000))
    assert whole[0][0] == 0
    assert whole[-1][1] == 10_000_000
    assert all(start % 8192 == 0 for start, _ in whole)
    for start, _ in whole:
        assert list(_ranges(part, start, 10_000_000)) == [one for one in whole if one[0] >= start]


def test_heavy_rows_make_short_ranges() -> None:
    part = {"rows": 100, "uncompressed_bytes": 6_400_000_000}
    assert list(_ranges(part, 98, 100)) == [(98, 99), (99, 100)]


@pytest.mark.parametrize(
    ("address", "identity", "user", "password"),
    [
        ("clickhouse://host/db/t", "clickhouse://host:8123/db/t", "default", ""),
        ("clickhouses://u@host/db/t", "clickhouses://host:8443/db/t", "u", ""),
        ("clickhouse://u:p%40%2F@h:1/d%2Fb/t%60", "clickhouse://h:1/d%2Fb/t%60", "u", "p@/"),
        ("clickhouse://u:a/b@c@h:1/db/t", "clickhouse://h:1/db/t", "u", "a/b@c"),
        ("clickhouse://[::1]:9/db/t@x", "clickhouse://::1:9/db/t%40x", "default", ""),
    ],
)
def test_an_address_is_read_with_any_password(address: str, identity: str, user: str, password: str) -> None:
    place = parse_address(address, ROOT)
    assert place.endpoint is not None
    assert (place.identity, place.endpoint.user, place.endpoint.password) == (identity, user, password)
    assert password == "" or password not in place.identity + repr(place)


def test_a_data_folder_may_have_slashes_and_is_found_from_the_project() -> None:
    place = parse_address("chdb:some/deep/folder/my%2Fdb/t", ROOT)
    assert (str(place.folder), place.database, place.table) == ("/project/some/deep/folder", "my/db", "t")
    assert parse_address("chdb:/abs/db/t", ROOT).folder == Path("/abs")


@pytest.mark.parametrize(
    "address", ["chdb:db/t", "chdb:t", "clickhouse://u:secret@host/db", "clickhouse://h/a/b/c"]
)
def test_an_address_that_names_no_table_is_invalid_without_its_password(address: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse_address(address, ROOT)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("address", ["mysql://h/db/t", "no scheme"])
def test_an_unknown_scheme_names_the_known_ones(address: str) -> None:
    from lockstep.config import Config

    with pytest.raises(Invalid) as refused:
        open_source(address, Config(ROOT, "", {}, {}, {}))
    assert "chdb:" in (refused.value.hint or "")
