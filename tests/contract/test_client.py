"""Named arrays at a host: the classic parameter server, call by call."""

import os
import threading
import time

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

import maniple
from maniple.center.snapshot import write_snapshot
from maniple.connection.link import Link
from maniple.errors import HostAway, InvalidArgument, LayoutMismatch, ManipleError, NotAdmitted
from maniple.wire.messages import CreateCenter, OpenCenter, ParameterValue, Refusal

from ..limits import descriptor_limit

DTYPES = [*(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "float16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]


# Create, pull, push


def test_first_creator_wins_and_everybody_gets_its_value(host, client):
    with maniple.Client(timeout_s=10) as other:
        first = client.create("a", np.arange(6.0).reshape(2, 3))
        second = other.create("a", np.zeros((2, 3)))
    np.testing.assert_array_equal(first, np.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(second, first)
    assert client.names() == ["a"]


def test_of_simultaneous_creators_one_wins_and_all_get_its_value(host):
    settled: list[np.ndarray] = []

    def create(k: int) -> None:
        with maniple.Client(timeout_s=10) as client:
            settled.append(client.create("a", np.full(200_000, float(k))))

    threads = [threading.Thread(target=create, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(settled) == 6
    assert len({float(value[0]) for value in settled}) == 1
    assert all((value == settled[0][0]).all() for value in settled)


def test_pulled_array_is_one_s_own(client):
    client.create("a", np.zeros(3))
    value = client.pull("a")
    value += 5
    np.testing.assert_array_equal(client.pull("a"), 0)


def test_push_weighs_old_and_new(client):
    client.create("a", np.full(4, 10.0))
    client.push("a", np.arange(4), alpha=0.5, beta=2)
    np.testing.assert_array_equal(client.pull("a"), 5 + 2.0 * np.arange(4))
    client.push("a", np.zeros(4), alpha=0, beta=1)
    np.testing.assert_array_equal(client.pull("a"), 0)
    client.push("a", np.full(4, 4.0))
    np.testing.assert_array_equal(client.pull("a"), 2)


@pytest.mark.parametrize("dtype", DTYPES + COMPLEX)
def test_differences_of_every_dtype_add_up_exactly(client, dtype):
    client.create("a", np.zeros(5, dtype))
    for k in range(10):
        client.push("a", np.full(5, k, dtype), alpha=1, beta=1)
    value = client.pull("a")
    assert value.dtype == dtype
    np.testing.assert_array_equal(value, np.full(5, 45, dtype))


def test_large_whole_numbers_keep_every_digit(client):
    large = 2**62 + 1
    client.create("a", np.array([large, -large]))
    client.push("a", np.array([1, 1]), alpha=1, beta=-1)
    assert client.pull("a").tolist() == [large - 1, -large - 1]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4, 5)])
def test_arrays_of_every_shape(client, shape):
    made = client.create("a", np.full(shape, 2.0))
    assert made.shape == shape
    client.push("a", np.full(shape, 3.0), alpha=1, beta=1)
    np.testing.assert_array_equal(client.pull("a"), np.full(shape, 5.0))


def test_concurrent_pushes_add_up_exactly(host, client):
    client.create("a", np.zeros(50_000))

    def push() -> None:
        with maniple.Client(timeout_s=20) as own:
            for _ in range(20):
                own.push("a", np.ones(50_000), alpha=1, beta=1)
                own.push_at("a", [[3], [3]], [1, 1], alpha=1, beta=1)

    threads = [threading.Thread(target=push) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    expected = np.full(50_000, 80.0)
    expected[3] += 160
    np.testing.assert_array_equal(client.pull("a"), expected)


@pytest.mark.parametrize("name", ["a b/c:d", "ä", "x" * 500, "../../etc", ""])
def test_names_may_hold_anything(client, name):
    client.create(name, np.ones(2))
    client.push(name, np.ones(2), alpha=1, beta=1)
    np.testing.assert_array_equal(client.pull(name), 2)
    assert client.names() == [name]


def test_many_clients_use_more_arrays_than_the_host_may_open_files(client):
    for k in range(40):
        client.create(f"a{k}", np.full(2, k))
    with descriptor_limit(400):
        clients = [maniple.Client(timeout_s=5) for _ in range(20)]
        for other in clients:
            for k in range(40):
                assert other.pull(f"a{k}")[0] == k
        for other in clients:
            other.close()


# Bad input


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda c: c.pull("b"), "no array named 'b'"),
        (lambda c: c.push("a", np.ones(3)), r"\[3\] values were pushed to \[2, 2\]"),
        (lambda c: c.push("a", np.ones((2, 2), complex)), "complex128 values cannot go into"),
        (lambda c: c.push("i", np.ones(2, int), alpha=0.5), "alpha=0.5 cannot be a weight"),
        (lambda c: c.push("i", np.ones(2), alpha=1, beta=1), "float64 values cannot go into"),
        (lambda c: c.push("a", np.ones((2, 2)), alpha=np.nan), "alpha=nan"),
        (lambda c: c.push("a", np.full((2, 2), np.nan)), "not finite"),
        (lambda c: c.push_at("a", [[0, 1]], [np.nan]), "not finite"),
        (lambda c: c.push_part("a", [[0], [1]], [[np.inf]]), "not finite"),
        (lambda c: c.push_at("i", [[0]], [np.nan], alpha=1, beta=1), "float64 values cannot go into"),
        (lambda c: c.pull_part("a", [[0]]), "1 lists of indices were given for the 2 axes"),
        (lambda c: c.pull_part("a", [[0], [2]]), "index 2 lies outside of axis 1"),
        (lambda c: c.pull_at("a", [[0, -3]]), "index -3 lies outside of axis 1"),
        (lambda c: c.pull_at("a", [0, 1]), "do not fit"),
        (lambda c: c.pull_at("a", [[0.5, 1.0]]), "Give integers"),
        (lambda c: c.create("n", np.array([np.inf])), "not finite"),
        (lambda c: c.create("o", np.array(["text"])), "cannot be shared"),
        (lambda c: c.save("/etc/passwd"), "cannot be written"),
        (lambda c: c.save("../x.safetensors"), "cannot be written"),
        (lambda c: c.save("x.txt"), "cannot be written"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(client, act, words):
    client.create("a", np.ones((2, 2)))
    client.create("i", np.ones(2, int))
    with pytest.raises(InvalidArgument, match=words):
        act(client)
    np.testing.assert_array_equal(client.pull("a"), 1)
    np.testing.assert_array_equal(client.pull("i"), 1)


@pytest.mark.parametrize(
    ("dtype", "value", "limits"),
    [
        ("int8", 300, "-128 to 127"),
        ("int8", -129, "-128 to 127"),
        ("uint8", -1, "0 to 255"),
        ("uint16", 1 << 16, "0 to 65535"),
        ("int64", np.uint64(1 << 63), "-9223372036854775808 to 9223372036854775807"),
        ("uint64", -1, "0 to 18446744073709551615"),
        ("float16", 1e5, "65504"),
        ("float16", np.float32(-65520), "65504"),
        ("float16", 100_000, "65504"),
        ("float32", 1e39, "3.40"),
        ("complex64", 1e39j, "3.40"),
    ],
)
def test_value_that_the_dtype_cannot_hold_is_refused_by_every_push(client, dtype, value, limits):
    client.create("a", np.ones(2, dtype))
    whole = np.array([value, 1 * value])
    for push in (
        lambda: client.push("a", whole, alpha=1, beta=1),
        lambda: client.push_at("a", [[0], [1]], whole, alpha=1, beta=1),
        lambda: client.push_part("a", [[1, 0]], whole, alpha=1, beta=1),
    ):
        with pytest.raises(InvalidArgument, match=f"does not fit.*{limits}"):
            push()
    np.testing.assert_array_equal(client.pull("a"), 1)


def test_whole_numbers_that_fit_are_pushed_whatever_their_dtype(client):
    for dtype, low, high in (("int8", -128, 127), ("uint8", 0, 255), ("uint64", 0, (1 << 64) - 1)):
        client.create(dtype, np.ones(2, dtype))
        client.push(dtype, np.array([low, 1]), alpha=0, beta=1)
        client.push_at(dtype, [[1]], np.array([high]), alpha=0, beta=1)
        assert client.pull(dtype).tolist() == [low, high]


def test_sum_beyond_float16_is_pulled_as_its_largest_value(client):
    client.create("a", np.full(2, 6e4, "float16"))
    client.push("a", np.full(2, 6e4, "float16"), alpha=1, beta=1)
    largest = np.finfo("float16").max
    np.testing.assert_array_equal(client.pull("a"), largest)
    np.testing.assert_array_equal(client.pull_at("a", [[1]]), largest)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([("a", [1] * 70, "float32")], "no shape of an array"),
        ([("a", [0, 10**18, 99], "float32")], "no shape of an array"),
        ([("a\0b", [2], "float32")], "cannot name an array"),
        ([("another", [2], "float32")], "something else than one array of that name"),
        ([("a", [2], "float32"), ("b", [2], "float32")], "something else than one array of that name"),
    ],
)
def test_array_table_that_would_break_the_snapshots_is_refused_on_creation(host, client, table, words):
    """From somebody who knows the token and does not use this library."""
    client.create("good", np.ones(2))
    link = Link(host.door(), "data")
    stream = link.stream()
    stream.send(OpenCenter("array:a", ""), msgspec.json.encode(table))
    answer = stream.receive_message()
    if isinstance(answer, CreateCenter):  # then it is made
        for i in range(len(table)):
            stream.send(ParameterValue(i), np.zeros(0 if 0 in table[i][1] else int(np.prod(table[i][1])), "float32"))
        answer = stream.receive()[0]
    link.drop("enough")
    path = write_snapshot(host.segment, host.run / "center", lineage="x", restored=0, versions={})
    assert path is not None and set(load_file(path / "arrays.safetensors")) == {"good"}
    assert isinstance(answer, Refusal) and words in answer.reason
    assert client.names() == ["good"]


def test_creating_with_another_shape_is_refused(client):
    client.create("a", np.ones(3))
    with pytest.raises(LayoutMismatch, match=r"\[4\].*\[3\]"):
        client.create("a", np.ones(4))


def test_client_without_a_host_says_how_to_start_one(monkeypatch):
    monkeypatch.delenv("MANIPLE_ADDRESS", raising=False)
    with pytest.raises(InvalidArgument, match="maniple serve"):
        maniple.Client()
    with pytest.raises(InvalidArgument, match="no token"):
        maniple.Client("127.0.0.1:1")
    monkeypatch.setenv("MANIPLE_TOKEN", "t")
    with pytest.raises(HostAway, match="refused"):
        maniple.Client("127.0.0.1:1", timeout_s=0.2)


def test_client_with_a_wrong_token_is_refused_at_once(host, monkeypatch):
    monkeypatch.setenv("MANIPLE_TOKEN", "another")
    with pytest.raises(NotAdmitted, match="token"):
        maniple.Client(timeout_s=30)


def test_every_error_is_of_the_library(client):
    with pytest.raises(ManipleError):
        client.pull("nothing")


def test_client_that_leaves_is_forgotten(host):
    with maniple.Client(timeout_s=10) as client:
        client.create("a", np.zeros(3))
        client.push("a", np.ones(3))
        assert len(list(host.segment.path.glob("stage-*"))) == 1
    deadline = threading.Event()
    for _ in range(3000):
        if not list(host.segment.path.glob("stage-*")):
            return
        deadline.wait(0.02)
    raise AssertionError("its stage is still there")


def test_dead_clients_leave_no_stage_behind_and_one_that_returns_is_known(host, client):
    """Of 200 clients that were killed, nothing but their words is left; pushes of one that comes back count once."""
    client.create("a", np.zeros(3))
    others = [maniple.Client(timeout_s=10) for _ in range(200)]
    for other in others:
        other.push("a", np.ones(3), alpha=1, beta=1)
        other._link.drop("killed")
    deadline = time.monotonic() + 20
    while len(list(host.segment.path.glob("stage-*"))) > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(list(host.segment.path.glob("stage-*"))) == 1, "only that of the one which is connected"
    assert not host.server._sessions._sessions.keys() - {client._link._endpoint.worker}
    for other in others[:5]:
        assert other._was_applied("a", 1, 10)
        other.push("a", np.ones(3), alpha=1, beta=1)
        assert not other._was_applied("a", 3, 10)
        other.close()
    np.testing.assert_array_equal(client.pull("a"), 205)


def test_client_that_was_forgotten_is_refused_an_answer_rather_than_given_a_wrong_one(host, monkeypatch):
    monkeypatch.setattr("maniple.center.staging.ROWS", 2)

    def killed(act) -> maniple.Client:
        client = maniple.Client(timeout_s=10)
        act(client)
        client._link.drop("killed")
        deadline = time.monotonic() + 20
        while list(host.segment.path.glob("stage-*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        return client

    first = killed(lambda client: client.create("a", np.zeros(3)))
    second = killed(lambda client: client.push("a", np.ones(3), alpha=1, beta=1))
    third = killed(lambda client: client.pull("a"))
    assert second._was_applied("a", 1, 10)
    second.close()
    with pytest.raises(InvalidArgument, match=r"does not know any more whether exchange 1.*restart the worker"):
        first._was_applied("a", 1, 10)
    for other in (first, third):
        other.close()


def test_array_over_two_gibibytes(client):
    size = (1 << 31) + 12_345
    value = np.zeros(size, "int8")
    value[[0, 1 << 30, size - 1]] = 1, 2, 3
    made = client.create("large", value)  # as the host sends it: `create` ends with a pull
    assert (made.nbytes, made[[0, 1 << 30, size - 1]].tolist()) == (size, [1, 2, 3])
    value[[0, 1 << 30, size - 2, size - 1]] = 0, 0, 7, 0
    client.push("large", value, alpha=1, beta=1)
    assert client.pull_at("large", [[0], [1 << 30], [size - 2], [size - 1]]).tolist() == [1, 2, 7, 3]


# Threads


def test_one_client_serves_several_threads(client):
    """Each thread gets its own answers, and every push counts once."""
    count, rounds = 6, 40
    for k in range(count):
        client.create(f"a{k}", np.full(20_000, float(k)))
    client.create("sum", np.zeros(1000))
    wrong: list[str] = []

    def use(k: int) -> None:
        try:
            for _ in range(rounds):
                if not (client.pull(f"a{k}") == k).all():
                    wrong.append(f"thread {k} pulled the array of another")
                client.push("sum", np.ones(1000), alpha=1, beta=1)
                if not (client.pull_at(f"a{k}", [[k], [0]]) == k).all() or len(client.names()) != count + 1:
                    wrong.append(f"thread {k} got the elements of another")
        except Exception as error:
            wrong.append(f"thread {k}: {error!r}")

    threads = [threading.Thread(target=use, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong, f"{len(wrong)} wrong answers: {wrong[:3]}"
    np.testing.assert_array_equal(client.pull("sum"), count * rounds)


def test_thread_that_waits_for_another_s_call_gives_up_at_its_deadline(host):
    with maniple.Client(timeout_s=0.3) as client:
        client._lock.acquire()  # a call of this thread is under way
        failures: list[Exception] = []

        def names() -> None:
            try:
                client.names()
            except HostAway as error:
                failures.append(error)

        thread = threading.Thread(target=names)
        thread.start()
        thread.join(10)
        client._lock.release()
        assert "another thread" in str(failures[0])


def test_child_of_a_client_that_was_in_use_has_a_connection_of_its_own(client):
    client.create("a", np.zeros(2))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with client._lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    pid = os.fork()
    if pid == 0:
        try:
            client.push("a", np.ones(2), alpha=1, beta=1)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    done.set()
    thread.join(10)
    assert os.waitstatus_to_exitcode(status) == 0
    np.testing.assert_array_equal(client.pull("a"), 1)
