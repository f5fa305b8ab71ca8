"""Ranks of the collectives under test: real processes, started as the engine's own launcher starts them."""

import os
import secrets
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from maniple.center import Segment
from maniple.job import free_port
from tests.conftest import require

WORKER = Path(__file__).with_name("collectives_worker.py")
ENGINES = ["shared", "torch", "mpi"]
PATIENCE_S = 120.0  # only against hanging

_segments: list[Segment] = []  # of the ranks that have been started


def start(engine: str, world: int, folder: Path, how: str, *, around: tuple[str, ...] = ()) -> list[subprocess.Popen]:
    """Start `world` ranks: one process for each, or the launcher of all. `around` is put before the command of each."""
    command = [*around, sys.executable, str(WORKER), engine, str(folder), how]
    env = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE"}}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if engine == "shared":
        segment = Segment.create(Path(os.environ.get("MANIPLE_SHM", "/dev/shm")), secrets.token_hex(8), folder)
        _segments.append(segment)
        env |= {"MANIPLE_SEGMENT": str(segment.path), "MANIPLE_RESTARTED": "0", "WORLD_SIZE": str(world)}
        return [_open(command, env | {"RANK": str(rank)}) for rank in range(world)]
    if engine == "mpi":
        launcher = find_mpiexec()
        require("mpi", launcher is not None and find_spec("mpi4py") is not None, "no mpi4py with mpiexec of mpich")
        return [_open([str(launcher), "-n", str(world), *command], env)]
    require("torch", find_spec("torch") is not None, "no torch")
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    return [_open(command, env | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(world)]


def finish(processes: list[subprocess.Popen]) -> list[tuple[int, str]]:
    """The exit code and output of each; none is left."""
    try:
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
        while _segments:
            _segments.pop().remove()
    return [(process.returncode, words) for process, words in zip(processes, said, strict=True)]


def sweep(folder: Path) -> None:
    """Remove what mpich leaves in shared memory when its processes are killed: the files that a rank has noted."""
    for noted in folder.glob("mpich-*"):
        for name in noted.read_text().split():
            Path("/dev/shm", name).unlink(missing_ok=True)


def find_mpiexec() -> str | None:
    """mpich's launcher, beside this Python or in PATH."""
    path = Path(sys.executable).with_name("mpiexec.hydra")
    return str(path) if path.exists() else shutil.which("mpiexec.hydra")


def _open(command: list[str], env: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
