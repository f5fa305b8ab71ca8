"""Every engine of collectives: the same calls on 1 to 4 real ranks, with the same results.

The ranks of an engine are started once for each number of them, and make all calls in one go; the tests look at
what each has written down.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

from maniple.wire.codecs import get_codec
from tests.contract.collectives_cases import Case, cases, group, groups
from tests.contract.collectives_ranks import ENGINES, finish, start

WORLDS = [1, 2, 3, 4]
FOLDS = {"sum": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


@dataclass
class Seen:
    """What all ranks have written down."""

    world: int
    results: list[dict[str, np.ndarray]]
    said: list[dict]

    def cases(self, kind: str) -> list[Case]:
        return [case for case in cases(self.world) if group(case) == kind]

    def of(self, case: Case, rank: int) -> list[np.ndarray]:
        i, found = cases(self.world).index(case), self.results[rank]
        return [found[name] for name in sorted((n for n in found if n.startswith(f"{i}.")), key=_number)]


def _number(name: str) -> int:
    return int(name.partition(".")[2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Where the ranks of an engine and world have written; each is started once."""
    made: dict[tuple[str, int], Path] = {}

    def folder(engine: str, world: int) -> Path:
        started = (engine, world if engine == "mpi" else max(WORLDS))
        if started not in made:
            made[started] = tmp_path_factory.mktemp(engine)
            for exit_code, words in finish(start(*started, made[started], "look")):
                assert exit_code == 0, words
        return made[started]

    return folder


@pytest.fixture(scope="module", params=[(engine, world) for engine in ENGINES for world in WORLDS], ids=str)
def seen(request: pytest.FixtureRequest, folder: Callable[[str, int], Path]) -> Seen:
    engine, world = request.param
    where = folder(engine, world)
    results = [dict(np.load(where / f"{world}-{rank}.npz")) for rank in range(world)]
    return Seen(world, results, [json.loads((where / f"{world}-{rank}.json").read_text()) for rank in range(world)])


def expected(case: Case, world: int, scale: int = 1) -> np.ndarray:
    """What the workers' values make together, computed at once and more exactly."""
    values = [case.values(rank) * scale for rank in range(world)]
    wide = [
        v.astype(v.dtype if v.dtype.kind in "iu" else np.complex128 if v.dtype.kind == "c" else float) for v in values
    ]
    if case.op != "mean":
        return reduce(FOLDS[case.op], wide)
    weights = [case.weight(rank) for rank in range(world)]
    return sum(w * v for w, v in zip(weights, wide, strict=True)) / sum(weights)


def assert_near(case: Case, found: np.ndarray, exact: np.ndarray) -> None:
    if found.dtype.kind in "iu":
        assert np.array_equal(found, exact), case
        return
    coarse = case.wire if case.wire != "float32" and case.dtype in {"float32", "float64"} else case.dtype
    step = {"bfloat16": 2**-8, "float16": 2**-11, "float64": 2**-40}.get(coarse, 2**-20)
    assert np.allclose(found, exact, rtol=4 * step, atol=8 * step), case


@pytest.mark.parametrize("kind", [name for name in groups() if "reduce" in name])
def test_reductions_give_what_one_sum_over_all_would(seen: Seen, kind: str):
    for case in seen.cases(kind):
        root = case.root(seen.world)
        weight = sum(case.weight(rank) for rank in range(seen.world))
        for rank in range(seen.world):
            found = seen.of(case, rank)
            given = found.pop(-1 if case.kind == "all_reduce" else 0)
            assert given == weight, case
            assert len(found) == (2 if case.kind == "all_reduce" else rank == root), case
            for one in found:
                assert one.dtype == case.dtype
                if weight:
                    assert_near(case, one, expected(case, seen.world))
                else:
                    assert (one == 7).all(), "nobody's values count: out stays as it was"
                if case.kind == "all_reduce":
                    assert one.tobytes() == seen.of(case, 0)[0].tobytes(), "the same bits for all, also in place"


@pytest.mark.parametrize("kind", [name for name in groups() if "resident" in name])
def test_vectors_in_their_place_are_reduced_again_and_again(seen: Seen, kind: str):
    for case in seen.cases(kind):
        weights = [case.weight(rank) for rank in range(seen.world)]
        for rank in range(seen.world):
            found = seen.of(case, rank)
            for number in range(3):
                single, double, weight = found[3 * number : 3 * number + 3]
                assert weight == sum(weights)
                if weight:
                    assert_near(case, single, expected(case, seen.world, number + 1))
                    assert single.tobytes() == seen.of(case, 0)[3 * number].tobytes(), "the same bits for all"
                else:
                    assert single.tobytes() == (case.values(rank) * (number + 1)).tobytes(), "untouched"
                    assert double.tolist() == [rank] * 3


@pytest.mark.parametrize("kind", [name for name in groups() if "broadcast" in name])
def test_all_have_what_one_had(seen: Seen, kind: str):
    for case in seen.cases(kind):
        root = case.root(seen.world)
        for rank in range(seen.world):
            (found,) = seen.of(case, rank)
            assert_near(case, found, case.values(root).astype(found.dtype))
            assert found.tobytes() == seen.of(case, root)[0].tobytes(), "the root has what the others got"


@pytest.mark.parametrize("kind", [name for name in groups() if "gather" in name])
def test_arrays_of_all_lengths_are_gathered_by_rank(seen: Seen, kind: str):
    for case in seen.cases(kind):
        for rank in range(seen.world):
            found = seen.of(case, rank)
            if case.kind == "gather" and rank != case.root(seen.world):
                assert found == []
                continue
            assert [one.dtype for one in found] == [np.dtype(case.dtype)] * seen.world
            for other, one in enumerate(found):
                assert one.shape == case.values(other).shape
                assert_near(case, one, case.values(other))


@pytest.mark.parametrize("kind", [name for name in groups() if "scatter" in name])
def test_each_gets_its_own_part(seen: Seen, kind: str):
    for case in seen.cases(kind):
        for rank in range(seen.world):
            (found,) = seen.of(case, rank)
            assert found.shape == case.values(rank).shape
            assert_near(case, found, case.values(rank))


@pytest.mark.parametrize("kind", [name for name in groups() if "pairs" in name])
def test_partners_have_each_others_arrays_and_who_has_none_gets_nothing(seen: Seen, kind: str):
    for case in seen.cases(kind):
        for rank in range(seen.world):
            found, partner = seen.of(case, rank), case.partner(rank, seen.world)
            assert len(found) == (partner != rank), case
            for one in found:
                assert one.dtype == case.dtype and one.shape == case.values(partner).shape
                assert_near(case, one, case.values(partner))


def test_a_pair_that_is_one_on_one_side_only_is_named_to_all(seen: Seen):
    for said in seen.said if seen.world > 1 else ():
        assert said["one-sided"].startswith(
            "CallMismatch: worker 0 exchanges with worker 1, but that one with worker 1"
        )


def test_calls_that_do_not_match_are_named_to_all_and_the_collectives_continue(seen: Seen):
    if seen.world == 1:
        return
    last = seen.world - 1
    for rank, said in enumerate(seen.said):
        other = 0 if rank == last else last
        assert set(said["mismatches"]) == {"kind", "dtype", "size", "op", "root", "reside", "resident"}
        for what, text in said["mismatches"].items():
            assert text.startswith(f"CallMismatch: worker {rank} made call "), what
            assert f"but worker {other} made call " in text, what
        assert "float32[3]" in said["mismatches"]["size"] and "float32[5]" in said["mismatches"]["size"]


def test_values_that_are_not_finite_are_left_out_of_a_mean_and_all_know_whose(seen: Seen):
    last = seen.world - 1
    for said in seen.said:
        for name, (nonfinite, weight, values) in said["left out"].items():
            if name.endswith(f" {seen.world}"):  # those of all: there is no mean
                assert nonfinite == [[rank, 7] for rank in range(seen.world)] and weight == 0
            else:
                assert nonfinite == [[last, 7]] and weight == last
                assert values == pytest.approx([(last - 1) / 2] * 5, rel=2**-6)
    if seen.said[0]["name"] == "torch":
        assert {"parts on the device 1", "device 1", "parts 1", "bfloat16 1"} <= set(seen.said[0]["left out"])


@pytest.mark.parametrize(("wire", "distance"), [("int8", 0.01), ("int4", 0.2), ("topk", 0.97)])
def test_compressed_rounds_give_all_the_same_bits_and_add_up_to_the_means(seen: Seen, wire: str, distance: float):
    size, world, name = get_codec(wire).size_bytes(50_000, 4), seen.world, seen.said[0]["name"]
    bytes_sent = (world - 1) * size if wire == "topk" else 2 * size * (world - 1) / world
    for said in seen.said:
        checksums, found, sent = said["compressed"][wire]
        assert checksums == seen.said[0]["compressed"][wire][0]
        assert found < distance  # topk has sent 7,820 of 50,000 values
        for counted, through_link in sent:
            if name == "shared":  # nothing travels
                assert (counted, through_link) == (4 * 50_000, 0)
            else:
                assert counted == pytest.approx(bytes_sent, rel=0.02)
                assert through_link == counted + 64 * (world - 1), "and a record of the call"


def test_two_groups_of_one_process_do_not_mix_up_their_messages(seen: Seen):
    for said in seen.said:
        assert said["two"] == [n for k in range(5) for n in (k * seen.world, 100 * k * seen.world)]


def test_a_user_s_calls_take_and_give_the_same_kinds_of_things(seen: Seen):
    world = seen.world
    whole = np.arange(10).reshape(5, 2)
    for rank, record in enumerate(seen.said):
        said = record["calls"]
        assert said["number"] == world * (world + 1) / 2
        assert said["mean of whole numbers"] == (world - 1) / 2
        assert said["strides"] == (np.arange(12.0).reshape(3, 4).T[::2] * world).tolist()
        total = sum(range(world))
        assert said["weighted"] == (sum(r * r for r in range(world)) / total if total else rank)
        assert said["gathered"] == [[[r, r]] * r for r in range(world)]
        assert said["gathered by one"] == (list(range(world)) if rank == 0 else None)
        assert said["scattered"] == whole[5 * rank // world : 5 * (rank + 1) // world].tolist()
        assert said["scattered list"] == [rank] * rank
        assert said["broadcast"] == [[world - 1]] * 2
        assert said["reduced"] == ([world - 1] if rank == 0 else None)


def test_tensors_take_part_and_an_all_reduce_is_an_operation_of_the_graph(seen: Seen):
    if seen.said[0]["name"] != "torch":
        return
    world = seen.world
    total = sum(range(1, world + 1))
    for rank, record in enumerate(seen.said):
        said = record["calls"]
        assert said["bfloat16"] == ["torch.bfloat16", True, [[total] * 3] * 2]
        assert said["detached"] is False
        values, gradient = said["graph"]
        assert values == pytest.approx([sum(r * (r + 1) for r in range(world)) / total] * 3)
        assert gradient == pytest.approx([rank + 1] * 3), "share (r + 1) / sum, of the sum of all gradients"
        assert "bfloat16" in said["tensor scatter"]


def test_vectors_of_a_device_are_reduced_by_its_own_library(seen: Seen):
    """Here Gloo's, on the CPU: the code is that of NCCL and GPUs."""
    if seen.said[0]["name"] != "torch":
        return
    world, weight = seen.world, sum(range(seen.world))
    for rank, record in enumerate(seen.said):
        found = record["calls"]["device"]
        assert {one[0] for one in found.values()} == {weight}
        mean = sum(r * r for r in range(world)) / weight if weight else rank
        for way in ("own", "parts on the device", "parts"):
            assert found[way][1:] == pytest.approx([i + mean for i in range(7)])
        assert found["ordered"][1:] == [i * world + weight for i in range(7)]
        assert found["half"][1:] == pytest.approx([i + mean for i in range(7)], rel=2**-6)
        assert found["max"][1:] == [i + world - 1 for i in range(7)]
