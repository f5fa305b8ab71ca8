"""The server's process: all connections of a host, and its controller.

python -m maniple.controller FD...         listening sockets, inherited; the rest by environment variables
"""

import resource
import signal
import socket
import sys
import traceback

from maniple.controller.loading import load
from maniple.errors import InvalidArgument, ManipleError
from maniple.host.server import Server
from maniple.place import find
from maniple.wire.tls import host_context

UNUSABLE, BROKEN = 78, 79  # exit codes: the controller was given wrongly; its own code fails before it can serve


def main() -> None:
    """Serve until killed or told to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the launcher decides
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    place = find()
    if not place.token:
        raise InvalidArgument("the server has no token. It is started by `maniple serve` and `maniple run`.")
    try:
        controller = load(place.controller, place.controller_args)
    except ManipleError as error:
        print(error, file=sys.stderr)
        sys.exit(UNUSABLE)
    except BaseException:
        traceback.print_exc()
        sys.exit(BROKEN)
    tls = host_context(place.certificate, place.key) if place.certificate and place.key else None
    listeners = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    server = Server(place, place.token, tls, controller)
    signal.signal(signal.SIGTERM, server.end_if_over)
    server.run(listeners)
