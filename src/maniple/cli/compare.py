"""The command `maniple compare`: runs side by side."""

import textwrap
from pathlib import Path
from shutil import get_terminal_size

import click
import msgspec

from maniple.cli.columns import aligned, fitting, listed, upright, width_of
from maniple.cli.plot import smooth
from maniple.record.folder import json_line
from maniple.watch.compare import cells, differences, settle_target, summarize
from maniple.watch.overlay import baseline
from maniple.watch.plot import shortened
from maniple.watch.runs import check_value, open_runs

_UNLIMITED = 100_000  # columns, where the output is no terminal
_READABLE = 200  # columns of a table of settings, whose values may be long
# What tells most of a run, where there is no room for all.
_BY_NEED = (
    "workers", "last ", "time to ", "exit code", "speed-up", "speed", "time", "rule", "samples", "sync share",
    "busy workers", "staleness", "goodput", "pace",
)  # fmt: skip


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
    width = get_terminal_size((_UNLIMITED, 0)).columns  # of COLUMNS or the terminal
    words = [cells(one, value, aim) for one in found]
    for line in _table({name: [row[name] for row in words] for name in words[0]}, width):
        click.echo(line)
    base = baseline(opened)
    if base is not None and base.workers != 1:
        click.echo("no speed-ups: they are over a run with one worker, and none was given.")
    if differ:
        click.echo("\nsettings that differ")
        names = {"run": [one.name for one in found]}
        for line in _settings(names | {name: list(map(_word, values)) for name, values in differ.items()}, width):
            click.echo(line)


def _table(rows: dict[str, list[str]], width: int) -> list[str]:
    """Runs side by side, where they fit; else one below the other, with the columns that tell most of them."""
    wide = aligned([(name, *row) for name, row in rows.items()], first_left=True)
    if width_of(wide) <= width:
        return wide
    first, *others = rows
    tall = {first: [shortened(name, max(12, width // 2)) for name in rows[first]]} | {
        name: rows[name] for name in others
    }
    asked = ("workers", "last ", "time to ")  # also where they are the same for all
    alike = {name for name in others if len(set(rows[name])) == 1 and not name.startswith(asked)}
    by_need = sorted(others, key=lambda name: (name in alike, _need(name)))
    shown = fitting(tall, by_need, width)
    lines = upright(shown)
    if missing := [name for name in rows if name not in shown]:
        needed = min(width_of(wide), width_of(upright(rows)))
        lines += textwrap.wrap(
            f"left out: {', '.join(missing)}. A terminal of {needed} columns shows all, and so does --json.",
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
