"""Runs drawn by matplotlib: a value against the clock, where the time went, speed-ups if numbers of workers differ."""

from pathlib import Path
from typing import Any

from maniple.record.times import PARTS, UNMEASURED
from maniple.watch import overlay, palette
from maniple.watch.canvas import new_figure, save, stack
from maniple.watch.course import WINDOW
from maniple.watch.runs import Run

_NAME = 44  # letters of a run's name, at most
_BAR_INCHES = 0.3


def draw(
    runs: list[Run],
    path: Path,
    *,
    value: str = "loss",
    against: str = "time",
    window: int = WINDOW,
    is_log: bool = False,
) -> None:
    """Draw `runs` to `path`, in the format that its name asks for."""
    faster = overlay.speedups(runs)
    below = max(2.6 if faster else 1.2, 0.9 + _BAR_INCHES * len(runs))
    figure = new_figure(path, size=(10, 4.8 + below))
    rows = [["value", "value"], ["times", "speedup" if faster else "times"]]
    axes = figure.subplot_mosaic(rows, height_ratios=[4.8, below])
    _draw_lines(axes["value"], runs, overlay.lines(runs, value, against=against, window=window))
    axes["value"].set(xlabel=overlay.axis_words(against, overlay.time_unit(runs)[1]), ylabel=_plain(value))
    axes["value"].set_xlim(left=0)
    if is_log:
        axes["value"].set_yscale("log")
    _draw_times(axes["times"], runs)
    if faster:
        _draw_speedups(axes["speedup"], faster, overlay.baseline(runs))
    save(figure, path)


def shortened(name: str, most: int = _NAME) -> str:
    """A name without its middle, if it is too long."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most - most // 2) :]}"


def label(run: Run) -> str:
    """`digits, 4 workers`."""
    return f"{shortened(run.name)}, {run.workers} worker{'' if run.workers == 1 else 's'}"


def _plain(words: str) -> str:
    """Words as they are: matplotlib takes $ for mathematics, and leaves out of legends what begins with _."""
    return ("\u200a" if words.startswith("_") else "") + words.replace("$", r"\$")


def _draw_lines(axes: Any, runs: list[Run], lines: list[overlay.Line]) -> None:
    thin = sum(not line.is_strong for line in lines)
    faint = max(0.03, min(0.45, 2.5 / max(1, thin)))
    for line in lines:
        colour = palette.colour(line.run)
        if line.is_strong:
            mark = "o" if len(line.xs) < 30 else None
            words = _plain(f"{label(runs[line.run])} ({line.who})")
            axes.plot(line.xs, line.ys, color="white", lw=3.2, zorder=3)  # seen among many thin ones
            axes.plot(line.xs, line.ys, color=colour, lw=1.8, zorder=4, marker=mark, ms=3, label=words)
        else:
            axes.plot(line.xs, line.ys, color=colour, lw=0.6, alpha=faint, zorder=2)
    axes.grid(alpha=0.25)
    axes.margins(x=0.01)
    strong = [line for line in lines if line.is_strong]
    falls = sum(line.ys[-1] <= line.ys[0] for line in strong) * 2 >= len(strong)
    axes.legend(fontsize="small", loc="upper right" if falls else "lower right")


def _draw_times(axes: Any, runs: list[Run]) -> None:
    """A bar for each run, its parts one after another; the first run at the top."""
    places = range(len(runs))
    percent = [{part: 100 * share for part, share in overlay.shares(run).items()} for run in runs]
    stack(axes, places, percent, width=0.7, lying=True)
    notes = ["" if run.overall.measures_data else f"\n({UNMEASURED})" for run in runs]
    names = [_plain(shortened(run.name, 28)) + note for run, note in zip(runs, notes, strict=True)]
    axes.set_yticks(places, names, fontsize="small")
    for tick, place in zip(axes.get_yticklabels(), places, strict=True):
        tick.set_color(palette.colour(place))
    axes.set(xlim=(0, 100), ylim=(len(runs) - 0.5, -0.5))
    axes.set_xlabel("% of all workers' time")
    axes.legend(fontsize="small", ncols=len(PARTS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _draw_speedups(axes: Any, speedups: list[overlay.Speedup], base: overlay.Baseline | None) -> None:
    most = max(count for one in speedups for count in one.workers)
    least = min(count for one in speedups for count in one.workers)
    axes.plot([least, most], [1, most / least], color="#cccccc", ls="--", lw=1, label="as many times as workers")
    for i, one in enumerate(speedups):  # a rule by its marks and strokes: colours are those of the runs
        mark, stroke = palette.MARKS[i % len(palette.MARKS)], palette.STROKES[i % len(palette.STROKES)]
        axes.plot(one.workers, one.times, color=palette.RULE, lw=1, ls=stroke, zorder=2)
        colours = [palette.colour(run) for run in one.runs]
        axes.scatter(one.workers, one.times, c=colours, marker=mark, s=36, zorder=3)
        axes.plot([], [], color=palette.RULE, lw=1, ls=stroke, marker=mark, label=_plain(one.rule or "runs"))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="workers", ylabel="times as fast", ylim=(0, None))
    axes.set_title(base.title if base else "", fontsize="small")
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small", loc="upper left")
