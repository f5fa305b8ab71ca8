"""Relative speeds of workers, from the steps in their heartbeats."""

import pytest

from maniple.host.worker_speeds import WorkerSpeeds


def counted(speeds: WorkerSpeeds, rates: list[float], until: int) -> None:
    for second in range(1, until + 1):
        for rank, rate in enumerate(rates):
            speeds.count((rank, 0), int(rate * second), float(second))


def test_a_slow_worker_knows_its_share_of_the_fast_ones():
    speeds = WorkerSpeeds()
    counted(speeds, [40, 40, 10, 40], 20)
    assert speeds.relative((2, 0)) == pytest.approx(0.25)
    assert speeds.relative((0, 0)) == 1.0


def test_one_mismeasured_worker_does_not_slow_the_others():
    speeds = WorkerSpeeds()
    counted(speeds, [10] * 19 + [1000], 20)
    assert speeds.relative((0, 0)) == pytest.approx(1.0)


def test_a_speed_is_that_of_the_last_half_minute():
    speeds = WorkerSpeeds()
    counted(speeds, [10, 10], 100)
    for second in range(101, 141):  # worker 1 is throttled
        speeds.count((0, 0), 10 * second, float(second))
        speeds.count((1, 0), 1000 + 2 * (second - 100), float(second))
    assert speeds.relative((1, 0)) == pytest.approx(0.2)


def test_what_is_not_known_is_1_and_the_dead_do_not_count():
    speeds = WorkerSpeeds()
    assert speeds.relative((0, 0)) == 1.0
    speeds.count((0, 0), 0, 1.0)
    speeds.count((0, 0), 5, 2.0)
    assert speeds.relative((0, 0)) == 1.0
    counted(speeds, [10, 100], 20)
    speeds.count((1, 0), 2000, 21.0, is_last=True)
    assert speeds.relative((0, 0)) == 1.0
    counted(speeds, [10, 100], 20)
    speeds.count((1, 1), 1, 21.0)  # the successor of a worker that died
    assert speeds.relative((0, 0)) == 1.0
