"""Collectives over torch.distributed: Gloo for values on the CPU, NCCL for those on GPUs.

On a GPU the members and their weights are exchanged over the CPU first: a worker that is dead or late is then named
before NCCL, which cannot name the missing worker, begins to wait.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed

from maniple.clock import Deadline
from maniple.collectives.call import check_reduction
from maniple.collectives.deadline import start_deadline_s
from maniple.collectives.peer_to_peer import BucketedPeerVectors, PeerLink, PeerMessage, PeerToPeer, PeerVectors
from maniple.collectives.reductions import normalized
from maniple.contracts import NO_EXACT, Array, Bucket, BucketedVectors, ResidentVectors, Round
from maniple.environment import Environment
from maniple.errors import InvalidArgument, WaitedTooLong
from maniple.settings.options import COLLECTIVES_DEADLINE_S
from maniple.wire.codecs import get_codec

dist: Any = torch.distributed  # its types are incomplete, as are those of its submodule
c10d: Any = torch.distributed.distributed_c10d

_OPS = {"sum": "SUM", "mean": "SUM", "min": "MIN", "max": "MAX", "prod": "PRODUCT"}
_FOLDS = {"sum": torch.add, "mean": torch.add, "min": torch.minimum, "max": torch.maximum, "prod": torch.mul}
_STORE_WAIT_S = 1.0  # one look at the store for a worker that has not come yet
_BLAME_S = 0.5  # late workers have this long to say for whom they wait themselves
_SIGNAL_S = 0.1  # how often a waiting worker looks whether it has to leave
_END_S = 1.0  # for the thread that waits to end
_opened: Counter[str] = Counter()
_stores: dict[str, Any] = {}

Late = tuple[set[int], set[int]]  # the ranks that are lost, and those that are late


class TorchCollectives(PeerToPeer):
    """A group on torch.distributed."""

    name = "torch"

    def __init__(self, link: "_GlooLink", *, deterministic: bool) -> None:
        super().__init__(link)
        self.open_group = link.open_group
        self._is_deterministic = deterministic
        self._bucketed: list[BucketedPeerVectors] = []
        self.background = self

    @classmethod
    def open(
        cls,
        environment: Environment,
        name: str,
        *,
        deadline_s: float | str = COLLECTIVES_DEADLINE_S,
        deterministic: bool = False,
        folder: Path | None = None,
    ) -> "TorchCollectives":
        """Connect to the other workers.

        Args:
            environment: this worker's rank, and the address of the rendezvous.
            name: of this group, the same for all workers.
            deadline_s: how long a worker waits for the others in a call.
            deterministic: sums on GPUs have the same order in every run; those on the CPU always have.
            folder: a folder that all workers see, for the rendezvous; else `environment.master`.
        """
        start_s = start_deadline_s(deadline_s)
        store, rank, world = _rendezvous(environment, start_s, folder)
        prefix = f"maniple/{environment.restarts}/{name}/{_opened[name]}"
        _opened[name] += 1
        store = dist.PrefixStore(prefix, store)
        _await_all(store, rank, world, start_s)
        return cls(_GlooLink(store, rank, world, deadline_s), deterministic=deterministic)

    def reside(
        self, sizes: dict[str, int], *, wire: str = "float32", device: str = "cpu", exact: Mapping[str, int] = NO_EXACT
    ) -> ResidentVectors:
        """NumPy arrays on the CPU; tensors on another device, reduced by its own library."""
        if device == "cpu":
            return super().reside(sizes, wire=wire, exact=exact)
        return DeviceVectors(self, sizes, wire, device, is_ordered=self._is_deterministic)

    def reside_in_parts(
        self,
        sizes: dict[str, int],
        parts: Sequence[Bucket],
        *,
        wire: str = "float32",
        device: str = "cpu",
        exact: Mapping[str, int] = NO_EXACT,
    ) -> BucketedVectors:
        """The same, where parts that are complete travel while the others are computed."""
        if device != "cpu":
            return DeviceVectors(self, sizes, wire, device, parts=parts, is_ordered=self._is_deterministic)
        flat = {dtype: np.zeros(size, dtype) for dtype, size in sizes.items()}
        vectors: list[PeerVectors] = []
        for dtype, start, stop in parts:
            its_exact = max(0, stop - max(start, sizes[dtype] - exact.get(dtype, 0)))
            part = {dtype: flat[dtype][start:stop]}
            vectors.append(self.register({dtype: stop - start}, wire, part, {dtype: its_exact}))
        self._bucketed.append(BucketedPeerVectors(flat, vectors))
        return self._bucketed[-1]

    def close(self) -> None:
        """Leave the group."""
        for vectors in self._bucketed:
            vectors.close()
        super().close()


class DeviceVectors:
    """Flat tensors on one device (`contracts.BucketedVectors`).

    In half precision, or if the order of additions must be fixed, slices are exchanged and added up in the order of
    the ranks. Otherwise the library's own sum is taken, which also gives all workers the same bits.
    """

    def __init__(
        self,
        collectives: TorchCollectives,
        sizes: dict[str, int],
        wire: str,
        device: str,
        *,
        is_ordered: bool,
        parts: Sequence[Bucket] = (),
    ) -> None:
        if get_codec(wire).keeps_errors:
            raise InvalidArgument(
                f"wire={wire!r} works on the CPU, and these vectors are on {device}. Use bfloat16 for them."
            )
        self._calls = collectives.register(sizes, wire, {})
        self._size, self._rank = len(collectives.ranks), collectives.rank
        self._wire, self._is_ordered = wire, is_ordered
        self._group = collectives.open_group(device) if self._size > 1 else None
        self.flat = {
            dtype: torch.zeros(size, dtype=getattr(torch, dtype), device=device) for dtype, size in sizes.items()
        }
        self._parts = [self.flat[d][start:stop] for d, start, stop in parts] or list(self.flat.values())
        self._begun, self._is_parted = 0, bool(parts)
        self._round = Round((self._rank,))
        self._weights: Sequence[float] = [1.0]
        self._under_way: list[Any] = []

    def begin(self, op: str, *, weight: float = 1.0) -> None:
        """Let the device reduce the next part, which is complete. With the first, all workers compare their calls."""
        if self._begun == 0:
            for dtype in self.flat:
                check_reduction(op, dtype, self._wire)
            self._round, self._weights = self._calls.compare(op, weight)
        self._begun += 1
        if self._round.weight or op != "mean":
            self._reduce(self._parts[self._begun - 1], op, normalized(op, self._weights))

    def all_reduce(self, op: str, *, weight: float = 1.0) -> Round:
        """Replace the tensors by the reduction of all workers' tensors."""
        while self._begun < len(self._parts):
            self.begin(op, weight=weight)
        if self._is_parted:  # the first part was sent before it was known whether the later ones are finite
            self._round.nonfinite = self._calls.compare(op, weight)[0].nonfinite
        for work in self._under_way:
            work.wait()
        self._under_way.clear()
        self._begun = 0
        sizes = [part.numel() * (part.element_size() if self._wire == "float32" else 2) for part in self._parts]
        self._round.size_bytes = 2 * (self._size - 1) * sum(sizes) // self._size
        return self._round

    def _reduce(self, flat: Any, op: str, weights: Sequence[float]) -> None:
        if op == "mean":
            share = weights[self._rank] / sum(weights)
            flat.mul_(share) if share else flat.zero_()  # values that do not count may be nan
        if self._group is None:
            return
        is_half = self._wire != "float32" and flat.dtype in {torch.float32, torch.float64}
        if is_half or self._is_ordered:
            self._reduce_in_order(flat, op, getattr(torch, self._wire) if is_half else flat.dtype)
        else:
            options = c10d.AllreduceOptions()
            options.reduceOp = getattr(c10d.ReduceOp, _OPS[op])
            self._under_way.append(self._group.allreduce([flat], options))

    def _reduce_in_order(self, flat: Any, op: str, travels: torch.dtype) -> None:
        """Send slices to their workers, add them up there by rank, and send them back; padded to equal slices."""
        assert self._group is not None
        count = -(-flat.numel() // self._size)
        sent = torch.zeros(count * self._size, dtype=travels, device=flat.device)
        sent[: flat.numel()].copy_(flat)
        got = torch.empty_like(sent)
        self._group.alltoall_base(got, sent, [], [], c10d.AllToAllOptions()).wait()
        total, *parts = got.view(self._size, count).to(flat.dtype if travels == flat.dtype else torch.float32)
        for part in parts:
            total = _FOLDS[op](total, part)
        self._group._allgather_base(sent, total.to(travels).contiguous(), c10d.AllgatherOptions()).wait()
        flat.copy_(sent[: flat.numel()])


class _GlooLink(PeerLink):
    """Messages over one Gloo process group."""

    def __init__(self, store: Any, rank: int, world: int, deadline_s: float | str) -> None:
        super().__init__(rank, world, deadline_s)
        self._store, self._groups = store, 0
        self._waiter: _Waiter | None = None
        self._gloo: Any = self.open_group("cpu", store) if world > 1 else None

    def begin_send(self, peer: int, data: Array, tag: int) -> Any:
        with self._noticing_loss(peer):
            return self._gloo.send([_tensor(data)], peer, tag)

    def begin_receive(self, peer: int, data: Array, tag: int) -> Any:
        with self._noticing_loss(peer):
            return self._gloo.recv([_tensor(data)], peer, tag)

    @contextmanager
    def _noticing_loss(self, peer: int) -> Generator[None]:
        """Name a worker that has ended since the last message."""
        try:
            yield
        except RuntimeError:
            self._fail(*self.blame({peer}, set()), "the next call", 0.0)

    def wait(self, messages: Sequence[PeerMessage]) -> tuple[set[int], set[int]]:
        """Wait for all; the main thread by another one, since no signal is handled while Gloo waits."""
        if threading.current_thread() is not threading.main_thread():
            return self._wait(messages)
        if self._waiter is None:
            self._waiter = _Waiter(self._wait)
        return self._waiter.wait(messages, self.on_wait)

    def _wait(self, messages: Sequence[PeerMessage]) -> tuple[set[int], set[int]]:
        """Wait for one message after the other: Gloo cannot be polled."""
        lost: set[int] = set()
        late: set[int] = set()
        end = time.monotonic() + self.deadline.limit_s
        for message in messages:
            if message.peer in lost | late:
                continue
            self.awaited = {message.peer}
            left_s = 0.01 if lost or late else max(0.01, end - time.monotonic())
            try:
                message.work.wait(timedelta(seconds=left_s))
            except RuntimeError as error:
                (late if "Timed out" in str(error) else lost).add(message.peer)
        return lost, late

    def blame(self, lost: set[int], late: set[int]) -> tuple[set[int], set[int]]:
        try:
            return self._ask_others(lost, late)
        except (RuntimeError, ValueError):  # the store has ended with the worker that kept it
            return lost, late

    def _ask_others(self, lost: set[int], late: set[int]) -> tuple[set[int], set[int]]:
        """Leave a note about whom this worker misses, and replace the workers that left one by those they miss."""
        if lost:
            late = set()  # they may well arrive once they have noticed the same
        self._store.set(f"note/{self.rank}", _note(lost, late))
        deadline = Deadline(_BLAME_S)
        seen = {self.rank}
        while waiting := {rank for rank in lost | late if rank not in seen}:
            for rank in waiting:
                if self._store.check([f"note/{rank}"]):
                    their_lost, their_late = _read_note(self._store.get(f"note/{rank}").decode())
                    seen.add(rank)
                    lost, late = (lost - {rank}) | their_lost - seen, (late - {rank}) | their_late - seen
            if deadline.is_over():
                break
            time.sleep(0.02)
        return lost, late if not lost else set()

    def open_group(self, device: str, store: Any = None) -> Any:
        """A process group for values on `device`."""
        timeout = timedelta(seconds=self.deadline.longest_s)
        if store is None:
            self._groups += 1
            store = dist.PrefixStore(f"device/{self._groups}", self._store)
        if not device.startswith("cuda"):
            return dist.ProcessGroupGloo(store, self.rank, self.size, timeout)
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def close(self) -> None:
        super().close()
        self._gloo = None
        if self._waiter is not None:
            self._waiter.close()


class _Waiter:
    """A thread that waits for the messages of one link."""

    def __init__(self, wait: Callable[[Sequence[PeerMessage]], Late]) -> None:
        self._wait = wait
        self._tasks = SimpleQueue[Sequence[PeerMessage] | None]()
        self._results = SimpleQueue[Late | Exception]()
        self._thread = threading.Thread(target=self._work, name="maniple gloo", daemon=True)
        self._thread.start()

    def wait(self, messages: Sequence[PeerMessage], on_wait: Callable[[], None]) -> Late:
        """Wait for all; `on_wait` may raise to give up. Then the thread goes on waiting, and takes no more."""
        self._tasks.put(messages)
        while True:
            try:
                result = self._results.get(timeout=_SIGNAL_S)
            except Empty:
                on_wait()
                continue
            if isinstance(result, Exception):
                raise result
            return result

    def close(self) -> None:
        """End the thread, unless a wait was given up that goes on.

        At the end of the process Gloo aborts it if a thread still refers to messages.
        """
        self._tasks.put(None)
        self._thread.join(_END_S)

    def _work(self) -> None:
        while (messages := self._tasks.get()) is not None:
            try:
                self._results.put(self._wait(messages))
            except Exception as error:  # raised again in the main thread
                self._results.put(error)
            del messages


def _rendezvous(environment: Environment, deadline_s: float, folder: Path | None) -> tuple[Any, int, int]:
    """The store through which the workers find each other, and this worker's rank and world."""
    if dist.is_available() and dist.is_initialized():
        return c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    rank, world, master = environment.rank, environment.world, environment.master
    if world == 1:
        return dist.HashStore(), 0, 1
    if folder is not None:
        path = str(folder / f"collectives-meeting-{environment.restarts}")
        if path not in _stores:
            _stores[path] = dist.FileStore(path, world)
        return _stores[path], rank, world
    if master is None:
        raise InvalidArgument(
            "collectives torch need an address where the workers meet, but MASTER_ADDR and MASTER_PORT are not set. "
            "Start the workers by torchrun, srun or `maniple run --collectives torch`, or set both."
        )
    if master not in _stores:
        try:
            found = dist.rendezvous(f"tcp://{master}", rank, world, timeout=timedelta(seconds=deadline_s))
            _stores[master] = next(found)[0]
        except (RuntimeError, ValueError) as error:
            raise WaitedTooLong(
                f"worker {rank} has not found the others at {master} within {deadline_s:g} s: {error}. Worker 0 keeps "
                "the rendezvous: look at its log, and whether the port is free and can be reached."
            ) from None
    return _stores[master], rank, world


def _await_all(store: Any, rank: int, world: int, deadline_s: float) -> None:
    deadline = Deadline(deadline_s, slice_s=2 * _STORE_WAIT_S)
    store.set(f"here/{rank}", "")
    for peer in range(world):
        while not _is_here(store, peer, _STORE_WAIT_S):
            if not deadline.is_over():
                continue
            missing = [other for other in range(peer, world) if other != rank and not _is_here(store, other)]
            raise WaitedTooLong(
                f"worker {', '.join(map(str, missing))} of {world} has not joined within {deadline_s:g} s, where "
                f"worker {rank} waits. Look at its log; raise --collectives-deadline if it starts slowly."
            )


def _is_here(store: Any, rank: int, wait_s: float = 0.0) -> bool:
    """Whether a worker has come to the rendezvous, waiting up to `wait_s` for it."""
    key = [f"here/{rank}"]
    try:
        if not wait_s:
            return store.check(key)
        store.wait(key, timedelta(seconds=wait_s))
    except (RuntimeError, ValueError):
        return False
    return True


def _tensor(data: Array) -> Any:
    return torch.from_numpy((data if data.flags.writeable else data.copy()).view(np.uint8))


def _note(lost: set[int], late: set[int]) -> str:
    return " ".join(map(str, sorted(lost))) + "," + " ".join(map(str, sorted(late)))


def _read_note(note: str) -> tuple[set[int], set[int]]:
    lost, _, late = note.partition(",")
    return {int(rank) for rank in lost.split()}, {int(rank) for rank in late.split()}
