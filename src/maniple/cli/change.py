"""The command `maniple change`: other settings for a run that goes on, or a snapshot of it now."""

from pathlib import Path

import click

from maniple.host.reach import reach_to_watch
from maniple.spec import arguments
from maniple.watch import Steering


@click.command()
@click.option("--snapshot", is_flag=True, help="Save the center now, before anything is changed.")
@click.option("--token-file", type=click.Path(path_type=Path), metavar="FILE", help="As for `maniple join`.")
@click.option("--certificate", type=click.Path(path_type=Path), metavar="FILE", help="As for `maniple join`.")
@click.argument("host")
@click.argument("settings", metavar="[NAME=VALUE]...", nargs=-1)
def change(
    *, host: str, settings: tuple[str, ...], snapshot: bool, token_file: Path | None, certificate: Path | None
) -> None:
    """Change settings of a run that goes on: its workers follow within about a second, between two steps.

    HOST is a run folder that can be seen from here, or HOST:PORT. NAME is a setting of the rule that the workers share
    (alpha, center_alpha, beta, compensate ...), or of the pace: `every`, in steps, or `maximum_rate`, a share of time.
    What was changed holds for workers that join later, and after a restart of the host; each change is a row `changed`
    of the host and of every worker. Rules by which all workers meet at the same step (bsp and its kin) take none.

    \b
      maniple change runs/last alpha=0.3
      maniple change runs/last maximum_rate=0.1
      maniple change --snapshot runs/last every=20        save the center first
      maniple change --token-file token node-07:29400 alpha=auto
    """
    if not settings and not snapshot:
        raise click.UsageError("nothing is to be changed. Give NAME=VALUE, for instance alpha=0.3, or --snapshot.")
    steering = Steering(reach_to_watch(host, token_file, certificate))
    values = arguments(settings, "maniple change")
    if snapshot:
        click.echo(f"saved: {steering.snapshot()}")
    if values:
        click.echo(steering.change(values))
