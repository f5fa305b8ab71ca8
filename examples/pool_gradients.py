"""Gradient and update are two calls, and the gradient is clipped in between: softmax regression on digits, in NumPy.

    python examples/pool_gradients.py
    python examples/pool_gradients.py --optimizer adagrad --lr 0.1 --clip 0.5
    python examples/pool_gradients.py --data mnist.npz --batch-size 1000 --epochs 5

After the first call each worker has the mean gradient of all parameters in one flat vector. Functions of the pool may
change it, identically on all workers: clip it, add noise, set parts to zero. The second call makes the update.

The data are the 1797 images of 8 x 8 pixels included in scikit-learn, or MNIST from a file (docs/data.md).
"""

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import maniple

OPTIMIZERS = ("sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adadelta", "adam", "adamax")
Model = dict[str, np.ndarray]


def load(path: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Return images, one per row, and their labels."""
    if path is None:
        images, labels = load_digits(return_X_y=True)
        return images / 16, labels
    with np.load(path) as arrays:
        return arrays["x_train"].reshape(-1, 28 * 28) / 255, arrays["y_train"].astype(np.int64)


def probabilities(model: Model, x: np.ndarray) -> np.ndarray:
    """Return the probability of each class, for each image."""
    scores = x @ model["weights"] + model["bias"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def loss(model: Model, x: np.ndarray, y: np.ndarray) -> tuple[float, Model]:
    """Return the mean cross-entropy over the images, and its gradient."""
    p, rows = probabilities(model, x), np.arange(len(y))
    mean = -np.log(p[rows, y]).mean()
    p[rows, y] -= 1
    return mean, {"weights": x.T @ p / len(y), "bias": p.mean(axis=0)}


def accuracy(model: Model, x: np.ndarray, y: np.ndarray) -> float:
    """Return the share of images that are classified correctly."""
    return float((probabilities(model, x).argmax(axis=1) == y).mean())


def clip(gradient: np.ndarray, limit: float) -> float:
    """Scale the gradient, in place, so that its norm is at most `limit`; returns the norm before."""
    norm = float(np.linalg.norm(gradient))
    gradient *= min(1.0, limit / norm)
    return norm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="momentum", help="the update (default: momentum)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (default: 0.1)")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of a gradient (default: 1)")
    parser.add_argument("--workers", type=int, help="number of workers (default: one per core)")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the images (default: 5)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step of all workers (default: 64)")
    parser.add_argument("--data", type=Path, help="a file of MNIST (default: scikit-learn's digits)")
    args = parser.parse_args()
    x, y = load(args.data)
    model = {"weights": np.zeros((x.shape[1], 10)), "bias": np.zeros(10)}
    with maniple.Pool(args.workers) as pool:
        x, y = pool.data(x), pool.data(y)
        gradient, update = pool.gradient_and_update(model, loss, args.optimizer, lr=args.lr)
        clip_all = pool.function(clip)
        evaluate = pool.function(accuracy, scatter=("x", "y"), reduce="mean")
        clipped = steps = 0
        for epoch in range(args.epochs):
            order = np.random.default_rng(epoch).permutation(len(x))
            losses = []
            for start in range(0, len(x), args.batch_size):
                losses.append(gradient(x, y, batch=order[start : start + args.batch_size]))
                clipped += clip_all(gradient.flat, args.clip)[0] > args.clip  # the same norm on all workers
                steps = update()
            right = evaluate(gradient.model, x, y, num_slices=4)
            print(
                f"epoch {epoch}: loss {np.mean(losses):.4f}, accuracy {right:.2%}, clipped {clipped} of {steps} steps"
            )


if __name__ == "__main__":
    main()
