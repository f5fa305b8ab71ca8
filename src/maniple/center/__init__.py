"""The center: the parameters that all workers share. `shared` keeps it in memory that local workers map; `tcp_client`
reaches it from other machines, through `tcp_server` at the host."""

from maniple.center.shared import SharedCenter
from maniple.memory.locks import ByteLocks
from maniple.memory.segment import Segment, sweep

__all__ = ["ByteLocks", "Segment", "SharedCenter", "sweep"]
