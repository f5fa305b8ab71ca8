"""The paces on a simulated clock."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from maniple import Every, RateLimit
from maniple.errors import InvalidArgument
from maniple.pace import Pace, parse_pace

RATES = st.floats(0.01, 1)
SECONDS = st.floats(1e-6, 10)


class Clock:
    """A training loop in which a step takes `step_s` and the i-th exchange `cost(i)` seconds.

    `fails(now)` tells whether an exchange at that time fails; it is known by its cost, like others.
    """

    def __init__(self, pace: Pace, step_s: float, cost: Callable[[int], float], size_bytes: int = 0) -> None:
        self.pace, self.step_s, self.cost, self.size_bytes = pace, step_s, cost, size_bytes
        self.now = self.spent = 0.0
        self.since = 0
        self.begun: list[float] = []  # when each exchange began
        self.costs: list[float] = []
        self.shares: list[float] = []  # spent / elapsed, after each
        self.fails: Callable[[float], bool] = lambda now: False
        self.spread = 0.0

    def step(self, step_s: float | None = None) -> None:
        self.now += self.step_s if step_s is None else step_s
        self.since += 1
        if self.pace.due(self.since, self.now):
            has_failed = self.fails(self.now)
            self.begun.append(self.now)
            self.costs.append(cost := self.cost(len(self.begun) - 1))
            self.now += cost
            self.spent += cost
            if has_failed:
                self.pace.failed(cost, self.spread)
            else:
                self.pace.exchanged(cost, self.size_bytes)
                self.since = 0
            self.shares.append(self.spent / self.now)

    def excess(self, rate: float) -> float:
        """How much more was spent between any two exchanges than `rate` of the time, in seconds."""
        worst = ahead = 0.0
        for i in range(1, len(self.begun)):
            ahead = max(0.0, ahead) + self.costs[i - 1] - rate * (self.begun[i] - self.begun[i - 1])
            worst = max(worst, ahead)
        return worst

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
    assert clock.shares[0] > 0.25  # with too few reports, the first one came too early
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


# RateLimit, in any stretch of time

PAUSE_S = 600.0
STEPS = st.lists(st.sampled_from([0.05, 0.1, 0.3, 1.0, 2.9, PAUSE_S]), min_size=20, max_size=200)
COSTS = st.lists(st.floats(0.01, 5), min_size=1, max_size=50)


def test_pause_saves_up_nothing():
    clock = Clock(expecting(RateLimit(0.25), 1.0), 0.1, lambda i: 1.0).run_until(10)
    clock.step(PAUSE_S)
    begin, spent = clock.now - 1.0, clock.spent - 1.0  # the exchange after the pause counts
    while clock.now < begin + 120:
        clock.step()
    assert (clock.spent - spent) / (clock.now - begin) == pytest.approx(0.25, abs=0.01)


def test_pause_saves_up_no_traffic():
    clock = Clock(expecting(RateLimit(bytes_per_s=1000), 0.0, 1000), 0.1, lambda i: 0.0, 1000).run_until(10)
    clock.step(PAUSE_S)
    begin, before = clock.now, len(clock.begun)
    while clock.now < begin + 120:
        clock.step()
    assert len(clock.begun) - before <= 121


@given(RATES, STEPS, COSTS, st.sets(st.integers(0, 200)), st.floats(0, 1))
def test_share_holds_between_any_two_exchanges(rate, steps, costs, failures, spread):
    clock = Clock(expecting(RateLimit(rate), costs[0]), 0.0, lambda i: costs[i % len(costs)])
    clock.fails, clock.spread = lambda now: len(clock.begun) in failures, spread
    for step_s in steps:
        clock.step(step_s)
    assert clock.excess(rate) <= (1 - rate) * max(costs) + 1e-6  # less than one exchange
    if clock.begun and costs[0] == max(costs):
        assert max(clock.shares) <= rate * (1 + 1e-9)


@given(RATES, st.floats(0.01, 5), st.sets(st.integers(0, 60)), st.floats(0.02, 0.5))
def test_single_pauses_shift_the_share_by_one_step_at_most(rate, cost_s, pauses, step_s):
    clock = Clock(expecting(RateLimit(rate), cost_s), step_s, lambda i: cost_s)
    for number in range(600):
        clock.step(PAUSE_S if number % 10 == 0 and number // 10 in pauses else step_s)
    assert clock.excess(rate) <= rate * step_s + 1e-6


@given(st.floats(1e3, 1e6), STEPS, st.lists(st.integers(1, 10**6), min_size=1, max_size=20))
def test_traffic_holds_between_any_two_exchanges(bytes_per_s, steps, sizes):
    pace, begun = expecting(RateLimit(bytes_per_s=bytes_per_s), 0.0, sizes[0]), list[tuple[float, int]]()
    now = 0.0
    for step_s in steps:
        now += step_s
        if pace.due(1, now):
            begun.append((now, sizes[len(begun) % len(sizes)]))
            pace.exchanged(0.0, begun[-1][1])
    for i, (start, _) in enumerate(begun):
        for j in range(i + 1, min(i + 10, len(begun))):
            assert sum(size for _, size in begun[i:j]) <= bytes_per_s * (begun[j][0] - start) + max(sizes) + 1e-3


def test_failed_exchanges_count_with_their_cost():
    clock = Clock(expecting(RateLimit(0.25), 1.0), 0.1, lambda i: 6.0 if 100 < clock.now < 400 else 1.0)
    clock.fails = lambda now: 100 < now < 400
    while clock.now < 800:
        clock.step()
        assert not clock.shares or clock.shares[-1] < 0.3  # the first failure takes six times as long as expected
    during = [begun for begun in clock.begun if 100 < begun < 400]
    assert 10 <= len(during) <= 13  # each is followed by three times as long without
    assert clock.shares[-1] == pytest.approx(0.25, rel=0.02)


def test_host_that_returns_is_found_at_once_and_not_by_all_workers_together():
    workers, step_s = 8, 0.01
    clocks = [Clock(expecting(RateLimit(0.5 / workers), 1.0), step_s, lambda i: 0.001) for _ in range(workers)]
    for rank, clock in enumerate(clocks):
        clock.fails, clock.spread = lambda now: 100 < now < 130, rank * 0.618 % 1
        clock.cost = lambda i, clock=clock: 0.0001 if clock.fails(clock.now) else 1.0
        while clock.now < 150:
            clock.step()
        tries = [begun for begun in clock.begun if 100 < begun < 130]
        assert min(after - before for before, after in pairwise(tries)) > 0.25 - step_s, "it is tried at each step"
    first = [next(begun for begun in clock.begun if begun > 130) for clock in clocks]
    assert max(first) < 130 + 0.5 + 2 * step_s
    assert len(set(first)) > workers // 2


def test_failed_exchange_that_has_sent_values_counts_for_the_traffic():
    pace = expecting(RateLimit(bytes_per_s=1000), 0.1, 5000)
    assert pace.due(1, 6.0)
    pace.failed(0.001, 0.0)  # it had no connection
    assert pace.due(1, 7.0)
    pace.failed(0.9, 0.0)
    assert not pace.due(1, 10.0)
    assert pace.due(1, 13.0)


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
