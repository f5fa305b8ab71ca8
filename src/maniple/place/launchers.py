"""Other launchers: what torchrun, mpirun, srun and Ray tell the processes that they start."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from maniple.place.variables import number

# The variables of rank, world, local rank and local world. Inside a job of Slurm, mpirun leaves the variables of srun
# to be seen, and srun may set those of PMI: the surest signs come first.
TORCHRUN = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
_OPEN_MPI = [
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
]
_MPICH = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
_SLURM = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"]


@dataclass(frozen=True)
class Started:
    """One process of many, as its launcher says."""

    launcher: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    master: str | None  # HOST:PORT where they can meet
    restarts: int  # how often all of them were started before


def started_by(env: Mapping[str, str]) -> Started | None:
    """Who has started this process together with others; None: nobody."""
    if _has(env, *TORCHRUN[:2]):
        return by_torchrun(env)
    for names in (_OPEN_MPI, _MPICH):
        if _has(env, *names):
            return _started(env, "mpirun", names)
    if _has(env, *_SLURM):
        local_world = _tasks_here(env.get("SLURM_STEP_TASKS_PER_NODE", ""), number(env, "SLURM_NODEID", 0))
        return _started(env, "srun", [*_SLURM, ""], local_world=local_world)
    return _started(env, "mpirun", _MPICH) if _has(env, *_MPICH[:2]) else None


def by_torchrun(env: Mapping[str, str]) -> Started:
    """What torchrun says of a process that it has started, perhaps alone."""
    return _started(env, "ray" if "RAY_RAYLET_PID" in env else "torchrun", TORCHRUN)


def rank_variable(launcher: str, env: Mapping[str, str]) -> str:
    """The variable by which a launcher tells a process its rank; the launcher's own process does not have it."""
    if launcher == "mpirun":
        return _OPEN_MPI[0] if _OPEN_MPI[0] in env else _MPICH[0]
    return _SLURM[0] if launcher == "srun" else TORCHRUN[0]


def meeting_point(env: Mapping[str, str], *, in_step: bool = False) -> str | None:
    """Where the workers of torch.distributed meet: as told, or on the first node of a step of Slurm."""
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if in_step and not address:
        address = _first_node(env.get("SLURM_STEP_NODELIST", ""))
    if in_step and not port:  # the same for all workers of the step, and another one for each step
        port = str(20000 + (7 * number(env, "SLURM_JOB_ID", 0) + number(env, "SLURM_STEP_ID", 0)) % 10000)
    return f"{address}:{port}" if address and port else None


def _has(env: Mapping[str, str], *names: str) -> bool:
    """All are set, and the second, the world, is more than one worker."""
    return all(name in env for name in names) and env[names[1]].isdigit() and int(env[names[1]]) > 1


def _started(env: Mapping[str, str], launcher: str, names: list[str], *, local_world: int = 1) -> Started:
    rank, world, local_rank = (number(env, name, 0) for name in names[:3])
    local_world = number(env, names[3], local_world)
    master = meeting_point(env, in_step=launcher == "srun")
    restarts = number(env, "TORCHELASTIC_RESTART_COUNT", 0) if launcher == "torchrun" else 0
    return Started(launcher, rank, world, local_rank, local_world, master, restarts)


def _tasks_here(tasks: str, node: int) -> int:
    """How many tasks node number `node` has: of 2(x3),1 it is 2, 2, 2, 1."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node < len(counts) else 1


def _first_node(nodes: str) -> str:
    """Of node-[01-04,7],other it is node-01."""
    prefix, bracket, rest = nodes.partition("[")
    if not bracket or "," in prefix:
        return nodes.partition(",")[0]
    numbers, _, suffix = rest.partition("]")
    return prefix + numbers.partition(",")[0].partition("-")[0] + suffix.partition(",")[0]
