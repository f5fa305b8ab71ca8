"""Synchronous rules in real runs: what p workers make is what one worker makes of all their batches."""

import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import require
from tests.contract.collectives_ranks import find_mpiexec
from tests.waiting import PATIENCE_S, await_

from .conftest import BARE, MANIPLE, Run

pytest.importorskip("torch")

# Several models in one run, each shared with a rule of its own, and trained for a few steps on parts of equal batches.
LESSONS = """
    import os, sys
    if os.environ["MANIPLE_WORLD"] in "34":
        sys.modules["numba"] = None  # so many workers begin sooner without it; one and two have it
    import numpy as np
    import torch
    from torch import nn
    import maniple

    torch.set_num_threads(1)
    worker = maniple.join()
    data = torch.Generator().manual_seed(5)
    X, Y = torch.randn(12, 24, 6, generator=data), torch.randint(0, 3, (12, 24), generator=data)
    ends = [24 * r * (r + 1) // (worker.world * (worker.world + 1)) for r in range(worker.world + 1)]
    found = {}

    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare, self.some = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x, rank=0):
            return self.used(x) + (self.some(x) if rank == 0 else 0)

    def build(kind="plain"):
        torch.manual_seed(0)
        if kind == "spare":
            return Spare()
        norm = [nn.BatchNorm1d(8)] if kind == "norm" else []
        return nn.Sequential(nn.Linear(6, 8), *norm, nn.Tanh(), nn.Linear(8, 3))

    def train(name, rule, *, kind="plain", uneven=False, parts=1, clip=None, momentum=0.9, wrap=lambda m: m, pace=None,
              wire=None, lr=0.1, decay=0.01):
        model = build(kind)
        shared = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=decay)
        replica = worker.share(shared, optimizer, rule=rule, pace=pace, wire=wire)
        for x, y in zip(X, Y):
            size = 24 // worker.world
            low, high = ends[worker.rank:worker.rank + 2] if uneven else (size * worker.rank, size * (worker.rank + 1))
            x, y = x[low:high], y[low:high]
            replica.samples = len(y)
            optimizer.zero_grad()
            for i in range(parts):
                with replica.no_sync():
                    more = {"rank": worker.rank} if kind == "spare" else {}
                    loss = nn.functional.cross_entropy(shared(x[i::parts], **more), y[i::parts])
                    (loss * len(y[i::parts]) / len(y)).backward()
            if clip:
                replica.reduce()
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        values = {n: p.detach().numpy() for n, p in model.named_parameters()}
        values |= {n: b.numpy() for n, b in model.named_buffers() if b.is_floating_point()}
        found.update({f"{name}/{n}": v for n, v in values.items()})

    train("bsp", maniple.BSP(check_every=3))
    train("uneven", maniple.BSP(), uneven=True)
    p = worker.world
    train("sum", maniple.BSP(op="sum", check_every=3), decay=0)
    train("normed sum", maniple.BSP(op="sum", check_every=3), kind="norm", decay=0)
    train("normed rate", maniple.BSP(), kind="norm", decay=0, lr=0.1 * p)
    train("clipped sum", maniple.BSP(op="sum"), clip=0.05)
    train("clipped rate", maniple.BSP(), clip=0.05 / p, lr=0.1 * p, decay=0.01 / p)
    for p in (2, 3, 4):
        if worker.world in (1, p):
            train(f"rate {p}", maniple.BSP(), decay=0, lr=0.1 * p)
    train("parts", maniple.BSP(), parts=2)
    train("clipped", maniple.BSP(), clip=0.05)
    train("spare", maniple.BSP(), kind="spare")
    train("norm", maniple.BSP(norm="synchronised"), kind="norm")
    train("norm uneven", maniple.BSP(norm="synchronised"), kind="norm", uneven=True)
    train("compiled", maniple.BSP(), wrap=lambda m: torch.compile(m, backend="eager"))
    train("plain sgd", maniple.BSP(), momentum=0)
    train("local 1", maniple.LocalSGD(1, check_every=3), momentum=0)
    train("local 3", maniple.LocalSGD(3, momentum="average"))
    train("reset", maniple.LocalSGD(3, momentum="reset"))
    train("msync", maniple.MSync(worker.world))
    train("half", maniple.BSP(), wire="bfloat16")
    for wire in ("int8", "int4", "topk"):
        train(wire, maniple.BSP(check_every=3), wire=wire)
        train(f"local {wire}", maniple.LocalSGD(3, check_every=2), wire=wire)
    train("norm int4", maniple.LocalSGD(3, check_every=2), kind="norm", wire="int4")
    train("spare topk", maniple.BSP(check_every=3), kind="spare", wire="topk")
    train("elastic", maniple.EASGD(sync=True), pace=maniple.Every(3))
    train("downpour", maniple.Downpour(sync=True), momentum=0)
    np.savez(f"{sys.argv[1]}-{worker.rank}.npz", **found)
"""


@pytest.fixture(scope="module")
def lessons(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, np.ndarray]]]:
    """What each of p workers ended with."""
    known: dict[int, list[dict[str, np.ndarray]]] = {}

    def look(world: int) -> list[dict[str, np.ndarray]]:
        if world not in known:
            folder = tmp_path_factory.mktemp(f"lessons{world}")
            script = folder / "script.py"
            script.write_text(textwrap.dedent(LESSONS))
            run = Run(folder, "run", [str(MANIPLE), "run", "--name", "run", "-n", str(world), "script.py", "out"], {})
            assert run.wait() == 0, run.output
            known[world] = [dict(np.load(folder / f"out-{rank}.npz")) for rank in range(world)]
        return known[world]

    return look


def of(found: dict[str, np.ndarray], lesson: str) -> np.ndarray:
    return np.concatenate([v.ravel() for name, v in found.items() if name.startswith(f"{lesson}/")])


EQUAL = ["bsp", "uneven", "parts", "clipped", "norm", "norm uneven", "compiled", "plain sgd", "local 1", "msync"]
COARSE = ["int8", "int4", "topk", "local int8", "local int4", "local topk", "norm int4"]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("lesson", EQUAL)
def test_p_workers_equal_one_on_all_their_batches(lessons: Any, world: int, lesson: str):
    alone = of(lessons(1)[0], lesson)
    for found in lessons(world):
        np.testing.assert_allclose(of(found, lesson), alone, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    "lesson",
    [*EQUAL, "spare", "half", "reset", "downpour", "sum", "normed sum", "clipped sum", "spare topk", *COARSE],
)
def test_replicas_are_the_same_to_the_bit(lessons: Any, world: int, lesson: str):
    first, *others = [of(found, lesson).tobytes() for found in lessons(world)]
    assert all(other == first for other in others)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_summed_gradients_are_the_mean_with_p_times_the_learning_rate(lessons: Any, world: int):
    alone = of(lessons(1)[0], f"rate {world}")
    for found in lessons(world):
        if world != 3:  # a power of two changes no digit: also buffers, which are averaged, are the same to the bit
            assert of(found, "sum").tobytes() == of(found, f"rate {world}").tobytes()
            assert of(found, "normed sum").tobytes() == of(found, "normed rate").tobytes()
        for mine, expected in ((of(found, "sum"), alone), (of(found, "clipped sum"), of(found, "clipped rate"))):
            np.testing.assert_allclose(mine, expected, rtol=5e-5, atol=5e-6)


def test_local_sgd_every_step_is_bsp(lessons: Any):
    for found in lessons(2):
        np.testing.assert_allclose(of(found, "local 1"), of(found, "plain sgd"), rtol=2e-5, atol=2e-6)


def test_half_precision_on_the_wire_is_near_full_precision(lessons: Any):
    for found in lessons(2):
        np.testing.assert_allclose(of(found, "half"), of(found, "bsp"), rtol=0.05, atol=0.01)
        assert not np.array_equal(of(found, "half"), of(found, "bsp"))


def test_coarse_codecs_train_and_int8_comes_near_full_precision(lessons: Any):
    """Topk has sent only a few of all gradients after these few steps."""
    for found in lessons(2):
        np.testing.assert_allclose(of(found, "int8"), of(found, "bsp"), rtol=0.05, atol=0.02)
        np.testing.assert_allclose(of(found, "local int8"), of(found, "local 3"), rtol=0.05, atol=0.05)
        for lesson in COARSE:
            assert np.isfinite(of(found, lesson)).all()
            assert not np.array_equal(of(found, lesson), of(found, "bsp"))
        for name, variance in found.items():
            assert "running_var" not in name or variance.min() > 0, name


def test_parameters_that_nobody_uses_are_left_alone(lessons: Any):
    begun = lessons(1)[0]
    for found in lessons(2):  # weight decay would have changed them
        assert np.array_equal(found["spare/spare.weight"], begun["spare/spare.weight"])
        assert not np.array_equal(found["spare/some.weight"], begun["spare/some.weight"])  # used by worker 0 alone
        assert np.array_equal(found["spare topk/spare.weight"], begun["spare/spare.weight"])


def test_synchronous_elastic_averaging_and_downpour_train(lessons: Any):
    for lesson in ("elastic", "downpour", "local 3"):
        values = [of(found, lesson) for found in lessons(2)]
        assert all(np.isfinite(value).all() for value in values)
        assert np.abs(values[0] - values[1]).max() < 0.5


def test_a_sum_counts_each_worker_once_but_for_those_without_samples_or_with_nan(run: Any, without_numba: None):
    script = """
        import numpy as np, maniple
        worker = maniple.join(own_data=True)
        w = {"w": np.zeros(1000, np.float32)}
        replica = worker.share(w, rule=maniple.BSP(op="sum", nonfinite="skip"))
        sums = []
        for samples, value in [((4, 1, 2), 1), ((4, 1, 0), 1), ((4, 1, 2), np.nan), ((0, 0, 0), 1)]:
            replica.samples = samples[worker.rank]
            gradient = {"w": np.full(1000, (worker.rank + 1) * (value if worker.rank == 1 else 1), np.float32)}
            replica.reduce(gradient)
            replica.step()
            sums.append([float(gradient["w"].min()), float(gradient["w"].max())])
        assert sums[:3] == [[6, 6], [3, 3], [4, 4]], sums
    """
    done = run(script, "-n", "3")
    assert done.description["exit_code"] == 0, done.output + done.log(0)


TRAIN = """
    import sys, time
    import numpy as np
    import maniple

    worker = maniple.join()
    w = {"w": np.ones(1000, np.float32)}
    replica = worker.share(w, rule=maniple.BSP(check_every=7))
    for step in range(int(sys.argv[1])):
        gradient = {"w": np.full(1000, 0.001 * (worker.rank + 1), np.float32)}
        replica.reduce(gradient)
        w["w"] -= gradient["w"]
        replica.step()
        worker.log(rounds=replica.rounds, first=float(w["w"][0]))
        time.sleep(float(sys.argv[2]))
    worker.log(rounds=replica.rounds, last=float(w["w"][0]))
"""


def test_killed_worker_is_left_behind_and_comes_back(start: Any):
    run = start(TRAIN, "-n", "3", "--restarts", "1", args=("150", "0.05"))
    run.await_event(2, "log", count=10)
    victim = run.pid(1)
    os.kill(victim, signal.SIGKILL)
    killed = max(row["timestamp"] for row in run.events(1, "log"))
    assert run.wait() == 0, run.output
    for rank in (0, 2):
        rows = [row["timestamp"] for row in run.events(rank, "log")]
        following = [b - a for a, b in itertools.pairwise(rows) if b > killed]
        assert max(following) < 2.0  # the next step after the kill, and the entry of the newcomer
    assert run.events(1, "entered")  # it took the others' state
    by_rounds: dict[int, set[float]] = {}
    for rank in range(3):
        for row in run.events(rank, "log"):
            by_rounds.setdefault(row["rounds"], set()).add(row.get("first", row.get("last")))
    assert all(len(values) == 1 for values in by_rounds.values())  # the same replica after the same round, always
    assert run.center["w"][0] == pytest.approx(min(v for values in by_rounds.values() for v in values))


@pytest.mark.usefixtures("without_numba")
def test_workers_with_fewer_batches_do_not_hold_up_the_others(run: Any):
    script = """
        import numpy as np, maniple
        worker = maniple.join()
        w = {"w": np.zeros(10, np.float32)}
        replica = worker.share(w, rule=maniple.BSP())
        for epoch in range(3):
            for batch in range(4 + 3 * worker.rank):      # worker 1 has more of them in each epoch
                gradient = {"w": np.ones(10, np.float32)}
                replica.reduce(gradient)
                w["w"] -= gradient["w"]
                replica.step()
            total = worker.all_reduce(np.float64(batch + 1), op="sum")
            worker.log(total=float(total), first=float(w["w"][0]))
    """
    done = run(script, "-n", "2")
    assert done.description["exit_code"] == 0, done.output
    assert [row["total"] for row in done.events(0, "log")] == [11.0] * 3
    # Each round is one step of 1: worker 1 has made as many as it had batches.
    assert done.center["w"][0] <= -21


@pytest.mark.usefixtures("without_numba")
def test_replicas_that_part_are_found_and_named(run: Any):
    script = """
        import numpy as np, maniple
        worker = maniple.join()
        w = {"a": np.zeros(10, np.float32), "b": np.zeros(10, np.float32)}
        replica = worker.share(w, rule=maniple.BSP(check_every=5))
        for step in range(20):
            gradient = {name: np.ones(10, np.float32) for name in w}
            replica.reduce(gradient)
            for name in w:
                w[name] -= gradient[name] * (2 if worker.rank == 2 and name == "b" and step > 6 else 1)
            replica.step()
    """
    done = run(script, "-n", "3")
    assert done.description["exit_code"] == 1
    assert "'b' of worker 2 differs" in done.log(0) and "'b' of worker 2 differs" in done.log(2)


def test_wrapped_model_is_refused_with_the_reason(run: Any):
    script = """
        import os, torch, maniple
        import torch.distributed as dist
        worker = maniple.join()
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        worker.share(model, torch.optim.SGD(model.parameters(), lr=0.1), rule=maniple.BSP())
    """
    done = run(script, "-n", "1")
    assert done.description["exit_code"] == 2
    assert "wrapped in DistributedDataParallel" in done.log(0) and "model.module" in done.log(0)


@pytest.mark.usefixtures("without_numba")
def test_different_calls_are_an_error_that_names_both(run: Any):
    script = """
        import numpy as np, maniple
        worker = maniple.join()
        if worker.rank:
            worker.broadcast(np.zeros(3))
        else:
            worker.all_reduce(np.zeros(5))
    """
    done = run(script, "-n", "2")
    assert done.description["exit_code"] == 1
    assert "all_reduce" in done.log(0) and "broadcast" in done.log(0)


@pytest.mark.usefixtures("without_numba")
def test_waiting_has_a_deadline_and_names_who_and_where(run: Any):
    script = """
        import time, numpy as np, maniple
        worker = maniple.join()
        worker.barrier()
        if worker.rank:
            time.sleep(60)
        worker.all_reduce(np.zeros(5))
    """
    done = run(script, "-n", "2", "--collectives-deadline", "1")
    assert done.description["exit_code"] == 1
    assert "worker 1 in all_reduce" in done.log(0) and "limit 1 s" in done.log(0)


@pytest.mark.usefixtures("without_numba")
def test_comparing_replicas_needs_no_memory_that_was_not_there_from_the_beginning(run: Any, tiny: Any):
    memory = tiny("shm", "8m")
    script = """
        import os, sys
        import numpy as np, maniple
        worker = maniple.join()
        w = {f"w{i}": np.zeros(4, np.float32) for i in range(2000)}
        replica = worker.share(w, rule=maniple.BSP(check_every=5))
        for step in range(12):
            if step == 2:
                if worker.rank == 0:
                    with open(sys.argv[1], "wb", 0) as file:
                        try:
                            while file.write(bytes(4096)):
                                pass
                        except OSError:
                            print("full", flush=True)
                print(worker.all_reduce(1.0, "sum"), flush=True)
            replica.reduce({name: np.ones(4, np.float32) for name in w})
            replica.step()
    """
    done = run(script, "-n", "2", args=(str(memory / "filler"),), env=BARE | {"MANIPLE_SHM": str(memory)})
    assert done.process.returncode == 0 and "full" in done.log(0), done.output
    assert "2.0" in done.log(1)


@pytest.mark.usefixtures("without_numba")
@pytest.mark.parametrize(("collectives", "world"), [("shared", 3), ("torch", 2)])
def test_who_waits_for_a_stopped_worker_says_so(start: Any, collectives: str, world: int):
    script = """
        import numpy as np, maniple
        worker = maniple.join()
        w = {"w": np.zeros(4, np.float32)}
        replica = worker.share(w, rule=maniple.BSP())
        while not worker.should_stop:
            replica.reduce({"w": np.ones(4, np.float32)})
            replica.step()
    """
    run = start(script, "-n", str(world), "--collectives", collectives, env=BARE)
    *others, last = range(world)
    stopped = run.pid(last)
    await_(lambda: run.events(last, "progress"))
    os.kill(stopped, signal.SIGSTOP)
    try:
        for rank in others:
            rows = await_(lambda rank=rank: [row for row in run.events(rank, "waiting") if row["seconds"] > 3])
            assert rows[-1]["for"] == [last]
        shown = subprocess.run([MANIPLE, "status", run.folder], capture_output=True, text=True, check=True).stdout
        assert len(re.findall(rf"waiting for worker {last} \(\d+ s\)", shown)) == len(others), shown
    finally:
        os.kill(stopped, signal.SIGCONT)
    for rank in others:
        assert run.await_event(rank, "waited")[0]["for"] == [last]
    run.signal(signal.SIGTERM)
    run.wait()


# Worker 1 is killed in epoch 1. The others begin epoch 2 when the launcher has noticed it.
LOSING = """
    import os, pathlib, signal, time
    import numpy as np
    import maniple

    worker = maniple.join()
    w = {"w": np.zeros(8, "f4")}
    replica = worker.share(w)
    looks = worker.sampler(12, shuffle=False, validation=True)
    sampler = worker.sampler(60)
    for epoch in worker.epochs(1000):
        while epoch == 2 and not any(pathlib.Path(os.environ["MANIPLE_SEGMENT"]).glob("gone-*")):
            time.sleep(0.01)
        for batch in sampler.batches(5):
            if worker.rank == 1 and replica.steps == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            gradient = {"w": np.ones(8, "f4")}
            replica.reduce(gradient)
            w["w"] += gradient["w"]
            replica.step()
            time.sleep(0.01)
        worker.log(epoch=epoch, looks=list(looks), length=len(sampler), steps=replica.steps)
"""


@pytest.mark.usefixtures("without_numba")
@pytest.mark.parametrize("rule", ["bsp", "localsgd:k=2"])
def test_the_others_continue_without_a_killed_worker_and_resume_where_they_are(start: Any, rule: str):
    run = start(LOSING, "-n", "3", "--rule", rule)
    rows = {rank: run.await_event(rank, "log", count=6) for rank in (0, 2)}
    run.signal(signal.SIGINT)
    assert run.wait() == 130
    assert "worker 1 was killed by SIGKILL" in run.output and "2 left, and the run continues" in run.output
    for rank in (0, 2):
        assert [row["steps"] for row in rows[rank][:6]] == [4, 8, 12, 16, 20, 24], "as many as before"
        assert {row["length"] for row in rows[rank]} == {20}, "as schedules count on"
    for first, second in zip(rows[0][3:], rows[2][3:], strict=False):
        assert sorted(first["looks"] + second["looks"]) == list(range(12)), "they look at all of the validation data"
    assert run.description["ends"] == {"0": "stopped", "1": "killed by SIGKILL", "2": "stopped"}
    again = subprocess.Popen(
        [MANIPLE, "run", "--resume", str(run.folder)], cwd=run.folder.parent.parent, stdout=subprocess.PIPE, text=True
    )
    assert again.stdout is not None
    line = next(text for text in again.stdout if "it continues from step" in text)
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=PATIENCE_S)
    assert int(line.partition("epoch ")[2].partition(",")[0]) >= 5, line


@pytest.mark.usefixtures("without_numba")
def test_over_torch_a_killed_worker_is_named_and_ends_the_run(start: Any):
    run = start(TRAIN, "-n", "3", "--collectives", "torch", "--collectives-deadline", "20", args=("10000", "0.02"))
    run.await_event(2, "log", count=5)
    os.kill(run.pid(1), signal.SIGKILL)
    assert run.wait() == 1
    assert "worker 1 was killed by SIGKILL, and collectives over torch cannot continue" in run.output


REPEAT = """
    import hashlib, sys
    import numpy as np
    import torch
    import maniple

    torch.set_num_threads(1)
    worker = maniple.join()
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    replica = worker.share(model, optimizer, rule=maniple.BSP())
    data = torch.randn(480, 6, generator=torch.Generator().manual_seed(1))
    batches = torch.utils.data.DataLoader(data, batch_size=4, sampler=worker.sampler(data))
    while replica.steps < 50:
        for x in batches:
            if replica.steps == 50:
                break
            optimizer.zero_grad()
            model(x + 0.01 * torch.randn_like(x)).square().mean().backward()
            optimizer.step()
    values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"[{worker.rank} {hashlib.sha256(values).hexdigest()}]", flush=True)
"""


@pytest.mark.parametrize("collectives", ["shared", "torch", "mpi"])
def test_deterministic_runs_are_the_same_to_the_bit(run: Any, tmp_path: Path, collectives: str):
    found = []
    env = {} if collectives == "shared" else BARE
    for _ in range(2):
        if collectives == "mpi":
            launcher = find_mpiexec()
            require("mpi", launcher is not None and find_spec("mpi4py") is not None, "no mpi4py with mpiexec of mpich")
            (tmp_path / "script.py").write_text(textwrap.dedent(REPEAT))
            asked = os.environ | env | {"MANIPLE_DETERMINISTIC": "1", "MANIPLE_COLLECTIVES": "mpi"}
            command = [str(launcher), "-n", "2", sys.executable, "script.py"]
            done = subprocess.run(command, cwd=tmp_path, env=asked, capture_output=True, text=True, timeout=PATIENCE_S)
            assert done.returncode == 0, done.stdout + done.stderr
            said = done.stdout
        else:
            going = run(REPEAT, "-n", "2", "--deterministic", "--collectives", collectives, env=env)
            assert going.description["exit_code"] == 0, going.output
            said = going.log(0) + going.log(1)
        found.append(sorted(re.findall(r"\[(\d) ([0-9a-f]{64})\]", said)))
    first, second = found
    assert len(first) == 2 and first == second
    assert first[0][1] == first[1][1]  # and both workers have the same replica


@pytest.mark.usefixtures("without_numba")
def test_rules_that_depend_on_who_is_faster_are_not_deterministic(run: Any):
    script = """
        import numpy as np, maniple
        maniple.join().share({"w": np.zeros(3)}, rule=maniple.EASGD())
    """
    done = run(script, "-n", "2", "--deterministic")
    assert done.description["exit_code"] == 2
    assert "depends on which comes first" in done.log(0) + done.log(1)
