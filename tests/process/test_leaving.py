"""Workers of synchronous rules that are told to leave while they wait for others, or load data."""

import os
import signal

import pytest

pytestmark = pytest.mark.usefixtures("without_numba")

TRAINING = """
    import time, numpy as np, maniple
    worker = maniple.join(own_data=True)
    w = {"w": np.zeros(4)}
    replica = worker.share(w)
    for step in range(1000):
        if step == 6 and worker.rank == 1:
            worker.record("loads")
            time.sleep(1000)
        gradient = {"w": np.ones(4)}
        replica.reduce(gradient)
        w["w"] += gradient["w"]
        worker.record("step")
        replica.step()
"""


@pytest.mark.parametrize(
    ("options", "steps", "least"),
    [
        (("--rule", "localsgd:k=4"), 8, 6),
        (("--rule", "bsp", "--collectives", "torch"), 6, 6),
    ],
)
def test_a_worker_that_waits_for_another_one_leaves_within_its_grace_period(start, options, steps, least):
    """The other one loads data without end, which is cut at a deadline."""
    going = start(TRAINING, "-n", "2", *options)
    going.await_event(1, "loads")
    going.await_event(0, "step", count=steps)
    os.kill(going.pid(0), signal.SIGTERM)
    assert going.await_event(0, "leave")[0]["failed"] is False
    if "torch" not in options:  # there the launcher ends it, since none can continue
        os.kill(going.pid(1), signal.SIGTERM)
    assert going.await_event(1, "leave")[0]["failed"] is False
    going.wait()
    assert "worker 0 was killed by SIGTERM (exit code 143)" in going.output, going.output
    assert "Traceback" not in going.output, going.output
    assert going.center["w"].min() >= least, "what was learned is in the center"
