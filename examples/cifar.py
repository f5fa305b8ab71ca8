"""A convolutional network classifies small photographs into ten classes. The same script runs under every rule.

    python examples/cifar.py                                              # alone, on generated pictures
    maniple run -n 2 examples/cifar.py --data cifar10_5k.npz --pictures 5000 --epochs 10
    maniple run -n 2 --rule downpour --every 1 examples/cifar.py --lr 0.001

Without --data, pictures are generated: each class has a pattern of coloured patches, which is shifted, mirrored and
noisy. With --data, they come from a NumPy file with `x_train` (bytes: picture, row, column, colour), `y_train` and the
same for `_test`, such as CIFAR-10 (Krizhevsky 2009) or a part of it.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import maniple


def read(path: Path, part: str, count: int) -> tuple[Tensor, Tensor]:
    """Return up to `count` random pictures of a file, as floats centred at 0, and their labels."""
    with np.load(path) as arrays:
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
    chosen = np.random.default_rng(0).permutation(len(y))[:count]  # the same ones on every worker
    pictures = torch.from_numpy(x[chosen].transpose(0, 3, 1, 2).astype(np.float32) / 64 - 2)
    return pictures, torch.from_numpy(y[chosen].astype(np.int64))


def generate(part: str, count: int) -> tuple[Tensor, Tensor]:
    """Generate pictures: the pattern of a class, shifted by up to 4 pixels, randomly mirrored, plus noise."""
    patterns = np.random.default_rng(0).normal(size=(10, 3, 4, 4)).repeat(10, 2).repeat(10, 3)
    rng = np.random.default_rng({"train": 1, "test": 2}[part])  # the same pictures on every worker
    labels = rng.integers(0, 10, count)
    pictures = rng.normal(size=(count, 3, 32, 32)).astype(np.float32)
    for picture, label, (i, j) in zip(pictures, labels, rng.integers(0, 9, (count, 2)), strict=True):
        picture += patterns[label, :, i : i + 32, j : j + 32][:, :, :: rng.choice((-1, 1))]
    return torch.from_numpy(pictures), torch.from_numpy(labels)


def build() -> nn.Module:
    """Build a network of three convolutions with 2 x 2 max pooling, and two linear layers."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10))


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of pictures that are classified correctly."""
    return (model(x).argmax(1) == y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a file of pictures (default: generated ones)")
    parser.add_argument("--pictures", type=int, default=2000, help="training pictures; a fifth as many to test (2000)")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the pictures (3)")
    parser.add_argument("--batch-size", type=int, default=32, help="pictures per step and worker (32)")
    parser.add_argument("--lr", type=float, default=0.002, help="Adam's learning rate (0.002)")
    parser.add_argument("--threads", type=int, default=1, help="threads per worker; 0: the environment's default (1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    worker = maniple.join()
    torch.manual_seed(worker.seed)
    train, test = (
        read(args.data, part, count) if args.data else generate(part, count)
        for part, count in (("train", args.pictures), ("test", args.pictures // 5))
    )
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    replica = worker.share(model, optimizer)
    batches = DataLoader(TensorDataset(*train), batch_size=args.batch_size, sampler=worker.sampler(train[0]))
    parameters, who = sum(p.numel() for p in model.parameters()), f"worker {worker.rank} of {worker.world}"
    print(
        f"{who}: {len(train[0]):,} pictures, {parameters:,} parameters, threads: {torch.get_num_threads()}", flush=True
    )
    for epoch in worker.epochs(args.epochs):
        for pictures, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(pictures), labels)
            loss.backward()
            optimizer.step()
            if replica.steps % 20 == 0:
                worker.log(loss=loss, epoch=epoch)
                print(f"{who}: epoch {epoch}, {replica.steps:,} steps, loss {loss:.2f}", flush=True)
        with replica.center():  # the shared parameters
            shared = accuracy(model, *test)
        print(f"{who}: epoch {epoch} is over, test accuracy of the center {shared:.1%}", flush=True)


if __name__ == "__main__":
    main()
