"""Other machines by ssh: reached, furnished as this one, and able to reach it?"""

import hashlib
import json
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maniple.doctor import probe
from maniple.doctor.case import Case
from maniple.doctor.finding import Finding, fine, grave, warning
from maniple.doctor.host import differ
from maniple.doctor.machine import own_address
from maniple.doctor.visit import within
from maniple.launch.ssh import ssh_command
from maniple.record.versions import versions

_NOT_FOUND = {126, 127}  # exit codes of a shell
_LEAST_MB = 256.0


@dataclass
class Far:
    """What was learned of one machine."""

    host: str
    told: dict[str, Any] = field(default_factory=dict[str, Any])  # empty: nothing came back
    exit_code: int | None = None
    words: str = "no answer"  # of ssh, or of the shell there
    way: str = ""  # why its port was not reached from here


def look_at_ssh(case: Case) -> Iterable[Finding]:
    """`ssh HOST` without a question, and the same Python there."""
    if shutil.which("ssh") is None:
        yield grave("there is no ssh in PATH", limit="--hosts needs it", fix="Install an OpenSSH client.")
    for far in _all(case):
        if far.told:
            yield fine(f"{far.host} is reached by ssh: {far.told['node']}")
        elif far.exit_code in _NOT_FOUND:
            fix = "Install the same environment at the same path, or use a file system that both share."
            yield grave(f"{far.host} has no {sys.executable}", limit="workers run this very Python", fix=fix)
        else:
            fix = (
                f"`ssh -o BatchMode=yes {far.host} true` must work: keys, names and ~/.ssh/config are ssh's own matter."
            )
            yield grave(f"{far.host} is not reached by ssh: {far.words}", limit=f"limit {case.wait_s:g} s", fix=fix)


def compare_installs(case: Case) -> Iterable[Finding]:
    """Versions there and here."""
    mine = versions()
    for far in _told(case):
        theirs: dict[str, str] = far.told["versions"]
        differing = [name for name in mine if differ(name, mine[name], theirs.get(name, ""))]
        for name in differing:
            kind = grave if name == "maniple" or (name == "numpy" and name not in theirs) else warning
            seen = f"{far.host} has {name} {theirs[name]}" if name in theirs else f"{far.host} has no {name}"
            yield kind(seen, limit=f"{mine[name]} is here", fix=f"Install {name} {mine[name]} there.")
        if not differing:
            yield fine(f"{far.host} has the same Python and libraries")


def compare_folders(case: Case) -> Iterable[Finding]:
    """The working folder and the script, at the same paths."""
    folder, script = Path.cwd(), case.script
    for far in _told(case):
        if not far.told["has_folder"]:
            fix = "Make it there, or work in a folder of a shared file system."
            yield grave(f"{far.host} has no folder {folder}", limit="workers start in it", fix=fix)
        elif script is not None and far.told["script"] != _digest(script):
            what = "another" if far.told["script"] else "no"
            fix = f"Copy it: `scp {script} {far.host}:{folder / script}`."
            yield grave(f"{far.host} has {what} {script} in {folder}", limit="workers run the one there", fix=fix)
        else:
            yield fine(f"{far.host} has {folder}" + (f" and the same {script}" if script else ""))


def look_back(case: Case) -> Iterable[Finding]:
    """The way from there to this machine, by the name that workers are told: needed always."""
    name, own = socket.gethostname(), own_address()
    for far in _told(case):
        failed = far.told["met"][name]
        if not failed:
            yield fine(f"{far.host} reaches this machine as {name}")
        elif own is not None and not far.told["met"].get(own, "not tried"):
            fix = f"Add --listen {own}:0, or name {name} in the name server."
            yield grave(f"{far.host} does not reach this machine as {name}: {failed}", limit=f"{own} works", fix=fix)
        else:
            tried = ", ".join(far.told["met"])
            fix = "Let a firewall here pass connections to the port of --listen, and choose an address that both see."
            yield grave(f"{far.host} does not reach this machine: {failed}", limit=f"tried {tried}", fix=fix)


def look_there(case: Case) -> Iterable[Finding]:
    """The way to a port there: needed where workers meet each other (--circle torch)."""
    for far in _told(case):
        if not far.way:
            yield fine(f"a port of {far.host} is reached from here")
        else:
            fix = "Rules of the center need no such way. For those of the circle let ports 20000 to 29999 in."
            yield warning(f"no port of {far.host} is reached from here: {far.way}", limit="circles need it", fix=fix)


def look_at_nodes(case: Case) -> Iterable[Finding]:
    """Memory and cores there."""
    for far in _told(case):
        cores, memory_mb = far.told["cores"], far.told["memory_mb"]
        seen = f"{far.host} has {cores} cores, and {memory_mb:,.0f} MB free in /dev/shm"
        if cores < case.workers:
            limit = f"-n {case.workers} workers on each host"
            yield warning(seen, limit=limit, fix="Start fewer, unless they wait for GPUs most of the time.")
        elif memory_mb < _LEAST_MB:
            limit = f"data loaders and feeds of a worker like {_LEAST_MB:.0f} MB"
            yield warning(seen, limit=limit, fix="Enlarge it: `mount -o remount,size=8G /dev/shm`.")
        else:
            yield fine(seen)


def _all(case: Case) -> list[Far]:
    return case.once("hosts", _asked) if shutil.which("ssh") else []


def _told(case: Case) -> list[Far]:
    return [far for far in _all(case) if far.told]


def _asked(case: Case) -> list[Far]:
    """Ask all hosts at the same time."""
    found = [Far(host) for host in case.hosts]
    word = secrets.token_hex(16)
    with _meeting(word) as port:
        threads = [threading.Thread(target=_ask, args=(case, far, port, word), daemon=True) for far in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(8 * case.wait_s)
    return found


def _ask(case: Case, far: Far, port: int, word: str) -> None:
    asked = {
        "folder": str(Path.cwd()),
        "script": str(case.script or ""),
        "meet": [each for each in (socket.gethostname(), own_address()) if each],
        "port": port,
        "word": word,
        "wait_s": case.wait_s,
    }
    source = f"{Path(probe.__file__).read_text()}\nmain({asked!r})\n"
    command = ssh_command(
        far.host, [sys.executable, "-P", "-c", "import sys; exec(sys.stdin.read())"], connect_s=case.wait_s
    )  # -P: files of the home there hide no libraries; its own site is seen, as a worker sees it
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin and process.stdout and process.stderr
        output = process.stdout
        try:
            with suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(source)
            line = within(5 * case.wait_s, lambda: _line_with(probe.MARK, output))
            if line:
                far.told = json.loads(line.removeprefix(probe.MARK))
                far.way = probe.meet(far.host.rpartition("@")[2], far.told["port"], word, case.wait_s)
            far.exit_code = process.wait(2 * case.wait_s)
            far.words = " ".join(process.stderr.read().split()) or f"exit code {far.exit_code}"
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            far.words = str(error)
        finally:
            process.kill()


def _line_with(mark: str, lines: Iterable[str]) -> str:
    """The first line that begins with `mark`: before it a shell's own files may have printed something."""
    return next((line for line in lines if line.startswith(mark)), "")


@contextmanager
def _meeting(word: str) -> Generator[int]:
    """A port of this machine, open for the length of a `with` block, at which `word` is said to everybody."""
    with socket.create_server(("", 0)) as listener:

        def greet() -> None:
            with suppress(OSError):  # closed: the meeting is over
                while True:
                    link, _ = listener.accept()
                    with suppress(OSError), link:
                        link.sendall(word.encode())

        threading.Thread(target=greet, name="maniple-doctor-meeting", daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def _digest(script: Path) -> str:
    return hashlib.sha256(script.read_bytes()).hexdigest()
