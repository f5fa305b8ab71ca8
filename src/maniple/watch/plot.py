"""Pictures by matplotlib: runs overlaid (`maniple plot`), and the time split of a model's epochs (`maniple record`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maniple.errors import InvalidArgument
from maniple.monitor.baseline import Baseline
from maniple.monitor.target import Target
from maniple.monitor.value_series import WINDOW
from maniple.record.folder import write_whole
from maniple.record.times import PARTS, UNMEASURED, WORDS, Times
from maniple.text import count
from maniple.watch import overlay
from maniple.watch.compare import Speedup, baseline, speedups
from maniple.watch.exports import import_extra
from maniple.watch.run_reader import Run

_DPI = 120
_MAX_NAME = 44  # letters of a run's name in a legend
_MAX_NAMED = 8  # thin lines that a legend can name
_BAR_INCHES = 0.3  # height of a run's bar and its name
_EPOCH_WIDTH = 0.8  # of all bars of one epoch; the rest separates it from the next


def draw(
    runs: list[Run],
    path: Path,
    *,
    value: str = "loss",
    target: Target | None = None,
    against: str = "time",
    window: int = WINDOW,
    is_log: bool = False,
) -> None:
    """Draw `runs` to `path`; its suffix chooses the format."""
    faster = speedups(runs)
    below = max(2.6 if faster else 1.2, 0.9 + _BAR_INCHES * len(runs))
    figure = _new_figure(path, size=(10, 4.8 + below))
    rows = [["value", "value"], ["times", "speedup" if faster else "times"]]
    axes = figure.subplot_mosaic(rows, height_ratios=[4.8, below])
    lines = overlay.lines(runs, value, against=against, window=window)
    _draw_lines(axes["value"], runs, lines)
    _draw_bands(axes["value"], runs, overlay.bands(runs, value, against=against, window=window))
    if target is not None:
        _draw_target(axes["value"], runs, target, overlay.target_marks(runs, target, against=against, window=window))
    strong = [line for line in lines if line.is_strong]
    falls = sum(line.ys[-1] <= line.ys[0] for line in strong) * 2 >= len(strong)
    axes["value"].legend(fontsize="small", loc="upper right" if falls else "lower right")
    axes["value"].set(xlabel=overlay.axis_title(against, overlay.time_unit(runs)[1]), ylabel=_escape(value))
    axes["value"].set_xlim(left=0)
    if is_log:
        axes["value"].set_yscale("log")
    _draw_shares(axes["times"], runs)
    if faster:
        _draw_speedups(axes["speedup"], faster, baseline(runs))
    save(figure, path)


def draw_times(times: Times, path: Path, *, title: str) -> None:
    """Draw loss and time split of each worker's epochs to `path`; its suffix chooses the format."""
    figure = _new_figure(path, size=(8, 6))
    losses, bars = figure.subplots(2, 1, sharex=True)
    _draw_losses(losses, times)
    _draw_epochs(bars, times)
    losses.set_title(title)
    save(figure, path)


def label(run: Run) -> str:
    """`digits, 4 workers`."""
    return f"{shortened(run.name)}, {count(run.workers, 'worker')}"


def shortened(name: str, most: int = _MAX_NAME) -> str:
    """`name`, without its middle if it has more than `most` letters."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most - most // 2) :]}"


def save(figure: Any, path: Path) -> None:
    """Write a figure; the suffix of `path` chooses the format."""
    try:
        figure.savefig(path, dpi=_DPI)
    except ValueError:  # matplotlib's message lists all formats it knows
        raise InvalidArgument(
            f"{path} cannot be drawn: {path.suffix!r} is not an image format. Name it .png or .svg."
        ) from None
    except OSError as error:
        raise _unwritable(path, error) from None


def write_text(path: Path, text: str) -> None:
    """Write a page."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> InvalidArgument:
    reason = error.strerror or error
    return InvalidArgument(f"{path} cannot be written: {reason}. Give a path in an existing folder of yours.")


def _new_figure(path: Path, *, size: tuple[float, float]) -> Any:
    figures = import_extra("matplotlib.figure", extra="plot", what=f"drawing {path.name}")
    return figures.Figure(figsize=size, layout="constrained")


def _escape(text: str) -> str:
    """Text as it is: matplotlib takes $ for mathematics and leaves names that begin with _ out of legends."""
    return ("\u200a" if text.startswith("_") else "") + text.replace("$", r"\$")


def _draw_bands(axes: Any, runs: list[Run], bands: list[overlay.Band]) -> None:
    for band in bands:
        text = _escape(f"{shortened(runs[band.run].name)}, {band.who}")
        shape = {"color": overlay.colour(band.run), "alpha": 0.18, "lw": 0, "zorder": 2}
        axes.fill_between(band.xs, band.low, band.high, label=text, **shape)


def _draw_target(axes: Any, runs: list[Run], target: Target, marks: list[overlay.TargetMark]) -> None:
    """A dashed line at the target, and a mark where each run has reached it."""
    text = f"target {target.name} {target.text}"
    axes.axhline(target.value, color=overlay.RULE, ls="--", lw=1, zorder=2.5, label=_escape(text))
    for mark in marks:
        name = _escape(f"{shortened(runs[mark.run].name)}, {mark.text}")
        shape = {"marker": "*", "s": 130, "edgecolors": "white", "linewidths": 0.8, "zorder": 5}
        axes.scatter([mark.x], [mark.y], color=overlay.colour(mark.run), label=name, **shape)


def _draw_lines(axes: Any, runs: list[Run], lines: list[overlay.Line]) -> None:
    thin = [line for line in lines if not line.is_strong]
    faint = max(0.03, min(0.45, 2.5 / max(1, len(thin))))
    for line in lines:
        colour = overlay.colour(line.run)
        if line.is_strong:
            mark = "o" if len(line.xs) < 30 else None
            text = _escape(f"{label(runs[line.run])} ({line.who})")
            axes.plot(line.xs, line.ys, color="white", lw=3.2, zorder=3)  # an outline, to stand out among thin lines
            axes.plot(line.xs, line.ys, color=colour, lw=1.8, zorder=4, marker=mark, ms=3, label=text)
        else:
            # Workers of a run have its colour, and differ by the style of their lines.
            number = sum(other.run == line.run for other in thin[: thin.index(line)])
            style = overlay.STYLES[number % len(overlay.STYLES)][0]
            name = f"{shortened(runs[line.run].name)}, {line.who}" if len(thin) <= _MAX_NAMED else "_"
            axes.plot(line.xs, line.ys, color=colour, lw=0.7, ls=style, alpha=faint, zorder=2, label=_escape(name))
    axes.grid(alpha=0.25)
    axes.margins(x=0.01)


def _draw_shares(axes: Any, runs: list[Run]) -> None:
    """A bar for each run, divided by what the time was spent on; the first run at the top."""
    places = range(len(runs))
    percent = [{part: 100 * share for part, share in overlay.shares(run).items()} for run in runs]
    _draw_stacks(axes, places, percent, width=0.7, horizontal=True)
    notes = ["" if run.overall.measures_data else f"\n({UNMEASURED})" for run in runs]
    names = [_escape(shortened(run.name, 28)) + note for run, note in zip(runs, notes, strict=True)]
    axes.set_yticks(places, names, fontsize="small")
    for tick, place in zip(axes.get_yticklabels(), places, strict=True):
        tick.set_color(overlay.colour(place))
    axes.set(xlim=(0, 100), ylim=(len(runs) - 0.5, -0.5))
    axes.set_xlabel("% of all workers' time")
    axes.legend(fontsize="small", ncols=len(PARTS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _draw_speedups(axes: Any, speedups: list[Speedup], base: Baseline | None) -> None:
    most = max(count for one in speedups for count in one.workers)
    least = min(count for one in speedups for count in one.workers)
    axes.plot([least, most], [1, most / least], color=overlay.IDEAL, ls="--", lw=1, label="as many times as workers")
    for i, one in enumerate(speedups):
        mark, style = overlay.MARKERS[i % len(overlay.MARKERS)][0], overlay.STYLES[i % len(overlay.STYLES)][0]
        axes.plot(one.workers, one.times, color=overlay.RULE, lw=1, ls=style, zorder=2)
        colours = [overlay.colour(run) for run in one.runs]
        axes.scatter(one.workers, one.times, c=colours, marker=mark, s=36, zorder=3)
        axes.plot([], [], color=overlay.RULE, lw=1, ls=style, marker=mark, label=_escape(one.rule or "runs"))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="workers", ylabel="times as fast", ylim=(0, None))
    axes.set_title(base.title if base else "", fontsize="small")
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small", loc="upper left")


def _draw_losses(axes: Any, times: Times) -> None:
    for rank, epochs in times.workers.items():
        axes.plot([e.number for e in epochs], [e.loss for e in epochs], marker="o", ms=3, label=f"worker {rank}")
    if times.validated:
        numbers = sorted(times.validated)
        axes.plot(numbers, [times.validated[n]["loss"] for n in numbers], "k--", marker="s", ms=4, label="validation")
    axes.set_ylabel("loss")
    axes.legend(fontsize="small")


def _draw_epochs(axes: Any, times: Times) -> None:
    """The time split of each epoch: one bar per worker, side by side in the order of their ranks."""
    width = _EPOCH_WIDTH / len(times.workers)
    for i, epochs in enumerate(times.workers.values()):
        places = [epoch.number - _EPOCH_WIDTH / 2 + (i + 0.5) * width for epoch in epochs]
        _draw_stacks(axes, places, [epoch.split for epoch in epochs], width=0.94 * width, labelled=i == 0)
    axes.set_ylabel("seconds")
    axes.set_xlabel("epoch; one bar per worker, in the order of their ranks")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.margins(y=0.2)  # room for the legend
    axes.legend(fontsize="small", ncols=len(PARTS), loc="upper center")


def _draw_stacks(
    axes: Any, places: Sequence[float], splits: list[dict[str, float]], *, width: float, labelled: bool = True,
    horizontal: bool = False,
) -> None:  # fmt: skip
    """Stacked bars at `places`, with one colour for each of PARTS."""
    bars, base = (axes.barh, "left") if horizontal else (axes.bar, "bottom")
    reached = [0.0] * len(places)
    for part in PARTS:
        lengths = [split[part] for split in splits]
        text = WORDS[part] if labelled else None
        bars(places, lengths, width, color=overlay.PART_COLOURS[part], label=text, **{base: reached})
        reached = [low + length for low, length in zip(reached, lengths, strict=True)]
