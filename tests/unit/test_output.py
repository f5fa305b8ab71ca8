"""What a process prints: brought to its log, and kept as far as possible while the disk does not take it."""

import os

import pytest

from maniple.launch.death import last_words
from maniple.launch.output import Output


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
    assert not output.problem and not output.kept


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
            output._shut()  # as when nothing comes for a while
    assert (tmp_path / "worker-0.log").read_text() == "epoch 1: .... done\n"


def test_log_that_cannot_be_written_takes_the_newest_lines_when_it_can_again(printing, tmp_path):
    output = printing("logs/worker-0.log")  # there is no such folder
    for k in range(100):
        os.write(output.pipe, f"{k} {'x' * 1000}\n".encode())
        output.finish()
    assert "No such file" in output.problem
    assert len(output.kept) == 1 << 16
    assert "    99 xxx" in last_words(tmp_path / "logs/worker-0.log", output.kept)
    (tmp_path / "logs").mkdir()
    os.write(output.pipe, b"again\n")
    output.finish()
    text = (tmp_path / "logs/worker-0.log").read_text()
    missing = sum(len(f"{k} {'x' * 1000}\n") for k in range(100)) - (1 << 16)
    assert f"[maniple: {missing:,} bytes are missing here: No such file or directory]" in text.splitlines()[1]
    assert text.endswith(f"99 {'x' * 1000}\nagain\n")
    assert not output.kept


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
