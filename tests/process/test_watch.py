"""`maniple watch`: a run that somebody else has started, seen from its folder."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from maniple.center import sweep
from tests.waiting import PATIENCE_S, await_

from .conftest import MANIPLE

# Until a file says so: what is watched must still be there, on a machine however slow.
SCRIPT = """
    import pathlib, time, numpy as np, maniple
    worker = maniple.join()
    params = {"w": np.zeros(100)}
    replica = worker.share(params, rule=maniple.EASGD(0.5), pace=maniple.Every(2))
    while not pathlib.Path("enough").exists():
        params["w"] += 0.1
        replica.samples = 8
        replica.step()
        worker.log(loss=1 / replica.steps)
        if replica.steps % 10 == 0:
            print("ten more", flush=True)
        with replica.center():
            worker.log(distance=float(params["w"][0]))
        time.sleep(0.02)
"""


def watched(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MANIPLE, "watch", *options, folder], capture_output=True, text=True, timeout=PATIENCE_S, cwd=folder.parent
    )


def worker_states(folder: Path) -> dict:
    """Where the run stands now, for a program."""
    return json.loads(watched(folder, "--once", "--json").stdout.splitlines()[-1])


@pytest.mark.usefixtures("without_numba")
def test_a_run_is_watched_while_it_goes_on_and_afterwards(start):
    going = start(SCRIPT, "-n", "2", "--restarts", "1", "--json", "--listen", "127.0.0.1:0")
    for rank in (0, 1):
        going.await_event(rank, "progress", count=3)
    states = worker_states(going.folder)
    assert [one["worker"] for one in states["workers"]] == [0, 1]
    for one in states["workers"]:
        assert one["state"] == "training"
        assert one["step"] > 0 and one["samples"] == 8 * one["step"] and one["samples_per_s"] > 0
        assert 0 < one["loss"] < 1 and 0 < one["sync_share"] < 1 and one["staleness"] is not None
        assert one["memory_bytes"] > 1 << 20
    totals = states["totals"]
    assert totals["live"] == 2 and totals["version"] > 0
    assert 1 < totals["busy_workers"] <= 2 and 0 < totals["goodput"] <= 1

    follower = subprocess.Popen(
        [MANIPLE, "watch", going.folder, "--logs"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    posted = json.loads((going.folder / "host.json").read_text())
    remote = subprocess.Popen(
        [MANIPLE, "watch", posted["address"], "--token-file", going.folder / "token"], stdout=subprocess.PIPE, text=True
    )
    os.kill(going.pid(1), signal.SIGKILL)
    await_(lambda: any(one["lives"] == 2 for one in worker_states(going.folder)["workers"]))
    going.await_event(1, "progress", count=len(going.events(1, "progress")) + 2)
    (again,) = [one for one in worker_states(going.folder)["workers"] if one["worker"] == 1]
    assert again["state"] == "training" and again["samples"] > 8 * again["step"]  # those of its first life too
    (going.folder.parent.parent / "enough").touch()
    assert going.wait() == 0, going.output

    printed = remote.communicate(timeout=PATIENCE_S)[0]  # it ends by itself
    assert remote.returncode == 0
    assert "W0 : state" in printed and "W1 : state" in printed and "all: " in printed.splitlines()[-1]
    seen = follower.communicate(timeout=PATIENCE_S)[0]
    assert follower.returncode == 0
    assert "W0 | ten more" in seen
    assert "W1 : state done" in seen and "(life 2)" in seen
    assert "busy " in seen.splitlines()[-1] and "center version" in seen.splitlines()[-1]
    _check_json(going.output)


def _check_json(output: str) -> None:
    """What `maniple run --json` has printed is JSON and nothing else, and tells all."""
    rows = [json.loads(line) for line in output.splitlines()]
    kinds = {row["kind"] for row in rows}
    assert kinds == {"printed", "said", "standings"}
    assert any(row["kind"] == "said" and "restart 1 of 1" in row["text"] for row in rows)
    assert any(row["kind"] == "printed" and row["text"] == "ten more" for row in rows)
    last = [row for row in rows if row["kind"] == "standings"][-1]
    assert [one["state"] for one in last["workers"]] == ["done", "done"]


def test_what_is_no_run_is_said_so(tmp_path):
    done = watched(tmp_path)
    assert done.returncode == 2
    assert "is not a run folder" in done.stderr and "runs/last" in done.stderr


def _status(folder: Path) -> str:
    return subprocess.run([MANIPLE, "status", folder], capture_output=True, text=True, timeout=PATIENCE_S).stdout


def test_a_run_whose_host_was_killed_is_shown_as_dead_with_the_command_to_continue(start):
    going = start(SCRIPT, "-n", "1")
    going.await_event(0, "progress", count=2)
    going.kill()
    follower = subprocess.Popen([MANIPLE, "watch", going.folder], stdout=subprocess.PIPE, text=True)
    assert follower.stdout is not None
    try:
        while "the host is dead" not in (line := follower.stdout.readline()):
            assert line
        assert line.endswith(
            "To continue: maniple run --resume runs/run0\n".replace("runs/", str(going.folder.parent) + "/")
        )
        for lines in (watched(going.folder, "--once").stdout, _status(going.folder)):
            assert f"is dead: it was on {os.uname().nodename}" in lines and "maniple run --resume" in lines
            (row,) = (line for line in lines.splitlines() if line.startswith("W0 : "))
            assert row.startswith("W0 : state dead step ") and " speed 0 samples/s loss 0." in row
            assert "step 0 " not in row, "how far it was is known"
        states = worker_states(going.folder)
        assert states["workers"][0]["samples_per_s"] == 0 == states["totals"]["live"]
    finally:
        (going.folder.parent.parent / "enough").touch()
        follower.send_signal(signal.SIGINT)
        follower.communicate(timeout=PATIENCE_S)
    assert follower.returncode == 0
    await_(lambda: sweep(Path(os.environ["MANIPLE_SHM"]), lambda *_: None))  # as the next run would
