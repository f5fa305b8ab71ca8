"""The messages of a feed: a producer pushes batches to the host, and a worker fetches them.

producer    Supply, Supplied; Push, Room, Batch, Got; End, Over
worker      Fetch, Batch, Got; Over
both        Later
"""

from maniple.wire.said import Said


class Supply(Said, frozen=True, tag=50):
    """Producer: I push to this feed, as producer `index` of `count` (-1: the next one); so many batches may wait."""

    feed: str
    index: int
    count: int
    high_water: int


class Supplied(Said, frozen=True, tag=51):
    """Host: then you are producer `index` of `count`; I have your first `pushed` batches."""

    index: int
    count: int
    pushed: int


class Push(Said, frozen=True, tag=52):
    """Producer: my batch `number` has so many bytes. Is there room for it?"""

    number: int
    size_bytes: int


class Room(Said, frozen=True, tag=53):
    """Host: there is. Send it."""


class Batch(Said, frozen=True, tag=54):
    """Either: batch `number` is in the payload."""

    number: int


class Got(Said, frozen=True, tag=55):
    """Either: I have batch `number`, and you need not keep it."""

    number: int


class End(Said, frozen=True, tag=56):
    """Producer: no more will come from me; if I have failed, my traceback is in the payload."""

    is_failure: bool


class Fetch(Said, frozen=True, tag=57):
    """Worker: give me the next batch of this feed."""

    feed: str


class Later(Said, frozen=True, tag=58):
    """Host: not yet; I am alive."""


class Over(Said, frozen=True, tag=59):
    """Host: all producers have ended, and nothing is left. (To a producer that has ended: I know.)"""


FeedMessage = Supply | Supplied | Push | Room | Batch | Got | End | Fetch | Later | Over
