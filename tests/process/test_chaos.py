"""Workers, servers, hosts and networks that die at any moment: the center equals exactly what was contributed."""

import json
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import maniple
from tests.waiting import PATIENCE_S, await_, is_gone

from .conftest import Serve
from .proxy import Proxy

# Adds 1 to every element at each step, until told to stop; says how many steps it made. With a fourth argument, its
# exchanges run in the background.
COUNTING = """
    import sys, time, pathlib
    import numpy as np, maniple
    stop, sizes = pathlib.Path(sys.argv[1]), [int(n) for n in sys.argv[2].split(",")]
    worker = maniple.join()
    params = {f"p{i}": np.zeros(n) for i, n in enumerate(sizes)}
    replica = worker.share(params, rule=maniple.Downpour(overlap=len(sys.argv) > 4), pace=maniple.Every(1))
    print("start", worker.rank, params["p0"][0], flush=True)
    while not stop.exists():
        for value in params.values():
            value += 1
        replica.step()
        time.sleep(float(sys.argv[3]) if len(sys.argv) > 3 else 0.002)
    worker.leave()
    print("steps", replica.steps, flush=True)
"""


def steps_of(worker) -> int:
    """A worker has ended well; how many steps it made."""
    output = worker.communicate(timeout=PATIENCE_S)[0]
    assert worker.returncode == 0, output
    return int(output.rpartition("steps ")[2])


def counted(host: Serve) -> dict[str, np.ndarray]:
    """End the host; its center."""
    assert host.end() == 0, host.output
    return host.center


def lineage(host: Serve) -> str:
    return json.loads((host.folder / "run.json").read_text())["lineage"]


def exchanges(host: Serve, rank: int) -> list[dict]:
    return host.events(rank, "exchange")


def third_after(host: Serve, rank: int, then: float) -> float:
    """When a worker has ended its third exchange of those begun after `then`."""
    rows = await_(lambda: rows if len(rows := [r for r in exchanges(host, rank) if r["start"] > then]) >= 3 else None)
    return rows[2]["end"]


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("without_numba")  # so short a life ends before it is loaded: until then NumPy computes anyway
def test_a_server_killed_100_times_at_random_instants_loses_and_doubles_nothing(serve, tmp_path, monkeypatch):
    host = serve("--snapshot-every", "0")
    stop = tmp_path / "stop"
    workers = [host.join(COUNTING, str(stop), "40000,3,0,70001", *more) for more in ((), ("0.002", "overlap"))]
    host.connect(monkeypatch)
    pushes, halt = [0, 0], threading.Event()
    client = maniple.Client(timeout_s=60)
    client.create("whole", np.zeros(50_000, "int64"))

    def push() -> None:
        while not halt.is_set():
            client.push("whole", np.ones(50_000, "int64"), alpha=1, beta=1)
            pushes[0] += 1
            client.push_at("whole", [[7], [49_999]], [1, 1], alpha=1, beta=1)
            pushes[1] += 1
            time.sleep(0.002)

    thread = threading.Thread(target=push)
    thread.start()
    try:
        host.await_event(1, "exchange")
        before, rng = lineage(host), random.Random(1)
        worst_s = 0.0
        for kill in range(1, 101):
            host.await_event("server", "serving", count=kill)
            made = pushes[0]
            begin = time.monotonic()
            await_(lambda made=made: pushes[0] > made, 5)  # it exchanges again, within 5 s of the server's return
            worst_s = max(worst_s, time.monotonic() - begin)
            time.sleep(rng.random() * 0.15)
            os.kill(host.server_pid, signal.SIGKILL)
            host.await_event("host", "server", count=kill + 1)
    finally:
        halt.set()
        stop.touch()
        thread.join(90)
    steps = sum(steps_of(worker) for worker in workers)
    value = client.pull("whole")
    client.close()
    assert len(host.events("server", "serving")) == 101
    assert sum(row["finished"] for row in host.events("server", "serving")) >= 1, "no kill fell into a contribution"
    assert lineage(host) == before
    expected = np.full(50_000, pushes[0])
    expected[[7, 49_999]] += pushes[1]
    np.testing.assert_array_equal(value, expected)
    center = counted(host)
    for name, array in center.items():
        np.testing.assert_array_equal(array, steps, err_msg=name)
    assert host.events("server", "left")[-1]["live"] == 0
    print(f"{steps} steps, {pushes[0]} pushes; worst return {worst_s:.2f} s")


@pytest.mark.timeout(200)
def test_500_cuts_at_random_bytes_lose_and_double_nothing(serve, tmp_path, monkeypatch):
    host = serve("--snapshot-every", "0")
    stop = tmp_path / "stop"
    proxy = Proxy(host.address, cuts=500, most_bytes=400_000)
    given = (str(stop), "9000,5,0,2000", "0.001")
    workers = [host.join(COUNTING, *given, *more, via=proxy.address) for more in ((), ("overlap",), ("overlap",))]
    monkeypatch.setenv("MANIPLE_ADDRESS", proxy.address)
    monkeypatch.setenv("MANIPLE_TOKEN_FILE", str(host.token))
    pushes = 0
    with maniple.Client(timeout_s=60) as client:
        client.create("n", np.zeros(3000, "float32"))
        deadline = time.monotonic() + 120
        while proxy.cuts < 500:
            client.push("n", np.ones(3000, "float32"), alpha=1, beta=1)
            client.push_part("n", [[5, 2999]], [1, 1], alpha=1, beta=1)
            pushes += 1
            assert time.monotonic() < deadline, f"only {proxy.cuts} cuts"
        stop.touch()
        steps = sum(steps_of(worker) for worker in workers)
        expected = np.full(3000, pushes, "float32")
        expected[[5, 2999]] *= 2
        np.testing.assert_array_equal(client.pull("n"), expected)
    proxy.close()
    for name, array in counted(host).items():
        np.testing.assert_array_equal(array, steps, err_msg=name)
    assert steps > 100


def test_a_killed_host_is_followed_by_one_that_finds_the_center_in_memory(serve, tmp_path):
    host = serve("--snapshot-every", "0")
    stop = tmp_path / "stop"
    workers = [host.join(COUNTING, str(stop), "30000,3") for _ in range(2)]
    for rank in range(2):
        host.await_event(rank, "exchange")
    before, address = lineage(host), host.address
    for kill in range(1, 4):
        server = host.server_pid
        host.kill()
        await_(lambda server=server: is_gone(server), 5)
        time.sleep(0.3)
        host = serve(name=host.folder.name)
        host.await_event("host", "adopted", count=kill)
        back = host.await_event("server", "serving", count=kill + 1)[-1]["timestamp"]
        for rank in range(2):  # three exchanges each, within 10 s
            assert third_after(host, rank, back) - back < 10
    assert (lineage(host), host.address) == (before, address)
    assert sorted({row["worker"] for row in host.events("server", "returned")}) == [0, 1]
    stop.touch()
    steps = sum(steps_of(worker) for worker in [*workers])
    for name, array in counted(host).items():
        np.testing.assert_array_equal(array, steps, err_msg=name)
    assert "no exchange was lost" in host.output


def test_lost_memory_is_restored_from_the_snapshot_and_every_worker_is_notified(serve, tmp_path):
    host = serve("--snapshot-every", "3")
    stop = tmp_path / "stop"
    workers = [host.join(COUNTING, str(stop), "2000", "0.01") for _ in range(2)]  # one parameter: acknowledged or not
    for rank in range(2):
        host.await_event(rank, "exchange")
    before = len(host.events("host", "snapshot"))
    saved = host.await_event("host", "snapshot", count=before + 1)[-1]["timestamp"]
    for rank in range(2):  # well before the next one there is something to lose
        await_(lambda rank=rank: exchanges(host, rank)[-1]["start"] > saved)
    server = host.server_pid
    host.kill()
    died = time.time()
    await_(lambda: is_gone(server), 5)
    (segment,) = Path(os.environ["MANIPLE_SHM"]).glob("maniple-*")
    shutil.rmtree(segment)
    snapshot = host.center["p0"][0]
    successor = serve("--snapshot-every", "0", name=host.folder.name)
    for rank in range(2):
        await_(lambda rank=rank: [row for row in exchanges(successor, rank) if row["timestamp"] > died + 0.5])
    stop.touch()
    steps = [steps_of(worker) for worker in workers]
    restored = [successor.await_event(rank, "restored") for rank in range(2)]
    assert all(len(rows) == 1 for rows in restored)
    # What was acknowledged before the loss and is not in the snapshot is lost; all the rest is there, once.
    acknowledged = [
        max(row["step"] for row in exchanges(successor, rank) if row["end"] <= restored[rank][0]["timestamp"])
        for rank in range(2)
    ]
    expected = snapshot + sum(steps) - sum(acknowledged)
    np.testing.assert_array_equal(counted(successor)["p0"], expected)
    assert snapshot < sum(acknowledged), "nothing was lost, so nothing was tested"
    assert "is lost" in successor.output


def test_killed_and_stopped_workers_do_not_hold_up_the_others(serve, tmp_path):
    host = serve("--snapshot-every", "0")
    stop = tmp_path / "stop"
    workers = [host.join(COUNTING, str(stop), "20000,3") for _ in range(4)]
    for rank in range(4):
        host.await_event(rank, "exchange")
    pids = {rank: host.pid(rank) for rank in range(4)}
    by_pid = {worker.pid: worker for worker in workers}
    by_pid[pids[0]].kill()
    os.kill(pids[1], signal.SIGSTOP)
    then = time.time()
    for rank in (2, 3):  # within 2 s each
        await_(lambda rank=rank: [r for r in exchanges(host, rank) if r["start"] > then])
        first = min(r["end"] for r in exchanges(host, rank) if r["start"] > then)
        assert first - then < 2, f"worker {rank} waited {first - then:.1f} s"
    lost = host.await_event("server", "lost", count=2)
    assert {row["worker"] for row in lost} == {0, 1}
    assert max(row["timestamp"] for row in lost) - then < 20
    time.sleep(max(0.0, 10 - (time.time() - then)))
    os.kill(pids[1], signal.SIGCONT)
    then = time.time()
    returned = host.await_event("server", "returned")[0]
    assert returned["worker"] == 1
    assert returned["timestamp"] - then < 15
    late = host.join(COUNTING, str(stop), "20000,3")
    host.await_event(4, "exchange")
    stop.touch()
    steps = [steps_of(worker) for worker in [*(w for w in workers if w.pid != pids[0]), late]]
    for name, array in counted(host).items():
        # The killed worker's contributions are whole: each element has the same.
        assert array.min() == array.max(), name
        known = max(row["step"] for row in exchanges(host, 0))
        assert array[0] >= sum(steps) + known, name


def test_a_stopped_server_is_waited_for(serve, tmp_path):
    host = serve("--snapshot-every", "0")
    stop = tmp_path / "stop"
    workers = [host.join(COUNTING, str(stop), "20000,3") for _ in range(2)]
    host.await_event(1, "exchange")
    server = host.server_pid
    os.kill(server, signal.SIGSTOP)
    time.sleep(10)
    os.kill(server, signal.SIGCONT)
    now = time.time()
    for rank in range(2):  # within 15 s each
        assert third_after(host, rank, now) - now < 15
    assert len(host.await_event("server", "returned", count=2)) == 2, "they had given it up after 6 s"
    assert not host.events("server", "lost"), "the server was away, and not the workers"
    stop.touch()
    steps = sum(steps_of(worker) for worker in workers)
    for name, array in counted(host).items():
        np.testing.assert_array_equal(array, steps, err_msg=name)


def test_local_workers_share_the_center_with_those_elsewhere_while_the_server_dies(start, tmp_path):
    stop = tmp_path / "stop"
    run = start(COUNTING, "-n", "2", "--listen", "127.0.0.1:0", "--snapshot-every", "0", args=(str(stop), "30000,3"))
    run.await_event(0, "exchange")
    far = Serve.join(_joinable(run, tmp_path), COUNTING, str(stop), "30000,3")
    run.await_event(2, "exchange")
    for kill in range(1, 6):
        run.await_event("server", "serving", count=kill)
        time.sleep(0.2)
        os.kill(run.events("host", "server")[-1]["pid"], signal.SIGKILL)
    run.await_event("server", "serving", count=6)
    stop.touch()
    steps = steps_of(far)
    assert run.wait() == 0, run.output
    steps += sum(int(run.log(rank).rpartition("steps ")[2]) for rank in range(2))
    for name, array in run.center.items():
        np.testing.assert_array_equal(array, steps, err_msg=name)


def _joinable(run, folder: Path):
    """A `maniple run --listen` as something to join."""
    run.workers, run._here = [], folder
    run.__class__ = type("Joinable", (Serve,), {})
    return run
