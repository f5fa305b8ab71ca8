"""The circle of one worker alone: all calls work, and nothing travels."""

from collections.abc import Sequence

from maniple.circle.link import Link, Message
from maniple.circle.rounds import Rounds
from maniple.contracts import Array


class _Nobody:
    """There is nobody to send to."""

    rank, size = 0, 1
    awaited: set[int] = set()  # noqa: RUF012 - nobody ever

    def send(self, peer: int, data: Array, tag: int) -> Message:
        raise AssertionError(f"a worker alone sends nothing, but {data.size} values for {peer} ({tag})")

    receive = send

    def wait(self, messages: Sequence[Message], deadline_s: float) -> tuple[set[int], set[int]]:
        del messages, deadline_s
        return set(), set()

    def blame(self, lost: set[int], late: set[int]) -> tuple[set[int], set[int]]:
        return lost, late

    def close(self) -> None:
        pass


class Alone(Rounds):
    """A circle of one."""

    name = "alone"

    def __init__(self) -> None:
        super().__init__(Link(_Nobody(), 1.0))
