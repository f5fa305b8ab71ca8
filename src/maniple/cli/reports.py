"""The commands that report on recorded runs: `plot`, `compare`, `export` and `record`; and tables as text."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import click
import msgspec

from maniple.cli.command import PATH
from maniple.errors import InvalidArgument
from maniple.monitor.target import Target, parse_target
from maniple.monitor.value_series import WINDOW
from maniple.record.folder import json_line
from maniple.record.times import PARTS, Times, read_times
from maniple.watch.compare import baseline, cells, differences, resolve_target, speedups, summarize
from maniple.watch.exports import KINDS, Exporting, open_export
from maniple.watch.overlay import AXES, check_axis
from maniple.watch.plot import shortened
from maniple.watch.run_reader import check_run, check_value, open_runs, recorded_target

_GAP = "  "


def aligned(rows: Sequence[Sequence[str]], *, first_left: bool = False) -> list[str]:
    """A line for each row, with columns aligned to the right, or the first to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)]
        if first_left:
            cells[0] = f"{row[0]:<{widths[0]}}"
        lines.append(_GAP.join(cells))
    return lines


def width_of(lines: Sequence[str]) -> int:
    """The width of a terminal that shows `lines` whole."""
    return max(map(len, lines), default=0)


def upright(columns: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each entry, below the names, which are wrapped to several lines."""
    folded = [_folded(name, cells) for name, cells in columns.items()]
    height = max(len(head) for head, _ in folded)
    whole = [[""] * (height - len(head)) + [*head, *cells] for head, cells in folded]
    return aligned(list(zip(*whole, strict=True)), first_left=True)


def _folded(name: str, cells: Sequence[str]) -> tuple[list[str], list[str]]:
    """A head of about three lines, and the cells without a unit that all share, which moves to the head."""
    units = {unit for cell in cells for _, gap, unit in [cell.rpartition(" ")] if gap} if len(cells) > 1 else set()
    numbers = [cell for cell in cells if " " in cell]
    if len(units) == 1 and len(numbers) > 1 and all(cell[0].isdigit() for cell in numbers):
        (unit,) = units
        name, cells = f"{name} {unit}", [cell.removesuffix(f" {unit}") for cell in cells]
    least = max(*map(len, cells), *map(len, name.split()), len(name) // 3)
    return textwrap.wrap(name, least, break_long_words=False, break_on_hyphens=False), list(cells)


def fitting(columns: Mapping[str, Sequence[str]], by_need: Sequence[str], width: int) -> dict[str, Sequence[str]]:
    """The columns of `upright` that fit into `width`: the first one, and others by their order in `by_need`."""
    kept = {next(iter(columns))}
    for name in by_need:
        if width_of(upright({one: cells for one, cells in columns.items() if one in kept | {name}})) <= width:
            kept.add(name)
    return {name: cells for name, cells in columns.items() if name in kept}


def listed(names: Sequence[str], values: Sequence[str], width: int) -> list[str]:
    """A line for each name and its value, wrapped at `width`."""
    room = max(map(len, names)) + 2 * len(_GAP)
    lines: list[str] = []
    for name, value in zip(names, values, strict=True):
        whole = textwrap.wrap(value, max(20, width - room), break_on_hyphens=False) or [""]
        lines.append(f"{_GAP}{name:<{room - 2 * len(_GAP)}}{_GAP}{whole[0]}")
        lines += [" " * room + rest for rest in whole[1:]]
    return lines


smooth = click.option(
    "--smooth",
    "window",
    type=click.IntRange(1),
    default=WINDOW,
    show_default=True,
    metavar="K",
    help="Average the last K values of each worker.",
)
_FORMATS = (".png", ".svg", ".pdf", ".html")


def takes_target(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command: give it --value and --target, which `value_and_target` resolves."""
    value = "Logged value. Default: that of the target, else loss."
    target = "Value to reach: 0.1, loss<=0.1, accuracy>=0.9. Default: the --target of the first run that has one."
    return click.option("--value", metavar="NAME", help=value)(
        click.option("--target", "aim", metavar="[NAME=]NUMBER", help=target)(command)
    )


def value_and_target(runs: list[Path], value: str | None, aim: str | None) -> tuple[str, Target | None]:
    """The value that is meant, and the target: as given, or as the runs were started with."""
    if aim is None:
        target = recorded_target(runs, value)
        return value or (target.name if target else "loss"), target
    target = parse_target(aim, name=value or "loss")
    if value is not None and target.name != value:
        raise InvalidArgument(
            f"--target {aim} is for the value {target.name}, but --value is {value}. Leave one of them out."
        )
    return target.name, target


@click.command(short_help="Draw one or more runs.")
@takes_target
@click.option("--against", type=click.Choice(list(AXES)), default="time", show_default=True, help="The other axis.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("plot.png"),
    show_default=True,
    metavar="FILE",
    help="The drawing: .png, .svg, .pdf, or .html for a report with everything.",
)
@click.option("--log", "is_log", is_flag=True, help="Use a logarithmic scale for the value.")
@smooth
@click.argument("runs", nargs=-1, required=True, type=PATH)
def plot(
    *,
    runs: tuple[Path, ...],
    value: str | None,
    aim: str | None,
    against: str,
    output: Path,
    is_log: bool,
    window: int,
) -> None:
    """Draw a value of one or more runs against training time, samples or epochs.

    RUNS are folders of running or ended runs. Training time counts from the first step of any worker of a run. The
    center, or else the mean of the workers, is a thick line; up to three workers are thin lines, and more are a band
    from the lowest to the highest. A target is a dashed line, with a mark where a run reached it. Below is where the
    time went and, if there is a run or a recorded baseline with one worker, the speed-up over it. A report (.html) has
    all axes, the settings and the table of `maniple compare`, and needs no network.

    \b
      maniple plot runs/last
      maniple plot runs/one runs/two runs/four --against samples -o loss.svg
      maniple plot runs/* --target "val_accuracy>=0.9" -o report.html
    """
    if output.suffix.lower() not in _FORMATS:
        raise InvalidArgument(
            f"{output} cannot be drawn: its name ends in none of {', '.join(_FORMATS)}. Write -o plot.png."
        )
    value, target = value_and_target(list(runs), value, aim)
    opened = open_runs(list(runs), value)
    check_value(opened, value)
    check_axis(opened, against)
    target = None if target is None else resolve_target(opened, target, window=window)
    if output.suffix.lower() == ".html":
        from maniple.watch.report import write
    else:
        from maniple.watch.plot import draw as write
    write(opened, output, value=value, target=target, against=against, window=window, is_log=is_log)
    click.echo(f"drawn: {output}")
    base = baseline(opened)
    if base is not None and base.workers != 1 and speedups(opened):
        click.echo(f"no run with one worker was given: speeds are relative to {base.name} with {base.workers} workers.")


_UNLIMITED = 100_000  # columns, where the output is no terminal
_READABLE = 200  # columns of a table of settings, whose values may be long
# The most important columns first, for terminals too narrow for all.
_BY_NEED = (
    "workers", "last ", "time to ", "exit code", "speed-up", "speed", "time", "rule", "samples", "sync share",
    "busy workers", "staleness", "goodput", "pace",
)  # fmt: skip


@click.command(short_help="Print a table of runs side by side.")
@takes_target
@click.option(
    "--below/--above", "falling", default=None, help="Side of the target to reach. Default: as in the first run."
)
@smooth
@click.option("--json", "is_json", is_flag=True, help="Print the table as JSON.")
@click.argument("runs", nargs=-1, required=True, type=PATH)
def compare(
    *, runs: tuple[Path, ...], value: str | None, aim: str | None, falling: bool | None, window: int, is_json: bool
) -> None:
    """Print a table of runs: speed, speed-up, where time went, the last value, the time to a target, settings.

    RUNS are folders of running or ended runs. The value is the center's if it was logged inside `with
    replica.center():` or validated; else the mean over workers of each one's last K values. A target is reached by the
    first such value at it or beyond it. The speed-up is measured: over the fastest run with one worker, or else over
    the baseline that a run has recorded (`maniple run --baseline`).

    \b
      maniple compare runs/one runs/four
      maniple compare runs/one runs/four --target 0.1
      maniple compare runs/* --target "val_accuracy>=0.9" --json
    """
    is_given = aim is not None or value is not None
    value, target = value_and_target(list(runs), value, aim)
    opened = open_runs(list(runs), value)
    if is_given:  # else runs that have not logged the value are compared by the rest
        check_value(opened, value)
    if target is not None:
        target = replace(target, falling=target.falling if falling is None else falling)
        target = resolve_target(opened, target, window=window)
    found = summarize(opened, value, target=target, window=window)
    differ = differences(opened)
    if is_json:
        rows = [one.as_row() for one in found]
        goal = {"target": target.value, "falling": target.falling} if target else {"target": None, "falling": None}
        about = {"value": value} | goal
        click.echo(json_line(about | {"runs": rows, "differences": differ}))
        return
    width = get_terminal_size((_UNLIMITED, 0)).columns  # of COLUMNS or the terminal
    words = [cells(one, value, target) for one in found]
    for line in _table({name: [row[name] for row in words] for name in words[0]}, width):
        click.echo(line)
    base = baseline(opened)
    if base is not None and base.workers != 1:
        click.echo("no speed-ups: they are relative to a run with one worker, and none was given or recorded.")
    elif base is not None and all(one.path != base.path for one in found):
        click.echo(f"speed-ups are over the recorded baseline {base.name}, {base.rate:,.0f} {base.unit}/s.")
    if differ:
        click.echo("\nsettings that differ")
        names = {"run": [one.name for one in found]}
        for line in _settings(names | {name: list(map(_word, values)) for name, values in differ.items()}, width):
            click.echo(line)


def _table(rows: dict[str, list[str]], width: int) -> list[str]:
    """Runs side by side if they fit; else one below the other, with the most important columns."""
    wide = aligned([(name, *row) for name, row in rows.items()], first_left=True)
    if width_of(wide) <= width:
        return wide
    first, *others = rows
    tall = {first: [shortened(name, max(12, width // 2)) for name in rows[first]]} | {
        name: rows[name] for name in others
    }
    always = ("workers", "last ", "time to ")  # even if they are the same for all
    alike = {name for name in others if len(set(rows[name])) == 1 and not name.startswith(always)}
    by_need = sorted(others, key=lambda name: (name in alike, _need(name)))
    shown = fitting(tall, by_need, width)
    lines = upright(shown)
    if missing := [name for name in rows if name not in shown]:
        needed = min(width_of(wide), width_of(upright(rows)))
        lines += textwrap.wrap(
            f"left out: {', '.join(missing)}. A terminal of {needed} columns shows all, as does --json.",
            max(20, width),
        )
    return lines


def _need(name: str) -> int:
    return next((place for place, known in enumerate(_BY_NEED) if name.startswith(known)), len(_BY_NEED))


def _settings(rows: dict[str, list[str]], width: int) -> list[str]:
    wide = aligned([(name, *row) for name, row in rows.items()], first_left=True)
    if width_of(wide) <= min(width, _READABLE):
        return wide
    runs = rows.pop("run")
    return [line for name, values in rows.items() for line in (name, *listed(runs, values, min(width, _READABLE)))]


def _word(value: object) -> str:
    return (
        "–" if value is None else value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
    )


@click.command(short_help="Export a run to TensorBoard, CSV, W&B or MLflow.")
@click.option("--to", "kind", type=click.Choice(KINDS), required=True, help="The format or program.")
@click.option(
    "-o",
    "--output",
    "place",
    metavar="FOLDER",
    help="A new folder, or for MLflow an address (http://...). Default: exports/ in the run folder.",
)
@click.option("--follow", is_flag=True, help="Continue until the run ends.")
@click.argument("run", type=PATH)
def export(*, run: Path, kind: str, place: str | None, follow: bool) -> None:
    """Export every logged and measured number of a run to TensorBoard, CSV, Weights & Biases or MLflow.

    RUN is a run folder. Nothing is averaged or left out. Weights & Biases and MLflow also follow their own environment
    variables: WANDB_MODE=offline sends nothing.

    \b
      maniple export runs/last --to csv -o table
      maniple export runs/last --to tensorboard --follow
      maniple export runs/last --to mlflow -o http://127.0.0.1:5000
    """
    check_run(run)
    run = run.resolve()
    place = place or str(run / "exports" / kind)
    opened = open_export(kind, run.name, place)
    exporting = Exporting(run, opened)
    try:
        exporting.settings()
        exporting.advance()
        if follow:
            exporting.follow()
    finally:
        opened.close()
    click.echo(f"exported: {exporting.rows:,} rows to {place}")


@click.command(short_help="Show where the time of a --model run went.")
@click.option(
    "--plot",
    type=PATH,
    metavar="FILE.png",
    help="Also draw it to this file (extra `plot`).",
)
@click.argument("run", type=PATH)
def record(*, run: Path, plot: Path | None) -> None:
    """Print how each worker spent its time in each epoch, and the results of validation.

    RUN is the folder of a running or ended run that was started by `maniple run --model`.

    \b
      maniple record runs/last
      maniple record runs/last --plot times.png
    """
    times = read_times(run)
    for line in table(times):
        click.echo(line)
    if plot is not None:
        from maniple.watch.plot import draw_times as draw

        draw(times, plot, title=f"run {run.resolve().name}")
        click.echo(f"drawn: {plot}")


def table(times: Times) -> list[str]:
    """A line for each worker and epoch, then the results of validation."""
    rows: list[tuple[str, ...]] = [("worker", "epoch", "batches", "seconds", *PARTS, "loss", "lr")]
    for rank, epochs in times.workers.items():
        for epoch in epochs:
            shares = {part: f"{100 * epoch.split[part] / max(1e-9, epoch.seconds):.1f} %" for part in PARTS}
            parts = (shares if epoch.measures_data else shares | {"data": "not measured"}).values()
            lr = "-" if epoch.lr is None else f"{epoch.lr:.4g}"
            numbers = (str(rank), str(epoch.number), str(epoch.batches), f"{epoch.seconds:.2f}")
            rows.append((*numbers, *parts, f"{epoch.loss:.4g}", lr))
    lines = aligned(rows)
    for number, means in sorted(times.validated.items()):
        results = ", ".join(f"{name} {value:.4g}" for name, value in means.items())
        lines.append(f"validation after epoch {number}: {results}")
    return lines
