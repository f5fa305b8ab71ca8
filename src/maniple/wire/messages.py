"""Messages of the protocol, grouped by the connection that carries them. docs/protocol.md shows how they follow.

A message is the header of one frame: a MessagePack array of its tag and its fields, in order. Unknown tags, unknown
fields and fields of another type are refused. What is large, or has no fixed form, follows as the frame's payload.
Tags are part of the protocol; a retired tag is not used again.
"""

import re
from typing import Any

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages. Defining a subclass is all it takes to add a message."""


# Any connection: authentication (see `auth`) and refusals.


class AuthChallenge(Message, frozen=True, tag=1):
    """Sent by the host: prove that you know the token. `nonce` is random."""

    nonce: bytes


class AuthResponse(Message, frozen=True, tag=2):
    """Sent by the worker: the proof, a nonce for the host's own proof, the connection's role and the worker's name."""

    nonce: bytes
    mac: bytes
    role: str
    worker: str


class Welcome(Message, frozen=True, tag=3):
    """Sent by the host: its proof, the center's lineage, and how often the center was restored from a snapshot."""

    mac: bytes
    lineage: str
    restored: int
    restored_from: float  # when the snapshot was written, seconds since the epoch; 0 without one


class Refusal(Message, frozen=True, tag=4):
    """Sent by either side instead of a reply. `kind` is the name of the error to raise, `reason` its text."""

    kind: str
    reason: str


_HALF_REASON = 6000  # characters, of up to 4 bytes each: both halves fit into a header of 65,535 bytes


def refusal_of(error: Exception) -> Refusal:
    """Describe `error` to the other side. A long text loses its middle."""
    text = str(error)
    if len(text) > 2 * _HALF_REASON:
        text = f"{text[:_HALF_REASON]}\n... ({len(text):,} characters) ...\n{text[-_HALF_REASON:]}"
    return Refusal(type(error).__name__, text)


# Role "data": opening a center.


class OpenCenter(Message, frozen=True, tag=10):
    """Sent by the worker: open the center with this name. Payload: its table of parameters. `note` names the rule."""

    center: str
    note: str
    gate: str = ""  # the gate that all workers must have, and what it judges


class CreateCenter(Message, frozen=True, tag=11):
    """Sent by the host: the center does not exist yet. Send your values as `ParameterValue`; they become the center."""


class CenterBusy(Message, frozen=True, tag=12):
    """Sent by the host: another worker is creating the center. Open it again shortly."""


class CenterOpened(Message, frozen=True, tag=13):
    """Sent by the host: the center exists. Payload: its table of parameters. `created`: from your values."""

    created: bool
    live: int


class ParameterValue(Message, frozen=True, tag=14):
    """Sent by the worker that creates a center. Payload: the value of parameter `i`."""

    i: int


# Role "data": exchanges.


class PullChunk(Message, frozen=True, tag=15):
    """Sent by the worker: return the value of a chunk, encoded by `codec`; plain if `with_state` is set."""

    center: str
    chunk: int
    codec: str = "float32"
    with_state: bool = False  # followed by the rule's state of the chunk


class ChunkValue(Message, frozen=True, tag=28):
    """Sent by the host. Payload: the value of a chunk, or of elements of a named array."""

    chunk: int
    version: int = 0
    is_torn: bool = False


class ExchangeRequest(Message, frozen=True, tag=16):
    """Sent by the worker: apply `operation` with its parameters `a`, `b` and `n` to a chunk and to the payload.

    This is item `item` of exchange `sequence` of this worker, which last saw version `seen` of the chunk.
    """

    center: str
    chunk: int
    sequence: int
    item: int
    operation: str
    a: float | int
    b: float | int
    codec: str
    seen: int
    answer: str  # what the reply's payload holds: the replica's new "value", its "move", or "none"
    with_state: bool = False  # the payload is a record: the chunk and the rule's state of it
    n: int = 0  # a third parameter of the operation


class ExchangeReply(Message, frozen=True, tag=17):
    """Sent by the host: item `item` is applied. Payload: the replica's new value or its move, as requested."""

    item: int
    version: int
    staleness: int
    live: int
    is_clean: bool  # False if non-finite elements were refused
    is_torn: bool
    is_done: bool  # False if nothing was applied: a swap found a newer version, or a lock could not be taken
    is_locked: bool = False  # the holder of the chunk's lock makes no progress; later items were not tried
    factor: float = 1.0  # by which the gate has clipped the contribution; 0: it was refused
    weight: float = 1.0  # by which it was multiplied because it was stale


class AppliedQuery(Message, frozen=True, tag=18):
    """Sent by the worker after a reconnect: which items of exchange `sequence`, from `first` on, were applied?

    Payload: the parameters of `center` that these items were for, as int64.
    """

    center: str
    sequence: int
    first: int


class AppliedReply(Message, frozen=True, tag=19):
    """Sent by the host. Payload: one byte per item, 1 if it was applied."""


class Goodbye(Message, frozen=True, tag=27):
    """Sent by the worker: it leaves and will not send an `AppliedQuery` any more."""


# Role "data": named arrays.


class PullElements(Message, frozen=True, tag=20):
    """Sent by the worker: return `count` elements of array `center`. Payload: their flat positions, as int64."""

    center: str
    count: int


class PushElements(Message, frozen=True, tag=21):
    """Sent by the worker: blend values into elements of array `center`. Payload: `count` positions, `count` values."""

    center: str
    count: int
    sequence: int
    alpha: float | int
    beta: float | int


class FindArray(Message, frozen=True, tag=22):
    """Sent by the worker: describe array `center`. The reply is `CenterOpened` with its table, or a `Refusal`."""

    center: str


class ListArrays(Message, frozen=True, tag=23):
    """Sent by the worker: which arrays exist?"""


class ArrayList(Message, frozen=True, tag=24):
    """Sent by the host. Payload: the names of all arrays, as JSON."""


class SaveArrays(Message, frozen=True, tag=25):
    """Sent by the worker: write all values to file `path` in the run folder."""

    path: str


class ArraysSaved(Message, frozen=True, tag=26):
    """Sent by the host: the file is written; `path` is its full path on the host's machine."""

    path: str


# Role "control": membership and heartbeats.


class JoinRequest(Message, frozen=True, tag=40):
    """Sent by the worker: let me join the run from `node`. `rank` is -1, or the rank I have or had."""

    node: str
    pid: int
    rank: int
    restarts: int
    is_near: bool = False  # the launcher gave me this rank, and I use the center in shared memory
    is_expected: bool = False  # the launcher gave me this rank on another machine
    is_back: bool = False  # I had joined before, and the connection broke
    external_workers: int = 0  # how many workers an external launcher (torchrun, srun, mpirun) has started


class JoinReply(Message, frozen=True, tag=41):
    """Sent by the host: your rank, how many workers have had it before you, and the run's settings."""

    rank: int
    incarnation: int
    world: int
    live: int
    settings: dict[str, str | int | float | bool | None]  # those that `settings/options` marks with `joins`


class Heartbeat(Message, frozen=True, tag=42):
    """Sent by the worker. Payload: its new rows, which the host writes once however often it receives `number`."""

    number: int
    is_last: bool = False  # the worker leaves
    steps: int = 0
    samples: int = 0
    is_early: bool = False  # it leaves before it has finished training


class HeartbeatReply(Message, frozen=True, tag=43):
    """Sent by the host: `live` workers are alive. The next heartbeat is due within `within_s`."""

    live: int
    within_s: float = 1.0
    stop: str = ""  # the reason to stop training, if there is one
    changes: str = ""  # settings that were changed during the run, as JSON
    is_full: bool = False  # the rows could not be written: send them again later with the same number
    relative_speed: float = 1.0  # your steps per second, divided by those that one worker in ten exceeds; at most 1


# Role "ask": requests to the controller.


class ControllerRequest(Message, frozen=True, tag=44):
    """Sent by the worker: a request to the controller. Payload: its arguments, as JSON.

    A request that is repeated after a reconnect keeps its `sequence`, and the controller handles it once.
    """

    sequence: int
    request: str
    rank: int
    incarnation: int
    steps: int
    samples: int
    is_finished: bool = False  # the worker's samples are exhausted


class ControllerReply(Message, frozen=True, tag=45):
    """Sent by the host. Payload: the controller's reply to request `sequence`, as JSON."""

    sequence: int


# Role "feed": batches from producers to workers.


class RegisterProducer(Message, frozen=True, tag=50):
    """Sent by the producer: register as producer `index` of `count` (-1: the next free one) of this feed."""

    feed: str
    index: int
    count: int
    high_water: int  # how many batches may wait in the feed


class ProducerRegistered(Message, frozen=True, tag=51):
    """Sent by the host: you are producer `index` of `count`, and your first `pushed` batches have arrived."""

    index: int
    count: int
    pushed: int


class PushBatch(Message, frozen=True, tag=52):
    """Sent by the producer: batch `number` has this size. May I send it?"""

    number: int
    size_bytes: int


class SendBatch(Message, frozen=True, tag=53):
    """Sent by the host: there is room for the batch. Send it."""


class BatchData(Message, frozen=True, tag=54):
    """Sent by either side. Payload: batch `number`."""

    number: int


class BatchReceived(Message, frozen=True, tag=55):
    """Sent by either side: batch `number` has arrived, and the sender may discard it."""

    number: int


class ProducerEnd(Message, frozen=True, tag=56):
    """Sent by the producer: no more batches follow. Payload: its traceback, if it has failed."""

    is_failure: bool


class FetchBatch(Message, frozen=True, tag=57):
    """Sent by the worker: return the next batch of this feed."""

    feed: str


class NoBatchYet(Message, frozen=True, tag=58):
    """Sent by the host as a sign of life while there is no batch, or no room for one."""


class FeedOver(Message, frozen=True, tag=59):
    """Sent by the host: all producers have ended and no batch is left. To a producer: its end is noted."""


# Role "doctor": checks of a running host.


class DoctorRequest(Message, frozen=True, tag=60):
    """Sent by the doctor: describe yourself."""


class DoctorReply(Message, frozen=True, tag=61):
    """Sent by the host: its time, node and live workers. Payload: versions and centers, as JSON."""

    time: float
    node: str
    live: int


class Echo(Message, frozen=True, tag=62):
    """Sent by the doctor, and returned by the host with the same payload."""


class LineTest(Message, frozen=True, tag=63):
    """Sent by the doctor: discard the payload, and reply with `reply_bytes` bytes. The reply is one such message."""

    reply_bytes: int = 0


# Role "watch": reading and steering a run from elsewhere.

FILE_PART_BYTES = 1 << 20  # limit of one `FilePart`: large enough for throughput, small enough for any watcher
WATCHED_FILE = re.compile(r"run\.json|events/[A-Za-z0-9_-]+\.jsonl")  # the only files of a run folder that are shown


class ListFiles(Message, frozen=True, tag=70):
    """Sent by the watcher: which files describe the run?"""


class FileList(Message, frozen=True, tag=71):
    """Sent by the host. Payload: name, size and modification time of each file, as JSON."""

    is_over: bool = False  # the run has ended


class ReadFile(Message, frozen=True, tag=72):
    """Sent by the watcher: return file `name` from byte `offset` on."""

    name: str
    offset: int


class FilePart(Message, frozen=True, tag=73):
    """Sent by the host. Payload: up to `FILE_PART_BYTES` of the file; empty at its end."""


class WatcherCommand(Message, frozen=True, tag=74):
    """Sent by a watcher named `who`: "stop" the run, write a "snapshot", or "change" settings (payload: JSON)."""

    what: str
    who: str


class CommandDone(Message, frozen=True, tag=75):
    """Sent by the host: the command is done. `text` tells the user what happened."""

    text: str


# Role "peers": the mailbox of a remote worker that exchanges with peers.


class OpenMailbox(Message, frozen=True, tag=80):
    """Sent by the worker: open my mailbox for the model of `center`. `rule` describes the rule and its settings."""

    center: str
    rule: str
    is_back: bool = False  # I had opened it before, and the connection broke


class MailboxOpened(Message, frozen=True, tag=81):
    """Sent by the host: the mailbox includes your changes up to number `change`. Payload: the published values."""

    change: int
    step: int
    weight: float
    has_predecessor: bool  # an earlier process of this rank has published these values


class ExchangeWithPeers(Message, frozen=True, tag=82):
    """Sent by the worker: add change `number` to the published values, then take and send messages.

    Payload: by how much training has changed the replica, encoded by `codec`.
    """

    number: int
    step: int  # of this worker and its predecessors
    codec: str
    rule: str  # its settings may change during the run
    is_sending: bool = False
    is_last: bool = False  # the worker leaves
    is_early: bool = False  # before it has finished training


class ExchangedWithPeers(Message, frozen=True, tag=83):
    """Sent by the host: it is done. Payload: by how much the exchanges have changed the values, encoded likewise."""

    weight: float
    sent: int
    received: int
    skipped: int
    returned: int
    staleness: float


MESSAGE_TYPES = tuple(Message.__subclasses__())


def to_json(value: Any) -> Any:
    """Convert NumPy and torch scalars and arrays for msgspec's JSON encoder (its `enc_hook`)."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in JSON")
