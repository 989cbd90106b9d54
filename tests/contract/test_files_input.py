"""CSV files as an import reads them: exact values, exact lines, the same from any position and split."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import os
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.errors import Corrupt, Invalid
from lockstep.schema import arrow_schema
from lockstep.source import Place, files_open, open_input
from lockstep.source.files_describe import LEAST_SAMPLE_BYTES
from tests.files_lab import FilesLab, schema_of

pytestmark = pytest.mark.long


def csv_file(folder: Path, text: str | bytes, name: str = "a.csv") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read_one(tmp_path: Path, text: str | bytes, **options: Any) -> FilesLab:
    return FilesLab(tmp_path, csv_file(tmp_path, text), **options)


# Shapes


def test_a_csv_is_read_with_the_types_that_its_beginning_shows(tmp_path):
    lab = read_one(
        tmp_path,
        "id,price,ok,day,at,seen,zip,note\n"
        "1,1.5,true,2024-02-29,2024-02-29 12:00:00,2024-02-29T12:00:00Z,01234,hello\n"
        "2,2,false,2024-03-01,2024-02-29T12:00:00.5,2024-02-29 12:00:00+02:00,99999,\n",
    )
    assert {c.name: c.type for c in lab.table.columns} == {
        "id": "long",
        "price": "double",
        "ok": "boolean",
        "day": "date",
        "at": "timestamp",
        "seen": "timestamptz",
        "zip": "string",
        "note": "string",
    }
    outcome = lab.read_all()
    assert [list(row.values()) for row in outcome.rows] == [
        [
            1,
            1.5,
            True,
            date(2024, 2, 29),
            datetime(2024, 2, 29, 12),
            datetime(2024, 2, 29, 12, tzinfo=UTC),
            "01234",
            "hello",
        ],
        [
            2,
            2.0,
            False,
            date(2024, 3, 1),
            datetime(2024, 2, 29, 12, 0, 0, 500000),
            datetime(2024, 2, 29, 10, tzinfo=UTC),
            "99999",
            None,
        ],
    ]
    assert outcome.records == [0, 1]
    assert outcome.chunks[0].batch.schema.equals(arrow_schema(lab.columns), check_metadata=True)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        pytest.param('a,b\n"x\ny",1\n', [("x\ny", 1)], id="quoted newline"),
        pytest.param('a,b\n"x""y",1\n"""",2\n', [('x"y', 1), ('"', 2)], id="doubled quotes"),
        pytest.param("\ufeffa,b\nx,1\n", [("x", 1)], id="byte order mark"),
        pytest.param("a,b\r\nx,1\r\ny,2\r\n", [("x", 1), ("y", 2)], id="CRLF"),
        pytest.param("a,b\rx,1\ry,2", [("x", 1), ("y", 2)], id="CR"),
        pytest.param("a,b\nx,1", [("x", 1)], id="no last newline"),
        pytest.param('a,b\n\n"",1\n\n,2\n', [("", 1), (None, 2)], id="empty lines, empty and NULL"),
        pytest.param('a,b\n5" pipe,1\n6" pipe,2\n', [('5" pipe', 1), ('6" pipe', 2)], id="quotes inside"),
        pytest.param('a,b\n"x"y"z,1\n', [('xy"z', 1)], id="text after a quote"),
        pytest.param('a,b\nx,""\ny,"2"\n', [("x", None), ("y", 2)], id="quoted numbers"),
        pytest.param('"a","b"\n"x, y",1\n', [("x, y", 1)], id="quoted header"),
    ],
)
@pytest.mark.parametrize("batch_bytes", [1, 7, 1 << 20])
def test_records_have_the_shape_that_csv_gives_them(tmp_path, text, rows, batch_bytes):
    lab = read_one(tmp_path, text, schema=schema_of(a="string", b="long"))
    outcome = lab.read_all(batch_bytes=batch_bytes)
    assert [(row["a"], row["b"]) for row in outcome.rows] == rows
    assert outcome.records == list(range(len(rows)))
    assert not outcome.rejects


@pytest.mark.parametrize("text", ["a,b\nx,1", "a,b\nx,1\n", "a,b\rx,1", "\n\na,b\n\nx,1"])
def test_the_last_record_of_a_small_file_tells_its_types_too(tmp_path, text):
    lab = read_one(tmp_path, text)
    assert [column.type for column in lab.table.columns] == ["string", "long"]
    assert lab.read_all().rows == [{"a": "x", "b": 1}]


def test_empty_files_and_files_with_only_a_header_have_no_rows(tmp_path):
    csv_file(tmp_path, "", "1.csv")
    csv_file(tmp_path, "a,b\n", "2.csv")
    csv_file(tmp_path, "a,b", "3.csv")
    csv_file(tmp_path, "a,b\nx,1\n", "4.csv")
    csv_file(tmp_path, gzip.compress(b""), "5.csv.gz")
    lab = FilesLab(tmp_path, tmp_path / "*.csv*")
    assert lab.read_all().rows == [{"a": "x", "b": 1}]
    (tmp_path / "4.csv").unlink()
    assert FilesLab(tmp_path, tmp_path / "*.csv*").read_all().rows == []


def test_files_that_are_all_empty_say_no_columns(tmp_path):
    csv_file(tmp_path, "")
    with pytest.raises(Invalid, match=r"a\.csv is empty, so its columns are unknown"):
        FilesLab(tmp_path, tmp_path / "a.csv")


def test_a_record_of_fifty_megabytes_is_read(tmp_path):
    text = "y" * 50_000_000
    lab = read_one(tmp_path, f"a,b\nx,1\n{text},2\nz,3\n", schema=schema_of(a="string", b="long"))
    outcome = lab.read_all(batch_bytes=1 << 20)
    assert [(len(row["a"]), row["b"]) for row in outcome.rows] == [(1, 1), (50_000_000, 2), (1, 3)]


def test_a_quote_that_is_never_closed_is_said_before_memory_runs_out(tmp_path):
    path = csv_file(tmp_path, 'a,b\nx,1\n"oops,2\n' + "y,3\n" * (17 << 20))
    lab = FilesLab(tmp_path, path, schema=schema_of(a="string", b="long"))
    with pytest.raises(Corrupt, match=r"a\.csv has a record of more than 67 MB") as caught:
        lab.read_all()
    assert "a quote is opened" in str(caught.value.hint)


def test_columns_are_found_by_name_whatever_their_order_in_each_file(tmp_path):
    csv_file(tmp_path, "a,b\nx,1\n", "1.csv")
    csv_file(tmp_path, "b,a\n2,y\n", "2.csv")
    lab = FilesLab(tmp_path, tmp_path)
    assert lab.read_all().rows == [{"a": "x", "b": 1}, {"a": "y", "b": 2}]


def test_files_with_other_columns_are_refused_by_name(tmp_path):
    csv_file(tmp_path, "a,b\nx,1\n", "1.csv")
    csv_file(tmp_path, "a,c\ny,2\n", "2.csv")
    with pytest.raises(Invalid, match=r'2\.csv has other columns than .*1\.csv: no column "b"'):
        FilesLab(tmp_path, tmp_path)


def test_a_pipe_in_a_folder_of_inputs_is_left_alone(tmp_path):
    csv_file(tmp_path, "a\n1\n", "1.csv")
    os.mkfifo(tmp_path / "2.csv")
    assert FilesLab(tmp_path, tmp_path).read_all().rows == [{"a": 1}]


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ('"a,b"|c', ["a,b", "c"]),
        ('id;"Price, EUR"', ["id", "Price, EUR"]),
        ('id|"a;b;c"|x', ["id", "a;b;c", "x"]),
        ("id;price, EUR;x", ["id", "price, EUR", "x"]),
        ('5" pipe;x', ['5" pipe', "x"]),
    ],
)
def test_the_delimiter_is_the_most_frequent_mark_outside_of_quotes(tmp_path, header, names):
    mark = "|" if "|" in header else ";"
    lab = read_one(tmp_path, f"{header}\n{mark.join('12345'[: len(names)])}\n")
    assert [column.name for column in lab.table.columns] == names


def test_files_with_other_delimiters_are_refused_by_these(tmp_path):
    csv_file(tmp_path, "a\tb\nx\t1\n", "1.csv")
    csv_file(tmp_path, "a;b\ny;2\n", "2.csv")
    with pytest.raises(Invalid, match=r"2\.csv are delimited by ;, those of .*1\.csv by tabs"):
        FilesLab(tmp_path, tmp_path)


def test_without_a_header_columns_are_numbered_or_take_the_names_of_the_schema(tmp_path):
    path = csv_file(tmp_path, "x,1\ny,2\n")
    assert FilesLab(tmp_path, path, header=False).read_all().rows == [
        {"c0": "x", "c1": 1},
        {"c0": "y", "c1": 2},
    ]
    named = FilesLab(tmp_path, path, header=False, schema=schema_of(k="string", v="int"))
    assert named.read_all().rows == [{"k": "x", "v": 1}, {"k": "y", "v": 2}]


def test_lines_before_the_header_are_skipped_and_still_counted(tmp_path):
    lab = read_one(
        tmp_path, '# "made\n# today\na,b\nx,1\ny,z\n', skip=2, schema=schema_of(a="string", b="long")
    )
    outcome = lab.read_all()
    assert outcome.rows == [{"a": "x", "b": 1}]
    assert lab.lines_of_rejects() == [("a.csv", 5)]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_are_skipped_whatever_ends_them(tmp_path, end):
    # The return of the second line is the last byte of the first read.
    lines = ["made", "x" * (LEAST_SAMPLE_BYTES - 6), "a,b", "x,1", "y,z"]
    text = "".join(line + end for line in lines)
    lab = read_one(tmp_path, text, skip=2, schema=schema_of(a="string", b="long"))
    assert lab.read_all().rows == [{"a": "x", "b": 1}]
    assert lab.lines_of_rejects() == [("a.csv", 5)]


def test_a_limit_ends_after_so_many_records_of_all_inputs(tmp_path):
    csv_file(tmp_path, "a\n1\nx\n3\n", "1.csv")
    csv_file(tmp_path, "a\n4\n5\n6\n", "2.csv")
    for limit, rows in [(0, []), (1, [1]), (2, [1]), (4, [1, 3, 4]), (9, [1, 3, 4, 5, 6])]:
        lab = FilesLab(tmp_path, tmp_path, limit=limit, schema=schema_of(a="long"))
        for batch_bytes in (1, 4, 1000):
            outcome = lab.read_all(task_bytes=1, batch_bytes=batch_bytes)
            assert [row["a"] for row in outcome.rows] == rows, limit
            (task,) = lab.tasks(task_bytes=1)
            for position in outcome.positions[-1:]:
                assert not lab.read(task, position, batch_bytes).rows


@pytest.mark.parametrize(
    ("text", "delimiter"), [("a\tb\n", "\t"), ("a;b\n", ";"), ("a|b\n", "|"), ("a\n", ",")]
)
def test_the_delimiter_is_found_in_the_header(tmp_path, text, delimiter):
    lab = read_one(tmp_path, text + text.replace("a", "1"))
    assert lab.detail["options"]["delimiter"] == delimiter
    assert len(lab.table.columns) == text.count(delimiter) + 1


def test_a_tsv_is_split_at_tabs(tmp_path):
    path = csv_file(tmp_path, "a, x\tb\n1, 2\t3\n", "a.tsv")
    assert FilesLab(tmp_path, path).read_all().rows == [{"a, x": "1, 2", "b": 3}]


def test_quotes_and_escapes_can_be_chosen_or_switched_off(tmp_path):
    schema = schema_of(a="string", b="long")
    lab = read_one(tmp_path, "a,b\n'x,\ny',1\n", quote="'", schema=schema)
    assert lab.read_all().rows == [{"a": "x,\ny", "b": 1}]
    lab = read_one(tmp_path, 'a,b\n"x,1\n', quote="", schema=schema)
    assert lab.read_all().rows == [{"a": '"x', "b": 1}]
    lab = read_one(tmp_path, 'a,b\n"x\\"\ny",1\nz\\,\\\nq,2\n', escape="\\", schema=schema)
    for batch_bytes in (1, 1000):
        assert lab.read_all(batch_bytes=batch_bytes).rows == [{"a": 'x"\ny', "b": 1}, {"a": "z,\nq", "b": 2}]


def test_null_texts_are_null_unless_they_are_quoted_strings(tmp_path):
    lab = read_one(
        tmp_path, 'a,b\nNA,1\n"NA","NA"\n,NA\n', null=("NA",), schema=schema_of(a="string", b="long")
    )
    assert lab.read_all().rows == [{"a": None, "b": 1}, {"a": "NA", "b": None}, {"a": "", "b": None}]


# Values


GOOD = [
    ("boolean", "true", True),
    ("boolean", "0", False),
    ("int", "-2147483648", -(2**31)),
    ("long", "9223372036854775807", 2**63 - 1),
    ("long", " 7 ", 7),
    ("double", "0.1", 0.1),
    ("double", "2.2250738585072011e-308", 2.2250738585072011e-308),
    ("double", "-inf", float("-inf")),
    ("decimal(5, 2)", "999.99", Decimal("999.99")),
    ("decimal(5, 2)", "-1.5000", Decimal("-1.50")),
    ("decimal(38, 0)", "9" * 38, Decimal("9" * 38)),
    ("date", "0001-01-01", date(1, 1, 1)),
    ("time", "12:34:56.000001", time(12, 34, 56, 1)),
    ("time", " 12:34 ", time(12, 34)),
    ("timestamp", "2024-02-29T12:34:56.123456", datetime(2024, 2, 29, 12, 34, 56, 123456)),
    ("timestamp", "2024-02-29T12:34:56.123456000", datetime(2024, 2, 29, 12, 34, 56, 123456)),
    ("timestamp", "2024-02-29", datetime(2024, 2, 29)),
    ("timestamptz", "2024-02-29 12:34:56.0000000000+01:30", datetime(2024, 2, 29, 11, 4, 56, tzinfo=UTC)),
    ("timestamptz", "2024-02-29 12:34:56-01:30", datetime(2024, 2, 29, 14, 4, 56, tzinfo=UTC)),
    ("string", " x ", " x "),
    ("uuid", "00112233-4455-6677-8899-AABBCCDDEEFF", UUID("00112233-4455-6677-8899-aabbccddeeff")),
    ("binary", "00ff", b"\x00\xff"),
    ("fixed[2]", "00FF", b"\x00\xff"),
]

BAD = [
    ("boolean", "yes", '"yes" is not true or false'),
    ("int", "2147483648", '"2147483648" is beyond the range of int'),
    ("long", "9223372036854775808", "is beyond the range of long"),
    ("long", "1.0", '"1.0" is not a whole number'),
    ("long", "0x10", '"0x10" is not a whole number'),
    ("long", "", "it is NULL, and the target requires a value"),
    ("double", "1e999", "beyond the range of double"),
    ("float", "3.5e38", "beyond the range of float"),
    ("double", "1,5", "it has 3 fields instead of 2"),
    ("double", "abc", '"abc" is not a number'),
    ("decimal(5, 2)", "1.234", "more than the 2 digits after the point"),
    ("decimal(5, 2)", "1000", "more than the 3 digits before the point"),
    ("decimal(5, 2)", "99999", "more than the 3 digits before the point"),
    ("date", "2024-02-30", '"2024-02-30" is not a date of the form'),
    ("time", "25:00:00", "is not a time of the form"),
    ("timestamp", "2024-02-29 12:34:56.1234567", "more than the six digits of a second"),
    ("timestamp", "2024-02-29 12:34:56.1234560001", "more than the six digits of a second"),
    ("timestamp", "2024-02-29 12:34:56.123456000Z", "has a zone, and timestamp has none"),
    ("timestamptz", "2024-02-30 12:34:56.123456000Z", "is not a time of the form"),
    ("timestamp", "2024-02-29 12:34:56Z", "has a zone, and timestamp has none"),
    ("timestamptz", "2024-02-29 12:34:56", "has no zone, and timestamptz needs one"),
    ("timestamp", "2024-02-30 12:00:00", "is not a time of the form"),
    ("uuid", "00112233", '"00112233" is not a UUID'),
    ("binary", "0g", "hexadecimal digits"),
    ("fixed[2]", "00", "is not 4 hexadecimal digits"),
]


@pytest.mark.parametrize(("kind", "text", "value"), GOOD)
@pytest.mark.parametrize("neighbour", ["good", "bad"])
def test_a_value_that_fits_is_exact_whether_or_not_its_neighbours_fit(tmp_path, kind, text, value, neighbour):
    number = "1" if neighbour == "good" else "x"
    lab = read_one(
        tmp_path, f"a,n\n{text},1\n{text},{number}\n{text},3\n", schema=schema_of(a=kind, n="long")
    )
    outcome = lab.read_all()
    assert [row["a"] for row in outcome.rows] == [value] * (3 if neighbour == "good" else 2)
    assert outcome.records == ([0, 1, 2] if neighbour == "good" else [0, 2])
    assert len(outcome.rejects) == (0 if neighbour == "good" else 1)


@pytest.mark.parametrize(
    ("kind", "day", "half"),
    [
        ("timestamp", "2024-01-01T", datetime(2024, 1, 1, 0, 0, 0, 500_000)),
        ("time", " ", time(0, 0, 0, 500_000)),
    ],
)
def test_zeros_beyond_a_microsecond_are_fine_whatever_else_the_block_holds(tmp_path, kind, day, half):
    stamps = [f"{day}00:00:00.5", f"{day}00:00:00.500000000", f"{day}00:00:00.1234567", ""]
    lines = [f"{stamp},{n},{text}" for stamp in stamps for n in ("1", "x") for text in ("ok", stamps[1])]
    schema = schema_of(t=kind, n="long", s="string")
    expected = []
    for stamp, number in itertools.product(stamps, ("1", "x")):
        bad = "t" if "567" in stamp else "n" if number == "x" else None
        expected += [bad, bad]
    for batch_bytes in (1 << 20, 1, 70):
        lab = read_one(tmp_path, "t,n,s\n" + "\n".join(lines), schema=schema)
        outcome = lab.read_all(batch_bytes=batch_bytes)
        assert [r.column for r in outcome.rejects] == [bad for bad in expected if bad]
        assert [(row["t"], row["s"]) for row in outcome.rows] == [
            (t, s) for t in (half, half, None) for s in ("ok", stamps[1])
        ]


def test_times_with_zeros_beyond_a_microsecond_look_like_times(tmp_path):
    lab = read_one(tmp_path, "a,b\n2024-01-01 00:00:00.123456000,2024-01-01T00:00:00.000000000Z\n")
    assert [column.type for column in lab.table.columns] == ["timestamp", "timestamptz"]
    assert len(lab.read_all().rows) == 1


@pytest.mark.parametrize(("kind", "text", "reason"), BAD)
def test_a_value_that_does_not_fit_is_rejected_with_the_reason(tmp_path, kind, text, reason):
    good = next((good for known, good, _ in GOOD if known == kind), "1.5")
    lab = read_one(tmp_path, f"n,a\n1,{good}\n2,{text}\n3,{good}\n", schema=schema_of(n="long", a=f"{kind}!"))
    outcome = lab.read_all()
    assert [row["n"] for row in outcome.rows] == [1, 3]
    assert outcome.records == [0, 2]
    (reject,) = outcome.rejects
    assert (reject.record, reject.line, reject.raw) == (1, 1, f"2,{text}")
    assert reject.column == (None if "fields" in reason else "a")
    assert reason in reject.reason


def test_rejects_name_the_line_where_their_record_begins(tmp_path):
    text = (
        "a,b\n"  # 1
        "x,1\n"  # 2
        '"two\nlines",2\n'  # 3, 4
        "bad,x\n"  # 5
        "\n"  # 6
        '"three\n\nlines",y\n'  # 7, 8, 9
        "short\n"  # 10
        "a,b,c\n"  # 11
        "z,3"  # 12
    )
    for line_end in ("\n", "\r\n"):
        lab = read_one(tmp_path, text.replace("\n", line_end), schema=schema_of(a="string", b="long"))
        for batch_bytes in (1, 10, 1000):
            outcome = lab.read_all(batch_bytes=batch_bytes)
            assert [r.record for r in outcome.rejects] == [2, 3, 4, 5]
            assert [r.line for r in outcome.rejects] == [3, 5, 8, 9]
            assert outcome.records == [0, 1, 6]
            assert lab.lines_of_rejects(batch_bytes=batch_bytes) == [("a.csv", n) for n in (5, 7, 10, 11)]
            assert [r.reason for r in outcome.rejects[2:]] == [
                "it has 1 field instead of 2",
                "it has 3 fields instead of 2",
            ]


def test_bytes_that_are_no_utf8_are_rejected_and_shown_escaped(tmp_path):
    lab = read_one(tmp_path, b"a,b\nx,1\n\xff\xfe,2\n", schema=schema_of(a="string", b="long"))
    outcome = lab.read_all()
    assert outcome.rows == [{"a": "x", "b": 1}]
    (reject,) = outcome.rejects
    assert (reject.column, reject.reason) == ("a", r'"\xff\xfe" is not valid UTF-8')
    assert reject.raw == r"\xff\xfe,2"


def test_the_raw_text_of_a_reject_is_bounded(tmp_path):
    lab = read_one(tmp_path, "a\n" + "x" * 100_000 + "\n", schema=schema_of(a="long"))
    (reject,) = lab.read_all().rejects
    assert len(reject.raw) == 10_000
    assert len(reject.reason) < 200


def test_a_column_that_is_not_asked_for_is_not_parsed(tmp_path):
    lab = read_one(tmp_path, b"a,b\n1,\xff\n", schema=schema_of(a="long", b="string"))
    (task,) = lab.tasks()
    assert lab.read(task, columns=lab.columns[:1]).rows == [{"a": 1}]


# Compression


@pytest.mark.parametrize(
    ("name", "compress"),
    [("a.csv.gz", gzip.compress), ("a.csv.zst", zstandard.compress), ("a.csv.bz2", bz2.compress)],
)
@pytest.mark.parametrize("named", [True, False], ids=["by name", "by content"])
def test_compressed_files_are_read_from_any_position(tmp_path, name, compress, named):
    text = "a,b\n" + "".join(f"x{n},{n}\n" for n in range(1000))
    half = len(text) // 2
    data = compress(text[:half].encode()) + compress(text[half:].encode())
    lab = FilesLab(tmp_path, csv_file(tmp_path, data, name if named else "a.csv"))
    (task,) = lab.tasks(task_bytes=100)
    whole = lab.read(task, batch_bytes=500)
    assert [row["b"] for row in whole.rows] == list(range(1000))
    for position in whole.positions[:: len(whole.positions) // 3]:
        rest = lab.read(task, position, batch_bytes=700)
        assert [row["b"] for row in rest.rows] == list(range(position["record"], 1000))


@pytest.mark.parametrize(
    ("name", "compress"),
    [("a.csv.gz", gzip.compress), ("a.csv.zst", zstandard.compress), ("a.csv.bz2", bz2.compress)],
)
def test_a_compressed_file_that_was_cut_short_is_a_clear_failure(tmp_path, name, compress):
    data = compress(b"a,b\n" + os.urandom(3_000_000).hex().encode() + b",1\n")
    good = csv_file(tmp_path, compress(b"a,b\nx,1\n"), "0" + name)
    cut = csv_file(tmp_path, data[:-20], name)
    with pytest.raises(Invalid, match=rf"cannot read .*{name}"):
        FilesLab(tmp_path, good, cut)
    rows = b"".join(b"%s,1\n" % os.urandom(50).hex().encode() for _ in range(40_000))
    csv_file(tmp_path, compress(b"a,b\n" + rows)[:-20], name)
    lab = FilesLab(tmp_path, good, cut)
    with pytest.raises(Corrupt, match=rf"cannot read .*{name}"):
        lab.read_all()


@pytest.mark.parametrize(
    ("head", "what"),
    [
        (b"PK\x03\x04\x14\x00", "zip archive"),
        (b"PAR1\x15\x04", "Parquet file"),
        (b"Obj\x01\x04", "Avro file"),
        ("a,b\n1,2\n".encode("utf-16"), "UTF-16"),
    ],
)
def test_a_file_that_is_plainly_no_text_is_refused_with_what_it_is(tmp_path, head, what):
    (tmp_path / "a.csv").write_bytes(head)
    with pytest.raises(Invalid, match=rf"a\.csv: it is .*{what}") as caught:
        FilesLab(tmp_path, "a.csv")
    assert caught.value.hint


def test_a_header_with_one_name_twice_is_refused(tmp_path):
    with pytest.raises(Invalid, match='several columns "a"') as caught:
        read_one(tmp_path, "a,b,a\n1,2,3\n")
    assert "--no-header" in str(caught.value.hint)


def test_a_name_that_promises_another_compression_is_refused(tmp_path):
    path = csv_file(tmp_path, "a,b\n", "a.csv.gz")
    with pytest.raises(Invalid, match="has a name of gzip, but its content is not compressed"):
        FilesLab(tmp_path, path)
    assert FilesLab(tmp_path, path, compression="none").read_all().rows == []


# Identity


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"z,9\n")


def _same_size(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"x,1", b"x,2"))


def _same_size_and_time(path: Path) -> None:
    before = path.stat()
    _same_size(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("change", [_append, _same_size, _same_size_and_time, _touch, Path.unlink])
@pytest.mark.parametrize("when", ["before the first row", "before the last row"])
def test_a_file_that_changed_since_it_was_frozen_is_corrupt_and_named(tmp_path, change, when):
    path = csv_file(tmp_path, "a,b\n" + "x,1\n" * 100)
    lab = FilesLab(tmp_path, path)
    (task,) = lab.tasks()
    chunks = lab.executor.read(lab.detail, task.descriptor, None, lab.columns, 100)
    if when == "before the last row":
        next(chunks)
    change(path)
    with pytest.raises(Corrupt, match=r"a\.csv (has changed|is gone) since the import was planned"):
        list(chunks)


@pytest.mark.parametrize("where", ["beginning", "middle", "end"])
def test_a_large_file_is_known_by_its_beginning_its_middle_and_its_end(tmp_path, monkeypatch, where):
    monkeypatch.setattr(files_open, "IDENTITY_BYTES", 100)
    path = csv_file(tmp_path, "k,n\n" + "".join(f"x,{n}\n" for n in range(1000, 1100)))
    lab = FilesLab(tmp_path, path.name)
    before, content = path.stat(), bytearray(path.read_bytes())
    near = {"beginning": 50, "middle": len(content) // 2 + 50, "end": len(content) - 50}[where]
    content[content.index(b"x", near)] = ord("y")
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(Corrupt, match=path.name):
        lab.read_all()


# Which files


def test_inputs_are_paths_folders_and_globs_each_file_once_in_order(tmp_path):
    for name in ("d/2.csv", "d/1.csv", "d/sub/3.csv", "d/.hidden.csv", "d/_tmp.csv", "e.csv", "odd[1].csv"):
        csv_file(tmp_path, f"a\n{name}\n", name)

    def names(*addresses: str) -> list[str]:
        return [row["a"] for row in FilesLab(tmp_path, *addresses).read_all().rows]

    assert names("d") == ["d/1.csv", "d/2.csv", "d/sub/3.csv"]
    assert names("e.csv", "d/[0-9].csv") == ["e.csv", "d/1.csv", "d/2.csv"]
    assert names("d/[12].csv", "d/1.csv", str(tmp_path / "e.csv")) == ["d/1.csv", "d/2.csv", "e.csv"]
    assert names("d/**/*.csv")[:2] == ["d/1.csv", "d/2.csv"]
    assert names("odd[1].csv") == ["odd[1].csv"]


def test_an_address_without_files_is_refused(tmp_path):
    for address, words in (
        ("none.csv", "no file none.csv"),
        ("none*.csv", r"no file that none\*.csv stands for"),
    ):
        with pytest.raises(Invalid, match=words):
            FilesLab(tmp_path, address)
    (tmp_path / "folder").mkdir()
    with pytest.raises(Invalid, match="there is no file in the folder folder"):
        FilesLab(tmp_path, "folder")


def test_an_iceberg_table_is_not_mixed_with_files(tmp_path):
    lab = FilesLab(tmp_path, csv_file(tmp_path, "a\n1\n"))
    with pytest.raises(Invalid, match="imported alone"):
        open_input(["iceberg://lake/a.b", "a.csv"], lab.options, lab.config)


# Splitting and resuming


def test_small_files_share_a_task_and_large_ones_make_several(tmp_path):
    csv_file(tmp_path, "a\n" + "1\n" * 10, "1.csv")
    csv_file(tmp_path, "a\n" + "2\n" * 10, "2.csv")
    csv_file(tmp_path, "a\n" + "3\n" * 1000, "3.csv")
    lab = FilesLab(tmp_path, tmp_path)
    tasks = lab.tasks(task_bytes=500)
    assert [len(task.descriptor["pieces"]) for task in tasks] == [2, 1, 1, 1, 1]
    assert sum(task.size_bytes for task in tasks) == 2040
    assert tasks[0].rows == 20
    assert all(200 <= task.rows <= 300 for task in tasks[1:])
    assert lab.tasks(task_bytes=500) == tasks


def test_a_record_is_found_again_by_file_and_line(tmp_path):
    csv_file(tmp_path, 'a\n1\n"2\n2"\n', "1.csv")
    csv_file(tmp_path, 'a\n"3\n"\n\n4\n', "2.csv")
    lab = FilesLab(tmp_path, tmp_path)
    (task,) = lab.tasks()
    places = [lab.executor.locate(lab.detail, task.descriptor, n) for n in range(4)]
    first, second = str(tmp_path / "1.csv"), str(tmp_path / "2.csv")
    assert places == [Place(first, 2), Place(first, 3), Place(second, 2), Place(second, 5)]
    assert lab.recall(task, [1, 3]) == [(places[1], '"2\n2"'), (places[3], "4")]
    with pytest.raises(Corrupt, match="not in its inputs any more"):
        lab.recall(task, [3, 4])


HOSTILE = st.text(st.sampled_from(list('ab1,"\n\r\\ é')), max_size=12)
ROWS = st.lists(st.tuples(HOSTILE, HOSTILE), max_size=12)


def expected(text: str, **dialect: Any) -> list[list[str]]:
    return [row for row in csv.reader(io.StringIO(text, newline=""), **dialect) if row]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    raw=st.text(st.sampled_from(list('ab1,,"""\n\n\r\\ é')), max_size=80),
    batch_bytes=st.integers(1, 40),
    task_bytes=st.integers(1, 60),
    escape=st.sampled_from([None, None, "\\"]),
)
def test_any_text_is_read_as_pythons_csv_module_reads_it(tmp_path, raw, batch_bytes, task_bytes, escape):
    """Whatever the blocks, the tasks and the position to go on from; what is not two fields is a reject, and
    so is a record at the end whose quote is never closed."""
    if escape:
        # Python takes an escape with nothing after it for a newline, and one after a closing quote as it is.
        raw = raw.replace('"\\', '"a') + "a"
    path = csv_file(tmp_path, "k,v\n" + raw)
    schema = schema_of(k="string", v="string")
    lab = FilesLab(tmp_path, path, schema=schema, escape=escape, null=("\0",))
    wanted = expected(raw, escapechar=escape)
    if _ends_open(raw, escape):
        wanted.pop()
    good = [tuple(row) for row in wanted if len(row) == 2]
    for split in (1 << 40, task_bytes):
        found: list[tuple[str, str]] = []
        lines = []
        for task in lab.tasks(split):
            outcome = lab.read(task, batch_bytes=batch_bytes)
            found += [(row["k"], row["v"]) for row in outcome.rows]
            lines += [
                lab.executor.locate(lab.detail, task.descriptor, reject.record).line
                for reject in outcome.rejects
            ]
            recalled = lab.recall(task, [reject.record for reject in outcome.rejects])
            assert [(place.line, text) for place, text in recalled] == [
                (line, reject.raw)
                for line, reject in zip(lines[-len(recalled) :], outcome.rejects, strict=False)
            ]
            for position in outcome.positions:
                rest = lab.read(task, position, batch_bytes)
                done = [n for n in outcome.records if n < position["record"]]
                assert done + rest.records == outcome.records
                assert outcome.rows[len(done) :] == rest.rows
                assert [r for r in outcome.rejects if r.record >= position["record"]] == rest.rejects
        assert found == good
        assert lines == _lines_of_bad_records(raw, escape)


def _ends_open(raw: str, escape: str | None) -> bool:
    """Whether one more line would still belong to the last record."""
    before, after = (len(expected(text, escapechar=escape)) for text in (raw, f"{raw}\nx,y"))
    return after == before


def _lines_of_bad_records(raw: str, escape: str | None) -> list[int]:
    reader = csv.reader(_lines(raw), escapechar=escape)
    lines, before, last, good = [], 0, 0, True
    for row in reader:
        if row:
            last, good = before + 2, len(row) == 2
            lines += [] if good else [last]
        before = reader.line_num
    return [*lines, last] if good and _ends_open(raw, escape) else lines


def test_a_quote_that_is_never_closed_makes_a_reject_and_takes_no_rows_along_unseen(tmp_path):
    path = csv_file(tmp_path, 'k,v\n1,a\n2,"b\n3,c\n4,d\n')
    lab = FilesLab(tmp_path, path)
    (task,) = lab.tasks()
    outcome = lab.read(task)
    assert [row["k"] for row in outcome.rows] == [1]
    (reject,) = outcome.rejects
    assert reject.reason == "a quote is opened in it and never closed"
    assert reject.raw == '2,"b\n3,c\n4,d'
    assert lab.executor.locate(lab.detail, task.descriptor, reject.record).line == 3


def _lines(raw: str) -> list[str]:
    """Physical lines, ended by \\n, \\r\\n or \\r only."""
    return list(io.StringIO(raw, newline=""))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(HOSTILE, st.one_of(st.integers(-(2**63), 2**63 - 1).map(str), HOSTILE)), max_size=20
    ),
    batch_bytes=st.integers(1, 200),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
def test_what_pythons_csv_module_writes_is_read_back(tmp_path, rows, batch_bytes, quoting):
    out = io.StringIO(newline="")
    writer = csv.writer(out, quoting=quoting)
    writer.writerow(("k", "n"))
    writer.writerows(rows)
    lab = FilesLab(tmp_path, csv_file(tmp_path, out.getvalue()), schema=schema_of(k="string", n="long"))
    outcome = lab.read_all(batch_bytes=batch_bytes)
    wanted = [(number, key, _whole(text)) for number, (key, text) in enumerate(rows)]
    bad = {reject.record for reject in outcome.rejects}
    assert bad == {number for number, _, value in wanted if value is False}
    assert outcome.records == [number for number, _, value in wanted if value is not False]
    assert [row["n"] for row in outcome.rows] == [value for _, _, value in wanted if value is not False]
    keys = [
        key or None if quoting == csv.QUOTE_MINIMAL else key for _, key, value in wanted if value is not False
    ]
    assert [row["k"] for row in outcome.rows] == keys


def _whole(text: str) -> int | bool | None:
    """None for NULL, False for what is no whole number."""
    if not text:
        return None
    try:
        return (
            int(text)
            if text.strip(" \t").lstrip("-").isascii() and text.strip(" \t").lstrip("-").isdigit()
            else False
        )
    except ValueError:
        return False
