"""Files of named arrays: safetensors, written value by value so that no second center is held in memory, and HDF5.

safetensors: 8 bytes of length, a JSON header of names, dtypes, shapes and places, then the raw values.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from maniple.contracts import Array, Entry
from maniple.errors import InvalidArgument

_DTYPES = {
    "float32": "F32",
    "float64": "F64",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
HDF5 = (".h5", ".hdf5")
_NAME = "name"  # the attribute of a dataset that could not have its name as its path

Read = Callable[[int], Array]


def write_tensors(path: Path, entries: Sequence[Entry], dtypes: Sequence[str], read: Read) -> str:
    """Write `read(i)` for each entry to `path` and to the disk; gives the file's SHA-256.

    Complex numbers are written as pairs, in a last axis of 2.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry, dtype in zip(entries, dtypes, strict=True):
        shape, real = _real(entry.shape, dtype)
        start, end = end, end + int(np.prod(shape, dtype=np.int64)) * np.dtype(real).itemsize
        header[entry.name] = {"dtype": _DTYPES[real], "shape": list(shape), "data_offsets": [start, end]}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        _write(file, digest, len(text).to_bytes(8, "little") + text)
        for i in range(len(entries)):
            _write(file, digest, np.ascontiguousarray(read(i)).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_hdf5(path: Path, entries: Sequence[Entry], read: Read) -> None:
    """Write `read(i)` for each entry to the HDF5 file `path` and to the disk.

    There names are paths. One that is none ("a//b"), or where another needs a group ("a" beside "a/b"), gets another
    path, and its name as an attribute.
    """
    h5py = _h5py(path)
    with h5py.File(path, "w") as file:
        for i, (entry, place) in enumerate(zip(entries, hdf5_paths([e.name for e in entries]), strict=True)):
            made = file.create_dataset(place, data=read(i).reshape(entry.shape))
            if place != entry.name:
                made.attrs[_NAME] = entry.name
    with path.open("rb") as written:
        os.fsync(written.fileno())


def hdf5_paths(names: Sequence[str]) -> list[str]:
    """Where arrays of these names lie in an HDF5 file: each in a place of its own, most of them at their names."""
    groups = {name[:k] for name in names for k, letter in enumerate(name) if letter == "/"}
    plain = {name for name in names if name not in groups and all(part not in ("", ".") for part in name.split("/"))}
    paths: list[str] = []
    for name in names:
        place = name
        if name not in plain:
            place = name.replace("%", "%25").replace("/", "%2F").replace(".", "%2E") or "%"
            while place in plain or place in groups or place in paths:
                place += "%"
        paths.append(place)
    return paths


def read_arrays(path: Path) -> dict[str, Array]:
    """The arrays of a safetensors or HDF5 file that somebody has brought."""
    if not path.is_file():
        raise InvalidArgument(f"there is no file {str(path)!r}. Give one that ends with .safetensors or .h5.")
    if path.suffix not in HDF5:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise InvalidArgument(f"{path} is no whole safetensors file: {error}.") from None
    h5py = _h5py(path)
    found: dict[str, Array] = {}

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[str(item.attrs.get(_NAME, name))] = np.asarray(item)

    with h5py.File(path, "r") as file:
        file.visititems(note)
    return found


def digest_of(path: Path) -> str:
    """The file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_tensors(path: Path, entries: Sequence[Entry], dtypes: Sequence[str]) -> Iterator[Array]:
    """The values of a file that `write_tensors` made, one after the other, flat."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        for entry, dtype in zip(entries, dtypes, strict=True):
            yield np.ascontiguousarray(file.get_tensor(entry.name)).reshape(-1).view(dtype)


def _write(file: BinaryIO, digest: Any, data: bytes | memoryview) -> None:
    digest.update(data)
    file.write(data)


def _real(shape: tuple[int, ...], dtype: str) -> tuple[tuple[int, ...], str]:
    if dtype.startswith("complex"):
        return (*shape, 2), f"float{np.dtype(dtype).itemsize * 4}"
    return shape, dtype


def _h5py(path: Path) -> Any:
    try:
        import h5py
    except ImportError:
        raise InvalidArgument(
            f"{path.name} is an HDF5 file, and h5py is not installed. `pip install 'maniple[hdf5]'`, or use "
            ".safetensors."
        ) from None
    return h5py


assert sys.byteorder == "little", "values travel and are saved as they lie in memory"
