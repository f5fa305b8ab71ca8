"""Joining a run: what a script sees of the other workers."""

import atexit
import math
import os
import signal
import sys
from collections.abc import Generator, Sequence, Sized
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, TypeVar

import numpy as np

from maniple.adapters import adapt
from maniple.errors import Conflict, InvalidArgument, ManipleError
from maniple.feed import waits
from maniple.feed.batches import DEFAULT, Batches, Feeds
from maniple.layout import Layout
from maniple.pace import Every, Pace, parse_pace
from maniple.place import Place, find
from maniple.record import Events
from maniple.rules import EASGD, Rule, parse_rule
from maniple.sampler import Sampler
from maniple.worker.replica import Replica
from maniple.worker.seat import take_seat
from maniple.worker.stop import StopAfter

T = TypeVar("T")

_joined: "Worker | None" = None


def join(address: str | None = None) -> "Worker":
    """Join the run that started this process; alone, a world of one. A second call gives the same worker.

    Args:
        address: HOST:PORT of a host to join instead, from anywhere; the token comes from the environment
            (MANIPLE_TOKEN_FILE or MANIPLE_TOKEN).
    """
    global _joined  # noqa: PLW0603 - one process is one worker
    if _joined is None or _joined.has_left:
        _joined = Worker(find(address=address))
    return _joined


class Worker:
    """This process as a worker.

    Attributes:
        rank, world: the place among all workers, and their number at the start of the run.
        local_rank, local_world: the same on this machine.
        node: this machine's name.
        seed: a seed of this rank's own.
        device: "cpu", "cuda:1" ...: as given to the launcher, else the GPU of this local rank, else the CPU.
    """

    def __init__(self, place: Place) -> None:
        self._seat = take_seat(place)
        self._events = Events(None) if self._seat is None else self._seat.events
        if self._seat is not None:
            place = self._seat.place
        self.rank, self.world = place.rank, place.world
        self.local_rank, self.local_world = place.local_rank, place.local_world
        self.node = place.node
        self.seed = int(np.random.SeedSequence([place.seed, place.rank]).generate_state(1)[0])
        self.has_left = False
        self._place = place
        self._pid = os.getpid()
        self._has_failed = False
        self._exit_code: int | None = None
        self._stop: StopAfter | None = None
        self._replicas: list[Replica] = []
        self._samplers: list[Sampler] = []
        self._feeds = Feeds(place, lambda: self.should_stop)
        if self._seat is not None:
            waits.report_to(self._events)
            self._events.write(
                "join",
                rank=self.rank,
                world=self.world,
                node=self.node,
                pid=self._pid,
                restarts=place.restarts,
            )
            self._watch_the_end()

    @property
    def device(self) -> str:
        """Where this worker should put its model."""
        if self._place.device:
            return self._place.device
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            return f"cuda:{self.local_rank % torch.cuda.device_count()}"
        return "cpu"

    @property
    def should_stop(self) -> bool:
        """It is time for this worker to end its loop."""
        return (self._stop is not None and self._stop.is_due) or self.is_over

    @property
    def is_over(self) -> bool:
        """The host has ended the run: there is nobody to exchange with any more."""
        return self._seat is not None and self._seat.is_over

    def share(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        rule: Rule | None = None,
        pace: Pace | None = None,
        wire: str | None = None,
        state: Sequence[str] = (),
        buffers: bool = True,
        lock: bool = True,
        stop: StopAfter | None = None,
    ) -> Replica:
        """Share `model` with all other workers.

        The first worker's values become the center; every other worker, also one that starts late or again,
        takes the center's. From then on each `optimizer.step()` is followed by an exchange when the pace says so.

        Args:
            model: a torch module, or a dict of NumPy arrays that are changed in place.
            optimizer: the torch optimizer; without one, call `replica.step()` after each update.
            rule: what an exchange does; by default that of the command line, else `EASGD()`.
            pace: when one is due; by default that of the command line, else every `rule.every` steps.
            wire: how values travel to a host elsewhere: "float32" (as they are, the default), "bfloat16", "float16" or
                "int8"; what a push loses by it is made up for by the next ones.
            state: names of optimizer state to share too, for instance ("momentum_buffer",).
            buffers: share floating-point buffers too, such as batch-norm statistics.
            lock: with False, workers may write the same parameter at once: faster under heavy contention, and
                some contributions may be lost.
            stop: when this worker should end by itself.
        """
        if rule is not None and not isinstance(rule, Rule):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"rule={rule!r} is no rule. Write for instance rule=maniple.EASGD().")
        self._stop = self._stop if stop is None else stop
        asked = self._place
        rule = _settled("rule", rule, parse_rule(asked.rule) if asked.rule else None, EASGD())
        pace = _settled("pace", pace, parse_pace(asked.pace) if asked.pace else None, Every(rule.every))
        wire = _settled("wire", wire, asked.wire, "float32")
        if wire != "float32":
            from maniple.wire.codecs import codec

            codec(wire)  # says which there are, before anything is shared
        adapter = adapt(model, optimizer, state=state, buffers=buffers)
        center, is_creator = None, False
        if self._seat is not None:
            note = f"{rule!r}, {pace!r}"
            name = f"center-{len(self._replicas)}"
            center, is_creator = self._seat.open(name, adapter, lock=lock, wire=wire, note=note)
            layout = Layout(adapter.entries)
            self._events.write(
                "share",
                rule=repr(rule),
                pace=repr(pace),
                wire=wire,
                digest=layout.digest,
                created=is_creator,
                parameters=len(layout.entries),
                bytes=layout.size_bytes,
            )
        replica = Replica(adapter, center, rule=rule, pace=pace, events=self._events, worker=self)
        replica.pull()  # the creator too: rules with a memory begin from the center's value
        self._replicas.append(replica)
        return replica

    def sampler(self, data: Sized, *, shuffle: bool = True) -> Sampler:
        """This worker's share of `data`, for a DataLoader's `sampler` argument or to iterate over."""
        sampler = Sampler(
            data,
            rank=self.rank,
            world=self.world,
            seed=self._place.seed,
            shuffle=shuffle,
            should_stop=lambda: self.should_stop,
        )
        self._samplers.append(sampler)
        return sampler

    def feed(self, name: str = DEFAULT) -> Batches:
        """The batches that producers push to feed `name`, to iterate over; each goes to exactly one worker."""
        return self._feeds.open(name)

    def log(self, **values: Any) -> None:
        """Write one timestamped row of numbers or words; `loss` is also shown live."""
        if self._seat is not None:
            step = self._replicas[0].steps if self._replicas else 0
            self._events.write("log", **{"step": step} | {name: _plain(value) for name, value in values.items()})

    @contextmanager
    def lock(self, timeout_s: float = 60.0) -> Generator[None]:
        """Be the only one of this machine's workers in the `with` block; a holder who dies gives it back."""
        if self._seat is None:
            yield
            return
        locks = self._seat.locks()
        try:
            with locks.hold(0, timeout_s=timeout_s, what="the workers' lock"):
                yield
        finally:
            locks.close()

    def leave(self) -> None:
        """Make the last exchange and leave the run. It happens by itself when the script ends."""
        if self.has_left or os.getpid() != self._pid:
            return
        self.has_left = True
        try:
            for replica in self._replicas:
                replica.finish(exchange=not self._has_failed)
        finally:
            self._feeds.close()
            if self._seat is not None:
                self._seat.leave(failed=self._has_failed)

    def mind_absence(self, replica: Replica) -> None:
        """The host could not be reached: train on, or end with the replica saved if that has gone on for too long."""
        assert self._seat is not None
        error = self._seat.absence()
        if error is not None and not self._has_failed:
            self._has_failed = True  # no last exchange is tried
            path = replica.save(f"replica-{self.rank}.safetensors", self._place.run)
            raise type(error)(f"{error} This worker's replica is saved in {path}.")

    def samples_taken(self) -> int:
        """The samples that this worker's samplers have handed out."""
        return sum(sampler.taken for sampler in self._samplers)

    def _watch_the_end(self) -> None:
        atexit.register(self._leave_at_exit)
        before = sys.excepthook

        def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            import traceback

            self._has_failed = True
            self._events.write(
                "failed",
                error=f"{kind.__name__}: {error}",
                exit_code=error.exit_code if isinstance(error, ManipleError) else 1,
                traceback="".join(traceback.format_exception(kind, error, trace)),
            )
            before(kind, error, trace)

        sys.excepthook = note
        try:
            if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._end)
        except ValueError:  # joined outside the main thread: signals stay as they are
            pass

    def _leave_at_exit(self) -> None:
        """The script has ended; if the last exchange fails, the process must not end as if all were well."""
        try:
            self.leave()
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(error.exit_code if isinstance(error, ManipleError) else 1)

    def _end(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM: end as if the script had ended here, so that the last exchange is made."""
        del frame
        self._exit_code = 128 + number
        if not any(replica.is_exchanging for replica in self._replicas):
            self.end_if_told()

    def end_if_told(self) -> None:
        """Follow a SIGTERM that came, if one did: at once, or after the exchange that it fell into."""
        if self._exit_code is not None and not self.has_left:
            raise SystemExit(self._exit_code)


def _settled(what: str, script: T | None, command_line: T | None, default: T) -> T:
    """The one that was given, by the script or the command line; both and different is an error."""
    if script is not None and command_line is not None and script != command_line:
        raise Conflict(
            f"the script asks for the {what} {script!r}, the command line for {command_line!r}. "
            f"Leave one of them out: `{what}=` in share(), or the option of the command."
        )
    if script is not None:
        return script
    return default if command_line is None else command_line


def _plain(value: Any) -> Any:
    """A number or word of what was logged: torch and NumPy scalars by their `item`, "nan" and "inf" as words."""
    item = getattr(value, "item", None)
    try:
        value = value if item is None else item()
    except (ValueError, RuntimeError):  # more than one element
        return value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no such number
