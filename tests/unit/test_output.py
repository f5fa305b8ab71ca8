"""What a process prints: brought to its log, and kept as far as possible while the disk does not take it."""

import io
import os
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress
from tqdm import tqdm

from maniple.launch.output import Output, ProgressFilter
from maniple.text import last_words


@pytest.fixture
def printing(tmp_path):
    """Gives outputs; what is left of them is closed."""
    pipes: list[int] = []

    def printing(name: str = "worker-0.log", before: Output | None = None) -> Output:
        output = Output(tmp_path / name, before)
        pipes.append(output.pipe)
        return output

    yield printing
    for pipe in pipes:
        os.close(pipe)


def test_all_that_was_printed_is_in_the_log_when_the_process_is_collected(printing, tmp_path):
    output = printing()
    for k in range(1000):
        os.write(output.pipe, f"{k}\n".encode())
    output.finish()
    assert (tmp_path / "worker-0.log").read_text().split() == [str(k) for k in range(1000)]
    assert not output.problem and not output.unwritten


def test_process_that_prints_nothing_has_an_empty_log(printing, tmp_path):
    printing()
    assert (tmp_path / "worker-0.log").read_text() == ""


def test_line_that_a_kill_has_cut_is_not_glued_to_the_first_of_the_next_process(printing, tmp_path):
    (tmp_path / "worker-0.log").write_text("whole\ncut in the mid")
    output = printing()
    os.write(output.pipe, b"the next life\n")
    output.finish()
    assert (tmp_path / "worker-0.log").read_text() == "whole\ncut in the mid\nthe next life\n"


def test_line_that_is_printed_in_pieces_stays_one_though_the_log_was_closed_meanwhile(printing, tmp_path):
    output = printing()
    for piece in (b"epoch 1: ", b"....", b" done\n"):
        os.write(output.pipe, piece)
        output.finish()
        with output._lock:
            output._close_log()  # as when nothing comes for a while
    assert (tmp_path / "worker-0.log").read_text() == "epoch 1: .... done\n"


def test_log_that_cannot_be_written_takes_the_newest_lines_when_it_can_again(printing, tmp_path):
    output = printing("logs/worker-0.log")  # there is no such folder
    for k in range(100):
        os.write(output.pipe, f"{k} {'x' * 1000}\n".encode())
        output.finish()
    assert "No such file" in output.problem
    assert len(output.unwritten) == 1 << 16
    assert "    99 xxx" in last_words(tmp_path / "logs/worker-0.log", output.unwritten)
    (tmp_path / "logs").mkdir()
    os.write(output.pipe, b"again\n")
    output.finish()
    text = (tmp_path / "logs/worker-0.log").read_text()
    missing = sum(len(f"{k} {'x' * 1000}\n") for k in range(100)) - (1 << 16)
    assert f"[maniple: {missing:,} bytes are missing here: No such file or directory]" in text.splitlines()[1]
    assert text.endswith(f"99 {'x' * 1000}\nagain\n")
    assert not output.unwritten


def test_what_a_process_could_not_write_comes_before_the_lines_of_its_successor(printing, tmp_path):
    first = printing("logs/worker-0.log")
    os.write(first.pipe, b"one\n")
    first.finish()
    second = printing("logs/worker-0.log", first)
    (tmp_path / "logs").mkdir()
    os.write(second.pipe, b"two\n")
    for output in (second, first):
        output.finish()
    assert (tmp_path / "logs/worker-0.log").read_text() == "one\ntwo\n"


class _Pipe:
    """What a progress bar writes to."""

    encoding = "utf-8"

    def __init__(self, output: Output) -> None:
        self._output = output

    def write(self, text: str) -> None:
        os.write(self._output.pipe, text.encode())

    def flush(self) -> None:
        pass


def test_a_progress_bar_leaves_its_last_state_in_the_log(printing, tmp_path):
    output = printing()
    os.write(output.pipe, b"begin\n")
    for _ in tqdm(range(2000), file=_Pipe(output), mininterval=0, miniters=1, desc="épaque"):
        output.finish()
        break
    for _ in tqdm(range(2000), file=_Pipe(output), mininterval=0, miniters=1, desc="épaque"):
        pass
    os.write(output.pipe, b"end\n")
    output.finish()
    first, *bars, last = (tmp_path / "worker-0.log").read_text().splitlines()
    assert (first, last) == ("begin", "end")
    assert len(bars) <= 3 and bars[-1].startswith("épaque: 100%|██████████| 2000/2000 [")
    assert not any("\r" in line for line in bars)


def test_nested_bars_leave_a_line_for_each_that_stays(printing, tmp_path):
    output, pipe = printing(), None
    pipe = _Pipe(output)
    options = {"file": pipe, "mininterval": 0, "miniters": 1}
    for epoch in tqdm(range(3), desc="epochs", **options):
        for _ in tqdm(range(500), desc=f"epoch {epoch}", leave=False, **options):
            pass
        tqdm.write(f"validated {epoch}", file=pipe)
    output.finish()
    lines = (tmp_path / "worker-0.log").read_text().splitlines()
    assert [line for line in lines if "validated" in line] == [f"validated {epoch}" for epoch in range(3)]
    assert len(lines) < 10 and lines[-1].startswith("epochs: 100%|██████████| 3/3 [")
    assert "\x1b" not in "".join(lines) and "\r" not in "".join(lines)


def redrawn(*pieces: bytes, every_s: float = 0.0) -> bytes:
    """What a log holds of these pieces, printed with so many seconds between them."""
    redraw = ProgressFilter()
    logged = [redraw.feed(piece, every_s * number) for number, piece in enumerate(pieces)]
    return b"".join(logged) + redraw.flush()


PRINTED = st.lists(
    st.sampled_from([b"\n", b"\r", b"\r\n", b"\x08", b"\x1b[A", b"\x1b[2A", b"\x1b[K", b"\x1b[31m", b"\x1b[?25l"])
    | st.text("aé█ ", min_size=1).map(str.encode),
    max_size=30,
)


@given(PRINTED, st.lists(st.integers(1, 6)))
@example([b"\r", b"\x08", b"\n"], [1, 1])
def test_output_is_the_same_however_the_pipe_cuts_it(printed, cuts):
    whole = b"".join(printed)
    ends = [0, *(sum(cuts[: k + 1]) for k in range(len(cuts)))]
    pieces = [whole[a:b] for a, b in zip(ends, [*ends[1:], len(whole)], strict=True)]
    assert redrawn(*filter(None, pieces)) == redrawn(whole)


@given(st.lists(st.text("aé█ \t", max_size=5).map(str.encode)), st.lists(st.integers(1, 6)))
def test_ordinary_lines_come_to_the_log_as_they_were_printed(lines, cuts):
    whole = b"\n".join(lines)
    redraw = ProgressFilter()
    assert redraw.feed(whole, 0.0) == whole and redraw.is_plain
    assert redrawn(whole.replace(b"\n", b"\r\n")) == whole


def test_a_long_bar_comes_to_the_log_less_and_less_often():
    redraw, logged = ProgressFilter(), []
    for step in range(36000):  # an hour
        logged += redraw.feed(b"\r%5d of 36000 steps  " % step, step / 10).splitlines()
    assert 60 < len(logged) < 70
    assert logged[0] == b"   50 of 36000 steps" and logged[1] == b"  100 of 36000 steps"
    assert redraw.live == ("35999 of 36000 steps",)
    assert redraw.feed(b"\n", 3600.0) == b""
    assert redraw.due(3601.0) == b"35999 of 36000 steps\n" and redraw.is_plain


@pytest.mark.parametrize(
    "printed, logged",
    [
        (b"epoch 1: \rdone\n", b"epoch 1: \ndone\n"),  # the first part was in the log already
        (b"\r 10%\r 20%\r100%\nnext\n", b"100%\nnext\n"),
        (b"\r 10%\r 20%", b" 20%\n"),  # of a process that dies
        (b"\r 10%\r    \rnext\n", b"next\n"),  # a bar that was removed
        (b"one\n\rtwo\x1b[Kthree\r\x1b[2Kfour\nfive", b"one\nfour\nfive"),
        ("\r|\b/\b-\b█\b✓\n".encode(), "✓\n".encode()),
        (b"\router 1\n\rinner 1\x1b[A\n\rinner 2\x1b[A\router 2\n\n", b"outer 2\ninner 2\n"),
        (b"one\n\x1b[1Atwo\n", b"one\ntwo\n"),  # a line that is in the log stays there
        (b"\x1b[32mgreen\x1b[0m\n", b"\x1b[32mgreen\x1b[0m\n"),
        (b"\r\x1b[32m 5%\x1b[0m  \r\x1b[0m\nnext\n", b"next\n"),
        (b"\r1\n\nnext\n", b"1\n\nnext\n"),
        (b"cut \x1b[3", b"cut \x1b[3"),
    ],
)
def test_what_is_redrawn_is_logged_as_a_terminal_shows_it(printed, logged):
    assert redrawn(printed) == logged


def test_rows_of_a_display_that_is_drawn_again_are_its_last():
    def draw(progress: Progress) -> None:
        first, second = progress.add_task("first", total=50), progress.add_task("second", total=50)
        for k in range(50):
            progress.update(first, advance=1)
            progress.update(second, advance=1)
            progress.refresh()
            if k == 25:
                progress.console.print("in between")

    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    with Progress(console=console, auto_refresh=False) as progress:
        draw(progress)
    lines = re.sub(rb"\x1b\[[0-9;]*m", b"", redrawn(console.file.getvalue().encode())).decode().splitlines()
    assert [line.split()[0] for line in lines] == ["in", "first", "second"]
    assert all("100%" in line for line in lines[1:])
