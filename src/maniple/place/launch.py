"""The launch: what all workers that another launcher has started together have in common, and find each other by."""

import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from maniple.errors import InvalidArgument
from maniple.place import Place
from maniple.place.launchers import by_torchrun, rank_variable
from maniple.place.variables import path_in

_TOLD = {  # what launchers call a launch; the same for all of its workers, whatever their machine
    "torchrun": ("TORCHELASTIC_RUN_ID",),
    "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    "mpirun": ("PMIX_NAMESPACE",),
    "ray": (),
}
_NOTHING = {"", "none"}  # torchrun's word where nobody has given an id


@dataclass(frozen=True)
class Launch:
    """Workers that were started together.

    Attributes:
        process: the launcher's process on this machine.
        started: when it was started, in seconds since 1970.
        runs: where run folders are made.
        name: of the run's folder.
        resume: the folder of a run that they go on with.
    """

    process: int
    started: float
    runs: Path
    name: str
    resume: Path | None = None


def find_launch(place: Place, env: Mapping[str, str] = os.environ) -> Launch:
    """The launch that a guest belongs to."""
    process = _launcher(rank_variable(place.launcher, env).encode())
    return Launch(
        process,
        _started(process),
        (path_in(env, "MANIPLE_RUNS") or Path("runs")).resolve(),
        env.get("MANIPLE_NAME") or f"{place.launcher}-{_identity(place, env, process)}",
        path_in(env, "MANIPLE_RESUME"),
    )


def is_elastic(env: Mapping[str, str] = os.environ) -> bool:
    """The launcher may start all workers again when one has died."""
    return "TORCHELASTIC_RUN_ID" in env


def as_guest(place: Place, env: Mapping[str, str] = os.environ) -> Place:
    """The place of a worker that an elastic launcher has started alone, as a guest: what is left of many, perhaps."""
    return place.told(**asdict(by_torchrun(env)))


def asked_pace(env: Mapping[str, str] = os.environ) -> str | None:
    """The pace in the words of a place, which guests of a circle may be given."""
    return env.get("MANIPLE_PACE") or None


def _identity(place: Place, env: Mapping[str, str], process: int) -> str:
    """A word that all workers of this launch agree on, and no others."""
    told = [env.get(name, "") for name in _TOLD[place.launcher]]
    if told and told[0] not in _NOTHING:
        return _word("-".join(filter(None, told)))
    if place.local_world == place.world:
        return f"{process}-{_stat(process)[19]}"  # its number and its start
    if common := _control_port(process) if place.launcher == "mpirun" else place.master:
        return _word(common)
    raise InvalidArgument(
        f"{place.launcher} has started {place.world} workers on several machines, and nothing that it tells them says "
        "that they belong together. Set MANIPLE_NAME to a name for this run, the same for all of them."
    )


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")


def _launcher(variable: bytes) -> int:
    """The nearest ancestor that is no worker: there may be a shell in between, which has a worker's variables."""
    process = os.getppid()
    while process > 1 and _has_variable(process, variable):
        process = int(_stat(process)[1])
    return process


def _has_variable(process: int, name: bytes) -> bool:
    try:
        found = Path(f"/proc/{process}/environ").read_bytes()
    except OSError:  # not ours: a daemon of Slurm, say
        return False
    return any(one.startswith(name + b"=") for one in found.split(b"\0"))


def _stat(process: int) -> list[str]:
    """What the kernel says of a process: state, parent and so on."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return ["X", *["0"] * 30]


def _started(process: int) -> float:
    """When a process was started, or a little before."""
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - (up_s - int(_stat(process)[19]) / os.sysconf("SC_CLK_TCK")) - 0.1


def _control_port(process: int) -> str | None:
    """Where the launcher of mpich on this machine reaches mpiexec, which is the same on all machines."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return words[words.index("--control-port") + 1] if "--control-port" in words[:-1] else None
