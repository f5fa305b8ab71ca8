"""The trades: what a worker offers for each parameter, and what it makes of the answer.

Values     x travels; the answer is what x becomes, or its move where values are packed
Changes    q = x - old travels;  the answer is c:  x = c + (x - (old + q)),  old = c
Whole      x replaces the center
Swap       a rule that only the worker knows: the new center travels, and is taken if nobody wrote meanwhile
"""

from collections.abc import Sequence

import numpy as np

from maniple.center.remote import Remote
from maniple.contracts import Act, Array, Exchanger, Model, Moment, OnValue
from maniple.errors import BadFrame
from maniple.wire.messages import Answer, Offer
from maniple.wire.stream import Stream

_BLOCK = 1 << 16


class Values:
    """Rules that offer the replica's value. A lost answer is no loss: the replica moves at the next exchange."""

    def __init__(self, remote: Remote, model: Model, rule: Exchanger, memory: Sequence[Array] | None, act: Act) -> None:
        self._remote, self._model, self._rule, self._memory, self._act = remote, model, rule, memory, act
        self._arrays: dict[int, Array] = {}
        self.unclean: list[int] = []  # packed moves cannot tell what a refused element becomes

    def offer(self, i: int, sequence: int, item: int) -> Offer:
        how = self._remote.parcels.codec(i)
        return self._remote.offer(i, sequence, item, self._act, "value" if how.is_plain else "move")

    def payload(self, i: int) -> Array:
        self._arrays[i] = x = self._model.array(i)
        return self._remote.parcels.pack(i, x)

    def take(self, i: int, answer: Answer, stream: Stream, size: int) -> None:
        remote, x = self._remote, self._arrays.pop(i)
        remote.expect(i, size)
        if remote.parcels.codec(i).is_plain:
            stream.receive_in_blocks(x)  # if it breaks half-way, each element has moved or will move the next time
        else:
            x += remote.parcels.receive(i, stream)
            if not answer.is_clean:
                self.unclean.append(i)
        if remote.layout.is_half(i):
            remote.layout.round(i, x)
            if self._memory is not None:
                self._rule.rounded(x, self._memory[i])
        self._model.commit(i)
        remote.seen[i] = answer.version

    def begin(self) -> None:
        self._model.begin()

    def settle(self, i: int) -> None:
        pass


class Changes:
    """Rules that offer what the replica has changed since it last took the center's value, `old`.

    `sent` keeps what is under way, until it is known whether it was applied: if so, only that is taken from the
    difference to the replica, which may have trained on meanwhile.
    """

    def __init__(
        self, remote: Remote, model: Model, rule: Exchanger, act: Act, *, memory: Sequence[Array], sent: list[Array]
    ) -> None:
        self._remote, self._model, self._rule = remote, model, rule
        self._memory, self._sent, self._act = memory, sent, act

    def offer(self, i: int, sequence: int, item: int) -> Offer:
        return self._remote.offer(i, sequence, item, self._act, "value")

    def payload(self, i: int) -> Array:
        with np.errstate(invalid="ignore"):
            np.subtract(self._model.array(i), self._memory[i], out=self._sent[i])
        return self._remote.parcels.pack_change(i, self._sent[i])

    def take(self, i: int, answer: Answer, stream: Stream, size: int) -> None:
        self._remote.expect(i, size)
        self._become(i, self._remote.parcels.receive(i, stream), answer.version)

    def begin(self) -> None:
        self._model.begin()

    def settle(self, i: int) -> None:
        self._remote.fetch([i], self._become)

    def _become(self, i: int, c: Array, version: int) -> None:
        x, old, sent = self._model.array(i), self._memory[i], self._sent[i]
        for start in range(0, x.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            with np.errstate(invalid="ignore"):
                own = x[part] - (old[part] + sent[part])  # what was not sent: trained since, or lost by rounding
                own += c[part]
            np.copyto(own, c[part], where=~np.isfinite(own))
            x[part], old[part] = own, c[part]
        remote = self._remote
        if remote.layout.is_half(i):
            remote.layout.round(i, x)
            self._rule.rounded(x, old)
        self._model.commit(i)
        remote.seen[i] = version


class Whole:
    """The replica replaces the center."""

    def __init__(self, remote: Remote, model: Model, on_value: OnValue | None) -> None:
        self._remote, self._model, self._on_value = remote, model, on_value

    def offer(self, i: int, sequence: int, item: int) -> Offer:
        return self._remote.offer(i, sequence, item, Act("replace"), "none")

    def payload(self, i: int) -> Array:
        return self._remote.parcels.pack(i, self._model.array(i))

    def take(self, i: int, answer: Answer, stream: Stream, size: int) -> None:
        del stream
        if size:
            raise BadFrame("an answer without a value was expected.")
        self._remote.seen[i] = answer.version
        if answer.is_clean:
            self.settle(i)

    def begin(self) -> None:
        self._model.begin()

    def settle(self, i: int) -> None:
        if self._on_value is not None:
            self._on_value(i, self._model.array(i))


class Swap:
    """One parameter under a rule of the user's own: computed here on copies, which become real with the answer."""

    def __init__(
        self, remote: Remote, model: Model, rule: Exchanger, memory: Sequence[Array] | None, moment: Moment
    ) -> None:
        self._remote, self._model, self._rule, self._memory, self._moment = remote, model, rule, memory, moment
        self.is_done = self.is_clean = False
        self.staleness = 0

    def compute(self, i: int) -> list[str]:
        """Apply the rule to the center as it is now; gives its name if it is torn."""
        self.is_done = False
        return self._remote.fetch([i], self._compute, is_plain=True)

    def _compute(self, i: int, c: Array, version: int) -> None:
        self._before = self._model.array(i).copy()
        self._x, self._c, self._version = self._before.copy(), c.copy(), version
        self._past = None if self._memory is None else self._memory[i].copy()
        self._moment.staleness = self.staleness = max(0, version - self._remote.seen[i]) // 2
        self.is_clean = self._rule.exchange(self._x, self._c, self._past, self._moment)
        if self._remote.layout.is_half(i):
            self._remote.layout.round(i, self._x)
            if self._past is not None:
                self._rule.rounded(self._x, self._past)

    def offer(self, i: int, sequence: int, item: int) -> Offer:
        return self._remote.offer(i, sequence, item, Act("swap"), "none", seen=self._version, is_plain=True)

    def payload(self, i: int) -> Array:
        del i
        return self._c

    def take(self, i: int, answer: Answer, stream: Stream, size: int) -> None:
        del stream
        if size:
            raise BadFrame("an answer without a value was expected.")
        if answer.is_done:
            self._remote.seen[i] = answer.version
            self.settle(i)

    def begin(self) -> None:
        self._model.begin()

    def settle(self, i: int) -> None:
        x = self._model.array(i)
        if np.array_equal(x, self._before, equal_nan=True):
            x[:] = self._x
        else:  # it was trained on while the host was away
            x += self._x - self._before
        if self._memory is not None and self._past is not None:
            self._memory[i][:] = self._past
        self._model.commit(i)
        self.is_done = True
