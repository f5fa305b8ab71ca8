"""The scene: one story for all who look at it, read every one or two seconds, and only while somebody looks."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

from maniple.errors import ManipleError
from maniple.launch.whereabouts import Whereabouts
from maniple.story import Story
from maniple.watch.subject import Subject

_EVERY_S = 1.2  # a little less than viewers look
_READING_S = 1.0  # of a long record, so much at a time
_HOST_EVERY_S = 5.0


class Scene:
    """The story of a run, and what is known of its host.

    Attributes:
        is_whole: all rows that there were have been read.
        host: where the host was when it was last looked for; `look_for_host` does so.
        described: what run.json says.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.is_whole = False
        self.host = Whereabouts("has not been looked for yet", is_alive=True)
        self.described: dict[str, Any] = {}
        self._written = 0  # when run.json was
        self._story = self._begin()
        self._lock = threading.Lock()
        self._next = self._host_due = self._looked = 0.0

    @contextmanager
    def story(self, *, is_last: bool = False) -> Generator[Story]:
        """The story as it was not much more than a second ago, or, if it is the last look, as it is now.

        Nobody else reads meanwhile, so be brief.
        """
        with self._lock:
            if is_last or time.monotonic() >= self._next:
                self._refresh()
                self._next = time.monotonic() + _EVERY_S * self.is_whole
            yield self._story

    @property
    def is_host_due(self) -> bool:
        """It is time to look for the host. A run that has ended has none, unless it begins again."""
        return time.monotonic() >= self._host_due

    def look_for_host(self) -> None:
        """Ask where the host is: this may take seconds, and is done outside of the story's lock."""
        self._host_due, looked = time.monotonic() + _HOST_EVERY_S, time.time()
        try:
            self.host = self.subject.where()
            self._looked = looked
        except (ManipleError, OSError, ValueError) as error:  # the folder is being written, or is gone
            self.host = Whereabouts(str(error))

    def _begin(self) -> Story:
        """The story of all workers that were asked for: of many, each has fewer points."""
        asked = self.subject.folder.read().get("asked", {})
        return Story(self.subject.folder, workers=int(asked.get("workers") or 0))

    def _refresh(self) -> None:
        try:
            self.subject.bring()
        except ManipleError as error:
            self.host = Whereabouts(str(error))
        self.is_whole = self._story.refresh(_READING_S)
        if self.is_whole and self.host.is_dead:
            self._story.lose_host(self._looked)
        with suppress(OSError, ValueError):  # there is none yet
            written = (self.subject.folder.path / "run.json").stat().st_mtime_ns
            if written != self._written:
                before, self.described, self._written = self.described, self.subject.folder.read(), written
                if before and before.get("lineage") != self.described.get("lineage"):
                    self._story = self._begin()  # at that address another run has begun
