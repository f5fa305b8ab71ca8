"""The center over TCP, at the host: serves the data connection of one worker or client.

`CenterService` receives a value into the worker's staging file, locks the chunk, applies the operation
(`staging`) and sends the reply. Everything that arrives is checked before it is applied. Only the newest connection of
a worker may apply anything (`WorkerSessions`): what still arrives on an older one is void.
"""

import contextlib
import json
import math
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from maniple.center.arrays import ARRAY, GivenValues, array_names, center_file
from maniple.center.gate import Verdict
from maniple.center.gate_memory import gate_bytes
from maniple.center.memory_quota import MemoryQuota
from maniple.center.shared import LOCK_TIMEOUT_S, STUCK_S, SharedCenter, chunk_bytes, finite_parts
from maniple.center.staging import MAX_ITEMS, ROWS, Intent, StagingFile, StagingFiles, applied_number
from maniple.center.worker_sessions import Superseded, WorkerSession
from maniple.clock import Deadline
from maniple.contracts import Array
from maniple.errors import BadFrame, InvalidArgument, ManipleError, WaitedTooLong
from maniple.layout import Layout
from maniple.memory.segment import Segment, file_bytes
from maniple.rules.diloco import DELAYED_NESTEROV
from maniple.rules.kernels import numpy_kernels as blocks
from maniple.wire.codecs import CODECS, Codec, load_kernels_in_background
from maniple.wire.frames import NO_TIMEOUT_S, TIMEOUT_S, Stream
from maniple.wire.messages import (
    AppliedQuery,
    AppliedReply,
    ArrayList,
    ArraysSaved,
    CenterBusy,
    CenterOpened,
    ChunkValue,
    CreateCenter,
    ExchangeReply,
    ExchangeRequest,
    FindArray,
    Goodbye,
    ListArrays,
    Message,
    OpenCenter,
    ParameterValue,
    PullChunk,
    PullElements,
    PushElements,
    SaveArrays,
    refusal_of,
)

T = TypeVar("T")
_WITHOUT_PAYLOAD = (PullChunk, FindArray, ListArrays, SaveArrays)
_OPERATIONS = ("elastic", "blend", "compensated", "nesterov", "replace", "swap")
_ANSWERS = {"none": blocks.NOTHING, "value": blocks.VALUE, "move": blocks.MOVE}
_MAX_SEQUENCE = 1 << 38  # with the 24 bits of an item it fits into an int64
_MAX_TABLE_BYTES = 16 << 20
_MAX_ENTRIES = 100_000  # a table becomes Python objects of some hundred bytes per entry
_MAX_QUERIED = 1 << 20  # items of one AppliedQuery
_MIN_ELEMENTS = 1 << 16  # may be requested at once even of a smaller array, since positions may repeat
_MAX_OPEN = 32  # centers that one connection keeps open
_FILES_PER_CENTER = 2  # the locks and the mapping
_OPEN_SHARE = 4  # all connections together may use 1/4 of this process's file descriptors for centers


class WorkerLeft(ConnectionError):
    """The worker has sent `Goodbye`."""


class CenterService:
    """One worker's data connection, at the host."""

    def __init__(
        self,
        session: WorkerSession,
        segment: Segment,
        worker: str,
        *,
        rank: Callable[[], int],
        staging: StagingFiles,
        included: Callable[[str, str, int, int], bool],
        recalled: Callable[[str], bool],
        save: Callable[[str], str],
        quota: MemoryQuota,
    ) -> None:
        """Two functions describe the snapshot from which the center was restored.

        `included(worker, center, chunk, applied number)`: whether it contains that contribution;
        `recalled(worker)`: whether it knows that worker at all. `save` writes all values to a file of the run folder.
        """
        self._session, self._stream = session, session.stream
        self._abandoned = 0  # the sequence of an exchange of which an item was not applied: nor are later ones
        self._segment, self._worker, self._rank = segment, worker, rank
        self._included, self._recalled, self._save = included, recalled, save
        self._files, self._quota = staging, quota
        with session:
            self._staging = staging.open(worker, quota.take)
        self._centers: OrderedDict[str, SharedCenter] = OrderedDict()  # the least recently used first
        self._handlers: dict[type, Callable[[Any, int], None]] = {
            OpenCenter: self._open_center,
            ExchangeRequest: self._exchange,
            PullChunk: self._pull,
            AppliedQuery: self._query_applied,
            PullElements: self._pull_elements,
            PushElements: self._push_elements,
            FindArray: self._find_array,
            ListArrays: self._list_arrays,
            SaveArrays: self._save_arrays,
        }

    def serve(self) -> None:
        """Handle messages until the connection ends (ConnectionError) or an invalid one comes (BadFrame)."""
        try:
            while True:
                self._handle(*self._stream.receive())
        finally:
            self._handlers.clear()  # breaks the reference cycle, so that memory is freed at once
            while self._centers:
                self._close_oldest()
            with contextlib.suppress(Superseded), self._session:
                self._files.retire(self._worker, self._staging)
            self._staging.close()

    def _handle(self, message: Message, size: int) -> None:
        if isinstance(message, Goodbye):
            raise WorkerLeft("the worker has left")
        handler = self._handlers.get(type(message))
        if handler is None:
            raise BadFrame(f"{type(message).__name__} is not a request of a worker.")
        if isinstance(message, _WITHOUT_PAYLOAD):
            _check_size(size, 0)
        try:
            handler(message, size)
        except MemoryError:
            raise BadFrame(f"{type(message).__name__} asked for more memory than there is.") from None
        except ManipleError as error:
            if isinstance(error, BadFrame) or not isinstance(message, FindArray | PullChunk | SaveArrays):
                raise  # ends the connection: what follows in the stream relies on this request
            self._stream.send(refusal_of(error))

    # Exchanges

    def _exchange(self, message: ExchangeRequest, size: int) -> None:
        k = message.chunk
        center, array = self._chunk(message.center, k)
        codec = _checked_codec(message.codec, array)
        if message.answer not in _ANSWERS:
            raise BadFrame(f"{message.answer!r} is not a kind of answer.")
        if message.with_state:
            self._exchange_record(message, size, center)
            return
        _check_size(size, codec.size_bytes(array.size, array.itemsize))
        _check_operation(array, message.operation, message.a, message.b)
        if message.operation == "nesterov" and (center.layout.state != DELAYED_NESTEROV or message.n < 2):
            raise BadFrame("an outer step came for a center without its state, or with a buffer below 2.")
        self._finish_pending()
        with self._session:
            value = _receive_value(self._stream, self._staging, codec, array)

        def apply() -> tuple[Any, ...]:
            applied = self._next_applied(message.sequence, message.item)
            is_torn, version = center.is_torn(k), center.version(k)
            staleness = max(0, version - message.seen) // 2
            operation, b, verdict = message.operation, message.b, Verdict()
            is_clean, is_done = True, operation != "swap" or version == message.seen
            are_finite = operation not in {"swap", "replace"} or bool(np.isfinite(value).all())
            if operation == "swap" and not are_finite:
                is_clean = False
                self._staging.skip(applied)
            elif is_done:
                if operation == "compensated":
                    operation, b = "blend", b / (staleness + 1)
                if not are_finite:
                    value[:] = finite_parts(center.layout.chunks[k], value, array)
                intent = Intent(center.name, k, operation, message.a, b, applied, array.size)
                if center.gate is not None:
                    verdict = center.gate.adjust(intent, value, array, staleness)
                if operation == "nesterov":
                    is_clean = self._staging.commit_outer_step(center, intent, buffer=message.n)
                else:
                    is_clean = (
                        self._staging.commit(center, intent, value, answer=_ANSWERS[message.answer]) and are_finite
                    )
            live = self._segment.live
            reply = ExchangeReply(
                message.item, center.version(k), staleness, live, is_clean, is_torn, is_done, False, *verdict[:2]
            )
            return (reply,) if message.answer == "none" else (reply, _pack_in_place(CODECS[codec.for_values], value))

        self._apply_or_abandon(message, center, apply)

    def _apply_or_abandon(
        self, message: ExchangeRequest, center: SharedCenter, apply: Callable[[], tuple[Any, ...]]
    ) -> None:
        """Call `apply` under the chunk's lock and send what it returns, unless the chunk is stuck.

        Applied numbers count the items of an exchange without gaps, so the later ones are not applied either, and
        the worker sends them again as another exchange.
        """
        k = message.chunk

        def abandon(*, is_locked: bool) -> tuple[ExchangeReply]:
            self._abandoned = message.sequence
            live, version = self._segment.live, center.version(k)
            return (ExchangeReply(message.item, version, 0, live, True, False, False, is_locked),)

        if self._abandoned == message.sequence:
            self._stream.send(*abandon(is_locked=False))
        else:
            self._stream.send(*self._with_lock(center, k, apply, if_stuck=lambda: abandon(is_locked=True)))

    def _exchange_record(self, message: ExchangeRequest, size: int, center: SharedCenter) -> None:
        """Replace a chunk and the rule's state of it, unless a value is not finite or a swap comes too late."""
        k = message.chunk
        if message.operation not in {"swap", "replace"} or message.answer != "none":
            raise BadFrame(f"{message.operation!r} with the answer {message.answer!r} is not for the state of a rule.")
        _check_size(size, center.layout.record_bytes(k))
        self._finish_pending()
        with self._session:
            value = self._staging.reserve(size)
            self._stream.receive_into(value)

        def apply() -> tuple[ExchangeReply]:
            applied = self._next_applied(message.sequence, message.item)
            is_torn, version = center.is_torn(k), center.version(k)
            is_done = message.operation == "replace" or version == message.seen
            new, state = center.layout.split_record(k, value)
            is_clean = all(bool(np.isfinite(part).all()) for part in (new, *state.values()))
            if not is_clean:
                self._staging.skip(applied)
            elif is_done:
                intent = Intent(center.name, k, "replace", 0, 0, applied, new.size, with_state=True)
                self._staging.commit_record(center, intent, value)
            staleness = max(0, version - message.seen) // 2
            live = self._segment.live
            return (ExchangeReply(message.item, center.version(k), staleness, live, is_clean, is_torn, is_done),)

        self._apply_or_abandon(message, center, apply)

    def _pull(self, message: PullChunk, _: int) -> None:
        k = message.chunk
        center, array = self._chunk(message.center, k)
        codec = _checked_codec(message.codec, array)

        def copy() -> tuple[ChunkValue, Array]:
            reply = ChunkValue(k, center.version(k), center.is_torn(k))
            if message.with_state:
                value = self._staging.reserve(center.layout.record_bytes(k))
                new, state = center.layout.split_record(k, value)
                for target, part in zip((new, *state.values()), center.record(k), strict=True):
                    target[:] = part
                return reply, value
            value = self._staging.reserve(array.nbytes).view(array.dtype)
            value[:] = array
            return reply, _pack_in_place(CODECS[codec.for_values], value)

        self._stream.send(*self._with_lock(center, k, copy, if_stuck=lambda: center.read_locked(k, copy)))

    def _query_applied(self, message: AppliedQuery, size: int) -> None:
        if size % 8 or not 0 <= message.first <= MAX_ITEMS or not 0 <= message.sequence < _MAX_SEQUENCE:
            raise BadFrame(f"a query about item {message.first} of exchange {message.sequence}, which cannot exist.")
        chunks = np.frombuffer(self._stream.receive_bytes(size, at_most=8 * _MAX_QUERIED), np.int64)
        self._finish_pending()
        sequence, items = self._staging.position
        if message.sequence < sequence:
            raise BadFrame(f"a query about exchange {message.sequence}, after {sequence} has begun.")
        if not self._staging.is_known and (self._files.forgotten or not self._recalled(self._worker)):
            raise InvalidArgument(
                f"this host does not know any more whether exchange {message.sequence} of this worker was applied: it "
                f"remembers {ROWS:,} workers and clients, and as many others have connected since. Check the center's "
                "values, and restart the worker."
            )
        file = center_file(message.center)

        def was_applied(item: int, k: int) -> bool:
            if sequence == message.sequence:
                return item < items
            return self._included(self._worker, file, k, applied_number(message.sequence, item + 1))

        applied = bytes(was_applied(item, int(k)) for item, k in enumerate(chunks, message.first))
        self._stream.send(AppliedReply(), applied)

    def _with_lock(
        self, center: SharedCenter, k: int, call: Callable[[], T], *, if_stuck: Callable[[], T] | None = None
    ) -> T:
        """Make a call under the lock of chunk k, as the active session.

        If the lock's holder makes no progress, `if_stuck` is called instead, if that is given; named arrays are waited
        for, since their pushes and pulls are atomic. The session is not held while the lock is waited for, so that a
        newer connection of the worker need not wait.
        """
        deadline = Deadline(LOCK_TIMEOUT_S)
        with self._session.lock_queue.turn((center.name, k), deadline, lambda: center.describe_lock(k)):
            stuck: Deadline | None = None
            while True:
                with self._session:
                    if center.try_lock(k):
                        try:
                            return call()
                        finally:
                            center.unlock(k)
                    stuck = stuck or Deadline(STUCK_S)
                    if if_stuck is not None and not center.is_array and center.is_stuck(k, stuck):
                        return if_stuck()
                deadline.wait(center.describe_lock(k))

    def _finish_pending(self) -> None:
        """Complete a contribution that an error, such as a lack of memory, has left half-applied."""
        intent = self._staging.pending()
        center = SharedCenter.open(self._segment, self._segment.path / intent.center) if intent is not None else None
        if intent is not None and center is not None:
            with contextlib.closing(center):
                self._with_lock(center, intent.chunk, lambda: self._staging.finish(center, intent.chunk))

    def _next_applied(self, sequence: int, item: int) -> int:
        """The applied number after this item, which must be the next of its exchange or the first of a newer one."""
        known, items = self._staging.position
        is_next = (sequence == known and item == items) or (sequence > known and item == 0)
        if not is_next or not 0 <= item < MAX_ITEMS or not 0 < sequence < _MAX_SEQUENCE:
            raise BadFrame(f"item {item} of exchange {sequence} came after {items} items of {known}.")
        return applied_number(sequence, item + 1)

    # Named arrays

    def _pull_elements(self, message: PullElements, size: int) -> None:
        center, array = self._chunk(message.center, 0)
        _check_size(size, 8 * _checked_count(message.count, array))
        positions = np.empty(message.count, np.int64)
        self._stream.receive_into(positions)
        _check_positions(positions, array)
        self._stream.send(*self._with_lock(center, 0, lambda: (ChunkValue(0, center.version(0)), array[positions])))

    def _push_elements(self, message: PushElements, size: int) -> None:
        center, array = self._chunk(message.center, 0)
        _check_size(size, _checked_count(message.count, array) * (8 + array.itemsize))
        positions, values = np.empty(message.count, np.int64), np.empty(message.count, array.dtype)
        self._stream.receive_into(positions)
        self._stream.receive_into(values)
        _check_positions(positions, array)
        _check_operation(array, "blend", message.alpha, message.beta)
        self._finish_pending()

        def apply() -> ExchangeReply:
            applied = self._next_applied(message.sequence, 0)
            alpha, beta = message.alpha, message.beta
            intent = Intent(center.name, 0, "blend", alpha, beta, applied, message.count, is_sparse=True)
            is_torn = center.is_torn(0)
            is_clean = self._staging.commit_at(center, intent, positions, values)
            return ExchangeReply(0, center.version(0), 0, self._segment.live, is_clean, is_torn, True)

        self._stream.send(self._with_lock(center, 0, apply))

    def _find_array(self, message: FindArray, _: int) -> None:
        self._stream.send(CenterOpened(False, self._segment.live), self._center(message.center).layout.table)

    def _list_arrays(self, *_: object) -> None:
        self._stream.send(ArrayList(), json.dumps(array_names(self._segment)).encode())

    def _save_arrays(self, message: SaveArrays, _: int) -> None:
        try:
            path = self._save(message.path)
        except (OSError, ValueError, TypeError) as error:
            if isinstance(error, ManipleError):
                raise
            raise InvalidArgument(f"{message.path!r} cannot be written at the host: {error}.") from None
        self._stream.send(ArraysSaved(path))

    # Open centers

    def _open_center(self, message: OpenCenter, size: int) -> None:
        model = _ReceivedModel(self._stream, self._staging, size, chunk_bytes(center_file(message.center)))
        if message.center.startswith(ARRAY) and [ARRAY + e.name for e in model.entries] != [message.center]:
            raise BadFrame(f"the table of {message.center!r} describes something else than one array of that name.")
        file = center_file(message.center)
        path = self._segment.path / file
        if not path.exists() or path.stat().st_size == 0:  # its memory is not reserved yet
            size = file_bytes(model.layout) + gate_bytes(message.gate, len(model.layout.chunks))
            self._quota.take(size, files=1 + bool(message.gate))
        self._stream.set_timeout(TIMEOUT_S)  # a silent creator must not block other creators
        try:
            center, is_creator = SharedCenter.open_or_create(
                self._segment,
                file,
                model,
                rank=self._rank(),
                note=message.note,
                state=model.layout.state,
                gate=message.gate,
                timeout_s=0,
            )
        except WaitedTooLong:
            self._stream.send(CenterBusy())
        else:
            center.close()
            self._stream.send(CenterOpened(is_creator, self._segment.live), center.layout.table)
        self._stream.set_timeout(NO_TIMEOUT_S)

    def _chunk(self, name: str, k: int) -> tuple[SharedCenter, Array]:
        center = self._center(name)
        if not 0 <= k < len(center.layout.chunks):
            raise BadFrame(f"{name} has no chunk {k}.")
        return center, center.array(k)

    def _center(self, name: str) -> SharedCenter:
        center = self._centers.get(name)
        if center is not None:
            self._centers.move_to_end(name)
            return center
        center = SharedCenter.open(self._segment, self._segment.path / center_file(name), rank=self._rank())
        if center is None:
            what = f"array named {name.removeprefix(ARRAY)!r}" if name.startswith(ARRAY) else f"center {name!r}"
            raise InvalidArgument(f"the host has no {what}. Create it first; names() lists the existing ones.")
        self._centers[name] = center
        _open_centers.add(1)
        while len(self._centers) > _MAX_OPEN or (len(self._centers) > 1 and _open_centers.are_too_many):
            self._close_oldest()
        return center

    def _close_oldest(self) -> None:
        _, center = self._centers.popitem(last=False)
        center.close()
        _open_centers.add(-1)


class _OpenCenters:
    """Counts the centers that all connections of this process keep open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def add(self, count: int) -> None:
        with self._lock:
            self._count += count

    @property
    def are_too_many(self) -> bool:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return limit != resource.RLIM_INFINITY and self._count * _FILES_PER_CENTER > limit // _OPEN_SHARE


_open_centers = _OpenCenters()


class _ReceivedModel(GivenValues):
    """The model of a remote creator, whose values are received one by one when the center is created."""

    def __init__(self, stream: Stream, staging: StagingFile, table_bytes: int, chunk_bytes: int) -> None:
        table = bytes(stream.receive_bytes(table_bytes, at_most=_MAX_TABLE_BYTES))
        try:
            self.layout = Layout.from_table(table, chunk_bytes=chunk_bytes)
        except ManipleError:
            raise
        except Exception as error:  # a hostile table may raise anything
            raise BadFrame(f"the table of parameters cannot be read: {error}") from None
        super().__init__(self.layout.entries, self._receive)
        self._stream, self._staging = stream, staging
        if len(self.entries) > _MAX_ENTRIES:
            raise BadFrame(f"a table of {len(self.entries):,} parameters came (limit {_MAX_ENTRIES:,}).")

    def begin(self) -> None:
        self._stream.send(CreateCenter())

    def _receive(self, i: int) -> Array:
        message, size = self._stream.receive()
        dtype, start, stop = self.layout.places[i]
        if not isinstance(message, ParameterValue) or message.i != i:
            raise BadFrame(f"the value of parameter {i} was expected.")
        _check_size(size, (stop - start) * np.dtype(dtype).itemsize)
        value = self._staging.reserve(size).view(dtype)
        self._stream.receive_into(value)
        return value


def _receive_value(stream: Stream, staging: StagingFile, codec: Codec, like: Array) -> Array:
    """Receive a value with the dtype and size of `like` into the staging file."""
    size = codec.size_bytes(like.size, like.itemsize)
    if codec.is_plain:
        value = staging.reserve(size)
        stream.receive_into(value)
        return value.view(like.dtype)
    # Compressed values are received at the end of the memory, and decompressed towards its start, over themselves.
    room = staging.reserve(like.nbytes + -(-size // 32) * 8)
    data = room[room.size - size :]
    stream.receive_into(data)
    value = room[: like.nbytes].view(like.dtype)
    codec.unpack(data, value)
    return value


def _pack_in_place(codec: Codec, value: Array) -> Array:
    """Compress `value` into its own memory, and return the bytes."""
    if codec.is_plain:
        return value
    data = value.view(np.uint8)
    size = codec.size_bytes(value.size, value.itemsize)
    if size > data.size:  # of a few values only, with their scale
        data = np.empty(size, np.uint8)
    codec.pack(value, data[:size])
    return data[:size]


def _check_size(size: int, expected: int) -> None:
    if size != expected:
        raise BadFrame(f"a payload of {size} bytes came where {expected} were expected.")


def _checked_codec(name: str, array: Array) -> Codec:
    if name not in CODECS or (name != "float32" and array.dtype.kind != "f"):
        raise BadFrame(f"{array.dtype} values cannot be sent as {name!r}.")
    load_kernels_in_background(name)
    return CODECS[name]


def _check_operation(array: Array, operation: str, a: float, b: float) -> None:
    """Check everything that could fail later: nothing may fail once a contribution is being applied."""
    if operation not in _OPERATIONS:
        raise BadFrame(f"{operation!r} is not an operation (one of {', '.join(_OPERATIONS)}).")
    is_integer = array.dtype.kind in "iu"
    for weight in (a, b):
        if not math.isfinite(weight) or (is_integer and not (isinstance(weight, int) and abs(weight) < 1 << 63)):
            raise BadFrame(f"{weight} cannot be a weight for {array.dtype} values.")
    if operation in {"elastic", "nesterov"} and array.dtype.kind != "f":
        raise BadFrame(f"{array.dtype} values cannot be combined by {operation!r}.")


def _checked_count(count: int, array: Array) -> int:
    """Limit the number of single elements, for which memory is allocated before they arrive."""
    limit = max(array.size, _MIN_ELEMENTS)
    if not 0 <= count <= limit:
        raise BadFrame(f"{count:,} elements cannot be requested at once (limit {limit:,}). Request fewer.")
    return count


def _check_positions(positions: Array, array: Array) -> None:
    if positions.size and not (positions.min() >= 0 and positions.max() < array.size):
        raise BadFrame(f"positions lie outside of the array's {array.size} elements.")
