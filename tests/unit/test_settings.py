"""Settings: how they are declared, which source counts, and the errors for those that cannot be used."""

import os
import textwrap
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from maniple.cli import cli
from maniple.cli.command import SettingsCommand, option_keys
from maniple.environment import Environment
from maniple.errors import BadFrame, InvalidArgument
from maniple.rules import parse_rule
from maniple.settings.options import (
    GROUPS,
    Limits,
    RunSettings,
    all_settings,
    check_settings,
    joining_settings,
    with_joining_settings,
)
from tests.conftest import require


@pytest.fixture(autouse=True)
def nothing_set(tmp_path, monkeypatch):
    """A folder of one's own, and no settings but those of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "personal"))
    (tmp_path / "personal").mkdir()


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(textwrap.dedent(text))


def call(command: click.Command, *words: str) -> str:
    done = CliRunner().invoke(command, words, standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.output


def shown(*words: str, command: str = "run") -> dict[str, tuple[str, str]]:
    """The settings as printed: value and origin of each key."""
    lines = call(cli, command, "--show-settings", *words).splitlines()
    rows = (line.split("  ") for line in lines if not line.startswith("maniple:"))
    return {row[0]: (row[1].strip() if len(row) == 3 else row[1:-1], row[-1].strip()) for row in map(_three, rows)}


def _three(parts: list[str]) -> list[str]:
    return [part.strip() for part in parts if part.strip()]


def refusal(text: str, *words: str, path: str = "session.yaml", command: str = "run") -> str:
    """What is said of a file that cannot be used."""
    write(path, text)
    with pytest.raises(InvalidArgument) as error:
        shown(*(words or [path]), command=command)
    return str(error.value)


LEVELS = ["command line", "MANIPLE_EVERY", "session.yaml:2", ".maniple.yaml:1", "personal/maniple.yaml:1", "default"]


@pytest.mark.parametrize("level", range(6), ids=LEVELS)
@pytest.mark.parametrize("key", ["every", "seed", "name"])
def test_each_level_counts_more_than_those_below_it(level, key, tmp_path, monkeypatch):
    words = [f"--{key}", "90"] if level == 0 else []
    if level <= 1:
        monkeypatch.setenv(f"MANIPLE_{key.upper()}", "91")
    write("session.yaml", "script: train.py\n" + (f"{key}: 92" if level <= 2 else ""))
    if level <= 3:
        write(".maniple.yaml", f"{key}: 93")
    if level <= 4:
        write("personal/maniple.yaml", f"{key}: 94")
    value, origin = shown(*words, "session.yaml")[key]
    if level == 5:
        assert origin == "default"
    else:
        assert value == str(90 + level)
        assert origin.endswith(LEVELS[level].replace("EVERY", key.upper()))


def test_keys_are_option_names_with_either_dash():
    write("session.yaml", "script: a.py\nsnapshot-every: 5\nmaximum_rate: 0.5\n")
    rows = shown("session.yaml")
    assert rows["snapshot_every"] == ("5.0", "session.yaml:2")
    assert rows["maximum_rate"] == ("0.5", "session.yaml:3")


def test_values_stay_as_they_were_written():
    write("session.yaml", "script: a.py\nname: 007\nrule: easgd:alpha=0.5\nbind: no\ntls: true\nlisten: 0.0.0.0:29400")
    rows = shown("session.yaml")
    assert rows["name"][0] == "007"
    assert rows["rule"][0] == "easgd:alpha=0.5"
    assert (rows["bind"][0], rows["tls"][0]) == ("false", "true")
    assert rows["listen"][0] == "0.0.0.0:29400"


@pytest.mark.parametrize(
    "text", ["devices: cuda:0,cuda:1", "devices: ['cuda:0', 'cuda:1']", "devices:\n- cuda:0\n- cuda:1"]
)
def test_devices_are_a_list_or_text_with_commas(text):
    write(".maniple.yaml", text)
    assert shown()["devices"] == ("cuda:0,cuda:1", ".maniple.yaml:1")


def test_hosts_are_a_list_too(monkeypatch):
    write("session.yaml", "script: a.py\nhosts: [node-1, node-2]")
    assert shown("session.yaml")["hosts"] == ("node-1,node-2", "session.yaml:2")
    monkeypatch.setenv("MANIPLE_HOSTS", "node-3")
    assert shown("session.yaml")["hosts"] == ("node-3", "MANIPLE_HOSTS")


def test_flag_of_a_file_is_taken_back_by_the_command_line():
    write(".maniple.yaml", "bind: false")
    assert shown()["bind"] == ("false", ".maniple.yaml:1")
    assert shown("--bind")["bind"] == ("true", "command line")


def test_arguments_are_split_as_a_shell_would_and_replaced_by_those_typed():
    write("session.yaml", "script: a.py\nargs: --lr 0.1 'a b'")
    assert shown("session.yaml")["args"] == ("--lr 0.1 'a b'", "session.yaml:2")
    write("session.yaml", "script: a.py\nargs: [--lr, 0.1, a b]")
    assert shown("session.yaml")["args"] == ("--lr 0.1 'a b'", "session.yaml:2")
    assert shown("session.yaml", "--lr", "5")["args"] == ("--lr 5", "command line")


def test_paths_in_a_file_begin_at_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    write("deep/session.yaml", "script: train.py\nruns: ../runs\ncertificate: /etc/c.pem\nkey: ~/k.pem\nlisten: '::1'")
    rows = shown("deep/session.yaml")
    assert rows["script"][0] == "deep/train.py"
    assert rows["runs"][0] == "deep/../runs"
    assert rows["certificate"][0] == "/etc/c.pem"
    assert rows["key"][0] == "/home/ada/k.pem"


def test_paths_in_variables_and_defaults_begin_where_the_command_is_called(monkeypatch):
    write("deep/session.yaml", "script: train.py")
    assert shown("deep/session.yaml")["runs"] == ("runs", "default")
    monkeypatch.setenv("MANIPLE_RUNS", "elsewhere")
    assert shown("deep/session.yaml")["runs"] == ("elsewhere", "MANIPLE_RUNS")


def test_pace_of_a_higher_level_sets_the_other_pace_aside(monkeypatch):
    write("session.yaml", "script: a.py\nevery: 5")
    rows = shown("--maximum-rate", "0.5", "session.yaml")
    assert (rows["every"], rows["maximum_rate"]) == (("-", "default"), ("0.5", "command line"))
    monkeypatch.setenv("MANIPLE_MAXIMUM_RATE", "0.25")
    rows = shown("session.yaml")
    assert (rows["every"][0], rows["maximum_rate"][0]) == ("-", "0.25")
    write(".maniple.yaml", "maximum_rate: 0.1")
    monkeypatch.delenv("MANIPLE_MAXIMUM_RATE")
    rows = shown("session.yaml")
    assert (rows["every"][0], rows["maximum_rate"][0]) == ("5", "-")


def test_two_paces_in_one_source_are_refused(monkeypatch):
    said = refusal("script: a.py\nevery: 5\nmaximum_rate: 0.5")
    assert "session.yaml:2 sets every, and session.yaml:3 maximum_rate" in said
    said = refusal("script: a.py\navg_freq: 5\nmaximum_rate: 0.5")
    assert "two paces" in said
    monkeypatch.setenv("MANIPLE_EVERY", "5")
    monkeypatch.setenv("MANIPLE_MAXIMUM_RATE", "0.5")
    with pytest.raises(InvalidArgument, match="MANIPLE_EVERY sets every, and MANIPLE_MAXIMUM_RATE"):
        shown()


def test_name_of_a_file_gives_way_when_a_run_is_resumed():
    write("session.yaml", "script: a.py\nname: mine")
    assert shown("--resume", "runs/last", "session.yaml")["name"] == ("-", "default")


def test_run_that_goes_on_keeps_its_rule_against_files_for_all_runs():
    write(".maniple.yaml", "rule: asgd\nevery: 3\nwire: int8\nseed: 5\nkeep: 9")
    rows = shown("--resume", "runs/last")
    assert [rows[key][1] for key in ("rule", "every", "wire", "seed")] == ["default"] * 4
    assert rows["keep"][0] == "9"
    write("session.yaml", "script: a.py\nrule: downpour")
    assert shown("--resume", "runs/last", "session.yaml")["rule"] == ("downpour", "session.yaml:2")


def test_encryption_for_all_runs_applies_to_those_that_listen():
    write(".maniple.yaml", "tls: true")
    assert shown()["tls"] == ("false", "default")
    assert shown("--listen", "0.0.0.0")["tls"] == ("true", ".maniple.yaml:1")
    assert shown("--hosts", "a,b")["tls"] == ("true", ".maniple.yaml:1")
    assert shown(command="serve")["tls"] == ("true", ".maniple.yaml:1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("script: a.py\nwrokers: 2", ["session.yaml:2", "no setting 'wrokers'", "Did you mean workers?"]),
        ("avg_frq: 2", ["session.yaml:1", "Did you mean avg_freq?"]),
        ("zzzz: 2", ["no setting 'zzzz'", "Keys are ", "workers"]),
        ("no_bind: true", ["no setting 'no_bind'", "Did you mean bind?"]),
        ("help: true", ["no setting 'help'"]),
        ("show_settings: true", ["no setting 'show_settings'"]),
        ("script: a.py\n\nworkers: two", ["session.yaml:3", "workers cannot be 'two'", "integer", "--workers"]),
        ("workers: 2.5", ["workers cannot be '2.5'", "integer"]),
        ("workers: true", ["workers cannot be 'true'", "integer"]),
        ("workers: [2, 3]", ["session.yaml:1: workers is a list of 2 values"]),
        ("workers: {a: 2}", ["workers holds more than a value"]),
        ("workers:", ["session.yaml:1: workers has no value"]),
        ("devices: [cpu, ]\nargs: [a, ~]", ["session.yaml:2: args has no value"]),
        ("tls: maybe", ["tls cannot be 'maybe'", "true or false"]),
        ("wire: float8", ["wire cannot be 'float8'", "bfloat16"]),
        ("maximum_rate: fast", ["maximum_rate cannot be 'fast'", "SHARE"]),
        ("workers: 2\nworkers: 3", ["session.yaml:2: workers is set in session.yaml:1 already"]),
        ("snapshot-every: 2\nsnapshot_every: 3", ["snapshot_every is set in session.yaml:1 already"]),
        ("script: a.py\n  workers: 2", ["session.yaml:2 is no YAML"]),
        ("script: 'a.py", ["session.yaml:1 is no YAML"]),
        ("script: a.py\n---\nscript: b.py", ["is no YAML", "single document"]),
        ("script: \x00", ["is no YAML"]),
        ("- a\n- b", ["session.yaml has no keys"]),
        ("", ["session.yaml names no script"]),
        ("workers: 2", ["session.yaml names no script", "script: train.py"]),
        ("script: [a.py, b.py]", ["script is a list"]),
        ("script: a.py\nargs: \"it's\"", ["session.yaml:2: args", "No closing quotation"]),
        ("script: a.py\nsync_start: perhaps", ["session.yaml:2: sync_start cannot be 'perhaps'"]),
        ("rule: asgd\nsync_rule: EASGD", ["session.yaml:2: sync_rule is another word for rule", "session.yaml:1"]),
        ("every: 2\navg-freq: 2", ["avg_freq is another word for every"]),
        ("!!python/object/apply:os.system ['touch hacked']", ["session.yaml has no keys"]),
    ],
)  # fmt: skip
def test_mistake_in_a_file_is_named_with_its_line(text, words):
    said = refusal(text)
    for word in words:
        assert word in said
    assert not Path("hacked").exists()


def test_mistake_is_named_also_if_the_command_line_counts_more():
    assert "workers cannot be 'two'" in refusal("script: a.py\nworkers: two", "-n", "2", "session.yaml")


def test_wrong_variable_is_named(monkeypatch):
    monkeypatch.setenv("MANIPLE_WORKERS", "two")
    with pytest.raises(InvalidArgument, match="MANIPLE_WORKERS: workers cannot be 'two'"):
        shown()


def test_missing_session_file_names_the_closest_one():
    write("session.yaml", "script: a.py")
    with pytest.raises(InvalidArgument, match=r"no session file 'sesion\.yml'.*Did you mean 'session\.yaml'\?"):
        shown("sesion.yml")
    Path("folder.yaml").mkdir()
    with pytest.raises(InvalidArgument, match=r"'folder\.yaml' cannot be read: Is a directory"):
        shown("folder.yaml")


@pytest.mark.parametrize("key", ["script: a.py", "args: x", "sync_start: true"])
@pytest.mark.parametrize("path", [".maniple.yaml", "personal/maniple.yaml"])
def test_file_for_all_runs_has_no_script(path, key):
    said = refusal(key, "train.py", path=path)
    assert f"{path}:1" in said
    assert "session file" in said


def test_value_out_of_range_tells_where_it_stands():
    write("train.py", "")
    write("session.yaml", "script: train.py\nrestarts: -1\nrule: eagsd")
    with pytest.raises(InvalidArgument, match=r"no rule 'eagsd'.*\(rule is 'eagsd' by session\.yaml:3\)"):
        call(cli, "run", "session.yaml")
    with pytest.raises(InvalidArgument, match=r"--restarts -1 .*\(restarts is '-1' by session\.yaml:2\)"):
        call(cli, "run", "--rule", "easgd", "session.yaml")


def test_words_of_older_systems_are_translated_and_reported():
    write("session.yaml", "script: a.py\nsync_rule: EASGD\navg_freq: 2\nsync_start: true")
    said = call(cli, "run", "--show-settings", "session.yaml")
    assert "session.yaml:2: sync_rule is read as rule: EASGD" in said
    assert "session.yaml:3: avg_freq is read as every: 2" in said
    assert "session.yaml:4: sync_start: the workers start with their host, as always" in said
    assert "maniple:" not in call(cli, "run", "-q", "--show-settings", "session.yaml")
    rows = shown("session.yaml")
    assert (rows["rule"], rows["every"]) == (("EASGD", "session.yaml:2"), ("2", "session.yaml:3"))


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("sync_rule: BSP\navg_freq: 2", "localsgd:k=2"),
        ("rule: bsp\navg_freq: 2", "localsgd:k=2"),
        ("sync_rule: bsp:norm=local\navg_freq: 3", "bsp:average=parameters,every=3,norm=local"),
    ],
)
def test_bsp_with_an_avg_freq_averages_parameters_every_so_many_steps(words, rule):
    write("session.yaml", f"script: a.py\n{words}")
    rows = shown("session.yaml")
    assert (rows["rule"][0], rows["every"][0]) == (rule, "-")
    meant = parse_rule(rows["rule"][0])
    assert meant.is_synchronous and not meant.averages_gradients and meant.every == int(words[-1])
    said = call(cli, "run", "--show-settings", "session.yaml")
    assert f"averages parameters every {words[-1]} steps: it is read as rule: {rule}" in said


def test_bsp_with_an_avg_freq_of_1_averages_gradients_at_each_step():
    write("session.yaml", "script: a.py\nsync_rule: BSP\navg_freq: 1")
    rows = shown("session.yaml")
    assert (rows["rule"][0], rows["every"][0]) == ("BSP", "1")


def test_rule_of_older_systems_that_is_not_there_gives_the_ordinary_error():
    write("a.py", "")
    write("session.yaml", "script: a.py\nsync_rule: GOSGD")
    with pytest.raises(InvalidArgument, match=r"no rule 'GOSGD' \(rules: easgd"):
        call(cli, "run", "session.yaml")


def test_host_that_starts_alone_listens_somewhere():
    write("session.yaml", "script: a.py\nsync_start: false")
    assert shown("session.yaml")["listen"] == ("127.0.0.1:0", "session.yaml:2")
    write(".maniple.yaml", "tls: true")
    write("personal/maniple.yaml", "listen: 0.0.0.0:7")
    rows = shown("session.yaml")
    assert rows["listen"][0] == "0.0.0.0:7" and rows["listen"][1].endswith("personal/maniple.yaml:1")
    assert rows["tls"] == ("true", ".maniple.yaml:1")
    assert "script" not in rows
    with pytest.raises(InvalidArgument, match="starts no workers, but --workers 4"):
        shown("-n", "4", "session.yaml")


def test_one_file_serves_a_host_alone_too():
    write("session.yaml", "script: a.py\nargs: x\nworkers: 3\nseed: 5\nsync_start: true")
    rows = shown("session.yaml", command="serve")
    assert rows["seed"] == ("5", "session.yaml:4")
    assert not {"script", "workers"} & rows.keys()
    assert "'train.py' is no session file" in refusal("", "train.py", command="serve")


DOORS = [
    ("controller", "early.py:Early"), ("feed", "produce.py"), ("hosts", "node-1"), ("listen", "0.0.0.0:29400"),
    ("web_listen", "0.0.0.0"), ("web", "true"), ("model", "net.py:Net"), ("resume", "runs/x"), ("runs", "/srv/x"),
    ("certificate", "c.pem"), ("key", "k.pem"), ("tls", "false"), ("collectives", "torch"), ("max_memory", "1e6"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), DOORS)
def test_file_that_nobody_has_named_opens_no_door(key, value, monkeypatch):
    said = refusal(f"keep: 2\n{key}: {value}", "train.py", path=".maniple.yaml")
    assert said.startswith(f".maniple.yaml:2: {key} ")
    assert f"--{key.replace('_', '-')}" in said and "session.yaml" in said and "personal/maniple.yaml" in said
    Path(".maniple.yaml").unlink()
    write("personal/maniple.yaml", f"{key}: {value}")
    shown("train.py") if key not in {"resume", "tls"} else None
    Path("personal/maniple.yaml").unlink()
    write("session.yaml", f"{'' if key == 'model' else 'script: train.py'}\n{key}: {value}")
    assert shown("session.yaml")[key][1] == "session.yaml:2"


@pytest.mark.parametrize(
    ("key", "value"), [("sbatch", "--wrap=x"), ("host_sbatch", "--wrap=x"), ("ray_address", "x:1")]
)
def test_file_that_nobody_has_named_gives_no_options_to_a_queue(key, value):
    assert f"{key} runs code" in refusal(f"{key}: {value}", "train.py", path=".maniple.yaml", command="submit")


def test_every_option_is_judged_before_a_found_file_may_set_it():
    known = {
        key for command in cli.commands.values() if isinstance(command, SettingsCommand) for key in option_keys(command)
    }
    assert known == all_settings().keys(), "every option is declared"
    refused = {key for key, one in all_settings().items() if not one.folder}
    assert refused == {
        "baseline", "certificate", "collectives", "controller", "feed", "from", "host_job", "host_sbatch", "hosts",
        "key", "listen",
        "max_memory", "model", "ray", "ray_address", "resume", "runs", "sbatch", "slurm", "web", "web_listen",
    }  # fmt: skip


def test_control_characters_of_a_file_are_refused_with_their_line():
    said = refusal('script: a.py\nname: "a\\nb"')
    assert said.startswith("session.yaml:2: name 'a\\nb' holds the control character")
    write("session.yaml", 'script: a.py\nargs: ["a\\nb"]')
    assert shown("session.yaml")  # the script's own


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_found_file_that_others_can_write_is_ignored_with_a_warning(mode):
    write(".maniple.yaml", "keep: 9\ncontroller: evil.py:Evil")
    Path(".maniple.yaml").chmod(mode)
    assert shown("train.py")["keep"][1] == "default"
    said = call(cli, "run", "--show-settings", "train.py")
    assert f"maniple: .maniple.yaml is ignored: others can write it (mode {mode:04o})" in said and "chmod go-w" in said


def test_found_file_of_another_user_is_ignored_with_a_warning():
    require("root", os.geteuid() == 0, "giving a file away needs root")
    write(".maniple.yaml", "keep: 9")
    os.chown(".maniple.yaml", 65534, 65534)
    assert shown("train.py")["keep"][1] == "default"
    assert "is ignored: it belongs to user 65534" in call(cli, "run", "--show-settings", "train.py")


def test_help_needs_no_good_file():
    write(".maniple.yaml", "wrokers: 1")
    assert "session.yaml" in call(cli, "run", "--help")
    assert "SESSION" in call(cli, "serve", "--help")


def test_option_that_is_added_later_works_from_everywhere(monkeypatch):
    @click.command(cls=SettingsCommand, context_settings={"allow_interspersed_args": False})
    @click.option("--feed", multiple=True, type=click.Path(path_type=Path))
    @click.option("--hosts", metavar="LIST", default="")
    @click.option("--controller", metavar="FILE.py:CLASS")
    @click.option("--max-batches", "batches", type=int, default=7)
    @click.option("-q", "--quiet", is_flag=True)
    @click.argument("script")
    @click.argument("args", nargs=-1)
    def later(**options) -> None:
        click.echo(sorted((name, value) for name, value in options.items() if name in {"feed", "hosts", "batches"}))
        click.echo(options["controller"] or "", nl=False)

    write("in/session.yaml", "script: a.py\nfeed: [one.py, two.py]\nhosts: [a, b]\nmax_batches: 9")
    files = "('feed', (PosixPath('in/one.py'), PosixPath('in/two.py'))), ('hosts', 'a,b')"
    assert call(later, "in/session.yaml") == f"[('batches', 9), {files}]\n"
    monkeypatch.setenv("MANIPLE_MAX_BATCHES", "11")
    monkeypatch.setenv("MANIPLE_FEED", "x.py:y.py")
    variables = "('feed', (PosixPath('x.py'), PosixPath('y.py'))), ('hosts', 'a,b')"
    assert call(later, "in/session.yaml") == f"[('batches', 11), {variables}]\n"
    assert "('feed', (PosixPath('z.py'),))" in call(later, "--feed", "z.py", "in/session.yaml")
    monkeypatch.delenv("MANIPLE_FEED")
    write("in/session.yaml", "script: a.py\ncontroller: mine.py:Mine")
    assert call(later, "in/session.yaml").endswith("in/mine.py:Mine")
    write("in/session.yaml", "script: a.py\nfeed: one.py")
    assert "('feed', (PosixPath('in/one.py'),))" in call(later, "in/session.yaml")


def test_a_producer_s_script_begins_at_the_folder_of_its_file_too(monkeypatch):
    write("exp/session.yaml", "script: train.py\nfeed: ['produce.py --size 64', valid.py]")
    assert shown("exp/session.yaml")["feed"][0] == "'exp/produce.py --size 64' exp/valid.py"
    write("exp/session.yaml", "script: train.py")
    monkeypatch.setenv("MANIPLE_FEED", "produce.py --size 64")
    assert shown("exp/session.yaml")["feed"][0] == "'produce.py --size 64'"


def test_a_home_that_is_nobody_s_is_named_with_its_line():
    assert "session.yaml:2: '~nobody-of-this-name/x'" in refusal("script: a.py\nruns: ~nobody-of-this-name/x")


def test_a_session_file_can_hold_all_of_a_submission(tmp_path, monkeypatch):
    write("train.py", "")
    write(
        "session.yaml",
        """
        script: train.py
        args: --lr 0.1
        slurm: true
        instances: 8
        max_simultaneous: 3
        allocation: jvb-000-ag
        walltime: 3:00:00
        gpus_per_worker: 1
        sbatch: [--qos=high, -C a100]
        host_job: true
        rule: downpour
        name: run
        """,
    )
    monkeypatch.setenv("MANIPLE_PARTITION", "gpu")
    text = call(cli, "submit", "--dry-run", "--walltime", "1:00:00", "session.yaml")
    assert f"# {tmp_path}/runs/run/host.sbatch" in text
    for option in (
        "--array=0-7%3", "--account=jvb-000-ag", "--time=1:00:00", "--gres=gpu:1", "--qos=high", "-C a100",
        "--partition=gpu",
    ):  # fmt: skip
        assert f"\n#SBATCH {option}\n" in text
    assert text.rstrip().endswith(f"{tmp_path}/runs/run {tmp_path}/train.py --lr 0.1")
    assert not Path("runs").exists(), "nothing is begun"
    assert shown("session.yaml")["rule"] == ("downpour", "session.yaml:12"), "the same file runs here too"


def test_every_setting_explains_itself_in_a_group_of_the_help():
    for key, one in all_settings().items():
        assert one.help and one.group in GROUPS, key
        assert set(one.commands) <= {"run", "serve", "submit", "host"}, key
    text = call(cli, "run", "--help")
    assert all(f"\n{group}:\n" in text for group in GROUPS if group != "Queue")


def test_help_cuts_no_description_off():
    text = call(cli, "--help")
    assert "..." not in text.split("Options:")[1]
    for command in cli.commands.values():
        assert command.hidden or f"  {command.short_help}\n" in text


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (Limits(patience=-1), r"--patience -1 is out of range \(0 to 1e\+15\)"),
        (RunSettings(host_deadline_s=0.0), r"--host-deadline 0 is out of range \(above 0\). Write --host-deadline 600"),
        (RunSettings(keep=0), r"--keep 0 is out of range \(1 or more\)"),
        (RunSettings(limits=Limits(total_duration=float("nan"))), "--total-duration nan"),
        (RunSettings(max_memory_mb=float("inf")), "--max-memory inf"),
        (RunSettings(controller_args=("a\nb",)), "--controller-arg 'a.nb' holds the control character"),
    ],
)
def test_value_out_of_range_names_its_option(values, words):
    with pytest.raises(InvalidArgument, match=words):
        check_settings(values)


def test_a_worker_that_joins_has_the_settings_of_its_host():
    host = Environment(
        rule="easgd", pace="every:5", seed=7, host_deadline_s=9.0, limits=Limits(max_epochs=3, patience=2)
    )
    worker = with_joining_settings(Environment(limits=Limits(patience=5)), joining_settings(host))
    assert (worker.rule, worker.pace, worker.seed, worker.wire) == ("easgd", "every:5", 7, None)
    assert worker.host_deadline_s == 9.0
    assert worker.limits == Limits(max_epochs=3, patience=5), "a limit that the controller checks is not sent"
    with pytest.raises(BadFrame, match="the host sent seed='x'"):
        with_joining_settings(Environment(), {"seed": "x"})
    assert with_joining_settings(Environment(), {"rank": 5, "unknown": 1}) == Environment()
