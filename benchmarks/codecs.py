"""Codecs of `--wire`: how fast they are, what they lose, and what training loses by them.

    python benchmarks/codecs.py            speed of packing and unpacking on one core
    python benchmarks/codecs.py --train    the final loss of 4 workers with each codec, compared with float32

Speed is per second of the core's time, so that other processes matter less. The training runs in one process, where
threads are the workers and messages between them are copied; replicas, rules and collectives are those of a run.
The task is a network of three layers that learns scikit-learn's digits with smoothed labels: the loss has a floor that
is not zero.
"""

import argparse
import functools
import itertools
import queue
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from maniple import BSP, LocalSGD, Replica, Rule
from maniple.adapters import adapt
from maniple.collectives.peer_to_peer import PeerLink, PeerMessage, PeerToPeer
from maniple.contracts import Array
from maniple.environment import Environment
from maniple.pace import Every
from maniple.replica.context import TrainingContext
from maniple.replica.sharing import sharing_for
from maniple.wire import codecs, quantized
from maniple.wire.codecs import CODECS, Codec
from measure import report

DEADLINE_S = 60.0  # for a message between two threads
WORKERS, BATCH, HIDDEN = 4, 16, 256
MOMENTUM, SMOOTHING = 0.9, 0.1
RULES: dict[str, tuple[Rule, float]] = {"bsp": (BSP(), 0.05), "localsgd:k=10": (LocalSGD(10), 0.05)}  # learning rate
WIRES = ("float32", "int8", "int4", "topk")

Parameters = dict[str, Array]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--train", action="store_true", help="train with each codec, instead of measuring the speed")
    options.add_argument("--sizes", type=float, nargs="+", default=[4.0, 40.0], help="MB of float32 values")
    options.add_argument("--repeats", type=int, default=9)
    options.add_argument("--steps", type=int, default=2000, help="of training")
    options.add_argument("--seeds", type=int, default=3)
    chosen = options.parse_args()
    if chosen.train:
        compare_training(chosen.steps, chosen.seeds)
    else:
        compare_speed(chosen.sizes, chosen.repeats)


def compare_speed(sizes: Sequence[float], repeats: int) -> None:
    rows: list[dict[str, Any]] = []
    codecs.load_kernels()
    for megabytes in sizes:
        values = np.random.default_rng(1).standard_normal(int(megabytes * 2**20) // 4).astype(np.float32)
        for codec in CODECS.values():
            compiled, numpy = measured(codec, values, repeats, is_compiled=True), None
            if codec.name in {"int8", "int4"}:
                numpy = measured(codec, values, repeats, is_compiled=False)
            arrived = np.empty_like(values)
            data = np.empty(codec.size_bytes(values.size, 4), np.uint8)
            codec.pack(values, data)
            codec.unpack(data, arrived)
            rows.append({
                "codec": codec.name, "MB": megabytes, "bytes per value": data.size / values.size,
                "pack, GB/s": compiled["pack"], "unpack, GB/s": compiled["unpack"], "both, GB/s": compiled["both"],
                "both, NumPy": None if numpy is None else numpy["both"],
                "relative error": float(np.linalg.norm(arrived - values) / np.linalg.norm(values)),
            })  # fmt: skip
    report("codecs", "Codecs: float32 values per second, one core", rows, repeats=repeats)


def measured(codec: Codec, values: Array, repeats: int, *, is_compiled: bool) -> dict[str, float]:
    """GB/s of float32 values, of packing, of unpacking, and of both one after the other."""
    data, arrived = np.empty(codec.size_bytes(values.size, 4), np.uint8), np.empty_like(values)
    seconds: dict[str, list[float]] = {"pack": [], "unpack": []}
    usual = codecs._active
    codecs._active = usual if is_compiled else quantized
    try:
        for _ in range(repeats + 1):
            begin = time.thread_time()
            codec.pack(values, data)
            middle = time.thread_time()
            codec.unpack(data, arrived)
            seconds["pack"].append(middle - begin)
            seconds["unpack"].append(time.thread_time() - middle)
    finally:
        codecs._active = usual
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    medians["both"] = medians["pack"] + medians["unpack"]
    return {name: values.nbytes / one / 1e9 for name, one in medians.items()}


# Training


def compare_training(steps: int, seeds: int) -> None:
    rows: list[dict[str, Any]] = []
    for name, (rule, rate) in RULES.items():
        plain: list[float] = []
        for wire in WIRES:
            losses, sent = zip(*(train(rule, wire, rate, steps, seed) for seed in range(seeds)), strict=True)
            plain = plain or list(losses)
            ratios = [loss / other - 1 for loss, other in zip(losses, plain, strict=True)]
            rows.append({
                "rule": name, "wire": wire, "loss": statistics.mean(losses), "MB sent": statistics.mean(sent) / 1e6,
                "mean difference, %": 100 * statistics.mean(ratios),
                "largest difference, %": 100 * max(ratios, key=abs),
            })  # fmt: skip
    report("codecs-train", "Final loss by codec", rows, steps=steps, seeds=seeds, workers=WORKERS)


def train(rule: Rule, wire: str, rate: float, steps: int, seed: int) -> tuple[float, float]:
    """Train with all workers; gives the final loss over all data, and the bytes that one worker has sent."""
    queues: dict[tuple[int, int, int], queue.Queue[Array]] = defaultdict(queue.Queue)
    found: list[tuple[float, float]] = []
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            link = ThreadLink(rank, queues)
            loss = train_worker(PeerToPeer(link), rule, wire, rate=rate, steps=steps, seed=seed)
            found.append((loss, link.sent_bytes))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert len({loss for loss, _ in found}) == 1, "the replicas are the same"
    return found[0]


def train_worker(group: PeerToPeer, rule: Rule, wire: str, *, rate: float, steps: int, seed: int) -> float:
    """What one worker does, as a script would; gives the final loss over all data."""
    (x, y), rank = digits(), group.rank
    rng = np.random.default_rng([seed, rank])
    parameters = initial(np.random.default_rng(seed))
    velocity = {name: np.zeros_like(value) for name, value in parameters.items()}
    sharing = sharing_for(rule, None, pace=Every(rule.every), wire=wire, is_alone=False, open_collectives=lambda: group)
    context = TrainingContext(Environment(rank=rank, world=WORKERS, own_data=True, collectives="torch"))
    replica = Replica(adapt(parameters), sharing, rule=rule, pace=Every(rule.every), context=context)
    sharing.begin()
    for step in range(steps):
        chosen = rng.integers(0, len(x), BATCH)
        _, gradients = loss_and_gradients(parameters, x[chosen], y[chosen])
        replica.reduce(gradients)
        now = rate * (1 + np.cos(np.pi * step / steps)) / 2
        for name, gradient in gradients.items():
            velocity[name] = MOMENTUM * velocity[name] + gradient
            parameters[name] -= np.float32(now) * velocity[name]
        replica.step()
    return loss_and_gradients(parameters, x, y)[0]


@functools.cache
def digits() -> tuple[Array, Array]:
    from sklearn.datasets import load_digits  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    data: Any = load_digits()
    x = (data.data / 16).astype(np.float32)
    y = np.full((len(x), 10), SMOOTHING / 9, np.float32)
    y[np.arange(len(x)), data.target] = 1 - SMOOTHING
    return x, y


def initial(rng: np.random.Generator) -> Parameters:
    sizes = (64, HIDDEN, HIDDEN, 10)
    parameters: Parameters = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        scale = np.sqrt(2 / inputs)
        parameters[f"w{layer}"] = (scale * rng.standard_normal((inputs, outputs))).astype(np.float32)
        parameters[f"b{layer}"] = np.zeros(outputs, np.float32)
    return parameters


def loss_and_gradients(parameters: Parameters, x: Array, y: Array) -> tuple[float, Parameters]:
    """Cross-entropy of a network with rectified units."""
    hidden = [x]
    for layer in range(2):
        hidden.append(np.maximum(hidden[-1] @ parameters[f"w{layer}"] + parameters[f"b{layer}"], 0))
    scores = hidden[-1] @ parameters["w2"] + parameters["b2"]
    scores -= scores.max(axis=1, keepdims=True)
    logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    slope = (np.exp(logs) - y) / np.float32(len(x))
    gradients: Parameters = {}
    for layer in (2, 1, 0):
        gradients[f"w{layer}"], gradients[f"b{layer}"] = hidden[layer].T @ slope, slope.sum(axis=0)
        if layer:
            slope = (slope @ parameters[f"w{layer}"].T) * (hidden[layer] > 0)
    return float(-(y * logs).sum() / len(x)), gradients


class ThreadLink(PeerLink):
    """Messages between the threads of this process."""

    def __init__(self, rank: int, queues: "dict[tuple[int, int, int], queue.Queue[Array]]") -> None:
        super().__init__(rank, WORKERS, DEADLINE_S)
        self._queues, self.sent_bytes = queues, 0

    def begin_send(self, peer: int, data: Array, tag: int) -> Any:
        self.sent_bytes += data.nbytes
        self._queues[self.rank, peer, tag].put(data.copy())

    def begin_receive(self, peer: int, data: Array, tag: int) -> Any:
        del data
        return self._queues[peer, self.rank, tag]

    def wait(self, messages: Sequence[PeerMessage]) -> tuple[set[int], set[int]]:
        for message in messages:
            if message.work is not None:
                message.data[...] = message.work.get(timeout=DEADLINE_S)
        return set(), set()


if __name__ == "__main__":
    main()
