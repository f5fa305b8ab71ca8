"""Saving on request: a worker asks the host to write all values to a file of the run folder."""

import re
from pathlib import Path

import numpy as np

from maniple.center.segment import Segment
from maniple.center.snapshot import Readable, readable
from maniple.center.tensors import HDF5, write_hdf5, write_tensors
from maniple.contracts import Array, Entry
from maniple.errors import InvalidArgument
from maniple.host.keeping import UNDER_WAY, alone
from maniple.record import Folder
from maniple.record.folder import sync_folder

_OF_SNAPSHOTS = re.compile(r"(snapshot|best|epoch)-|(best|candidate)$")  # folders of `center`


def save_as(segment: Segment, folder: Folder, name: str) -> str:
    """Write all named arrays and centers to `center/NAME`, while training goes on; gives the file's path.

    One is written after the other, and after snapshots: readers see a whole file, the old one or the new one.
    """
    path = Path(name)
    target = folder.center / path
    if (
        not name.isprintable()
        or path.is_absolute()
        or ".." in path.parts
        or any(part.startswith(".") for part in path.parts)
        or not path.name
        or path.suffix not in (".safetensors", *HDF5)
    ):
        raise InvalidArgument(
            f"save({name!r}) cannot be written. Give a name inside the run's `center` folder, without `..`, hidden "
            "files or control characters, that ends with .safetensors or .h5."
        )
    first = path.parts[0].casefold()  # there are file systems for which Best-000001 is best-000001
    if len(path.parts) == 1 and (path.stem.casefold() == "arrays" or first.startswith("center-")):
        raise InvalidArgument(f"save({name!r}) would stand where the newest snapshot does. Choose another name.")
    parts = [folder.center / part for part in (path, *path.parents) if part.parts]
    if (len(path.parts) > 1 and _OF_SNAPSHOTS.match(first)) or any(part.is_symlink() for part in parts):
        raise InvalidArgument(f"save({name!r}) would change a snapshot. Choose another name.")
    with alone(segment), readable(segment) as (centers, _):
        parameters = [(center, i) for center in centers for i in range(len(center.layout.entries))]
        entries = [_named(center, i) for center, i in parameters]
        if len({entry.name for entry in entries}) < len(entries):  # two models with the same names
            entries = [
                Entry(f"{center.name}.{entry.name}", entry.shape, entry.dtype)
                for (center, _), entry in zip(parameters, entries, strict=True)
            ]
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = folder.center / UNDER_WAY

        def read(k: int) -> Array:
            center, i = parameters[k]
            return center.read(i)

        try:
            if target.suffix in HDF5:
                write_hdf5(beside, entries, read)
            else:
                write_tensors(beside, entries, [center.layout.places[i][0] for center, i in parameters], read)
            beside.replace(target)
            sync_folder(target.parent)
        finally:
            beside.unlink(missing_ok=True)
    return str(target)


def _named(center: Readable, i: int) -> Entry:
    entry = center.layout.entries[i]
    return Entry(entry.name, entry.shape, str(np.dtype(center.layout.places[i][0])))
