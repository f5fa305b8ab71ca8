"""The training script of `make reproduce` gives a learning curve in each of its ways."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "reproduce" / "train.py"
MANIPLE = Path(sys.executable).with_name("maniple")


@pytest.mark.parametrize(
    ("before", "way", "world"),
    [
        ([sys.executable], "plain", 1),
        ([str(MANIPLE), "run", "--quiet", "--runs", "runs", "-n", "2", "--rule", "easgd"], "maniple", 2),
        ([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], "ddp", 2),
    ],
)
def test_every_way_of_training_writes_its_curve(tmp_path, before, way, world):
    pytest.importorskip("torch")
    command = [*before, str(SCRIPT), "digits", "--way", way, "--epochs", "1", "--out", str(tmp_path / "curve.json")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "curve.json").read_text())
    assert found["world"] == world
    assert found["curve"][0][1] == 0 and found["curve"][-1][1] == 20_000  # all samples once, over all workers
    assert found["curve"][-1][2] > 0.4 > found["curve"][0][2]  # it has learned something
