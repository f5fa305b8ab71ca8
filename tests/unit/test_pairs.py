"""Pairwise rules: pairs that all workers draw alike, who takes over whose replica, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import maniple
from maniple import Every, Replica, Swap, Tournament
from maniple.adapters import adapt
from maniple.collectives.engines import SingleWorker
from maniple.environment import Environment
from maniple.errors import InvalidArgument
from maniple.replica import sharing_for
from maniple.replica.context import TrainingContext
from maniple.rules import draw_pairs, parse_rule

RANKS = st.sets(st.integers(0, 50), max_size=12)
VALUES = st.floats(allow_nan=True, allow_infinity=True)


@given(RANKS, st.integers(0, 2**32), st.integers(0, 10**6))
def test_pairs_are_disjoint_and_at_most_one_worker_has_none(ranks, seed, number):
    pairs = draw_pairs(ranks, seed=seed, number=number)
    assert set(pairs) <= ranks and len(pairs) == len(ranks) // 2 * 2
    assert all(pairs[other] == one and other != one for one, other in pairs.items())
    assert pairs == draw_pairs(sorted(ranks, reverse=True), seed=seed, number=number)


def test_each_worker_meets_each_other_and_rests_equally_often():
    count, rests = {frozenset(pair): 0 for pair in [(0, 1), (0, 2), (1, 2)]}, [0, 0, 0]
    for number in range(3000):
        pairs = draw_pairs(range(3), seed=1, number=number)
        count[frozenset(pairs)] += 1
        rests[({0, 1, 2} - set(pairs)).pop()] += 1
    assert min(*count.values(), *rests) > 900


@given(VALUES, VALUES, st.sampled_from(["min", "max"]))
def test_at_most_one_of_two_takes_over_and_never_from_a_worse_one(own, other, mode):
    rule = Tournament(mode=mode)
    assert not (rule.takes(own, other) and rule.takes(other, own))
    if rule.takes(own, other):
        assert np.isnan(own) or (own > other if mode == "min" else own < other)
    assert not rule.takes(own, np.nan)
    assert Swap().takes(own, other) and Swap().takes(other, own)


@pytest.mark.parametrize(("mode", "best"), [("min", 4), ("max", 2)])
def test_the_best_of_a_tournament_has_the_best_finite_value(mode, best):
    assert Tournament(mode=mode).best({0: np.nan, 2: 3.0, 4: -1.0, 7: -1.0, 9: 3.0}) == best
    assert Swap().best({3: 1.0, 2: 5.0}) == 2


def test_perturbed_settings_are_multiplied_by_one_of_the_factors_drawn_from_the_seed():
    rule, seen = Tournament(perturb={"lr": (0.5, 2), "weight_decay": (3,)}), set()
    for seed in range(20):
        groups = [{"lr": 1.0, "weight_decay": 0.5, "nesterov": True}, {"lr": 8.0, "weight_decay": 0.0}]
        rule.perturb_settings(groups, np.random.default_rng(seed))
        seen.add((groups[0]["lr"], groups[1]["lr"] / 8))
        assert groups[0]["weight_decay"] == 1.5 and groups[0]["nesterov"] is True
    assert seen == {(0.5, 0.5), (0.5, 2), (2, 0.5), (2, 2)}


def test_a_function_perturbs_each_group():
    groups = [{"lr": 1.0}, {"lr": 2.0}]
    rule = Tournament(perturb=lambda group, rng: group.update(lr=group["lr"] + rng.integers(1, 2)))
    rule.perturb_settings(groups, np.random.default_rng(0))
    assert groups == [{"lr": 2.0}, {"lr": 3.0}]


def test_a_setting_that_is_no_number_is_named_with_those_that_are():
    with pytest.raises(InvalidArgument, match=r"'betas', which is no number .*those are: lr\)"):
        Tournament(perturb={"betas": (2,)}).perturb_settings(
            [{"lr": 1.0, "betas": (0.9, 0.99)}], np.random.default_rng()
        )


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("swap", Swap()),
        ("swap:every=7,names=d.*", Swap(7, names="d.*")),
        ("tournament:metric=error,every=500,mode=max,optimizer=false",
         Tournament("error", every=500, mode="max", optimizer=False)),
    ],
)  # fmt: skip
def test_the_command_line_names_pairwise_rules(text, rule):
    assert parse_rule(text) == rule
    assert eval(repr(rule), vars(maniple)) == rule


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Swap(0), "every=0"),
        (lambda: Swap(nonfinite="ignore"), "nonfinite='ignore'"),
        (lambda: Tournament(""), "metric=''"),
        (lambda: Tournament(mode="least"), "mode='least'"),
        (lambda: Tournament(optimizer=1), "optimizer=1"),
        (lambda: Tournament(perturb={}), "perturb={}"),
        (lambda: Tournament(perturb={"lr": ()}), "perturb="),
        (lambda: Tournament(perturb={"lr": (1, float("nan"))}), "perturb="),
        (lambda: parse_rule("tournament:perturb=lr"), "perturb='lr'"),
    ],
)
def test_bad_setting_of_a_pairwise_rule_is_named(make, reason):
    with pytest.raises(InvalidArgument, match=reason):
        make()


def share(rule, *, wire: str = "float32") -> Replica:
    """A replica of the only worker of a run."""
    model = adapt({"g.w": np.zeros(2), "d.w": np.zeros(3)})
    context = TrainingContext(Environment(own_data=True))
    sharing = sharing_for(rule, None, pace=Every(1), wire=wire, is_alone=False, open_collectives=SingleWorker)
    replica = Replica(model, sharing, rule=rule, pace=Every(1), context=context)
    replica.sharing.begin()
    return replica


@pytest.mark.parametrize(
    ("rule", "wire", "reason"),
    [
        (Swap(names="e.*"), "float32", r"names= has 'e\.\*', which is none of the 2"),
        (Swap(), "bfloat16", "not in bfloat16"),
        (Tournament(perturb={"lr": (0.8, 1.2)}), "float32", "shared without one"),
    ],
)
def test_what_a_pairwise_rule_cannot_do_with_this_model_is_refused(rule, wire, reason):
    with pytest.raises(InvalidArgument, match=reason):
        share(rule, wire=wire)


@pytest.mark.parametrize(("logged", "reason"), [({}, "has not logged it"), ({"loss": "low"}, "loss='low'")])
def test_a_tournament_without_its_metric_says_how_to_log_it(logged, reason):
    replica = share(Tournament())
    replica._context.noted({"error": 0.5, **logged})
    with pytest.raises(InvalidArgument, match=rf"by 'loss', .*{reason}.*error.*worker\.log\(loss="):
        replica.step()


def test_values_that_were_logged_about_the_center_do_not_count():
    context = TrainingContext(Environment())
    context.noted({"step": 1, "loss": 3.0})
    assert context.noted({"loss": 1.0, "center": True}) == {"loss": 1.0, "center": True}
    assert context.logged["loss"] == 3.0


def test_a_single_worker_keeps_its_replica():
    replica = share(Swap())
    replica._model._arrays["d.w"][:] = 5
    replica.step()
    assert replica.rounds == 1 and replica._model._arrays["d.w"].tolist() == [5, 5, 5]
