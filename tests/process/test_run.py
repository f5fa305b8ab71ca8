"""`maniple run`: workers start together, share one center, and leave a run folder that tells all."""

import os
import pty
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import require
from tests.waiting import PATIENCE_S

from .conftest import MANIPLE

COUNTING = """
    import numpy as np, maniple
    worker = maniple.join()
    params = {"w": np.zeros(1000)}
    replica = worker.share(params, rule=maniple.Downpour(), pace=maniple.Every(3))
    for step in range(100):
        params["w"] += 1 + worker.rank
        replica.samples = 8
        replica.step()
        if step % 10 == 0:
            worker.log(loss=1.0 / (step + 1), note="ten")
"""


def test_all_workers_steps_add_up_in_the_center(run):
    done = run(COUNTING, "-n", "3")
    assert done.process.returncode == 0, done.output
    # 100 steps each of 1, 2 and 3: also the last one, which came after the last due exchange, is in
    assert np.array_equal(done.center["w"], np.full(1000, 100.0 * (1 + 2 + 3)))


def test_the_run_folder_tells_what_happened(run):
    done = run(COUNTING, "-n", "2", args=("--anything", "7"))
    about = done.description
    assert about["asked"]["workers"] == 2
    assert about["asked"]["args"] == ["--anything", "7"]
    assert about["exit_code"] == 0
    assert about["lineage"]
    assert about["versions"]["numpy"] == np.__version__
    assert (done.folder.parent / "last").resolve() == done.folder.resolve()
    for rank in (0, 1):
        rows = done.events(rank)
        assert all({"timestamp", "datestamp", "worker"} <= row.keys() for row in rows)
        exchanges = done.events(rank, "exchange")
        assert len(exchanges) == 34  # every 3 of 100 steps, and the last one on leaving
        for row in exchanges:
            assert abs(row["end"] - row["start"] - row["duration"]) < 1e-5
            assert row["bytes"] == 2 * 8 * 1000
            assert row["staleness"] >= 0
        assert [row["event"] for row in rows][-1] == "leave"
        assert len(done.events(rank, "log")) == 10
        assert done.events(rank, "progress")[-1]["samples"] == 800


def test_workers_know_their_rank_and_have_arguments_of_their_own(run):
    done = run(
        """
        import os, sys, maniple
        worker = maniple.join()
        names = ("MANIPLE_RANK", "MANIPLE_WORLD", "MANIPLE_LOCAL_RANK", "MANIPLE_LOCAL_WORLD")
        taken = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} & {*os.environ}
        assert not taken, f"a script takes itself for a process of torchrun by {taken}"
        print(worker.rank, worker.world, worker.local_rank, worker.local_world, worker.device, worker.seed,
              [os.environ[n] for n in names], sys.argv[1:])
        """,
        "-n", "2", "--devices", "cpu:0,cpu:1",
        args=("--part", "{rank}-of-{world}", "{other}"), env={"RANK": "7", "WORLD_SIZE": "9"},
    )  # fmt: skip
    assert done.process.returncode == 0, done.output
    lines = [done.log(rank) for rank in (0, 1)]
    for rank, line in enumerate(lines):
        assert line.startswith(f"{rank} 2 {rank} 2 cpu:{rank} ")
        assert f"['{rank}', '2', '{rank}', '2'] ['--part', '{rank}-of-2', '{{other}}']" in line
        assert f"W{rank} | {line.strip()}" in done.output
    assert lines[0].split()[5] != lines[1].split()[5], "seeds must differ"


def test_cores_and_threads_are_divided(run):
    script = """
        import os, maniple
        maniple.join()
        print(sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"])
    """
    cores = sorted(os.sched_getaffinity(0))
    two = run(script, "-n", "2")
    if len(cores) >= 2:
        sets = [set(eval(two.log(rank).partition("]")[0] + "]")) for rank in (0, 1)]
        assert not sets[0] & sets[1]
        assert two.log(0).split()[-1] == str(len(cores) // 2)
    many = run(script, "-n", str(len(cores) + 1))
    assert many.log(0).strip() == f"{cores} 1 1"
    own = run(script, "-n", "2", "--no-bind", env={"OMP_NUM_THREADS": "5"})
    assert own.log(0).strip() == f"{cores} 5 5"


def test_workers_really_run_at_the_same_time(run):
    done = run(
        """
        import pathlib, time, maniple
        worker = maniple.join()
        worker.log(at=time.time())
        pathlib.Path(f"here{worker.rank}").touch()
        while len(list(pathlib.Path().glob("here*"))) < 3:  # for ever, if one had to end before another starts
            time.sleep(0.01)
        worker.log(at=time.time())
        """,
        "-n", "3",
    )  # fmt: skip
    assert done.process.returncode == 0, done.output
    starts, ends = zip(*([row["at"] for row in done.events(rank, "log")] for rank in range(3)), strict=True)
    assert max(starts) < min(ends)


def test_a_late_worker_starts_from_the_center(run):
    done = run(
        """
        import pathlib, time, numpy as np, maniple
        exchanged, late = pathlib.Path("exchanged"), pathlib.Path("late")
        worker = maniple.join()
        params = {"w": np.full(4, float(worker.rank))}
        while worker.rank == 1 and not exchanged.exists(): time.sleep(0.01)
        replica = worker.share(params, rule=maniple.ASGD(0, 1))
        if worker.rank == 0:
            params["w"][:] = 42
            replica.exchange()
            exchanged.touch()
            while not late.exists(): time.sleep(0.01)
        late.touch()
        print(params["w"][0])
        """,
        "-n", "2",
    )  # fmt: skip
    assert done.log(1).strip() == "42.0", done.output


def test_two_models_of_one_worker_have_two_centers(run):
    done = run(
        """
        import numpy as np, maniple
        worker = maniple.join()
        one = worker.share({"a": np.ones(3)})
        two = worker.share({"b": np.full(2, 2.0)})
        one.exchange(), two.exchange()
        """,
        "-n", "2",
    )  # fmt: skip
    assert done.process.returncode == 0, done.output
    assert {path.name for path in (done.folder / "center").glob("*.safetensors")} == {
        "center-0.safetensors",
        "center-1.safetensors",
    }


def test_the_command_line_chooses_rule_and_pace(run):
    script = """
        import numpy as np, maniple
        worker = maniple.join()
        params = {"w": np.zeros(3)}
        replica = worker.share(params)
        for _ in range(10):
            params["w"] += 1
            replica.step()
    """
    done = run(script, "-n", "1", "--rule", "downpour", "--every", "2")
    (share,) = done.events(0, "share")
    assert (share["rule"], share["pace"]) == (
        "Downpour(compensate=False, sync=False, nonfinite='stop', overlap=False)",
        "Every(2)",
    )
    assert len(done.events(0, "exchange")) == 5
    assert done.center["w"].tolist() == [10.0] * 3
    limited = run(script, "-n", "1", "--rule", "easgd:alpha=0.25", "--maximum-rate", "0.1")
    (share,) = limited.events(0, "share")
    assert (share["rule"], share["pace"]) == (
        "EASGD(alpha=0.25, center_alpha=None, sync=False, nonfinite='stop', overlap=False)",
        "RateLimit(0.1)",
    )


def test_a_worker_whose_exchanges_at_every_step_cost_too_much_says_so_once(run):
    script = """
        import numpy as np, maniple
        worker = maniple.join()
        params = {"w": np.zeros(500_000)}
        replica = worker.share(params)
        for _ in range(150):
            replica.step()
    """
    done = run(script, "-n", "2", "--rule", "downpour")
    for rank in (0, 1):
        found = re.findall(r"exchanges at every step took (\d+)% of the time, over 50 exchanges", done.log(rank))
        assert len(found) == 1 and int(found[0]) > 50, done.log(rank)
        assert "--every 10" in done.log(rank) and "--maximum-rate 0.2" in done.log(rank)
    rare = run(script.replace("range(150)", "range(700)"), "-n", "1", "--rule", "downpour", "--every", "10")
    assert "exchanges at every step" not in rare.output


def test_stop_after_ends_a_worker_with_its_last_exchange_done(run):
    done = run(
        """
        import time, numpy as np, maniple
        from maniple.rules import warm_up
        worker = maniple.join()
        params = {"w": np.zeros(1)}
        warm_up(["float64"])  # before the clock runs: to compile takes 5 s on a busy machine
        replica = worker.share(params, rule=maniple.Downpour(), pace=maniple.Every(1000000),
                               stop=maniple.StopAfter(total_duration=4.0))
        steps = 0
        while steps < 100000 and not worker.should_stop:
            for _ in worker.sampler(range(1000)):
                params["w"] += 1; steps += 1
                replica.step(); time.sleep(0.002)
        print(steps)
        """,
        "-n", "1",
    )  # fmt: skip
    assert done.process.returncode == 0, done.output
    steps = int(done.log(0))
    assert 1 < steps < 4000
    assert done.center["w"].tolist() == [steps]
    joined, shared, left = (done.events(0, event)[0]["timestamp"] for event in ("join", "share", "leave"))
    assert left - joined >= 4
    assert left - shared < 11


def test_output_is_plain_lines_without_a_terminal_and_nothing_when_quiet(run):
    script = """
        import os, maniple
        from tqdm import tqdm
        worker = maniple.join()
        print("hello")
        for epoch in tqdm(range(2), desc="épochs", mininterval=0):
            for step in tqdm(range(2000), desc=f"épaque {epoch}", mininterval=0, leave=False):
                pass
        if worker.rank:
            bar = tqdm(range(2000), desc="last", mininterval=0)
            bar.update(1000)
            os._exit(0)  # in the middle of a bar
        """
    loud, quiet = run(script, "-n", "2"), run(script, "-n", "2", "--quiet")
    assert "W0 | hello" in loud.output
    assert "W1 | hello" in loud.output
    assert "\x1b" not in loud.output and "\r" not in loud.output
    assert len(loud.output.splitlines()) < 40, "a line for each state of a bar"
    for rank in range(2):
        assert f"W{rank} | épochs: 100%|██████████| 2/2" in loud.output
        assert len(loud.log(rank)) < 2000
    assert "W1 | last:  50%|█████     | 1000/2000" in loud.output
    assert quiet.output == ""
    assert quiet.log(1).startswith("hello\n")


def test_a_terminal_shows_one_line_per_worker(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(
        "import pathlib, time, numpy as np, maniple\n"
        "from tqdm import tqdm\n"
        "worker = maniple.join(); params = {'w': np.zeros(9)}; replica = worker.share(params)\n"
        "for _ in tqdm(range(3000)):\n"
        "    if pathlib.Path('seen').exists(): break\n"
        "    replica.samples = 4; replica.step(); worker.log(loss=0.125); time.sleep(0.02)\n"
    )
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        [str(MANIPLE), "run", "-n", "2", str(script)], cwd=tmp_path, env=env, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
            bars = set(re.findall(rb"W(\d) \| +\d+%\|", shown))  # while they are drawn
            if len(bars) == 2 and all(part in shown for part in (b"samples/s", b"0.125", b"training")):
                (tmp_path / "seen").touch()
    except OSError:  # the other side has closed
        pass
    os.close(ours)
    assert process.wait(PATIENCE_S) == 0
    text = shown.decode()
    for part in ("W0", "W1", "samples/s", "0.125", "training", "done"):
        assert part in text, part
    assert "3000/3000" not in text, "the bars were seen at their end only"


def test_a_closed_output_does_not_end_the_training(start, tmp_path):
    going = start(
        """
        import time, maniple
        worker = maniple.join()
        for i in range(20):
            print(i); time.sleep(0.05)
        worker.log(finished=True)
        """,
        "-n", "1",
    )  # fmt: skip
    going.await_event(0, "join")
    going.process.stdout.close()  # as `| head` does
    assert going.process.wait(PATIENCE_S) == 0
    assert going.events(0, "log")[-1]["finished"] is True


def test_without_the_launcher_the_script_is_a_world_of_one(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(
        "import numpy as np, maniple\n"
        "worker = maniple.join(); params = {'w': np.zeros(3)}\n"
        "replica = worker.share(params, rule=maniple.Downpour())\n"
        "for _ in range(25): params['w'] += 1; replica.step()\n"
        "replica.exchange(); replica.pull(); replica.push(); worker.log(loss=1)\n"
        "with worker.lock(1), replica.center(): print(params['w'].tolist(), worker.rank, worker.world, worker.device)\n"
        "print(sorted(worker.sampler(range(5))), worker.should_stop)\n"
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout == "[25.0, 25.0, 25.0] 0 1 cpu\n[0, 1, 2, 3, 4] False\n", done.stderr
    assert list(tmp_path.iterdir()) == [script], "alone, nothing is written"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--every", "0"], ["--every 0", "Write --every 10"]),
        (["--listen", "29499"], ["'29499'", "127.0.0.1:29499"]),
        (["--devices", "gpu0"], ["'gpu0'", "cuda:0"]),
        (["--rule", "bsp", "--every", "5"], ["averages gradients at each step", "Every(5)"]),
        (["--rule", "localsgd", "--maximum-rate", "0.1"], ["needs all workers at the same step"]),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(tmp_path, options, words):
    (tmp_path / "train.py").write_text("import maniple")
    done = subprocess.run([MANIPLE, "run", *options, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr
    assert len(done.stderr.splitlines()) == 1, "one message, no traceback"
    assert not (tmp_path / "runs").exists()


def test_gpus_that_torch_does_not_see_are_refused_before_anything_starts(tmp_path):
    (tmp_path / "train.py").write_text("import maniple")
    command = [MANIPLE, "run", "--devices", "cuda:0,cuda:99", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "cuda:99" in done.stderr and "torch sees" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_option_of_maniple_that_follows_the_script_is_pointed_out(run):
    script = """
        import sys, numpy as np, maniple
        worker = maniple.join()
        worker.share({"w": np.zeros(1)})
        print(sys.argv[1:])
    """
    done = run(script, args=["-n", "2", "--seed", "3"])
    assert done.log(0).strip() == "['-n', '2', '--seed', '3']"
    hints = [line for line in done.output.splitlines() if "comes after the script" in line]
    assert len(hints) == 1 and "-n" in hints[0] and "--seed" not in hints[0]


DEFAULT_RULE = """
    import sys
    import numpy as np, torch
    import maniple

    worker, sampler = maniple.join(), None
    if sys.argv[1] == "torch":
        sampler = worker.sampler(40)  # before a model is shared
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker.share(model, optimizer)
        print(type(sampler).__name__)
        for batch in sampler.batches(5):
            optimizer.zero_grad()
            model(torch.ones(len(batch), 2)).sum().backward()
            optimizer.step()
    else:
        params = {"w": np.zeros(3)}
        worker.share(params).step()
"""


@pytest.mark.parametrize(
    ("kind", "options", "rule", "said"),
    [
        ("torch", (), "BSP(", "rule: bsp by default, since all workers are on this machine"),
        ("torch", ("--every", "2"), "EASGD(", "rule: easgd by default"),
        ("torch", ("--rule", "localsgd"), "LocalSGD(", ""),
        ("numpy", (), "EASGD(", "rule: easgd by default"),  # its gradients are not known
    ],
)
def test_default_rule_follows_from_the_model_and_the_options_and_is_explained(run, kind, options, rule, said):
    require("torch", find_spec("torch") is not None, "the script shares a torch model")
    done = run(DEFAULT_RULE, "-n", "2", *options, args=(kind,))
    assert done.process.returncode == 0, done.output
    rows = [row for rank in (0, 1) for row in done.events(rank, "share")]
    assert [row["rule"].startswith(rule) for row in rows] == [True, True]
    assert [row["by_default"] for row in rows] == [bool(said)] * 2
    assert said in done.output and done.output.count("by default") == bool(said)
    if kind == "torch":  # a sampler that was made before suits the rule too
        assert done.log(0).count("Shard") == (rule != "EASGD(")


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        ((), ["BSP(", "BSP("]),
        (("--every", "20"), ["BSP(", "EASGD("]),
        (("--listen", "127.0.0.1:0"), ["BSP(", "EASGD("]),
    ],
)
def test_default_rule_of_a_resumed_run_suits_the_options_given_now(run, options, rules):
    require("torch", find_spec("torch") is not None, "the script shares a torch model")
    done = run(DEFAULT_RULE, "-n", "2", args=("torch",))
    command = [str(MANIPLE), "run", "--resume", str(done.folder), *options]
    again = subprocess.run(command, cwd=done.folder.parent.parent, capture_output=True, text=True, timeout=PATIENCE_S)
    assert again.returncode == 0, again.stdout + again.stderr
    rows = done.events(0, "share")
    assert [row["rule"].split("(")[0] + "(" for row in rows] == rules
    names = [rule.lower().rstrip("(") for rule in rules]
    assert f"rule: {names[1]} by default" in again.stdout
