"""What suits a line: invariants over all lines, models and steps, and choices that a reader of the docs expects."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maniple.doctor.line import MAX_COST, WIRES, LineSpeed, suggest

MBIT = 1e6 / 8
LINES = st.builds(LineSpeed, st.floats(1e-5, 1.0), st.floats(1e4, 1e10), st.floats(1e4, 1e10))
PARAMETERS, STEPS_S = st.floats(1e3, 1e11), st.floats(1e-4, 100.0)
ORDER = ("bsp", "easgd", "diloco")


@given(LINES, PARAMETERS, STEPS_S)
def test_exchanges_cost_little_or_hide_behind_the_steps(line, parameters, step_s):
    found = suggest(line, parameters, step_s)
    if found.overlap:
        assert found.exchange_s <= found.every * step_s and found.cost == 0
    else:
        assert found.exchange_s / (found.every * step_s + found.exchange_s) == pytest.approx(found.cost)
        assert found.cost <= MAX_COST * (1 + 1e-9)


@given(LINES, PARAMETERS, STEPS_S, st.floats(1.0, 1e4))
def test_a_faster_line_never_needs_a_rarer_exchange_or_more_compression_of_the_same_rule(
    line, parameters, step_s, factor
):
    slow = suggest(line, parameters, step_s)
    quick = suggest(
        LineSpeed(line.round_trip_s / factor, line.up_bytes_per_s * factor, line.down_bytes_per_s * factor),
        parameters,
        step_s,
    )
    assert ORDER.index(quick.rule) <= ORDER.index(slow.rule)
    if quick.rule == slow.rule and max(quick.every, slow.every) <= 100:
        assert WIRES.index(quick.wire) <= WIRES.index(slow.wire)
    if (quick.rule, quick.wire, quick.overlap) == (slow.rule, slow.wire, slow.overlap):
        assert quick.every <= slow.every


@given(LINES, PARAMETERS, STEPS_S)
def test_the_period_is_the_shortest_with_this_compression(line, parameters, step_s):
    found = suggest(line, parameters, step_s)
    shorter = found.every - 10
    if found.rule == "diloco" and shorter >= 10 and not found.overlap:
        assert found.exchange_s / (shorter * step_s + found.exchange_s) > MAX_COST


@pytest.mark.parametrize(
    ("mbit", "parameters", "options"),
    [
        (100_000, 1e6, "--rule bsp"),  # 8 MB in a millisecond
        (1000, 5e5, "--rule easgd"),
        (1000, 5e6, "--rule diloco:every=40,sync=false"),
        (100, 5e6, "--rule diloco:every=40,sync=false --overlap"),
    ],
)
def test_the_least_change_that_a_line_allows_is_suggested(mbit, parameters, options):
    line = LineSpeed(0.001, mbit * MBIT, mbit * MBIT)
    assert suggest(line, parameters, 0.2).options == options


def test_a_line_on_which_nothing_studied_is_short_enough_is_said_to_be_one():
    found = suggest(LineSpeed(0.04, MBIT, MBIT), 1e10, 0.2)
    assert found.every > 500 and found.overlap and found.wire not in {"float32", "bfloat16"}
    assert "a larger batch or a smaller model" in found.reason
