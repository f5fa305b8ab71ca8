"""torchrun on two machines, of which one is lost, with the host: what is left goes on with the run."""

import json
import re
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

from safetensors.numpy import load_file

from tests.cluster.slurm import Cluster
from tests.conftest import require
from tests.waiting import PATIENCE_S, await_

TRAINING = """
    import sys, time
    sys.modules["numba"] = None
    import numpy as np, maniple
    worker = maniple.join()
    model = {"seen": np.zeros(600)}
    replica = worker.share(model, rule=maniple.Downpour())
    begin = model["seen"].sum()
    for batch in worker.sampler(600, chunk=10).batches(5):
        model["seen"][batch] += 1
        replica.step()
        time.sleep(0.3 if worker.world == 2 else 0)
    print(f"[{worker.rank}/{worker.world} on {worker.node} from {begin:.0f}]", flush=True)
"""


def test_one_machine_goes_on_where_that_of_the_host_is_gone(cluster: Cluster, tmp_path: Path):
    require("torch", find_spec("torch") is not None, "no torch")
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINING))
    torchrun = (
        "env", "MANIPLE_SNAPSHOT_EVERY=0.5", "MANIPLE_HOST_DEADLINE=1", "OMP_NUM_THREADS=1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2",
        "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "shrinking", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"{cluster.address(2)}:29400", "--rdzv-conf",
        "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3", "train.py",
    )  # fmt: skip
    second = cluster.start(2, *torchrun, folder=tmp_path, output=tmp_path / "second")
    first = cluster.start(1, *torchrun, folder=tmp_path, output=tmp_path / "first")
    run = tmp_path / "runs" / "torchrun-shrinking"
    await_(lambda: sorted(run.glob("center/snapshot-*")))
    assert json.loads((run / "host.json").read_text())["node"] == "h1"
    cluster.off(1)  # for good
    assert second.wait(PATIENCE_S) == 0, (tmp_path / "second").read_text()
    assert first.wait(PATIENCE_S) != 0
    (begin,) = re.findall(r"\[0/1 on h2 from (\d+)\]", (tmp_path / "second").read_text())
    assert int(begin) > 0, "it goes on from the last snapshot"
    about = json.loads((run / "run.json").read_text())
    assert about["exit_code"] == 0, "the one that is left is all that there were"
    assert load_file(run / "center" / "center-0.safetensors")["seen"].min() >= 1
