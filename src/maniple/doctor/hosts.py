"""Checks of other machines by ssh: can they be reached, do they have the same software, can they reach this one?

`maniple doctor --json --peer` runs there (`answer`), with the Python that workers would use. It reads one line of JSON,
prints one line about that machine, and then waits for the doctor to connect to a port there. The request has:

    folder, script      where workers would run, and what
    workers, model_mb   as for the doctor here
    addresses, port     of a port that the doctor has opened
    word                sent by either side, so that the other knows whom it has reached
    wait_s              the timeout of each connection
"""

import hashlib
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from maniple.doctor.checks import Case, Checks, Finding, examine, fine, grave, warning
from maniple.doctor.machine import checks as machine_checks
from maniple.doctor.machine import own_address
from maniple.doctor.remote_host import differ, within
from maniple.job import PORTS
from maniple.launch.remote_workers import ssh_command
from maniple.record.folder import versions

checks = Checks("hosts")
_MARK = "maniple doctor: "  # starts the report; a shell's own files may print lines before it
_NOT_FOUND = {126, 127}  # exit codes of a shell
_PEER = "from maniple.cli import main; main()"  # `maniple` itself may not be in the PATH of an ssh session
_NO_MANIPLE = "No module named 'maniple'"
_PEER_CHECKS = {"memory", "descriptors", "cores", "threads"}  # those that need no import, name or run folder
_NO_PEER = "No such option"  # what an older `maniple doctor` says


@dataclass
class RemoteMachine:
    """What was learned about one machine.

    Attributes:
        report: what `answer` printed there; empty if nothing came back.
        error: what ssh or the shell there said.
        unreached: why a port there was not reached from here.
    """

    host: str
    report: dict[str, Any] = field(default_factory=dict[str, Any])
    exit_code: int | None = None
    error: str = "no answer"
    unreached: str = ""


@checks("far ssh")
def check_ssh(case: Case) -> Iterable[Finding]:
    """`ssh HOST` works without a question, and the same Python is there."""
    if shutil.which("ssh") is None:
        yield grave("there is no ssh in PATH", limit="--hosts needs it", fix="Install an OpenSSH client.")
    for machine in _machines(case):
        if machine.report:
            yield fine(f"{machine.host} is reached by ssh: {machine.report['node']}")
        elif machine.exit_code in _NOT_FOUND:
            fix = "Install the same environment at the same path, or use a file system that both share."
            yield grave(f"{machine.host} has no {sys.executable}", limit="workers run this very Python", fix=fix)
        elif _NO_MANIPLE in machine.error or _NO_PEER in machine.error:
            yield fine(f"{machine.host} is reached by ssh")  # `compare_installs` has the rest
        else:
            fix = f"Make `ssh -o BatchMode=yes {machine.host} true` work: check keys, names and ~/.ssh/config."
            seen = f"{machine.host} is not reached by ssh: {machine.error}"
            yield grave(seen, limit=f"limit {case.wait_s:g} s", fix=fix)


@checks("far versions")
def compare_installs(case: Case) -> Iterable[Finding]:
    """The same versions there and here."""
    mine = versions()
    for machine in _machines(case):
        host, fix = machine.host, f"Install maniple {mine['maniple']} there."
        if _NO_MANIPLE in machine.error:
            yield grave(f"{host} has no maniple for {sys.executable}", limit=f"{mine['maniple']} is here", fix=fix)
        elif _NO_PEER in machine.error:
            yield grave(f"{host} has another version of maniple", limit=f"{mine['maniple']} is here", fix=fix)
    for machine in _reporting(case):
        theirs: dict[str, str] = machine.report["versions"]
        differing = [name for name in mine if differ(name, mine[name], theirs.get(name, ""))]
        for name in differing:
            kind = grave if name == "maniple" or (name == "numpy" and name not in theirs) else warning
            seen = f"{machine.host} has {name} {theirs[name]}" if name in theirs else f"{machine.host} has no {name}"
            yield kind(seen, limit=f"{mine[name]} is here", fix=f"Install {name} {mine[name]} there.")
        if not differing:
            yield fine(f"{machine.host} has the same Python and libraries")


@checks("far folder")
def compare_folders(case: Case) -> Iterable[Finding]:
    """The working folder and the script exist at the same paths."""
    folder, script = Path.cwd(), case.script
    for machine in _reporting(case):
        if not machine.report["has_folder"]:
            fix = "Create it there, or work in a folder of a shared file system."
            yield grave(f"{machine.host} has no folder {folder}", limit="workers start in it", fix=fix)
        elif script is not None and machine.report["script"] != _digest(script):
            what = "another" if machine.report["script"] else "no"
            fix = f"Copy it: `scp {script} {machine.host}:{folder / script}`."
            yield grave(f"{machine.host} has {what} {script} in {folder}", limit="workers run the one there", fix=fix)
        else:
            yield fine(f"{machine.host} has {folder}" + (f" and the same {script}" if script else ""))


@checks("way back")
def check_way_back(case: Case) -> Iterable[Finding]:
    """That machine can connect to this one by the name that workers are given. Every run needs this."""
    name, own = socket.gethostname(), own_address()
    for machine in _reporting(case):
        reached: dict[str, str] = machine.report["reached"]
        if not (error := reached[name]):
            yield fine(f"{machine.host} reaches this machine as {name}")
        elif own is not None and not reached.get(own, "not tried"):
            fix = f"Add --listen {own}:0, or name {name} in the name server."
            yield grave(f"{machine.host} does not reach this machine as {name}: {error}", limit=f"{own} works", fix=fix)
        else:
            fix = "Let the firewall here pass connections to the port of --listen, and choose an address that both see."
            limit = f"tried {', '.join(reached)}"
            yield grave(f"{machine.host} does not reach this machine: {error}", limit=limit, fix=fix)


@checks("way there")
def check_way_there(case: Case) -> Iterable[Finding]:
    """This machine can connect to a port there. Only collectives (--collectives torch) need this."""
    for machine in _reporting(case):
        if not machine.unreached:
            yield fine(f"a port of {machine.host} is reached from here")
        else:
            fix = (
                "Rules with a center do not need it. For collectives, let the firewall there pass ports 20000 to 29999."
            )
            seen = f"no port of {machine.host} is reached from here: {machine.unreached}"
            yield warning(seen, limit="collectives need it", fix=fix)


@checks("far machine")
def check_machines(case: Case) -> Iterable[Finding]:
    """Memory, cores, threads and descriptors there, as `maniple doctor` finds them."""
    for machine in _reporting(case):
        for found in machine.report["findings"]:
            yield Finding(found["level"], f"{machine.host}: {found['seen']}", found["limit"], found["fix"])


def _machines(case: Case) -> list[RemoteMachine]:
    return case.once("hosts", _ask_all) if shutil.which("ssh") else []


def _reporting(case: Case) -> list[RemoteMachine]:
    return [machine for machine in _machines(case) if machine.report]


def _ask_all(case: Case) -> list[RemoteMachine]:
    """Ask all hosts at the same time."""
    machines = [RemoteMachine(host) for host in case.hosts]
    word = secrets.token_hex(16)
    with _greeter(word) as port:
        threads = [threading.Thread(target=_ask, args=(case, one, port, word), daemon=True) for one in machines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(8 * case.wait_s)
    return machines


def _ask(case: Case, machine: RemoteMachine, port: int, word: str) -> None:
    request = {
        "folder": str(Path.cwd()),
        "script": str(case.script or ""),
        "workers": case.workers,
        "model_mb": case.model_mb,
        "addresses": [each for each in (socket.gethostname(), own_address()) if each],
        "port": port,
        "word": word,
        "wait_s": case.wait_s,
    }
    # -P: files in the home there must not hide libraries; its own site packages are used, as workers use them.
    there = [sys.executable, "-P", "-c", _PEER, "doctor", "--json", "--peer"]
    command, pipe = ssh_command(machine.host, there, connect_s=case.wait_s), subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin and process.stdout and process.stderr
        output = process.stdout
        try:
            with suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(json.dumps(request) + "\n")
            line = within(5 * case.wait_s, lambda: next((one for one in output if one.startswith(_MARK)), ""))
            if line:
                machine.report = json.loads(line.removeprefix(_MARK))
                host = machine.host.rpartition("@")[2]
                machine.unreached = _try_to_reach(host, machine.report["port"], word, case.wait_s)
            machine.exit_code = process.wait(2 * case.wait_s)
            machine.error = " ".join(process.stderr.read().split()) or f"exit code {machine.exit_code}"
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            machine.error = str(error)
        finally:
            process.kill()


def _try_to_reach(host: str, port: int, word: str, wait_s: float) -> str:
    """Connect and receive `word`; returns "" if that worked, or what went wrong."""
    try:
        with socket.create_connection((host, port), wait_s) as connection:
            connection.settimeout(wait_s)
            received = connection.recv(len(word), socket.MSG_WAITALL).decode(errors="replace")
            return "" if received == word else "another service answers there"
    except OSError as error:
        return str(error)


def _digest(path: Path) -> str:
    """The SHA-256 of a file; "" if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


@contextmanager
def _greeter(word: str) -> Generator[int]:
    """A port of this machine, open for the length of a `with` block, that sends `word` to everybody who connects."""
    with socket.create_server(("", 0)) as listener:

        def greet() -> None:
            with suppress(OSError):  # closed at the end of the block
                while True:
                    connection, _ = listener.accept()
                    with suppress(OSError), connection:
                        connection.sendall(word.encode())

        threading.Thread(target=greet, name="maniple-doctor-listener", daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def answer() -> None:
    """Report on this machine to the doctor at the other end of standard input and output."""
    request = json.loads(sys.stdin.readline())
    case = Case(workers=request["workers"], model_mb=request["model_mb"], wait_s=request["wait_s"])
    address = {"port": request["port"], "word": request["word"], "wait_s": request["wait_s"]}
    checked = examine(case, (check for check in machine_checks if check.name in _PEER_CHECKS))
    with _listen_for_doctor() as listener:
        report = {
            "node": os.uname().nodename,
            "versions": versions(),
            "has_folder": Path(request["folder"]).is_dir(),
            "script": _digest(Path(request["folder"], request["script"])) if request["script"] else "",
            "reached": {host: _try_to_reach(host, **address) for host in request["addresses"]},
            "port": listener.getsockname()[1],
            "findings": [asdict(finding) for finding in checked],
        }
        print(_MARK + json.dumps(report), flush=True)
        listener.settimeout(request["wait_s"])
        with suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.sendall(request["word"].encode())


def _listen_for_doctor() -> socket.socket:
    """A port of those that workers use: a firewall may let in these and no others."""
    for port in random.sample(PORTS, 100):
        with suppress(OSError):
            return socket.create_server(("", port))
    return socket.create_server(("", 0))
