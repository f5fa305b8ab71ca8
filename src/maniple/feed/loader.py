"""The process behind `Prefetch`: runs over the iterable, and hands each batch to its parent."""

import ctypes
import importlib
import io
import mmap
import os
import pickle
import signal
import struct
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np

from maniple.contracts import Array
from maniple.feed.batch import Batch

NOTE = struct.Struct("<bqq")  # what the loader says: kind, slot, bytes
BATCH, RAISED, DONE = range(3)
_PR_SET_PDEATHSIG = 1
_GRAIN = 1 << 16  # slots grow by this


class _Unwanted(BaseException):
    """The parent wants no more."""


def load(iterable: Iterable[Any], notes: int, free: int, slots: Sequence[int], parent: int) -> NoReturn:
    """Hand over all of `iterable`, or what it raises, and end this process."""
    _settle(parent)
    hand = _Hand(notes, free, slots)
    try:
        for item in iterable:
            hand.over(BATCH, _pickled(item))
        hand.note(DONE)
    except _Unwanted:
        pass
    except BaseException as error:
        with suppress(_Unwanted):
            hand.over(RAISED, _raised(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _Hand:
    """Gives batches to the parent, as long as it has taken those before."""

    def __init__(self, notes: int, free: int, slots: Sequence[int]) -> None:
        self._notes, self._freed, self._slots = notes, free, slots
        self._free = deque(range(len(slots)))
        self._maps: dict[int, Array] = {}

    def over(self, kind: int, arrays: Sequence[Any]) -> None:
        """Wait for a free slot, fill it and say so."""
        batch = Batch.of(arrays)
        if not self._free:
            freed = os.read(self._freed, 256)
            if not freed:
                raise _Unwanted
            self._free.extend(freed)
        slot = self._free.popleft()
        batch.write(self._buffer(slot, batch.size_bytes))
        self.note(kind, slot, batch.size_bytes)

    def note(self, kind: int, slot: int = 0, size: int = 0) -> None:
        """Say something."""
        try:
            os.write(self._notes, NOTE.pack(kind, slot, size))
        except OSError:
            raise _Unwanted from None

    def _buffer(self, slot: int, size: int) -> Array:
        known = self._maps.get(slot)
        if known is None or known.nbytes < size:
            os.posix_fallocate(self._slots[slot], 0, -(-size // _GRAIN) * _GRAIN)
            known = self._maps[slot] = np.frombuffer(mmap.mmap(self._slots[slot], 0), np.uint8)
        return known[:size]


class _Pickler(pickle.Pickler):
    """Pickles a torch tensor as the array that it is, so that its values stay out of the pickle."""

    def reducer_override(self, obj: Any) -> Any:
        torch: Any = sys.modules.get("torch")
        if torch is None or type(obj) is not torch.Tensor or obj.requires_grad or obj.device.type != "cpu":
            return NotImplemented
        try:
            return _tensor, (obj.numpy(),)
        except (TypeError, RuntimeError):  # bfloat16, sparse ...: torch's own way
            return NotImplemented


def _tensor(array: Array) -> Any:
    torch: Any = importlib.import_module("torch")  # the iterable may be the first to have imported it, in its process
    return torch.from_numpy(array)


def _pickled(item: Any) -> list[Any]:
    """The pickle of `item`, and the memory of its arrays."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(item)
    return [np.frombuffer(file.getvalue(), np.uint8), *(np.frombuffer(one.raw(), np.uint8) for one in buffers)]


def _raised(error: BaseException) -> list[Any]:
    """An exception and its traceback; without the former if it cannot be pickled."""
    text = np.frombuffer("".join(traceback.format_exception(error)).encode(errors="replace"), np.uint8)
    try:
        return [np.frombuffer(pickle.dumps(error), np.uint8), text]
    except Exception:
        return [np.empty(0, np.uint8), text]


def _settle(parent: int) -> None:
    """Tie this process to its parent's life, and leave the cores to the training."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the trainer decides
    signal.signal(signal.SIGTERM, _stop)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def _stop(*_: object) -> NoReturn:
    raise _Unwanted  # so that the iterable can end what it has started itself
