"""A run that goes on is changed, saved, mirrored and ended by one who watches it: real hosts, near and far workers."""

import os
import signal
import stat
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from maniple.connection.find_host import locate_to_watch
from maniple.record import Row
from maniple.watch import Mirror, Steering
from tests.waiting import PATIENCE_S, await_

from .conftest import BARE, MANIPLE, Serve

# Two models: of one the script itself schedules alpha, the other has no alpha.
TRAINING = """
    import time
    import numpy as np, maniple
    worker = maniple.join()
    w, v = {"w": np.zeros(500, "float32")}, {"v": np.zeros(50)}
    elastic = worker.share(w, rule=maniple.EASGD(lambda step: 0.1), pace=maniple.Every(5))
    other = worker.share(v, rule=maniple.Downpour())
    while not worker.should_stop:
        w["w"] += 1
        elastic.step()
        other.step()
        worker.log(loss=1 / elastic.steps)
        time.sleep(0.01)
"""
SYNCHRONOUS = """
    import time
    import numpy as np, maniple
    worker = maniple.join()
    w = {"w": np.zeros(500, "float32")}
    replica = worker.share(w, rule=maniple.LocalSGD(5))
    while True:
        w["w"] += 1
        replica.step()
        worker.log(loss=1)
        time.sleep(0.01)
"""


def change(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`maniple change`, as a person calls it."""
    return subprocess.run([MANIPLE, "change", *words], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)


def followed(run: Serve, rank: int, count: int = 1) -> Row:
    """The row by which worker `rank` tells for the `count`-th time that its elastic model has followed."""

    def look() -> list[Row]:
        return [row for row in run.events(rank, "changed") if row["rule"].startswith("EASGD")]

    return await_(lambda: rows if len(rows := look()) >= count else None)[count - 1]


@dataclass
class RunState:
    """What became of a run that was changed, whose server and then whose host was killed, and that was told to stop."""

    run: Serve
    mirror: Mirror
    said: dict[str, subprocess.CompletedProcess[str]] = field(default_factory=dict)
    snapshots: list[str] = field(default_factory=list)
    changed: dict[str, list[Row]] = field(default_factory=dict)  # the row by which a worker told that it followed
    kept: list[str] = field(default_factory=list)
    was_prefix: bool = True
    away: str = ""

    def refresh(self) -> None:
        self.mirror.refresh(PATIENCE_S)
        for path in (self.mirror.folder / "events").glob("*.jsonl"):
            self.was_prefix &= (self.run.folder / "events" / path.name).read_bytes().startswith(path.read_bytes())


@pytest.fixture(scope="module")
def changed_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunState]:
    folder = tmp_path_factory.mktemp("change")
    (folder / "near.py").write_text(textwrap.dedent(TRAINING))
    command = [str(MANIPLE), "run", "--keep", "2", "--snapshot-every", "0", "--restarts", "1"]
    run = Serve(folder, "run", [*command, "--name", "run", "--listen", "127.0.0.1:0", "near.py"], BARE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", BARE["PYTHONPATH"])
        try:
            run.await_event("server", "serving")
            run.await_event(0, "share", count=2)
            yield _change_everything(folder, run, command)
        finally:
            for one in (run.process, *run.workers):
                if one.poll() is None:
                    one.terminate()
                one.communicate(timeout=PATIENCE_S)


def _change_everything(folder: Path, run: Serve, command: list[str]) -> RunState:
    address, token = run.address, run.token
    environment = locate_to_watch(address, token)
    changed_run = RunState(run, Mirror(environment, folder / "mirror"))
    run.join(TRAINING)
    run.await_event(1, "share", count=2)
    changed_run.said["wrong"] = change(folder, "runs/run", "beta=0.3")
    changed_run.said["alpha"] = change(folder, "--token-file", str(token), address, "alpha=0.3")
    changed_run.changed["alpha"] = [followed(run, rank) for rank in range(2)]
    changed_run.refresh()

    os.kill(run.server_pid, signal.SIGKILL)
    run.await_event("server", "serving", count=2)
    run.join(TRAINING)  # who joins late
    changed_run.changed["late"] = [followed(run, 2)]
    changed_run.said["every"] = change(folder, "runs/run", "every=7")
    changed_run.changed["every"] = [followed(run, rank, 2) for rank in range(3)]
    changed_run.snapshots = [Steering(environment, who="ada").snapshot() for _ in range(3)]
    changed_run.kept = sorted(path.name for path in (run.folder / "center").glob("snapshot-*"))
    changed_run.refresh()

    run.process.kill()
    run.process.communicate(timeout=PATIENCE_S)
    await_(lambda: changed_run.refresh() or changed_run.mirror.is_away)
    changed_run.away = changed_run.mirror.away
    again = [*command, "--resume", "runs/run", "--listen", address, "near.py"]
    run.process = subprocess.Popen(
        again, cwd=folder, env=os.environ | BARE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    changed_run.changed["resumed"] = [followed(run, 0, 3)]
    await_(lambda: changed_run.refresh() or not changed_run.mirror.is_away)

    Steering(environment, who="ada").stop()
    await_(lambda: changed_run.refresh() or changed_run.mirror.is_over or run.process.poll() is not None)
    run.wait()
    return changed_run


def test_local_and_remote_workers_follow_a_change_and_report_the_values_in_use(changed_run):
    assert changed_run.said["alpha"].stdout.startswith("change 1, alpha=0.3: the workers (2)"), changed_run.said[
        "alpha"
    ].stderr
    for row in changed_run.changed["alpha"]:
        assert (row["number"], row["settings"], row["pace"]) == (1, {"alpha": 0.3}, "Every(5)")
        assert row["rule"].startswith("EASGD(alpha=0.3, ")
        assert row["schedules"] == ["alpha"], "the change wins over the script's schedule, and says so"
    asked = changed_run.run.events("server", "changed")
    assert [(row["number"], row["settings"]) for row in asked] == [(1, {"alpha": 0.3}), (2, {"every": 7})]
    assert all("@" in row["asked_by"] for row in asked)


def test_late_workers_and_those_of_a_host_that_was_killed_have_it_too(changed_run):
    assert [row["settings"] for row in changed_run.changed["late"]] == [{"alpha": 0.3}]
    row = changed_run.changed["resumed"][0]
    assert row["settings"] == {"alpha": 0.3, "every": 7}
    assert row["rule"].startswith("EASGD(alpha=0.3, ") and row["pace"] == "Every(7)"


def test_a_pace_is_followed_by_all_models(changed_run):
    assert changed_run.said["every"].returncode == 0, changed_run.said["every"].stderr
    assert [row["pace"] for row in changed_run.changed["every"]] == ["Every(7)"] * 3
    rules = {
        row["rule"].partition("(")[0] for row in changed_run.run.events(1, "changed") if "every" in row["settings"]
    }
    assert rules == {"EASGD", "Downpour"}
    steps = [
        row["step"]
        for row in changed_run.run.events(1, "exchange")
        if row["step"] > changed_run.changed["every"][1]["step"]
    ]
    assert 7 in {after - before for before, after in zip(steps, steps[2:], strict=False)}, "two models take turns"


def test_what_no_worker_could_follow_is_refused(changed_run):
    said = changed_run.said["wrong"]
    assert (said.returncode, said.stdout) == (2, "")
    assert "'beta' cannot be changed" in said.stderr and "alpha, center_alpha" in said.stderr


def test_snapshots_are_written_on_order_and_pruned(changed_run):
    assert changed_run.snapshots == ["snapshot-000001", "snapshot-000002", "snapshot-000003"]
    assert changed_run.kept == changed_run.snapshots[1:], "--keep 2"
    rows = changed_run.run.events("server", "snapshot")
    assert [(row["name"], row["asked_by"]) for row in rows] == [(name, "ada") for name in changed_run.snapshots]


def test_the_mirror_was_the_folder_all_the_time(changed_run):
    assert changed_run.was_prefix
    assert changed_run.away, "while there was no host it said so"
    for path in (changed_run.run.folder / "events").glob("*.jsonl"):
        there, here = path.read_bytes(), (changed_run.mirror.folder / "events" / path.name).read_bytes()
        # The host writes its last rows when nobody listens any more; so it is with all if the test was slow at the end.
        assert there.startswith(here) and (there == here or path.name == "host.jsonl" or not changed_run.mirror.is_over)
    token = changed_run.run.token.read_text().strip()
    assert all(token not in path.read_text() for path in changed_run.mirror.folder.rglob("*") if path.is_file())


def test_the_run_ended_on_order(changed_run):
    assert changed_run.run.process.returncode == 130, "as by `maniple stop`"
    assert changed_run.run.events("server", "ordered")[-1]["asked_by"] == "ada"
    assert changed_run.run.description["exit_code"] == 130
    assert (changed_run.run.folder / "center" / "center-0.safetensors").exists()


def test_a_run_that_does_not_listen_is_open_to_its_owner_alone(start: Callable[..., Serve], tmp_path: Path):
    run = start(SYNCHRONOUS, "-n", "2", env=BARE)
    run.await_event(0, "log")
    run.await_event(1, "log")
    segment = next(Path(os.environ["MANIPLE_SHM"]).glob("maniple-*"))
    assert stat.S_IMODE(segment.stat().st_mode) == 0o700
    assert stat.S_IMODE((segment / "token").stat().st_mode) == 0o600
    assert not (run.folder / "token").exists() and not (run.folder / "host.json").exists()
    refused = change(tmp_path, str(run.folder), "every=20")
    assert refused.returncode == 2
    assert "LocalSGD" in refused.stderr and "all workers exchange at the same step" in refused.stderr
    assert "saved: snapshot-000001" in change(tmp_path, "--snapshot", str(run.folder)).stdout
    assert not run.events(0, "changed") and not run.events(1, "changed")
    Steering(locate_to_watch(str(run.folder))).stop()
    assert run.wait() == 130, run.output
    gone = change(tmp_path, str(run.folder), "every=20")
    assert gone.returncode == 2 and "has ended with exit code 130" in gone.stderr
