"""Settings from files and variables, with the real command."""

import json
import re
from pathlib import Path

import pytest

from .conftest import MANIPLE, Run, Serve

pytestmark = pytest.mark.usefixtures("without_numba")

ROOT = Path(__file__).parents[2]
TRAIN = """
import json, os, sys
import numpy as np
import maniple
from maniple.environment import read_environment

worker = maniple.join()
params = {"w": np.zeros(10)}
replica = worker.share(params)
for _ in range(20):
    params["w"] += 1
    replica.step()
place = read_environment()
settings = {"args": sys.argv[1:], "world": worker.world, "device": worker.device, "rule": place.rule,
        "pace": place.pace, "seed": place.seed, "wire": place.wire, "restarts": place.restarts,
        "certificate": str(place.certificate), "deadline": place.host_deadline_s, "folder": os.getcwd()}
print(json.dumps(settings))
"""


def call(folder: Path, *words: str, **variables: str) -> Run:
    """Call `maniple run` in `folder`; its run folder is the newest one there."""
    done = Run(folder, "last", [str(MANIPLE), "run", *words], variables)
    done.wait()
    return done


def printed_settings(done: Run, rank: int = 0) -> dict:
    """What a worker's script saw."""
    assert done.process.returncode == 0, done.output
    return json.loads(done.log(rank).splitlines()[-1])


def test_the_session_file_of_the_docs_trains(tmp_path):
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs/session.md").read_text(), re.M | re.S)
    (tmp_path / "session.yaml").write_text(text)
    (tmp_path / "train.py").write_text(TRAIN)
    done = call(tmp_path, "session.yaml")
    for rank in range(2):
        seen = printed_settings(done, rank)
        assert seen["args"] == ["--lr", "0.05", "--passes", "3"]
        assert (seen["world"], seen["device"], seen["pace"]) == (2, "cpu", "every:5")
        assert done.events(rank, "share")[0]["rule"].startswith("EASGD(alpha=0.4")
        assert len(done.events(rank, "exchange")) >= 4
    asked = done.description["asked"]
    assert asked["session"] == str(tmp_path / "session.yaml")
    assert (asked["workers"], asked["restarts"], asked["snapshot_every"]) == (2, 1, 60)


def test_each_level_counts_more_than_the_next(tmp_path):
    """Each level sets one key that those above it leave open, and all that they set as well."""
    (tmp_path / "personal").mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "session.yaml").write_text("script: train.py\nseed: 3\ndevices: cpu:3\nwire: int8\n")
    (tmp_path / ".maniple.yaml").write_text("seed: 4\ndevices: cpu:4\nwire: float16\nrestarts: 4\n")
    (tmp_path / "personal" / "maniple.yaml").write_text(
        "seed: 5\ndevices: cpu:5\nwire: float32\nrestarts: 5\nsnapshot_every: 55\n"
    )
    variables = {"MANIPLE_SEED": "2", "MANIPLE_DEVICES": "cpu:2", "XDG_CONFIG_HOME": str(tmp_path / "personal")}
    done = call(tmp_path, "--seed", "1", "session.yaml", **variables)
    asked = done.description["asked"]
    resolved = [asked[key] for key in ("seed", "devices", "wire", "restarts", "snapshot_every")]
    assert resolved == [1, ["cpu:2"], "int8", 4, 55]
    seen = printed_settings(done)
    assert (seen["seed"], seen["device"], seen["wire"]) == (1, "cpu:2", "int8")


def test_a_run_takes_place_where_the_command_is_called(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "train.py").write_text(TRAIN)
    (tmp_path / "deep" / "session.yaml").write_text("script: train.py\nargs: [a b, '{rank}']\n")
    done = call(tmp_path, "-n", "2", "deep/session.yaml")
    assert printed_settings(done, 1)["args"] == ["a b", "1"]
    assert printed_settings(done, 1)["world"] == 2
    assert printed_settings(done, 1)["folder"] == str(tmp_path)


def test_workers_get_what_the_launcher_resolved_whatever_the_variables_say(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    variables = {
        "MANIPLE_RULE": "asgd", "MANIPLE_SEED": "5", "MANIPLE_WIRE": "int8", "MANIPLE_HOST_DEADLINE": "50",
        "MANIPLE_RESTARTS": "3", "MANIPLE_PACE": "every:99", "MANIPLE_KEY": "no.pem", "MANIPLE_WORKERS": "2",
        "MANIPLE_CERTIFICATE": "of-some-host.pem",
    }  # fmt: skip
    done = call(tmp_path, "--rule", "downpour", "--seed", "6", "train.py", **variables)
    seen = printed_settings(done, 1)
    assert (seen["rule"], seen["seed"], seen["wire"], seen["deadline"]) == ("downpour", 6, "int8", 50)
    assert (seen["restarts"], seen["pace"]) == (0, None)
    assert seen["certificate"] == "None", "its own host does not encrypt"
    assert done.description["asked"]["restarts"] == 3


def test_a_run_inside_a_worker_has_settings_of_its_own(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "outer.py").write_text(
        f"import subprocess, maniple; maniple.join(); subprocess.run([{str(MANIPLE)!r}, 'run', 'train.py'], check=True)"
    )
    call(tmp_path, "--rule", "downpour", "--every", "3", "--seed", "6", "--wire", "int8", "--name", "outer", "outer.py")
    (inner,) = [path for path in (tmp_path / "runs").iterdir() if path.name.startswith("train-")]
    seen = json.loads((inner / "logs" / "worker-0.log").read_text().splitlines()[-1])
    assert (seen["rule"], seen["pace"], seen["seed"], seen["wire"]) == (None, None, 1, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("wrokers: 2", ["session.yaml:2", "no setting 'wrokers'", "Did you mean workers?"]),
        ("workers: two", ["session.yaml:2", "workers cannot be 'two'", "integer"]),
        ("workers: 0", ["0 workers", "workers is '0' by session.yaml:2"]),
        ("a: b: c", ["session.yaml:2 is no YAML"]),
    ],
)
def test_a_mistake_in_a_file_ends_with_exit_code_2(text, words, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "session.yaml").write_text(f"script: train.py\n{text}\n")
    done = call(tmp_path, "session.yaml")
    assert done.process.returncode == 2
    assert "Traceback" not in done.output
    for word in words:
        assert word in done.output
    assert not (tmp_path / "runs").exists()


def test_settings_are_shown_and_nothing_is_started(tmp_path):
    (tmp_path / "session.yaml").write_text("script: train.py\nworkers: 3\n")
    done = call(tmp_path, "--show-settings", "session.yaml", MANIPLE_RULE="asgd")
    assert done.process.returncode == 0
    assert re.search(r"^workers +3 +session\.yaml:2$", done.output, re.M)
    assert re.search(r"^rule +asgd +MANIPLE_RULE$", done.output, re.M)
    assert not (tmp_path / "runs").exists()


def test_sync_start_false_is_a_host_that_workers_join(tmp_path):
    (tmp_path / "session.yaml").write_text("script: train.py\nsync_start: false\nsync_rule: EASGD\nname: alone\n")
    host = Serve(tmp_path, "alone", [str(MANIPLE), "run", "session.yaml"], {})
    try:
        worker = host.join(TRAIN)
        said = worker.communicate(timeout=60)[0]
        assert worker.returncode == 0, said
        assert json.loads(said.splitlines()[-1])["world"] == 1
    finally:
        assert host.end() == 0, host.output
    assert "sync_rule is read as rule: EASGD" in host.output
    assert "maniple join" in host.output
    assert host.events("host", "started") == []


def test_a_host_alone_takes_a_session_file(tmp_path):
    (tmp_path / "session.yaml").write_text("script: train.py\nworkers: 4\nname: served\nrule: downpour\n")
    host = Serve(tmp_path, "served", [str(MANIPLE), "serve", "session.yaml"], {})
    assert host.address.startswith("127.0.0.1:")
    assert host.end() == 0
    asked = host.description["asked"]
    assert (asked["rule"], asked["workers"], asked["session"]) == ("downpour", 0, str(tmp_path / "session.yaml"))
