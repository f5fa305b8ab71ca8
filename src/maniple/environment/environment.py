"""The environment of a process: its rank, its run and host, and the run's settings, from environment variables.

A launcher writes `variables_for(environment)` for each process that it starts, which reads them back by
`read_environment()`.
"""

import os
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from maniple.environment.other_launchers import TORCHRUN, Started, master_address, started_by
from maniple.environment.variables import check_choice, number, path_in, read_fields, variables_for
from maniple.errors import InvalidArgument
from maniple.settings.options import (
    DEFAULT_SEED,
    Limits,
    SharedSettings,
    check_settings,
    option_variable,
    setting,
    settings_of,
)

CENTERS = ("host", "none")  # worker 0 starts a host; no host, so that only collectives can be used
JOIN_DEADLINE_S = 60.0  # a host that is starting listens within seconds

# Numeric libraries learn from these how many threads to start.
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

_overrides: list["Environment"] = []


@dataclass(frozen=True, kw_only=True)
class Environment(SharedSettings, Started):
    """Who this process is, how it reaches its host, and the settings of its run. Default: a world of one worker."""

    node: str = field(default_factory=lambda: os.uname().nodename)
    run: Path | None = setting(None)  # the run folder; None when alone
    segment: Path | None = setting(None)  # the shared-memory folder of the run's center
    device: str | None = setting(None, readers="any")
    seed: int = setting(DEFAULT_SEED, readers="any")
    address: str | None = setting(None)  # of the host, for a worker that reaches it over the network
    token: str | None = setting(None)  # by which host and worker authenticate each other
    certificate: Path | None = setting(None)  # the host's, where the connection is encrypted
    key: Path | None = setting(None)
    host_file: Path | None = setting(None)  # host.json of the run folder, where a host that has moved is found again
    join_deadline_s: float = setting(JOIN_DEADLINE_S)  # how long a worker that starts waits for its host
    is_queued: bool = setting(False, variable="MANIPLE_QUEUED")  # a batch queue starts each worker when there is room
    center: str = CENTERS[0]  # of another launcher's workers: one of CENTERS
    own_data: bool = setting(False, readers="any")  # each worker has different data, which need not be divided
    producer: int = setting(-1, unset=-1)  # of a producer: its index in its feed; -1: not known
    producers: int = setting(1, unset=1)  # of a producer: how many its feed has
    producer_number: int = setting(-1, unset=-1)  # among all that the launcher has started; -1: started by hand

    @property
    def is_external(self) -> bool:
        """This is an external worker: another launcher than maniple has started it together with others."""
        return self.launcher not in {"", "maniple"}

    @property
    def is_hosting(self) -> bool:
        """This is the external worker that starts the host for all of them."""
        return self.is_external and self.rank == 0 and self.segment is not None

    @property
    def is_near(self) -> bool:
        """The run's shared memory is on this machine."""
        return self.segment is not None and (self.address is None or self.segment.exists())

    @property
    def is_alone(self) -> bool:
        """No launcher started this process, or it started no other."""
        return self.segment is None and self.address is None and self.world == 1

    def replace(self, **values: Any) -> Self:
        return replace(self, **values)


def read_environment(env: Mapping[str, str] = os.environ, *, address: str | None = None) -> Environment:
    """The environment of this process. An `address` takes precedence over the variables."""
    if _overrides and env is os.environ and address is None:
        return _overrides[-1]
    if not (address or env.get("MANIPLE_SEGMENT") or env.get("MANIPLE_ADDRESS")):
        return _outside_a_run(env)
    values = read_fields(Environment, env)
    values |= {"address": address, "segment": None} if address else {}
    values |= {"token": _token(env), "master": values.get("master") or master_address(env)}
    check_settings(values["limits"])
    return Environment(**values)


def _outside_a_run(env: Mapping[str, str]) -> Environment:
    """The environment of a process that maniple has not started: alone, or of another launcher."""
    started = started_by(env)
    values = read_fields(Environment, env, "any" if started is None else "external")
    check_settings(values["limits"])
    return Environment(**values | ({} if started is None else asdict(started)), center=_center(env))


def read_limits(env: Mapping[str, str] = os.environ) -> Limits:
    """The limits that the variables set."""
    limits = Limits(**read_fields(Limits, env))
    check_settings(limits)
    return limits


def _center(env: Mapping[str, str]) -> str:
    text = env.get("MANIPLE_CENTER", "").strip()
    if text == "mpi":
        raise InvalidArgument(
            "MANIPLE_CENTER=mpi: centers in MPI windows no longer exist. Unset it: worker 0 then hosts the center, and "
            "collectives run over MPI as before."
        )
    return check_choice("MANIPLE_CENTER", text or CENTERS[0], CENTERS)


def _token(env: Mapping[str, str]) -> str | None:
    """The run's token, from MANIPLE_TOKEN or the file in MANIPLE_TOKEN_FILE."""
    if (path := path_in(env, "MANIPLE_TOKEN_FILE")) is None or env.get("MANIPLE_TOKEN"):
        return env.get("MANIPLE_TOKEN")
    try:
        return path.read_text().strip()
    except OSError as error:
        raise InvalidArgument(
            f"the token file {path} cannot be read: {error.strerror}. It is `token` in the run folder."
        ) from None


def override_environment(environment: Environment) -> Environment:
    """Make `read_environment` return `environment` from now on: this process knows more than its variables say."""
    _overrides.append(environment)
    return environment


def own_variables() -> list[str]:
    """All variables that `variables_for` may write, and the mark of a worker that has joined."""
    return [*(one.variable for one in settings_of(Environment)), _JOINED]


def variables_not_inherited() -> list[str]:
    """The variables that a new worker must not inherit from the process that starts it.

    A script that finds RANK takes itself for a process of torchrun, and sets up its own process group.
    """
    return [*own_variables(), *TORCHRUN]


def inherited_variables(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that a new process inherits: all but those of an Environment, which the launcher writes."""
    # MANIPLE_DEVICE may set the device of all workers, but not if a launcher wrote it for the worker that starts a run.
    kept = set[str]() if _is_worker(env) else {"MANIPLE_DEVICE"}
    return {name: value for name, value in env.items() if name not in set(variables_not_inherited()) - kept}


def variables_to_join(environment: Environment, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of a process that joins the host of `environment`, also if a worker starts it."""
    others = {name: value for name, value in env.items() if name not in own_variables()}
    kept = {name: env[name] for name in ("MANIPLE_TOKEN", "MANIPLE_CERTIFICATE", "MANIPLE_DEVICE") if name in env}
    written = variables_for(environment)
    if not environment.is_queued:  # the host assigns the rank
        written = {name: value for name, value in written.items() if name not in _OF_RANK}
    return others | kept | written


def mark_joined(rank: int | None, env: MutableMapping[str, str] = os.environ) -> None:
    """Mark this process, for those that it starts, as worker `rank`; None removes the mark."""
    if rank is None:
        env.pop(_JOINED, None)
    else:
        env[_JOINED] = f"{rank}:{os.getpid()}"


def check_not_inherited(env: Mapping[str, str] = os.environ) -> None:
    """Raise InvalidArgument in a child of a worker, which has inherited the worker's variables."""
    rank, _, process = env.get(_JOINED, "").partition(":")
    if process and int(process) != os.getpid():
        raise InvalidArgument(
            f"process {os.getpid()} cannot join: it was started by worker {rank} (process {process}) and has that "
            "worker's variables, and two processes cannot be one worker. Call maniple.join() in the parent only, and "
            "pass on what a child needs (worker.rank, worker.seed); a child that is to train by itself must be started "
            "without the variables that begin with MANIPLE_, and under torchrun also without RANK and WORLD_SIZE."
        )


def queue_task(variables: Sequence[tuple[str, str, str]], env: Mapping[str, str] = os.environ) -> tuple[int, int, int]:
    """Number, count and restarts of the queue's task that runs here; `variables` are the names that each queue uses."""
    names = next((names for names in variables if names[0] in env), None)
    if names is None:
        raise InvalidArgument(
            f"--task is for a task of a job array, but {' or '.join(names[0] for names in variables)} is not set. "
            "Leave --task out, or submit the script with `maniple submit`."
        )
    task, count, restarts = (number(env, name, 0) for name in names)
    return task, max(count, 1), restarts


def options_from_variables(keys: Iterable[str], env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The options that variables set, by their keys.

    Inside a worker, the variables of its Environment were written by a launcher: they say nothing about a run that the
    worker's script starts.
    """
    ignored = set(own_variables()) if _is_worker(env) else set[str]()
    names = {key: option_variable(key) for key in keys}
    return {key: env[name] for key, name in names.items() if env.get(name) and name not in ignored}


def personal_settings(env: Mapping[str, str] = os.environ) -> Path:
    """The file with one person's settings for all runs."""
    return Path(env.get("XDG_CONFIG_HOME") or Path(env.get("HOME") or "/") / ".config") / "maniple.yaml"


def shared_memory(env: Mapping[str, str] = os.environ) -> Path:
    """The folder in memory that holds the segments of runs."""
    return Path(env.get("MANIPLE_SHM") or "/dev/shm")


def read_threads(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The thread variables that the user has set; they are left as they are."""
    return {} if _is_worker(env) else {name: env[name] for name in THREAD_VARIABLES if name in env}


def _is_worker(env: Mapping[str, str]) -> bool:
    """A launcher has written this environment, not a person."""
    return "MANIPLE_RESTARTED" in env
