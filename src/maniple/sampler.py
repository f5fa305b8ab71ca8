"""The sampler: which samples this worker trains on. One shuffle for all, disjoint shares, each sample once."""

from collections.abc import Callable, Iterator, Sized

import numpy as np

from maniple.errors import InvalidArgument


class Sampler:
    """Indices of this worker's share of a data set, shuffled anew in each pass.

    All workers draw the same permutation from the run's seed and the number of the pass, and worker r takes
    places r, r + world, r + 2 world ... of it: within a pass each sample is taken exactly once over all
    workers. It serves as the `sampler` of a torch DataLoader and as a plain iterator.
    """

    def __init__(
        self,
        data: Sized,
        *,
        rank: int,
        world: int,
        seed: int,
        shuffle: bool = True,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        if len(data) < world:
            raise InvalidArgument(
                f"{len(data)} samples cannot be shared by {world} workers: each needs at least one. "
                "Use fewer workers or more data."
            )
        self._count = len(data)
        self._rank, self._world, self._seed, self._shuffle = rank, world, seed, shuffle
        self._should_stop = should_stop
        self.epoch = 0  # the passes begun
        self.taken = 0  # the samples handed out in all passes

    def __len__(self) -> int:
        return len(range(self._rank, self._count, self._world))

    def __iter__(self) -> Iterator[int]:
        order = np.arange(self._count)
        if self._shuffle:
            order = np.random.default_rng([self._seed, self.epoch]).permutation(self._count)
        self.epoch += 1
        for index in order[self._rank :: self._world].tolist():
            if self._should_stop():
                return
            self.taken += 1
            yield index
