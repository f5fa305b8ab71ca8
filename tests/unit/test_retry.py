"""Retries: pauses that grow with jitter, and requests that are repeated until a deadline."""

import threading
from types import SimpleNamespace

import pytest

from maniple.clock import clock
from maniple.connection.retry import Backoff, retry_until
from maniple.errors import HostAway, InvalidArgument
from tests.simulated_clock import SimulatedClock


class FakeLink:
    """A link whose connection always works; counts how often it was dropped."""

    @staticmethod
    def on_wait() -> None:
        pass

    def __init__(self) -> None:
        self.dropped: list[str] = []

    def stream(self) -> SimpleNamespace:
        return SimpleNamespace()

    def drop(self, reason: str) -> None:
        self.dropped.append(reason)


@pytest.fixture
def time():
    with clock.replaced(SimulatedClock()):
        yield clock


def failing(*errors: BaseException):
    """A request that raises these errors, one per call, and then succeeds."""
    left = list(errors)

    def request() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return request


def test_pauses_double_up_to_the_limit_and_start_over_after_a_success():
    backoff = Backoff(0.1, 0.35, jitter=0.0)
    assert [backoff.next_s() for _ in range(4)] == [0.1, 0.2, 0.35, 0.35]
    backoff.reset()
    assert backoff.next_s() == 0.1


def test_jitter_cuts_off_at_most_its_share():
    pauses = [Backoff(1.0, 1.0, jitter=0.5).next_s() for _ in range(200)]
    assert 0.5 <= min(pauses) < max(pauses) <= 1.0


def test_request_is_repeated_after_breaks_and_while_the_host_is_away(time):
    link = FakeLink()
    request = failing(ConnectionResetError("cut"), HostAway("gone"), TimeoutError("slow"))
    assert retry_until(link, request, 10.0) == "done"  # type: ignore[arg-type]
    assert link.dropped == ["cut", "slow"]


def test_request_is_given_up_at_the_deadline(time):
    with pytest.raises(HostAway, match=r"gone\. Waited 5 s"):
        retry_until(FakeLink(), failing(*[HostAway("gone")] * 1000), 5.0)  # type: ignore[arg-type]
    assert 5.0 < time.monotonic() < 5.1
    with pytest.raises(HostAway, match="keeps breaking: cut"):
        retry_until(FakeLink(), failing(*[OSError("cut")] * 1000), 5.0)  # type: ignore[arg-type]


def test_host_that_is_away_is_not_waited_for_if_the_caller_can_go_on(time):
    other = threading.Thread(target=time.sleep, args=(1e-3,))  # as background threads of earlier tests do
    other.start()
    other.join()
    with pytest.raises(HostAway, match=r"^gone$"):
        retry_until(FakeLink(), failing(HostAway("gone")), 5.0, waits_for_host=False)  # type: ignore[arg-type]
    assert time.monotonic() == 0


@pytest.mark.parametrize("error", [InvalidArgument("wrong"), KeyboardInterrupt()])
def test_other_errors_and_interrupts_drop_the_connection_and_are_raised(time, error):
    link = FakeLink()
    with pytest.raises(type(error)):
        retry_until(link, failing(error), 5.0)  # type: ignore[arg-type]
    assert len(link.dropped) == 1


def test_caller_may_end_the_retries_early(time):
    def give_up() -> None:
        raise InvalidArgument("the run has ended")

    with pytest.raises(InvalidArgument):
        retry_until(FakeLink(), failing(OSError("cut")), 5.0, on_failure=give_up)  # type: ignore[arg-type]


def test_a_worker_that_has_to_leave_may_end_the_retries(time):
    link, calls = FakeLink(), []

    def leave() -> None:
        if len(calls) == 3:
            raise SystemExit(143)

    def request() -> None:
        calls.append(1)
        raise ConnectionResetError("cut")

    link.on_wait = leave
    with pytest.raises(SystemExit):
        retry_until(link, request, 600)
    assert len(calls) == 3
