"""Rows of words as lines of text, in columns."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, first_left: bool = False) -> list[str]:
    """A line for each row; columns stand to the right, the first to the left if told so."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)]
        if first_left:
            cells[0] = f"{row[0]:<{widths[0]}}"
        lines.append("  ".join(cells))
    return lines
