"""What is printed and shown: whatever becomes of it, the training goes on and the center is saved."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.waiting import PATIENCE_S, await_
from tests.written import Written

from .conftest import MANIPLE
from .controller_scripts import BEGIN

pytestmark = pytest.mark.usefixtures("without_numba")

STEPS = 50
PRINTING = (
    BEGIN.replace("maniple.join()", "maniple.join(own_data=True)")
    + f"""
    for step in range({STEPS}):
        train()
        print("✓", step)
        time.sleep(0.01)
"""
)
LATIN = {"PYTHONIOENCODING": "latin-1", "LC_ALL": "C.UTF-8"}


def shell(here: Path, *words: str, redirect: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Call `maniple` with its output redirected, as a person does in a shell."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'"$@" {redirect}', "bash", str(MANIPLE), *words],
        cwd=here, env=os.environ | (env or {}), capture_output=True, timeout=PATIENCE_S,
    )  # fmt: skip


@pytest.fixture(params=["latin-1", ">&-", ">&- 2>&- <&-", ">/dev/full", "| head -1", "2>&1 | head -1"])
def shown(request, tmp_path, monkeypatch):
    """A run of two workers that print, with an output that fails in one way or another."""
    how = request.param
    (tmp_path / "train.py").write_text(textwrap.dedent(PRINTING))
    words = ("run", "--name", "one", "-n", "2", "train.py")
    done = shell(tmp_path, *words, redirect="" if how == "latin-1" else how, env=LATIN if how == "latin-1" else None)
    return how, tmp_path / "runs/one", done


def test_output_that_cannot_be_shown_does_not_end_the_run(shown):
    how, run, done = shown
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert load_file(run / "center/center-0.safetensors")["w"].tolist() == [2 * STEPS] * 1000
    assert json.loads((run / "run.json").read_text())["exit_code"] == 0
    for rank in range(2):  # logs are UTF-8, whatever the terminal is
        assert (run / f"logs/worker-{rank}.log").read_text("utf8").splitlines() == [f"✓ {k}" for k in range(STEPS)]
    said = done.stderr.decode("latin-1")
    if how in {">/dev/full", "| head -1"}:
        assert said.count("not all could be shown") == 1, said
    else:
        assert "not all could be shown" not in said
    if how == "latin-1":
        assert b"W0 | ? 0" in done.stdout


COMMANDS = """
import pathlib, sys
from maniple.cli import cli, exit_on_error
for words in sys.argv[1:]:
    try:
        exit_on_error(lambda: cli(words.split(), prog_name="maniple"))
    except SystemExit as end:
        with open("codes", "a") as file:
            print(words.split()[0], end.code, file=file)
"""


@pytest.mark.parametrize("how", ["latin-1", ">&-", ">/dev/full"])
def test_commands_that_look_at_a_run_work_with_any_output(tmp_path, how):
    run = tmp_path / "runs" / "ß–✓"
    written = Written(run)
    written.folder.describe(lineage="0" * 16, exit_code=0)
    written.row("host", "start", 0.0, workers=1)
    written.row(0, "join", 1.0, rank=0, node="ß–✓")
    for at in (2.0, 3.0):
        written.progress(0, at, step=10)
        written.row(0, "log", at, worker=0, step=10, loss=1.0)
    (run / "logs").mkdir()
    (run / "logs/worker-0.log").write_text("✓\n")
    looks = ["status", "watch --once", "watch --once --logs", "watch --once --json --logs", "compare", "compare --json"]
    looks = looks[:1] if how == ">/dev/full" else looks
    done = subprocess.run(
        ["bash", "-c", '"$@" ' + ("" if how == "latin-1" else how), "bash", sys.executable, "-c", COMMANDS]
        + [f"{words} runs/ß–✓" for words in looks],
        cwd=tmp_path, env=os.environ | (LATIN if how == "latin-1" else {}), capture_output=True, timeout=PATIENCE_S,
    )  # fmt: skip
    codes = [line.split()[1] for line in (tmp_path / "codes").read_text().splitlines()]
    if how == ">/dev/full":  # who asked to see something has not seen it
        assert codes == ["3"], done.stderr
        assert b"standard output, cannot be written: No space left on device" in done.stderr
        return
    assert codes == ["0"] * len(looks), done.stderr
    assert b"Traceback" not in done.stderr
    if how == "latin-1":
        rows = [json.loads(line) for line in done.stdout.decode("latin-1").splitlines() if line.startswith("{")]
        assert "✓" in [one.get("text") for one in rows] and "ß–✓" in str(rows[-1]["runs"])


def test_full_run_folder_does_not_end_scripts_that_print(start, tmp_path, tiny):
    small = tiny("small", "1m")
    going = start(
        BEGIN + """
    import subprocess
    print("first")
    while not pathlib.Path("full").exists():
        time.sleep(0.01)
    for step in range(300):
        train()
        print(step, "x" * 1000)
    print("to stderr", file=sys.stderr)
    subprocess.run([sys.executable, "-c", "print('of a child')"], check=True)
    pathlib.Path(f"printed-{worker.rank}").touch()
    while not pathlib.Path("room").exists():
        time.sleep(0.01)
    print("last")
        """,
        "-n", "2", "--runs", str(small),
    )  # fmt: skip
    going.folder = small / "run0"
    logs = [going.folder / f"logs/worker-{rank}.log" for rank in range(2)]
    await_(lambda: all(log.exists() and log.read_text() == "first\n" for log in logs))
    fill(small)
    (tmp_path / "full").touch()
    await_(
        lambda: all((tmp_path / f"printed-{rank}").exists() for rank in range(2)) or going.process.poll() is not None
    )
    (small / "filler").unlink()
    (tmp_path / "room").touch()
    assert going.wait() == 0, going.output
    assert going.center["w"].tolist() == [600] * 1000
    assert going.output.count("cannot be written: No space left on device. Training continues") == 1
    for rank in range(2):
        lines = going.log(rank).splitlines()
        assert lines[0] == "first" and lines[-3:] == ["to stderr", "of a child", "last"]
        assert any("bytes are missing here: No space left on device" in line for line in lines)
        assert lines[-4] == f"299 {'x' * 1000}"


def test_full_disk_at_the_host_neither_stops_workers_elsewhere_nor_loses_their_rows(serve, tmp_path, tiny):
    small = tiny("small", "1m")
    host = serve("--runs", str(small))
    host.folder = small / "serve0"
    worker = host.join(
        BEGIN
        + """
    times = []
    for step in range(400):
        worker.log(number=step, text="x" * 200)
        train()
        times.append(time.monotonic())
        if step == 20:
            pathlib.Path("begun").touch()
            while not pathlib.Path("full").exists():
                time.sleep(0.01)
        time.sleep(0.01)
    pathlib.Path("longest").write_text(str(max(b - a for a, b in zip(times[21:], times[22:]))))
    while not pathlib.Path("room").exists():
        time.sleep(0.01)
        """
    )
    await_((tmp_path / "begun").exists)
    fill(small)
    (tmp_path / "full").touch()
    await_(lambda: (tmp_path / "longest").exists() or worker.poll() is not None)
    assert worker.poll() is None, worker.communicate()
    (small / "filler").unlink()
    (tmp_path / "room").touch()
    output = worker.communicate(timeout=PATIENCE_S)[0]
    assert worker.returncode == 0, output
    assert host.end() == 0, host.output
    assert float((tmp_path / "longest").read_text()) < 4, "exchanges stood still"
    assert [row["number"] for row in host.events(0, "log")] == list(range(400))
    assert len(host.events(0, "exchange")) == 400
    assert not host.events(0, "away") and not host.events("server", "lost") and not host.events("server", "returned")
    assert host.center["w"].tolist() == [400] * 1000


def fill(folder: Path) -> None:
    """Leave no room on a file system."""
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return
