"""The choice of the engine that carries a group: shared memory, torch.distributed, MPI, or none for a single worker."""

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from maniple.clock import Deadline
from maniple.collectives.deadline import start_deadline_s
from maniple.collectives.peer_to_peer import PeerLink, PeerToPeer
from maniple.contracts import Collectives
from maniple.environment import Environment
from maniple.errors import InvalidArgument, WaitedTooLong
from maniple.memory.segment import DEAD, LEFT, Segment
from maniple.memory.shm import shared_memory_full
from maniple.record.folder import write_once, write_whole
from maniple.settings.options import ENGINES

_POLL_S = 0.02
_RETURN_S = 30.0  # on a busy machine worker 0 may count as dead for this long, and yet return
_BY_LAUNCHER = {"torchrun": "torch", "srun": "torch", "mpirun": "mpi", "ray": "torch"}  # on several machines


def choose_engine(environment: Environment) -> str:
    """The requested engine, if it is possible here; else the one that fits: alone, shared, torch or mpi."""
    if environment.collectives is not None:
        _check(environment, environment.collectives)
        return environment.collectives
    if environment.address is not None and not environment.is_near and not environment.launcher:
        raise InvalidArgument(
            f"a worker that joins {environment.address} by itself cannot join the collectives of those that were "
            "started together, whose memory it does not share. Choose a rule of the center (easgd, asgd, downpour), or "
            "start all by `maniple run --hosts`."
        )
    if environment.world == 1 and not environment.is_near:
        return "alone"
    chosen = "shared" if _is_one_machine(environment) else _BY_LAUNCHER.get(environment.launcher, "torch")
    _check(environment, chosen)
    return chosen


def open_collectives(
    environment: Environment, name: str, folder: Path | None = None, *, on_wait: Callable[[], None] = lambda: None
) -> Collectives:
    """Open a group on the engine that `choose_engine` names, except for shared, which needs the segment.

    Args:
        folder: where workers find each other; it is torch then.
        on_wait: called at least twice a second while this worker waits for others; may raise to give up.
    """
    chosen, deadline_s = "torch" if folder else choose_engine(environment), environment.collectives_deadline_s
    if chosen == "torch":
        from maniple.collectives.torch_distributed import TorchCollectives

        opened = TorchCollectives.open(
            environment, name, deadline_s=deadline_s, deterministic=environment.deterministic, folder=folder
        )
        opened.check_while_waiting(on_wait)
        return opened
    if chosen == "mpi":
        from maniple.collectives.mpi import MpiCollectives

        opened = MpiCollectives.open(environment, name, deadline_s=deadline_s)
        opened.check_while_waiting(on_wait)
        return opened
    assert chosen == "alone"
    return SingleWorker()


class EngineOffer(msgspec.Struct, frozen=True):
    """What one worker says about the gradients that it brings to a group.

    Attributes:
        device: where they are, as torch names it.
        gpu: the unique name of that GPU; empty for gradients in host memory.
        obstacle: why NCCL cannot carry them; empty if it can.
    """

    device: str = "cpu"
    gpu: str = ""
    obstacle: str = ""


class EngineDecision(msgspec.Struct, frozen=True):
    """The engine for the gradients of all workers, and why it is not NCCL."""

    engine: str
    reason: str = ""


def decide_engine(offers: Sequence[EngineOffer | None], *, restarts: int = 0) -> EngineDecision:
    """NCCL if each worker has a separate GPU that NCCL can reach, else host memory.

    Args:
        offers: of all workers, by rank; None for a worker that is gone.
        restarts: how often a worker may be started again; NCCL cannot take it back.
    """
    owners: dict[str, int] = {}
    for rank, offer in enumerate(offers):
        if offer is None or offer.obstacle or not offer.gpu:
            why = "is gone" if offer is None else offer.obstacle or f"has its model on {offer.device}"
            return EngineDecision("shared", f"worker {rank} {why}")
        if (other := owners.setdefault(offer.gpu, rank)) != rank:
            reason = f"workers {other} and {rank} share one GPU ({offer.device}), which NCCL refuses"
            return EngineDecision("shared", reason)
    if restarts:
        reason = f"with --restarts {restarts} workers may come back, whom NCCL cannot take in"
        return EngineDecision("shared", reason)
    return EngineDecision("torch")


def agree_on_engine(
    environment: Environment,
    segment: Segment,
    name: str,
    offer: EngineOffer,
    *,
    restarts: Callable[[], int],
    on_wait: Callable[[], None],
) -> EngineDecision:
    """Agree with the workers of this machine on the engine of the group `name`, before opening it.

    Worker 0 decides once it has the offers of all, or another worker if it is gone.

    Args:
        restarts: how often a worker may be started again.
        on_wait: called while this worker waits for the others.
    """
    rank = environment.rank
    # All workers of an elastic launcher restart together, and decide again.
    mark = f"-{environment.restarts}" if environment.is_external and environment.restarts else ""
    path = segment.path / f"{name}.engine{mark}"
    offers = [segment.path / f"{name}.device{mark}-{one}" for one in range(environment.world)]
    try:
        write_whole(segment.path / f"{name}.device{mark}-{rank}", msgspec.json.encode(offer))
    except OSError as error:
        raise shared_memory_full(segment.path, error) from error
    if not offer.gpu:  # so it is host memory, whatever the others have
        decision = EngineDecision("shared", f"worker {rank} has its model on {offer.device}")
        if rank == 0:
            write_once(path, msgspec.json.encode(decision))
        return decision
    limit_s, seen_s = start_deadline_s(environment.collectives_deadline_s), 0.0
    deadline = Deadline(limit_s)
    while not path.exists():
        missing = [one for one, its in enumerate(offers) if not its.exists()]
        if rank == 0 and all(segment.state(one) in {LEFT, DEAD} for one in missing):
            found = [None if one in missing else _read_offer(its) for one, its in enumerate(offers)]
            write_once(path, msgspec.json.encode(decide_engine(found, restarts=restarts())))
            continue
        seen_s = seen_s if segment.state(0) in {LEFT, DEAD} else deadline.waited_s
        if rank and deadline.waited_s - seen_s > _RETURN_S:
            write_once(path, msgspec.json.encode(EngineDecision("shared", "worker 0 is gone")))
        if deadline.is_over():
            raise WaitedTooLong(
                f"worker {', '.join(map(str, missing if rank == 0 else [0]))} has not said within "
                f"{limit_s:g} s where its model is, and worker {rank} waits for that. Look "
                "at its log; raise --collectives-deadline if it starts slowly."
            )
        on_wait()
        time.sleep(_POLL_S)
    decision = msgspec.json.decode(path.read_bytes(), type=EngineDecision)
    if decision.engine == "torch" and rank >= environment.world:
        raise InvalidArgument(
            f"worker {rank} comes later than the {environment.world} that were started together, and their gradients "
            "travel over NCCL, which admits no newcomers. Start the run with --collectives shared, or with a rule of "
            "the center (easgd)."
        )
    return decision


def _read_offer(path: Path) -> EngineOffer:
    return msgspec.json.decode(path.read_bytes(), type=EngineOffer)


class SingleWorker(PeerToPeer):
    """The collectives of a single worker: all calls work, and nothing travels."""

    name = "alone"

    def __init__(self) -> None:
        super().__init__(PeerLink(0, 1, 1.0))


def _check(environment: Environment, engine: str) -> None:
    """Raise InvalidArgument for an engine that is impossible here."""
    if engine not in ENGINES:
        raise InvalidArgument(f"collectives={engine!r} is no engine. Use one of {', '.join(ENGINES)}.")
    world = environment.world
    if engine == "shared" and not _is_one_machine(environment):
        where = f"started by {environment.launcher}" if environment.launcher in _BY_LAUNCHER else "on several machines"
        raise InvalidArgument(
            f"collectives shared need the memory of one run on one machine, but these {world} workers are {where}. "
            f"Start them by `maniple run -n {world} SCRIPT` on one machine, or leave --collectives out."
        )
    if engine == "torch" and world > 1 and environment.master is None:
        raise InvalidArgument(
            f"collectives torch need an address where the {world} workers meet, but MASTER_ADDR and MASTER_PORT are "
            "not set. Start them by torchrun, srun or `maniple run --collectives torch`, or set both variables."
        )
    if engine == "mpi" and environment.launcher in {"", "maniple", "torchrun", "ray"} and world > 1:
        raise InvalidArgument(
            f"collectives mpi need workers that MPI has started, but these {world} were started by "
            f"{environment.launcher or 'a person'}. Start them by `mpirun -n {world} python SCRIPT`."
        )
    for name, module, package in (("torch", "torch", "PyTorch"), ("mpi", "mpi4py", "mpi4py")):
        if engine == name and importlib.util.find_spec(module) is None:
            raise InvalidArgument(
                f"collectives {name} need {package}, which is not installed: pip install 'maniple[{name}]'."
            )


def _is_one_machine(environment: Environment) -> bool:
    """Whether all workers of the run map the same memory; so does one that joins them here by hand."""
    return environment.is_near and (environment.local_world == environment.world or not environment.launcher)
