"""Text for people: a terminal gets colours and boxes, a pipe gets plain lines.

Names come from strangers' tables, so control characters are shown as escapes and never reach the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Grid:
    """A table. A column whose name starts with `>` is aligned to the right, one with `|` never wraps."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Inline]]
    title: str = ""
    footer: Sequence[Inline] = field(default_factory=tuple)


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
        from rich.console import Console

        return Console(file=self.stream, highlight=False, markup=False, emoji=False)

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
        from rich.table import Table

        if grid.title:
            self.console.print(rich_text([grid.title]))
        table = Table(box=box.SIMPLE_HEAD, show_footer=bool(grid.footer))
        for index, name in enumerate(grid.columns):
            table.add_column(
                name.lstrip(">|"),
                justify="right" if name.startswith(">") else "left",
                footer=rich_text([grid.footer[index]]) if grid.footer else "",
                overflow="fold",
                no_wrap=name.startswith((">", "|")),
            )
        for row in grid.rows:
            table.add_row(*(rich_text([cell]) for cell in row))
        self.console.print(table)


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
    rows = [[name.lstrip(">|") for name in part.columns]]
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
    screen.print(line(Span("error: ", "bold red"), error.message))
    if error.hint:
        screen.print(line(Span("hint: ", "bold"), error.hint))


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
