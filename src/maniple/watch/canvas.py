"""A canvas: a figure of matplotlib, from its first import to the file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maniple.errors import InvalidArgument
from maniple.record.folder import write_whole
from maniple.record.times import PARTS, WORDS
from maniple.watch import palette
from maniple.watch.extras import need

_DPI = 120


def new_figure(path: Path, *, size: tuple[float, float]) -> Any:
    """An empty figure of so many inches, to be saved to `path`."""
    figures = need("matplotlib.figure", extra="plot", what=f"drawing {path.name}")
    return figures.Figure(figsize=size, layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write a figure in the format that its name asks for."""
    try:
        figure.savefig(path, dpi=_DPI)
    except ValueError:  # matplotlib lists all that it knows
        raise InvalidArgument(f"{path} cannot be drawn: {path.suffix!r} is no picture. Name it .png or .svg.") from None
    except OSError as error:
        raise unwritable(path, error) from None


def write_text(path: Path, text: str) -> None:
    """Write a page."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError) -> InvalidArgument:
    """Why a picture could not be written."""
    reason = error.strerror or error
    return InvalidArgument(f"{path} cannot be written: {reason}. Give a path in a folder that is there and yours.")


def stack(
    axes: Any, places: Sequence[float], splits: list[dict[str, float]], *, width: float, labelled: bool = True,
    lying: bool = False,
) -> None:  # fmt: skip
    """Bars at `places`, each of the PARTS in its own colour upon the one before; `lying`, beside it."""
    draw, base = (axes.barh, "left") if lying else (axes.bar, "bottom")
    reached = [0.0] * len(places)
    for part in PARTS:
        lengths = [split[part] for split in splits]
        label = WORDS[part] if labelled else None
        draw(places, lengths, width, color=palette.PARTS[part], label=label, **{base: reached})
        reached = [low + length for low, length in zip(reached, lengths, strict=True)]
