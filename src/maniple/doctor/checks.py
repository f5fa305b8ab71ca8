"""The list of all checks. docs/doctor.md explains each by its name."""

from maniple.doctor import host, hosts, libraries, machine, ray, run, slurm
from maniple.doctor.case import Case
from maniple.doctor.finding import Check
from maniple.doctor.visit import place_of
from maniple.errors import InvalidArgument
from maniple.launch.amounts import duration_s, size_mb
from maniple.launch.job import check_hosts

CHECKS = (
    Check("versions", "machine", libraries.look_at_versions),
    Check("memory", "machine", machine.look_at_memory, is_quick=True),
    Check("leftovers", "machine", machine.look_at_leftovers),
    Check("descriptors", "machine", machine.look_at_descriptors, is_quick=True),
    Check("cores", "machine", machine.look_at_cores, is_quick=True),
    Check("threads", "machine", machine.look_at_threads, is_quick=True),
    Check("binding", "machine", libraries.look_at_binding),
    Check("devices", "machine", libraries.look_at_devices),
    Check("disk", "machine", machine.look_at_disk, is_quick=True),
    Check("clock", "machine", machine.look_at_clock, is_quick=True),
    Check("name", "machine", machine.look_up_name, is_quick=True),
    Check("run folder", "run", run.look_at_folder),
    Check("host process", "run", run.look_at_life),
    Check("token file", "run", run.look_at_secret),
    Check("models", "run", run.look_at_models),
    Check("room", "run", run.look_at_room),
    Check("losses", "run", run.look_at_losses),
    Check("address", "host", host.look_up_host),
    Check("port", "host", host.look_at_port),
    Check("greeting", "host", host.look_at_greeting),
    Check("encryption", "host", host.look_at_encryption),
    Check("token", "host", host.look_at_token),
    Check("both versions", "host", host.compare_versions),
    Check("both clocks", "host", host.compare_clocks),
    Check("center", "host", host.look_at_centers),
    Check("way", "host", host.measure_way),
    Check("slurm", "slurm", slurm.look_for_slurm),
    Check("partition", "slurm", slurm.look_at_partition),
    Check("walltime", "slurm", slurm.look_at_time),
    Check("geometry", "slurm", slurm.look_at_geometry),
    Check("default memory", "slurm", slurm.look_at_memory_default),
    Check("shared folder", "slurm", slurm.look_at_sharing),
    Check("ray", "ray", ray.look_for_ray),
    Check("resources", "ray", ray.look_at_resources),
    Check("far ssh", "hosts", hosts.look_at_ssh),
    Check("far versions", "hosts", hosts.compare_installs),
    Check("far folder", "hosts", hosts.compare_folders),
    Check("way back", "hosts", hosts.look_back),
    Check("way there", "hosts", hosts.look_there),
    Check("far machine", "hosts", hosts.look_at_nodes),
)


def check_case(case: Case) -> None:
    """Raise InvalidArgument if what was given cannot be looked at."""
    if case.workers < 1 or not case.wait_s > 0 or case.model_mb < 0:
        raise InvalidArgument(
            f"-n {case.workers}, --timeout {case.wait_s:g}, --model-size {case.model_mb:g}: 1 worker or more, seconds "
            "above 0, and a size that is not below 0 can be looked at. Write -n 2."
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
                f"{case.host!r} is no folder, and no HOST:PORT. Check the path, or write node-07:29400."
            )
        place_of(case)


def chosen(case: Case) -> list[Check]:
    """The checks for what was asked; this machine's, if nothing else was."""
    asked = {
        "run": case.run is not None,
        "host": case.host is not None and (case.run is None or run.can_be_visited(case.run)),
        "slurm": case.slurm is not None,
        "ray": case.ray is not None,
        "hosts": bool(case.hosts),
    }
    kinds = {kind for kind, is_asked in asked.items() if is_asked} or {"machine"}
    return [check for check in CHECKS if check.of in kinds]
