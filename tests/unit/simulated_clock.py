"""A clock for tests: time passes when a test says so, and when somebody sleeps."""


class SimulatedClock:
    """Use it with `maniple.clock.clock.replaced(...)`; set `now` to let time pass."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float, /) -> None:
        self.now += seconds
