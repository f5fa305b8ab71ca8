"""The collectives of one worker: a group for the calls of its script, and one per synchronous model."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from maniple.adapters import Adapter
from maniple.collectives.engines import EngineOffer, agree_on_engine, choose_engine, open_collectives
from maniple.contracts import Collectives
from maniple.environment import Environment
from maniple.environment.variables import visible_gpus
from maniple.errors import InvalidArgument, say
from maniple.record import Events, RunFolder
from maniple.replica.context import TrainingContext
from maniple.rules import Rule

if TYPE_CHECKING:
    from maniple.worker.connection import HostConnection

_CALLS = "collectives-calls"


class CollectiveGroups:
    """Opens the groups of one worker, and connects them so that workers do not deadlock across groups."""

    def __init__(
        self, environment: Environment, connection: "HostConnection | None", events: Events, context: TrainingContext
    ) -> None:
        self._environment, self._connection, self._events, self._context = environment, connection, events, context
        self._opened: dict[str, Collectives] = {}
        self._is_reported = False

    @property
    def calls(self) -> Collectives:
        """The group of the script's own calls."""
        return self._opened.get(_CALLS) or self._open(_CALLS, choose_engine(self._environment))

    def open_for(self, name: str, model: Adapter, rule: Rule, *, obstacle: str = "") -> Collectives:
        """The group of a synchronous model. Gradients on GPUs of one machine are reduced over NCCL where possible.

        Values that are exchanged every few steps pass through host memory anyway.

        Args:
            obstacle: why NCCL cannot be used, if the caller knows one.
        """
        environment, engine = self._environment, choose_engine(self._environment)
        is_open = engine == "shared" and environment.collectives is None and environment.world > 1
        if not is_open or not rule.averages_gradients or rule.quorum:
            return self._open(name, engine)
        assert self._connection is not None and self._connection.segment is not None
        gpu, why = gpu_of(model.device)
        offer = EngineOffer(model.device, gpu, obstacle or why)
        decided = agree_on_engine(
            environment,
            self._connection.segment,
            name,
            offer,
            restarts=lambda: _restarts(environment),
            on_wait=self._on_wait,
        )
        if gpu and decided.reason and environment.rank == 0:
            say(f"gradients are reduced in host memory, not over NCCL: {decided.reason}")
        return self._open(name, decided.engine, self._connection.segment.path)

    def _open(self, name: str, engine: str, folder: Path | None = None) -> Collectives:
        environment, is_shared = self._environment, engine == "shared"
        if not self._is_reported:
            self._is_reported = True
            self._events.write("circle", engine=engine, world=environment.world)
            if environment.rank == 0 and environment.world > 1:
                why = f" ({environment.launcher})" if environment.launcher else ""
                say(f"{environment.world} workers use {engine} collectives{why}")
        collectives = self._open_shared(name) if is_shared else self._open_fixed(name, folder)
        self._opened[name] = collectives
        collectives.report_long_waits(self._report_wait)
        return collectives

    @property
    def is_used(self) -> bool:
        """This worker has made a collective call or shares a synchronous model."""
        return bool(self._opened)

    def _report_wait(self, whom: Sequence[int], waited_s: float, is_over: bool) -> None:
        self._events.write("waited" if is_over else "waiting", **{"for": list(whom), "seconds": waited_s})

    def close(self) -> None:
        """Leave all groups."""
        for collectives in self._opened.values():
            collectives.close()

    def _on_wait(self) -> None:
        """Called while this worker waits for others, who continue without it if a signal ends the wait."""
        self._context.exit_if_signalled()
        self._context.exit_if_overdue()

    def _open_fixed(self, name: str, folder: Path | None) -> Collectives:
        """A group whose others cannot continue without this worker: a signal does not end a wait at once."""
        return open_collectives(self._environment, name, folder, on_wait=self._context.exit_if_overdue)

    def _open_shared(self, name: str) -> Collectives:
        from maniple.collectives.shared_memory import SharedMemoryCollectives

        assert self._connection is not None and self._connection.segment is not None
        environment, is_script = self._environment, name == _CALLS
        collectives = SharedMemoryCollectives(
            self._connection.segment,
            name,
            rank=environment.rank,
            world=environment.world,
            deadline_s=environment.collectives_deadline_s,
            admit_after_calls=is_script,
            # A worker that waits for this one in a call of the script must be noticed from the start.
            calls=None if is_script else self.calls.elastic,
            on_wait=self._on_wait,
        )
        collectives.reserve(1)  # small values can be sent even if /dev/shm is full by then
        return collectives


def _restarts(environment: Environment) -> int:
    """How often the launcher may restart a worker, from the run folder."""
    with suppress(OSError, InvalidArgument):
        asked = RunFolder(environment.run).read().get("asked") if environment.run is not None else None
        return int((asked or {}).get("restarts") or 0)
    return 0


def gpu_of(device: str) -> tuple[str, str]:
    """A name of a GPU that is unique on this machine, and why NCCL cannot use it; both may be empty."""
    torch = sys.modules.get("torch")
    if torch is None or not device.startswith("cuda"):
        return "", ""
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    # By its UUID: with CUDA_VISIBLE_DEVICES each worker may call another GPU cuda:0.
    name = str(getattr(torch.cuda.get_device_properties(device), "uuid", "")) or f"{visible_gpus()} {device}"
    return name, "" if has_nccl else "has a torch that was built without NCCL"
