"""A picture of where the time went: stacked bars per worker and epoch, and the losses above them."""

from pathlib import Path
from typing import Any

from maniple.record.times import PARTS, Times
from maniple.watch.canvas import new_figure, save, stack

_WIDTH = 0.8  # of all bars of one epoch


def draw(times: Times, path: Path, *, title: str) -> None:
    """Draw `times` to `path`, in the format that its name asks for."""
    figure = new_figure(path, size=(8, 6))
    losses, bars = figure.subplots(2, 1, sharex=True)
    _draw_losses(losses, times)
    _draw_bars(bars, times)
    losses.set_title(title)
    save(figure, path)


def _draw_losses(axes: Any, times: Times) -> None:
    for rank, epochs in times.workers.items():
        axes.plot([e.number for e in epochs], [e.loss for e in epochs], marker="o", ms=3, label=f"worker {rank}")
    if times.validated:
        numbers = sorted(times.validated)
        axes.plot(numbers, [times.validated[n]["loss"] for n in numbers], "k--", marker="s", ms=4, label="validation")
    axes.set_ylabel("loss")
    axes.legend(fontsize="small")


def _draw_bars(axes: Any, times: Times) -> None:
    """One bar for each worker, side by side in each epoch, in the order of their ranks."""
    width = _WIDTH / len(times.workers)
    for i, epochs in enumerate(times.workers.values()):
        places = [epoch.number - _WIDTH / 2 + (i + 0.5) * width for epoch in epochs]
        stack(axes, places, [epoch.split for epoch in epochs], width=0.94 * width, labelled=i == 0)
    axes.set_ylabel("seconds")
    axes.set_xlabel("epoch; one bar per worker, in the order of their ranks")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.margins(y=0.2)  # room for the legend
    axes.legend(fontsize="small", ncols=len(PARTS), loc="upper center")
