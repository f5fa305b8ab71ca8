"""The doctor: looks for what would keep a run from working, and says what to do. `checks` lists all it looks at."""

from maniple.doctor.case import WAIT_S, Case, Slurm
from maniple.doctor.checks import CHECKS, check_case, chosen
from maniple.doctor.examining import examine, glance
from maniple.doctor.finding import GRAVE, OK, WARNING, Finding

__all__ = [
    "CHECKS",
    "GRAVE",
    "OK",
    "WAIT_S",
    "WARNING",
    "Case",
    "Finding",
    "Slurm",
    "check_case",
    "chosen",
    "examine",
    "glance",
]
