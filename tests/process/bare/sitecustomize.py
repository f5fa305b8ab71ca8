"""Read by every interpreter that has this folder in PYTHONPATH: it finds no numba, as without the extra `fast`.

And torch finds no compiler of its own. Every optimizer loads that, 1.5 s of a core's time, to say that it does not want
to be compiled.
"""

import sys
import types

sys.modules["numba"] = None  # type: ignore[assignment] - so that it counts as not installed
compiler = types.ModuleType("torch._dynamo")
compiler.disable = lambda function=None, *_, **__: function  # type: ignore[attr-defined]
compiler.graph_break = lambda: None  # type: ignore[attr-defined]
sys.modules["torch._dynamo"] = compiler
