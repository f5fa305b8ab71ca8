"""Prepared minibatches: a folder with one file per batch, read in any order, ahead of the training loop.

A `.npz` file is a batch of named arrays, a `.npy` file a single array:

    prepared/train/batch-0.npz    x uint8[128, 32, 32, 3], y uint8[128]
                   batch-1.npz
                   ...
"""

import re
import time
import zipfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, overload

import numpy as np

from maniple.contracts import Array
from maniple.errors import InvalidArgument
from maniple.feed.local_feed import WaitTimes

Batch = dict[str, Array] | Array
_MAX_AHEAD = 256  # batches; more would only fill the memory


class BatchFiles(Sequence[Any]):
    """The batches in the files of a folder, in the order of their names; numbers in names count as numbers.

        files = maniple.BatchFiles("prepared/train")
        batches = worker.sampler(files)  # divides the files of each epoch among the workers, in a new order
        for epoch in worker.epochs(10):
            for batch in files.read(batches):
                train(batch["x"], batch["y"])

    `files[i]` reads one batch, as `train_iter(count, recorder)` of a model class needs it.

    Args:
        folder: where the files are; other files and folders in it are ignored.
    """

    def __init__(self, folder: str | Path) -> None:
        found = Path(folder).glob("*.np[yz]")
        self.paths = sorted((path for path in found if path.is_file()), key=_numbered)
        if not self.paths:
            what = "has no .npz or .npy file" if Path(folder).is_dir() else "is no folder"
            raise InvalidArgument(f"{folder} {what}, so there are no batches. Give a folder with one file per batch.")

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | list[Batch]:
        if isinstance(index, slice):
            return [_load(path) for path in self.paths[index]]
        return _load(self.paths[index])

    def read(self, indices: Iterable[int] | None = None, *, ahead: int = 2) -> Iterator[Batch]:
        """The batches with these numbers, one after the other; a thread reads up to `ahead` of them in advance.

        The numbers are taken in the calling thread, so that they may come from `worker.sampler`: its leases belong to
        the worker's own process. The time that the loop waits for a file counts as waiting for data.

        Args:
            indices: the batches to read; by default all of them, in order.
            ahead: how many batches are read in advance, and kept in memory.
        """
        if not 1 <= ahead <= _MAX_AHEAD:
            raise InvalidArgument(f"ahead={ahead!r} is out of range (1 to {_MAX_AHEAD} batches). Write ahead=2.")
        return self._read(range(len(self)) if indices is None else indices, ahead)

    def _read(self, indices: Iterable[int], ahead: int) -> Iterator[Batch]:
        waits, pending = WaitTimes("files"), deque[Future[Batch]]()
        reader = ThreadPoolExecutor(1, "maniple-batch-files")
        try:
            for index in indices:
                pending.append(reader.submit(_load, self.paths[index]))
                if len(pending) > ahead:
                    yield _awaited(pending.popleft(), waits)
            while pending:
                yield _awaited(pending.popleft(), waits)
        finally:
            waits.flush()
            reader.shutdown(cancel_futures=True)


def _awaited(batch: Future[Batch], waits: WaitTimes) -> Batch:
    begin = time.perf_counter()
    result = batch.result()
    waits.add(time.perf_counter() - begin)
    return result


def _load(path: Path) -> Batch:
    """The batch in a file; InvalidArgument with its path if it cannot be read."""
    try:
        with path.open("rb") as file:
            content: Any = np.load(file)  # refuses pickled objects
            return dict(content) if path.suffix == ".npz" else content
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidArgument(
            f"the batch in {path} cannot be read: {error}. Write the file again, by np.savez(path, x=x, y=y)."
        ) from error


def _numbered(path: Path) -> list[tuple[int, str]]:
    """The name as a key in which batch-10 comes after batch-9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]
