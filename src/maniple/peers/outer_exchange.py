"""Outer steps with a random peer (NoLoCo): a worker reads what the peer has published, and nobody sends anything."""

import functools
from collections.abc import Callable

from maniple.center.chunked_model import ChunkedModel
from maniple.contracts import Array, FlatModel, Outcome
from maniple.layout import Layout
from maniple.peers.gossip_exchange import own_header, restore, return_nonfinite
from maniple.peers.mailbox import Mailbox
from maniple.peers.neighbors import Neighbors
from maniple.rules.gossip import NoLoCo


class OuterExchange:
    """One worker's outer steps.

    Attributes:
        sent, received, skipped, returned: outer steps so far; those with a peer; those without; always 0.
        weight: each worker counts the same in the mean.
    """

    weight = 1.0
    returned = 0

    def __init__(self, rule: NoLoCo, model: FlatModel, layout: Layout, neighbors: Neighbors) -> None:
        self._rule, self._neighbors, self._layout = rule, neighbors, layout
        self._own = neighbors.own
        self._chunks = ChunkedModel(model, layout)
        self._header = own_header(self._own)
        self._steps_before = int(self._header["step"][0])  # of predecessors
        self.sent = self.received = self.skipped = 0

    def begin(self, world: int) -> bool:
        """Continue with what a predecessor has published, and return True; else publish the model."""
        del world
        self._header["weight"] = self.weight  # a predecessor that left early has set it to 0
        if self._own.commits:
            restore(self._chunks, self._layout.chunk_views(self._own.vectors["phi"]))
            return True
        self._chunks.begin()
        for k, phi in enumerate(self._layout.chunk_views(self._own.next["phi"])):
            phi[:] = self._chunks.array(k)
            self._chunks.commit(k)
        self._chunks.end()
        self._own.commit(self._header)
        return False

    def include(self, change: int, *, rank: int) -> None:
        """Let the next commit say that it includes this change, which worker `rank` has sent from another machine."""
        self._header["applied"][0, rank] = change

    def is_due(self) -> bool:
        """True: the pace alone says when an outer step is due."""
        return True

    def publish(self, step: int) -> Outcome:
        """Do nothing: phi is published, and changes with an outer step only."""
        del step
        return Outcome()

    def receive(self, step: int) -> list[Outcome]:
        """Do nothing: nobody sends messages."""
        del step
        return []

    def prepare(self, step: int) -> Callable[[], Outcome]:
        """What makes an outer step."""
        return functools.partial(self._step, step)

    def _step(self, step: int) -> Outcome:
        outcome = Outcome(size_bytes=self._layout.size_bytes)
        live = self._neighbors.live()
        peer, their_step = self._peer(live)
        old, new = self._views(self._own.vectors), self._views(self._own.next)
        theirs = None if peer is None else self._views(peer.vectors)
        self._chunks.begin()
        for k in range(len(self._layout.chunks)):
            x = self._chunks.array(k)
            outcome.refused += return_nonfinite(self._layout, k, x, old[k]["phi"])
            self._rule.outer(x, old[k], new[k], None if theirs is None else theirs[k], is_alone=not live)
            self._chunks.commit(k)
        self._chunks.end()
        self.sent += 1
        self.received += peer is not None
        self.skipped += peer is None
        self._header["step"] = self._steps_before + step
        self._header["number"] += bool(live)
        self._own.commit(self._header)
        if peer is not None:
            outcome.staleness = float(max(0, self._steps_before + step - their_step))
        return outcome.with_unique_names()

    def leave(self, step: int, *, is_early: bool) -> None:
        """Make the last outer step. The result stays in the mean, unless this worker leaves early and others go on."""
        self._neighbors.look()
        if is_early and self._neighbors.live():
            self._header["weight"] = 0.0
        self._step(step)

    def adopt_shares(self) -> None:
        """Do nothing: what a worker that has finished has published stays in the mean."""

    def _peer(self, live: list[tuple[int, Mailbox]]) -> tuple[Mailbox | None, int]:
        """A random peer that has made an outer step, and at which step of its own."""
        headers = [(box, header) for _, box in live if (header := box.header()) is not None]
        ready = [(box, int(header["step"][0])) for box, header in headers if header["number"][0]]
        return self._neighbors.random.choice(ready) if ready else (None, 0)

    def _views(self, vectors: dict[str, dict[str, Array]]) -> list[dict[str, Array]]:
        """The published vectors of each chunk, by name."""
        by_name = {name: self._layout.chunk_views(flat) for name, flat in vectors.items()}
        return [{name: views[k] for name, views in by_name.items()} for k in range(len(self._layout.chunks))]
