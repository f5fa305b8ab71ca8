"""Rows of words as lines of text, in columns, and what to do where a terminal is too narrow for them."""

import textwrap
from collections.abc import Mapping, Sequence

_GAP = "  "


def aligned(rows: Sequence[Sequence[str]], *, first_left: bool = False) -> list[str]:
    """A line for each row; columns stand to the right, the first to the left if told so."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)]
        if first_left:
            cells[0] = f"{row[0]:<{widths[0]}}"
        lines.append(_GAP.join(cells))
    return lines


def width_of(lines: Sequence[str]) -> int:
    """The columns of a terminal that `lines` need."""
    return max(map(len, lines), default=0)


def upright(columns: Mapping[str, Sequence[str]]) -> list[str]:
    """The same with a line for each entry and the names as a head, which takes some lines itself."""
    folded = [_folded(name, cells) for name, cells in columns.items()]
    height = max(len(head) for head, _ in folded)
    whole = [[""] * (height - len(head)) + [*head, *cells] for head, cells in folded]
    return aligned(list(zip(*whole, strict=True)), first_left=True)


def _folded(name: str, cells: Sequence[str]) -> tuple[list[str], list[str]]:
    """A head of about three lines, and the cells below it without the unit that all of them have."""
    units = {unit for cell in cells for _, gap, unit in [cell.rpartition(" ")] if gap} if len(cells) > 1 else set()
    numbers = [cell for cell in cells if " " in cell]
    if len(units) == 1 and len(numbers) > 1 and all(cell[0].isdigit() for cell in numbers):
        (unit,) = units
        name, cells = f"{name} {unit}", [cell.removesuffix(f" {unit}") for cell in cells]
    least = max(*map(len, cells), *map(len, name.split()), len(name) // 3)
    return textwrap.wrap(name, least, break_long_words=False, break_on_hyphens=False), list(cells)


def fitting(columns: Mapping[str, Sequence[str]], by_need: Sequence[str], width: int) -> dict[str, Sequence[str]]:
    """Of columns that stand upright, those that fit into `width`, in their order: the most needed, the first always."""
    kept = {next(iter(columns))}
    for name in by_need:
        if width_of(upright({one: cells for one, cells in columns.items() if one in kept | {name}})) <= width:
            kept.add(name)
    return {name: cells for name, cells in columns.items() if name in kept}


def listed(names: Sequence[str], values: Sequence[str], width: int) -> list[str]:
    """A line for each name and its value; what is longer than `width` goes on below."""
    room = max(map(len, names)) + 2 * len(_GAP)
    lines: list[str] = []
    for name, value in zip(names, values, strict=True):
        whole = textwrap.wrap(value, max(20, width - room), break_on_hyphens=False) or [""]
        lines.append(f"{_GAP}{name:<{room - 2 * len(_GAP)}}{_GAP}{whole[0]}")
        lines += [" " * room + rest for rest in whole[1:]]
    return lines
