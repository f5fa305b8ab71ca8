"""Cores and threads of each worker: an own share, near its GPU where the machine describes its topology.

The kernel allocates memory on the NUMA node of the core that first touches it, so binding cores also places memory.

This file imports only the standard library: `ssh_remote` loads it by path, without maniple.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

_GROUPS = "sys/fs/cgroup"
_GPUS = "proc/driver/nvidia/gpus"
_PCI = "sys/bus/pci/devices"


def split_cores(cores: list[int], workers: int) -> list[list[int]]:
    """Split cores evenly; if there are more workers than cores, each worker gets all of them."""
    if not 0 < workers <= len(cores):
        return [cores] * workers
    bounds = [len(cores) * i // workers for i in range(workers + 1)]
    return [cores[a:b] for a, b in itertools.pairwise(bounds)]


def divide_cores(
    cores: list[int], devices: Sequence[str | None], *, visible: str | None = None, root: Path = Path("/")
) -> list[list[int]]:
    """The cores of each worker, given the device of each.

    Workers whose GPUs are near the same cores split these; those whose device tells nothing split what is left over.
    `visible` is CUDA_VISIBLE_DEVICES, `root` holds /proc and /sys.
    """
    gpus = _visible(_gpus(root), visible)
    near = [tuple(sorted(_near(device, gpus, root) & set(cores))) for device in devices]
    taken = set(itertools.chain.from_iterable(near))
    rest = tuple(core for core in cores if core not in taken) or tuple(cores)
    pools = [pool or rest for pool in near]
    shares = {pool: iter(split_cores(list(pool), pools.count(pool))) for pool in set(pools)}
    return [next(shares[pool]) for pool in pools]


def threads_each(cores: int, workers: int, *, root: Path = Path("/")) -> int:
    """How many threads each worker may start: its share of the cores, or of the CPU time that control groups grant."""
    return max(1, int(min(cores, granted_cores(root) or cores)) // max(1, workers))


def granted_cores(root: Path = Path("/")) -> float | None:
    """The CPU time that the control groups of this process grant, in cores; None if there is no known limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    limits: list[float] = []
    for _, kinds, path in (line.split(":", 2) for line in lines if line.count(":") > 1):
        if not kinds or "cpu" in kinds.split(","):
            top = root / _GROUPS / ("cpu" if kinds else "")
            group = top / path.lstrip("/")
            limits += [_grant(one) for one in (group, *group.parents) if one.is_relative_to(top)]
    least = min(limits, default=math.inf)
    return None if least == math.inf else least


def _grant(group: Path) -> float:
    """The limit of one control group, version 2 or 1."""
    try:
        if (group / "cpu.max").exists():
            limit, period = (group / "cpu.max").read_text().split()
        else:
            limit, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return math.inf if limit in {"max", "-1"} else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def core_list(text: str) -> set[int]:
    """Parse the kernel's format for a set of cores: `0-3,8`."""
    parts = (part.partition("-") for part in text.strip().split(",") if part)
    return {core for first, _, last in parts for core in range(int(first), int(last or first) + 1)}


def _near(device: str | None, gpus: list[str], root: Path) -> set[int]:
    """The cores near a device; empty if it is no GPU or its location is unknown."""
    kind, _, number = (device or "").partition(":")
    if kind != "cuda" or not (number or "0").isdigit() or int(number or "0") >= len(gpus):
        return set()
    folder = root / _PCI / gpus[int(number or "0")]
    try:
        # -1 on a machine with one NUMA node, or if the firmware does not describe it.
        is_known = int((folder / "numa_node").read_text()) >= 0
        return core_list((folder / "local_cpulist").read_text()) if is_known else set()
    except (OSError, ValueError):
        return set()


def _gpus(root: Path) -> list[tuple[str, str]]:
    """PCI address and UUID of each GPU, in bus order."""
    found: list[tuple[str, str]] = []
    for path in sorted((root / _GPUS).glob("*/information")):
        try:
            lines = (line.partition(":") for line in path.read_text().splitlines())
        except OSError:
            continue
        fields = {name.strip(): value.strip() for name, _, value in lines}
        found.append((path.parent.name.lower(), fields.get("GPU UUID", "")))
    return found


def _visible(gpus: list[tuple[str, str]], visible: str | None) -> list[str]:
    """The PCI addresses in the order in which CUDA numbers them; empty if that cannot be determined."""
    if visible is None:
        return [address for address, _ in gpus]
    chosen: list[str] = []
    for word in filter(None, (word.strip() for word in visible.split(","))):
        known = [
            address for i, (address, uuid) in enumerate(gpus) if word == str(i) or (uuid and uuid.startswith(word))
        ]
        if len(known) != 1:
            return []
        chosen += known
    return chosen
