"""Gossip of local and remote workers: kills of the server, cut connections and dead workers change no sum."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from maniple.adapters import adapt
from maniple.layout import Layout
from maniple.peers.mailbox import Mailbox
from maniple.rules import parse_rule
from tests.mailboxes import sums
from tests.process.conftest import MANIPLE, Serve
from tests.process.proxy import Proxy
from tests.waiting import await_, is_gone

SIZE = 20_000
TRAINED = 1500  # steps; later ones would count twice in workers to which others have handed over their share
# Each worker begins with a value of its own, and each step of training adds 1/1024.
EXCHANGING = f"""
    import pathlib, sys, time, numpy as np, maniple
    worker = maniple.join(own_data=True)
    params = {{"x": np.zeros({SIZE})}}
    replica = worker.share(params)
    params["x"][:] = float(sys.argv[1 + worker.rank])
    stop = pathlib.Path("stop remote" if worker.rank > 1 else "stop")  # the run ends with its local workers
    while not stop.exists():
        if replica.steps < {TRAINED}:
            params["x"] += float(sys.argv[5]) / 1024
        replica.step()
        time.sleep(0.002)
"""
LEARNING = """
    import pathlib, time, numpy as np, maniple
    worker = maniple.join(own_data=True)
    params = {"w": np.zeros(1000, "f4")}
    replica = worker.share(params)
    while not pathlib.Path("stop").exists():
        params["w"] += 0.1 * (1 + worker.rank - params["w"])
        replica.step()
        time.sleep(0.002)
    with replica.center():
        worker.log(last=float(params["w"][0]))
"""


@pytest.fixture
def listen(tmp_path):
    """Start `maniple run -n 2`, which other workers can join."""
    going: list[Serve] = []

    def listen(script: str, *options: str, args: tuple[str, ...] = ()) -> Serve:
        (tmp_path / "local.py").write_text("\n".join(line[4:] for line in script.splitlines()))
        command = [str(MANIPLE), "run", "-n", "2", "--listen", "127.0.0.1:0", "--name", "run", *options, "local.py"]
        going.append(Serve(tmp_path, "run", [*command, *args], {}))
        for rank in (0, 1):
            going[0].await_event(rank, "progress", count=2)  # so that the next ones have ranks 2 and 3
        return going[0]

    yield listen
    for name in ("stop remote", "stop"):
        (tmp_path / name).touch()
    for run in going:
        for worker in run.workers:
            worker.kill()
            worker.communicate(timeout=60)
        if run.process.poll() is None:
            run.end()


@contextlib.contextmanager
def stopped(run: Serve) -> Generator[Path]:
    """Stop all processes that write to mailboxes for the length of a `with` block; gives the segment."""
    pids = [run.server_pid, run.pid(0), run.pid(1)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(0.05)
    try:
        yield Path(json.loads((run.folder / "host.json").read_text())["segment"])
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def await_messages(run: Serve, ranks: tuple[int, ...], count: int) -> None:
    """Until each of these workers has sent and received so many more messages."""

    def messages(rank: int) -> tuple[int, int]:
        rows = run.events(rank, "gossip")
        return (rows[-1]["sent"], rows[-1]["received"]) if rows else (0, 0)

    before = {rank: messages(rank) for rank in ranks}
    for rank in ranks:
        await_(lambda rank=rank: all(b - a > count for a, b in zip(before[rank], messages(rank), strict=True)))


def trained_steps(segment: Path, rule: str) -> int:
    """How many steps of training by all workers are in the mailboxes."""
    layout, names = Layout(adapt({"x": np.zeros(SIZE)}).entries), parse_rule(rule).mailbox_vectors
    boxes = [Mailbox.find(segment / f"peers-0.{rank}", layout, names) for rank in range(4)]
    return sum(min(int(box.header()["step"][0]), TRAINED) for box in boxes)


@pytest.mark.usefixtures("without_numba")
@pytest.mark.parametrize(
    ("rule", "values", "weight", "mean", "is_training"),
    [("gossip:q=0.5", "0 1 2 3 1", 4.0, 1.5, True), ("gossip:q=0.5,elastic=false", "0 2 0 0 0", 1.0, 1.0, False)],
)
def test_kills_of_the_server_and_cut_connections_change_no_sum(
    rule, values, weight, mean, is_training, listen, tmp_path
):
    run = listen(EXCHANGING, "--rule", rule, args=tuple(values.split()))
    proxy = Proxy(run.address, cuts=30, most_bytes=2_000_000)
    for rank in (2, 3):
        run.join(EXCHANGING, *values.split(), via=proxy.address)
        run.await_event(rank, "gossip")
    for _ in range(3):
        server = run.server_pid
        os.kill(server, signal.SIGKILL)
        await_(lambda server=server: run.server_pid != server)
        await_messages(run, (2, 3), 5)
    await_(lambda: proxy.cuts >= 10)
    with stopped(run) as segment:
        total, vector = sums(segment, parse_rule(rule), SIZE)
        trained = is_training * trained_steps(segment, rule) / 1024 / 4
    assert total == pytest.approx(weight, rel=1e-12)
    np.testing.assert_allclose(vector / total, mean + trained, rtol=1e-9)
    for rank in range(4):
        await_(lambda rank=rank: run.events(rank, "progress")[-1]["step"] > TRAINED)
    (tmp_path / "stop remote").touch()
    for worker in run.workers:
        output, _ = worker.communicate(timeout=60)
        assert worker.returncode == 0, output
    (tmp_path / "stop").touch()
    assert run.wait() == 0, run.output
    np.testing.assert_allclose(run.center["x"], mean + is_training * TRAINED / 1024, rtol=1e-9)
    proxy.close()


@pytest.mark.usefixtures("without_numba")
def test_a_remote_worker_that_is_killed_loses_no_message(listen, tmp_path):
    run = listen(EXCHANGING, "--rule", "gossip:q=0.5", args=("0", "1", "2", "3", "0"))
    for rank in (2, 3):
        run.join(EXCHANGING, "0", "1", "2", "3", "0")
        run.await_event(rank, "gossip")
    await_messages(run, (2, 3), 5)
    pid = run.pid(3)
    os.kill(pid, signal.SIGKILL)
    await_(lambda: is_gone(pid))
    await_messages(run, (0, 1, 2), 20)
    with stopped(run) as segment:
        total, vector = sums(segment, parse_rule("gossip"), SIZE)
    assert total == pytest.approx(4.0)
    np.testing.assert_allclose(vector / total, 1.5, rtol=1e-9)
    for name in ("stop remote", "stop"):
        (tmp_path / name).touch()
    assert run.wait() == 0, run.output


@pytest.mark.usefixtures("without_numba")
@pytest.mark.parametrize(
    ("rule", "wire"),
    [("gossip:q=0.2", "int8"), ("gossip:q=0.2,elastic=false", "bfloat16"), ("noloco:every=20", "int8")],
)
def test_workers_train_together_whether_they_are_remote_or_not(rule, wire, listen, tmp_path):
    run = listen(LEARNING, "--rule", rule, "--wire", wire)
    run.join(LEARNING)
    run.await_event(2, "gossip")
    await_messages(run, (0, 1, 2), 5)
    (tmp_path / "stop").touch()
    output, _ = run.workers[0].communicate(timeout=60)
    assert run.workers[0].returncode == 0, output
    assert run.wait() == 0, run.output
    assert 1.2 < run.center["w"][0] < 2.8, "the values that the workers draw to are 1, 2 and 3"
    assert 1.2 < run.events(2, "log")[-1]["last"] < 2.8


@pytest.mark.usefixtures("without_numba")
def test_workers_that_are_all_remote_exchange_and_set_the_center(serve, tmp_path):
    served = serve("--rule", "gossip:q=0.2,elastic=false")
    for rank in (0, 1):
        served.join(LEARNING)
        served.await_event(rank, "gossip")
    await_messages(served, (0, 1), 5)
    (tmp_path / "stop").touch()
    for worker in served.workers:
        output, _ = worker.communicate(timeout=60)
        assert worker.returncode == 0, output
    assert served.end() == 0, served.output
    assert 1.05 < served.center["w"][0] < 1.95
