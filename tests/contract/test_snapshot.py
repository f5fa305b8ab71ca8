"""Snapshots: whole or absent, checked before they are trusted, restored as they were."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maniple import EASGD, Rule
from maniple.adapters import adapt
from maniple.center import Segment, Shared
from maniple.center.arrays import Brought, array_file, array_names
from maniple.center.snapshot import Manifest, check_snapshot, newest_snapshot, prune, restore, snapshots, write_snapshot
from maniple.center.stage import Stages, word_of
from maniple.contracts import Entry, Moment
from maniple.controller import Controller
from maniple.errors import InvalidArgument
from maniple.host import Host
from maniple.host.best import Best
from maniple.host.desk import Desk
from maniple.host.keeping import keep
from maniple.host.restored import Restored
from maniple.host.saving import save_as
from maniple.place import Limits
from maniple.record import Events, Folder, read_events
from maniple.record.folder import write_whole
from maniple.sampler import Terms, position, table
from maniple.sampler.lease import Holder
from maniple.sampler.position import Position
from maniple.wire.messages import Request

from ..limits import descriptor_limit, file_limit

LINEAGE = "0123456789abcdef"


@pytest.fixture
def segment(tmp_path):
    (tmp_path / "shm").mkdir()
    segment = Segment.create(tmp_path / "shm", LINEAGE, tmp_path)
    yield segment
    segment.remove()


def some() -> dict[str, np.ndarray]:
    return {
        "w": np.arange(6.0).reshape(2, 3),
        "half": np.array([0.5, 1.5], "float16"),
        "scalar": np.array(3.0, "float32"),
        "empty": np.zeros((0, 2), "float32"),
    }


def share(segment: Segment, params: dict[str, np.ndarray], name: str = "center-0") -> Shared:
    return Shared.open_or_create(segment, name, adapt(params), rank=0, note="a rule")[0]


def save(segment: Segment, folder, **rest):
    return write_snapshot(segment, folder, **{"lineage": LINEAGE, "restored": 0, "versions": {"python": "3"}} | rest)


def test_nothing_is_written_before_there_is_a_center(tmp_path, segment):
    assert save(segment, tmp_path / "center") is None


def test_snapshot_holds_every_parameter_and_what_is_known_of_it(tmp_path, segment):
    params = some()
    center = share(segment, params)
    center.exchange(adapt(params), EASGD(0.5), None, Moment())
    center._versions[1] = 3
    path = save(segment, tmp_path / "center")
    assert path.name == "snapshot-000001"
    saved = load_file(tmp_path / "center" / "center-0.safetensors")
    assert set(saved) == set(params)
    for name, value in params.items():
        np.testing.assert_array_equal(saved[name], value)
        assert saved[name].shape == value.shape
    manifest = json.loads((path / "manifest.json").read_text())
    (about,) = manifest["centers"]
    assert (manifest["lineage"], manifest["number"], manifest["updates"]) == (LINEAGE, 1, 1)
    assert (about["digest"], about["torn"], about["note"]) == (center.layout.digest, ["half"], "a rule")
    center.close()


def test_restored_center_is_the_one_that_was_saved(tmp_path, segment):
    params = some()
    center = share(segment, params)
    for _ in range(3):
        center.push(adapt(params))
    arrays = {"i": np.arange(5), "c": np.array([[1 + 2j, 3]]), "u8": np.array(7, "uint8"), "a/b": np.zeros((0, 4))}
    for name, value in arrays.items():
        brought = Brought(Entry(name, value.shape, str(value.dtype)), value)
        Shared.open_or_create(segment, array_file(name), brought, rank=0)[0].close()
    versions = center.versions
    center.close()
    path = save(segment, tmp_path / "center")
    (tmp_path / "other").mkdir()
    again = Segment.create(tmp_path / "other", LINEAGE, tmp_path)
    restore(again, path, check_snapshot(path, LINEAGE))
    back = Shared.open(again, again.path / "center-0")
    for i, value in enumerate(params.values()):
        np.testing.assert_array_equal(back.read(i), value)
    assert (back.versions, back.note) == (versions, "a rule")
    back.close()
    for name, value in arrays.items():
        array = Shared.open(again, again.path / array_file(name))
        np.testing.assert_array_equal(array.read(0), value)
        assert array.read(0).dtype == value.dtype
        array.close()
    again.remove()


def test_manifest_tells_how_far_each_worker_was_in_each_parameter_s_copy(tmp_path, segment):
    share(segment, some()).close()
    stages = Stages(segment.path)
    for worker, sequence in (("aa", 3), ("bb", 9)):
        stage = stages.open(worker)
        stage.skip(word_of(sequence, 2))
        stages.retire(worker, stage)
    manifest = check_snapshot(save(segment, tmp_path / "center"), LINEAGE)
    assert manifest.words == {"aa": word_of(3, 2), "bb": word_of(9, 2)}
    assert manifest.applied == {}
    assert known(manifest, "aa", 3) == [True] * 4 and known(manifest, "aa", 4) == [False] * 4


def known(manifest: Manifest, worker: str, sequence: int) -> list[bool]:
    """Which parameters of a center that begins again from a snapshot have the worker's exchange."""
    restored = Restored(1, 0.0, manifest.applied, manifest.words)
    return [restored.has(worker, "center-0", i, word_of(sequence, 2)) for i in range(4)]


def test_manifest_tells_of_workers_that_go_on_while_it_is_written(tmp_path, segment, monkeypatch):
    share(segment, some()).close()
    stages = Stages(segment.path)
    stage, quiet = stages.open("aa"), stages.open("cc")
    stage.skip(word_of(3, 2))
    quiet.skip(word_of(7, 2))
    read = Shared.read

    def contribute(center, i, meanwhile=None):
        if i == 2:  # after two parameters were copied
            stage.skip(word_of(4, 2))
        if i == 3:
            stages.retire("aa", stage)
            late = stages.open("dd")
            late.skip(word_of(1, 2))
            late.close()
        return read(center, i, meanwhile)

    monkeypatch.setattr(Shared, "read", contribute)
    manifest = check_snapshot(save(segment, tmp_path / "center"), LINEAGE)
    assert known(manifest, "aa", 3) == [True] * 4
    assert known(manifest, "aa", 4) == [False, False, True, True]
    assert known(manifest, "dd", 1) == [False, False, False, True]
    assert known(manifest, "cc", 7) == [True] * 4
    monkeypatch.undo()
    lived = Restored(1, 0.0, manifest.applied, manifest.words)
    again = check_snapshot(save(segment, tmp_path / "center", applied=lived.applied, words=lived.words), LINEAGE)
    assert known(again, "cc", 7) == known(again, "aa", 4) == [True] * 4


def test_only_the_newest_are_kept(tmp_path, segment):
    share(segment, some()).close()
    for _ in range(5):
        save(segment, tmp_path / "center")
        prune(tmp_path / "center", 2)
    assert [number for number, _ in snapshots(tmp_path / "center")] == [4, 5]
    assert load_file(tmp_path / "center" / "center-0.safetensors")["scalar"] == 3


def test_snapshot_that_fails_leaves_the_one_before(tmp_path, segment):
    params = {"w": np.ones(10_000)}
    center = share(segment, params)
    save(segment, tmp_path / "center")
    params["w"] += 1
    center.push(adapt(params))
    with file_limit(1000), pytest.raises(OSError, match="too large"):
        save(segment, tmp_path / "center")
    assert (load_file(tmp_path / "center" / "center-0.safetensors")["w"] == 1).all()
    assert sorted(path.name for path in (tmp_path / "center").iterdir()) == ["center-0.safetensors", "snapshot-000001"]
    center.close()


def test_snapshot_while_others_exchange_has_each_parameter_whole(tmp_path, segment):
    params = {f"p{i}": np.zeros(5000) for i in range(4)}
    center = share(segment, params)
    stop = threading.Event()

    class Stepwise(Rule):
        """Writes one half, lets others run, then writes the other half."""

        def exchange(self, x, c, memory, moment):
            c[:2500] += 1
            time.sleep(0)
            c[2500:] += 1
            return True

    def train() -> None:
        while not stop.is_set():
            center.exchange(adapt(params), Stepwise(), None, Moment())

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(5):
            path = save(segment, tmp_path / "center")
            for name, value in load_file(path / "center-0.safetensors").items():
                assert value.min() == value.max(), name
    finally:
        stop.set()
        thread.join(10)
        center.close()


def make(segment: Segment, name: str, shape: tuple[int, ...], value: np.ndarray) -> None:
    brought = Brought(Entry(name, shape, str(value.dtype)), value)
    Shared.open_or_create(segment, array_file(name), brought, rank=-1)[0].close()


def test_more_arrays_than_a_process_may_open_are_saved_and_restored(tmp_path):
    keep_many(tmp_path, 500, files=100)


def keep_many(tmp_path: Path, count: int, *, files: int) -> None:
    memory = Path(os.environ["MANIPLE_SHM"])  # a disk is slower
    segment = Segment.create(memory, LINEAGE, tmp_path)
    with descriptor_limit(files):
        for k in range(count):
            make(segment, f"a{k}", (1,), np.array([k], "int32"))
        path = save(segment, tmp_path / "center")
        asked = load_file(save_as(segment, Folder(tmp_path), "asked.safetensors"))
        segment.remove()
        again = Segment.create(memory, LINEAGE, tmp_path)
        restore(again, path, check_snapshot(path, LINEAGE))
        assert len(array_names(again)) == count
        again.remove()
    saved = load_file(path / "arrays.safetensors")
    for values in (saved, asked):
        assert sorted(int(value[0]) for value in values.values()) == list(range(count))


def test_snapshot_has_all_but_the_array_that_is_damaged_and_says_which(tmp_path, segment):
    share(segment, some()).close()
    for name in ("good", "bad", "fine"):
        make(segment, name, (2,), np.ones(2))
    file = array_file("bad")
    table = b'[["bad",[0,' + b"9" * 18 + b',99],"float64"]]'
    with (segment.path / file).open("r+b") as memory:
        memory.seek(4096)
        memory.write(table)
        memory.seek(16)
        memory.write(len(table).to_bytes(8, "little"))
    with pytest.warns(UserWarning, match=f"{file} is damaged, and not in the snapshot.*no shape of an array"):
        path = save(segment, tmp_path / "center")
    assert set(load_file(path / "arrays.safetensors")) == {"good", "fine"}
    assert "w" in load_file(path / "center-0.safetensors")
    assert list(check_snapshot(path, LINEAGE).left_out) == [file]
    assert set(load_file(save_as(segment, Folder(tmp_path), "all.safetensors"))) == {"good", "fine", *some()}
    assert array_names(segment) == ["fine", "good"]


def test_snapshot_is_on_the_disk_with_its_name_before_an_older_one_is_removed(tmp_path, segment, monkeypatch):
    share(segment, some()).close()
    folder = tmp_path / "center"
    save(segment, folder)
    steps: list[str] = []
    fsync, remove, rename = os.fsync, shutil.rmtree, Path.rename

    def note_fsync(file: int) -> None:
        steps.append("fsync " + Path(f"/proc/self/fd/{file}").readlink().name)
        fsync(file)

    def note_rename(path: Path, target: Path) -> Path:
        steps.append(f"rename {target.name}")
        return rename(path, target)

    def note_remove(path: Path, **how) -> None:
        steps.append(f"remove {path.name}")
        remove(path, **how)

    monkeypatch.setattr("os.fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    monkeypatch.setattr("maniple.center.snapshot.shutil.rmtree", note_remove)
    save(segment, folder)
    prune(folder, 1)
    beside = f".snapshot-000002.{os.getpid()}"
    expected = [f"fsync .manifest.json.{os.getpid()}", f"fsync {beside}", "rename snapshot-000002", "fsync center"]
    expected.append("remove snapshot-000001")
    assert [step for step in steps if step in expected][:4] == expected[:4]
    assert steps.index("fsync center") < steps.index("remove snapshot-000001")


def test_run_json_and_the_like_are_on_the_disk_before_they_replace_what_was_there(tmp_path, monkeypatch):
    synced: list[Path] = []
    fsync = os.fsync

    def note(file: int) -> None:
        synced.append(Path(f"/proc/self/fd/{file}").readlink())
        fsync(file)

    monkeypatch.setattr("os.fsync", note)
    Folder(tmp_path).describe(lineage=LINEAGE)
    assert [path.name for path in synced] == [f".run.json.{os.getpid()}", tmp_path.name]


# What cannot be trusted


def damage_truncated(path):
    file = path / "center-0.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def damage_bits(path):
    file = path / "center-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)


def damage_manifest(path):
    (path / "manifest.json").write_text('{"number": 3')


def damage_lineage(path):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"lineage": "f" * 16}))


def damage_missing(path):
    (path / "center-0.safetensors").unlink()


def damage_no_manifest(path):
    (path / "manifest.json").unlink()


DAMAGES = [
    (damage_truncated, r"truncated: center-0.safetensors has \d+ bytes of \d+"),
    (damage_bits, "damaged: center-0.safetensors has not the bytes that were written"),
    (damage_manifest, "manifest that cannot be read"),
    (damage_lineage, f"is of lineage {'f' * 16}, but the run is of {LINEAGE}"),
    (damage_missing, "lacks center-0.safetensors"),
    (damage_no_manifest, "has no manifest"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_snapshot_that_is_not_whole_or_foreign_is_refused_with_the_reason(tmp_path, segment, damage, words):
    share(segment, some()).close()
    first, second = (save(segment, tmp_path / "center") for _ in range(2))
    damage(second)
    with pytest.raises(InvalidArgument, match=words):
        check_snapshot(second, LINEAGE)
    path, manifest, reasons = newest_snapshot(tmp_path / "center", LINEAGE)
    assert (path, manifest.number, len(reasons)) == (first, 1, 1)


def test_no_good_snapshot_is_told_with_all_reasons(tmp_path, segment):
    share(segment, some()).close()
    for damage in (damage_truncated, damage_missing):
        damage(save(segment, tmp_path / "center"))
    with pytest.raises(InvalidArgument, match=r"000002 lacks.*000001 is truncated"):
        newest_snapshot(tmp_path / "center", LINEAGE)
    with pytest.raises(InvalidArgument, match="There is none"):
        newest_snapshot(tmp_path / "nowhere", LINEAGE)


# Hosts that go on


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
    assert second.news == ["the center has survived in shared memory: no exchange was lost"]
    assert "scalar" in load_file(second.close(0)[0])
    assert list(memory.iterdir()) == []
    rows = read_events(Folder(tmp_path / "run").events("host"))
    assert [row["event"] for row in rows] == ["start", "start", "adopted", "snapshot", "end"]


def test_run_that_has_ended_is_restored_and_says_what_was_lost(memory, tmp_path):
    first = begun(memory, tmp_path)
    first.close(0)
    for count in (1, 2):
        again = Host.resume(memory, tmp_path / "run", {})
        assert again.lineage == first.lineage
        assert "begins again from snapshot-" in again.news[0]
        assert Folder(tmp_path / "run").read()["restored"] == count
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
    assert "passed over" in fallen_back.news[0]
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
    assert "begins again from snapshot-000002" in third.news[0]
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
    assert "after that" in again.news[0] and "is lost" in again.news[0]
    again.close(0)
    assert (again.folder.read()["exit_code"], again.folder.read()["is_saved"]) == (0, True)


def test_run_that_cannot_be_described_leaves_nothing_in_memory(memory, tmp_path, monkeypatch):
    monkeypatch.setattr(Folder, "describe", lambda *_, **__: write_whole(tmp_path / "none" / "run.json", b""))
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
    assert "survived" in third.news[0]
    third.close(0)


def validate(host: Host, w: float, loss: float) -> bool:
    """Set the center to `w`, and tell a server's desk of its loss; True if it was the best so far."""
    center = share(host.segment, {"w": np.zeros(2)})
    center.push(adapt({"w": np.full(2, float(w))}))
    center.close()
    best = Best(
        host.folder.center, lambda name: keep(host.segment, host.folder, host.lineage, host._restored, name=name)
    )
    desk = Desk(Controller(), host.segment, Events(None), Limits(), best)
    question = Request(int(1000 * time.monotonic()), "validated", 0, 1, 0, 0)
    return json.loads(desk.answer("w", question, {"loss": loss}))["best"]


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
    assert "it is kept as best-000002-abandoned-1" in host.news[-1]
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
        assert len(host.news) == 1
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
    Restored(1, snapshot="snapshot-000001").write(host.segment.path)
    host.segment.close()
    again = Host.resume(memory, went_back, {})
    assert "survived" in again.news[0] and "best-000002-abandoned-1" in again.news[1]
    again.close(0)


def test_best_is_not_removed_for_a_better_one_that_cannot_be_written(memory, tmp_path):
    host = Host.start(memory, tmp_path, "run", {})
    assert validate(host, 20, loss=5.0)
    (host.folder.center / "candidate").write_text("in the way")
    assert validate(host, 30, loss=4.0)
    assert best_of(tmp_path / "run") == [20, 20]
    host.close(0)


def write_progress(run: Path, steps: int) -> None:
    events = Events(Folder(run).events(0))
    events.write("join", rank=0)
    for step in (steps - 20, steps):
        events.write("progress", step=step, samples=10 * step, elapsed=1.0)
    events.close()


@pytest.mark.parametrize("how", ["adopted", "restored", "ended"])
def test_steps_after_the_center_of_workers_who_meet_are_said_to_be_repeated(memory, tmp_path, how):
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
    assert "about 38 steps that were made after it are repeated" in second.news[0]
    assert second.news[1] == "it continues from step 1,234 of worker 0, epoch 3, sample 4,096 of 10,000"
    assert not any("nothing was lost" in line for line in second.news)
    assert position.read(second.segment.path) == [at], "the workers find it there"
    second.close(0)


def test_nothing_was_lost_of_workers_who_meet_if_the_center_has_their_last_step(memory, tmp_path):
    first = begun(memory, tmp_path)
    write_progress(tmp_path / "run", 138)
    Position(0, 2, True, steps=138, own_steps=138).write(first.segment.path)
    first.close(130)
    second = Host.resume(memory, tmp_path / "run", {"workers": 2})
    assert second.news[0].endswith("nothing was lost") and second.news[1] == "it continues from step 138 of worker 0"
    second.close(0)


def test_fewer_workers_with_shares_of_their_own_continue_where_the_last_of_them_was(memory, tmp_path):
    first = begun(memory, tmp_path)
    for rank, place in enumerate((300, 200, 400)):
        Position(rank, 3, False, 100, 100, samplers={0: (1, place, 1000)}).write(first.segment.path)
    first.close(0)
    same = Host.resume(memory, tmp_path / "run", {"workers": 3})
    assert [one.samplers[0][1] for one in position.read(same.segment.path)] == [300, 200, 400]
    same.close(0)
    fewer = Host.resume(memory, tmp_path / "run", {"workers": 2})
    assert [(one.is_common, one.samplers[0]) for one in position.read(fewer.segment.path)] == [(True, (1, 200, 1000))]
    fewer.close(0)


def test_of_workers_who_meet_and_kept_no_position_it_is_not_said_that_nothing_was_lost(memory, tmp_path):
    first = Host.start(memory, tmp_path, "run", {})
    center, _ = Shared.open_or_create(first.segment, "center-0", adapt(some()), rank=0, note="BSP()")
    center.close()
    first.segment.close()  # killed
    second = Host.resume(memory, tmp_path / "run", {"workers": 2})
    assert second.news == [
        "the center has survived in shared memory: steps since it was brought up to date are lost",
        "where it was in the data is not known: a script with fixed shares begins its epochs again",
    ]
    second.close(0)


def test_resumed_run_knows_that_its_script_looks_at_a_batch_and_where_its_passes_begin(memory, tmp_path):
    first = begun(memory, tmp_path)
    leases = table.Table.open(first.segment, 0, Terms(10, 3, True))
    for epoch in range(2):
        lease = leases.take(Holder(0, 0), epoch, most=10)
        leases.take(Holder(0, 0), -1, done=[lease.slot])
    assert leases.first_epoch(0, 3) == 2
    leases.close()
    position.is_looked_at(first.segment.path, has_looked=True)
    for how in ("survived", "begins again"):
        if how == "survived":
            first.segment.close()  # killed
        else:
            first.close(0)
        first = Host.resume(memory, tmp_path / "run", {})
        assert how in first.news[0]
        assert position.is_looked_at(first.segment.path)
        leases = table.Table.open(first.segment, 0, Terms(10, 3, True))
        assert leases.first_epoch(0, 3) == 0, "in the first epoch of which samples are left"
        leases.close()
    first.close(0)


def test_file_with_an_array_of_a_bad_name_is_not_brought(memory, tmp_path):
    save_file({"fine": np.ones(2), "new\nline": np.ones(2)}, tmp_path / "brought.safetensors")
    with pytest.raises(InvalidArgument, match=r"'new\\nline' cannot name an array"):
        Host.start(memory, tmp_path, "run", {}, arrays=tmp_path / "brought.safetensors")
    assert not list(memory.iterdir()) and not (tmp_path / "run").exists()
