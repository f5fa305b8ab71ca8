"""Train a small transformer to predict the next byte of a text: the script of every contestant of `link`.

    python train_bytes.py FOLDER SETTINGS

runs one worker. RANK and WORLD_SIZE are set as by torchrun; SETTINGS are those of `Settings`, as JSON. The worker
writes to FOLDER

    ready-RANK          when it may begin: all workers begin together, and the clock starts then
    steps-RANK.json     seconds after each step, and CPU seconds of the process
    copy-RANK-STEP.npy  its parameters at fixed steps, one flat float32 vector; of an asynchronous rule, the center's
    stop                written by worker 0: the step before which all workers end

Copies are evaluated when training is over, so validation takes no time from it. Imports, joining and the first
broadcast of the parameters are not counted either.
"""

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

BYTES = 256
JOIN_S = 180.0  # for all workers to be ready: the first parameters take 16 s over 10 Mbit/s
WARM_UP_STEPS = 20  # in which the learning rate rises to its value


@dataclass(frozen=True)
class Settings:
    """What the workers of a contestant have in common."""

    way: str  # "plain", "ddp" or "maniple"
    text: str  # the file to learn from
    steps: int  # of each worker, at most
    limit_s: float  # of training, at most
    copy_every: int  # steps
    slack: int  # steps that the others may be ahead of worker 0
    core_count: int
    is_asynchronous: bool
    width: int
    layers: int
    context: int
    batch: int
    lr: float
    seed: int


class ByteModel(nn.Module):
    """Byte and position embeddings, causal attention layers, and a prediction after each byte."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, context = settings.width, settings.context
        self.bytes = nn.Embedding(BYTES, width)
        self.places = nn.Parameter(torch.randn(context, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, settings.layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.output = nn.Linear(width, BYTES)
        self.register_buffer("later", torch.ones(context, context, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the mean cross-entropy of all predictions in rows of context + 1 bytes, in bits."""
        states = self.layers(self.bytes(rows[:, :-1]) + self.places, self.later, is_causal=True)
        return nn.functional.cross_entropy(self.output(states).flatten(0, 1), rows[:, 1:].flatten()) / np.log(2)


def build(settings: Settings) -> ByteModel:
    """The same first values in every worker and every contestant."""
    torch.manual_seed(settings.seed)
    return ByteModel(settings)


def read_bytes(text: str) -> tuple[Tensor, Tensor]:
    """The bytes to train on, and the last twentieth, which is for validation."""
    data = torch.frombuffer(bytearray(Path(text).read_bytes()), dtype=torch.uint8)
    end = len(data) - len(data) // 20
    return data[:end], data[end:]


def validation_rows(settings: Settings, count: int) -> Tensor:
    """A fixed set of rows, spread over the text that is for validation."""
    _, data = read_bytes(settings.text)
    starts = torch.linspace(0, len(data) - settings.context - 1, count).long()
    return data[starts[:, None] + torch.arange(settings.context + 1)].long()


def evaluate(settings: Settings, vector: Any, rows: Tensor) -> float:
    """The loss of the parameters `vector`, in bits per byte."""
    model = build(settings)
    nn.utils.vector_to_parameters(torch.from_numpy(vector), model.parameters())
    with torch.no_grad():
        return float(sum(model(part) * len(part) for part in rows.split(32)) / len(rows))


class Worker:
    """One process that trains: without any library, with DistributedDataParallel, or with maniple."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._settings, self._folder, self._replica = settings, folder, None
        self.model = build(settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.lr)
        self._data, _ = read_bytes(settings.text)
        self._random = np.random.default_rng([settings.seed, self.rank])
        self.model(self._batch()).backward()  # allocates; without a step, so the parameters stay the same
        self.optimizer.zero_grad()
        self._trained: nn.Module = self.model
        if settings.way == "ddp":
            torch.distributed.init_process_group("gloo")
            self._trained = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        elif settings.way == "maniple":
            import maniple

            self._replica = maniple.join().share(self.model, self.optimizer)

    def _batch(self) -> Tensor:
        """Rows at random positions, others for each worker."""
        starts = self._random.integers(0, len(self._data) - self._settings.context - 1, self._settings.batch)
        return self._data[torch.from_numpy(starts)[:, None] + torch.arange(self._settings.context + 1)].long()

    def train(self) -> None:
        """Make steps until worker 0 says that it is enough, and write when each was done."""
        settings = self._settings
        bind(self.rank % settings.core_count)
        self._await_others()
        cpu_s, start, ends = time.process_time(), time.perf_counter(), list[float]()
        while not self._is_over(len(ends), time.perf_counter() - start):
            for group in self.optimizer.param_groups:
                group["lr"] = settings.lr * min(1.0, (len(ends) + 1) / WARM_UP_STEPS)
            self.optimizer.zero_grad()
            self._trained(self._batch()).backward()
            self.optimizer.step()
            ends.append(round(time.perf_counter() - start, 4))
            if len(ends) % settings.copy_every == 0:
                self._copy(len(ends))
        found = {"ends": ends, "cpu_s": time.process_time() - cpu_s}
        (self._folder / f"steps-{self.rank}.json").write_text(json.dumps(found))

    def _await_others(self) -> None:
        (self._folder / f"ready-{self.rank}").touch()
        deadline = time.monotonic() + JOIN_S
        while len(list(self._folder.glob("ready-*"))) < self.world:
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {len(list(self._folder.glob('ready-*')))} of {self.world} workers are ready")
            time.sleep(0.02)

    def _is_over(self, steps: int, elapsed_s: float) -> bool:
        """Workers in step must end at the same step: worker 0 names one that none of them has begun yet.

        Workers of an asynchronous rule end with worker 0, whichever step they are at.
        """
        settings, stop = self._settings, self._folder / "stop"
        is_last = steps >= settings.steps
        if self.rank == 0 and not stop.exists() and (is_last or elapsed_s > settings.limit_s):
            beside = stop.with_suffix(".new")
            beside.write_text("0" if settings.is_asynchronous else str(steps + settings.slack))
            beside.replace(stop)
        return (is_last and not settings.is_asynchronous) or (stop.exists() and steps >= int(stop.read_text()))

    def _copy(self, step: int) -> None:
        """Keep the parameters; of an asynchronous rule those of the center, which worker 0 has in shared memory."""
        if self._settings.is_asynchronous and self.rank:
            return
        with self._replica.center() if self._replica and self._settings.is_asynchronous else contextlib.nullcontext():
            vector = nn.utils.parameters_to_vector(self.model.parameters()).detach().numpy()
        np.save(self._folder / f"copy-{self.rank}-{step}.npy", vector)


def bind(core: int) -> None:
    """Bind all threads of this process, those of its communication too, to one core. The host's process has all."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {core})


if __name__ == "__main__":
    torch.set_num_threads(1)
    settings = Settings(**json.loads(sys.argv[2]))
    Worker(settings, Path(sys.argv[1])).train()
    if settings.way == "ddp":
        os._exit(0)  # gloo's threads may wait for their peers
