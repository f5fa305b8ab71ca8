"""Pairwise exchanges: random pairs of workers exchange their replicas after every k steps (Swap, Tournament).

A round has three collective calls. The workers tell each other who takes part, with which metric; from that, the run's
seed and the number of the round all draw the same pairs. Partners exchange what their rule asks for. An all-reduce of
one number ends the round: it tells whose replica is not finite, and newcomers begin after it.

The replicas differ by design, so nothing compares them. The center follows one of them: the best by the metric, else
that of the first worker. Each worker saves its own replica with its optimizer state, and continues with it in a resumed
run. A worker that joins later begins as a copy of another one.
"""

import functools
import io
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from maniple.adapters import Adapter
from maniple.adapters.base import choose_parameters
from maniple.clock import clock
from maniple.collectives.call import PassedOver, nonfinite_weight
from maniple.contracts import Array, Center, Collectives, ElasticMembership, ResidentVectors
from maniple.errors import InvalidArgument
from maniple.layout import Layout
from maniple.replica.context import TrainingContext
from maniple.replica.synchronous import Synchronous
from maniple.rules import Pairwise, draw_pairs

if TYPE_CHECKING:
    from maniple.replica.replica import Replica

_REPLICA, _PLAIN = "replica/", "plain"  # names of saved arrays: the replica's; JSON values beside the optimizer's
_ABSENT = -1.0  # in place of the first entry that is not finite: there is none


class SynchronousPairs(Synchronous):
    """Lets random pairs of workers exchange their replicas after every k steps."""

    _rule: Pairwise

    def __init__(self, center: Center | None, collectives: Collectives, *, wire: str) -> None:
        super().__init__(center, collectives, wire=wire)
        self._best: int | None = None  # the worker whose replica the center shows, by the last round
        self._restored: dict[str, Array] = {}  # the replica as it was before the run was resumed

    def attach(self, replica: "Replica", model: Adapter, context: TrainingContext) -> None:
        rule = replica.rule
        assert isinstance(rule, Pairwise)
        if rule.perturb is not None:
            groups = model.optimizer_state()[1].get("groups", [])
            if not groups:
                raise InvalidArgument(
                    f"{rule!r} perturbs the settings of an optimizer, but the model was shared without one that has "
                    "settings. Give share() a torch optimizer, or leave perturb out."
                )
            if not callable(rule.perturb):  # a wrong name is an error now, not in the first round
                rule.perturb_settings([dict(group) for group in groups], np.random.default_rng(0))
        super().attach(replica, model, context)

    def _open_vectors(self) -> tuple[Layout, ResidentVectors]:
        entries = self._model.entries
        chosen = choose_parameters({entry.name: entry for entry in entries}, self._rule.names, setting="names")
        self._exchanged = [i for i, entry in enumerate(entries) if entry.name in chosen]
        self._part = Layout([entries[i] for i in self._exchanged])
        self._own = np.zeros(self._part.size_bytes, np.uint8)  # this worker's values, as they are sent
        return self._part, self._collectives.reside({"float32": 1})

    def begin(self) -> None:
        """Begin with the center's values, the saved replica of a resumed run, or those of another worker."""
        super().begin()
        if self._restored:
            flat = {name.removeprefix(_REPLICA): value for name, value in self._restored.items()}
            self._write(self._layout.views(flat), range(len(self._model.entries)))
            self._restored = {}

    def step(self) -> None:
        replica = self.replica
        replica.is_exchanging = False
        replica.count_step()
        if replica.pace.due(replica.steps_since_exchange, clock.monotonic() - replica.start):
            self.exchange()

    def exchange(self) -> None:
        if self._is_finished:
            return
        self.replica.refuse_inside_center("exchange() was called")
        replica, metric = self.replica, self._metric()
        self._prepare_round()
        begin = clock.monotonic()
        replica.is_exchanging = True
        try:
            weight = self._exchange_with_partner(metric)
            self._all_reduce(weight)
            if (error := self._contributions.check_round(self._last, replica.steps)) is not None:
                self._end_diverged(error)
            if self._collectives.rank in self._last.nonfinite:
                self._pull_center()
        finally:
            replica.is_exchanging = False
        replica.progress.round(len(self._last.ranks), self._own.size)
        replica.count_exchange(clock.monotonic() - begin, self._own.size)
        if self._is_first:
            self.publish()
        self._context.exit_if_signalled()

    def _metric(self) -> float:
        """The value by which this worker is compared: the newest that the script has logged."""
        name, logged = self._rule.metric, self._context.logged
        try:
            return float(logged[name]) if name else 0.0
        except (KeyError, TypeError, ValueError):
            found = f"has logged {name}={logged[name]!r}, which is no number" if name in logged else "has not logged it"
            there = ", ".join(one for one in logged if one != "step") or "nothing"
            raise InvalidArgument(
                f"{self._rule!r} compares workers by {name!r}, but worker {self._collectives.rank} {found} (logged so "
                f"far: {there}). Call worker.log({name}=...) before the first round, in step {self.replica.steps}, or "
                "name another metric."
            ) from None

    def _exchange_with_partner(self, metric: float, *, is_shadow: bool = False) -> float:
        """Draw the pairs and exchange. Gives this worker's weight in the round.

        A shadow has finished training: it makes the calls, and has no partner.
        """
        rule, collectives, rank = self._rule, self._collectives, self._collectives.rank
        views = self._views(self._own)
        self._model.begin()
        for i, view in zip(self._exchanged, views, strict=True):
            view[:] = self._model.array(i)
        weight = self._contributions.checked_weight(1.0, self._flat(self._own))
        entry = _ABSENT if weight > 0 else -weight - 1.0
        try:
            told = collectives.all_gather(np.array([rank, not is_shadow, metric, entry], np.float64))
            values = {int(r): value if bad == _ABSENT else np.nan for r, is_in, value, bad in told if is_in}
            finite = {int(r) for r, is_in, _, bad in told if is_in and bad == _ABSENT}
            # Without a metric nobody can lose, so a replica that is not finite would only change places.
            pairs = draw_pairs(
                values if rule.metric else finite, seed=self._context.environment.seed, number=self.rounds
            )
            partner = pairs.get(rank, rank)
            gives = partner != rank and rule.takes(values[partner], values[rank])
            takes = partner != rank and rule.takes(values[rank], values[partner])
            received = collectives.exchange_pairs(self._message() if gives else self._own[:0], partner)
        except PassedOver:
            return weight  # the all-reduce finds it too, and this worker takes over the others' state
        self._best = rule.best({r: values[r] for r in finite}) if finite else None
        if takes and received is not None and received.size:
            self._take(received)
            if rule.metric:
                compared = {"own": values[rank], "other": values[partner]}  # null in the row if it is not finite
                self._context.events.write("replaced", step=self.replica.steps, by=partner, **compared)
            weight = 1.0
        return nonfinite_weight(int(entry)) if weight <= 0 else weight

    def _message(self) -> Array:
        """This worker's values, followed by its optimizer if the rule asks for it."""
        if not self._rule.takes_optimizer:
            return self._own
        arrays, plain = self._model.optimizer_state()
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, **arrays, **{_PLAIN: np.frombuffer(msgspec.json.encode(plain), np.uint8)})
        return np.concatenate([self._own, np.frombuffer(file.getbuffer(), np.uint8)])

    def _take(self, received: Array) -> None:
        """Take over the partner's values, and its optimizer if the rule asks for it."""
        rule, model = self._rule, self._model
        self._write(self._views(received), self._exchanged)
        arrays, plain = model.optimizer_state() if not rule.takes_optimizer else _unpacked(received[self._own.size :])
        if not plain.get("groups"):
            return
        seed = [self._context.environment.seed, self.rounds, self._collectives.rank]
        before = msgspec.json.encode(plain)
        rule.perturb_settings(plain["groups"], np.random.default_rng(seed))
        if rule.takes_optimizer or msgspec.json.encode(plain) != before:
            model.restore_optimizer(arrays, plain)

    def _write(self, views: list[Array], which: Any) -> None:
        self._model.begin()
        for i, view in zip(which, views, strict=True):
            self._model.array(i)[:] = view
            self._model.commit(i)

    def _flat(self, data: Array) -> dict[str, Array]:
        """The flat vectors in the bytes of a message; larger elements first, so that all are aligned."""
        flat, start = dict[str, Array](), 0
        for dtype, size in sorted(self._part.sizes.items(), key=lambda one: -np.dtype(one[0]).itemsize):
            stop = start + size * np.dtype(dtype).itemsize
            flat[dtype] = data[start:stop].view(dtype)
            start = stop
        return flat

    def _views(self, data: Array) -> list[Array]:
        return self._part.views(self._flat(data))

    # The center

    @property
    def _is_first(self) -> bool:
        """The center follows this worker's replica."""
        ranks = self._last.ranks
        return not ranks or self._collectives.rank == (self._best if self._best in ranks else min(ranks))

    @contextmanager
    def center(self) -> Generator[None]:
        """Let the model hold the center's values, a copy of one of the replicas."""
        if self._center is None or self._is_finished:
            with super().center():
                yield
            return
        with self._own_values_kept():
            self.replica.is_center = True
            try:
                with self._context.requiring_host(self.replica):
                    self.replica.timed("look", functools.partial(self._center.pull, peek=True), self._model)
                yield
            finally:
                self.replica.is_center = False

    def publish_validated(self) -> bool:
        return False  # what `center()` shows is the center itself

    def saved_state(self) -> dict[str, Array]:
        """This worker's replica: the center has only one of them."""
        flat = self._layout.allocate()
        self._model.begin()
        for i, view in enumerate(self._layout.views(flat)):
            view[:] = self._model.array(i)
        return super().saved_state() | {_REPLICA + dtype: value for dtype, value in flat.items()}

    def restore_state(self, arrays: Mapping[str, Array]) -> None:
        found = {name: value for name, value in arrays.items() if name.startswith(_REPLICA)}
        if {name.removeprefix(_REPLICA): value.size for name, value in found.items()} != self._layout.sizes:
            raise InvalidArgument("it holds no replica of this model")
        self._restored = found
        super().restore_state({name: value for name, value in arrays.items() if name not in found})

    # Membership and the end

    def _load_state(self, elastic: ElasticMembership) -> None:
        self._restored = {}  # the others' state is newer, and their optimizer's belongs to it
        super()._load_state(elastic)

    def _contribute_nothing(self) -> None:
        super()._contribute_nothing()
        self._exchange_with_partner(0.0, is_shadow=True)

    def _finish(self, timeout_s: float) -> None:
        """Leave without a last round, which would only mix replicas; the center gets the one that it follows."""
        del timeout_s  # rounds have their own deadline
        if self.replica.is_center:
            return
        if self._elastic is None:
            self._shadow()
        elif not self._elastic.is_current:  # the others have gone on without this worker, and one of them publishes
            return
        if self._is_first:
            self.publish()


def _unpacked(data: Array) -> tuple[dict[str, Array], dict[str, Any]]:
    """An optimizer's state in the bytes of a message."""
    with np.load(io.BytesIO(data.tobytes()), allow_pickle=False) as file:
        arrays: dict[str, Array] = {name: file[name] for name in file.files}
    return arrays, cast(dict[str, Any], msgspec.json.decode(arrays.pop(_PLAIN).tobytes()))
