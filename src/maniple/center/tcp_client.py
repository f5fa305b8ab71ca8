"""The center over TCP, at the worker: one exchange is a series of requests, sent while replies arrive.

If the connection breaks on the way, the worker reconnects and asks the host which items of the exchange were applied.
Those are not sent again. If the host cannot be reached at once, the question stays open (`Link.unresolved`): training
continues, and the question is asked before the next exchange, pull or push.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import numpy as np

from maniple.center.arrays import center_file
from maniple.center.chunked_model import ChunkedModel, chunks_of
from maniple.center.contributions import Contribution, ErrorFeedback, Replace, SendChanges, SendValues, SwapValues
from maniple.center.shared import LOCK_TIMEOUT_S, chunk_bytes, visiting_order
from maniple.clock import STOPPED_HOLDER, Deadline, clock
from maniple.connection.link import Link, check_reply
from maniple.connection.retry import BLOCKED_S, dropped_on_error, retry_until
from maniple.contracts import NO_STATE, Array, ExchangeInfo, Exchanger, FlatModel, OnValue, Outcome, State, StateNames
from maniple.errors import BadFrame, HostAway, ManipleError, WaitedTooLong
from maniple.layout import Layout
from maniple.rules.rule import is_operation_known
from maniple.wire.frames import Stream
from maniple.wire.messages import (
    AppliedQuery,
    AppliedReply,
    CenterBusy,
    CenterOpened,
    ChunkValue,
    CreateCenter,
    ExchangeReply,
    FindArray,
    Message,
    OpenCenter,
    ParameterValue,
    PullChunk,
)

_SWAP_S = 60.0  # for which a value is computed again because other workers have written it in the meantime
_SMALL_BYTES = 1 << 16  # values up to this size, and _FEW headers, fit into socket buffers: one thread is enough
_FEW = 256
_WINDOW = 256  # pulls sent ahead: enough to hide the latency, few enough that their headers fit into the buffers
_MAX_TABLE_BYTES = 64 << 20
_LOCKED_RETRY_S = 0.1  # between two tries of chunks whose lock the host could not take


class TcpCenter:
    """One worker's or client's view of a center at a host: its layout, the versions seen, the compression of values."""

    def __init__(
        self,
        link: Link,
        name: str,
        layout: Layout,
        *,
        rank: int = 0,
        wire: str = "float32",
        deadline_s: float = 60.0,
        live: Callable[[], int] | None = None,
        parameter_count: int | None = None,
    ) -> None:
        """`live` returns p, the number of live workers, where another connection knows it better. Entries from
        `parameter_count` on are buffers and the like."""
        self.link, self.name, self.layout = link, name, layout
        self.feedback = ErrorFeedback(layout, wire, parameter_count=parameter_count)
        self.seen = [0] * len(layout.chunks)
        self.has_unsent = False
        self._chunks: ChunkedModel | None = None  # of the model of the last exchange
        self._rank, self._deadline_s = rank, deadline_s
        self._live, self._last_live = live, 1
        self._sent: list[Array] | None = None  # changes in flight, of rules that send changes

    @classmethod
    def open_or_create(
        cls,
        link: Link,
        name: str,
        model: FlatModel,
        *,
        rank: int = 0,
        wire: str = "float32",
        note: str = "",
        state: StateNames = NO_STATE,
        gate: str = "",
        deadline_s: float = 60.0,
        live: Callable[[], int] | None = None,
        parameter_count: int | None = None,
    ) -> tuple["TcpCenter", bool]:
        """Open the center `name` at the host, or create it from `model`; return it and whether it was created.

        `state` names what the rule keeps at the center, of zeros at first; `gate` is what all workers agree on.
        """
        layout = Layout(model.entries, is_numeric=True, chunk_bytes=chunk_bytes(center_file(name)), state=state)
        center = cls(
            link,
            name,
            layout,
            rank=rank,
            wire=wire,
            deadline_s=deadline_s,
            live=live,
            parameter_count=parameter_count,
        )
        with link.lock:
            return center, retry_until(link, lambda: center._open(model, note, gate), deadline_s)

    def _open(self, model: FlatModel, note: str, gate: str) -> bool:
        stream = self.link.stream()
        stream.send(OpenCenter(self.name, note, gate), self.layout.table)
        while True:
            received, size = stream.receive()
            message = check_reply(received, Message)
            if isinstance(message, CenterOpened):
                table = bytes(stream.receive_bytes(size, at_most=_MAX_TABLE_BYTES))
                self.layout.require(Layout.from_table(table), "the center")
                self._last_live = message.live
                return message.created
            if isinstance(message, CreateCenter):
                model.begin()
                for i in range(len(self.layout.entries)):
                    stream.send(ParameterValue(i), model.array(i))
                    model.commit(i)
            elif isinstance(message, CenterBusy):
                raise HostAway("another worker is creating the center")
            else:
                raise BadFrame(f"CenterOpened was expected, and {type(message).__name__} came.")

    @property
    def live(self) -> int:
        """p, the number of live workers according to the host's last message."""
        return self._last_live if self._live is None else self._live()

    def exchange(
        self, model: FlatModel, rule: Exchanger, state: Sequence[State] | None, moment: ExchangeInfo
    ) -> Outcome:
        """Apply `rule` to every chunk of `model` and of the center.

        Raises:
            HostAway: the host cannot be reached. What it has applied is resolved before the next exchange.
        """
        with self.link.lock, self.link.exchanging():
            return self._exchange(model, rule, state, moment)

    def _exchange(
        self, model: FlatModel, rule: Exchanger, state: Sequence[State] | None, moment: ExchangeInfo
    ) -> Outcome:
        bytes_before, locked_s = self.link.wire_bytes, LOCK_TIMEOUT_S if moment.is_last else 0.0
        self.link.stream()  # raises HostAway before anything is changed
        with self._passing(model) as chunks:
            operation = rule.operation(moment) if is_operation_known(type(rule)) else None
            if operation is None:
                outcome = self._swap(SwapValues(self, chunks, rule, state, moment), is_last=moment.is_last)
            elif operation.is_change:
                assert state is not None
                if self._sent is None:
                    self._sent = self.layout.chunk_views(self.layout.allocate())
                changes = SendChanges(
                    self, chunks, operation, rule, state=state, sent=self._sent, is_last=moment.is_last
                )
                self.has_unsent = self.feedback.is_for_changes and not moment.is_last
                outcome = self._run(changes, locked_s=locked_s)
            else:
                values = SendValues(self, chunks, operation, rule, state)
                outcome = self._run(values, locked_s=locked_s)
                self._replace_nonfinite(chunks, values.unknown)
        outcome.wire_bytes = self.link.wire_bytes - bytes_before
        return outcome.with_unique_names()

    def push(
        self, model: FlatModel, on_value: OnValue | None = None, *, state_copy: Sequence[State] | None = None
    ) -> Outcome:
        """Set the center to `model`, except for parameters that are not finite."""

        def push() -> Outcome:
            with self._passing(model) as chunks:
                replace = Replace(self, chunks, on_value, state_copy)
                outcome = self._run(replace, locked_s=LOCK_TIMEOUT_S)
                if outcome.locked:
                    raise WaitedTooLong(
                        f"waited {LOCK_TIMEOUT_S:g} s for the lock of parameter {outcome.locked[0]!r}. {STOPPED_HOLDER}"
                    )
                return outcome.with_unique_names()

        with self.link.lock:
            return retry_until(self.link, push, self._deadline_s)

    def pull(
        self,
        model: FlatModel,
        on_value: OnValue | None = None,
        *,
        peek: bool = False,
        state_copy: Sequence[State] | None = None,
    ) -> Outcome:
        """Set `model` to the center; `on_value` receives each chunk's value."""
        stale: dict[int, int] = {}

        def copy_state(k: int, state: State) -> None:
            for name, value in state.items():
                state_copy[k][name][:] = value  # pyright: ignore[reportOptionalSubscript]

        def pull() -> list[str]:
            # The caller discards what it peeks at, so that must not resolve anything.
            with self._passing(model, resolves=not peek) as chunks:

                def update(k: int, value: Array, version: int) -> None:
                    x = chunks.array(k)
                    x[:] = value
                    self.layout.round_chunk(k, x)
                    stale.setdefault(k, max(0, version - self.seen[k]) // 2)
                    if not peek:
                        self.seen[k] = version
                    if on_value is not None:
                        on_value(k, x)
                    chunks.commit(k)

                return self.fetch(self._order(), update, on_state=None if state_copy is None else copy_state)

        with self.link.lock:
            torn = retry_until(self.link, pull, self._deadline_s)
        staleness = sum(stale.values()) / len(self.seen)
        return Outcome(size_bytes=self.feedback.total_bytes(), staleness=staleness, torn=torn).with_unique_names()

    def fetch(
        self,
        wanted: Sequence[int],
        on_value: Callable[[int, Array, int], None],
        *,
        is_plain: bool = False,
        on_state: Callable[[int, State], None] | None = None,
    ) -> list[str]:
        """Call `on_value(k, value, version)` for each wanted chunk; return the names of torn parameters.

        `on_state` receives the rule's state of the chunk at the center before.
        """
        stream, torn = self.link.stream(), list[str]()
        is_plain = is_plain or on_state is not None
        for start in range(0, len(wanted), _WINDOW):
            window = wanted[start : start + _WINDOW]
            for k in window:
                codec = self.feedback.codec(k, is_plain=is_plain).name
                stream.send(PullChunk(self.name, k, codec, with_state=on_state is not None))
            for k in window:
                received, size = stream.receive()
                message = check_reply(received, ChunkValue)
                if message.chunk != k:
                    raise BadFrame(f"the value of chunk {k} was expected, and that of {message.chunk} came.")
                if on_state is None:
                    value = self.feedback.receive(k, stream, size, is_plain=is_plain)
                else:
                    value, state = self.layout.split_record(k, self.feedback.receive_record(k, stream, size))
                    on_state(k, state)
                on_value(k, value, message.version)
                if message.is_torn:
                    torn += self.layout.names_in(k)
        return torn

    def release(self) -> None:
        """Do nothing: no memory of the center is mapped here."""

    def close(self) -> None:
        """Do nothing: the link belongs to the worker."""

    def _run(self, contribution: Contribution, *, locked_s: float = 0.0) -> Outcome:
        """Contribute to all chunks. After a break, continue with those that were not applied.

        Chunks whose lock the host cannot take are tried again for `locked_s`, and then left out.
        """
        feedback, is_plain = self.feedback, contribution.is_plain
        size_bytes = feedback.total_bytes(is_change=contribution.is_change, is_plain=is_plain)
        if contribution.answer != "none":
            size_bytes += feedback.total_bytes(is_plain=is_plain)
        outcome = Outcome(size_bytes=size_bytes)
        waiting, deadline = self._order(), None  # since the first break without progress
        locked, locked_deadline = list[int](), Deadline(locked_s, slice_s=BLOCKED_S)
        while waiting:
            unapplied = self._run_once(contribution, waiting, outcome, locked)
            if len(unapplied) < len(waiting):
                deadline = None
            elif deadline is None:
                deadline = Deadline(self.link.retry_s, slice_s=BLOCKED_S)
            elif deadline.is_over():
                raise HostAway(f"the connection to the host keeps breaking: {self.link.reason}")
            waiting = unapplied
            if not waiting and locked and not locked_deadline.is_over():
                clock.sleep(_LOCKED_RETRY_S)
                waiting, locked = locked, []
        for k in locked:
            outcome.locked += self.layout.names_in(k)
        return outcome

    def _run_once(
        self, contribution: Contribution, chunks: list[int], outcome: Outcome, locked: list[int]
    ) -> list[int]:
        """Contribute to some chunks; return those that were not applied, and add those that are stuck to `locked`."""
        exchange = PendingExchange(self, chunks, contribution)
        self.link.unresolved.append(exchange.resolve)
        unapplied: list[int] = []
        try:
            with dropped_on_error(self.link):
                exchange.run(outcome)
        except ManipleError:
            raise
        except OSError:
            unapplied = self._resolve(exchange.resolve)
        finally:
            locked += exchange.locked
        unapplied = [*exchange.undone, *unapplied]
        self.link.unresolved.remove(exchange.resolve)
        self._last_live = outcome.live or self._last_live
        return unapplied

    def _swap(self, swap: SwapValues, *, is_last: bool) -> Outcome:
        outcome = Outcome(size_bytes=2 * self.layout.size_bytes)
        for k in self._order():
            deadline = Deadline(_SWAP_S, slice_s=BLOCKED_S)
            swap.is_done, torn, locked = False, list[str](), list[int]()
            while not swap.is_done:
                if deadline.is_over():
                    if locked:
                        break
                    raise WaitedTooLong(
                        f"waited {_SWAP_S:g} s to swap {self.layout.names_in(k)[0]!r}, which other workers "
                        "keep writing. Exchange less often, or use a rule that the host applies (easgd, asgd, "
                        "downpour)."
                    )
                try:
                    torn = swap.compute(k)
                except ManipleError:
                    raise
                except OSError as error:
                    self.link.drop(str(error))
                    continue
                locked.clear()
                self._run_once(swap, [k], outcome, locked)
                if locked and not is_last:
                    break
                if locked:
                    clock.sleep(_LOCKED_RETRY_S)
            if locked:
                outcome.locked += self.layout.names_in(k)
                continue
            outcome.torn += torn
            outcome.staleness += swap.staleness / len(self.layout.chunks)
            if k in swap.refused:
                outcome.refused += self.layout.names_at(k, swap.refused[k])
        return outcome

    def _resolve(self, resolve: Callable[[], list[int]]) -> list[int]:
        try:
            return retry_until(self.link, resolve, self.link.retry_s, waits_for_host=False)
        except HostAway:
            raise
        except ManipleError as error:
            raise HostAway(f"the host cannot tell what it has applied: {error}") from error

    def _resolve_earlier(self) -> None:
        """Resolve what earlier exchanges have left open, of all centers on this link: the host remembers only a
        worker's newest exchange."""
        while self.link.unresolved:
            self._resolve(self.link.unresolved[0])
            self.link.unresolved.pop(0)

    def _replace_nonfinite(self, chunks: ChunkedModel, which: Sequence[int]) -> None:
        """Set the non-finite elements of some chunks to the center's."""

        def replace(k: int, c: Array, _: int) -> None:
            x = chunks.array(k)
            np.copyto(x, c, where=~np.isfinite(x))
            chunks.commit(k)

        try:
            self.fetch(which, replace, is_plain=True)
        except ManipleError:
            raise
        except OSError as error:  # the next exchange sends them again, and they are refused again
            self.link.drop(str(error))

    def _order(self) -> list[int]:
        return visiting_order(len(self.layout.chunks), self._rank, self.live)

    @contextmanager
    def _passing(self, model: FlatModel, *, resolves: bool = True) -> Generator[ChunkedModel]:
        """A pass over the chunks of `model`, after what earlier exchanges have left open is resolved."""
        self._chunks = chunks = chunks_of(model, self.layout, self._chunks)
        if resolves:
            self._resolve_earlier()
        chunks.begin()
        try:
            yield chunks
        finally:
            chunks.end()


class PendingExchange:
    """One exchange in progress: which items were acknowledged and, after a break, which were applied."""

    def __init__(self, center: TcpCenter, chunks: list[int], contribution: Contribution) -> None:
        self._center, self._chunks, self._contribution = center, chunks, contribution
        self._acknowledged = 0
        self.undone: list[int] = []  # not applied, since the host could not take the lock of an earlier one
        self.locked: list[int] = []  # not applied, since the host could not take its lock
        self._lost_replies: list[int] | None = None  # applied, but not acknowledged; None: not known yet
        self._unapplied: list[int] = []
        center.link.sequence += 1
        self._sequence = center.link.sequence

    def run(self, outcome: Outcome) -> None:
        """Send all requests and receive all replies; OSError if the connection breaks."""
        stream = self._center.link.stream()
        if outcome.size_bytes <= _SMALL_BYTES and len(self._chunks) <= _FEW:
            self._send(stream)
            self._receive(stream, outcome)
            return
        failures: list[BaseException] = []

        def send() -> None:
            try:
                self._send(stream)
            except BaseException as error:
                failures.append(error)
                stream.abort()  # wakes the thread that waits for replies

        sender = threading.Thread(target=send, name="maniple-send", daemon=True)
        sender.start()
        try:
            self._receive(stream, outcome)
        except BaseException:
            stream.abort()
            raise
        finally:
            sender.join()
            if failures and not isinstance(failures[0], OSError):
                raise failures[0]

    def resolve(self) -> list[int]:
        """After a break: handle lost replies, and return what was not applied. If it breaks again, call again."""
        if self._lost_replies is None:
            center, waiting = self._center, self._chunks[self._acknowledged :]
            applied = query_applied(center.link, center.name, self._sequence, self._acknowledged, waiting)
            self._unapplied = [k for k, was_applied in zip(waiting, applied, strict=True) if not was_applied]
            self._lost_replies = [k for k, was_applied in zip(waiting, applied, strict=True) if was_applied]
        if self._lost_replies:
            self._contribution.begin()
            try:
                while self._lost_replies:
                    self._contribution.on_lost_reply(self._lost_replies[0])
                    self._lost_replies.pop(0)
            finally:
                self._contribution.end()
        return self._unapplied

    def _send(self, stream: Stream) -> None:
        contribution = self._contribution
        for item, k in enumerate(self._chunks):
            stream.send(contribution.request(k, self._sequence, item), contribution.payload(k))

    def _receive(self, stream: Stream, outcome: Outcome) -> None:
        layout = self._center.layout
        for item, k in enumerate(self._chunks):
            received, size = stream.receive()
            reply = check_reply(received, ExchangeReply)
            if reply.item != item:
                raise BadFrame(f"the reply to item {item} was expected, and that to item {reply.item} came.")
            if not reply.is_done:
                stream.receive_bytes(size, at_most=0)
                self._contribution.on_undone(k)
                (self.locked if reply.is_locked else self.undone).append(k)
                self._acknowledged = item + 1
                continue
            self._contribution.on_reply(k, reply, stream, size)
            self._acknowledged = item + 1
            outcome.staleness += reply.staleness / len(layout.chunks)
            outcome.live = reply.live
            if reply.factor < 1 or reply.weight < 1:
                outcome.judge(layout.names_in(k), reply.factor, reply.weight)
            if reply.is_torn:
                outcome.torn += layout.names_in(k)
            if not reply.is_clean:
                outcome.refused += layout.names_at(k, self._contribution.refused[k])


def find_layout(link: Link, name: str) -> Layout:
    """Return the layout of the center or array `name` at the host; InvalidArgument if there is none."""
    _, table = link.request(FindArray(name), reply=CenterOpened, max_reply_bytes=_MAX_TABLE_BYTES)
    return Layout.from_table(bytes(table), chunk_bytes=chunk_bytes(center_file(name)))


def query_applied(link: Link, center: str, sequence: int, first: int, chunks: Sequence[int]) -> list[bool]:
    """Ask the host which items of exchange `sequence`, from `first` on, it has applied."""
    query, payload = AppliedQuery(center, sequence, first), np.array(chunks, np.int64)
    _, applied = link.request(query, payload, reply=AppliedReply, max_reply_bytes=len(chunks))
    if len(applied) != len(chunks):
        raise BadFrame(f"{len(chunks)} items were asked about, and the host answered for {len(applied)}.")
    return [bool(byte) for byte in applied]
