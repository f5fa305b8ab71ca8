"""The host's half of the center over TCP: one thread serves one worker's connection, request by request."""

import contextlib
import json
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from maniple.center.allowance import Allowance
from maniple.center.arrays import ARRAY, array_names, center_file
from maniple.center.locks import Patience
from maniple.center.segment import Segment
from maniple.center.shared import LOCK_TIMEOUT_S, Shared
from maniple.center.stage import MAX_ITEMS, Intent, Stages, word_of
from maniple.center.turns import Left, Superseded, Turn
from maniple.center.upload import (
    Upload,
    check_count,
    check_positions,
    check_weights,
    checked_codec,
    expect,
    packed,
    received,
)
from maniple.center.words import ROWS
from maniple.contracts import Array
from maniple.errors import BadFrame, InvalidArgument, ManipleError, WaitedTooLong
from maniple.rules import blocks
from maniple.wire.messages import (
    Answer,
    Ask,
    Busy,
    Bye,
    Find,
    Listing,
    Message,
    Names,
    Offer,
    Open,
    Opened,
    Pull,
    Put,
    Refusal,
    Save,
    Saved,
    Take,
    Told,
    Value,
)
from maniple.wire.stream import NEVER_S, TIMEOUT_S

T = TypeVar("T")
_ANSWERS = {"none": blocks.NOTHING, "value": blocks.VALUE, "move": blocks.MOVE}
_MAX_OPEN = 32  # centers that one connection keeps open
_MAX_ASKED = 1 << 20  # items of one exchange, each a parameter of a center or an array
_FILES_EACH = 2  # the locks, and the mapping
_SHARE = (
    4  # all connections together keep a quarter of the files that this process may open, and each its newest center
)


class _Opened:
    """How many centers all connections of this process keep open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def add(self, count: int) -> None:
        with self._lock:
            self._count += count

    @property
    def are_too_many(self) -> bool:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return most != resource.RLIM_INFINITY and self._count * _FILES_EACH > most // _SHARE


_opened = _Opened()


class Serving:
    """One worker's data connection, at the host."""

    def __init__(
        self,
        turn: Turn,
        segment: Segment,
        worker: str,
        *,
        rank: Callable[[], int],
        stages: Stages,
        included: Callable[[str, str, int, int], bool],
        recalled: Callable[[str], bool],
        save: Callable[[str], str],
        allowance: Allowance,
    ) -> None:
        """`included` tells whether the snapshot that the center was restored from has a contribution, given by
        worker, center, parameter and word; `recalled` whether it tells that of a worker at all; `save` writes all
        values to a file of the run folder; `allowance` grants memory."""
        self._turn, self._stream = turn, turn.stream
        self._segment, self._worker, self._rank = segment, worker, rank
        self._included, self._recalled, self._save = included, recalled, save
        self._stages, self._allowance = stages, allowance
        with turn.held():
            self._stage = stages.open(worker, allowance.take)
        self._centers: OrderedDict[str, Shared] = OrderedDict()
        self._answers: dict[type, Callable[[Any, int], None]] = {
            Open: self._open,
            Offer: self._offer,
            Pull: self._pull,
            Ask: self._ask,
            Take: self._take,
            Put: self._put,
            Find: self._find,
            Names: self._names,
            Save: self._save_as,
        }

    def serve(self) -> None:
        """Answer until the connection ends (ConnectionError) or something comes that is not understood (BadFrame)."""
        try:
            while True:
                message, size = self._stream.receive()
                self._serve_one(message, size)
        finally:
            self._answers.clear()  # they point back here: without them all is freed at once
            while self._centers:
                self._close_oldest()
            with contextlib.suppress(Superseded), self._turn.held():
                self._stages.retire(self._worker, self._stage)
            self._stage.close()

    def _serve_one(self, message: Message, size: int) -> None:
        if isinstance(message, Bye):
            raise Left("the worker has left")
        act = self._answers.get(type(message))
        if act is None:
            raise BadFrame(f"{type(message).__name__} is nothing that a worker asks.")
        try:
            act(message, size)
        except MemoryError:
            raise BadFrame(f"{type(message).__name__} asked for more memory than there is.") from None
        except ManipleError as error:
            if isinstance(error, BadFrame) or not isinstance(message, Find | Pull | Save):
                raise  # what follows in the stream was sent in the belief that this went well
            self._stream.send(Refusal(type(error).__name__, str(error)))

    def _open(self, message: Open, size: int) -> None:
        model = Upload(self._stream, self._stage, size)
        if message.center.startswith(ARRAY) and [ARRAY + e.name for e in model.entries] != [message.center]:
            raise BadFrame(f"the table of {message.center!r} describes something else than one array of that name.")
        file = center_file(message.center)
        path = self._segment.path / file
        if not path.exists() or path.stat().st_size == 0:  # nobody has reserved its memory yet
            self._allowance.take(model.file_bytes, files=1)
        self._stream.set_timeout(TIMEOUT_S)  # a creator who falls silent must not keep the others from creating
        try:
            center, is_creator = Shared.open_or_create(
                self._segment, file, model, rank=self._rank(), note=message.note, timeout_s=0
            )
        except WaitedTooLong:
            self._stream.set_timeout(NEVER_S)
            self._stream.send(Busy())
            return
        self._stream.set_timeout(NEVER_S)
        self._keep(message.center, center)
        self._stream.send(Opened(is_creator, self._segment.live), center.layout.table)

    def _find(self, message: Find, size: int) -> None:
        expect(size, 0)
        self._stream.send(Opened(False, self._segment.live), self._center(message.center).layout.table)

    def _pull(self, message: Pull, size: int) -> None:
        expect(size, 0)
        center, array = self._parameter(message.center, message.i)
        kind = checked_codec(message.codec, array)

        def copy() -> tuple[Value, Array]:
            value = self._stage.reserve(array.nbytes).view(array.dtype)
            value[:] = array
            told = Value(message.i, center.version(message.i), center.is_torn(message.i))
            return told, packed(kind, value)

        self._stream.send(*self._locked(center, message.i, copy))

    def _offer(self, message: Offer, size: int) -> None:
        i = message.i
        center, array = self._parameter(message.center, i)
        kind = checked_codec(message.codec, array)
        if message.answer not in _ANSWERS:
            raise BadFrame(f"{message.answer!r} is no kind of answer.")
        expect(size, kind.size_bytes(array.size, array.itemsize))
        check_weights(array, message.act, message.a, message.b)
        self._finish()
        with self._turn.held():
            value = received(self._stream, self._stage, kind, array)

        def apply() -> tuple[Any, ...]:
            word = self._next_word(message.sequence, message.item)
            is_torn, version = center.is_torn(i), center.version(i)
            staleness = max(0, version - message.seen) // 2
            is_clean, is_done = True, message.act != "swap" or version == message.seen
            if message.act in {"swap", "replace"} and not np.isfinite(value).all():
                is_clean = False
                self._stage.skip(word)
            elif is_done:
                act, b = message.act, message.b
                if act == "compensated":
                    act, b = "blend", b / (staleness + 1)
                intent = Intent(center.name, i, act, message.a, b, word, array.size)
                is_clean = self._stage.commit(center, intent, value, answer=_ANSWERS[message.answer])
            answer = Answer(message.item, center.version(i), staleness, self._segment.live, is_clean, is_torn, is_done)
            return (answer,) if message.answer == "none" else (answer, packed(kind, value))

        self._stream.send(*self._locked(center, i, apply))

    def _take(self, message: Take, size: int) -> None:
        center, array = self._parameter(message.center, 0)
        check_count(message.count, array)
        expect(size, 8 * message.count)
        positions = np.empty(message.count, np.int64)
        self._stream.receive_into(positions)
        check_positions(positions, array)
        with center.held(0):
            version, values = center.version(0), array[positions]
        self._stream.send(Value(0, version), values)

    def _locked(self, center: Shared, i: int, act: Callable[[], T]) -> T:
        """Do something with the stage under the lock of parameter i.

        The turn is not held while the lock is waited for: a newer connection of the worker need not wait for it.
        """
        patience = Patience(LOCK_TIMEOUT_S)
        while True:
            with self._turn.held():
                if center.take(i):
                    try:
                        return act()
                    finally:
                        center.give(i)
            patience.wait(center.describe(i))

    def _put(self, message: Put, size: int) -> None:
        center, array = self._parameter(message.center, 0)
        check_count(message.count, array)
        expect(size, message.count * (8 + array.itemsize))
        positions, values = np.empty(message.count, np.int64), np.empty(message.count, array.dtype)
        self._stream.receive_into(positions)
        self._stream.receive_into(values)
        check_positions(positions, array)
        check_weights(array, "blend", message.alpha, message.beta)
        self._finish()

        def apply() -> Answer:
            word = self._next_word(message.sequence, 0)
            intent = Intent(center.name, 0, "blend", message.alpha, message.beta, word, message.count, is_sparse=True)
            is_torn = center.is_torn(0)
            is_clean = self._stage.commit_at(center, intent, positions, values)
            return Answer(0, center.version(0), 0, self._segment.live, is_clean, is_torn, True)

        self._stream.send(self._locked(center, 0, apply))

    def _ask(self, message: Ask, size: int) -> None:
        if size % 8 or not 0 <= message.first <= MAX_ITEMS or not 0 <= message.sequence < 1 << 38:
            raise BadFrame("a question about items that cannot be.")
        asked = np.frombuffer(self._stream.receive_bytes(size, at_most=8 * _MAX_ASKED), np.int64)
        self._finish()
        sequence, done = self._stage.position
        if message.sequence < sequence:
            raise BadFrame(f"a question about exchange {message.sequence}, after {sequence} has begun.")
        if not self._stage.is_known and (self._stages.forgotten or not self._recalled(self._worker)):
            raise InvalidArgument(
                f"this host does not know any more whether exchange {message.sequence} of this worker was applied: it "
                f"remembers {ROWS:,} workers and clients, and so many others were here since. Look at the center's "
                "values, and begin anew."
            )
        file = center_file(message.center)

        def was_applied(item: int, i: int) -> bool:
            if sequence == message.sequence:
                return item < done
            return self._included(self._worker, file, i, word_of(message.sequence, item + 1))

        applied = bytes(was_applied(item, int(i)) for item, i in enumerate(asked, message.first))
        self._stream.send(Told(), applied)

    def _names(self, message: Names, size: int) -> None:
        del message
        expect(size, 0)
        self._stream.send(Listing(), json.dumps(array_names(self._segment)).encode())

    def _save_as(self, message: Save, size: int) -> None:
        expect(size, 0)
        try:
            path = self._save(message.path)
        except (OSError, ValueError, TypeError) as error:
            if isinstance(error, ManipleError):
                raise
            raise InvalidArgument(f"{message.path!r} cannot be written at the host: {error}.") from None
        self._stream.send(Saved(path))

    def _finish(self) -> None:
        """Finish a contribution that an error, for want of memory say, has left half-done."""
        intent = self._stage.pending()
        center = Shared.open(self._segment, self._segment.path / intent.center) if intent is not None else None
        if intent is not None and center is not None:
            with contextlib.closing(center):
                self._locked(center, intent.i, lambda: self._stage.finish(center, intent.i))

    def _next_word(self, sequence: int, item: int) -> int:
        """The word once this item is applied; it must be the next of its exchange, or the first of a newer one."""
        known, done = self._stage.position
        is_next = (sequence == known and item == done) or (sequence > known and item == 0)
        if not is_next or not 0 <= item < MAX_ITEMS or not 0 < sequence < 1 << 38:
            raise BadFrame(f"item {item} of exchange {sequence} came after {done} of {known}.")
        return word_of(sequence, item + 1)

    def _parameter(self, name: str, i: int) -> tuple[Shared, Array]:
        center = self._center(name)
        if not 0 <= i < len(center.layout.entries):
            raise BadFrame(f"{name} has no parameter {i}.")
        return center, center.array(i)

    def _center(self, name: str) -> Shared:
        center = self._centers.get(name)
        if center is not None:
            self._centers.move_to_end(name)
            return center
        path = self._segment.path / center_file(name)
        center = Shared.open(self._segment, path, rank=self._rank()) if path.exists() else None
        if center is None:
            what = f"array named {name.removeprefix(ARRAY)!r}" if name.startswith(ARRAY) else f"center {name!r}"
            raise InvalidArgument(f"the host has no {what}. Create it first; names() lists what is there.")
        return self._keep(name, center)

    def _keep(self, name: str, center: Shared) -> Shared:
        before = self._centers.pop(name, None)
        if before is not None:
            before.close()
        else:
            _opened.add(1)
        self._centers[name] = center
        while len(self._centers) > _MAX_OPEN or (len(self._centers) > 1 and _opened.are_too_many):
            self._close_oldest()
        return center

    def _close_oldest(self) -> None:
        _, center = self._centers.popitem(last=False)
        center.close()
        _opened.add(-1)
