"""The paces on a simulated clock."""

import math
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from maniple import Every, RateLimit
from maniple.errors import InvalidArgument
from maniple.pace import Pace, parse_pace

RATES = st.floats(0.01, 1)
SECONDS = st.floats(1e-6, 10)


class Clock:
    """A training loop in which a step takes `step_s` and the i-th exchange `cost(i)` seconds."""

    def __init__(self, pace: Pace, step_s: float, cost: Callable[[int], float], size_bytes: int = 0) -> None:
        self.pace, self.step_s, self.cost, self.size_bytes = pace, step_s, cost, size_bytes
        self.now = self.spent = 0.0
        self.since = 0
        self.begun: list[float] = []  # when each exchange began
        self.shares: list[float] = []  # spent / elapsed, after each

    def step(self) -> None:
        self.now += self.step_s
        self.since += 1
        if self.pace.due(self.since, self.now):
            self.begun.append(self.now)
            cost = self.cost(len(self.begun) - 1)
            self.now += cost
            self.spent += cost
            self.pace.exchanged(cost, self.size_bytes)
            self.shares.append(self.spent / self.now)
            self.since = 0

    def run(self, steps: int) -> "Clock":
        for _ in range(steps):
            self.step()
        return self

    def run_until(self, exchanges: int, limit: int = 100_000) -> "Clock":
        while len(self.begun) < exchanges:
            self.step()
            limit -= 1
            assert limit, "no exchange came"
        return self


def expecting(pace: RateLimit, cost_s: float, size_bytes: int = 0) -> RateLimit:
    pace.expect(cost_s, size_bytes)
    return pace


# Every


@given(st.integers(1, 50))
def test_exchange_comes_every_n_steps(n):
    clock = Clock(Every(n), 1.0, lambda i: 0.0).run(5 * n + n // 2)
    assert clock.begun == [float(n * i) for i in range(1, len(clock.begun) + 1)]
    assert len(clock.begun) == 5 + (n // 2 == n)


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "10", None])
def test_every_refuses_what_is_no_number_of_steps(n):
    with pytest.raises(InvalidArgument, match="1 or more"):
        Every(n)


# RateLimit


@given(RATES, SECONDS, SECONDS)
def test_share_of_time_is_kept_from_the_first_exchange_on(rate, step_s, cost_s):
    assume(cost_s / step_s / rate < 500)  # steps up to one exchange, for the test's own duration
    clock = Clock(expecting(RateLimit(rate), cost_s), step_s, lambda i: cost_s).run(1500)
    assert clock.shares
    assert max(clock.shares) <= rate * (1 + 1e-9)


@given(st.floats(0.1, 0.8), st.floats(1e-4, 10), st.floats(0.02, 0.05))
def test_share_of_time_comes_close_to_the_limit_when_steps_are_short(rate, cost_s, ratio):
    clock = Clock(expecting(RateLimit(rate), cost_s), cost_s * ratio, lambda i: cost_s).run_until(10)
    assert clock.shares[-1] >= 0.95 * rate


@given(st.floats(0.02, 1))
def test_exchanges_are_never_more_than_one_step_late(rate):
    clock = Clock(expecting(RateLimit(rate), 1.0), 0.3, lambda i: 1.0).run_until(20)
    for i, begun in enumerate(clock.begun):
        allowed = (i + 1) / rate - 1  # (spent + e) / (begun + e) <= rate
        previous_end = clock.begun[i - 1] + 1 if i else 0
        assert begun < max(allowed, previous_end) + 0.3 + 1e-6


@given(st.floats(0.1, 0.5))
def test_exchanges_that_cost_twice_as_much_come_half_as_often(rate):
    counts = []
    for cost_s in (1.0, 2.0):
        clock = Clock(expecting(RateLimit(rate), cost_s), 0.1, lambda i, c=cost_s: c)
        while clock.now < 50 / rate:
            clock.step()
        counts.append(len(clock.begun))
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.08)


def test_exchanges_that_become_twice_as_dear_become_half_as_frequent():
    clock = Clock(expecting(RateLimit(0.25), 1.0), 0.01, lambda i: 1.0 if i < 50 else 2.0).run_until(100)
    gaps = [b - a for a, b in zip(clock.begun, clock.begun[1:], strict=False)]
    assert gaps[40] == pytest.approx(4, rel=0.02)
    assert gaps[-1] == pytest.approx(8, rel=0.02)
    assert clock.shares[-1] <= 0.25 * 1.001


def test_cost_that_was_underestimated_is_learnt():
    clock = Clock(expecting(RateLimit(0.25), 0.1), 0.01, lambda i: 1.0).run_until(40)
    assert clock.shares[0] > 0.25  # told too little, the first one came too early
    assert clock.shares[-1] <= 0.25 * 1.0001


def test_one_delay_does_not_spoil_the_pace():
    clock = Clock(expecting(RateLimit(0.25), 1.0), 0.01, lambda i: 100.0 if i == 20 else 1.0).run_until(60)
    pause = clock.begun[21] - clock.begun[20]
    assert 400 <= pause <= 480  # the debt of 100 s at 25 %, and little more; the unsmoothed estimate would add 300 s
    gaps = [b - a for a, b in zip(clock.begun[45:], clock.begun[46:], strict=False)]
    assert max(gaps) < 4.02
    assert clock.shares[-1] == pytest.approx(0.25, rel=0.01)


def test_no_exchange_is_due_before_the_first_step():
    assert not RateLimit(1.0).due(0, 1e9)
    assert RateLimit(1.0).due(1, 1e9)


@given(st.floats(1e3, 1e9), st.integers(1, 10**8), st.floats(0.01, 1))
def test_traffic_stays_below_its_limit_from_the_first_exchange_on(bytes_per_s, size_bytes, step_s):
    assume(size_bytes / bytes_per_s / step_s < 300)
    clock = Clock(expecting(RateLimit(bytes_per_s=bytes_per_s), 0.0, size_bytes), step_s, lambda i: 0.0, size_bytes)
    clock.run(1000)
    assert clock.begun
    for i, begun in enumerate(clock.begun):
        assert (i + 1) * size_bytes <= bytes_per_s * begun * (1 + 1e-9)


def test_traffic_comes_close_to_its_limit():
    clock = Clock(expecting(RateLimit(bytes_per_s=1000), 0.0, 5000), 0.01, lambda i: 0.0, 5000).run_until(10)
    assert clock.begun[-1] == pytest.approx(50, abs=0.02)


def test_both_limits_hold_together():
    slow_wire = expecting(RateLimit(0.5, bytes_per_s=100), 1.0, 1000)
    assert Clock(slow_wire, 0.1, lambda i: 1.0, 1000).run_until(5).begun[-1] == pytest.approx(50, abs=0.2)
    fast_wire = expecting(RateLimit(0.5, bytes_per_s=1e9), 1.0, 1000)
    assert Clock(fast_wire, 0.1, lambda i: 1.0, 1000).run_until(5).begun[-1] == pytest.approx(9, abs=0.2)


def test_quarter_of_the_time_is_the_default():
    assert RateLimit() == RateLimit(0.25)
    assert RateLimit(bytes_per_s=1e6).maximum_rate == 1.0


@pytest.mark.parametrize("rate", [0, -0.1, 1.1, 25, math.nan])
def test_share_out_of_range_is_refused(rate):
    with pytest.raises(InvalidArgument, match="above 0 and up to 1"):
        RateLimit(rate)


@pytest.mark.parametrize("traffic", [0, -1, math.nan])
def test_traffic_out_of_range_is_refused(traffic):
    with pytest.raises(InvalidArgument, match="bytes_per_s"):
        RateLimit(bytes_per_s=traffic)


# Words and equality


@pytest.mark.parametrize(
    ("text", "pace"), [("every:10", Every(10)), ("rate:0.25", RateLimit(0.25)), ("rate:1.0", RateLimit(1.0))]
)
def test_pace_of_the_command_line_is_read(text, pace):
    assert parse_pace(text) == pace


@pytest.mark.parametrize("text", ["every:0", "every:ten", "every:", "rate:", "rate:2", "rate:nan", "", "evry:0.5"])
def test_pace_that_cannot_be_read_is_refused_with_its_text(text):
    with pytest.raises(InvalidArgument) as caught:
        parse_pace(text)
    assert repr(text) in str(caught.value)


def test_paces_are_equal_by_their_settings_and_not_by_what_they_learnt():
    used = RateLimit(0.25)
    used.exchanged(1.0, 100)
    assert used == RateLimit(0.25)
    assert hash(used) == hash(RateLimit(0.25))
    paces = [Every(1), Every(2), RateLimit(0.25), RateLimit(0.5), RateLimit(0.25, bytes_per_s=1.0)]
    assert all((a == b) == (i == j) for i, a in enumerate(paces) for j, b in enumerate(paces))


def test_whole_numbers_are_the_same_limit_as_their_floats():
    assert RateLimit(1) == RateLimit(1.0)
    assert RateLimit(bytes_per_s=1000) == RateLimit(bytes_per_s=1000.0)


@pytest.mark.parametrize("pace", [Every(3), RateLimit(0.1), RateLimit(0.1, bytes_per_s=5.0)])
def test_repr_of_a_pace_makes_an_equal_one(pace):
    assert eval(repr(pace), {"Every": Every, "RateLimit": RateLimit}) == pace
