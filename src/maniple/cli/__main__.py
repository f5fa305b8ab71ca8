"""`python -m maniple.cli`: the command `maniple`.

With `--tied FD` before the command, it ends in order when the program that started it is gone: FD is a pipe whose
other end that program holds and never writes to.
"""

import os
import signal
import sys
import threading

from maniple.cli import main


def _end_with(pipe: int) -> None:
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if sys.argv[1:2] == ["--tied"]:
    _, pipe = sys.argv.pop(1), int(sys.argv.pop(1))
    threading.Thread(target=_end_with, args=(pipe,), name="maniple-tied", daemon=True).start()
main()
