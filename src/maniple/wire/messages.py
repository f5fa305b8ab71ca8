"""The messages: all that one side can say to the other. `docs/protocol.md` tells them as a conversation.

every connection    Hello, Proof, Welcome; Refusal at any time
data                Open, Create, Value, Opened, Busy; Offer, Answer; Pull; Ask, Told; Take, Put; Find; Names, Listing;
                    Save, Saved; Bye
control             Join, Joined, Beat, Beaten
ask                 Request, Reply
feed                those of `batches`
doctor              those of `examination`
watch               those of `watching`
"""

from maniple.wire.batches import FeedMessage
from maniple.wire.examination import DoctorMessage
from maniple.wire.said import Said
from maniple.wire.watching import WatchMessage


class Hello(Said, frozen=True, tag=1):
    """Host: prove that you know the token, by this nonce."""

    nonce: bytes


class Proof(Said, frozen=True, tag=2):
    """Worker: here is my proof; now prove yourself by mine. I am `worker`, and this connection is for `role`."""

    nonce: bytes
    mac: bytes
    role: str
    worker: str


class Welcome(Said, frozen=True, tag=3):
    """Host: and here is mine. The center's lineage is this; it began again from a snapshot so many times."""

    mac: bytes
    lineage: str
    restored: int
    restored_from: float  # the snapshot's time, or 0


class Refusal(Said, frozen=True, tag=4):
    """Either: no, for this reason. `kind` names the error to raise."""

    kind: str
    reason: str


class Open(Said, frozen=True, tag=10):
    """Worker: I share the parameters in the payload's table under this name; `note` tells their rule."""

    center: str
    note: str


class Create(Said, frozen=True, tag=11):
    """Host: nobody has made it yet. Send your values, they become the center."""


class Busy(Said, frozen=True, tag=12):
    """Host: somebody else is making it. Ask again soon."""


class Opened(Said, frozen=True, tag=13):
    """Host: it is there, and these are its versions; the table in the payload is the center's own."""

    created: bool
    live: int


class Value(Said, frozen=True, tag=14):
    """Either: parameter `i` has the value in the payload."""

    i: int
    version: int = 0
    is_torn: bool = False


class Pull(Said, frozen=True, tag=15):
    """Worker: tell me the value of parameter `i`."""

    center: str
    i: int
    codec: str = "float32"


class Offer(Said, frozen=True, tag=16):
    """Worker: apply `act` with weights `a` and `b` to my value, the payload, and to parameter `i`.

    It is item `item` of my exchange `sequence`; I last saw version `seen` of the parameter.
    """

    center: str
    i: int
    sequence: int
    item: int
    act: str
    a: float | int
    b: float | int
    codec: str
    seen: int
    answer: str  # "value", "move" or "none"


class Answer(Said, frozen=True, tag=17):
    """Host: item `item` is applied; what the replica becomes is in the payload."""

    item: int
    version: int
    staleness: int
    live: int
    is_clean: bool
    is_torn: bool
    is_done: bool  # False if a swap found the parameter changed: nothing was applied


class Ask(Said, frozen=True, tag=18):
    """Worker: the connection broke. Which items of exchange `sequence`, from `first` on, were applied?

    The payload lists their parameters of `center`, in the order of the items.
    """

    center: str
    sequence: int
    first: int


class Told(Said, frozen=True, tag=19):
    """Host: those with a 1 in the payload, one byte each."""


class Take(Said, frozen=True, tag=20):
    """Worker: tell me the elements of array `center` whose flat positions are in the payload."""

    center: str
    count: int


class Put(Said, frozen=True, tag=21):
    """Worker: weigh my values into those elements; the payload holds `count` positions, then `count` values."""

    center: str
    count: int
    sequence: int
    alpha: float | int
    beta: float | int


class Find(Said, frozen=True, tag=22):
    """Worker: what is array `center`? (The answer is Opened with its table, or a Refusal.)"""

    center: str


class Names(Said, frozen=True, tag=23):
    """Worker: which arrays are there?"""


class Listing(Said, frozen=True, tag=24):
    """Host: the names in the payload, as JSON."""


class Save(Said, frozen=True, tag=25):
    """Worker: write all values to this file in the run's folder."""

    path: str


class Saved(Said, frozen=True, tag=26):
    """Host: done; this is its path on my machine."""

    path: str


class Bye(Said, frozen=True, tag=27):
    """Worker: I leave, and shall not ask again what was applied."""


class Join(Said, frozen=True, tag=40):
    """Worker: I am here, on this node; I am rank `rank`, or was before, or -1. `is_near`: the launcher gave me that
    rank, and I use the center in shared memory. `is_expected`: it gave me that rank, and I am on another machine.
    `is_back`: I was here before, and the connection broke. `guests`: my launcher, which is not yours, has started so
    many of us."""

    node: str
    pid: int
    rank: int
    restarts: int
    is_near: bool = False
    is_expected: bool = False
    is_back: bool = False
    guests: int = 0


class Joined(Said, frozen=True, tag=41):
    """Host: then you are rank `rank`, which is taken for the `incarnation`-th time; these settings are the run's."""

    rank: int
    incarnation: int
    world: int
    live: int
    seed: int
    rule: str
    pace: str
    wire: str
    host_deadline_s: float
    max_epochs: int


class Beat(Said, frozen=True, tag=42):
    """Worker: I am alive, and have made so many steps on so many samples; my new rows are in the payload. A number
    that came before is a repetition. `is_last`: I leave; `is_early`: before I have come to my end."""

    number: int
    is_last: bool = False
    steps: int = 0
    samples: int = 0
    is_early: bool = False


class Beaten(Said, frozen=True, tag=43):
    """Host: so am I; so many workers are alive. Beat again within `within_s`. If there is a reason to stop, stop.
    Somebody has changed the settings in `changes`, as JSON. `is_full`: your rows could not be written; keep them, and
    send them again later with the same number."""

    live: int
    within_s: float = 1.0
    stop: str = ""
    changes: str = ""
    is_full: bool = False


class Request(Said, frozen=True, tag=44):
    """Worker: I, rank `rank`, ask the controller `request`; what it needs to know is in the payload, as JSON.

    It is my question number `sequence`: if I ask it again, I have not heard the answer. I have made so many steps on
    so many samples; `is_finished`: my samples have come to their end.
    """

    sequence: int
    request: str
    rank: int
    incarnation: int
    steps: int
    samples: int
    is_finished: bool = False


class Reply(Said, frozen=True, tag=45):
    """Host: the answer to question `sequence` is in the payload, as JSON."""

    sequence: int


_HALF_TEXT = 6000  # characters; a header has 65,535 bytes


def refusal_of(error: Exception) -> Refusal:
    """The refusal that tells of an error; of a long text, its beginning and its end."""
    text = str(error)
    if len(text) > 2 * _HALF_TEXT:
        text = f"{text[:_HALF_TEXT]}\n... ({len(text):,} characters) ...\n{text[-_HALF_TEXT:]}"
    return Refusal(type(error).__name__, text)


Message = (
    Hello
    | Proof
    | Welcome
    | Refusal
    | Open
    | Create
    | Busy
    | Opened
    | Value
    | Pull
    | Offer
    | Answer
    | Ask
    | Told
    | Take
    | Put
    | Find
    | Names
    | Listing
    | Save
    | Saved
    | Bye
    | Join
    | Joined
    | Beat
    | Beaten
    | Request
    | Reply
    | FeedMessage
    | DoctorMessage
    | WatchMessage
)
