"""The replica's dealings with a center: what is exchanged when, and that nothing is counted twice."""

import contextlib
import types
import warnings

import numpy as np
import pytest

from maniple import ASGD, BSP, EASGD, Downpour, Every, LocalSGD, MSync, RateLimit, Replica, Rule
from maniple.adapters import adapt
from maniple.center import Segment, SharedCenter
from maniple.clock import clock
from maniple.collectives.engines import SingleWorker
from maniple.environment import Environment
from maniple.errors import Diverged, HostAway, InvalidArgument, WaitedTooLong
from maniple.record import Events, read_events
from maniple.replica import Sharing, sharing_for
from maniple.replica.context import TrainingContext
from maniple.replica.replica import DataTime
from maniple.replica.sharing import check_collectives, check_wire
from maniple.worker.share_settings import check_restart
from maniple.worker.worker import logged
from tests.simulated_clock import SimulatedClock


def context(rank: int = 0, events: Events | None = None) -> TrainingContext:
    return TrainingContext(Environment(rank=rank, world=4, own_data=True, collectives="shared"), events=events)


@pytest.fixture
def segment(tmp_path):
    segment = Segment.create(tmp_path, "0123456789abcdef", tmp_path)
    yield segment
    segment.remove()


@pytest.fixture
def share(segment):
    """Share a dict of arrays as a worker would; gives the replica."""
    replicas: list[Replica] = []

    def share(params, rule: Rule, pace=None, events=None) -> Replica:
        model = adapt(params)
        center, _ = SharedCenter.open_or_create(segment, "center-0", model, rank=len(replicas))
        segment.mark(len(replicas), 1)
        pace = pace or Every(1)
        sharing = sharing_for(rule, center, pace=pace, wire="float32", is_alone=False, open_collectives=SingleWorker)
        replica = Replica(model, sharing, rule=rule, pace=pace, context=context(3, events))
        replica.sharing.begin()
        replicas.append(replica)
        return replica

    yield share
    for replica in replicas:
        replica.finish(exchange=False)


def value(segment) -> float:
    """The center's first value."""
    center = SharedCenter.open(segment, segment.path / "center-0")
    result = float(center.read(0).reshape(-1)[0])
    center.close()
    return result


def test_exchange_comes_when_the_pace_says_so(share, segment):
    params = {"w": np.zeros(2)}
    replica = share(params, Downpour(), Every(3))
    seen = []
    for _ in range(7):
        params["w"] += 1
        replica.step()
        seen.append(value(segment))
    assert seen == [0, 0, 3, 3, 3, 6, 6]
    assert replica.steps == 7
    replica.finish(exchange=True)  # the last steps are not lost
    assert value(segment) == 7


def costly_training(replica: Replica, monkeypatch: pytest.MonkeyPatch, *, exchange_s: float, start_s: float) -> None:
    """Steps of 1 s each, after a start of `start_s`, and exchanges of `exchange_s`, on a simulated clock."""
    time = SimulatedClock(100.0)
    exchange = replica.sharing._center.exchange

    def slow(*args, **kwargs):
        time.now += exchange_s
        return exchange(*args, **kwargs)

    monkeypatch.setattr(replica.sharing._center, "exchange", slow)
    with clock.replaced(time):
        time.now += start_s
        for _ in range(200):
            time.now += 1.0
            replica.step()


@pytest.mark.parametrize("start_s", [0.0, 1e4])  # the time before the first step does not count
def test_costly_exchanges_at_every_step_warn_once_with_the_share_and_the_remedy(share, monkeypatch, start_s: float):
    replica = share({"w": np.zeros(2)}, EASGD(0.5))
    with pytest.warns(UserWarning, match=r"took 50% of the time") as warned:
        costly_training(replica, monkeypatch, exchange_s=1.0, start_s=start_s)
    (only,) = warned
    assert "--every 10" in str(only.message) and "--maximum-rate 0.2" in str(only.message)


@pytest.mark.parametrize(("pace", "exchange_s"), [(Every(1), 0.2), (Every(2), 5.0), (RateLimit(0.5), 1.0)], ids=repr)
def test_cheap_or_rare_exchanges_do_not_warn(share, monkeypatch, pace, exchange_s: float):
    replica = share({"w": np.zeros(2)}, EASGD(0.5), pace)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        costly_training(replica, monkeypatch, exchange_s=exchange_s, start_s=0.0)


def test_many_exchanges_have_few_rows_and_exact_sums(share, tmp_path):
    events = Events(tmp_path / "worker-0.jsonl")
    params = {"w": np.zeros(2)}
    replica = share(params, Downpour(), events=events)
    for _ in range(5000):
        params["w"] += 1
        replica.step()
    replica.finish(exchange=True)
    events.close()
    rows = read_events(tmp_path / "worker-0.jsonl")
    exchanges = [row for row in rows if row["event"] == "exchange"]
    assert len(exchanges) < 3000, "a thousand, the remarkable ones, and one a second"
    assert sum(1 + row.get("skipped", 0) for row in exchanges) == 5000
    assert exchanges[-1]["step"] == 5000
    assert rows[-1]["event"] == "progress" and rows[-1]["exchanges"] == 5000


def test_alone_every_call_is_a_no_op():
    params = {"w": np.ones(2)}
    replica = Replica(adapt(params), Sharing(), rule=Downpour(), pace=Every(1), context=context())
    replica.step()
    replica.exchange()
    replica.pull()
    replica.push()
    with replica.center():
        params["w"] += 1  # alone, the replica is the center
    replica.finish(exchange=True)
    np.testing.assert_array_equal(params["w"], 2)
    assert replica.steps == 1


def test_live_workers_are_counted_for_the_rule(share):
    replica = share({"w": np.zeros(2)}, EASGD())
    other = {"w": np.ones(2)}
    share(other, EASGD())  # the second worker: alpha is 0.9 / 2 from now on
    replica._model._arrays["w"][:] = 1
    replica.exchange()
    np.testing.assert_allclose(replica._model._arrays["w"], 0.55)


def test_push_is_not_counted_again_by_the_next_exchange(share, segment):
    params = {"w": np.zeros(2)}
    replica = share(params, Downpour())
    params["w"] += 1
    replica.push()
    assert value(segment) == 1
    replica.exchange()
    assert value(segment) == 1


def test_pull_throws_own_changes_away_for_good(share, segment):
    params = {"w": np.zeros(2)}
    replica = share(params, Downpour())
    params["w"] += 5
    replica.pull()
    np.testing.assert_array_equal(params["w"], 0)
    replica.exchange()
    assert value(segment) == 0


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_look_at_the_center_gives_the_replica_back_bit_for_bit(share, dtype):
    params = {"w": np.zeros((2, 3), dtype), "t": np.zeros((2, 3), dtype).T}
    replica = share(params, EASGD())
    rng = np.random.default_rng(0)
    for array in params.values():
        array[...] = rng.normal(size=array.shape)
    before = [array.tobytes() for array in params.values()]
    with replica.center():
        assert not params["w"].any()
    assert [array.tobytes() for array in params.values()] == before


def test_look_at_the_center_does_not_change_what_is_exchanged(share, segment):
    mine, theirs = {"w": np.zeros(1)}, {"w": np.zeros(1)}
    replica, other = share(mine, Downpour()), share(theirs, Downpour())
    theirs["w"] += 10
    other.exchange()
    mine["w"] += 1
    with replica.center():
        assert mine["w"] == 10
    replica.exchange()
    assert value(segment) == 11


def test_look_at_the_center_does_not_hide_how_stale_the_replica_is(share, segment):
    mine, theirs = {"w": np.zeros(1)}, {"w": np.zeros(1)}
    replica, other = share(mine, Downpour(compensate=True)), share(theirs, Downpour())
    for _ in range(3):
        theirs["w"] += 1
        other.exchange()
    with replica.center():
        pass
    mine["w"] += 8
    replica.exchange()
    assert value(segment) == 3 + 8 / 4


def test_replica_is_given_back_when_the_look_fails(share):
    params = {"v": np.zeros(2), "w": np.zeros(2)}
    replica = share(params, Downpour())
    params["v"] += 1
    params["w"] += 1

    def fail(model, *_, **__):
        model.array(0)[:] = 99
        raise WaitedTooLong("the lock of parameter 'w'")

    replica.sharing._center.pull = fail
    with pytest.raises(WaitedTooLong), replica.center():
        pytest.fail("the block must not run")
    np.testing.assert_array_equal(params["v"], 1)


def test_error_in_the_block_gives_the_replica_back_too(share):
    params = {"w": np.zeros(2)}
    replica = share(params, EASGD())
    params["w"] += 1
    with pytest.raises(KeyError), replica.center():
        raise KeyError
    np.testing.assert_array_equal(params["w"], 1)
    replica.step()


def test_training_while_looking_at_the_center_is_refused(share):
    replica = share({"w": np.zeros(2)}, EASGD())
    with replica.center():
        with pytest.raises(InvalidArgument, match=r"inside `with replica\.center"):
            replica.step()
        with pytest.raises(InvalidArgument, match="another `with replica"), replica.center():
            pass


def test_exchange_while_looking_at_the_center_does_not_count_others_twice(share, segment):
    mine, theirs = {"w": np.zeros(1)}, {"w": np.zeros(1)}
    replica, other = share(mine, Downpour()), share(theirs, Downpour())
    theirs["w"] += 10
    other.exchange()
    with replica.center(), contextlib.suppress(InvalidArgument):  # refused, or harmless
        replica.exchange()
    replica.exchange()
    assert value(segment) == 10


def test_diverged_replica_is_warned_gets_the_center_s_values_and_ends_at_the_third(share, segment):
    params = {"w": np.zeros(2), "b": np.zeros(2)}
    replica = share(params, EASGD())
    for _ in range(2):
        params["b"][:] = np.nan
        with pytest.warns(UserWarning, match="'b'"):
            replica.exchange()
        np.testing.assert_array_equal(params["b"], 0)
    params["b"][:] = np.inf
    with pytest.raises(Diverged, match=r"3 exchanges in a row .*'b'"):
        replica.exchange()
    assert value(segment) == 0


def test_recovery_forgives_earlier_refusals(share):
    params = {"w": np.zeros(2)}
    replica = share(params, EASGD())
    for _ in range(3):
        for _ in range(2):
            params["w"][:] = np.nan
            with pytest.warns(UserWarning, match="'w'"):
                replica.exchange()
        replica.exchange()


def test_pull_in_the_middle_does_not_forget_what_exchanges_cost(share):
    pace = RateLimit(0.5)
    replica = share({"w": np.zeros(2)}, EASGD(), pace)
    for _ in range(20):
        pace.exchanged(100.0, 10)
    assert not pace.due(1, 4050.0)  # 2000 s were spent, and the next 100 s would make more than a half
    replica.pull()
    assert not pace.due(1, 4050.0)


def test_exchange_that_fails_counts_for_the_pace_and_has_a_row(share, monkeypatch, tmp_path):
    monkeypatch.setattr("maniple.pace._RETRY_S", 100.0)
    monkeypatch.setattr("maniple.replica.with_center._UNANNOUNCED_S", 0.0)
    failures: list[tuple[float, float]] = []

    class Recorded(RateLimit):
        def failed(self, cost_s, spread):
            failures.append((cost_s, spread))
            super().failed(cost_s, spread)

    def away(*_):
        raise HostAway("the host is away")

    pace, events = Recorded(1.0), Events(tmp_path / "worker-0.jsonl")
    replica = share({"w": np.zeros(2)}, EASGD(), pace, events)
    pace.expect(100.0, 16)  # instead of what the pull took
    monkeypatch.setattr(SharedCenter, "exchange", away)
    with pytest.warns(UserWarning, match="the host is away"):
        for _ in range(5):
            replica.step()
    [(cost_s, spread)] = failures  # the next try is due after 100 s, and not after the next step
    assert cost_s > 0
    assert 0 < spread < 1
    events.close()
    [row] = [row for row in read_events(tmp_path / "worker-0.jsonl") if row["event"] == "broken"]
    assert row["operation"] == "exchange" and row["step"] == 1 and 0 < row["duration"] <= cost_s


def test_samples_are_counted_as_reported(share):
    params = {"w": np.zeros(2)}
    replica = share(params, EASGD())
    for samples in (32, 32, 7):
        replica.samples = samples
        replica.step()
    assert replica.total_samples == 71


def test_replica_cannot_be_made_of_what_cannot_be_shared():
    with pytest.raises(InvalidArgument, match="'n' int64"):
        Replica(adapt({"n": np.arange(3)}), Sharing(), rule=EASGD(), pace=Every(1), context=context())


# Synchronous rules


@pytest.mark.parametrize("rule", [BSP(), LocalSGD(1)])
def test_values_that_are_not_finite_end_a_synchronous_worker_at_once(share, segment, rule):
    params = {"v": np.ones(2), "w": np.ones(2)}
    replica = share(params, rule)
    with pytest.raises(Diverged, match=r"'w' of worker 0 holds NaN or infinity in step 1.*nonfinite='skip'"):
        gradient = {"v": np.zeros(2), "w": np.array([0, np.inf])}
        if rule.averages_gradients:
            replica.reduce(gradient)
        params["w"] -= gradient["w"]
        replica.step()
    assert value(segment) == 1


def test_large_values_are_finite(share):
    params = {"w": np.ones(2, np.float32)}
    replica = share(params, BSP())
    gradient = {"w": np.full(2, 3e38, np.float32)}  # its square is not
    replica.reduce(gradient)
    assert (gradient["w"] == np.float32(3e38)).all()


@pytest.mark.parametrize("samples", [-1, float("nan"), float("inf")])
def test_samples_that_cannot_count_are_refused(share, samples):
    replica = share({"w": np.ones(2)}, BSP())
    replica.samples = samples
    with pytest.raises(InvalidArgument, match=r"samples.* 0 or more"):
        replica.reduce({"w": np.ones(2)})


@pytest.mark.parametrize("rule", [LocalSGD(3), Downpour(sync=True)])
def test_center_shows_the_last_mean_and_not_what_one_worker_has_trained_since(share, segment, rule):
    params = {"w": np.zeros(2)}
    replica = share(params, rule, Every(3))
    for step in range(1, 6):
        params["w"] += 1
        replica.step()
        replica.sharing.publish()
        assert value(segment) == step // 3 * 3
        assert params["w"][0] == step  # the replica stays as it is
    with replica.center():
        assert params["w"][0] == 3
    replica.finish(exchange=True)
    assert value(segment) == 5


def test_restarted_worker_cannot_join_two_synchronous_models(share):
    first = share({"w": np.zeros(2)}, BSP())
    check_restart(Environment(rank=1, restarts=1), [], "shared")
    check_restart(Environment(rank=1), [first], "shared")
    check_restart(Environment(rank=1, restarts=1), [share({"w": np.zeros(2)}, EASGD())], "shared")
    with pytest.raises(InvalidArgument, match=r"worker 1 was started again.*2 models.*--resume"):
        check_restart(Environment(rank=1, restarts=1), [first], "shared")


@pytest.mark.parametrize(
    ("rule", "wire", "reason"),
    [(MSync(1, norm="synchronised"), "float32", "no worker is ever late"), (MSync(1), "bfloat16", "not in bfloat16")],
)
def test_first_of_the_workers_are_refused_what_needs_all_of_them(rule, wire, reason):
    with pytest.raises(InvalidArgument, match=rf"{reason}.*use BSP|{reason}.*Use BSP"):
        check_collectives(rule, Every(1), SingleWorker(), wire)


class Values(Rule):
    """Exchanges values, and keeps no center to compute changes from."""

    is_synchronous = True


@pytest.mark.parametrize("wire", ["int4", "topk"])
@pytest.mark.parametrize("rule", [EASGD(), ASGD(), Rule(), Values()], ids=repr)
def test_codecs_for_changes_are_refused_for_rules_that_send_values(rule, wire):
    with pytest.raises(
        InvalidArgument, match=rf"wire='{wire}' carries changes only.*sends the.*values.*Use int8, or a rule"
    ):
        check_wire(rule, wire)


@pytest.mark.parametrize("wire", ["int4", "topk"])
@pytest.mark.parametrize(
    "rule", [Downpour(), Downpour(compensate=True), Downpour(sync=True), EASGD(sync=True), BSP(), LocalSGD(5)], ids=repr
)
def test_codecs_for_changes_carry_changes_gradients_and_differences(rule, wire):
    check_wire(rule, wire)


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16", "int8"])
def test_other_codecs_carry_everything(wire):
    for rule in (EASGD(), Rule(), Values()):
        check_wire(rule, wire)


@pytest.mark.parametrize("rule", [EASGD(), Downpour(), BSP(), LocalSGD(1), MSync()], ids=repr)
def test_what_is_logged_inside_of_center_is_recorded_of_the_center_whatever_the_rule(share, rule):
    replica = share({"w": np.zeros(3)}, rule)
    with replica.center():
        assert logged({"accuracy": 0.8}, [replica]) == {"step": 0, "accuracy": 0.8, "center": True}
        with pytest.raises(InvalidArgument, match=r"another `with replica.center\(\):` was opened"), replica.center():
            pass
    assert logged({"accuracy": 0.8}, [replica]) == {"step": 0, "accuracy": 0.8}


def test_with_gradients_the_center_is_what_was_validated_before_the_controller_hears_of_it(share, segment):
    params = {"w": np.zeros(3)}
    replica = share(params, BSP())
    params["w"][:] = (0.1, 0.2, 0.3)
    with replica.center():
        assert replica.sharing.publish_validated()
    center = SharedCenter.open(segment, segment.path / "center-0")
    assert center.read(0).tolist() == [0.1, 0.2, 0.3]
    center.close()
    assert not share({"w": np.zeros(3)}, EASGD()).sharing.publish_validated(), (
        "of the center it is the controller's matter"
    )


def test_time_from_a_step_to_the_next_forward_pass_is_counted_without_what_is_counted_otherwise(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    replica = types.SimpleNamespace(spent_s=0.0)
    between = DataTime(replica)
    between.forward()
    now[0] += 50  # the first step has no other before it
    assert (between.seconds, between.is_measured) == (0.0, False)
    for _ in range(2):
        between.step(now[0])
        now[0] += 3
        replica.spent_s += 1
        between.forward()
        between.forward()
        now[0] += 10  # computes
    assert (between.seconds, between.is_measured) == (4.0, True)
    between.step(now[0])
    now[0] += 1
    assert between.seconds == 5.0, "also before the pass has begun"


def test_where_forward_passes_are_not_seen_nothing_is_measured(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    between = DataTime(types.SimpleNamespace(spent_s=0.0))
    between.step(now[0])
    between.forward()  # before the module was compiled
    for _ in range(5):
        between.step(now[0])
        now[0] += 10
    assert (between.seconds, between.is_measured) == (0.0, False)


@pytest.mark.parametrize("rule", [EASGD(), Downpour(), BSP(), LocalSGD(2), EASGD(sync=True)], ids=repr)
def test_the_calls_of_one_script_work_under_every_rule(share, rule):
    params = {"w": np.ones(2)}
    replica = share(params, rule)
    for _ in range(4):
        gradient = {"w": np.full(2, 0.5)}
        with replica.no_sync():
            pass
        replica.reduce(gradient)
        np.testing.assert_array_equal(gradient["w"], [0.5, 0.5], "one worker's mean is its own gradient")
        params["w"] -= gradient["w"]
        replica.step()
        replica.push()
        replica.pull()
        with replica.center():
            pass
    if not isinstance(rule, EASGD):  # whose elastic force also holds one worker back
        np.testing.assert_allclose(params["w"], [-1, -1], err_msg="one worker trains as if it were alone")
