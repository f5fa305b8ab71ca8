"""A torch script under `maniple run`: the loop stays as it was, and so do its results where the algebra says so."""

import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from tests.waiting import PATIENCE_S

pytest.importorskip("torch")

# Once for each rule: a model and its training from the same beginning.
TRAINING = """
    import hashlib, torch, maniple
    from torch import nn

    worker = maniple.join()
    for name, rule in RULES.items():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(20, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = torch.utils.data.TensorDataset(torch.randn(400, 20), torch.randint(0, 3, (400,)))
        replica = worker.share(model, optimizer, rule=rule, pace=maniple.Every(2))
        torch.manual_seed(2)
        for epoch in range(3):
            sampler = worker.sampler(data)
            for x, y in torch.utils.data.DataLoader(data, batch_size=40, sampler=sampler, num_workers=LOADERS):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                worker.log(loss=loss)
        values = torch.cat([p.detach().flatten() for p in model.state_dict().values()]).double()
        print("RESULT", name, hashlib.sha256(values.numpy().tobytes()).hexdigest(), values.abs().sum().item())
"""


def script(rules: str, loaders: int = 0) -> str:
    return TRAINING.replace("RULES", rules).replace("LOADERS", str(loaders))


def results(text: str) -> dict[str, list[str]]:
    """Of each rule the digest of what was learned, and the sum of its magnitudes."""
    lines = [line.split() for line in text.splitlines() if line.startswith("RESULT")]
    return {name: rest for _, name, *rest in lines}


def test_one_worker_trains_as_without_a_launcher(run, tmp_path):
    """Bit for bit if its replica is never moved, to rounding under Downpour."""
    text = script("{'still': maniple.EASGD(0.0), 'downpour': maniple.Downpour()}")
    one_thread = {"OMP_NUM_THREADS": "1"}  # for both: sums of several threads have another order
    done = run(text, "-n", "1", env=one_thread)
    assert done.process.returncode == 0, done.output
    path = tmp_path / "alone.py"
    path.write_text(textwrap.dedent(text))
    by_itself = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ | one_thread
    )
    assert by_itself.returncode == 0, by_itself.stderr
    launched, alone = results(done.log(0)), results(by_itself.stdout)
    assert launched["still"][0] == alone["still"][0]
    assert float(launched["downpour"][1]) == pytest.approx(float(alone["downpour"][1]), rel=1e-5)


def test_two_workers_with_data_loader_processes_share_one_model(run):
    done = run(script("{'easgd': maniple.EASGD()}", loaders=1), "-n", "2")
    assert done.process.returncode == 0, done.output
    center = done.center
    assert set(center) == {
        "0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "3.weight", "3.bias",
    }  # fmt: skip
    assert all(np.isfinite(value).all() for value in center.values())
    # 400 samples, 3 times, by whoever comes first
    assert sum(done.events(rank, "progress")[-1]["samples"] for rank in (0, 1)) == 1200
    for rank in (0, 1):
        steps = done.events(rank, "progress")[-1]["step"]
        # an exchange every 2 steps and one for the last step
        assert len(done.events(rank, "exchange")) == -(-steps // 2)
        losses = [row["loss"] for row in done.events(rank, "log")]
        assert len(losses) == steps
        assert all(isinstance(loss, float) for loss in losses)


# Worker 0 trains the module as it is, worker 1 compiled; both with a data set that is slow.
SLEEPING = """
    import time, torch, maniple
    from torch import nn

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 480

        def __getitem__(self, i):
            time.sleep(0.005)
            return torch.full((4,), float(i)), i % 2

    worker = maniple.join()
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    worker.share(model, optimizer)
    call = torch.compile(model, fullgraph=True, backend="eager") if worker.rank else model
    data = Slow()
    for x, y in torch.utils.data.DataLoader(data, batch_size=12, sampler=worker.sampler(data, static=True)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(call(x), y).backward()
        optimizer.step()
"""


def test_time_in_a_data_loader_is_data_and_where_it_is_not_seen_that_is_said(run):
    done = run(SLEEPING, "-n", "2")
    assert done.process.returncode == 0, done.output
    plain, compiled = (done.events(rank, "progress")[-1] for rank in (0, 1))
    assert 0.5 * 19 * 0.06 < plain["data"] < plain["elapsed"], "19 batches were loaded after a step"
    assert plain["measures_data"]
    assert not compiled.get("measures_data") and compiled["data"] == 0


def test_a_worker_needs_at_most_twice_the_model_more_than_the_plain_script(run, tmp_path):
    """Peak resident memory, the mapped center included, with training, exchanges and a look at the center."""
    text = """
        import json, resource, torch, maniple
        size = 50_000_000  # 200 MB
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(size // 4)) for _ in range(4)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = maniple.join()
        replica = worker.share(model, optimizer, rule=maniple.EASGD(), pace=maniple.Every(2))
        for _ in range(6):
            for p in model: p.grad = torch.ones_like(p)
            optimizer.step()
        LOOK
        print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
    """
    path = tmp_path / "plain.py"
    path.write_text(textwrap.dedent(text).replace("LOOK", ""))
    plain = json.loads(
        subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=PATIENCE_S).stdout
    )
    shared = run(text.replace("LOOK", "with replica.center(): pass"), "-n", "1")
    assert shared.process.returncode == 0, shared.output
    more = json.loads(shared.log(0).splitlines()[-1]) - plain
    assert more <= 2 * 200e6, f"{more / 1e6:.0f} MB more for a model of 200 MB"
