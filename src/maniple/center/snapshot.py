"""Snapshots: all centers and named arrays of a run at one time, in a folder that appears whole or not at all.

    center/snapshot-000007/center-0.safetensors    the parameters of the first `share()`
                           arrays.safetensors      the named arrays, if there are any
                           manifest.json           lineage, counters, layout, rule, digests
    center/center-0.safetensors -> snapshot-000007/center-0.safetensors

Each parameter is locked for the time of its copy only, and training goes on meanwhile. The manifest holds, for
each parameter, how far every remote worker's contributions had come in that very copy: by this a worker whose
host begins again from the snapshot learns which of its last contributions are in it. Of a worker that contributed
nothing meanwhile, one number tells that for all parameters.
"""

import copy
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from maniple.center.arrays import ARRAY_FILE, DAMAGED
from maniple.center.segment import Segment
from maniple.center.shared import Shared
from maniple.center.tensors import digest_of, read_tensors, write_tensors
from maniple.center.words import Looker, named
from maniple.contracts import Array, Entry
from maniple.errors import InvalidArgument
from maniple.layout import Layout
from maniple.record.folder import point, sync_folder, write_json

_NAME = re.compile(r"snapshot-(\d{6,})")
_MANIFEST = "manifest.json"


class Saved(msgspec.Struct):
    """One center in a snapshot."""

    name: str  # its file in shared memory
    file: str
    table: str
    digest: str
    note: str
    versions: list[int]
    torn: list[str]


class Manifest(msgspec.Struct):
    """What is known of a snapshot."""

    number: int
    lineage: str
    saved: float
    restored: int
    updates: int
    centers: list[Saved]
    files: dict[str, tuple[int, str]]  # size and SHA-256
    applied: dict[str, dict[str, list[int]]]
    versions: dict[str, str]
    extra: dict[str, msgspec.Raw] = {}  # what others want to find again beside the center
    words: dict[str, int] = {}  # of workers that are not in `applied`, or to be taken together with what is said there
    forgotten: int = 0  # workers of which nothing is known any more
    left_out: dict[str, str] = {}  # files of named arrays that are damaged, and how


class Readable(Protocol):
    """A center that can be saved."""

    @property
    def name(self) -> str: ...
    @property
    def note(self) -> str: ...
    @property
    def versions(self) -> list[int]: ...
    @property
    def layout(self) -> Layout: ...
    def read(self, i: int, meanwhile: Callable[[], None] | None = None) -> Array: ...


def write_snapshot(segment: Segment, folder: Path, **settings: Any) -> Path | None:
    """Write all centers and named arrays of `segment` to `folder`, as `write_centers` does."""
    with readable(segment) as (centers, left_out):
        return write_centers(centers, folder, under_way=Looker(segment.path), left_out=left_out, **settings)


@contextmanager
def readable(segment: Segment) -> Generator[tuple[list[Readable], dict[str, str]]]:
    """All centers and named arrays of `segment`, and why those that are damaged are not among them.

    Named arrays are opened only while they are read: there may be more of them than files that a process may open.
    """
    found: list[Readable] = []
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        for path in segment.centers():
            is_array = path.name.startswith(ARRAY_FILE)
            try:
                center = Shared.open(segment, path)
            except DAMAGED as error:
                if not is_array:
                    raise
                left_out[path.name] = str(error)
                continue
            if center is None:
                continue
            if is_array:
                found.append(_Array(segment, path, center))
                center.close()
            else:
                found.append(stack.enter_context(closing(center)))
        yield found, left_out


class _Array:
    """A named array, open only while it is read."""

    def __init__(self, segment: Segment, path: Path, center: Shared) -> None:
        self._segment, self._path = segment, path
        self.name, self.note, self.layout, self.versions = center.name, center.note, center.layout, center.versions

    def read(self, i: int, meanwhile: Callable[[], None] | None = None) -> Array:
        center = Shared.open(self._segment, self._path)
        assert center is not None  # it was there, and stays
        with closing(center):
            value = center.read(i, meanwhile)
            self.versions = center.versions
        return value


def write_centers(
    centers: Sequence[Readable],
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
    under_way: Looker | None = None,
    left_out: dict[str, str] | None = None,
) -> Path | None:
    """Write the next snapshot to `folder`; None if there is nothing to save yet.

    `applied`, `words` and `forgotten` are what the snapshot that this center was restored from has told: workers that
    were away since then may still ask. `under_way` tells how far each remote worker is; `left_out` are damaged arrays.
    A snapshot with a `name` stands apart from the others and replaces one of that name.
    """
    for file, reason in (left_out or {}).items():
        warnings.warn(f"the named array in {file} is damaged, and not in the snapshot: {reason}", stacklevel=2)
    if not centers:
        return None
    number = 0 if name else max((n for n, _ in snapshots(folder)), default=0) + 1
    target = folder / (name or f"snapshot-{number:06d}")
    beside = folder / f".{target.name}.{os.getpid()}"
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        manifest = Manifest(
            number, lineage, time.time(), restored, 0, [], {}, copy.deepcopy(applied or {}), versions, extra or {}
        )
        manifest.left_out = left_out or {}
        progress = _Progress(under_way)
        models = [center for center in centers if center.name.startswith("center-")]
        arrays = [center for center in centers if not center.name.startswith("center-")]
        for group, file in [
            *(([model], f"{model.name}.safetensors") for model in models),
            (arrays, "arrays.safetensors"),
        ]:
            if group:
                _write_group(progress, group, beside / file, manifest)
        progress.write_to(manifest, words or {}, forgotten)
        manifest.updates = max(max(saved.versions, default=0) for saved in manifest.centers) // 2
        write_json(beside / _MANIFEST, manifest)
        if name:
            shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
        sync_folder(folder)  # before anybody removes an older one
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    for file in manifest.files if name is None else ():
        point(folder / file, Path(target.name) / file)
    return target


def snapshots(folder: Path) -> list[tuple[int, Path]]:
    """The snapshots in `folder`, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("snapshot-*") if (match := _NAME.fullmatch(path.name))]
    return sorted(found)


def prune(folder: Path, keep: int) -> None:
    """Remove what is older than the newest `keep` snapshots; a damaged one does not count as one of them."""
    there = [path for _, path in snapshots(folder)]
    whole = [path for path in there if _looks_whole(path)]
    for path in there[: there.index(whole[-keep])] if len(whole) > keep else []:
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".snapshot-*"):  # of a host that was killed while writing it
        shutil.rmtree(path, ignore_errors=True)


def _looks_whole(path: Path) -> bool:
    """All files are there and have their sizes; their bytes are not read."""
    try:
        manifest = msgspec.json.decode((path / _MANIFEST).read_bytes(), type=Manifest)
        return all((path / file).stat().st_size == size for file, (size, _) in manifest.files.items())
    except (OSError, msgspec.DecodeError):
        return False


def check_snapshot(path: Path, lineage: str) -> Manifest:
    """The manifest of a snapshot that is whole and of this lineage; else InvalidArgument tells the reason."""
    try:
        manifest = msgspec.json.decode((path / _MANIFEST).read_bytes(), type=Manifest)
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
        if digest_of(path / file) != digest:
            raise InvalidArgument(f"{path.name} is damaged: {file} has not the bytes that were written.")
    return manifest


def restore(segment: Segment, path: Path, manifest: Manifest) -> None:
    """Make the centers of a checked snapshot in `segment`."""
    layouts = [Layout.from_table(saved.table.encode()) for saved in manifest.centers]
    for file in manifest.files:
        group = [i for i, saved in enumerate(manifest.centers) if saved.file == file]
        entries = [entry for i in group for entry in layouts[i].entries]
        dtypes = [dtype for i in group for dtype, _, _ in layouts[i].places]
        values = read_tensors(path / file, entries, dtypes)
        for i in group:
            saved = manifest.centers[i]
            model = _Values(layouts[i], values)
            center, _ = Shared.open_or_create(segment, saved.name, model, rank=-1, note=saved.note)
            center.settle(saved.versions)
            center.close()


class _Values:
    """Saved values as a model."""

    def __init__(self, layout: Layout, values: Iterator[Array]) -> None:
        self.entries: tuple[Entry, ...] = layout.entries
        self._values = values

    def begin(self) -> None:
        pass

    def array(self, i: int) -> Array:
        del i
        return next(self._values)

    def commit(self, i: int) -> None:
        del i


class _Progress:
    """How far each remote worker is while the parameters are copied one after the other."""

    def __init__(self, look: Looker | None) -> None:
        self._look = look
        self._first: Array | None = None
        self._copies: list[tuple[str, int, dict[str, int]]] = []  # center, parameter, words that differ from the first

    def read(self, center: Readable, i: int) -> Array:
        """A copy of parameter i. Nobody can write it while the words are read."""
        look = self._look
        if look is None:
            return center.read(i)
        seen: list[Array] = []
        value = center.read(i, lambda: seen.append(look()))
        rows = seen[0]
        if self._first is None:
            self._first = rows
        self._copies.append((center.name, i, self._moved(rows)))
        return value

    def write_to(self, manifest: Manifest, words: dict[str, int], forgotten: int) -> None:
        """Note it all."""
        first = {} if self._first is None else named(self._first)
        moving = {worker for _, _, words in self._copies for worker in words}
        for center, i, words_then in self._copies if moving else ():
            for worker in moving:
                known = manifest.applied.setdefault(worker, {}).setdefault(center, [])
                known += [0] * (i + 1 - len(known))
                known[i] = max(known[i], words_then.get(worker, first.get(worker, 0)))
        unmoved = {worker: word for worker, word in first.items() if worker not in moving}
        manifest.words = words | {worker: max(word, words.get(worker, 0)) for worker, word in unmoved.items()}
        manifest.forgotten = forgotten + (0 if self._look is None else self._look.forgotten)

    def _moved(self, rows: Array) -> dict[str, int]:
        assert self._first is not None
        known = rows[: len(self._first)]
        same = (known["word"] == self._first["word"]) & (known["name"] == self._first["name"])
        changed = np.concatenate([known[~same], rows[len(self._first) :]])
        return named(changed) if len(changed) else {}


def _write_group(progress: _Progress, centers: list[Readable], path: Path, manifest: Manifest) -> None:
    parameters = [(center, i) for center in centers for i in range(len(center.layout.entries))]
    entries = [center.layout.entries[i] for center, i in parameters]
    dtypes = [center.layout.places[i][0] for center, i in parameters]

    digest = write_tensors(path, entries, dtypes, lambda k: progress.read(*parameters[k]))
    manifest.files[path.name] = (path.stat().st_size, digest)
    for center in centers:
        versions = center.versions
        torn = [e.name for e, version in zip(center.layout.entries, versions, strict=True) if version & 1]
        layout = center.layout
        manifest.centers.append(
            Saved(center.name, path.name, layout.table.decode(), layout.digest, center.note, versions, torn)
        )


def newest_snapshot(folder: Path, lineage: str) -> tuple[Path, Manifest, list[str]]:
    """The newest snapshot that is whole, and why each newer one is not."""
    reasons: list[str] = []
    for _, path in reversed(snapshots(folder)):
        try:
            return path, check_snapshot(path, lineage), reasons
        except InvalidArgument as error:
            reasons.append(str(error))
    told = " ".join(reasons) or "There is none."
    raise InvalidArgument(f"no snapshot in {folder} can be used. {told} Start a new run instead.")
