"""Workers that rejoin their collectives after a kill or after being passed over have the others' state, to the bit."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from .conftest import Run

# Trains until the file `stop` is there. After each round: how many there were, and what all values come to.
TRAIN = """
    import sys, time, zlib
    from pathlib import Path
    import numpy as np
    import maniple

    worker = maniple.join()
    dice = np.random.default_rng(worker.rank)
    rule, slow = eval(sys.argv[1], vars(maniple)), float(sys.argv[2])
    w = {"w": dice.normal(size=100).astype("float32")}
    replica = worker.share(w, rule=rule)
    while not Path("stop").exists():
        time.sleep(slow if worker.rank == 2 else 0.005)
        gradient = {"w": 0.1 * w["w"] + dice.normal(size=100).astype("float32")}
        replica.reduce(gradient)
        w["w"] -= gradient["w"]
        replica.step()
        worker.log(rounds=replica.rounds, digest=zlib.crc32(w["w"].tobytes()))
"""


def assert_same(run: Run, world: int, key: tuple[str, ...] = ("rounds",)) -> int:
    """After the same round all who were in it have the same values; gives the rounds in which several were."""
    seen: dict[tuple[Any, ...], list[int]] = {}
    for rank in range(world):
        for row in run.events(rank, "log"):
            seen.setdefault(tuple(row[name] for name in key), []).append(row["digest"])
    assert [at for at, digests in seen.items() if len(set(digests)) > 1] == []
    return sum(len(digests) > 1 for digests in seen.values())


def kill_and_see_it_back(run: Run, world: int, tmp_path: Path) -> None:
    """Kill worker 1 in the middle of its rounds, see it in them again, and end the run."""
    run.await_event(1, "log", count=5)
    os.kill(run.pid(1), signal.SIGKILL)
    run.await_event(1, "entered")
    count = len(run.events(1, "log"))
    run.await_event(1, "log", count=count + 20)
    assert assert_same(run, world) > 20  # before the end: who is the last there counts its rounds alone
    (tmp_path / "stop").touch()
    assert run.wait() == 0, run.output


def test_with_m_of_p_the_slow_and_the_restarted_take_the_state_of_the_others(start: Any, tmp_path: Path):
    """Worker 2 is passed over again and again; worker 1 comes back in the middle of that."""
    run = start(TRAIN, "-n", "3", "--restarts", "1", args=("MSync(2, check_every=7)", "0.1"))
    run.await_event(2, "passed over", count=3)
    kill_and_see_it_back(run, 3, tmp_path)
    assert len(run.events(2, "entered")) >= 3  # with the others' state, not with the center's


def test_newcomers_are_admitted_where_values_travel_in_half_precision(start: Any, tmp_path: Path):
    run = start(TRAIN, "-n", "2", "--restarts", "1", "--wire", "bfloat16", args=("BSP(check_every=7)", "0"))
    kill_and_see_it_back(run, 2, tmp_path)


# Worker 0 has fewer batches in each epoch, and waits for the others at its end; so they go on without it.
UNEVEN = """
    import zlib
    import torch
    from torch import nn
    import maniple

    torch.set_num_threads(1)
    worker = maniple.join()

    def digest(model):
        return zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))

    def train(name, rule, *, kind=None, wire=None):
        torch.manual_seed(worker.rank)
        norms = [nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8)] if kind == "norm" else []
        model = nn.Sequential(nn.Linear(4, 8), *norms, nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        replica = worker.share(model, optimizer, rule=rule, wire=wire)
        rounds = 0
        for epoch in range(3):
            for batch in range(4 if worker.rank == 0 else 12):
                optimizer.zero_grad()
                model(torch.randn(6, 4)).square().mean().backward()
                optimizer.step()
                if replica.rounds > rounds:  # with values, only then all have the same
                    rounds = replica.rounds
                    worker.log(lesson=name, rounds=rounds, digest=digest(model))
            total = worker.all_reduce(float(batch + 1), op="sum")
            assert total == 4 + 12 * (worker.world - 1), total

    train("norm", maniple.BSP(norm="synchronised"), kind="norm")
    train("half", maniple.BSP(check_every=3), wire="bfloat16")
    train("both", maniple.BSP(norm="synchronised"), kind="norm", wire="bfloat16")
    train("moments", maniple.LocalSGD(2, momentum="average", check_every=2))
    train("int4", maniple.BSP(check_every=3), wire="int4")
    train("topk", maniple.LocalSGD(2, check_every=2), wire="topk")
"""


@pytest.mark.usefixtures("without_numba")
def test_workers_passed_over_between_epochs_come_back_inside_of_every_kind_of_call(run: Any):
    pytest.importorskip("torch")
    done = run(UNEVEN, "-n", "2")
    assert done.description["exit_code"] == 0, done.output + done.log(0) + done.log(1)
    # At the end of two epochs of each lesson. On a busy machine worker 0 may come back so late that worker 1 already
    # waits for it at the end of the epoch: then worker 0 makes its rounds alone, and worker 1 is passed over.
    assert sum(len(done.events(rank, "passed over")) for rank in range(2)) >= 8
    assert assert_same(done, 2, ("lesson", "rounds")) >= 12
