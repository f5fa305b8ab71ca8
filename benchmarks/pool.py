"""Cost of a pool's calls, compared with other pools and with the limit of two processes.

Three tasks on 2 workers; all contestants are alive at once and take turns, in one run. Figures are medians over the
rounds, ratios are computed within a round.

    empty     an empty function: microseconds from the call to its result
    gather    100 MB of float32 rows in shuffled order, read by the workers from shared memory: GB/s of rows
    gradient  the CNN of speedup.py on 512 of 2048 images in shuffled order: gradient, mean, step; images per second

    pool          `pool.function(...)(data, batch=rows)`, `pool.train_function(...)(x, y, batch=rows)`
    one process   numpy.take in this process, from private memory
    limit         two independent processes, each with 256 images that stay the same
    executor      concurrent.futures.ProcessPoolExecutor: rows, weights and gradients are pickled
    torch         torch.multiprocessing as DataParallel would use it: data, weights and gradients in shared memory, the
                  mean and the step in this process, requests through pipes
    ray           actors; data and weights in its object store. Measured against the pool in a separate pass after the
                  others, because Ray's own processes do not sleep

Every process has one thread and the same settings of the C library's allocator. Contestants that are not installed are
left out.

    python benchmarks/pool.py [--rounds 11] [--rows pool executor torch ray]
"""

import argparse
import concurrent.futures
import contextlib
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from measure import report
from speedup import ALLOCATOR, build

WORLD, ROW = 2, 3 * 32 * 32
GATHERED = 100_000_000 // (4 * ROW)  # number of rows
BATCH, IMAGES = 512, 2048
TIMES = {"empty": 200, "gather": 4, "gradient": 2}  # calls per turn
KINDS = ("pool", "one process", "limit", "executor", "torch", "ray")
SETTINGS = ALLOCATOR | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
Act = Callable[[np.ndarray], Any]  # takes the row numbers in order


def make_sets() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "large": random.standard_normal((GATHERED, ROW), np.float32),
        "x": random.standard_normal((IMAGES, 3, 32, 32), np.float32),
        "y": random.integers(0, 10, IMAGES),
    }


def halves(rows: np.ndarray) -> list[np.ndarray]:
    return np.array_split(rows, WORLD)


def nothing() -> None:
    """Do nothing."""


class Model:
    """A model and its optimizer in one process."""

    def __init__(self) -> None:
        import torch

        self.module, _, _ = build("cnn")
        self.loss_of = torch.nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)

    def gradients(self, x: Any, y: Any) -> list[Any]:
        self.optimizer.zero_grad()
        self.loss_of(self.module(x), y).backward()
        return [p.grad for p in self.module.parameters()]

    def step(self, each: list[list[Any]]) -> None:
        """Step with the mean of several gradients."""
        import torch

        for p, parts in zip(self.module.parameters(), zip(*each, strict=True), strict=True):
            p.grad = torch.stack([torch.tensor(np.asarray(part)) for part in parts]).mean(0)
        self.optimizer.step()

    @property
    def weights(self) -> list[np.ndarray]:
        return [p.detach().numpy() for p in self.module.parameters()]

    @weights.setter
    def weights(self, values: list[np.ndarray]) -> None:
        import torch

        with torch.no_grad():
            for p, value in zip(self.module.parameters(), values, strict=True):
                p.copy_(torch.as_tensor(value))


def open_pool(sets: dict[str, np.ndarray], stack: contextlib.ExitStack) -> dict[str, Act]:
    import torch

    import maniple

    pool = stack.enter_context(maniple.Pool(WORLD))
    large, x = pool.data(sets["large"]), pool.data(torch.from_numpy(sets["x"]))
    y = pool.data(torch.from_numpy(sets["y"]))
    empty, gather = pool.function(nothing), pool.function(len, scatter=[0], reduce="sum")
    check = pool.function(lambda x: x, scatter=[0], reduce="gather")
    rows = np.random.default_rng(1).permutation(GATHERED)[:1000]
    if not np.array_equal(check(large, batch=rows), sets["large"][rows]):
        raise RuntimeError("the pool gives wrong rows")
    train = pool.train_function(
        build("cnn")[0], lambda m, x, y: torch.nn.functional.cross_entropy(m(x), y), "sgd", lr=0.01
    )
    return {
        "empty": lambda _: empty(),
        "gather": lambda rows: gather(large, batch=rows),
        "gradient": lambda rows: train(x, y, batch=rows),
    }


def open_one_process(sets: dict[str, np.ndarray], _: contextlib.ExitStack) -> dict[str, Act]:
    return {"gather": lambda rows: len(np.take(sets["large"], rows, axis=0))}


def executor_gradients(weights: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    import torch

    model = vars(executor_gradients).setdefault("model", None) or Model()
    executor_gradients.model = model  # kept in this process for the next call
    model.weights = weights
    return [g.numpy() for g in model.gradients(torch.from_numpy(x), torch.from_numpy(y))]


def open_executor(sets: dict[str, np.ndarray], stack: contextlib.ExitStack) -> dict[str, Act]:
    import multiprocessing

    spawn = multiprocessing.get_context("spawn")
    executor = stack.enter_context(concurrent.futures.ProcessPoolExecutor(WORLD, mp_context=spawn))
    model = Model()

    def ask(act: Callable[..., Any], each: list[tuple[Any, ...]]) -> list[Any]:
        return [one.result() for one in [executor.submit(act, *args) for args in each]]

    def gradient(rows: np.ndarray) -> None:
        parts = [(model.weights, sets["x"][part], sets["y"][part]) for part in halves(rows)]
        model.step(ask(executor_gradients, parts))

    return {
        "empty": lambda _: ask(nothing, [()] * WORLD),
        "gather": lambda rows: sum(ask(len, [(sets["large"][part],) for part in halves(rows)])),
        "gradient": gradient,
    }


def torch_worker(link: Any, core: int, sets: dict[str, Any], weights: list[Any], gradients: list[Any]) -> None:
    """Run a worker of torch.multiprocessing: data, weights and gradients are in shared memory."""
    import torch

    os.sched_setaffinity(0, {core})
    model = Model()
    for p, shared in zip(model.module.parameters(), weights, strict=True):
        p.data = shared
    own = sets["x"][: BATCH // WORLD].clone(), sets["y"][: BATCH // WORLD].clone()
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            task, rows = link.recv()
            if task == "gather":
                sets["large"][torch.from_numpy(rows)]
            elif task == "gradient":
                rows = torch.from_numpy(rows)
                for shared, g in zip(gradients, model.gradients(sets["x"][rows], sets["y"][rows]), strict=True):
                    shared.copy_(g)
            elif task == "alone":
                begin = time.perf_counter()
                for _ in range(rows):
                    model.gradients(*own)
                    model.optimizer.step()
                link.send(time.perf_counter() - begin)
                continue
            link.send(None)


def open_torch(sets: dict[str, np.ndarray], stack: contextlib.ExitStack, *, is_alone: bool = False) -> dict[str, Act]:
    import torch
    from torch import multiprocessing

    spawn, model = multiprocessing.get_context("spawn"), Model()
    shared = {name: torch.from_numpy(values).clone().share_memory_() for name, values in sets.items()}
    each = [[torch.zeros_like(p).share_memory_() for p in model.module.parameters()] for _ in range(WORLD)]
    links: list[Any] = []
    for gradients, core in zip(each, sorted(os.sched_getaffinity(0)), strict=False):
        weights = [p.detach().clone() if is_alone else p.data.share_memory_() for p in model.module.parameters()]
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=torch_worker, args=(theirs, core, shared, weights, gradients), daemon=True)
        process.start()
        theirs.close()
        links.append(ours)
        stack.callback(process.join, 30)
        stack.callback(ours.close)

    def ask(task: str, parts: list[Any]) -> list[Any]:
        for link, part in zip(links, parts, strict=True):
            link.send((task, part))
        return [link.recv() for link in links]

    def gradient(rows: np.ndarray) -> None:
        ask("gradient", halves(rows))
        model.step([list(gradients) for gradients in each])

    if is_alone:
        return {"alone": lambda rows: ask("alone", [int(rows[0])] * WORLD)}
    return {
        "empty": lambda _: ask("empty", [None] * WORLD),
        "gather": lambda rows: ask("gather", halves(rows)),
        "gradient": gradient,
    }


def open_limit(sets: dict[str, np.ndarray], stack: contextlib.ExitStack) -> dict[str, Act]:
    return open_torch(sets, stack, is_alone=True)


class Actor:
    """A Ray actor."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        import torch

        self._x, self._y, self._model = torch.from_numpy(x.copy()), torch.from_numpy(y.copy()), Model()

    def nothing(self) -> None:
        pass

    def gather(self, large: np.ndarray, rows: np.ndarray) -> int:
        return len(large[rows])

    def gradients(self, weights: list[np.ndarray], rows: np.ndarray) -> list[np.ndarray]:
        self._model.weights = weights
        return [g.numpy() for g in self._model.gradients(self._x[rows], self._y[rows])]


def open_ray(sets: dict[str, np.ndarray], stack: contextlib.ExitStack) -> dict[str, Act]:
    import ray

    ray.init(
        num_cpus=WORLD, object_store_memory=500_000_000, include_dashboard=False, log_to_driver=False, logging_level=40
    )
    stack.callback(ray.shutdown)
    made: Any = ray.remote(num_cpus=1)(Actor)
    actors, model = [made.remote(sets["x"], sets["y"]) for _ in range(WORLD)], Model()
    large = ray.put(sets["large"])

    def gather(rows: np.ndarray) -> int:
        pairs = zip(actors, halves(rows), strict=True)
        return sum(ray.get([actor.gather.remote(large, part) for actor, part in pairs]))

    def gradient(rows: np.ndarray) -> None:
        weights, pairs = ray.put(model.weights), zip(actors, halves(rows), strict=True)
        model.step(ray.get([actor.gradients.remote(weights, part) for actor, part in pairs]))

    return {
        "empty": lambda _: ray.get([actor.nothing.remote() for actor in actors]),
        "gather": gather,
        "gradient": gradient,
    }


OPEN = {
    "pool": open_pool,
    "one process": open_one_process,
    "limit": open_limit,
    "executor": open_executor,
    "torch": open_torch,
    "ray": open_ray,
}


def turn(acts: dict[str, Act], task: str, random: np.random.Generator) -> float:
    """Return the seconds of a call; for the empty task, the median."""
    if task == "gradient" and "alone" in acts:  # independent processes, each at its own speed
        return statistics.harmonic_mean(acts["alone"](np.array([TIMES[task]]))) / TIMES[task]
    seconds: list[float] = []
    for _ in range(TIMES[task]):
        rows = {"gather": GATHERED, "gradient": IMAGES}.get(task, 0)
        order = random.permutation(rows)[: BATCH if task == "gradient" else rows]
        begin = time.perf_counter()
        acts[task](order)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) if task == "empty" else statistics.mean(seconds)


def measure(kinds: list[str], sets: dict[str, np.ndarray], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of a call by task and contestant, for each round."""
    random = np.random.default_rng(2)
    with contextlib.ExitStack() as stack:
        acts = {kind: OPEN[kind](sets, stack) for kind in kinds}
        found: dict[str, dict[str, list[float]]] = {}
        for task in TIMES:
            those = [kind for kind in kinds if task in acts[kind] or (task == "gradient" and "alone" in acts[kind])]
            found[task] = {kind: [] for kind in those}
            for round_ in range(rounds + 1):
                for kind in those[:: 1 if round_ % 2 else -1]:
                    seconds = turn(acts[kind], task, random)
                    if round_:  # the first round is a warm-up
                        found[task][kind].append(seconds)
    return found


def table(found: dict[str, dict[str, list[float]]], kinds: list[str]) -> list[dict[str, Any]]:
    """Return a row for each contestant: medians, and the speed of the pool relative to it."""
    scale = {"empty": ("empty, us", lambda s: s * 1e6), "gather": ("gather, GB/s", lambda s: GATHERED * ROW * 4e-9 / s)}
    scale["gradient"] = ("gradient, images/s", lambda s: BATCH / s)
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        row: dict[str, Any] = {"contestant": kind}
        for task, (column, shown) in scale.items():
            each, ours = found[task].get(kind), found[task].get("pool")
            row[column] = shown(statistics.median(each)) if each else None
            if each and ours and kind != "pool":
                row[f"pool / it, {task}"] = statistics.median(b / a for a, b in zip(ours, each, strict=True))
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--rows", nargs="+", choices=KINDS, default=KINDS, help="contestants")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in SETTINGS.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | SETTINGS)
    kinds = [kind for kind in options.rows if kind != "ray"]
    sets, load = make_sets(), os.getloadavg()
    rows = table(measure(kinds, sets, options.rounds), kinds)
    if "ray" in options.rows and importlib.util.find_spec("ray") is not None:
        rows += table(measure(["pool", "ray"], sets, options.rounds), ["ray"])
    report("pool", "Calls on 2 workers", rows, rounds=options.rounds, load_before=load)


if __name__ == "__main__":
    main()
