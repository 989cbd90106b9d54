"""Pieces of a source, gathered into tasks by their size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

Piece = TypeVar("Piece")


def gathered(sized: Iterable[tuple[Piece, int]], most_bytes: int) -> Iterator[tuple[list[Piece], int]]:
    """Neighbours, each with its bytes, together up to `most_bytes`; one that is larger stands alone."""
    pieces: list[Piece] = []
    held_bytes = 0
    for piece, size_bytes in sized:
        if pieces and held_bytes + size_bytes > most_bytes:
            yield pieces, held_bytes
            pieces, held_bytes = [], 0
        pieces.append(piece)
        held_bytes += size_bytes
    if pieces:
        yield pieces, held_bytes
