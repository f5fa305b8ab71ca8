"""Snapshots: all centers and named arrays of a run, in a folder that appears complete or not at all.

    center/snapshot-000007/center-0.safetensors    the parameters of the first `share()`
                           center-0.state.safetensors  what its rule keeps at the center, if anything: each vector
                                                   flat by dtype, and each scalar as one number per chunk
                           arrays.safetensors      the named arrays, if there are any
                           manifest.json           lineage, counters, layout, rule, digests
    center/center-0.safetensors -> snapshot-000007/center-0.safetensors

Each chunk is locked only while it is copied, and training continues. For each chunk the manifest holds the applied
number of every remote worker at the time of the copy. From it a worker whose host restarts from the snapshot learns
which of its last contributions are included. For a worker that contributed nothing in the meantime, one number stands
for all chunks.

safetensors files are written array by array, so that no second copy of the center is needed in memory: 8 bytes of
length, a JSON header of names, dtypes, shapes and offsets, then the raw values. Exports may be HDF5 files.
"""

import copy
import functools
import hashlib
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from maniple.center.arrays import ARRAY_FILE, DAMAGED, GivenValues
from maniple.center.shared import SharedCenter
from maniple.center.staging import AppliedTable, by_worker
from maniple.contracts import Array, Entry
from maniple.errors import InvalidArgument
from maniple.layout import Layout, Part
from maniple.memory.segment import CenterFile, Segment
from maniple.record.folder import point, sync_folder, write_json

assert sys.byteorder == "little", "values are sent and saved in the byte order of memory"

HDF5 = (".h5", ".hdf5")
_NAME = re.compile(r"snapshot-(\d{6,})")
_MANIFEST = "manifest.json"
_STATE_SUFFIX = ".state.safetensors"
_HDF5_NAME = "name"  # attribute with the array's name, where it cannot be the path of the dataset
_DTYPES = {
    "float32": "F32",
    "float64": "F64",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
Read = Callable[[int], Array]


class SavedCenter(msgspec.Struct):
    """One center in a snapshot."""

    name: str  # of its file in shared memory
    file: str
    table: str
    digest: str
    note: str
    versions: list[int]
    torn: list[str]
    gate: str = ""  # without the norms that it has seen


class Manifest(msgspec.Struct):
    """The contents of manifest.json."""

    number: int
    lineage: str
    saved: float
    restored: int
    updates: int
    centers: list[SavedCenter]
    files: dict[str, tuple[int, str]]  # size and SHA-256
    applied: dict[str, dict[str, list[int]]]  # worker -> center -> applied number per chunk
    versions: dict[str, str]
    extra: dict[str, msgspec.Raw] = {}  # what other components store beside the center
    words: dict[str, int] = {}  # worker -> applied number for all chunks; the larger of this and `applied` holds
    forgotten: int = 0  # workers whose applied numbers are not known any more
    left_out: dict[str, str] = {}  # damaged files of named arrays, and what is wrong with them


class ClosedArray:
    """A named array that is opened only while it is read: there may be more than files that a process may open."""

    def __init__(self, segment: Segment, path: Path, center: SharedCenter) -> None:
        self._segment, self._path = segment, path
        self.name, self.note, self.layout, self.versions = center.name, center.note, center.layout, center.versions

    def read(self, k: int, under_lock: Callable[[], None] = lambda: None) -> Array:
        """Return a copy of its value, as `SharedCenter.read` does."""
        center = SharedCenter.open(self._segment, self._path)
        assert center is not None  # it existed, and arrays are never removed
        with closing(center):
            value = center.read(k, under_lock)
            self.versions = center.versions
        return value


Readable = SharedCenter | ClosedArray


class EntryReader:
    """The entries of a center, read in order from copies of its chunks.

    A chunk is copied once, and all its entries are taken from that copy, so that they include the same contributions.

    Args:
        read: returns a copy of chunk k.
    """

    def __init__(self, layout: Layout, read: Callable[[int], Array]) -> None:
        self._layout, self._read = layout, read
        self._parts: dict[int, list[tuple[int, Part]]] = {}  # by entry: the chunks that have a part of it
        for k, chunk in enumerate(layout.chunks):
            for part in chunk.parts:
                self._parts.setdefault(part.entry, []).append((k, part))
        self._newest: dict[str, tuple[int, Array]] = {}  # by dtype: entries of one dtype are in the order of its chunks

    def read(self, i: int) -> Array:
        """Entry i, in its shape."""
        dtype, start, stop = self._layout.places[i]
        parts = self._parts[i]
        value = np.empty(stop - start, dtype) if len(parts) > 1 else np.empty(0, dtype)
        for k, part in parts:
            known, copy = self._newest.get(dtype, (-1, value))
            if known != k:
                copy = self._read(k)
                self._newest[dtype] = k, copy
            if part is self._layout.chunks[k].parts[-1]:
                del self._newest[dtype]  # no entry needs it any more: thousands of arrays must not be copied at once
            if len(parts) == 1:
                value = copy[part.in_chunk]
            else:
                value[part.in_entry] = copy[part.in_chunk]
        return value.reshape(self._layout.entries[i].shape)


def entry_readers(centers: Sequence[Readable], read: Callable[[Readable, int], Array]) -> list[Callable[[], Array]]:
    """One function per entry of all centers, which reads it; to be called in order. `read` copies a chunk."""
    readers = [(EntryReader(one.layout, functools.partial(read, one)), len(one.layout.entries)) for one in centers]
    return [functools.partial(reader.read, i) for reader, count in readers for i in range(count)]


@contextmanager
def readable(segment: Segment) -> Generator[tuple[list[Readable], dict[str, str]]]:
    """All centers and named arrays of `segment`, and what is wrong with damaged arrays, which are left out."""
    found: list[Readable] = []
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        for path in segment.centers():
            is_array = path.name.startswith(ARRAY_FILE)
            try:
                center = SharedCenter.open(segment, path)
            except DAMAGED as error:
                if not is_array:
                    raise
                left_out[path.name] = str(error)
                continue
            if center is None:
                continue
            if is_array:
                found.append(ClosedArray(segment, path, center))
                center.close()
            else:
                found.append(stack.enter_context(closing(center)))
        yield found, left_out


def write_snapshot(
    segment: Segment,
    folder: Path,
    *,
    lineage: str,
    restored: int,
    versions: dict[str, str],
    applied: dict[str, dict[str, list[int]]] | None = None,
    words: dict[str, int] | None = None,
    forgotten: int = 0,
    extra: dict[str, msgspec.Raw] | None = None,
    name: str | None = None,
) -> Path | None:
    """Write all centers and named arrays of `segment` as the next snapshot in `folder`.

    Returns its path, or None if there is nothing to save yet.

    Args:
        applied, words, forgotten: from the manifest of the snapshot from which this center was restored. Workers that
            have not come back since then may still ask.
        name: replace the snapshot of this name, instead of adding a numbered one.
    """
    with readable(segment) as (centers, left_out):
        for file, reason in left_out.items():
            warnings.warn(f"the named array in {file} is damaged and left out of the snapshot: {reason}", stacklevel=2)
        if not centers:
            return None
        number = 0 if name else max((n for n, _ in snapshots(folder)), default=0) + 1
        manifest = Manifest(
            number, lineage, time.time(), restored, 0, [], {}, copy.deepcopy(applied or {}), versions, extra or {}
        )
        manifest.left_out = left_out
        target = folder / (name or f"snapshot-{number:06d}")
        temporary = folder / f".{target.name}.{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            progress = _Progress(AppliedTable(segment.path))
            groups: dict[str, list[Readable]] = {}
            for center in centers:  # models first, each in its own file
                file = center.name if center.name.startswith("center-") else "arrays"
                groups.setdefault(f"{file}.safetensors", []).append(center)
            for file, group in sorted(groups.items(), key=lambda item: item[0] == "arrays.safetensors"):
                _write_group(progress, group, temporary / file, manifest)
            progress.write_to(manifest, words or {}, forgotten)
            manifest.updates = max(max(saved.versions, default=0) for saved in manifest.centers) // 2
            write_json(temporary / _MANIFEST, manifest)
            if name:
                shutil.rmtree(target, ignore_errors=True)
            temporary.rename(target)
            sync_folder(folder)  # before older snapshots are removed
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    for file in manifest.files if name is None else ():
        point(folder / file, Path(target.name) / file)
    return target


def snapshots(folder: Path) -> list[tuple[int, Path]]:
    """Numbers and paths of the snapshots in `folder`, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("snapshot-*") if (match := _NAME.fullmatch(path.name))]
    return sorted(found)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` snapshots. Damaged ones do not count."""
    there = [path for _, path in snapshots(folder)]
    whole = [path for path in there if _looks_whole(path)]
    for path in there[: there.index(whole[-keep])] if len(whole) > keep else []:
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".snapshot-*"):  # left by a host that was killed while writing
        shutil.rmtree(path, ignore_errors=True)


def _looks_whole(path: Path) -> bool:
    """Whether all files exist and have the right sizes. Their contents are not checked."""
    try:
        manifest = _read_manifest(path)
        return all((path / file).stat().st_size == size for file, (size, _) in manifest.files.items())
    except (OSError, msgspec.DecodeError):
        return False


def check_snapshot(path: Path, lineage: str) -> Manifest:
    """Return the manifest of a snapshot that is intact and of this lineage; else raise InvalidArgument."""
    try:
        manifest = _read_manifest(path)
    except OSError as error:
        raise InvalidArgument(f"{path.name} has no manifest ({error.strerror}).") from None
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"{path.name} has a manifest that cannot be read ({error}).") from None
    if manifest.lineage != lineage:
        raise InvalidArgument(f"{path.name} is of lineage {manifest.lineage}, but the run is of {lineage}.")
    for file, (size, digest) in manifest.files.items():
        there = (path / file).stat().st_size if (path / file).is_file() else None
        if there is None:
            raise InvalidArgument(f"{path.name} lacks {file}.")
        if there != size:
            raise InvalidArgument(f"{path.name} is truncated: {file} has {there} bytes of {size}.")
        with (path / file).open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != digest:
            raise InvalidArgument(f"{path.name} is damaged: the checksum of {file} differs.")
    return manifest


def newest_snapshot(folder: Path, lineage: str) -> tuple[Path, Manifest, list[str]]:
    """Return the newest intact snapshot, its manifest, and what is wrong with each newer one."""
    reasons: list[str] = []
    for _, path in reversed(snapshots(folder)):
        try:
            return path, check_snapshot(path, lineage), reasons
        except InvalidArgument as error:
            reasons.append(str(error))
    found = " ".join(reasons) or "There is none."
    raise InvalidArgument(f"no snapshot in {folder} can be used. {found} Start a new run instead.")


def _read_manifest(path: Path) -> Manifest:
    return msgspec.json.decode((path / _MANIFEST).read_bytes(), type=Manifest)


def restore(segment: Segment, path: Path, manifest: Manifest) -> None:
    """Create the centers of a checked snapshot in `segment`."""
    layouts = [Layout.from_table(saved.table.encode()) for saved in manifest.centers]
    for file in dict.fromkeys(saved.file for saved in manifest.centers):
        group = [i for i, saved in enumerate(manifest.centers) if saved.file == file]
        entries = [entry for i in group for entry in layouts[i].entries]
        dtypes = [dtype for i in group for dtype, _, _ in layouts[i].places]
        values = _read_tensors(path / file, entries, dtypes)
        for i in group:
            saved = manifest.centers[i]
            model = GivenValues(layouts[i].entries, lambda _, values=values: next(values))
            state = layouts[i].state
            center, _ = SharedCenter.open_or_create(
                segment, saved.name, model, rank=-1, note=saved.note, state=state, gate=saved.gate or None
            )
            CenterFile(segment.path / saved.name).let_workers_decide()
            with closing(center):
                if any(state):
                    _restore_state(center, (path / file).with_suffix(_STATE_SUFFIX))
                center.restore_versions(saved.versions)


class _Progress:
    """The applied numbers of remote workers, as they were when each chunk was copied."""

    def __init__(self, table: AppliedTable) -> None:
        self._table = table
        self._first: Array | None = None
        self._copies: list[tuple[str, int, dict[str, int]]] = []  # center, chunk, numbers that differ from _first

    def read(self, center: Readable, k: int, state: "_StateFile | None" = None) -> Array:
        """Copy chunk k, and the applied numbers and the rule's state of it under its lock."""
        seen: list[Array] = []

        def under_lock() -> None:
            seen.append(self._table.rows())
            if state is not None:
                state.copy(k)

        value = center.read(k, under_lock)
        if state is not None:
            state.write(k)
        (rows,) = seen
        if self._first is None:
            self._first = rows
        known = rows[: len(self._first)]
        is_same = (known["applied"] == self._first["applied"]) & (known["name"] == self._first["name"])
        changed = np.concatenate([known[~is_same], rows[len(self._first) :]])
        self._copies.append((center.name, k, by_worker(changed)))
        return value

    def write_to(self, manifest: Manifest, words: dict[str, int], forgotten: int) -> None:
        """Store the numbers in the manifest: per chunk for workers that contributed during the snapshot."""
        first = {} if self._first is None else by_worker(self._first)
        active = {worker for _, _, numbers in self._copies for worker in numbers}
        for center, k, numbers in self._copies if active else ():
            for worker in active:
                known = manifest.applied.setdefault(worker, {}).setdefault(center, [])
                known += [0] * (k + 1 - len(known))
                known[k] = max(known[k], numbers.get(worker, first.get(worker, 0)))
        idle = {worker: number for worker, number in first.items() if worker not in active}
        manifest.words = words | {worker: max(number, words.get(worker, 0)) for worker, number in idle.items()}
        manifest.forgotten = forgotten + self._table.forgotten


def _write_group(progress: _Progress, centers: list[Readable], path: Path, manifest: Manifest) -> None:
    entries = [entry for center in centers for entry in center.layout.entries]
    dtypes = [dtype for center in centers for dtype, _, _ in center.layout.places]
    states = {
        center.name: _StateFile(path.with_suffix(_STATE_SUFFIX), center)
        for center in centers
        if isinstance(center, SharedCenter) and any(center.layout.state)
    }
    readers = entry_readers(centers, lambda center, k: progress.read(center, k, states.get(center.name)))
    digest = write_tensors(path, entries, dtypes, lambda i: readers[i]())
    manifest.files[path.name] = (path.stat().st_size, digest)
    for state in states.values():
        manifest.files[state.path.name] = state.close()
    for center in centers:
        versions = center.versions
        layout = center.layout
        torn = [name for k, version in enumerate(versions) if version & 1 for name in layout.names_in(k)]
        gate = center.gate.agreement if isinstance(center, SharedCenter) and center.gate is not None else ""
        manifest.centers.append(
            SavedCenter(center.name, path.name, layout.table.decode(), layout.digest, center.note, versions, torn, gate)
        )


class _StateFile:
    """The state that a rule keeps at one center, written chunk by chunk while the parameters are written.

    The values of a chunk are copied under the same lock as its parameters, so that they belong together.
    """

    def __init__(self, path: Path, center: SharedCenter) -> None:
        self.path, self._center, self._copy = path, center, dict[str, Array]()
        arrays = center.state.arrays()
        entries = [Entry(name, value.shape, str(value.dtype)) for name, value in arrays.items()]
        header = _header(entries, [entry.dtype for entry in entries])
        ends = np.cumsum([value.nbytes for value in arrays.values()])
        begins = [len(header) + int(end) - value.nbytes for end, value in zip(ends, arrays.values(), strict=True)]
        self._begins = dict(zip(arrays, begins, strict=True))
        self._file = path.open("wb")
        self._file.write(header)

    def copy(self, k: int) -> None:
        """Copy the state of chunk k, whose lock is held."""
        self._copy = {name: value.copy() for name, value in self._center.state.chunks[k].items()}

    def write(self, k: int) -> None:
        """Write the copy to its place."""
        chunk = self._center.layout.chunks[k]
        for name, value in self._copy.items():
            is_vector = name in self._center.layout.state.vectors
            begin = self._begins[f"{name}/{chunk.dtype}" if is_vector else name]
            self._file.seek(begin + (chunk.start if is_vector else k) * value.itemsize)
            self._file.write(value.view(np.uint8).data)

    def close(self) -> tuple[int, str]:
        """Sync the file; return its size and SHA-256."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        with self.path.open("rb") as written:
            return self.path.stat().st_size, hashlib.file_digest(written, "sha256").hexdigest()


def _restore_state(center: SharedCenter, path: Path) -> None:
    """Set the rule's state of a new center to that in a checked snapshot."""
    arrays = read_arrays(path)
    for name, values in center.state.scalars.items():
        if len(arrays[name]) != len(values):  # of a maniple that cut other chunks
            raise InvalidArgument(
                f"{path} has {len(arrays[name])} numbers {name!r}, one per chunk, and this version of maniple makes "
                f"{len(values)} chunks. Continue the run with the version that it was started with."
            )
    center.state.load(arrays)


def _header(entries: Sequence[Entry], dtypes: Sequence[str]) -> bytes:
    """The first bytes of a safetensors file with these arrays."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry, dtype in zip(entries, dtypes, strict=True):
        shape, real = list(entry.shape), dtype
        if dtype.startswith("complex"):
            shape, real = [*shape, 2], f"float{np.dtype(dtype).itemsize * 4}"
        start, end = end, end + entry.size * np.dtype(dtype).itemsize
        header[entry.name] = {"dtype": _DTYPES[real], "shape": shape, "data_offsets": [start, end]}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_tensors(path: Path, entries: Sequence[Entry], dtypes: Sequence[str], read: Read) -> str:
    """Write `read(i)` for each entry to the safetensors file `path`, and sync it; return its SHA-256.

    Complex numbers are written as pairs of real numbers, in a last axis of size 2.
    """
    digest = hashlib.sha256()
    with path.open("wb") as file:

        def write(data: bytes | memoryview) -> None:
            digest.update(data)
            file.write(data)

        write(_header(entries, dtypes))
        for i in range(len(entries)):
            write(np.ascontiguousarray(read(i)).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_hdf5(path: Path, entries: Sequence[Entry], read: Read) -> None:
    """Write `read(i)` for each entry to the HDF5 file `path`, and sync it.

    Names are paths in HDF5. A name that is not a valid path ("a//b"), or that another needs as a group ("a" beside
    "a/b"), is stored as an attribute of a dataset with another path.
    """
    h5py = _h5py(path)
    with h5py.File(path, "w") as file:
        for i, (entry, path_in_file) in enumerate(zip(entries, _hdf5_paths([e.name for e in entries]), strict=True)):
            made = file.create_dataset(path_in_file, data=read(i).reshape(entry.shape))
            if path_in_file != entry.name:
                made.attrs[_HDF5_NAME] = entry.name
    with path.open("rb") as written:
        os.fsync(written.fileno())


def _hdf5_paths(names: Sequence[str]) -> list[str]:
    """Paths in an HDF5 file for arrays with these names: distinct, and the name itself where possible."""
    groups = {name[:k] for name in names for k, letter in enumerate(name) if letter == "/"}
    plain = {name for name in names if name not in groups and all(part not in ("", ".") for part in name.split("/"))}
    paths: list[str] = []
    for name in names:
        path_in_file = name
        if name not in plain:
            path_in_file = name.replace("%", "%25").replace("/", "%2F").replace(".", "%2E") or "%"
            while path_in_file in plain or path_in_file in groups or path_in_file in paths:
                path_in_file += "%"
        paths.append(path_in_file)
    return paths


def read_arrays(path: Path) -> dict[str, Array]:
    """Read all arrays of a user's safetensors or HDF5 file."""
    if not path.is_file():
        raise InvalidArgument(f"there is no file {str(path)!r}. Give a .safetensors or .h5 file.")
    if path.suffix not in HDF5:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise InvalidArgument(f"{path} is not a complete safetensors file: {error}.") from None
    h5py = _h5py(path)
    found: dict[str, Array] = {}

    def collect(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[str(item.attrs.get(_HDF5_NAME, name))] = np.asarray(item)

    with h5py.File(path, "r") as file:
        file.visititems(collect)
    return found


def _read_tensors(path: Path, entries: Sequence[Entry], dtypes: Sequence[str]) -> Iterator[Array]:
    """Yield the flat values of a file that `write_tensors` has written, in order."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        for entry, dtype in zip(entries, dtypes, strict=True):
            yield np.ascontiguousarray(file.get_tensor(entry.name)).reshape(-1).view(dtype)


def _h5py(path: Path) -> Any:
    try:
        import h5py
    except ImportError:
        raise InvalidArgument(
            f"{path.name} is an HDF5 file, and h5py is not installed. `pip install 'maniple[hdf5]'`, or use "
            ".safetensors."
        ) from None
    return h5py
