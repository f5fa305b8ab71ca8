"""The gate's decisions: which contributions it lets through, and what it makes of the others."""

import math

import numpy as np
import pytest

from maniple import ASGD, EASGD, Downpour, Gate, LocalSGD, Rule
from maniple.center.gate import Verdict, apply_operation, norm_of, parse_gate, weighed
from maniple.center.gate_memory import agreement_on, check_gate
from maniple.contracts import ExchangeInfo, Operation
from maniple.errors import Conflict, InvalidArgument

USUAL = np.linspace(0.9, 1.1, 64)  # median 1, MAD 0.05: the least one, 0.1, counts


def test_a_contribution_within_the_limit_passes_as_it_is():
    verdict = Gate(k=6).judge(USUAL, 1.5, 3)
    assert verdict == Verdict(1.0, 1.0, 1.5)
    assert verdict.share == 1


def test_an_outlier_is_clipped_to_the_limit_or_refused():
    clipped, refused = (Gate(k=6, action=action).judge(USUAL, 160.0, 0) for action in ("clip", "refuse"))
    assert clipped.factor * 160 == pytest.approx(1.6)
    assert refused.factor == 0


@pytest.mark.parametrize("action", ["clip", "refuse"])
def test_an_outlier_counts_as_the_limit_so_that_a_lasting_growth_is_followed(action):
    """Refused for ever, a run whose learning rate was raised would stand still."""
    gate, norms = Gate(k=6, action=action), list(USUAL)
    for _ in range(2000):
        verdict = gate.judge(np.array(norms[-gate.window :]), 100.0, 0)
        norms.append(verdict.norm)
    assert verdict.factor == 1


def test_nothing_is_judged_before_the_minimum():
    gate = Gate(minimum=16)
    assert gate.judge(USUAL[:15], 1e9, 0).factor == 1
    assert gate.judge(USUAL[:16], 1e9, 0).factor < 1


def test_equal_norms_do_not_refuse_every_other_one():
    gate = Gate(action="refuse")
    assert gate.judge(np.ones(64), 1.5, 0).factor == 1
    assert gate.judge(np.ones(64), 1.7, 0).factor == 0


def test_parameters_that_have_not_moved_may_begin_to():
    assert Gate(action="refuse").judge(np.zeros(64), 5.0, 0) == Verdict(1.0, 1.0, 5.0)


def test_stale_contributions_are_weighted_down():
    gate = Gate(k=math.inf, staleness=0.1)
    assert gate.judge(USUAL, 1e9, 0).share == 1
    assert gate.judge(USUAL, 1e9, 5).share == pytest.approx(math.exp(-0.5))


def test_an_infinite_norm_is_refused():
    assert Gate().judge(USUAL, math.inf, 0).factor == 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_norms_cover_all_pieces_and_leave_out_what_is_not_finite(dtype):
    x, c = np.arange(200_000, dtype=dtype) % 7, np.ones(200_000, dtype)
    expected = float(np.linalg.norm(np.concatenate([x - c, c]).astype("float64")))
    assert norm_of([(x, c), (c, None)]) == pytest.approx(expected, rel=1e-5)
    x[:2] = np.nan, np.inf
    assert norm_of([(x, c)]) == pytest.approx(np.linalg.norm((x - c)[2:].astype("float64")), rel=1e-5)


def test_a_norm_beyond_float32_is_found():
    assert norm_of([(np.full(4, 1e30, "float32"), None)]) == pytest.approx(2e30)


OPERATIONS = {
    "easgd": EASGD(0.3, center_alpha=0.2),
    "asgd": ASGD(0.5, 0.5),
    "asgd that shrinks": ASGD(0.8, 0.1),
    "downpour": Downpour(),
    "downpour, compensated": Downpour(compensate=True),
}


@pytest.mark.parametrize("rule", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_a_share_of_a_contribution_moves_the_center_by_that_share(rule, share):
    info = ExchangeInfo(staleness=3)
    operation = rule.operation(info)
    assert operation is not None

    def after(operation: Operation) -> tuple[np.ndarray, np.ndarray]:
        x, c = np.array([3.0, -1.0]), np.array([0.1, 0.7])
        state = {"center": np.array([0.2, 0.3])}
        assert apply_operation(operation, x, c, state, info.staleness) is None
        return x, c

    before = np.array([0.1, 0.7])
    (x, c), (_, whole), (_, nothing) = after(weighed(operation, share)), after(operation), after(weighed(operation, 0))
    assert (nothing == before).all(), "the center stays as it is, to the bit"
    if operation.name == "blend" and not operation.is_change:
        start = (operation.a + operation.b) * before
        contribution = whole - start
        assert c == pytest.approx(start + share * contribution if share else before)
    else:
        assert c == pytest.approx(before + share * (whole - before))
    assert (x == c).all() or operation.name == "elastic"


def test_clipping_an_elastic_move_conserves_the_sum():
    operation = EASGD(0.4).operation(ExchangeInfo())
    x, c = np.array([1000.0, 2.0]), np.array([1.0, 1.0])
    apply_operation(weighed(operation, 0.01), x, c, {}, 0)
    assert x + c == pytest.approx([1001, 3])


def test_a_refused_replica_comes_back_to_the_center():
    operation = EASGD(0.5).operation(ExchangeInfo())
    x, c = np.array([1000.0]), np.array([1.0])
    for _ in range(20):
        apply_operation(weighed(operation, 0), x, c, {}, 0)
    assert c[0] == 1
    assert abs(x[0] - 1) < 0.01


def test_options_are_read_as_they_are_written():
    assert parse_gate("clip") == Gate()
    assert parse_gate("refuse:k=8,minimum=4") == Gate(k=8, action="refuse", minimum=4)
    assert parse_gate("staleness=0.1") == Gate(staleness=0.1)
    assert parse_gate("k=inf,staleness=0.1") == Gate(k=math.inf, staleness=0.1)
    for gate in (Gate(), Gate(k=0.1, action="refuse", window=100, minimum=7, staleness=0.3)):
        assert parse_gate(str(gate)) == gate


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("drop", ["'drop'", "clip, refuse"]),
        ("clip:k=0", ["k=0.0", "above 0"]),
        ("clip:k=many", ["'k=many'", "k, window"]),
        ("clip:every=3", ["'every=3'", "k, window"]),
        ("clip:", ["colon"]),
        ("clip:window=8", ["16 to 8", "4,096"]),
        ("staleness=-1", ["staleness=-1.0", "0 or more"]),
    ],
)
def test_wrong_options_are_refused_with_the_limit(text, words):
    with pytest.raises(InvalidArgument) as raised:
        parse_gate(text)
    assert all(word in str(raised.value) for word in words), raised.value


class Halfway(Rule):
    def mix(self, x, c, state):
        return (x + c) / 2, (x + c) / 2


class MovedTwice(EASGD):
    def exchange(self, x, c, state, moment):
        super().exchange(x, c, state, moment)
        return super().exchange(x, c, state, moment)


@pytest.mark.parametrize("rule", [LocalSGD(), Halfway(), MovedTwice()])
def test_a_gate_needs_a_rule_that_the_host_can_apply(rule):
    with pytest.raises(Conflict, match="easgd, asgd or downpour"):
        check_gate(Gate(), rule, lock=True)
    check_gate(None, rule, lock=True)


def test_a_gate_needs_the_locks():
    with pytest.raises(Conflict, match="lock=False"):
        check_gate(Gate(), EASGD(), lock=False)


def test_workers_agree_on_the_gate_and_on_what_it_judges():
    assert agreement_on(None, EASGD()) == ""
    assert agreement_on(Gate(), EASGD()) == agreement_on(Gate(), ASGD())
    assert agreement_on(Gate(), EASGD()) != agreement_on(Gate(), Downpour())
