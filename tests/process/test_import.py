"""`import maniple` stays light."""

import subprocess
import sys


def test_importing_maniple_imports_no_framework_compiler_or_terminal():
    heavy = {"torch", "numba", "rich", "click", "safetensors", "yaml"}
    code = f"import sys, maniple; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_collective_calls_of_arrays_import_no_framework():
    code = (
        "import sys, numpy; from maniple.collectives.api import CollectiveCalls; "
        "from maniple.collectives.engines import SingleWorker; "
        "CollectiveCalls(SingleWorker()).all_reduce(numpy.ones(2)); "
        "assert not {'torch', 'numba', 'mpi4py'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
