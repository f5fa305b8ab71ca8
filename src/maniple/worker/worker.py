"""Joining a run: what a script sees of the other workers."""

import os
import sys
import warnings
from collections.abc import Iterator, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, cast

import numpy as np

from maniple.adapters import Adapter, Params, adapt, own_device
from maniple.circle.calls import Calls
from maniple.contracts import Center, Circle
from maniple.errors import InvalidArgument, say
from maniple.feed.batches import DEFAULT, Batches, Feeds
from maniple.layout import described
from maniple.pace import Pace
from maniple.place import Place, find, mark_joined, refuse_inherited
from maniple.record import Events
from maniple.rules import Rule
from maniple.sampler import Sampler, Shard
from maniple.worker.alone import Alone
from maniple.worker.asked import (
    check_center,
    check_return,
    is_in_step,
    settle,
    tell_undivided,
    tell_unshared,
)
from maniple.worker.changing import Changing
from maniple.worker.circles import Circles
from maniple.worker.ending import Ending, failure, mind_early_end, staying, watch_the_end
from maniple.worker.logged import logged
from maniple.worker.optimizers import Optimizers
from maniple.worker.repeatable import check_rule, seed_all
from maniple.worker.replica import Replica
from maniple.worker.samples import Samples
from maniple.worker.seat import take_seat
from maniple.worker.stop import StopAfter

_joined: "Worker | None" = None
_SHARES_TOO = ("maniple.client", "maniple.pool")  # modules that are imported when the script first uses them


def join(address: str | None = None, *, own_data: bool = False) -> "Worker":
    """Join the run that started this process; alone, a world of one. A second call gives the same worker.

    A process that a worker has started, such as a data loader's, is not part of the run: there it is InvalidArgument.

    Args:
        address: HOST:PORT of a host to join instead, from anywhere; the token comes from the environment
            (MANIPLE_TOKEN_FILE or MANIPLE_TOKEN).
        own_data: this script divides the data itself, by `worker.rank` say, or each worker makes its own, as in
            reinforcement learning: there is no warning that nothing divides it.
    """
    global _joined  # noqa: PLW0603 - one process is one worker
    if address is None:
        refuse_inherited()
    if _joined is None or _joined.has_left:
        _joined = Worker(find(address=address))
    if own_data:
        _joined.has_own_data = True
    return _joined


class Worker(Calls):
    """This process as a worker.

    Attributes:
        rank, world: the place among all workers, and their number at the start of the run.
        local_rank, local_world: the same on this machine.
        node: this machine's name.
        device: "cpu", "cuda:1" ...: as given to the launcher, else the GPU of this local rank, else the CPU.
    """

    def __init__(self, place: Place) -> None:
        self._replicas: list[Replica] = []
        self._samples, self._alone = Samples(), Alone(place.limits, self._count)
        self._seat = take_seat(place, self._count)
        self._events = Events(None) if self._seat is None else self._seat.events
        place = place if self._seat is None else self._seat.place
        self.rank, self.world, self.node = place.rank, place.world, place.node
        self.local_rank, self.local_world = place.local_rank, place.local_world
        self._seed = int(np.random.SeedSequence([place.seed, place.rank]).generate_state(1)[0])
        if place.deterministic:
            seed_all(self._seed)
        self._samples.settle_in(self._seat, place)
        segment = None if self._seat is None else self._seat.segment
        self._optimizers = Optimizers(place, None if segment is None else segment.path)
        self.has_left = self._has_failed = self._has_asked = self._is_division_checked = False
        self.has_own_data = place.own_data
        self._place, self._pid = place, os.getpid()
        self._ending = Ending(self._replicas, has_left=lambda: self.has_left)
        self._stop: StopAfter | None = None
        self._changing = Changing(self._seat, self._events)
        self._circles = Circles(place, self._seat, self._events, self.end_if_told)
        self._feeds = Feeds(place, self._events, self._is_told_to_stop)
        if not place.is_alone:
            who = {"rank": self.rank, "world": self.world, "node": self.node, "pid": self._pid}
            self._events.write("join", **who, restarts=place.restarts)
            mark_joined(self.rank)
            watch_the_end(at_exit=self._depart, on_error=self._fail, on_signal=self._ending.hear)

    @property
    def seed(self) -> int:
        """A seed of this rank's own. A script that uses it draws other batches in each worker."""
        self.has_own_data = True
        return self._seed

    @property
    def device(self) -> str:
        """Where this worker should put its model."""
        return self._place.device or own_device(self.local_rank)

    @property
    def _circle(self) -> Circle:
        return self._circles.calls

    @property
    def should_stop(self) -> bool:
        """It is time for this worker to end its loop: the controller says so, or its own limits."""
        return self._is_told_to_stop() or self._samples.are_finished

    @property
    def is_over(self) -> bool:
        """The host has ended the run: there is nobody to exchange with any more."""
        return self._seat is not None and self._seat.is_over

    @property
    def is_hurried(self) -> bool:
        """A signal has told this worker to end."""
        return self._ending.is_told

    def share(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        rule: Rule | None = None,
        pace: Pace | None = None,
        wire: str | None = None,
        state: Sequence[str] = (),
        params: Params | None = None,
        buffers: bool = True,
        lock: bool = True,
        stop: StopAfter | None = None,
        save_optimizer: bool = True,
    ) -> Replica:
        """Share `model` with all other workers.

        The first worker's values become the center; every other worker, also one that starts late or again,
        takes the center's. From then on each `optimizer.step()` is followed by an exchange when the pace says so;
        with a rule that averages gradients, such as `BSP()`, it is preceded by one.

        Args:
            model: a torch module; its parameters, as a dict (`dict(model.named_parameters())`) or in a row
                (`model.parameters()`); or a dict of NumPy arrays that are changed in place.
            optimizer: the torch optimizer; without one, call `replica.step()` after each update.
            rule: what an exchange does; by default that of the command line, else `EASGD()`.
            pace: when one is due; by default that of the command line, else every `rule.every` steps.
            wire: how values travel to a host elsewhere or in the circle: "float32" (as they are, the default),
                "bfloat16", "float16" or, to a host only, "int8"; what a push there loses is made up for by the next.
            state: names of optimizer state to share too, for instance ("momentum_buffer",).
            params: which parameters are shared, the same for all workers: names and patterns (["head.*"]), or a
                function of name and parameter. The others are each worker's own, under BSP with their gradients.
            buffers: share floating-point buffers too, such as batch-norm statistics. One that holds NaN or infinity,
                such as a mask, stays each worker's own.
            lock: with False, workers may write the same parameter at once: faster under heavy contention, and
                some contributions may be lost.
            stop: when this worker should end by itself.
            save_optimizer: save the optimizer's state in the run folder with each snapshot and when this worker
                leaves, and continue with it after `--resume`; learning rates and the like are the script's own.
        """
        rule, pace, wire = settle(self._place, rule, pace, wire)
        check_rule(self._place, rule)
        check_center(self._place, rule)
        self._stop = self._stop if stop is None else stop
        adapter = adapt(model, optimizer, state=state, buffers=buffers, params=params)
        if adapter.local_buffers and not self._place.is_alone:
            names = ", ".join(map(repr, adapter.local_buffers))
            self._events.write("local buffers", names=list(adapter.local_buffers))
            warnings.warn(f"buffers that are not finite are not shared: {names} (a mask of -inf, say)", stacklevel=2)
        center, name = None, f"center-{len(self._replicas)}"
        if self._seat is not None:
            center, is_creator = self._seat.open(name, adapter, rule=rule, lock=lock, wire=wire)
            self._events.write(
                "share",
                rule=repr(rule),
                meets=rule.meets,
                pace=repr(pace),
                wire=wire,
                created=is_creator,
                **described(adapter),
            )
        replica = self._replica(adapter, center, rule, pace, wire)
        if save_optimizer:  # before it begins: those who are there already know more
            replica.continues = self._optimizers.add(len(self._replicas), adapter, replica)
        replica.begin()
        self._changing.begin(replica)
        self._replicas.append(replica)
        return replica

    def _replica(self, adapter: Adapter, center: Center | None, rule: Rule, pace: Pace, wire: str) -> Replica:
        settings: dict[str, Any] = {"rule": rule, "pace": pace, "events": self._events, "worker": self}
        if rule.meets == "center" or self._place.is_alone:
            return Replica(adapter, center, **settings)
        from maniple.worker.synced import Synced

        leased = "has a sampler that leases samples, so workers may have different numbers of batches"
        obstacle = leased if self._samples.are_leased else ""
        circle = self._circles.open_for(f"circle-{len(self._replicas)}", adapter, rule, obstacle=obstacle)
        check_return(self._place, self._replicas, circle.name)
        self._samples.check_circle(circle.name)
        return Synced(adapter, center, circle, wire=wire, **settings)

    def sampler(
        self,
        data: Sized | int,
        *,
        static: bool | None = None,
        balance: bool = False,
        shuffle: bool = True,
        chunk: int | None = None,
        validation: bool = False,
    ) -> "Sampler | Shard":
        """The samples of `data` that this worker trains on, for a DataLoader's `sampler` argument or to iterate over.

        Workers take chunks of an epoch, up to `len(sampler)` samples in a pass: each sample once per epoch over all
        workers, and at least once if one dies and is started again. `.batches(size)` gives arrays of indices,
        `.set_epoch(k)` is as in torch's DistributedSampler, and `.progress` tells how many epochs were handed out.

        Args:
            data: the data set, or how many samples there are; the same for all workers.
            static: instead a fixed share for each worker, equal in size and the same in each run. By default so with
                rules of the circle, where all make the same number of steps.
            balance: no limit to a pass: fast workers take more, and what a dead one has left is taken in the same
                epoch. Then `len(sampler)` is only about right, so build no learning-rate schedule from it. It has no
                effect on fixed shares.
            shuffle: a new order in each epoch, the same for all workers.
            chunk: how many samples are taken at a time; by default about 1/32 of a worker's share.
            validation: they are looked at and not trained on. Each sample once over all workers, also where shares
                are fixed: those may differ by one then, so make no collective call inside of this loop.
        """
        count = data if isinstance(data, int) else len(data)
        if static and balance:
            raise InvalidArgument(
                "static=True and balance=True exclude each other: one gives each worker a fixed share, the other lets "
                "fast workers take more. Leave one of them out."
            )
        self._events.write("sampler", size=count, validation=validation)
        return self._samples.sampler(
            count,
            seat=self._seat,
            place=self._place,
            static=is_in_step(self._place, self._replicas) if static is None else static,
            balance=balance,
            shuffle=shuffle,
            chunk=chunk,
            validation=validation,
            should_stop=self._is_told_to_stop,
            is_shared=lambda: bool(self._replicas),
            on_wait=self._rest,
        )

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs that are left to train, of `count`: `for epoch in worker.epochs(5):`.

        All from 0 on, as `range(count)` gives; in a run that was resumed, and for a worker that comes late, from the
        first one of which samples are left on. The loop ends early with `--max-epochs`, and when the worker should
        stop. Make the samplers before it, and go through each once per epoch.
        """
        if count < 0:
            raise InvalidArgument(f"{count} epochs cannot be made. Give 0 or more.")
        epoch, end = self._samples.begin_loop(count), min(count, self._place.limits.max_epochs or count)
        while epoch < end and not self.should_stop:
            yield epoch
            self._samples.passed()
            epoch += 1

    def ask(self, request: str, /, *, timeout_s: float = 60.0, **info: Any) -> Any:
        """Ask the controller, and get its answer: anything that JSON knows.

        An exception in the controller's handler is raised here as HandlerFailed, with its traceback; WaitedTooLong if
        no answer comes within `timeout_s`. A worker alone is answered by the default controller.
        """
        if not isinstance(request, str):  # pyright: ignore[reportUnnecessaryIsInstance] - a dict, in older systems
            raise InvalidArgument(_no_request(request))
        if request.startswith("maniple-"):
            raise InvalidArgument(f"{request!r} cannot be asked: what begins with 'maniple-' is maniple's own.")
        self._has_asked = True
        if request == "validated" and True in [replica.publish_validated() for replica in self._replicas]:
            info["published"] = True  # the center is what was validated: it, and no older one, is kept as the best
        if self._seat is not None:
            return self._seat.ask(request, info, timeout_s=timeout_s)
        return self._alone.ask(request, info)

    def feed(self, name: str = DEFAULT) -> Batches:
        """The batches that producers push to feed `name`, to iterate over; each goes to exactly one worker."""
        return self._feeds.open(name)

    def log(self, **values: Any) -> None:
        """Write one timestamped row of numbers or words; `loss` is also shown live."""
        self.record("log", **values)

    def record(self, event: str, /, **values: Any) -> None:
        """Write one row of another kind."""
        self._events.write(event, **logged(values, self._replicas))

    def lock(self, timeout_s: float = 60.0) -> AbstractContextManager[None]:
        """Be the only one of this machine's workers in the `with` block; a holder who dies gives it back."""
        return nullcontext() if self._seat is None else self._seat.lock(timeout_s)

    def leave(self) -> None:
        """Make the last exchange and leave the run. It happens by itself when the script ends."""
        if self.has_left or os.getpid() != self._pid:
            return
        self.has_left = True
        mark_joined(None)
        if not self._has_failed and not self.is_hurried:
            self._tell_if_late()
        idle = {"unshared": True} if self._is_idle and not (self._has_failed or self.is_hurried or self.is_over) else {}
        if idle:
            tell_unshared(self._place, None if self._seat is None else self._seat.segment)
        try:
            for replica in self._replicas:
                replica.finish(exchange=not self._has_failed)
            if not self._has_failed:
                self._samples.finish(is_early=self.is_hurried or self._is_told_to_stop())
                for replica in self._replicas[:1]:
                    if replica.rule.meets == "center":
                        self._samples.note(replica, is_common=False, is_last=True)
        finally:
            self._feeds.close()
            self._circles.close()
            if self._seat is not None:
                self._seat.leave(is_early=self._has_failed or self.is_hurried, failed=self._has_failed, **idle)
        if not self._has_failed:
            self._optimizers.save()

    def _tell_if_late(self) -> None:
        """Say so if this worker came when nothing was left to do, rather than end silently without a step."""
        if self._seat is None or not self._samples.were_gone or any(replica.steps for replica in self._replicas):
            return
        stop = "the run had ended" if self.is_over else self._seat.stop and f"the run was stopping ({self._seat.stop})"
        reason = stop or "all samples had been handed out"
        self._events.write("late", reason=reason)
        say(f"worker {self.rank} made no step: {reason} when it joined")

    def _depart(self) -> None:
        """The script has ended."""
        is_cut_short = self.is_over and not self.has_left and not self._has_failed and not self.is_hurried
        with staying(self._place, has_failed=lambda: self._has_failed, is_told=lambda: self.is_hurried):
            self.leave()
        if is_cut_short:
            mind_early_end(self._place)

    def mind_absence(self, replica: Replica) -> None:
        """The host could not be reached: train on, or end with the replica saved if that has gone on for too long."""
        if not self._has_failed and self._seat is not None and (error := self._seat.absence()) is not None:
            self._has_failed = True  # no last exchange is tried
            path = replica.save(f"replica-{self.rank}.safetensors", self._place.run)
            raise type(error)(f"{error} This worker's replica is saved in {path}.")

    def samples_taken(self) -> int:
        """The samples that this worker's samplers have handed out."""
        return self._samples.taken

    def stepped(self, replica: Replica) -> None:
        """A replica has made a training step; of several models that are trained together, the first counts."""
        self._changing.mind(self._replicas)
        if not self._is_division_checked:
            self._is_division_checked = True
            if not (self.has_own_data or self._samples.are_divided or self._feeds.is_used):
                tell_undivided(self._place, self._events)
        if self._stop is not None:
            self._stop.stepped()
        if self._replicas and replica is self._replicas[0]:
            self._samples.stepped()

    def end_step(self, replica: Replica) -> None:
        """A step is over, exchanges and all: if a snapshot is being written, save what the center does not have."""
        if self._optimizers.is_due():
            if replica.rule.meets == "gradients" and replica.is_keeper:
                replica.publish()  # the center, its position in the data and the optimizer are of the same step
            self._optimizers.save()

    def settled(self, replica: Replica) -> None:
        """The center has all that a replica has learned."""
        if self._replicas and replica is self._replicas[0]:
            self._samples.settled(replica)
            if replica.rule.meets == "center":
                self._samples.note(replica, is_common=False)

    def kept(self, replica: Replica, workers: int) -> None:
        """The center was brought up to date after a round of so many workers.

        A round that some have missed tells nothing of their samples: who continues from it must not leave them out.
        Those who were given up have no samples any more.
        """
        is_whole = workers >= self.world or workers >= self._samples.remaining  # which looks into a folder
        if self._replicas and replica is self._replicas[0] and is_whole:
            self._samples.note(replica, is_common=True)

    def position(self, replica: Replica) -> Any:
        """Where this worker is in the data, for one that comes to the circle."""
        return self._samples.position(replica)

    def continue_at(self, position: Any, rounds: int) -> None:
        """Begin with the samples where the others are, who have made so many rounds."""
        self._samples.continue_at(position, rounds)

    @property
    def _is_idle(self) -> bool:
        """This worker has used nothing that is shared in its run; samples that it has leased do not count."""
        is_used = self._has_asked or self._circles.is_used or self._feeds.is_used
        return not (self._replicas or is_used or any(name in sys.modules for name in _SHARES_TOO))

    def _rest(self) -> None:
        """This worker waits for samples of others, who must not wait for it."""
        for replica in self._replicas:
            replica.rest()

    def _is_told_to_stop(self) -> bool:
        self.end_if_told()  # who asks is between two steps
        is_due = self._stop is not None and self._stop.is_due
        return is_due or self.is_over or bool((self._seat or self._alone).stop)

    def _count(self) -> tuple[int, int, bool]:
        """The steps and samples of this worker so far, and whether its samples have come to their end."""
        counts = [(one.steps, one.total_samples) for one in self._replicas[:1]] or [(0, self.samples_taken())]
        return *counts[0], self._samples.are_finished

    def _fail(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._has_failed = True
        self._events.write("failed", **failure(kind, error, trace))

    def end_if_told(self) -> None:
        """Follow a signal that came, if one did: after the step or the exchange that it fell into."""
        self._ending.follow()


def _no_request(request: Any) -> str:
    """What is wrong with a request that is no word, and how to write it."""
    how = 'ask("next")'
    if (
        request
        and isinstance(request, dict)
        and all(isinstance(key, str) and key.isidentifier() for key in cast(Any, request))
    ):
        first = next(iter(cast(dict[str, Any], request)))
        word = "next" if first == "done" else first  # how many batches were done goes along with the next question
        info = ", ".join(f"{key}={value!r}" for key, value in cast(dict[str, Any], request).items())
        how = f'ask("{word}", {info})'
    return (
        f"ask({request!r}) is no question: the request is a word, and what goes with it are keyword arguments, not a "
        f"{type(request).__name__}. Write worker.{how}."
    )
