"""The parcel: what a worker that enters a circle needs to be as the others are. A file in shared memory.

It holds the model's arrays, the rule's memory, the optimizer's state, and what else the replica wants to tell.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from maniple.adapters import Adapter
from maniple.contracts import Array

_PLAIN = "plain"
_OPTIMIZER = "optimizer/"


def write_parcel(
    path: Path, model: Adapter, memory: Sequence[Array], extra: dict[str, Array], plain: dict[str, Any]
) -> None:
    """Write it whole or not at all; once is enough."""
    if path.exists():
        return
    arrays, state = model.optimizer_state()
    parts = extra | {_OPTIMIZER + name: value for name, value in arrays.items()}
    model.begin()
    for i in range(len(model.entries)):
        parts[f"model/{i}"] = model.array(i)
    parts |= {f"memory/{i}": value for i, value in enumerate(memory)}
    parts[_PLAIN] = np.frombuffer(msgspec.json.encode(plain | {"optimizer": state}), np.uint8)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        np.savez(file, allow_pickle=False, **parts)
    part.rename(path)


def take_parcel(
    path: Path, model: Adapter, memory_of: Callable[[int], Array | None]
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Set model, memory and optimizer to what was written; gives the rest."""
    with np.load(path, allow_pickle=False) as file:
        arrays: dict[str, Array] = {name: file[name] for name in file.files}
    plain = msgspec.json.decode(arrays.pop(_PLAIN).tobytes())
    model.begin()
    for i in range(len(model.entries)):
        model.array(i)[:] = arrays.pop(f"model/{i}")
        model.commit(i)
        if (memory := memory_of(i)) is not None:
            memory[:] = arrays.pop(f"memory/{i}")
    state = {name.removeprefix(_OPTIMIZER): arrays[name] for name in arrays if name.startswith(_OPTIMIZER)}
    model.restore_optimizer(state, plain.pop("optimizer"))
    return arrays, plain
