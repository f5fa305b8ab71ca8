"""Ways of sharing: how the replicas of all workers influence each other.

    Sharing                  alone: every call is a no-op
    with_center              each worker exchanges with the center when its pace says so
    warm_up                  the same, after synchronous rounds
    synchronous_gradients    all workers average their gradients before each step, by collectives
    synchronous_values       all workers exchange their parameters after every k steps, by collectives
    pairwise                 pairs of workers exchange their parameters after every k steps, by collectives
    with_peers               each worker exchanges with random peers, without a center
    with_remote_peers        the same over the network, through the host

A new way is one more subclass in its own file and one more line in `sharing_for`.
"""

import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from maniple.adapters import Adapter
from maniple.connection.link import Link
from maniple.contracts import Array, Center, Collectives, ExchangeInfo, OnValue, State, StateNames
from maniple.errors import Conflict, InvalidArgument
from maniple.layout import RuleState
from maniple.memory.segment import Segment
from maniple.pace import Every, Pace
from maniple.replica.context import TrainingContext
from maniple.replica.nonfinite import Refusals
from maniple.rules import Pairwise, Rule, noted_rule

if TYPE_CHECKING:
    from maniple.replica.replica import Replica

OpenCollectives = Callable[[], Collectives]


class Sharing:
    """How one replica is shared with other workers. This base class shares nothing: the worker is alone.

    Attributes:
        replica: the replica that is shared; set by `attach`.
        rounds: the synchronous rounds so far.
        members: the ranks in the last round, if all of them agree on it.
        waited_s: the time spent waiting for other workers.
        is_keeper: this worker saves the optimizer state: its own, or the one that all workers have.
        copies_center_state: each worker has a copy of what the rule keeps at the center.
    """

    replica: "Replica"
    rounds: int = 0
    members: tuple[int, ...] | None = None
    waited_s: float = 0.0
    is_keeper: bool = True
    copies_center_state: bool = False

    def __init__(self, center: Center | None = None) -> None:
        self._center = center
        self._refusals = Refusals()
        self._state: RuleState | None = None  # what the rule keeps at this worker
        self._unhook: list[Callable[[], None]] = []
        self._is_finished = False

    def attach(self, replica: "Replica", model: Adapter, context: TrainingContext) -> None:
        """Share `replica` from now on. Called once, by the replica."""
        self.replica, self._model, self._context = replica, model, context
        self._rule, self._layout = replica.rule, replica.layout

    def _attach_shared(self) -> None:
        """The model is shared with others: keep the rule's state, and refuse another library's averaging."""
        names = self._rule.worker_state
        if self.copies_center_state:
            center = self._rule.center_state
            names = StateNames(names.vectors + center.vectors, names.scalars + center.scalars)
        if any(names):
            self._state = RuleState.zeros(self._layout, names)
        self._unhook.append(self._model.refuse_wrapping())

    def hand_over(self, after: "Sharing") -> None:
        """Let another way of sharing take over the replica from here on."""
        while self._unhook:
            self._unhook.pop()()
        self.replica.sharing = after
        after.rounds, after.waited_s = self.rounds, self.waited_s
        after.attach(self.replica, self._model, self._context)
        after.begin()

    def begin(self) -> None:
        """Start from the shared parameters."""

    def step(self) -> None:
        """Count a step that the optimizer has made, and exchange if it is due."""
        self.replica.count_step()

    def exchange(self) -> None:
        """Exchange now."""

    def reduce(self, gradients: Mapping[str, Array] | None) -> None:
        """Average the gradients now. Rules that do not average gradients leave them as they are."""

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Do not average the gradients of backward passes in this block."""
        yield

    def rest(self) -> None:
        """Let other workers continue without this one until its next step."""

    def await_round(self) -> None:
        """Wait for a round in flight, if this worker must not wait for others elsewhere before it has ended."""

    def pull(self) -> None:
        """Set the replica to the shared parameters."""

    def push(self) -> None:
        """Set the shared parameters to the replica."""

    @contextmanager
    def center(self) -> Generator[None]:
        """Let the model hold the shared parameters in this block."""
        yield

    def publish(self) -> None:
        """Bring the center up to date with what this worker has learned."""

    def publish_for_snapshot(self) -> None:
        """Bring the center up to date if its snapshot has to match the optimizer state saved with it."""

    def publish_validated(self) -> bool:
        """Set the center to what was validated; False if the center itself was validated."""
        return False

    def saved_state(self) -> dict[str, Array]:
        """What of the rule's state is saved with this worker's optimizer state: not the center's, which has its own."""
        if self._state is None or not self._rule.saves_worker_state:
            return {}
        names = [name for kind in self._rule.worker_state for name in kind]
        return {name: value for name, value in self._state.arrays().items() if name.split("/")[0] in names}

    def restore_state(self, arrays: Mapping[str, Array]) -> None:
        """Take over what `saved_state` returned before the run was resumed."""
        if self._state is not None and arrays:
            self._state.load(self._state.arrays() | dict(arrays))

    def finish(self, *, exchange: bool, timeout_s: float) -> None:
        """Make the last exchange and let the center go. Wait at most `timeout_s` for a host that is away."""
        for unhook in self._unhook:
            unhook()
        if exchange:
            self._finish(timeout_s)
        self._is_finished = True
        if self._center is not None:
            self._center.close()
            self._center = None

    def _finish(self, timeout_s: float) -> None:
        """Share the last steps."""

    def _pull_center(self) -> None:
        if self._center is None:
            return
        with self._context.requiring_host(self.replica):
            pull = functools.partial(self._center.pull, state_copy=self._center_copy)
            outcome, cost_s = self.replica.timed("pull", pull, self._model, self._remember)
        self.replica.pace.expect(2 * cost_s, 2 * outcome.size_bytes)  # an exchange reads and writes
        self._context.exit_if_signalled()

    @property
    def _center_copy(self) -> list[State] | None:
        """The worker's copy of the rule's state at the center, which synchronous rules have."""
        is_copied = self.copies_center_state and any(self._rule.center_state)
        return self._state.chunks if self._state is not None and is_copied else None

    def _remember(self, k: int, value: Array) -> None:
        """Show the rule the center's value of chunk k, if it keeps state here."""
        if self._state is not None:
            self._rule.remember(value, self._state.chunks[k])

    @contextmanager
    def _own_values_kept(self, show: OnValue = lambda _, __: None) -> Generator[None]:
        """Copy the replica's values, which the model gets back at the end of the block. `show` may change the model."""
        own = self._layout.views(self._layout.allocate())
        self._model.begin()
        for i, kept in enumerate(own):
            value = self._model.array(i)
            kept[:] = value
            show(i, value)
            self._model.commit(i)
        try:
            yield
        finally:
            before, self.replica.is_exchanging = self.replica.is_exchanging, True  # a SIGTERM waits
            self._model.begin()
            for i, value in enumerate(own):
                self._model.array(i)[:] = value
                self._model.commit(i)
            self.replica.is_exchanging = before


def sharing_for(
    rule: Rule,
    center: Center | None,
    *,
    pace: Pace,
    wire: str,
    is_alone: bool,
    open_collectives: OpenCollectives,
    segment: Segment | None = None,
    peer_link: Callable[[], Link] | None = None,
    has_gate: bool = False,
) -> Sharing:
    """The way of sharing that `rule` asks for. Collectives are opened only for a synchronous rule."""
    if (is_alone and not rule.acts_alone) or (center is None and not (rule.is_synchronous or is_alone)):
        return Sharing()
    if center is not None and not rule.is_synchronous:
        check_rule_and_pace(rule, pace)
        if rule.warm:
            from maniple.replica.warm_up import WarmUp

            return WarmUp(center, open_collectives, wire=wire, has_gate=has_gate)
        return _asynchronous_sharing(rule, center, segment, peer_link, wire=wire, has_gate=has_gate)
    collectives = open_collectives()
    check_collectives(rule, pace, collectives, wire)
    if rule.averages_gradients:
        from maniple.replica.synchronous_gradients import SynchronousGradients

        return SynchronousGradients(center, collectives, wire=wire)
    if isinstance(rule, Pairwise):
        from maniple.replica.pairwise import SynchronousPairs

        return SynchronousPairs(center, collectives, wire=wire)
    from maniple.replica.synchronous_values import SynchronousValues

    return SynchronousValues(center, collectives, wire=wire)


def _asynchronous_sharing(
    rule: Rule,
    center: Center,
    segment: Segment | None,
    peer_link: Callable[[], Link] | None,
    *,
    wire: str,
    has_gate: bool,
) -> Sharing:
    """The way of sharing of a rule by which no worker waits for another."""
    if not rule.has_peers:
        from maniple.replica.with_center import WithCenter

        return WithCenter(center, has_gate=has_gate)
    if segment is not None:
        from maniple.replica.with_peers import WithPeers

        return WithPeers(center, segment)
    known = noted_rule(repr(rule))
    if peer_link is None or type(known) is not type(rule):
        raise InvalidArgument(
            f"{rule!r} is a class of the script's, and over the network the host exchanges in the worker's place, "
            "with rules that it knows. Start all workers on the host's machine, or use Gossip() or NoLoCo()."
        )
    from maniple.replica.with_remote_peers import WithRemotePeers

    return WithRemotePeers(center, peer_link(), wire=wire)


def check_rule_and_pace(rule: Rule, pace: Pace) -> None:
    """Raise Conflict if a rule does not work at this pace. Launchers call it before they start workers."""
    if rule.averages_gradients and pace != Every(1):
        raise Conflict(
            f"{rule!r} averages gradients at each step, but the pace is {pace!r}. Leave the pace out, or average "
            'parameters: BSP(average="parameters", every=k).'
        )
    if rule.is_synchronous and rule.fragments > 1 and isinstance(pace, Every) and pace.n < rule.fragments:
        raise Conflict(
            f"{rule!r} exchanges one fragment after the other, but {pace!r} leaves no step of its own for each. Use "
            f"--every {rule.fragments} or more, or fewer fragments."
        )
    if (rule.is_synchronous or rule.warm) and not isinstance(pace, Every):
        raise Conflict(f"{rule!r} needs all workers at the same step, but {pace!r} is each worker's own. Use Every(k).")


def check_wire(rule: Rule, wire: str) -> None:
    """Raise InvalidArgument for a codec of changes (int4, topk) if the rule sends values, or for one that rounds
    replicas which are exchanged as they are."""
    from maniple.center.shared import is_operation_known
    from maniple.wire.codecs import get_codec

    if isinstance(rule, Pairwise) and wire != "float32":
        raise InvalidArgument(
            f"{rule!r} exchanges replicas as they are, not in {wire}, which would round them in each round. Leave "
            "--wire out, or choose a rule that averages."
        )
    if not get_codec(wire).is_for_changes:
        return
    if rule.is_synchronous:
        sends_changes = rule.averages_gradients or rule.offers_changes or "center" in rule.worker_vectors
        remedy = "int8, or a rule that keeps `center` at each worker, from which changes are computed"
    else:
        operation = rule.operation(ExchangeInfo()) if is_operation_known(type(rule)) else None
        sends_changes = operation is not None and operation.is_change
        remedy = "int8, or a rule that sends changes (downpour, or diloco:sync=false)"
    if not sends_changes:
        raise InvalidArgument(
            f"wire={wire!r} carries changes only, since so few bits of a parameter are useless, but {rule!r} sends the "
            f"parameters' values. Use {remedy}."
        )


def check_collectives(rule: Rule, pace: Pace, collectives: Collectives, wire: str) -> None:
    """Raise Conflict or InvalidArgument if a synchronous rule does not work at this pace or with these collectives."""
    check_rule_and_pace(rule, pace)
    check_wire(rule, wire)
    if not rule.quorum:
        return
    if collectives.elastic is None and collectives.name != "alone":
        raise InvalidArgument(
            f"{rule!r} continues without late workers, which only shared-memory collectives support (these are "
            f"{collectives.name}). Use --collectives shared, or BSP()."
        )
    if rule.norm == "synchronised":
        raise InvalidArgument(
            f'{rule!r}: norm="synchronised" waits for all workers in each layer, so no worker is ever late. Use BSP().'
        )
    if wire != "float32":
        raise InvalidArgument(f"{rule!r} sends values as they are, not in {wire}. Leave --wire out, or use BSP().")
