"""What scripts of runs with a controller begin with, and what these have left."""

import subprocess

from tests.waiting import PATIENCE_S

from .conftest import MANIPLE

# Every step adds 1 to each element of the center, so that the center counts the steps of all.
BEGIN = """
    import os, pathlib, signal, sys, time
    import numpy as np, maniple
    worker = maniple.join()
    params = {"w": np.zeros(1000)}
    replica = worker.share(params, rule=maniple.Downpour(), pace=maniple.Every(1))
    def train():
        params["w"] += 1
        replica.step()
"""


def logged(run, rank: int, name: str) -> list:
    """What a worker has logged under a name."""
    return [row[name] for row in run.events(rank, "log") if name in row]


def resume(run, *options: str) -> None:
    """Go on with a run that has ended, with its script and one worker."""
    command = [MANIPLE, "run", "--resume", run.folder, "-n", "1", *options, "script0.py"]
    again = subprocess.run(
        command, cwd=run.folder.parents[1], capture_output=True, text=True, timeout=PATIENCE_S
    )  # fmt: skip
    assert again.returncode == 0, again.stderr + again.stdout


def steps(run, workers: int) -> int:
    """The steps that all workers have made, over all their lives."""
    return sum(run.events(rank, "progress")[-1]["step"] for rank in range(workers))
