"""The command `maniple watch`: a run that somebody has started, seen live."""

import time
from contextlib import suppress
from pathlib import Path

import click

from maniple.errors import InvalidArgument
from maniple.launch.board import Board
from maniple.launch.view import View, open_view
from maniple.watch.subject import Subject
from maniple.watch.web import show

_TICK_S = 0.5
_LOOK_S = 5.0  # how often it is tried whether the host lives
_SILENT_S = 60.0  # a host that cannot be asked may be dead if no row has come for so long; steps may take a while


@click.command()
@click.option("--once", is_flag=True, help="Show where it stands now, and end.")
@click.option("--logs", is_flag=True, help="Show what the workers print, too.")
@click.option("--json", "is_json", is_flag=True, help="Print where it stands as lines of JSON.")
@click.option("--web", is_flag=True, help="Serve it as a page for a browser, until Ctrl-C (extra `watch`).")
@click.option(
    "--listen",
    metavar="ADDRESS",
    default="127.0.0.1:0",
    show_default=True,
    help="With --web: where to serve it; port 0 is a free one. 0.0.0.0 lets other machines in.",
)
@click.option("--read-only", is_flag=True, help="With --web: the page takes no orders.")
@click.option("--browser", is_flag=True, help="With --web: open it in a browser here.")
@click.option("--token-file", type=click.Path(path_type=Path), metavar="FILE", help="As for `maniple join`.")
@click.option("--certificate", type=click.Path(path_type=Path), metavar="FILE", help="As for `maniple join`.")
@click.argument("run", type=click.Path(path_type=Path))
def watch(
    *,
    run: Path,
    once: bool,
    logs: bool,
    is_json: bool,
    web: bool,
    listen: str,
    read_only: bool,
    browser: bool,
    token_file: Path | None,
    certificate: Path | None,
) -> None:
    """Watch a run until it ends: who works, who waits, how the loss falls, whether it pays.

    RUN is its folder, seen from any machine, or the HOST:PORT at which its host listens. It may be watched while it
    goes on or afterwards, by many at once. What workers print stays on the host's machine.

    \b
      maniple watch runs/last
      maniple watch runs/last --json | jq .totals.samples_per_s
      maniple watch runs/last --web                                     a page, with charts and controls
      maniple watch node-07:29400 --token-file token                    of a run on another machine

    Columns: speed in samples (or steps) per second; loss as last logged; sync, the share of time spent in exchanges;
    staleness, how many exchanges of others the parameters had missed. The last line: how many workers are busy
    computing, in the mean; goodput, the part of all workers' time that was spent for training itself; the center's
    version, how many exchanges or rounds have changed it.
    """
    with Subject(str(run), token_file, certificate) as subject:
        if web:
            show(subject, listen, may_steer=not read_only, opens=browser)
            return
        if logs and subject.is_elsewhere:
            raise InvalidArgument(
                f"--logs needs the run folder, and {run} is a host whose folder is not here. Leave --logs out, or look "
                "where it runs."
            )
        with open_view(quiet=False, is_json=is_json) as view, suppress(KeyboardInterrupt):
            _follow(subject, view, once=once, logs=logs)


def _follow(subject: Subject, view: View, *, once: bool, logs: bool) -> None:
    board, told, next_look = Board(subject.folder, 0), "", 0.0
    if not once:
        view.say(f"run {subject.name}")
    while True:
        subject.bring()
        printed = board.refresh()
        is_over = board.has_ended or subject.is_over
        words = ""
        if not is_over and time.monotonic() >= next_look:
            next_look = time.monotonic() + _LOOK_S
            words, told = _look(subject, board, told)
        if words:
            view.say(words)
        view.show(board, printed if logs else [], is_last=once or is_over)
        if once or is_over:
            return
        time.sleep(_TICK_S)


def _look(subject: Subject, board: Board, told: str) -> tuple[str, str]:
    """Look for the host; gives what is to be said, unless it was `told` before, and what is told now."""
    where = subject.where()
    if where.is_dead:
        time.sleep(_TICK_S)  # one that ends writes down how a moment after its memory is gone
        where = subject.where()
    if where.is_dead:
        board.lose_host()
    is_silent = board.silent_s > _SILENT_S and not where.has_ended
    if where.is_alive and not (where.is_assumed and is_silent):
        return "", ""
    if is_silent:
        board.still()
    words = f"the host {where.words}"
    silence = f". No row was written for {board.silent_s:,.0f} s" if is_silent and not where.is_dead else ""
    return words + silence if words != told else "", words
