"""A run that was killed or interrupted is resumed where it was: samples, epochs, optimizer, and what is said of it."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.process.conftest import MANIPLE, Run
from tests.waiting import await_, is_gone

# Each worker notes epoch and number of each sample that it trains on, and each epoch that it has ended.
TRAINING = """
    import os, sys, time
    import numpy as np
    import maniple

    count, batch, epochs, pause_s = 1200, 10, 3, float(sys.argv[1])
    worker = maniple.join()
    params = {"w": np.zeros(4)}
    replica = worker.share(params)
    sampler = worker.sampler(count)
    seen = open(f"seen-{worker.rank}", "ab", buffering=0)
    print("hello of process", os.getpid(), flush=True)
    for epoch in worker.epochs(epochs):
        for indices in sampler.batches(batch):
            gradients = {"w": np.ones(4)}
            # Before the round: once it is made, the others go on, though this worker is killed in the next line.
            seen.write(np.stack([np.full(len(indices), epoch), indices], 1).astype("int64").tobytes())
            replica.reduce(gradients)
            params["w"] -= gradients["w"]
            replica.samples = batch
            replica.step()  # may be the last, if the worker is told to end
            in_first_life = epoch == 1 and not os.path.exists("resumed")
            time.sleep(20 * pause_s if in_first_life else pause_s)  # so slow that its end comes in this epoch
        worker.log(finished=epoch)
"""


def again(first: Run, *words: str) -> Run:
    """`maniple run --resume RUN`, to its end."""
    run = Run(
        first.folder.parents[1], first.folder.name, [str(MANIPLE), "run", "--resume", str(first.folder), *words], {}
    )
    run.wait()
    return run


def seen(folder: Path) -> np.ndarray:
    """How often each sample was trained on in each epoch."""
    rows = np.concatenate([np.fromfile(path, "int64").reshape(-1, 2) for path in folder.glob("seen-*")])
    return np.stack([np.bincount(rows[rows[:, 0] == epoch, 1], minlength=1200) for epoch in range(3)])


def finished(run: Run, rank: int) -> list[int]:
    return [row["finished"] for row in run.events(rank, "log")]


@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_a_synchronous_script_continues_in_the_middle_of_its_epoch(start, tmp_path, without_numba, how):
    first = start(TRAINING, "-n", "2", "--rule", "bsp", args=("0.01",))
    await_(lambda: any(row["step"] > 70 for row in first.events(0, "keep")))  # the second epoch has begun at step 60
    if how == "killed":
        first.kill()
        await_(lambda: all(is_gone(first.pid(rank)) for rank in range(2)))
    else:
        first.signal(signal.SIGINT)
        assert first.wait() == 130
    before = seen(tmp_path)
    assert (before[0] == 1).all() and 0 < before[1].sum() < 1200, "it was in its second epoch"
    (tmp_path / "resumed").touch()
    second = again(first)
    assert second.process.returncode == 0, second.output
    counts = seen(tmp_path)
    assert counts.min() >= 1, f"{(counts == 0).sum()} samples were left out"
    assert (counts[0] == 1).all() and (counts[2] == 1).all(), "what was finished is not trained on again"
    assert re.search(r"it continues from step \d+ of worker \d, epoch 1, sample \d+", second.output), second.output
    if how == "killed":
        assert "nothing was lost" not in second.output, "steps are repeated"
        assert re.search(r"about \d+ steps that were made after it are repeated|a few steps may be", second.output)
    else:  # the last worker to leave may have made a step alone
        assert (counts - 1).sum() <= 100, "nothing else is repeated"
    for rank in range(2):
        assert finished(second, rank) == [0, 1, 2], "the script's own work after an epoch is not repeated"
    assert second.output.count("hello of process") == 2, "what the first life had printed is not shown again"


def test_finished_epochs_of_a_loop_over_range_are_empty_and_it_is_said_why(start, without_numba):
    first = start(
        TRAINING.replace("worker.epochs(epochs)", "range(epochs)"), "-n", "1", "--rule", "bsp", args=("0.001",)
    )
    assert first.wait() == 0, first.output
    second = again(first, "script0.py", "0.001")
    assert second.process.returncode == 0, second.output
    assert finished(second, 0) == [0, 1, 2, 0, 1, 2]
    assert seen(first.folder.parents[1]).max() == 1
    assert (
        second.output.count("epochs 0 to 2 are over, so these passes are empty. Write `for epoch in worker.epochs(n)")
        == 1
    )


ADAM = """
    import os, signal, sys, time
    import torch
    import maniple

    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=float(sys.argv[1]))
    worker = maniple.join()
    replica = worker.share(model, optimizer)
    sampler = worker.sampler(100_000)
    known = optimizer.state.get(model.weight, {"step": 0.0, "exp_avg_sq": model.weight.detach() * 0})
    worker.log(begins=float(known["step"]), moment=float(known["exp_avg_sq"].sum()), lr=optimizer.param_groups[0]["lr"])
    for epoch in worker.epochs(1):
        for step, indices in enumerate(sampler.batches(10), 1):
            optimizer.zero_grad()
            model(torch.ones(10, 4)).square().mean().backward()
            optimizer.step()
            known = optimizer.state[model.weight]
            worker.log(made=float(known["step"]), moment=float(known["exp_avg_sq"].sum()))
            time.sleep(0.005)
            if worker.rank == 0 and step == 150:
                if len(sys.argv) > 2:
                    sys.exit(0)
                while len(os.listdir(f"{os.environ['MANIPLE_RUN']}/optimizer")) < 1:  # of a snapshot
                    time.sleep(0.01)
                os.kill(os.getppid(), signal.SIGKILL if "TEST_KILLS" in os.environ else signal.SIGINT)
        break
"""


@pytest.mark.parametrize("how", ["interrupted", "killed"])
def test_adam_continues_with_its_moments(start, without_numba, how):
    pytest.importorskip("torch")
    env = {"TEST_KILLS": "1"} if how == "killed" else {}
    first = start(ADAM, "-n", "2", "--rule", "bsp", "--snapshot-every", "0.3", args=("0.01",), env=env)
    first.wait()
    assert first.process.returncode == (-signal.SIGKILL if how == "killed" else 130), first.output
    await_(lambda: all(is_gone(first.pid(rank)) for rank in range(2)))
    rows = [row for rank in range(2) for row in first.events(rank, "log")]
    moments = {row["made"]: row["moment"] for row in rows if "made" in row}
    second = again(first, "-n", "2", "script0.py", "0.02", "ends")
    assert second.process.returncode == 0, second.output
    for rank in range(2):
        begin = [row for row in second.events(rank, "log") if "begins" in row][-1]
        # Who is told to end makes its step, and leaves before it can tell of it.
        last = max(moments) + (how == "interrupted")
        assert 0 < begin["begins"] <= last, "it does not start with empty state"
        assert begin["moment"] == moments.get(begin["begins"], begin["moment"]), "but with the moments of that step"
        assert begin["lr"] == 0.02, "the rate is that of the script"
        if how == "interrupted":
            assert begin["begins"] >= max(moments), "and all of it was saved when it ended"
    assert re.search(r"worker 0: continues with the optimizer state of worker \d after step \d+", second.output)
    assert not list((first.folder / "optimizer").glob(".*"))
