"""The replica: one worker's copy of a shared model. It counts steps, measures time and writes the record; how it is
shared is up to its `Sharing`.

Rows `progress` tell about twice a second how far a worker is, where its time went and what its exchanges did. Rows of
single exchanges are limited in number.
"""

import math
import resource
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from maniple.adapters import Adapter
from maniple.center.snapshot import write_tensors
from maniple.clock import clock
from maniple.contracts import Array, Outcome
from maniple.errors import HostAway, InvalidArgument
from maniple.feed.local_feed import WaitTimes
from maniple.layout import Layout
from maniple.pace import Pace
from maniple.record import Events
from maniple.replica.context import TrainingContext
from maniple.replica.samples import SamplesMark
from maniple.replica.sharing import Sharing
from maniple.rules import Rule

_UNUSUAL = ("refused", "torn", "locked")  # fields of rows that are always of interest
_OPTIONAL = ("wire_bytes", *_UNUSUAL)  # fields that only some rows have
_EVERY_S = 0.5  # frequent enough for a live view, and a row costs about 50 us
_HOUR_S, _LATER_S = 3600.0, 2.0  # after an hour only every 2 s: long runs are viewed at a coarser scale
_FULL_ROWS, _LATER_ROWS_S = 1000, 1.0  # rows of single exchanges: the first 1000 of each kind, then one per second
_SLOW = 10.0  # an exchange that took this many times the mean is recorded in any case
_AGES = 16  # staleness classes, powers of two; the last one counts everything older
_PAGE_BYTES = resource.getpagesize()


class Replica:
    """One worker's copy of a shared model. Alone, without other workers, every call is a no-op.

    Attributes:
        pace: when an exchange is due.
        sharing: how the replica is shared.
        is_center: the model holds the shared parameters, inside of `with replica.center():`.
        samples: the number of samples in the current batch. Set before `optimizer.step()` (before `backward()` with
            overlap), it makes sample counts exact, and is this worker's weight in a mean of gradients; if it is never
            set, all workers have the same weight.
        steps, total_samples: the steps made and the samples seen so far.
        steps_since_exchange: the steps that no exchange has shared yet.
        spent_s: the seconds spent in exchanges so far, waiting included.
        between: the time between a step and the next forward pass.
        continues: the optimizer has continued with the state that was saved before the run was resumed.
        is_exchanging: an exchange or a step is in progress; signals are handled when it is complete.
        is_primary: the first of this worker's replicas, whose steps the samplers follow.
        progress: the sums of all exchanges.
        start: the time at which the replica was created, on the monotonic clock.
    """

    def __init__(self, model: Adapter, sharing: Sharing, *, rule: Rule, pace: Pace, context: TrainingContext) -> None:
        self._rule, self.pace, self.sharing = rule, pace, sharing
        self.steps = self.total_samples = self.steps_since_exchange = 0
        self.samples: int | None = None
        self.spent_s = 0.0
        self.is_center = self.is_exchanging = self.continues = self._is_finished = False
        self.is_primary = not context.replicas
        self.layout = Layout(model.entries)
        self.between = DataTime(self)
        self.progress = Progress(context.events)
        self.start = self._last_step = self.progress.start
        self._model, self._context = model, context
        self._rows = ExchangeRows(context.events)
        if rule.nesterov is not None:
            model.use_nesterov(rule.nesterov)
        sharing.attach(self, model, context)
        self._unhook: list[Callable[[], None]] = [model.on_step(self.step), model.on_forward(self.between.forward)]

    @property
    def rule(self) -> Rule:
        """What an exchange computes; its settings may be changed while training."""
        return self._rule

    @property
    def rounds(self) -> int:
        """The synchronous rounds so far."""
        return self.sharing.rounds

    @property
    def members(self) -> tuple[int, ...] | None:
        """The ranks of the workers in the last round, as each of them knows them; None before the first round."""
        return self.sharing.members

    @property
    def waited_s(self) -> float:
        """The seconds spent waiting for other workers so far."""
        return self.sharing.waited_s

    @property
    def sync_share(self) -> float:
        """The share of wall time spent in exchanges so far."""
        return self.spent_s / max(1e-9, clock.monotonic() - self.start)

    def step(self) -> None:
        """Count one step, and exchange if the pace says so. The optimizer's hook calls it after each step."""
        if self.is_center:
            self.refuse_inside_center("a training step was made")
        self.sharing.step()
        self._last_step = now = clock.monotonic()
        self.between.step(now)
        if now >= self.progress.next_row:
            self.progress.write(self, now)
        context = self._context
        if now >= context.optimizer_states.next_check and context.optimizer_states.is_due(now):
            self.sharing.publish_for_snapshot()
            context.optimizer_states.save()
        if context.exit_code is not None:
            context.exit_if_signalled()

    def count_step(self) -> None:
        """Count a step. The way of sharing calls it before the exchange that may follow."""
        self.steps += 1
        self.steps_since_exchange += 1
        context = self._context
        if context.host.changes is not context.followed:
            context.follow_changes()
        if self.steps == 1:
            context.check_division()
        if context.stop_after is not None:
            context.stop_after.stepped()
        if self.samples is not None:
            self.total_samples += self.samples
        if context.samples.trained:
            if self.samples is None:
                self.total_samples = context.samples.taken
            if self.is_primary:
                context.samples.step()

    def mark(self) -> "TrainingMark":
        """How far training is now. An exchange that is sent now shares what was learned until this mark."""
        samples = self._context.samples
        return TrainingMark(self.steps, samples.mark() if self.is_primary and samples.trained else None)

    def count_exchange(self, cost_s: float, size_bytes: int, mark: "TrainingMark | None" = None) -> None:
        """Count an exchange that has shared all steps so far, or those until `mark`. `cost_s` held up training."""
        mark = self.mark() if mark is None else mark
        self.spent_s += cost_s
        self.pace.exchanged(cost_s, size_bytes)
        self.steps_since_exchange = self.steps - mark.steps
        if mark.samples is not None:
            self._context.samples.exchange(mark.samples)

    def exchange(self) -> None:
        """Exchange now: apply the rule to the replica and the center, or meet all other workers."""
        self.sharing.exchange()

    def reduce(self, gradients: Mapping[str, Array] | None = None) -> None:
        """Average the gradients now, for instance to clip what the optimizer will use.

        The step that follows uses them as they are. For a model of NumPy arrays, pass the gradients: they are averaged
        in place. Rules that do not average gradients leave them as they are, so one script works with every rule.
        """
        self.sharing.reduce(gradients)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in this block only add to the gradients; they are averaged at the next step after it."""
        return self.sharing.no_sync()

    def pull(self) -> None:
        """Set the replica to the center. Synchronous replicas are up to date after each round."""
        self.refuse_inside_center("pull() was called")
        self.sharing.pull()

    def push(self) -> None:
        """Set the center to the replica; values that are not finite are refused."""
        self.refuse_inside_center("push() was called")
        self.sharing.push()

    @contextmanager
    def center(self) -> Generator[None]:
        """Hold the shared parameters for the length of a `with` block, then restore the replica's bit for bit."""
        self.refuse_inside_center("another `with replica.center():` was opened")
        with self.sharing.center():
            yield
        self._context.exit_if_signalled()

    def finish(self, *, exchange: bool, timeout_s: float = math.inf) -> None:
        """Make the last exchange, unless all steps are shared, and let the center go.

        Args:
            exchange: False if the script has failed.
            timeout_s: how long to wait for a host that is away.
        """
        if self._is_finished:
            return
        self._is_finished = True
        for unhook in self._unhook:
            unhook()
        unshared = self.steps_since_exchange
        self.sharing.finish(exchange=exchange, timeout_s=timeout_s)
        if unshared > self.steps_since_exchange:
            self._last_step = clock.monotonic()
        self._rows.finish()
        # What came after the last step, such as a validation, is no training time.
        self.progress.write(self, max(self._last_step, self.progress.written))

    def save(self, name: str, run: Path | None) -> Path:
        """Write the replica's parameters to a file in the run folder, if that is on this machine, else in the working
        folder."""
        folder = run if run is not None and run.is_dir() else Path.cwd()
        self._model.begin()
        dtypes = [dtype for dtype, _, _ in self.layout.places]
        write_tensors(folder / name, self.layout.entries, dtypes, self._model.array)
        return folder / name

    def timed(self, event: str, act: Callable[..., Outcome], *args: Any) -> tuple[Outcome, float]:
        """Call `act(*args)`, an operation on the center, and write a row about it; gives its outcome and seconds."""
        self.is_exchanging = True
        start, begin = clock.time(), clock.monotonic()
        try:
            outcome = act(*args)
        except HostAway:
            self.write_exchange("broken", start, clock.monotonic() - begin, operation=event)
            raise
        finally:
            self.is_exchanging = False
        cost_s = clock.monotonic() - begin
        self.write_exchange(event, start, cost_s, outcome)
        return outcome, cost_s

    def write_exchange(
        self, event: str, start: float, duration_s: float, outcome: Outcome | None = None, **values: Any
    ) -> None:
        """Write a row about an operation on the center that began at the time `start`."""
        row = dict(values)
        if outcome is not None:
            row |= {"bytes": outcome.size_bytes, "staleness": outcome.staleness}
            row |= {name: value for name in _OPTIONAL if (value := getattr(outcome, name))}
        self._rows.write(event, step=self.steps, start=start, end=start + duration_s, duration=duration_s, **row)

    def refuse_inside_center(self, what: str) -> None:
        """Raise InvalidArgument inside of `with replica.center():`."""
        if self.is_center:
            raise InvalidArgument(
                f"{what} inside `with replica.center():`, where the model holds the shared parameters and changes are "
                "discarded at the end. Train outside of that block; it is for reading."
            )


class TrainingMark(NamedTuple):
    """How far a worker's training was at one time."""

    steps: int
    samples: SamplesMark | None  # None if no samples are counted for this replica


def totals(replica: Replica) -> dict[str, float]:
    """The seconds since the start that were not compute, by their purpose."""
    data = WaitTimes.total_s + replica.between.seconds
    return {"exchange": replica.spent_s - replica.waited_s, "data": data, "others": replica.waited_s}


class DataTime:
    """The time from the end of a step to the next forward pass that trains: loading data, and whatever else a script
    does there, such as logging and validation.

    Exchanges and waiting for feeds are accounted for elsewhere and subtracted.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._seconds = self._counted_s = 0.0
        self._since: float | None = None  # the end of a step that no forward pass has followed
        self._seen = self._unseen = 0  # steps with and without a forward pass before them

    @property
    def is_measured(self) -> bool:
        """Forward passes are observed. Those of compiled modules and of NumPy models are not."""
        return self._seen > 0 and self._seen >= self._unseen

    @property
    def seconds(self) -> float:
        """The sum so far."""
        if self._since is None or not self.is_measured:
            return self._seconds
        counted_s = WaitTimes.total_s + self._replica.spent_s - self._counted_s
        return self._seconds + max(0.0, clock.monotonic() - self._since - counted_s)

    def step(self, now: float) -> None:
        """Start measuring at the end of a step."""
        self._unseen += self._since is not None
        self._since, self._counted_s = now, WaitTimes.total_s + self._replica.spent_s

    def forward(self) -> None:
        """Stop measuring at the first forward pass after a step."""
        if self._since is not None:
            self._seen += 1
            self._seconds, self._since = self.seconds, None


class Progress:
    """Sums up what the exchanges of one replica do. The replica writes a row when `next_row` has come.

    In a row `exchanges`, `rounds`, `bytes` and the seconds of each part count from the worker's start; `staleness`,
    `ages` and `together` describe the exchanges since the previous row.

    Attributes:
        exchanges: the exchanges with the center so far.
        hidden_s: the time that exchanges and rounds took in the background while training continued.
    """

    def __init__(self, events: Events) -> None:
        self.start = self.written = clock.monotonic()
        self.next_row = self.start  # the first row is written at the first step, where training time begins
        self._events = events
        self.exchanges = self._rounds = self._bytes = 0
        self.hidden_s = 0.0
        self._reset()

    def exchange(self, outcome: Outcome) -> None:
        """Count an exchange with the center."""
        self.exchanges += 1
        self._bytes += outcome.size_bytes
        self._staleness += outcome.staleness
        self._ages[min(_AGES - 1, int(outcome.staleness).bit_length())] += 1

    def round(self, workers: int, size_bytes: int) -> None:
        """Count a synchronous round with the values of `workers` workers in it."""
        self._rounds += 1
        self._bytes += size_bytes
        self._together[workers] = self._together.get(workers, 0) + 1

    def write(self, replica: Replica, now: float) -> None:
        """Write a row."""
        self.written = now
        self.next_row = now + (_EVERY_S if now - self.start < _HOUR_S else _LATER_S)
        elapsed = now - self.start
        row: dict[str, Any] = {"exchanges": self.exchanges, "rounds": self._rounds, "bytes": self._bytes}
        if made := sum(self._ages):
            oldest = max(age for age, count in enumerate(self._ages) if count)
            row |= {"staleness": self._staleness / made, "ages": self._ages[: oldest + 1]}
        if self._together:
            row["together"] = self._together
        if replica.between.is_measured:
            row["measures_data"] = True
        if self.hidden_s:
            row["hidden"] = self.hidden_s
        self._reset()
        self._events.write(
            "progress",
            step=replica.steps,
            samples=replica.total_samples,
            elapsed=elapsed,
            sync_share=replica.spent_s / max(1e-9, elapsed),
            **totals(replica),
            **row,
            **_resources(),
        )

    def _reset(self) -> None:
        self._staleness = 0.0
        self._ages = [0] * _AGES  # ages[k]: exchanges with a staleness of 2^(k-1) to 2^k - 1; ages[0]: of 0
        self._together: dict[int, int] = {}  # rounds by the number of their workers


class ExchangeRows:
    """Rows of single exchanges, pulls, pushes and looks of one replica.

    The `progress` rows have their sums, so not every one needs a row: the first thousand of each kind, then one per
    second. Exchanges of which something was refused, torn or left out, or that took ten times the mean, have a second
    budget of the same size. `skipped` counts those of the same kind between a row and the previous one.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._kinds: dict[str, _Kind] = {}
        self._unusual = _Budget()

    def write(self, event: str, *, duration: float, **values: Any) -> None:
        """Write a row of an exchange, or count it as skipped."""
        kind = self._kinds.get(event)
        if kind is None:
            kind = self._kinds[event] = _Kind()
        kind.seconds += duration
        kind.count += 1
        is_unusual = not values.keys().isdisjoint(_UNUSUAL) or duration > _SLOW * kind.seconds / kind.count
        values["duration"] = duration
        now = clock.monotonic()
        if (is_unusual and self._unusual.take(now)) or kind.budget.take(now):
            if kind.skipped:
                values["skipped"] = kind.skipped
            kind.skipped, kind.last = 0, None
            self._events.write(event, **values)
        else:
            kind.skipped += 1
            kind.last = values

    def finish(self) -> None:
        """Write the last exchange of each kind, unless it has a row."""
        for event, kind in self._kinds.items():
            if kind.last is not None:
                skipped = {"skipped": kind.skipped - 1} if kind.skipped > 1 else {}
                self._events.write(event, **kind.last, **skipped)
                kind.skipped, kind.last = 0, None


class _Budget:
    def __init__(self) -> None:
        self._left = _FULL_ROWS
        self._next = 0.0

    def take(self, now: float) -> bool:
        """True if a row may be written now; it then counts."""
        if self._left:
            self._left -= 1
        elif now < self._next:
            return False
        self._next = now + _LATER_ROWS_S
        return True


@dataclass(slots=True)
class _Kind:
    count: int = 0
    seconds: float = 0.0
    skipped: int = 0  # since the last row
    last: dict[str, Any] | None = None  # the newest, if it was skipped
    budget: _Budget = field(default_factory=_Budget)


def _resources() -> dict[str, Any]:
    """Processor seconds, memory and GPU memory of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    row: dict[str, Any] = {"cpu": used.ru_utime + used.ru_stime}
    try:
        row["memory"] = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        row["memory"] = used.ru_maxrss * 1024
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        row["gpu_memory"] = cuda.memory_allocated()
    return row
