"""The center: the parameters that all workers share. `shared` keeps it in memory that local workers map."""

from maniple.center.locks import ByteLocks
from maniple.center.segment import Segment, sweep
from maniple.center.shared import Shared
from maniple.center.snapshot import save_snapshot

__all__ = ["ByteLocks", "Segment", "Shared", "save_snapshot", "sweep"]
