"""Overhead of a step between two exchanges: the same model and optimizer, shared and not.

A worker (`maniple run -n 1`, EASGD with a center in shared memory) has equal models of 8, 200 or 1,000 parameters of 64
elements: two plain ones and a shared one, whose pace is so slow that no exchange is ever due. They take turns, in
blocks of steps. For a torch model a step is `optimizer.step()` of SGD, with constant gradients; for a dict of NumPy
arrays it is an update in place, which is followed by `replica.step()` if the model is shared. A block counts with its
median step, in microseconds. The overhead is the median of the differences within a round; that of the second plain
model, which has none, shows the noise. The last column is the overhead of steps that change nothing, since no parameter
has a gradient: with many parameters, the update itself varies by more than the overhead.

    python benchmarks/step.py [--models torch numpy] [--parameters 8 200 1000] [--rounds 300]
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import maniple
from maniple.replica.with_center import WithCenter
from measure import report

ELEMENTS = 64  # of a parameter
BLOCK_S = 0.002  # the least length of a block
BLOCK_STEPS = 10  # the least number of its steps, which is that of the warm-up too
NEVER = maniple.Every(10**9)
GOAL_US, GOAL_PARAMETERS = 10.0, 200
Step = Callable[[], Any]


def torch_step(parameters: int, worker: maniple.Worker | None, *, is_empty: bool) -> Step:
    """Make a torch model, which is shared if a worker is given, and return what makes one step of it.

    An empty step is one without gradients.
    """
    import torch

    model = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(ELEMENTS)) for _ in range(parameters))
    for parameter in model:
        parameter.grad = None if is_empty else torch.ones(ELEMENTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    if worker is not None:
        check(worker.share(model, optimizer, rule=maniple.EASGD(), pace=NEVER))
    return optimizer.step


def numpy_step(parameters: int, worker: maniple.Worker | None, *, is_empty: bool) -> Step:
    """The same for a dict of NumPy arrays."""
    model = {f"p{i}": np.ones(ELEMENTS, np.float32) for i in range(parameters)}
    updated = [] if is_empty else list(model.values())

    def update() -> None:
        for array in updated:
            array -= 1e-6

    if worker is None:
        return update
    replica = worker.share(model, rule=maniple.EASGD(), pace=NEVER)
    check(replica)

    def update_and_count() -> None:
        update()
        replica.step()

    return update_and_count


STEPS = {"torch": torch_step, "numpy": numpy_step}


def check(replica: maniple.Replica) -> None:
    """Check that the replica has a center: the steps of a worker alone would do nothing."""
    assert isinstance(replica.sharing, WithCenter), "this benchmark has to be started by `maniple run`"


def block_us(step: Step, count: int) -> float:
    """Return the median microseconds of the steps of one block: a pause of the process affects one of them."""
    times = [time.perf_counter()]
    for _ in range(count):
        step()
        times.append(time.perf_counter())
    return statistics.median(after - before for before, after in pairwise(times)) * 1e6


def work(kind: str, parameters: int, rounds: int) -> dict[str, float]:
    """Measure one row in this worker."""
    if kind == "torch":
        import torch

        torch.set_num_threads(1)
    worker, make = maniple.join(own_data=True), STEPS[kind]
    steps = {
        "plain": make(parameters, None, is_empty=False),
        "again": make(parameters, None, is_empty=False),
        "shared": make(parameters, worker, is_empty=False),
        "plain, empty": make(parameters, None, is_empty=True),
        "shared, empty": make(parameters, worker, is_empty=True),
    }
    counts = {
        name: max(BLOCK_STEPS, math.ceil(BLOCK_S * 1e6 / block_us(step, BLOCK_STEPS))) for name, step in steps.items()
    }
    blocks: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for round_ in range(rounds):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            blocks[name].append(block_us(steps[name], counts[name]))

    def over(name: str, plain: str = "plain") -> float:
        return statistics.median(a - b for a, b in zip(blocks[name], blocks[plain], strict=True))

    return {
        "plain us": statistics.median(blocks["plain"]),
        "shared us": statistics.median(blocks["shared"]),
        "overhead us": over("shared"),
        "noise us": over("again"),
        "overhead of an empty step us": over("shared, empty", "plain, empty"),
    }


def measure(kind: str, parameters: int, rounds: int) -> dict[str, Any]:
    """Start a worker that measures one row."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        run = [str(Path(sys.executable).with_name("maniple")), "run", "--quiet", "--runs", folder, "-n", "1", "--"]
        script = [__file__, "--work", kind, str(parameters), str(result), "--rounds", str(rounds)]
        subprocess.run([*run, *script], check=True, timeout=600)
        row = {"model": kind, "parameters": parameters} | json.loads(result.read_text())
    if parameters == GOAL_PARAMETERS:
        row["goal"] = f"< {GOAL_US:g}: {'met' if row['overhead us'] < GOAL_US else 'missed'}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=STEPS, default=list(STEPS), help="kinds of models")
    parser.add_argument("--parameters", type=int, nargs="+", default=[8, 200, 1000], help="numbers of parameters")
    parser.add_argument("--rounds", type=int, default=300, help="blocks of each model")
    parser.add_argument("--work", nargs=3, metavar=("MODEL", "PARAMETERS", "RESULT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        kind, parameters, result = options.work
        Path(result).write_text(json.dumps(work(kind, int(parameters), options.rounds)))
        return
    rows = [measure(kind, count, options.rounds) for kind in options.models for count in options.parameters]
    goal = f"an overhead of less than {GOAL_US:g} us with {GOAL_PARAMETERS} parameters"
    report("step", "A step between two exchanges", rows, rounds=options.rounds, goal=goal)


if __name__ == "__main__":
    main()
