"""The other workers of a run as one of them sees them: who is alive, whose mailbox has changed, the mean of all."""

import random
from collections.abc import Iterator

from maniple.clock import clock
from maniple.errors import WaitedTooLong
from maniple.layout import Layout
from maniple.memory.segment import DEAD, LEFT, LIVE, Segment
from maniple.peers.mailbox import Mailbox, OwnMailbox, Vectors
from maniple.peers.mean import mailbox_paths, mean_of
from maniple.rules import Rule

_OWNER_TIMEOUT_S = 10.0  # a predecessor's lock is released as soon as its process has ended
_LOOK_S = 0.25  # between two looks for new mailboxes: a listing of the folder takes 50 us


class Neighbors:
    """The mailboxes of one shared model.

    Attributes:
        own: that of this worker.
        random: the generator of this worker's draws.
    """

    def __init__(
        self,
        segment: Segment,
        model: int,
        layout: Layout,
        rule: Rule,
        *,
        rank: int,
        seed: int,
        timeout_s: float = _OWNER_TIMEOUT_S,
    ) -> None:
        self._segment, self._model, self._layout, self._rule, self._rank = segment, model, layout, rule, rank
        self._names = rule.mailbox_vectors
        path = segment.path / f"peers-{model}.{rank}"
        self.own = OwnMailbox(path, layout, self._names, timeout_s=timeout_s)
        self._boxes: dict[int, Mailbox] = {}
        self._seen: dict[int, int] = {}  # the commits of each whose message was looked at
        self._next_look = 0.0
        # Not the script's generators: a rule that sends nothing must not change what they give.
        self.random = random.Random(f"{seed} {rank} {segment.incarnation(rank)}")

    def look(self, now: float | None = None) -> bool:
        """Find the mailboxes of workers that have joined; with the time `now`, only if that is due (True)."""
        if now is not None and now < self._next_look:
            return False
        self._next_look = clock.monotonic() + _LOOK_S
        for rank, path in mailbox_paths(self._segment, self._model).items():
            if rank != self._rank and rank not in self._boxes:
                box = Mailbox.find(path, self._layout, self._names)
                if box is not None:
                    self._boxes[rank] = box
        return True

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

    def left(self) -> list[int]:
        """The workers that have left in order with a share in their mailbox."""
        gone = [(rank, box.header()) for rank, box in self._boxes.items() if self._segment.state(rank) == LEFT]
        return [rank for rank, header in gone if header is not None and header["weight"][0] > 0]

    def of(self, rank: int) -> "Neighbors | None":
        """What worker `rank`, which has left, would see; None if its process has not quite ended."""
        try:
            return Neighbors(self._segment, self._model, self._layout, self._rule, rank=rank, seed=0, timeout_s=0)
        except WaitedTooLong:
            return None

    @property
    def is_first(self) -> bool:
        """This worker has the lowest rank of the live ones, and acts for all where one is enough."""
        return not any(self.is_live(rank) for rank in self._boxes if rank < self._rank)

    def mean(self) -> Vectors | None:
        """The mean of all replicas (`mean_of`), without those of dead workers until their successors continue."""
        self.look()
        boxes = {self._rank: self.own} | self._boxes
        counting = {rank for rank in boxes if self._segment.state(rank) != DEAD or rank == self._rank}
        return mean_of(boxes, counting, self._layout, self._names)

    def close(self) -> None:
        """Let a successor of this worker continue with its mailbox."""
        self.own.close()
        self._boxes.clear()
