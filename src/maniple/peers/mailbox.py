"""A mailbox: the file in shared memory in which a worker publishes its state and its message to one peer.

    first page   index
    headers      half 0    half 1     `HEADER`: step, weight, the message, what was taken from each peer
    vectors      half 0    half 1     those of the rule: the replica x, say
    outbox       the message's vector, if the rule sends messages

Only the owner writes. A commit writes the half that is not current as a whole, then increments the index, one write of
8 bytes that makes that half the current one. SIGKILL at any instant leaves the old state or the new one, without a lock
or a journal; the owner's successor continues with it.

The outbox is written before the commit whose header announces it, and stays as it is until the receiver has taken the
message: the number of the last message that a worker has taken from each peer is in its own header, committed together
with what the message has changed. So each message is applied exactly once.

Readers do not lock either: what was read of a half is of one commit if the index has not changed meanwhile.

Two bytes of the file serve as locks. The owner holds `_OWNER` for as long as it lives. `DELIVERY` is held by the owner
while it takes messages, and by a sender that takes a message back: the receiver may be dead, or only stopped. Both try
once and go on without it otherwise, since the next step is another opportunity.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from maniple.contracts import Array
from maniple.errors import WaitedTooLong
from maniple.layout import Layout
from maniple.memory.locks import ByteLocks
from maniple.memory.segment import MAX_WORKERS
from maniple.memory.shm import map_file

T = TypeVar("T")
Vectors = dict[str, Array]  # flat vectors by dtype

NOBODY = -1
HEADER = np.dtype(
    [
        ("step", "<i8"),  # of the owner, at this commit
        ("weight", "<f8"),
        ("is_newcomer", "<i8"),  # it has no weight, and waits for some; one that is leaving has none either
        ("receiver", "<i8"),  # of the last message; NOBODY: there is none, or it was taken back
        ("number", "<i8"),  # of the last message, counted from 1; with NoLoCo, how many outer steps were made
        ("message_weight", "<f8"),
        ("message_mass", "<f8"),
        ("seen_step", "<i8"),  # the receiver's step at its last commit that the sender saw
        (
            "applied",
            "<i8",
            MAX_WORKERS,
        ),  # the number of the last message from each rank; own rank: see `mailbox_service`
    ]
)
_PAGE = 4096
_OWNER, DELIVERY = 0, 1
_TRIES = 8  # of a read that commits of the owner interrupt: they are many steps apart


class Mailbox:
    """The mailbox of one worker, as its peers see it."""

    def __init__(self, path: Path, layout: Layout, names: Sequence[str], *, size_bytes: int = 0) -> None:
        self._path = path
        memory = map_file(path, size_bytes, what="the mailbox of a worker")
        self._index = memoryview(memory)[:8].cast("q")
        start, header = _PAGE, _pages(HEADER.itemsize)
        self._headers = [np.frombuffer(memory, HEADER, 1, start + half * header) for half in (0, 1)]
        start += 2 * header
        self._halves: list[dict[str, Vectors]] = []
        for _ in (0, 1):
            vectors: dict[str, Vectors] = {}
            for name in names:
                vectors[name], start = _map_vectors(memory, layout, start)
            self._halves.append(vectors)
        self.outbox = _map_vectors(memory, layout, start)[0] if has_outbox(names) else {}

    @classmethod
    def find(cls, path: Path, layout: Layout, names: Sequence[str]) -> "Mailbox | None":
        """The mailbox of a peer; None until its owner has made its first commit."""
        if not path.exists() or path.stat().st_size != mailbox_bytes(layout, names):
            return None
        found = cls(path, layout, names)
        return found if found.commits else None

    @property
    def commits(self) -> int:
        """How many commits the owner has made: it changes whenever there is something new."""
        return self._index[0]

    def header(self) -> Array | None:
        """A copy of the current header, an array with one record; None if it cannot be read now."""
        return self.read(lambda half: self._headers[half].copy(), accepts_torn=False)

    @property
    def vectors(self) -> dict[str, Vectors]:
        """The current vectors, by name and dtype. The owner may write to them after its next commit."""
        return self._halves[self.commits % 2]

    def applied(self, rank: int) -> int | None:
        """The number of the last message that the owner has taken from a rank; None if it cannot be read now."""
        return self.read(lambda half: int(self._headers[half]["applied"][0, rank]), accepts_torn=False)

    def copy(self, name: str, out: Vectors) -> Array:
        """Copy the current vectors of this name; returns the header that belongs to them."""

        def read(half: int) -> Array:
            for dtype, vector in self._halves[half][name].items():
                out[dtype][:] = vector
            return self._headers[half].copy()

        found = self.read(read)
        assert found is not None
        return found

    def read(self, read: Callable[[int], T], *, accepts_torn: bool = True) -> T | None:
        """The result of `read(half)` of one commit. After several tries in vain it may be of two, or None."""
        found: T | None = None
        for _ in range(_TRIES):
            commits = self.commits
            found = read(commits % 2)
            if self.commits == commits:
                return found
        return found if accepts_torn else None

    @contextmanager
    def delivery(self) -> Generator[bool]:
        """Keep the owner from taking messages for the length of a `with` block; False if it is just doing so."""
        with closing(ByteLocks(self._path)) as locks:
            yield locks.take(DELIVERY)


class OwnMailbox(Mailbox):
    """This worker's own mailbox, which it alone writes. A successor of the same rank continues with it."""

    def __init__(self, path: Path, layout: Layout, names: Sequence[str], *, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the end of a process that owns it (WaitedTooLong)."""
        self._locks = ByteLocks(path)
        try:
            self._locks.retry_until(_OWNER, timeout_s=timeout_s, what=f"the end of the process that owns {path}")
        except WaitedTooLong:
            self._locks.close()
            raise
        super().__init__(path, layout, names, size_bytes=mailbox_bytes(layout, names))

    @property
    def next(self) -> dict[str, Vectors]:
        """The vectors that the next commit makes the current ones. All of them have to be written before it."""
        return self._halves[(self.commits + 1) % 2]

    def commit(self, header: Array) -> None:
        """Make `header` and the vectors in `next` the current ones."""
        self._headers[(self.commits + 1) % 2][:] = header
        self._flip()

    def _flip(self) -> None:
        self._index[0] += 1

    @contextmanager
    def delivery(self) -> Generator[bool]:
        """Keep senders from taking their messages back for the length of a `with` block; False if one just does."""
        is_taken = self._locks.take(DELIVERY)
        try:
            yield is_taken
        finally:
            if is_taken:
                self._locks.give(DELIVERY)

    def close(self) -> None:
        """Let a successor of the same rank continue. What was committed stays."""
        self._locks.close()


def has_outbox(names: Sequence[str]) -> bool:
    """Only a rule that publishes nothing but its replica sends messages; others let peers read what they publish."""
    return len(names) == 1


def mailbox_bytes(layout: Layout, names: Sequence[str]) -> int:
    """The size of the file."""
    vectors = sum(_pages(np.dtype(dtype).itemsize * size) for dtype, size in layout.sizes.items())
    return _PAGE + 2 * _pages(HEADER.itemsize) + (2 * len(names) + has_outbox(names)) * vectors


def _map_vectors(memory: object, layout: Layout, start: int) -> tuple[Vectors, int]:
    """Flat vectors from `start` on, and where they end."""
    vectors: Vectors = {}
    for dtype, size in layout.sizes.items():
        vectors[dtype] = np.frombuffer(memory, dtype, size, start)  # type: ignore[arg-type]
        start += _pages(vectors[dtype].nbytes)
    return vectors, start


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE
