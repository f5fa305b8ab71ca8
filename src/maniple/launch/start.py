"""Runs first in each child process: asks to be killed with the launcher, binds cores, then executes the command.

Run by path, without site packages, so that it takes only milliseconds:  python -I -S start.py PARENT CORES COMMAND...
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process by COMMAND."""
    parent, cores, *command = sys.argv[1:]
    # The kernel kills this process when the launcher dies, even by SIGKILL; the setting survives exec.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # the launcher died before the line above
        sys.exit(1)
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
