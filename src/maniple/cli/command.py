"""Click's commands with what maniple adds: settings from files and variables, and help in groups."""

import re
import shlex
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from maniple.environment import options_from_variables, personal_settings
from maniple.errors import InvalidArgument
from maniple.settings.files import FOLDER_FILE, SESSION_KEYS, SUFFIXES, SourcedValue, read_file
from maniple.settings.options import GROUPS, OUTPUT, Setting, all_settings, option_variable

_MAX_NAME = 26  # columns; the description of an option with a longer name begins on the next line
_VALUES = "maniple.settings"  # key of the resolved values in click's context
_PACES = ("every", "maximum_rate")  # one or the other
# A key is dropped if a source of higher precedence gives the key beside it.
_GIVES_WAY_TO = {
    "every": "maximum_rate",
    "maximum_rate": "every",
    "name": "resume",
    "model": "script",
    "script": "model",
    "args": "model",
}
# In a file for all runs, encryption applies only to runs that listen.
_ENCRYPTION = {"tls", "certificate", "key"}
_LISTENS = {"listen", "hosts"}
_LOCAL = "127.0.0.1:0"  # where a host listens whose workers join by themselves, unless a setting says otherwise


class _NumberOr(click.ParamType[float | str]):
    """A number, or one word."""

    name = "number"

    def __init__(self, word: str) -> None:
        self._word = word

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        if value == self._word:
            return self._word
        try:
            return float(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor {self._word!r}.", param, ctx)


class SettingOption(click.Option):
    """The option of a declared setting."""

    def __init__(self, setting: Setting, command: str) -> None:
        differs = setting.commands[command]
        name = f"{setting.flag}/--no-{setting.flag[2:]}" if setting.negatable else setting.flag
        kind = {int: click.INT, float: click.FLOAT, str: click.STRING}.get(setting.kind)
        if setting.word:
            kind = _NumberOr(setting.word)
        if setting.choices:
            kind = click.Choice(setting.choices)
        elif setting.kind not in {int, float, str, bool}:
            kind = click.Path(path_type=setting.kind)
        is_flag = setting.kind is bool
        default = differs.get("default", setting.default)
        shows_default = differs.get("shows_default", setting.shows_default)
        super().__init__(
            [*([setting.short] if setting.short else []), name, setting.name],
            type=click.BOOL if is_flag else kind,
            is_flag=is_flag,
            multiple=setting.multiple,
            metavar=setting.metavar,
            default=default,
            show_default=f"{default:g}" if shows_default and isinstance(default, float) else shows_default,
            help=differs.get("help", setting.help),
        )
        self.group = setting.group


def takes_settings(command: str) -> Callable[[click.Command], click.Command]:
    """Decorate a command: give it the options of all settings that name it."""

    def add(decorated: click.Command) -> click.Command:
        decorated.params += [SettingOption(one, command) for one in all_settings().values() if command in one.commands]
        return decorated

    return add


def option_keys(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by their keys: `--snapshot-every` is `snapshot_every`."""
    keys: dict[str, click.Option] = {}
    for option in command.params:
        long = next((name for name in option.opts if name.startswith("--")), None)
        if isinstance(option, click.Option) and long and not option.is_eager:
            keys[long.removeprefix("--").replace("-", "_")] = option
    return keys


class SettingsCommand(click.Command):
    """A command that also takes its options from settings files and environment variables, with help in groups."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        help = "Print each setting and where it comes from, and start nothing."
        self.params.append(
            click.Option(["--show-settings"], is_flag=True, is_eager=True, expose_value=False, help=help)
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line, with defaults from the other sources."""
        typed = self._typed(ctx, args)
        help_option = self.get_help_option(ctx)
        if ctx.resilient_parsing or (help_option is not None and help_option.name in typed):
            return super().parse_args(ctx, args)
        settings = ResolvedSettings(self, ctx, typed)
        ctx.default_map = settings.defaults
        rest = super().parse_args(ctx, args)
        settings.apply(ctx.params)
        if "show_settings" in typed:
            click.echo(settings.table(ctx.params))
            ctx.exit(0)
        ctx.meta[_VALUES] = settings.values
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. An error about a value that was not typed says where the value comes from."""
        try:
            return super().invoke(ctx)
        except InvalidArgument as error:
            values: dict[str, SourcedValue] = ctx.meta[_VALUES]
            origins = [
                f"{key} is {str(one)!r} by {one.origin}"
                for key, one in values.items()
                if re.search(rf"\b{key.replace('_', '[-_]')}\b", str(error), re.IGNORECASE) and str(one) in str(error)
            ]
            error.args = (f"{error} ({'; '.join(origins)})" if origins else str(error),)
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        for option in sorted(options, key=lambda option: not isinstance(option, SettingOption)):
            if (row := option.get_help_record(ctx)) is not None:
                sections[getattr(option, "group", OUTPUT)].append(row)
        names = [len(name) for rows in sections.values() for name, _ in rows]
        width = max(length for length in names if length <= _MAX_NAME)
        for group, rows in sections.items():
            if rows:  # descriptions begin in the same column in all sections
                longest = min(width, max(len(name) for name, _ in rows))
                with formatter.section(group):
                    formatter.write_dl(rows, col_max=width, col_spacing=width - longest + 2)

    def _typed(self, ctx: click.Context, args: list[str]) -> dict[str, Any]:
        """What the command line gives, by the names of parameters, before conversion."""
        values = self.make_parser(ctx).parse_args(args=list(args))[0]
        return {name: value for name, value in values.items() if isinstance(value, str | bool | int | list | tuple)}


class ResolvedSettings:
    """The values of all settings that the command line does not give: which value of a setting counts.

    command line > MANIPLE_<KEY> > session file > ./.maniple.yaml > ~/.config/maniple.yaml > default
    """

    def __init__(self, command: click.Command, context: click.Context, typed: Mapping[str, Any]) -> None:
        self._context, self._typed, self._options = context, typed, option_keys(command)
        self._runs_script = any(param.name == "script" for param in command.params)
        self._session = _session_file(typed)
        self._notes: list[str] = []
        sources = [self._from_variables(), *self._from_files()]
        given = {key for key, option in self._options.items() if option.name in typed}
        given |= {"script"} if "script" in typed and self._session is None else set()
        has_default = {key for key, one in self._options.items() if one.default and isinstance(one.default, str)}
        mine = {*self._options, *(SESSION_KEYS if self._runs_script else ())}
        self.values = {key: one for key, one in resolve(given, sources, has_default).items() if key in mine}

    @property
    def defaults(self) -> dict[str, Any]:
        """The values as click's `default_map`."""
        return {
            self._options[key].name or key: _convert(self._context, key, self._options[key], one)
            for key, one in self.values.items()
            if key in self._options
        }

    def apply(self, params: dict[str, Any]) -> None:
        """Put the session file's script and arguments into the command's parameters, and print notes."""
        if self._session is not None:
            params["session"] = self._session
        if self._session is not None and self._runs_script:
            if _starts_together(self.values):
                is_model = params.get("model") is not None and "script" not in self.values
                params["script"] = None if is_model else self._script()
                params["args"] = params["args"] or self._arguments()
            else:
                self._check_no_workers()
                del params["script"], params["args"]
        if not params["quiet"]:
            for note in self._notes:
                click.echo(f"maniple: {note}", err=True)

    def table(self, params: dict[str, Any]) -> str:
        """A line for each setting: key, value, and where the value comes from."""
        rows = [(key, _text(params[option.name or key]), self._origin(key)) for key, option in self._options.items()]
        rows += [(key, _text(params[key]), self._origin(key)) for key in ("script", "args") if key in params]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{key:{widths[0]}}  {text:{widths[1]}}  {origin}" for key, text, origin in rows)

    def _origin(self, key: str) -> str:
        name = self._options[key].name if key in self._options else key
        is_session = key == "script" and self._session is not None
        if self._typed.get(name or key, ()) != () and not is_session:
            return "command line"
        return self.values[key].origin if key in self.values else "default"

    def _from_variables(self) -> dict[str, SourcedValue]:
        values: dict[str, SourcedValue] = {}
        for key, text in options_from_variables(self._options).items():
            option = self._options[key]
            is_many = (option.multiple or option.nargs != 1) and not _is_command(option)
            value = tuple(option.type.split_envvar_value(text)) if is_many else text
            values[key] = SourcedValue(value, option_variable(key))
            _convert(self._context, key, option, values[key])  # a wrong value is an error even if another source counts
        return values

    def _from_files(self) -> list[dict[str, SourcedValue]]:
        known, personal = _all_options(self._context) | self._options, personal_settings()
        files = [(self._session, False)] if self._session is not None else []
        files += [(path, True) for path in (FOLDER_FILE, personal) if _exists(path)]
        sources: list[dict[str, SourcedValue]] = []
        for path, is_general in files:
            values, notes = read_file(path, known, personal, is_general=is_general)
            for key in values.keys() & known.keys():
                _convert(self._context, key, known[key], values[key])  # here too
            sources.append(values)
            self._notes += notes
        if self._runs_script and sources and (one := sources[0].get("sync_start")) is not None:
            if _starts_together(sources[0]):
                self._notes.append(f"{one.origin}: sync_start: the workers start with their host, as always")
            else:
                self._notes.append(f"{one.origin}: sync_start: the host starts alone, and workers join by themselves")
                sources.append({"listen": SourcedValue(_LOCAL, one.origin)})
        return sources

    def _script(self) -> Path:
        if (one := self.values.get("script")) is None:
            raise InvalidArgument(
                f"{self._session} names no script to run. Add a line `script: train.py`, or `model: net.py:Net`; "
                "paths begin at the file's folder."
            )
        return _anchored(_single("script", one), one)

    def _arguments(self) -> tuple[str, ...]:
        if (one := self.values.get("args")) is None or isinstance(one.value, tuple):
            return () if one is None else tuple(one.value)
        try:
            return tuple(shlex.split(one.value))
        except ValueError as error:
            raise InvalidArgument(
                f"{one.origin}: args {one.value!r} cannot be split into words: {error}. Write a list."
            ) from None

    def _check_no_workers(self) -> None:
        if "workers" in self._typed:
            origin = self.values["sync_start"].origin
            raise InvalidArgument(
                f"{origin}: with sync_start: false the host starts no workers, but --workers {self._typed['workers']} "
                "was given. Leave one of them out."
            )


def resolve(
    given: Set[str], sources: list[dict[str, SourcedValue]], has_default: Set[str] = frozenset()
) -> dict[str, SourcedValue]:
    """The values that count.

    Args:
        given: keys that the command line gives; they count more than any source.
        sources: variables and files; the first counts most.
        has_default: keys that have a value even if no source gives one.
    """
    resolved: dict[str, SourcedValue] = {}
    for source in sources:
        if all(pace in source for pace in _PACES):
            one, other = (source[pace].origin for pace in _PACES)
            raise InvalidArgument(f"{one} sets every, and {other} maximum_rate: these are two paces. Keep one of them.")
        before = given | resolved.keys()
        resolved |= {
            key: one for key, one in source.items() if key not in before and _GIVES_WAY_TO.get(key) not in before
        }
    have = given | resolved.keys() | has_default
    return {key: one for key, one in resolved.items() if not one.is_general or _applies(key, have)}


def _applies(key: str, have: Set[str]) -> bool:
    """Whether a file for all runs may set this key for a run that has these keys."""
    if key in _ENCRYPTION:
        return bool(have & _LISTENS)
    is_kept = key in all_settings() and all_settings()[key].resume == "kept"
    return not (is_kept and "resume" in have)


def _convert(context: click.Context, key: str, option: click.Option, one: SourcedValue) -> Any:
    """The value as the command line would give it; raises InvalidArgument if it cannot be one."""
    try:
        return option.type_cast_value(context, _as_typed(key, option, one))
    except click.BadParameter as error:
        takes = option.metavar or option.type.name.upper()
        form = "true or false" if option.is_flag else f"what --{key.replace('_', '-')} takes ({takes})"
        raise InvalidArgument(
            f"{one.origin}: {key} cannot be {str(one)!r}: {error.message.rstrip('.')}. Write {form}, or leave it out."
        ) from None


def _as_typed(key: str, option: click.Option, one: SourcedValue) -> str | tuple[str, ...]:
    """The value as the command line would spell it."""
    words = (one.value,) if isinstance(one.value, str) else one.value
    if one.folder is not None and _is_path(option):
        words = tuple(_anchor_word(word, option, one) for word in words)
    if option.multiple or option.nargs != 1:
        return words
    if isinstance(one.value, tuple) and option.metavar != "LIST":
        _single(key, one)
    return ",".join(words)


def _is_command(option: click.Option) -> bool:
    """The option takes a script with its arguments."""
    return option.metavar == "SCRIPT"


def _is_path(option: click.Option) -> bool:
    return isinstance(option.type, click.Path) or (option.metavar or "").startswith("FILE") or _is_command(option)


def _anchor_word(text: str, option: click.Option, one: SourcedValue) -> str:
    path, space, rest = text.partition(" ") if _is_command(option) else (text, "", "")
    return f"{_anchored(path, one)}{space}{rest}"


def _anchored(path: str, one: SourcedValue) -> Path:
    """A path of a file, which begins at the file's folder or at `~`."""
    try:
        return Path(one.folder or "", Path(path).expanduser())
    except RuntimeError as error:
        raise InvalidArgument(f"{one.origin}: {path!r} is no path: {error} Write it out.") from None


def _session_file(typed: Mapping[str, Any]) -> Path | None:
    """The session file that the command line names: instead of a script, or as the argument of `maniple serve`."""
    if "session" in typed and not typed["session"].endswith(SUFFIXES):
        raise InvalidArgument(
            f"{typed['session']!r} is no session file: its name does not end in .yaml. `maniple serve` runs no script; "
            "`maniple run` and `maniple join` do."
        )
    name = str(typed.get("session", typed.get("script", "")))
    return Path(name) if name.endswith(SUFFIXES) else None


def _starts_together(values: Mapping[str, SourcedValue]) -> bool:
    """Workers are started with their host, unless `sync_start: false` lets them join by themselves."""
    if (one := values.get("sync_start")) is None:
        return True
    try:
        return click.BOOL.convert(_single("sync_start", one), None, None)
    except click.BadParameter as error:
        raise InvalidArgument(
            f"{one.origin}: sync_start cannot be {one.value!r}: {error.message} Write true or false."
        ) from None


def _single(key: str, one: SourcedValue) -> str:
    if isinstance(one.value, str):
        return one.value
    raise InvalidArgument(f"{one.origin}: {key} is a list of {len(one.value)} values, but takes one. Keep one of them.")


def _exists(path: Path) -> bool:
    with suppress(OSError):  # a home folder of somebody else
        return path.exists()
    return False


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return shlex.join(map(str, value)) or "-"
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value in {None, ""} else str(value)


def _all_options(ctx: click.Context) -> dict[str, click.Option]:
    """The options of all commands that read settings files: one file may serve several of them."""
    root = ctx.find_root().command
    commands = root.commands.values() if isinstance(root, click.Group) else [root]
    return {
        key: option
        for command in commands
        if isinstance(command, SettingsCommand)
        for key, option in option_keys(command).items()
    }


class CommandGroups(click.Group):
    """A group whose help lists commands under headings, each with its whole short description."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        self.headings: dict[str, list[str]] = {}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        for heading, names in self.headings.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].short_help or "") for name in names])


PATH = click.Path(path_type=Path)


def reaches_host(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command that connects to a host: give it --token-file and --certificate."""
    certificate = click.option(
        "--certificate", type=PATH, metavar="FILE", help="The host's certificate, if it encrypts."
    )
    token = "A copy of the run's file `token`. Default: MANIPLE_TOKEN_FILE or MANIPLE_TOKEN."
    return click.option("--token-file", type=PATH, metavar="FILE", help=token)(certificate(command))


def seconds_option(name: str, parameter: str, default: float, help: str) -> Callable[[Any], Any]:
    return click.option(name, parameter, type=float, default=default, show_default=True, metavar="SECONDS", help=help)
