"""Real runs: the command `maniple`, in a folder of its own, on scripts written by the tests."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from maniple.record import Row, read_events
from tests.conftest import require
from tests.waiting import PATIENCE_S, await_

MANIPLE = Path(sys.executable).with_name("maniple")
# Of runs that find neither numba nor torch's compiler: see bare/sitecustomize.py.
BARE = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).with_name("bare")), os.environ.get("PYTHONPATH")]))
}


class Run:
    """One call of `maniple run`, going on or ended."""

    def __init__(self, folder: Path, name: str, command: list[str], env: dict[str, str]) -> None:
        self.folder = folder / "runs" / name
        self.output = ""
        self.process = subprocess.Popen(
            command, cwd=folder, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Until it ends; its exit code."""
        try:
            self.output += self.process.communicate(timeout=timeout_s)[0] or ""
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return self.process.returncode

    def kill(self) -> None:
        self.process.kill()
        self.output += self.process.communicate(timeout=PATIENCE_S)[0] or ""

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def events(self, who: int | str, event: str | None = None) -> list[Row]:
        """The rows of worker `who` or of the host, of one kind or all."""
        name = f"worker-{who}" if isinstance(who, int) else who
        path = self.folder / "events" / f"{name}.jsonl"
        rows = read_events(path) if path.exists() else []
        return [row for row in rows if event is None or row["event"] == event]

    def await_event(self, who: int | str, event: str, *, count: int = 1, timeout_s: float = PATIENCE_S) -> list[Row]:
        """Until there are `count` rows of that kind."""
        return await_(lambda: rows if len(rows := self.events(who, event)) >= count else None, timeout_s)

    def pid(self, rank: int) -> int:
        """The newest process of worker `rank` that has joined."""
        return self.await_event(rank, "join")[-1]["pid"]

    @property
    def description(self) -> dict[str, Any]:
        return json.loads((self.folder / "run.json").read_text())

    @property
    def center(self) -> dict[str, np.ndarray]:
        return load_file(self.folder / "center" / "center-0.safetensors")

    def log(self, rank: int) -> str:
        return (self.folder / "logs" / f"worker-{rank}.log").read_text()


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    """Makes file systems in memory, of a few pages."""
    made: list[Path] = []

    def tiny(name: str, size: str) -> Path:
        require("root", os.geteuid() == 0, "mounting a small file system needs root")
        path = tmp_path / name
        path.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True, text=True
        )
        require("root", done.returncode == 0, f"mount is not allowed here: {done.stderr}")
        made.append(path)
        return path

    yield tiny
    for path in made:
        subprocess.run(["umount", path], check=True)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start `maniple run` with a script; its options come before, its arguments after."""
    runs: list[Run] = []

    def start(script: str, *options: str, args: tuple[str, ...] = (), env: dict[str, str] | None = None) -> Run:
        name = f"run{len(runs)}"
        path = tmp_path / f"script{len(runs)}.py"
        path.write_text(textwrap.dedent(script))
        command = [str(MANIPLE), "run", "--name", name, *options, path.name, *args]
        runs.append(Run(tmp_path, name, command, env or {}))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.signal(signal.SIGTERM)
            run.wait()


@pytest.fixture
def run(start: Callable[..., Run]) -> Callable[..., Run]:
    """Like `start`, and wait for the end."""

    def run(script: str, *options: str, timeout_s: float = PATIENCE_S, **rest: Any) -> Run:
        going = start(script, *options, **rest)
        going.wait(timeout_s)
        return going

    return run


class Serve(Run):
    """One call of `maniple serve`, and the workers that join it."""

    def __init__(self, folder: Path, name: str, command: list[str], env: dict[str, str]) -> None:
        super().__init__(folder, name, command, env)
        self.workers: list[subprocess.Popen[str]] = []
        self._here = folder

    @property
    def address(self) -> str:
        """HOST:PORT, once it listens."""
        path = self.folder / "host.json"
        return await_(lambda: path.exists() and json.loads(path.read_text()))["address"]

    @property
    def token(self) -> Path:
        return self.folder / "token"

    @property
    def server_pid(self) -> int:
        """The newest server process."""
        return self.await_event("host", "server")[-1]["pid"]

    def join(
        self, script: str, *args: str, via: str | None = None, options: tuple[str, ...] = ()
    ) -> subprocess.Popen[str]:
        """One more worker, by HOST:PORT; `via` is another address, of a proxy say."""
        address = via or self.address
        path = self._here / f"worker{len(self.workers)}.py"
        path.write_text(textwrap.dedent(script))
        command = [str(MANIPLE), "join", "--token-file", str(self.token), *options, address, path.name, *args]
        worker = subprocess.Popen(command, cwd=self._here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.workers.append(worker)
        return worker

    def connect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let a `maniple.Client()` of the test find it."""
        monkeypatch.setenv("MANIPLE_ADDRESS", self.address)
        monkeypatch.setenv("MANIPLE_TOKEN_FILE", str(self.token))

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """End it as a person would; its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout_s)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    """Start `maniple serve`; a second one may resume the run of the first by its name."""
    served: list[Serve] = []

    def serve(*options: str, name: str | None = None) -> Serve:
        is_new = name is None
        name = name or f"serve{len(served)}"
        command = [str(MANIPLE), "serve", *(["--name", name] if is_new else ["--resume", f"runs/{name}"]), *options]
        served.append(Serve(tmp_path, name, command, {}))
        return served[-1]

    yield serve
    for host in served:
        for worker in host.workers:
            if worker.poll() is None:
                worker.kill()
            worker.communicate(timeout=PATIENCE_S)
        if host.process.poll() is None:
            host.end()
