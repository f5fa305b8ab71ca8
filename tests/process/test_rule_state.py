"""State that a rule keeps at the center and at its workers survives kills of the server and of workers, and --resume.

The rule of these tests adds its momentum to the center, whatever the replica is. After n exchanges of a chunk by all
workers together, it has exactly the count n and the values that n repetitions of the equations give, to the bit. The
replica shows how often its worker has exchanged the chunk. A connection that breaks within an exchange leaves chunks
with different counts.
"""

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from maniple.contracts import Entry
from maniple.layout import Layout
from tests.waiting import PATIENCE_S, await_, is_gone

from .conftest import MANIPLE, Run

SIZES = (300_000, 5, 270_001)  # float64: two chunks and more

TRAINING = """
    import os, pathlib, sys, time
    import numpy as np, maniple

    class Heavy(maniple.Rule):
        center_vectors, center_scalars = ("momentum",), ("count",)
        worker_vectors, worker_scalars = ("own",), ("times",)

        def mix(self, x, c, state):
            state["momentum"] *= 0.9
            state["momentum"] += 1
            state["count"] += 1
            state["own"] += 1
            state["times"] += 1
            return state["own"], c + state["momentum"]

    FIRST = [0, 262_144, 300_005, 562_149]  # elements of the chunks
    stop = pathlib.Path(sys.argv[1])
    worker = maniple.join(own_data=True)
    params = {f"p{i}": np.zeros(n) for i, n in enumerate((300_000, 5, 270_001))}
    replica = worker.share(params, rule=Heavy(), pace=maniple.Every(1))
    print("start", worker.rank, flush=True)
    own = open(f"own-{worker.rank}", "a")  # a row of the events would be lost with a worker that is killed
    while not stop.exists():
        replica.step()
        print(*np.concatenate(list(params.values()))[FIRST], file=own, flush=True)
        if (wait := pathlib.Path(f"wait-{worker.rank}")).exists():
            wait.write_text("waits")  # between two exchanges: within one, the write of a killed worker would be torn
            time.sleep(1000)
        time.sleep(0.01)
    worker.leave()
    print(*np.concatenate(list(params.values()))[FIRST], file=own, flush=True)
    print("end", flush=True)
"""


def repeated(count: int) -> tuple[float, float]:
    """The center and the momentum after so many exchanges."""
    c, momentum = np.float64(0), np.float64(0)
    for _ in range(count):
        momentum = momentum * np.float64(0.9)
        momentum = momentum + np.float64(1)
        c = c + momentum
    return float(c), float(momentum)


def check(run: Run) -> np.ndarray:
    """Each chunk of the newest snapshot is what its number of exchanges gives; return these numbers."""
    values = np.concatenate([run.center[f"p{i}"] for i in range(len(SIZES))])
    state = load_file(run.folder / "center" / "center-0.state.safetensors")
    counts = state["count"]
    chunks = Layout([Entry(f"p{i}", (size,), "float64") for i, size in enumerate(SIZES)]).chunks
    assert len(chunks) == len(counts) == 4
    for chunk, count in zip(chunks, counts, strict=True):
        c, momentum = repeated(int(count))
        np.testing.assert_array_equal(values[chunk.start : chunk.stop], c)
        np.testing.assert_array_equal(state["momentum/float64"][chunk.start : chunk.stop], momentum)
    return counts


def exchanges(run: Run) -> int:
    """The exchanges of all workers so far."""
    return sum(len(run.events(rank, "exchange")) for rank in range(4))


def own(run: Run, rank: int) -> np.ndarray:
    """How many exchanges of each chunk a worker's own state has counted."""
    lines = (run.folder.parents[1] / f"own-{rank}").read_text().splitlines()
    return np.array([float(number) for number in lines[-1].split()])


def test_over_tcp_it_survives_kills_of_the_server_and_of_a_worker_and_a_resume(serve, tmp_path, without_numba):
    host = serve("--snapshot-every", "0")
    stop, rng = tmp_path / "stop", random.Random(3)
    workers = [host.join(TRAINING, str(stop)) for _ in range(3)]
    for rank in range(3):
        host.await_event(rank, "exchange")
    for kill in range(1, 13):
        host.await_event("server", "serving", count=kill)
        made = exchanges(host)
        await_(lambda made=made: exchanges(host) > made)
        time.sleep(rng.random() * 0.1)
        os.kill(host.server_pid, signal.SIGKILL)
        host.await_event("host", "server", count=kill + 1)
        if kill == 6:
            victim = next(i for i in range(3) if host.pid(i) in _processes(workers[2].pid))
            os.kill(host.pid(victim), signal.SIGKILL)  # at any instant: its contribution is in the center or not
    stop.touch()
    for worker in workers[:2]:
        output = worker.communicate(timeout=PATIENCE_S)[0]
        assert worker.returncode == 0, output
    assert host.end() == 0, host.output
    counts = check(host)
    unknown = counts - sum(own(host, rank) for rank in range(3))
    assert ((unknown == 0) | (unknown == 1)).all(), unknown  # whether the victim's last contribution came
    # On with a new host, from the snapshot.
    stop.unlink()
    again = serve(name=host.folder.name)
    late = again.join(TRAINING, str(stop))
    rows = exchanges(again)
    await_(lambda: exchanges(again) > rows + 3)
    stop.touch()
    output = late.communicate(timeout=PATIENCE_S)[0]
    assert late.returncode == 0, output
    assert again.end() == 0, again.output
    rank = int(output.rpartition("start ")[2].split()[0])
    np.testing.assert_array_equal(check(again), counts + own(again, rank))


def test_in_shared_memory_it_survives_kills_of_a_worker_and_of_the_host_and_a_resume(start, tmp_path, without_numba):
    def waiting(run: Run, *ranks: int) -> list[int]:
        """The processes of these workers, once they wait between two exchanges."""
        for rank in ranks:
            (tmp_path / f"wait-{rank}").touch()
        for rank in ranks:
            await_(lambda path=tmp_path / f"wait-{rank}": path.read_text() == "waits")
            (tmp_path / f"wait-{rank}").unlink()
        return [run.pid(rank) for rank in ranks]

    stop = tmp_path / "stop"
    first = start(TRAINING, "-n", "2", "--snapshot-every", "0", args=(str(stop),))
    for rank in range(2):
        first.await_event(rank, "exchange", count=3)
    os.kill(waiting(first, 1)[0], signal.SIGKILL)
    before = exchanges(first)
    await_(lambda: exchanges(first) > before + 3)
    first.signal(signal.SIGINT)
    first.wait()
    counts, own_before = check(first), own(first, 0)
    unknown = counts - own_before - own(first, 1)
    assert ((unknown == 0) | (unknown == 1)).all(), unknown  # the step that was interrupted has no row
    second = Run(tmp_path, first.folder.name, [str(MANIPLE), "run", "--resume", str(first.folder)], {})
    before = exchanges(second)
    await_(lambda: exchanges(second) > before + 6)
    pids = waiting(second, 0, 1)
    second.kill()  # leaves the center in memory
    await_(lambda: all(is_gone(pid) for pid in pids))
    assert (own(second, 0) > own_before).all(), "the worker's own state continues where it was"
    stop.touch()
    third = Run(tmp_path, first.folder.name, [str(MANIPLE), "run", "--resume", str(first.folder)], {})
    assert third.wait() == 0, third.output
    assert (check(third) >= counts + 6).all()


SYNCHRONOUS = """
    import pathlib, sys, time
    import numpy as np, maniple

    class Outer(maniple.LocalSGD):
        center_vectors = ("momentum",)

        def accept(self, x, total, state, moment):
            state["momentum"] *= 0.9
            state["momentum"] += 1
            state["center"] += state["momentum"]
            x[:] = state["center"]

    stop = pathlib.Path(sys.argv[1])
    worker = maniple.join(own_data=True)
    params = {f"p{i}": np.zeros(n) for i, n in enumerate((300_000, 5, 270_001))}
    replica = worker.share(params, rule=Outer(1))
    while not stop.exists():
        replica.step()
        worker.log(rounds=replica.rounds)
        time.sleep(0.01)
"""


def test_newcomers_and_resumed_runs_of_a_synchronous_rule_have_the_state_of_the_center(start, tmp_path, without_numba):
    def check_rounds(run: Run) -> int:
        """Center and momentum are those after the same number of rounds; return it."""
        values = np.concatenate([run.center[f"p{i}"] for i in range(len(SIZES))])
        momentum = load_file(run.folder / "center" / "center-0.state.safetensors")["momentum/float64"]
        (found,) = [n for n in range(2000) if repeated(n) == (values[0], momentum[0])]
        np.testing.assert_array_equal(values, values[0])
        np.testing.assert_array_equal(momentum, momentum[0])
        return found

    def rounds(run: Run, rank: int) -> int:
        return run.events(rank, "log")[-1]["rounds"] if run.events(rank, "log") else 0

    stop = tmp_path / "stop"
    first = start(SYNCHRONOUS, "-n", "2", "--restarts", "1", "--snapshot-every", "0", args=(str(stop),))
    await_(lambda: min(rounds(first, rank) for rank in range(2)) > 5)
    os.kill(first.pid(1), signal.SIGKILL)
    first.await_event(1, "entered")  # its successor has the others' state
    entered = rounds(first, 0)
    await_(lambda: min(rounds(first, rank) for rank in range(2)) > entered + 5)
    first.signal(signal.SIGINT)
    first.wait()
    before = check_rounds(first)
    assert before > entered
    second = Run(tmp_path, first.folder.name, [str(MANIPLE), "run", "--resume", str(first.folder)], {})
    begun = len(second.events(0, "log"))
    await_(lambda: len(second.events(0, "log")) > begun + 5)
    stop.touch()
    assert second.wait() == 0, second.output
    assert check_rounds(second) > before + 5


def _processes(pid: int) -> set[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {pid}.union(*(_processes(int(child)) for child in children))
