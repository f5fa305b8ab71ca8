"""Snapshots: whole or absent, checked before they are trusted, restored as they were."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from maniple import EASGD, Rule
from maniple.adapters import adapt
from maniple.center import Segment, SharedCenter
from maniple.center.arrays import array_file, array_names, single_array
from maniple.center.snapshot import (
    EntryReader,
    Manifest,
    check_snapshot,
    newest_snapshot,
    prune,
    restore,
    snapshots,
    write_snapshot,
)
from maniple.center.staging import StagingFiles, applied_number
from maniple.contracts import Entry, ExchangeInfo
from maniple.errors import InvalidArgument
from maniple.host.snapshots import RestorePoint, export_arrays
from maniple.layout import Layout
from maniple.record import RunFolder

from ..limits import descriptor_limit, file_limit

pytestmark = pytest.mark.usefixtures("entry_chunks")

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


def share(segment: Segment, params: dict[str, np.ndarray], name: str = "center-0") -> SharedCenter:
    return SharedCenter.open_or_create(segment, name, adapt(params), rank=0, note="a rule")[0]


def save(segment: Segment, folder, **rest):
    return write_snapshot(segment, folder, **{"lineage": LINEAGE, "restored": 0, "versions": {"python": "3"}} | rest)


def test_nothing_is_written_before_there_is_a_center(tmp_path, segment):
    assert save(segment, tmp_path / "center") is None


def test_snapshot_holds_every_parameter_and_what_is_known_of_it(tmp_path, segment):
    params = some()
    center = share(segment, params)
    center.exchange(adapt(params), EASGD(0.5), None, ExchangeInfo())
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
        brought = single_array(Entry(name, value.shape, str(value.dtype)), value)
        SharedCenter.open_or_create(segment, array_file(name), brought, rank=0)[0].close()
    versions = center.versions
    center.close()
    path = save(segment, tmp_path / "center")
    (tmp_path / "other").mkdir()
    again = Segment.create(tmp_path / "other", LINEAGE, tmp_path)
    restore(again, path, check_snapshot(path, LINEAGE))
    back = SharedCenter.open(again, again.path / "center-0")
    for i, value in enumerate(params.values()):
        np.testing.assert_array_equal(back.read(i), value.reshape(-1))
    assert (back.versions, back.note) == (versions, "a rule")
    back.close()
    for name, value in arrays.items():
        array = SharedCenter.open(again, again.path / array_file(name))
        np.testing.assert_array_equal(array.read(0), value.reshape(-1))
        assert array.read(0).dtype == value.dtype
        array.close()
    again.remove()


@pytest.mark.parametrize("chunk_bytes", [0, 40, 2 << 20])
def test_each_chunk_is_copied_once_and_no_copy_is_kept(chunk_bytes):
    sizes = [(3, "float32"), (50, "float64"), (0, "float32"), (30, "float32"), (0, "float64")]
    layout = Layout([Entry(f"p{i}", (size,), dtype) for i, (size, dtype) in enumerate(sizes)], chunk_bytes=chunk_bytes)
    copied: list[int] = []
    reader = EntryReader(layout, lambda k: copied.append(k) or np.zeros(layout.chunks[k].size, layout.chunks[k].dtype))
    assert [reader.read(i).size for i in range(5)] == [3, 50, 0, 30, 0]
    assert sorted(copied) == list(range(len(layout.chunks)))
    assert not reader._newest


@pytest.mark.parametrize("chunk_bytes", [0, 40, 2 << 20])
def test_parameters_are_saved_and_restored_whole_whatever_the_chunks(tmp_path, segment, monkeypatch, chunk_bytes):
    monkeypatch.setattr("maniple.center.shared.CHUNK_BYTES", chunk_bytes)
    params = {
        f"p{i}": np.arange(float(size)).astype(dtype)
        for i, (size, dtype) in enumerate(
            [(3, "float32"), (50, "float64"), (9, "float16"), (0, "float32"), (30, "float32")]
        )
    }
    share(segment, params).close()
    path = save(segment, tmp_path / "center")
    saved = load_file(path / "center-0.safetensors")
    (tmp_path / "other").mkdir()
    again = Segment.create(tmp_path / "other", LINEAGE, tmp_path)
    restore(again, path, check_snapshot(path, LINEAGE))
    back = SharedCenter.open(again, again.path / "center-0")
    found = {name: np.zeros_like(value) for name, value in params.items()}
    back.pull(adapt(found))
    back.close()
    again.remove()
    for name, value in params.items():
        np.testing.assert_array_equal(saved[name], value)
        np.testing.assert_array_equal(found[name], value)


def test_manifest_tells_how_far_each_worker_was_in_each_parameter_s_copy(tmp_path, segment):
    share(segment, some()).close()
    stages = StagingFiles(segment.path)
    for worker, sequence in (("aa", 3), ("bb", 9)):
        stage = stages.open(worker)
        stage.skip(applied_number(sequence, 2))
        stages.retire(worker, stage)
    manifest = check_snapshot(save(segment, tmp_path / "center"), LINEAGE)
    assert manifest.words == {"aa": applied_number(3, 2), "bb": applied_number(9, 2)}
    assert manifest.applied == {}
    assert known(manifest, "aa", 3) == [True] * 4 and known(manifest, "aa", 4) == [False] * 4


def known(manifest: Manifest, worker: str, sequence: int) -> list[bool]:
    """Which parameters of a center that begins again from a snapshot have the worker's exchange."""
    restored = RestorePoint(1, 0.0, manifest.applied, manifest.words)
    return [restored.includes(worker, "center-0", i, applied_number(sequence, 2)) for i in range(4)]


def test_manifest_tells_of_workers_that_go_on_while_it_is_written(tmp_path, segment, monkeypatch):
    share(segment, some()).close()
    stages = StagingFiles(segment.path)
    stage, quiet = stages.open("aa"), stages.open("cc")
    stage.skip(applied_number(3, 2))
    quiet.skip(applied_number(7, 2))
    read = SharedCenter.read

    def contribute(center, i, meanwhile=None):
        if i == 2:  # after two parameters were copied
            stage.skip(applied_number(4, 2))
        if i == 3:
            stages.retire("aa", stage)
            late = stages.open("dd")
            late.skip(applied_number(1, 2))
            late.close()
        return read(center, i, meanwhile)

    monkeypatch.setattr(SharedCenter, "read", contribute)
    manifest = check_snapshot(save(segment, tmp_path / "center"), LINEAGE)
    assert known(manifest, "aa", 3) == [True] * 4
    assert known(manifest, "aa", 4) == [False, False, True, True]
    assert known(manifest, "dd", 1) == [False, False, False, True]
    assert known(manifest, "cc", 7) == [True] * 4
    monkeypatch.undo()
    lived = RestorePoint(1, 0.0, manifest.applied, manifest.words)
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

        def exchange(self, x, c, state, moment):
            c[:2500] += 1
            time.sleep(0)
            c[2500:] += 1
            return

    def train() -> None:
        while not stop.is_set():
            center.exchange(adapt(params), Stepwise(), None, ExchangeInfo())

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
    brought = single_array(Entry(name, shape, str(value.dtype)), value)
    SharedCenter.open_or_create(segment, array_file(name), brought, rank=-1)[0].close()


def test_more_arrays_than_a_process_may_open_are_saved_and_restored(tmp_path):
    keep_many(tmp_path, 500, files=100)


def keep_many(tmp_path: Path, count: int, *, files: int) -> None:
    memory = Path(os.environ["MANIPLE_SHM"])  # a disk is slower
    segment = Segment.create(memory, LINEAGE, tmp_path)
    with descriptor_limit(files):
        for k in range(count):
            make(segment, f"a{k}", (1,), np.array([k], "int32"))
        path = save(segment, tmp_path / "center")
        asked = load_file(export_arrays(segment, RunFolder(tmp_path), "asked.safetensors"))
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
    with pytest.warns(UserWarning, match=f"{file} is damaged and left out of the snapshot.*no shape of an array"):
        path = save(segment, tmp_path / "center")
    assert set(load_file(path / "arrays.safetensors")) == {"good", "fine"}
    assert "w" in load_file(path / "center-0.safetensors")
    assert list(check_snapshot(path, LINEAGE).left_out) == [file]
    assert set(load_file(export_arrays(segment, RunFolder(tmp_path), "all.safetensors"))) == {"good", "fine", *some()}
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
    RunFolder(tmp_path).describe(lineage=LINEAGE)
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
    (damage_bits, "damaged: the checksum of center-0.safetensors differs"),
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


def test_missing_good_snapshot_is_reported_with_all_reasons(tmp_path, segment):
    share(segment, some()).close()
    for damage in (damage_truncated, damage_missing):
        damage(save(segment, tmp_path / "center"))
    with pytest.raises(InvalidArgument, match=r"000002 lacks.*000001 is truncated"):
        newest_snapshot(tmp_path / "center", LINEAGE)
    with pytest.raises(InvalidArgument, match="There is none"):
        newest_snapshot(tmp_path / "nowhere", LINEAGE)
