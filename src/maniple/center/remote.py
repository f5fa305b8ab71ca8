"""What a worker knows of a center at its host: its layout, the versions it has seen, how values are packed."""

from collections.abc import Callable, Sequence

from maniple.center.link import Link, checked
from maniple.center.parcel import Parcels
from maniple.contracts import Act, Array, Model
from maniple.errors import BadFrame, HostAway
from maniple.layout import Layout
from maniple.wire.messages import Busy, Create, Find, Offer, Open, Opened, Pull, Value

_WINDOW = 256  # questions under way at once: few enough that they never fill a buffer
_MAX_TABLE_BYTES = 64 << 20


class Remote:
    """A center at the host, seen over one link."""

    def __init__(self, link: Link, name: str, layout: Layout, *, wire: str = "float32") -> None:
        self.link, self.name, self.layout = link, name, layout
        self.parcels = Parcels(layout, wire)
        self.seen = [0] * len(layout.entries)
        self.live = 1

    def open(self, model: Model, note: str) -> bool:
        """Find the center, or make it from `model`: True for its creator. HostAway while another one makes it."""
        stream = self.link.stream()
        stream.send(Open(self.name, note), self.layout.table)
        while True:
            message, size = stream.receive()
            checked(message)
            if isinstance(message, Opened):
                theirs = Layout.from_table(bytes(stream.receive_bytes(size, at_most=_MAX_TABLE_BYTES)))
                self.layout.require(theirs, "the center")
                self.live = message.live
                return message.created
            if isinstance(message, Create):
                model.begin()
                for i in range(len(self.layout.entries)):
                    stream.send(Value(i), model.array(i))
                    model.commit(i)
            elif isinstance(message, Busy):
                raise HostAway("another worker is making the center")
            else:
                raise BadFrame(f"{type(message).__name__} is no answer to Open.")

    def fetch(
        self, wanted: Sequence[int], take: Callable[[int, Array, int], None], *, is_plain: bool = False
    ) -> list[str]:
        """Call `take(i, value, version)` for each wanted parameter; gives the names of those that are torn."""
        stream, torn = self.link.stream(), list[str]()
        for start in range(0, len(wanted), _WINDOW):
            window = wanted[start : start + _WINDOW]
            for i in window:
                stream.send(Pull(self.name, i, "float32" if is_plain else self.parcels.codec(i).name))
            for i in window:
                message, size = stream.receive()
                checked(message)
                if not isinstance(message, Value) or message.i != i:
                    raise BadFrame(f"the value of parameter {i} was expected.")
                self.expect(i, size, is_plain=is_plain)
                take(i, self.parcels.receive(i, stream, is_plain=is_plain), message.version)
                if message.is_torn:
                    torn.append(self.layout.entries[i].name)
        return torn

    def offer(
        self,
        i: int,
        sequence: int,
        item: int,
        act: Act,
        answer: str,
        *,
        seen: int | None = None,
        is_plain: bool = False,
    ) -> Offer:
        """The words of an offer of parameter i."""
        how = "float32" if is_plain else self.parcels.codec(i).name
        seen = self.seen[i] if seen is None else seen
        return Offer(self.name, i, sequence, item, act.name, act.a, act.b, how, seen, answer)

    def expect(self, i: int, size: int, *, is_plain: bool = False) -> None:
        """Check the size of a value that is announced."""
        due = self.parcels.size_bytes(i, is_plain=is_plain)
        if size != due:
            raise BadFrame(f"{size} bytes came for parameter {i}, where {due} were due.")

    def size_bytes(self) -> int:
        """The bytes of all values on the wire, one way."""
        return sum(self.parcels.size_bytes(i) for i in range(len(self.layout.entries)))


def find_layout(link: Link, name: str) -> Layout:
    """The layout of what the host has under this name; InvalidArgument if there is none."""
    stream = link.stream()
    stream.send(Find(name))
    message, size = stream.receive()
    if not isinstance(checked(message), Opened):
        raise BadFrame(f"{type(message).__name__} is no answer to Find.")
    return Layout.from_table(bytes(stream.receive_bytes(size, at_most=_MAX_TABLE_BYTES)))
