"""Gossip rules and the exchanges between mailboxes: what is conserved, through kills at every point of a commit."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maniple import Every, Gossip, NoLoCo, Rule
from maniple.adapters import adapt
from maniple.center import Segment
from maniple.clock import clock
from maniple.errors import InvalidArgument
from maniple.layout import Layout
from maniple.live_settings import check_changes, follow
from maniple.memory.segment import DEAD, LEFT, LIVE
from maniple.peers.gossip_exchange import GossipExchange
from maniple.peers.mailbox import OwnMailbox
from maniple.peers.neighbors import Neighbors
from maniple.peers.outer_exchange import OuterExchange
from maniple.rules import noted_rule, parse_rule
from maniple.rules.gossip import Shared, merge
from tests.mailboxes import sums
from tests.simulated_clock import SimulatedClock

SIZE = 5
FORMS = [Gossip(), Gossip(alpha=0.3), Gossip(elastic=False)]


class Killed(BaseException):
    """SIGKILL, simulated."""


class Workers:
    """Workers of one run in this process, each with its mailbox; none trains."""

    def __init__(self, folder: Path, rule: Rule, world: int, *, seed: int = 0) -> None:
        self.segment = Segment.create(folder, "0123456789abcdef", folder)
        self.rule, self.world = rule, world
        self.random = np.random.default_rng(seed)
        self.x: dict[int, np.ndarray] = {}
        self.peers: dict[int, GossipExchange | OuterExchange] = {}
        self.neighbors: dict[int, Neighbors] = {}
        for rank in range(world):
            self.start(rank)

    def start(self, rank: int, x: np.ndarray | None = None) -> None:
        """Start worker `rank`, for the first time or again."""
        self.segment.renew(rank)
        self.x[rank] = self.random.normal(size=SIZE) if x is None else x
        model = adapt({"x": self.x[rank]})
        layout = Layout(model.entries)
        neighbors = Neighbors(self.segment, 0, layout, self.rule, rank=rank, seed=int(self.random.integers(1 << 30)))
        kind = GossipExchange if isinstance(self.rule, Gossip) else OuterExchange
        extra = {"rank": rank} if isinstance(self.rule, Gossip) else {}
        self.neighbors[rank], self.peers[rank] = neighbors, kind(self.rule, model, layout, neighbors, **extra)
        self.peers[rank].begin(self.world)
        self.segment.mark(rank, LIVE)
        for one in self.neighbors.values():
            one.look()

    def send(self, rank: int) -> bool:
        act = self.peers[rank].prepare(1)
        return act is not None and bool(act().size_bytes)

    def receive(self, rank: int) -> int:
        return len(self.peers[rank].receive(1))

    def end(self, rank: int, state: int) -> None:
        """The process of worker `rank` is gone."""
        self.neighbors.pop(rank).close()
        del self.peers[rank], self.x[rank]
        self.segment.mark(rank, state)

    def kill_in(self, rank: int, act, *, is_after: bool) -> None:
        """Kill worker `rank` in its next commit: after it, or before it with any part of its writes made."""
        box = self.neighbors[rank].own
        memory = box._index.obj  # the whole file
        before = bytes(memory[:])

        def flip() -> None:
            if is_after:
                OwnMailbox._flip(box)
            else:
                written = np.frombuffer(memory[:], np.uint8)
                mask = self.random.random(len(written)) < self.random.random()
                memory[:] = np.where(mask, written, np.frombuffer(before, np.uint8)).tobytes()
            raise Killed

        box._flip = flip
        try:
            act(rank)
        except Killed:
            self.end(rank, DEAD)
        else:
            del box._flip

    def sums(self) -> tuple[float, np.ndarray]:
        return sums(self.segment.path, self.rule, SIZE)

    def close(self) -> None:
        for one in self.neighbors.values():
            one.close()
        self.segment.remove()


@pytest.fixture
def workers(tmp_path):
    made: list[Workers] = []

    def workers(rule: Rule, world: int, **options) -> Workers:
        made.append(Workers(tmp_path, rule, world, **options))
        return made[-1]

    yield workers
    for one in made:
        one.close()


ACTIONS = [
    "send",
    "receive",
    "kill",
    "kill in send",
    "kill after send",
    "kill in receive",
    "kill after receive",
    "start",
]


@given(
    st.sampled_from(FORMS),
    st.integers(0, 1 << 30),
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["send", "receive", *ACTIONS])), max_size=80),
)
def test_sums_are_conserved_through_kills_at_every_point_of_a_commit(rule, seed, actions):
    """Four workers and a newcomer without weight (GoSGD) send, receive, die and come back in any order."""
    with tempfile.TemporaryDirectory() as folder:
        workers = Workers(Path(folder), rule, 4, seed=seed)
        weight, total = workers.sums()
        try:
            for rank, action in actions:
                is_live = rank in workers.peers
                if action == "start" and not is_live and (rank < 4 or not rule.elastic):
                    workers.start(rank)
                elif action.startswith("kill ") and is_live:
                    act = workers.send if "send" in action else workers.receive
                    workers.kill_in(rank, act, is_after="after" in action)
                elif action == "kill" and is_live:
                    workers.end(rank, DEAD)
                elif is_live and action in {"send", "receive"}:
                    getattr(workers, action)(rank)
                found_weight, found = workers.sums()
                assert found_weight == pytest.approx(weight, rel=1e-12)
                np.testing.assert_allclose(found, total, rtol=1e-9, atol=1e-9)
            assert rule.elastic or weight == 1
        finally:
            workers.close()


@pytest.mark.parametrize("rule", [*FORMS, NoLoCo()], ids=repr)
def test_nothing_is_written_after_the_index_has_changed(rule, workers):
    """Else a kill after it would leave the new state incomplete."""
    run = workers(rule, 2)
    seen = []

    def watch(rank: int) -> None:
        box = run.neighbors[rank].own
        box._flip = lambda: (OwnMailbox._flip(box), seen.append((box, bytes(box._index.obj))))

    for rank in (0, 1):
        watch(rank)
    for act in (run.send, run.receive):
        for rank in (0, 1):
            act(rank)
            box, then = seen[-1]
            assert bytes(box._index.obj) == then
    assert len(seen) == (2 if isinstance(rule, NoLoCo) else 4)


@pytest.mark.parametrize("rule", FORMS, ids=repr)
def test_leaving_workers_hand_over_their_share_and_the_last_one_has_the_mean(rule, workers):
    run = workers(rule, 4)
    weight, total = run.sums()
    for rank in (2, 0, 3):
        run.peers[rank].leave(1)
        run.end(rank, LEFT)
        for act in (run.receive, run.send, run.receive):
            for other in list(run.peers):
                act(other)
    for _ in range(3):
        run.receive(1)
        run.send(1)  # to nobody: takes back what was sent to one that had left
    assert run.peers[1].weight == pytest.approx(weight)
    np.testing.assert_allclose(run.x[1], total / weight)
    np.testing.assert_allclose(run.neighbors[1].mean()["float64"], total / weight)


@pytest.mark.parametrize("rule", FORMS, ids=repr)
def test_a_message_to_a_worker_that_dies_is_taken_back_once(rule, workers):
    run = workers(rule, 2)
    before = run.sums()
    assert run.send(0)
    assert not run.send(0), "one message at a time"
    run.end(1, DEAD)
    assert not run.send(0), "nobody is there"
    assert run.peers[0].returned == 1 and run.peers[0].skipped == 2
    run.start(1)
    assert run.receive(1) == 0, "it is taken back, and does not come a second time"
    found = run.sums()
    assert found[0] == before[0]
    np.testing.assert_allclose(found[1], before[1])
    assert run.send(0) and run.receive(1) == 1


def test_a_message_is_not_taken_back_while_its_receiver_is_taking_it(workers):
    run = workers(Gossip(), 2)
    run.send(0)
    with run.neighbors[1].own.delivery() as is_free:
        assert is_free
        run.segment.mark(1, DEAD)  # as of a process that is stopped, and silent
        assert not run.send(0) and run.peers[0].returned == 0
    run.segment.mark(1, LIVE)
    assert run.receive(1) == 1 and run.receive(1) == 0
    with run.neighbors[0].box(1).delivery() as is_free:
        assert is_free
        run.send(0)
        assert run.receive(1) == 0, "the sender is about to take it back"
    assert run.receive(1) == 1


@pytest.mark.parametrize("rule", FORMS, ids=repr)
def test_a_silent_receiver_keeps_a_message_for_two_seconds_and_gets_the_next_once_it_is_back(rule, workers):
    time = SimulatedClock(100.0)
    with clock.replaced(time):
        run = workers(rule, 2)
        before = run.sums()
        assert run.send(0)
        time.now += 1.9
        assert not run.send(0) and run.peers[0].returned == 0
        time.now += 0.2
        assert not run.send(0) and run.peers[0].returned == 1, "taken back, and nobody else is there"
        assert run.receive(1) == 0
        assert not run.send(0), "still silent"
        run.peers[1].publish(1)
        assert run.send(0) and run.receive(1) == 1
        np.testing.assert_allclose(run.sums()[1], before[1])


def test_a_message_outlives_its_sender(workers):
    run = workers(Gossip(elastic=False), 2)
    before = run.sums()
    run.send(0)
    run.end(0, DEAD)
    assert run.receive(1) == 1 and run.peers[1].weight == 0.75
    run.start(0)
    assert run.peers[0].weight == 0.25
    np.testing.assert_allclose(run.sums()[1], before[1])


def test_two_that_exchange_with_alpha_one_half_meet_in_the_middle(workers):
    run = workers(Gossip(alpha=0.5), 2)
    middle = (run.x[0] + run.x[1]) / 2
    run.send(0)
    run.receive(1)
    np.testing.assert_allclose(run.x[0], middle)
    np.testing.assert_allclose(run.x[1], middle)


def test_a_newcomer_to_gosgd_gets_its_first_values_from_a_peer(workers):
    run = workers(Gossip(elastic=False), 3)
    run.start(3, np.full(SIZE, 99.0))
    assert run.peers[3].weight == 0 and not run.send(3)
    sent = run.x[1].copy()
    assert run.send(1), "to the newcomer, although there are others"
    assert run.receive(3) == 1
    np.testing.assert_array_equal(run.x[3], sent)
    assert run.sums()[0] == 1
    run.peers[3].leave(1)
    assert run.peers[3].weight == 0
    run.receive(0), run.receive(1), run.receive(2)
    for _ in range(20):
        run.receive(0), run.receive(2)
        run.send(0), run.send(2)
        assert run.receive(3) == 0, "it is leaving: no newcomer any more"


def test_a_worker_that_left_and_comes_back_begins_as_a_newcomer(workers):
    run = workers(Gossip(elastic=False), 2)
    run.peers[0].leave(1)
    run.end(0, LEFT)
    run.start(0, np.zeros(SIZE))
    assert run.peers[0].weight == 0 and not run.x[0].any()
    assert run.receive(1) == 1 and run.peers[1].weight == 1


@pytest.mark.parametrize("rule", FORMS, ids=repr)
def test_the_share_of_a_worker_that_left_while_its_message_was_not_taken_is_adopted(rule, workers):
    run = workers(rule, 3)
    weight, total = run.sums()
    while int(run.neighbors[2].own.header()["receiver"][0]) != 1:
        run.receive(0)
        run.send(2)
    run.peers[2].leave(1)
    assert run.peers[2].weight > 0, "it does not wait for the receiver"
    run.peers[0].adopt_shares()
    assert run.neighbors[0].box(2).header()["weight"][0] > 0, "it has not left yet"
    run.end(2, LEFT)
    run.peers[0].adopt_shares()
    assert run.neighbors[0].box(2).header()["weight"][0] > 0, "one message at a time"
    run.receive(1)
    run.peers[0].adopt_shares()
    assert run.neighbors[0].box(2).header()["weight"][0] == 0
    assert run.receive(0) + run.receive(1) == 1
    assert run.peers[0].weight + run.peers[1].weight == pytest.approx(weight)
    np.testing.assert_allclose(run.sums()[1], total)


def test_the_mean_includes_messages_on_their_way_and_leaves_out_the_dead(workers):
    run = workers(Gossip(elastic=False), 4)
    weight, total = run.sums()
    for rank in range(4):
        run.send(rank)
    for rank in range(4):
        np.testing.assert_allclose(run.neighbors[rank].mean()["float64"], total / weight)
    for rank in range(4):
        run.receive(rank)
    run.end(3, DEAD)
    found = run.neighbors[0].mean()["float64"]
    assert not np.allclose(found, total / weight)
    run.start(3)
    np.testing.assert_allclose(run.neighbors[0].mean()["float64"], total / weight)


@pytest.mark.parametrize("rule", [Gossip(), Gossip(elastic=False), NoLoCo()], ids=repr)
def test_values_that_are_not_finite_reach_no_peer(rule, workers):
    run = workers(rule, 2)
    run.x[0][2] = np.nan
    outcome = run.peers[0].prepare(1)()
    assert outcome.refused == ["x"]
    run.receive(1)
    assert np.isfinite(run.x[0]).all() and np.isfinite(run.x[1]).all()


@given(st.floats(0.01, 4), st.floats(0, 4), st.floats(0.01, 4), st.integers(0, 1 << 30))
def test_a_message_adds_its_mass_whatever_the_weights(weight, message_weight, mass, seed):
    rng = np.random.default_rng(seed)
    x, v = rng.normal(size=SIZE), rng.normal(size=SIZE)
    expected = weight * x + mass * v
    merge(x, v, weight, Shared(message_weight, mass))
    np.testing.assert_allclose((weight + message_weight) * x, expected)


def test_staleness_counts_the_steps_of_the_receiver_since_its_published_values(workers):
    run = workers(Gossip(), 2)
    run.peers[1].publish(3)
    run.peers[0].prepare(50)()
    (outcome,) = run.peers[1].receive(10)
    assert outcome.staleness == 7


# NoLoCo


def test_an_outer_step_follows_the_equation():
    rng = np.random.default_rng(0)
    rule = NoLoCo(mu=0.5, eta=0.7, gamma=0.6)
    x, phi, m, before_j, delta_j, m_j = rng.normal(size=(6, SIZE))
    new = {name: np.empty(SIZE) for name in rule.mailbox_vectors}
    delta = x - phi
    expected = 0.5 * m + 0.7 * (delta + delta_j) / 2 + 0.6 * ((phi + before_j) / 2 - phi)
    peer = {"phi": before_j + m_j, "momentum": m_j, "delta": delta_j}
    rule.outer(x, {"phi": phi, "momentum": m, "delta": x}, new, peer, is_alone=False)
    np.testing.assert_allclose(new["momentum"], expected)
    np.testing.assert_allclose(new["phi"], phi + expected)
    np.testing.assert_allclose(x, phi + expected)
    np.testing.assert_allclose(new["delta"], delta)


def test_replicas_of_noloco_come_together_without_waiting(workers):
    run = workers(NoLoCo(), 4)
    start = np.std([run.x[rank] for rank in range(4)], axis=0).max()
    for _ in range(60):
        rank = int(run.random.integers(4))
        run.send(rank)
    assert np.std([run.x[rank] for rank in range(4)], axis=0).max() < 0.05 * start


@pytest.mark.parametrize(("mu", "gamma", "shrinks"), [(0.5, 0.7, True), (0.5, 1.4, True), (0.5, 1.7, False)])
def test_differences_shrink_for_gamma_below_the_limit_that_is_checked(mu, gamma, shrinks):
    """The second moments of many replicas in random pairs, without training."""
    V, C, M = 1.0, 0.0, 0.0  # of phi, of phi times momentum, of momentum
    for _ in range(500):
        next_M = mu * mu * M - mu * gamma * C + gamma * gamma / 2 * V
        cross = mu * C - gamma / 2 * V
        V, C, M = V + 2 * cross + next_M, cross + next_M, next_M
    assert (V < 1e-3) == shrinks == (gamma < 2 * (1 - mu * mu))


def test_a_successor_continues_from_the_last_outer_step(workers):
    run = workers(NoLoCo(), 2)
    run.x[0] += 1
    run.send(0)
    published = run.x[0].copy()
    run.x[0] += 5
    run.end(0, DEAD)
    run.start(0)
    np.testing.assert_array_equal(run.x[0], published)


@pytest.mark.parametrize("is_early", [False, True])
def test_a_worker_that_finishes_stays_in_the_mean_and_one_that_leaves_early_does_not(is_early, workers):
    run = workers(NoLoCo(), 2)
    run.send(1)
    run.peers[0].leave(1, is_early=is_early)
    finished = run.x[0].copy()
    run.end(0, LEFT)
    mean = run.neighbors[1].mean()["float64"]
    np.testing.assert_allclose(mean, run.x[1] if is_early else (run.x[1] + finished) / 2)
    run.start(0)
    run.send(0)
    np.testing.assert_allclose(run.neighbors[1].mean()["float64"], (run.x[0] + run.x[1]) / 2)


def test_outer_steps_of_a_worker_alone_change_nothing(workers):
    run = workers(NoLoCo(), 1)
    for _ in range(3):
        run.x[0] += 1
        before = run.x[0].copy()
        run.send(0)
        np.testing.assert_array_equal(run.x[0], before)
    np.testing.assert_array_equal(run.neighbors[0].mean()["float64"], before)


# Settings


def test_rules_are_named_on_the_command_line():
    assert parse_rule("gossip:q=0.1") == Gossip(q=0.1)
    assert parse_rule("gossip:elastic=false") == Gossip(elastic=False)
    assert parse_rule("noloco:every=20") == NoLoCo(every=20)
    assert parse_rule("gossip").every == 1 and parse_rule("noloco").every == 50


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gossip:q=1.5", "q=1.5"),
        ("gossip:q=-0.1", "q=-0.1"),
        ("gossip:alpha=0.7", "swap sides"),
        ("gossip:elastic=2", "neither true nor false"),
        ("noloco:every=0", "every=0"),
        ("noloco:every=1.5", "every=1.5"),
        ("noloco:eta=-1", "eta=-1"),
        ("noloco:gamma=1.6", "below 2 (1 - mu^2) = 1.50"),
    ],
)
def test_settings_that_make_no_sense_are_refused(text, words):
    with pytest.raises(InvalidArgument) as refused:
        parse_rule(text)
    assert words in str(refused.value)


@pytest.mark.parametrize("rule", [Gossip(q=0.2), Gossip(elastic=False), NoLoCo(20)], ids=repr)
def test_a_rule_is_found_again_by_its_note(rule):
    assert noted_rule(repr(rule)) == rule


def test_the_probability_may_be_changed_while_a_run_trains():
    rule = Gossip()
    check_changes({"q": 0.5}, [repr(rule)])
    follow({"q": 0.5}, rule, Every(1))
    assert rule.q == 0.5
    with pytest.raises(InvalidArgument, match="q=3"):
        check_changes({"q": 3}, [repr(rule)])
