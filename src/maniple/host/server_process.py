"""Running a server: as a separate process (`main`), or in the process of a user's controller (`serve`).

main    `maniple run` and `maniple serve` start it as `python -m maniple.host FD...`, with their listening sockets, and
        start it again when it dies. It loads the controller, which may be a user's own class.
serve   `Controller.serve()`: host, listener and server in one process, which is not restarted.
"""

import inspect
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from maniple.clock import clock
from maniple.controller import Controller
from maniple.environment import Environment, read_environment, read_limits, shared_memory
from maniple.errors import InvalidArgument, ManipleError
from maniple.host import Host
from maniple.host.listener import Listen, Listener
from maniple.host.server import Server
from maniple.record.folder import fresh_name
from maniple.user_class import load_file, parse_arguments, parse_class
from maniple.wire.address import Address
from maniple.wire.messages import to_json

# Exit codes: the controller's arguments are invalid; its own code fails before it can serve.
CONTROLLER_INVALID, CONTROLLER_FAILED = 78, 79
_SNAPSHOT_INTERVAL_S = 300.0  # of `serve`, as the default of --snapshot-every


def main() -> None:
    """Serve until killed, or until SIGTERM after the run is over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the launcher decides
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    environment = read_environment()
    if not environment.token:
        raise InvalidArgument("the server has no token. It is started by `maniple serve` and `maniple run`.")
    try:
        controller = load_controller(environment.controller, environment.controller_args)
    except ManipleError as error:
        print(error, file=sys.stderr)
        sys.exit(CONTROLLER_INVALID)
    except BaseException:
        traceback.print_exc()
        sys.exit(CONTROLLER_FAILED)
    server = Server(environment, controller)
    signal.signal(signal.SIGTERM, server.end_if_over)
    server.run([socket.socket(fileno=int(number)) for number in sys.argv[1:]])


def serve(controller: Controller, port: int, *, host: str, name: str | None, runs: Path) -> None:
    """Host a run until Ctrl-C or SIGTERM, or until the controller stops it and all workers have left."""
    if not 0 <= port <= 65535:
        raise InvalidArgument(f"serve({port}) cannot listen there. Give a port from 0 to 65535; 0 chooses a free one.")
    settings: dict[str, Any] = {"controller": type(controller).__name__, "workers": 0}
    owner = Host.start(shared_memory(), runs, name or fresh_name(runs, Path("host")), settings)
    try:
        environment = Environment(world=0, run=owner.folder.path, segment=owner.segment.path, limits=read_limits())
        listener = Listener(owner, Listen(Address(host, port)), environment)
    except BaseException:
        owner.abandon()
        raise
    try:
        server = Server(listener.environment, controller)
        print(f"listening on {listener.address}; token and address are in {owner.folder.path}", flush=True)
        thread = threading.Thread(target=server.run, args=(listener.sockets,), name="maniple-server", daemon=True)
        thread.start()
        try:
            _wait(owner, controller)
        finally:
            server.end()
            thread.join(5)
    finally:
        for one in listener.sockets:  # else a thread that waits in accept() keeps it open
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        listener.close()
        owner.close(0)


def load_controller(spec: str | None, args: Sequence[str] = ()) -> Controller:
    """Create the controller that FILE.py:CLASS names, with arguments NAME=VALUE; the default one for None."""
    if spec is None:
        return Controller()
    path, name = parse_class(spec)
    settings = parse_arguments(args)
    module = load_file(path)
    kind = getattr(module, name, None)
    if not (inspect.isclass(kind) and issubclass(kind, Controller)):
        names = [
            key
            for key, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, Controller) and value is not Controller
        ]
        hint = f"It has {', '.join(names)}." if names else "Derive it: class Mine(maniple.Controller)."
        raise InvalidArgument(f"--controller {spec}: {path} has no class {name} derived from Controller. {hint}")
    try:
        inspect.signature(kind).bind(**settings)
    except TypeError as error:
        raise InvalidArgument(
            f"--controller {spec}: {name} cannot be made with {settings or 'no arguments'}: {error}. "
            "Give its arguments by --controller-arg NAME=VALUE."
        ) from None
    controller = kind(**settings)
    try:
        msgspec.json.decode(msgspec.json.encode(controller.state, enc_hook=to_json), type=dict[str, Any])
    except (TypeError, ValueError) as error:  # includes msgspec's errors
        raise InvalidArgument(
            f"--controller {spec}: `state` of {name} must be a dict that JSON can express, and is not: {error}."
        ) from None
    return controller


def _wait(owner: Host, controller: Controller) -> None:
    saved = clock.monotonic()
    with _interrupt_event() as is_ending:
        while not is_ending.wait(0.2):
            if controller.is_stopping and owner.segment.live == 0:
                return
            if clock.monotonic() - saved > _SNAPSHOT_INTERVAL_S:
                saved = clock.monotonic()
                owner.save()


@contextmanager
def _interrupt_event() -> Generator[threading.Event]:
    """An event set by Ctrl-C and SIGTERM. Outside the main thread signal handlers cannot be changed."""
    event = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, lambda _number, _frame: event.set()) for number in numbers}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
