"""Which circle: the one that fits the place, or the one that was asked for if it can be had."""

from pathlib import Path

import pytest

from maniple.circle import choice
from maniple.circle.choice import choose_circle
from maniple.errors import InvalidArgument
from maniple.place import Place

NEAR = Place(world=4, local_world=4, segment=Path("/dev/shm"), launcher="maniple")
HOSTS = Place(world=4, local_world=2, address="a:1", launcher="maniple", master="node-1:29500")
TORCHRUN = Place(world=4, local_world=4, launcher="torchrun", master="127.0.0.1:29500")
SRUN = Place(world=4, local_world=2, launcher="srun", master="n1:20000")
MPIRUN = Place(world=4, local_world=4, launcher="mpirun")
JOINED = Place(rank=4, world=4, address="node-7:1")


@pytest.mark.parametrize(
    ("place", "circle"),
    [
        (NEAR, "shared"),
        (HOSTS, "torch"),
        (TORCHRUN, "torch"),
        (SRUN, "torch"),
        (MPIRUN, "mpi"),
        (TORCHRUN.told(segment=Path("/dev/shm")), "shared"),
        (MPIRUN.told(segment=Path("/dev/shm")), "shared"),
        (SRUN.told(segment=Path("/dev/shm")), "torch"),
        (Place(), "alone"),
        (JOINED.told(segment=Path("/dev/shm")), "shared"),
        (JOINED.told(world=1, segment=Path("/dev/shm")), "shared"),
    ],
)
def test_the_circle_that_fits(place, circle):
    assert choose_circle(place) == circle


@pytest.mark.parametrize(
    ("place", "asked"), [(NEAR.told(master="127.0.0.1:1"), "torch"), (SRUN, "mpi"), (NEAR, "shared")]
)
def test_what_was_asked_for_stands_before(place, asked):
    assert choose_circle(place.told(circle=asked)) == asked


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (TORCHRUN.told(circle="shared"), "started by torchrun.*maniple run -n 4"),
        (HOSTS.told(circle="shared"), "on several machines"),
        (NEAR.told(circle="mpi"), "started by maniple.*mpirun -n 4"),
        (NEAR.told(circle="torch"), "MASTER_ADDR and MASTER_PORT"),
        (MPIRUN.told(circle="torch"), "MASTER_ADDR and MASTER_PORT"),
        (JOINED, "joins node-7:1 .*cannot enter the circle.*rule of the center"),
        (JOINED.told(world=1), "joins node-7:1 .*cannot enter the circle"),
        (JOINED.told(segment=Path("/nowhere")), "joins node-7:1 .*cannot enter the circle"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(place, reason):
    with pytest.raises(InvalidArgument, match=reason):
        choose_circle(place)


@pytest.mark.parametrize(("place", "extra"), [(MPIRUN, "maniple\\[mpi\\]"), (TORCHRUN, "maniple\\[torch\\]")])
def test_the_extra_that_is_missing_is_named(place, extra, monkeypatch):
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidArgument, match=extra):
        choose_circle(place)
