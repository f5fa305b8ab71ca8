"""README and docs: their code runs and their commands are understood, as pasted."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.exceptions import Exit

from maniple.cli import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


def test_the_script_of_the_readme_runs_alone_and_on_two_workers(tmp_path):
    pytest.importorskip("torch")
    # On a busy machine PyTorch's threads wait for each other, ten times as long.
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    train, load, *_ = blocks(ROOT / "README.md", "python")
    # Without a seed, a worker that ends before the other begins comes near the bound: 0.396 in the worst of 60 trials.
    seeded = train.replace("import maniple\n", "import maniple\n\ntorch.manual_seed(0)\n", 1)
    (tmp_path / "train.py").write_text(seeded)
    for command in (["python", "train.py"], ["maniple", "run", "-n", "2", "train.py"]):
        program = [sys.executable] if command[0] == "python" else [str(Path(sys.executable).with_name("maniple"))]
        done = subprocess.run(
            [*program, *command[1:]], cwd=tmp_path, env=one_thread, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        losses = [float(loss) for loss in re.findall(r"loss of the shared model: (\S+)", done.stdout)]
        assert len(losses) == (1 if command[0] == "python" else 2)
        assert max(losses) < 0.4
    model = train.partition("worker = ")[0]
    (tmp_path / "load.py").write_text(
        f"{model}\nbefore = model[0].weight.clone()\n{load}\nassert (model[0].weight != before).any()"
    )
    subprocess.run([sys.executable, "load.py"], cwd=tmp_path, env=one_thread, check=True, timeout=120)


@pytest.mark.parametrize("page", ["README.md", "docs/pool.md"])
def test_the_serial_programs_of_a_page_run_as_printed(page, tmp_path):
    found = [block for block in blocks(ROOT / page, "python") if page != "README.md" or "maniple.Pool" in block]
    assert found
    (tmp_path / "program.py").write_text("\n".join(found))
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_rule_of_ones_own_works_as_printed(page):
    import numpy as np

    from maniple.contracts import Moment

    for code in blocks(page, "python"):
        if "maniple.Rule" in code:
            scope: dict = {}
            exec(code, scope)
            x, c = np.array([1.0, 5.0]), np.array([3.0, 5.0])
            assert scope["Halfway"]().exchange(x, c, None, Moment())
            assert x.tolist() == c.tolist() == [2.0, 5.0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_are_understood(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "session.yaml").write_text("script: train.py")
    (tmp_path / "train.py").touch()
    for line in "\n".join(blocks(page, "sh")).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["maniple"] and words[1:2] in (["run"], ["submit"], ["doctor"], ["change"]):
            command = cli.commands[words[1]]
            with contextlib.suppress(Exit), click.Context(command, **command.context_settings) as context:
                command.parse_args(context, words[2:])


def test_the_doctors_page_names_every_check_and_no_other():
    from maniple.doctor import CHECKS

    rows = re.findall(r"^\| `([a-z ]+)` \|", (ROOT / "docs/doctor.md").read_text(), re.M)
    assert rows == [check.name for check in CHECKS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_make_targets_of_the_readme_exist():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    for line in "\n".join(blocks(ROOT / "README.md", "sh")).splitlines():
        if line.startswith("make "):
            assert line.split()[1] in targets
