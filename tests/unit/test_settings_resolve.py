"""Settings of several sources: which value counts, and which one sets another aside."""

from pathlib import Path

import pytest

from maniple.cli.command import resolve
from maniple.errors import InvalidArgument
from maniple.settings.files import SourcedValue, read_file


def source(origin: str, *, is_general: bool = False, **values: str) -> dict[str, SourcedValue]:
    return {key: SourcedValue(value, origin, is_general=is_general) for key, value in values.items()}


def origins(values: dict[str, SourcedValue]) -> dict[str, str]:
    return {key: one.origin for key, one in values.items()}


def test_the_first_source_counts_and_the_command_line_more_than_any():
    session, own = source("session", seed="2", workers="2"), source("own", rule="bsp", seed="3")
    sources = [source("variable", seed="1"), session, own]
    assert origins(resolve(set(), sources)) == {"seed": "variable", "workers": "session", "rule": "own"}
    assert origins(resolve({"seed", "rule"}, sources)) == {"workers": "session"}


@pytest.mark.parametrize(
    ("given", "key"),
    [("every", "maximum_rate"), ("maximum_rate", "every"), ("resume", "name"), ("script", "model"), ("model", "args")],
)
def test_a_key_gives_way_to_one_that_excludes_it_from_a_higher_source(given, key):
    assert resolve({given}, [source("session", **{key: "1"})]) == {}
    assert resolve(set(), [source("variable", **{given: "1"}), source("session", **{key: "1"})]).keys() == {given}
    assert resolve({key}, [source("session", **{key: "1"})]) == {}


def test_two_paces_of_one_source_are_refused_with_both_origins():
    both = source("session.yaml:1", every="10") | source("session.yaml:2", maximum_rate="2")
    with pytest.raises(InvalidArgument, match=r"session\.yaml:1 sets every, and session\.yaml:2 maximum_rate"):
        resolve(set(), [both])


def test_a_file_for_all_runs_encrypts_only_those_that_listen():
    sources = [source("own", is_general=True, tls="true")]
    assert resolve(set(), sources) == {}
    assert resolve({"listen"}, sources).keys() == {"tls"} == resolve(set(), sources, {"listen"}).keys()
    assert resolve(set(), [source("session", tls="true")]).keys() == {"tls"}, "of one run, it always counts"


def test_a_resumed_run_keeps_its_rule_against_a_file_for_all_runs():
    assert resolve({"resume"}, [source("own", is_general=True, rule="bsp", runs="/data")]).keys() == {"runs"}
    assert resolve({"resume"}, [source("session", rule="bsp")]).keys() == {"rule"}


def test_values_of_a_file_stay_text_with_their_line(tmp_path):
    path = tmp_path / "session.yaml"
    path.write_text("# a comment\nname: 007\nsnapshot-every: 1e3\ndevices: [cuda:0, cpu]\n")
    values, notes = read_file(path, ["name", "snapshot_every", "devices"], Path("personal.yaml"))
    assert {key: (one.value, one.origin) for key, one in values.items()} == {
        "name": ("007", f"{path}:2"),
        "snapshot_every": ("1e3", f"{path}:3"),
        "devices": (("cuda:0", "cpu"), f"{path}:4"),
    }
    assert notes == [] and str(values["devices"]) == "cuda:0, cpu" and values["name"].folder == tmp_path
