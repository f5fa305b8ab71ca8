"""Synthetic run folders of any size, for benchmarks and tests of their readers.

    python benchmarks/made_up.py FOLDER [--workers 64] [--events 10000] [--died 3]

Of ten rows of a worker, five are `log`, four `exchange` and one `progress`, half a second apart. The same arguments
give the same run.
"""

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

T0 = 1_790_000_000.0
_EVERY_S = 0.5  # between two `progress` rows
_LOGS, _EXCHANGES = 5, 4  # rows per `progress` row
_BATCH = 32


def make_up(
    path: Path, *, workers: int = 64, events: int = 10_000, died: int = 0, rule: str = "easgd", seed: int = 0
) -> Path:
    """Write the folder of a run in which each worker wrote `events` rows and the last `died` workers were killed."""
    (path / "events").mkdir(parents=True)
    asked = {"script": "train.py", "args": ["--lr", "0.1"], "workers": workers, "rule": rule, "seed": seed}
    _write(path / "events/host.jsonl", [_row("start", 0, **asked)])
    membership: list[str] = []
    ends: list[str] = []
    last = 0.0
    for rank in range(workers):
        is_killed = rank >= workers - died
        rounds = max(1, events // (_LOGS + _EXCHANGES + 1) // (2 if is_killed else 1))
        rows = _worker(rank, workers, rounds, random.Random(f"{seed} {rank}"))
        _write(path / f"events/worker-{rank}.jsonl", rows)
        end = 1 + rank * 0.01 + rounds * _EVERY_S
        membership.append(_row("joined", 1 + rank * 0.01, worker=rank, live=rank + 1, node=f"node-{rank // 8}"))
        ends.append(_row("exit", end, worker=rank, exit_code=-9 if is_killed else 0, died=is_killed))
        last = max(last, end)
    _write(path / "events/server.jsonl", membership)
    _write(path / "events/host.jsonl", [*sorted(ends, key=lambda row: json.loads(row)["timestamp"])])
    _write(path / "events/host.jsonl", [_row("end", last, exit_code=int(died > 0))])
    about = {"asked": asked, "lineage": "made-up", "started": T0, "ended": T0 + last, "exit_code": int(died > 0)}
    (path / "run.json").write_text(json.dumps(about, indent=2))
    return path


def _worker(rank: int, world: int, rounds: int, chance: random.Random) -> list[str]:
    begin, step, speed = 1 + rank * 0.01, 0, chance.uniform(0.8, 1.2)
    rows = [
        _row("join", begin, worker=rank, rank=rank, world=world, node=f"node-{rank // 8}", pid=1000 + rank),
        _row("share", begin, worker=rank, rule="EASGD(alpha='auto')", pace="Every(10)", bytes=400_000),
        _row("sampler", begin, worker=rank, size=50_000, validation=False),
    ]
    spent = dict.fromkeys(("exchange", "data", "others"), 0.0)
    for number in range(1, rounds + 1):
        at = begin + (number - 1) * _EVERY_S
        for part in range(_LOGS):
            step += int(10 * speed)
            loss = _loss(number / rounds, world) * chance.lognormvariate(0, 0.2)
            lr = 0.1 * 0.999**number
            rows.append(_row("log", at + 0.09 * (part + 1), worker=rank, step=step, loss=loss, lr=lr))
            if part < _EXCHANGES:
                took = {"duration": 0.004, "bytes": 800_000, "staleness": float(chance.randrange(2 * world))}
                rows.append(_row("exchange", at + 0.09 * (part + 1) + 0.01, worker=rank, step=step, **took))
        for name, most in (("exchange", 0.06), ("data", 0.03), ("others", 0.01)):
            spent[name] += chance.uniform(0, most)
        rows.append(_progress(rank, at + _EVERY_S, begin, step, number, spent, world))
        if rank == 0 and number % 20 == 0:
            center = {"val_loss": _loss(number / rounds, world), "center": True}
            rows.append(_row("log", at + _EVERY_S, worker=0, step=step, **center))
    return rows


def _loss(share: float, world: int) -> float:
    """Return the loss after this share of the run; it falls sooner with more workers."""
    return 0.1 + 2.2 * math.exp(-share * min(6, world))


def _progress(rank: int, at: float, begin: float, step: int, number: int, spent: dict[str, float], world: int) -> str:
    elapsed = at - begin
    made = {"exchanges": number * _EXCHANGES, "rounds": 0, "bytes": number * _EXCHANGES * 800_000}
    ages = {"staleness": float(world), "ages": [0, 1, 1, 2]}
    hardware = {"cpu": 0.95 * elapsed, "memory": 300_000_000 + 1000 * number}
    share = {"sync_share": spent["exchange"] / elapsed}
    counts = {"step": step, "samples": step * _BATCH, "elapsed": elapsed}
    return _row("progress", at, worker=rank, **counts, **share, **spent, **made, **ages, **hardware)


def _row(event: str, at: float, **values: Any) -> str:
    head = {"event": event, "timestamp": T0 + at, "datestamp": "2026-09-21 15:33"}
    return json.dumps(head | values, separators=(",", ":"))


def _write(path: Path, rows: list[str]) -> None:
    with path.open("a") as file:
        file.write("\n".join(rows) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--events", type=int, default=10_000, help="rows of each worker")
    parser.add_argument("--died", type=int, default=0, help="number of workers that were killed half-way")
    args = parser.parse_args()
    make_up(args.folder, workers=args.workers, events=args.events, died=args.died)


if __name__ == "__main__":
    main()
