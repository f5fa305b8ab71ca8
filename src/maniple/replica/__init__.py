"""A worker's copy of a model, and the ways in which workers share their copies."""

from maniple.replica.replica import Replica
from maniple.replica.sharing import Sharing, sharing_for

__all__ = ["Replica", "Sharing", "sharing_for"]
