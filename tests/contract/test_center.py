"""What every center promises. One suite for all implementations; a new one is added to `CENTERS`."""

import contextlib
import itertools
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from maniple import ASGD, EASGD, DiLoCo, Downpour, Rule, layout
from maniple.adapters import adapt
from maniple.center import Segment, SharedCenter
from maniple.center.snapshot import EntryReader
from maniple.center.tcp_client import TcpCenter
from maniple.connection.link import Link
from maniple.contracts import NO_STATE, Center, ExchangeInfo, Outcome, StateNames
from maniple.errors import InvalidArgument, LayoutMismatch
from maniple.layout import RuleState
from maniple.wire.messages import JoinRequest
from maniple.worker.heartbeat_sender import HeartbeatSender

from ..serving import Serving

Params = dict[str, np.ndarray]


class Centers(Protocol):
    """One center and any number of workers connected to it."""

    def connect(self, params: Params, rank: int = 0, state: StateNames = NO_STATE) -> tuple[Center, bool]: ...
    def segment(self) -> Segment: ...
    def close(self) -> None: ...


class SharedCenters:
    """A center in shared memory; each worker maps it by an object of its own."""

    def __init__(self, root: Path) -> None:
        self._segment = Segment.create(root, "0123456789abcdef", root)
        self._opened: list[SharedCenter] = []

    def connect(self, params: Params, rank: int = 0, state: StateNames = NO_STATE) -> tuple[Center, bool]:
        segment = Segment(self._segment.path)
        center, is_creator = SharedCenter.open_or_create(segment, "center-0", adapt(params), rank=rank, state=state)
        segment.mark(rank, 1)
        self._opened.append(center)
        return center, is_creator

    def segment(self) -> Segment:
        return self._segment

    def close(self) -> None:
        for center in self._opened:
            center.close()
        self._segment.remove()


class TcpCenters:
    """A center at a host, served by threads of this process; each worker has connections of its own."""

    def __init__(self, root: Path) -> None:
        self._host = Serving(root)
        self._controls: list[HeartbeatSender] = []

    def connect(self, params: Params, rank: int = 0, state: StateNames = NO_STATE) -> tuple[Center, bool]:
        door = self._host.door()
        control = HeartbeatSender(door, JoinRequest("here", 1, -1, 0), count=lambda: (0, 0, False))
        control.join(10)
        control.start()
        self._controls.append(control)
        link = Link(door, "data")
        return TcpCenter.open_or_create(
            link, "center-0", adapt(params), rank=rank, state=state, deadline_s=10, live=self._live
        )

    def segment(self) -> Segment:
        return self._host.segment

    def _live(self) -> int:
        return self._host.segment.live

    def close(self) -> None:
        for control in self._controls:
            control.leave()
        self._host.close()


CENTERS = {"shared": SharedCenters, "tcp": TcpCenters}


CHUNK_BYTES = {"entries": 0, "small": 32, "default": layout.CHUNK_BYTES}  # small ones split and combine parameters


@pytest.fixture(params=[f"{center}-{chunks}" for center in CENTERS for chunks in CHUNK_BYTES])
def centers(request, tmp_path, monkeypatch):
    kind, _, chunks = request.param.partition("-")
    monkeypatch.setattr("maniple.center.shared.CHUNK_BYTES", CHUNK_BYTES[chunks])
    centers = CENTERS[kind](tmp_path)
    yield centers
    centers.close()


class Worker:
    """A connected worker: its arrays, its center, and one vector that a rule may keep here, as `center` or `own`."""

    def __init__(self, centers: Centers, params: Params, rank: int = 0, state: StateNames = NO_STATE) -> None:
        self.params, self.model = params, adapt(params)
        self.center, self.is_creator = centers.connect(params, rank, state)
        its = self.center.layout
        self.state = [{"center": one, "own": one} for one in its.chunk_views(its.allocate())]
        self.pull()

    def pull(self) -> Outcome:
        return self.center.pull(self.model, self._remember)

    def push(self) -> Outcome:
        return self.center.push(self.model, self._remember)

    def exchange(self, rule: Any, moment: ExchangeInfo | None = None) -> Outcome:
        return self.center.exchange(self.model, rule, self.state, moment or ExchangeInfo())

    def _remember(self, k: int, value: np.ndarray) -> None:
        self.state[k]["center"][:] = value


def some(fill: float = 0.0, dtype: str = "float64") -> Params:
    return {"w": np.full((2, 3), fill, dtype), "b": np.full(3, fill, dtype), "s": np.full((), fill, dtype)}


def assert_all(params: Params, value: float) -> None:
    for name, array in params.items():
        np.testing.assert_array_equal(array, value, err_msg=name)


def seen(centers: Centers, params: Params) -> Params:
    """The center's own values, unrounded, through a spectator whose rule only looks."""
    spectator = Worker(centers, {name: value.copy() for name, value in params.items()}, rank=99)
    values: list[np.ndarray] = []

    class Look(Rule):
        def exchange(self, x, c, state, moment):
            values.append(c.copy())

    order: list[int] = []
    spectator.center.pull(spectator.model, lambda k, _: order.append(k))
    spectator.exchange(Look())
    its = spectator.center.layout
    by_chunk, pieces = dict[int, np.ndarray](), iter(values)
    for k in order:  # a chunk comes in one piece or in several
        by_chunk[k] = np.zeros(0)
        while by_chunk[k].size < its.chunks[k].size:
            by_chunk[k] = np.concatenate([by_chunk[k], next(pieces)])
    reader = EntryReader(its, by_chunk.__getitem__)
    return {entry.name: reader.read(i).reshape(-1) for i, entry in enumerate(its.entries)}


# Creation


def test_first_creator_wins_and_everybody_gets_its_value(centers):
    first, second = Worker(centers, some(1), rank=1), Worker(centers, some(2), rank=0)
    assert (first.is_creator, second.is_creator) == (True, False)
    assert_all(first.params, 1)
    assert_all(second.params, 1)


def test_late_worker_starts_from_the_center_as_it_is_now(centers):
    first = Worker(centers, some(1))
    first.params["w"] += 5
    first.exchange(Downpour())
    late = Worker(centers, some(9), rank=1)
    assert not late.is_creator
    np.testing.assert_array_equal(late.params["w"], 6)
    np.testing.assert_array_equal(late.params["b"], 1)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (
            {"w": np.zeros((2, 3)), "b": np.zeros(4), "s": np.zeros(())},
            r"parameter 1 is 'b' float64\[4\].*'b' float64\[3\]",
        ),
        ({"w": np.zeros((2, 3)), "b": np.zeros(3)}, "parameter 2 is nothing.*'s'"),
        ({"w": np.zeros((2, 3)), "bias": np.zeros(3), "s": np.zeros(())}, "parameter 1 is 'bias'.*'b'"),
        (some(0, "float32"), "parameter 0 is 'w' float32.*'w' float64"),
    ],
    ids=["reshaped", "missing", "renamed", "other dtype"],
)
def test_worker_with_other_parameters_is_refused_by_the_first_that_differs(centers, params, words):
    first = Worker(centers, some(1))
    with pytest.raises(LayoutMismatch, match=words):
        centers.connect(params, 1)
    first.pull()
    assert_all(first.params, 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_model_that_is_not_finite_cannot_become_the_center(centers, bad):
    params = some(1)
    params["b"][2] = bad
    with pytest.raises(InvalidArgument, match="'b'"):
        centers.connect(params)
    second = Worker(centers, some(2), rank=1)
    assert second.is_creator
    assert_all(second.params, 2)


def test_diverged_worker_may_join_a_center_that_is_there(centers):
    Worker(centers, some(1))
    late = Worker(centers, some(np.nan), rank=1)
    assert_all(late.params, 1)


def test_live_workers_are_counted(centers):
    first = Worker(centers, some())
    assert first.center.live == 1
    Worker(centers, some(), rank=1)
    assert first.center.live == 2


# Exchange, pull, push


def test_exchange_is_the_rule_on_every_parameter(centers):
    first, second = Worker(centers, some(0)), Worker(centers, some(0), rank=1)
    for array in first.params.values():
        array += 8
    first.exchange(EASGD(0.25))
    assert_all(first.params, 6)
    second.pull()
    assert_all(second.params, 2)
    second.exchange(ASGD(1.0, 1.0))
    assert_all(second.params, 4)


def test_push_sets_the_center_and_pull_the_replica(centers):
    first, second = Worker(centers, some(1)), Worker(centers, some(1), rank=1)
    for array in first.params.values():
        array += 2
    first.push()
    assert_all(first.params, 3)
    assert_all(second.params, 1)
    second.pull()
    assert_all(second.params, 3)


def test_values_seen_on_the_way_are_those_of_the_center(centers):
    worker = Worker(centers, some(4))
    seen: dict[int, np.ndarray] = {}
    worker.center.pull(worker.model, lambda k, value: seen.update({k: value.copy()}))
    assert sorted(seen) == list(range(len(worker.center.layout.chunks)))
    assert {float(v) for value in seen.values() for v in value} == {4.0}
    worker.params["s"][...] = 5
    seen.clear()
    worker.center.push(worker.model, lambda k, value: seen.update({k: value.copy()}))
    reader = EntryReader(worker.center.layout, seen.__getitem__)
    assert [set(reader.read(i).reshape(-1).tolist()) for i in range(3)] == [{4}, {4}, {5}]


def test_bytes_of_an_exchange_are_counted_both_ways(centers):
    worker = Worker(centers, {"w": np.zeros((2, 3), "float32"), "h": np.zeros(5, "float16"), "d": np.zeros(1)})
    size_bytes = 4 * 6 + 4 * 5 + 8
    assert worker.pull().size_bytes == size_bytes
    assert worker.push().size_bytes == size_bytes
    assert worker.exchange(EASGD(0.5)).size_bytes == 2 * size_bytes


def test_arrays_of_all_dtypes_and_shapes_are_exchanged(centers):
    def params(fill: float) -> Params:
        return {
            "half": np.full((2, 2), fill, "float16"),
            "empty": np.zeros((0, 3), "float32"),
            "single": np.full(5, fill, "float32"),
            "scalar": np.full((), fill, "float64"),
            "transposed": np.full((2, 3), fill, "float32").T,
            "double": np.full((3, 1, 2), fill, "float64"),
            "none": np.zeros(0, "float64"),
        }

    first, second = Worker(centers, params(1)), Worker(centers, params(1), rank=1)
    for array in first.params.values():
        array += 4
    assert first.exchange(EASGD(0.5)).refused == []
    second.pull()
    for worker in (first, second):
        for name, array in worker.params.items():
            np.testing.assert_array_equal(array, np.full(array.shape, 3), err_msg=name)
            assert array.dtype == params(0)[name].dtype
    first.params["scalar"][...] = 7
    first.push()
    second.pull()
    assert second.params["scalar"] == 7


def test_model_of_empty_arrays_is_a_model(centers):
    worker = Worker(centers, {"e": np.zeros((0, 3), "float32")})
    assert worker.exchange(EASGD(0.5)).size_bytes == 0


def test_many_parameters_of_uneven_sizes_do_not_overlap(centers):
    rng = np.random.default_rng(0)
    params = {
        f"p{i}": rng.normal(size=n).astype(d) for i, (n, d) in enumerate([(1023, "f4"), (3, "f8"), (4097, "f4")] * 7)
    }
    expected = {name: value.copy() for name, value in params.items()}
    first = Worker(centers, params)
    second = Worker(centers, {name: np.zeros_like(value) for name, value in params.items()}, rank=1)
    for name, value in second.params.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    first.params["p3"] += 1
    first.push()
    second.pull()
    for name, value in second.params.items():
        np.testing.assert_array_equal(value, expected[name] + (name == "p3"), err_msg=name)


@pytest.mark.parametrize("centers", ["shared-entries", "shared-default", "tcp-entries", "tcp-default"], indirect=True)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_parameters_of_some_megabytes_are_exchanged_whole(centers, dtype):
    def params() -> Params:
        return {"first": np.zeros(3, dtype), "large": np.zeros(1_300_007, dtype), "none": np.zeros(0, dtype)}

    first, second = Worker(centers, params()), Worker(centers, params(), rank=1)
    for worker in (first, second):
        worker.params["large"] += np.arange(1_300_007) % 97
        worker.params["first"] += 1
        assert worker.exchange(Downpour()).refused == []
    first.pull()
    first.params["large"][-1] = first.params["large"][0] = np.nan
    assert first.exchange(EASGD(0.5)).refused == ["large"]
    second.pull()
    for worker in (first, second):
        np.testing.assert_array_equal(worker.params["large"], 2 * (np.arange(1_300_007) % 97) * 1.0)
        np.testing.assert_array_equal(worker.params["first"], 2)


def test_worker_that_closes_leaves_the_center_to_the_others(centers):
    first, second = Worker(centers, some(1)), Worker(centers, some(1), rank=1)
    first.center.close()
    second.params["w"] += 1
    second.exchange(Downpour())
    late = Worker(centers, some(5), rank=0)
    assert not late.is_creator
    np.testing.assert_array_equal(late.params["w"], 2)


# Staleness


def test_exchanges_of_others_since_one_s_last_are_counted(centers):
    class Watching(EASGD):
        def exchange(self, x, c, state, moment):
            seen.append(moment.staleness)
            return super().exchange(x, c, state, moment)

    seen: list[int] = []
    first, second = Worker(centers, some()), Worker(centers, some(), rank=1)
    assert first.exchange(Watching(0.5)).staleness == 0
    for _ in range(3):
        second.exchange(EASGD(0.5))
    second.pull()  # looking is no exchange
    assert first.exchange(Watching(0.5)).staleness == 3
    assert first.exchange(Watching(0.5)).staleness == 0
    assert [staleness for staleness, _ in itertools.groupby(seen)] == [0, 3, 0]


def test_fresh_pull_is_not_stale(centers):
    first, second = Worker(centers, some()), Worker(centers, some(), rank=1)
    second.exchange(EASGD(0.5))
    first.pull()
    assert first.exchange(EASGD(0.5)).staleness == 0


# What is not finite


def test_contribution_that_is_not_finite_is_refused_and_named(centers):
    first, second = Worker(centers, some(2)), Worker(centers, some(2), rank=1)
    first.params["b"][1] = np.nan
    first.params["s"][...] = np.inf
    first.params["w"] += 2
    assert sorted(first.exchange(EASGD(0.5)).refused) == ["b", "s"]
    np.testing.assert_array_equal(first.params["w"], 3)
    np.testing.assert_array_equal(first.params["b"], 2)
    second.pull()
    np.testing.assert_array_equal(second.params["w"], 3)
    np.testing.assert_array_equal(second.params["b"], 2)
    np.testing.assert_array_equal(second.params["s"], 2)
    assert first.exchange(EASGD(0.5)).refused == []


@pytest.mark.parametrize("rule", [EASGD(0.5), ASGD(), Downpour()], ids=repr)
def test_no_rule_lets_a_diverged_worker_poison_the_center(centers, rule):
    first, second = Worker(centers, some(2)), Worker(centers, some(2), rank=1)
    for array in first.params.values():
        array[...] = np.nan
    assert len(first.exchange(rule).refused) == 3
    assert_all(first.params, 2)
    second.pull()
    assert_all(second.params, 2)


def test_push_of_what_is_not_finite_leaves_that_parameter_alone(centers):
    first, second = Worker(centers, some(2)), Worker(centers, some(2), rank=1)
    for array in first.params.values():
        array += 1
    first.params["b"][0] = np.inf
    assert first.push().refused == ["b"]
    second.pull()
    np.testing.assert_array_equal(second.params["b"][0], 2)
    np.testing.assert_array_equal(second.params["w"], 3)


# Nothing is lost, nothing counted twice


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_changes_of_interleaved_workers_add_up_exactly(centers, dtype):
    workers = [Worker(centers, some(0, dtype), rank=rank) for rank in range(3)]
    for turn in range(30):
        worker = workers[turn * 7 % 3]
        for array in worker.params.values():
            array += turn
        worker.exchange(Downpour())
    workers[0].pull()
    assert_all(workers[0].params, sum(range(30)))


def test_asynchronous_diloco_follows_its_equations_for_a_given_order_of_arrivals(centers):
    """The state at the center is shared by all workers, and each worker's change counts from what it last received."""
    rule, rng = DiLoCo(lr=0.5, momentum=0.8, sync=False, buffer=3), np.random.default_rng(2)
    workers = [Worker(centers, some(1.0), rank, rule.center_state) for rank in range(3)]
    theta, m, s = 1.0, 0.0, 0.0
    for t, w in enumerate([0, 1, 2, 2, 1, 0, 0, 0, 2, 1, 2], 1):
        change = rng.normal()
        for array in workers[w].params.values():
            array += change
        workers[w].exchange(rule)
        s += change / 3
        m = 0.8 * m + s if t % 3 == 0 else m
        step = change / 3 + (0.8 * m if t % 3 == 0 else 0.0)
        theta, s = theta + 0.5 * step, 0.0 if t % 3 == 0 else s
        for array in workers[w].params.values():
            np.testing.assert_allclose(array, theta, rtol=1e-12)
    late = Worker(centers, some(0.0), 3, rule.center_state)  # a newcomer begins with the center
    for array in late.params.values():
        np.testing.assert_allclose(array, theta, rtol=1e-12)


def test_asynchronous_diloco_refuses_what_is_not_finite(centers):
    rule = DiLoCo(sync=False, buffer=2)
    worker = Worker(centers, some(1.0), 0, rule.center_state)
    worker.params["b"][1] = np.nan
    worker.params["w"] += 1
    assert worker.exchange(rule).refused == ["b"]
    assert worker.params["b"].tolist() == [1, 1, 1] and (worker.params["w"] > 1).all()


def test_concurrent_exchanges_add_up_exactly(centers):
    rounds, workers = 25, [Worker(centers, some(), rank=rank) for rank in range(4)]
    together(workers, lambda worker: train(worker, Downpour(), rounds))
    workers[0].pull()
    assert_all(workers[0].params, rounds * len(workers))


def test_exchange_of_one_parameter_is_a_transaction(centers):
    class Slow(Rule):
        """Reads, waits, and writes: loses a change whenever another comes in between."""

        worker_vectors = ("own",)

        def exchange(self, x, c, state, moment):
            value = c + (x - state["own"])
            time.sleep(1e-4)
            c[:] = x[:] = state["own"][:] = value
            return

    rounds, workers = 8, [Worker(centers, some(), rank=rank) for rank in range(4)]
    together(workers, lambda worker: train(worker, Slow(), rounds))
    workers[0].pull()
    assert_all(workers[0].params, rounds * len(workers))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_exchange_without_a_change_leaves_the_center_alone(centers, dtype):
    # Half precision cannot hold the center's value, which is float32: the rounding is no change of this worker's.
    first, second = Worker(centers, some(1, dtype)), Worker(centers, some(1, dtype), rank=1)
    first.params["b"] -= np.dtype(dtype).type(2**-11)
    first.exchange(Downpour())
    second.params["b"] += np.dtype(dtype).type(2**-10)
    second.exchange(Downpour())  # the center is at 1 + 2**-11 now, half-way between two float16
    np.testing.assert_array_equal(seen(centers, first.params)["b"], 1 + 2**-11)
    for _ in range(3):
        second.exchange(Downpour())
        first.exchange(Downpour())
    late = Worker(centers, some(0, dtype), rank=2)
    late.exchange(Downpour())
    np.testing.assert_array_equal(seen(centers, first.params)["b"], 1 + 2**-11)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_state_of_a_rule_of_one_s_own_is_kept_from_exchange_to_exchange(centers, dtype):
    class Counting(Rule):
        """Counts exchanges since the last pull, and puts the count into the center."""

        worker_vectors = ("own",)

        def mix(self, x, c, state):
            state["own"] += 1
            return x, state["own"]

        def remember(self, c, state):
            state["own"][:] = 0

    worker = Worker(centers, some(0, dtype))
    for _ in range(3):
        worker.exchange(Counting())
    worker.pull()
    assert_all(worker.params, 3)


@contextlib.contextmanager
def stopped(centers: Centers, k: int):
    """A local worker that is stopped while it writes chunk k, for the length of a `with` block."""
    center = SharedCenter.open(centers.segment(), centers.segment().path / "center-0", rank=9)
    assert center is not None and center.try_lock(k)
    center.begin_write(k)
    yield
    center.end_write(k)
    center.unlock(k)
    center.close()


class Adding(Rule):
    """Adds what the worker has changed, as Downpour does; computed at the worker."""

    def exchange(self, x, c, state, moment):
        c += x - state["own"]
        x[:] = state["own"][:] = c


@pytest.mark.parametrize("rule", [Downpour(), Adding()], ids=["Downpour", "own rule"])
@pytest.mark.parametrize("is_last", [False, True])
def test_worker_that_is_stopped_in_a_write_holds_nobody_up_and_nothing_is_lost(centers, rule, is_last, monkeypatch):
    monkeypatch.setattr("maniple.center.shared.STUCK_S", 0.02)
    monkeypatch.setattr("maniple.center.tcp_server.STUCK_S", 0.02)
    workers = [Worker(centers, some(), rank) for rank in range(2)]
    chunk = len(workers[0].center.layout.chunks) // 2
    stuck = set(workers[0].center.layout.names_in(chunk))
    with stopped(centers, chunk):
        for _ in range(3):
            for worker in workers:
                for value in worker.params.values():
                    value += 1
                assert set(worker.exchange(rule).locked) == stuck
        late = Worker(centers, some(5), 2)  # it can begin
        assert np.isfinite(late.params["w"]).all()
    if is_last:
        release = threading.Timer(0.3, lambda: None)
        with contextlib.ExitStack() as stack:
            stack.enter_context(stopped(centers, chunk))
            release = threading.Timer(0.3, stack.pop_all().close)
            release.start()
            assert workers[0].exchange(rule, ExchangeInfo(is_last=True)).locked == []
            release.join()
    for worker in (*workers, *workers):
        assert worker.exchange(rule).locked == []
    workers[0].pull()
    assert_all(workers[0].params, 6)


class Heavy(Rule):
    """Keeps a momentum and a count at the center, and how often it exchanged at the worker."""

    center_vectors, center_scalars = ("momentum",), ("count",)

    def mix(self, x, c, state):
        state["count"] += 1
        state["momentum"] *= 0.9
        state["momentum"] += (x - c) / state["count"]
        state["own"] += 1
        return c + state["momentum"] + 0.001 * state["own"], c + state["momentum"]


def heavy(worker: Worker, rule: Rule) -> tuple[np.ndarray, RuleState]:
    """What a worker sees of the center: its flat values, and the rule's state."""
    state = RuleState.zeros(worker.center.layout, rule.center_state)
    worker.center.pull(worker.model, peek=True, state_copy=state.chunks)
    return np.concatenate([value.ravel() for value in worker.params.values()]), state


def test_rule_may_keep_vectors_and_scalars_at_the_center(centers):
    rule = Heavy()
    workers = [Worker(centers, some(), rank, rule.center_state) for rank in range(2)]
    for one in workers:
        for its in one.state:
            its["own"][:] = 0
    x, own = [np.zeros(10), np.zeros(10)], [0, 0]  # what each has, by the same equations
    c, momentum = np.zeros(10), np.zeros(10)
    for count in range(1, 8):
        i = (count * count) % 2
        for value in workers[i].params.values():
            value += count
        x[i] = x[i] + count
        outcome = workers[i].exchange(rule)
        assert not outcome.refused
        own[i] += 1
        momentum = momentum * 0.9
        momentum += (x[i] - c) / np.float64(count)
        x[i], c = c + momentum + 0.001 * np.float64(own[i]), c + momentum
        flat = np.concatenate([value.ravel() for value in workers[i].params.values()])
        np.testing.assert_array_equal(flat, x[i])
    flat, state = heavy(Worker(centers, some(), 2, rule.center_state), rule)
    np.testing.assert_array_equal(flat, c)
    np.testing.assert_array_equal(state.vectors["momentum"]["float64"], momentum)
    np.testing.assert_array_equal(state.scalars["count"], 7)


def test_values_that_are_not_finite_change_no_state_at_the_center(centers):
    rule = Heavy()
    worker = Worker(centers, some(), 0, rule.center_state)
    for its in worker.state:
        its["own"][:] = 0
    for value in worker.params.values():
        value += 1
    worker.params["b"][1] = np.inf
    assert worker.exchange(rule).refused == ["b"]
    flat, state = heavy(worker, rule)
    momentum = state.vectors["momentum"]["float64"]
    assert np.isfinite(flat).all() and np.isfinite(momentum).all()
    assert flat[7] == momentum[7] == 0 and (momentum[:6] == 1).all()


def test_push_may_bring_the_state_that_the_worker_has(centers):
    rule = Heavy()
    worker = Worker(centers, some(2), 0, rule.center_state)
    state = RuleState.zeros(worker.center.layout, rule.center_state)
    state.vectors["momentum"]["float64"][:] = np.arange(10)
    state.scalars["count"][:] = 5
    worker.center.push(worker.model, state_copy=state.chunks)
    worker.push()  # without it: the center's stays
    _, found = heavy(Worker(centers, some(), 1, rule.center_state), rule)
    np.testing.assert_array_equal(found.vectors["momentum"]["float64"], np.arange(10))
    np.testing.assert_array_equal(found.scalars["count"], 5)


def test_worker_whose_rule_keeps_other_state_is_refused(centers):
    Worker(centers, some(), 0, Heavy().center_state)
    with pytest.raises(LayoutMismatch, match=r"keeps nothing at the center, but the center has 'momentum', 'count'"):
        centers.connect(some(), 1)


@pytest.mark.parametrize("rule", [EASGD(0), Downpour()], ids=repr)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("every", [1, 10])
def test_one_worker_trains_as_if_alone_bit_for_bit(centers, rule, dtype, every):
    rng = np.random.default_rng(0)
    start = {"w": rng.normal(size=50).astype(dtype)}
    plain = {"w": start["w"].copy()}
    worker = Worker(centers, start)
    for step in range(100):
        change = rng.normal(scale=0.1, size=50).astype(dtype)
        plain["w"] += change
        worker.params["w"] += change
        if step % every == every - 1:
            worker.exchange(rule)
    assert worker.params["w"].tobytes() == plain["w"].tobytes()


def train(worker: Worker, rule: Rule, rounds: int) -> None:
    for _ in range(rounds):
        for array in worker.params.values():
            array += 1
        worker.exchange(rule)


def together(workers: list[Worker], act: Any) -> None:
    """Each worker in a thread of its own, all at once; an error in one is an error of the test."""
    errors: list[BaseException] = []
    gate = threading.Barrier(len(workers))

    def run(worker: Worker) -> None:
        try:
            gate.wait(10)
            act(worker)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)
