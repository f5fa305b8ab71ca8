"""The center: the parameters that all workers share. `shared` keeps it in memory that local workers map; `tcp` reaches
it from elsewhere, through `serving` at the host."""

from maniple.center.locks import ByteLocks
from maniple.center.segment import Segment, sweep
from maniple.center.shared import Shared

__all__ = ["ByteLocks", "Segment", "Shared", "sweep"]
