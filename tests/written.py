"""Run folders whose rows a test writes itself."""

import json
from pathlib import Path

from maniple.monitor import RunState
from maniple.record import RunFolder

T0 = 1_700_000_000.0


class Written:
    """A run folder whose rows a test writes itself, `at` seconds after the first."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        (path / "events").mkdir(parents=True)

    def row(self, who: int | str, event: str, at: float, **values) -> None:
        with self.folder.events(who).open("a") as file:
            file.write(json.dumps({"event": event, "timestamp": T0 + at, **values}, separators=(",", ":")) + "\n")

    def progress(self, who: int, at: float, **values) -> None:
        usual = {"step": 0, "samples": 0, "elapsed": at, "sync_share": 0.0, "exchange": 0.0, "data": 0.0, "others": 0.0}
        self.row(who, "progress", at, **usual | values)

    def divide(self, who: int | str, lines: int) -> None:
        """Let the rows stand in several files, of so many lines each, as those of a long run do."""
        first = self.folder.events(who)
        rows = first.read_text().splitlines(keepends=True)
        for number, at in enumerate(range(0, len(rows), lines)):
            path = first.with_name(f"{first.stem}_{number:06}.jsonl") if number else first
            path.write_text("".join(rows[at : at + lines]))

    def run_state(self) -> RunState:
        state = RunState(self.folder)
        assert state.refresh()
        return state
