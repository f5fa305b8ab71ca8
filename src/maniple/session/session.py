"""The settings of one call: gathered from variables and files, checked, settled, and shown on request."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from maniple.errors import InvalidArgument
from maniple.session.file import SUFFIXES, Setting
from maniple.session.keys import OF_SESSION, anchored, convert
from maniple.session.settle import settle
from maniple.session.sources import from_file, from_variables, general_files

_LISTEN = "127.0.0.1:0"  # of a host without workers of its own, if nothing else is said


class Session:
    """What the command line leaves open, from all other sources.

    Args:
        context: the call.
        typed: what the command line gives, by the names of parameters.
        options: the command's options by their keys.
        known: those of all commands that read the same files.
        runs_script: the command runs a script, which a session file may name.
    """

    def __init__(
        self,
        context: click.Context,
        typed: Mapping[str, Any],
        options: dict[str, click.Option],
        known: dict[str, click.Option],
        *,
        runs_script: bool,
    ) -> None:
        self._context, self._typed, self._options, self._runs_script = context, typed, options, runs_script
        self._path = _named_file(typed)
        self._notes: list[str] = []
        sources = [from_variables(context, options), *self._files(known | options)]
        given = {key for key, option in options.items() if option.name in typed}
        given |= {"script"} if "script" in typed and self._path is None else set()
        has_default = {key for key, option in options.items() if option.default and isinstance(option.default, str)}
        mine = {*options, *(OF_SESSION if runs_script else ())}
        self.settled = {key: one for key, one in settle(given, sources, has_default).items() if key in mine}

    @property
    def defaults(self) -> dict[str, Any]:
        """The settled values, by the names of parameters."""
        return {
            self._options[key].name or key: convert(self._context, key, self._options[key], setting)
            for key, setting in self.settled.items()
            if key in self._options
        }

    def apply(self, params: dict[str, Any]) -> None:
        """Put the session file's script and arguments into the command's parameters, and tell what was translated."""
        if self._path is not None:
            params["session"] = self._path
        if self._path is not None and self._runs_script:
            if _starts_together(self.settled):
                params["script"] = None if _is_model(params, self.settled) else self._script()
                params["args"] = params["args"] or self._arguments()
            else:
                self._refuse_workers()
                del params["script"], params["args"]
        if not params["quiet"]:
            for note in self._notes:
                click.echo(f"maniple: {note}", err=True)

    def table(self, params: dict[str, Any]) -> str:
        """Each setting, its value and where it comes from."""
        rows = [(key, _text(params[option.name or key]), self._origin(key)) for key, option in self._options.items()]
        rows += [(key, _text(params[key]), self._origin(key)) for key in ("script", "args") if key in params]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{key:{widths[0]}}  {text:{widths[1]}}  {origin}" for key, text, origin in rows)

    def _origin(self, key: str) -> str:
        name = self._options[key].name if key in self._options else key
        is_session = key == "script" and self._path is not None
        if self._typed.get(name or key, ()) != () and not is_session:
            return "command line"
        return self.settled[key].origin if key in self.settled else "default"

    def _files(self, known: dict[str, click.Option]) -> list[dict[str, Setting]]:
        files = [(self._path, False)] if self._path is not None else []
        files += [(path, True) for path in general_files()]
        found: list[dict[str, Setting]] = []
        for path, is_general in files:
            settings, notes = from_file(self._context, path, known, is_general=is_general)
            found.append(settings)
            self._notes += notes
        if self._runs_script and found and "sync_start" in found[0]:
            found += self._old_start(found[0])
        return found

    def _old_start(self, settings: dict[str, Setting]) -> list[dict[str, Setting]]:
        """What older systems call sync_start; workers that join need somewhere to join, if nobody says where."""
        setting = settings["sync_start"]
        if _starts_together(settings):
            self._notes.append(f"{setting.origin}: sync_start: the workers start with their host, as always")
            return []
        self._notes.append(f"{setting.origin}: sync_start: the host starts alone, and workers join by themselves")
        return [{"listen": Setting(_LISTEN, setting.origin)}]

    def _script(self) -> Path:
        if (setting := self.settled.get("script")) is None:
            raise InvalidArgument(
                f"{self._path} names no script to run. Add a line `script: train.py`, or `model: net.py:Net`; "
                "paths begin at the file's folder."
            )
        return anchored(_single("script", setting), setting)

    def _arguments(self) -> tuple[str, ...]:
        if (setting := self.settled.get("args")) is None or isinstance(setting.value, tuple):
            return () if setting is None else tuple(setting.value)
        try:
            return tuple(shlex.split(setting.value))
        except ValueError as error:
            raise InvalidArgument(
                f"{setting.origin}: args {setting.value!r} cannot be split into words: {error}. Write a list."
            ) from None

    def _refuse_workers(self) -> None:
        """A number of workers that was typed is meant."""
        if "workers" in self._typed:
            origin = self.settled["sync_start"].origin
            raise InvalidArgument(
                f"{origin}: with sync_start: false the host starts no workers, but --workers {self._typed['workers']} "
                "was given. Leave one of them out."
            )


def _is_model(params: Mapping[str, Any], settled: Mapping[str, Setting]) -> bool:
    """The class of a model is trained, and no script was given beside it."""
    return params.get("model") is not None and "script" not in settled


def _named_file(typed: Mapping[str, Any]) -> Path | None:
    """The session file that the command line names: in place of the script, or as the argument of a host alone."""
    if "session" in typed and not typed["session"].endswith(SUFFIXES):
        raise InvalidArgument(
            f"{typed['session']!r} is no session file: its name does not end in .yaml. A host alone runs no script; "
            "`maniple run` does, and `maniple join`."
        )
    name = str(typed.get("session", typed.get("script", "")))
    return Path(name) if name.endswith(SUFFIXES) else None


def _starts_together(settings: Mapping[str, Setting]) -> bool:
    """Workers are started with their host, which is the rule; else they join by themselves."""
    if (setting := settings.get("sync_start")) is None:
        return True
    try:
        return click.BOOL.convert(_single("sync_start", setting), None, None)
    except click.BadParameter as error:
        raise InvalidArgument(f"{setting.origin}: sync_start cannot be {setting.value!r}: {error.message}") from None


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return shlex.join(map(str, value)) or "-"
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value in {None, ""} else str(value)


def _single(key: str, setting: Setting) -> str:
    if isinstance(setting.value, str):
        return setting.value
    raise InvalidArgument(f"{setting.origin}: {key} is a list of {len(setting.value)} values, but takes one.")
