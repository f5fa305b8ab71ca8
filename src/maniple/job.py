"""A job: what `maniple run`, `serve` and `submit` have been asked to start, checked before anything starts."""

import difflib
import random
import re
import shlex
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from maniple.environment import THREAD_VARIABLES
from maniple.errors import InvalidArgument, require_printable
from maniple.feed.ring import MAX_PRODUCERS
from maniple.host.listener import Listen
from maniple.memory.segment import MAX_WORKERS
from maniple.monitor.baseline import parse_baseline
from maniple.monitor.target import parse_target
from maniple.settings.options import DEFAULT_SEED, RunSettings, check_settings, is_bsp_excluded, recorded_settings
from maniple.user_class import parse_arguments, parse_class
from maniple.wire.address import Address
from maniple.wire.codecs import get_codec

_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|tpu)(:\d+)?")
_SNAPSHOT = re.compile(r"\d+|best|epoch-\d+|best-\d+-abandoned-\d+")


@dataclass(frozen=True)
class RayResources:
    """A Ray cluster, and what each worker takes of it."""

    address: str = "auto"
    cpus: float = 1
    gpus: float = 0

    def __post_init__(self) -> None:
        if self.cpus < 0 or self.gpus < 0 or self.cpus + self.gpus == 0:
            raise InvalidArgument(
                f"a worker with {self.cpus:g} CPUs and {self.gpus:g} GPUs cannot be placed. Ask for 1 of them, or more."
            )

    def places(self, nodes: list[dict[str, float]]) -> int:
        """The number of workers that fit on machines with such resources at the same time."""
        needs = {name: count for name, count in {"CPU": self.cpus, "GPU": self.gpus}.items() if count}
        return sum(min(int(node.get(name, 0) / count) for name, count in needs.items()) for node in nodes)


@dataclass(frozen=True)
class ExternalWorkers:
    """The workers of another launcher, for which this job is only the host."""

    launcher: str  # torchrun, srun, mpirun or ray
    workers: int  # how many it has started
    tie: int  # a descriptor of the launcher's process
    program: tuple[str, ...] = ()  # what they run, and its arguments


@dataclass(frozen=True)
class Job(RunSettings):
    """A program, the workers that run it, and the settings of the run."""

    script: Path | None = None  # None: a host that starts no workers. With `model`, the file of its class
    args: tuple[str, ...] = ()
    workers: int = 1
    devices: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()  # machines on which the workers are started by ssh; none: this one
    web: Address | None = None  # where a web page of the run is served
    ray: RayResources | None = None  # a cluster that places the workers
    listen: Listen | None = None  # for remote workers; None: workers of this machine only
    session: Path | None = None  # the session file
    external: ExternalWorkers | None = None

    def check(self) -> None:
        """Raise InvalidArgument if the job cannot be started."""
        if self.script is not None and not 1 <= self.workers <= MAX_WORKERS:
            raise InvalidArgument(f"{self.workers} workers cannot be started (1 to {MAX_WORKERS}). Write -n 2.")
        check_settings(self)
        self._check_min_workers()
        self._check_resume()
        self._check_figures()
        self._check_collectives()
        if self.wire is not None:
            get_codec(self.wire)
        self._check_controller()
        self._check_model()
        if self.listen is not None:
            self.listen.check()
        check_hosts(self.hosts)
        _check_devices(self.devices)
        self._check_script()
        self._check_feeds()

    def _check_min_workers(self) -> None:
        if 0 < self.world < self.min_workers:
            raise InvalidArgument(
                f"--min-workers {self.min_workers} is more than the {self.world} workers that are started. Write "
                f"--min-workers {self.world} or less, or start more (-n)."
            )
        if self.strict and self.min_workers > 1:
            raise InvalidArgument(
                f"--strict ends the run when any worker dies, so --min-workers {self.min_workers} would have no "
                "effect. Leave one of them out."
            )

    def _check_resume(self) -> None:
        if self.snapshot is not None and self.resume is None:
            raise InvalidArgument(
                f"--snapshot {self.snapshot} is where to continue from, but no run was given. Add --resume RUN."
            )
        if self.snapshot is not None and not _SNAPSHOT.fullmatch(self.snapshot):
            raise InvalidArgument(
                f"--snapshot {self.snapshot} is no snapshot. Write its number, `best` or `epoch-0003`."
            )
        if self.resume is not None and self.name is not None:
            raise InvalidArgument(
                f"--resume continues in the run's own folder, so --name {self.name} cannot be given. Leave one out."
            )

    def _check_figures(self) -> None:
        """Check the target and the baseline."""
        if self.target is not None:
            parse_target(self.target)
        elif self.stop_at_target:
            raise InvalidArgument("--stop-at-target has no target to stop at. Add --target loss=0.2, or leave it out.")
        if self.baseline is None:
            return
        what = parse_baseline(self.baseline, self.runs)
        if isinstance(what, float) and self.resume is not None:
            raise InvalidArgument(
                f"--baseline {self.baseline} would measure one worker from the beginning, but --resume continues a "
                "run. Give the folder of a run with one worker: --baseline RUN."
            )

    def _check_collectives(self) -> None:
        if self.collectives == "shared" and self.hosts:
            raise InvalidArgument(
                f"--collectives shared is the memory of one machine, but --hosts names {len(self.hosts)}. Leave it out."
            )
        if self.collectives == "mpi":
            raise InvalidArgument(
                "--collectives mpi needs workers that MPI has started, and `maniple run` is no launcher of MPI. "
                f"Start them by `mpirun -n {self.workers} python SCRIPT`, with MANIPLE_RULE and so on as variables."
            )

    def _check_controller(self) -> None:
        if self.controller is not None:
            parse_class(self.controller)
        elif self.controller_args:
            raise InvalidArgument(
                "--controller-arg is an argument of your own controller, and none was given. Add --controller "
                "FILE.py:CLASS."
            )
        parse_arguments(self.controller_args)

    def _check_model(self) -> None:
        if self.model is not None:
            parse_class(self.model, "--model")
        elif self.model_args or self.snapshot_epochs is not None:
            raise InvalidArgument(
                "--model-arg and --snapshot-epochs are for the class of a model, and none was given. "
                "Add --model FILE.py:CLASS."
            )
        parse_arguments(self.model_args, "--model-arg")
        if self.model is not None and self.limits.validate_every:
            raise InvalidArgument(
                f"--validate-every {self.limits.validate_every} is for scripts that ask when to validate, but a "
                "--model validates after each epoch. Leave it out; --patience counts these validations."
            )

    def _check_script(self) -> None:
        for word in (str(self.script or ""), *self.args):
            if "\0" in word:
                raise InvalidArgument(
                    f"the script's argument {word!r} holds a NUL, and no process can be given one. Leave it out."
                )
        if self.script is not None and not self.script.is_file():
            raise InvalidArgument(f"there is no script {str(self.script)!r} in {Path.cwd()}. {_near(self.script)}")

    def _check_feeds(self) -> None:
        if not 1 <= self.producers <= MAX_PRODUCERS:
            raise InvalidArgument(
                f"--producers {self.producers}: 1 to {MAX_PRODUCERS} copies of a script can be started. Write 2."
            )
        for number in range(len(self.feeds)):
            script = Path(next(iter(self.feed_command(number)), ""))
            if not script.is_file():
                raise InvalidArgument(f"there is no script {str(script)!r} for --feed in {Path.cwd()}. {_near(script)}")

    def record(self) -> dict[str, Any]:
        """What run.json keeps of the job as `asked`, and `--resume` reads."""
        program = [*((self.script, *self.args) if self.script else self.external.program if self.external else ())]
        return recorded_settings(self) | {
            "script": str(Path(program[0]).resolve()) if program else None,
            "session": str(self.session.resolve()) if self.session else None,
            "args": list(program[1:]),
            "workers": self.world,
            "launcher": self.launcher,
            "devices": list(self.devices),
            "hosts": list(self.hosts),
            "ray": asdict(self.ray) if self.ray else None,
            "listen": str(self.listen.address) if self.listen else None,
            "seed": self.effective_seed,
        }

    def with_default_rule(self) -> Self:
        """This job with the rule of scripts that name none: bsp if all workers are on this machine and alike.

        docs/choose.md has the reasons. A resumed run gets bsp only if it had it before, since its learning rate was
        chosen for the rule that it began with.
        """
        starts_workers = self.script is not None or self.external is not None
        if self.rule or not starts_workers:
            return replace(self, default_rule=None)
        had_another = self.resume is not None and self.default_rule != "bsp"
        listens = self.listen is not None and not (self.external and self.listen.address.is_loopback)
        is_remote = listens or bool(self.hosts) or self.ray is not None
        are_unequal = len({device.partition(":")[0] for device in self.devices}) > 1
        is_excluded = had_another or is_remote or are_unequal or is_bsp_excluded(self.pace)
        return replace(self, default_rule="easgd" if is_excluded else "bsp")

    @property
    def command(self) -> list[str]:
        """The arguments of a worker's interpreter, before those of the script."""
        if self.model is None:
            return [str(self.script)]
        words = ["-m", "maniple.model", self.model, *(f"--model-arg={arg}" for arg in self.model_args)]
        return words if self.snapshot_epochs is None else [*words, f"--snapshot-epochs={self.snapshot_epochs}"]

    def arguments(self, rank: int) -> list[str]:
        """The script's arguments for one worker, with `{rank}` and `{world}` filled in."""
        return [arg.replace("{rank}", str(rank)).replace("{world}", str(self.workers)) for arg in self.args]

    def feed_command(self, number: int) -> list[str]:
        """One --feed, a script and its arguments, split as by a shell."""
        try:
            return shlex.split(self.feeds[number])
        except ValueError as error:
            raise InvalidArgument(
                f"--feed {self.feeds[number]!r} cannot be split into words: {error}. Close its quotes."
            ) from None

    @property
    def effective_seed(self) -> int:
        """The seed of the run, which is never None."""
        return DEFAULT_SEED if self.seed is None else self.seed

    @property
    def effective_rule(self) -> str | None:
        """The rule by which the workers are expected to share, until one does; None: not known."""
        return self.rule or self.default_rule

    @property
    def world(self) -> int:
        """The number of workers that have a rank from the start."""
        return self.workers if self.external is None else self.external.workers

    @property
    def launcher(self) -> str:
        return "maniple" if self.external is None else self.external.launcher

    @property
    def description(self) -> str:
        """The workers and where they are, for people."""
        if self.world == 0:
            return "a host alone"
        who = "1 worker" if self.world == 1 else f"{self.world} workers"
        if self.external is not None:
            return f"{who} of {self.launcher}"
        return f"{who} on {', '.join(self.hosts)}" if self.hosts else who

    @property
    def workers_per_node(self) -> int:
        """The number of workers on each machine."""
        return self.workers // max(1, len(self.hosts))

    def node(self, rank: int) -> str | None:
        """The machine of a worker; None: this one."""
        return self.hosts[rank // self.workers_per_node] if self.hosts else None

    def device(self, local_rank: int) -> str | None:
        """The device of a worker; workers take devices in turn if there are fewer."""
        return self.devices[local_rank % len(self.devices)] if self.devices else None


def thread_variables(threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """The variables that limit the threads of numeric libraries, except those that the user has set (`given`).

    A user's OMP_NUM_THREADS also sets the others: torch, for one, prefers MKL_NUM_THREADS where both are set.
    """
    omp = given.get("OMP_NUM_THREADS", "")
    number = omp if omp.isdigit() else str(threads)  # it may be a list for nested regions, such as 4,2
    return {name: number for name in THREAD_VARIABLES if name not in given}


def check_hosts(hosts: tuple[str, ...]) -> None:
    """Raise InvalidArgument unless all are different names that ssh accepts."""
    if len(set(hosts)) < len(hosts):
        raise InvalidArgument(f"--hosts {','.join(hosts)} names a host twice. Name it once, and raise -n.")
    for host in hosts:
        require_printable("--hosts", host)
        if host.startswith("-") or len(host.split()) != 1:
            raise InvalidArgument(
                f"--hosts has {host!r}, which is no host. Write names for ssh: --hosts node-1,node-2."
            )


def _check_devices(devices: tuple[str, ...]) -> None:
    for device in devices:
        if not _DEVICE.fullmatch(device):
            raise InvalidArgument(
                f"--devices has {device!r}, which is no device. Write cuda:0,cuda:1 for the first two GPUs, or cpu."
            )


def _near(script: Path) -> str:
    folder = script.parent
    stems = [path.stem for path in folder.glob("*.py")] if folder.is_dir() else []
    # Without the suffix, which all share. Above difflib's default of 0.6, which takes train for stdin.
    near = difflib.get_close_matches(script.stem, stems, n=1, cutoff=0.7)
    return (
        f"Did you mean {str(folder / (near[0] + '.py'))!r}?"
        if near
        else "Check the path; options of maniple come before it."
    )


PORTS = range(20000, 30000)  # above the usual services, below the ephemeral ports of clients


def rendezvous_address(job: Job) -> str | None:
    """HOST:PORT on the machine of worker 0 for torch.distributed; None where collectives use shared memory."""
    if job.hosts:  # which ports are free there cannot be known here
        return f"{job.hosts[0].rpartition('@')[2]}:{random.choice(PORTS)}"
    return f"127.0.0.1:{free_port()}" if job.collectives == "torch" else None


def free_port() -> int:
    """A port of this machine on which no process listens. An ephemeral port might be taken by a client soon."""
    for port in [*random.sample(PORTS, 100), 0]:  # 0: all of them are taken, so the system chooses an ephemeral one
        with socket.socket() as listening, suppress(OSError):
            listening.bind(("127.0.0.1", port))
            return listening.getsockname()[1]
    raise OSError("no port of 127.0.0.1 is free")
