"""The arithmetic and the page of `make reproduce`."""

import importlib.util
import math
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "reproduce"


@pytest.fixture
def reproduce(monkeypatch) -> ModuleType:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("reproduce_main", FOLDER / "__main__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_target_is_reached_by_the_median_of_three_values_not_by_one_lucky_one(reproduce):
    values = [0.1, 0.5, 0.95, 0.6, 0.7, 0.9, 0.92]
    curve = [[float(i), 100 * i, value] for i, value in enumerate(values)]
    found = reproduce.time_to_target(curve, "accuracy", 0.8)
    # The medians are 0.3 (of two), 0.5, 0.6, 0.7, 0.7, 0.9, 0.91 (of two).
    assert found["to_target_s"] == pytest.approx(4.5)
    assert found["to_target_samples"] == 450
    assert found["final"] == 0.92


def test_loss_is_reached_from_above_and_may_not_be_reached(reproduce):
    curve = [[0.0, 0, 3.0], [1.0, 10, 2.0], [2.0, 20, 1.0], [3.0, 30, 0.9]]
    assert reproduce.time_to_target(curve, "loss", 0.5)["to_target_s"] is None
    assert 1.0 < reproduce.time_to_target(curve, "loss", 1.5)["to_target_s"] < 2.0


UNTUNED = {"lr": 1.0, "split": None, "every": None, "alpha": None, "unbound": None}


def run_of(contestant: str, seconds: float | None, seed: int = 0, setting: dict | None = None) -> dict:
    curve = [[0.0, 0, 0.1], [10.0, 100, 0.95]]
    return {
        "task": "digits", "contestant": contestant, "workers": 2, "setting": setting or UNTUNED, "seed": seed,
        "data": "", "place": "", "curve": curve, "metric": "accuracy", "target": 0.9, "to_target_s": seconds,
        "to_target_samples": 90, "final": 0.95,
    }  # fmt: skip


def test_cases_that_do_not_pay_come_first_on_the_page(reproduce):
    import grid_tables as grid  # pyright: ignore[reportMissingImports]
    import report  # pyright: ignore[reportMissingImports]

    runs = [run_of("1 process", 10.0, seed) for seed in range(3)]
    runs += [run_of("1 process, all cores", 8.0), run_of("DDP", 6.0), run_of("bsp", 4.0)]
    runs += [run_of("easgd", 7.6), run_of("asgd", None), run_of("bsp", 99.0, seed=grid.TUNING_SEED)]
    page = report.page_of({str(i): run for i, run in enumerate(runs)}, {})
    losses = page[page.index("does not pay") : page.index("## In short")]
    assert "digits, easgd**: 0.95" in losses  # against the better single process
    assert "digits, asgd**: the target was not reached" in losses
    assert "bsp" not in losses
    assert "| bsp | lr x 1 | 4.0 | 0.40 | 0.50 | 0.67 |" in page
    assert len(report.rows_of(runs)["digits"]["1 process"].runs) == 3
    assert "Tasks that were not measured: images" in page
    assert "Rules that were not measured: `localsgd`, `downpour`" in page
    assert tuple(reproduce.PERIODS) == report.RULES


def test_tuned_and_untuned_runs_of_a_rule_are_in_different_tables(reproduce):
    import report  # pyright: ignore[reportMissingImports]

    doubled = UNTUNED | {"lr": 2.0}
    runs = [run_of("1 process", 10.0), run_of("bsp", 8.0), run_of("bsp", 5.0, setting=doubled), run_of("asgd", 6.0)]
    page = report.page_of({str(i): run for i, run in enumerate(runs)}, {"digits": {"bsp": doubled}})
    tuned, untuned = page[page.index("Every contestant tuned") :].split("Rules untuned", 1)
    assert "| bsp | 0.50 |" in tuned
    assert "| bsp | 0.80 |" in untuned[: untuned.index("## digits")]
    assert "| asgd | 0.60 |" in tuned and "asgd" not in untuned[: untuned.index("## digits")]
    assert "| bsp | lr x 2 | 5.0 |" in untuned and "| bsp | lr x 1 | 8.0 |" in untuned


def test_four_workers_have_a_row_and_settings_of_their_own(reproduce):
    import report  # pyright: ignore[reportMissingImports]

    halved = UNTUNED | {"lr": 0.5}
    four = run_of("bsp", 7.5, setting=halved) | {"workers": 4}
    runs = [run_of("1 process", 10.0), four, run_of("bsp", 5.0), run_of("DDP", 9.9) | {"workers": 4}]
    page = report.page_of({str(i): run for i, run in enumerate(runs)}, {"digits": {"bsp, 4 workers": halved}})
    assert "| bsp | lr x 1 | 5.0 |" in page and "| bsp, 4 workers | lr x 0.5 | 7.5 |" in page
    assert "| bsp | 0.50 |" in page and "| bsp, 4 workers | 0.75 |" in page
    assert "DDP, 4 workers**" not in page, "what does not pay are rules"
    case = reproduce.Case("digits", "bsp", 4, reproduce.Setting(), 0)
    assert case.label == "bsp, 4 workers"


def test_learning_rates_and_batches_are_compared_by_the_samples_to_the_target(reproduce):
    import grid_tables as grid  # pyright: ignore[reportMissingImports]

    def tried(contestant: str, lr: float, samples: int | None, *, split: bool | None = None) -> dict:
        setting = UNTUNED | {"lr": lr, "split": split}
        return run_of(contestant, 1.0, grid.TUNING_SEED, setting) | {"to_target_samples": samples}

    runs = [tried("1 process", 0.5, 200), tried("1 process", 1.0, 100), tried("bsp", 1.0, 150), tried("bsp", 2.0, 110)]
    runs += [tried("bsp", 0.5, None), tried("bsp", 1.0, 105, split=True)]
    runs += [run_of("bsp", 5.0), tried("bsp", 1.0, 1) | {"setting": UNTUNED | {"every": 3}}]
    page = "\n".join(grid.learning_rates(runs))
    assert "| 1 process | 2.00 | 1.00 |  |  |  |  |  |" in page
    assert "| bsp | - | 1.50 | 1.10 |  |  | 1.05 |  |" in page


def test_periods_are_compared_at_the_chosen_learning_rate(reproduce):
    import grid_tables as grid  # pyright: ignore[reportMissingImports]

    best = UNTUNED | {"lr": 2.0, "every": 30}
    tried = [(UNTUNED, 9.0), (UNTUNED | {"lr": 2.0}, 8.0), (UNTUNED | {"lr": 2.0, "every": 3}, None), (best, 4.0)]
    tried += [(best | {"alpha": "0.2"}, 5.0)]
    runs = [run_of("easgd", seconds, grid.TUNING_SEED, setting) for setting, seconds in tried]
    page = "\n".join(grid.periods(runs, {"digits": {"easgd": best}}))
    assert "| digits | easgd | - |  | 0.50 | 1.25 |" in page
    runs[1]["to_target_s"] = None  # the default
    assert "| digits | easgd | - | - | 4.0 s | 1.25 |" in "\n".join(grid.periods(runs, {"digits": {"easgd": best}}))


def test_final_quality_is_shown_against_the_length_of_the_run(reproduce):
    import grid_tables as grid  # pyright: ignore[reportMissingImports]

    def ended(contestant: str, final: float, epochs: int | None = None) -> dict:
        return run_of(contestant, 5.0) | {"epochs": epochs, "final": final}

    runs = [ended("1 process", 0.95), ended("easgd", 0.93), ended("1 process", 0.9, 3), ended("easgd", 0.7, 3)]
    runs += [ended("easgd", 0.1) | {"setting": UNTUNED | {"lr": 2.0}}, ended("easgd", 0.96, 48), ended("DDP", 0.1, 3)]
    page = "\n".join(grid.lengths(runs, {"digits": {"1 process": UNTUNED, "easgd": UNTUNED}}))
    three, usual, long = page.splitlines()[-3:]
    assert three == "| digits | 3 | 90.0% |  | 70.0% |"
    assert usual == "| digits | **12** | 95.0% |  | 93.0% |"
    assert long == "| digits | 48 |  |  | 96.0% |"


def test_default_rule_is_compared_with_all_cores_and_ddp_and_the_difference_explained(reproduce):
    import report  # pyright: ignore[reportMissingImports]

    fast = {"curve": [[0.0, 0, 0.1], [4.0, 100, 0.95]], "to_target_samples": 99}
    runs = [run_of("1 process", 10.0), run_of("1 process, all cores", 8.0), run_of("DDP", 6.0)]
    page = report.page_of({str(i): run for i, run in enumerate([*runs, run_of("bsp", 3.0) | fast])}, {})
    # 100 samples in 4 s instead of 10: 2.5 times the speed, 1.25 times that of two processes; 99 samples instead of 90.
    assert "| digits | 0.38 | 0.38 | 0.50 | 0.50 | 2.50 | 1.25 | 1.10 | 95.0% | 95.0% |" in page


def test_grid_is_extended_while_the_best_learning_rate_is_at_its_edge(reproduce, tmp_path):
    best_at = {"1 process": 0.125, "1 process, batch x 2": 2.0, "bsp": 4.0, "DDP": 1.0, "easgd": 1.0}
    tried: dict[str, list[tuple]] = {}

    def measured(case):
        tried.setdefault(case.contestant, []).append((case.setting.lr, case.setting.split, case.setting.unbound))
        miss = abs(math.log2(case.setting.lr / best_at[case.contestant])) + bool(case.setting.split)
        run = {**asdict(case), "curve": [[0.0, 0, 0.0], [1.0, 100, 0.9]], "metric": "accuracy", "final": 0.9}
        results.runs[case.key] = run | {"to_target_samples": 1000 * (1 + miss) - 10 * bool(case.setting.unbound)}
        return results.runs[case.key]

    results = reproduce.Results(tmp_path / "results.json")
    runner = reproduce.Runner(results)
    runner.run = measured
    chosen = {
        name: runner.tuned(
            reproduce.Case("digits", name, 1 if reproduce.is_single(name) else 2, reproduce.Setting(), 0)
        )
        for name in best_at
    }
    assert {name: setting.lr for name, setting in chosen.items()} == best_at
    assert [lr for lr, _, _ in dict.fromkeys(tried["1 process"])] == [0.5, 1.0, 2.0, 0.25, 0.125], "1/16 is too far"
    assert [lr for lr, _, _ in dict.fromkeys(tried["1 process, batch x 2"])] == [1.0, 2.0, 4.0]
    assert chosen["DDP"].unbound and not chosen["bsp"].unbound
    tried.clear()
    like_bsp = runner.tuned(reproduce.Case("digits", "DDP", 2, reproduce.Setting(), 0), chosen["bsp"])
    assert tried == {"DDP": [(4.0, None, None), (4.0, None, True)]} and like_bsp.lr == 4.0


def test_rows_that_are_faster_than_the_machine_are_doubted(reproduce):
    import report  # pyright: ignore[reportMissingImports]

    faster = {"curve": [[0.0, 0, 0.1], [4.0, 100, 0.95]]}  # 25 samples/s, where one process makes 10
    runs = [run_of("1 process", 10.0), run_of("bsp", 4.0) | faster, run_of("easgd", 5.0)]
    page = report.page_of({str(i): run for i, run in enumerate(runs)}, {})
    doubts = page[page.index("Not measured together") : page.index("Rules untuned")]
    assert "digits, bsp: 25 samples/s, where one process makes 10" in doubts and "easgd" not in doubts


def test_a_larger_batch_that_pays_more_than_a_second_worker_comes_first(reproduce):
    import report  # pyright: ignore[reportMissingImports]

    runs = [run_of("1 process", 10.0), run_of("1 process, batch x 2", 4.0), run_of("bsp", 5.0)]
    page = report.page_of({str(i): run for i, run in enumerate(runs)}, {})
    assert "- **digits, 1 process, batch x 2**, without workers: 0.40; `bsp`: 0.50." in page
    assert page.index("without workers") < page.index("## In short")


def test_results_are_complete_after_each_run_and_read_again(reproduce, tmp_path):
    path = tmp_path / "made" / "results.json"
    results = reproduce.Results(path)
    for seed in (0, 1):
        case = reproduce.Case("digits", "bsp", 2, reproduce.Setting(lr=2.0), seed)
        results.add(case, {"curve": [[0.0, 0, 0.1]], "final": 0.1})
        again = reproduce.Results(path)
        assert again.runs == results.runs and len(again.runs) == seed + 1


def test_files_are_trained_with_the_settings_that_were_chosen_for_generated_data(reproduce, tmp_path):
    (tmp_path / "imdb.npz").touch()
    results = reproduce.Results(tmp_path / "results.json")
    results.chosen["reviews"] = {"bsp": {"lr": 2.0, "split": None, "every": None, "alpha": None, "unbound": None}}
    cases = []
    runner = SimpleNamespace(results=results, run=cases.append)
    options = {"tasks": ["reviews"], "contestants": ["bsp", "easgd"], "workers": 2, "data": tmp_path}
    reproduce.play(runner, Namespace(full=False, seeds=1, **options))
    assert [(case.contestant, case.setting.lr, Path(case.data).name) for case in cases] == [
        ("bsp", 2.0, "imdb.npz"),
        ("easgd", 1.0, "imdb.npz"),
    ]


def test_quality_below_that_of_every_seed_of_one_process_is_marked(reproduce):
    import report  # pyright: ignore[reportMissingImports]

    runs = [run_of("1 process", 10.0, seed) | {"final": 0.95 + seed / 100} for seed in range(3)]
    runs += [run_of("bsp", 5.0) | {"final": 0.955}, run_of("easgd", 5.0) | {"final": 0.949}]
    page = report.page_of({str(i): run for i, run in enumerate(runs)}, {})
    assert "| bsp | 0.50 |" in page and "| easgd | 0.50* |" in page


def test_slow_workers_and_networks_have_tables_of_their_own(reproduce):
    import report  # pyright: ignore[reportMissingImports]

    runs = [run_of("1 process", 10.0), run_of("bsp", 5.0), run_of("bsp", 9.0) | {"place": "unequal"}]
    page = report.page_of({str(i): run for i, run in enumerate(runs)}, {})
    assert "| bsp | lr x 1, not tuned | 9.0 | 0.90 |" in page[page.index("half as fast") :]
    assert "network" not in page


def test_pictures_show_every_task(reproduce, tmp_path):
    pytest.importorskip("matplotlib")
    import report  # pyright: ignore[reportMissingImports]

    rows = report.rows_of([run_of("1 process", 10.0, seed) for seed in range(2)])["digits"]
    report.draw(rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("contestant", ["1 process", "DDP", "easgd:sync=true"])
def test_commands_say_what_a_case_is(reproduce, contestant, tmp_path):
    setting = reproduce.Setting(lr=2.0, every=3, alpha="0.2")
    case = reproduce.Case("digits", contestant, 2, setting, 5)
    commands, variables = reproduce.command_of(case, tmp_path / "out", tmp_path)
    assert len(commands) == len(variables) == (2 if contestant == "DDP" else 1)
    words = " ".join(commands[0])
    assert "--lr 2.0" in words and "--seed 5" in words
    if contestant.startswith("easgd"):
        assert "--rule easgd:sync=true,alpha=0.2" in words and "--every 3" in words


def test_workers_on_machines_of_their_own_get_the_rule_by_variables(reproduce, tmp_path):
    case = reproduce.Case("digits", "easgd", 2, reproduce.Setting(every=3), 5, place="network")
    commands, variables = reproduce.command_of(case, tmp_path / "out", tmp_path, "10.78.0.1")
    assert len(commands) == 2 and [own["RANK"] for own in variables] == ["0", "1"]
    assert variables[1]["MANIPLE_RULE"] == "easgd" and variables[1]["MANIPLE_PACE"] == "every:3"
    assert variables[1]["MASTER_ADDR"] == "10.78.0.1"


def test_tables_of_earlier_systems_have_their_numbers_beside_ours(reproduce):
    from earlier_tables import earlier_tables  # pyright: ignore[reportMissingImports]

    def timed(task: str, contestant: str, workers: int, seconds: float, every: int | None = None) -> dict:
        setting = UNTUNED | {"every": every}
        return run_of(contestant, 1.0, setting=setting) | {
            "task": task, "workers": workers, "epochs": 1, "seconds": seconds
        }  # fmt: skip

    runs = [timed("reviews", "1 process", 1, 4.0), timed("vgg", "1 process", 1, 9.0)]
    runs += [timed("reviews", "easgd", 2, 2.0, every=10), timed("reviews", "easgd", 2, 9.0, every=3)]  # of --lengths
    runs = {str(i): run for i, run in enumerate(runs)} | {
        "pool": {"task": "pool", "rows": [{"batch": 64, "one": 1000.0, "pool": 1500.0, "speed-up": 1.5}]}
    }
    page = "\n".join(earlier_tables(runs))
    assert "| ours, speed-up | 1.00 |  | 2.00 |  |  |" in page
    assert "| vgg | 9.0 |  |  |  |  | 410.3 | 216.0 | 113.8 |" in page
    assert "| 64 | 1,000 | 1,500 | 1.50 |" in page


def test_contestant_that_diverges_is_said_to_and_ends_nothing(reproduce, tmp_path):
    import report  # pyright: ignore[reportMissingImports]

    assert reproduce.time_to_target([], "", 0)["final"] is None
    diverged = run_of("easgd", None) | {"curve": [], "final": None}
    rows = report.rows_of([run_of("1 process", 10.0), diverged])["digits"]
    assert report.cells(rows["easgd"], rows)[2] == "diverged"
    report.draw(rows, tmp_path / "curves.png")
