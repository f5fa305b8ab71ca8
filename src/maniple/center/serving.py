"""The host's half of the center over TCP: one thread serves one worker's connection, request by request."""

import contextlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from maniple.center.arrays import ARRAY, array_file
from maniple.center.segment import Segment
from maniple.center.shared import Shared
from maniple.center.stage import MAX_ITEMS, Intent, Stage, word_of
from maniple.center.turns import Left, Superseded, Turn
from maniple.center.upload import Upload, expect, packed, received
from maniple.contracts import Array, Entry
from maniple.errors import BadFrame, InvalidArgument, ManipleError, WaitedTooLong
from maniple.rules import blocks
from maniple.wire import CODECS, codec
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

_MAX_TABLE_BYTES = 64 << 20
_ACTS = ("elastic", "blend", "compensated", "replace", "swap")
_ANSWERS = {"none": blocks.NOTHING, "value": blocks.VALUE, "move": blocks.MOVE}
_MAX_OPEN = 32  # centers that one connection keeps open
_CENTER = re.compile(r"center-\d{1,4}")


class Serving:
    """One worker's data connection, at the host."""

    def __init__(
        self,
        turn: Turn,
        segment: Segment,
        worker: str,
        *,
        rank: Callable[[], int],
        included: Callable[[str, str, int, int], bool],
        save: Callable[[str], str],
    ) -> None:
        """
        Args:
            turn: the right to speak for `worker`.
            segment: the run's shared memory.
            worker: the worker's random name.
            rank: its place, as far as known.
            included: whether the snapshot that the center was restored from has a contribution, given by
                worker, center, parameter and word.
            save: writes all values to a file of the run folder.
        """
        self._turn, self._stream = turn, turn.stream
        self._segment, self._worker, self._rank = segment, worker, rank
        self._included, self._save = included, save
        self._stage = Stage.of(segment.path, worker)
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
            for center in self._centers.values():
                center.close()
            with contextlib.suppress(Superseded), self._turn.held():
                self._stage.shrink()
            self._stage.close()

    def _serve_one(self, message: Message, size: int) -> None:
        if isinstance(message, Bye):
            raise Left("the worker has left")
        act = self._answers.get(type(message))
        if act is None:
            raise BadFrame(f"{type(message).__name__} is nothing that a worker asks.")
        try:
            act(message, size)
        except ManipleError as error:
            self._stream.send(Refusal(type(error).__name__, str(error)))
            if isinstance(error, BadFrame) or not isinstance(message, Find | Pull | Save):
                raise  # what follows in the stream was sent in the belief that this went well

    def _open(self, message: Open, size: int) -> None:
        table = bytes(self._stream.receive_bytes(size, at_most=_MAX_TABLE_BYTES))
        model = Upload(self._stream, self._stage, table)
        try:
            center, is_creator = Shared.open_or_create(
                self._segment, _file(message.center), model, rank=self._rank(), note=message.note, timeout_s=0
            )
        except WaitedTooLong:
            self._stream.send(Busy())
            return
        self._keep(message.center, center)
        self._stream.send(Opened(is_creator, self._segment.live), center.layout.table)

    def _find(self, message: Find, size: int) -> None:
        expect(size, 0)
        self._stream.send(Opened(False, self._segment.live), self._center(message.center).layout.table)

    def _pull(self, message: Pull, size: int) -> None:
        expect(size, 0)
        center, array = self._parameter(message.center, message.i)
        kind = _codec(message.codec, array)
        value = self._stage.reserve(array.nbytes).view(array.dtype)
        with center.held(message.i):
            is_torn, version = center.is_torn(message.i), center.version(message.i)
            value[:] = array
        self._stream.send(Value(message.i, version, is_torn), packed(kind, value))

    def _offer(self, message: Offer, size: int) -> None:
        i = message.i
        center, array = self._parameter(message.center, i)
        kind = _codec(message.codec, array)
        if message.act not in _ACTS or message.answer not in _ANSWERS:
            raise BadFrame(f"{message.act!r} with answer {message.answer!r} is nothing that a host does.")
        expect(size, kind.size_bytes(array.size, array.itemsize))
        value = received(self._stream, self._stage, kind, array)
        is_clean = is_done = True
        with self._turn.held():
            word = self._next_word(message.sequence, message.item)
            with center.held(i):
                is_torn, version = center.is_torn(i), center.version(i)
                staleness = max(0, version - message.seen) // 2
                act, b = message.act, message.b
                if act == "compensated":
                    act, b = "blend", b / (staleness + 1)
                if act == "swap" and version != message.seen:
                    is_done = False
                elif act in {"swap", "replace"} and not np.isfinite(value).all():
                    is_clean = False
                    self._stage.skip(word)
                else:
                    intent = Intent(center.name, i, act, message.a, b, word, array.size)
                    is_clean = self._stage.commit(center, intent, value, answer=_ANSWERS[message.answer])
                version = center.version(i)
        answer = Answer(message.item, version, staleness, self._segment.live, is_clean, is_torn, is_done)
        if message.answer == "none":
            self._stream.send(answer)
        else:
            self._stream.send(answer, packed(kind, value))

    def _take(self, message: Take, size: int) -> None:
        center, array = self._parameter(message.center, 0)
        expect(size, 8 * message.count)
        positions = np.empty(message.count, np.int64)
        self._stream.receive_into(positions)
        _check_positions(positions, array)
        with center.held(0):
            version, values = center.version(0), array[positions]
        self._stream.send(Value(0, version), values)

    def _put(self, message: Put, size: int) -> None:
        center, array = self._parameter(message.center, 0)
        expect(size, message.count * (8 + array.itemsize))
        positions, values = np.empty(message.count, np.int64), np.empty(message.count, array.dtype)
        self._stream.receive_into(positions)
        self._stream.receive_into(values)
        _check_positions(positions, array)
        with self._turn.held():
            word = self._next_word(message.sequence, 0)
            intent = Intent(center.name, 0, "blend", message.alpha, message.beta, word, message.count, is_sparse=True)
            with center.held(0):
                is_torn = center.is_torn(0)
                is_clean = self._stage.commit_at(center, intent, positions, values)
                version = center.version(0)
        self._stream.send(Answer(0, version, 0, self._segment.live, is_clean, is_torn, True))

    def _ask(self, message: Ask, size: int) -> None:
        if size % 8 or not 0 <= message.first <= MAX_ITEMS or not 0 <= message.sequence < 1 << 38:
            raise BadFrame("a question about items that cannot be.")
        asked = np.frombuffer(self._stream.receive_bytes(size, at_most=8 * MAX_ITEMS), np.int64)
        sequence, done = self._stage.position
        file = _file(message.center)

        def was_applied(item: int, i: int) -> bool:
            if sequence == message.sequence:
                return item < done
            return self._included(self._worker, file, i, word_of(message.sequence, item + 1))

        applied = bytes(was_applied(item, int(i)) for item, i in enumerate(asked, message.first))
        self._stream.send(Told(), applied)

    def _names(self, message: Names, size: int) -> None:
        del message
        expect(size, 0)
        entries: list[Entry] = []
        for path in sorted(self._segment.path.glob("array-*")):
            center = Shared.open(self._segment, path)
            if center is not None:
                entries += center.layout.entries
                center.close()
        self._stream.send(Listing(), json.dumps(sorted(entry.name for entry in entries)).encode())

    def _save_as(self, message: Save, size: int) -> None:
        expect(size, 0)
        self._stream.send(Saved(self._save(message.path)))

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
        path = self._segment.path / _file(name)
        center = Shared.open(self._segment, path, rank=self._rank()) if path.exists() else None
        if center is None:
            what = f"array named {name.removeprefix(ARRAY)!r}" if name.startswith(ARRAY) else f"center {name!r}"
            raise InvalidArgument(f"the host has no {what}. Create it first; names() lists what is there.")
        return self._keep(name, center)

    def _keep(self, name: str, center: Shared) -> Shared:
        before = self._centers.pop(name, None)
        if before is not None:
            before.close()
        self._centers[name] = center
        if len(self._centers) > _MAX_OPEN:
            self._centers.popitem(last=False)[1].close()
        return center


def _file(name: str) -> str:
    """The file of a center or of a named array."""
    if name.startswith(ARRAY):
        return array_file(name.removeprefix(ARRAY))
    if not _CENTER.fullmatch(name):
        raise BadFrame(f"{name!r} cannot name a center.")
    return name


def _codec(name: str, array: Array) -> Any:
    if name not in CODECS or (name != "float32" and array.dtype.kind != "f"):
        raise BadFrame(f"{array.dtype} values cannot travel as {name!r}.")
    return codec(name)


def _check_positions(positions: Array, array: Array) -> None:
    if positions.size and not (positions.min() >= 0 and positions.max() < array.size):
        raise BadFrame(f"positions lie outside of the array's {array.size} elements.")
