"""Room on a Ray cluster."""

from dataclasses import dataclass

from maniple.errors import InvalidArgument


@dataclass(frozen=True)
class Room:
    """Where it is, and what each worker takes of it."""

    address: str = "auto"
    cpus: float = 1
    gpus: float = 0

    def __post_init__(self) -> None:
        if self.cpus < 0 or self.gpus < 0 or self.cpus + self.gpus == 0:
            raise InvalidArgument(
                f"a worker with {self.cpus:g} CPUs and {self.gpus:g} GPUs cannot be placed. Ask for 1 of them, or more."
            )

    def places(self, nodes: list[dict[str, float]]) -> int:
        """How many workers machines with such resources hold at a time."""
        asked = {name: count for name, count in {"CPU": self.cpus, "GPU": self.gpus}.items() if count}
        return sum(min(int(node.get(name, 0) / count) for name, count in asked.items()) for node in nodes)
