"""The command `maniple status`: where a run stands, seen from its folder."""

from collections import Counter
from pathlib import Path

import click

from maniple.errors import InvalidArgument
from maniple.launch.board import Board
from maniple.launch.slurm import look
from maniple.launch.submission import Submission
from maniple.launch.table import plain_lines
from maniple.launch.whereabouts import find_host
from maniple.record import Folder


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
def status(*, run: Path) -> None:
    """Tell where a run stands: its host, its jobs in the queue, its workers.

    RUN is a run folder that can be seen from here.

    \b
      maniple status runs/last
    """
    run = run.resolve()
    click.echo(f"run   {run}")
    where = find_host(run)
    click.echo(f"host  {where.words}")
    for line in _jobs(run):
        click.echo(f"job   {line}")
    board = Board(Folder(run), 0)
    board.refresh()
    if where.is_dead:
        board.lose_host()
    for line in plain_lines(board.standings, board.totals):
        click.echo(line)


def _jobs(run: Path) -> list[str]:
    if not Folder(run).is_submitted:
        return []
    lines: list[str] = []
    for kind, job in Submission.read(run).jobs.items():
        try:
            tasks = look([job])
        except InvalidArgument as error:  # no Slurm on this machine: the rest can be told
            lines.append(f"{job} ({kind}): {error}")
            continue
        states = Counter(task.state.lower() for task in tasks or [])
        words = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        reasons = sorted({task.reason for task in tasks or [] if task.state == "PENDING"} - {"None", ""})
        nodes = sorted({task.node for task in tasks or [] if task.node and not task.is_over})
        where = (f" on {', '.join(nodes)}" if nodes else "") + (f" (waiting: {', '.join(reasons)})" if reasons else "")
        unknown = "the queue does not answer" if tasks is None else "ended, and forgotten by the queue"
        lines.append(f"{job} ({kind}): {words or unknown}{where}")
    return lines
