"""What comes up from a worker: values and whole models, checked before they are taken."""

import math

import numpy as np

from maniple.center.memory import file_bytes
from maniple.center.stage import Stage
from maniple.contracts import Array
from maniple.errors import BadFrame, ManipleError
from maniple.layout import Layout
from maniple.wire.codecs import CODECS, Codec, codec
from maniple.wire.messages import Create, Value
from maniple.wire.stream import Stream

_MAX_TABLE_BYTES = 16 << 20
_MAX_ENTRIES = 100_000  # a table becomes objects of some hundred bytes for each of them
_FEW = 1 << 16  # elements, which may be asked for at once also of a smaller array: positions may repeat
_ACTS = ("elastic", "blend", "compensated", "replace", "swap")


class Upload:
    """A remote creator's model, whose values come one after the other once they are asked for."""

    def __init__(self, stream: Stream, stage: Stage, table_bytes: int) -> None:
        table = bytes(stream.receive_bytes(table_bytes, at_most=_MAX_TABLE_BYTES))
        try:
            self._layout = Layout.from_table(table)
        except ManipleError:
            raise
        except Exception as error:  # whatever a table of a stranger's making may hold
            raise BadFrame(f"the table of parameters cannot be read: {error}") from None
        self._stream, self._stage = stream, stage
        self.entries = self._layout.entries
        if len(self.entries) > _MAX_ENTRIES:
            raise BadFrame(f"a table of {len(self.entries):,} parameters came (limit {_MAX_ENTRIES:,}).")

    @property
    def file_bytes(self) -> int:
        """The size of the file that holds it."""
        return file_bytes(self._layout)

    def begin(self) -> None:
        """Ask for the values."""
        self._stream.send(Create())

    def array(self, i: int) -> Array:
        """The value that comes next."""
        message, size = self._stream.receive()
        dtype, start, stop = self._layout.places[i]
        if not isinstance(message, Value) or message.i != i:
            raise BadFrame(f"the value of parameter {i} was expected.")
        expect(size, (stop - start) * np.dtype(dtype).itemsize)
        value = self._stage.reserve(size).view(dtype)
        self._stream.receive_into(value)
        return value

    def commit(self, i: int) -> None:
        """It is only read."""
        del i


def received(stream: Stream, stage: Stage, how: Codec, like: Array) -> Array:
    """A value in the dtype and size of `like`, at the start of the stage's room."""
    size = how.size_bytes(like.size, like.itemsize)
    if how.is_plain:
        value = stage.reserve(size)
        stream.receive_into(value)
        return value.view(like.dtype)
    # Packed values come to the end of the room and are unpacked towards its start, over themselves.
    room = stage.reserve(like.nbytes + -(-size // 32) * 8)
    data = room[room.size - size :]
    stream.receive_into(data)
    value = room[: like.nbytes].view(like.dtype)
    how.unpack(data, value)
    return value


def packed(how: Codec, value: Array) -> Array:
    """The bytes of `value`, in its own memory."""
    if how.is_plain:
        return value
    data = value.view(np.uint8)
    size = how.size_bytes(value.size, value.itemsize)
    if size > data.size:  # a few values only: packed they and their scale are larger
        data = np.empty(size, np.uint8)
    how.pack(value, data[:size])
    return data[:size]


def expect(size: int, expected: int) -> None:
    """A payload must have the size that its header implies."""
    if size != expected:
        raise BadFrame(f"a payload of {size} bytes came where {expected} were due.")


def checked_codec(name: str, array: Array) -> Codec:
    """How values of `array` travel."""
    if name not in CODECS or (name != "float32" and array.dtype.kind != "f"):
        raise BadFrame(f"{array.dtype} values cannot travel as {name!r}.")
    return codec(name)


def check_weights(array: Array, act: str, a: float, b: float) -> None:
    """Nothing may fail once a contribution is being applied."""
    if act not in _ACTS:
        raise BadFrame(f"{act!r} is nothing that a host does.")
    is_whole = array.dtype.kind in "iu"
    for weight in (a, b):
        if not math.isfinite(weight) or (is_whole and not (isinstance(weight, int) and abs(weight) < 1 << 63)):
            raise BadFrame(f"{array.dtype} values cannot be weighed by {weight}.")
    if act == "elastic" and array.dtype.kind != "f":
        raise BadFrame(f"{array.dtype} values cannot move elastically.")


def check_count(count: int, array: Array) -> None:
    """Memory is taken for so many single elements before they come: no more than the array's own size asks for."""
    most = max(array.size, _FEW)
    if not 0 <= count <= most:
        raise BadFrame(f"{count:,} elements cannot be asked for at once: {most:,} are the most. Ask for fewer.")


def check_positions(positions: Array, array: Array) -> None:
    """Elements must lie inside of the array."""
    if positions.size and not (positions.min() >= 0 and positions.max() < array.size):
        raise BadFrame(f"positions lie outside of the array's {array.size} elements.")
