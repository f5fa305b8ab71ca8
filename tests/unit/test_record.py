"""The record: rows that can be trusted, followed live, and never cost the training."""

import json
import re
import resource
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maniple.errors import InvalidArgument, ManipleError
from maniple.record import Events, RunFolder, Tail, Tails, read_events
from maniple.record.events import append_rows, parts
from maniple.record.folder import fresh_name, write_json
from tests.limits import file_limit
from tests.unit.engines import engine


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "events" / "worker-0.jsonl"


# Events


def test_every_row_has_its_event_its_time_and_the_fields_of_its_writer(path):
    events = Events(path, worker=3)
    before = time.time()
    events.write("log", loss=0.5)
    events.write("leave")
    events.close()
    rows = read_events(path)
    assert [row["event"] for row in rows] == ["log", "leave"]
    for row in rows:
        assert before <= row["timestamp"] <= time.time()
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", row["datestamp"])
        assert row["worker"] == 3
    assert rows[0]["loss"] == 0.5


def test_datestamp_is_the_local_minute_of_its_timestamp(path, monkeypatch):
    now = [1_700_000_000.0]
    monkeypatch.setattr("maniple.record.events.clock.time", lambda: now[0])
    events = Events(path)
    for later in (0, 1, 59, 3600, 86400):
        now[0] = 1_700_000_000.0 + later
        events.write("tick")
    events.close()
    for row in read_events(path):
        assert row["datestamp"] == time.strftime("%Y-%m-%d %H:%M", time.localtime(row["timestamp"]))


def test_each_row_is_one_line_of_json(path):
    events = Events(path)
    events.write("log", note="two\nlines", name="ü")
    events.close()
    (line,) = path.read_text("utf8").splitlines()
    assert json.loads(line)["note"] == "two\nlines"


def test_rows_are_readable_at_once(path):
    events = Events(path)
    events.write("log", step=1)
    assert len(read_events(path)) == 1
    events.close()


def test_rows_of_a_restarted_worker_follow_those_before(path):
    for step in (1, 2):
        events = Events(path)
        events.write("log", step=step)
        events.close()
    assert [row["step"] for row in read_events(path)] == [1, 2]


@pytest.mark.parametrize("cut", [1, 40, -1])
def test_row_that_a_kill_has_cut_costs_only_itself(path, cut):
    path.parent.mkdir()
    row = b'{"event":"log","timestamp":1.0,"datestamp":"2026-11-17 12:00","worker":0,"step":1}\n'
    path.write_bytes(row + row[:cut])
    for step in (2, 3):
        events = Events(path, worker=0)
        events.write("log", step=step)
        events.close()
    assert [row["step"] for row in read_events(path)][-2:] == [2, 3]
    assert b"\n\n" not in path.read_bytes()


def test_numpy_values_become_numbers_and_lists(path):
    events = Events(path)
    events.write("log", a=np.float32(0.5), b=np.int64(3), c=np.arange(3), d=np.array(2.0), e=np.bool_(True))
    events.close()
    (row,) = read_events(path)
    assert [row[name] for name in "abcde"] == [0.5, 3, [0, 1, 2], 2.0, True]


def test_torch_values_become_numbers_and_lists(path):
    torch = engine("torch")
    events = Events(path)
    loss = (torch.ones(2, requires_grad=True) * 0.5).sum()
    events.write("log", a=loss, b=torch.tensor([1, 2]), c=torch.tensor(0.5, dtype=torch.bfloat16))
    events.close()
    (row,) = read_events(path)
    assert [row[name] for name in "abc"] == [1.0, [1, 2], 0.5]


def test_other_values_are_written_by_name(path):
    events = Events(path)
    events.write("log", where=Path("/tmp/x"), odd=1j, none=None, nan=float("nan"))
    events.close()
    (row,) = read_events(path)
    assert (row["where"], row["odd"], row["none"], row["nan"]) == ("/tmp/x", "1j", None, None)


def test_value_named_like_a_field_of_the_row_does_not_end_the_training(path):
    events = Events(path, worker=0)
    events.write("log", **{"event": "mine", "worker": 7})
    events.close()
    (row,) = read_events(path)
    assert (row["event"], row["worker"]) == ("log", 0)  # who wrote what stays true


@pytest.mark.parametrize("value", ["\udcff", {(1, 2): 3}, {1j: 2}])
def test_value_that_json_cannot_hold_does_not_end_the_training(path, value):
    events = Events(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        events.write("log", odd=value)
        events.write("log", step=2)
    events.close()
    assert read_events(path)[-1]["step"] == 2


def test_without_a_path_nothing_is_written():
    events = Events(None)
    events.write("log", loss=1)
    events.close()


def test_rows_after_the_close_are_dropped_without_an_error(path):
    events = Events(path)
    events.close()
    events.close()
    events.write("log")
    assert read_events(path) == []


def test_full_disk_is_said_once_and_does_not_raise():
    events = Events(Path("/dev/full"))
    with pytest.warns(UserWarning, match="events are being lost: .*No space left") as caught:
        for _ in range(3):
            events.write("log", loss=1)
    assert len(caught) == 1
    events.close()


@pytest.mark.parametrize("room", [0, 40])
def test_rows_lost_to_a_full_disk_are_counted_in_the_next_that_is_written(path, room):
    # With some room left, the system writes a part of a row: it must not spoil the next one.
    events = Events(path)
    events.write("log", step=0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, limits[1]))
        try:
            events.write("log", step=1)
            events.write("log", step=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    events.write("log", step=3)
    events.write("log", step=4)
    events.close()
    rows = read_events(path)
    assert [row["step"] for row in rows] == [0, 3, 4]
    assert [row.get("dropped") for row in rows] == [None, 2, None]


# Rows that another process has sent


@pytest.mark.parametrize("before", ["", "whole\n", "whole\ncut"])
def test_rows_that_were_sent_are_appended_once_wherever_a_try_was_cut(path, before):
    path.parent.mkdir()
    rows = b'{"step":1,"timestamp":1.0}\n{"step":2,"timestamp":2.0}\n'
    whole = before.encode() + (b"\n" if before.endswith("cut") else b"") + rows
    for cut in range(len(before), len(whole) + 1):
        path.write_bytes(whole[:cut])
        append_rows(path, rows)
        assert path.read_bytes() == whole, cut
        append_rows(path, rows)  # sent again, since the answer was lost
        assert path.read_bytes() == whole, cut


def test_rows_that_were_sent_go_on_where_a_full_disk_has_cut_them(path):
    path.parent.mkdir()
    rows = b"".join(b'{"step":%d}\n' % step for step in range(100))
    for limit in (0, 5, 500):
        with file_limit(limit), pytest.raises(OSError, match="File too large"):
            append_rows(path, rows)
    append_rows(path, rows)
    assert path.read_bytes() == rows


# Files that follow one another


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr("maniple.record.events.PART_BYTES", 1000)


def test_large_file_is_followed_by_another_and_readers_see_one_record(path, small_parts):
    for life in range(2):  # a worker that is started again goes on with the newest
        events = Events(path)
        for step in range(100):
            events.write("log", step=100 * life + step)
        events.close()
    files = parts(path)
    assert [file.name for file in files[:3]] == ["worker-0.jsonl", "worker-0_000001.jsonl", "worker-0_000002.jsonl"]
    assert all(500 < file.stat().st_size <= 1000 for file in files[:-1])
    assert [row["step"] for row in read_events(path)] == list(range(200))
    assert RunFolder(path.parents[1]).ranks() == [0]


def test_rows_that_were_sent_go_to_the_newest_file_once(path, small_parts):
    path.parent.mkdir()
    batches = [
        b"".join(b'{"event":"log","timestamp":1.0,"step":%d}\n' % step for step in range(k, k + 40))
        for k in range(0, 400, 40)
    ]
    for batch in batches:
        for _ in range(2):
            append_rows(path, batch)
    assert len(parts(path)) > 3
    assert [row["step"] for row in read_events(path)] == list(range(400))


def test_where_no_next_file_can_be_made_the_old_one_grows_on(path, small_parts):
    events = Events(path)
    path.with_name("worker-0_000001.jsonl").mkdir()
    for step in range(100):
        events.write("log", step=step)
    events.close()
    path.with_name("worker-0_000001.jsonl").rmdir()
    assert [row["step"] for row in read_events(path)] == list(range(100))


@given(st.lists(st.sampled_from(["worker-1", "worker-10", "host", "look"]), max_size=60))
def test_followers_get_each_row_once_and_each_writers_in_order(tmp_path_factory, acts):
    folder = tmp_path_factory.mktemp("events")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("maniple.record.events.PART_BYTES", 200)  # two rows
        writers = {who: Events(folder / f"{who}.jsonl") for who in ("worker-1", "worker-10", "host")}
        tails, got = Tails(folder), {who: list[int]() for who in writers}
        wrote = dict.fromkeys(writers, 0)
        for act in [*acts, "look"]:
            if act == "look":
                for who, lines in tails.pieces():
                    got[who] += [json.loads(line)["step"] for line in lines]
            else:
                writers[act].write("log", step=wrote[act])
                wrote[act] += 1
        for events in writers.values():
            events.close()
    assert got == {who: list(range(count)) for who, count in wrote.items()}


# Reading


@pytest.mark.parametrize("torn", [b'{"event":"log","st', b"{", b"\x00\x00", b'{"a":"\xff"}', b"[1]", b"12", b""])
def test_torn_last_line_is_passed_over(path, torn):
    events = Events(path)
    events.write("log", step=1)
    events.close()
    with path.open("ab") as file:
        file.write(torn)
    assert [row["step"] for row in read_events(path)] == [1]


def test_torn_line_in_the_middle_costs_only_itself(path):
    path.parent.mkdir()
    rows = [json.dumps({"event": "log", "timestamp": 1.5, "step": step}).encode() for step in (1, 3)]
    path.write_bytes(rows[0] + b'\n{"st\n' + rows[1] + b"\n")
    assert [row["step"] for row in read_events(path)] == [1, 3]


def test_missing_file_has_no_rows(tmp_path):
    assert read_events(tmp_path / "none.jsonl") == []


@given(st.lists(st.binary(max_size=6).map(lambda text: text.replace(b"\n", b"")), max_size=6), st.data())
def test_tail_gives_each_complete_line_once_however_it_arrives(tmp_path_factory, lines, data):
    path = tmp_path_factory.mktemp("tail") / "log"
    tail = Tail(path)
    assert tail.lines() == []  # before the file is there
    whole = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    got: list[bytes] = []
    with path.open("wb", buffering=0) as file:
        for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            file.write(whole[start:stop])
            got += tail.lines()
            assert got == lines[: whole[:stop].count(b"\n")]
        file.write(b"unfinished")
    assert tail.lines() == []
    assert tail.close() == [b"unfinished"]


def test_tail_gives_nothing_twice_at_its_close(tmp_path):
    (tmp_path / "log").write_bytes(b"one\ntwo\n")
    tail = Tail(tmp_path / "log")
    assert tail.lines() == [b"one", b"two"]
    assert tail.close() == []


def test_tail_that_is_dropped_keeps_no_file_open(tmp_path):
    (tmp_path / "log").write_bytes(b"one\n")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        assert Tail(tmp_path / "log").lines() == [b"one"]
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 20


# The run folder


def test_folder_of_a_run_has_its_parts_and_last_points_at_it(tmp_path):
    folder = RunFolder.create(tmp_path / "runs", "first")
    assert folder.path == tmp_path / "runs" / "first"
    assert folder.center.is_dir()
    assert folder.events(0).parent.is_dir()
    assert folder.log("host").parent.is_dir()
    assert (tmp_path / "runs" / "last").resolve() == folder.path
    second = RunFolder.create(tmp_path / "runs", "second")
    assert (tmp_path / "runs" / "last").resolve() == second.path
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["first", "last", "second"]


def test_last_still_points_at_the_run_when_all_runs_are_moved(tmp_path):
    RunFolder.create(tmp_path / "runs", "first")
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "last").resolve() == tmp_path / "moved" / "first"


def test_run_never_overwrites_another(tmp_path):
    (RunFolder.create(tmp_path, "mine").path / "run.json").write_text("precious")
    RunFolder.create(tmp_path, "later")
    with pytest.raises(InvalidArgument, match="mine exists already"):
        RunFolder.create(tmp_path, "mine")
    assert (tmp_path / "mine" / "run.json").read_text() == "precious"
    assert (tmp_path / "last").resolve() == tmp_path / "later"


def test_folder_of_the_user_s_own_named_last_is_left_alone(tmp_path):
    (tmp_path / "last").mkdir()
    (tmp_path / "last" / "notes").touch()
    RunFolder.create(tmp_path, "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "run"]
    assert (tmp_path / "last" / "notes").exists()


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2J", "a\0b", "a\u2028b", "a\udc80b"])
def test_control_characters_cannot_name_a_run(tmp_path, name):
    with pytest.raises(InvalidArgument, match=r"the run's name .* holds the control character"):
        RunFolder.create(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", ".", "..", "last", "a/b", "/tmp/x"])
def test_name_that_would_lie_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(InvalidArgument, match="cannot name a run"):
        RunFolder.create(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path):
    (tmp_path / "runs").write_text("a file stands in the way")
    with pytest.raises(ManipleError, match="runs"):
        RunFolder.create(tmp_path / "runs", "name")


def test_files_are_named_for_who_wrote_them(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.events(3) == tmp_path / "events" / "worker-3.jsonl"
    assert folder.events("host") == tmp_path / "events" / "host.jsonl"
    assert folder.log(3) == tmp_path / "logs" / "worker-3.log"


def test_what_is_described_is_added_to_what_was_known(tmp_path):
    folder = RunFolder.create(tmp_path, "run")
    folder.describe(asked={"workers": 2}, exit_code=None)
    folder.describe(exit_code=0, where=Path("/x"))
    assert json.loads((folder.path / "run.json").read_text()) == {
        "asked": {"workers": 2},
        "exit_code": 0,
        "where": "/x",
    }


def test_json_is_replaced_whole(tmp_path):
    path = tmp_path / "run.json"
    write_json(path, {"a": 1})
    with path.open() as reader:  # a reader that opened the old file reads it to its end
        write_json(path, {"a": 2})
        assert json.load(reader) == {"a": 1}
    assert json.loads(path.read_text()) == {"a": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_fresh_names_begin_with_the_script_and_sort_by_time(tmp_path):
    assert re.fullmatch(r"train-\d{8}-\d{6}", fresh_name(tmp_path, Path("/x/train.py")))


def test_two_runs_within_a_second_get_names_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda *_: "now")
    for name in ("train-now", "train-now-2", "train-now-3"):
        assert fresh_name(tmp_path, Path("train.py")) == name
        (tmp_path / name).mkdir()


def test_last_points_at_the_run_before_one_that_could_not_begin(tmp_path):
    first = RunFolder.create(tmp_path, "first")
    RunFolder.create(tmp_path, "second").discard()
    assert (tmp_path / "last").resolve() == first.path
    third, fourth = RunFolder.create(tmp_path, "third"), RunFolder.create(tmp_path, "fourth")
    third.discard()
    assert (tmp_path / "last").resolve() == fourth.path, "that one has begun since"
    RunFolder.create(tmp_path / "other", "only").discard()
    assert not (tmp_path / "other" / "last").is_symlink(), "a link to nothing helps nobody"
