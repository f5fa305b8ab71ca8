"""State in files: optimizer states that workers continue with after --resume, and what a newcomer to synchronous
training begins with.

    optimizer/center-0.worker-1.safetensors    in the run folder: the first `share()` of worker 1

Each worker saves its optimizer state, and what its rule keeps at the worker, between two steps after each snapshot and
when it leaves. Moments and step counts are restored; the settings of parameter groups, such as learning rates, come
from the script. A newcomer's state is complete: model, state of the rule, optimizer with its settings, and the position
in the data.
"""

import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from maniple.adapters import Adapter
from maniple.center.snapshot import read_arrays, write_tensors
from maniple.clock import clock
from maniple.contracts import Array, Entry
from maniple.environment import Environment
from maniple.errors import InvalidArgument, say
from maniple.layout import RuleState
from maniple.record import RunFolder
from maniple.rules import Rule
from maniple.sampler.position import RESUMED, SAVES

if TYPE_CHECKING:
    from maniple.replica.replica import Replica

_PLAIN = "plain"  # the name of the JSON values among the arrays of a file
_OPTIMIZER, _RULE = "optimizer/", "rule/"  # prefixes of names in a file
_CHECK_EVERY_S = 0.5  # a stat() per check; the state may be this much newer than its snapshot


class OptimizerStates:
    """The saved optimizer states of one worker. Workers on other machines than the host save nothing.

    Attributes:
        next_check: when to look for a new snapshot again.
    """

    def __init__(self, environment: Environment, segment: Path | None) -> None:
        is_here = segment is not None and environment.run is not None and environment.run.is_dir()
        self._folder = RunFolder(environment.run).optimizer if environment.run is not None and is_here else None
        self._rank, self._segment = environment.rank, segment
        self._saved: list[tuple[int, Adapter, Replica]] = []
        self._before: dict[int, int] = {}  # steps before the run was resumed, by the replica's number
        self._seen, self.next_check = self._newest(), clock.monotonic() + _CHECK_EVERY_S

    def add(self, number: int, model: Adapter, replica: "Replica") -> bool:
        """Save the optimizer of replica `number` from now on; True if it was restored from a saved state."""
        if self._folder is None:
            return False
        self._saved.append((number, model, replica))
        if self._segment is None or not (self._segment / RESUMED).exists():
            return False
        return self._load(number, model, replica)

    def is_due(self, now: float) -> bool:
        """A snapshot of the center was begun since the last check."""
        self.next_check = now + _CHECK_EVERY_S
        if not self._saved or self._segment is None:
            return False
        before, self._seen = self._seen, self._newest()
        return self._seen != before

    def save(self) -> None:
        """Write the state of all optimizers. Where all workers have the same one, only the keeper writes it."""
        for number, model, replica in self._saved:
            if replica.steps and replica.sharing.is_keeper:
                try:
                    self._write(number, model, replica)
                except OSError as error:
                    warnings.warn(
                        f"the optimizer state of worker {self._rank} could not be saved: {error}. Training "
                        "continues without it; free some disk space.",
                        stacklevel=2,
                    )

    def _write(self, number: int, model: Adapter, replica: "Replica") -> None:
        arrays, plain = model.optimizer_state()
        arrays = arrays | {_RULE + name: value for name, value in replica.sharing.saved_state().items()}
        if not arrays or self._folder is None:
            return
        saved = {"steps": self._before.get(number, 0) + replica.steps, "saved": clock.time(), "optimizer": plain}
        parts: dict[str, Array] = {_PLAIN: np.frombuffer(msgspec.json.encode(saved), np.uint8), **arrays}
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

    def _load(self, number: int, model: Adapter, replica: "Replica") -> bool:
        now, has_rule_state = model.optimizer_state()[1], bool(replica.sharing.saved_state())
        groups = now.get("groups", [])
        if not groups and not has_rule_state:
            return False
        owner, path = self._source(number, replica.rule)
        if path is None:
            if has_rule_state or any(group.get("momentum", 1) != 0 for group in groups):
                say(f"worker {self._rank}: no optimizer state was saved for it, and it starts with an empty one")
            return False
        try:
            arrays = read_arrays(path)
            saved = msgspec.json.decode(arrays.pop(_PLAIN).tobytes())
            _check_finite(arrays)
            kept = {name.removeprefix(_RULE): arrays.pop(name) for name in list(arrays) if name.startswith(_RULE)}
            if groups:
                _check(saved["optimizer"], now)
            replica.sharing.restore_state(kept)
            if groups:
                model.restore_optimizer(arrays, saved["optimizer"] | {"groups": [{} for _ in groups]})
        except (OSError, KeyError, ValueError, RuntimeError, InvalidArgument, msgspec.DecodeError) as error:
            reason = str(error).rstrip(".")
            warnings.warn(
                f"worker {self._rank} starts with empty optimizer state: {path} cannot be used, since {reason}. Remove "
                "the file, or continue with the model and the optimizer that it was saved from.",
                stacklevel=3,
            )
            return False
        self._before[number] = int(saved["steps"])
        if self._rank == 0 or owner != self._rank:
            steps = f"{saved['steps']:,}"
            say(f"worker {self._rank}: continues with the optimizer state of worker {owner} after step {steps}")
        return True

    def _source(self, number: int, rule: Rule) -> tuple[int, Path | None]:
        """The rank whose state this worker continues with, and its file."""
        assert self._folder is not None
        files = self._folder.glob(f"center-{number}.worker-*.safetensors")
        named = [(path.name.split(".")[1].removeprefix("worker-"), path) for path in files]
        there = {int(name): path for name, path in named if name.isdigit()}
        if rule.averages_gradients and there:  # all workers have the same state: take the newest
            rank = max(there, key=lambda rank: there[rank].stat().st_mtime_ns)
            return rank, there[rank]
        rank = 0 if self._rank not in there and rule.is_synchronous else self._rank
        return rank, there.get(rank)

    def _path(self, number: int, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"center-{number}.worker-{rank}.safetensors"

    def _newest(self) -> int:
        """The time of the last snapshot's beginning, in ns."""
        with suppress(OSError):
            return 0 if self._segment is None else (self._segment / SAVES).stat().st_mtime_ns
        return 0


def _check_finite(arrays: dict[str, Array]) -> None:
    for name, value in arrays.items():
        if value.dtype.kind in "fc" and not np.isfinite(value).all():
            raise InvalidArgument(f"its {name!r} holds values that are not finite")


def _check(saved: dict[str, Any], now: dict[str, Any]) -> None:
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


def write_newcomer_state(
    path: Path, model: Adapter, rule_state: RuleState | None, extra: dict[str, Array], plain: dict[str, Any]
) -> bool:
    """Write the file atomically; False if another member has written it."""
    if path.exists():
        return False
    arrays, state = model.optimizer_state()
    parts = extra | {_OPTIMIZER + name: value for name, value in arrays.items()}
    model.begin()
    for i in range(len(model.entries)):
        parts[f"model/{i}"] = model.array(i)
    parts |= {_RULE + name: value for name, value in (rule_state.arrays() if rule_state else {}).items()}
    parts[_PLAIN] = np.frombuffer(msgspec.json.encode(plain | {"optimizer": state}), np.uint8)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        np.savez(file, allow_pickle=False, **parts)
    part.rename(path)
    return True


def load_newcomer_state(
    path: Path, model: Adapter, rule_state: RuleState | None
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Set model, rule state and optimizer to what is in the file; gives the `extra` and `plain` parts."""
    with np.load(path, allow_pickle=False) as file:
        arrays: dict[str, Array] = {name: file[name] for name in file.files}
    plain = msgspec.json.decode(arrays.pop(_PLAIN).tobytes())
    model.begin()
    for i in range(len(model.entries)):
        model.array(i)[:] = arrays.pop(f"model/{i}")
        model.commit(i)
    kept = {name.removeprefix(_RULE): arrays.pop(name) for name in list(arrays) if name.startswith(_RULE)}
    if rule_state is not None:
        rule_state.load(kept)
    state = {name.removeprefix(_OPTIMIZER): arrays[name] for name in arrays if name.startswith(_OPTIMIZER)}
    model.restore_optimizer(state, plain.pop("optimizer"))
    return arrays, plain
