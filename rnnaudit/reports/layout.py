"""Text in columns: facts that flow, labels that hang, tables, none wider than asked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from io import StringIO
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

Piece = Text | str

NO_BREAK = "\u00a0"
"""A space at which no line is broken; printed as an ordinary one."""

_SHARE = re.compile(r"(?<=\d) (?=%)")
"""The space of a percentage, at which no line is broken."""

LEAST = 12
"""Columns to which a column that shrinks is cut at most, before the next one is."""


class Column(NamedTuple):
    """A column of a table: its heading, its alignment, and whether it may be shortened."""

    heading: Piece
    right: bool = True
    shrinks: bool = False


def text(piece: Piece, style: str = "") -> Text:
    """Return a styled text."""
    return piece if isinstance(piece, Text) else Text(piece, style)


def flow(pieces: Sequence[Piece], room: int, gap: str = " · ") -> list[Text]:
    """Set pieces side by side and start a new line where the next does not fit.

    A piece wider than ``room`` [columns] is broken at spaces, and a word at any letter.
    """
    lines: list[Text] = []
    for piece in map(text, pieces):
        if not piece.plain:
            continue
        if lines and _width(lines[-1]) + cell_len(gap) + _width(piece) <= room:
            lines[-1] = Text.assemble(lines[-1], gap, piece)
        else:
            lines += _words(piece, room)
    return lines


def hang(label: Piece, lines: Sequence[Text], *, indent: int, column: int) -> Iterator[Text]:
    """Set ``label`` at ``indent`` and the lines beside it, all of them from ``column``."""
    head = Text.assemble(" " * indent, text(label))
    head.append(" " * max(column - _width(head), 1 if head.plain.strip() else 0))
    for line in lines or [Text()]:
        yield Text.assemble(head, line)
        head = Text(" " * column)


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[Piece]], *, indent: int, width: int
) -> Iterator[Text]:
    """Set rows under dim headings; a column that shrinks loses its beginnings, not its ends."""
    cells = [[text(cell) for cell in row] for row in rows]
    sizes = [
        max([_width(text(c.heading)), *(_width(row[i]) for row in cells)])
        for i, c in enumerate(columns)
    ]
    spare = width - indent - sum(sizes) - 2 * (len(columns) - 1)
    for i, column in enumerate(columns):
        if column.shrinks and spare < 0:
            shrunk = max(sizes[i] + spare, min(sizes[i], LEAST))
            spare += sizes[i] - shrunk
            sizes[i] = shrunk
    headings = [text(c.heading, "dim") for c in columns]
    for row in [headings, *cells]:
        line = Text(" " * indent)
        for i, (cell, column) in enumerate(zip(row, columns, strict=True)):
            shown = _ending(cell, sizes[i])
            pad = " " * (sizes[i] - _width(shown))
            line.append("  " if i else "")
            line = (
                Text.assemble(line, pad, shown) if column.right else Text.assemble(line, shown, pad)
            )
        yield line


def to_str(lines: Sequence[Text], *, colour: bool, width: int) -> str:
    """Print lines to a string, with ANSI colour codes or without, whatever the surroundings."""
    out = StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=colour,
        no_color=not colour,
        color_system="standard" if colour else None,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
        _environ={},
    )
    for line in lines:
        line.rstrip()
        console.print(line)
    return out.getvalue().replace(NO_BREAK, " ")


def _width(line: Text) -> int:
    return cell_len(line.plain)


def _words(piece: Text, room: int) -> list[Text]:
    lines: list[Text] = []
    piece = piece.copy()
    piece.plain = _SHARE.sub(NO_BREAK, piece.plain)  # of the same length: styles stay
    for word in piece.split(" "):
        if lines and _width(lines[-1]) + 1 + _width(word) <= room:
            lines[-1] = Text.assemble(lines[-1], " ", word)
        else:
            lines += _letters(word, room)
    return lines


def _letters(word: Text, room: int) -> list[Text]:
    cuts, used = [], 0
    for i, letter in enumerate(word.plain):
        used += cell_len(letter)
        if used > room:
            cuts.append(i)
            used = cell_len(letter)
    return list(word.divide(cuts))


def _ending(cell: Text, room: int) -> Text:
    if _width(cell) <= room:
        return cell
    first = len(cell.plain)
    used = 1
    while first and used + cell_len(cell.plain[first - 1]) <= room:
        first -= 1
        used += cell_len(cell.plain[first])
    return Text.assemble("…", cell[first:])
