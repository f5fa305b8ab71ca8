"""What every center promises with a gate: outliers are clipped or refused, and the others are not changed by it."""

import contextlib
import math

import numpy as np
import pytest

from maniple import ASGD, EASGD, Downpour, Gate, Rule
from maniple.adapters import adapt
from maniple.center import Segment, SharedCenter
from maniple.center.gate_memory import agreement_on
from maniple.center.shared import finish_all
from maniple.center.snapshot import check_snapshot, restore, write_snapshot
from maniple.contracts import ExchangeInfo, Operation
from maniple.errors import InvalidArgument
from maniple.memory.segment import CenterFile
from maniple.wire.codecs import CODECS

from .test_center import CENTERS, Worker

SIZE = 200
RULES = {"easgd": EASGD(0.25), "asgd": ASGD(0.5, 0.5), "downpour": Downpour(), "compensated": Downpour(compensate=True)}


@pytest.fixture(params=[f"{center}-{chunks}" for center in CENTERS for chunks in ("entries", "default")])
def centers(request, tmp_path, monkeypatch):
    kind, _, chunks = request.param.partition("-")
    if chunks == "entries":
        monkeypatch.setattr("maniple.center.shared.CHUNK_BYTES", 0)
    centers = CENTERS[kind](tmp_path)
    yield centers
    centers.close()


def some(fill: float = 0.0) -> dict[str, np.ndarray]:
    return {"w": np.full(SIZE, fill), "b": np.full((3, 5), fill)}


def joined(centers, rule: Rule, gate: Gate | None, rank: int = 0) -> Worker:
    return Worker(centers, some(1.0), rank, gate=agreement_on(gate, rule))


def train(worker: Worker, rule: Rule, *, steps: int, scale: float = 0.01, seed: int = 1) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        for array in worker.params.values():
            array += scale * rng.standard_normal(array.shape)
        outcome = worker.exchange(rule)
        assert not outcome.gated
        assert outcome.factor == outcome.weight == 1


def opened(segment: Segment) -> SharedCenter:
    center = SharedCenter.open(segment, segment.path / "center-0")
    assert center is not None
    return center


def center_of(centers) -> dict[str, np.ndarray]:
    with contextlib.closing(opened(centers.segment())) as center:
        flat = np.concatenate([center.read(k) for k in range(len(center.layout.chunks))])
    return {"w": flat[:SIZE], "b": flat[SIZE:].reshape(3, 5)}


@pytest.mark.parametrize("name", RULES)
def test_ordinary_contributions_are_not_changed_by_a_bit(tmp_path, name):
    for kind, make in CENTERS.items():
        found = []
        for gate in (None, Gate(minimum=4, window=8)):
            (folder := tmp_path / f"{kind}-{gate is None}").mkdir()
            centers = make(folder)
            worker = joined(centers, RULES[name], gate)
            train(worker, RULES[name], steps=12)
            found.append((center_of(centers), worker.params))
            centers.close()
        for plain, gated in zip(*found, strict=True):
            assert all((plain[key] == gated[key]).all() for key in plain), kind


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("action", ["clip", "refuse"])
def test_an_outlier_is_clipped_or_refused_and_reported(centers, name, action):
    rule = RULES[name]
    worker = joined(centers, rule, Gate(action=action, minimum=8))
    train(worker, rule, steps=10)
    before, old = center_of(centers), {key: value.copy() for key, value in worker.params.items()}
    for array in worker.params.values():
        array += 1000.0
    outcome = worker.exchange(rule)
    after = center_of(centers)
    assert set(outcome.gated) == {"w", "b"}
    moved = max(float(np.abs(after[key] - before[key]).max()) for key in after)
    if action == "refuse":
        assert outcome.factor == 0
        assert moved == 0
    else:
        assert 0 < outcome.factor < 1e-3
        assert 0 < moved < 0.1
    if isinstance(rule, EASGD):
        for key, x in worker.params.items():
            if action == "refuse":
                assert np.abs(x).max() < 800, "it comes back"
            else:
                assert x + after[key] == pytest.approx(old[key] + 1000 + before[key], rel=1e-12)
    else:
        assert all((worker.params[key] == after[key]).all() for key in after), "the replica takes the center"


def test_what_is_cut_off_is_not_sent_again_later(centers):
    worker = joined(centers, Downpour(), Gate(action="refuse", minimum=8))
    train(worker, Downpour(), steps=10)
    before = center_of(centers)
    worker.params["w"] += 1000.0
    worker.exchange(Downpour())
    worker.params["w"] += 0.01
    assert not worker.exchange(Downpour()).gated
    assert center_of(centers)["w"] == pytest.approx(before["w"] + 0.01)


def test_workers_are_compared_with_each_other(centers):
    """The norms are in memory, so another worker, or a host that is restarted, goes on with them."""
    rule, gate = Downpour(), Gate(action="refuse", minimum=8)
    first = joined(centers, rule, gate)
    train(first, rule, steps=10)
    finish_all(centers.segment())
    second = joined(centers, rule, gate, rank=1)
    for array in second.params.values():
        array += 1000.0
    assert second.exchange(rule).factor == 0


def test_local_and_remote_workers_share_the_gate(tmp_path):
    centers = CENTERS["tcp"](tmp_path)
    rule, gate = Downpour(), Gate(action="refuse", minimum=8)
    remote = joined(centers, rule, gate)
    train(remote, rule, steps=10)
    params = some()
    local, _ = SharedCenter.open_or_create(
        centers.segment(), "center-0", adapt(params), rank=1, gate=agreement_on(gate, rule)
    )
    state = [{"center": one} for one in local.layout.chunk_views(local.layout.allocate())]
    for array in params.values():
        array += 1000.0
    assert local.exchange(adapt(params), rule, state, ExchangeInfo()).factor == 0
    local.close()
    centers.close()


@pytest.mark.parametrize("name", ["easgd", "downpour"])
def test_a_stale_contribution_counts_less(centers, name):
    rule, gate = RULES[name], Gate(k=math.inf, staleness=0.5)
    late, busy = joined(centers, rule, gate), joined(centers, rule, gate, rank=1)
    for _ in range(4):
        assert busy.exchange(rule).weight == 1
    before, weight = center_of(centers)["w"], math.exp(-0.5 * 4)
    late.params["w"] += 1.0
    outcome = late.exchange(rule)
    assert outcome.weight == pytest.approx(weight)
    assert not outcome.gated
    alpha = 0.25 if name == "easgd" else 1
    assert center_of(centers)["w"] == pytest.approx(before + alpha * weight)


def test_a_worker_with_another_gate_is_refused(centers):
    rule = EASGD(0.25)
    joined(centers, rule, Gate())
    with pytest.raises(InvalidArgument, match=r"no gate.*opened with Gate\(k=6.0.*for values.*same gate"):
        joined(centers, rule, None, rank=1)
    with pytest.raises(InvalidArgument, match=r"k=7"):
        joined(centers, rule, Gate(k=7), rank=1)
    with pytest.raises(InvalidArgument, match=r"for changes"):
        joined(centers, Downpour(), Gate(), rank=1)
    joined(centers, rule, Gate(), rank=1)


def test_a_gate_cannot_be_added_to_a_center_that_workers_have_opened_without(centers):
    joined(centers, EASGD(), None)
    with pytest.raises(InvalidArgument, match="opened with no gate"):
        joined(centers, EASGD(), Gate(), rank=1)


def test_values_that_are_not_finite_are_refused_as_without_a_gate(centers):
    rule = Downpour()
    worker = joined(centers, rule, Gate(minimum=8))
    train(worker, rule, steps=10)
    before = center_of(centers)
    worker.params["w"] += 1000.0
    worker.params["w"][3] = np.nan
    assert worker.exchange(rule).refused == ["w"]
    after = center_of(centers)
    assert after["w"][3] == before["w"][3]
    assert np.isfinite(after["w"]).all()
    assert np.isfinite(worker.params["w"]).all()


@pytest.mark.parametrize("wire", sorted(set(CODECS) - {"float32"}))
@pytest.mark.parametrize("name", ["easgd", "downpour"])
def test_compressed_contributions_are_judged_too(tmp_path, wire, name, monkeypatch):
    centers, rule = CENTERS["tcp"](tmp_path), RULES[name]
    worker = joined(centers, rule, Gate(action="refuse", minimum=8))
    worker.center.feedback = type(worker.center.feedback)(worker.center.layout, wire)
    train(worker, rule, steps=10, scale=0.1)
    before = center_of(centers)["w"]
    for array in worker.params.values():
        array += 1000.0
    assert worker.exchange(rule).factor == 0
    assert (center_of(centers)["w"] == before).all()
    centers.close()


def test_a_snapshot_keeps_the_gate_and_not_its_norms(centers, tmp_path):
    rule, gate = Downpour(), Gate(action="refuse", minimum=8)
    train(joined(centers, rule, gate), rule, steps=10)
    (tmp_path / "saved").mkdir()
    path = write_snapshot(centers.segment(), tmp_path / "saved", lineage="a", restored=0, versions={})
    assert path is not None
    restored = Segment.create(tmp_path / "saved", "fedcba9876543210", tmp_path)
    try:
        restore(restored, path, check_snapshot(path, "a"))
        with contextlib.closing(opened(restored)) as center:
            assert center.gate is not None
            assert center.gate.gate == gate
            assert center.gate.norms(0).size == 0
    finally:
        restored.remove()


def test_a_resumed_run_goes_on_with_the_norms_or_brings_another_gate(tmp_path):
    segment = Segment.create(tmp_path, "0123456789abcdef", tmp_path)
    model, usual = adapt(some()), agreement_on(Gate(), Downpour())
    first, _ = SharedCenter.open_or_create(segment, "center-0", model, rank=0, gate=usual)
    assert first.gate is not None
    first.gate.weigh(0, Operation("blend", is_change=True), [(np.ones(4), None)], 0)
    first.close()
    segment.close()
    resumed = Segment.adopt(tmp_path, "0123456789abcdef", tmp_path)
    assert resumed is not None
    for gate, norms in ((usual, [2.0]), (agreement_on(Gate(k=9), Downpour()), []), ("", None)):
        CenterFile(resumed.path / "center-0").let_workers_decide()
        with contextlib.closing(SharedCenter.open_or_create(resumed, "center-0", model, rank=0, gate=gate)[0]) as again:
            assert (None if again.gate is None else again.gate.norms(0).tolist()) == norms
    resumed.remove()
