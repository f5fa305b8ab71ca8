"""Settings that are changed while a run goes on: what is refused, what a rule and a pace make of the rest."""

import math

import pytest

from maniple import ASGD, BSP, EASGD, Downpour, Every, LocalSGD, MSync, RateLimit, Rule
from maniple.connection.find_host import locate_to_watch
from maniple.errors import BadFrame, Conflict, InvalidArgument
from maniple.live_settings import Changes, check_changes, follow
from maniple.record import RunFolder
from maniple.rules import noted_rule


class Pull(Rule):
    """A rule of the user's own."""

    def __init__(self, weight: float = 0.5) -> None:
        if not 0 <= weight <= 1:
            raise ValueError("weight is a share")
        self.weight = weight


@pytest.mark.parametrize(
    "rule",
    [
        EASGD(),
        EASGD(1e-05, center_alpha=0.25),
        EASGD(sync=True),
        ASGD(0.9, 0.1),
        Downpour(compensate=True),
        BSP("parameters", every=3),
        LocalSGD(7),
        MSync(2),
    ],
    ids=repr,
)
def test_the_rule_of_a_center_is_known_by_its_note(rule):
    assert noted_rule(repr(rule)) == rule


def test_schedules_and_rules_of_ones_own_are_no_obstacle():
    assert noted_rule(repr(EASGD(lambda step: 0.1, center_alpha=0.2))) == EASGD(center_alpha=0.2)
    assert noted_rule(repr(Pull())) is None
    for hostile in ("", "EASGD", "EASGD(alpha=--)", "EASGD(alpha=7)", "LocalSGD(k=e)", "(" * 9999):
        noted_rule(hostile)


@pytest.mark.parametrize(
    ("settings", "rule", "reason"),
    [
        ({}, EASGD(), "NAME=VALUE"),
        (
            {"beta": 0.3},
            EASGD(),
            "'beta' .* EASGD, .* Choose from alpha, center_alpha, sync, nonfinite, overlap, every, maximum_rate",
        ),
        ({"alpha": 1.5}, EASGD(), "share from 0 to 1"),
        ({"alpha": "much"}, EASGD(), "neither 'auto'"),
        ({"alpha": [0.1]}, EASGD(), "neither a number nor a word"),
        ({"alpha": 7 * "auto" * 99}, EASGD(), "neither a number nor a word"),
        ({"sync": True}, EASGD(), "while training"),
        ({"beta": None}, ASGD(), "share from 0 to 1"),
        ({"compensate": 1}, Downpour(), "neither true nor false"),
        ({"every": 0}, EASGD(), "1 or more"),
        ({"every": None}, EASGD(), "1 or more"),
        ({"every": "often"}, EASGD(), "1 or more"),
        ({"maximum_rate": 1.5}, EASGD(), "share of time"),
        ({"maximum_rate": "little"}, EASGD(), "share of time"),
        ({"every": 5, "maximum_rate": 0.1}, EASGD(), "two kinds of pace"),
        ({"height": 1}, Pull(), "Choose from weight, every, maximum_rate"),
        ({"every": 5}, BSP(), "the same step"),
        ({"alpha": 0.3}, EASGD(sync=True), "the same step"),
    ],
)
def test_what_no_worker_could_follow_is_refused(settings, rule, reason):
    with pytest.raises(InvalidArgument, match=reason):
        check_changes(settings, [repr(rule)])


def test_a_setting_is_needed_by_one_of_several_models_only():
    check_changes({"alpha": 0.3, "compensate": True}, [repr(EASGD()), repr(Downpour())])
    check_changes({"alpha": 0.3}, [repr(BSP()), repr(EASGD())])
    with pytest.raises(InvalidArgument, match="training has begun"):
        check_changes({"alpha": 0.3}, [])


def test_a_rule_and_its_pace_follow():
    rule, pace = EASGD(), Every(10)
    assert follow({"alpha": 0.3, "center_alpha": 0.1, "beta": 9}, rule, pace) is pace
    assert rule == EASGD(0.3, center_alpha=0.1)
    assert follow({"every": 20}, rule, pace) == Every(20)
    assert follow({"maximum_rate": 0.1}, rule, pace) == RateLimit(0.1)
    assert follow({"maximum_rate": 0.1}, rule, RateLimit(0.5, bytes_per_s=9)) == RateLimit(0.1, bytes_per_s=9)
    follow({"center_alpha": None}, rule, pace)
    assert rule == EASGD(0.3)


def test_a_rule_of_ones_own_is_checked_by_its_constructor():
    rule = Pull()
    follow({"weight": 0.2}, rule, Every(1))
    assert rule.weight == 0.2
    with pytest.raises(ValueError, match="weight is a share"):
        follow({"weight": 2}, rule, Every(1))
    assert rule.weight == 0.2


def test_a_refused_change_leaves_all_as_it_was():
    rule = EASGD(0.5)
    with pytest.raises(Conflict):
        follow({"alpha": 0.3, "every": 1, "maximum_rate": 0.1}, rule, Every(1))
    assert rule == EASGD(0.5)
    with pytest.raises(InvalidArgument, match="the same step"):
        follow({"every": 5}, LocalSGD(3), Every(3))


def test_changes_add_up_and_tell_what_is_new():
    first = Changes().add({"alpha": 0.3, "every": 20})
    second = first.add({"maximum_rate": 0.1})
    assert second.since(Changes()) == {"alpha": 0.3, "maximum_rate": 0.1}, "the newest pace counts"
    assert second.since(first) == {"maximum_rate": 0.1}, "what the script has set since then is left alone"
    assert second.add({"alpha": 0.3}).since(second) == {"alpha": 0.3}, "said again, it is followed again"
    assert Changes.read(second.text) == second
    assert Changes().text == ""
    assert second.without(rule=True, pace=False).since(Changes()) == {"maximum_rate": 0.1}
    with pytest.raises(BadFrame):
        Changes.read('{"number": "x"}')


def test_another_share_of_time_counts_from_the_change_on():
    pace = RateLimit(0.5)
    for _ in range(100):  # half of 100 s was spent
        pace.exchanged(0.5, 0)
    pace = pace.again(0.1)
    begin, spent = 100.0, 0.0
    for k in range(10_000):
        now = begin + 0.01 * k + spent
        if pace.due(1, now):
            pace.exchanged(0.5, 0)
            spent += 0.5
    elapsed = now - begin
    assert spent / elapsed <= 0.1 + 1e-9
    assert math.isclose(spent / elapsed, 0.1, rel_tol=0.1), "neither a rush nor a drought"


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({}, "no run folder"),
        ({"exit_code": 0}, "has ended with exit code 0"),
        ({"lineage": "0" * 16, "node": "node-07"}, "on node-07, and accepts no connections from other machines"),
    ],
)
def test_a_run_without_a_reachable_host_is_reported(tmp_path, about, reason):
    if about:
        RunFolder(tmp_path).describe(**about)
    with pytest.raises(InvalidArgument, match=reason):
        locate_to_watch(str(tmp_path))
