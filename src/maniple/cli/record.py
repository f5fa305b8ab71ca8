"""The command `maniple record`: where the time of a model's training went."""

from pathlib import Path

import click

from maniple.cli.columns import aligned
from maniple.record.times import PARTS, Times, read_times


@click.command()
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE.png", help="Draw it too, to this file (extra `plot`)."
)
@click.argument("run", type=click.Path(path_type=Path))
def record(*, run: Path, plot: Path | None) -> None:
    """Print where the time of each worker and epoch went, and what validation found.

    RUN is the folder of a run that `maniple run --model` has started, going on or ended.

    \b
      maniple record runs/last
      maniple record runs/last --plot times.png
    """
    times = read_times(run)
    for line in table(times):
        click.echo(line)
    if plot is not None:
        from maniple.watch.picture import draw

        draw(times, plot, title=f"run {run.resolve().name}")
        click.echo(f"drawn: {plot}")


def table(times: Times) -> list[str]:
    """One line for each worker and epoch, then what validation found."""
    rows: list[tuple[str, ...]] = [("worker", "epoch", "batches", "seconds", *PARTS, "loss", "lr")]
    for rank, epochs in times.workers.items():
        for epoch in epochs:
            found = {part: f"{100 * epoch.split[part] / max(1e-9, epoch.seconds):.1f} %" for part in PARTS}
            parts = (found if epoch.measures_data else found | {"data": "not measured"}).values()
            lr = "-" if epoch.lr is None else f"{epoch.lr:.4g}"
            numbers = (str(rank), str(epoch.number), str(epoch.batches), f"{epoch.seconds:.2f}")
            rows.append((*numbers, *parts, f"{epoch.loss:.4g}", lr))
    lines = aligned(rows)
    for number, means in sorted(times.validated.items()):
        found = ", ".join(f"{name} {value:.4g}" for name, value in means.items())
        lines.append(f"validation after epoch {number}: {found}")
    return lines
