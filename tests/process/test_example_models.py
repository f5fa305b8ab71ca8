"""The model classes of examples/models: by `maniple run --model`, alone, in a pool, and by scripts; files of data."""

import gzip
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from .conftest import MANIPLE, Run
from .test_examples import EXAMPLES, ONE_THREAD, TIMEOUT_S, alone, module, percents

MODELS = EXAMPLES / "models"
CLASSES = {"net": "Net", "alexnet": "AlexNet", "googlenet": "GoogLeNet", "vgg": "VGG", "resnet": "ResNet"}
TINY = {"width": 4, "images": 160, "batch_size": 16, "epochs": 1}

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("without_numba")]


def arguments(**settings: object) -> list[str]:
    return [word for name, value in settings.items() for word in ("--model-arg", f"{name}={value}")]


def test_each_file_of_the_folder_is_a_model_or_what_they_share():
    assert sorted(path.stem for path in MODELS.glob("*.py")) == sorted([*CLASSES, "images"])


@pytest.mark.parametrize("name", CLASSES)
def test_a_model_class_is_trained_by_two_workers(name: str, tmp_path: Path):
    pytest.importorskip("torch")
    rule = ("--rule", "easgd" if name == "net" else "bsp")
    command = [str(MANIPLE), "run", "-n", "2", "--name", "x", *rule, "--model", f"{MODELS}/{name}.py:{CLASSES[name]}"]
    run = Run(tmp_path, "x", [*command, *arguments(**TINY)], ONE_THREAD)
    assert run.wait(TIMEOUT_S) == 0, run.output
    assert all(np.isfinite(value).all() for value in run.center.values())
    batches = [sum(row["batches"] for row in run.events(rank, "times")) for rank in (0, 1)]
    assert sum(batches) == 10 and (rule[1] == "easgd" or batches == [5, 5])
    (validated,) = [row for rank in (0, 1) for row in run.events(rank, "validated")]
    assert {"loss", "top1_error", "top5_error"} <= validated.keys()


def test_a_model_class_learns_alone_and_from_a_file(tmp_path: Path):
    pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 256, (10, 1, 1, 3), np.uint8)
    labels = {"y_train": rng.integers(0, 10, 640), "y_test": rng.integers(0, 10, 128)}
    images = {f"x{name[1:]}": colours[y].repeat(32, 1).repeat(32, 2) for name, y in labels.items()}
    np.savez(tmp_path / "plain.npz", **labels, **images)
    spec = f"{MODELS / 'net.py'}:Net"
    for options in ({"images": 1000}, {"data": tmp_path / "plain.npz"}):
        done = subprocess.run(
            [sys.executable, "-m", "maniple.model", spec, *arguments(**options)],
            env=os.environ | ONE_THREAD,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr
        last = [line for line in done.stdout.splitlines() if "validation:" in line][-1]
        assert float(last.partition("top1_error ")[2].partition(",")[0]) < 0.3, done.stdout


def test_an_unknown_setting_of_a_model_class_is_refused(tmp_path: Path):
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "maniple.model", f"{MODELS / 'vgg.py'}:VGG", *arguments(widht=4)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode != 0
    assert "widht=... is unknown. Use one of data, images, batch_size, epochs, lr, width." in done.stderr


def test_the_modules_are_trained_by_a_pool_as_by_one_process(tmp_path: Path):
    pytest.importorskip("torch")
    program = f"""
        import importlib

        import torch
        from torch import nn

        import maniple
        from images import generate

        def loss(model, x, y):
            return nn.functional.cross_entropy(model.eval()(x), y)  # batch norm with fixed statistics: parts are exact

        x, y = generate("train", 24)
        with maniple.Pool(2) as pool:
            for name in {list(CLASSES)}:
                torch.manual_seed(0)
                train = pool.train_function(getattr(importlib.import_module(name), name)(width=4), loss, "sgd", lr=0.01)
                steps = [(train(x, y), train.serial(x, y)) for _ in range(2)]
                assert all(abs(one - other) < 1e-4 for one, other in steps), (name, steps)
                assert steps[0] != steps[1]
                print(name)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(program))
    path = os.pathsep.join([str(MODELS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=os.environ | ONE_THREAD | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(CLASSES)


def test_a_plain_script_trains_one_of_the_modules():
    pytest.importorskip("torch")
    options = ("--network", "vgg", "--width", "4", "--pictures", "640")
    assert percents(alone("cifar.py", *options), "test accuracy of the center")[-1] > 50  # 94; a guess: 10


def test_the_programs_of_the_data_page_make_files_that_the_examples_read(tmp_path):
    pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("t10k", 4)):
        for kind, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            head = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes()
            content = head + rng.integers(0, 10, shape, np.uint8).tobytes()
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))
    (tmp_path / "cifar-10-batches-bin").mkdir()
    picture = np.arange(3 * 32 * 32, dtype=np.uint8).reshape(3, 32, 32)
    for name in ("test_batch", *(f"data_batch_{i}" for i in range(1, 6))):
        (tmp_path / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(b"\7" + picture.tobytes())
    for part in ("train", "test"):
        for kind, text in (("pos", "Good, good film!<br />"), ("neg", "A bad film")):
            (tmp_path / "aclImdb" / part / kind).mkdir(parents=True)
            (tmp_path / "aclImdb" / part / kind / "0_9.txt").write_text(text)
    page = (EXAMPLES.parent / "docs" / "data.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    for program in programs[:3]:
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=TIMEOUT_S)
    x, y = module("models/images.py").read(tmp_path / "cifar10.npz", "train", 9)
    assert y.tolist() == [7] * 5 and np.array_equal((x[0].numpy() + 2) * 64, picture)
    x, _, x_test, y_test = module("pool_digits.py").load(tmp_path / "mnist.npz")
    assert (len(x), x_test.shape, len(y_test)) == (6, (4, 784), 4)
    words, labels = module("lstm.py").read(tmp_path / "imdb.npz", "train", 2, 6)
    assert sorted(labels.tolist()) == [0, 1] and (words > 1).sum(1).sort().values.tolist() == [3, 4]
    first, second, *_ = words[labels.argmax()].tolist()
    assert first == second  # good, good
