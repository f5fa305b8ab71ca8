"""External workers, which another launcher (torchrun, mpirun, srun, Ray) has started: their ranks and their launch."""

import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from maniple.environment.variables import number, path_in
from maniple.errors import InvalidArgument
from maniple.settings.options import setting

_ID_VARIABLES = {  # identify a launch; the same for all of its workers on all machines
    "torchrun": ("TORCHELASTIC_RUN_ID",),
    "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    "mpirun": ("PMIX_NAMESPACE",),
    "ray": (),
}
_NO_ID = {"", "none"}  # torchrun writes `none` without --rdzv-id


@dataclass(frozen=True, kw_only=True)
class Started:
    """A process among those that its launcher has started together."""

    launcher: str = setting("")  # maniple, torchrun, mpirun, srun or ray; "": started by hand
    rank: int = setting(0, fallback="RANK")
    world: int = setting(1, fallback="WORLD_SIZE")
    local_rank: int = setting(0, fallback="LOCAL_RANK")
    local_world: int = setting(1, fallback="LOCAL_WORLD_SIZE")
    master: str | None = setting(None)  # HOST:PORT of the rendezvous of torch.distributed
    restarts: int = setting(0, variable="MANIPLE_RESTARTED")  # how often this rank was started before


AnyStarted = TypeVar("AnyStarted", bound=Started)


@dataclass(frozen=True)
class Launch:
    """External workers that were started together."""

    process: int  # process id of the launcher on this machine
    started: float  # its start, in seconds since 1970
    runs: Path  # the folder for run folders
    name: str  # of the run folder
    resume: Path | None = None  # the folder of the run that they continue


def find_launch(worker: Started, env: Mapping[str, str] = os.environ) -> Launch:
    """The launch that an external worker belongs to."""
    process = _launcher(_rank_variable(worker.launcher, env).encode())
    return Launch(
        process,
        _start_of(process),
        (path_in(env, "MANIPLE_RUNS") or Path("runs")).resolve(),
        env.get("MANIPLE_NAME") or f"{worker.launcher}-{_identity(worker, env, process)}",
        path_in(env, "MANIPLE_RESUME"),
    )


def is_elastic(env: Mapping[str, str] = os.environ) -> bool:
    """The launcher may restart all workers when one has died."""
    return "TORCHELASTIC_RUN_ID" in env


def as_external(environment: AnyStarted, env: Mapping[str, str] = os.environ) -> AnyStarted:
    """The environment of a worker that an elastic launcher has started alone: perhaps the only one left of many."""
    return replace(environment, **asdict(_by_torchrun(env)))


def read_pace(env: Mapping[str, str] = os.environ) -> str | None:
    """The pace of external workers, as MANIPLE_PACE gives it: `every:5` or `rate:0.1`."""
    return env.get("MANIPLE_PACE") or None


def _identity(worker: Started, env: Mapping[str, str], process: int) -> str:
    """A name that all workers of this launch agree on, and no others."""
    parts = [env.get(name, "") for name in _ID_VARIABLES[worker.launcher]]
    if parts and parts[0] not in _NO_ID:
        return _slug("-".join(filter(None, parts)))
    if worker.local_world == worker.world:
        return f"{process}-{process_stat(process)[19]}"  # process id and start time
    if common := _control_port(process) if worker.launcher == "mpirun" else worker.master:
        return _slug(common)
    raise InvalidArgument(
        f"{worker.launcher} has started {worker.world} workers on several machines, but no variable that "
        "it sets is the same for all of them and no others. Set MANIPLE_NAME to a name for this run, the same for all."
    )


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")


def _launcher(variable: bytes) -> int:
    """The nearest ancestor without a worker's variables: a shell in between has them."""
    process = os.getppid()
    while process > 1 and _has_variable(process, variable):
        process = int(process_stat(process)[1])
    return process


def _has_variable(process: int, name: bytes) -> bool:
    try:
        variables = Path(f"/proc/{process}/environ").read_bytes()
    except OSError:  # of another user, such as a Slurm daemon
        return False
    return any(one.startswith(name + b"=") for one in variables.split(b"\0"))


def process_stat(process: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on: 0 is the state, 1 the parent, 19 the start in clock ticks."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # the process has just ended
        return ["X", *["0"] * 30]


def _start_of(process: int) -> float:
    """The start of a process, or 0.1 s before it: the kernel counts in ticks of 0.01 s."""
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - (up_s - int(process_stat(process)[19]) / os.sysconf("SC_CLK_TCK")) - 0.1


def _control_port(process: int) -> str | None:
    """The address at which mpich's launcher on this machine reaches mpiexec; it is the same on all machines."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return words[words.index("--control-port") + 1] if "--control-port" in words[:-1] else None


# Rank, world, local rank and local world. Inside a Slurm job, mpirun leaves the variables of srun visible, and srun may
# set those of PMI, so `started_by` looks at the least ambiguous ones first.
TORCHRUN = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
_OPEN_MPI = [
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
]
_MPICH = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
_SLURM = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"]


def started_by(env: Mapping[str, str]) -> Started | None:
    """The rank that another launcher gave this process; None if none started it together with others."""
    if _has(env, *TORCHRUN[:2]):
        return _by_torchrun(env)
    for names in (_OPEN_MPI, _MPICH):
        if _has(env, *names):
            return _started(env, "mpirun", names)
    if _has(env, *_SLURM):
        local_world = _tasks_here(env.get("SLURM_STEP_TASKS_PER_NODE", ""), number(env, "SLURM_NODEID", 0))
        return _started(env, "srun", [*_SLURM, ""], local_world=local_world)
    return _started(env, "mpirun", _MPICH) if _has(env, *_MPICH[:2]) else None


def _by_torchrun(env: Mapping[str, str]) -> Started:
    """The rank that torchrun gave this process, which may be the only one."""
    return _started(env, "ray" if "RAY_RAYLET_PID" in env else "torchrun", TORCHRUN)


def _rank_variable(launcher: str, env: Mapping[str, str]) -> str:
    """The variable that holds a worker's rank; the launcher's own process does not have it."""
    if launcher == "mpirun":
        return _OPEN_MPI[0] if _OPEN_MPI[0] in env else _MPICH[0]
    return _SLURM[0] if launcher == "srun" else TORCHRUN[0]


def master_address(env: Mapping[str, str], *, in_step: bool = False) -> str | None:
    """The rendezvous of torch.distributed: MASTER_ADDR, or in a Slurm step its first node."""
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if in_step and not address:
        address = _first_node(env.get("SLURM_STEP_NODELIST", ""))
    if in_step and not port:  # equal for all workers of a step, different for each step
        port = str(20000 + (7 * number(env, "SLURM_JOB_ID", 0) + number(env, "SLURM_STEP_ID", 0)) % 10000)
    return f"{address}:{port}" if address and port else None


def _has(env: Mapping[str, str], *names: str) -> bool:
    """All are set, and the second, the world, is above 1."""
    return all(name in env for name in names) and env[names[1]].isdigit() and int(env[names[1]]) > 1


def _started(env: Mapping[str, str], launcher: str, names: list[str], *, local_world: int = 1) -> Started:
    rank, world, local_rank = (number(env, name, 0) for name in names[:3])
    local_world = number(env, names[3], local_world)
    master = master_address(env, in_step=launcher == "srun")
    restarts = number(env, "TORCHELASTIC_RESTART_COUNT", 0) if launcher == "torchrun" else 0
    return Started(
        launcher=launcher, rank=rank, world=world, local_rank=local_rank, local_world=local_world, master=master,
        restarts=restarts,
    )  # fmt: skip


def _tasks_here(tasks: str, node: int) -> int:
    """The tasks on node number `node`: 2(x3),1 means 2, 2, 2 and 1."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node < len(counts) else 1


def _first_node(nodes: str) -> str:
    """The first of Slurm's node list: node-01 for node-[01-04,7],other."""
    prefix, bracket, rest = nodes.partition("[")
    if not bracket or "," in prefix:
        return nodes.partition(",")[0]
    numbers, _, suffix = rest.partition("]")
    return prefix + numbers.partition(",")[0].partition("-")[0] + suffix.partition(",")[0]
