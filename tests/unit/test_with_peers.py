"""A replica that is shared with peers: the pace, the mean that becomes the center, and the end."""

import numpy as np
import pytest

from maniple import Every, Gossip, NoLoCo, Replica, Rule
from maniple.adapters import adapt
from maniple.center import Segment, SharedCenter
from maniple.collectives.engines import SingleWorker
from maniple.environment import Environment
from maniple.errors import Diverged, InvalidArgument
from maniple.memory.segment import DEAD, LEFT, LIVE
from maniple.peers.mean import collect_into_centers
from maniple.record import Events, read_events
from maniple.replica import sharing_for
from maniple.replica.context import TrainingContext
from maniple.replica.with_peers import WithPeers
from maniple.worker.worker import check_rule

RULES = [Gossip(q=0.5), Gossip(q=0.5, elastic=False), NoLoCo(every=2)]


class Workers:
    """The workers of one run, in this process: `workers(params, rule)` is the next one's replica."""

    def __init__(self, folder) -> None:
        self.folder, self.segment = folder, Segment.create(folder, "0123456789abcdef", folder)
        self.replicas: list[Replica] = []

    def __call__(self, params, rule: Rule, pace=None, *, world: int = 2, is_near: bool = True) -> Replica:
        model, rank = adapt(params), len(self.replicas)
        center, _ = SharedCenter.open_or_create(self.segment, "center-0", model, rank=rank, note=repr(rule))
        self.segment.mark(rank, LIVE)
        pace = pace or Every(rule.every)
        sharing = sharing_for(
            rule,
            center,
            pace=pace,
            wire="float32",
            is_alone=False,
            open_collectives=SingleWorker,
            segment=self.segment if is_near else None,
        )
        environment = Environment(rank=rank, world=world, own_data=True)
        context = TrainingContext(environment, events=Events(self.folder / f"worker-{rank}.jsonl"))
        replica = Replica(model, sharing, rule=rule, pace=pace, context=context)
        self.replicas.append(replica)
        assert isinstance(sharing, WithPeers)
        replica.sharing.begin()
        for one in self.replicas:
            one.sharing.neighbors.look()
        return replica

    def end(self, rank: int) -> None:
        self.replicas[rank].finish(exchange=True)
        self.segment.mark(rank, LEFT)

    @property
    def center(self) -> np.ndarray:
        center = SharedCenter.open(self.segment, self.segment.path / "center-0")
        value = center.read(0)
        center.close()
        return value


@pytest.fixture
def workers(tmp_path):
    made = Workers(tmp_path)
    yield made
    for replica in made.replicas:
        replica.finish(exchange=False)
    made.segment.remove()


def train(workers, params, rule: Rule, steps: int, *, pulls=(1.0, 3.0)) -> None:
    """Two workers, each drawn to a value of its own."""
    for one in params:
        workers(one, rule)
    for _ in range(steps):
        for one, pull, replica in zip(params, pulls, workers.replicas, strict=True):
            one["w"] += 0.1 * (pull - one["w"])
            replica.step()


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_replicas_keep_together_and_the_center_is_their_mean_at_the_end(workers, rule):
    params = [{"w": np.zeros(4)} for _ in range(2)]
    train(workers, params, rule, 200)
    assert np.abs(params[0]["w"] - params[1]["w"]).max() < 1.6, "2 without exchanges"
    for rank in (0, 1):
        workers.end(rank)
    np.testing.assert_allclose(workers.center, 2.0, atol=0.8)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_inside_center_the_model_holds_the_mean_and_then_the_replica_again(workers, rule):
    params = [{"w": np.zeros(4)} for _ in range(2)]
    train(workers, params, rule, 21)
    for replica in workers.replicas:  # publish the last steps
        replica.sharing.publish_for_snapshot()
    mean = workers.replicas[0].sharing.neighbors.mean()["float64"]
    before = params[1]["w"].copy()
    with workers.replicas[1].center():
        np.testing.assert_allclose(params[1]["w"], mean)
        with pytest.raises(InvalidArgument, match="training step"):
            workers.replicas[1].step()
    np.testing.assert_array_equal(params[1]["w"], before)
    if isinstance(rule, Gossip):
        weights = [replica.sharing._peers.weight for replica in workers.replicas]
        header = [replica.sharing.neighbors.own.header()[0] for replica in workers.replicas]
        is_quiet = all(header[i]["receiver"] < 0 or header[1 - i]["applied"][i] == header[i]["number"] for i in (0, 1))
        if is_quiet:
            np.testing.assert_allclose(mean, np.average([one["w"] for one in params], axis=0, weights=weights))


@pytest.mark.parametrize("rule", [Gossip(q=0.0), Gossip(q=0.0, elastic=False)], ids=repr)
def test_without_messages_each_worker_trains_as_if_it_were_alone_to_the_bit(workers, rule):
    params = [{"w": np.zeros(4, "f4")} for _ in range(2)]
    train(workers, params, rule, 100)
    for one, pull in zip(params, (1.0, 3.0), strict=True):
        alone = np.zeros(4, "f4")
        for _ in range(100):
            alone += 0.1 * (pull - alone)
        np.testing.assert_array_equal(one["w"], alone)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_one_worker_trains_as_usual_and_the_center_follows(workers, rule):
    params = {"w": np.zeros(4)}
    replica = workers(params, rule, world=1)
    for _ in range(50):
        params["w"] += 1
        replica.step()
    np.testing.assert_array_equal(params["w"], 50.0)
    workers.end(0)
    np.testing.assert_array_equal(workers.center, 50.0)


def test_a_center_whose_host_was_killed_becomes_the_mean_of_all_that_were_alive(workers):
    rule = Gossip(q=0.0)
    params = [{"w": np.zeros(4)} for _ in range(3)]
    for one in params:
        workers(one, rule)
    for rank, replica in enumerate(workers.replicas):
        params[rank]["w"][:] = rank + 1
        replica.sharing._commit()
        workers.segment.mark(rank, DEAD)
    workers.segment.died_with_host = frozenset({0, 1})
    assert collect_into_centers(workers.segment) == 1
    np.testing.assert_allclose(workers.center, 1.5, err_msg="worker 2 had died before")
    assert not list(workers.segment.path.glob("peers-*"))
    assert collect_into_centers(workers.segment) == 0
    np.testing.assert_allclose(workers.center, 1.5)


def test_a_push_reaches_the_center_and_a_pull_takes_the_mean(workers):
    params = [{"w": np.zeros(4)} for _ in range(2)]
    train(workers, params, Gossip(q=0.0), 1)
    params[0]["w"][:] = 4.0
    params[1]["w"][:] = 6.0
    for replica in workers.replicas:
        replica.push()
    np.testing.assert_allclose(workers.center, 5.0)
    workers.replicas[0].pull()
    np.testing.assert_allclose(params[0]["w"], 5.0)
    assert workers.replicas[0].sharing.publish_validated()
    np.testing.assert_allclose(workers.center, 5.5, err_msg="the pulled values are published")


def test_messages_are_drawn_when_the_pace_says_so(workers):
    params = [{"w": np.zeros(2)} for _ in range(2)]
    for one in params:
        workers(one, Gossip(q=1.0), Every(5))
    for _ in range(20):
        for replica in workers.replicas:
            replica.step()
    assert [replica.sharing._peers.sent for replica in workers.replicas] == [4, 4]


def test_rows_say_what_was_sent_and_received(workers, tmp_path):
    params = [{"w": np.zeros(2)} for _ in range(2)]
    train(workers, params, Gossip(q=1.0, elastic=False), 10)
    for rank in (0, 1):
        workers.end(rank)
    for rank in (0, 1):
        workers.replicas[rank]._context.events.close()
        row = [row for row in read_events(tmp_path / f"worker-{rank}.jsonl") if row["event"] == "gossip"][-1]
        assert row["sent"] >= 9 and row["received"] >= 9 and row["skipped"] + row["returned"] == 0
    assert row["weight"] in {0.0, 1.0, 0.5}
    progress = [row for row in read_events(tmp_path / "worker-1.jsonl") if row["event"] == "progress"][-1]
    assert progress["exchanges"] >= 18


@pytest.mark.parametrize("q", [1.0, 0.0])
def test_a_worker_whose_values_are_never_finite_ends_and_the_others_stay_whole(workers, q):
    params = [{"w": np.zeros(2)} for _ in range(2)]
    train(workers, params, Gossip(q=q), 1)
    with pytest.warns(UserWarning, match="its mailbox refused non-finite"), pytest.raises(Diverged):
        for _ in range(5):
            params[0]["w"][1] = np.inf
            for replica in workers.replicas:
                replica.step()
            with workers.replicas[0].center():  # it publishes the replica
                assert np.isfinite(params[0]["w"]).all()
    assert np.isfinite(params[1]["w"]).all()


def test_a_rule_of_ones_own_is_refused_over_the_network_with_the_remedy(workers):
    class Own(Gossip):
        """A rule that the host does not know."""

    with pytest.raises(InvalidArgument, match=r"Own.*over the network.*use Gossip\(\)"):
        workers({"w": np.zeros(2)}, Own(), is_near=False)


@pytest.mark.parametrize("rule", [Gossip(), NoLoCo()], ids=repr)
def test_repeatable_runs_refuse_gossip(rule):
    with pytest.raises(InvalidArgument, match="--deterministic"):
        check_rule(Environment(world=2, deterministic=True), rule)
