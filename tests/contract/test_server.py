"""What a token holder can ask of a host is bounded, and an error costs the connection that made it, nothing else."""

import json
import time

import msgspec
import numpy as np
import pytest

import maniple
from maniple.connection.link import Link
from maniple.errors import BadFrame, SharedMemoryFull
from maniple.record import RunFolder, read_events
from maniple.wire.messages import (
    ControllerRequest,
    Heartbeat,
    HeartbeatReply,
    JoinReply,
    JoinRequest,
    OpenCenter,
    ProducerRegistered,
    PullElements,
    PushBatch,
    PushElements,
    Refusal,
    RegisterProducer,
    SendBatch,
)
from tests.readers import read_all
from tests.serving import TOKEN, Serving


@pytest.fixture(autouse=True)
def known_token(monkeypatch):
    monkeypatch.setenv("MANIPLE_TOKEN", TOKEN)


@pytest.fixture
def serving(tmp_path):
    serving = Serving(tmp_path, unix=True)
    yield serving
    serving.close()


@pytest.fixture
def small(tmp_path):
    """A host that grants 8 MB."""
    serving = Serving(tmp_path, unix=True, max_memory_mb=8.0)
    yield serving
    serving.close()


def stream_of(serving: Serving, role: str):
    stream = Link(serving.door(), role).stream()
    stream.set_timeout(20)
    return stream


def client(serving: Serving) -> maniple.Client:
    return maniple.Client(str(serving.address), timeout_s=20)


def joined(serving: Serving):
    stream = stream_of(serving, "control")
    stream.send(JoinRequest("node", 1, -1, 0))
    answer = stream.receive_message()
    assert isinstance(answer, JoinReply)
    return stream, answer.rank


def heartbeat(stream, number: int, rows: bytes) -> None:
    stream.send(Heartbeat(number), rows)
    assert isinstance(stream.receive_message(), HeartbeatReply)


def row(event: str = "log", **values) -> bytes:
    return json.dumps({"event": event, "timestamp": time.time(), **values}).encode() + b"\n"


BAD_ROWS = [
    b'{"event":"log","timestamp":1.0,"loss":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    b'{"event":"progress","timestamp":1.0,"step":' + b"9" * 400 + b',"samples":0,"elapsed":1.0}\n',
    b'{"event":"log","timestamp":1.0,"loss":' + b"9" * 400 + b"}\n",
    b'{"event":"failed","timestamp":1.0,"exit_code":"no"}\n',
    b'{"event":"log","timestamp":1.0,"text":"' + b"x" * (2 << 20) + b'"}\n',
    b"[]\n",
    b"\xff\xfe\n",
    b'{"event":"log"}\n',
    b'{"event":"lo',
]


def test_rows_that_no_reader_could_use_are_rejected_and_counted_and_the_worker_goes_on(serving):
    stream, rank = joined(serving)
    heartbeat(stream, 1, b"".join(BAD_ROWS[:2]) + row(step=1, loss=0.5))
    heartbeat(stream, 2, b"".join(BAD_ROWS))
    heartbeat(stream, 3, row(step=2, loss=0.25))
    stream.send(Heartbeat(4, is_last=True))
    stream.receive_message()
    stream.close()
    path = RunFolder(serving.run).events(rank)
    lines = path.read_bytes().splitlines()
    rows = [msgspec.json.decode(line) for line in lines]
    assert [one["loss"] for one in rows if one["event"] == "log"] == [0.5, 0.25]
    rejected = [one for one in rows if one["event"] == "rejected"]
    assert sum(one["rows"] for one in rejected) == 2 + len(BAD_ROWS)
    assert len(rejected) == 2, "at once, and when the connection ends"
    assert "nested" in rejected[0]["reason"]
    assert len(rows) == 4
    read_all(serving.run)


def test_a_heartbeat_without_the_end_of_its_last_line_is_not_glued_to_the_next(serving):
    stream, rank = joined(serving)
    heartbeat(stream, 1, row(step=1, loss=1.0).rstrip(b"\n"))
    heartbeat(stream, 2, row(step=2, loss=2.0))
    assert [one["loss"] for one in read_events(RunFolder(serving.run).events(rank))] == [1.0, 2.0]
    stream.close()


def test_nested_questions_and_wild_counts_end_their_connection_only(serving):
    with client(serving) as honest:
        honest.create("a", np.zeros(3))
        stream, _ = joined(serving)
        for info in (b"[" * 100_000, b'{"a":' + b"[" * 1000 + b"]" * 1000 + b"}", b'"\xff"'):
            asking = stream_of(serving, "ask")
            asking.send(ControllerRequest(1, "next", 0, 0, 0, 0), info)
            assert isinstance(refusal := asking.receive_message(), Refusal) and refusal.kind == "BadFrame"
            asking.close()
        stream.send(Heartbeat(1, steps=2**62))
        assert isinstance(stream.receive_message(), Refusal)
        stream.close()
        honest.push("a", np.ones(3), alpha=1, beta=1)
        np.testing.assert_array_equal(honest.pull("a"), np.ones(3))


@pytest.mark.parametrize("count", [2**30, 2**50, -1])
def test_elements_are_asked_for_up_to_the_size_of_the_array(serving, count):
    with client(serving) as honest:
        honest.create("a", np.zeros(1000))
        for message in (PullElements("array:a", count), PushElements("array:a", count, 1, 0, 1)):
            stream = stream_of(serving, "data")
            stream.send(message, bytes(8))
            answer = stream.receive_message()
            assert isinstance(answer, Refusal) and "cannot be requested at once" in answer.reason
            stream.close()
        assert honest.pull_at("a", np.zeros((2000, 1), int)).size == 2000, "positions may repeat"


def test_arrays_fill_the_memory_up_to_the_limit_and_not_beyond(small):
    with client(small) as one:
        one.create("a", np.zeros(250_000))  # 2 MB
        with pytest.raises(SharedMemoryFull, match=r"of the 8\.0 MB .* larger --max-memory"):
            one.create("b", np.zeros(1_000_000))
    with client(small) as other:
        other.create("c", np.zeros(1000))
        other.push("c", np.ones(1000), alpha=0, beta=1)
        assert other.names() == ["a", "c"]


def test_files_are_bounded_in_number(serving, monkeypatch):
    monkeypatch.setattr("maniple.center.memory_quota.MAX_FILES", 30)
    with client(serving) as honest:
        honest.create("a", np.zeros(3))
        with pytest.raises(SharedMemoryFull, match="no more arrays"):
            for number in range(40):
                honest.create(f"b{number}", np.zeros(3))
        honest.push("a", np.ones(3), alpha=0, beta=1)
        np.testing.assert_array_equal(honest.pull("a"), np.ones(3))


def test_a_producer_cannot_reserve_more_than_the_limit(small):
    stream = stream_of(small, "feed")
    stream.send(RegisterProducer("f", 0, 1, 4))
    assert isinstance(stream.receive_message(), ProducerRegistered)
    stream.send(PushBatch(1, 1000))
    assert isinstance(stream.receive_message(), SendBatch)
    stream.close()
    stream = stream_of(small, "feed")
    stream.send(RegisterProducer("g", 0, 1, 4))
    stream.receive_message()
    stream.send(PushBatch(1, 100 << 20))
    answer = stream.receive_message()
    assert isinstance(answer, Refusal) and answer.kind == "SharedMemoryFull"
    stream.close()


def test_feeds_are_bounded_in_number(serving):
    for number in range(65):
        stream = stream_of(serving, "feed")
        stream.send(RegisterProducer(f"f{number}", 0, 1, 1))
        answer = stream.receive_message()
        stream.close()
        assert isinstance(answer, ProducerRegistered if number < 64 else Refusal)


def test_a_table_of_very_many_parameters_is_refused(serving):
    table = json.dumps([[f"p{i}", [1], "float32"] for i in range(100_001)]).encode()
    stream = stream_of(serving, "data")
    stream.send(OpenCenter("center-0", "note"), table)
    answer = stream.receive_message()
    assert isinstance(answer, Refusal) and answer.kind == "BadFrame"
    stream.close()


def test_a_defect_in_a_connection_s_thread_is_one_line_and_the_traceback_is_in_the_record(serving, monkeypatch, capfd):
    def broken(*_):
        raise RuntimeError("a defect\nof two lines")

    monkeypatch.setattr("maniple.host.server.serve_doctor", broken)
    for _ in range(5):
        stream = stream_of(serving, "doctor")
        answer = stream.receive_message()
        assert isinstance(answer, Refusal) and "a defect" in answer.reason
        stream.close()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and "RuntimeError: a defect of two lines" in lines[0]
    (failed,) = [
        one for one in read_events(serving.run / "events" / "server.jsonl") if one["event"] == "connection failed"
    ]
    assert "in broken" in failed["traceback"]


def test_a_member_whose_connection_fails_counts_as_lost(serving, monkeypatch):
    stream, _ = joined(serving)

    def broken(*_, **__):
        raise RuntimeError("a defect")

    monkeypatch.setattr("maniple.host.controller_requests.ControllerRequests.count", broken)
    stream.send(Heartbeat(1))
    assert isinstance(stream.receive_message(), Refusal)
    stream.close()
    assert serving.segment.live == 0


def test_what_cannot_be_a_worker_does_not_join(serving):
    for join in (JoinRequest("n\x1b[2J", 1, -1, 0), JoinRequest("n", 2**40, -1, 0), JoinRequest("n" * 1000, 1, -1, 0)):
        stream = stream_of(serving, "control")
        stream.send(join)
        with pytest.raises(BadFrame):
            answer = stream.receive_message()
            assert isinstance(answer, Refusal)
            raise BadFrame(answer.reason)
        stream.close()
