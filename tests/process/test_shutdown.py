"""Workers that are told to leave, and workers whose host has moved."""

import json
import signal
import subprocess
import textwrap

import pytest
from safetensors.numpy import load_file

from tests.waiting import PATIENCE_S, await_

from .conftest import MANIPLE

pytestmark = pytest.mark.usefixtures("without_numba")

STEPS = """
    import sys, time, numpy as np, maniple
    worker = maniple.join()
    params = {"w": np.zeros(2)}
    replica = worker.share(params, rule=maniple.Downpour(), pace=maniple.Every(1000))
    sampler = worker.sampler(40_000, chunk=400, shuffle=False)  # more than they take in two minutes
    for batch in sampler.batches(1):
        params["w"][0] += 1
        time.sleep(float(sys.argv[1]) if replica.steps > 3 else 0)
        params["w"][1] += 1
        replica.step()
        worker.log(sample=batch[0])
    print("after the loop")
"""


def test_a_signal_ends_a_worker_after_its_step_with_its_leases_given_back(serve):
    """SIGUSR1, SIGTERM, and SIGTERM to one whose step has no end, which is cut at a deadline."""
    host = serve()
    workers = [host.join(STEPS, pause) for pause in ("0.3", "0.3", "1000")]
    ranks = [await_(lambda pid=worker.pid: _rank(host, pid)) - 1 for worker in workers]
    for rank in ranks:
        await_(lambda rank=rank: len(host.events(rank, "log")) >= 4)
    for worker, number in zip(workers, (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM), strict=True):
        worker.send_signal(number)
    outputs = [worker.communicate(timeout=PATIENCE_S)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 143, 143], outputs
    assert not any("after the loop" in output for output in outputs), "they end where they are"
    assert all(host.await_event(rank, "leave")[0]["failed"] is False for rank in ranks)

    other = host.join(STEPS.replace("Every(1000)", "Every(1)"), "0.0")
    # The leases that were not finished go to this one.
    await_(lambda: {row["sample"] for row in host.events(3, "log")} >= set(range(3 * 400)))
    other.send_signal(signal.SIGUSR1)
    other.communicate(timeout=PATIENCE_S)
    assert host.end() == 0
    made = sum(host.events(rank, "progress")[-1]["step"] for rank in range(4))
    assert host.center["w"].tolist() == [made + 1, made], "each step is whole, but for the one without end"


def _rank(host, pid: int) -> int:
    """One more than the rank of a process that has joined; 0 if it has not."""
    return next((row["worker"] + 1 for row in host.events("server", "joined") if row["pid"] == pid), 0)


def test_a_run_is_stopped_by_its_folder(start, tmp_path):
    going = start(STEPS, "-n", "1", args=("0.01",))
    going.await_event(0, "log", count=3)
    done = subprocess.run([str(MANIPLE), "stop", "runs/run0"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "the host has ended with exit code 130" in done.stdout, done.stdout + done.stderr
    assert "maniple run --resume runs/run0" in done.stdout
    assert going.wait() == 130
    assert going.center["w"].tolist() == 2 * [going.events(0, "progress")[-1]["step"]]
    assert going.description["ends"] == {"0": "stopped"}
    assert "W0 : state stopped" in going.output
    assert "H  | to continue: maniple run --resume runs/run0" in going.output


def test_ctrl_c_lets_steps_end_and_shows_who_has_left_as_stopped(start, tmp_path):
    """Worker 0 is in a long step. Worker 1 leaves at once, but its process does not end."""
    hanging = "import atexit, time; atexit.register(time.sleep, 100 * int(__import__('os').environ['MANIPLE_RANK']))\n"
    going = start(hanging + textwrap.dedent(STEPS), "-n", "2", args=("3",))
    for rank in range(2):
        going.await_event(rank, "log", count=4)
    going.signal(signal.SIGINT)
    for rank in range(2):
        assert not going.await_event(rank, "leave")[0]["failed"]
    going.signal(signal.SIGINT)  # now it need not wait any longer
    assert going.wait() == 130
    assert going.description["ends"] == {"0": "stopped", "1": "stopped"}
    assert "W0 : state stopped" in going.output and "W1 : state stopped" in going.output
    assert "failed" not in going.output
    steps = sum(going.events(rank, "progress")[-1]["step"] for rank in range(2))
    assert going.center["w"].tolist() == [steps, steps], "each step is whole"
    shown = subprocess.run(
        [str(MANIPLE), "status", "runs/run0"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert shown.stdout.count("state stopped") == 2, shown.stdout


def test_a_host_that_goes_on_at_another_port_is_found_by_its_run_folder(tmp_path):
    """The path is too long for a socket file, so that it is reached by TCP from its own machine too."""
    runs = tmp_path / ("deep" * 20)
    (tmp_path / "script.py").write_text(
        "import time, numpy as np, maniple\nfrom pathlib import Path\n"
        "worker, params = maniple.join(), {'w': np.zeros(3)}\n"
        "replica = worker.share(params, rule=maniple.Downpour(), pace=maniple.Every(1))\n"
        "while not Path('stop').exists():\n    params['w'] += 1; replica.step(); time.sleep(0.01)\n"
        "print('steps', replica.steps)\n"
    )

    def serve(*options: str) -> subprocess.Popen[str]:
        return subprocess.Popen([str(MANIPLE), "serve", *options], cwd=tmp_path, stdout=subprocess.DEVNULL, text=True)

    def address() -> str:
        path = runs / "run" / "host.json"
        return json.loads(path.read_text())["address"] if path.exists() else ""

    host = serve("--runs", str(runs), "--name", "run")
    before = await_(address)
    command = [str(MANIPLE), "join", str(runs / "run"), "script.py"]
    worker = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    rows = runs / "run" / "events" / "worker-0.jsonl"
    await_(lambda: rows.exists() and rows.read_text().count('"exchange"') > 5)
    host.kill()
    host.wait(PATIENCE_S)
    host = serve("--resume", str(runs / "run"), "--listen", "127.0.0.2:0")
    await_(lambda: address() not in {"", before})
    seen = rows.read_text().count('"exchange"')
    await_(lambda: rows.read_text().count('"exchange"') > seen + 5)
    (tmp_path / "stop").touch()
    steps = int(worker.communicate(timeout=PATIENCE_S)[0].rpartition("steps")[2])
    host.send_signal(signal.SIGTERM)
    assert host.wait(PATIENCE_S) == 0
    assert (load_file(runs / "run" / "center" / "center-0.safetensors")["w"] == steps).all()
