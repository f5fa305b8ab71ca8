"""The choice of a circle: which engine carries the rounds of a worker in its place.

Gradients that lie on GPUs of one machine meet over NCCL if it can carry them for all workers. No worker knows that by
itself: each offers its device in a file beside the circle's own (`circle-0.device-RANK`), and worker 0 decides for all
(`circle-0.engine`), once. Workers on the CPU need not wait for that, since NCCL needs a GPU of each.
"""

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from maniple.center import Segment
from maniple.center.locks import Patience
from maniple.center.segment import DEAD, LEFT, refusal
from maniple.contracts import Circle
from maniple.errors import InvalidArgument, WaitedTooLong
from maniple.place import CIRCLES, Place
from maniple.record.folder import write_once, write_whole

_LOOK_S = 0.02
_RETURN_S = 30.0  # worker 0 may count as dead for so long, on a busy machine, and yet return
_BY_LAUNCHER = {"torchrun": "torch", "srun": "torch", "mpirun": "mpi", "ray": "torch"}  # on several machines


def choose_circle(place: Place) -> str:
    """The engine that was asked for, if it is possible here; else the one that fits: alone, shared, torch or mpi."""
    if place.circle is not None:
        _check(place, place.circle)
        return place.circle
    if place.address is not None and not place.is_near and not place.launcher:
        raise InvalidArgument(
            f"a worker that joins {place.address} by itself cannot enter the circle of those who were started "
            "together, whose memory it does not share. Choose a rule of the center (easgd, asgd, downpour), or start "
            "all by `maniple run --hosts`."
        )
    if place.world == 1 and not place.is_near:
        return "alone"
    chosen = "shared" if _is_one_machine(place) else _BY_LAUNCHER.get(place.launcher, "torch")
    _check(place, chosen)
    return chosen


class Offer(msgspec.Struct, frozen=True):
    """What one worker says of the gradients that it brings to a circle.

    Attributes:
        device: where they lie, in torch's words.
        gpu: the name of that GPU, which no other of the machine has; empty for gradients in host memory.
        obstacle: why NCCL cannot carry them; empty if it can.
    """

    device: str = "cpu"
    gpu: str = ""
    obstacle: str = ""


class Decided(msgspec.Struct, frozen=True):
    """Where the gradients of all workers meet, and why not over NCCL."""

    engine: str
    reason: str = ""


def decide(offers: Sequence[Offer | None], *, restarts: int = 0) -> Decided:
    """Over NCCL if each worker has a GPU of its own that NCCL can reach, else in host memory.

    Args:
        offers: of all workers, by rank; None: it is gone.
        restarts: how often a worker may be started again; NCCL cannot take it back.
    """
    owners: dict[str, int] = {}
    for rank, offer in enumerate(offers):
        if offer is None or offer.obstacle or not offer.gpu:
            why = "is gone" if offer is None else offer.obstacle or f"has its model on {offer.device}"
            return Decided("shared", f"worker {rank} {why}")
        if (other := owners.setdefault(offer.gpu, rank)) != rank:
            return Decided("shared", f"workers {other} and {rank} share one GPU ({offer.device}), which NCCL refuses")
    if restarts:
        return Decided("shared", f"with --restarts {restarts} workers may come back, whom NCCL cannot take in")
    return Decided("torch")


def agree(
    place: Place, segment: Segment, name: str, offer: Offer, *, restarts: Callable[[], int], on_wait: Callable[[], None]
) -> Decided:
    """What the workers of one machine agree on for the circle `name`, before they open it.

    Args:
        restarts: how often a worker may be started again.
        on_wait: called while this worker waits for the others.
    """
    # All workers of an elastic launcher start again together, and decide anew.
    mark = f"-{place.restarts}" if place.is_guest and place.restarts else ""
    path = segment.path / f"{name}.engine{mark}"
    _put(segment.path / f"{name}.device{mark}-{place.rank}", offer)
    if not offer.gpu:  # so it is host memory, whatever the others have
        decided = Decided("shared", f"worker {place.rank} has its model on {offer.device}")
        if place.rank == 0:
            write_once(path, msgspec.json.encode(decided))
        return decided
    patience, seen_s = Patience(place.circle_deadline_s), 0.0
    while not path.exists():
        paths = [segment.path / f"{name}.device{mark}-{rank}" for rank in range(place.world)]
        missing = [rank for rank, one in enumerate(paths) if not one.exists()]
        if place.rank == 0 and all(segment.state(rank) in {LEFT, DEAD} for rank in missing):
            offers = [None if rank in missing else _read(one) for rank, one in enumerate(paths)]
            write_once(path, msgspec.json.encode(decide(offers, restarts=restarts())))
            continue
        seen_s = seen_s if segment.state(0) in {LEFT, DEAD} else patience.waited_s
        if place.rank and patience.waited_s - seen_s > _RETURN_S:
            write_once(path, msgspec.json.encode(Decided("shared", "worker 0 is gone")))
        if patience.is_over():
            whom = missing if place.rank == 0 else [0]
            raise WaitedTooLong(
                f"worker {', '.join(map(str, whom))} has not said within {place.circle_deadline_s:g} s where its model "
                f"lies, and worker {place.rank} waits for that. Look at its log; raise --circle-deadline if it starts "
                "slowly."
            )
        on_wait()
        time.sleep(_LOOK_S)
    decided = msgspec.json.decode(path.read_bytes(), type=Decided)
    if decided.engine == "torch" and place.rank >= place.world:
        raise InvalidArgument(
            f"worker {place.rank} comes later than the {place.world} that were started together, and these meet over "
            "NCCL, which takes in nobody. Start the run with --circle shared, or with a rule of the center (easgd)."
        )
    return decided


def _put(path: Path, offer: Offer) -> None:
    try:
        write_whole(path, msgspec.json.encode(offer))
    except OSError as error:
        raise refusal(path.parent.parent, error) from error


def _read(path: Path) -> Offer:
    return msgspec.json.decode(path.read_bytes(), type=Offer)


def open_circle(place: Place, name: str, folder: Path | None = None) -> Circle:
    """The circle of that name, on the engine that `choose_circle` names; not for shared, which needs the segment.

    With a `folder` it is the circle torch, whose workers find each other there.
    """
    chosen, deadline_s = "torch" if folder else choose_circle(place), place.circle_deadline_s
    if chosen == "torch":
        from maniple.circle.torch import Torch

        return Torch.open(place, name, deadline_s=deadline_s, deterministic=place.deterministic, folder=folder)
    if chosen == "mpi":
        from maniple.circle.mpi import Mpi

        return Mpi.open(place, name, deadline_s=deadline_s)
    assert chosen == "alone"
    from maniple.circle.alone import Alone

    return Alone()


def _check(place: Place, circle: str) -> None:
    """Raise InvalidArgument for what is impossible in this place."""
    if circle not in CIRCLES:
        raise InvalidArgument(f"circle={circle!r} is no circle (one of {', '.join(CIRCLES)}).")
    if circle == "shared" and not _is_one_machine(place):
        where = f"started by {place.launcher}" if place.launcher in _BY_LAUNCHER else "on several machines"
        raise InvalidArgument(
            f"the circle shared needs the memory of one run on one machine, but these {place.world} workers are "
            f"{where}. Start them by `maniple run -n {place.world} SCRIPT` on one machine, or leave --circle out."
        )
    if circle == "torch" and place.world > 1 and place.master is None:
        raise InvalidArgument(
            f"the circle torch needs a place where the {place.world} workers meet, but MASTER_ADDR and MASTER_PORT are "
            "not set. Start them by torchrun, srun or `maniple run --circle torch`, or set both variables."
        )
    if circle == "torch" and importlib.util.find_spec("torch") is None:
        raise InvalidArgument("the circle torch needs PyTorch, which is not installed: pip install 'maniple[torch]'.")
    if circle == "mpi" and place.launcher in {"", "maniple", "torchrun", "ray"} and place.world > 1:
        raise InvalidArgument(
            f"the circle mpi needs workers that MPI has started, but these {place.world} were started by "
            f"{place.launcher or 'a person'}. Start them by `mpirun -n {place.world} python SCRIPT`."
        )
    if circle == "mpi" and importlib.util.find_spec("mpi4py") is None:
        raise InvalidArgument("the circle mpi needs mpi4py, which is not installed: pip install 'maniple[mpi]'.")


def _is_one_machine(place: Place) -> bool:
    """All workers of the run map the same memory; so does one that joins them here by hand."""
    return place.is_near and (place.local_world == place.world or not place.launcher)
