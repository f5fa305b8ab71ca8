"""Gradients that go out during the backward pass: the same training as without, over torch.distributed."""

import textwrap
from typing import Any

import numpy as np
import pytest

from .conftest import BARE, MANIPLE, Run

pytest.importorskip("torch")
pytestmark = [pytest.mark.process, pytest.mark.usefixtures("without_numba")]

# Each lesson is trained with and without overlap, on parts of the same batches. The middle layer fills more than one
# bucket by itself, so the gradients go out in several.
LESSONS = """
    import contextlib, sys
    import numpy as np
    import torch
    from torch import nn
    import maniple

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)                         # rounding hides no mistake
    worker = maniple.join()
    data = torch.Generator().manual_seed(5)
    X, Y = torch.randn(4, 12, 6, generator=data), torch.randint(0, 3, (4, 12), generator=data)
    mine = [slice(0, 4), slice(4, 12)][worker.rank]                # uneven: worker 1 counts twice as much
    found = {}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.spare, self.some = nn.Linear(6, 370), nn.Linear(370, 370), nn.Linear(370, 370)
            self.norm, self.middle, self.last = nn.BatchNorm1d(370), nn.Linear(370, 370), nn.Linear(370, 3)
            self.narrow = nn.Parameter(torch.zeros(3, dtype=torch.float32))

        def forward(self, x, spare):
            x = torch.tanh(self.first(x))
            if spare and worker.rank == 0:
                x = x + self.some(x)                               # used by worker 0 alone; `spare` by nobody
            return self.last(torch.tanh(self.middle(self.norm(x)))) + self.narrow.double()

    def train(name, *, spare=False, wire=None, norm="averaged", way="plain", op="mean"):
        for overlap in (False, True):
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
            rule = maniple.BSP(op=op, overlap=overlap, norm=norm, check_every=2)
            replica = worker.share(model, optimizer, rule=rule, wire=wire)
            for x, y in zip(X, Y):
                x, y = x[mine], y[mine]
                replica.samples = len(y)
                optimizer.zero_grad(set_to_none=way != "kept")
                for i in range(2):
                    half = slice(i, None, 2)
                    is_quiet = way == "all quiet" or way == "accumulated" and i == 0 or way == "quiet last" and i == 1
                    with replica.no_sync() if is_quiet else contextlib.nullcontext():
                        loss = nn.functional.cross_entropy(model(x[half], spare), y[half])
                        (loss / 2).backward()
                if way == "clipped":
                    replica.reduce()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
            for n, value in model.state_dict().items():
                found[f"{name}/{overlap}/{n}"] = value.detach().numpy()
            found[f"rounds {name}/{overlap}/"] = np.array([replica.rounds])

    train("twice")
    train("kept", way="kept")
    train("accumulated", way="accumulated")
    train("all quiet", way="all quiet")
    train("quiet last", way="quiet last")
    train("spare", spare=True)
    train("clipped", way="clipped")
    train("half", wire="bfloat16")
    train("int8", wire="int8")
    train("topk", wire="topk")
    train("norm", norm="synchronised", spare=True)
    train("sum", way="accumulated", op="sum")
    for overlap in (False, True):                                  # a second pass would count the first one's sum again
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = worker.share(model, optimizer, rule=maniple.BSP(op="sum", overlap=overlap))
        for number in range(2):                                    # the first step is left out, as GradScaler does
            optimizer.zero_grad()
            model(X[0], False).sum().backward()
            replica.reduce()
            replica.reduce()                                       # sums nothing twice
            first = model.last.bias.grad[0].item()
            found[f"first {overlap} {number}/"] = np.array([first])
        try:
            model(X[0], False).sum().backward()
            replica.reduce()
        except maniple.errors.InvalidArgument as error:
            found[f"refused {overlap}"] = np.array(str(error))
        optimizer.zero_grad()
    np.savez(f"{sys.argv[1]}-{worker.rank}.npz", **found)
"""
SAME = ["twice", "kept", "accumulated", "all quiet", "quiet last", "spare", "clipped", "norm", "sum"]


@pytest.fixture(scope="module")
def lessons(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    """What each worker ended with."""
    folder = tmp_path_factory.mktemp("overlap")
    (folder / "script.py").write_text(textwrap.dedent(LESSONS))
    command = [str(MANIPLE), "run", "--name", "run", "-n", "2", "--collectives", "torch", "script.py", "out"]
    run = Run(folder, "run", command, BARE)
    assert run.wait() == 0, run.output
    return [dict(np.load(folder / f"out-{rank}.npz")) for rank in range(2)]


def of(found: dict[str, np.ndarray], lesson: str) -> np.ndarray:
    return np.concatenate([v.ravel() for name, v in found.items() if name.startswith(f"{lesson}/")])


@pytest.mark.parametrize("lesson", SAME)
def test_overlap_trains_as_without(lessons: Any, lesson: str):
    for found in lessons:
        with_, without = of(found, f"{lesson}/True"), of(found, f"{lesson}/False")
        np.testing.assert_allclose(with_, without, rtol=0, atol=1e-6)


@pytest.mark.parametrize("lesson", [*SAME, "half", "int8", "topk"])
def test_replicas_are_the_same_to_the_bit(lessons: Any, lesson: str):
    assert of(lessons[0], f"{lesson}/True").tobytes() == of(lessons[1], f"{lesson}/True").tobytes()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sum_is_not_summed_again(lessons: Any, overlap: bool):
    for found in lessons:
        for number in range(2):
            assert of(found, f"first {overlap} {number}").tolist() == [24]  # 2 workers with 12 samples
        assert "summed over 2 workers" in str(found[f"refused {overlap}"])


@pytest.mark.parametrize("lesson", ["half", "int8"])
def test_less_precision_is_near_full_precision(lessons: Any, lesson: str):
    np.testing.assert_allclose(of(lessons[0], f"{lesson}/True"), of(lessons[0], "twice/True"), rtol=0.1, atol=0.02)


def test_passes_in_no_sync_make_no_rounds(lessons: Any):
    rounds = {lesson: int(of(lessons[0], f"rounds {lesson}/True")[0]) for lesson in SAME}
    assert rounds["accumulated"] == rounds["all quiet"] == 4
    assert rounds["twice"] == rounds["quiet last"] == 8  # a pass outside of it is a round


def test_samples_set_too_late_are_refused_and_uneven_ends_are_none_of_its_business(run: Any):
    script = """
        import torch, maniple
        worker = maniple.join()
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = worker.share(model, optimizer, rule=maniple.BSP(overlap=True))
        for step in range(5 - 3 * worker.rank):
            model(torch.ones(3, 2)).sum().backward()
            if step == 1:
                replica.samples = 3
                try:
                    optimizer.step()
                except maniple.ManipleError as error:
                    print(error)
                replica.samples = None
            optimizer.step()
        print("rounds", replica.rounds)
    """
    done = run(script, "-n", "2", "--collectives", "torch")
    assert done.description["exit_code"] == 0, done.output
    for rank, rounds in enumerate((5, 2)):
        assert "weight 3, but the gradients went out with 1" in done.log(rank)
        assert f"rounds {rounds}" in done.log(rank)


def test_a_worker_that_dies_in_a_pass_is_named_within_the_deadline(run: Any):
    script = """
        import os, torch, maniple
        worker = maniple.join()
        model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 600))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = worker.share(model, optimizer)
        for step in range(5):
            y = model(torch.ones(1, 600))
            if worker.rank == 1 and step == 3:
                model[0].weight.register_hook(lambda _: os._exit(7))   # the first bucket is on its way
            y.sum().backward()
            optimizer.step()
    """
    done = run(
        script, "-n", "2", "--collectives", "torch", "--rule", "bsp:overlap=true", "--collectives-deadline", "60"
    )
    assert done.description["exit_code"] != 0
    assert "worker 1 has been lost" in done.log(0)
