"""The options that several commands have in common."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from maniple.host.host import KEEP
from maniple.place import DEFAULT_SEED, HOST_DEADLINE_S
from maniple.rules import RULES
from maniple.wire.codecs import CODECS

Command = TypeVar("Command", bound=Callable[..., Any])


def settings(command: Command) -> Command:
    """Give a command the common options."""
    for option in reversed(
        [
            click.option(
                "--rule",
                metavar="RULE",
                help=f"What an exchange does: {', '.join(RULES)}; with settings: easgd:alpha=0.5.",
            ),
            click.option("--every", type=int, metavar="STEPS", help="Exchange every so many steps."),
            click.option(
                "--maximum-rate",
                type=float,
                metavar="SHARE",
                help="Spend at most this share of wall time in exchanges.",
            ),
            click.option(
                "--wire",
                type=click.Choice(list(CODECS)),
                help="How values travel to workers elsewhere, and but for int8 in the circle. Default: float32.",
            ),
            click.option("--name", help="The run's name. Default: script and time."),
            click.option(
                "--runs",
                type=click.Path(path_type=Path),
                default=Path("runs"),
                show_default=True,
                help="Where run folders are made.",
            ),
            click.option(
                "--seed",
                type=int,
                help=f"The run's seed; each worker's own derives from it. Default: {DEFAULT_SEED}, or as resumed.",
            ),
            click.option(
                "--resume",
                type=click.Path(path_type=Path),
                metavar="RUN",
                help="Continue a run whose host has ended or was killed, in its own folder.",
            ),
            click.option(
                "--snapshot",
                metavar="NUMBER|best|epoch-N",
                help="With --resume: from this snapshot, the best one validated or an epoch's, not from the newest.",
            ),
            click.option(
                "--snapshot-every",
                "snapshot_every_s",
                type=float,
                default=300.0,
                show_default=True,
                metavar="SECONDS",
                help="Save the center so often while training goes on; 0: only at the end.",
            ),
            click.option(
                "--keep", type=int, default=KEEP, show_default=True, metavar="K", help="Keep the newest K snapshots."
            ),
            click.option(
                "--host-deadline",
                "host_deadline_s",
                type=float,
                default=HOST_DEADLINE_S,
                show_default=True,
                metavar="SECONDS",
                help="A worker elsewhere trains on for so long without its host, then saves its replica and fails.",
            ),
            click.option(
                "--max-memory",
                "max_memory_mb",
                type=float,
                default=0.0,
                metavar="MB",
                help="Workers and clients elsewhere may fill the run's shared memory up to this. Default: 90 % of what "
                "is free.",
            ),
            click.option(
                "--controller",
                metavar="FILE.py:CLASS",
                help="A controller of one's own, derived from maniple.Controller.",
            ),
            click.option(
                "--controller-arg",
                "controller_args",
                multiple=True,
                metavar="NAME=VALUE",
                help="An argument of the controller's class; may be given several times.",
            ),
            click.option(
                "--max-batches", type=int, default=0, metavar="N", help="Stop after N batches of all workers together."
            ),
            click.option(
                "--max-epochs", type=int, default=0, metavar="N", help="Stop after N epochs of worker.sampler."
            ),
            click.option(
                "--total-duration",
                type=float,
                default=0.0,
                metavar="SECONDS",
                help="Stop after so many seconds of training, from the first step of any worker on.",
            ),
            click.option(
                "--validate-every",
                type=int,
                default=0,
                metavar="N",
                help='Answer "validate" to one worker after every N batches of all together.',
            ),
            click.option(
                "--patience",
                type=int,
                default=0,
                metavar="K",
                help="Stop when K validations in a row were no better than the best.",
            ),
            click.option("--tls", is_flag=True, help="Encrypt connections, with a certificate made for the run."),
            click.option("--certificate", type=click.Path(path_type=Path), help="Encrypt with this certificate (PEM)."),
            click.option("--key", type=click.Path(path_type=Path), help="The certificate's key (PEM)."),
            click.option("-q", "--quiet", is_flag=True, help="Print errors only."),
            click.option("--json", "is_json", is_flag=True, help="Print what happens as lines of JSON."),
        ]
    ):
        command = option(command)
    return command


def web_settings(command: Command) -> Command:
    """Give a command the options of a page that is served beside the run."""
    for option in reversed(
        [
            click.option(
                "--web", is_flag=True, help="Serve a page of the run for a browser, while it goes on (extra `watch`)."
            ),
            click.option(
                "--web-listen",
                metavar="ADDRESS",
                help="Where to serve it. Default: a free port of 127.0.0.1; 0.0.0.0 lets other machines in.",
            ),
        ]
    ):
        command = option(command)
    return command


def restarts(what: str) -> Callable[[Command], Command]:
    """The option --restarts; `what` it does differs with who starts the workers."""
    return click.option("--restarts", type=int, default=0, show_default=True, metavar="K", help=what)


def loss_settings(command: Command) -> Command:
    """Give a command the options for workers that are killed."""
    for option in reversed(
        [
            click.option(
                "--min-workers",
                type=int,
                default=1,
                show_default=True,
                metavar="N",
                help="When a worker is killed by a signal, the others continue while at least N are left.",
            ),
            click.option("--strict", is_flag=True, help="End the run when any worker dies, also by a signal."),
        ]
    ):
        command = option(command)
    return command


def model_settings(command: Command) -> Command:
    """Give a command the options of models that are trained by maniple's own loop."""
    for option in reversed(
        [
            click.option(
                "--model",
                metavar="FILE.py:CLASS",
                help="Train the model of this class, by maniple's own loop, instead of a SCRIPT.",
            ),
            click.option(
                "--model-arg",
                "model_args",
                multiple=True,
                metavar="NAME=VALUE",
                help="An entry of the model's config; may be given several times.",
            ),
            click.option(
                "--snapshot-epochs",
                type=int,
                metavar="K",
                help="Keep the center after every K epochs of the model, with optimizer and record. Default: as the "
                "class says.",
            ),
        ]
    ):
        command = option(command)
    return command
