"""Being watched: only what tells of a run is shown, orders are checked, and a mirror is the folder byte by byte."""

import os
import threading

import msgspec
import numpy as np
import pytest

from maniple import BSP, EASGD
from maniple.adapters import adapt
from maniple.center.shared import SharedCenter
from maniple.connection.link import Link, check_reply
from maniple.environment import Environment
from maniple.errors import BadFrame, HostAway, InvalidArgument, NotAdmitted
from maniple.host.watchers import MAX_ECHO_BYTES
from maniple.record import Events, RunFolder, read_events
from maniple.watch import Mirror, Steering
from maniple.wire.messages import (
    FILE_PART_BYTES,
    DoctorReply,
    DoctorRequest,
    FileList,
    FilePart,
    LineTest,
    ListFiles,
    Message,
    ReadFile,
    WatcherCommand,
)
from tests.serving import TOKEN, Serving

PATIENCE_S = 60.0  # only against hanging


@pytest.fixture
def serving(tmp_path, monkeypatch):
    """A host's server, whose folder has rows of two workers and things that are nobody's business."""
    served = Serving(tmp_path)
    folder = RunFolder(served.run)
    folder.describe(lineage="0123456789abcdef", asked={"rule": None})
    for rank in range(2):
        folder.events(rank).write_bytes(b'{"event":"log"}\n' * 10)
    (served.run / "token").write_text(TOKEN)
    (served.run / "logs" / "worker-0.log").write_text("printed")
    (served.run / "events" / "link.jsonl").symlink_to(served.run / "token")
    yield served
    served.close()


def environment_of(serving: Serving, token: str = TOKEN) -> Environment:
    return Environment(address=str(serving.address), token=token)


def share(serving: Serving, rule, name: str = "center-0") -> None:
    model = adapt({"w": np.zeros(8)}, None)
    SharedCenter.open_or_create(serving.segment, name, model, rank=0, note=repr(rule))[0].close()


def same(mirror: Mirror, serving: Serving) -> bool:
    """The mirror has all files that tell of the run, and no others."""
    shown = {path: path.read_bytes() for path in serving.run.glob("events/*.jsonl") if not path.is_symlink()}
    shown[serving.run / "run.json"] = (serving.run / "run.json").read_bytes()
    here = {path.relative_to(mirror.folder): path.read_bytes() for path in mirror.folder.rglob("*") if path.is_file()}
    return here == {path.relative_to(serving.run): data for path, data in shown.items()}


def test_only_what_tells_of_the_run_is_shown(serving):
    link = Link(serving.door(), "watch")
    stream = link.stream()
    stream.send(ListFiles())
    found, size = stream.receive()
    names = [name for name, *_ in msgspec.json.decode(stream.receive_bytes(size, at_most=1 << 20))]
    assert isinstance(found, FileList) and not found.is_over
    assert sorted(names) == ["events/server.jsonl", "events/worker-0.jsonl", "events/worker-1.jsonl", "run.json"]
    link.drop()


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "events/../token",
        "../run/token",
        "logs/worker-0.log",
        "events/link.jsonl",
        "events/none.jsonl",
        "events",
        "",
        "/etc/passwd",
        "events/worker-0.jsonl\0",
        "events/worker-0.jsonl\n",
        "x" * 9999,
    ],
)
def test_path_tricks_are_refused(serving, name):
    with pytest.raises(InvalidArgument, match="shown"):
        Link(serving.door(), "watch").request(ReadFile(name, 0), reply=Message)


def test_a_piece_is_bounded_and_positions_are_checked(serving):
    path = RunFolder(serving.run).events(0)
    path.write_bytes(os.urandom(FILE_PART_BYTES + 5))
    link = Link(serving.door(), "watch")
    for offset, length in ((0, FILE_PART_BYTES), (FILE_PART_BYTES, 5), (FILE_PART_BYTES + 5, 0), (1 << 50, 0)):
        stream = link.stream()
        stream.send(ReadFile("events/worker-0.jsonl", offset))
        answer, size = stream.receive()
        check_reply(answer, FilePart)
        assert size == length
        assert stream.receive_bytes(size, at_most=size) == path.read_bytes()[offset : offset + length]
    with pytest.raises(InvalidArgument):
        link.request(ReadFile("events/worker-0.jsonl", -1), reply=Message)
    link.drop()
    with pytest.raises(BadFrame):
        Link(serving.door(), "watch").request(WatcherCommand("dance", "somebody"), reply=Message)


def test_a_wrong_token_is_refused(serving, tmp_path):
    environment = environment_of(serving, token="of another run")
    with pytest.raises(NotAdmitted):
        Steering(environment).stop()
    with pytest.raises(NotAdmitted):
        Mirror(environment, tmp_path / "mirror").refresh()
    assert not RunFolder(serving.run).is_stopped


def test_a_mirror_is_the_folder_byte_by_byte_while_rows_are_written(serving, tmp_path):
    mirror = Mirror(environment_of(serving), tmp_path / "mirror")
    is_over = threading.Event()

    def write(rank: int) -> None:
        events = Events(RunFolder(serving.run).events(rank), worker=rank)
        while not is_over.is_set():
            events.write("log", loss=0.5, padding="x" * 1000)
            is_over.wait(0.005)
        events.close()

    writers = [threading.Thread(target=write, args=(rank,)) for rank in range(3)]
    for writer in writers:
        writer.start()
    for _ in range(20):
        mirror.refresh(PATIENCE_S)
        assert not mirror.is_away
        for path in (mirror.folder / "events").iterdir():
            assert (serving.run / "events" / path.name).read_bytes().startswith(path.read_bytes())
    is_over.set()
    for writer in writers:
        writer.join()
    RunFolder(serving.run).describe(exit_code=None)
    RunFolder(serving.run).events(2).write_bytes(os.urandom(9))  # another file of that name, which cannot be
    for name in range(40):  # more than are asked for at once
        RunFolder(serving.run).events(f"other-{name}").write_bytes(os.urandom(100))
    mirror.refresh(PATIENCE_S)
    again = Mirror(environment_of(serving), mirror.folder)  # goes on with what is there
    again.refresh(PATIENCE_S)
    assert same(mirror, serving)
    mirror.close()
    again.close()


def test_a_file_is_mirrored_whole_before_the_one_that_follows_it(serving, tmp_path, monkeypatch):
    first = RunFolder(serving.run).events(0)
    first.write_bytes(os.urandom(2 * FILE_PART_BYTES + 1))
    first.with_name("worker-0_000001.jsonl").write_bytes(os.urandom(FILE_PART_BYTES + 1))
    first.with_name("worker-0_000002.jsonl").write_bytes(b"newest")
    mirror, asked = Mirror(environment_of(serving), tmp_path / "mirror"), list[str]()
    append = Mirror._append

    def note(self, stream, names, deadline):
        asked.extend(name for name in names if "worker-0" in name)
        append(self, stream, names, deadline)

    monkeypatch.setattr(Mirror, "_append", note)
    mirror.refresh(PATIENCE_S)
    mirror.close()
    names = [f"events/worker-0{part}.jsonl" for part in ("", "_000001", "_000002")]
    assert asked == [names[0]] * 3 + [names[1]] * 2 + [names[2]]
    assert same(mirror, serving)


def test_a_mirror_of_another_run_begins_anew(serving, tmp_path):
    folder = RunFolder(tmp_path / "mirror")
    (folder.path / "events").mkdir(parents=True)
    folder.describe(lineage="f" * 16)
    folder.events(7).write_text("rows of another run\n")
    mirror = Mirror(environment_of(serving), folder.path)
    mirror.refresh()
    assert same(mirror, serving)
    mirror.close()


def test_a_mirror_whose_host_is_gone_says_so(serving, tmp_path):
    mirror = Mirror(Environment(address="127.0.0.1:9", token=TOKEN), tmp_path / "mirror")
    mirror.refresh()
    assert mirror.is_away and "refused" in mirror.away
    with pytest.raises(HostAway, match="maniple status"):
        Steering(Environment(address="127.0.0.1:9", token=TOKEN)).stop()


def test_watchers_are_notified_of_the_end(serving, tmp_path):
    mirror = Mirror(environment_of(serving), tmp_path / "mirror")
    mirror.refresh()
    serving.server.end()
    while not mirror.is_over and not mirror.is_away:
        mirror.refresh()
    assert mirror.is_over and not mirror.is_away
    mirror.refresh()
    assert mirror.is_over and not mirror.is_away, "nobody is asked any more"


def test_orders_are_followed_and_recorded(serving):
    steering = Steering(environment_of(serving), who="ada")
    with pytest.raises(InvalidArgument, match="training has begun"):
        steering.change({"alpha": 0.3})
    with pytest.raises(InvalidArgument, match="training has begun"):
        steering.snapshot()
    share(serving, EASGD())
    assert "change 1, alpha=0.3" in steering.change({"alpha": 0.3})
    assert steering.snapshot() == "snapshot-000001"
    assert (serving.run / "center" / "snapshot-000001" / "manifest.json").exists()
    with pytest.raises(InvalidArgument, match="no such setting"):
        steering.change({"beta": 0.3})
    with pytest.raises(InvalidArgument, match="finite"):
        steering.change({"alpha": float("nan")})
    steering.stop()
    assert RunFolder(serving.run).is_stopped
    rows = {row["event"]: row for row in read_events(RunFolder(serving.run).events("server"))}
    assert rows["changed"]["settings"] == {"alpha": 0.3}
    assert {rows[event]["asked_by"] for event in ("changed", "snapshot", "ordered")} == {"ada"}


def test_synchronous_rules_are_left_alone(serving):
    share(serving, BSP())
    with pytest.raises(InvalidArgument, match="the same step"):
        Steering(environment_of(serving)).change({"every": 5})
    share(serving, EASGD(), "center-1")
    Steering(environment_of(serving)).change({"every": 5})


def test_a_test_of_the_line_sinks_and_returns_bytes_and_is_refused_beyond_its_bound(serving):
    link = Link(serving.door(), "doctor")
    stream = link.stream()
    for up, down in ((0, 70_000), (70_000, 0), (0, MAX_ECHO_BYTES), (MAX_ECHO_BYTES, 0)):
        stream.send(LineTest(down), bytes(up))
        message, size = stream.receive()
        assert message == LineTest() and size == down
        stream.receive_bytes(size, at_most=MAX_ECHO_BYTES)
    for asked, payload in ((MAX_ECHO_BYTES + 1, 0), (-1, 0), (0, MAX_ECHO_BYTES + 1)):
        broken = Link(serving.door(), "doctor")
        with pytest.raises((BadFrame, ConnectionError)):
            broken.stream().send(LineTest(asked), bytes(payload))
            check_reply(broken.stream().receive_message(), LineTest)
        broken.abort()
    link.abort()


def test_the_doctor_learns_the_time_of_a_step_without_its_exchanges(serving):
    events = Events(RunFolder(serving.run).events(2))
    events.write("progress", step=10, samples=0, elapsed=4.0, exchange=2.0, others=1.0)
    events.write("progress", step=30, samples=0, elapsed=14.0, exchange=4.0, others=3.0)
    events.close()
    link = Link(serving.door(), "doctor")
    link.stream().send(DoctorRequest())
    message, size = link.stream().receive()
    about = msgspec.json.decode(link.stream().receive_bytes(size, at_most=1 << 20))
    assert isinstance(message, DoctorReply)
    assert about["step_s"] == pytest.approx((10.0 - 4.0) / 20)
    link.abort()
