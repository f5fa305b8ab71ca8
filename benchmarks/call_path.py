"""The path of one training step through the code: files of maniple and Python calls, counted with `sys.setprofile`.

    python benchmarks/call_path.py            an EASGD step with an exchange, without one, and a BSP step
    python benchmarks/call_path.py --list     and the functions, in the order of their first call

Two local workers train a torch module with two parameters; worker 0 profiles single steps after a warm-up. The least of
20 steps counts: rows that are written twice a second and waits for the other worker are not part of every step.
"""

import argparse
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import maniple

_ROOT = str(Path(maniple.__file__).parent)
_WARM_UP, _STEPS = 5, 20


def calls_of(act: Callable[[], None]) -> list[str]:
    """The calls of maniple's functions that `act` makes, as "file:function"."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_ROOT):
            calls.append(f"{Path(code.co_filename).relative_to(_ROOT)}:{code.co_qualname}")

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls


def train(rule: maniple.Rule, pace: maniple.Every, result: Path) -> None:
    """Profile the steps of one rule in this worker, and write down the calls of the shortest one."""
    import torch

    worker = maniple.join(own_data=True)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    worker.share(model, optimizer, rule=rule, pace=pace)
    data = torch.ones(4, 8)
    paths: list[list[str]] = []
    for step in range(_WARM_UP + _STEPS):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        if worker.rank == 0 and step >= _WARM_UP:
            paths.append(calls_of(optimizer.step))
        else:
            optimizer.step()
    worker.barrier()
    if worker.rank == 0:
        result.write_text("\n".join(min(paths, key=len)))


_STEPS_OF = {
    "EASGD step with an exchange": (maniple.EASGD(0.5), maniple.Every(1)),
    "EASGD step without an exchange": (maniple.EASGD(0.5), maniple.Every(1000)),
    "BSP step": (maniple.BSP(), maniple.Every(1)),
}


def main() -> None:
    """Start a run of two workers for each kind of step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the functions that are called")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        rule, pace = _STEPS_OF[arguments.step]
        train(rule, pace, arguments.result)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "calls"
        run = [
            str(Path(sysconfig.get_path("scripts")) / "maniple"),
            "run",
            "--quiet",
            "--runs",
            folder,
            "-n",
            "2",
            "--",
        ]
        for name in _STEPS_OF:
            subprocess.run([*run, __file__, "--step", name, "--result", str(result)], check=True)
            calls = result.read_text().splitlines()
            print(f"{name:32} {len({call.partition(':')[0] for call in calls}):4} files {len(calls):4} calls")
            for call in calls if arguments.list else ():
                print(f"    {call}")


if __name__ == "__main__":
    main()
