"""A process that a worker has started is no second worker; that of a wrapper may be the worker."""

import os
import subprocess
import sys

import pytest

from tests.process.conftest import MANIPLE
from tests.waiting import PATIENCE_S

PARENT = """
    import multiprocessing, os, subprocess, sys
    import numpy as np
    import maniple

    def attempt(where):
        try:
            maniple.join()
        except maniple.ManipleError as error:
            print(f"{where} refused: {error}", flush=True)
        else:
            print(f"{where} has joined", flush=True)

    if __name__ == "__main__":
        worker = maniple.join()
        params = {"w": np.zeros(4)}
        replica = worker.share(params)
        attempt("parent")
        if worker.rank == 0:
            code = "import maniple\\nmaniple.join()"
            child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            print("script", child.returncode, child.stderr.replace("\\n", " "), flush=True)
            spawned = multiprocessing.get_context("spawn").Process(target=attempt, args=("spawned",))
            spawned.start()
            spawned.join()
            if os.fork() == 0:
                attempt("forked")
                os._exit(0)
            os.wait()
        for _ in range(5):
            gradients = {"w": np.ones(4)}
            replica.reduce(gradients) if worker.world > 1 and replica.rule.averages_gradients else None
            params["w"] -= gradients["w"]
            replica.samples = 10
            replica.step()
"""


@pytest.mark.parametrize("rule", ["bsp", "easgd"])
def test_a_subprocess_of_a_worker_does_not_take_its_rank(run, without_numba, rule):
    done = run(PARENT, "-n", "2", "--rule", rule)
    assert done.process.returncode == 0, done.output
    log = done.log(0)
    for where in ("spawned", "forked"):
        assert f"{where} refused: process " in log, log
    assert "parent has joined" in log, "who calls join() once more is the same worker"
    script = next(line for line in log.splitlines() if line.startswith("script 1"))
    assert "worker 0" in script and "FileExistsError" not in script
    assert "MANIPLE_" in script and "in the parent" in script, "what to do"
    assert [done.events(rank, "progress")[-1]["samples"] for rank in (0, 1)] == [50, 50]
    assert [len(done.events(rank, "join")) for rank in (0, 1)] == [1, 1]


REAL = """
import sys, time
import numpy as np
import maniple
worker = maniple.join()
replica = worker.share({"w": np.zeros(4)})
print("real worker", worker.rank, flush=True)
if len(sys.argv) > 1:
    time.sleep(float(sys.argv[1]))
replica.step()
"""


def test_a_wrapper_may_start_the_process_that_joins_but_not_two_at_once(start, tmp_path, without_numba):
    (tmp_path / "real.py").write_text(REAL)
    wrapper = """
        import subprocess, sys, time
        command = [sys.executable, "real.py"]
        first = subprocess.Popen(["/bin/sh", "-c", f"{sys.executable} real.py 8"], stdout=subprocess.PIPE, text=True)
        assert first.stdout.readline().startswith("real worker"), "through a shell"
        second = subprocess.run(command, capture_output=True, text=True)
        print("second", second.returncode, second.stderr.replace("\\n", " "), flush=True)
        assert first.wait() == 0
        third = subprocess.run(command, capture_output=True, text=True)
        print("third", third.returncode, third.stdout, flush=True)
    """
    run = start(wrapper, "-n", "1")
    assert run.wait() == 0, run.output
    second, third = (
        next(line for line in run.log(0).splitlines() if line.startswith(who)) for who in ("second", "third")
    )
    assert second.startswith("second 1") and "worker 0" in second and "has joined and not left" in second
    assert third.startswith("third 0 real worker 0"), "after the first has left"


def test_a_subprocess_of_a_worker_of_torchrun_is_refused_and_a_run_of_its_own_is_not(tmp_path, without_numba):
    (tmp_path / "alone.py").write_text(
        "import maniple, numpy as np\nworker = maniple.join()\nworker.share({'w': np.zeros(2)}).step()\n"
        "print('world', worker.world)\n"
    )
    (tmp_path / "external.py").write_text(
        "import subprocess, sys, numpy as np, maniple\n"
        "worker = maniple.join()\n"
        "replica = worker.share({'w': np.zeros(4)})\n"
        "if worker.rank == 0:\n"
        "    child = subprocess.run([sys.executable, 'alone.py'], capture_output=True, text=True)\n"
        "    print('child', child.returncode, child.stderr.splitlines()[-1], flush=True)\n"
        f"    own = subprocess.run([{str(MANIPLE)!r}, 'run', '-n', '2', '--name', 'own', 'alone.py'],\n"
        "        capture_output=True, text=True)\n"
        "    print('own', own.returncode, own.stdout.count('world 2'), own.stderr, flush=True)\n"
        "replica.step()\n"
    )
    env = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MANIPLE_NAME": "external"}
    workers = [
        subprocess.Popen(
            [sys.executable, "external.py"],
            cwd=tmp_path,
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    outputs = [worker.communicate(timeout=PATIENCE_S)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    child, own = (next(line for line in outputs[0].splitlines() if line.startswith(who)) for who in ("child", "own"))
    assert child.startswith("child 1") and "worker 0" in child
    assert own.startswith("own 0 2"), own
