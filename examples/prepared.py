"""Images are prepared once, as one file per batch, and then read in advance while the network trains.

    python examples/prepared.py batches --prepare                          # writes the files; or --data cifar10.npz
    python examples/prepared.py batches                                    # alone
    maniple run -n 2 --rule bsp examples/prepared.py batches --epochs 5

Preparation does what would otherwise be repeated in each epoch: decoding, resizing, normalising. `worker.sampler` takes
whole files: it divides those of each epoch among the workers, in a new order. Shuffle the images before they are
written, since a batch keeps its images.

Without --data, the images are generated; docs/data.md says how to make `cifar10.npz`.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import maniple

sys.path.append(str(Path(__file__).parent / "models"))
from images import generate, read
from net import net


def prepare(folder: Path, data: Path | None, images: int, size: int) -> None:
    """Write batches of training images, and of a fifth as many test images, into two folders."""
    for part, count in (("train", images), ("test", images // 5)):
        x, y = read(data, part, count) if data else generate(part, count)
        (folder / part).mkdir(parents=True, exist_ok=True)
        for number, start in enumerate(range(0, len(y), size)):
            rows = slice(start, start + size)
            np.savez(folder / part / f"batch-{number}.npz", x=x[rows].half().numpy(), y=y[rows].numpy())
        print(f"{len(y):,} images in {folder / part}", flush=True)


def tensors(batch: dict[str, np.ndarray]) -> tuple[Tensor, Tensor]:
    """Return the images, which are stored in half precision, and the labels."""
    return torch.from_numpy(batch["x"]).float(), torch.from_numpy(batch["y"])


@torch.no_grad()
def accuracy(model: nn.Module, files: maniple.BatchFiles) -> float:
    """Return the share of images that are classified correctly."""
    right = [(model(x).argmax(1) == y) for x, y in map(tensors, files.read())]
    return torch.cat(right).float().mean().item()


def train(folder: Path, epochs: int, width: int) -> None:
    """Train a small network on the files."""
    torch.set_num_threads(1)
    worker = maniple.join()
    torch.manual_seed(worker.seed)
    model = net(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    replica = worker.share(model, optimizer)
    files, test = maniple.BatchFiles(folder / "train"), maniple.BatchFiles(folder / "test")
    sampler = worker.sampler(files)
    for epoch in worker.epochs(epochs):
        for batch in files.read(sampler):
            x, y = tensors(batch)
            replica.samples = len(y)  # the last batch may be smaller
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            worker.log(loss=loss)
        with replica.center():
            shared = accuracy(model, test)
        who = f"worker {worker.rank} of {worker.world}"
        print(f"{who}: epoch {epoch}, {replica.steps} batches, test accuracy of the center {shared:.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of the batches")
    parser.add_argument("--prepare", action="store_true", help="write the files, and end")
    parser.add_argument("--data", type=Path, help="a file of images to prepare (default: generated ones)")
    parser.add_argument("--images", type=int, default=2000, help="training images to prepare (2000)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per file (32)")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the files (3)")
    parser.add_argument("--width", type=int, default=16, help="width of the network (16)")
    args = parser.parse_args()
    if args.prepare:
        prepare(args.folder, args.data, args.images, args.batch_size)
    else:
        train(args.folder, args.epochs, args.width)


if __name__ == "__main__":
    main()
