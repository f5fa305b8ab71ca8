"""Which cores each worker gets: a share of its own, near its GPU where the machine tells where that is.

The kernel gives a process memory from the node of the core that first touches it, so that a worker whose cores are
near its GPU has its memory there too; nothing else need be bound.

It needs nothing but Python itself: at the far end of ssh it is loaded by its path, without maniple.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

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
