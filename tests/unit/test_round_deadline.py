"""The limit of waits in rounds: fixed, or learned from the rounds before."""

import pytest

from maniple.clock import clock
from maniple.collectives.deadline import RoundDeadline, start_deadline_s
from maniple.environment import read_environment
from maniple.errors import InvalidArgument
from maniple.settings.options import COLLECTIVES_DEADLINE_S, all_settings
from tests.simulated_clock import SimulatedClock


@pytest.fixture
def time():
    simulated = SimulatedClock()
    with clock.replaced(simulated):
        yield simulated


def after(time: SimulatedClock, *intervals: float, setting: float | str = "auto") -> RoundDeadline:
    deadline = RoundDeadline(setting)
    deadline.count_round()
    for seconds in intervals:
        time.now += seconds
        deadline.count_round()
    return deadline


def test_a_number_stays_as_it_is(time):
    deadline = after(time, *[1.0] * 100, setting=7.0)
    assert deadline.limit_s == 7
    assert str(deadline) == "limit 7 s"


def test_the_default_holds_until_enough_rounds_were_made(time):
    deadline = after(time, *[1.0] * 15)
    assert deadline.limit_s == COLLECTIVES_DEADLINE_S
    assert str(deadline) == "limit 600 s, until 16 rounds were made"


def test_the_limit_is_the_median_and_ten_mads(time):
    deadline = after(time, *[30.0, 40.0, 50.0, 60.0, 70.0] * 8)  # median 50, MAD 10
    assert deadline.limit_s == pytest.approx(150)
    assert str(deadline) == "limit 150 s, learned from the last 40 rounds: median 50 s, longest 70 s"


def test_fast_rounds_do_not_give_a_limit_below_the_floor(time):
    assert after(time, *[0.01] * 64).limit_s == 30


def test_slow_rounds_do_not_give_a_limit_above_the_default(time):
    assert after(time, *[500.0] * 64).limit_s == COLLECTIVES_DEADLINE_S


def test_calls_in_bursts_are_given_the_time_between_two_bursts(time):
    assert after(time, *[0.01, 0.01, 0.01, 300.0] * 16).limit_s == pytest.approx(300)


def test_a_long_validation_is_forgotten_after_some_rounds(time):
    assert after(time, *[1.0] * 20, 200.0).limit_s == pytest.approx(200)
    assert after(time, *[1.0] * 20, 200.0, *[1.0] * 64).limit_s == 30


def test_waits_before_the_first_round_have_the_default():
    assert start_deadline_s("auto") == COLLECTIVES_DEADLINE_S
    assert start_deadline_s(3.0) == 3


def test_the_setting_is_a_number_or_auto():
    def read(text: str) -> float | str:
        return read_environment(env={"MANIPLE_COLLECTIVES_DEADLINE": text}).collectives_deadline_s

    assert read("auto") == "auto"
    assert read("45") == 45
    with pytest.raises(InvalidArgument, match="not a number"):
        read("soon")
    setting = all_settings()["collectives_deadline"]
    setting.check("auto")
    setting.check(45.0)
    with pytest.raises(InvalidArgument, match="out of range"):
        setting.check(-1.0)
