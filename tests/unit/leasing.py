"""A run's table of leases and the workers that take them, without processes."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

from maniple.center.segment import LIVE, Segment
from maniple.sampler import Lease, Sampler, Table, Terms
from maniple.sampler.lease import Holder, Verdict
from maniple.sampler.table import restore

Sample = tuple[int, int]  # epoch, and place in its order


def samples_of(lease: Lease) -> list[Sample]:
    return [(lease.epoch, place) for place in range(lease.start, lease.stop)]


class Run:
    """A segment, and holders of leases in it; each has opened the table by itself, as processes do."""

    def __init__(self, root: Path, terms: Terms) -> None:
        self.root, self.terms = root, terms
        self.segment = Segment.create(root, "0123456789abcdef", root)
        self._tables: list[Table] = []

    def table(self) -> Table:
        self._tables.append(Table.open(self.segment, 0, self.terms))
        return self._tables[-1]

    def join(self, rank: int) -> "Tenant":
        number = self.segment.renew(rank)
        self.segment.mark(rank, LIVE)
        return Tenant(self.table(), Holder(rank, number))

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

    def __init__(self, table: Table, holder: Holder) -> None:
        self.table, self.holder, self.terms = table, holder, table.terms

    def first_epoch(self, limit: int) -> int:
        return self.table.first_epoch(self.holder.rank, limit)

    def take(self, epoch: int, **news: Any) -> Lease | Verdict:
        return self.table.take(self.holder, epoch, **news)

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
                    worker.settled()
        worker.finish(is_early=False)

    threads = [threading.Thread(target=draw, args=pair, daemon=True) for pair in zip(workers, drawn, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return drawn
