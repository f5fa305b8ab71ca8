"""All that reads the rows of a run folder, called one after the other."""

import contextlib
import tempfile
import warnings
from pathlib import Path

import msgspec

from maniple.cli.record import table
from maniple.doctor import run as doctor
from maniple.doctor.case import Case
from maniple.errors import InvalidArgument
from maniple.launch.board import Board
from maniple.launch.guests import Vigil
from maniple.launch.table import as_numbers, live_table, plain_lines
from maniple.model import history
from maniple.record import Folder
from maniple.record.times import read_times
from maniple.watch.compare import cells, differences, settle_target, summarize
from maniple.watch.exporting import Exporting
from maniple.watch.exports import open_export
from maniple.watch.metrics import metrics_text
from maniple.watch.news import News
from maniple.watch.report import contents
from maniple.watch.runs import open_runs


def read_all(run: Path) -> Board:
    """Read the rows of `run` by every reader. Errors that tell a person what is missing are allowed, others raise."""
    folder = Folder(run)
    board = Board(folder, 0)  # run, status
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        board.refresh()
        board.summary()
        plain_lines(board.standings, board.totals)
        live_table(board.standings, board.totals, height=50)
        msgspec.json.encode(as_numbers(board.standings, board.totals))
        News().tell(board._story, {})  # watch
        metrics_text(board._story, "run")
        with contextlib.suppress(InvalidArgument):  # there are no rows yet
            _compare(run)
        with contextlib.suppress(InvalidArgument):  # it was no model's
            table(read_times(run))
    with tempfile.TemporaryDirectory() as place:
        export = open_export("csv", "run", place)
        Exporting(run, export).go_on()
        export.close()
    history.newest(run)
    history.made(run)
    _examine(run)
    for rank in folder.ranks():
        Vigil._failure(_Vigil(folder), rank)
    return board


def _compare(run: Path) -> None:
    """compare, plot"""
    runs = open_runs([run], "loss")
    target = settle_target(runs, "loss", 0.5, None)
    for one in summarize(runs, "loss", target=target):
        cells(one, "loss", target)
        msgspec.json.encode(one.as_row())
    differences(runs)
    msgspec.json.encode(contents(runs, "loss"), enc_hook=str)


def _examine(run: Path) -> None:
    case = Case(host=str(run))
    for look in (
        doctor.look_at_folder,
        doctor.look_at_life,
        doctor.look_at_models,
        doctor.look_at_room,
        doctor.look_at_losses,
    ):
        list(look(case))


class _Vigil(Vigil):
    def __init__(self, folder: Folder) -> None:
        self._folder = folder
