"""The record: what a run leaves on disk. `events` are timestamped rows, `folder` is where they and the rest lie."""

from maniple.record.events import Events, Row, Tail, Tails, read_events
from maniple.record.folder import Folder

__all__ = ["Events", "Folder", "Row", "Tail", "Tails", "read_events"]
