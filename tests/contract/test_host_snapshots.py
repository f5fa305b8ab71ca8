"""Hosts that continue a run: from surviving memory, from a snapshot, and what they say was lost."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maniple.adapters import adapt
from maniple.center import SharedCenter
from maniple.controller import Controller
from maniple.errors import InvalidArgument
from maniple.host import Host
from maniple.host.controller_requests import ControllerRequests
from maniple.host.snapshots import BestCenter, RestorePoint
from maniple.record import Events, RunFolder, read_events
from maniple.record.folder import write_whole
from maniple.sampler import LeaseTerms, position
from maniple.sampler import leases as table
from maniple.sampler.position import Position
from maniple.settings.options import Limits
from maniple.wire.messages import ControllerRequest

from ..limits import file_limit
from .test_snapshot import damage_truncated, share, some


@pytest.fixture
def memory(tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir()
    return memory


def begun(memory, tmp_path) -> Host:
    host = Host.start(memory, tmp_path, "run", {"asked": 1})
    share(host.segment, some()).close()
    return host


def test_host_takes_a_surviving_center_over(memory, tmp_path):
    first = begun(memory, tmp_path)
    lineage = first.lineage
    first.segment.close()  # killed
    second = Host.resume(memory, tmp_path / "run", {"asked": 2})
    assert second.lineage == lineage
    assert second.notices == ["the center has survived in shared memory: no exchange was lost"]
    assert "scalar" in load_file(second.close(0)[0])
    assert list(memory.iterdir()) == []
    rows = read_events(RunFolder(tmp_path / "run").events("host"))
    assert [row["event"] for row in rows] == ["start", "start", "adopted", "snapshot", "end"]


def test_run_that_has_ended_is_restored_and_says_what_was_lost(memory, tmp_path):
    first = begun(memory, tmp_path)
    first.close(0)
    for count in (1, 2):
        again = Host.resume(memory, tmp_path / "run", {})
        assert again.lineage == first.lineage
        assert "begins again from snapshot-" in again.notices[0]
        assert RunFolder(tmp_path / "run").read()["restored"] == count
        again.close(0)


def test_damaged_newest_snapshot_is_refused_and_the_older_one_offered(memory, tmp_path):
    first = begun(memory, tmp_path)
    first.save()
    first.close(0)
    damage_truncated(tmp_path / "run" / "center" / "snapshot-000002")
    with pytest.raises(InvalidArgument, match=r"truncated.*whole is snapshot-000001.*--snapshot 1"):
        Host.resume(memory, tmp_path / "run", {})
    assert list(memory.iterdir()) == []
    chosen = Host.resume(memory, tmp_path / "run", {}, which="1")
    chosen.close(0)
    damage_truncated(tmp_path / "run" / "center" / "snapshot-000003")
    fallen_back = Host.resume(memory, tmp_path / "run", {}, falls_back=True)
    assert "passed over" in fallen_back.notices[0]
    fallen_back.close(0)


def test_run_whose_host_lives_cannot_be_resumed(memory, tmp_path):
    first = begun(memory, tmp_path)
    with pytest.raises(InvalidArgument, match="going on"):
        Host.resume(memory, tmp_path / "run", {})
    first.close(0)


def test_center_of_a_host_that_was_taken_for_dead_is_given_up(memory, tmp_path):
    """Its run has gone on from a snapshot on another machine: it saves nothing, and is not taken over."""
    there = tmp_path / "there"
    there.mkdir()
    first = begun(memory, tmp_path)
    first.save()
    second = Host.resume(there, tmp_path / "run", {})
    assert first.save() is None
    first.segment.close()  # killed at last
    second.close(0)
    third = Host.resume(memory, tmp_path / "run", {})
    assert "begins again from snapshot-000002" in third.notices[0]
    fourth = Host.resume(there, tmp_path / "run", {}, which="2")
    assert third.close(1) == []
    assert fourth.folder.read()["exit_code"] is None, "the run goes on"
    fourth.close(0)
    assert not list(memory.iterdir()) and not list(there.iterdir())
    assert [path.name for path in sorted((tmp_path / "run" / "center").glob("snapshot-*"))][-1] == "snapshot-000003"


def test_run_whose_center_cannot_be_saved_says_so_and_is_not_taken_for_complete(memory, tmp_path):
    first = begun(memory, tmp_path)
    first.save()
    for _ in range(2):
        share(first.segment, {"large": np.ones(10_000)}, "center-1").close()
        with file_limit(10_000), pytest.raises(OSError, match="too large"):
            first.close(0)
        run = first.folder.read()
        assert (run["exit_code"], run["is_saved"]) == (3, False)
        assert str(first.segment.path) in run["end"]
        if _ == 0:
            first = Host.resume(memory, tmp_path / "run", {})
    shutil.rmtree(first.segment.path)  # the machine was started again
    again = Host.resume(memory, tmp_path / "run", {})
    assert "after that" in again.notices[0] and "is lost" in again.notices[0]
    again.close(0)
    assert (again.folder.read()["exit_code"], again.folder.read()["is_saved"]) == (0, True)


def test_run_that_cannot_be_described_leaves_nothing_in_memory(memory, tmp_path, monkeypatch):
    monkeypatch.setattr(RunFolder, "describe", lambda *_, **__: write_whole(tmp_path / "none" / "run.json", b""))
    with pytest.raises(OSError):
        begun(memory, tmp_path)
    assert not list(memory.iterdir())


def test_folder_that_is_no_run_cannot_be_resumed(memory, tmp_path):
    with pytest.raises(InvalidArgument, match="no run folder"):
        Host.resume(memory, tmp_path, {})


def test_successor_that_cannot_begin_leaves_the_surviving_center_where_it_is(memory, tmp_path):
    first = begun(memory, tmp_path)
    first.segment.close()
    second = Host.resume(memory, tmp_path / "run", {})
    second.abandon()
    third = Host.resume(memory, tmp_path / "run", {})
    assert "survived" in third.notices[0]
    third.close(0)


def validate(host: Host, w: float, loss: float) -> bool:
    """Set the center to `w`, and send a server's controller its loss; True if it was the best so far."""
    center = share(host.segment, {"w": np.zeros(2)})
    center.push(adapt({"w": np.full(2, float(w))}))
    center.close()
    best = BestCenter(host.segment, host.folder, Events(None))
    requests = ControllerRequests(Controller(), host.segment, Events(None), Limits(), best)
    question = ControllerRequest(int(1000 * time.monotonic()), "validated", 0, 1, 0, 0)
    return json.loads(requests.answer("w", question, {"loss": loss}))["best"]


def best_of(run) -> list[float]:
    return load_file(run / "center" / "best" / "center-0.safetensors")["w"].tolist()


@pytest.fixture
def went_back(memory, tmp_path):
    """A run with snapshot 1 at w = 20 and its best at w = 100, validated later."""
    host = Host.start(memory, tmp_path, "run", {})
    assert validate(host, 20, loss=5.0)
    host.save()
    assert validate(host, 100, loss=1.0)
    host.close(0)
    return tmp_path / "run"


def test_best_of_a_time_that_the_run_has_gone_back_behind_is_put_aside(memory, went_back):
    host = Host.resume(memory, went_back, {}, which="1")
    assert "it is kept as best-000002-abandoned-1" in host.notices[-1]
    assert not (went_back / "center/best").is_symlink(), "the best of that time was removed for its successor"
    assert validate(host, 30, loss=7.0), "so the next is the best of what there is"
    assert best_of(went_back) == [30, 30]
    assert validate(host, 40, loss=3.0)
    assert best_of(went_back) == [40, 40]
    host.close(0)
    aside = Host.resume(memory, went_back, {}, which="best-000002-abandoned-1")
    assert share(aside.segment, {"w": np.zeros(2)}).read(0).tolist() == [100, 100], "it can be gone back to"
    aside.close(0)


def test_run_that_goes_on_from_its_best_or_from_a_later_snapshot_keeps_it(memory, went_back):
    for which in ("best", None):
        host = Host.resume(memory, went_back, {}, which=which)
        assert len(host.notices) == 1
        assert not validate(host, 30, loss=3.0), "1.0 is better"
        assert best_of(went_back) == [100, 100]
        host.close(0)
    host = Host.resume(memory, went_back, {})
    assert validate(host, 50, loss=0.5)
    assert best_of(went_back) == [50, 50]
    host.close(0)


def test_host_that_was_killed_while_going_back_has_its_best_put_aside_by_the_next(memory, went_back):
    host = Host.resume(memory, went_back, {}, which="1")
    (went_back / "center/best-000002-abandoned-1").rename(
        went_back / "center/best-000002"
    )  # as if it had not come to it
    RestorePoint(1, snapshot="snapshot-000001").write(host.segment.path)
    host.segment.close()
    again = Host.resume(memory, went_back, {})
    assert "survived" in again.notices[0] and "best-000002-abandoned-1" in again.notices[1]
    again.close(0)


def test_best_is_not_removed_for_a_better_one_that_cannot_be_written(memory, tmp_path):
    host = Host.start(memory, tmp_path, "run", {})
    assert validate(host, 20, loss=5.0)
    (host.folder.center / "candidate").write_text("in the way")
    assert validate(host, 30, loss=4.0)
    assert best_of(tmp_path / "run") == [20, 20]
    host.close(0)


def write_progress(run: Path, steps: int) -> None:
    events = Events(RunFolder(run).events(0))
    events.write("join", rank=0)
    for step in (steps - 20, steps):
        events.write("progress", step=step, samples=10 * step, elapsed=1.0)
    events.close()


@pytest.mark.parametrize("how", ["adopted", "restored", "ended"])
def test_steps_after_the_center_of_synchronous_workers_are_reported_as_repeated(memory, tmp_path, how):
    first = begun(memory, tmp_path)
    write_progress(tmp_path / "run", 138)
    at = Position(0, 2, True, steps=1234, own_steps=100, rounds=1234, samplers={0: (3, 4096, 10_000)})
    at.write(first.segment.path)
    if how == "adopted":
        first.segment.close()  # killed
    elif how == "restored":
        first.save()
        first.segment.remove()  # with the machine
    else:
        first.close(1)
    second = Host.resume(memory, tmp_path / "run", {"workers": 2})
    assert "about 38 steps that were made after it are repeated" in second.notices[0]
    assert second.notices[1] == "it continues from step 1,234 of worker 0, epoch 3, sample 4,096 of 10,000"
    assert not any("nothing was lost" in line for line in second.notices)
    assert position.read(second.segment.path) == [at], "the workers find it there"
    second.close(0)


def test_synchronous_workers_lost_nothing_if_the_center_has_their_last_step(memory, tmp_path):
    first = begun(memory, tmp_path)
    write_progress(tmp_path / "run", 138)
    Position(0, 2, True, steps=138, own_steps=138).write(first.segment.path)
    first.close(130)
    second = Host.resume(memory, tmp_path / "run", {"workers": 2})
    assert (
        second.notices[0].endswith("nothing was lost") and second.notices[1] == "it continues from step 138 of worker 0"
    )
    second.close(0)


def test_fewer_workers_with_shares_of_their_own_continue_where_the_last_of_them_was(memory, tmp_path):
    first = begun(memory, tmp_path)
    for rank, environment in enumerate((300, 200, 400)):
        Position(rank, 3, False, 100, 100, samplers={0: (1, environment, 1000)}).write(first.segment.path)
    first.close(0)
    same = Host.resume(memory, tmp_path / "run", {"workers": 3})
    assert [one.samplers[0][1] for one in position.read(same.segment.path)] == [300, 200, 400]
    same.close(0)
    fewer = Host.resume(memory, tmp_path / "run", {"workers": 2})
    assert [(one.is_common, one.samplers[0]) for one in position.read(fewer.segment.path)] == [(True, (1, 200, 1000))]
    fewer.close(0)


def test_synchronous_workers_without_a_saved_position_are_not_said_to_have_lost_nothing(memory, tmp_path):
    first = Host.start(memory, tmp_path, "run", {})
    center, _ = SharedCenter.open_or_create(first.segment, "center-0", adapt(some()), rank=0, note="BSP()")
    center.close()
    first.segment.close()  # killed
    second = Host.resume(memory, tmp_path / "run", {"workers": 2})
    assert second.notices == [
        "the center has survived in shared memory: steps since it was brought up to date are lost",
        "where it was in the data is not known: a script with fixed shares begins its epochs again",
    ]
    second.close(0)


def test_resumed_run_knows_that_its_script_looks_at_a_batch_and_where_its_passes_begin(memory, tmp_path):
    first = begun(memory, tmp_path)
    leases = table.LeaseTable.open(first.segment, 0, LeaseTerms(10, 3, True), (0, 0))
    for epoch in range(2):
        lease = leases.take(epoch, most=10)
        leases.take(-1, done=[lease.slot])
    assert leases.first_epoch(3) == 2
    leases.close()
    position.is_looked_at(first.segment.path, has_looked=True)
    for how in ("survived", "begins again"):
        if how == "survived":
            first.segment.close()  # killed
        else:
            first.close(0)
        first = Host.resume(memory, tmp_path / "run", {})
        assert how in first.notices[0]
        assert position.is_looked_at(first.segment.path)
        leases = table.LeaseTable.open(first.segment, 0, LeaseTerms(10, 3, True), (0, 0))
        assert leases.first_epoch(3) == 0, "in the first epoch of which samples are left"
        leases.close()
    first.close(0)


def test_file_with_an_array_of_a_bad_name_is_not_brought(memory, tmp_path):
    save_file({"fine": np.ones(2), "new\nline": np.ones(2)}, tmp_path / "brought.safetensors")
    with pytest.raises(InvalidArgument, match=r"'new\\nline' cannot name an array"):
        Host.start(memory, tmp_path, "run", {}, arrays=tmp_path / "brought.safetensors")
    assert not list(memory.iterdir()) and not (tmp_path / "run").exists()
