"""Schedules of the learning rate."""

import pytest

from maniple.errors import InvalidArgument
from maniple.schedules import cosine, poly, scaled, set_lr, step, warm_up


def test_the_rate_grows_with_the_number_of_workers():
    assert scaled(0.1, workers=4) == pytest.approx(0.4)
    assert scaled(0.1, workers=4, by="sqrt") == pytest.approx(0.2)
    assert scaled(0.1, workers=4, by="none") == 0.1
    with pytest.raises(InvalidArgument, match=r"by='cubic' scales no learning rate .*linear, sqrt, none.*"):
        scaled(0.1, workers=4, by="cubic")


def test_steps_multiply_the_rate_from_their_time_on():
    schedule = step(1.0, at=(3, 5), factor=0.1)
    assert [schedule(t) for t in (0, 2, 3, 4, 5, 99)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize("make", [poly, cosine])
def test_rates_fall_from_the_first_to_the_last_and_stay_there(make):
    schedule = make(0.4, total=10, end=0.1)
    rates = [schedule(t) for t in range(15)]
    assert rates[0] == pytest.approx(0.4) and rates[10:] == pytest.approx([0.1] * 5)
    assert rates[5] == pytest.approx(0.25)
    assert rates == sorted(rates, reverse=True)


def test_the_power_bends_the_way_down():
    assert poly(1.0, total=4, power=2)(2) == pytest.approx(0.25)


def test_a_warm_up_leads_in_a_straight_line_to_the_schedule():
    schedule = warm_up(step(0.8, at=(6,)), over=4, start=0.2)
    assert [schedule(t) for t in (0, 1, 2, 4, 5, 6)] == pytest.approx([0.2, 0.35, 0.5, 0.8, 0.8, 0.08])
    assert warm_up(step(0.8, at=()), over=0)(0) == 0.8, "switched off"


def test_all_groups_of_an_optimizer_get_the_rate():
    torch = pytest.importorskip("torch")
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [weight]} for weight in weights], lr=1.0)
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
