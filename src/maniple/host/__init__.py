"""The host: owns a run's center, its shared memory and its folder. `server` is its network side, its own process."""

from maniple.host.host import Host

__all__ = ["Host"]
