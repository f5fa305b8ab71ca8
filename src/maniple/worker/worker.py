"""The worker: this process as a member of a run. `join()` finds the run, `worker.share()` shares a model in it."""

import math
import os
import random
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from maniple.adapters import Adapter, Params, adapt
from maniple.center.gate import Gate, parse_gate
from maniple.center.gate_memory import check_gate
from maniple.clock import clock
from maniple.collectives.api import CollectiveCalls
from maniple.contracts import Collectives
from maniple.controller import DefaultPolicy
from maniple.environment import Environment, check_not_inherited, mark_joined, read_environment
from maniple.environment.other_launchers import is_elastic
from maniple.errors import InvalidArgument, ManipleError, say
from maniple.feed.local_feed import DEFAULT_FEED, Batches, Feeds
from maniple.layout import described
from maniple.pace import Pace
from maniple.replica import Replica, sharing_for
from maniple.replica.context import StopAfter, TrainingContext
from maniple.rules import EASGD, Rule, parse_rule
from maniple.sampler import Sampler, Shard
from maniple.settings.options import is_bsp_excluded
from maniple.worker.collective_groups import CollectiveGroups
from maniple.worker.controller_client import check_request
from maniple.worker.share_settings import agreed, check_restart, check_rule, resolve_settings, warn_local_buffers
from maniple.worker.shutdown import SignalHandler, check_host_lost, warn_unshared, watch_exit

if TYPE_CHECKING:
    from maniple.worker.connection import HostConnection
    from maniple.worker.heartbeat_sender import Count

T = TypeVar("T")
_ALONE = (0, 0)  # rank and incarnation of a worker alone, for its controller
_SIGNALLED_TIMEOUT_S = 20.0  # for a last exchange that waits for the host after a signal: SIGKILL follows
_LAST_ROUND_S = 3.0  # after a signal: for other workers in the last round, after 5 s for the step
_joined: "Worker | None" = None
_SHARES_TOO = ("maniple.client", "maniple.pool")  # imported when the script first uses them


def join(address: str | None = None, *, own_data: bool = False) -> "Worker":
    """Join the run that started this process; alone, a world of one. A second call returns the same worker.

    A process that a worker has started, such as a data loader's, is not part of the run: it gets InvalidArgument.

    Args:
        address: HOST:PORT of a host to join instead, from anywhere; the token comes from the environment
            (MANIPLE_TOKEN_FILE or MANIPLE_TOKEN).
        own_data: this script divides the data itself, by `worker.rank` say, or each worker generates its own, as in
            reinforcement learning. It turns the warning off that nothing divides the data.
    """
    global _joined  # noqa: PLW0603 - one process is one worker
    if address is None:
        check_not_inherited()
    if _joined is None or _joined.has_left:
        _joined = Worker(read_environment(address=address))
    if own_data:
        _joined.declare_own_data()
    return _joined


class Worker(CollectiveCalls):
    """This process as a worker.

    Attributes:
        rank, world: this worker's number, and how many workers there were at the start of the run.
        local_rank, local_world: the same on this machine.
        node: this machine's name.
        device: "cpu", "cuda:1" ...: as given to the launcher, else the GPU of this local rank, else the CPU.
    """

    def __init__(self, environment: Environment) -> None:
        self._context = TrainingContext(environment)  # for heartbeats that are sent before the host has answered
        self._connection = connection = connect_to_host(environment, self._count)
        environment = environment if connection is None else connection.environment
        self._environment, self._pid = environment, os.getpid()
        self.rank, self.world, self.node = environment.rank, environment.world, environment.node
        self.local_rank, self.local_world = environment.local_rank, environment.local_world
        self._seed = int(np.random.SeedSequence([environment.seed, environment.rank]).generate_state(1)[0])
        if environment.deterministic:
            _seed_all(self._seed)
        if connection is not None:
            self._context = TrainingContext(
                environment,
                host=connection.status,
                events=connection.events,
                segment=None if connection.segment is None else connection.segment.path,
                ask_host=connection.ask,
            )
        context = self._context
        self._samples, self._events, self._replicas = context.samples, context.events, context.replicas
        self._own_policy = DefaultPolicy(environment.limits)  # the controller of a worker alone
        self._has_asked = self._is_balanced = False
        self._expects_bsp = False  # a sampler has fixed shares only because bsp seemed to be the default
        self._collective_groups = CollectiveGroups(environment, connection, self._events, context)
        self._feeds = Feeds(environment, self._events, self._is_stopping)
        if not environment.is_alone:
            who = {"rank": self.rank, "world": self.world, "node": self.node, "pid": self._pid}
            self._events.write("join", **who, restarts=environment.restarts)
            mark_joined(self.rank)
            if connection is not None:  # the last exchange waits for the host in its own way
                connection.check_while_waiting(lambda: None if context.has_left else context.exit_if_overdue())
            watch_exit(at_exit=self._at_exit, on_error=self._on_error, on_signal=SignalHandler(context))

    @property
    def seed(self) -> int:
        """A seed that is different for each rank. A script that uses it draws other batches in each worker."""
        self.declare_own_data()
        return self._seed

    @property
    def device(self) -> str:
        """The device on which this worker should put its model."""
        torch = sys.modules.get("torch")
        if self._environment.device or torch is None or not torch.cuda.is_available():
            return self._environment.device or "cpu"
        return f"cuda:{self.local_rank % torch.cuda.device_count()}"

    @property
    def should_stop(self) -> bool:
        """This worker should end its loop: the controller, a time limit or the number of epochs says so."""
        return self._is_stopping() or self._samples.are_finished

    @property
    def is_over(self) -> bool:
        """The host has ended the run."""
        return self._context.host.is_over

    @property
    def has_left(self) -> bool:
        """This worker has left the run."""
        return self._context.has_left

    def declare_own_data(self) -> None:
        """Do not warn that nothing divides the data among the workers."""
        self._context.is_data_divided = True

    @property
    def _collectives(self) -> Collectives:
        for replica in self._replicas:
            replica.sharing.await_round()
        return self._collective_groups.calls

    def share(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        rule: Rule | None = None,
        pace: Pace | None = None,
        wire: str | None = None,
        gate: Gate | None = None,
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
            rule: what an exchange does; by default that of the command line, else `BSP()` for torch models on the CPU
                with an optimizer if all workers are on this machine, else `EASGD()`.
            pace: when one is due; by default that of the command line, else every `rule.every` steps.
            wire: the format of values sent to a remote host or in collectives: "float32" (unchanged, the default),
                "bfloat16", "float16", "int8", or, for rules that send changes (not EASGD and ASGD without `sync`),
                "int4" and "topk". What the last three lose is added to the next message.
            gate: clips or refuses outlying contributions to the center, and weights stale ones down; the same for all
                workers. By default that of the command line, else none.
            state: names of optimizer state to share too, for instance ("momentum_buffer",).
            params: which parameters are shared, the same for all workers: names and patterns (["head.*"]), or a
                function of name and parameter. The others are each worker's own, under BSP with their gradients.
            buffers: share floating-point buffers too, such as batch-norm statistics. One that holds NaN or infinity,
                such as a mask, stays each worker's own.
            lock: with False, workers may write the same parameter at once: faster under heavy contention, but
                some contributions may be lost.
            stop: a time limit for this worker.
            save_optimizer: save the optimizer's state in the run folder with each snapshot and when this worker
                leaves, and continue with it after `--resume`; learning rates come from the script.
        """
        named = rule if rule is not None or not self._environment.rule else parse_rule(self._environment.rule)
        if buffers and isinstance(named, Rule) and not named.shares_buffers:
            buffers = False
            warn_local_buffers(model, named)
        adapter = adapt(model, optimizer, state=state, buffers=buffers, params=params)
        is_default = rule is None and self._environment.rule is None
        needs_center = bool(state) or not lock or is_bsp_excluded(pace, gate)
        default = EASGD() if needs_center else self._default_rule(adapter)
        rule, pace, wire = resolve_settings(self._environment, rule, pace, wire, default)
        gate = agreed("gate", gate, parse_gate(self._environment.gate) if self._environment.gate else None, None)
        check_rule(self._environment, rule)
        check_gate(gate, rule, lock=lock)
        if self._expects_bsp and not rule.is_synchronous and not self._replicas:
            warnings.warn(
                f"the sampler was made before share() chose {type(rule).__name__}, so each worker has a fixed share, "
                "and that of a dead one is left out. Call share() before worker.sampler(), or name it by --rule",
                stacklevel=2,
            )
        if stop is not None:
            self._context.stop_after = stop
        if adapter.local_buffers and not self._environment.is_alone:
            names = ", ".join(map(repr, adapter.local_buffers))
            self._events.write("local buffers", names=list(adapter.local_buffers))
            warnings.warn(f"buffers that are not finite are not shared: {names} (a mask of -inf, say)", stacklevel=2)
        center, name = None, f"center-{len(self._replicas)}"
        if self._connection is not None:
            center, is_creator = self._connection.open(name, adapter, rule=rule, lock=lock, wire=wire, gate=gate)
            self._events.write(
                "share",
                rule=repr(rule),
                by_default=is_default,
                meets=rule.meets,
                pace=repr(pace),
                wire=wire,
                **({} if gate is None else {"gate": str(gate)}),
                created=is_creator,
                **described(adapter),
            )
        sharing = sharing_for(
            rule,
            center,
            pace=pace,
            wire=wire,
            has_gate=gate is not None,
            is_alone=self._environment.is_alone,
            open_collectives=lambda: self._open_collectives(adapter, rule),
            segment=None if self._connection is None else self._connection.segment,
            peer_link=None if self._connection is None else self._connection.peer_link,
        )
        replica = Replica(adapter, sharing, rule=rule, pace=pace, context=self._context)
        if save_optimizer:  # before it begins: the state of current members is newer than a saved one
            replica.continues = self._context.optimizer_states.add(len(self._replicas), adapter, replica)
        sharing.begin()
        self._context.add(replica)
        return replica

    def _open_collectives(self, adapter: Adapter, rule: Rule) -> Collectives:
        leased = "has a sampler that leases samples, so workers may have different numbers of batches"
        obstacle = leased if self._samples.are_leased else ""
        name = f"collectives-{len(self._replicas)}"
        collectives = self._collective_groups.open_for(name, adapter, rule, obstacle=obstacle)
        check_restart(self._environment, self._replicas, collectives.name)
        self._samples.check_collectives(collectives.name)
        return collectives

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
        `.set_epoch(k)` is as in torch's DistributedSampler, and `.progress` is the number of epochs handed out.

        Args:
            data: the data set, or how many samples there are; the same for all workers.
            static: instead a fixed share for each worker, equal in size and the same in each run. The default with
                synchronous rules, where all workers make the same number of steps.
            balance: no limit to a pass: fast workers take more, and others take what a dead worker has left in the same
                epoch. `len(sampler)` is then an estimate, so build no learning-rate schedule from it. No effect on
                fixed shares.
            shuffle: a new order in each epoch, the same for all workers.
            chunk: how many samples are taken at a time; by default about 1/32 of a worker's share.
            validation: the samples are not trained on. Each sample comes once over all workers, also with fixed
                shares, which may then differ by one: make no collective call inside of this loop.
        """
        count = data if isinstance(data, int) else len(data)
        if static and balance:
            raise InvalidArgument(
                "static=True and balance=True exclude each other: one gives each worker a fixed share, the other lets "
                "fast workers take more. Leave one of them out."
            )
        self._is_balanced |= balance
        if balance and self._is_synchronous and self.world > 1:
            warnings.warn(
                "balance=True has no effect: under a synchronous rule all workers make the same number of steps. With "
                "--rule easgd, fast workers take more samples",
                stacklevel=2,
            )
        is_static = self._is_synchronous if static is None else static
        is_guess = static is None and self.world > 1 and not (self._replicas or self._environment.rule)
        self._expects_bsp |= is_guess and is_static and not (validation or self._environment.deterministic)
        self._events.write("sampler", size=count, validation=validation)
        return self._samples.sampler(
            count,
            lender=None if self._connection is None else self._connection.lender,
            static=is_static,
            balance=balance,
            shuffle=shuffle,
            chunk=chunk,
            validation=validation,
            should_stop=self._is_stopping,
            is_shared=lambda: bool(self._replicas),
            on_wait=self._rest,
        )

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs left to train, of `count`: `for epoch in worker.epochs(5):`.

        It begins at 0, or at the first epoch with samples left, in a resumed run and for a worker that joins late. It
        ends early with `--max-epochs`, and when the worker should stop. Create the samplers before it, and iterate over
        each once per epoch.
        """
        if count < 0:
            raise InvalidArgument(f"worker.epochs({count}) is impossible. Give 0 or more.")
        epoch, end = self._samples.begin_loop(count), min(count, self._environment.limits.max_epochs or count)
        while epoch < end and not self.should_stop:
            yield epoch
            self._samples.passed(is_shared=not any(replica.steps_since_exchange for replica in self._replicas[:1]))
            epoch += 1

    def ask(self, request: str, /, *, timeout_s: float = 60.0, **info: Any) -> Any:
        """Send a request to the controller and return its answer, a JSON value.

        Raises HandlerFailed, with its traceback, for an exception in the controller's handler, and WaitedTooLong if no
        answer comes within `timeout_s`. A worker alone uses the default controller.
        """
        check_request(request)
        self._has_asked = True
        if request == "validated" and True in [replica.sharing.publish_validated() for replica in self._replicas]:
            info["published"] = True  # the center is what was validated, and may be kept as the best
        if self._connection is not None:
            return self._connection.ask(request, info, timeout_s=timeout_s)
        _ = self._own_stop  # counts the steps so far
        return self._own_policy.answer(_ALONE, request, info, is_finished=self._samples.are_finished)

    def feed(self, name: str = DEFAULT_FEED) -> Batches:
        """The batches that producers push to feed `name`, to iterate over; each goes to exactly one worker."""
        self.declare_own_data()
        return self._feeds.open(name)

    def log(self, **values: Any) -> None:
        """Write one timestamped row of numbers or strings; `loss` is also shown live."""
        self.record("log", **values)

    def record(self, event: str, /, **values: Any) -> None:
        """Write one row of another event."""
        self._events.write(event, **self._context.noted(logged(values, self._replicas)))

    def lock(self, timeout_s: float = 60.0) -> AbstractContextManager[None]:
        """Exclude the other workers of this machine from the `with` block; a worker that dies releases the lock."""
        return nullcontext() if self._connection is None else self._connection.lock(timeout_s)

    def leave(self) -> None:
        """Make the last exchange and leave the run. Called when the script ends."""
        context = self._context
        if context.has_left or os.getpid() != self._pid:
            return
        context.has_left = True
        mark_joined(None)
        is_exchanging = not context.has_failed
        if is_exchanging and not context.is_signalled:
            self._report_if_late()
        idle: dict[str, bool] = {}
        if self._is_idle and is_exchanging and not context.is_signalled and not context.host.is_over:
            idle = {"unshared": True}
            warn_unshared(self._environment, None if self._connection is None else self._connection.segment)
        try:
            timeout_s = _SIGNALLED_TIMEOUT_S if context.is_signalled else math.inf
            context.leave_by = clock.monotonic() + _LAST_ROUND_S
            for replica in self._replicas:
                replica.finish(exchange=is_exchanging, timeout_s=timeout_s)
            if is_exchanging:
                self._samples.finish(is_early=context.is_signalled or self._is_stopping())
                if self._replicas and not self._replicas[0].rule.is_synchronous:
                    self._samples.write_position(self._replicas[0], is_common=False, is_last=True)
        finally:
            self._feeds.close()
            self._collective_groups.close()
            if self._connection is not None:
                is_early = context.has_failed or context.is_signalled
                self._connection.leave(is_early=is_early, failed=context.has_failed, **idle)
        if not context.has_failed:
            context.optimizer_states.save()

    def _report_if_late(self) -> None:
        """Say so if this worker made no step because all work was done when it joined."""
        if self._connection is None or not self._samples.were_gone or any(replica.steps for replica in self._replicas):
            return
        host, reason = self._context.host, "all samples had been handed out"
        if host.is_over:
            reason = "the run had ended"
        elif host.stop:
            reason = f"the run was stopping ({host.stop})"
        self._events.write("late", reason=reason)
        say(f"worker {self.rank} made no step: {reason} when it joined")

    def _at_exit(self) -> None:
        """Leave when the script has ended. A worker that hosts the others stays until its host has ended."""
        context, environment, has_left = self._context, self._environment, False
        is_cut_short = (
            context.host.is_over and not context.has_left and not context.has_failed and not context.is_signalled
        )
        try:
            self.leave()
            has_left = True
        finally:
            if environment.is_hosting:
                from maniple.worker.external_launch import await_host_end

                has_failed = context.has_failed or not has_left
                await_host_end(environment, has_failed=has_failed, is_signalled=lambda: context.is_signalled)
        if is_cut_short:
            check_host_lost(environment)

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._context.has_failed = True
        self._events.write(
            "failed",
            error=f"{kind.__name__}: {error}",
            exit_code=error.exit_code if isinstance(error, ManipleError) else 1,
            traceback="".join(traceback.format_exception(kind, error, trace)),
        )

    def _is_stopping(self) -> bool:
        """The controller, the time limit or the end of the run stops this worker. Call it between two steps."""
        context = self._context
        context.exit_if_signalled()
        is_due = context.stop_after is not None and context.stop_after.is_due
        stop = self._own_stop if self._connection is None else context.host.stop
        return is_due or context.host.is_over or bool(stop)

    @property
    def _own_stop(self) -> str:
        """Why the controller of a worker alone wants to stop; empty if not."""
        steps, samples, _ = self._count()
        self._own_policy.count(_ALONE, steps, samples)
        return self._own_policy.check_limits(clock.time())

    @property
    def _is_synchronous(self) -> bool:
        """All workers make the same number of steps, by the rules of their models or that of the command line."""
        named = self._environment.rule
        rules = [replica.rule for replica in self._replicas] or [parse_rule(named) if named else self._default_rule()]
        return any(rule.is_synchronous for rule in rules)

    def _default_rule(self, adapter: Adapter | None = None) -> Rule:
        """The rule of a model for which neither the script nor the command line names one.

        That of the run (`Job.default_rule`) averages gradients, which only an optimizer of torch has, and has not been
        measured on GPUs. Before a model is shared, a script that has imported torch is expected to share one of torch.
        A script that balances its samples expects workers of unequal speed, for which a synchronous rule is no choice.
        """
        environment = self._environment
        has_torch = "torch" in sys.modules and self.device == "cpu"
        is_suitable = has_torch if adapter is None else adapter.suits_bsp
        is_excluded = self._is_balanced or is_bsp_excluded(environment.pace, environment.gate)
        return parse_rule(environment.default_rule or "easgd") if is_suitable and not is_excluded else EASGD()

    def _rest(self) -> None:
        """Let other workers continue without this one, which waits for their samples."""
        for replica in self._replicas:
            replica.sharing.rest()

    def _count(self) -> tuple[int, int, bool]:
        """The steps and samples of this worker so far, and whether all its samples are used; for heartbeats."""
        samples, replicas = self._context.samples, self._context.replicas
        if replicas:
            return replicas[0].steps, replicas[0].total_samples, samples.are_finished
        return 0, samples.taken, samples.are_finished

    @property
    def _is_idle(self) -> bool:
        """This worker has used nothing that is shared in its run; leased samples do not count."""
        is_used = self._has_asked or self._collective_groups.is_used or self._feeds.is_used
        return not (self._replicas or is_used or any(name in sys.modules for name in _SHARES_TOO))


def connect_to_host(environment: Environment, count: "Count") -> "HostConnection | None":
    """The connection that `environment` describes; None for a worker alone."""
    if environment.producer_number >= 0:
        raise InvalidArgument(
            "this process was started to produce batches (--feed), and cannot join as a worker. Call maniple.Feed()."
        )
    if environment.is_external and environment.segment is None and environment.center == "host":
        from maniple.worker.external_launch import join_launch

        environment = join_launch(environment)
    elif environment.is_alone and environment.center == "host" and is_elastic():
        from maniple.worker.external_launch import join_launch_if_any

        environment = join_launch_if_any(environment)
    if not environment.is_near and environment.address is None:
        return None
    from maniple.worker.connection import LocalConnection, RemoteConnection

    return (LocalConnection if environment.is_near else RemoteConnection)(environment, count)


def _seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, if it is imported, and make torch deterministic."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def logged(values: Mapping[str, Any], replicas: Sequence[Replica]) -> dict[str, Any]:
    """A row of logged values with the step of the first replica; `center`: they are about the shared parameters."""
    row: dict[str, Any] = {"step": replicas[0].steps if replicas else 0}
    row |= {name: _plain(value) for name, value in values.items()}
    return row | {"center": True} if any(replica.is_center for replica in replicas) else row


def _plain(value: Any) -> Any:
    """A JSON value: torch and NumPy scalars by their `item`, NaN and infinity as strings."""
    item = getattr(value, "item", None)
    try:
        value = value if item is None else item()
    except (ValueError, RuntimeError):  # more than one element
        return value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
