"""Compute the inverse of a matrix by stochastic gradient descent, with NumPy only: Legion's example.

    python examples/matrix_inverse.py                   # alone
    maniple run -n 2 examples/matrix_inverse.py         # on two workers
    maniple run -n 4 --rule asgd --maximum-rate 0.1 examples/matrix_inverse.py --size 300

Find X such that A X = I. For random vectors v, the columns of V, the loss and its gradient are

    f(X) = |A X V - V|^2 / 2b        df/dX = A' (A X V - V) V' / b        with b vectors in V

Every worker draws its own vectors and descends on their gradient. No framework is needed: a model can be a dict of
NumPy arrays, and `replica.step()` replaces the hook of the optimizer.
"""

import argparse

import numpy as np

import maniple


def matrix(n: int) -> np.ndarray:
    """Return an invertible matrix: the identity plus noise, the same on every worker."""
    return np.eye(n) + 0.3 * np.random.default_rng(0).standard_normal((n, n)) / np.sqrt(n)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=100, help="number of rows and columns of the matrix (100)")
    parser.add_argument("--steps", type=int, default=4000, help="total steps of all workers (4000)")
    parser.add_argument("--batch-size", type=int, default=50, help="random vectors per step (50)")
    args = parser.parse_args()

    worker = maniple.join()
    n, b = args.size, args.batch_size
    A = matrix(n)
    X = np.zeros((n, n))
    replica = worker.share({"inverse": X})  # X is updated in place, by this loop and by exchanges

    random = np.random.default_rng(worker.seed)  # different vectors on every worker
    # The largest stable rate: the inverse of |A|^2 times the likely largest eigenvalue of V V' / b.
    lr = 1 / (np.linalg.norm(A, 2) ** 2 * (1 + np.sqrt(n / b)) ** 2)
    who, steps = f"worker {worker.rank} of {worker.world}", args.steps // worker.world
    print(f"{who}: {n} x {n} numbers, {steps:,} steps with {b} vectors each", flush=True)
    for step in range(steps):
        V = random.standard_normal((n, b))
        error = A @ (X @ V) - V
        gradient = A.T @ error @ V.T / b
        replica.reduce({"inverse": gradient})  # BSP: the mean over all workers; other rules: no effect
        X -= lr * gradient
        replica.samples = b  # for the samples/s in the progress
        replica.step()  # exchanges with the center if an exchange is due
        if step % 100 == 0:
            loss = (error**2).sum() / (2 * b)
            worker.log(loss=loss)
            if step % 500 == 0:
                print(f"{who}: {step:,} steps, loss {loss:.1e}", flush=True)

    with replica.center():
        residual = np.linalg.norm(A @ X - np.eye(n)) / np.sqrt(n)
    print(f"{who}: residual |A X - I| / |I| of the center is {residual:.1e}")


if __name__ == "__main__":
    main()
