"""Byte locks on files: exclusive between holders, released with them."""

import os
import threading
import time
from collections.abc import Callable

import pytest

from maniple.center import ByteLocks
from maniple.clock import Deadline
from maniple.errors import WaitedTooLong
from maniple.memory.locks import LockQueue
from tests.waiting import PATIENCE_S, await_


def test_two_holders_of_one_byte_exclude_each_other_and_other_bytes_are_free(tmp_path):
    first, second = ByteLocks(tmp_path / "locks"), ByteLocks(tmp_path / "locks")
    assert first.take(5)
    assert not second.take(5)
    assert second.take(6)
    first.give(5)
    assert second.take(5)
    first.close()
    second.close()
    second.close()


def test_hold_gives_back_after_an_error_and_says_what_it_waited_for(tmp_path):
    first, second = ByteLocks(tmp_path / "locks"), ByteLocks(tmp_path / "locks")
    with pytest.raises(KeyError), first.hold(0, timeout_s=1, what="the lock"):
        with (
            pytest.raises(WaitedTooLong, match=r"the other \(limit 0\.02 s\)"),
            second.hold(0, timeout_s=0.02, what="the other"),
        ):
            pytest.fail("two in one lock")
        raise KeyError
    with second.hold(0, timeout_s=0.02, what="the other"):
        pass
    first.close()
    second.close()


def test_lock_that_is_closed_is_free(tmp_path):
    first, second = ByteLocks(tmp_path / "locks"), ByteLocks(tmp_path / "locks")
    first.take(0)
    first.close()
    assert second.take(0)
    second.close()


def test_forked_child_does_not_keep_its_parent_s_lock(tmp_path):
    first, second = ByteLocks(tmp_path / "locks"), ByteLocks(tmp_path / "locks")
    assert first.take(0)
    ends = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(ends[0], 1)  # lives on, as a data loader's worker does
        os._exit(0)
    try:
        time.sleep(0.05)
        assert not second.take(0)  # the child's letting go does not unlock the parent's lock
        first.close()  # as the parent's death would
        deadline = time.monotonic() + 60
        while not (taken := second.take(0)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert taken
    finally:
        os.write(ends[1], b".")
        os.waitpid(child, 0)
        for end in ends:
            os.close(end)
        second.close()


class Queued:
    """Threads that take their turn at lock "a" of a queue, in the order in which they were started."""

    def __init__(self) -> None:
        self.queue, self.order = LockQueue(), list[str]()
        self._threads: list[threading.Thread] = []

    def start(self, name: str, timeout_s: float = PATIENCE_S, act: Callable[[], object] = lambda: None) -> None:
        def take_turn() -> None:
            try:
                with self.queue.turn("a", Deadline(timeout_s), lambda: "the lock"):
                    act()
                    self.order.append(name)
            except WaitedTooLong:
                self.order.append(f"{name} gave up")

        before = len(self.queue._waiting.get("a", ()))
        self._threads.append(threading.Thread(target=take_turn, daemon=True))
        self._threads[-1].start()
        await_(lambda: len(self.queue._waiting["a"]) > before)

    def join(self) -> list[str]:
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not self.queue._waiting, "nothing is kept of a lock for which no thread waits"
        return self.order


def test_threads_take_a_lock_in_the_order_in_which_they_came():
    queued, gate = Queued(), threading.Event()
    queued.start("first", act=lambda: gate.wait(PATIENCE_S))
    for number in range(20):
        queued.start(str(number))
    with queued.queue.turn("b", Deadline(1), lambda: "another lock"):
        assert queued.order == []
    gate.set()
    assert queued.join() == ["first", *map(str, range(20))]


def test_thread_that_gives_up_waiting_lets_the_next_one_pass():
    queued, gate = Queued(), threading.Event()
    queued.start("first", act=lambda: gate.wait(PATIENCE_S))
    queued.start("hasty", timeout_s=0.01)
    queued.start("last")
    await_(lambda: queued.order == ["hasty gave up"])
    gate.set()
    assert queued.join() == ["hasty gave up", "first", "last"]
