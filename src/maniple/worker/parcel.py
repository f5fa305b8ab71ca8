"""The parcel: what a worker that enters a circle needs to be as the others are. A file in shared memory."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from maniple.contracts import Array

_PLAIN = "plain"


def write_parcel(path: Path, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
    """Write it whole or not at all."""
    if path.exists():
        return
    part = path.with_name(f"{path.name}.part")
    text = np.frombuffer(msgspec.json.encode(plain), np.uint8)
    with part.open("wb") as file:
        np.savez(file, allow_pickle=False, **{_PLAIN: text}, **arrays)
    part.rename(path)


def read_parcel(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """What was written."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return arrays, msgspec.json.decode(arrays.pop(_PLAIN).tobytes())
