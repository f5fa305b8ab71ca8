"""Workers that die: the others go on, the dead come back from the center, no lock is stuck."""

import os
import random
import signal
import time

import numpy as np
import pytest

from tests.waiting import await_, is_gone

TRAINING = """
    import pathlib, sys, time, numpy as np, maniple
    worker = maniple.join()
    params = {f"w{i}": np.zeros(20_000, "f4") for i in range(5)}
    replica = worker.share(params, rule=maniple.EASGD(), pace=maniple.Every(5))
    queue = pathlib.Path("/proc/self/schedstat")  # its second number: nanoseconds ready to run, without a core
    worker.log(queued_s=int(queue.read_text().split()[1]) / 1e9 if queue.exists() else 0.0)
    while not pathlib.Path("stop").exists():
        for value in params.values():
            value += 0.1 * (1 - value)
        replica.step()
        time.sleep(0.002)
"""


@pytest.mark.usefixtures("without_numba")
def test_the_others_continue_when_a_worker_is_killed(start, tmp_path):
    """By SIGKILL, and one by SIGTERM, as a scheduler does that takes a machine back: it leaves in order."""
    going = start(TRAINING, "-n", "3")
    for rank in range(3):
        going.await_event(rank, "exchange")
    os.kill(going.pid(1), signal.SIGKILL)
    os.kill(going.pid(2), signal.SIGTERM)
    await_(lambda: len(going.events("host", "given up")) == 2)
    made = len(going.events(0, "exchange"))
    going.await_event(0, "exchange", count=made + 5)
    (tmp_path / "stop").touch()
    assert going.wait() == 0, going.output
    (said,) = [
        line for line in going.output.splitlines() if "worker 1 was killed by SIGKILL" in line and "left" in line
    ]
    for words in ("out of memory", "--restarts", "maniple join"):
        assert words in said
    assert "worker 2 was killed by SIGTERM (exit code 143)" in going.output
    assert "lost on the way: worker 1 (killed by SIGKILL), worker 2 (killed by SIGTERM)" in going.output
    assert going.description["exit_code"] == 0
    assert going.description["ends"] == {"0": "done", "1": "killed by SIGKILL", "2": "killed by SIGTERM"}
    assert going.events(2, "leave"), "SIGTERM leaves time for the last exchange"


@pytest.mark.usefixtures("without_numba")
@pytest.mark.parametrize(
    ("option", "why"),
    [
        (("--strict",), "worker 1 was killed by SIGKILL, so the run ends (--strict)"),
        (("--min-workers", "2"), "worker 1 was killed by SIGKILL, and 1 worker is left, below --min-workers 2"),
    ],
)
def test_a_dead_worker_ends_the_run_where_that_was_requested(start, option, why):
    going = start(TRAINING, "-n", "2", *option)
    for rank in range(2):
        going.await_event(rank, "exchange")
    os.kill(going.pid(1), signal.SIGKILL)
    assert going.wait() == 1
    assert why in going.output
    assert "maniple run --resume runs/run0" in going.output
    assert going.description["ends"] == {"0": "stopped", "1": "killed by SIGKILL"}


def test_a_killed_worker_comes_back_from_the_center(start, tmp_path):
    going = start(TRAINING, "-n", "2", "--restarts", "1")
    going.await_event(0, "exchange", count=10)
    going.await_event(1, "exchange", count=10)
    victim = going.pid(1)
    os.kill(victim, signal.SIGKILL)
    killed = time.time()
    second = going.await_event(1, "join", count=2)[-1]
    assert second["restarts"] == 1
    assert second["pid"] != victim
    back = going.await_event(1, "share", count=2)[-1]
    assert not back["created"]
    started = going.events("host", "started")[-1]["timestamp"]
    await_(lambda: any(row["timestamp"] > started for row in going.events(1, "exchange")))
    (tmp_path / "stop").touch()
    assert going.wait() == 0, going.output
    assert "worker 1 was killed by SIGKILL: restart 1 of 1" in going.output
    first = next(row["timestamp"] for row in going.events(1, "exchange") if row["timestamp"] > started)
    queued_s = going.events(1, "log")[-1]["queued_s"]  # the start of a process is the machine's work, too
    assert first - started - queued_s < 5, "contributing within 5 s of its start"
    assert next(r["timestamp"] for r in going.events(0, "exchange") if r["timestamp"] > killed) - killed < 2


def test_a_worker_that_fails_again_and_again_ends_the_run(run):
    done = run("import maniple; maniple.join(); raise RuntimeError('always')", "-n", "1", "--restarts", "2")
    assert done.process.returncode == 1
    assert "after 2 restarts" in done.output
    assert len(done.events(0, "join")) == 3


def test_a_worker_that_keeps_dying_before_it_joins_is_started_more_and_more_slowly(run):
    done = run(
        """
        import os, signal, maniple
        if int(os.environ["MANIPLE_RESTARTED"]) == 0:
            maniple.join()  # the first life joins, the others do not come so far
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        "-n", "1", "--restarts", "4",
    )  # fmt: skip
    assert done.process.returncode == 1
    ends = [row["timestamp"] for row in done.events("host", "exit")]
    starts = [row["timestamp"] for row in done.events("host", "started")]
    pauses = [start - end for end, start in zip(ends, starts[1:], strict=False)]
    for pause, least in zip(pauses, (0.0, 0.2, 0.4, 0.8), strict=True):
        assert pause >= least


@pytest.mark.usefixtures("without_numba")  # 20 of them begin
def test_eight_workers_survive_a_kill_every_second(start, tmp_path):
    """12 s, one of 8 workers killed each second at a random instant: every survivor exchanges again within 2 s."""
    going = start(TRAINING, "-n", "8", "--restarts", "12")
    for rank in range(8):
        going.await_event(rank, "exchange")
    rng = random.Random(1)
    kills: list[tuple[float, int]] = []
    for _ in range(12):
        time.sleep(1 + rng.random() * 0.05)
        rank = rng.choice(await_(lambda: [rank for rank in range(8) if not is_gone(going.pid(rank))]))
        os.kill(going.pid(rank), signal.SIGKILL)
        kills.append((time.time(), rank))
    time.sleep(2)
    (tmp_path / "stop").touch()
    assert going.wait() == 0, going.output
    assert going.output.count("was killed by SIGKILL: restart") == 12
    center = going.center
    assert all(np.isfinite(value).all() for value in center.values())
    assert all(np.allclose(value, 1, atol=0.05) for value in center.values()), "training went on"
    exchanges = [[row["timestamp"] for row in going.events(rank, "exchange")] for rank in range(8)]

    def trains(rank: int, now: float) -> bool:
        """The newest process of a worker was past its start; how long that may take is not the question here."""
        died = max((at for at, victim in kills if victim == rank and at <= now), default=0.0)
        return any(died < at < now for at in exchanges[rank])

    checked = 0
    for killed, victim in kills:
        dying = {rank for at, rank in kills if killed <= at < killed + 2}
        for rank in (rank for rank in set(range(8)) - dying if trains(rank, killed)):
            checked += 1
            following = [at - killed for at in exchanges[rank] if at > killed]
            assert following and following[0] < 2, f"worker {rank} waited {following[:1]} s after worker {victim} died"
    assert checked >= len(kills), "hardly any worker survived a kill"
    assert not any(row["event"] == "failed" for rank in range(8) for row in going.events(rank))


def test_a_dead_holder_gives_the_workers_lock_back(run):
    done = run(
        """
        import os, pathlib, signal, time, maniple
        held, waited = pathlib.Path("held"), pathlib.Path("waited")
        worker = maniple.join()
        if worker.rank == 0 and not int(os.environ["MANIPLE_RESTARTED"]):
            with worker.lock(timeout_s=1):
                held.touch()
                while not waited.exists(): time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
        if worker.rank == 1:
            while not held.exists(): time.sleep(0.01)
            try:
                with worker.lock(timeout_s=0.1): pass
            except maniple.ManipleError as error:
                print(error)
            waited.touch()
            with worker.lock(timeout_s=10):
                print("got it")
        """,
        "-n", "2", "--restarts", "1",
    )  # fmt: skip
    assert done.process.returncode == 0, done.output
    assert "for the workers' lock (limit 0.1 s)" in done.log(1)
    holder = done.events(0, "join")[0]["pid"]
    assert f"Worker 0 (process {holder}) has held it since " in done.log(1), "the timeout names the holder"
    assert "and is alive. Look at what it does in its `with worker.lock():`, or raise timeout_s." in done.log(1)
    assert "got it" in done.log(1)
