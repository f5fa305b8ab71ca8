"""Checks of Slurm (20.11 to 23) and Ray: are they there, and do they have the resources that workers need?"""

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from maniple.doctor.checks import Case, Checks, Finding, SlurmCase, fine, grave, warning
from maniple.doctor.machine import ask_python
from maniple.errors import InvalidArgument
from maniple.queues.slurm import duration_s, size_mb
from maniple.text import count

slurm_checks, ray_checks = Checks("slurm"), Checks("ray")
_COMMANDS = ("sbatch", "squeue", "scancel", "sinfo", "scontrol")
_FORMAT = "%P|%a|%l|%N|%c|%m|%G|%T"
_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/scratch/local")


@dataclass(frozen=True)
class Node:
    """One node as a member of one partition, as `sinfo` tells."""

    partition: str
    is_default: bool
    is_up: bool
    limit_s: float
    name: str
    cpus: int
    memory_mb: int
    gpus: int
    state: str

    @property
    def is_usable(self) -> bool:
        """It takes jobs, now or when others have ended."""
        return not re.match("down|drain|drng|fail|maint|unk|power|boot|planned_down|inval", self.state)


@slurm_checks("slurm")
def check_slurm(case: Case) -> Iterable[Finding]:
    """The commands, and a controller that answers them."""
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if missing:
        fix = "Go to a login node of the cluster, or load its module (`module load slurm`)."
        yield grave(f"there is no {', '.join(missing)} in PATH", limit="--slurm needs them", fix=fix)
        return
    nodes = case.once("nodes", _nodes)
    if isinstance(nodes, str):
        fix = "Try `scontrol ping`; SLURM_CONF or munge may be set wrongly, or the controller is down."
        yield grave(f"sinfo fails: {nodes}", limit=f"limit {case.wait_s:g} s", fix=fix)
    else:
        names = sorted({node.partition for node in nodes})
        yield fine(f"Slurm answers: {len({node.name for node in nodes})} nodes in partitions {', '.join(names)}")


@slurm_checks("partition")
def check_partition(case: Case) -> Iterable[Finding]:
    """The partition: there, and up."""
    found = case.once("nodes", _nodes)
    if isinstance(found, str):
        return
    asked, nodes = _asked(case), _chosen(case)
    names = ", ".join(sorted({node.partition for node in found}))
    if not nodes and asked.partition:
        fix = "Write one of these as --partition."
        yield grave(f"there is no partition {asked.partition}", limit=f"there are: {names}", fix=fix)
    elif not nodes:
        fix = "Choose one by --partition."
        yield grave("no partition is the default one", limit=f"there are: {names}", fix=fix)
    elif not nodes[0].is_up:
        fix = "Choose another one, or ask the administrator; jobs would wait."
        yield grave(f"partition {nodes[0].partition} is not up", limit=f"there are: {names}", fix=fix)
    else:
        usable = sum(node.is_usable for node in nodes)
        yield fine(f"partition {nodes[0].partition} has {usable} of {len(nodes)} nodes that take jobs")


@slurm_checks("walltime")
def check_walltime(case: Case) -> Iterable[Finding]:
    """The walltime against the partition's limit."""
    asked, nodes = _asked(case), _chosen(case)
    if not nodes:
        return
    limit_s = max(node.limit_s for node in nodes)
    name = nodes[0].partition
    if asked.walltime is None:
        yield fine(f"partition {name} lets a job run for {_said(limit_s)}")
    elif duration_s(asked.walltime) > limit_s:
        fix = f"Write --walltime {_said(limit_s)} or less, or take another partition by --partition."
        limit = f"partition {name} allows {_said(limit_s)}"
        yield grave(f"--walltime {asked.walltime} is too long", limit=limit, fix=fix)
    else:
        yield fine(f"--walltime {asked.walltime} is within the {_said(limit_s)} of partition {name}")


@slurm_checks("geometry")
def check_geometry(case: Case) -> Iterable[Finding]:
    """Cores, GPUs and memory of one worker against those of a node."""
    asked, nodes = _asked(case), _chosen(case)
    if not nodes:
        return
    memory_mb = 0 if asked.memory is None else size_mb(asked.memory)
    fitting = [n for n in nodes if n.cpus >= asked.cpus and n.gpus >= asked.gpus and n.memory_mb >= memory_mb]
    usable = [node for node in fitting if node.is_usable]
    want = f"{_things(asked.cpus, asked.gpus)} and {memory_mb or 'any'} MB for each worker"
    most = f"{_things(max(n.cpus for n in nodes), max(n.gpus for n in nodes))}, {max(n.memory_mb for n in nodes)} MB"
    where = f"the largest node of partition {nodes[0].partition} has {most}"
    if not fitting:
        fix = "Ask for less by --cpus-per-worker, --gpus-per-worker or --mem, or take another partition."
        yield grave(f"no node has {want}", limit=where, fix=fix)
    elif not usable:
        states = ", ".join(sorted({f"{node.name} {node.state}" for node in fitting})[:4])
        fix = "Wait, or take another partition; `sinfo -R` tells why."
        yield warning(f"no node that has {want} takes jobs now", limit=states, fix=fix)
    else:
        at_once = sum(_fit(node, asked, memory_mb) for node in usable)
        yield fine(f"{want}: {count(at_once, 'worker')} fit on {count(len(usable), 'node')} that take jobs; {where}")


@slurm_checks("default memory")
def check_default_memory(case: Case) -> Iterable[Finding]:
    """The memory that a job gets if it asks for none."""
    asked, nodes = _asked(case), _chosen(case)
    if not nodes or asked.memory is not None:
        return
    try:
        told = _called(case, "scontrol", "show", "partition", nodes[0].partition)
    except OSError as error:
        fix = f"Try `scontrol show partition {nodes[0].partition}`, or say --mem."
        yield warning(f"scontrol fails: {error}", limit=f"limit {case.wait_s:g} s", fix=fix)
        return
    per_cpu, per_node = (re.search(rf"\bDefMemPer{what}=(\d+)", told) for what in ("CPU", "Node"))
    if per_cpu is None and per_node is None:
        yield fine("no default of memory is set for the partition; --mem says what a worker needs")
        return
    default = asked.cpus * int(per_cpu[1]) if per_cpu else int(per_node[1]) if per_node else 0
    if default < max(1024, 4 * case.model_mb):
        fix = "Say --mem 4G, or what your script takes alone: Slurm kills what takes more, without a word to it."
        limit = "torch alone takes about 1,000 MB"
        yield warning(f"a worker gets {default} MB of memory if --mem is not given", limit=limit, fix=fix)
    else:
        yield fine(f"a worker gets {default} MB of memory by default")


@slurm_checks("shared folder")
def check_shared_folder(case: Case) -> Iterable[Finding]:
    """Whether the run folder can be seen by the nodes."""
    folder = case.runs.resolve()
    local = next((environment for environment in _LOCAL if folder.is_relative_to(environment)), None)
    if local is not None:
        fix = "Choose a folder of the shared file system by --runs: your home or the project's space."
        yield warning(f"runs would be written to {folder}", limit=f"{local} is each node's own, as a rule", fix=fix)
    else:
        yield fine(f"runs are written to {folder}, which must be the same on all nodes")


def _things(cpus: int, gpus: int) -> str:
    return f"{count(cpus, 'core')}, {count(gpus, 'GPU')}"


def _asked(case: Case) -> SlurmCase:
    return case.slurm or SlurmCase()


def _chosen(case: Case) -> list[Node]:
    """The nodes of the partition in question."""
    nodes, name = case.once("nodes", _nodes), _asked(case).partition
    if isinstance(nodes, str):
        return []
    return [node for node in nodes if (node.is_default if name is None else node.partition == name)]


def _fit(node: Node, asked: SlurmCase, memory_mb: int) -> int:
    """How many workers a node can hold."""
    needs = ((node.cpus, asked.cpus), (node.gpus, asked.gpus), (node.memory_mb, memory_mb))
    return min(there // each for there, each in needs if each)


def _nodes(case: Case) -> list[Node] | str:
    """All nodes in all partitions, or why they are not known."""
    try:
        return parse_nodes(_called(case, "sinfo", "-h", "-N", "-o", _FORMAT))
    except (OSError, ValueError) as error:
        return str(error)


def _called(case: Case, *command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=case.wait_s, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command[0]} has not answered within {case.wait_s:g} s") from None
    if done.returncode:
        raise OSError((done.stderr or done.stdout).strip() or f"exit code {done.returncode}")
    return done.stdout


def parse_nodes(text: str) -> list[Node]:
    """The rows of sinfo."""
    found: list[Node] = []
    for line in filter(None, text.splitlines()):
        partition, available, limit, name, cpus, memory, gres, state = line.split("|")
        gpus = sum(int(count) for count in re.findall(r"\bgpu:(?:[^:,(]+:)?(\d+)", gres))
        node = Node(
            partition.rstrip("*"), partition.endswith("*"), available == "up", duration_s(limit), name,
            int(cpus.rstrip("+")), int(memory.rstrip("+")), gpus, state.rstrip("*~#!%$@^-"),
        )  # fmt: skip
        found.append(node)
    return found


def _said(seconds: float) -> str:
    if seconds == float("inf"):
        return "any time"
    days, rest = divmod(int(seconds), 86_400)
    clock = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


# In a subprocess, which can be killed: Ray may wait for minutes where there is no cluster.
_NODES = """
import json, sys
from maniple.errors import ManipleError
from maniple.launch.remote_workers import connected
from maniple.job import RayResources
try:
    ray = connected(RayResources(sys.argv[1]))
except ManipleError as error:
    print(json.dumps(str(error)))
else:
    print(json.dumps([node["Resources"] for node in ray.nodes() if node["Alive"]]))
"""


@ray_checks("ray")
def check_ray(case: Case) -> Iterable[Finding]:
    """The package, and a cluster of its version that answers."""
    nodes = case.once("ray", _ray_nodes)
    if isinstance(nodes, str):
        raise InvalidArgument(nodes)
    cpus, gpus = (sum(node.get(what, 0.0) for node in nodes) for what in ("CPU", "GPU"))
    yield fine(f"Ray answers: {count(len(nodes), 'node')}, {cpus:g} CPUs, {gpus:g} GPUs")


@ray_checks("resources")
def check_resources(case: Case) -> Iterable[Finding]:
    """What each worker asks for, against what the nodes have."""
    nodes, room = case.once("ray", _ray_nodes), case.ray
    if isinstance(nodes, str) or room is None:
        return
    want = f"{room.cpus:g} CPUs and {room.gpus:g} GPUs for each worker"
    fitting = room.places(nodes)
    if not fitting:
        cpus, gpus = (max((node.get(what, 0.0) for node in nodes), default=0.0) for what in ("CPU", "GPU"))
        fix = "Ask for less by --cpus-per-worker or --gpus-per-worker, or add a node: `ray start --address`."
        yield grave(f"no node has {want}", limit=f"the largest have {cpus:g} CPUs and {gpus:g} GPUs", fix=fix)
    elif fitting < case.workers:
        fix = "Start fewer, ask for less by --cpus-per-worker, or add a node: `ray start --address`."
        yield warning(f"{want}: {fitting} fit at a time", limit=f"-n {case.workers}; the others would wait", fix=fix)
    else:
        yield fine(f"{want}: {fitting} fit at a time, if the cluster is idle")


def _ray_nodes(case: Case) -> list[dict[str, float]] | str:
    """What each node has, or why that is not known."""
    assert case.ray is not None
    return ask_python(_NODES, case.ray.address)
