"""Handwritten digits read row by row by a recurrent network: asynchronous SGD as Legion did it.

    python examples/rnn.py                                  # alone
    maniple run -n 2 examples/rnn.py                        # on two workers of this machine
    maniple serve --name digits                             # or: a host alone ...
    maniple join runs/digits examples/rnn.py                # ... and, as often as you like, one more worker

An exchange mixes a worker's parameters with the center's, half and half, and the worker goes on from the
mixture: `ASGD(0.5, 0.5)`. Exchanges come as often as fits into a quarter of the time, whatever the network
costs: `RateLimit(0.25)`. Every worker ends by itself: `StopAfter`. Workers come and go, so each counts its
own time, and not the passes over the data.

The data are the 1797 images of 8 x 8 pixels that come with scikit-learn; nothing is downloaded.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import maniple


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1400 images to train on with their labels, and 397 others to test on: always the same split."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 8, 8)[order]
    y = torch.tensor(labels)[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


class Reader(nn.Module):
    """A GRU that reads one row of pixels at a time, and names the digit from its last state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(8, width, batch_first=True)
        self.output = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        states, _ = self.gru(images)
        return self.output(states[:, -1])


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of images that the model names correctly."""
    return (model(x).argmax(1) == y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="how long each worker trains (20)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and worker (32)")
    parser.add_argument("--lr", type=float, default=0.003, help="Adam's learning rate (0.003)")
    parser.add_argument("--width", type=int, default=64, help="width of the GRU's state (64)")
    args = parser.parse_args()

    torch.set_num_threads(1)  # so small a network gains nothing from more
    worker = maniple.join()
    torch.manual_seed(worker.seed)
    x, y, x_test, y_test = load()
    model = Reader(args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    replica = worker.share(
        model,
        optimizer,
        rule=maniple.ASGD(0.5, 0.5),
        pace=maniple.RateLimit(0.25),
        stop=maniple.StopAfter(args.seconds),
    )

    batches = DataLoader(TensorDataset(x, y), batch_size=args.batch_size, sampler=worker.sampler(x))
    parameters = sum(p.numel() for p in model.parameters())
    print(f"worker {worker.rank}: {len(x):,} images, {parameters:,} parameters, threads: 1", flush=True)
    while not worker.should_stop:
        for images, labels in batches:  # ends early when it is time to stop
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()  # and an exchange, if one is due
            worker.log(loss=loss)
            if replica.steps % 500 == 0:
                print(f"worker {worker.rank}: {replica.steps:,} steps, loss {loss:.3f}", flush=True)

    with replica.center():  # alone, the replica is the center
        shared = accuracy(model, x_test, y_test)
    print(
        f"worker {worker.rank}: {replica.steps:,} steps, {replica.sync_share:.0%} of the time in exchanges, "
        f"test accuracy of the center {shared:.1%}"
    )


if __name__ == "__main__":
    main()
