"""A host in the process of a user's own script: `Controller().serve(port)`."""

import signal
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from maniple.errors import InvalidArgument
from maniple.host import Host
from maniple.host.desk import Controls
from maniple.host.gate import Gate, Listen
from maniple.host.server import Server
from maniple.place import Place, asked_limits, shared_memory
from maniple.record.folder import fresh_name
from maniple.wire.address import Address

_SNAPSHOT_EVERY_S = 300.0


def serve(controller: Controls, port: int, *, host: str, name: str | None, runs: Path) -> None:
    """Be a host until Ctrl-C or SIGTERM, or until the controller has said stop and all workers have left."""
    if not 0 <= port <= 65535:
        raise InvalidArgument(f"serve({port}) cannot listen there. Give a port up to 65535; 0 is a free one.")
    asked: dict[str, Any] = {"controller": type(controller).__name__, "workers": 0}
    owner = Host.start(shared_memory(), runs, name or fresh_name(runs, Path("host")), asked)
    try:
        place = Place(world=0, run=owner.folder.path, segment=owner.segment.path, limits=asked_limits())
        gate = Gate(owner, Listen(Address(host, port)), place)
    except BaseException:
        owner.abandon()
        raise
    assert gate.place.token is not None
    try:
        server = Server(gate.place, gate.place.token, None, controller)
        print(f"listening on {gate.address}; token and address are in {owner.folder.path}", flush=True)
        thread = threading.Thread(target=server.run, args=(gate.sockets,), name="maniple-server", daemon=True)
        thread.start()
        try:
            _wait(owner, controller)
        finally:
            server.end()
            thread.join(5)
    finally:
        for one in gate.sockets:  # a thread that waits in one of them would keep it open
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        gate.close()
        owner.close(0)


def _wait(owner: Host, controller: Controls) -> None:
    saved = time.monotonic()
    with _ending() as is_ending:
        while not is_ending.wait(0.2):
            if controller.decisions.known.reason and owner.segment.live == 0:
                return
            if time.monotonic() - saved > _SNAPSHOT_EVERY_S:
                saved = time.monotonic()
                owner.save()


@contextmanager
def _ending() -> Generator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set. Outside the main thread signals stay as they are."""
    event = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()

    def end(*_: Any) -> None:
        event.set()

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
