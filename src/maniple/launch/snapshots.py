"""Snapshots in the course of a run, by a thread of their own, so that nothing waits for the disk."""

import threading
from collections.abc import Callable
from types import TracebackType

from maniple.host import Host


class Snapshots:
    """Writes a snapshot every so many seconds for the length of a `with` block; never, if that is 0.

    With `is_early`, the first is written as soon as there is a center: its machine may be taken away at any time.
    """

    def __init__(
        self, host: Host, every_s: float, on_failure: Callable[[Exception], None], *, is_early: bool = False
    ) -> None:
        self._host, self._every_s, self._on_failure, self._is_early = host, every_s, on_failure, is_early
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="maniple-snapshots", daemon=True)

    def __enter__(self) -> None:
        if self._every_s:
            self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._every_s:
            self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(min(1.0, self._every_s) if self._is_early else self._every_s):
            try:
                if self._host.save() is not None:
                    self._is_early = False
            except Exception as error:  # a full disk, or a worker that is stopped while it holds a parameter
                self._host.events.write("unsaved", error=str(error))
                self._on_failure(error)
