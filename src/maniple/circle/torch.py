"""The circle over torch.distributed: Gloo carries what lies on the CPU, NCCL what lies on GPUs.

Each circle has process groups of its own, told apart by their names in the store at MASTER_ADDR:MASTER_PORT, so that
its messages are never mixed up with those of another one or of the script. A world that the script has made itself by
`torch.distributed.init_process_group` is used as it is.

A worker that ends breaks its connections, and is known to be lost at once. Who notices that leaves a note in the
store, so that those who waited for him do not take him for the lost one.
"""

import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

from maniple.center.locks import Patience
from maniple.circle.link import Link, Message
from maniple.circle.parts import Parts
from maniple.circle.rounds import Rounds, Vectors
from maniple.contracts import Array, Part, Parted, Resident
from maniple.errors import InvalidArgument, WaitedTooLong
from maniple.place import CIRCLE_DEADLINE_S, Place

dist: Any = torch.distributed  # its types are not all there

_LOOK_S = 1.0
_NOTE_S = 0.5  # for so long somebody who is late may still leave a note
_opened: Counter[str] = Counter()
_stores: dict[str, Any] = {}


class Torch(Rounds):
    """A circle on torch.distributed (`contracts.Circle`)."""

    name = "torch"

    def __init__(self, gloo: "_Gloo", *, deadline_s: float, deterministic: bool) -> None:
        super().__init__(Link(gloo, deadline_s))
        self._gloo, self._deadline_s, self._is_deterministic = gloo, deadline_s, deterministic
        self._parted: list[Parts] = []

    @classmethod
    def open(
        cls,
        place: Place,
        name: str,
        *,
        deadline_s: float = CIRCLE_DEADLINE_S,
        deterministic: bool = False,
        folder: Path | None = None,
    ) -> "Torch":
        """Meet the other workers.

        Args:
            place: who am I, and where the workers meet.
            name: of this circle, the same for all workers.
            deadline_s: how long a worker waits for the others in a round.
            deterministic: sums on GPUs have the same order in every run; those on the CPU always have.
            folder: that all workers see, where they meet; else at `place.master`.
        """
        store, rank, world = _world(place, deadline_s, folder)
        prefix = f"maniple/{place.restarts}/{name}/{_opened[name]}"
        _opened[name] += 1
        store = dist.PrefixStore(prefix, store)
        _await_all(store, rank, world, deadline_s)
        return cls(_Gloo(store, rank, world, deadline_s), deadline_s=deadline_s, deterministic=deterministic)

    def reside(self, sizes: dict[str, int], *, wire: str = "float32", device: str = "cpu") -> Resident:
        """NumPy arrays on the CPU; tensors on another device, which its own library reduces."""
        if device == "cpu":
            return super().reside(sizes, wire=wire)
        from maniple.circle.device import Tensors

        return Tensors(self, sizes, wire, device, is_ordered=self._is_deterministic)

    def reside_in_parts(
        self, sizes: dict[str, int], parts: Sequence[Part], *, wire: str = "float32", device: str = "cpu"
    ) -> Parted:
        """The same, and parts that are complete travel while the others are computed."""
        if device != "cpu":
            from maniple.circle.device import Tensors

            return Tensors(self, sizes, wire, device, parts=parts, is_ordered=self._is_deterministic)
        flat = {dtype: np.zeros(size, dtype) for dtype, size in sizes.items()}
        vectors = [
            self.settle({dtype: stop - start}, wire, {dtype: flat[dtype][start:stop]}) for dtype, start, stop in parts
        ]
        self._parted.append(Parts(flat, vectors))
        return self._parted[-1]

    def told(self, sizes: dict[str, int], wire: str) -> Vectors:
        """The place in the circle of vectors of these sizes that lie elsewhere."""
        return self.settle(sizes, wire, {})

    def group(self, device: str) -> Any:
        """A process group for values on `device`."""
        return self._gloo.group(device, self._deadline_s)

    def close(self) -> None:
        """Leave the circle."""
        for parted in self._parted:
            parted.close()
        super().close()


class _Gloo:
    """Messages over one process group."""

    def __init__(self, store: Any, rank: int, world: int, deadline_s: float) -> None:
        self.rank, self.size, self._store = rank, world, store
        self.awaited: set[int] = set()
        self._groups = 0
        self._gloo = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=deadline_s)) if world > 1 else None

    def send(self, peer: int, data: Array, tag: int) -> Message:
        assert self._gloo is not None
        return Message(peer, data, self._gloo.send([_tensor(data)], peer, tag))

    def receive(self, peer: int, data: Array, tag: int) -> Message:
        assert self._gloo is not None
        return Message(peer, data, self._gloo.recv([_tensor(data)], peer, tag))

    def wait(self, messages: Sequence[Message], deadline_s: float) -> tuple[set[int], set[int]]:
        """Gloo cannot be asked without waiting, so they are waited for one after the other."""
        lost: set[int] = set()
        late: set[int] = set()
        end = time.monotonic() + deadline_s
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
            return self._asked(lost, late)
        except (RuntimeError, ValueError):  # the store has ended with the worker that kept it
            return lost, late

    def _asked(self, lost: set[int], late: set[int]) -> tuple[set[int], set[int]]:
        if lost:
            late = set()  # they may well come once they have noticed the same
        self._store.set(f"note/{self.rank}", _note(lost, late))
        end = time.monotonic() + _NOTE_S
        seen = {self.rank}
        while waiting := {rank for rank in lost | late if rank not in seen}:
            for rank in waiting:
                if self._store.check([f"note/{rank}"]):
                    their_lost, their_late = _read(self._store.get(f"note/{rank}").decode())
                    seen.add(rank)
                    lost, late = (lost - {rank}) | their_lost - seen, (late - {rank}) | their_late - seen
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        return lost, late if not lost else set()

    def group(self, device: str, deadline_s: float) -> Any:
        self._groups += 1
        store = dist.PrefixStore(f"device/{self._groups}", self._store)
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=deadline_s)
            return dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        return dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=deadline_s))

    def close(self) -> None:
        self._gloo = None


def _world(place: Place, deadline_s: float, folder: Path | None) -> tuple[Any, int, int]:
    """Where the workers find each other, and who this one is."""
    if dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    if place.world == 1:
        return dist.HashStore(), 0, 1
    if folder is not None:
        path = str(folder / f"circle-meeting-{place.restarts}")
        if path not in _stores:
            _stores[path] = dist.FileStore(path, place.world)
        return _stores[path], place.rank, place.world
    if place.master is None:
        raise InvalidArgument(
            "the circle torch needs a place where the workers meet, but MASTER_ADDR and MASTER_PORT are not set. "
            "Start the workers by torchrun, srun or `maniple run --circle torch`, or set both."
        )
    if place.master not in _stores:
        url, wait = f"tcp://{place.master}", timedelta(seconds=deadline_s)
        try:
            _stores[place.master] = next(dist.rendezvous(url, place.rank, place.world, timeout=wait))[0]
        except (RuntimeError, ValueError) as error:
            raise WaitedTooLong(
                f"worker {place.rank} has not found the others at {place.master} within {deadline_s:g} s: {error}. "
                "Worker 0 keeps the meeting place: look at its log, and whether the port is free and can be reached."
            ) from None
    return _stores[place.master], place.rank, place.world


def _await_all(store: Any, rank: int, world: int, deadline_s: float) -> None:
    patience = Patience(deadline_s, slice_s=2 * _LOOK_S)
    store.set(f"here/{rank}", "")
    for peer in range(world):
        while not _has_come(store, peer):
            if not patience.is_over():
                continue
            missing = [other for other in range(peer, world) if other != rank and not _is_here(store, other)]
            raise WaitedTooLong(
                f"worker {', '.join(map(str, missing))} of {world} has not come to the circle within {deadline_s:g} s, "
                f"where worker {rank} waits. Look at its log; raise --circle-deadline if it starts slowly."
            )


def _has_come(store: Any, rank: int) -> bool:
    """Wait for a worker, for as long as is measured at once."""
    try:
        store.wait([f"here/{rank}"], timedelta(seconds=_LOOK_S))
    except (RuntimeError, ValueError):
        return False
    return True


def _is_here(store: Any, rank: int) -> bool:
    try:
        return store.check([f"here/{rank}"])
    except (RuntimeError, ValueError):
        return False


def _tensor(data: Array) -> Any:
    return torch.from_numpy((data if data.flags.writeable else data.copy()).view(np.uint8))


def _note(lost: set[int], late: set[int]) -> str:
    return " ".join(map(str, sorted(lost))) + "," + " ".join(map(str, sorted(late)))


def _read(note: str) -> tuple[set[int], set[int]]:
    lost, _, late = note.partition(",")
    return {int(word) for word in lost.split()}, {int(word) for word in late.split()}
