"""The benchmark over shaped lines: it runs in its quick form, and an interrupt leaves nothing behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import require
from tests.waiting import PATIENCE_S, await_

ROOT = Path(__file__).parents[2]

_BENCHMARK_S = 270  # of four short runs, each with two processes that import torch


@pytest.fixture
def start(tmp_path: Path):
    """Start the benchmark from a copy, which writes its results there. It is ended after the test."""
    is_possible = sys.platform == "linux" and os.geteuid() == 0 and all(map(shutil.which, ("ip", "nsenter")))
    require("netns", is_possible, "network namespaces need Linux, root, and the packages iproute2 and util-linux")
    require("torch", find_spec("torch") is not None, "no torch")
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("results", "__py*"))
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 1000)
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "benchmarks/link", "--quick", "--text", "text", *words]
        started.append(
            subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=PATIENCE_S)


def children(pid: int, part: str) -> list[list[str]]:
    """The command lines of a process's children that name `part`."""
    found: list[list[str]] = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        path = Path(f"/proc/{child}/cmdline")
        if path.exists() and part in (text := path.read_text()):
            found.append(text.rstrip("\0").split("\0"))
    return found


def test_workers_on_shaped_lines_learn_and_are_compared_with_one_process(start, tmp_path: Path):
    process = start("--contestants", "one process", "BSP", "EASGD")
    printed, _ = process.communicate(timeout=_BENCHMARK_S)
    assert process.returncode == 0, printed
    rows = json.loads((tmp_path / "benchmarks" / "results" / "link-quick.json").read_text())["rows"]
    assert [row["contestant"] for row in rows] == ["one process", "BSP", "EASGD"]
    assert all(row["last loss"] < 6 and row["steps/s"] > 0 for row in rows), rows  # 8 bits before training


def test_an_interrupt_leaves_no_machine_no_process_and_no_memory(start):
    """Of processes and memory, the fixture of all tests makes sure."""
    process = start("--contestants", "BSP")
    (switch,) = await_(lambda: children(process.pid, "switch.py"))
    name = switch[-2]
    await_(lambda: list(Path(os.environ["MANIPLE_SHM"]).iterdir()))  # the host is there, its center soon will be
    assert [path for path in Path("/run/netns").iterdir() if path.name.startswith(name)]
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in printed
    assert not [path for path in Path("/run/netns").iterdir() if path.name.startswith(name)]
