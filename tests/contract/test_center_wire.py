"""Compression between a worker and its host: nothing that is left out of a message is lost, whatever breaks."""

import numpy as np
import pytest

from maniple import EASGD, Downpour
from maniple.adapters import adapt
from maniple.center.tcp_client import PendingExchange, TcpCenter
from maniple.connection.link import Link
from maniple.contracts import ExchangeInfo, State
from maniple.layout import RuleState
from tests.unit.engines import engine

from ..serving import Serving

COUNT = 50_000
KEPT = 12 * 64 + -(-64 * (COUNT - 12 * 4096) // 4096)  # by topk
ONE_WAY = {
    "bfloat16": 2 * COUNT,
    "float16": 2 * COUNT,
    "int8": COUNT + 4 * -(-COUNT // 256),
    "int4": COUNT // 2 + 4 * -(-COUNT // 256),
    "topk": -(-12 * KEPT // 8) + -(-2 * KEPT // 8) + 8 * 13,
}
CHANGES = ["int8", "int4", "topk"]


@pytest.fixture
def host(tmp_path):
    host = Serving(tmp_path)
    yield host
    host.close()


class Worker:
    """A worker that sends its changes to the host; it knows their sum."""

    def __init__(self, host: Serving, wire: str, params=None, dtype=np.float64) -> None:
        self.rng = np.random.default_rng(len(wire))
        self.params = {"w": np.zeros(COUNT, dtype)} if params is None else params
        self.model = adapt(self.params)
        self.link = Link(host.door(), "data")
        self.center, _ = TcpCenter.open_or_create(self.link, "center-0", self.model, wire=wire, deadline_s=10)
        self.state = RuleState.zeros(self.center.layout, Downpour().worker_state)
        self.center.pull(self.model, lambda k, value: self.kept[k]["center"].__setitem__(slice(None), value))
        self.total = np.zeros(COUNT)

    @property
    def kept(self) -> list[State]:
        return self.state.chunks

    def train(self) -> None:
        change = self.rng.standard_normal(COUNT) * 2.0 ** self.rng.integers(-8, 1, COUNT)
        self.params["w"] += change.astype(self.params["w"].dtype)
        self.total += change

    def exchange(self, rule=None, *, is_last=False):
        return self.center.exchange(self.model, rule or Downpour(), self.kept, ExchangeInfo(is_last=is_last))

    @property
    def unsent(self) -> np.ndarray:
        """What this worker has still to send: its distance from the center as it last saw it."""
        return self.params["w"] - np.concatenate([one["center"] for one in self.kept])

    def value(self) -> np.ndarray:
        """The center, without compression."""
        value = np.empty(COUNT)

        def keep(k, array, _):
            start = sum(chunk.size for chunk in self.center.layout.chunks[:k])
            value[start : start + array.size] = array

        self.center.fetch(list(range(len(self.center.layout.chunks))), keep, is_plain=True)
        return value


@pytest.mark.parametrize("wire", CHANGES)
def test_changes_of_two_workers_arrive_but_for_what_is_still_to_be_sent(host, wire):
    workers = [Worker(host, wire), Worker(host, wire)]
    for number in range(12):
        worker = workers[number % 3 % 2]
        worker.train()
        assert not worker.exchange().refused
    total, unsent = sum(w.total for w in workers), sum(w.unsent for w in workers)
    np.testing.assert_allclose(workers[0].value() + unsent, total, atol=1e-9)
    for _ in range(100):  # nothing is added any more, and all that is left arrives
        for worker in workers:
            worker.exchange()
    if wire != "topk":
        np.testing.assert_allclose(workers[0].value(), total, atol=1e-3)


@pytest.mark.parametrize("wire", ["int4", "topk"])
def test_last_exchange_of_a_worker_sends_all_that_is_left(host, wire):
    worker = Worker(host, wire)
    for _ in range(3):
        worker.train()
        worker.exchange()
        assert worker.center.has_unsent and np.abs(worker.unsent).max() > 0.1
    outcome = worker.exchange(is_last=True)
    assert outcome.size_bytes == 2 * ONE_WAY["bfloat16"] and not worker.center.has_unsent
    np.testing.assert_allclose(worker.value(), worker.total, rtol=2**-7, atol=0.01)


@pytest.mark.parametrize("wire", CHANGES)
def test_a_lost_reply_and_a_broken_connection_lose_and_double_nothing(host, wire, monkeypatch):
    worker, other = Worker(host, wire), Worker(host, wire)
    other.train()
    other.exchange()
    for cut in (0, 1):  # before all requests are sent, and after all have been applied
        worker.train()

        def broken(self, stream, outcome, cut=cut):
            if cut:
                stream.receive()
                monkeypatch.undo()
            raise ConnectionResetError("cut")

        if cut:
            monkeypatch.setattr(PendingExchange, "_receive", broken)
        else:
            worker.link.drop("cut")
        worker.exchange()
        worker.train()
        worker.exchange()
    total, unsent = worker.total + other.total, worker.unsent + other.unsent
    np.testing.assert_allclose(worker.value() + unsent, total, atol=1e-9)


@pytest.mark.parametrize("wire", list(ONE_WAY))
def test_bytes_of_an_exchange_are_those_of_the_formula(host, wire):
    """The reply has values, for which int4 and topk are too coarse."""
    reply = {"int4": ONE_WAY["bfloat16"], "topk": ONE_WAY["bfloat16"]}.get(wire, ONE_WAY[wire])
    worker = Worker(host, wire, dtype=np.float32)
    for _ in range(3):
        worker.train()
        outcome = worker.exchange()
        assert outcome.size_bytes == ONE_WAY[wire] + reply
        assert outcome.size_bytes <= outcome.wire_bytes <= 1.02 * outcome.size_bytes
    assert worker.center.push(worker.model).size_bytes == reply
    assert worker.center.pull(worker.model).size_bytes == reply
    if wire not in {"int4", "topk"}:
        assert worker.exchange(EASGD(0.5)).size_bytes == 2 * reply


@pytest.mark.parametrize("wire", ["int4", "topk"])
def test_buffers_and_the_like_travel_as_values_do(host, wire):
    """A variance that falls from 1 to 0.01 must not become negative at the center by an error of int4."""
    params = {
        "w": np.zeros(600_000, np.float32),
        "v": np.zeros(600_000, np.float32),
        "variance": np.ones(9, np.float32),
    }
    model = adapt(params)
    center, _ = TcpCenter.open_or_create(
        Link(host.door(), "data"), "center-0", model, wire=wire, deadline_s=10, parameter_count=2
    )
    state = RuleState.zeros(center.layout, Downpour().worker_state)
    center.pull(model, lambda k, value: state.chunks[k]["center"].__setitem__(slice(None), value))
    assert len(center.layout.chunks) > 1
    params["w"][:] = 5
    params["variance"][:] = 0.01
    outcome = center.exchange(model, Downpour(), state.chunks, ExchangeInfo())
    look = adapt({name: np.zeros_like(value) for name, value in params.items()})
    center.pull(look, peek=True)
    np.testing.assert_allclose(look.array(2), 0.01, atol=0.004)
    assert outcome.size_bytes < 4 * 1_200_009, "the other chunks are compressed"


@pytest.mark.parametrize("wire", CHANGES)
def test_changes_that_are_not_finite_are_refused_and_later_ones_arrive(host, wire):
    worker = Worker(host, wire)
    worker.train()
    worker.params["w"][3] = np.nan
    assert worker.exchange().refused == ["w"]
    assert np.isfinite(worker.params["w"]).all() and np.isfinite(worker.value()).all()
    before = worker.value() + worker.unsent
    worker.total[:] = 0
    worker.train()
    assert not worker.exchange().refused
    np.testing.assert_allclose(worker.value() + worker.unsent, before + worker.total, atol=1e-9)


@pytest.mark.parametrize("wire", CHANGES)
def test_a_replica_in_half_precision_keeps_what_is_to_be_sent(host, wire):
    torch = engine("torch")
    weights = torch.nn.Parameter(torch.zeros(COUNT, dtype=torch.bfloat16))
    worker = Worker(host, wire, params=[weights])
    arrived = np.zeros(COUNT)
    with torch.no_grad():
        weights += torch.arange(COUNT) % 8 / 8
    change = weights.detach().double().numpy()
    for _ in range(30):
        worker.exchange()
        arrived = worker.value()
        unsent = weights.detach().double().numpy() - np.concatenate([one["center"] for one in worker.kept])
        np.testing.assert_allclose(arrived + unsent, change, atol=0.01)
