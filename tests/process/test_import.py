"""`import maniple` stays light."""

import subprocess
import sys


def test_importing_maniple_imports_no_framework_compiler_or_terminal():
    heavy = {"torch", "numba", "rich", "click", "safetensors", "yaml"}
    code = f"import sys, maniple; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
