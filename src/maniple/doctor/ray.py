"""Ray: is there a cluster, and has it room for the workers?"""

from collections.abc import Iterable

from maniple.doctor.case import Case
from maniple.doctor.finding import Finding, fine, grave, warning
from maniple.doctor.libraries import ask_python
from maniple.errors import InvalidArgument
from maniple.launch.board import count
from maniple.launch.room import Room

_KINDS = ("CPU", "GPU")

# In a process of its own, which can be ended: Ray may wait for minutes for what is no cluster.
_NODES = """
import json, sys
from maniple.errors import ManipleError
from maniple.launch.ray import connected
from maniple.launch.room import Room
try:
    ray = connected(Room(sys.argv[1]))
except ManipleError as error:
    print(json.dumps(str(error)))
else:
    print(json.dumps([node["Resources"] for node in ray.nodes() if node["Alive"]]))
"""


def look_for_ray(case: Case) -> Iterable[Finding]:
    """The package, and a cluster of its version that answers."""
    nodes = case.once("ray", _nodes)
    if isinstance(nodes, str):
        raise InvalidArgument(nodes)
    yield fine(f"Ray answers: {count(len(nodes), 'node')}, {_sum(nodes, 'CPU'):g} CPUs, {_sum(nodes, 'GPU'):g} GPUs")


def look_at_resources(case: Case) -> Iterable[Finding]:
    """What each worker asks for, against what the nodes have."""
    nodes, room = case.once("ray", _nodes), _room(case)
    if isinstance(nodes, str):
        return
    want = f"{room.cpus:g} CPUs and {room.gpus:g} GPUs for each worker"
    fitting = room.places(nodes)
    if not fitting:
        most = " and ".join(f"{max((_of(node, what) for node in nodes), default=0):g} {what}s" for what in _KINDS)
        fix = "Ask for less by --cpus-per-worker or --gpus-per-worker, or add a node: `ray start --address`."
        yield grave(f"no node has {want}", limit=f"the largest have {most}", fix=fix)
    elif fitting < case.workers:
        fix = "Start fewer, ask for less by --cpus-per-worker, or add a node: `ray start --address`."
        yield warning(f"{want}: {fitting} fit at a time", limit=f"-n {case.workers}; the others would wait", fix=fix)
    else:
        yield fine(f"{want}: {fitting} fit at a time, if nobody else is there")


def _room(case: Case) -> Room:
    assert case.ray is not None
    return case.ray


def _nodes(case: Case) -> list[dict[str, float]] | str:
    """What each node has, or why that is not known."""
    return ask_python(_NODES, _room(case).address)


def _of(node: dict[str, float], what: str) -> float:
    return node.get(what, 0.0)


def _sum(nodes: list[dict[str, float]], what: str) -> float:
    return sum(_of(node, what) for node in nodes)
