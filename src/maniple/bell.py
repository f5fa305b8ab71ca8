"""A bell: wakes processes that wait for something in shared memory to change. A count there, and the kernel's futex
(`man 2 futex`) to wait until it changes.

Not a pipe or a socket: the kernel wakes their readers on the core of the writer, and the two then take turns on it. A
ring that is lost costs the waiter its time limit, nothing else.
"""

import ctypes
import errno
import mmap
import os
import time

_CALL = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine)  # the number of the system call
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1
_POLL_S = 1e-3
AWAKE_S = 1e-3  # a short wait is passed awake: a sleeper that is woken takes the core of the one who has rung

_system = ctypes.CDLL(None, use_errno=True).syscall


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bell:
    """The bell that lies in 8 bytes of a mapped file, seen by one process."""

    def __init__(self, table: mmap.mmap, offset: int) -> None:
        self._count = ctypes.c_uint32.from_buffer(table, offset)
        self._is_wanted = ctypes.c_uint32.from_buffer(table, offset + 4)  # somebody sleeps
        self._address = ctypes.c_void_p(ctypes.addressof(self._count))

    @property
    def count(self) -> int:
        """The rings so far; to be read before one looks at what is waited for."""
        return self._count.value

    def ring(self) -> None:
        """Wake all who wait."""
        self._count.value += 1  # two at once may count as one: it differs from what the waiters have read
        if self._is_wanted.value:
            self._is_wanted.value = 0
            if _CALL is not None:
                _system(_CALL, self._address, _WAKE, _ALL, None, None, 0)

    def wait(self, count: int, timeout_s: float, *, awake_s: float = AWAKE_S) -> None:
        """Until somebody has rung since `count` was read, or the time is over, or a signal came."""
        begin = time.perf_counter()
        while self._count.value == count:
            if time.perf_counter() - begin > awake_s:
                self._sleep(count, timeout_s)
                return
            os.sched_yield()

    def _sleep(self, count: int, timeout_s: float) -> None:
        if _CALL is None:
            time.sleep(min(timeout_s, _POLL_S))
            return
        limit = _Time(int(timeout_s), int(timeout_s % 1 * 1e9))
        self._is_wanted.value = 1
        if _system(_CALL, self._address, _WAIT, ctypes.c_uint32(count), ctypes.byref(limit), None, 0) < 0:
            assert ctypes.get_errno() in {errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR}
