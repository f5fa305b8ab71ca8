"""The other workers of a run as one of them sees them: who is alive, whose mailbox has changed, the mean of all."""

import random
from collections.abc import Iterator
from pathlib import Path

from maniple.clock import clock
from maniple.contracts import Array
from maniple.layout import Layout
from maniple.memory.segment import DEAD, LIVE, Segment
from maniple.peers.mailbox import Mailbox, OwnMailbox, has_outbox
from maniple.rules import Rule

_LOOK_S = 0.25  # between two looks for new mailboxes: a listing of the folder takes 50 us


class Neighbors:
    """The mailboxes of one shared model.

    Attributes:
        own: that of this worker.
        model: the shared model's number, as in the names of centers.
    """

    def __init__(self, segment: Segment, model: int, layout: Layout, rule: Rule, *, rank: int, seed: int) -> None:
        self._segment, self._rank, self._layout, self._names = segment, rank, layout, rule.mailbox_vectors
        self._prefix = f"peers-{model}."
        self.own = OwnMailbox(self._path(rank), layout, self._names)
        self._boxes: dict[int, Mailbox] = {}
        self._seen: dict[int, int] = {}  # the commits of each whose message was looked at
        self._next_look = 0.0
        # Not the script's generators: a rule that sends nothing must not change what they give.
        self.random = random.Random(f"{seed} {rank} {segment.incarnation(rank)}")

    def look(self, now: float | None = None) -> None:
        """Find the mailboxes of workers that have joined; with the time `now`, only if that is due."""
        if now is not None and now < self._next_look:
            return
        self._next_look = clock.monotonic() + _LOOK_S
        for path in self._segment.path.glob(f"{self._prefix}*"):
            rank = int(path.name.removeprefix(self._prefix))
            if rank != self._rank and rank not in self._boxes:
                box = Mailbox.find(path, self._layout, self._names)
                if box is not None:
                    self._boxes[rank] = box

    def changed(self) -> Iterator[tuple[int, Mailbox]]:
        """The mailboxes with commits that `mark_seen` was not called for; cheap, for each step."""
        for rank, box in self._boxes.items():
            if box.commits != self._seen.get(rank):
                yield rank, box

    def mark_seen(self, rank: int, commits: int) -> None:
        """Do not return this mailbox from `changed` until it has more commits."""
        self._seen[rank] = commits

    def box(self, rank: int) -> Mailbox | None:
        """The mailbox of another worker, if it has one."""
        if rank not in self._boxes:
            self.look()
        return self._boxes.get(rank)

    def live(self) -> list[tuple[int, Mailbox]]:
        """The live workers with a mailbox, without this one."""
        return [(rank, box) for rank, box in sorted(self._boxes.items()) if self.is_live(rank)]

    def is_live(self, rank: int) -> bool:
        """Whether worker `rank` is alive."""
        return self._segment.state(rank) == LIVE

    @property
    def is_first(self) -> bool:
        """This worker has the lowest rank of the live ones, and acts for all where one is enough."""
        return not any(self.is_live(rank) for rank in self._boxes if rank < self._rank)

    def mean(self) -> dict[str, Array] | None:
        """The weighted mean of all mailboxes and of the messages that are on their way; None without any weight.

        Nobody is stopped for it. A message that is taken meanwhile may be missing or count twice. The share of a dead
        worker is left out, until its successor continues with it.
        """
        self.look()
        boxes = {self._rank: self.own} | self._boxes
        counts = {rank: self._segment.state(rank) != DEAD or rank == self._rank for rank in boxes}
        total, copied, headers = self._layout.allocate(), self._layout.allocate(), dict[int, Array]()
        weight = 0.0
        for rank, box in boxes.items():
            headers[rank] = header = box.copy(self._names[0], copied)
            share = float(header["weight"][0])
            if counts[rank] and share:
                weight += share
                _add(total, copied, share)
        for rank, header in headers.items() if has_outbox(self._names) else ():
            receiver, number = int(header["receiver"][0]), int(header["number"][0])
            if receiver not in headers or headers[receiver]["applied"][0, rank] >= number:
                continue
            if counts[rank] or counts[receiver]:
                for dtype, vector in boxes[rank].outbox.items():
                    copied[dtype][:] = vector
                now = boxes[rank].header()
                if now is not None and int(now["number"][0]) == number:  # else a newer one may be in the copy
                    weight += float(header["message_weight"][0])
                    _add(total, copied, float(header["message_mass"][0]))
        if not weight:
            return None
        for vector in total.values():
            vector /= vector.dtype.type(weight)
        return total

    def close(self) -> None:
        """Let a successor of this worker continue with its mailbox."""
        self.own.close()
        self._boxes.clear()

    def _path(self, rank: int) -> Path:
        return self._segment.path / f"{self._prefix}{rank}"


def _add(total: dict[str, Array], vectors: dict[str, Array], share: float) -> None:
    for dtype, vector in vectors.items():
        vector *= vector.dtype.type(share)
        total[dtype] += vector
