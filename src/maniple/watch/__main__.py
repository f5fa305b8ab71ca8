"""The process of `maniple run --web`: python -m maniple.watch DESCRIPTOR RUN, with the token on standard input."""

import os
import socket
import sys
from contextlib import suppress

from maniple.watch.subject import Subject
from maniple.watch.web import serve

_NICE = 10  # training goes first


def main(descriptor: int, run: str) -> None:
    """Serve the page of a run that the launcher of this process has begun."""
    with suppress(OSError):
        os.nice(_NICE)
    token = sys.stdin.readline().strip()
    with Subject(run) as subject, socket.socket(fileno=descriptor) as door:
        serve(subject, door, token=token)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
