"""The command `maniple compare`: runs side by side."""

from pathlib import Path

import click
import msgspec

from maniple.cli.columns import aligned
from maniple.cli.plot import smooth
from maniple.record.folder import json_line
from maniple.watch.compare import cells, differences, settle_target, summarize
from maniple.watch.overlay import baseline
from maniple.watch.plot import shortened
from maniple.watch.runs import check_value, open_runs

_WIDTH = 32  # of a cell


@click.command()
@click.option("--value", default="loss", show_default=True, metavar="NAME", help="The logged value to compare.")
@click.option("--target", type=float, metavar="NUMBER", help="Tell when the value first reached this.")
@click.option("--below/--above", "falling", default=None, help="From which side. Default: as the first run goes.")
@smooth
@click.option("--json", "is_json", is_flag=True, help="Print it as JSON.")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
def compare(
    *, runs: tuple[Path, ...], value: str, target: float | None, falling: bool | None, window: int, is_json: bool
) -> None:
    """Print a table of runs: speed, speed-up, where time went, the last value, the time to a target, other settings.

    RUNS are run folders, going on or ended. The value is the center's, where it was logged inside `with
    replica.center():` or validated; else the mean over the workers of each one's mean of its last K values.

    \b
      maniple compare runs/one runs/four
      maniple compare runs/one runs/four --target 0.1
      maniple compare runs/* --value val_accuracy --target 0.9 --above --json
    """
    opened = open_runs(list(runs), value)
    if target is not None or value != "loss":  # else runs without one are compared by all that there is
        check_value(opened, value)
    aim = None if target is None else settle_target(opened, value, target, falling, window=window)
    found = summarize(opened, value, target=aim, window=window)
    differ = differences(opened)
    if is_json:
        rows = [one.as_row() for one in found]
        told = {"value": value, "target": target, "falling": aim.falling if aim else None}
        click.echo(json_line(told | {"runs": rows, "differences": differ}))
        return
    words = [cells(one, value, aim) for one in found]
    table = [(name, *(shortened(row[name], _WIDTH) for row in words)) for name in words[0]]
    for line in aligned(table, first_left=True):
        click.echo(line)
    base = baseline(opened)
    if base is not None and base.workers != 1:
        click.echo("no speed-ups: they are over a run with one worker, and none was given.")
    if differ:
        click.echo("\nsettings that differ")
        told = [(name, *(shortened(_word(value), _WIDTH) for value in values)) for name, values in differ.items()]
        for line in aligned(told, first_left=True):
            click.echo(line)


def _word(value: object) -> str:
    return (
        "–" if value is None else value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
    )
