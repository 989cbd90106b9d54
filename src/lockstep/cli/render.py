"""Text for people: a terminal gets colours and boxes, a pipe gets plain lines.

Names come from strangers' tables, so control characters are shown as escapes and never reach the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, TextIO

from lockstep.errors import LockstepError
from lockstep.job import State

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

STATE_STYLES: Final = {
    State.PENDING: "cyan",
    State.RUNNING: "blue",
    State.PAUSED: "yellow",
    State.COMMITTING: "magenta",
    State.COMPLETED: "green",
    State.FAILED: "red",
    State.KILLED: "yellow",
}
NOTHING: Final = "–"
MARKS: Final = ">|~"
MOST_LINES: Final = 100
GAP: Final = 2
LEAST_WRAPPED: Final = 20
LEAST_SHORTENED: Final = 18


@dataclass(frozen=True)
class Span:
    """A stretch of text with a style of rich; the style is dropped in a pipe."""

    text: str
    style: str = ""


Inline = str | Span


@dataclass(frozen=True)
class Line:
    """One line made of spans. `indent` moves it, and what it wraps to, to the right."""

    spans: Sequence[Inline]
    indent: int = 0

    @property
    def plain(self) -> str:
        return " " * self.indent + "".join(
            safe(span if isinstance(span, str) else span.text) for span in self.spans
        )


def line(*spans: Inline, indent: int = 0) -> Line:
    return Line(spans, indent)


def message_lines(head: Inline, text: str, indent: int = 0) -> list[Line]:
    """A message of ours, which may have several lines; those after the first are indented.

    A line break in a name of a stranger's table makes a line too, but none that looks like the first.
    """
    first, *rest = text.split("\n")
    shown = [line(head, first, indent=indent)]
    for below in rest[:MOST_LINES]:
        blanks = len(below) - len(below.lstrip(" "))
        shown.append(line(below.lstrip(" "), indent=indent + max(2, min(blanks, 8))))
    if len(rest) > MOST_LINES:
        shown.append(line(f"… and {plural(len(rest) - MOST_LINES, 'more line')}", indent=indent + 2))
    return shown


@dataclass(frozen=True)
class Grid:
    """A table. The first character of a column's name says how it takes too little room: `>` (aligned to
    the right) and `|` never wrap, `~` is shortened in its middle, any other wraps.

    `drop` names the columns that a narrow terminal can do without, the least important first. A pipe gets
    all of them.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Inline]]
    title: str = ""
    footer: Sequence[Inline] = field(default_factory=tuple)
    drop: Sequence[str] = ()
    above: Sequence[str] = ()
    """What is the same in all rows, said once where the columns do not fit."""


def safe(text: str) -> str:
    """The text with every control character shown as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Screen:
    """One output stream: prints lines and grids as the stream deserves."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.is_terminal = stream.isatty()

    @cached_property
    def console(self) -> Console:
        return self._console()

    def _console(self, width: int | None = None) -> Console:
        from rich.console import Console

        return Console(file=self.stream, width=width, highlight=False, markup=False, emoji=False)

    def print(self, part: Grid | Line | str) -> None:
        if not self.is_terminal:
            for text in plain_lines(part):
                self.stream.write(text + "\n")
            self.stream.flush()
        elif isinstance(part, Grid):
            self._print_grid(part)
        else:
            from rich.padding import Padding

            whole = part if isinstance(part, Line) else line(part)
            self.console.print(Padding(rich_text(whole.spans), (0, 0, 0, whole.indent)))

    @contextmanager
    def busy(self, doing: str) -> Iterator[None]:
        """Say on a terminal what takes a moment; the line is gone afterwards. A pipe gets nothing."""
        if not self.is_terminal:
            yield
            return
        with self.console.status(rich_text([doing])):
            yield

    def _print_grid(self, grid: Grid) -> None:
        from rich import box
        from rich.padding import Padding
        from rich.table import Table

        grid, widths = fit(grid, self.console.width - 2)
        for text in filter(None, (grid.title, *grid.above)):
            self.console.print(Padding(rich_text([text]), (0, 0, 0, 1)))
        table = Table(
            box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, GAP - 1, 0, 0), show_footer=bool(grid.footer)
        )
        for index, (name, width) in enumerate(zip(grid.columns, widths, strict=True)):
            table.add_column(
                name.lstrip(MARKS),
                justify="right" if name.startswith(">") else "left",
                footer=rich_text([grid.footer[index]]) if grid.footer else "",
                overflow="fold",
                width=width,
            )
        for row in grid.rows:
            table.add_row(*(rich_text([cell]) for cell in row))
        # A terminal that is narrower than the least wraps the lines itself: ugly, but nothing is lost.
        needed = _total(widths) + 2
        console = self.console if needed <= self.console.width else self._console(needed)
        console.print(table)


def fit(grid: Grid, width: int) -> tuple[Grid, list[int]]:
    """The grid as it fits into `width`, with the width of each of its columns.

    What is too much goes in this order: the lengths of `~` and of wrapping columns; a `~` column with one
    value in all rows, which is said above; the columns of `drop`.
    """
    candidates = list(grid.drop)
    while True:
        natural = [_natural(grid, index) for index in range(len(grid.columns))]
        least = [_least(name, full) for name, full in zip(grid.columns, natural, strict=True)]
        if _total(natural) <= width:
            return grid, natural
        if _common_column(grid) is not None:
            while (common := _common_column(grid)) is not None:
                grid = _hoisted(grid, common, width)
        elif _total(least) <= width or not candidates:
            widths = _shared(natural, least, width)
            return _shortened(grid, widths), widths
        else:
            grid = _without(grid, candidates.pop(0))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _natural(grid: Grid, index: int) -> int:
    from rich.cells import cell_len

    cells = [grid.columns[index].lstrip(MARKS), *(_plain(row[index]) for row in grid.rows)]
    if grid.footer:
        cells.append(_plain(grid.footer[index]))
    return max(map(cell_len, cells))


def _least(name: str, natural: int) -> int:
    if name.startswith((">", "|")):
        return natural
    return min(natural, LEAST_SHORTENED if name.startswith("~") else LEAST_WRAPPED)


def _shared(natural: Sequence[int], least: Sequence[int], width: int) -> list[int]:
    """The least for each column, and what is left over for those that need more, the neediest last."""
    widths = list(least)
    needy = sorted((full - widths[i], i) for i, full in enumerate(natural) if full > widths[i])
    for place, (need, index) in enumerate(needy):
        spare = max(0, width - _total(widths))
        widths[index] += min(need, spare // (len(needy) - place))
    return widths


def _common_column(grid: Grid) -> int | None:
    for index, name in enumerate(grid.columns):
        if name.startswith("~") and len({_plain(row[index]) for row in grid.rows}) == 1:
            return index
    return None


def _hoisted(grid: Grid, index: int, width: int) -> Grid:
    name = f"{grid.columns[index].lstrip(MARKS)}: "
    said = name + middle_out(_plain(grid.rows[0][index]), max(LEAST_SHORTENED, width - len(name)))
    return replace(_picked(grid, index), above=[*grid.above, said])


def _without(grid: Grid, name: str) -> Grid:
    names = [column.lstrip(MARKS) for column in grid.columns]
    return _picked(grid, names.index(name)) if name in names else grid


def _picked(grid: Grid, index: int) -> Grid:
    """The grid without one column."""

    def rest(cells: Sequence[Inline]) -> list[Inline]:
        return [cell for i, cell in enumerate(cells) if i != index]

    columns = [name for i, name in enumerate(grid.columns) if i != index]
    return replace(grid, columns=columns, rows=[rest(row) for row in grid.rows], footer=rest(grid.footer))


def _shortened(grid: Grid, widths: Sequence[int]) -> Grid:
    def cell(name: str, value: Inline, width: int) -> Inline:
        if not name.startswith("~"):
            return value
        text = middle_out(_plain(value), width)
        return text if isinstance(value, str) else Span(text, value.style)

    rows = [[cell(*three) for three in zip(grid.columns, row, widths, strict=True)] for row in grid.rows]
    return replace(grid, rows=rows)


def middle_out(text: str, width: int) -> str:
    """The text without its middle; the end, which tells tables apart, keeps the larger share."""
    if len(text) <= width:
        return text
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def rich_text(spans: Iterable[Inline]) -> Text:
    from rich.text import Text

    text = Text()
    for span in spans:
        if isinstance(span, str):
            text.append(safe(span))
        else:
            text.append(safe(span.text), style=span.style)
    return text


def plain_lines(part: Grid | Line | str) -> list[str]:
    """What a pipe gets: one line per row, columns kept apart by two spaces."""
    if isinstance(part, str):
        return [safe(part)]
    if isinstance(part, Line):
        return [part.plain]
    rows = [[name.lstrip(MARKS) for name in part.columns]]
    rows += [[_plain(cell) for cell in row] for row in part.rows]
    if part.footer:
        rows.append([_plain(cell) for cell in part.footer])
    widths = [max(len(row[i]) for row in rows) for i in range(len(part.columns))]
    lines = [safe(part.title)] if part.title else []
    for row in rows:
        cells = (
            cell.rjust(width) if name.startswith(">") else cell.ljust(width)
            for name, cell, width in zip(part.columns, row, widths, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return lines


def _plain(cell: Inline) -> str:
    return safe(cell if isinstance(cell, str) else cell.text)


def state_span(state: State) -> Span:
    return Span(state.value, STATE_STYLES[state])


def print_error(error: LockstepError, stream: TextIO | None = None) -> None:
    """`error: …` and `hint: …` on standard error."""
    screen = Screen(stream or sys.stderr)
    for each in message_lines(Span("error: ", "bold red"), error.message):
        screen.print(each)
    for each in hint_lines(error.hint):
        screen.print(each)


def hint_lines(hint: str | None, indent: int = 0) -> list[Line]:
    return message_lines(Span("hint: ", "bold"), hint, indent) if hint else []


# Numbers and times as people read them


def number(value: int | float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def percent(fraction: float) -> str:
    """Rounded down, so that only what is whole reads 100 %."""
    return f"{int(fraction * 100)} %"


def size(value: int | float | None) -> str:
    if value is None:
        return NOTHING
    amount = float(value)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.95 or (unit == "B" and amount < 1000):
            return f"{amount:,.0f} B" if unit == "B" else f"{amount:,.1f} {unit}"
        amount /= 1000
    return f"{amount:,.1f} TB"


def rate(rows_per_s: float | None) -> str:
    return NOTHING if rows_per_s is None else f"{rows_per_s:,.0f}/s"


def duration(seconds: float | None) -> str:
    """At most two units: `7 s`, `1 min 20 s`, `3 h 5 min`, `2 d 4 h`."""
    if seconds is None:
        return NOTHING
    whole = max(0, round(seconds))
    if whole == 0 and seconds > 0:
        return f"{seconds:.1f} s"
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    for index, (unit, length) in enumerate(units):
        if whole >= length:
            count, rest = divmod(whole, length)
            if index + 1 == len(units) or rest < units[index + 1][1]:
                return f"{count} {unit}"
            return f"{count} {unit} {rest // units[index + 1][1]} {units[index + 1][0]}"
    return "0 s"


def ago(moment: float | None, now: float) -> str:
    """The largest unit is enough: `17 min ago`."""
    return NOTHING if moment is None else f"{' '.join(duration(now - moment).split()[:2])} ago"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
