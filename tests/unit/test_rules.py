"""The rules against their equations, written out naively here."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import maniple
from maniple import ASGD, EASGD, Downpour, Rule
from maniple.contracts import ExchangeInfo
from maniple.errors import InvalidArgument
from maniple.rules import RULES, changed, parse_rule
from maniple.rules.kernels import numpy_kernels as blocks

ALPHAS = st.floats(0, 1)
WHOLE = st.lists(st.tuples(st.integers(-1000, 1000), st.integers(-1000, 1000)), min_size=1, max_size=20)


def pair(seed: int, size: int = 17, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray]:
    """A replica and a center of ordinary values."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=size).astype(dtype), rng.normal(size=size).astype(dtype)


def exchange(rule: Rule, x: np.ndarray, c: np.ndarray, memory: np.ndarray | None = None, **moment: int) -> bool:
    """Exchange; True if nothing was refused."""
    state = {} if memory is None else {rule.worker_vectors[0]: memory}
    return rule.exchange(x, c, state, ExchangeInfo(**moment)) is None


# EASGD


@given(ALPHAS, st.integers(0, 2**32), st.sampled_from(["float32", "float64"]))
def test_elastic_exchange_conserves_the_sum(alpha, seed, dtype):
    x, c = pair(seed, dtype=dtype)
    before = x.astype("float64") + c
    assert exchange(EASGD(alpha), x, c)
    tolerance = 4 * np.finfo(dtype).eps * (np.abs(x) + np.abs(c) + np.abs(before)).max()
    assert np.abs(x.astype("float64") + c - before).max() <= tolerance


@given(WHOLE, st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0]))
def test_elastic_exchange_conserves_the_sum_exactly_where_floats_are_exact(values, alpha):
    x, c = np.array(values, "float64").T.copy()
    before = x + c
    exchange(EASGD(alpha), x, c)
    np.testing.assert_array_equal(x + c, before)


@given(st.integers(0, 2**32))
def test_exchanges_of_four_workers_conserve_the_sum_over_all(seed):
    rng = np.random.default_rng(seed)
    center, workers = rng.integers(-99, 99, 5).astype(float), rng.integers(-99, 99, (4, 5)).astype(float)
    before = workers.sum(0) + center
    for _ in range(5):
        for worker in workers:
            exchange(EASGD(0.25), worker, center)
    np.testing.assert_array_equal(workers.sum(0) + center, before)


@given(ALPHAS, st.integers(0, 2**32), st.sampled_from(["float32", "float64"]))
def test_elastic_exchange_moves_both_from_their_old_values(alpha, seed, dtype):
    x, c = pair(seed, dtype=dtype)
    d = np.dtype(dtype).type(alpha) * (x - c)
    new_x, new_c = x - d, c + d
    exchange(EASGD(alpha), x, c)
    np.testing.assert_array_equal(x, new_x)
    np.testing.assert_array_equal(c, new_c)


def test_elastic_exchange_is_not_the_pull_by_the_moved_center():
    x, c = np.array([1.0]), np.array([0.0])
    exchange(EASGD(0.25), x, c)
    assert (x[0], c[0]) == (0.75, 0.25)  # pulled with the moved center, the replica would be at 0.8125


@given(st.integers(0, 2**32), st.sampled_from(["float32", "float64"]))
def test_alpha_0_leaves_replica_and_center_bit_equal(seed, dtype):
    x, c = pair(seed, dtype=dtype)
    bits = x.tobytes(), c.tobytes()
    assert exchange(EASGD(0), x, c)
    assert (x.tobytes(), c.tobytes()) == bits


@given(WHOLE)
def test_alpha_one_half_makes_them_meet(values):
    x, c = np.array(values, "float64").T.copy()
    middle = (x + c) / 2
    exchange(EASGD(0.5), x, c)
    np.testing.assert_array_equal(x, middle)
    np.testing.assert_array_equal(c, middle)


@given(WHOLE)
def test_easgd_one_half_is_the_map_of_asgd_one_half(values):
    x, c = np.array(values, "float64").T.copy()
    other_x, other_c = x.copy(), c.copy()
    exchange(EASGD(0.5), x, c)
    exchange(ASGD(0.5, 0.5), other_x, other_c)
    np.testing.assert_array_equal(x, other_x)
    np.testing.assert_array_equal(c, other_c)


@pytest.mark.parametrize(("live", "alpha"), [(0, 0.5), (1, 0.5), (2, 0.45), (9, 0.1)])
def test_auto_alpha_follows_the_number_of_live_workers(live, alpha):
    x, c = np.array([1.0]), np.array([0.0])
    exchange(EASGD(), x, c, live=live)
    assert c[0] == alpha
    assert x[0] == 1 - alpha


def test_schedule_sees_the_step_of_each_exchange():
    rule = EASGD(lambda step: 0.5 if step < 100 else 0.125)
    for step, expected in [(99, 0.5), (100, 0.125)]:
        x, c = np.array([1.0]), np.array([0.0])
        exchange(rule, x, c, step=step)
        assert c[0] == expected


@pytest.mark.parametrize("value", [1.5, -0.1, math.nan])
def test_schedule_that_leaves_the_range_is_refused_before_anything_moves(value):
    x, c = np.array([1.0]), np.array([0.0])
    with pytest.raises(InvalidArgument, match="schedule"):
        exchange(EASGD(lambda step: value), x, c)
    assert (x[0], c[0]) == (1.0, 0.0)


def test_center_may_move_by_a_share_of_its_own():
    x, c = np.array([8.0]), np.array([0.0])
    exchange(EASGD(0.5, center_alpha=0.125), x, c)
    assert (x[0], c[0]) == (4.0, 1.0)


def test_alpha_may_be_set_while_running():
    rule = EASGD(0.5)
    rule.alpha = 0.25
    x, c = np.array([1.0]), np.array([0.0])
    exchange(rule, x, c)
    assert c[0] == 0.25


@pytest.mark.parametrize("value", [1.5, -0.1, math.nan, math.inf, True, None, "atuo", [0.5]])
def test_bad_alpha_is_refused_at_start_and_while_running(value):
    with pytest.raises(InvalidArgument, match="alpha"):
        EASGD(value)
    rule = EASGD(0.5)
    with pytest.raises(InvalidArgument, match="alpha"):
        rule.alpha = value
    assert rule.alpha == 0.5


def test_numpy_numbers_are_numbers_too():
    assert EASGD(np.float64(0.5)) == EASGD(0.5)
    assert EASGD(np.float32(0.5)) == EASGD(0.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: EASGD(0.5, center_alpha=2),
        lambda: ASGD(alpha=-1),
        lambda: ASGD(beta=1.01),
        lambda: ASGD(beta=math.nan),
    ],
)
def test_shares_out_of_range_are_refused(make):
    with pytest.raises(InvalidArgument, match="from 0 to 1"):
        make()


def test_settings_other_than_alpha_are_checked_while_running_too():
    rule = EASGD(0.5, center_alpha=0.5)
    with pytest.raises(InvalidArgument):
        rule.center_alpha = 7.0


@pytest.mark.parametrize("workers", [1, 4, 8])
def test_simulated_workers_reach_the_optimum_of_a_quadratic(workers):
    # Each worker sees its own optimum, as if on its own data; that of all is the mean of those.
    rng = np.random.default_rng(workers)
    optima = rng.normal(size=(workers, 6))
    replicas, center = np.zeros((workers, 6)), np.full(6, 5.0)
    rule = EASGD()
    for _ in range(1500):
        for x, optimum in zip(replicas, optima, strict=True):
            x -= 0.02 * (x - optimum)
            exchange(rule, x, center, live=workers)
    np.testing.assert_allclose(center, optima.mean(0), atol=0.05)


# ASGD


@given(ALPHAS, ALPHAS, st.integers(0, 2**32), st.sampled_from(["float32", "float64"]))
def test_asgd_blends_into_the_center_and_takes_it(alpha, beta, seed, dtype):
    x, c = pair(seed, dtype=dtype)
    real = np.dtype(dtype).type
    expected = real(alpha) * c + real(beta) * x
    assert exchange(ASGD(alpha, beta), x, c)
    np.testing.assert_array_equal(c, expected)
    np.testing.assert_array_equal(x, expected)


# Downpour


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1000, 1000)), max_size=30))
def test_changes_of_all_workers_add_up_exactly(turns):
    center = np.array([7.0, -7.0])
    replicas = [center.copy() for _ in range(4)]
    memories = [center.copy() for _ in range(4)]
    for worker, change in turns:
        replicas[worker] += change
        exchange(Downpour(), replicas[worker], center, memories[worker])
        np.testing.assert_array_equal(replicas[worker], center)
        np.testing.assert_array_equal(memories[worker], center)
    np.testing.assert_array_equal(center, np.array([7.0, -7.0]) + sum(change for _, change in turns))


@given(st.integers(0, 1000))
def test_compensation_divides_a_change_by_staleness_plus_one(staleness):
    x, c, old = np.array([3.0]), np.array([10.0]), np.array([2.0])
    exchange(Downpour(compensate=True), x, c, old, staleness=staleness)
    assert c[0] == 10 + 1.0 * (1 / (staleness + 1))
    assert x[0] == old[0] == c[0]


def test_staleness_does_not_matter_without_compensation():
    x, c, old = np.array([3.0]), np.array([10.0]), np.array([2.0])
    exchange(Downpour(), x, c, old, staleness=9)
    assert c[0] == 11


def test_downpour_begins_from_the_center_it_was_given():
    memory = np.zeros(3)
    Downpour().remember(np.array([1.0, 2.0, 3.0]), {"center": memory})
    np.testing.assert_array_equal(memory, [1, 2, 3])


# Rules of one's own


class Halfway(maniple.Rule):
    """The example of the documentation."""

    def mix(self, x, c, state):
        middle = (x + c) / 2
        return middle, middle


class Counting(maniple.Rule):
    """Counts exchanges in a vector, and puts the count into the center."""

    worker_vectors = ("count",)

    def mix(self, x, c, state):
        state["count"] += 1
        return x, state["count"]


class Swap(maniple.Rule):
    def mix(self, x, c, state):
        return c, x


class Untouched(maniple.Rule):
    def mix(self, x, c, state):
        return x, c


class Push(maniple.Rule):
    def mix(self, x, c, state):
        return x, x


class Pull(maniple.Rule):
    def mix(self, x, c, state):
        return c, c


@pytest.mark.parametrize("size", [0, 1, blocks.BLOCK - 1, blocks.BLOCK, 2 * blocks.BLOCK + 3])
def test_own_rule_is_applied_to_every_element(size):
    x, c = pair(0, size, "float32")
    expected = (x + c) / 2
    assert exchange(Halfway(), x, c)
    np.testing.assert_array_equal(x, expected)
    np.testing.assert_array_equal(c, expected)


@pytest.mark.parametrize(
    ("rule", "new_x", "new_c"),
    [(Untouched, "x", "c"), (Push, "x", "x"), (Pull, "c", "c"), (Swap, "c", "x")],
)
@pytest.mark.parametrize("poison", [False, True])
def test_own_rule_may_hand_back_its_arguments(rule, new_x, new_c, poison):
    x, c = np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 30.0])
    x[2] = np.nan if poison else 3.0
    old = {"x": x.copy(), "c": c.copy()}
    is_clean = exchange(rule(), x, c)
    assert is_clean == (not poison or new_c == "c")
    np.testing.assert_array_equal(x[:2], old[new_x][:2])
    np.testing.assert_array_equal(c[:2], old[new_c][:2])
    assert np.isfinite(c).all()


def test_own_rule_keeps_its_state_from_exchange_to_exchange():
    x, c, memory = np.zeros(5), np.zeros(5), np.zeros(5)
    for _ in range(3):
        exchange(Counting(), x, c, memory)
    np.testing.assert_array_equal(c, 3)


def test_own_rule_cannot_poison_the_center():
    x, c = np.array([1.0, np.nan, np.inf]), np.array([3.0, 4.0, 5.0])
    assert not exchange(Halfway(), x, c)
    np.testing.assert_array_equal(c, [2, 4, 5])
    np.testing.assert_array_equal(x, [2, 4, 5])


def test_own_rule_that_computes_in_float64_cannot_overflow_the_center():
    class Double(maniple.Rule):
        def mix(self, x, c, state):
            new = x.astype("float64") * 10
            return new, new

    x, c = np.array([3e38, 1.0], "float32"), np.array([5.0, 6.0], "float32")
    assert not exchange(Double(), x, c)
    np.testing.assert_array_equal(c, [5, 10])


def test_rule_without_mix_says_what_is_missing():
    with pytest.raises(NotImplementedError, match="mix"):
        exchange(maniple.Rule(), np.zeros(1), np.zeros(1))


# On the command line


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("easgd", EASGD()),
        ("EASGD", EASGD()),
        ("easgd:alpha=auto", EASGD()),
        ("easgd:alpha=0.5", EASGD(0.5)),
        ("easgd:alpha=0.5,center_alpha=0.25", EASGD(0.5, center_alpha=0.25)),
        ("asgd:alpha=0.9, beta=0.1", ASGD(0.9, 0.1)),
        ("downpour", Downpour()),
        ("downpour:compensate=true", Downpour(compensate=True)),
        ("downpour:compensate=false", Downpour()),
    ],
)
def test_command_line_names_a_rule_and_its_settings(text, rule):
    assert parse_rule(text) == rule


@pytest.mark.parametrize("name", RULES)
def test_every_rule_on_the_command_line_is_the_class_of_that_name(name):
    assert type(parse_rule(name)).__name__.lower() == name


@pytest.mark.parametrize(("typo", "near"), [("eagsd", "easgd"), ("EASDG", "easgd"), ("downpoor", "downpour")])
def test_typo_in_a_rule_names_the_closest_one(typo, near):
    with pytest.raises(InvalidArgument, match=f"Did you mean {near}"):
        parse_rule(typo)


def test_unknown_rule_lists_those_there_are():
    with pytest.raises(
        InvalidArgument,
        match=r"'xyz' \(rules: easgd, eamsgd, asgd, downpour, bsp, localsgd, msync, diloco, swap, tournament\)",
    ):
        parse_rule("xyz")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("easgd:alfa=0.5", "alfa.*alpha"),
        ("eamsgd:delta=1", "delta=1.*less than 1"),
        ("easgd:alpha", "no value"),
        ("asgd:gamma=1", "gamma.*alpha, beta"),
        ("downpour:alpha=1", "alpha.*compensate"),
        ("easgd:alpha=1.5", "1.5.*from 0 to 1"),
        ("easgd:alpha=nan", "nan.*from 0 to 1"),
        ("easgd:alpha=half", "half"),
        ("easgd:alpha=true", "True"),
        ("easgd:center_alpha=auto", "center_alpha='auto'"),
        ("asgd:beta=-1", "beta=-1"),
        ("downpour:compensate=no", "compensate"),
        ("downpour:compensate=0.5", "compensate"),
        ("bsp:overlap=0.5", "overlap"),
        ("bsp:overlap=true,average=parameters", "averages none"),
        ("bsp:overlap=true,nonfinite=skip", "Leave one of them out"),
        ("bsp:op=max", "op='max' is none of mean, sum"),
        ("bsp:op=sum,average=parameters", "whose sum is no model"),
        ("localsgd:nonfinite=ignore", "none of stop, skip"),
        ("easgd:nonfinite=skip", "sync=True"),
        ("downpour:nonfinite=skip", "sync=True"),
        ("msync:overlap=true", "msync has m, norm, check_every"),
    ],
)
def test_bad_setting_of_a_rule_is_named(text, words):
    with pytest.raises(InvalidArgument, match=words):
        parse_rule(text)


# Equality and repr


@pytest.mark.parametrize(
    "rule",
    [
        EASGD(),
        EASGD(0.5),
        EASGD(0.5, center_alpha=0.25),
        maniple.EAMSGD(0.25, 0.9),
        ASGD(0.9, 0.1),
        Downpour(),
        Downpour(compensate=True),
        maniple.BSP(overlap=True),
        maniple.BSP(op="sum"),
        maniple.EASGD(sync=True, nonfinite="skip"),
    ],
)
def test_repr_of_a_rule_makes_an_equal_one(rule):
    again = eval(repr(rule), vars(maniple))
    assert again == rule
    assert hash(again) == hash(rule)


def test_rules_with_other_settings_or_of_other_kinds_differ():
    rules = [EASGD(), EASGD(0.5), EASGD(0.5, center_alpha=0.5), ASGD(), ASGD(0.5, 0.25), Downpour(), Halfway()]
    assert all((a == b) == (i == j) for i, a in enumerate(rules) for j, b in enumerate(rules))
    assert EASGD() != "easgd"


def test_a_subclass_of_a_rule_may_keep_state_of_its_own():
    class Remembering(EASGD):
        worker_vectors = ("past",)

    assert Remembering(0.5).worker_state.vectors == ("past",) and not any(EASGD(0.5).worker_state)
    assert EASGD(0.5, sync=True).worker_vectors == ("center",) and EASGD(0.5, sync=True).is_synchronous


def test_setting_that_changes_what_a_rule_keeps_is_refused_while_training():
    class Optional(Rule):
        def __init__(self, heavy: bool = False, rate: float = 0.5) -> None:
            self.heavy, self.rate = heavy, rate
            self.center_vectors = ("momentum",) if heavy else ()

    assert changed(Optional(True), {"rate": 0.1}).rate == 0.1
    with pytest.raises(InvalidArgument, match="keeps other state"):
        changed(Optional(False), {"heavy": True})


def test_state_of_a_rule_is_changed_only_where_center_and_state_stay_finite():
    class Heavy(Rule):
        center_vectors, center_scalars = ("momentum",), ("count",)

        def mix(self, x, c, state):
            state["momentum"] += x
            state["count"] += 1
            return x, c + np.where(x == 5, np.nan, x)

    x, c = np.array([1.0, np.inf, 5.0, 2.0]), np.zeros(4)
    state = {"momentum": np.ones(4), "count": np.zeros(1)}
    refused = Heavy().exchange(x, c, state, ExchangeInfo())
    assert refused is not None
    np.testing.assert_array_equal(refused, [1, 2])
    np.testing.assert_array_equal(c, [1, 0, 0, 2])
    np.testing.assert_array_equal(x, [1, 0, 0, 2])
    np.testing.assert_array_equal(state["momentum"], [2, 1, 1, 3])
    assert state["count"][0] == 1
