"""The command `maniple` for a program that has started it: it ends, in order, when that program is gone.

python -m maniple.cli.tied FD run ...      FD: a pipe whose other end the program holds, and never writes to
"""

import os
import signal
import sys
import threading

from maniple.cli import main


def _follow(pipe: int) -> None:
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    number = int(sys.argv.pop(1))
    threading.Thread(target=_follow, args=(number,), name="maniple-tied", daemon=True).start()
    main()
