"""Which engine: the one that fits the environment, or the requested one if it is available."""

from pathlib import Path

import pytest

from maniple.adapters import adapt
from maniple.collectives import engines as choice
from maniple.collectives.engines import EngineOffer, choose_engine, decide_engine
from maniple.environment import Environment
from maniple.errors import InvalidArgument
from maniple.worker import collective_groups
from maniple.worker.collective_groups import gpu_of
from tests.unit.engines import engine

NEAR = Environment(world=4, local_world=4, segment=Path("/dev/shm"), launcher="maniple")
HOSTS = Environment(world=4, local_world=2, address="a:1", launcher="maniple", master="node-1:29500")
TORCHRUN = Environment(world=4, local_world=4, launcher="torchrun", master="127.0.0.1:29500")
SRUN = Environment(world=4, local_world=2, launcher="srun", master="n1:20000")
MPIRUN = Environment(world=4, local_world=4, launcher="mpirun")
JOINED = Environment(rank=4, world=4, address="node-7:1")


@pytest.mark.parametrize(
    ("environment", "collectives"),
    [
        (NEAR, "shared"),
        (HOSTS, "torch"),
        (TORCHRUN, "torch"),
        (SRUN, "torch"),
        (MPIRUN, "mpi"),
        (TORCHRUN.replace(segment=Path("/dev/shm")), "shared"),
        (MPIRUN.replace(segment=Path("/dev/shm")), "shared"),
        (SRUN.replace(segment=Path("/dev/shm")), "torch"),
        (Environment(), "alone"),
        (JOINED.replace(segment=Path("/dev/shm")), "shared"),
        (JOINED.replace(world=1, segment=Path("/dev/shm")), "shared"),
    ],
)
def test_the_engine_that_fits(environment, collectives):
    assert choose_engine(environment) == collectives


@pytest.mark.parametrize(
    ("environment", "asked"), [(NEAR.replace(master="127.0.0.1:1"), "torch"), (SRUN, "mpi"), (NEAR, "shared")]
)
def test_the_requested_engine_comes_first(environment, asked):
    assert choose_engine(environment.replace(collectives=asked)) == asked


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (TORCHRUN.replace(collectives="shared"), "started by torchrun.*maniple run -n 4"),
        (HOSTS.replace(collectives="shared"), "on several machines"),
        (NEAR.replace(collectives="mpi"), "started by maniple.*mpirun -n 4"),
        (NEAR.replace(collectives="torch"), "MASTER_ADDR and MASTER_PORT"),
        (MPIRUN.replace(collectives="torch"), "MASTER_ADDR and MASTER_PORT"),
        (JOINED, "joins node-7:1 .*cannot join the collectives.*rule of the center"),
        (JOINED.replace(world=1), "joins node-7:1 .*cannot join the collectives"),
        (JOINED.replace(segment=Path("/nowhere")), "joins node-7:1 .*cannot join the collectives"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(environment, reason):
    with pytest.raises(InvalidArgument, match=reason):
        choose_engine(environment)


@pytest.mark.parametrize(("environment", "extra"), [(MPIRUN, "maniple\\[mpi\\]"), (TORCHRUN, "maniple\\[torch\\]")])
def test_the_extra_that_is_missing_is_named(environment, extra, monkeypatch):
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidArgument, match=extra):
        choose_engine(environment)


ON_GPUS = [EngineOffer(f"cuda:{rank}", f"GPU-{rank}") for rank in range(4)]
CPU = EngineOffer("cpu")


def test_gradients_on_a_gpu_for_each_worker_are_reduced_over_nccl():
    assert decide_engine(ON_GPUS).engine == "torch"


def test_gpus_are_distinguished_by_their_own_names_and_not_by_their_numbers():
    alike = [EngineOffer("cuda:0", f"GPU-{rank}") for rank in range(2)]  # each worker sees one GPU
    assert decide_engine(alike).engine == "torch"


@pytest.mark.parametrize(
    ("offers", "reason"),
    [
        ([CPU, CPU], "worker 0 has its model on cpu"),
        ([ON_GPUS[0], CPU, ON_GPUS[2]], "worker 1 has its model on cpu"),
        ([ON_GPUS[0], ON_GPUS[1], ON_GPUS[0]], "workers 0 and 2 share one GPU (cuda:0), which NCCL refuses"),
        ([EngineOffer("cuda:0", "GPU-0", "has a torch that was built without NCCL"), ON_GPUS[1]], "built without NCCL"),
        ([ON_GPUS[0], None], "worker 1 is gone"),
    ],
)
def test_host_memory_is_taken_where_nccl_cannot_carry_all_gradients(offers, reason):
    decided = decide_engine(offers)
    assert decided.engine == "shared" and reason in decided.reason


def test_host_memory_is_taken_where_workers_may_come_back():
    decided = decide_engine(ON_GPUS, restarts=2)
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
    monkeypatch.setattr(collective_groups, "visible_gpus", lambda: "3,4")
    assert gpu_of("cuda:1")[0] == "3,4 cuda:1"


def test_model_that_lies_on_no_gpu_or_on_several_devices_is_one_in_host_memory():
    torch = engine("torch")
    assert adapt(torch.nn.Linear(2, 1, device="meta")).device == "cpu"
    assert adapt({"a": torch.zeros(2, device="meta"), "b": torch.zeros(2)}).device == "cpu"
