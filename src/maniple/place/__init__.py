"""The place: who am I (rank, world size, node, run), read from environment variables in this folder and
nowhere else.

The launcher writes these variables with `environment` and the worker reads them with `find`, so that the
two ends of each name stand side by side. `setting_variable` gives the names by which a person sets options of
the commands, apart from those.
"""

import json
import os
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from maniple.errors import InvalidArgument
from maniple.place.center import CENTERS, asked_center
from maniple.place.launchers import TORCHRUN, meeting_point, started_by
from maniple.place.limits import Limits, asked_limits
from maniple.place.variables import choice, flag, number, path_in, seconds

DEFAULT_SEED = 1
HOST_DEADLINE_S = 600.0
CIRCLE_DEADLINE_S = 600.0
JOIN_DEADLINE_S = 60.0
CIRCLES = ("shared", "torch", "mpi")

# The variables by which numeric libraries learn how many threads to start.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

_JOINED = "MANIPLE_JOINED"  # rank and process of the worker that has joined, for the processes that it starts

_OF_RANK = {"MANIPLE_RANK", "MANIPLE_WORLD", "MANIPLE_LOCAL_RANK", "MANIPLE_LOCAL_WORLD", "MANIPLE_MASTER"}

# Variables of a place that mean something else than the option with that name.
_NO_OPTIONS = {"MANIPLE_CERTIFICATE", "MANIPLE_KEY"}

_settled: list["Place"] = []


@dataclass(frozen=True)
class Place:
    """One worker's place in the world. Without a launcher: a world of one."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    node: str = field(default_factory=lambda: os.uname().nodename)
    run: Path | None = None  # the run folder; None when alone
    segment: Path | None = None  # the shared-memory folder of the run's center
    rule: str | None = None  # what the command line asked for, in its own words
    pace: str | None = None
    device: str | None = None
    seed: int = DEFAULT_SEED
    restarts: int = 0  # how often this rank was started before
    address: str | None = None  # of the host, for a worker that reaches it over the network
    token: str | None = None  # by which host and worker know each other
    certificate: Path | None = None  # the host's, where the connection is encrypted
    key: Path | None = None
    wire: str | None = None  # how values travel
    host_deadline_s: float = HOST_DEADLINE_S  # for so long a worker trains on without its host
    max_memory_mb: float = 0.0  # what workers elsewhere may take of the host's shared memory; 0: most of it
    host_file: Path | None = None  # host.json of the run folder, where a host that has moved is found again
    join_deadline_s: float = JOIN_DEADLINE_S  # for so long a worker that starts waits for its host
    is_queued: bool = False  # a batch queue starts the workers, each when there is room for it
    limits: Limits = field(default_factory=Limits)
    controller: str | None = None  # FILE.py:CLASS
    controller_args: tuple[str, ...] = ()  # NAME=VALUE
    launcher: str = ""  # who started this process: maniple, torchrun, mpirun, srun, ray; "": a person
    center: str = CENTERS[0]  # who has the center of another launcher's workers, one of CENTERS
    circle: str | None = None  # the engine that was asked for, one of CIRCLES
    circle_deadline_s: float = CIRCLE_DEADLINE_S  # for so long a worker waits for the others in a round
    deterministic: bool = False  # two runs make the same, to the bit
    master: str | None = None  # HOST:PORT where the workers of the circle torch meet
    own_data: bool = False  # each worker has data of its own, and nothing needs to divide it
    producer: int = -1  # of a producer: which of its feed it is; -1: not told
    producers: int = 1  # of how many
    producer_number: int = -1  # its place among all that the launcher has started; -1: it started by itself

    @property
    def is_guest(self) -> bool:
        """Another launcher than maniple has started this worker together with others."""
        return self.launcher not in {"", "maniple"}

    @property
    def is_hosting(self) -> bool:
        """This is the guest that starts the host of all."""
        return self.is_guest and self.rank == 0 and self.segment is not None

    @property
    def is_near(self) -> bool:
        """The run's shared memory is on this machine."""
        return self.segment is not None and (self.address is None or self.segment.exists())

    @property
    def is_alone(self) -> bool:
        """No launcher started this process, or it started no other."""
        return self.segment is None and self.address is None and self.world == 1

    def told(self, **values: Any) -> "Place":
        """This place with what the host has told of it."""
        return replace(self, **values)


def environment(place: Place) -> dict[str, str]:
    """The variables by which a process finds `place` again."""
    return {name: str(value) for name, value in _variables(place).items() if value is not None}


def _variables(place: Place) -> dict[str, Any]:
    return {
        "MANIPLE_RANK": place.rank,
        "MANIPLE_WORLD": place.world,
        "MANIPLE_LOCAL_RANK": place.local_rank,
        "MANIPLE_LOCAL_WORLD": place.local_world,
        "MANIPLE_RUN": place.run,
        "MANIPLE_SEGMENT": place.segment,
        "MANIPLE_RULE": place.rule,
        "MANIPLE_PACE": place.pace,
        "MANIPLE_DEVICE": place.device,
        "MANIPLE_SEED": place.seed,
        "MANIPLE_RESTARTED": place.restarts,
        "MANIPLE_ADDRESS": place.address,
        "MANIPLE_TOKEN": place.token,
        "MANIPLE_CERTIFICATE": place.certificate,
        "MANIPLE_KEY": place.key,
        "MANIPLE_WIRE": place.wire,
        "MANIPLE_HOST_DEADLINE": place.host_deadline_s,
        "MANIPLE_MAX_MEMORY": place.max_memory_mb or None,
        "MANIPLE_HOST_FILE": place.host_file,
        "MANIPLE_JOIN_DEADLINE": place.join_deadline_s,
        "MANIPLE_QUEUED": 1 if place.is_queued else None,
        "MANIPLE_LAUNCHER": place.launcher or None,
        "MANIPLE_CIRCLE": place.circle,
        "MANIPLE_CIRCLE_DEADLINE": place.circle_deadline_s,
        "MANIPLE_DETERMINISTIC": 1 if place.deterministic else None,
        "MANIPLE_MASTER": place.master,
        "MANIPLE_OWN_DATA": 1 if place.own_data else None,
        "MANIPLE_PRODUCER": place.producer if place.producer >= 0 else None,
        "MANIPLE_PRODUCERS": place.producers if place.producer >= 0 else None,
        "MANIPLE_PRODUCER_NUMBER": place.producer_number if place.producer_number >= 0 else None,
        _JOINED: None,
        "MANIPLE_CONTROLLER": place.controller,
        "MANIPLE_CONTROLLER_ARGS": json.dumps(place.controller_args) if place.controller_args else None,
    } | {f"MANIPLE_{name.upper()}": value or None for name, value in asdict(place.limits).items()}


def find(env: Mapping[str, str] = os.environ, *, address: str | None = None) -> Place:
    """The place that the environment describes; an `address` given stands before it."""
    if _settled and env is os.environ and address is None:
        return _settled[-1]
    segment = None if address else env.get("MANIPLE_SEGMENT")
    address = address or env.get("MANIPLE_ADDRESS")
    if segment is None and address is None:
        return _found_elsewhere(env)
    run = env.get("MANIPLE_RUN")
    return Place(
        rank=number(env, "MANIPLE_RANK", number(env, "RANK", 0)),
        world=number(env, "MANIPLE_WORLD", number(env, "WORLD_SIZE", 1)),
        local_rank=number(env, "MANIPLE_LOCAL_RANK", number(env, "LOCAL_RANK", 0)),
        local_world=number(env, "MANIPLE_LOCAL_WORLD", number(env, "LOCAL_WORLD_SIZE", 1)),
        run=Path(run) if run else None,
        segment=Path(segment) if segment else None,
        rule=env.get("MANIPLE_RULE"),
        pace=env.get("MANIPLE_PACE"),
        device=env.get("MANIPLE_DEVICE"),
        seed=number(env, "MANIPLE_SEED", DEFAULT_SEED),
        restarts=number(env, "MANIPLE_RESTARTED", 0),
        address=address,
        token=_token(env),
        certificate=path_in(env, "MANIPLE_CERTIFICATE"),
        key=path_in(env, "MANIPLE_KEY"),
        wire=env.get("MANIPLE_WIRE"),
        host_deadline_s=seconds(env, "MANIPLE_HOST_DEADLINE", HOST_DEADLINE_S),
        max_memory_mb=seconds(env, "MANIPLE_MAX_MEMORY", 0.0),
        host_file=path_in(env, "MANIPLE_HOST_FILE"),
        join_deadline_s=seconds(env, "MANIPLE_JOIN_DEADLINE", JOIN_DEADLINE_S),
        is_queued=flag(env, "MANIPLE_QUEUED"),
        limits=asked_limits(env),
        controller=env.get("MANIPLE_CONTROLLER"),
        controller_args=tuple(json.loads(env.get("MANIPLE_CONTROLLER_ARGS") or "[]")),
        launcher=env.get("MANIPLE_LAUNCHER", ""),
        circle=asked_circle(env),
        circle_deadline_s=seconds(env, "MANIPLE_CIRCLE_DEADLINE", CIRCLE_DEADLINE_S),
        deterministic=flag(env, "MANIPLE_DETERMINISTIC"),
        master=env.get("MANIPLE_MASTER") or meeting_point(env),
        own_data=flag(env, "MANIPLE_OWN_DATA"),
        producer=number(env, "MANIPLE_PRODUCER", -1),
        producers=number(env, "MANIPLE_PRODUCERS", 1),
        producer_number=number(env, "MANIPLE_PRODUCER_NUMBER", -1),
    )


def settle(place: Place) -> Place:
    """This process has found out about its place what its variables do not tell: `find` tells it from now on."""
    _settled.append(place)
    return place


def mark_joined(rank: int | None, env: MutableMapping[str, str] = os.environ) -> None:
    """This process is worker `rank` from now on, or no longer: processes that it starts inherit the mark."""
    if rank is None:
        env.pop(_JOINED, None)
    else:
        env[_JOINED] = f"{rank}:{os.getpid()}"


def refuse_inherited(env: Mapping[str, str] = os.environ) -> None:
    """Raise InvalidArgument in a process whose variables are those of another one, which is a worker."""
    rank, _, process = env.get(_JOINED, "").partition(":")
    if process and int(process) != os.getpid():
        raise InvalidArgument(
            f"process {os.getpid()} cannot join: it was started by worker {rank} (process {process}) and has that "
            "worker's variables, and two processes cannot be one worker. Call maniple.join() in the parent only, and "
            "pass on what a child needs (worker.rank, worker.seed); a child that is to train by itself must be started "
            "without the variables that begin with MANIPLE_, and under torchrun also without RANK and WORLD_SIZE."
        )


def inherited(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a new process takes over: all but a place and wishes for one, which are settled and written anew."""
    # A device for all may be said by its variable alone, but not that of the worker whose script starts another run.
    kept = set[str]() if _is_worker(env) else {"MANIPLE_DEVICE"}
    return {name: value for name, value in env.items() if name not in set(not_inherited()) - kept}


def not_inherited() -> list[str]:
    """The variables that a new worker must not take over from whoever starts it.

    A script that finds RANK takes itself for a process of torchrun, and sets up a process group of its own.
    """
    return [*own_variables(), *TORCHRUN]


def own_variables() -> list[str]:
    """The variables of a place that are maniple's own."""
    return [name for name in _variables(Place()) if name.startswith("MANIPLE_")]


def joining(place: Place, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of a process that joins the host of `place`, whoever starts it."""
    kept = {name: env[name] for name in ("MANIPLE_TOKEN", "MANIPLE_CERTIFICATE", "MANIPLE_DEVICE") if name in env}
    others = {name: value for name, value in env.items() if name not in _variables(Place())}
    told = {name: value for name, value in environment(place).items() if place.is_queued or name not in _OF_RANK}
    return others | kept | told


def queue_task(env: Mapping[str, str] = os.environ) -> tuple[int, int, int]:
    """Which task of how many a job array of Slurm has started here, and how often before."""
    if "SLURM_ARRAY_TASK_ID" not in env:
        raise InvalidArgument(
            "--task is for a task of a job array, but SLURM_ARRAY_TASK_ID is not set. Leave --task out, or submit the "
            "script with `maniple submit --slurm`."
        )
    names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_RESTART_COUNT")
    task, count, restarts = (number(env, name, 0) for name in names)
    return task, max(count, 1), restarts


def setting_variable(key: str) -> str:
    """The variable by which a person sets an option of `maniple run` and `maniple serve`."""
    name = f"MANIPLE_{key.upper()}"
    return f"MANIPLE_OPTION_{key.upper()}" if name in _NO_OPTIONS else name


def set_by_person(keys: Iterable[str], env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The options that a person has set by variables; empty ones are none.

    Inside a worker, the variables of its place were written by a launcher, and say nothing of a run that the
    worker's script may start itself.
    """
    told = set(_variables(Place())) if _is_worker(env) else set[str]()
    names = {key: setting_variable(key) for key in keys}
    return {key: env[name] for key, name in names.items() if env.get(name) and name not in told}


def personal_settings(env: Mapping[str, str] = os.environ) -> Path:
    """The file of one person's settings for all runs."""
    return Path(env.get("XDG_CONFIG_HOME") or Path(env.get("HOME") or "/") / ".config") / "maniple.yaml"


def shared_memory(env: Mapping[str, str] = os.environ) -> Path:
    """The folder, held in memory, in which centers are made."""
    return Path(env.get("MANIPLE_SHM") or "/dev/shm")


def asked_threads(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The thread variables that the user has set already; they are left as they are."""
    return {} if _is_worker(env) else {name: env[name] for name in THREAD_VARIABLES if name in env}


def _is_worker(env: Mapping[str, str]) -> bool:
    """A launcher has written this environment, not a person."""
    return "MANIPLE_RESTARTED" in env


def _found_elsewhere(env: Mapping[str, str]) -> Place:
    """The place of a process that maniple has not started."""
    alone = Place(
        device=env.get("MANIPLE_DEVICE"),
        seed=number(env, "MANIPLE_SEED", DEFAULT_SEED),
        limits=asked_limits(env),
        center=asked_center(env),
        circle=asked_circle(env),
        circle_deadline_s=seconds(env, "MANIPLE_CIRCLE_DEADLINE", CIRCLE_DEADLINE_S),
        deterministic=flag(env, "MANIPLE_DETERMINISTIC"),
        own_data=flag(env, "MANIPLE_OWN_DATA"),
        host_deadline_s=seconds(env, "MANIPLE_HOST_DEADLINE", HOST_DEADLINE_S),
    )
    started = started_by(env)
    if started is None and alone.center != "mpi":
        return alone
    wishes = {name: env.get(f"MANIPLE_{name.upper()}") for name in ("rule", "pace", "wire")}
    return alone.told(**(asdict(started) if started else {}), **wishes)


def asked_circle(env: Mapping[str, str] = os.environ) -> str | None:
    """The engine of the circle that the environment asks for."""
    return choice(env, "MANIPLE_CIRCLE", CIRCLES)


def _token(env: Mapping[str, str]) -> str | None:
    """The run's token: itself, or in a file that only its owner can read."""
    if (path := path_in(env, "MANIPLE_TOKEN_FILE")) is None or env.get("MANIPLE_TOKEN"):
        return env.get("MANIPLE_TOKEN")
    try:
        return path.read_text().strip()
    except OSError as error:
        raise InvalidArgument(
            f"the token file {path} cannot be read: {error.strerror}. It is `token` in the run folder."
        ) from None
