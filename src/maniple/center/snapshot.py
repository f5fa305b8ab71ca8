"""Snapshots: the center as safetensors beside a JSON manifest, written beside and renamed."""

import os
import time
from pathlib import Path
from typing import Any

from maniple.center.shared import Shared
from maniple.record.folder import write_json


def save_snapshot(center: Shared, path: Path, **manifest: Any) -> None:
    """Write the center to `path` (.safetensors) and what is known of it to the .json file beside it.

    Each parameter is locked for the time of its copy only; training goes on meanwhile.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    entries = center.layout.entries
    arrays = {entry.name: center.read(i) for i, entry in enumerate(entries)}
    versions = center.versions
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(arrays, beside, metadata={"format": "pt"})
        beside.replace(path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    finally:
        beside.unlink(missing_ok=True)
    write_json(
        path.with_suffix(".json"),
        {
            "saved": time.time(),
            "digest": center.layout.digest,
            "parameters": len(entries),
            "size_bytes": center.layout.size_bytes,
            "updates": max(versions) // 2,
            "torn": [entry.name for entry, version in zip(entries, versions, strict=True) if version & 1],
        }
        | manifest,
    )
