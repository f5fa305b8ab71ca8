"""`maniple.Session`: start `maniple run` from Python, and end it with the program."""

import difflib
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, cast

import click

from maniple.cli import cli
from maniple.cli.command import option_keys
from maniple.errors import InvalidArgument
from maniple.model.contract import loading
from maniple.record.folder import fresh_name
from maniple.user_class import parse_class

_END_S = 60.0  # how long a run may take to end: workers leave, and the host saves the center


class Session:
    """One run, started from Python as `maniple run` would start it.

        with maniple.Session(model="examples/models/net.py:Net", rule="easgd", workers=2) as session:
            exit_code = session.wait()
        print(session.folder)

    The run ends in order if the block is left early, at Ctrl-C, at an exception, and when this program ends.

    Args:
        model: the class to train, as FILE.py:CLASS or the class itself, if workers can import its file.
        script: a script to run instead, with its arguments `args`. With `resume` both may be left out: the run
            continues with its own program.
        options: any option of `maniple run`, with `_` for `-`: `workers=2`, `max_epochs=3`, `bind=False`,
            `model_arg=["lr=0.1"]`; `model_arg` may also be a dict.
    """

    def __init__(
        self,
        model: str | type | None = None,
        *,
        script: str | Path | None = None,
        args: Sequence[str] = (),
        **options: Any,
    ) -> None:
        is_repeated = options.get("resume") is not None and model is None and script is None
        if (model is None) == (script is None) and not is_repeated:
            raise InvalidArgument(
                f"a session runs a model or a script, and was given {'neither' if model is None else 'both'}. "
                'Write Session(model="net.py:Net") or Session(script="train.py").'
            )
        spec = None if model is None else _spec(model)
        file = parse_class(spec, "--model")[0] if spec else Path(str(script))
        if options.get("resume") is None:  # on the command line, so that no file or variable moves the folder
            runs = options["runs"] = Path(options.get("runs") or "runs")
            options["name"] = options.get("name") or fresh_name(runs, file)
            self._folder = runs / str(options["name"])
        else:
            self._folder = Path(options["resume"])
        words = [] if spec is None else ["--model", spec]
        self._words = ["run", *words, *command_words(options), *([] if script is None else [str(script), *args])]
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._folder.resolve()

    @property
    def is_running(self) -> bool:
        """Whether the run was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start the run in the background."""
        if loading:
            raise InvalidArgument(
                f"the file of {loading[-1]} starts a session while a worker loads it, so each worker would start "
                'another. Put the start under `if __name__ == "__main__":`.'
            )
        if self._process is not None:
            raise InvalidArgument("this session was started already, and a session is one run. Create another one.")
        reading, self._pipe = os.pipe()
        command = [sys.executable, "-m", "maniple.cli", "--tied", str(reading), *self._words]
        try:
            # A separate process group: only this process gets Ctrl-C from the terminal, and passes it on once.
            self._process = subprocess.Popen(command, pass_fds=[reading], start_new_session=True)
        finally:
            os.close(reading)
        return self

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end of the run; returns its exit code. Raises TimeoutError after `timeout_s`."""
        process = self._started()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"the run {self.folder} is still running after {timeout_s:g} s. Wait longer, or call end()."
            ) from None
        except BaseException:
            self.end()
            raise
        self._close()
        return process.returncode

    def end(self) -> int:
        """End the run as Ctrl-C does, with the center saved; returns its exit code."""
        process = self._started()
        try:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            process.wait(_END_S)
        except BaseException:  # too slow, or a second Ctrl-C
            process.kill()  # the kernel then kills its workers
            process.wait()
            raise
        finally:
            self._close()
        return process.returncode

    def __enter__(self) -> Self:
        return self.start() if self._process is None else self

    def __exit__(self, *_: object) -> None:
        if self.is_running:
            self.end()
        self._close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise InvalidArgument("this session has not been started. Call start() first.")
        return self._process

    def _close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


def command_words(options: Mapping[str, Any]) -> list[str]:
    """Options of `maniple run` as command-line arguments."""
    known = option_keys(cli.commands["run"])
    words: list[str] = []
    for key, value in options.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else "`maniple run --help` lists them."
            raise InvalidArgument(f"{key}={value!r} is no option of a session. {hint}")
        words += _words(known[key], value)
    return words


def _words(option: click.Option, value: Any) -> list[str]:
    name = option.opts[-1]
    if value is None:
        return []
    if option.is_flag:
        off = option.secondary_opts
        return [name] if value else off[:1]
    if isinstance(value, Mapping):
        value = [f"{key}={_text(one)}" for key, one in cast(Mapping[str, Any], value).items()]
    if isinstance(value, list | tuple):
        values = [str(one) for one in cast(Sequence[Any], value)]
        return [f"{name}={one}" for one in values] if option.multiple else [f"{name}={','.join(values)}"]
    return [f"{name}={value}"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _spec(model: str | type) -> str:
    if isinstance(model, str):
        return model
    try:
        file = inspect.getfile(model)
    except (TypeError, OSError):
        file = ""
    if not file.endswith(".py") or not model.__qualname__.isidentifier():
        raise InvalidArgument(
            f"{model.__qualname__} cannot be imported by a worker: it is defined in {file or 'no file'}. Define it at "
            "the top level of a file, and import it from there."
        )
    return f"{file}:{model.__qualname__}"
