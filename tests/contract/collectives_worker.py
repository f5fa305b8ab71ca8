"""One rank of the collectives under test: makes all calls of the list, and records their results.

python collectives_worker.py ENGINE FOLDER
"""

import json
import os
import re
import signal
import sys
import zlib
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from maniple.center import Segment
from maniple.collectives.api import CollectiveCalls
from maniple.collectives.call import nonfinite_weight
from maniple.contracts import Collectives
from maniple.environment import Environment, read_environment
from maniple.errors import ManipleError
from tests.contract.collectives_cases import Case, cases


def open_collectives(engine: str, environment: Environment, name: str, *, deadline_s: float = 60.0) -> Collectives:
    """The collectives under test."""
    if engine == "shared":
        from maniple.collectives.shared_memory import SharedMemoryCollectives

        assert environment.segment is not None
        segment = Segment(environment.segment)
        return SharedMemoryCollectives(
            segment, name, rank=environment.rank, world=environment.world, deadline_s=deadline_s
        )
    if engine == "torch":
        from maniple.collectives.torch_distributed import TorchCollectives

        return TorchCollectives.open(environment, name, deadline_s=deadline_s)
    if engine == "mpi":
        from maniple.collectives.mpi import MpiCollectives

        return MpiCollectives.open(environment, name, deadline_s=deadline_s)
    raise AssertionError(f"no engine {engine}")


def make(collectives: Collectives, case: Case) -> list[np.ndarray]:
    """What this rank gets of one case."""
    rank, world = collectives.rank, len(collectives.ranks)
    x, root, weight = case.values(rank), case.root(world), case.weight(rank)
    before = x.copy()
    if case.kind == "all_reduce":
        out = np.full_like(x, 7)
        collectives.all_reduce(x, out, case.op, weight=weight, wire=case.wire)
        assert x.tobytes() == before.tobytes(), "x stays as it is"
        done = collectives.all_reduce(x, x, case.op, weight=weight, wire=case.wire)
        assert done.ranks == tuple(r for r in collectives.ranks if case.op != "mean" or case.weight(r))
        return [out, x if done.weight else out, np.array(done.weight)]
    if case.kind == "reduce":
        out = np.full_like(x, 7) if rank == root else None
        done = collectives.reduce(x, out, case.op, root=root, weight=weight, wire=case.wire)
        assert x.tobytes() == before.tobytes(), "x stays as it is"
        return [np.array(done.weight)] + ([out] if out is not None else [])
    if case.kind == "broadcast":
        collectives.broadcast(x, root=root, wire=case.wire)
        return [x]
    if case.kind == "gather":
        return collectives.gather(x, root=root, wire=case.wire) or []
    if case.kind == "all_gather":
        return collectives.all_gather(x, wire=case.wire)
    if case.kind == "scatter":
        parts = [case.values(r) for r in range(world)] if rank == root else None
        return [collectives.scatter(parts, root=root, dtype=case.dtype, wire=case.wire)]
    if case.kind == "exchange_pairs":
        received = collectives.exchange_pairs(x, case.partner(rank, world), wire=case.wire)
        assert x.tobytes() == before.tobytes(), "x stays as it is"
        return [] if received is None else [received]
    resident = collectives.reside({"float32": case.size, "float64": 3}, wire=case.wire)
    results = []
    for number in range(3):
        resident.flat["float32"][:] = x * (number + 1)
        resident.flat["float64"][:] = rank
        done = resident.all_reduce(case.op, weight=weight)
        results += [resident.flat["float32"].copy(), resident.flat["float64"].copy(), np.array(done.weight)]
    return results


def mismatches(collectives: Collectives) -> dict[str, str]:
    """Calls that do not match: the error of each, and that the collectives continue after it."""
    is_odd = collectives.rank == len(collectives.ranks) - 1
    x = np.ones(5, np.float32)
    wrong = {
        "kind": lambda: collectives.barrier() if is_odd else collectives.all_gather(x),
        "dtype": lambda: collectives.all_gather(x.astype(np.float64) if is_odd else x),
        "size": lambda: collectives.all_reduce(
            x[:3].copy() if is_odd else x, x[:3].copy() if is_odd else x.copy(), "sum"
        ),
        "op": lambda: collectives.all_reduce(x, x.copy(), "max" if is_odd else "min"),
        "root": lambda: collectives.broadcast(x, root=1 if is_odd else 0),
        "reside": lambda: collectives.reside({"float32": 5 + is_odd}).all_reduce("sum"),
        "resident": lambda: collectives.reside({"float32": 5}).all_reduce("max" if is_odd else "min"),
    }
    said = {}
    for name, act in wrong.items():
        try:
            act()
            said[name] = "nothing"
        except ManipleError as error:
            said[name] = f"{type(error).__name__}: {error}"
        again = np.empty_like(x)
        collectives.all_reduce(x, again, "sum")
        assert again.tolist() == [len(collectives.ranks)] * 5
    return said


def one_sided_pair(collectives: Collectives) -> str:
    """Worker 0 names worker 1, who has no partner; the collectives continue after it."""
    try:
        collectives.exchange_pairs(np.ones(3), 1 if collectives.rank == 0 else collectives.rank)
    except ManipleError as error:
        collectives.barrier()
        return f"{type(error).__name__}: {error}"
    return "nothing"


def left_out(collectives: Collectives) -> dict[str, object]:
    """Rounds in which the last rank's values are not finite, in entry 7, and then those of all ranks."""
    last = len(collectives.ranks) - 1
    residents = {wire: collectives.reside({"float32": 5}, wire=wire) for wire in ("float32", "bfloat16")}
    if collectives.name == "torch":
        from maniple.collectives.torch_distributed import DeviceVectors

        parts = [("float32", 3, 5), ("float32", 0, 3)]
        residents["parts"] = collectives.reside_in_parts({"float32": 5}, parts)
        residents["device"] = DeviceVectors(collectives, {"float32": 5}, "float32", "cpu", is_ordered=False)
        residents["parts on the device"] = DeviceVectors(
            collectives, {"float32": 5}, "float32", "cpu", is_ordered=False, parts=parts
        )
    found: dict[str, object] = {}
    for name, resident in residents.items():
        for bad in ({last}, set(collectives.ranks)):
            is_bad = collectives.rank in bad
            resident.flat["float32"][:] = np.nan if is_bad else collectives.rank
            done = resident.all_reduce("mean", weight=nonfinite_weight(7) if is_bad else 1.0)
            values = [float(x) for x in resident.flat["float32"]]
            found[f"{name} {len(bad)}"] = [sorted(done.nonfinite.items()), done.weight, values]
    return found


def compressed(collectives: Collectives) -> dict[str, object]:
    """Rounds by the codecs that keep errors: checksums of the results, and how far their sum is off."""
    size, world = 50_000, len(collectives.ranks)
    found: dict[str, object] = {}
    link, messages = getattr(collectives, "_link", None), list[int]()
    if link is not None:
        usual = link.begin_send

        def counted(peer: int, data: np.ndarray, tag: int) -> object:
            messages.append(data.nbytes)
            return usual(peer, data, tag)

        link.begin_send = counted
    for wire in ("int8", "int4", "topk"):
        resident = collectives.reside({"float32": size}, wire=wire)
        checksums, arrived, expected, sent = list[int](), np.zeros(size), np.zeros(size), list[list[int]]()
        for number in range(10):
            values = [np.random.default_rng([number, rank]).standard_normal(size) for rank in range(world)]
            resident.flat["float32"][:] = values[collectives.rank]
            messages.clear()
            sent.append([resident.all_reduce("mean").size_bytes, sum(messages)])
            checksums.append(zlib.crc32(resident.flat["float32"].tobytes()))
            arrived += resident.flat["float32"]
            expected += sum(values) / world
        distance = np.linalg.norm(arrived - expected) / np.linalg.norm(expected)
        found[wire] = [checksums, float(distance), sent]
    return found


def two_at_once(engine: str, environment: Environment, first: Collectives) -> list[int]:
    """Two groups of one process, called alternately and in different ways."""
    second = open_collectives(engine, environment, f"second-{environment.world}")
    seen = []
    for number in range(5):
        a, b = np.array([number]), np.array([100 * number, 1])
        first.all_reduce(a, a, "sum")
        second.all_reduce(b, b, "sum")
        seen += [int(a[0]), int(b[0])]
    second.close()
    return seen


def user_calls(collectives: Collectives) -> dict[str, object]:
    """What a user's calls give, with the types that go in."""
    calls, rank = CollectiveCalls(collectives), collectives.rank
    said: dict[str, object] = {
        "number": calls.all_reduce(rank + 1.0, "sum"),
        "mean of whole numbers": calls.all_reduce(rank),
        "strides": calls.all_reduce(np.arange(12.0).reshape(3, 4).T[::2], "sum").tolist(),
        "weighted": calls.all_reduce(np.array(float(rank)), weight=rank).tolist(),
        "gathered": [one.tolist() for one in calls.all_gather(np.full((rank, 2), rank))],
        "gathered by one": None if (got := calls.gather(rank, root=0)) is None else got,
        "scattered": calls.scatter(np.arange(10).reshape(5, 2) if rank == 0 else None).tolist(),
        "scattered list": calls.scatter(
            [np.full(r, r, "f4") for r in collectives.ranks] if rank == 0 else None
        ).tolist(),
        "broadcast": calls.broadcast(np.full((2, 1), rank), root=len(collectives.ranks) - 1).tolist(),
        "reduced": calls.reduce(np.array([rank]), "max", root=0),
    }
    said["reduced"] = None if said["reduced"] is None else said["reduced"].tolist()
    calls.barrier()
    if collectives.name == "torch":
        said |= tensor_calls(calls, collectives)
    return said


def tensor_calls(calls: CollectiveCalls, collectives: Collectives) -> dict[str, object]:
    import torch

    rank, world = collectives.rank, len(collectives.ranks)
    half = torch.full((2, 3), rank + 1.0, dtype=torch.bfloat16)
    same = calls.all_reduce(half, "sum", out=half)
    x = torch.full((3,), float(rank), requires_grad=True)
    y = calls.all_reduce(x, "mean", weight=rank + 1.0)
    (y * (rank + 1)).sum().backward()
    from maniple.collectives.torch_distributed import DeviceVectors

    found = {}
    for name, wire, is_ordered, op in (
        ("own", "float32", False, "mean"),
        ("ordered", "float32", True, "sum"),
        ("half", "bfloat16", False, "mean"),
        ("max", "float16", False, "max"),
    ):
        resident = DeviceVectors(collectives, {"float32": 7}, wire, "cpu", is_ordered=is_ordered)
        resident.flat["float32"].copy_(torch.arange(7) + rank)
        done = resident.all_reduce(op, weight=float(rank))
        found[name] = [done.weight, *resident.flat["float32"].tolist()]
    parts = [("float32", 4, 7), ("float32", 0, 4)]
    for name, resident in (
        (
            "parts on the device",
            DeviceVectors(collectives, {"float32": 7}, "float32", "cpu", is_ordered=False, parts=parts),
        ),
        ("parts", collectives.reside_in_parts({"float32": 7}, parts)),
    ):
        flat = torch.as_tensor(resident.flat["float32"])
        for number in range(3):
            flat[4:] = torch.arange(4, 7) + rank
            if (rank + number) % 2:  # some workers send a part early, others all at the end
                resident.begin("mean", weight=float(rank))
            flat[:4] = torch.arange(4) + rank
            done = resident.all_reduce("mean", weight=float(rank))
        found[name] = [done.weight, *flat.tolist()]
    return {
        "bfloat16": [str(same.dtype), same is half, same.float().tolist()],
        "detached": calls.all_reduce(x, "max").requires_grad,
        "graph": [y.tolist(), x.grad.tolist()],
        "tensor scatter": str(calls.scatter(torch.arange(world, dtype=torch.bfloat16) if rank == 0 else None)),
        "device": found,
    }


def die_or_hang(collectives: Collectives, how: str) -> None:
    """Rounds until the last rank dies or hangs."""
    resident = collectives.reside({"float32": 1000})
    for number in range(100_000):
        resident.flat["float32"][:] = 1
        resident.all_reduce("sum")
        if number == 20 and collectives.rank == len(collectives.ranks) - 1:
            print(f"rank {collectives.rank} goes", flush=True)
            if how == "raise":
                raise RuntimeError("an error of the script")
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    raise AssertionError("nobody has noticed")


def look(engine: str, environment: Environment, folder: Path) -> None:
    """Make all calls in a world of this size, and write down what came of them."""
    collectives = open_collectives(engine, environment, f"first-{environment.world}")
    results = {
        f"{i}.{j}": one
        for i, case in enumerate(cases(environment.world))
        for j, one in enumerate(make(collectives, case))
    }
    said = {
        "mismatches": mismatches(collectives) if environment.world > 1 else {},
        "one-sided": one_sided_pair(collectives) if environment.world > 1 else "",
        "calls": user_calls(collectives),
        "two": two_at_once(engine, environment, collectives),
        "left out": left_out(collectives),
        "compressed": compressed(collectives),
        "name": collectives.name,
    }
    collectives.close()
    np.savez(folder / f"{environment.world}-{environment.rank}.npz", **results)
    (folder / f"{environment.world}-{environment.rank}.json").write_text(json.dumps(said))


def main() -> None:
    engine, folder, how = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    environment = read_environment()
    if how == "look":
        # Torch and numba take their time to be imported: where the engine is not what the launcher has started as a
        # whole, the first ranks of the largest world are also those of the smaller ones.
        worlds = [environment.world] if engine == "mpi" else range(1, 5)
        for world in worlds:
            if environment.rank < world:
                look(engine, environment.replace(world=world), folder)
        return
    collectives = open_collectives(engine, environment, "first", deadline_s=5.0)
    # mpich's files in shared memory, to be removed after a kill: only who maps them knows that they are this job's.
    names = set(re.findall(r"mpich_shm_\w+", Path("/proc/self/maps").read_text()))
    (folder / f"mpich-{environment.rank}").write_text(" ".join(names))
    try:
        die_or_hang(collectives, how)
    except ManipleError as error:
        print(f"rank {collectives.rank} {type(error).__name__} {error}", flush=True)
        raise


if __name__ == "__main__":
    main()
