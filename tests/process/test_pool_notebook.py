"""A pool in a notebook: the example runs as it is, and an interrupt of the kernel keeps the pool."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require
from tests.waiting import PATIENCE_S, await_

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.process]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels of this environment, with folders of their own."""
    missing = [name for name in ("nbclient", "nbformat", "ipykernel") if find_spec(name) is None]
    require("notebook", not missing, f"not installed: {', '.join(missing)}")
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))


def text_of(cell: Any) -> str:
    """What a person sees below a cell."""
    shown = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs]
    shown += ["\n".join(out.traceback) for out in cell.outputs if out.output_type == "error"]
    return re.sub(r"\x1b\[[\d;]*m", "", "".join(shown))


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path):
    import nbclient
    import nbformat

    notebook = nbformat.read(EXAMPLES / "pool.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    nbclient.NotebookClient(
        notebook, timeout=int(PATIENCE_S), kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = {cell.id: text_of(cell) for cell in notebook.cells if cell.cell_type == "code"}
    assert shown["pool"] == "Pool(2)"
    assert shown["data"] == "(Data(float64[10001, 3]), Data(float64[10001]))"
    assert shown["function"].count("True") == 3
    assert "ValueError: there is no 7" in shown["error"]
    assert "raised in worker 1 of the pool" in shown["error"]
    assert shown["after"] == "still there: True\n"
    assert re.findall(r"weights: \[ *(\S+) +(\S+) +(\S+) *\]", shown["training"]) == [("1.", "-2.", "0.5")]
    assert len(re.findall(r"'compute': [\d.]+", shown["profile"])) == 2
    assert shown["close"] == "Pool(2), closed"


@pytest.fixture
def kernel() -> Iterator[tuple[Any, Any]]:
    """A kernel, and what speaks to it."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=PATIENCE_S)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)  # the workers see to themselves


def reply_to(client: Any, request: str) -> dict[str, Any]:
    """What became of a cell."""
    while True:
        message = client.get_shell_msg(timeout=PATIENCE_S)
        if message["parent_header"].get("msg_id") == request:
            return message["content"]


def ran(client: Any, code: str) -> dict[str, Any]:
    return reply_to(client, client.execute(code))


def test_an_interrupted_cell_keeps_the_pool(kernel: tuple[Any, Any], tmp_path: Path):
    manager, client = kernel
    begun = [tmp_path / str(row) for row in range(2)]
    setup = f"""
import pathlib, time, numpy as np, maniple
pool = maniple.Pool(2)
data = pool.data(np.arange(2))
total = pool.function(lambda x: x.sum(), scatter="x", reduce="sum")
def sleep(x):
    pathlib.Path({str(tmp_path)!r}, str(x[0])).touch()
    time.sleep(600)
asleep = pool.function(sleep, scatter="x")
pids = pool.pids
"""
    assert ran(client, setup)["status"] == "ok"
    for _ in range(3):
        # Else the kernel may abort the next request, too, if that comes while it still handles the error.
        request = client.execute("asleep(data)", stop_on_error=False)
        await_(lambda: all(path.exists() for path in begun))
        manager.interrupt_kernel()
        reply = reply_to(client, request)
        assert (reply["status"], reply.get("ename")) == ("error", "KeyboardInterrupt"), reply
        reply = ran(client, "assert total(data) == 1 and pool.pids == pids")
        assert reply["status"] == "ok", reply
        for path in begun:
            path.unlink()
    assert ran(client, "pool.close()")["status"] == "ok"
