"""The choice of a circle: which engine carries the rounds of a worker in its place."""

import importlib.util

from maniple.contracts import Circle
from maniple.errors import InvalidArgument
from maniple.place import CIRCLES, Place

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


def open_circle(place: Place, name: str) -> Circle:
    """The circle of that name, on the engine that `choose_circle` names; not for shared, which needs the segment."""
    chosen, deadline_s = choose_circle(place), place.circle_deadline_s
    if chosen == "torch":
        from maniple.circle.torch import Torch

        return Torch.open(place, name, deadline_s=deadline_s, deterministic=place.deterministic)
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
