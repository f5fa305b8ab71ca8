"""The libraries: what can be imported, which devices torch sees, and whether the cores survive its import."""

import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from maniple.doctor.case import Case
from maniple.doctor.finding import Finding, fine, grave, warning
from maniple.errors import InvalidArgument
from maniple.place.machine import binding_variables, visible_gpus
from maniple.record.versions import versions

_IMPORT_S = 60.0
_NEEDED = ("numpy",)
_SLOWER = ("numba",)  # without it, things are
_WANTED = {
    "torch": "models of torch need it: pip install 'maniple[torch]'",
    "numba": "exchanges are slower without it: pip install 'maniple[fast]'",
}

# In a process of its own: an import may take long, crash, or bind the cores of whoever does it.
_IMPORTS = """
import importlib, json, os
found = {"cores": sorted(os.sched_getaffinity(0)), "errors": {}, "gpus": None}
for name in ("numpy", "numba", "torch"):
    try:
        importlib.import_module(name)
    except BaseException as error:
        found["errors"][name] = f"{type(error).__name__}: {error}"
if "torch" not in found["errors"]:
    import torch
    (torch.ones(64, 64) @ torch.ones(64, 64)).sum()
    found["gpus"] = torch.cuda.device_count()
found["after"] = sorted(os.sched_getaffinity(0))
print(json.dumps(found))
"""


def imported(_: Case) -> dict[str, Any]:
    """What became of the imports; `errors` alone if the process did not come to its end."""
    try:
        return ask_python(_IMPORTS)
    except InvalidArgument as error:
        return {"errors": {"all": str(error).rstrip(".")}}


def ask_python(source: str, *words: str) -> Any:
    """What another interpreter prints at last, as JSON."""
    command = [sys.executable, "-c", source, *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S, check=False)
    except subprocess.TimeoutExpired:
        raise InvalidArgument(
            f"imports have not ended within {_IMPORT_S:.0f} s. Is the file system slow? Try them by hand."
        ) from None
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise InvalidArgument(
            f"{sys.executable} ended with exit code {done.returncode}: {done.stderr[-300:]}"
        ) from None


def look_at_versions(case: Case) -> Iterable[Finding]:
    """Python and the libraries: there, and fit to be imported."""
    known = versions()
    yield fine(", ".join(f"{name} {version}" for name, version in known.items()) + f" ({sys.executable})")
    errors = case.once("imported", imported)["errors"]
    for name, error in errors.items():
        if name == "all":
            yield grave(
                f"libraries cannot be imported: {error}", limit="limit 60 s", fix="Import them by hand, one by one."
            )
        elif name in known or name in _NEEDED:
            kind = warning if name in _SLOWER else grave
            fix = f"Install it again (`{sys.executable} -m pip install --force-reinstall {name}`)."
            yield kind(f"{name} cannot be imported: {error}", limit="it is installed", fix=fix)
        else:
            yield fine(f"there is no {name}; {_WANTED[name]}")


def look_at_devices(case: Case) -> Iterable[Finding]:
    """The GPUs that torch sees, against --devices."""
    gpus = case.once("imported", imported).get("gpus")
    if gpus is None:
        seen, count = "torch is not there to look for GPUs", 0
    else:
        seen, count = f"torch sees {gpus} GPUs", int(gpus)
    missing = [device for device in case.devices if _number(device) >= count]
    if missing:
        masked = f"CUDA_VISIBLE_DEVICES={visible_gpus()}" if visible_gpus() is not None else "no variable hides any"
        fix = "Look at `nvidia-smi`, at the build of torch (`torch.version.cuda`), and at what the queue has given."
        yield grave(seen, limit=f"--devices asks for {', '.join(missing)}; {masked}", fix=fix)
    else:
        yield fine(seen)


def _number(device: str) -> int:
    """Which GPU a device is; -1: none."""
    kind, _, number = device.partition(":")
    return -1 if kind != "cuda" else int(number) if number.isdigit() else 0


def look_at_binding(case: Case) -> Iterable[Finding]:
    """The cores of a process after `import torch`: some OpenMP libraries take them away from who imports them."""
    found = case.once("imported", imported)
    if "after" not in found:
        return
    before, after = len(found["cores"]), len(found["after"])
    if found["after"] == found["cores"]:
        yield fine(f"after `import torch` a process keeps its {before} cores")
        return
    causes = ", ".join(f"{name}={value}" for name, value in binding_variables().items()) or "no variable says so"
    names = " ".join(binding_variables() or ["OMP_PROC_BIND"])
    fix = f"`unset {names}`; `maniple run --bind` gives each worker its cores, and its data loaders keep them."
    yield warning(f"after `import torch` a process has {after} of its {before} cores", limit=causes, fix=fix)
