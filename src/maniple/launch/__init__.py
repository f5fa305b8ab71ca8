"""The launchers: start workers, look after them, end them. `local` does so on this machine."""

from maniple.host.gate import Listen
from maniple.launch.job import Job
from maniple.launch.local import run_local

__all__ = ["Job", "Listen", "run_local"]
