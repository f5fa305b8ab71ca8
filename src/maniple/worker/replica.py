"""The replica: this worker's own copy of the parameters, and its dealings with the center."""

import functools
import math
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maniple.adapters import Adapter
from maniple.center.tensors import write_tensors
from maniple.contracts import Array, Center, Moment, Outcome
from maniple.errors import HostAway, InvalidArgument
from maniple.feed.waits import lost_s
from maniple.layout import Layout
from maniple.pace import Pace
from maniple.record import Events
from maniple.rules import Rule
from maniple.worker.owner import Owner
from maniple.worker.progress import Acts, Between, Progress
from maniple.worker.refusals import Refusals

_LEAN_BYTES = 32 << 20  # of the center that a look at it keeps resident
_GOLDEN = (5**0.5 - 1) / 2  # its multiples modulo 1 are evenly spread, however many workers there are
_HURRIED_S = 20.0  # for so long the last exchange of a worker that was told to end waits for a host that is away


class Replica:
    """One worker's copy of a shared model. Alone, without a center, every call is a no-op.

    Attributes:
        pace: when an exchange is due.
        is_center: the model shows the shared parameters, inside of `with replica.center():`.
        members: the ranks of all in the last round, as each of them knows them; None before the first.
        rounds, waited_s: the rounds in which all workers met, and the time spent waiting for them.
        samples: set it to a step's batch size before `optimizer.step()` for exact sample counts.
        steps, total_samples: the steps made and the samples seen so far.
        between: the time between a step and the next forward pass.
    """

    rounds: int = 0
    waited_s: float = 0.0
    members: tuple[int, ...] | None = None
    continues: bool = False  # its optimizer has the state that was saved before the run was resumed

    def __init__(
        self, model: Adapter, center: Center | None, *, rule: Rule, pace: Pace, events: Events, worker: Owner
    ) -> None:
        self.pace = pace
        self.steps = 0
        self.samples: int | None = None
        self.total_samples = 0
        self.is_exchanging = False
        self._rule, self._model, self._center, self._events, self._worker = rule, model, center, events, worker
        self._layout = Layout(model.entries)
        self._memory: list[Array] | None = None
        if rule.memory and (center is not None or rule.meets != "center"):
            self._memory = self._layout.views(self._layout.allocate())
        self._since_exchange = 0
        self._refusals = Refusals()
        self._spent_s = 0.0
        self.is_center = self._is_away = False
        self._progress, self._acts = Progress(events), Acts(events)
        self._start = self._stepped = self._progress.start
        self.between = Between(lambda: lost_s() + self._spent_s)
        self._unhooks = [model.on_step(self.step), model.on_forward(self.between.forward)]
        if center is not None:  # else this worker is alone, and may do as it likes
            self._unhooks.append(model.refuse_wrapping())

    @property
    def rule(self) -> Rule:
        """What an exchange does; its settings may be changed while running."""
        return self._rule

    @property
    def is_keeper(self) -> bool:
        """This worker saves the state of the optimizer: its own, or the one that all workers have."""
        return True

    def begin(self) -> None:
        """Take the center's values; the creator too: rules with a memory begin from them."""
        self.pull()

    def step(self) -> None:
        """Count one step, and exchange if the pace says so. The optimizer's hook calls it after each step."""
        self._count_step()
        if self._center is None:
            self.between.stepped()
            return
        if self.pace.due(self._since_exchange, time.perf_counter() - self._start):
            self.exchange()
        self._end_step()
        self._worker.end_if_told()

    def reduce(self, gradients: Any = None) -> None:
        """Average the gradients now, with a rule that does. Others leave them as they are: one script is for all."""
        del gradients

    def rest(self) -> None:
        """Nobody is to wait for this replica until its next step: with a rule of the center nobody does."""

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Backward passes in this block only add to the gradients."""
        yield

    def exchange(self) -> None:
        """Apply the rule now, to the replica and the center."""
        self._refuse_inside_center("exchange() was called")
        if self._center is None or self._worker.is_over:
            return
        moment = Moment(step=self.steps, live=max(1, self._center.live))
        begin = time.perf_counter()
        try:
            outcome, cost_s = self._timed(
                "exchange", self._center.exchange, self._model, self._rule, self._memory, moment
            )
        except HostAway as error:
            cost_s = time.perf_counter() - begin
            self._spent_s += cost_s
            self.pace.failed(cost_s, self._worker.rank * _GOLDEN % 1)
            self._mind_absence(error)
            return
        self._is_away = False
        self._spent_s += cost_s
        self._progress.exchanged(outcome)
        self.pace.exchanged(cost_s, outcome.size_bytes)
        self._since_exchange = 0
        self._worker.settled(self)
        self._refusals.mind(outcome)
        self._worker.end_if_told()

    def publish(self) -> None:
        """Let the center have what this worker has learned, for instance before it is saved."""
        if self._since_exchange:
            self.exchange()

    def publish_validated(self) -> bool:
        """Before the controller hears of a validation: set the center to what was validated, if that is this replica.

        With a rule of the center it is not: the center itself was looked at, and goes on changing.
        """
        return False

    def pull(self) -> None:
        """Set the replica to the center."""
        self._refuse_inside_center("pull() was called")
        if self._center is not None:
            with self._insisting():
                outcome, cost_s = self._timed("pull", self._center.pull, self._model, self._remember)
            self.pace.expect(2 * cost_s, 2 * outcome.size_bytes)
            self._worker.end_if_told()

    def push(self) -> None:
        """Set the center to the replica, whole; values that are not finite are refused."""
        self._refuse_inside_center("push() was called")
        if self._center is not None:
            with self._insisting():
                self._timed("push", self._center.push, self._model, self._remember)
            self._worker.end_if_told()

    @contextmanager
    def center(self) -> Generator[None]:
        """Look at the shared parameters for the length of a `with` block, then get one's own back bit for bit."""
        if self._center is None:
            yield
            return
        self._refuse_inside_center("another `with replica.center():` was opened")
        center, behind = self._center, 0

        def look(_: int, value: Array) -> None:
            nonlocal behind
            behind += value.nbytes
            if behind > _LEAN_BYTES:
                center.release()
                behind = 0

        # Own values and the center's are never resident in full beside the model's at the same time.
        center.release()
        own = self._layout.views(self._layout.allocate())
        self._copy(into=own)
        self.is_center = True
        try:
            with self._insisting():
                self._timed("look", functools.partial(center.pull, is_look=True), self._model, look)
            center.release()
            yield
        finally:
            self.is_exchanging = True  # a SIGTERM waits until the replica is whole again
            self._copy(out_of=own)
            self.is_exchanging = self.is_center = False
        self._worker.end_if_told()

    @property
    def sync_share(self) -> float:
        """The share of wall time spent in exchanges so far."""
        return self._spent_s / max(1e-9, time.perf_counter() - self._start)

    @property
    def spent_s(self) -> float:
        """The seconds spent in exchanges so far."""
        return self._spent_s

    def finish(self, *, exchange: bool) -> None:
        """Make the last exchange, if steps were made since the one before, and let the center go."""
        for unhook in self._unhooks:
            unhook()
        if self._center is None:
            return
        if exchange and self._since_exchange and not self.is_center:
            self.exchange()
            deadline = time.monotonic() + (_HURRIED_S if self._worker.is_hurried else math.inf)
            while self._is_away and not self._worker.is_over and time.monotonic() < deadline:
                time.sleep(0.1)
                self.exchange()
            self._stepped = time.perf_counter()
        self._acts.finish()
        self._progress.tell(
            self, max(self._stepped, self._progress.told)
        )  # what came after the last step is no training
        self._center.close()
        self._center = None

    def save(self, name: str, run: Path | None) -> Path:
        """Write the replica's parameters to a file, in the run folder if that is here, else in the working folder."""
        folder = run if run is not None and run.is_dir() else Path.cwd()
        self._model.begin()
        dtypes = [dtype for dtype, _, _ in self._layout.places]
        write_tensors(folder / name, self._layout.entries, dtypes, self._model.array)
        return folder / name

    def _count_step(self) -> None:
        self._refuse_inside_center("a training step was made")
        self.steps += 1
        self._since_exchange += 1
        if self.samples is not None:
            self.total_samples += self.samples
        else:
            self.total_samples = self._worker.samples_taken()
        self._worker.stepped(self)

    def _end_step(self) -> None:
        self._stepped = time.perf_counter()
        self.between.stepped()
        self._progress.stepped(self, self._stepped)
        self._worker.end_step(self)

    @contextmanager
    def _insisting(self) -> Generator[None]:
        """What this worker cannot go on without: a host that is away is waited for, one that has ended is not."""
        if self._worker.is_over:
            raise HostAway(
                "the host has ended the run, so there is no center to look at or to change any more. It is saved in "
                "the run folder; look at `worker.should_stop` before."
            )
        try:
            yield
        except HostAway:
            self._worker.mind_absence(self)
            raise

    def _mind_absence(self, error: HostAway) -> None:
        if not self._is_away:
            self._is_away = True
            self._events.write("away", reason=str(error))
            warnings.warn(f"{error}. Training goes on; exchanges are tried again", stacklevel=4)
        self._worker.mind_absence(self)
        self._worker.end_if_told()

    def _timed(self, event: str, act: Any, *args: Any) -> tuple[Outcome, float]:
        self.is_exchanging = True
        start, begin = time.time(), time.perf_counter()
        try:
            outcome: Outcome = act(*args)
        finally:
            self.is_exchanging = False
        cost_s = time.perf_counter() - begin
        row: dict[str, Any] = {}
        if outcome.wire_bytes:
            row["wire_bytes"] = outcome.wire_bytes
        if outcome.refused:
            row["refused"] = outcome.refused
        if outcome.torn:
            row["torn"] = outcome.torn
        self._acts.write(
            event,
            step=self.steps,
            start=start,
            end=start + cost_s,
            duration=cost_s,
            bytes=outcome.size_bytes,
            staleness=outcome.staleness,
            **row,
        )
        return outcome, cost_s

    def _refuse_inside_center(self, what: str) -> None:
        if self.is_center:
            raise InvalidArgument(
                f"{what} inside `with replica.center():`, where the model holds the shared parameters and changes are "
                "thrown away at the end. Train outside that block; it is for looking."
            )

    def _remember(self, i: int, value: Array) -> None:
        if self._memory is not None:
            self._rule.remember(value, self._memory[i])

    def _copy(self, *, into: list[Array] | None = None, out_of: list[Array] | None = None) -> None:
        self._model.begin()
        for i in range(len(self._layout.entries)):
            if into is not None:
                into[i][:] = self._model.array(i)
            if out_of is not None:
                self._model.array(i)[:] = out_of[i]
            self._model.commit(i)
