"""The command `maniple export`: the rows of a run for other programs."""

from pathlib import Path

import click

from maniple.watch.exporting import Exporting
from maniple.watch.exports import KINDS, open_export
from maniple.watch.runs import check_run


@click.command()
@click.option("--to", "kind", type=click.Choice(KINDS), required=True, help="The program that is to read them.")
@click.option(
    "-o",
    "--output",
    "place",
    metavar="FOLDER",
    help="A new folder; of MLflow also an address (http://...). Default: exports/ in the run folder.",
)
@click.option("--follow", is_flag=True, help="Go on while the run does.")
@click.argument("run", type=click.Path(path_type=Path))
def export(*, run: Path, kind: str, place: str | None, follow: bool) -> None:
    """Give every logged and measured number of a run to TensorBoard, a CSV table, Weights & Biases or MLflow.

    RUN is a run folder. Nothing is averaged or left out. Weights & Biases and MLflow follow their own variables too:
    WANDB_MODE=offline sends nothing.

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
        exporting.go_on()
        if follow:
            exporting.follow()
    finally:
        opened.close()
    click.echo(f"exported: {exporting.rows:,} rows to {place}")
