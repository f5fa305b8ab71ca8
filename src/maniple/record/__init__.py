"""The record of a run on disk: `folder` is the layout of the run folder, `events` are timestamped rows in it."""

from maniple.record.events import Events, Row, Tail, Tails, read_events
from maniple.record.folder import RunFolder

__all__ = ["Events", "Row", "RunFolder", "Tail", "Tails", "read_events"]
