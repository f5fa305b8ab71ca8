"""Show how a pool combines the outputs of a function that runs on all workers: each op, next to NumPy's result.

    python examples/pool_reduce.py
    python examples/pool_reduce.py --workers 3 --rows 1000

Each worker calls the function on its part of the rows. The pool combines the outputs into the result of one call on all
rows, and this program checks each of them against NumPy.
"""

import argparse

import numpy as np

import maniple


def describe(x: np.ndarray) -> dict[str, np.ndarray]:
    """Return several outputs, each of which is combined by a different op."""
    return {"mean": x.mean(0), "sum": x.sum(0), "max": x.max(0), "double": 2 * x}


def add(x: np.ndarray, total: np.ndarray) -> None:
    """Add the rows to the worker's own array."""
    total += x.sum(0)


def show(what: str, found: np.ndarray, expected: np.ndarray) -> None:
    """Check a result against NumPy's, and print it."""
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    print(f"{what:34} {np.array2string(np.ravel(found)[:3], precision=4)}, as NumPy says")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="number of workers (default: 2)")
    parser.add_argument("--rows", type=int, default=100_001, help="number of rows of the data (default: 100,001)")
    args = parser.parse_args()

    random = np.random.default_rng(0)
    x = random.random((args.rows, 3))
    some = random.choice(args.rows, args.rows // 3)

    with maniple.Pool(args.workers) as pool:
        data = pool.data(x)  # in shared memory, where each worker reads its own rows
        ops = {"mean": "mean", "sum": "sum", "max": "max", "double": "gather"}
        function = pool.function(describe, scatter="x", reduce=ops)

        found = function(data)
        show("mean, exact for uneven parts", found["mean"], x.mean(0))
        show("sum", found["sum"], x.sum(0))
        show("max", found["max"], x.max(0))
        show("gather: rows in their order", found["double"], 2 * x)

        show("mean, in 7 slices per worker", function(data, num_slices=7)["mean"], x.mean(0))
        show("mean of the first 10 rows", function(data, batch=10)["mean"], x[:10].mean(0))
        show("max of every second row", function(data, batch=slice(None, None, 2))["max"], x[::2].max(0))
        show("gather of rows chosen by number", function(data, batch=some)["double"], 2 * x[some])

        parts = pool.function(len, scatter=[0])(data)  # no op: a list of the workers' return values
        assert sum(parts) == args.rows and max(parts) - min(parts) <= 1
        print(f"{'none: rows of each worker':34} {parts}")

        total = pool.replicate(np.zeros(3), name="total")  # one array per worker
        accumulate = pool.function(add, scatter="x")
        accumulate(data, total)
        accumulate(data, total, batch=some)
        show("sum of what the workers have", pool.reduce("total", "sum"), x.sum(0) + x[some].sum(0))
        pool.all_reduce("total", "sum")  # now all workers have the sum
        for rank in range(pool.n):
            show(f"all_reduce, as worker {rank} has it", pool.get("total", rank), x.sum(0) + x[some].sum(0))


if __name__ == "__main__":
    main()
