"""The job: what is to be started, and the command, variables and cores of each worker. Pure."""

import difflib
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from maniple.center.segment import MAX_WORKERS
from maniple.errors import InvalidArgument, require_printable
from maniple.feed.ring import MAX_PRODUCERS
from maniple.host.gate import Listen
from maniple.host.host import KEEP
from maniple.launch.guests import Guests
from maniple.launch.room import Room
from maniple.place import CIRCLE_DEADLINE_S, DEFAULT_SEED, HOST_DEADLINE_S, THREAD_VARIABLES, Limits
from maniple.spec import arguments, split
from maniple.wire.address import Address
from maniple.wire.codecs import codec

_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|tpu)(:\d+)?")
_SNAPSHOT = re.compile(r"\d+|best|epoch-\d+|best-\d+-abandoned-\d+")


@dataclass(frozen=True)
class Job:
    """A script, and how many workers run it in which way."""

    script: Path | None = None  # None: a host alone
    args: tuple[str, ...] = ()
    workers: int = 1
    rule: str | None = None
    pace: str | None = None
    devices: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()  # other machines, on which the workers are started; none: on this one
    web: Address | None = None  # where a page of the run is served
    ray: Room | None = None  # a cluster that has room for the workers, and places them
    restarts: int = 0  # how often each worker may be started again
    min_workers: int = 1  # with fewer left, the death of a worker ends the run
    strict: bool = False  # every death does
    name: str | None = None
    runs: Path = Path("runs")
    seed: int | None = None  # None: that of a run that goes on, else 1
    bind: bool = True  # give each worker cores of its own
    quiet: bool = False
    is_json: bool = False  # tell what happens as lines of JSON
    wire: str | None = None  # how values travel to workers elsewhere
    listen: Listen | None = None  # for workers elsewhere; None: this machine's shared memory only
    host_deadline_s: float = HOST_DEADLINE_S
    max_memory_mb: float = 0.0  # what workers elsewhere may take of shared memory; 0: most of what is free
    circle: str | None = None  # what carries rounds; None: what fits
    circle_deadline_s: float = CIRCLE_DEADLINE_S
    deterministic: bool = False  # two runs make the same, to the bit
    snapshot_every_s: float = 300.0  # 0: only at the end
    keep: int = KEEP  # snapshots
    resume: Path | None = None  # the folder of the run to go on with
    snapshot: str | None = None  # the one to go on from, a number or "best"; None: the newest
    arrays: Path | None = None  # a file of named arrays to begin with
    session: Path | None = None  # the file that the settings came from
    limits: Limits = field(default_factory=Limits)
    controller: str | None = None  # FILE.py:CLASS; None: the default one
    controller_args: tuple[str, ...] = ()  # NAME=VALUE
    feeds: tuple[str, ...] = ()  # scripts that produce batches, each with its arguments
    producers: int = 1  # how many copies of each
    model: str | None = None  # FILE.py:CLASS, trained by the loop that is ours; then `script` is the file
    model_args: tuple[str, ...] = ()  # NAME=VALUE
    guests: Guests | None = None  # workers of another launcher, for whom this is a host alone
    snapshot_epochs: int | None = None  # keep a snapshot after so many epochs of the model; None: as the class says

    def check(self) -> None:
        """Raise InvalidArgument if the job cannot be started."""
        if self.script is not None and not 1 <= self.workers <= MAX_WORKERS:
            raise InvalidArgument(f"{self.workers} workers cannot be started (1 to {MAX_WORKERS}). Write -n 2.")
        if self.restarts < 0:
            raise InvalidArgument(f"--restarts {self.restarts} is below 0. Write --restarts 3, or leave it out.")
        self._check_losses()
        if self.seed is not None and self.seed < 0:
            raise InvalidArgument(f"--seed {self.seed} is below 0. Write --seed 1.")
        if self.snapshot_every_s < 0 or self.keep < 1 or not self.host_deadline_s > 0:
            raise InvalidArgument(
                f"--snapshot-every {self.snapshot_every_s:g}, --keep {self.keep}, --host-deadline "
                f"{self.host_deadline_s:g}: seconds are 0 or more, a deadline above 0, and 1 snapshot or more is kept."
            )
        self._check_texts()
        self._check_circle()
        if self.snapshot is not None and self.resume is None:
            raise InvalidArgument("--snapshot says where to go on from, but no run was given. Add --resume RUN.")
        if self.snapshot is not None and not _SNAPSHOT.fullmatch(self.snapshot):
            raise InvalidArgument(
                f"--snapshot {self.snapshot} is no snapshot. Write its number, `best` or `epoch-0003`."
            )
        if self.resume is not None and self.name is not None:
            raise InvalidArgument("--resume goes on in the run's own folder, so --name cannot be given. Leave one out.")
        if self.wire is not None:
            codec(self.wire)
        self.limits.check()
        if self.controller is not None:
            split(self.controller)
        elif self.controller_args:
            raise InvalidArgument("--controller-arg is for a controller of one's own. Add --controller FILE.py:CLASS.")
        arguments(self.controller_args)
        self._check_model()
        if self.listen is not None:
            self.listen.check()
        check_hosts(self.hosts)
        _check_devices(self.devices)
        if self.script is not None and not self.script.is_file():
            raise InvalidArgument(f"there is no script {str(self.script)!r} in {Path.cwd()}. {_near(self.script)}")
        self._check_feeds()

    def _check_losses(self) -> None:
        if self.min_workers < 1:
            raise InvalidArgument(f"--min-workers {self.min_workers} is below 1. Write 1 or more, or leave it out.")
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

    def _check_texts(self) -> None:
        """What becomes a variable, a file name or a word of a command must be one."""
        texts = {"--name": self.name, "--devices": ",".join(self.devices), "--controller": self.controller}
        texts |= {"--model": self.model, "--feed": " ".join(self.feeds), "--rule": self.rule}
        for name, text in texts.items():
            require_printable(name, text or "")
        for name, words in (("--controller-arg", self.controller_args), ("--model-arg", self.model_args)):
            for word in words:
                require_printable(name, word)
        for word in (str(self.script or ""), *self.args):
            if "\0" in word:
                raise InvalidArgument(f"the script's argument {word!r} holds a NUL, which no process can be given.")

    def _check_model(self) -> None:
        if self.model is not None:
            split(self.model, "--model")
        elif self.model_args or self.snapshot_epochs is not None:
            raise InvalidArgument(
                "--model-arg and --snapshot-epochs are for the class of a model, and none was given. "
                "Add --model FILE.py:CLASS."
            )
        arguments(self.model_args, "--model-arg")
        if self.model is not None and self.limits.validate_every:
            raise InvalidArgument(
                f"--validate-every {self.limits.validate_every} is for scripts that ask when to validate, but a "
                "--model validates after each epoch. Leave it out; --patience counts these validations."
            )
        if self.snapshot_epochs is not None and self.snapshot_epochs < 0:
            raise InvalidArgument(f"--snapshot-epochs {self.snapshot_epochs} is below 0. Write 5; 0 keeps none.")

    def _check_circle(self) -> None:
        if not 0 <= self.max_memory_mb < float("inf"):
            raise InvalidArgument(
                f"--max-memory {self.max_memory_mb:g}: megabytes above 0. Write 8000, or leave it out."
            )
        if not self.circle_deadline_s > 0:
            raise InvalidArgument(f"--circle-deadline {self.circle_deadline_s:g}: seconds above 0. Write 600.")
        if self.circle == "shared" and self.hosts:
            raise InvalidArgument(
                f"--circle shared is the memory of one machine, but --hosts names {len(self.hosts)}. Leave it out."
            )
        if self.circle == "mpi":
            raise InvalidArgument(
                "--circle mpi needs workers that MPI has started, and `maniple run` is no launcher of MPI. "
                f"Start them by `mpirun -n {self.workers} python SCRIPT`, with MANIPLE_RULE and so on as variables."
            )

    def _check_feeds(self) -> None:
        if not 1 <= self.producers <= MAX_PRODUCERS:
            raise InvalidArgument(
                f"--producers {self.producers}: 1 to {MAX_PRODUCERS} copies of a script can be started. Write 2."
            )
        for number in range(len(self.feeds)):
            script = Path(next(iter(self.feed_command(number)), ""))
            if not script.is_file():
                raise InvalidArgument(f"there is no script {str(script)!r} for --feed in {Path.cwd()}. {_near(script)}")

    def asked(self) -> dict[str, Any]:
        """What was asked for, to be written down."""
        program = [*((self.script, *self.args) if self.script else self.guests.program if self.guests else ())]
        return {
            "script": str(Path(program[0]).resolve()) if program else None,
            "session": str(self.session.resolve()) if self.session else None,
            "args": list(program[1:]),
            "workers": self.world,
            "launcher": self.launcher,
            "rule": self.rule,
            "pace": self.pace,
            "devices": list(self.devices),
            "hosts": list(self.hosts),
            "ray": asdict(self.ray) if self.ray else None,
            "restarts": self.restarts,
            "min_workers": self.min_workers,
            "strict": self.strict,
            "seed": self.settled_seed,
            "wire": self.wire,
            "circle": self.circle,
            "deterministic": self.deterministic,
            "listen": str(self.listen.address) if self.listen else None,
            "snapshot_every": self.snapshot_every_s,
            "controller": str(Path(self.controller).resolve()) if self.controller else None,  # CLASS goes along
            "controller_args": list(self.controller_args),
            **asdict(self.limits),
            "feeds": list(self.feeds),
            "producers": self.producers,
            "model": str(Path(self.model).resolve()) if self.model else None,  # CLASS goes along
            "model_args": list(self.model_args),
            "snapshot_epochs": self.snapshot_epochs,
        }

    @property
    def command(self) -> list[str]:
        """What a worker's interpreter runs, before its arguments."""
        if self.model is None:
            return [str(self.script)]
        words = ["-m", "maniple.model", self.model, *(f"--model-arg={arg}" for arg in self.model_args)]
        return words if self.snapshot_epochs is None else [*words, f"--snapshot-epochs={self.snapshot_epochs}"]

    def arguments(self, rank: int) -> list[str]:
        """The script's arguments for one worker: `{rank}` and `{world}` stand for its own numbers."""
        return [arg.replace("{rank}", str(rank)).replace("{world}", str(self.workers)) for arg in self.args]

    def feed_command(self, number: int) -> list[str]:
        """The words of one --feed: a script and its arguments, as a shell would split them."""
        try:
            return shlex.split(self.feeds[number])
        except ValueError as error:
            raise InvalidArgument(f"--feed {self.feeds[number]!r} cannot be split into words: {error}.") from None

    @property
    def settled_seed(self) -> int:
        """The seed that was asked for, or the usual one."""
        return DEFAULT_SEED if self.seed is None else self.seed

    @property
    def world(self) -> int:
        """How many workers have a rank from the beginning."""
        return self.workers if self.guests is None else self.guests.workers

    @property
    def launcher(self) -> str:
        """Who starts them."""
        return "maniple" if self.guests is None else self.guests.launcher

    @property
    def crew(self) -> str:
        """Who takes part, in words."""
        if self.world == 0:
            return "a host alone"
        who = "1 worker" if self.world == 1 else f"{self.world} workers"
        if self.guests is not None:
            return f"{who} of {self.launcher}"
        return f"{who} on {', '.join(self.hosts)}" if self.hosts else who

    @property
    def workers_per_node(self) -> int:
        """How many workers each machine runs."""
        return self.workers // max(1, len(self.hosts))

    def node(self, rank: int) -> str | None:
        """The other machine that runs a worker; None: this one."""
        return self.hosts[rank // self.workers_per_node] if self.hosts else None

    def device(self, local_rank: int) -> str | None:
        """The device of one worker of a machine; workers share devices in turn if there are fewer."""
        return self.devices[local_rank % len(self.devices)] if self.devices else None


def thread_variables(threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """How many threads numeric libraries may start; variables that the user has set stay as they are.

    A user's OMP_NUM_THREADS holds for the other libraries too: torch, for one, uses MKL_NUM_THREADS where both are set.
    """
    of_all = given.get("OMP_NUM_THREADS", "")
    number = of_all if of_all.isdigit() else str(threads)  # it may be a list, such as 4,2 for nested regions
    return {name: number for name in THREAD_VARIABLES if name not in given}


def check_hosts(hosts: tuple[str, ...]) -> None:
    """Raise InvalidArgument for what is no list of machines for ssh."""
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
    # Without the suffix, which all of them share, and above difflib's 0.6, by which train is like stdin.
    near = difflib.get_close_matches(script.stem, stems, n=1, cutoff=0.7)
    return (
        f"Did you mean {str(folder / (near[0] + '.py'))!r}?"
        if near
        else "Check the path; options of maniple come before it."
    )
