"""The command `maniple watch`: a run that somebody has started, seen live."""

import time
from contextlib import suppress
from pathlib import Path

import click

from maniple.errors import InvalidArgument
from maniple.launch.board import Board
from maniple.launch.view import View, open_view
from maniple.launch.whereabouts import find_host
from maniple.record import Folder

_TICK_S = 0.5
_LOOK_S = 5.0  # how often it is tried whether the host lives


@click.command()
@click.option("--once", is_flag=True, help="Show where it stands now, and end.")
@click.option("--logs", is_flag=True, help="Show what the workers print, too.")
@click.option("--json", "is_json", is_flag=True, help="Print where it stands as lines of JSON.")
@click.argument("run", type=click.Path(path_type=Path))
def watch(*, run: Path, once: bool, logs: bool, is_json: bool) -> None:
    """Watch a run until it ends: who works, who waits, how the loss falls, whether it pays.

    RUN is its folder, seen from any machine. It may be watched while it goes on or afterwards, by many at once.

    \b
      maniple watch runs/last
      maniple watch runs/last --json | jq .totals.samples_per_s

    Columns: speed in samples (or steps) per second; loss as last logged; sync, the share of time spent in exchanges;
    staleness, how many exchanges of others the parameters had missed. The last line: speed-up over one worker that
    waits for nobody; goodput, the part of all workers' time that was spent for training itself; the center's version,
    how many exchanges or rounds have changed it.
    """
    run = run.resolve()
    if not (run / "run.json").exists():
        raise InvalidArgument(f"{run} is no run folder: it has no run.json. Give runs/NAME or runs/last.")
    with open_view(quiet=False, is_json=is_json) as view, suppress(KeyboardInterrupt):
        _follow(run, view, once=once, logs=logs)


def _follow(run: Path, view: View, *, once: bool, logs: bool) -> None:
    board, told, next_look = Board(Folder(run), 0), "", 0.0
    if not once:
        view.say(f"run {run}")
    while True:
        printed = board.refresh()
        is_last = once or board.has_ended
        view.show(board, printed if logs else [], is_last=is_last)
        if is_last:
            return
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + _LOOK_S
            where = find_host(run)
            if not where.is_alive and where.words != told:
                view.say(f"the host {where.words}")
            told = "" if where.is_alive else where.words
        time.sleep(_TICK_S)
