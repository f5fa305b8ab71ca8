"""Steps of a real Slurm: `srun python train.py`, as it is."""

import json
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path

from safetensors.numpy import load_file

from maniple.record import read_events
from tests.cluster.slurm import Cluster
from tests.waiting import PATIENCE_S, await_

# Each sample adds 1 to one element: with Downpour the center counts how often each was trained on.
COUNT = """
    import sys, time
    import numpy as np
    import maniple

    worker = maniple.join()
    model = {"seen": np.zeros(120)}
    replica = worker.share(model)
    for batch in worker.sampler(120, chunk=10).batches(5):
        model["seen"][batch] += 1
        replica.step()
        worker.record("trained", samples=[int(i) for i in batch])
        time.sleep(float(sys.argv[1]))
    answer = worker.ask("next")
    print(f"[{worker.rank}/{worker.world} on {worker.node}, near {worker._environment.is_near}: {answer}]", flush=True)
"""


def the_run(folder: Path) -> Path:
    (run,) = [path for path in (folder / "runs").iterdir() if not path.is_symlink()]
    return run


def test_a_step_of_srun_has_a_center_at_its_first_task(cluster: Cluster, tmp_path: Path, without_numba: None):
    (tmp_path / "train.py").write_text(textwrap.dedent(COUNT))
    srun = [
        "timeout",
        "50",
        "srun",
        "-w",
        "h1,h2",
        "-n",
        "4",
        "--ntasks-per-node=2",
        "--export=ALL,MANIPLE_RULE=downpour",
    ]
    said = cluster.on(0, *srun, sys.executable, "train.py", "0.05", folder=tmp_path)
    assert "maniple: srun has started 4 workers; worker 0 hosts them" in said
    found = sorted(re.findall(r"\[(\d)/4 on (h\d), near (True|False): train\]", said))
    assert [(rank, near) for rank, _, near in found] == [
        ("0", "True"),
        ("1", "True"),
        ("2", "False"),
        ("3", "False"),
    ], said
    assert len({node for _, node, _ in found}) == 2
    run = the_run(tmp_path)
    assert re.fullmatch(r"srun-\d+-0", run.name)
    assert json.loads((run / "run.json").read_text())["exit_code"] == 0, "it has ended before the step"
    rows = [row for path in (run / "events").glob("worker-*.jsonl") for row in read_events(path)]
    assert Counter(i for row in rows if row["event"] == "trained" for i in row["samples"]) == Counter(range(120))
    assert load_file(run / "center" / "center-0.safetensors")["seen"].tolist() == [1.0] * 120
    assert not list(cluster.memory(1).iterdir())


def test_center_of_a_step_that_is_cancelled_is_saved(cluster: Cluster, tmp_path: Path, without_numba: None):
    (tmp_path / "train.py").write_text(textwrap.dedent(COUNT))
    srun = ["timeout", "80", "srun", "-J", "cancelled", "-w", "h1,h2", "-n", "2", sys.executable, "train.py", "1"]
    going = cluster.start(0, *srun, folder=tmp_path, output=tmp_path / "said")
    await_((tmp_path / "runs" / "last").exists)
    run = the_run(tmp_path)
    for rank in range(2):
        path = run / "events" / f"worker-{rank}.jsonl"
        await_(lambda path=path: path.exists() and any(row["event"] == "trained" for row in read_events(path)))
    cluster.on(0, "scancel", "--name=cancelled")
    assert going.wait(PATIENCE_S) != 0
    await_(lambda: json.loads((run / "run.json").read_text()).get("exit_code"))
    assert json.loads((run / "run.json").read_text())["exit_code"] in {1, 130}
    assert 0 < load_file(run / "center" / "center-0.safetensors")["seen"].sum() < 120
    await_(lambda: not list(cluster.memory(1).iterdir()))
