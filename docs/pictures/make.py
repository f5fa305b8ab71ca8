"""Generate the pictures of README and docs from real runs on this machine.

    python docs/pictures/make.py              all pictures
    python docs/pictures/make.py speedup      one

Each picture is a function in PICTURES, which gets an empty folder for its runs and writes docs/pictures/<name>.png.
Keep the machine otherwise idle, because speed-ups are measured.
"""

import argparse
import contextlib
import io
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
MANIPLE = [sys.executable, "-m", "maniple.cli"]
_QUIET = 0.5  # load of an otherwise idle machine
_TERMINAL = (
    '<pre style="display:inline-block;margin:0;padding:14px 18px;background:#101418;color:#d8dee6;border-radius:6px;'
    'font:13px/1.45 DejaVu Sans Mono,monospace">{code}</pre>'
)
_LARGEST = 200_000  # bytes of a picture, which is part of every clone


def speedup(folder: Path) -> None:
    """`maniple plot`: digits, trained by one worker and by two."""
    for name, workers in (("one", 1), ("two", 2)):
        # The default rule, bsp, averages gradients: two workers make half as many steps, with twice the learning rate.
        train(folder, name, workers, "--epochs", "40", "--lr", str(0.005 * workers))
    command = ["plot", "runs/one", "runs/two", "--log", "--smooth", "20", "-o", HERE / "speedup.png"]
    subprocess.run([*MANIPLE, *command], cwd=folder, check=True)


def terminal(folder: Path) -> None:
    """`maniple watch`: the terminal view of a live run with two workers."""
    with training(folder, "two"):
        ours, theirs = pty.openpty()
        env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "96", "LINES": "24"}
        command = [*MANIPLE, "watch", "--once", "runs/two"]
        with subprocess.Popen(command, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs):
            os.close(theirs)
            shown = read_all(ours)
    console = Console(record=True, width=96, file=io.StringIO())
    newest = re.split(r"\x1b\[\d*A", shown)[-1]  # each table overwrites the previous one
    console.print(Text.from_ansi(re.sub(r"\x1b\[[0-9?]*[B-HJKhl]|\r", "", newest).strip("\n")))
    html = console.export_html(inline_styles=True, code_format=_TERMINAL)
    with browser(width=860, height=200) as page:
        page.set_content(html)
        page.locator("pre").screenshot(path=HERE / "terminal.png")


def page(folder: Path) -> None:
    """`maniple run --web`: the page of a run with two workers."""
    with training(folder, "two", "--web") as run:
        address = re.search(r"http://\S+", (run / "said").read_text())
        assert address is not None
        with browser(width=1200, height=840) as opened:
            opened.goto(address[0])
            opened.wait_for_timeout(15_000)  # until the curves have some points
            opened.screenshot(path=HERE / "page.png")


@contextmanager
def training(folder: Path, name: str, *options: str) -> Iterator[Path]:
    """Train the digits example on two workers while the block runs, and yield the run folder.

    The rule is easgd, because synchronous rules have no staleness to show.
    """
    run, args = folder / "runs" / name, [str(EXAMPLES / "digits.py"), "--epochs", "2000", "--lr", "0.005"]
    command = [*MANIPLE, "run", "-n", "2", "--rule", "easgd", "--name", name, *options, *args]
    said = folder / "said"
    with said.open("w") as file, subprocess.Popen(command, cwd=folder, stdout=file, stderr=file) as process:
        try:
            wait_for(lambda: len(list(run.glob("events/worker-*.jsonl"))) == 2)
            time.sleep(8)
            shutil.copy(said, run / "said")
            yield run
        finally:
            process.send_signal(signal.SIGINT)


@contextmanager
def browser(*, width: int, height: int) -> Iterator[Any]:
    """Yield a page of a headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as engine:
        opened = engine.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
        yield opened.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        opened.close()


def read_all(descriptor: int) -> str:
    """Return what is written to a terminal until it is closed."""
    shown = b""
    with contextlib.suppress(OSError):
        while piece := os.read(descriptor, 65536):
            shown += piece
    os.close(descriptor)
    return shown.decode()


def wait_for(look: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not look():
        if time.monotonic() > deadline:
            sys.exit("the run has not begun within a minute")
        time.sleep(0.2)


def train(folder: Path, name: str, workers: int, *args: str) -> Path:
    """Run the digits example, and return the run folder."""
    command = ["run", "--quiet", "--name", name, "-n", str(workers), str(EXAMPLES / "digits.py"), *args]
    subprocess.run([*MANIPLE, *command], cwd=folder, check=True, timeout=600)
    return folder / "runs" / name


# To add a picture, write a function above and add its name here.
PICTURES: dict[str, Callable[[Path], None]] = {
    "speedup": speedup,
    "terminal": terminal,
    "page": page,
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
