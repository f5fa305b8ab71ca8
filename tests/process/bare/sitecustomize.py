"""Read by every interpreter that has this folder in PYTHONPATH: it finds no numba, as without the extra `fast`.

And torch finds no compiler of its own. Every optimizer loads that, 1.5 s of a core's time, only to say that it does not
want to be compiled, and `torch.use_deterministic_algorithms` loads the rest of it, to say the same.
"""

import sys
import types

sys.modules["numba"] = None  # type: ignore[assignment] - so that it counts as not installed
modules = {name: types.ModuleType(name) for name in ("torch._dynamo", "torch._inductor", "torch._inductor.config")}
modules["torch._dynamo"].__dict__.update(disable=lambda function=None, *_, **__: function, graph_break=lambda: None)
modules["torch._inductor"].__dict__.update(config=modules["torch._inductor.config"])
sys.modules.update(modules)
