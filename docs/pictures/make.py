"""The pictures of README and docs, each made from real runs on this machine.

    python docs/pictures/make.py              all of them
    python docs/pictures/make.py speedup      one

A picture is a function of PICTURES: it gets an empty folder for its runs, and writes docs/pictures/<name>.png. Leave
the machine alone meanwhile: speed-ups are measured.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
MANIPLE = [sys.executable, "-m", "maniple.cli"]
_QUIET = 0.5  # the load of a machine that is left alone
_LARGEST = 200_000  # bytes of a picture: it comes with every clone


def speedup(folder: Path) -> None:
    """`maniple plot`: digits by one worker and by two."""
    for name, workers in (("one", 1), ("two", 2)):
        train(folder, name, workers, "--epochs", "40", "--lr", "0.005")
    command = ["plot", "runs/one", "runs/two", "--log", "--smooth", "20", "-o", HERE / "speedup.png"]
    subprocess.run([*MANIPLE, *command], cwd=folder, check=True)


def train(folder: Path, name: str, workers: int, *args: str) -> Path:
    """Run the example of the digits; gives the run folder."""
    command = ["run", "--quiet", "--name", name, "-n", str(workers), str(EXAMPLES / "digits.py"), *args]
    subprocess.run([*MANIPLE, *command], cwd=folder, check=True, timeout=600)
    return folder / "runs" / name


# One line for each picture; a new one is a function above and its name here.
PICTURES: dict[str, Callable[[Path], None]] = {
    "speedup": speedup,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}; default: all")
    parser.add_argument("--anyway", action="store_true", help="also on a machine that is busy, to try the script")
    args = parser.parse_args()
    names = args.names or list(PICTURES)
    if (load := os.getloadavg()[0]) > _QUIET and not args.anyway:
        sys.exit(
            f"the load is {load:.1f}, above {_QUIET}: speed-ups would be wrong. Wait, or give --anyway and keep none."
        )
    for name in names:
        if name not in PICTURES:
            parser.error(f"there is no picture {name!r}: there are {', '.join(PICTURES)}")
        with tempfile.TemporaryDirectory() as folder:
            PICTURES[name](Path(folder))
        size = (HERE / f"{name}.png").stat().st_size
        if size > _LARGEST:
            sys.exit(f"{name}.png has {size:,} bytes, more than {_LARGEST:,}: make it smaller.")
        print(f"made: docs/pictures/{name}.png ({size:,} bytes)")


if __name__ == "__main__":
    main()
