"""`maniple run --hosts` on several machines: one is cut off for a while, one is powered off for good."""

import os
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from maniple.record import read_events
from tests.cluster.slurm import Cluster
from tests.waiting import await_

STEP_S = 0.02  # at least
TRAINING = f"""
import sys, time, numpy as np, maniple
worker = maniple.join()
params = {{"w": np.zeros(1000)}}
replica = worker.share(params, rule=maniple.Downpour(), pace=maniple.Every(1))
drawn = worker.sampler(range(4000), balance=True)
for index in drawn:
    params["w"] += 1
    replica.step()
    time.sleep({STEP_S})
"""


@pytest.fixture
def ssh(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`ssh HOST` reaches the hosts of the cluster; a machine that is gone is noticed soon."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {cluster.ssh_config} "$@"\n')
    (folder / "ssh").chmod(0o755)
    monkeypatch.setattr("tests.cluster.slurm.PATH", f"{folder}:{os.environ['PATH']}:/usr/sbin:/sbin")


@pytest.mark.usefixtures("ssh")
def test_one_host_is_cut_off_and_back_and_another_is_gone_for_good(cluster: Cluster, tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAINING)
    folder = tmp_path / "runs" / "one"
    run = cluster.start(
        1, sys.executable, "-m", "maniple.cli", "run", "--hosts", "h2,h3,h4", "--name", "one", "--max-epochs", "1",
        "--restarts", "1", "train.py", folder=tmp_path, output=tmp_path / "output",
    )  # fmt: skip

    def said() -> str:
        return (tmp_path / "output").read_text()

    def steps(rank: int) -> int:
        path = folder / "events" / f"worker-{rank}.jsonl"
        return sum(row["event"] == "exchange" for row in read_events(path)) if path.exists() else 0

    def is_alive() -> bool:
        assert run.poll() is None, said()
        return True

    await_(lambda: is_alive() and all(steps(rank) for rank in range(3)), timeout_s=60)
    cluster.cut(3)
    begin, others = time.monotonic(), steps(0)
    await_(lambda: is_alive() and time.monotonic() - begin > 15, timeout_s=60)
    assert steps(0) > others, "the others have waited for a host that was cut off"
    cluster.heal(3)
    back = steps(1)
    await_(lambda: is_alive() and steps(1) > back, timeout_s=60)
    cut_s = time.monotonic() - begin
    cluster.off(4)
    assert run.wait(180) == 0, said()
    assert "worker 2 is lost (h4 cannot be reached)" in said()
    center = load_file(folder / "center" / "center-0.safetensors")["w"]
    assert center.min() == center.max() >= 4000, "a sample was lost"  # what the dead host had drawn is drawn again
    # Beyond that: a lease of each host that was away at most; and the one that was cut off has trained meanwhile.
    assert center.max() < 4000 + 500 + cut_s / STEP_S
    cluster.boot(4)
