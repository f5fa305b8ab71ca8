"""Checks of this machine: memory, cores, threads, descriptors, disk, clock, name, libraries and GPUs."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from maniple.doctor.checks import Case, Checks, Finding, fine, grave, warning
from maniple.environment import THREAD_VARIABLES, shared_memory
from maniple.environment.variables import binding_variables, values_of, visible_gpus
from maniple.errors import InvalidArgument
from maniple.launch.cores import granted_cores, threads_each
from maniple.memory.segment import abandoned_segments, missing_run_folder, salvage_hint
from maniple.record.folder import versions
from maniple.text import count

checks = Checks("machine")
_MB = 1e6
_LEAST_MB, _ROOM_MB = 1.0, 256.0
_DESCRIPTORS = 32  # of the launcher, or of the server
_OF_WORKER = 4  # its log, its events and its process there, or its connections here
_ENLARGE = (
    "Enlarge it (`mount -o remount,size=8G /dev/shm`; in a container `--shm-size=8g`), remove what fills it, or set "
    "MANIPLE_SHM to another folder that is held in memory."
)
_IMPORT_S = 60.0
_WANTED = {
    "torch": "models of torch need it: pip install 'maniple[torch]'",
    "numba": "exchanges are slower without it: pip install 'maniple[fast]'",
}

# In a subprocess: an import may take long, crash, or bind its process to some cores.
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


@checks("versions")
def check_versions(case: Case) -> Iterable[Finding]:
    """Python and the libraries: there, and fit to be imported."""
    known = versions()
    yield fine(", ".join(f"{name} {version}" for name, version in known.items()) + f" ({sys.executable})")
    errors = case.once("imported", imported)["errors"]
    for name, error in errors.items():
        if name == "all":
            yield grave(
                f"libraries cannot be imported: {error}", limit="limit 60 s", fix="Import them by hand, one by one."
            )
        elif name in known or name == "numpy":
            kind = warning if name == "numba" else grave  # without numba, exchanges are slower
            fix = f"Install it again (`{sys.executable} -m pip install --force-reinstall {name}`)."
            yield kind(f"{name} cannot be imported: {error}", limit="it is installed", fix=fix)
        else:
            yield fine(f"there is no {name}; {_WANTED[name]}")


@checks("memory", is_quick=True)
def check_memory(case: Case) -> Iterable[Finding]:
    """Shared memory has room for a center and for the buffers of collectives."""
    root = shared_memory()
    if not root.is_dir() or not os.access(root, os.W_OK | os.X_OK):
        fix = "Make it a folder that you may write to, or set MANIPLE_SHM to another one that is held in memory."
        yield grave(f"{root} cannot be written to", limit="centers are made there", fix=fix)
        return
    space = os.statvfs(root)
    free_mb = space.f_bavail * space.f_frsize / _MB
    seen = f"{root} has {free_mb:,.0f} MB free of {space.f_blocks * space.f_frsize / _MB:,.0f}"
    slots_mb = (1 + case.workers) * case.model_mb
    if free_mb < max(_LEAST_MB, case.model_mb):
        yield grave(seen, limit=f"the center needs {max(_LEAST_MB, case.model_mb):,.0f} MB", fix=_ENLARGE)
    elif free_mb < slots_mb:
        limit = f"a synchronous rule needs {slots_mb:,.0f} MB for {case.workers} workers"
        yield warning(seen, limit=limit, fix=_ENLARGE)
    elif not case.model_mb and free_mb < _ROOM_MB:
        limit = f"a model of 60 million parameters needs {_ROOM_MB:.0f} MB"
        fix = f"`maniple doctor -n {case.workers} --model-size MB` tells whether yours fits. {_ENLARGE}"
        yield warning(seen, limit=limit, fix=fix)
    else:
        yield fine(seen)


@checks("leftovers")
def check_leftovers(_: Case) -> Iterable[Finding]:
    """Centers of runs whose hosts were killed."""
    for path in (found := abandoned_segments(shared_memory())):
        size_mb = sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file()) / _MB
        limit = "its host was killed"
        fix = "`maniple run --resume RUN` resumes it; any other run saves it to its folder and frees the memory."
        if (run := missing_run_folder(path)) is not None:
            limit, fix = f"its host was killed, and its run folder {run} is gone", salvage_hint(path)
        yield warning(f"{path} of a dead run holds {size_mb:,.1f} MB", limit=limit, fix=fix)
    if not found:
        yield fine("nothing is left of dead runs")


@checks("descriptors", is_quick=True)
def check_descriptors(case: Case) -> Iterable[Finding]:
    """How many files and connections a process may have open."""
    unlimited = resource.RLIM_INFINITY
    soft, hard = (sys.maxsize if limit == unlimited else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    need = _DESCRIPTORS + _OF_WORKER * case.workers
    seen = f"a process may open {soft:,} files"
    fix = f"Write `ulimit -n {min(hard, max(4096, need))}` before."
    if hard < max(1024, need):
        fix = f"The system allows {hard:,} at most: raise it in /etc/security/limits.conf, and log in again."
    if soft < need:
        yield grave(seen, limit=f"the host of {count(case.workers, 'worker')} needs {need:,}", fix=fix)
    elif soft < 1024:
        yield warning(seen, limit="below 1,024, the usual least", fix=fix)
    else:
        yield fine(seen)


@checks("cores", is_quick=True)
def check_cores(case: Case) -> Iterable[Finding]:
    """The cores that this process may use: all of the machine's, and enough for the workers."""
    mine, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    seen = f"{mine} of {all_cores} cores may be used"
    if mine == 1 < all_cores:
        fix = (
            "Something has bound this shell: taskset, numactl, a batch system that was asked for one core "
            "(--cpus-per-task), or a program that imported an OpenMP library before. Start from a fresh shell."
        )
        yield warning(seen, limit="all workers would share it", fix=fix)
    elif case.workers > mine:
        fix = "Start fewer workers, unless they wait for GPUs most of the time."
        yield warning(seen, limit=f"{case.workers} workers share them, and none has its own cores", fix=fix)
    else:
        yield fine(seen)
    granted = granted_cores()
    if granted is not None and granted < min(mine, case.workers):
        limit = f"the control group grants the time of {granted:.2g} of {mine} cores"
        fix = "Raise the limit (of a container: --cpus), or start fewer workers."
        yield warning(f"{count(case.workers, 'worker')} would be slowed down", limit=limit, fix=fix)


@checks("threads", is_quick=True)
def check_threads(case: Case) -> Iterable[Finding]:
    """Threads of numeric libraries: those of all workers together should not be more than the cores."""
    cores = len(os.sched_getaffinity(0))
    share = threads_each(cores, case.workers)
    asked = {name: value for name, value in values_of(THREAD_VARIABLES).items() if value.isdigit()}
    many = {name: value for name, value in asked.items() if int(value) > share}
    if many:
        said = ", ".join(f"{name}={value}" for name, value in many.items())
        fix = f"Unset it: `maniple run` then gives each worker {share}; or write {next(iter(many))}={share}."
        limit = f"{count(cores, 'core')} for {count(case.workers, 'worker')}, {share} each"
        yield warning(f"each worker starts more threads than its share of cores: {said}", limit=limit, fix=fix)
    else:
        yield fine(f"{count(share, 'thread')} for each of {count(case.workers, 'worker')}, on {count(cores, 'core')}")


@checks("binding")
def check_binding(case: Case) -> Iterable[Finding]:
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


@checks("devices")
def check_gpus(case: Case) -> Iterable[Finding]:
    """The GPUs that torch sees, against --devices."""
    gpus = case.once("imported", imported).get("gpus")
    seen = "torch is not there to look for GPUs" if gpus is None else f"torch sees {gpus} GPUs"
    missing = [device for device in case.devices if _gpu_number(device) >= (gpus or 0)]
    if missing:
        masked = f"CUDA_VISIBLE_DEVICES={visible_gpus()}" if visible_gpus() is not None else "no variable hides any"
        fix = "Look at `nvidia-smi`, at the build of torch (`torch.version.cuda`), and at what the queue has given."
        yield grave(seen, limit=f"--devices asks for {', '.join(missing)}; {masked}", fix=fix)
    else:
        yield fine(seen)


@checks("disk", is_quick=True)
def check_disk(case: Case) -> Iterable[Finding]:
    """Room for run folders."""
    folder = case.runs.absolute()
    while not folder.exists():
        folder = folder.parent
    free_mb = shutil.disk_usage(folder).free / _MB
    need_mb = max(100.0, 4 * case.model_mb)
    seen = f"{folder} has {free_mb:,.0f} MB free"
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        yield grave(f"{folder} cannot be written to", limit="run folders are made there", fix="Choose one by --runs.")
    elif free_mb < need_mb:
        fix = "Remove old runs, choose another place by --runs, or keep fewer snapshots (--keep 1)."
        yield warning(seen, limit=f"snapshots and events need {need_mb:,.0f} MB", fix=fix)
    else:
        yield fine(seen)


@checks("clock", is_quick=True)
def check_clock(_: Case) -> Iterable[Finding]:
    """The time of day: not before maniple was installed. Other machines' clocks are compared with it by HOST:PORT."""
    now = time.time()
    installed = Path(__file__).stat().st_mtime
    seen = f"the clock says {time.strftime('%Y-%m-%d %H:%M:%S %z', time.localtime(now))}"
    if now < installed - 86_400:
        fix = "Set it (`chronyc makestep`, `timedatectl set-ntp true`): certificates and timestamps depend on it."
        yield warning(seen, limit="maniple was installed after that", fix=fix)
    else:
        yield fine(seen)


@checks("name", is_quick=True)
def check_name(_: Case) -> Iterable[Finding]:
    """The name by which workers of other machines find this one. What it means to them cannot be seen from here."""
    name, listen = socket.gethostname(), f"--listen {own_address() or '10.0.0.7'}:0"
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        fix = f"Add it to /etc/hosts or the name server, or give an address: {listen}."
        yield warning(
            f"this machine's name {name} does not resolve: {error}", limit="workers elsewhere are given it", fix=fix
        )
        return
    seen = f"this machine's name {name} is {', '.join(found)}"
    if name.partition(".")[0] == "localhost":
        fix = f"Name it (`hostnamectl set-hostname`), or give an address: {listen}."
        yield warning(seen, limit="to others it means themselves", fix=fix)
    elif all(address.startswith("127.") or address == "::1" for address in found):
        yield fine(f"{seen} to itself, as is usual; others must find another address by it, or need {listen}")
    else:
        yield fine(seen)


def own_address() -> str | None:
    """The address from which this machine would talk to others; nothing is sent to find it out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        try:
            link.connect(("192.0.2.1", 9))  # TEST-NET-1, reserved for documentation
        except OSError:
            return None
        address = str(link.getsockname()[0])
    return None if address.startswith("127.") else address


def imported(_: Case) -> dict[str, Any]:
    """The results of the imports; only `errors` if the subprocess failed."""
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


def _gpu_number(device: str) -> int:
    """The number of a GPU; -1 for another device."""
    kind, _, number = device.partition(":")
    return -1 if kind != "cuda" else int(number) if number.isdigit() else 0
