"""Both ends of feeds, near and far, for the tests of one suite."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maniple.center import Segment
from maniple.environment import Environment
from maniple.feed.local_feed import Batches, LocalConsumer, LocalProducer
from maniple.feed.remote_feed import RemoteConsumer, RemoteProducer
from maniple.feed.ring import FeedBatch

from ..serving import TOKEN

WAIT_S = 60


@dataclass
class Ends:
    """Opens both ends of feeds over one transport, and closes them after the test."""

    host: Any
    is_far: bool
    opened: list[Any] = field(default_factory=list)

    def sink(self, name: str = "x", *, index: int = -1, count: int = 1, high_water: int = 4) -> Any:
        if self.is_far:
            environment = Environment(address=str(self.host.address), token=TOKEN, producer=index, producers=count)
            self.opened.append(RemoteProducer(environment, name, high_water))
        else:
            environment = Environment(segment=self.host.segment.path, producer=index, producers=count)
            self.opened.append(LocalProducer(environment, name, high_water))
        return self.opened[-1]

    def launched(self, name: str, number: int, high_water: int = 4) -> LocalProducer:
        """The end of a producer that the launcher has started: it is on the host's machine."""
        environment = Environment(segment=self.host.segment.path, producer=0, producer_number=number)
        self.opened.append(LocalProducer(environment, name, high_water))
        return self.opened[-1]

    def source(self, name: str = "x") -> Any:
        environment = Environment(address=str(self.host.address), token=TOKEN)
        self.opened.append(
            RemoteConsumer(environment, name) if self.is_far else LocalConsumer(self.host.segment.path, name)
        )
        return self.opened[-1]

    def batches(self, name: str = "x", **rest: Any) -> Batches:
        return Batches(name, self.source(name), **rest)

    def spawn(self, code: str) -> subprocess.Popen[str]:
        """A process that says a line when it has come to its point, and then waits to be killed."""
        env = {"MANIPLE_SEGMENT": str(self.host.segment.path)}
        if self.is_far:
            env = {"MANIPLE_ADDRESS": str(self.host.address), "MANIPLE_TOKEN": TOKEN}
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=os.environ | env,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        return process


class Alone:
    """A segment without a server."""

    def __init__(self, root: Path) -> None:
        (root / "run").mkdir()
        self.segment = Segment.create(root, "0123456789abcdef", root / "run")
        self.address = None

    def close(self) -> None:
        self.segment.remove()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=WAIT_S)


def for_seconds(seconds: float) -> Callable[[], bool]:
    """A `should_stop` for a loop that would not end otherwise."""
    deadline = time.monotonic() + seconds
    return lambda: time.monotonic() > deadline


def push(sink: Any, *arrays: Any) -> None:
    sink.put(FeedBatch.of(arrays))


def together(*acts: Callable[[], None]) -> None:
    """Do all at once, and raise what one of them raises."""
    errors: list[BaseException] = []

    def guarded(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(act,), daemon=True) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]
