"""A process that the launcher has started, on this machine: it and what it starts end with the launcher."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from maniple.launch import start
from maniple.launch.output import Output
from maniple.place import inherited

# A log is text in UTF-8, whatever encoding the launcher's own terminal has, and no character of it can fail a `print`.
PRINTING = {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}


class Child:
    """One process at a time, over all its restarts."""

    def __init__(self) -> None:
        self.descriptor = -1  # readable once the process has ended; -1 while there is none
        self.output: Output | None = None  # of the newest process
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """It has been started and not collected yet."""
        return self._process is not None

    @property
    def unwritten(self) -> bytes:
        """The newest that it has printed and a full disk has kept from its log."""
        return b"" if self.output is None else self.output.kept

    def spawn(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        cores: str = "",
        descriptors: Sequence[int] = (),
        stdin: int = subprocess.DEVNULL,
    ) -> int:
        """Start `command`; gives its process id."""
        self.output = output = Output(log, self.output)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", start.__file__, str(os.getpid()), cores, *command],
                env=inherited() | PRINTING | dict(env),
                stdin=stdin,
                stdout=output.pipe,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own: it and its children are ended together
                pass_fds=descriptors,
            )
        finally:
            os.close(output.pipe)
        # Both or none: a signal that ends the run may come between any two lines. A process that nobody knows of yet
        # ends with the launcher.
        self._process, self.descriptor = process, os.pidfd_open(process.pid)
        return process.pid

    def write(self, data: bytes) -> None:
        """Give it something to read, if it was started with a pipe; one that has ended reads no more."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(data)
                self._process.stdin.flush()

    def has_ended(self, timeout_s: float) -> bool:
        """Wait at most so long for its end, and leave it to be collected."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    @property
    def exit_code(self) -> int | None:
        """That of a process that has ended and is not collected yet; None if it runs, or is not of this machine."""
        with suppress(OSError):
            found = os.waitid(os.P_PIDFD, self.descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return None

    def collect(self) -> int:
        """Reap a process that has ended, end what it has started, and give its exit code."""
        assert self._process is not None
        self.signal(signal.SIGKILL)  # its group; before the reaping, while the number still is its own
        exit_code = self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        os.close(self.descriptor)
        self._process, self.descriptor = None, -1
        if self.output is not None:
            self.output.finish()
        return exit_code

    def signal(self, number: int) -> None:
        """Send SIGKILL to the whole group, anything else to the process alone."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(self._process.pid, number)
                else:
                    os.kill(self._process.pid, number)
