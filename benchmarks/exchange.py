"""Throughput of an EASGD exchange in shared memory, compared with the memory bandwidth.

One worker exchanges a torch model of 4, 40 and 400 MB with 8, 200 and 1,000 parameters with a center in /dev/shm,
through the call that training uses, with locks, versions and the check for non-finite values. Interleaved with it in
the same run: the same exchange with a gate, a plain copy of the vector (memcpy), the bare kernel (compiled, no lock, no
check, one call for the whole vector) on the same pages, and the blockwise NumPy kernel. GB/s is bytes of the vector per
second.

    python benchmarks/exchange.py [--sizes 4 40 400] [--parameters 8 200 1000]
"""

import argparse
import secrets
import tempfile
from pathlib import Path

import numba
import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from maniple.adapters import adapt
from maniple.center import Segment, SharedCenter
from maniple.center.gate import Gate
from maniple.center.gate_memory import agreement_on
from maniple.contracts import ExchangeInfo
from maniple.environment import shared_memory
from maniple.rules import EASGD
from maniple.rules.kernels import numpy_kernels as blocks
from measure import interleave, report

ALPHA = 0.3


@numba.njit
def bare(x, c, alpha):
    """Exchange without check and lock."""
    for i in range(x.size):
        d = alpha * (x[i] - c[i])
        x[i] -= d
        c[i] += d


def measure(megabytes: float, parameters: int, repeats: int) -> dict:
    """Measure one row: every contestant on vectors of one size, split into `parameters` parameters."""
    size = int(megabytes * 1e6 / 4)
    rng = np.random.default_rng(1)
    flat, other = rng.random(size, np.float32), rng.random(size, np.float32)
    model = torch.nn.ParameterList([torch.tensor(part) for part in np.array_split(flat, parameters)])
    with tempfile.TemporaryDirectory() as run:
        segment = Segment.create(shared_memory(), secrets.token_hex(8), Path(run))
        try:
            adapter = adapt(model)
            center, _ = SharedCenter.open_or_create(segment, "center-0", adapter, rank=0)
            gate = agreement_on(Gate(), EASGD())
            gated, _ = SharedCenter.open_or_create(segment, "center-1", adapter, rank=0, gate=gate)
            segment.mark(0, 1)
            flat_vectors = adapter.flat_vectors()
            assert flat_vectors is not None
            x, c = flat_vectors[0]["float32"], as_strided(center.array(0), (size,))  # the chunks follow each other
            moment, rule, alpha = ExchangeInfo(), EASGD(ALPHA), np.float32(ALPHA)
            seconds = interleave(
                {
                    "memcpy": lambda: np.copyto(other, flat),
                    "bare kernel": lambda: bare(x, c, alpha),
                    "exchange": lambda: center.exchange(adapter, rule, None, moment),
                    "gated exchange": lambda: gated.exchange(adapter, rule, None, moment),
                    "NumPy blocks": lambda: blocks.elastic(x, c, ALPHA, ALPHA),
                },
                repeats,
            )
            center.close()
            gated.close()
        finally:
            segment.remove()
    speed = {name: megabytes / 1e3 / value for name, value in seconds.items()}
    return {
        "parameters": parameters,
        "MB": megabytes,
        **{f"{name} GB/s": value for name, value in speed.items()},
        "exchange / bare": speed["exchange"] / speed["bare kernel"],
        "gated / exchange": speed["gated exchange"] / speed["exchange"],
        "exchange / NumPy": speed["exchange"] / speed["NumPy blocks"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[4, 40, 400], help="sizes of the vector in MB")
    parser.add_argument("--parameters", type=int, nargs="+", default=[8, 200, 1000], help="numbers of parameters")
    parser.add_argument("--repeats", type=int, default=31)
    options = parser.parse_args()
    rows = [measure(size, count, options.repeats) for count in options.parameters for size in options.sizes]
    report("exchange", "EASGD exchange in shared memory, one worker", rows)


if __name__ == "__main__":
    main()
