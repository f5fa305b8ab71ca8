"""Train one task in one way, and write its learning curve: the script of every contestant.

    python train.py digits --way plain --out curve.json
    maniple run -n 2 --rule easgd train.py digits --way maniple --out curve.json
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29501 python train.py digits --way ddp --out curve.json

The learning rate decreases linearly to zero over the samples of the run, as is usual (for MSync, over the rounds).
Copies of the parameters are kept while the model trains, the center's where there is one, and are evaluated afterwards:
evaluation takes no time from the training. They are kept at the same numbers of samples in every contestant, since a
noisy curve that is looked at more often reaches a target sooner. The clock starts when all workers are ready, so
imports and compilation are not counted.
"""

import argparse
import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tasks import TASKS, TIMED, Task

COPIES = 32  # of a run, at equal distances


class Plain:
    """One process, without any library."""

    rank, world = 0, 1

    def __init__(self, task: Task, seed: int, *, balance: bool = False) -> None:
        self._task, self._seed, self._balance, self.batch = task, seed, balance, task.batch

    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
        """Return the model to train."""
        del optimizer
        return model

    def barrier(self) -> None:
        """Wait for the other workers."""

    def batches(self, epoch: int) -> Iterator[torch.Tensor]:
        """The samples of this worker's batches of one epoch."""
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._task.x))[self.rank :: self.world]
        for start in range(0, len(order), self.batch):
            yield torch.from_numpy(order[start : start + self.batch])

    def progress(self, own: float) -> float:
        """The share of the training that is over, for the learning rate; `own` is that of this worker's samples."""
        return own

    def center(self) -> contextlib.AbstractContextManager[Any]:
        """Within it, the model has the shared parameters."""
        return contextlib.nullcontext()

    def all_samples(self, own: int) -> int:
        """The samples of all workers, when this one has trained on `own`."""
        return own * self.world


class Ddp(Plain):
    """torch's DistributedDataParallel over gloo."""

    def __init__(self, task: Task, seed: int, *, balance: bool = False) -> None:
        super().__init__(task, seed, balance=balance)
        torch.distributed.init_process_group("gloo")
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
        del optimizer
        return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def barrier(self) -> None:
        torch.distributed.barrier()


class Maniple(Plain):
    """The rule and the pace are set on the command line of `maniple run`."""

    def __init__(self, task: Task, seed: int, *, balance: bool = False) -> None:
        import maniple

        super().__init__(task, seed, balance=balance)
        self._worker = maniple.join()
        self.rank, self.world = self._worker.rank, self._worker.world

    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
        self._replica = self._worker.share(model, optimizer)
        # With balance, a slow worker takes fewer samples; workers of a synchronous rule have equal shares anyway.
        self._sampler = self._worker.sampler(self._task.x, balance=self._balance)
        return model

    def barrier(self) -> None:
        self._worker.barrier()

    def batches(self, epoch: int) -> Iterator[torch.Tensor]:
        del epoch
        return (torch.from_numpy(batch) for batch in self._sampler.batches(self.batch))

    @property
    def _is_balanced(self) -> bool:
        """Workers share the samples by their speed, so what this one has trained on says nothing about the others."""
        return self._balance and not self._replica.rule.is_synchronous

    def all_samples(self, own: int) -> int:
        return round(self._sampler.progress * len(self._task.x)) if self._is_balanced else super().all_samples(own)

    def progress(self, own: float) -> float:
        """With a quorum, workers miss rounds, and their learning rates are equal only if they follow the rounds.

        There are at most as many rounds as batches of all workers. Of workers that drop many gradients there are fewer,
        so their learning rate ends above zero.
        """
        if self._is_balanced:
            return min(1.0, self._sampler.progress / self._task.epochs)
        if not self._replica.rule.quorum:
            return own
        most = self._task.epochs * math.ceil(len(self._task.x) / self.batch)
        return min(1.0, self._replica.rounds / most)

    def center(self) -> contextlib.AbstractContextManager[Any]:
        return self._replica.center()


WAYS = {"plain": Plain, "ddp": Ddp, "maniple": Maniple}


def train(task: Task, way: Plain, lr: float, epochs: int, pause: float = 0) -> dict[str, Any]:
    """Train, and return the learning curve: seconds, samples of all workers, and the metric of the test set.

    With `pause`, this process sleeps after each step for that multiple of the step's time: it is a slower machine.
    """
    model = task.build()
    optimizer = task.optimizer(model, lr)
    trained = way.prepare(model, optimizer)
    for index in (torch.arange(way.batch), torch.arange(1)):  # warm up, without a step
        task.loss(trained, task.x[index], task.y[index]).backward()
    optimizer.zero_grad()
    copies: list[tuple[float, int, dict[str, torch.Tensor]]] = []
    samples, interval = 0, epochs * len(task.x) / COPIES

    def keep() -> None:
        if way.rank == 0:
            with way.center():
                state = {name: value.clone() for name, value in model.state_dict().items()}
            copies.append((time.perf_counter() - start, way.all_samples(samples), state))

    way.barrier()
    cpu_s, start = time.process_time(), time.perf_counter()
    share = len(task.x) / way.world  # of an epoch
    for epoch in range(epochs):
        of_epoch = 0
        for index in way.batches(epoch):
            begin = time.perf_counter()
            if way.all_samples(samples) >= len(copies) * interval:
                keep()
            for group in optimizer.param_groups:
                group["lr"] = lr * (1 - way.progress((epoch + min(1.0, of_epoch / share)) / epochs))
            optimizer.zero_grad()
            task.loss(trained, task.x[index], task.y[index]).backward()
            optimizer.step()
            samples, of_epoch = samples + len(index), of_epoch + len(index)
            if pause:
                time.sleep(pause * (time.perf_counter() - begin))
    own_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_s
    way.barrier()
    keep()
    curve: list[tuple[float, int, float]] = []
    if way.rank == 0:  # the others have finished
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        torch.set_num_threads(os.cpu_count() or 1)
    for seconds, count, state in copies:
        model.load_state_dict(state)
        curve.append((round(seconds, 3), count, round(task.evaluate(model), 5)))
    return {"curve": curve, "seconds": own_s, "cpu_s": cpu_s, "world": way.world}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS | TIMED)
    parser.add_argument("--way", choices=WAYS, default="plain", help="what the processes train with")
    parser.add_argument("--lr", type=float, default=1.0, help="multiple of the task's learning rate (1)")
    parser.add_argument("--split", action="store_true", help="divide the task's batch among the workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, help="passes over the data (those of the task)")
    parser.add_argument("--batches", type=int, default=1, help="batch of one process, in multiples of the task's (1)")
    parser.add_argument("--threads", type=int, default=1, help="of each process (1)")
    parser.add_argument("--slow", type=float, default=1.0, help="worker 1 takes this many times as long for a step (1)")
    parser.add_argument("--data", type=Path, help="a file that replaces generated data")
    parser.add_argument("--out", type=Path, help="the file for the curve (standard output)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    task = (TASKS | TIMED)[args.task](args.data)
    way = WAYS[args.way](task, args.seed, balance=args.slow > 1)
    way.batch = task.batch * args.batches
    if args.split:
        way.batch = max(1, task.batch // way.world)
    torch.manual_seed(args.seed)  # the same first values on every worker, and in every contestant
    epochs = task.epochs if args.epochs is None else args.epochs
    pause = args.slow - 1 if way.rank == 1 else 0
    found = train(task, way, args.lr * task.lr, epochs, pause)
    found |= {"metric": task.metric, "target": task.target}
    if way.rank == 0:
        text = json.dumps(found)
        args.out.write_text(text) if args.out else print(text)
    if args.way == "ddp":
        torch.distributed.destroy_process_group()
        os._exit(0)  # gloo's threads may wait for their peers


if __name__ == "__main__":
    main()
