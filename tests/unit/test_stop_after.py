"""Stopping after a duration, on a clock of our own."""

import math

import numpy as np
import pytest

from maniple import StopAfter, Worker
from maniple.clock import clock as source
from maniple.environment import Environment
from maniple.errors import InvalidArgument


@pytest.fixture
def clock(monkeypatch):
    """The time, as a list of one number that a test may set."""
    now = [1000.0]
    monkeypatch.setattr(source, "monotonic", lambda: now[0])
    return now


def test_stop_is_due_after_the_duration_since_the_first_step_and_stays_so(clock):
    stop = StopAfter(60)
    clock[0] += 1e6
    assert not stop.is_due, "start-up does not count"
    stop.stepped()
    clock[0] += 59.9
    assert not stop.is_due
    clock[0] += 0.1
    assert stop.is_due
    clock[0] += 1e6
    assert stop.is_due


def test_worker_that_was_given_a_stop_stops_in_time(clock):
    worker = Worker(Environment())
    replica = worker.share({"w": np.zeros(2)}, stop=StopAfter(60))
    sampler = iter(worker.sampler(range(1000)))
    clock[0] += 1e6
    assert not worker.should_stop, "no step was made"
    next(sampler)
    replica.step()
    clock[0] += 30
    replica.step()
    assert not worker.should_stop
    clock[0] += 31
    assert worker.should_stop
    assert len(list(sampler)) < 128  # it looks every 128 samples


def test_worker_without_a_stop_goes_on(clock):
    worker = Worker(Environment())
    worker.share({"w": np.zeros(2)})
    clock[0] += 1e9
    assert not worker.should_stop


def test_second_share_without_a_stop_keeps_the_first_one_s(clock):
    worker = Worker(Environment())
    worker.share({"w": np.zeros(2)}, stop=StopAfter(60)).step()
    worker.share({"v": np.zeros(2)})
    clock[0] += 61
    assert worker.should_stop


@pytest.mark.parametrize("duration", [0, -1, math.nan])
def test_duration_that_is_not_above_0_is_refused(duration):
    with pytest.raises(InvalidArgument, match="total_duration"):
        StopAfter(duration)


def test_endless_duration_never_stops(clock):
    stop = StopAfter(math.inf)
    stop.stepped()
    clock[0] += 1e12
    assert not stop.is_due
