"""How long does an EASGD exchange take with a center in MPI windows, compared with the one in shared memory?

So many workers exchange a vector, split into parameters of equal size, with their center, all at once and as fast as
they can. All contestants are alive at once and take turns, many times over; ratios are taken within a round.

    shared       the center of `maniple run`, which all map
    mpich        MANIPLE_CENTER=mpi on one machine, where mpich's windows lie in shared memory
    openmpi      the same with Open MPI
    mpich tcp    mpich, whose ranks are told not to know that they are neighbours: windows over the loopback network

    python benchmarks/mpi.py [--sizes 0.4 4 40] [--workers 2] [--parameters 8] [--rounds 15] [--turn 0.5]
"""

import argparse
import contextlib
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cast import Cast, answer
from maniple.adapters import adapt
from maniple.center import Segment, Shared
from maniple.contracts import Center, Moment
from maniple.place import shared_memory
from maniple.rules import EASGD, warm_up
from measure import report

BIN = Path(sys.prefix) / "bin"
LIB = Path(sys.prefix) / "lib"
MPICH = [str(BIN / "mpiexec.hydra")]
OPENMPI = [str(BIN / "prterun"), "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"]
LAUNCHERS = {"mpich": MPICH, "openmpi": OPENMPI, "mpich tcp": MPICH}
SETTINGS = {
    "mpich": {"MPI4PY_LIBMPI": str(LIB / "libmpi.so.12")},
    "openmpi": {"MPI4PY_LIBMPI": str(LIB / "libmpi.so.40"), "OMPI_MCA_pml": "ob1", "OMPI_MCA_osc": "^ucx"},
    "mpich tcp": {
        "MPI4PY_LIBMPI": str(LIB / "libmpi.so.12"),
        "MPIR_CVAR_NOLOCAL": "1",
        "UCX_TLS": "tcp,self",
    },
}
RULE = EASGD(0.3)


def open_shared(model: Any) -> tuple[Center, Callable[[], None]]:
    """The center in shared memory, and how to leave it."""
    segment, rank = Segment(Path(os.environ["SEGMENT"])), int(os.environ["RANK"])
    center, _ = Shared.open_or_create(segment, "center-0", model, rank=rank)
    segment.mark(rank, 1)
    return center, center.close


def open_mpi(model: Any) -> tuple[Center, Callable[[], None]]:
    """The center in windows, and how to leave it."""
    from mpi4py import MPI

    from maniple.center.job import Job
    from maniple.center.mpi import Mpi
    from maniple.center.spread import Spread

    job = Job(MPI.COMM_WORLD.Dup(), deadline_s=120)
    center = Mpi(Spread.make(job, "center-0", model, ""), rank=job.rank)

    def leave() -> None:
        job.meet("leave")
        job.close(is_whole=True)

    return center, leave


def work(kind: str, address: str, megabytes: float, parameters: int) -> None:
    """A process of a contestant: makes so many exchanges when it is asked, and says the seconds of one."""
    flat = np.random.default_rng(os.getpid()).random(int(megabytes * 1e6 / 4), np.float32)
    model = adapt({f"p{i}": part for i, part in enumerate(np.array_split(flat, parameters))})
    warm_up(["float32"])
    center, leave = open_shared(model) if kind == "shared" else open_mpi(model)

    def exchange(times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            center.exchange(model, RULE, None, Moment())
        return (time.perf_counter() - begin) / times

    answer(address, exchange)
    leave()


@contextlib.contextmanager
def started(kinds: list[str], megabytes: float, options: argparse.Namespace) -> Iterator[dict[str, Cast]]:
    """The processes of all contestants, ended at the end."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        segment = Segment.create(shared_memory(), secrets.token_hex(8), Path(folder))
        stack.callback(segment.remove)
        found: dict[str, Cast] = {}
        for kind in kinds:
            address = Path(folder) / kind.replace(" ", "-")
            script = [__file__, "--work", kind, str(address), str(megabytes), str(options.parameters)]
            command, count = [sys.executable, *script], options.workers
            env = {"OMP_NUM_THREADS": "1", "SEGMENT": str(segment.path)}
            if kind == "shared":
                envs = [env | {"RANK": str(rank)} for rank in range(count)]
                found[kind] = Cast(address, [command] * count, envs, count)
            else:
                launcher = [*LAUNCHERS[kind], "-n", str(count)]
                found[kind] = Cast(address, [[*launcher, *command]], [env | SETTINGS[kind]], count)
            stack.callback(found[kind].close)
        yield found


def measure(megabytes: float, kinds: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """One row: the milliseconds of an exchange, and how many times longer than in shared memory that is."""
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with started(kinds, megabytes, options) as contestants:
        times = {kind: max(2, int(options.turn / max(cast.ask(3)))) for kind, cast in contestants.items()}
        for round_ in range(options.rounds):
            for kind in kinds if round_ % 2 else reversed(kinds):
                seconds[kind].append(statistics.fmean(contestants[kind].ask(times[kind])))
    row: dict[str, Any] = {"MB": megabytes}
    for kind in kinds:
        row[f"{kind} ms"] = 1e3 * statistics.median(seconds[kind])
    for kind in kinds[1:]:
        ratios = [mine / its for mine, its in zip(seconds[kind], seconds["shared"], strict=True)]
        row[f"{kind} / shared"] = statistics.median(ratios)
    return row


def is_there(kind: str) -> bool:
    if kind == "shared" or (Path(LAUNCHERS[kind][0]).exists() and Path(SETTINGS[kind]["MPI4PY_LIBMPI"]).exists()):
        return True
    print(f"{kind}: not installed, left out")
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.4, 4, 40], help="megabytes")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--parameters", type=int, default=8, help="parameters that the vector is split into")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contestant")
    parser.add_argument("--turn", type=float, default=0.5, help="seconds of a turn, about")
    parser.add_argument("--work", nargs=4, metavar=("KIND", "ADDRESS", "MB", "PARAMETERS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        kind, address, megabytes, parameters = options.work
        work(kind, address, float(megabytes), int(parameters))
        return
    kinds = [kind for kind in ("shared", "mpich", "openmpi", "mpich tcp") if is_there(kind)]
    rows = [measure(size, kinds, options) for size in options.sizes]
    facts = {"workers": options.workers, "parameters": options.parameters, "rounds": options.rounds}
    report("mpi", "EASGD exchange with a center in MPI windows, all workers at once", rows, **facts)


if __name__ == "__main__":
    main()
