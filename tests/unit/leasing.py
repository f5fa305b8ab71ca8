"""A run's table of leases and the workers that take them, without processes."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

from maniple.memory.segment import LIVE, Segment
from maniple.sampler import Lease, LeaseTable, LeaseTerms, Sampler
from maniple.sampler.leases import restore

Sample = tuple[int, int]  # epoch, and place in its order


def samples_of(lease: Lease) -> list[Sample]:
    return [(lease.epoch, position) for position in range(lease.start, lease.stop)]


class Run:
    """A segment, and holders of leases in it; each has opened the table by itself, as processes do."""

    def __init__(self, root: Path, terms: LeaseTerms) -> None:
        self.root, self.terms = root, terms
        self.segment = Segment.create(root, "0123456789abcdef", root)
        self._tables: list[LeaseTable] = []

    def table(self, *holder: int) -> LeaseTable:
        self._tables.append(LeaseTable.open(self.segment, 0, self.terms, holder or (-1, 0)))
        return self._tables[-1]

    def join(self, rank: int) -> "Tenant":
        number = self.segment.renew(rank)
        self.segment.mark(rank, LIVE)
        return Tenant(self.table(rank, number))

    def resume(self, saved: Any) -> None:
        """The host begins again from a snapshot: all workers are gone."""
        self.close()
        self.segment = Segment.create(self.root, "0123456789abcdef", self.root)
        restore(self.segment, 0, saved)

    def close(self) -> None:
        for table in self._tables:
            table.close()
        self._tables = []
        self.segment.remove()


class Tenant:
    """One worker as the table sees it; a lender for its sampler."""

    def __init__(self, table: LeaseTable) -> None:
        self.table, self.holder, self.terms = table, table.holder, table.terms
        self.first_epoch, self.take = table.first_epoch, table.take

    def finish(self, epoch: int, most: int = 0) -> list[Sample]:
        """Take all that there is, or so many samples, and do it."""
        found: list[Sample] = []
        done: list[int] = []
        is_limited = most > 0
        while isinstance(lease := self.take(epoch, most=most, done=done), Lease):
            found += samples_of(lease)
            done, most = [lease.slot], most - lease.samples if is_limited else 0
            if is_limited and not most:
                break
        self.take(-1, done=done)
        return found


def drawn_at_once(workers: list[Sampler], epochs: int, batch: int) -> list[Counter[int]]:
    """What each draws in so many passes, all at the same time."""
    drawn = [Counter[int]() for _ in workers]

    def draw(worker: Sampler, into: Counter[int]) -> None:
        for _ in range(epochs):
            for step, indices in enumerate(worker.batches(batch) if batch else ([index] for index in worker)):
                into.update(map(int, indices))
                if step % 3 == 0 or batch > 1:
                    worker.stepped()
                    worker.committed(worker.mark())
        worker.finish(is_early=False)

    threads = [threading.Thread(target=draw, args=pair, daemon=True) for pair in zip(workers, drawn, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return drawn
