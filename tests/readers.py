"""All that reads the rows of a run folder, called one after the other."""

import contextlib
import tempfile
import warnings
from pathlib import Path

import msgspec

from maniple.cli.reports import table
from maniple.doctor import run_folder as doctor
from maniple.doctor.checks import Case
from maniple.errors import InvalidArgument
from maniple.launch.external_workers import ExternalWorkersMonitor
from maniple.launch.terminal import RunMonitor, as_numbers, live_table, plain_lines
from maniple.model.loop import finished_epochs, newest_checkpoint
from maniple.monitor.target import parse_target
from maniple.record import RunFolder
from maniple.record.times import read_times
from maniple.watch.compare import cells, differences, resolve_target, summarize
from maniple.watch.exports import Exporting, open_export
from maniple.watch.prometheus import metrics_text
from maniple.watch.report import contents
from maniple.watch.run_reader import open_runs
from maniple.watch.updates import Updates


def read_all(run: Path) -> RunMonitor:
    """Read the rows of `run` by every reader. Errors that tell a person what is missing are allowed, others raise."""
    folder = RunFolder(run)
    board = RunMonitor(folder, 0)  # run, status
    board.set_target(parse_target("loss=0.5"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        board.refresh()
        board.summary()
        board.result()
        plain_lines(board.workers, board.totals())
        live_table(board.workers, board.totals(), height=50)
        msgspec.json.encode(as_numbers(board.workers, board.totals()))
        Updates().next(board, {})  # watch
        metrics_text(board, "run")
        with contextlib.suppress(InvalidArgument):  # there are no rows yet
            _compare(run)
        with contextlib.suppress(InvalidArgument):  # it was no model's
            table(read_times(run))
    with tempfile.TemporaryDirectory() as environment:
        export = open_export("csv", "run", environment)
        Exporting(run, export).advance()
        export.close()
    newest_checkpoint(run)
    finished_epochs(run)
    _examine(run)
    for rank in folder.ranks():
        ExternalWorkersMonitor._failure(_Vigil(folder), rank)
    return board


def _compare(run: Path) -> None:
    """compare, plot"""
    runs = open_runs([run], "loss")
    target = resolve_target(runs, parse_target("loss=0.5"))
    for one in summarize(runs, "loss", target=target):
        cells(one, "loss", target)
        msgspec.json.encode(one.as_row())
    differences(runs)
    msgspec.json.encode(contents(runs, "loss", target=target), enc_hook=str)


def _examine(run: Path) -> None:
    case = Case(host=str(run))
    for look in (
        doctor.check_folder,
        doctor.check_host_process,
        doctor.check_models,
        doctor.check_disk_space,
        doctor.check_losses,
    ):
        list(look(case))


class _Vigil(ExternalWorkersMonitor):
    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
