"""The commands that start a host or a worker here: `run`, `serve`, `join`, and `host` for external workers."""

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click

from maniple.cli.command import PATH, SettingsCommand, reaches_host, seconds_option, takes_settings
from maniple.cli.doctor_command import check_devices, warn_early
from maniple.cli.make_job import job_from
from maniple.connection.find_host import check_token, locate_host, with_token
from maniple.environment import JOIN_DEADLINE_S, queue_task, variables_to_join
from maniple.environment.other_launchers import read_pace
from maniple.errors import InvalidArgument
from maniple.job import ExternalWorkers, Job
from maniple.launch.run import run_job
from maniple.queues import QUEUES

# Options that many training scripts have as well: after the script, they are no sign of a mistake.
_COMMON_IN_SCRIPTS = {
    "seed", "name", "resume", "max_epochs", "max_batches", "model", "wire", "quiet", "keep", "every", "target",
    "baseline",
}  # fmt: skip


@takes_settings("run")
@click.command(
    cls=SettingsCommand,
    short_help="Run a script on several workers.",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@click.argument("script", type=PATH, required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(**options: Any) -> None:
    """Run SCRIPT, or maniple's loop for a --model, on several workers of this machine or of --hosts.

    ARGS after SCRIPT are passed on to it, with {rank} and {world} filled in for each worker. The run folder (runs/NAME)
    holds the events, the logs of each worker and the shared parameters.

    \b
      maniple run -n 2 train.py
      maniple run -n 4 --rule bsp train.py
      maniple run -n 4 --rule downpour --every 1 train.py --lr 0.05
      maniple run -n 2 --devices cuda:0,cuda:1 --maximum-rate 0.1 train.py
      maniple run -n 8 --restarts 3 train.py --shard data/part-{rank}.npz
      maniple run -n 4 --listen 0.0.0.0:29400 --tls train.py
      maniple run -n 2 --hosts node-1,node-2 train.py    2 workers on each
      maniple run -n 4 --feed produce.py --producers 2 train.py
      maniple run -n 2 --model examples/models/net.py:Net --rule easgd
      maniple run -n 4 --baseline 30 --target loss=0.2 train.py    measure the speed-up over one worker
      maniple run --resume runs/last                     continue a run
      maniple run session.yaml                           everything from a file

    Each option is also a key of session files, of ./.maniple.yaml and of ~/.config/maniple.yaml (maximum_rate: 0.1),
    and an environment variable (MANIPLE_MAXIMUM_RATE=0.1). The command line takes precedence, then variables, then
    the files in this order.

    Exit codes: 0 success, 1 a worker or producer failed, 2 bad arguments, 3 the system refused, 4 other errors,
    130 interrupted.
    """
    _warn_of_misplaced_options(options.get("script"), options.get("args", ()), click.get_current_context().command)
    _start(job_from(**options))


@takes_settings("serve")
@click.command(cls=SettingsCommand, short_help="Host a center for workers that come and go.")
@click.argument("session", required=False)
def serve(**options: Any) -> None:
    """Host a center for workers that come and go, until Ctrl-C or SIGTERM.

    SESSION is a settings file as for `maniple run`; a host takes neither its script nor its workers.

    The address is printed, and written to host.json in the run folder beside the token that workers need. After a host
    was killed, --resume continues: workers train on without it, reconnect, and nothing is lost.

    \b
      maniple serve                                  for workers of this machine
      maniple serve --listen 0.0.0.0:29400 --tls     for other machines
      maniple serve --resume runs/last               after the host was killed
      maniple serve --from arrays.h5                 named arrays for maniple.Client
    """
    _start(job_from(**options))


@takes_settings("host")
@click.command("host", cls=SettingsCommand, hidden=True, context_settings={"allow_interspersed_args": False})
@click.argument("launcher")
@click.argument("workers", type=int)
@click.argument("where")
@click.argument("tie", type=int)
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def host(
    *, launcher: str, workers: int, where: str, tie: int, program: tuple[str, ...], listen: str | None, **options: Any
) -> None:
    """Host WORKERS external workers, which LAUNCHER has started, until they have left or LAUNCHER has ended.

    Worker 0 starts it where torchrun, srun or mpirun runs a script. TIE is a descriptor of the launcher's process,
    WHERE the address to listen on, and PROGRAM what the workers run.
    """
    with suppress(OSError):  # launchers bind worker 0 to its cores; the host may use all
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    job = job_from(listen=listen or where, **options)
    external = ExternalWorkers(launcher, workers, tie, program)
    sys.exit(run_job(replace(job, pace=job.pace or read_pace(), external=external)))


@click.command(
    short_help="Join a running host with one more worker.", context_settings={"allow_interspersed_args": False}
)
@reaches_host
@click.option("--device", metavar="DEVICE", help="Device of this worker, e.g. cuda:0; it becomes worker.device.")
@click.option(
    "--task", is_flag=True, help="Take the rank from the Slurm job array; `maniple submit --slurm` uses this."
)
@seconds_option("--wait", "wait_s", JOIN_DEADLINE_S, "How long to wait for a host that is away or has not started yet.")
@click.argument("host")
@click.argument("script", type=PATH)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def join(
    *,
    host: str,
    script: Path,
    args: tuple[str, ...],
    token_file: Path | None,
    certificate: Path | None,
    device: str | None,
    task: bool,
    wait_s: float,
) -> None:
    """Join a running host with one more worker, from anywhere, at any time.

    HOST is HOST:PORT, or a run folder that this machine can read. The folder also has the token, and the address of a
    host that was restarted elsewhere. SCRIPT may be `-m MODULE`, as for Python.

    \b
      maniple join runs/last train.py --lr 0.1
      maniple join --token-file token node-07:29400 train.py --lr 0.1
    """
    if str(script) != "-m" and not script.is_file():
        raise InvalidArgument(f"there is no script {str(script)!r} in {Path.cwd()}. Check the path.")
    environment = locate_host(host, token_file, certificate, wait_s).replace(device=device, join_deadline_s=wait_s)
    if task:
        rank, world, restarts = queue_task([queue.task_variables for queue in QUEUES.values()])
        environment = environment.replace(rank=rank, world=world, restarts=restarts, is_queued=True)
    check_token(with_token(environment))
    os.execve(sys.executable, [sys.executable, str(script), *args], variables_to_join(environment))


def _warn_of_misplaced_options(script: str | None, args: tuple[str, ...], command: click.Command) -> None:
    known = {word for option in command.params if option.name not in _COMMON_IN_SCRIPTS for word in option.opts}
    words = [arg.partition("=")[0] for arg in args]
    if misplaced := [word for word in words if word.startswith("-") and word in known]:
        click.echo(
            f"maniple: {', '.join(misplaced)} comes after the script, so it is an argument of the script and not an "
            "option of maniple. Options come before the script: "
            f"maniple {command.name} {misplaced[0]} ... {script or 'SCRIPT'}",
            err=True,
        )


def _start(job: Job) -> NoReturn:
    job.check()
    check_devices(job)
    warn_early(job)
    sys.exit(run_job(job))
