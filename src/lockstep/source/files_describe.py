"""What text files say of themselves: their columns, their types, and where their records begin."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.csv as arrow_csv

from lockstep.arrow_types import type_text
from lockstep.errors import Invalid
from lockstep.job import Json
from lockstep.source import ParseOptions, SourceColumn
from lockstep.source.files_blocks import Dialect, Records, count_lines, whole_records
from lockstep.source.files_columns import whole_column
from lockstep.source.files_csv import dialect_of, read_fields
from lockstep.source.files_infer import infer
from lockstep.source.files_open import OpenFile, RawFile, bare_name
from lockstep.storage import Storage

SAMPLES_BYTES: Final = 32 << 20
"""Of all files together; each gives an equal share of its beginning."""
LEAST_SAMPLE_BYTES: Final = 4 << 10
MOST_SAMPLE_BYTES: Final = 1 << 20
MOST_RECORD_BYTES: Final = 1 << 30
BOM: Final = b"\xef\xbb\xbf"
LINE_END: Final = re.compile(rb"\r\n?|\n")
NEWLINE: Final = re.compile(rb"\n")
LIKELY_DELIMITERS: Final = (",", "\t", ";", "|")


@dataclass(frozen=True)
class Described:
    """`layouts` are the different headers; `found` are options that were not given and are known now."""

    columns: Sequence[SourceColumn]
    layouts: Sequence[Sequence[str]]
    files: Sequence[RawFile]
    record_bytes: float
    found: dict[str, Any] = field(default_factory=dict)


def sample_bytes(files: int) -> int:
    return max(LEAST_SAMPLE_BYTES, min(MOST_SAMPLE_BYTES, SAMPLES_BYTES // max(1, files)))


def describe_csv(storage: Storage, files: Sequence[RawFile], options: ParseOptions) -> Described:
    """Read the beginning of each file.

    Raises: Invalid if the files do not name the same columns, or name none.
    """
    first = next((_first_line(storage, file, options) for file in files if file.size_bytes), b"")
    delimiter = options.delimiter or _likely_delimiter(files[0].url, first, options.quote.encode())
    dialect = dialect_of(options, delimiter)
    layouts: list[list[str]] = []
    known: list[RawFile] = []
    samples: list[tuple[list[str], bytes]] = []
    for file in files:
        names, placed, sample = _open_csv(storage, file, options, dialect, sample_bytes(len(files)))
        if names is None:
            known.append(placed)  # an empty file has no columns, and no rows that would need them
            continue
        if names not in layouts:
            if layouts:
                if options.header and options.delimiter is None:
                    first = _first_line(storage, file, options)
                    own = _likely_delimiter(file.url, first, options.quote.encode())
                    _require_same_delimiter(delimiter, own, files[0].url, file.url)
                _require_same_columns(layouts[0], names, known[0].url, file.url)
            layouts.append(names)
        known.append(replace(placed, layout=layouts.index(names)))
        samples.append((names, sample))
    if not layouts:
        names = [f["name"] for f in options.schema["fields"]] if options.schema else []
        if not names:
            raise without_columns(files, options.skip)
        layouts.append(names)
    texts = _sampled_texts(samples, dialect, options.null)
    columns = [_column(name, texts.get(name), options.schema) for name in layouts[0]]
    rows = sum(dialect_rows(sample, dialect) for _, sample in samples)
    size_bytes = sum(len(sample) for _, sample in samples)
    return Described(columns, layouts, known, max(1.0, size_bytes / max(1, rows)), {"delimiter": delimiter})


def without_columns(files: Sequence[RawFile], skip: int) -> Invalid:
    """Why nothing tells the columns of files that have no record."""
    filled = next((file for file in files if file.size_bytes), None)
    if skip and filled is not None:
        return Invalid(
            f"nothing is left of {filled.url} after --skip {skip}, so its columns are unknown",
            hint="skip fewer lines: the header is the first line after them",
        )
    return Invalid(f"{files[0].url} is empty, so its columns are unknown", hint="say them with --schema")


def dialect_rows(sample: bytes, dialect: Dialect) -> int:
    return len(dialect.spans(sample))


def _first_line(storage: Storage, file: RawFile, options: ParseOptions) -> bytes:
    with OpenFile(storage, file.url, file.compression) as opened:
        head = opened.read(MOST_SAMPLE_BYTES)
    lines = head.removeprefix(BOM).splitlines()
    return lines[options.skip] if len(lines) > options.skip else b""


def _likely_delimiter(url: str, first: bytes, quote: bytes) -> str:
    """The mark that stands most often in the first line outside of quotes."""
    if bare_name(url).lower().endswith((".tsv", ".tab")):
        return "\t"
    mark = re.escape(quote)
    bare = re.sub(mark + rb"[^" + mark + rb"]*(" + mark + rb"|$)", b"", first) if quote else first
    # A quote inside of a name is no quote: what it hides counts where nothing else does.
    shown = bare if any(each.encode() in bare for each in LIKELY_DELIMITERS) else first
    return max(LIKELY_DELIMITERS, key=lambda each: shown.count(each.encode()))


def _open_csv(
    storage: Storage, file: RawFile, options: ParseOptions, dialect: Dialect, size_bytes: int
) -> tuple[list[str] | None, RawFile, bytes]:
    """Column names (None: it is empty), the file with the place of its first record, and some records."""
    start, line = after_skipped(storage, file, options.skip)
    block = first_records(storage, file, start, dialect, size_bytes)
    spans = dialect.spans(block)
    if not spans:
        return None, replace(file, start=start + len(block), line=line + count_lines(block)), b""
    begin, end = spans[0]
    fields = read_fields(block[begin:end], dialect)
    if any("\udc80" <= char <= "\udcff" for name in fields for char in name) and options.header:
        raise Invalid(
            f"cannot read {file.url}: its header is not valid UTF-8",
            hint="for example `iconv -f LATIN1 -t UTF-8 FILE` makes UTF-8 of it",
        )
    if not options.header:
        return _made_names(len(fields), options.schema), replace(file, start=start, line=line), block
    names = [name or f"c{number}" for number, name in enumerate(fields)]
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise Invalid(
            f'{file.url} has several columns "{repeated[0]}"',
            hint="rename them in its header, or name all columns in a --schema: --no-header --skip 1",
        )
    return names, replace(file, start=start + end, line=line + count_lines(block[:end])), block[end:]


def first_records(storage: Storage, file: RawFile, start: int, records: Records, size_bytes: int) -> bytes:
    """About `size_bytes` of whole records from `start` on; all of a file that is smaller."""
    found = b""
    with OpenFile(storage, file.url, file.compression, start) as opened:
        for block in whole_records(opened, None, records, size_bytes, MOST_RECORD_BYTES, file.url):
            found += block
            if len(found) > size_bytes // 2:
                break
    return found


def after_skipped(
    storage: Storage, file: RawFile, skip: int, line_end: re.Pattern[bytes] = LINE_END
) -> tuple[int, int]:
    """Where the text begins: after the byte order mark, and after the lines that the user skips."""
    with OpenFile(storage, file.url, file.compression) as opened:
        held = opened.read(LEAST_SAMPLE_BYTES)
        at = len(BOM) if held.startswith(BOM) else 0
        line = 1
        more = True
        while line <= skip:
            found = line_end.search(held, at)
            # A return at the end of what was read may be the first half of a line end.
            if found is not None and (found.end() < len(held) or not more or found[0] != b"\r"):
                at, line = found.end(), line + 1
            elif more:
                fresh = opened.read(MOST_SAMPLE_BYTES)
                more = bool(fresh)
                held += fresh
            else:
                return len(held), line
    return at, line


def _made_names(count: int, schema: Json | None) -> list[str]:
    """Columns without a header take the names of the schema in their order, then c0, c1 and so on."""
    given = [f["name"] for f in schema["fields"]] if schema else []
    return [given[number] if number < len(given) else f"c{number}" for number in range(count)]


def _require_same_delimiter(first: str, own: str, first_url: str, url: str) -> None:
    if own != first:
        spoken = {"\t": "tabs"}
        raise Invalid(
            f"the fields of {url} are delimited by {spoken.get(own, own)}, "
            f"those of {first_url} by {spoken.get(first, first)}",
            hint="import them one after the other, each kind on its own",
        )


def _require_same_columns(first: Sequence[str], names: Sequence[str], first_url: str, url: str) -> None:
    """The order may differ; the names may not."""
    missing = [name for name in first if name not in names]
    extra = [name for name in names if name not in first]
    if missing or extra or len(first) != len(names):
        difference = f'no column "{missing[0]}"' if missing else f'a column "{(extra or names)[-1]}" more'
        raise Invalid(
            f"{url} has other columns than {first_url}: {difference}",
            hint="import them one after the other, each kind on its own",
        )


def _sampled_texts(
    samples: Sequence[tuple[Sequence[str], bytes]], dialect: Dialect, nulls: Sequence[str]
) -> dict[str, list[pa.Array]]:
    texts: dict[str, list[pa.Array]] = {}
    for names, sample in samples:
        if sample:
            for name, array in zip(names, _texts(sample, len(names), dialect, nulls), strict=True):
                texts.setdefault(name, []).append(array)
    return texts


def _texts(sample: bytes, width: int, dialect: Dialect, nulls: Sequence[str]) -> Iterator[pa.Array]:
    """The fields of the records that have as many as there are columns; bytes that are no UTF-8 as NULL."""
    table = arrow_csv.read_csv(
        pa.BufferReader(sample),
        arrow_csv.ReadOptions(
            use_threads=False, block_size=len(sample) + 1, column_names=[f"f{i}" for i in range(width)]
        ),
        arrow_csv.ParseOptions(
            delimiter=dialect.delimiter.decode(),
            quote_char=dialect.quote.decode() or False,
            escape_char=dialect.escape.decode() or False,
            newlines_in_values=True,
            invalid_row_handler=lambda _: "skip",
        ),
        arrow_csv.ConvertOptions(
            column_types={f"f{i}": pa.binary() for i in range(width)},
            null_values=list(nulls),
            strings_can_be_null=True,
        ),
    )
    for number in range(width):
        yield _as_text(whole_column(table[f"f{number}"]))


def _as_text(raw: pa.Array) -> pa.Array:
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        values = [None if v is None else v.decode("utf-8", "replace") for v in raw.to_pylist()]
        return pa.array(values, pa.string())


def _column(name: str, texts: Sequence[pa.Array] | None, schema: Json | None) -> SourceColumn:
    given = {f["name"]: f for f in schema["fields"]} if schema else {}
    if name in given:
        return given_column(given[name])
    kind = infer(pa.concat_arrays(texts)) if texts else "string"
    return SourceColumn(name, f"{kind}, by the look of it", kind, nullable=True)


def given_column(field: Json) -> SourceColumn:
    """A column whose type the user or the target says: what does not fit it will be a reject."""
    return SourceColumn(
        field["name"], type_text(field["type"]), field["type"], not field.get("required", False)
    )
