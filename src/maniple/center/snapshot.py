"""Snapshots: all centers and named arrays of a run at one time, in a folder that appears whole or not at all.

    center/snapshot-000007/center-0.safetensors    the parameters of the first `share()`
                           arrays.safetensors      the named arrays, if there are any
                           manifest.json           lineage, counters, layout, rule, digests
    center/center-0.safetensors -> snapshot-000007/center-0.safetensors

Each parameter is locked for the time of its copy only, and training goes on meanwhile. The manifest holds, for
each parameter, how far every remote worker's contributions had come in that very copy: by this a worker whose
host begins again from the snapshot learns which of its last contributions are in it.
"""

import copy
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from maniple.center.segment import Segment
from maniple.center.shared import Shared
from maniple.center.stage import words
from maniple.center.tensors import digest_of, read_tensors, write_tensors
from maniple.contracts import Array, Entry
from maniple.errors import InvalidArgument
from maniple.layout import Layout
from maniple.record.folder import point, write_json

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
    opened = (Shared.open(segment, path) for path in segment.centers())
    centers = [center for center in opened if center is not None]
    try:
        return write_centers(centers, folder, under_way=lambda: words(segment.path), **settings)
    finally:
        for center in centers:
            center.close()


def write_centers(
    centers: Sequence[Readable],
    folder: Path,
    *,
    lineage: str,
    restored: int,
    versions: dict[str, str],
    applied: dict[str, dict[str, list[int]]] | None = None,
    extra: dict[str, msgspec.Raw] | None = None,
    name: str | None = None,
    under_way: Callable[[], dict[str, int]] = dict[str, int],
) -> Path | None:
    """Write the next snapshot to `folder`; None if there is nothing to save yet.

    `applied` is what the snapshot that this center was restored from has told: workers that were away since then
    may still ask; `under_way` tells how far each remote worker is. A snapshot with a `name` stands apart from the
    others and replaces one of that name.
    """
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
        models = [center for center in centers if center.name.startswith("center-")]
        arrays = [center for center in centers if center not in models]
        for group, file in [
            *(([model], f"{model.name}.safetensors") for model in models),
            (arrays, "arrays.safetensors"),
        ]:
            if group:
                _write_group(under_way, group, beside / file, manifest)
        manifest.updates = max(max(saved.versions, default=0) for saved in manifest.centers) // 2
        write_json(beside / _MANIFEST, manifest)
        if name:
            shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
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


def _write_group(
    under_way: Callable[[], dict[str, int]], centers: list[Readable], path: Path, manifest: Manifest
) -> None:
    parameters = [(center, i) for center in centers for i in range(len(center.layout.entries))]
    entries = [center.layout.entries[i] for center, i in parameters]
    dtypes = [center.layout.places[i][0] for center, i in parameters]

    def read(k: int) -> Array:
        center, i = parameters[k]

        def note() -> None:
            for worker, word in under_way().items():
                known = manifest.applied.setdefault(worker, {}).setdefault(center.name, [])
                known += [0] * (i + 1 - len(known))
                known[i] = max(known[i], word)

        return center.read(i, note)

    digest = write_tensors(path, entries, dtypes, read)
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
