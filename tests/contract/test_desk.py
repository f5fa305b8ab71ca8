"""The desk: each question reaches the controller exactly once, though servers are killed and answers lost.

A server that is killed leaves its segment and nothing else, so a new desk with a new controller on the same segment is
what its successor has.
"""

import math
import threading
import time

import msgspec
import numpy as np
import pytest

from maniple.center import Segment
from maniple.center.segment import LIVE
from maniple.changes import Changes
from maniple.controller import Controller
from maniple.errors import BadFrame, HandlerFailed, InvalidArgument, ManipleError, SharedMemoryFull, WaitedTooLong
from maniple.host.best import Best
from maniple.host.desk import Desk, Minutes
from maniple.host.keeping import begin_again, forget_changes
from maniple.place import Limits
from maniple.record import Events, read_events
from maniple.wire.messages import Request
from tests.limits import file_limit

PATIENCE_S = 60.0  # only against hanging


class Counter(Controller):
    """Counts what it hears; some requests make it fail in one way or another."""

    def handle_control(self, request, worker, info):
        self.state["heard"] = self.state.get("heard", 0) + 1
        if request == "add":
            self.state["sum"] = self.state.get("sum", 0) + info["value"]
            return {"sum": self.state["sum"], "worker": worker}
        if request == "fail":
            raise RuntimeError("out of luck")
        if request == "exit":
            raise SystemExit(3)
        if request == "refuse":
            raise InvalidArgument("not with me.")
        if request == "late":
            raise WaitedTooLong("for too long.")
        if request == "object":
            return object()
        if request == "bad state":
            self.state["bad"] = object()
            return "done"
        if request == "no state":
            self.state = ["no", "dict"]
            return "done"
        if request == "echo":
            return info
        return super().handle_control(request, worker, info)


class Served:
    """One host's memory, and the desks of its servers, one after the other."""

    def __init__(self, root, kind=Counter) -> None:
        run = root / "run"
        (run / "center").mkdir(parents=True)
        self.segment = Segment.create(root, "0123456789abcdef", run)
        self.rows = run / "server.jsonl"
        self.snapshots: list[str] = []
        self.center, self.kind, self.limits = run / "center", kind, Limits()
        self.start()

    def start(self) -> None:
        """A new server, the first or one after a kill."""
        self.controller = self.kind()
        self.desk = Desk(self.controller, self.segment, Events(self.rows), self.limits, Best(self.center, self._write))

    def ask(self, request, number, *, worker="a1", rank=0, steps=0, **info):
        question = Request(number, request, rank, 1, steps, 0)
        return msgspec.json.decode(self.desk.answer(worker, question, info))

    def events(self, event) -> list[dict]:
        return [row for row in read_events(self.rows) if row["event"] == event] if self.rows.exists() else []

    def _write(self, name):
        self.snapshots.append(name)
        (self.center / name).mkdir(exist_ok=True)
        return self.center / name


@pytest.fixture
def served(tmp_path):
    host = Served(tmp_path)
    yield host
    host.segment.remove()


def test_question_asked_again_gets_the_same_answer_and_is_heard_once(served):
    first = served.ask("add", 1, value=5)
    assert first == {"sum": 5, "worker": 0}
    assert served.ask("add", 1, value=5) == first
    assert served.ask("add", 2, value=5) == {"sum": 10, "worker": 0}
    assert served.controller.state["heard"] == 2


def test_question_asked_again_of_the_next_server_is_heard_once(served):
    first = served.ask("add", 1, value=5)
    served.start()
    assert served.ask("add", 1, value=5) == first
    assert served.controller.state == {"heard": 1, "sum": 5}
    served.start()
    assert served.ask("add", 2, value=1) == {"sum": 6, "worker": 0}


def test_server_killed_before_the_answer_was_written_has_not_heard_the_question(served, monkeypatch):
    served.ask("add", 1, value=5)

    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Minutes, "write", kill)
        served.ask("add", 2, value=7)
    served.start()
    assert served.controller.state == {"heard": 1, "sum": 5}
    assert served.ask("add", 2, value=7) == {"sum": 12, "worker": 0}


def test_workers_have_numbers_of_their_own(served):
    for number in (1, 2):
        for rank, worker in enumerate(("a1", "b2", "c3")):
            assert served.ask("add", number, worker=worker, rank=rank, value=1)["worker"] == rank
    assert served.controller.state["sum"] == 6


def test_question_that_its_worker_has_given_up_is_not_heard_after_a_newer_one(served):
    """It waited behind a slow handler for longer than its worker did, and the next one was quicker."""
    newer = served.ask("add", 2, value=1)
    with pytest.raises(ManipleError):
        served.ask("add", 1, value=100)
    assert served.ask("add", 2, value=1) == newer
    assert served.controller.state["sum"] == 1


def test_all_that_json_knows_survives_a_server(served):
    state = {"words": ["ä", "漢", ""], "deep": {"a": {"b": [1, 2.5, None, True]}}, "big": 2**53, "small": 1e-300}
    served.controller.state["kept"] = state
    served.ask("echo", 1)
    served.start()
    assert served.controller.state["kept"] == state


def test_what_a_controller_sets_at_its_beginning_gives_way_to_what_it_knew(tmp_path):
    class Patient(Counter):
        def __init__(self) -> None:
            self.state = {"sum": 100, "new": True}

    host = Served(tmp_path, Patient)
    try:
        assert host.ask("add", 1, value=1)["sum"] == 101
        host.start()
        assert host.controller.state == {"sum": 101, "new": True, "heard": 1}
    finally:
        host.segment.remove()


def test_failure_of_the_handler_is_told_with_its_traceback_and_written_down(served):
    with pytest.raises(HandlerFailed, match="out of luck") as caught:
        served.ask("fail", 1, rank=3)
    assert "in handle_control" in str(caught.value)
    assert "'fail' of worker 3" in str(caught.value)
    (row,) = served.events("handler failed")
    assert (row["worker"], row["request"]) == (3, "fail")
    assert served.ask("add", 2, value=1)["sum"] == 1, "the next question is answered"


@pytest.mark.parametrize("request_", ["fail", "refuse", "exit", "object", "late"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_question_that_failed_is_heard_once_too(served, request_, is_killed):
    with pytest.raises(ManipleError) as first:
        served.ask(request_, 1)
    if is_killed:
        served.start()
    with pytest.raises(ManipleError) as second:
        served.ask(request_, 1)
    assert type(second.value) is type(first.value)
    assert str(second.value) == str(first.value)
    assert served.controller.state["heard"] == 1


def test_errors_of_maniple_itself_keep_their_kind(served):
    with pytest.raises(InvalidArgument, match="not with me"):
        served.ask("refuse", 1)
    with pytest.raises(InvalidArgument, match="nobody here answers 'nxet'"):
        served.ask("nxet", 2)


@pytest.mark.parametrize("request_", ["bad state", "no state"])
def test_state_that_cannot_be_kept_is_told_and_gives_way_to_the_last_that_could(served, request_):
    served.ask("add", 1, value=5)
    with pytest.raises(HandlerFailed):
        served.ask(request_, 2)
    served.desk.beat((0, 1), 1, 1)
    assert served.ask("add", 3, value=1)["sum"] == 6
    served.start()
    assert served.controller.state["sum"] == 6


def test_answers_beyond_json_are_told_apart(served):
    assert served.ask("echo", 1, x=math.nan) == {"x": None}, "JSON has no such number"
    with pytest.raises(HandlerFailed, match="object"):
        served.ask("object", 2)


def test_questions_never_reach_the_controller_at_the_same_time(tmp_path):
    class Slow(Controller):
        inside = most = 0

        def handle_control(self, request, worker, info):
            Slow.inside += 1
            Slow.most = max(Slow.most, Slow.inside)
            time.sleep(0.002)
            self.state["sum"] = self.state.get("sum", 0) + 1
            Slow.inside -= 1

    host = Served(tmp_path, Slow)
    try:
        threads = [
            threading.Thread(
                target=lambda rank: [host.ask("x", number, worker=f"w{rank}", rank=rank) for number in range(1, 21)],
                args=(rank,),
            )
            for rank in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert (Slow.most, host.controller.state["sum"]) == (1, 160)
    finally:
        host.segment.remove()


def test_beats_and_goodbyes_do_not_wait_for_a_slow_handler(tmp_path):
    entered, go_on = threading.Event(), threading.Event()

    class Stuck(Controller):
        def handle_control(self, request, worker, info):
            entered.set()
            assert go_on.wait(PATIENCE_S)
            return self.batches

    host = Served(tmp_path, Stuck)
    try:
        asking = threading.Thread(target=host.ask, args=("x", 1))
        asking.start()
        assert entered.wait(PATIENCE_S)
        for steps in range(1, 6):  # hangs here if they do
            host.desk.beat((1, 1), steps, 10 * steps)
        host.desk.forget("b2")
        assert asking.is_alive(), "all this while the handler was busy"
        go_on.set()
        asking.join(PATIENCE_S)
        assert host.ask("x", 2) == 5, "what was told meanwhile is not lost"
    finally:
        go_on.set()
        host.segment.remove()


def test_counts_and_the_reason_to_stop_survive_a_server(served):
    served.limits = Limits(max_batches=100)
    served.start()
    assert served.desk.beat((0, 1), 60, 600)[1] == ""
    served.ask("echo", 1)  # written down
    served.start()
    assert served.controller.batches == 60
    assert "--max-batches 100" in served.desk.beat((1, 1), 40, 400)[1]
    assert served.ask("next", 2) == "stop"
    served.start()
    assert "--max-batches 100" in served.desk.beat((0, 1), 60, 600)[1]
    assert len(served.events("stop")) == 1, "that everybody stops is told once"


def test_steps_that_come_with_a_question_count_at_once(served):
    served.limits = Limits(max_batches=10)
    served.start()
    assert served.ask("next", 1, steps=9) == "train"
    assert served.ask("next", 2, steps=10) == "stop"


def test_run_that_goes_on_has_its_state_and_no_reason_to_stop(served):
    served.ask("add", 1, value=5)
    served.ask("stop", 2, reason="enough")
    assert served.desk.beat((0, 1), 1, 1)[1] == "enough"
    begin_again(served.segment)
    served.start()
    assert served.desk.beat((0, 1), 1, 1)[1] == ""
    assert served.controller.state["sum"] == 5


def test_dead_validator_is_replaced_across_servers(served):
    served.limits = Limits(validate_every=1)
    served.start()
    for rank in (0, 1):
        served.segment.renew(rank)
        served.segment.mark(rank, LIVE)
    assert served.ask("next", 1, steps=5) == "validate"
    assert served.ask("next", 1, worker="b2", rank=1) == "train"
    served.start()
    assert served.ask("next", 2, worker="b2", rank=1) == "train", "it is alive, whoever serves"
    served.segment.renew(0)  # the launcher has started its successor
    assert served.ask("next", 3, worker="b2", rank=1) == "validate"


def test_center_of_the_best_validation_is_kept_and_no_other(served):
    served.limits = Limits(validate_every=1)
    served.start()
    for number, loss in enumerate((0.5, 0.7, 0.3)):
        assert served.ask("next", 2 * number + 1, steps=10 * (number + 1)) == "validate"
        served.ask("validated", 2 * number + 2, loss=loss)
    assert sorted(path.name for path in served.center.iterdir()) == ["best", "best-000002"]
    assert (served.center / "best").resolve().name == "best-000002"
    assert [row["loss"] for row in served.events("best")] == [0.5, 0.3]


def test_disk_that_cannot_take_the_best_center_does_not_end_the_run(served):
    served.limits = Limits(validate_every=1)
    served.start()

    def refuse(name):
        raise OSError(28, "No space left on device")

    served.desk._best._write = refuse
    assert served.ask("next", 1, steps=5) == "validate"
    assert served.ask("validated", 2, loss=0.5) == {"best": True, "stop": False}
    assert served.events("unsaved")


def test_numbers_of_numpy_are_answered_and_kept_as_plain_ones(served):
    served.controller.handle_control = lambda *_: {"mean": np.float32(0.5), "all": np.arange(3)}
    assert served.ask("x", 1) == {"mean": 0.5, "all": [0, 1, 2]}
    served.controller.state["best"] = np.float64(0.25)
    served.ask("x", 2)
    assert Minutes.read(served.segment.path).state == {"best": 0.25}


def test_state_that_a_failing_handler_has_spoilt_gives_way_too(served):
    served.ask("add", 1, value=3)

    def spoil(*_):
        served.controller.state["bad"] = object()
        raise RuntimeError("out of luck")

    served.controller.handle_control = spoil
    with pytest.raises(HandlerFailed):
        served.ask("x", 2)
    assert served.controller.state["sum"] == 3
    served.desk.beat((0, 1), 1, 1)


def test_rank_that_nobody_can_have_is_refused(served):
    for rank, incarnation in ((30_000, 1), (-2, 1), (0, -1), (0, 1 << 40)):
        question = Request(1, "next", rank, incarnation, 0, 0)
        with pytest.raises(BadFrame, match="cannot ask"):
            served.desk.answer("w", question, {})


def test_limit_is_seen_while_a_handler_hangs(served):
    served.limits = Limits(max_batches=5)
    served.start()
    is_in, may_end = threading.Event(), threading.Event()

    def hang(*_):
        is_in.set()
        may_end.wait(PATIENCE_S)

    served.controller.handle_control = hang
    thread = threading.Thread(target=served.ask, args=("x", 1), daemon=True)
    thread.start()
    assert is_in.wait(PATIENCE_S)
    assert "--max-batches 5" in served.desk.beat((0, 1), 6, 6)[1]
    may_end.set()
    thread.join(PATIENCE_S)


def test_best_that_was_kept_before_a_kill_is_not_kept_anew(tmp_path):
    kept: list[str] = []

    def write(name):
        kept.append(name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "which").write_text(str(len(kept)))
        return tmp_path / name

    best = Best(tmp_path, write)
    best.keep_candidate()
    best.keep(1)  # and killed before that was written down: the question is heard again
    assert Best(tmp_path, write).keep(1) == tmp_path / "best-000001"
    assert kept == ["candidate"]
    best.keep_candidate()
    best.keep(2)
    assert (tmp_path / "best" / "which").read_text() == "2"
    best.prune(2)
    assert not (tmp_path / "best-000001").exists()


def test_changed_settings_outlive_servers_and_give_way_to_what_is_said_anew(served):
    assert served.desk.changes == ""
    served.desk.change({"alpha": 0.3, "every": 20})
    served.ask("add", 1, value=5)
    begin_again(served.segment)
    served.start()
    assert Changes.read(served.desk.changes).since(Changes()) == {"alpha": 0.3, "every": 20}
    assert served.desk.change({"every": 5}).number == 2
    forget_changes(served.segment, rule=False, pace=True)  # --resume RUN --every 10
    served.start()
    assert Changes.read(served.desk.changes).since(Changes()) == {"alpha": 0.3}


def test_a_change_that_cannot_be_written_down_is_refused(served):
    served.desk.change({"alpha": 0.3})
    before = served.desk.changes
    with file_limit(0), pytest.raises(SharedMemoryFull):
        served.desk.change({"alpha": 0.4})
    assert served.desk.changes == before
    served.start()
    assert served.desk.changes == before
