"""The page server that `maniple run --web` starts: python -m maniple.watch DESCRIPTOR RUN, token on standard input."""

import os
import socket
import sys
from contextlib import suppress

from maniple.watch.site import serve
from maniple.watch.watched_run import WatchedRun

_NICE = 10  # training has precedence


def main(descriptor: int, run: str) -> None:
    """Serve the page of a run on a listening socket that the launcher has opened."""
    with suppress(OSError):
        os.nice(_NICE)
    token = sys.stdin.readline().strip()
    with WatchedRun(run) as watched, socket.socket(fileno=descriptor) as listener:
        serve(watched, listener, token=token)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
