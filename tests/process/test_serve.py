"""Hosts and workers as a person starts them: serve, join, listen, resume; tokens, TLS, deadlines, mistakes."""

import json
import os
import signal
import socket
import stat
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import maniple
from maniple.errors import HostAway
from tests.waiting import PATIENCE_S, await_, is_gone

from .conftest import MANIPLE

pytestmark = pytest.mark.usefixtures("without_numba")

TRAINING = """
    import sys, time
    import numpy as np, maniple
    worker = maniple.join(own_data=True)
    params = {"w": np.zeros(5000, "float32"), "b": np.zeros(3)}
    replica = worker.share(params, rule=maniple.Downpour(), pace=maniple.Every(1))
    for _ in range(int(sys.argv[1])):
        params["w"] += 1
        params["b"] += 1
        replica.step()
        time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0)
        if worker.should_stop:
            print("told to stop")
            break
    print("rank", worker.rank, "steps", replica.steps, flush=True)
"""
# The same, until there is a file of the given name.
UNTIL = TRAINING.replace("for _ in range(int(sys.argv[1])):", "while not os.path.exists(sys.argv[1]):")
UNTIL = UNTIL.replace("import sys", "import os, sys")


def ended(worker: subprocess.Popen[str]) -> str:
    output = worker.communicate(timeout=PATIENCE_S)[0]
    assert worker.returncode == 0, output
    return output


def failed(worker: subprocess.Popen[str]) -> str:
    output = worker.communicate(timeout=PATIENCE_S)[0]
    assert worker.returncode == 1, output
    return output


def steps(output: str) -> int:
    """How many steps a worker says it has made."""
    return int(output.rpartition("steps ")[2])


def test_workers_join_train_and_leave(serve):
    host = serve()
    workers = [host.join(TRAINING, "30") for _ in range(2)]
    ranks = sorted(ended(worker).split()[1] for worker in workers)
    assert ranks == ["0", "1"]
    late = host.join(TRAINING, "10")
    assert "rank 2" in ended(late)
    assert host.end() == 0, host.output
    assert (host.center["w"] == 70).all()
    assert (host.center["b"] == 70).all()
    events = [row["event"] for row in host.events("server")]
    assert (events.count("joined"), events.count("left"), events.count("lost")) == (3, 3, 0)
    for rank, steps in enumerate((30, 30, 10)):  # their rows have come over the network
        assert [row["step"] for row in host.events(rank, "progress")][-1] == steps
        assert len(host.events(rank, "exchange")) == steps


def test_token_and_address_never_stand_on_a_command_line(serve):
    host = serve()
    worker = host.join(TRAINING, "1000", "0.01")
    host.await_event(0, "exchange")
    token = host.token.read_text().strip()
    assert len(token) == 64
    assert stat.S_IMODE(host.token.stat().st_mode) == 0o600
    port = host.address.rpartition(":")[2]
    for pid in (host.process.pid, host.server_pid, host.pid(0)):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        assert token not in command
        assert port not in command
    assert token not in host.folder.joinpath("run.json").read_text()
    worker.kill()


def test_hosts_listen_on_loopback_by_default(serve):
    host = serve()
    assert host.address.startswith("127.0.0.1:")
    port = int(host.address.rpartition(":")[2])
    listening = Path("/proc/net/tcp").read_text().splitlines()[1:]
    addresses = {line.split()[1] for line in listening if line.split()[3] == "0A"}
    assert f"0100007F:{port:04X}" in addresses
    assert f"00000000:{port:04X}" not in addresses


def test_run_folder_is_all_that_a_worker_of_the_same_machine_needs(serve, tmp_path):
    host = serve()
    host.await_event("server", "serving")
    (tmp_path / "train.py").write_text("\n".join(line[4:] for line in TRAINING.splitlines()))
    done = subprocess.run(
        [str(MANIPLE), "join", str(host.folder), "train.py", "20"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert host.end() == 0
    assert (host.center["w"] == 20).all()


def test_encrypted_connections(serve, monkeypatch, tmp_path):
    pytest.importorskip("cryptography")
    host = serve("--tls")
    certificate = host.folder / "certificate.pem"
    assert host.address  # it listens, so its certificate is whole
    assert stat.S_IMODE((host.folder / "key.pem").stat().st_mode) == 0o600
    worker = host.join(TRAINING, "40", options=("--certificate", str(certificate)))
    ended(worker)
    host.connect(monkeypatch)
    monkeypatch.setenv("MANIPLE_CERTIFICATE", str(certificate))
    value = np.random.default_rng(0).normal(size=1_500_000)
    with maniple.Client(timeout_s=10) as client:
        np.testing.assert_array_equal(client.create("a", value), value)
        client.push("a", value, alpha=1, beta=1)
        np.testing.assert_array_equal(client.pull("a"), 2 * value)
    other = serve("--tls")
    assert other.address
    monkeypatch.setenv("MANIPLE_CERTIFICATE", str(other.folder / "certificate.pem"))
    with pytest.raises(HostAway, match="certificate"):
        maniple.Client(timeout_s=1)
    monkeypatch.delenv("MANIPLE_CERTIFICATE")
    with pytest.raises(HostAway, match="if the host uses TLS"):
        maniple.Client(timeout_s=1)
    assert host.end() == 0
    assert (host.center["w"] == 40).all()


@pytest.mark.parametrize(
    ("wire", "rule"),
    [(wire, "easgd:alpha=0.5") for wire in ("bfloat16", "float16", "int8")]
    + [(wire, "downpour") for wire in ("int8", "int4", "topk")],
)
def test_bytes_of_packed_exchanges_are_those_of_the_formula(serve, wire, rule):
    host = serve("--wire", wire, "--rule", rule, "--every", "2")
    script = """
        import numpy as np, maniple
        worker = maniple.join()
        params = {"w": np.ones(100_000, "float32"), "v": np.ones((300, 7), "float32")}
        replica = worker.share(params)
        for _ in range(20):
            for value in params.values():
                value += 0.01
            replica.step()
    """
    ended(host.join(script))
    assert host.end() == 0
    counts = [102_100]  # both are in one chunk
    one_way = {"bfloat16": sum(2 * n for n in counts), "float16": sum(2 * n for n in counts)}
    one_way["int8"] = sum(n + 4 * -(-n // 256) for n in counts)
    one_way["int4"] = sum(n // 2 + 4 * -(-n // 256) for n in counts)
    kept = 64 * (102_100 // 4096) + -(-64 * (102_100 % 4096) // 4096)
    one_way["topk"] = -(-12 * kept // 8) + -(-2 * kept // 8) + 8 * -(-102_100 // 4096)
    reply = one_way["bfloat16"] if wire in {"int4", "topk"} else one_way[wire]  # values, which need more bits
    *rows, last = host.events(0, "exchange")
    for row in (*rows, last):  # what really went through the sockets
        assert row["bytes"] <= row["wire_bytes"] <= 1.02 * row["bytes"]
    if wire in {"int4", "topk"}:  # when it leaves, the worker sends what is left
        assert last["bytes"] == 2 * reply
    else:
        rows.append(last)
    assert len(rows) == 10
    assert {row["bytes"] for row in rows} == {one_way[wire] + reply}
    assert np.allclose(host.center["w"], 1.1 if rule != "downpour" else 1.2, atol=0.15 if rule != "downpour" else 0.01)


def test_codec_for_changes_is_refused_with_a_rule_that_sends_values_before_anything_is_shared(serve):
    host = serve("--wire", "int4")  # no rule is named, so it is easgd
    output = failed(host.join(TRAINING.replace("rule=maniple.Downpour(), ", ""), "10"))
    assert "wire='int4' carries changes only" in output and "downpour" in output
    assert not host.events(0, "share")
    assert host.end() == 0


def test_worker_whose_host_is_gone_for_too_long_saves_its_replica_and_fails(serve, tmp_path):
    host = serve("--host-deadline", "3")
    worker = host.join(TRAINING, "100000", "0.01")
    host.await_event(0, "exchange")
    begin = time.monotonic()
    host.kill()
    output = failed(worker)
    assert 3 <= time.monotonic() - begin < 15
    assert "has been away for" in output
    assert "limit 3 s" in output
    assert "Training continues" in output
    saved = load_file(tmp_path / "replica-0.safetensors")
    assert saved["w"][0] > 10
    successor = serve(name=host.folder.name)  # takes the segment away
    successor.await_event("host", "adopted")
    assert successor.end() == 0


def test_last_exchange_waits_for_the_host_to_return(serve, tmp_path):
    host = serve()
    worker = host.join(UNTIL, "stop", "0.01")
    host.await_event(0, "exchange")
    assert_killed(host)
    (tmp_path / "stop").touch()
    said = next(line for line in worker.stdout if "steps" in line)
    time.sleep(1)  # the worker has made its steps, and waits at its end
    assert worker.poll() is None
    successor = serve(name=host.folder.name)
    ended(worker)
    assert successor.end() == 0
    assert (successor.center["w"] == steps(said)).all()


def test_host_that_ends_tells_its_workers(serve):
    host = serve()
    worker = host.join(TRAINING, "100000", "0.01")
    host.await_event(0, "exchange")
    assert host.end() == 0
    assert "told to stop" in ended(worker)


def test_another_run_on_the_same_port_is_refused(serve, tmp_path):
    first = serve("--host-deadline", "4")
    address = first.address
    worker = first.join(TRAINING, "100000", "0.01")
    first.await_event(0, "exchange")
    worker.send_signal(signal.SIGSTOP)  # until the second host is there, however long that takes
    assert_killed(first)
    second = serve("--listen", address)
    second.await_event("server", "serving")
    worker.send_signal(signal.SIGCONT)
    assert "token" in failed(worker)
    assert second.end() == 0
    assert not (second.folder / "center" / "center-0.safetensors").exists()
    successor = serve("--listen", "127.0.0.1:0", name=first.folder.name)
    successor.await_event("host", "restored")  # the second host's start has saved what the first had left
    assert successor.end() == 0


def test_another_lineage_with_the_same_token_is_refused(serve, tmp_path):
    first = serve("--host-deadline", "4")
    address, token = first.address, first.token.read_text()
    worker = first.join(TRAINING, "100000", "0.01")
    first.await_event(0, "exchange")
    worker.send_signal(signal.SIGSTOP)  # until the third host is there, however long that takes
    assert_killed(first)
    second = serve("--listen", address)
    second.await_event("server", "serving")
    assert_killed(second)
    (second.folder / "token").write_text(token)
    third = serve("--listen", address, name=second.folder.name)
    third.await_event("server", "serving", count=2)
    worker.send_signal(signal.SIGCONT)
    assert "serves another center now" in failed(worker)
    assert third.end() == 0
    last = serve(name=first.folder.name)
    last.await_event("host", "restored")
    assert last.end() == 0


def assert_killed(host) -> None:
    server = host.server_pid
    host.kill()
    await_(lambda: is_gone(server))


# run --listen, --resume


def test_run_waits_for_the_workers_that_have_joined_it(start, tmp_path):
    run = start(UNTIL, "-n", "1", "--listen", "127.0.0.1:0", args=("stop", "0.02"))
    run.await_event(0, "exchange")
    far = subprocess.Popen(
        [str(MANIPLE), "join", str(run.folder), "script0.py", "stop far", "0.02"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        run.await_event(1, "exchange")
        (tmp_path / "stop").touch()
        run.await_event("host", "exit")  # of the run's own worker
        before = len(run.events(1, "exchange"))
        run.await_event(1, "exchange", count=before + 20)
        assert run.process.poll() is None
        (tmp_path / "stop far").touch()
        output = ended(far)
    finally:
        far.kill()
    assert "rank 1" in output
    assert run.wait() == 0, run.output
    assert (run.center["w"] == steps(run.log(0)) + steps(output)).all()


def test_run_goes_on_where_it_has_ended(run, start, tmp_path):
    first = run(TRAINING, "-n", "2", "--keep", "2", args=("30",))
    assert first.process.returncode == 0, first.output
    assert (first.center["w"] == 60).all()
    again = [str(MANIPLE), "run", "-n", "2", "--resume", "runs/run0", "script0.py", "10"]
    done = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "begins again from snapshot-000001" in done.stdout
    assert (first.center["w"] == 80).all()
    assert [row["event"] for row in first.events("host")].count("start") == 2  # one record
    assert first.description["restored"] == 1
    assert len(first.events(0, "share")) == 2
    manifest = json.loads((first.folder / "center" / "snapshot-000002" / "manifest.json").read_text())
    assert manifest["updates"] == 80  # counters go on
    for k in range(2):
        (first.folder / "center" / f"snapshot-00000{2 - k}" / "center-0.safetensors").write_bytes(b"short")
        done = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 2
        assert "truncated" in done.stderr
        assert ("--snapshot 1" in done.stderr) == (k == 0)


def test_snapshots_are_written_during_a_run(serve):
    host = serve("--snapshot-every", "0.5", "--keep", "2")
    worker = host.join(TRAINING, "100000", "0.01")
    host.await_event(0, "exchange")
    before = len(host.events("host", "snapshot"))
    host.await_event("host", "snapshot", count=before + 4)
    names = sorted(path.name for path in (host.folder / "center").glob("snapshot-*"))
    assert len(names) <= 3
    w = host.center["w"]  # of one snapshot: the next one is soon there
    assert 0 < w[0] == w[-1]
    worker.kill()


def test_host_begins_with_the_arrays_of_a_file(serve, tmp_path, monkeypatch):
    save_file({"a": np.arange(4.0), "n": np.array([1, 2], "int64")}, tmp_path / "begin.safetensors")
    host = serve("--from", "begin.safetensors")
    host.connect(monkeypatch)
    with maniple.Client(timeout_s=10) as client:
        assert client.names() == ["a", "n"]
        client.push("n", [10, 10], alpha=1, beta=1)
        assert client.pull("n").tolist() == [11, 12]
    assert host.end() == 0
    saved = load_file(host.folder / "center" / "arrays.safetensors")
    assert saved["n"].tolist() == [11, 12]


# Mistakes


@pytest.mark.parametrize(
    ("command", "words", "exit_code"),
    [
        (["serve", "--listen", "nonsense:port"], "is not an address", 2),
        (["serve", "--resume", "nowhere"], "no run folder", 2),
        (["serve", "--certificate", "c.pem"], "belong together", 2),
        (["serve", "--tls", "--certificate", "c.pem", "--key", "k.pem"], "cannot be used", 2),
        (["serve", "--snapshot-every", "-1"], "out of range (0 or more)", 2),
        (["serve", "--from", "none.h5"], "no file", 2),
        (["serve", "--wire", "int3"], "int3", 2),
        (["run", "--tls", "script.py"], "add --listen", 2),
        (["run", "--snapshot", "3", "script.py"], "Add --resume", 2),
        (["join", "127.0.0.1:1", "none.py"], "no script", 2),
        (["join", "127.0.0.1", "script.py"], "is not an address", 2),
        (["join", ".", "script.py"], "the folder of a run that listens", 2),
        (["join", "127.0.0.1:1", "script.py"], "no token", 2),
        (["join", "--token-file", "none", "127.0.0.1:1", "script.py"], "cannot be read", 2),
    ],
)
def test_mistakes_are_reported_and_leave_nothing(tmp_path, command, words, exit_code):
    (tmp_path / "script.py").write_text("import maniple\nprint('begin')\nmaniple.join()\n")
    done = subprocess.run([str(MANIPLE), *command], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert words in done.stderr, done.stderr
    assert done.returncode == exit_code
    assert "Traceback" not in done.stderr and "begin" not in done.stdout, "no worker was started"
    assert not list(Path(os.environ["MANIPLE_SHM"]).iterdir())


def test_port_that_is_taken_is_reported(serve, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        host = serve("--listen", f"127.0.0.1:{port}")
        assert host.wait() == 2
    assert f"cannot listen on 127.0.0.1:{port}" in host.output
    assert not host.folder.exists()


def test_wrong_token_is_reported_at_once(serve, tmp_path):
    host = serve()
    host.await_event("server", "serving")
    (tmp_path / "wrong").write_text("0" * 64)
    script = TRAINING.replace("worker =", "print('begin', flush=True)\n    worker =", 1)
    worker = host.join(script, "5", options=("--token-file", str(tmp_path / "wrong")))
    output = failed(worker)
    assert "the token is not this run's" in output
    assert "begin" not in output and "Traceback" not in output, "before the script is started"


def test_an_empty_token_file_is_reported_before_workers_are_started(run, tmp_path):
    done = run(
        "import numpy, maniple; maniple.join().share({'w': numpy.zeros(3)})", "-n", "1", "--listen", "127.0.0.1:0"
    )
    (done.folder / "token").write_text("")
    command = [str(MANIPLE), "run", "--resume", "runs/run0", "--listen", "127.0.0.1:0", "script0.py"]
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert again.returncode == 2, again.stderr
    assert "token is empty" in again.stderr and "Traceback" not in again.stdout + again.stderr


def test_worker_with_another_model_is_refused_by_the_first_difference(serve):
    host = serve()
    ended(host.join(TRAINING, "3"))
    worker = host.join(TRAINING.replace("5000", "5001"), "3")
    output = failed(worker)
    assert "parameter 0 is 'w' float32[5001], but the center has 'w' float32[5000]" in output
    assert host.end() == 0
    assert (host.center["w"] == 3).all()


def test_sigterm_lets_a_joined_worker_make_its_last_exchange(serve):
    host = serve()
    worker = host.join(TRAINING.replace("Every(1)", "Every(1000)"), "100000", "0.01")
    await_(lambda: any(row["step"] > 50 for row in host.events(0, "progress")))
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=PATIENCE_S)
    made = host.await_event(0, "leave") and host.events(0, "progress")[-1]["step"]
    assert host.end() == 0
    assert (host.center["w"] == made).all()
    assert made > 50
