"""Processes that were stopped (SIGSTOP, a suspended job) and go on: the time in between is nobody's fault."""

import os
import signal
import time

from maniple.memory.locks import ByteLocks
from tests.waiting import await_

LIMIT_S = 4.0  # a stop counts as one second, and half a second before and after it is waited
STOPPED_S = LIMIT_S + 0.5

LOCKED = f"""
    import pathlib, time, numpy as np, maniple, maniple.center.shared
    maniple.center.shared.LOCK_TIMEOUT_S = {LIMIT_S}  # instead of a minute
    worker = maniple.join()
    params = {{"w": np.zeros(10)}}
    replica = worker.share(params, rule=maniple.EASGD(), pace=maniple.Every(1))
    worker.log(segment=str(worker._environment.segment))
    while not pathlib.Path("stop").exists():
        replica.step()
        time.sleep(0.002)
"""


def exchanges_after(run, rank: int, then: float) -> list:
    return [row for row in run.events(rank, "exchange") if row["start"] > then]


def test_a_worker_that_was_stopped_while_it_waits_for_a_lock_goes_on(start, tmp_path):
    run = start(LOCKED, "-n", "2")
    segment = run.await_event(0, "log")[0]["segment"]
    run.await_event(1, "exchange")
    pid, locks = run.pid(1), ByteLocks(tmp_path / segment / "center-0")
    what = {"timeout_s": 30, "what": "the parameter"}
    try:
        with locks.hold(0, **what):
            time.sleep(0.5)  # by now both wait for it
            os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        with locks.hold(0, **what):  # it wakes up while another one has the lock
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.5)
    finally:
        locks.close()
    then = time.time()
    for rank in range(2):
        await_(lambda rank=rank: exchanges_after(run, rank, then) or run.process.poll() is not None)
    (tmp_path / "stop").touch()
    assert run.wait() == 0, run.output


def test_workers_in_step_that_were_all_stopped_go_on(start, tmp_path):
    run = start(
        """
        import pathlib, time, numpy as np, maniple
        worker = maniple.join()
        params = {"w": np.zeros(10)}
        replica = worker.share(params, rule=maniple.BSP())
        while not pathlib.Path("stop").exists():
            time.sleep(0.3 * worker.rank)  # worker 0 waits for worker 1 nearly all of the time
            gradients = {"w": np.ones(10)}
            replica.reduce(gradients)
            params["w"] -= gradients["w"]
            replica.step()
            worker.log(rounds=replica.rounds)
        """,
        "-n", "2", "--collectives-deadline", str(LIMIT_S),
    )  # fmt: skip
    run.await_event(0, "log", count=3)
    pids = [run.pid(rank) for rank in range(2)]
    time.sleep(0.1)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.kill(pids[0], signal.SIGCONT)
    time.sleep(0.5)
    os.kill(pids[1], signal.SIGCONT)
    then = time.time()
    await_(lambda: run.process.poll() is not None or [r for r in run.events(0, "log") if r["timestamp"] > then])
    (tmp_path / "stop").touch()
    assert run.wait() == 0, run.output


STOPS_INSIDE = """
    import os, pathlib, signal, time, numpy as np, maniple

    class StopsInside(maniple.Downpour):
        def exchange(self, x, c, state, moment):
            if worker.rank == 1 and pathlib.Path("inside").exists() and x.size > 1000:
                pathlib.Path("inside").unlink()
                os.kill(os.getpid(), signal.SIGSTOP)
            return super().exchange(x, c, state, moment)

    worker = maniple.join(own_data=True)
    params = {f"p{i}": np.zeros(300_000) for i in range(3)}
    replica = worker.share(params, rule=StopsInside(), pace=maniple.Every(1))
    while not pathlib.Path("stop").exists():
        for value in params.values():
            value += 1
        replica.step()
        time.sleep(0.005)
    worker.log(steps=replica.steps)
    worker.leave()
"""


def test_a_worker_that_is_stopped_inside_an_exchange_holds_nobody_up_and_loses_nothing(start, tmp_path, without_numba):
    run = start(STOPS_INSIDE, "-n", "3", "--snapshot-every", "0")
    for rank in range(3):
        run.await_event(rank, "exchange")
    pid = run.pid(1)
    (tmp_path / "inside").touch()
    await_(lambda: not (tmp_path / "inside").exists())
    then = time.time()
    for rank in (0, 2):  # not the first ones, which may have waited
        await_(lambda rank=rank: len([row for row in exchanges_after(run, rank, then) if "locked" in row]) > 20)
    assert run.process.poll() is None
    os.kill(pid, signal.SIGCONT)
    then = time.time()
    for rank in range(3):
        await_(lambda rank=rank: [row for row in exchanges_after(run, rank, then) if "locked" not in row])
    (tmp_path / "stop").touch()
    assert run.wait() == 0, run.output
    assert "could not be exchanged: a worker that is stopped" in run.output + run.log(0)
    steps = sum(run.events(rank, "log")[-1]["steps"] for rank in range(3))
    for value in run.center.values():
        assert (value == steps).all()
