"""Feeds: one suite for batches that go through shared memory and over TCP, between threads and real processes."""

import itertools
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from maniple.environment import Environment, variables_for
from maniple.errors import Conflict, HostAway, InvalidArgument, ProducerFailed, WaitedTooLong
from maniple.feed import producer_registry
from maniple.feed.local_feed import Batches, Feed, LocalConsumer, LocalProducer
from maniple.feed.ring import EMPTY, Ring
from maniple.launch.services import Producers
from tests.contract.feed_ends import WAIT_S, Alone, Ends, for_seconds, kill, push, together

from ..serving import Serving


@pytest.fixture(params=["shared", "tcp"])
def ends(request: pytest.FixtureRequest, tmp_path) -> Iterator[Ends]:
    is_far = request.param == "tcp"
    ends = Ends(Serving(tmp_path) if is_far else Alone(tmp_path), is_far)
    yield ends
    for one in ends.opened:
        one.close()
    ends.host.close()


def flow(ends: Ends, counts: list[int], workers: int) -> list[list[tuple[int, int]]]:
    """Let producers push so many batches each; gives what each worker has taken, as (producer, number)."""
    taken: list[list[tuple[int, int]]] = [[] for _ in range(workers)]

    def produce(index: int) -> None:
        sink = ends.sink(index=index, count=len(counts))
        assert (sink.index, sink.count) == (index, len(counts))
        for number in range(counts[index]):
            push(sink, np.array([index, number]), np.full(number * 37 % 5000, number, np.float32))
        sink.end(None)

    def consume(rank: int) -> None:
        batches = ends.batches()
        for label, values in batches:
            assert values.size == label[1] * 37 % 5000 and (values == label[1]).all()
            taken[rank].append((int(label[0]), int(label[1])))
        assert list(batches) == [], "after the end it is empty"

    together(*(lambda i=i: produce(i) for i in range(len(counts))), *(lambda k=k: consume(k) for k in range(workers)))
    return taken


@pytest.mark.parametrize(
    ("counts", "workers"),
    [([0], 2), ([1], 2), ([7], 2), ([30], 1), ([22], 4), ([7, 0], 1), ([11, 1, 20], 2), ([11, 1, 20], 4)],
    ids=str,
)
def test_each_batch_goes_to_one_worker_in_order_and_all_see_the_end(ends, counts, workers):
    taken = flow(ends, counts, workers)
    assert sorted(itertools.chain(*taken)) == [(i, number) for i, count in enumerate(counts) for number in range(count)]
    for mine in taken:
        for index in range(len(counts)):
            numbers = [number for producer, number in mine if producer == index]
            assert numbers == sorted(numbers)


def test_arrays_keep_their_dtype_shape_and_values_and_are_ones_own(ends):
    rng = np.random.default_rng(0)
    dtypes = ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64"]
    sent = [[], [np.zeros((0, 3))], [np.float32(2.5), [[1, 2], [3, 4]]]]
    sent += [[(rng.random((2, 3, k)) * 9).astype(dtype) for k, dtype in enumerate(dtypes)]]
    sent += [[np.full(3, k) for k in range(1500)]]  # more than one call of the system takes
    sent += [[np.arange(12.0).reshape(3, 4).T, np.arange(10)[::-2], np.arange(4, dtype=">i4")]]
    sink, source = ends.sink(high_water=8), ends.source()
    for batch in sent:
        push(sink, *batch)
    sink.end(None)
    got = list(Batches("x", source))
    assert len(got) == len(sent)
    for arrays, before in zip(got, sent, strict=True):
        assert len(arrays) == len(before)
        for array, value in zip(arrays, before, strict=True):
            value = np.asarray(value)
            assert array.shape == value.shape and array.dtype == value.dtype.newbyteorder("=")
            np.testing.assert_array_equal(array, value)
            array += array.dtype.type(0) if array.dtype != bool else False  # it can be written to


def test_tensors_are_pushed_as_arrays_and_what_cannot_be_is_said(ends):
    torch = pytest.importorskip("torch")
    sink = ends.sink()
    push(sink, torch.arange(3.0))
    with pytest.raises(InvalidArgument, match=r"detach\(\)"):
        push(sink, torch.zeros(2, requires_grad=True))
    with pytest.raises(InvalidArgument, match="dtype <U3"):
        push(sink, np.array(["abc"]))
    sink.end(None)
    assert [arrays[0].tolist() for arrays in ends.batches()] == [[0.0, 1.0, 2.0]]


def test_producer_waits_at_the_mark_and_memory_is_bounded_by_it(ends):
    sink, source = ends.sink(high_water=3), ends.source()
    ring = Ring(ends.host.segment.path, "x")
    ends.opened.append(ring)
    pushed: list[int] = []

    def produce() -> None:
        for number in range(12):
            push(sink, np.full((number + 1) * 20_000, number))  # each larger than those before
            pushed.append(number)
        sink.end(None)

    def consume() -> None:
        for taken in range(12):
            deadline = time.monotonic() + WAIT_S
            while len(pushed) < min(12, taken + 3):  # as many as may wait do wait
                assert time.monotonic() < deadline
                time.sleep(0.002)
            time.sleep(0.02)  # it could push more now, if it were not held back
            assert len(pushed) <= taken + 3
            assert ring.table.state.tolist().count(EMPTY) >= 253
            assert source.take(WAIT_S)[0][0] == taken
        assert list(Batches("x", source)) == []

    together(produce, consume)
    slots = list(ring.folder.glob("slot-*"))
    assert len(slots) == ring.table.high_water[0] == 3
    assert sum(slot.stat().st_size for slot in slots) <= 3 * (12 * 20_000 * 8 + (1 << 16))


def test_traceback_of_a_producer_reaches_every_worker_each_time(ends):
    good, bad = (ends.sink(index=index, count=2) for index in (0, 1))
    push(good, np.arange(2))
    bad.end("Traceback ...\nValueError: the disk is upside down")
    for _ in range(2):
        batches = ends.batches()
        for _ in range(2):
            with pytest.raises(
                ProducerFailed, match=r"producer 1 of feed 'x'(?s:.*)ValueError: the disk is upside down"
            ):
                list(batches)


def test_killed_producer_is_an_error_and_not_the_end(ends, monkeypatch):
    monkeypatch.setattr(producer_registry, "RECONNECT_S", 0.5)  # of the host, which is in this process
    code = """
        import time, maniple
        feed = maniple.Feed("x")
        feed.push([1.0])
        print("here", flush=True)
        time.sleep(600)
    """
    process = ends.spawn(code)
    batches = ends.batches()
    assert next(iter(batches))[0].tolist() == [1.0]
    kill(process)
    with pytest.raises(ProducerFailed, match="producer 0 of feed 'x' ended before its data did"):
        list(batches)


def test_batch_of_a_worker_killed_while_taking_it_goes_to_another(ends):
    sink = ends.sink(high_water=2)
    push(sink, [1.0])
    push(sink, [2.0])
    near, far = "maniple.feed.local_feed.LocalConsumer, '_copy'", "maniple.wire.frames.Stream, 'receive_into'"
    code = f"""
        import time, maniple.feed.local_feed, maniple.wire.frames
        from maniple.feed.local_feed import open_consumer
        from maniple.environment import read_environment

        def stall(*_):
            print("here", flush=True)
            time.sleep(600)

        setattr({far if ends.is_far else near}, stall)
        open_consumer(read_environment(), "x").take(60)
    """
    process = ends.spawn(code)
    kill(process)
    sink.end(None)
    assert sorted(arrays[0].tolist() for arrays in ends.batches()) == [[1.0], [2.0]]


def test_batch_of_a_dead_worker_is_the_next_one_though_others_wait(ends):
    sink, dead = ends.sink(), Ring(ends.host.segment.path, "x")
    for number in range(3):
        push(sink, number)
    assert dead.take() is not None
    dead.locks.close()  # as its death does
    source = ends.source()
    assert [int(source.take(WAIT_S)[0]) for _ in range(3)] == [0, 1, 2]


def test_producer_killed_while_filling_a_slot_leaves_the_room_to_others(tmp_path):
    ends = Ends(Alone(tmp_path), False)
    try:
        code = """
            import time, maniple, maniple.feed.ring
            feed = maniple.Feed("x", high_water=1)

            def stall(*_):
                print("here", flush=True)
                time.sleep(600)

            maniple.feed.ring.FeedBatch.write = stall
            feed.push([1.0])
        """
        process = ends.spawn(code)
        other = ends.sink(high_water=1)
        kill(process)
        push(other, [2.0])
        ring = Ring(ends.host.segment.path, "x")
        assert ring.take() is not None
        ring.close()
    finally:
        for one in ends.opened:
            one.close()
        ends.host.close()


def test_worker_that_should_stop_ends_its_loop(ends):
    sink = ends.sink()
    push(sink, [1.0])
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(1)
        return len(asked) > 2

    assert len(list(ends.batches(should_stop=should_stop))) == 1


def test_feeds_of_different_names_do_not_mix(ends):
    train, valid = ends.sink("train"), ends.sink("valid")
    push(train, [1.0])
    push(valid, [2.0])
    train.end(None)
    valid.end(None)
    for name, value in (("valid", 2.0), ("train", 1.0)):
        assert [arrays[0].tolist() for arrays in ends.batches(name)] == [[value]]


def test_what_producers_disagree_on_is_said(ends):
    first = ends.sink(high_water=4, index=0, count=2)
    with pytest.raises(Conflict, match=r"high_water=5(?s:.*)4"):
        ends.sink(high_water=5, index=1, count=2)
    with pytest.raises(Conflict, match="producer 0 of feed 'x' has registered already"):
        ends.sink(index=0, count=2)
    second = ends.sink(index=1, count=2)
    first.end(None)
    second.end(None)
    with pytest.raises(InvalidArgument, match="feed 'x' is over"):
        ends.sink()
    for wrong in ({"name": "a/b"}, {"high_water": 0}, {"index": 3, "count": 2}):
        with pytest.raises(InvalidArgument):
            ends.sink(**wrong)


def test_producers_that_tell_no_place_get_the_next_one(ends):
    first, second = ends.sink(), ends.sink()
    assert (first.index, second.index) == (0, 1)
    push(second, [2.0])
    first.end(None)
    second.end(None)
    assert len(list(ends.batches())) == 1


def test_producer_that_never_comes_is_not_waited_for_without_end(ends, monkeypatch):
    monkeypatch.setattr(producer_registry, "REGISTER_S", 0.3)
    with pytest.raises(WaitedTooLong, match="a producer for feed 'x', and none came"):
        list(ends.batches())
    ends.sink("y", index=0, count=2).end(None)
    with pytest.raises(WaitedTooLong, match=r"producers \[1\] of feed 'y'"):
        list(ends.batches("y"))


def test_wrong_name_is_said_while_the_producers_wait_for_room_elsewhere(ends, monkeypatch):
    monkeypatch.setattr(producer_registry, "REGISTER_S", 0.2)
    producer_registry.reset_producers(ends.host.segment.path, 1)
    sink = ends.launched("batches", 0, high_water=2)
    push(sink, [1.0])
    # There is room: it may do anything next.
    assert list(ends.batches("batchs", should_stop=for_seconds(0.6))) == []
    push(sink, [2.0])
    with pytest.raises(WaitedTooLong, match=r"feed 'batchs'(?s:.*)Producers push to: batches\."):
        list(ends.batches("batchs", should_stop=for_seconds(20)))
    sink.end(None)
    assert len(list(ends.batches("batches"))) == 2


def test_wait_for_a_producer_begins_when_none_is_seen(ends, monkeypatch):
    monkeypatch.setattr(producer_registry, "REGISTER_S", 0.3)
    ring = Ring(ends.host.segment.path, "x")
    ends.opened.append(ring)
    watch = producer_registry.ProducerMonitor(ring)
    time.sleep(0.4)  # the worker did something else
    assert not watch.has_ended()
    time.sleep(0.4)
    with pytest.raises(WaitedTooLong, match="a producer for feed 'x', and none came"):
        watch.has_ended()


def test_producers_of_a_killed_launcher_have_failed_if_no_others_are_started(ends):
    path = ends.host.segment.path
    producer_registry.reset_producers(path, 2)
    sinks = [ends.launched(name, number) for number, name in enumerate(("ended", "x"))]
    push(sinks[0], [1.0])
    sinks[0].end(None)
    producer_registry.record_exit(path, 0, is_well=True)
    sinks[1].close()  # as its death does
    job, host = SimpleNamespace(feeds=[], producers=1), SimpleNamespace(segment=ends.host.segment)
    Producers(job, host, threads={}, reach=Environment())
    with pytest.raises(ProducerFailed, match="producer 0 of feed 'x' ended before its data did"):
        list(ends.batches(should_stop=for_seconds(20)))
    assert len(list(ends.batches("ended"))) == 1


def test_new_producers_of_a_launcher_leave_the_feeds_of_others_alone(ends):
    path = ends.host.segment.path
    producer_registry.reset_producers(path, 1)
    by_hand, old = ends.sink("mine"), ends.launched("x", 0)
    push(by_hand, [1.0])
    push(old, [2.0])
    old.close()  # as its death does
    producer_registry.reset_producers(path, 1)
    new = ends.launched("x", 0)
    push(new, [3.0])
    new.end(None)
    by_hand.end(None)
    for name, value in (("mine", 1.0), ("x", 3.0)):
        assert [arrays[0].tolist() for arrays in ends.batches(name, should_stop=for_seconds(20))] == [[value]]


def test_producer_started_by_hand_may_come_before_the_launchers(ends, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    path = ends.host.segment.path
    producer_registry.reset_producers(path, 2)
    early = ends.sink()
    for name, value in variables_for(Environment(segment=path, producer=0, producers=1, producer_number=1)).items():
        monkeypatch.setenv(name, value)
    feed = Feed("x", high_water=4)
    assert (feed.index, feed.count) == (0, 1)  # its share is as if the other had not come
    push(early, [1.0])
    feed.push([2.0])
    early.end(None)
    batches = iter(ends.batches(should_stop=for_seconds(WAIT_S)))
    assert sorted(next(batches)[0].tolist() for _ in range(2)) == [[1.0], [2.0]]
    feed._producer.close()  # as its death does
    producer_registry.record_exit(path, 1, is_well=False)
    with pytest.raises(ProducerFailed, match=r"producer-1\.log"):
        list(batches)
    feed._is_closed = True


def test_ends_of_the_run_are_noticed_by_those_who_wait(tmp_path):
    host = Alone(tmp_path)
    try:
        sink = LocalProducer(Environment(segment=host.segment.path, producer=0), "x", 1)
        source = LocalConsumer(host.segment.path, "y")
        push(sink, [1.0])
    finally:
        host.close()  # and the memory is gone
    with pytest.raises(HostAway, match="the run has ended"):
        push(sink, [2.0])
    with pytest.raises(HostAway, match="the run has ended"):
        list(Batches("y", source))
    sink.close()
    source.close()
