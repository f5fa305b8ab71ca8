"""Compressed rounds: all workers get the same bits, and what a round leaves out comes with the next ones.

Over messages between threads, whose bytes are counted, and in shared memory.
"""

import queue
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maniple.collectives.call import nonfinite_weight
from maniple.collectives.peer_to_peer import PeerLink, PeerMessage, PeerToPeer
from maniple.errors import InvalidArgument
from maniple.memory.segment import Segment
from maniple.wire.codecs import get_codec

from .collectives_threads import collective_groups, together

WORLD = 3
WIRES = ["int8", "int4", "topk"]
SIZE = 5003
PATIENCE_S = 30.0  # only against hanging


class ThreadLink(PeerLink):
    """Messages between the threads of this process, with a count of their bytes by tag."""

    def __init__(self, rank: int, world: int, queues: dict[tuple[int, int, int], queue.Queue[np.ndarray]]) -> None:
        super().__init__(rank, world, PATIENCE_S)
        self._queues = queues
        self.sent: dict[int, int] = defaultdict(int)

    def begin_send(self, peer: int, data: np.ndarray, tag: int) -> Any:
        self.sent[tag] += data.nbytes
        self._queues[self.rank, peer, tag].put(data.copy())

    def begin_receive(self, peer: int, data: np.ndarray, tag: int) -> Any:
        return self._queues[peer, self.rank, tag]

    def wait(self, messages: list[PeerMessage]) -> tuple[set[int], set[int]]:
        for message in messages:
            if message.work is not None:
                message.data[...] = message.work.get(timeout=PATIENCE_S)
        return set(), set()


class Messages:
    """Workers that send each other messages."""

    name = "messages"

    def __init__(self, _: Path) -> None:
        queues: dict[tuple[int, int, int], queue.Queue[np.ndarray]] = defaultdict(queue.Queue)
        self.links = [ThreadLink(rank, WORLD, queues) for rank in range(WORLD)]
        self.groups = [PeerToPeer(link) for link in self.links]

    @staticmethod
    def own_error(resident: Any) -> np.ndarray:
        """What one worker owes."""
        sent = resident._slices[0]._sent
        return np.concatenate([one._error for one in (sent if isinstance(sent, list) else [sent])])

    @staticmethod
    def error_of_mean(residents: list[Any]) -> np.ndarray:
        """What the owners of slices owe."""
        parts = [resident._slices[0] for resident in residents]
        return np.concatenate([part._mean._error for part in parts]) if hasattr(parts[0], "_mean") else np.zeros(SIZE)

    def close(self) -> None:
        pass


class Shared:
    """Workers of one machine."""

    name = "shared"

    def __init__(self, folder: Path) -> None:
        self.segment = Segment.create(folder, "0123456789abcdef", folder)
        self.groups = collective_groups(self.segment, WORLD)

    @staticmethod
    def own_error(resident: Any) -> np.ndarray:
        return resident._feedback._sent[0]._error.copy()

    @staticmethod
    def error_of_mean(residents: list[Any]) -> np.ndarray:
        return sum((mean._error for mean in residents[0]._feedback._mean), np.zeros(SIZE))

    def close(self) -> None:
        for group in self.groups:
            group.close()
        self.segment.remove()


@pytest.fixture(params=[Messages, Shared], ids=lambda kind: kind.name)
def workers(request, tmp_path):
    workers = request.param(tmp_path)
    yield workers
    workers.close()


def open_vectors(groups: list[Any], wire: str, sizes: dict[str, int] | None = None) -> list[Any]:
    return together([lambda g=g: g.reside(sizes or {"float64": SIZE}, wire=wire) for g in groups])


def make_round(residents: list[Any], values: list[np.ndarray], weights: list[float], op: str = "mean") -> list[Any]:
    """One round of all; gives its outcomes."""

    def act(resident: Any, own: np.ndarray, weight: float) -> Any:
        for vector in resident.flat.values():
            vector[:] = own[: vector.size]
        return resident.all_reduce(op, weight=weight)

    done = together([lambda a=a: act(*a) for a in zip(residents, values, weights, strict=True)])
    for one in done:
        if isinstance(one, BaseException):
            raise one
    return done


def some(rng: np.random.Generator, count: int = SIZE) -> list[np.ndarray]:
    """Values of all workers, of very different sizes."""
    return [rng.standard_normal(count) * 2.0 ** rng.integers(-10, 1, count) for _ in range(WORLD)]


def mean(values: list[np.ndarray], weights: list[float]) -> np.ndarray:
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [2.0, 1.0, 5.0]], ids=str)
@pytest.mark.parametrize("wire", WIRES)
def test_sum_of_all_rounds_is_that_of_the_means_but_for_what_is_still_owed(workers, wire, weights):
    residents, rng = open_vectors(workers.groups, wire), np.random.default_rng(1)
    arrived, expected = np.zeros(SIZE), np.zeros(SIZE)
    for _ in range(20):
        values = some(rng)
        done = make_round(residents, values, weights)
        assert {one.weight for one in done} == {sum(weights)}
        assert len({resident.flat["float64"].tobytes() for resident in residents}) == 1, "the same bits for all"
        arrived += residents[0].flat["float64"]
        expected += mean(values, weights)
    owed = mean([workers.own_error(resident) for resident in residents], weights) + workers.error_of_mean(residents)
    np.testing.assert_allclose(arrived + owed, expected, atol=1e-9)
    for _ in range(200):
        make_round(residents, [np.zeros(SIZE)] * WORLD, weights)
        arrived += residents[0].flat["float64"]
    np.testing.assert_allclose(arrived, expected, atol=0.01 if wire != "topk" else 0.1)


@pytest.mark.parametrize("wire", WIRES)
def test_engines_give_similar_results(tmp_path, wire):
    found = []
    for kind in (Messages, Shared):
        (tmp_path / kind.name).mkdir()
        workers, rng = kind(tmp_path / kind.name), np.random.default_rng(2)
        residents = open_vectors(workers.groups, wire)
        for _ in range(5):
            make_round(residents, some(rng), [1.0] * WORLD)
        found.append(residents[0].flat["float64"].copy())
        workers.close()
    if wire == "topk":
        np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    else:  # groups of 256 begin elsewhere
        assert np.corrcoef(found[0], found[1])[0, 1] > (0.999 if wire == "int8" else 0.9)


@pytest.mark.parametrize("wire", WIRES)
def test_a_contribution_that_is_left_out_leaves_its_worker_s_error_alone(workers, wire):
    residents, rng = open_vectors(workers.groups, wire), np.random.default_rng(3)
    make_round(residents, some(rng), [1.0] * WORLD)
    before = [workers.own_error(resident) for resident in residents]
    values = some(rng)
    values[1][:] = np.nan
    done = make_round(residents, values, [1.0, nonfinite_weight(0), 0.0])
    assert done[0].nonfinite == {1: 0} and done[0].ranks == (0,)
    assert len({resident.flat["float64"].tobytes() for resident in residents}) == 1
    assert np.isfinite(residents[0].flat["float64"]).all()
    for rank, error in enumerate(before):
        assert np.array_equal(workers.own_error(residents[rank]), error) == (rank > 0)


@pytest.mark.parametrize("wire", WIRES)
def test_a_round_of_no_contribution_changes_nothing(workers, wire):
    residents, rng = open_vectors(workers.groups, wire), np.random.default_rng(3)
    make_round(residents, some(rng), [1.0] * WORLD)
    before = [workers.own_error(resident) for resident in residents]
    make_round(residents, [np.full(SIZE, 7.0)] * WORLD, [0.0] * WORLD)
    for resident, error in zip(residents, before, strict=True):
        np.testing.assert_array_equal(resident.flat["float64"], 7)
        np.testing.assert_array_equal(workers.own_error(resident), error)


@pytest.mark.parametrize("wire", WIRES)
def test_a_sum_is_that_of_all_contributions(workers, wire):
    residents, rng, arrived, expected = open_vectors(workers.groups, wire), np.random.default_rng(7), 0.0, 0.0
    for _ in range(5):
        values = some(rng)
        make_round(residents, values, [1.0, 0.0, 3.0], "sum")  # weights are for means
        arrived += residents[0].flat["float64"]
        expected += sum(values)
    owed = sum(workers.own_error(resident) for resident in residents) + workers.error_of_mean(residents)
    np.testing.assert_allclose(arrived + owed, expected, atol=1e-9)


@pytest.mark.parametrize("wire", WIRES)
def test_values_that_are_not_finite_poison_no_error(workers, wire):
    """As of gradients that were sent before it was known that others are not finite."""
    residents, rng = open_vectors(workers.groups, wire), np.random.default_rng(4)
    values = some(rng)
    values[2][17] = np.inf
    make_round(residents, values, [1.0] * WORLD)
    assert not np.isfinite(residents[0].flat["float64"][17])
    make_round(residents, some(rng), [1.0] * WORLD)
    for resident in residents:
        assert np.isfinite(resident.flat["float64"]).all()


@pytest.mark.parametrize("wire", ["float32", "bfloat16", *WIRES])
def test_bytes_of_a_round_are_those_of_the_formula(tmp_path, wire):
    count = 200_000
    workers = Messages(tmp_path)
    residents = open_vectors(workers.groups, wire, {"float32": count})
    before = [sum(link.sent.values()) for link in workers.links]
    done = make_round(residents, some(np.random.default_rng(5), count), [1.0] * WORLD)
    size = get_codec(wire).size_bytes(count, 4)
    formula = (WORLD - 1) * size if wire == "topk" else 2 * size * (WORLD - 1) / WORLD
    for link, sent, one in zip(workers.links, before, done, strict=True):
        assert one.size_bytes == pytest.approx(formula, rel=0.02)
        assert one.size_bytes <= sum(link.sent.values()) - sent <= 1.02 * formula


@pytest.mark.parametrize("wire", WIRES)
def test_small_and_empty_vectors_of_several_dtypes_are_reduced(workers, wire):
    sizes = {"float32": 2, "float64": 1, "float16": 3, "int64": 4}
    residents = open_vectors(workers.groups, wire, sizes)
    for _ in range(3):
        make_round(residents, [np.arange(4) + rank for rank in range(WORLD)], [1.0] * WORLD, "sum")
    for resident in residents:
        assert {dtype: one.tobytes() for dtype, one in resident.flat.items()} == {
            dtype: one.tobytes() for dtype, one in residents[0].flat.items()
        }
        assert resident.flat["int64"].tolist() == [3, 6, 9, 12], "whole numbers are never compressed"
        assert resident.flat["float16"].tolist() == [3, 6, 9]


@pytest.mark.parametrize("wire", WIRES)
def test_exact_values_at_the_end_are_those_of_full_precision(workers, wire):
    """Flags, and buffers such as variances, which an error would make negative."""
    act = [lambda g=g: g.reside({"float64": SIZE}, wire=wire, exact={"float64": 5}) for g in workers.groups]
    residents, values = together(act), some(np.random.default_rng(8))
    make_round(residents, values, [1.0, 2.0, 1.0])
    expected = mean(values, [1.0, 2.0, 1.0])
    for resident in residents:
        np.testing.assert_allclose(resident.flat["float64"][-5:], expected[-5:], rtol=1e-12)
        assert not np.allclose(resident.flat["float64"][:-5], expected[:-5], rtol=1e-3)
        assert resident.flat["float64"].tobytes() == residents[0].flat["float64"].tobytes()


@pytest.mark.parametrize("wire", WIRES)
def test_what_has_no_errors_is_refused(workers, wire):
    resident = open_vectors(workers.groups, wire)[0]
    with pytest.raises(InvalidArgument, match=f"wire='{wire}' keeps errors.*max has none"):
        resident.all_reduce("max")
    x = np.ones(3, np.float32)
    for call in (
        lambda: workers.groups[0].all_reduce(x, x, "sum", wire=wire),
        lambda: workers.groups[0].all_gather(x, wire=wire),
    ):
        with pytest.raises(
            InvalidArgument, match=rf"wire='{wire}' adds the errors.*Use one of float32, float16, bfloat16"
        ):
            call()


@pytest.mark.parametrize("wire", WIRES)
def test_members_that_change_keep_the_same_bits(tmp_path, wire):
    """A worker leaves and comes back; the others go on, and it brings its own error."""
    workers, rng = Shared(tmp_path), np.random.default_rng(6)
    residents = open_vectors(workers.groups, wire)
    for _ in range(3):
        make_round(residents, some(rng), [1.0] * WORLD)
    workers.groups[2].membership.leave()
    for _ in range(2):
        make_round(residents[:2], some(rng)[:2], [1.0] * 2)
        assert residents[0].flat["float64"].tobytes() == residents[1].flat["float64"].tobytes()

    def go_on(rank: int) -> list[bytes]:
        """Rounds until three had all members; gives their results."""
        found, own = list[bytes](), np.random.default_rng(rank)
        if rank == 2:
            assert workers.groups[2].membership.join() is True
        while len(found) < 3:
            workers.groups[rank].membership.provide_state()
            residents[rank].flat["float64"][:] = own.standard_normal(SIZE)
            if residents[rank].all_reduce("mean").ranks == (0, 1, 2):
                found.append(residents[rank].flat["float64"].tobytes())
        return found

    first, *others = together([lambda rank=rank: go_on(rank) for rank in range(WORLD)])
    assert len(first) == 3 and all(other == first for other in others)
    workers.close()
