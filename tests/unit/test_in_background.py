"""Exchanges in the background: training goes on, and nothing is lost or counted twice."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from maniple import ASGD, EASGD, DiLoCo, Downpour, Every, Replica, Rule
from maniple.adapters import adapt
from maniple.center import Segment, SharedCenter
from maniple.environment import Environment
from maniple.errors import HostAway
from maniple.layout import Layout
from maniple.replica.context import TrainingContext
from maniple.replica.in_background import BackgroundCall, ReplicaCopy
from maniple.replica.replica import TrainingMark
from maniple.replica.sharing import sharing_for
from maniple.rules import changed

PATIENCE_S = 30.0


class SlowCenter:
    """A center whose exchanges wait until the test lets them go on."""

    def __init__(self, center: SharedCenter) -> None:
        self._center = center
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.fails_after_chunks: int | None = None
        self.loses_answer = False
        self.unresolved: list[Callable[[], object]] = []

    def exchange(self, model, rule, state, moment):
        self.has_begun.set()
        assert self.may_end.wait(PATIENCE_S)
        while self.unresolved:
            self.unresolved.pop()()
        if self.loses_answer:  # the host has applied all, and the worker learns it at its next exchange
            self.unresolved.append(lambda: self._center.exchange(model, rule, state, moment))
            raise HostAway("the host is away")
        outcome = self._center.exchange(model, rule, state, moment)
        if self.fails_after_chunks is not None:
            raise HostAway("the host is away")
        return outcome

    def __getattr__(self, name):
        return getattr(self._center, name)


@pytest.fixture
def segment(tmp_path):
    segment = Segment.create(tmp_path, "0123456789abcdef", tmp_path)
    yield segment
    segment.remove()


@pytest.fixture
def share(segment):
    """Share arrays by a rule with overlap; gives the replica, and the center that holds exchanges up."""
    replicas = []

    def share(params: dict[str, np.ndarray], rule: Rule) -> tuple[Replica, SlowCenter]:
        model = adapt(params)
        center, _ = SharedCenter.open_or_create(segment, "center-0", model, rank=0, state=rule.center_state)
        segment.mark(0, 1)
        slow = SlowCenter(center)
        sharing = sharing_for(
            rule, slow, pace=Every(2), wire="float32", is_alone=False, open_collectives=lambda: pytest.fail("none")
        )
        environment = Environment(world=2, own_data=True)
        replica = Replica(model, sharing, rule=rule, pace=Every(2), context=TrainingContext(environment))
        sharing.begin()
        replicas.append(replica)
        return replica, slow

    yield share
    for replica in replicas:
        replica.finish(exchange=False)


def center_of(segment: Segment) -> np.ndarray:
    center = SharedCenter.open(segment, segment.path / "center-0")
    value = center.read(0).copy()
    center.close()
    return value


def steps(replica: Replica, params: dict[str, np.ndarray], count: int) -> None:
    for _ in range(count):
        params["w"] += 1.0
        replica.step()


def landed(replica: Replica) -> None:
    """Wait until the exchange in flight has ended, as a later step will find it."""
    flight = replica.sharing._flight
    assert flight is not None and flight._is_done.wait(PATIENCE_S)


def test_training_continues_while_an_exchange_is_in_flight_and_no_other_begins(share, segment):
    params = {"w": np.zeros(3)}
    replica, slow = share(params, Downpour(overlap=True))
    steps(replica, params, 2)
    assert slow.has_begun.wait(PATIENCE_S)
    steps(replica, params, 5)  # two exchanges would have been due
    assert params["w"].tolist() == [7, 7, 7] and center_of(segment).tolist() == [0, 0, 0]
    slow.may_end.set()
    landed(replica)
    slow.may_end.clear()
    steps(replica, params, 1)  # the first one is applied, and the next one is sent
    assert center_of(segment)[0] == 2 and params["w"][0] == 8  # what was sent, and what was trained since
    assert replica.steps_since_exchange == 6
    slow.may_end.set()
    replica.finish(exchange=True)
    assert center_of(segment).tolist() == [8, 8, 8]


@pytest.mark.parametrize("rule", [EASGD(0.25, overlap=True), EASGD(0.25, center_alpha=0.25, overlap=True)])
def test_elastic_exchanges_conserve_the_sum(share, segment, rule):
    params = {"w": np.zeros(3)}
    replica, slow = share(params, rule)
    slow.may_end.set()
    for done in range(1, 40):
        steps(replica, params, 1)
        if replica.sharing._flight is not None:
            landed(replica)
            replica.sharing._land()
        np.testing.assert_allclose(params["w"] + center_of(segment), done, rtol=1e-12)


@pytest.mark.parametrize(
    "rule", [EASGD(0.3), ASGD(0.4, 0.6), Downpour(), Downpour(compensate=True), DiLoCo(sync=False, buffer=2)]
)
def test_a_result_that_is_there_at_once_is_that_of_an_exchange_in_the_foreground(share, segment, rule):
    start = np.random.default_rng(1).normal(size=1000)
    results = []
    for overlap in (False, True):
        params = {"w": start.copy()}
        replica, slow = share(params, changed(rule, {"overlap": overlap}))
        slow.may_end.set()
        params["w"][:] = start
        replica.push()
        replica.pull()
        for _ in range(6):
            params["w"] *= 0.9
            replica.step()
            if overlap and replica.sharing._flight is not None:
                replica.sharing._land()
        results.append((params["w"].copy(), center_of(segment)))
        replica.finish(exchange=False)
        if not overlap:
            (segment.path / "center-0").unlink()
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_what_a_broken_exchange_has_applied_reaches_the_replica(share, segment):
    """The center has it already: a replica that did not move would send it again."""
    params = {"w": np.zeros(3)}
    replica, slow = share(params, Downpour(overlap=True))
    slow.may_end.set()
    slow.fails_after_chunks = 1
    steps(replica, params, 2)
    landed(replica)
    steps(replica, params, 1)
    assert params["w"][0] == 3 and center_of(segment)[0] == 2
    slow.fails_after_chunks = None
    replica.finish(exchange=True)
    assert center_of(segment).tolist() == [3, 3, 3]


@pytest.mark.parametrize("is_last", [False, True])
def test_changes_whose_answer_is_late_are_sent_once(share, segment, is_last):
    """Also if others have changed the center, and if the worker leaves."""
    params, others = {"w": np.zeros(3)}, {"w": np.zeros(3)}
    replica, slow = share(params, Downpour(overlap=True))
    other, its = share(others, Downpour())
    slow.may_end.set()
    its.may_end.set()
    slow.loses_answer = True
    steps(replica, params, 2)
    landed(replica)
    steps(replica, params, 1)
    slow.loses_answer = False
    steps(other, others, 6)
    if is_last:
        replica.finish(exchange=True)
    else:
        replica.exchange()
        assert params["w"].tolist() == [9, 9, 9]
    assert center_of(segment).tolist() == [9, 9, 9]


@pytest.mark.parametrize("is_in_background", [False, True])
def test_an_exchange_whose_answer_is_late_reaches_the_replica(share, segment, is_in_background):
    params = {"w": np.zeros(3)}
    replica, slow = share(params, EASGD(0.25, overlap=True))
    slow.may_end.set()
    slow.loses_answer = True
    steps(replica, params, 2)
    landed(replica)
    steps(replica, params, 1)
    slow.loses_answer = False
    if is_in_background:
        replica.sharing._send()
        landed(replica)
        replica.sharing._land()
    else:
        replica.exchange()
        steps(replica, params, 1)
        replica.exchange()
    np.testing.assert_allclose(params["w"] + center_of(segment), replica.steps, rtol=1e-12)


def test_an_exchange_whose_wait_was_interrupted_is_waited_for_again(share, segment, monkeypatch):
    params = {"w": np.zeros(3)}
    replica, slow = share(params, EASGD(0.25, overlap=True))
    steps(replica, params, 2)
    with monkeypatch.context() as patch:
        patch.setattr(BackgroundCall, "result", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            replica.pull()
    slow.may_end.set()
    replica.exchange()
    np.testing.assert_allclose(params["w"] + center_of(segment), 2, rtol=1e-12)


def test_a_replica_that_has_diverged_takes_the_centers_values(share, segment):
    params = {"w": np.ones(3)}
    replica, slow = share(params, EASGD(0.5, overlap=True))
    slow.may_end.set()
    params["w"][1] = np.nan
    replica.step()
    replica.step()
    landed(replica)
    params["w"][0] = 5.0
    with pytest.warns(UserWarning, match="refused non-finite values"):
        replica.sharing._land()
    assert params["w"].tolist() == [5.0, 1.0, 1.0]


def test_a_copy_brings_back_what_has_changed_in_it(share):
    params = {"a": np.arange(4.0), "b": np.ones((2, 2), np.float32)}
    model = adapt(params)
    copy = ReplicaCopy(model, Layout(model.entries))
    copy.take()
    params["a"] += 10  # training
    copy.array(0)[:] *= 2  # the exchange
    copy.bring_back()
    assert params["a"].tolist() == [10, 12, 14, 16] and params["b"].tolist() == [[1, 1], [1, 1]]


def test_a_running_variance_never_becomes_negative():
    torch = pytest.importorskip("torch")
    norm = torch.nn.BatchNorm1d(1)
    model = adapt(norm)
    copy = ReplicaCopy(model, Layout(model.entries))
    variance = next(i for i, entry in enumerate(model.entries) if entry.name == "running_var")
    norm.running_var.fill_(10.0)
    copy.take()
    norm.running_var.fill_(2.0)  # the first batches in training
    norm.bias.data.fill_(-3.0)
    copy.array(variance)[:] = 5.0  # what was received
    copy.bring_back()
    assert norm.running_var.item() == 5.0 and norm.bias.item() == -3.0


def test_the_error_of_a_call_reaches_the_training_thread():
    def fail() -> None:
        raise HostAway("gone")

    call = BackgroundCall(fail, TrainingMark(0, None))
    with pytest.raises(HostAway, match="gone"):
        call.result(PATIENCE_S, "it", lambda: None)
    assert call.duration_s > 0
