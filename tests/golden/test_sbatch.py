"""Golden sbatch texts: what is submitted to Slurm, to the letter.

To change them on purpose, delete the folder slurm, run this test, and say why in the commit.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from maniple.queues.queue import JobRequest, QueueResources
from maniple.queues.slurm import Slurm

SLURM = Slurm()
GOLDEN = Path(__file__).with_name("slurm")
PLAIN = JobRequest(
    QueueResources(instances=4),
    run=Path("/home/me/runs/train-1"),
    folder=Path("/home/me"),
    python=Path("/opt/venv/bin/python"),
    command=("/home/me/train.py", "--lr", "0.1"),
)
FULL = replace(
    PLAIN,
    resources=QueueResources(
        instances=8,
        max_simultaneous=3,
        allocation="jvb-000-ag",
        partition="gpu",
        walltime="3:00:00",
        gpus_per_worker=1,
        cpus_per_worker=8,
        mem="32G",
        leave_early_s=120,
        sbatch=("--qos=high", "-C a100"),
        host_sbatch=("--partition=cpu", "--mem=4G"),
    ),
    wait_s=60.0,
)
AWKWARD = replace(
    PLAIN,
    run=Path("/data/my runs/50%"),
    folder=Path("/data/it's #1"),
    command=("/data/it's #1/train.py", "--part", "a part-{rank}.npz", "--of", "{world}", "$HOME", "'", "`id`"),
)
MODEL = replace(PLAIN, command=("-m", "maniple.model", "net.py:Net", "--model-arg=lr=0.1"))
TEXTS = {
    "plain": SLURM.workers_script(PLAIN),
    "full": SLURM.workers_script(FULL, after="4711"),
    "awkward": SLURM.workers_script(AWKWARD),
    "model": SLURM.workers_script(MODEL),
    "host": SLURM.host_script(PLAIN),
    "host-full": SLURM.host_script(FULL),
}


@pytest.mark.parametrize("name", TEXTS)
def test_sbatch_text_is_the_golden_one(name):
    path = GOLDEN / f"{name}.sbatch"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(TEXTS[name])
    assert path.read_text() == TEXTS[name]
