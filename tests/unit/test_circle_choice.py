"""Which circle: the one that fits the place, or the one that was asked for if it can be had."""

from pathlib import Path

import pytest

from maniple import adapters
from maniple.adapters import adapt, gpu_of
from maniple.circle import choice
from maniple.circle.choice import Offer, choose_circle, decide
from maniple.errors import InvalidArgument
from maniple.place import Place
from tests.unit.engines import engine

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


ON_GPUS = [Offer(f"cuda:{rank}", f"GPU-{rank}") for rank in range(4)]
CPU = Offer("cpu")


def test_gradients_on_a_gpu_for_each_worker_meet_over_nccl():
    assert decide(ON_GPUS).engine == "torch"


def test_gpus_are_told_apart_by_their_own_names_and_not_by_their_numbers():
    alike = [Offer("cuda:0", f"GPU-{rank}") for rank in range(2)]  # each worker sees one GPU
    assert decide(alike).engine == "torch"


@pytest.mark.parametrize(
    ("offers", "reason"),
    [
        ([CPU, CPU], "worker 0 has its model on cpu"),
        ([ON_GPUS[0], CPU, ON_GPUS[2]], "worker 1 has its model on cpu"),
        ([ON_GPUS[0], ON_GPUS[1], ON_GPUS[0]], "workers 0 and 2 share one GPU (cuda:0), which NCCL refuses"),
        ([Offer("cuda:0", "GPU-0", "has a torch that was built without NCCL"), ON_GPUS[1]], "built without NCCL"),
        ([ON_GPUS[0], None], "worker 1 is gone"),
    ],
)
def test_host_memory_is_taken_where_nccl_cannot_carry_all_gradients(offers, reason):
    decided = decide(offers)
    assert decided.engine == "shared" and reason in decided.reason


def test_host_memory_is_taken_where_workers_may_come_back():
    decided = decide(ON_GPUS, restarts=2)
    assert decided.engine == "shared" and "--restarts 2" in decided.reason


def test_gpu_is_named_by_its_own_number_and_with_what_torch_lacks(monkeypatch):
    torch = engine("torch")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), {"uuid": f"U-{device}"}))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert gpu_of("cuda:1") == ("U-cuda:1", "")
    assert gpu_of("cpu") == gpu_of("meta") == ("", "")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert "built without NCCL" in gpu_of("cuda:1")[1]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())  # of an older torch
    monkeypatch.setattr(adapters, "visible_gpus", lambda: "3,4")
    assert gpu_of("cuda:1")[0] == "3,4 cuda:1"


def test_model_that_lies_on_no_gpu_or_on_several_devices_is_one_in_host_memory():
    torch = engine("torch")
    assert adapt(torch.nn.Linear(2, 1, device="meta")).device == "cpu"
    assert adapt({"a": torch.zeros(2, device="meta"), "b": torch.zeros(2)}).device == "cpu"
