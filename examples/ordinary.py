"""An ordinary PyTorch script, with the lines that let it train on several workers.

    python examples/ordinary.py                            # alone, as without these lines
    maniple run -n 2 examples/ordinary.py                  # two workers, one shared model
    maniple run -n 2 --rule localsgd examples/ordinary.py  # the same script for every rule: easgd, downpour ...

The script uses AdamW, a schedule by steps, gradient clipping, a DataLoader with worker processes and a progress bar,
and saves the best model. Each line that maniple needs has a comment with the original code. The workers divide each
epoch among themselves, so len(loader), on which the schedule depends, is this worker's share.

The data are the 1797 images of 8 x 8 pixels included in scikit-learn; nothing is downloaded.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import maniple


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return 1400 training images and 397 validation images; the split is fixed."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)[order]
    y = torch.tensor(labels)[order]
    return TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])


def build(width: int) -> nn.Module:
    """Build a convolution with batch normalization, followed by a linear classifier."""
    first = [nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * width, 10))


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader) -> float:
    """Return the share of images that are classified correctly."""
    model.eval()
    right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader)
    model.train()
    return right / len(loader.dataset)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="passes over the images (10)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and worker (32)")
    parser.add_argument("--lr", type=float, default=0.01, help="maximum learning rate of the schedule (0.01)")
    parser.add_argument("--width", type=int, default=16, help="channels of the first convolution (16)")
    parser.add_argument("--loaders", type=int, default=2, help="data loader processes per worker (2)")
    parser.add_argument("--threads", type=int, default=1, help="threads per worker; 0: the environment's default (1)")
    parser.add_argument("--save", type=Path, default=Path("best.pt"), help="file of the best model (best.pt)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads or torch.get_num_threads())

    torch.manual_seed(0)
    train, test = load()
    model = build(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    worker = maniple.join()  # new: connect to the other workers
    replica = worker.share(model, optimizer)  # new: share the model; optimizer.step() now also exchanges
    torch.manual_seed(worker.seed)  # new: different dropout on each worker

    sampler = worker.sampler(train)  # before: shuffle=True
    loader = DataLoader(train, args.batch_size, sampler=sampler, num_workers=args.loaders)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(loader))
    parameters, who = sum(p.numel() for p in model.parameters()), f"worker {worker.rank} of {worker.world}"
    print(f"{who}: {len(train):,} images, {parameters:,} parameters, threads: {torch.get_num_threads()}", flush=True)

    best = 0.0
    for epoch in worker.epochs(args.epochs):  # before: range(args.epochs)
        for images, labels in tqdm(loader, desc=f"epoch {epoch}"):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            replica.reduce()  # new: average before clipping, under rules that average gradients
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            worker.log(loss=loss)  # new: shown live and recorded in the run folder
        with replica.center():  # new: validate and save the shared model
            accuracy = validate(model, DataLoader(test, 256))
            if accuracy > best and worker.rank == 0:  # before: if accuracy > best
                torch.save(model.state_dict(), args.save)
        best = max(best, accuracy)
        print(f"epoch {epoch}: validation accuracy {accuracy:.1%}", flush=True)
    print(f"{who}: {replica.steps:,} steps, best validation accuracy {best:.1%}")


if __name__ == "__main__":
    main()
