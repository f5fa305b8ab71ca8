"""Platoon's table: the plain script, 1 worker, 2 workers, and 2 unsynchronised processes as the limit.

For an MLP, an LSTM and a small CNN in PyTorch, with one thread per process and an exchange every 10 steps. All
contestants are alive at once and take many turns of a second, so that noise of the machine affects all of them. This is
repeated with new processes, because identical processes differ by chance. The result is the median of the ratios within
a round. Every process has the same settings of the C library's allocator (MALLOC_...): with the defaults, some
processes return the memory of each step to the system and some do not, and identical processes of the CNN differ by up
to 45 %.

    python benchmarks/speedup.py [--models mlp lstm cnn] [--casts 5] [--rounds 6] [--turn 1.0]
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODELS = ("mlp", "lstm", "cnn")
WORDS = 1000  # of the LSTM
TOKENS = 256  # of the transformer, which bsp.py measures too
ALLOCATOR = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 30))
CORES = sorted(os.sched_getaffinity(0))


def build(name: str):
    """Return a model, its batch and its loss; sizes as in the small examples of Platoon and of the DDP literature."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    if name == "transformer":
        return transformer()
    if name == "mlp":
        model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
        x = torch.randn(128, 784)
    elif name == "cnn":
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 8 * 8, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
        x = torch.randn(32, 3, 32, 32)
    else:

        class Sentiment(nn.Module):
            def __init__(self):
                super().__init__()
                self.words = nn.Embedding(WORDS, 128)
                self.lstm = nn.LSTM(128, 128, batch_first=True)
                self.out = nn.Linear(128, 10)

            def forward(self, x):
                return self.out(self.lstm(self.words(x))[0].mean(1))

        model, x = Sentiment(), torch.randint(0, WORDS, (16, 50))
    y = torch.randint(0, 10, (len(x),))
    return model, x, y


def transformer():
    """Return a causal language model with 4 layers and 0.87 M parameters, a batch of tokens, and the next tokens."""
    import torch
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self, width: int = 128, length: int = 64):
            super().__init__()
            self.tokens = nn.Embedding(TOKENS, width)
            self.positions = nn.Parameter(torch.randn(length, width) / width)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
                for _ in range(4)
            )
            self.norm = nn.LayerNorm(width)
            self.out = nn.Linear(width, TOKENS)
            self.mask = nn.Transformer.generate_square_subsequent_mask(length)

        def forward(self, x):
            h = self.tokens(x) + self.positions
            for layer in self.layers:
                h = layer(h, src_mask=self.mask, is_causal=True)
            return self.out(self.norm(h)).transpose(1, 2)  # classes come second

    tokens = torch.randint(0, TOKENS, (8, 65))
    return Transformer(), tokens[:, :-1], tokens[:, 1:]


def worker(name: str, address: str, *, is_shared: bool) -> None:
    """Train in turns: for each line 'SECONDS' from the socket, answer with the steps made and the seconds taken."""
    import torch

    import maniple

    model, x, y = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if is_shared:
        maniple.join().share(model, optimizer, rule=maniple.EASGD(), pace=maniple.Every(10))
    loss_of = torch.nn.CrossEntropyLoss()
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(address)
        for line in link.makefile("r"):
            seconds, steps, begin = float(line), 0, time.perf_counter()
            while (now := time.perf_counter()) - begin < seconds:
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                optimizer.step()
                steps += 1
            link.sendall(f"{json.dumps([steps, now - begin])}\n".encode())


class Contestant:
    """One or two processes that train in turns."""

    def __init__(self, folder: Path, model: str, kind: str) -> None:
        count = 2 if kind.startswith("2") else 1
        self.address = str(folder / f"{model}-{kind.replace(' ', '-')}")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.address)
        self._server.listen()
        self._server.settimeout(120)
        env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | ALLOCATOR
        script = [__file__, "--worker", model, self.address]
        if "worker" in kind:
            maniple = Path(sys.executable).with_name("maniple")
            command = [str(maniple), "run", "-q", "-n", str(count), "--runs", str(folder / "runs"),
                       "--name", Path(self.address).name, *script, "--shared"]  # fmt: skip
            self._processes = [subprocess.Popen(command, env=env)]
        else:
            self._processes = [subprocess.Popen([sys.executable, *script], env=env) for _ in range(count)]
            if count == 2:  # bind cores for the limit, as the launcher does for its workers
                for process, core in zip(self._processes, CORES, strict=False):
                    os.sched_setaffinity(process.pid, {core})
        self._links = [self._server.accept()[0] for _ in range(count)]
        self._files = [link.makefile("r") for link in self._links]

    def turn(self, seconds: float) -> float:
        """Return the steps per second of all processes together."""
        for link in self._links:
            link.sendall(f"{seconds}\n".encode())
        answers = [json.loads(file.readline()) for file in self._files]
        return sum(steps / taken for steps, taken in answers)

    def close(self) -> None:
        for file, link in zip(self._files, self._links, strict=True):
            link.shutdown(socket.SHUT_RDWR)
            file.close()
            link.close()
        self._server.close()
        for process in self._processes:
            process.wait(timeout=60)


KINDS = ("plain", "1 worker", "2 workers", "2 unsynchronised")


def play(model: str, rounds: int, turn_s: float, rates: dict[str, list[float]]) -> None:
    """Start all contestants and let them take turns."""
    with tempfile.TemporaryDirectory() as folder:
        contestants = {kind: Contestant(Path(folder), model, kind) for kind in KINDS}
        try:
            for contestant in contestants.values():
                contestant.turn(turn_s)
            for round_ in range(rounds):
                for kind in KINDS if round_ % 2 else reversed(KINDS):
                    rates[kind].append(contestants[kind].turn(turn_s))
        finally:
            for contestant in contestants.values():
                contestant.close()


def measure(model: str, casts: int, rounds: int, turn_s: float) -> dict:
    """Measure one row: rates in steps per second, and ratios, each the median over all rounds."""
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(casts):
        play(model, rounds, turn_s, rates)

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(rates[a], rates[b], strict=True))

    return {
        "model": model,
        **{f"{kind} steps/s": statistics.median(values) for kind, values in rates.items()},
        "1 worker / plain": ratio("1 worker", "plain"),
        "2 workers / plain": ratio("2 workers", "plain"),
        "limit / plain": ratio("2 unsynchronised", "plain"),
        "2 workers / limit": ratio("2 workers", "2 unsynchronised"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--casts", type=int, default=5, help="number of casts, each with new processes")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each contestant per cast")
    parser.add_argument("--turn", type=float, default=1.0, help="length of a turn in seconds")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "ADDRESS"), help=argparse.SUPPRESS)
    parser.add_argument("--shared", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker, is_shared=options.shared)
        return
    from measure import report

    rows = [measure(model, options.casts, options.rounds, options.turn) for model in options.models]
    facts = {"casts": options.casts, "rounds": options.rounds, "turn_s": options.turn}
    report("speedup", "EASGD every 10 steps, one thread per process", rows, **facts)


if __name__ == "__main__":
    main()
