"""Byte locks on files: exclusive between holders, released with them."""

import os
import time

import pytest

from maniple.center import ByteLocks
from maniple.errors import WaitedTooLong


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
