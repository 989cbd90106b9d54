"""JSON lines as an import reads them: exact values, exact lines, and nothing that is guessed."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.errors import Invalid
from lockstep.job import Json
from lockstep.schema import match_columns
from tests.files_lab import FilesLab, schema_of

pytestmark = pytest.mark.long

LIST_OF_LONG: Json = {"type": "list", "element-id": 10, "element-required": False, "element": "long"}
MAP_OF_TEXT: Json = {
    "type": "map",
    "key-id": 11,
    "key": "string",
    "value-id": 12,
    "value": "string",
    "value-required": False,
}
POINT: Json = {
    "type": "struct",
    "fields": [
        {"id": 13, "name": "x", "required": True, "type": "double"},
        {"id": 14, "name": "at", "required": False, "type": "timestamptz"},
        {"id": 15, "name": "id", "required": False, "type": "uuid"},
    ],
}


def read_lines(tmp_path: Path, text: str | bytes, name: str = "a.jsonl", **options: Any) -> FilesLab:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return FilesLab(tmp_path, path, **options)


def test_json_lines_are_read_with_the_types_that_their_beginning_shows(tmp_path):
    lab = read_lines(
        tmp_path,
        '{"id": 1, "price": 1, "ok": true, "day": "2024-02-29", "tags": ["a"], "at": {"x": 1.5}}\n'
        '{"id": 2, "price": 0.1, "note": "01", "seen": "2024-02-29T12:00:00Z", "tags": []}\r\n'
        "\n"
        '{"id": null, "none": null, "at": {"y": "z"}}',
    )
    assert {c.name: c.type for c in lab.table.columns} == {
        "id": "long",
        "price": "double",
        "ok": "boolean",
        "day": "date",
        "tags": {"type": "list", "element-id": 0, "element-required": False, "element": "string"},
        "at": {
            "type": "struct",
            "fields": [
                {"id": 0, "name": "x", "required": False, "type": "double"},
                {"id": 0, "name": "y", "required": False, "type": "string"},
            ],
        },
        "note": "string",
        "seen": "timestamptz",
        "none": "string",
    }
    rows = lab.read_all(batch_bytes=1).rows
    assert [row["id"] for row in rows] == [1, 2, None]
    assert [row["price"] for row in rows] == [1.0, 0.1, None]
    assert [row["tags"] for row in rows] == [["a"], [], None]
    assert [row["at"] for row in rows] == [{"x": 1.5, "y": None}, None, {"x": None, "y": "z"}]
    assert rows[1]["seen"] == datetime(2024, 2, 29, 12, tzinfo=UTC)


def test_fields_that_no_type_holds_exactly_must_be_given_a_type(tmp_path):
    text = '{"mixed": 1, "huge": 99999999999999999999}\n{"mixed": "x"}\n'
    with pytest.raises(Invalid, match="2 columns do not fit") as caught:
        read_lines(tmp_path, text)
    assert 'column "mixed"' in caught.value.message
    assert "it holds numbers and texts. Say its type with --schema." in caught.value.message
    assert "whole numbers beyond 64 bits" in caught.value.message


def test_a_json_array_is_refused_with_a_way_out(tmp_path):
    with pytest.raises(Invalid, match="is one JSON array") as caught:
        read_lines(tmp_path, '[\n{"a": 1}\n]\n')
    assert "jq" in str(caught.value.hint)


GOOD = [
    ("boolean", "true", True),
    ("int", "-5", -5),
    ("long", "9223372036854775807", 2**63 - 1),
    ("double", "1", 1.0),
    ("double", "2.2250738585072011e-308", 2.2250738585072011e-308),
    ("float", "0.5", 0.5),
    ("decimal(5, 2)", "999.99", Decimal("999.99")),
    ("decimal(5, 2)", '"0.10"', Decimal("0.10")),
    ("string", '"é\\u00e9\\ud83d\\ude00"', "éé😀"),
    ("date", '"2024-02-29"', date(2024, 2, 29)),
    ("time", '"12:34"', time(12, 34)),
    ("time", '"12:34:56.123456"', time(12, 34, 56, 123456)),
    ("timestamp", '"2024-02-29T12:00:00.5"', datetime(2024, 2, 29, 12, 0, 0, 500000)),
    ("timestamp", '"2024-02-29T12:00:00.500000000"', datetime(2024, 2, 29, 12, 0, 0, 500000)),
    ("timestamptz", '"2024-02-29T12:00:00.0000000Z"', datetime(2024, 2, 29, 12, tzinfo=UTC)),
    ("timestamptz", '"2024-02-29T12:00:00+01:00"', datetime(2024, 2, 29, 11, tzinfo=UTC)),
    (
        "uuid",
        '"00112233-4455-6677-8899-aabbccddeeff"',
        UUID("00112233-4455-6677-8899-aabbccddeeff"),
    ),
    ("binary", '"00ff"', b"\x00\xff"),
]

BAD = [
    ("time", '"24:00"', "is not a time of the form"),
    ("time", '"12:34Z"', "is not a time of the form"),
    ("time", "12", "is not a text, as time needs"),
    ("boolean", "1", '"1" is not true or false'),
    ("int", "2147483648", "is beyond the range of int"),
    ("long", "1.0", '"1.0" is not a whole number'),
    ("long", '"1"', '"1" is a text, and long needs a number'),
    ("long", "null", "it is NULL, and the target requires a value"),
    ("float", "3.5e38", "is beyond the range of float"),
    ("decimal(5, 2)", "1.234", "more than the 2 digits after the point"),
    ("decimal(5, 2)", "99999", "more than the 3 digits before the point"),
    ("string", "5", '"5" is not a text'),
    ("date", '"2024-02-30"', "is not a date"),
    ("date", "19000", '"19000" is not a text, as date needs'),
    ("timestamp", '"2024-02-29T12:00:00Z"', "has a zone, and timestamp has none"),
    ("timestamptz", '"2024-02-29T12:00:00"', "has no zone"),
    ("uuid", '"x"', "is not a UUID"),
    ("binary", '"0"', "hexadecimal digits"),
]


@pytest.mark.parametrize(("kind", "text", "value"), GOOD)
@pytest.mark.parametrize("beside", ["flat", "nested"])
def test_a_value_that_fits_is_exact_also_beside_nested_ones(tmp_path, kind, text, value, beside):
    schema = schema_of(a=kind, n="long" if beside == "flat" else LIST_OF_LONG)
    other = 7 if beside == "flat" else [7]
    if beside == "nested" and text == '"0.10"':
        return  # inside of nested columns a decimal is a number
    lab = read_lines(tmp_path, f'{{"a": {text}, "n": {json.dumps(other)}}}\n', schema=schema)
    assert lab.read_all().rows == [{"a": value, "n": other}]


@pytest.mark.parametrize(("kind", "text", "reason"), BAD)
def test_a_value_that_does_not_fit_is_rejected_with_the_reason(tmp_path, kind, text, reason):
    good = next(good for known, good, _ in [*GOOD, ("float", "1.5", 1.5)] if known == kind)
    raw = f'{{"n": 2, "a": {text}}}'
    lab = read_lines(
        tmp_path,
        f'{{"n": 1, "a": {good}}}\n\n{raw}\n{{"n": 3, "a": {good}}}\n',
        schema=schema_of(n="long", a=f"{kind}!"),
    )
    outcome = lab.read_all()
    assert [row["n"] for row in outcome.rows] == [1, 3]
    assert outcome.records == [0, 2]
    (reject,) = outcome.rejects
    assert (reject.record, reject.line, reject.column, reject.raw) == (1, 2, "a", raw)
    assert reason in reject.reason
    assert lab.lines_of_rejects() == [("a.jsonl", 3)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("null", "it is not a JSON object"),
        ("5", "it is not a JSON object"),
        ("[1]", "it is not a JSON object"),
        ('{"a": 1}{"a": 2}', "it is not valid JSON: extra data at character 9"),
        ('{"a": 1}} null {"r": {"a": 2}', "it is not valid JSON"),
        ('{"a": 1},"s":2', "it is not valid JSON"),
        ('{"a": 1', "it is not valid JSON"),
        ("{'a': 1}", "it is not valid JSON"),
        ('{"a": 1, "a": 2}', 'it has the field "a" twice'),
        ('{"a": 1, "extra": 2}', 'it has a field "extra" that no column takes'),
        ('{"a": 01}', "it is not valid JSON"),
    ],
)
def test_a_line_that_is_no_record_is_rejected(tmp_path, line, reason):
    text = f'{{"a": 1}}\n{line}\n{{"a": 3}}\n'
    for schema in (schema_of(a="long"), schema_of(a="long", n=LIST_OF_LONG)):
        lab = read_lines(tmp_path, text, schema=schema, ignore_extra=True)
        lab.detail["layouts"] = [[name for name in lab.detail["layouts"][0] if name != "extra"]]
        (task,) = lab.tasks()
        outcome = lab.read(task)
        assert [row["a"] for row in outcome.rows] == [1, 3]
        (reject,) = outcome.rejects
        assert reason in reject.reason
        assert reject.raw == line


def test_bytes_that_are_no_utf8_are_rejected(tmp_path):
    lab = read_lines(tmp_path, b'{"a": "x"}\n{"a": "\xff"}\n', schema=schema_of(a="string"))
    outcome = lab.read_all()
    assert outcome.rows == [{"a": "x"}]
    assert [(r.line, r.raw) for r in outcome.rejects] == [(1, r'{"a": "\xff"}')]
    assert "UTF-8" in outcome.rejects[0].reason


def test_columns_that_the_user_leaves_out_are_ignored_whatever_they_hold(tmp_path):
    lab = read_lines(
        tmp_path,
        '{"a": 1, "b": 2}\n{"a": 3, "c": {"d": []}}\n',
        schema=schema_of(a="long", b="long", c="string"),
    )
    columns = match_columns(lab.table, schema_of(a="long"), ignore_extra=True)
    (task,) = lab.tasks()
    assert lab.read(task, columns=columns).rows == [{"a": 1}, {"a": 3}]


def test_nested_values_are_exact_or_rejected(tmp_path):
    lab = read_lines(
        tmp_path,
        '{"l": [1, null], "m": {"k": "v", "": null}, "p": {"x": 0.1, "at": "2024-02-29 01:00:00Z"}}\n'
        '{"l": [1.5]}\n'
        '{"m": {"k": 1}}\n'
        '{"p": {"at": null}}\n'
        '{"p": {"x": 1, "z": 2}}\n'
        '{"p": {"x": 1, "id": "00112233-4455-6677-8899-aabbccddeeff"}}\n',
        schema=schema_of(l=LIST_OF_LONG, m=MAP_OF_TEXT, p=POINT),
    )
    outcome = lab.read_all()
    at = datetime(2024, 2, 29, 1, tzinfo=UTC)
    assert outcome.records == [0, 5]
    assert outcome.rows[0] == {
        "l": [1, None],
        "m": [("k", "v"), ("", None)],
        "p": {"x": 0.1, "at": at, "id": None},
    }
    assert outcome.rows[1]["p"]["id"] == UUID("00112233-4455-6677-8899-aabbccddeeff")
    assert [(r.record, r.column) for r in outcome.rejects] == [(1, "l"), (2, "m"), (3, "p"), (4, "p")]


def test_nested_values_stand_in_csv_as_json(tmp_path):
    (tmp_path / "a.csv").write_text('l,p\n"[1, 2]","{""x"": 1}"\n,\n"[1",\n')
    lab = FilesLab(tmp_path, "a.csv", schema=schema_of(l=LIST_OF_LONG, p=POINT))
    outcome = lab.read_all()
    assert outcome.rows == [
        {"l": [1, 2], "p": {"x": 1.0, "at": None, "id": None}},
        {"l": None, "p": None},
    ]
    assert [(r.record, r.column, r.reason) for r in outcome.rejects] == [
        (2, "l", '"[1" is not a list<long> in JSON')
    ]


def test_compressed_json_lines_are_read_in_order_with_a_limit(tmp_path):
    for number in (1, 2):
        text = "".join(json.dumps({"n": 10 * number + i}) + "\n" for i in range(5))
        (tmp_path / f"{number}.json.gz").write_bytes(gzip.compress(text.encode()))
    assert [row["n"] for row in FilesLab(tmp_path, tmp_path, limit=7).read_all().rows] == [
        *range(10, 15),
        20,
        21,
    ]


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
)
LINES = st.one_of(
    st.fixed_dictionaries({}, optional={"a": SCALARS, "b": SCALARS, "c": SCALARS, "d": SCALARS}).map(
        json.dumps
    ),
    st.fixed_dictionaries(
        {"a": st.integers(-9, 9), "b": st.text(max_size=5)}, optional={"c": st.floats(allow_nan=False)}
    ).map(lambda value: json.dumps(value, ensure_ascii=False)),
    st.text(st.sampled_from(list('{}[]",:ab1 null\t\\')), max_size=15),
)


def model(line: str) -> Json | None:
    """The row of a line for a: long, b: string, c: double; None if it does not fit."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict) or set(value) - {"a", "b", "c"} or _has_twice(line):
        return None
    a, b, c = value.get("a"), value.get("b"), value.get("c")
    if not (a is None or (type(a) is int and -(2**63) <= a < 2**63)):
        return None
    if not (b is None or (isinstance(b, str) and not any("\ud800" <= char <= "\udfff" for char in b))):
        return None
    if not (c is None or (type(c) in (int, float))):
        return None
    return {"a": a, "b": b, "c": None if c is None else float(c)}


def _has_twice(line: str) -> bool:
    names: list[list[str]] = []
    json.loads(line, object_pairs_hook=lambda pairs: names.append([name for name, _ in pairs]))
    return any(len(set(each)) < len(each) for each in names)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(LINES, max_size=15),
    batch_bytes=st.integers(1, 300),
    task_bytes=st.integers(1, 300),
    line_end=st.sampled_from(["\n", "\r\n"]),
)
def test_any_lines_are_read_as_pythons_json_module_reads_them(
    tmp_path, lines, batch_bytes, task_bytes, line_end
):
    (tmp_path / "a.json").write_bytes(
        ("{}" + line_end + line_end.join(lines)).encode("utf-8", "surrogatepass")
    )
    schema = schema_of(a="long", b="string", c="double")
    lab = FilesLab(tmp_path, "a.json", schema=schema, ignore_extra=True)
    lab.detail["layouts"] = [["a", "b", "c"]]  # whatever else there is comes after the sample
    wanted = [(number, model(line)) for number, line in enumerate(lines, 2) if line.strip(" \t\r")]
    for split in (1 << 40, task_bytes):
        rows: list[Json] = []
        bad_lines = []
        for task in lab.tasks(split):
            outcome = lab.read(task, batch_bytes=batch_bytes)
            rows += outcome.rows
            bad_lines += [
                lab.executor.locate(lab.detail, task.descriptor, reject.record).line
                for reject in outcome.rejects
            ]
            for position in outcome.positions:
                rest = lab.read(task, position, batch_bytes)
                assert rest.records == [n for n in outcome.records if n >= position["record"]]
                assert rest.rejects == [r for r in outcome.rejects if r.record >= position["record"]]
                assert rest.rows == outcome.rows[len(outcome.rows) - len(rest.rows) :]
        assert rows[1:] == [row for _, row in wanted if row is not None]
        assert bad_lines == [line for line, row in wanted if row is None]
