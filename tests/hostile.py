"""Hostile bytes for a live host, from strangers and from workers with the token, and honest workers beside them."""

import contextlib
import itertools
import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

import maniple
from maniple.wire.address import Address
from maniple.wire.auth import authenticate
from maniple.wire.codecs import CODECS
from maniple.wire.frames import HEAD, VERSION, Stream, decode_header, encode
from maniple.wire.messages import (
    AppliedQuery,
    AuthChallenge,
    AuthResponse,
    DoctorReply,
    DoctorRequest,
    Echo,
    ExchangeRequest,
    FindArray,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    JoinReply,
    JoinRequest,
    LineTest,
    ListArrays,
    ListFiles,
    OpenCenter,
    ParameterValue,
    PullChunk,
    PullElements,
    PushElements,
    ReadFile,
    Refusal,
    SaveArrays,
    WatcherCommand,
)
from tests.process.conftest import Run

T = TypeVar("T")

BURST = 40  # frames per connection of an insider
HONEST = "honest"
SIZE = 500

# Arrays of the attackers' own, where a change may be valid.
OWN = {name: np.zeros(count, name) for name, count in (("float32", 64), ("float64", 9), ("int64", 16), ("uint8", 5))}
ACTS = ("blend", "compensated", "replace", "swap", "elastic")
BAD_ACTS = ("", "blend\0", "__import__", "elastic")  # the last one of whole numbers
WEIGHTS = (0, 1, -1, 2, 2**62)
BAD_WEIGHTS = (0.5, 1e308, float("nan"), float("inf"), 2**64 - 1, -(2**63))
NUMBERS = (0, 1, 2, -1, 255, 2**16, 2**31, 2**40, 2**58, 2**62, 2**63 - 1, -(2**63), 2**64 - 1)
TABLES = (
    b"",
    b"[]",
    b"[" * 5000,
    b'[["a",[-5],"float32"]]',
    b'[["a",[-5],"float32"],["b",[9],"float32"]]',
    b'[["a",[4611686018427387904],"float64"]]',
    b'[["a",[4294967296,4294967296],"float32"]]',
    b'[["a",[18446744073709551616],"float32"]]',
    b'[["a",[3],"object"]]',
    b'[["a",[3],"float32"],["a",[3],"float32"]]',
    b'[["__metadata__",[3],"float32"]]',
    b'[["w",[3],"float32"]]',
    b'{"w": 1}',
)
PATHS = (
    "",
    ".",
    "../x.safetensors",
    "/tmp/x.h5",
    "a\0.safetensors",
    "x" * 300 + ".safetensors",
    "x.exe",
    "snapshot-1/x.h5",
)
FILES = ("token", "../x", "events/../token", "events/", "/etc/passwd", "run.json\0", "x" * 9999)
CHANGES = (b"", b"[]", b'{"alpha":', b'{"alpha":0.1}', b'{"":1}', b'{"alpha":[[]]}', b"[" * 5000, bytes(1 << 17))
SOUND = (
    {"event": "join", "node": "n", "pid": 7, "rank": 1},
    {"event": "log", "step": 3, "loss": 0.5, "epoch": 1},
    {
        "event": "progress",
        "step": 9,
        "samples": 90,
        "elapsed": 1.5,
        "exchange": 0.1,
        "ages": [1, 2],
        "together": {"2": 3},
    },
    {"event": "share", "rule": "EASGD()", "pace": "Every(10)", "parameters": 2, "bytes": 40, "digest": "ab"},
    {
        "event": "times",
        "epoch": 1,
        "batches": 2,
        "compute": 1.0,
        "exchange": 0.1,
        "data": 0.0,
        "others": 0.0,
        "loss": 1.0,
    },
    {"event": "validated", "epoch": 1, "loss": 0.25},
    {"event": "failed", "error": "x", "exit_code": 1, "traceback": "t"},
    {"event": "sampler", "size": 100, "validation": False},
    {"event": "exchange", "step": 3, "duration": 0.1, "bytes": 40, "staleness": 1.0},
    {"event": "leave", "failed": False},
)
# In place of a value of a sound row.
WILD = (
    b"9" * 400, b"-" + b"9" * 5000, b"[" * 1000 + b"]" * 1000, b"[" * 20, b'{"a":' * 40 + b"1" + b"}" * 40, b"1e999",
    b"-1", b"null", b"true", b'"nan"', b'"x"', b"[]", b"{}", b'"\xff"', b"1e300", b"-1e300", b"18446744073709551616",
    b'"\\ud800"', b'"' + b"x" * 5000 + b'"', b"0.5", b"NaN",
)  # fmt: skip
ROWS = (b"", b"{}\n", b"\xff\xfe", b'{"event":"progress"}\n', b'{"event":"failed"}\n', b'{"event":"log","loss":[]}\n')


class Server:
    """`maniple serve`, and what the kernel knows of its server process."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.folder = run.folder
        self.pid = run.await_event("host", "server")[0]["pid"]
        run.await_event("server", "serving")
        known = json.loads((self.folder / "host.json").read_text())
        self.tcp, self.unix = Address.parse(known["address"]), Address.parse(known["unix"] or known["address"])
        self.token = (self.folder / "token").read_text().strip()

    def connect(self, rng: random.Random) -> socket.socket:
        address = self.tcp if rng.random() < 0.2 else self.unix
        link = address.connect(5)
        if address is self.tcp:  # no port is kept busy after its connection
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return link

    @property
    def resident_bytes(self) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text()
        return 1024 * int(text.partition("VmRSS:")[2].split()[0])

    @property
    def held(self) -> tuple[int, int]:
        """Descriptors and threads."""
        process = Path(f"/proc/{self.pid}")
        return len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))


class Worker(threading.Thread):
    """An honest worker, which adds a known number to each element, again and again."""

    def __init__(self, address: Address, number: int) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.pushed = 0
        self.error: BaseException | None = None
        self._address, self._number = address, number
        self._over = threading.Event()

    def run(self) -> None:
        try:
            with maniple.Client(str(self._address), timeout_s=20) as client:
                while not self._over.is_set():
                    client.push(HONEST, np.full(SIZE, float(self._number)), alpha=1, beta=1)
                    self.pushed += self._number
                    self.times.append(time.monotonic())
                    self._over.wait(0.01)
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self._over.set()
        self.join(30)

    def longest_gap_s(self, begin: float, end: float) -> float:
        times = [begin, *(t for t in self.times if begin < t < end), end]
        return max(b - a for a, b in itertools.pairwise(times))


class Member(threading.Thread):
    """An honest member, which sends a numbered row with each heartbeat."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.sent, self.rank = 0, -1
        self.error: BaseException | None = None
        self._server = server
        self._over = threading.Event()

    def run(self) -> None:
        try:
            link = self._server.unix.connect(5)
            link.settimeout(None)
            with contextlib.closing(link):
                stream = Stream(link)
                stream.set_timeout(60)
                authenticate(stream, self._server.token, "control", "honest")
                stream.send(JoinRequest("node", 1, -1, 0))
                self.rank = stream.receive_message().rank
                is_last = False
                while not is_last:
                    is_last = self._over.wait(0.05)
                    row = {
                        "event": "log",
                        "timestamp": time.time(),
                        "step": self.sent,
                        "loss": 1.0,
                        "number": self.sent,
                    }
                    stream.send(Heartbeat(self.sent + 1, is_last=is_last), json.dumps(row).encode() + b"\n")
                    assert isinstance(answer := stream.receive_message(), HeartbeatReply), answer
                    self.sent += 1
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self._over.set()
        self.join(90)


class Attacker:
    """Frames of one kind of attack, from one seed."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server, self.rng = server, random.Random(seed)
        self.worker = f"evil{seed}"
        self.counts: Counter[str] = Counter()
        self._sequence = self._beat = 0

    # A stranger, who does not know the token

    def stranger(self) -> None:
        """One connection that does not get in."""
        self.counts["frames mutated"] += 1
        with contextlib.closing(self.server.connect(self.rng)) as link:
            self._converse(link, self._strange(), 1)

    def _strange(self) -> bytes:
        rng = self.rng
        proof = AuthResponse(
            rng.randbytes(32), rng.randbytes(32), rng.choice(["data", "control", "doctor", "x"]), "evil"
        )
        whole = encode(proof, 0)
        return rng.choice(
            [
                lambda: rng.randbytes(rng.randrange(200)),
                lambda: whole[: rng.randrange(len(whole))],
                lambda: self._flipped(whole),
                lambda: whole,
                lambda: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                lambda: HEAD.pack(b"mnpl", VERSION, 0, 0xFFFF, 0) + bytes(0xFFFF),
                lambda: HEAD.pack(b"mnpl", VERSION, 0, 40, 2**63) + rng.randbytes(2000),
                lambda: HEAD.pack(b"mnpl", VERSION + 1, 0, 40, 0) + rng.randbytes(40),
                lambda: encode(AuthChallenge(rng.randbytes(32)), 0),
                lambda: self._mutated(*self._request()),
            ]
        )()

    # A member, whose rows are damaged

    def rows(self, heartbeats: int, per_heartbeat: int) -> None:
        """One connection that joins, and sends damaged rows with each heartbeat; each must be answered."""
        with contextlib.closing(self._introduced("control")) as link:
            stream = Stream(link)
            stream.set_timeout(60)
            stream.send(JoinRequest("node", 1, -1, 0))
            assert isinstance(stream.receive_message(), JoinReply)
            self.counts["connections"] += 1
            for _ in range(heartbeats):
                self._beat += 1
                rows = b"".join(self._row() for _ in range(per_heartbeat))
                stream.send(Heartbeat(self._beat), rows)
                answer = stream.receive_message()
                assert isinstance(answer, HeartbeatReply), answer
                self.counts["rows mutated"] += per_heartbeat
                self.counts["frames"] += 1
                self.counts["answers"] += 1

    def _row(self) -> bytes:
        rng = self.rng
        row = {"timestamp": 1.7e9 + rng.random() * 1e5, "datestamp": "2026-01-01 00:00"} | rng.choice(SOUND)
        row = {"event": row.pop("event")} | row
        line = json.dumps(row, separators=(",", ":")).encode()
        kind = rng.random()
        if kind < 0.5:  # another value
            name = rng.choice(list(row))
            value = json.dumps(row[name], separators=(",", ":")).encode()
            return line.replace(f'"{name}":'.encode() + value, f'"{name}":'.encode() + rng.choice(WILD)) + b"\n"
        if kind < 0.8:
            return self._flipped(line) + b"\n"
        if kind < 0.9:
            return line[: rng.randrange(len(line))] + b"\n"
        if kind < 0.95:
            return line  # glued to the next
        return rng.randbytes(rng.randrange(60)) + b"\n"

    def questions(self, count: int) -> None:
        """One connection with wild questions that are refused one by one, and leave the connection as it is."""
        rng = self.rng
        with contextlib.closing(self._introduced("data")) as link:
            frames: list[bytes] = []
            for _ in range(count):
                name = "".join(chr(rng.randrange(1, 0x2FF)) for _ in range(rng.randrange(40)))
                message = rng.choice(
                    [
                        FindArray(f"array:{name}"),
                        PullChunk(f"array:{name}", self._number(), name),
                        SaveArrays(f"{name}.exe"),
                    ]
                )
                frames.append(encode(message, 0))
            self.counts["frames mutated"] += count
            self._converse(link, b"".join(frames), count)

    # An insider, who knows it

    def insider(self) -> None:
        """One connection that gets in, and a burst of requests of which at least one is broken."""
        with contextlib.closing(self._introduced("data")) as link:
            frames = [*(self._frame() for _ in range(BURST - 1)), self._mutated(*self._request())]
            self._converse(link, b"".join(frames), len(frames))

    def doctor(self) -> None:
        """One connection that examines the host, and does not stop where it should."""
        with contextlib.closing(self._introduced("doctor")) as link:
            frames = [self._question() for _ in range(5)]
            self._converse(link, b"".join(frames), len(frames))

    def _question(self) -> bytes:
        rng = self.rng
        message = rng.choice(
            [
                DoctorRequest(),
                Echo(),
                LineTest(self._number()),
                DoctorReply(0.0, "node", self._number()),
                PullChunk("center-0", 0, "float32"),
            ]
        )
        payload = rng.randbytes(rng.choice([0, 3, 70_000]))
        return self._mutated(message, payload) if rng.random() < 0.3 else encode(message, len(payload)) + payload

    def member(self) -> None:
        """One connection that joins, and sends wild heartbeats."""
        with contextlib.closing(self._introduced("control")) as link:
            frames = [
                encode(
                    JoinRequest("node", self._mostly((1, 99), NUMBERS), self.rng.randrange(-1, 9), self._number()), 0
                )
            ]
            for _ in range(5):
                rows = self.rng.choice(ROWS)
                frames.append(
                    self._mutated(Heartbeat(1), rows)
                    if self.rng.random() < 0.3
                    else encode(Heartbeat(1), len(rows)) + rows
                )
            self._converse(link, b"".join(frames), len(frames))

    def watcher(self) -> None:
        """One connection that watches, asks for what is none of its business, and gives orders that make no sense."""
        with contextlib.closing(self._introduced("watch")) as link:
            good = [
                (ListFiles(), b""),
                (ReadFile("run.json", 0), b""),
                (ReadFile("events/host.jsonl", self.rng.randrange(99)), b""),
            ]
            bad = [
                (ReadFile(self.rng.choice(FILES), self._number()), b""),
                (WatcherCommand(self.rng.choice(["change", "dance", ""]), "evil"), self.rng.choice(CHANGES)),
            ]
            frames = [encode(message, len(payload)) + payload for message, payload in self.rng.choices(good, k=5)]
            message, payload = self.rng.choice(bad)
            broken = encode(message, len(payload)) + payload
            frames.append(self._mutated(message, payload) if self.rng.random() < 0.3 else broken)
            self._converse(link, b"".join(frames), len(frames))

    def _introduced(self, role: str) -> socket.socket:
        link = self.server.connect(self.rng)
        stream = Stream(link)
        link.settimeout(None)
        stream.set_timeout(10)
        authenticate(stream, self.server.token, role, self.worker)
        return link

    def _frame(self) -> bytes:
        message, payload = self._request()
        return self._mutated(message, payload) if self.rng.random() < 0.01 else encode(message, len(payload)) + payload

    def _mutated(self, message, payload: bytes) -> bytes:
        """A frame that was damaged. What it says of the honest array only reads it, however damaged."""
        rng = self.rng
        frame = encode(message, len(payload)) + payload
        header = frame[HEAD.size : len(frame) - len(payload)]
        other, rest = self._request()
        if _changes_honest(message) or _changes_honest(other):
            return frame  # damaged, it might become a valid change
        self.counts["frames mutated"] += 1
        return rng.choice(
            [
                lambda: self._flipped(frame),
                lambda: frame[: rng.randrange(len(frame))],
                lambda: frame + rng.randbytes(rng.randrange(1, 50)),
                lambda: HEAD.pack(b"mnpl", VERSION, 0, rng.randrange(0x10000), len(payload)) + header + payload,
                lambda: HEAD.pack(b"mnpl", VERSION, 0, len(header), abs(self._number())) + header + payload,
                lambda: encode(other, len(payload)) + payload,  # another's header
                lambda: frame[: HEAD.size] + rng.randbytes(len(header)) + payload,
                lambda: encode(message, len(rest)) + rest,  # another's payload
            ]
        )()

    def _flipped(self, frame: bytes) -> bytes:
        damaged = bytearray(frame)
        for _ in range(self.rng.randrange(1, 4)):
            damaged[self.rng.randrange(len(damaged))] ^= 1 << self.rng.randrange(8)
        return bytes(damaged)

    def _request(self):
        rng = self.rng
        kind = rng.random()
        if kind < 0.3:
            return self._offer()
        if kind < 0.45:
            return PullChunk(self._any_name(), self._index(), self._codec()), b""
        if kind < 0.58:
            count = rng.randrange(4)
            return PullElements(f"array:{rng.choice(list(OWN))}", count), self._positions(count)
        if kind < 0.7:
            name, own = rng.choice(list(OWN.items()))
            count = rng.randrange(4)
            put = PushElements(
                f"array:{name}",
                count,
                self._next(),
                self._mostly(WEIGHTS, BAD_WEIGHTS),
                self._mostly(WEIGHTS, BAD_WEIGHTS),
            )
            return put, self._positions(count) + rng.randbytes(count * own.itemsize)
        if kind < 0.8:
            sequence = self._mostly(range(self._sequence, self._sequence + 3), NUMBERS)
            ask = AppliedQuery(self._any_name(), sequence, self._mostly(range(9), NUMBERS))
            return ask, self._positions(rng.randrange(4))
        if kind < 0.98:
            return FindArray(self._any_name()), b""
        return rng.choice(
            [
                lambda: (OpenCenter(f"center-{rng.randrange(5, 9)}", "note"), rng.choice(TABLES)),
                lambda: (OpenCenter(f"array:new{rng.randrange(4)}", "note"), rng.choice(TABLES)),
                lambda: (OpenCenter(f"array:{HONEST}", "note"), rng.choice(TABLES)),
                lambda: (ParameterValue(self._index()), rng.randbytes(rng.choice([0, 12]))),
                lambda: (ListArrays(), b""),
                lambda: (SaveArrays(rng.choice(PATHS)), b""),
                lambda: (PullElements("array:int64", 2**50), bytes(8)),
                lambda: (Goodbye(), b""),
                self._harmless,
            ]
        )()

    def _offer(self):
        rng = self.rng
        name, own = rng.choice(list(OWN.items()))
        codec, answer = self._codec(), self._mostly(("value", "move", "none"), ("all", ""))
        size = CODECS[codec].size_bytes(own.size, own.itemsize) if codec in CODECS else 0
        number = self._index()
        a, b = self._mostly(WEIGHTS, BAD_WEIGHTS), self._mostly(WEIGHTS, BAD_WEIGHTS)
        act = self._mostly(ACTS if own.dtype.kind == "f" else ACTS[:-1], BAD_ACTS)
        offer = ExchangeRequest(f"array:{name}", number, self._next(), 0, act, a, b, codec, self._number(), answer)
        return offer, rng.randbytes(size)

    def _harmless(self):
        """An offer to the honest array that must not change it: nothing in it is finite, or its size is wrong."""
        rng = self.rng
        sequence = self._next() if rng.random() < 0.8 else 0
        size = SIZE if rng.random() < 0.8 else SIZE - 1
        offer = ExchangeRequest(
            f"array:{HONEST}", 0, sequence, 0, self._mostly(ACTS, BAD_ACTS), 1.0, 1.0, "float32", -1, "none"
        )
        return offer, np.full(size, np.nan).tobytes()

    def _any_name(self) -> str:
        return self.rng.choice([*(f"array:{name}" for name in OWN), f"array:{HONEST}", "center-5"])

    def _mostly(self, good: Sequence[T], bad: Sequence[T]) -> T:
        """What is well-formed, but for one in a hundred."""
        return self.rng.choice(good if self.rng.random() < 0.99 else bad)

    def _index(self) -> int:
        return self._mostly((0,), NUMBERS)

    def _number(self) -> int:
        return self.rng.choice(NUMBERS)

    def _codec(self) -> str:
        return self._mostly(("float32",), (*CODECS, "gzip"))

    def _positions(self, count: int) -> bytes:
        return b"".join(struct.pack("<q", self._mostly(range(5), (-1, 5, 2**40, -(2**63)))) for _ in range(count))

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _converse(self, link: socket.socket, data: bytes, frames: int) -> None:
        """Send all, read all answers until the host has closed."""
        self.counts["connections"] += 1
        self.counts["frames"] += frames
        link.settimeout(10)
        answers = b""
        try:
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)
        except TimeoutError:
            raise  # the host must always read or close
        except OSError:
            pass  # it has closed already
        with contextlib.suppress(ConnectionError):
            while piece := link.recv(1 << 16):
                answers += piece
        while len(answers) >= HEAD.size:
            _, _, _, header_bytes, payload_bytes = HEAD.unpack(answers[: HEAD.size])
            header = answers[HEAD.size : HEAD.size + header_bytes]
            answers = answers[HEAD.size + header_bytes + payload_bytes :]
            self.counts["answers"] += 1
            if len(header) == header_bytes and isinstance(answer := decode_header(header), Refusal):
                self.counts[f"refused: {answer.kind}"] += 1


def _changes_honest(message) -> bool:
    return isinstance(message, ExchangeRequest) and message.center == f"array:{HONEST}"


def attack(server: Server, seed: int, frames: int, counts: Counter[str]) -> int:
    """At least `frames` hostile frames, beside a crowd of silent strangers; gives the resident bytes after it."""
    rng = random.Random(seed)
    attackers = [Attacker(server, 1000 * seed + k) for k in range(3)]
    silent = [server.connect(rng) for _ in range(120)]
    silent[0].sendall(b"m")

    def strange(attacker: Attacker) -> None:
        for _ in range(1000):
            attacker.stranger()
        for _ in range(50):
            attacker.member()
            attacker.doctor()
            attacker.watcher()
            attacker.questions(50)
        for _ in range(4):
            attacker.rows(10, 100)

    def inside(attacker: Attacker) -> None:
        while attacker.counts["frames"] < frames // 2:
            attacker.insider()

    with ThreadPoolExecutor(3) as pool:
        work = [pool.submit(strange, attackers[0]), *(pool.submit(inside, attacker) for attacker in attackers[1:])]
        for one in work:
            one.result(100)
    for link in silent:
        link.close()
    for attacker in attackers:
        counts.update(attacker.counts)
    return server.resident_bytes
