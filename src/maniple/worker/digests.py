"""Digests: a number for each parameter, by which replicas that must be the same are compared."""

import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from maniple.contracts import Array, Entry
from maniple.errors import Desynced


def digests(values: Iterable[Array]) -> Array:
    """One number for each of the values."""
    return np.array([zlib.crc32(value.view(np.uint8).data) for value in values], np.int64)


def compare(found: Mapping[int, Array], entries: Sequence[Entry], rounds: int) -> None:
    """Raise Desynced, with the first parameter that differs and whose it is, unless all digests are the same."""
    found = {rank: one for rank, one in found.items() if len(one)}  # of those who have any
    for i in range(min((len(one) for one in found.values()), default=0)):
        values = [int(one[i]) for one in found.values()]
        usual = max(set(values), key=values.count)
        others = [str(rank) for rank, one in found.items() if int(one[i]) != usual]
        if others:
            raise Desynced(
                f"after {rounds} rounds the replicas are no longer the same: {entries[i].name!r} of worker "
                f"{', '.join(others)} differs from that of the others ({len(found)} workers). Look for what a worker "
                "does by itself: a learning rate, a clipping or a change of parameters that depends on its rank or its "
                "own data."
            )
