"""Gossip among real processes: killed and stopped workers, snapshots, and a model that is learned."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from maniple.adapters import adapt
from maniple.layout import Layout
from maniple.peers.mailbox import Mailbox
from maniple.peers.mean import mean_of
from maniple.rules import parse_rule
from tests.process.conftest import MANIPLE, Run
from tests.waiting import await_, is_gone

DRAWN = """
    import pathlib, time, numpy as np, maniple
    worker = maniple.join()
    params = {f"w{i}": np.zeros(1000, "f4") for i in range(3)}
    replica = worker.share(params)
    worker.log(first=float(params["w0"][0]))
    while not pathlib.Path("stop").exists():
        for value in params.values():
            value += 0.1 * (1 + worker.rank - value)
        replica.step()
        time.sleep(0.001)
    with replica.center():
        worker.log(last=float(params["w2"][0]))
"""
# Logistic regression on samples that are divided among the workers.
LEARNING = """
    import time, numpy as np, maniple
    worker = maniple.join()
    rng = np.random.default_rng(0)
    X = rng.normal(size=(4000, 20))
    y = (X @ rng.normal(size=20) > 0).astype(float)
    params = {"w": np.zeros(20)}
    replica = worker.share(params)
    sampler = worker.sampler(len(X))
    worker.barrier()  # so short a training would be over before the other has begun
    for epoch in worker.epochs(4):
        for batch in sampler.batches(20):
            p = 1 / (1 + np.exp(-X[batch] @ params["w"]))
            params["w"] -= 0.5 * X[batch].T @ (p - y[batch]) / len(batch)
            replica.step()
            time.sleep(0.001)
    np.save("X.npy", X), np.save("y.npy", y)
"""
RULES = ["gossip:q=0.2", "gossip:q=0.2,elastic=false", "noloco:every=10"]


def kills(rule: str, count: int, folder) -> dict:
    """Kill workers that exchange without training, `count` times; the sums before and after."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.mailboxes", str(folder), rule, str(count)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_sums(found: dict) -> None:
    assert found["weights"][1] == pytest.approx(found["weights"][0], rel=1e-12)
    assert found["error"] < 1e-12
    assert found["messages"] > 20, "it was about something"


@pytest.mark.parametrize("rule", ["gossip:q=0.5", "gossip:q=0.5,elastic=false"])
def test_twenty_kills_and_joins_change_no_sum(rule, tmp_path):
    found = kills(rule, 20, tmp_path)
    check_sums(found)
    assert found["joins"] == (2 if "false" in rule else 0)


@pytest.mark.usefixtures("without_numba")
@pytest.mark.parametrize("rule", RULES)
def test_two_workers_learn_a_model_together(rule, run, tmp_path):
    done = run(LEARNING, "-n", "2", "--rule", rule)
    assert done.process.returncode == 0, done.output
    X, y, w = np.load(tmp_path / "X.npy"), np.load(tmp_path / "y.npy"), done.center["w"]
    assert ((X @ w > 0) == y).mean() > 0.97
    shared = done.events(0, "share")[0]
    assert shared["meets"] == "peers"
    last = [done.events(rank, "gossip")[-1] for rank in (0, 1)]
    assert sum(row["sent"] for row in last) > 20


@pytest.mark.usefixtures("without_numba")
def test_a_stopped_worker_delays_nobody_and_a_killed_one_continues_with_its_mailbox(start, tmp_path):
    going = start(DRAWN, "-n", "3", "--rule", "gossip:q=0.5,elastic=false", "--restarts", "1")
    for rank in range(3):
        going.await_event(rank, "progress", count=3)
    os.kill(going.pid(1), signal.SIGSTOP)
    then = [going.events(rank, "progress")[-1]["step"] for rank in (0, 2)]
    for rank, step in zip((0, 2), then, strict=True):
        await_(lambda rank=rank, step=step: going.events(rank, "progress")[-1]["step"] > step + 500)
    os.kill(going.pid(1), signal.SIGKILL)
    row = going.await_event(1, "continues")[0]
    assert 0 < row["weight"] < 1
    first = going.await_event(1, "log", count=2)[-1]["first"]
    assert 1 < first < 3, "its replica as it was, not the center's beginning"
    count = len(going.events(1, "progress"))
    going.await_event(1, "progress", count=count + 2)
    (tmp_path / "stop").touch()
    assert going.wait() == 0, going.output
    assert 1 < going.center["w0"][0] < 3


@pytest.mark.usefixtures("without_numba")
@pytest.mark.parametrize("rule", RULES)
def test_a_resumed_run_begins_with_the_mean_that_was_saved(rule, start, tmp_path):
    going = start(DRAWN, "-n", "2", "--rule", rule)
    for rank in (0, 1):
        going.await_event(rank, "progress", count=3)
    going.signal(signal.SIGINT)
    going.wait()
    saved = float(going.center["w0"][0])
    assert 1 < saved < 2
    (tmp_path / "stop").touch()
    again = Run(tmp_path, going.folder.name, [str(MANIPLE), "run", "--resume", str(going.folder)], {})
    assert again.wait() == 0, again.output
    for rank in (0, 1):
        assert again.events(rank, "log")[-2]["first"] == pytest.approx(saved)
        assert again.events(rank, "log")[-1]["last"] == pytest.approx(saved)


@pytest.mark.usefixtures("without_numba")
@pytest.mark.parametrize("rule", RULES)
def test_nothing_that_was_published_is_lost_when_the_host_is_killed(rule, start, tmp_path):
    going = start(DRAWN, "-n", "2", "--rule", rule)
    for rank in (0, 1):
        going.await_event(rank, "progress", count=3)
    pids = [going.pid(rank) for rank in (0, 1)]
    going.process.kill()
    going.wait()
    await_(lambda: all(map(is_gone, pids)))
    (segment,) = Path(os.environ["MANIPLE_SHM"]).glob("maniple-*")
    layout = Layout(adapt({f"w{i}": np.zeros(1000, "f4") for i in range(3)}).entries)
    names = parse_rule(rule).mailbox_vectors
    boxes = {rank: Mailbox.find(segment / f"peers-0.{rank}", layout, names) for rank in (0, 1)}
    mean = mean_of(boxes, (0, 1), layout, names)["float32"][0]
    del boxes
    (tmp_path / "stop").touch()
    again = Run(tmp_path, going.folder.name, [str(MANIPLE), "run", "--resume", str(going.folder)], {})
    assert again.wait() == 0, again.output
    assert [again.events(rank, "log")[-2]["first"] for rank in (0, 1)] == pytest.approx([mean, mean])


@pytest.mark.usefixtures("without_numba")
def test_a_snapshot_holds_the_mean_of_workers_that_go_on(start, tmp_path):
    going = start(DRAWN, "-n", "2", "--rule", "gossip:q=0.2")
    for rank in (0, 1):
        going.await_event(rank, "progress", count=3)
    done = subprocess.run(
        [str(MANIPLE), "change", "--snapshot", str(going.folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert 1 < going.center["w1"][0] < 2
    count = len(going.events(0, "progress"))
    going.await_event(0, "progress", count=count + 1)
    (tmp_path / "stop").touch()
    assert going.wait() == 0, going.output
