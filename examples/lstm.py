"""An LSTM classifies the sentiment of film reviews: Platoon's example, on one worker or several.

    python examples/lstm.py                                 # alone, on a small generated task
    maniple run -n 2 --every 5 examples/lstm.py --data imdb.npz --epochs 3
    maniple run -n 2 --validate-every 100 --patience 4 examples/lstm.py --ask      # early stopping by the controller

Without --data, reviews are generated: positive if they have more positive than negative words. With --data, they are
film reviews (IMDB, Maas et al. 2011) from a NumPy file with `train_tokens` (the concatenated word ids, 0 is padding),
`train_lengths` (words in each review), `train_labels` (1 is positive) and the same for `test_` (docs/data.md).
"""

import argparse
import itertools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import maniple


def read(path: Path, part: str, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the first `length` words of the first `count` film reviews, padded with 0, and their labels."""
    with np.load(path) as arrays:
        tokens, lengths, labels = (arrays[f"{part}_{name}"] for name in ("tokens", "lengths", "labels"))
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    words = np.zeros((min(count, len(labels)), length), np.int64)
    for row, start, stop in zip(words, starts, lengths, strict=False):
        row[: min(stop, length)] = tokens[start : start + min(stop, length)]
    return torch.from_numpy(words), torch.from_numpy(labels[: len(words)].astype(np.float32))


def generate(part: str, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Generate reviews of up to `length` words out of 100: words 1 to 10 are positive, 11 to 20 negative."""
    rng = np.random.default_rng({"train": 1, "test": 2}[part])  # the same reviews on every worker
    words = rng.integers(1, 101, (count, length))
    words[np.arange(length) >= rng.integers(length // 2, length + 1, count)[:, None]] = 0
    balance = ((words >= 1) & (words <= 10)).sum(1) - ((words >= 11) & (words <= 20)).sum(1)
    return torch.from_numpy(words[balance != 0]), torch.from_numpy((balance[balance != 0] > 0).astype(np.float32))


class Reader(nn.Module):
    """Embedding, LSTM, the mean of its states over the words, and one logit: above 0 is positive."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.output = nn.Linear(width, 1)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(words))
        mask = (words != 0).unsqueeze(2)
        return self.output((states * mask).sum(1) / mask.sum(1).clamp(min=1)).squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a file of film reviews (default: generated ones)")
    parser.add_argument("--reviews", type=int, default=4000, help="training reviews; half as many for the test (4000)")
    parser.add_argument("--length", type=int, default=40, help="maximum words of each review (40)")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the reviews (6)")
    parser.add_argument("--ask", action="store_true", help="ask the controller when to validate and stop")
    args = parser.parse_args()
    torch.set_num_threads(1)  # a network this small gains nothing from more
    worker = maniple.join()
    torch.manual_seed(worker.seed)
    load = (lambda *which: read(args.data, *which)) if args.data else generate
    train, test = load("train", args.reviews, args.length), load("test", args.reviews // 2, args.length)
    model, cost = Reader(10_000 if args.data else 101, width=32), nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    replica = worker.share(model, optimizer)
    batches = DataLoader(TensorDataset(*train), batch_size=32, sampler=worker.sampler(train[0]))
    passes = (batch for _ in worker.epochs(args.epochs) for batch in batches)
    parameters, who = sum(p.numel() for p in model.parameters()), f"worker {worker.rank} of {worker.world}"
    print(f"{who}: {len(train[0]):,} reviews, {parameters:,} parameters, threads: 1", flush=True)
    while (what := worker.ask("next") if args.ask else "train") != "stop":
        if what == "validate":
            with replica.center(), torch.no_grad():
                worker.ask("validated", loss=cost(model(test[0]), test[1]))
            continue
        if not (some := list(itertools.islice(passes, 10))):  # all epochs are over
            break
        for words, labels in some:
            optimizer.zero_grad()
            loss = cost(model(words), labels)
            loss.backward()
            optimizer.step()
        worker.log(loss=loss)
        print(f"{who}: {replica.steps:,} steps, loss {loss:.3f}", flush=True)
    with replica.center(), torch.no_grad():
        accuracy = ((model(test[0]) > 0) == (test[1] > 0)).float().mean().item()
    print(f"{who}: {replica.steps:,} steps, test accuracy of the center {accuracy:.1%}")


if __name__ == "__main__":
    main()
