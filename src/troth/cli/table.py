"""Columns of text that line up. Nothing is cut: a path stays whole when it is piped into another program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_GAP: Final = "  "


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), header: bool = False) -> list[str]:
    """The lines of a table.

    Args:
        rows: cells, equally many in every row.
        right: columns, counted from 0, that end on a line instead of beginning on one.
        header: whether the first row is one; a rule comes below it.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    lines = [
        _GAP.join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    if header:
        lines.insert(1, _GAP.join("-" * width for width in widths))
    return lines
