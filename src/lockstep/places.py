"""Records as people find them: input, line and raw text, looked up again once a message or a file needs it.

Rows are known by (task, record) on their way. To look up many of them each task is read once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from lockstep.job import ColumnMap, Json
from lockstep.source import Input, Place, Recalled

if TYPE_CHECKING:
    from lockstep.unique import Duplicate

COLUMNS: Final = ("input", "line", "column", "reason", "raw")
RowId = tuple[int, int]
"""A task and a record of it."""


class Places:
    """Where the records of one import stand. `descriptors` are those of its first stage, by task."""

    def __init__(
        self, files: Input, pin: Json, descriptors: Mapping[int, Json], columns: Sequence[ColumnMap]
    ) -> None:
        self._files, self._pin = files, pin
        self._descriptors, self._columns = descriptors, columns

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *_: Any) -> None:
        self._files.close()

    def recall(self, rows: Iterable[RowId], with_raw: Collection[RowId] = ()) -> dict[RowId, Recalled]:
        """All these rows; their text only of those in `with_raw`, because it may be long.

        Raises: Corrupt, naming the file, if an input is gone or not what was frozen; Invalid if it cannot be
        opened; Retryable if the storage does not answer.
        """
        found: dict[RowId, Recalled] = {}
        by_task: dict[int, list[int]] = {}
        for task, record in sorted(set(rows)):
            by_task.setdefault(task, []).append(record)
        for task, records in by_task.items():
            for one in self._files.recall(self._pin, self._descriptors[task], records, self._columns):
                raw = one.raw if (task, one.record) in with_raw else ""
                found[task, one.record] = Recalled(one.record, one.place, raw)
        return found


def reject_row(place: Place, column: str | None, reason: str, raw: str) -> Json:
    """A rejected record as people see it: in the rejects file, and in a dry run."""
    return dict(zip(COLUMNS, (place.input, place.line, column, reason, raw), strict=True))


def recall_duplicates(
    places: Places, duplicates: Sequence[Duplicate], others: Mapping[RowId, bool] | None = None
) -> dict[RowId, Recalled]:
    """The rows that repeat a key, with their text; the rows that they repeat; and `others`, with their text
    where that is said."""
    others = others or {}
    repeating = {(one.task, one.record) for one in duplicates}
    winners = {(one.winner_task, one.winner_record) for one in duplicates if one.winner_task is not None}
    with_text = repeating | {at for at, wanted in others.items() if wanted}
    return places.recall([*repeating, *winners, *others], with_text)


def winner_of(one: Duplicate, known: Mapping[RowId, Recalled]) -> Place:
    """The row that has the key already: of the input, or of a file of the table."""
    if one.winner_task is None:
        return Place(str(one.winner_file), one.winner_record + 1, in_table=True)
    return known[one.winner_task, one.winner_record].place


def duplicate_row(one: Duplicate, known: Mapping[RowId, Recalled], unique: Sequence[str]) -> Json:
    """A row that repeats a key, as `reject_row` shows it."""
    found = known[one.task, one.record]
    return reject_row(found.place, ", ".join(unique), f"the same key as {winner_of(one, known)}", found.raw)
