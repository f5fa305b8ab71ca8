"""Platoon's documented failures: here each of them ends well.

One more, "the last minibatches were lost", is told in test_feed.py.
"""

import textwrap

import pytest

pytestmark = pytest.mark.usefixtures("without_numba")

BEGIN = """
    import os, pathlib, signal, sys, time
    import numpy as np, maniple
    worker = maniple.join()
    params = {"w": np.zeros(1000)}
    replica = worker.share(params, rule=maniple.Downpour(), pace=maniple.Every(10))
    def train():
        params["w"] += 1
        replica.step()
"""


def test_22_batches_on_2_workers_with_an_exchange_every_10_end_by_themselves(run):
    """Then: a hang, because one worker had no batch left for a sync that the other waited in.

    Here nobody waits for another, and what was learned after the last whole 10 is exchanged at the end.
    """
    done = run(
        BEGIN + """
    while worker.ask("next") != "stop":
        train()
    worker.log(steps=replica.steps)
        """,
        "-n", "2", "--max-batches", "22",
    )  # fmt: skip
    assert done.process.returncode == 0, done.output
    made = sum(row["steps"] for rank in range(2) for row in done.events(rank, "log"))
    assert 22 <= made <= 23
    assert done.center["w"].tolist() == [made] * 1000, "the batches after the last whole 10 are in the center too"


def test_worker_that_stops_early_does_not_block_the_others(run):
    """Then: one worker stopped, and the others blocked. Here a worker may end at any time."""
    done = run(
        BEGIN + """
    for _ in range(3):
        train()
    if worker.rank == 0:
        worker.leave()
        pathlib.Path("left").touch()
        sys.exit(0)
    while not pathlib.Path("left").exists(): time.sleep(0.01)
    for _ in range(100):
        train()
    assert worker.ask("next") == "train"
        """,
        "-n", "3",
    )  # fmt: skip
    assert done.process.returncode == 0, done.output
    assert done.center["w"].tolist() == [3 + 2 * 103] * 1000


def test_lock_of_a_dead_holder_is_released(run):
    """Then: a semaphore, which a worker that died inside it left taken for ever. Here the kernel gives it back."""
    script = """
        import os, pathlib, signal, time, maniple
        worker, held = maniple.join(), pathlib.Path("held")
        if worker.rank == 0 and not held.exists():
            with worker.lock():
                held.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        while not held.exists(): time.sleep(0.01)
        with worker.lock(timeout_s=30):
            worker.log(got=1)
    """
    done = run(script, "-n", "2", "--restarts", "1")
    assert done.process.returncode == 0, done.output
    assert [row["got"] for rank in range(2) for row in done.events(rank, "log")] == [1, 1]
    assert len([row for row in done.events("host", "exit") if row["died"]]) == 1


def test_each_worker_may_have_arguments_of_its_own(run):
    """Then: the same arguments for all. Here `{rank}` and `{world}` stand for each worker's numbers."""
    done = run(
        "import sys, maniple; maniple.join().log(args=sys.argv[1:])",
        "-n", "3", args=("--shard", "part-{rank}-of-{world}.npz", "--lr", "0.1"),
    )  # fmt: skip
    assert done.process.returncode == 0, done.output
    for rank in range(3):
        (row,) = done.events(rank, "log")
        assert row["args"] == ["--shard", f"part-{rank}-of-3.npz", "--lr", "0.1"]


def test_run_with_a_controller_like_platoons_ends_by_itself(run, tmp_path):
    """Then: the controller did not end when its workers had. Here the run ends, with exit code 0."""
    (tmp_path / "lieutenant.py").write_text(
        textwrap.dedent("""
        import maniple

        class Lieutenant(maniple.Controller):
            def __init__(self, valid_freq, max_mb):
                self.valid_freq, self.max_mb = valid_freq, max_mb
                self.state = {"done": 0, "valid": False, "losses": [], "validator": None}

            def handle_control(self, req, worker, info):
                state = self.state
                if req == "config":
                    return {"every": 10, "batch": 16}
                if req == "next":
                    if state["done"] >= self.max_mb:
                        return "stop"
                    if state["valid"]:
                        state["valid"] = False
                        return "valid"
                    return "train"
                if req == "done":
                    before, state["done"] = state["done"], state["done"] + info["train_len"]
                    state["valid"] |= before // self.valid_freq < state["done"] // self.valid_freq
                if req == "pred_errors":
                    state["losses"].append(info["valid_err"])
                    return len(state["losses"])
        """)
    )
    done = run(
        BEGIN + """
    config = worker.ask("config")
    while (step := worker.ask("next")) != "stop":
        if step == "train":
            for _ in range(config["every"]): train()
            worker.ask("done", train_len=config["every"])
        if step == "valid":
            with replica.center(): error = 1 / (1 + params["w"][0])
            worker.log(validations=worker.ask("pred_errors", valid_err=error))
        """,
        "-n", "2", "--controller", "lieutenant.py:Lieutenant",
        "--controller-arg", "valid_freq=50", "--controller-arg", "max_mb=200",
    )  # fmt: skip
    assert done.process.returncode == 0, done.output
    made = done.center["w"][0]
    assert 200 <= made <= 210
    validations = sorted(row["validations"] for rank in range(2) for row in done.events(rank, "log"))
    assert validations[:3] == [1, 2, 3]
    assert done.description["exit_code"] == 0
