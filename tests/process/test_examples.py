"""The examples: each one runs alone and on two workers, and learns what it says it learns; those of the docs too.

That no process and no shared memory is left behind is seen to by `nothing_left`, for every test.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import load_file

from maniple.environment import shared_memory
from maniple.record import read_events
from tests.waiting import await_, is_gone

from .conftest import MANIPLE, Run

EXAMPLES = Path(__file__).parents[2] / "examples"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # on a busy machine PyTorch's threads wait for each other, ten times as long
TIMEOUT_S = 240  # the longest, the demo, has taken 23 to 45 s, by what else the machine was doing

pytestmark = [pytest.mark.process]
bare = pytest.mark.usefixtures("without_numba")  # those with torch; the script of the README runs with all it may find


def alone(example: str, *options: str, cwd: Path | None = None) -> str:
    """Run an example by itself; gives what it printed."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / example, *options],
        cwd=cwd,
        env=os.environ | ONE_THREAD,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def together(folder: Path, example: str, *options: str, how: tuple[str, ...] = ()) -> Run:
    """Run an example on two workers, and check what every run must leave behind, and what it must not."""
    command = [str(MANIPLE), "run", "-n", "2", "--name", "x", "--runs", str(folder / "runs"), *how]
    run = Run(folder, "x", [*command, str(EXAMPLES / example), *options], ONE_THREAD)
    assert run.wait(TIMEOUT_S) == 0, run.output
    assert run.description["exit_code"] == 0
    assert all(np.isfinite(value).all() for value in run.center.values())
    assert not (shared_memory() / f"maniple-{run.description['lineage']}").exists()
    assert all(is_gone(run.pid(rank)) for rank in (0, 1))
    last = run.events(0, "progress")[-1]
    assert last["exchanges"] + last["rounds"] > 1, "the workers have not trained one model"
    return run


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Run]:
    """A host alone, ended by SIGTERM, which must leave the center and nothing else."""
    run = Run(folder, "x", [str(MANIPLE), "serve", "--name", "x", *options], ONE_THREAD)
    try:
        run.await_event("server", "serving")
        yield run
        run.signal(signal.SIGTERM)
        assert run.wait(TIMEOUT_S) == 0, run.output
        assert not (shared_memory() / f"maniple-{run.description['lineage']}").exists()
    finally:
        if run.process.poll() is None:
            run.kill()


def percents(text: str, what: str) -> list[float]:
    return [float(value) for value in re.findall(rf"{what} ([\d.]+)%", text)]


def shows_progress(printed: str) -> bool:
    """Whether an example has said what it trains, then several times how far it is, then the result."""
    lines = printed.splitlines()
    return lines[0].endswith("parameters, threads: 1") and sum(" steps, " in line for line in lines[1:-1]) > 3


def module(example: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(example.removesuffix(".py"), EXAMPLES / example)
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def digits_accuracy(run: Path) -> float:
    """The test accuracy of the center that a run of digits.py has saved."""
    from safetensors.torch import load_file

    digits = module("digits.py")
    parameters = load_file(run / "center" / "center-0.safetensors")
    model = digits.build(len(parameters["0.bias"]))
    model.load_state_dict(parameters)
    return digits.accuracy(model, *digits.load()[2:])


def rotated_digits_accuracy(run: Path) -> float:
    """The test accuracy of the center that a run of rotated_digits.py has saved."""
    from safetensors.torch import load_file

    example = module("rotated_digits.py")
    model = example.build()
    model.load_state_dict(load_file(run / "center" / "center-0.safetensors"))
    return example.accuracy(model, *example.load(2_000, 1400, 1797, seed=2).tensors)


@bare
def test_digits_are_learned_alone():
    pytest.importorskip("sklearn")
    printed = alone("digits.py", "--epochs", "10")
    assert "14,000 samples in" in printed  # 10 times 1400
    assert percents(printed, "test accuracy")[0] > 92


@bare
def test_digits_are_learned_on_two_workers_with_as_many_samples_as_alone(tmp_path):
    pytest.importorskip("sklearn")
    run = together(tmp_path, "digits.py", "--epochs", "10")
    assert sum(run.events(rank, "progress")[-1]["samples"] for rank in (0, 1)) == 10 * 1400
    assert digits_accuracy(run.folder) > 0.92
    # Each worker says how good its own replica was, and the launcher shows what it said.
    assert len(percents(run.output, "own replica")) == 2
    assert all("own_accuracy" in run.events(rank, "log")[-1] for rank in (0, 1))


ORDINARY = ("--epochs", "3", "--width", "8", "--loaders", "1")  # with two, most of the time is that of starting them


@bare
@pytest.mark.parametrize("rule", ["easgd", "bsp", "localsgd", "downpour"])
def test_an_ordinary_script_runs_under_every_rule_and_saves_the_best_shared_model(rule: str, tmp_path):
    pytest.importorskip("sklearn")
    import torch

    run = together(tmp_path, "ordinary.py", *ORDINARY, "--save", str(tmp_path / "best.pt"), how=("--rule", rule))
    best = [percents(run.log(rank), "best validation accuracy") for rank in (0, 1)]
    assert min(best) > [80]
    steps = re.findall(r"worker (\d) of 2: (\d+) steps", run.output)
    assert sorted(rank for rank, _ in steps) == ["0", "1"]
    assert all(0 < int(count) <= 3 * 22 for _, count in steps)  # no more than the schedule has
    ordinary = module("ordinary.py")
    model = ordinary.build(8)
    model.load_state_dict(torch.load(tmp_path / "best.pt"))
    loader = torch.utils.data.DataLoader(ordinary.load()[1], 256)
    assert 100 * ordinary.validate(model, loader) == pytest.approx(best[0][0], abs=0.051)


@bare
def test_an_ordinary_script_runs_alone(tmp_path):
    pytest.importorskip("sklearn")
    printed = alone("ordinary.py", *ORDINARY, cwd=tmp_path)
    assert percents(printed, "best validation accuracy")[0] > 80
    assert "worker 0 of 1: 132 steps" in printed
    assert (tmp_path / "best.pt").exists()


def lstm_data() -> tuple[tuple[str, ...], float]:
    """Real reviews where MANIPLE_DATA names their folder, and a safe bound on the accuracy in percent."""
    folder = os.environ.get("MANIPLE_DATA")
    if folder:
        path = Path(folder) / "imdb_200tok_10k.npz"
        return ("--data", str(path), "--reviews", "3000", "--length", "100", "--epochs", "3"), 62
    return ("--length", "25", "--epochs", "4"), 85


@bare
def test_lstm_learns_alone():
    pytest.importorskip("torch")
    options, bound = lstm_data()
    printed = alone("lstm.py", *options)
    assert shows_progress(printed), printed
    assert percents(printed, "test accuracy of the center")[0] > bound


@bare
def test_lstm_learns_on_two_workers(tmp_path):
    pytest.importorskip("torch")
    options, bound = lstm_data()
    run = together(tmp_path, "lstm.py", *options)
    accuracies = percents(run.output, "test accuracy of the center")
    assert len(accuracies) == 2
    assert max(accuracies) > bound  # the one who ends last sees the work of both


def cifar_data() -> tuple[tuple[str, ...], float]:
    """Real photographs where MANIPLE_DATA names their folder, and a safe bound on the accuracy in percent."""
    folder = os.environ.get("MANIPLE_DATA")
    if folder:
        return ("--data", str(Path(folder) / "cifar10_5k.npz"), "--pictures", "3000"), 22
    return ("--pictures", "1000"), 70


@bare
def test_pictures_are_named_alone():
    pytest.importorskip("torch")
    options, bound = cifar_data()
    printed = alone("cifar.py", *options)
    assert shows_progress(printed), printed
    assert percents(printed, "test accuracy of the center")[-1] > bound


@bare
def test_pictures_are_named_by_two_workers(tmp_path):
    pytest.importorskip("torch")
    options, bound = cifar_data()
    run = together(tmp_path, "cifar.py", *options)
    accuracies = [percents(run.log(rank), "test accuracy of the center") for rank in (0, 1)]
    assert [len(each) for each in accuracies] == [3, 3]  # after each epoch
    assert max(each[-1] for each in accuracies) > bound


@bare
def test_prepared_batches_are_divided_among_two_workers_and_learned(tmp_path):
    pytest.importorskip("torch")
    folder = str(tmp_path / "batches")
    assert "600 images in" in alone("prepared.py", folder, "--prepare", "--images", "600", "--batch-size", "24")
    run = together(tmp_path, "prepared.py", folder, "--width", "8", how=("--rule", "bsp"))
    reached = [percents(run.log(rank), "test accuracy of the center") for rank in (0, 1)]
    assert reached[0] == reached[1] and reached[0][-1] > 50  # a guess: 10
    # Equal shares of 25 files, one of which is left out, in 3 epochs; the time lost is recorded.
    for rank in (0, 1):
        assert run.events(rank, "progress")[-1]["step"] == 36
        assert {row["feed"] for row in run.events(rank, "wait")} == {"files"}


SMALL_TEXT = ("--characters", "60000", "--width", "32", "--epochs", "2")


def bits(printed: str) -> list[tuple[float, float]]:
    """What each worker has reached, and what knowing the frequencies alone would reach."""
    found = re.findall(r"([\d.]+) bits per character .* alone: ([\d.]+)", printed)
    return [(float(reached), float(by_frequencies)) for reached, by_frequencies in found]


@bare
def test_the_transformer_learns_alone_from_a_text_of_ones_own(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "text.txt").write_text("Wie heißt das? " * 4000)
    options = (*SMALL_TEXT, "--text", str(tmp_path / "text.txt"))
    printed = alone("char_transformer.py", *options)
    assert shows_progress(printed), printed
    ((reached, by_frequencies),) = bits(printed)
    assert reached < 0.5 < 3 < by_frequencies


@bare
def test_the_transformer_learns_on_two_workers_in_step(tmp_path):
    pytest.importorskip("torch")
    run = together(tmp_path, "char_transformer.py", *SMALL_TEXT, how=("--rule", "bsp"))
    (one, by_frequencies), (other, _) = bits(run.output)
    assert one == other  # the model is the same everywhere after each step
    assert one < by_frequencies - 0.2


@bare
def test_the_rnn_learns_alone():
    pytest.importorskip("sklearn")
    assert percents(alone("rnn.py", "--seconds", "6"), "test accuracy of the center")[0] > 70


@bare
def test_the_rnn_learns_on_two_workers_that_join_a_host(tmp_path):
    pytest.importorskip("sklearn")
    from safetensors.torch import load_file

    command = [str(MANIPLE), "join", "runs/x", str(EXAMPLES / "rnn.py"), "--seconds", "10"]
    with serving(tmp_path) as run:
        workers = [Run(tmp_path, "x", command, ONE_THREAD) for _ in range(2)]
        for worker in workers:
            assert worker.wait(TIMEOUT_S) == 0, worker.output
            assert len(percents(worker.output, "test accuracy of the center")) == 1
    for rank in (0, 1):
        (shared,) = run.events(rank, "share")
        assert shared["rule"] == "ASGD(alpha=0.5, beta=0.5, overlap=False)"
        assert shared["pace"].startswith("RateLimit")
        assert len(run.events(rank, "exchange")) > 1, "the workers have not trained one model"
    rnn, parameters = module("rnn.py"), load_file(run.folder / "center" / "center-0.safetensors")
    model = rnn.Reader(parameters["output.weight"].shape[1])
    model.load_state_dict(parameters)
    assert rnn.accuracy(model, *rnn.load()[2:]) > 0.7  # a guess is right once in ten


def test_the_client_of_the_docs_runs_as_printed(tmp_path):
    pytest.importorskip("h5py")
    page = (EXAMPLES.parent / "docs" / "serve.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    with serving(tmp_path) as run:
        address = json.loads(await_((run.folder / "host.json").read_text))["address"]
        env = {"MANIPLE_ADDRESS": address, "MANIPLE_TOKEN_FILE": str(run.folder / "token")}
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr
    saved = run.folder / "center" / "x.h5"
    assert f"['A'] {saved}" in done.stdout
    (tmp_path / "again").mkdir()
    with serving(tmp_path / "again", "--from", str(saved)) as run:
        pass
    A = load_file(run.folder / "center" / "arrays.safetensors")["A"]
    assert A.tolist() == [[11.5, 5.0, 1.5], [1.5, 5.0, 21.5]]


@bare
def test_the_script_for_people_from_legion_runs_alone():
    pytest.importorskip("torch")
    page = (EXAMPLES.parent / "docs" / "legion.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    code = code.replace("StopAfter(5)", "StopAfter(3)") + "assert loss < 0.4\n"
    subprocess.run([sys.executable, "-c", code], env=os.environ | ONE_THREAD, check=True, timeout=TIMEOUT_S)


@bare
def test_the_script_for_people_from_ddp_runs_alone_and_in_step(tmp_path):
    pytest.importorskip("torch")
    page = (EXAMPLES.parent / "docs" / "ddp.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    script = tmp_path / "train.py"
    script.write_text(code + "assert loss < 0.6\nprint([float(p.sum()) for p in model.parameters()])\n")
    alone(str(script))
    run = together(tmp_path, str(script), how=("--rule", "bsp"))
    assert run.log(1).splitlines()[-1] == run.log(0).splitlines()[-1]  # the same model


def test_the_calls_of_the_collectives_page_run_on_two_workers(tmp_path):
    page = (EXAMPLES.parent / "docs" / "collectives.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    script = tmp_path / "calls.py"
    script.write_text(code + "print(total.tolist(), [len(r) for r in rows], int(seed))\n")
    run = Run(tmp_path, "x", [str(MANIPLE), "run", "-n", "2", "--name", "x", str(script)], ONE_THREAD)
    assert run.wait(TIMEOUT_S) == 0, run.output
    assert run.log(1).splitlines()[-1] == run.log(0).splitlines()[-1]
    assert run.log(1).splitlines()[-1].startswith("[16.0, 64.0] [1, 2] ")


def test_a_matrix_is_inverted_alone_without_a_framework():
    path = str(EXAMPLES / "matrix_inverse.py")
    code = (
        f"import runpy, sys; sys.argv = [{path!r}, '--size', '30']; runpy.run_path({path!r}, run_name='__main__');"
        "assert not {'torch', 'sklearn'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    found = re.search(r"residual .* is (\S+)", done.stdout)
    assert found and float(found[1]) < 1e-9


def test_a_matrix_is_inverted_by_two_workers(tmp_path):
    run = together(tmp_path, "matrix_inverse.py", "--size", "30")
    A = module("matrix_inverse.py").matrix(30)
    assert np.abs(A @ run.center["inverse"] - np.eye(30)).max() < 1e-9


@bare
def test_gans_learn_alone_and_while_their_discriminators_change_places(tmp_path):
    pytest.importorskip("torch")
    found = re.findall(r"worker 0: (\d) of 8 Gaussians", alone("gan_swap.py", "--steps", "800"))
    assert [int(count) >= 6 for count in found] == [True]
    run = together(tmp_path, "gan_swap.py", "--steps", "800")
    counts = [int(re.findall(r"worker \d: (\d) of 8 Gaussians", run.log(rank))[0]) for rank in range(2)]
    assert min(counts) >= 6, counts
    assert all(run.events(rank, "progress")[-1]["rounds"] == 16 for rank in range(2))
    weight = "generator.0.weight", "discriminator.0.weight"
    assert all(name in run.center for name in weight)


def test_pixels_are_summed_alone():
    found = re.search(r"4000 batches, .* off by (\S+) at most", alone("pixel_sum.py"))
    assert found and float(found[1]) < 0.05


def test_pixels_are_summed_by_two_workers_with_a_feed(tmp_path):
    example = str(EXAMPLES / "pixel_sum.py")
    produce = ("--feed", f"{example} --produce --batches 3001")
    run = Run(tmp_path, "x", [str(MANIPLE), "run", "-n", "2", "--name", "x", *produce, example], ONE_THREAD)
    assert run.wait(TIMEOUT_S) == 0, run.output
    assert run.events(0, "share")[0]["rule"] == "Nudge(share=0.4)"
    assert np.abs(run.center["weights"] - 1).max() < 0.05
    # On a busy machine one of them may come late and find little left; together they have taken all.
    assert sum(row["batches"] for rank in (0, 1) for row in run.events(rank, "wait")) == 3001


def epochs(printed: str) -> list[tuple[float, float]]:
    """The loss and the test accuracy of each epoch."""
    found = re.findall(r"loss ([\d.]+), test accuracy ([\d.]+)%, [\d.]+ s", printed)
    return [(float(loss), float(accuracy)) for loss, accuracy in found]


@bare
def test_digits_are_learned_by_a_pool_as_by_one_process():
    pytest.importorskip("sklearn")
    options = ("--workers", "2", "--epochs", "8")
    together, serial = (epochs(alone("pool_digits.py", *options, *way)) for way in ((), ("--serial",)))
    assert len(together) == len(serial) == 8
    np.testing.assert_allclose(together, serial, atol=0.3)  # one test image in 397 is 0.25%
    np.testing.assert_allclose([loss for loss, _ in together], [loss for loss, _ in serial], atol=2e-3)
    assert together[-1][1] > 92


@bare
def test_digits_are_learned_by_a_pool_whose_workers_keep_the_images():
    pytest.importorskip("sklearn")
    assert epochs(alone("pool_digits.py", "--workers", "2", "--epochs", "8", "--resident"))[-1][1] > 92


@bare
@pytest.mark.parametrize("way", ["--resident", "--serial"])
def test_digits_of_a_file_are_learned_by_a_pool(way: str, tmp_path):
    sklearn = pytest.importorskip("sklearn.datasets")
    images, labels = sklearn.load_digits(return_X_y=True)
    large = np.kron(images.reshape(-1, 8, 8)[:600], np.ones((3, 3))).astype(np.uint8) * 15
    x, y = np.pad(large, ((0, 0), (2, 2), (2, 2))), labels[:600].astype(np.uint8)
    np.savez(tmp_path / "mnist.npz", x_train=x[:501], y_train=y[:501], x_test=x[501:], y_test=y[501:])
    options = ("--workers", "2", "--epochs", "6", "--data", str(tmp_path / "mnist.npz"), way)
    assert epochs(alone("pool_digits.py", *options))[-1][1] > 60


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_gradients_are_clipped_between_two_calls_of_a_pool(optimizer: str):
    pytest.importorskip("sklearn")
    options = ("--workers", "2", "--epochs", "2", "--optimizer", optimizer, "--lr", "0.05", "--clip", "0.5")
    printed = alone("pool_gradients.py", *options)
    assert percents(printed, "accuracy")[-1] > 85
    found = re.findall(r"clipped (\d+) of (\d+) steps", printed)
    assert [int(steps) for _, steps in found] == [29, 58] and 0 < int(found[-1][0]) < 58


@pytest.mark.parametrize("workers", [1, 3])
def test_outputs_of_a_pool_are_as_numpy_says_without_a_framework(workers: int):
    path = str(EXAMPLES / "pool_reduce.py")
    options = ["--workers", str(workers), "--rows", "1000"]
    code = (
        f"import runpy, sys; sys.argv = {[path, *options]!r}; runpy.run_path({path!r}, run_name='__main__');"
        "assert not {'torch', 'sklearn'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as NumPy says") == 9 + workers


def test_the_scripts_of_the_feed_page_run_as_printed(tmp_path):
    page = (EXAMPLES.parent / "docs" / "feed.md").read_text()
    produce, train, prefetch, prepared = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    (tmp_path / "produce.py").write_text(produce)
    (tmp_path / "train.py").write_text(train)
    run = Run(tmp_path, "x", [str(MANIPLE), "run", "-n", "2", "--name", "x", "--feed", "produce.py", "train.py"], {})
    assert run.wait(TIMEOUT_S) == 0, run.output
    np.testing.assert_allclose(run.center["w"], 1, atol=0.1)
    random = np.random.default_rng(0)
    (tmp_path / "prepared" / "train").mkdir(parents=True)
    for number in range(40):
        x = random.random((32, 10))
        np.savez(tmp_path / "prepared" / "train" / f"batch-{number}.npz", x=x, y=x.sum(1))
    for program in (prefetch, prepared):
        check = program + "assert abs(w - 1).max() < 0.5\n"
        subprocess.run([sys.executable, "-c", check], cwd=tmp_path, check=True, timeout=TIMEOUT_S)


def test_an_example_takes_the_rule_and_the_pace_from_the_command_line(tmp_path):
    run = together(tmp_path, "matrix_inverse.py", "--size", "30", how=("--rule", "downpour", "--every", "2"))
    (shared,) = run.events(0, "share")
    assert shared["rule"].startswith("Downpour")
    assert shared["pace"] == "Every(2)"


@bare
def test_the_demo_compares_and_tells_the_truth(tmp_path):
    pytest.importorskip("sklearn")
    options = ("--epochs", "3", "--target", "0.8", "--runs", str(tmp_path / "runs"))
    printed = alone("demo.py", *options, cwd=tmp_path)
    rows = re.findall(
        r"│ (alone, 1 thread|alone, all cores|2 workers) +│ +([\d.]+) +│ +([\d.]+)% +│ +([\d.]+) +│", printed
    )
    assert [name for name, *_ in rows] == ["alone, 1 thread", "alone, all cores", "2 workers"], printed
    seconds = [float(row[1]) for row in rows]
    (run,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    logged = [row["accuracy"] for row in read_events(run / "events" / "worker-0.jsonl") if "accuracy" in row]
    assert max(logged) >= 0.8  # the target that the table says was reached
    assert float(rows[2][2]) == pytest.approx(100 * rotated_digits_accuracy(run), abs=0.051)
    ratio = min(seconds[:2]) / seconds[2]
    verdict = re.search(r"It (pays|does not pay here).*?([\d.]+) times as fast", printed)
    assert verdict and float(verdict[2]) == pytest.approx(ratio, rel=0.02)
    assert (verdict[1] == "pays") == (ratio >= 1.1)
    assert f"run folder: {run}" in printed


@pytest.mark.parametrize(
    ("alone_s", "together_s", "says"),
    [
        ((4.0, 3.0), 2.0, "It pays: 2 workers reach the target 1.50 times as fast"),
        ((inf, 3.0), 2.0, "It pays: 2 workers reach the target 1.50 times as fast"),
        ((2.0, 3.0), 2.0, "It does not pay here: 2 workers reach the target 1.00 times as fast"),
        ((inf, 3.0), inf, "It does not pay here: one process has reached the target, 2 workers have not"),
        ((inf, inf), 2.0, "Only the 2 workers have reached the target"),
        ((inf, inf), inf, "No run has reached the target, so no speed-up is known"),
    ],
)
def test_the_demo_says_who_reached_the_target(alone_s: tuple[float, float], together_s: float, says: str):
    demo = module("demo.py")
    one_thread, all_cores, together = (demo.Result(seconds, 0.9, 5.0) for seconds in (*alone_s, together_s))
    assert demo.verdict([one_thread, all_cores], together, 2).startswith(says)


@bare
@pytest.mark.parametrize(("target", "reached"), [("0.001", r"0\.\d\d"), ("1", "inf")])
def test_the_last_evaluation_of_rotated_digits_counts_even_if_no_epoch_is_left(target: str, reached: str):
    pytest.importorskip("sklearn")
    printed = alone("rotated_digits.py", "--epochs", "0", "--target", target)
    assert re.search(rf"% after {reached} s; [\d.]+% after [\d.]+ s of training", printed), printed


@bare
def test_the_demo_says_what_failed():
    pytest.importorskip("sklearn")
    code = "import sys, demo; demo.train(sys.executable, '-m', 'maniple.cli', 'run', '-n', '0', 'nowhere.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert "maniple.cli run -n 0 nowhere.py ended with exit code 2" in done.stderr
