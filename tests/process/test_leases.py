"""Leases with real workers: each sample once per epoch, however fast they are; at least once when some are killed.

Each worker writes down the samples that it has trained on, after the step, pass by pass. A lease that was left
behind may be handed out in a later pass, so samples are counted over all epochs.
"""

import json
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.waiting import PATIENCE_S, await_

from .conftest import MANIPLE

pytestmark = pytest.mark.usefixtures("without_numba")

COMMON = """
    import json, os, sys, time
    from pathlib import Path
    import numpy as np, maniple
    worker = maniple.join()
    settings = json.loads(sys.argv[1])
    name = f"{worker.rank}-{os.getpid()}"
    seen = open(f"seen-{name}", "ab", buffering=0)

    def note(epoch, indices):
        seen.write(np.column_stack([np.full(len(indices), epoch), indices]).astype("int64").tobytes())

    def gate(file):
        Path(f"at-{file}-{name}").touch()
        while not os.path.exists(file) and not worker.is_over:
            time.sleep(0.005)
"""
TRAINING = (
    COMMON
    + """
    params = {"w": np.zeros(10)}
    replica = worker.share(params, rule=maniple.Downpour(), pace=maniple.Every(settings.get("every", 5)))
    sampler = worker.sampler(settings["count"], balance=settings.get("balance", False))
    gate("start")
    passes, steps = [], 0
    epochs = settings.get("epochs", 99) if worker.rank != settings.get("quits") else 1
    while not worker.should_stop and sampler.epoch < epochs:
        if (file := settings.get("gates", {}).get(str(sampler.epoch))):
            gate(file)
        passes.append(0)
        for batch in sampler.batches(settings["batch"]):
            params["w"] += 1
            replica.step()
            note(sampler.epoch - 1, batch)
            passes[-1] += len(batch)
            steps += 1
            if steps == settings.get("pause"):
                gate("go")
            if settings.get("leaves", -1) == worker.rank and passes[-1] >= 3 * settings["batch"]:
                break
            time.sleep(settings["delays"][worker.rank % len(settings["delays"])])
    print("passes", passes, flush=True)
"""
)


class Seen:
    """What the workers in `folder` have written down so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self, pattern: str = "*") -> np.ndarray:
        """Epoch and index of each sample, in the order of training for one worker."""
        found = [np.fromfile(path, "int64").reshape(-1, 2) for path in self.folder.glob(f"seen-{pattern}")]
        return np.concatenate([np.zeros((0, 2), "int64"), *found])

    def samples(self, pattern: str = "*") -> int:
        return sum(path.stat().st_size // 16 for path in self.folder.glob(f"seen-{pattern}"))

    def counts(self, count: int) -> np.ndarray:
        """How often each sample was trained on."""
        return np.bincount(self.rows()[:, 1], minlength=count)

    def await_more(self, samples: int, pattern: str = "*") -> None:
        """Until so many more were trained on."""
        wanted = self.samples(pattern) + samples
        await_(lambda: self.samples(pattern) >= wanted)

    def await_gate(self, file: str, count: int) -> None:
        """Until so many workers stand at a gate."""
        await_(lambda: len(list(self.folder.glob(f"at-{file}-*"))) >= count)

    def open(self, file: str) -> None:
        (self.folder / file).touch()

    def assert_covered(self, count: int, epochs: int, *, again: int) -> None:
        """Each sample in each epoch, and no more than `again` of them more often."""
        counts = self.counts(count)
        assert counts.min() >= epochs, f"{(counts < epochs).sum()} samples were not trained on {epochs} times"
        assert counts.sum() - count * epochs <= again


@pytest.fixture
def seen(tmp_path: Path) -> Seen:
    return Seen(tmp_path)


def script_settings(**values: object) -> str:
    return json.dumps({"delays": [0.001]} | values)


def ended(worker: subprocess.Popen[str]) -> list[int]:
    """The samples of each pass of a worker that has ended well."""
    output = worker.communicate(timeout=PATIENCE_S)[0]
    assert worker.returncode == 0, output
    return eval(output.rpartition("passes ")[2])


def test_each_sample_of_50000_in_5_epochs_though_3_of_8_workers_are_killed_and_2_come_late(serve, seen):
    count, epochs, batch, chunk = 50_000, 5, 50, 390
    dice = random.Random()
    delays = [0.001, 0.001, 0.002, 0.002, 0.003, 0.003, 0.004, 0.004]
    gates = {"2": "go", "4": "last"}
    settings = script_settings(count=count, epochs=epochs, batch=batch, delays=delays, gates=gates, balance=True)
    host = serve()
    workers = [host.join(TRAINING, settings) for _ in range(8)]
    seen.await_gate("start", 8)
    ranks = {int(path.name.split("-")[3]): int(path.name.split("-")[2]) for path in seen.folder.glob("at-start-*")}
    victims = dice.sample(workers, 3)
    seen.open("start")

    def kill(victim: subprocess.Popen[str]) -> None:
        seen.await_more(batch * dice.randrange(2, 30), f"{ranks[victim.pid]}-*")
        victim.kill()

    for victim in victims[:2]:
        kill(victim)
    seen.await_gate("go", 6)
    late = [host.join(TRAINING, settings) for _ in range(2)]
    seen.await_gate("start", 10)
    seen.await_gate("go", 8)
    seen.open("go")
    kill(victims[2])
    seen.open("last")
    for worker in workers:
        if worker not in victims:
            assert len(ended(worker)) == epochs
    late_passes = [ended(worker) for worker in late]
    assert host.end() == 0, host.output
    lost = len(host.events("server", "lost"))
    assert lost >= 3
    # A dead worker has recorded at most the lease it was at, one that was drawn and one that no exchange had settled.
    seen.assert_covered(count, epochs, again=3 * chunk * lost)
    for passes in late_passes:
        assert passes[0] + passes[1] <= 3 * chunk * lost, "the epochs that are over bring only what was left behind"
        assert sum(passes[2:]) > 0
    rows = seen.rows()
    for epoch in range(epochs):
        missing = count - len(np.unique(rows[rows[:, 0] == epoch, 1]))
        assert missing <= 3 * chunk * lost, "and only what was left behind came in a later pass"


def test_each_sample_exactly_once_per_epoch_and_fast_workers_take_more(start, seen):
    count, batch = 12_000, 32
    settings = script_settings(count=count, batch=batch, delays=[0.001, 0.002, 0.004, 0.008], balance=True)
    run = start(TRAINING, "-n", "4", "--max-epochs", "3", args=(settings,))
    seen.await_gate("start", 4)
    seen.open("start")
    assert run.wait() == 0, run.output
    np.testing.assert_array_equal(seen.counts(count), 3)
    rows = seen.rows()
    for epoch in range(3):
        assert (np.bincount(rows[rows[:, 0] == epoch, 1], minlength=count) == 1).all()
    assert seen.samples("0-*") > seen.samples("3-*") > 0


def test_each_worker_has_its_share_of_each_pass_however_fast_it_is(start, seen):
    settings = script_settings(count=2000, batch=20, epochs=3, delays=[0.001, 0.008])
    run = start(TRAINING, "-n", "2", args=(settings,))
    seen.await_gate("start", 2)
    seen.open("start")
    assert run.wait() == 0, run.output
    assert run.output.count("passes [1000, 1000, 1000]") == 2
    np.testing.assert_array_equal(seen.counts(2000), 3)
    assert "not trained on" not in run.output


def test_samples_that_nobody_has_taken_are_reported_at_the_end_and_trained_on_by_resume(start, seen):
    settings = script_settings(count=2000, batch=20, epochs=3, quits=1)
    run = start(TRAINING, "-n", "2", args=(settings,))
    seen.open("start")
    assert run.wait() == 0, run.output
    assert seen.samples("0-*") == 3000 and seen.samples("1-*") == 1000
    assert "2,000 samples of the last epochs were not trained on" in run.output
    assert run.output.count("balance=True") == 1
    command = [
        str(MANIPLE),
        "run",
        "-n",
        "2",
        "--resume",
        "runs/run0",
        "script0.py",
        script_settings(count=2000, batch=20, epochs=3),
    ]
    again = subprocess.run(command, cwd=seen.folder, capture_output=True, text=True, timeout=PATIENCE_S)
    assert again.returncode == 0, again.stderr
    seen.assert_covered(2000, 3, again=0)
    assert "not trained on" not in again.stdout + again.stderr


def test_worker_that_leaves_its_passes_early_keeps_nobody_waiting_and_loses_nothing(start, seen):
    count, batch = 3000, 20
    settings = script_settings(count=count, batch=batch, epochs=3, leaves=0, delays=[0, 0.001], balance=True)
    run = start(TRAINING, "-n", "2", args=(settings,))
    seen.await_gate("start", 2)
    seen.open("start")
    assert run.wait() == 0, run.output
    assert seen.samples("0-*") == 3 * 3 * batch
    seen.assert_covered(count, 3, again=3 * 64)


# Worker 0 trains on all samples; worker 1 joins after that.
LATE = """
    import os, pathlib, sys, time
    import numpy as np
    import maniple

    while os.environ["MANIPLE_RANK"] == "1" and not pathlib.Path("trained").exists():
        time.sleep(0.02)
    worker = maniple.join()
    replica = worker.share({"w": np.zeros(3)})
    sampler = worker.sampler(100, balance=True)
    for epoch in worker.epochs(2) if sys.argv[1] == "epochs" else range(2):
        for batch in sampler.batches(10):
            replica.step()
    pathlib.Path("trained").touch()
"""


@pytest.mark.parametrize("loop", ["epochs", "range"])
def test_a_worker_that_joins_after_the_last_sample_says_so(run, loop):
    done = run(LATE, "-n", "2", args=(loop,))
    assert done.process.returncode == 0, done.output
    words = "worker 1 made no step: all samples had been handed out when it joined"
    assert sum(words in line for line in done.output.splitlines()) == 1, done.output
    (row,) = done.events(1, "late")
    assert row["reason"] == "all samples had been handed out"
    assert "made no step" not in done.log(0) and not done.events(0, "late")


@pytest.mark.parametrize("how", ["memory", "snapshot"])
def test_epoch_goes_on_after_the_host_was_killed(start, seen, how):
    count, batch, chunk = 6000, 20, 64
    settings = script_settings(count=count, batch=batch, pause=200)  # in the second epoch, for two equal workers
    options = ("--max-epochs", "3", "--snapshot-every", "0.3")
    run = start(TRAINING, "-n", "2", *options, args=(settings,))
    seen.open("start")
    seen.await_gate("go", 2)
    before = len(run.events("host", "snapshot"))
    run.await_event("host", "snapshot", count=before + 2)  # one that was begun after all had stopped
    run.kill()
    at = seen.samples()
    if how == "snapshot":
        memory = Path(os.environ["MANIPLE_SHM"])
        for segment in memory.iterdir():
            shutil.rmtree(segment)
    seen.open("go")
    command = [str(MANIPLE), "run", "-n", "2", *options, "--resume", "runs/run0", "script0.py", settings]
    again = subprocess.run(command, cwd=seen.folder, capture_output=True, text=True, timeout=PATIENCE_S)
    assert again.returncode == 0, again.stderr
    assert count < at < 2 * count
    seen.assert_covered(count, 3, again=2 * 3 * chunk)


LOADING = (
    COMMON
    + """
    import torch
    from torch.utils.data import DataLoader, Dataset, Sampler
    torch.set_num_threads(1)

    class Numbers(Dataset):
        def __len__(self):
            return settings["count"]

        def __getitem__(self, index):
            return index

    data, model = Numbers(), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    worker.share(model, optimizer, pace=maniple.Every(3))
    sampler = worker.sampler(data)
    assert isinstance(sampler, Sampler)
    loader = DataLoader(data, batch_size=settings["batch"], sampler=sampler, num_workers=2, persistent_workers=True)
    gate("start")
    passes = []
    while not worker.should_stop:
        passes.append(0)
        for indices in loader:
            optimizer.zero_grad()
            model(indices[:, None].float() / settings["count"]).mean().backward()
            optimizer.step()
            note(sampler.epoch - 1, indices.numpy())
            passes[-1] += len(indices)
            if worker.rank == 0 and len(passes) == 2 and passes[-1] == settings["pause"]:
                gate("go")
    Path(f"passes-{name}").write_text(repr(passes))
"""
)


def test_what_a_loader_had_drawn_for_a_killed_worker_is_trained_on_and_its_successor_finds_its_epoch(start, seen):
    count, batch, chunk = 3000, 10, 64
    settings = script_settings(
        count=count, batch=batch, pause=13 * batch
    )  # in the middle of a chunk of its second pass
    run = start(LOADING, "-n", "2", "--restarts", "1", "--max-epochs", "3", args=(settings,))
    seen.await_gate("start", 2)
    seen.open("start")
    seen.await_gate("go", 1)
    os.kill(run.pid(0), signal.SIGKILL)
    seen.open("go")
    assert run.wait() == 0, run.output
    seen.assert_covered(count, 3, again=4 * chunk)
    (successor,) = seen.folder.glob("passes-0-*")
    passes = eval(successor.read_text())
    assert len(passes) == 3
    assert passes[0] <= 4 * chunk, "the first epoch is over"


def test_training_goes_on_while_the_server_or_the_whole_host_is_away_and_nothing_is_lost(serve, seen):
    count, batch, chunk = 20_000, 20, 156
    settings = script_settings(count=count, batch=batch, epochs=2, delays=[0.002], gates={"1": "last"}, balance=True)
    host = serve()
    workers = [host.join(TRAINING, settings) for _ in range(2)]
    seen.await_gate("start", 2)
    seen.open("start")
    seen.await_more(10 * batch)
    os.kill(host.server_pid, signal.SIGKILL)
    host.await_event("host", "server", count=2)
    seen.await_more(10 * batch)
    host.kill()
    for rank in (0, 1):
        seen.await_more(6 * chunk, f"{rank}-*")  # more than any of them had lent
    again = serve(name="serve0")
    seen.open("last")
    assert all(len(ended(worker)) == 2 for worker in workers)
    assert again.end() == 0, again.output
    assert (seen.counts(count) >= 2).all()


ONE_CYCLE = """
    import os, sys
    from pathlib import Path
    import torch, maniple
    from torch.utils.data import DataLoader, TensorDataset
    torch.set_num_threads(1)
    EPOCHS, VICTIM = 3, sys.argv[1:] == ["victim"]
    x = torch.randn(1200, 8, generator=torch.Generator().manual_seed(0))
    data, model = TensorDataset(x, (x.sum(1) > 0).long()), torch.nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    worker = maniple.join()
    worker.share(model, optimizer)
    loader = DataLoader(data, batch_size=20, sampler=worker.sampler(data), num_workers=0 if VICTIM else 2)
    x, y = next(iter(loader))  # to look at its shape
    total = EPOCHS * len(loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=total)
    mine = []
    for epoch in worker.epochs(EPOCHS):
        loader.sampler.set_epoch(epoch)
        while scheduler.last_epoch < epoch * len(loader):
            scheduler.step()
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            mine.append(len(x))
            if VICTIM and worker.rank == 1 and len(mine) == 40 and not os.environ.get("MANIPLE_RESTARTED", "0") > "0":
                os.kill(os.getpid(), 9)  # in the middle of the second pass
    Path(f"schedule-{worker.rank}").write_text(f"{scheduler.last_epoch} of {total}, {sum(mine)} samples")
"""


def test_schedule_by_steps_comes_to_its_end_on_both_workers_and_each_has_its_share(start, seen):
    run = start(ONE_CYCLE, "-n", "2", "--rule", "easgd")
    assert run.wait() == 0, run.output
    assert [(seen.folder / f"schedule-{rank}").read_text() for rank in (0, 1)] == ["90 of 90, 1800 samples"] * 2
    assert "not trained on" not in run.output


def test_schedule_by_steps_is_not_overrun_when_a_worker_is_killed(start, seen):
    run = start(ONE_CYCLE, "-n", "2", "--rule", "easgd", "--restarts", "1", args=("victim",))
    assert run.wait() == 0, run.output
    assert (seen.folder / "schedule-0").read_text() == "90 of 90, 1800 samples"
    made, _, samples = (seen.folder / "schedule-1").read_text().partition(" of 90, ")
    assert "not trained on" not in run.output
    assert int(made) >= 70 and 800 <= int(samples.split()[0]) <= 1200  # from the pass on in which it was killed
