"""The command `maniple plot`: runs drawn on one clock."""

from pathlib import Path

import click

from maniple.errors import InvalidArgument
from maniple.watch.course import WINDOW
from maniple.watch.overlay import AXES, baseline, check_axis, speedups
from maniple.watch.runs import check_value, open_runs

smooth = click.option(
    "--smooth",
    "window",
    type=click.IntRange(1),
    default=WINDOW,
    show_default=True,
    metavar="K",
    help="Of each worker, take the mean of its last K values.",
)
_FORMATS = (".png", ".svg", ".pdf", ".html")


@click.command()
@click.option("--value", default="loss", show_default=True, metavar="NAME", help="The logged value to draw.")
@click.option(
    "--against", type=click.Choice(list(AXES)), default="time", show_default=True, help="What is on the other axis."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("plot.png"),
    show_default=True,
    metavar="FILE",
    help="Where to draw it: .png, .svg, .pdf, or .html for a report with everything.",
)
@click.option("--log", "is_log", is_flag=True, help="A logarithmic scale for the value.")
@smooth
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
def plot(*, runs: tuple[Path, ...], value: str, against: str, output: Path, is_log: bool, window: int) -> None:
    """Draw runs over each other: a value against time since the first worker's start, samples or epochs.

    RUNS are run folders, going on or ended. Workers are thin lines; the center, or else the mean of the workers, is a
    strong one. Below it stands where the time went and, if the runs have different numbers of workers, the
    speed-up. A report (.html) needs no network: it has all axes, the settings and a table as `maniple compare`.

    \b
      maniple plot runs/last
      maniple plot runs/one runs/two runs/four --against samples -o loss.svg
      maniple plot runs/* --value val_accuracy -o report.html
    """
    if output.suffix.lower() not in _FORMATS:
        raise InvalidArgument(f"{output} cannot be drawn: it ends in none of {', '.join(_FORMATS)}. Name it so.")
    opened = open_runs(list(runs), value)
    check_value(opened, value)
    check_axis(opened, against)
    if output.suffix.lower() == ".html":
        from maniple.watch.report import write
    else:
        from maniple.watch.plot import draw as write
    write(opened, output, value=value, against=against, window=window, is_log=is_log)
    click.echo(f"drawn: {output}")
    base = baseline(opened)
    if base is not None and base.workers != 1 and speedups(opened):
        click.echo(
            f"no run with one worker was given: speeds are over that of {base.name} with {base.workers} workers."
        )
