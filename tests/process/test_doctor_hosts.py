"""The doctor at hosts, run folders and other machines: what keeps a worker out is found and named."""

import contextlib
import http.server
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from maniple.record.folder import versions
from maniple.wire.auth import authenticate_client
from maniple.wire.frames import Stream
from maniple.wire.messages import Welcome
from tests.doctoring import assert_found, doctor, grave, looked
from tests.waiting import PATIENCE_S, await_, is_gone

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("without_numba")]


# A host


def test_a_name_that_does_not_resolve_is_found():
    code, found = doctor("nowhere.invalid:29400")
    assert code == 1
    assert_found(found, "address", "grave", "nowhere.invalid does not resolve", "/etc/hosts")


def test_a_closed_port_is_found():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code, found = doctor(f"127.0.0.1:{port}")
    assert code == 1
    assert grave(found) == {"port"}
    assert_found(found, "port", "grave", "connection refused", "--listen 0.0.0.0:PORT")


def test_a_host_that_says_nothing_is_found():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code, found = doctor("--timeout", "0.5", f"127.0.0.1:{silent.getsockname()[1]}")
    assert code == 1
    assert grave(found) == {"greeting"}
    assert_found(found, "greeting", "grave", "takes the connection and says nothing", "logs/server.log")


def test_another_service_on_the_port_is_found():
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code, found = doctor("--timeout", "2", f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert code == 1
    assert grave(found) == {"greeting"}
    assert_found(found, "greeting", "grave", "an HTTP server is at", "host.json")


@pytest.fixture
def greets() -> Iterator[Callable[[bytes], str]]:
    """Makes services that say something at once."""
    made: list[socket.socket] = []

    def greets(words: bytes) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        made.append(listener)

        def serve() -> None:
            link, _ = listener.accept()
            with contextlib.suppress(OSError), link:
                link.sendall(words)
                link.recv(100)

        threading.Thread(target=serve, daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield greets
    for one in made:
        one.close()


def test_another_version_of_the_protocol_is_found(greets):
    _, found = doctor(greets(b"mnpl\x05\x00" + bytes(10)))
    assert grave(found) == {"greeting"}
    assert_found(found, "greeting", "grave", "version 5 of the protocol, this one 4", "Install the same maniple")
    _, found = doctor(greets(b"SSH-2.0-OpenSSH_9.2p1\r\n"))
    assert_found(found, "greeting", "grave", "b'SSH-' does not begin a frame of maniple")


def test_a_host_that_breaks_off_is_found(tmp_path):
    """It knows the token, and is gone before it has told of itself."""
    (tmp_path / "token").write_text("a token")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            link, _ = listener.accept()
            with link:
                authenticate_client(Stream(link), "a token", lambda mac: Welcome(mac, "lineage", 0, 0.0))

        threading.Thread(target=serve, daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        code, found = doctor("--token-file", str(tmp_path / "token"), address)
    assert code == 1
    assert grave(found) == {"center"}
    assert_found(found, "center", "grave", "accepted the token and then broke off", "logs/server.log")


def test_what_keeps_a_worker_out_is_found(serve, tmp_path, monkeypatch):
    host = serve("--listen", "127.0.0.1:0")
    address = host.address
    host.await_event("server", "serving")
    (tmp_path / "wrong").write_text("0" * 64)
    code, found = doctor("--token-file", str(tmp_path / "wrong"), address)
    assert code == 1
    assert grave(found) == {"token"}
    assert_found(found, "token", "grave", "the token is not this run's", "--token-file")
    assert_found(doctor(address)[1], "token", "grave", "no token was given", "MANIPLE_TOKEN_FILE")

    monkeypatch.setenv("MANIPLE_TOKEN_FILE", str(host.token))
    code, found = doctor(address)
    assert code == 0, found
    assert_found(found, "token", "ok", "both sides know")
    assert_found(found, "both versions", "ok", "maniple")
    assert_found(found, "center", "ok", "no model is shared yet")
    assert_found(found, "way", "ok", "MB/s")
    assert not host.events("server", "joined"), "the doctor is no worker"

    (tmp_path / "certificate").write_text("no certificate")
    code, found = doctor("--certificate", str(tmp_path / "certificate"), address)
    assert code == 1
    assert_found(found, "encryption", "grave", "cannot be used", "Copy certificate.pem")


def test_the_line_to_a_live_host_is_measured_and_a_rule_is_suggested(serve):
    host = serve("--listen", "127.0.0.1:0")
    found = host.join("import numpy as np, maniple; maniple.join().share({'w': np.zeros(250_000, 'float32')})")
    assert found.wait(PATIENCE_S) == 0
    asked = ("--token-file", str(host.token), host.address)
    code, found = doctor("--step-time", "0.1", *asked)
    assert code == 0, found
    assert_found(found, "way", "ok", "MB/s to the host", "MB/s from it", "an exchange of 1 MB")
    (line,) = [one["values"] for one in found if one["check"] == "way"]
    assert 0 < line["round_trip_s"] < 1 and line["up_bytes_per_s"] > 1e6 and line["down_bytes_per_s"] > 1e6
    (suggestion,) = [one["values"] for one in found if one["check"] == "rule"]
    assert suggestion["step_s"] == 0.1 and suggestion["options"].startswith("--rule ")
    _, found = doctor("--model-size", "10B", *asked)  # more than the center has; the step time is unknown
    assert [one["values"]["step_s"] for one in found if one["check"] == "rule"] == [0.05, 0.2, 1.0]
    assert_found(found, "rule", "ok", "--rule diloco:every=", "--overlap")
    assert "lost" not in [one["event"] for one in host.events("server")], "it has disturbed nobody"


def test_encryption_on_one_side_only_is_found(serve, tmp_path):
    pytest.importorskip("cryptography")
    host, plain = serve("--listen", "127.0.0.1:0", "--tls"), serve("--listen", "127.0.0.1:0")
    address, token = host.address, ("--token-file", str(host.token))
    for one in (host, plain):
        one.await_event("server", "serving")
    code, found = doctor("--timeout", "2", *token, address)
    assert code == 1
    assert grave(found) == {"encryption"}
    assert_found(found, "encryption", "grave", "encrypts", "no certificate was given", "--certificate")
    certificate = ("--certificate", str(host.folder / "certificate.pem"))
    code, found = doctor(*token, *certificate, address)
    assert code == 0, found
    assert_found(found, "encryption", "ok", "encrypted")
    code, found = doctor(*token, *certificate, plain.address)
    assert grave(found) == {"encryption"}
    assert_found(found, "encryption", "grave", "the host does not encrypt", "--tls")
    assert doctor(str(host.folder))[0] == 0, "a run folder has it all"


def test_another_version_and_another_clock_are_found(serve, tmp_path, monkeypatch):
    """A host on a machine whose clock is an hour ahead, and which has another maniple and NumPy."""
    planted = tmp_path / "planted"
    for name, version in (("maniple", "9.9.9"), ("numpy", "0.1.2")):
        (planted / f"{name}-{version}.dist-info").mkdir(parents=True)
        (planted / f"{name}-{version}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    (planted / "sitecustomize.py").write_text("import time\nreal = time.time\ntime.time = lambda: real() + 3600\n")
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{planted}:{os.environ.get('PYTHONPATH', '')}")
        host = serve("--listen", "127.0.0.1:0")
    address = host.address
    host.await_event("server", "serving")
    code, found = doctor("--token-file", str(host.token), address)
    assert code == 1
    assert grave(found) == {"both versions"}
    assert_found(found, "both versions", "grave", "maniple", "9.9.9 at the host", "pip install maniple==9.9.9")
    assert_found(found, "both versions", "warning", "numpy", "0.1.2 at the host")
    assert_found(found, "both clocks", "warning", "3.6e+03 s ahead of", "limit 1 s", "time server")


# A run folder


def test_what_is_wrong_with_a_run_folder_is_found(serve, tmp_path):
    host = serve("--listen", "127.0.0.1:0")
    assert host.address
    host.await_event("server", "serving")
    joined = host.join(
        """
        import os, signal, numpy as np, maniple
        worker = maniple.join()
        worker.share({"w": np.zeros(1000, "f4")})
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    joined.wait(PATIENCE_S)
    host.await_event("server", "lost")
    code, found = doctor(str(host.folder))
    assert code == 0, found
    assert_found(found, "host process", "ok", f"process {host.process.pid}")
    assert_found(found, "token file", "ok")
    assert_found(found, "center", "ok", "center-0 has digest", "1 parameters, 0.00 MB")
    assert_found(found, "losses", "warning", "worker 0 was lost", "within the last hour", "worker-0.log")

    host.token.chmod(0o644)
    code, found = doctor(str(host.folder))
    assert code == 0
    assert_found(found, "token file", "warning", "mode 0644", "chmod 600")
    token = host.token.read_text()
    host.token.unlink()
    code, found = doctor(str(host.folder))
    assert grave(found) == {"token file"}
    assert_found(found, "token file", "grave", "cannot be read: No such file", "copy")
    host.token.write_text(token)

    host.process.kill()
    host.wait()
    await_(lambda: is_gone(host.server_pid))
    code, found = doctor(str(host.folder))
    assert code == 1
    assert grave(found) == {"host process", "port"}
    assert_found(found, "host process", "grave", "is dead", "it was killed", "maniple serve --resume")
    assert_found(looked("leftovers"), "leftovers", "warning", "of a dead run holds", "--resume RUN")
    for path in Path(os.environ["MANIPLE_SHM"]).iterdir():
        shutil.rmtree(path)
    assert_found(looked("leftovers"), "leftovers", "ok")


def test_a_run_that_has_ended_or_does_not_listen_is_reported(run, tmp_path):
    done = run("import numpy as np, maniple; maniple.join().share({'w': np.zeros(3)})", "-n", "1")
    code, found = doctor(str(done.folder))
    assert code == 1
    assert_found(found, "host process", "grave", "the run ended at", "exit code 0", "--resume")
    assert_found(found, "run folder", "ok", "no host.json", "--listen")
    assert_found(found, "models", "ok", "digest")
    code, found = doctor(str(tmp_path))
    assert code == 1
    assert_found(found, "run folder", "grave", "no run.json", "runs/last")


def test_a_host_that_waits_in_a_queue_and_a_full_disk_are_found(tiny):
    folder = tiny("run", "1m")
    (folder / "submit.json").write_text("{}")
    (folder / "run.json").write_text("{}")
    code, found = doctor(str(folder))
    assert code == 0
    assert_found(found, "run folder", "warning", "has not begun", "maniple status")
    assert_found(found, "room", "warning", "has 1 MB free", "need 100 MB", "Make room")


def test_rows_are_found_among_many_others(tmp_path, monkeypatch):
    """Also where a block of the file ends in the middle of one, and in a file that follows another."""
    monkeypatch.setattr("maniple.doctor.run_folder._BLOCK", 1000)
    (tmp_path / "events").mkdir()
    other = (
        '{"timestamp":1.0,"loss":1.5,"event":"log"}\n{"timestamp":1.0,"text":"\\"event\\":\\"share\\"","event":"log"}\n'
    )
    shared = '{"event":"share","timestamp":1.0,"digest":"d%d","parameters":2,"bytes":8}\n'
    rows = "".join(7 * other + shared % i for i in range(9)) + other + shared.strip() % 9
    half = rows.index(shared % 4)
    (tmp_path / "events" / "worker-3.jsonl").write_text(rows[:half])
    (tmp_path / "events" / "worker-3_000001.jsonl").write_text(rows[half:])
    found = looked("models", host=str(tmp_path))
    assert len(found) == 10
    assert_found(found, "models", "ok", "1 worker, first worker 3, shared digest d9, 2 parameters")


# Other machines, by an ssh of the test's own, that stays here


@pytest.fixture
def ssh(tmp_path, monkeypatch) -> Path:
    """Its shell greets, and finds another maniple and no NumPy of this environment's version."""
    planted = tmp_path / "there" / "maniple-9.9.9.dist-info"
    planted.mkdir(parents=True)
    (planted / "METADATA").write_text("Metadata-Version: 2.1\nName: maniple\nVersion: 9.9.9\n")
    path = tmp_path / "bin" / "ssh"
    path.parent.mkdir()
    path.write_text(
        "#!/bin/sh\necho Welcome, stranger.\n"
        'while [ "$1" != -- ]; do shift; done\n'
        f'PYTHONPATH={planted.parent} exec sh -c "$3"\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


def test_what_is_wrong_between_machines_is_found(ssh, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "nowhere.invalid")
    monkeypatch.setattr("maniple.doctor.hosts.own_address", lambda: "127.0.0.1")
    code, found = doctor("--timeout", "3", "--hosts", "127.0.0.1,nowhere.invalid")
    assert code == 1
    assert grave(found) == {"far versions", "way back"}
    assert_found(found, "far ssh", "ok", "127.0.0.1 is reached")
    assert_found(found, "far versions", "grave", "127.0.0.1 has maniple 9.9.9", "is here", "Install maniple")
    assert_found(found, "way back", "grave", "as nowhere.invalid", "127.0.0.1 works", "--listen 127.0.0.1:0")
    assert_found(found, "way there", "ok", "a port of 127.0.0.1 is reached")
    assert_found(found, "far machine", "ok", "127.0.0.1: a process may open")
    assert_found(found, "way there", "warning", "no port of nowhere.invalid", "ports 20000 to 29999")


def test_a_machine_without_maniple_or_with_an_older_one_is_found(ssh, monkeypatch):
    version = versions()["maniple"]
    monkeypatch.setattr("maniple.doctor.hosts._PEER", "import sys; sys.exit(\"No module named 'maniple'\")")
    found = doctor("--hosts", "h1")[1]
    assert_found(found, "far versions", "grave", "h1 has no maniple", f"{version} is here", "Install maniple")
    assert grave(found) == {"far versions"}
    monkeypatch.setattr("maniple.doctor.hosts._PEER", "import sys; sys.exit('Error: No such option: --peer')")
    assert_found(doctor("--hosts", "h1")[1], "far versions", "grave", "h1 has another version", "Install maniple")


def test_a_machine_without_this_python_and_one_without_ssh_are_found(ssh, monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert_found(doctor("--hosts", "h1")[1], "far ssh", "grave", "h1 has no /nowhere/python", "same path")
    monkeypatch.setenv("PATH", "/nowhere")
    code, found = doctor("--hosts", "h1,h2")
    assert code == 1
    assert [one["text"] for one in found] == ["there is no ssh in PATH (--hosts needs it). Install an OpenSSH client."]
