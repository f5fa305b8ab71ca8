"""Optimizer state that outlives a run: each worker saves its own, and continues with it after --resume.

    optimizer/center-0.worker-1.safetensors    of the first `share()`, of worker 1

It is written between two steps after each snapshot, and when a worker leaves. Learning rates and the like are the
script's own: moments and step counts are restored, the settings of parameter groups are not.
"""

import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from maniple.adapters import Adapter
from maniple.center.tensors import read_arrays, write_tensors
from maniple.contracts import Array, Entry
from maniple.errors import InvalidArgument, say
from maniple.place import Place
from maniple.record import Folder
from maniple.rules import Rule
from maniple.sampler.position import RESUMED, SAVES

_PLAIN = "plain"
_LOOK_S = 0.5  # how often to look for a snapshot


class Optimized(Protocol):
    """A replica whose optimizer state is saved."""

    steps: int

    @property
    def rule(self) -> Rule: ...
    @property
    def is_keeper(self) -> bool: ...


class Optimizers:
    """The optimizers of one worker. Nothing is saved by workers elsewhere, who do not share memory with the host."""

    def __init__(self, place: Place, segment: Path | None) -> None:
        is_here = segment is not None and place.run is not None and place.run.is_dir()
        self._folder = Folder(place.run).optimizer if place.run is not None and is_here else None
        self._rank, self._segment = place.rank, segment
        self._saved: list[tuple[int, Adapter, Optimized]] = []
        self._before: dict[int, int] = {}  # by number: the steps of earlier lives
        self._seen, self._next = self._newest(), time.monotonic() + _LOOK_S

    def add(self, number: int, model: Adapter, replica: Optimized) -> bool:
        """Save the optimizer of replica `number` from now on; True if it continues with what was saved before."""
        if self._folder is None:
            return False
        self._saved.append((number, model, replica))
        if self._segment is None or not (self._segment / RESUMED).exists():
            return False
        return self._load(number, model, replica.rule)

    def is_due(self) -> bool:
        """A snapshot of the center is being written, or was since the last call."""
        if not self._saved or self._segment is None or time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + _LOOK_S
        before, self._seen = self._seen, self._newest()
        return self._seen != before

    def save(self) -> None:
        """Write the state of all optimizers; where all workers have the same one, one of them does."""
        for number, model, replica in self._saved:
            if replica.steps and replica.is_keeper:
                try:
                    self._write(number, model, replica)
                except OSError as error:
                    warnings.warn(
                        f"the optimizer state of worker {self._rank} could not be saved: {error}. Training goes on; "
                        "free some disk.",
                        stacklevel=2,
                    )

    def _write(self, number: int, model: Adapter, replica: Optimized) -> None:
        arrays, plain = model.optimizer_state()
        if not arrays or self._folder is None:
            return
        told = {"steps": self._before.get(number, 0) + replica.steps, "saved": time.time(), "optimizer": plain}
        parts: dict[str, Array] = {_PLAIN: np.frombuffer(msgspec.json.encode(told), np.uint8), **arrays}
        entries = [Entry(name, value.shape, str(value.dtype)) for name, value in parts.items()]
        values = list(parts.values())
        path = self._path(number, self._rank)
        beside = path.with_name(f".{path.name}")
        try:
            path.parent.mkdir(exist_ok=True)
            write_tensors(beside, entries, [entry.dtype for entry in entries], lambda i: values[i])
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)

    def _load(self, number: int, model: Adapter, rule: Rule) -> bool:
        now = model.optimizer_state()[1]
        if not (groups := now.get("groups")):
            return False
        owner, path = self._source(number, rule)
        if path is None:
            if any(group.get("momentum", 1) != 0 for group in groups):
                self._say("no optimizer state was saved for it, and it starts with an empty one")
            return False
        try:
            arrays = read_arrays(path)
            told = msgspec.json.decode(arrays.pop(_PLAIN).tobytes())
            _check(arrays, told["optimizer"], now)
            model.restore_optimizer(arrays, told["optimizer"] | {"groups": [{} for _ in groups]})
        except (OSError, KeyError, ValueError, RuntimeError, InvalidArgument, msgspec.DecodeError) as error:
            warnings.warn(
                f"worker {self._rank} starts with empty optimizer state: {path} cannot be used, since {error}. Remove "
                "the file, or go on with the model and the optimizer that it was saved of.",
                stacklevel=3,
            )
            return False
        self._before[number] = int(told["steps"])
        if self._rank == 0 or owner != self._rank:
            self._say(f"continues with the optimizer state of worker {owner} after step {told['steps']:,}")
        return True

    def _source(self, number: int, rule: Rule) -> tuple[int, Path | None]:
        """Whose state this worker continues with."""
        assert self._folder is not None
        there = {rank: self._path(number, rank) for rank in _ranks(self._folder, number)}
        if rule.meets == "gradients" and there:  # all have the same: the newest
            rank = max(there, key=lambda rank: there[rank].stat().st_mtime_ns)
            return rank, there[rank]
        rank = 0 if self._rank not in there and rule.meets != "center" else self._rank
        return rank, there.get(rank)

    def _path(self, number: int, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"center-{number}.worker-{rank}.safetensors"

    def _newest(self) -> int:
        """When the last snapshot was begun."""
        with suppress(OSError):
            return 0 if self._segment is None else (self._segment / SAVES).stat().st_mtime_ns
        return 0

    def _say(self, text: str) -> None:
        say(f"worker {self._rank}: {text}")


def _ranks(folder: Path, number: int) -> list[int]:
    names = (path.name.split(".")[1].removeprefix("worker-") for path in folder.glob(f"center-{number}.worker-*"))
    return sorted(int(name) for name in names if name.isdigit())


def _check(arrays: dict[str, Array], saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise InvalidArgument if a state is not one of this optimizer and these parameters."""
    if len(saved["parameters"]) != len(now["parameters"]):
        raise InvalidArgument(
            f"it is of {len(saved['parameters'])} parameters, and this optimizer has {len(now['parameters'])}"
        )
    for one, other in zip(saved["parameters"], now["parameters"], strict=True):
        if one != other:
            raise InvalidArgument(f"it is of parameter {one[0]!r} {one[1]}, and here is {other[0]!r} {other[1]}")
    if saved["kind"] != now["kind"]:
        raise InvalidArgument(f"it is of {saved['kind']}, and this optimizer is {now['kind']}")
    for name, value in arrays.items():
        if value.dtype.kind in "fc" and not np.isfinite(value).all():
            raise InvalidArgument(f"its {name!r} holds values that are not finite")
