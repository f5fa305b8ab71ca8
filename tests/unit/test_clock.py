"""Waits for other processes, on a simulated clock: what counts as waiting, and when a wait is over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maniple.clock import Deadline
from maniple.clock import clock as system_clock
from maniple.errors import WaitedTooLong
from tests.simulated_clock import SimulatedClock


class Clock(SimulatedClock):
    """Time that passes when somebody sleeps, and while the process is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.stops: dict[int, float] = {}  # before which look, and for how long
        self.looks = 0

    def on_look(self) -> None:
        self.looks += 1
        self.now += self.stops.get(self.looks, 0.0)


@pytest.fixture
def clock():
    simulated = Clock()
    with system_clock.replaced(simulated):
        yield simulated


def waited(patience: Deadline, what: str = "a lock") -> str:
    """The error by which a wait ends."""
    with pytest.raises(WaitedTooLong) as caught:
        while True:
            patience.wait(what)
    return str(caught.value)


def test_wait_ends_at_its_deadline_and_says_what_was_waited_for(clock):
    assert "waited 60.0 s for the lock of worker 3 (limit 60 s)" in waited(Deadline(60.0), "the lock of worker 3")
    assert clock.now == pytest.approx(60, abs=0.01)


@given(st.dictionaries(st.integers(2, 2000), st.floats(2, 1e5), max_size=5))
def test_time_for_which_the_process_was_stopped_does_not_count(stops):
    clock = Clock()
    clock.stops = stops
    with system_clock.replaced(clock):
        waited(Deadline(10.0))
        hit = {look: stop for look, stop in stops.items() if look <= clock.looks}
        assert clock.now - sum(hit.values()) == pytest.approx(10 - len(hit), abs=1.1)  # a stop counts as one second


def test_what_is_free_after_a_stop_is_taken_though_the_deadline_has_passed(clock):
    patience = Deadline(5.0)
    while patience.waited_s < 4.9:
        patience.wait("a lock")
    clock.stops = {clock.looks + 1: 70.0}  # between the look at the lock and that at the time
    patience.wait("a lock")  # no error: there is another look
    assert patience.waited_s > 5
    assert "waited 5.9 s" in waited(patience)  # in vain


def test_blocking_calls_count_in_full_up_to_their_slice(clock):
    patience = Deadline(60.0, slice_s=31.0)
    for _ in range(2):
        clock.sleep(29.0)
        assert not patience.is_over()
    clock.sleep(29.0)
    assert patience.is_over()
