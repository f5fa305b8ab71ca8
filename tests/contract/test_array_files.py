"""Files of named arrays that a host saves: whole, in every format, never over a snapshot."""

import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import maniple
from maniple.center.snapshot import read_arrays
from maniple.errors import InvalidArgument


def test_host_saves_all_arrays_while_others_push(host, client):
    client.create("a", np.arange(3.0))
    client.create("b", np.arange(4, dtype="int16"))
    path = client.save("kept/all.safetensors")
    assert path == str(host.run / "center" / "kept" / "all.safetensors")
    saved = load_file(path)
    np.testing.assert_array_equal(saved["a"], np.arange(3.0))
    np.testing.assert_array_equal(saved["b"], np.arange(4))
    assert saved["b"].dtype == "int16"


def test_host_saves_hdf5(client):
    h5py = pytest.importorskip("h5py")
    client.create("group/a", np.arange(6.0).reshape(2, 3))
    client.create("c", np.array([1 + 2j]))
    with h5py.File(client.save("all.h5")) as file:
        np.testing.assert_array_equal(file["group/a"][:], np.arange(6.0).reshape(2, 3))
        assert file["c"][0] == 1 + 2j


def test_names_that_are_no_paths_of_hdf5_come_back_from_it(client):
    pytest.importorskip("h5py")
    names = ["a", "a/b", "a//b", "/a", "a/", "", ".", "./a", "..", "%", "a%2Fb", "%2Ea", "a%"]
    for k, name in enumerate(names):
        client.create(name, np.full(2, k))
    path = client.save("all.h5")
    assert {name: int(value[0]) for name, value in read_arrays(Path(path)).items()} == {
        n: k for k, n in enumerate(names)
    }


def test_simultaneous_saves_of_one_name_all_succeed_and_readers_see_whole_files(host, client):
    for k in range(20):
        client.create(f"a{k}", np.full(5000, k))
    wrong: list[str] = []
    stop = threading.Event()

    def save() -> None:
        try:
            with maniple.Client(timeout_s=20) as own:
                for _ in range(5):
                    own.save("kept/all.safetensors")
        except Exception as error:
            wrong.append(f"save: {error!r}")

    def read() -> None:
        while not stop.is_set():
            if (host.run / "center" / "kept" / "all.safetensors").exists():
                try:
                    values = load_file(host.run / "center" / "kept" / "all.safetensors")
                    assert all((values[f"a{k}"] == k).all() for k in range(20))
                except Exception as error:
                    wrong.append(f"read: {error!r}")

    reader = threading.Thread(target=read)
    savers = [threading.Thread(target=save) for _ in range(4)]
    for thread in (reader, *savers):
        thread.start()
    for thread in savers:
        thread.join(60)
    stop.set()
    reader.join(10)
    assert not wrong, f"{len(wrong)} failures: {wrong[:3]}"
    assert [path.name for path in (host.run / "center").rglob("*") if path.is_file()] == ["all.safetensors"]


@pytest.mark.parametrize(
    "name",
    [
        *(f"{folder}/center-0.safetensors" for folder in ("snapshot-000001", "best-000001", "epoch-0004", "candidate")),
        "best/center-0.safetensors",
        "best/deeper/x.h5",
        "Snapshot-000001/center-0.safetensors",
        "BEST-000001/x.h5",
        "Center-0.safetensors",
        "ARRAYS.h5",
        "linked/deeper/x.h5",
        ".hidden/x.h5",
        ".saving.h5",
        "new\nline.h5",
    ],
)
def test_nothing_is_saved_over_a_snapshot(host, client, name):
    kept = host.run / "center" / "best-000001"
    kept.mkdir()
    (kept / "center-0.safetensors").write_text("kept")
    (host.run / "center" / "best").symlink_to("best-000001")
    (host.run / "center" / "linked").symlink_to("best-000001")
    client.create("a", np.zeros(2))
    with pytest.raises(InvalidArgument, match=r"Choose another name|control characters"):
        client.save(name)
    assert {path.name for path in (host.run / "center").iterdir()} == {"best", "best-000001", "linked"}
    assert [path.name for path in kept.iterdir()] == ["center-0.safetensors"]
    assert (kept / "center-0.safetensors").read_text() == "kept"
