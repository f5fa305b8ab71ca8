"""The controller and its workers, in real runs: questions, answers, mistakes, deaths."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import maniple
from maniple.errors import InvalidArgument
from maniple.host.server_process import load_controller
from tests.process.controller_scripts import BEGIN, logged, resume
from tests.waiting import PATIENCE_S, await_

pytestmark = pytest.mark.usefixtures("without_numba")

CONTROLLER = """
    import pathlib, time
    import maniple

    class Mine(maniple.Controller):
        def __init__(self, greeting, times=1, names=()):
            self.greeting, self.times, self.names = greeting, times, names
            self.inside = 0

        def handle_control(self, request, worker, info):
            self.inside += 1
            try:
                self.state["most"] = max(self.inside, self.state.get("most", 0))
                return self.reply(request, worker, info)
            finally:
                self.inside -= 1

        def reply(self, request, worker, info):
            if request == "greet":
                return [self.greeting] * self.times + [*self.names]
            if request == "echo":
                return {"worker": worker, "request": request, "info": info}
            if request == "nothing":
                return None
            if request == "fail":
                raise RuntimeError("out of luck")
            if request == "late":
                raise maniple.errors.WaitedTooLong("the database has not answered.")
            if request == "sleep":
                until = time.monotonic() + info["seconds"]
                while time.monotonic() < until and not pathlib.Path(info.get("file", "never")).exists():
                    time.sleep(0.01)
                return "slept"
            if request == "add":
                time.sleep(0.001)
                self.state["sum"] = self.state.get("sum", 0) + info["value"]
                return self.state["sum"]
            if request == "state":
                return self.state
            return super().handle_control(request, worker, info)
"""


MINE = ("--controller", "control.py:Mine", "--controller-arg", "greeting=hello")


@pytest.fixture
def control(tmp_path: Path) -> Path:
    """The file of a controller of one's own."""
    path = tmp_path / "control.py"
    path.write_text(textwrap.dedent(CONTROLLER))
    return path


def test_questions_and_answers_of_all_forms(run, control):
    done = run(
        """
        import numpy as np, torch, maniple
        worker = maniple.join()
        assert worker.ask("greet") == ["hello", "hello", "ä", None, 2.5]
        assert worker.ask("nothing") is None
        deep = {"a": [1, {"b": None}], "漢": "ß", "big": 2**53, "true": True, "": []}
        assert worker.ask("echo", **deep) == {"worker": worker.rank, "request": "echo", "info": deep}
        sent = worker.ask(
            "echo", a=np.float32(0.5), b=np.int64(7), c=np.arange(3), d=torch.tensor(1.5), e=torch.ones(2), f=np.True_
        )
        assert sent["info"] == {"a": 0.5, "b": 7, "c": [0, 1, 2], "d": 1.5, "e": [1.0, 1.0], "f": True}, sent
        assert worker.ask("echo", x=float("nan"))["info"] == {"x": None}  # JSON has no such number
        long = "x" * 1_000_000
        assert worker.ask("echo", long=long)["info"]["long"] == long

        try:
            worker.ask("fail")
        except maniple.errors.HandlerFailed as error:
            assert "RuntimeError: out of luck" in str(error), error
            assert "in reply" in str(error) and "control.py" in str(error), error
            worker.log(failed=1)
        for request, info in (("maniple-lease", {}), ("nobody knows this", {}), ("echo", {"x": object()})):
            try:
                worker.ask(request, **info)
            except ValueError as error:
                assert isinstance(error, maniple.ManipleError)
                worker.log(refused=str(error))
        for _ in range(50):
            worker.ask("add", value=1)
        worker.log(state=worker.ask("state"))
        """,
        "-n", "2", *MINE, "--controller-arg", "times=2", "--controller-arg", 'names=["ä", null, 2.5]',
    )  # fmt: skip
    assert done.process.returncode == 0, done.output
    for rank in range(2):
        assert logged(done, rank, "failed") == [1]
        own, unknown, form = logged(done, rank, "refused")
        assert "are reserved" in own
        assert "the controller does not answer 'nobody knows this'" in unknown
        assert "object" in form
    last = max((logged(done, rank, "state")[0] for rank in range(2)), key=lambda state: state["sum"])
    assert last == {"most": 1, "sum": 100}, "one question at a time, and each one counts"
    assert len(done.events("server", "handler failed")) == 2


def test_state_of_the_controller_survives_kills_of_the_server(start, control):
    """2 workers ask 200 times each, and the server is killed again and again: the sum is 400 and nothing else."""
    script = """
        import maniple
        worker = maniple.join()
        before = 0
        for _ in range(200):
            now = worker.ask("add", value=1)
            assert now > before, (before, now)
            before = now
            worker.log(sum=now)
    """
    going = start(script, "-n", "2", *MINE)
    kills = 0
    for least in (30, 110, 190, 270, 350):
        if not await_(lambda least=least: asked(going) >= least or going.process.poll() is not None):
            break
        server = going.events("host", "server")[-1]["pid"]
        if asked(going) < 395:
            os.kill(server, signal.SIGTERM if kills % 2 else signal.SIGKILL)
            kills += 1
            await_(lambda count=kills: len(going.events("host", "server")) > count)
    assert going.wait() == 0, going.output
    assert kills >= 3
    answers = sorted(answer for rank in range(2) for answer in logged(going, rank, "sum"))
    assert answers == list(range(1, 401))
    assert going.output.count("it is started again, and nothing is lost") == kills


def asked(run) -> int:
    return sum(len(run.events(rank, "log")) for rank in range(2))


def test_resumed_run_has_its_controllers_state_and_goes_on(start, control):
    script = (
        BEGIN
        + """
    worker.log(before=worker.ask("state"))
    for _ in range(50):
        train()
        worker.ask("add", value=1)
    if worker.rank == 0:
        worker.log(verdicts=[worker.ask("next"), worker.ask("stop", reason="enough"), worker.ask("next")])
    """
    )
    first = start(script, "-n", "2", *MINE)
    assert first.wait() == 0, first.output
    assert logged(first, 0, "verdicts") == [["train", {"stop": True}, "stop"]]
    assert "everybody stops: enough" in first.output
    resume(first)  # the controller and its arguments are remembered
    assert logged(first, 0, "before")[-1]["sum"] == 100
    assert logged(first, 0, "verdicts")[-1][0] == "train", "why it stopped then holds no longer"
    assert first.center["w"].tolist() == [150.0] * 1000


def test_batches_of_a_resumed_run_are_counted_on(start):
    """100 batches were made. With a limit of 160, a run that goes on makes 60 more, not 160 more."""
    script = (
        BEGIN
        + """
    while worker.ask("next") != "stop":
        train()
    """
    )
    first = start(script, "-n", "1", "--max-batches", "100")
    assert first.wait() == 0, first.output
    resume(first, "--max-batches", "160")
    assert first.center["w"].tolist() == [160.0] * 1000


@pytest.mark.parametrize(
    ("source", "options", "words", "code"),
    [
        ("def broken(:", (), ["control.py", "SyntaxError"], 1),
        (None, ("--controller-arg", "greting=hi"), ["Mine cannot be made", "greting", "--controller-arg"], 2),
    ],
    ids=["syntax", "argument"],
)
def test_controller_that_cannot_be_used_ends_the_run_with_a_word(run, control, source, options, words, code):
    if source is not None:
        control.write_text(source)
    done = run(
        "import time, maniple; worker = maniple.join(); time.sleep(60)",
        "-n",
        "1",
        "--controller",
        "control.py:Mine",
        *options,
    )
    assert done.process.returncode == code, done.output
    assert "the controller cannot be used" in done.output
    for word in words:
        assert word in done.output
    assert done.description["exit_code"] == code
    assert len(done.events("host", "server")) == 1, "it is not tried again and again"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import maniple\nclass Other(maniple.Controller): pass", "no class Mine .* It has Other"),
        ("class Mine: pass", "no class Mine derived from Controller. Derive it"),
        ("Mine = 5", "no class Mine derived from Controller. Derive it"),
        (None, "Mine cannot be made with no arguments: .*'greeting'"),
    ],
)
def test_file_without_the_requested_class_is_refused(control, monkeypatch, source, words):
    if source is not None:
        control.write_text(source)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "control", None)
    with pytest.raises(InvalidArgument, match=words):
        load_controller(f"{control}:Mine")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--controller", "control.py"), "FILE.py:CLASS"),
        (("--controller", "cotnrol.py:Mine"), "no file 'cotnrol.py'"),
        (("--controller-arg", "a=1"), "--controller FILE.py:CLASS"),
        ((*MINE, "--controller-arg", "a"), "NAME=VALUE"),
        (("--max-batches", "-1"), "--max-batches -1"),
    ],
)
def test_mistakes_on_the_command_line_are_named_before_anything_is_made(run, control, options, words):
    done = run("import maniple; maniple.join()", *options)
    assert done.process.returncode == 2
    assert words in done.output
    assert not done.folder.exists()


def test_members_come_and_go_are_written_down_and_counted(start, control, tmp_path):
    """Lost when silent (SIGSTOP) and returned; lost at once when killed, and restarted; left. `alpha` follows.

    Meanwhile one handler sleeps for longer than a worker waits for an answer to its heartbeat, which is not delayed.
    """
    going = start(
        BEGIN.replace("rule=maniple.Downpour()", "rule=maniple.EASGD()").replace("Every(1)", "Every(10**9)") + """
    while not pathlib.Path("stop").exists():
        if worker.rank == 2:  # the only one that exchanges: what its own exchange does to it tells alpha
            with replica.center():
                c = params["w"][0]
            params["w"][:] = x = c + 1
            replica.exchange()
            worker.log(alpha=round(x - params["w"][0], 6))
        if worker.rank == 0 and os.path.exists("ask") and not int(os.environ["MANIPLE_RESTARTED"]):
            begin = time.monotonic()
            try:
                worker.ask("sleep", seconds=9, timeout_s=0.5)
            except maniple.errors.WaitedTooLong as error:
                worker.log(waited=time.monotonic() - begin, error=str(error))
            worker.log(greeting=worker.ask("greet"))
            os.unlink("ask")
        time.sleep(0.05)
        """,
        "-n", "3", "--restarts", "1", *MINE,
    )  # fmt: skip

    def row(event: str, rank: int) -> dict:
        return await_(lambda: [row for row in going.events("server", event) if row["worker"] == rank])[-1]

    def await_alpha(alpha: float) -> None:
        await_(lambda: (seen := logged(going, 2, "alpha")) and seen[-1] == pytest.approx(alpha))

    assert {row("joined", rank)["near"] for rank in range(3)} == {True}
    await_alpha(0.3)  # 0.9 / 3
    (tmp_path / "ask").touch()
    stopped = going.pid(1)
    os.kill(stopped, signal.SIGSTOP)
    try:
        lost = row("lost", 1)
        await_alpha(0.45)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert lost["live"] == 2
    assert "10 s" in lost["reason"]
    assert row("returned", 1)["live"] == 3
    await_alpha(0.3)
    assert await_(lambda: logged(going, 0, "greeting")) == [["hello"]], "later questions are answered"
    assert logged(going, 0, "waited")[0] < 8.5, "its own deadline, not the handler's 9 s"
    assert "'sleep' within 0.5 s" in logged(going, 0, "error")[0]
    assert {row["worker"] for row in going.events("server", "lost")} == {1}, "the heartbeats of the others arrived"
    killed = going.pid(0)
    os.kill(killed, signal.SIGKILL)
    row("lost", 0)
    back = row("restarted", 0)
    assert (back["live"], back["pid"] != killed) == (3, True)
    await_alpha(0.3)
    (tmp_path / "stop").touch()
    assert going.wait() == 0, going.output
    left = going.events("server", "left")
    assert (len(left), left[-1]["live"]) == (3, 0)
    assert len(going.events("server", "joined")) == 3


SERVING = """
    import sys
    import maniple

    class Mine(maniple.Controller):
        def handle_control(self, request, worker, info):
            if request == "add":
                self.state["sum"] = self.state.get("sum", 0) + info["value"]
                if self.state["sum"] == int(sys.argv[1]):
                    self.stop("that is enough")
                return self.state["sum"]
            return super().handle_control(request, worker, info)

    if __name__ == "__main__":
        Mine().serve(int(sys.argv[2]), name="mine")
        print("served")
"""


JOINING = """
    import sys, time
    import numpy as np, maniple
    worker = maniple.join(sys.argv[1], own_data=True)
    params = {"w": np.zeros(100)}
    replica = worker.share(params, rule=maniple.Downpour(), pace=maniple.Every(1))
    for _ in range(20):
        params["w"] += 1
        replica.step()
        worker.ask("add", value=1)
    print("done", flush=True)
    while not worker.should_stop:
        time.sleep(0.02)
    print("told to stop", worker.is_over)
"""


@pytest.mark.parametrize("is_ended_by_signal", [True, False])
def test_controller_in_a_script_of_ones_own(tmp_path, is_ended_by_signal):
    """`Controller().serve(port)`: a host without a launcher. It ends by SIGTERM, or when its controller says so."""
    (tmp_path / "serving.py").write_text(textwrap.dedent(SERVING))
    (tmp_path / "joining.py").write_text(textwrap.dedent(JOINING))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tmp_path}
    most = "1000" if is_ended_by_signal else "40"
    folder = tmp_path / "runs" / "mine"
    host = subprocess.Popen([sys.executable, "serving.py", most, "0"], **pipes)
    workers = []
    try:
        address = await_(lambda: (folder / "host.json").exists() and json.loads((folder / "host.json").read_text()))
        env = os.environ | {"MANIPLE_TOKEN_FILE": str(folder / "token")}
        command = [sys.executable, "joining.py", f"127.0.0.1:{address['port']}"]
        workers = [subprocess.Popen(command, env=env, **pipes) for _ in range(2)]
        if is_ended_by_signal:
            for worker in workers:
                assert worker.stdout.readline() == "done\n"
            host.send_signal(signal.SIGTERM)
        said = [worker.communicate(timeout=PATIENCE_S)[0] for worker in workers]
        assert host.communicate(timeout=PATIENCE_S)[0].endswith("served\n")
    finally:
        for process in [*workers, host]:
            if process.poll() is None:
                process.kill()
                process.communicate(timeout=PATIENCE_S)
    assert (host.returncode, [worker.returncode for worker in workers]) == (0, [0, 0]), said
    assert all(re.search(rf"told to stop {is_ended_by_signal}\n$", text) for text in said), said
    center = load_file(folder / "center" / "center-0.safetensors")
    assert np.array_equal(center["w"], np.full(100, 40.0))
    assert json.loads((folder / "run.json").read_text())["exit_code"] == 0
    assert not (folder / "host.sock").exists()


def test_error_of_the_handler_is_no_deadline_of_the_worker(run, control):
    done = run(
        """
        import maniple
        worker = maniple.join()
        worker.ask("greet")
        try:
            worker.ask("late", timeout_s=5)
        except maniple.errors.WaitedTooLong as error:
            worker.log(late=str(error))
        """,
        "-n", "1", *MINE,
    )  # fmt: skip
    assert done.process.returncode == 0, done.output
    assert logged(done, 0, "late") == ["the database has not answered."]


def test_question_after_the_end_of_the_run_is_not_waited_for(serve):
    """A host has ended in order, and has told its workers so: nobody will answer any more."""
    host = serve()
    worker = host.join("""
        import time, maniple
        worker = maniple.join()
        assert worker.ask("next") == "train"
        worker.log(ready=1)
        while not worker.is_over: time.sleep(0.02)
        try:
            while True: worker.ask("next", timeout_s=5)  # the first ones may still be answered
        except maniple.ManipleError as error:
            print(type(error).__name__, error)
    """)
    host.await_event(0, "log")
    assert host.end() == 0
    output = worker.communicate(timeout=PATIENCE_S)[0]
    assert worker.returncode == 0, output
    assert output.startswith("HostAway")
    assert "has ended" in output


def test_controller_of_serve_leaves_no_open_port(tmp_path):
    """In a notebook, say, the process goes on after `serve()`: the port is free again."""
    controller = maniple.Controller()
    serving = threading.Thread(target=controller.serve, kwargs={"name": "mine", "runs": str(tmp_path / "runs")})
    serving.start()
    described = tmp_path / "runs" / "mine" / "host.json"
    port = await_(lambda: described.exists() and json.loads(described.read_text()))["port"]
    await_(lambda: not serving.is_alive() or controller.policy.host is not None)
    controller.stop("enough")
    serving.join(PATIENCE_S)
    assert not serving.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5).close()
