"""The wire: frames whose size is bounded before they are read, streams of them, and who is let in."""

import os
import signal
import socket
import threading
import time
import typing
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maniple.clock import Deadline
from maniple.errors import BadFrame, NotAdmitted
from maniple.wire.auth import authenticate, authenticate_client
from maniple.wire.frames import (
    HEAD,
    LOOKS,
    MAX_HEADER_BYTES,
    VERSION,
    Stalled,
    Stream,
    decode_head,
    decode_header,
    encode,
)
from maniple.wire.messages import (
    MESSAGE_TYPES,
    AppliedReply,
    AuthChallenge,
    AuthResponse,
    ExchangeRequest,
    FindArray,
    Goodbye,
    Heartbeat,
    ParameterValue,
    PullChunk,
    Refusal,
    Welcome,
    refusal_of,
)

KINDS = MESSAGE_TYPES
_FIELDS = {
    int: st.integers(-(2**63), 2**64 - 1),
    bool: st.booleans(),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=40),
    float: st.floats(allow_nan=False),
    float | int: st.floats(allow_nan=False) | st.integers(-(2**63), 2**64 - 1),
    dict[str, str | int | float | bool | None]: st.dictionaries(
        st.text(max_size=20),
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False)
        | st.text(max_size=20),
    ),
}


def _messages(kind):
    return st.builds(kind, *(_FIELDS[hint] for hint in typing.get_type_hints(kind).values()))


MESSAGES = st.sampled_from(KINDS).flatmap(_messages)
TOKEN = "token of a test"


@pytest.fixture
def pair():
    """Makes two streams that talk to each other; all are closed at the end."""
    made = []

    def pair(**limits):
        for end in (ends := socket.socketpair()):
            end.settimeout(None)
            made.append(end)
        streams = [Stream(end, **limits) for end in ends]
        for stream in streams:
            stream.set_timeout(10)
        return streams

    yield pair
    for end in made:
        end.close()


# Frames


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_bad_frame(data):
    _decode_or_refuse(data)


@given(MESSAGES, st.data())
def test_a_mutated_header_is_a_message_or_a_bad_frame(message, data):
    header = bytearray(msgspec.msgpack.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(header) - 1))
        header[at] ^= data.draw(st.integers(1, 255))
    _decode_or_refuse(bytes(header[: data.draw(st.integers(0, len(header)))]))


@given(st.binary(min_size=HEAD.size, max_size=HEAD.size), st.booleans())
def test_any_head_is_read_or_refused_within_its_limit(head, is_ours):
    head = b"mnpl\x03\x00" + head[6:] if is_ours else head
    try:
        header_bytes, payload_bytes = decode_head(head, max_payload_bytes=1000)
    except BadFrame:
        return
    assert 0 <= header_bytes <= MAX_HEADER_BYTES
    assert 0 <= payload_bytes <= 1000


@pytest.mark.parametrize("length", [2**16, 2**28, 2**32 - 1])
@pytest.mark.parametrize("opening", ["9412dd", "92dd", "dd", "9201c6", "9304db"])  # lists, bytes, text
def test_a_length_that_lies_is_refused_without_memory_for_it(opening, length):
    with pytest.raises(BadFrame):
        decode_header(bytes.fromhex(opening) + length.to_bytes(4, "big"))


def test_deep_nesting_is_refused():
    with pytest.raises(BadFrame):
        decode_header(b"\x91" * 60_000)


@given(MESSAGES, st.integers(0, 2**62))
def test_every_message_round_trips(message, payload_bytes):
    frame = encode(message, payload_bytes)
    header_bytes, announced = decode_head(frame[: HEAD.size], max_payload_bytes=2**62)
    assert announced == payload_bytes
    assert header_bytes == len(frame) - HEAD.size
    assert decode_header(frame[HEAD.size :]) == message


def test_no_two_messages_have_the_same_tag():
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert len(set(tags)) == len(tags) == 53


def test_the_bytes_of_protocol_version_4_do_not_change():
    assert encode(PullChunk("center-0", 3), 0) == (
        b"mnpl\x04\x00\x15\x00" + bytes(8) + b"\x95\x0f\xa8center-0\x03\xa7float32\xc2"
    )
    offer = ExchangeRequest("center-0", 3, 7, 2, "elastic", 0.5, 1, "bfloat16", 6, "value")
    assert encode(offer, 12) == (
        b"mnpl\x04\x00\x32\x00\x0c\x00\x00\x00\x00\x00\x00\x00"
        b"\x9d\x10\xa8center-0\x03\x07\x02\xa7elastic\xcb\x3f\xe0\x00\x00\x00\x00\x00\x00\x01\xa8bfloat16\x06\xa5value\xc2\x00"
    )


def test_a_header_with_a_field_too_many_is_refused():
    with pytest.raises(BadFrame, match="no message of this protocol"):
        decode_header(msgspec.msgpack.encode([27, "more"]))


def test_a_wrong_magic_is_named():
    with pytest.raises(BadFrame, match=r"b'HTTP' does not begin a frame of maniple\. Is another service on this port"):
        decode_head(b"HTTP/1.1 400 Bad", max_payload_bytes=100)


def test_a_wrong_version_is_named():
    with pytest.raises(BadFrame, match=r"speaks version 5 of the protocol, this one 4\. Install the same maniple"):
        decode_head(HEAD.pack(b"mnpl", 5, 0, 10, 0), max_payload_bytes=100)


def test_a_payload_above_the_limit_is_named():
    head = HEAD.pack(b"mnpl", 4, 0, 10, 101)
    with pytest.raises(BadFrame, match=r"a payload of 101 bytes is announced, where at most 100 may come"):
        decode_head(head, max_payload_bytes=100)


def test_a_header_above_the_limit_is_named(pair):
    here, there = pair()
    here.send(FindArray("x" * 600))
    with pytest.raises(BadFrame, match=r"a header of 60\d bytes is announced, where at most 512 may come"):
        there.receive(max_header_bytes=512)


def test_a_message_too_long_for_a_frame_is_not_sent(pair):
    here, _ = pair()
    with pytest.raises(ValueError, match="does not fit into a frame"):
        here.send(FindArray("x" * MAX_HEADER_BYTES))
    assert here.sent_bytes == 0


# Streams


@given(st.binary(max_size=100), st.booleans())
def test_any_bytes_in_a_stream_are_a_message_or_refused(data, is_ours):
    ends = socket.socketpair()
    try:
        ends[0].sendall(HEAD.pack(b"mnpl", VERSION, 0, max(0, len(data) - 3), 0) + data if is_ours else data)
        ends[0].shutdown(socket.SHUT_WR)
        try:
            message, _ = Stream(ends[1]).receive()
            assert isinstance(message, KINDS)
        except (BadFrame, ConnectionError):
            pass
    finally:
        for end in ends:
            end.close()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 4), (0, 5)])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i8", "u1", "c8"])
def test_an_array_arrives_as_it_was(pair, shape, dtype):
    here, there = pair()
    array = np.arange(np.prod(shape), dtype=dtype).reshape(shape)
    here.send(ParameterValue(5), array)
    message, size = there.receive()
    assert (message, size) == (ParameterValue(5), array.nbytes)
    got = np.full_like(array, 9)
    there.receive_into(got)
    np.testing.assert_array_equal(got, array)
    assert there.received_bytes == here.sent_bytes


def test_a_payload_may_come_in_parts(pair):
    here, there = pair()
    here.send(ParameterValue(0), np.arange(3), np.zeros(0), np.arange(2.0))
    _, size = there.receive()
    positions, values = np.empty(3, np.int64), np.empty(2)
    assert size == positions.nbytes + values.nbytes
    there.receive_into(positions)
    there.receive_into(values)
    assert (positions.tolist(), values.tolist()) == ([0, 1, 2], [0, 1])


def test_frames_follow_each_other(pair):
    here, there = pair()
    for i in range(100):
        here.send(ParameterValue(i), bytes([i]))
    for i in range(100):
        assert there.receive() == (ParameterValue(i), 1)
        assert there.receive_bytes(1, at_most=1) == bytes([i])


def test_a_payload_where_none_is_due_is_refused(pair):
    here, there = pair()
    here.send(Goodbye(), b"x")
    with pytest.raises(BadFrame, match="Goodbye came with a payload"):
        there.receive_message()


def test_a_small_payload_has_a_limit(pair):
    here, there = pair()
    here.send(Heartbeat(1), b"12345")
    _, size = there.receive()
    with pytest.raises(BadFrame, match="5 bytes is announced, where at most 4 may come"):
        there.receive_bytes(size, at_most=4)


def test_a_closed_peer_is_a_connection_error(pair):
    here, there = pair()
    here.close()
    with pytest.raises(ConnectionError, match="closed the connection"):
        there.receive()
    with pytest.raises(ConnectionError):
        there.send(Goodbye())


def test_a_truncated_frame_is_a_connection_error(pair):
    frame = encode(ParameterValue(1), 8) + bytes(8)
    for size in range(1, len(frame)):
        here, there = pair()
        here._pipe.sendall(frame[:size])
        here.close()
        with pytest.raises(ConnectionError):
            there.receive_bytes(there.receive()[1], at_most=8)


def test_an_aborted_stream_wakes_who_waits_in_it(pair):
    here, _ = pair()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(here.receive)
        here.abort()
        assert isinstance(waiting.exception(5), ConnectionError)


def test_a_stream_without_bytes_is_stalled_within_its_timeout(pair):
    for before in (b"", encode(Goodbye(), 0)[:9]):
        here, there = pair()
        here._pipe.sendall(before)
        there.set_timeout(0.05)
        waits = []
        there._pipe = _counted(there._pipe, waits)
        begin = time.monotonic()
        with pytest.raises(Stalled, match=r"no byte for 0\.05 s"):
            there.receive()
        assert 0.04 < time.monotonic() - begin < 5
        assert len(waits) == LOOKS + bool(before), "silence was waited for twice"


def _counted(pipe, waits):
    """The same pipe; what it was asked to receive is noted in `waits`."""

    def receive(view, size, flags):
        waits.append(size)
        return pipe.recv_into(view, size, flags)

    return SimpleNamespace(recv_into=receive, fileno=pipe.fileno, getsockopt=pipe.getsockopt)


def test_a_deadline_holds_though_bytes_come(pair):
    here, there = pair()
    over = threading.Event()

    def drip():
        for _ in range(HEAD.size - 1):  # never a whole head, however late the other side looks
            if not over.wait(0.01):
                here._pipe.sendall(b"m")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(drip)
        with pytest.raises((Stalled, BadFrame)):
            there.receive(deadline=Deadline(0.05))
        over.set()
    assert there.received_bytes < HEAD.size


def test_a_peer_that_reads_nothing_is_stalled_within_the_timeout(pair):
    here, _ = pair()
    here.set_timeout(0.05)
    begin = time.monotonic()
    with pytest.raises(Stalled, match=r"accepted no byte for 0\.05 s"):
        here.send(ParameterValue(0), bytes(32 << 20))
    assert time.monotonic() - begin < 5


def test_both_sides_send_50_megabytes_at_once(pair):
    here, there = pair()
    values = [np.arange(12_500_000, dtype=np.float32), np.arange(12_500_000, dtype=np.float32)[::-1].copy()]
    got = [np.empty_like(value) for value in values]

    def take(stream, target):
        assert stream.receive() == (ParameterValue(0), target.nbytes)
        stream.receive_into(target)

    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(s.send, ParameterValue(0), v) for s, v in zip((here, there), values, strict=True)]
        work += [pool.submit(take, s, t) for s, t in zip((there, here), got, strict=True)]
        for one in work:
            one.result(30)
    for value, target in zip(values, got, strict=True):
        np.testing.assert_array_equal(value, target)


# Authentication


def test_who_knows_the_token_is_welcome(pair):
    host, worker = _meet(pair)
    assert (host.role, host.worker) == ("data", "w1")
    assert (worker.lineage, worker.restored, worker.restored_from) == ("lineage", 2, 1.5)


def test_a_wrong_token_is_refused_on_both_sides(pair):
    host, worker = _meet(pair, worker_token="another")
    assert isinstance(host, NotAdmitted)
    assert isinstance(worker, NotAdmitted)
    assert "Take the token from the run's own folder" in str(worker)


@pytest.mark.parametrize("change", [{"role": "control"}, {"worker": "w2"}, {"nonce": bytes(32)}, {"mac": bytes(32)}])
def test_a_proof_that_was_changed_on_its_way_is_refused(pair, change):
    host, worker = _meet(pair, proof=lambda proof: msgspec.structs.replace(proof, **change))
    assert isinstance(host, NotAdmitted)
    assert isinstance(worker, NotAdmitted)


@pytest.mark.parametrize("change", [{"lineage": "other"}, {"restored": 3}, {"restored_from": 1.0}, {"mac": b""}])
def test_a_welcome_that_was_changed_on_its_way_is_refused(pair, change):
    _, worker = _meet(pair, answer=lambda welcome: msgspec.structs.replace(welcome, **change))
    assert isinstance(worker, NotAdmitted)
    assert "it is not the host of this run" in str(worker)


def test_a_replayed_proof_is_refused(pair):
    heard: list[AuthResponse] = []
    _meet(pair, proof=lambda proof: heard.append(proof) or proof)
    host, _ = _meet(pair, proof=lambda _: heard[0])
    assert isinstance(host, NotAdmitted)


def test_a_host_that_does_not_know_the_token_is_refused(pair):
    for mac in (lambda proof: bytes(32), lambda proof: proof.mac):  # a guess; the worker's own, sent back
        here, there = pair()
        with ThreadPoolExecutor(1) as pool:
            worker = pool.submit(authenticate, there, TOKEN, "data", "w1")
            here.send(AuthChallenge(bytes(32)))
            here.send(Welcome(mac(here.receive_message()), "lineage", 0, 0.0))
            assert isinstance(worker.exception(10), NotAdmitted)


@pytest.mark.parametrize(
    "said", [AuthChallenge(bytes(32)), Goodbye(), AuthResponse(b"short", bytes(32), "data", "w1"), AppliedReply()]
)
def test_anything_but_a_proof_is_refused(pair, said):
    here, there = pair()
    here.send(said)
    with pytest.raises(BadFrame, match="instead of a valid authentication response"):
        authenticate_client(there, TOKEN, _welcome)


def test_a_role_that_does_not_exist_is_refused(pair):
    here, there = pair()
    here.send(AuthResponse(bytes(32), bytes(32), "boss", "w1"))
    with pytest.raises(BadFrame):
        authenticate_client(there, TOKEN, _welcome)


def test_a_stranger_may_send_512_bytes(pair):
    here, there = pair()
    here.send(FindArray("x" * 600))
    with pytest.raises(BadFrame, match="at most 512"):
        authenticate_client(there, TOKEN, _welcome)


def test_a_host_that_does_not_say_hello_is_refused(pair):
    for said in (Goodbye(), Refusal("X", "no")):
        here, there = pair()
        here.send(said)
        with pytest.raises(BadFrame, match="instead of an authentication challenge"):
            authenticate(there, TOKEN, "data", "w1")


def _decode_or_refuse(data):
    try:
        message = decode_header(data)
    except BadFrame:
        return
    assert isinstance(message, KINDS)


def _welcome(mac):
    return Welcome(mac, "lineage", 2, 1.5)


def _meet(pair, *, worker_token=TOKEN, proof=lambda said: said, answer=lambda said: said):
    """What host and worker make of each other, if what they say passes through hands that may change it."""
    (host, left), (right, worker) = pair(), pair()
    with ThreadPoolExecutor(2) as pool:
        admitted = pool.submit(authenticate_client, host, TOKEN, _welcome)
        introduced = pool.submit(authenticate, worker, worker_token, "data", "w1")
        right.send(left.receive_message())
        left.send(proof(right.receive_message()))
        said = left.receive_message()
        right.send(answer(said) if isinstance(said, Welcome) else said)
        return tuple(one.exception(10) or one.result() for one in (admitted, introduced))


def test_a_forked_child_does_not_keep_its_parent_s_connections_open(pair):
    here, there = pair()
    pid = os.fork()
    if pid == 0:
        time.sleep(100)
        os._exit(0)
    try:
        here.close()
        there.set_timeout(60)
        with pytest.raises(ConnectionResetError):
            there.receive()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_long_error_is_cut_in_the_middle_and_fits_into_a_frame():
    refusal = refusal_of(ValueError("a" * 100_000 + "\u20ac" * 100_000))
    assert refusal.kind == "ValueError"
    assert len(encode(refusal, 0)) < 1 << 16
    assert refusal.reason.startswith("aaa")
    assert refusal.reason.endswith("\u20ac")
    assert "200,000 characters" in refusal.reason
    assert refusal_of(ValueError("short")).reason == "short"
