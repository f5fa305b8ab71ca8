"""The doctor: checks for problems that would keep a run from working, with remedies."""

from maniple.doctor import hosts, machine, queues, remote_host, run_folder
from maniple.doctor.checks import (
    GRAVE,
    OK,
    WAIT_S,
    WARNING,
    Case,
    Check,
    Finding,
    SlurmCase,
    examine,
    glance,
)
from maniple.errors import InvalidArgument
from maniple.job import check_hosts
from maniple.queues.slurm import duration_s, size_mb

__all__ = [
    "CHECKS",
    "GRAVE",
    "OK",
    "WAIT_S",
    "WARNING",
    "Case",
    "Finding",
    "SlurmCase",
    "check_case",
    "chosen",
    "examine",
    "glance",
]

CHECKS = (
    *machine.checks,
    *run_folder.checks,
    *remote_host.checks,
    *queues.slurm_checks,
    *queues.ray_checks,
    *hosts.checks,
)


def check_case(case: Case) -> None:
    """Raise InvalidArgument if the options of a case are invalid."""
    if case.workers < 1 or not case.wait_s > 0 or case.model_mb < 0 or case.step_s < 0:
        raise InvalidArgument(
            f"-n {case.workers}, --timeout {case.wait_s:g}, --model-size {case.model_mb:g}, --step-time "
            f"{case.step_s:g} are out of range: they must be 1 worker or more, more than 0 seconds, and 0 or more. "
            "Write -n 2."
        )
    check_hosts(case.hosts)
    if case.script is not None and not case.script.is_file():
        raise InvalidArgument(f"there is no script {str(case.script)!r}. Check the path.")
    if case.slurm is not None:
        duration_s(case.slurm.walltime or "0")
        size_mb(case.slurm.memory or "0")
    if case.host is not None and case.run is None:
        if ":" not in case.host:
            raise InvalidArgument(
                f"{case.host!r} is neither a folder nor HOST:PORT. Check the path, or write node-07:29400."
            )
        remote_host.place_of(case)


def chosen(case: Case) -> list[Check]:
    """The checks for a case; those of this machine if it names nothing else."""
    wanted = {
        "run": case.run is not None,
        "host": case.host is not None and (case.run is None or run_folder.can_be_visited(case.run)),
        "slurm": case.slurm is not None,
        "ray": case.ray is not None,
        "hosts": bool(case.hosts),
    }
    kinds = {kind for kind, is_wanted in wanted.items() if is_wanted} or {"machine"}
    return [check for check in CHECKS if check.of in kinds]
