"""The layout of a model: where each named array lies in one flat vector per dtype, and a digest of that table.

    entries   w (2, 3) float32 | b (3,) float32 | s (1,) float64
    float32   [w w w w w w b b b]            float64   [s]
    chunks    [    0    ][   1  ]                      [2]

The vectors are cut into chunks, the unit of everything that an exchange does: locks, versions, messages and
compression. Small entries share a chunk and large ones have several, so an exchange costs per byte, not per entry.

Half-precision entries (float16, bfloat16) are float32 in the flat vector: rounding a center to half precision would
lose small contributions.
"""

import functools
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np

from maniple.contracts import NO_STATE, Array, Entry, FlatModel, State, StateNames
from maniple.errors import InvalidArgument, LayoutMismatch

# A chunk takes a few hundred microseconds: long against the cost of its lock and calls (about 10), short enough that
# workers seldom wait for each other's, and that both directions of a connection are busy.
CHUNK_BYTES = 2 << 20
_FLAT_DTYPE = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}
_ARRAY_DTYPES = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)} | {"complex64", "complex128"}
_RESERVED = "__metadata__"  # the header key of metadata in safetensors files
_MAX_ELEMENTS = 1 << 48  # more than fits into memory; sizes in bytes stay within int64
_MAX_AXES = 32  # the limit of HDF5 and of older NumPy; safetensors files add one for complex numbers
_MAX_NAME = 4096  # characters; names are sent in the headers of messages
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_MAX_VALUE = {"float16": np.float32(65504), "bfloat16": np.float32(2.0**127 * (2 - 2.0**-7))}


@dataclass(frozen=True, slots=True)
class Part:
    """The elements of one entry that lie in one chunk: `start` to `stop` of the entry, from `offset` of the chunk."""

    entry: int
    start: int
    stop: int
    offset: int

    @property
    def in_chunk(self) -> slice:
        """Where the elements lie in the chunk."""
        return slice(self.offset, self.offset + self.stop - self.start)

    @property
    def in_entry(self) -> slice:
        """Which elements of the entry they are."""
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of one flat vector, and the entries in it."""

    dtype: str
    start: int
    stop: int
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def size_bytes(self) -> int:
        """The size in the center."""
        return self.size * np.dtype(self.dtype).itemsize


_Row = tuple[str, tuple[int, ...], str]


class _Table(msgspec.Struct):
    """The table of a layout with rule state. Without state, the table is the list of its entries alone."""

    entries: list[_Row]
    vectors: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()


class Layout:
    """The places of entries in flat vectors, the chunks of the vectors, and the rule's state beside them."""

    def __init__(
        self,
        entries: Sequence[Entry],
        *,
        is_numeric: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
        state: StateNames = NO_STATE,
    ) -> None:
        """`is_numeric` also admits integers and complex numbers: for named arrays, not for models.

        A `chunk_bytes` of 0 makes each entry one chunk, whatever its size. `state` names what the rule keeps at the
        center.
        """
        self.entries = tuple(entries)
        if not self.entries:
            raise InvalidArgument(
                "the model has no floating-point array to share (0 entries, at least 1 is needed). "
                "Pass the model that is trained, with its parameters already built."
            )
        self.sizes: dict[str, int] = {}
        self.places: list[tuple[str, int, int]] = []
        seen: set[str] = set()
        for entry in self.entries:
            if entry.name in seen:
                raise InvalidArgument(f"two arrays are named {entry.name!r}. Give each its own name.")
            seen.add(entry.name)
            _check(entry)
            dtype = entry.dtype if is_numeric and entry.dtype in _ARRAY_DTYPES else flat_dtype(entry)
            start = self.sizes.get(dtype, 0)
            self.places.append((dtype, start, start + entry.size))
            self.sizes[dtype] = start + entry.size
        self.size_bytes = sum(np.dtype(dtype).itemsize * size for dtype, size in self.sizes.items())
        self.state = state
        rows = [(e.name, e.shape, e.dtype) for e in self.entries]
        self.table = msgspec.json.encode(_Table(rows, *state) if any(state) else rows)
        self.digest = hashlib.sha256(self.table).hexdigest()
        self.chunk_bytes = chunk_bytes

    @classmethod
    def from_table(cls, table: bytes, *, chunk_bytes: int = CHUNK_BYTES) -> "Layout":
        """Decode the `table` of a layout in another process."""
        decoded = msgspec.json.decode(table, type=list[_Row] | _Table)
        found = decoded if isinstance(decoded, _Table) else _Table(decoded)
        state = StateNames(found.vectors, found.scalars)
        check_state_names(state)
        return cls([Entry(*row) for row in found.entries], is_numeric=True, chunk_bytes=chunk_bytes, state=state)

    def sizes_from(self, first: int) -> dict[str, int]:
        """The sizes of the entries from `first` on, by dtype: they are at the end of each vector."""
        sizes = dict.fromkeys(self.sizes, 0)
        for dtype, start, stop in self.places[first:]:
            sizes[dtype] += stop - start
        return sizes

    @functools.cached_property
    def chunks(self) -> list[Chunk]:
        """The chunks of all vectors, in the order of the vectors."""
        return [chunk for dtype in self.sizes for chunk in self._chunks_of(dtype)]

    def _chunks_of(self, dtype: str) -> Iterator[Chunk]:
        """Cut before an entry that does not fit into the chunk any more, and within entries larger than a chunk."""
        limit = max(1, self.chunk_bytes // np.dtype(dtype).itemsize)
        first, parts = 0, list[Part]()
        for i, (its_dtype, start, stop) in enumerate(self.places):
            if its_dtype != dtype:
                continue
            if parts and (stop - first > limit or not self.chunk_bytes):
                yield Chunk(dtype, first, start, tuple(parts))
                first, parts = start, []
            at = start
            while self.chunk_bytes and stop - first > limit:
                yield Chunk(dtype, first, first + limit, (Part(i, at - start, first + limit - start, 0),))
                first = at = first + limit
            parts.append(Part(i, at - start, stop - start, at - first))
        yield Chunk(dtype, first, self.sizes[dtype], tuple(parts))

    def runs(self, at_most_bytes: int) -> list[range]:
        """All chunks, in runs of consecutive ones with the same dtype of up to this size in all."""
        runs, size = list[range](), 0
        for k, chunk in enumerate(self.chunks):
            size += chunk.size_bytes
            if runs and size <= at_most_bytes and chunk.dtype == self.chunks[k - 1].dtype:
                runs[-1] = range(runs[-1].start, k + 1)
            else:
                runs.append(range(k, k + 1))
                size = chunk.size_bytes
        return runs

    def allocate(self) -> dict[str, Array]:
        """Return new flat vectors of zeros, one per dtype. Pages take no memory until they are written."""
        return {dtype: np.zeros(size, dtype) for dtype, size in self.sizes.items()}

    def views(self, flat: dict[str, Array]) -> list[Array]:
        """Return one view per entry into the flat vectors."""
        return [flat[dtype][start:stop] for dtype, start, stop in self.places]

    def chunk_views(self, flat: dict[str, Array]) -> list[Array]:
        """Return one view per chunk into the flat vectors."""
        return [flat[chunk.dtype][chunk.start : chunk.stop] for chunk in self.chunks]

    def run_view(self, flat: dict[str, Array], ks: range) -> Array:
        """Return one view of consecutive chunks with the same dtype into the flat vectors."""
        first, last = self.chunks[ks[0]], self.chunks[ks[-1]]
        return flat[first.dtype][first.start : last.stop]

    def record_bytes(self, k: int) -> int:
        """The size of a record: chunk k and the rule's state of it."""
        return (1 + len(self.state.vectors)) * self.chunks[k].size_bytes + 8 * len(self.state.scalars)

    def split_record(self, k: int, data: Array) -> tuple[Array, State]:
        """The chunk in the bytes of a record, and the rule's state of it."""
        chunk, end, parts = self.chunks[k], 0, list[Array]()
        for size_bytes, dtype in [(chunk.size_bytes, chunk.dtype)] * (1 + len(self.state.vectors)) + [
            (8, "float64")
        ] * len(self.state.scalars):
            start, end = end, end + size_bytes
            parts.append(data[start:end].view(dtype))
        return parts[0], dict(zip((*self.state.vectors, *self.state.scalars), parts[1:], strict=True))

    def join_record(self, value: Array, state: State) -> Array:
        """The bytes of a record."""
        names = (*self.state.vectors, *self.state.scalars)
        return np.concatenate([part.view(np.uint8) for part in (value, *(state[name] for name in names))])

    def names_in(self, k: int) -> list[str]:
        """The names of the entries in chunk k."""
        return [self.entries[part.entry].name for part in self.chunks[k].parts]

    def names_at(self, k: int, positions: Array) -> list[str]:
        """The names of the entries that have an element at one of these positions of chunk k."""
        parts = self.chunks[k].parts
        ends = [part.in_chunk.stop for part in parts]
        hit = sorted(set(np.searchsorted(ends, positions, side="right").tolist()))
        return [self.entries[parts[j].entry].name for j in hit]

    @functools.cached_property
    def half_chunks(self) -> frozenset[int]:
        """The chunks that have an entry which replicas keep in half precision."""
        return frozenset(k for k, c in enumerate(self.chunks) if any(self.is_half(part.entry) for part in c.parts))

    def round_chunk(self, k: int, value: Array) -> None:
        """Round the flat `value` of chunk k in place to what a replica can hold."""
        for part in self.chunks[k].parts:
            if self.is_half(part.entry):
                self.round(part.entry, value[part.in_chunk])

    def is_half(self, i: int) -> bool:
        """Whether replicas keep entry i in half precision, and the center in float32."""
        return self.entries[i].dtype != self.places[i][0]

    def round(self, i: int, value: Array) -> None:
        """Round the flat `value` of entry i in place to what a replica can hold."""
        largest = _MAX_VALUE.get(self.entries[i].dtype)
        if largest is not None:
            np.clip(value, -largest, largest, out=value)  # to the largest value instead of infinity
        if self.entries[i].dtype == "float16":
            value[:] = value.astype(np.float16)
        elif self.entries[i].dtype == "bfloat16":
            # Round to the upper 16 bits, to nearest and ties to even. Non-finite values stay.
            bits = value.view(np.uint32)
            rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) & np.uint32(0xFFFF0000)
            np.copyto(bits, rounded, where=np.isfinite(value))

    def require(self, theirs: "Layout", who: str) -> None:
        """Raise LayoutMismatch, naming the first difference, unless `theirs` is the same layout."""
        if self.digest == theirs.digest:
            return
        pairs = zip_longest(map(str, self.entries), map(str, theirs.entries), fillvalue="nothing")
        for i, (mine, other) in enumerate(pairs):
            if mine != other:
                raise LayoutMismatch(
                    f"this worker's parameter {i} is {mine}, but {who} has {other} there. "
                    "Every worker must build the same model: same names, shapes, dtypes and order. "
                    "Look for sizes that depend on the rank or on the worker's data."
                )
        raise LayoutMismatch(
            f"this worker's rule keeps {_listed(self.state)} at the center, but {who} has {_listed(theirs.state)}. "
            "Every worker must use the same rule, and a run is resumed with the rule that it was started with."
        )


class RuleState:
    """The vectors and scalars that a rule keeps, for each chunk and for each entry of a layout.

    Args:
        vectors: flat vectors by dtype, for each name.
        scalars: one number per chunk, for each name.
    """

    def __init__(self, layout: Layout, vectors: dict[str, dict[str, Array]], scalars: dict[str, Array]) -> None:
        self.vectors, self.scalars = vectors, scalars
        by_name = {name: layout.chunk_views(flat) for name, flat in vectors.items()}
        by_name |= {name: np.split(values, len(values)) for name, values in scalars.items()}
        self.chunks: list[State] = [
            {name: values[k] for name, values in by_name.items()} for k in range(len(layout.chunks))
        ]
        views = {name: layout.views(flat) for name, flat in vectors.items()}
        self.entries: list[State] = [
            {name: values[i] for name, values in views.items()} for i in range(len(layout.entries))
        ]

    @classmethod
    def zeros(cls, layout: Layout, names: StateNames) -> "RuleState":
        """New state, in which all numbers are 0."""
        vectors = {name: layout.allocate() for name in names.vectors}
        return cls(layout, vectors, {name: np.zeros(len(layout.chunks)) for name in names.scalars})

    def arrays(self) -> dict[str, Array]:
        """All arrays, by names for files."""
        vectors = {f"{name}/{dtype}": flat for name, one in self.vectors.items() for dtype, flat in one.items()}
        return vectors | self.scalars

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Take over what `arrays` returned in another process; InvalidArgument if it is of other names or sizes."""
        for name, value in self.arrays().items():
            if name not in arrays or arrays[name].shape != value.shape:
                found = f"of size {arrays[name].size}" if name in arrays else "missing"
                raise InvalidArgument(
                    f"the saved {name!r} of the rule is {found}, where {value.size} numbers are needed"
                )
            value[:] = arrays[name]


def check_state_names(*states: StateNames) -> None:
    """Raise InvalidArgument if a rule keeps two things by the same name, or one by a name that no file could have."""
    seen: set[str] = set()
    for name in (name for state in states for names in state for name in names):
        if name in seen or not re.fullmatch(r"\w{1,64}", name, re.ASCII):
            wrong = "is used twice" if name in seen else "is not made of up to 64 letters, digits and underscores"
            raise InvalidArgument(f"{name!r}, which names a part of a rule's state, {wrong}. Rename it.")
        seen.add(name)


def fragments_of(entries: Sequence[Entry], count: int) -> list[list[int]]:
    """Deal the layers of a model out to `count` fragments: layer j goes to fragment j modulo `count`.

    Entries belong to one layer if their names are the same up to the first number, as in `blocks.3.attn.weight`, or up
    to the last dot where there is none.
    """
    layers: dict[str, list[int]] = {}
    for i, entry in enumerate(entries):
        numbered = re.match(r"(.*?\.)?\d+(?=\.|$)", entry.name)
        layers.setdefault(numbered.group() if numbered else entry.name.rpartition(".")[0] or entry.name, []).append(i)
    if len(layers) < count:
        raise InvalidArgument(
            f"a model of {len(layers)} layers cannot be cut into {count} fragments: each needs a layer. Use "
            f"fragments={len(layers)} or less."
        )
    dealt: list[list[int]] = [[] for _ in range(count)]
    for j, its_entries in enumerate(layers.values()):
        dealt[j % count] += its_entries
    return [sorted(one) for one in dealt]


def _listed(state: StateNames) -> str:
    return ", ".join(repr(name) for name in (*state.vectors, *state.scalars)) or "nothing"


def _check(entry: Entry) -> None:
    """Raise InvalidArgument if an array of this name and shape cannot be created, saved and loaded."""
    if entry.name == _RESERVED or len(entry.name) > _MAX_NAME or _CONTROL.search(entry.name):
        letters = f" ({len(entry.name):,} characters)" if len(entry.name) > _MAX_NAME else ""
        raise InvalidArgument(
            f"{entry.name[:80]!r}{letters} cannot name an array. Names have up to {_MAX_NAME:,} characters and no "
            f"control characters, since files use them, and {_RESERVED!r} is reserved. Rename it."
        )
    axes = [size for size in entry.shape if size]
    # NumPy multiplies the axes that are not empty, even where another one is.
    if min(axes, default=0) < 0 or len(entry.shape) > _MAX_AXES or math.prod(axes) > _MAX_ELEMENTS:
        sizes = [f"{size}" if abs(size) < 1 << 64 else "more than 2**64" for size in entry.shape[: _MAX_AXES + 1]]
        more = ", ..." if len(sizes) < len(entry.shape) else ""
        raise InvalidArgument(
            f"{entry.name!r} cannot be shared: [{', '.join(sizes)}{more}] is no shape of an array. It may have up to "
            f"{_MAX_AXES} axes, none of negative size, and {_MAX_ELEMENTS:,} elements without counting empty axes. "
            "Reshape it."
        )


def fitted(entry: Entry, value: Array, dtype: str) -> Array:
    """Convert `value` to `dtype`, the center's dtype of `entry`; InvalidArgument if a value does not fit.

    Infinity and NaN pass. The center decides about them.
    """
    narrow = entry.dtype if entry.dtype == "float16" else dtype  # the center's float32 would hold more
    if np.can_cast(value.dtype, narrow, "safe"):
        return np.ascontiguousarray(value, dtype)
    is_integer = value.dtype.kind in "iu" and np.dtype(dtype).kind in "iu"
    if not is_integer and not np.can_cast(value.dtype, dtype, "same_kind"):
        raise InvalidArgument(f"{value.dtype} values cannot go into {entry} without loss. Convert them first.")
    if is_integer:
        limits = np.iinfo(dtype)
        bounds = f"{limits.min} to {limits.max}"
        unfit = value[(value < limits.min) | (value > limits.max)]
    else:
        bounds = f"magnitudes up to {float(np.finfo(narrow).max):.6g}"
        with np.errstate(over="ignore"):
            unfit = value[~np.isfinite(value.astype(narrow)) & np.isfinite(value)]
    if unfit.size:
        raise InvalidArgument(
            f"{unfit.flat[0]} does not fit into {entry}, which holds {bounds}. Scale the values, or create the array "
            "with a wider dtype."
        )
    return np.ascontiguousarray(value, dtype)


def described(model: FlatModel) -> dict[str, Any]:
    """What events record about a shared model."""
    layout = Layout(model.entries)
    return {"digest": layout.digest, "parameters": len(layout.entries), "bytes": layout.size_bytes}


def dtype_name(array: Any) -> str:
    """The dtype of a NumPy array or a torch tensor, by the name that both use."""
    return str(array.dtype).removeprefix("torch.")


def flat_dtype(entry: Entry) -> str:
    """The dtype of `entry` in the flat vector."""
    try:
        return _FLAT_DTYPE[entry.dtype]
    except KeyError:
        raise InvalidArgument(
            f"{entry} cannot be shared: its dtype is none of {', '.join(_FLAT_DTYPE)}. "
            "Leave it out of the shared model, or store it as float32."
        ) from None
