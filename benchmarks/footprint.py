"""Overhead of maniple in a script: seconds of import, and peak memory of a worker beyond the plain script.

The memory is that of a torch script with a model of 400 MB, with gradients, exchanges and `replica.center()`. It is
measured in worker 0 of two, because one worker has nothing to average under bsp, and includes the pages that the worker
shares with others. The overhead is given in multiples of the model.

    python benchmarks/footprint.py [--megabytes 400]
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import report

IMPORT = "import time; a = time.perf_counter(); import {}; print(time.perf_counter() - a)"
SCRIPT = """
import resource, sys, torch, maniple
size = int(float(sys.argv[1]) * 1e6 / 4)
model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(size // 8)) for _ in range(8)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
worker = maniple.join()
replica = worker.share(model, optimizer)
for _ in range(20):  # two exchanges at the default pace of 10 steps
    for p in model: p.grad = torch.ones_like(p)
    optimizer.step()
with replica.center():
    pass
if worker.rank == 0:
    print("PEAK", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def import_seconds(module: str, repeats: int = 15) -> float:
    """Return the median over new processes."""
    commands = [[sys.executable, "-c", IMPORT.format(module)]] * repeats
    return statistics.median(float(subprocess.check_output(command, timeout=60)) for command in commands)


def peak_bytes(megabytes: float, *rule: str) -> int:
    """Return the peak memory of the script: plain, or as worker 0 of two under a rule."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        start = [sys.executable]
        if rule:
            maniple = str(Path(sys.executable).with_name("maniple"))
            start = [maniple, "run", "-n", "2", "--runs", folder, "--rule", *rule]
        text = subprocess.check_output([*start, script, str(megabytes)], text=True, timeout=300)
    return int(text.partition("PEAK ")[2].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=400, help="size of the model in MB")
    megabytes = parser.parse_args().megabytes
    rows = [{"import": module, "seconds": import_seconds(module)} for module in ("numpy", "maniple")]
    report("import", "import, median of 15 fresh processes", rows)
    plain = peak_bytes(megabytes)
    rows = [{"script": "plain", "peak MB": plain / 1e6, "extra / model": 0.0}]
    for rule in ("bsp", "easgd", "asgd", "downpour"):
        peak = peak_bytes(megabytes, rule)
        rows.append({"script": rule, "peak MB": peak / 1e6, "extra / model": (peak - plain) / (megabytes * 1e6)})
    report("memory", f"peak memory of worker 0 of two, model of {megabytes:g} MB", rows)


if __name__ == "__main__":
    main()
