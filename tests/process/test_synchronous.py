"""Synchronous rules where training is interrupted: steps skipped, workers late, lost and new."""

import itertools
import json
import os
import signal
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.waiting import PATIENCE_S, await_, is_gone

from .conftest import BARE, MANIPLE, Run

pytestmark = pytest.mark.usefixtures("without_numba")

# Several models in one run, each shared with a rule of its own.
LESSONS = """
    import sys, time
    from pathlib import Path
    import numpy as np
    import torch
    from torch import nn
    import maniple

    torch.set_num_threads(1)
    worker = maniple.join()
    data = torch.Generator().manual_seed(5)
    X, Y = torch.randn(8, 24, 6, generator=data), torch.randn(8, 24, 3, generator=data)
    X[:, 12:] += 1  # each worker's half is of its own kind
    mine = slice(12 * worker.rank, 12 * worker.rank + 12)
    found = {}

    def build(norm=False):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), *[nn.BatchNorm1d(8)] * norm, nn.Tanh(), nn.Linear(8, 3))

    def optimizer_of(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def keep(name, model):
        found.update({f"{name}/{n}": v.numpy().copy() for n, v in model.state_dict().items() if v.is_floating_point()})

    def share(model, rule, pace=None):
        optimizer = optimizer_of(model)
        return optimizer, worker.share(model, optimizer, rule=rule, pace=pace)

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()

    # The means of 7 steps, every 3: the last one of a single step.
    for name, rule in (("local", maniple.LocalSGD(3)), ("downpour", maniple.Downpour(sync=True))):
        model = build()
        optimizer, replica = share(model, rule, maniple.Every(3))
        for x, y in zip(X[:7], Y):
            step(model, optimizer, x[mine], y[mine])
        keep(name, model)
        worker.barrier()  # worker 0 has brought the center up to date
        if name == "downpour":
            with replica.center():
                keep("downpour center", model)

    # Batch-norm statistics of each worker's own.
    model = build(norm=True)
    optimizer, replica = share(model, maniple.LocalSGD(2, norm="local"))
    for x, y in zip(X, Y):
        step(model, optimizer, x[mine], y[mine])
    keep("own norm", model)

    # As GradScaler does, steps 2, 3 and 6 are left out, where the mean of the gradients is not finite.
    def skipping(name, model, optimizer, replica, x, y, to_none):
        for i in range(len(X)):
            is_bad = i in (2, 3, 6)
            optimizer.zero_grad(set_to_none=to_none)
            loss = (model(x[i]) - y[i]).square().mean()
            (loss * float("inf") if is_bad and worker.rank else loss).backward()
            if replica is not None and (is_bad or not to_none):
                replica.reduce()
            if not (is_bad if replica is None else any(not p.grad.isfinite().all() for p in model.parameters())):
                optimizer.step()
        keep(name, model)

    for to_none in (True, False):
        model = build()
        optimizer, replica = share(model, maniple.BSP(check_every=2))
        skipping(f"skipped {to_none}", model, optimizer, replica, X[:, mine], Y[:, mine], to_none)
    model = build()
    skipping("alone", model, optimizer_of(model), None, X, Y, True)

    # Buffers that a module changes in place or replaces, one that it never changes, and one that has no mean.
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("total", torch.zeros(6))
            self.register_buffer("newest", torch.zeros(6))
            self.register_buffer("constant", torch.full((6,), 0.1))

        def forward(self, x):
            self.total.data.add_(x.mean(0))
            self.newest = x.mean(0)
            return self.layer(x)

    torch.manual_seed(0)
    model = Counting()
    optimizer, replica = share(model, maniple.BSP(check_every=1))
    for x, y in zip(X, Y):
        step(model, optimizer, x[mine], y[mine])
    keep("buffers", model)

    class Masked(Counting):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))

    for rule in (maniple.BSP(), maniple.EASGD()):
        torch.manual_seed(0)
        model = Masked()
        optimizer, replica = share(model, rule)
        step(model, optimizer, X[0, mine], Y[0, mine])
        keep(f"masked {type(rule).__name__}", model)

    # A backward pass after reduce(), and an optimizer that was not given to share() and makes its step first.
    model = build()
    optimizer, replica = share(model, maniple.BSP(check_every=1))
    for x, y in zip(X, Y):
        optimizer.zero_grad()
        for part in (slice(0, 6), slice(6, 12)):
            ((model(x[mine][part]) - y[mine][part]).square().mean() / 2).backward()
            if part.start == 0:
                replica.reduce()
        optimizer.step()
    keep("passes", model)
    model = build()
    first, second = optimizer_of(model[0]), optimizer_of(model[2])
    worker.share(model, second, rule=maniple.BSP(check_every=1))
    for x, y in zip(X, Y):
        model.zero_grad()
        (model(x[mine]) - y[mine]).square().mean().backward()
        first.step()
        second.step()
    keep("optimizers", model)
    model = build()
    optimizer = optimizer_of(model)
    for x, y in zip(X, Y):
        step(model, optimizer, x, y)
    keep("all alone", model)

    # Each worker has gradients for another layer of the same shape.
    torch.manual_seed(0)
    layers = [nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)]) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [optimizer_of(one) for one in layers]
    worker.share(layers[0], optimizers[0], rule=maniple.LocalSGD(2, momentum="average"))
    for x, y in zip(X[:2], Y):  # the second ones train alone, until the mean
        for one, other in zip(layers, optimizers):
            step(one[worker.rank], other, x[mine], y[mine])
    own, expected = (other.state[one[worker.rank].weight]["momentum_buffer"] for one, other in zip(layers, optimizers))
    found["moments"], found["expected moments"] = own.numpy(), expected.numpy()
    assert layers[0][1 - worker.rank].weight not in optimizers[0].state

    # torch's own GradScaler: infinity at one worker is a step that all leave out.
    model = build()
    optimizer, replica = share(model, maniple.BSP(check_every=1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i, (x, y) in enumerate(zip(X, Y)):
        optimizer.zero_grad()
        loss = (model(x[mine]) - y[mine]).square().mean()
        scaler.scale(loss * float("inf") if worker.rank and i in (2, 3, 6) else loss).backward()
        replica.reduce()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    keep("scaler", model)
    found["scale"] = np.array(scaler.get_scale())

    # Without it, a step is not made with such gradients.
    model = build()
    optimizer, replica = share(model, maniple.BSP())
    before = {n: v.clone() for n, v in model.state_dict().items()}
    for is_early in (False, True):
        optimizer.zero_grad()
        (model(X[0, mine]).sum() * (float("nan") if worker.rank else 1)).backward()
        try:
            if is_early:
                replica.reduce()
            optimizer.step()
        except maniple.errors.Diverged as error:
            found[f"diverged {is_early}"] = np.array(str(error))
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    optimizer.zero_grad()

    # Worker 1 is passed over while it waits for the other, and comes back when that one waits for it. So it goes on
    # alone, and worker 0 is passed over: that one comes back while worker 1 trains.
    model = build()
    optimizer, replica = share(model, maniple.LocalSGD(1, momentum="average", check_every=1))
    ahead, back = Path("ahead"), Path("back")
    for epoch in range(3):
        while worker.rank and epoch == 1 and not ahead.exists():
            time.sleep(0.01)
        for i in range(3 if worker.rank or epoch == 2 else 6):
            step(model, optimizer, X[i, mine], Y[i, mine])
            if epoch == 2 and worker.rank == 0:
                back.touch()
        while epoch == 2 and not back.exists():
            step(model, optimizer, X[0, mine], Y[0, mine])
        if epoch == 1:
            ahead.touch()
        worker.barrier()
    found["rounds"] = np.array(replica.rounds)
    np.savez(f"{sys.argv[1]}-{worker.rank}.npz", **found)
"""


@pytest.fixture(scope="module")
def lessons(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[dict[str, np.ndarray]]]:
    """The run, and what each of its two workers ended with."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("lessons")
    (folder / "script.py").write_text(textwrap.dedent(LESSONS))
    run = Run(folder, "run", [str(MANIPLE), "run", "--name", "run", "-n", "2", "script.py", "out"], BARE)
    assert run.wait() == 0, run.output
    return run, [dict(np.load(folder / f"out-{rank}.npz")) for rank in range(2)]


def of(found: dict[str, np.ndarray], lesson: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(f"{lesson}/"): value for name, value in found.items() if name.startswith(f"{lesson}/")}


def center(run: Run, number: int) -> dict[str, np.ndarray]:
    return load_file(run.folder / "center" / f"center-{number}.safetensors")


def test_center_after_the_run_is_the_last_mean(lessons: Any):
    run, (first, second) = lessons
    for name, value in of(first, "local").items():
        other = second[f"local/{name}"]
        assert not np.array_equal(value, other)  # one step after the last mean but one
        np.testing.assert_allclose(center(run, 0)[name], (value + other) / 2, rtol=1e-5, atol=1e-7)
    for name, value in of(first, "downpour").items():
        before = first[f"downpour center/{name}"]
        assert np.array_equal(before, second[f"downpour center/{name}"])
        changes = (value - before) + (second[f"downpour/{name}"] - before)
        np.testing.assert_allclose(center(run, 1)[name], before + changes, rtol=1e-5, atol=1e-6)


def test_local_statistics_stay_each_workers_own(lessons: Any):
    run, found = lessons
    first, second = (of(one, "own norm") for one in found)
    shown = center(run, 2)  # has those of one worker, not of the beginning
    for name, value in first.items():
        is_own = "running" in name
        assert np.array_equal(value, second[name]) != is_own, name
        assert any(np.array_equal(shown[name], one[name]) for one in (first, second)), name


@pytest.mark.parametrize("to_none", [True, False])
def test_skipped_steps_leave_the_others_as_they_would_be(lessons: Any, to_none: bool):
    _, (first, second) = lessons
    for name, value in of(first, "alone").items():
        assert first[f"skipped {to_none}/{name}"].tobytes() == second[f"skipped {to_none}/{name}"].tobytes()
        np.testing.assert_allclose(first[f"skipped {to_none}/{name}"], value, rtol=2e-5, atol=2e-6)


def test_buffers_are_averaged_whatever_their_name_and_also_if_the_module_replaces_them(lessons: Any):
    _, (first, second) = lessons
    for name in ("total", "newest"):
        assert first[f"buffers/{name}"].any()
        assert first[f"buffers/{name}"].tobytes() == second[f"buffers/{name}"].tobytes()
    assert (first["buffers/constant"] == np.float32(0.1)).all()


def test_buffers_that_are_not_finite_stay_local_and_are_named(lessons: Any):
    run, found = lessons
    for one in found:
        for rule in ("BSP", "EASGD"):
            assert np.isneginf(one[f"masked {rule}/mask"][0, 1:]).all()
    for rank in range(2):
        assert [row["names"] for row in run.events(rank, "local buffers")] == [["mask"]] * 2
        assert "buffers that are not finite are not shared: 'mask'" in run.log(rank)


@pytest.mark.parametrize("lesson", ["passes", "optimizers"])
def test_gradients_that_were_not_averaged_yet_are_so_before_any_step(lessons: Any, lesson: str):
    _, (first, second) = lessons
    for name, value in of(first, "all alone").items():
        assert first[f"{lesson}/{name}"].tobytes() == second[f"{lesson}/{name}"].tobytes()
        np.testing.assert_allclose(first[f"{lesson}/{name}"], value, rtol=2e-5, atol=2e-6)


def test_moments_are_averaged_with_those_of_the_same_parameter_only(lessons: Any):
    for one in lessons[1]:
        np.testing.assert_array_equal(one["moments"], one["expected moments"])


def test_grad_scaler_finds_the_same_infinity_in_all_workers(lessons: Any):
    _, (first, second) = lessons
    assert first["scale"] == second["scale"] == 1024 / 8
    for name, value in of(first, "alone").items():
        assert first[f"scaler/{name}"].tobytes() == second[f"scaler/{name}"].tobytes()
        np.testing.assert_allclose(first[f"scaler/{name}"], value, rtol=2e-5, atol=2e-6)


def test_step_with_gradients_that_are_not_finite_is_not_made(lessons: Any):
    for one in lessons[1]:
        for is_early in (False, True):
            assert "the gradient of '0.weight' of worker 1 holds NaN" in str(one[f"diverged {is_early}"])


def test_worker_that_was_passed_over_does_again_what_comes_before_a_round(lessons: Any):
    """Its digests and the mean of the moments: else its round would meet these of the others."""
    run, (first, second) = lessons
    for rank in range(2):
        assert run.events(rank, "passed over") and run.events(rank, "entered")
    assert min(first["rounds"], second["rounds"]) > 6 + 6 + 3  # none were lost


def test_worker_that_comes_late_again_and_again_is_no_desynced_one(run: Any):
    script = """
        import time
        from pathlib import Path
        import numpy as np, maniple
        worker = maniple.join()
        w = {"w": np.ones(100, np.float32)}
        replica = worker.share(w, rule=maniple.MSync(1, check_every=2))
        late, before = 0, 0
        while late < 12 and not Path("enough").exists():
            gradient = {"w": np.full(100, 0.001 * (worker.rank + 1), np.float32)}
            replica.reduce(gradient)
            w["w"] -= gradient["w"]
            replica.step()
            late += worker.rank and replica.rounds > before + 1
            before = replica.rounds
            time.sleep(0.03 if worker.rank else 0.002)
        Path("enough").touch()
    """
    done = run(script, "-n", "2")
    assert done.description["exit_code"] == 0, done.output
    assert len(done.events(1, "passed over")) >= 12


TWO = """
    import time
    import numpy as np, maniple
    worker = maniple.join()
    models = [{"w": np.ones(10, np.float32)} for _ in range(2)]
    replicas = [worker.share(model, rule=maniple.BSP()) for model in models]
    while True:
        for model, replica in zip(models, replicas):
            gradient = {"w": np.full(10, 0.001, np.float32)}
            replica.reduce(gradient)
            model["w"] -= gradient["w"]
            replica.step()
        worker.log(rounds=replicas[1].rounds)
        time.sleep(0.01)
"""


def test_worker_with_two_synchronous_models_cannot_rejoin(start: Any):
    going = start(TWO, "-n", "3", "--restarts", "1")
    going.await_event(2, "log", count=3)
    os.kill(going.pid(1), signal.SIGKILL)
    failed = going.await_event(1, "failed")[-1]
    assert failed["exit_code"] == 2
    assert "worker 1 was started again" in failed["error"] and "--resume" in failed["error"]
    assert going.wait() == 2
    assert "a run that shares 2 models synchronously cannot take workers back" in going.log(1)


TRAIN = """
    import sys, time
    from pathlib import Path
    import numpy as np, maniple
    worker = maniple.join()
    w = {"w": np.zeros(1000, np.float32)}
    replica = worker.share(w, rule=maniple.BSP(check_every=5))
    begin = float(w["w"][0])
    while replica.steps < int(sys.argv[1]) and not Path("stop").exists():
        gradient = {"w": np.full(1000, -1 - worker.rank, np.float32)}
        replica.reduce(gradient)
        w["w"] -= gradient["w"]
        replica.step()
        worker.log(rounds=replica.rounds, first=float(w["w"][0]))
        time.sleep(0.01)
    worker.log(rounds=replica.rounds, begin=begin, last=float(w["w"][0]))
"""


def test_only_workers_that_share_the_memory_join_a_synchronous_run_later(start: Any, tmp_path: Path):
    run = start(TRAIN, "-n", "1", "--listen", "127.0.0.1:0", args=("100000",))
    run.await_event(0, "log")
    host = json.loads((run.folder / "host.json").read_text())
    command = [str(MANIPLE), "join", "--token-file", str(run.folder / "token"), host["address"], "script0.py", "10"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode != 0
    assert "cannot join the collectives" in done.stderr and "Choose a rule of the center" in done.stderr
    (segment,) = Path(os.environ["MANIPLE_SHM"]).glob("maniple-*")
    environment = {"MANIPLE_RANK": "3", "MANIPLE_SEGMENT": str(segment), "MANIPLE_RUN": str(run.folder)}
    environment |= {"MANIPLE_ADDRESS": host["unix"], "MANIPLE_TOKEN_FILE": str(run.folder / "token")}
    python = str(MANIPLE.with_name("python"))
    local = subprocess.run(
        [python, "script0.py", "10"],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert local.returncode == 0, local.stderr
    (tmp_path / "stop").touch()
    assert run.wait() == 0, run.output
    known = {row["rounds"]: row["first"] for row in run.events(0, "log")[:-1]}
    rows = run.events(3, "log")[:-1]
    assert len(rows) == 10 and rows[0]["rounds"] > 1  # it went on where worker 0 was
    for before, after in itertools.pairwise(rows):
        assert after["first"] == before["first"] + 2.5  # the mean of both
        assert after["first"] == known[after["rounds"]]


def test_run_goes_on_together_after_its_launcher_was_killed(start: Any, tmp_path: Path):
    first = start(TRAIN, "-n", "2", args=("100000",))
    first.await_event(0, "log", count=20)
    (segment,) = Path(os.environ["MANIPLE_SHM"]).glob("maniple-*")
    first.kill()
    await_(lambda: all(is_gone(first.pid(rank)) for rank in range(2)))
    left = {path.name for path in segment.glob("collectives-*")}
    assert "collectives-0" in left and any(name.startswith("collectives-0.") for name in left)
    command = [str(MANIPLE), "run", "-n", "2", "--resume", "runs/run0", "script0.py", "10"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    last, other = (first.events(rank, "log")[-1] for rank in range(2))
    assert 0 < last["begin"] == other["begin"] and last["last"] == other["last"] == last["begin"] + 15
    assert last["rounds"] == other["rounds"] == 10  # both from the beginning
    assert not any(first.events(rank, "entered") for rank in range(2))
    assert first.center["w"][0] == last["last"]
