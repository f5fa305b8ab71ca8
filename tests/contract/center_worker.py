"""One rank of an MPI job whose center is under test: all that needs several ranks, told in a file.

python center_worker.py FOLDER
"""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import maniple.center.mpi as center_mpi
from maniple import EASGD, Downpour
from maniple.adapters import adapt
from maniple.center.job import Job
from maniple.center.mpi import Mpi
from maniple.center.spread import Spread
from maniple.contracts import Moment
from maniple.errors import ManipleError
from maniple.layout import Layout
from maniple.sampler import Lease, Terms
from maniple.sampler.cursors import Cursors

ROUNDS = 30
LARGE = 700_001  # of 8 bytes: three pieces, at three ranks


class Rank:
    """One worker: its arrays, its view of the center, and what a rule remembers."""

    def __init__(self, job: Job, name: str, params: dict[str, np.ndarray]) -> None:
        self.params, self.model, self._job = params, adapt(params), job
        self.spread = Spread.make(job, name, self.model, "a note")
        self.center = Mpi(self.spread, rank=job.rank)
        layout = Layout(self.model.entries)
        self.memory = layout.views(layout.allocate())
        self.center.pull(self.model, self._remember)
        job.meet("begin")

    def exchange(self, rule: Any) -> float:
        return self.center.exchange(self.model, rule, self.memory, Moment()).staleness

    def _remember(self, i: int, value: np.ndarray) -> None:
        self.memory[i][:] = value


def some(fill: float, dtype: str = "float64") -> dict[str, np.ndarray]:
    return {"w": np.full(LARGE, fill, dtype), "b": np.full(3, fill, "float32"), "s": np.full((), fill, "float16")}


def error_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except ManipleError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def refusals(job: Job) -> dict[str, str]:
    """What all ranks say of a model that differs at one of them, and of one that is not finite."""
    other = some(0) | {"b": np.zeros(4 if job.rank == 2 else 3, "float32")}
    bad = some(np.nan if job.rank == 0 else 0)
    return {
        "differs": error_of(lambda: Rank(job, "differs", other)),
        "not finite": error_of(lambda: Rank(job, "bad", bad)),
    }


def beginning(job: Job) -> dict[str, Any]:
    """Everybody begins with the values of rank 0, and all are counted."""
    rank = Rank(job, "beginning", some(7 + job.rank))
    live = rank.center.live
    job.meet("count")
    rank.center.close()
    job.meet("leave")
    return {"values": values(rank), "live": live, "left": rank.center.live, "note": rank.center.note}


def sums(job: Job) -> dict[str, Any]:
    """All push known whole numbers at once."""
    rank, stale = Rank(job, "sums", some(0)), 0.0
    for number in range(ROUNDS):
        for array in rank.params.values():
            array += (number + job.rank) % 3
        stale += rank.exchange(Downpour())
    for turn in range(job.size):  # one more each, in turn, that changes nothing
        job.meet("end")
        if turn == job.rank:
            stale += rank.exchange(Downpour())
    job.meet("end")
    rank.center.pull(rank.model)
    return {"values": values(rank), "stale": stale, "rounds": ROUNDS, "versions": rank.center.versions}


def conserved(job: Job) -> dict[str, Any]:
    """What elastic exchanges take from a replica they give to the center, and the other way round."""
    rank = Rank(job, "elastic", {"w": np.zeros(1000), "v": np.zeros(LARGE)})
    for array in rank.params.values():
        array += 8 * job.rank - 3
    for _ in range(5):
        rank.exchange(EASGD(0.25))
    job.meet("end")
    return {name: float(array[-1]) for name, array in rank.params.items()} | {
        f"center {entry.name}": float(rank.center.read(i)[-1]) for i, entry in enumerate(rank.model.entries)
    }


def waiting(job: Job) -> str:
    """The error of those who wait for a lock that rank 1 does not give back."""
    rank, limit = Rank(job, "waiting", some(0)), center_mpi.LOCK_TIMEOUT_S
    if job.rank == 1:
        assert rank.center._take(0)
    job.meet("take")
    center_mpi.LOCK_TIMEOUT_S = 0.05
    said = error_of(lambda: rank.exchange(EASGD(0.5))) if job.rank != 1 else ""
    center_mpi.LOCK_TIMEOUT_S = limit
    job.meet("give")
    if job.rank == 1:
        rank.center._give(0)
    rank.exchange(EASGD(0.5))
    return said


def leases(job: Job) -> dict[str, Any]:
    """The samples that this rank got, of a few epochs; the second sampler has other data at rank 3.

    The third has passes of at most a quarter, at ranks of different speed; rank 0 gives its first lease back.
    """
    lender = Cursors(job, 0, Terms(1003, 10 + job.rank, True))
    taken: list[tuple[int, int]] = []
    for epoch in range(20):
        while isinstance(lease := lender.take(epoch), Lease):
            taken += [(lease.epoch, place) for place in range(lease.start, lease.stop)]
    job.meet("end")
    closed = str(lender.take(0))
    error = error_of(lambda: Cursors(job, 1, Terms(5 if job.rank == 3 else 6, 1, True)))
    limited = Cursors(job, 2, Terms(40, 3, True))
    back = [limited.take(5, most=10).slot] if job.rank == 0 else []
    job.meet("limited")
    passes: list[list[tuple[int, int]]] = []
    for epoch in range(5, 20):
        passes.append([])
        while len(passes[-1]) < 10 and isinstance(
            lease := limited.take(epoch, most=10 - len(passes[-1]), back=back), Lease
        ):
            passes[-1] += [(lease.epoch, place) for place in range(lease.start, lease.stop)]
            back = []
            time.sleep(0.0002 * job.rank)
    terms = {"chunk": lender.terms.chunk, "closed": closed, "error": error}
    return {"taken": taken, "passes": passes, **terms}


def lock(job: Job, folder: Path) -> None:
    """Add to a number in a file, under the workers' lock."""
    path = folder / "count"
    for _ in range(20):
        with job.held(60):
            path.write_text(str(int(path.read_text() or 0) + 1 if path.exists() else 1))
    job.meet("count")


def kept_out(job: Job) -> dict[str, Any]:
    """The error of those who wait for the workers' lock, which rank 1 holds."""
    with job.held(60) if job.rank == 1 else nullcontext():
        job.meet("held")
        said = error_of(lambda: job.held(0.05).__enter__()) if job.rank != 1 else ""
        job.meet("waited")
    return {"pid": os.getpid(), "said": said}


def values(rank: Rank) -> list[float]:
    """The smallest and the largest value of each array."""
    return [float(one) for array in rank.params.values() for one in (array.min(), array.max())]


def main() -> None:
    sys.modules["numba"] = None  # type: ignore[assignment] # ranks start sooner without a compiler
    folder, job = Path(sys.argv[1]), Job(MPI.COMM_WORLD.Dup(), deadline_s=60)
    said = {
        "refusals": refusals(job),
        "beginning": beginning(job),
        "sums": sums(job),
        "conserved": conserved(job),
        "waiting": waiting(job),
        "leases": leases(job),
        "kept out": kept_out(job),
    }
    lock(job, folder)
    (folder / f"{job.rank}.json").write_text(json.dumps(said | {"count": int((folder / "count").read_text())}))
    job.meet("end")
    job.close(is_whole=True)


if __name__ == "__main__":
    main()
