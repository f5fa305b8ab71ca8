"""The host of a run: owns its centers, shared memory and folder. `server` is its network side, in its own process."""

from maniple.host.host import Host

__all__ = ["Host"]
