"""Which cores each worker gets: a share of its own, near its GPU where the machine tells where that is. And threads.

The kernel gives a process memory from the node of the core that first touches it, so that a worker whose cores are
near its GPU has its memory there too; nothing else need be bound.

It needs nothing but Python itself: at the far end of ssh it is loaded by its path, without maniple.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

_GROUPS = "sys/fs/cgroup"
_GPUS = "proc/driver/nvidia/gpus"
_PCI = "sys/bus/pci/devices"


def split_cores(cores: list[int], workers: int) -> list[list[int]]:
    """Cores of its own for each worker; all cores for everybody if there are more workers than cores."""
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
    """How many threads each worker may start: its share of the cores, or of the time that is granted on them."""
    return max(1, int(min(cores, granted_cores(root) or cores)) // max(1, workers))


def granted_cores(root: Path = Path("/")) -> float | None:
    """How many cores' time the control groups of this process grant; None: all, or nothing is known."""
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
    """The limit of one control group, of version 2 or 1 of the kernel's files."""
    try:
        if (group / "cpu.max").exists():
            limit, period = (group / "cpu.max").read_text().split()
        else:
            limit, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return math.inf if limit in {"max", "-1"} else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def core_list(text: str) -> set[int]:
    """The cores of a list in the kernel's words: `0-3,8`."""
    parts = (part.partition("-") for part in text.strip().split(",") if part)
    return {core for first, _, last in parts for core in range(int(first), int(last or first) + 1)}


def _near(device: str | None, gpus: list[str], root: Path) -> set[int]:
    """The cores near a device; none if it is no GPU, or nothing is known of it."""
    kind, _, number = (device or "").partition(":")
    if kind != "cuda" or not (number or "0").isdigit() or int(number or "0") >= len(gpus):
        return set()
    folder = root / _PCI / gpus[int(number or "0")]
    try:
        # A machine with one node, or firmware that tells nothing, says -1.
        is_known = int((folder / "numa_node").read_text()) >= 0
        return core_list((folder / "local_cpulist").read_text()) if is_known else set()
    except (OSError, ValueError):
        return set()


def _gpus(root: Path) -> list[tuple[str, str]]:
    """The address on the PCI bus and the UUID of each GPU, in the order of the bus."""
    found: list[tuple[str, str]] = []
    for path in sorted((root / _GPUS).glob("*/information")):
        try:
            lines = (line.partition(":") for line in path.read_text().splitlines())
        except OSError:
            continue
        told = {name.strip(): value.strip() for name, _, value in lines}
        found.append((path.parent.name.lower(), told.get("GPU UUID", "")))
    return found


def _visible(gpus: list[tuple[str, str]], visible: str | None) -> list[str]:
    """The addresses in the order in which CUDA numbers them; none where that cannot be told."""
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
