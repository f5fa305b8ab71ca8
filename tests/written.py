"""Run folders whose rows a test writes itself."""

import json
from pathlib import Path

from maniple.record import Folder
from maniple.story import Story

T0 = 1_700_000_000.0


class Written:
    """A run folder whose rows a test writes itself, `at` seconds after the first."""

    def __init__(self, path: Path) -> None:
        self.folder = Folder(path)
        (path / "events").mkdir(parents=True)

    def row(self, who: int | str, event: str, at: float, **values) -> None:
        with self.folder.events(who).open("a") as file:
            file.write(json.dumps({"event": event, "timestamp": T0 + at, **values}, separators=(",", ":")) + "\n")

    def progress(self, who: int, at: float, **values) -> None:
        usual = {"step": 0, "samples": 0, "elapsed": at, "sync_share": 0.0, "exchange": 0.0, "data": 0.0, "others": 0.0}
        self.row(who, "progress", at, **usual | values)

    def story(self) -> Story:
        story = Story(self.folder)
        assert story.refresh()
        return story
